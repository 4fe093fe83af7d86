"""How sure the model is: pLDDT, predicted aligned error, pTM, ipTM (Supp. 1.9.6, 1.9.7; Multimer, sec. 2.6)."""

import itertools

import torch
from torch import Tensor

from warpfold.model.execution import ALL, Residues
from warpfold.ops.tensors import upcast_half


def plddt(logits: Tensor) -> Tensor:
    """Return the predicted lDDT-Ca of each residue: logits [*, N, bins] -> [*, N], 0 to 100, fp32 (Algorithm 29)."""
    bins = logits.shape[-1]
    centers = (torch.arange(bins, device=logits.device) + 0.5) / bins
    return 100 * (upcast_half(logits).softmax(-1) * centers).sum(-1)


def pae(logits: Tensor, breaks: Tensor) -> Tensor:
    """Return the expected aligned error: logits [*, N, N, bins], breaks [bins - 1] -> [*, N, N], angstrom, fp32.

    [i, j] is the error of residue j when prediction and truth are aligned on the frame of residue i (Supp. 1.9.7).
    """
    return (upcast_half(logits).softmax(-1) * _centers(breaks.to(logits.device))).sum(-1)


def max_pae(breaks: Tensor) -> float:
    """Return the largest value that `pae` can give, angstrom: the centre of the last bin."""
    return float(_centers(breaks)[-1])


def ptm(logits: Tensor, breaks: Tensor, mask: Tensor | None = None, residues: Residues = ALL) -> Tensor:
    """Return the predicted TM-score: aligned-error logits [N, N, bins], breaks [bins - 1] -> 0..1 (Supp. 1.9.7).

    `mask` [N]: residues that count, all when None.  residues: those whose rows of the logits are given.
    """
    return _tm(logits, breaks, None, mask, residues)


def iptm(
    logits: Tensor, breaks: Tensor, asym_id: Tensor, mask: Tensor | None = None, residues: Residues = ALL
) -> Tensor:
    """Return the interface pTM: `ptm` over pairs in different chains; asym_id [N] (AlphaFold-Multimer, sec. 2.6).

    0 where there is one chain.
    """
    return _tm(logits, breaks, asym_id, mask, residues)


def chain_pair_iptm(
    logits: Tensor, breaks: Tensor, asym_id: Tensor, mask: Tensor | None = None, residues: Residues = ALL
) -> Tensor:
    """Return the interface pTM of every two chains as if they were alone: [C, C], symmetric, 0 on the diagonal.

    logits [N, N, bins], breaks [bins - 1], asym_id [N]: 1 to C, 0 for none; mask and residues as in `ptm`.  Entry
    [a - 1, b - 1] is the `iptm` of the residues of chains a and b: the best frame of either, the errors of the other
    chain's residues in it, and a d0 that follows from the number of residues of both.
    """
    counts = torch.ones(len(asym_id), device=logits.device) * (1 if mask is None else mask)
    here, chains = residues.local_shard(asym_id, -1), int(asym_id.max())
    sizes = [float(counts[asym_id == chain + 1].sum()) for chain in range(chains)]
    per_frame = counts.new_zeros(len(here), chains)  # of each frame: the mean over the residues of each chain
    for a, b in itertools.permutations(range(chains), 2):
        rows, columns = (here == a + 1).nonzero()[:, 0], (asym_id == b + 1).nonzero()[:, 0]
        score = _score(breaks.to(logits.device), sizes[a] + sizes[b])
        expected = (upcast_half(logits[rows][:, columns]).softmax(-1) * score).sum(-1)
        per_frame[rows, b] = (expected * counts[columns]).sum(-1) / (1e-8 + counts[columns].sum())
    per_frame = residues.all_gather(per_frame, -2, len(counts)) * counts[:, None]
    best = per_frame.new_zeros(chains, chains)
    for chain in range(chains):
        best[chain] = (per_frame * (asym_id == chain + 1)[:, None]).amax(0)
    return torch.maximum(best, best.T)


def ranking_confidence(plddt: Tensor, ptm: Tensor | None = None, iptm: Tensor | None = None) -> Tensor:
    """Return what predictions are ranked by: with an ipTM 0.8 ipTM + 0.2 pTM, else the mean pLDDT (0 to 100).

    plddt [N] of the residues that count.  Errors: ValueError for an ipTM without a pTM.
    """
    if iptm is None:
        return plddt.mean()
    if ptm is None:
        raise ValueError("ranking by ipTM needs the pTM too")
    return 0.8 * iptm + 0.2 * ptm


def _centers(breaks: Tensor) -> Tensor:
    """Return the centres [bins] of bins of one width whose inner edges are `breaks`, the first of them 0."""
    step = breaks[1] - breaks[0]
    return torch.cat([breaks + step / 2, (breaks[-1] + 1.5 * step)[None]])


def _score(breaks: Tensor, residues: float) -> Tensor:
    """Return what a residue with its error in each bin adds to the TM-score of so many residues: [bins]."""
    number = max(int(residues), 19)  # below 19 the TM-score's own d0 is not defined sensibly
    d0 = 1.24 * (number - 15) ** (1 / 3) - 1.8
    return 1 / (1 + (_centers(breaks) / d0) ** 2)


def _tm(logits: Tensor, breaks: Tensor, asym_id: Tensor | None, mask: Tensor | None, residues: Residues) -> Tensor:
    """Return the expected TM-score of the best alignment: of the frame whose row has the highest mean."""
    ones = torch.ones(logits.shape[-2], device=logits.device)
    counts = ones if mask is None else ones * mask
    score = _score(breaks.to(logits.device), float(counts.sum()))
    expected = (upcast_half(logits).softmax(-1) * score).sum(-1)
    pairs = counts[:, None] * counts[None, :]
    if asym_id is not None:
        pairs = pairs * (asym_id[:, None] != asym_id[None, :])
    pairs = residues.local_shard(pairs, -2)
    per_frame = (expected * pairs).sum(-1) / (1e-8 + pairs.sum(-1))
    return residues.all_gather(per_frame, -1, len(counts)).max()
