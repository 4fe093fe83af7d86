"""All kernel launches of the model at any size, with their arguments, on a machine without a GPU.

The model runs on the device "meta" (shapes and strides only), and launches are recorded instead of run.  So the kernels
that are compiled offline, and whose index arithmetic is checked, are those of the model, without a separate list of
shapes that could become outdated.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn

from tests.helpers import memory_of
from warpfold.bench.kernels import launching
from warpfold.model.alphafold import ModelConfig
from warpfold.model.axial import ROWS, AxialUpdate
from warpfold.model.evoformer import OuterProductMean, Transition, TriangleAttention, TriangleMultiplication
from warpfold.model.layers import Linear
from warpfold.model.losses import LossConfig
from warpfold.model.pair_bias import AttentionPairBias, PairWeightedAveraging
from warpfold.ops import dispatch
from warpfold.ops.adam import adam_step
from warpfold.ops.triton.launch import KernelLaunch
from warpfold.parallel.mesh import Group
from warpfold.parallel.plan import DTYPES, Plan
from warpfold.parallel.sharded import ChannelExchange, exhaust


def wider() -> ModelConfig:
    """Make a model wider than AlphaFold2: heads of width 64, alignments of 512 channels, templates of 128 channels with
    SwiGLU transitions."""
    c = ModelConfig(c_m=512, c_z=256, c_e=128)
    pair = replace(c.templates.pair, c_triangle=128, activation="swiglu")
    return replace(c, templates=replace(c.templates, c=128, pair=pair))


def one_block(config: ModelConfig) -> ModelConfig:
    """Return the same model with one block per stack, which launches the same kernels."""
    return replace(
        config,
        evoformer=replace(config.evoformer, blocks=1),
        extra_blocks=min(1, config.extra_blocks),
        templates=replace(config.templates, blocks=1),
        structure=replace(config.structure, layers=1),
    )


Shape = tuple[int, ...]
# Layers of third-party models, without biases except that of AlphaFold3's queries, and the shapes of x, its mask and
# the other input.  Attention with pair bias has heads of width 24 and 48.
FOREIGN: dict[str, tuple[Callable[[], AxialUpdate], Shape, Shape, Shape | None]] = {
    "pair bias, 24": (lambda: AttentionPairBias(384, 128, 16), (1, 256, 384), (1, 256), (256, 256, 128)),
    "pair bias, 48": (lambda: AttentionPairBias(768, 128, 16), (1, 256, 768), (1, 256), (256, 256, 128)),
    "pair-weighted": (lambda: PairWeightedAveraging(64, 128), (64, 256, 64), (256, 256), (256, 256, 128)),
    "triangle product": (lambda: TriangleMultiplication(128, 128, True), (256, 256, 128), (256, 256), None),
    "triangle attention": (lambda: TriangleAttention(128, True), (256, 256, 128), (256, 256), None),
    "SwiGLU, 64": (lambda: Transition(64, activation="swiglu"), (64, 256, 64), (64, 256), None),
    "SwiGLU, 128": (lambda: Transition(128, activation="swiglu"), (256, 256, 128), (256, 256), None),
    "SwiGLU, 256": (lambda: Transition(256, activation="swiglu"), (256, 256, 256), (256, 256), None),
    "outer product": (lambda: OuterProductMean(64, 128), (256, 256, 128), (64, 256), (64, 256, 64)),
}


def foreign_launches(name: str, dtype: torch.dtype) -> list[KernelLaunch]:
    """Record the launches of a layer's update, forward and backward."""
    make, x, mask, other = FOREIGN[name]
    with torch.device("meta"), launching() as launches:
        layer = make()
        for module in layer.modules():
            if isinstance(module, nn.LayerNorm) or (isinstance(module, nn.Linear) and "pair bias" not in name):
                module.bias = None
        if isinstance(layer, OuterProductMean):
            layer.out, layer.bias_divided = Linear(32 * 32, 128), False
        others = () if other is None else (torch.empty(other, dtype=dtype, requires_grad=True),)
        given = torch.empty(x, dtype=dtype, requires_grad=True), torch.empty(mask, dtype=dtype)
        layer(*given, *others, residual=False).sum().backward()
    return list(launches)


def launches_of(plan: Plan, config: ModelConfig, sizes: Mapping[str, int], training: bool = True) -> list[KernelLaunch]:
    """Record the launches of a training step, or of folding if `training` is False, in order, on meta tensors.

    sizes: residues "res", sequences "seq", "extra" sequences and templates "tmpl".
    """
    losses = LossConfig(violation=1.0) if training else None
    with dispatch.using(plan.kernels), launching() as launches:
        memory_of(plan, one_block(config), sizes, losses, recycles=0)
        if training:
            exchange_channels(config, sizes["res"], DTYPES[plan.precision])
            update(DTYPES[plan.precision])
    return launches


def exchange_channels(config: ModelConfig, residues: int, dtype: torch.dtype) -> None:
    """Compute a triangle product forward and backward like ranks that exchange channels, with one rank."""
    with torch.device("meta"):
        layer = TriangleMultiplication(config.c_z, config.evoformer.pair.c_triangle, outgoing=True)
        z = torch.empty(residues, residues, config.c_z, dtype=dtype, requires_grad=True)
        mask = torch.empty(residues, residues, dtype=dtype)
    exchange = ChannelExchange(layer, ROWS, residues, Group("axial"), "")
    right = exchange.right(z, mask, residues)
    exhaust(exchange.product(z, mask, right, None, residues)).sum().backward()


def update(packed: torch.dtype) -> None:
    """Take a step of Adam with the most parameters that one rank could hold."""
    *flat, copy = (torch.empty(2**32 + 2**20, device="meta") for _ in range(6))
    numbers = [torch.empty((), device="meta") for _ in range(4)]
    numbers[0] = numbers[0].bool()
    adam_step.fast(*flat, copy.to(packed), *numbers, 0.9, 0.999, 1e-6, 0.999)


def demanding(launches: Iterable[KernelLaunch]) -> list[KernelLaunch]:
    """Return the launch with the largest key of each kernel."""
    found: dict[str, KernelLaunch] = {}
    for launch in launches:
        other = found.setdefault(launch.kernel.name, launch)
        if math.prod(launch.key) > math.prod(other.key):
            found[launch.kernel.name] = launch
    return list(found.values())
