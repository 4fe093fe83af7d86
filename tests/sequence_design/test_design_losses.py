"""Test the losses of a design against the official confidences, finite differences, and shapes with known values."""

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers import as_multimer, filled_model, tiny_config
from warpfold.data.features.choose import SampleConfig
from warpfold.data.structure.chain import Chain
from warpfold.engine.gradient import ModelOutputs
from warpfold.errors import UserError
from warpfold.geometry.atoms import CA
from warpfold.geometry.labels import structure_labels
from warpfold.geometry.residue import RESTYPES
from warpfold.geometry.rigid import Rigid
from warpfold.model.alphafold import Output
from warpfold.model.heads import distogram_breaks
from warpfold.model.structure import StructureOutput
from warpfold.prediction.predictor import Predictor
from warpfold.sequence_design.losses import Losses, LossShape, LossWeights, TargetStructure, soft_ipsae

CONFIDENCES = Path(__file__).parents[3] / "shared/golden_design/confidences"
CHAINS = [1] * 7 + [2] * 7 + [3] * 6


def seen_of(
    plddt: Tensor, distogram: Tensor, pae: Tensor | None, positions: Tensor, rotation: Tensor | None = None,
    asym: list[int] | None = None, entity: list[int] | None = None, designed: list[bool] | None = None,
) -> ModelOutputs:  # fmt: skip
    """Build the model outputs that the losses read."""
    n = len(plddt)
    chain = torch.tensor(asym or [1] * n)
    rotation = torch.eye(3).to(plddt).expand(n, 3, 3) if rotation is None else rotation
    structure = StructureOutput(*[torch.empty(0)] * 9)
    frames = Rigid(rotation[None], positions[None, :, CA])
    structure = replace(structure, final_atom37=positions, frames=frames)
    output = Output(*[torch.empty(0)] * 4, structure, distogram, torch.empty(0), plddt, torch.empty(0), pae)
    index = torch.cat([torch.arange(int((chain == i).sum())) for i in chain.unique()])
    entities = chain if entity is None else torch.tensor(entity)
    free = torch.tensor(designed or [True] * n)
    return ModelOutputs(output, torch.empty(n, 21), torch.zeros(n).long(), index, chain, entities, free, distogram, pae)


def random_outputs(n: int = 20, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = (n, 50), (n, n, 64), (n, n, 64), (n, 37, 3)
    scales = 1.0, 1.0, 3.0, 8.0
    return [scale * torch.randn(shape, generator=draw).double() for shape, scale in zip(shapes, scales)]


def target(n: int = 20) -> TargetStructure:
    """Build a target of three chains.  The structure of the last chain is unknown."""
    draw, chains = np.random.default_rng(3), {}
    for id, length in zip("AB", (7, 7)):
        walk = np.cumsum(draw.normal(size=(length, 1, 3)), 0) * 3
        positions = (walk + draw.normal(size=(length, 37, 3))).astype(np.float32)
        mask = np.ones((length, 37), np.float32)
        chains[id] = Chain(id, "LVKAGTS"[:length], positions, mask, np.arange(length), ("",) * length)
    return TargetStructure.of({"A": 7, "B": 7, "C": n - 14}, chains)


@pytest.mark.parametrize("name", [*vars(LossWeights())])
def test_a_loss_has_the_gradient_of_its_differences(name: str) -> None:
    losses = Losses(LossWeights(**{name: 1.5}), LossShape(contact_separation=2), target())
    entity = [1] * 14 + [2] * 6
    leaves = [x.requires_grad_() for x in random_outputs()]

    def value(*x: Tensor) -> Tensor:
        (found,) = losses(seen_of(*x, asym=CHAINS, entity=entity, designed=[i < 14 for i in range(20)])).values()
        return found

    found = torch.autograd.grad(value(*leaves), leaves, allow_unused=True)
    assert any(x is not None and x.abs().sum() > 0 for x in found)
    direction = random_outputs(seed=1)
    step = 1e-7
    up, down = (float(value(*(x.detach() + s * d for x, d in zip(leaves, direction)))) for s in (step, -step))
    along = sum(float((x * d).sum()) for x, d in zip(found, direction) if x is not None)
    assert (up - down) / (2 * step) == pytest.approx(along, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("name", ["conf_dimer", "conf_trimer", "conf_dimer_apart", "conf_monomer_small"])
def test_confidences_are_the_official_ones(name: str) -> None:
    """ipSAE has soft cutoffs, so the test makes them almost hard."""
    if not CONFIDENCES.is_dir():
        pytest.skip("no ../shared/golden_design beside this checkout")
    with np.load(CONFIDENCES / f"{name}.npz", allow_pickle=False) as file:
        x = {key: torch.from_numpy(file[key]) for key in file.files}
    n, asym = len(x["in/asym_id"]), x["in/asym_id"].tolist()
    pae = x["in/pae_logits"].double()
    seen = seen_of(x["in/plddt_logits"].double(), torch.zeros(n, n, 64), pae, torch.zeros(n, 37, 3), asym=asym)
    chains = max(asym)
    between = ("interface_pae", "iptm", "ipsae") if chains > 1 else ()
    names = ("plddt", "pae", "ptm", *between)
    weights = LossWeights(**dict.fromkeys(names, 1.0))
    found = {key: float(v) for key, v in Losses(weights, LossShape(error_width=1e-5))(seen).items()}
    same = (seen.asym_id[:, None] == seen.asym_id).numpy()
    expected = {
        "plddt": 1 - float(x["out/plddt"].mean()) / 100,
        "pae": float(x["out/pae"].numpy()[same].mean()) / 31,
        "ptm": 1 - float(x["out/ptm"]),
    }
    if chains > 1:
        expected["interface_pae"] = float(x["out/pae"].numpy()[~same].mean()) / 31
        expected["iptm"] = 1 - float(x["out/iptm"])
        both = x["out/ipsae10/ipsae_max"].numpy()
        expected["ipsae"] = 1 - float(np.mean([both[i, j] for i in range(chains) for j in range(i)]))
    assert found == pytest.approx(expected, abs=1e-5)
    assert json.loads((CONFIDENCES / f"{name}.json").read_text())


def test_ptm_is_its_definition() -> None:
    """Supp. 1.9.7: the largest mean over residues of the expected 1 / (1 + (error / d0)²), here for 20 residues."""
    plddt, distogram, pae, positions = random_outputs()
    centres = 0.25 + 0.5 * torch.arange(64)
    d0 = 1.24 * (20 - 15) ** (1 / 3) - 1.8
    expected = (pae.softmax(-1) / (1 + (centres / d0) ** 2)).sum(-1).mean(-1).max()
    (found,) = Losses(LossWeights(ptm=1.0), LossShape())(seen_of(plddt, distogram, pae, positions)).values()
    assert float(found) == pytest.approx(1 - float(expected), rel=1e-6)


def test_a_soft_cutoff_draws_errors_that_lie_beyond_it() -> None:
    errors = torch.full((4, 30), 12.0, dtype=torch.float64, requires_grad=True)
    soft, hard = soft_ipsae(errors, LossShape()), soft_ipsae(errors, LossShape(error_width=1e-3))
    assert 0 <= hard.item() < soft.item() < 1
    # A gradient through the soft cutoff remains.
    assert torch.autograd.grad(soft, errors)[0].min() < 0


def copies(angle: float) -> Tensor:
    """Build two chains of the same shape, one of them rotated about the z axis.

    The complex is symmetric only if the angle is 180 degrees.
    """
    points = torch.randn(6, 3, generator=torch.Generator().manual_seed(5)).double() * 4 + 8
    c, s = math.cos(angle), math.sin(angle)
    turned = points @ torch.tensor([[c, -s, 0], [s, c, 0], [0, 0, 1]]).double().T
    return torch.cat([points, turned])[:, None].expand(12, 37, 3)


def test_shapes_have_the_values_that_they_should() -> None:
    plddt, distogram, pae, _ = random_outputs(12)
    asym = [1] * 6 + [2] * 6

    def value(name: str, positions: Tensor, distogram: Tensor = distogram, **more: list) -> float:
        losses = Losses(
            LossWeights(**{name: 1.0}), LossShape(contact_number=1, interface_number=1, contact_separation=3)
        )
        return float(losses(seen_of(plddt, distogram, pae, positions, **more))[name])

    same = {"asym": asym, "entity": [1] * 12}
    assert value("symmetry", copies(math.pi), **same) < 1e-4
    assert value("symmetry", copies(1.0), **same) > 0.1
    line = torch.zeros(12, 37, 3).double()
    line[:, :, 0] = 3.8 * torch.arange(12)[:, None]
    radius = 3.8 * math.sqrt((12**2 - 1) / 12)
    assert value("radius_of_gyration", line) == pytest.approx(radius - 2.38 * 12**0.365, abs=1e-6)
    assert -1 < value("radius_of_gyration", line / 100) < 0
    # The only contact is between residues 0 and 6.
    near = torch.zeros(12, 12, 64).double()
    near[..., -1] = 30
    near[0, 6] = near[6, 0] = torch.eye(64)[10].double() * 100
    expected = -math.log(1e-8) * 10 / 12
    assert value("contacts", line, near) == pytest.approx(expected, rel=1e-3)
    assert value("interface_contacts", line, near, asym=asym) == pytest.approx(expected, rel=1e-3)
    # A residue that has fewer admissible pairs than `contact_number` uses all of them: residues 2 and 9 have one pair.
    # The certain contacts of neighbours along the chain are not admissible.
    few = Losses(LossWeights(contacts=1.0), LossShape(contact_number=3, contact_separation=9))
    flat = torch.zeros(12, 12, 64).double()
    flat[(torch.arange(12)[:, None] - torch.arange(12)).abs() < 9] = torch.eye(64)[10].double() * 100
    found = few(seen_of(plddt, flat, pae, line))["contacts"]
    near_bins = int((distogram_breaks(64) <= 14.0).sum())
    assert float(found) == pytest.approx(-math.log(near_bins / 64), rel=1e-5)
    # A chain may have one residue.
    assert 0 <= value("ipsae", line, asym=[1] * 11 + [2]) <= 1
    helix = torch.zeros(12, 12, 64).double()
    for i in range(9):
        helix[i, i + 3, 8] = helix[i + 3, i, 8] = 50  # about 5 angstrom
    assert value("helicity", line, helix) == pytest.approx(1.0)
    assert value("helicity", line, torch.zeros(12, 12, 64).double()) < 0.3


def test_a_structure_is_its_own_target() -> None:
    known = target()
    plddt, _, pae, positions = random_outputs()
    frames = Rigid.from_quaternion7(known.labels["backbone_affine_tensor"]).rotation.double()
    atoms = positions.clone()
    atoms[:, CA] = known.labels["backbone_affine_tensor"][:, 4:].double()
    beta = known.labels["pseudo_beta"].double()
    distances = (beta[:, None] - beta).norm(dim=-1)
    breaks = torch.linspace(2.3125, 21.6875, 63).double()
    sure = 60 * torch.nn.functional.one_hot(torch.bucketize(distances, breaks), 64).double()
    losses = Losses(LossWeights(distogram=1.0, fape=1.0), target=known)
    found = losses(seen_of(plddt, sure, pae, atoms, frames, asym=CHAINS))
    assert float(found["distogram"]) < 1e-6
    assert float(found["fape"]) < 0.01
    other = losses(seen_of(plddt, -sure, pae, positions, asym=CHAINS))
    assert float(other["distogram"]) > 1
    assert float(other["fape"]) > 0.3


def test_a_predictor_without_the_head_refuses_too_and_one_with_it_goes_downhill() -> None:
    sample, more = SampleConfig(max_msa=4, max_extra=4, max_templates=0), {"templates": replace(
        tiny_config().templates, enabled=False)}  # fmt: skip
    without = tiny_config(heads=replace(tiny_config().heads, pae=False), **more)
    with pytest.raises(UserError, match="these parameters have no head"):
        Predictor(filled_model(without), sample=sample).gradient(np.zeros((5, 20)), Losses(LossWeights(pae=1.0)))
    fold = Predictor(filled_model(as_multimer(tiny_config(**more))), sample=sample)
    losses = Losses(
        LossWeights(plddt=1.0, iptm=0.5, contacts=0.3, interface_contacts=1.0), LossShape(contact_separation=2)
    )
    x = {"B": np.random.default_rng(0).normal(size=(6, 20)).astype(np.float32)}
    first = fold.gradient(x, losses, fixed={"A": "MKVLA"}, recycles=0)
    assert set(first.terms) == {"plddt", "iptm", "contacts", "interface_contacts"}
    step = 0.05 * first.grad["B"] / np.abs(first.grad["B"]).max()
    second = fold.gradient({"B": x["B"] - step}, losses, fixed={"A": "MKVLA"}, recycles=0)
    assert second.loss < first.loss


@pytest.mark.parametrize(
    ("lengths", "said"),
    [({"A": 6}, "chain A has 7 residues, the design's 6"), ({"X": 7}, "its chains are A, the design's X")],
)
def test_targets_that_do_not_fit_are_refused(lengths: dict[str, int], said: str) -> None:
    chain = Chain(
        "A", "LVKAGTS", np.zeros((7, 37, 3), np.float32), np.ones((7, 37), np.float32), np.arange(7), ("",) * 7
    )
    with pytest.raises(UserError, match=said):
        TargetStructure.of(lengths, {"A": chain})


@dataclass(frozen=True)
class Complex:
    """Random outputs for a complex, as tensors and, for the references, as arrays."""

    seen: ModelOutputs
    target: TargetStructure
    asym: np.ndarray
    entity: np.ndarray
    index: np.ndarray
    designed: np.ndarray
    ca: np.ndarray
    plddt: np.ndarray
    # Probabilities [N, N, bins].
    errors: np.ndarray
    distances: np.ndarray


# Length, entity and whether it is designed, of each chain.
ASSEMBLIES = {
    # Copies that other chains separate, a chain above the smallest d0 of ipSAE, one of a single residue, fixed chains.
    "mixed": [(7, 1, 1), (5, 2, 0), (7, 1, 1), (34, 3, 1), (4, 4, 0), (1, 5, 1), (7, 1, 1)],
    # Two copies and a chain that has one pair of residues three apart.
    "small": [(4, 1, 1), (2, 2, 1), (2, 2, 1), (3, 3, 0)],
}


def softmax(logits: np.ndarray) -> np.ndarray:
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


@functools.cache
def complex_of(name: str) -> Complex:
    """Draw outputs with small and large errors and distances, of which none is symmetric."""
    draw, chains = np.random.default_rng(len(name)), ASSEMBLIES[name]
    lengths, entities, designed = (np.array(column) for column in zip(*chains))
    asym = np.repeat(np.arange(1, len(chains) + 1), lengths)
    n = len(asym)
    errors = 3 * draw.normal(size=(n, n, 64)) + 12 * np.eye(64)[draw.integers(0, 64, (n, n))]
    distances = 2 * draw.normal(size=(n, n, 64)) + 12 * np.eye(64)[draw.integers(0, 64, (n, n))]
    plddt, positions = draw.normal(size=(n, 50)), 8 * draw.normal(size=(n, 37, 3))
    rotations = np.linalg.qr(draw.normal(size=(n, 3, 3)))[0]
    rotations[:, 0] *= np.linalg.det(rotations)[:, None]
    entity, is_designed = entities[asym - 1], designed[asym - 1] > 0
    tensors = map(torch.from_numpy, (plddt, distances, errors, positions, rotations))
    seen = seen_of(*tensors, asym=asym.tolist(), entity=entity.tolist(), designed=is_designed.tolist())
    known = {
        id: Chain(id, "GAVLKSTXMFGAVLKSTRDEFYHWCNQIPGTLKA"[:length], 6 * draw.normal(size=(length, 37, 3)).astype(
            np.float32), (draw.random((length, 37)) < 0.9).astype(np.float32), np.arange(length), ("",) * length)
        for id, length in zip("ABCDEFG", lengths) if id != "B"
    }  # fmt: skip
    return Complex(
        seen, TargetStructure.of(dict(zip("ABCDEFG", lengths.tolist())), known), asym, entity,
        np.concatenate([np.arange(length) for length in lengths]), is_designed, positions[:, CA], plddt,
        softmax(errors), softmax(distances),
    )  # fmt: skip


def residues_of(x: Complex) -> list[list[int]]:
    """List the residues of each chain."""
    return [np.flatnonzero(x.asym == chain).tolist() for chain in np.unique(x.asym)]


def expected_error(x: Complex, i: int, j: int) -> float:
    return float(sum(p * (0.25 + 0.5 * k) for k, p in enumerate(x.errors[i, j])))


def near(x: Complex, i: int, j: int, distance: float) -> float:
    """Compute the probability of the bins that end at `distance` or below."""
    ends = [2.3125 + (21.6875 - 2.3125) / 62 * k for k in range(63)]
    return float(sum(p for p, end in zip(x.distances[i, j], ends) if end <= distance))


def plain_plddt(x: Complex, shape: LossShape) -> float:
    values = [sum(p * (k + 0.5) / 50 for k, p in enumerate(row)) for row in softmax(x.plddt)[x.designed]]
    return 1 - float(np.mean(values))


def plain_pae(x: Complex, shape: LossShape) -> float:
    """The mean within the designed chains."""
    chains = [residues for residues in residues_of(x) if x.designed[residues[0]]]
    return float(np.mean([expected_error(x, i, j) for residues in chains for i in residues for j in residues])) / 31


def plain_interface_pae(x: Complex, shape: LossShape) -> float:
    """The mean between two chains of which at least one is designed."""
    pairs = [(i, j) for i, a in enumerate(x.asym) for j, b in enumerate(x.asym) if a != b]
    return float(np.mean([expected_error(x, i, j) for i, j in pairs if x.designed[i] or x.designed[j]])) / 31


def tm(x: Complex, between: bool) -> float:
    """Supp. 1.9.7, over all residues or those of other chains than the frame's."""
    n = len(x.asym)
    d0 = 1.24 * (max(n, 19) - 15) ** (1 / 3) - 1.8
    scores = []
    for i in range(n):
        others = [j for j in range(n) if not between or x.asym[i] != x.asym[j]]
        weights = [1 / (1 + ((0.25 + 0.5 * k) / d0) ** 2) for k in range(64)]
        scores.append(np.mean([float(x.errors[i, j] @ weights) for j in others]))
    return float(max(scores))


def plain_ptm(x: Complex, shape: LossShape) -> float:
    return 1 - tm(x, between=False)


def plain_iptm(x: Complex, shape: LossShape) -> float:
    return 1 - tm(x, between=True)


def plain_ipsae(x: Complex, shape: LossShape) -> float:
    """The mean over pairs of chains, one of them designed, of the better direction."""
    chains, pairs = residues_of(x), []
    for a, one in enumerate(chains):
        for other in chains[a + 1 :]:
            if not (x.designed[one[0]] or x.designed[other[0]]):
                continue
            scores = []
            for frames, residues in ((one, other), (other, one)):
                for i in frames:
                    errors = [expected_error(x, i, j) for j in residues]
                    counts = [1 / (1 + math.exp(-(shape.error_cutoff - e) / shape.error_width)) for e in errors]
                    d0 = max(1.24 * (max(sum(counts), 26) - 15) ** (1 / 3) - 1.8, 1)
                    total = sum(count / (1 + (e / d0) ** 2) for count, e in zip(counts, errors))
                    scores.append(total / (sum(counts) + 1e-8))
            pairs.append(max(scores))
    return 1 - float(np.mean(pairs))


def contacts(x: Complex, admissible: Callable[[int, int], bool], distance: float, number: int) -> float:
    means = []
    for i in np.flatnonzero(x.designed).tolist():
        others = [j for j in range(len(x.asym)) if admissible(i, j)]
        losses = sorted(-math.log(near(x, i, j, distance) + 1e-8) for j in others)
        if losses:
            means.append(np.mean(losses[:number]))
    return float(np.mean(means)) if means else 0.0


def plain_contacts(x: Complex, shape: LossShape) -> float:
    def is_admissible(i: int, j: int) -> bool:
        return x.asym[i] == x.asym[j] and abs(x.index[i] - x.index[j]) >= shape.contact_separation

    return contacts(x, is_admissible, shape.contact_distance, shape.contact_number)


def plain_interface_contacts(x: Complex, shape: LossShape) -> float:
    return contacts(x, lambda i, j: bool(x.asym[i] != x.asym[j]), shape.interface_distance, shape.interface_number)


def plain_distogram(x: Complex, shape: LossShape) -> float:
    """Supp. 1.9.8, over all pairs of residues with a known pseudo beta."""
    points, mask = (x.target.labels[name].numpy() for name in ("pseudo_beta", "pseudo_beta_mask"))
    edges, losses = [2.3125 + (21.6875 - 2.3125) / 62 * k for k in range(63)], []
    for i in np.flatnonzero(mask):
        for j in np.flatnonzero(mask):
            place = sum(float(np.linalg.norm(points[i] - points[j])) > edge for edge in edges)
            losses.append(-math.log(x.distances[i, j, place]))
    return float(np.mean(losses))


def plain_fape(x: Complex, shape: LossShape) -> float:
    """Algorithm 28, over the residues with a known backbone."""
    rotations, points = x.seen.frames.rotation.numpy(), x.seen.frames.translation.numpy()
    true = Rigid.from_quaternion7(x.target.labels["backbone_affine_tensor"])
    known = np.flatnonzero(x.target.labels["backbone_affine_mask"].numpy())
    losses = []
    for i in known:
        for j in known:
            local = rotations[i].T @ (points[j] - points[i])
            true_local = true.rotation[i].numpy().T @ (true.translation[j] - true.translation[i]).numpy()
            losses.append(min(math.sqrt(((local - true_local) ** 2).sum() + 1e-4), shape.fape_clamp) / 10)
    return sum(losses) / (len(losses) + 1e-4)


def plain_radius_of_gyration(x: Complex, shape: LossShape) -> float:
    losses = []
    for residues in residues_of(x):
        if x.designed[residues[0]]:
            centre = x.ca[residues].mean(0)
            square = np.mean([((x.ca[i] - centre) ** 2).sum() for i in residues])
            excess = math.sqrt(square + 1e-8) - 2.38 * len(residues) ** 0.365
            losses.append(excess if excess > 0 else math.expm1(excess))
    return float(np.mean(losses))


def plain_helicity(x: Complex, shape: LossShape) -> float:
    pairs = [
        (residues[place + 3], residues[place])
        for residues in residues_of(x) if x.designed[residues[0]] for place in range(len(residues) - 3)
    ]  # fmt: skip
    return float(np.mean([near(x, i, j, shape.helix_distance) for i, j in pairs])) if pairs else 0.0


def plain_symmetry(x: Complex, shape: LossShape) -> float:
    losses = []
    for entity in np.unique(x.entity):
        copies = [residues for residues in residues_of(x) if x.entity[residues[0]] == entity]
        for step in range(len(copies)) if len(copies) > 1 else ():
            distances = np.array([
                [[math.sqrt(((x.ca[i] - x.ca[j]) ** 2).sum() + 1e-8) for j in copies[c - step]] for i in copies[c]]
                for c in range(len(copies))
            ])  # fmt: skip
            losses.append(np.mean([(one - sum(distances) / len(copies)) ** 2 for one in distances]))
    return math.sqrt(np.mean(losses) + 1e-8) / 10


PLAIN = {name: globals()[f"plain_{name}"] for name in vars(LossWeights())}
# The second distances are ends of bins. Errors beyond the cutoff of the third leave almost no residue in ipSAE.
SHAPES = {
    "default": LossShape(),
    "other": LossShape(
        contact_distance=10.4375, contact_number=3, contact_separation=1, interface_distance=16.0625,
        interface_number=100, helix_distance=4.8125, error_cutoff=20.0, error_width=2.5, fape_clamp=4.0,
    ),
    "narrow": LossShape(contact_separation=2, error_cutoff=0.5, error_width=0.7, fape_clamp=1e3),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chains", ASSEMBLIES)
@pytest.mark.parametrize("name", PLAIN)
def test_a_loss_is_its_formula_written_out(name: str, chains: str, shape: str) -> None:
    x = complex_of(chains)
    losses = Losses(LossWeights(**{name: -0.7}), SHAPES[shape], x.target)
    found = losses(x.seen)
    assert list(found) == [name]
    assert float(found[name]) == pytest.approx(-0.7 * PLAIN[name](x, SHAPES[shape]), rel=2e-6, abs=1e-9)


def test_without_settings_a_loss_has_the_default_shape_and_no_weight() -> None:
    explicit = LossShape(
        contact_distance=14.0, contact_number=2, contact_separation=9, interface_distance=20.0, interface_number=2,
        helix_distance=6.0, error_cutoff=10.0, error_width=1.0, fape_clamp=10.0,
    )  # fmt: skip
    assert Losses(LossWeights()).shape == LossShape() == explicit
    assert LossWeights() == LossWeights(**dict.fromkeys(PLAIN, 0.0))
    weights = LossWeights(plddt=2.0, symmetry=-1.0, contacts=0.5)
    found = Losses(weights)(complex_of("mixed").seen)
    assert list(found) == ["plddt", "contacts", "symmetry"]


def test_losses_at_their_ends_have_the_values_of_their_guards() -> None:
    """Copies in one place, chains without any pair, and errors far beyond the cutoff."""
    plddt, distogram, pae, _ = random_outputs(6)
    asym, entity = [1, 1, 1, 2, 2, 2], [1] * 6
    leaves = [x.requires_grad_() for x in (plddt, distogram, pae, torch.zeros(6, 37, 3).double())]
    seen = seen_of(*leaves, asym=asym, entity=entity)
    for name, expected in (("symmetry", 1e-5), ("contacts", 0.0), ("helicity", 0.0)):
        loss = Losses(LossWeights(**{name: 1.0}))(seen)[name]
        assert loss.item() == pytest.approx(expected, rel=1e-6)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        assert any(x is not None for x in grads)
        assert all(x is None or not x.any() for x in grads)
    # A single residue is designed. 57 of the 64 bins end below 20 angstrom.
    flat = torch.zeros(4, 4, 64).double()
    seen = seen_of(plddt[:4], flat, None, leaves[3][:4], asym=[1, 2, 2, 2], designed=[True, False, False, False])
    loss = Losses(LossWeights(interface_contacts=1.0))(seen)["interface_contacts"]
    assert loss.item() == pytest.approx(-math.log(57 / 64 + 1e-8), rel=1e-9)
    errors = torch.tensor([[28.0, 27.0, 29.0]]).double()
    number = sum(1 / (1 + math.exp(e - 10)) for e in (27.0, 28.0, 29.0))
    score = sum(1 / (1 + math.exp(e - 10)) / (1 + e**2) for e in (27.0, 28.0, 29.0)) / (number + 1e-8)
    assert float(soft_ipsae(errors, LossShape())) == pytest.approx(score, rel=1e-9)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"contact_number": 0}, "contact_number, interface_number and contact_separation must be at least 1"),
        ({"interface_number": 0}, "contact_number, interface_number and contact_separation must be at least 1"),
        ({"contact_separation": 0}, "contact_number, interface_number and contact_separation must be at least 1"),
        ({"error_width": 0.0}, r"error_width = 0\.0: must be above 0"),
        ({"error_width": math.nan}, "error_width = nan: must be above 0"),
    ],
)
def test_shapes_that_cannot_be_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LossShape(**values)


def test_a_loss_that_the_parameters_or_chains_do_not_support_is_refused() -> None:
    def problem(name: str, *about: Any, known: TargetStructure | None = None) -> str:
        """Return the message of the error about a weight of -0.5, or "" if the loss is supported."""
        try:
            Losses(LossWeights(**{name: -0.5}), target=known).check(*about)
        except UserError as error:
            return str(error)
        return ""

    reasons = {
        "errors": "these parameters have no head for aligned errors. Use others, or set it to 0.",
        "target": "there is no target structure. Pass one, or set it to 0.",
        "chains": "there is only one chain. Design several, or set it to 0.",
        "copies": 'no chain has copies. Name copies "A,B", or set it to 0.',
    }
    needs = {"pae": ["errors"], "ptm": ["errors"], "distogram": ["target"], "fape": ["target"], "symmetry": ["copies"]}
    needs |= {name: ["errors", "chains"] for name in ("interface_pae", "iptm", "ipsae")}
    needs["interface_contacts"] = ["chains"]
    for name in PLAIN:
        all_there = {"errors": True, "target": target(), "chains": 2, "copies": True}
        for lacking, value in (("errors", False), ("target", None), ("chains", 1), ("copies", False)):
            about = all_there | {lacking: value}
            expected = f"loss.{name} = -0.5: {reasons[lacking]}" if lacking in needs.get(name, ()) else ""
            known = about.pop("target")
            assert problem(name, *about.values(), known=known) == expected  # type: ignore[arg-type]
        # By default, one chain without copies
        defaults = [need for need in needs.get(name, ()) if need in ("chains", "copies")]
        expected = f"loss.{name} = -0.5: {reasons[defaults[0]]}" if defaults else ""
        assert problem(name, True, known=target()) == expected
    with pytest.raises(UserError) as refused:
        Losses(LossWeights()).check(True)
    assert str(refused.value) == f"loss: all weights are 0. Set one of {', '.join(PLAIN)}."
    # A call has the chains of its outputs: three entities of three chains have no copies, and one chain is no complex.
    outputs = random_outputs()
    for name, asym, entity in (("symmetry", CHAINS, CHAINS), ("iptm", None, None)):
        with pytest.raises(UserError, match=f"loss.{name} = 1"):
            Losses(LossWeights(**{name: 1.0}))(seen_of(*outputs, asym=asym, entity=entity))
    with pytest.raises(UserError, match="no head for aligned errors"):
        Losses(LossWeights(pae=1.0))(seen_of(*outputs[:2], None, outputs[3]))
    with pytest.raises(UserError, match=r"^target: it has 20 residues, the design 12$"):
        Losses(LossWeights(fape=1.0), target=target())(seen_of(*random_outputs(12)))


def test_a_target_has_the_labels_of_its_chains_in_the_order_of_the_design() -> None:
    draw, chains = np.random.default_rng(0), {}
    for id, letters in {"C": "GXW", "A": "MKBVG", "Z": "AA"}.items():
        n = len(letters)
        positions, mask = draw.normal(size=(n, 37, 3)).astype(np.float32), (draw.random((n, 37)) < 0.6)
        chains[id] = Chain(id, letters, positions, mask.astype(np.float32), np.arange(n), ("",) * n)
    labels = TargetStructure.of({"A": 5, "B": 2, "C": 3}, chains).labels
    aatype = [RESTYPES.index(letter) if letter in RESTYPES else 20 for letter in "MKBVGXXGXW"]
    positions, mask = torch.zeros(10, 37, 3), torch.zeros(10, 37)
    for rows, id in ((slice(0, 5), "A"), (slice(7, 10), "C")):
        positions[rows], mask[rows] = torch.from_numpy(chains[id].positions), torch.from_numpy(chains[id].mask)
    expected = structure_labels(torch.tensor(aatype), positions, mask)
    assert labels.keys() == expected.keys()
    for name, label in expected.items():
        torch.testing.assert_close(labels[name], label, rtol=0, atol=0)
