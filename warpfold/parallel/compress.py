"""Gradient compression between data ranks with error feedback: the error of one step is added to later steps.

Compression changes the results, so it is a setting (`[optim.compression]`) and not part of the plan. Every method acts
once per step, on this rank's shard of the sum of its clipped examples. All methods except DGC with momentum obey one
law: the sum of the applied updates plus the mean of the ranks' carried errors equals the sum of all mean gradients.
"""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.parallel.exchange import Segment, Wire

Method = Literal["none", "powersgd", "topk", "int8", "1bit"]
# Elements that share a scale.
BLOCK = 256
# Blocks that a CPU encodes at a time, so that they stay in its cache.
CHUNK = 512


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """[optim.compression]: gradient compression, for ranks on links so slow that it outweighs additional steps.

    method: "powersgd" (low rank; Vogels et al. 2019), "topk" (Deep Gradient Compression; Lin et al. 2018), "int8" or
    "1bit" (quantised; Seide et al. 2014, Tang et al. 2021).
    start: number of first steps that send uncompressed gradients.
    rank: rank of PowerSGD's matrices.
    ratio, warmup: fraction of elements that topk sends, reached exponentially in `warmup` steps.
    momentum: momentum of topk's momentum correction. Lower the optimiser's beta1 accordingly.
    """

    method: Method = "none"
    start: int = 1_000
    rank: int = 4
    ratio: float = 0.001
    warmup: int = 1_000
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if min(self.start, self.warmup) < 0 or self.rank < 1:
            raise ValueError("compression: start and warmup must not be negative, rank at least 1")
        if not 0 < self.ratio <= 1 or not 0 <= self.momentum < 1:
            raise ValueError("compression: ratio must be above 0 and at most 1, momentum from 0 to below 1")


class Compressor(ABC):
    """Compute the mean of a shard over the data ranks.

    local: flat tensors of the shard's length, different on every data rank. shared: a tensor that is equal on all.
    A checkpoint contains both and `steps`.
    """

    def __init__(self, config: CompressionConfig, wire: Wire, like: Tensor, *kinds: str) -> None:
        """like: a shard whose length is divisible by the number of ranks."""
        self.config, self.wire, self.steps = config, wire, 0
        self.local = {kind: torch.zeros_like(like) for kind in kinds}
        self.shared: Tensor = like.new_empty(0)

    def mean(self, x: Tensor, used: Tensor | None = None) -> Tensor:
        """Compute the mean over the data ranks, bitwise equal on all of them. Every rank must call it.

        used: bool scalar, whether the update will be applied. If not, the carried errors stay unchanged. It may be on
        the device, so the host does not read it and counts the step in either case.
        """
        carried = [] if used is None or self.steps < self.config.start else [*self.local.values(), self.shared]
        before = [x.clone() for x in carried]
        mean = self.wire.mean(x) if self.steps < self.config.start else self.compressed(x)
        for now, old in zip(carried, before):
            # `carried` is empty without `used`.
            assert used is not None
            torch.where(used, now, old, out=now)
        self.steps += 1
        return mean

    @abstractmethod
    def compressed(self, x: Tensor) -> Tensor:
        """Compute the update that replaces the mean of x after the first `start` steps."""


class Quantised(Compressor):
    """Send few bits per element and a scale per block: to the owner of each piece, and its mean back to all ranks.

    A rank uses its own piece without rounding. The owner carries the rounding error of the mean, multiplied by the
    number of ranks.
    """

    def __init__(self, config: CompressionConfig, wire: Wire, like: Tensor, segments: Sequence[Segment]) -> None:
        super().__init__(config, wire, like, "residual")
        self.bits = 8 if config.method == "int8" else 1
        self.padding = gaps([s.where for s in segments], len(like))

    def compressed(self, x: Tensor) -> Tensor:
        """Send the codes to the owner of each piece, and the code of the mean to all ranks."""
        size, rank = self.wire.group.size, self.wire.group.rank
        residual = self.local["residual"].view(size, -1)
        to_send = residual.add_(x.view(size, -1))
        length = to_send.shape[1]

        codes = encode(to_send, self.bits)
        received = torch.empty_like(codes)
        self.wire.all_to_all(received.view(-1), codes.view(-1)).wait()
        arrived = decode(received, self.bits, length, x.dtype)
        arrived[rank] = to_send[rank]
        mean = arrived.mean(0)

        code = encode(mean[None], self.bits)
        self.wire.all_gather(received.view(-1), code.view(-1)).wait()
        residual.sub_(decode(codes, self.bits, length, x.dtype))
        residual[rank] = size * (mean - decode(code, self.bits, length, x.dtype)[0])
        applied = decode(received, self.bits, length, x.dtype).flatten()
        # Padding must stay 0, but 1-bit codes give it a sign.
        for padding in self.padding:
            residual.view(-1)[padding] = 0
            applied[padding] = 0
        return applied


def gaps(covered: Sequence[slice], size: int) -> list[slice]:
    """Return the ranges of `size` elements that the covered slices leave out."""
    ends = sorted((part.start, part.stop) for part in covered)
    starts = [0, *(stop for _, stop in ends)]
    return [slice(a, b) for a, b in zip(starts, [*(start for start, _ in ends), size]) if a < b]


def encode(x: Tensor, bits: int) -> Tensor:
    """Encode rows [n, length] as uint8 [n, bytes]: the codes, then a scale in x's dtype for every `BLOCK` elements.

    8 bits: round(x / scale), scale = max |x| / 127.  1 bit: the sign, scale = mean |x|.
    """
    length = x.shape[1]
    blocks = -(-length // BLOCK)
    code = torch.empty(len(x), blocks * (BLOCK * bits // 8 + x.itemsize), dtype=torch.uint8, device=x.device)
    codes, scales = code.split([blocks * BLOCK * bits // 8, blocks * x.itemsize], 1)
    for rows, chunk in _cache_chunks(len(x), blocks, x.device):
        part = x[rows, chunk.start * BLOCK : chunk.stop * BLOCK]
        missing = -part.shape[1] % BLOCK
        padded = (F.pad(part, (0, missing)) if missing else part).unflatten(1, (-1, BLOCK))
        if bits == 8:
            scale = padded.abs().amax(-1).div_(127)
            rounded = torch.div(padded, scale.clamp(min=torch.finfo(x.dtype).tiny)[..., None]).round_()
            chunk_codes = rounded.to(torch.int8).view(torch.uint8)
        else:
            filled = torch.full((padded.shape[1],), BLOCK, device=x.device)
            filled[-1:] -= missing
            scale = padded.abs().sum(-1) / filled
            bit_values = 2 ** torch.arange(8, dtype=torch.uint8, device=x.device)
            chunk_codes = ((padded >= 0).unflatten(-1, (-1, 8)) * bit_values).sum(-1, dtype=torch.uint8)
        codes[rows, chunk.start * BLOCK * bits // 8 : chunk.stop * BLOCK * bits // 8] = chunk_codes.flatten(1)
        scales[rows, chunk.start * x.itemsize : chunk.stop * x.itemsize] = scale.view(torch.uint8)
    return code


def _cache_chunks(rows: int, blocks: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Yield chunks of rows and blocks: on a CPU as large as its cache holds, on other devices everything at once."""
    if device.type != "cpu":
        yield slice(0, rows), slice(0, blocks)
        return
    for row in range(rows):
        for first in range(0, blocks, CHUNK):
            yield slice(row, row + 1), slice(first, min(first + CHUNK, blocks))


def decode(code: Tensor, bits: int, length: int, dtype: torch.dtype) -> Tensor:
    """Decode the result of `encode` to [n, length] of `dtype`, up to rounding."""
    blocks = -(-length // BLOCK)
    codes, scales = code.split([blocks * BLOCK * bits // 8, blocks * dtype.itemsize], 1)
    numbers = torch.empty(len(code), blocks, BLOCK, dtype=dtype, device=code.device)
    for rows, chunk in _cache_chunks(len(code), blocks, code.device):
        part = codes[rows, chunk.start * BLOCK * bits // 8 : chunk.stop * BLOCK * bits // 8]
        out, scale = numbers[rows, chunk], scales[rows].view(dtype)[:, chunk, None]
        if bits == 8:
            torch.mul(part.view(torch.int8).unflatten(1, (-1, BLOCK)), scale, out=out)
        else:
            shifts = torch.arange(8, dtype=torch.uint8, device=code.device)
            signs = (part[..., None] >> shifts & 1).view(*out.shape).bool()
            torch.where(signs, scale, -scale, out=out)
    return numbers.flatten(1)[:, :length]


class TopK(Compressor):
    """Deep Gradient Compression (Lin et al. 2018): send the largest elements of each parameter; the rest accumulates.

    Implements momentum correction (section 3.1), momentum factor masking (3.2) and warm-up of the sparsity (3.3). The
    per-example clipping serves as local clipping (3.1). With momentum 0 it is plain error feedback.
    """

    def __init__(self, config: CompressionConfig, wire: Wire, like: Tensor, segments: Sequence[Segment]) -> None:
        super().__init__(config, wire, like, "momentum", "residual")
        # Length of a parameter -> the offsets of all parameters of that length.
        self.groups: dict[int, Tensor] = {}
        for length in sorted({s.where.stop - s.where.start for s in segments}):
            starts = [s.where.start for s in segments if s.where.stop - s.where.start == length]
            self.groups[length] = torch.tensor(starts, device=like.device)

    def density(self) -> float:
        """Compute the fraction of elements to send, which falls exponentially to `ratio` (paper: 25 %, 6 % ...)."""
        warm = (self.steps - self.config.start + 1) / max(1, self.config.warmup)
        return self.config.ratio ** min(1.0, warm)

    def compressed(self, x: Tensor) -> Tensor:
        """Sum the largest elements of every rank; each rank clears those that it has sent."""
        momentum, residual = self.local["momentum"], self.local["residual"]
        momentum.mul_(self.config.momentum).add_(x)
        residual.add_(momentum)

        selected = self.choose(residual).to(torch.int32)
        values = residual[selected]
        momentum[selected] = 0
        residual[selected] = 0

        size = self.wire.group.size
        indices, numbers = selected.new_empty(size * len(selected)), values.new_empty(size * len(values))
        works = self.wire.all_gather(indices, selected), self.wire.all_gather(numbers, values)
        for work in works:
            work.wait()
        mean = torch.zeros_like(x)
        # The indices of one rank are distinct, so every rank adds in the order of ranks and gets the same bits.
        for rank_indices, values in zip(indices.view(size, -1), numbers.view(size, -1)):
            mean[rank_indices] += values
        return mean.div_(size)

    def choose(self, x: Tensor) -> Tensor:
        """Find the indices of the largest elements of each parameter, at least one each; equally many on every rank."""
        density = self.density()
        # A shard may consist of padding alone.
        selections = [x.new_empty(0, dtype=torch.int64)]
        for length, starts in self.groups.items():
            positions = starts[:, None] + torch.arange(length, device=x.device)
            count = min(length, max(1, round(density * length)))
            selections.append(positions.gather(1, x[positions].abs().topk(count, sorted=False).indices).flatten())
        return torch.cat(selections)


@dataclass(frozen=True)
class MatrixRows:
    """Complete rows within a shard of a parameter that is viewed as a matrix [first dimension, all others]."""

    name: str
    where: slice
    rows: int
    columns: int


def matrix_blocks(segments: Sequence[Segment], rank: int) -> list[MatrixRows]:
    """Return the blocks of a shard whose low-rank form is smaller; everything else is sent uncompressed."""
    blocks = []
    for segment in segments:
        columns = segment.shape[1:].numel() if len(segment.shape) > 1 else 0
        if not columns:
            continue
        # The first complete row.
        start = segment.where.start + -segment.first % columns
        rows = (segment.where.stop - start) // columns
        if rows > 0 and rank * (rows + columns) < rows * columns:
            blocks.append(MatrixRows(segment.name, slice(start, start + rows * columns), rows, columns))
    return blocks


class PowerSGD(Compressor):
    """PowerSGD (Vogels et al. 2019, algorithms 1, 2): project the matrices of the mean gradient on a few directions.

    Each step performs one power iteration that starts from the directions of the last step (warm start). Each rank
    carries the error of the projection (error feedback). Blocks of equal shape are computed together.
    """

    def __init__(self, config: CompressionConfig, wire: Wire, like: Tensor, segments: Sequence[Segment]) -> None:
        super().__init__(config, wire, like, "residual")
        self.groups: dict[tuple[int, int], list[MatrixRows]] = {}
        for block in matrix_blocks(segments, config.rank):
            self.groups.setdefault((block.rows, block.columns), []).append(block)
        draws = []
        for block in (block for blocks in self.groups.values() for block in blocks):
            generator = torch.Generator().manual_seed(zlib.crc32(block.name.encode()))
            draws.append(torch.randn(block.columns * config.rank, generator=generator, dtype=torch.float64))
        self.first = torch.cat(draws).to(like) if draws else like.new_empty(0)
        # Q of every block, from which the next step computes P.
        self.shared = self.first.clone()
        self.uncompressed = gaps([b.where for blocks in self.groups.values() for b in blocks], len(like))

    def compressed(self, x: Tensor) -> Tensor:
        """Compute P Q^T for the matrices of the mean gradient, and the plain mean of everything else."""
        if not self.groups:
            return self.wire.mean(x)
        to_send = x + self.local["residual"]
        matrices = [torch.stack([to_send[b.where].view(shape) for b in bs]) for shape, bs in self.groups.items()]

        sent = [m @ q for m, q in zip(matrices, self._matrices(self.shared))]
        uncompressed = torch.cat([to_send[:0], *(to_send[part] for part in self.uncompressed)])
        arrived = self.wire.mean(torch.cat([uncompressed, *map(torch.flatten, sent)]))
        uncompressed, *flat = arrived.split([len(uncompressed), *map(torch.numel, sent)])
        ps = [orthonormal(part.view_as(p)) for part, p in zip(flat, sent)]

        flat_q = self.wire.mean(torch.cat([(m.mT @ p).flatten() for m, p in zip(matrices, ps)]))
        qs = self._matrices(flat_q)
        applied = [p @ q.mT for p, q in zip(ps, qs)]
        # If P has lost a direction, restart it from the first draw: Q = M^T P would never regain it.
        drawn = self._matrices(self.first)
        directions = [torch.where(p.any(1, keepdim=True), q, first) for p, q, first in zip(ps, qs, drawn)]
        self.shared.copy_(torch.cat([q.flatten() for q in directions]))

        error = self._joined([m - a for m, a in zip(matrices, applied)], torch.zeros_like(uncompressed))
        self.local["residual"].copy_(error)
        return self._joined(applied, uncompressed)

    def _matrices(self, flat: Tensor) -> list[Tensor]:
        """Split the flat Q of all blocks into one tensor [blocks, columns, rank] per shape."""
        rank = self.config.rank
        sizes = [len(blocks) * columns * rank for (_, columns), blocks in self.groups.items()]
        return [part.view(-1, shape[1], rank) for part, shape in zip(flat.split(sizes), self.groups)]

    def _joined(self, matrices: Sequence[Tensor], rest: Tensor) -> Tensor:
        """Assemble a shard from its blocks and its uncompressed parts."""
        lengths = [s.stop - s.start for s in self.uncompressed]
        parts = dict(zip((s.start for s in self.uncompressed), rest.split(lengths)))
        for stack, blocks in zip(matrices, self.groups.values()):
            parts.update({b.where.start: matrix.reshape(-1) for b, matrix in zip(blocks, stack)})
        return torch.cat([parts[start] for start in sorted(parts)])


def orthonormal(x: Tensor) -> Tensor:
    """Make the columns of [..., rows, rank] orthonormal from first to last (Gram-Schmidt, each column twice).

    A column in the span of the previous columns, up to rounding, becomes zero.
    """
    columns: list[Tensor] = []
    least = torch.finfo(x.dtype).eps ** 0.5
    for column in x.unbind(-1):
        norm = torch.linalg.vector_norm(column, dim=-1, keepdim=True)
        remainder = column
        for _ in range(2):
            for before in columns:
                remainder = remainder - (before * remainder).sum(-1, keepdim=True) * before
        length = torch.linalg.vector_norm(remainder, dim=-1, keepdim=True)
        columns.append(torch.where(length > least * norm, remainder / length, torch.zeros_like(remainder)))
    return torch.stack(columns, -1)


def make_compressor(
    config: CompressionConfig, wire: Wire, like: Tensor, segments: Sequence[Segment]
) -> Compressor | None:
    """Create the configured compressor for a shard; returns None without compression or with a single data rank."""
    if config.method == "none" or wire.group.size == 1:
        return None
    kinds: dict[str, type[PowerSGD | TopK | Quantised]] = {"powersgd": PowerSGD, "topk": TopK}
    return kinds.get(config.method, Quantised)(config, wire, like, segments)
