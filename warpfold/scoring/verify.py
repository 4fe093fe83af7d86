"""Score what `predict` has made of a list of targets, beside what others have published (`warpfold verify`)."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.data.formats.alignment import as_row
from warpfold.data.formats.input_files import ALIGNMENTS, InputFile, find, read_query, stacking_order
from warpfold.errors import UserError
from warpfold.progress import Progress
from warpfold.scoring.bootstrap import interval
from warpfold.scoring.manifest import Manifest, Published, Truth
from warpfold.scoring.score import score_files

FORMAT = "warpfold-verify-1"
MEANS = ("lddt_ca", "lddt", "gdt_ts", "tm", "plddt")

Row = dict[str, Any]  # of a prediction


def alignments_of(truths: Sequence[Truth], paths: Sequence[Path]) -> dict[str, str]:
    """Return the SHA-256 of each target's alignment in files and folders, by name; of several files, of these joined.

    The files are unpacked, and joined in the order in which they are stacked.  Only the first row of one that belongs
    to no target is read.
    Errors: UserError for files that cannot be read.
    """
    files = find(paths, ALIGNMENTS, "alignments") if paths else []
    own: dict[str, list[InputFile]] = {}
    for file in sorted(files, key=lambda one: stacking_order(one.file)):
        if not file.is_hits:
            for sequence in read_query(file).split(":"):
                own.setdefault(sequence, []).append(file)
    found = {}
    for truth in truths:
        digest = hashlib.sha256()
        for file in (several := own.get(as_row(truth.chain.sequence), [])):
            digest.update(file.read_bytes())
        if several:
            found[truth.target.name] = digest.hexdigest()
    return found


def score_targets(
    folder: Path, summary: Mapping[str, Any], truths: Sequence[Truth], alignments: Mapping[str, str], progress: Progress
) -> tuple[list[Row], list[Row]]:
    """Score the predictions in a folder of `predict`, with its summary, against the truth.

    Residues correspond by their places in SEQRES, which is what was folded.  Returns a row for each prediction, and
    name and error of what could not be folded or scored.
    """
    named, total = {truth.target.name: truth for truth in truths}, len(summary["predictions"])
    rows, failures = list[Row](), [dict(one) for one in summary["failures"]]
    for done, entry in enumerate(summary["predictions"]):
        progress(done, total, f"scoring {entry['name']}")
        truth, path = named[entry["name"]], folder / entry["folder"] / entry["files"]["mmcif"]
        try:
            score = score_files(path, truth.structure, {"A": truth.target.chain})
            if np.isnan(score.lddt_ca):
                raise UserError("no two Ca of its structure are near enough to be scored")
        except UserError as error:
            failures.append({"name": entry["name"], "model": entry["model"], "error": str(error)})
            continue
        rows.append(
            {
                "target": entry["name"],
                "model": entry["model"],
                "seed": entry["seed"],
                "residues": entry["length"],
                "resolved": score.residues,
                "lddt_ca": score.lddt_ca,
                "lddt": score.lddt,
                "gdt_ts": score.gdt_ts,
                "tm": score.tm,
                "plddt": entry["mean_plddt"],
                "alignment_rows": entry["msa_given"],
                "templates": len(entry["templates"]),
                "released": None if truth.released is None else str(truth.released),
                "structure_sha256": truth.sha256,
                "prediction_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                "alignment_sha256": alignments.get(entry["name"]),
            }
        )
    return rows, failures


def report(manifest: Manifest, summary: Mapping[str, Any], rows: Sequence[Row], failures: Sequence[Any]) -> Row:
    """Return the means of each file of parameters with their intervals beside what was published, and all of it.

    summary: `predict`'s.  A target's mean over its seeds counts once.
    """
    return {
        "format": FORMAT,
        "manifest": {
            "file": manifest.path.name,
            "sha256": manifest.sha256,
            "title": manifest.title,
            "source": manifest.source,
            "targets": len(manifest.targets),
        },
        "published": vars(manifest.published),
        "models": [
            _mean_of(model, [row for row in rows if row["model"] == model["name"]], manifest)
            for model in summary["models"]
        ],
        "targets": list(rows),
        "failures": list(failures),
        **{key: summary[key] for key in ("settings", "msa_server", "warnings", "device", "versions")},
    }


def _mean_of(model: Mapping[str, Any], rows: Sequence[Row], manifest: Manifest) -> Row:
    by_target: dict[str, list[Row]] = {}
    for row in rows:
        by_target.setdefault(row["target"], []).append(row)

    def means(what: str) -> list[float]:
        """Return the mean of each target that has this score."""
        each = ([one[what] for one in own if one[what] is not None] for own in by_target.values())
        return [float(np.mean(one)) for one in each if one]

    known = {what: means(what) for what in MEANS}
    found: Row = {
        "name": model["name"],
        "file": model["file"],
        "sha256": model["sha256"],
        "scored": len(by_target),
        "without_alignment": len([own for own in by_target.values() if own[0]["alignment_rows"] < 2]),
        "with_templates": len([own for own in by_target.values() if own[0]["templates"]]),
        **{what: float(np.mean(values)) if values else None for what, values in known.items()},
        "interval": interval(known["lddt_ca"]),
        "published": manifest.published.lddt_ca.get(model["name"]),
    }
    return found | {"verdict": verdict(found, manifest.published, len(manifest.targets))}


def verdict(found: Mapping[str, Any], published: Published, targets: int) -> str:
    """Say how a mean stands to what was published, and what keeps the two from being compared."""
    if found["published"] is None:
        known = ", ".join(published.lddt_ca) or "none"
        return f"nothing to compare with: published of {known}, not of {found['name']}"
    said = f"published {found['published']:.4f}"
    if found["interval"] is None:
        said += ": too few targets for an interval"
    elif found["interval"][0] <= found["published"] <= found["interval"][1]:
        said += " lies within the interval"
    else:
        off = found["lddt_ca"] - found["published"]
        said += f" lies outside the interval: this mean is {abs(off):.4f} {'higher' if off > 0 else 'lower'}"
    but = []
    if found["scored"] < targets:
        but.append(f"{targets - found['scored']} of {targets} targets are not in this mean")
    if found["without_alignment"]:
        but.append(f"{found['without_alignment']} were folded without an alignment")
    return said + (f"; NOT comparable: {', '.join(but)}" if but else "")
