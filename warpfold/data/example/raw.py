"""Raw examples: one chain, its alignment, its coordinates; and the labels that follow from coordinates (Supp. 1.2).

A `RawExample` holds what can be prepared ahead of training and nothing that is drawn; `data.features.sample` does
the drawing.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from warpfold.batch import Arrays
from warpfold.data.example.layout import to_columns, to_tiles
from warpfold.data.example.template import Templates
from warpfold.data.formats.alignment import Alignment, decode, encode, encode_residues
from warpfold.data.similar.pairwise import MIN_IDENTITY, column_map
from warpfold.data.structure.mmcif import Chain, Structure
from warpfold.errors import UserError
from warpfold.geometry import atoms
from warpfold.geometry.residue import ATOM14_MASK, ATOM37_MASK, GAP

MSA_CODES = 22  # 20 residue types, X, gap
MIN_COVERAGE = 0.5  # the share of the chain's residues that the alignment must cover
TEMPLATE_ARRAYS = ("aatype", "positions", "mask", "sum_probs")  # of `Templates`; the names are a note
PROFILE_ROWS = 1024  # counted at a time
MOST_DELETIONS = np.iinfo(np.uint16).max


@dataclass(frozen=True)
class RawExample:
    """One chain with R alignment rows (no two alike) and, where known, its atoms.

    Row 0 is the chain's own sequence as alignments have it, with C, D and E where it has U, B and Z; `aatype` has X.
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
    release_date: str | None = None  # YYYY-MM-DD: a note, which a store keeps as JSON
    sources: tuple[str, ...] = ()  # where the alignment's rows come from
    templates: Templates | None = None

    @property
    def sequence(self) -> str:
        return decode(self.aatype)

    @property
    def length(self) -> int:
        """Residues."""
        return len(self.aatype)

    @property
    def depth(self) -> int:
        """Alignment rows, the chain's own included."""
        return len(self.msa)

    @property
    def templates_count(self) -> int:
        return 0 if self.templates is None else len(self.templates)

    def whole_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return some alignment rows (indices, ascending) over the whole chain: uint8 [len(rows), N]."""
        return self.msa[rows]

    def take(
        self,
        start: int,
        stop: int,
        rows: np.ndarray | None = None,
        templates: np.ndarray | None = None,
        whole: np.ndarray | None = None,
    ) -> "RawExample":
        """Residues [start, stop), these alignment rows and these templates (indices, ascending; None: all).

        whole: `whole_rows(rows)`, if it is there already.  The profile stays that of the whole alignment.
        """
        span = slice(start, stop)
        kept = slice(None) if rows is None else rows
        chosen = self.templates
        if chosen is not None and templates is not None:
            chosen = chosen.choose(templates)
        return replace(
            self,
            aatype=self.aatype[span],
            residue_index=self.residue_index[span],
            msa=self.msa[kept, span] if whole is None else whole[:, span],
            deletions=self.deletions[kept, span],
            profile=self.profile[span],
            positions=None if self.positions is None else self.positions[span],
            mask=None if self.mask is None else self.mask[span],
            templates=None if chosen is None or not len(chosen) else chosen.take(start, stop),
        )

    def to_arrays(self) -> Arrays:
        """The arrays, laid out for the store (`data.example.layout`, docs/formats.md); `notes` holds the rest."""
        names = ("aatype", "residue_index", "profile", "positions", "mask")
        arrays = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        arrays |= {"msa": to_tiles(self.msa), **to_columns(self.deletions)}
        if self.templates is not None and len(self.templates):
            arrays |= {f"template_{name}": getattr(self.templates, name) for name in TEMPLATE_ARRAYS}
        return arrays

    def notes(self) -> dict[str, Any]:
        """What is not an array, as JSON can hold it."""
        notes = {
            "name": self.name,
            "resolution": self.resolution,
            "release_date": self.release_date,
            "sources": list(self.sources),
        }
        return notes if self.templates is None else {**notes, "templates": list(self.templates.names)}


def from_sequence(
    sequence: str, alignments: Sequence[Alignment] = (), name: str = "query", min_identity: float = MIN_IDENTITY
) -> RawExample:
    """An example to predict: a sequence of letters and any number of alignments of it (none: it stands alone).

    Letters other than the twenty are X in `aatype`, and by HHblits' table in row 0 of the alignment, as officially
    (`data.formats.alignment.encode_residues`, `encode`).
    Errors: UserError for a character outside the alphabet, or an alignment of another protein.
    """
    aatype, row = encode_residues(sequence, name), encode(sequence, name)
    if not len(aatype):
        raise UserError(f"{name}: no residues; give an amino acid sequence")
    placed = [place(alignment, decode(row), min_identity) for alignment in alignments]
    msa, deletions = merge(row, placed)
    return RawExample(name, aatype, np.arange(len(aatype), dtype=np.int32), msa, deletions, profile_of(msa))


def from_chain(
    name: str,
    structure: Structure,
    chain: Chain,
    alignments: Sequence[Alignment] = (),
    sources: Iterable[str] = (),
    min_identity: float = MIN_IDENTITY,
) -> RawExample:
    """An example to train on: a chain with its coordinates and alignments of its SEQRES (or of a part, or precursor).

    sources: what to record about where `alignments` come from.
    Errors: UserError for an alignment of another protein.
    """
    return replace(
        from_sequence(chain.sequence, alignments, name, min_identity),
        residue_index=chain.residue_index.astype(np.int32),
        positions=chain.positions.astype(np.float32),
        mask=(chain.mask > 0).astype(np.uint8),
        resolution=structure.resolution,
        release_date=None if structure.release_date is None else structure.release_date.isoformat(),
        sources=tuple(sources),
    )


def place(alignment: Alignment, sequence: str, min_identity: float = MIN_IDENTITY) -> tuple[np.ndarray, np.ndarray]:
    """An alignment on the columns of `sequence`: rows uint8 [R, N], deletions uint16 [R, N].

    Columns of query residues that `sequence` lacks are cut out, at the ends for good, inside by counting what stood in
    them as deletions; residues that the query lacks get gaps.
    Errors: UserError when the query is of another protein: identity below `min_identity`, or too little covered.
    """
    column, identity = column_map(alignment.query, sequence)
    if error := check_map(column, identity, min_identity):
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


def check_map(column: np.ndarray, identity: float, min_identity: float = MIN_IDENTITY) -> str | None:
    """Why an alignment with this `column_map` is not used, or None."""
    covered = int((column >= 0).sum())
    if identity >= min_identity and covered >= MIN_COVERAGE * len(column):
        return None
    found = f"covers {covered} of {len(column)} residues, {identity:.0%} identical"
    return f"its query is another protein, or too small a part: {found} ({min_identity:.0%} and half are needed)"


def merge(query: np.ndarray, placed: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Alignments one after another: rows uint8 [R, N], deletions uint16 [R, N], the query (uint8 [N]) as row 0.

    A row equal to an earlier one goes, whatever its deletions (as official), and so does one of gaps alone.
    """
    first = query[None]
    parts = [(first, np.zeros(first.shape, np.uint16)), *((rows[1:], deletions[1:]) for rows, deletions in placed)]
    seen = {_digest(np.full(len(query), GAP, np.uint8))}
    kept = []
    for rows, deletions in parts:
        new = np.zeros(len(rows), bool)
        for index, row in enumerate(rows):
            digest = _digest(row)
            new[index] = digest not in seen
            seen.add(digest)
        kept.append((rows[new], deletions[new]) if not new.all() else (rows, deletions))
    rows, deletions = (np.concatenate(arrays) for arrays in zip(*kept))
    return rows, deletions


def _digest(row: np.ndarray) -> bytes:
    """What stands for a row in a set of many: 16 bytes, whatever its length."""
    return hashlib.blake2b(row.tobytes(), digest_size=16).digest()


def profile_of(msa: np.ndarray) -> np.ndarray:
    """Frequencies of residue types, X and gap in each column: uint8 [R, N] -> float32 [N, 22]."""
    columns = np.arange(msa.shape[1]) * MSA_CODES
    counts = np.zeros(msa.shape[1] * MSA_CODES, np.int64)
    for start in range(0, len(msa), PROFILE_ROWS):  # indices take eight times the room of residues
        counts += np.bincount((msa[start : start + PROFILE_ROWS] + columns).ravel(), minlength=len(counts))
    return (counts.reshape(-1, MSA_CODES) / len(msa)).astype(np.float32)


def atom_masks(aatype: np.ndarray) -> Arrays:
    """Which atoms each residue's type has: `atom14_atom_exists` [N, 14] and `atom37_atom_exists` [N, 37], float32."""
    return {"atom14_atom_exists": ATOM14_MASK[aatype], "atom37_atom_exists": ATOM37_MASK[aatype]}


def add_labels(features: Arrays) -> Arrays:
    """`features` and all that supervises the model, from `aatype`, `all_atom_positions` and `all_atom_mask`.

    Atoms in the 14 places of their residue type, under both namings of the ambiguous ones (Supp. 1.8.5); the frames of
    the backbone and of the other rigid groups (1.8.1); chi angles in radians (1.9.3); the distogram's points (1.9.8).
    float32, angstrom; quaternions w x y z with w >= 0.  What is masked is finite but means nothing.
    """
    aatype = torch.from_numpy(features["aatype"]).long()
    positions, mask = (torch.from_numpy(features[name]).float() for name in ("all_atom_positions", "all_atom_mask"))
    gt = atoms.atom37_to_atom14(aatype, positions * mask[..., None])
    gt_exists = atoms.atom37_to_atom14(aatype, mask)
    groups = atoms.atom37_to_frames(aatype, positions, mask)
    torsions = atoms.atom37_to_torsions(aatype, positions, mask)
    chi = torsions.sin_cos[..., 3:, :]
    labels = {
        "atom14_gt_positions": gt,
        "atom14_gt_exists": gt_exists,
        "atom14_alt_gt_positions": atoms.swap_atom14(aatype, gt),
        "atom14_alt_gt_exists": atoms.swap_atom14(aatype, gt_exists),
        "atom14_atom_is_ambiguous": atoms.residue_rows("ATOM14_AMBIGUOUS", aatype),
        "rigidgroups_gt_frames": groups.frames.to_flat12(),
        "rigidgroups_alt_gt_frames": groups.alt_frames.to_flat12(),
        "rigidgroups_gt_exists": groups.mask,
        "rigidgroups_group_exists": groups.exists,
        "rigidgroups_group_is_ambiguous": groups.ambiguous,
        "backbone_affine_tensor": groups.frames[..., 0].to_quaternion7(),
        "backbone_affine_mask": groups.mask[..., 0],
        "pseudo_beta": atoms.pseudo_beta(aatype, positions),
        "pseudo_beta_mask": atoms.pseudo_beta_mask(aatype, mask),
        "chi_angles": torch.atan2(chi[..., 0], chi[..., 1]),
        "chi_mask": torsions.mask[..., 3:],
    }
    return {**features, **{name: label.numpy() for name, label in labels.items()}}
