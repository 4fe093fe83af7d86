"""Test training on several processes of this machine: equal results, and no leftover processes."""

import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.training.runs import rows, tiny_run
from warpfold.data.load.order import Source
from warpfold.data.store.store import Store
from warpfold.engine.watch import Row
from warpfold.training.processes import train_here


def test_two_processes_train_as_one_does(store: Store, tmp_path: Path, one_thread: None) -> None:
    config = tiny_run()
    config = replace(config, optim=replace(config.optim, accumulate=2), train=replace(config.train, steps=3))
    alone = train_here(1, config, [Source(store)], tmp_path / "alone")
    shared = replace(config, plan=replace(config.plan, data=2))
    seen: list[Row] = []
    found = train_here(2, shared, [Source(store)], tmp_path / "shared", watch=seen.append)
    assert (found.finished, found.steps) == (alone.finished, alone.steps) == (True, 3)
    assert [row["step"] for row in seen if row["kind"] == "step"] == [1, 2, 3]
    ours, theirs = (rows(tmp_path / name) for name in ("shared", "alone"))
    steps = [(a, b) for a, b in zip(ours, theirs) if a["kind"] == "step"]
    assert all(set(a["examples"]) == set(b["examples"]) for a, b in steps)
    assert [a["loss"] for a, _ in steps] == pytest.approx([b["loss"] for _, b in steps], rel=1e-4)
    assert not multiprocessing.active_children()


def test_the_others_end_with_the_first(store: Store, tmp_path: Path, one_thread: None) -> None:
    config = tiny_run()
    config = replace(config, optim=replace(config.optim, accumulate=2), plan=replace(config.plan, data=2))

    def fail(row: Row) -> None:
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            train_here(2, config, [Source(store)], tmp_path / "run", watch=fail)
    finally:
        # A process that fails leaves its group open.
        dist.destroy_process_group()
    assert not multiprocessing.active_children()
