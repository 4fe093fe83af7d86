"""`warpfold doctor`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from warpfold.arguments import Device, decides, reads, writes
from warpfold.cli.common import AsJson, chosen, command, device_of, show, show_table
from warpfold.cli.doctor_cluster import ResultFiles, check_cluster
from warpfold.errors import UserError
from warpfold.files import check_new, row_file
from warpfold.progress import progress_bar

if TYPE_CHECKING:
    import torch

    from warpfold.bench.doctor import Finding

HINT = (
    "warpfold doctor --kernels checks every operation on this device against its definition; under torchrun or srun "
    "warpfold doctor --cluster checks all ranks, their links and files"
)


class WithoutFile(TyperCommand):
    """A command that takes no file, and says so: `--cluster FILE` is what others take."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments.  Errors: UserError for a file among them."""
        ctx.allow_extra_args = True
        rest = super().parse_args(ctx, args)
        if rest:
            raise UserError(
                f"{rest[0]}: the doctor reads no file; doctor --cluster --out FILE measures a cluster and writes one, "
                "and plan, train, simulate and launch read it: --cluster FILE"
            )
        return rest


@command(
    cls=WithoutFile,
    example="Example:  warpfold doctor --kernels --settings monomer;  "
    "torchrun --nproc-per-node 8 -m warpfold doctor --cluster --data store --folder runs --out cluster.toml",
)
def doctor(
    kernels: Annotated[
        bool, decides("Check every operation, forward and backward, against its definition; a minute.", "--kernels")
    ] = False,
    settings: Annotated[
        str | None, reads("TOML file or preset whose sizes to check; default: tiny on a CPU, monomer on a GPU.")
    ] = None,
    dtype: Annotated[list[str] | None, decides("Of --kernels: bf16, fp32; default: both.")] = None,
    rows: Annotated[
        Path | None, writes("Of --kernels: file for each finding as soon as it is there, a JSON object a line.")
    ] = None,
    cluster: Annotated[
        bool, decides("Check all ranks, their links and files, started as training is; two minutes.", "--cluster")
    ] = False,
    data: Annotated[list[Path] | None, reads("Of --cluster: stores that every rank reads from.")] = None,
    folder: Annotated[Path | None, reads("Of --cluster: a folder where runs will be written, to try it.")] = None,
    link: Annotated[
        str | None, reads("Of --cluster: what the network should be: ib400, roce100x2, eth25 (Gb/s, adapters).")
    ] = None,
    out: Annotated[
        Path | None,
        writes("Of --cluster: file for the measured links, which plan, train, simulate read.", "--out", "-o"),
    ] = None,
    figure: Annotated[Path | None, writes("Of --cluster: file for a picture of all links: .png, .svg.")] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Say what this machine has, and check that it computes what it should; exit with 1 if it does not."""
    given = [data, folder, link, out, figure]
    if cluster:
        if any([kernels, settings, dtype, rows]):
            raise UserError(
                "--cluster goes without --kernels, --settings, --dtype and --rows; check the operations on one process"
            )
        check_cluster(data or [], folder, link, device, ResultFiles(out, figure, as_json))
    if any(given):
        raise UserError("--data, --folder, --link, --out and --figure are of --cluster; add it")
    import torch

    from warpfold.bench.doctor import of_machine
    from warpfold.cost.machine import describe

    if any([settings, dtype, rows]) and not kernels:
        raise UserError("--settings gives the sizes for --kernels, and --dtype and --rows are for it; add --kernels")
    where = torch.device(device_of(device))
    if not kernels:
        machine = describe(where)
        if as_json:
            show({"machine": machine, "verdict": of_machine(where)})
        else:
            _facts(machine)
            _verdict(of_machine(where))
            typer.echo(f"\n{HINT}")
        return
    _check_kernels(settings or ("monomer" if where.type == "cuda" else "tiny"), where, dtype or [], rows, as_json)


def _check_kernels(source: str, where: "torch.device", dtype: list[str], rows: Path | None, as_json: bool) -> None:
    """Check every operation for the sizes of some settings, say what was found, and exit with 1 if one is wrong."""
    from warpfold import settings as toml
    from warpfold.bench import doctor as checks
    from warpfold.bench.doctor import of_findings, of_machine
    from warpfold.cost.measured_memory import check_memory

    cases = checks.cases_of(toml.load(source), source)
    dtypes = chosen("--dtype", dtype, checks.DTYPES) or list(checks.DTYPES)
    if rows is not None:
        check_new(rows)
    with progress_bar() as progress, row_file(rows) as sink:
        findings = checks.examine(cases, where, dtypes, progress, sink)
    memory = check_memory(where)
    verdict = [*of_findings(findings, source, where), *of_machine(where)]
    report = {**checks.report(findings, where, source), "memory": asdict(memory), "verdict": verdict}
    if as_json:
        show(report)
    else:
        _facts(report["machine"])
        _print(findings, where.type, source)
        typer.echo(memory.says())
        _verdict(verdict)
    for finding in findings:
        if finding.verdict.red:
            typer.echo(f"red: {finding.verdict.says()}", err=True)
    raise typer.Exit(1 if report["red"] else 0)


def _facts(machine: dict[str, str]) -> None:
    wide = max(map(len, machine))
    for key, value in machine.items():
        typer.echo(f"{key:{wide}}  {value}")


def _verdict(sentences: list[str]) -> None:
    typer.echo("")
    for sentence in sentences:
        styles = {"WRONG": typer.colors.RED, "Slow": typer.colors.YELLOW, "Short": typer.colors.YELLOW}
        typer.secho(sentence, fg=styles.get(sentence.partition(":")[0]))


def _print(findings: "list[Finding]", kind: str, source: str) -> None:
    from warpfold.bench.doctor import HEADS, table

    if kind != "cuda":
        typer.echo("\nNo GPU is checked: these are the CPU's fast ways.")
    typer.echo(f"\nSizes of {source}.  Errors to fp64, ours / the definition's; rough speeds, from a few passes.\n")
    show_table(HEADS, table(findings), lambda row: "bold red" if row[-1] == "RED" else "")
    if any(f.verdict.case.full_rows for f in findings):
        typer.echo("where rows were cut, speeds are those of the cut")
