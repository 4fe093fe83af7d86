"""What to fold: single proteins and complexes, with their names, and as assemblies with their alignments.

`query_files` reads them.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from string import ascii_lowercase, ascii_uppercase, digits

from warpfold.data.example.assembly import Assembly
from warpfold.data.example.pairing import pair_rows
from warpfold.data.example.raw_example import RawExample, from_sequence
from warpfold.data.formats.alignment import Alignment, as_row
from warpfold.data.formats.input_files import ChainAlignments
from warpfold.errors import UserError
from warpfold.files import file_name

MOST_LISTED = 8  # chains in one line
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

    def __post_init__(self) -> None:
        if twice := [name for name, times in Counter(self.ids).items() if times > 1]:
            raise UserError(f"{self.name}: has two chains called {twice[0]}; give each chain a name of its own")
        if wrong := [name for name in self.ids if not _ID.fullmatch(name)]:
            raise UserError(f"{self.name}: {wrong[0][:40]!r} cannot be a chain's name in mmCIF; use letters and digits")


def chain_ids(count: int) -> list[str]:
    """Return names for chains: A to Z, a to z, 0 to 9, as PDB files can have them, then AA, AB and so on."""
    length, named = 1, len(_LETTERS)
    found = list(_LETTERS[:count])
    while named < count:
        length += 1
        found += ["".join(letters) for letters, _ in zip(product(ascii_uppercase, repeat=length), range(count - named))]
        named = len(found)
    return found


def search_names(name: str, chains: Mapping[str, str]) -> dict[str, str]:
    """Return what the results of searching for each sequence are called: NAME, or NAME_CHAIN of a complex's first copy.

    Some file systems do not tell A from a: chains a of a complex that has a chain A too is NAME_a_.
    chains: id -> sequence.  The names are by sequence, in the order of the chains.
    """
    found: dict[str, str] = {}
    for chain, sequence in chains.items():
        if sequence not in found:
            own = name if len(chains) == 1 else file_name(f"{name}_{chain}")
            while own.lower() in map(str.lower, found.values()):
                own += "_"
            found[sequence] = own
    return found


def assemble(query: Complex, alignments: ChainAlignments | None = None) -> tuple[Assembly, list[str]]:
    """Return a complex with the alignments of its chains, and what the user should know about it, a line each.

    Copies share their example.  A chain without alignment has its own row alone.
    Errors: UserError for an alignment of another protein, or a sequence that is no protein's.
    """
    given: dict[str, list[Alignment]] = {}
    for alignment in query.alignments:
        given.setdefault(alignment.query, []).append(alignment)
    examples: dict[str, RawExample] = {}
    bare: list[str] = []
    thin: list[str] = []
    for chain, sequence in zip(query.ids, query.sequences):
        own = given.get(as_row(sequence), []) + (alignments.of(sequence) if alignments else [])
        bare += [] if own else [chain]
        if sequence not in examples:
            name = f"{query.name}_{chain}"
            examples[sequence] = from_sequence(
                sequence, own or [Alignment.of_query(sequence, name)], name, pairing=True
            )
        thin += [chain] if own and examples[sequence].depth == 1 else []
    notes = [*query.notes]
    if bare and len(query.ids) > 1:
        notes.append(f"no alignment for {listed(bare)}: folded by the sequence alone")
    if thin:
        notes.append(f"the alignment of {listed(thin)} has one row, its own: folded by the sequence alone")
    if unpaired := _unpaired_reason(list(examples.values())):
        notes.append(unpaired)
    return Assembly(query.name, query.ids, tuple(examples[sequence] for sequence in query.sequences)), notes


def _unpaired_reason(entities: Sequence[RawExample]) -> str | None:
    """Return why no rows of different sequences are paired though they have alignments, or None."""
    deep = [one for one in entities if one.depth > 1]
    if len(entities) < 2 or len(deep) < 2 or len(pair_rows([one.pairing for one in entities])) > 1:
        return None
    if sum(one.pairing is not None for one in deep) > 1:
        return "no rows are paired: the alignments of different chains have no species in common"
    return (
        "no rows are paired: the headers of the alignments name no species (UniProt's tr|A0A0K0ME10|A0A0K0ME10_9STAP, "
        "UniRef's RepID=A0A0K0ME10_9STAP, or OX=1295)"
    )


def listed(names: Sequence[str]) -> str:
    """Return chains as a sentence names them, some of them if there are many."""
    if len(names) > MOST_LISTED:
        return f"{len(names)} chains ({', '.join(names[:3])} ...)"
    return f"{'chain' if len(names) == 1 else 'chains'} {', '.join(names)}"


def first_word(header: str) -> str:
    """Return a record's name, as a chain can be called, or nothing."""
    word = (header.split() or [""])[0]
    return word if not word or _ID.fullmatch(word) else file_name(word)
