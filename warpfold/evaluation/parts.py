"""Share results between the tasks of a job array: each task writes one file to a folder, and all tasks read them."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from warpfold import __version__
from warpfold.bulk import JobPart
from warpfold.evaluation.confidence import Sums
from warpfold.evaluation.measure import Job, Measured
from warpfold.files import sealed, write_atomically, writing

IS_PART = re.compile(r"part-\d+-of-\d+\.json").fullmatch


def jobs_fingerprint(jobs: Sequence[Job]) -> str:
    """Compute a digest of the jobs, their files and WarpFold's version. Parts of another digest are ignored."""
    digest = hashlib.sha256(__version__.encode())
    for job in jobs:
        digest.update(repr(job).encode())
        for path in (job.prediction.path, job.truth.path, job.prediction.pae, *job.prediction.alignments):
            if path is not None and path.exists():
                state = os.stat(path)
                digest.update(f"{state.st_size} {state.st_mtime_ns}".encode())
    return digest.hexdigest()


def write_part(out: Path, fingerprint: str, part: JobPart, results: Mapping[int, Measured]) -> None:
    """Write the results of a task; results: index of the job -> result."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    measured = [[index, r.row, _to_lists(r.plddt), _to_lists(r.pae), r.error] for index, r in results.items()]
    path = out / f"part-{part.number}-of-{part.count}.json"
    write_atomically(path, json.dumps(sealed({"run": fingerprint, "measured": measured}), allow_nan=False) + "\n")


def read_parts(out: Path, fingerprint: str, jobs: Sequence[Job]) -> dict[int, Measured]:
    """Read the results of all tasks so far, by index of the job. Damaged files and those of other runs are ignored."""
    results: dict[int, Measured] = {}
    with writing(out):
        paths = sorted(path for path in out.iterdir() if IS_PART(path.name)) if out.is_dir() else []
        for path in paths:
            try:
                part = json.loads(path.read_bytes())
            except ValueError:
                continue
            if isinstance(part, dict) and part.get("run") == fingerprint and part == sealed(part):
                for index, row, plddt, pae, error in part["measured"]:
                    results[index] = Measured(jobs[index], row, _from_lists(plddt), _from_lists(pae), error)
    return results


def parts_with(indices: Iterable[int], count: int) -> list[str]:
    """Name the parts, as "3/8", that contain the jobs with these indices."""
    return [f"{number + 1}/{count}" for number in sorted({index % count for index in indices})]


def _to_lists(sums: Sums | None) -> dict[str, list[float]] | None:
    return None if sums is None else {field.name: getattr(sums, field.name).tolist() for field in fields(Sums)}


def _from_lists(lists: Mapping[str, list[float]] | None) -> Sums | None:
    return None if lists is None else Sums(**{name: np.array(values) for name, values in lists.items()})
