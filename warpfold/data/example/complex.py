"""Define `Complex`: chains to fold together as read from a file, with names, sequences, alignments and notes."""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits

from warpfold.data.example.guess import GuessStructure
from warpfold.data.formats.alignment import Alignment, as_row
from warpfold.errors import UserError
from warpfold.files import file_name

# Chain names: printable ASCII without blanks and quotes. In mmCIF, . and ? are missing values.
_ID = re.compile(r"(?![.?]\Z)[!#-&(-~]{1,100}")
# Chain names that the PDB format allows.
_LETTERS = ascii_uppercase + ascii_lowercase + digits


@dataclass(frozen=True)
class Complex:
    """A query: K chains to fold together, in the user's order. A single protein has one chain.

    name: valid as a file name. ids: unique chain names. sequences: upper case. alignments: those that came with the
    query, each of one of the sequences. notes: messages for the user, such as omitted chains. error: the reason why the
    query cannot be folded; it then has no chains. source: its file. place: for a query from an alignment, its rank in
    the stacking order. is_part: an alignment that ColabFold's NAME.a3m includes too. uses: resolved paths of files that
    the query's file refers to; they are not queries themselves. structure: for a query from a structure file, that
    structure.
    """

    name: str
    ids: tuple[str, ...]  # [K]
    sequences: tuple[str, ...]  # [K]
    alignments: tuple[Alignment, ...] = ()
    notes: tuple[str, ...] = ()
    error: str = ""
    source: str = ""
    place: int | None = None
    is_part: bool = False
    uses: tuple[Path, ...] = ()
    structure: GuessStructure | None = None

    def __post_init__(self) -> None:
        if invalid := [name for name in self.ids if not _ID.fullmatch(name)]:
            raise UserError(
                f"{self.name}: {invalid[0][:40]!r} cannot be a chain name in mmCIF. Use letters and digits."
            )
        if repeated := [name for name, times in Counter(self.ids).items() if times > 1]:
            raise UserError(f"{self.name}: has two chains called {repeated[0]}. Give each chain a unique name.")

    @property
    def rows(self) -> set[str]:
        """Return the set of sequences in the letters of alignment rows (see `as_row`)."""
        return set(map(as_row, self.sequences))

    def joined(self, others: Iterable["Complex"]) -> "Complex":
        """Add the alignments of the same sequences from other queries.

        A job uses only its own alignments for a sequence if it has any.
        """
        donors = sorted([*([] if self.place is None else [self]), *others], key=lambda query: query.place or 0)
        alignments = self.alignments if self.place is None else ()
        missing = self.rows - {alignment.query for alignment in alignments}
        alignments += tuple(a for donor in donors for a in donor.alignments if a.query in missing)
        notes = dict.fromkeys(note for query in (self, *donors) for note in query.notes)
        return replace(self, alignments=alignments, notes=tuple(notes)) if alignments else self


def chain_ids(count: int) -> list[str]:
    """List `count` chain names: A to Z, a to z, 0 to 9, which the PDB format allows, then AA, AB and so on."""
    longer = (itertools.product(ascii_uppercase, repeat=length) for length in itertools.count(2))
    names = itertools.chain(_LETTERS, map("".join, itertools.chain.from_iterable(longer)))
    return list(itertools.islice(names, count))


def first_word(header: str) -> str:
    """Return the first word of a FASTA header as a valid chain name, or ""."""
    word = (header.split() or [""])[0]
    return word if not word or _ID.fullmatch(word) else file_name(word)


def distinct_names(words: Sequence[str]) -> list[str]:
    """Convert protein names to file names. Names that become equal (`β1` and `α1`) are numbered."""
    # Some file systems ignore case.
    originals = {word.lower() for word in words}
    word_of: dict[str, str] = {}
    names = []
    for word in words:
        name = file_name(word)
        if name != word and (name.lower() in originals or word_of.get(name.lower(), word) != word):
            numbered = (f"{name}_{n}" for n in itertools.count(2))
            name = next(new for new in numbered if new.lower() not in word_of.keys() | originals)
        word_of.setdefault(name.lower(), word)
        names.append(name)
    return names
