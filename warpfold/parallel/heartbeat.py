"""End a run that would hang: heartbeats in the store, and a watchdog that reads this process's memory only.

Two threads.  The heartbeat writes to the store, once a second, how far this process has come, and, if it fails, why; a
store that does not answer blocks this thread, and nothing else.  The watchdog touches neither the store nor a process
group, so nothing can stop it but what stops the whole process, and that time does not count.
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

from warpfold.errors import LostError, UserError
from warpfold.parallel import waits
from warpfold.parallel.waits import waiting

BEAT = 1.0  # seconds between heartbeats
SILENT = 3 * BEAT  # a process without a heartbeat for so long is dead or frozen
READERS = 16  # ranks that at once read the heartbeats of all; what one of them finds, the others hear
LATEST = 5  # beats that the last ranks wait for that, in case the first ones are gone
GRACE = 5.0  # seconds that a process that must end has to raise, and to tell the others why, before it is ended


class TeamError(UserError):
    """Another process of the run failed, or did not come where this one waits for it."""

    exit_code = 1


@dataclass
class Position:
    """How far a process has come: meetings of all, and since the last one collectives of gradients and of slices."""

    meetings: int = 0
    gradients: int = 0
    slices: int = 0  # the same on all ranks that share an example, not on others
    name: str = "the beginning"  # of what it last began or waited for

    def counts(self, same_example: bool) -> tuple[int, ...]:
        """Return the counts that can be compared with those of another process."""
        return (self.meetings, self.gradients, self.slices)[: 3 if same_example else 2]


class Watchdog:
    """A thread that ends this process GRACE seconds after it has waited for others longer than `limit`.

    The time during which the process was stopped does not count, and a process that computes waits for nobody, however
    long it takes.  explain: returns why, given what was waited for and how long; it must not block.
    reason: while another thread has set it, the process ends after GRACE seconds.
    A process that is writing a checkpoint (`waits.saving`) is spared until that is on the disk, `limit` seconds at
    most: a file system may hang.  That is told by time alone: to look at the files could hang this thread, too.
    """

    def __init__(self, limit: float, explain: Callable[[str, float], str]) -> None:
        self.explain, self.reason = explain, ""
        self.limit = limit  # the start of a run has another one than its steps
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()

    def _watch(self) -> None:
        lived: dict[int, float] = {}  # how long each wait has lasted
        own, left, spared, before = "", GRACE, 0.0, time.monotonic()
        while not self._end.wait(BEAT):
            passed, before = min(time.monotonic() - before, 2 * BEAT), time.monotonic()
            under_way = waits.now()
            lived = {number: lived.get(number, 0.0) + passed for number in under_way}
            longest = max(under_way, key=lived.__getitem__, default=None)
            # Two beats later than a collective gives up by itself: an error that is raised is better.
            if not own and longest is not None and lived[longest] > self.limit + 2 * BEAT:
                own = self.explain(under_way[longest].name, lived[longest])
            if not own and not self.reason:
                left, spared = GRACE, 0.0
            elif waits.is_saving() and spared < self.limit:
                left, spared = GRACE, spared + passed
            else:
                left -= passed
            if left <= 0:
                _break_off(own or self.reason)


def _break_off(reason: str) -> None:
    """End this process, which waits where no exception reaches it, and print why if that is possible at once."""

    def complain() -> None:
        print(f"error: {reason}", file=sys.stderr, flush=True)

    try:
        line = threading.Thread(
            target=complain, daemon=True
        )  # printing may block: the reader of stderr may be frozen, too
        line.start()
        line.join(2 * BEAT)
    finally:
        os._exit(1)


class Heartbeat:
    """Notice that another process has failed, has ended or does not come, and let the others notice this one.

    keeper: the process that keeps the store.  watchdog: ends this process when it is given a reason.
    position: returns how far this process has come.  sharing: returns the ranks that share its example.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: int,
        keeper: str,
        limit: float,
        watchdog: Watchdog,
        position: Callable[[], Position],
        sharing: Callable[[], Collection[int]],
    ) -> None:
        self._store, self._rank, self._keeper, self._limit = store, rank, keeper, limit
        self._watchdog, self._position, self._sharing = watchdog, position, sharing
        self._patience = min(rank // READERS, LATEST)  # beats: 2,048 ranks that read 2,048 heartbeats would be a storm
        self._began = time.monotonic()  # about the same moment for all, whatever their clocks say
        self._changed = threading.Condition()
        self._asked = self._answered = 0  # requests to speak to the store now
        self._to_read = False  # the heartbeats of all, too
        self._message = ""  # for the others: why this process fails
        self._end = False
        # What the store last said.
        self._failure = ""  # why another process has failed
        self._read_at = 0.0
        self._gone = False  # the store
        self.relieve(ranks)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def relieve(self, ranks: int) -> None:
        """From now on wait only for the first `ranks` processes, which work together."""
        self._ranks, self._beats = ranks, list[tuple[Position, float]]()  # the last heartbeat of each, and when it was

    def __enter__(self) -> "Heartbeat":
        """Begin to write to the store; from now on the watchdog explains with what this knows."""
        self._watchdog.explain = self.explain
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Tell the others why this process fails.  Errors: TeamError if it fails because another process did."""
        reason = self.why(error) if isinstance(error, LostError | dist.DistError) else error
        if reason is not None:
            self._report(reason)
        with self._changed:
            self._end = True
            self._changed.notify_all()
        self._thread.join(2 * BEAT)  # unless the store holds it
        if reason is not None and reason is not error:
            raise reason from error

    def _report(self, error: BaseException) -> None:
        """Write to the store why this process fails; of several reports the first counts."""
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}".splitlines()[0]
        self._message = f"rank {self._rank} failed: {text[:1000]}"
        if self._ask() and self._keeper == f"rank {self._rank}":
            time.sleep(2 * BEAT)  # the store ends with this process: let the others read it first

    def why(self, error: RuntimeError) -> TeamError:
        """Ask the store, and return why this process, whose collective failed with `error`, cannot go on."""
        name, seconds = (error.name, error.seconds) if isinstance(error, LostError) else (self._position().name, 0.0)
        # If a connection was lost just now, it takes SILENT seconds until the other end is known to be dead.
        end = time.monotonic() + (0.0 if seconds >= self._limit else SILENT + BEAT) + self._patience * BEAT
        while (answered := self._ask()) and not self._failure and time.monotonic() < end:
            time.sleep(BEAT)
        if answered and not self._failure:
            answered = self._ask(read=True)
        if self._failure:
            return TeamError(self._failure)
        here = f"rank {self._rank} waited for others at {name!r}"
        if not answered:
            return TeamError(f"{here}; {self._about_store()}")
        return TeamError(f"{here}; {self._missing(SILENT) or f'all are there: {str(error).splitlines()[0]}'}")

    def explain(self, name: str, seconds: float) -> str:
        """Explain why this process has waited for so long, from its own memory, without asking anybody."""
        reason = self._failure
        if not reason:
            here = f"rank {self._rank} waited for others at {name!r} for {seconds:.0f} s"
            if name == self._name:
                reason = self._about_store()
            elif self._silent():
                reason = f"{here}; {self._about_store()}"
            else:
                reason = f"{here}; {missing}" if (missing := self._missing(SILENT)) else here
        self._message = self._message or f"rank {self._rank} failed: {reason}"  # sent if the store answers after all
        return reason

    def failure(self) -> str:
        """Say why another process has failed, as far as this one has heard; "" if none has."""
        return self._failure

    # What runs in the thread

    @property
    def _name(self) -> str:
        return f"the store that {self._keeper} keeps"

    def _run(self) -> None:
        position, since = self._position(), time.monotonic()
        while not self._end:
            if self._position() is not position:
                position, since = self._position(), time.monotonic()
            late = time.monotonic() - since > self._limit + self._patience * BEAT
            asked, read = self._asked, self._to_read
            try:
                with waiting(self._name):
                    beat = [*asdict(self._position()).values(), time.monotonic() - self._began]
                    self._store.set(str(self._rank), json.dumps(beat))
                    if self._message:
                        self._store.compare_set("failed", "", self._message)
                    if self._store.check(["failed"]):
                        self._failure = self._store.get("failed").decode()
                    if late or read or self._waits_long():
                        self._read()
                        self._to_read = False
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
        """Have the watchdog end this process if others have failed, or are missing though it seems not to wait.

        In a kernel of NCCL's the device waits, and the process seems to compute.  A process that has not moved for the
        whole limit, while others are behind it or silent, does not compute: it waits for them.
        """
        reason = self._failure
        if not reason and self._gone:
            reason = self._about_store()
        elif not reason and late and (missing := self._missing(self._limit)):
            reason = f"rank {self._rank} waited for others at {self._position().name!r}; {missing}"
        self._watchdog.reason = "" if self._end else reason  # at the end, the store's keeper may be the first to go

    def _read(self) -> None:
        keys = [str(rank) for rank in range(self._ranks)]
        if self._store.check(keys):  # `multi_get` would wait for keys that are not there yet
            beats = [json.loads(text) for text in self._store.multi_get(keys)]
            self._beats, self._read_at = [(Position(*at), when) for *at, when in beats], time.monotonic() - self._began

    def _waits_long(self) -> bool:
        """Return whether to read all heartbeats again, in case the store falls silent; rarely, as they are many."""
        if self._patience:
            return False
        began = min((wait.began for wait in waits.now().values()), default=time.monotonic())
        return time.monotonic() - max(began, self._read_at + self._began) > self._limit / 4

    # What other threads ask

    def _ask(self, read: bool = False) -> bool:
        """Have the thread write to the store, and read all heartbeats; False if there is no answer within SILENT."""
        with self._changed:
            if self._gone or self._silent() or not self._thread.is_alive():
                return False
            self._to_read = self._to_read or read
            self._asked += 1
            number = self._asked
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._answered >= number, SILENT) and not self._gone

    def _silent(self) -> float:
        """Return for how many seconds the store has not answered; 0 if it does."""
        of_store = (wait.began for wait in waits.now().values() if wait.name == self._name)
        return max((seconds for began in of_store if (seconds := time.monotonic() - began) > SILENT), default=0.0)

    def _about_store(self) -> str:
        if self._gone:
            return f"the store where they meet is gone: {self._keeper} has ended"
        others = [f"rank {r} at {position.name!r}" for r, (position, _) in enumerate(self._beats) if r != self._rank]
        known = f"; last known: {'; '.join(others)}" if self._beats else ""
        return (
            f"the store where they meet has not answered for {self._silent():.0f} s: {self._keeper}, which keeps it, "
            f"is dead or frozen{known}"
        )

    def _missing(self, silent: float) -> str:
        """Name the ranks that did not arrive where this process waits, or were silent for `silent` seconds."""
        now, here, found = self._read_at, self._position(), []
        for rank, (there, when) in enumerate(self._beats):
            same_example = rank in self._sharing()
            if rank == self._rank:
                continue
            if now - when > silent:
                found.append(f"rank {rank} is dead or frozen: last heard of {now - when:.0f} s ago at {there.name!r}")
            elif there.counts(same_example) < here.counts(same_example):
                found.append(f"rank {rank} did not arrive: it is at {there.name!r}")
        return "; ".join(found)
