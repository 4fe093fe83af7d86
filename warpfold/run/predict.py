"""Fold queries with each of the parameters and seeds, into a folder that is never half-written (docs/outputs.md)."""

import hashlib
import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from warpfold import __version__
from warpfold.data.example.templates import TemplateOutcome, count_refusals
from warpfold.errors import UserError
from warpfold.files import file_name, is_given_pipe
from warpfold.ops.dispatch import Kernels, refusals
from warpfold.parallel.team import Team
from warpfold.progress import Progress, no_progress
from warpfold.run.interfaces import describe, find_interfaces
from warpfold.run.outputs import Prediction, claim_folder, remove_prediction, write_summary
from warpfold.run.params import Params, read_params
from warpfold.run.predict_templates import TemplateSources
from warpfold.run.predictor import Predictor, Recycling, load
from warpfold.run.queries import ComplexQuery, FoldQuery, Query, read_queries, with_templates
from warpfold.run.ranking import copy_by_rank, rank_predictions, remove_copies
from warpfold.run.report import prediction_report, write_report
from warpfold.run.sanity import check_geometry

FORMAT = "warpfold-predictions-1"

# What may fail for one prediction while the others go on: numbers, memory (torch.OutOfMemoryError is a RuntimeError).
FAILURES = (UserError, RuntimeError, MemoryError, ArithmeticError, ValueError)


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """How to fold.  Whatever changes the result is part of the run's identity; device, chunk and kernels are not."""

    seed: int = 0
    seeds: int = 1  # how many, counted on from `seed`: a prediction with each, which are ranked
    together: bool | None = (
        None  # records of a FASTA file are chains of one complex; None: with a multimer's parameters
    )
    recycles: int | None = None  # None: the model's own
    recycling: Recycling = field(default_factory=Recycling)
    ensemble: int | None = None
    max_msa: int | None = None  # rows of the clustered and of the extra alignment; None: as the parameters were trained
    max_extra: int | None = None
    device: str | None = None  # None: the first GPU, or the CPU
    chunk: int | None = None  # rows computed at a time; None: what fits, 0: all
    precision: Literal["fp32", "bf16", "bf16_all", "fp16"] = "fp32"
    kernels: Kernels = "fast"  # as Plan.kernels
    representations: bool = False  # keep them in the .npz
    distogram: bool = False  # write contacts and the distogram too
    force: bool = False

    def of(self, model: Params) -> dict[str, Any]:
        """Return what decides a model's results, beside parameters, queries and seeds, as it is in the end."""
        config, sample = model.config, model.sample
        # Named only if given: folders of earlier versions can be continued.
        given = {"recycle_tolerance": self.recycling.tolerance, "max_recycles": self.recycling.long}
        given["distogram"] = self.distogram or None
        return {
            "recycles": config.recycles if self.recycles is None else self.recycles,
            "ensemble": config.ensemble if self.ensemble is None else self.ensemble,
            "max_msa": sample.max_msa if self.max_msa is None else self.max_msa,
            "max_extra": sample.max_extra if self.max_extra is None else self.max_extra,
            "precision": self.precision,
            "representations": self.representations,
            **{name: value for name, value in given.items() if value is not None},
        }


class ModelInMemory:
    """The model that folds: the parameters of one are given up before those of the next are loaded."""

    def __init__(self, options: PredictOptions, team: Team) -> None:
        self.options, self.team = options, team
        self._name: str | None = None
        self._predictor: Predictor | None = None

    def load(self, params: Params) -> Predictor:
        """Return the predictor of a model.  Errors: UserError as in `run.predictor.load`."""
        if self._predictor is None or self._name != params.name:
            self._predictor = None
            o, settings = self.options, self.options.of(params)
            self._predictor = load(params.path, o.device, o.chunk, o.precision, team=self.team, kernels=o.kernels)
            rows = {name: settings[name] for name in ("max_msa", "max_extra")}
            self._predictor.sample = replace(params.sample, **rows)
            self._predictor.recycling = o.recycling
            self._name = params.name
        return self._predictor


def predict(
    query: Path,
    msas: Sequence[Path],
    params: Path | Sequence[Path],
    out: Path,
    options: PredictOptions | None = None,
    progress: Progress | None = None,
    templates: TemplateSources | None = None,
    team: Team | None = None,
) -> dict[str, Any]:
    """Fold every query of a file into `out`, with each of the parameters and seeds; return `out/summary.json`.

    A prediction that fails is named under "failures" and the others go on.  A run that was stopped continues: what is
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
    models = read_params([params] if isinstance(params, Path) else params)
    queries = read_queries(query, msas, _together(models, options))
    _check_complexes(queries, models)
    total = len(models) * len(queries) * options.seeds
    tell(0, total, "loading the parameters")
    memory = ModelInMemory(options, team)
    predictor = memory.load(models[0])
    if templates:
        tell(0, total, "looking at the templates")
        queries = with_templates(queries, templates, models)
    summary = None
    if team.is_rank_zero:
        summary = _new_summary(queries, models, options, predictor)
        _begin(out, summary, options.force)
    summary = team.all_gather_object(summary, "the beginning of the run")[0]
    _fold_all(memory, models, queries, out, options, summary, tell)
    tell(total, total, "writing the report")
    summary["status"] = "failed" if summary["failures"] else "complete"
    summary |= {"seconds": round(time.perf_counter() - start, 3), "refused": refusals(refused_before)}
    if team.is_rank_zero:
        summary["predictions"], summary["ranking"] = rank_predictions(summary["predictions"])
        if total > len(queries):
            summary["predictions"] = copy_by_rank(out, summary["predictions"])
        write_report(out / "report.html", prediction_report(out, summary))
        write_summary(out, summary)
    return team.all_gather_object(summary, "the end of the run")[0]


def _fold_all(
    memory: ModelInMemory,
    models: Sequence[Params],
    queries: Sequence[Query],
    out: Path,
    options: PredictOptions,
    summary: dict[str, Any],
    tell: Progress,
) -> None:
    """Fold what the summary does not have yet, and write it to the summary as soon as it is there.

    Models come first, so that each is loaded once.
    """
    done = {(entry["name"], entry["model"], entry["seed"]) for entry in summary["predictions"]}
    # If one rank fails in the middle of a protein, the others wait for it: the run cannot go on.
    failures = FAILURES if memory.team.process.ranks == 1 else UserError
    jobs = list(product(models, queries, range(options.seed, options.seed + options.seeds)))
    for index, (model, query, seed) in enumerate(jobs):
        tell(index, len(jobs), query.name)
        if (query.name, model.name, seed) in done:
            continue
        predictor = memory.load(model)
        label: dict[str, Any] = {"model": model.name, "seed": seed} if len(jobs) > len(queries) else {}
        try:
            entry = fold_one(predictor, query, out, replace(options, seed=seed), label.get("model", ""))
            summary["predictions"] += [entry | {"model": model.name}] if entry else []
        except failures as error:
            summary["failures"].append({"name": query.name, **label, "error": _one_line(error)})
        if memory.team.is_rank_zero:
            write_summary(out, summary)


def fold_one(
    predictor: Predictor, query: Query, out: Path, options: PredictOptions, model: str = ""
) -> dict[str, Any] | None:
    """Fold one query with `options.seed` and write its folder; return its entry in the summary.

    model: where several predictions of each query are made, the name of the model.  Returns None where another rank
    writes.
    """
    how: dict[str, Any] = {
        "seed": options.seed,
        "recycles": options.recycles,
        "ensemble": options.ensemble,
        "representations": options.representations,
        "distogram": options.distogram,
    }
    if isinstance(query, FoldQuery):
        prediction = predictor.fold(query.sequence, query.alignment, query.templates, name=query.name, **how)
    else:
        prediction = predictor.fold_example(query.assembly, **how)
    if not predictor.team.is_rank_zero:
        return None
    prediction = replace(prediction, templates=[asdict(outcome) for outcome in query.outcomes])
    return keep(prediction, out, f"{model}_seed_{options.seed}" if model else "", query.warnings)


def keep(prediction: Prediction, out: Path, below: str = "", warnings: Sequence[str] = ()) -> dict[str, Any]:
    """Check a prediction's geometry, write it into its own folder in `out`, and return its entry in the summary.

    below: the folder in that of the protein, where it has several predictions.  warnings: what else is to be said.
    """
    outcomes = [TemplateOutcome(**outcome) for outcome in prediction.templates]
    details = dict(prediction.details)
    chains = _of_complex(prediction, details.pop("chain_depths", {}))
    geometry = check_geometry(prediction.positions, prediction.mask, prediction.asym_id)
    folder = f"{file_name(prediction.name)}/{below}".rstrip("/")
    files = prediction.save(out / folder, overwrite=True)  # the earlier run was killed, or is replaced with --force
    return {
        "name": prediction.name,
        "folder": folder,
        "files": files,
        "length": len(prediction.sequence),
        "sequence": ":".join(prediction.sequence[span] for span in prediction.spans.values()),
        "mean_plddt": round(prediction.mean_plddt, 2),
        "ptm": None if prediction.ptm is None else round(prediction.ptm, 4),
        **chains,
        "ranking_confidence": round(prediction.ranking_confidence, 6),
        **details,
        "templates_unused": sum(not outcome.used for outcome in outcomes),
        "templates_refused": count_refusals(outcomes),
        "templates_missing": sum(outcome.missing for outcome in outcomes),
        "geometry": asdict(geometry),
        "warnings": [*warnings, *_unknown(prediction), *_without_pdb(prediction, files), *geometry.warnings()],
    }


def _of_complex(prediction: Prediction, depths: Mapping[str, int]) -> dict[str, Any]:
    """Return what the summary has of complexes alone.  depths: rows of each chain's alignment."""
    if prediction.asym_id is None:
        return {}
    pairs = prediction.chain_pair_iptm
    return {
        "iptm": None if prediction.iptm is None else round(prediction.iptm, 4),
        "chains": [
            {
                "id": chain,
                "length": span.stop - span.start,
                "mean_plddt": round(float(prediction.plddt[span].mean()), 2),
                "msa_depth": depths.get(chain),
            }
            for chain, span in prediction.spans.items()
        ],
        "chain_pair_iptm": None if pairs is None else np.round(pairs.astype(float), 4).tolist(),
        "interfaces": describe(find_interfaces(prediction)),
    }


def _unknown(prediction: Prediction) -> list[str]:
    """Return a sentence about residues that are X, if there are any: they have no atoms."""
    several = prediction.asym_id is not None
    places = [
        f"{chain} {place}" if several else str(place)
        for chain, span in prediction.spans.items()
        for place, letter in enumerate(prediction.sequence[span], 1)
        if letter == "X"
    ]
    if not places:
        return []
    what = "1 residue is" if len(places) == 1 else f"{len(places)} residues are"
    some = ", ".join(places[:5]) + (" ..." if len(places) > 5 else "")
    return [f"{what} not one of the twenty amino acids (X at {some}), so without atoms; write C for U to get cysteine"]


def _without_pdb(prediction: Prediction, files: Mapping[str, str]) -> list[str]:
    """Return why there is no PDB file, if there is none."""
    if "pdb" in files:
        return []
    try:
        prediction.pdb()
    except UserError as error:
        return [f"no PDB file: {str(error).removeprefix(prediction.name + ': ').removesuffix('; write mmCIF')}"]
    return []


def _together(models: Sequence[Params], options: PredictOptions) -> bool:
    """Return whether the records of a FASTA file are the chains of one complex."""
    return all(model.multimer for model in models) if options.together is None else options.together


def _check_complexes(queries: Sequence[Query], models: Sequence[Params]) -> None:
    """Raise UserError if there is a complex, and a model that folds single chains alone."""
    found = [query.name for query in queries if isinstance(query, ComplexQuery)]
    unable = [model.path for model in models if not model.multimer]
    if found and unable:
        raise UserError(
            f"{unable[0]}: parameters for single chains, but {found[0]} is a complex; give AlphaFold-Multimer's "
            "(params_model_*_multimer_*.npz), or fold each chain alone"
        )


def _new_summary(
    queries: Sequence[Query], models: Sequence[Params], options: PredictOptions, predictor: Predictor
) -> dict[str, Any]:
    settings = {"seed": options.seed, "seeds": options.seeds, **options.of(models[0])}
    return {
        "format": FORMAT,
        "status": "running",
        "run": _run_digest(queries, models, options),
        "params": models[0].summary(),
        "models": [{"name": model.name, **model.summary(), **options.of(model)} for model in models],
        "settings": settings,
        "device": str(predictor.device),
        "versions": {"warpfold": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "input_warnings": {query.name: list(query.warnings) for query in queries if query.warnings},
        "predictions": [],
        "failures": [],
        "ranking": {},
        "refused": {},  # why fast operations were not used, and how often
        "seconds": 0.0,
    }


def _run_digest(queries: Sequence[Query], models: Sequence[Params], options: PredictOptions) -> str:
    """Return a digest of everything that decides the result."""
    deciding = [options.seed, options.seeds, [[model.digest, options.of(model)] for model in models]]
    digest = hashlib.sha256(json.dumps(deciding).encode())
    for query in queries:
        for part in query.parts():
            digest.update(part)
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
        elif all(part == file_name(part) for part in Path(entry["folder"]).parts):
            remove_prediction(folder, entry["name"])
            remove_copies(out, entry)
    write_summary(out, summary)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text[:300]}"
