"""PowerSGD (Vogels et al. 2019, algorithms 1, 2): of each matrix's mean gradient its projection on a few directions.

One step of power iteration finds the directions, beginning with the last step's (warm start).  What the projection
leaves out, each rank carries over (error feedback).
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from warpfold.parallel.buckets import Segment
from warpfold.parallel.compress import CompressionConfig, Compressor, Quantised, TopK
from warpfold.parallel.exchange import Wire


@dataclass(frozen=True)
class Block:
    """Whole rows of a parameter's matrix [first dimension, all others] within a shard."""

    name: str
    where: slice
    rows: int
    columns: int


def matrix_blocks(segments: Sequence[Segment], rank: int) -> list[Block]:
    """The parts of a shard that low rank makes smaller; what is no such part is sent as it is."""
    blocks = []
    for segment in segments:
        columns = segment.shape[1:].numel() if len(segment.shape) > 1 else 0
        if not columns:
            continue
        start = segment.where.start + -segment.first % columns  # the first whole row
        rows = (segment.where.stop - start) // columns
        if rows > 0 and rank * (rows + columns) < rows * columns:
            blocks.append(Block(segment.name, slice(start, start + rows * columns), rows, columns))
    return blocks


class PowerSGD(Compressor):
    """Blocks of one shape are worked on together."""

    def __init__(self, config: CompressionConfig, wire: Wire, like: Tensor, segments: Sequence[Segment]) -> None:
        super().__init__(config, wire, like, "residual")
        self.size = len(like)
        self.groups: dict[tuple[int, int], list[Block]] = {}
        for block in matrix_blocks(segments, config.rank):
            self.groups.setdefault((block.rows, block.columns), []).append(block)
        draws = [self._draw(block) for blocks in self.groups.values() for block in blocks]
        self.first = torch.cat(draws).to(like) if draws else like.new_empty(0)
        self.shared = self.first.clone()  # Q of every block: what P is computed with in the next step
        self.rest = self._between()

    def _draw(self, block: Block) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(block.name.encode()))
        return torch.randn(block.columns * self.config.rank, generator=generator, dtype=torch.float64)

    def _between(self) -> list[slice]:
        """What of the shard lies in no block."""
        ends = sorted((b.where.start, b.where.stop) for blocks in self.groups.values() for b in blocks)
        starts = [0, *(stop for _, stop in ends)]
        return [slice(a, b) for a, b in zip(starts, [*(start for start, _ in ends), self.size]) if a < b]

    def compressed(self, x: Tensor) -> Tensor:
        """P Q^T of the mean gradient's matrices, and the rest as it is."""
        if not self.groups:
            return self.wire.mean(x)
        wanted = x + self.local["residual"]
        matrices = [torch.stack([wanted[b.where].view(shape) for b in bs]) for shape, bs in self.groups.items()]

        sent = [m @ q for m, q in zip(matrices, self._matrices(self.shared))]
        rest = torch.cat([wanted[:0], *(wanted[place] for place in self.rest)])
        arrived = self.wire.mean(torch.cat([rest, *map(torch.flatten, sent)]))
        rest, *flat = arrived.split([len(rest), *map(torch.numel, sent)])
        ps = [orthonormal(part.view_as(p)) for part, p in zip(flat, sent)]

        flat_q = self.wire.mean(torch.cat([(m.mT @ p).flatten() for m, p in zip(matrices, ps)]))
        qs = self._matrices(flat_q)
        applied = [p @ q.mT for p, q in zip(ps, qs)]
        # A direction that is missing now begins anew with the first draw, or it would be missing for ever.
        drawn = self._matrices(self.first)
        kept = [torch.where(p.any(1, keepdim=True), q, first) for p, q, first in zip(ps, qs, drawn)]
        self.shared.copy_(torch.cat([k.flatten() for k in kept]))

        left = self._joined([m - a for m, a in zip(matrices, applied)], torch.zeros_like(rest))
        self.local["residual"].copy_(left)
        return self._joined(applied, rest)

    def _matrices(self, flat: Tensor) -> list[Tensor]:
        """Flat Q of all blocks -> [blocks, columns, rank] of each shape."""
        rank = self.config.rank
        sizes = [len(blocks) * columns * rank for (_, columns), blocks in self.groups.items()]
        return [part.view(-1, shape[1], rank) for part, shape in zip(flat.split(sizes), self.groups)]

    def _joined(self, matrices: Sequence[Tensor], rest: Tensor) -> Tensor:
        """A shard from its blocks and what lies between."""
        parts = dict(zip((s.start for s in self.rest), rest.split([s.stop - s.start for s in self.rest])))
        for stack, blocks in zip(matrices, self.groups.values()):
            parts.update({b.where.start: matrix.reshape(-1) for b, matrix in zip(blocks, stack)})
        return torch.cat([parts[start] for start in sorted(parts)])


def make_compressor(
    config: CompressionConfig, wire: Wire, like: Tensor, segments: Sequence[Segment]
) -> Compressor | None:
    """The compressor of the settings for a shard; None where none is wanted or there is one data rank."""
    if config.method == "none" or wire.group.size == 1:
        return None
    kinds: dict[str, type[PowerSGD | TopK | Quantised]] = {"powersgd": PowerSGD, "topk": TopK}
    return kinds.get(config.method, Quantised)(config, wire, like, segments)


def orthonormal(x: Tensor) -> Tensor:
    """Columns of [..., rows, rank] made orthonormal from first to last, each twice (Gram-Schmidt, in fixed order).

    A column that lies in the span of those before it, but for rounding, becomes zero.
    """
    columns: list[Tensor] = []
    least = torch.finfo(x.dtype).eps ** 0.5
    for column in x.unbind(-1):
        norm = torch.linalg.vector_norm(column, dim=-1, keepdim=True)
        left = column
        for _ in range(2):
            for before in columns:
                left = left - (before * left).sum(-1, keepdim=True) * before
        rest = torch.linalg.vector_norm(left, dim=-1, keepdim=True)
        columns.append(torch.where(rest > least * norm, left / rest, torch.zeros_like(left)))
    return torch.stack(columns, -1)
