"""Options, declared once: what an argument is in Python, an option in a shell, and which values it may have.

A command is a function whose annotations declare its options: `seeds: Annotated[int, decides("help", min=1)] = 1`.
`checked` checks the arguments at the call and writes the help texts into the docstring. The command line has the same
options (cli/common.py). A dataclass declares options that several functions share.
"""

import functools
import inspect
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from warpfold.errors import UserError, as_arguments, given
from warpfold.files import is_address
from warpfold.progress import Progress, no_progress
from warpfold.settings import plain, toml_value

P = ParamSpec("P")
R = TypeVar("R")
PathLike = str | os.PathLike[str]
Paths = PathLike | Sequence[PathLike]
Changes = Sequence[str] | Mapping[str, Any]  # of settings: ["train.steps=5"], {"train.steps": 5}


class WrongArgument(UserError):
    """An argument of a wrong type or value, which is wrong for every input."""


# ---- Declarations


@dataclass(frozen=True)
class Option:
    """The declaration of an option, which follows its type in `Annotated`.

    names: the spellings in a shell, by default derived from the field.
    panel: the panel of --help; None for a positional argument.
    min, max: the smallest and the largest number.  above: a bound that the number must exceed.
    shell: the type in a shell, if Python accepts more types.
    metavar, show_default: as in typer.
    path: "local" for texts that are paths of this machine, as all options of type Path are; "store" for paths that may
    also be addresses of stores.
    """

    help: str
    names: tuple[str, ...] = ()
    panel: str | None = None
    min: float | None = None
    max: float | None = None
    above: float | None = None
    shell: Any = None
    metavar: str | None = None
    show_default: bool = True
    path: Literal["local", "store"] | None = None


def in_panel(panel: str | None) -> Callable[..., Option]:
    """Return a function that declares options of one panel of --help, from help, names, and fields of `Option`."""

    def declare(help: str, *names: str, **more: Any) -> Option:
        return Option(help, names, panel, **more)

    return declare


argument = in_panel(None)
reads, writes = in_panel("Input"), in_panel("Output")
decides = in_panel("What is computed")  # options that change the result
runs = in_panel("How it runs")  # options that do not


# Options of several commands.
Seed = Annotated[int, decides("The same seed gives the same result.")]
Workers = Annotated[int, runs("Number of processes; each takes a GPU of its own if there are several.", min=1)]
Shard = Annotated[str | None, runs("I/N: only the I-th of N parts, for job arrays that share --out.")]
Device = Annotated[str | None, runs("cpu, cuda, cuda:1, mps ...; default: the first CUDA GPU, or the CPU.")]
Memory = Annotated[
    str | int | None,
    runs(
        "Limit for the memory of a device, such as 24GB; default: the free memory.",
        shell=str | None,
        show_default=False,
    ),
]
Strict = Annotated[bool, runs("Fail if an operation has no fast kernel here, instead of running slower.")]
Set = Annotated[Changes | None, decides("Settings that override those of the file, KEY=VALUE.", shell=list[str] | None)]
Force = Annotated[bool, writes("Replace an earlier run of this command in the folder; other files stay.")]
Cluster = Annotated[str | None, runs("Address of a Dask scheduler: tcp://host:8786.")]


def declaration(hint: Any) -> tuple[Any, Option | None]:
    """Split an annotation into its type and its `Option`; None for an argument that exists only in Python."""
    if get_origin(hint) is not Annotated:
        return hint, None
    kind, *metadata = get_args(hint)
    return kind, next((item for item in metadata if isinstance(item, Option)), None)


def kinds_of(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union without None; any other type is its only member."""
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return tuple(member for member in members if member is not NoneType)


# ---- Checks


def check(name: str, hint: Any, value: Any) -> Any:
    """Check and convert a value as its annotation declares: numbers, bools, words, texts and paths.

    Values of other types are returned as they are.
    Errors: WrongArgument for a value of another type or out of its range.
    """
    kind, option = declaration(hint)
    # If the type in a shell differs, Python accepts more, which only the command can check.
    if option is None or option.shell is not None:
        return value
    members = kinds_of(kind)
    if value is None and NoneType in get_args(kind):
        return None
    if members == (int,):
        return whole(name, value, option.min, option.max)
    if members == (float,):
        return number(name, value, option.min, option.max, option.above)
    if members == (bool,):
        return flag(name, value)
    if members == (str,):
        if option.path == "local":
            refuse_addresses(name, value)
        return text(name, value)
    if set(members) == set(get_args(PathLike)):
        return path(name, value, option.path == "store")
    if set(members) == set(get_args(Paths)):
        return paths(name, value)
    if get_origin(members[0]) is Literal:
        return one_of(name, value, get_args(members[0]))
    if get_origin(members[0]) is list:
        if not is_list(value):
            raise WrongArgument(f"{given(name, shown(value))}: a list is needed")
        item: Any = Annotated[get_args(members[0])[0], option]
        return [check(f"{name}[{i}]", item, element) for i, element in enumerate(value)]
    return value


class Checked:
    """A dataclass that checks its options when it is created, and converts them to their declared types."""

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # its subclasses are dataclasses
            object.__setattr__(self, field.name, check(field.name, field.type, getattr(self, field.name)))


def checked(*options: type, **others: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that checks the arguments of a function at the call, as they are declared.

    The docstring gets the help text of each argument, and errors name arguments instead of options of the command line.
    options: dataclasses whose fields declare the arguments that the function only gives a type.
    others: option -> argument where the names differ.
    """
    shared = {field.name: field.type for kind in options for field in fields(kind)}

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        """Wrap the function with the checks."""
        signature = inspect.signature(function)
        names = {name: name for name in signature.parameters} | others
        hints = {
            name: parameter.annotation
            if declaration(parameter.annotation)[1]
            else shared.get(name, parameter.annotation)
            for name, parameter in signature.parameters.items()
        }
        helps = {name: option.help for name, hint in hints.items() if (option := declaration(hint)[1])}

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with _named(names):
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                for name in helps:
                    bound.arguments[name] = check(name, hints[name], bound.arguments[name])
                return function(*bound.args, **bound.kwargs)

        lines = "".join(f"\n    {name}: {help}" for name, help in helps.items())
        text = inspect.getdoc(function) or ""
        run.__doc__ = f"{text}\n\nArguments:{lines}" if lines else text
        # Type checkers follow the wrapped function. `__signature__` is for help(), `declared` for the command line.
        parameters = signature.parameters.values()
        plain = [parameter.replace(annotation=declaration(parameter.annotation)[0]) for parameter in parameters]
        run.__signature__ = signature.replace(parameters=plain)  # type: ignore[attr-defined]
        run.declared = [parameter.replace(annotation=hints[parameter.name]) for parameter in parameters]  # type: ignore[attr-defined]
        return run

    return decorate


@contextmanager
def _named(names: Mapping[str, str]) -> Iterator[None]:
    """Replace options of the command line by arguments in the text of errors, within the context."""
    try:
        yield
    except UserError as error:
        error.args = (as_arguments(str(error), names), *error.args[1:])
        raise


def whole(name: str, value: Any, least: float | None = None, most: float | None = None) -> int:
    """Convert a value to an int from `least` to `most`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise WrongArgument(f"{given(name, shown(value))}: a whole number is needed") from None
    return _in_range(name, number, least, most)


def number(
    name: str, value: Any, least: float | None = None, most: float | None = None, above: float | None = None
) -> float:
    """Convert a value to a finite float from `least` to `most` that exceeds `above`."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise WrongArgument(f"{given(name, shown(value))}: a number is needed")
    if not math.isfinite(value):
        raise WrongArgument(f"{given(name, value)}: a finite number is needed")
    if above is not None and value <= above:
        raise WrongArgument(f"{given(name, value)}: a number over {above:g} is needed")
    return _in_range(name, float(value), least, most)


Number = TypeVar("Number", int, float)


def _in_range(name: str, value: Number, least: float | None, most: float | None) -> Number:
    if least is not None and value < least:
        raise WrongArgument(f"{given(name, value)}: at least {least:g} is needed")
    if most is not None and value > most:
        raise WrongArgument(f"{given(name, value)}: at most {most:g} is possible")
    return value


def flag(name: str, value: Any) -> bool:
    """Check that a value is True or False."""
    if not isinstance(value, bool):
        raise WrongArgument(f"{given(name, shown(value))}: True or False is needed")
    return value


def one_of(name: str, value: Any, known: Iterable[str]) -> str:
    """Check that a value is one of the known words."""
    known = list(known)
    if value not in known:
        raise WrongArgument(f"{given(name, shown(value))}: not one of {', '.join(known)}")
    return str(value)


def text(name: str, value: Any) -> str:
    """Check that a value is a text that is not blank."""
    if not isinstance(value, str) or not value.strip():
        raise WrongArgument(f"{given(name, shown(value))}: a text is needed")
    return value


def progress_of(value: Any) -> Progress:
    """Check a callback for progress; None becomes a function that does nothing."""
    if value is not None and not callable(value):
        raise WrongArgument(f"progress = {shown(value)}: a function of (done, total, what) is needed")
    return no_progress if value is None else value


def path(name: str, value: Any, store: bool = False) -> Path:
    """Convert a value to a Path.  store: the address of a store is allowed.

    An empty text is refused, as it would mean the current folder.
    """
    if not isinstance(value, str | os.PathLike) or not str(value).strip():
        raise WrongArgument(f"{given(name, shown(value))}: a path is needed, text or pathlib.Path")
    if not store:
        refuse_addresses(name, value)
    return Path(value)


def refuse_addresses(name: str, value: Any) -> None:
    """Raise WrongArgument for an address, or NAME=ADDRESS, instead of a local path.  value: a path or a list."""
    for item in value if is_list(value) else [value]:
        text = os.fspath(item) if isinstance(item, str | os.PathLike) else ""
        if is_address(text) or is_address(text.partition("=")[2]):
            address = re.sub(r":/(?!/)", "://", text, count=1)
            raise WrongArgument(f"{given(name, address)}: is an address. Give a path of this machine.")


def path_or_none(name: str, value: Any) -> Path | None:
    """Convert a value to a Path; None stays None."""
    return None if value is None else path(name, value)


def paths(name: str, value: Any) -> list[Path]:
    """Convert a path or a list of paths to a list; None becomes an empty list."""
    if value is None:
        return []
    if isinstance(value, str | os.PathLike):
        return [path(name, value)]
    if not is_list(value):
        raise WrongArgument(f"{given(name, shown(value))}: a path or a list of paths is needed")
    return [path(f"{name}[{i}]", element) for i, element in enumerate(value)]


def queries(name: str, value: Any) -> list[str | Path]:
    """Convert queries to a list of texts, which are paths or sequences, and of Paths."""
    files = paths(name, value)
    items = [value] if isinstance(value, str | os.PathLike) else value
    return [item if isinstance(item, str) else file for item, file in zip(items or [], files)]


def is_list(value: Any) -> bool:
    """Return whether a value is a list: a sequence other than text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_memory(text: str | int) -> int:
    """Parse an amount of memory such as "24GB", "24 GiB" or "24000MB" to bytes.  An int is a number of bytes.

    Errors: UserError for a text without unit or number, and for an amount that is not positive.
    """
    if not isinstance(text, str):
        return whole("memory", text, 1)
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([kmgt]i?b)", text.strip(), flags=re.IGNORECASE)
    size = 0
    if match is not None and match[2].upper() in UNITS:
        size = int(float(match[1]) * UNITS[match[2].upper()])
    if size <= 0:
        raise UserError(f"--memory {text}: not an amount of memory. Pass a number with its unit, as in 24GB or 24GiB.")
    return size


def changes_of(name: str, value: Any) -> list[str]:
    """Convert changes of settings, a list of "KEY=VALUE" or a mapping such as {"train.steps": 5}, to "KEY=VALUE"."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [f"{text(f'a key of {name}', key)}={toml_value(plain(new))}" for key, new in value.items()]
    if not is_list(value):
        raise WrongArgument(f'{name} = {shown(value)}: a list or a mapping is needed, as in {{"train.steps": 500}}')
    return [text(f"{name}[{i}]", change) for i, change in enumerate(value)]


def shown(value: Any) -> str:
    """Format a value for an error message of one line."""
    line = " ".join(repr(value).split())
    return line if len(line) <= 60 else f"{line[:60]} ..."
