"""What the checks of a cluster say: a line each, and what to do about what is wrong."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

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
