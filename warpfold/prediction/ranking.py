"""Rank the predictions of each query, where several models and seeds folded it, and copy them by rank."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from warpfold.files import file_name, write_atomically

Entry = dict[str, Any]  # of a prediction, as summary.json has it


def rank_predictions(entries: Sequence[Entry]) -> tuple[list[Entry], dict[str, Any]]:
    """Return the entries with their ranks, each query's best first, and the ranking of each query.

    Complexes are ranked by 0.8 ipTM + 0.2 pTM (AlphaFold-Multimer, sec. 2.6), others by mean pLDDT, as are complexes
    of which a model without the PAE head folded some.  Queries keep their order.
    """
    ranked: list[Entry] = []
    ranking = {}
    by_name: dict[str, list[Entry]] = {}
    for entry in entries:
        by_name.setdefault(entry["name"], []).append(entry)
    for name, own in by_name.items():
        by_tm = all(entry.get("iptm") is not None for entry in own)
        if not by_tm:
            own = [entry | {"ranking_confidence": entry["mean_plddt"]} for entry in own]
        own = sorted(own, key=lambda entry: (-entry["ranking_confidence"], entry["model"], entry["seed"]))
        own = [entry | {"rank": rank} for rank, entry in enumerate(own, 1)]
        ranked += own
        kept = ("rank", "ranking_confidence", "model", "seed", "folder")
        order = [{key: entry[key] for key in kept} for entry in own]
        ranking[name] = {"by": "0.8 ipTM + 0.2 pTM" if by_tm else "mean pLDDT", "order": order}
    return ranked, ranking


def copy_by_rank(out: Path, entries: Sequence[Entry]) -> list[Entry]:
    """Write a copy of each ranked structure, OUT/NAME/NAME_rank_1.cif and so on; return the entries naming them.

    So with its scores, NAME_rank_1_scores.json: ChimeraX takes the JSON file that shares most of a structure's name
    for its PAE.  Earlier copies are replaced, and deleted where there is nothing to copy any more.
    """
    found = []
    for entry in entries:
        folder = Path(file_name(entry["name"]))
        copies = {}
        for kind, ending in (("mmcif", ".cif"), ("pdb", ".pdb"), ("scores", "_scores.json")):
            if kind not in entry["files"]:
                continue
            source = out / entry["folder"] / entry["files"][kind]
            copy = folder / f"{folder}_rank_{entry['rank']}{ending}"
            write_atomically(out / copy, source.read_text(encoding="utf-8"))
            copies[kind] = str(copy)
        found.append(entry | {"ranked": copies})
    now = {copy for entry in found for copy in entry["ranked"].values()}
    for entry in entries:  # of an earlier summary, perhaps before predictions were thinned
        stale = {kind: copy for kind, copy in entry.get("ranked", {}).items() if copy not in now}
        remove_copies(out, entry | {"ranked": stale})
    return found


def remove_copies(out: Path, entry: Entry) -> None:
    """Delete the copies that a summary's entry names, and their folder if nothing else is in it."""
    for copy in map(Path, entry.get("ranked", {}).values()):
        folder, safe = out / file_name(entry["name"]), [file_name(part) for part in copy.parts]
        if safe == list(copy.parts) and (out / copy).parent == folder and not folder.is_symlink():
            with contextlib.suppress(OSError):  # it is not there, or other files are in the folder
                (out / copy).unlink(missing_ok=True)
                folder.rmdir()
