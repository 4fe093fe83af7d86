"""Differentiable, asynchronous collectives: started when the tensor exists, awaited where it is used.

`all_gather` makes a sharded tensor whole on every rank, `all_to_all` shards it along another axis, and `sendrecv`
exchanges tensors between two ranks.  Each returns a `Pending`; its `wait` returns the tensor.  The backward pass runs
the exact transpose (that of an all-gather is a reduce-scatter): it starts when the gradient of the awaited tensor is
known, and is awaited as late as possible, when autograd has nothing else to do.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from warpfold.ops.noise import Factors
from warpfold.ops.torch_internals import all_gather_flat, node_number, reduce_scatter_flat, set_node_number
from warpfold.parallel.mesh import Group
from warpfold.parallel.waits import Event, Work, tell

F = TypeVar("F", bound=Factors)


_numbers = count()


def shard_sizes(length: int, ranks: int) -> list[int]:
    """Return how many of `length` rows each rank holds: the first ranks hold one more where it does not divide."""
    each, more = divmod(length, ranks)
    return [each + (rank < more) for rank in range(ranks)]


def local_shard(x: F, axis: int, group: Group) -> F:
    """Return this rank's shard, a view, of a tensor that every rank has whole, or of dropout factors not yet drawn."""
    sizes = shard_sizes(x.shape[axis], group.size)
    shard: Any = x.narrow(axis, sum(sizes[: group.rank]), sizes[group.rank])  # type of x
    return shard


class Pending:
    """A tensor that is here or still in flight; `wait` returns it, however often it is called."""

    def __init__(self, tensor: Tensor | None, receive: Callable[[bool], Tensor] | None = None) -> None:
        self._tensor, self._receive = tensor, receive
        self.travels = tensor is None  # whether it ever was in flight
        self.given = False  # whether it is the input of a block that may be recomputed

    def wait(self) -> Tensor:
        if self._tensor is None:
            assert self._receive is not None
            self._tensor, self._receive = self._receive(self.given), None
        return self._tensor

    @property
    def arrived(self) -> bool:
        """Whether `wait` returns at once."""
        return self._tensor is not None


# The buffer that will be filled, the one that is sent, the handle, and the bytes that leave this rank.
Started = tuple[Tensor, Tensor, dist.Work | None, int]


@dataclass(frozen=True)
class _Collective:
    """A linear map between tensors that lie on several ranks: pack and send (`start`), then `unpack` what has come."""

    kind: str
    name: str
    start: Callable[[Tensor], Started]
    unpack: Callable[[Tensor], Tensor]


def _exchange(sent: Tensor, leave: list[int], come: list[int], group: Group) -> Started:
    """Start to send `leave` numbers to each rank, and to receive `come` from each."""
    buffer = sent.new_empty(sum(come))
    work = dist.all_to_all_single(buffer, sent, come, leave, group=group.handle, async_op=True)
    return buffer, sent, work, (len(sent) - leave[group.rank]) * sent.element_size()


def _with_size(shape: torch.Size, axis: int, size: int) -> torch.Size:
    found = list(shape)
    found[axis] = size
    return torch.Size(found)


def _padded(flat: Tensor, width: int) -> Tensor:
    return flat if len(flat) == width else torch.cat([flat, flat.new_zeros(width - len(flat))])


def _one_after_another(x: Tensor, sizes: Sequence[int], axis: int) -> Tensor:
    """Return the parts of x along an axis, flat, one after another: x itself where they lie so, else one copy."""
    if math.prod(x.shape[:axis]) == 1:
        return x.contiguous().view(-1)
    if len(set(sizes)) == 1:
        at = axis % x.dim()
        return x.unflatten(at, (len(sizes), sizes[0])).movedim(at, 0).reshape(-1)
    return torch.cat([part.reshape(-1) for part in x.split(list(sizes), axis)])


def _joined(flat: Tensor, shapes: Sequence[torch.Size], axis: int) -> Tensor:
    """Return tensors of these shapes, which lie one after another, joined along an axis: a view where that is one."""
    if math.prod(shapes[0][:axis]) == 1:
        return flat.view(_with_size(shapes[0], axis, sum(shape[axis] for shape in shapes)))
    parts = flat.split([shape.numel() for shape in shapes])
    return torch.cat([part.view(shape) for part, shape in zip(parts, shapes)], axis)


def all_gather(x: Tensor, axis: int, length: int, group: Group, name: str) -> Pending:
    """Make x, sharded along `axis` with `length` rows in all, whole on every rank.

    Shards are padded to the size of the largest, and only where sizes differ.  The transpose adds up the whole tensors
    of all ranks, and gives each rank its shard.
    """
    if group.size == 1:
        return Pending(x)
    sizes = shard_sizes(length, group.size)
    shapes = [_with_size(x.shape, axis, size) for size in sizes]
    own, width, even = shapes[group.rank], max(shape.numel() for shape in shapes), len(set(sizes)) == 1

    def gather(x: Tensor) -> Started:
        sent = _padded(x.contiguous().view(-1), width)
        buffer = sent.new_empty(group.size * width)
        work = all_gather_flat(buffer, sent, group=group.handle, async_op=True)
        return buffer, sent, work, (group.size - 1) * sent.nbytes

    def join(buffer: Tensor) -> Tensor:
        if even:
            return _joined(buffer, shapes, axis)
        rows = zip(buffer.view(group.size, width), shapes)
        return torch.cat([row[: shape.numel()].view(shape) for row, shape in rows], axis)

    def reduce_scatter(x: Tensor) -> Started:
        if even:
            sent = _one_after_another(x, sizes, axis)
        else:
            sent = torch.cat([_padded(part.reshape(-1), width) for part in x.split(sizes, axis)])
        buffer = sent.new_empty(width)
        work = reduce_scatter_flat(buffer, sent, group=group.handle, async_op=True)
        return buffer, sent, work, (group.size - 1) * buffer.nbytes

    def shard(buffer: Tensor) -> Tensor:
        return buffer[: own.numel()].view(own)

    there = _Collective("all_gather", name, gather, join)
    return _begin(x, there, _Collective("reduce_scatter", name, reduce_scatter, shard))


def all_to_all(x: Tensor, had: int, wanted: int, length: int, group: Group, name: str) -> Pending:
    """Shard x along `wanted`, where it is whole, instead of along `had`, where it has `length` rows in all.

    Every rank sends to every other the part that both shards share.
    """
    if group.size == 1:
        return Pending(x)

    def resharding(shape: torch.Size, had: int, wanted: int, length: int) -> _Collective:
        """Say how the whole of a shard of this shape, `length` rows along `had`, is sharded anew."""
        had_sizes, wanted_sizes = shard_sizes(length, group.size), shard_sizes(shape[wanted], group.size)
        leave = [_with_size(shape, wanted, size).numel() for size in wanted_sizes]
        kept = _with_size(shape, wanted, wanted_sizes[group.rank])
        come = [_with_size(kept, had, size) for size in had_sizes]

        def start(x: Tensor) -> Started:
            sent = _one_after_another(x, wanted_sizes, wanted)
            return _exchange(sent, leave, [shape.numel() for shape in come], group)

        return _Collective("all_to_all", name, start, lambda buffer: _joined(buffer, come, had))

    own = shard_sizes(x.shape[wanted], group.size)[group.rank]
    there = _with_size(_with_size(x.shape, had, length), wanted, own)
    back = resharding(there, wanted, had, x.shape[wanted])
    return _begin(x, resharding(x.shape, had, wanted, length), back)


def sendrecv(x: Tensor, other: Sequence[int], group: Group, name: str) -> Pending:
    """Send x to the other of two ranks, and receive the tensor of shape `other` that it sends."""
    if group.size == 1:
        return Pending(x)

    def swap(shape: torch.Size, other: torch.Size) -> _Collective:
        leave, come = ([0, n] if group.rank == 0 else [n, 0] for n in (shape.numel(), other.numel()))
        return _Collective(
            "sendrecv",
            name,
            lambda x: _exchange(x.contiguous().view(-1), leave, come, group),
            lambda buffer: buffer.view(other),
        )

    there = torch.Size(other)
    return _begin(x, swap(x.shape, there), swap(there, x.shape))


@dataclass
class _InFlight:
    """A collective that was started, with all that must stay alive until it is done."""

    collective: _Collective
    buffer: Tensor
    sent: Tensor
    work: dist.Work | None
    number: int
    backward: bool

    def wait(self) -> Tensor:
        event = Event("wait", self.collective.name, self.collective.kind, 0, self.number, self.backward)
        tell(event)
        Work(self.work, event.title).wait()
        return self.collective.unpack(self.buffer)


@dataclass
class _Call:
    """The two collectives of one call, while they are in flight; its two autograd nodes share it."""

    forward: _InFlight | None = None
    backward: _InFlight | None = None


def _begin(x: Tensor, there: _Collective, back: _Collective) -> Pending:
    """Start a collective; back: the one that the gradient takes, its transpose."""
    call = _Call()
    placeholder = _Start.apply(x, there, call)
    if placeholder.requires_grad:
        set_node_number(placeholder.grad_fn, _reserved.next())
    return Pending(None, lambda given: _Wait.apply(placeholder, back, call, given))


def _send(collective: _Collective, x: Tensor, backward: bool) -> _InFlight:
    buffer, sent, work, size = collective.start(x)
    in_flight = _InFlight(collective, buffer, sent, work, next(_numbers), backward)
    tell(Event("start", collective.name, collective.kind, size, in_flight.number, backward))
    return in_flight


RESERVE = 4096


class _Reserved(threading.local):
    """Sequence numbers of autograd nodes that nobody needs, in ascending order.

    Autograd's engine runs, of the nodes whose gradient is known, the one with the highest sequence number, and nodes
    are numbered as a thread makes them.  These numbers are lower than those of all later nodes, so a wait that has one
    runs when there is nothing else to do, on all ranks alike.
    """

    def __init__(self) -> None:
        self._numbers: Iterator[int] = iter(())

    def next(self) -> int:
        number = next(self._numbers, None)
        if number is None:
            leaf = torch.zeros((), requires_grad=True)
            nodes = [leaf.view_as(leaf).grad_fn for _ in range(RESERVE)]
            self._numbers = iter([node_number(node) for node in nodes if node is not None])
            number = next(self._numbers)
        return number


_reserved = _Reserved()


class _Start(Function):
    """x -> a placeholder, whose gradient arrives when the gradient of x is in flight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: _Collective, call: _Call) -> Tensor:
        ctx.call = call
        call.forward = _send(collective, x, False)
        return _placeholder(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        in_flight, ctx.call.backward = ctx.call.backward, None  # the graph may live on, its buffers must not
        return in_flight.wait(), None, None


class _Wait(Function):
    """The placeholder -> the tensor."""

    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, back: _Collective, call: _Call, given: bool) -> Tensor:
        ctx.back, ctx.call = back, call
        in_flight, call.forward = call.forward, None
        assert in_flight is not None
        if not given:  # so that `backward` can ask for it; the input of a block is not part of its recomputation
            ctx.save_for_backward(placeholder)
        return in_flight.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        # Asking for what was saved makes torch recompute a checkpointed block now, before the gradient is sent.  Ranks
        # that have more rows, or another branch, would otherwise recompute sooner or later than others, and the
        # collectives of one rank's recomputation would meet those of another's backward pass.
        _ = ctx.saved_tensors
        ctx.call.backward = _send(ctx.back, grads[0], True)
        return _placeholder(grads[0]), None, None, None


def _placeholder(like: Tensor) -> Tensor:
    """Return a number that nobody reads.  It is not written, which would be a kernel, unless torch looks for NaN."""
    return like.new_zeros(()) if torch.is_anomaly_enabled() else like.new_empty(())


def tied(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors as they are, but make autograd want the gradients of all where it wants that of one.

    Use it for tensors that one rank goes on to use and another does not: both must take part in the collective of the
    gradient, if only with zeros.
    """
    return tuple(_Tie.apply(*tensors))


class _Tie(Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads
