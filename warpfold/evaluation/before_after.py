"""Fold examples of a store with the parameters before and after training, and compare the accuracy."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.data.example.raw_example import Assembly
from warpfold.data.features.crop import place_chain
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import read_assembly
from warpfold.data.structure.chain import Chain, Structure
from warpfold.data.structure.write import write_mmcif
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.prediction.outputs import Prediction
from warpfold.prediction.pages import target_of
from warpfold.prediction.predictor import Predictor
from warpfold.report import figures
from warpfold.report.report import ReportTable, Section, Target
from warpfold.scoring import metrics
from warpfold.scoring.score import Score, score

CA = ATOM_ORDER["CA"]


@dataclass(frozen=True)
class Measured:
    """A monomer or complex, folded by the model before and after training."""

    assembly: Assembly
    truth: Structure
    predictions: tuple[Prediction, Prediction]
    scores: tuple[Score, Score]

    @property
    def trained(self) -> Prediction:
        """The prediction of the trained model."""
        return self.predictions[1]


@dataclass(frozen=True)
class Measure:
    """A score between 0 and 1 that training should increase.

    key: its name in summary.json. label: its heading. value: computes it; NaN if it does not exist, such as DockQ of a
    single chain.
    """

    key: str
    label: str
    value: Callable[[Prediction, Score], float]

    def of(self, measured: Measured) -> list[float]:
        """Compute the score before and after training."""
        return [self.value(*folded) for folded in zip(measured.predictions, measured.scores)]

    def means(self, measured: Sequence[Measured]) -> dict[str, float]:
        """Compute the means, untrained and trained, over the examples that have the score; NaN if none has it."""
        scores = np.array([self.of(example) for example in measured])
        scores = scores[~np.isnan(scores).any(axis=1)]
        before, after = scores.mean(axis=0) if len(scores) else (math.nan, math.nan)
        return {"untrained": round(float(before), 4), "trained": round(float(after), 4)}


def _number(value: float | None) -> float:
    return math.nan if value is None else value


LDDT = Measure("lddt_ca", "lDDT-Cα", lambda _, score: score.lddt_ca)
DOCKQ = Measure("dockq", "DockQ", lambda _, score: _number(score.complex.dockq if score.complex else None))
INTERFACE_LDDT = Measure(
    "interface_lddt", "interface lDDT", lambda _, score: _number(score.complex.ilddt if score.complex else None)
)
IPTM = Measure("iptm", "ipTM", lambda prediction, _: _number(prediction.iptm))


def fold_before_after(
    store: Store, keys: Sequence[str], before: Predictor, after: Predictor, seed: int
) -> Iterator[Measured]:
    """Fold entries of a store with both models and score them against their structures; yields one entry at a time.

    If `before` and `after` are the same object, each entry is folded once.
    """
    for key in keys:
        assembly = read_assembly(store, key)
        # Single chains keep the chain id of their key if it fits into a PDB file, which has room for one letter.
        if len(assembly.ids) == 1 and len(name := key.rpartition("_")[2]) == 1:
            assembly = replace(assembly, ids=(name,))
        example = replace(assembly, chains=tuple(chain.take(slice(None)) for chain in assembly.chains))
        second = after.fold_example(example, seed=seed, representations=False)
        first = second if before is after else before.fold_example(example, seed=seed, representations=False)
        yield measure(assembly, first, second)


def measure(assembly: Assembly, before: Prediction, after: Prediction) -> Measured:
    """Score two predictions of an example against its chains in their positions in the assembly.

    Raises ValueError if a chain has no atoms.
    """
    chains = {}
    for number, (name, example) in enumerate(zip(assembly.ids, assembly.chains)):
        index = np.arange(example.length)
        atoms = example.atoms(index)
        if atoms is None:
            raise ValueError(f"{assembly.name}: chain {name} has no atoms")
        positions = place_chain(atoms[0], assembly.operators, number) * atoms[1][..., None]
        mask = atoms[1].astype(np.float32)
        numbers = tuple(str(i + 1) for i in index)
        chains[name] = Chain(name, example.sequence, positions.astype(np.float32), mask, index, numbers)
    truth = Structure(assembly.name, None, None, None, chains)
    scores = score(before.structure(), truth), score(after.structure(), truth)
    return Measured(assembly, truth, (before, after), scores)


def means(measures: Sequence[Measure], measured: Sequence[Measured]) -> dict[str, Any]:
    """Compute the means of all measures, untrained and trained, for JSON: None instead of NaN."""
    result = {}
    for measure in measures:
        both = measure.means(measured)
        result[measure.key] = {when: None if math.isnan(value) else value for when, value in both.items()}
    return result


def compared(
    heading: str,
    noun: str,
    measured: Sequence[Measured],
    measures: Sequence[Measure],
    called: tuple[str, str] = ("before", "after"),
) -> Section:
    """Build a report section on examples before and after training.

    noun: heading of the column with the examples' names. measures: the first one is drawn. called: names of the models.
    """
    confidence, rows = [], []
    for m in measured:
        lddt = 100 * lddt_per_residue(m)
        confidence += [(m.trained.plddt[i], lddt[i]) for i in np.flatnonzero(~np.isnan(lddt))]
        sizes = [str(m.assembly.length), str(max(chain.depth for chain in m.assembly.chains))]
        scores = ["–" if math.isnan(value) else f"{value:.2f}" for measure in measures for value in measure.of(m)]
        overlap = [f"{m.scores[1].tm:.2f}", f"{m.scores[1].rmsd:.1f}"]
        rows.append([m.assembly.name, *sizes, *scores, f"{m.trained.mean_plddt:.0f}", *overlap])
    names, first = [m.assembly.name for m in measured], measures[0]
    before, after = ([first.of(m)[when] for m in measured] for when in (0, 1))
    headings = [f"{measure.label} {when}" for measure in measures for when in ("before", "after")]
    return Section(
        heading,
        figures=[
            (
                figures.draw_improvement(names, before, after, first.label, called),
                "The held-out examples before and after training.",
            ),
            (
                figures.draw_calibration([p for p, _ in confidence], [v for _, v in confidence], "residue"),
                "Calibration: measured over expected lDDT of each residue.",
            ),
        ],
        table=ReportTable([noun, "residues", "alignment rows", *headings, "pLDDT", "TM-score", "RMSD, Å"], rows),
    )


def true_chains(measured: Measured) -> list[Chain]:
    """Return the true chains in the order and with the ids of the predicted chains that are mapped to them."""
    mapping = measured.scores[1].chains
    return [replace(measured.truth.chains[mapping[chain]], id=chain) for chain in measured.trained.chain_ids]


def lddt_per_residue(measured: Measured) -> np.ndarray:
    """Compute lDDT-Cα of each residue of the trained model [N], 0 to 1; NaN for unresolved residues."""
    truth = true_chains(measured)
    positions, mask = (
        np.concatenate([getattr(chain, name)[:, [CA]] for chain in truth]) for name in ("positions", "mask")
    )
    return metrics.lddt_per_residue(measured.trained.positions[:, [CA]], positions, mask)


def target_with_truth(
    predictions: Path, entry: Mapping[str, Any], measured: Measured, measures: Sequence[Measure], before: str
) -> Target:
    """Prepare the prediction after training and its superposed truth for a report; before: name of the other model."""
    truth = true_chains(measured)
    positions, resolved = (
        np.concatenate(arrays) for arrays in zip(*((c.positions[:, CA], c.mask[:, CA] > 0) for c in truth))
    )
    rotation, translation = metrics.superpose(positions[resolved], measured.trained.ca[resolved])

    def moved(points: np.ndarray) -> np.ndarray:
        return (points @ rotation.T + translation).astype(np.float32)

    chains = [replace(chain, positions=moved(chain.positions)) for chain in truth]
    numbers = []
    for measure in measures:
        first, second = measure.of(measured)
        numbers += [(measure.label, f"{second:.2f}"), (before, f"{first:.2f}")]
    return target_of(
        predictions,
        entry,
        numbers=numbers,
        truth_mmcif=write_mmcif(f"{measured.assembly.name} truth", chains),
        truth_ca=moved(positions[resolved]),
        lddt=100 * lddt_per_residue(measured),
    )
