"""What the checks of a cluster say, and the rules that they go by: rows of tables, and the loop that judges by them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Facts = dict[str, Any]  # what is known of one that is judged: JSON-able; its rank and host, and more
NAMED = 4  # hosts that a sentence names

Topic = Literal["software", "rdma", "links", "ranks", "files"]
# note: nothing is wrong, but it should be known.  not checked: what it needs is not here, as `says` tells.
Outcome = Literal["ok", "note", "wrong", "not checked"]


@dataclass(frozen=True)
class ClusterFinding:
    """What one check found: `says` in one sentence, which names ranks and figures; `cure`: what to do about it.

    line: of shell, that cures it in a job's script, as "unset NCCL_P2P_DISABLE", where one can.
    """

    topic: Topic
    check: str  # "NCCL's version"
    outcome: Outcome
    says: str  # "2.27.5 on all 4 ranks"
    cure: str = ""
    line: str = ""

    def __post_init__(self) -> None:
        if (self.outcome == "wrong") and not self.cure:
            raise ValueError(f"{self.check}: what is wrong needs a cure")


def of_ranks(ranks: Iterable[int], all_ranks: int) -> str:
    """Return ranks in words: "rank 3", "ranks 0 to 7", "ranks 1, 4 and 9", "all 16 ranks"."""
    found = sorted(set(ranks))
    if len(found) == all_ranks and all_ranks > 1:
        return f"all {all_ranks} ranks"
    if len(found) == 1:
        return f"rank {found[0]}"
    runs: list[list[int]] = []
    for rank in found:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = []
    for run in runs:
        words += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    if len(words) > 8:
        words = [*words[:6], f"{len(words) - 6} more runs of ranks"]
    return "ranks " + (" and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0])


def who(some: Sequence[Facts], ranks: Sequence[Facts]) -> str:
    """Return ranks in words, and the hosts that they are on: "rank 3 (gpu-b)", "all 16 ranks"."""
    words = of_ranks((x["rank"] for x in some), len(ranks))
    if len({x["rank"] for x in some}) == len(ranks) or len({x["host"] for x in ranks}) == 1:
        return words
    return f"{words} ({hosts_of(some)})"


def hosts_of(some: Sequence[Facts]) -> str:
    """Return hosts in words: some of them by name."""
    hosts = sorted({str(x["host"]) for x in some})
    return ", ".join(hosts[:NAMED]) + (f" and {len(hosts) - NAMED} more" if len(hosts) > NAMED else "")


def sides(some: Sequence[Facts], value: Callable[[Facts], Any]) -> list[tuple[Any, list[Any]]]:
    """Return each value with those that have it: what most have first, then what the lowest rank has."""
    found: dict[Any, list[Any]] = {}
    for x in some:
        found.setdefault(value(x), []).append(x)
    return sorted(found.items(), key=lambda side: -len(side[1]))


# ---- rules


@dataclass(frozen=True)
class Fault:
    """What hurts those of a kind for which `hurts` is true: what is said of them, how bad it is, and the cure.

    says, cure, line: may name {who} they are, the hosts that they are {at}, how many (`n`), and the facts of one: {x},
    the least by `worst`, or the first.  each: faults of another such value are said apart.
    also: judged though one before it of the same check was found.
    """

    check: str
    of: str
    hurts: Callable[[Facts], Any]
    says: str
    cure: str = ""
    outcome: Outcome = "wrong"
    line: str = ""
    worst: Callable[[Facts], Any] = lambda x: 0
    each: Callable[[Facts], Any] = lambda x: None
    also: bool = False


@dataclass(frozen=True)
class Fine:
    """What is said of a check that found nothing: `ok`, or why it could not be made of some of a kind."""

    check: str
    of: str
    ok: str  # {n}: how many; {x}: the first
    unknown: Callable[[Facts], Any] = lambda x: False
    why: str = ""
    topic: Topic = "software"


def judge(faults: Sequence[Fault], known: Mapping[str, Sequence[Facts]], topic: Topic) -> list[ClusterFinding]:
    """Return what hurts, by a table, of those that are known by kind; ranks are known as "ranks".

    Of one check the first fault counts, and those that are judged beside it.
    """
    found: list[ClusterFinding] = []
    for fault in faults:
        if not fault.also and any(one.check == fault.check for one in found):
            continue
        hurt = [x for x in known[fault.of] if fault.hurts(x)]
        for value in dict.fromkeys(map(fault.each, hurt)):
            some = [x for x in hurt if fault.each(x) == value]
            said = {
                "x": min(some, key=fault.worst),
                "n": len(some),
                "at": hosts_of(some),
                "who": who(some, known["ranks"]),
            }
            says, cure, line = (text.format(**said) for text in (fault.says, fault.cure, fault.line))
            found.append(ClusterFinding(topic, fault.check, fault.outcome, says, cure, line))
    return found


def all_fine(
    table: Sequence[Fine], known: Mapping[str, Sequence[Facts]], found: Sequence[ClusterFinding]
) -> list[ClusterFinding]:
    """Return what is said of the checks that found nothing."""
    fine, judged = [], {one.check for one in found}
    for row in table:
        if row.check not in judged and (some := known[row.of]):
            outcome: Outcome = "not checked" if any(map(row.unknown, some)) else "ok"
            says = row.why if outcome == "not checked" else row.ok.format(n=len(some), x=some[0])
            fine.append(ClusterFinding(row.topic, row.check, outcome, says))
    return fine
