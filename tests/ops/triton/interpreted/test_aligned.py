"""aligned_errors: the Triton kernels, interpreted, against the definition."""

import pytest
import torch
from torch import Tensor

from tests.ops.test_aligned import right, same_anywhere
from tests.ops.triton.layouts import laid, poisoned, within
from warpfold.check.checks import answer, wrong
from warpfold.ops.pairs import aligned_errors

# frames, points, leading axes, whether only some pairs count, clamp, softening
CASES = {
    "side chains": (37, 70, (), False, 3.0, 0.01),
    "layers": (9, 9, (2, 2), False, 2.0, 0.0),
    "chains": (21, 21, (3,), True, 2.0, 0.01),
    "a frame, no cap": (1, 5, (), False, float("inf"), 0.0),
}


def drawn(name: str) -> tuple[list[Tensor | None], Tensor]:
    f, p, leading, some, _, _ = CASES[name]
    frames, true_frames = (
        within(laid((*lead, f, 3, 4), mean=mean), torch.float32) for lead, mean in ((leading, 0), ((), 0.1))
    )
    points, true_points = (
        within(2 * laid((*lead, p, 3), mean=mean), torch.float32) for lead, mean in ((leading, 0), ((), 0.1))
    )
    frame_mask, point_mask = (within((laid((n,)) > -0.8).double(), torch.float32).detach() for n in (f, p))
    pair_mask = laid((f, p)) > 0 if some else None
    truth = true_frames.detach(), true_points.detach()
    return [frames, points, *truth, frame_mask, point_mask, pair_mask], torch.randn(*leading, 2)


@pytest.mark.parametrize("name", CASES)
def test_aligned_errors(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    given, grad = drawn(name)
    rest = CASES[name][4:]
    assert aligned_errors.unsupported_reason(*given, *rest) is None
    with poisoned(monkeypatch):
        fast = answer(lambda *x: aligned_errors.fast(*x, *rest), given, grad)
    assert not wrong(lambda *x: aligned_errors.definition(*x, *rest), given, grad, fast)


@pytest.mark.usefixtures("default_tiles")
def test_a_point_that_is_right_has_no_gradient() -> None:
    """Nor does one that is nearer to its place than what a distance counts as at least."""
    given, grad = right()
    assert not answer(lambda *x: aligned_errors.fast(*x, None, 10.0, 0.0), given, grad)[1].any()


@pytest.mark.usefixtures("default_tiles")
def test_far_from_the_origin_nothing_changes() -> None:
    assert same_anywhere(aligned_errors.fast)
