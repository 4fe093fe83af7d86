"""Check an output folder by its `summary.json`, and write this file.  Imports neither torch nor NumPy."""

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from warpfold.errors import UserError
from warpfold.files import sealed, write_atomically

RECORDS = "records"  # the folder of the records of a run of `predict`


def check_folder(folder: Path) -> None:
    """Raise UserError if the output folder, or one above it, is a file."""
    for place in (folder, *folder.parents):
        if place.exists():
            if not place.is_dir():
                raise UserError(f"{place}: is a file; name a folder for the output")
            return


def claim_folder(folder: Path, kind: str, run: str, force: bool = False) -> dict[str, Any] | None:
    """Check that a run may write to an output folder; return the summary in it, or None for a new or empty folder.

    kind: the summary's "format".  run: the digest of the run's inputs.  force: accept a folder of another run of that
    kind.  Nothing is written.
    Errors: UserError for a file of that name, and for a folder that holds something else.
    """
    check_folder(folder)
    # A run that is killed at once leaves drafts of `write_atomically`, the records, or answers of a server.
    first = (".summary.json.", RECORDS, "alignments")
    if not folder.is_dir() or all(f.name in first or f.name.startswith(first[0]) for f in folder.iterdir()):
        return None
    try:
        found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("format") != kind:
        raise UserError(
            f"{folder}: holds something else, or a summary.json that is damaged, and is left alone; name a new or an "
            "empty folder"
        )
    if found != sealed(found):
        if not force:
            raise UserError(
                f"{folder / 'summary.json'}: does not fit its checksum: it was changed or damaged, or another version "
                "of WarpFold wrote it; put a copy back, name a new folder, or have everything done again with --force"
            )
        return {"format": kind}
    if found.get("run") != run and not force:
        raise UserError(f"{folder}: holds the output of another run; name a new folder, or replace it with --force")
    return found


def put_aside(folder: Path, parts: Sequence[str]) -> None:
    """Move the results of an earlier run into FOLDER/earlier-N, as users may have added files of their own."""
    present = [folder / name for name in parts if os.path.lexists(folder / name)]
    if present:
        backup = next(path for n in count(1) if not os.path.lexists(path := folder / f"earlier-{n}"))
        backup.mkdir()
        for path in present:
            path.rename(backup / path.name)


def write_summary(folder: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Write `summary.json`, by which `claim_folder` recognizes a folder, and create the folder if it is missing.

    Returns the summary with its checksum.
    Errors: UserError if it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made: {error.strerror}; name another folder") from error
    summary = sealed(summary)
    # In pieces, since the text of many predictions takes more memory than the summary.
    pieces = json.JSONEncoder(indent=2).iterencode(summary)
    write_atomically(folder / "summary.json", itertools.chain(pieces, "\n"))
    return summary
