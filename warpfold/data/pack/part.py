"""A part of a store that is being packed: a folder with a result file for each job (docs/reference/formats.md).

While jobs are done the folder is called `store.part-I-of-N.partial`; it is renamed to `store.part-I-of-N` when all are,
and never changes then.  A result file appears under its name when it is complete, so the names in the folder are the
state of the run, and the files that a kill has not let appear are made again.  `plan.json` is the manifest: the inputs,
the options, and in a finished part the jobs.  `tried` has a line for each job that was begun, by which the next run
knows a job that kills every process that tries it.
"""

import json
import re
import zlib
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from warpfold.bulk import JobPart
from warpfold.errors import UserError
from warpfold.files import DraftFolder, digest_of, remove_own, sealed, sync_path, write_atomically, writing

FORMAT, VERSION = "warpfold-part", 6
# Names of jobs: these words before the name of a structure file, or of the first of some alignments; and the hit files.
STRUCTURE, QUERIES, HIT_FILES = "structure ", "queries ", "hits"
SYNCS = 32  # files that are synced at the same time
OF_MERGE = ("cluster_identity", "clusters")  # the option and the input that decide nothing in a part
_RESULT = re.compile(r"[0-9a-f]{32}")
_DRAFT = re.compile(r"\.(plan\.json|tried|[0-9a-f]{32})\.[0-9a-f]{8}")
_OWN = re.compile(rf"plan\.json|tried|lock|{_RESULT.pattern}|{_DRAFT.pattern}")

QueryOrError = tuple[str, str]  # an alignment's query, and what is wrong with it: one of them is empty
Manifest = dict[str, Any]  # "part", "warpfold" (version), "options", "inputs", "clusters", as JSON can hold them


class JobResult(NamedTuple):
    """The result of a job: its name, plain data as JSON can hold it, and the records of its entries."""

    job: str
    data: Any
    records: list[bytes]


def part_path(out: Path, part: JobPart) -> Path:
    """Return the path of a part of the store `out`.

    Errors: UserError for a path that does not end in a name, such as ".".
    """
    if out.name in ("", ".."):
        raise UserError(f"--out {out}: no name for a store. Name a folder that is not there yet")
    return out.with_name(f"{out.name}.part-{part.number}-of-{part.count}")


def differences(one: Manifest, other: Manifest, ignored: Container[str] = ()) -> list[str]:
    """Say what differs between two manifests, in words for an error.  ignored: names of options and inputs."""
    found = []
    for group, say in (("options", "--{}".format), ("inputs", "{} files".format)):
        names = [name for name in dict.fromkeys([*one[group], *other[group]]) if name not in ignored]
        found += [say(name.replace("_", "-")) for name in names if one[group].get(name) != other[group].get(name)]
    return found


def result_name(job: str) -> str:
    """Return the name of a job's result file."""
    return digest_of(job.encode("utf-8", "surrogateescape"))


def read_result(path: Path, with_records: bool = True) -> JobResult:
    """Read a result file.  Errors: ValueError for a damaged one, OSError for one that cannot be read."""
    with open(path, "rb") as file:
        checksum, _, line = file.readline().partition(b" ")
        if checksum != b"%08x" % zlib.crc32(line):
            raise ValueError("checksum")
        job, data, sizes, crcs = json.loads(line)
        records = [file.read(size) for size in sizes] if with_records else []
        # `zlib.crc32` also tells a record that is cut short.
        if with_records and (list(map(zlib.crc32, records)) != crcs or file.read(1)):
            raise ValueError("checksum")
    if path.name != result_name(job):
        raise ValueError("the result of another job")
    return JobResult(job, data, records)


class PartFolder:
    """A finished part, open for reading.  No file stays open: a merge may have thousands of parts.

    Errors: UserError for a folder that is not a finished part, and for a damaged one.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists() and path.with_name(f"{path.name}.partial").exists():
            raise UserError(f"{path}: is unfinished. Repeat its command to finish it")
        self.path, self.manifest = path, _read_manifest(path)
        self.part = JobPart.parse(self.manifest["part"])
        self._jobs: list[str] = self.manifest.pop("jobs", [])  # sorted
        if self.manifest.pop("checksum", None) != sealed({**self.manifest, "jobs": self._jobs})["checksum"]:
            raise self._damaged("plan.json")

    def structures(self) -> list[str]:
        """Return the names of the jobs of structure files, sorted."""
        return [job for job in self._jobs if job.startswith(STRUCTURE)]

    def queries(self) -> Iterator[tuple[str, str, str]]:
        """Yield the name, the query and the problem of each alignment."""
        for job in self._jobs:
            if job.startswith(QUERIES):
                yield from self.read(job).data

    def read(self, job: str, with_records: bool = True) -> JobResult:
        """Read the result of a job.  Errors: UserError if it is missing or damaged, or cannot be read."""
        try:
            return read_result(self.path / result_name(job), with_records)
        except (FileNotFoundError, ValueError, TypeError):
            raise self._damaged(result_name(job)) from None
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror}. Copy the part again") from error

    def _damaged(self, name: str) -> UserError:
        return UserError(f"{self.path}: {name} is damaged or missing. Copy the part again, or remove and pack it again")


class PartWriter:
    """A part, open for writing by this process alone; continues one that was begun with the same inputs and options.

    Use as a context manager: an exception leaves the results for the next run.
    Errors: UserError if the part is finished, another process is writing it, it was begun with other inputs or options
    or by another version, the folder holds files that are not a part's, or it cannot be written.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, {"format": FORMAT, "version": VERSION, **manifest}
        self.part = JobPart.parse(manifest["part"])
        self.jobs: set[str] = set()  # with a result
        self.tried: Counter[str] = Counter()  # how often each job without a result was begun, in runs that died
        self._begun: Counter[str] = Counter()  # by this process
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
        """Find the results of a run that was stopped, and remove what a kill or a power cut left incomplete."""
        with writing(self.path):
            results = [path for path in self.folder.iterdir() if _RESULT.fullmatch(path.name)]
            if results:
                _check_same_run(self.path, _read_manifest(self.folder), self.manifest)
            write_atomically(self.folder / "plan.json", json.dumps(self.manifest, indent=1) + "\n")
            for path in self.folder.iterdir():
                if _DRAFT.fullmatch(path.name):
                    path.unlink()
            for path in results:
                try:
                    self.jobs.add(read_result(path).job)
                except (ValueError, TypeError):
                    path.unlink()
            self._tried_file = open(self.folder / "tried", "a+b")  # noqa: SIM115 (open until the end)
            self._tried_file.seek(0)
            lines = self._tried_file.read()
            for line in lines.splitlines():
                with suppress(ValueError, TypeError):  # a torn line
                    self.tried[json.loads(line)] += 1
            if lines and not lines.endswith(b"\n"):
                self._tried_file.write(b"\n")
            self.tried = Counter({job: n for job, n in self.tried.items() if job not in self.jobs})

    def queries(self) -> dict[str, QueryOrError]:
        """Read the queries of alignments in the results, by the alignments' names."""
        results = (read_result(self.folder / result_name(job)) for job in self.jobs if job.startswith(QUERIES))
        return {name: (query, error) for result in results for name, query, error in result.data}

    def add(self, job: str, data: Any, records: Sequence[bytes] = ()) -> None:
        """Keep the result of a job and its records."""
        sizes, crcs = [len(record) for record in records], [zlib.crc32(record) for record in records]
        line = json.dumps([job, data, sizes, crcs], separators=(",", ":")).encode() + b"\n"
        # Not synced, as that would take longer than many jobs: a run that continues checks every file.
        write_atomically(self.folder / result_name(job), [b"%08x " % zlib.crc32(line), line, *records], sync=False)
        self.jobs.add(job)

    def add_queries(self, found: Mapping[str, QueryOrError]) -> None:
        """Keep the queries of some alignments, by their names; the job is named after the first."""
        self.add(QUERIES + next(iter(found)), [[name, *query] for name, query in found.items()])

    def begin(self, job: str) -> None:
        """Note that a job is tried now, so that a job that kills this process is known afterwards."""
        with writing(self.path):
            self._tried_file.write(json.dumps(job).encode() + b"\n")
            self._tried_file.flush()
        self.tried[job] += 1
        self._begun[job] += 1

    def finish(self) -> None:
        """Give the part its name: all jobs are done."""
        with writing(self.path):
            # Calls at the same time share the disk's writes: one after another they take some ms each.
            with ThreadPoolExecutor(SYNCS) as threads:
                list(threads.map(sync_path, [self.folder / result_name(job) for job in self.jobs]))
            plan = sealed({**self.manifest, "jobs": sorted(self.jobs)})
            write_atomically(self.folder / "plan.json", json.dumps(plan, indent=1) + "\n")
            (self.folder / "tried").unlink()
        self._draft.complete()

    def close(self) -> None:
        """Release the folder, which is removed if no job is done."""
        with suppress(OSError):  # on a full disk; `begin` has said so
            self._tried_file.close()
        if not self._draft.is_open:
            return
        # A job that a stop has interrupted did not kill this process.
        earlier = Counter({job: n - self._begun[job] for job, n in self.tried.items() if job not in self.jobs})
        if not (self.jobs or earlier):
            self._draft.remove()
            return
        with suppress(UserError):  # a full disk
            write_atomically(self.folder / "tried", (json.dumps(job) + "\n" for job in earlier.elements()))
        self._draft.release()


def remove_part(path: Path) -> None:
    """Delete a part's own files and its folder."""
    remove_own(path, _OWN.fullmatch)


def _read_manifest(path: Path) -> Manifest:
    try:
        manifest = json.loads((path / "plan.json").read_bytes())
        JobPart.parse(manifest["part"])
        known = (manifest["format"], manifest["version"]) == (FORMAT, VERSION)
        whole = {"part", "warpfold", "options", "inputs", "clusters"} <= manifest.keys()
    except (OSError, ValueError, KeyError, TypeError, RecursionError, UserError):
        whole = known = False
    if not whole:
        raise UserError(f"{path}: not a part of a store; `warpfold pack --shard I/N` makes them")
    if not known:
        raise UserError(f"{path}: a part of another version of WarpFold. Remove it and pack it again")
    return dict(manifest)


def _check_same_run(path: Path, begun: Manifest, manifest: Manifest) -> None:
    """Raise UserError for other inputs or options, or another version."""
    found = differences(begun, manifest, OF_MERGE)
    if begun["warpfold"] != manifest["warpfold"]:
        found.append(f"WarpFold {begun['warpfold']}, not {manifest['warpfold']}")
    if found:
        raise UserError(
            f"{path}: an unfinished run with other inputs or options ({', '.join(found)}). Repeat its command to "
            f"finish it, or remove {path.name}.partial to start over"
        )


def check_parts(parts: Sequence[PartFolder]) -> None:
    """Raise UserError unless these are all parts of one store, each given once."""
    first = parts[0]
    by_number: dict[int, PartFolder] = {}
    for part in parts:
        if found := differences(first.manifest, part.manifest):
            raise UserError(
                f"{part.path}: belongs to another store than {first.path} (it differs in {', '.join(found)}). Pack "
                "both with the same inputs and options"
            )
        if part.part.count != first.part.count:
            raise UserError(
                f"{part.path}: is part {part.part}, {first.path} is {first.part}. Pass the parts of one run"
            )
        if (other := by_number.setdefault(part.part.number, part)) is not part:
            raise UserError(f"{part.path}: is part {part.part}, and so is {other.path}. Pass each part once")
    missing = [str(n) for n in range(1, first.part.count + 1) if n not in by_number]
    if missing:
        raise UserError(
            f"{first.path}: of {first.part.count} parts, {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} "
            "missing. Pass all, made with --shard"
        )
