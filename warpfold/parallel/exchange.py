"""Layout of gradients in one flat buffer, and the mean over data ranks, which is exact up to rounding.

A `Layout` divides the buffer into buckets. A bucket is sent at once, and each rank may own a piece of it.

Like an all-reduce, every strategy has two halves: `reduce_scatter` sums the ranks' contributions and leaves each rank a
piece of the sum, and `all_gather` collects the pieces on every rank. If each rank keeps the optimiser state of its own
piece only, the weights are updated between the halves. Both are generators that yield before each wait, so that many
buckets are in flight at once. `finish` runs them in an order that is the same on every rank.
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
# Below this size, a message takes no less time on most links.
MIN_MESSAGE_BYTES = 2**16
# Repetitions of the measurement for "auto".
ROUNDS = 5
# Another strategy is chosen if it takes less than this fraction of the time of "plain".
MAX_RELATIVE_TIME = 0.9

# Elements: parameters start at multiples of 64 bytes, as separately allocated tensors do. Matrix kernels need this to
# be fast.
ALIGN = 16


@dataclass(frozen=True)
class Segment:
    """The part of a parameter that a shard contains.

    where: position in the shard. first: index in the flat parameter of the first element.
    shape: of the full parameter.
    """

    name: str
    where: slice
    first: int
    shape: torch.Size


@dataclass(frozen=True)
class Layout:
    """Positions of parameters and buckets in a flat buffer.

    Parameters are in the order of the forward pass. Buckets are in the order in which their gradients arrive, which is
    the reverse. The length and the start of a bucket are divisible by the number of ranks. Shard `index` of `parts`
    concatenates piece `index` of every bucket. A bucket at a:b of the buffer is at a/parts:b/parts of the shard.
    members: names of the parameters in each bucket. size: elements of the buffer, with padding.
    """

    places: dict[str, slice]
    shapes: dict[str, torch.Size]
    buckets: tuple[slice, ...]
    members: tuple[tuple[str, ...], ...]
    size: int

    def view(self, flat: Tensor, name: str) -> Tensor:
        """Return a parameter as a view of a flat buffer, in the parameter's shape."""
        return flat[self.places[name]].view(self.shapes[name])

    def within(self, parts: int) -> list[slice]:
        """Return the positions of the buckets' pieces in a shard, in the order of the buckets."""
        return [slice(b.start // parts, b.stop // parts) for b in self.buckets]

    def shard(self, flat: Tensor, parts: int, index: int) -> Tensor:
        """Return shard `index` of `parts` as a copy, or `flat` itself if there is only one shard."""
        if parts == 1:
            return flat
        return torch.cat([flat[bucket].view(parts, -1)[index] for bucket in reversed(self.buckets)])

    def segments(self, parts: int = 1, index: int = 0) -> list[Segment]:
        """List the parts of parameters in shard `index` of `parts`, in the order of the shard."""
        segments = []
        for bucket, names in zip(reversed(self.buckets), reversed(self.members)):
            length = (bucket.stop - bucket.start) // parts
            begin, offset = bucket.start + index * length, bucket.start // parts
            for name in names:
                place = self.places[name]
                start, stop = max(place.start, begin), min(place.stop, begin + length)
                if start < stop:
                    span = slice(offset + start - begin, offset + stop - begin)
                    segments.append(Segment(name, span, start - place.start, self.shapes[name]))
        return segments


def make_layout(
    parameters: Mapping[str, Tensor], bucket_bytes: float, ranks: int, together: Collection[str] = ()
) -> Layout:
    """Lay out parameters, named in the order of the forward pass, for `ranks` ranks in all.

    A bucket is closed as soon as it has `bucket_bytes`. A parameter is never split between buckets, and parameters in
    `together` stay in the bucket of the previous parameter. There is no padding after a parameter whose number of
    elements is a multiple of ALIGN.
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
    """[plan.sync]: how gradients and weights are communicated. The result is the same up to rounding.

    strategy: "plain", "bf16" or "hierarchical" sums. "auto" measures plain and hierarchical sums on these ranks, and
    never chooses "bf16".
    bucket: MiB of gradients that are sent together. The default of 16 grows beyond 256 data ranks (`bucket_bytes`); any
    other value is used unchanged.
    shard_state: each data rank keeps moments and averaged weights of its own piece only (ZeRO, stage 1).
    check_every: steps between two comparisons of all ranks' weights; 0 disables them.
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
        """Compute the bytes of a bucket between `ranks` data ranks, large enough that no message is tiny."""
        least = MIN_MESSAGE_BYTES * ranks if self.bucket == SyncConfig.bucket else 0
        return max(self.bucket * 2**20, least)


@dataclass(frozen=True)
class Wire:
    """Asynchronous collectives of one group on flat buffers. Each start is reported as an event."""

    group: Group

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        """Send piece r of x to rank r, and fill `out` with the pieces from all ranks, in the order of the ranks."""
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
        """Replace x by the x of rank `source` of the world."""
        name = self._note("broadcast", x.nbytes if source == self.group.ranks[self.group.rank] else 0)
        return Work(dist.broadcast(x, source, group=self.group.handle, async_op=True), name)

    def mean(self, x: Tensor) -> Tensor:
        """Compute the mean of flat tensors. One rank sums each element, so all ranks get the same bits."""
        padded = torch.cat([x, x.new_zeros(-len(x) % self.group.size)])
        (piece,) = finish([Plain(self).reduce_scatter(padded)])
        finish([Plain(self).all_gather(piece.div_(self.group.size), padded)])
        return padded[: len(x)]

    def _note(self, kind: str, size: int) -> str:
        """Report the start of a collective to the watchers, and return its name."""
        event = Event("start", f"gradients or weights over {self.group.name} ranks", kind, size, carries="gradients")
        tell(event)
        return event.title


def finish(exchanges: Sequence[Stages[T]]) -> list[T]:
    """Run all exchanges to their ends, interleaved stage by stage, and return their results."""
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
    """Send each piece to its owner, which sums the contributions in the order of the ranks; then gather the sums.

    It sends as many bytes as a ring, but one rank computes each sum in a fixed order, so replicas agree bitwise.
    index: the piece that this rank owns. dtype: numbers are rounded to it for sending, and summed in their own dtype.
    """

    # Contributions may be sent before their clipping factors are known.
    late_factors = True

    def __init__(self, wire: Wire, dtype: torch.dtype | None = None) -> None:
        self.wire, self.dtype = wire, dtype
        self.index = wire.group.rank

    def reduce_scatter(self, x: Tensor, factors: ClipFactors | None = None) -> Stages[Tensor]:
        """Compute this rank's piece of the sum of all flat contributions x, each times its rank's factor (None: 1).

        `factors` is called after the second yield, when all contributions have arrived. A contribution with factor zero
        may contain NaN.
        """
        packed = x.to(self.dtype or x.dtype)
        received = torch.empty_like(packed)
        work = self.wire.all_to_all(received, packed)
        yield
        work.wait()
        yield
        pieces = received.view(self.wire.group.size, -1).to(x.dtype)
        if factors is not None and (factor := factors()) is not None:
            # Fill before multiplying, since 0 x NaN is NaN.
            pieces.masked_fill_((factor == 0)[:, None], 0).mul_(factor[:, None].to(pieces.dtype))
        return pieces.sum(0)

    def all_gather(self, piece: Tensor, out: Tensor, exact: bool = False) -> Stages[None]:
        """Gather every rank's piece into `out`. exact: without rounding to `dtype`."""
        arriving = out if exact or self.dtype is None else torch.empty_like(out, dtype=self.dtype)
        work = self.wire.all_gather(arriving, piece.to(arriving.dtype))
        yield
        work.wait()
        if arriving is not out:
            out.copy_(arriving)


class Hierarchical:
    """Sum within each node first, then between nodes. Each rank sends only a piece of its node's sum to other nodes."""

    # The contributions of a node are summed at once, so their factors must be known before.
    late_factors = False

    def __init__(self, within: Wire, between: Wire) -> None:
        self.within, self.between = Plain(within), Plain(between)
        self.index = within.group.rank * between.group.size + between.group.rank

    def reduce_scatter(self, x: Tensor, factors: ClipFactors | None = None) -> Stages[Tensor]:
        node_sum = yield from self.within.reduce_scatter(x)
        return (yield from self.between.reduce_scatter(node_sum))

    def all_gather(self, piece: Tensor, out: Tensor, exact: bool = False) -> Stages[None]:
        node_piece = piece.new_empty(len(piece) * self.between.wire.group.size)
        yield from self.between.all_gather(piece, node_piece)
        yield from self.within.all_gather(node_piece, out)


Exchange = Plain | Hierarchical


def make_exchanges(strategy: Strategy, mesh: Mesh, wire: Wire, ranks_per_node: int | None) -> dict[str, Exchange]:
    """Create the strategies to choose from, by name; several only for "auto". Every rank must call it.

    Raises UserError for a strategy that the placement of these ranks does not allow.
    """
    if mesh.data.size == 1 or strategy == "plain":
        return {"plain": Plain(wire)}
    if strategy == "bf16":
        return {"bf16": Plain(wire, torch.bfloat16)}
    exchanges: dict[str, Exchange] = {} if strategy == "hierarchical" else {"plain": Plain(wire)}
    if strategy == "hierarchical" or _ranks_of_node(mesh, ranks_per_node) is not None:
        exchanges["hierarchical"] = make_hierarchical(mesh, ranks_per_node)
    return exchanges


def choose(
    exchanges: Mapping[str, Exchange], mesh: Mesh, total: Tensor, pieces: Sequence[slice], hidden: bool
) -> tuple[str, dict[str, float]]:
    """Measure all strategies with these buckets; returns the name of the chosen one and the seconds of each.

    The first strategy, plain, is chosen unless another is clearly faster. Every rank must call it. The time of a
    strategy is the median of the slowest rank, so all ranks choose the same.
    hidden: the first half of an exchange overlaps with the backward pass if the strategy allows it, and is not counted.
    """
    seconds = {}
    for name, exchange in exchanges.items():
        rounds = sorted(_seconds(exchange, mesh, total, pieces, hidden) for _ in range(ROUNDS + 1))
        median = total.new_tensor(rounds[ROUNDS // 2])
        with waiting(f"measuring {name} sums"):
            dist.all_reduce(median, dist.ReduceOp.MAX, group=mesh.world.handle)
        seconds[name] = float(median)
    first, best = next(iter(seconds)), min(seconds, key=seconds.__getitem__)
    return best if seconds[best] < MAX_RELATIVE_TIME * seconds[first] else first, seconds


def _seconds(exchange: Exchange, mesh: Mesh, total: Tensor, pieces: Sequence[slice], hidden: bool) -> float:
    # A barrier, so that all ranks start the measurement together.
    with waiting("beginning a measurement together"):
        dist.all_reduce(total[:1].clone(), group=mesh.world.handle)
    # Reading a number waits for all kernels that a GPU has queued, here and below.
    float(total[0])
    begin = time.perf_counter()
    owned = finish([exchange.reduce_scatter(total[piece]) for piece in pieces])
    if hidden and exchange.late_factors:
        float(owned[-1][0])
        begin = time.perf_counter()
    finish([exchange.all_gather(piece, total[span]) for piece, span in zip(owned, pieces)])
    float(total[0])
    return time.perf_counter() - begin


def make_hierarchical(mesh: Mesh, ranks_per_node: int | None) -> Hierarchical:
    """Create the strategy for nodes of `ranks_per_node` processes with consecutive ranks. Every rank must call it.

    Raises UserError if the nodes do not have equally many data ranks.
    """
    local_ranks = _ranks_of_node(mesh, ranks_per_node)
    if local_ranks is None:
        raise UserError(
            f"plan.sync: hierarchical sums need several nodes with several data ranks on each, but there are "
            f"{mesh.data.size} data ranks of {mesh.model.size} processes, {ranks_per_node} processes to a node. "
            'Use plan.sync.strategy = "plain".'
        )
    data, model = range(mesh.data.size), range(mesh.model.size)
    lines: list[tuple[str, list[list[int]]]] = [
        ("node", [[d * len(model) + m for d in data[k : k + local_ranks]] for m in model for k in data[::local_ranks]]),
        ("nodes", [[d * len(model) + m for d in data[g::local_ranks]] for m in model for g in range(local_ranks)]),
    ]
    wires = [Wire(split(name, groups, mesh.limit)) for name, groups in lines]
    return Hierarchical(*wires)


def _ranks_of_node(mesh: Mesh, ranks_per_node: int | None) -> int | None:
    """Return the number of data ranks of one group on each node; None if it is one, all, or differs between nodes."""
    node_ranks, remainder = divmod(ranks_per_node or 1, mesh.model.size)
    return None if remainder or not 1 < node_ranks < mesh.data.size or mesh.data.size % node_ranks else node_ranks
