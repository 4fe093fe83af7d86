"""From a store to the features of training: which example comes at which step, and processes that work ahead.

Example `index` of a run is a pure function of (store, settings, seed): resuming needs no more than the number.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import Literal

import numpy as np

from warpfold.batch import Arrays
from warpfold.data.features import RawExample
from warpfold.data.sample import SampleConfig, keyed_rng, make_features
from warpfold.data.store import Store
from warpfold.errors import UserError

Weights = Literal["uniform", "paper"]


def read_example(store: Store, key: str) -> RawExample:
    """The raw example `key`, whole."""
    record = store.record(key)
    return RawExample.from_arrays(record.read_all(), record.notes)


def split_keys(store: Store, held_out: int, seed: int) -> tuple[list[str], list[str]]:
    """Keys to train on and keys held out, in the store's order; equal sequences are never on both sides.

    held_out: how many to hold out at least; whole clusters, drawn by the seed, until that many.
    Errors: UserError if nothing would remain to train on.
    """
    clusters = store.column("cluster")
    order = keyed_rng(seed, "held out").permutation(sorted(set(clusters)))
    sizes = {cluster: clusters.count(cluster) for cluster in order.tolist()}
    taken: set[str] = set()
    while sum(sizes[cluster] for cluster in taken) < held_out and len(taken) < len(order):
        taken.add(str(order[len(taken)]))
    held = [key for key, cluster in zip(store.keys, clusters) if cluster in taken]
    rest = [key for key, cluster in zip(store.keys, clusters) if cluster not in taken]
    if not rest:
        raise UserError(f"{store.path}: holding out {held_out} of {len(store)} leaves none to train on; hold out fewer")
    return rest, held


class Loader:
    """The examples of a run, by number.

    keys: the examples to draw from (default: all of the store).  weights: "uniform" goes through a new seeded
    permutation in every epoch; "paper" draws with replacement, a chain with probability
    max(min(length, 512), 256) / 512 divided by the number of chains in its cluster (Supp. 1.2.5).
    """

    def __init__(
        self,
        store: Store,
        config: SampleConfig,
        seed: int,
        keys: Sequence[str] | None = None,
        weights: Weights = "uniform",
        train: bool = True,
    ) -> None:
        self.store, self.config, self.seed, self.train = store, config, seed, train
        self.keys = list(store.keys if keys is None else keys)
        for key in self.keys:
            if key not in store:
                raise UserError(f"{store.path}: has no entry {key!r}")
        if not self.keys:
            raise UserError(f"{store.path}: no entries to draw from")
        self._cumulative = np.cumsum(self._paper_weights()) if weights == "paper" else None
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def __len__(self) -> int:
        """Examples in an epoch."""
        return len(self.keys)

    def key(self, index: int) -> str:
        """The key of example `index`, 0 <= index."""
        if self._cumulative is not None:
            draw = keyed_rng(self.seed, "order", index).random() * self._cumulative[-1]
            return self.keys[int(np.searchsorted(self._cumulative, draw, side="right"))]
        epoch, place = divmod(index, len(self.keys))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, keyed_rng(self.seed, "order", epoch).permutation(len(self.keys))
        return self.keys[self._order[place]]

    def example(self, index: int, passes: int = 1) -> tuple[str, Arrays]:
        """Key and features of example `index` for so many passes through the trunk."""
        key = self.key(index)
        raw = read_example(self.store, key)
        return key, make_features(raw, self.config, self.seed, (key, index), passes, self.train)

    def stream(
        self,
        indices: Sequence[int] | range,
        passes: Callable[[int], int] = lambda index: 1,
        workers: int = 0,
        ahead: int = 2,
    ) -> Iterator[tuple[str, Arrays]]:
        """Key and features of each of `indices`, in order.

        passes: index -> number of passes.  workers: processes that work ahead, each by up to `ahead` examples; with 0
        the work is done here, when asked for.  The result does not depend on either.
        Errors: UserError if an entry is damaged, or a worker dies.
        """
        if workers <= 0:
            for index in indices:
                yield self.example(index, passes(index))
            return
        pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin, initargs=(self,))
        try:
            waiting: deque[Future[tuple[str, Arrays]]] = deque()
            for index in indices:
                waiting.append(pool.submit(_example, index, passes(index)))
                if len(waiting) > workers * ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise UserError("a loader process died, of too little memory most likely; use fewer workers") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _paper_weights(self) -> np.ndarray:
        column = {name: dict(zip(self.store.keys, self.store.column(name))) for name in ("length", "cluster")}
        lengths = np.array([column["length"][key] for key in self.keys])
        _, cluster, sizes = np.unique(
            [column["cluster"][key] for key in self.keys], return_inverse=True, return_counts=True
        )
        return np.clip(lengths, 256, 512) / 512 / sizes[cluster]


_loader: Loader | None = None  # of a worker process


def _begin(loader: Loader) -> None:
    """A worker's beginning: Ctrl-C is for the training process alone, and no worker outlives it, even killed."""
    global _loader
    _loader = loader
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _example(index: int, passes: int) -> tuple[str, Arrays]:
    assert _loader is not None
    return _loader.example(index, passes)
