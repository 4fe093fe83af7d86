"""The axial schedules: every layer works on this rank's slices, and what it needs from others is on its way meanwhile.

A stack's layers are cut along rows or columns in turn.  Which slice of m or z is wanted after a layer is known before
anything runs (`itineraries`), so an all-to-all begins as soon as its input exists, and is awaited by the layer that
needs it.  A layer works in phases: between two of them it would wait, and something else may be done meanwhile.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from warpfold.model.axial import COLS, ROWS, AxialUpdate, BlockStack, Branching, Chain, ChannelProduct, Tensors
from warpfold.model.layers import Normed
from warpfold.ops.noise import Factors
from warpfold.parallel.collectives import Pending, all_gather, all_to_all, local_shard, sendrecv, tied
from warpfold.parallel.cut import Cut, CutResidues, MSAMask, PairMask
from warpfold.parallel.mesh import Mesh
from warpfold.parallel.schedules import joined_updates, shared_in_slices

Phases = Generator[Sequence[Pending], None, Cut]  # what it is about to wait for
ENTERS = {2: (COLS, ROWS), 1: (ROWS,)}  # how a stack's states come and go, (m, z) or (z,): cut by residues


@dataclass(frozen=True)
class Step:
    """What is known of a layer's call: where its result is cut, and along which axes x and source are wanted next."""

    name: str
    axis: int
    x_next: int | None
    source_next: int | None = None


@dataclass(frozen=True)
class Itinerary:
    """The calls of a stack, and for each block the axis along which it takes each state (None: as it comes)."""

    steps: Mapping[AxialUpdate, Step]
    entries: list[list[int | None]]


@dataclass
class _Use:
    """One reading of a state, while an itinerary is made."""

    layer: AxialUpdate
    block: int
    state: int
    axis: int | None  # None: any
    writes: bool


class Sharding:
    """One rank's way through a model that is cut over the axial ranks and, with two branches, shared out to them.

    chunk, in_place: as in a plan.  channels: whether triangle products are cut by channels, given (residues, ranks).
    """

    def __init__(self, mesh: Mesh, chunk: int | None, in_place: bool, channels: Callable[[int, int], bool]) -> None:
        self.mesh, self.group, self.chunk, self.in_place, self.channels = mesh, mesh.axial, chunk, in_place, channels
        self.residues = CutResidues(mesh.axial, mesh.branch.size)
        self.steps: dict[tuple[AxialUpdate, bool], Step] = {}

    def lead(self, name: str, stack: BlockStack, run: Callable[..., tuple[Cut, ...]]) -> None:
        """Take over a stack: its layers, its blocks, and the way from one block to the next.

        run: runs one block given its states, or recomputes it.
        """
        plans = {by: itinerary(name, stack.blocks, by) for by in (False, True)}
        for by, plan in plans.items():
            self.steps.update({(layer, by): step for layer, step in plan.steps.items()})
        for module in stack.modules():
            if isinstance(module, AxialUpdate):
                module.schedule = self.schedule
            if isinstance(module, Branching):
                module.branches = self.branches

        def through(blocks: Iterable[nn.Module], states: Tensors, masks: Tensors) -> Tensors:
            """The stack's way of running its blocks (`BlockStack.run`)."""
            cuts, cut_masks = self._enter(states, masks, name)
            for block, entries in zip(blocks, plans[cuts[0].by_channels].entries):
                if self.mesh.branch.size > 1:
                    for cut in cuts:  # what the other branch sends is awaited outside of what is recomputed
                        cut.along(cut.present)
                taken = (cut.only(cut.present if axis is None else axis) for cut, axis in zip(cuts, entries))
                cuts = run((_apart(block),), tuple(taken), cut_masks)
            left = tuple(cut.along(axis) for cut, axis in zip(cuts, ENTERS[len(cuts)]))
            return tied(*left) if self.mesh.branch.size > 1 else left  # the extra MSA's m is used by nobody

        stack.run = through

    def _enter(self, states: Tensors, masks: Tensors, name: str) -> tuple[tuple[Cut, ...], tuple[Any, ...]]:
        residues = states[-1].shape[COLS]
        by_channels = self.channels(residues, self.group.size)
        lengths = [{ROWS: residues, COLS: residues}]
        cut_masks: tuple[Any, ...] = (PairMask(masks[-1]),)
        if len(states) == 2:
            lengths.insert(0, {ROWS: states[0].shape[ROWS], COLS: residues})
            cut_masks = (MSAMask(masks[0], self.group), *cut_masks)
        cuts = tuple(
            Cut(axis, state, length, self.group, f"{name} {letter}", by_channels)
            for axis, state, length, letter in zip(ENTERS[len(states)], states, lengths, "mz"[-len(states) :])
        )
        return cuts, cut_masks

    def schedule(self, layer: AxialUpdate, x: Any, mask: Any, source: Any = None) -> Any:
        """The axial schedule of a layer: x, source: `Cut`; mask: as `MSAMask`."""
        (out,) = _alternate(self.phases(layer, x, mask, source))
        return out

    def phases(self, layer: AxialUpdate, x: Cut, mask: Any, source: Cut | None) -> Phases:
        """The layer's work, interrupted wherever it may have to wait for others."""
        step = self.steps[layer, x.by_channels]
        if isinstance(layer, ChannelProduct) and x.by_channels:
            return self._by_channels(layer, x, mask, step)
        return self._by_slices(layer, x, mask, source, step)

    def _by_slices(self, layer: AxialUpdate, x: Cut, mask: Any, source: Cut | None, step: Step) -> Phases:
        axis = x.present if layer.axis is None else layer.axis
        reads = axis if layer.reads is None else layer.reads
        pending: list[Pending] = []
        if layer.shares_source:
            assert source is not None
            pending = self._share(layer, source, mask, source.present, source.present, step)
        operand = x
        if layer.reads_source:
            assert source is not None
            operand = source
        yield [operand.pending(reads)]
        here = operand.along(reads)
        n = layer.normed(here)
        n_mask = mask.along(reads)
        if layer.gathers is not None and not layer.shares_source:
            assert layer.joins is not None
            pending = self._share(layer, operand, mask, reads, layer.joins, step, n)
        local = layer.local(n, n_mask) if self.chunk is None else None
        yield pending
        shared = tuple(p.wait() for p in pending)
        dx = None
        if local is not None and layer.reads_source:  # x may still be on its way
            dx = layer.update(local, shared, n_mask)
        yield [x.pending(axis)]
        held = x.along(axis)
        factors = self._factors(layer, x, held, axis)
        if dx is not None:
            new = held + (dx if factors is None else dx * factors)
        elif local is not None:
            new = layer.add(held, local, shared, n_mask, factors)
        else:
            assert self.chunk is not None
            new = joined_updates(layer, held, here, n_mask, shared, factors, (axis, reads), self.chunk, self.in_place)
        return self._leave(x, axis, new, step)

    def _share(
        self, layer: AxialUpdate, of: Cut, mask: Any, cut: int, joins: int, step: Step, n: Normed | None = None
    ) -> list[Pending]:
        """`shared` of this rank's slice of x or source, each tensor on its way to be joined with the others'."""
        held = of.along(cut)
        if self.chunk is None:
            tensors = layer.shared(
                layer.normed(held) if n is None else n, mask.along(cut) if n is not None else held, held
            )
        else:
            tensors = shared_in_slices(layer, held, mask.along(cut), held, self.chunk)
        length, name = of.lengths[cut], f"{step.name} shared"
        pending = [all_gather(t, joins, length, self.group, f"{name} {i}") for i, t in enumerate(tensors)]
        if step.source_next is not None:  # later than what is needed sooner
            of.start(step.source_next)
        return pending

    def _by_channels(self, layer: ChannelProduct, x: Cut, mask: Any, step: Step) -> Phases:
        axis = x.present
        yield [x.pending(axis)]
        held = x.along(axis)
        n, n_mask = layer.normed(held), mask.along(axis)
        had = axis + 1  # of the factors, which have no channels behind
        length = x.lengths[axis]
        right = all_to_all(layer.right(n, n_mask), had, -3, length, self.group, f"{step.name} right")
        factor = layer.left(n, n_mask)
        channels = factor.shape[-3]
        left = all_to_all(factor, had, -3, length, self.group, f"{step.name} left")
        opening = layer.opening(n)
        yield [left, right]
        product = layer.product(left.wait(), right.wait())
        back = all_to_all(product, -1, axis, channels, self.group, f"{step.name} product")
        factors = self._factors(layer, x, held, axis)
        yield [back]
        dx = layer.finish(back.wait(), opening)
        return self._leave(x, axis, held + (dx if factors is None else dx * factors), step)

    def _factors(self, layer: AxialUpdate, x: Cut, held: Tensor, axis: int) -> Factors | None:
        """This rank's slice of the dropout factors, which are drawn for all of x."""
        factors = layer.dropout_factors(x.whole_shape(held), held)
        if factors is None or factors.shape[axis] == 1:
            return factors
        return local_shard(factors, axis, self.group)

    def _leave(self, x: Cut, axis: int, new: Tensor, step: Step) -> Cut:
        out = x.with_slice(axis, new)
        if step.x_next is not None:
            out.start(step.x_next)
        return out

    def branches(self, msa: Chain, msa_args: Any, pair: Chain, pair_args: Any) -> tuple[Cut, Cut]:
        """The two halves of a block: in turn where one would wait, or each on its own branch rank."""
        m, z = msa_args[0], pair_args[0]
        if self.mesh.branch.size == 1:
            return _alternate(self._chain(msa, *msa_args), self._chain(pair, *pair_args))
        first = self.mesh.branch.rank == 0
        # Both read the other's state before it changes.
        (own,) = _alternate(self._chain(msa, *msa_args) if first else self._chain(pair, *pair_args))
        ends = [self.steps[list(chain.children())[-1], m.by_channels].axis for chain in (msa, pair)]  # type: ignore[index]
        axis, other_axis = ends if first else ends[::-1]
        other = z if first else m
        shape = other.slice_shape(other_axis, other.along(other.present))
        theirs = sendrecv(own.along(axis), shape, self.mesh.branch, f"{other.name} of the other branch")
        received = other.with_slice(other_axis, theirs)
        return (own, received) if first else (received, own)

    def _chain(self, chain: Chain, x: Cut, mask: Any, source: Cut | None = None) -> Phases:
        for layer in chain.children():
            assert isinstance(layer, AxialUpdate)
            x = yield from self.phases(layer, x, mask, source)
        return x


def _apart(block: nn.Module) -> Callable[..., Any]:
    """The block on `Cut`s of its own: a second slice that it makes of what it was given lives while it runs."""

    def run(*args: Any) -> Any:
        return block(*(arg.only(arg.present) if isinstance(arg, Cut) else arg for arg in args))

    return run


def _alternate(*works: Phases) -> tuple[Any, ...]:
    """Several works in turn: each goes on until it would wait; where all would, the one that came to it first does.

    Recomputed, they must take the same turns, although what a block was given has long arrived then: a tensor that
    ever travelled counts as awaited from when it was asked for here.
    """
    results: dict[int, Cut] = {}
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


def itinerary(name: str, blocks: Iterable[nn.Module], by_channels: bool) -> Itinerary:
    """The way of the states through blocks, found by leading tokens through them.

    by_channels: triangle products take z as it comes.
    """
    uses = _uses(blocks, by_channels)
    states = 1 + max(use.state for use in uses)
    names = {
        layer: f"{name} {key}" for b in blocks for key, layer in b.named_modules() if isinstance(layer, AxialUpdate)
    }
    now = list(ENTERS[states])
    entries: list[list[int | None]] = []
    found: dict[AxialUpdate, dict[str, int | None]] = {}
    for index, use in enumerate(uses):
        if use.block == len(entries):
            firsts = [next((u for u in uses[index:] if u.state == s), None) for s in range(states)]
            entries.append([u.axis if u is not None and u.block == use.block else None for u in firsts])
        after = next((u.axis for u in uses[index + 1 :] if u.state == use.state), ENTERS[states][use.state])
        step = found.setdefault(use.layer, {})
        if use.writes:
            now[use.state] = use.axis if use.axis is not None else now[use.state]
            step["axis"], step["x_next"] = now[use.state], after
        else:
            step["source_next"] = after
    steps = {layer: Step(names[layer], **step) for layer, step in found.items()}  # type: ignore[arg-type]
    return Itinerary(steps, entries)


def _uses(blocks: Iterable[nn.Module], by_channels: bool) -> list[_Use]:
    """Every reading of a state by a layer, in order; tokens stand for the states, and schedules note who asks."""
    uses: list[_Use] = []
    block_now = 0

    def note(layer: AxialUpdate, x: Any, mask: Any, source: Any = None) -> Any:
        if layer.shares_source:
            uses.append(_Use(layer, block_now, source, None, False))
        if layer.reads_source:
            uses.append(_Use(layer, block_now, source, layer.reads, False))
        anywhere = by_channels and isinstance(layer, ChannelProduct)
        uses.append(_Use(layer, block_now, x, None if anywhere else layer.axis, True))
        return x

    tokens = (0, 1) if any(isinstance(m, AxialUpdate) and m.reads_source for b in blocks for m in b.modules()) else (0,)
    for block_now, block in enumerate(blocks):  # noqa: B007 (`note` reads it)
        before = {layer: layer.schedule for layer in block.modules() if isinstance(layer, AxialUpdate)}
        try:
            for layer in before:
                layer.schedule = note
            block(*tokens, *(None for _ in tokens))
        finally:  # a layer that only notes who asks is silently the identity
            for layer, schedule in before.items():
                layer.schedule = schedule
    return uses
