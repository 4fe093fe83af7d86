"""Soft sequences for design: from logits and fixed letters to probabilities of the amino acids, and to features.

The probabilities enter in the places of a sequence: target_feat, its row of the alignment, the profile of that row's
cluster, and the extra MSA if that consists of the sequence. The atoms of a residue follow from `aatype`, the hard
sequence from which the features were computed. One-hot probabilities of this sequence leave all features unchanged.
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

# Columns of logits.
AMINO_ACIDS = len(RESTYPES)
# Classes of a sequence: 20 amino acids and X.
CLASSES = UNKNOWN + 1
LETTERS = f"{RESTYPES}X"
# Marks a residue without a fixed letter.
FREE = "-"
# First channel of the cluster profile in msa_feat.
PROFILE = 25


@dataclass(frozen=True)
class SoftChain:
    """A chain of N residues whose sequence is logits, except for fixed letters.

    key: the user's key of the logits, which copies of the chain share; None: the chain has no logits.
    logits: [N, 20], a leaf. fixed: [N] letters, FREE where the logits determine the residue.
    """

    key: str | None
    logits: Tensor | None
    fixed: str

    @property
    def letters(self) -> str:
        """The hard sequence, with the most likely letter for each free residue."""
        if self.logits is None:
            return self.fixed
        likely = self.logits.detach().argmax(-1).tolist()
        return "".join(RESTYPES[i] if letter == FREE else letter for i, letter in zip(likely, self.fixed))

    def enter(self, soft: float = 1.0, temperature: float = 1.0, hard: float = 0.0) -> Tensor:
        """Compute the probabilities [N, 21] that enter the model: one-hot codes for fixed letters.

        For free residues they are p = soft * softmax(logits / temperature) + (1 - soft) * logits. `hard`, from 0 to 1,
        interpolates from p to the one-hot code of the most likely letter, with the gradient of p (straight-through).
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
    """Build the chains of a design, by name in the order of the names.

    logits: [N, 20] of chain A, or a mapping from chains; a key "A,B" means identical copies. fixed: fixed letters of
    chain A, or a mapping from chains, with FREE for residues that the logits determine. A chain without logits needs a
    letter for every residue. Raises WrongArgument or UserError for invalid arguments.
    """
    by_key = dict(logits) if isinstance(logits, Mapping) else {"A": logits}
    if fixed is not None and not isinstance(fixed, str | Mapping):
        raise WrongArgument(f"fixed = {shown(fixed)}: pass letters, or a mapping from chain names to letters")
    letters = {"A": fixed} if isinstance(fixed, str) else dict(fixed or {})
    chains: dict[str, SoftChain] = {}
    for key, values in by_key.items():
        if not isinstance(key, str) or not all(ids := [id.strip() for id in key.split(",")]):
            raise WrongArgument(f"logits: {shown(key)}: use the name of a chain, or the names of copies as A,B")
        leaf = _leaf(key, values, dtype)
        for id in ids:
            if id in chains:
                raise UserError(f"logits: chain {id} occurs twice. Name each chain once.")
            chains[id] = SoftChain(key, leaf, _fixed(id, letters.pop(id, FREE * len(leaf)), len(leaf)))
    for id, chain_letters in letters.items():
        chains[id] = SoftChain(None, None, _fixed(id, chain_letters))
    if not by_key:
        raise UserError("logits: empty, so no residue is free. Pass the logits of at least one chain.")
    for chain in chains.values():
        if chain.key and chain.fixed != chains[chain.key.split(",")[0].strip()].fixed:
            raise UserError(
                f"fixed: the copies {chain.key} have different letters. Use the same letters for all copies."
            )
    return dict(sorted(chains.items()))


def _leaf(key: str, values: Any, dtype: torch.dtype) -> Tensor:
    try:
        leaf = torch.as_tensor(values).detach().to("cpu", dtype).clone().requires_grad_()
    except (TypeError, ValueError, RuntimeError):
        raise WrongArgument(f"logits of {key} = {shown(values)}: pass an array [N, {AMINO_ACIDS}]") from None
    if leaf.dim() != 2 or leaf.shape[1] != AMINO_ACIDS or not len(leaf):
        raise WrongArgument(f"logits of {key}: an array of shape {list(leaf.shape)}; pass [N, {AMINO_ACIDS}]")
    if not leaf.isfinite().all():
        raise UserError(f"logits of {key}: not all values are finite. Pass finite values.")
    return leaf


def _fixed(id: str, letters: Any, length: int | None = None) -> str:
    """Validate the fixed letters of a chain; length: of its logits, None without logits."""
    if not isinstance(letters, str) or not letters:
        raise WrongArgument(f"fixed: chain {id} = {shown(letters)}: pass letters")
    letters = letters.upper()
    if unknown_letters := sorted(set(letters) - set(LETTERS + FREE)):
        raise UserError(
            f"fixed: chain {id} has {unknown_letters[0]!r}. Use the letters of the 20 amino acids, X and {FREE}."
        )
    if length is None and FREE in letters:
        raise UserError(f"fixed: chain {id} is free at {FREE}, but has no logits. Pass logits, or fix all letters.")
    if length is not None and len(letters) != length:
        raise UserError(
            f"fixed: chain {id} has {len(letters)} letters for logits of {length} residues. Pass one per residue."
        )
    return letters


@dataclass(frozen=True)
class QueryPlace:
    """The place of a sequence in the features of a monomer, for each pass.

    weight: [pass], its weight in the profile of its own cluster. is_extra: whether it is also the whole extra MSA.
    """

    weight: Tensor
    is_extra: bool


def soften(batch: Batch, shares: Tensor, place: QueryPlace | None) -> Batch:
    """Return the features with the sequence as probabilities `shares` [N, 21] of the 20 amino acids and X.

    batch: the features of one example, computed from the hard sequence without masking. place: for a monomer. None: a
    multimer, which computes the features of the alignment in the model.
    """
    # A row of an alignment has two more classes, gap and mask. target_feat has one more channel, the chain break.
    row = F.pad(shares, (0, 2))
    features = {**batch, "target_feat": F.pad(shares, (1, 0))}
    if place is None:
        return features | {"soft_alignment": row[None]}
    # [pass, s, N, 49]. The sequence is row 0: its codes come first, its cluster's profile before the last channel.
    feat = batch["msa_feat"].to(shares)
    change = F.pad(shares - F.one_hot(batch["aatype"].to(shares.device).long(), CLASSES), (0, 2))
    weight = place.weight.to(shares)[:, None, None]
    classes = change.shape[-1]
    codes, deletions, profile, last = feat[:, 0].split((classes, PROFILE - classes, classes, 1), -1)
    query = torch.cat([codes + change, deletions, profile + weight * change, last], -1)
    features["msa_feat"] = torch.cat((query[:, None], feat[:, 1:]), 1)
    return features | ({"soft_extra": row[None]} if place.is_extra else {})
