"""What is done in a folder of predictions, a line each: a kill loses nothing, no process writes another's file.

    OUT/summary.json           the run, with what earlier runs of the same command made
    OUT/journal/2-of-4.jsonl   what the second of four processes has done since; locked as long as it works
    OUT/journal/lock           held for a moment, when a process begins and when it ends

Whoever ends and finds everything done and nobody at work writes the whole summary and removes the journals
(docs/throughput.md).
"""

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from warpfold.bulk import JobPart
from warpfold.errors import UserError
from warpfold.files import NO_LOCKS, lock_file, sealed, writing

JOURNALS = "journal"  # the folder
WHOLE = JobPart(1, 1)
_NAME = re.compile(r"(\d+-of-\d+)(-[\w.-]+)?\.jsonl")

Key = tuple[str, str, int]  # of a prediction: protein, model, seed


@dataclass
class Done:
    """What is known of a run: the entries of its predictions, what failed, and how each process did."""

    entries: dict[Key, dict[str, Any]] = field(default_factory=dict)
    failures: dict[Key, str] = field(default_factory=dict)
    processes: list[dict[str, Any]] = field(default_factory=list)

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Add a line of a journal; an entry counts more than any failure."""
        if "process" in row:
            self.processes.append(row["process"])
        elif "error" in row:
            self.failures[key_of(row["of"])] = row["error"]
        elif "entry" in row:
            self.entries[key_of(row["of"])] = row["entry"]

    def lacks(self, keys: Sequence[Key]) -> bool:
        """Return whether there is neither a prediction nor a failure of some of these."""
        return any(key not in self.entries and key not in self.failures for key in keys)


def key_of(of: Sequence[Any]) -> Key:
    """Return a key as it was before JSON made a list of it."""
    name, model, seed = of
    return str(name), str(model), int(seed)


class Journal:
    """A file to which one process adds a line for each prediction; what is there when `add` returns outlives a kill.

    worker: names a process that works for another one; its file is not locked.
    Errors: UserError if another process of the same part is at work.
    """

    def __init__(self, out: Path, run: str, part: JobPart = WHOLE, worker: str = "") -> None:
        self.out, self.part = out, part
        path = out / JOURNALS / f"{part.number}-of-{part.count}{f'-{worker}' if worker else ''}.jsonl"
        with writing(path):
            self._file = _appending(path) if worker else _locked(path, at_work(out, str(part)))
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)  # a kill may have cut the last line off
        self._write({"run": run})

    def add(self, key: Key, entry: Mapping[str, Any] | None = None, error: str = "") -> None:
        """Add a prediction's entry in the summary, or why there is none."""
        self._write({"of": key, "entry": entry} if entry is not None else {"of": key, "error": error})

    def end(self, process: Mapping[str, Any]) -> None:
        """Add how this process did."""
        self._write({"process": process})

    def close(self) -> None:
        """Give up the file, and its lock."""
        self._file.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        with writing(self.out / JOURNALS):
            self._file.write(json.dumps(sealed(row)) + "\n")
            self._file.flush()


def at_work(out: Path, part: str) -> UserError:
    """Return the error that a process is at work there, on such a part."""
    of = "" if part == str(WHOLE) else f" on part {part}"
    return UserError(f"{out}: another process is at work there{of}; wait for it, or name another folder")


def read_journals(out: Path, run: str) -> Iterator[dict[str, Any]]:
    """Yield the lines that processes of this run have written.

    Errors: UserError for one that is not as it was written.
    """
    for path in _journals(out):
        with contextlib.suppress(FileNotFoundError), writing(path):  # removed meanwhile: the summary has it
            current = False
            for line in path.read_bytes().split(b"\n")[:-1]:  # what a kill or another process has not finished
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    row = None
                if not isinstance(row, dict) or row != sealed(row):
                    raise UserError(f"{path}: is damaged; delete it, and what it had is predicted again")
                if "run" in row:
                    current = row["run"] == run
                elif current:
                    yield row


def workers_at_work(out: Path, but: str = "") -> list[str]:
    """Return which parts, as "2/4", processes are working on, except for one part."""
    return [part for path in _journals(out) if (part := _part_of(path)) != but and _is_locked(path)]


def remove_journals(out: Path) -> None:
    """Delete all journals, when the summary has what they had; not where nobody can tell whether they are in use."""
    folder = out / JOURNALS
    with contextlib.suppress(OSError):
        with open(folder / "lock", encoding="utf-8") as file, contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        for path in [*_journals(out), folder / "lock"]:
            path.unlink(missing_ok=True)
        folder.rmdir()


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Hold the folder's lock: nobody else begins or ends there meanwhile."""
    path = out / JOURNALS / "lock"
    with writing(path):
        file = _wait_for(path)
    with file:
        yield


def _wait_for(path: Path) -> TextIO:
    while True:
        file = _appending(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return file
        if _is_still(file, path):
            return file
        file.close()


def _locked(path: Path, taken: UserError) -> TextIO:
    """Open a file to append to it, and lock it."""
    while True:
        _appending(path).close()
        file = lock_file(path, taken)
        if _is_still(file, path):
            return file
        file.close()


def _is_still(file: TextIO, path: Path) -> bool:
    """Return whether an open file is the one of this name: another process may have removed it before it was locked."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    return False


def _appending(path: Path) -> TextIO:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another process has just removed the empty folder
            return open(path, "a", encoding="utf-8")


def _is_locked(path: Path) -> bool:
    """Return whether a process holds a lock; where there are no locks, nobody seems to."""
    try:
        with open(path, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it is gone, or there are no locks
        return False
    return False


def _journals(out: Path) -> list[Path]:
    folder = out / JOURNALS
    return sorted(path for path in folder.glob("*.jsonl") if _NAME.fullmatch(path.name)) if folder.is_dir() else []


def _part_of(path: Path) -> str:
    """Return the part that a journal is of: "2-of-4.jsonl" -> "2/4"."""
    found = _NAME.fullmatch(path.name)
    return found[1].replace("-of-", "/") if found else ""
