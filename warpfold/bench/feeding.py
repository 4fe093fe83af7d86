"""Say whether a store feeds so many GPUs from so many cores: what an example waits for and costs, and arithmetic.

One process makes examples from a storage that is cold, and each takes so long in three ways: it waits for the storage,
unpacks, and computes features.  Then C processes on C cores make C times as many, unless all of them together ask for
more bytes than the storage gives, which is measured by reading with as many threads.
"""

import fcntl
import re
import statistics
import struct
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

import torch

from warpfold.batch import to_tensors
from warpfold.data.features.choose import SampleConfig
from warpfold.data.features.make import make_features
from warpfold.data.load.order import Order, Source
from warpfold.data.store.local import Folder, Storage
from warpfold.data.store.remote import Address, Place, Remote, place_of
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import open_entry
from warpfold.errors import UserError

STEP = 0.41  # of an H200, initial training without recycling: benchmarks/results/gpu-h200-2026-11-26.json
PIECE = 1 << 20  # bytes that each thread reads at a time for the bandwidth
SECONDS = 2.0  # for which the bandwidth is measured
_UNITS = {"kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}


@dataclass(frozen=True)
class Emulation:
    """A slower storage: each read takes so long, and all processes of the machine share so many bytes per second.

    link: a file of 8 bytes, the moment from which on the link that all share is free.
    """

    latency: float  # seconds, for all ranges of one read, which travel together
    rate: float  # bytes per second
    link: Path

    @staticmethod
    def of(text: str, link: Path) -> "Emulation":
        """Read "20ms,100MB/s".  Errors: UserError for another text."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?ms, ?(\d+(?:\.\d+)?) ?([kMG]B/s)", text)
        if found is None or not float(found[2]):
            raise UserError(f"--storage {text}: give a latency and a rate, as 20ms,100MB/s")
        link.write_bytes(struct.pack("<d", 0.0))
        return Emulation(float(found[1]) / 1e3, float(found[2]) * _UNITS[found[3]], link)

    def arrival(self, asked: float, size: int) -> float:
        """Return when so many bytes will be there that are asked for now, and take the link for them."""
        with open(self.link, "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            free = max(struct.unpack("<d", file.read(8))[0], asked) + size / self.rate
            file.seek(0)
            file.write(struct.pack("<d", free))
        return self.latency + free


class SlowFolder(Folder):
    """A folder that answers as late as an emulation says."""

    def __init__(self, path: Path, emulation: Emulation) -> None:
        super().__init__(path)
        self.emulation = emulation

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        asked = time.monotonic()  # one clock for all processes
        found = super().read(name, ranges)
        arrival = self.emulation.arrival(asked, sum(map(len, found)))
        time.sleep(max(arrival - time.monotonic(), 0.0))
        return found


class SlowStore(Store):
    """A store on an emulated storage, also in the processes that it is sent to.  Errors: as of `Store`."""

    def __init__(self, path: Place, emulation: Emulation, checked: bool = False) -> None:
        if isinstance(place_of(path), Address):
            raise UserError(f"{place_of(path)}: --storage is for a folder of this machine; leave it out")
        super().__init__(path, checked)
        self.emulation, self.storage = emulation, SlowFolder(Path(self.path), emulation)

    def __reduce__(self) -> tuple[Any, ...]:
        return SlowStore, (self.path, self.emulation, True)


class _Watched:
    """A storage that notes what is read."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.forget_all()

    def forget_all(self) -> None:
        """Begin anew, with nothing of what was read in memory."""
        self.storage.cool()
        self.reads, self.seconds, self.busy = 0, 0.0, 0.0  # busy: seconds of these in which a core worked
        self.answers: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.storage, name)

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        began, busy = time.perf_counter(), time.thread_time()
        found = self.storage.read(name, ranges)
        self.reads += 1
        self.seconds += time.perf_counter() - began
        self.busy += time.thread_time() - busy
        self.answers += found
        return found


def feeding(store: Store, config: SampleConfig, entries: int, gpus: int, cores: int, step: float) -> dict[str, Any]:
    """Measure examples as a training draws them, without recycling, and judge whether `cores` make enough of them.

    step: seconds in which a GPU uses an example.  A core has one process.  "storage": the time until answers are there;
    "decompression" has the checksums, too; "features" is the rest.
    """
    import zstandard

    torch.set_num_threads(1)
    order, unpack = Order([Source(store)], seed=0), zstandard.ZstdDecompressor().decompress
    rate = bandwidth(store, cores)
    watched, parts, reads, sizes = _Watched(store.storage), [], [], []
    store.storage = watched
    try:
        for number in range(-1, entries):  # the first one does not count: libraries are loaded
            key = order.entry(max(number, 0)).key
            watched.forget_all()
            began = time.thread_time()
            to_tensors(make_features(open_entry(store, key, False), config, 0, (key, number), 1, train=True))
            ended = time.thread_time()
            for data in watched.answers:
                zlib.crc32(data), unpack(data)
            unpacking = time.thread_time() - ended
            if number >= 0:
                parts.append((watched.seconds, unpacking, max(ended - began - watched.busy - unpacking, 0.0)))
                reads.append(watched.reads)
                sizes.append(sum(map(len, watched.answers)))
    finally:
        store.storage = watched.storage
    storage, unpacking, rest = map(statistics.fmean, zip(*parts))
    found = Feeding(storage, unpacking, rest, statistics.fmean(sizes), rate, gpus, cores, step)
    named = zip(("storage, ms", "decompression, ms", "features, ms"), zip(*parts))
    return {
        "reads of an example": {"mean": round(statistics.fmean(reads), 1), "most": max(reads)},
        "bytes of an example": {"mean, MB": round(found.size / 1e6, 3), "median, MB": statistics.median(sizes) / 1e6},
        **{
            name: {"mean": round(1e3 * statistics.fmean(every), 2), "median": round(1e3 * statistics.median(every), 2)}
            for name, every in named
        },
        "bandwidth, MB/s": round(rate / 1e6, 1),
        "examples per second": round(found.given, 1),
        "needed": round(found.needed, 1),
        "limit": found.limit,
        "verdict": found.verdict(isinstance(watched.storage, Remote)),
    }


@dataclass(frozen=True)
class Feeding:
    """What an example takes of a storage and of a core, in seconds and bytes, and what is asked of both."""

    storage: float
    decompression: float
    features: float
    size: float
    bandwidth: float  # bytes per second
    gpus: int
    cores: int
    step: float  # seconds

    @property
    def given(self) -> float:
        """Return how many examples a second there are of a process on each core."""
        return min(self.cores / (self.storage + self.decompression + self.features), self.bandwidth / self.size)

    @property
    def needed(self) -> float:
        """Return how many examples a second the GPUs use."""
        return self.gpus / self.step

    @property
    def limit(self) -> str:
        """Name what would have to be faster for more."""
        if self.bandwidth / self.size <= self.given:
            return "storage bandwidth"
        parts = {"storage latency": self.storage, "decompression": self.decompression, "features": self.features}
        return max(parts, key=lambda name: parts[name])

    def verdict(self, cached: bool = False) -> str:
        """Say in a sentence whether it is enough, and what would be.  cached: the storage is one that keeps copies."""
        busy = self.decompression + self.features
        figures = (
            f"{self.gpus} GPUs from {self.cores} cores: {self.given:,.1f} examples a second, {self.needed:,.1f} needed"
        )
        if self.given >= self.needed:
            return f"feeds {figures}; the limit is {self.limit}"
        if self.bandwidth / self.size < self.needed:
            cure = f"storage of {self.needed * self.size / 1e6:.3g} MB/s would, or a copy of the store on a local disk"
            cure += "; of what fits into WARPFOLD_CACHE_GB, there is one after the first epoch" if cached else ""
        elif self.needed * busy <= self.cores:  # a process that waits needs no core
            processes = ceil(self.needed * (self.storage + busy) / self.gpus)
            cure = f"train.workers={processes} for each GPU would, as processes that wait for storage need no core"
        else:
            cure = f"{ceil(self.needed * (self.storage + busy))} cores would"
        return f"does not feed {figures}; the limit is {self.limit}; {cure}"


def bandwidth(store: Store, threads: int) -> float:
    """Read a store's shards, cold, in random order by so many threads, and return bytes per second."""
    store.storage.cool()
    draw = Random(0)
    shards = draw.sample(store.index.shards, min(len(store.index.shards), 256))
    pieces = [(name, begin, min(begin + PIECE, size)) for name, size in shards for begin in range(0, size, PIECE)]
    draw.shuffle(pieces)
    began = time.perf_counter()

    def some(mine: Sequence[tuple[str, int, int]]) -> int:
        size = 0
        for name, begin, end in mine:
            if time.perf_counter() - began > SECONDS:
                break
            size += sum(map(len, store.storage.read(name, [(begin, end)])))
        return size

    with ThreadPoolExecutor(threads) as pool:
        size = sum(pool.map(some, [pieces[number::threads] for number in range(threads)]))
    return size / (time.perf_counter() - began)
