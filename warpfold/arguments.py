"""Check what Python is given, at the call: each function returns the value, or raises a UserError that names it."""

import functools
import inspect
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from warpfold.bulk import JobPart
from warpfold.errors import UserError, as_arguments
from warpfold.progress import Progress, no_progress
from warpfold.settings import plain, toml_value

if TYPE_CHECKING:
    from warpfold.parallel.team import Team


class WrongArgument(UserError):
    """An argument of a wrong kind, which no other input would mend."""


P = ParamSpec("P")
R = TypeVar("R")
PathLike = str | os.PathLike[str]
Paths = PathLike | Sequence[PathLike]
Changes = Sequence[str] | Mapping[str, Any]  # of settings: ["train.steps=5"], {"train.steps": 5}


def names_arguments(**others: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator: errors that name options of the command line name the function's arguments instead.

    others: options that are called otherwise there.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        """Return the function with errors that name its arguments."""
        names = {name: name for name in inspect.signature(function).parameters} | others

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except UserError as error:
                error.args = (as_arguments(str(error), names), *error.args[1:])
                raise

        return called

    return decorated


def whole(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Return a whole number, of at least `least` and at most `most`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        found = operator.index(value)
    except TypeError:
        raise WrongArgument(f"{name} = {shown(value)}: a whole number is needed") from None
    if least is not None and found < least:
        raise WrongArgument(f"{name} = {found}: at least {least} is needed")
    if most is not None and found > most:
        raise WrongArgument(f"{name} = {found}: at most {most} is possible")
    return found


def whole_or_none(name: str, value: Any, least: int | None = None, most: int | None = None) -> int | None:
    """Return a whole number, or None where the default is meant."""
    return None if value is None else whole(name, value, least, most)


def number_or_none(name: str, value: Any, over: float | None = None) -> float | None:
    """Return a number, or None where the default is meant.  over: what it must be more than, and finite."""
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise WrongArgument(f"{name} = {shown(value)}: a number is needed")
    if over is not None and not over < float(value) < math.inf:
        raise WrongArgument(f"--{name.replace('_', '-')} {value:g}: a number over {over:g} is needed")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """Return True or False."""
    if not isinstance(value, bool):
        raise WrongArgument(f"{name} = {shown(value)}: True or False is needed")
    return value


def one_of(name: str, value: Any, known: Iterable[str]) -> str:
    """Return one of the known words."""
    known = list(known)
    if value not in known:
        raise WrongArgument(f"{name} = {shown(value)}: not one of {', '.join(known)}")
    return str(value)


def text(name: str, value: Any) -> str:
    """Return a text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise WrongArgument(f"{name} = {shown(value)}: a text is needed")
    return value


def text_or_none(name: str, value: Any) -> str | None:
    """Return a text, or None where the default is meant."""
    return None if value is None else text(name, value)


def team_of(value: Any) -> "Team":
    """Return the processes that share the work; None: this one alone."""
    from warpfold.parallel.team import Team

    if value is not None and not isinstance(value, Team):
        raise WrongArgument(f"team = {shown(value)}: a Team is needed, as in docs/parallel.md; none for one process")
    return value or Team()


def progress_of(value: Any) -> Progress:
    """Return what is told of progress, or what tells nobody."""
    if value is not None and not callable(value):
        raise WrongArgument(f"progress = {shown(value)}: a function of (done, total, what) is needed")
    return no_progress if value is None else value


def part_of(shard: Any) -> JobPart | None:
    """Return which part of several is meant by "I/N"; None for all.  Errors: UserError for anything else."""
    return None if shard is None else JobPart.parse(text("shard", shard))


def path(name: str, value: Any) -> Path:
    """Return a path; an empty one would be the current folder."""
    if not isinstance(value, str | os.PathLike) or not str(value).strip():
        raise WrongArgument(f"{name} = {shown(value)}: a path is needed, text or pathlib.Path")
    return Path(value)


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
        raise WrongArgument(f"{name} = {shown(value)}: a path or a list of paths is needed")
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


def device_of(value: Any, local_rank: int | None = None) -> str:
    """Return the device to run on; None: the first GPU, or the CPU.

    local_rank: which of several processes on a machine this is; each takes a GPU of its own.  On a CPU, the allocator
    keeps freed memory from now on: whatever folds or trains, from Python or the command line, asks here.
    Errors: UserError for one that torch does not know or this machine lacks.
    """
    import torch

    from warpfold.device import keep_memory

    if value is not None and not isinstance(value, str | torch.device):
        raise WrongArgument(f'device = {shown(value)}: a name is needed, such as "cpu" or "cuda:1"')
    name = ("cuda" if torch.cuda.is_available() else "cpu") if value is None else str(value)
    if name == "cuda" and local_rank is not None:
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"process {local_rank} of this machine needs a GPU of its own, but there are "
                f"{torch.cuda.device_count()}; start no more processes than GPUs (Slurm: --gpus-per-node, not "
                "--gpus-per-task), or run with --device cpu"
            )
        name = f"cuda:{local_rank}"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: {_device_cure(name)}") from error
    if name == "cpu":
        keep_memory()
    return name


def _device_cure(name: str) -> str:
    """Return why there is no such device, and what to give."""
    import torch

    if not re.fullmatch(r"cuda(:\d+)?", name):
        return "not known; give cpu, cuda, or cuda:1 and so on (the model of a GPU is for `warpfold plan` alone)"
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} was built without CUDA; give cpu, or install another build (docs/install.md)"
    count = torch.cuda.device_count()
    if not count:
        return "torch finds no GPU here; give cpu, or look at what nvidia-smi says"
    return f"there is none such here; give cpu, or one of {', '.join(f'cuda:{i}' for i in range(count))}"


def shown(value: Any) -> str:
    """Return a value as a one-line error has it."""
    found = " ".join(repr(value).split())
    return found if len(found) <= 60 else f"{found[:60]} ..."
