"""Confidence measures: their ranges, what certainty gives, and that masked residues do not matter."""

import itertools

import pytest
import torch

from warpfold.model import confidence
from warpfold.model.heads import pae_breaks

BREAKS = pae_breaks()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def certain(bins: torch.Tensor, classes: int = 64) -> torch.Tensor:
    """Logits that put all weight on the given bins."""
    return 100.0 * torch.nn.functional.one_hot(bins, classes)


def test_plddt_is_the_centre_of_a_certain_bin_and_50_when_undecided():
    torch.testing.assert_close(confidence.plddt(certain(torch.tensor([0, 49]), 50)), torch.tensor([1.0, 99.0]))
    torch.testing.assert_close(confidence.plddt(torch.zeros(3, 50)), torch.full((3,), 50.0))


def test_padding_does_not_change_ptm():
    logits = torch.randn(30, 30, 64)
    padded = torch.randn(37, 37, 64)
    padded[:30, :30] = logits
    mask = (torch.arange(37) < 30).float()
    torch.testing.assert_close(confidence.ptm(padded, BREAKS, mask), confidence.ptm(logits, BREAKS))


def test_iptm_looks_between_chains_only():
    chain = torch.tensor([1] * 12 + [2] * 10)
    within = chain[:, None] == chain[None, :]
    good_within = certain(torch.where(within, 0, 60))
    good_between = certain(torch.where(within, 60, 0))
    assert confidence.iptm(good_within, BREAKS, chain) < 0.1
    assert confidence.iptm(good_between, BREAKS, chain) > 0.8
    assert confidence.iptm(good_between, BREAKS, torch.ones(22)) == 0


@pytest.mark.parametrize("chains", [(12, 10), (9, 1, 14), (5, 5, 5, 5)])
def test_the_iptm_of_two_chains_is_that_of_the_two_alone(chains):
    chain = torch.cat([torch.full((n,), i) for i, n in enumerate(chains, 1)])
    chain = chain[torch.randperm(len(chain))]  # they need not be neighbours
    logits, mask = 3 * torch.randn(len(chain), len(chain), 64), (torch.rand(len(chain)) > 0.2).float()
    found = confidence.chain_pair_iptm(logits, BREAKS, chain, mask)
    assert torch.equal(found, found.T)
    for a in range(len(chains)):
        one = (chain == a + 1).nonzero()[:, 0]
        alone = confidence.ptm(logits[one][:, one], BREAKS, mask[one])
        torch.testing.assert_close(found[a, a], alone, rtol=0, atol=1e-6)
    for a, b in itertools.combinations(range(len(chains)), 2):
        two = ((chain == a + 1) | (chain == b + 1)).nonzero()[:, 0]
        alone = confidence.iptm(logits[two][:, two], BREAKS, chain[two], mask[two])
        torch.testing.assert_close(found[a, b], alone, rtol=0, atol=1e-6)  # sums of fp32 numbers below 1


def test_chains_that_are_masked_have_no_iptm():
    chain = torch.tensor([1, 1, 2, 2, 0, 0])  # padding has no chain
    found = confidence.chain_pair_iptm(torch.randn(6, 6, 64), BREAKS, chain, (chain == 1).float())
    assert found[0, 0] > 0
    found[0, 0] = 0
    assert torch.equal(found, torch.zeros(2, 2))
