"""Run a model as a plan says: at once, in slices, in place, recomputed, compiled, or over several ranks."""

import logging
import os
import shutil
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from warpfold.device import Function, Graphs, Named, Offload
from warpfold.errors import UserError
from warpfold.host import HostTensor
from warpfold.model.axial import COLS, AxialUpdate, Block, BlockStack, Executable, PlainExecution, Tensors
from warpfold.model.layers import Linear
from warpfold.ops.dispatch import allow_tf32, backend, choice, using
from warpfold.parallel.mesh import Mesh
from warpfold.parallel.messages import all_gather_object
from warpfold.parallel.plan import DTYPES, Plan
from warpfold.parallel.sharded import ShardedResidues, ShardedStack
from warpfold.parallel.slices import layer_in_slices, pair_channels, slice_elements, split_rows

# The functions of a layer that are free of side effects.
COMPILED = ("shared", "prepare", "update", "factor", "finish")
log = logging.getLogger("warpfold")
M = TypeVar("M", bound=nn.Module)
# Least rows of a tile of z on disk, and rows of a tile where a GPU's plan is chosen: 256 KiB with 128 channels in bf16.
TILE = 32
# Shapes for which torch may compile each function. At its lower default, torch would fall back to eager with a warning.
MAX_COMPILED_SHAPES = 64


class Execution(PlainExecution):
    """Run models, stacks, blocks and layers as a plan says, on this rank of a mesh.

        execution = Execution(Plan(axial=4, recompute="block", precision="bf16"), mesh)
        model = execution.bind(model)     # From now on model(batch) uses the plan.
        print(execution)

    The results are those of the model in plain torch, up to rounding.
    mesh: the groups of this rank, with the sizes of the plan. Required if axial x branch is more than one rank.
    Raises ValueError without such a mesh.
    """

    def __init__(self, plan: Plan | None = None, mesh: Mesh | None = None) -> None:
        self.plan = plan = Plan() if plan is None else plan
        self.mesh = mesh or Mesh()
        self.distributed = plan.axial * plan.branch > 1  # several ranks share an example
        if (self.mesh.axial.size, self.mesh.branch.size) != (plan.axial, plan.branch) and self.distributed:
            raise ValueError(f"plan: axial {plan.axial} x branch {plan.branch} needs a mesh of these sizes, not {mesh}")
        self.dtype, self.kernels = DTYPES[plan.precision], plan.kernels
        self.heads_in_trunk_dtype, self.in_place = plan.precision == "bf16_all", plan.in_place
        if self.distributed:
            self.residues = ShardedResidues(self.mesh.axial, plan.branch)
        # Channels of z in the bound models; 0 without a z.
        self._channels = 0
        self._sharded: dict[nn.Module, ShardedStack] = {}
        self._compiled: dict[AxialUpdate, Any] = {}
        # Blocks that are not recomputed, and their layers.
        self._not_recomputed: set[nn.Module] = set()
        self.graphs = Graphs(self._on_any_rank if self.distributed else bool)
        # Whether passes are recorded as graphs. "auto" is decided when a model is bound.
        self.records = plan.graph is True
        self._offload = Offload() if plan.offload and not plan.in_place else None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Execution":
        """Return the execution itself: a copied model uses the same plan. If ranks share an example, bind the copy."""
        return self

    def __str__(self) -> str:
        p = self.plan
        ranks = f"axial {p.axial} x branch {p.branch}, rank {self.mesh.model.rank}"
        words = [ranks if self.distributed else "one device"]
        if p.chunk is not None:
            words.append(f"slices of {p.chunk} rows{', in place' if p.in_place else ''}")
        words += [
            word for word, on in (("compiled", p.compile), ("offloaded", p.offload), ("graphs", self.records)) if on
        ]
        words += [f"{p.recompute}s recomputed"] if p.recompute else []
        words += [f"except the last {p.keep_blocks} blocks"] if p.keep_blocks else []
        return ", ".join([*words, p.precision + (", tf32" if p.tf32 else ""), f"{p.kernels} kernels"])

    def bind(self, model: M) -> M:
        """Make a model, or any module with trunk layers, use this execution from now on; returns the model.

        Binding another execution replaces this one. If the plan cannot run the model, the model is unchanged.
        Raises UserError for a block or a device that the plan cannot run, for a model with frozen parameters on branch
        ranks, or if a compiler is missing.
        """
        for kind in {p.device.type for p in model.parameters()}:
            if reason := self.plan.unsupported_on(kind):
                raise UserError(reason)
        if len({p.requires_grad for p in model.parameters()}) > 1 and (reason := self.plan.unsupported_when_frozen()):
            raise UserError(reason)
        self._channels = max(self._channels, pair_channels(model))
        if (stack := main_stack(model)) is not None and self.plan.keep_blocks:
            blocks = stack.blocks[-self.plan.keep_blocks :]
            self._not_recomputed.update(module for block in blocks for module in block.modules())
        if self.plan.compile:
            self._compiled |= _compile(model)
        if self.distributed:
            self._sharded |= self._shard(model)
        if self.plan.threads is not None:
            torch.set_num_threads(self.plan.threads)
        if self.plan.graph == "auto":
            device = next((p.device.type for p in model.parameters()), "cpu")
            self.records = self.plan.why_no_graphs(device) is None
        if any(p.is_cuda for p in model.parameters()):
            allow_tf32(self.plan.tf32)
        elif self.plan.tf32:
            log.info("plan.tf32 changes nothing: the model is not on a CUDA device")
        if self.plan.precision == "fp64":
            # A reference run: parameters are fp64, too.
            model.double()
        for module in model.modules():
            if isinstance(module, Executable):
                module.execution = self
        return model

    def stack(self, stack: BlockStack, states: Tensors, masks: Tensors) -> Tensors:
        """Run the blocks of a stack one after another, over several ranks or recomputed in the backward pass."""
        if self.distributed:
            return self._over_ranks(stack, states, masks)
        keeps = torch.is_grad_enabled()
        with self._offload.saving() if self._offload is not None and keeps else nullcontext():
            for block in stack.blocks:
                if self.plan.recompute == "block" and keeps and block not in self._not_recomputed:
                    states = self._recomputed(block, *states, *masks)
                else:
                    states = block(*states, *masks)
        return states

    def _recomputed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function, saving only its inputs, and recompute it in the backward pass."""
        # Dropout noise is derived from a key, so it repeats. Without a seed it comes from torch's generator, whose
        # state must be restored; a graph cannot read that state.
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=not self.records)

    def block(self, block: Block, states: Tensors, masks: Tensors) -> Tensors:
        """Run the steps of a block one after another, over several ranks if it stands alone."""
        if self.distributed:
            return self._over_ranks(block, states, masks)
        return super().block(block, states, masks)

    def layer(
        self,
        layer: AxialUpdate,
        x: Tensor,
        mask: Tensor,
        other: Tensor | None = None,
        residual: bool = True,
        rows: int | None = None,
    ) -> Tensor:
        """Compute x + update of a layer, or the update alone, at once or in slices."""
        if self.plan.axial > 1:
            # The layer would treat this rank's shard as the full tensor.
            raise ValueError(f"{type(layer).__name__}: called outside of its block in a sharded model")
        if self.plan.recompute == "layer" and torch.is_grad_enabled() and layer not in self._not_recomputed:
            result: Tensor = self._recomputed(self._layer, layer, x, mask, other, residual)
            return result
        if self.plan.chunk is None and self.plan.kernels == choice.kernels:
            return super().layer(self._compiled.get(layer, layer), x, mask, other, residual)
        return self._layer(layer, x, mask, other, residual)

    def _layer(self, layer: AxialUpdate, x: Tensor, mask: Tensor, other: Tensor | None, residual: bool) -> Tensor:
        layer = self._compiled.get(layer, layer)
        # Autograd may recompute the layer in another thread, which needs the same choice of kernels.
        with using(self.plan.kernels):
            if self.plan.chunk is None:
                return super().layer(layer, x, mask, other, residual)
            most = slice_elements(self.plan.chunk, x.shape[COLS], self._channels or x.shape[-1])
            return layer_in_slices(layer, x, mask, other, most, in_place=self.plan.in_place, residual=residual)

    def call(self, model: nn.Module, function: Function, inputs: Mapping[str, Tensor], context: Hashable = ()) -> Named:
        """Call a function of tensors, or replay the graph of an earlier call with the same shapes and context.

        A graph is valid while the model's parameters keep their memory. It contains collectives only between ranks that
        share the example. These ranks make the same calls, so all of them record or all replay. Collectives between
        data ranks split the graph (`device.outside_graph`), so `context` must differ between calls with and without
        them.
        """
        if not self.records:
            return function(inputs)
        reason = self.plan.why_no_graphs("cuda") if self.plan.offload else None
        memory = next(model.parameters()).data_ptr()
        packed = next((module.packed for module in model.modules() if isinstance(module, Linear)), None)
        if packed is not None:
            # A replayed graph does not look at the weights, so it would not notice that one was written to.
            packed.catch_up()
        return self.graphs.call(function, inputs, (model.training, memory, context), reason)

    def _on_any_rank(self, value: bool) -> bool:
        """Return whether the value is true on any rank that shares the example. All of them must call it."""
        return any(all_gather_object(value, self.mesh.model, "whether graphs are recorded again"))

    def rows(self, count: int) -> list[slice]:
        """Split `count` rows of z into slices of `plan.chunk` rows that are computed together."""
        return split_rows(count, self.plan.chunk or max(count, 1))

    def pair_memory(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Allocate zeros for z in the dtype of the trunk; with `offload`, in host memory."""
        if not (self.plan.offload and self.plan.in_place):
            return super().pair_memory(like, shape)
        return self._in_host_memory(like, shape)

    def alloc_rarely_used(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Allocate zeros for a tensor that is accessed rarely; with `in_place` on a GPU, in host memory."""
        if self.plan.in_place and backend(like) == "triton":
            return self._in_host_memory(like, shape)
        return self.pair_memory(like, shape)

    def _in_host_memory(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        assert self.plan.chunk is not None
        # Slices consist of complete tiles. On a GPU a slice is one band of tiles, which is copied at once.
        tile = self.plan.chunk if backend(like) == "triton" else self.plan.chunk * -(-TILE // self.plan.chunk)
        return HostTensor(shape, self.dtype, like.device, tile)

    def parts(self, count: int, positions: int) -> list[slice]:
        """Split `count` templates into groups that are computed together: single templates if layers run in slices."""
        if self.plan.chunk is None:
            return super().parts(count, positions)
        return [slice(i, i + 1) for i in range(count)]

    def _over_ranks(self, module: nn.Module, states: Tensors, masks: Tensors) -> Tensors:
        """Run a stack, or a block outside of stacks, on this rank's shards."""
        if module not in self._sharded:
            raise ValueError(
                f"{type(module).__name__}: it was not bound itself (it is a copy, or part of a stack). Bind it first."
            )
        return self._sharded[module].run(states, masks)

    def _shard(self, model: nn.Module) -> dict[nn.Module, ShardedStack]:
        """Create a `ShardedStack` for each stack, and for each block outside of stacks."""
        sharded: dict[nn.Module, ShardedStack] = {}
        # Blocks that already belong to a `ShardedStack`, and all their modules.
        inside: set[nn.Module] = set()
        main = main_stack(model)
        for name, module in model.named_modules():
            if module in inside:
                continue
            if isinstance(module, AxialUpdate):
                raise UserError(
                    f"plan.axial = {self.plan.axial}, plan.branch = {self.plan.branch}: {name or 'the layer'} "
                    f"({type(module).__name__}) is not part of a block. Put it into a block, or set both to 1."
                )
            if isinstance(module, BlockStack | Block):
                keeps = self.plan.keep_blocks if module is main else 0
                stack = ShardedStack(name, module, self.plan, self.mesh, self._compiled, keeps, self._channels)
                sharded[module] = stack
                inside.update(part for block in stack.blocks for part in block.modules())
        return sharded


def main_stack(model: nn.Module) -> BlockStack | None:
    """Return a model's main stack of blocks, which is the last one; None without stacks."""
    stacks = [module for module in model.modules() if isinstance(module, BlockStack)]
    return stacks[-1] if stacks else None


class _Compiled:
    """A layer with compiled functions. All other attributes are those of the original layer."""

    def __init__(self, layer: AxialUpdate) -> None:
        self._layer = layer
        for name in COMPILED:
            if hasattr(layer, name):
                setattr(self, name, torch.compile(getattr(layer, name), dynamic=False))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def cpp_compiler() -> str | None:
    """Return the path of the C++ compiler that torch.compile uses for a CPU (CXX or g++); None if it is missing."""
    return shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"))


def _compile(model: nn.Module) -> dict[AxialUpdate, Any]:
    """Compile the layers with shared tensors. A transition, which has none, would get slower."""
    if not torch.cuda.is_available() and cpp_compiler() is None:
        raise UserError("plan.compile: a CPU needs a C++ compiler. Install g++, or set plan.compile = false.")
    torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, MAX_COMPILED_SHAPES)
    layers = (module for module in model.modules() if isinstance(module, AxialUpdate))
    return {layer: _Compiled(layer) for layer in layers if layer.shares is not None}
