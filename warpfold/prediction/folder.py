"""The output folder of a run of `predict`: ownership, completed entries, final summary (docs/reference/outputs.md).

    OUT/summary.json               the run, with the predictions of finished runs of the same command
    OUT/predict.log                appended to by all processes, line by line
    OUT/records/NAME-DIGEST.json   one record for each prediction or failure that is not in summary.json yet
    OUT/records/part-2-of-4.lock   locked while the second of four processes works
    OUT/records/lock               locked for a moment when a process begins, ends, or adds a row to a table

A prediction is done if the summary or a record of this run lists it and its files are unchanged.  A record appears,
whole, after the files of its prediction: a kill loses the predictions in progress and nothing else.  The process that
ends last, with every prediction done, writes the summary and removes the records (docs/howto/many_proteins.md).
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

from warpfold import __version__
from warpfold.bulk import JobPart
from warpfold.data.store.store import Store, StoreWriter
from warpfold.data.structure.write import move_atoms
from warpfold.errors import UserError
from warpfold.files import (
    NO_LOCKS,
    RECORDS,
    append_line,
    claim_folder,
    file_name,
    lock_file,
    sealed,
    write_atomically,
    write_summary,
    writing,
)
from warpfold.prediction import outputs
from warpfold.prediction.folding import FoldItem, FoldOutcome, Group, Key, one_line, part_of
from warpfold.prediction.pages import headline, prediction_report
from warpfold.progress import are_hidden
from warpfold.report.citations import bibtex
from warpfold.report.report import write_report
from warpfold.scoring.score_table import ScoreTables, check_tables, remove_tables, row_of
from warpfold.scoring.selection import Selection, Shortlist

logger = logging.getLogger("warpfold")
WHOLE = JobPart(1, 1)
# Records, their drafts, and locks.
_OURS = re.compile(r"[\w.-]+\.json(\.[0-9a-f]{8})?|(part-\d+-of-\d+\.)?lock")
_PART_LOCK = re.compile(r"part-(\d+)-of-(\d+)\.lock")
Entry = dict[str, Any]  # of a prediction in summary.json


@dataclass
class Completed:
    """The entries of finished predictions, the errors of failed ones, and the timings of the processes."""

    entries: dict[Key, Entry] = field(default_factory=dict)
    failures: dict[Key, str] = field(default_factory=dict)
    processes: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class PredictionFolder:
    """An output folder that one process fills with predictions, or several processes with a part each.

    new: the summary of a new run.  items: all predictions of the run, in the order of the summary.
    keep: how many predictions of each query keep all files, the best ones; or the selection of those that keep their
    structures; None: all.  tables: score tables that get a row for each prediction.  store: for the representations.
    """

    out: Path
    new: dict[str, Any]
    items: Sequence[FoldItem]
    part: JobPart = WHOLE
    keep: int | Selection | None = None
    tables: ScoreTables | None = None
    store: "RepresentationStore | None" = None
    keys_of_part: set[Key] = field(default_factory=set)
    _lock: TextIO | None = None

    @property
    def run(self) -> str:
        return str(self.new["run"])

    @cached_property
    def is_several(self) -> bool:
        """Whether there are several predictions of each query."""
        return len({item.query.name for item in self.items}) < len(self.items)

    def groups_of(self, keys: Sequence[Sequence[Sequence[Any]]]) -> list[Group]:
        """Return the items of the groups that `begin` has returned, perhaps on another rank."""
        by_key = {item.key: item for item in self.items}
        return [tuple(by_key[key_of(key)] for key in group) for group in keys]

    def recorder(self) -> "Recorder":
        """Return a recorder for the predictions of this process."""
        shortlist = Shortlist(self.keep) if isinstance(self.keep, Selection) else None
        return Recorder(self.out, self.run, self.tables, shortlist, are_hidden())

    def close(self) -> None:
        """Release the part."""
        if self._lock is not None:
            self._lock.close()

    def begin(self, groups: Sequence[Group], force: bool) -> list[list[Key]]:
        """Claim the folder and this part; return the keys of this part's groups without finished predictions.

        A prediction whose files are missing or changed is made again, with a warning.  Predictions of an earlier run
        are kept if the run is the same, and deleted otherwise.  Other files in their folders stay.
        Errors: UserError for a folder that holds something else, or in which another process works on this part.
        """
        groups = part_of(groups, self.part)
        self.keys_of_part = {item.key for group in groups for item in group}
        claim_folder(self.out, self.new["format"], self.run, force)  # before anything is written there
        if self.store is not None:
            self.store.check()
        for item in (item for group in groups for item in group):
            outputs.refuse_links(self.out, f"{file_name(item.query.name)}/{item.below if self.is_several else ''}")
        with alone(self.out):
            earlier = claim_folder(self.out, self.new["format"], self.run, force) or {}
            same = earlier.get("run") == self.run
            for other in parts_at_work(self.out):
                if not same or other == self.part or other.count != self.part.count:
                    raise at_work(self.out, other)
            check_tables(self.out, self.tables, earlier)
            if not same:
                self._remove_earlier(earlier)
                write_summary(self.out, self.new)
            name = f"part-{self.part.number}-of-{self.part.count}.lock"
            self._lock = _locked(self.out / RECORDS / name, at_work(self.out, self.part))
            table_fields = (
                {} if self.tables is None else {"tables": sorted({*earlier.get("tables", []), *self.tables.names})}
            )
            if same and earlier != (running := earlier | {"status": "running"} | table_fields):
                write_summary(self.out, running)
            completed = self._completed()
        lost_keys = set()
        # Reading thousands of files takes minutes, so this happens without the lock.
        for key in self.keys_of_part & completed.entries.keys():
            if damaged := outputs.damaged_files(self.out, completed.entries[key]):
                outputs.clear_damaged(self.out, completed.entries.pop(key), damaged)
                logger.warning("%s: missing, or not what was written; it is predicted again", damaged[0])
                lost_keys.add(key)
        if self.tables is not None:
            # A kill may have come between a record and its row.
            with alone(self.out):
                entries = self._completed().entries
                self.tables.rebuild(entries[item.key] for item in self.items if item.key in entries.keys() - lost_keys)
        unfinished = [[item for item in group if item.key not in completed.entries] for group in groups]
        if same:
            outputs.remove_drafts(
                self.out / file_name(item.query.name) / (item.below if self.is_several else "")
                for group in unfinished
                for item in group
            )
        return [[item.key for item in group] for group in unfinished if group]

    def _remove_earlier(self, earlier: Mapping[str, Any]) -> None:
        """Delete the predictions, tables and records of another run, as its summary and its records list them."""
        records = list(read_records(self.out, str(earlier.get("run"))))
        for entry in [*earlier.get("predictions", []), *(record["entry"] for record in records if "entry" in record)]:
            if all(part == file_name(part) for part in Path(entry["folder"]).parts):
                outputs.remove_prediction(self.out / entry["folder"], entry["name"])
                archive = f"{file_name(entry['name'])}/{outputs.file_names(entry['name'])['archive']}"
                remove_copies(self.out, entry["name"], [*entry.get("ranked", {}).values(), archive])
        remove_tables(self.out, earlier.get("tables", ()))
        for path in _record_files(self.out):
            path.unlink()

    def finish(self, process: Mapping[str, Any], refused: Mapping[str, int]) -> dict[str, Any]:
        """End this process's work: write the summary if all predictions are done and no other process works.

        Otherwise return the summary of this part alone.
        process: timings of this process.  refused: why fast operations were not used, and how often.
        """
        with alone(self.out):
            record = {"process": {"part": str(self.part), **process, "refused": refused}}
            name = f"process-{self.part.number}-of-{self.part.count}-{time.time_ns()}.json"
            _write_record(self.out / RECORDS / name, {"run": self.run, **record})
            self.close()
            completed = self._completed()
            completed.entries = {
                key: entry
                for key, entry in completed.entries.items()
                if not outputs.damaged_files(self.out, entry, thorough=False)
            }
            lacking = {item.key for item in self.items} - completed.entries.keys() - completed.failures.keys()
            is_last = not lacking and not parts_at_work(self.out)
            summary = self._summary(completed, None if is_last else self.keys_of_part)
            summary |= {"seconds": process["seconds"]}
            if is_last:
                entries, summary["ranking"] = rank_predictions(summary["predictions"])
                kept_indices = self._kept(entries)
                for index, entry in enumerate(entries):
                    if index in kept_indices:
                        continue
                    if isinstance(self.keep, Selection):
                        entry |= outputs.drop_prediction(self.out, entry)
                    elif not entry.get("thinned"):
                        below = self.out / entry["folder"]
                        files = outputs.thin_prediction(below, entry["name"], entry["files"])
                        entry |= {"files": files, "checksums": outputs.checksums_of(below, files), "thinned": True}
                if self.store is not None:
                    self.store.write(self.out, entries)
                    entries = [as_stored(entry) if is_stored(entry) else entry for entry in entries]
                summary["predictions"] = copy_by_rank(self.out, entries) if self.is_several else entries
                if self.tables is not None:
                    summary["tables"] = self.tables.rebuild(summary["predictions"], finished=True)
                write_report(self.out / "report.html", prediction_report(self.out, summary))
                multimer = any(item.model.multimer for item in self.items)
                write_atomically(self.out / outputs.CITATIONS, bibtex(summary, multimer))
                summary = write_summary(self.out, summary)
                remove_records(self.out)
                if self.store is not None:
                    self.store.remove_packed(self.out, entries)
        return summary

    def _kept(self, entries: Sequence[Entry]) -> set[int]:
        """Return the indices of the entries that keep all their files."""
        if isinstance(self.keep, Selection):
            return self.keep.chosen(map(row_of, entries))
        # Entries without a rank still have all their files.
        return {
            index
            for index, entry in enumerate(entries)
            if self.keep is None or entry.get("rank", self.keep) <= self.keep
        }

    def _summary(self, completed: Completed, keys: set[Key] | None) -> dict[str, Any]:
        """Return the summary of the whole run, or, while other processes work, of the given keys."""
        items = [item for item in self.items if keys is None or item.key in keys]
        # Records that could not be read belong to no part, so the first part lists them.
        failures = list(self.new["failures"]) if keys is None or self.part.number == 1 else []
        for item in items:
            if item.key in completed.failures and item.key not in completed.entries:
                model_and_seed = {"model": item.model.name, "seed": item.seed} if self.is_several else {}
                failures.append({"name": item.query.name, **model_and_seed, "error": completed.failures[item.key]})
        refused: dict[str, int] = {}
        for process in completed.processes:
            for reason, count in process.get("refused", {}).items():
                refused[reason] = refused.get(reason, 0) + count
        return self.new | {
            "status": "running" if keys is not None else "failed" if failures else "complete",
            "predictions": [
                completed.entries[item.key] | {"model": item.model.name}
                for item in items
                if item.key in completed.entries
            ],
            "failures": failures,
            "refused": refused,
            "processes": [
                {key: value for key, value in process.items() if key != "refused"} for process in completed.processes
            ],
        }

    def _completed(self) -> Completed:
        """Collect the results of this run from the summary and the records; an entry outranks a failure."""
        # Records move into the summary, so they are read first.
        records = list(read_records(self.out, self.run))
        earlier = claim_folder(self.out, self.new["format"], self.run) or self.new
        completed, first = Completed(), self.items[0]
        for entry in earlier["predictions"]:
            completed.entries[entry["name"], entry.get("model", first.model.name), entry["seed"]] = entry
        for failure in earlier["failures"]:
            key = failure["name"], failure.get("model", first.model.name), failure.get("seed", first.seed)
            completed.failures[key] = failure["error"]
        for record in records:
            if "process" in record:
                completed.processes.append(record["process"])
            elif "error" in record:
                completed.failures[key_of(record["key"])] = record["error"]
            else:
                completed.entries[key_of(record["key"])] = record["entry"]
        if self.store is not None:
            held = self.store.keys()
            gone = [key for key, one in completed.entries.items() if one.get("stored") and one["folder"] not in held]
            if gone := [key for key in gone if is_stored(completed.entries[key])]:
                logger.warning("%s: lacks %d of its entries, which are predicted again", self.store.path, len(gone))
            completed.entries = {
                key: as_stored(entry) if entry["folder"] in held and is_stored(entry) else entry
                for key, entry in completed.entries.items()
                if key not in gone
            }
        # Predictions whose files an earlier `keep` removed, and this one wants, are made again.
        kept_indices, keeps_some = self._kept([*completed.entries.values()]), isinstance(self.keep, Selection)
        for index, (key, entry) in enumerate([*completed.entries.items()]):
            is_kept = index in kept_indices
            if (is_kept and entry.get("thinned")) or ((is_kept or not keeps_some) and entry.get("dropped")):
                del completed.entries[key]
        return completed


class RunLog:
    """Context that appends the package's messages, and the error that ends the run, to OUT/predict.log.

    With --quiet, only warnings and errors are written. Lines wait until `open`, because nothing is written before the
    folder is claimed.
    """

    def __init__(self, out: Path) -> None:
        self._path, self._waiting, self._is_open = out / outputs.LOG, list[str](), False
        self._level = logging.WARNING if are_hidden() else logging.INFO
        self._loggers = [logging.getLogger(name) for name in ("warpfold", "warpfold.plan", "warpfold.device")]

    def __enter__(self) -> "RunLog":
        # A handler instead of a filter would keep warnings from stderr, where they go if a logger has no handlers.
        for logger in self._loggers:
            logger.addFilter(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.write(f"stopped: {one_line(error)}", logging.ERROR)
        for logger in self._loggers:
            logger.removeFilter(self)

    def write(self, text: str, level: int = logging.INFO) -> None:
        """Write a line."""
        if level < self._level:
            return
        if self._is_open:
            append_line(self._path, text)
        else:
            self._waiting.append(text)

    def open(self) -> None:
        """Write the waiting lines; later lines are written at once."""
        self._is_open = True
        for text in self._waiting:
            append_line(self._path, text)

    def filter(self, record: logging.LogRecord) -> bool:
        """Write a message of the package, which other handlers get too."""
        self.write(record.getMessage(), record.levelno)
        return True


class Recorder:
    """Write the record of each prediction of one process; once `add` returns, a kill loses neither.

    tables: get a row for each entry.  shortlist: the candidates of this process for the final selection; the files of
    predictions that leave it are deleted.  quiet: log only failures.
    """

    def __init__(
        self, out: Path, run: str, tables: ScoreTables | None, shortlist: Shortlist | None, quiet: bool = False
    ) -> None:
        self.out, self.run, self.tables, self.shortlist, self.quiet = out, run, tables, shortlist, quiet

    def add(self, outcome: FoldOutcome) -> None:
        """Record and log the entry of a prediction, or its error; nothing if another rank writes."""
        key, entry = outcome.item.key, outcome.entry
        name = f"{key[0]} ({key[1]}, seed {key[2]})"
        if entry is None:
            if outcome.error:
                append_line(self.out / outputs.LOG, f"failed {name}: {outcome.error}")
                self.write(key, {"error": outcome.error})
            return
        if not self.quiet:
            seconds = sum(entry["seconds"].values())
            text = f"{name}: {headline(entry)}, mean pLDDT {entry['mean_plddt']:.1f}, {seconds:.1f} s"
            append_line(self.out / outputs.LOG, text)
        if self.tables is None:
            self.write(key, {"entry": entry})
            return
        # A process that rebuilds the tables from the records sees both or neither.
        with alone(self.out):
            self.write(key, {"entry": entry})
            self.tables.append(entry)
        if self.shortlist is not None and not entry.get("dropped"):
            for beaten_key, beaten_entry in self.shortlist.add(row_of(entry), (key, entry)):
                self.write(beaten_key, {"entry": beaten_entry | {"files": {}, "checksums": {}, "dropped": True}})
                outputs.drop_prediction(self.out, beaten_entry)

    def write(self, key: Key, result: Mapping[str, Any]) -> None:
        """Write the record of a prediction, replacing an earlier one."""
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
        path = self.out / RECORDS / f"{file_name(key[0])}-{digest[:16]}.json"
        _write_record(path, {"run": self.run, "key": key, **result})


def _write_record(path: Path, record: Mapping[str, Any]) -> None:
    # Not synced: after a power cut a missing record costs one prediction.
    write_atomically(path, json.dumps(sealed(record)) + "\n", sync=False)


def read_records(out: Path, run: str) -> Iterator[dict[str, Any]]:
    """Yield the records of a run.  A damaged record is skipped with a warning, and its prediction is made again."""
    for path in _record_files(out):
        # Another process may have removed the record, after it wrote the summary.
        with contextlib.suppress(FileNotFoundError), writing(path):
            try:
                record = json.loads(path.read_bytes())
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict) or record != sealed(record):
                logger.warning("%s: is damaged; its prediction is made again", path)
            elif record["run"] == run:
                yield record


def _record_files(out: Path) -> list[Path]:
    return sorted((out / RECORDS).glob("[!.]*.json"))


def remove_records(out: Path) -> None:
    """Delete all records, once the summary has their contents.

    On a file system without locks the records stay, as other processes may need them.
    """
    folder = out / RECORDS
    with contextlib.suppress(OSError):
        # The caller holds this lock, so locking it again fails unless the file system has no locks.
        with open(folder / "lock", encoding="utf-8") as file, contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        for path in folder.iterdir():
            if _OURS.fullmatch(path.name):
                path.unlink(missing_ok=True)
        folder.rmdir()


def at_work(out: Path, part: JobPart) -> UserError:
    """Return the error for a part on which another process works."""
    part_text = "" if part == WHOLE else f" on part {part}"
    return UserError(f"{out}: another process is at work there{part_text}. Wait for it, or name another folder.")


def parts_at_work(out: Path) -> list[JobPart]:
    """Return the parts whose lock a process holds; without file locks, none."""
    parts = []
    for path in sorted((out / RECORDS).glob("part-*.lock")):
        if match := _PART_LOCK.fullmatch(path.name):
            try:
                with open(path, encoding="utf-8") as file:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                parts.append(JobPart(int(match[1]), int(match[2])))
            except OSError:  # removed meanwhile, or no locks
                pass
    return parts


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Hold the folder's lock: no other process begins or ends there meanwhile."""
    path = out / RECORDS / "lock"
    with writing(path):
        file = _locked(path)
    with file:
        yield


def _locked(path: Path, taken: UserError | None = None) -> TextIO:
    """Create a file and its folder, and lock the file.

    taken: the error to raise if another process holds the lock; None: wait for the lock.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may remove the file, or the empty folder, at any moment until the lock is held.
        with contextlib.suppress(FileNotFoundError):
            if taken is not None:
                file = lock_file(path, taken)
            else:
                file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (the caller closes it)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX)
                except OSError as error:
                    if error.errno not in NO_LOCKS:
                        file.close()
                        raise
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    return file
            file.close()


@dataclass(frozen=True)
class RepresentationStore:
    """The store of the representations of a run, by the folders of its predictions.

    It is written when all predictions are done, from a packed file next to each of them, in the order of the summary.
    If the same command later adds predictions, a new store with the old and the new ones replaces the old store.
    """

    path: Path
    run: str

    def check(self) -> None:
        """Raise UserError if something else has its name, or if no store can be written there."""
        if os.path.lexists(self.path) and not self._is_ours(self.path):
            raise UserError(f"{self.path}: exists already, and is not of this run. Remove it, or name another store.")
        parent = next(folder for folder in self.path.absolute().parents if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise UserError(f"{self.path}: cannot be written: {parent} is not a writable folder. Name another path.")

    def keys(self) -> set[str]:
        """Return the keys in the store, if there is one.  Errors: as in `check`, and for a damaged store."""
        # A kill may have come between the two renames of `write`.
        if not os.path.lexists(self.path) and self._is_ours(self._sibling("new")):
            self._sibling("new").rename(self.path)
        self.check()
        if not self.path.exists():
            return set()
        with contextlib.closing(Store(self.path)) as store:
            return set(store.keys)

    def write(self, out: Path, entries: Sequence[Entry]) -> None:
        """Write the store, unless it has the representations of exactly these predictions already."""
        stored_keys, entries_to_store = self.keys(), {entry["folder"]: entry for entry in entries if is_stored(entry)}
        if not entries_to_store or entries_to_store.keys() == stored_keys:
            return
        new, old = self._sibling("new"), self._sibling("old")
        for leftover in (new, old):  # by a killed process
            if self._is_ours(leftover):
                shutil.rmtree(leftover)
        with contextlib.ExitStack() as stack:
            old_store = stack.enter_context(contextlib.closing(Store(self.path))) if stored_keys else None
            writer = stack.enter_context(StoreWriter(new if stored_keys else self.path))
            for key, entry in entries_to_store.items():
                if old_store is not None and key in stored_keys:
                    packed = old_store.packed(key)
                else:
                    packed = outputs.read_record(_packed_path(out, entry))
                writer.add(key, packed, {name: entry[name] for name in _COLUMNS})
            writer.finish({"sources.json": json.dumps({"warpfold": __version__, "run": self.run}, indent=1) + "\n"})
        if stored_keys:
            self.path.rename(old)
            new.rename(self.path)
            shutil.rmtree(old)

    def remove_packed(self, out: Path, entries: Sequence[Entry]) -> None:
        """Delete the packed files of the predictions in the store."""
        for entry in entries:
            if entry.get("stored"):
                _packed_path(out, entry).unlink(missing_ok=True)

    def _sibling(self, what: str) -> Path:
        return self.path.with_name(f"{self.path.stem}.{what}.store")

    def _is_ours(self, path: Path) -> bool:
        """Return whether this is a finished store of this run."""
        try:
            return bool(json.loads((path / "sources.json").read_text(encoding="utf-8"))["run"] == self.run)
        except (OSError, ValueError, KeyError, TypeError):
            return False


_COLUMNS = ("name", "model", "seed", "length", "mean_plddt")  # of the store's index


def is_stored(entry: Entry) -> bool:
    """Return whether the representations of a prediction are in the store, or will be."""
    is_removed = entry.get("thinned") or entry.get("dropped")
    return not is_removed and bool("representations" in entry["files"] or entry.get("stored"))


def as_stored(entry: Entry) -> Entry:
    """Return the entry of a prediction after its representations moved from a file into the store."""
    without_file = {
        field_name: {kind: value for kind, value in entry[field_name].items() if kind != "representations"}
        for field_name in ("files", "checksums")
    }
    return entry | without_file | {"stored": True}


def _packed_path(out: Path, entry: Entry) -> Path:
    return out / entry["folder"] / outputs.file_names(entry["name"])["representations"]


def key_of(key: Sequence[Any]) -> Key:
    """Convert a key that JSON made a list of."""
    name, model, seed = key
    return str(name), str(model), int(seed)


def rank_predictions(entries: Sequence[Entry]) -> tuple[list[Entry], dict[str, Any]]:
    """Rank the predictions of each query: return the entries with ranks, best first, and the ranking of each query.

    Complexes are ranked by 0.8 ipTM + 0.2 pTM (AlphaFold-Multimer, sec. 2.6).  Single chains, and complexes with
    predictions of a model without the PAE head, are ranked by mean pLDDT.  Queries keep their order.
    """
    ranked: list[Entry] = []
    ranking = {}
    by_name: dict[str, list[Entry]] = {}
    for entry in entries:
        by_name.setdefault(entry["name"], []).append(entry)
    for name, query_entries in by_name.items():
        by_tm = all(entry.get("iptm") is not None for entry in query_entries)
        if not by_tm:
            query_entries = [entry | {"ranking_confidence": entry["mean_plddt"]} for entry in query_entries]
        query_entries = sorted(
            query_entries, key=lambda entry: (-entry["ranking_confidence"], entry["model"], entry["seed"])
        )
        query_entries = [entry | {"rank": rank} for rank, entry in enumerate(query_entries, 1)]
        ranked += query_entries
        columns = ("rank", "ranking_confidence", "model", "seed", "folder")
        order = [{key: entry[key] for key in columns} for entry in query_entries]
        ranking[name] = {"by": "0.8 ipTM + 0.2 pTM" if by_tm else "mean pLDDT", "order": order}
    return ranked, ranking


def copy_by_rank(out: Path, entries: Sequence[Entry]) -> list[Entry]:
    """Write a copy of each ranked structure, OUT/NAME/NAME_rank_1.cif and so on; return the entries with their names.

    The copies are superposed on the best prediction of the query that has files. The scores and the figure of the PAE
    are copied too, as NAME_rank_1_scores.json and NAME_rank_1_pae.png. ChimeraX loads the PAE from the JSON file whose
    name is most similar to the structure's. Earlier copies are replaced, and those without a prediction are deleted.
    """
    copied = []
    best: dict[str, Entry] = {}
    endings = {"mmcif": ".cif", "pdb": ".pdb", "scores": "_scores.json", "pae_png": "_pae.png"}
    for entry in entries:
        folder, source, copies = Path(file_name(entry["name"])), out / entry["folder"], {}
        contents = {kind: (source / name).read_bytes() for kind, name in entry["files"].items() if kind in endings}
        if entry["files"] and (reference := best.setdefault(entry["name"], entry)) is not entry:
            superposition = outputs.superposition(out, entry, reference)
            for kind in contents.keys() & {"mmcif", "pdb"}:
                try:
                    contents[kind] = move_atoms(contents[kind].decode(), *superposition).encode()
                except UserError:  # the columns of PDB are too narrow
                    del contents[kind]
        for kind, content in contents.items():
            copy = folder / f"{folder}_rank_{entry['rank']}{endings[kind]}"
            write_atomically(out / copy, content)
            copies[kind] = str(copy)
        copied.append(entry | {"ranked": copies})
    new_copies = {copy for entry in copied for copy in entry["ranked"].values()}
    # The entries may list copies from an earlier summary, whose predictions were thinned since.
    for entry in entries:
        remove_copies(out, entry["name"], [copy for copy in entry.get("ranked", {}).values() if copy not in new_copies])
    return copied


def remove_copies(out: Path, name: str, copies: Iterable[str]) -> None:
    """Delete copies of the files of a query, and their folder if nothing else is in it."""
    for copy in map(Path, copies):
        folder, safe = out / file_name(name), [file_name(part) for part in copy.parts]
        if safe == list(copy.parts) and (out / copy).parent == folder and not folder.is_symlink():
            with contextlib.suppress(OSError):  # the folder has other files
                (out / copy).unlink(missing_ok=True)
                folder.rmdir()
