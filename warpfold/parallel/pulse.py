"""What ends a run that would hang: signs of life in the store, and a clock that reads this process's memory only.

Two threads.  One speaks to the store, where every process says each second where it is, and where one that fails says
why; a store that is silent stops this thread, and it alone.  The other is the clock: it touches neither the store nor
a process group, so nothing can stop it but what stops the whole process, and then it does not count.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from types import TracebackType

import torch.distributed as dist

from warpfold.errors import UserError
from warpfold.parallel import waits
from warpfold.parallel.waits import LostError, waiting

BEAT = 1.0  # seconds between signs of life
SILENT = 3 * BEAT  # after so long without one, a process is dead or frozen
GRACE = 5.0  # seconds that a process has, once it must end, to do so by itself: to raise, and to tell the others why


class TeamError(UserError):
    """Another process of the run failed, or did not come where this one waits for it."""

    exit_code = 1


@dataclass
class Place:
    """How far a process has come: meetings of all, and since the last one collectives of gradients and of slices."""

    meetings: int = 0
    gradients: int = 0
    slices: int = 0  # the same on all that share an example, not on others
    name: str = "the beginning"  # of what it last began or waited for

    def far(self, same_example: bool) -> tuple[int, ...]:
        """Return what can be compared with another process's counts."""
        return (self.meetings, self.gradients, self.slices)[: 3 if same_example else 2]


class Clock:
    """A thread that ends this process, GRACE after it has waited for others for longer than `limit`.

    It counts the time in which the process ran: not that in which it was stopped.  A process that computes, for as long
    as it likes, waits for nobody.  explain: says why, given what was waited for and how long; it must not block.
    reason: set from outside as long as there is one, it ends the process after GRACE.
    """

    def __init__(self, limit: float, explain: Callable[[str, float], str]) -> None:
        self.explain, self.reason = explain, ""
        self._limit = limit
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Clock":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()

    def _watch(self) -> None:
        lived: dict[int, float] = {}  # how long each wait has lasted
        own, left, before = "", GRACE, time.monotonic()
        while not self._end.wait(BEAT):
            passed, before = min(time.monotonic() - before, 2 * BEAT), time.monotonic()
            under_way = waits.now()
            lived = {number: lived.get(number, 0.0) + passed for number in under_way}
            longest = max(under_way, key=lived.__getitem__, default=None)
            # Two beats later than a collective gives up by itself: an error that is raised is better.
            if not own and longest is not None and lived[longest] > self._limit + 2 * BEAT:
                own = self.explain(under_way[longest].name, lived[longest])
            left = left - passed if own or self.reason else GRACE
            if left <= 0:
                _break_off(own or self.reason)


def _break_off(reason: str) -> None:
    """End this process, which waits where no exception reaches it, and print why if that is possible at once."""
    try:
        line = threading.Thread(target=_complain, args=(reason,), daemon=True)  # who reads stderr may be frozen too
        line.start()
        line.join(2 * BEAT)
    finally:
        os._exit(1)


def _complain(reason: str) -> None:
    print(f"error: {reason}", file=sys.stderr, flush=True)


class Pulse:
    """One process's part in noticing that another has failed, has ended or does not come.

    keeper: who keeps the store.  clock: ends this process, told why.  where: how far this process has come.
    sharing: the ranks that share its example.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: int,
        keeper: str,
        limit: float,
        clock: Clock,
        where: Callable[[], Place],
        sharing: Callable[[], Collection[int]],
    ) -> None:
        self._store, self._rank, self._ranks, self._keeper, self._limit = store, rank, ranks, keeper, limit
        self._clock, self._where, self._sharing = clock, where, sharing
        self._began = time.monotonic()  # about the same moment for all, whatever their clocks say
        self._changed = threading.Condition()
        self._asked = self._answered = 0  # requests for the signs of all
        self._message = ""  # for the others: why this process fails
        self._end = False
        # What the store said, last.
        self._told = ""  # why another process has failed
        self._signs: list[tuple[Place, float]] = []  # of every rank, with the moment of it
        self._read_at = 0.0
        self._gone = False
        self._thread = threading.Thread(target=self._speak, daemon=True)

    def __enter__(self) -> "Pulse":
        """Begin to speak to the store; the clock says from now on what this knows."""
        self._clock.explain = self.explain
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Tell the others why this process fails.  Errors: TeamError for one that comes of another's failure."""
        reason = self.why(error) if isinstance(error, LostError | dist.DistError) else error
        if reason is not None:
            self.tell(reason)
        with self._changed:
            self._end = True
            self._changed.notify_all()
        self._thread.join(2 * BEAT)  # unless the store holds it
        if reason is not None and reason is not error:
            raise reason from error

    def tell(self, error: BaseException) -> None:
        """Let the others know why this process fails; of several the first counts."""
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}".splitlines()[0]
        self._message = f"rank {self._rank} failed: {text[:1000]}"
        if self._ask() and self._keeper == f"rank {self._rank}":
            time.sleep(2 * BEAT)  # the store ends with this process: first the others read what it says

    def why(self, error: RuntimeError) -> TeamError:
        """Return why this process, whose collective failed with `error`, cannot go on; the store is asked."""
        name, seconds = (error.name, error.seconds) if isinstance(error, LostError) else (self._where().name, 0.0)
        # Where a connection is lost, its other end may have fallen silent just now.
        end = time.monotonic() + (0.0 if seconds >= self._limit else SILENT + BEAT)
        while (answered := self._ask()) and not self._told and time.monotonic() < end:
            time.sleep(BEAT)
        if self._told:
            return TeamError(self._told)
        here = f"rank {self._rank} waited for others at {name!r}"
        if not answered:
            return TeamError(f"{here}; {self._of_store()}")
        return TeamError(f"{here}; {self._missing(SILENT) or f'all are there: {str(error).splitlines()[0]}'}")

    def explain(self, name: str, seconds: float) -> str:
        """Return why this process has waited for so long, from what is in its memory: nobody is asked."""
        reason = self._told
        if not reason:
            here = f"rank {self._rank} waited for others at {name!r} for {seconds:.0f} s"
            silent = self._silent()
            reason = self._of_store() if name == self._name else f"{here}; {self._of_store()}" if silent else here
            if not silent and (missing := self._missing(SILENT)):
                reason = f"{here}; {missing}"
        self._message = self._message or f"rank {self._rank} failed: {reason}"  # sent if the store should answer
        return reason

    # What runs in the thread

    @property
    def _name(self) -> str:
        return f"the store that {self._keeper} keeps"

    def _speak(self) -> None:
        place, since = self._where(), time.monotonic()
        while not self._end:
            if self._where() is not place:
                place, since = self._where(), time.monotonic()
            late = time.monotonic() - since > self._limit
            asked = self._asked
            try:
                with waiting(self._name):
                    self._sign()
                    if self._message:
                        self._store.compare_set("failed", "", self._message)
                    if self._store.check(["failed"]):
                        self._told = self._store.get("failed").decode()
                    if late or asked > self._answered or self._waits_long():
                        self._read()
            except LostError:
                self._gone = True
            self._judge(late)
            with self._changed:
                self._answered = asked
                self._changed.notify_all()
                if self._gone:
                    return
                self._changed.wait_for(lambda: self._end or self._asked > self._answered, BEAT)

    def _judge(self, late: bool) -> None:
        """Have the clock end this process where others have failed, or are missing although no wait is seen here.

        A kernel of NCCL's waits on the device: the process seems to compute.  So one that others are behind of, or
        that others have not been heard of for as long as it has stood still, does not compute: it waits.
        """
        reason = self._told
        if not reason and self._gone:
            reason = self._of_store()
        elif not reason and late and (missing := self._missing(self._limit)):
            reason = f"rank {self._rank} waited for others at {self._where().name!r}; {missing}"
        self._clock.reason = "" if self._end else reason  # who keeps the store may end before this process does

    def _sign(self) -> None:
        said = [*asdict(self._where()).values(), time.monotonic() - self._began]
        self._store.set(str(self._rank), json.dumps(said))

    def _read(self) -> None:
        keys = [str(rank) for rank in range(self._ranks)]
        if self._store.check(keys):  # to get what is not there yet would be to wait for it
            signs = [json.loads(text) for text in self._store.multi_get(keys)]
            self._signs, self._read_at = [(Place(*at), when) for *at, when in signs], time.monotonic() - self._began

    def _waits_long(self) -> bool:
        """Return whether to read the signs of all again, in case the store falls silent; seldom, as they are many."""
        began = min((wait.began for wait in waits.now().values()), default=time.monotonic())
        return time.monotonic() - max(began, self._read_at + self._began) > self._limit / 4

    # What is known here

    def _ask(self) -> bool:
        """Have the store told, and asked for the signs of all; False if it does not answer within SILENT."""
        with self._changed:
            if self._gone or self._silent() or not self._thread.is_alive():
                return False
            self._asked += 1
            number = self._asked
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._answered >= number, SILENT) and not self._gone

    def _silent(self) -> float:
        """For how long the store has not answered; 0 where it does."""
        of_store = (wait.began for wait in waits.now().values() if wait.name == self._name)
        return max((seconds for began in of_store if (seconds := time.monotonic() - began) > SILENT), default=0.0)

    def _of_store(self) -> str:
        if self._gone:
            return f"the store where they meet is gone: {self._keeper} has ended"
        known = f"; last known: {'; '.join(self._places())}" if self._signs else ""
        return (
            f"the store where they meet has not answered for {self._silent():.0f} s: {self._keeper}, which keeps it, "
            f"is dead or frozen{known}"
        )

    def _places(self) -> list[str]:
        return [f"rank {r} at {place.name!r}" for r, (place, _) in enumerate(self._signs) if r != self._rank]

    def _missing(self, silent: float) -> str:
        """Who did not arrive where this process waits, as far as the signs tell; silent: seconds without one."""
        now, here, found = self._read_at, self._where(), []
        for rank, (there, when) in enumerate(self._signs):
            same_example = rank in self._sharing()
            if rank == self._rank:
                continue
            if now - when > silent:
                found.append(f"rank {rank} is dead or frozen: last heard of {now - when:.0f} s ago at {there.name!r}")
            elif there.far(same_example) < here.far(same_example):
                found.append(f"rank {rank} did not arrive: it is at {there.name!r}")
        return "; ".join(found)
