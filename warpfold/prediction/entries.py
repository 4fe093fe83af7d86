"""An entry of the summary: a prediction's checks, its files, where its chains meet; and the ranks of several."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.data.example.templates import TemplateOutcome, count_refusals
from warpfold.errors import UserError
from warpfold.files import file_name, write_atomically
from warpfold.prediction.notices import Notice
from warpfold.prediction.outputs import PassStructure, Prediction, checksums_of, refuse_links
from warpfold.prediction.sanity import check_geometry, confidence_notices
from warpfold.scoring.dockq import CONTACT, residue_pairs

NEAR = 8.0  # angstrom: residues whose heavy atoms are nearer to another chain than this belong to the interface

Entry = dict[str, Any]  # of a prediction, as summary.json has it


def write_prediction(
    prediction: Prediction, out: Path, below: str = "", notices: Sequence[Notice] = ()
) -> dict[str, Any]:
    """Check a prediction's geometry, write it into its own folder in `out`, and return its entry in the summary.

    below: the folder in that of the protein, where it has several predictions.  notices: what else is to be said.
    """
    outcomes = [TemplateOutcome(**outcome) for outcome in prediction.templates]
    details = dict(prediction.details)
    chains, lost = _of_complex(prediction, details.pop("chain_depths", {})), details.pop("warnings", ())
    geometry = check_geometry(prediction.positions, prediction.mask, prediction.asym_id)
    doubts = confidence_notices(prediction.plddt, prediction.ptm, prediction.iptm)
    folder = f"{file_name(prediction.name)}/{below}".rstrip("/")
    refuse_links(out, folder)
    files = prediction.save(out / folder, overwrite=True)  # the earlier run was killed, or is replaced with --force
    return {
        "name": prediction.name,
        "folder": folder,
        "files": files,
        "checksums": checksums_of(out / folder, files),
        "length": len(prediction.sequence),
        "sequence": ":".join(prediction.sequence[span] for span in prediction.spans.values()),
        "mean_plddt": round(prediction.mean_plddt, 2),
        "ptm": None if prediction.ptm is None else round(prediction.ptm, 4),
        **chains,
        "ranking_confidence": round(prediction.ranking_confidence, 6),
        **details,
        **({"recycled": [_of_pass(one) for one in prediction.recycled]} if prediction.recycled else {}),
        "templates_unused": sum(not outcome.used for outcome in outcomes),
        "templates_refused": count_refusals(outcomes),
        "templates_missing": sum(outcome.missing for outcome in outcomes),
        "geometry": asdict(geometry),
        "warnings": [
            *(notice.record() for notice in notices),
            *lost,
            *(notice.record() for notice in (*_unknown(prediction), *_without_pdb(prediction, files))),
            *(notice.record() for notice in (*geometry.notices(), *doubts)),
        ],
    }


def _of_pass(found: PassStructure) -> dict[str, Any]:
    """Return what the summary has of a pass before the last."""
    scores = {name: None if one is None else round(one, 4) for name, one in (("ptm", found.ptm), ("iptm", found.iptm))}
    return {"mean_plddt": round(float(found.plddt.mean()), 2), **scores}


def _of_complex(prediction: Prediction, depths: Mapping[str, int]) -> dict[str, Any]:
    """Return what the summary has of complexes alone.  depths: rows of each chain's alignment."""
    if prediction.asym_id is None:
        return {}
    pairs = prediction.chain_pair_iptm
    ptm = [None] * len(prediction.spans) if pairs is None else pairs.diagonal().astype(float).round(4).tolist()
    return {
        "iptm": None if prediction.iptm is None else round(prediction.iptm, 4),
        "chains": [
            {
                "id": chain,
                "length": span.stop - span.start,
                "mean_plddt": round(float(prediction.plddt[span].mean()), 2),
                "ptm": one,
                "msa_depth": depths.get(chain),
            }
            for (chain, span), one in zip(prediction.spans.items(), ptm)
        ],
        "chain_pair_iptm": None if pairs is None else np.round(pairs.astype(float), 4).tolist(),
        "interfaces": [
            {
                "chains": list(one.chains),
                "iptm": None if one.iptm is None else round(one.iptm, 4),
                "plddt": round(one.plddt, 2),
                "contacts": one.contacts,
            }
            for one in find_interfaces(prediction)
        ],
    }


def _unknown(prediction: Prediction) -> list[Notice]:
    """Return a notice of residues that are X, if there are any: they have no atoms."""
    several = prediction.asym_id is not None
    places = [
        f"{chain} {place}" if several else str(place)
        for chain, span in prediction.spans.items()
        for place, letter in enumerate(prediction.sequence[span], 1)
        if letter == "X"
    ]
    some = ", ".join(places[:5]) + (" ..." if len(places) > 5 else "")
    return [Notice("unknown_residues", {"count": len(places), "detail": f"X at {some}"})] if places else []


def _without_pdb(prediction: Prediction, files: Mapping[str, str]) -> list[Notice]:
    """Return why there is no PDB file, if there is none."""
    if "pdb" in files:
        return []
    try:
        prediction.pdb()
    except UserError as error:
        why = str(error).removeprefix(prediction.name + ": ").removesuffix("; write mmCIF")
        return [Notice("no_pdb", {"why": why})]
    return []


@dataclass(frozen=True)
class Interface:
    """Two chains in contact: some of their residues have heavy atoms nearer than 5 angstrom to each other."""

    chains: tuple[str, str]
    contacts: int  # pairs of such residues
    plddt: float  # the mean of all residues with a heavy atom nearer than 8 angstrom to the other chain, 0 to 100
    iptm: float | None  # of these two chains alone, 0 to 1; None without the PAE head


def find_interfaces(prediction: Prediction) -> list[Interface]:
    """Return the interfaces of a complex, in the order of its chains; a single chain has none."""
    chains, spans, pairs = prediction.chains(), list(prediction.spans.values()), prediction.chain_pair_iptm
    found = []
    for (i, one), (j, other) in combinations(enumerate(chains), 2):
        near = residue_pairs(one, other, one.mask > 0, other.mask > 0, NEAR)
        if contacts := len(near.within(CONTACT)):
            plddt = [prediction.plddt[spans[k]][np.unique(near.indices[:, side])] for side, k in enumerate((i, j))]
            iptm = None if pairs is None else float(pairs[i, j])
            found.append(Interface((one.id, other.id), contacts, float(np.concatenate(plddt).mean()), iptm))
    return found


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
