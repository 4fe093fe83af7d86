"""End a run that would hang, with heartbeats in the store and a watchdog that reads only this process's memory.

There are two threads. Once a second, the heartbeat writes the progress of this process to the store, and the reason if
the process fails. A store that does not answer blocks only this thread. The watchdog uses neither the store nor a
process group, so it stops only while the whole process is stopped, and that time does not count.
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

# Seconds between heartbeats.
BEAT = 1.0
# Seconds without a heartbeat after which a process counts as dead or frozen.
SILENT = 3 * BEAT
# Number of ranks that read the heartbeats of all at the same time. They report failures to the others.
READERS = 16
# Most beats by which later ranks delay their reading, in case the first ranks are gone.
MAX_DELAY_BEATS = 5
# Seconds in which a failing process may raise its error and report it, before the watchdog ends it.
GRACE = 5.0


class TeamError(UserError):
    """Another process of the run has failed, or did not arrive where this process waits for it."""

    exit_code = 1


@dataclass
class Position:
    """Progress of a process.

    meetings: global collectives. gradients: collectives of gradients since the last meeting. slices: collectives of an
    example since the last meeting; equal only on ranks that share the example.
    name: of the collective or wait that began last.
    """

    meetings: int = 0
    gradients: int = 0
    slices: int = 0
    name: str = "the beginning"

    def counts(self, same_example: bool) -> tuple[int, ...]:
        """Return the counts that are comparable with those of another process."""
        return (self.meetings, self.gradients, self.slices)[: 3 if same_example else 2]


class Watchdog:
    """A thread that ends this process GRACE seconds after it has waited for other ranks longer than `limit`.

    Time during which the process was stopped does not count, and neither does time in which it computes.
    limit: seconds. It is changed after the start of a run.
    explain: returns the error message, given the name and the seconds of the wait. It must not block.
    reason: while another thread has set it, the process ends after GRACE seconds.
    While a checkpoint is being written (`waits.saving`), the process is not ended, for at most `limit` seconds because
    a file system may hang. The files are not examined, since that could block this thread.
    """

    def __init__(self, limit: float, explain: Callable[[str, float], str]) -> None:
        self.explain, self.reason = explain, ""
        self.limit = limit
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()

    def _watch(self) -> None:
        # Seconds that each present wait has lasted.
        durations: dict[int, float] = {}
        timeout, grace, postponed, before = "", GRACE, 0.0, time.monotonic()
        while not self._end.wait(BEAT):
            # A longer interval means that the process was stopped, which does not count.
            passed, before = min(time.monotonic() - before, 2 * BEAT), time.monotonic()
            current = waits.now()
            durations = {number: durations.get(number, 0.0) + passed for number in current}
            longest = max(current, key=durations.__getitem__, default=None)
            # Two beats after the collective's own time-out, because an error that is raised is better.
            if not timeout and longest is not None and durations[longest] > self.limit + 2 * BEAT:
                timeout = self.explain(current[longest].name, durations[longest])
            if not timeout and not self.reason:
                grace, postponed = GRACE, 0.0
            elif waits.is_saving() and postponed < self.limit:
                grace, postponed = GRACE, postponed + passed
            else:
                grace -= passed
            if grace <= 0:
                _terminate(timeout or self.reason)


def _terminate(reason: str) -> None:
    """End this process, which waits where no exception reaches it, and print the reason unless printing blocks."""

    def print_error() -> None:
        print(f"error: {reason}", file=sys.stderr, flush=True)

    try:
        # Printing blocks if the reader of stderr is frozen, so another thread does it.
        printer = threading.Thread(target=print_error, daemon=True)
        printer.start()
        printer.join(2 * BEAT)
    finally:
        os._exit(1)


class Heartbeat:
    """Report this process's progress and failure to the others, and notice those of the others.

    keeper: name of the process that runs the store. watchdog: ends this process when it has a reason.
    position: returns the progress of this process. sharing: returns the ranks that share its example.
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
        # Beats by which this rank delays reading: 2,048 ranks that read 2,048 heartbeats at once would overload the
        # store.
        self._read_delay = min(rank // READERS, MAX_DELAY_BEATS)
        # About the same moment on all ranks, so times since then are comparable although clocks differ.
        self._began = time.monotonic()
        self._changed = threading.Condition()
        # Requests to the thread to contact the store now.
        self._asked = self._answered = 0
        # Whether a request includes the heartbeats of all ranks.
        self._to_read = False
        # Why this process fails, to be reported to the others.
        self._message = ""
        self._end = False
        # What was last read from the store: why another process has failed, when the heartbeats were read, and whether
        # the store is gone.
        self._failure = ""
        self._read_at = 0.0
        self._gone = False
        self.ignore_idle_ranks(ranks)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def ignore_idle_ranks(self, ranks: int) -> None:
        """From now on wait only for the first `ranks` processes, which work together."""
        # The last heartbeat of each rank, and its time.
        self._ranks, self._beats = ranks, list[tuple[Position, float]]()

    def __enter__(self) -> "Heartbeat":
        """Start to write to the store. From now on, this object explains the watchdog's time-outs."""
        self._watchdog.explain = self.explain_timeout
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Report to the others why this process fails. Raises TeamError if it fails because another process did."""
        reason = self.explain_error(error) if isinstance(error, LostError | dist.DistError) else error
        if reason is not None:
            first_line = f"{type(reason).__name__}: {reason}".splitlines()[0]
            text = str(reason) if isinstance(reason, UserError) else first_line
            self._message = f"rank {self._rank} failed: {text[:1000]}"
            if self._ask() and self._keeper == f"rank {self._rank}":
                # The store ends with this process, so let the others read the report first.
                time.sleep(2 * BEAT)
        with self._changed:
            self._end = True
            self._changed.notify_all()
        # The thread may be blocked by the store, so the wait is limited.
        self._thread.join(2 * BEAT)
        if reason is not None and reason is not error:
            raise reason from error

    def explain_error(self, error: RuntimeError) -> TeamError:
        """Explain, with the help of the store, why a collective failed with `error`.  Called by the failing thread."""
        name, seconds = (error.name, error.seconds) if isinstance(error, LostError) else (self._position().name, 0.0)
        # After a lost connection it takes SILENT seconds until the other process is known to be dead.
        end = time.monotonic() + (0.0 if seconds >= self._limit else SILENT + BEAT) + self._read_delay * BEAT
        while (answered := self._ask()) and not self._failure and time.monotonic() < end:
            time.sleep(BEAT)
        if answered and not self._failure:
            answered = self._ask(read=True)
        if self._failure:
            return TeamError(self._failure)
        waited = f"rank {self._rank} waited for others at {name!r}"
        if not answered:
            return TeamError(f"{waited}; {self._about_store()}")
        return TeamError(f"{waited}; {self._missing(SILENT) or f'all are there: {str(error).splitlines()[0]}'}")

    def explain_timeout(self, name: str, seconds: float) -> str:
        """Explain why this process has waited for so long, from its own memory.  Called by the watchdog's thread."""
        reason = self._failure
        if not reason:
            waited = f"rank {self._rank} waited for others at {name!r} for {seconds:.0f} s"
            if name == self._store_wait:
                reason = self._about_store()
            elif self._store_silence():
                reason = f"{waited}; {self._about_store()}"
            else:
                reason = f"{waited}; {missing}" if (missing := self._missing(SILENT)) else waited
        # Reported if the store answers after all.
        self._message = self._message or f"rank {self._rank} failed: {reason}"
        return reason

    def failure(self) -> str:
        """Return the reported failure of another process; "" if none is known."""
        return self._failure

    # The thread

    @property
    def _store_wait(self) -> str:
        return f"the store that {self._keeper} keeps"

    def _run(self) -> None:
        position, since = self._position(), time.monotonic()
        while not self._end:
            if self._position() is not position:
                position, since = self._position(), time.monotonic()
            is_late = time.monotonic() - since > self._limit + self._read_delay * BEAT
            request_number, read = self._asked, self._to_read
            try:
                with waiting(self._store_wait):
                    beat = [*asdict(self._position()).values(), time.monotonic() - self._began]
                    self._store.set(str(self._rank), json.dumps(beat))
                    if self._message:
                        # The first report of all processes counts.
                        self._store.compare_set("failed", "", self._message)
                    if self._store.check(["failed"]):
                        self._failure = self._store.get("failed").decode()
                    if is_late or read or self._waits_long():
                        keys = [str(rank) for rank in range(self._ranks)]
                        # `multi_get` would block until all keys exist.
                        if self._store.check(keys):
                            beats = [json.loads(text) for text in self._store.multi_get(keys)]
                            self._beats = [(Position(*at), when) for *at, when in beats]
                            self._read_at = time.monotonic() - self._began
                        self._to_read = False
            except LostError:
                self._gone = True
            self._update_reason(is_late)
            with self._changed:
                self._answered = request_number
                self._changed.notify_all()
                if self._gone:
                    return
                self._changed.wait_for(lambda: self._end or self._asked > self._answered, BEAT)

    def _update_reason(self, late: bool) -> None:
        """Make the watchdog end this process if others have failed, or are missing although it seems not to wait.

        In a NCCL kernel the device waits, while the process seems to compute. A process without progress for the whole
        limit, while others are behind it or silent, is assumed to wait for them.
        """
        reason = self._failure
        if not reason and self._gone:
            reason = self._about_store()
        elif not reason and late and (missing := self._missing(self._limit)):
            reason = f"rank {self._rank} waited for others at {self._position().name!r}; {missing}"
        # At the end of the run the store may disappear before this process ends, which is not a failure.
        self._watchdog.reason = "" if self._end else reason

    def _waits_long(self) -> bool:
        """Return whether to read all heartbeats again in case the store falls silent. Rarely, since they are many."""
        if self._read_delay:
            return False
        began = min((wait.began for wait in waits.now().values()), default=time.monotonic())
        return time.monotonic() - max(began, self._read_at + self._began) > self._limit / 4

    # Called by other threads

    def _ask(self, read: bool = False) -> bool:
        """Make the thread write to the store and read all heartbeats; returns False without an answer within SILENT."""
        with self._changed:
            if self._gone or self._store_silence() or not self._thread.is_alive():
                return False
            self._to_read = self._to_read or read
            self._asked += 1
            number = self._asked
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._answered >= number, SILENT) and not self._gone

    def _store_silence(self) -> float:
        """Return the seconds for which the store has not answered; 0 if it answers."""
        began_at = (wait.began for wait in waits.now().values() if wait.name == self._store_wait)
        return max((seconds for began in began_at if (seconds := time.monotonic() - began) > SILENT), default=0.0)

    def _about_store(self) -> str:
        if self._gone:
            return f"the store where they meet is gone: {self._keeper} has ended"
        positions = [f"rank {r} at {position.name!r}" for r, (position, _) in enumerate(self._beats) if r != self._rank]
        last = f"; last known: {'; '.join(positions)}" if self._beats else ""
        return (
            f"the store where they meet has not answered for {self._store_silence():.0f} s: {self._keeper}, "
            f"which keeps it, is dead or frozen{last}"
        )

    def _missing(self, silent: float) -> str:
        """Name the ranks that did not arrive here, or have sent no heartbeat for `silent` seconds."""
        now, own_position, missing = self._read_at, self._position(), []
        for rank, (position, when) in enumerate(self._beats):
            same_example = rank in self._sharing()
            if rank == self._rank:
                continue
            if now - when > silent:
                missing.append(
                    f"rank {rank} is dead or frozen: last heard of {now - when:.0f} s ago at {position.name!r}"
                )
            elif position.counts(same_example) < own_position.counts(same_example):
                missing.append(f"rank {rank} did not arrive: it is at {position.name!r}")
        return "; ".join(missing)
