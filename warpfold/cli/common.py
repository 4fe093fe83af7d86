"""What all commands share: the app, its kinds of options, the device, tables and JSON."""

import functools
import inspect
import json
import logging
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from warpfold.errors import UserError, options_given
from warpfold.parallel.srun import is_one_of_several
from warpfold.progress import no_bars

if TYPE_CHECKING:
    from warpfold.cost.example import ModelBench
    from warpfold.data.search.server import AlignmentServer
    from warpfold.parallel.team import ProcessInfo


class StoppedByUser(Exception):
    """Ctrl-C ended a command."""


class Commands(TyperGroup):
    """All commands.  typer would end without a word at Ctrl-C; the command line says how to go on."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise StoppedByUser from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="AlphaFold2 in PyTorch: train it, fine-tune it, fold with it.  Start with [bold]warpfold demo[/].",
)


@contextmanager
def speaking(quiet: bool, verbose: bool, as_json: bool) -> Iterator[None]:
    """Have a command say less or more within the context.

    quiet: no progress, and nothing on stdout but JSON; warnings and errors stay.  verbose: what the package logs goes
    to stderr, and so does where an error came from.
    """
    log, handler = logging.getLogger("warpfold"), logging.StreamHandler()
    with ExitStack() as stack:
        stack.enter_context(options_given())
        if quiet:
            stack.enter_context(no_bars())
        if quiet and not as_json:
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w", encoding="utf-8"))))
        if verbose:
            handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", "%H:%M:%S"))
            log.addHandler(handler)
            stack.callback(log.removeHandler, handler)
            stack.callback(log.setLevel, log.level)
            log.setLevel(logging.DEBUG)
        try:
            yield
        except UserError:
            if verbose:
                traceback.print_exc()
            raise


def with_speech(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command with the options that all have: -q and -v."""

    @functools.wraps(command)
    def run(*, quiet: bool, verbose: bool, **given: Any) -> Any:
        with speaking(quiet, verbose, bool(given.get("as_json"))):
            return command(**given)

    signature, more = inspect.signature(command), {"quiet": Quiet, "verbose": Verbose}
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=more[name]) for name in more
    ]
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, **more}
    return run


def argument(help: str, **more: Any) -> Any:
    """Return a positional argument."""
    return typer.Argument(help=help, **more)


def _options(panel: str) -> Callable[..., Any]:
    """Return a function that makes options for one panel of --help: from help, names, and typer's keywords."""

    def option(help: str, *names: str, **more: Any) -> Any:
        return typer.Option(*names, help=help, rich_help_panel=panel, **more)

    return option


reads, writes = _options("Input"), _options("Output")
decides = _options("What is computed")  # options that change the result
runs = _options("How it runs")  # options that do not


class Precision(StrEnum):
    """The precision of the trunk's activations."""

    fp32 = "fp32"
    bf16 = "bf16"
    bf16_all = "bf16_all"
    fp16 = "fp16"


AsJson = Annotated[bool, writes("Print the result as JSON.", "--json")]
Force = Annotated[bool, writes("Replace an earlier run of this command in the folder; other files stay.", "--force")]
MsaServer = Annotated[
    str | None,
    reads(
        "URL of an alignment server (ColabFold's protocol), to which sequences without alignment are SENT; without "
        "this nothing is sent anywhere.",
        "--msa-server",
    ),
]
Device = Annotated[str | None, runs("cpu, cuda, cuda:1 ...; default: the first GPU, or the CPU.")]
Axial = Annotated[
    int | None, runs("Processes that share one protein, each with a slice of its large tensors.", "--plan.axial", min=1)
]
Memory = Annotated[
    str | None, runs("Of a device, to be used at most: 24GB; default: what is free.", show_default=False)
]
Branch = Annotated[
    int | None,
    runs(
        "2: run the two halves of a block on separate processes (not for AlphaFold2's blocks).", "--plan.branch", min=1
    ),
]
Strict = Annotated[bool, runs("Fail if an operation has no fast kernel here, instead of running slower.", "--strict")]
Workers = Annotated[int, runs("Number of processes.", min=1)]
Quiet = Annotated[bool, runs("Print warnings and errors only, and what --json gives.", "--quiet", "-q")]
Verbose = Annotated[bool, runs("Print what is decided inside, too, and where an error came from.", "--verbose", "-v")]
Seed = Annotated[int, decides("The same seed gives the same result.")]

# The size of a random example that is timed or profiled; what is left out is that of the settings' training examples.
Residues = Annotated[
    int | None, decides("Residues of the example; default: the settings' crop, on a CPU at most 64.", min=4)
]
Sequences = Annotated[
    int | None, decides("Rows of its alignment; default: the settings' max_msa, on a CPU at most 32.", min=1)
]
Extra = Annotated[
    int | None, decides("Rows of its extra MSA; default: the settings' max_extra, on a CPU at most 64.", min=1)
]
Templates = Annotated[
    int | None, decides("Its templates; default: the settings' max_templates, on a CPU at most 1.", min=0)
]
Blocks = Annotated[int | None, decides("Blocks of each stack, at most; default: the settings', on a CPU 2.", min=1)]
Recycles = Annotated[int, decides("Passes without gradient before the one that counts.", min=0)]
# A whole model on a CPU: at most these, so that the large settings take a minute or two.
ON_CPU = {"residues": 64, "sequences": 32, "extra": 64, "templates": 1}
BLOCKS_ON_CPU = 2
Change = Annotated[list[str] | None, decides("Settings that override those of the file, KEY=VALUE.", "--set")]


def repeat_names(arguments: Sequence[str], lists: set[str]) -> list[str]:
    """Turn ["--msa", "a", "b"] into ["--msa", "a", "--msa", "b"] for the options in `lists`."""
    found: list[str] = []
    current = ""  # the list option that the next value belongs to
    for argument in arguments:
        if argument.startswith("-"):
            current = argument if argument in lists else ""
        elif current and found[-1] != current:
            found.append(current)
        found.append(argument)
    return found


def parts(values: Sequence[str]) -> list[str]:
    """Split values at commas: ["a,b", "c"] -> ["a", "b", "c"]."""
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def chosen(option: str, values: Sequence[str], known: Iterable[str]) -> list[str]:
    """Return the values, split at commas, each once.  Errors: UserError for one that is not known."""
    known = list(dict.fromkeys(known))
    for value in parts(values):
        if value not in known:
            raise UserError(f"{option} {value}: not one of {', '.join(known)}")
    return list(dict.fromkeys(parts(values)))


class Lists(TyperCommand):
    """A command whose list options take several values after one name: `--msa a.a3m b.a3m`, as from a shell's *."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        lists = {name for parameter in self.params if getattr(parameter, "multiple", False) for name in parameter.opts}
        return super().parse_args(ctx, repeat_names(args, lists))


def name_operations(command: Any, attribute: str) -> None:
    """Put the operations of check/cases.py into a command's --help: only --help loads torch for their names."""
    from warpfold.check import cases

    for parameter in command.params:
        if parameter.name == "op":
            parameter.help = parameter.help.replace("OPERATIONS", ", ".join(getattr(cases, attribute)))


CONTINUE = ("demo", "pack", "predict", "relax", "search", "train")  # commands that keep what they have done
GIVEN: list[str] = []  # the arguments of the command line that runs


def how_to_go_on() -> str:
    """Return what to type after a command was stopped: the same once more, but `--force`, which would begin again."""
    if not GIVEN or is_one_of_several(os.environ):
        return "the same command continues"
    if GIVEN[0] not in CONTINUE:
        return f"to start again: {shlex.join(['warpfold', *GIVEN])}"
    return f"the same command continues: {shlex.join(['warpfold', *(one for one in GIVEN if one != '--force')])}"


def say_refused(refused: Mapping[str, int]) -> None:
    """Say on stderr which operations were computed by their definitions, which is slower, and why."""
    for refusal, count in refused.items():
        typer.echo(f"slower than necessary: {refusal}: computed by its definition, {count} times", err=True)


@contextmanager
def plans_said(process: "ProcessInfo") -> Iterator[None]:
    """Say on stderr, from the first process, how each protein is folded, within the context."""

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            typer.echo(record.getMessage(), err=True)

    log, handler = logging.getLogger("warpfold.plan"), Said()
    before = log.level, log.propagate
    if process.rank == 0:
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.level, log.propagate = before


def this_process() -> "ProcessInfo":
    """Return what torchrun or srun tells this process of itself.

    Of many processes, each connects over gloo only to those that it sends to, some ten, when it first does.  Otherwise
    it would connect to all at the start: at 2,048 processes 16,000 open sockets on a machine of eight GPUs.
    """
    from warpfold.parallel.team import MANY, ProcessInfo

    process = ProcessInfo.from_environment(os.environ)
    if process.ranks > MANY:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # torch reads it when it makes a group
    return process


def device_of(name: str | None, process: "ProcessInfo | None" = None) -> str:
    """Return the device to run on; of several processes on a machine, each takes a GPU of its own.

    Errors: UserError for one that torch does not know or this machine lacks.
    """
    from warpfold import arguments

    return arguments.device_of(name, process.local_rank if process is not None and process.ranks > 1 else None)


def alignment_server(url: str | None, cache: Path | None, default: Path) -> "AlignmentServer | None":
    """Return the server that the user has named, or None; cache: where its answers are kept, if not in `default`.

    Errors: UserError for an address that is none, and for a cache without a server.
    """
    if url is None:
        if cache is not None:
            raise UserError("--msa-cache has no effect without --msa-server")
        return None
    from warpfold.data.search.server import AlignmentServer

    return AlignmentServer(url, cache or default, say=lambda line: typer.echo(line, err=True))


def show(result: Any) -> None:
    """Print JSON that any parser reads: no NaN, no infinities."""
    typer.echo(json.dumps(result, indent=2, allow_nan=False))


def show_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], style: Callable[[Sequence[str]], str] | None = None
) -> None:
    """Print a table, 200 columns wide where the output is no terminal; style: returns the style of a row, or ""."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*heads, box=None, header_style="bold")
    for row in rows:
        table.add_row(*row, style=style(row) if style else None)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def measured(
    settings: str,
    changes: Sequence[str],
    sizes: Mapping[str, int | None],
    blocks: int | None,
    recycles: int,
    on_cpu: bool = False,
) -> "ModelBench":
    """Return what `bench --block`, `bench --step` and `profile` measure, from settings and the sizes that were given.

    on_cpu: a whole model, on a CPU: what was not given is at most `ON_CPU`, and that is said on stderr.
    Errors: UserError for settings that are wrong, or that are for several processes.
    """
    from dataclasses import replace

    from warpfold import settings as toml
    from warpfold.cost.example import bench_of, shortened

    given = bench_of(toml.load(settings, changes), settings, blocks)
    chosen = {name: value for name, value in sizes.items() if value is not None}
    found = replace(given, sizes=replace(given.sizes, **chosen), recycles=recycles)
    if not on_cpu:
        return found
    less = {name: min(most, getattr(found.sizes, name)) for name, most in ON_CPU.items() if name not in chosen}
    model = found.model if blocks else shortened(found.model, BLOCKS_ON_CPU)
    small = replace(found, model=model, sizes=replace(found.sizes, **less))
    if small != found:
        most = ", ".join(f"{count} {name}" for name, count in ON_CPU.items())
        typer.echo(f"on a CPU, unless options say otherwise, at most: {most}, {BLOCKS_ON_CPU} blocks", err=True)
    return small
