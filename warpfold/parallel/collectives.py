"""Differentiable, asynchronous collectives: started when the tensor exists, awaited where it is used.

`all_gather` makes a sharded tensor whole on every rank, `all_to_all` shards it along another axis, and `sendrecv`
exchanges tensors between two ranks.  Each returns a `Pending`; its `wait` returns the tensor.  The backward pass runs
the exact transpose (that of an all-gather is a reduce-scatter): it starts when the gradient of the awaited tensor is
known, and is awaited as late as possible, when autograd has nothing else to do.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from warpfold.ops.noise import Factors
from warpfold.parallel.mesh import Group
from warpfold.parallel.waits import Event, Work, tell

F = TypeVar("F", bound=Factors)


_numbers = count()


def shard_sizes(length: int, ranks: int) -> list[int]:
    """Return how many of `length` rows each rank holds: the first ranks hold one more where it does not divide."""
    each, more = divmod(length, ranks)
    return [each + (rank < more) for rank in range(ranks)]


def shard_offset(length: int, group: Group) -> int:
    """Return the first of `length` rows that this rank holds."""
    return sum(shard_sizes(length, group.size)[: group.rank])


def local_shard(x: F, axis: int, group: Group) -> F:
    """Return this rank's shard, a view, of a tensor that every rank has whole, or of dropout factors not yet drawn."""
    length = x.shape[axis]
    shard: Any = x.narrow(axis, shard_offset(length, group), shard_sizes(length, group.size)[group.rank])  # type of x
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


def all_gather(x: Tensor, axis: int, length: int, group: Group, name: str) -> Pending:
    """Make x, sharded along `axis` with `length` rows in all, whole on every rank."""
    return _begin(x, _AllGather(group, name, x.shape, axis, length))


def all_to_all(x: Tensor, had: int, wanted: int, length: int, group: Group, name: str) -> Pending:
    """Shard x along `wanted`, where it is whole, instead of along `had`, where it has `length` rows in all."""
    return _begin(x, _AllToAll(group, name, x.shape, had, wanted, length))


def sendrecv(x: Tensor, other: Sequence[int], group: Group, name: str) -> Pending:
    """Send x to the other of two ranks, and receive the tensor of shape `other` that it sends."""
    return _begin(x, _SendRecv(group, name, x.shape, other))


@dataclass
class _InFlight:
    """A collective that was started, with all that must stay alive until it is done."""

    collective: "_Collective"
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


class _Collective(ABC):
    """A linear map between tensors that lie on several ranks: pack, communicate flat buffers, unpack."""

    kind: str

    def __init__(self, group: Group, name: str) -> None:
        self.group, self.name = group, name

    @abstractmethod
    def start(self, x: Tensor) -> tuple[Tensor, Tensor, dist.Work | None, int]:
        """Pack and send x; return the buffer that will be filled, the one that is sent, the handle, the bytes sent."""

    @abstractmethod
    def unpack(self, buffer: Tensor) -> Tensor:
        """Return the result from the filled buffer."""

    @abstractmethod
    def transpose(self) -> "_Collective":
        """Return the collective that the gradient takes."""


def _begin(x: Tensor, collective: _Collective) -> Pending:
    if collective.group.size == 1:
        return Pending(x)
    call = _Call()
    placeholder = _Start.apply(x, collective, call)
    if placeholder.requires_grad:
        placeholder.grad_fn._set_sequence_nr(_reserved.next())
    return Pending(None, lambda given: _Wait.apply(placeholder, collective, call, given))


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
            self._numbers = iter([node._sequence_nr() for node in nodes if node is not None])
            number = next(self._numbers)
        return number


_reserved = _Reserved()


class _Start(Function):
    """x -> a placeholder, a zero, whose gradient arrives when the gradient of x is in flight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: _Collective, call: _Call) -> Tensor:
        ctx.call = call
        call.forward = _send(collective, x, False)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        in_flight, ctx.call.backward = ctx.call.backward, None  # the graph may live on, its buffers must not
        return in_flight.wait(), None, None


class _Wait(Function):
    """The placeholder -> the tensor."""

    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, collective: _Collective, call: _Call, given: bool) -> Tensor:
        ctx.collective, ctx.call = collective, call
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
        ctx.call.backward = _send(ctx.collective.transpose(), grads[0], True)
        return grads[0].new_zeros(()), None, None, None


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


# On flat buffers, without gradients: torch's names from 2.13 on, and before.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _AllGather(_Collective):
    """Shards -> the whole.  Shards are padded to the size of the largest, and only where sizes differ."""

    kind = "all_gather"

    def __init__(self, group: Group, name: str, shape: Sequence[int], axis: int, length: int) -> None:
        super().__init__(group, name)
        self.shapes = []  # of every rank's shard
        for size in shard_sizes(length, group.size):
            self.shapes.append(list(shape))
            self.shapes[-1][axis] = size
        self.axis = axis
        self.width = max(_numel(s) for s in self.shapes)

    def start(self, x: Tensor) -> tuple[Tensor, Tensor, dist.Work | None, int]:
        sent = _padded(x.contiguous().view(-1), self.width)
        buffer = sent.new_empty(self.group.size * self.width)
        work = all_gather_flat(buffer, sent, group=self.group.handle, async_op=True)
        return buffer, sent, work, (self.group.size - 1) * sent.nbytes

    def unpack(self, buffer: Tensor) -> Tensor:
        rows = buffer.view(self.group.size, self.width)
        return torch.cat([row[: _numel(s)].view(s) for row, s in zip(rows, self.shapes)], self.axis)

    def transpose(self) -> "_ReduceScatter":
        return _ReduceScatter(self)


class _ReduceScatter(_Collective):
    """The transpose of an all-gather: add up the whole tensors of all ranks, and give each rank its shard."""

    kind = "reduce_scatter"

    def __init__(self, gather: _AllGather) -> None:
        super().__init__(gather.group, gather.name)
        self.gather = gather

    def start(self, x: Tensor) -> tuple[Tensor, Tensor, dist.Work | None, int]:
        g = self.gather
        parts = x.split([s[g.axis] for s in g.shapes], g.axis)
        sent = torch.cat([_padded(part.reshape(-1), g.width) for part in parts])
        buffer = sent.new_empty(g.width)
        work = reduce_scatter_flat(buffer, sent, group=self.group.handle, async_op=True)
        return buffer, sent, work, (self.group.size - 1) * buffer.nbytes

    def unpack(self, buffer: Tensor) -> Tensor:
        shape = self.gather.shapes[self.group.rank]
        return buffer[: _numel(shape)].view(shape)

    def transpose(self) -> _AllGather:
        return self.gather


class _AllToAll(_Collective):
    """Sharded along `had` -> along `wanted`: every rank sends to every other the part that both shards share."""

    kind = "all_to_all"

    def __init__(self, group: Group, name: str, shape: Sequence[int], had: int, wanted: int, length: int) -> None:
        super().__init__(group, name)
        self.had, self.wanted, self.shape = had, wanted, list(shape)
        self.had_sizes, self.wanted_sizes = (shard_sizes(n, group.size) for n in (length, shape[wanted]))
        self.length = length
        self.rest = _numel([n for axis, n in enumerate(shape) if axis - len(shape) not in (had, wanted)])

    def start(self, x: Tensor) -> tuple[Tensor, Tensor, dist.Work | None, int]:
        rank = self.group.rank
        sent = torch.cat([part.reshape(-1) for part in x.split(self.wanted_sizes, self.wanted)])
        leave = [self.had_sizes[rank] * n * self.rest for n in self.wanted_sizes]
        come = [n * self.wanted_sizes[rank] * self.rest for n in self.had_sizes]
        buffer = sent.new_empty(sum(come))
        work = dist.all_to_all_single(buffer, sent, come, leave, group=self.group.handle, async_op=True)
        return buffer, sent, work, (sum(leave) - leave[rank]) * sent.element_size()

    def unpack(self, buffer: Tensor) -> Tensor:
        """Join the parts, which lie in the order of the ranks, along `had`."""
        shape = list(self.shape)
        shape[self.wanted] = self.wanted_sizes[self.group.rank]
        parts, start = [], 0
        for size in self.had_sizes:
            shape[self.had] = size
            parts.append(buffer[start : start + _numel(shape)].view(shape))
            start += _numel(shape)
        return torch.cat(parts, self.had)

    def transpose(self) -> "_AllToAll":
        shape = list(self.shape)
        shape[self.had], shape[self.wanted] = self.length, self.wanted_sizes[self.group.rank]
        return _AllToAll(self.group, self.name, shape, self.wanted, self.had, self.shape[self.wanted])


class _SendRecv(_Collective):
    """Between two ranks: each gets what the other has."""

    kind = "sendrecv"

    def __init__(self, group: Group, name: str, shape: Sequence[int], other: Sequence[int]) -> None:
        super().__init__(group, name)
        self.shape, self.other = list(shape), list(other)

    def start(self, x: Tensor) -> tuple[Tensor, Tensor, dist.Work | None, int]:
        sent = x.contiguous().view(-1)
        buffer = sent.new_empty(_numel(self.other))
        leave, come = ([0, n] if self.group.rank == 0 else [n, 0] for n in (len(sent), len(buffer)))
        work = dist.all_to_all_single(buffer, sent, come, leave, group=self.group.handle, async_op=True)
        return buffer, sent, work, sent.nbytes

    def unpack(self, buffer: Tensor) -> Tensor:
        return buffer.view(self.other)

    def transpose(self) -> "_SendRecv":
        return _SendRecv(self.group, self.name, self.other, self.shape)


def _padded(flat: Tensor, width: int) -> Tensor:
    return flat if len(flat) == width else torch.cat([flat, flat.new_zeros(width - len(flat))])


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
