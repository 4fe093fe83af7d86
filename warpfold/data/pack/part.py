"""A part of a store in the making: a folder with the answers of all jobs that are done, which outlives a kill.

`plan.json` says of what inputs and options it is, `records` holds bytes, and `journal` a line for each job: its
answer, and where its records lie.  A line is written after its records and under a checksum, so that whatever a kill
leaves, what is whole is known.  Another line says that a job was begun: one that kills every process that tries it is
known by it.  `queries` has the queries of the alignments that this part read; other parts of the store look there.
"""

import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warpfold.bulk import JobPart
from warpfold.errors import UserError
from warpfold.files import lock_folder, pread, refuse_foreign, remove_own

FORMAT, VERSION = "warpfold-part", 2
_END = "end"  # the job after all jobs; its answer is the inputs that were done
_BEGUN, _STOPPED, _FORGOTTEN = "begun", "stopped", "forgotten"  # no jobs: lines that say something about some
_OWN = ("plan.json", "plan.json.new", "journal", "records", "queries", "lock")
_PIECE = 1 << 24  # bytes of the records that are checked at a time

Identity = tuple[str, int, int]  # of an alignment: name, bytes, nanoseconds since 1970
Query = tuple[str, str]  # of an alignment, and what is wrong with it: one of them is empty

Plan = dict[str, Any]  # "part", "warpfold" (version), "options", "inputs", as JSON can hold them


@dataclass(frozen=True)
class Answer:
    """What a job found, and where its records lie."""

    data: Any  # as JSON can hold it
    at: int  # in `records`
    sizes: list[int]


def part_path(out: Path, part: JobPart) -> Path:
    """Where a part of the store `out` is made.  Errors: UserError for "." and its like, beside which nothing lies."""
    if out.name in ("", ".."):
        raise UserError(f"--out {out}: no name for a store; name a folder that is not there yet")
    return out.with_name(f"{out.name}.part-{part.number}-of-{part.count}")


def part_paths(out: Path, count: int) -> list[Path]:
    """Return the folders of parts of the store `out`, of `count` in all, that are there."""
    begin, end = f"{out.name}.part-", f"-of-{count}"
    return [out.with_name(name) for name in os.listdir(out.parent) if name.startswith(begin) and name.endswith(end)]


def query_job(identity: Identity) -> str:
    """Return the name of the job that reads an alignment's query: of this very file, not of a later one of its name."""
    return " ".join(map(str, ("query", *identity)))


def is_alike(path: Path, plan: Plan) -> bool:
    """Return whether a folder is a part that is made by this version with the same options, of whatever inputs."""
    try:
        other = _read_plan(path)
    except UserError:
        return False
    return bool(other["warpfold"] == plan["warpfold"] and other["options"] == plan["options"])


def differences(one: Plan, other: Plan) -> list[str]:
    """What differs between two plans, as a person would say it."""
    found = []
    for group, say in (("options", "--{}".format), ("inputs", "{} files".format)):
        names = [*one[group], *(name for name in other[group] if name not in one[group])]
        found += [say(name.replace("_", "-")) for name in names if one[group].get(name) != other[group].get(name)]
    return found


class PartFolder:
    """A part, open for reading: its plan, and the answers of its jobs by name.

    Errors: UserError for a folder that is no part.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan = _read_plan(path)
        self.answers: dict[str, Answer] = {}
        self.tried: Counter[str] = Counter()  # jobs that were begun and have no answer: how often
        self._whole = 0, 0  # bytes of the journal and of the records that are whole
        with open(path / "records", "rb") as records:
            self._read_journal(records.fileno())

    @property
    def part(self) -> JobPart:
        return JobPart.parse(self.plan["part"])

    @property
    def finished(self) -> bool:
        """Return whether all jobs are done, for the very inputs of the plan."""
        return _END in self.answers and self.answers[_END].data == self.plan["inputs"]

    def jobs(self, kind: str) -> list[tuple[str, Answer]]:
        """Names and answers of the jobs whose names begin with `kind` and a blank, in the order of the names."""
        return sorted((job, answer) for job, answer in self.answers.items() if job.startswith(f"{kind} "))

    def record(self, answer: Answer, number: int) -> bytes:
        """Return one of the records of an answer.  No file stays open: a merge may have thousands of parts."""
        with open(self.path / "records", "rb") as records:
            return pread(records.fileno(), answer.sizes[number], answer.at + sum(answer.sizes[:number]))

    def _read_journal(self, records: int) -> None:
        """Takes lines as long as they, and what they say of the records, are whole."""
        journal, at = 0, 0
        for text, length in whole_lines(self.path / "journal"):
            job, data, sizes, crc = json.loads(text)
            if _crc(records, sum(sizes), at) != crc:
                break
            self._take(job, Answer(data, at, sizes))
            journal, at = journal + length, at + sum(sizes)
        self._whole = journal, at

    def _take(self, job: str, answer: Answer) -> None:
        """Do what a line of the journal says."""
        if job == _BEGUN:
            self.tried.update(answer.data)
        elif job == _STOPPED:
            for name in answer.data:
                self.tried.pop(name, None)
        elif job == _FORGOTTEN:
            for name in answer.data:
                self.answers.pop(name, None)
        else:
            self.answers[job] = answer
            self.tried.pop(job, None)


def _crc(file: int, size: int, at: int) -> int | None:
    """Return the checksum of `size` bytes of a file at `at`, read in pieces; None if there are fewer."""
    crc = 0
    for start in range(at, at + size, _PIECE):
        piece = pread(file, min(_PIECE, at + size - start), start)
        if len(piece) < min(_PIECE, at + size - start):
            return None
        crc = zlib.crc32(piece, crc)
    return crc


def whole_lines(path: Path, at: int = 0) -> Iterator[tuple[bytes, int]]:
    """Yield the lines of a journal from byte `at` on, without checksums, each with its length, until one is torn."""
    with open(path, "rb") as lines:
        lines.seek(at)
        for line in lines:
            checksum, _, text = line.partition(b" ")
            if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
                return
            yield text, len(line)


def checked_line(value: Any) -> bytes:
    """Return a line of a journal: a value as JSON, under its checksum."""
    text = json.dumps(value, separators=(",", ":")).encode() + b"\n"
    return b"%08x %s" % (zlib.crc32(text), text)


class PartWriter(PartFolder):
    """A part, open for writing by this process alone; continues one that was begun with the same options.

    The inputs may be others than those it was begun with: who does the jobs asks which answers still hold.
    Errors: UserError if another process is writing it, if it was begun with other options or by another version, if the
    folder holds what no part has, or the disk refuses.
    """

    def __init__(self, path: Path, plan: Plan) -> None:
        refuse_foreign(path, _OWN.__contains__)
        self._lock = lock_folder(path, path)
        plan = {"format": FORMAT, "version": VERSION, **plan}
        file = path / "plan.json"
        begun = _read_plan(path) if file.exists() and _size(path / "journal") else None
        if begun is not None:
            _refuse_other(path, begun, plan)
        if begun != plan:
            fresh = path / "plan.json.new"
            fresh.write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
            fresh.rename(file)
        for name in ("journal", "records", "queries"):
            (path / name).touch()
        super().__init__(path)
        self.queries: dict[Identity, Query] = {}
        whole = 0
        for text, length in whole_lines(path / "queries"):
            self._take_queries(text)
            whole += length
        self._journal_file = open(path / "journal", "r+b")  # noqa: SIM115 (open until the end)
        self._records_file = open(path / "records", "r+b")  # noqa: SIM115
        self._queries_file = open(path / "queries", "r+b")  # noqa: SIM115
        self._begun: set[str] = set()  # by this process, and not done
        self._opened = (self._journal_file, self._records_file, self._queries_file)
        for opened, size in zip(self._opened, (*self._whole, whole)):
            opened.truncate(size)
            opened.seek(size)

    def _take_queries(self, text: bytes) -> None:
        for name, size, changed, query, error in json.loads(text):
            self.queries[(name, size, changed)] = (query, error)
            self.tried.pop(query_job((name, size, changed)), None)

    def add(self, job: str, data: Any, records: Sequence[bytes] = ()) -> None:
        """Keeps the answer of a job and its records."""
        try:
            answer = Answer(data, self._records_file.tell(), [len(record) for record in records])
            crc = 0
            for record in records:
                self._records_file.write(record)
                crc = zlib.crc32(record, crc)
            self._records_file.flush()
            self._journal_file.write(checked_line([job, data, answer.sizes, crc]))
            self._journal_file.flush()
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written: {error.strerror}") from error
        self._take(job, answer)
        self._begun.discard(job)

    def add_queries(self, found: Sequence[tuple[Identity, Query]]) -> None:
        """Keep the queries of some alignments, where the other parts of the store find them."""
        try:
            line = checked_line([[*identity, *query] for identity, query in found])
            self._queries_file.write(line)
            self._queries_file.flush()
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written: {error.strerror}") from error
        self.queries.update(found)
        for identity, _ in found:
            self.tried.pop(query_job(identity), None)
            self._begun.discard(query_job(identity))

    def begin(self, jobs: Sequence[str]) -> None:
        """Note that these jobs are tried now, so that one that ends this process is known for it afterwards."""
        self.add(_BEGUN, list(jobs))
        self._begun.update(jobs)

    def forget(self, jobs: Sequence[str]) -> None:
        """Drop the answers of jobs."""
        if jobs:
            self.add(_FORGOTTEN, list(jobs))

    def finish(self) -> None:
        """Marks the part as whole."""
        for file in (self._records_file, self._journal_file):
            os.fsync(file.fileno())
        self.add(_END, self.plan["inputs"])

    def close(self) -> None:
        """Release the part; jobs that were begun and are not done are not held against their files."""
        if self._begun:
            with suppress(UserError, ValueError):  # a full disk, or a folder that was removed
                self.add(_STOPPED, sorted(self._begun))
        for file in (*self._opened, self._lock):
            with suppress(OSError):  # on a full disk; `add` has said so
                file.close()

    def remove(self) -> None:
        """Takes the folder away; to be closed yet."""
        remove_part(self.path)


def remove_part(path: Path) -> None:
    """Remove the folder of a part, and nothing that parts do not have."""
    remove_own(path, _OWN.__contains__)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _read_plan(path: Path) -> Plan:
    file = path / "plan.json"
    try:
        plan = json.loads(file.read_text(encoding="utf-8"))
        known = (plan["format"], plan["version"]) == (FORMAT, VERSION)
        whole = {"part", "warpfold", "options", "inputs"} <= plan.keys() and (path / "records").exists()
    except (OSError, ValueError, KeyError, TypeError):
        whole = known = False
    if not whole:
        raise UserError(f"{path}: no part of a store; `warpfold pack --shard I/N` makes them")
    if not known:
        raise UserError(f"{path}: a part of another version of WarpFold; remove it and pack it again")
    return plan


def _refuse_other(path: Path, begun: Plan, plan: Plan) -> None:
    """Raise UserError for other options or another version, and say which inputs differ as well."""
    found = differences(begun, plan)
    version = begun["warpfold"] != plan["warpfold"]
    if version:
        found.append(f"WarpFold {begun['warpfold']}, not {plan['warpfold']}")
    if version or begun["options"] != plan["options"]:
        raise UserError(
            f"{path}: an unfinished run with other inputs or options ({', '.join(found)}); repeat its command to "
            "finish it, or remove the folder to start over"
        )


def check_parts(parts: Sequence[PartFolder]) -> None:
    """UserError unless these are all parts of one store, each once and whole."""
    first = parts[0]
    by_number: dict[int, PartFolder] = {}
    for one in parts:
        if found := differences(first.plan, one.plan):
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
