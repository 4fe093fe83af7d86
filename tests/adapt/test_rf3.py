"""Blocks of RoseTTAFold3's Pairformer as a whole, by its own code and by ours: outputs, gradients, under autocast.

./dev adapters rf3
"""

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.adapt.test_boltz import distances
from warpfold.adapt.accelerate import accelerate, acceleration
from warpfold.adapt.verify import StaysDouble, redrawn
from warpfold.ops.dispatch import always_fast

pytest.importorskip("rf3", reason="rf3 is not installed: ./dev adapters rf3")

N, C_S, C_Z = 19, 48, 32
OF_PAIRS = {"triangle_multiplication", "gated_attention", "transition"}


def block(c_s: int) -> nn.Module:
    layers: Any = importlib.import_module("rf3.model.layers.pairformer_layers")
    triangles = {"triangle_multiplication": {"d_hidden": C_Z}, "triangle_attention": {"n_head": 2, "d_hidden": 8}}
    made = layers.PairformerBlock(c_s, C_Z, 0.0, **triangles, attention_pair_bias={"n_head": 2})
    return redrawn(made, 0).eval()


def results(module: nn.Module, c_s: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the outputs, and the gradients of parameters and inputs."""
    generator = torch.Generator().manual_seed(0)
    s, z, *grads = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((N, C_S), (N, N, C_Z)) * 2)
    inputs = {"s": s, "z": z} if c_s else {"z": z}
    outputs = module(s.requires_grad_() if c_s else None, z.requires_grad_())
    pairs = [(x, g) for x, g in zip(outputs, grads) if x is not None]
    wanted = {**inputs, **dict(module.named_parameters())}
    found = torch.autograd.grad(sum((x * g).sum() for x, g in pairs), list(wanted.values()), allow_unused=True)
    made = {f"output {i}": x.detach() for i, (x, _) in enumerate(pairs)}
    return made | {name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(wanted.items(), found)}


def test_pairs_are_the_same() -> None:
    theirs = block(0)
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    assert {kind.operation for kind in acceleration(ours).swapped} == OF_PAIRS
    with StaysDouble():
        truth = results(copy.deepcopy(theirs).double(), 0, torch.float64)
    with always_fast():
        found = results(ours, 0)
    assert not {key: error for key, error in distances(found, truth) if error > 2e-5}


def test_all_of_it_is_as_near_under_autocast() -> None:
    """The sequence too, whose attention their own code computes in bf16."""
    theirs = block(C_S)
    ours, exact = copy.deepcopy(theirs), copy.deepcopy(theirs).double()
    accelerate(ours)
    assert {kind.operation for kind in acceleration(ours).swapped} == OF_PAIRS | {"attention_pair_bias"}
    exact.attention_pair_bias.force_bfloat16 = False  # type: ignore[union-attr]
    with StaysDouble():
        truth = results(exact, C_S, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        by_them = dict(distances(results(theirs, C_S), truth))
        with always_fast():
            by_us = dict(distances(results(ours, C_S), truth))
    assert max(by_us.values()) < 2 * max(by_them.values())
    assert not {key: error for key, error in by_us.items() if error > max(4 * by_them[key], 2e-2)}


@pytest.mark.parametrize("name", ["tri_attn_start", "z_transition"])
def test_what_is_checkpointed_keeps_its_input_alone(name: str) -> None:
    theirs = block(0)
    ours = accelerate(copy.deepcopy(theirs), verify=False)
    z = torch.randn(1, N, N, C_Z, requires_grad=True)
    for model in (theirs, ours):
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            y = getattr(model, name)(z)
        assert sum(x.numel() for x in kept) <= 2 * z.numel()
        y.sum().backward()
