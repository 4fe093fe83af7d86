"""Score folders of predictions against one folder of structures, sum up, and compare the sets (docs/evaluate.md)."""

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
from warpfold.data.search.nearest import nearest_identities
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import StoredExample, entry_keys
from warpfold.errors import UserError, listed, printable
from warpfold.evaluation import tables
from warpfold.evaluation.layouts import PredictedFile, Predictions, find_predictions
from warpfold.evaluation.measure import Comparison, Job, Measured, Row, measure
from warpfold.evaluation.parts import parts_of, read_parts, run_of, write_part
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
    "rmsd": "A, of paired Ca after the superposition that is best for it",
    "dockq": "DockQ (version 2), mean over the interfaces of the truth; one that lacks a chain counts 0",
    "ilddt": "lDDT of pairs of atoms of different chains",
    "qs_global": "QS-score of all contacts (Bertoni et al. 2017)",
    "ics": "F1 of the contacts between chains",
    "ips": "shared residues in contact, of all (Jaccard)",
    "coverage": "residues of the truth with Ca that the prediction has",
    "plddt": "mean predicted lDDT-Ca, 0 to 100, of all residues of the prediction",
    "clashes": "pairs of atoms of different residues that overlap by more than 1.5 A",
    "chain_breaks": "neighbours whose Ca are not 2.6 to 4.2 A apart",
}


@dataclass
class PredictionSet:
    """A folder of predictions, and what was found of it; failures: by target."""

    name: str
    predictions: Predictions
    jobs: list[Job] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)  # what could be scored, of all models
    failures: dict[str, str] = field(default_factory=dict)
    without_truth: list[str] = field(default_factory=list)
    without_prediction: list[str] = field(default_factory=list)

    @property
    def best(self) -> list[Measured]:
        """Return what is in the means: each target's best model, by the ranking of its program."""
        first: dict[str, Measured] = {}
        for one in self.measured:
            first.setdefault(target_key(one.job.truth.name), one)
        return list(first.values())

    def by_target(self) -> dict[str, Row]:
        """Return the row of each target's best model."""
        return {target_key(one.job.truth.name): one.row for one in self.best}

    def to_dict(self, seed: int) -> dict[str, Any]:
        """Return what is found of this set, as JSON can hold it."""
        best = self.best
        rows = [one.row for one in best]
        sums = {kind: [one for one in (getattr(m, kind) for m in best) if one is not None] for kind in ("plddt", "pae")}
        return {
            "name": self.name,
            "folder": str(self.predictions.folder),
            "layout": self.predictions.layouts,
            "targets": len(rows),
            "means": tables.means(rows, seed),
            "groups": {by: made for by in tables.GROUPS if (made := tables.groups(rows, by))},
            "calibration": {
                kind: total.to_dict()
                for kind, these in sums.items()
                if these and (total := functools.reduce(operator.add, these)).count.any()
            },
            "failures": [{"target": name, "error": error} for name, error in self.failures.items()],
            "without_truth": self.without_truth,
            "without_prediction": self.without_prediction,
            "rows": [{key: value for key, value in one.row.items() if key != "sequences"} for one in self.measured],
        }


def evaluate(
    folders: Sequence[Path],
    truth: Path,
    *,
    suite: Suite | None,
    train_sequences: Path | None,
    all_models: bool,
    how: Comparison,
    workers: int,
    cluster: str | None = None,
    part: JobPart | None = None,
    out: Path | None = None,
    progress: Progress,
) -> tuple[list[PredictionSet], dict[str, Any]]:
    """Score each folder's predictions, the first of which is compared with the others; return them, and what is left.

    workers, cluster: as for `bulk.pool`.  part: score only these, and keep them in the folder `out`; as long as others
    have parts to score, the second says how far they are, and the sets are without scores.
    Errors: UserError for folders that are not there or have nothing in common, and a suite of other files.
    """
    truths = Truths(truth)
    if suite is not None:
        truths.keep(suite)
    names = [printable(folder.resolve().name) for folder in folders]
    names = [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders)]
    sets = [PredictionSet(name, find_predictions(folder, all_models)) for name, folder in zip(names, folders)]
    for one in sets:
        _assign(one, truths, how)
    jobs = [job for one in sets for job in one.jobs]
    run = run_of(jobs)
    found = {} if out is None else read_parts(out, run, jobs)
    own = range(len(jobs)) if part is None else part.of(range(len(jobs)))
    todo = [place for place in own if place not in found]
    with pool(min(workers, len(todo)), cluster) as executor:
        results = in_order(measure, [jobs[place] for place in todo], executor)
        for done, (place, result) in enumerate(zip(todo, results)):
            found[place] = result
            progress(done, len(todo), f"scored {jobs[place].prediction.target}")
    if part is not None:
        assert out is not None
        if todo:
            write_part(out, run, part, {place: found[place] for place in own})
        found |= read_parts(out, run, jobs)  # others may have ended meanwhile
        if left := [place for place in range(len(jobs)) if place not in found]:
            outcomes = [(jobs[place].prediction.target, found[place].error) for place in own]
            return sets, {
                "format": FORMAT,
                "status": "running",
                "part": str(part),
                "predictions": len(own),
                "failures": [{"target": name, "error": error} for name, error in outcomes if error is not None],
                "left": parts_of(left, part.count),
            }
    places = iter(range(len(jobs)))
    for one in sets:
        for result in (found[next(places)] for _ in one.jobs):
            target = result.job.prediction.target
            if result.error is not None:
                one.failures.setdefault(target, result.error)
            elif target not in one.failures:
                one.measured.append(result)
            # With all models of a target, its best rank comes first: where that cannot be scored, the target is a
            # failure, and no other rank takes its place in the means.
        if not one.measured:
            failed = list(one.failures.values())
            first = f"none of {len(failed)} targets could be scored: {failed[0]}"
            raise UserError(f"{one.predictions.folder}: {first}" if len(failed) > 1 else failed[0])
    _add_similarity(sets, train_sequences, workers)
    return sets, {}


def _assign(one: PredictionSet, truths: Truths, how: Comparison) -> None:
    """Find what each prediction of a set is compared with."""
    folder = one.predictions.folder
    taken: dict[tuple[Path, tuple[str, ...]], PredictedFile] = {}
    for file in one.predictions.files:
        found = truths.find(file.names)
        if found is None:
            one.without_truth.append(file.target)
            continue
        twin = taken.setdefault((found.path, found.chains), file)
        if target_key(twin.target) != target_key(file.target):
            both = f"{os.path.relpath(twin.path, folder)} and {os.path.relpath(file.path, folder)}"
            raise UserError(f"{folder}: {both} are both of {found.name}; keep one of them")
        one.jobs.append(Job(file, found, how))
    one.failures |= {name: error for name, error in one.predictions.failures.items() if truths.find([name])}
    if not one.jobs:
        ours = listed([file.target for file in one.predictions.files] or [*one.predictions.failures], 3)
        theirs = listed([known.name for known in truths.by_name.values()], 3)
        raise UserError(f"{folder}: none of its targets ({ours}) is among those of {truths.folder} ({theirs})")
    tried = [job.truth for job in one.jobs]
    one.without_prediction = [name for name in truths.without(tried) if name not in one.failures]


def _add_similarity(sets: Sequence[PredictionSet], train_sequences: Path | None, workers: int) -> None:
    """Add to each row how near its target is to a training sequence; of several chains the nearest counts."""
    rows = [one.row for each in sets for one in each.measured]
    nearest: Mapping[str, float] = {}
    if train_sequences is not None:
        known = _sequences(train_sequences)
        asked = list(dict.fromkeys(sequence for row in rows for sequence in row["sequences"]))
        nearest = dict(zip(asked, nearest_identities(asked, known, workers)))
    for row in rows:
        row["train_identity"] = max(map(nearest.__getitem__, row["sequences"])) if nearest else None


def _sequences(path: Path) -> list[str]:
    """Read the sequences of a store or a FASTA file."""
    if path.is_dir():
        store = Store(path)
        return [StoredExample(store, key).sequence for key in entry_keys(store, assemblies=False)]
    return [
        part for _, sequence in parse_fasta(read_file(path), str(path), chains=True) for part in sequence.split(":")
    ]


def report(sets: Sequence[PredictionSet], truth: Path, suite: Suite | None, seed: int) -> dict[str, Any]:
    """Return all that was found, as JSON can hold it (docs/evaluate.md)."""
    first, *others = sets
    return {
        "format": FORMAT,
        "truth": str(truth),
        "suite": suite and {"file": suite.path.name, "sha256": suite.sha256, "title": suite.title},
        "sets": [one.to_dict(seed) for one in sets],
        "comparisons": [
            {"a": first.name, "b": other.name, **tables.compare(first.by_target(), other.by_target())}
            for other in others
        ],
        "definitions": DEFINITIONS,
        "seed": seed,
    }


def rows_of(sets: Sequence[PredictionSet]) -> list[Row]:
    """Return the rows of the table: of each prediction of each set, and of what could not be scored."""
    rows = []
    for one in sets:
        rows += [{"set": one.name, **measured.row} for measured in one.measured]
        rows += [{"set": one.name, "target": name, "error": error} for name, error in one.failures.items()]
    return rows


def as_suite(one: PredictionSet, title: str) -> str:
    """Return the suite of what was scored: names, chains, release dates and hashes of the truths' files."""
    targets: dict[str, Entry] = {}
    for measured in one.best:
        row, truth = measured.row, measured.job.truth
        released = date.fromisoformat(row["released"]) if row["released"] else None
        targets[truth.name] = Entry(released, row["truth_sha256"], tuple(row["truth_chains"]))
    return write_suite(title, targets)
