"""Test `Predictor.gradient`: fixed and free chains, finite differences, execution plans."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers import as_multimer, filled_model, tiny_config, tiny_model
from tests.ranks import run_ranks
from warpfold.data.features.choose import SampleConfig
from warpfold.engine.gradient import ModelOutputs, loss_of_every_output
from warpfold.errors import UserError
from warpfold.geometry.residue import RESTYPES
from warpfold.model.confidence import pae
from warpfold.model.heads import pae_breaks
from warpfold.model.soft import soft_chains
from warpfold.parallel.mesh import make_mesh
from warpfold.parallel.team import Team
from warpfold.prediction.predictor import Predictor

SAMPLE = SampleConfig(max_msa=3, max_extra=4, max_templates=0, empty_extra="query")
ROWS = ["MKVLAWGHTD", "MRVLcAWGKTE", "MKILAW-HTE", "AKVLSWGHSE"]


def predictor(multimer: bool = False, team: Team | None = None, **more: object) -> Predictor:
    config = tiny_config(templates=replace(tiny_config().templates, enabled=False))
    model = filled_model(as_multimer(config) if multimer else config)
    return Predictor(model, sample=SAMPLE, precision="fp64", team=team, **more)


def logits(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(length, 20))


def test_the_gradient_of_logits_is_that_of_differences() -> None:
    """The loss uses only contacts and PAE, whose gradients do not pass through rotations of the structure module."""

    def loss(seen: ModelOutputs) -> dict[str, torch.Tensor]:
        every = loss_of_every_output(seen)
        return {name: every[name] for name in ("contacts", "pae")}

    fold, x, fixed = predictor(True), {"B": logits(6)}, {"A": "MKVLA", "B": "--C---"}
    found = fold.gradient(x, loss, fixed=fixed, recycles=0, temperature=0.7)
    assert found.loss == pytest.approx(sum(found.terms.values()))
    assert found.grad["B"].shape == (6, 20)
    assert not found.grad["B"][2].any()  # a fixed residue
    step = 1e-6
    direction = logits(6, 1)
    up, down = (
        fold.gradient({"B": x["B"] + s * direction}, loss, fixed=fixed, recycles=0, temperature=0.7).loss
        for s in (step, -step)
    )
    assert (up - down) / (2 * step) == pytest.approx(float((found.grad["B"] * direction).sum()), rel=1e-5)
    assert found.prediction.chain_ids == ("A", "B")
    assert (found.prediction.single, found.prediction.pair) == (None, None)
    likely = "".join(RESTYPES[i] for i in x["B"].argmax(-1))
    assert found.prediction.sequence == "MKVLA" + likely[:2] + "C" + likely[3:]


@pytest.mark.parametrize(("soft", "hard"), [(1, 0), (0.3, 0), (0, 0), (0.3, 0.4), (0, 1)])
def test_what_enters_lies_between_logits_their_shares_and_the_hard_sequence(soft: float, hard: float) -> None:
    x = torch.from_numpy(logits(3))
    entered = soft_chains(x, "-C-")["A"].enter(soft, 0.7, hard).double()
    expected = soft * (x / 0.7).softmax(-1) + (1 - soft) * x
    expected = (1 - hard) * expected + hard * torch.eye(20)[x.argmax(-1)]
    expected[1] = torch.eye(20)[RESTYPES.index("C")]
    torch.testing.assert_close(entered[:, :20], expected, rtol=0, atol=1e-6)
    assert not entered[:, 20].any()  # X


@pytest.mark.parametrize("alignment", [(), ROWS], ids=["alone", "aligned"])
def test_a_hard_sequence_is_folded_as_fold_folds_it(alignment: list[str]) -> None:
    fold = predictor()
    # `gradient` does not mask the alignment of a design.
    fold.sample = replace(SAMPLE, masked_fraction=0.0)
    x = logits(10)
    found = fold.gradient(x, loss_of_every_output, alignment=alignment, hard=1.0, recycles=1)
    alone = fold.fold(found.prediction.sequence, alignment, recycles=1)
    np.testing.assert_allclose(found.prediction.positions, alone.positions, atol=1e-6)
    np.testing.assert_allclose(found.prediction.plddt, alone.plddt, atol=1e-6)
    assert np.abs(found.grad).max() > 0
    soft = fold.gradient(x, loss_of_every_output, alignment=alignment, recycles=1)
    assert np.abs(soft.prediction.plddt - alone.plddt).max() > 1e-3


def test_an_initial_guess_is_where_the_first_pass_starts() -> None:
    fold, x = predictor(True), logits(10)
    fold.sample = replace(SAMPLE, masked_fraction=0.0)
    guess = {"A": (np.random.default_rng(2).normal(0, 8, (10, 37, 3)), np.ones((10, 37)))}
    found = fold.gradient(x, loss_of_every_output, hard=1.0, recycles=1, initial_guess=guess)
    alone = fold.fold(found.prediction.sequence, recycles=1, initial_guess=guess)
    np.testing.assert_allclose(found.prediction.positions, alone.positions, atol=1e-6)
    without = fold.gradient(x, loss_of_every_output, hard=1.0, recycles=1)
    assert np.abs(found.grad - without.grad).max() > 1e-3 * np.abs(without.grad).max()
    with pytest.raises(UserError, match=r"other chains \(residues\) than design: A \(9\), not A \(10\)"):
        fold.gradient(x, loss_of_every_output, initial_guess={"A": (np.zeros((9, 37, 3)), np.ones((9, 37)))})


def test_chains_that_are_joined_without_a_gap_have_the_gradient_of_one_chain() -> None:
    """The alignments of the chains are combined without pairing. Their rows have gaps in the other chain."""
    fold, second = predictor(), ["MRVL", "MKIL", "AKVL"]
    # The query resembles the rows, so the rows join its cluster.
    x = logits(14) + 3 * np.eye(20)[[RESTYPES.index(letter) for letter in ROWS[0] + "MKVL"]]
    fold.chain_gap, chains = 0, {"A": x[:10], "B": x[10:]}
    rows = [row + "-" * 4 for row in ROWS] + ["-" * 10 + row for row in second]
    for of_chains, of_one in (((), ()), ((ROWS, second), rows)):
        found = fold.gradient(chains, loss_of_every_output, alignment=of_chains, recycles=1)
        alone = fold.gradient(x, loss_of_every_output, alignment=of_one, recycles=1)
        grad = np.concatenate([found.grad["A"], found.grad["B"]])
        np.testing.assert_allclose(grad, alone.grad, atol=1e-10 * np.abs(alone.grad).max())
    fold.chain_gap = 200
    apart = fold.gradient(chains, loss_of_every_output, alignment=(ROWS, second), recycles=1)
    assert np.abs(apart.grad["A"] - found.grad["A"]).max() > 1e-3 * np.abs(found.grad["A"]).max()


@pytest.mark.parametrize("alignment", [(), (ROWS, ["MKVL", "MRVL", "MKIL", "AKVL"])], ids=["alone", "aligned"])
def test_the_gradient_with_a_chain_gap_is_that_of_differences(alignment: object) -> None:
    """The loss distinguishes the chains. The rows of an alignment share the cluster of the query."""
    seen_chains = []

    def loss(seen: ModelOutputs) -> torch.Tensor:
        seen_chains.append((seen.asym_id.tolist(), seen.entity_id.tolist()))
        other = seen.asym_id[:, None] != seen.asym_id
        return pae(seen.pae_logits, pae_breaks(seen.pae_logits.shape[-1]))[other].mean()

    fold, x, step, direction = predictor(), {"A": logits(10), "B": logits(4, 2)}, 1e-6, logits(10, 1)
    fold.chain_gap, fold.sample = 200, replace(SAMPLE, masked_fraction=0.0)
    more = {"alignment": alignment, "fixed": {"B": "MKVL"}, "recycles": 0}
    found = fold.gradient(x, loss, **more)
    assert seen_chains[0] == ([1] * 10 + [2] * 4, [1] * 10 + [2] * 4)
    assert not found.grad["B"].any()
    up, down = (fold.gradient(x | {"A": x["A"] + s * direction}, loss, **more).loss for s in (step, -step))
    assert (up - down) / (2 * step) == pytest.approx(float((found.grad["A"] * direction).sum()), rel=1e-5)
    hard = fold.gradient(x, loss, hard=1.0, **more).prediction
    alone = fold.fold({"A": hard.sequence[:10], "B": "MKVL"}, alignment, recycles=0)
    np.testing.assert_allclose(hard.positions, alone.positions, atol=1e-6)
    assert hard.iptm == pytest.approx(alone.iptm, abs=1e-6)
    fold.gradient({"A,B": x["A"]}, loss, recycles=0)
    assert seen_chains[-1] == ([1] * 10 + [2] * 10, [1] * 20)


def test_copies_have_one_sequence_and_the_sum_of_their_gradients() -> None:
    fold, x = predictor(True), logits(5)
    together = fold.gradient({"A,B": x}, loss_of_every_output, recycles=0)
    assert list(together.grad) == ["A,B"]
    apart = fold.gradient({"A": x, "B": x}, loss_of_every_output, recycles=0)
    np.testing.assert_allclose(together.grad["A,B"], apart.grad["A"] + apart.grad["B"], atol=1e-12)


@pytest.mark.parametrize("more", [{"chunk": 3}, {"memory": "1GB"}])
def test_other_plans_and_the_planner_give_the_same(more: dict[str, object]) -> None:
    one, other = (
        p.gradient(logits(9), loss_of_every_output, recycles=1, through="mean")
        for p in (predictor(), predictor(**more))
    )
    np.testing.assert_allclose(other.grad, one.grad, atol=1e-10 * np.abs(one.grad).max())
    assert other.prediction.details["plan"]


def test_ranks_that_share_it_give_the_same() -> None:
    def found() -> np.ndarray:
        team = Team(mesh=make_mesh(1, 2, 1))
        return predictor(True, team).gradient({"A,B": logits(5)}, loss_of_every_output, recycles=1).grad["A,B"]

    one = predictor(True).gradient({"A,B": logits(5)}, loss_of_every_output, recycles=1).grad["A,B"]
    for ours in run_ranks(found, 2):
        np.testing.assert_allclose(ours, one, atol=1e-10 * np.abs(one).max())


def test_nothing_of_the_model_is_changed() -> None:
    model = tiny_model(templates=replace(tiny_config().templates, enabled=False))
    fold = Predictor(model, sample=SAMPLE)
    before = fold.fold("MKVLA").positions
    fold.gradient(logits(5), loss_of_every_output)
    np.testing.assert_array_equal(fold.fold("MKVLA").positions, before)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_in_bf16_it_is_nearly_the_same() -> None:
    exact = predictor().gradient(logits(9), loss_of_every_output, recycles=0).grad
    fold = predictor()
    low = Predictor(fold.model.float(), sample=SAMPLE, precision="bf16").gradient(
        logits(9), loss_of_every_output, recycles=0
    )
    cosine = (exact * low.grad).sum() / np.linalg.norm(exact) / np.linalg.norm(low.grad)
    assert cosine > 0.98
