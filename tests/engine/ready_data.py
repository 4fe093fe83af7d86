"""Datasets for tests of `Ready`, whose behaviour files control from any process."""

import os
import random
import signal
import time
from collections import namedtuple
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Pair = namedtuple("Pair", "number twice")


@dataclass
class Held:
    number: Tensor
    name: str


@dataclass(frozen=True)
class Numbers:
    """Example i has its index, i rows, and a random number of each generator.  folder: see `Puppet`."""

    size: int = 20
    folder: Path = field(default_factory=Path)
    waits: tuple[int, ...] = ()
    kills: tuple[int, ...] = ()
    kills_once: tuple[int, ...] = ()
    fails: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        while index in self.waits and not (self.folder / f"go-{index}").exists():
            time.sleep(0.005)
        mark = self.folder / f"killed-{index}"
        if index in self.kills or (index in self.kills_once and not mark.exists()):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if index in self.fails:
            raise KeyError(f"no {index}")
        drawn = torch.rand(()) + random.random() + np.random.rand()  # noqa: NPY002
        return {"index": index, "rows": torch.full((3,), float(index)), "drawn": drawn}

    def go(self, index: int) -> None:
        (self.folder / f"go-{index}").touch()


class Draws:
    """Each example is a random number of each generator of the host."""

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


class Many:
    """A dataset that makes many examples at once."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        raise AssertionError("it makes many at once")

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [index * 10 for index in indices]


class Rows:
    """Example i is a list of i + 1 numbers."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> list[int]:
        return [index] * (index + 1)


class Odd:
    """One example with every kind of value."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        shared = torch.arange(6.0).reshape(2, 3)
        return {
            "tensors": [shared, shared.T, shared.bfloat16(), torch.tensor(True), torch.zeros(0, 4), shared + 1j],
            "small": torch.ones(3).to(torch.float8_e4m3fn),
            "arrays": (np.arange(4, dtype=np.uint16), np.float32(1.5), np.array(["ab", "c"]), np.array(3)),
            "plain": [None, True, 2**70, -1.5, float("nan"), float("-inf"), "text", b"bytes"],
            3: {(1, "a"): 1},
            "pair": Pair(shared, [1]),
            "held": Held(torch.tensor(2), "b"),
        }


class Bad:
    """One example that cannot be sent between processes."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return {"at": [self.value]}


def first(examples: list[Any]) -> Any:
    return examples[0]


def listed(examples: list[Any]) -> list[Any]:
    return examples


def fails_at(examples: list[Any]) -> Any:
    raise ValueError(f"cannot stack {len(examples)}\nreally")


def cost_of_zero(example: dict[str, Any]) -> Any:
    return None if example["index"] else 1.0
