"""Tested versions of torch and Python.

Newer versions cause a notice instead of an error, so that WarpFold can be installed together with models that need
them.
"""

import platform
import re
from importlib.metadata import version

# The first and last versions of the matrix in docs/install.md. torch chooses the version of Triton.
TESTED = {"torch": ("2.11", "2.15"), "Python": ("3.11", "3.14")}


def newer_than_tested() -> str | None:
    """Describe which installed version is newer than the tested ones, with a remedy; None if none is.

    Does not import torch. Raises PackageNotFoundError if it is not installed.
    """
    installed = {"torch": version("torch"), "Python": platform.python_version()}
    newer = [
        f"{name} {installed[name]}" for name, (_, last) in TESTED.items() if _minor(installed[name]) > _minor(last)
    ]
    if not newer:
        return None
    return (
        f"newer than tested: {' and '.join(newer)}. WarpFold was tested with {_ranges()}. "
        "Check every operation with: warpfold doctor --kernels"
    )


def describe_versions() -> str:
    """Describe for `warpfold doctor` whether the installed versions were tested."""
    newer = newer_than_tested()
    return f"Tested: {_ranges()}, which includes these versions" if newer is None else f"N{newer[1:]}"


def _ranges() -> str:
    return ", ".join(f"{name} {first} to {last}" for name, (first, last) in TESTED.items())


def _minor(number: str) -> tuple[int, ...]:
    """Parse the first two numbers of a version, such as (2, 15) of "2.15.0a0+git"."""
    return tuple(map(int, re.findall(r"\d+", number)[:2]))
