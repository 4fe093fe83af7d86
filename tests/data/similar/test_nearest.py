"""Compute the identity to the most similar of some sequences."""

import numpy as np
import pytest

from warpfold.data.similar.relatives import nearest_identities

LETTERS = np.array(list("ACDEFGHIKLMNPQRSTVWY"))


def made(random: np.random.Generator, length: int) -> str:
    return "".join(random.choice(LETTERS, length))


def test_identities_are_those_that_were_made() -> None:
    random = np.random.default_rng(0)
    known = [made(random, 150) for _ in range(50)]
    mutated = "".join(made(random, 1) if random.random() < 0.3 else letter for letter in known[5])
    same = sum(a == b for a, b in zip(mutated, known[5])) / 150
    cut = known[7][:70] + known[7][90:]
    half = known[9][:75] + made(random, 75)
    identities = nearest_identities([known[3], mutated, cut, half, made(random, 150), known[11][20:29]], known)
    assert identities[0] == 1
    assert identities[1] == pytest.approx(same, abs=0.03)
    assert identities[2] == pytest.approx(1, abs=0.03)
    assert identities[3] == pytest.approx(0.5, abs=0.1)
    assert identities[4] < 0.3
    assert identities[5] == 1  # too short for an E-value, but contained
    assert nearest_identities(["ACDEFGH"], []) == [0]
