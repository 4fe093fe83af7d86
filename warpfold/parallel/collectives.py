"""Moving slices between ranks: started when the tensor exists, awaited where it is used, forward and backward.

A tensor of which every rank holds a slice can be made whole (`gather`), or cut along another axis (`turn`); two
ranks can `swap` what they have.  Each gives a `Pending`, whose `wait` is the tensor.  Backward runs the exact transpose
of the move (a gather's is a reduce-scatter), begun when the gradient of the awaited tensor is known and awaited where
the gradient of the started one is, when autograd has nothing else that it could do.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from warpfold.ops.noise import Factors
from warpfold.parallel.mesh import Group
from warpfold.parallel.waits import Work

F = TypeVar("F", bound=Factors)


@dataclass(frozen=True)
class Event:
    """A collective began or was waited for: what a trace holds."""

    what: Literal["start", "wait"]
    number: int  # of the collective, in the order of starting; the same on every rank
    name: str  # which tensor of which layer
    kind: str  # "gather", "scatter" (its transpose), "turn", "swap"
    backward: bool
    bytes: int  # that this rank sends to others


_watchers: list[Callable[[Event], None]] = []
_numbers = count()


@contextmanager
def watched(watcher: Callable[[Event], None]) -> Iterator[None]:
    """Within it, `watcher` is told of every start and wait of this process."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def sizes_of(length: int, ranks: int) -> list[int]:
    """How many of `length` rows each rank holds: as even as can be, the first ranks one more; 0 where rows run out."""
    each, more = divmod(length, ranks)
    return [each + (rank < more) for rank in range(ranks)]


def start_of(length: int, group: Group) -> int:
    """Where this rank's slice of `length` rows begins."""
    return sum(sizes_of(length, group.size)[: group.rank])


def mine(x: F, axis: int, group: Group) -> F:
    """This rank's slice (a view) of a tensor that every rank has whole; or of dropout factors that are not drawn."""
    length = x.shape[axis]
    found: Any = x.narrow(axis, start_of(length, group), sizes_of(length, group.size)[group.rank])  # as x is
    return found


class Pending:
    """A tensor that is here, or on its way; `wait` is the tensor, however often it is asked for."""

    def __init__(self, tensor: Tensor | None, arrive: Callable[[bool], Tensor] | None = None) -> None:
        self._tensor, self._arrive = tensor, arrive
        self.travels = tensor is None  # whether it ever had to be waited for
        self.given = False  # whether a block, which may be recomputed, has it from outside

    def wait(self) -> Tensor:
        if self._tensor is None:
            assert self._arrive is not None
            self._tensor, self._arrive = self._arrive(self.given), None
        return self._tensor

    @property
    def arrived(self) -> bool:
        """Whether it is here, or was awaited already."""
        return self._tensor is not None


def gather(x: Tensor, axis: int, length: int, group: Group, name: str) -> Pending:
    """Slices along `axis`, of `length` rows in all -> the whole, on every rank."""
    return _begin(x, _Gather(group, name, x.shape, axis, length))


def turn(x: Tensor, had: int, wanted: int, length: int, group: Group, name: str) -> Pending:
    """A tensor cut along `had`, of `length` rows in all, and whole along `wanted` -> the other way round."""
    return _begin(x, _Turn(group, name, x.shape, had, wanted, length))


def swap(x: Tensor, other: Sequence[int], group: Group, name: str) -> Pending:
    """What the other of two ranks gives, a tensor of the shape `other`, for what this one gives."""
    return _begin(x, _Swap(group, name, x.shape, other))


@dataclass
class _Ticket:
    """One call of a move: what is under way there, and what is under way back."""

    there: "_Way | None" = None
    back: "_Way | None" = None


@dataclass
class _Way:
    """A collective under way, with all that must live until it is done."""

    move: "_Move"
    buffer: Tensor
    sent: Tensor
    work: dist.Work | None
    number: int
    backward: bool

    def arrive(self) -> Tensor:
        for watcher in _watchers:
            watcher(Event("wait", self.number, self.move.name, self.move.kind, self.backward, 0))
        Work(self.work, f"{self.move.kind} of {self.move.name}{' (backward)' if self.backward else ''}").wait()
        return self.move.finish(self.buffer)


class _Move(ABC):
    """A linear map between tensors that lie on several ranks, in two steps around a collective on flat buffers."""

    kind: str

    def __init__(self, group: Group, name: str) -> None:
        self.group, self.name = group, name

    @abstractmethod
    def start(self, x: Tensor) -> tuple[Tensor, Tensor, dist.Work | None, int]:
        """Pack and send: the buffer that fills, the one that is sent, the handle, the bytes that leave."""

    @abstractmethod
    def finish(self, buffer: Tensor) -> Tensor:
        """Unpack the filled buffer."""

    @abstractmethod
    def transpose(self) -> "_Move":
        """The move of the gradient."""


def _begin(x: Tensor, move: _Move) -> Pending:
    if move.group.size == 1:
        return Pending(x)
    ticket = _Ticket()
    token = _Start.apply(x, move, ticket)
    if token.requires_grad:
        token.grad_fn._set_sequence_nr(_reserved.next())
    return Pending(None, lambda given: _Wait.apply(token, move, ticket, given))


def _send(move: _Move, x: Tensor, backward: bool) -> _Way:
    buffer, sent, work, size = move.start(x)
    way = _Way(move, buffer, sent, work, next(_numbers), backward)
    for watcher in _watchers:
        watcher(Event("start", way.number, move.name, move.kind, backward, size))
    return way


RESERVE = 4096


class _Reserved(threading.local):
    """Numbers of nodes that nobody needs, ascending: lower than those of all nodes that the thread has made since.

    Of the nodes whose gradient is known, autograd's engine takes the one with the highest number; they count what a
    thread made.  A wait that has a reserved number comes when there is nothing else to do, on all ranks alike.
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
    """x -> a token, whose gradient says that the gradient of x is under way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, move: _Move, ticket: _Ticket) -> Tensor:
        ctx.ticket = ticket
        ticket.there = _send(move, x, False)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        way, ctx.ticket.back = ctx.ticket.back, None  # the graph may live on, its buffers must not
        return way.arrive(), None, None


class _Wait(Function):
    """The token -> the tensor."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, move: _Move, ticket: _Ticket, given: bool) -> Tensor:
        ctx.move, ctx.ticket = move, ticket
        way, ticket.there = ticket.there, None
        assert way is not None
        if not given:  # a recomputation saves it too
            ctx.save_for_backward(token)
        return way.arrive()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        # Before the gradient moves, the block is recomputed: ranks that have more slices to work on, or another branch,
        # would come to that sooner or later than others, and one's recomputation would meet another's gradient.
        _ = ctx.saved_tensors
        ctx.ticket.back = _send(ctx.move.transpose(), grads[0], True)
        return grads[0].new_zeros(()), None, None, None


def tied(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as they are; where the gradient of one is wanted, so is that of the others, zeros if need be.

    For what one rank goes on to use and another does not: both must take part in the move of its gradient.
    """
    return tuple(_Tie.apply(*tensors))


class _Tie(Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


# Their names from torch 2.13 on, and before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Gather(_Move):
    """Slices -> the whole.  The flat slices are padded to the largest, and only where they differ."""

    kind = "gather"

    def __init__(self, group: Group, name: str, shape: Sequence[int], axis: int, length: int) -> None:
        super().__init__(group, name)
        self.shapes = []  # of every rank's slice
        for size in sizes_of(length, group.size):
            self.shapes.append(list(shape))
            self.shapes[-1][axis] = size
        self.axis = axis
        self.width = max(_numel(s) for s in self.shapes)

    def start(self, x: Tensor) -> tuple[Tensor, Tensor, dist.Work | None, int]:
        sent = _padded(x.contiguous().view(-1), self.width)
        buffer = sent.new_empty(self.group.size * self.width)
        work = all_gather(buffer, sent, group=self.group.handle, async_op=True)
        return buffer, sent, work, (self.group.size - 1) * sent.nbytes

    def finish(self, buffer: Tensor) -> Tensor:
        rows = buffer.view(self.group.size, self.width)
        return torch.cat([row[: _numel(s)].view(s) for row, s in zip(rows, self.shapes)], self.axis)

    def transpose(self) -> "_Scatter":
        return _Scatter(self)


class _Scatter(_Move):
    """The transpose of a gather: every rank's whole tensor, summed, each rank its slice."""

    kind = "scatter"

    def __init__(self, gather: _Gather) -> None:
        super().__init__(gather.group, gather.name)
        self.gather = gather

    def start(self, x: Tensor) -> tuple[Tensor, Tensor, dist.Work | None, int]:
        g = self.gather
        parts = x.split([s[g.axis] for s in g.shapes], g.axis)
        sent = torch.cat([_padded(part.reshape(-1), g.width) for part in parts])
        buffer = sent.new_empty(g.width)
        work = reduce_scatter(buffer, sent, group=self.group.handle, async_op=True)
        return buffer, sent, work, (self.group.size - 1) * buffer.nbytes

    def finish(self, buffer: Tensor) -> Tensor:
        shape = self.gather.shapes[self.group.rank]
        return buffer[: _numel(shape)].view(shape)

    def transpose(self) -> _Gather:
        return self.gather


class _Turn(_Move):
    """Cut along `had` -> cut along `wanted`: every rank sends every other the part that both slices share."""

    kind = "turn"

    def __init__(self, group: Group, name: str, shape: Sequence[int], had: int, wanted: int, length: int) -> None:
        super().__init__(group, name)
        self.had, self.wanted, self.shape = had, wanted, list(shape)
        self.had_sizes, self.wanted_sizes = (sizes_of(n, group.size) for n in (length, shape[wanted]))
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

    def finish(self, buffer: Tensor) -> Tensor:
        """The parts as the ranks sent them, one after another along `had`."""
        shape = list(self.shape)
        shape[self.wanted] = self.wanted_sizes[self.group.rank]
        parts, start = [], 0
        for size in self.had_sizes:
            shape[self.had] = size
            parts.append(buffer[start : start + _numel(shape)].view(shape))
            start += _numel(shape)
        return torch.cat(parts, self.had)

    def transpose(self) -> "_Turn":
        shape = list(self.shape)
        shape[self.had], shape[self.wanted] = self.length, self.wanted_sizes[self.group.rank]
        return _Turn(self.group, self.name, shape, self.wanted, self.had, self.shape[self.wanted])


class _Swap(_Move):
    """Between two ranks: each gets what the other has."""

    kind = "swap"

    def __init__(self, group: Group, name: str, shape: Sequence[int], other: Sequence[int]) -> None:
        super().__init__(group, name)
        self.shape, self.other = list(shape), list(other)

    def start(self, x: Tensor) -> tuple[Tensor, Tensor, dist.Work | None, int]:
        sent = x.contiguous().view(-1)
        buffer = sent.new_empty(_numel(self.other))
        leave, come = ([0, n] if self.group.rank == 0 else [n, 0] for n in (len(sent), len(buffer)))
        work = dist.all_to_all_single(buffer, sent, come, leave, group=self.group.handle, async_op=True)
        return buffer, sent, work, sent.nbytes

    def finish(self, buffer: Tensor) -> Tensor:
        return buffer.view(self.other)

    def transpose(self) -> "_Swap":
        return _Swap(self.group, self.name, self.other, self.shape)


def _padded(flat: Tensor, width: int) -> Tensor:
    return flat if len(flat) == width else torch.cat([flat, flat.new_zeros(width - len(flat))])


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
