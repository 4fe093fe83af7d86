"""Stacks over several ranks: every layer works on this rank's shards, and what it needs from others travels meanwhile.

A stack's layers are sharded along rows or columns in turn.  Which shard of m or z is wanted after a step is read from
the blocks' steps before anything runs (`layout_plan`), so an all-to-all begins as soon as its input exists, and is
awaited by the layer that needs it.  A layer works in phases: between two of them it would wait, and something else may
be done meanwhile.

Plans that work in place move tensors piece by piece: what travels is never there a second time, only a piece.  A piece
is the same few rows of every rank's shard.  The next one travels while one is put into its place.  (A tensor that
travels at once exists four times: as it is, as what is sent, as what is received, and joined.)
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
from warpfold.ops.dispatch import uniform_loop, using, watched
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
    slice_numbers,
    slices_of,
    update_in_slices,
)

T = TypeVar("T")
Phases = Generator[Sequence[Pending], None, "ShardedTensor"]  # what it is about to wait for
Sharded = dict[str, "ShardedTensor"]
Mask = Mapping[int, Tensor]  # this rank's shards of a state's mask, by the axis along which the state is sharded
ENTERS = {"m": COLS, "z": ROWS}  # how a stack's states come and go: sharded by residues


@dataclass(frozen=True)
class Piece:
    """Some rows of every rank's shard, fewer or none where a shard has ended.

    offsets, sizes: of every rank's, in the whole.  start: of this rank's, in its shard.
    """

    rank: int
    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def length(self) -> int:
        """How many rows it has on all ranks."""
        return sum(self.sizes)

    @property
    def part(self) -> slice:
        """Which rows of this rank's shard it has."""
        return slice(self.start, self.start + self.sizes[self.rank])

    def of_shard(self, x: Tensor, axis: int) -> Tensor:
        """Return this rank's rows, a view of its shard."""
        return x.narrow(axis, self.start, self.sizes[self.rank])


def pieces(length: int, rows: int, group: Group) -> Iterator[Piece]:
    """Yield pieces of at most `rows` rows of each rank's shard; `length`: of the whole.  The same number on all ranks.

    The ranks' sizes in a piece are `shard_sizes` of its length, as collectives want them.
    Errors: RuntimeError where gradients are on.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("a plan with in_place cannot be differentiated: use torch.no_grad(), or chunk alone")
    shards = shard_sizes(length, group.size)
    begins = [0, *accumulate(shards)]
    for start in uniform_loop(range(0, max(shards), rows)):
        starts = [min(start, size) for size in shards]
        sizes = tuple(min(rows, size - at) for size, at in zip(shards, starts))
        yield Piece(group.rank, starts[group.rank], tuple(map(sum, zip(begins, starts))), sizes)


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield the items, each when the next one has been made: a collective begins before the last one is awaited."""
    waiting: deque[T] = deque()
    for item in items:
        waiting.append(item)
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
    """Return whole tensors, of which `begin` sets out to make one piece after another.

    begin: starts the collectives of a piece, one for each tensor; each yields the rows of all ranks along `axis`, in
    order.
    """
    joined: list[Tensor] = []

    def put(piece: Piece, arriving: Sequence[Pending]) -> None:
        """Wait for a piece, and write it to its place."""
        for index, pending in enumerate(arriving):
            found = pending.wait()
            if len(joined) == index:
                shape = list(found.shape)
                shape[axis] = length
                joined.append(found.new_empty(shape))
            for offset, part in zip(piece.offsets, found.split(piece.sizes, axis)):
                joined[index].narrow(axis, offset, part.shape[axis]).copy_(part)

    for piece, arriving in _ahead((piece, begin(piece)) for piece in pieces(length, rows, group)):
        put(piece, arriving)
        del arriving  # before the one after the next is begun
    return tuple(joined)


class ShardedTensor:
    """m [*, s, r, c] or z [*, i, j, c], sharded along ROWS or COLS, or for a while along both.

    The second shard is made from the first by an all-to-all that is started when its use is foreseen (`start`) and
    awaited at its use (`along`).  lengths: of the whole along both axes.
    piece: for plans that work in place, how many numbers travel at a time.  The second shard is then made at its use,
    in pieces, and the first is given up, also by those who gave it to the stack: it is empty afterwards.
    """

    def __init__(
        self,
        axis: int,
        shard: Tensor | Pending,
        lengths: Mapping[int, int],
        group: Group,
        name: str,
        piece: int | None = None,
    ) -> None:
        self.lengths, self.group, self.name = lengths, group, name
        self.piece = piece if group.size > 1 else None
        self._shards = {axis: shard if isinstance(shard, Pending) else Pending(shard)}

    @property
    def present(self) -> int:
        """An axis along which its shard is here already; if none is, that of one on its way."""
        return next((axis for axis, pending in self._shards.items() if pending.arrived), next(iter(self._shards)))

    def start(self, axis: int) -> None:
        """Begin to make the shard along `axis`, unless it is there or on its way, or there is nothing to make it of."""
        had = self.present
        if axis not in self._shards and self._shards[had].arrived and self.piece is None:
            x = self._shards[had].wait()
            self._shards[axis] = all_to_all(x, had, axis, self.lengths[had], self.group, self._name_of_move(axis))

    def pending(self, axis: int) -> Pending:
        """Return this rank's shard along `axis`, which may be on its way."""
        if axis not in self._shards:
            self._shards[self.present].wait()
            if self.piece is not None:
                self._move(axis)
            self.start(axis)
        return self._shards[axis]

    def _move(self, axis: int) -> None:
        """Make the shard along `axis` in pieces, and give up the other one."""
        had = self.present
        x = self._shards.pop(had).wait()

        def begin(piece: Piece) -> list[Pending]:
            part = piece.of_shard(x, had)
            return [all_to_all(part, had, axis, piece.length, self.group, self._name_of_move(axis))]

        (new,) = join_pieces(begin, had, self.lengths[had], self.rows(had, x), self.group)
        x.data = x.new_empty(0)  # its memory is free, whoever still has the tensor
        self._shards[axis] = Pending(new)

    def rows(self, axis: int, like: Tensor | None = None) -> int:
        """Return how many rows along `axis` make a piece, the same on all ranks; `like`: any shard."""
        assert self.piece is not None
        whole = math.prod(self.whole_shape(self.along(self.present) if like is None else like))
        return max(self.piece * self.lengths[axis] // max(whole, 1), 1)

    def _name_of_move(self, axis: int) -> str:
        return f"{self.name} to {'rows' if axis == ROWS else 'columns'}"

    def along(self, axis: int) -> Tensor:
        """Return this rank's shard along `axis`, once it is there."""
        return self.pending(axis).wait()

    def only(self, axis: int) -> "ShardedTensor":
        """Return the same with this one shard alone: what a block keeps of its input."""
        self.start(axis)
        if axis not in self._shards:  # it comes from a rank that has not sent it yet
            axis = self.present
        self._shards[axis].given = True
        return self.with_shard(axis, self._shards[axis])

    def with_shard(self, axis: int, shard: Tensor | Pending) -> "ShardedTensor":
        """Return another tensor of the same whole shape."""
        return ShardedTensor(axis, shard, self.lengths, self.group, self.name, self.piece)

    def shard_shape(self, axis: int, like: Tensor) -> list[int]:
        """Return the shape of this rank's shard along `axis`; `like`: any shard of it."""
        shape = self.whole_shape(like)
        shape[axis] = shard_sizes(self.lengths[axis], self.group.size)[self.group.rank]
        return shape

    def whole_shape(self, like: Tensor) -> list[int]:
        """Return the shape of the whole; `like`: any shard of it."""
        shape = list(like.shape)
        shape[ROWS], shape[COLS] = self.lengths[ROWS], self.lengths[COLS]
        return shape


class ShardedResidues(Residues):
    """The residues of one rank of an axial group; `replicas` branch ranks hold the same."""

    def __init__(self, group: Group, replicas: int = 1) -> None:
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
    """The axis of a step's result, and those along which its state and the other one are wanted next."""

    name: str
    axis: int
    next: int | None  # None: as it comes
    other_next: int | None = None


@dataclass(frozen=True)
class BlockLayout:
    """The axis along which a block takes each state (None: as it comes), the layout of each of its steps, and the runs
    of steps within which its states are independent of each other."""

    enters: Mapping[str, int | None]
    steps: tuple[StepLayout, ...]
    runs: list[range]


def layout_plan(name: str, blocks: Sequence[Block], by_channels: bool, branch: Group) -> list[BlockLayout]:
    """Return the layout of every block, found by following each state through all steps.

    by_channels: triangle products take z as it comes.  branch: whose ranks share out the steps; a state is moved for
    those of this rank alone.
    """
    present = dict(ENTERS)
    axes = []  # of each step's result
    for block in blocks:
        for step in block.steps:
            axis, _ = _axes_read(step, by_channels)
            present[step.state] = present[step.state] if axis is None else axis
            axes.append(present[step.state])
    wanted: dict[str, int | None] = {**ENTERS}  # by what comes later: so the steps are gone through backwards
    layouts = []
    for block in reversed(blocks):
        names = {module: key for key, module in block.named_modules()}
        enters: dict[str, int | None] = dict.fromkeys(block.states)
        away, steps = _steps_of_others(block, branch), []
        for index, step in reversed(list(enumerate(block.steps))):
            axis, other_axis = _axes_read(step, by_channels)
            next_axis, other_next = wanted[step.state], None
            enters[step.state] = wanted[step.state] = None if index in away else axis
            if step.other is not None and index not in away:
                other_next = wanted[step.other]
                enters[step.other] = wanted[step.other] = other_axis
            label = names.get(step.layer, type(step.layer).__name__)
            steps.append(StepLayout(f"{name} {label}", axes.pop(), next_axis, other_next))
        layouts.append(BlockLayout(enters, tuple(reversed(steps)), independent_runs(block.steps)))
    return layouts[::-1]


def _axes_read(step: Step, by_channels: bool) -> tuple[int | None, int | None]:
    """Return the axes along which a step takes its state and the other one; None: as it comes."""
    layer = step.layer
    if not can_be_cut(layer):
        return None, None
    axis = None if by_channels and isinstance(layer, TriangleMultiplication) else layer.axis
    return axis, layer.read_axis if layer.reads == "other" else None


def can_be_cut(layer: nn.Module) -> TypeGuard[AxialUpdate]:
    """Tell whether a layer does what the contract says and no more: one with a `forward` of its own may do more."""
    return isinstance(layer, AxialUpdate) and type(layer).forward is AxialUpdate.forward


def independent_runs(steps: Steps) -> list[range]:
    """Return the steps in runs within which no step reads what the steps of another state wrote.

    Within a run, the states are independent of each other, and their steps may run at the same time.
    """
    starts, written = [0], set[str]()
    for index, step in enumerate(steps):
        if step.other in written:
            starts.append(index)
            written = set()
        written.add(step.state)
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(steps)])]


def _states_by_rank(states: Sequence[str], branch: Group) -> Sequence[str]:
    """Return the states of independent steps: that of this branch rank first."""
    return states if branch.rank == 0 else states[::-1]


def _steps_of_others(block: Block, branch: Group) -> set[int]:
    """Return which of a block's steps the other branch rank runs, and not this one."""
    found: set[int] = set()
    for run in independent_runs(block.steps) if branch.size > 1 else ():
        own, *_ = _states_by_rank(_states_of([block.steps[index] for index in run], block.states), branch)
        found |= {index for index in run if block.steps[index].state != own}
    return found


def _states_of(steps: Sequence[Step], states: Sequence[str]) -> list[str]:
    """Return the states that steps change, in the order of a block's states."""
    return [state for state in states if any(step.state == state for step in steps)]


def unsupported_reason(plan: Plan, name: str, block: Block) -> str | None:
    """Say why a block cannot run under a plan that shards its states or shares them out; None if it can."""
    setting, size = ("plan.axial", plan.axial) if plan.axial > 1 else ("plan.branch", plan.branch)
    kind = f"{name or 'the block'} ({type(block).__name__})"
    if type(block).forward is not Block.forward:
        return f"{setting} = {size} runs blocks by their steps, but {kind} has a forward of its own; leave it at 1"
    if not set(block.states) <= ENTERS.keys():
        return f"{setting} = {size} knows the states m and z, but {kind} has {', '.join(block.states)}; leave it at 1"
    steps = block.checked_steps()
    for layer, step in ((type(step.layer).__name__, step) for step in steps):
        if plan.axial > 1 and not can_be_cut(step.layer):
            why = "has a forward of its own" if isinstance(step.layer, AxialUpdate) else "has none"
            return f"{setting} = {size} cuts layers along an axis, but {layer} in {kind} {why}; leave it at 1"
        if isinstance(step.layer, AxialUpdate) and step.layer.mask_of != step.layer.reads:
            return f"{setting} = {size} does not serve {layer} in {kind}, masked by its other state; leave it at 1"
    halves = any(len({steps[index].state for index in run}) > 1 for run in independent_runs(steps))
    if plan.branch > 1 and len(block.states) > 1 and not halves:
        return plan.unsupported_reason("middle")
    return None


class ShardedStack:
    """Blocks one after another on this rank of a mesh: sharded over axial ranks, halves shared out to branch ranks.

    module: a stack, or a block that stands alone.  compiled: what to call in the place of some layers.  keep_blocks: so
    many of the last are not recomputed.  channels: of the model's z.
    Errors: UserError for a block that the plan cannot run.
    """

    def __init__(
        self,
        name: str,
        module: BlockStack | Block,
        plan: Plan,
        mesh: Mesh,
        compiled: Mapping[AxialUpdate, AxialUpdate] | None = None,
        keep_blocks: int = 0,
        channels: int = 0,
    ) -> None:
        self.keep_blocks = keep_blocks
        self.name, self.module, self.plan, self.mesh, self.group = name, module, plan, mesh, mesh.axial
        self.compiled, self.channels = compiled or {}, channels
        self._planned: list[tuple[Block, type[Block], Steps]] | None = None
        self._plan_layouts()

    def _plan_layouts(self) -> None:
        """Plan the layouts of the blocks as they are now: a layer may have been replaced, or a block left out."""
        module = self.module
        self.blocks = cast(list[Block], [*module.blocks] if isinstance(module, BlockStack) else [module])
        found = [(block, type(block), block.steps) for block in self.blocks]
        if found == self._planned:
            return
        for block in self.blocks:
            if reason := unsupported_reason(self.plan, self.name, block):
                raise UserError(reason)
        self.layouts = {  # by channels or not
            ways: layout_plan(self.name, self.blocks, ways, self.mesh.branch) for ways in (False, True)
        }
        products = (
            step.layer for *_, steps in found for step in steps if isinstance(step.layer, TriangleMultiplication)
        )
        self.product_channels = next((layer.channels for layer in products), 0)
        self._planned = found

    def run(self, states: Tensors, masks: Tensors) -> Tensors:
        """Return the new shards of the states, given this rank's shards; the mask of m is whole, that of z its rows."""
        self._plan_layouts()
        if not self.blocks:
            return states
        names = self.blocks[0].states
        residues = masks[0].shape[-1]  # whole in either mask
        z = states[names.index("z")] if "z" in names else states[0]
        c_z, size = z.shape[-1], z.element_size()
        by_channels = self.plan.by_channels(residues, self.group.size, self.product_channels, c_z, size)
        # Numbers that travel at a time, where nothing is kept.
        chunk = self.plan.chunk if self.plan.in_place else None
        piece = None if chunk is None else slice_numbers(chunk, residues, self.channels or c_z)
        held: Sharded = {}
        mask: dict[str, Mask] = {}
        for name, state, its_mask in zip(names, states, masks):
            lengths = {ROWS: state.shape[ROWS] if name == "m" else residues, COLS: residues}
            held[name] = ShardedTensor(ENTERS[name], state, lengths, self.group, f"{self.name} {name}", piece)
            if name == "m":  # a mask has no channels behind its axes
                mask[name] = {axis: local_shard(its_mask, axis + 1, self.group) for axis in (ROWS, COLS)}
            else:  # symmetric, so its rows are its columns too
                mask[name] = {ROWS: its_mask, COLS: its_mask.mT}
        recomputed = len(self.blocks) - self.keep_blocks if self.plan.recompute == "block" else 0
        for index, (block, layout) in watched(list(enumerate(zip(self.blocks, self.layouts[by_channels])))):
            if self.mesh.branch.size > 1:
                for x in held.values():  # what the other branch sends is awaited outside of what is recomputed
                    x.along(x.present)
            enters = zip(held.values(), layout.enters.values())
            taken = [x.only(x.present if axis is None else axis) for x, axis in enters]
            run = partial(self._block, block, layout, by_channels, mask)
            if index < recomputed and torch.is_grad_enabled():
                keeps = self.plan.graph is not True  # as of `Execution._recomputed`
                new = checkpoint(run, *taken, use_reentrant=False, preserve_rng_state=keeps)
            else:
                new = run(*taken)
            held = dict(zip(names, new))
        left = tuple(x.along(ENTERS[name]) for name, x in held.items())
        return tied(*left) if self.mesh.branch.size > 1 else left  # nothing uses the extra MSA's m

    def _block(
        self, block: Block, layout: BlockLayout, by_channels: bool, mask: dict[str, Mask], *states: ShardedTensor
    ) -> tuple[ShardedTensor, ...]:
        """Run one block; second shards that it makes of its states live while it runs."""
        with using(self.plan.kernels):  # also where it is recomputed, perhaps by another thread
            held = dict(zip(block.states, (x.only(x.present) for x in states)))
            steps = list(zip(block.steps, layout.steps))
            for run in watched(layout.runs):
                held |= self._run_independent([steps[index] for index in run], by_channels, held, mask)
            return tuple(held.values())

    def _run_independent(
        self, steps: list[tuple[Step, StepLayout]], by_channels: bool, held: Sharded, mask: Mapping[str, Mask]
    ) -> Sharded:
        """Run steps whose states are independent: in turn where one would wait, or each on its own branch rank."""
        states = _states_of([step for step, _ in steps], list(held))
        chains = {state: [(step, layout) for step, layout in steps if step.state == state] for state in states}
        if self.mesh.branch.size == 1 or len(states) == 1:
            results = _alternate(*(self._chain(chain, by_channels, held, mask) for chain in chains.values()))
            return dict(zip(states, results))
        own, other = _states_by_rank(states, self.mesh.branch)
        (result,) = _alternate(self._chain(chains[own], by_channels, held, mask))
        axis, other_axis = (chains[state][-1][1].axis for state in (own, other))
        shape = held[other].shard_shape(other_axis, held[other].along(held[other].present))
        name = f"{held[other].name} of the other branch"
        received = sendrecv(result.along(axis), shape, self.mesh.branch, name)
        return {own: result, other: held[other].with_shard(other_axis, received)}

    def _chain(
        self, steps: list[tuple[Step, StepLayout]], by_channels: bool, held: Sharded, mask: Mapping[str, Mask]
    ) -> Phases:
        """Run the steps of one state, which read the others as they are in `held`."""
        x = held[steps[0][0].state]
        for step, layout in steps:
            other = None if step.other is None else held[step.other]
            layer = step.layer
            if not can_be_cut(layer) or (self.plan.axial == 1 and self.plan.chunk is None):  # it is one operation then
                x = self._plain(step, x, mask[step.masked], other, layout)
                continue
            run = self.compiled.get(layer, layer)
            if by_channels and isinstance(layer, TriangleMultiplication):
                x = yield from self._by_channels(cast(TriangleMultiplication, run), x, mask[step.masked], layout)
            else:
                x = yield from self._by_slices(run, x, mask[step.masked], other, layout)
        return x

    def _plain(
        self, step: Step, x: ShardedTensor, mask: Mask, other: ShardedTensor | None, layout: StepLayout
    ) -> ShardedTensor:
        """Run a step on whole tensors, where every rank has them: one axial rank, two branches."""
        others = () if other is None else (other.along(other.present),)
        return self._leave(x, x.present, step.layer(x.along(x.present), mask[x.present], *others), layout)

    def _by_slices(
        self, layer: AxialUpdate, x: ShardedTensor, mask: Mask, other: ShardedTensor | None, layout: StepLayout
    ) -> Phases:
        """Run a layer, interrupted wherever it may have to wait for others."""
        axis, read_axis = cut_axes(layer, x.present)
        read = other if other is not None and layer.reads == "other" else x
        pending: list[Pending] = []
        if x.piece is not None and read is x:
            x.pending(axis)  # before what is shared takes memory
        if other is not None and layer.shares != layer.reads == "x":  # it is made position by position, as other lies
            pending = self._share(layer, other, mask, other.present, layout)
        yield [read.pending(read_axis)]
        held_read, n_mask = read.along(read_axis), mask[read_axis]
        if x.piece is not None and layer.pieces_axis is not None:
            factors = self._factors(layer, x, x.along(axis), axis)
            return self._leave(x, axis, update_by_shared(layer, x, read, n_mask, factors, layout.name), layout)
        if layer.shares == layer.reads:
            pending = self._share(layer, read, mask, read_axis, layout)
        prepared = layer.prepare(held_read, n_mask) if self.plan.chunk is None else held_read
        yield pending
        shared: Shared = tuple(p.wait() for p in pending) if layer.shares is not None else None
        dx = None
        if self.plan.chunk is None and read is not x:  # x may still be on its way
            dx = layer.update(prepared, n_mask, shared, None, None)
        yield [x.pending(axis)]
        held = x.along(axis)
        factors = self._factors(layer, x, held, axis)
        if dx is not None:
            new = residual(held, dx, factors)
        elif self.plan.chunk is None:
            new = layer.update(prepared, n_mask, shared, held, factors)
        else:
            axes, most = (axis, read_axis), self._slice_numbers(x)
            new = update_in_slices(layer, held, held_read, n_mask, shared, factors, axes, most, self.plan.in_place)
        return self._leave(x, axis, new, layout)

    def _slice_numbers(self, x: ShardedTensor) -> int:
        """Return how many numbers of a state the plan's slices hold."""
        assert self.plan.chunk is not None
        return slice_numbers(self.plan.chunk, x.lengths[COLS], self.channels or x.along(x.present).shape[-1])

    def _share(self, layer: AxialUpdate, of: ShardedTensor, mask: Mask, axis: int, layout: StepLayout) -> list[Pending]:
        """Return `shared` of this rank's shard along `axis`, each tensor on its way to be joined with the others'."""
        held, length, name = of.along(axis), of.lengths[axis], f"{layout.name} shared"
        if of.piece is not None:
            return [Pending(t) for t in shared_in_pieces(layer, of, mask[axis], axis, name)]
        if self.plan.chunk is not None:
            tensors = shared_in_slices(layer, held, mask[axis], axis, self._slice_numbers(of))
        else:
            tensors = layer.shared(held, mask[axis])
        join_axis = layer.join_axis(axis)
        pending = [all_gather(t, join_axis, length, self.group, f"{name} {i}") for i, t in enumerate(tensors)]
        if layout.other_next is not None:  # later than what is needed sooner
            of.start(layout.other_next)
        return pending

    def _by_channels(self, layer: TriangleMultiplication, x: ShardedTensor, mask: Mask, layout: StepLayout) -> Phases:
        """Run a product on whole rows and columns of this rank's channels, whatever the axis along which x is there."""
        axis = x.present
        yield [x.pending(axis)]
        held = x.along(axis)
        factors = self._factors(layer, x, held, axis)
        exchange = ChannelExchange(layer, axis, x.lengths[axis], self.group, layout.name)
        if x.piece is not None:
            new = multiply_in_place(exchange, held, mask[axis], factors, x.rows(axis))
        else:
            right = exchange.right(held, mask[axis], x.lengths[axis])
            new = yield from exchange.product(held, mask[axis], right, factors, x.lengths[axis])
        return self._leave(x, axis, new, layout)

    def _factors(self, layer: AxialUpdate, x: ShardedTensor, held: Tensor, axis: int) -> Factors | None:
        """Return this rank's shard of the dropout factors, which are drawn for all of x."""
        factors = layer.dropout_factors(x.whole_shape(held), held)
        if factors is None or factors.shape[axis] == 1:
            return factors
        return local_shard(factors, axis, self.group)

    def _leave(self, x: ShardedTensor, axis: int, new: Tensor, layout: StepLayout) -> ShardedTensor:
        """Return the new x, already on its way to where it is wanted next."""
        out = x.with_shard(axis, new)
        if layout.next is not None:
            out.start(layout.next)
        return out


def _alternate(*works: Phases) -> tuple[ShardedTensor, ...]:
    """Run several works in turn: each goes on until it would wait; where all would, the first that came to it waits.

    Recomputed, they must take the same turns, although what a block was given has long arrived then: a tensor that
    ever travelled counts as awaited from when it was asked for here.
    """
    results: dict[int, ShardedTensor] = {}
    awaited: set[Pending] = set()
    turns = deque(enumerate(works))
    while turns:
        number, work = turns.popleft()
        try:
            while not (wanted := {p for p in next(work) if p.travels} - awaited):
                pass
            awaited |= wanted
            turns.append((number, work))
        except StopIteration as end:
            results[number] = end.value
    return tuple(results[number] for number in range(len(works)))


# In place: layers on a rank's shard, written over it.  Beside the shards of m and z a rank holds what a layer shares,
# and a few pieces: of a triangle product one factor, all rows and columns of this rank's channels; of an attention its
# bias; of an outer product a piece of the right factor.

GATHERED = (
    8  # ranks whose rows are gathered at a time as one rank's slice has them: where there are more, fewer of each
)
Cut = tuple[int, int, int]  # the first of this rank's rows, how many, and how many of all ranks


def shared_in_pieces(layer: AxialUpdate, of: ShardedTensor, mask: Tensor, axis: int, name: str) -> Tensors:
    """Return `shared` whole, made of all ranks' shards along `axis`; mask: of this rank's shard."""
    x, length, group = of.along(axis), of.lengths[axis], of.group
    # Gathered, a piece has the rows of all ranks; of a bias, few channels.
    rows = max(min(of.rows(axis), of.rows(axis) * GATHERED // group.size), 1)
    join_axis = layer.join_axis(axis)

    def begin(piece: Piece) -> list[Pending]:
        assert layer.shares is not None
        n_mask = mask_slice(layer, layer.shares, mask, axis, piece.part)
        made = layer.shared(piece.of_shard(x, axis), n_mask)
        return [all_gather(t, join_axis, piece.length, group, f"{name} {i}") for i, t in enumerate(made)]

    return join_pieces(begin, join_axis, length, rows, group)


def update_by_shared(
    layer: AxialUpdate, to: ShardedTensor, of: ShardedTensor, mask: Tensor, factors: Factors | None, name: str
) -> Tensor:
    """Return this rank's shard of x, updated in one piece of what is shared after another; for layers with
    `pieces_axis`.

    to: x [*, i, j, c].  of: what is read, mask: of this rank's shard of it; what that prepares is there whole.
    """
    cuts, axis = layer.pieces_axis, layer.read_axis
    assert cuts is not None
    assert axis is not None
    read, length, group, join_axis = of.along(axis), of.lengths[axis], of.group, layer.join_axis(axis)
    along, _ = cut_axes(layer, to.present)
    x, rows = to.along(along), to.rows(along)
    parts = slices_of(read.shape[axis], rows)

    def some(part: slice) -> tuple[Tensor, Tensor]:
        return read.narrow(axis, part.start, part.stop - part.start), mask_slice(layer, layer.reads, mask, axis, part)

    prepared = tuple(torch.cat(tensors, axis) for tensors in zip(*(layer.prepare(*some(part)) for part in parts)))

    def begin(piece: Piece) -> tuple[Piece, list[Pending]]:
        made = layer.shared(*some(piece.part))
        return piece, [all_gather(t, join_axis, piece.length, group, f"{name} shared {i}") for i, t in enumerate(made)]

    for piece, arriving in _ahead(map(begin, pieces(length, rows, group))):
        shared = [pending.wait().split(piece.sizes, join_axis) for pending in arriving]
        for offset, size, *of_rank in zip(piece.offsets, piece.sizes, *shared):
            part = x.narrow(cuts, offset, size)
            drawn = cut_factors(factors, cuts, offset, size)
            part.copy_(layer.update(prepared, mask, tuple(of_rank), part, drawn))
    return x


@dataclass(frozen=True)
class ChannelExchange:
    """A triangle product for which ranks exchange their shards of positions for shards of channels, and back.

    axis: along which x is sharded.  length: of the whole x along this axis.  A factor has no channels behind its axes,
    so its axis is `axis` + 1.
    """

    layer: TriangleMultiplication
    axis: int
    length: int
    group: Group
    name: str

    def right(self, x: Tensor, mask: Tensor, length: int) -> Pending:
        """Compute b of some rows of x, and begin to exchange it; length: of these rows on all ranks."""
        return self._exchange(self.layer.factor("b", x, mask), length, "right")

    def _exchange(self, factor: Tensor, length: int, name: str) -> Pending:
        return all_to_all(factor, self.axis + 1, -3, length, self.group, f"{self.name} {name}")

    def product(
        self, x: Tensor, mask: Tensor, right: Pending, factors: Factors | None, length: int
    ) -> Generator[Sequence[Pending], None, Tensor]:
        """Compute x + factors * update of some rows of this rank's x (lines 2 to 4 of Algorithms 11 and 12).

        right: b, all rows and columns of this rank's channels.  length: of these rows of x on all ranks.
        Yields the tensors in flight before it waits for them.
        """
        layer = self.layer
        left = self._exchange(layer.factor("a", x, mask), length, "left")
        (gate_logits,) = project(x, layer.norm, layer.gate)  # while it travels
        yield [left, right]
        product = triangle_product(left.wait(), right.wait(), layer.outgoing)
        back = all_to_all(product, -1, self.axis, layer.channels, self.group, f"{self.name} product")
        del left, product
        yield [back]
        return layer.finish(back.wait(), gate_logits, x, factors)


def multiply_in_place(exchange: ChannelExchange, x: Tensor, mask: Tensor, factors: Factors | None, rows: int) -> Tensor:
    """Write a triangle product's update to this rank's shard x, `rows` rows of it at a time.

    The right factor comes whole, of this rank's channels: as large as x where the product is as wide as z.  The left
    factor, the product and the update are pieces.  While one piece is multiplied, the next left factor and the product
    before it travel.
    """
    axis, length, group = exchange.axis, exchange.length, exchange.group

    def some(along: int, start: int, size: int) -> tuple[Tensor, Tensor]:
        return x.narrow(along, start, size), mask.narrow(along + 1, start, size)

    def begin_right(piece: Piece) -> list[Pending]:
        return [exchange.right(*some(axis, piece.start, piece.sizes[piece.rank]), piece.length)]

    (right,) = join_pieces(begin_right, axis + 1, length, rows, group)
    along = exchange.layer.axis
    assert along is not None
    cuts: Iterator[Cut]
    if along == axis:
        cuts = ((piece.start, piece.sizes[piece.rank], piece.length) for piece in pieces(length, rows, group))
    else:  # all ranks have these
        width = rows * group.size
        there = x.shape[along]
        cuts = ((start, min(width, there - start), length) for start in uniform_loop(range(0, there, width)))

    def begun() -> Iterator[tuple[Tensor, Generator[Sequence[Pending], None, Tensor]]]:
        """Yield each piece and its product, whose left factor has begun to travel."""
        for start, size, every in cuts:
            part, n_mask = some(along, start, size)
            product = exchange.product(part, n_mask, Pending(right), cut_factors(factors, along, start, size), every)
            next(product)
            yield part, product
            del part, product

    def multiplied() -> Iterator[tuple[Tensor, Generator[Sequence[Pending], None, Tensor]]]:
        """Yield each piece and its product, which has begun to travel back."""
        for part, product in _ahead(begun()):
            next(product)
            yield part, product
            del part, product

    for part, product in _ahead(multiplied()):
        part.copy_(result_of(product))
        del product
    return x


def result_of(work: Generator[Sequence[Pending], None, Tensor]) -> Tensor:
    """Run a generator to its end, and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: Tensor = end.value
            return result
