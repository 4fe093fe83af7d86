"""Score one prediction against its reference structure and build its row of the results table."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from warpfold.data.formats.predictions import read_pae
from warpfold.data.structure.mmcif import parse_structure
from warpfold.errors import UserError, listed
from warpfold.evaluation.confidence import CA, Sums, alignment_rows, pae_sums, plddt_sums, read_plddt
from warpfold.evaluation.layouts import PredictedFile
from warpfold.evaluation.truths import REMEDY, Truth
from warpfold.files import read_file, within_memory
from warpfold.prediction.sanity import check_geometry
from warpfold.scoring.score import Paired, assembled, pair

# The columns of one prediction in the results table.
Row = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """Options of a comparison with reference structures.

    assembly: compare with the first biological assembly of the reference. chains: pairs or groups of chains, as in
    `scoring.score.pair`. allow_unplaced: score although residues of a file belong to none of its chains.
    """

    assembly: bool = False
    chains: Mapping[str, str] | None = None
    allow_unplaced: bool = False


@dataclass(frozen=True)
class Job:
    """A prediction, its reference structure, and the options of their comparison."""

    prediction: PredictedFile
    truth: Truth
    options: Comparison = Comparison()


@dataclass(frozen=True)
class Measured:
    """The result of a job. error: the reason why it could not be scored, in which case there is nothing else."""

    job: Job
    row: Row = field(default_factory=dict)
    plddt: Sums | None = None
    pae: Sums | None = None
    error: str | None = None


def read_pair(job: Job) -> tuple[Paired, str, str]:
    """Read and pair the two structures of a job; returns them and the SHA-256 of each uncompressed file.

    Raises UserError for unreadable files and for structures without similar chains.
    """
    options, predicted_path, truth_path = job.options, job.prediction.path, job.truth.path
    predicted_data, truth_data = read_file(predicted_path), read_file(truth_path)
    predicted = parse_structure(predicted_data, str(predicted_path), ca_only=True)
    if not options.allow_unplaced:
        predicted.check_placed(str(predicted_path), REMEDY)
    truth = job.truth.parse(truth_data, options.allow_unplaced)
    try:
        paired = pair(predicted, assembled(truth) if options.assembly else truth, options.chains)
    except UserError as error:
        raise UserError(f"{predicted_path} against {truth_path}: {error}") from error
    return paired, hashlib.sha256(predicted_data).hexdigest(), hashlib.sha256(truth_data).hexdigest()


def measure(job: Job) -> Measured:
    """Score one prediction. A problem with its files becomes the result's `error`, so the other jobs continue."""
    try:
        with within_memory(str(job.prediction.path)):
            return _measure(job)
    except UserError as error:
        return Measured(job, error=str(error))


def _measure(job: Job) -> Measured:
    file = job.prediction
    paired, digest, truth_digest = read_pair(job)
    predicted, score = paired.predicted, paired.score()
    if np.isnan(score.lddt_ca):
        raise UserError(f"{job.truth.path}: no two Ca atoms are near enough for lDDT. Use a larger structure")
    notes, complex_score = [*score.notes, *pairing_notes(paired)], score.complex
    plddt, reason = read_plddt(predicted.chains, file.writes_plddt)
    notes += [f"no pLDDT: {reason}"] if reason else []
    chains, pae = predicted.chains.values(), None
    mask = np.concatenate([chain.mask for chain in chains])
    if file.pae is not None:
        try:
            pae = pae_sums(paired, read_pae(file.pae, mask[:, CA] > 0))
        except UserError as error:
            notes.append(f"no PAE: {error}")
    geometry = check_geometry(
        np.concatenate([chain.positions for chain in chains]),
        mask,
        np.repeat(np.arange(len(chains)), [len(chain.sequence) for chain in chains]),
    )
    ca_plddt = [] if plddt is None else [plddt[name][chain.mask[:, CA] > 0] for name, chain in predicted.chains.items()]
    interfaces = complex_score.interfaces if complex_score else ()
    row: Row = {
        "target": file.target,
        "model": file.model,
        "rank": file.rank,
        "residues": score.residues,
        "paired": score.paired,
        "coverage": score.paired / score.residues,
        "identity": score.identity,
        "lddt": score.lddt,
        "lddt_ca": score.lddt_ca,
        "gdt_ts": score.gdt_ts,
        "gdt_ha": score.gdt_ha,
        "tm": score.tm,
        "rmsd": None if np.isnan(score.rmsd) else score.rmsd,
        **{name: getattr(complex_score, name, None) for name in ("dockq", "ilddt", "qs_global", "ics", "ips")},
        "interfaces": [asdict(interface) for interface in interfaces],
        "plddt": float(np.mean(np.concatenate(ca_plddt))) if ca_plddt else None,
        "clashes": geometry.clashes,
        "chain_breaks": geometry.chain_breaks,
        "depth": file.depth if file.depth is not None else alignment_rows(file.alignments),
        "length": len(mask),
        "chains": {p: r for p, r in score.chains.items()},
        "notes": notes,
        "prediction": str(file.path),
        "prediction_sha256": digest,
        "truth": str(job.truth.path),
        "truth_chains": [*paired.reference.chains],
        "truth_sha256": truth_digest,
        "released": None if paired.reference.release_date is None else str(paired.reference.release_date),
        "sequences": [chain.sequence for chain in paired.reference.chains.values()],
    }
    return Measured(job, row, None if plddt is None else plddt_sums(paired, plddt), pae)


def pairing_notes(paired: Paired) -> list[str]:
    """Describe unusual pairings of residues: different numbers, gaps, different amino acids, unpaired chains."""
    notes = []
    for name, atoms in paired.atoms.items():
        model, truth = paired.predicted.chains[name], paired.reference.chains[paired.chains[name]]
        prefix = f"chain {name}: " if len(paired.atoms) > 1 else ""
        is_paired = atoms.predicted_residue >= 0
        if missing := int((~is_paired).sum()):
            notes.append(f"{prefix}residues of the truth that the prediction lacks: {missing} of {len(is_paired)}")
        if unscored := int((model.mask[:, CA] > 0).sum()) - int(is_paired.sum()):
            notes.append(f"{prefix}predicted residues that the truth lacks, not scored: {unscored}")
        if different := int(is_paired.sum()) - atoms.equal:
            notes.append(f"{prefix}other amino acids than in the truth: {different}")
        numbers = [
            (model.author_numbers[i], truth.author_numbers[j])
            for i, j in zip(atoms.predicted_residue[is_paired], atoms.reference_residue[is_paired])
        ]
        if any(a != b for a, b in numbers):
            # Insertion codes and missing numbers have no difference.
            is_plain = all(number.lstrip("-").isdecimal() for both_numbers in numbers for number in both_numbers)
            shifts = {int(b) - int(a) for a, b in numbers} if is_plain else set()
            if len(shifts) == 1:
                shift = shifts.pop()
                higher = "higher" if shift > 0 else "lower"
                notes.append(f"{prefix}the truth's residues are numbered {abs(shift)} {higher}")
            else:
                notes.append(f"{prefix}residues are numbered differently in the truth and paired by sequence")
    left_out = [name for name in paired.reference.chains if name not in paired.chains.values()]
    extra = [name for name in paired.predicted.chains if name not in paired.chains]
    notes += [f"chains of the truth without a counterpart: {listed(left_out)}"] if left_out else []
    notes += [f"predicted chains without a counterpart: {listed(extra)}"] if extra else []
    return notes
