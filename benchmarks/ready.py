"""Compare `warpfold.Ready` with torch's DataLoader by timing whole epochs alternately in one process.

Both have the same batches, the same number of prefetched batches and equally many persistent processes. DataLoader is
timed in two ways: with one iteration per epoch, as most people use it, and at its best, with one iteration over an
endless batch sampler and `in_order=False`. The latter lacks the bounded reordering of Ready and its log. Each loader
runs three epochs at a time. The first epoch starts without prefetched batches, except with the endless sampler. The
script prints the ratio of the times of each DataLoader and Ready: median and quartiles over pairs.

    python -m benchmarks.ready --out benchmarks/results/ready-NAME.json       (two minutes on two cores)
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

import warpfold

AHEAD = 4


class Numbers(Dataset):
    """Examples without cost, which time the loader itself."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((16,), float(index)), index


class Pictures(Dataset):
    """Pictures of 3 x 224 x 224, 0.6 MB each, which time the transfer between processes."""

    def __init__(self) -> None:
        self.picture = torch.rand(3, 224, 224)

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.picture + index, index


class Uneven(Dataset):
    """Examples that take 2 ms to make, one in twenty 40 ms."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.04 if index % 20 == 7 else 0.002)
        return {"x": torch.zeros(64, 64), "index": torch.tensor(index)}


class Same(Sampler):
    """The batches of a Ready, epoch after epoch; endless: all epochs in one iteration."""

    def __init__(self, ready: warpfold.Ready, endless: bool) -> None:
        self._ready, self._endless, self._epoch = ready, endless, 0

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            self._epoch += 1
            yield from self._ready.batches(self._epoch - 1)
            if not self._endless:
                return

    def __len__(self) -> int:
        return len(self._ready)


def step(weight: torch.Tensor, times: int) -> None:
    """Compute as a training step would."""
    for _ in range(times):
        weight @ weight


def epochs(loader: Any, length: int, weight: torch.Tensor, times: int) -> float:
    """Measure the seconds of three epochs. loader: an iterator for the endless sampler."""
    if isinstance(loader, warpfold.Ready):
        loader.load_state_dict(loader.state_dict())  # what was made ahead while the other one was timed is dropped
    time.sleep(0.1)
    begin = time.perf_counter()
    if isinstance(loader, Iterator):
        for _ in range(3 * length):
            next(loader)
            step(weight, times)
        return time.perf_counter() - begin
    for _ in range(3):
        for _ in loader:
            step(weight, times)
    return time.perf_counter() - begin


CASES = {  # dataset, batch size, steps' work, window
    "numbers": (Numbers, 32, 0, 0),
    "numbers, with a step": (Numbers, 32, 4, 0),
    "pictures": (Pictures, 16, 0, 0),
    "pictures, with a step": (Pictures, 16, 8, 0),
    "uneven": (Uneven, 4, 1, 0),
    "uneven, window 4": (Uneven, 4, 1, 4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    asked = parser.parse_args()
    found: dict[str, Any] = {}
    torch.set_num_threads(1)
    weight = torch.rand(256, 256)
    print(f"{'':24} {'':10} {'Ready, ms':>9} {'its, ms':>9} {'ratio':>6}  quartiles")
    for name in asked.case or CASES:
        kind, batch_size, times, window = CASES[name]
        data = kind()
        with warpfold.Ready(data, batch_size, workers=asked.workers, ahead=AHEAD, window=window) as ready:
            about: dict[str, Any] = {"num_workers": asked.workers, "persistent_workers": True, "prefetch_factor": AHEAD}
            usual = DataLoader(data, batch_sampler=Same(ready, False), **about)
            endless = iter(DataLoader(data, batch_sampler=Same(ready, True), in_order=False, **about))
            loaders = {"ready": ready, "dataloader": usual, "endless": endless}
            for loader in loaders.values():  # processes start, and memory is touched
                epochs(loader, len(ready), weight, times)
            turns = [
                {kind: epochs(loader, len(ready), weight, times) for kind, loader in loaders.items()}
                for _ in range(asked.pairs)
            ]
            del usual, endless, loaders, loader
        found[name] = {
            f"{kind}_ms": round(statistics.median(turn[kind] for turn in turns) * 1e3, 1) for kind in turns[0]
        }
        for theirs in ("dataloader", "endless"):
            low, ratio, high = statistics.quantiles([turn[theirs] / turn["ready"] for turn in turns], n=4)
            figures = found[name]["ready_ms"], found[name][f"{theirs}_ms"], ratio
            print(
                f"{name:24} {theirs:10} {figures[0]:9.1f} {figures[1]:9.1f} {figures[2]:6.2f}  {low:.2f} {high:.2f}",
                flush=True,
            )
            found[name] |= {
                f"{theirs}_over_ready": round(ratio, 2),
                f"{theirs}_quartiles": [round(low, 2), round(high, 2)],
            }
    if asked.out:
        machine = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        about = {"date": datetime.date.today().isoformat(), **machine, "torch": torch.__version__, "pairs": asked.pairs}
        asked.out.write_text(json.dumps({**about, "workers": asked.workers, "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
