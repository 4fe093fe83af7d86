"""The command line: reads arguments, calls one function of the package, prints what it returns.

Exit codes: 0 everything asked for was done, 1 it was not, 2 the input is at fault (one line says how), 130 Ctrl-C.
Heavy imports stand inside the commands, so that `--help` answers at once.
"""

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from warpfold import __version__
from warpfold.errors import UserError

click = sys.modules[typer.BadParameter.__module__]  # click's exceptions, or the copy that newer typers carry

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="AlphaFold2 in PyTorch: train it, fine-tune it, fold with it.  Start with [bold]warpfold demo[/].",
)


def argument(help: str) -> Any:
    """A positional argument."""
    return typer.Argument(help=help)


def reads(help: str, *names: str, **more: Any) -> Any:
    """An option that names input."""
    return typer.Option(*names, help=help, rich_help_panel="Input", **more)


def writes(help: str, *names: str, **more: Any) -> Any:
    """An option about output."""
    return typer.Option(*names, help=help, rich_help_panel="Output", **more)


def decides(help: str, *names: str, **more: Any) -> Any:
    """An option that changes the result."""
    return typer.Option(*names, help=help, rich_help_panel="What is computed", **more)


def runs(help: str, *names: str, **more: Any) -> Any:
    """An option that changes how the result is reached."""
    return typer.Option(*names, help=help, rich_help_panel="How it runs", **more)


class Precision(StrEnum):
    """Of the trunk's activations."""

    fp32 = "fp32"
    bf16 = "bf16"


AsJson = Annotated[bool, writes("Print the result as JSON.", "--json")]
Force = Annotated[bool, writes("Replace the output of another run of this command.", "--force")]
Device = Annotated[str | None, runs("cpu, cuda, cuda:1 ...; default: the first GPU, or the CPU.")]
Workers = Annotated[int, runs("Processes.", min=1)]
Seed = Annotated[int, decides("The same seed gives the same result.")]


def spread(arguments: Sequence[str], lists: set[str]) -> list[str]:
    """["--msa", "a", "b"] -> ["--msa", "a", "--msa", "b"] for the options in `lists`."""
    found: list[str] = []
    current = ""  # the list option that the next value belongs to
    for argument in arguments:
        if argument.startswith("-"):
            current = argument if argument in lists else ""
        elif current and found[-1] != current:
            found.append(current)
        found.append(argument)
    return found


class Lists(TyperCommand):
    """A command whose list options take several values after one name: `--msas a.a3m b.a3m`, as a shell's * gives."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        lists = {name for parameter in self.params if getattr(parameter, "multiple", False) for name in parameter.opts}
        return super().parse_args(ctx, spread(args, lists))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line (`sys.argv` by default) and exit.  Bad input is one line on stderr, never a stack trace."""
    # Threads that wait sleep, not spin: beside another program on few cores, a small model runs some ten times faster.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        command = typer.main.get_command(app)
        code = command.main(args=arguments, prog_name="warpfold", standalone_mode=False)
    except UserError as error:
        code = _complain(str(error), 2)
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "warpfold"
        code = _complain(f"{error.format_message().rstrip('.')}; see {where} --help", 2)
    except click.ClickException as error:
        code = _complain(error.format_message(), 2)
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        code = _complain(f"{error.filename or 'writing'}: {error.strerror}", 1)
    except (KeyboardInterrupt, typer.Abort):
        code = _complain("stopped by Ctrl-C", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str, code: int) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return code


@contextmanager
def progress_bar(narrate: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr, moved by calls of (done, total, what).

    Where stderr is no terminal, nothing; with `narrate` a line whenever `what` changes.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=None)

        last = ""

        def move(done: int, total: int, what: str) -> None:
            nonlocal last
            progress.update(task, completed=done, total=total, description=what)
            if narrate and not console.is_terminal and what != last:
                typer.echo(f"[{done:3d}/{total}] {what}", err=True)
            last = what

        yield move


def _device(name: str | None) -> str:
    """The device to run on.  Errors: UserError for one that torch does not know or this machine lacks."""
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: {str(error).splitlines()[0]}; this machine has the cpu at least") from error
    return name


def show(result: Any) -> None:
    """Print JSON that any parser reads: no NaN, no infinities."""
    typer.echo(json.dumps(result, indent=2, allow_nan=False))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"warpfold {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(epilog="Example:  warpfold demo --out demo")
def demo(
    out: Annotated[Path, writes("Folder for the report and everything else.")] = Path("demo"),
    seed: Seed = 0,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make proteins, train a small AlphaFold2 on them, fold ones it never saw, and show it all in report.html."""
    from warpfold.run.demo import run_demo

    try:
        with progress_bar(narrate=True) as progress:
            summary = run_demo(out, seed=seed, force=force, progress=progress)
    except KeyboardInterrupt:
        typer.echo("stopped; the same command continues", err=True)
        raise typer.Exit(130) from None
    if as_json:
        show(summary)
        return
    scores = summary["held_out"]
    typer.echo(f"lDDT-Ca of held-out proteins: {scores['untrained']:.2f} untrained, {scores['trained']:.2f} trained")
    typer.echo(f"open {out / 'report.html'}")


@app.command(epilog="Example:  warpfold sample --proteins 200 --out proteins")
def sample(
    out: Annotated[Path, writes("Folder for mmCIF and A3M files.")],
    proteins: Annotated[int, decides("How many.", min=1)] = 200,
    min_length: Annotated[int, decides("Residues of the shortest.", min=1)] = 30,
    max_length: Annotated[int, decides("Residues of the longest.", min=1)] = 60,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Make sample proteins with alignments, to try a pipeline or a cluster without downloading anything."""
    from warpfold.data.generate import generate

    with progress_bar() as progress:
        made = generate(out, proteins, seed, min_length=min_length, max_length=max_length, progress=progress)
    if as_json:
        show(made)
    else:
        typer.echo(f"{len(made)} proteins in {out}")


@app.command(cls=Lists, epilog="Example:  warpfold pack --structures mmcif/ --msas msas/*.a3m --out store")
def pack(
    structures: Annotated[list[Path], reads("mmCIF or PDB files, or folders of them; gz or not.")],
    out: Annotated[Path, writes("The store to make; it must not exist.")],
    msas: Annotated[list[Path] | None, reads("A3M or Stockholm files, or folders of them.")] = None,
    max_resolution: Annotated[float, decides("Å; worse structures are dropped.")] = 9.0,
    min_length: Annotated[int, decides("Residues; shorter chains are dropped.", min=1)] = 10,
    max_length: Annotated[int | None, decides("Residues; longer chains are dropped.", min=1)] = None,
    require_msa: Annotated[bool, decides("Drop chains without an alignment.", "--require-msa")] = False,
    workers: Workers = 1,
    as_json: AsJson = False,
) -> None:
    """Make the store that `train` reads, and list what was dropped and why."""
    from warpfold.data import pack as packing

    filters = packing.Filters(
        max_resolution=max_resolution, min_length=min_length, max_length=max_length, require_msa=require_msa
    )
    with progress_bar() as progress:
        report = packing.pack(
            structures, msas or [], out, filters, workers, lambda stage, done, total: progress(done, total, stage)
        )
    if as_json:
        show(report.to_json())
        return
    for entry in report.dropped:
        typer.echo(f"dropped {entry.name or entry.file}: {entry.reason}")
    for file, reason in report.unused.items():
        typer.echo(f"unused {file}: {reason}")
    typer.echo(f"{out}: {report.summary()}")


@app.command(
    cls=Lists, epilog="Example:  warpfold predict query.fasta --msa query.a3m --params params.safetensors --out folded"
)
def predict(
    query: Annotated[Path, argument("FASTA (every record is folded), or an alignment (A3M, Stockholm).")],
    params: Annotated[Path, reads("WarpFold's .safetensors, or DeepMind's params_model_*.npz (monomer, ptm).")],
    out: Annotated[Path, writes("Folder for the predictions; a stopped run continues in it.")],
    msa: Annotated[
        list[Path] | None, reads("Alignments of the records; each goes to the record that is its first row.")
    ] = None,
    seed: Seed = 0,
    recycles: Annotated[int | None, decides("Passes through the trunk, less one; default: the model's.", min=0)] = None,
    ensemble: Annotated[int | None, decides("Samples of the alignment averaged in each pass.", min=1)] = None,
    max_msa: Annotated[int | None, decides("Cluster centres of the alignment; default: as trained.", min=1)] = None,
    max_extra: Annotated[int | None, decides("Rows of the extra alignment; default: as trained.", min=0)] = None,
    representations: Annotated[bool, writes("Keep single, pair and msa in the .npz.", "--representations")] = False,
    device: Device = None,
    chunk: Annotated[int | None, runs("Rows computed at a time, 0 for all; default: what fits.", min=0)] = None,
    precision: Annotated[Precision, runs("Of the trunk's activations.")] = Precision.fp32,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Fold sequences: mmCIF, PDB, pLDDT, PAE, a summary and a report."""
    from warpfold.run import predict as prediction

    options = prediction.Options(
        seed=seed,
        recycles=recycles,
        ensemble=ensemble,
        max_msa=max_msa,
        max_extra=max_extra,
        device=_device(device),
        chunk=chunk,
        precision=precision.value,
        representations=representations,
        force=force,
    )
    with progress_bar() as progress:
        summary = prediction.predict(query, msa or [], params, out, options, progress)
    if as_json:
        show(summary)
    else:
        for entry in summary["predictions"]:
            ptm = "" if entry["ptm"] is None else f", pTM {entry['ptm']:.2f}"
            typer.echo(f"{entry['name']}: mean pLDDT {entry['mean_plddt']:.1f}{ptm}, {out / entry['folder']}")
        typer.echo(f"report: {out / 'report.html'}")
    for failure in summary["failures"]:
        typer.echo(f"failed {failure['name']}: {failure['error']}", err=True)
    raise typer.Exit(1 if summary["failures"] else 0)


@app.command(cls=Lists, epilog="Example:  warpfold train tiny --data store --out run --set train.steps=500")
def train(
    settings: Annotated[str, argument("A TOML file, or the name of a preset: monomer, tiny ...")],
    data: Annotated[Path, reads("The store that `warpfold pack` made.")],
    out: Annotated[Path, writes("Folder of the run; the same command continues a stopped one, bit for bit.")],
    init: Annotated[Path | None, reads("Parameters to start from; default: random ones.")] = None,
    change: Annotated[list[str] | None, decides("Settings over those of the file, KEY=VALUE.", "--set")] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Train or fine-tune; Ctrl-C or kill -9 loses nothing but the steps since the last checkpoint."""
    from dataclasses import asdict

    from warpfold import settings as toml
    from warpfold.data.store import Store
    from warpfold.run import train as training
    from warpfold.run import watch

    config = toml.build(training.RunConfig, toml.load(settings, change or []), settings)
    with watch.progress_bar(config.train.steps) as watcher:
        result = training.train(config, Store(data), out, init=init, device=_device(device), watch=watcher)
    if as_json:
        show({**asdict(result), "params": str(result.params)})
    elif result.finished:
        typer.echo(f"{result.steps} steps; parameters: {result.params}")
    else:
        typer.echo(f"stopped after {result.steps} steps; the same command continues", err=True)
    raise typer.Exit(0 if result.finished else 130)


@app.command(epilog="Example:  warpfold score predicted.cif 1ubq.cif.gz")
def score(
    predicted: Annotated[Path, argument("mmCIF or PDB file.")],
    reference: Annotated[Path, argument("mmCIF or PDB file: the truth.")],
    chains: Annotated[str | None, reads("Pairs, predicted:reference, e.g. A:B,B:C; default: by sequence.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare a structure with its reference: lDDT, GDT, TM-score, RMSD."""
    from warpfold.run.score import score_files

    result = score_files(predicted, reference, _chain_pairs(chains))
    if as_json:
        show(result.to_dict())
        return
    for what, value in result.rows():
        typer.echo(f"{what:18s} {value}")


def _chain_pairs(text: str | None) -> dict[str, str] | None:
    if text is None:
        return None
    pairs = [pair.split(":") for pair in text.split(",")]
    if any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise UserError(f"--chains {text}: expected pairs of predicted:reference, for example A:B,B:C")
    return {predicted: reference for predicted, reference in pairs}


@app.command(epilog="Example:  warpfold golden ../shared/golden --only units/*")
def golden(
    folder: Annotated[Path, argument("Folder of reference cases.")],
    only: Annotated[str | None, reads("A pattern on the cases' paths.")] = None,
    strict: Annotated[bool, decides("Cases of models that are not implemented fail too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare WarpFold with numbers of DeepMind's official code, array by array."""
    from rich.console import Console

    from warpfold.run import golden as reference

    with progress_bar() as progress:
        results = reference.run(folder, only, progress)
    if as_json:
        show(reference.as_data(results))
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(reference.table(results))
        typer.echo(reference.summary(results))
    raise typer.Exit(reference.exit_code(results, strict))


if __name__ == "__main__":
    main()
