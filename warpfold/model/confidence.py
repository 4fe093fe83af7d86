"""Confidence of predictions: pLDDT, aligned error, pTM, ipTM (Supp. 1.9.6, 1.9.7; Multimer, section 2.6)."""

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from warpfold.model.axial import ALL, PLAIN, PlainExecution, Residues
from warpfold.model.heads import pae_breaks
from warpfold.ops.dispatch import uniform_loop, upcast_half

# Distance of beta carbons in angstrom, as in CASP.
CONTACT = 8.0


def plddt(logits: Tensor) -> Tensor:
    """Compute the predicted lDDT-CA of each residue (Algorithm 29): logits [*, N, bins] -> [*, N], 0 to 100, fp32."""
    bins = logits.shape[-1]
    centers = (torch.arange(bins, device=logits.device) + 0.5) / bins
    return 100 * (upcast_half(logits).softmax(-1) * centers).sum(-1)


def pae(logits: Tensor, breaks: Tensor) -> Tensor:
    """Compute the expected aligned error: logits [*, N, N, bins], breaks [bins - 1] -> [*, N, N], angstrom, fp32.

    Entry [i, j] is the error of residue j after aligning prediction and truth on the frame of residue i (Supp. 1.9.7).
    """
    return _expected(upcast_half(logits).softmax(-1), _centers(breaks.to(logits.device)))


def max_pae(breaks: Tensor) -> float:
    """Return the largest possible value of `pae`, the centre of the last bin, in angstrom."""
    return float(_centers(breaks)[-1])


@dataclass(frozen=True)
class Errors:
    """The results of the aligned-error head.

    pae: [I, N], angstrom, fp32, in main memory, for the frames of this process's I residues.
    max_pae: the largest possible value of pae, angstrom.
    ptm: the predicted TM-score, 0 to 1, in the best frame (Supp. 1.9.7).
    iptm: the same over pairs in different chains, 0 for a single chain (Multimer, section 2.6). None: not a complex.
    chain_pair_iptm: [C, C], symmetric, the ipTM of every two chains without the others. It uses the best frame of
    either chain, the errors of the other chain's residues in this frame, and d0 from the number of residues of both.
    The diagonal is the pTM of each chain. None: not a complex.
    """

    pae: Tensor
    max_pae: float
    ptm: float
    iptm: float | None
    chain_pair_iptm: Tensor | None


def predicted_errors(
    head: nn.Module,
    z: Tensor,
    execution: PlainExecution = PLAIN,
    asym_id: Tensor | None = None,
    length: int | None = None,
) -> Errors:
    """Run the aligned-error head on z [I, P, c_z] in slices of rows, so that the logits never exist for all rows.

    length: N, the number of true residues, which come first. The other P - N are padding and ignored. None: P.
    asym_id: int64 [N] on the device of z, the chains 1 to C of a complex, 0 for no chain. None: not a complex.
    All processes that share the example must call this. The result has a row for each of this process's I residues.
    """
    count, tm, padded = z.shape[-3], None, z.shape[-2]
    length = padded if length is None else length
    pae = torch.empty(count, length)
    scores: dict[str, Tensor] = {}
    for rows in uniform_loop(execution.rows(count)):
        logits = upcast_half(head(execution.fetch(z, rows)[..., :length, :]))
        if tm is None:
            breaks = pae_breaks(logits.shape[-1]).to(logits.device)
            tm, centers = TMScores(breaks, length, asym_id, execution.residues, padded), _centers(breaks)
        probabilities = logits.softmax(-1)
        del logits
        pae[rows] = _expected(probabilities, centers).to("cpu", torch.float32)
        new_scores = {"tm": tm.frame_scores(probabilities, rows)}
        if asym_id is not None:
            new_scores["between"] = tm.frame_scores(probabilities, rows, between=True)
            new_scores["chains"] = tm.chain_scores(probabilities, rows)
        for name, new in new_scores.items():
            if name not in scores:
                scores[name] = new.new_empty(count, *new.shape[1:])
            scores[name][rows] = new
        # Released before the next slice is computed.
        del probabilities
    assert tm is not None
    return Errors(
        pae=pae,
        max_pae=max_pae(breaks),
        ptm=float(tm.best(scores["tm"])),
        iptm=None if asym_id is None else float(tm.best(scores["between"])),
        chain_pair_iptm=None if asym_id is None else tm.best_chain_pairs(scores["chains"]),
    )


def contact_probabilities(probabilities: Tensor, breaks: Tensor) -> Tensor:
    """Compute the probability that beta carbons are nearer than `CONTACT`: distogram [*, bins] -> [*].

    The sum is over the bins that end at or below `CONTACT`; with AlphaFold2's breaks [bins - 1], up to 7.94 angstrom.
    """
    near = torch.cat([breaks, breaks.new_full((1,), torch.inf)]).to(probabilities.device) <= CONTACT
    return (probabilities * near).sum(-1)


def ranking_confidence(plddt: Tensor, ptm: Tensor | None = None, iptm: Tensor | None = None) -> Tensor:
    """Compute the ranking score: 0.8 ipTM + 0.2 pTM if there is an ipTM, else the mean pLDDT (0 to 100).

    plddt: [N], of the residues that count. Raises ValueError for an ipTM without a pTM.
    """
    if iptm is None:
        return plddt.mean()
    if ptm is None:
        raise ValueError("ranking by ipTM needs the pTM too")
    return 0.8 * iptm + 0.2 * ptm


def _centers(breaks: Tensor) -> Tensor:
    """Compute the centres [bins] of bins of equal width with inner edges `breaks`."""
    step = breaks[1] - breaks[0]
    return torch.cat([breaks + step / 2, (breaks[-1] + 1.5 * step)[None]])


def _score(breaks: Tensor, residues: int) -> Tensor:
    """Compute the contribution of an error in each bin to the TM-score of a number of residues, [bins]."""
    # Below 19 residues, d0 of the TM-score would not be a sensible distance.
    number = max(residues, 19)
    d0 = 1.24 * (number - 15) ** (1 / 3) - 1.8
    return 1 / (1 + (_centers(breaks) / d0) ** 2)


def _expected(probabilities: Tensor, values: Tensor) -> Tensor:
    """Compute the expected bin value: probabilities [*, bins], values [bins] or [*, bins] -> [*]."""
    return (probabilities * values).sum(-1)


class TMScores:
    """Expected TM-scores of a prediction, computed from the probabilities of aligned errors in slices of frames.

    breaks: [bins - 1]. length: N, the number of all residues. asym_id: [N], chains 1 to C, 0 for no chain; None: one
    chain. residues: those whose frames this process has; `rows` below are slices of these. padded: the number of
    residues with padding at the end, whose frames' scores `best` and `best_chain_pairs` ignore.
    """

    def __init__(
        self,
        breaks: Tensor,
        length: int,
        asym_id: Tensor | None,
        residues: Residues = ALL,
        padded: int | None = None,
    ) -> None:
        self.length, self.residues, self.padded = length, residues, length if padded is None else padded
        self._breaks, self._score = breaks, _score(breaks, length)
        if asym_id is not None:
            self.asym_id = asym_id
            # The chain of each frame of this process.
            self._frame_chain = residues.local_shard(F.pad(asym_id, (0, self.padded - length)), -1)
            self._frame_chains: list[int] = self._frame_chain.tolist()
            self._columns = [(asym_id == chain + 1).nonzero()[:, 0] for chain in range(int(asym_id.max()))]

    def frame_scores(self, probabilities: Tensor, rows: slice, between: bool = False) -> Tensor:
        """Compute the score [I] of each frame over all residues, or over those of other chains if `between`.

        probabilities: [I, N, bins].
        """
        expected = _expected(probabilities, self._score)
        if not between:
            return expected.sum(-1) / (1e-8 + self.length)
        pairs = self._frame_chain[rows, None] != self.asym_id
        return (expected * pairs).sum(-1) / (1e-8 + pairs.sum(-1))

    def best(self, per_frame: Tensor) -> Tensor:
        """Return the score of the best frame of all processes."""
        return self.residues.all_gather(per_frame, -1, self.padded)[..., : self.length].max()

    def chain_scores(self, probabilities: Tensor, rows: slice) -> Tensor:
        """Compute the score [I, C] of each frame over the residues of each chain.

        d0 of the score is that of a complex of this chain and the frame's chain.
        """
        sizes, per_frame, start = [len(columns) for columns in self._columns], [], 0
        # For each run of frames of one chain.
        for chain, run in itertools.groupby(self._frame_chains[rows]):
            stop = start + len(list(run))
            p, start = probabilities[start:stop], stop
            if chain == 0:
                per_frame.append(p.new_zeros(len(p), len(sizes)))
                continue
            own_size = sizes[chain - 1]
            pair_sizes = [own_size if other == chain else own_size + size for other, size in enumerate([0, *sizes])]
            scores = torch.stack([_score(self._breaks, size) for size in pair_sizes])
            expected = _expected(p, scores[self.asym_id.long()])
            sums = [expected[:, columns].sum(-1) for columns in self._columns]
            per_frame.append(torch.stack([total / (1e-8 + size) for total, size in zip(sums, sizes)], -1))
        return torch.cat(per_frame) if per_frame else probabilities.new_zeros(0, len(sizes))

    def best_chain_pairs(self, per_frame: Tensor) -> Tensor:
        """Compute the score of every two chains [C, C], in the best frame of either, from this process's scores."""
        per_frame = self.residues.all_gather(per_frame, -2, self.padded)
        best = per_frame.new_zeros(len(self._columns), len(self._columns))
        for chain, columns in enumerate(self._columns):
            best[chain] = per_frame[columns].amax(0)
        return torch.maximum(best, best.T)
