"""Labels of whole examples, from a table: a value or a class of chains or assemblies, learnt beside the structures."""

import csv
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from warpfold.errors import UserError, listed
from warpfold.files import read_file
from warpfold.settings import merge
from warpfold.training.config import GivenSettings


@dataclass(frozen=True)
class LabelTable:
    """A table of labels as it is in its file."""

    source: str
    values: Mapping[str, float]  # of entries of stores, by their keys; {} for classes
    classes: Mapping[str, str]  # {} for values


def read_labels(path: Path) -> LabelTable:
    """Read a CSV file with the columns `entry` and either `value` (numbers) or `class` (names); others are ignored.

    Errors: UserError for a file that is none, for an entry that is there twice or has no label, and for labels that are
    all alike.
    """
    try:
        rows = list(csv.reader(read_file(path).decode("utf-8-sig").splitlines(), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"{path}: is no CSV file ({error}); give a table with the columns entry and value or class"
        ) from None
    head = [name.strip() for name in rows[0]] if rows else []
    kinds = [name for name in ("value", "class") if name in head]
    if "entry" not in head or len(kinds) != 1 or len(set(head)) < len(head):
        what = "both value and class" if len(kinds) == 2 else f"the columns {', '.join(head) or 'of nothing'}"
        raise UserError(f"{path}: has {what}; the columns entry and one of value and class are needed")
    entry_place, label_place = head.index("entry"), head.index(kinds[0])
    found: dict[str, str] = {}
    for number, row in enumerate(rows[1:], 2):
        if not any(cell.strip() for cell in row):
            continue
        if len(row) != len(head):
            raise UserError(f"{path}: line {number} has {len(row)} cells, the first {len(head)}; write as many")
        entry, label = row[entry_place].strip(), row[label_place].strip()
        if not entry or not label:
            raise UserError(f"{path}: line {number} lacks its {'label' if entry else 'entry'}; leave the line out")
        if entry in found:
            raise UserError(f"{path}: line {number} names {entry} again; give each entry one label")
        found[entry] = label
    if len(set(found.values())) < 2:
        raise UserError(f"{path}: its labels are all alike ({len(found)} entries); there is nothing to learn")
    if kinds == ["class"]:
        return LabelTable(str(path), {}, found)
    values: dict[str, float] = {}
    for entry, label in found.items():
        try:
            values[entry] = float(label)
        except ValueError:
            values[entry] = math.nan
        if not math.isfinite(values[entry]):
            raise UserError(f"{path}: the value of {entry} is {label!r}; a number is needed, or the column class")
    return LabelTable(str(path), values, {})


def learn_labels(
    table: LabelTable, given: GivenSettings, entries: Iterable[str], trained: Collection[str] | None = None
) -> tuple[GivenSettings, dict[str, float]]:
    """Return the settings of a run with a head for these labels, and the labels as that head predicts them, by entry.

    Of the head's settings those that are given stay; what is not follows from the table: its classes in the order of
    their names, or the mean and the deviation of its values.  entries: of all stores.  trained: entries of whose values
    mean and deviation are taken; None: all.
    Errors: UserError for entries that are in none of them, for labels that the settings do not know, and where what is
    trained on has no label, or one value throughout.
    """
    labels = table.classes or table.values
    there = set(entries)
    if unknown := [entry for entry in labels if entry not in there]:
        what = f"{len(unknown)} of {len(labels)} entries are in none of the stores ({listed(unknown, 3)})"
        raise UserError(f"{table.source}: {what}; pack.tsv of a store names those that are")
    if trained is not None and not any(entry in labels for entry in trained):
        raise UserError(f"{table.source}: no entry that is trained on has a label; give more, or another --seed")
    own: Any = given.values.get("model", {}).get("heads", {}).get("labels", {})
    own = own if isinstance(own, dict) else {}  # settings that were built say "none"
    if table.classes:
        names = list(own.get("classes") or sorted(set(table.classes.values())))
        if lacking := sorted(set(table.classes.values()) - set(names)):
            what = f"has the classes {listed(lacking, 3)}, which model.heads.labels.classes lacks"
            raise UserError(f"{table.source}: {what}; add them there, or correct the table")
        found: dict[str, float] = {entry: names.index(label) for entry, label in table.classes.items()}
        settled: dict[str, Any] = {"classes": names}
    else:
        if own.get("classes"):
            raise UserError(
                f"{table.source}: has values, but model.heads.labels.classes names classes; leave these out"
            )
        known = [value for entry, value in table.values.items() if trained is None or entry in trained]
        if len(set(known)) < 2:
            raise UserError(
                f"{table.source}: the labels of what is trained on are all alike; give more, or another --seed"
            )
        mean, scale = float(own.get("mean", fmean(known))), float(own.get("scale", pstdev(known)))
        found = {entry: (value - mean) / scale for entry, value in table.values.items()}
        settled = {"mean": mean, "scale": scale}
    values = merge(given.values, {"model": {"heads": {"labels": settled}}})
    return GivenSettings(given.source, values, given.own, given.auto), found
