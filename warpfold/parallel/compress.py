"""Gradient compression between data ranks: what is left out of one step is carried over to later ones.

Compression changes what is computed, so it is a setting (`[optim.compression]`), not a plan.  Every method acts at the
step, on this rank's shard of the sum of its clipped examples, and obeys one law (except DGC with momentum): what was
applied so far, plus the mean of what the ranks still carry, is the sum of all mean gradients.
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
BLOCK = 256  # numbers that share a scale
CHUNK = 512  # blocks that are encoded at a time on a CPU


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """[optim.compression]: for ranks joined by a link so slow that sending less is worth more steps.

    method: "powersgd" (low rank: Vogels et al. 2019), "topk" (the largest only: Deep Gradient Compression, Lin et al.
    2018), "int8", "1bit" (quantised: Seide et al. 2014, Tang et al. 2021).
    start: how many first steps send whole gradients.
    rank: of PowerSGD's matrices.
    ratio, warmup: the share of numbers that topk sends, reached exponentially in `warmup` steps.
    momentum: of topk's momentum correction; lower the optimiser's own, beta1, as far.
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
            raise ValueError("compression: ratio must lie above 0 and up to 1, momentum from 0 to below 1")


class Compressor(ABC):
    """Take the mean of a shard over the data ranks.

    local: flat tensors of the shard's length, different on every data rank.  shared: a tensor that is the same on all.
    Both, and `steps`, are what a checkpoint holds.
    """

    def __init__(self, config: CompressionConfig, wire: Wire, like: Tensor, *kinds: str) -> None:
        """like: a shard, whose length divides by the number of ranks."""
        self.config, self.wire, self.steps = config, wire, 0
        self.local = {kind: torch.zeros_like(like) for kind in kinds}
        self.shared: Tensor = like.new_empty(0)

    def mean(self, x: Tensor, used: Tensor | None = None) -> Tensor:
        """Return the mean over the data ranks, the same on all of them to the bit.  Every rank must call it.

        used: whether the mean will be; where not, what is carried over stays for the next step.  The host, which does
        not wait for this number, counts the step.
        """
        carried = [] if used is None or self.steps < self.config.start else [*self.local.values(), self.shared]
        before = [x.clone() for x in carried]
        mean = self.wire.mean(x) if self.steps < self.config.start else self.compressed(x)
        for now, old in zip(carried, before):
            assert used is not None  # or nothing is carried
            torch.where(used, now, old, out=now)
        self.steps += 1
        return mean

    @abstractmethod
    def compressed(self, x: Tensor) -> Tensor:
        """Compute the update that replaces the mean of x once `start` steps are over."""


class Quantised(Compressor):
    """Send few bits per number and a scale per block, both ways: to the owner of a piece, and its mean back to all.

    A rank's own piece reaches it exactly.  The owner carries over what rounding the mean lost, once for every rank.
    """

    def __init__(self, config: CompressionConfig, wire: Wire, like: Tensor, segments: Sequence[Segment]) -> None:
        super().__init__(config, wire, like, "residual")
        self.bits = 8 if config.method == "int8" else 1
        self.padding = between([s.where for s in segments], len(like))

    def compressed(self, x: Tensor) -> Tensor:
        """Send codes to each piece's owner, and the code of their mean to all."""
        size, rank = self.wire.group.size, self.wire.group.rank
        residual = self.local["residual"].view(size, -1)
        wanted = residual.add_(x.view(size, -1))
        length = wanted.shape[1]

        codes = encode(wanted, self.bits)
        received = torch.empty_like(codes)
        self.wire.all_to_all(received.view(-1), codes.view(-1)).wait()
        arrived = decode(received, self.bits, length, x.dtype)
        arrived[rank] = wanted[rank]
        mean = arrived.mean(0)

        code = encode(mean[None], self.bits)
        self.wire.all_gather(received.view(-1), code.view(-1)).wait()
        residual.sub_(decode(codes, self.bits, length, x.dtype))
        residual[rank] = size * (mean - decode(code, self.bits, length, x.dtype)[0])
        applied = decode(received, self.bits, length, x.dtype).flatten()
        for place in self.padding:  # it holds no numbers, yet 1-bit codes give it signs
            residual.view(-1)[place] = 0
            applied[place] = 0
        return applied


def between(places: Sequence[slice], size: int) -> list[slice]:
    """Return the parts of `size` numbers that lie between some of them."""
    ends = sorted((place.start, place.stop) for place in places)
    starts = [0, *(stop for _, stop in ends)]
    return [slice(a, b) for a, b in zip(starts, [*(start for start, _ in ends), size]) if a < b]


def encode(x: Tensor, bits: int) -> Tensor:
    """Encode rows [n, length] as uint8 [n, bytes]: codes, then a scale of x's dtype for every `BLOCK` numbers.

    8 bits: round(x / scale), scale = max |x| / 127.  1 bit: the sign, scale = mean |x|.
    """
    length = x.shape[1]
    blocks = -(-length // BLOCK)
    code = torch.empty(len(x), blocks * (BLOCK * bits // 8 + x.itemsize), dtype=torch.uint8, device=x.device)
    codes, scales = code.split([blocks * BLOCK * bits // 8, blocks * x.itemsize], 1)
    for rows, some in _in_caches(len(x), blocks, x.device):
        part = x[rows, some.start * BLOCK : some.stop * BLOCK]
        short = -part.shape[1] % BLOCK
        found, scale = _encode((F.pad(part, (0, short)) if short else part).unflatten(1, (-1, BLOCK)), bits, short)
        codes[rows, some.start * BLOCK * bits // 8 : some.stop * BLOCK * bits // 8] = found.flatten(1)
        scales[rows, some.start * x.itemsize : some.stop * x.itemsize] = scale.view(torch.uint8)
    return code


def _in_caches(rows: int, blocks: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Yield which rows and blocks to work at in turn: on a CPU as few as its caches hold, elsewhere all at once."""
    if device.type != "cpu":
        yield slice(0, rows), slice(0, blocks)
        return
    for row in range(rows):
        for first in range(0, blocks, CHUNK):
            yield slice(row, row + 1), slice(first, min(first + CHUNK, blocks))


def _encode(blocks: Tensor, bits: int, short: int) -> tuple[Tensor, Tensor]:
    """Return codes [n, k, bytes] and scales [n, k] of blocks; the last of each row lacks `short` numbers: zeros."""
    if bits == 8:
        scale = blocks.abs().amax(-1).div_(127)
        codes = torch.div(blocks, scale.clamp(min=torch.finfo(blocks.dtype).tiny)[..., None]).round_()
        return codes.to(torch.int8).view(torch.uint8), scale
    filled = torch.full((blocks.shape[1],), BLOCK, device=blocks.device)
    filled[-1:] -= short
    scale = blocks.abs().sum(-1) / filled
    places = 2 ** torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((blocks >= 0).unflatten(-1, (-1, 8)) * places).sum(-1, dtype=torch.uint8), scale


def decode(code: Tensor, bits: int, length: int, dtype: torch.dtype) -> Tensor:
    """Undo `encode`, up to rounding: [n, length] of `dtype`."""
    blocks = -(-length // BLOCK)
    codes, scales = code.split([blocks * BLOCK * bits // 8, blocks * dtype.itemsize], 1)
    numbers = torch.empty(len(code), blocks, BLOCK, dtype=dtype, device=code.device)
    for rows, some in _in_caches(len(code), blocks, code.device):
        part = codes[rows, some.start * BLOCK * bits // 8 : some.stop * BLOCK * bits // 8]
        out, scale = numbers[rows, some], scales[rows].view(dtype)[:, some, None]
        if bits == 8:
            torch.mul(part.view(torch.int8).unflatten(1, (-1, BLOCK)), scale, out=out)
        else:
            places = torch.arange(8, dtype=torch.uint8, device=code.device)
            signs = (part[..., None] >> places & 1).view(*out.shape).bool()
            torch.where(signs, scale, -scale, out=out)
    return numbers.flatten(1)[:, :length]


class TopK(Compressor):
    """Deep Gradient Compression (Lin et al. 2018): send the largest numbers of each parameter; the rest accumulates.

    Momentum correction (section 3.1), momentum factor masking (3.2) and warm-up of the sparsity (3.3); local clipping
    (3.1) is the clipping of each example.  With momentum 0 it is plain error feedback.
    """

    def __init__(self, config: CompressionConfig, wire: Wire, like: Tensor, segments: Sequence[Segment]) -> None:
        super().__init__(config, wire, like, "momentum", "residual")
        self.groups: dict[int, Tensor] = {}  # length of a parameter -> where those of that length start
        for length in sorted({s.where.stop - s.where.start for s in segments}):
            starts = [s.where.start for s in segments if s.where.stop - s.where.start == length]
            self.groups[length] = torch.tensor(starts, device=like.device)

    def density(self) -> float:
        """Return the share of numbers to send: it falls to `ratio` by equal factors (25 %, 6 %, ... in the paper)."""
        warm = (self.steps - self.config.start + 1) / max(1, self.config.warmup)
        return self.config.ratio ** min(1.0, warm)

    def compressed(self, x: Tensor) -> Tensor:
        """Add up the largest numbers of every rank; each rank clears its own."""
        momentum, residual = self.local["momentum"], self.local["residual"]
        momentum.mul_(self.config.momentum).add_(x)
        residual.add_(momentum)

        chosen = self.choose(residual).to(torch.int32)
        values = residual[chosen]
        momentum[chosen] = 0
        residual[chosen] = 0

        size = self.wire.group.size
        indices, numbers = chosen.new_empty(size * len(chosen)), values.new_empty(size * len(values))
        works = self.wire.all_gather(indices, chosen), self.wire.all_gather(numbers, values)
        for work in works:
            work.wait()
        mean = torch.zeros_like(x)
        for where, what in zip(indices.view(size, -1), numbers.view(size, -1)):
            mean[where] += what  # one rank's indices are all different, so sums are made in the order of the ranks
        return mean.div_(size)

    def choose(self, x: Tensor) -> Tensor:
        """Return the indices of the largest numbers of each parameter, at least one of each; as many on every rank."""
        density = self.density()
        chosen = [x.new_empty(0, dtype=torch.int64)]  # a part between nodes may hold padding alone
        for length, starts in self.groups.items():
            where = starts[:, None] + torch.arange(length, device=x.device)
            count = min(length, max(1, round(density * length)))
            chosen.append(where.gather(1, x[where].abs().topk(count, sorted=False).indices).flatten())
        return torch.cat(chosen)


@dataclass(frozen=True)
class MatrixRows:
    """Whole rows of a parameter, seen as a matrix [first dimension, all others], within a shard."""

    name: str
    where: slice
    rows: int
    columns: int


def matrix_blocks(segments: Sequence[Segment], rank: int) -> list[MatrixRows]:
    """Return the parts of a shard that low rank makes smaller; all else is sent as it is."""
    blocks = []
    for segment in segments:
        columns = segment.shape[1:].numel() if len(segment.shape) > 1 else 0
        if not columns:
            continue
        start = segment.where.start + -segment.first % columns  # the first whole row
        rows = (segment.where.stop - start) // columns
        if rows > 0 and rank * (rows + columns) < rows * columns:
            blocks.append(MatrixRows(segment.name, slice(start, start + rows * columns), rows, columns))
    return blocks


class PowerSGD(Compressor):
    """PowerSGD (Vogels et al. 2019, algorithms 1, 2): project the mean gradient's matrices on a few directions.

    One step of power iteration, which begins with the directions of the last step (warm start), finds new ones.  Each
    rank carries over what the projection leaves out (error feedback).  Blocks of one shape are computed together.
    """

    def __init__(self, config: CompressionConfig, wire: Wire, like: Tensor, segments: Sequence[Segment]) -> None:
        super().__init__(config, wire, like, "residual")
        self.groups: dict[tuple[int, int], list[MatrixRows]] = {}
        for block in matrix_blocks(segments, config.rank):
            self.groups.setdefault((block.rows, block.columns), []).append(block)
        draws = [self._draw(block) for blocks in self.groups.values() for block in blocks]
        self.first = torch.cat(draws).to(like) if draws else like.new_empty(0)
        self.shared = self.first.clone()  # Q of every block, for the P of the next step
        self.rest = between([b.where for blocks in self.groups.values() for b in blocks], len(like))

    def _draw(self, block: MatrixRows) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(block.name.encode()))
        return torch.randn(block.columns * self.config.rank, generator=generator, dtype=torch.float64)

    def compressed(self, x: Tensor) -> Tensor:
        """Return P Q^T of the mean gradient's matrices, and the mean of the rest."""
        if not self.groups:
            return self.wire.mean(x)
        wanted = x + self.local["residual"]
        matrices = [torch.stack([wanted[b.where].view(shape) for b in bs]) for shape, bs in self.groups.items()]

        sent = [m @ q for m, q in zip(matrices, self._matrices(self.shared))]
        rest = torch.cat([wanted[:0], *(wanted[part] for part in self.rest)])
        arrived = self.wire.mean(torch.cat([rest, *map(torch.flatten, sent)]))
        rest, *flat = arrived.split([len(rest), *map(torch.numel, sent)])
        ps = [orthonormal(part.view_as(p)) for part, p in zip(flat, sent)]

        flat_q = self.wire.mean(torch.cat([(m.mT @ p).flatten() for m, p in zip(matrices, ps)]))
        qs = self._matrices(flat_q)
        applied = [p @ q.mT for p, q in zip(ps, qs)]
        # Where P has lost a direction, start again from the first draw: Q = M^T P would keep it lost for ever.
        drawn = self._matrices(self.first)
        kept = [torch.where(p.any(1, keepdim=True), q, first) for p, q, first in zip(ps, qs, drawn)]
        self.shared.copy_(torch.cat([k.flatten() for k in kept]))

        left = self._joined([m - a for m, a in zip(matrices, applied)], torch.zeros_like(rest))
        self.local["residual"].copy_(left)
        return self._joined(applied, rest)

    def _matrices(self, flat: Tensor) -> list[Tensor]:
        """Split the flat Q of all blocks into [blocks, columns, rank] of each shape."""
        rank = self.config.rank
        sizes = [len(blocks) * columns * rank for (_, columns), blocks in self.groups.items()]
        return [part.view(-1, shape[1], rank) for part, shape in zip(flat.split(sizes), self.groups)]

    def _joined(self, matrices: Sequence[Tensor], rest: Tensor) -> Tensor:
        """Join a shard from its blocks and what lies between them."""
        parts = dict(zip((s.start for s in self.rest), rest.split([s.stop - s.start for s in self.rest])))
        for stack, blocks in zip(matrices, self.groups.values()):
            parts.update({b.where.start: matrix.reshape(-1) for b, matrix in zip(blocks, stack)})
        return torch.cat([parts[start] for start in sorted(parts)])


def orthonormal(x: Tensor) -> Tensor:
    """Make the columns of [..., rows, rank] orthonormal from first to last (Gram-Schmidt, each column twice).

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


def make_compressor(
    config: CompressionConfig, wire: Wire, like: Tensor, segments: Sequence[Segment]
) -> Compressor | None:
    """Return the settings' compressor for a shard; None without compression, or with one data rank."""
    if config.method == "none" or wire.group.size == 1:
        return None
    kinds: dict[str, type[PowerSGD | TopK | Quantised]] = {"powersgd": PowerSGD, "topk": TopK}
    return kinds.get(config.method, Quantised)(config, wire, like, segments)
