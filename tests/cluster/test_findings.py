"""Findings: names of ranks in words, and a cure for what is wrong."""

import pytest

from warpfold.cluster.findings import ClusterFinding, of_ranks


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0 and 1"),
        ([7, 6, 5, 4], "ranks 4 to 7"),
        ([1, 4, 9], "ranks 1, 4 and 9"),
        ([0, 1, 2, 8, 10, 11, 12], "ranks 0 to 2, 8 and 10 to 12"),
        (range(16), "all 16 ranks"),
    ],
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert of_ranks(ranks, 16) == words


def test_what_is_wrong_has_a_cure() -> None:
    with pytest.raises(ValueError, match="needs a cure"):
        ClusterFinding("links", "latency", "wrong", "rank 3 answers late")
