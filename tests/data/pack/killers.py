"""Run jobs that kill their process, in a module that workers can import."""

import os
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warpfold.data.formats.input_files import InputFile
    from warpfold.data.pack.build import BuildJob, BuiltChains, ReadChains
    from warpfold.data.pack.options import PackOptions


def _die_of(name: str, word: str) -> None:
    if word in name:
        os.kill(os.getpid(), signal.SIGKILL)


def upper(names: list[str]) -> list[str]:
    """Return the names in capitals. The name `kill` kills the process."""
    for name in names:
        _die_of(name, "kill")
    return [name.upper() for name in names]


def read_chains(job: "tuple[InputFile, PackOptions]") -> "ReadChains":
    """Read chains, but die when a file is called `readkill`."""
    from warpfold.data.pack import build as pack_build

    _die_of(job[0].name, "readkill")
    return pack_build.read_chains(job)


def build(job: "BuildJob") -> "BuiltChains":
    """Build entries, but die when a file is called `buildkill`."""
    from warpfold.data.pack import build as pack_build

    _die_of(job.file.name, "buildkill")
    return pack_build.build(job)


def read_queries(job: "tuple[Sequence[InputFile], int]") -> list[tuple[str, str]]:
    """Read queries, but die when a file is called `querykill`."""
    from warpfold.data.pack import build as pack_build

    for source in job[0]:
        _die_of(source.name, "querykill")
    return pack_build.read_queries(job)


class Here:
    """Run jobs of `bulk.IsolatedProcess` in this process, which is quicker. No job may kill it."""

    def start(self, function: Callable[..., Any]) -> None:
        pass

    def __call__(self, function: Callable[[Any], Any], job: Any) -> Any:
        return function(job)

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *_: object) -> None:
        pass
