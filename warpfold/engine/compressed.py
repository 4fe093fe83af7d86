"""Compress what ranks send each other of flat gradient buffers (parallel/compress.py), and keep what is carried over.

With hierarchical sums only what goes from node to node is compressed: a rank adds up a part of the buffer for its node,
and that part's mean over the nodes is compressed.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from warpfold.engine.flat_buffer import FlatBuffer
from warpfold.errors import UserError
from warpfold.parallel.buckets import Segment
from warpfold.parallel.compress import CompressionConfig, Compressor, make_compressor
from warpfold.parallel.exchange import Plain, Wire, finish
from warpfold.parallel.waits import waiting


class BufferPart:
    """What of one buffer goes through a compressor: all of it, or the part that this rank adds up for its node."""

    def __init__(self, buffer: FlatBuffer, config: CompressionConfig, wire: Wire, within: Plain | None) -> None:
        """wire: of the ranks that compress together; within: of those of a node, which add up first."""
        self.gradient, self.within = buffer.gradient, within
        self.end = max(place.stop for place in buffer.places.values())  # what follows is there for this many ranks
        self.each, self.index = (1, 0) if within is None else (within.wire.group.size, within.index)
        size = len(buffer.gradient) // self.each
        begin, end = self.index * size, (self.index + 1) * size
        self.dtype = torch.promote_types(buffer.gradient.dtype, torch.float32)
        segments = []
        for name, place in buffer.places.items():
            start, stop = max(place.start, begin), min(place.stop, end)
            if start < stop:
                where = slice(start - begin, stop - begin)
                segments.append(Segment(name, where, start - place.start, buffer.parameters[name].shape))
        like = torch.empty(size, dtype=self.dtype, device=self.gradient.device)
        made = make_compressor(config, wire, like, segments)
        assert made is not None
        self.compressor: Compressor = made

    def mean(self) -> None:
        """Replace the gradient by its compressed mean.  Every rank must call it.

        A gradient that is not finite on some rank is sent whole, so that all see it, and what is carried over stays.
        """
        x = self.gradient.to(self.dtype)
        if self.within is not None:
            (x,) = finish([self.within.reduce_scatter(x)])
            x.div_(self.each)
        wire = self.compressor.wire
        finite = torch.linalg.vector_norm(x).isfinite().to(torch.int32).reshape(1)
        wire.all_reduce(finite).wait()
        mean = self.compressor.mean(x) if int(finite) == wire.group.size else wire.mean(x)
        if self.within is None:
            self.gradient.copy_(mean)
        else:
            finish([self.within.all_gather(mean.to(self.gradient.dtype), self.gradient)])


def carried_over(parts: Sequence[BufferPart], world: Wire) -> dict[str, Tensor]:
    """Return what a checkpoint holds, complete on rank 0: "NUMBER.KIND" [units, numbers] and "NUMBER.shared" of each
    buffer, "steps" [buffers].  A unit is what compresses together: a rank, or a node.  Every rank must call it.
    """
    found = {}
    for number, part in enumerate(parts):
        units = world.group.size // part.each
        for kind, local in part.compressor.local.items():
            rows = _rows(local, world)
            if rows:
                found[f"{number}.{kind}"] = torch.stack(rows).view(units, -1)[:, : part.end].clone()
        shared = part.compressor.shared  # of another length on each rank of a node
        longest = torch.tensor([len(shared)], device=shared.device)
        world.all_reduce(longest, dist.ReduceOp.MAX).wait()
        rows = _rows(F.pad(shared, (0, int(longest) - len(shared))), world)
        if rows:
            found[f"{number}.shared"] = torch.stack(rows[: part.each])
    if parts and world.group.rank == 0:
        found["steps"] = torch.tensor([part.compressor.steps for part in parts])
    return found


def take_over(parts: Sequence[BufferPart], state: Mapping[str, Tensor], rank: int) -> None:
    """Take over what `carried_over` returned; with another number of units each takes the mean of all.

    Errors: UserError where it is of another model.
    """
    for number, part in enumerate(parts):
        compressor, each = part.compressor, part.each
        if "steps" not in state or f"{number}.shared" not in state:
            continue
        compressor.steps = int(state["steps"][number])
        for kind, local in compressor.local.items():
            if (saved := state.get(f"{number}.{kind}")) is None:
                continue  # of another method
            if saved.shape[1] != part.end:
                raise UserError(
                    f"Replicas.load_state_dict: {number}.{kind} has {saved.shape[1]} numbers, and the model "
                    f"{part.end}; load what this model's Replicas saved"
                )
            own = saved[rank // each] if len(saved) == compressor.wire.group.size else saved.mean(0)
            whole = own.new_zeros(len(local) * each)
            whole[: part.end] = own
            local.copy_(whole[part.index * len(local) : (part.index + 1) * len(local)])
        shared = state[f"{number}.shared"]
        if len(shared) == each and shared.shape[1] >= len(compressor.shared):  # else start cold
            compressor.shared.copy_(shared[part.index, : len(compressor.shared)])


def _rows(x: Tensor, world: Wire) -> list[Tensor]:
    """Return every rank's x, in main memory, on rank 0; on the others nothing."""
    rows = []
    for rank in world.group.ranks:
        row = x.clone()
        with waiting("what compression carries over"):
            dist.broadcast(row, rank, group=world.group.handle)
        if world.group.rank == 0:
            rows.append(row.cpu())
    return rows
