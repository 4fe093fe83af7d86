"""Confidence measures: their ranges, their values for certain logits, and independence of masked residues."""

import itertools

import pytest
import torch

from warpfold.model import confidence


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def certain(bins: torch.Tensor, classes: int = 64) -> torch.Tensor:
    """Build logits with all weight on these bins."""
    return 100.0 * torch.nn.functional.one_hot(bins, classes)


def errors_of(logits: torch.Tensor, chain: torch.Tensor) -> confidence.Errors:
    return confidence.predicted_errors(torch.nn.Identity(), logits, asym_id=chain)


def test_plddt_is_the_centre_of_a_certain_bin_and_50_when_undecided():
    torch.testing.assert_close(confidence.plddt(certain(torch.tensor([0, 49]), 50)), torch.tensor([1.0, 99.0]))
    torch.testing.assert_close(confidence.plddt(torch.zeros(3, 50)), torch.full((3,), 50.0))


def test_iptm_looks_between_chains_only():
    chain = torch.tensor([1] * 12 + [2] * 10)
    within = chain[:, None] == chain[None, :]
    good_within = certain(torch.where(within, 0, 60))
    good_between = certain(torch.where(within, 60, 0))
    assert errors_of(good_within, chain).iptm < 0.1
    assert errors_of(good_between, chain).iptm > 0.8
    assert errors_of(good_between, torch.ones(22, dtype=torch.long)).iptm == 0


@pytest.mark.parametrize("chains", [(12, 10), (9, 1, 14), (5, 5, 5, 5)])
def test_the_iptm_of_two_chains_is_that_of_the_two_alone(chains):
    chain = torch.cat([torch.full((n,), i) for i, n in enumerate(chains, 1)])
    chain = chain[torch.randperm(len(chain))]  # they need not be neighbours
    logits = 3 * torch.randn(len(chain), len(chain), 64)
    found = errors_of(logits, chain).chain_pair_iptm
    assert torch.equal(found, found.T)
    for a in range(len(chains)):
        one = (chain == a + 1).nonzero()[:, 0]
        alone = errors_of(logits[one][:, one], torch.ones_like(one)).ptm
        assert float(found[a, a]) == pytest.approx(alone, abs=1e-6)
    for a, b in itertools.combinations(range(len(chains)), 2):
        two = ((chain == a + 1) | (chain == b + 1)).nonzero()[:, 0]
        alone = errors_of(logits[two][:, two], torch.where(chain[two] == a + 1, 1, 2)).iptm
        assert float(found[a, b]) == pytest.approx(alone, abs=1e-6)  # sums of fp32 numbers below 1
