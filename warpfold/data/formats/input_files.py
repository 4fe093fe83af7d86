"""Find structures, alignments and hits in folders and alignment databases, and classify them by name.

This module also reads the query of an alignment without the other rows, and selects alignments by their query.

OpenFold's alignment databases are the concatenated files of many chains (shards), with a JSON index of their offsets.
There are two kinds of index (openfold/docs/source/Aux_seq_files.md). OpenProteinSet's tools write one for all shards,
{"3lrm_A": {"db": "alignment_db_0.db", "files": [["uniref90_hits.a3m", start, size], ...]}, ...}. The other kind is one
per shard, {"3lrm_A": [["uniref90_hits.a3m", start, size], ...], ...}, where `NAME.index` belongs to `NAME.db` in the
same folder. The shards of an index must be in its folder or below. They may be symbolic links, which only the owner of
the folder can create.
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
# Alignments with the ending .fasta are read only if the file itself is named.
ALIGNMENTS = (".a3m", ".a2m", ".sto", ".stk", ".stockholm", ".aln", ".afa")
HITS = (".hhr", ".sto", ".a3m")
DATABASE = ".index"
# Larger offsets, in bytes, mean a damaged index. They might be too large to print or divide.
_MAX_OFFSET = 10**30
_EXPECTED = 'The expected form is {CHAIN: {"db": FILE, "files": [[NAME, START, SIZE], ...]}, ...}.'

LAYOUT = ("a3m", "hhr", "sto")  # OpenProteinSet's subfolders
# Names of template hits among alignments in AlphaFold2, OpenFold, ColabFold and `warpfold search`.
_HITS_NAME = re.compile(
    r"(.+\.hhr|hmm_output\.sto|templates\.sto|pdb\d*_hits\.\w+|.*hmmsearch.*)(\.gz)?", re.IGNORECASE
)
# The order in which the official pipeline stacks alignments (`make_msa_features` in data/pipeline.py), by words in the
# file names of AlphaFold2, OpenFold and ColabFold: uniref90_hits; bfd_uniclust_hits, bfd_uniref_hits, small_bfd_hits,
# uniref30, bfd.mgnify30.metaeuk30.smag30; mgnify_hits, mgy_clusters_hits. The words must not be part of a longer word,
# as in 1bfd.a3m.
_STACKED = tuple(
    re.compile(rf"(?<![a-z0-9])({words})")
    for words in (r"uniref90|uniref\.a3m", "bfd|uniclust|uniref30|uniref_hits", "mgnify|mgy")
)
# Names of alignments that are used only for pairing, in AlphaFold2, OpenFold, Protenix and ColabFold: uniprot_hits.sto,
# uniprot.a3m, pairing.a3m, pair.a3m, NAME.paired.a3m; but not non_pairing.a3m, unpaired.a3m, NAME_unpaired.a3m.
_PAIRING_NAME = re.compile(r"(?<![a-z0-9])(?<!non[_-])(?<!not[_-])(?<!un[_-])(uniprot|paired|pairing|pair)(?![a-z0-9])")
# Number of rows, including the query, that AlphaFold uses from each database: `uniref_max_hits`, `mgnify_max_hits` and
# the 50,000 of its pipeline_multimer.py. AlphaFold truncates its own files (*_hits.sto; not bfd_uniref_hits.a3m) when
# it reads them.
ALPHAFOLD_ROWS = {"uniref90": 10_000, "mgnify": 501, "uniprot": 50_000}
_ALPHAFOLD_NAME = re.compile(rf"({'|'.join(ALPHAFOLD_ROWS)})_hits\.sto(\.gz)?")
# File names that contain a database or "pair". The protein is the text before it, or else the folder:
# uniref90_hits.sto, bfd.mgnify30.metaeuk30.smag30.a3m, 1abc_A_uniprot_hits.a3m; NAME.paired.a3m, non_pairing.a3m,
# pair.a3m.
_DATABASE_NAME = re.compile(
    r"(?P<prefix>|.*?[._-])((small_)?bfd|uniref\d*|uniclust\d*|mgnify\d*|mgy|uniprot)(?![a-z0-9]).*"
    r"|(?P<paired>|.*?[._-])(pair|pairing|paired|unpaired|non_pairing)\.[a-z0-9.]*",
    re.IGNORECASE,
)
# Folders between a protein's folder and its alignments, in OpenProteinSet and AlphaFold.
_BETWEEN = ("a3m", "hhr", "sto", "msas", "alignments")
# Suffixes that ColabFold appends to names.
_COLABFOLD = re.compile(r"_(env|all|nofilter|pair(greedy|complete))(-env)?(-nofilter)?\Z", re.IGNORECASE)
# Bytes per read when looking for the query of an alignment.
_HEAD = 1 << 16
# Bytes in which the query must end. Otherwise the whole file is read, if its size is allowed.
_MAX_HEAD = 1 << 26
# The query is among this many records. HH-suite's annotations precede it.
_HEAD_RECORDS = 8


@dataclass(frozen=True)
class InputFile:
    """A file, or a member of an alignment database.

    name: path that starts with the name of the user's folder, so that it does not depend on the folder's location.
    path: absolute path; for a member, of the database's index. size: bytes. changed: modification time in nanoseconds
    since 1970; for a member, of the index. Only members have a chain, a member name, a shard, and a start (byte offset
    in the shard).
    """

    name: str
    path: Path
    size: int = 0
    changed: int = 0
    chain: str = ""
    member: str = ""
    shard: Path | None = None
    start: int = 0

    def __lt__(self, other: "InputFile") -> bool:
        return self.name < other.name

    @property
    def identity(self) -> tuple[Path, int]:
        """Return a key that identifies the content, because two indices may contain the same member."""
        return (self.shard or self.path, self.start)

    @property
    def file(self) -> str:
        """Return the name of the file without folders."""
        return self.member or self.path.name

    @property
    def title(self) -> str:
        """Return the name of the file with non-UTF-8 bytes escaped, for reports."""
        return _text(self.file)

    @property
    def protein_names(self) -> set[str]:
        """Return the possible chain or entry names in lower case: from the file name and from the folder name."""
        if self.chain:
            return {self.chain.lower()}
        folder = self.path.parent
        folder = folder.parent if folder.name.lower() in LAYOUT else folder
        return {folder.name.lower(), self.path.name.split(".")[0].lower()}

    @property
    def protein(self) -> str:
        """Return the name of the protein of an alignment: the file name up to the first dot, or the folder name.

        The folder name is used if the file is named after a database: 1abc_A/a3m/uniref90_hits.a3m,
        1abc_A_env/uniref.a3m.
        """
        if self.chain:
            return self.chain
        match = _DATABASE_NAME.fullmatch(self.file)
        if match is None:
            return self.path.name.split(".")[0]
        if prefix := (match["prefix"] or match["paired"] or "").strip("._-"):
            return prefix
        folders = (folder.name for folder in self.path.absolute().parents if folder.name.lower() not in _BETWEEN)
        return _COLABFOLD.sub("", next(folders, ""))

    @property
    def is_colabfold_download(self) -> bool:
        """Return whether this is a server's answer next to ColabFold's results, which NAME.a3m includes too."""
        return _COLABFOLD.search(self.path.absolute().parent.name) is not None and self.protein != self.path.parent.name

    @property
    def is_hits(self) -> bool:
        """Return whether the name is one of template hits rather than of an alignment."""
        return _HITS_NAME.fullmatch(self.file) is not None

    @property
    def serves_pairing(self) -> bool:
        """Return whether the name is one of an alignment that is used only for pairing."""
        return _PAIRING_NAME.search(self.file.lower()) is not None

    def read_bytes(self, limit: int = LARGEST) -> bytes:
        """Read and unpack the whole content.

        Raises UserError if it cannot be read, is empty or damaged, or has more than `limit` bytes.
        """
        try:
            return read_file(self.path, limit) if self.shard is None else self._read_member(0, self.size, limit)
        except UserError as error:
            raise self._rename_in_error(error) from None

    def read_head(self, limit: int) -> bytes:
        """Read the first records, which include the query; a Stockholm file is read whole.

        Raises the errors of `read_bytes`.
        """
        head = b""
        try:
            with nullcontext() if self.shard else opened(self.path) as file:
                while len(head) <= min(_MAX_HEAD, limit) and (_is_stockholm(head) or _find_head_end(head) is None):
                    size = max(_HEAD, len(head))
                    if not (block := file.read(size) if file else self._read_member(len(head), size)):
                        break
                    head += block
        except UserError as error:
            raise self._rename_in_error(error) from None
        return head if head.strip() and len(head) <= min(_MAX_HEAD, limit) else self.read_bytes(limit)

    def _read_member(self, begin: int, size: int, limit: int = LARGEST) -> bytes:
        """Read up to `size` bytes of a member, starting at `begin`.

        Raises UserError if the shard cannot be read or ends before the member, and for more than `limit` bytes.
        """
        assert self.shard is not None
        try:
            shard = open_regular(self.shard)
        except OSError as error:
            raise UserError(
                f"{self.shard}: cannot be read: {error.strerror}. Keep it in the folder of its index."
            ) from None
        try:
            end, length = self.start + self.size, os.fstat(shard).st_size
            if end > length:
                raise UserError(
                    f"{self.shard}: has {length} bytes, but its index refers to {end}: it is cut short, or of another "
                    "index. Fetch it again."
                )
            size = min(size, self.size - begin)
            if size > limit:
                raise UserError(
                    f"{self.shard}: a member has more than {limit / 1e9:g} GB. Remove it, or raise the limit (pack "
                    "--max-file-gb)."
                )
            return pread(shard, size, self.start + begin)
        finally:
            os.close(shard)

    def _rename_in_error(self, error: UserError) -> UserError:
        """Replace the path in an error by this file's `name`, so that reports do not depend on the folder."""
        return UserError(str(error).replace(str(self.path), self.name))


def stacking_order(file: str) -> int:
    """Return the rank of an alignment file among those of its protein, as a sort key. Unknown names come last."""
    name = file.lower()
    return next((i for i, words in enumerate(_STACKED) if words.search(name)), len(_STACKED))


def limit_as_alphafold(alignment: Alignment, file: InputFile) -> tuple[Alignment, list[str]]:
    """Select the rows that AlphaFold uses from an alignment with this file name. Returns them, and notes on the others.

    The name also decides whether the alignment is used only for pairing.
    """
    alone = alignment.stands_alone and not file.serves_pairing
    match = _ALPHAFOLD_NAME.fullmatch(file.file.lower())
    limit = ALPHAFOLD_ROWS[match[1]] if match else len(alignment)
    used = replace(alignment.select(slice(limit)) if limit < len(alignment) else alignment, stands_alone=alone)
    total = len(alignment)
    note = f"{file.name}: the first {limit} of {total} rows are used, as in AlphaFold. Rename the file to use all"
    return used, [note] if limit < total else []


def stacked(sources: Iterable[InputFile]) -> list[InputFile]:
    """Sort the alignments of a protein in the stacking order of the official pipeline, then by name."""
    return sorted(sources, key=lambda source: (stacking_order(source.file), source.name))


def find(paths: Sequence[Path], suffixes: Sequence[str], what: str) -> list[InputFile]:
    """Find the input files in `paths`, sorted and without duplicates. what: their kind, for errors.

    Named files are accepted with any ending. Folders are searched recursively, also through symbolic links, for names
    that end in `suffixes` (or with .gz appended). Databases are replaced by their members.
    Raises UserError for a path that does not exist, for a damaged database, and if nothing is found.
    """
    endings = tuple(suffixes) + tuple(suffix + ".gz" for suffix in suffixes)
    sources: dict[tuple[Path, int], InputFile] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"{path}: no such file or folder")
        absolute = path.absolute().resolve() if path.name in ("", "..") else path.absolute()
        for file in walk(absolute, endings) if path.is_dir() else [absolute]:
            below = (
                file.relative_to(absolute.parent) if path.is_dir() else PurePosixPath(absolute.parent.name, file.name)
            )
            status = file.stat()
            source = InputFile(_text(str(below)), file, status.st_size, status.st_mtime_ns)
            for member in _read_index(source, suffixes) if file.name.endswith(DATABASE) else [source]:
                sources.setdefault(member.identity, member)
    if not sources:
        raise UserError(
            f"{', '.join(map(str, paths))}: no {what} found. Pass files that end in {', '.join(suffixes)}, or these "
            "with .gz."
        )
    times = Counter(source.name for source in sources.values())
    for key, source in sources.items():
        if times[source.name] > 1:
            location = f"{source.path}:{source.chain}/{source.member}" if source.chain else str(source.path)
            sources[key] = replace(source, name=_text(location))
    return sorted(sources.values())


def _text(name: str) -> str:
    """Escape the bytes of a file name that are not UTF-8 (as \\udcff), so that reports can contain it."""
    return name.encode(errors="backslashreplace").decode()


def _read_index(index: InputFile, suffixes: Sequence[str]) -> Iterator[InputFile]:
    """Yield the members of an alignment database with names that end in `suffixes`.

    Shards are checked when they are read. Raises UserError if the index cannot be read or is not an index.
    """
    if not set(suffixes) & {*ALIGNMENTS, *HITS}:
        return
    try:
        entries = json.loads(read_file(index.path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{index.path}: damaged, or not JSON ({error}). Fetch or make the index again.") from None
    if not isinstance(entries, dict):
        raise UserError(f"{index.path}: is not an index of an alignment database. {_EXPECTED}")
    for chain, entry in sorted(entries.items()):
        try:
            name, files = (entry["db"], entry["files"]) if isinstance(entry, dict) else (f"{index.path.stem}.db", entry)
            shard = index.path.parent / name
            # JSON may contain lone surrogates, which are not possible in file names.
            name.encode()
            members = {member: (start, size) for member, start, size in files}
            numbers = [number for span in members.values() for number in span]
            if "\0" in name or not all(type(number) is int and 0 <= number < _MAX_OFFSET for number in numbers):
                raise ValueError
            selected = {member: span for member, span in members.items() if member.lower().endswith(tuple(suffixes))}
        except (KeyError, TypeError, ValueError, AttributeError):
            problem = "is not an entry of an alignment database"
            raise UserError(f"{index.path}: {chain} {problem}. {_EXPECTED}") from None
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise UserError(
                f"{index.path}: the shard of {chain}, {name}, is outside of the index's folder. Move it there."
            )
        for member, (start, size) in selected.items():
            text = _text(f"{index.name}:{chain}/{member}")
            yield replace(index, name=text, size=size, chain=chain, member=member, shard=shard, start=start)


def walk(folder: Path, endings: Sequence[str]) -> Iterator[Path]:
    """Yield the files below a folder that end in `endings` or are databases. Follows links; visits each folder once."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}). Check its permissions.") from None

    visited: set[tuple[int, int]] = set()
    for directory, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        status = os.stat(directory)
        if (status.st_dev, status.st_ino) in visited:
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        folders.sort()
        for name in sorted(files):
            if name.lower().endswith((*endings, DATABASE)) and os.path.isfile(path := os.path.join(directory, name)):
                yield Path(path)


@dataclass(frozen=True)
class ChainAlignments:
    """Alignments by the sequence of their first row (see `as_row`).

    unused: files in the folders that match no sequence. notes: messages for the user about the others.
    """

    by_sequence: dict[str, list[Alignment]]
    unused: list[str]
    notes: list[str] = field(default_factory=list)

    def of(self, sequence: str) -> list[Alignment]:
        """Return the alignments of a sequence in stacking order."""
        return self.by_sequence.get(as_row(sequence), [])

    def joined(self, other: "ChainAlignments") -> "ChainAlignments":
        """Combine with another one, which is stacked below this one."""
        rows_of = {key: [*self.by_sequence.get(key, []), *rows] for key, rows in other.by_sequence.items()}
        return ChainAlignments(self.by_sequence | rows_of, [*self.unused, *other.unused], [*self.notes, *other.notes])


def read_chain_alignments(
    paths: Sequence[Path], sequences: Iterable[str], queries: str, are_all: bool = True
) -> ChainAlignments:
    """Read the alignments of some sequences from files and folders, and assign each by its first row.

    Alignments are stacked in the official order of their names (`stacking_order`), otherwise in the order of `paths`.
    Folders are searched recursively, for example for AlphaFold-Multimer's `msas/A/uniprot_hits.sto`; template hits in
    them are skipped. The file name decides whether an alignment is used only for pairing.
    queries: description of the sequences for errors. are_all: False if there are other, unreadable queries to which a
    file may belong.
    Raises UserError for a file that cannot be read, and for a named file that belongs to none of the sequences.
    """
    by_row = {as_row(sequence): sequence for sequence in sequences}
    only = next(iter(by_row.values())) if are_all and len(by_row) == 1 else None
    result = ChainAlignments({}, [])
    files = [
        (file, path.is_dir())
        for path in paths
        for file in (find([path], ALIGNMENTS, "alignments") if path.is_dir() else [InputFile(str(path), path)])
        if not (path.is_dir() and file.is_hits)
    ]
    for file, in_folder in sorted(files, key=lambda item: stacking_order(item[0].file)):
        data = file.read_bytes() if in_folder else read_file(file.path, pipe=True)
        alignments = parse_chain_alignments(
            data, file.name, None if in_folder else only, row_by_row=file.serves_pairing
        )
        matching = [alignment for alignment in alignments if alignment.query in by_row]
        if not matching and not in_folder and are_all:
            raise UserError(
                f"{file.name}: its first row is not the sequence of any record in {queries}. Pass alignments of these."
            )
        result.unused.extend([] if matching else [file.name])
        for alignment in matching:
            alignment, notes = limit_as_alphafold(alignment, file)
            result.notes.extend(notes)
            result.by_sequence.setdefault(alignment.query, []).append(alignment)
    return result


def digest(sources: Iterable[InputFile]) -> str:
    """Compute a fingerprint of the names, sizes and modification times of files: 32 hexadecimal digits."""
    lines = (f"{source.name}\0{source.size}\0{source.changed}\n" for source in sources)
    return blake2b("".join(lines).encode(), digest_size=16).hexdigest()


def read_query(source: InputFile, limit: int = LARGEST) -> str:
    """Read the first row of an alignment without gaps, and only the necessary part of the file.

    For the alignment of a complex, returns the sequences of all chains separated by `:`. Raises UserError for a file
    that is not an alignment. The other rows are not checked.
    """
    head = source.read_head(limit)
    if _is_stockholm(head) and b"\n//" in head and (first := re.search(rb"^(?!#)(\S+)[ \t]+\S", head, re.MULTILINE)):
        # The first row of an interleaved file may continue until the end. Only this row, the match columns, and empty
        # lines, which end a block, are parsed.
        lines = re.findall(rb"^(?:(?:%s|#=GC RF)[ \t]+\S+)?[ \t\r]*$" % re.escape(first[1]), head, re.MULTILINE)
        head = b"# STOCKHOLM 1.0\n" + b"\n".join(lines) + b"\n//\n"
    head = head[: _find_head_end(head)]
    if is_complex(head):
        return ":".join(chain[0].query for chain in parse_complex_a3m(head, source.name))
    return parse_alignment(head, source.name).query


def _is_stockholm(head: bytes) -> bool:
    return head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"# STOCKHOLM")


def _find_head_end(head: bytes) -> int | None:
    """Return the end of the first `_HEAD_RECORDS` records (rows in a file without headers); None if there are fewer."""
    mark = b"\n>" if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b">", b"#") else b"\n"
    at = 0
    for _ in range(_HEAD_RECORDS):
        at = head.find(mark, at + 1)
        if at < 0:
            return None
    return at + 1
