"""`warpfold doctor`."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from warpfold.cli.common import AsJson, Device, app, decides, device_of, reads, show
from warpfold.errors import UserError
from warpfold.progress import progress_bar

if TYPE_CHECKING:
    from warpfold.tune.doctor import Finding

WIDE = 200  # columns where the output is no terminal
HINT = "warpfold doctor --kernels checks every operation on this device against its definition"


@app.command(epilog="Example:  warpfold doctor --kernels --settings monomer")
def doctor(
    kernels: Annotated[
        bool, decides("Run every operation, forward and backward, against its definition; about a minute.", "--kernels")
    ] = False,
    settings: Annotated[
        str | None, reads("Sizes of this TOML file or preset; default: tiny on a CPU, monomer on a GPU.")
    ] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Say what this machine has, and whether it computes what it should: exit code 1 if not."""
    import torch

    from warpfold import settings as toml
    from warpfold.tune import doctor as checks
    from warpfold.tune.machine import describe

    if settings is not None and not kernels:
        raise UserError("--settings: the sizes are those of --kernels; add it")
    where = torch.device(device_of(device))
    if not kernels:
        machine = describe(where)
        if as_json:
            show({"machine": machine})
        else:
            _facts(machine)
            typer.echo(f"\n{HINT}")
        return
    source = settings or ("monomer" if where.type == "cuda" else "tiny")
    cases = checks.cases_of(toml.load(source), source)
    with progress_bar() as progress:
        findings = checks.examine(cases, where, progress=progress)
    report = checks.report(findings, where, source)
    if as_json:
        show(report)
    else:
        _facts(report["machine"])
        _print(findings, where.type, source)
    for finding in findings:
        if finding.verdict.red:
            typer.echo(f"red: {finding.verdict.says()}", err=True)
    raise typer.Exit(1 if report["red"] else 0)


def _facts(machine: dict[str, str]) -> None:
    wide = max(map(len, machine))
    for key, value in machine.items():
        typer.echo(f"{key:{wide}}  {value}")


def _print(findings: "list[Finding]", kind: str, source: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from warpfold.tune.doctor import HEADS, table

    if kind != "cuda":
        typer.echo("\nNo GPU is looked at: these are the CPU's fast ways.")
    typer.echo(f"\nAt the sizes of {source}.  Errors to fp64, ours / the definition's; speed of a few passes, rough.")
    shown = Table(*HEADS, box=None, header_style="bold")
    for line in table(findings):
        shown.add_row(*line, style="bold red" if line[-1] == "RED" else None)
    typer.echo()
    Console(width=None if sys.stdout.isatty() else WIDE).print(shown)
    red = sum(f.verdict.red for f in findings)
    slow = sum(bool(f.verdict.reason) or f.small for f in findings)
    cut = "; where rows were cut, speeds are those of the cut" if any(f.verdict.case.cut_from for f in findings) else ""
    typer.echo(f"{len(findings)} checked, {red} red, {slow} computed by the definition{cut}")
