"""The lower limit of times on a device, compared with independently derived figures, and its parts computed by hand."""

from dataclasses import replace

import pytest
import torch

from warpfold.check.op_profile import OpCase
from warpfold.check.sizes import shapes
from warpfold.cost.rates import Ceilings, ceilings, cost

# Products, bytes and exponentials per second, as the table of limits defines them: 16 per clock and multiprocessor.
A100 = Ceilings(312e12, 2.0e12, 108 * 16 * 1.41e9, "")
H100 = Ceilings(790e12, 3.0e12, 132 * 16 * 1.755e9, "")


@pytest.mark.parametrize(
    ("top", "n", "forward", "backward"),
    [
        (A100, 256, 0.055, 0.096),
        (A100, 384, 0.186, 0.325),
        (A100, 1024, 3.53, 6.17),
        (A100, 2048, 28.2, 49.3),
        (H100, 256, 0.029, 0.045),
        (H100, 1024, 1.86, 2.90),
        (H100, 2048, 14.8, 23.2),
    ],
)
def test_triangle_attention_as_in_the_research(top: Ceilings, n: int, forward: float, backward: float) -> None:
    """Compare with milliseconds in bf16 for 4 heads of 32 channels from an independent estimate."""
    ((name, case),) = shapes("attention", [f"starting:{n}"])
    assert name == f"starting:{n}"
    assert top.limit(cost(case, "forward", 2)) * 1e3 == pytest.approx(forward, rel=0.02)
    assert top.limit(cost(case, "backward", 2)) * 1e3 == pytest.approx(backward, rel=0.02)


def test_norms_are_bytes_alone() -> None:
    """A norm of [256, 256, 128] in bf16 moves 33.6 and 50.3 MB: 7.8 and 11.7 us at the 4.3 TB/s of an H200."""
    ((_, case),) = shapes("layer_norm", ["pair:256"])
    h200 = Ceilings(790e12, 4.3e12, None, "")
    for direction, megabytes, micro in (("forward", 33.6, 7.8), ("backward", 50.3, 11.7)):
        needed = cost(case, direction, 2)
        assert needed.bytes / 1e6 == pytest.approx(megabytes, rel=0.01)
        assert needed.flops == 0
        assert h200.limit(needed) * 1e6 == pytest.approx(micro, rel=0.01)


def test_exponentials_of_a_block() -> None:
    """Row and column attention of a block of 128 x 256 need 67 and 34 million exponentials."""
    for kind, millions in (("row", 67), ("column", 34)):
        ((_, case),) = shapes("attention", [f"{kind}:128x256"])
        assert cost(case, "forward", 2).exps / 1e6 == pytest.approx(millions, rel=0.02)


def test_products_by_hand() -> None:
    tail = OpCase(op="tail", where="", rows=2, length=3, channels=5, outputs=7)
    assert cost(tail, "forward", 4).flops == 2 * 6 * 5 * 7
    assert cost(tail, "backward", 4).flops == 4 * 6 * 5 * 7
    assert cost(tail, "forward", 4).bytes == 6 * (2 * 5 + 2 * 7) * 4
    linear = OpCase(op="norm_linear", where="", rows=2, length=3, channels=5, outputs=7)
    assert cost(linear, "backward", 2).bytes == 6 * (2 * 5 + 7) * 2
    column = OpCase(op="global_attention", where="", rows=2, length=1, keys=11, heads=3, width=4)
    assert cost(column, "forward", 2).flops == 2 * 2 * 2 * 3 * 11 * 4
    assert cost(column, "forward", 2).bytes == (2 * 2 * 3 * 4 + 2 * 2 * 11 * 4) * 2 + 4 * 2 * 11
    assert cost(column, "forward", 2).exps == 2 * 3 * 11


def test_products_of_transitions_and_outer_products() -> None:
    """A block of 128 x 256 with 256 channels needs 34.4 GF for the MSA transition and for the outer product."""
    transition = dict(shapes("transition", ["msa:128x256"]))["msa:128x256"]
    assert cost(transition, "forward", 2).flops / 1e9 == pytest.approx(34.4, rel=0.01)
    assert cost(transition, "forward", 2).bytes == 2 * 128 * 256 * 256 * 2
    assert cost(transition, "backward", 2).flops == 2.5 * cost(transition, "forward", 2).flops
    # One of the two products is twice as large.
    swiglu = replace(transition, gated=True)
    assert cost(swiglu, "forward", 2).flops == 1.5 * cost(transition, "forward", 2).flops
    assert cost(swiglu, "backward", 2).flops == 4 * cost(transition, "forward", 2).flops
    outer = dict(shapes("outer_product", ["msa:128x256"]))["msa:128x256"]
    assert cost(outer, "forward", 2).flops / 1e9 == pytest.approx(34.4, rel=0.03)
    small = OpCase(op="outer_product", where="", rows=2, keys=3, length=5, channels=7, outputs=11)
    assert cost(small, "forward", 4).flops == 2 * 2 * 3 * 49 * (5 + 11)
    assert cost(small, "backward", 4).flops == 2 * 2 * 3 * 49 * (15 + 22)
    assert cost(small, "forward", 4).bytes == (5 * 5 * 7 + 6 * 11) * 4


def test_what_is_slowest_sets_the_limit() -> None:
    gate = OpCase(op="gate", where="", rows=1, length=1000, channels=10)
    needed = cost(gate, "forward", 4)
    assert Ceilings(1e12, 1e9, 1e12, "").limit(needed) == pytest.approx(1.2e-4)
    assert Ceilings(1e12, 1e18, 1e6, "").limit(needed) == pytest.approx(1e-2)
    assert Ceilings(1e12, 1e18, None, "").limit(needed) < 1e-9


def test_ceilings_are_measured_here() -> None:
    top = ceilings(torch.device("cpu"), torch.float32)
    assert 1e8 < top.flops < 1e14
    assert 1e8 < top.bytes < 1e12
    assert top.exps is not None
    assert 1e6 < top.exps < 1e12
    assert "measured" in top.how
