"""Load examples: they follow from the seed; workers and time change only their order within a window."""

import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.puppets import Puppet, Stillborn
from warpfold.batch import to_tensors
from warpfold.data.example.raw_example import from_sequence
from warpfold.data.features.choose import SampleConfig
from warpfold.data.load.examples import ExampleDataset, Maker, Quarantine, RunOrder, Sample, only
from warpfold.data.load.order import Order, Source
from warpfold.data.load.schedule import Draw, Schedule, State
from warpfold.data.store.store import Store, StoreWriter, pack_record
from warpfold.data.store.stored_example import example_arrays, example_notes
from warpfold.engine.ready import Ready
from warpfold.engine.ready_maker import ReadyError
from warpfold.errors import UserError
from warpfold.geometry.residue import RESTYPES

CONFIG = SampleConfig(crop=8, max_msa=2)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("loader") / "store"
    with StoreWriter(path) as writer:
        for i in range(7):
            raw = from_sequence(RESTYPES[i:] * (40 if i == 0 else 1), name=f"e{i}")
            meta = {"length": len(raw.aatype), "depth": 1, "cluster": str(i // 2)}
            writer.add(raw.name, pack_record(example_arrays(raw), example_notes(raw)), meta)
        writer.finish()
    return Store(path)


SCHEDULE = ("start", "examples", "rank", "ranks", "cost", "replay")


class Loader(Ready):
    """Iterate over the samples of a loader, made as in `warpfold.training.examples.load`."""

    order: RunOrder

    def __init__(self, order: RunOrder, make: Any, workers: int = 0, **more: Any) -> None:
        super().__init__(ExampleDataset(make), order=order, collate=only, device="cpu", workers=workers, **more)
        self._samples = super().__iter__()

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        sample = next(self._samples)
        return replace(sample, features=to_tensors(sample.features))


def loader(
    store: Store, make: Any = None, steps: int = 10, quarantine: Quarantine | None = None, **more: Any
) -> Loader:
    schedule = {name: more.pop(name) for name in SCHEDULE if name in more}
    about = {name: more.pop(name) for name in ("passes", "used") if name in more}
    planned = Schedule(schedule.pop("start", State()), steps, **schedule)
    order = RunOrder(Order([Source(store)], seed=3), planned, quarantine or Quarantine(0), **about)
    return Loader(order, make or Maker((store,), CONFIG, 3), **more)


def take(store: Store, make: Any = None, **more: Any) -> list[Sample]:
    with loader(store, make, **more) as examples:
        return list(examples)


def indices(samples: Sequence[Sample]) -> list[int]:
    return [sample.index for sample in samples]


def alternate(step: int) -> int:
    return 1 + step % 2


def test_workers_deliver_the_same_and_a_run_may_begin_anywhere(store: Store) -> None:
    here = take(store, steps=20, passes=alternate)
    ahead = take(store, steps=20, passes=alternate, workers=2)
    resumed = take(store, steps=7, passes=alternate, start=State(12), workers=1)
    for a, b in zip([*here, *here[12:19]], [*ahead, *resumed], strict=True):
        assert (a.index, a.name, a.features.keys()) == (b.index, b.name, b.features.keys())
        for name, tensor in a.features.items():
            torch.testing.assert_close(b.features[name], tensor, rtol=0, atol=0)
    starts = {int(sample.features["residue_index"][0]) for sample in here if sample.name == "e0"}
    assert len(starts) == sum(sample.name == "e0" for sample in here)  # drawn again in every epoch
    assert [len(sample.features["msa_feat"]) for sample in here[:3]] == [1, 2, 1]


def test_epochs_follow_each_other_without_a_gap(store: Store, tmp_path: Path) -> None:
    puppet = Puppet(tmp_path, waits=(8,))
    with loader(store, puppet, steps=14, workers=2, ahead=4) as examples:
        for _ in range(3):
            next(examples)
        wait_for(lambda: (tmp_path / "begun-8").exists())  # of the next epoch, made in the middle of this one
        before = set(examples.processes())
        puppet.go(8)
        assert indices(list(examples)) == list(range(3, 14))
        assert set(examples.processes()) == before


def wait_for(condition: Any, seconds: float = 100) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def test_ready_examples_pass_a_slow_one_but_not_for_ever(store: Store, tmp_path: Path) -> None:
    (tmp_path / "strict").mkdir()
    puppet = Puppet(tmp_path / "strict", waits=(2,))
    with loader(store, puppet, workers=2, ahead=5) as examples:  # without a window, the loader waits for it
        first = [next(examples).index for _ in range(2)]
        wait_for(lambda: puppet.begun() >= 8)
        puppet.go(2)
        assert first + indices(list(examples)) == list(range(10))
    puppet = Puppet(tmp_path, waits=(1, 2))
    log: list[Draw] = []
    with loader(store, puppet, workers=2, ahead=5, window=3, used=log.append) as examples:
        first = [next(examples).index]
        puppet.go(1)  # waiting until now: two workers may finish 0 and 1 in either order
        first += [next(examples).index for _ in range(4)]
        assert first == [0, 1, 3, 4, 5]  # 6 is ready too, but four positions later
        assert examples.order.exchanged() == ([2], [5])
        assert examples.order.state() == State(2, (3, 4, 5))
        wait_for(lambda: puppet.begun() == 10)
        puppet.go(2)
        assert indices(list(examples)) == [2, 6, 7, 8, 9]
        assert examples.order.state() == State(10)
    assert [draw.number for draw in log] == [0, 1, 3, 4, 5, 2, 6, 7, 8, 9]


def test_only_examples_with_equally_many_passes_change_places(store: Store, tmp_path: Path) -> None:
    puppet = Puppet(tmp_path, waits=(2,))
    with loader(store, puppet, workers=2, ahead=5, window=4, passes=alternate) as examples:
        got = [next(examples) for _ in range(6)]
        wait_for(lambda: puppet.begun() == 10)
        puppet.go(2)
        got += list(examples)
    assert indices(got) == [0, 1, 4, 3, 6, 5, 2, 7, 8, 9]
    assert [len(sample.features["msa_mask"]) for sample in got] == [1, 2] * 5


def test_an_order_is_followed_and_what_it_leaves_comes_after(store: Store, tmp_path: Path) -> None:
    puppet = Puppet(tmp_path, waits=(5,))
    log = [Draw(3), Draw(5), Draw(0), Draw(1)]
    with loader(store, puppet, workers=2, window=5, examples=2, steps=5, replay=[log]) as examples:
        first = next(examples)
        puppet.go(5)  # not skipped, however slow
        got = indices([first, *examples])
    assert got[:4] == [3, 5, 0, 1]
    assert sorted(got[4:]) == [2, 4, 6, 7, 8, 9]


def test_no_more_is_made_ahead_than_was_allowed(store: Store, tmp_path: Path) -> None:
    puppet = Puppet(tmp_path)
    with loader(store, puppet, steps=50, workers=2, ahead=3) as examples:
        wait_for(lambda: puppet.begun() == 6)
        next(examples)
        wait_for(lambda: puppet.begun() == 7)
        time.sleep(0.3)
        assert puppet.begun() == 7


def test_large_arrays_need_no_shared_memory(store: Store, tmp_path: Path) -> None:
    def shared(process: int | str) -> set[str]:
        """Return the files of /dev/shm that the process has mapped; none if it has ended."""
        maps = Path(f"/proc/{process}/maps")
        lines = maps.read_text().splitlines() if maps.exists() else []
        return {line.split(maxsplit=5)[-1] for line in lines if "/dev/shm" in line}

    before = shared("self")  # by other tests, in this process
    with loader(store, Puppet(tmp_path, size=3_000_000), steps=3, workers=1) as examples:
        for sample in examples:
            assert sample.features["msa_mask"].shape == (1, 3, 3_000_000)
            assert int(sample.features["aatype"][-1]) == sample.index
            assert float(sample.features["resolution"]) == sample.index / 2
            assert not set().union(*map(shared, (*examples.processes(), "self"))) - before


def asides(limit: int = 2, known: Sequence[str] = ()) -> tuple[Quarantine, list[tuple[str, int, str]]]:
    told: list[tuple[str, int, str]] = []
    return Quarantine(limit, known, lambda *about: told.append(about)), told


@pytest.mark.parametrize("workers", [0, 2])
def test_an_entry_that_cannot_be_used_is_replaced_and_named(store: Store, tmp_path: Path, workers: int) -> None:
    quarantine, told = asides()
    puppet = Puppet(tmp_path, refuses=("e3",), starves=("e5",))
    samples = take(store, puppet, steps=21, workers=workers, quarantine=quarantine)
    assert indices(samples) == list(range(21))
    assert not {"e3", "e5"} & {sample.name for sample in samples}
    order = Order([Source(store)], seed=3)
    kept = [i for i in range(21) if order.entry(i).name not in ("e3", "e5")]
    assert [samples[i].name for i in kept] == [order.entry(i).name for i in kept]
    assert {(name, reason) for name, _, reason in told} == {("e3", "e3: damaged"), ("e5", "too little memory")}
    again = take(store, puppet, steps=21, workers=2 - workers, quarantine=asides(known=("e5", "e3"))[0])
    assert [sample.name for sample in again] == [sample.name for sample in samples]


def test_a_worker_that_dies_is_replaced_and_its_example_made_again(store: Store, tmp_path: Path) -> None:
    quarantine, told = asides()
    samples = take(store, Puppet(tmp_path, kills_once=("e1", "e4")), workers=2, quarantine=quarantine)
    assert (tmp_path / "killed-e1").exists()
    assert (tmp_path / "killed-e4").exists()
    assert [sample.name for sample in samples] == [s.name for s in take(store, Puppet(tmp_path))]
    assert not told


def test_what_kills_two_workers_is_set_aside(store: Store, tmp_path: Path) -> None:
    quarantine, told = asides()
    samples = take(store, Puppet(tmp_path, kills=("e1",)), steps=14, workers=2, quarantine=quarantine)
    assert indices(samples) == list(range(14))
    assert "e1" not in {sample.name for sample in samples}
    [(name, _, reason)] = told
    assert name == "e1"
    assert reason == "the process that made it was killed by SIGKILL (too little memory?), twice"


def test_workers_that_cannot_start_end_the_run(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"each loader process was killed by SIGKILL .* when it started"):
        take(store, Stillborn(signal.SIGKILL), workers=2)
    with pytest.raises(RuntimeError, match="could not start"):
        take(store, Stillborn(None), workers=2)


def test_too_many_end_the_run(store: Store, tmp_path: Path) -> None:
    for workers in (0, 1):
        with pytest.raises(UserError, match=r"cannot be used: 2, the last one e\d: e\d: damaged; more than 1"):
            take(store, Puppet(tmp_path, refuses=("e1", "e2")), workers=workers, quarantine=asides(limit=1)[0])
        with pytest.raises(UserError, match="none of its entries can be used"):
            take(store, Puppet(tmp_path, refuses=tuple(store.keys)), workers=workers, quarantine=asides(limit=7)[0])


def test_a_bug_is_not_a_damaged_entry(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ReadyError, match=r"(?s)'e1'.*dataset: KeyError: 'e1'.*worker:.*puppets.*KeyError: 'e1'"):
        take(store, Puppet(tmp_path, fails=("e1",)), workers=1)
    with pytest.raises(ReadyError, match="KeyError: 'e1'"):
        take(store, Puppet(tmp_path, fails=("e1",)))


def test_ranks_share_a_step_and_give_their_state_together(store: Store, tmp_path: Path) -> None:
    puppet = Puppet(tmp_path, waits=(0,))
    more = {"steps": 6, "examples": 2, "ranks": 2, "cost": lambda index: 1.0, "window": 2}
    ranks = [loader(store, puppet, rank=rank, workers=2 - rank, **more) for rank in range(2)]
    try:
        got = [[next(rank).index for _ in range(2)] for rank in ranks]
        assert got == [[2, 4], [1, 3]]
        state = ranks[0].order.state([rank.order.exchanged() for rank in ranks])
        assert state == State(0, (1, 2, 3, 4))
        puppet.go(0)
    finally:
        for rank in ranks:
            rank.close()
    alone = take(store, puppet, steps=4, start=state)
    assert indices(alone) == [0, 5, 6, 7]


def test_examples_are_padded_to_a_multiple(store: Store) -> None:
    make = Maker((store,), CONFIG, 3, multiple=16)
    for sample in take(store, make, steps=3):
        assert sample.features["msa_mask"].shape[-2:] == (16, 16)
        assert sample.features["seq_mask"].sum() == 8
