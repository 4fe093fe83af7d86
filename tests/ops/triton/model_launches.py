"""Every kernel that the model launches at any size, with its arguments, on a machine that has no GPU and no room.

The model runs on the device "meta" (shapes and strides alone); where it would launch a kernel, the launch is noted
instead.  So what is compiled offline, and what index arithmetic is followed, is what the model does: no list of shapes
beside it that could fall behind.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from warpfold.model.alphafold import ModelConfig
from warpfold.model.losses import LossConfig
from warpfold.ops import dispatch
from warpfold.ops.adam import adam_step
from warpfold.ops.triton.launch import KernelLaunch
from warpfold.parallel.plan import DTYPES, Plan
from warpfold.tune.fake import memory_of
from warpfold.tune.kernel_bench import launching


def wider() -> ModelConfig:
    """Return a model wider than AlphaFold2: heads of 64 numbers, alignments of 512 channels, templates of 128 whose
    transitions are SwiGLU."""
    c = ModelConfig(c_m=512, c_z=256, c_e=128)
    pair = replace(c.templates.pair, c_triangle=128, activation="swiglu")
    return replace(c, templates=replace(c.templates, c=128, pair=pair))


def one_block(config: ModelConfig) -> ModelConfig:
    """Return the same model with one block of each stack: it launches the same kernels."""
    return replace(
        config,
        evoformer=replace(config.evoformer, blocks=1),
        extra_blocks=min(1, config.extra_blocks),
        templates=replace(config.templates, blocks=1),
        structure=replace(config.structure, layers=1),
    )


def launches_of(plan: Plan, config: ModelConfig, sizes: Mapping[str, int], training: bool = True) -> list[KernelLaunch]:
    """Return the launches of one training step, or with `training` False of folding, in order; tensors are on "meta".

    sizes: residues "res", sequences "seq", "extra" sequences and templates "tmpl".
    """
    losses = LossConfig(violation=1.0) if training else None
    with dispatch.using(plan.kernels), launching() as launches:
        memory_of(plan, one_block(config), sizes, losses, recycles=0)
        if training:
            update(DTYPES[plan.precision])
    return launches


def update(packed: torch.dtype) -> None:
    """Take a step of Adam, with as many parameters as one rank could hold."""
    *flat, copy = (torch.empty(2**32 + 2**20, device="meta") for _ in range(6))
    numbers = [torch.empty((), device="meta") for _ in range(4)]
    numbers[0] = numbers[0].bool()
    adam_step.fast(*flat, copy.to(packed), *numbers, 0.9, 0.999, 1e-6, 0.999)


def demanding(launches: Iterable[KernelLaunch]) -> list[KernelLaunch]:
    """Return of each kernel the launch with the largest key."""
    found: dict[str, KernelLaunch] = {}
    for launch in launches:
        other = found.setdefault(launch.kernel.name, launch)
        if math.prod(launch.key) > math.prod(other.key):
            found[launch.kernel.name] = launch
    return list(found.values())
