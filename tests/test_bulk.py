"""Bulk work: order, parts, and workers that die."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpfold.bulk import Part, in_order, pool
from warpfold.errors import UserError


def square(number: int) -> int:
    return number * number


def die(number: int) -> int:
    os._exit(1)


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_order_of_the_jobs(workers: int) -> None:
    with pool(workers) as executor:
        assert list(in_order(square, range(20), executor, ahead=3)) == [n * n for n in range(20)]


def test_a_dead_worker_is_the_users_to_know() -> None:
    with pytest.raises(UserError, match="worker process died"), pool(2) as executor:
        list(in_order(die, range(3), executor))


def test_a_cluster_that_is_not_there() -> None:
    with pytest.raises(UserError, match="--cluster"), pool(cluster="nonsense"):
        pass


@given(st.integers(0, 50), st.integers(1, 9))
def test_parts_are_a_partition(jobs: int, count: int) -> None:
    parts = [Part.parse(f"{number + 1}/{count}").of(range(jobs)) for number in range(count)]
    assert sorted(job for part in parts for job in part) == list(range(jobs))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("text", ["", "3", "0/2", "3/2", "a/b", "-1/2", "1/2/3"])
def test_what_is_no_part(text: str) -> None:
    with pytest.raises(UserError, match="--shard"):
        Part.parse(text)
