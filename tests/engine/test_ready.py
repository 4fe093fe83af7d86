"""Test Ready: batches are a function of the seed alone, and none is lost or repeated."""

import gc
import math
import os
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from tests.engine.ready_data import (
    Bad,
    Draws,
    Held,
    Many,
    Numbers,
    Odd,
    Pair,
    Rows,
    cost_of_zero,
    fails_at,
    first,
    listed,
)
from tests.ranks import run_ranks
from warpfold.data.load.workers import Failed
from warpfold.device import Uploads
from warpfold.engine import ready_maker
from warpfold.engine.epochs import EpochBatch
from warpfold.engine.ready import Ready
from warpfold.engine.ready_maker import COST_BATCH, BatchMaker, Costs, ReadyError, find_costs
from warpfold.errors import UserError


def indices(batches: Any) -> list[list[int]]:
    return [batch["index"].tolist() for batch in batches]


def epochs(loader: Ready, count: int) -> list[list[list[int]]]:
    return [indices(loader) for _ in range(count)]


def assert_equal(a: Any, b: Any) -> None:
    """Check that values have equal bits and types."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_equal(x, y)
    elif isinstance(a, Held):
        assert_equal(vars(a), vars(b))
    else:
        assert a == b or (a != a and b != b)


def test_the_order_follows_from_the_seed_alone() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    here = [[*Ready(Numbers(), 3, workers=0)]]
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002
    with Ready(Numbers(), 3, workers=3) as loader:
        assert_equal([[*loader]], here)  # also random numbers
        here = loader.batches(1)
        assert indices(loader) == here
    assert [len(batch) for batch in here] == [3, 3, 3, 3, 3, 3, 2]
    assert sorted(i for batch in here for i in batch) == list(range(20))
    assert here != Ready(Numbers(), 3, workers=0).batches(0) != Ready(Numbers(), 3, workers=0, seed=1).batches(0)
    assert Ready(Numbers(), 3, workers=0, shuffle=False).batches(4)[0] == [0, 1, 2]
    assert len(Ready(Numbers(), 3, workers=0, drop_last=True)) == 6


def test_an_epoch_draws_anew_and_ranks_draw_alike() -> None:
    def drawn(**more: Any) -> dict[int, float]:
        loader = Ready(Numbers(), workers=0, **more)
        return {int(i): float(x) for b in loader for i, x in zip(b["index"], b["drawn"])}

    loader = Ready(Numbers(), 4, workers=0)
    twice = [{int(i): float(x) for b in loader for i, x in zip(b["index"], b["drawn"])} for _ in range(2)]
    assert not set(twice[0].values()) & set(twice[1].values())
    assert {**drawn(batch_size=2, rank=0, ranks=2), **drawn(batch_size=5, rank=1, ranks=2)} == twice[0]


def test_every_bit_of_a_seed_changes_what_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every generator of the host takes seeds of 32 bits."""
    monkeypatch.setattr(ready_maker, "keyed_hash", lambda seed, epoch, index: index)
    with ready_maker.kept_random():
        drawn = BatchMaker(Draws(), listed, 0).batch(0, [0, *(1 << bit for bit in range(32))])
    assert [len(set(numbers)) for numbers in zip(*drawn)] == [33] * 3


def test_ranks_share_as_torch_does() -> None:
    data = Numbers(21)
    for drop in (False, True):
        for rank in range(4):
            sampler = DistributedSampler(data, 4, rank, shuffle=False, drop_last=drop)  # type: ignore[arg-type]
            theirs = DataLoader(data, 2, sampler=sampler, drop_last=drop)  # type: ignore[arg-type, var-annotated]
            ours = Ready(data, 2, workers=0, shuffle=False, rank=rank, ranks=4, drop_last=drop)
            assert indices(ours) == indices(theirs)
            assert len(ours) == len(theirs)


def test_what_a_data_loader_yields_is_yielded() -> None:
    data = TensorDataset(torch.arange(10), torch.rand(10, 3))
    with Ready(data, 4, workers=1) as loader:
        theirs = DataLoader(data, batch_sampler=loader.batches(0))
        assert_equal([*loader], [*theirs])
        assert len(loader) == len(theirs)
    assert [batch.tolist() for batch in Ready(Many(), 5, workers=0, shuffle=False)] == [
        [0, 10, 20, 30, 40],
        [50, 60, 70, 80, 90],
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_every_kind_of_value_travels(workers: int) -> None:
    with Ready(Odd(), workers=workers, collate=first) as loader:
        [batch] = loader
        assert_equal(batch, Odd()[0])
        assert isinstance(batch["pair"], Pair)
        batch["tensors"][0][0, 0] = 7.0  # the caller may write


def test_a_batch_stays_what_it_was_as_long_as_it_is_held() -> None:
    with Ready(Numbers(60), 2, workers=2, ahead=1) as loader:
        held = [batch["rows"] for _ in range(2) for batch in loader]
        assert loader._workers is not None
        processes = loader._workers.processes()
        assert [rows[:, 0].tolist() for rows in held] == [
            list(map(float, b)) for e in (0, 1) for b in loader.batches(e)
        ]
        assert len(processes) == 2


def test_batches_of_the_next_epoch_are_ready_before_this_one_ends(tmp_path: Path) -> None:
    data = Numbers(6, tmp_path, waits=(5,))
    last = Ready(data, workers=0).batches(1).index([5])
    with Ready(data, workers=2, ahead=10) as loader:
        data.go(5)
        first_epoch = iter(loader)
        next(first_epoch)
        (tmp_path / "go-5").unlink()
        processes = loader._workers.processes() if loader._workers else []
        end = time.monotonic() + 100
        while loader._workers and not any(place >= 6 for place in loader._workers.outcomes):
            assert time.monotonic() < end, "nothing of the next epoch was made"
            time.sleep(0.01)
        data.go(5)
        assert len([*first_epoch]) == 5
        assert loader.epoch == 1
        assert indices(loader)[last] == [5]
        assert loader._workers is not None
        assert loader._workers.processes() == processes


def test_a_batch_that_is_ready_overtakes_a_slow_one_and_a_resume_follows(tmp_path: Path) -> None:
    data = Numbers(8, tmp_path, waits=(2,))
    settings: dict[str, Any] = {"workers": 2, "shuffle": False, "window": 3, "record": tmp_path / "order.txt"}
    with Ready(data, **settings) as loader:
        batches = iter(loader)
        used = [next(batches)["index"].item() for _ in range(3)]
        state = loader.state_dict()
        used += [next(batches)["index"].item() for _ in range(2)]
        # Batch 6 would come four places early.
        assert sorted(used) == [0, 1, 3, 4, 5]
        data.go(2)
        used += [batch["index"].item() for batch in batches]
        assert sorted(used) == list(range(8))
    # The run was killed after the epoch, and continues from the state.
    with Ready(data, **settings) as loader:
        loader.load_state_dict(state)
        assert [batch["index"].item() for batch in loader] == used[3:]
    (tmp_path / "order.txt").write_text("another\n")
    with pytest.raises(UserError, match=r"order.txt: is the record of another loader \(another\)"):
        next(iter(Ready(data, **settings)))


def test_what_the_record_names_next_is_overtaken_by_nothing(tmp_path: Path) -> None:
    """The recorded batch is slow when the run continues, and others are ready."""
    data = Numbers(8, tmp_path, waits=(2,))
    settings: dict[str, Any] = {"shuffle": False, "window": 3, "record": tmp_path / "order.txt"}
    data.go(2)
    with Ready(data, workers=0, **settings) as loader:
        batches, state = iter(loader), loader.state_dict()
        assert [next(batches)["index"].item() for _ in range(3)] == [0, 1, 2]
    (tmp_path / "go-2").unlink()
    with Ready(data, workers=2, **settings) as loader:
        loader.load_state_dict({**state, "first": 2})
        batches = iter(loader)
        assert loader._workers is not None
        # Later batches are ready.
        while len(loader._workers.outcomes) < 3:
            time.sleep(0.01)
        threading.Timer(0.3, data.go, (2,)).start()
        assert next(batches)["index"].item() == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_continues_to_the_bit_wherever_it_was_left(workers: int) -> None:
    with Ready(Numbers(7), 2, workers=workers) as loader:
        whole = [[*loader] for _ in range(3)]
    for used in range(5):
        with Ready(Numbers(7), 2, workers=workers) as loader:
            assert len([*loader]) == 4
            batches = iter(loader)
            begun = [next(batches) for _ in range(used)]
            state = loader.state_dict()
            loader.load_state_dict(state)
            assert_equal([*begun, *loader], whole[1])
            # The last batch was used, but the loop over the epoch has not ended.
            if used == 4:
                assert loader.epoch == 2
            assert_equal([*loader], whole[2])
            with pytest.raises(RuntimeError, match="this one is over"):
                next(batches)


@pytest.mark.parametrize(("drop", "steps", "whole"), [(False, 3, 7), (True, 2, 6)])
def test_a_run_continues_on_another_number_of_ranks(drop: bool, steps: int, whole: int) -> None:
    two = [Ready(Numbers(), 2, workers=0, rank=rank, ranks=2, drop_last=drop) for rank in range(2)]
    used = [i for loader in two for _, batch in zip(range(3), loader) for i in batch["index"].tolist()]
    three = [Ready(Numbers(), 1, workers=0, rank=rank, ranks=3, drop_last=drop) for rank in range(3)]
    for loader in three:
        loader.load_state_dict(two[0].state_dict())
    rest = [i for loader in three for batch in loader for i in batch["index"].tolist()]
    # Eight were left, so one fills the last step, or two are dropped.
    assert len(rest) == 3 * steps
    assert len({*rest, *used}) == (18 if drop else 20)
    assert [len(indices(loader)) for loader in three] == [whole] * 3


def test_an_iteration_that_is_left_is_over() -> None:
    with Ready(Numbers(), 4, workers=1) as loader:
        assert next(iter(loader))["index"].tolist() == loader.batches(0)[0]
        assert next(iter(loader))["index"].tolist() == loader.batches(1)[0]
        iter(loader), iter(loader)  # neither is used
        assert indices(loader) == loader.batches(2)
        assert indices(loader) == loader.batches(3)


def test_costs_are_balanced_in_every_step() -> None:
    rng = np.random.default_rng(0)
    costs = rng.lognormal(size=64)
    ranks = [Ready(Numbers(64), 4, workers=0, cost=costs, rank=rank, ranks=4) for rank in range(4)]
    plain = [Ready(Numbers(64), 4, workers=0, rank=rank, ranks=4) for rank in range(4)]
    assert [len(loader.batches(0)) for loader in ranks] == [4] * 4
    assert sorted(i for loader in ranks for batch in loader.batches(0) for i in batch) == list(range(64))

    def slowest(loaders: list[Ready]) -> list[float]:
        return [max(costs[batch].sum() for batch in step) for step in zip(*(loader.batches(0) for loader in loaders))]

    for step, (ours, theirs) in enumerate(zip(slowest(ranks), slowest(plain))):
        assert ours <= theirs * (1 + 1e-12)
        every = [costs[i] for loader in ranks for i in loader.batches(0)[step]]
        # Graham's bound, which equal counts hardly change.
        assert ours <= 4 / 3 * max(sum(every) / 4, max(every))
        assert sorted(every) == sorted(costs[i] for loader in plain for i in loader.batches(0)[step])


def _costs(rank_count: int) -> tuple[list[list[int]], list[float] | None]:
    loader = Ready(Rows(), 2, workers=0, cost=len, collate=listed)
    batches = [[example[0] for example in batch] for batch in loader]
    return batches, None if loader.order.costs is None else loader.order.costs.tolist()


def test_a_cost_of_examples_is_found_once_by_all_ranks_together() -> None:
    found = run_ranks(_costs, 2, 2)
    assert found[0][1] == found[1][1] == [float(i + 1) for i in range(12)]
    assert sorted(i for batches, _ in found for batch in batches for i in batch) == list(range(12))
    assert _costs(1)[1] is None
    make = BatchMaker(Costs(Rows(), len), np.array, 0)
    assert find_costs(make, [], 0).shape == (0,)
    many = [i % 12 for i in range(2 * COST_BATCH + 5)]
    assert find_costs(make, many, 0).tolist() == [i + 1 for i in many]
    # The costs are random numbers, like those of the examples.
    drawn = BatchMaker(Costs(Numbers(), itemgetter("drawn")), np.array, 0)
    assert np.array_equal(find_costs(drawn, range(5), 0), find_costs(drawn, range(5), 1))
    with Ready(Rows(), 2, workers=1, cost=len, collate=listed, rank=1, ranks=2) as loader:
        assert [[example[0] for example in batch] for batch in loader] == found[1][0]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_raises_is_named_with_its_index(tmp_path: Path, workers: int) -> None:
    with Ready(Numbers(9, fails=(5,)), 2, workers=workers, shuffle=False) as loader:
        # A second attempt fails, too.
        for _ in range(2):
            with pytest.raises(ReadyError, match=r"^example 5 of the dataset: KeyError: 'no 5'") as raised:
                list(loader)
            if workers:
                assert "In the worker:\nTraceback" in str(raised.value)
                assert "ready_data.py" in str(raised.value)
            # The batches before it were used.
            assert loader.state_dict()["first"] == 2
            loader.load_state_dict(loader.state_dict())
    said = r"^examples \[0, 1\] of the dataset, as a batch: ValueError: cannot stack 2"
    with (
        Ready(Numbers(9), 2, workers=workers, shuffle=False, collate=fails_at) as loader,
        pytest.raises(ReadyError, match=said),
    ):
        next(iter(loader))
    with pytest.raises(ReadyError, match=r"^the cost of example 1 of the dataset: TypeError"):
        next(iter(Ready(Numbers(2), workers=workers, cost=cost_of_zero, rank=0, ranks=2)))


def test_a_worker_that_dies_is_replaced_and_what_kills_two_is_named(tmp_path: Path) -> None:
    with Ready(Numbers(9, tmp_path, kills_once=(3, 7)), 2, workers=2, shuffle=False) as loader:
        assert indices(loader) == loader.batches(0)
    said = r"examples \[2, 3\] .* killed by SIGKILL \(too little memory\?\), twice"
    with (
        Ready(Numbers(9, tmp_path, kills=(3,)), 2, workers=2, shuffle=False) as loader,
        pytest.raises(ReadyError, match=said),
    ):
        list(loader)


def test_a_loader_that_nobody_holds_ends_its_processes() -> None:
    loader = Ready(Numbers(), workers=1)
    next(iter(loader))
    assert loader._workers is not None
    [process] = loader._workers.processes()
    del loader
    gc.collect()
    end = time.monotonic() + 100
    while Path(f"/proc/{process}").exists():
        assert time.monotonic() < end
        time.sleep(0.01)


class Endless(IterableDataset):
    """An object that is not a map-style dataset."""

    def __iter__(self) -> Any:
        return iter(())


def test_bad_input_is_one_line() -> None:
    for wrong, said in (
        ({"dataset": Endless()}, "Endless is no map-style dataset"),
        ({"dataset": []}, "the dataset is empty"),
        ({"batch_size": 0}, "batch_size = 0. Pass an integer of at least 1"),
        ({"workers": -1}, "workers = -1"),
        ({"rank": 2, "ranks": 2}, "ranks_above_rank = 0"),
        ({"cost": [1.0]}, r"cost has shape \(1,\) for 20 examples"),
        ({"cost": [math.nan] * 20}, "finite number"),
    ):
        with pytest.raises(UserError, match=said):
            Ready(**{"dataset": Numbers(), **wrong})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="cannot be sent to processes"):
        next(iter(Ready(Numbers(), workers=1, collate=lambda examples: examples)))
    for value, said in (
        (object(), r"the batch\['at'\]\[0\]: is a object"),
        (torch.zeros(2, 2).to_sparse(), "torch.sparse_coo"),
        (np.array([object()]), "is an array of object"),
    ):
        for workers in (0, 1) if said.startswith("the") else (0,):
            with pytest.raises(UserError, match=said), Ready(Bad(value), workers=workers, collate=first) as loader:
                next(iter(loader))


class Pairs:
    """An order with the pairs (0, 1), (2, 3) ..., each once.  Example 4 replaces a refused example."""

    refusals = (UserError,)

    def __init__(self) -> None:
        self.left, self.noted = [EpochBatch(i, 0, i, [2 * i, 2 * i + 1], False) for i in range(4)], list[int]()
        self.count = 0

    ended = property(lambda self: self.count == len(self))
    __len__ = lambda self: 4  # noqa: E731
    begin = lambda self: False  # noqa: E731
    end = lambda self: None  # noqa: E731
    plan = lambda self: iter(self.left)  # noqa: E731

    def substitute(self, planned: EpochBatch, failed: Failed) -> EpochBatch:
        assert "6 is refused" in failed.reason
        return replace(planned, indices=[4, 4])

    def note(self, planned: EpochBatch) -> None:
        self.noted.append(planned.step)

    def hand_out(self, planned: EpochBatch) -> None:
        self.count += 1


class Refusing:
    """A dataset that refuses example 6 and has no length."""

    def __getitem__(self, index: int) -> int:
        if index == 6:
            raise UserError("6 is refused")
        return index


@pytest.mark.parametrize("workers", [0, 2])
def test_an_order_of_ones_own_decides_what_comes(workers: int) -> None:
    order = Pairs()
    with Ready(Refusing(), order=order, workers=workers) as loader:
        assert len(loader) == 4
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [4, 4]]
    assert order.noted == [0, 1, 2, 3]
    with pytest.raises(UserError, match="those of the order"):
        loader.state_dict()
    with pytest.raises(UserError, match="order is given with batch_size"):
        Ready(Refusing(), 2, order=order)


def test_a_state_of_something_else_is_refused() -> None:
    loader = Ready(Numbers(), 2, workers=0)
    next(iter(loader))
    state = loader.state_dict()
    for name, value in (("examples", 19), ("seed", 1), ("shuffle", 0)):
        with pytest.raises(UserError, match=f"the state is of {name} = {value}"):
            loader.load_state_dict({**state, name: value})
    with pytest.raises(UserError, match="lacks early"):
        loader.load_state_dict({key: value for key, value in state.items() if key != "early"})
    with pytest.raises(UserError, match="used batches before their places"):
        Ready(Numbers(), 4, workers=0).load_state_dict({**state, "early": [4]})


def test_a_batch_may_be_copied_to_memory_of_the_devices_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return host memory as for a GPU, but without pinning it."""
    sizes = []

    def host(self: Uploads, size: int) -> torch.Tensor:
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(Uploads, "buffer", property(lambda self: partial(host, self)))
    with Ready(Odd(), workers=1, collate=first, device="cpu") as loader:
        [batch] = loader
        assert_equal(batch, Odd()[0])
    assert sizes


def test_workers_do_not_hear_ctrl_c() -> None:
    with Ready(Numbers(), workers=1) as loader:
        next(iter(loader))
        assert loader._workers is not None
        os.kill(loader._workers.processes()[0], signal.SIGINT)
        assert len([*loader]) == 20
