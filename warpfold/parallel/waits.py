"""Where this process waits for others: noted for as long as it does, so that a clock can end a wait without an end.

Whatever fails in such a wait is a `LostError`: by where it was raised, never by what its message says.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import torch.distributed as dist


class LostError(RuntimeError):
    """A collective failed while this process waited for others: one has ended, or did not come in time."""

    def __init__(self, name: str, seconds: float, error: RuntimeError) -> None:
        super().__init__(str(error))
        self.name, self.seconds = name, seconds  # what was waited for, and how long


@dataclass(frozen=True)
class Wait:
    """Something that this process waits for now."""

    name: str
    began: float  # time.monotonic


_numbers = count()
_now: dict[int, Wait] = {}


def now() -> dict[int, Wait]:
    """Return what this process waits for at this moment, by a number that is never used again."""
    return dict(_now)


@contextmanager
def waiting(name: str) -> Iterator[None]:
    """Note that this thread waits for others.

    Errors: LostError for any RuntimeError that ends the wait, which is its cause.
    """
    number, wait = next(_numbers), Wait(name, time.monotonic())
    _now[number] = wait
    try:
        yield
    except LostError:
        raise
    except RuntimeError as error:
        raise LostError(name, time.monotonic() - wait.began, error) from error
    finally:
        del _now[number]


@dataclass(frozen=True)
class Work:
    """A collective under way; None: one that ended at once."""

    work: dist.Work | None
    name: str

    def wait(self) -> None:
        """Wait until it has ended; on a GPU, have the current stream wait."""
        if self.work is not None:
            with waiting(self.name):
                self.work.wait()
