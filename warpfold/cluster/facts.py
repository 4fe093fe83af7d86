"""Facts that each rank reads of itself, and what all judges of them need: who differs, and where they are."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from warpfold.cluster.findings import of_ranks

Facts = dict[str, Any]  # JSON-able, of one rank; all have rank, node, local_rank, per_node, host and kind (of device)


def text_of(path: Path) -> str:
    """Return what a small file of the system says, stripped; "" where there is none, or it may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def names_in(path: Path) -> list[str]:
    """Return the names in a folder, sorted; none where there is no such folder."""
    try:
        return sorted(entry.name for entry in path.iterdir())
    except OSError:
        return []


def number_of(text: str) -> int | None:
    """Return the first whole number in a text, None without one."""
    found = re.search(r"\d+", text)
    return int(found[0]) if found else None


def cores_of(text: str) -> list[int]:
    """Return the cores that the kernel writes as "0-3,8"."""
    cores: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            cores += range(int(first), int(last or first) + 1)
    return sorted(set(cores))


def as_cores(cores: Iterable[int]) -> str:
    """Return cores as the kernel writes them: "0-3,8"."""
    runs: list[list[int]] = []
    for core in sorted(set(cores)):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def several_nodes(facts: Sequence[Facts]) -> bool:
    """Return whether the ranks are on more than one node."""
    return len({one["node"] for one in facts}) > 1


def of_nodes(facts: Sequence[Facts]) -> list[Facts]:
    """Return the facts of the first rank of each node, which has read what its node has."""
    return [one for one in facts if one["local_rank"] == 0]


def on_gpus(facts: Sequence[Facts]) -> bool:
    """Return whether any rank has a GPU."""
    return any(one["kind"] == "cuda" for one in facts)


def who(chosen: Sequence[Facts], facts: Sequence[Facts]) -> str:
    """Return ranks in words, and the hosts that they are on: "rank 3 (gpu-b)", "all 16 ranks"."""
    words = of_ranks((one["rank"] for one in chosen), len(facts))
    hosts = sorted({str(one["host"]) for one in chosen})
    if len(chosen) == len(facts) or len({one["host"] for one in facts}) == 1:
        return words
    return f"{words} ({', '.join(hosts[:4])}{' ...' if len(hosts) > 4 else ''})"


def sides(facts: Sequence[Facts], value: Callable[[Facts], Any]) -> list[tuple[Any, list[Facts]]]:
    """Return each value with those that have it: what most have first, then what the lowest rank has."""
    found: dict[Any, list[Facts]] = {}
    for one in facts:
        found.setdefault(value(one), []).append(one)
    return sorted(found.items(), key=lambda side: -len(side[1]))


def differences(parties: Sequence[tuple[Any, list[Facts]]], facts: Sequence[Facts]) -> str:
    """Return the sides in words: "2.27.5 on ranks 0 to 2, 2.26.2 on rank 3 (gpu-b)"."""
    return ", ".join(f"{value} on {who(having, facts)}" for value, having in parties)
