"""Make examples that wait, die, are refused or fail as a test sets, in any process."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from warpfold.batch import Arrays
from warpfold.errors import UserError


@dataclass(frozen=True)
class Puppet:
    """Make examples of their number and passes. folder: gets "begun-NUMBER", and is watched for "go-NUMBER".

    waits: the numbers that wait for "go-NUMBER". kills, kills_once, refuses, starves, fails: keys of entries.
    """

    folder: Path
    waits: tuple[int, ...] = ()
    kills: tuple[str, ...] = ()  # the process, each time
    kills_once: tuple[str, ...] = ()
    refuses: tuple[str, ...] = ()
    starves: tuple[str, ...] = ()
    fails: tuple[str, ...] = ()
    size: int = 1

    def __call__(self, source: int, key: str, index: int, passes: int) -> Arrays:
        (self.folder / f"begun-{index}").touch()
        while index in self.waits and not (self.folder / f"go-{index}").exists():
            time.sleep(0.005)
        mark = self.folder / f"killed-{key}"
        if key in self.kills or (key in self.kills_once and not mark.exists()):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if key in self.refuses:
            raise UserError(f"{key}: damaged")
        if key in self.starves:
            raise MemoryError
        if key in self.fails:
            raise KeyError(key)
        return {
            "aatype": np.full(self.size, index, np.int64),
            "msa_mask": np.zeros((passes, 3, self.size), np.float32),
            "resolution": np.array(index / 2, np.float32),
            "template_aatype": np.zeros((0, self.size), np.int64),
        }

    def go(self, index: int) -> None:
        (self.folder / f"go-{index}").touch()

    def begun(self) -> int:
        return len(list(self.folder.glob("begun-*")))


class Stillborn:
    """A maker that cannot be unpickled in another process: it raises there, or kills the process with a signal."""

    def __init__(self, number: int | None) -> None:
        self.number = number

    def __reduce__(self) -> tuple:
        return _begin, (self.number,)


def _begin(number: int | None) -> None:
    if number is None:
        raise ImportError("a library is missing")
    os.kill(os.getpid(), number)
