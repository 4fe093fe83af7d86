"""Pairing: which alignment rows of different chains belong to one organism (AlphaFold-Multimer, sec. 2.4)."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

MOST_OF_A_SPECIES = 600  # rows in one chain; a species with more is not paired (official `data/msa_pairing.py`)

# sp|P69905|HBA_HUMAN/2-142, tr|A0A146SKV9|A0A146SKV9_FUNHE: accession and entry name, perhaps with the number of an
# isoform; an entry name ends with UniProt's code for the organism.  Small BFD adds a number.
_UNIPROT = re.compile(
    r"(?:sp|tr)\|[A-Za-z0-9]{6,10}(?:_\d)?\|[A-Za-z0-9]+(?:_\d)?_([A-Za-z0-9]{1,5})(?:_\d+)?(?:[/\s]|$)"
)
# OX=9606 in UniProt's descriptions, TaxID=9606 in those of others: NCBI's number of the organism.
_TAXON = re.compile(r"\s(?:OX|TaxID)=(\d+)(?!\S)")
# Of a UniRef cluster, "UniRef90_A0A8C8W1K4 Tma7 n=2 Tax=Peromyscus TaxID=10040 RepID=A0A8C8W1K4_PERMB": the row is its
# representative, RepID, while the taxon is the one that all n members have in common, up to "root".
_CLUSTER = re.compile(r"UniRef\d+_|.*\sRepID=")
_REPRESENTATIVE = re.compile(r"\sRepID=[A-Za-z0-9-]+_([A-Za-z0-9]{1,5})(?!\S)")
_ONE_MEMBER = re.compile(r"\sn=1\s")
# UniRef100_A0A2T9WJQ3_1987490/: the number behind the cluster's name, in alignments that others made for pairing.
_CLUSTER_TAXON = re.compile(r"UniRef\d+_[A-Za-z0-9-]+_(\d+)(?:[/\s]|$)")


@dataclass(frozen=True)
class Pairing:
    """What pairing needs to know about the R rows of a chain's alignment, so that the rows themselves need not be read.

    Row 0, the chain's own, is paired with row 0 of every other chain, whatever its species.
    """

    species: np.ndarray  # uint64 [R], a hash of the organism's name; 0: unknown, such a row is never paired
    identity: np.ndarray  # float32 [R], the share of the chain's residues that the row has too
    digest: np.ndarray  # uint64 [R], a hash of the row's letters: equal rows have equal ones
    unpaired: np.ndarray  # bool [R], the row also stands alone, below the pairs; False: it serves pairing alone

    def __len__(self) -> int:
        return len(self.species)

    def select(self, rows: np.ndarray | slice) -> "Pairing":
        """Select some of the rows, by index, slice or mask; identity and digest stay those of the whole rows."""
        return Pairing(self.species[rows], self.identity[rows], self.digest[rows], self.unpaired[rows])


def species_of(header: str) -> str | None:
    """Return the organism that an alignment row's header names, without its >, or None.

    By the first of these that it has: UniProt's code in an identifier (`tr|A0A146SKV9|A0A146SKV9_FUNHE/1-57`: FUNHE),
    as the official code (`data/msa_identifiers.py`), or in that of a UniRef cluster's representative (`RepID=`); else
    NCBI's number, `OX=9606` or `TaxID=9606` after a blank, or behind the name of a UniRef cluster
    (`UniRef100_A0A2T9WJQ3_1987490/`).  A cluster's `TaxID=` counts only if it has one member.  FUNHE and 8078 are one
    fish, but are not known to be: rows named in different ways are never paired, so no pair is of two organisms.
    """
    if found := _UNIPROT.match(header) or _REPRESENTATIVE.search(header):
        return found[1].upper()
    mixed = _CLUSTER.match(header) and not _ONE_MEMBER.search(header)
    found = (None if mixed else _TAXON.search(header)) or _CLUSTER_TAXON.match(header)
    return found[1] if found else None


def key_of(name: str) -> int:
    """Return the hash by which rows of one name are paired: 64 bits, never 0."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") or 1


def species_keys(headers: Iterable[str]) -> np.ndarray:
    """Return the hash of the organism that each header names, 0 where it names none: uint64 [R]."""
    keys: dict[str | None, int] = {None: 0}
    names = [species_of(header) for header in headers]
    for name in names:
        if name is not None and name not in keys:
            keys[name] = key_of(name)
    return np.array([keys[name] for name in names], np.uint64)


def make_pairing(msa: np.ndarray, species: np.ndarray, unpaired: np.ndarray) -> Pairing | None:
    """Describe the rows of an alignment on its chain for pairing; None if no species of them is known.

    msa: uint8 [R, N], row 0 the chain's own, which counts as of no species (as in the official code, which names it
    after the chain).  species: uint64 [R].  unpaired: bool [R].  See `Pairing`.
    """
    species = species.copy()
    species[0] = 0
    if not species.any():
        return None
    identity = (msa == msa[0]).mean(1, dtype=np.float32)
    digests = b"".join(hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in msa)
    return Pairing(species, identity, np.frombuffer(digests, "<u8").astype(np.uint64), unpaired)


def pair_rows(pairings: Sequence[Pairing | None]) -> np.ndarray:
    """Return the rows of K chains' alignments that stand side by side: int64 [P, K], -1 where a chain has none.

    Row 0 of all chains comes first.  Then, for each species that is in two chains or more, and has at most 600 rows in
    each: a chain's rows of it by identity with the chain, the best first, and of these as many as the chain with the
    fewest has.  Rows of more chains come before rows of fewer; within these the product of the rows' numbers decides,
    -1 counting as 1, and then the numbers themselves.  What would stand there a second time, letter by letter, is left
    out.  (AlphaFold-Multimer, sec. 2.4; official `data/msa_pairing.py`.)

    None for a chain: it has nothing to pair.  Copies of an entity are chains of their own here.
    """
    chains = [_by_species(pairing) for pairing in pairings]
    names, times = np.unique(np.concatenate([chain[0] for chain in chains]), return_counts=True)
    names = names[times > 1]
    counts = np.zeros((len(names), len(chains)), np.int64)  # rows of each species in each chain
    for k, (own, starts, _) in enumerate(chains):
        known, at = _places(own, names)
        counts[at, k] = np.diff(starts)[known]
    taken = np.where(counts > 0, counts, MOST_OF_A_SPECIES).min(1, initial=MOST_OF_A_SPECIES)
    taken[(counts > MOST_OF_A_SPECIES).any(1)] = 0
    first = np.cumsum(taken) - taken
    rows = np.full((int(taken.sum()), len(chains)), -1, np.int64)
    for k, (own, starts, ordered) in enumerate(chains):
        known, at = _places(own, names)
        each = taken[at]
        place = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)  # 0, 1, ... within each species
        rows[np.repeat(first[at], each) + place, k] = ordered[np.repeat(starts[:-1][known], each) + place]
    with np.errstate(over="ignore"):  # of more than some seventy chains; then the numbers themselves decide
        product = np.abs(rows.astype(np.float64)).prod(1)
    order = np.lexsort((*rows.T[::-1], product, (rows < 0).sum(1)))
    rows = np.concatenate([np.zeros((1, len(chains)), np.int64), rows[order]])
    digests = np.zeros(rows.shape, np.uint64)
    for k, pairing in enumerate(pairings):
        if pairing is not None:
            digests[:, k] = np.where(rows[:, k] < 0, np.uint64(0), pairing.digest[rows[:, k]])
    return rows[np.sort(np.unique(digests, axis=0, return_index=True)[1])]  # each where it comes first


def _by_species(pairing: Pairing | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a chain's species [S], where the rows of each start [S + 1], and the rows, best first within each."""
    if pairing is None:
        return np.zeros(0, np.uint64), np.zeros(1, np.int64), np.zeros(0, np.int64)
    rows = np.flatnonzero(pairing.species)
    rows = rows[np.lexsort((-pairing.identity[rows], pairing.species[rows]))]  # it is stable
    own, starts = np.unique(pairing.species[rows], return_index=True)
    return own, np.append(starts, len(rows)), rows


def _places(own: np.ndarray, names: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Look up a chain's species in `names` (sorted): whether each is there, bool [S], and their places."""
    known = np.isin(own, names, assume_unique=True)
    return known, np.searchsorted(names, own[known])
