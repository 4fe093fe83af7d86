"""The dropout noise: the right rate, the same for every cut, another for every step, pass and layer."""

import hashlib

import pytest
import torch

from warpfold.ops.noise import Noise, dropout


def draw(noise, stream=0, shape=(64, 512), rate=0.25):
    return noise.keep(shape, rate, stream, torch.empty(()))


def test_rate_and_scale():
    noise = Noise()
    noise.seed(1, 2)
    kept = draw(noise)
    assert kept.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert abs((kept == 0).float().mean() - 0.25) < 0.01
    # no stripes: every row and column is dropped at about the rate
    assert ((kept == 0).float().mean(0) - 0.25).abs().max() < 0.3
    assert ((kept == 0).float().mean(1) - 0.25).abs().max() < 0.1


def test_the_key_decides():
    a, b = Noise(), Noise()
    a.seed(1, 2)
    b.seed(1, 2)
    torch.manual_seed(5)
    assert torch.equal(draw(a), draw(b))
    assert not torch.equal(draw(a, stream=0), draw(a, stream=1))
    b.at_pass(1)
    assert not torch.equal(draw(a), draw(b))
    b.seed(1, 3)
    b.at_pass(0)
    assert not torch.equal(draw(a), draw(b))


def test_the_numbers_are_those_of_2026():
    """Bit for bit: runs that were begun go on, whatever computes the draw.  Made with the code of d722388."""
    noise = Noise()
    noise.seed(11, 22)
    noise.at_pass(3)
    first = [12839293, 10508285, 6125165, 14146466, 7950909, 11150018, 8014968, 2295836]  # / 2^24: uniform in [0, 1)
    for i, number in enumerate(first):
        assert draw(noise, 5000, (8,), (number + 1) / 2**24)[i] == 0
        assert draw(noise, 5000, (8,), number / 2**24)[i] > 0
    for dtype, scale in ((torch.float32, 1.1764705181121826), (torch.bfloat16, 1.1796875)):
        kept = noise.keep((301, 257), 0.15, 123_000, torch.empty((), dtype=dtype))
        assert kept.dtype == dtype
        assert kept.unique().tolist() == [0.0, scale]
        found = hashlib.sha256((kept != 0).to(torch.uint8).numpy().tobytes()).hexdigest()
        assert found == "bb673487a184b7553c9c50f33156884b2ef5670f3db8cecbefb5ffb1e82404be"


def test_streams_are_uncorrelated():
    noise = Noise()
    noise.seed(9)
    a, b = (draw(noise, stream=s).flatten() for s in (1000, 2000))
    assert abs(torch.corrcoef(torch.stack((a, b)))[0, 1]) < 0.02


def test_unseeded_falls_back_on_torch():
    noise = Noise()
    torch.manual_seed(0)
    first = draw(noise)
    torch.manual_seed(0)
    assert torch.equal(first, draw(noise))


def test_dropout_shares_an_axis_and_does_nothing_in_eval():
    noise = Noise()
    noise.seed(4)
    x = torch.ones(5, 6, 7)
    y = dropout(x, 0.5, noise, 0, training=True, shared_axis=-2)
    assert torch.equal(y, y[:, :1].expand_as(y))
    assert torch.equal(dropout(x, 0.5, noise, 0, training=False), x)
