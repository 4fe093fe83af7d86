"""A part of a store that is being packed: a folder with the results of all finished jobs, which survives a kill.

`plan.json` is its manifest: the inputs and options.  `records` holds bytes, and `journal` a line for each job: its
result, and where its records lie.  A line is written after its records and with a checksum, so that after a kill we
know what is whole.  Other lines say that a job was begun, which identifies a job that kills every process that tries
it, and what the queries of alignments are: the other parts of the store read these, too.  `clusters.json` has the
clusters that a merge has made, for one that follows it.
"""

import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from warpfold.bulk import JobPart
from warpfold.errors import UserError
from warpfold.files import lock_folder, pread, refuse_foreign, remove_own, writing

FORMAT, VERSION = "warpfold-part", 4
_END = "end"  # the last job; its result is the inputs that were done
_BEGUN, _STOPPED, _FORGOTTEN, _QUERIES = "begun", "stopped", "forgotten", "queries"  # lines about several jobs
RECORDS, CLUSTERS = "records", "clusters.json"
_OWN = re.compile(rf"plan\.json(\.new)?|{RECORDS}|journal|lock|clusters\.json|\.clusters\.json\.[0-9a-f]{{8}}")
_PIECE = 1 << 24  # bytes of the records that are checked at a time

FileVersion = tuple[str, int, int]  # of an alignment: name, bytes, nanoseconds since 1970
QueryOrError = tuple[str, str]  # an alignment's query, and what is wrong with it: one of them is empty

Manifest = dict[str, Any]  # "part", "warpfold" (version), "options", "inputs", as JSON can hold them


@dataclass(frozen=True, slots=True)
class JobResult:
    """What a job found, and where its records lie."""

    line: bytes  # of the journal, parsed when somebody asks: a part may have a million of them
    at: int  # in `records`
    sizes: Sequence[int]

    @property
    def data(self) -> Any:
        """Return what it found, as JSON can hold it."""
        return json.loads(self.line)[1]

    def place(self, number: int) -> tuple[int, int]:
        """Return where one of its records begins, and how many bytes it has."""
        return self.at + sum(self.sizes[:number]), self.sizes[number]


def part_path(out: Path, part: JobPart) -> Path:
    """Return where a part of the store `out` is made.

    Errors: UserError for a path that does not end in a name, such as ".".
    """
    if out.name in ("", ".."):
        raise UserError(f"--out {out}: no name for a store; name a folder that is not there yet")
    return out.with_name(f"{out.name}.part-{part.number}-of-{part.count}")


def part_paths(out: Path, count: int) -> list[Path]:
    """Return the existing folders of parts of the store `out`, which has `count` parts in all."""
    begin, end = f"{out.name}.part-", f"-of-{count}"
    return [out.with_name(name) for name in os.listdir(out.parent) if name.startswith(begin) and name.endswith(end)]


def query_job(version: FileVersion) -> str:
    """Name the job that reads an alignment's query; a later file of the same name has another one."""
    return " ".join(map(str, ("query", *version)))


def queries_of_part(path: Path, manifest: Manifest, at: int) -> tuple[dict[FileVersion, QueryOrError], int]:
    """Return the queries that another part has read, from byte `at` of its journal on, and where that ends now.

    A part that was made with other options than `manifest`, or by another version, has none.
    """
    found: dict[FileVersion, QueryOrError] = {}
    if at == 0:
        try:
            other = _read_manifest(path)
        except UserError:
            return found, 0
        if (other["warpfold"], other["options"]) != (manifest["warpfold"], manifest["options"]):
            return found, 0
    with open(path / "journal", "rb") as lines:
        lines.seek(at)
        for text, length in _whole_lines(lines):
            at += length
            if text.startswith(b'["%s"' % _QUERIES.encode()):
                found |= _queries(json.loads(text)[1])
    return found, at


def _queries(rows: Sequence[Sequence[Any]]) -> dict[FileVersion, QueryOrError]:
    return {(name, size, changed): (query, error) for name, size, changed, query, error in rows}


def differences(one: Manifest, other: Manifest) -> list[str]:
    """Say what differs between two manifests, in words for an error."""
    found = []
    for group, say in (("options", "--{}".format), ("inputs", "{} files".format)):
        names = [*one[group], *(name for name in other[group] if name not in one[group])]
        found += [say(name.replace("_", "-")) for name in names if one[group].get(name) != other[group].get(name)]
    return found


class PartFolder:
    """A part, open for reading: its manifest, the results of its jobs by name, and the queries that it has read.

    check: read all records and compare them with their checksums, as is needed where a run may have been killed.  What
    a finished part has of records is known without; damage is found when one is read.
    Errors: UserError for a folder that is not a part.
    """

    def __init__(self, path: Path, check: bool = True) -> None:
        self.path = path
        self.manifest = _read_manifest(path)
        self.part = JobPart.parse(self.manifest["part"])
        self.results: dict[str, JobResult] = {}
        self.queries: dict[FileVersion, QueryOrError] = {}
        self.tried: Counter[str] = Counter()  # how often each job without a result was begun
        self._whole = 0, 0  # bytes of the journal and of the records that are whole
        with open(path / "journal", "rb") as lines, open(path / RECORDS, "rb") as records:
            written = os.fstat(records.fileno()).st_size
            for text, length in _whole_lines(lines):
                job, _, sizes, crc = json.loads(text)
                journal, at = self._whole
                if (check and _crc(records.fileno(), sum(sizes), at) != crc) or at + sum(sizes) > written:
                    break
                self._take(job, JobResult(text, at, tuple(sizes)))
                self._whole = journal + length, at + sum(sizes)

    @property
    def finished(self) -> bool:
        """Whether all jobs are done, for the inputs of the manifest."""
        return _END in self.results and self.results[_END].data == self.manifest["inputs"]

    def structures(self) -> list[tuple[str, JobResult]]:
        """Return names and results of the jobs of structure files, sorted by name."""
        return sorted((job, result) for job, result in self.results.items() if job.startswith("structure "))

    def record(self, at: int, size: int) -> bytes:
        """Read one of the records.  No file stays open: a merge may have thousands of parts."""
        with open(self.path / RECORDS, "rb", buffering=0) as file:
            return pread(file.fileno(), size, at)

    def _take(self, job: str, result: JobResult) -> list[str]:
        """Do what a line of the journal says, and return the jobs that no longer run."""
        ended: list[str] = []
        if job == _BEGUN:
            self.tried.update(result.data)
        elif job == _STOPPED:
            ended = result.data
        elif job == _FORGOTTEN:
            for name in result.data:
                self.results.pop(name, None)
        elif job == _QUERIES:
            found = _queries(result.data)
            self.queries |= found
            ended = [query_job(version) for version in found]
        else:
            self.results[job] = result
            ended = [job]
        for name in ended:
            self.tried.pop(name, None)
        return ended


def _crc(records: int, size: int, at: int) -> int | None:
    """Return the checksum of `size` bytes of the records at `at`, read in pieces; None if there are fewer."""
    crc = 0
    for start in range(at, at + size, _PIECE):
        piece = pread(records, min(_PIECE, at + size - start), start)
        if len(piece) < min(_PIECE, at + size - start):
            return None
        crc = zlib.crc32(piece, crc)
    return crc


def _whole_lines(lines: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield the lines of a journal without their checksums, each with its length, up to a torn one."""
    for line in lines:
        checksum, _, text = line.partition(b" ")
        if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
            return
        yield text, len(line)


class PartWriter(PartFolder):
    """A part, open for writing by this process alone; continues one that was begun with the same options.

    The inputs may have changed since it was begun: the caller asks which results still hold.
    Errors: UserError if another process is writing it, if it was begun with other options or by another version, if the
    folder holds files that are not a part's, or if it cannot be written.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        refuse_foreign(path, _OWN.fullmatch)
        self._lock = lock_folder(path, path)
        manifest = {"format": FORMAT, "version": VERSION, **manifest}
        file, journal, records = (path / name for name in ("plan.json", "journal", "records"))
        is_begun = file.exists() and journal.exists() and journal.stat().st_size
        begun = _read_manifest(path) if is_begun else None
        if begun is not None:
            _check_same_run(path, begun, manifest)
        if begun != manifest:
            fresh = path / "plan.json.new"
            fresh.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
            fresh.rename(file)
        journal.touch()
        records.touch()
        super().__init__(path)
        self._begun: set[str] = set()  # by this process, and not ended
        self._journal_file = open(journal, "r+b")  # noqa: SIM115 (open until the end)
        self._records_file = open(records, "r+b")  # noqa: SIM115
        for opened, size in zip((self._journal_file, self._records_file), self._whole):
            opened.truncate(size)  # cut off what a kill left torn
            opened.seek(size)

    def add(self, job: str, data: Any, records: Sequence[bytes] = ()) -> None:
        """Keep the result of a job and its records."""
        sizes, crc = [len(record) for record in records], 0
        for record in records:
            crc = zlib.crc32(record, crc)
        line = json.dumps([job, data, sizes, crc], separators=(",", ":")).encode() + b"\n"
        result = JobResult(line, self._records_file.tell(), tuple(sizes))
        with writing(self.path):
            self._records_file.writelines(records)
            self._records_file.flush()
            self._journal_file.write(b"%08x %s" % (zlib.crc32(line), line))
            self._journal_file.flush()
        self._begun.difference_update(self._take(job, result))

    def keep(self, job: str, data: Any) -> None:
        """Add a result unless the part has it already."""
        if job not in self.results or self.results[job].data != data:
            self.add(job, data)

    def add_queries(self, found: Sequence[tuple[FileVersion, QueryOrError]]) -> None:
        """Keep the queries of some alignments where the other parts of the store find them."""
        self.add(_QUERIES, [[*version, *query] for version, query in found])

    def begin(self, jobs: Sequence[str]) -> None:
        """Note that these jobs are tried now, so that a job that kills this process is known afterwards."""
        self.add(_BEGUN, list(jobs))
        self._begun.update(jobs)

    def forget(self, jobs: Sequence[str]) -> None:
        """Drop the results of jobs."""
        if jobs:
            self.add(_FORGOTTEN, list(jobs))

    def finish(self) -> None:
        """Mark the part as whole."""
        with writing(self.path):
            for file in (self._records_file, self._journal_file):
                os.fsync(file.fileno())
        self.add(_END, self.manifest["inputs"])

    def close(self) -> None:
        """Close the files and release the lock."""
        if self._begun:  # being interrupted by a stop does not count as killing the process
            with suppress(UserError, ValueError):  # a full disk, or a folder that was removed
                self.add(_STOPPED, sorted(self._begun))
        for file in (self._journal_file, self._records_file, self._lock):
            with suppress(OSError):  # on a full disk; `add` has said so
                file.close()


def remove_part(path: Path) -> None:
    """Delete a part's own files and its folder; its writer still has to be closed."""
    remove_own(path, _OWN.fullmatch)


def _read_manifest(path: Path) -> Manifest:
    try:
        manifest = json.loads((path / "plan.json").read_bytes())
        JobPart.parse(manifest["part"])
        known = (manifest["format"], manifest["version"]) == (FORMAT, VERSION)
        whole = {"part", "warpfold", "options", "inputs"} <= manifest.keys() and (path / RECORDS).exists()
    except (OSError, ValueError, KeyError, TypeError, RecursionError, UserError):
        whole = known = False
    if not whole:
        raise UserError(f"{path}: not a part of a store; `warpfold pack --shard I/N` makes them")
    if not known:
        raise UserError(f"{path}: a part of another version of WarpFold; remove it and pack it again")
    return manifest


def _check_same_run(path: Path, begun: Manifest, manifest: Manifest) -> None:
    """Raise UserError for other options or another version; the error also says which inputs differ."""
    found = differences(begun, manifest)
    version = begun["warpfold"] != manifest["warpfold"]
    if version:
        found.append(f"WarpFold {begun['warpfold']}, not {manifest['warpfold']}")
    if version or begun["options"] != manifest["options"]:
        raise UserError(
            f"{path}: an unfinished run with other inputs or options ({', '.join(found)}); repeat its command to "
            "finish it, or remove the folder to start over"
        )


def check_parts(parts: Sequence[PartFolder]) -> None:
    """Raise UserError unless these are all parts of one store, each given once and finished."""
    first = parts[0]
    by_number: dict[int, PartFolder] = {}
    for one in parts:
        if found := differences(first.manifest, one.manifest):
            raise UserError(
                f"{one.path}: belongs to another store than {first.path} (it differs in {', '.join(found)}); pack both "
                "with the same inputs and options"
            )
        if one.part.count != first.part.count:
            raise UserError(f"{one.path}: is part {one.part}, {first.path} is {first.part}; give the parts of one run")
        if (other := by_number.setdefault(one.part.number, one)) is not one:
            raise UserError(f"{one.path}: is part {one.part}, and so is {other.path}; give each part once")
        if not one.finished:
            raise UserError(f"{one.path}: part {one.part} is unfinished; repeat its command to finish it")
    missing = [str(n) for n in range(1, first.part.count + 1) if n not in by_number]
    if missing:
        raise UserError(
            f"{first.path}: of {first.part.count} parts, {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} "
            "missing; give all, made with --shard"
        )
