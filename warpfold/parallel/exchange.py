"""How gradients lie in one flat buffer, and how data ranks take their mean: lossless but for rounding.

A `Layout` cuts the buffer into buckets, which are sent whole; each rank may own a piece of each.

Like an all-reduce, every strategy has two halves: `reduce_scatter` adds up the ranks' contributions and leaves each
rank a piece of the sum, and `all_gather` makes the pieces whole on every rank.  If each rank keeps the optimiser's
state of its own piece only, the weights are updated between the two.  Both are generators that yield wherever they
would wait, so that many buckets are in flight at once; `finish` runs them in one order that is the same on every rank.
"""

import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from warpfold.errors import UserError
from warpfold.ops.torch_internals import all_gather_flat, reduce_scatter_flat
from warpfold.parallel.mesh import Group, Mesh, split
from warpfold.parallel.waits import Event, Work, tell, waiting

T = TypeVar("T")
Stages = Generator[None, None, T]
ClipFactors = Callable[[], Tensor | None]
Strategy = Literal["plain", "bf16", "hierarchical", "auto"]
STRATEGIES = get_args(Strategy)
MIN_MESSAGE_BYTES = 2**16  # bytes: a message of less than that takes no less time, on most links
ROUNDS = 5  # of the measurement that "auto" makes
CLEARLY = 0.9  # another strategy is chosen if it takes less than this part of plain's time

# Each parameter starts at a multiple of 64 bytes, as if it had been allocated alone: matrix kernels are faster so.
ALIGN = 16


@dataclass(frozen=True)
class Segment:
    """The part of a parameter that lies in a shard."""

    name: str
    where: slice  # in the shard
    first: int  # the index, in the flat parameter, of the part's first element
    shape: torch.Size  # of the whole parameter


@dataclass(frozen=True)
class Layout:
    """Parameters in the order of the forward pass; buckets in the order in which their gradients come, the reverse.

    A bucket's length and start are divisible by the number of ranks.  Shard `index` of `parts` joins piece `index` of
    every bucket; the bucket that lies at a:b of the whole lies at a/parts:b/parts of the shard.
    """

    places: dict[str, slice]
    shapes: dict[str, torch.Size]
    buckets: tuple[slice, ...]
    members: tuple[tuple[str, ...], ...]  # of each bucket
    size: int

    def view(self, flat: Tensor, name: str) -> Tensor:
        """Return a parameter's part of a flat buffer, in the parameter's shape."""
        return flat[self.places[name]].view(self.shapes[name])

    def within(self, parts: int) -> list[slice]:
        """Return where the buckets' pieces lie in a shard, in the order of the buckets."""
        return [slice(b.start // parts, b.stop // parts) for b in self.buckets]

    def shard(self, flat: Tensor, parts: int, index: int) -> Tensor:
        """Return shard `index` of `parts`: a copy, or `flat` itself if there is only one."""
        if parts == 1:
            return flat
        return torch.cat([flat[bucket].view(parts, -1)[index] for bucket in reversed(self.buckets)])

    def segments(self, parts: int = 1, index: int = 0) -> list[Segment]:
        """Return which parts of which parameters lie in shard `index` of `parts`, in the order of the shard."""
        found = []
        for bucket, names in zip(reversed(self.buckets), reversed(self.members)):
            length = (bucket.stop - bucket.start) // parts
            begin, offset = bucket.start + index * length, bucket.start // parts
            for name in names:
                place = self.places[name]
                start, stop = max(place.start, begin), min(place.stop, begin + length)
                if start < stop:
                    where = slice(offset + start - begin, offset + stop - begin)
                    found.append(Segment(name, where, start - place.start, self.shapes[name]))
        return found


def make_layout(
    parameters: Mapping[str, Tensor], bucket_bytes: float, ranks: int, together: Collection[str] = ()
) -> Layout:
    """Lay out parameters, named in the order of the forward pass, for `ranks` ranks in all.

    A bucket is closed as soon as it has `bucket_bytes`; a parameter is never split between buckets, and those in
    `together` stay in the bucket of the one before.  Whatever is a multiple of ALIGN long has the next right behind it.
    """
    groups: list[list[str]] = [[]]
    filled = 0
    closed = False
    for name in reversed(list(parameters)):
        if filled >= bucket_bytes and closed:
            groups.append([])
            filled = 0
        groups[-1].insert(0, name)
        filled += parameters[name].nbytes
        closed = name not in together
    places, buckets, end = {}, [], 0
    for group in reversed(groups):
        start = end
        for name in group:
            places[name] = slice(end, end + parameters[name].numel())
            end += -(-parameters[name].numel() // ALIGN) * ALIGN
        end = start + -((start - end) // (ALIGN * ranks)) * ALIGN * ranks
        buckets.append(slice(start, end))
    shapes = {name: p.shape for name, p in parameters.items()}
    return Layout(places, shapes, tuple(reversed(buckets)), tuple(map(tuple, groups)), end)


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """[plan.sync]: how gradients and weights are communicated; the result is the same but for rounding.

    strategy: "auto" measures plain and hierarchical sums on these ranks, and never chooses "bf16".
    bucket: MiB of gradients that are sent together.  16 is more beyond 256 data ranks (`bucket_bytes`); any other
    number is taken as it is.
    shard_state: each data rank keeps moments and averaged weights of its own piece only (ZeRO, stage 1).
    check_every: steps between two comparisons of all ranks' weights; 0: never.
    """

    strategy: Strategy = "plain"
    bucket: float = 16.0
    shard_state: bool = False
    check_every: int = 100

    def __post_init__(self) -> None:
        if not self.bucket > 0:
            raise ValueError("plan.sync.bucket must be positive")
        if self.check_every < 0:
            raise ValueError("plan.sync.check_every must not be negative")

    def bucket_bytes(self, ranks: int) -> float:
        """Return how many bytes of gradients travel together between `ranks` data ranks, so that no message is tiny."""
        least = MIN_MESSAGE_BYTES * ranks if self.bucket == SyncConfig.bucket else 0
        return max(self.bucket * 2**20, least)


@dataclass(frozen=True)
class Wire:
    """The collectives of one group on flat buffers, asynchronous, each told as an event."""

    group: Group

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        """Send piece r of x to rank r; `out` gets the pieces of all ranks, in their order."""
        name = self._note("all_to_all", x.nbytes * (self.group.size - 1) // self.group.size)
        return Work(dist.all_to_all_single(out, x, group=self.group.handle, async_op=True), name)

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        """Fill `out` with every rank's x, in the order of the ranks."""
        name = self._note("all_gather", x.nbytes * (self.group.size - 1))
        return Work(all_gather_flat(out, x, group=self.group.handle, async_op=True), name)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Work:
        """Fill `out` with this rank's piece of the sum of all x."""
        name = self._note("reduce_scatter", x.nbytes * (self.group.size - 1) // self.group.size)
        return Work(reduce_scatter_flat(out, x, group=self.group.handle, async_op=True), name)

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Work:
        """Replace x by its sum over the ranks."""
        name = self._note("all_reduce", 2 * x.nbytes * (self.group.size - 1) // self.group.size)
        return Work(dist.all_reduce(x, op, group=self.group.handle, async_op=True), name)

    def broadcast(self, x: Tensor, source: int) -> Work:
        """Replace x by that of the rank `source` of the world."""
        name = self._note("broadcast", x.nbytes if source == self.group.ranks[self.group.rank] else 0)
        return Work(dist.broadcast(x, source, group=self.group.handle, async_op=True), name)

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean of flat tensors.  Each number is added up on one rank, so all ranks have the same bits."""
        padded = torch.cat([x, x.new_zeros(-len(x) % self.group.size)])
        (piece,) = finish([Plain(self).reduce_scatter(padded)])
        finish([Plain(self).all_gather(piece.div_(self.group.size), padded)])
        return padded[: len(x)]

    def _note(self, kind: str, size: int) -> str:
        """Tell the watchers that a collective starts, and return its name."""
        event = Event("start", f"gradients or weights over {self.group.name} ranks", kind, size, carries="gradients")
        tell(event)
        return event.title


def finish(exchanges: Sequence[Stages[T]]) -> list[T]:
    """Run all exchanges to their ends, a stage of each in turn, and return what they return."""
    results: dict[int, T] = {}
    running = dict(enumerate(exchanges))
    while running:
        for number in list(running):
            try:
                next(running[number])
            except StopIteration as end:
                results[number] = end.value
                del running[number]
    return [results[number] for number in range(len(exchanges))]


class Plain:
    """Send each piece to its owner, which adds them up in the order of the ranks; then gather the sums.

    The bytes are those of a ring.  But each sum is made in one place and in one order, so replicas agree to the bit.
    index: which piece this rank owns.  dtype: that numbers are rounded to while they travel; they are added up in their
    own.
    """

    late_factors = True  # contributions may be sent before their clipping factors are known

    def __init__(self, wire: Wire, dtype: torch.dtype | None = None) -> None:
        self.wire, self.dtype = wire, dtype
        self.index = wire.group.rank

    def reduce_scatter(self, x: Tensor, factors: ClipFactors | None = None) -> Stages[Tensor]:
        """Return this rank's piece of the sum of all flat contributions x, each times its rank's factor (None: 1).

        `factors` is called when all has arrived, after the second yield; a contribution of factor zero may hold NaN.
        """
        packed = x.to(self.dtype or x.dtype)
        received = torch.empty_like(packed)
        work = self.wire.all_to_all(received, packed)
        yield
        work.wait()
        yield
        pieces = received.view(self.wire.group.size, -1).to(x.dtype)
        if factors is not None and (factor := factors()) is not None:
            pieces.masked_fill_((factor == 0)[:, None], 0).mul_(factor[:, None].to(pieces.dtype))  # 0 x NaN is NaN
        return pieces.sum(0)

    def all_gather(self, piece: Tensor, out: Tensor, exact: bool = False) -> Stages[None]:
        """Join every rank's piece into `out`.  exact: without rounding."""
        arriving = out if exact or self.dtype is None else torch.empty_like(out, dtype=self.dtype)
        work = self.wire.all_gather(arriving, piece.to(arriving.dtype))
        yield
        work.wait()
        if arriving is not out:
            out.copy_(arriving)


class Hierarchical:
    """Sum within each node first, then between nodes, where each rank sends a piece of its node's sum only."""

    late_factors = False  # the ranks of a node are added up first

    def __init__(self, within: Wire, between: Wire) -> None:
        self.within, self.between = Plain(within), Plain(between)
        self.index = within.group.rank * between.group.size + between.group.rank

    def reduce_scatter(self, x: Tensor, factors: ClipFactors | None = None) -> Stages[Tensor]:
        of_node = yield from self.within.reduce_scatter(x)
        return (yield from self.between.reduce_scatter(of_node))

    def all_gather(self, piece: Tensor, out: Tensor, exact: bool = False) -> Stages[None]:
        of_node = piece.new_empty(len(piece) * self.between.wire.group.size)
        yield from self.between.all_gather(piece, of_node)
        yield from self.within.all_gather(of_node, out)


Exchange = Plain | Hierarchical


def make_exchanges(strategy: Strategy, mesh: Mesh, wire: Wire, ranks_per_node: int | None) -> dict[str, Exchange]:
    """Return the strategies to choose from, by name; only "auto" leaves a choice.

    Every rank must call it.  Errors: UserError for a strategy that these ranks are not placed for.
    """
    if mesh.data.size == 1 or strategy == "plain":
        return {"plain": Plain(wire)}
    if strategy == "bf16":
        return {"bf16": Plain(wire, torch.bfloat16)}
    if strategy == "hierarchical":
        return {"hierarchical": make_hierarchical(mesh, ranks_per_node)}
    if _ranks_of_node(mesh, ranks_per_node) is None:
        return {"plain": Plain(wire)}
    return {"plain": Plain(wire), "hierarchical": make_hierarchical(mesh, ranks_per_node)}


def choose(
    exchanges: Mapping[str, Exchange], mesh: Mesh, total: Tensor, pieces: Sequence[slice], hidden: bool
) -> tuple[str, dict[str, float]]:
    """Measure all strategies with these buckets; return the name of the chosen one, and the seconds of each.

    The first, plain, is chosen unless another is clearly faster.  hidden: the first half of an exchange that allows it
    runs during the backward pass, and is not counted.  Every rank must call it, and all choose the same: what counts is
    the median of the slowest rank.
    """
    seconds = {}
    for name, exchange in exchanges.items():
        rounds = sorted(_seconds(exchange, mesh, total, pieces, hidden) for _ in range(ROUNDS + 1))
        median = total.new_tensor(rounds[ROUNDS // 2])
        with waiting(f"measuring {name} sums"):
            dist.all_reduce(median, dist.ReduceOp.MAX, group=mesh.world.handle)
        seconds[name] = float(median)
    first, best = next(iter(seconds)), min(seconds, key=seconds.__getitem__)
    return best if seconds[best] < CLEARLY * seconds[first] else first, seconds


def _seconds(exchange: Exchange, mesh: Mesh, total: Tensor, pieces: Sequence[slice], hidden: bool) -> float:
    with waiting("beginning a measurement together"):
        dist.all_reduce(total[:1].clone(), group=mesh.world.handle)
    float(total[0])  # on a GPU: wait until what came before is done
    begin = time.perf_counter()
    owned = finish([exchange.reduce_scatter(total[piece]) for piece in pieces])
    if hidden and exchange.late_factors:
        float(owned[-1][0])
        begin = time.perf_counter()
    finish([exchange.all_gather(piece, total[where]) for piece, where in zip(owned, pieces)])
    float(total[0])
    return time.perf_counter() - begin


def make_hierarchical(mesh: Mesh, ranks_per_node: int | None) -> Hierarchical:
    """Return the strategy for nodes of `ranks_per_node` processes each, in the order of their ranks.

    Every rank must call it.  Errors: UserError where nodes do not have equally many data ranks.
    """
    each = _ranks_of_node(mesh, ranks_per_node)
    if each is None:
        raise UserError(
            f"plan.sync: hierarchical sums need several nodes with several data ranks on each; here are "
            f"{mesh.data.size} data ranks of {mesh.model.size} processes, {ranks_per_node} processes to a node; "
            'use plan.sync.strategy = "plain"'
        )
    data, model = range(mesh.data.size), range(mesh.model.size)
    lines: list[tuple[str, list[list[int]]]] = [
        ("node", [[d * len(model) + m for d in data[k : k + each]] for m in model for k in data[::each]]),
        ("nodes", [[d * len(model) + m for d in data[g::each]] for m in model for g in range(each)]),
    ]
    wires = [Wire(split(name, groups, mesh.limit)) for name, groups in lines]
    return Hierarchical(*wires)


def _ranks_of_node(mesh: Mesh, ranks_per_node: int | None) -> int | None:
    """Return how many data ranks of one group are on each node; None if that is one, all, or not the same number."""
    each, more = divmod(ranks_per_node or 1, mesh.model.size)
    return None if more or not 1 < each < mesh.data.size or mesh.data.size % each else each
