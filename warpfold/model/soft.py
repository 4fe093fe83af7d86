"""A sequence that is still being designed: from logits and fixed letters to shares of the amino acids, and to features.

The shares enter where a sequence enters: target_feat, its row of the alignment and the profile of that row's cluster,
and the extra MSA where that is the sequence itself.  Which atoms a residue has is that of `aatype`, the hard sequence
that the features were made of.  With shares that are that sequence's one-hot code all features stay as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.arguments import WrongArgument, shown
from warpfold.batch import Batch
from warpfold.errors import UserError
from warpfold.geometry.residue import RESTYPES, UNKNOWN

AMINO_ACIDS = len(RESTYPES)  # columns of logits
CLASSES = UNKNOWN + 1  # of a sequence: 20 amino acids, X
LETTERS = f"{RESTYPES}X"
FREE = "-"  # among letters that are fixed
PROFILE = 25  # the first channel of a cluster's profile in msa_feat


@dataclass(frozen=True)
class SoftChain:
    """A chain of N residues whose sequence is logits, but for letters that are fixed.

    key: by which its logits were given, as those of its copies were; None: there are none.
    """

    key: str | None
    logits: Tensor | None  # [N, 20], a leaf
    fixed: str  # [N], FREE where the sequence is free

    @property
    def letters(self) -> str:
        """The hard sequence: of free residues the most likely letter."""
        if self.logits is None:
            return self.fixed
        likely = self.logits.detach().argmax(-1).tolist()
        return "".join(RESTYPES[i] if letter == FREE else letter for i, letter in zip(likely, self.fixed))

    def enter(self, soft: float = 1.0, temperature: float = 1.0, hard: float = 0.0) -> Tensor:
        """Return the shares [N, 21] that enter the model: of fixed letters their one-hot code.

        Of free ones soft * softmax(logits / temperature) + (1 - soft) * logits; the share `hard` of it is the one-hot
        code of the most likely letter, through which the gradient goes as if it were what it replaces.
        """
        codes = F.one_hot(torch.tensor([LETTERS.index(letter) for letter in self.letters]), CLASSES)
        if self.logits is None:
            return codes.float()
        codes = codes.to(self.logits)
        shares = soft * (self.logits / temperature).softmax(-1)
        if soft < 1:
            shares = shares + (1 - soft) * self.logits
        shares = F.pad(shares, (0, 1))
        shares = shares + hard * (codes - shares).detach()
        return torch.where(torch.tensor([letter == FREE for letter in self.fixed])[:, None], shares, codes)


def soft_chains(
    logits: Any, fixed: str | Mapping[str, str] | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, SoftChain]:
    """Return the chains of a design by their names, in the order of these.

    logits: [N, 20] of chain A, or by chain; a key "A,B" has copies that are the same.  fixed: letters that stay, of
    chain A or by chain, FREE where logits decide; of a chain without logits all.
    Errors: WrongArgument, UserError for what does not fit.
    """
    by_key = dict(logits) if isinstance(logits, Mapping) else {"A": logits}
    if fixed is not None and not isinstance(fixed, str | Mapping):
        raise WrongArgument(f"fixed = {shown(fixed)}: letters, or those of chains by their names, are needed")
    letters = {"A": fixed} if isinstance(fixed, str) else dict(fixed or {})
    chains: dict[str, SoftChain] = {}
    for key, values in by_key.items():
        if not isinstance(key, str) or not all(ids := [id.strip() for id in key.split(",")]):
            raise WrongArgument(f"logits: {shown(key)}: the name of a chain is needed, or those of copies, A,B")
        leaf = _leaf(key, values, dtype)
        for id in ids:
            if id in chains:
                raise UserError(f"logits: chain {id} has two; name each once")
            chains[id] = SoftChain(key, leaf, _fixed(id, letters.pop(id, FREE * len(leaf)), len(leaf)))
    for id, own in letters.items():
        chains[id] = SoftChain(None, None, _fixed(id, own))
    if not by_key:
        raise UserError("logits: there are none, so nothing is free; give those of a chain at least")
    for chain, like in ((one, chains[one.key.split(",")[0].strip()]) for one in chains.values() if one.key):
        if chain.fixed != like.fixed:
            raise UserError(f"fixed: the copies {chain.key} have different letters; give all of them the same")
    return dict(sorted(chains.items()))


def _leaf(key: str, values: Any, dtype: torch.dtype) -> Tensor:
    try:
        leaf = torch.as_tensor(values).detach().to("cpu", dtype).clone().requires_grad_()
    except (TypeError, ValueError, RuntimeError):
        raise WrongArgument(f"logits of {key} = {shown(values)}: an array [N, {AMINO_ACIDS}] is needed") from None
    if leaf.dim() != 2 or leaf.shape[1] != AMINO_ACIDS or not len(leaf):
        raise WrongArgument(f"logits of {key}: an array of {list(leaf.shape)}; [N, {AMINO_ACIDS}] is needed")
    if not leaf.isfinite().all():
        raise UserError(f"logits of {key}: not all are finite; give other ones")
    return leaf


def _fixed(id: str, letters: Any, length: int | None = None) -> str:
    """Return the fixed letters of a chain; length: of its logits, None where it has none."""
    if not isinstance(letters, str) or not letters:
        raise WrongArgument(f"fixed: chain {id} = {shown(letters)}: letters are needed")
    letters = letters.upper()
    if wrong := sorted(set(letters) - set(LETTERS + FREE)):
        raise UserError(f"fixed: chain {id} has {wrong[0]!r}; the letters of the amino acids, X and {FREE} are known")
    if length is None and FREE in letters:
        raise UserError(f"fixed: chain {id} is free at {FREE}, but has no logits; give them, or all letters")
    if length is not None and len(letters) != length:
        raise UserError(
            f"fixed: chain {id} has {len(letters)} letters for logits of {length} residues; give one for each"
        )
    return letters


@dataclass(frozen=True)
class QueryPlace:
    """Where a sequence stands in the features of a monomer, of each pass.

    weight [pass]: its part in the profile of its own cluster.  is_extra: it is the extra MSA too, as nothing else is.
    """

    weight: Tensor
    is_extra: bool


def soften(batch: Batch, shares: Tensor, place: QueryPlace | None) -> Batch:
    """Return the features with the sequence as shares [N, 21] of the 20 amino acids and X.

    batch: the features of one example, made of the hard sequence, which nothing masks.  place: in a monomer; None: a
    multimer, whose features of the alignment are made in the model.
    """
    row = F.pad(shares, (0, 2))  # of an alignment: neither gap nor mask
    features = {**batch, "target_feat": F.pad(shares, (1, 0))}  # no chain breaks
    if place is None:
        return features | {"soft_alignment": row[None]}
    feat = batch["msa_feat"].to(shares)  # [pass, s, N, 49]
    change = F.pad(shares - F.one_hot(batch["aatype"].to(shares.device).long(), CLASSES), (0, 2))
    weight = place.weight.to(shares)[:, None, None]
    at = change.shape[-1], PROFILE
    query = feat[:, 0]
    parts = [query[..., : at[0]] + change, query[..., at[0] : at[1]], query[..., at[1] : -1] + weight * change]
    features["msa_feat"] = torch.cat((torch.cat([*parts, query[..., -1:]], -1)[:, None], feat[:, 1:]), 1)
    return features | ({"soft_extra": row[None]} if place.is_extra else {})
