"""Collectives in pieces: results, and the memory of ranks that work in place."""

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.ranks import run_ranks
from warpfold.cost.fake import fake_mesh
from warpfold.cost.recorder import Recorder
from warpfold.engine.packed import PackedWeights
from warpfold.model.axial import COLS, ROWS
from warpfold.model.evoformer import Evoformer, EvoformerConfig, PairConfig
from warpfold.ops.dispatch import standing_for
from warpfold.ops.triton.launch import unlaunched
from warpfold.parallel.collectives import local_shard, shard_sizes
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import Group, make_mesh
from warpfold.parallel.plan import Plan
from warpfold.parallel.sharded import pieces


@pytest.mark.parametrize(
    ("length", "ranks", "rows"), [(7, 3, 1), (7, 3, 2), (8, 4, 2), (2, 5, 3), (9, 2, 100), (0, 2, 1)]
)
def test_pieces_are_all_rows_once(length: int, ranks: int, rows: int) -> None:
    """Pieces are equal on all ranks except for the start, with the sizes that collectives require."""
    with pytest.raises(RuntimeError, match="cannot be differentiated"):
        list(pieces(length, rows, Group("axial", 0, ranks)))
    with torch.no_grad():
        of_ranks = [list(pieces(length, rows, Group("axial", rank, ranks))) for rank in range(ranks)]
    for piece in of_ranks[0]:
        assert list(piece.sizes) == shard_sizes(piece.length, ranks)
        assert max(piece.sizes) <= rows
    found = [
        at for piece in of_ranks[0] for offset, n in zip(piece.offsets, piece.sizes) for at in range(offset, offset + n)
    ]
    assert sorted(found) == list(range(length))
    begins = [sum(shard_sizes(length, ranks)[:rank]) for rank in range(ranks)]
    for rank, own in enumerate(of_ranks):
        assert [(p.offsets, p.sizes) for p in own] == [(p.offsets, p.sizes) for p in of_ranks[0]]
        assert all(p.sizes[rank] == 0 or begins[rank] + p.start == p.offsets[rank] for p in own)


def held(ranks: int, rows: int, residues: int, config: EvoformerConfig, c_m: int, c_z: int) -> int:
    """Return the most elements that a stack on the first rank holds at a time, including m and z."""
    with fake_mesh(axial=ranks) as mesh, torch.device("meta"), torch.no_grad():
        plan = Plan(axial=ranks, chunk=8 // ranks, in_place=True)
        stack = Execution(plan, mesh).bind(Evoformer(c_m, c_z, config)).eval()
        # Without packing, each layer joins its weights temporarily.
        packed = PackedWeights(stack)
        here = shard_sizes(residues, ranks)[0]
        masks = torch.empty(rows, residues), torch.empty(here, residues)
        with Recorder() as memory:
            m, z = torch.empty(rows, here, c_m), torch.empty(here, residues, c_z)
            m, z = stack(m, z, *masks)
        del packed
    return memory.peak // 4


@pytest.mark.slow
@pytest.mark.parametrize("residues", [512, 1024])
def test_what_a_rank_holds_falls_as_the_ranks_grow_from_the_first_on(residues: int) -> None:
    """At full width at most 1.1 times the share, in slices that shrink, too.

    Kernels materialise no attention logits.
    """
    with standing_for("cuda"), unlaunched():
        one, *shares = (held(p, 128, residues, EvoformerConfig(blocks=1), 256, 128) for p in (1, 2, 4, 8))
    for ranks, share in zip((2, 4, 8), shares):
        assert share * ranks <= 1.1 * one, (ranks, share * ranks / one)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_stack_holds_a_shard_and_a_factor(ranks: int) -> None:
    """No other tensor is as large as a shard of z, which is z / p."""
    rows, n, c = 6, 48, 64
    z, m, bias, slices = n * n * c // ranks, rows * n * c // ranks, n * n, 8 // ranks * n * c
    # About 3 x 4 pieces of a product are in flight: the factor and the previous product, as sent, received and joined.
    config = EvoformerConfig(blocks=1, heads=1, c_outer=2, pair=PairConfig(heads=1, c_triangle=c))
    assert held(ranks, rows, n, config, c, c) <= 2 * z + m + bias + 14 * slices


def allocated(function: Callable[[], None]) -> int:
    """Return the peak of torch's allocator during a function, including scratch memory of kernels."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        function()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_real_ranks_hold_what_fake_ones_do_and_find_what_one_device_does(ranks: int) -> None:
    """Each process holds at most 10 % more than the first fake rank, which holds most."""
    n, rows, c = 96, 6, 64
    config = EvoformerConfig(blocks=2, heads=2, c_outer=8, pair=PairConfig(heads=2, c_triangle=c))
    with standing_for("cpu"):
        fake = 4 * held(ranks, rows, n, config, c, c)
    torch.manual_seed(0)
    stack = Evoformer(c, c, config).eval()
    packed = PackedWeights(stack)
    m, z = torch.randn(rows, n, c), torch.randn(n, n, c)
    masks = torch.ones(rows, n), torch.ones(n, n)

    def folded(group: Group) -> list[Tensor]:
        """Return this rank's rows of z after the stack, given its shards."""
        mine = [local_shard(m, COLS, group).clone(), local_shard(z, ROWS, group).clone()]
        z_mask = local_shard(masks[1], -2, group)
        return [stack(*mine, masks[0], z_mask)[1]]

    def on_a_rank() -> tuple[int, Tensor]:
        mesh = make_mesh(axial=ranks)
        Execution(Plan(axial=ranks, chunk=8 // ranks, in_place=True), mesh).bind(stack)
        with torch.no_grad():
            # Persistent memory is allocated now.
            folded(mesh.axial)
            # Under load, torch's threads keep sent tensors longer, so the minimum of some runs is used.
            least, above = 2**62, torch.ones(1)
            for _ in range(20):
                least = min(least, allocated(lambda: folded(mesh.axial).clear()))
                dist.all_reduce(above.fill_(least > 1.1 * fake))
                if not above:
                    break
            return least, folded(mesh.axial)[0]

    with torch.no_grad():
        expected = stack(m, z, *masks)[1]
    assert packed.layout.size
    found = run_ranks(on_a_rank, ranks, timeout=200)
    torch.testing.assert_close(torch.cat([x for _, x in found]), expected, rtol=1e-4, atol=1e-4)
    assert max(size for size, _ in found) <= 1.1 * fake
    assert fake <= 1.1 * found[0][0]
