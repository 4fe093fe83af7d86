"""How fast an operation is on this device, and how near to what the device allows; after a check that it is right.

`checked` finds what is wrong, `bench` times.  Rows are dictionaries, of which a table, a CSV file, JSON and a picture
are made.
"""

import csv
import datetime
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from warpfold.errors import UserError
from warpfold.files import write_atomically
from warpfold.progress import Progress
from warpfold.tune.cases import Case, Inputs, inputs
from warpfold.tune.checks import DTYPES, failures, odd
from warpfold.tune.machine import describe
from warpfold.tune.peers import WAYS, Way, too_large
from warpfold.tune.roofline import Ceilings, Pass, ceilings, work
from warpfold.tune.sizes import KINDS, shapes
from warpfold.tune.timing import Subject, Times, measure

BENCHED = tuple(KINDS)
LARGEST = {"cpu": 2**28, "cuda": 2**36}  # logits of a shape that is timed without being named
PLACES = {"cpu": 2**24, "cuda": 2**31}  # likewise, numbers in x
REPEATS = {"cpu": 5, "cuda": 30}
BUDGET = {"cpu": 20.0, "cuda": 2.0}  # seconds for a way at a shape, warm-up apart

Row = dict[str, Any]
COLUMNS = (
    "op", "shape", "dtype", "way", "pass", "ms", "times_definition", "tflops", "gb_per_s", "limit_ms", "share_of_limit",
    "peak_mib", "repeats", "note",
)  # fmt: skip


def checked(ops: Sequence[str], device: torch.device) -> list[str]:
    """What is wrong with the operations on this device, a line each: nothing, if they may be timed."""
    return [verdict.says() for verdict in failures(odd(ops), device)]


def bench(
    ops: Sequence[str],
    device: torch.device,
    dtypes: Sequence[str],
    wanted: Sequence[str] = (),
    *,
    quick: bool = False,
    repeats: int = 0,
    ways: Sequence[str] = (),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Time every way to compute the operations, forward and backward.

    wanted: shapes (`sizes.shapes`); ways: names, of all by default; repeats 0: by device.  Returns the device, its
    ceilings for each dtype, the rows, and the shapes left out because the device is too small for them.
    Errors: UserError for shapes that the operations do not have.
    """
    cases: list[tuple[str, str, Case]] = []
    left_out: list[tuple[str, str, Case]] = []
    for op in ops:
        for name, case in shapes(op, wanted, quick):
            (cases if name in wanted or _fits(case, device) else left_out).append((op, name, case))
    if not cases:
        raise UserError(f"--shapes {', '.join(wanted)}: none is a shape of {', '.join(ops)}")
    tops = {dtype: ceilings(device, DTYPES[dtype]) for dtype in dtypes}
    rows: list[Row] = []
    todo = [(op, name, case, dtype) for op, name, case in cases for dtype in dtypes]
    for done, (op, name, case, dtype) in enumerate(todo):
        if progress:
            progress(done, len(todo), f"{op} {name} {dtype}")
        rows += _shape(op, name, case, dtype, device, tops[dtype], repeats, ways)
    return {
        "what": "WarpFold operations: ms are medians, interleaved; backward is the backward pass alone",
        "date": datetime.date.today().isoformat(),
        "machine": describe(device),
        "ceilings": {
            dtype: {
                "tflops": c.flops / 1e12,
                "gb_per_s": c.bytes / 1e9,
                "gexp_per_s": c.exps and c.exps / 1e9,
                "how": c.how,
            }
            for dtype, c in tops.items()
        },
        "rows": rows,
        "left_out": [f"{op} {name}" for op, name, _ in left_out],
    }


def _ceilings(top: Ceilings) -> dict[str, Any]:
    exps = top.exps and top.exps / 1e9
    return {"tflops": top.flops / 1e12, "gb_per_s": top.bytes / 1e9, "gexp_per_s": exps, "how": top.how}


def _fits(case: Case, device: torch.device) -> bool:
    kind = "cuda" if device.type == "cuda" else "cpu"
    return case.logits <= LARGEST[kind] and case.rows * case.length * (case.channels or 1) <= PLACES[kind]


def _shape(
    op: str,
    name: str,
    case: Case,
    dtype: str,
    device: torch.device,
    top: Ceilings,
    repeats: int,
    names: Sequence[str],
) -> list[Row]:
    kind = "cuda" if device.type == "cuda" else "cpu"
    if kind == "cuda":
        torch.cuda.empty_cache()  # what the last shape left is free for this one
    given = inputs(case, DTYPES[dtype], device)
    subjects: list[Subject] = []
    notes: dict[str, str] = {}
    for way in WAYS[op]:
        if names and way.name not in names:
            continue
        reason = way.refuses(given) or too_large(way, given)
        if reason is None:
            subjects.append(way.make(given))
        else:
            notes[way.name] = reason
    times = measure(subjects, device, repeats or REPEATS[kind], BUDGET[kind])
    base = times.get("definition")
    rows = []
    for way in WAYS[op]:
        if way.name in notes:
            rows.append({"op": op, "shape": name, "dtype": dtype, "way": way.name, "note": notes[way.name]})
        elif way.name in times:
            rows += _rows(times[way.name], base, case, given, top, {"op": op, "shape": name, "dtype": dtype}, way)
    return rows


def _rows(times: Times, base: Times | None, case: Case, given: Inputs, top: Ceilings, head: Row, way: Way) -> list[Row]:
    if times.failed:
        return [head | {"way": way.name, "note": times.failed}]
    rows = []
    directions: tuple[Pass, ...] = ("forward", "backward")
    for direction in directions:
        seconds = times.median(direction)
        if seconds is None:
            continue
        ideal = work(case, direction, given.grad.element_size())
        plain = base.median(direction) if base else None
        peak = times.forward_peak if direction == "forward" else times.backward_peak
        rows.append(
            head
            | {
                "way": way.name,
                "pass": direction,
                "ms": seconds * 1e3,
                "times_definition": plain / seconds if plain else None,
                "tflops": ideal.flops / seconds / 1e12,
                "gb_per_s": ideal.bytes / seconds / 1e9,
                "limit_ms": top.limit(ideal) * 1e3,
                "share_of_limit": top.limit(ideal) / seconds,
                "peak_mib": None if peak is None else peak / 2**20,
                "repeats": len(times.forward),
                "note": "",
            }
        )
    return rows


def table(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """Lines of figures for people; what did not run says why."""
    lines = []
    for row in rows:
        head = (row["op"], row["shape"], row["dtype"], row["way"])
        if "ms" not in row:
            lines.append((*head, *[""] * 8, row["note"]))
            continue
        plain, peak = row["times_definition"], row["peak_mib"]
        lines.append(
            (
                *head,
                row["pass"],
                f"{row['ms']:.4g}",
                "" if plain is None else f"{plain:.2f}",
                f"{row['tflops']:.3g}",
                f"{row['gb_per_s']:.4g}",
                f"{row['limit_ms']:.3g}",
                f"{row['share_of_limit']:.0%}",
                "" if peak is None else f"{peak:.0f}",
                "",
            )
        )
    return lines


HEADS = (
    "op", "shape", "dtype", "way", "pass", "ms", "x definition", "TFLOP/s", "GB/s", "limit ms", "of limit", "MiB", "",
)  # fmt: skip


def write_csv(found: dict[str, Any], path: Path) -> None:
    """Write the rows as CSV, the machine and the date in columns of their own.

    Errors: UserError when it cannot be written.
    """
    machine = "; ".join(f"{key} {value}" for key, value in found["machine"].items())
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, (*COLUMNS, "date", "machine"), restval="")
    writer.writeheader()
    writer.writerows(row | {"date": found["date"], "machine": machine} for row in found["rows"])
    write_atomically(path, text.getvalue())
