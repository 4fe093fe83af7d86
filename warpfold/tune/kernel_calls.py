"""Every kernel that the model launches at any size, with its arguments, on a machine that has no GPU and no room.

The model runs on the device "meta" (shapes and strides alone); where it would launch a kernel, the call is noted
instead.  So what is compiled offline, and what index arithmetic is followed, is what the model does: no list of shapes
beside it that could fall behind.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from warpfold.model.alphafold import ModelConfig
from warpfold.model.losses import LossConfig
from warpfold.ops import dispatch
from warpfold.ops.triton.launch import Call, recorded
from warpfold.parallel.plan import Plan
from warpfold.tune.fake import memory_of


class _Launching(TorchDispatchMode):
    """Within it, registered operations on "meta" call their launchers instead of saying their shapes alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func.namespace != "warpfold":
            return func(*args, **(kwargs or {}))
        return dispatch.implementation(func._opname, args[0])(*args, **(kwargs or {}))


@contextmanager
def launching() -> Iterator[list[Call]]:
    """Within it, operations on "meta" call their launchers, and what they would launch is noted."""
    with dispatch.interpreting(), recorded() as calls, _Launching():
        yield calls


def wider() -> ModelConfig:
    """A model wider than AlphaFold2: heads of 64 numbers, alignments of 512 channels, templates of 128."""
    c = ModelConfig(c_m=512, c_z=256, c_e=128)
    return replace(c, templates=replace(c.templates, c=128, pair=replace(c.templates.pair, c_triangle=128)))


def one_block(config: ModelConfig) -> ModelConfig:
    """The same model with one block of each stack: it launches the same kernels."""
    return replace(
        config,
        evoformer=replace(config.evoformer, blocks=1),
        extra_blocks=min(1, config.extra_blocks),
        templates=replace(config.templates, blocks=1),
        structure=replace(config.structure, layers=1),
    )


def calls_of(plan: Plan, config: ModelConfig, sizes: Mapping[str, int], training: bool = True) -> list[Call]:
    """The calls of one training step, or with `training` False of folding, in order; tensors are on "meta".

    sizes: residues "res", sequences "seq", "extra" sequences and templates "tmpl".
    """
    losses = LossConfig() if training else None
    with dispatch.using(plan.kernels), launching() as calls:
        memory_of(plan, one_block(config), sizes, losses, recycles=0)
    return calls


def demanding(calls: Iterable[Call]) -> list[Call]:
    """Of each kernel the call with the largest key."""
    found: dict[str, Call] = {}
    for call in calls:
        other = found.setdefault(call.kernel.name, call)
        if math.prod(call.key) > math.prod(other.key):
            found[call.kernel.name] = call
    return list(found.values())
