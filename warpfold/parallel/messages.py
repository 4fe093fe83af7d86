"""Messages between processes: flat tensors, and what JSON can hold."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from warpfold.ops.torch_internals import all_gather_flat
from warpfold.parallel.mesh import Group, backends
from warpfold.parallel.waits import Work


@dataclass(frozen=True)
class PendingGather:
    """The flat tensors of all processes of a group, in flight."""

    found: Tensor  # [processes, length]; [0, length] where the first process alone gathers
    sent: Tensor
    work: Work

    def wait(self) -> Tensor:
        """Return the tensors [processes, length], in the order of ranks; none on a process that does not gather."""
        self.work.wait()
        return self.found


def begin_gather(x: Tensor, group: Group, what: str, to_all: bool = True) -> PendingGather:
    """Begin to gather a flat tensor, of the same length on every process of the group.

    to_all: or the first alone gathers, and the others send one message each, however many they are.
    """
    x = x.contiguous()
    if group.size == 1:
        return PendingGather(x[None], x, Work(None, what))
    if not to_all:
        rows = x.new_empty(group.size if group.rank == 0 else 0, len(x))
        into = list(rows) if group.rank == 0 else None
        return PendingGather(rows, x, Work(dist.gather(x, into, group.ranks[0], group.handle, async_op=True), what))
    found = x.new_empty(group.size * len(x))
    work = Work(all_gather_flat(found, x, group=group.handle, async_op=True), what)
    return PendingGather(found.view(group.size, -1), x, work)


def to_bytes(value: Any) -> Tensor:
    """Return a value, JSON-able, as a flat tensor of bytes."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def digest(value: Any) -> int:
    """Return 62 bits that are almost surely others for another value, JSON-able."""
    return int.from_bytes(hashlib.blake2b(json.dumps(value).encode(), digest_size=8).digest()) >> 2


def pieces(flat: Iterable[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Yield pieces of at most `size` bytes, each a list of parts of the flat tensors of bytes."""
    piece: list[Tensor] = []
    room = size
    for x in flat:
        while len(x):
            part, x = x[:room], x[room:]
            piece.append(part)
            room -= len(part)
            if not room:
                yield piece
                piece, room = [], size
    if piece:
        yield piece


def begin_largest(x: Tensor, group: Group, what: str) -> PendingGather:
    """Begin to find the largest of all processes' x, number by number; [1, length] on each."""
    x = x.clone()
    work = None if group.size == 1 else dist.all_reduce(x, dist.ReduceOp.MAX, group=group.handle, async_op=True)
    return PendingGather(x[None], x, Work(work, what))


def _device(group: Group) -> torch.device:
    """Return where messages lie: in host memory, if the group's backend takes them from there."""
    host = torch.device("cpu")
    alone = group.handle is not None and host.type not in backends(group.handle)  # a user's own NCCL
    return torch.device("cuda", torch.cuda.current_device()) if alone else host


def all_gather_object(value: Any, group: Group, what: str, to_all: bool = True) -> list[Any]:
    """Return the values, JSON-able, of all processes of a group, in the order of ranks.

    to_all: or on the first alone, and nothing on the others.
    """
    if group.size == 1:
        return [value]
    device = _device(group)
    text = to_bytes(value).to(device)
    sizes = begin_gather(torch.tensor([len(text)], device=device), group, what).wait().flatten().tolist()
    padded = torch.nn.functional.pad(text, (0, max(sizes) - len(text)))
    rows = begin_gather(padded, group, what, to_all).wait().cpu()
    return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes)]
