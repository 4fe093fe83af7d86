"""Whole modules of boltz, rf3 and openfold3, before and after `accelerate`: outputs, gradients, autocast.

./dev adapters boltz rf3 openfold3
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from warpfold.adapt.accelerate import accelerate, acceleration, restore
from warpfold.adapt.verify import StaysDouble, redrawn
from warpfold.ops.dispatch import always_fast

N, LAST, S, C_S, C_Z, C_M = 19, 16, 5, 48, 32, 24  # residues, of which the last are padding; sequences; channels
PAIRS = {"triangle_multiplication", "gated_attention", "transition"}
SEQUENCE, MSA = {"attention_pair_bias"}, {"outer_product", "pair_weighted_averaging"}
Run = Callable[..., Any]  # of a module, its states and settings


@dataclass(frozen=True)
class Whole:
    """A module of several layers: how to create and call it, and the operations that compute it when accelerated."""

    package: str
    make: Callable[[], Any]
    run: Run
    shapes: tuple[tuple[int, ...], ...]  # of its states
    operations: set[str]


def there(like: Tensor) -> Tensor:
    """Return the mask of residues [1, N]."""
    return (torch.arange(N) < LAST).to(like)[None]


def pairs(like: Tensor) -> Tensor:
    return there(like)[:, :, None] * there(like)[:, None]


# boltz

WIDTHS = {"pairwise_head_width": 8, "pairwise_num_heads": 3}
STATES = (1, N, C_S), (1, N, N, C_Z)


def of_boltz(name: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
    module, _, kind = name.partition(":")
    return lambda: getattr(import_module(f"boltz.model.{module}"), kind)(*args, **kwargs, **WIDTHS)


def run_boltz_msa(module: Any, s: Tensor, z: Tensor) -> Any:
    generator = torch.Generator().manual_seed(1)
    tokens = import_module("boltz.data.const").num_tokens
    drawn = [torch.rand(1, S, N, generator=generator) for _ in range(3)]
    feats = {"msa": torch.randint(tokens, (1, S, N), generator=generator), "token_pad_mask": there(z)}
    feats |= dict(zip(("has_deletion", "deletion_value", "msa_paired"), (x.to(z) for x in drawn)))
    feats["msa_mask"] = there(z)[:, None] * (torch.arange(S)[None, :, None] != 2)
    return module(z, s, feats)


# rf3


def of_rf3(c_s: int) -> Callable[[], Any]:
    triangles = {"triangle_multiplication": {"d_hidden": C_Z}, "triangle_attention": {"n_head": 2, "d_hidden": 8}}
    more = {**triangles, "attention_pair_bias": {"n_head": 2}}
    return lambda: import_module("rf3.model.layers.pairformer_layers").PairformerBlock(c_s, C_Z, 0.0, **more)


# openfold3

PAIR: dict[str, Any] = {"c_z": C_Z, "c_hidden_mul": 16, "c_hidden_pair_att": 8, "no_heads_pair": 2, "no_blocks": 2}
PAIR |= {"transition_n": 2, "pair_dropout": 0.25, "fuse_projection_weights": False, "blocks_per_ckpt": None, "inf": 1e9}
SINGLE = PAIR | {"c_s": C_S, "c_hidden_pair_bias": 8, "no_heads_pair_bias": 4, "transition_type": "swiglu"}
OF_MSA = PAIR | {"c_m": C_M, "c_hidden_msa_att": 8, "c_hidden_opm": 5, "no_heads_msa": 3, "eps": 1e-3}
OF_MSA |= {"msa_dropout": 0.15, "opm_first": True, "transition_type": "swiglu"}
EVOFORMER = OF_MSA | {"c_s": 20, "no_column_attention": False, "opm_first": False, "transition_type": "relu"}


def of_openfold3(name: str, **settings: Any) -> Callable[[], Any]:
    file, _, kind = name.partition(":")
    return lambda: getattr(import_module(f"openfold3.core.model.latent.{file}"), kind)(**settings)


def run_single(module: Any, s: Tensor, z: Tensor, **settings: Any) -> Any:
    return module(s, z, single_mask=there(z), pair_mask=pairs(z), **{"chunk_size": None, **settings})


def run_msa(module: Any, m: Tensor, z: Tensor, **settings: Any) -> Any:
    mask = there(z)[:, None].expand(1, S, N)
    return module(m, z, msa_mask=mask, pair_mask=pairs(z), **{"chunk_size": None, **settings})


ROWS = (1, S, N, C_M), (1, N, N, C_Z)
WHOLE = {
    "pairformer": Whole(
        "boltz",
        of_boltz("layers.pairformer:PairformerModule", C_S, C_Z, 2, num_heads=2, v2=True),
        lambda module, s, z: module(s, z, there(z), pairs(z)),
        STATES,
        PAIRS | SEQUENCE,
    ),
    "pairformer without sequence": Whole(
        "boltz",
        of_boltz("layers.pairformer:PairformerNoSeqModule", C_Z, 2),
        lambda module, s, z: module(z + s.mean(), pairs(z)),
        STATES,
        PAIRS,
    ),
    "msa module": Whole(
        "boltz", of_boltz("modules.trunkv2:MSAModule", C_M, C_Z, C_S, 2, 0.15, 0.25), run_boltz_msa, STATES, PAIRS | MSA
    ),
    "block of pairs": Whole("rf3", of_rf3(0), lambda module, z: module(None, z)[1], ((N, N, C_Z),), PAIRS),
    "block": Whole("rf3", of_rf3(C_S), lambda module, s, z: module(s, z), ((N, C_S), (N, N, C_Z)), PAIRS | SEQUENCE),
    "pairformer stack": Whole(
        "openfold3", of_openfold3("pairformer:PairFormerStack", **SINGLE), run_single, STATES, PAIRS | SEQUENCE
    ),
    "msa stack": Whole("openfold3", of_openfold3("msa_module:MSAModuleStack", **OF_MSA), run_msa, ROWS, PAIRS | MSA),
    **{
        name: Whole(
            "openfold3",
            of_openfold3("evoformer:EvoformerStack", **EVOFORMER | {"fuse_projection_weights": fused}),
            run_msa,
            ROWS,
            {*PAIRS, "outer_product"},
        )
        for name, fused in (("evoformer", False), ("evoformer of Multimer", True))
    },
}
HALF_ALONE = "block"  # their own code computes the sequence's attention in bf16, and so wants autocast


def made(name: str) -> tuple[Whole, Any]:
    whole = WHOLE[name]
    pytest.importorskip(whole.package, reason=f"{whole.package} is not installed: ./dev adapters {whole.package}")
    torch.manual_seed(0)
    return whole, redrawn(whole.make(), 0).eval()


def results(whole: Whole, module: Any, dtype: torch.dtype = torch.float32, **settings: Any) -> dict[str, Tensor]:
    """Compute the outputs of unmasked residues, and the gradients of parameters and inputs."""
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in whole.shapes]
    outputs = whole.run(module, *(x.clone() for x in states), **settings)
    found = []
    for x in [outputs] if isinstance(outputs, Tensor) else outputs:
        if whole.package != "rf3":  # it has no padding
            x = x[:, :LAST, :LAST] if x.shape[1:3] == (N, N) else x[..., :LAST, :]
        found.append(x)
    wanted = {f"input {i}": x for i, x in enumerate(states)} | dict(module.named_parameters())
    loss = sum((x * torch.randn(x.shape, generator=generator).to(x)).sum() for x in found)
    gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    named = {f"output {i}": x.detach() for i, x in enumerate(found)}
    return named | {name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(wanted.items(), gradients)}


def exact(whole: Whole, module: Any) -> dict[str, Tensor]:
    module = copy.deepcopy(module).double()
    if whole is WHOLE[HALF_ALONE]:
        module.attention_pair_bias.force_bfloat16 = False
    with StaysDouble():
        return results(whole, module, torch.float64)


def distances(found: dict[str, Tensor], truth: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
    """Yield the error of each tensor relative to its largest number, or to a share of the largest gradient."""
    steepest = max(float(x.abs().max()) for name, x in truth.items() if not name.startswith("output"))
    for name, x in truth.items():
        scale = max(float(x.abs().max()), 0.03 * steepest)
        yield name, float((found[name].double() - x).abs().max()) / scale


def without_dropout(module: nn.Module) -> None:
    """Put a module into training mode without dropout."""
    for part in module.train().modules():
        for rate in ("dropout", "msa_dropout", "z_dropout", "p", "r"):
            if isinstance(getattr(part, rate, None), float):
                setattr(part, rate, 0.0)


@pytest.mark.parametrize("name", [name for name in WHOLE if name != HALF_ALONE])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
def test_computes_the_same(name: str, training: bool) -> None:
    whole, theirs = made(name)
    if training:
        without_dropout(theirs)
    ours = copy.deepcopy(theirs)
    state = {key: x.clone() for key, x in ours.state_dict().items()}
    accelerate(ours)
    assert {kind.operation for kind in acceleration(ours).swapped} >= whole.operations
    with always_fast():
        found = results(whole, ours)
    assert not {key: error for key, error in distances(found, exact(whole, theirs)) if error > 2e-5}
    assert list(ours.state_dict()) == list(state)
    assert all(torch.equal(x, state[key]) for key, x in ours.state_dict().items())
    restore(ours)
    assert all(torch.equal(x, results(whole, theirs)[key]) for key, x in results(whole, ours).items())


@pytest.mark.parametrize("name", WHOLE)
def test_computes_the_same_under_autocast(name: str) -> None:
    whole, theirs = made(name)
    ours = accelerate(copy.deepcopy(theirs), verify=False)
    assert {kind.operation for kind in acceleration(ours).swapped} >= whole.operations
    truth = exact(whole, theirs)
    with torch.autocast("cpu", torch.bfloat16):
        by_them = dict(distances(results(whole, theirs), truth))
        with always_fast():
            by_us = dict(distances(results(whole, ours), truth))
    assert max(by_us.values()) < 2 * max(by_them.values())
    far = {key: (error, by_them[key]) for key, error in by_us.items() if error > max(4 * by_them[key], 2e-2)}
    assert not far


KERNELS = {"use_cueq_triangle_kernels": True, "inplace_safe": True}


@pytest.mark.parametrize("name", [name for name, whole in WHOLE.items() if whole.package == "openfold3"])
@pytest.mark.parametrize(
    "settings", [{"chunk_size": 4}, {"inplace_safe": True}, {"_mask_trans": False}, KERNELS], ids=str
)
def test_settings_of_openfold3(name: str, settings: dict[str, Any]) -> None:
    whole, theirs = made(name)
    ours = accelerate(copy.deepcopy(theirs), verify=False)
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(shape, generator=generator) for shape in whole.shapes]
    with torch.no_grad(), always_fast():
        after = whole.run(ours, *(x.clone() for x in states), **settings)
        before = whole.run(theirs, *states, **({} if settings is KERNELS else settings))
    for a, b in zip(after, before, strict=True) if isinstance(after, tuple) else [(after, before)]:
        a, b = (x[:, :LAST, :LAST] if x.shape[1:3] == (N, N) else x[..., :LAST, :] for x in (a, b))
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_z_in_slices_is_the_same() -> None:
    """With more residues than Boltz's `chunk_size_tri_attn`, made small, attention runs in slices of rows."""
    _, whole = made("pairformer without sequence")
    theirs = whole.layers[0]
    ours = accelerate(copy.deepcopy(theirs), verify=False)
    z, mask = torch.randn(1, N, N, C_Z, generator=torch.Generator().manual_seed(0)), torch.ones(1, N, N)
    with torch.no_grad(), always_fast():
        wanted, found = theirs(z, mask, 8), ours(z, mask, 8)
    assert (wanted - found).abs().max() < 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("part", ["tri_attn_start", "z_transition"])
def test_what_rf3_checkpoints_keeps_its_input_alone(part: str) -> None:
    _, theirs = made("block of pairs")
    ours = accelerate(copy.deepcopy(theirs), verify=False)
    z = torch.randn(1, N, N, C_Z, requires_grad=True)
    for model in (theirs, ours):
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            y = getattr(model, part)(z)
        assert sum(x.numel() for x in kept) <= 2 * z.numel()
        y.sum().backward()
