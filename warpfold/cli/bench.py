"""`warpfold bench`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from warpfold.cli.common import AsJson, app, progress_bar, reads, runs, show, writes

bench = typer.Typer(
    no_args_is_help=True,
    help="Measure speed on this machine.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench, name="bench")


@bench.command(epilog="Example:  warpfold bench data --store store --sources files/ --out data.json")
def data(
    store: Annotated[Path, reads("What `warpfold pack` made.")],
    sources: Annotated[Path | None, reads("The folder that holds the folders it was packed of.")] = None,
    entries: Annotated[int, runs("Entries to make features of, spread over the alignment depths.", min=2)] = 48,
    steps: Annotated[int, runs("Steps of the simulated ranks.", min=1)] = 200,
    out: Annotated[Path | None, writes("File for the figures, as JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Data: features per second, reading, memory, what slow examples cost a step, packing.  Takes some minutes."""
    from rich.console import Console
    from rich.table import Table

    from warpfold.data.store import Store
    from warpfold.tune.bench_data import bench_data, rows
    from warpfold.tune.straggler import Case

    with progress_bar() as progress:
        found = bench_data(Store(store), sources, entries, Case(steps=steps), progress)
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if as_json:
        show(found)
        return
    table = Table("", "", "figure", box=None, header_style="bold")
    last = ""
    for part, what, figure in rows(found):
        table.add_row(part if part != last else "", what, figure)
        last = part
    Console().print(table)
