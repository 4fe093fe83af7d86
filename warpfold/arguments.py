"""Options, declared once: what an argument is in Python, an option in a shell, and which values it may have.

A command is a dataclass whose fields are its options, `recycles: Annotated[int | None, decides("help", min=0)] = None`.
Of it are made the options of the command line (cli/common.py), the function of Python (`function`), and their checks.
Functions and methods declare their arguments the same way, and `checked` checks them at the call.
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
from typing import Annotated, Any, Literal, ParamSpec, Protocol, TypeVar, Union, get_args, get_origin

from warpfold.errors import UserError, as_arguments, given
from warpfold.files import is_address
from warpfold.progress import Progress, no_progress
from warpfold.settings import plain, toml_value

P = ParamSpec("P")
R = TypeVar("R")
Made = TypeVar("Made", covariant=True)
PathLike = str | os.PathLike[str]
Paths = PathLike | Sequence[PathLike]
Changes = Sequence[str] | Mapping[str, Any]  # of settings: ["train.steps=5"], {"train.steps": 5}


class WrongArgument(UserError):
    """An argument of a wrong kind, which no other input would mend."""


# ---- what is declared


@dataclass(frozen=True)
class Option:
    """What stands in `Annotated` beside the type of an option.

    names: in a shell, where they are not that of the field.  panel: of --help; none: a positional argument.  min, max:
    what a number may be; above: what it must be more than.  shell: the type in a shell, where Python takes more.
    metavar, show_default: of --help.  path: "local" for texts that are paths of this machine, as options of the type
    Path are anyway; "store" for what may also be the address of a store.
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


def of_panel(panel: str | None) -> Callable[..., Option]:
    """Return a function that declares options of one panel of --help, from help, names, and fields of `Option`."""

    def declared(help: str, *names: str, **more: Any) -> Option:
        return Option(help, names, panel, **more)

    return declared


argument = of_panel(None)
reads, writes = of_panel("Input"), of_panel("Output")
decides = of_panel("What is computed")  # options that change the result
runs = of_panel("How it runs")  # options that do not


# What several commands take.
Seed = Annotated[int, decides("The same seed gives the same result.")]
Workers = Annotated[int, runs("Number of processes; of several GPUs each takes its own.", min=1)]
Shard = Annotated[str | None, runs("I/N: only the I-th of N parts, for job arrays that share --out.")]
Device = Annotated[str | None, runs("cpu, cuda, cuda:1, mps ...; default: the first CUDA GPU, or the CPU.")]
Memory = Annotated[
    str | int | None,
    runs("Of a device, to be used at most: 24GB; default: what is free.", shell=str | None, show_default=False),
]
Strict = Annotated[bool, runs("Fail if an operation has no fast kernel here, instead of running slower.")]
Force = Annotated[bool, writes("Replace an earlier run of this command in the folder; other files stay.")]
Cluster = Annotated[str | None, runs("Address of a Dask scheduler: tcp://host:8786.")]


def declaration(hint: Any) -> tuple[Any, Option | None]:
    """Return the type of an annotation, and what it declares in a shell; None: it is Python's alone."""
    if get_origin(hint) is not Annotated:
        return hint, None
    kind, *more = get_args(hint)
    return kind, next((one for one in more if isinstance(one, Option)), None)


def kinds_of(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, but None; of another type itself."""
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return tuple(one for one in members if one is not NoneType)


# ---- checks


def check(name: str, hint: Any, value: Any) -> Any:
    """Return a value as its annotation declares it: numbers, True or False, words, texts, paths; another one as it is.

    Errors: WrongArgument for what is none, or out of its range.
    """
    kind, option = declaration(hint)
    if option is None or option.shell is not None:  # in Python it may be more, which only its command knows
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
    return value


class Checked:
    """A dataclass of options that are checked when it is made, and are then of the types that they declare."""

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # its subclasses are dataclasses
            object.__setattr__(self, field.name, check(field.name, field.type, getattr(self, field.name)))

    def only(self, kind: type[R]) -> R:
        """Return the options that a base class declares, as one of it."""
        return kind(**{field.name: getattr(self, field.name) for field in fields(kind)})  # type: ignore[arg-type]


class Command(Protocol[Made]):
    """A dataclass of options, and what is done with them."""

    def __call__(self) -> Made:
        """Do it; return what the function of the command returns."""


def function(command: Callable[P, Command[Made]]) -> Callable[P, Made]:
    """Return a command as a function of its options: types, names and defaults are those of its fields."""
    names = {name: name for name in inspect.signature(command).parameters}

    def run(*args: P.args, **kwargs: P.kwargs) -> Made:
        with _named(names):
            return command(*args, **kwargs)()

    run.__name__ = run.__qualname__ = name_of(command)
    run.__module__, run.__doc__ = command.__module__, _doc(command)
    signature = inspect.signature(command)
    made = inspect.signature(vars(command)["__call__"]).return_annotation
    run.__signature__ = _of_types(signature).replace(return_annotation=made)  # type: ignore[attr-defined]
    return run


def _of_types(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature as people read it: types without what they declare."""
    plain = [one.replace(annotation=declaration(one.annotation)[0]) for one in signature.parameters.values()]
    return signature.replace(parameters=plain)


def name_of(command: Any) -> str:
    """Return the name of a command: of the class `PackCommand`, or of the function `pack_in_shell`, pack."""
    name = str(command.__name__).removesuffix("_in_shell").removesuffix("Command")
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _doc(command: Any) -> str:
    """Write the docstring of a command's function: what it does, returns and raises, and its arguments."""
    parts = [inspect.getdoc(command) or "", inspect.getdoc(vars(command)["__call__"]) or "", "Arguments:"]
    told = ((field.name, declaration(field.type)[1]) for field in fields(command))
    return "\n\n".join(parts) + "".join(f"\n    {name}: {option.help}" for name, option in told if option)


def checked(**others: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator: what a function is given is checked at the call, as its annotations declare it.

    Errors that name options of the command line name its arguments.  others: options that are called otherwise there.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        """Return the function with checks."""
        signature = inspect.signature(function)
        names = {name: name for name in signature.parameters} | others
        hints = {name: one.annotation for name, one in signature.parameters.items() if declaration(one.annotation)[1]}

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with _named(names):
                given = signature.bind(*args, **kwargs)
                for name in given.arguments.keys() & hints.keys():
                    given.arguments[name] = check(name, hints[name], given.arguments[name])
                return function(*given.args, **given.kwargs)

        run.__signature__ = _of_types(signature)  # type: ignore[attr-defined]
        return run

    return decorated


@contextmanager
def _named(names: Mapping[str, str]) -> Iterator[None]:
    """Have errors that name options of the command line name arguments instead, within the context."""
    try:
        yield
    except UserError as error:
        error.args = (as_arguments(str(error), names), *error.args[1:])
        raise


def whole(name: str, value: Any, least: float | None = None, most: float | None = None) -> int:
    """Return a whole number, of at least `least` and at most `most`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        found = operator.index(value)
    except TypeError:
        raise WrongArgument(f"{given(name, shown(value))}: a whole number is needed") from None
    return _in_range(name, found, least, most)


def number(
    name: str, value: Any, least: float | None = None, most: float | None = None, above: float | None = None
) -> float:
    """Return a finite number, of at least `least`, at most `most` and more than `above`."""
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
    """Return True or False."""
    if not isinstance(value, bool):
        raise WrongArgument(f"{given(name, shown(value))}: True or False is needed")
    return value


def one_of(name: str, value: Any, known: Iterable[str]) -> str:
    """Return one of the known words."""
    known = list(known)
    if value not in known:
        raise WrongArgument(f"{given(name, shown(value))}: not one of {', '.join(known)}")
    return str(value)


def text(name: str, value: Any) -> str:
    """Return a text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise WrongArgument(f"{given(name, shown(value))}: a text is needed")
    return value


def progress_of(value: Any) -> Progress:
    """Return the function that is told of progress, or one that tells nobody."""
    if value is not None and not callable(value):
        raise WrongArgument(f"progress = {shown(value)}: a function of (done, total, what) is needed")
    return no_progress if value is None else value


def path(name: str, value: Any, store: bool = False) -> Path:
    """Return a path; an empty one would be the current folder.  store: it may be the address of a store."""
    if not isinstance(value, str | os.PathLike) or not str(value).strip():
        raise WrongArgument(f"{given(name, shown(value))}: a path is needed, text or pathlib.Path")
    if not store:
        refuse_addresses(name, value)
    return Path(value)


def refuse_addresses(name: str, value: Any) -> None:
    """Raise WrongArgument for an address, or NAME=ADDRESS, in place of a local path; value: one or a list."""
    for one in value if is_list(value) else [value]:
        text = os.fspath(one) if isinstance(one, str | os.PathLike) else ""
        if is_address(text) or is_address(text.partition("=")[2]):
            address = re.sub(r":/(?!/)", "://", text, count=1)
            raise WrongArgument(f"{given(name, address)}: is an address. Give a path of this machine.")


def path_or_none(name: str, value: Any) -> Path | None:
    """Return a path, or None where there is none."""
    return None if value is None else path(name, value)


def paths(name: str, value: Any) -> list[Path]:
    """Return the paths of a list, or the one path that was given instead of a list; None is an empty list."""
    if value is None:
        return []
    if isinstance(value, str | os.PathLike):
        return [path(name, value)]
    if not is_list(value):
        raise WrongArgument(f"{given(name, shown(value))}: a path or a list of paths is needed")
    return [path(f"{name}[{i}]", one) for i, one in enumerate(value)]


def queries(name: str, value: Any) -> list[str | Path]:
    """Return queries, of which text may be a path or a sequence itself, and a path object is a path."""
    found = paths(name, value)
    given = [value] if isinstance(value, str | os.PathLike) else value
    return [one if isinstance(one, str) else file for one, file in zip(given or [], found)]


def is_list(value: Any) -> bool:
    """Return whether this is a list: a sequence that is no text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def changes_of(name: str, value: Any) -> list[str]:
    """Return settings over those of a file as "KEY=VALUE", given so or as a mapping, {"train.steps": 5}."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [f"{text(f'a key of {name}', key)}={toml_value(plain(one))}" for key, one in value.items()]
    if not is_list(value):
        raise WrongArgument(f'{name} = {shown(value)}: a list or a mapping is needed, as in {{"train.steps": 500}}')
    return [text(f"{name}[{i}]", one) for i, one in enumerate(value)]


def shown(value: Any) -> str:
    """Return a value as a one-line error has it."""
    found = " ".join(repr(value).split())
    return found if len(found) <= 60 else f"{found[:60]} ..."
