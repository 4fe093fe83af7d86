"""A part of a store in the making: a folder with the answers of all jobs that are done, which outlives a kill.

`plan.json` says of what inputs and options it is, `records` holds bytes, and `journal` a line for each job: its
answer, and where its records lie.  A line is written after its records and under a checksum, so that whatever a kill
leaves, what is whole is known.
"""

import json
import os
import shutil
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warpfold.bulk import Part
from warpfold.data.folders import lock_folder
from warpfold.errors import UserError

FORMAT, VERSION = "warpfold-part", 1
_END = "end"  # the job after all jobs

Plan = dict[str, Any]  # "part", "warpfold" (version), "options", "inputs", as JSON can hold them


@dataclass(frozen=True)
class Answer:
    """What a job found, and where its records lie."""

    data: Any  # as JSON can hold it
    at: int  # in `records`
    sizes: list[int]


def part_path(out: Path, part: Part) -> Path:
    """Where a part of the store `out` is made.  Errors: UserError for "." and its like, beside which nothing lies."""
    if out.name in ("", ".."):
        raise UserError(f"--out {out}: no name for a store; name a folder that is not there yet")
    return out.with_name(f"{out.name}.part-{part.number}-of-{part.count}")


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
        self._whole = 0, 0  # bytes of the journal and of the records that are whole
        self._records = os.open(path / "records", os.O_RDONLY)
        self._read_journal()

    @property
    def part(self) -> Part:
        return Part.parse(self.plan["part"])

    @property
    def finished(self) -> bool:
        return _END in self.answers

    def jobs(self, kind: str) -> list[tuple[str, Answer]]:
        """Names and answers of the jobs whose names begin with `kind` and a blank, in the order of the names."""
        return sorted((job, answer) for job, answer in self.answers.items() if job.startswith(f"{kind} "))

    def record(self, answer: Answer, number: int) -> bytes:
        """One of the records of an answer."""
        return os.pread(self._records, answer.sizes[number], answer.at + sum(answer.sizes[:number]))

    def close(self) -> None:
        os.close(self._records)

    def _read_journal(self) -> None:
        """Takes lines as long as they, and what they say of the records, are whole."""
        journal, at = 0, 0
        with open(self.path / "journal", "rb") as lines:
            for line in lines:
                checksum, _, text = line.partition(b" ")
                if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
                    break
                job, data, sizes, crc = json.loads(text)
                if zlib.crc32(os.pread(self._records, sum(sizes), at)) != crc:
                    break
                self.answers[job] = Answer(data, at, sizes)
                journal, at = journal + len(line), at + sum(sizes)
        self._whole = journal, at


class PartWriter(PartFolder):
    """A part, open for writing by this process alone; continues one that was begun with the same plan.

    Errors: UserError if another process is writing it, if it was begun with another plan, or the disk refuses.
    """

    def __init__(self, path: Path, plan: Plan) -> None:
        self._lock = lock_folder(path, path)
        plan = {"format": FORMAT, "version": VERSION, **plan}
        file = path / "plan.json"
        if file.exists() and _size(path / "journal"):
            _refuse_other(path, _read_plan(path), plan)
        else:
            fresh = path / "plan.json.new"
            fresh.write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
            fresh.rename(file)
        for name in ("journal", "records"):
            (path / name).touch()
        super().__init__(path)
        self._journal_file = open(path / "journal", "r+b")  # noqa: SIM115 (open until the end)
        self._records_file = open(path / "records", "r+b")  # noqa: SIM115
        for opened, size in zip((self._journal_file, self._records_file), self._whole):
            opened.truncate(size)
            opened.seek(size)

    def add(self, job: str, data: Any, records: Sequence[bytes] = ()) -> None:
        """Keeps the answer of a job and its records."""
        try:
            answer = Answer(data, self._records_file.tell(), [len(record) for record in records])
            crc = 0
            for record in records:
                self._records_file.write(record)
                crc = zlib.crc32(record, crc)
            self._records_file.flush()
            text = json.dumps([job, data, answer.sizes, crc], separators=(",", ":")).encode() + b"\n"
            self._journal_file.write(b"%08x %s" % (zlib.crc32(text), text))
            self._journal_file.flush()
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written: {error.strerror}") from error
        self.answers[job] = answer

    def finish(self) -> None:
        """Marks the part as whole."""
        for file in (self._records_file, self._journal_file):
            os.fsync(file.fileno())
        self.add(_END, None)

    def close(self) -> None:
        """Lets others at it."""
        super().close()
        for file in (self._records_file, self._journal_file, self._lock):
            with suppress(OSError):  # on a full disk; `add` has said so
                file.close()

    def remove(self) -> None:
        """Takes the folder away; to be closed yet."""
        shutil.rmtree(self.path, ignore_errors=True)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _read_plan(path: Path) -> Plan:
    file = path / "plan.json"
    try:
        plan = json.loads(file.read_text(encoding="utf-8"))
        known = (plan["format"], plan["version"]) == (FORMAT, VERSION)
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path}: no part of a store; `warpfold pack --shard I/N` makes them") from None
    if not known:
        raise UserError(f"{path}: a part of another version of WarpFold; remove it and pack it again")
    return plan


def _refuse_other(path: Path, begun: Plan, plan: Plan) -> None:
    found = differences(begun, plan)
    if begun["warpfold"] != plan["warpfold"]:
        found.append(f"WarpFold {begun['warpfold']}, not {plan['warpfold']}")
    if found:
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
