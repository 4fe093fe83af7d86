"""Fold queries with each of the parameters and seeds, into a folder that is never half-written (docs/outputs.md)."""

import hashlib
import json
import platform
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from warpfold import __version__
from warpfold.data.example.query_files import Complex, Given
from warpfold.errors import UserError
from warpfold.files import file_name, is_given_pipe
from warpfold.parallel.team import Team
from warpfold.prediction.fold_options import PredictOptions, batch_of
from warpfold.prediction.folder import PredictionFolder
from warpfold.prediction.folding import FoldItem, in_groups, one_line
from warpfold.prediction.notices import noted, shorten_list
from warpfold.prediction.outputs import RESERVED, claim_folder
from warpfold.prediction.params import MULTIMERS, Params, families_in, params_files, read_params
from warpfold.prediction.plan_report import check_fits, sizes_of_query
from warpfold.prediction.queries import Query, ReadQueries, fetching, read_given, with_templates
from warpfold.prediction.share import ModelInMemory, Share, fold_shared
from warpfold.prediction.templates import TemplateSources
from warpfold.progress import Progress, no_progress
from warpfold.training.planning import grid_for, log

if TYPE_CHECKING:
    from warpfold.data.search.server import AlignmentServer

FORMAT = "warpfold-predictions-1"
LONG = 1000  # residues, from which on planning takes long enough to be said


def predict(
    query: Given | Sequence[Given],
    msas: Sequence[Path],
    params: Path | Sequence[Path],
    out: Path,
    options: PredictOptions | None = None,
    progress: Progress | None = None,
    templates: TemplateSources | None = None,
    team: Team | None = None,
    share: Share | None = None,
    server: "AlignmentServer | None" = None,
) -> dict[str, Any]:
    """Fold every query into `out`, with each of the parameters and seeds; return `out/summary.json`.

    query: files, folders or text (`read_query_files`).  params: files, or folders of them.
    A record that cannot be folded, or a prediction that fails, is named under "failures" and the others go on.  A run
    that was stopped continues: what is done is kept.  team: processes that share each protein; all call this, and rank
    0 writes.  An error on one of them, other than bad input, ends the run.
    share: who folds.  As long as others have parts to fold, what is returned is "running", and not that in the folder:
    its predictions and failures are those of this part.
    server: is asked for alignments of sequences that have none; without it nothing is sent anywhere.
    Errors: UserError for bad input, or if no record can be folded (nothing is written), and for an `out` with something
    else, or where another one works.
    """
    options, tell, team, share = options or PredictOptions(), progress or no_progress, team or Team(), share or Share()
    start = time.perf_counter()
    _check_pipes([*([query] if isinstance(query, Given) else query), *msas], team)
    share.check(team, options.device)
    server = server if server is None or team.is_rank_zero else replace(server, say=lambda line: None)
    read, models, asked = _read(query, msas, params, out, options, server, tell)
    queries = read.queries
    total = len(models) * len(queries) * options.seeds
    if team.mesh.data.size > 1:
        _share_out(models, queries, options, team)
    memory = ModelInMemory(options, team)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if share.is_here:
        shortest = min((query.residues for query in queries), default=0)
        if shortest >= LONG and team.is_rank_zero:
            log.info("planning for %d residues", shortest)
        tell(0, total, "loading the parameters")
        predictor = memory.load(models[0])
        device = str(predictor.device)
        check_fits(queries, models[0], options.recycles, predictor.planner.check)
    if templates:
        tell(0, total, "looking at the templates")
        queries = with_templates(queries, templates, models, read.errors)
    seeds = range(options.seed, options.seed + options.seeds)
    items = [FoldItem(*one) for one in product(models, queries, seeds)]
    new = _new_summary(queries, models, options, device)
    new |= {"warnings": _run_notices(read, models, templates), "msa_server": server and server.url, "asked": asked}
    new["failures"] = [{"name": name, "error": one_line(error)} for name, error in read.errors.items()]
    folder = PredictionFolder(out, new, items, share.part, options.keep)
    with closing(folder):
        todo = None
        if team.is_rank_zero:
            batch = 1 if team.process.ranks > 1 or options.alone else batch_of(options.batch)
            todo = folder.begin(in_groups(items, batch, device), options.force)
        todo = team.broadcast(todo, "the beginning of the run")
        clock, refused = fold_shared(memory, folder.groups_of(todo), folder, share, tell)
        tell(total, total, "writing the report")
        process = {"device": device, "seconds": round(time.perf_counter() - start, 3), **clock.summary()}
        summary = folder.finish(process, refused) if team.is_rank_zero else None
    return team.broadcast(summary, "the end of the run")


def _check_pipes(files: Sequence[Given], team: Team) -> None:
    """Raise UserError for a pipe that several processes would share."""
    for file in files if team.process.ranks > 1 else []:
        if file == "-" or (isinstance(file, Path) and is_given_pipe(file)):
            raise UserError(f"{file}: is a pipe, which several processes cannot share; give a regular file")


def _read(
    given: Given | Sequence[Given],
    msas: Sequence[Path],
    params: Path | Sequence[Path],
    out: Path,
    options: PredictOptions,
    server: "AlignmentServer | None",
    tell: Progress,
) -> tuple[ReadQueries, list[Params], str | None]:
    """Read queries and parameters; of a folder with parameters of several kinds, those that the queries need.

    Returns a digest of what a server was asked, too; None if it was not.
    """
    asked: str | None = None
    params = [params] if isinstance(params, Path) else params
    waiting = any(path.is_dir() and len(families_in(path)) > 1 for path in params)
    models = [] if waiting else read_params(params_files(params, options.num_models))

    def check(one: Complex) -> None:
        _check_name(one.name)
        _check_complexes([one.name] if len(one.ids) > 1 else [], models)

    def fetch(lacking: Sequence[tuple[Complex, list[str]]]) -> list[Path]:
        nonlocal asked
        assert server is not None
        asked = _asked_digest(lacking, models, options, server.url)
        _check_before_sending(out, asked, options.force)
        return fetching(server, check, tell)(lacking)

    together = bool(options.complex) if waiting else _together(models, options)
    read = read_given(given, msas, together, fetch if server is not None else None, check)
    if not read.queries:
        raise next(iter(read.errors.values()))
    if waiting:
        complexes = [query.name for query in read.queries if query.is_complex]
        models = read_params(params_files(params, options.num_models, complexes=bool(complexes)))
        _check_complexes(complexes, models)
    return read, models, asked


def _check_name(name: str) -> None:
    """Raise UserError for a name whose folder would be where the run itself writes."""
    if file_name(name).lower() in RESERVED:
        raise UserError(
            f"{name}: no protein can have this name, because the output has {', '.join(RESERVED)} of its own; "
            "give the record another name"
        )


def _check_before_sending(out: Path, asked: str, force: bool) -> None:
    """Raise UserError, before anything is sent, for a folder that would be refused afterwards."""
    earlier = claim_folder(out, FORMAT, "", force=True) or {"asked": asked}
    known = asked if earlier.get("msa_server") else None  # of a version that did not note it
    if earlier.get("asked", known) != asked:
        claim_folder(out, FORMAT, "another", force)


def _asked_digest(
    lacking: Sequence[tuple[Complex, list[str]]], models: Sequence[Params], options: PredictOptions, url: str
) -> str:
    """Return a digest of what decides the result and is known before a server has answered."""
    asked = [[one.name, [*one.ids], [*one.sequences], without] for one, without in lacking]
    deciding = [
        options.seed,
        options.seeds,
        [[model.digest, options.identity_settings(model)] for model in models],
        url,
        asked,
    ]
    return hashlib.sha256(json.dumps(deciding).encode()).hexdigest()


def _run_notices(
    read: ReadQueries, models: Sequence[Params], templates: TemplateSources | None
) -> list[dict[str, Any]]:
    """Return what is to be said of the run as a whole: what was asked for and not used."""
    texts = []
    if read.hits and not (templates and templates.hits):
        texts.append(f"template hits are not used unless --hits names them: {shorten_list(read.hits)}")
    if templates and (without := [model.path.name for model in models if not model.config.templates.enabled]):
        texts.append(f"no template is used with {', '.join(without)}, which take none")
    notices = [*read.notices, *(templates.notices if templates else ()), *noted(texts)]
    return [notice.record() for notice in notices]


def _share_out(models: Sequence[Params], queries: Sequence[Query], options: PredictOptions, team: Team) -> None:
    """Have the processes share each protein, or fold others, as is fastest; they have met without a plan."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    config, sample, recycles = models[0].config, models[0].sample, options.recycles
    sizes = [sizes_of_query(query, config, sample, whole=False) for query in queries] * (len(models) * options.seeds)
    fixed: dict[str, Any] = {"precision": options.precision, "kernels": options.kernels}
    fixed |= {} if options.chunk is None else {"chunk": options.chunk or None}
    recycles = config.recycles if recycles is None else recycles
    team.remesh(grid_for(config, sizes, recycles, device, fixed, options.memory_limit, team))


def _together(models: Sequence[Params], options: PredictOptions) -> bool:
    """Return whether the records of a FASTA file are the chains of one complex."""
    return all(model.multimer for model in models) if options.complex is None else options.complex


def _check_complexes(found: Sequence[str], models: Sequence[Params]) -> None:
    """Raise UserError if there is a complex, and a model that folds single chains alone.  found: names of complexes."""
    unable = [model.path for model in models if not model.multimer]
    if found and unable:
        raise UserError(
            f"{unable[0]}: parameters for single chains, but {found[0]} is a complex; give AlphaFold-Multimer's "
            f"({MULTIMERS}), or fold each chain alone"
        )


def _new_summary(
    queries: Sequence[Query], models: Sequence[Params], options: PredictOptions, device: str
) -> dict[str, Any]:
    settings = {"seed": options.seed, "seeds": options.seeds, **options.identity_settings(models[0])}
    return {
        "format": FORMAT,
        "status": "running",
        "run": _run_digest(queries, models, options),
        "params": models[0].summary(),
        "models": [{"name": model.name, **model.summary(), **options.identity_settings(model)} for model in models],
        "settings": settings,
        "device": device,
        "versions": {"warpfold": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "input_warnings": {query.name: [one.record() for one in query.notices] for query in queries if query.notices},
        "predictions": [],
        "failures": [],
        "ranking": {},
        "refused": {},  # why fast operations were not used, and how often
        "seconds": 0.0,
    }


def _run_digest(queries: Sequence[Query], models: Sequence[Params], options: PredictOptions) -> str:
    """Return a digest of everything that decides the result."""
    deciding = [options.seed, options.seeds, [[model.digest, options.identity_settings(model)] for model in models]]
    digest = hashlib.sha256(json.dumps(deciding).encode())
    for query in queries:
        for part in query.parts():
            digest.update(part)
    return digest.hexdigest()
