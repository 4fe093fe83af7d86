"""Rules of Adam and of FAPE's sums, tested in every module that imports them."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.ops.cases import made
from warpfold.check.checks import answer
from warpfold.ops.adam import adam_step
from warpfold.ops.pairs import LEAST, aligned_errors

EPS = torch.finfo(torch.float32).eps
WAYS = pytest.mark.parametrize("way", ["definition", "fast"])


@WAYS
@pytest.mark.parametrize("poison", [1.0, math.nan, math.inf])
def test_a_step_that_is_not_used_changes_nothing(way: str, poison: float) -> None:
    for scale in (0.5, math.nan):
        call = made("adam_step", torch.float32, n=50, packed=torch.bfloat16)
        call.given["gradient"][3] = poison
        call.given["used"], call.given["scale"] = torch.tensor(False), torch.tensor(scale)
        for name, after in call.answers(getattr(adam_step, way)).items():
            assert torch.equal(after, call.given[name])


@WAYS
@pytest.mark.parametrize("packed", [torch.bfloat16, torch.float16])
def test_the_packed_copy_is_the_new_weights_rounded(way: str, packed: torch.dtype) -> None:
    found = made("adam_step", torch.float32, packed=packed).answers(getattr(adam_step, way))
    assert torch.equal(found["packed"], found["weights"].to(packed))


AWAY = torch.tensor([300.0, -280.0, 310.0])  # angstrom, as in crystals
FRAMES, POINTS = 37, 90


def structures(generator: torch.Generator) -> list[Tensor]:
    """Make frames and points of a prediction with errors of 0.5 angstrom; on a grid, so that AWAY is added exactly."""
    rotation = torch.linalg.qr(torch.randn(FRAMES, 3, 3, generator=generator))[0]
    places, truth = (15 * torch.randn(n, 3, generator=generator) for n in (FRAMES, POINTS))
    off = [x + 0.5 * torch.randn(x.shape, generator=generator) for x in (places, truth)]
    places, truth, near, points = ((x * 512).round() / 512 for x in (places, truth, *off))
    return [torch.cat([rotation, near[..., None]], -1), points, torch.cat([rotation, places[..., None]], -1), truth]


def moved(structure: list[Tensor]) -> list[Tensor]:
    frames, points = structure
    return [torch.cat([frames[..., :3], frames[..., 3:] + AWAY[:, None]], -1), points + AWAY]


def found(way: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    """Compute the two sums and the gradients of frames and points."""
    ones = [torch.ones(n, dtype=given[0].dtype) for n in (FRAMES, POINTS)]
    ours = [x.clone().requires_grad_() for x in given[:2]]
    return answer(
        lambda *x: way(*x, None, 10.0, 0.01), [*ours, *given[2:], *ones], torch.tensor([0.7, 0.3]).to(ones[0])
    )


@WAYS
def test_far_from_the_origin_nothing_changes(way: str) -> None:
    """The results are bitwise equal if the truth or the prediction is moved by 300 angstrom."""
    given, run = structures(torch.Generator().manual_seed(0)), getattr(aligned_errors, way)
    here = found(run, given)
    there = found(run, given[:2] + moved(given[2:])), found(run, moved(given[:2]) + given[2:])
    assert all(torch.equal(a, b) for one in there for a, b in zip(here, one, strict=True))


@WAYS
def test_gradients_far_from_the_origin_are_those_of_fp64(way: str) -> None:
    """The error of a pair's direction is at most some rounding of the operands, |x - t|, over its distance."""
    given = structures(torch.Generator().manual_seed(1))
    given = given[:2] + [x + 0.1 for x in moved(given[2:])]  # off the grid
    exact = [x.double() for x in given]
    ours, truth = found(getattr(aligned_errors, way), given)[2], found(aligned_errors.definition, exact)[2]
    local = [(x[None] - f[:, None, :, 3]) @ f[..., :3] for f, x in (exact[:2], exact[2:])]
    off = (local[0] - local[1]).norm(dim=-1)
    rounding = 8 * EPS * (local[0].norm(dim=-1) / off).square().sum(0).sqrt()  # 8 roundings per pair
    assert ((ours - truth).norm(dim=-1) <= rounding).all()


@WAYS
def test_a_point_that_is_right_has_no_gradient(way: str) -> None:
    """Neither do points with distances below the minimum that counts."""
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(2))
    frames = torch.eye(3, 4).expand(3, 3, 4).contiguous()
    given = [frames, (x + LEAST / 100).requires_grad_(), frames, x, torch.ones(3), torch.ones(40)]
    run = getattr(aligned_errors, way)
    sums, of_points = answer(lambda *t: run(*t, None, 10.0, 0.0), given, torch.ones(2))
    torch.testing.assert_close(sums, torch.full((2,), 120 * LEAST))
    assert not of_points.any()
