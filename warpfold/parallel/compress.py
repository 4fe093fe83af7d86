"""Gradients between data ranks, said in fewer bytes: what was left out is carried over and said later.

These change what is computed, so they are settings (`[optim.compression]`), not plans.  All of them act at the step, on
this rank's shard of the sum of its clipped examples, and obey one law (DGC with its momentum apart): what was
applied so far, plus the mean of what the ranks still carry, is the sum of all mean gradients.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.parallel.buckets import Segment
from warpfold.parallel.exchange import Wire

Method = Literal["none", "powersgd", "topk", "int8", "1bit"]
BLOCK = 256  # numbers that share a scale


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """[optim.compression]: for ranks joined by so slow a link that sending less is worth more steps.

    method: "powersgd" (low rank: Vogels et al. 2019), "topk" (the largest only: Deep Gradient Compression, Lin et al.
    2018), "int8", "1bit" (quantised: Seide et al. 2014, Tang et al. 2021).
    start: first steps, whose gradients are sent whole.
    rank: of PowerSGD's matrices.
    ratio, warmup: the share of numbers that topk sends, reached exponentially in so many steps.
    momentum: of topk's momentum correction; the optimiser's own, beta1, is best lowered as far.
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
    """`mean` of a shard over the data ranks.

    local: flat tensors of the shard's length, different on every data rank.  shared: others, the same on all of them.
    Both, and `steps`, are what a checkpoint holds.
    """

    def __init__(self, config: CompressionConfig, wire: Wire, like: Tensor, *kinds: str) -> None:
        """like: a shard, whose length divides by the number of ranks."""
        self.config, self.wire, self.steps = config, wire, 0
        self.local = {kind: torch.zeros_like(like) for kind in kinds}
        self.shared: Tensor = like.new_empty(0)

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the data ranks, the same on all of them to the bit.  Every rank must call it."""
        mean = self.wire.mean(x) if self.steps < self.config.start else self.compressed(x)
        self.steps += 1
        return mean

    @abstractmethod
    def compressed(self, x: Tensor) -> Tensor:
        """What is applied for the mean of x, once `start` steps are over."""


class Quantised(Compressor):
    """Few bits per number and a scale per block, both ways: to a piece's owner, and its mean from there to all.

    A rank's own piece reaches it exactly.  What rounding the mean lost is the owner's to carry, once for every rank.
    """

    def __init__(self, config: CompressionConfig, wire: Wire, like: Tensor, segments: Sequence[Segment]) -> None:
        super().__init__(config, wire, like, "residual")
        self.bits = 8 if config.method == "int8" else 1
        between = torch.ones(len(like), dtype=torch.bool)  # parameters: no number is there, but a sign would be said
        for segment in segments:
            between[segment.where] = False
        self.between = between.nonzero().flatten().to(like.device)

    def compressed(self, x: Tensor) -> Tensor:
        """Codes to each piece's owner, their mean's code to all."""
        size, rank = self.wire.group.size, self.wire.group.rank
        residual = self.local["residual"].view(size, -1)
        wanted = x.view(size, -1) + residual
        length = wanted.shape[1]

        codes = encode(wanted, self.bits)
        received = torch.empty_like(codes)
        self.wire.exchange(received.view(-1), codes.view(-1)).wait()
        arrived = decode(received, self.bits, length, x.dtype)
        arrived[rank] = wanted[rank]
        mean = arrived.mean(0)

        code = encode(mean[None], self.bits)
        self.wire.gather(received.view(-1), code.view(-1)).wait()
        torch.sub(wanted, decode(codes, self.bits, length, x.dtype), out=residual)
        residual[rank] = size * (mean - decode(code, self.bits, length, x.dtype)[0])
        applied = decode(received, self.bits, length, x.dtype).flatten()
        for flat in (residual.view(-1), applied):
            flat[self.between] = 0
        return applied


def encode(x: Tensor, bits: int) -> Tensor:
    """Rows [n, length] -> uint8 [n, bytes]: codes, then a scale of x's dtype for every `BLOCK` numbers.

    8 bits: round(x / scale), scale = max |x| / 127.  1 bit: the sign, scale = mean |x|.
    """
    blocks = F.pad(x, (0, -x.shape[1] % BLOCK)).view(len(x), -1, BLOCK)
    if bits == 8:
        scale = blocks.abs().amax(-1) / 127
        codes = (blocks / scale.clamp(min=torch.finfo(x.dtype).tiny)[..., None]).round().to(torch.int8)
        codes = codes.view(torch.uint8)
    else:
        filled = F.pad(torch.ones_like(x), (0, -x.shape[1] % BLOCK)).view_as(blocks).sum(-1)
        scale = blocks.abs().sum(-1) / filled
        places = 2 ** torch.arange(8, dtype=torch.uint8, device=x.device)
        codes = ((blocks >= 0).view(*blocks.shape[:2], -1, 8) * places).sum(-1, dtype=torch.uint8)
    return torch.cat([codes.flatten(1), scale.view(torch.uint8)], 1)


def decode(code: Tensor, bits: int, length: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `encode` up to rounding: [n, length] of `dtype`."""
    blocks = -(-length // BLOCK)
    codes, scale = code.split([blocks * BLOCK * bits // 8, blocks * dtype.itemsize], 1)
    scale = scale.contiguous().view(dtype)[..., None]
    if bits == 8:
        numbers = codes.contiguous().view(torch.int8).view(len(code), blocks, BLOCK) * scale
    else:
        places = torch.arange(8, dtype=torch.uint8, device=code.device)
        signs = (codes[..., None] >> places & 1).view(len(code), blocks, BLOCK)
        numbers = torch.where(signs.bool(), scale, -scale)
    return numbers.flatten(1)[:, :length]


class TopK(Compressor):
    """Deep Gradient Compression (Lin et al. 2018): of each parameter the largest numbers only, the rest gathers.

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
        """The share of numbers that is sent: from much to `ratio`, by equal factors (25 %, 6 %, ... in the paper)."""
        warm = (self.steps - self.config.start + 1) / max(1, self.config.warmup)
        return self.config.ratio ** min(1.0, warm)

    def compressed(self, x: Tensor) -> Tensor:
        """The largest numbers of every rank, added up; each rank forgets those of its own."""
        momentum, residual = self.local["momentum"], self.local["residual"]
        momentum.mul_(self.config.momentum).add_(x)
        residual.add_(momentum)

        chosen = self.choose(residual).to(torch.int32)
        values = residual[chosen]
        momentum[chosen] = 0
        residual[chosen] = 0

        size = self.wire.group.size
        places, numbers = chosen.new_empty(size * len(chosen)), values.new_empty(size * len(values))
        works = self.wire.gather(places, chosen), self.wire.gather(numbers, values)
        for work in works:
            work.wait()
        mean = torch.zeros_like(x)
        for where, what in zip(places.view(size, -1), numbers.view(size, -1)):
            mean[where] += what  # no place twice in one rank's list: the order of the sum is that of the ranks
        return mean.div_(size)

    def choose(self, x: Tensor) -> Tensor:
        """Where the largest numbers of each parameter lie, at least one of each; int64, as many on every rank."""
        density = self.density()
        chosen = []
        for length, starts in self.groups.items():
            where = starts[:, None] + torch.arange(length, device=x.device)
            count = min(length, max(1, round(density * length)))
            chosen.append(where.gather(1, x[where].abs().topk(count, sorted=False).indices).flatten())
        return torch.cat(chosen)
