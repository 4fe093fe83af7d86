"""Shared parts of the commands: the app, the declaration of commands and their answers, options, the device."""

import inspect
import json
import logging
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType, NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from warpfold.arguments import (
    PathLike,
    Paths,
    decides,
    declaration,
    kinds_of,
    number,
    refuse_addresses,
    runs,
    writes,
)
from warpfold.errors import UserError, options_given
from warpfold.files import check_new
from warpfold.parallel.process import ProcessInfo, is_one_of_several
from warpfold.progress import are_hidden, no_bars

if TYPE_CHECKING:
    from rich.table import Table


class StoppedByUser(BaseException):
    """Ctrl-C or SIGTERM ended a command; code: the exit code of the command line."""

    def __init__(self, code: int = 130) -> None:
        super().__init__(code)
        self.code = code


class Commands(TyperGroup):
    """All commands.  At Ctrl-C typer would end silently; this class lets the command line print how to continue.

    A name may have two words, as `params fetch`, whose first word is a command too.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, words if (words := two_words(args))[0] in self.commands else args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise StoppedByUser from None


def two_words(arguments: Sequence[str]) -> list[str]:
    """Turn ["params", "fetch", "ptm"] into ["params fetch", "ptm"]."""
    return [" ".join(arguments[:2]), *arguments[2:]]


class Lists(TyperCommand):
    """A command whose list options take several values after one name: `--msa a.a3m b.a3m`, as a shell expands *."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        list_options = {
            name for parameter in self.params if getattr(parameter, "multiple", False) for name in parameter.opts
        }
        return super().parse_args(ctx, repeat_names(args, list_options))


def repeat_names(arguments: Sequence[str], lists: set[str]) -> list[str]:
    """Turn ["--msa", "a", "b"] into ["--msa", "a", "--msa", "b"] for the options in `lists`."""
    words: list[str] = []
    current = ""  # the list option that the next value belongs to
    for argument in arguments:
        if argument.startswith("-"):
            current = argument if argument in lists else ""
        elif current and words[-1] != current:
            words.append(current)
        words.append(argument)
    return words


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="AlphaFold2 in PyTorch: train it, fine-tune it, fold with it.  Start with [bold]warpfold demo[/].",
)


@dataclass(frozen=True)
class Answer:
    """The answer of a command.

    data: for --json, or a function that returns it, as it may be large.  text: lines and tables for people.
    code: the exit code.
    """

    data: Any
    text: "Iterable[str | Table]"
    code: int = 0


def show(answer: Answer, as_json: bool) -> None:
    """Print an answer: JSON without NaN or infinity, which any parser reads; or lines and tables for people.

    Tables are 200 columns wide if the output is not a terminal.
    """
    if as_json:
        data = answer.data() if callable(answer.data) else answer.data
        typer.echo(json.dumps(data, indent=2, allow_nan=False))
        return
    for item in answer.text:
        if isinstance(item, str):
            typer.echo(item)
        else:
            from rich.console import Console

            Console(width=None if sys.stdout.isatty() else 200).print(item)


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], style: Callable[[Sequence[str]], str] = lambda row: ""
) -> "Table":
    """Build a table; style: returns the style of a row."""
    from rich.table import Table

    result = Table(*heads, box=None, header_style="bold")
    for row in rows:
        result.add_row(*row, style=style(row) or None)
    return result


@contextmanager
def logged(name: str, level: int, format: str = "%(message)s", propagate: bool = True) -> Iterator[None]:
    """Print the messages of a logger of the package to stderr, within the context."""
    log, handler = logging.getLogger(name), logging.StreamHandler()
    handler.setFormatter(logging.Formatter(format, "%H:%M:%S"))
    old_state = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(level)
    log.propagate = propagate
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(old_state[0])
        log.propagate = old_state[1]


def log_plans(rank: int = 0) -> "ExitStack":
    """Log plans, precision and server requests to stderr within the context, from rank 0 and unless --quiet is set."""
    stack = ExitStack()
    if rank == 0:
        level = logging.WARNING if are_hidden() else logging.INFO
        stack.enter_context(logged("warpfold.plan", level, propagate=False))
    return stack


@contextmanager
def configure_output(quiet: bool, verbose: bool, as_json: bool) -> Iterator[None]:
    """Set the amount of output of a command within the context.

    quiet: no progress, and only JSON on stdout; warnings and errors stay.  verbose: debug logs and tracebacks of errors
    go to stderr.
    """
    with ExitStack() as stack:
        stack.enter_context(options_given())
        if quiet:
            stack.enter_context(no_bars())
        if quiet and not as_json:
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w", encoding="utf-8"))))
        if verbose:
            stack.enter_context(logged("warpfold", logging.DEBUG, "%(asctime)s %(name)s: %(message)s"))
        try:
            yield
        except UserError:
            if verbose:
                traceback.print_exc()
            raise


Quiet = Annotated[bool, runs("Print only warnings, errors, and the output of --json.", "--quiet", "-q")]
Verbose = Annotated[bool, runs("Show debug logs and tracebacks.", "--verbose", "-v")]
AsJson = Annotated[bool, writes("Print the result as JSON.", "--json")]

CONTINUE: set[str] = set()  # commands that continue a stopped run
Shell = TypeVar("Shell", bound=Callable[..., Any])


def command(
    function: Callable[..., Any] | None = None,
    *,
    example: str,
    continues: bool = False,
    register: Callable[..., Callable[[Any], Any]] = app.command,
    **more: Any,
) -> Callable[[Shell], Shell]:
    """Return a decorator that registers a function as a command.  Its docstring is the help.

    function: the command in Python (`arguments.checked`).  The command has its options, whose values are the first
    argument of the decorated function, as a dict.
    Further annotated arguments of the decorated function are options that Python lacks.
    -q and -v are added, and --json if the function returns an `Answer`, which is printed.  example: the end of --help.
    continues: whether the same command continues a stopped run.  register, more: as in typer's `Typer.command`.
    """

    def decorate(shell: Shell) -> Shell:
        """Register the command and return the function unchanged."""
        signature = inspect.signature(shell)
        options = [parameter for parameter in getattr(function, "declared", ()) if declaration(parameter.annotation)[1]]
        own_parameters = list(signature.parameters.values())[function is not None :]
        shared: dict[str, Any] = {"as_json": AsJson, "quiet": Quiet, "verbose": Verbose}
        builds_answer = signature.return_annotation is Answer
        if not builds_answer:
            del shared["as_json"]
        keyword = inspect.Parameter.KEYWORD_ONLY
        added = [inspect.Parameter(name, keyword, default=False, annotation=hint) for name, hint in shared.items()]
        parameters = [
            _parameter(parameter.name, parameter.annotation, parameter.default)
            for parameter in (*options, *own_parameters, *added)
        ]

        def run(*, quiet: bool, verbose: bool, **values: Any) -> None:
            """Run the command and print its answer."""
            from warpfold.check.versions import newer_than_tested

            values = {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}
            with configure_output(quiet, verbose, as_json := bool(values.get("as_json"))):
                if (newer := newer_than_tested()) and ProcessInfo.from_environment(os.environ).rank == 0:
                    warn(f"warning: {newer}")
                if builds_answer:
                    del values["as_json"]
                option_values = {option.name: values.pop(option.name) for option in options}
                answer = shell(*([] if function is None else [option_values]), **values)
                if builds_answer:
                    show(answer, as_json)
                    raise typer.Exit(int(answer.code))

        run.__name__ = shell.__name__.removesuffix("_in_shell")
        run.__doc__ = shell.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        if continues:
            CONTINUE.add(more.get("name", run.__name__))
        register(epilog=example, **({"cls": Lists} if register == app.command else {}) | more)(run)
        return shell

    return decorate


def _parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    """Convert an argument to the form in which typer declares it."""
    kind, option = declaration(hint)
    if option is None:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
    shell: Any = option.shell or _in_shell(name, kind)
    names = option.names or (("--out", "-o") if name == "out" else ())
    if not names and shell is bool:
        names = (f"--{name.replace('_', '-')}",)  # without --no-NAME
    typer_options: dict[str, Any] = {"help": option.help, "metavar": option.metavar}
    if option.path == "local" or (option.path is None and "Path" in str(shell)):
        typer_options["callback"] = _local(name)
    if option.panel is None:
        declared = typer.Argument(**typer_options, show_default=option.show_default)
    else:
        typer_options |= {"min": option.min, "max": option.max, "show_default": option.show_default}
        if option.above is not None:  # typer has no such bound
            typer_options["callback"] = _more_than(name, option.above)
        declared = typer.Option(*names, rich_help_panel=option.panel, **typer_options)
    if default is not inspect.Parameter.empty and isinstance(shell, type) and issubclass(shell, Enum):
        default = shell(default)
    annotation = Annotated[shell, declared]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _in_shell(name: str, kind: Any) -> Any:
    """Return the type of an option in a shell: Path, list[Path], an Enum of the words of a Literal, or the type."""
    members, shell = kinds_of(kind), kind
    if set(members) == set(get_args(PathLike)):
        shell = Path
    elif set(members) == set(get_args(Paths)):
        shell = list[Path]
    elif get_origin(members[0]) is Literal:
        # typer before 0.19 does not support Literal.
        words: Any = Enum
        shell = words(name, {word: word for word in get_args(members[0])}, type=str)
    return shell | None if NoneType in get_args(kind) else shell


# Options of several commands that exist in a shell alone.
Axial = Annotated[
    int | None, runs("Processes that share one protein, each with a slice of the large tensors.", "--plan.axial", min=1)
]
Branch = Annotated[
    int | None,
    runs(
        "2: run the two halves of a block on separate processes (not for AlphaFold2's blocks).", "--plan.branch", min=1
    ),
]
Change = Annotated[list[str] | None, decides("Settings that override those of the file, KEY=VALUE.", "--set")]


def check_outputs(*files: Path | None, picture: Path | None = None) -> None:
    """Raise UserError unless these files can be created and the picture's name has a supported ending."""
    if picture is not None and picture.suffix not in (".png", ".svg"):
        raise UserError(f"--figure {picture}: a picture's name ends in .png or .svg")
    for file in (*files, picture):
        if file is not None:
            check_new(file)


def parts(values: Sequence[str] | None) -> list[str]:
    """Split values at commas: ["a,b", "c"] -> ["a", "b", "c"]."""
    return [part.strip() for value in values or () for part in value.split(",") if part.strip()]


def chosen(option: str, values: Sequence[str] | None, known: Iterable[str]) -> list[str]:
    """Split values at commas and remove duplicates.  Errors: UserError for an unknown value."""
    known = list(dict.fromkeys(known))
    for value in parts(values):
        if value not in known:
            raise UserError(f"{option} {value}: not one of {', '.join(known)}")
    return list(dict.fromkeys(parts(values)))


GIVEN: list[str] = []  # the arguments of the running command line


def _local(name: str) -> Callable[[Any], Any]:
    """Return a typer callback that refuses addresses."""

    def checked(value: Any) -> Any:
        with options_given():
            refuse_addresses(name, value)
        return value

    return checked


def _more_than(name: str, least: float) -> Callable[[Any], float | None]:
    """Return a typer callback that refuses numbers up to `least`."""

    def checked(value: Any) -> float | None:
        with options_given():
            return None if value is None else number(name, value, above=least)

    return checked


def resume_hint() -> str:
    """Return the command that continues a stopped run: the same without `--force`, which would begin again."""
    if not GIVEN or is_one_of_several(os.environ):
        return "the same command continues"
    if not CONTINUE & {GIVEN[0], two_words(GIVEN)[0]}:
        return f"to start again: {shlex.join(['warpfold', *GIVEN])}"
    return f"the same command continues: {shlex.join(['warpfold', *(word for word in GIVEN if word != '--force')])}"


@contextmanager
def on_sigterm(error: BaseException) -> Iterator[None]:
    """Raise an error at SIGTERM, within the context.  Schedulers send SIGTERM some time before they kill a job."""

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise error

    old_handler = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old_handler)


def warn(text: str) -> None:
    """Print a line to stderr."""
    typer.echo(text, err=True)


def print_fallbacks(refused: Mapping[str, int]) -> None:
    """Print to stderr which operations fell back to their slower definitions, and why."""
    for refusal, count in refused.items():
        warn(f"slower than necessary: {refusal}: computed by its definition, {count} times")


def this_process() -> ProcessInfo:
    """Read the rank and the number of processes from the environment that torchrun or srun sets.

    With many processes, gloo connects to a process only when it first sends to it, which happens for about ten of them.
    Otherwise each process would connect to all at the start: 16,000 open sockets on a machine of eight GPUs at 2,048
    processes.
    """
    from warpfold.parallel.team import MANY

    process = ProcessInfo.from_environment(os.environ)
    if process.ranks > MANY:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # read when a group is created
    return process


def device_of(name: str | None, process: ProcessInfo | None = None) -> str:
    """Return the device to run on; several processes on a machine each take a GPU of their own.

    Errors: UserError for a device that torch does not know or this machine lacks.
    """
    from warpfold import device

    return device.device_of(name, process.local_rank if process is not None and process.ranks > 1 else None)
