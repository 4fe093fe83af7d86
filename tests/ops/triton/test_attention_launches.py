"""The launches of attention and their memory, on meta tensors."""

import pytest
import torch
from torch import Tensor

from tests.ops.triton.budgets import BUDGETS, figures
from tests.ops.triton.offsets import overflows
from warpfold.ops.dispatch import Operands
from warpfold.ops.linear import empty_linear
from warpfold.ops.triton import attention
from warpfold.ops.triton.launch import KernelLaunch, recorded


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def projected(rows: int, length: int, heads: int, width: int, turned: bool = False) -> tuple[Tensor, ...]:
    """Make q, k and v as slices of one projection [rows, length, c]; turned: of the transposed projection."""
    c = heads * width
    x = meta(1, length, rows, 4 * c + 16).transpose(1, 2) if turned else meta(1, rows, length, 4 * c + 16)
    return tuple(t.unflatten(-1, (heads, width)) for t in x.split([c, c, c, c + 16], -1)[:3])


def launched(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> dict[str, KernelLaunch]:
    """Record the launches of a forward and a backward pass by name."""
    mask = meta(*k.shape[:3], dtype=torch.float32)
    with recorded() as found:
        t = Operands(q=q, k=k, v=v, mask=mask, bias=bias)
        out, lse = attention.attention(t)
        attention.attention_backward(t.but(grad=torch.empty_like(out), out=out, lse=lse, bias_wanted=bias is not None))
    return {launch.kernel.name: launch for launch in found}


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
def test_no_vector_is_copied(turned: bool) -> None:
    q, k, v = projected(40, 24, 4, 32, turned)
    launches = launched(q, k, v, None)
    assert set(launches) == {"attention_forward", "attention_short"}
    for launch in launches.values():
        assert all(launch.arguments[name].data is t for name, t in (("q", q), ("k", k), ("v", v)))
        given = launch.arguments["q"]
        strides = tuple(stride * given.unit.value for stride in given.strides)
        assert strides == (0, *q.stride()[1:4])  # a single batch has stride 0


def test_addresses_are_known_to_be_wide() -> None:
    """All strides of padded projections are multiples of 16 for Triton; for heads of width 8, multiples of 8."""
    wide = launched(*projected(40, 24, 4, 32), meta(1, 24, 24, 4).permute(0, 3, 1, 2))
    assert wide["attention_forward"].arguments["q"].unit.value == 1
    assert all(stride % 16 == 0 for stride in wide["attention_forward"].arguments["q"].strides)
    assert launched(*projected(40, 24, 8, 8), None)["attention_forward"].arguments["q"].unit.value == 8
    bias = wide["attention_forward"].arguments["bias"].data
    assert bias.stride() == (4 * 24 * 32, 24 * 32, 32, 1)  # 24 keys padded to 32


def test_a_bias_that_is_projected_by_heads_is_read_where_it_lies() -> None:
    def place(bias: Tensor) -> tuple[int, int]:
        given = launched(*projected(40, 24, 4, 32), bias)["attention_forward"].arguments["bias"].data
        return given.untyped_storage()._cdata, given.shape[-1]

    bias = empty_linear(meta(1, 24, 24, 8), 4, planes=True).movedim(-1, -3)
    assert place(bias) == (bias.untyped_storage()._cdata, 32)
    cut = meta(1, 4, 24, 32)[..., 8:]  # the last row would exceed the memory
    assert place(cut)[0] != cut.untyped_storage()._cdata


@pytest.mark.parametrize(("rows", "length", "slabs"), [(256, 256, 4), (8, 256, 2), (3, 64, 1), (512, 1024, 1)])
def test_rows_of_the_gradient_of_the_bias_are_cut_into_slabs(rows: int, length: int, slabs: int) -> None:
    launches = launched(*projected(rows, length, 4, 32), meta(1, 4, length, length))
    launch = launches["attention_dbias"]
    assert ("sum_partials" in launches) == (slabs > 1)
    assert launch.arguments["slab"] * slabs >= rows > launch.arguments["slab"] * (slabs - 1)
    into = launch.arguments["dbias"].data
    assert into.shape == (slabs, 1, 4, length, length)
    assert into.dtype == (torch.float32 if slabs > 1 else torch.bfloat16)


@pytest.mark.parametrize("tiles", [32, 64, 72, 144, 288, 512])
@pytest.mark.parametrize("rows", [128, 256, 384, 768])
def test_no_wave_of_programs_is_two_thirds_empty(rows: int, tiles: int) -> None:
    """The time of the slabs, in rows of one program, is at most a quarter above that of fully used cores, or no other
    number of slabs is better."""
    cores = 132

    def turns(slabs: int) -> int:
        return -(-slabs * tiles // cores) * -(-rows // slabs)

    slab, slabs = attention.slabs_for(rows, tiles, cores)
    assert slab * slabs >= rows > slab * (slabs - 1)
    least = min(turns(n) for n in range(1, attention.MAX_SLABS + 1))
    assert turns(slabs) <= max(1.25 * rows * tiles / cores, least)


def test_short_rows_have_one_kernel_for_three_gradients() -> None:
    assert set(launched(*projected(40, 384, 4, 32), None)) == {"attention_forward", "attention_short"}
    assert {"attention_dq", "attention_dkdv"} < set(launched(*projected(40, 385, 4, 32), None))
    q, k, v = projected(40, 384, 4, 32)
    far = q.as_strided(q.shape, (0, 32, 2**23, 0, 1))
    assert {"attention_dq", "attention_dkdv"} < set(launched(far, k, v, None))


def test_one_query_and_few_keys_have_the_smallest_tiles() -> None:
    """Templates have one query per pair, so a tile of 64 keys would be nearly empty.

    With two rows per program the grid for 25,000 residues stays below 2^31 programs.
    """
    vectors = [meta(6, 7, n, 4, 16) for n in (1, 4, 4)]
    launches = launched(*vectors, None)
    assert set(launches) == {"attention_forward", "attention_short"}
    assert launches["attention_forward"].config.sizes == {"BLOCK_Q": 16, "BLOCK_K": 32, "ROWS": 2}
    assert launches["attention_short"].config.sizes == {"BLOCK_Q": 16, "BLOCK_K": 16}


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
def test_no_index_overflows_at_twenty_thousand_residues(turned: bool) -> None:
    n = 20_000
    launches = launched(*projected(n, n, 4, 32, turned), meta(1, n, n, 4).permute(0, 3, 1, 2))
    assert [str(o) for launch in launches.values() for o in overflows(launch)] == []


def test_no_index_overflows_with_one_query_for_each_pair() -> None:
    vectors = [meta(20_000, 20_000, n, 4, 16) for n in (1, 4, 4)]
    assert [str(o) for launch in launched(*vectors, None).values() for o in overflows(launch)] == []


@pytest.mark.parametrize("sizes", [(1, 1, 5, 1, 1), (1, 1, 1, 1, 1), (2, 1, 17, 1, 3)], ids=str)
def test_sizes_of_one_compile(sizes: tuple[int, ...]) -> None:
    """Triton turns an argument of 1 into a constant, which has no methods."""
    batches, rows, queries, keys, heads = sizes
    q, k = meta(batches, rows, queries, heads, 16), meta(batches, rows, keys, heads, 16)
    for launch in launched(q, k, k, meta(batches, heads, queries, keys)).values():
        assert figures(launch, BUDGETS["sm_90"].target).registers > 0
