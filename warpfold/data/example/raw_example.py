"""Raw examples: one chain with its alignment, its coordinates and its templates, before anything is drawn (Supp. 1.2).

A `RawExample` holds what can be prepared ahead of training; `data/features` draws from it and makes the features.  An
`Assembly` is chains that are folded together (AlphaFold-Multimer).
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
MIN_COVERAGE = 0.5  # the share of the chain's residues that the alignment must cover
MOST_STORED = 20  # templates: the best of the search, among which training chooses (Supp. 1.2.3)
PROFILE_ROWS = 1024  # counted at a time
MOST_DELETIONS = np.iinfo(np.uint16).max
CA = ATOM_ORDER["CA"]
CONFIDENT = 50.0  # pLDDT: residues of a prediction below are not learnt from; the paper's own threshold is of the KL

Atoms = tuple[np.ndarray, np.ndarray]  # positions float32 [K, 37, 3] and mask uint8 [K, 37] of K residues
Placed = tuple[np.ndarray, np.ndarray]  # an alignment on a chain's residues: rows uint8 and deletions uint16, [R, N]


@dataclass(frozen=True)
class Templates:
    """T structures on the N residues of a chain, best first; residues without a counterpart in a template are masked.

    `data/example/templates.py` makes them from a search's hits or from files.
    """

    aatype: np.ndarray  # uint8 [T, N], the template's residues: 0-19, 20 = X, 21 = gap
    positions: np.ndarray  # float32 [T, N, 37, 3], angstrom, 0 where masked
    mask: np.ndarray  # uint8 [T, N, 37]
    names: tuple[str, ...]  # [T], such as "1abc_A"
    sum_probs: np.ndarray  # float32 [T], expected number of correctly aligned residues

    def __len__(self) -> int:
        return len(self.names)

    def take(self, span: slice | np.ndarray) -> "Templates":
        """Return some residues, a slice or ascending indices, of every template."""
        return replace(self, aatype=self.aatype[:, span], positions=self.positions[:, span], mask=self.mask[:, span])

    def choose(self, indices: np.ndarray) -> "Templates":
        """Return the templates at `indices` (int [K]), in that order."""
        arrays = (self.aatype[indices], self.positions[indices], self.mask[indices])
        return Templates(*arrays, tuple(self.names[i] for i in indices), self.sum_probs[indices])


def join(templates: Sequence[Templates]) -> Templates | None:
    """Return templates of one chain as one `Templates`, in the given order; None without any."""
    if len(templates) < 2:
        return templates[0] if templates else None
    aatype, positions, mask, sum_probs = (
        np.concatenate([getattr(one, name) for one in templates])
        for name in ("aatype", "positions", "mask", "sum_probs")
    )
    return Templates(aatype, positions, mask, tuple(name for one in templates for name in one.names), sum_probs)


@dataclass(frozen=True)
class RawExample:
    """One chain with R different alignment rows and, where known, its atoms and templates.

    Row 0 is the chain's own sequence as alignments have it: C, D and E where the chain has U, B and Z and `aatype` X.
    """

    name: str
    aatype: np.ndarray  # uint8 [N], 0-19, 20 = X
    residue_index: np.ndarray  # int32 [N]
    msa: np.ndarray  # uint8 [R, N], 0-19, 20 = X, 21 = gap
    deletions: np.ndarray  # uint16 [R, N], residues deleted before each column
    profile: np.ndarray  # float32 [N, 22], frequencies in the whole alignment
    positions: np.ndarray | None = None  # float32 [N, 37, 3], angstrom
    mask: np.ndarray | None = None  # uint8 [N, 37]
    resolution: float | None = None  # angstrom
    release_date: str | None = None  # YYYY-MM-DD: stores keep it as JSON
    sources: tuple[str, ...] = ()  # where the alignment's rows come from
    templates: Templates | None = None
    pairing: Pairing | None = None  # None: no row is paired with a row of another chain, and all stand alone
    confidence: np.ndarray | None = None  # float16 [N], 0 to 100: of a prediction, how sure its model was (pLDDT)

    @property
    def sequence(self) -> str:
        return decode(self.aatype)

    @property
    def length(self) -> int:
        """Return the number of residues."""
        return len(self.aatype)

    @property
    def depth(self) -> int:
        """Return the number of alignment rows, the chain's own included."""
        return len(self.msa)

    @property
    def templates_count(self) -> int:
        return 0 if self.templates is None else len(self.templates)

    def whole_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return some alignment rows (indices, ascending) over the whole chain: uint8 [len(rows), N]."""
        return self.msa[rows]

    @property
    def is_predicted(self) -> bool:
        return self.confidence is not None

    def atoms(self, residues: np.ndarray, least: float = 0.0) -> Atoms | None:
        """Return positions [K, 37, 3] and mask [K, 37] of K residues (indices, ascending); None where unknown.

        least: residues of a prediction with a lower confidence are masked.
        """
        if self.positions is None or self.mask is None:
            return None
        sure = None if self.confidence is None else self.confidence[residues] >= least
        return self.positions[residues], where_sure(self.mask[residues], sure)

    def take(
        self,
        residues: np.ndarray | slice,
        rows: np.ndarray | None = None,
        templates: np.ndarray | None = None,
        whole: np.ndarray | None = None,
    ) -> "RawExample":
        """Return some residues (a slice, or indices, ascending: the pieces of a spatial crop at once).

        rows, templates: those of the alignment and of the templates that are taken (indices, ascending; None: all).
        whole: `whole_rows(rows)`, if it is there already.  The profile stays that of the whole alignment, and so does
        what pairs its rows.
        """
        residues = as_slice(residues) if isinstance(residues, np.ndarray) else residues
        kept = slice(None) if rows is None else rows
        chosen = self.templates
        if chosen is not None and templates is not None:
            chosen = chosen.choose(templates)
        return replace(
            self,
            aatype=self.aatype[residues],
            residue_index=self.residue_index[residues],
            msa=self.msa[:, residues][kept] if whole is None else whole[:, residues],
            deletions=self.deletions[:, residues][kept],
            profile=self.profile[residues],
            positions=None if self.positions is None else self.positions[residues],
            mask=None if self.mask is None else self.mask[residues],
            confidence=None if self.confidence is None else self.confidence[residues],
            templates=None if chosen is None or not len(chosen) else chosen.take(residues),
            pairing=None if self.pairing is None else self.pairing.select(kept),
        )

    def ca_positions(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the CA atoms of the whole chain: float32 [N, 3], angstrom, and mask uint8 [N]; None without atoms."""
        if self.positions is None or self.mask is None:
            return None
        return self.positions[:, CA], self.mask[:, CA]


class Example(Protocol):
    """One chain, in memory (`RawExample`) or in a store (`StoredExample`)."""

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
    """Chains that are folded together, in the order of the input, each with its alignment, atoms and templates.

    Chains of one sequence are copies of one entity; they have the same alignment and the same templates.
    """

    name: str
    ids: tuple[str, ...]  # [K], the chains' names in input and output, all different
    chains: tuple[Example, ...]  # [K]
    # What moves the atoms of each chain to their place in the assembly: float64 [K, 3, 4], rotation and translation in
    # angstrom; None: they are there.  A biological assembly may have a chain several times, moved by its symmetry.
    operators: np.ndarray | None = None
    entities: tuple[int, ...] = ()  # [K], `entity_id` where it is known without reading the sequences
    # [K] or none: of each chain a template that its copies do not share, before those that they do (guess.py).
    fixed: tuple[Templates | None, ...] = ()

    @cached_property
    def entity_id(self) -> np.ndarray:
        """Return each chain's entity, int64 [K], numbered from 1 in the order of their first chains."""
        if self.entities:
            return np.array(self.entities, np.int64)
        numbers: dict[str, int] = {}
        return np.array([numbers.setdefault(chain.sequence, len(numbers) + 1) for chain in self.chains])

    @cached_property
    def sym_id(self) -> np.ndarray:
        """Return each chain's number among the copies of its entity, int64 [K], from 1."""
        entity = self.entity_id
        return np.array([int((entity[: place + 1] == entity[place]).sum()) for place in range(len(entity))])

    @property
    def length(self) -> int:
        """Return the number of residues of all chains."""
        return sum(chain.length for chain in self.chains)


def where_sure(mask: np.ndarray, sure: np.ndarray | None) -> np.ndarray:
    """Return the mask [K, 37] of atoms without those of residues that are not sure, bool [K]; None: all are."""
    return mask if sure is None else mask * sure[:, None]


def as_slice(residues: np.ndarray) -> slice | np.ndarray:
    """Return ascending indices as a slice if they have no gap: slicing copies nothing."""
    whole = len(residues) and int(residues[-1] - residues[0]) == len(residues) - 1
    return slice(int(residues[0]), int(residues[-1]) + 1) if whole else residues


def from_sequence(
    sequence: str, alignments: Sequence[Alignment] = (), name: str = "query", pairing: bool = False
) -> RawExample:
    """Make an example to predict from a sequence of letters and any number of alignments of it (none: just itself).

    Letters other than the twenty are X in `aatype`, and go by HHblits' table in row 0 of the alignment, as in the
    official code (`encode_residues` and `encode` of `data/formats/alignment.py`).  pairing: the chain may belong to a
    complex, so find what pairs its rows (`stack_for_pairing`); otherwise all alignments are alike.
    Errors: UserError for a character outside the alphabet, or an alignment of another protein.
    """
    aatype, row = encode_residues(sequence, name), encode(sequence, name)
    if not len(aatype):
        raise UserError(f"{name}: no residues; give an amino acid sequence")
    if alignments and (row == UNKNOWN).all():
        raise UserError(f"{name}: every residue is unknown (X), so nothing can be aligned; give an amino acid sequence")
    placed = [place(alignment, decode(row)) for alignment in alignments]
    index = np.arange(len(aatype), dtype=np.int32)
    if not pairing:
        msa, deletions = merge(row, placed)
        return RawExample(name, aatype, index, msa, deletions, profile_of(msa))
    msa, deletions, pairs = stack_for_pairing(row, alignments, placed)
    profile = profile_of(msa if pairs is None else msa[pairs.unpaired])
    return RawExample(name, aatype, index, msa, deletions, profile, pairing=pairs)


def from_chain(
    name: str,
    structure: Structure,
    chain: Chain,
    alignments: Sequence[Alignment] = (),
    sources: Iterable[str] = (),
    pairing: bool = False,
) -> RawExample:
    """Make an example to train on from a chain and alignments of its SEQRES (or of a part of it, or its precursor).

    sources: what to record about where `alignments` come from.  pairing: as in `from_sequence`.
    Errors: UserError for an alignment of another protein.
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


def place(alignment: Alignment, sequence: str) -> Placed:
    """Return an alignment on the columns of `sequence`: rows uint8 [R, N], deletions uint16 [R, N].

    Columns of query residues that `sequence` lacks are cut out; the residues in them count as deletions, except at the
    ends.  Residues that the query lacks get gaps.
    Errors: UserError if the query is another protein: identity below 90 %, or too little covered.
    """
    if alignment.query == sequence:
        return alignment.rows, np.minimum(alignment.deletions, MOST_DELETIONS).astype(np.uint16)
    column, identity = column_map(alignment.query, sequence)
    if error := check_map(column, identity):
        raise UserError(f"alignment: {error}; give the alignment of this protein")
    covered = np.flatnonzero(column >= 0)
    rows = np.full((len(alignment.rows), len(sequence)), GAP, np.uint8)
    deletions = np.zeros(rows.shape, np.uint16)
    rows[:, covered] = alignment.rows[:, column[covered]]
    last = -1
    for place in covered.tolist():
        deleted = alignment.deletions[:, column[place]]
        cut = slice(column[last] + 1 if last >= 0 else column[place], column[place])
        if cut.start < cut.stop:
            deleted = deleted + (alignment.deletions[:, cut] + (alignment.rows[:, cut] != GAP)).sum(1)
        deletions[:, place] = np.minimum(deleted, MOST_DELETIONS)
        last = place
    return rows, deletions


def check_map(column: np.ndarray, identity: float) -> str | None:
    """Return why an alignment with this `column_map` is not used, or None."""
    covered = int((column >= 0).sum())
    if identity >= MIN_IDENTITY and covered >= MIN_COVERAGE * len(column):
        return None
    found = f"covers {covered} of {len(column)} residues, {identity:.0%} identical"
    return f"its query is another protein, or too small a part: {found} ({MIN_IDENTITY:.0%} and half are needed)"


def merge(query: np.ndarray, placed: Iterable[Placed]) -> Placed:
    """Stack alignments below the query (uint8 [N]), as row 0: rows uint8 [R, N], deletions uint16 [R, N].

    Rows with only gaps are dropped, and rows equal to an earlier one, even with other deletions (as official).
    """
    return _stack(query, placed)[0]


def stack_for_pairing(
    query: np.ndarray, alignments: Sequence[Alignment], placed: Sequence[Placed]
) -> tuple[np.ndarray, np.ndarray, Pairing | None]:
    """Stack alignments as `merge` does, those that serve pairing alone last, and find what pairs their rows.

    If there are alignments that serve pairing alone, only their rows are paired (as official); otherwise all may be.
    Rows for pairing are dropped if they equal an earlier one of these; rows with `pair_keys`, if they also pair alike.
    Where no other alignment has a row, they stand alone too: officially there always is one.
    None: no row can be paired, so all alignments are alike.
    """
    parts = [[i for i, one in enumerate(alignments) if one.stands_alone == alone] for alone in (True, False)]
    stacked, keys = [], []
    for part in parts:
        given = [None if alignments[i].stands_alone else alignments[i].pair_keys for i in part]
        arrays, kept = _stack(query, [placed[i] for i in part], given)
        stacked.append(arrays)
        own = [np.zeros(1, np.uint64)]
        for one, new in zip((alignments[i] for i in part), kept):
            rows = 1 + np.flatnonzero(new)
            names = (one.names[row] for row in rows.tolist())
            own.append(species_keys(names) if one.pair_keys is None else one.pair_keys[rows])
        keys.append(np.concatenate(own))
    (msa, deletions), (more, more_deletions) = stacked
    if not parts[1]:
        return msa, deletions, make_pairing(msa, keys[0], np.ones(len(msa), bool))
    unpaired = (np.arange(len(msa) + len(more) - 1) < len(msa)) | (len(msa) == 1)
    both = np.concatenate([msa, more[1:]])
    pairs = make_pairing(both, np.concatenate([np.zeros(len(msa), np.uint64), keys[1][1:]]), unpaired)
    if pairs is None:
        return *merge(query, [placed[i] for part in parts for i in part]), None
    return both, np.concatenate([deletions, more_deletions[1:]]), pairs


def _stack(
    query: np.ndarray, placed: Iterable[Placed], keys: Iterable[np.ndarray | None] = repeat(None)
) -> tuple[Placed, list[np.ndarray]]:
    """Stack alignments as `merge` does; also return which of the rows below each one's first were kept, bool [R - 1].

    keys: of each alignment, uint64 [R] or None; rows with other keys count as different.
    """

    def digest(row: np.ndarray) -> bytes:  # so that `seen` takes 16 bytes per row, however long it is
        return hashlib.blake2b(row.tobytes(), digest_size=16).digest()

    stacked = [(query[None], np.zeros((1, len(query)), np.uint16))]
    gaps = digest(np.full(len(query), GAP, np.uint8))
    seen = {gaps, digest(query)}
    kept = []
    for (rows, deletions), own in zip(placed, keys):
        rows, deletions = rows[1:], deletions[1:]
        new = np.zeros(len(rows), bool)
        for index, row in enumerate(rows):
            key = digest(row)
            if own is not None and key != gaps:
                key += own[index + 1].tobytes()
            new[index] = key not in seen
            seen.add(key)
        kept.append(new)
        stacked.append((rows[new], deletions[new]) if not new.all() else (rows, deletions))
    rows, deletions = (np.concatenate(arrays) for arrays in zip(*stacked))
    return (rows, deletions), kept


def profile_of(msa: np.ndarray) -> np.ndarray:
    """Return the frequencies of residue types, X and gap in each column: uint8 [R, N] -> float32 [N, 22]."""
    columns = np.arange(msa.shape[1]) * MSA_CODES
    counts = np.zeros(msa.shape[1] * MSA_CODES, np.int64)
    for start in range(0, len(msa), PROFILE_ROWS):  # the indices take eight times the memory of the residues
        counts += np.bincount((msa[start : start + PROFILE_ROWS] + columns).ravel(), minlength=len(counts))
    return (counts.reshape(-1, MSA_CODES) / len(msa)).astype(np.float32)
