"""GPU Direct RDMA measured: processes that meet apart from the ranks' own, and what two rates mean."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from warpfold.cluster.direct import free_port, judge_direct, measure_direct, timed_apart
from warpfold.parallel.team import ProcessInfo, Team

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("rate", "without", "outcome"), [(40e9, 12e9, "ok"), (12e9, 12e9, "note"), (8e9, 12e9, "wrong")]
)
def test_what_two_rates_mean(rate: float, without: float, outcome: str) -> None:
    assert judge_direct(rate, without).outcome == outcome


def test_without_a_gpu_nothing_is_measured() -> None:
    (finding,) = measure_direct(Team(), CPU, {}, 1)
    assert (finding.outcome, finding.says) == ("not checked", "no GPU")


@pytest.mark.slow  # three processes that import torch
def test_two_ranks_processes_meet_and_answer() -> None:
    port = free_port()
    ranks = [ProcessInfo(rank, 2, rank, 2, "127.0.0.1", 1) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda process: timed_apart(process, port, CPU, os.environ, 4096), ranks))
    assert all(answer["seconds"] > 0 for answer in answers), answers
    answer = timed_apart(ProcessInfo(0, 1, 0, 1, "127.0.0.1"), free_port(), CPU, os.environ, -8)
    assert "negative" in answer["failed"]
