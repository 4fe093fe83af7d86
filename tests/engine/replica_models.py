"""A small vision model and a small language model in plain torch, for tests of the training kit between ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TinyVision(nn.Module):
    """Convolutions and BatchNorm, with parts that some or all batches leave unused, shared ones and frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 4)  # registered first, used last
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.shared = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.again = self.shared
        self.frozen = nn.Conv2d(6, 12, 1).requires_grad_(False)
        self.sometimes = nn.Linear(12, 12)
        self.never = nn.Linear(12, 12)

    def forward(self, x: Tensor, sometimes: bool = True) -> Tensor:
        """Return logits [batch, 4] of pictures [batch, 3, height, width]."""
        x = self.norm(self.stem(x)).relu()
        x = self.again(self.shared(x).relu()) + x
        x = self.frozen(x).mean((2, 3))
        return self.head(x + self.sometimes(x).tanh() if sometimes else x)


class TinyLanguage(nn.Module):
    """An embedding tied to the output, and a layer of attention between."""

    def __init__(self, words: int = 31, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.mix = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.out = nn.Linear(width, words)
        self.out.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        """Return the loss of predicting each of words [batch, length] from those before."""
        length = words.shape[1] - 1
        causal = nn.Transformer.generate_square_subsequent_mask(length, dtype=self.out.weight.dtype)
        logits = self.out(self.mix(self.embed(words[:, :-1]), src_mask=causal))
        return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def pictures(step: int, rank: int, batch: int = 3) -> tuple[Tensor, Tensor]:
    """Return pictures and their labels, of a step and a rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(batch, 3, 6, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (batch,), generator=generator)


def sentences(step: int, rank: int, batch: int = 3) -> Tensor:
    """Return words [batch, 9], of a step and a rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(31, (batch, 9), generator=generator)
