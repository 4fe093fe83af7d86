"""Output folder of `predict`: ownership, completed entries, final summary (docs/reference/outputs.md).

    OUT/summary.json           the run, with what earlier runs of the same command made
    OUT/journal/2-of-4.jsonl   what the second of four processes has done since; locked as long as it works
    OUT/journal/lock           held for a moment, when a process begins and when it ends

A kill loses nothing, and no process writes another's file.  Whoever ends and finds everything done and nobody at work
writes the whole summary and removes the journals (docs/howto/many_proteins.md).
"""

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

from warpfold import __version__
from warpfold.bulk import JobPart
from warpfold.data.store.store import Store, StoreWriter
from warpfold.errors import UserError
from warpfold.files import NO_LOCKS, file_name, lock_file, sealed, write_atomically, writing
from warpfold.prediction import outputs
from warpfold.prediction.folding import FoldItem, FoldOutcome, Group, Key, part_of
from warpfold.prediction.pages import prediction_report
from warpfold.prediction.summary_file import claim_folder, write_summary
from warpfold.report.report import write_report
from warpfold.scoring.score_table import ScoreTables, check_tables, remove_tables, row_of
from warpfold.scoring.selection import Selection, Shortlist

logger = logging.getLogger("warpfold")
JOURNALS = "journal"  # the folder
WHOLE = JobPart(1, 1)
_NAME = re.compile(r"(\d+-of-\d+)(-[\w.-]+)?\.jsonl")
Entry = dict[str, Any]  # of a prediction, as summary.json has it


@dataclass
class Done:
    """What is known of a run: the entries of its predictions, what failed, and how each process did."""

    entries: dict[Key, Entry] = field(default_factory=dict)
    failures: dict[Key, str] = field(default_factory=dict)
    processes: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class PredictionFolder:
    """A folder that one process, or several that have a part each, fill with predictions.

    new: the summary of a new run.  items: all predictions of the run, in the order of the summary.
    keep: of each query's predictions, as many keep all files, the best; or which keep their structures; None: all.
    tables: that get a row for each prediction.  store: that gets the representations.
    """

    out: Path
    new: dict[str, Any]
    items: Sequence[FoldItem]
    part: JobPart = WHOLE
    keep: int | Selection | None = None
    tables: ScoreTables | None = None
    store: "RepresentationStore | None" = None
    journal: "Journal | None" = field(default=None, repr=False)
    own: set[Key] = field(default_factory=set, repr=False)  # what is to be folded by this process, or was

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

    def close(self) -> None:
        """Give up the journal, and so the part, if the run ends early."""
        if self.journal is not None:
            self.journal.close()

    def begin(self, groups: Sequence[Group], force: bool) -> list[list[Key]]:
        """Take over the folder; return this part's groups without what is done already, as keys.

        What is not, bit for bit, what was written is made again, with a word.
        Predictions of an earlier run are kept if it is the same, and deleted if not.  Other files that somebody put
        into their folders stay.
        Errors: UserError for a folder that holds something else, or in which others are at work on this part.
        """
        own = part_of(groups, self.part)
        self.own = {item.key for group in own for item in group}
        claim_folder(self.out, self.new["format"], self.run, force)  # before anything is written there
        if self.store is not None:
            self.store.check()
        for item in (item for group in own for item in group):
            outputs.refuse_links(self.out, f"{file_name(item.query.name)}/{item.below if self.is_several else ''}")
        with alone(self.out):
            earlier = claim_folder(self.out, self.new["format"], self.run, force) or {}
            same = earlier.get("run") == self.run
            for other in workers_at_work(self.out):
                if not same or other == str(self.part) or JobPart.parse(other).count != self.part.count:
                    raise at_work(self.out, other)
            check_tables(self.out, self.tables, earlier)
            if not same:
                rows = read_journals(self.out, str(earlier.get("run")))
                for entry in [*earlier.get("predictions", []), *(row["entry"] for row in rows if "entry" in row)]:
                    if all(part == file_name(part) for part in Path(entry["folder"]).parts):
                        outputs.remove_prediction(self.out / entry["folder"], entry["name"])
                        remove_copies(self.out, entry)
                remove_tables(self.out, earlier.get("tables", ()))
                write_summary(self.out, self.new)
            self.journal = Journal(self.out, self.run, self.part, tables=self.tables, shortlist=self.shortlist())
            named = {} if self.tables is None else {"tables": sorted({*earlier.get("tables", []), *self.tables.names})}
            if same and earlier != (running := earlier | {"status": "running"} | named):
                write_summary(self.out, running)
            done = self._done()
        lost = set()
        for key in self.own & done.entries.keys():  # reading thousands takes minutes, for which no other part waits
            if damaged := outputs.damaged_files(self.out, done.entries[key]):
                outputs.clear_damaged(self.out, done.entries.pop(key), damaged)
                logger.warning("%s: missing, or not what was written; it is predicted again", damaged[0])
                lost.add(key)
        if self.tables is not None:
            with alone(self.out):  # a kill may have come between a line of the journal and its row
                known = self._done().entries
                self.tables.rebuild(known[item.key] for item in self.items if item.key in known.keys() - lost)
        left = [[item for item in group if item.key not in done.entries] for group in own]
        if same:
            several = self.is_several
            every = (item for group in left for item in group)
            outputs.remove_drafts(
                self.out / file_name(item.query.name) / (item.below if several else "") for item in every
            )
        return [[item.key for item in group] for group in left if group]

    def finish(self, process: Mapping[str, Any], refused: Mapping[str, int]) -> dict[str, Any]:
        """End this process's work: write the summary if everything is done and nobody is at work; else return its part.

        process: how it did.  refused: why fast operations were not used, and how often.
        """
        assert self.journal is not None
        with alone(self.out):
            self.journal.write({"process": {"part": str(self.part), **process, "refused": refused}})
            self.journal.close()
            done = self._done()
            done.entries = {
                key: one
                for key, one in done.entries.items()
                if not outputs.damaged_files(self.out, one, thorough=False)
            }
            lacking = {item.key for item in self.items} - done.entries.keys() - done.failures.keys()
            whole = not lacking and not workers_at_work(self.out)
            summary = self._summary(done, None if whole else self.own) | {"seconds": process["seconds"]}
            if whole:
                entries, summary["ranking"] = rank_predictions(summary["predictions"])
                kept = self._kept(entries)
                for place, entry in enumerate(entries):
                    if place in kept:
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
                summary = write_summary(self.out, summary)
                remove_journals(self.out)
                if self.store is not None:
                    self.store.remove_records(self.out, entries)
        return summary

    def shortlist(self) -> Shortlist | None:
        """Return a new list of what a process has predicted and may keep, if only some of it is kept."""
        return Shortlist(self.keep) if isinstance(self.keep, Selection) else None

    def _kept(self, entries: Sequence[Entry]) -> set[int]:
        """Return which entries keep all their files, as their places."""
        if isinstance(self.keep, Selection):
            return self.keep.chosen(map(row_of, entries))
        # Where a rank is not known yet, nothing was taken away.
        return {place for place, one in enumerate(entries) if self.keep is None or one.get("rank", 1) <= self.keep}

    def _summary(self, done: Done, own: set[Key] | None) -> dict[str, Any]:
        """Return the summary of what is done; own: only of these, while others are at work."""
        items = [item for item in self.items if own is None or item.key in own]
        # Records that could not be folded are nobody's items: the first part names them.
        failures = list(self.new["failures"]) if own is None or self.part.number == 1 else []
        for item in items:
            if item.key in done.failures and item.key not in done.entries:
                which = {"model": item.model.name, "seed": item.seed} if self.is_several else {}
                failures.append({"name": item.query.name, **which, "error": done.failures[item.key]})
        refused: dict[str, int] = {}
        for one in done.processes:
            for reason, count in one.get("refused", {}).items():
                refused[reason] = refused.get(reason, 0) + count
        return self.new | {
            "status": "running" if own is not None else "failed" if failures else "complete",
            "predictions": [
                done.entries[item.key] | {"model": item.model.name} for item in items if item.key in done.entries
            ],
            "failures": failures,
            "refused": refused,
            "processes": [{key: value for key, value in one.items() if key != "refused"} for one in done.processes],
        }

    def _done(self) -> Done:
        """Collect the results of this run from the summary and the journals; an entry outranks any failure."""
        rows = list(read_journals(self.out, self.run))  # before the summary, in which they end
        earlier = claim_folder(self.out, self.new["format"], self.run) or self.new
        done, first = Done(), self.items[0]
        for entry in earlier["predictions"]:
            done.entries[entry["name"], entry.get("model", first.model.name), entry["seed"]] = entry
        for failure in earlier["failures"]:
            key = failure["name"], failure.get("model", first.model.name), failure.get("seed", first.seed)
            done.failures[key] = failure["error"]
        for row in rows:
            if "process" in row:
                done.processes.append(row["process"])
            elif "error" in row:
                done.failures[key_of(row["of"])] = row["error"]
            elif "entry" in row:
                done.entries[key_of(row["of"])] = row["entry"]
        if self.store is not None:
            held = self.store.keys()
            gone = [key for key, one in done.entries.items() if one.get("stored") and one["folder"] not in held]
            if gone := [key for key in gone if is_stored(done.entries[key])]:
                logger.warning("%s: lacks %d of its entries, which are predicted again", self.store.path, len(gone))
            done.entries = {
                key: as_stored(one) if one["folder"] in held and is_stored(one) else one
                for key, one in done.entries.items()
                if key not in gone
            }
        kept, some = self._kept([*done.entries.values()]), isinstance(self.keep, Selection)
        for place, (key, entry) in enumerate([*done.entries.items()]):  # what an earlier --keep took is made again
            if (place in kept and entry.get("thinned")) or ((place in kept or not some) and entry.get("dropped")):
                del done.entries[key]
        return done


@dataclass(frozen=True)
class RepresentationStore:
    """The store of the representations of a run, by the folders of its predictions.

    It is written when all is done, from a record beside each prediction, in the order of the summary.  Where the same
    command later has more, a new store is written with those and what the old one has, which it then replaces.
    """

    path: Path
    run: str

    def check(self) -> None:
        """Raise UserError for something else of its name, or where no store can be written."""
        if os.path.lexists(self.path) and not self._is_ours(self.path):
            raise UserError(f"{self.path}: exists already, and is not of this run; remove it, or name another store")
        above = next(place for place in self.path.absolute().parents if place.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise UserError(f"{self.path}: cannot be written: {above} is not a folder that can be written")

    def keys(self) -> set[str]:
        """Return the keys of what it has; none where it is not there.  Errors: as of `check`, and a damaged store."""
        if not os.path.lexists(self.path) and self._is_ours(self._beside("new")):  # a kill came between two renames
            self._beside("new").rename(self.path)
        self.check()
        if not self.path.exists():
            return set()
        with contextlib.closing(Store(self.path)) as store:
            return set(store.keys)

    def write(self, out: Path, entries: Sequence[Entry]) -> None:
        """Write the store, unless it is there and has the representations of these predictions, and no others."""
        held, wanted = self.keys(), {entry["folder"]: entry for entry in entries if is_stored(entry)}
        if not wanted or wanted.keys() == held:
            return
        new, old = self._beside("new"), self._beside("old")
        for left in (new, old):  # by a process that was killed
            if self._is_ours(left):
                shutil.rmtree(left)
        with contextlib.ExitStack() as opened:
            before = opened.enter_context(contextlib.closing(Store(self.path))) if held else None
            writer = opened.enter_context(StoreWriter(new if held else self.path))
            for key, entry in wanted.items():
                if before is not None and key in held:
                    record = before.packed(key)
                else:
                    record = outputs.read_record(_record_path(out, entry))
                writer.add(key, record, {name: entry[name] for name in _COLUMNS})
            writer.finish({"sources.json": json.dumps({"warpfold": __version__, "run": self.run}, indent=1) + "\n"})
        if held:
            self.path.rename(old)
            new.rename(self.path)
            shutil.rmtree(old)

    def remove_records(self, out: Path, entries: Sequence[Entry]) -> None:
        """Delete the records of what the store has."""
        for entry in entries:
            if entry.get("stored"):
                _record_path(out, entry).unlink(missing_ok=True)

    def _beside(self, what: str) -> Path:
        return self.path.with_name(f"{self.path.stem}.{what}.store")

    def _is_ours(self, path: Path) -> bool:
        """Return whether this is a finished store of this run."""
        try:
            return bool(json.loads((path / "sources.json").read_text(encoding="utf-8"))["run"] == self.run)
        except (OSError, ValueError, KeyError, TypeError):
            return False


_COLUMNS = ("name", "model", "seed", "length", "mean_plddt")  # of the store's index


def is_stored(entry: Entry) -> bool:
    """Return whether a prediction's representations are in a store, or are to come into it."""
    gone = entry.get("thinned") or entry.get("dropped")
    return not gone and bool("representations" in entry["files"] or entry.get("stored"))


def as_stored(entry: Entry) -> Entry:
    """Return the entry of a prediction whose representations are in the store, and not in a file of its own."""
    kept = {
        which: {kind: one for kind, one in entry[which].items() if kind != "representations"}
        for which in ("files", "checksums")
    }
    return entry | kept | {"stored": True}


def _record_path(out: Path, entry: Entry) -> Path:
    return out / entry["folder"] / outputs.file_names(entry["name"])["representations"]


def key_of(of: Sequence[Any]) -> Key:
    """Return a key as it was before JSON made a list of it."""
    name, model, seed = of
    return str(name), str(model), int(seed)


class Journal:
    """A file to which one process adds a line for each prediction; what is there when `write` returns outlives a kill.

    worker: names a process that works for another one; its file is not locked.  tables: get a row for each entry.
    shortlist: of what this process may keep; the files of what is no longer on it are deleted.
    Errors: UserError if another process of the same part is at work.
    """

    def __init__(
        self,
        out: Path,
        run: str,
        part: JobPart = WHOLE,
        worker: str = "",
        tables: ScoreTables | None = None,
        shortlist: Shortlist | None = None,
    ) -> None:
        self.out, self.part, self.tables, self.shortlist = out, part, tables, shortlist
        path = out / JOURNALS / f"{part.number}-of-{part.count}{f'-{worker}' if worker else ''}.jsonl"
        with writing(path):
            self._file = _appending(path) if worker else _locked(path, at_work(out, str(part)))
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)  # a kill may have cut the last line off
        self.write({"run": run})

    def add(self, outcome: FoldOutcome) -> None:
        """Add a prediction's entry in the summary, or why there is none; nothing where another rank writes."""
        if outcome.entry is None:
            if outcome.error:
                self.write({"of": outcome.item.key, "error": outcome.error})
            return
        row = {"of": outcome.item.key, "entry": outcome.entry}
        if self.tables is None:
            self.write(row)
            return
        with alone(self.out):  # who builds the tables anew, from the journals, sees both or neither
            self.write(row)
            self.tables.append(outcome.entry)
        if self.shortlist is not None and not outcome.entry.get("dropped"):
            for key, beaten in self.shortlist.add(row_of(outcome.entry), (outcome.item.key, outcome.entry)):
                self.write({"of": key, "entry": beaten | {"files": {}, "checksums": {}, "dropped": True}})
                outputs.drop_prediction(self.out, beaten)

    def close(self) -> None:
        """Give up the file, and its lock."""
        self._file.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a line."""
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


def workers_at_work(out: Path) -> list[str]:
    """Return the parts, as "2/4", that processes are working on."""
    found = [match[1] for path in _journals(out) if (match := _NAME.fullmatch(path.name)) and _is_locked(path)]
    return [part.replace("-of-", "/") for part in found]


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
        file = _locked(path)
    with file:
        yield


def _locked(path: Path, taken: UserError | None = None) -> TextIO:
    """Open a file to append to it, and lock it.  taken: raised where it is locked; None waits until it is not."""
    while True:
        file = _appending(path)
        if taken is not None:
            file.close()
            file = lock_file(path, taken)
        else:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                return file
        with contextlib.suppress(FileNotFoundError):  # another process may have removed it before it was locked
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()


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


def rank_predictions(entries: Sequence[Entry]) -> tuple[list[Entry], dict[str, Any]]:
    """Return the entries with their ranks, each query's best first, and the ranking of each query.

    Complexes are ranked by 0.8 ipTM + 0.2 pTM (AlphaFold-Multimer, sec. 2.6), others by mean pLDDT, as are complexes
    of which a model without the PAE head folded some.  Queries keep their order.
    """
    ranked: list[Entry] = []
    ranking = {}
    by_name: dict[str, list[Entry]] = {}
    for entry in entries:
        by_name.setdefault(entry["name"], []).append(entry)
    for name, own in by_name.items():
        by_tm = all(entry.get("iptm") is not None for entry in own)
        if not by_tm:
            own = [entry | {"ranking_confidence": entry["mean_plddt"]} for entry in own]
        own = sorted(own, key=lambda entry: (-entry["ranking_confidence"], entry["model"], entry["seed"]))
        own = [entry | {"rank": rank} for rank, entry in enumerate(own, 1)]
        ranked += own
        kept = ("rank", "ranking_confidence", "model", "seed", "folder")
        order = [{key: entry[key] for key in kept} for entry in own]
        ranking[name] = {"by": "0.8 ipTM + 0.2 pTM" if by_tm else "mean pLDDT", "order": order}
    return ranked, ranking


def copy_by_rank(out: Path, entries: Sequence[Entry]) -> list[Entry]:
    """Write a copy of each ranked structure, OUT/NAME/NAME_rank_1.cif and so on; return the entries naming them.

    So with its scores, NAME_rank_1_scores.json: ChimeraX takes the JSON file that shares most of a structure's name
    for its PAE.  Earlier copies are replaced, and deleted where there is nothing to copy any more.
    """
    found = []
    for entry in entries:
        folder = Path(file_name(entry["name"]))
        copies = {}
        for kind, ending in (("mmcif", ".cif"), ("pdb", ".pdb"), ("scores", "_scores.json")):
            if kind not in entry["files"]:
                continue
            source = out / entry["folder"] / entry["files"][kind]
            copy = folder / f"{folder}_rank_{entry['rank']}{ending}"
            write_atomically(out / copy, source.read_text(encoding="utf-8"))
            copies[kind] = str(copy)
        found.append(entry | {"ranked": copies})
    now = {copy for entry in found for copy in entry["ranked"].values()}
    for entry in entries:  # of an earlier summary, perhaps before predictions were thinned
        stale = {kind: copy for kind, copy in entry.get("ranked", {}).items() if copy not in now}
        remove_copies(out, entry | {"ranked": stale})
    return found


def remove_copies(out: Path, entry: Entry) -> None:
    """Delete the copies that a summary's entry names, and their folder if nothing else is in it."""
    for copy in map(Path, entry.get("ranked", {}).values()):
        folder, safe = out / file_name(entry["name"]), [file_name(part) for part in copy.parts]
        if safe == list(copy.parts) and (out / copy).parent == folder and not folder.is_symlink():
            with contextlib.suppress(OSError):  # it is not there, or other files are in the folder
                (out / copy).unlink(missing_ok=True)
                folder.rmdir()
