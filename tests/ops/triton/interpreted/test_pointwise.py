"""One query over a handful of keys, for many rows: the kernels of the template attention against the definition."""

import pytest
import torch

from tests.ops.triton.attention_cases import Case, answers, guarded, inputs, mistakes
from tests.ops.triton.layouts import poisoned
from warpfold.ops import dispatch
from warpfold.ops.attention import attention
from warpfold.ops.triton.launch import configs, forced


def found(given) -> dict[str, torch.Tensor]:
    """What the kernels make of it, in tiles that the last is not full of."""
    tiles = {name: configs("BLOCK", (32, 4, 1))[0] for name in ("pointwise_forward", "pointwise_backward")}
    with poisoned(pytest.MonkeyPatch()), dispatch.using("strict"), forced(tiles):
        return answers(attention, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [8, 16, 24, 64])
def test_is_as_exact_as_the_definition(width: int, dtype: torch.dtype) -> None:
    given = inputs(Case((5, 7), 1, 4, 4, width, "own", "none"), dtype)
    assert not mistakes(given, found(given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("default_tiles")
def test_in_the_default_tiles(dtype: torch.dtype) -> None:
    given = inputs(Case((5, 37), 1, 4, 4, 16, "own", "none"), dtype)
    with poisoned(pytest.MonkeyPatch()), dispatch.using("strict"):
        assert not mistakes(given, answers(attention, given))


@pytest.mark.parametrize("keys", [1, 3, 32, 33])
def test_any_count_of_keys(keys: int) -> None:
    given = inputs(Case((2, 3), 1, keys, 2, 16, "own", "none"), torch.float16)
    assert not mistakes(given, found(given))


def test_templates_far_apart_and_a_mask_of_all_pairs() -> None:
    """As TemplatePointwiseAttention calls it: templates outermost in memory, one mask for every pair."""
    given = inputs(Case((6, 5), 1, 3, 2, 16, "own", "none", "clear"), torch.float16)
    given.k, given.v = (guarded((3, 6, 5, 2, 16), t.dtype).movedim(0, 2).copy_(t) for t in (given.k, given.v))
    given.mask = torch.tensor([1.0, 0.0, 1.0]).expand(6, 5, 3)
    ours = found(given)
    assert not mistakes(given, ours)
    assert not ours["dv"][:, :, 1].any()


def test_fully_masked() -> None:
    given = inputs(Case((2, 3), 1, 4, 2, 16, "own", "none", "clear"), torch.float32)
    given.mask[1, 2] = 0
    ours = found(given)
    torch.testing.assert_close(ours["out"][1, 2, 0], given.v[1, 2].mean(0))
    torch.testing.assert_close(ours["dv"][1, 2], given.grad[1, 2].expand(4, -1, -1) / 4)
    assert not ours["dq"][1, 2].any()
    assert not ours["dk"][1, 2].any()


def test_repeats_bit_by_bit() -> None:
    given = inputs(Case((5, 7), 1, 4, 4, 16, "own", "none"), torch.float16)
    first, second = found(given), found(given)
    assert all(torch.equal(first[name], second[name]) for name in first)
