"""Chains to fold together, as files give them: their names, sequences, alignments, and what is to be said of them."""

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

_ID = re.compile(r"(?![.?]\Z)[!#-&(-~]{1,100}")  # printable ASCII without blanks and quotes; . and ? mean none in mmCIF
_LETTERS = ascii_uppercase + ascii_lowercase + digits  # what a PDB file can name


@dataclass(frozen=True)
class Complex:
    """Chains to fold together, in the user's order; a single protein is one of one chain."""

    name: str  # as a file can be called
    ids: tuple[str, ...]  # [K], all different
    sequences: tuple[str, ...]  # [K], upper case
    alignments: tuple[Alignment, ...] = ()  # that came with it, each of one of the sequences
    notes: tuple[str, ...] = ()  # what the user should know, such as chains that were left out
    error: str = ""  # why it cannot be folded; it has no chains then
    source: str = ""  # the file that it stands in
    place: int | None = None  # if that is an alignment: where it is stacked
    is_part: bool = False  # an alignment that ColabFold has put into NAME.a3m, too
    uses: tuple[Path, ...] = ()  # other files that its file names, resolved: they are no queries of their own
    structure: GuessStructure | None = None  # its own, where it was read from one

    def __post_init__(self) -> None:
        if wrong := [name for name in self.ids if not _ID.fullmatch(name)]:
            raise UserError(f"{self.name}: {wrong[0][:40]!r} cannot be a chain's name in mmCIF; use letters and digits")
        if twice := [name for name, times in Counter(self.ids).items() if times > 1]:
            raise UserError(f"{self.name}: has two chains called {twice[0]}; give each chain a name of its own")

    @property
    def rows(self) -> set[str]:
        """Return the sequences in the letters of alignments."""
        return set(map(as_row, self.sequences))

    def joined(self, others: Iterable["Complex"]) -> "Complex":
        """Return it with the alignments of its sequences from others; a job keeps to those that it gives itself."""
        every = sorted([*([] if self.place is None else [self]), *others], key=lambda one: one.place or 0)
        own = self.alignments if self.place is None else ()
        wanted = self.rows - {alignment.query for alignment in own}
        more = (*own, *(a for one in every for a in one.alignments if a.query in wanted))
        notes = dict.fromkeys(note for one in (self, *every) for note in one.notes)
        return replace(self, alignments=more, notes=tuple(notes)) if more else self


def chain_ids(count: int) -> list[str]:
    """Return names for chains: A to Z, a to z, 0 to 9, as PDB files can have them, then AA, AB and so on."""
    longer = (itertools.product(ascii_uppercase, repeat=length) for length in itertools.count(2))
    names = itertools.chain(_LETTERS, map("".join, itertools.chain.from_iterable(longer)))
    return list(itertools.islice(names, count))


def first_word(header: str) -> str:
    """Return a record's name, as a chain can be called, or nothing."""
    word = (header.split() or [""])[0]
    return word if not word or _ID.fullmatch(word) else file_name(word)


def distinct_names(words: Sequence[str]) -> list[str]:
    """Turn names of proteins into names of files; those that become alike (`β1` and `α1`) are told apart by numbers."""
    given = {word.lower() for word in words}
    owners: dict[str, str] = {}  # by name, as file systems may see it
    found = []
    for word in words:
        name = file_name(word)
        if name != word and (name.lower() in given or owners.get(name.lower(), word) != word):
            numbered = (f"{name}_{n}" for n in itertools.count(2))
            name = next(new for new in numbered if new.lower() not in owners.keys() | given)
        owners.setdefault(name.lower(), word)
        found.append(name)
    return found
