"""Two small models in plain torch, and their data: with shared, frozen and unused parameters, and with buffers."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

VOCABULARY, WIDTH = 17, 12


class Sentences(Dataset):
    """Sequences of uneven length in which a letter follows from the two before it, as a rule."""

    def __init__(self, size: int = 24) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        g = torch.Generator().manual_seed(index)
        letters = torch.randint(VOCABULARY, (5 + index % 7,), generator=g).tolist()
        for at in range(2, len(letters)):
            if torch.rand(()) < 0.8:  # drawn anew in each epoch
                letters[at] = (letters[at - 1] + letters[at - 2]) % VOCABULARY
        return torch.tensor(letters)


def padded(examples: list[Tensor]) -> dict[str, Tensor]:
    return {"letters": nn.utils.rnn.pad_sequence(examples, batch_first=True, padding_value=-1)}


class LanguageModel(nn.Module):
    """Attention over the letters before; `model(batch)` is the loss."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight  # shared
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)  # frozen
        self.spare = nn.Parameter(torch.ones(3))  # unused

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        letters = batch["letters"]
        x = self.embed(letters.clamp(min=0)) * self.scale
        n = self.norm(x)
        later = torch.ones(letters.shape[1], letters.shape[1], dtype=torch.bool).triu(1)
        x = x + self.drop(self.attend(n, n, n, attn_mask=later, need_weights=False)[0])
        x = x + self.mlp(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), letters[:, 1:].flatten(), ignore_index=-1)


class Pictures(Dataset):
    """Noise, brighter in one of four corners."""

    def __init__(self, size: int = 32) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        corner = index % 4
        picture = torch.randn(1, 8, 8)  # drawn anew in each epoch
        picture[:, 4 * (corner // 2) :, 4 * (corner % 2) :][:, :4, :4] += 1
        return picture, corner


def stacked(examples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    pictures, corners = zip(*examples)
    return {"pictures": torch.stack(pictures), "corners": torch.tensor(corners)}


class VisionModel(nn.Module):
    """Convolutions and batch norms; `model(batch)` is the loss."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1).requires_grad_(False)  # frozen
        self.body = nn.Sequential(
            *(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2, bias=False)),
            *(nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(dropout), nn.Flatten(), nn.Linear(54, 4)),
        )
        self.spare = nn.Linear(2, 2)  # unused

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        pictures = batch["pictures"].to(self.stem.weight.dtype)
        return F.cross_entropy(self.body(self.stem(pictures)), batch["corners"])
