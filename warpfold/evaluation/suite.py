"""Read and write suites: lists of targets to evaluate, with the required properties of their files.

title = "CAMEO, a week"
source = "https://..."  # where the list comes from

[targets]
7abc_A = {}
T1024 = {released = 2021-10-20, sha256 = "9f86...", chains = ["A"]}
"""

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from warpfold.errors import UserError
from warpfold.files import read_file
from warpfold.settings import build, toml_value

# The suites that come with WarpFold, by name.
BUNDLED_SUITES = {file.stem: file for file in Path(__file__).parent.glob("*.toml")}


@dataclass(frozen=True)
class Entry:
    """Required properties of a target's file: release date, SHA-256 of the unpacked file, and the chains to score.

    None or an empty tuple accepts any value.
    """

    released: date | None = None
    sha256: str | None = None
    chains: tuple[str, ...] = ()


@dataclass(frozen=True)
class _SuiteFile:
    """The content of a suite's TOML file."""

    title: str = ""
    source: str = ""
    targets: dict[str, Entry] = field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    """Targets by name. sha256: the hash of the suite's own file."""

    path: Path
    sha256: str
    title: str
    source: str
    targets: dict[str, Entry]


def read_suite(path: Path) -> Suite:
    """Read a suite from a TOML file, or a bundled suite by its name.

    Raises UserError for a file that is not a suite, an empty list, and two names that differ only in case.
    """
    if not path.exists() and str(path) in BUNDLED_SUITES:
        path = BUNDLED_SUITES[str(path)]
    data = read_file(path)
    try:
        values = tomllib.loads(data.decode())
    # A RecursionError comes from nested brackets, a ValueError from invalid TOML or UTF-8.
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from error
    content = build(_SuiteFile, values, str(path))
    if not content.targets:
        raise UserError(f"{path}: has no targets. Name them under [targets], one per line: 7abc_A = {{}}")
    names: dict[str, str] = {}
    for name in content.targets:
        # Predictions are in folders, and some file systems do not distinguish A from a.
        if (other := names.setdefault(name.lower(), name)) != name:
            raise UserError(f"{path}: {name} and {other} differ only in case. Keep one of them")
    return Suite(path, hashlib.sha256(data).hexdigest(), content.title, content.source, content.targets)


def write_suite(title: str, targets: Mapping[str, Entry]) -> str:
    """Write targets in the format that `read_suite` reads."""
    lines = [f"title = {toml_value(title)}", 'source = ""', "", "[targets]"]
    for name, entry in targets.items():
        values = {"released": entry.released, "sha256": entry.sha256, "chains": entry.chains}
        lines.append(toml_value({name: {key: value for key, value in values.items() if value}})[1:-1])
    return "\n".join(lines) + "\n"
