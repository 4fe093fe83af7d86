"""Gradient compression: error feedback, exact cases, and the formulas of the papers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.parallel.toys import TINY, survives_a_break, trained
from tests.ranks import RankError, run_ranks
from warpfold.engine.optim import OptimConfig
from warpfold.parallel import compress
from warpfold.parallel.compress import (
    CompressionConfig,
    Compressor,
    decode,
    encode,
    make_compressor,
)
from warpfold.parallel.exchange import Layout, SyncConfig, Wire, make_layout
from warpfold.parallel.mesh import make_mesh
from warpfold.parallel.waits import Event, watched

METHODS = ["powersgd", "topk", "int8", "1bit"]
SHAPES = {"a": (20, 30), "b": (7,), "c": (20, 30), "d": (4, 3, 5), "e": (40, 12), "f": (3, 2)}


def layout(ranks: int) -> Layout:
    return make_layout({name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}, 1e9, ranks)


def gradient(where: Layout, step: int, rank: int) -> Tensor:
    """Create a flat gradient whose parameters differ in magnitude."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    flat = torch.zeros(where.size, dtype=torch.float64)
    for i, name in enumerate(where.places):
        part = where.view(flat, name)
        part.copy_(torch.randn(part.shape, generator=generator, dtype=torch.float64) * 10.0**-i)
    return flat


def on_ranks(
    ranks: int, config: CompressionConfig, steps: int, make: Callable[[Layout, int, int], Tensor] = gradient
) -> list[tuple[list[Tensor], dict[str, Tensor], list[Tensor], int]]:
    """Return for every rank the applied updates, the final carried errors, its own gradients and the sent bytes."""

    def run() -> tuple[list[Tensor], dict[str, Tensor], list[Tensor], int]:
        mesh = make_mesh(ranks)
        where, wire = layout(ranks), Wire(mesh.data)
        compressor = make_compressor(config, wire, torch.zeros(where.size, dtype=torch.float64), where.segments())
        assert isinstance(compressor, Compressor)
        own = [make(where, step, mesh.data.rank) for step in range(steps)]
        events: list[Event] = []
        with watched(events.append):
            applied = [compressor.mean(x.clone()) for x in own]
        return applied, compressor.local, own, sum(event.bytes for event in events)

    return run_ranks(run, ranks)


def mean_of(results: list, step: int) -> Tensor:
    return torch.stack([own[step] for _, _, own, _ in results]).mean(0)


@pytest.mark.parametrize("method", METHODS)
def test_what_was_applied_and_what_is_carried_is_the_sum_of_all_gradients(method: str) -> None:
    steps = 6
    results = on_ranks(3, CompressionConfig(method=method, start=2, ratio=0.05, warmup=3, rank=2), steps)
    for applied, _, _, _ in results:
        for step in range(2):  # uncompressed
            torch.testing.assert_close(applied[step], mean_of(results, step), rtol=1e-12, atol=1e-15)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(applied, results[0][0]))
        assert not torch.allclose(applied[2], mean_of(results, 2), rtol=1e-3)
    applied = torch.stack(results[0][0]).sum(0)
    carried = torch.stack([local["residual"] for _, local, _, _ in results]).mean(0)
    everything = torch.stack([mean_of(results, step) for step in range(steps)]).sum(0)
    assert carried.any()
    torch.testing.assert_close(applied + carried, everything, rtol=1e-12, atol=1e-14)


def test_everything_of_topk_is_exact_with_momentum_too() -> None:
    results = on_ranks(3, CompressionConfig(method="topk", start=0, ratio=1.0, momentum=0.9), 3)
    for step in range(3):
        torch.testing.assert_close(results[0][0][step], mean_of(results, step), rtol=1e-12, atol=1e-15)
    assert not results[0][1]["residual"].any()


def test_topk_is_the_papers_algorithm() -> None:
    """Compare with algorithm 4 of Lin et al.

    2018 for a single tensor: density 25 %, then by equal factors to the ratio.
    """
    config = CompressionConfig(method="topk", start=0, ratio=1 / 16, warmup=2, momentum=0.5)
    results = on_ranks(2, config, 4)
    place = layout(2).places["a"]
    u, v = [torch.zeros(600, dtype=torch.float64) for _ in range(2)], [torch.zeros(600, dtype=torch.float64)] * 2
    for step, count in enumerate([150, 38, 38, 38]):
        total = torch.zeros(600, dtype=torch.float64)
        for rank in range(2):
            u[rank] = 0.5 * u[rank] + results[rank][2][step][place]
            v[rank] = v[rank] + u[rank]
            threshold = v[rank].abs().sort(descending=True).values[count - 1]
            mask = v[rank].abs() >= threshold
            total += torch.where(mask, v[rank], 0)
            u[rank], v[rank] = torch.where(mask, 0, u[rank]), torch.where(mask, 0, v[rank])
        torch.testing.assert_close(results[0][0][step][place], total / 2, rtol=1e-12, atol=0)


def test_powersgd_is_exact_for_gradients_of_its_rank() -> None:
    """The mean of two matrices of rank 1 has rank 2. Rank 1 with one zero matrix, and zero matrices, are exact, too."""

    def low_rank(where: Layout, step: int, rank: int) -> Tensor:
        flat = gradient(where, step, rank)
        for name in ("a", "c", "d", "e"):
            part = where.view(flat, name).flatten(1)
            part.copy_(part[:, :1] @ part[:1] * (step != 1) * (step != 2 or rank))
        return flat

    results = on_ranks(2, CompressionConfig(method="powersgd", start=0, rank=2), 5, low_rank)
    for step in range(5):
        torch.testing.assert_close(results[0][0][step], mean_of(results, step), rtol=1e-9, atol=1e-12)
    # The error of each rank is its difference from the mean.
    assert results[0][1]["residual"].abs().max() > 1e-3


def test_powersgd_is_the_papers_algorithm() -> None:
    """Compare with algorithms 1 and 2 of Vogels et al. 2019 on matrix "e", with torch's QR for the orthogonalisation.

    One of its rows has no gradient, like the embedding of a letter that does not occur.
    """

    def without_a_row(where: Layout, step: int, rank: int) -> Tensor:
        flat = gradient(where, step, rank)
        where.view(flat, "e")[5] = 0
        return flat

    results = on_ranks(2, CompressionConfig(method="powersgd", start=0, rank=3), 4, without_a_row)
    place = layout(2).places["e"]
    error = [torch.zeros(40, 12, dtype=torch.float64) for _ in range(2)]
    q = None
    for step in range(4):
        delta = [results[rank][2][step][place].view(40, 12) + error[rank] for rank in range(2)]
        applied = results[0][0][step][place].view(40, 12)
        if q is not None:
            p = torch.linalg.qr((delta[0] @ q + delta[1] @ q) / 2).Q
            q = (delta[0].T @ p + delta[1].T @ p) / 2
            torch.testing.assert_close(applied, p @ q.T, rtol=1e-9, atol=1e-12)
        # In the first step the draw is unspecified, but the projection is on three directions.
        else:
            assert torch.linalg.matrix_rank(applied) == 3
            q = torch.linalg.svd(applied, full_matrices=False).Vh[:3].T  # spans the space of Q
        error = [d - applied for d in delta]


@pytest.mark.parametrize("bits", [8, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 255, 256, 1000])
def test_quantisation(bits: int, dtype: torch.dtype, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # 1,000 elements have four blocks, so that several chunks are encoded.
    monkeypatch.setattr(compress, "CHUNK", 3)
    torch.manual_seed(0)
    x = torch.randn(3, length, dtype=dtype)
    x[1] = 0
    code = encode(x, bits)
    blocks = -(-length // 256)
    assert code.shape == (3, blocks * (256 * bits // 8 + dtype.itemsize))
    back = decode(code, bits, length, dtype)
    assert not back[1].any()
    for a, b in zip(x[0].split(256), back[0].split(256)):
        if bits == 8:
            assert (a - b).abs().max() <= a.abs().max() / 127 * 0.501
        else:
            torch.testing.assert_close(b, torch.where(a >= 0, a.abs().mean(), -a.abs().mean()))


def test_bytes_that_leave_a_rank() -> None:
    """For 1,800 elements in fp64 and three ranks, plain sums send 2 x 2/3 of 14.5 kB per step."""
    configs = {
        "plain": CompressionConfig(method="topk", start=1),
        "powersgd": CompressionConfig(method="powersgd", start=0, rank=1),
        "topk": CompressionConfig(method="topk", start=0, ratio=0.01, warmup=0),
        "int8": CompressionConfig(method="int8", start=0),
        "1bit": CompressionConfig(method="1bit", start=0),
    }
    sent = {name: on_ranks(3, config, 1)[0][3] for name, config in configs.items()}
    size = layout(3).size * 8
    assert sent["plain"] == size * 4 // 3
    shares = {name: n / sent["plain"] for name, n in sent.items()}
    assert 0.10 < shares["powersgd"] < 0.25
    assert 0.01 < shares["topk"] < 0.03
    assert 0.12 < shares["int8"] < 0.18  # of eight bytes
    assert 0.01 < shares["1bit"] < 0.04


def test_a_broken_run_is_the_unbroken_one_to_the_bit() -> None:
    def on_a_rank(method: Any) -> bool:
        compression = CompressionConfig(method=method, start=1, ratio=0.1, warmup=3, rank=1, momentum=0.5)
        config = OptimConfig(learning_rate=0.01, warmup_steps=2, compression=compression)
        return survives_a_break(lambda *given: trained(2, 2, config, SyncConfig(bucket=TINY), *given)[1])

    assert run_ranks(lambda: [on_a_rank(method) for method in METHODS], 4) == [[True] * len(METHODS)] * 4


@pytest.mark.parametrize(("method", "between"), [("powersgd", None), ("int8", 1), ("powersgd", 2)])
def test_what_is_carried_survives_another_number_of_ranks(method: Any, between: int | None) -> None:
    """Including a period with a single data rank and as many model ranks, which compresses nothing."""
    compression = CompressionConfig(method=method, start=0, rank=1)
    config, sync = OptimConfig(compression=compression), SyncConfig(bucket=TINY)
    (_, state), *_ = run_ranks(lambda: trained(2, 2, config, sync, steps=range(2)), 4)
    before = state
    assert any(name.startswith("compression.residual.1.") for name in before)
    if between is not None:
        (_, state), *_ = run_ranks(lambda: trained(1, between, config, sync, steps=range(2, 3), state=before), between)
        assert not torch.equal(state["weights.leave.weight"], before["weights.leave.weight"])
    (_, again), *_ = run_ranks(lambda: trained(3, 1, config, sync, steps=range(0), state=state), 3)
    for name in ("leave.weight", "twice.weight"):
        owed = (before[f"compression.residual.0.{name}"] + before[f"compression.residual.1.{name}"]) / 2
        for rank in range(3):
            torch.testing.assert_close(again[f"compression.residual.{rank}.{name}"], owed)
    assert int(again["compression.steps"]) == 2


def test_refused_beside_what_would_undo_it() -> None:
    config = OptimConfig(compression=CompressionConfig(method="int8"))
    for sync in (SyncConfig(shard_state=True), SyncConfig(strategy="bf16")):
        with pytest.raises(RankError, match=r'"int8" needs plan.sync.strategy = "plain"'):
            run_ranks(trained, 2, 2, 1, config, sync)
    with pytest.raises(ValueError, match='needs clip = "example"'):
        OptimConfig(clip="step", compression=CompressionConfig(method="int8"))
    assert not dist.is_initialized()


@pytest.mark.parametrize("wrong", [{"start": -1}, {"rank": 0}, {"ratio": 0.0}, {"momentum": 1.0}, {"warmup": -1}])
def test_settings_that_make_no_sense(wrong: dict) -> None:
    with pytest.raises(ValueError):
        CompressionConfig(**wrong)
