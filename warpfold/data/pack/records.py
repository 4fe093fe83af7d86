"""What lies beside others' arrays of structures: the experiments of a whole set, in one JSON.

Boltz's manifest.json is a list of records, {"id": "1abc", "structure": {"resolution": 2.0, "method": "x-ray
diffraction", "released": "1998-04-08", ...}, "chains": ...} (`Record` in its data/types.py).  OpenFold3's metadata.json
and caches of datasets have {"structure_data": {"1abc": {"release_date": "1998-04-08", "resolution": 2.0, "chains": ...
(openfold3/core/data/primitives/caches/format.py).  They have up to 1.7 GB, of which these few fields are found without
parsing the rest.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from warpfold.data.formats.input_files import PROCESSED, InputFile, find
from warpfold.data.structure.chain import parse_date
from warpfold.data.structure.npz import entry_name
from warpfold.errors import UserError
from warpfold.files import opened

_PLACES = ("manifest.json", "metadata.json", "dataset_caches/*.json")  # in the folders above the structures' own
_ABOVE = slice(1, 5)  # of a file's folders: Boltz's is above structures/, OpenFold3's up to four above ID/
# Both begin with plain text, which `re` finds at hundreds of megabytes a second.
_BOLTZ = re.compile(rb'"id":\s*"(?P<entry>[^"\\]+)",\s*"structure":\s*(?P<values>\{[^{}]*)\}')
_OPENFOLD3 = re.compile(rb'":\s*(?P<values>\{\s*"(?:release_date|status)":[^{}]*?),\s*"chains":')  # after the entry
_LONGEST = 4096  # bytes of a record's begin
_PIECE = 1 << 24


@dataclass(frozen=True)
class Experiment:
    """What `Structure` says of an experiment."""

    method: str | None
    resolution: float | None
    release_date: date | None


def find_experiments(structures: Sequence[InputFile]) -> tuple[dict[str, Experiment], list[InputFile]]:
    """Return what is known of the experiments, by names of structures' files, and the files that say it.

    Errors: UserError for one that is cut short, or whose records hold something else.
    """
    arrays: dict[str, list[InputFile]] = {}  # by entry
    for one in structures:
        if one.path.name.removesuffix(".gz").endswith(PROCESSED):
            arrays.setdefault(entry_name(str(one.path)), []).append(one)
    folders = {folder for each in arrays.values() for one in each for folder in one.path.parents[_ABOVE]}
    paths = sorted({path for folder in folders for place in _PLACES for path in folder.glob(place)})
    found: dict[str, Experiment] = {}
    for path in paths:
        for entry, text in _records(path):
            for one in arrays.get(entry, ()):
                if one.path.is_relative_to(path.parent if path.parent.name != "dataset_caches" else path.parent.parent):
                    found[one.name] = _experiment(path, entry, text)
    return found, find(paths, (), "records") if paths else []


def _records(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield each entry of a file and the JSON of its experiment."""
    rest, piece = b"", b""
    with opened(path) as file:
        while piece := file.read(_PIECE):
            text, end = rest + piece, 0
            for found in (*_BOLTZ.finditer(text), *_OPENFOLD3.finditer(text)):
                end = max(end, found.end())
                before = text.rfind(b'"', 0, found.start()) + 1
                entry = found["entry"] if found.re is _BOLTZ else text[before : found.start()]
                yield entry.decode(errors="replace"), found["values"] + b"}"
            rest = text[max(end, len(text) - _LONGEST) :]
    if not rest.rstrip().endswith((b"]", b"}")):
        raise UserError(f"{path}: is cut short, or no JSON; fetch it again, or move it away")


def _experiment(path: Path, entry: str, text: bytes) -> Experiment:
    try:
        values = json.loads(text)
        released = values.get("released") or values.get("release_date")
        method = values.get("method") or values.get("experimental_method")
        resolution = float(values.get("resolution") or 0)  # 0 and NaN: not known
        return Experiment(
            "; ".join(one.strip().upper() for one in method.split(",")) if method else None,
            resolution if 0 < resolution < float("inf") else None,
            parse_date(released),
        )
    except (ValueError, TypeError, AttributeError):
        raise UserError(f"{path}: its record of {entry} is damaged; fetch it again, or move it away") from None
