"""Claim an output folder by its `summary.json`, and write this file.  Imports neither torch nor NumPy."""

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
    """Raise UserError for a file where a folder for the output is to be, or one above it."""
    for place in (folder, *folder.parents):
        if place.exists():
            if not place.is_dir():
                raise UserError(f"{place}: is a file; name a folder for the output")
            return


def claim_folder(folder: Path, kind: str, run: str, force: bool = False) -> dict[str, Any] | None:
    """Check that an output folder is ours to write: return None for a new or empty one, else the summary in it.

    `kind` is the summary's "format", `run` the digest of a run's inputs.  With `force`, a folder of another run of
    that kind is accepted.  Nothing is written.
    Errors: UserError for a file in its place, or for a folder that holds something else.
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
    """Move what an earlier run has made into FOLDER/earlier-N: somebody may have put files of their own into it."""
    made = [folder / name for name in parts if os.path.lexists(folder / name)]
    if made:
        aside = next(path for n in count(1) if not os.path.lexists(path := folder / f"earlier-{n}"))
        aside.mkdir()
        for path in made:
            path.rename(aside / path.name)


def write_summary(folder: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Write `summary.json`, by which `claim_folder` recognizes a folder, and make the folder where it is missing.

    Returns what is in it: the summary, with its checksum.

    Errors: UserError when it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made: {error.strerror}; name another folder") from error
    summary = sealed(summary)
    pieces = json.JSONEncoder(indent=2).iterencode(summary)  # of many predictions the text is longer than they are
    write_atomically(folder / "summary.json", itertools.chain(pieces, "\n"))
    return summary
