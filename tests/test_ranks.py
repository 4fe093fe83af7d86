"""Test the harness for ranks: results are in rank order, failures are reported, and nothing hangs."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_ranks


def test_ranks_speak_and_results_come_in_order() -> None:
    here = torch.tensor([3.0, 4.0])

    def function(factor: float) -> tuple[int, torch.Tensor]:
        total = here * (dist.get_rank() + 1) * factor
        dist.all_reduce(total)
        return dist.get_rank(), total

    results = run_ranks(function, 3, 2.0)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(torch.equal(total, here * 12) for _, total in results)


def test_a_failure_is_shown_and_ends_the_others() -> None:
    def function() -> None:
        if dist.get_rank() == 1:
            raise ValueError("what went wrong")
        dist.barrier()

    with pytest.raises(RankError, match=r"rank 1: [^$]*what went wrong"):
        run_ranks(function, 2)


def test_a_dead_rank_is_named() -> None:
    def function() -> None:
        if dist.get_rank() == 1:
            os._exit(7)

    with pytest.raises(RankError, match="rank 1: died with exit code 7"):
        run_ranks(function, 2)


def test_a_hang_has_an_end() -> None:
    with pytest.raises(RankError, match=r"\[0, 1\] did not come back"):
        run_ranks(lambda: time.sleep(30), 2, timeout=1)
