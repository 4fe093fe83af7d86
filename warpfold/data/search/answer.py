"""Read the answer of an alignment server: an archive from the network, of which nothing is believed unseen.

Files are read from it by name and never unpacked to where it says; what it may take is bounded.
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
_PIECE = 1 << 20
_MOST_FILES = 1000


class DamagedAnswer(Exception):
    """An answer that is cut short, too large, or of something else."""


def unpacked(packed: IO[bytes], most: int) -> dict[str, str]:
    """Return the alignments (.a3m) and hits (.m8) in a tar.gz by name; whatever else is in it is left out.

    most: bytes that it may have when unpacked.  Errors: DamagedAnswer.
    """
    found: dict[str, str] = {}
    with tempfile.TemporaryFile() as plain:
        try:
            with gzip.open(packed) as stream:
                size = 0
                while piece := stream.read(_PIECE):
                    size += len(piece)
                    if size > most:
                        raise DamagedAnswer(f"has more than {most / 1e6:g} MB when unpacked")
                    plain.write(piece)
            plain.flush()
            # A map of the file ends where the file does: sizes that headers claim are never allocated.
            with (
                mmap.mmap(plain.fileno(), 0, access=mmap.ACCESS_READ) as whole,
                tarfile.open(fileobj=whole, mode="r:") as archive,
            ):
                for count, member in enumerate(archive):
                    name = _NAME.fullmatch(member.name)
                    if count > _MOST_FILES:
                        raise DamagedAnswer(f"has more than {_MOST_FILES} files")
                    file = archive.extractfile(member) if name and member.isreg() and not member.issparse() else None
                    if name and file is not None:
                        data = file.read(size)
                        if len(data) != member.size:
                            raise DamagedAnswer(f"is cut short in {name[1]}")
                        found[name[1]] = data.decode()
        except UnicodeDecodeError:
            raise DamagedAnswer("is not text") from None
        except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError, RecursionError) as error:
            raise DamagedAnswer(f"is no whole tar.gz ({printable(' '.join(str(error).split()))})") from None
    if not any(name.endswith(".a3m") for name in found):
        raise DamagedAnswer("has no alignment")
    return found


def read_rows(files: Mapping[str, str], sequence: str) -> dict[str, str]:
    """Return alignments of a sequence, each with the sequence's own row first, and hits as they are.

    Errors: DamagedAnswer for an alignment of another sequence, or of several.
    """
    found = {}
    for name, text in files.items():
        if name.endswith(".m8"):
            found[name] = text.replace("\0", "")
            continue
        entries = _entries(text, name)
        if len(entries) != 1:
            raise DamagedAnswer(f"has {len(entries)} alignments in {name}, and one was asked for")
        found[name] = _of_sequence(entries[0], sequence, name)
    return found


def read_pairs(files: Mapping[str, str], sequences: Sequence[str], first: int) -> dict[str, str]:
    """Return the alignments of several sequences, row by row, as one file of each name.

    first: the number of the first sequence, which its row is called by.  Errors: as in `read_rows`.
    """
    found = {}
    for name, text in ((name, text) for name, text in files.items() if name.endswith(".a3m")):
        entries = {re.sub(r"\s.*", "", entry[1:].partition("\n")[0]): entry for entry in _entries(text, name)}
        wanted = [str(first + place) for place in range(len(sequences))]
        if set(entries) != set(wanted):
            raise DamagedAnswer(f"has {len(entries)} alignments in {name}, and {len(wanted)} were asked for")
        rows = [_of_sequence(entries[number], own, name) for number, own in zip(wanted, sequences)]
        if len({text.count("\n>") for text in rows}) > 1:
            raise DamagedAnswer(f"has alignments of different depth in {name}, which cannot be pairs")
        found[name] = "\0".join(rows)
    return found


def _entries(text: str, name: str) -> list[str]:
    """Return the alignments of a file, each of which ends with NUL."""
    entries = [entry.strip("\r\n") for entry in text.split("\0") if entry.strip()]
    if not entries or not all(entry.startswith(">") for entry in entries):
        raise DamagedAnswer(f"has no alignment in {name}")
    return entries


def _of_sequence(entry: str, sequence: str, name: str) -> str:
    """Return an alignment with the sequence itself as its first row; X may stand there for what is no amino acid."""
    record, mark, rest = entry.partition("\n>")
    row = "".join(record.partition("\n")[2].split())
    try:
        own, found = encode(sequence), encode(row)
    except UserError as error:
        raise DamagedAnswer(str(error)) from None
    if len(own) != len(found) or any(a != b and b != UNKNOWN for a, b in zip(own, found)):
        raise DamagedAnswer(f"is of another sequence in {name} ({decode(found)[:20]} ..., {len(found)} residues)")
    text = f">query\n{sequence}{mark}{rest}\n"
    try:
        parse_alignment(text, name, sequence)
    except UserError as error:
        raise DamagedAnswer(str(error)) from None
    return text
