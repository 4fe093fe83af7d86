"""Whole modules of boltz, by its own code and by ours: outputs, gradients, what they hold; also under autocast.

./dev adapters boltz
"""

import copy
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from warpfold.adapt.accelerate import accelerate, acceleration, restore
from warpfold.adapt.verify import StaysDouble, redrawn
from warpfold.ops.dispatch import always_fast

N, LAST, S, C_S, C_Z, C_M = 19, 16, 5, 48, 32, 24  # residues, of which the last are padding; sequences; channels
OPERATIONS = {"triangle_multiplication", "gated_attention", "transition", "attention_pair_bias"}
IN_MSA = {"triangle_multiplication", "gated_attention", "transition", "outer_product", "pair_weighted_averaging"}
WIDTHS = {"pairwise_head_width": 8, "pairwise_num_heads": 3}


def of_boltz(module: str) -> Any:
    return pytest.importorskip(f"boltz.model.{module}", reason="boltz is not installed: ./dev adapters boltz")


def pairformer() -> nn.Module:
    module: nn.Module = of_boltz("layers.pairformer").PairformerModule(C_S, C_Z, 2, num_heads=2, v2=True, **WIDTHS)
    return module


def without_sequence() -> nn.Module:
    module: nn.Module = of_boltz("layers.pairformer").PairformerNoSeqModule(C_Z, 2, **WIDTHS)
    return module


def msa_module() -> nn.Module:
    module: nn.Module = of_boltz("modules.trunkv2").MSAModule(C_M, C_Z, C_S, 2, 0.15, 0.25, **WIDTHS)
    return module


def residues_mask(like: Tensor) -> Tensor:
    mask = torch.ones(1, N).to(like)
    mask[:, LAST:] = 0
    return mask


def run_pairformer(module: nn.Module, s: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    mask = residues_mask(z)
    s, z = module(s, z, mask, mask[:, :, None] * mask[:, None])
    return s[:, :LAST], z[:, :LAST, :LAST]


def run_without_sequence(module: nn.Module, s: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    mask = residues_mask(z)
    return (module(z + s.mean(), mask[:, :, None] * mask[:, None])[:, :LAST, :LAST],)


def run_msa_module(module: nn.Module, s: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    tokens = importlib.import_module("boltz.data.const").num_tokens
    drawn = [torch.rand(1, S, N, generator=generator) for _ in range(3)]
    feats = {"msa": torch.randint(tokens, (1, S, N), generator=generator), "token_pad_mask": residues_mask(z)}
    feats |= dict(zip(("has_deletion", "deletion_value", "msa_paired"), (x.to(z) for x in drawn)))
    feats["msa_mask"] = residues_mask(z)[:, None] * (torch.arange(S)[None, :, None] != 2)
    return (module(z, s, feats)[:, :LAST, :LAST],)


Run = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, ...]]
MODULES: dict[str, tuple[Callable[[], nn.Module], Run, set[str]]] = {
    "pairformer": (pairformer, run_pairformer, OPERATIONS),
    "pairformer without sequence": (without_sequence, run_without_sequence, OPERATIONS - {"attention_pair_bias"}),
    "msa module": (msa_module, run_msa_module, IN_MSA),
}


def results(module: nn.Module, run: Run, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the outputs, and the gradients of parameters and inputs."""
    generator = torch.Generator().manual_seed(0)
    s, z, *grads = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((1, N, C_S), (1, N, N, C_Z), (1, LAST, C_S), (1, LAST, LAST, C_Z))
    )
    wanted = {"s": s.requires_grad_(), "z": z.requires_grad_(), **dict(module.named_parameters())}
    outputs = run(module, s, z)
    loss = sum((x * g.to(x)).sum() for x, g in zip(outputs, grads[-len(outputs) :]))
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    made = {f"output {i}": x.detach() for i, x in enumerate(outputs)}
    return made | {name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(wanted.items(), found)}


def distances(found: dict[str, Tensor], truth: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
    """Yield how far each tensor is from the truth, of what is largest in it, or in any gradient a part of it."""
    steepest = max(float(x.abs().max()) for name, x in truth.items() if not name.startswith("output"))
    for name, x in truth.items():
        scale = max(float(x.abs().max()), 0.03 * steepest)
        yield name, float((found[name].double() - x).abs().max()) / scale


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
def test_computes_the_same(name: str, training: bool) -> None:
    make, run, operations = MODULES[name]
    theirs = redrawn(make(), 0).eval()
    if training:  # but for dropout, which is theirs
        theirs.train()
        for module in theirs.modules():
            for rate in ("dropout", "msa_dropout", "z_dropout"):
                if isinstance(getattr(module, rate, None), float):
                    setattr(module, rate, 0.0)
    ours, exact = copy.deepcopy(theirs), copy.deepcopy(theirs).double()
    state = {key: x.clone() for key, x in ours.state_dict().items()}
    accelerate(ours)
    assert {kind.operation for kind in acceleration(ours).swapped} == operations
    with StaysDouble():
        truth = results(exact, run, torch.float64)
    with always_fast():
        found = results(ours, run)
    wrong = {key: error for key, error in distances(found, truth) if error > 2e-5}
    assert not wrong
    assert list(ours.state_dict()) == list(state)
    assert all(torch.equal(x, state[key]) for key, x in ours.state_dict().items())
    restore(ours)
    assert all(torch.equal(x, results(theirs, run)[key]) for key, x in results(ours, run).items())


@pytest.mark.parametrize("name", MODULES)
def test_computes_the_same_under_autocast(name: str) -> None:
    make, run, _ = MODULES[name]
    theirs = redrawn(make(), 0).eval()
    ours = copy.deepcopy(theirs)
    accelerate(ours, verify=False)
    with StaysDouble():
        truth = results(copy.deepcopy(theirs).double(), run, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        by_them = dict(distances(results(theirs, run), truth))
        with always_fast():
            by_us = dict(distances(results(ours, run), truth))
    assert max(by_us.values()) < 2 * max(by_them.values())
    far = {key: (error, by_them[key]) for key, error in by_us.items() if error > max(4 * by_them[key], 2e-2)}
    assert not far


def test_z_in_slices_is_the_same() -> None:
    """More residues than Boltz's `chunk_size_tri_attn`, made small: attention in slices of rows."""
    module = of_boltz("layers.pairformer").PairformerNoSeqLayer(C_Z, **WIDTHS)
    theirs = redrawn(module, 0).eval()
    ours = copy.deepcopy(theirs)
    accelerate(ours, verify=False)
    z, mask = torch.randn(1, N, N, C_Z, generator=torch.Generator().manual_seed(0)), torch.ones(1, N, N)
    with torch.no_grad(), always_fast():
        wanted, found = theirs(z, mask, 8), ours(z, mask, 8)
    assert (wanted - found).abs().max() < 2e-5 * wanted.abs().max()
