"""Find the files that `pack` reads, in folders or in alignment databases, and tell them apart by their names.

Also read the query of an alignment without the rest.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path, PurePosixPath

from warpfold.data.formats.alignment import Alignment
from warpfold.data.formats.alignment_db import AlignmentDB, Slice
from warpfold.data.formats.complex_a3m import is_complex, split_complex
from warpfold.data.formats.sequences import parse_alignment, parse_complex_a3m
from warpfold.errors import UserError
from warpfold.files import LARGEST, opened, read_file

STRUCTURES = (".cif", ".mmcif", ".pdb", ".ent")
ALIGNMENTS = (".a3m", ".a2m", ".sto", ".stk", ".stockholm", ".aln", ".afa")  # .fasta only if named itself
HITS = (".hhr", ".sto", ".a3m")
DATABASE = ".index"

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
    slice: Slice | None = None  # where a member lies

    def __lt__(self, other: "InputFile") -> bool:
        return self.name < other.name  # names are unique among those found together

    @property
    def identity(self) -> tuple[Path, int]:
        """Return a key of the bytes themselves: two indices may name one member."""
        return (self.slice.path, self.slice.start) if self.slice else (self.path, 0)

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
        return serves_pairing(self.file)

    @property
    def version(self) -> tuple[str, int, int]:
        """Return its name, its size and when it was written, which change when the file does."""
        return self.name, self.size, self.changed

    def read_bytes(self, limit: int = LARGEST) -> bytes:
        """Read all of it, unpacked.

        Errors: UserError if it cannot be read, is empty or damaged, or has more than `limit` bytes.
        """
        try:
            return self.slice.read(limit=limit) if self.slice else read_file(self.path, limit)
        except UserError as error:
            raise self._named(error) from None

    def read_head(self, limit: int) -> bytes:
        """Read its first records, among them the query, or all of a Stockholm file.  Errors: as in `read_bytes`."""
        head = b""
        try:
            with nullcontext() if self.slice else opened(self.path) as file:
                while len(head) <= min(_MOST, limit) and (_is_stockholm(head) or _end(head) is None):
                    size = max(_HEAD, len(head))
                    more = file.read(size) if file else self.slice.read(len(head), size) if self.slice else b""
                    if not more:
                        break
                    head += more
        except UserError as error:
            raise self._named(error) from None
        return head if head.strip() and len(head) <= min(_MOST, limit) else self.read_bytes(limit)

    def _named(self, error: UserError) -> UserError:
        """Return the error with this file's `name`, so that reports are the same wherever the files lie."""
        return UserError(str(error).replace(str(self.path), self.name))


def stacking_order(file: str) -> int:
    """Return where an alignment with this file name comes among those of one protein; unknown names come last.

    Meant as the first part of a sort key.
    """
    name = file.lower()
    return next((place for place, words in enumerate(_STACKED) if words.search(name)), len(_STACKED))


def serves_pairing(file: str) -> bool:
    """Return whether an alignment with this file name serves pairing alone (`Alignment.stands_alone`)."""
    return _PAIRING_NAME.search(file.lower()) is not None


def as_alphafold_reads(alignment: Alignment, file: str, source: str) -> tuple[Alignment, list[str]]:
    """Return the rows that AlphaFold uses of a file of this name, and a note on those that are left out.

    source: what the note calls the file.
    """
    found = _ALPHAFOLD_NAME.fullmatch(file.lower())
    most = ALPHAFOLD_ROWS[found[1]] if found else len(alignment)
    if len(alignment) <= most:
        return alignment, []
    note = f"{source}: the first {most} of {len(alignment)} rows are used, as in AlphaFold; rename the file to use all"
    return alignment.select(slice(most)), [note]


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
        for file in _walk(here, endings) if path.is_dir() else [here]:
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
    """Yield the members of an alignment database whose names end in `suffixes`."""
    if not set(suffixes) & {*ALIGNMENTS, *HITS}:
        return
    database = AlignmentDB(index.path)
    for chain in database.chains():
        for member, slice in database.files(chain).items():
            if member.lower().endswith(tuple(suffixes)):
                name = _text(f"{index.name}:{chain}/{member}")
                yield replace(index, name=name, size=slice.size, chain=chain, member=member, slice=slice)


def _walk(folder: Path, endings: Sequence[str]) -> Iterator[Path]:
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
        alignment, lengths, _ = parse_complex_a3m(head, source.name)
        return ":".join(chain[0].query for chain in split_complex(alignment, lengths))
    return parse_alignment(head, source.name).query


def _is_stockholm(head: bytes) -> bool:
    return head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"# STOCKHOLM")


def _end(head: bytes) -> int | None:
    """Return where the first few records (or rows, in a file without headers) end; None if it has fewer."""
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
    rows = re.findall(rb"^(?:%s|#=GC RF)[ \t]+\S+[ \t\r]*$" % re.escape(first[1]), data, re.MULTILINE)
    return b"# STOCKHOLM 1.0\n" + b"\n".join(rows) + b"\n//\n"
