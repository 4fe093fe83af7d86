"""Score folders of predictions against a folder of reference structures, and compare them (docs/howto/score.md)."""

import functools
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from warpfold.bulk import JobPart, in_order, pool
from warpfold.data.formats.alignment import parse_fasta
from warpfold.data.similar.relatives import nearest_identities
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import StoredExample, entry_keys
from warpfold.errors import UserError, listed, printable
from warpfold.evaluation import tables
from warpfold.evaluation.layouts import PredictedFile, Predictions, find_predictions
from warpfold.evaluation.measure import Comparison, Job, Measured, Row, measure
from warpfold.evaluation.parts import jobs_fingerprint, parts_with, read_parts, write_part
from warpfold.evaluation.suite import Entry, Suite, write_suite
from warpfold.evaluation.truths import Truths, target_key
from warpfold.files import read_file
from warpfold.progress import Progress
from warpfold.scoring.metrics import LDDT_RADIUS, LDDT_TOLERANCES

FORMAT = "warpfold-evaluation-1"
_TOLERANCES = ", ".join(f"{tolerance:g}" for tolerance in LDDT_TOLERANCES)
_LDDT = f"pairs of other residues nearer than {LDDT_RADIUS:g} A in the truth, within {_TOLERANCES} A"
DEFINITIONS = {
    "lddt": f"lDDT (Mariani et al. 2013) of all heavy atoms that the truth has: {_LDDT}; symmetric side chains named "
    "for the best score; no stereochemical checks; atoms that the prediction lacks count as wrong",
    "lddt_ca": f"the same of Ca alone: {_LDDT}",
    "tm": "TM-score of Ca paired by sequence, normalised by the truth's residues; the TM-score program's search",
    "gdt_ts": "share of Ca within 1, 2, 4 and 8 A, mean of the four; the TM-score program's search",
    "gdt_ha": "share of Ca within 0.5, 1, 2 and 4 A, mean of the four",
    "rmsd": "A, over paired Ca after their best superposition",
    "dockq": "DockQ (version 2), mean over the interfaces of the truth; an interface that lacks a chain counts 0",
    "ilddt": "lDDT of pairs of atoms of different chains",
    "qs_global": "QS-score of all contacts (Bertoni et al. 2017)",
    "ics": "F1 of the contacts between chains",
    "ips": "Jaccard index of the residues in contact",
    "coverage": "residues of the truth with Ca that the prediction has",
    "plddt": "mean predicted lDDT-Ca, 0 to 100, of all residues of the prediction",
    "clashes": "pairs of atoms of different residues that overlap by more than 1.5 A",
    "chain_breaks": "neighbours whose Ca are not 2.6 to 4.2 A apart",
}


@dataclass
class PredictionSet:
    """A folder of predictions and its results.

    measured: the scored predictions of all models. failures: target -> error. without_truth: predicted targets without
    a reference structure. without_prediction: reference structures without a prediction.
    """

    name: str
    predictions: Predictions
    jobs: list[Job] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    without_truth: list[str] = field(default_factory=list)
    without_prediction: list[str] = field(default_factory=list)

    @property
    def best(self) -> list[Measured]:
        """The best model of each target by its program's ranking: the predictions that enter the means."""
        first: dict[str, Measured] = {}
        for result in self.measured:
            first.setdefault(target_key(result.job.truth.name), result)
        return list(first.values())

    def by_target(self) -> dict[str, Row]:
        """Return the row of each target's best model."""
        return {target_key(result.job.truth.name): result.row for result in self.best}

    def to_dict(self, seed: int) -> dict[str, Any]:
        """Summarise the set for JSON. seed: of the bootstrap intervals."""
        best = self.best
        rows = [result.row for result in best]
        sums = {kind: [s for s in (getattr(m, kind) for m in best) if s is not None] for kind in ("plddt", "pae")}
        return {
            "name": self.name,
            "folder": str(self.predictions.folder),
            "layout": self.predictions.layouts,
            "targets": len(rows),
            "means": tables.means(rows, seed),
            "groups": {by: groups for by in tables.GROUPS if (groups := tables.groups(rows, by))},
            "calibration": {
                kind: total.to_dict()
                for kind, parts in sums.items()
                if parts and (total := functools.reduce(operator.add, parts)).count.any()
            },
            "failures": [{"target": name, "error": error} for name, error in self.failures.items()],
            "without_truth": self.without_truth,
            "without_prediction": self.without_prediction,
            "rows": [{key: value for key, value in m.row.items() if key != "sequences"} for m in self.measured],
        }


def evaluate(
    folders: Sequence[Path],
    truth: Path,
    *,
    suite: Suite | None,
    train_sequences: Path | None,
    all_models: bool,
    options: Comparison,
    workers: int,
    cluster: str | None = None,
    part: JobPart | None = None,
    out: Path | None = None,
    progress: Progress,
) -> tuple[list[PredictionSet], dict[str, Any]]:
    """Score the predictions of each folder against the structures in `truth`.

    suite: restricts the targets. train_sequences: a store or FASTA file; each row gets the identity with its nearest
    training sequence. all_models: score all models of a target instead of the best one. workers, cluster: see
    `bulk.pool`.
    part: score only this part of the predictions and keep the results in the folder `out`. While other parts are
    missing, the second return value is a report of the progress and the sets have no scores; otherwise it is empty.
    Raises UserError for missing folders, folders without common targets, and files that differ from the suite's.
    """
    truths = Truths(truth)
    if suite is not None:
        truths.keep(suite)
    names = [printable(folder.resolve().name) for folder in folders]
    names = [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders)]
    sets = [PredictionSet(name, find_predictions(folder, all_models)) for name, folder in zip(names, folders)]
    for prediction_set in sets:
        _assign_truths(prediction_set, truths, options)
    jobs = [job for prediction_set in sets for job in prediction_set.jobs]
    fingerprint = jobs_fingerprint(jobs)
    results = {} if out is None else read_parts(out, fingerprint, jobs)
    selected = range(len(jobs)) if part is None else part.of(range(len(jobs)))
    pending = [index for index in selected if index not in results]
    with pool(min(workers, len(pending)), cluster) as executor:
        scored = in_order(measure, [jobs[index] for index in pending], executor)
        for done, (index, result) in enumerate(zip(pending, scored)):
            results[index] = result
            progress(done, len(pending), f"scored {jobs[index].prediction.target}")
    if part is not None:
        assert out is not None
        if pending:
            write_part(out, fingerprint, part, {index: results[index] for index in selected})
        # Other tasks of the job array may have finished since the parts were read.
        results |= read_parts(out, fingerprint, jobs)
        if missing := [index for index in range(len(jobs)) if index not in results]:
            outcomes = [(jobs[index].prediction.target, results[index].error) for index in selected]
            return sets, {
                "format": FORMAT,
                "status": "running",
                "part": str(part),
                "predictions": len(selected),
                "failures": [{"target": name, "error": error} for name, error in outcomes if error is not None],
                "left": parts_with(missing, part.count),
            }
    next_result = iter(results[index] for index in range(len(jobs)))
    for prediction_set in sets:
        for _ in prediction_set.jobs:
            result = next(next_result)
            target = result.job.prediction.target
            if result.error is not None:
                prediction_set.failures.setdefault(target, result.error)
            # The best rank of a target comes first. If it cannot be scored, the target is a failure, and no other rank
            # replaces it in the means.
            elif target not in prediction_set.failures:
                prediction_set.measured.append(result)
        if not prediction_set.measured:
            errors = list(prediction_set.failures.values())
            summary = f"none of {len(errors)} targets could be scored: {errors[0]}"
            raise UserError(f"{prediction_set.predictions.folder}: {summary}" if len(errors) > 1 else errors[0])
    _add_train_identity(sets, train_sequences, workers)
    return sets, {}


def _assign_truths(prediction_set: PredictionSet, truths: Truths, options: Comparison) -> None:
    """Find the reference structure of each prediction of a set, and list targets that lack one or the other."""
    predictions = prediction_set.predictions
    folder = predictions.folder
    assigned: dict[tuple[Path, tuple[str, ...]], PredictedFile] = {}
    for file in predictions.files:
        truth = truths.find(file.names)
        if truth is None:
            prediction_set.without_truth.append(file.target)
            continue
        first = assigned.setdefault((truth.path, truth.chains), file)
        if target_key(first.target) != target_key(file.target):
            paths = f"{os.path.relpath(first.path, folder)} and {os.path.relpath(file.path, folder)}"
            raise UserError(f"{folder}: {paths} are both predictions of {truth.name}. Keep one of them")
        prediction_set.jobs.append(Job(file, truth, options))
    prediction_set.failures |= {name: error for name, error in predictions.failures.items() if truths.find([name])}
    if not prediction_set.jobs:
        predicted = listed([file.target for file in predictions.files] or [*predictions.failures], 3)
        available = listed([truth.name for truth in truths.by_name.values()], 3)
        raise UserError(f"{folder}: none of its targets ({predicted}) is among those of {truths.folder} ({available})")
    tried = [job.truth for job in prediction_set.jobs]
    prediction_set.without_prediction = [name for name in truths.without(tried) if name not in prediction_set.failures]


def _add_train_identity(sets: Sequence[PredictionSet], train_sequences: Path | None, workers: int) -> None:
    """Add to each row the highest identity of its chains with a training sequence; None without training sequences."""
    rows = [result.row for prediction_set in sets for result in prediction_set.measured]
    identities: Mapping[str, float] = {}
    if train_sequences is not None:
        if train_sequences.is_dir():
            store = Store(train_sequences)
            training = [StoredExample(store, key).sequence for key in entry_keys(store, assemblies=False)]
        else:
            records = parse_fasta(read_file(train_sequences), str(train_sequences), chains=True)
            training = [chain for _, sequence in records for chain in sequence.split(":")]
        targets = list(dict.fromkeys(sequence for row in rows for sequence in row["sequences"]))
        identities = dict(zip(targets, nearest_identities(targets, training, workers)))
    for row in rows:
        row["train_identity"] = max(map(identities.__getitem__, row["sequences"])) if identities else None


def report(sets: Sequence[PredictionSet], truth: Path, suite: Suite | None, seed: int) -> dict[str, Any]:
    """Build the results for JSON (docs/howto/score.md): all sets, and the first set compared with each other set."""
    first, *other_sets = sets
    return {
        "format": FORMAT,
        "truth": str(truth),
        "suite": suite and {"file": suite.path.name, "sha256": suite.sha256, "title": suite.title},
        "sets": [prediction_set.to_dict(seed) for prediction_set in sets],
        "comparisons": [
            {"a": first.name, "b": other.name, **tables.compare(first.by_target(), other.by_target())}
            for other in other_sets
        ],
        "definitions": DEFINITIONS,
        "seed": seed,
    }


def table_rows(sets: Sequence[PredictionSet]) -> list[Row]:
    """Collect the rows of the results table: all scored predictions and all failures."""
    rows = []
    for prediction_set in sets:
        name = prediction_set.name
        rows += [{"set": name, **measured.row} for measured in prediction_set.measured]
        rows += [{"set": name, "target": target, "error": error} for target, error in prediction_set.failures.items()]
    return rows


def as_suite(prediction_set: PredictionSet, title: str) -> str:
    """Write the scored targets as a suite: names, chains, release dates and hashes of the reference files."""
    targets: dict[str, Entry] = {}
    for measured in prediction_set.best:
        row, truth = measured.row, measured.job.truth
        released = date.fromisoformat(row["released"]) if row["released"] else None
        targets[truth.name] = Entry(released, row["truth_sha256"], tuple(row["truth_chains"]))
    return write_suite(title, targets)
