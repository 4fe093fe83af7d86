"""How a plan runs a model: whole, in slices, in place, recomputed, compiled, over several ranks."""

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
from warpfold.ops.dispatch import allow_tf32, backend, kernels, using
from warpfold.parallel.mesh import Mesh
from warpfold.parallel.messages import all_gather_object
from warpfold.parallel.plan import DTYPES, Plan
from warpfold.parallel.sharded import ShardedResidues, ShardedStack
from warpfold.parallel.slices import layer_in_slices, pair_channels, slice_numbers, slices_of

COMPILED = ("shared", "prepare", "update", "factor", "finish")  # functions of a layer, which only compute
log = logging.getLogger("warpfold")
M = TypeVar("M", bound=nn.Module)
TILE = 32  # rows of a tile of z on disk, at least, and where a GPU's plan is chosen: 256 KiB with 128 channels in bf16
SHAPES = 64  # of each function that may be compiled before torch gives up, which it would only warn of


class Execution(PlainExecution):
    """Run models, stacks, blocks and layers as a plan says, on this rank of a mesh.

        execution = Execution(Plan(axial=4, recompute="block", precision="bf16"), mesh)
        model = execution.bind(model)     # from now on model(batch) runs so
        print(execution)

    It computes what the model computes in plain torch, up to rounding; nothing is kept between two calls.
    mesh: this rank's groups, of the plan's sizes; needed where axial x branch is more than one rank.
    Errors: ValueError without such a mesh.
    """

    def __init__(self, plan: Plan | None = None, mesh: Mesh | None = None) -> None:
        self.plan = plan = Plan() if plan is None else plan
        self.mesh = mesh or Mesh()
        if (self.mesh.axial.size, self.mesh.branch.size) != (plan.axial, plan.branch) and self.distributed:
            raise ValueError(
                f"a plan of axial {plan.axial} x branch {plan.branch} needs a mesh of these sizes, not {mesh}"
            )
        self.dtype, self.kernels = DTYPES[plan.precision], plan.kernels
        self.heads_in_trunk_dtype, self.in_place = plan.precision == "bf16_all", plan.in_place
        if self.distributed:
            self.residues = ShardedResidues(self.mesh.axial, plan.branch)
        self._channels = 0  # of z, in what was bound; 0: there is no z
        self._sharded: dict[nn.Module, ShardedStack] = {}
        self._compiled: dict[AxialUpdate, Any] = {}
        self._keeping: set[nn.Module] = set()  # blocks that keep everything, and their layers
        self.graphs = Graphs(self._on_any_rank if self.distributed else bool)
        self.records = plan.graph is True  # whether passes are recorded; "auto": known when a model is bound
        self._offload = Offload() if plan.offload and not plan.in_place else None

    @property
    def distributed(self) -> bool:
        """Whether several ranks share an example."""
        return self.plan.axial * self.plan.branch > 1

    def __deepcopy__(self, memo: dict[int, Any]) -> "Execution":
        """Return the same: a copy of a model runs as the original does; where ranks share it, bind it again first."""
        return self

    def __str__(self) -> str:
        p = self.plan
        ranks = f"axial {p.axial} x branch {p.branch}, rank {self.mesh.model.rank}"
        said = [ranks if self.distributed else "one device"]
        if p.chunk is not None:
            said.append(f"slices of {p.chunk} rows{', in place' if p.in_place else ''}")
        said += [
            word for word, on in (("compiled", p.compile), ("offloaded", p.offload), ("graphs", self.records)) if on
        ]
        said += [f"{p.recompute}s recomputed"] if p.recompute else []
        said += [f"but for the last {p.keep_blocks} blocks"] if p.keep_blocks else []
        return ", ".join([*said, p.precision + (", tf32" if p.tf32 else ""), f"{p.kernels} kernels"])

    def bind(self, model: M) -> M:
        """Have a model, or any module that holds trunk layers, run so from now on; return it.

        A later execution replaces this one; one that cannot run the model changes nothing.
        Errors: UserError for a block or a device that the plan cannot run, for a model with frozen parameters on
        branch ranks, or where compiling needs a compiler that is not there.
        """
        for kind in {p.device.type for p in model.parameters()}:
            if reason := self.plan.unsupported_on(kind):
                raise UserError(reason)
        if len({p.requires_grad for p in model.parameters()}) > 1 and (reason := self.plan.unsupported_when_frozen()):
            raise UserError(reason)
        self._channels = max(self._channels, pair_channels(model))
        if (stack := main_stack(model)) is not None and self.plan.keep_blocks:
            self._keeping.update(part for block in stack.blocks[-self.plan.keep_blocks :] for part in block.modules())
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
            model.double()  # a reference run: parameters too
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
                if self.plan.recompute == "block" and keeps and block not in self._keeping:
                    states = self._recomputed(block, *states, *masks)
                else:
                    states = block(*states, *masks)
        return states

    def _recomputed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return a function's result, of which the inputs alone are kept for the backward pass."""
        # Dropout noise is keyed, so it repeats; only without a seed it comes from torch's generator, whose state a
        # graph could not read.
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
        """Return x with the layer's update, or the update alone, computed at once or in slices."""
        if self.plan.axial > 1:  # it would take a shard for the whole
            raise ValueError(f"a {type(layer).__name__} of a sharded model is called outside of its block")
        if self.plan.recompute == "layer" and torch.is_grad_enabled() and layer not in self._keeping:
            result: Tensor = self._recomputed(self._layer, layer, x, mask, other, residual)
            return result
        return self._layer(layer, x, mask, other, residual)

    def _layer(self, layer: AxialUpdate, x: Tensor, mask: Tensor, other: Tensor | None, residual: bool) -> Tensor:
        layer = self._compiled.get(layer, layer)
        if self.plan.chunk is None and self.plan.kernels == kernels():
            return super().layer(layer, x, mask, other, residual)
        with using(self.plan.kernels):  # also where it is recomputed, perhaps by another thread
            if self.plan.chunk is None:
                return super().layer(layer, x, mask, other, residual)
            most = slice_numbers(self.plan.chunk, x.shape[COLS], self._channels or x.shape[-1])
            return layer_in_slices(layer, x, mask, other, most, self.plan.in_place, residual)

    def call(self, model: nn.Module, function: Function, inputs: Mapping[str, Tensor], context: Hashable = ()) -> Named:
        """Call a function of tensors, or replay the graph of an earlier call with the same shapes and context.

        A graph serves while the model's parameters keep their memory.  Messages are recorded only between ranks that
        share the example: these make the same calls, so all record one, or all replay it.  What is sent to data ranks
        cuts the graph (`device.between`), so `context` must say whether a call sends.
        """
        if not self.records:
            return function(inputs)
        reason = self.plan.why_no_graphs("cuda") if self.plan.offload else None
        memory = next(model.parameters()).data_ptr()
        packed = next((module.packed for module in model.modules() if isinstance(module, Linear)), None)
        if packed is not None:
            packed.catch_up()  # a graph asks for no weights, and would not notice that one was written to
        return self.graphs.call(function, inputs, (model.training, memory, context), reason)

    def _on_any_rank(self, found: bool) -> bool:
        """Return whether something was found on any of the ranks that share the example; all of them ask."""
        return any(all_gather_object(found, self.mesh.model, "whether graphs are recorded again"))

    def rows(self, count: int) -> list[slice]:
        """Split `count` rows of z into those that are computed together: `plan.chunk` each."""
        return slices_of(count, self.plan.chunk or max(count, 1))

    def pair_memory(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Allocate zeros for z, in the dtype of the trunk: with `offload` in host memory."""
        if not (self.plan.offload and self.plan.in_place):
            return super().pair_memory(like, shape)
        return self._in_host_memory(like, shape)

    def alloc_rarely_used(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Allocate zeros for a tensor that is used less often than z: if in place on a GPU, in host memory."""
        if self.plan.in_place and backend(like) == "triton":
            return self._in_host_memory(like, shape)
        return self.pair_memory(like, shape)

    def _in_host_memory(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        assert self.plan.chunk is not None
        # Slices begin and end between tiles.  On a GPU they fill bands of them, which travel whole.
        tile = self.plan.chunk if backend(like) == "triton" else self.plan.chunk * -(-TILE // self.plan.chunk)
        return HostTensor(shape, self.dtype, like.device, tile)

    def parts(self, count: int, positions: int) -> list[slice]:
        """Split `count` templates into those that are computed together: one each where layers run in slices."""
        if self.plan.chunk is None:
            return super().parts(count, positions)
        return [slice(i, i + 1) for i in range(count)]

    def _over_ranks(self, module: nn.Module, states: Tensors, masks: Tensors) -> Tensors:
        """Run a stack, or a block that stands alone, on this rank's shards."""
        if module not in self._sharded:
            raise ValueError(
                f"a {type(module).__name__} is called that was not bound on its own (a copy, or part of a stack): "
                "bind it first"
            )
        return self._sharded[module].run(states, masks)

    def _shard(self, model: nn.Module) -> dict[nn.Module, ShardedStack]:
        """Make the runner of each stack, and of each block outside of stacks, over the ranks."""
        found: dict[nn.Module, ShardedStack] = {}
        inside: set[nn.Module] = set()  # blocks that were found, and all their modules
        main = main_stack(model)
        for name, module in model.named_modules():
            if module in inside:
                continue
            if isinstance(module, AxialUpdate):
                raise UserError(
                    f"plan.axial = {self.plan.axial}, plan.branch = {self.plan.branch}: {name or 'the layer'} "
                    f"({type(module).__name__}) stands in no block; put it into one, or leave both at 1"
                )
            if isinstance(module, BlockStack | Block):
                keeps = self.plan.keep_blocks if module is main else 0
                found[module] = ShardedStack(name, module, self.plan, self.mesh, self._compiled, keeps, self._channels)
                inside.update(part for block in found[module].blocks for part in block.modules())
        return found


def main_stack(model: nn.Module) -> BlockStack | None:
    """Return a model's main stack of blocks: the last one, which the others lead to; None where it has none."""
    stacks = [module for module in model.modules() if isinstance(module, BlockStack)]
    return stacks[-1] if stacks else None


class _Compiled:
    """A layer whose functions are compiled; everything else is the layer's own."""

    def __init__(self, layer: AxialUpdate) -> None:
        self._layer = layer
        for name in COMPILED:
            if hasattr(layer, name):
                setattr(self, name, torch.compile(getattr(layer, name), dynamic=False))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def cpp_compiler() -> str | None:
    """Return where the C++ compiler is that torch.compile calls for a CPU: CXX, or g++; None where there is none."""
    return shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"))


def _compile(model: nn.Module) -> dict[AxialUpdate, Any]:
    """Return the layers that share something, compiled; a transition alone gets slower."""
    if not torch.cuda.is_available() and cpp_compiler() is None:
        raise UserError("plan.compile on a CPU needs a C++ compiler; install g++, or leave it out")
    torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, SHAPES)
    layers = (module for module in model.modules() if isinstance(module, AxialUpdate))
    return {layer: _Compiled(layer) for layer in layers if layer.shares is not None}
