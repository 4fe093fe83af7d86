"""An initial guess replaces the result of an earlier pass. It is the same under every plan, and zeros are no guess."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.laws.test_outside_trunk import LIMIT, error, example, model_of
from tests.ranks import run_ranks
from warpfold.batch import Batch, stack
from warpfold.geometry.atoms import CA, CB, GLYCINE
from warpfold.host import fetch
from warpfold.model.alphafold import AlphaFold
from warpfold.parallel.collectives import local_shard
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import make_mesh
from warpfold.parallel.plan import Plan


def guess_of(batch: Batch) -> Tensor:
    g = torch.Generator().manual_seed(5)
    return 6 * torch.randn(*batch["aatype"].shape, 37, 3, generator=g).double()


def bound(several: bool, **how: int) -> AlphaFold:
    return Execution(Plan(precision="fp64", **how)).bind(model_of(several))


def folded(model: AlphaFold, batch: Batch, guess: Tensor | None, recycles: int = 0) -> tuple[Tensor, Tensor]:
    """Fold with the model's execution; return z (this rank's shard) and the atoms."""
    with torch.no_grad():
        start = None if guess is None else model.first_recycled(batch, guess)
        found = model.fold(batch, recycles, start=start)
    pair = found.representations.pair
    return fetch(pair, slice(0, pair.shape[-3])), found.structure.final_atom37


@pytest.mark.parametrize("several", [False, True], ids=["chain", "complex"])
def test_of_a_guess_the_beta_carbons_alone_are_read_and_zeros_are_no_guess(several: bool) -> None:
    batch, model = example(2, several), bound(several)
    batch["aatype"][2] = GLYCINE
    guess, none = guess_of(batch), folded(model, batch, None)
    given = folded(model, batch, guess)
    assert error(given[0], none[0]) > 0.01
    beta, atom = torch.zeros_like(guess), torch.where(batch["aatype"] == GLYCINE, CA, CB)
    for i, a in enumerate(atom):
        beta[i, a] = guess[i, a]
    for found, expected in ((folded(model, batch, 0 * guess), none), (folded(model, batch, beta), given)):
        assert all(torch.equal(one, other) for one, other in zip(found, expected))


@pytest.mark.parametrize("several", [False, True], ids=["chain", "complex"])
@pytest.mark.parametrize("how", [{"chunk": 1}, {"chunk": 4, "in_place": True, "offload": True}], ids=str)
def test_a_guess_is_the_same_under_every_plan(several: bool, how: dict[str, int]) -> None:
    batch = example(4, several)
    found, expected = (folded(model, batch, guess_of(batch), 1) for model in (bound(several, **how), bound(several)))
    assert all(error(one, other) < LIMIT for one, other in zip(found, expected))


@pytest.mark.parametrize("several", [False, True], ids=["chain", "complex"])
def test_a_guess_is_the_same_over_ranks(several: bool) -> None:
    def on_a_rank() -> list[float]:
        batch, model, mesh = example(2, several), bound(several), make_mesh(1, 2, 1)
        whole = folded(model, batch, guess_of(batch))
        plan = Plan(axial=2, chunk=2, in_place=True, precision="fp64")
        found = folded(Execution(plan, mesh).bind(model), batch, guess_of(batch))
        expected = local_shard(whole[0], 0, mesh.axial), whole[1]
        return [error(one, other) for one, other in zip(found, expected)]

    assert max(map(max, run_ranks(on_a_rank, 2))) < LIMIT


def test_in_a_batch_each_has_its_own_guess() -> None:
    model, several = bound(False), [example(2, False), example(2, False)]
    several[1]["msa_feat"] = several[1]["msa_feat"] + 1
    guesses = [guess_of(several[0]), torch.zeros(9, 37, 3).double()]
    found = folded(model, stack(several), torch.stack(guesses))
    for i, (batch, guess) in enumerate(zip(several, guesses)):
        for one, other in zip(found, folded(model, batch, guess)):
            assert error(one[i], other) < LIMIT


def test_recycling_ends_where_a_guess_is_found_again() -> None:
    """The first pass is compared with the guess.

    With a tolerance, recycling ends once a pass hardly moves the structure.
    """
    batch, model = example(2, False), bound(False)
    atoms = folded(model, batch, None)[1]
    model.config = replace(model.config, recycle_tolerance=1e3)
    far = torch.zeros_like(atoms)
    far[:, CA, 0] = 1e5 * torch.arange(9)
    done = [model.fold(batch, 2, start=model.first_recycled(batch, guess)).recycles for guess in (atoms, far)]
    assert done == [1, 2]
