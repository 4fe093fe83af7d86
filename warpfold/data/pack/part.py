"""Write and read the parts of a store: folders with a result file for each finished job (docs/reference/formats.md).

The folder is called `store.part-I-of-N.partial` until all jobs are finished. Then it is renamed to `store.part-I-of-N`
and never changes. A result file gets its name when it is complete, so the file names are the state of the run, and a
continued run repeats the jobs without a file. `plan.json` is the manifest: the inputs, the options, and in a finished
part the jobs. `tried` has a line for each job that was started, by which the next run recognises a job that kills every
process.
"""

import json
import re
import zlib
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from warpfold.bulk import JobPart
from warpfold.errors import UserError
from warpfold.files import DraftFolder, digest_of, remove_own, sealed, sync_path, write_atomically, writing

FORMAT, VERSION = "warpfold-part", 6
# Names of jobs: a prefix with the name of a structure file or of the first of several alignments; and the hit files.
STRUCTURE, QUERIES, HIT_FILES = "structure ", "queries ", "hits"
# Files that are synced concurrently.
SYNC_THREADS = 32
# The option and the input that affect only the merge.
MERGE_SETTINGS = ("cluster_identity", "clusters")
_RESULT = re.compile(r"[0-9a-f]{32}")
_DRAFT = re.compile(r"\.(plan\.json|tried|[0-9a-f]{32})\.[0-9a-f]{8}")
_OWN = re.compile(rf"plan\.json|tried|lock|{_RESULT.pattern}|{_DRAFT.pattern}")

QueryOrError = tuple[str, str]  # query and error; one is empty
# "part", "warpfold" (version), "options", "inputs" and "clusters", JSON-serialisable.
Manifest = dict[str, Any]


class JobResult(NamedTuple):
    """The result of a job: its name, JSON-serialisable data, and the records of its entries."""

    job: str
    data: Any
    records: list[bytes]


def part_path(out: Path, part: JobPart) -> Path:
    """Return the path of a part of the store `out`. Raises UserError for a path without a name, such as "."."""
    if out.name in ("", ".."):
        raise UserError(f"--out {out}: not a name for a store. Pass a folder that does not exist yet.")
    return out.with_name(f"{out.name}.part-{part.number}-of-{part.count}")


def differences(manifest: Manifest, other: Manifest, ignored: Container[str] = ()) -> list[str]:
    """List the options and inputs that differ between two manifests, formatted for an error, except the `ignored`."""
    changes = []
    for group, describe in (("options", "--{}".format), ("inputs", "{} files".format)):
        values, other_values = manifest[group], other[group]
        names = [name for name in dict.fromkeys([*values, *other_values]) if name not in ignored]
        changes += [describe(name.replace("_", "-")) for name in names if values.get(name) != other_values.get(name)]
    return changes


def result_name(job: str) -> str:
    """Return the name of a job's result file."""
    return digest_of(job.encode("utf-8", "surrogateescape"))


def read_result(path: Path, with_records: bool = True) -> JobResult:
    """Read a result file. Raises ValueError if it is damaged, and OSError if it cannot be read."""
    with open(path, "rb") as file:
        checksum, _, line = file.readline().partition(b" ")
        if checksum != b"%08x" % zlib.crc32(line):
            raise ValueError("checksum")
        job, data, sizes, crcs = json.loads(line)
        records = [file.read(size) for size in sizes] if with_records else []
        # The checksum also detects truncated records.
        if with_records and (list(map(zlib.crc32, records)) != crcs or file.read(1)):
            raise ValueError("checksum")
    if path.name != result_name(job):
        raise ValueError("the result of another job")
    return JobResult(job, data, records)


class PartFolder:
    """A finished part, for reading. No file stays open, because a merge may have thousands of parts.

    Raises UserError for a folder that is not a finished part, and for a damaged one.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists() and path.with_name(f"{path.name}.partial").exists():
            raise UserError(f"{path}: is unfinished. Repeat its command to finish it.")
        self.path, self.manifest = path, _read_manifest(path)
        self.part = JobPart.parse(self.manifest["part"])
        self._jobs: list[str] = self.manifest.pop("jobs", [])  # sorted
        if self.manifest.pop("checksum", None) != sealed({**self.manifest, "jobs": self._jobs})["checksum"]:
            raise self._damaged("plan.json")

    def structures(self) -> list[str]:
        """Return the names of the jobs of structure files, sorted."""
        return [job for job in self._jobs if job.startswith(STRUCTURE)]

    def queries(self) -> Iterator[tuple[str, str, str]]:
        """Yield name, query and error of each alignment."""
        for job in self._jobs:
            if job.startswith(QUERIES):
                yield from self.read(job).data

    def read(self, job: str, with_records: bool = True) -> JobResult:
        """Read the result of a job. Raises UserError if it is missing, damaged or unreadable."""
        try:
            return read_result(self.path / result_name(job), with_records)
        except (FileNotFoundError, ValueError, TypeError):
            raise self._damaged(result_name(job)) from None
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror}. Copy the part again.") from error

    def _damaged(self, name: str) -> UserError:
        """Return the error for a damaged or missing file."""
        return UserError(f"{self.path}: {name} is damaged or missing. Copy the part again, or remove and repeat it.")


class PartWriter:
    """A part that only this process writes. Continues an unfinished part with the same inputs and options.

    Use it as a context manager: after an exception, the next run continues with the results.
    Raises UserError if the part is finished, if another process is writing it, if it was started with other inputs or
    options or by another version, if the folder has other files, and if it cannot be written.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, {"format": FORMAT, "version": VERSION, **manifest}
        self.part = JobPart.parse(manifest["part"])
        # The jobs with a result.
        self.jobs: set[str] = set()
        # Number of attempts of each job without a result, in runs that died.
        self.tried: Counter[str] = Counter()
        # Attempts of this process.
        self._begun: Counter[str] = Counter()
        self._draft = DraftFolder(path, _OWN.fullmatch)
        self.folder = self._draft.folder
        with ExitStack() as unless_open:
            unless_open.callback(self._draft.release)
            self._begin()
            unless_open.pop_all()

    def __enter__(self) -> "PartWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> None:
        """Find the results of an earlier run, and remove files that a kill or a power failure left incomplete."""
        with writing(self.path):
            results = [path for path in self.folder.iterdir() if _RESULT.fullmatch(path.name)]
            if results:
                earlier = _read_manifest(self.folder)
                changes = differences(earlier, self.manifest, MERGE_SETTINGS)
                if earlier["warpfold"] != self.manifest["warpfold"]:
                    changes.append(f"WarpFold {earlier['warpfold']}, not {self.manifest['warpfold']}")
                if changes:
                    raise UserError(
                        f"{self.path}: an unfinished run with other inputs or options ({', '.join(changes)}). Repeat "
                        f"its command to finish it, or remove {self.path.name}.partial to start over."
                    )
            write_atomically(self.folder / "plan.json", json.dumps(self.manifest, indent=1) + "\n")
            for path in self.folder.iterdir():
                if _DRAFT.fullmatch(path.name):
                    path.unlink()
            for path in results:
                try:
                    self.jobs.add(read_result(path).job)
                except (ValueError, TypeError):
                    path.unlink()
            # The file stays open until `close`.
            self._tried_file = open(self.folder / "tried", "a+b")  # noqa: SIM115
            self._tried_file.seek(0)
            lines = self._tried_file.read()
            for line in lines.splitlines():
                # A kill may have left an incomplete line.
                with suppress(ValueError, TypeError):
                    self.tried[json.loads(line)] += 1
            if lines and not lines.endswith(b"\n"):
                self._tried_file.write(b"\n")
            self.tried = Counter({job: n for job, n in self.tried.items() if job not in self.jobs})

    def queries(self) -> dict[str, QueryOrError]:
        """Read the queries in the results, by the names of the alignments."""
        results = (read_result(self.folder / result_name(job)) for job in self.jobs if job.startswith(QUERIES))
        return {name: (query, error) for result in results for name, query, error in result.data}

    def add(self, job: str, data: Any, records: Sequence[bytes] = ()) -> None:
        """Write the result of a job and its records."""
        sizes, crcs = [len(record) for record in records], [zlib.crc32(record) for record in records]
        line = json.dumps([job, data, sizes, crcs], separators=(",", ":")).encode() + b"\n"
        # The file is not synced, because this would take longer than many jobs. A continued run checks every file.
        write_atomically(self.folder / result_name(job), [b"%08x " % zlib.crc32(line), line, *records], sync=False)
        self.jobs.add(job)

    def begin(self, job: str) -> None:
        """Record an attempt of a job, so that the next run recognises a job that killed this process."""
        with writing(self.path):
            self._tried_file.write(json.dumps(job).encode() + b"\n")
            self._tried_file.flush()
        self.tried[job] += 1
        self._begun[job] += 1

    def finish(self) -> None:
        """Sync all results and rename the folder, when all jobs are finished."""
        with writing(self.path):
            # Concurrent syncs share the writes of the disk. Sequential syncs take several milliseconds each.
            with ThreadPoolExecutor(SYNC_THREADS) as threads:
                list(threads.map(sync_path, [self.folder / result_name(job) for job in self.jobs]))
            plan = sealed({**self.manifest, "jobs": sorted(self.jobs)})
            write_atomically(self.folder / "plan.json", json.dumps(plan, indent=1) + "\n")
            (self.folder / "tried").unlink()
        self._draft.complete()

    def close(self) -> None:
        """Release the folder, or remove it if no job has a result."""
        # This fails on a full disk, which `begin` has reported.
        with suppress(OSError):
            self._tried_file.close()
        if not self._draft.is_open:
            return
        # The attempts of this process do not count, because the jobs have not killed it.
        attempts = self.tried - self._begun
        earlier = Counter({job: n for job, n in attempts.items() if job not in self.jobs})
        if not (self.jobs or earlier):
            self._draft.remove()
            return
        # This fails on a full disk.
        with suppress(UserError):
            write_atomically(self.folder / "tried", (json.dumps(job) + "\n" for job in earlier.elements()))
        self._draft.release()


def remove_part(path: Path) -> None:
    """Delete the files of a part and its folder."""
    remove_own(path, _OWN.fullmatch)


def _read_manifest(path: Path) -> Manifest:
    """Read the manifest of a part. Raises UserError if it is not one, or of another version."""
    try:
        manifest = json.loads((path / "plan.json").read_bytes())
        JobPart.parse(manifest["part"])
        is_current = (manifest["format"], manifest["version"]) == (FORMAT, VERSION)
        is_complete = all(name in manifest for name in ("part", "warpfold", "options", "inputs", "clusters"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, UserError):
        is_complete = is_current = False
    if not is_complete:
        raise UserError(f"{path}: not a part of a store. Make parts with `warpfold pack --shard I/N`.")
    if not is_current:
        raise UserError(f"{path}: a part of another version of WarpFold. Remove it and pack it again.")
    return dict(manifest)


def check_parts(parts: Sequence[PartFolder]) -> None:
    """Raise UserError unless these are all parts of one store, without repetitions."""
    first = parts[0]
    by_number: dict[int, PartFolder] = {}
    for part in parts:
        if changes := differences(first.manifest, part.manifest):
            raise UserError(
                f"{part.path}: belongs to another store than {first.path} (it differs in {', '.join(changes)}). Pack "
                "both with the same inputs and options."
            )
        if part.part.count != first.part.count:
            raise UserError(
                f"{part.path}: is part {part.part}, {first.path} is {first.part}. Pass the parts of one run."
            )
        if (other := by_number.setdefault(part.part.number, part)) is not part:
            raise UserError(f"{part.path}: is part {part.part}, and so is {other.path}. Pass every part once.")
    missing = [str(n) for n in range(1, first.part.count + 1) if n not in by_number]
    if missing:
        raise UserError(
            f"{first.path}: of {first.part.count} parts, {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} "
            "missing. Pass all parts, made with --shard."
        )
