"""How the processes of a job find each other in a store that may hold the words of earlier jobs.

What a process asks of the store does not grow with their number, but for rank 0's one question and one answer: at 2,048
processes a list that each of them reads would be 138 MB of one server's.
"""

import resource
import time
from contextlib import suppress
from uuid import uuid4

import torch.distributed as dist

# Seconds between two looks at the store, first and last.  Of a question that waits there torch would warn when the wait
# ends, after it has asked a name server who that was.
FIRST, LAST = 0.1, 0.5
SPARE_FILES = 1024  # that a process may have open besides its connections


def agree_on_name(store: dist.Store, rank: int, ranks: int, limit: float) -> str:
    """Agree on a name that no earlier meeting had: rank 0 draws it, and answers when all others have signed.

    Nothing that earlier processes left in the store can be mistaken for it: every process signs with a random word, and
    waits until its own word is answered.
    Errors: RuntimeError if some do not come within `limit` seconds.
    """
    word, end, pause = uuid4().hex, time.monotonic() + limit, FIRST
    if rank == 0:
        store.set("warpfold-meeting", word)
        signed = [f"warpfold-{word}-{other}" for other in range(1, ranks)]
        while signed and not store.check(signed):
            if time.monotonic() > end:
                missing = [str(other) for other, key in enumerate(signed, 1) if not store.check([key])]
                more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
                raise RuntimeError(f"no sign of rank {', '.join(missing[:10])}{more}")
            time.sleep(FIRST)
        if signed:
            words = [word.decode() for word in store.multi_get(signed)]
            store.multi_set([_answer(key) for key in signed], words)  # type: ignore[attr-defined]  # the stub lacks it
        return word
    name = ""
    while time.monotonic() < end:
        if store.check(["warpfold-meeting"]):
            found = store.get("warpfold-meeting").decode()  # perhaps that of an earlier meeting
            key = f"warpfold-{found}-{rank}"
            if found != name:
                store.set(key, word)
                name = found
            if store.check([_answer(key)]) and store.get(_answer(key)).decode() == word:
                return name
        time.sleep(pause)
        pause = min(1.2 * pause, LAST)
    raise RuntimeError("no word from rank 0")


def _answer(key: str) -> str:
    return f"{key}-answer"


def allow_connections(ranks: int) -> None:
    """Raise this process's soft limit of open files, often 1,024, to what a connection to each of `ranks` ranks needs.

    Two groups may hold all ranks.  Where the hard limit is lower, that is taken: `warpfold doctor --cluster` says so.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * ranks + SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # a system that allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
