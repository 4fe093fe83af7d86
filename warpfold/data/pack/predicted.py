"""Pack predicted structures as examples (Supp. 1.3): select a file of each prediction, and read its confidence.

The files of supported programs are recognised by name (`formats/predictions.py`). Any other structure with pLDDT in its
B column is a separate prediction.
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

# Largest separation of the residue pairs that enter the confidence of a residue (Supp. 1.3).
MAX_SEPARATION = 128
# Smallest number of distograms for a reference. A reference of fewer would be dominated by each prediction itself.
MIN_REFERENCE = 30
# Largest number of distograms in the reference (Supp. 1.3).
MAX_REFERENCE = 1000
SAME = "another file of the same prediction is packed"
EARLIER = "the result of an earlier recycling pass"
LATER = "a later rank of its protein; the first is packed"
# The smallest positive float16. Smaller probabilities are 0 in files.
_MIN_PROBABILITY = 2.0**-24


@dataclass(frozen=True)
class PredictedFile:
    """A structure file of a prediction, with its files of PAE and distogram, if any.

    name: of the protein. why_not: the reason why another file of the prediction is packed instead. reference: of the KL
    filter, [MAX_SEPARATION, bins]; None if the filter is off.
    """

    name: str
    pae: Path | None = None
    distogram: Path | None = None
    why_not: str = ""
    reference: np.ndarray | None = None


def find_predictions(files: Sequence[InputFile], min_kl: float) -> dict[str, PredictedFile]:
    """Find the predictions among structure files by their names. Returns them by file name.

    Of the files of a protein, the best one is packed: rank 1 before others, unrelaxed before relaxed (pLDDT and PAE
    belong to the unrelaxed structure), mmCIF before PDB. min_kl: 0 to disable the KL filter.
    """
    parents = {file.path.parent for file in files}
    folders = {folder: {path.name: path for path in folder.iterdir()} for folder in parents}
    by_target: dict[str, list[tuple[tuple[int, ...], InputFile, PredictedFile]]] = {}
    for file in files:
        neighbours = folders[file.path.parent]
        named = parse_prediction_name(file.path, neighbours)
        why_not = EARLIER if named.is_pass else LATER if (named.rank or 1) > 1 else ""
        stem = file.path.name.removesuffix(".gz").rpartition(".")[0]
        prediction = PredictedFile(named.target, named.pae, neighbours.get(f"{stem}_distogram.npy"), why_not)
        order = bool(why_not), named.rank is None, -named.version, named.relaxed, is_pdb(file.path)
        by_target.setdefault(named.target, []).append((order, file, prediction))
    predictions: dict[str, PredictedFile] = {}
    for candidates in by_target.values():
        (_, best, first), *other_files = sorted(candidates, key=lambda candidate: (candidate[0], candidate[1].name))
        predictions[best.name] = first
        for _, file, other in other_files:
            predictions[file.name] = replace(other, why_not=other.why_not or SAME)
    packed = [prediction for prediction in predictions.values() if not prediction.why_not]
    distograms = [prediction.distogram for prediction in packed if prediction.distogram is not None]
    if min_kl > 0 and len(distograms) >= MIN_REFERENCE:
        reference = reference_distribution(distograms)
        predictions = {name: replace(prediction, reference=reference) for name, prediction in predictions.items()}
    return predictions


def confidence_files(predictions: Mapping[str, PredictedFile]) -> list[InputFile]:
    """List the files of PAE and distograms."""
    paths = [path for file in predictions.values() for path in (file.pae, file.distogram) if path is not None]
    return find(list(dict.fromkeys(paths)), (), "confidences") if paths else []


def with_confidence(
    structure: Structure, file: InputFile, predicted: PredictedFile, options: PackOptions
) -> tuple[Structure, dict[str, dict[str, float]]]:
    """Store the confidence of each residue in the b_factors of a prediction. Also returns the confidence of each chain.

    The confidence of a residue is its pLDDT; 0 without a pLDDT, and if the KL filter excludes the residue. The
    prediction gets no resolution, so that the confidence head is not trained on it (Supp. 1.9.6), and the name of the
    protein. The confidence of a chain has the means "plddt", "pae" (of all chains) and "kl", and the number of "masked"
    residues.
    Raises UserError for a B column without pLDDT, and for a PAE or distogram file that cannot be read.
    """
    plddt = np.concatenate([chain.b_factors for chain in structure.chains.values() if chain.b_factors is not None])
    values = plddt[np.isfinite(plddt)]
    if not len(values) or not 0 <= values.min() <= values.max() <= 100 or values.max() <= 1 or np.ptp(values) == 0:
        content = f"numbers from {values.min():g} to {values.max():g}" if len(values) else "nothing"
        raise UserError(f"{file.name}: its B column holds {content}, not pLDDT (0 to 100). Pass predicted structures.")
    confidence = np.nan_to_num(plddt, nan=0.0)
    pae, kl = None, None
    if predicted.pae is not None:
        pae = round(float(np.nanmean(read_pae(predicted.pae, np.isfinite(plddt), options.limit), dtype=float)), 2)
    if predicted.distogram is not None and predicted.reference is not None:
        distogram = read_distogram(predicted.distogram, len(plddt))
        if distogram.shape[-1] != (bins := predicted.reference.shape[-1]):
            raise UserError(
                f"{file.name}: its distogram has {distogram.shape[-1]} bins, others {bins}. Use one model for all."
            )
        kl = divergences(distogram, predicted.reference)
        confidence = np.where(kl < options.min_kl, 0, confidence)
    chains, by_chain, start = dict(structure.chains), dict[str, dict[str, float]](), 0
    for name, chain in structure.chains.items():
        rows = slice(start, start := start + len(chain.sequence))
        chains[name] = replace(chain, b_factors=confidence[rows].astype(np.float32))
        by_chain[name] = {
            "plddt": round(float(np.nanmean(plddt[rows])), 2),
            "masked": int((confidence[rows] < MIN_CONFIDENCE).sum()),
        }
        by_chain[name] |= {} if pae is None else {"pae": pae}
        by_chain[name] |= {} if kl is None else {"kl": round(float(kl[rows].mean()), 3)}
    return replace(structure, id=predicted.name, method="PREDICTED", resolution=None, chains=chains), by_chain


def read_distogram(path: Path, length: int | None = None) -> np.ndarray:
    """Open a distogram of `warpfold predict --distogram`: probabilities [N, N, bins].

    Raises UserError for other files, and for another number of residues.
    """
    try:
        distogram = np.load(path, mmap_mode="r", allow_pickle=False)
    except DAMAGED_ARRAYS as error:
        raise UserError(f"{path.name}: not a distogram ({error}). Predict it again.") from None
    n = distogram.shape[0] if length is None and distogram.ndim == 3 else length
    if distogram.dtype.kind == "f" and distogram.size and not 0 <= distogram.min() <= distogram.max() <= 1:
        raise UserError(f"{path.name}: a distogram with values that are not probabilities. Predict it again.")
    if distogram.dtype.kind != "f" or distogram.ndim != 3 or distogram.shape[:2] != (n, n):
        raise UserError(f"{path.name}: a distogram of shape {list(distogram.shape)}. Predict it again.")
    return distogram


def reference_distribution(distograms: Iterable[Path]) -> np.ndarray | None:
    """Compute the mean distance distribution at each separation of residues: [MAX_SEPARATION, bins] (Supp. 1.3).

    At most `MAX_REFERENCE` packed predictions are used, selected by a hash of their file names. The paper uses 1,000
    random sequences. A separation that does not occur has a uniform distribution. Returns None if no file can be read.
    """
    order = sorted(distograms, key=lambda path: blake2b(path.name.encode("utf-8", "surrogateescape")).digest())
    sums: np.ndarray | None = None
    for path in order[:MAX_REFERENCE]:
        try:
            distogram = read_distogram(path)
        except UserError:
            # The entry of this prediction reports the error.
            continue
        sums = np.zeros((MAX_SEPARATION, distogram.shape[-1])) if sums is None else sums
        for apart in range(1, min(MAX_SEPARATION + 1, len(distogram)) if distogram.shape[-1] == sums.shape[-1] else 1):
            sums[apart - 1] += np.diagonal(distogram, apart).sum(-1, dtype=np.float64)
    if sums is None:
        return None
    sums = sums + _MIN_PROBABILITY
    return sums / sums.sum(-1, keepdims=True)


def divergences(distogram: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Compute the confidence c of each residue: the mean Kullback-Leibler divergence of its pairs (Supp. 1.3).

    c_ij = D(reference of |i - j| || p_ij), and c_i is its mean over all j != i within MAX_SEPARATION. distogram
    [N, N, bins] -> [N].
    """
    length = len(distogram)
    sums, counts = np.zeros(length), np.zeros(length)
    for apart in range(1, min(MAX_SEPARATION + 1, length)):
        p = np.diagonal(distogram, apart).T.astype(np.float64) + _MIN_PROBABILITY  # [N - apart, bins]
        ratio = np.log(reference[apart - 1]) - np.log(p / p.sum(-1, keepdims=True))
        pairs = (reference[apart - 1] * ratio).sum(-1)
        for side in (slice(None, length - apart), slice(apart, None)):
            sums[side] += pairs
            counts[side] += 1
    return sums / np.maximum(counts, 1)
