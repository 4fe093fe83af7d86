"""Differentiable, asynchronous collectives: started when the input exists, awaited where the result is used.

`all_gather` gathers a sharded tensor on every rank, `all_to_all` reshards it along another axis, and `sendrecv` swaps
tensors between two ranks. Each returns a `Pending`, whose `wait` returns the tensor. The backward pass runs the exact
transpose (a reduce-scatter for an all-gather). The transpose starts when the gradient of the result is known. Autograd
waits for it as late as possible, when no other work is left.
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
    """Return the number of rows of each rank. The first ranks hold one more if `ranks` does not divide `length`."""
    least, more = divmod(length, ranks)
    return [least + (rank < more) for rank in range(ranks)]


def local_shard(x: F, axis: int, group: Group) -> F:
    """Return this rank's shard of a full tensor as a view, or of dropout factors that are not yet drawn."""
    sizes = shard_sizes(x.shape[axis], group.size)
    shard: Any = x.narrow(axis, sum(sizes[: group.rank]), sizes[group.rank])
    return shard


class Pending:
    """A tensor that is available or still in flight. `wait` returns it and may be called repeatedly.

    travels: whether the tensor ever was in flight.
    is_block_input: whether it is the input of a block that may be recomputed.
    """

    def __init__(self, tensor: Tensor | None, receive: Callable[[bool], Tensor] | None = None) -> None:
        self._tensor, self._receive = tensor, receive
        self.travels = tensor is None
        self.is_block_input = False

    def wait(self) -> Tensor:
        if self._tensor is None:
            assert self._receive is not None
            self._tensor, self._receive = self._receive(self.is_block_input), None
        return self._tensor

    @property
    def arrived(self) -> bool:
        """Whether `wait` returns at once."""
        return self._tensor is not None


# The receive buffer, the send buffer, the handle, and the bytes that leave this rank.
Started = tuple[Tensor, Tensor, dist.Work | None, int]


@dataclass(frozen=True)
class _Collective:
    """A linear map between distributed tensors: `start` packs and sends, `unpack` reads the received buffer."""

    kind: str
    name: str
    start: Callable[[Tensor], Started]
    unpack: Callable[[Tensor], Tensor]


def _exchange(sent: Tensor, leave: list[int], come: list[int], group: Group) -> Started:
    """Start an all-to-all that sends `leave[r]` elements to rank r and receives `come[r]` elements from it."""
    buffer = sent.new_empty(sum(come))
    work = dist.all_to_all_single(buffer, sent, come, leave, group=group.handle, async_op=True)
    return buffer, sent, work, (len(sent) - leave[group.rank]) * sent.element_size()


def _with_size(shape: torch.Size, axis: int, size: int) -> torch.Size:
    sizes = list(shape)
    sizes[axis] = size
    return torch.Size(sizes)


def _padded(flat: Tensor, width: int) -> Tensor:
    return flat if len(flat) == width else torch.cat([flat, flat.new_zeros(width - len(flat))])


def _flat_shards(x: Tensor, sizes: Sequence[int], axis: int) -> Tensor:
    """Flatten and concatenate the shards of x along an axis: a view if they are contiguous, otherwise one copy."""
    if math.prod(x.shape[:axis]) == 1:
        return x.contiguous().view(-1)
    if len(set(sizes)) == 1:
        at = axis % x.dim()
        return x.unflatten(at, (len(sizes), sizes[0])).movedim(at, 0).reshape(-1)
    return torch.cat([part.reshape(-1) for part in x.split(list(sizes), axis)])


def _joined(flat: Tensor, shapes: Sequence[torch.Size], axis: int) -> Tensor:
    """Join consecutive flat shards of these shapes along an axis: a view if they are contiguous, otherwise a copy."""
    if math.prod(shapes[0][:axis]) == 1:
        return flat.view(_with_size(shapes[0], axis, sum(shape[axis] for shape in shapes)))
    parts = flat.split([shape.numel() for shape in shapes])
    return torch.cat([part.view(shape) for part, shape in zip(parts, shapes)], axis)


def all_gather(x: Tensor, axis: int, length: int, group: Group, name: str) -> Pending:
    """Gather x, which is sharded along `axis` with `length` rows in all, on every rank.

    Shards of different sizes are padded to the largest. The transpose is a reduce-scatter, which adds up the full
    tensors of all ranks and gives each rank its shard.
    """
    if group.size == 1:
        return Pending(x)
    sizes = shard_sizes(length, group.size)
    shapes = [_with_size(x.shape, axis, size) for size in sizes]
    own_shape, width, even = shapes[group.rank], max(shape.numel() for shape in shapes), len(set(sizes)) == 1

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
            sent = _flat_shards(x, sizes, axis)
        else:
            sent = torch.cat([_padded(part.reshape(-1), width) for part in x.split(sizes, axis)])
        buffer = sent.new_empty(width)
        work = reduce_scatter_flat(buffer, sent, group=group.handle, async_op=True)
        return buffer, sent, work, (group.size - 1) * buffer.nbytes

    def shard(buffer: Tensor) -> Tensor:
        return buffer[: own_shape.numel()].view(own_shape)

    gathering = _Collective("all_gather", name, gather, join)
    return _begin(x, gathering, _Collective("reduce_scatter", name, reduce_scatter, shard))


def all_to_all(x: Tensor, had: int, wanted: int, length: int, group: Group, name: str) -> Pending:
    """Reshard x from the axis `had`, along which it has `length` rows in all, to the axis `wanted`.

    Every rank sends each other rank the intersection of its old shard with that rank's new shard.
    """
    if group.size == 1:
        return Pending(x)

    def resharding(shape: torch.Size, had: int, wanted: int, length: int) -> _Collective:
        """Describe how a tensor whose shard has this shape, with `length` rows along `had`, is resharded."""
        had_sizes, wanted_sizes = shard_sizes(length, group.size), shard_sizes(shape[wanted], group.size)
        leaving_sizes = [_with_size(shape, wanted, size).numel() for size in wanted_sizes]
        kept_shape = _with_size(shape, wanted, wanted_sizes[group.rank])
        arriving_shapes = [_with_size(kept_shape, had, size) for size in had_sizes]

        def start(x: Tensor) -> Started:
            sent = _flat_shards(x, wanted_sizes, wanted)
            return _exchange(sent, leaving_sizes, [shape.numel() for shape in arriving_shapes], group)

        return _Collective("all_to_all", name, start, lambda buffer: _joined(buffer, arriving_shapes, had))

    own_size = shard_sizes(x.shape[wanted], group.size)[group.rank]
    result_shape = _with_size(_with_size(x.shape, had, length), wanted, own_size)
    backward = resharding(result_shape, wanted, had, x.shape[wanted])
    return _begin(x, resharding(x.shape, had, wanted, length), backward)


def sendrecv(x: Tensor, other: Sequence[int], group: Group, name: str) -> Pending:
    """Send x to the other of two ranks, and receive its tensor of shape `other`."""
    if group.size == 1:
        return Pending(x)

    def swap(shape: torch.Size, other: torch.Size) -> _Collective:
        leaving_sizes, arriving_sizes = ([0, n] if group.rank == 0 else [n, 0] for n in (shape.numel(), other.numel()))
        return _Collective(
            "sendrecv",
            name,
            lambda x: _exchange(x.contiguous().view(-1), leaving_sizes, arriving_sizes, group),
            lambda buffer: buffer.view(other),
        )

    other_shape = torch.Size(other)
    return _begin(x, swap(x.shape, other_shape), swap(other_shape, x.shape))


@dataclass
class _InFlight:
    """A collective in flight, with the buffers that must stay alive until it is done."""

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
    """The forward and backward collectives of one call while in flight, shared by its two autograd nodes."""

    forward: _InFlight | None = None
    backward: _InFlight | None = None


def _begin(x: Tensor, there: _Collective, back: _Collective) -> Pending:
    """Start a collective. back: its transpose, which the gradient takes."""
    call = _Call()
    placeholder = _Start.apply(x, there, call)
    if placeholder.requires_grad:
        set_node_number(placeholder.grad_fn, _reserved.next())
    return Pending(None, lambda is_block_input: _Wait.apply(placeholder, back, call, is_block_input))


def _send(collective: _Collective, x: Tensor, backward: bool) -> _InFlight:
    buffer, sent, work, size = collective.start(x)
    in_flight = _InFlight(collective, buffer, sent, work, next(_numbers), backward)
    tell(Event("start", collective.name, collective.kind, size, in_flight.number, backward))
    return in_flight


# Sequence numbers that are reserved at once.
RESERVE = 4096


class _Reserved(threading.local):
    """Reserved sequence numbers of autograd nodes, in ascending order.

    Among the nodes whose gradient is known, autograd's engine runs the one with the highest sequence number, and each
    thread numbers its nodes in the order of their creation. The reserved numbers are lower than those of all later
    nodes. A wait with a reserved number therefore runs when no other node is ready, on every rank.
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
    """Start the collective of x and return a placeholder. The backward pass waits for the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: _Collective, call: _Call) -> Tensor:
        ctx.call = call
        call.forward = _send(collective, x, False)
        return _placeholder(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # Drop the reference: the graph may outlive this pass, but the buffers must not.
        in_flight, ctx.call.backward = ctx.call.backward, None
        return in_flight.wait(), None, None


class _Wait(Function):
    """Wait for the tensor that belongs to a placeholder. The backward pass starts the transpose for its gradient."""

    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, back: _Collective, call: _Call, is_block_input: bool) -> Tensor:
        ctx.back, ctx.call = back, call
        in_flight, call.forward = call.forward, None
        assert in_flight is not None
        if not is_block_input:
            # Saved only to trigger recomputation in `backward`. The input of a block is not part of its recomputation.
            ctx.save_for_backward(placeholder)
        return in_flight.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        # Reading the saved tensors makes torch recompute a checkpointed block now, before the gradient is sent. Ranks
        # with more rows or of another branch would otherwise recompute at different moments, and the collectives of
        # one rank's recomputation would be matched with those of another rank's backward pass.
        _ = ctx.saved_tensors
        ctx.call.backward = _send(ctx.back, grads[0], True)
        return _placeholder(grads[0]), None, None, None


def _placeholder(like: Tensor) -> Tensor:
    """Return a scalar that is never read. It is initialised, which launches a kernel, only if torch checks for NaN."""
    return like.new_zeros(()) if torch.is_anomaly_enabled() else like.new_empty(())


def tied(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors unchanged, and make autograd compute the gradients of all if it computes that of any.

    Use it for tensors that only some ranks use afterwards: every rank must take part in the collective of the gradient,
    if only with zeros.
    """
    return tuple(_Tie.apply(*tensors))


class _Tie(Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads
