"""Define raw examples: a chain with its alignment, coordinates and templates, before any sampling (Supp. 1.2).

A `RawExample` holds the arrays that can be prepared before training. `data/features` samples from it and computes the
features. An `Assembly` is a set of chains that are folded together (AlphaFold-Multimer).
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from typing import Protocol

import numpy as np

from warpfold.data.example.pairing import Pairing, make_pairing, species_keys
from warpfold.data.formats.alignment import Alignment, decode, encode, encode_residues
from warpfold.data.similar.pairwise import MIN_IDENTITY, column_map
from warpfold.data.structure.chain import Chain, Structure
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM_ORDER, GAP, UNKNOWN

MSA_CODES = 22  # 20 residue types, X, gap
MIN_COVERAGE = 0.5  # fraction of the chain's residues
# The best templates of a search, from which training samples (Supp. 1.2.3).
MAX_TEMPLATES = 20
# Rows per block when the profile is counted.
PROFILE_ROWS = 1024
MAX_DELETIONS = np.iinfo(np.uint16).max
CA = ATOM_ORDER["CA"]
# Residues of a prediction with a lower pLDDT are masked in training. The paper filters by KL divergence instead.
MIN_CONFIDENCE = 50.0

Atoms = tuple[np.ndarray, np.ndarray]  # positions float32 [K, 37, 3], mask uint8 [K, 37]
# An alignment on a chain's residues: rows uint8 [R, N], deletion matrix uint16 [R, N].
Placed = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Templates:
    """T template structures on the N residues of a chain, best first. Residues without a counterpart are masked.

    `data/example/templates.py` builds them from template hits or from files.

    aatype: the template's residues, 0-19, 20 = X, 21 = gap. positions: angstrom, 0 where masked. names: such as
    "1abc_A". sum_probs: expected number of correctly aligned residues.
    """

    aatype: np.ndarray  # uint8 [T, N]
    positions: np.ndarray  # float32 [T, N, 37, 3]
    mask: np.ndarray  # uint8 [T, N, 37]
    names: tuple[str, ...]  # [T]
    sum_probs: np.ndarray  # float32 [T]

    def __len__(self) -> int:
        return len(self.names)

    def take(self, span: slice | np.ndarray) -> "Templates":
        """Select residues (a slice or ascending indices) of every template."""
        return replace(self, aatype=self.aatype[:, span], positions=self.positions[:, span], mask=self.mask[:, span])

    def choose(self, indices: np.ndarray) -> "Templates":
        """Select templates by `indices` (int [K]), in that order."""
        arrays = (self.aatype[indices], self.positions[indices], self.mask[indices])
        return Templates(*arrays, tuple(self.names[i] for i in indices), self.sum_probs[indices])


def concatenate_templates(templates: Sequence[Templates]) -> Templates | None:
    """Concatenate templates of one chain; None if there are none."""
    if len(templates) < 2:
        return templates[0] if templates else None
    aatype, positions, mask, sum_probs = (
        np.concatenate([getattr(member, name) for member in templates])
        for name in ("aatype", "positions", "mask", "sum_probs")
    )
    names = tuple(name for member in templates for name in member.names)
    return Templates(aatype, positions, mask, names, sum_probs)


@dataclass(frozen=True)
class RawExample:
    """A chain with R unique alignment rows and, if known, its atoms and templates.

    Row 0 is the chain's sequence in the letters of alignments: C, D and E for U, B and Z, which are X in `aatype`.

    aatype: 0-19, 20 = X. msa: 0-19, 20 = X, 21 = gap. deletions: the deletion matrix. profile: frequencies in the whole
    alignment. positions: angstrom. resolution: angstrom. release_date: YYYY-MM-DD. sources: files of the alignments.
    pairing: None if no row is paired with rows of other chains. confidence: pLDDT (0 to 100) of a prediction, None for
    other structures.
    """

    name: str
    aatype: np.ndarray  # uint8 [N]
    residue_index: np.ndarray  # int32 [N]
    msa: np.ndarray  # uint8 [R, N]
    deletions: np.ndarray  # uint16 [R, N]
    profile: np.ndarray  # float32 [N, 22]
    positions: np.ndarray | None = None  # float32 [N, 37, 3]
    mask: np.ndarray | None = None  # uint8 [N, 37]
    resolution: float | None = None
    release_date: str | None = None
    sources: tuple[str, ...] = ()
    templates: Templates | None = None
    pairing: Pairing | None = None
    confidence: np.ndarray | None = None  # float16 [N]

    @property
    def sequence(self) -> str:
        return decode(self.aatype)

    @property
    def length(self) -> int:
        """Return the number of residues."""
        return len(self.aatype)

    @property
    def depth(self) -> int:
        """Return the number of alignment rows, including the chain itself."""
        return len(self.msa)

    @property
    def templates_count(self) -> int:
        return 0 if self.templates is None else len(self.templates)

    def whole_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return alignment rows (ascending indices) over the whole chain: uint8 [len(rows), N]."""
        return self.msa[rows]

    @property
    def is_predicted(self) -> bool:
        return self.confidence is not None

    def atoms(self, residues: np.ndarray, least: float = 0.0) -> Atoms | None:
        """Return positions [K, 37, 3] and mask [K, 37] of K residues (ascending indices); None without atoms.

        least: residues of a prediction with a lower pLDDT are masked.
        """
        if self.positions is None or self.mask is None:
            return None
        is_confident = None if self.confidence is None else self.confidence[residues] >= least
        return self.positions[residues], mask_residues(self.mask[residues], is_confident)

    def take(
        self,
        residues: np.ndarray | slice,
        rows: np.ndarray | None = None,
        templates: np.ndarray | None = None,
        whole: np.ndarray | None = None,
    ) -> "RawExample":
        """Select residues (a slice, or ascending indices, as for a spatial crop), alignment rows and templates.

        rows, templates: ascending indices; None selects all. whole: `whole_rows(rows)`, if the caller has it already.
        The profile and the pairing still describe the whole alignment.
        """
        residues = as_slice(residues) if isinstance(residues, np.ndarray) else residues
        selected = slice(None) if rows is None else rows
        used_templates = self.templates
        if used_templates is not None and templates is not None:
            used_templates = used_templates.choose(templates)
        return replace(
            self,
            aatype=self.aatype[residues],
            residue_index=self.residue_index[residues],
            msa=self.msa[:, residues][selected] if whole is None else whole[:, residues],
            deletions=self.deletions[:, residues][selected],
            profile=self.profile[residues],
            positions=None if self.positions is None else self.positions[residues],
            mask=None if self.mask is None else self.mask[residues],
            confidence=None if self.confidence is None else self.confidence[residues],
            templates=None if used_templates is None or not len(used_templates) else used_templates.take(residues),
            pairing=None if self.pairing is None else self.pairing.select(selected),
        )

    def ca_positions(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return CA positions float32 [N, 3] in angstrom and mask uint8 [N] of the whole chain; None without atoms."""
        if self.positions is None or self.mask is None:
            return None
        return self.positions[:, CA], self.mask[:, CA]


class Example(Protocol):
    """Interface of a chain in memory (`RawExample`) or in a store (`StoredExample`)."""

    @property
    def sequence(self) -> str: ...
    @property
    def length(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def templates_count(self) -> int: ...
    @property
    def profile(self) -> np.ndarray: ...
    @property
    def pairing(self) -> Pairing | None: ...
    def whole_rows(self, rows: np.ndarray) -> np.ndarray: ...
    @property
    def is_predicted(self) -> bool: ...
    def atoms(self, residues: np.ndarray, least: float = 0.0) -> Atoms | None: ...
    def take(
        self,
        residues: np.ndarray | slice,
        rows: np.ndarray | None = None,
        templates: np.ndarray | None = None,
        whole: np.ndarray | None = None,
    ) -> RawExample: ...
    def ca_positions(self) -> tuple[np.ndarray, np.ndarray] | None: ...


@dataclass(frozen=True)
class Assembly:
    """K chains that are folded together, in input order, each with its alignment, atoms and templates.

    Chains with one sequence are copies of an entity and share their alignment and templates.

    ids: unique chain names. operators: float64 [K, 3, 4], rotation and translation in angstrom that place the atoms of
    each chain in the assembly (a biological assembly may contain a chain several times); None if they are in place.
    entities: `entity_id`, if it is known without reading the sequences. fixed: for each chain a template that its
    copies do not share, which precedes the shared templates (guess.py); empty without any.
    """

    name: str
    ids: tuple[str, ...]  # [K]
    chains: tuple[Example, ...]  # [K]
    operators: np.ndarray | None = None
    entities: tuple[int, ...] = ()  # [K]
    fixed: tuple[Templates | None, ...] = ()  # [K]

    @cached_property
    def entity_id(self) -> np.ndarray:
        """Return the entity of each chain, int64 [K], numbered from 1 in the order of first chains."""
        if self.entities:
            return np.array(self.entities, np.int64)
        numbers: dict[str, int] = {}
        return np.array([numbers.setdefault(chain.sequence, len(numbers) + 1) for chain in self.chains])

    @cached_property
    def sym_id(self) -> np.ndarray:
        """Return the number of each chain among the copies of its entity, int64 [K], from 1."""
        entity = self.entity_id
        return np.array([int((entity[: i + 1] == entity[i]).sum()) for i in range(len(entity))])

    @property
    def length(self) -> int:
        """Return the total number of residues."""
        return sum(chain.length for chain in self.chains)


def mask_residues(mask: np.ndarray, is_confident: np.ndarray | None) -> np.ndarray:
    """Clear the atom mask [K, 37] of residues that are not confident, bool [K]; None keeps all."""
    return mask if is_confident is None else mask * is_confident[:, None]


def as_slice(residues: np.ndarray) -> slice | np.ndarray:
    """Convert ascending indices without gaps to a slice, which avoids a copy."""
    is_contiguous = len(residues) and int(residues[-1] - residues[0]) == len(residues) - 1
    return slice(int(residues[0]), int(residues[-1]) + 1) if is_contiguous else residues


def from_sequence(
    sequence: str, alignments: Sequence[Alignment] = (), name: str = "query", pairing: bool = False
) -> RawExample:
    """Build an example for prediction from a sequence and its alignments, if any.

    Letters other than the twenty are X in `aatype`, and are encoded by HHblits' table in row 0 of the alignment, as in
    the official code (`encode_residues` and `encode` of `data/formats/alignment.py`). pairing: compute the pairing for
    a complex (`stack_for_pairing`); otherwise alignments for pairing are stacked like the others.
    Raises UserError for a character outside the alphabet, and for an alignment of another protein.
    """
    aatype, row = encode_residues(sequence, name), encode(sequence, name)
    if not len(aatype):
        raise UserError(f"{name}: no residues. Pass an amino acid sequence.")
    if alignments and (row == UNKNOWN).all():
        raise UserError(f"{name}: every residue is unknown (X), so it cannot be aligned. Pass an amino acid sequence.")
    placed = [place_alignment(alignment, decode(row)) for alignment in alignments]
    index = np.arange(len(aatype), dtype=np.int32)
    if not pairing:
        msa, deletions = merge(row, placed)
        return RawExample(name, aatype, index, msa, deletions, compute_profile(msa))
    msa, deletions, pairs = stack_for_pairing(row, alignments, placed)
    profile = compute_profile(msa if pairs is None else msa[pairs.unpaired])
    return RawExample(name, aatype, index, msa, deletions, profile, pairing=pairs)


def from_chain(
    name: str,
    structure: Structure,
    chain: Chain,
    alignments: Sequence[Alignment] = (),
    sources: Iterable[str] = (),
    pairing: bool = False,
) -> RawExample:
    """Build an example for training from a chain and alignments of its SEQRES, of a fragment, or of its precursor.

    sources: names of the alignments' files for the record. pairing: see `from_sequence`.
    Raises UserError for an alignment of another protein.
    """
    return replace(
        from_sequence(chain.sequence, alignments, name, pairing),
        residue_index=chain.residue_index.astype(np.int32),
        positions=chain.positions.astype(np.float32),
        mask=(chain.mask > 0).astype(np.uint8),
        resolution=structure.resolution,
        release_date=None if structure.release_date is None else structure.release_date.isoformat(),
        sources=tuple(sources),
    )


def place_alignment(alignment: Alignment, sequence: str) -> Placed:
    """Map an alignment to the residues of `sequence`: rows uint8 [R, N], deletions uint16 [R, N].

    Columns of query residues that `sequence` lacks are removed. Their residues count as deletions, except at the ends.
    Residues that the query lacks get gaps.
    Raises UserError if the query is another protein: identity below 90 %, or less than half of the residues covered.
    """
    if alignment.query == sequence:
        return alignment.rows, np.minimum(alignment.deletions, MAX_DELETIONS).astype(np.uint16)
    column, identity = column_map(alignment.query, sequence)
    if error := check_map(column, identity):
        raise UserError(f"alignment: {error}. Pass the alignment of this protein.")
    covered = np.flatnonzero(column >= 0)
    rows = np.full((len(alignment.rows), len(sequence)), GAP, np.uint8)
    deletions = np.zeros(rows.shape, np.uint16)
    rows[:, covered] = alignment.rows[:, column[covered]]
    last = -1
    for residue in covered.tolist():
        deleted = alignment.deletions[:, column[residue]]
        removed = slice(column[last] + 1 if last >= 0 else column[residue], column[residue])
        if removed.start < removed.stop:
            deleted = deleted + (alignment.deletions[:, removed] + (alignment.rows[:, removed] != GAP)).sum(1)
        deletions[:, residue] = np.minimum(deleted, MAX_DELETIONS)
        last = residue
    return rows, deletions


def check_map(column: np.ndarray, identity: float) -> str | None:
    """Return the reason why an alignment with this `column_map` cannot be used, or None."""
    covered = int((column >= 0).sum())
    if identity >= MIN_IDENTITY and covered >= MIN_COVERAGE * len(column):
        return None
    return (
        f"its query is another protein, or too small a fragment: covers {covered} of {len(column)} residues, "
        f"{identity:.0%} identical ({MIN_IDENTITY:.0%} and half are needed)"
    )


def merge(query: np.ndarray, placed: Iterable[Placed]) -> Placed:
    """Stack alignments below the query (uint8 [N]), which is row 0: rows uint8 [R, N], deletions uint16 [R, N].

    Rows of gaps and rows equal to an earlier one are dropped, even if their deletions differ (as in the official code).
    """
    return _stack(query, placed)[0]


def stack_for_pairing(
    query: np.ndarray, alignments: Sequence[Alignment], placed: Sequence[Placed]
) -> tuple[np.ndarray, np.ndarray, Pairing | None]:
    """Stack alignments as `merge` does, with those for pairing last, and compute the pairing of their rows.

    If there are alignments for pairing, only their rows are paired (as in the official code); otherwise all rows may
    be. A row for pairing is dropped if it equals an earlier row for pairing (with `pair_keys`: of the same key). Rows
    for pairing are also used unpaired if there is no other row, which cannot happen in the official code.
    Returns rows, deletions, and the pairing. It is None if no row can be paired; all alignments are then merged.
    """
    groups = [[i for i, a in enumerate(alignments) if a.stands_alone == alone] for alone in (True, False)]
    stacked, keys = [], []
    for group in groups:
        stacking_keys = [None if alignments[i].stands_alone else alignments[i].pair_keys for i in group]
        arrays, is_kept = _stack(query, [placed[i] for i in group], stacking_keys)
        stacked.append(arrays)
        group_keys = [np.zeros(1, np.uint64)]
        for alignment, is_row_kept in zip((alignments[i] for i in group), is_kept):
            rows = 1 + np.flatnonzero(is_row_kept)
            names = (alignment.names[row] for row in rows.tolist())
            group_keys.append(species_keys(names) if alignment.pair_keys is None else alignment.pair_keys[rows])
        keys.append(np.concatenate(group_keys))
    (msa, deletions), (pair_msa, pair_deletions) = stacked
    if not groups[1]:
        return msa, deletions, make_pairing(msa, keys[0], np.ones(len(msa), bool))
    unpaired = (np.arange(len(msa) + len(pair_msa) - 1) < len(msa)) | (len(msa) == 1)
    stacked_msa = np.concatenate([msa, pair_msa[1:]])
    pairs = make_pairing(stacked_msa, np.concatenate([np.zeros(len(msa), np.uint64), keys[1][1:]]), unpaired)
    if pairs is None:
        return *merge(query, [placed[i] for group in groups for i in group]), None
    return stacked_msa, np.concatenate([deletions, pair_deletions[1:]]), pairs


def _stack(
    query: np.ndarray, placed: Iterable[Placed], keys: Iterable[np.ndarray | None] = repeat(None)
) -> tuple[Placed, list[np.ndarray]]:
    """Stack alignments as `merge` does. Also returns which rows after the first were kept, bool [R - 1] per alignment.

    keys: uint64 [R] or None per alignment; equal rows with different keys are kept.
    """

    # Digests limit the memory of `digests` to 16 bytes per row.
    def digest(row: np.ndarray) -> bytes:
        return hashlib.blake2b(row.tobytes(), digest_size=16).digest()

    stacked = [(query[None], np.zeros((1, len(query)), np.uint16))]
    gaps = digest(np.full(len(query), GAP, np.uint8))
    digests = {gaps, digest(query)}
    is_kept = []
    for (rows, deletions), row_keys in zip(placed, keys):
        rows, deletions = rows[1:], deletions[1:]
        is_new = np.zeros(len(rows), bool)
        for index, row in enumerate(rows):
            key = digest(row)
            if row_keys is not None and key != gaps:
                key += row_keys[index + 1].tobytes()
            is_new[index] = key not in digests
            digests.add(key)
        is_kept.append(is_new)
        stacked.append((rows[is_new], deletions[is_new]) if not is_new.all() else (rows, deletions))
    rows, deletions = (np.concatenate(arrays) for arrays in zip(*stacked))
    return (rows, deletions), is_kept


def compute_profile(msa: np.ndarray) -> np.ndarray:
    """Compute the frequencies of residue types, X and gap in each column: uint8 [R, N] -> float32 [N, 22]."""
    columns = np.arange(msa.shape[1]) * MSA_CODES
    counts = np.zeros(msa.shape[1] * MSA_CODES, np.int64)
    # The int64 indices take eight times the memory of the rows, so the rows are counted in blocks.
    for start in range(0, len(msa), PROFILE_ROWS):
        counts += np.bincount((msa[start : start + PROFILE_ROWS] + columns).ravel(), minlength=len(counts))
    return (counts.reshape(-1, MSA_CODES) / len(msa)).astype(np.float32)
