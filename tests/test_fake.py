"""Test fake ranks and their memory: the counter itself, and that no rank holds the full z, which shrinks as 1/p."""

import gc
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.helpers import memory_of, tiny_config
from warpfold.batch import FEATURES
from warpfold.cost.fake import fake_batch, fake_mesh
from warpfold.cost.recorder import Recorder
from warpfold.model.losses import LossConfig
from warpfold.ops.noise import kept_factor
from warpfold.parallel.plan import Plan

# The number of residues is a prime, so that no other size can be mistaken for it.
N = 29
SIZES = {"res": N, "seq": 4, "extra": 5, "tmpl": 1}
LOSSES = LossConfig(predicted_aligned_error=0.1, experimentally_resolved=0.01, violation=1.0)


def pairwise_shapes(memory: Recorder) -> set[tuple[int, ...]]:
    """Return the shapes like the full z: two axes over all residues, and at least 8 values per pair."""
    shapes = {piece.shape for piece in memory.pieces}
    return {x for x in shapes if torch.Size(x).numel() >= 8 * N * N and (x.count(N) >= 2 or N * N in x)}


def of_many_kinds(device: str) -> list[torch.Tensor]:
    """Run operations of many kinds, twice each."""
    a, b, made = torch.ones(3, 4, 5, device=device), torch.ones(5, 6, device=device), []
    whole = torch.ones(3, 4, device=device, dtype=torch.int64)
    for _ in range(2):
        made += [a.transpose(0, 2) + 1, a.sum(-1), a.sum(-1, keepdim=True), a.to(torch.bfloat16), a.double(), a @ b]
        made += [whole * 1, whole * 1.0, whole * True, a.max(-1).values, torch.cat([a, a], 1), a[:, 1:].contiguous()]
        made += [
            *torch.native_layer_norm(a, [5], None, None, 1e-5),
            torch.stack([a, a]),
            a.new_empty(2, 3),
            a[0] * b.T[0],
        ]
        out = torch.empty(4, 6, device=device)
        made += [torch.mm(a[0], b, out=out), torch.mm(a[0], b, out=torch.empty(0, device=device))]
        made += [a.clone().mul_(2), a.clone().transpose_(0, 1), a.clone().unsqueeze_(0), a.expand(2, 3, 4, 5) * 1]
    return made


def test_what_is_made_again_is_what_torch_makes() -> None:
    """The counter creates the results of repeated operations itself, without running them."""
    expected = of_many_kinds("cpu")
    with Recorder() as memory:
        made = of_many_kinds("meta")
    assert [(x.shape, x.stride(), x.dtype) for x in made] == [(x.shape, x.stride(), x.dtype) for x in expected]
    sizes = [piece.bytes for piece in memory.pieces[3:]]  # without the three inputs
    assert sizes[: len(sizes) // 2] == sizes[len(sizes) // 2 :]
    assert len(sizes) > 40


def test_fake_ranks_leave_nothing_behind() -> None:
    with fake_mesh(data=2, axial=3, branch=2, rank=7) as mesh:
        assert (mesh.data.rank, mesh.axial.rank, mesh.branch.rank) == (1, 0, 1)
        assert dist.get_world_size() == 12
        with pytest.raises(RuntimeError, match="without a process group"), fake_mesh(axial=2):
            pass
    assert not dist.is_initialized()


def test_the_fake_batch_has_every_feature() -> None:
    batch = fake_batch(**SIZES, **{"pass": 1}, row=9, copy=2, soft=2)
    assert set(batch) == set(FEATURES)
    assert "alignment" not in fake_batch(**SIZES, **{"pass": 1})  # only assemblies have it
    assert batch["extra_msa"].shape == (1, 5, N)


def test_memory_counts_what_lives() -> None:
    given = torch.zeros(100, dtype=torch.float32)
    gc.collect()
    with Recorder() as memory:
        a = given + 1
        b = a * 2  # a and b: 800 bytes
        view = b[3:]
        del a
        c = given.view(10, 10).sum(0)
        b.add_(1)
        assert memory.now == 440
        del view, b, c
    assert (memory.now, memory.peak) == (0, 800)
    assert sorted((h.bytes, h.shape) for h in memory.at_peak) == [(400, (100,)), (400, (100,))]


def test_no_rank_holds_a_whole_z() -> None:
    """Check from the embedder to the losses, in every recycling iteration.  N = 29 is not divisible by the ranks."""
    plan = Plan(axial=4, triangle="channels", chunk=1)
    assert not pairwise_shapes(memory_of(replace(plan, recompute="block"), tiny_config(), SIZES, LOSSES))
    assert not pairwise_shapes(memory_of(replace(plan, in_place=True), tiny_config(), SIZES))


def test_a_gathered_factor_is_the_one_exception() -> None:
    c = tiny_config().evoformer.pair.c_triangle
    plan = Plan(axial=4, triangle="gather", chunk=1, in_place=True)
    assert pairwise_shapes(memory_of(plan, tiny_config(), SIZES, recycles=0)) == {(c, N, N)}


def test_one_device_holds_a_whole_z() -> None:
    assert pairwise_shapes(memory_of(Plan(chunk=8, in_place=True), tiny_config(), SIZES, recycles=0))


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_a_block_more_costs_slices_of_m_and_z(ranks) -> None:
    """Recomputation saves the inputs of a block in fp32.

    The first rank has the largest slices. With several ranks it may save z twice: sharded by rows and by columns.
    """
    peaks = []
    for blocks in (2, 2, 3):  # the first run fills caches
        config = tiny_config(evoformer=replace(tiny_config().evoformer, blocks=blocks))
        plan = Plan(axial=ranks, recompute="block", triangle="channels")
        peaks.append(memory_of(plan, config, SIZES, LOSSES, recycles=0).peak)
    c, rows = tiny_config(), SIZES["seq"] + SIZES["tmpl"]
    of_m, of_z = -(-rows // ranks) * N * c.c_m, -(-N // ranks) * N * c.c_z
    assert 4 * (of_m + of_z) <= peaks[2] - peaks[1] <= 4 * (of_m + min(ranks, 2) * of_z)


def test_memory_falls_with_the_ranks() -> None:
    """Memory falls almost as 1/p if z is wide enough to outweigh the memory that is not sharded."""
    evoformer = replace(tiny_config().evoformer, blocks=1)
    config = tiny_config(c_z=288, evoformer=evoformer, extra_blocks=1)
    sizes = {"res": 80, "seq": 2, "extra": 2, "tmpl": 0}
    plans = [Plan(axial=p, triangle="channels", chunk=2, in_place=True) for p in (2, 4, 8)]
    two, four, eight = (memory_of(plan, config, sizes, recycles=0).peak for plan in plans)
    assert four < 0.6 * two
    assert eight < 0.65 * four


def test_what_is_kept_of_a_fake_run_is_true() -> None:
    """A value that is first cached without memory is correct in later real training runs."""
    kept_factor.cache_clear()
    with torch.device("meta"), Recorder():
        assert kept_factor(0.25, torch.float32) == pytest.approx(4 / 3)
    assert kept_factor(0.25, torch.float32) == pytest.approx(4 / 3)
