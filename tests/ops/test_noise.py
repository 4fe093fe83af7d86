"""Dropout noise has the right rate, is the same for every split, and differs between steps, passes and layers."""

import hashlib

import pytest
import torch

from warpfold.check.checks import answer, wrong
from warpfold.ops.linear import gated_linear_residual
from warpfold.ops.noise import DropoutFactors, Noise, dropout


def drawn(factors):
    return factors.draw() if isinstance(factors, DropoutFactors) else factors


def draw(noise, stream=0, shape=(64, 512), rate=0.25):
    return drawn(noise.factors(shape, rate, stream, torch.empty(())))


def test_rate_and_scale():
    noise = Noise()
    noise.seed(1, 2)
    kept = draw(noise)
    assert kept.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert abs((kept == 0).float().mean() - 0.25) < 0.01
    # There are no stripes: every row and column is dropped at about the rate.
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
    """Draws are bitwise stable, so that old runs can be continued.  The values are from commit d722388."""
    noise = Noise()
    noise.seed(11, 22)
    noise.at_pass(3)
    first = [12839293, 10508285, 6125165, 14146466, 7950909, 11150018, 8014968, 2295836]  # / 2^24: uniform in [0, 1)
    for i, number in enumerate(first):
        assert draw(noise, 5000, (8,), (number + 1) / 2**24)[i] == 0
        assert draw(noise, 5000, (8,), number / 2**24)[i] > 0
    for dtype, scale in ((torch.float32, 1.1764705181121826), (torch.bfloat16, 1.1796875)):
        kept = drawn(noise.factors((301, 257), 0.15, 123_000, torch.empty((), dtype=dtype)))
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


def test_dropout_scales_what_it_keeps_and_does_nothing_in_eval():
    noise = Noise()
    noise.seed(4)
    x = torch.ones(5, 6, 7)
    assert dropout(x, 0.5, noise, 0, training=True).unique().tolist() == [0, 2]
    assert torch.equal(dropout(x, 0.5, noise, 0, training=False), x)


def factors(shape=(4, 1, 6), dtype=torch.float64):
    noise = Noise()
    noise.seed(2)
    found = noise.factors(shape, 0.4, 1000, torch.empty((), dtype=dtype))
    assert isinstance(found, DropoutFactors)
    return found


def test_slices_are_slices_of_the_whole():
    whole = factors((4, 5, 6))
    for axis, start, length in ((0, 1, 2), (-2, 3, 2), (2, 0, 5)):
        assert torch.equal(whole.narrow(axis, start, length).draw(), whole.draw().narrow(axis, start, length))
        turned = whole.narrow(axis, start, length).transpose(-3, -2)
        assert torch.equal(turned.draw(), whole.draw().narrow(axis, start, length).transpose(-3, -2))
        assert turned.shape == tuple(turned.draw().shape)


def residual_arguments(n=3):
    torch.manual_seed(0)
    shapes = ((4, n, 6), (4, n, 8), (4, n, 8), (6, 8), (6,))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("shape", [(3, 1), (6,)])
def test_factors_may_have_fewer_axes(shape):
    given, part, grad = residual_arguments(), factors(shape), torch.randn(4, 3, 6, dtype=torch.float64)
    ours = answer(gated_linear_residual.fast, [*given, part], grad)
    assert not wrong(gated_linear_residual.definition, [*given, part], grad, ours)


def test_a_new_key_does_not_recompile():
    """Neither does a new pass, and the graph has no break."""
    torch._dynamo.reset()
    noise, given = Noise(), residual_arguments()
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=backend, dynamic=False)
    def run(*args):
        return gated_linear_residual.fast(*args, noise.factors((4, 1, 6), 0.4, 1000, args[0]))

    outs = []
    for seed, index in ((1, 0), (2, 0), (2, 1)):
        noise.seed(seed)
        noise.at_pass(index)
        outs.append(run(*given))
        assert torch.equal(outs[-1], gated_linear_residual.fast(*given, noise.factors((4, 1, 6), 0.4, 1000, given[0])))
    assert len(compiled) == 1
    assert not torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[1], outs[2])


def test_a_key_that_was_used_stays_what_it_was():
    """With a new key before the backward pass of the old one, each graph has its own."""
    noise, given = Noise(), residual_arguments()
    noise.seed(1)
    first = noise.factors((4, 1, 6), 0.4, 1000, given[0])
    drawn, grad = first.draw(), torch.ones_like(given[0])
    out = gated_linear_residual.fast(*given, first)
    noise.at_pass(1)
    noise.seed(3)
    ours = [out, *torch.autograd.grad(out, given, grad)]
    assert not wrong(gated_linear_residual.definition, [*given, drawn], grad, ours)


def test_the_key_moves_with_the_model_and_each_model_has_its_own():
    class Layer(torch.nn.Module):
        def __init__(self, noise):
            super().__init__()
            self.noise = noise

    noise, other = Noise(), Noise()
    model = torch.nn.Sequential(Layer(noise), Layer(noise))
    noise.seed(1)
    other.seed(2)
    assert not torch.equal(noise.key, other.key)
    model.to("meta", torch.bfloat16)
    assert noise.key.is_meta
    assert noise.key.dtype == torch.int64
    noise.seed(3)
    noise.at_pass(1)
    assert noise.key.is_meta
    assert not other.key.is_meta
    assert not model.state_dict(), "a checkpoint does not hold it"
