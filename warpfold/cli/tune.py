"""`warpfold tune`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from warpfold.arguments import Device, decides, runs, writes
from warpfold.cli.common import AsJson, chosen, command, device_of, name_operations, show, show_table
from warpfold.progress import progress_bar

if TYPE_CHECKING:
    from warpfold.bench.kernels import TuningTask


class _Tune(TyperCommand):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, with the operations that can be tuned."""
        name_operations(self, "TUNED")
        super().format_help(ctx, formatter)


@command(cls=_Tune, example="Example:  warpfold tune --op attention --quick")
def tune(
    op: Annotated[
        list[str] | None,
        decides("OPERATIONS; default: all; repeated, or with commas."),
    ] = None,
    quick: Annotated[bool, decides("Tune for initial training in bf16 alone.", "--quick")] = False,
    out: Annotated[
        Path | None,
        writes("Folder for the table; default: ~/.cache/warpfold/tuned, where runs look for it.", "--out", "-o"),
    ] = None,
    device: Device = None,
    dry_run: Annotated[bool, runs("Only say what would be timed; needs no GPU.", "--dry-run")] = False,
    as_json: AsJson = False,
) -> None:
    """Make the launch table of this GPU: for every kernel, the fastest of the launches that are exact.

    Minutes with --quick, else up to an hour.  Shapes that the table lacks, and GPUs without a
    table, use the package's default.  Runs agree bit for bit only with the same table.
    """
    import torch

    from warpfold.bench.kernels import choose, head, report, tune_on, tuning_tasks, workloads, write
    from warpfold.check.cases import TUNED
    from warpfold.ops.triton.launch import home

    ops = chosen("--op", op or ["all"], ("all", *TUNED))
    ops = list(TUNED) if "all" in ops else ops
    if dry_run:
        _say(tuning_tasks(workloads(ops, quick), quick), as_json)
        return
    where = torch.device(device_of(device))
    with progress_bar(narrate=True) as progress:
        found = tune_on(where, ops, quick, out or home(), progress)
    entries = choose(found)
    rows = report(found, entries)
    path = write(out or home(), head(where), entries)
    if as_json:
        show({"table": str(path), **head(where), "launches": rows})
        return
    lines = []
    for row in rows:
        key = " ".join(map(str, row["key"]))
        numbers = (f"{row['microseconds']:.1f}", f"{row['slowest']:.1f}", str(row["timed"]), str(len(row["out"])))
        lines.append((row["kernel"], key, *numbers, row["launch"]))
    show_table(("kernel", "key", "us", "slowest us", "timed", "out", "launch"), lines)
    typer.echo(f"wrote {path}")


def _say(todo: "list[TuningTask]", as_json: bool) -> None:
    if as_json:
        rows = [(t, {"place": str(t.workload), "candidates": len(t.candidates)}) for t in todo]
        show({"launches": [{"kernel": t.kernel, "key": list(t.key)} | row for t, row in rows]})
        return
    for t in todo:
        typer.echo(f"{t.kernel} {t.key}: {len(t.candidates)} candidates ({t.workload})")
    typer.echo(f"{sum(len(t.candidates) for t in todo)} trials; nothing was run")
