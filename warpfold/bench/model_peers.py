"""The ways to compute an Evoformer block, or a whole training step, that `warpfold bench` compares.

Other packages are imported only where they are installed beside us; their signatures come from their public code.
"""

import importlib
import importlib.util
import inspect
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from warpfold.bench.timing import Subject
from warpfold.cost.example import BlockSizes, RandomBlock
from warpfold.device import find_recorder
from warpfold.parallel.plan import DTYPES, Plan, Precision

OPENFOLD = "openfold.model.evoformer"
KEPT = "left out, as nothing is recomputed, which may not fit: name it (--ways)"


@dataclass(frozen=True, kw_only=True)
class ModelWay:
    """One way to compute a block or a step.

    unsupported_reason: says why a device cannot compute it so; None if it can.
    left_out: why it is not timed unless it is asked for.
    """

    name: str
    unsupported_reason: Callable[[torch.device], str | None] = lambda device: None
    left_out: str = ""


@dataclass(frozen=True, kw_only=True)
class BlockWay(ModelWay):
    """make: returns a block as a subject."""

    make: Callable[[BlockSizes, Precision, torch.device], Subject]


@dataclass(frozen=True, kw_only=True)
class StepWay(ModelWay):
    """plan: changes the plan of the settings."""

    plan: Callable[[Plan], Plan]


def _planned(name: str, **changes: Any) -> Callable[[BlockSizes, Precision, torch.device], Subject]:
    """Return what makes a subject of our block, run by a plan with those changes."""

    def make(sizes: BlockSizes, precision: Precision, device: torch.device) -> Subject:
        block = RandomBlock(sizes, Plan(precision=precision, **changes), device)
        return Subject(name, block.forward, block.wanted, block.grads)

    return make


def compile_unsupported(device: torch.device) -> str | None:
    """Return why torch.compile cannot be used on a device; None if it can."""
    if device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++"))):
        return "no C++ compiler"
    return None


def graph_unsupported(device: torch.device) -> str | None:
    """Return why a step cannot be recorded on a device; None if it can."""
    return None if find_recorder(device) else f"a {device.type} has no graphs"


def _openfold_unsupported(device: torch.device) -> str | None:
    try:
        found = importlib.util.find_spec(OPENFOLD)
    except ModuleNotFoundError:  # the package itself
        found = None
    return None if found else "not installed"


def _openfold(sizes: BlockSizes, precision: Precision, device: torch.device) -> Subject:
    """Bind OpenFold's EvoformerBlock(m [*, s, r, c_m], z [*, r, r, c_z], msa_mask, pair_mask), under autocast in bf16.

    Its releases differ in what the constructor takes: what one does not know is left out.
    """
    made = importlib.import_module(OPENFOLD).EvoformerBlock
    config, pair = sizes.config, sizes.config.pair
    arguments = {
        "c_m": sizes.c_m,
        "c_z": sizes.c_z,
        "c_hidden_msa_att": sizes.c_m // config.heads,
        "c_hidden_opm": config.c_outer,
        "c_hidden_mul": pair.c_triangle,
        "c_hidden_pair_att": pair.head_width or sizes.c_z // pair.heads,
        "no_heads_msa": config.heads,
        "no_heads_pair": pair.heads,
        "transition_n": config.transition,
        "msa_dropout": config.rate,
        "pair_dropout": pair.rate,
        "no_column_attention": False,
        "opm_first": config.outer == "first",
        "fuse_projection_weights": pair.fused,
        "inf": 1e9,
        "eps": 1e-10,
    }
    known = inspect.signature(made).parameters
    module = made(**{name: value for name, value in arguments.items() if name in known}).to(device).train()
    block, dtype = RandomBlock(sizes, Plan(precision=precision), device), DTYPES[precision]
    msa_mask, pair_mask = (mask.to(dtype) for mask in block.masks)

    def forward() -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            m, z = module(block.m, block.z, msa_mask=msa_mask, pair_mask=pair_mask)
        return m, z

    wanted = [block.m, block.z, *(p for p in module.parameters() if p.requires_grad)]
    return Subject("openfold", forward, wanted, block.grads)


BLOCK_WAYS = (
    BlockWay(name="definition", make=_planned("definition", kernels="definition")),
    BlockWay(
        name="compile",
        unsupported_reason=compile_unsupported,
        make=_planned("compile", kernels="definition", compile=True),
    ),
    BlockWay(name="openfold", unsupported_reason=_openfold_unsupported, make=_openfold),
    BlockWay(name="ours", make=_planned("ours")),
)
STEP_WAYS = (
    StepWay(name="definition", plan=lambda plan: replace(plan, kernels="definition", compile=False, graph=False)),
    StepWay(
        name="compile",
        unsupported_reason=compile_unsupported,
        plan=lambda plan: replace(plan, kernels="definition", compile=True, graph=False),
        left_out="left out, as it compiles for minutes: name it (--ways)",
    ),
    StepWay(name="ours", plan=lambda plan: replace(plan, kernels="fast", graph=False)),
    StepWay(
        name="graph",
        unsupported_reason=graph_unsupported,
        plan=lambda plan: replace(plan, kernels="fast", graph=True),
    ),
    StepWay(
        name="kept",
        plan=lambda plan: replace(plan, kernels="fast", graph=False, recompute=None, keep_blocks=0),
        left_out=KEPT,
    ),
    StepWay(
        name="kept-graph",
        unsupported_reason=graph_unsupported,
        plan=lambda plan: replace(plan, kernels="fast", graph=True, recompute=None, keep_blocks=0),
        left_out=KEPT,
    ),
)
NAMES = tuple(dict.fromkeys(way.name for way in (*BLOCK_WAYS, *STEP_WAYS)))
