"""What the checks of a cluster say, and the tables they go by: what is looked at, what is wrong with it, the cure."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Facts = dict[str, Any]  # what is known of one that is judged: JSON-able; of a rank, its number and host are among it
NAMED = 4  # hosts that a sentence names
SAID = 8  # findings of one kind, at most; --json has the figures of all
# A speed below WRONG of what is usual is wrong, one below NOTE worth a note.  Where healthy speeds differ by up to
# 30 % either way, none is below 0.7 / 1.3 = 0.54 of the usual one, so none is called wrong; and what is three times too
# slow is below 1.3 / 3 / 0.7 = 0.62, so all of it is named.
WRONG, NOTE = 0.5, 0.65

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


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Group whole numbers into runs of consecutive ones: the first and the last of each."""
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


def of_ranks(ranks: Iterable[int], all_ranks: int) -> str:
    """Name ranks in words: "rank 3", "ranks 0 to 7", "ranks 1, 4 and 9", "all 16 ranks"."""
    found = set(ranks)
    if len(found) == all_ranks and all_ranks > 1:
        return f"all {all_ranks} ranks"
    words = []
    for first, last in runs(found):
        words += [f"{first} to {last}"] if last > first + 1 else [str(rank) for rank in range(first, last + 1)]
    if len(words) > 8:
        words = [*words[:6], f"{len(words) - 6} more runs of ranks"]
    together = " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
    return f"{'rank' if len(found) == 1 else 'ranks'} {together}"


def who(some: Sequence[Facts], ranks: Sequence[Facts]) -> str:
    """Name ranks in words, and the hosts that they are on: "rank 3 (gpu-b)", "all 16 ranks"."""
    words = of_ranks((x.get("rank", 0) for x in some), len(ranks))
    if len({x.get("rank") for x in some}) == len(ranks) or len({x.get("host") for x in ranks}) <= 1:
        return words
    return f"{words} ({_hosts(some)})"


def _hosts(some: Sequence[Facts]) -> str:
    hosts = sorted({str(x.get("host")) for x in some})
    return ", ".join(hosts[:NAMED]) + (f" and {len(hosts) - NAMED} more" if len(hosts) > NAMED else "")


def of_usual(values: Sequence[float]) -> list[float]:
    """Divide each value by what is usual: the median, of an even count the higher of the two in the middle."""
    usual = statistics.median_high(values)
    return [value / usual for value in values]


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


def graded(
    check: str,
    of: str,
    figure: Callable[[Facts], float],
    wrong: float,
    note: float,
    says: str,
    cure: str,
    worst: Callable[[Facts], Any] = lambda x: 0,
    each: Callable[[Facts], Any] = lambda x: None,
) -> tuple[Fault, Fault]:
    """Judge a figure by two bounds: above `wrong` it is wrong, above `note` worth a note."""
    return (
        Fault(check, of, lambda x: figure(x) > wrong, says, cure, "wrong", "", worst, each),
        Fault(check, of, lambda x: note < figure(x) <= wrong, says, cure, "note", "", worst, each, also=True),
    )


@dataclass(frozen=True)
class Fine:
    """What is said of a check that found nothing: `ok`, or why it could not be made of some of a kind."""

    check: str
    of: str
    ok: str  # {n}: how many; {x}: the first
    unknown: Callable[[Facts], Any] = lambda x: False
    why: str = ""


def judge(
    topic: Topic, known: Mapping[str, Sequence[Facts]], faults: Sequence[Fault], fine: Sequence[Fine] = ()
) -> list[ClusterFinding]:
    """Judge those that are known, by kind, with a table: what hurts, then what is said of checks that found nothing.

    Of one check the first fault counts, and those that are judged beside it; ranks are known as "ranks".
    """
    found: list[ClusterFinding] = []
    for fault in faults:
        if not fault.also and any(one.check == fault.check for one in found):
            continue
        hurt = [x for x in known[fault.of] if fault.hurts(x)]
        values = list(dict.fromkeys(map(fault.each, hurt)))
        for value in values[:SAID]:
            some = [x for x in hurt if fault.each(x) == value]
            said = {"x": min(some, key=fault.worst), "n": len(some), "at": _hosts(some)}
            said["who"] = who(some, known.get("ranks", ()))
            says, cure, line = (text.format(**said) for text in (fault.says, fault.cure, fault.line))
            found.append(ClusterFinding(topic, fault.check, fault.outcome, says, cure, line))
        if len(values) > SAID:
            says = f"{len(values) - SAID} more like these (--json has all figures)"
            found.append(ClusterFinding(topic, fault.check, "note", says))
    judged = {one.check for one in found}
    for row in fine:
        if row.check not in judged and (some := list(known[row.of])):
            unknown = any(map(row.unknown, some))
            says = row.why if unknown else row.ok.format(n=len(some), x=some[0])
            found.append(ClusterFinding(topic, row.check, "not checked" if unknown else "ok", says))
    return found
