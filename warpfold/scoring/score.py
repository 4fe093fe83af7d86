"""Score a predicted structure against a reference: pair chains and residues, then measure.

Chains are paired by sequence and, among copies, by the interfaces (`chain_mapping.py`). Residues are paired by
alignment or by number. Chain names and numbering may differ. Residues that the prediction lacks lower its scores. A
reference chain without a counterpart is excluded from the scores of the whole structure and reported; it lowers the
scores of the interfaces (`score_complex.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.data.structure.assemblies import apply_operator
from warpfold.data.structure.chain import Chain, Structure
from warpfold.data.structure.mmcif import read_structure
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM14_NAMES, ATOM14_SWAP, ATOM_ORDER, RESTYPES
from warpfold.scoring import metrics
from warpfold.scoring.chain_mapping import CA, count_equal, map_chains, named_chains, similar_chains, with_ca
from warpfold.scoring.dockq import Array, Docking
from warpfold.scoring.score_complex import ComplexScore, compare_interfaces, interface_lddt


@dataclass(frozen=True, kw_only=True, repr=False)
class Score:
    """The scores of a prediction against a reference, between 0 and 1.

    lddt: over all heavy atoms, with the names of symmetric side-chain atoms that score best; None if one of the
        structures has only Ca.
    rmsd: angstrom, over the paired Ca after their best superposition.
    residues: residues of the reference with Ca. paired: how many of them the prediction has.
    identity: fraction of the paired residues that are the same amino acid.
    chains: predicted -> reference. left_out, extra: chains of the reference and of the prediction without counterpart.
    dropped: polymers of either file that were ignored, with the reason. notes: remarks on how the files were read.
    complex: None for a reference with one chain, and if one of the structures has only Ca.
    """

    lddt_ca: float
    lddt: float | None
    tm: float
    gdt_ts: float
    gdt_ha: float
    rmsd: float
    residues: int
    paired: int
    identity: float
    chains: dict[str, str]
    left_out: list[str]
    extra: list[str]
    dropped: list[str]
    notes: list[str]
    complex: ComplexScore | None

    def __repr__(self) -> str:
        over = f"{self.paired} of {self.residues} residues"
        return f"<Score: lDDT-Ca {self.lddt_ca:.4f}, TM {self.tm:.4f}, RMSD {self.rmsd:.3f} over {over}>"

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain types for JSON; NaN becomes null."""
        return {k: None if isinstance(v, float) and np.isnan(v) else v for k, v in asdict(self).items()}

    def rows(self) -> list[tuple[str, str]]:
        """Format the scores as (label, value) rows."""
        rows = [
            ("lDDT-Ca", f"{self.lddt_ca:.4f}"),
            ("lDDT, all atoms", "- (Ca only)" if self.lddt is None else f"{self.lddt:.4f}"),
            ("TM-score", f"{self.tm:.4f}"),
            ("GDT-TS", f"{self.gdt_ts:.4f}"),
            ("GDT-HA", f"{self.gdt_ha:.4f}"),
            ("RMSD of Ca", f"{self.rmsd:.3f} Å"),
            ("residues paired", f"{self.paired} of {self.residues}, {self.identity:.0%} identical"),
            ("chains", ", ".join(f"{p} → {r}" for p, r in self.chains.items())),
        ]
        for label, names in (("left out", self.left_out), ("not in reference", self.extra), ("dropped", self.dropped)):
            rows += [(label, ", ".join(names))] if names else []
        rows += [("note", note) for note in self.notes]
        if self.complex:
            rows += self.complex.rows()
        elif self.lddt is None and len(self.chains) + len(self.left_out) > 1:
            rows.append(("interfaces", "- (Ca only)"))
        return rows


def score_files(
    predicted: str | Path | Structure,
    reference: str | Path | Structure,
    chains: Mapping[str, str] | None = None,
    assembly: bool = False,
    allow_unplaced: bool = False,
) -> Score:
    """Score a structure against another; each is an mmCIF or PDB file, or a `Structure`.

    chains: predicted -> reference chain names, as in `pair`.
    assembly: score against the reference's first biological assembly instead of the chains of its file.
    allow_unplaced: score although residues of a file belong to none of its chains; `Score.notes` counts them.
    Raises UserError for unreadable files, structures without similar chains, and unplaced residues.
    """
    sources = predicted, reference
    names = [source.id if isinstance(source, Structure) else str(source) for source in sources]
    model, truth = (
        source if isinstance(source, Structure) else read_structure(source, ca_only=True) for source in sources
    )
    if not allow_unplaced:
        for structure, name in zip((model, truth), names):
            structure.check_placed(name, "correct the file, or pass --allow-unplaced to score without them")
    if assembly:
        truth = assembled(truth)
    try:
        return score(model, truth, chains)
    except UserError as error:
        raise UserError(f"{' against '.join(names)}: {error}") from error


def assembled(structure: Structure) -> Structure:
    """Build the first biological assembly of an entry; copies of chain A are called A-2, A-3, ...

    Raises UserError for a missing operator and for one that is not a rigid motion.
    """
    assembly = structure.assembly()
    chains = {}
    for name, (chain_id, operator) in zip(assembly.ids, assembly.chains):
        chain = structure.chains[chain_id]
        moved_positions = apply_operator(operator, chain.positions) * chain.mask[..., None]
        chains[name] = replace(chain, id=name, positions=moved_positions)
    return replace(structure, chains=chains)


def score(predicted: Structure, reference: Structure, chains: Mapping[str, str] | None = None) -> Score:
    """Pair chains and residues, then measure. Arguments and errors are those of `pair`."""
    return pair(predicted, reference, chains).score()


def pair(predicted: Structure, reference: Structure, chains: Mapping[str, str] | None = None) -> "Paired":
    """Pair the chains and residues of two structures.

    chains: predicted -> reference chain names; None maps chains by sequence and position. One pair of groups of
    reference chains, such as {"A": "HL"}, treats each group as one binding partner.
    Raises UserError if no chains correspond or a named chain does not exist.
    """
    model, truth = predicted.chains, reference.chains
    if chains and (groups := chain_groups(chains, model, truth)):
        selected = replace(reference, chains={name: truth[name] for group in groups for name in group})
        return _join_groups(pair(predicted, selected), groups)
    if chains:
        similar = named_chains(model, truth, chains, (predicted.id, reference.id))
    else:
        similar = similar_chains(model, truth)
    docking = Docking(model, truth, similar)
    mapping = dict(chains) if chains else map_chains(docking, similar)
    atoms = {p: _pair_atoms(model[p], truth[r], similar[p, r]) for p, r in mapping.items()}
    return Paired(predicted, reference, mapping, similar, docking, atoms)


def chain_groups(
    chains: Mapping[str, str], predicted: Mapping[str, Chain], reference: Mapping[str, Chain]
) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Parse {"A": "HL"} or {"A": "H+L"} as two groups of reference chains; None if it names pairs of chains.

    Raises UserError if a chain is named twice.
    """
    (first, second), *more = chains.items()
    if more or (first in predicted and second in reference):
        return None
    groups = tuple(tuple(text.split("+") if "+" in text else text) for text in (first, second))
    if not all(name in reference for group in groups for name in group):
        return None
    if repeated := [name for name in groups[0] + groups[1] if (groups[0] + groups[1]).count(name) > 1]:
        raise UserError(f"chains {first}:{second}: chain {repeated[0]} is named twice. Name each chain once")
    return groups  # type: ignore[return-value]  # of two


def _join_groups(paired: "Paired", groups: Sequence[Sequence[str]]) -> "Paired":
    """Join the chains of each group to one chain, so that there is one interface: A against H+L.

    The residues of the joined chains correspond as they did in the separate chains.
    """
    predicted_name = {r: p for p, r in paired.chains.items()}
    model, truth, similar, mapping = dict[str, Chain](), dict[str, Chain](), dict[tuple[str, str], Array](), {}
    for group in groups:
        present = [name for name in group if name in predicted_name]
        truth_name, model_name = "+".join(group), "+".join(predicted_name[name] for name in present)
        truth[truth_name] = join_chains(truth_name, [paired.reference.chains[r] for r in group])
        if not present:
            continue
        model[model_name] = join_chains(model_name, [paired.predicted.chains[predicted_name[r]] for r in present])
        starts = dict(zip(group, np.cumsum([0, *(len(paired.reference.chains[r].sequence) for r in group)]).tolist()))
        model_start, pairs = 0, []
        for r in present:
            pairs.append(paired.similar[predicted_name[r], r] + np.array([model_start, starts[r]]))
            model_start += len(paired.predicted.chains[predicted_name[r]].sequence)
        similar[model_name, truth_name] = np.concatenate(pairs)
        mapping[model_name] = truth_name
    predicted, reference = replace(paired.predicted, chains=model), replace(paired.reference, chains=truth)
    atoms = {p: _pair_atoms(model[p], truth[r], similar[p, r]) for p, r in mapping.items()}
    return Paired(predicted, reference, mapping, similar, Docking(model, truth, similar), atoms)


def join_chains(name: str, chains: Sequence[Chain]) -> Chain:
    """Concatenate chains to one."""
    return Chain(
        id=name,
        sequence="".join(chain.sequence for chain in chains),
        positions=np.concatenate([chain.positions for chain in chains]),
        mask=np.concatenate([chain.mask for chain in chains]),
        residue_index=np.arange(sum(len(chain.sequence) for chain in chains), dtype=np.int64),
        author_numbers=tuple(number for chain in chains for number in chain.author_numbers),
    )


@dataclass(frozen=True)
class Paired:
    """A prediction and a reference with paired chains and residues.

    chains: predicted -> reference. similar: (predicted, reference) -> paired residues [K, 2] of all chains that may
    correspond. atoms: predicted chain -> its atoms and those of its reference chain.
    """

    predicted: Structure
    reference: Structure
    chains: dict[str, str]
    similar: Mapping[tuple[str, str], Array]
    docking: Docking
    atoms: "dict[str, PairedAtoms]"

    @cached_property
    def arrays(self) -> tuple[Array, Array, Array, Array, Array]:
        """The arrays of all chains, concatenated (see `PairedAtoms.arrays`)."""
        columns = zip(*(chain.arrays for chain in self.atoms.values()))
        return tuple(map(np.concatenate, columns))  # type: ignore[return-value]

    def lddt_ca_per_residue(self) -> Array:
        """Compute lDDT-Ca of each residue of `arrays` [N]; NaN for a residue without neighbours."""
        positions, predicted_mask, truth, mask, _ = self.arrays
        return metrics.lddt_per_residue(positions[:, [CA]], truth[:, [CA]], mask[:, [CA]], predicted_mask[:, [CA]])

    def score(self) -> Score:
        """Compute all scores."""
        mapping, reference_chains, atoms = self.chains, self.reference.chains, list(self.atoms.values())
        positions, predicted_mask, truth, mask, swap = self.arrays
        both = predicted_mask[:, CA]
        overlap = metrics.overlap(positions[both, CA], truth[both, CA], length=len(truth))
        lddt, interfaces = None, None
        is_ca_only = mask.sum() == mask[:, CA].sum() or predicted_mask.sum() == both.sum()
        if not is_ca_only:
            renamed = metrics.rename_symmetric(positions, truth, mask, predicted_mask, swap)
            lddt = metrics.lddt(renamed, truth, mask, predicted_mask)
            if len(reference_chains) > 1:
                ilddt = _interface_lddt(renamed, atoms, mapping, reference_chains)
                interfaces = compare_interfaces(self.docking, self.similar, mapping, ilddt)
        return Score(
            lddt_ca=metrics.lddt(positions[:, [CA]], truth[:, [CA]], mask[:, [CA]], predicted_mask[:, [CA]]),
            lddt=lddt,
            tm=overlap.tm,
            gdt_ts=overlap.gdt_ts,
            gdt_ha=overlap.gdt_ha,
            rmsd=metrics.rmsd(positions[both, CA], truth[both, CA]),
            residues=len(truth),
            paired=int(both.sum()),
            identity=sum(chain.equal for chain in atoms) / max(1, int(both.sum())),
            chains=mapping,
            left_out=[name for name in reference_chains if name not in mapping.values()],
            extra=[name for name in self.predicted.chains if name not in mapping],
            dropped=[
                f"{structure.id} {name}: {reason}"
                for structure in (self.predicted, self.reference)
                for name, reason in structure.dropped.items()
            ],
            notes=[
                f"{structure.id}: {note}"
                for structure in (self.predicted, self.reference)
                for note in (*structure.notes, structure.unplaced_note)
                if note
            ],
            complex=interfaces,
        )


def _interface_lddt(
    renamed: Array, atoms: Sequence["PairedAtoms"], mapping: Mapping[str, str], reference: Mapping[str, Chain]
) -> dict[tuple[str, str], Array]:
    """Count the pairs of atoms between all reference chains, including chains that the prediction lacks."""
    lengths = [len(chain.arrays[0]) for chain in atoms]
    renamed_of = dict(zip(mapping.values(), np.split(renamed, np.cumsum(lengths)[:-1])))
    arrays_of = {r: chain.arrays for r, chain in zip(mapping.values(), atoms)}
    names, parts = [], []
    for name, chain in reference.items():
        if name in arrays_of:
            _, predicted_mask, truth, mask, _ = arrays_of[name]
            parts.append((renamed_of[name], truth, mask, predicted_mask))
        else:
            mask = chain.mask > 0
            parts.append((np.zeros_like(chain.positions), chain.positions, mask, np.zeros_like(mask)))
        names += [name] * len(parts[-1][0])
    predicted, truth, mask, predicted_mask = (np.concatenate(arrays) for arrays in zip(*parts))
    return interface_lddt(predicted, truth, mask, predicted_mask, names)


@dataclass(frozen=True)
class PairedAtoms:
    """The atoms of the N residues of a reference chain that have Ca, and of the predicted residues paired with them.

    arrays: predicted positions [N, 37, 3] and mask [N, 37], true positions and mask, and the index of each atom's
    symmetric counterpart [N, 37]. equal: number of paired residues that are the same amino acid. predicted_residue,
    reference_residue [N]: indices in the chains; -1 if no predicted residue is paired.
    """

    arrays: tuple[Array, Array, Array, Array, Array]
    equal: int
    predicted_residue: Array
    reference_residue: Array


def _pair_atoms(a: Chain, b: Chain, pairs: Array) -> PairedAtoms:
    """Pair the atoms of predicted chain a and reference chain b by name; different amino acids share the backbone."""
    pairs = with_ca(a, b, pairs)
    i, j = pairs.T
    positions, predicted_mask = np.zeros_like(b.positions), np.zeros_like(b.mask)
    positions[j], predicted_mask[j] = a.positions[i], a.mask[i]
    predicted_residue = np.full(len(b.mask), -1, np.int64)
    predicted_residue[j] = i
    has_ca = b.mask[:, CA] > 0
    # X is not found: -1 selects the last row of the table.
    swap = _SWAP37[[RESTYPES.find(letter) for letter in b.sequence]]
    arrays = (positions[has_ca], predicted_mask[has_ca] > 0, b.positions[has_ca], b.mask[has_ca] > 0, swap[has_ca])
    return PairedAtoms(arrays, count_equal(a, b, pairs), predicted_residue[has_ca], np.flatnonzero(has_ca))


# int64 [21, 37]: the symmetric counterpart of each atom, or the atom itself. The last row is that of X.
_SWAP37 = np.tile(np.arange(len(ATOM_ORDER)), (21, 1))
for _restype, _names in enumerate(ATOM14_NAMES):
    for _slot, _name in enumerate(_names):
        if _name:
            _SWAP37[_restype, ATOM_ORDER[_name]] = ATOM_ORDER[_names[ATOM14_SWAP[_restype, _slot]]]
