"""What tasks of a job array have scored: a file of each in the folder of the results, which all of them read."""

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


def run_of(jobs: Sequence[Job]) -> str:
    """Return a digest of what is scored, and by which version: of other jobs or changed files no part is used."""
    digest = hashlib.sha256(__version__.encode())
    for job in jobs:
        digest.update(repr(job).encode())
        for path in (job.prediction.path, job.truth.path, job.prediction.pae, *job.prediction.alignments):
            if path is not None and path.exists():
                state = os.stat(path)
                digest.update(f"{state.st_size} {state.st_mtime_ns}".encode())
    return digest.hexdigest()


def write_part(out: Path, run: str, part: JobPart, found: Mapping[int, Measured]) -> None:
    """Write what a task has scored, by the places of the jobs."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    measured = [[place, one.row, _numbers(one.plddt), _numbers(one.pae), one.error] for place, one in found.items()]
    path = out / f"part-{part.number}-of-{part.count}.json"
    write_atomically(path, json.dumps(sealed({"run": run, "measured": measured}), allow_nan=False) + "\n")


def read_parts(out: Path, run: str, jobs: Sequence[Job]) -> dict[int, Measured]:
    """Return what all tasks of this run have scored so far; a file of another run, or a damaged one, has nothing."""
    found: dict[int, Measured] = {}
    with writing(out):
        paths = sorted(path for path in out.iterdir() if IS_PART(path.name)) if out.is_dir() else []
        for path in paths:
            try:
                part = json.loads(path.read_bytes())
            except ValueError:
                continue
            if isinstance(part, dict) and part.get("run") == run and part == sealed(part):
                for place, row, plddt, pae, error in part["measured"]:
                    found[place] = Measured(jobs[place], row, _sums(plddt), _sums(pae), error)
    return found


def parts_of(places: Iterable[int], count: int) -> list[str]:
    """Return which parts, as "3/8", have the jobs of these places."""
    return [f"{number + 1}/{count}" for number in sorted({place % count for place in places})]


def _numbers(sums: Sums | None) -> dict[str, list[float]] | None:
    return None if sums is None else {one.name: getattr(sums, one.name).tolist() for one in fields(Sums)}


def _sums(numbers: Mapping[str, list[float]] | None) -> Sums | None:
    return None if numbers is None else Sums(**{name: np.array(values) for name, values in numbers.items()})
