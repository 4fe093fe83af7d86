"""Pair alignment rows of different chains that belong to one organism (AlphaFold-Multimer, sec. 2.4)."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

# A species with more rows than this in a chain is not paired (official `data/msa_pairing.py`).
MAX_SPECIES_ROWS = 600

# sp|P69905|HBA_HUMAN/2-142, tr|A0A146SKV9|A0A146SKV9_FUNHE: accession and entry name, optionally with the number of an
# isoform. An entry name ends with UniProt's code of the organism. Small BFD appends a number.
_UNIPROT = re.compile(
    r"(?:sp|tr)\|[A-Za-z0-9]{6,10}(?:_\d)?\|[A-Za-z0-9]+(?:_\d)?_([A-Za-z0-9]{1,5})(?:_\d+)?(?:[/\s]|$)"
)
# NCBI's number of the organism: OX=9606 in UniProt's descriptions, TaxID=9606 in others.
_TAXON = re.compile(r"\s(?:OX|TaxID)=(\d+)(?!\S)")
# A UniRef cluster, "UniRef90_A0A8C8W1K4 Tma7 n=2 Tax=Peromyscus TaxID=10040 RepID=A0A8C8W1K4_PERMB": the row is the
# representative, RepID. The taxon is the lowest common ancestor of all n members, which may be "root".
_CLUSTER = re.compile(r"UniRef\d+_|.*\sRepID=")
_REPRESENTATIVE = re.compile(r"\sRepID=[A-Za-z0-9-]+_([A-Za-z0-9]{1,5})(?!\S)")
_ONE_MEMBER = re.compile(r"\sn=1\s")
# UniRef100_A0A2T9WJQ3_1987490/: the number after the cluster's name, in alignments that were prepared for pairing.
_CLUSTER_TAXON = re.compile(r"UniRef\d+_[A-Za-z0-9-]+_(\d+)(?:[/\s]|$)")


@dataclass(frozen=True)
class Pairing:
    """Properties of the R rows of a chain's alignment that determine the pairing, so that the rows need not be read.

    Row 0, the chain itself, is always paired with row 0 of the other chains.

    species: hash of the organism's name; 0 means unknown, and the row is never paired. identity: fraction of the
    chain's residues that are equal in the row. digest: hash of the row's letters. unpaired: the row is also used
    unpaired, below the pairs; False: it is used only for pairing.
    """

    species: np.ndarray  # uint64 [R]
    identity: np.ndarray  # float32 [R]
    digest: np.ndarray  # uint64 [R]
    unpaired: np.ndarray  # bool [R]

    def __len__(self) -> int:
        return len(self.species)

    def select(self, rows: np.ndarray | slice) -> "Pairing":
        """Select rows by indices, slice or mask."""
        return Pairing(self.species[rows], self.identity[rows], self.digest[rows], self.unpaired[rows])


def species_of(header: str) -> str | None:
    """Parse the organism in the header (without >) of an alignment row; None if it names none.

    The first of these counts: UniProt's code in an identifier (`tr|A0A146SKV9|A0A146SKV9_FUNHE/1-57`: FUNHE), as in the
    official code (`data/msa_identifiers.py`), or in that of a UniRef cluster's representative (`RepID=`); NCBI's number
    (`OX=9606` or `TaxID=9606` after a blank); NCBI's number after the name of a UniRef cluster
    (`UniRef100_A0A2T9WJQ3_1987490/`). The `TaxID=` of a cluster counts only if the cluster has one member. FUNHE and
    8078 are the same fish, but codes and numbers are never matched, so no pair mixes two organisms.
    """
    if match := _UNIPROT.match(header) or _REPRESENTATIVE.search(header):
        return match[1].upper()
    is_mixed = _CLUSTER.match(header) and not _ONE_MEMBER.search(header)
    match = (None if is_mixed else _TAXON.search(header)) or _CLUSTER_TAXON.match(header)
    return match[1] if match else None


def hash_name(name: str) -> int:
    """Hash a name to the 64-bit key by which rows are paired. The key is never 0."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") or 1


def species_keys(headers: Iterable[str]) -> np.ndarray:
    """Hash the organism in each header, uint64 [R]; 0 if it names none."""
    names = [species_of(header) for header in headers]
    keys: dict[str | None, int] = {name: hash_name(name) for name in dict.fromkeys(names) if name is not None}
    return np.array([keys.get(name, 0) for name in names], np.uint64)


def make_pairing(msa: np.ndarray, species: np.ndarray, unpaired: np.ndarray) -> Pairing | None:
    """Compute the `Pairing` of an alignment; None if no row has a known species.

    msa: uint8 [R, N]. Row 0 is the chain itself and gets no species, as in the official code, which names it after the
    chain. species: uint64 [R]. unpaired: bool [R].
    """
    species = species.copy()
    species[0] = 0
    if not species.any():
        return None
    identity = (msa == msa[0]).mean(1, dtype=np.float32)
    digests = b"".join(hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in msa)
    return Pairing(species, identity, np.frombuffer(digests, "<u8").astype(np.uint64), unpaired)


def pair_rows(pairings: Sequence[Pairing | None]) -> np.ndarray:
    """Pair the alignment rows of K chains; returns row indices, int64 [P, K], -1 where a chain has no row.

    Row 0 of all chains comes first. Every species that occurs in at least two chains, with at most 600 rows in each,
    contributes as many pairs as the chain with the fewest rows has; the rows with the highest identity are used. Pairs
    of more chains precede pairs of fewer. Within these, pairs are sorted by the product of the row indices, in which -1
    counts as 1, and then by the indices. Repeated pairs with equal letters are dropped. (AlphaFold-Multimer, sec. 2.4;
    official `data/msa_pairing.py`.)

    pairings: of each chain; None if it has no rows to pair. Copies of an entity are separate chains.
    """
    chains = [_group_by_species(pairing) for pairing in pairings]
    shared, times = np.unique(np.concatenate([chain[0] for chain in chains]), return_counts=True)
    shared = shared[times > 1]
    # Number of rows of each shared species in each chain.
    counts = np.zeros((len(shared), len(chains)), np.int64)
    for k, (species, starts, _) in enumerate(chains):
        is_shared = np.isin(species, shared, assume_unique=True)
        counts[np.searchsorted(shared, species[is_shared]), k] = np.diff(starts)[is_shared]
    pairs = np.where(counts > 0, counts, MAX_SPECIES_ROWS).min(1, initial=MAX_SPECIES_ROWS)
    pairs[(counts > MAX_SPECIES_ROWS).any(1)] = 0
    first = np.cumsum(pairs) - pairs
    rows = np.full((int(pairs.sum()), len(chains)), -1, np.int64)
    for k, (species, starts, ordered) in enumerate(chains):
        is_shared = np.isin(species, shared, assume_unique=True)
        at = np.searchsorted(shared, species[is_shared])
        sizes = pairs[at]
        # 0, 1, 2 and so on within each species.
        rank = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        rows[np.repeat(first[at], sizes) + rank, k] = ordered[np.repeat(starts[:-1][is_shared], sizes) + rank]
    # The product overflows for more than about seventy chains. The indices themselves then decide.
    with np.errstate(over="ignore"):
        product = np.abs(rows.astype(np.float64)).prod(1)
    order = np.lexsort((*rows.T[::-1], product, np.count_nonzero(rows < 0, axis=1)))
    rows = np.concatenate([np.zeros((1, len(chains)), np.int64), rows[order]])
    digests = np.zeros(rows.shape, np.uint64)
    for k, pairing in enumerate(pairings):
        if pairing is not None:
            digests[:, k] = np.where(rows[:, k] < 0, np.uint64(0), pairing.digest[rows[:, k]])
    # Of equal pairs the first one is kept.
    return rows[np.sort(np.unique(digests, axis=0, return_index=True)[1])]


def _group_by_species(pairing: Pairing | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Group a chain's rows by species, best identity first. Returns the species [S], group starts [S + 1], and rows."""
    if pairing is None:
        return np.zeros(0, np.uint64), np.zeros(1, np.int64), np.zeros(0, np.int64)
    rows = np.flatnonzero(pairing.species)
    rows = rows[np.lexsort((-pairing.identity[rows], pairing.species[rows]))]
    species, starts = np.unique(pairing.species[rows], return_index=True)
    return species, np.append(starts, len(rows)), rows
