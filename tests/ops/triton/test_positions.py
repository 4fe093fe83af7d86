"""Positions in kernels: coalesced axes, their order, and copies if more than three remain."""

import pytest
import torch
from torch import Tensor

from warpfold.errors import UserError
from warpfold.ops.triton.positions import MAX_AXES, MOST, Coalesced, Positions, coalesce, programs_for


def _strides(*tensors: Tensor) -> Coalesced | None:
    return coalesce(tensors[0].shape[:-1], *(t.stride()[:-1] for t in tensors))


def _visited(p: Coalesced, tensor: int) -> list[int]:
    """Compute the offsets of positions in a tensor, in the kernel's order, like `offsets`."""
    middle, inner = p.sizes
    outer_step, middle_step, inner_step = p.strides[tensor]
    at = range(p.count)
    if p.axes == 1:
        return [i * inner_step for i in at]
    if p.axes == 2:
        return [i % inner * inner_step + i // inner * middle_step for i in at]
    return [i % inner * inner_step + i // inner % middle * middle_step + i // inner // middle * outer_step for i in at]


def test_axes_in_order_are_one() -> None:
    x, y = torch.empty(3, 4, 5, 8), torch.empty(3, 4, 5, 24)[..., :8]
    p = _strides(x, y)
    assert p == Coalesced(60, 1, (1, 60), ((0, 0, 8), (0, 0, 24)))
    found = Positions({"x": x}, writes={"y": y}).arguments
    assert found["x"].strides == (0, 0, 1, 1)
    assert found["y"].strides == (0, 0, 3, 1)
    assert [found[name].unit.value for name in ("x", "y")] == [8, 8]
    assert found["axes"][:3] == (60, 1, 60)


def test_the_first_tensor_gives_the_order() -> None:
    x = torch.empty(4, 3, 8).transpose(0, 1)
    assert _strides(x, x.clone()).axes == 1
    p = _strides(x, torch.empty(3, 4, 8))
    assert (p.axes, p.sizes) == (2, (4, 3))
    assert p.strides == ((0, 24, 8), (0, 8, 32))


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 1, 4), (1, 1), (5,), (2, 2, 3, 2)])
def test_every_position_is_met_once_and_in_step(shape: tuple[int, ...]) -> None:
    x = torch.empty(*shape, 8)
    turned = torch.empty(*reversed(shape), 12)[..., :8].permute(*reversed(range(len(shape))), len(shape))
    p = _strides(x, turned)
    if p is None:
        assert len(shape) > MAX_AXES
        return
    numbers = torch.arange(p.count)
    met = [torch.empty(t.untyped_storage().nbytes() // 4, dtype=torch.long).fill_(-1) for t in (x, turned)]
    for i in range(2):
        places = torch.tensor(_visited(p, i))
        assert len(set(places.tolist())) == p.count
        met[i][places] = numbers
    seen = [m.as_strided(t.shape[:-1], t.stride()[:-1]) for m, t in zip(met, (x, turned))]
    assert torch.equal(*seen)


def test_shared_axes_have_no_stride() -> None:
    x, factors = torch.empty(3, 4, 8), torch.empty(1, 4, 8).expand(3, 4, 8)
    assert _strides(x, factors).strides[1] == (0, 0, 8)


def test_more_than_three_axes_are_copied_and_delivered() -> None:
    x = torch.arange(2 * 3 * 2 * 3 * 4.0).view(2, 3, 2, 3, 4)
    other = torch.empty(3, 2, 3, 2, 4).permute(3, 2, 1, 0, 4)
    p = Positions({"x": x}, writes={"y": other})
    assert p.arguments["axes"].number.value == 1
    assert not p.writes_in_place("y")
    p.arguments["y"].data.copy_(p.arguments["x"].data)
    p.copy_back()
    assert torch.equal(other, x)


def test_too_many_positions_are_an_error() -> None:
    with pytest.raises(UserError, match="kernels number at most"):
        coalesce((MOST,), (8,))


@pytest.mark.parametrize(("total", "size", "most"), [(1, 64, 8), (64, 64, 8), (1000, 16, 8), (129, 16, 8), (7, 1, 3)])
def test_programs_share_the_blocks_and_none_is_idle(total: int, size: int, most: int) -> None:
    programs, blocks = programs_for(total, size, most), -(-total // size)
    each = -(-blocks // programs)
    assert programs <= most
    assert (programs - 1) * each < blocks <= programs * each
