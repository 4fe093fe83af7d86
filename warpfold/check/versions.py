"""Which versions were tested.  Newer ones are taken, and said once: a refusal would keep WarpFold from being installed
beside models that want them.
"""

import platform
import re
from importlib.metadata import version

# The ends of the matrix in docs/install.md; Triton is torch's own choice.
TESTED = {"torch": ("2.11", "2.15"), "Python": ("3.11", "3.14")}


def newer_than_tested() -> str | None:
    """Say in a sentence which version here is newer than those tested, with the cure; None where none is.

    torch is not loaded.  Errors: PackageNotFoundError where it is not installed.
    """
    here = {"torch": version("torch"), "Python": platform.python_version()}
    newer = [f"{name} {here[name]}" for name, (_, last) in TESTED.items() if _minor(here[name]) > _minor(last)]
    if not newer:
        return None
    return (
        f"newer than tested: {' and '.join(newer)}, where WarpFold was tested with {_ranges()}; "
        "warpfold doctor --kernels checks every operation here"
    )


def of_versions() -> str:
    """Say for `warpfold doctor` whether the versions here are within those tested."""
    newer = newer_than_tested()
    return f"Tested: with {_ranges()}, which these versions are within" if newer is None else f"N{newer[1:]}"


def _ranges() -> str:
    return ", ".join(f"{name} {first} to {last}" for name, (first, last) in TESTED.items())


def _minor(number: str) -> tuple[int, ...]:
    """ "2.15.0a0+git" -> (2, 15)."""
    return tuple(map(int, re.findall(r"\d+", number)[:2]))
