"""The output folder of `warpfold search`, which holds nothing else."""

import json
from pathlib import Path

from warpfold.errors import UserError

REPORT_FORMAT = "warpfold-search-1"


def check_output(out: Path) -> None:
    """Raise UserError if the output folder holds other files than a search's."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; name a folder for the output")
    names = {path.name for path in out.iterdir() if not path.name.startswith(".")} if out.is_dir() else set()
    if names - {"cache"} and not any(map(_is_report, out.glob("search*.json"))):
        raise UserError(f"{out}: holds something else, which is left alone; name a new or an empty folder")


def _is_report(path: Path) -> bool:
    """Return whether this is the report of a search, and not another file of that name."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("format") == REPORT_FORMAT
