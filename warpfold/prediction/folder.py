"""The folder of a run of `predict`: whose it is, what is done in it, and how it is finished (docs/outputs.md)."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warpfold.bulk import JobPart
from warpfold.files import file_name
from warpfold.prediction.entries import copy_by_rank, rank_predictions, remove_copies
from warpfold.prediction.folding import FoldItem, FoldOutcome, Group, part_of
from warpfold.prediction.journal import (
    WHOLE,
    Done,
    Journal,
    Key,
    alone,
    at_work,
    key_of,
    read_journals,
    remove_journals,
    workers_at_work,
)
from warpfold.prediction.outputs import (
    checksums_of,
    claim_folder,
    clear_damaged,
    damaged_files,
    refuse_links,
    remove_prediction,
    thin_prediction,
    write_summary,
)
from warpfold.prediction.pages import prediction_report
from warpfold.report.report import write_report

logger = logging.getLogger("warpfold")


def folder_of(item: FoldItem, several: bool) -> str:
    """Return the folder of a prediction in the output folder; several: whether each query has several."""
    return f"{file_name(item.query.name)}/{item.below if several else ''}".rstrip("/")


@dataclass
class PredictionFolder:
    """A folder that one process, or several that have a part each, fill with predictions.

    new: the summary of a new run.  items: all predictions of the run, in the order of the summary.
    keep: of each query's predictions, as many keep all files, the best; None: all of them.
    """

    out: Path
    new: dict[str, Any]
    items: Sequence[FoldItem]
    part: JobPart = WHOLE
    keep: int | None = None
    journal: Journal | None = field(default=None, repr=False)
    own: set[Key] = field(default_factory=set, repr=False)  # what is to be folded by this process, or was

    @property
    def run(self) -> str:
        return str(self.new["run"])

    @property
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
        for item in (item for group in own for item in group):
            refuse_links(self.out, folder_of(item, self.is_several))
        with alone(self.out):
            earlier = claim_folder(self.out, self.new["format"], self.run, force) or {}
            same = earlier.get("run") == self.run
            for other in workers_at_work(self.out):
                if not same or other == str(self.part) or JobPart.parse(other).count != self.part.count:
                    raise at_work(self.out, other)
            if not same:
                self._remove(earlier)
                write_summary(self.out, self.new)
            self.journal = Journal(self.out, self.run, self.part)
            if same and earlier["status"] != "running":
                write_summary(self.out, earlier | {"status": "running"})
            done = self._done()
        for key in self.own & done.entries.keys():  # reading thousands takes minutes, for which no other part waits
            if damaged := damaged_files(self.out, done.entries[key]):
                clear_damaged(self.out, done.entries.pop(key), damaged)
                logger.warning("%s: missing, or not what was written; it is predicted again", damaged[0])
        wanted = ([item.key for item in group if item.key not in done.entries] for group in own)
        return [keys for keys in wanted if keys]

    def _remove(self, earlier: Mapping[str, Any]) -> None:
        """Delete the predictions of another run."""
        rows = read_journals(self.out, str(earlier.get("run")))
        for entry in [*earlier.get("predictions", []), *(row["entry"] for row in rows if "entry" in row)]:
            if all(part == file_name(part) for part in Path(entry["folder"]).parts):
                remove_prediction(self.out / entry["folder"], entry["name"])
                remove_copies(self.out, entry)

    def record(self, outcome: FoldOutcome) -> None:
        """Remember what became of a prediction, even if this process is killed at once."""
        if self.journal is not None and (outcome.entry or outcome.error):
            self.journal.add(outcome.item.key, outcome.entry, outcome.error)

    def finish(self, process: Mapping[str, Any], refused: Mapping[str, int]) -> dict[str, Any]:
        """End this process's work: write the summary if everything is done and nobody is at work; else return its part.

        process: how it did.  refused: why fast operations were not used, and how often.
        """
        assert self.journal is not None
        with alone(self.out):
            self.journal.end({"part": str(self.part), **process, "refused": refused})
            self.journal.close()
            done = self._done()
            there = {key: one for key, one in done.entries.items() if not damaged_files(self.out, one, thorough=False)}
            done.entries = there
            whole = not done.lacks([item.key for item in self.items]) and not workers_at_work(self.out)
            summary = self._summary(done, None if whole else self.own) | {"seconds": process["seconds"]}
            if whole:
                summary["predictions"], summary["ranking"] = rank_predictions(summary["predictions"])
                if self.keep is not None:
                    summary["predictions"] = [self._thinned(entry) for entry in summary["predictions"]]
                if self.is_several:
                    summary["predictions"] = copy_by_rank(self.out, summary["predictions"])
                write_report(self.out / "report.html", prediction_report(self.out, summary))
                summary = write_summary(self.out, summary)
                remove_journals(self.out)
        return summary

    def _thinned(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Take away the matrices of a prediction that is not among the best; return its entry."""
        if self.keep is None or entry["rank"] <= self.keep or entry.get("thinned"):
            return entry
        files = thin_prediction(self.out / entry["folder"], entry["name"], entry["files"])
        checksums = checksums_of(self.out / entry["folder"], files)
        return entry | {"files": files, "checksums": checksums, "thinned": True}

    def _summary(self, done: Done, own: set[Key] | None) -> dict[str, Any]:
        """Return the summary of what is done; own: only of these, while others are at work."""
        items = [item for item in self.items if own is None or item.key in own]
        predictions = [
            done.entries[item.key] | {"model": item.model.name} for item in items if item.key in done.entries
        ]
        # of records that could not be folded, which are nobody's items
        failures = list(self.new["failures"]) if own is None or self.part.number == 1 else []
        failures += [
            {
                "name": item.query.name,
                **({"model": item.model.name, "seed": item.seed} if self.is_several else {}),
                "error": done.failures[item.key],
            }
            for item in items
            if item.key in done.failures and item.key not in done.entries
        ]
        refused: dict[str, int] = {}
        for one in done.processes:
            for reason, count in one.get("refused", {}).items():
                refused[reason] = refused.get(reason, 0) + count
        return self.new | {
            "status": "running" if own is not None else "failed" if failures else "complete",
            "predictions": predictions,
            "failures": failures,
            "refused": refused,
            "processes": [{key: value for key, value in one.items() if key != "refused"} for one in done.processes],
        }

    def _done(self) -> Done:
        """Return what this run has done, in the summary and in the journals."""
        rows = list(read_journals(self.out, self.run))  # before the summary, in which they end
        earlier = claim_folder(self.out, self.new["format"], self.run) or self.new
        done, first = Done(), self.items[0]
        for entry in earlier["predictions"]:
            lacks = entry.get("thinned") and (self.keep is None or entry["rank"] <= self.keep)
            if not lacks:
                done.entries[entry["name"], entry.get("model", first.model.name), entry["seed"]] = entry
        for failure in earlier["failures"]:
            key = failure["name"], failure.get("model", first.model.name), failure.get("seed", first.seed)
            done.failures[key] = failure["error"]
        for row in rows:
            done.add_row(row)
        return done
