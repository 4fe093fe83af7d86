"""Score one prediction against its truth, with all that a row of the table says of it."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from warpfold.data.formats.predictions import read_pae
from warpfold.data.structure.mmcif import parse_structure
from warpfold.errors import UserError, listed
from warpfold.evaluation.confidence import CA, Sums, alignment_rows, pae_sums, plddt_of, plddt_sums
from warpfold.evaluation.layouts import PredictedFile
from warpfold.evaluation.truths import REMEDY, Truth
from warpfold.files import read_file, within_memory
from warpfold.prediction.sanity import check_geometry
from warpfold.scoring.score import Paired, assembled, pair

Row = dict[str, Any]  # what is known of one prediction


@dataclass(frozen=True)
class Comparison:
    """How predictions are compared with their truths.

    assembly: with the first biological assembly of the truth. chains: pairs or groups, as in `scoring.score.pair`.
    allow_unplaced: although residues of a file are in none of its chains.
    """

    assembly: bool = False
    chains: Mapping[str, str] | None = None
    allow_unplaced: bool = False


@dataclass(frozen=True)
class Job:
    """A prediction, its truth, and how they are compared."""

    prediction: PredictedFile
    truth: Truth
    how: Comparison = Comparison()


@dataclass(frozen=True)
class Measured:
    """What a job found; error: why it could not be scored, and then nothing else is there."""

    job: Job
    row: Row = field(default_factory=dict)
    plddt: Sums | None = None
    pae: Sums | None = None
    error: str | None = None


def read_pair(job: Job) -> tuple[Paired, str, str]:
    """Read and pair the two structures of a job; return them and the SHA-256 of each file, unpacked.

    Errors: UserError for files that cannot be read or have nothing in common.
    """
    data = read_file(job.prediction.path), read_file(job.truth.path)
    predicted = parse_structure(data[0], str(job.prediction.path), ca_only=True)
    how = job.how
    if not how.allow_unplaced:
        predicted.check_placed(str(job.prediction.path), REMEDY)
    truth = job.truth.parse(data[1], how.allow_unplaced)
    try:
        paired = pair(predicted, assembled(truth) if how.assembly else truth, how.chains)
    except UserError as error:
        raise UserError(f"{job.prediction.path} against {job.truth.path}: {error}") from error
    return paired, *(hashlib.sha256(one).hexdigest() for one in data)  # type: ignore[return-value]


def measure(job: Job) -> Measured:
    """Score one prediction.  What is at fault with its files is the result's `error`, so that others go on."""
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
        raise UserError(f"{job.truth.path}: no two Ca of it are near enough to be scored")
    notes, complex_score = [*score.notes, *notes_of(paired)], score.complex
    plddt, why_not = plddt_of(predicted.chains, file.writes_plddt)
    notes += [f"no pLDDT: {why_not}"] if why_not else []
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
    known = [] if plddt is None else [plddt[name][chain.mask[:, CA] > 0] for name, chain in predicted.chains.items()]
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
        "plddt": float(np.mean(np.concatenate(known))) if known else None,
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


def notes_of(paired: Paired) -> list[str]:
    """Say how the residues of two structures correspond, where that is not plain: numbers, gaps, other amino acids."""
    notes = []
    for name, side in paired.atoms.items():
        ours, theirs = paired.predicted.chains[name], paired.reference.chains[paired.chains[name]]
        of = f"chain {name}: " if len(paired.atoms) > 1 else ""
        both = side.predicted_residue >= 0
        if missing := int((~both).sum()):
            notes.append(f"{of}residues of the truth that the prediction lacks: {missing} of {len(both)}")
        if unseen := int((ours.mask[:, CA] > 0).sum()) - int(both.sum()):
            notes.append(f"{of}predicted residues that the truth lacks, not scored: {unseen}")
        if others := int(both.sum()) - side.equal:
            notes.append(f"{of}other amino acids than in the truth: {others}")
        if said := _numbering(
            [ours.author_numbers[i] for i in side.predicted_residue[both]],
            [theirs.author_numbers[j] for j in side.reference_residue[both]],
        ):
            notes.append(of + said)
    left_out = [name for name in paired.reference.chains if name not in paired.chains.values()]
    extra = [name for name in paired.predicted.chains if name not in paired.chains]
    notes += [f"chains of the truth without a counterpart: {listed(left_out)}"] if left_out else []
    notes += [f"predicted chains without a counterpart: {listed(extra)}"] if extra else []
    return notes


def _numbering(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Say how the numbers of paired residues differ; nothing if they do not."""
    if list(ours) == list(theirs) or not ours:
        return ""
    plain = all(number.lstrip("-").isdecimal() for number in (*ours, *theirs))  # no insertion codes, none lacking
    shifts = {int(b) - int(a) for a, b in zip(ours, theirs)} if plain else set()
    if len(shifts) == 1:
        shift = shifts.pop()
        return f"the truth's residues are numbered {abs(shift)} {'higher' if shift > 0 else 'lower'}"
    return "residues are numbered otherwise in the truth, and paired by sequence"
