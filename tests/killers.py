"""Define a job that kills its own process, in a module that worker processes can import."""

import os
import signal
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class DiesTwice:
    """Call a function of a module, but kill the process with SIGKILL in the first two calls.

    folder: the folder that records the deaths.  after: do the job before dying.  together: the first call waits for
    the second call, in the other worker, before it dies.
    """

    module: str
    function: str
    folder: Path
    after: bool = False
    together: bool = False

    def __call__(self, job: Any) -> Any:
        done = [self.do(job)] if self.after else []
        self.folder.mkdir(exist_ok=True)
        for number in range(2):
            try:
                os.close(os.open(self.folder / f"killed-{number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            end = time.monotonic() + 60
            while self.together and self.deaths < 2 and time.monotonic() < end:
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)
        return done[0] if done else self.do(job)

    @property
    def __name__(self) -> str:
        return self.function

    def do(self, job: Any) -> Any:
        """Do the job."""
        return getattr(import_module(self.module), self.function)(job)

    @property
    def deaths(self) -> int:
        return len(list(self.folder.iterdir()))
