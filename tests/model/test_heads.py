"""The heads: shapes, symmetry, fp32 logits whatever the trunk runs in, and an undecided start."""

import pytest
import torch

from warpfold.model.heads import (
    DistogramHead,
    LogitsHead,
    PLDDTHead,
    distogram_breaks,
    pae_breaks,
)

HEADS = [
    (DistogramHead(8, 64), (5, 5, 8), (5, 5, 64)),
    (LogitsHead(8, 23), (3, 5, 8), (3, 5, 23)),
    (PLDDTHead(8, 16, 50), (5, 8), (5, 50)),
    (LogitsHead(8, 37), (5, 8), (5, 37)),
    (LogitsHead(8, 64), (5, 5, 8), (5, 5, 64)),
]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def shaken(head: torch.nn.Module) -> torch.nn.Module:
    """The head with random parameters, since the last layers start as zeros."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return head


@pytest.mark.parametrize(("head", "shape", "expected"), HEADS)
def test_logits_have_their_shape_and_are_fp32_even_from_bf16(head, shape, expected):
    for dtype in (torch.float32, torch.bfloat16):
        logits = head(torch.randn(shape, dtype=dtype))
        assert logits.shape == expected
        assert logits.dtype == torch.float32


@pytest.mark.parametrize(("head", "shape", "expected"), HEADS)
def test_an_untrained_head_is_undecided(head, shape, expected):
    fresh = type(head)(8, expected[-1])
    assert not fresh(torch.randn(shape)).any()


def test_the_distogram_is_symmetric_and_the_aligned_error_is_not():
    z = torch.randn(5, 5, 8)
    distogram, pae = shaken(DistogramHead(8))(z), shaken(LogitsHead(8, 64))(z)
    torch.testing.assert_close(distogram, distogram.transpose(0, 1))
    assert not torch.allclose(pae, pae.transpose(0, 1))


def test_plddt_head_ignores_the_scale_of_its_input():
    head, s = shaken(PLDDTHead(8)), 10 * torch.randn(5, 8)
    torch.testing.assert_close(head(s), head(100 * s), rtol=1e-3, atol=1e-3)


def test_breaks_are_the_papers():
    distances, errors = distogram_breaks(), pae_breaks()
    assert len(distances) == len(errors) == 63
    torch.testing.assert_close(distances.diff(), torch.full((62,), 0.3125))  # 2.3125 to 21.6875 angstrom
    torch.testing.assert_close(errors.diff(), torch.full((62,), 0.5))  # 0 to 31 angstrom
    assert distances[0] == 2.3125
    assert errors[-1] == 31.0
