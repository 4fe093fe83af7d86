"""Predicted structures as examples (Supp. 1.3): which file of a prediction is packed, and how sure its model was.

Those of programs that are known are told by their names (`formats/predictions.py`); any other structure with a pLDDT in
its B column is taken as it is.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np

from warpfold.data.example.raw_example import MIN_CONFIDENCE
from warpfold.data.formats.input_files import InputFile, find
from warpfold.data.formats.predictions import is_pdb, parse_prediction_name, read_pae
from warpfold.data.pack.options import PackOptions
from warpfold.data.structure.chain import Structure
from warpfold.errors import UserError
from warpfold.files import DAMAGED_ARRAYS

SPAN = 128  # residues: the confidence of one is the mean over the others within so many places of it (Supp. 1.3)
FEW = 30  # distograms of fewer predictions make no reference, which would be those predictions themselves
MOST = 1000  # distograms of which the reference is made (Supp. 1.3)
SAME = "another file of the same prediction is packed"
EARLIER = "what a pass before the last has found"
LATER = "a later rank of its protein; the first is packed"
_LEAST = 2.0**-24  # the smallest probability that float16 can hold: in files smaller ones are 0


@dataclass(frozen=True)
class PredictedFile:
    """A structure file of a prediction.  Paths are None where there is no such file.

    why_not: why it is not packed, since another file of the prediction is.  reference: of the KL filter, [SPAN, bins],
    None where it is not applied.
    """

    name: str  # of the protein
    pae: Path | None = None
    distogram: Path | None = None
    why_not: str = ""
    reference: np.ndarray | None = None


def find_predictions(files: Sequence[InputFile], min_kl: float) -> dict[str, PredictedFile]:
    """Say what each structure file is a prediction of, by the file's name.

    Of the files of one protein the best is packed: that of rank 1 before others, unrelaxed before relaxed (pLDDT and
    PAE are of that), mmCIF before PDB.  min_kl: 0 where the KL filter is not wanted.
    """
    folders = {folder: {one.name: one for one in folder.iterdir()} for folder in {file.path.parent for file in files}}
    found: dict[str, list[tuple[tuple[int, ...], InputFile, PredictedFile]]] = {}
    for file in files:
        beside = folders[file.path.parent]
        named = parse_prediction_name(file.path, beside)
        why_not = EARLIER if named.is_pass else LATER if (named.rank or 1) > 1 else ""
        stem = file.path.name.removesuffix(".gz").rpartition(".")[0]
        kept = PredictedFile(named.target, named.pae, beside.get(f"{stem}_distogram.npy"), why_not)
        order = bool(why_not), named.rank is None, -named.version, named.relaxed, is_pdb(file.path)
        found.setdefault(named.target, []).append((order, file, kept))
    chosen: dict[str, PredictedFile] = {}
    for each in found.values():
        (_, best, first), *others = sorted(each, key=lambda one: (one[0], one[1].name))
        chosen[best.name] = first
        for _, file, other in others:
            chosen[file.name] = replace(other, why_not=other.why_not or SAME)
    distograms = [one.distogram for one in chosen.values() if one.distogram is not None and not one.why_not]
    if min_kl > 0 and len(distograms) >= FEW:
        reference = reference_of(distograms)
        chosen = {file: replace(one, reference=reference) for file, one in chosen.items()}
    return chosen


def files_beside(predictions: Mapping[str, PredictedFile]) -> list[InputFile]:
    """Return the files that are read beside structures."""
    paths = (path for one in predictions.values() for path in (one.pae, one.distogram) if path is not None)
    every = list(dict.fromkeys(paths))
    return find(every, (), "confidences") if every else []


def with_confidence(
    structure: Structure, file: InputFile, predicted: PredictedFile, options: PackOptions
) -> tuple[Structure, dict[str, dict[str, float]]]:
    """Return a prediction with the confidence of each residue as its chains' b_factors, and what the report says.

    That is the pLDDT; 0 where there is none, and where the KL filter leaves a residue out.  It has no resolution, so
    that no confidence is learnt from it (Supp. 1.9.6), and its name is the protein's.  Said of each chain are the means
    "plddt", "pae" (of all chains) and "kl", and how many residues are "masked".
    Errors: UserError for a B column that holds no pLDDT, and for a PAE or a distogram that cannot be read.
    """
    plddt = np.concatenate([chain.b_factors for chain in structure.chains.values() if chain.b_factors is not None])
    known = plddt[np.isfinite(plddt)]
    if not len(known) or not 0 <= known.min() <= known.max() <= 100 or known.max() <= 1 or np.ptp(known) == 0:
        what = f"numbers from {known.min():g} to {known.max():g}" if len(known) else "nothing"
        raise UserError(f"{file.name}: its B column holds {what}, and no pLDDT (0 to 100). Pass predicted structures")
    confidence = np.nan_to_num(plddt, nan=0.0)
    pae, kl = None, None
    if predicted.pae is not None:
        pae = round(float(np.nanmean(read_pae(predicted.pae, np.isfinite(plddt), options.limit), dtype=float)), 2)
    if predicted.distogram is not None and predicted.reference is not None:
        distogram = read_distogram(predicted.distogram, len(plddt))
        if distogram.shape[-1] != (bins := predicted.reference.shape[-1]):
            raise UserError(f"{file.name}: its distogram has {distogram.shape[-1]} bins, others {bins}. Fold all alike")
        kl = divergences(distogram, predicted.reference)
        confidence = np.where(kl < options.min_kl, 0, confidence)
    chains, said, start = dict(structure.chains), dict[str, dict[str, float]](), 0
    for name, chain in structure.chains.items():
        own = slice(start, start := start + len(chain.sequence))
        chains[name] = replace(chain, b_factors=confidence[own].astype(np.float32))
        said[name] = {
            "plddt": round(float(np.nanmean(plddt[own])), 2),
            "masked": int((confidence[own] < MIN_CONFIDENCE).sum()),
        }
        said[name] |= {} if pae is None else {"pae": pae}
        said[name] |= {} if kl is None else {"kl": round(float(kl[own].mean()), 3)}
    return replace(structure, id=predicted.name, method="PREDICTED", resolution=None, chains=chains), said


def read_distogram(path: Path, length: int | None = None) -> np.ndarray:
    """Open a distogram as `warpfold predict --distogram` writes it: probabilities [N, N, bins].

    Errors: UserError for anything else, and for one of another number of residues.
    """
    try:
        distogram = np.load(path, mmap_mode="r", allow_pickle=False)
    except DAMAGED_ARRAYS as error:
        raise UserError(f"{path.name}: not a distogram ({error}). Predict it again") from None
    n = distogram.shape[0] if length is None and distogram.ndim == 3 else length
    if distogram.dtype.kind == "f" and distogram.size and not 0 <= distogram.min() <= distogram.max() <= 1:
        raise UserError(f"{path.name}: a distogram whose probabilities are none. Predict it again")
    if distogram.dtype.kind != "f" or distogram.ndim != 3 or distogram.shape[:2] != (n, n):
        raise UserError(f"{path.name}: a distogram of shape {list(distogram.shape)}. Predict it again")
    return distogram


def reference_of(distograms: Iterable[Path]) -> np.ndarray | None:
    """Return the mean distribution of distances at each separation from 1 to SPAN: [SPAN, bins] (Supp. 1.3).

    Of the predictions that are packed, `MOST` of them at most, which the names of their files choose; the paper's is of
    1,000 random sequences.  A separation that none of them has stays uniform.  None if no file can be read.
    """
    order = sorted(distograms, key=lambda path: blake2b(path.name.encode("utf-8", "surrogateescape")).digest())
    sums: np.ndarray | None = None
    for path in order[:MOST]:
        try:
            distogram = read_distogram(path)
        except UserError:  # its own entry will say so
            continue
        sums = np.zeros((SPAN, distogram.shape[-1])) if sums is None else sums
        for apart in range(1, min(SPAN + 1, len(distogram)) if distogram.shape[-1] == sums.shape[-1] else 1):
            sums[apart - 1] += np.diagonal(distogram, apart).sum(-1, dtype=np.float64)
    if sums is None:
        return None
    sums = sums + _LEAST
    return sums / sums.sum(-1, keepdims=True)


def divergences(distogram: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return the confidence c of each residue: the mean Kullback-Leibler divergence of its pairs (Supp. 1.3).

    c_ij = D(reference of |i - j| || p_ij); c_i is its mean over all j != i within SPAN.  distogram [N, N, bins] -> [N].
    """
    length = len(distogram)
    sums, counts = np.zeros(length), np.zeros(length)
    for apart in range(1, min(SPAN + 1, length)):
        p = np.diagonal(distogram, apart).T.astype(np.float64) + _LEAST  # [N - apart, bins]
        ratio = np.log(reference[apart - 1]) - np.log(p / p.sum(-1, keepdims=True))
        pairs = (reference[apart - 1] * ratio).sum(-1)
        for side in (slice(None, length - apart), slice(apart, None)):
            sums[side] += pairs
            counts[side] += 1
    return sums / np.maximum(counts, 1)
