"""Run stacks over several ranks: layers compute on shards, and collectives overlap with computation.

Layers alternate between shards of rows and shards of columns. `layout_plan` derives from the steps of the blocks,
before anything runs, which shard of m or z each step needs next. An all-to-all therefore begins as soon as its input
exists, and the layer that needs the result waits for it. A layer is a generator of phases. It yields where it would
wait, so that another layer can run meanwhile.

Plans with `in_place` reshard tensors piece by piece. A piece holds the same few rows of every rank's shard, and the
next piece is in flight while the current one is copied to the result. This saves memory: a tensor that is sent whole
exists four times, as the source, the send buffer, the receive buffer and the joined result.
"""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from warpfold.errors import UserError
from warpfold.model.axial import (
    COLS,
    ROWS,
    AxialUpdate,
    Block,
    BlockStack,
    Residues,
    Shared,
    Step,
    Steps,
    Tensors,
    residual,
)
from warpfold.model.evoformer import TriangleMultiplication
from warpfold.model.layers import project
from warpfold.ops.dispatch import uniform_loop, using, with_progress
from warpfold.ops.noise import Factors
from warpfold.ops.triangle import triangle_product
from warpfold.parallel.collectives import (
    Pending,
    all_gather,
    all_to_all,
    local_shard,
    sendrecv,
    shard_sizes,
    tied,
)
from warpfold.parallel.mesh import Group, Mesh
from warpfold.parallel.plan import Plan
from warpfold.parallel.slices import (
    cut_axes,
    cut_factors,
    mask_slice,
    shared_in_slices,
    slice_elements,
    split_rows,
    update_in_slices,
)

T = TypeVar("T")
# A layer that yields the tensors for which it is about to wait.
Phases = Generator[Sequence[Pending], None, "ShardedTensor"]
Sharded = dict[str, "ShardedTensor"]
# This rank's shards of the mask of a state, by the axis along which the state is sharded.
Mask = Mapping[int, Tensor]
# States enter and leave a stack sharded by residues along these axes.
ENTRY_AXES = {"m": COLS, "z": ROWS}


@dataclass(frozen=True)
class Piece:
    """The same rows of every rank's shard, which moves at once. Shorter shards contribute fewer rows or none.

    offsets, sizes: the first row of each rank's contribution in the full tensor, and its number of rows.
    start: the first row in the shard of this rank.
    """

    rank: int
    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def length(self) -> int:
        """Number of rows on all ranks together."""
        return sum(self.sizes)

    @property
    def local_rows(self) -> slice:
        """The rows of this rank's shard."""
        return slice(self.start, self.start + self.sizes[self.rank])

    def narrow(self, x: Tensor, axis: int) -> Tensor:
        """Return this rank's rows as a view of its shard x."""
        return x.narrow(axis, self.start, self.sizes[self.rank])


def pieces(length: int, rows: int, group: Group) -> Iterator[Piece]:
    """Yield pieces of at most `rows` rows of each rank's shard. All ranks yield the same number of pieces.

    length: rows of the full tensor. The sizes within a piece equal `shard_sizes(piece.length)`, as collectives require.
    Raises RuntimeError if gradients are enabled.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("plan.in_place: it cannot be differentiated. Use torch.no_grad(), or plan.chunk alone.")
    shards = shard_sizes(length, group.size)
    begins = [0, *accumulate(shards)]
    for start in uniform_loop(range(0, max(shards), rows)):
        starts = [min(start, size) for size in shards]
        sizes = tuple(min(rows, size - at) for size, at in zip(shards, starts))
        yield Piece(group.rank, starts[group.rank], tuple(map(sum, zip(begins, starts))), sizes)


def prefetch_one(items: Iterator[T]) -> Iterator[T]:
    """Yield each item after the next one has been created, so that the next collective starts before the wait."""
    waiting: deque[T] = deque()
    for item in items:
        waiting.append(item)
        # Drop this reference, so that the consumer alone decides how long the item lives.
        del item
        if len(waiting) > 1:
            yield waiting.popleft()
    yield from waiting


def join_pieces(
    begin: Callable[[Piece], Sequence[Pending]],
    axis: int,
    length: int,
    rows: int,
    group: Group,
) -> Tensors:
    """Assemble full tensors piece by piece.

    begin: start the collectives of a piece, one for each tensor. Each yields the rows of all ranks along `axis`, in the
    order of ranks.
    """
    joined: list[Tensor] = []

    def copy_into_result(piece: Piece, arriving: Sequence[Pending]) -> None:
        """Wait for a piece and copy it into the result. Its locals free the piece on return."""
        for index, pending in enumerate(arriving):
            received = pending.wait()
            if len(joined) == index:
                shape = list(received.shape)
                shape[axis] = length
                joined.append(received.new_empty(shape))
            for offset, shard in zip(piece.offsets, received.split(piece.sizes, axis)):
                joined[index].narrow(axis, offset, shard.shape[axis]).copy_(shard)

    for piece, arriving in prefetch_one((piece, begin(piece)) for piece in pieces(length, rows, group)):
        copy_into_result(piece, arriving)
        # Free this piece before the piece after the next one starts.
        del arriving
    return tuple(joined)


class ShardedTensor:
    """State m [*, s, r, c] or z [*, i, j, c], sharded along ROWS or COLS, or temporarily along both.

    An all-to-all makes the second shard from the first. `start` begins it when its use is foreseen, and `local` waits
    for it.
    lengths: rows and columns of the full tensor.
    piece: for plans with `in_place`, the number of elements sent at once. The second shard is then made at its first
    use, piece by piece, and the storage of the first shard is released: the caller's tensor is empty afterwards.
    """

    def __init__(
        self,
        axis: int,
        shard: Tensor | Pending,
        lengths: Mapping[int, int],
        group: Group,
        name: str,
        piece: int | None,
    ) -> None:
        self.lengths, self.group, self.name = lengths, group, name
        self.piece = piece if group.size > 1 else None
        self._shards = {axis: shard if isinstance(shard, Pending) else Pending(shard)}

    @property
    def available_axis(self) -> int:
        """An axis whose shard has arrived; otherwise the axis of a shard in flight."""
        return next((axis for axis, pending in self._shards.items() if pending.arrived), next(iter(self._shards)))

    def start(self, axis: int) -> None:
        """Start the all-to-all to the shard along `axis`, unless the shard exists or its source is in flight."""
        had = self.available_axis
        if axis not in self._shards and self._shards[had].arrived and self.piece is None:
            x = self._shards[had].wait()
            self._shards[axis] = all_to_all(x, had, axis, self.lengths[had], self.group, self._name_of_move(axis))

    def future(self, axis: int) -> Pending:
        """Return this rank's shard along `axis`, which may be in flight."""
        if axis not in self._shards:
            # The other shard is the source of this one.
            self._shards[self.available_axis].wait()
            if self.piece is not None:
                self._move(axis)
            self.start(axis)
        return self._shards[axis]

    def _move(self, axis: int) -> None:
        """Make the shard along `axis` piece by piece, and release the other shard."""
        had = self.available_axis
        x = self._shards.pop(had).wait()

        def begin(piece: Piece) -> list[Pending]:
            rows = piece.narrow(x, had)
            return [all_to_all(rows, had, axis, piece.length, self.group, self._name_of_move(axis))]

        (new,) = join_pieces(begin, had, self.lengths[had], self.rows(had, x), self.group)
        # Release the storage even if a caller still holds the tensor.
        x.data = x.new_empty(0)
        self._shards[axis] = Pending(new)

    def rows(self, axis: int, like: Tensor | None = None) -> int:
        """Return the rows of a piece along `axis`, the same on all ranks. like: any shard of the tensor."""
        assert self.piece is not None
        whole = math.prod(self.whole_shape(self.local(self.available_axis) if like is None else like))
        return max(self.piece * self.lengths[axis] // max(whole, 1), 1)

    def _name_of_move(self, axis: int) -> str:
        return f"{self.name} to {'rows' if axis == ROWS else 'columns'}"

    def local(self, axis: int) -> Tensor:
        """Return this rank's shard along `axis`, after waiting for it."""
        return self.future(axis).wait()

    def detach_axis(self, axis: int) -> "ShardedTensor":
        """Return a tensor with the shard along `axis` alone: the input that a block saves."""
        self.start(axis)
        if axis not in self._shards:
            # The source is still in flight, so the block starts from that shard.
            axis = self.available_axis
        self._shards[axis].is_block_input = True
        return self.with_shard(axis, self._shards[axis])

    def with_shard(self, axis: int, shard: Tensor | Pending) -> "ShardedTensor":
        """Return a tensor of the same full shape with another shard."""
        return ShardedTensor(axis, shard, self.lengths, self.group, self.name, self.piece)

    def whole_shape(self, like: Tensor) -> list[int]:
        """Return the shape of the full tensor. like: any shard of it."""
        shape = list(like.shape)
        shape[ROWS], shape[COLS] = self.lengths[ROWS], self.lengths[COLS]
        return shape


class ShardedResidues(Residues):
    """Residues of one rank of an axial group. `replicas` branch ranks hold the same residues."""

    def __init__(self, group: Group, replicas: int) -> None:
        self.group, self.shards, self.replicas = group, group.size, replicas

    def local_shard(self, x: Tensor, axis: int) -> Tensor:
        return local_shard(x, axis, self.group)

    def all_gather(self, x: Tensor, axis: int, length: int) -> Tensor:
        return all_gather(x, axis, length, self.group, "residues").wait()

    def shard_spans(self, length: int) -> list[slice]:
        ends = [0, *accumulate(shard_sizes(length, self.group.size))]
        return [slice(*pair) for pair in pairwise(ends)]

    def transposed(self, z: Tensor, length: int) -> Tensor:
        return all_to_all(z, ROWS, COLS, length, self.group, "pairs").wait().transpose(ROWS, COLS)


@dataclass(frozen=True)
class StepLayout:
    """Sharded axis of a step's result, and the axes along which later steps need its state and the other state.

    next, other_next: None if any axis will do.
    """

    name: str
    axis: int
    next: int | None
    other_next: int | None = None


@dataclass(frozen=True)
class BlockLayout:
    """Layout of a block.

    enters: sharded axis of each state at the entry, None if any axis will do. steps: layout of each step.
    runs: ranges of steps within which the states are independent of each other.
    """

    enters: Mapping[str, int | None]
    steps: tuple[StepLayout, ...]
    runs: list[range]


def layout_plan(name: str, blocks: Sequence[Block], by_channels: bool, branch: Group) -> list[BlockLayout]:
    """Compute the layout of every block by following each state through all steps.

    by_channels: triangle products accept z sharded along either axis.
    branch: group whose ranks divide the steps between them; a state is resharded only for the steps of this rank.
    """
    present = dict(ENTRY_AXES)
    # The sharded axis of each step's result.
    axes = []
    for block in blocks:
        for step in block.steps:
            axis, _ = _axes_read(step, by_channels)
            present[step.state] = present[step.state] if axis is None else axis
            axes.append(present[step.state])
    # The axis that later steps need; therefore the steps are visited in reverse.
    needed_axes: dict[str, int | None] = {**ENTRY_AXES}
    layouts = []
    for block in reversed(blocks):
        names = {module: key for key, module in block.named_modules()}
        enters: dict[str, int | None] = dict.fromkeys(block.states)
        remote_steps, steps = _remote_steps(block, branch), []
        for index, step in reversed(list(enumerate(block.steps))):
            axis, other_axis = _axes_read(step, by_channels)
            next_axis, other_next = needed_axes[step.state], None
            enters[step.state] = needed_axes[step.state] = None if index in remote_steps else axis
            if step.other is not None and index not in remote_steps:
                other_next = needed_axes[step.other]
                enters[step.other] = needed_axes[step.other] = other_axis
            label = names.get(step.layer, type(step.layer).__name__)
            steps.append(StepLayout(f"{name} {label}", axes.pop(), next_axis, other_next))
        layouts.append(BlockLayout(enters, tuple(reversed(steps)), independent_runs(block.steps)))
    return layouts[::-1]


def _axes_read(step: Step, by_channels: bool) -> tuple[int | None, int | None]:
    """Return the sharded axes that a step requires of its state and of the other state; None if any will do."""
    layer = step.layer
    if not can_be_cut(layer):
        return None, None
    axis = None if by_channels and isinstance(layer, TriangleMultiplication) else layer.axis
    return axis, layer.read_axis if layer.reads == "other" else None


def can_be_cut(layer: nn.Module) -> TypeGuard[AxialUpdate]:
    """Return whether a layer can be sharded and sliced: it must not override `AxialUpdate.forward`."""
    return isinstance(layer, AxialUpdate) and type(layer).forward is AxialUpdate.forward


def independent_runs(steps: Steps) -> list[range]:
    """Split the steps into runs within which no step reads a state that another state's step has changed.

    The states of a run are independent, so their steps may run at the same time.
    """
    starts, written = [0], set[str]()
    for index, step in enumerate(steps):
        if step.other in written:
            starts.append(index)
            written = set()
        written.add(step.state)
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(steps)])]


def _states_by_rank(states: Sequence[str], branch: Group) -> Sequence[str]:
    """Order the states of independent steps so that the state of this branch rank comes first."""
    return states if branch.rank == 0 else states[::-1]


def _remote_steps(block: Block, branch: Group) -> set[int]:
    """Return the indices of a block's steps that only the other branch rank runs."""
    remote: set[int] = set()
    for run in independent_runs(block.steps) if branch.size > 1 else ():
        own_state, *_ = _states_by_rank(_changed_states([block.steps[index] for index in run], block.states), branch)
        remote |= {index for index in run if block.steps[index].state != own_state}
    return remote


def _changed_states(steps: Sequence[Step], states: Sequence[str]) -> list[str]:
    """Return the states that the steps change, in the order of a block's states."""
    return [state for state in states if any(step.state == state for step in steps)]


def unsupported_reason(plan: Plan, name: str, block: Block) -> str | None:
    """Explain why a block cannot run with plan.axial or plan.branch above 1; None if it can."""
    setting, size = ("plan.axial", plan.axial) if plan.axial > 1 else ("plan.branch", plan.branch)
    kind = f"{name or 'the block'} ({type(block).__name__})"
    if type(block).forward is not Block.forward:
        return (
            f"{setting} = {size}: {kind} overrides `forward`, and only its steps could be sharded. Set {setting} = 1."
        )
    if not set(block.states) <= ENTRY_AXES.keys():
        names = ", ".join(block.states)
        return f"{setting} = {size}: {kind} has the states {names}; only m and z are supported. Set {setting} = 1."
    steps = block.checked_steps()
    for layer, step in ((type(step.layer).__name__, step) for step in steps):
        if plan.axial > 1 and not can_be_cut(step.layer):
            reason = "overrides `forward`" if isinstance(step.layer, AxialUpdate) else "is not an AxialUpdate"
            return f"{setting} = {size}: {layer} in {kind} {reason}, so it cannot be sharded. Set {setting} = 1."
        if isinstance(step.layer, AxialUpdate) and step.layer.mask_of != step.layer.reads:
            return f"{setting} = {size}: {layer} in {kind} is masked by its other state. Set {setting} = 1."
    halves = any(len({steps[index].state for index in run}) > 1 for run in independent_runs(steps))
    if plan.branch > 1 and len(block.states) > 1 and not halves:
        return plan.unsupported_reason("middle")
    return None


class ShardedStack:
    """A sequence of blocks on this rank of a mesh: states sharded over axial ranks, halves divided over branch ranks.

    module: a stack, or a single block outside of stacks. compiled: compiled replacements of layers.
    keep_blocks: number of last blocks that are not recomputed. channels: channels of the model's z.
    Raises UserError for a block that the plan cannot run.
    """

    def __init__(
        self,
        name: str,
        module: BlockStack | Block,
        plan: Plan,
        mesh: Mesh,
        compiled: Mapping[AxialUpdate, AxialUpdate],
        keep_blocks: int,
        channels: int,
    ) -> None:
        self.name, self.module, self.plan, self.mesh, self.group = name, module, plan, mesh, mesh.axial
        self.compiled, self.keep_blocks, self.channels = compiled, keep_blocks, channels
        self._planned: list[tuple[Block, type[Block], Steps]] | None = None
        self._plan_layouts()

    def _plan_layouts(self) -> None:
        """Compute the layouts of the present blocks, if a layer or block was replaced since the last call."""
        module = self.module
        self.blocks = cast(list[Block], [*module.blocks] if isinstance(module, BlockStack) else [module])
        current = [(block, type(block), block.steps) for block in self.blocks]
        if current == self._planned:
            return
        for block in self.blocks:
            if reason := unsupported_reason(self.plan, self.name, block):
                raise UserError(reason)
        # Whether triangle products are sharded by channels depends on the length of each example.
        self.layouts = {
            by_channels: layout_plan(self.name, self.blocks, by_channels, self.mesh.branch)
            for by_channels in (False, True)
        }
        products = (
            step.layer for *_, steps in current for step in steps if isinstance(step.layer, TriangleMultiplication)
        )
        self.product_channels = next((layer.channels for layer in products), 0)
        self._planned = current

    def run(self, states: Tensors, masks: Tensors) -> Tensors:
        """Run the blocks on this rank's shards of the states; returns the new shards.

        masks: the full mask of m, and this rank's rows of the mask of z.
        """
        self._plan_layouts()
        if not self.blocks:
            return states
        names = self.blocks[0].states
        # The last axis is full in either mask.
        residues = masks[0].shape[-1]
        z = states[names.index("z")] if "z" in names else states[0]
        c_z, size = z.shape[-1], z.element_size()
        by_channels = self.plan.by_channels(residues, self.group.size, self.product_channels, c_z, size)
        # In place, tensors are resharded in pieces of this many elements.
        chunk = self.plan.chunk if self.plan.in_place else None
        piece = None if chunk is None else slice_elements(chunk, residues, self.channels or c_z)
        sharded: Sharded = {}
        mask: dict[str, Mask] = {}
        for name, state, its_mask in zip(names, states, masks):
            lengths = {ROWS: state.shape[ROWS] if name == "m" else residues, COLS: residues}
            sharded[name] = ShardedTensor(ENTRY_AXES[name], state, lengths, self.group, f"{self.name} {name}", piece)
            self._check_shard(sharded[name], name, state)
            if name == "m":
                # A mask has no channel axis, so its axes are shifted by one.
                mask[name] = {axis: local_shard(its_mask, axis + 1, self.group) for axis in (ROWS, COLS)}
            else:
                # The pair mask is symmetric, so the transpose of its rows is its columns.
                mask[name] = {ROWS: its_mask, COLS: its_mask.mT}
        recomputed = len(self.blocks) - self.keep_blocks if self.plan.recompute == "block" else 0
        for index, (block, layout) in with_progress(list(enumerate(zip(self.blocks, self.layouts[by_channels])))):
            if self.mesh.branch.size > 1:
                # Wait for the other branch's tensor outside of the checkpoint: a recomputation must not receive again.
                for x in sharded.values():
                    x.local(x.available_axis)
            enters = zip(sharded.values(), layout.enters.values())
            inputs = [x.detach_axis(x.available_axis if axis is None else axis) for x, axis in enters]
            run = partial(self._block, block, layout, by_channels, mask)
            if index < recomputed and torch.is_grad_enabled():
                # A graph could not read the generator's state (see `Execution._recomputed`).
                preserves = self.plan.graph is not True
                new = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=preserves)
            else:
                new = run(*inputs)
            sharded = dict(zip(names, new))
        outputs = tuple(x.local(ENTRY_AXES[name]) for name, x in sharded.items())
        # Nothing uses the m of the extra MSA stack. Tie it to z, so that both branch ranks join its gradient
        # collective.
        return tied(*outputs) if self.mesh.branch.size > 1 else outputs

    def _check_shard(self, held: ShardedTensor, name: str, state: Tensor) -> None:
        """Raise ValueError if a state is not this rank's shard. A collective would fail without naming the cause."""
        expected, group, axis = held.whole_shape(state), self.group, ENTRY_AXES[name]
        expected[axis] = shard_sizes(expected[axis], group.size)[group.rank]
        if list(state.shape) != expected:
            raise ValueError(
                f"{self.name or 'the stack'}: on rank {group.rank} of {group.size}, {name} is {list(state.shape)}, not "
                f"{expected}, as the first mask has {held.lengths[COLS]} residues. Cut m along axis -2, z along axis "
                f"-3 and the mask of z along axis -2 with `local_shard`. Keep the mask of m whole."
            )

    def _block(
        self, block: Block, layout: BlockLayout, by_channels: bool, mask: dict[str, Mask], *states: ShardedTensor
    ) -> tuple[ShardedTensor, ...]:
        """Run one block. Second shards of its input states live only while it runs."""
        # Autograd may recompute the block in another thread, which needs the same choice of kernels.
        with using(self.plan.kernels):
            sharded = dict(zip(block.states, (x.detach_axis(x.available_axis) for x in states)))
            steps = list(zip(block.steps, layout.steps))
            for run in with_progress(layout.runs):
                sharded |= self._run_independent([steps[index] for index in run], by_channels, sharded, mask)
            return tuple(sharded.values())

    def _run_independent(
        self, steps: list[tuple[Step, StepLayout]], by_channels: bool, held: Sharded, mask: Mapping[str, Mask]
    ) -> Sharded:
        """Run steps whose states are independent: interleaved on one branch rank, or each state on its own rank."""
        states = _changed_states([step for step, _ in steps], list(held))
        chains = {state: [(step, layout) for step, layout in steps if step.state == state] for state in states}
        if self.mesh.branch.size == 1 or len(states) == 1:
            results = _interleave(*(self._chain(chain, by_channels, held, mask) for chain in chains.values()))
            return dict(zip(states, results))
        own_state, other_state = _states_by_rank(states, self.mesh.branch)
        (result,) = _interleave(self._chain(chains[own_state], by_channels, held, mask))
        axis, other_axis = (chains[state][-1][1].axis for state in (own_state, other_state))
        other_tensor = held[other_state]
        shape = other_tensor.whole_shape(other_tensor.local(other_tensor.available_axis))
        shape[other_axis] = shard_sizes(other_tensor.lengths[other_axis], self.group.size)[self.group.rank]
        # The two branch ranks swap the states that they have computed.
        received = sendrecv(result.local(axis), shape, self.mesh.branch, f"{other_tensor.name} of the other branch")
        return {own_state: result, other_state: other_tensor.with_shard(other_axis, received)}

    def _chain(
        self, steps: list[tuple[Step, StepLayout]], by_channels: bool, held: Sharded, mask: Mapping[str, Mask]
    ) -> Phases:
        """Run the steps of one state. They read the other states from `held`."""
        x = held[steps[0][0].state]
        for step, layout in steps:
            other = None if step.other is None else held[step.other]
            layer = step.layer
            if not can_be_cut(layer) or (self.plan.axial == 1 and self.plan.chunk is None):
                # Every rank has full tensors here: one axial rank, two branches.
                full, other_inputs = x.available_axis, () if other is None else (other.local(other.available_axis),)
                x = self._leave(x, full, layer(x.local(full), mask[step.masked][full], *other_inputs), layout)
                continue
            run = self.compiled.get(layer, layer)
            if by_channels and isinstance(layer, TriangleMultiplication):
                x = yield from self._by_channels(cast(TriangleMultiplication, run), x, mask[step.masked], layout)
            else:
                x = yield from self._by_slices(run, x, mask[step.masked], other, layout)
        return x

    def _by_slices(
        self, layer: AxialUpdate, x: ShardedTensor, mask: Mask, other: ShardedTensor | None, layout: StepLayout
    ) -> Phases:
        """Run a layer, yielding before each wait for other ranks."""
        axis, read_axis = cut_axes(layer, x.available_axis)
        read = other if other is not None and layer.reads == "other" else x
        pending: list[Pending] = []
        if x.piece is not None and read is x:
            # Reshard x before the shared tensors take memory.
            x.future(axis)
        if other is not None and layer.shares != layer.reads == "x":
            # `shared` is computed position by position here, so any shard of `other` will do.
            pending = self._share(layer, other, mask, other.available_axis, layout)
        yield [read.future(read_axis)]
        held_read, n_mask = read.local(read_axis), mask[read_axis]
        if x.piece is not None and layer.pieces_axis is not None:
            factors = self._factors(layer, x, x.local(axis), axis)
            return self._leave(x, axis, update_from_pieces(layer, x, read, n_mask, factors, layout.name), layout)
        if layer.shares == layer.reads:
            pending = self._share(layer, read, mask, read_axis, layout)
        prepared = layer.prepare(held_read, n_mask) if self.plan.chunk is None else held_read
        yield pending
        shared: Shared = tuple(p.wait() for p in pending) if layer.shares is not None else None
        dx = None
        if self.plan.chunk is None and read is not x:
            # x may still be in flight: compute the update without the residual meanwhile.
            dx = layer.update(prepared, n_mask, shared, None, None)
        yield [x.future(axis)]
        shard = x.local(axis)
        factors = self._factors(layer, x, shard, axis)
        if dx is not None:
            new = residual(shard, dx, factors)
        elif self.plan.chunk is None:
            new = layer.update(prepared, n_mask, shared, shard, factors)
        else:
            new = update_in_slices(
                layer,
                shard,
                held_read,
                n_mask,
                shared=shared,
                factors=factors,
                axes=(axis, read_axis),
                max_elements=self._slice_elements(x),
                in_place=self.plan.in_place,
            )
        return self._leave(x, axis, new, layout)

    def _slice_elements(self, x: ShardedTensor) -> int:
        """Return the number of elements in the plan's slices of a state."""
        assert self.plan.chunk is not None
        return slice_elements(self.plan.chunk, x.lengths[COLS], self.channels or x.local(x.available_axis).shape[-1])

    def _share(
        self, layer: AxialUpdate, source: ShardedTensor, mask: Mask, axis: int, layout: StepLayout
    ) -> list[Pending]:
        """Compute `shared` from this rank's shard along `axis`, and start to gather each of its tensors."""
        shard, length, name = source.local(axis), source.lengths[axis], f"{layout.name} shared"
        if source.piece is not None:
            return [Pending(t) for t in shared_in_pieces(layer, source, mask[axis], axis, name)]
        if self.plan.chunk is not None:
            tensors = shared_in_slices(layer, shard, mask[axis], axis, self._slice_elements(source))
        else:
            tensors = layer.shared(shard, mask[axis])
        join_axis = layer.join_axis(axis)
        pending = [all_gather(t, join_axis, length, self.group, f"{name} {i}") for i, t in enumerate(tensors)]
        if layout.other_next is not None:
            # Started after the gathers, which are needed sooner and share the links.
            source.start(layout.other_next)
        return pending

    def _by_channels(self, layer: TriangleMultiplication, x: ShardedTensor, mask: Mask, layout: StepLayout) -> Phases:
        """Run a triangle product on all rows and columns of this rank's channels.

        x may be sharded along either axis.
        """
        axis = x.available_axis
        yield [x.future(axis)]
        shard = x.local(axis)
        factors = self._factors(layer, x, shard, axis)
        exchange = ChannelExchange(layer, axis, x.lengths[axis], self.group, layout.name)
        if x.piece is not None:
            new = multiply_in_place(exchange, shard, mask[axis], factors, x.rows(axis))
        else:
            right = exchange.right(shard, mask[axis], x.lengths[axis])
            new = yield from exchange.product(shard, mask[axis], right, factors, x.lengths[axis])
        return self._leave(x, axis, new, layout)

    def _factors(self, layer: AxialUpdate, x: ShardedTensor, held: Tensor, axis: int) -> Factors | None:
        """Draw the dropout factors for the full x, and return this rank's shard."""
        factors = layer.dropout_factors(x.whole_shape(held), held)
        if factors is None or factors.shape[axis] == 1:
            return factors
        return local_shard(factors, axis, self.group)

    def _leave(self, x: ShardedTensor, axis: int, new: Tensor, layout: StepLayout) -> ShardedTensor:
        """Return the new x, and start to reshard it along the axis that a later step needs."""
        out = x.with_shard(axis, new)
        if layout.next is not None:
            out.start(layout.next)
        return out


def _interleave(*generators: Phases) -> tuple[ShardedTensor, ...]:
    """Interleave generators: each runs until it would wait, and blocks only if all others would wait too.

    The order must not depend on timing, because the recomputation of a block must repeat it although its inputs have
    arrived by then. So a tensor that was ever in flight counts as a wait at its first request, whether it has arrived
    or not.
    """
    results: dict[int, ShardedTensor] = {}
    requested: set[Pending] = set()
    queue = deque(enumerate(generators))
    while queue:
        number, generator = queue.popleft()
        try:
            while not (new := {p for p in next(generator) if p.travels} - requested):
                pass
            requested |= new
            queue.append((number, generator))
        except StopIteration as end:
            results[number] = end.value
    return tuple(results[number] for number in range(len(generators)))


# Layers that write over a rank's shard. Apart from the shards of m and z, a rank holds the layer's shared tensors and a
# few pieces. A triangle product holds one factor (all rows and columns of this rank's channels), an attention its bias,
# and an outer product one piece of the right factor.

# A gathered piece is at most as large as this many ranks' slices. With more ranks, each contributes fewer rows.
MAX_GATHERED_RANKS = 8


def shared_in_pieces(layer: AxialUpdate, source: ShardedTensor, mask: Tensor, axis: int, name: str) -> Tensors:
    """Compute the full `shared` from all ranks' shards along `axis`, piece by piece. mask: for this rank's shard."""
    x, length, group = source.local(axis), source.lengths[axis], source.group
    # A gathered piece has the rows of all ranks, so it must not grow with their number.
    rows = max(min(source.rows(axis), source.rows(axis) * MAX_GATHERED_RANKS // group.size), 1)
    join_axis = layer.join_axis(axis)

    def begin(piece: Piece) -> list[Pending]:
        assert layer.shares is not None
        n_mask = mask_slice(layer, layer.shares, mask, axis, piece.local_rows)
        tensors = layer.shared(piece.narrow(x, axis), n_mask)
        return [all_gather(t, join_axis, piece.length, group, f"{name} {i}") for i, t in enumerate(tensors)]

    return join_pieces(begin, join_axis, length, rows, group)


def update_from_pieces(
    layer: AxialUpdate, target: ShardedTensor, source: ShardedTensor, mask: Tensor, factors: Factors | None, name: str
) -> Tensor:
    """Update this rank's shard of x in place with one gathered piece of `shared` after another.

    Only for layers with `pieces_axis`, such as the outer product mean.
    target: x [*, i, j, c]. source: the state that the layer reads. mask: for this rank's shard of the source.
    """
    cuts, axis = layer.pieces_axis, layer.read_axis
    assert cuts is not None
    assert axis is not None
    read, length, group, join_axis = source.local(axis), source.lengths[axis], source.group, layer.join_axis(axis)
    along, _ = cut_axes(layer, target.available_axis)
    x, rows = target.local(along), target.rows(along)

    def read_rows(part: slice) -> tuple[Tensor, Tensor]:
        return read.narrow(axis, part.start, part.stop - part.start), mask_slice(layer, layer.reads, mask, axis, part)

    parts = split_rows(read.shape[axis], rows)
    prepared = tuple(torch.cat(tensors, axis) for tensors in zip(*(layer.prepare(*read_rows(part)) for part in parts)))

    def begin(piece: Piece) -> tuple[Piece, list[Pending]]:
        tensors = layer.shared(*read_rows(piece.local_rows))
        return piece, [
            all_gather(t, join_axis, piece.length, group, f"{name} shared {i}") for i, t in enumerate(tensors)
        ]

    for piece, arriving in prefetch_one(map(begin, pieces(length, rows, group))):
        shared = [pending.wait().split(piece.sizes, join_axis) for pending in arriving]
        for offset, size, *from_rank in zip(piece.offsets, piece.sizes, *shared):
            part = x.narrow(cuts, offset, size)
            drawn = cut_factors(factors, cuts, offset, size)
            part.copy_(layer.update(prepared, mask, tuple(from_rank), part, drawn))
    return x


@dataclass(frozen=True)
class ChannelExchange:
    """A triangle product for which ranks exchange shards of positions for shards of channels, and back.

    axis: the axis along which x is sharded. length: of the full x along this axis. The factors have their channels
    first, so the corresponding axis of a factor is `axis` + 1.
    """

    layer: TriangleMultiplication
    axis: int
    length: int
    group: Group
    name: str

    def right(self, x: Tensor, mask: Tensor, length: int) -> Pending:
        """Compute the factor b of some rows of x, and start its exchange. length: number of these rows on all ranks."""
        return self._exchange(self.layer.factor("b", x, mask), length, "right")

    def _exchange(self, factor: Tensor, length: int, name: str) -> Pending:
        return all_to_all(factor, self.axis + 1, -3, length, self.group, f"{self.name} {name}")

    def product(
        self, x: Tensor, mask: Tensor, right: Pending, factors: Factors | None, length: int
    ) -> Generator[Sequence[Pending], None, Tensor]:
        """Compute x + factors * update for some rows of this rank's x (lines 2 to 4 of Algorithms 11 and 12).

        right: the factor b, all rows and columns of this rank's channels. length: number of these rows on all ranks.
        Yields the tensors in flight before waiting for them.
        """
        layer = self.layer
        left = self._exchange(layer.factor("a", x, mask), length, "left")
        # The gate is computed while the left factor is in flight.
        (gate_logits,) = project(x, layer.norm, layer.gate)
        yield [left, right]
        product = triangle_product(left.wait(), right.wait(), layer.outgoing)
        resharded = all_to_all(product, -1, self.axis, layer.channels, self.group, f"{self.name} product")
        del left, product
        yield [resharded]
        return layer.finish(resharded.wait(), gate_logits, x, factors)


def multiply_in_place(exchange: ChannelExchange, x: Tensor, mask: Tensor, factors: Factors | None, rows: int) -> Tensor:
    """Add a triangle product's update to this rank's shard x in place, `rows` rows at a time.

    The right factor is gathered completely for this rank's channels; it is as large as x if the product has as many
    channels as z. The left factor, the product and the update are made piece by piece. While one piece is multiplied,
    the next left factor and the previous product are in flight.
    """
    axis, length, group = exchange.axis, exchange.length, exchange.group

    def narrow(along: int, start: int, size: int) -> tuple[Tensor, Tensor]:
        return x.narrow(along, start, size), mask.narrow(along + 1, start, size)

    def begin_right(piece: Piece) -> list[Pending]:
        return [exchange.right(*narrow(axis, piece.start, piece.sizes[piece.rank]), piece.length)]

    (right,) = join_pieces(begin_right, axis + 1, length, rows, group)
    along = exchange.layer.axis
    assert along is not None
    # The first of this rank's rows, their number, and the number of rows on all ranks.
    cuts: Iterator[tuple[int, int, int]]
    if along == axis:
        cuts = ((piece.start, piece.sizes[piece.rank], piece.length) for piece in pieces(length, rows, group))
    else:
        # Every rank has all rows along the other axis.
        width = rows * group.size
        count = x.shape[along]
        cuts = ((start, min(width, count - start), length) for start in uniform_loop(range(0, count, width)))

    # The `del` statements free a piece before the generator resumes and creates the next one.
    def begun() -> Iterator[tuple[Tensor, Generator[Sequence[Pending], None, Tensor]]]:
        """Yield each piece with its product, whose left factor is in flight."""
        for start, size, whole_length in cuts:
            part, n_mask = narrow(along, start, size)
            product = exchange.product(
                part, n_mask, Pending(right), cut_factors(factors, along, start, size), whole_length
            )
            next(product)
            yield part, product
            del part, product

    def multiplied() -> Iterator[tuple[Tensor, Generator[Sequence[Pending], None, Tensor]]]:
        """Yield each piece with its product, which is on its way back to the shards of positions."""
        for part, product in prefetch_one(begun()):
            next(product)
            yield part, product
            del part, product

    for part, product in prefetch_one(multiplied()):
        part.copy_(exhaust(product))
        del product
    return x


def exhaust(generator: Generator[Sequence[Pending], None, Tensor]) -> Tensor:
    """Run a generator to its end, and return its result."""
    while True:
        try:
            next(generator)
        except StopIteration as end:
            result: Tensor = end.value
            return result
