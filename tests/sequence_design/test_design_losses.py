"""Test the losses of a design against the official confidences, finite differences, and shapes with known values."""

import json
import math
from dataclasses import replace
from pathlib import Path

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
