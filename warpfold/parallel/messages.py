"""Messages between processes: flat tensors and JSON values."""

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
    """A gather of flat tensors in flight.

    received: [processes, length], or [0, length] on a process that does not receive. sent: kept alive until the end.
    """

    received: Tensor
    sent: Tensor
    work: Work

    def wait(self) -> Tensor:
        """Return the tensors [processes, length] in the order of ranks; no rows on a process that does not receive."""
        self.work.wait()
        return self.received


def begin_gather(x: Tensor, group: Group, what: str, to_all: bool = True) -> PendingGather:
    """Start to gather a flat tensor of the same length from every process of the group.

    to_all: on every process. Otherwise only the first process receives, and each of the others sends one message.
    """
    x = x.contiguous()
    if group.size == 1:
        return PendingGather(x[None], x, Work(None, what))
    if not to_all:
        rows = x.new_empty(group.size if group.rank == 0 else 0, len(x))
        row_list = list(rows) if group.rank == 0 else None
        return PendingGather(rows, x, Work(dist.gather(x, row_list, group.ranks[0], group.handle, async_op=True), what))
    received = x.new_empty(group.size * len(x))
    work = Work(all_gather_flat(received, x, group=group.handle, async_op=True), what)
    return PendingGather(received.view(group.size, -1), x, work)


def to_bytes(value: Any) -> Tensor:
    """Encode a JSON value as a flat tensor of bytes."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def digest(value: Any) -> int:
    """Compute a 62-bit hash of a JSON value."""
    return int.from_bytes(hashlib.blake2b(json.dumps(value).encode(), digest_size=8).digest()) >> 2


def pieces(flat: Iterable[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Split flat tensors of bytes into pieces of at most `size` bytes. A piece is a list of views."""
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


def all_gather_object(value: Any, group: Group, what: str, to_all: bool = True) -> list[Any]:
    """Gather a JSON value from all processes of a group, in the order of ranks.

    to_all: on every process. Otherwise the first process gets the values, and the others get an empty list.
    """
    if group.size == 1:
        return [value]
    # A process group that a user has initialised may support NCCL only.
    only_nccl = group.handle is not None and "cpu" not in backends(group.handle)
    device = torch.device("cuda", torch.cuda.current_device()) if only_nccl else torch.device("cpu")
    text = to_bytes(value).to(device)
    # The lengths come first, because a gather needs equal sizes.
    sizes = begin_gather(torch.tensor([len(text)], device=device), group, what).wait().flatten().tolist()
    padded = torch.nn.functional.pad(text, (0, max(sizes) - len(text)))
    rows = begin_gather(padded, group, what, to_all).wait().cpu()
    return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes)]
