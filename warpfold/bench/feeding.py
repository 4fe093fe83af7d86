"""Estimate whether a store can feed a number of GPUs from a number of cores.

One process makes examples from a cold storage, and its time is divided into waiting for the storage, decompression and
computing features. C processes on C cores make C times as many examples, unless together they need more bytes than the
storage delivers. This bandwidth is measured by reading with as many threads.
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
from warpfold.data.store.remote import Address, Place, Remote, parse_place
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import open_entry
from warpfold.errors import UserError

# Seconds of a step on an H200, initial training without recycling (benchmarks/results/gpu-h200-2026-11-26.json).
STEP = 0.41
# Bytes that each thread reads at a time, and seconds, in the measurement of the bandwidth.
PIECE = 1 << 20
SECONDS = 2.0
_UNITS = {"kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}


@dataclass(frozen=True)
class Emulation:
    """An emulated slower storage with a latency per read and a bandwidth that all processes of the machine share.

    latency: seconds of a read with all its ranges. rate: bytes per second. link: a file of 8 bytes with the moment at
    which the shared link becomes free.
    """

    latency: float
    rate: float
    link: Path

    @staticmethod
    def of(text: str, link: Path) -> "Emulation":
        """Parse "20ms,100MB/s". Raises UserError for any other text."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?ms, ?(\d+(?:\.\d+)?) ?([kMG]B/s)", text)
        if match is None or not float(match[2]):
            raise UserError(f"--storage {text}: not a latency and a rate. Pass for example 20ms,100MB/s.")
        link.write_bytes(struct.pack("<d", 0.0))
        return Emulation(float(match[1]) / 1e3, float(match[2]) * _UNITS[match[3]], link)

    def arrival(self, asked: float, size: int) -> float:
        """Reserve the link for a number of bytes, and return the moment of their arrival."""
        with open(self.link, "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            free = max(struct.unpack("<d", file.read(8))[0], asked) + size / self.rate
            file.seek(0)
            file.write(struct.pack("<d", free))
        return self.latency + free


class SlowFolder(Folder):
    """A folder whose reads are delayed by an emulation."""

    def __init__(self, path: Path, emulation: Emulation) -> None:
        super().__init__(path)
        self.emulation = emulation

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        # The monotonic clock is common to all processes.
        request_time = time.monotonic()
        answers = super().read(name, ranges)
        arrival = self.emulation.arrival(request_time, sum(map(len, answers)))
        time.sleep(max(arrival - time.monotonic(), 0.0))
        return answers


class SlowStore(Store):
    """A store on an emulated storage, also in other processes to which it is sent. Raises UserError as `Store`."""

    def __init__(self, path: Place, emulation: Emulation, checked: bool = False) -> None:
        if isinstance(parse_place(path), Address):
            raise UserError(f"{parse_place(path)}: --storage needs a folder of this machine. Omit --storage.")
        super().__init__(path, checked)
        self.emulation, self.storage = emulation, SlowFolder(Path(self.path), emulation)

    def __reduce__(self) -> tuple[Any, ...]:
        return SlowStore, (self.path, self.emulation, True)


class _Watched:
    """A storage that records its reads."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.forget_all()

    def forget_all(self) -> None:
        """Start again with a cold storage."""
        self.storage.cool()
        # busy: CPU seconds within the seconds of reads.
        self.reads, self.seconds, self.busy = 0, 0.0, 0.0
        self.answers: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.storage, name)

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        began, busy = time.perf_counter(), time.thread_time()
        answers = self.storage.read(name, ranges)
        self.reads += 1
        self.seconds += time.perf_counter() - began
        self.busy += time.thread_time() - busy
        self.answers += answers
        return answers


def feeding(store: Store, config: SampleConfig, entries: int, gpus: int, cores: int, step: float) -> dict[str, Any]:
    """Measure examples as training draws them, without recycling, and judge whether `cores` make enough of them.

    step: seconds in which a GPU uses an example. Each core runs one process. "storage" is the time of reads,
    "decompression" includes checksums, and "features" is the remaining time.
    """
    import zstandard

    torch.set_num_threads(1)
    order, unpack = Order([Source(store)], seed=0), zstandard.ZstdDecompressor().decompress
    rate = bandwidth(store, cores)
    watched, parts, reads, sizes = _Watched(store.storage), [], [], []
    store.storage = watched
    try:
        # The first example does not count, because it loads libraries.
        for number in range(-1, entries):
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
    storage, unpacking, features = map(statistics.fmean, zip(*parts))
    supply = Feeding(storage, unpacking, features, statistics.fmean(sizes), rate, gpus, cores, step)
    named = zip(("storage, ms", "decompression, ms", "features, ms"), zip(*parts))
    return {
        "reads of an example": {"mean": round(statistics.fmean(reads), 1), "most": max(reads)},
        "bytes of an example": {"mean, MB": round(supply.size / 1e6, 3), "median, MB": statistics.median(sizes) / 1e6},
        **{
            name: {
                "mean": round(1e3 * statistics.fmean(durations), 2),
                "median": round(1e3 * statistics.median(durations), 2),
            }
            for name, durations in named
        },
        "bandwidth, MB/s": round(rate / 1e6, 1),
        "examples per second": round(supply.given, 1),
        "needed": round(supply.needed, 1),
        "limit": supply.limit,
        "verdict": supply.verdict(isinstance(watched.storage, Remote)),
    }


@dataclass(frozen=True)
class Feeding:
    """Costs of an example and the demand of the GPUs.

    storage, decompression, features: seconds of an example. size: bytes of an example. bandwidth: bytes per second.
    step: seconds in which a GPU uses an example.
    """

    storage: float
    decompression: float
    features: float
    size: float
    bandwidth: float
    gpus: int
    cores: int
    step: float

    @property
    def given(self) -> float:
        """Examples per second from one process per core."""
        return min(self.cores / (self.storage + self.decompression + self.features), self.bandwidth / self.size)

    @property
    def needed(self) -> float:
        """Examples per second that the GPUs use."""
        return self.gpus / self.step

    @property
    def limit(self) -> str:
        """Name of the bottleneck."""
        if self.bandwidth / self.size <= self.given:
            return "storage bandwidth"
        parts = {"storage latency": self.storage, "decompression": self.decompression, "features": self.features}
        return max(parts, key=lambda name: parts[name])

    def verdict(self, cached: bool = False) -> str:
        """Describe whether the supply is sufficient, and what would be. cached: the storage keeps local copies."""
        busy = self.decompression + self.features
        figures = (
            f"{self.gpus} GPUs from {self.cores} cores: {self.given:,.1f} examples a second, {self.needed:,.1f} needed"
        )
        if self.given >= self.needed:
            return f"feeds {figures}; the limit is {self.limit}"
        if self.bandwidth / self.size < self.needed:
            remedy = (
                f"storage of {self.needed * self.size / 1e6:.3g} MB/s would, or a copy of the store on a local disk"
            )
            remedy += "; entries that fit into WARPFOLD_CACHE_GB have one after the first epoch" if cached else ""
        elif self.needed * busy <= self.cores:
            # A waiting process needs no core.
            processes = ceil(self.needed * (self.storage + busy) / self.gpus)
            remedy = f"train.workers={processes} for each GPU would, as processes that wait for storage need no core"
        else:
            remedy = f"{ceil(self.needed * (self.storage + busy))} cores would"
        return f"does not feed {figures}; the limit is {self.limit}; {remedy}"


def bandwidth(store: Store, threads: int) -> float:
    """Measure the bytes per second of reading a store's cold shards in random order with a number of threads."""
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
