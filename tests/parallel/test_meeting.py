"""Rendezvous of processes in a store: a new name each time, and a load that does not grow with their number."""

import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from warpfold.parallel import team
from warpfold.parallel.team import agree_on_name, allow_connections


class Recorded(dist.HashStore):
    """A store that records the largest number of bytes that each thread reads at once, by the thread's name."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[str, int] = {}

    def _note(self, size: int) -> None:
        name = threading.current_thread().name
        self.read[name] = max(self.read.get(name, 0), size)

    def get(self, key: str) -> bytes:
        found = super().get(key)
        self._note(len(found))
        return found

    def check(self, keys: list[str]) -> bool:
        self._note(sum(map(len, keys)))
        return super().check(keys)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "MIN_POLL", 0.005)
    monkeypatch.setattr(team, "MAX_POLL", 0.02)


def meet(store: Any, ranks: int, absent: tuple[int, ...] = (), limit: float = 60.0, each: int = 0) -> list[str]:
    """Run the rendezvous on all ranks that are present and collect their results.

    each: number of ranks per host, which the ranks report; 0 to report no hosts.
    """

    def one(rank: int) -> str:
        threading.current_thread().name = str(rank)
        node = rank // each if each else 0
        where = (f"gpu-{node}", range(node * each, (node + 1) * each)) if each else ()
        try:
            return agree_on_name(store, rank, ranks, limit, *where)
        except RuntimeError as error:
            return f"error: {error}"

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, [rank for rank in range(ranks) if rank not in absent]))


def test_all_agree_on_one_name_and_a_later_job_on_another() -> None:
    store = Recorded()
    first, second = set(meet(store, 5)), set(meet(store, 5))
    assert len(first) == len(second) == 1
    assert first != second


@pytest.mark.parametrize("ranks", [8, 64])
def test_what_a_process_asks_does_not_grow_with_their_number(ranks: int) -> None:
    store = Recorded()
    meet(store, ranks)
    assert max(size for name, size in store.read.items() if name != "0") < 64


def test_who_does_not_come_is_named() -> None:
    said = meet(Recorded(), 4, absent=(1, 3), limit=0.3)
    assert said == ["error: no sign of rank 1, 3", "error: no word from rank 0"]
    said = meet(Recorded(), 30, absent=tuple(range(1, 30)), limit=0.1)
    assert said == ["error: no sign of rank 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 19 more"]


def test_where_they_would_be_is_known_from_others_of_their_host() -> None:
    said = meet(Recorded(), 6, absent=(3, 4, 5), limit=0.3, each=2)
    assert said[0] == "error: no sign of rank 3 (gpu-1), 4, 5; others are on gpu-0, gpu-1"


def test_words_of_processes_before_are_not_taken_for_these() -> None:
    """The store contains a complete earlier rendezvous, and rank 0 arrives after the others have looked."""
    store = Recorded()
    earlier = meet(store, 3)[0]
    waiting = threading.Event()
    ask = store.check

    def check(keys: list[str]) -> bool:
        waiting.set()
        return ask(keys)

    store.check = check  # type: ignore[method-assign]
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(agree_on_name, store, rank, 3, 60.0) for rank in (1, 2)]
        assert waiting.wait(60)
        name = pool.submit(agree_on_name, store, 0, 3, 60.0).result()
        assert {other.result() for other in others} == {name}
    assert name != earlier


@pytest.mark.parametrize(
    ("soft", "hard", "then"), [(1024, 65536, 5120), (1024, 4096, 4096), (65536, 65536, None), (-1, -1, None)]
)
def test_files_may_be_open_for_all_connections(
    soft: int, hard: int, then: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [(resource.RLIM_INFINITY if x < 0 else x) for x in (soft, hard)]
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda which, values: asked.append(values))
    allow_connections(2048)
    assert asked == ([] if then is None else [(then, hard)])
