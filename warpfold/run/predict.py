"""Fold many sequences with one resident model, into a folder that is never half-written (docs/outputs.md)."""

import hashlib
import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from warpfold import __version__
from warpfold.data.example.raw_example import Templates
from warpfold.data.example.templates import TemplateOutcome, count_refusals
from warpfold.data.formats.alignment import Alignment, decode, encode, merge
from warpfold.data.formats.input_files import stacking_order
from warpfold.data.formats.sequences import read_alignment, read_proteins
from warpfold.errors import UserError
from warpfold.files import file_name, is_given_pipe, opened
from warpfold.model.weights import assumed_settings
from warpfold.ops.dispatch import Kernels, refusals
from warpfold.parallel.team import Team
from warpfold.progress import Progress, no_progress
from warpfold.run.outputs import Prediction, claim_folder, remove_prediction, write_summary
from warpfold.run.predict_templates import TemplateSources, find_templates
from warpfold.run.predictor import Predictor, load
from warpfold.run.report import prediction_report, write_report
from warpfold.run.sanity import check_geometry

FORMAT = "warpfold-predictions-1"
ALIGNMENT_ENDINGS = (".a3m", ".a2m", ".sto", ".stk", ".stockholm", ".aln")

# What may fail for one protein while the others go on: numbers, memory (torch.OutOfMemoryError is a RuntimeError).
FAILURES = (UserError, RuntimeError, MemoryError, ArithmeticError, ValueError)


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """How to fold.  Whatever changes the result is part of the run's identity; device, chunk and kernels are not."""

    seed: int = 0
    recycles: int | None = None  # None: the model's own
    ensemble: int | None = None
    max_msa: int | None = None  # rows of the clustered and of the extra alignment; None: as the parameters were trained
    max_extra: int | None = None
    device: str | None = None  # None: the first GPU, or the CPU
    chunk: int | None = None  # rows computed at a time; None: what fits, 0: all
    precision: Literal["fp32", "bf16"] = "fp32"
    kernels: Kernels = "fast"  # as Plan.kernels
    representations: bool = False  # keep them in the .npz
    force: bool = False


def predict(
    query: Path,
    msas: Sequence[Path],
    params: Path,
    out: Path,
    options: PredictOptions | None = None,
    progress: Progress | None = None,
    templates: TemplateSources | None = None,
    team: Team | None = None,
) -> dict[str, Any]:
    """Fold every record of `query` into `out`; return what is in `out/summary.json`.

    A protein that fails is named under "failures" and the others go on.  A run that was stopped continues: what is
    done is kept.  team: processes that share each protein; all call this, and rank 0 writes.  An error on one of them,
    other than bad input, ends the run.
    Errors: UserError for bad input (then nothing is written), or an `out` that holds something else.
    """
    options = options or PredictOptions()
    tell = progress or no_progress
    start, refused_before = time.perf_counter(), refusals()
    team = team or Team()
    if team.process.ranks > 1 and (pipes := list(filter(is_given_pipe, (query, *msas)))):
        raise UserError(f"{pipes[0]}: is a pipe, which several processes cannot share; give a regular file")
    queries = read_queries(query, msas)
    tell(0, len(queries), "loading the parameters")
    with opened(params, unpack=False) as file:
        params_digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # it has readinto
    predictor = load(params, options.device, options.chunk, options.precision, team=team, kernels=options.kernels)
    given: dict[str, Any] = {"max_msa": options.max_msa, "max_extra": options.max_extra}
    predictor.sample = replace(predictor.sample, **{name: most for name, most in given.items() if most is not None})
    if templates:
        tell(0, len(queries), "looking at the templates")
        queries = with_templates(queries, templates, predictor)
    run = _run_digest(queries, params_digest, _settings(options, predictor))
    summary = None
    if team.is_rank_zero:
        summary = _new_summary(run, params, params_digest, options, predictor)
        _begin(out, summary, options.force)
    summary = team.all_gather_object(summary, "the beginning of the run")[0]
    done = {entry["name"] for entry in summary["predictions"]}
    # If one rank fails in the middle of a protein, the others wait for it: the run cannot go on.
    failures = FAILURES if team.process.ranks == 1 else UserError
    for index, one in enumerate(queries):
        tell(index, len(queries), one.name)
        if one.name in done:
            continue
        try:
            entry = fold_one(predictor, one, out, options)
            summary["predictions"] += [entry] if entry else []
        except failures as error:
            summary["failures"].append({"name": one.name, "error": _one_line(error)})
        if team.is_rank_zero:
            write_summary(out, summary)
    tell(len(queries), len(queries), "writing the report")
    summary["status"] = "failed" if summary["failures"] else "complete"
    summary |= {"seconds": round(time.perf_counter() - start, 3), "refused": refusals(refused_before)}
    if team.is_rank_zero:
        write_report(out / "report.html", prediction_report(out, summary))
        write_summary(out, summary)
    return team.all_gather_object(summary, "the end of the run")[0]


def fold_one(predictor: Predictor, query: FoldQuery, out: Path, options: PredictOptions) -> dict[str, Any] | None:
    """Fold one protein and write its folder; return its entry in the summary, or None where another rank writes."""
    prediction = predictor.fold(
        query.sequence,
        query.alignment,
        query.templates,
        name=query.name,
        seed=options.seed,
        recycles=options.recycles,
        ensemble=options.ensemble,
        representations=options.representations,
    )
    if not predictor.team.is_rank_zero:
        return None
    return keep(replace(prediction, templates=[asdict(outcome) for outcome in query.outcomes]), out)


def keep(prediction: Prediction, out: Path) -> dict[str, Any]:
    """Check a prediction's geometry, write it into its own folder in `out`, and return its entry in the summary."""
    outcomes = [TemplateOutcome(**outcome) for outcome in prediction.templates]
    geometry = check_geometry(prediction.positions, prediction.mask)
    folder = file_name(prediction.name)
    files = prediction.save(out / folder, overwrite=True)  # the earlier run was killed, or is replaced with --force
    return {
        "name": prediction.name,
        "folder": folder,
        "files": files,
        "length": len(prediction.sequence),
        "sequence": prediction.sequence,
        "mean_plddt": round(prediction.mean_plddt, 2),
        "ptm": None if prediction.ptm is None else round(prediction.ptm, 4),
        **prediction.details,
        "templates_unused": sum(not outcome.used for outcome in outcomes),
        "templates_refused": count_refusals(outcomes),
        "templates_missing": sum(outcome.missing for outcome in outcomes),
        "geometry": asdict(geometry),
        "warnings": [*_unknown(prediction.sequence), *geometry.warnings()],
    }


def _unknown(sequence: str) -> list[str]:
    """Return a sentence about residues that are X, if there are any: they have no atoms."""
    places = [str(place) for place, letter in enumerate(sequence, 1) if letter == "X"]
    if not places:
        return []
    what = "1 residue is" if len(places) == 1 else f"{len(places)} residues are"
    some = ", ".join(places[:5]) + (" ..." if len(places) > 5 else "")
    return [f"{what} not one of the twenty amino acids (X at {some}), so without atoms; write C for U to get cysteine"]


def _new_summary(run: str, params: Path, digest: str, options: PredictOptions, predictor: Predictor) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "status": "running",
        "run": run,
        "params": {"file": params.name, "sha256": digest, "assumed": assumed_settings(params)},
        "settings": _settings(options, predictor),
        "device": str(predictor.device),
        "versions": {"warpfold": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "predictions": [],
        "failures": [],
        "refused": {},  # why fast operations were not used, and how often
        "seconds": 0.0,
    }


def _settings(options: PredictOptions, predictor: Predictor) -> dict[str, Any]:
    """Return what decides the result, beside parameters and queries, as it was in the end."""
    model, sample = predictor.model.config, predictor.sample
    return {
        "seed": options.seed,
        "recycles": model.recycles if options.recycles is None else options.recycles,
        "ensemble": model.ensemble if options.ensemble is None else options.ensemble,
        "max_msa": sample.max_msa,
        "max_extra": sample.max_extra,
        "precision": options.precision,
        "representations": options.representations,
    }


def _run_digest(queries: Sequence[FoldQuery], params_digest: str, settings: Mapping[str, Any]) -> str:
    """Return a digest of everything that decides the result."""
    digest = hashlib.sha256(json.dumps([params_digest, settings]).encode())
    for query in queries:
        digest.update(f"{query.name}\n{query.sequence}\n".encode())
        digest.update(query.alignment.rows.tobytes())
        digest.update(query.alignment.deletions.tobytes())
        if query.templates is not None:
            for array in (query.templates.aatype, query.templates.positions, query.templates.mask):
                digest.update(array.tobytes())
    return digest.hexdigest()


def _begin(out: Path, summary: dict[str, Any], force: bool) -> None:
    """Take over `out`: keep the predictions of an earlier run if it is the same, delete them if not.

    Other files that somebody put into their folders stay.
    """
    earlier = claim_folder(out, FORMAT, summary["run"], force) or {}
    for entry in earlier.get("predictions", []):
        folder = out / entry["folder"]
        if earlier.get("run") == summary["run"] and all((folder / f).is_file() for f in entry["files"].values()):
            summary["predictions"].append(entry)
        elif entry["folder"] == file_name(entry["folder"]):
            remove_prediction(folder, entry["name"])
    write_summary(out, summary)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text[:300]}"
