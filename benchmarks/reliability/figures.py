"""The JSON that every runner prints and keeps."""

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


def keep(command: str, doc: str, arguments: Sequence[str], found: Mapping[str, Any], to: Path | None) -> None:
    """Print the results of a command with its arguments and the machine, and write them to a file if requested.

    doc: the docstring of the runner. Its first line is the title.
    """
    figures = {
        "what": doc.splitlines()[0],
        "command": f"python -m benchmarks.reliability {command} {' '.join(arguments)}".strip(),
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[2]:.0f}",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        **found,
    }
    text = json.dumps(figures, indent=1)
    print(text)
    if to is not None:
        to.write_text(text + "\n", encoding="utf-8")
