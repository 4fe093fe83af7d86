"""Queries, engines, the output folder, and databases: FASTA files of any size, read some megabytes at a time."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from warpfold.data.formats.alignment import LETTERS, is_nucleic
from warpfold.data.formats.input_files import ALPHAFOLD_ROWS
from warpfold.errors import UserError
from warpfold.files import opened
from warpfold.geometry.residue import RESTYPES

REPORT_FORMAT = "warpfold-search-1"
CHUNK = 32 << 20  # bytes of FASTA held at a time; pyhmmer's sequences take some six times as much
# Rows of an alignment, including the query's, by the start of the database's name; of others all are kept.
MAX_ROWS = ALPHAFOLD_ROWS | {"mgy": ALPHAFOLD_ROWS["mgnify"]}

_BLANKS = b" \t\n\r\v\f"
_RESIDUES = "".join(LETTERS).encode() + "".join(LETTERS).lower().encode() + b"*"  # * is a stop codon
_NUCLEOTIDES = b"ACGTUNacgtun*"
_NAMED_HEADER = re.compile(rb"\n>[ \t]*[^\s][^\n]*")  # a literal start makes the search some ten times faster
_NUCLEIC_RECORD = b" mol:na "  # in pdb_seqres; some hold letters that no protein has

Tell = Callable[[int, int], None]  # done, total (0 if unknown)


@dataclass(frozen=True)
class Database:
    """A database to search, and the name of its results."""

    name: str
    path: Path
    max_rows: int | None = None  # of an alignment, the query's included; None: all

    @classmethod
    def parse(cls, text: str, max_rows: Mapping[str, int] | None = None) -> "Database":
        """Parse "NAME=FILE", or "FILE", which is named after the file without its endings.

        max_rows: by name, instead of AlphaFold2's; "" means every database.
        Errors: UserError for a name that cannot be a file's.
        """
        name, given, file = text.partition("=")
        if not given or Path(text).exists():
            file = text
            name = re.sub(r"(\.(fasta|fas|fa|faa|fsa|txt|gz))+$", "", Path(text).name, flags=re.IGNORECASE)
        if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name, re.ASCII):
            raise UserError(f"--database {text}: {name!r} is no name for a file. Pass one, NAME={file}")
        known = (rows for start, rows in MAX_ROWS.items() if name.lower().startswith(start))
        given_rows = max_rows or {}
        return cls(name, Path(file), given_rows.get(name, given_rows.get("", next(known, None))))


def parse_max_hits(texts: Sequence[str]) -> dict[str, int]:
    """Parse "N" and "NAME=N": rows by database name, "" for every database.  Errors: UserError for anything else."""
    found = {}
    for text in texts:
        name, _, count = text.rpartition("=")
        if not count.isdecimal() or int(count) < 2:
            raise UserError(f"--max-hits {text}: expected N or NAME=N, a number from 2 (the query is one of them)")
        found[name] = int(count)
    return found


@dataclass(frozen=True)
class SearchQuery:
    """A protein to search for, and the rows that were found already: A3M without the query's own, or nothing."""

    sequence: str
    rows: str = ""


@dataclass(frozen=True)
class Survey:
    """What is known about a database once it has been read."""

    digest: str  # of its contents
    records: int = 0  # HMMER's Z, by which E-values are multiplied; 0 if the engine counts them itself
    residues: int = 0


class Engine(Protocol):
    """A search program: `Jackhmmer`, `Hmmsearch`, `MMseqs2`, `HHblits`; picklable."""

    name: str

    def queries_per_pass(self, threads: int) -> int:
        """Return the number of queries that share one call of `search`."""
        ...

    def identity(self) -> dict[str, Any]:
        """Return the settings and version that results depend on.  Errors: UserError if the program is missing."""
        ...

    def survey(self, path: Path, tell: Tell) -> Survey:
        """Survey a database.  Errors: UserError if `path` is not a database for this engine."""
        ...

    def search(
        self, queries: Sequence[SearchQuery], path: Path, survey: Survey, max_rows: int | None, threads: int, tell: Tell
    ) -> list[str | UserError]:
        """Return for each query the A3M rows found, best first and without the query's own, or an error.

        max_rows: of one alignment, including the query's; None: all.  tell: called with the records searched so far,
        and in all.
        Errors: UserError if all these queries have failed.
        """
        ...


def check_output(out: Path) -> None:
    """Raise UserError if the output folder of `warpfold search` holds other files than a search's."""

    def is_report(path: Path) -> bool:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(found, dict) and found.get("format") == REPORT_FORMAT

    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file. Name a folder for the output")
    names = {path.name for path in out.iterdir() if not path.name.startswith(".")} if out.is_dir() else set()
    if names - {"cache"} and not any(map(is_report, out.glob("search*.json"))):
        raise UserError(f"{out}: holds something else, which is left alone. Name a new or an empty folder")


def unsearchable_reason(sequence: str, longest: int | None = None) -> str | None:
    """Return why a sequence cannot be searched for, or None.  longest: residues that an engine takes; None: any."""
    if longest is not None and len(sequence) > longest:
        return f"{len(sequence)} residues, more than HMMER's {longest}; search for its domains"
    if is_nucleic(sequence):
        return "looks like nucleic acid (only A, C, G, T, U, N); WarpFold searches for proteins"
    if not any(LETTERS[letter] < len(RESTYPES) for letter in sequence):
        return "has none of the 20 amino acids; there is nothing to search for"
    return None


def read_chunks(path: Path, size: int = CHUNK) -> Iterator[bytes]:
    """Yield whole records of a FASTA file, gzipped or not, about `size` bytes at a time.

    Records that pdb_seqres calls nucleic acids (mol:na) are left out.
    Errors: UserError if it cannot be read, is empty, is not FASTA, or is a gzip stream cut short.
    """
    with opened(path) as file:
        held = file.read(size).removeprefix(b"\xef\xbb\xbf").lstrip()
        if not held:
            raise UserError(f"{path}: is empty. Pass a FASTA database")
        if not held.startswith(b">"):
            raise UserError(f"{path}: does not start with a '>' header line. Pass a FASTA database")
        while more := file.read(size):
            cut = (held := held + more).rfind(b"\n>") + 1
            if cut:
                yield _proteins(held[:cut])
                held = held[cut:]
        yield _proteins(held)


def survey_fasta(path: Path, tell: Tell = lambda done, total: None) -> Survey:
    """Read a FASTA database once and check every record, so that no search fails on one hours later.

    The digest is that of the text, so a file and its gzipped copy have the same.  tell: called with the records read.
    Errors: UserError as in `read_chunks`; for a record without a name, a character that is not a residue, a header that
    is not UTF-8 (each names the record); for nucleic acids.
    """
    digest = hashlib.blake2b(digest_size=16)
    records = residues = 0
    protein = False
    for chunk in read_chunks(path):
        digest.update(chunk)
        letters, found = _NAMED_HEADER.subn(b"", b"\n" + chunk)
        letters = letters.translate(None, _BLANKS)
        if letters.translate(None, _RESIDUES) or not _is_text(chunk):
            raise UserError(f"{path}: {_first_bad(chunk, records)}")
        protein = protein or bool(letters.translate(None, _NUCLEOTIDES)) or not is_nucleic(letters.decode())
        records, residues = records + found, residues + len(letters)
        tell(records, 0)
    if not residues:
        raise UserError(f"{path}: has no sequences. Fetch the file again")
    if not protein:
        raise UserError(f"{path}: looks like nucleic acids (only A, C, G, T, U, N). Pass a protein database")
    return Survey(digest.hexdigest(), records, residues)


def _proteins(chunk: bytes) -> bytes:
    """Return records without those of nucleic acids."""
    if _NUCLEIC_RECORD not in chunk:
        return chunk
    records = chunk[1:].split(b"\n>")
    kept = [record for record in records if _NUCLEIC_RECORD not in record.partition(b"\n")[0]]
    return b"".join(b">" + record.rstrip() + b"\n" for record in kept)


def _is_text(chunk: bytes) -> bool:
    try:
        chunk.decode()
    except UnicodeDecodeError:
        return False
    return True


def _first_bad(chunk: bytes, before: int) -> str:
    """Describe the first bad record of a chunk that comes after `before` records."""
    for number, record in enumerate(chunk[1:].split(b"\n>"), before + 1):
        header, _, sequence = record.partition(b"\n")
        name = header.decode(errors="replace").split(maxsplit=1)
        if not _NAMED_HEADER.match(b"\n>" + header):
            return f"record {number} has no name; give every sequence one"
        if not _is_text(record):
            return f"record {number}, {name[0]!r}, is not UTF-8 text; save the file as UTF-8"
        letters = sequence.translate(None, _BLANKS)
        if illegal := letters.translate(None, _RESIDUES):
            position = letters.index(illegal[:1]) + 1
            return (
                f"record {number}, {name[0]!r}, position {position} has {chr(illegal[0])!r}, which is no amino acid; "
                "correct or remove it (a database has no gaps)"
            )
    raise AssertionError("no bad record")
