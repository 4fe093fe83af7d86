"""Find structures, alignments and hits in folders and alignment databases, and tell them apart by their names.

Also read the query of an alignment without the rest, and the alignments that belong to given sequences.

OpenFold's alignment databases are the files of many chains joined into a few, and a JSON index of their offsets.  There
are two kinds of index (openfold/docs/source/Aux_seq_files.md): one for all shards, as OpenProteinSet's tools make it,
{"3lrm_A": {"db": "alignment_db_0.db", "files": [["uniref90_hits.a3m", start, size], ...]}, ...}, and one per shard,
{"3lrm_A": [["uniref90_hits.a3m", start, size], ...], ...}, where `NAME.index` belongs to `NAME.db` beside it.
An index may only name shards in its own folder or below; they may be symbolic links, which only its owner can make.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path, PurePath, PurePosixPath

from warpfold.data.formats.alignment import (
    Alignment,
    as_row,
    is_complex,
    parse_alignment,
    parse_chain_alignments,
    parse_complex_a3m,
)
from warpfold.errors import UserError
from warpfold.files import LARGEST, open_regular, opened, pread, read_file

STRUCTURES = (".cif", ".mmcif", ".pdb", ".ent")
ALIGNMENTS = (".a3m", ".a2m", ".sto", ".stk", ".stockholm", ".aln", ".afa")  # .fasta only if named itself
HITS = (".hhr", ".sto", ".a3m")
DATABASE = ".index"
_FARTHEST = 10**30  # bytes; a larger number is damage, and may be too large to be printed or divided
_EXPECTED = 'expected {CHAIN: {"db": FILE, "files": [[NAME, START, SIZE], ...]}, ...}'

LAYOUT = ("a3m", "hhr", "sto")  # OpenProteinSet's folders below a chain's
# What AlphaFold2, OpenFold, ColabFold and `warpfold search` call the template hits that lie among alignments.
_HITS_NAME = re.compile(
    r"(.+\.hhr|hmm_output\.sto|templates\.sto|pdb\d*_hits\.\w+|.*hmmsearch.*)(\.gz)?", re.IGNORECASE
)
# The order in which the official pipeline stacks alignments (`make_msa_features` in data/pipeline.py), by the words
# with which AlphaFold2, OpenFold and ColabFold name their files: uniref90_hits; bfd_uniclust_hits, bfd_uniref_hits,
# small_bfd_hits, uniref30, bfd.mgnify30.metaeuk30.smag30; mgnify_hits, mgy_clusters_hits.  Not within a word: 1bfd.a3m.
_STACKED = tuple(
    re.compile(rf"(?<![a-z0-9])({words})")
    for words in (r"uniref90|uniref\.a3m", "bfd|uniclust|uniref30|uniref_hits", "mgnify|mgy")
)
# Alignments that serve pairing alone, by what AlphaFold2, OpenFold, Protenix and ColabFold call them: uniprot_hits.sto,
# uniprot.a3m, pairing.a3m, pair.a3m, NAME.paired.a3m; not non_pairing.a3m, unpaired.a3m, NAME_unpaired.a3m.
_PAIRING_NAME = re.compile(r"(?<![a-z0-9])(?<!non[_-])(?<!not[_-])(?<!un[_-])(uniprot|paired|pairing|pair)(?![a-z0-9])")
# The rows of a search that AlphaFold uses, the query's among them, by the start of the database's name:
# `uniref_max_hits`, `mgnify_max_hits` and the 50,000 of its pipeline_multimer.py.  It cuts its own files to them when
# it reads these (*_hits.sto; not bfd_uniref_hits.a3m).
ALPHAFOLD_ROWS = {"uniref90": 10_000, "mgnify": 501, "uniprot": 50_000}
_ALPHAFOLD_NAME = re.compile(rf"({'|'.join(ALPHAFOLD_ROWS)})_hits\.sto(\.gz)?")
# A file of this name is of the protein that the rest of the name says, or of its folder: uniref90_hits.sto,
# bfd.mgnify30.metaeuk30.smag30.a3m, 1abc_A_uniprot_hits.a3m; NAME.paired.a3m, non_pairing.a3m, pair.a3m.
_OF_DATABASE = re.compile(
    r"(?P<own>|.*?[._-])((small_)?bfd|uniref\d*|uniclust\d*|mgnify\d*|mgy|uniprot)(?![a-z0-9]).*"
    r"|(?P<paired>|.*?[._-])(pair|pairing|paired|unpaired|non_pairing)\.[a-z0-9.]*",
    re.IGNORECASE,
)
# Folders between a protein's and its alignments: OpenProteinSet's, AlphaFold's; and what ColabFold adds to a name.
_BETWEEN = ("a3m", "hhr", "sto", "msas", "alignments")
_COLABFOLD = re.compile(r"_(env|all|nofilter|pair(greedy|complete))(-env)?(-nofilter)?\Z", re.IGNORECASE)
_HEAD = 1 << 16  # bytes read at a time to find an alignment's query
_MOST = 1 << 26  # bytes; an alignment whose query does not end within them is read whole, if its size is allowed
_FEW = 8  # records that hold the query: HH-suite's annotations come before it


@dataclass(frozen=True)
class InputFile:
    """A file, or a member of an alignment database."""

    name: str  # path that starts with the given folder's name: the same wherever that folder lies
    path: Path  # absolute; for a member, of the database's index
    size: int = 0  # bytes
    changed: int = 0  # nanoseconds since 1970; for a member, of the index
    chain: str = ""  # members only
    member: str = ""
    shard: Path | None = None  # where a member lies, from byte `start` on
    start: int = 0

    def __lt__(self, other: "InputFile") -> bool:
        return self.name < other.name  # names are unique among those found together

    @property
    def identity(self) -> tuple[Path, int]:
        """Return a key of the bytes themselves: two indices may name one member."""
        return (self.shard or self.path, self.start)

    @property
    def file(self) -> str:
        """Return the name of the file, without folders."""
        return self.member or self.path.name

    @property
    def title(self) -> str:
        """Return the name of the file as a report can hold it."""
        return _text(self.file)

    @property
    def protein_names(self) -> set[str]:
        """Return the names of a chain or an entry that it may have, lower case: its own, and its folder's."""
        if self.chain:
            return {self.chain.lower()}
        folder = self.path.parent
        folder = folder.parent if folder.name.lower() in LAYOUT else folder
        return {folder.name.lower(), self.path.name.split(".")[0].lower()}

    @property
    def protein(self) -> str:
        """Return the name of the protein that an alignment is of: its own up to the first dot, or its folder's.

        The folder's where the file is named after a database: 1abc_A/a3m/uniref90_hits.a3m, 1abc_A_env/uniref.a3m.
        """
        if self.chain:
            return self.chain
        found = _OF_DATABASE.fullmatch(self.file)
        if found is None:
            return self.path.name.split(".")[0]
        if own := (found["own"] or found["paired"] or "").strip("._-"):
            return own
        folders = (folder.name for folder in self.path.absolute().parents if folder.name.lower() not in _BETWEEN)
        return _COLABFOLD.sub("", next(folders, ""))

    @property
    def is_colabfolds_part(self) -> bool:
        """Return whether it is a server's answer beside ColabFold's results, which has put it into NAME.a3m, too."""
        return _COLABFOLD.search(self.path.absolute().parent.name) is not None and self.protein != self.path.parent.name

    @property
    def is_hits(self) -> bool:
        """Return whether it holds template hits and not an alignment, by its name."""
        return _HITS_NAME.fullmatch(self.file) is not None

    @property
    def serves_pairing(self) -> bool:
        """Return whether it is an alignment that serves pairing alone, by its name."""
        return _PAIRING_NAME.search(self.file.lower()) is not None

    def read_bytes(self, limit: int = LARGEST) -> bytes:
        """Read all of it, unpacked.

        Errors: UserError if it cannot be read, is empty or damaged, or has more than `limit` bytes.
        """
        try:
            return read_file(self.path, limit) if self.shard is None else self._read_member(0, self.size, limit)
        except UserError as error:
            raise self._named(error) from None

    def read_head(self, limit: int) -> bytes:
        """Read its first records, among them the query, or all of a Stockholm file.

        Errors: as in `read_bytes`.
        """
        head = b""
        try:
            with nullcontext() if self.shard else opened(self.path) as file:
                while len(head) <= min(_MOST, limit) and (_is_stockholm(head) or _end(head) is None):
                    size = max(_HEAD, len(head))
                    if not (more := file.read(size) if file else self._read_member(len(head), size)):
                        break
                    head += more
        except UserError as error:
            raise self._named(error) from None
        return head if head.strip() and len(head) <= min(_MOST, limit) else self.read_bytes(limit)

    def _read_member(self, begin: int, size: int, limit: int = LARGEST) -> bytes:
        """Read up to `size` bytes of a member from `begin` on.

        Errors: UserError if the shard cannot be read or ends before the member does, or for more than `limit` bytes.
        """
        assert self.shard is not None
        try:
            shard = open_regular(self.shard)
        except OSError as error:
            raise UserError(f"{self.shard}: cannot be read: {error.strerror}; keep it beside its index") from None
        try:
            end, length = self.start + self.size, os.fstat(shard).st_size
            if end > length:
                found = f"has {length} bytes, its index names {end}"
                raise UserError(f"{self.shard}: {found}: cut short, or of another index; fetch it again")
            size = min(size, self.size - begin)
            if size > limit:
                raise UserError(
                    f"{self.shard}: a member has more than {limit / 1e9:g} GB; leave it out, or allow more (pack "
                    "--max-file-gb)"
                )
            return pread(shard, size, self.start + begin)
        finally:
            os.close(shard)

    def _named(self, error: UserError) -> UserError:
        """Return the error with this file's `name`, so that reports are the same wherever the files lie."""
        return UserError(str(error).replace(str(self.path), self.name))


def stacking_order(file: str) -> int:
    """Return the place of an alignment with this file name among those of one protein; unknown names come last.

    Meant as the first part of a sort key.
    """
    name = file.lower()
    return next((place for place, words in enumerate(_STACKED) if words.search(name)), len(_STACKED))


def as_alphafold_reads(alignment: Alignment, file: InputFile) -> tuple[Alignment, list[str]]:
    """Return the rows that AlphaFold uses of an alignment in a file of this name, and a note on the others.

    It stands alone unless the name says that it serves pairing.
    """
    alone = alignment.stands_alone and not file.serves_pairing
    found = _ALPHAFOLD_NAME.fullmatch(file.file.lower())
    most = ALPHAFOLD_ROWS[found[1]] if found else len(alignment)
    used = replace(alignment.select(slice(most)) if most < len(alignment) else alignment, stands_alone=alone)
    total = len(alignment)
    note = f"{file.name}: the first {most} of {total} rows are used, as in AlphaFold; rename the file to use all"
    return used, [note] if most < total else []


def stacked(sources: Iterable[InputFile]) -> list[InputFile]:
    """Return alignments of one protein in the order in which the official pipeline stacks them, then by name."""
    return sorted(sources, key=lambda one: (stacking_order(one.file), one.name))


def find(paths: Sequence[Path], suffixes: Sequence[str], what: str) -> list[InputFile]:
    """Find the input files in `paths`, sorted and each once: files are taken as they are, databases opened.

    Folders are searched for names that end in `suffixes` (also with .gz), through symbolic links too.
    Errors: UserError for a path that does not exist, a damaged database, or when nothing is found.
    """
    endings = tuple(suffixes) + tuple(suffix + ".gz" for suffix in suffixes)
    found: dict[tuple[Path, int], InputFile] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"{path}: no such file or folder")
        here = path.absolute().resolve() if path.name in ("", "..") else path.absolute()
        for file in walk(here, endings) if path.is_dir() else [here]:
            below = file.relative_to(here.parent) if path.is_dir() else PurePosixPath(here.parent.name, file.name)
            status = file.stat()
            source = InputFile(_text(str(below)), file, status.st_size, status.st_mtime_ns)
            for one in _members(source, suffixes) if file.name.endswith(DATABASE) else [source]:
                found.setdefault(one.identity, one)
    if not found:
        raise UserError(f"{', '.join(map(str, paths))}: no {what} found; files end in {', '.join(suffixes)}, or .gz")
    times = Counter(source.name for source in found.values())

    def unique(one: InputFile) -> InputFile:
        if times[one.name] == 1:
            return one
        return replace(one, name=_text(f"{one.path}:{one.chain}/{one.member}" if one.chain else str(one.path)))

    return sorted(map(unique, found.values()))


def _text(name: str) -> str:
    """Return a name as a report can hold it: bytes that are not UTF-8, which file names may have, as \\udcff."""
    return name.encode(errors="backslashreplace").decode()


def _members(index: InputFile, suffixes: Sequence[str]) -> Iterator[InputFile]:
    """Yield the members of an alignment database whose names end in `suffixes`; shards are checked when they are read.

    Errors: UserError if the index cannot be read, or is none.
    """
    if not set(suffixes) & {*ALIGNMENTS, *HITS}:
        return
    try:
        entries = json.loads(read_file(index.path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{index.path}: damaged, or no JSON ({error}); fetch or make the index again") from None
    if not isinstance(entries, dict):
        raise UserError(f"{index.path}: is not an index of an alignment database; {_EXPECTED}")
    for chain, entry in sorted(entries.items()):
        try:
            name, files = (entry["db"], entry["files"]) if isinstance(entry, dict) else (f"{index.path.stem}.db", entry)
            shard = index.path.parent / name
            name.encode()  # JSON may hold lone surrogates, which no file name has
            members = {member: (start, size) for member, start, size in files}
            numbers = [number for place in members.values() for number in place]
            if "\0" in name or not all(type(number) is int and 0 <= number < _FARTHEST for number in numbers):
                raise ValueError
            known = {member: place for member, place in members.items() if member.lower().endswith(tuple(suffixes))}
        except (KeyError, TypeError, ValueError, AttributeError):
            what = "is not an entry of an alignment database"
            raise UserError(f"{index.path}: {chain} {what}; {_EXPECTED}") from None
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise UserError(f"{index.path}: {chain} lies in {name}, outside the index's folder; shards lie beside it")
        for member, (start, size) in known.items():
            text = _text(f"{index.name}:{chain}/{member}")
            yield replace(index, name=text, size=size, chain=chain, member=member, shard=shard, start=start)


def walk(folder: Path, endings: Sequence[str]) -> Iterator[Path]:
    """Yield the files below a folder; links are followed, but no folder is entered twice."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}); check its permissions") from None

    seen: set[tuple[int, int]] = set()
    for here, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        status = os.stat(here)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders.sort()
        for name in sorted(files):
            if name.lower().endswith((*endings, DATABASE)) and os.path.isfile(path := os.path.join(here, name)):
                yield Path(path)


@dataclass(frozen=True)
class ChainAlignments:
    """Alignments by the sequence in their first row (`as_row`), and the files in the given folders that fit none.

    notes: what the user should know about the others.
    """

    by_sequence: dict[str, list[Alignment]]
    unused: list[str]
    notes: list[str] = field(default_factory=list)

    def of(self, sequence: str) -> list[Alignment]:
        """Return the alignments of a sequence, in the order in which they are stacked."""
        return self.by_sequence.get(as_row(sequence), [])

    def joined(self, other: "ChainAlignments") -> "ChainAlignments":
        """Return these and, below them, those of another one."""
        every = {key: [*self.by_sequence.get(key, []), *rows] for key, rows in other.by_sequence.items()}
        return ChainAlignments(self.by_sequence | every, [*self.unused, *other.unused], [*self.notes, *other.notes])


def read_chain_alignments(
    paths: Sequence[Path], sequences: Iterable[str], queries: str, are_all: bool = True
) -> ChainAlignments:
    """Read alignments of these sequences from files and folders; each goes to the sequence that is its first row.

    They are stacked in the official order where their names tell (`stacking_order`), otherwise as given.  A folder is
    searched recursively, such as AlphaFold-Multimer's `msas/A/uniprot_hits.sto`; template hits in it are not read.
    A file serves pairing alone if its name says so.  queries: what the sequences are of, for errors.
    are_all: False if other records could not be read, to which a file may belong.
    Errors: UserError for a file that cannot be read, or one that was named and belongs to none of the sequences.
    """
    wanted = {as_row(sequence): sequence for sequence in sequences}
    only = next(iter(wanted.values())) if are_all and len(wanted) == 1 else None
    found = ChainAlignments({}, [])
    files = [
        (file, path.is_dir())
        for path in paths
        for file in (find([path], ALIGNMENTS, "alignments") if path.is_dir() else [InputFile(str(path), path)])
        if not (path.is_dir() and file.is_hits)
    ]
    for file, in_folder in sorted(files, key=lambda one: stacking_order(one[0].file)):
        data = file.read_bytes() if in_folder else read_file(file.path, pipe=True)
        every = parse_chain_alignments(data, file.name, None if in_folder else only, row_by_row=file.serves_pairing)
        own = [one for one in every if one.query in wanted]
        if not own and not in_folder and are_all:
            raise UserError(
                f"{file.name}: its first row is not the sequence of any record in {queries}; give alignments of these"
            )
        found.unused.extend([] if own else [file.name])
        for one in own:
            one, notes = as_alphafold_reads(one, file)
            found.notes.extend(notes)
            found.by_sequence.setdefault(one.query, []).append(one)
    return found


def digest(sources: Iterable[InputFile]) -> str:
    """Return a fingerprint of the files' names, sizes and times of writing: 32 hexadecimal digits."""
    lines = (f"{one.name}\0{one.size}\0{one.changed}\n" for one in sources)
    return blake2b("".join(lines).encode(), digest_size=16).hexdigest()


def read_query(source: InputFile, limit: int = LARGEST) -> str:
    """Return the first row of an alignment without its gaps, reading only as much of the file as that takes.

    Of the alignment of a complex these are several sequences, with : in between.
    Errors: UserError for a file that is not an alignment.  The rows that are not read are not checked.
    """
    head = source.read_head(limit)
    if _is_stockholm(head):  # interleaved, its first row may continue to the end
        head = _first_row(head)
    head = head[: _end(head)]
    if is_complex(head):
        return ":".join(chain[0].query for chain in parse_complex_a3m(head, source.name))
    return parse_alignment(head, source.name).query


def _is_stockholm(head: bytes) -> bool:
    return head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"# STOCKHOLM")


def _end(head: bytes) -> int | None:
    """Return the end of the first few records (or rows, in a file without headers); None if there are fewer."""
    mark = b"\n>" if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b">", b"#") else b"\n"
    at = 0
    for _ in range(_FEW):
        at = head.find(mark, at + 1)
        if at < 0:
            return None
    return at + 1


def _first_row(data: bytes) -> bytes:
    """Return a Stockholm file reduced to its first row and its match columns; return one cut short as it is."""
    first = re.search(rb"^(?!#)(\S+)[ \t]+\S", data, re.MULTILINE)
    if first is None or b"\n//" not in data:
        return data
    # Empty lines stay: they end a block.
    rows = re.findall(rb"^(?:(?:%s|#=GC RF)[ \t]+\S+)?[ \t\r]*$" % re.escape(first[1]), data, re.MULTILINE)
    return b"# STOCKHOLM 1.0\n" + b"\n".join(rows) + b"\n//\n"
