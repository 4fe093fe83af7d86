"""Read how sure a model was, pLDDT and PAE, and compare that with what came true.

What is summed here is of residues or of pairs of them, in bins of the confidence, so that sums of targets add up.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.data.structure.chain import Chain
from warpfold.files import read_file
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.scoring.score import Paired

PLDDT_BINS = np.linspace(0, 100, 21)
PAE_BINS = np.arange(33.0)  # angstrom
MAX_PAE = 31.75  # the largest error that AlphaFold2 can expect: larger true errors count as this
N, CA, C = (ATOM_ORDER[name] for name in ("N", "CA", "C"))
Array = np.ndarray


@dataclass(frozen=True)
class Sums:
    """Expected and true values, summed in bins of what was expected: counts and sums [B], and squares over all.

    A residue or a pair counts once, whatever target it is of.
    """

    count: Array
    expected: Array
    true: Array
    squares: Array  # [3]: of the sums of expected**2, true**2, expected * true

    @classmethod
    def of(cls, expected: Array, true: Array, bins: Array) -> "Sums":
        """Sum values [N] in bins between the limits `bins` [B + 1]; what lies beyond counts in the last one."""
        place = np.clip(np.searchsorted(bins, expected, "right") - 1, 0, len(bins) - 2)
        count, *sums = (np.bincount(place, weights, len(bins) - 1) for weights in (None, expected, true))
        return cls(count, sums[0], sums[1], np.array([expected @ expected, true @ true, expected @ true], float))

    def __add__(self, other: "Sums") -> "Sums":
        pairs = ((getattr(self, one.name), getattr(other, one.name)) for one in fields(self))
        return Sums(*(ours + theirs for ours, theirs in pairs))

    def to_dict(self) -> dict[str, Any]:
        """Return what the bins say, as JSON can hold it: the mean gap between expected and true, and their correlation.

        error: the mean over all of |expected - true| of the bin that each is in (expected calibration error).  bias:
        mean expected - mean true, positive where the model is too sure (of pLDDT) or too careful (of PAE).
        """
        n = float(self.count.sum())
        filled = self.count > 0
        expected, true = (sums[filled] / self.count[filled] for sums in (self.expected, self.true))
        means = np.array([self.expected.sum(), self.true.sum()]) / n
        varying = self.squares[:2] / n - means**2
        spread = float(np.sqrt(np.prod(np.maximum(varying, 0))))
        together = float(self.squares[2] / n - np.prod(means))
        return {
            "count": int(n),
            "error": float(np.sum(self.count[filled] * np.abs(expected - true)) / n),
            "bias": float(means[0] - means[1]),
            "correlation": together / spread if spread > 1e-12 else None,
            "bins": [
                {"count": int(count), "expected": float(x), "true": float(y)}
                for count, x, y in zip(self.count[filled], expected, true)
            ],
        }


def plddt_of(chains: Mapping[str, Chain], written: bool = True) -> tuple[dict[str, Array] | None, str]:
    """Return pLDDT [N] of each chain's residues, 0 to 100, NaN without atoms; or None, and why it is not known.

    written: the program is known to write it; else one value throughout is taken for none.
    """
    found = {name: chain.b_factors for name, chain in chains.items() if chain.b_factors is not None}
    values = np.concatenate([b[chains[name].mask[:, CA] > 0] for name, b in found.items()] or [np.zeros(0)])
    if not len(values) or not np.isfinite(values).all():
        return None, "its file has no B column"
    low, high = float(values.min()), float(values.max())
    if low < 0 or high > 100 or (low == high and not written):
        said = f"is {low:g} throughout" if low == high else f"goes from {low:g} to {high:g}, not from 0 to 100"
        return None, f"its B column {said}"
    scale = 100 if high <= 1 else 1  # some programs write 0 to 1
    return {name: scale * b.astype(np.float64) for name, b in found.items()}, ""


def alignment_rows(alignments: Sequence[Path]) -> int | None:
    """Count the rows of alignments, A3M or Stockholm, of all files together; None without any."""
    if not alignments:
        return None
    rows = 0
    for data in map(read_file, alignments):
        if data.startswith(b"# STOCKHOLM"):
            rows += len(set(re.findall(rb"^([^\s#/]\S*) +\S", data, re.MULTILINE)))
        else:
            rows += len(re.findall(rb"^>", data, re.MULTILINE))
    return rows


def plddt_sums(paired: Paired, plddt: Mapping[str, Array]) -> Sums:
    """Compare pLDDT with lDDT-Ca, both 0 to 100, of the residues that both structures have."""
    lddt = 100 * paired.lddt_ca_per_residue()
    expected = np.concatenate(
        [
            np.where(side.predicted_residue >= 0, plddt[name][side.predicted_residue], np.nan)
            for name, side in paired.atoms.items()
        ]
    )
    both = np.isfinite(lddt) & np.isfinite(expected) & paired.arrays[1][:, CA]
    return Sums.of(expected[both], lddt[both], PLDDT_BINS)


def pae_sums(paired: Paired, pae: Array) -> Sums:
    """Compare PAE with the true aligned errors of all pairs of residues that both structures have (Supp. 1.9.7).

    The error of j seen from i is how far its Ca lies from the true one when the backbone frames (N, Ca, C) of i lie on
    one another.  pae [N, N]: of all residues of the prediction's chains, in the order of its file.
    """
    starts, start = {}, 0
    for name, chain in paired.predicted.chains.items():
        starts[name] = start
        start += len(chain.sequence)
    place = np.concatenate(
        [
            np.where(side.predicted_residue >= 0, side.predicted_residue + starts[name], -1)
            for name, side in paired.atoms.items()
        ]
    )
    positions, known, truth, mask, _ = paired.arrays
    scored = known[:, CA] & (place >= 0)
    aligned = (known & mask)[:, [N, CA, C]].all(-1) & (place >= 0)
    seen = [_seen_from(_frames(x[aligned]), x[scored, CA].astype(np.float64)) for x in (positions, truth)]
    error = np.minimum(np.linalg.norm(seen[0] - seen[1], axis=-1), MAX_PAE)
    expected = pae[np.ix_(place[aligned], place[scored])]
    apart = place[aligned][:, None] != place[scored]  # of a residue from itself the error is 0, and is known to be
    return Sums.of(expected[apart].astype(np.float64), error[apart], PAE_BINS)


def _frames(positions: Array) -> tuple[Array, Array]:
    """Return the axes [K, 3, 3], as columns, and the origins [K, 3] of backbones [K, 37, 3] (Algorithm 21)."""
    n, ca, c = (positions[:, atom].astype(np.float64) for atom in (N, CA, C))
    first = (c - ca) / np.linalg.norm(c - ca, axis=-1, keepdims=True)
    second = n - ca - first * np.sum(first * (n - ca), -1, keepdims=True)
    second /= np.linalg.norm(second, axis=-1, keepdims=True)
    return np.stack([first, second, np.cross(first, second)], -1), ca


def _seen_from(frames: tuple[Array, Array], points: Array) -> Array:
    """Return points [M, 3] in the coordinates of each frame: [K, M, 3]."""
    axes, origins = frames
    return (points[None] - origins[:, None]) @ axes
