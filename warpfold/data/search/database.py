"""Define the search interface (queries, engines, output folder), and read FASTA databases of any size in chunks."""

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
# Bytes of FASTA per chunk. pyhmmer's sequences need about six times the memory.
CHUNK = 32 << 20
# Largest number of alignment rows, including the query, by the start of the database name. Others have no limit.
MAX_ROWS = ALPHAFOLD_ROWS | {"mgy": ALPHAFOLD_ROWS["mgnify"]}

_BLANKS = b" \t\n\r\v\f"
_RESIDUES = "".join(LETTERS).encode() + "".join(LETTERS).lower().encode() + b"*"  # * is a stop codon
_NUCLEOTIDES = b"ACGTUNacgtun*"
# The literal start makes the search about ten times as fast.
_NAMED_HEADER = re.compile(rb"\n>[ \t]*[^\s][^\n]*")
# Nucleic acids in pdb_seqres. Some have letters that are not amino acids.
_NUCLEIC_RECORD = b" mol:na "

# A callback with the finished and the total number of records (0 if unknown).
Tell = Callable[[int, int], None]


@dataclass(frozen=True)
class Database:
    """A database to search. name: of its results. max_rows: of an alignment, including the query; None for all."""

    name: str
    path: Path
    max_rows: int | None = None

    @classmethod
    def parse(cls, text: str, max_rows: Mapping[str, int] | None = None) -> "Database":
        """Parse "NAME=FILE", or "FILE", which is named after the file without its endings.

        max_rows: overrides AlphaFold2's limits by name; "" for every database. Raises UserError for a name that is not
        valid for a file.
        """
        name, separator, file = text.partition("=")
        if not separator or Path(text).exists():
            file = text
            name = re.sub(r"(\.(fasta|fas|fa|faa|fsa|txt|gz))+$", "", Path(text).name, flags=re.IGNORECASE)
        if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name, re.ASCII):
            raise UserError(f"--database {text}: {name!r} is not valid as a file name. Pass another one: NAME={file}.")
        defaults = (rows for start, rows in MAX_ROWS.items() if name.lower().startswith(start))
        overrides = max_rows or {}
        return cls(name, Path(file), overrides.get(name, overrides.get("", next(defaults, None))))


def parse_max_hits(texts: Sequence[str]) -> dict[str, int]:
    """Parse "N" and "NAME=N" to rows by database name, "" for every database. Raises UserError for other text."""
    rows = {}
    for text in texts:
        name, _, count = text.rpartition("=")
        if not count.isdecimal() or int(count) < 2:
            raise UserError(f"--max-hits {text}: not N or NAME=N. Pass a number from 2 on, which includes the query.")
        rows[name] = int(count)
    return rows


@dataclass(frozen=True)
class SearchQuery:
    """A protein to search for. rows: A3M rows of an earlier search without the query, or ""."""

    sequence: str
    rows: str = ""


@dataclass(frozen=True)
class Survey:
    """Properties of a database that require reading it.

    digest: of its contents. records: HMMER's Z, the factor of E-values; 0 if the engine counts records itself.
    """

    digest: str
    records: int = 0
    residues: int = 0


class Engine(Protocol):
    """Interface of a search program: `Jackhmmer`, `Hmmsearch`, `MMseqs2` or `HHblits`. Picklable."""

    name: str

    def queries_per_pass(self, threads: int) -> int:
        """Return the number of queries per call of `search`."""
        ...

    def identity(self) -> dict[str, Any]:
        """Return the settings and version that affect the results. Raises UserError if the program is missing."""
        ...

    def survey(self, path: Path, tell: Tell) -> Survey:
        """Survey a database. Raises UserError if `path` is not a database for this engine."""
        ...

    def search(
        self, queries: Sequence[SearchQuery], path: Path, survey: Survey, max_rows: int | None, threads: int, tell: Tell
    ) -> list[str | UserError]:
        """Search for each query; returns its A3M rows, best first and without the query, or an error.

        max_rows: of an alignment, including the query; None for all. tell: called with the number of searched records
        and the total. Raises UserError if all queries fail.
        """
        ...


def check_output(out: Path) -> None:
    """Raise UserError if the output folder of `warpfold search` contains files that are not from a search."""

    def is_report(path: Path) -> bool:
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(report, dict) and report.get("format") == REPORT_FORMAT

    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file. Pass a folder for the output.")
    names = {path.name for path in out.iterdir() if not path.name.startswith(".")} if out.is_dir() else set()
    if names - {"cache"} and not any(map(is_report, out.glob("search*.json"))):
        raise UserError(f"{out}: contains other files. Pass a new or an empty folder.")


def unsearchable_reason(sequence: str, longest: int | None = None) -> str | None:
    """Return the reason why a sequence cannot be searched for, or None. longest: limit of an engine in residues."""
    if longest is not None and len(sequence) > longest:
        return f"{len(sequence)} residues, more than HMMER's {longest}. Search for its domains"
    if is_nucleic(sequence):
        return "looks like nucleic acid (only A, C, G, T, U, N). WarpFold searches for proteins"
    if not any(LETTERS[letter] < len(RESTYPES) for letter in sequence):
        return "has none of the 20 amino acids, so there is nothing to search for"
    return None


def read_chunks(path: Path, size: int = CHUNK) -> Iterator[bytes]:
    """Yield complete records of a FASTA file, gzipped or not, in chunks of about `size` bytes.

    Records that pdb_seqres marks as nucleic acids (mol:na) are skipped.
    Raises UserError if the file cannot be read, is empty, is not FASTA, or is a truncated gzip stream.
    """
    with opened(path) as file:
        buffer = file.read(size).removeprefix(b"\xef\xbb\xbf").lstrip()
        if not buffer:
            raise UserError(f"{path}: is empty. Pass a FASTA database.")
        if not buffer.startswith(b">"):
            raise UserError(f"{path}: does not start with a '>' header line. Pass a FASTA database.")
        while block := file.read(size):
            buffer += block
            # Keep the last record, which may be incomplete.
            if end := buffer.rfind(b"\n>") + 1:
                if proteins := _drop_nucleic(buffer[:end]):
                    yield proteins
                buffer = buffer[end:]
        if proteins := _drop_nucleic(buffer):
            yield proteins


def survey_fasta(path: Path, tell: Tell = lambda done, total: None) -> Survey:
    """Read a FASTA database and check every record, so that no search fails hours later.

    The digest is of the unpacked text, so that a gzipped copy has the same digest. tell: called with the number of
    records. Raises the errors of `read_chunks`, and UserError for nucleic acids and, with the record, for a missing
    name, a character that is not a residue, and a header that is not UTF-8.
    """
    digest = hashlib.blake2b(digest_size=16)
    records = residues = 0
    is_protein = False
    for chunk in read_chunks(path):
        digest.update(chunk)
        letters, count = _NAMED_HEADER.subn(b"", b"\n" + chunk)
        letters = letters.translate(None, _BLANKS)
        if letters.translate(None, _RESIDUES) or not _is_text(chunk):
            raise UserError(f"{path}: {_first_problem(chunk, records)}")
        is_protein = is_protein or bool(letters.translate(None, _NUCLEOTIDES)) or not is_nucleic(letters.decode())
        records, residues = records + count, residues + len(letters)
        tell(records, 0)
    if not residues:
        raise UserError(f"{path}: has no sequences. Fetch the file again.")
    if not is_protein:
        raise UserError(f"{path}: looks like nucleic acids (only A, C, G, T, U, N). Pass a protein database.")
    return Survey(digest.hexdigest(), records, residues)


def _drop_nucleic(chunk: bytes) -> bytes:
    """Remove the records of nucleic acids."""
    if _NUCLEIC_RECORD not in chunk:
        return chunk
    records = chunk[1:].split(b"\n>")
    proteins = [record for record in records if _NUCLEIC_RECORD not in record.partition(b"\n")[0]]
    return b"".join(b">" + record.rstrip() + b"\n" for record in proteins)


def _is_text(chunk: bytes) -> bool:
    """Return whether bytes are UTF-8."""
    try:
        chunk.decode()
    except UnicodeDecodeError:
        return False
    return True


def _first_problem(chunk: bytes, before: int) -> str:
    """Describe the first bad record of a chunk that comes after `before` records."""
    for number, record in enumerate(chunk[1:].split(b"\n>"), before + 1):
        header, _, sequence = record.partition(b"\n")
        name = header.decode(errors="replace").split()
        if not _NAMED_HEADER.match(b"\n>" + header):
            return f"record {number} has no name. Give every sequence a name"
        if not _is_text(record):
            return f"record {number}, {name[0]!r}, is not UTF-8 text. Save the file as UTF-8"
        letters = sequence.translate(None, _BLANKS)
        if illegal := letters.translate(None, _RESIDUES):
            position = letters.index(illegal[:1]) + 1
            return (
                f"record {number}, {name[0]!r}, position {position} has {chr(illegal[0])!r}, which is not an amino "
                "acid. Correct or remove it (a database has no gaps)"
            )
    raise AssertionError("no bad record")
