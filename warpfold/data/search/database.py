"""What is searched for, and in what: FASTA databases of any size, read some megabytes at a time, surveyed once."""

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from warpfold.data.formats.alignment import LETTERS, is_nucleic
from warpfold.errors import UserError
from warpfold.files import opened

CHUNK = 32 << 20  # bytes of FASTA held at a time; pyhmmer's sequences take some six times as much
SAMPLE = 1 << 20  # bytes at either end of a file that stand for it where the whole is too much to read

_BLANKS = b" \t\n\r\v\f"
_RESIDUES = "".join(LETTERS).encode() + "".join(LETTERS).lower().encode() + b"*"  # * is a stop codon
_NUCLEOTIDES = b"ACGTUNacgtun*"
_NAMED_HEADER = re.compile(rb"\n>[ \t]*[^\s][^\n]*")  # a literal start makes the search some ten times faster
_NUCLEIC_RECORD = b" mol:na "  # in pdb_seqres; some hold letters that no protein has

Tell = Callable[[int, int], None]  # done, of how many


@dataclass(frozen=True)
class Query:
    """A protein to search for, and what was found already: A3M rows without the query's, or nothing."""

    sequence: str
    rows: str = ""


@dataclass(frozen=True)
class Survey:
    """What is known of a database once it has been read."""

    digest: str  # of its contents
    records: int = 0  # HMMER's Z, by which E-values are multiplied; 0 where a program counts itself
    residues: int = 0


def read_chunks(path: Path, size: int = CHUNK) -> Iterator[bytes]:
    """Whole records of a FASTA file, gzipped or not, about `size` bytes at a time.

    Records that pdb_seqres calls nucleic acids (mol:na) are left out.
    Errors: UserError if it cannot be read, is empty, no FASTA, or a gzip stream cut short.
    """
    with opened(path) as file:
        held = file.read(size).removeprefix(b"\xef\xbb\xbf").lstrip()
        if not held:
            raise UserError(f"{path}: is empty; give a FASTA database")
        if not held.startswith(b">"):
            raise UserError(f"{path}: does not start with a '>' header line; give a FASTA database")
        while more := file.read(size):
            cut = (held := held + more).rfind(b"\n>") + 1
            if cut:
                yield _proteins(held[:cut])
                held = held[cut:]
        yield _proteins(held)


def survey_fasta(path: Path, tell: Tell = lambda done, total: None) -> Survey:
    """Reads a FASTA database once: every record is looked at, so that no search fails on it hours later.

    The digest is that of the text, so a file and its gzipped copy have the same.  `tell` hears records read.
    Errors: UserError as of `read_chunks`; for a record without name, a character that is no residue, a header that is
    not UTF-8 (each with the record); for nucleic acids.
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
        raise UserError(f"{path}: has no sequences; fetch the file again")
    if not protein:
        raise UserError(f"{path}: looks like nucleic acids (only A, C, G, T, U, N); give a protein database")
    return Survey(digest.hexdigest(), records, residues)


def survey_files(files: list[Path]) -> Survey:
    """Of a database in a program's own format, often a terabyte: names, sizes and both ends of its files.

    files: those it consists of, sorted.  Errors: UserError if one cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        with opened(file, unpack=False) as data:
            size = file.stat().st_size
            digest.update(f"{file.name}\0{size}\0".encode())
            digest.update(data.read(SAMPLE))
            data.seek(max(size - SAMPLE, 0))
            digest.update(data.read(SAMPLE))
    return Survey(digest.hexdigest())


def _proteins(chunk: bytes) -> bytes:
    """Records without those of nucleic acids."""
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
    """What is wrong with the first bad record of a chunk, `before` records having come before it."""
    for number, record in enumerate(chunk[1:].split(b"\n>"), before + 1):
        header, _, sequence = record.partition(b"\n")
        name = header.decode(errors="replace").split(maxsplit=1)
        if not name:
            return f"record {number} has no name; give every sequence one"
        if not _is_text(record):
            return f"record {number}, {name[0]!r}, is not UTF-8 text; save the file as UTF-8"
        letters = sequence.translate(None, _BLANKS)
        if illegal := letters.translate(None, _RESIDUES):
            place = letters.index(illegal[:1]) + 1
            return (
                f"record {number}, {name[0]!r}, position {place} has {chr(illegal[0])!r}, which is no amino acid; "
                "correct or remove it (a database has no gaps)"
            )
    raise AssertionError("no bad record")
