"""OpenFold3's stacks as a whole, small and with random weights: before and after `accelerate`."""

import copy
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from warpfold.adapt.accelerate import accelerate, acceleration
from warpfold.adapt.verify import redrawn

pytest.importorskip("openfold3", reason="openfold3 is not installed: ./dev adapters openfold3")

PAIR: dict[str, Any] = {"c_z": 16, "c_hidden_mul": 16, "c_hidden_pair_att": 8, "no_heads_pair": 2, "no_blocks": 2}
PAIR |= {"transition_n": 2, "pair_dropout": 0.25, "fuse_projection_weights": False, "blocks_per_ckpt": None, "inf": 1e9}
MSA: dict[str, Any] = PAIR | {"c_m": 24, "c_hidden_msa_att": 8, "c_hidden_opm": 5, "no_heads_msa": 3, "eps": 1e-3}
MSA |= {"msa_dropout": 0.15, "opm_first": True}
N, S = 19, 6
# Sums of some hundred terms, a few tens one after another, each rounded to 2^-24 of it; gradients alike.
CLOSE = 1e-5


def stack(file: str, name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    made: nn.Module = getattr(import_module(f"openfold3.core.model.latent.{file}"), name)(**settings)
    return redrawn(made.eval(), 0)


def pairformer() -> Any:
    settings = PAIR | {"c_s": 32, "c_hidden_pair_bias": 8, "no_heads_pair_bias": 4, "transition_type": "swiglu"}
    return stack("pairformer", "PairFormerStack", **settings)


def msa_module() -> Any:
    return stack("msa_module", "MSAModuleStack", **MSA, transition_type="swiglu")


def evoformer(fused: bool = False) -> Any:
    settings = MSA | {"c_s": 20, "no_column_attention": False, "opm_first": False, "fuse_projection_weights": fused}
    return stack("evoformer", "EvoformerStack", **settings, transition_type="relu")


def of_multimer() -> Any:
    return evoformer(fused=True)


STACKS: list[Callable[[], Any]] = [pairformer, msa_module, evoformer, of_multimer]
each_stack = pytest.mark.parametrize("make", STACKS)


def inputs(make: Callable[[], Any], like: Tensor) -> tuple[list[Tensor], dict[str, Any]]:
    """Return the states, and the masks, of residues of which the last two are padding."""
    generator = torch.Generator().manual_seed(1)
    there = (torch.arange(N) < N - 2).to(like)
    pairs, z = there[:, None] * there, torch.randn(1, N, N, 16, generator=generator).to(like)
    if make is pairformer:
        s = torch.randn(1, N, 32, generator=generator).to(like)
        return [s, z], {"single_mask": there[None], "pair_mask": pairs[None], "chunk_size": None}
    m = torch.randn(1, S, N, 24, generator=generator).to(like)
    return [m, z], {"msa_mask": there.expand(1, S, N), "pair_mask": pairs[None], "chunk_size": None}


def valid(outputs: Any) -> list[Tensor]:
    """Return what the outputs [1, ..., N, c] hold of residues, or pairs of them, that are there."""
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    rows = [x[:, : N - 2] if x.shape[1:3] == (N, N) else x for x in outputs]
    return [x[..., : N - 2, :] for x in rows]


def both(make: Callable[[], Any], dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return a stack, and a copy of it that is accelerated."""
    theirs = make().to(dtype)
    return theirs, accelerate(copy.deepcopy(theirs))


def assert_near(ours: list[Tensor], theirs: list[Tensor], bound: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert b.isfinite().all()
        assert float((a.double() - b.double()).abs().max()) <= bound * float(b.abs().max())


@each_stack
def test_all_layers_are_swapped(make: Callable[[], Any]) -> None:
    theirs, ours = both(make)
    left = {kind.of_class for kind in acceleration(ours).left}
    assert left <= {"Linear"}  # of the single representation that the Evoformer makes
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(torch.equal(x, y) for x, y in zip(ours.state_dict().values(), theirs.state_dict().values()))


@each_stack
@pytest.mark.parametrize("settings", [{}, {"chunk_size": 4}, {"inplace_safe": True}, {"_mask_trans": False}], ids=str)
def test_outputs(make: Callable[[], Any], settings: dict[str, Any]) -> None:
    outputs = []
    for model in both(make):
        states, more = inputs(make, torch.zeros(()))
        with torch.no_grad():
            outputs.append(valid(model(*states, **more | settings)))
    assert_near(*reversed(outputs), CLOSE)


@each_stack
def test_kernels_of_theirs_are_served(make: Callable[[], Any]) -> None:
    theirs, ours = both(make)
    states, more = inputs(make, torch.zeros(()))
    with torch.no_grad():
        after = valid(ours(*states, **more, use_cueq_triangle_kernels=True, inplace_safe=True))
        states, more = inputs(make, torch.zeros(()))
        assert_near(after, valid(theirs(*states, **more)), CLOSE)


@each_stack
def test_gradients(make: Callable[[], Any]) -> None:
    found = []
    for model in both(make, torch.float64):
        states, more = inputs(make, torch.zeros((), dtype=torch.float64))
        outputs = valid(model(*(x.requires_grad_() for x in states), **more))
        wanted = [*states, *(p for p in model.parameters())]
        grads = torch.autograd.grad(sum(x.square().sum() for x in outputs), wanted, allow_unused=True)
        found.append([torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads)])
    largest = max(float(g.abs().max()) for g in found[0])
    for a, b in zip(*found, strict=True):
        assert float((a - b).abs().max()) < 1e-10 * largest


@each_stack
def test_autocast(make: Callable[[], Any]) -> None:
    """Ours is as near to fp64 as theirs, or nearly."""
    theirs, ours = both(make)
    states, more = inputs(make, torch.zeros(()))
    exact, masks = inputs(make, torch.zeros((), dtype=torch.float64))
    with torch.no_grad():
        truth = valid(copy.deepcopy(theirs).double()(*exact, **masks))
        with torch.autocast("cpu", torch.bfloat16):
            before, after = valid(theirs(*states, **more)), valid(ours(*states, **more))
    for a, b, x in zip(after, before, truth):
        mine, others = (float((y.double() - x).abs().max()) for y in (a, b))
        assert mine <= max(2 * others, 0.02 * float(x.abs().max()))
