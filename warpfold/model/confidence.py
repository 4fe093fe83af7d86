"""How sure the model is: pLDDT, predicted aligned error, pTM, ipTM (Supp. 1.9.6, 1.9.7; Multimer, sec. 2.6)."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from warpfold.model.axial import ALL, PLAIN, PlainExecution, Residues
from warpfold.model.heads import pae_breaks
from warpfold.ops.dispatch import uniform_loop, upcast_half

CONTACT = 8.0  # angstrom between beta carbons, as contacts are counted in CASP


def plddt(logits: Tensor) -> Tensor:
    """Return the predicted lDDT-Ca of each residue: logits [*, N, bins] -> [*, N], 0 to 100, fp32 (Algorithm 29)."""
    bins = logits.shape[-1]
    centers = (torch.arange(bins, device=logits.device) + 0.5) / bins
    return 100 * (upcast_half(logits).softmax(-1) * centers).sum(-1)


def pae(logits: Tensor, breaks: Tensor) -> Tensor:
    """Return the expected aligned error: logits [*, N, N, bins], breaks [bins - 1] -> [*, N, N], angstrom, fp32.

    [i, j] is the error of residue j when prediction and truth are aligned on the frame of residue i (Supp. 1.9.7).
    """
    return _expected(upcast_half(logits).softmax(-1), _centers(breaks.to(logits.device)))


def max_pae(breaks: Tensor) -> float:
    """Return the largest value that `pae` can give, angstrom: the centre of the last bin."""
    return float(_centers(breaks)[-1])


@dataclass(frozen=True)
class Errors:
    """What the aligned-error head says of a prediction: of the frames of this process's residues, or of all."""

    pae: Tensor  # [I, N] in main memory, angstrom, fp32; I: this process's residues
    max_pae: float
    ptm: float  # the predicted TM-score, 0 to 1: that of the best frame (Supp. 1.9.7)
    iptm: float | None  # of a complex: over pairs in different chains, 0 where there is one (Multimer, sec. 2.6)
    # [C, C], symmetric: the ipTM of every two chains as if they were alone: the best frame of either, the errors of the
    # other chain's residues in it, and a d0 that follows from the residues of both.  On the diagonal each chain's pTM.
    chain_pair_iptm: Tensor | None


def predicted_errors(
    head: nn.Module,
    z: Tensor,
    execution: PlainExecution = PLAIN,
    asym_id: Tensor | None = None,
    length: int | None = None,
) -> Errors:
    """Run the aligned-error head on z [I, P, c_z], some rows at a time: its logits never exist for all.

    length: N, the true residues, which come first; the other P - N are padding, and count nowhere.  None: all.
    asym_id: int64 [N] on the device of z, of a complex; 1 to C, 0 for none.
    All processes that share the example call this.  The result has a row for each of the I residues of this process.
    """
    count, tm, padded = z.shape[-3], None, z.shape[-2]
    length = padded if length is None else length
    pae = torch.empty(count, length)
    found: dict[str, Tensor] = {}
    for rows in uniform_loop(execution.rows(count)):
        logits = upcast_half(head(execution.fetch(z, rows)[..., :length, :]))
        if tm is None:
            breaks = pae_breaks(logits.shape[-1]).to(logits.device)
            tm, centers = TMScores(breaks, length, asym_id, execution.residues, padded), _centers(breaks)
        probabilities = logits.softmax(-1)
        del logits
        pae[rows] = _expected(probabilities, centers).to("cpu", torch.float32)
        some = {"tm": tm.of_frames(probabilities, rows)}
        if asym_id is not None:
            some["between"] = tm.of_frames(probabilities, rows, between=True)
            some["chains"] = tm.of_chains(probabilities, rows)
        for name, part in some.items():
            if name not in found:
                found[name] = part.new_empty(count, *part.shape[1:])
            found[name][rows] = part
        del probabilities  # before the next are made
    assert tm is not None
    return Errors(
        pae=pae,
        max_pae=max_pae(breaks),
        ptm=float(tm.best(found["tm"])),
        iptm=None if asym_id is None else float(tm.best(found["between"])),
        chain_pair_iptm=None if asym_id is None else tm.best_of_chains(found["chains"]),
    )


def contact_probabilities(probabilities: Tensor, breaks: Tensor) -> Tensor:
    """Return the probability that beta carbons are nearer than `CONTACT`: distogram [*, bins] -> [*].

    Of the bins that end below it: with AlphaFold2's breaks [bins - 1] those up to 7.94 angstrom.
    """
    near = torch.cat([breaks, breaks.new_full((1,), torch.inf)]).to(probabilities.device) <= CONTACT
    return (probabilities * near).sum(-1)


def ranking_confidence(plddt: Tensor, ptm: Tensor | None = None, iptm: Tensor | None = None) -> Tensor:
    """Return the score that predictions are ranked by: with an ipTM 0.8 ipTM + 0.2 pTM, else the mean pLDDT (0 to 100).

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


def _score(breaks: Tensor, residues: int) -> Tensor:
    """Return the contribution of a residue with its error in each bin to the TM-score of so many residues: [bins]."""
    number = max(residues, 19)  # below 19 the TM-score's own d0 is not defined sensibly
    d0 = 1.24 * (number - 15) ** (1 / 3) - 1.8
    return 1 / (1 + (_centers(breaks) / d0) ** 2)


def _expected(probabilities: Tensor, values: Tensor) -> Tensor:
    """Return the mean over bins of what each is worth: [*, bins], values [bins] or [*, bins] -> [*]."""
    return (probabilities * values).sum(-1)


class TMScores:
    """Expected TM-scores of a prediction, from the probabilities of aligned errors of some frames at a time.

    breaks [bins - 1]; length: residues in all, N; asym_id [N]: 1 to C, 0 for none, or None for one chain; residues:
    those whose frames this process has, of which `rows` below are some; padded: residues with the padding behind them,
    whose frames have scores that `best` and `best_of_chains` leave out.
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
            of_frames = F.pad(asym_id, (0, self.padded - length))
            self._of_frames = residues.local_shard(of_frames, -1)  # the chain of each residue held here
            self._here: list[int] = self._of_frames.tolist()
            self._columns = [(asym_id == chain + 1).nonzero()[:, 0] for chain in range(int(asym_id.max()))]

    def of_frames(self, probabilities: Tensor, rows: slice, between: bool = False) -> Tensor:
        """Return the score of each frame [I] over all residues, given [I, N, bins].

        between: over those of other chains alone.
        """
        expected = _expected(probabilities, self._score)
        if not between:
            return expected.sum(-1) / (1e-8 + self.length)
        pairs = self._of_frames[rows, None] != self.asym_id
        return (expected * pairs).sum(-1) / (1e-8 + pairs.sum(-1))

    def best(self, per_frame: Tensor) -> Tensor:
        """Return the score of the best frame of all, given those of this process's."""
        return self.residues.all_gather(per_frame, -1, self.padded)[..., : self.length].max()

    def of_chains(self, probabilities: Tensor, rows: slice) -> Tensor:
        """Return the score of each frame over the residues of each chain: [I, C].

        As if there were no other chains than it and the frame's own.
        """
        here, sizes, per_frame = self._here[rows], [len(columns) for columns in self._columns], []
        for start, (chain, run) in zip(_starts(here), itertools.groupby(here)):
            some = probabilities[start : start + len(list(run))]
            if chain == 0:
                per_frame.append(some.new_zeros(len(some), len(sizes)))
                continue
            own = sizes[chain - 1]
            together = [own if other == chain else own + size for other, size in enumerate([0, *sizes])]
            scores = torch.stack([_score(self._breaks, size) for size in together])
            expected = _expected(some, scores[self.asym_id.long()])
            sums = [expected[:, columns].sum(-1) for columns in self._columns]
            per_frame.append(torch.stack([total / (1e-8 + size) for total, size in zip(sums, sizes)], -1))
        return torch.cat(per_frame) if per_frame else probabilities.new_zeros(0, len(sizes))

    def best_of_chains(self, per_frame: Tensor) -> Tensor:
        """Return the score of every two chains [C, C], that of the best frame of either, given those here."""
        per_frame = self.residues.all_gather(per_frame, -2, self.padded)
        best = per_frame.new_zeros(len(self._columns), len(self._columns))
        for chain, columns in enumerate(self._columns):
            best[chain] = per_frame[columns].amax(0)
        return torch.maximum(best, best.T)


def _starts(here: Sequence[int]) -> list[int]:
    """Return where the runs of equal numbers begin."""
    return [i for i, chain in enumerate(here) if i == 0 or chain != here[i - 1]]
