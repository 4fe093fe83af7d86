"""How data ranks take the mean of their gradients, and make whole what each owns a piece of: lossless but for rounding.

Every strategy has two halves, `scatter` (each rank's contribution -> the sum, of which each rank owns a piece) and
`gather` (the pieces -> the whole).  Between them lies either nothing, or the update of the weights, when every rank
keeps the optimiser's state of its own piece only.  Both are generators that stop wherever they would wait, so that
many buckets travel at once; `finish` runs them in one order that is the same on every rank.
"""

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from warpfold.errors import UserError
from warpfold.parallel.collectives import all_gather, reduce_scatter
from warpfold.parallel.mesh import Group, Mesh, split
from warpfold.parallel.waits import Work, waiting

T = TypeVar("T")
Stages = Generator[None, None, T]
Weights = Callable[[], Tensor | None]
Strategy = Literal["plain", "bf16", "hierarchical", "auto"]
STRATEGIES = get_args(Strategy)
ROUNDS = 5  # of `auto`'s measurement
CLEARLY = 0.9  # of plain's time: what another strategy has to stay below


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """[plan.sync]: how gradients and weights travel; the result is the same but for rounding.

    strategy: "auto" measures plain and hierarchical sums on the ranks as they are; "bf16" is for those who ask for it.
    bucket: MiB of gradient that travel together.
    shard_state: each data rank keeps moments and averaged weights of its own piece only (ZeRO, stage 1).
    check_every: steps after which the weights of all ranks are compared; 0: never.
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


_listeners: list[Callable[[str], None]] = []


@contextmanager
def overheard(listener: Callable[[str], None]) -> Iterator[None]:
    """Within it, `listener` is told in words of every collective of gradients or weights that this process begins."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@dataclass(frozen=True)
class Wire:
    """The collectives of one group on flat buffers, asynchronous, with the bytes that this rank sends counted."""

    group: Group
    sent: Counter[str] = field(default_factory=Counter)  # by kind

    def exchange(self, out: Tensor, x: Tensor) -> Work:
        """Piece r of x goes to rank r; `out` holds the pieces that came, in the order of the ranks."""
        name = self._note("exchange", x.nbytes * (self.group.size - 1) // self.group.size)
        return Work(dist.all_to_all_single(out, x, group=self.group.handle, async_op=True), name)

    def gather(self, out: Tensor, x: Tensor) -> Work:
        """`out` is every rank's x, in the order of the ranks."""
        name = self._note("gather", x.nbytes * (self.group.size - 1))
        return Work(all_gather(out, x, group=self.group.handle, async_op=True), name)

    def sum_pieces(self, out: Tensor, x: Tensor) -> Work:
        """`out` is this rank's piece of the sum of all x."""
        name = self._note("sum", x.nbytes * (self.group.size - 1) // self.group.size)
        return Work(reduce_scatter(out, x, group=self.group.handle, async_op=True), name)

    def begin_sum(self, x: Tensor) -> Work:
        """x becomes its sum over the ranks: for a few numbers."""
        name = self._note("sum", 2 * x.nbytes * (self.group.size - 1) // self.group.size)
        return Work(dist.all_reduce(x, group=self.group.handle, async_op=True), name)

    def sum(self, x: Tensor) -> Tensor:
        """The same, waited for."""
        self.begin_sum(x).wait()
        return x

    def mean(self, x: Tensor) -> Tensor:
        """The mean of flat tensors, waited for; each number is added up on one rank, so that all have the same bits."""
        padded = torch.cat([x, x.new_zeros(-len(x) % self.group.size)])
        (piece,) = finish([Plain(self).scatter(padded, no_weights)])
        finish([Plain(self).gather(piece.div_(self.group.size), padded)])
        return padded[: len(x)]

    def _note(self, kind: str, size: int) -> str:
        """Count and tell; the collective's name."""
        self.sent[kind] += size
        name = f"{kind} of gradients or weights over {self.group.name} ranks"
        for listener in _listeners:
            listener(name)
        return name


def finish(travels: Sequence[Stages[T]]) -> list[T]:
    """Run all to their ends, a stage of each in turn, and return what they return."""
    results: dict[int, T] = {}
    running = dict(enumerate(travels))
    while running:
        for number in list(running):
            try:
                next(running[number])
            except StopIteration as end:
                results[number] = end.value
                del running[number]
    return [results[number] for number in range(len(travels))]


def no_weights() -> None:
    """Every rank's contribution counts as it is."""


class Exchange(Protocol):
    """A strategy.  `index`: which piece this rank owns.  `late_weights`: contributions may be sent before it is known
    how much each counts."""

    index: int
    late_weights: bool

    def scatter(self, x: Tensor, weights: Weights) -> Stages[Tensor]:
        """This rank's flat contribution -> its piece of the sum of all, each times its rank's weight.

        `weights` is asked once all has arrived, after the second stop; a contribution of weight zero may hold NaN.
        """
        ...

    def gather(self, piece: Tensor, out: Tensor, exact: bool = False) -> Stages[None]:
        """Make `out` the whole of which every rank has a piece.  exact: it must not be rounded."""
        ...

    def sent(self) -> Counter[str]:
        """Bytes that this rank has sent, by kind."""
        ...


class Plain:
    """Every rank sends each other its piece, the owner adds them up in the order of the ranks, and hands the sum round.

    The bytes are those of a ring; but a sum has one place and one order, so that replicas agree to the bit.
    """

    late_weights = True

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.index = wire.group.rank

    def scatter(self, x: Tensor, weights: Weights) -> Stages[Tensor]:
        packed = self.pack(x)
        received = torch.empty_like(packed)
        work = self.wire.exchange(received, packed)
        yield
        work.wait()
        yield
        return _weighted_sum(received.view(self.wire.group.size, -1).to(x.dtype), weights())

    def gather(self, piece: Tensor, out: Tensor, exact: bool = False) -> Stages[None]:
        work = self.wire.gather(out, piece)
        yield
        work.wait()

    def pack(self, x: Tensor) -> Tensor:
        """What travels for x."""
        return x

    def sent(self) -> Counter[str]:
        return self.wire.sent


class Bf16(Plain):
    """Numbers travel rounded to bfloat16 and are added in their own precision; half the bytes."""

    def pack(self, x: Tensor) -> Tensor:
        return x.bfloat16()

    def gather(self, piece: Tensor, out: Tensor, exact: bool = False) -> Stages[None]:
        if exact:
            yield from super().gather(piece, out)
        else:
            rounded = torch.empty_like(out, dtype=torch.bfloat16)
            yield from super().gather(self.pack(piece), rounded)
            out.copy_(rounded)


class Hierarchical:
    """Sum within the node first, then between nodes, where each rank speaks for a piece of its node's sum only."""

    late_weights = False  # ranks of a node are added before anything else

    def __init__(self, within: Wire, between: Wire) -> None:
        self.within, self.between = Plain(within), Plain(between)
        self.index = within.group.rank * between.group.size + between.group.rank

    def scatter(self, x: Tensor, weights: Weights) -> Stages[Tensor]:
        of_node = yield from self.within.scatter(x, no_weights)
        return (yield from self.between.scatter(of_node, no_weights))

    def gather(self, piece: Tensor, out: Tensor, exact: bool = False) -> Stages[None]:
        of_node = piece.new_empty(len(piece) * self.between.wire.group.size)
        yield from self.between.gather(piece, of_node)
        yield from self.within.gather(of_node, out)

    def sent(self) -> Counter[str]:
        of = {"within": self.within.sent(), "between": self.between.sent()}
        return Counter({f"{kind} {where}": n for where, sent in of.items() for kind, n in sent.items()})


def make_exchanges(strategy: Strategy, mesh: Mesh, wire: Wire, ranks_per_node: int | None) -> dict[str, Exchange]:
    """The strategies to choose from, by name; one but for "auto".

    Every rank must call it.  Errors: UserError for a strategy that these ranks are not placed for.
    """
    if mesh.data.size == 1 or strategy == "plain":
        return {"plain": Plain(wire)}
    if strategy == "bf16":
        return {"bf16": Bf16(wire)}
    if strategy == "hierarchical":
        return {"hierarchical": make_hierarchical(mesh, ranks_per_node)}
    if _ranks_of_node(mesh, ranks_per_node) is None:
        return {"plain": Plain(wire)}
    return {"plain": Plain(wire), "hierarchical": make_hierarchical(mesh, ranks_per_node)}


def choose(
    exchanges: Mapping[str, Exchange], mesh: Mesh, total: Tensor, pieces: Sequence[slice], hidden: bool
) -> tuple[str, dict[str, float]]:
    """Measure the candidates with the buckets as they are: the first, plain, unless another is clearly faster; seconds.

    hidden: the first half of an exchange that allows it runs during the backward pass, and is not counted.
    Every rank must call it, and all choose the same: of each candidate the slowest rank's median counts.
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
    float(total[0])  # what came before is done, on a GPU too
    begin = time.perf_counter()
    owned = finish([exchange.scatter(total[piece], no_weights) for piece in pieces])
    if hidden and exchange.late_weights:
        float(owned[-1][0])
        begin = time.perf_counter()
    finish([exchange.gather(piece, total[place]) for piece, place in zip(owned, pieces)])
    float(total[0])
    return time.perf_counter() - begin


def make_hierarchical(mesh: Mesh, ranks_per_node: int | None) -> Hierarchical:
    """The strategy for processes that lie on nodes, `ranks_per_node` of them on each, in the order of their ranks.

    Every rank must call it.  Errors: UserError where the data ranks do not share nodes in equal parts.
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
    """How many data ranks of one group lie on each node; None where that is one, all, or not the same everywhere."""
    each, more = divmod(ranks_per_node or 1, mesh.model.size)
    return None if more or not 1 < each < mesh.data.size or mesh.data.size % each else each


def _weighted_sum(pieces: Tensor, weights: Tensor | None) -> Tensor:
    if weights is not None:
        pieces.masked_fill_((weights == 0)[:, None], 0).mul_(weights[:, None].to(pieces.dtype))
    return pieces.sum(0)
