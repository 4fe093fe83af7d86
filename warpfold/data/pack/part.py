"""A part of a store that is being packed: a folder with the results of its jobs, which survives a kill.

While jobs are done the folder is called `store.part-I-of-N.partial`; it is renamed to `store.part-I-of-N` when all are,
and never changes then.  `plan.json` is the manifest: the inputs and options.  `records` holds the records of the
entries, and `journal` a line for each job with its result and the sizes of its records.  A line is written after its
records and has a checksum, so that the results of a killed run are known up to the first torn line.  `tried` has a line
for each job that was begun, by which the next run knows a job that kills every process that tries it.
"""

import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from warpfold.bulk import JobPart
from warpfold.errors import UserError
from warpfold.files import DraftFolder, pread, remove_own, write_atomically, writing

FORMAT, VERSION = "warpfold-part", 5
RECORDS = "records"
STRUCTURE, QUERY = "structure ", "query "  # before the name of the file in the name of its job
OF_MERGE = ("cluster_identity", "clusters")  # the option and the input that decide nothing in a part
QUERIES, HIT_FILES = "queries", "hits"  # the results in the journal that are of several files
_OWN = re.compile(rf"plan\.json|{RECORDS}|journal|tried|lock|\.(plan\.json|tried)\.[0-9a-f]{{8}}")

QueryOrError = tuple[str, str]  # an alignment's query, and what is wrong with it: one of them is empty
Manifest = dict[str, Any]  # "part", "warpfold" (version), "options", "inputs", "clusters", as JSON can hold them


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of a job, and the place of its records."""

    line: bytes  # of the journal, parsed when it is needed: a part may have a million of them
    at: int  # in `records`
    sizes: Sequence[int]
    crcs: Sequence[int]

    @property
    def data(self) -> Any:
        """Return the result, as JSON can hold it."""
        return json.loads(self.line)[1]

    def place(self, number: int) -> tuple[int, int, int]:
        """Return the first byte, the size and the checksum of one of its records."""
        return self.at + sum(self.sizes[:number]), self.sizes[number], self.crcs[number]


def part_path(out: Path, part: JobPart) -> Path:
    """Return the path of a part of the store `out`.

    Errors: UserError for a path that does not end in a name, such as ".".
    """
    if out.name in ("", ".."):
        raise UserError(f"--out {out}: no name for a store; name a folder that is not there yet")
    return out.with_name(f"{out.name}.part-{part.number}-of-{part.count}")


def differences(one: Manifest, other: Manifest, ignored: Container[str] = ()) -> list[str]:
    """Say what differs between two manifests, in words for an error.  ignored: names of options and inputs."""
    found = []
    for group, say in (("options", "--{}".format), ("inputs", "{} files".format)):
        names = [name for name in dict.fromkeys([*one[group], *other[group]]) if name not in ignored]
        found += [say(name.replace("_", "-")) for name in names if one[group].get(name) != other[group].get(name)]
    return found


class PartFolder:
    """A finished part, open for reading: its manifest, its results by the names of their jobs, and its queries.

    Errors: UserError for a folder that is not a finished part, and for a damaged one.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists() and path.with_name(f"{path.name}.partial").exists():
            raise UserError(f"{path}: is unfinished; repeat its command to finish it")
        self.folder = path
        self.manifest = _read_manifest(path)
        self.part = JobPart.parse(self.manifest["part"])
        self.results: dict[str, JobResult] = {}
        self.queries: dict[str, QueryOrError] = {}  # by the alignments' names
        whole = self._read_results(check=False)
        if self.manifest.get("bytes") != list(whole):
            raise UserError(f"{path}: damaged or cut short; copy it again, or remove it and repeat its command")

    def _read_results(self, check: bool) -> tuple[int, int]:
        """Read the journal, and return the bytes of it and of the records that are whole.

        check: compare the records with their checksums, as is needed where a run may have been killed.
        """
        ends = 0, 0
        try:
            with open(self.folder / "journal", "rb") as journal, open(self.folder / RECORDS, "rb") as records:
                written = os.fstat(records.fileno()).st_size
                for text, length in _whole_lines(journal):
                    job, _, sizes, crcs = json.loads(text)
                    line, at = ends
                    result = JobResult(text, at, tuple(sizes), tuple(crcs))
                    end = at + sum(sizes)
                    if end > written or (check and not _are_whole(records.fileno(), result)):
                        break
                    self._take(job, result)
                    ends = line + length, end
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be read: {error.strerror}; copy it again") from error
        return ends

    def _take(self, job: str, result: JobResult) -> None:
        if job == QUERIES:
            self.queries |= {name: (query, error) for name, query, error in result.data}
        else:
            self.results[job] = result

    def structures(self) -> list[str]:
        """Return the names of the jobs of structure files, sorted."""
        return sorted(job for job in self.results if job.startswith(STRUCTURE))

    def record(self, at: int, size: int, crc: int) -> bytes:
        """Read one of the records.  No file stays open: a merge may have thousands of parts.

        Errors: UserError if it cannot be read or is damaged.
        """
        path = self.folder / RECORDS
        try:
            with open(path, "rb", buffering=0) as file:
                record = pread(file.fileno(), size, at)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}; copy the part again") from error
        if len(record) != size or zlib.crc32(record) != crc:
            raise UserError(f"{path}: damaged (checksum at byte {at}); copy the part again, or pack it again")
        return record


def _are_whole(records: int, result: JobResult) -> bool:
    """Compare the records of a job with their checksums, one at a time: all may be larger than the memory."""
    places = (result.place(number) for number in range(len(result.sizes)))
    return all(zlib.crc32(pread(records, size, at)) == crc for at, size, crc in places)


def _whole_lines(lines: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield the lines of a journal without their checksums, each with its length, up to a torn one."""
    for line in lines:
        checksum, _, text = line.partition(b" ")
        if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
            return
        yield text, len(line)


class PartWriter(PartFolder):
    """A part, open for writing by this process alone; continues one that was begun with the same inputs and options.

    Errors: UserError if the part is finished, another process is writing it, it was begun with other inputs or options
    or by another version, the folder holds files that are not a part's, or it cannot be written.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, {"format": FORMAT, "version": VERSION, **manifest}
        self.part = JobPart.parse(manifest["part"])
        self._draft = DraftFolder(path, _OWN.fullmatch)
        self.folder = self._draft.folder
        self.results, self.queries = {}, {}
        self.tried: Counter[str] = Counter()  # how often each job without a result was begun, in runs that died
        self._begun: Counter[str] = Counter()  # by this process
        with ExitStack() as unless_open:
            unless_open.callback(self._draft.release)
            self._begin()
            unless_open.pop_all()

    def _begin(self) -> None:
        plan, journal, records, tried = (self.folder / name for name in ("plan.json", "journal", RECORDS, "tried"))
        if plan.exists() and journal.exists() and journal.stat().st_size:
            _check_same_run(self.path, _read_manifest(self.folder), self.manifest)
        with writing(self.path):
            write_atomically(plan, json.dumps(self.manifest, indent=1) + "\n")
            for file in (journal, records, tried):
                file.touch()
            whole = self._read_results(check=True)
            for line in tried.read_bytes().splitlines():
                with suppress(ValueError):  # a torn line
                    self.tried.update(json.loads(line))
            self.tried = Counter({job: n for job, n in self.tried.items() if not self.has(job)})
            self._tried_file = open(tried, "ab")  # noqa: SIM115 (open until the end)
            self._journal_file = open(journal, "r+b")  # noqa: SIM115
            self._records_file = open(records, "r+b")  # noqa: SIM115
            for opened, size in zip((self._journal_file, self._records_file), whole):
                opened.truncate(size)  # cut off what a kill left torn
                opened.seek(size)

    def has(self, job: str) -> bool:
        """Return whether a job has a result."""
        return job[len(QUERY) :] in self.queries if job.startswith(QUERY) else job in self.results

    def add(self, job: str, data: Any, records: Sequence[bytes] = ()) -> None:
        """Keep the result of a job and its records."""
        sizes, crcs = [len(record) for record in records], [zlib.crc32(record) for record in records]
        line = json.dumps([job, data, sizes, crcs], separators=(",", ":")).encode() + b"\n"
        result = JobResult(line, self._records_file.tell(), sizes, crcs)
        with writing(self.path):
            self._records_file.writelines(records)
            self._records_file.flush()
            self._journal_file.write(b"%08x %s" % (zlib.crc32(line), line))
            self._journal_file.flush()
        self._take(job, result)

    def add_queries(self, found: Mapping[str, QueryOrError]) -> None:
        """Keep the queries of some alignments, by their names."""
        self.add(QUERIES, [[name, *query] for name, query in found.items()])

    def begin(self, jobs: Sequence[str]) -> None:
        """Note that these jobs are tried now, so that a job that kills this process is known afterwards."""
        with writing(self.path):
            self._tried_file.write(json.dumps(list(jobs)).encode() + b"\n")
            self._tried_file.flush()
        self.tried.update(jobs)
        self._begun.update(jobs)

    def finish(self) -> None:
        """Give the part its name: all jobs are done."""
        with writing(self.path):
            ends = [file.tell() for file in (self._journal_file, self._records_file)]
            for file in (self._journal_file, self._records_file):
                file.flush()
                os.fsync(file.fileno())
            self.manifest["bytes"] = ends
            write_atomically(self.folder / "plan.json", json.dumps(self.manifest, indent=1) + "\n")
            (self.folder / "tried").unlink()
        self._draft.complete()
        self.folder = self.path

    def close(self) -> None:
        """Close the files and release the folder, which is removed if no job is done."""
        for file in (self._journal_file, self._records_file, self._tried_file):
            with suppress(OSError):  # on a full disk; `add` has said so
                file.close()
        if not self._draft.is_open:
            return
        # A job that a stop has interrupted did not kill this process.
        earlier = Counter({job: n - self._begun[job] for job, n in self.tried.items() if not self.has(job)})
        if not (self.results or self.queries or earlier):
            self._draft.remove()
            return
        with suppress(UserError):  # a full disk
            write_atomically(self.folder / "tried", (json.dumps([job]) + "\n" for job in earlier.elements()))
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
        raise UserError(f"{path}: a part of another version of WarpFold; remove it and pack it again")
    return dict(manifest)


def _check_same_run(path: Path, begun: Manifest, manifest: Manifest) -> None:
    """Raise UserError for other inputs or options, or another version."""
    found = differences(begun, manifest, OF_MERGE)
    if begun["warpfold"] != manifest["warpfold"]:
        found.append(f"WarpFold {begun['warpfold']}, not {manifest['warpfold']}")
    if found:
        raise UserError(
            f"{path}: an unfinished run with other inputs or options ({', '.join(found)}); repeat its command to "
            f"finish it, or remove {path.name}.partial to start over"
        )


def check_parts(parts: Sequence[PartFolder]) -> None:
    """Raise UserError unless these are all parts of one store, each given once."""
    first = parts[0]
    by_number: dict[int, PartFolder] = {}
    for one in parts:
        if found := differences(first.manifest, one.manifest):
            raise UserError(
                f"{one.folder}: belongs to another store than {first.folder} (it differs in {', '.join(found)}); pack "
                "both with the same inputs and options"
            )
        if one.part.count != first.part.count:
            raise UserError(
                f"{one.folder}: is part {one.part}, {first.folder} is {first.part}; give the parts of one run"
            )
        if (other := by_number.setdefault(one.part.number, one)) is not one:
            raise UserError(f"{one.folder}: is part {one.part}, and so is {other.folder}; give each part once")
    missing = [str(n) for n in range(1, first.part.count + 1) if n not in by_number]
    if missing:
        raise UserError(
            f"{first.folder}: of {first.part.count} parts, {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} "
            "missing; give all, made with --shard"
        )
