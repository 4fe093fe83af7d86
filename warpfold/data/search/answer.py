"""Unpack and validate the response of an alignment server, which is an untrusted archive.

Files are read by name and never extracted to a path of the archive. Sizes and the number of files are limited.
"""

import gzip
import mmap
import re
import tarfile
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from typing import IO

from warpfold.data.formats.alignment import decode, encode, parse_alignment
from warpfold.errors import UserError, printable
from warpfold.geometry.residue import UNKNOWN

_NAME = re.compile(r"(?:\./)?([A-Za-z0-9][\w.+-]{0,100}\.(?:a3m|m8))", re.ASCII)
_CHUNK = 1 << 20
_MAX_FILES = 1000


class DamagedAnswer(Exception):
    """A response that is truncated, too large, or does not match the request."""


def unpack_answer(packed: IO[bytes], limit: int) -> dict[str, str]:
    """Read the alignments (.a3m) and hits (.m8) in a tar.gz, by name. Other files are ignored.

    limit: largest unpacked size in bytes. Raises DamagedAnswer.
    """
    texts: dict[str, str] = {}
    with tempfile.TemporaryFile() as plain:
        try:
            with gzip.open(packed) as stream:
                size = 0
                while chunk := stream.read(_CHUNK):
                    size += len(chunk)
                    if size > limit:
                        raise DamagedAnswer(f"has more than {limit / 1e6:g} MB when unpacked")
                    plain.write(chunk)
            plain.flush()
            # The archive is read from a memory map, which ends with the file, so that false sizes in headers are never
            # allocated.
            with (
                mmap.mmap(plain.fileno(), 0, access=mmap.ACCESS_READ) as whole,
                tarfile.open(fileobj=whole, mode="r:") as archive,
            ):
                for count, member in enumerate(archive, 1):
                    name = _NAME.fullmatch(member.name)
                    if count > _MAX_FILES:
                        raise DamagedAnswer(f"has more than {_MAX_FILES} files")
                    file = archive.extractfile(member) if name and member.isreg() and not member.issparse() else None
                    if name and file is not None:
                        texts[name[1]] = file.read(size).decode()
        except UnicodeDecodeError:
            raise DamagedAnswer("is not text") from None
        except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError, RecursionError) as error:
            raise DamagedAnswer(f"is not a complete tar.gz ({printable(' '.join(str(error).split()))})") from None
    if not any(name.endswith(".a3m") for name in texts):
        raise DamagedAnswer("has no alignment")
    return texts


def read_rows(files: Mapping[str, str], sequence: str) -> dict[str, str]:
    """Validate the alignments of a sequence, and write the sequence as their first row. Hits are not changed.

    Raises DamagedAnswer for an alignment of another sequence, and for several alignments in a file.
    """
    validated = {}
    for name, text in files.items():
        if name.endswith(".m8"):
            validated[name] = text.replace("\0", "")
            continue
        entries = _split_entries(text, name)
        if len(entries) != 1:
            raise DamagedAnswer(f"has {len(entries)} alignments in {name} instead of one")
        validated[name] = _validate_alignment(entries[0], sequence, name)
    return validated


def read_pairs(files: Mapping[str, str], sequences: Sequence[str], first: int) -> dict[str, str]:
    """Validate the paired alignments of several sequences; returns their concatenation for each file name.

    first: the number of the first sequence, which is the name of its row. Raises the errors of `read_rows`.
    """
    validated = {}
    for name, text in ((name, text) for name, text in files.items() if name.endswith(".a3m")):
        entries = {re.sub(r"\s.*", "", entry[1:].partition("\n")[0]): entry for entry in _split_entries(text, name)}
        numbers = [str(first + i) for i in range(len(sequences))]
        if set(entries) != set(numbers):
            raise DamagedAnswer(f"has {len(entries)} alignments in {name} instead of {len(numbers)}")
        rows = [_validate_alignment(entries[number], sequence, name) for number, sequence in zip(numbers, sequences)]
        if len({text.count("\n>") for text in rows}) > 1:
            raise DamagedAnswer(f"has alignments of different depth in {name}, which cannot be pairs")
        validated[name] = "\0".join(rows)
    return validated


def _split_entries(text: str, name: str) -> list[str]:
    """Split a file into its alignments, each of which ends with NUL."""
    entries = [entry.strip("\r\n") for entry in text.split("\0") if entry.strip()]
    if not entries or not all(entry.startswith(">") for entry in entries):
        raise DamagedAnswer(f"has no alignment in {name}")
    return entries


def _validate_alignment(entry: str, sequence: str, name: str) -> str:
    """Check that the first row of an alignment is the sequence, apart from X, and replace the row by the sequence."""
    record, mark, other_rows = entry.partition("\n>")
    row = "".join(record.partition("\n")[2].split())
    try:
        expected, codes = encode(sequence), encode(row)
    except UserError as error:
        raise DamagedAnswer(str(error)) from None
    if len(expected) != len(codes) or any(a != b and b != UNKNOWN for a, b in zip(expected, codes)):
        raise DamagedAnswer(f"is of another sequence in {name} ({decode(codes)[:20]} ..., {len(codes)} residues)")
    text = f">query\n{sequence}{mark}{other_rows}\n"
    try:
        parse_alignment(text, name, sequence)
    except UserError as error:
        raise DamagedAnswer(str(error)) from None
    return text
