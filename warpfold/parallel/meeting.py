"""How the processes of a job find each other in a store that may hold the words of earlier jobs.

What a process asks of the store does not grow with their number, but for rank 0's one question and one answer: at 2,048
processes a list that each of them reads would be 138 MB of one server's.
"""

import resource
import time
from collections.abc import Sequence
from contextlib import suppress
from uuid import uuid4

import torch.distributed as dist

# Seconds between two looks at the store, first and last.  Of a question that waits there torch would warn when the wait
# ends, after it has asked a name server who that was.
FIRST, LAST = 0.1, 0.5
NAMED = 10  # of those who do not come, and of hosts, in an error
SPARE_FILES = 1024  # that a process may have open besides its connections


def agree_on_name(
    store: dist.Store, rank: int, ranks: int, limit: float, host: str = "", on_host: range = range(0)
) -> str:
    """Agree on a name that no earlier meeting had: rank 0 draws it, and answers when all others have signed.

    Nothing that earlier processes left in the store can be mistaken for it: every process signs with a random word, and
    waits until its own word is answered.  host, on_host: where this process is, and the ranks that should be there.
    Errors: RuntimeError if some do not come within `limit` seconds; it names them, and their hosts if others are there.
    """
    word, end, pause = uuid4().hex, time.monotonic() + limit, FIRST
    sign = f"{word} {on_host.start} {on_host.stop} {host}"
    if rank == 0:
        store.set("warpfold-meeting", word)
        signed = [f"warpfold-{word}-{other}" for other in range(1, ranks)]
        while signed and not store.check(signed):
            if time.monotonic() > end:
                raise RuntimeError(_absent(store, signed, sign))
            time.sleep(FIRST)
        if signed:
            words = [found.decode().split()[0] for found in store.multi_get(signed)]
            store.multi_set([_answer(key) for key in signed], words)  # type: ignore[attr-defined]  # the stub lacks it
        return word
    name = ""
    while time.monotonic() < end:
        if store.check(["warpfold-meeting"]):
            found = store.get("warpfold-meeting").decode()  # perhaps that of an earlier meeting
            key = f"warpfold-{found}-{rank}"
            if found != name:
                store.set(key, sign)
                name = found
            if store.check([_answer(key)]) and store.get(_answer(key)).decode() == word:
                return name
        time.sleep(pause)
        pause = min(1.2 * pause, LAST)
    raise RuntimeError("no word from rank 0")


def _absent(store: dist.Store, signed: Sequence[str], own: str) -> str:
    """Return in words who has not signed, and where those are who have."""
    there = [store.check([key]) for key in signed]
    hosts: dict[int, str] = {}
    for sign in [own, *(store.get(key).decode() for key, came in zip(signed, there) if came)]:
        _, start, stop, host = sign.split(" ", 3)
        hosts |= dict.fromkeys(range(int(start), int(stop)), host)
    absent = [rank for rank, came in enumerate(there, 1) if not came]
    names = [f"{rank} ({hosts[rank]})" if hosts.get(rank) else f"{rank}" for rank in absent]
    says = f"no sign of rank {_first(names)}"
    known = dict.fromkeys(filter(None, hosts.values()))
    return f"{says}; others are on {_first(list(known))}" if known and set(absent) - set(hosts) else says


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


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
