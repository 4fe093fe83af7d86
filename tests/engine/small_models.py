"""A small language model in plain torch with shared, frozen and unused parameters, and its data."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

VOCABULARY, WIDTH = 17, 12


class Sentences(Dataset):
    """Sequences of different lengths in which a letter usually follows from the two letters before it."""

    def __init__(self, size: int = 24) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        g = torch.Generator().manual_seed(index)
        letters = torch.randint(VOCABULARY, (5 + index % 7,), generator=g).tolist()
        for at in range(2, len(letters)):
            # A new draw in each epoch.
            if torch.rand(()) < 0.8:
                letters[at] = (letters[at - 1] + letters[at - 2]) % VOCABULARY
        return torch.tensor(letters)


def padded(examples: list[Tensor]) -> dict[str, Tensor]:
    return {"letters": nn.utils.rnn.pad_sequence(examples, batch_first=True, padding_value=-1)}


class LanguageModel(nn.Module):
    """Causal attention over the letters.  `model(batch)` returns the loss."""

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
