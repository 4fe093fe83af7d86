"""What all commands share: the app, its kinds of options, the device, tables and JSON."""

import inspect
import json
import logging
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from warpfold.arguments import PathLike, Paths, decides, declaration, kinds_of, name_of, runs, writes
from warpfold.errors import UserError, options_given
from warpfold.parallel.process import is_one_of_several
from warpfold.progress import no_bars

if TYPE_CHECKING:
    from warpfold.cost.example import ModelBench
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


Quiet = Annotated[bool, runs("Print warnings and errors only, and what --json gives.", "--quiet", "-q")]
Verbose = Annotated[bool, runs("Print what is decided inside, too, and where an error came from.", "--verbose", "-v")]
AsJson = Annotated[bool, writes("Print the result as JSON.", "--json")]

CONTINUE: set[str] = set()  # commands that keep what they have done
Shell = TypeVar("Shell", bound=Callable[..., Any])


def command(
    options: type[Any] | None = None,
    *,
    example: str,
    continues: bool = False,
    register: Callable[..., Callable[[Any], Any]] = app.command,
    **more: Any,
) -> Callable[[Shell], Shell]:
    """Return a decorator: a function is what a command does in a shell.

    options: a dataclass whose fields are the command's options, which the function gets as a dict, its first argument;
    its docstring is the help.  Annotated arguments of the function are options of the shell alone; -q and -v are added.
    example: ends --help.  continues: whether the same command goes on where it was stopped.  register, more: as of
    typer's `Typer.command`.
    """

    def decorated(function: Shell) -> Shell:
        """Register the function, and return it as it is."""
        own = list(inspect.signature(function).parameters.values())
        declared = [] if options is None else list(inspect.signature(options).parameters.values())
        names = {one.name for one in declared if declaration(one.annotation)[1]}
        shared = [_parameter("quiet", Quiet, False), _parameter("verbose", Verbose, False)]
        parameters = [
            *(_parameter(one.name, one.annotation, one.default) for one in declared if one.name in names),
            *(_parameter(one.name, one.annotation, one.default) for one in own[len(declared) > 0 :]),
            *shared,
        ]

        def run(*, quiet: bool, verbose: bool, **values: Any) -> Any:
            values = {name: one.value if isinstance(one, Enum) else one for name, one in values.items()}
            with speaking(quiet, verbose, bool(values.get("as_json"))):
                if options is None:
                    return function(**values)
                given = {name: values.pop(name) for name in names}
                return function(given, **values)

        run.__name__ = name_of(function if options is None else options)
        run.__doc__ = (function if options is None else options).__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        if continues:
            CONTINUE.add(run.__name__)
        register(epilog=example, **more)(run)
        return function

    return decorated


def _parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    """Return an argument as typer wants it declared."""
    kind, option = declaration(hint)
    if option is None:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
    shell: Any = option.shell or _in_shell(name, kind)
    names = option.names or (("--out", "-o") if name == "out" else ())
    if not names and shell is bool:
        names = (f"--{name.replace('_', '-')}",)  # no --no-...: it is off unless given
    about: dict[str, Any] = {"help": option.help, "metavar": option.metavar}
    if option.panel is None:
        declared = typer.Argument(**about, show_default=option.show_default)
    else:
        about |= {"min": option.min, "max": option.max, "show_default": option.show_default}
        declared = typer.Option(*names, rich_help_panel=option.panel, **about)
    if default is not inspect.Parameter.empty and isinstance(shell, type) and issubclass(shell, Enum):
        default = shell(default)
    annotation = Annotated[shell, declared]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _in_shell(name: str, kind: Any) -> Any:
    """Return the type of what a shell gives for an option of some type: paths, words, the type itself."""
    members, found = kinds_of(kind), kind
    if set(members) == set(get_args(PathLike)):
        found = Path
    elif set(members) == set(get_args(Paths)):
        found = list[Path]
    elif get_origin(members[0]) is Literal:
        words: Any = Enum  # typer makes choices of an enum
        found = words(name, {word: word for word in get_args(members[0])}, type=str)
    return found | None if NoneType in get_args(kind) else found


# What several commands take in a shell alone.
Axial = Annotated[
    int | None, runs("Processes that share one protein, each with a slice of its large tensors.", "--plan.axial", min=1)
]
Branch = Annotated[
    int | None,
    runs(
        "2: run the two halves of a block on separate processes (not for AlphaFold2's blocks).", "--plan.branch", min=1
    ),
]
Change = Annotated[list[str] | None, decides("Settings that override those of the file, KEY=VALUE.", "--set")]

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
def plans_said(rank: int = 0) -> Iterator[None]:
    """Say on stderr, from the first process, what is chosen for each protein and asked of servers, in the context."""

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            typer.echo(record.getMessage(), err=True)

    log, handler = logging.getLogger("warpfold.plan"), Said()
    before = log.level, log.propagate
    if rank == 0:
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
    from warpfold import device

    return device.device_of(name, process.local_rank if process is not None and process.ranks > 1 else None)


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
