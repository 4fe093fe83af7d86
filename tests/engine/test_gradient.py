"""Test the gradient by a sequence: soft features, central differences, and every plan against one device."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers import as_multimer, filled_model, tiny_config
from tests.ranks import run_ranks
from warpfold.batch import Batch, at_pass, passes, to_tensors
from warpfold.data.example.raw_example import Assembly, RawExample, from_sequence
from warpfold.data.features.choose import SampleConfig
from warpfold.data.features.make import make_features
from warpfold.data.features.msa import query_weight
from warpfold.data.formats.alignment import Alignment, parse_a3m
from warpfold.engine.gradient import SequenceGradient, Through, gradient_by_shares, loss_of_every_output
from warpfold.model.alphafold import AlphaFold
from warpfold.model.clusters import cluster_features
from warpfold.model.soft import CLASSES, QueryPlace, soften
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import Mesh, make_mesh
from warpfold.parallel.plan import Plan
from warpfold.parallel.team import Team

QUERY = "MKVLAWGHTE"
ROWS = ["MKVLAWGHTD", "MRVLcAWGKTE", "MKILAW-HTE", "AKVLSWGHSE", "MKVMAWGRTE", "LKVLAWGHTQ"]
SAMPLE = SampleConfig(max_msa=3, max_extra=2, masked_fraction=0.0, max_templates=0, empty_extra="query")


def example(sequence: str = QUERY, rows: list[str] = ROWS) -> RawExample:
    text = "".join(f">{i}\n{row}\n" for i, row in enumerate(rows))
    alignment = parse_a3m(f">q\n{sequence}\n{text}", "q", sequence) if rows else Alignment.of_query(sequence, "q")
    return from_sequence(sequence, [alignment])


def features(sequence: str, rows: list[str], count: int = 1) -> tuple[Batch, QueryPlace]:
    """Make the features of a monomer, and the place of its sequence in them."""
    raw = example(sequence, rows)
    batch = to_tensors(make_features(raw, SAMPLE, 0, ("x",), count))
    weight, is_extra = query_weight(raw, SAMPLE, 0, ("x",), count)
    return batch, QueryPlace(torch.from_numpy(weight), is_extra)


def complex_features(rows: list[str], count: int = 1) -> Batch:
    """Make the features of a dimer, of which one chain has an alignment."""
    assembly = Assembly("x", ("A", "B"), (example(QUERY, rows), example("GSTWKL", [])))
    return to_tensors(make_features(assembly, SAMPLE, 0, ("x",), count))


def codes(batch: Batch) -> Tensor:
    return F.one_hot(batch["aatype"], CLASSES).float()


@pytest.mark.parametrize("rows", [[], ROWS[:2], ROWS], ids=["alone", "all centres", "clusters"])
def test_a_sequence_as_shares_leaves_the_features_as_they_are(rows: list[str]) -> None:
    batch, place = features(QUERY, rows, 2)
    soft = soften(batch, codes(batch), place)
    for name, x in batch.items():
        assert torch.equal(soft[name], x.float() if name == "msa_feat" else x), name
    assert ("soft_extra" in soft) == (len(rows) < SAMPLE.max_msa)
    if "soft_extra" in soft:
        assert torch.equal(soft["soft_extra"].argmax(-1), batch["extra_msa"][0])
    batch = complex_features(rows)
    soft = at_pass(soften(batch, codes(batch), None), 0)
    hard, found = cluster_features(at_pass(batch, 0)), cluster_features(soft)
    extra = F.one_hot(hard["extra_msa"], 23).float()
    assert torch.equal(found.pop("soft_extra"), extra)
    for name, x in hard.items():
        assert torch.equal(found[name], x), name


@pytest.mark.parametrize("rows", [[], ROWS], ids=["alone", "clusters"])
def test_shares_of_another_sequence_are_its_features(rows: list[str]) -> None:
    """Change one residue.  The rows stay in their clusters, so that only the query's features change."""
    other = QUERY[:4] + "C" + QUERY[5:]
    (batch, place), (expected, _) = features(QUERY, rows), features(other, rows)
    changed = {name for name, x in expected.items() if not torch.equal(x, batch[name])}
    assert {"target_feat", "msa_feat"} <= changed
    soft = soften(batch, codes(expected), place)
    for name in ("target_feat", "msa_feat"):
        torch.testing.assert_close(soft[name], expected[name], rtol=0, atol=1e-6)


def model_of(multimer: bool) -> AlphaFold:
    config = tiny_config(templates=replace(tiny_config().templates, enabled=False))
    return filled_model(as_multimer(config) if multimer else config)


@cache
def given(multimer: bool, count: int) -> tuple[Batch, QueryPlace | None, Tensor]:
    """Make features in fp64 and a soft sequence."""
    batch, place = (complex_features(ROWS, count), None) if multimer else features(QUERY, ROWS, count)
    batch = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
    logits = torch.randn(len(batch["aatype"]), 20, generator=torch.Generator().manual_seed(1)).double()
    logits = logits + 2 * codes(batch)[:, :20]
    return batch, place, F.pad(logits.softmax(-1), (0, 1))


def gradient(
    multimer: bool, recycles: int, through: Through, plan: Plan | None = None, mesh: Mesh | None = None
) -> SequenceGradient:
    """Compute the gradient under a plan, on one of its ranks."""
    batch, place, shares = given(multimer, recycles + 1)
    mesh = mesh or Mesh()
    model = Execution(replace(plan or Plan(), precision="fp64"), mesh).bind(model_of(multimer))
    team = Team(mesh=mesh)
    return gradient_by_shares(model, batch, shares, loss_of_every_output, place, recycles, through, team)


def hold_rotations(model: AlphaFold) -> None:
    """Replay the rotations of the first run in each layer of the structure module in all later runs."""
    fold, seen, calls = model.structure.fold_iteration, list[Tensor](), [0]
    advance, first = fold.advance, [True]

    def held(s: Tensor, pairs: object, affine: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        if first[0]:
            seen.append(affine[..., :4].detach())
        rotation = seen[calls[0] % len(seen)]
        calls[0] += 1
        return advance(s, pairs, torch.cat([rotation, affine[..., 4:]], -1), layer)

    fold.advance = held
    model.first_run_is_over = lambda: (first.__setitem__(0, False), calls.__setitem__(0, 0))


@pytest.mark.parametrize(
    ("multimer", "recycles", "through"), [(False, 0, "last"), (True, 0, "last"), (False, 1, "all"), (True, 1, "all")]
)
def test_central_differences_of_what_holds_rotations(multimer: bool, recycles: int, through: Through) -> None:
    batch, place, shares = given(multimer, recycles + 1)
    model = Execution(Plan(precision="fp64")).bind(model_of(multimer))
    hold_rotations(model)

    def at(x: Tensor) -> SequenceGradient:
        return gradient_by_shares(model, batch, x, loss_of_every_output, place, recycles, through)

    found = at(shares).by_shares
    model.first_run_is_over()
    step, generator = 1e-7, torch.Generator().manual_seed(2)
    for _ in range(4):
        direction = torch.randn(shares.shape, generator=generator).double()
        difference = (at(shares + step * direction).loss - at(shares - step * direction).loss) / (2 * step)
        assert difference == pytest.approx(
            float((found * direction).sum()), rel=1e-5
        )  # a larger step falls over edges of bins


def test_the_mean_is_that_of_each_pass_and_all_differs_from_last() -> None:
    by = {through: gradient(True, 1, through) for through in ("last", "all", "mean")}
    alone = gradient_by_shares(
        Execution(Plan(precision="fp64")).bind(model_of(True)),
        passes(given(True, 2)[0], 0, 1),
        given(True, 2)[2],
        loss_of_every_output,
    )
    torch.testing.assert_close(
        by["mean"].by_shares, (alone.by_shares + by["last"].by_shares) / 2, rtol=1e-9, atol=1e-12
    )
    assert by["mean"].loss == pytest.approx((alone.loss + by["last"].loss) / 2)
    assert by["all"].loss == pytest.approx(by["last"].loss, rel=1e-12)
    assert (by["all"].by_shares - by["last"].by_shares).norm() > 1e-3 * by["last"].by_shares.norm()


PLANS = [
    (False, 0, "last", Plan(recompute="block", chunk=3)),
    (False, 1, "all", Plan(recompute="layer")),
    (True, 1, "mean", Plan(recompute="block", keep_blocks=1)),
    (False, 1, "all", Plan(axial=2, recompute="block")),
    (True, 0, "last", Plan(axial=3)),
    (True, 1, "mean", Plan(axial=2, branch=2, recompute="block")),
]


@pytest.mark.parametrize(("multimer", "recycles", "through", "plan"), PLANS)
def test_every_plan_has_the_gradient_of_one_device(multimer: bool, recycles: int, through: Through, plan: Plan) -> None:
    expected = gradient(multimer, recycles, through)

    def found() -> list[np.ndarray | float]:
        mesh = make_mesh(1, plan.axial, plan.branch)
        one = gradient(multimer, recycles, through, plan, mesh)
        return [one.by_shares.numpy(), one.loss, one.folded.structure.final_atom37.numpy()]

    ranks = plan.axial * plan.branch
    results = run_ranks(found, ranks) if ranks > 1 else [found()]
    for by_shares, loss, positions in results:
        scale = float(expected.by_shares.norm())
        assert np.linalg.norm(by_shares - expected.by_shares.numpy()) < 1e-10 * scale
        assert math.isclose(loss, expected.loss, rel_tol=1e-10)
        np.testing.assert_allclose(positions, expected.folded.structure.final_atom37.numpy(), atol=1e-9)


def test_parameters_are_constants_and_stay_trainable() -> None:
    model = model_of(False)
    batch, place = features(QUERY, [])
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    gradient_by_shares(model, batch, codes(batch), loss_of_every_output, place)
    assert all(p.grad is None for p in model.parameters())
    assert {name for name, p in model.named_parameters() if p.requires_grad} == names
