"""Run a `Request`: fold its queries with each of the parameters and seeds into a folder (docs/reference/outputs.md).

Predictions are made by this process, by ranks that each take some, by worker processes, or by a Dask cluster.
"""

import hashlib
import json
import logging
import platform
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from warpfold import __version__
from warpfold.bulk import in_order, pool, worker_number
from warpfold.data.example.query_files import Complex
from warpfold.device import cores
from warpfold.errors import UserError
from warpfold.files import claim_folder, file_name, is_given_pipe
from warpfold.ops.dispatch import refusals
from warpfold.parallel.plan import Precision, log_precision, resolve_precision
from warpfold.parallel.team import Team
from warpfold.prediction.folder import (
    PredictionFolder,
    Recorder,
    RepresentationStore,
    RunLog,
    key_of,
    read_records,
)
from warpfold.prediction.folding import (
    Clock,
    FoldItem,
    FoldOutcome,
    Group,
    Write,
    cost_of,
    fold_groups,
    in_groups,
    one_line,
    taken,
)
from warpfold.prediction.notices import noted, shorten_list
from warpfold.prediction.outputs import RESERVED, Prediction, write_prediction
from warpfold.prediction.pages import warning_lines
from warpfold.prediction.params import MULTIMERS, Params, families_in, params_files, read_params
from warpfold.prediction.plan_report import check_fits, sizes_of_query
from warpfold.prediction.predictor import Predictor, load
from warpfold.prediction.queries import (
    Query,
    ReadQueries,
    all_pairs,
    chain_of_pairs,
    check_guess,
    fetching,
    read_given,
    with_guesses,
    with_templates,
)
from warpfold.prediction.request import FORMAT, Request, parse_batch
from warpfold.progress import Progress, are_hidden, as_time, no_progress
from warpfold.scoring.score_table import ScoreTables, row_of
from warpfold.scoring.selection import OF_COMPLEXES, OF_ERRORS, OF_GIVEN, Selection, Shortlist
from warpfold.training.passes import PassPlace
from warpfold.training.planning import grid_for, log

LONG = 1000  # residues from which on the log announces planning, which takes some time
JOBS_PER_WORKER = 16  # enough for load balancing, few enough to amortise the start of a job


def run(request: Request, tell: Progress = no_progress, team: Team | None = None) -> dict[str, Any]:
    """Fold every query of a request into its output folder; return `summary.json`.

    A record that cannot be folded and a prediction that fails are listed under "failures", and the others go on.  The
    same request continues a stopped run and keeps its finished predictions.
    team: the processes that share each protein.  All call this function, and rank 0 writes.  An error on one of them,
    other than bad input, ends the run.
    While other parts (`Request.part`) have predictions to make, the returned summary is "running", lists only the
    predictions and failures of this part, and is not that of the folder.
    Errors: UserError for bad input, if no record can be folded (nothing is written), and for an `out` that holds
    something else or in which another process works on this part.
    """
    with RunLog(request.folder) as run_log:
        return _run(request, tell, team or Team(), run_log)


def _run(request: Request, tell: Progress, team: Team, run_log: RunLog) -> dict[str, Any]:
    """Do the work of `run`."""
    start, out = time.perf_counter(), request.folder
    if team.is_rank_zero:
        versions = f"WarpFold {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
        run_log.write(f"{versions}: {shlex.join(sys.argv)}")
    check_processes(request, team)
    device = _device_of(request)
    # All processes use the same precision, because the run's identity contains it.
    requested_precision, precision = request.precision, _resolve_precision(request)
    precision = team.broadcast(precision, "the precision")
    request = replace(request, precision=precision)
    read, models, asked_digest = _read(request, team, tell)
    if request.cluster is not None:  # its workers run in another folder
        models = [replace(model, path=model.path.absolute()) for model in models]
    if request.guess is not None:
        tell(0, 1, "looking at the initial guesses")
        read = replace(read, found=with_guesses(read.found, request.guess, request.fixed)).hoist_common_notices()
        if not read.queries:
            raise next(iter(read.errors.values()))
    check_guess(request.guess, request.fixed, models)
    chains = read.queries
    queries = all_pairs(chains) if request.pairs else chains
    total = len(models) * len(queries) * request.seeds
    if team.mesh.data.size > 1:
        choose_process_grid(models, queries, request, team)
    memory = ModelInMemory(request, team)
    if not request.starts_processes:
        shortest = min((query.residues for query in queries), default=0)
        if shortest >= LONG and team.is_rank_zero:
            log.info("planning for %d residues", shortest)
        tell(0, total, "loading the parameters")
        predictor = memory.load(models[0])
        device = str(predictor.device)
        check_fits(queries, models[0], request.recycles, predictor.planner.check)
    templates = request.template_sources
    if templates:
        tell(0, total, "looking at the templates")
        chains = with_templates(chains, templates, models, read.errors)
        queries = all_pairs(chains) if request.pairs else chains
    seeds = range(request.seed, request.seed + request.seeds)
    items = [FoldItem(*combination) for combination in product(models, queries, seeds)]
    server = request.server
    new = _new_summary(chains, models, request, device)
    new |= {
        "warnings": _run_notices(read, models, request),
        "msa_server": server and server.url,
        "asked": asked_digest,
    }
    new["failures"] = [{"name": name, "error": one_line(error)} for name, error in read.errors.items()]
    tables, keep = None, _selection(request, queries, models)
    if isinstance(keep, Selection) or any(query.is_complex or query.designed is not None for query in queries):
        tables = ScoreTables(out, pairs=any(len(query.ids) > 2 for query in queries))
        new["tables"] = tables.names
        if not request.fixed and any(query.designed is not None and query.is_complex for query in queries):
            text = (
                "scores.csv takes the last chain for the binder and the other chains for its target; name the target "
                "with --fixed-chains if it is another"
            )
            new["warnings"] += [notice.record() for notice in noted([text])]
    store = None if request.store is None else RepresentationStore(request.store, new["run"])
    new |= {} if store is None else {"store": str(store.path)}
    folder = PredictionFolder(out, new, items, request.part, keep, tables, store)
    with closing(folder):
        todo = None
        if team.is_rank_zero:
            batch = 1 if team.process.ranks > 1 or request.folds_alone else parse_batch(request.batch)
            groups = in_groups(items, batch, device, request.recycling, request.recycles)
            todo = folder.begin(groups, request.force)
        todo = team.broadcast(todo, "the beginning of the run")
        run_log.open()
        if team.is_rank_zero:
            part = f"part {request.part}, " if request.shard else ""
            todo_text = f"{sum(map(len, todo))} of {len(items)} predictions to make"
            run_log.write(f"{part}device {device}, precision {precision}, {todo_text}")
            for failure in new["failures"]:
                run_log.write(f"failed {failure['name']}: {failure['error']}", logging.ERROR)
        log_precision(requested_precision, precision, None if request.cluster else device)
        clock, refused = _fold(memory, folder.groups_of(todo), folder, tell)
        tell(total, total, "writing the report")
        process = {"device": device, "seconds": round(time.perf_counter() - start, 3), **clock.summary()}
        summary = folder.finish(process, refused) if team.is_rank_zero else None
        if summary is not None:
            for line in warning_lines(summary):
                run_log.write(line, logging.WARNING)
            counts = f"{len(summary['predictions'])} predictions, {len(summary['failures'])} failures"
            run_log.write(f"{summary['status']}: {counts}, {summary['seconds']:.1f} s")
    return team.broadcast(summary, "the end of the run")


def check_processes(request: Request, team: Team) -> None:
    """Raise UserError for pipes and workers under torchrun, and for more workers than GPUs."""
    if team.process.ranks > 1:
        for file in [*request.queries, *request.alignments]:
            if file == "-" or (isinstance(file, Path) and is_given_pipe(file)):
                raise UserError(f"{file}: is a pipe, which several processes cannot share. Pass a regular file.")
        if request.starts_processes:
            raise UserError("--workers and --cluster start processes of their own: use them without torchrun")
    device = request.device
    if request.workers > 1 and request.cluster is None and device is not None and device.startswith(("cuda", "mps")):
        gpus = torch.cuda.device_count() if device == "cuda" else 1
        if request.workers > gpus:
            raise UserError(f"--workers {request.workers}: more than --device {device} has GPUs ({gpus}). Pass {gpus}.")


def _device_of(request: Request) -> str:
    return request.device or ("cuda" if torch.cuda.is_available() else "cpu")


def _resolve_precision(request: Request) -> Precision:
    """Return the precision on the device that folds; of a cluster, on the device of one of its workers."""
    if request.cluster is None or request.precision != "auto":
        return resolve_precision(request.precision, _device_of(request))
    with pool(request.workers, request.cluster) as executor:
        (precision,) = in_order(_precision_of_worker, [request.for_workers()], executor)
    return precision


def _precision_of_worker(request: Request) -> Precision:
    return resolve_precision(request.precision, _device_of(request))


def _read(request: Request, team: Team, tell: Progress) -> tuple[ReadQueries, list[Params], str | None]:
    """Read queries and parameters.

    A folder may hold parameters of several kinds; then the queries decide which kind is used.
    Returns a digest of the questions that a server was asked, too; None if it was not asked.
    """
    asked_digest: str | None = None
    params, gap = request.params_paths, request.chain_gap is not None
    awaits_queries = not gap and any(path.is_dir() and len(families_in(path)) > 1 for path in params)
    models = [] if awaits_queries else read_params(params_files(params, request.num_models))
    if gap and (multimers := [model.path.name for model in models if model.multimer]):
        raise UserError(f"--chain-gap: {multimers[0]} is AlphaFold-Multimer's, which tells chains apart. Leave it out.")
    server = request.server
    if server is not None and not team.is_rank_zero:
        server = replace(server, say=lambda line: None)

    def check(query: Complex) -> None:
        """Raise UserError for a query that cannot be folded here."""
        if request.pairs and len(query.ids) > 1:
            chain_of_pairs(query)  # raises, before an alignment is fetched
        if file_name(query.name).lower() in RESERVED:  # its folder would be one of the run's own files
            raise UserError(
                f"{query.name}: no protein can have this name, because the output has {', '.join(RESERVED)} of its "
                "own. Give the record another name."
            )
        _check_complexes([query.name] if (request.pairs or len(query.ids) > 1) and not gap else [], models)

    def fetch(lacking: Sequence[tuple[Complex, list[str]]]) -> list[Path]:
        """Ask the server, unless the output folder would be refused afterwards."""
        nonlocal asked_digest
        assert server is not None
        requested = [
            [query.name, [*query.ids], [*query.sequences], lacking_sequences] for query, lacking_sequences in lacking
        ]
        asked_digest = _digest_of(models, request, server.url, requested).hexdigest()
        earlier = claim_folder(request.folder, FORMAT, "", force=True) or {"asked": asked_digest}
        # Earlier versions did not record the digest.
        recorded = earlier.get("asked", asked_digest if earlier.get("msa_server") else None)
        if recorded != asked_digest:
            claim_folder(request.folder, FORMAT, "another", request.force)
        return fetching(server, check, tell)(lacking)

    # Whether the records of a FASTA file are the chains of one complex.
    single = awaits_queries or any(not model.multimer for model in models)
    reads_complex = not (single or request.pairs) if request.complex is None else request.complex
    read = read_given(
        request.queries, request.alignments, reads_complex, fetch if server is not None else None, check, request.fixed,
        bool(request.pairs),
    )  # fmt: skip
    if not read.queries:
        raise next(iter(read.errors.values()))
    if awaits_queries:
        complexes = [query.name for query in read.queries if query.is_complex or request.pairs]
        models = read_params(params_files(params, request.num_models, complexes=bool(complexes)))
        _check_complexes(complexes, models)
    return read, models, asked_digest


def _run_notices(read: ReadQueries, models: Sequence[Params], request: Request) -> list[dict[str, Any]]:
    """Return warnings about the run as a whole: options that have no effect."""
    texts, templates = [], request.template_sources
    if read.hits and not templates.hits:
        texts.append(f"template hits are not used unless --hits names them: {shorten_list(read.hits)}")
    if (templates or request.fixed) and (
        without_templates := [model.path.name for model in models if not model.config.templates.enabled]
    ):
        texts.append(f"no template is used with {', '.join(without_templates)}, which take none")
    return [notice.record() for notice in [*read.notices, *templates.notices, *noted(texts)]]


def _selection(request: Request, queries: Sequence[Query], models: Sequence[Params]) -> int | Selection | None:
    """Complete the parsed `--keep`.  Errors: UserError for a score that these predictions will not have."""
    keep, complexes = request.selection, [query for query in queries if query.is_complex]
    if not isinstance(keep, Selection):
        return keep
    if keep.best is not None and keep.score is None:
        keep = replace(keep, score="ipsae" if complexes else "mean_plddt")
    for score in keep.scores:
        without_pae = [model.path for model in models if not model.config.heads.pae]
        if score in OF_ERRORS and without_pae:
            raise UserError(
                f"--keep {keep.text}: {without_pae[0]} has no head of aligned errors, so no {score}. Name another."
            )
        if score in OF_COMPLEXES and not complexes:
            raise UserError(f"--keep {keep.text}: single chains have no {score}. Name another score.")
        if score in OF_GIVEN and not any(query.designed is not None for query in queries):
            raise UserError(
                f"--keep {keep.text}: {score} is to a given complex. Fold structures, or pass --initial-guess."
            )
    return keep


def choose_process_grid(models: Sequence[Params], queries: Sequence[Query], request: Request, team: Team) -> None:
    """Choose whether processes share each protein or fold different ones, whichever is faster, and remesh the team."""
    config, sample, recycles = models[0].config, models[0].sample, request.recycles
    sizes = [sizes_of_query(query, config, sample, whole=False) for query in queries] * (len(models) * request.seeds)
    fixed_settings: dict[str, Any] = {"precision": request.precision, "kernels": request.kernels}
    fixed_settings |= {} if request.chunk is None else {"chunk": request.chunk or None}
    recycles = config.recycles if recycles is None else recycles
    team.remesh(grid_for(config, sizes, recycles, _device_of(request), fixed_settings, request.memory_limit, team))


def _check_complexes(names: Sequence[str], models: Sequence[Params]) -> None:
    """Raise UserError if there are complexes, given by name, and a model that folds single chains alone."""
    monomer_files = [model.path for model in models if not model.multimer]
    if names and monomer_files:
        raise UserError(
            f"{monomer_files[0]}: parameters for single chains, but {names[0]} is a complex. Pass AlphaFold-Multimer's "
            f"({MULTIMERS}), --chain-gap 200, or fold each chain alone."
        )


def _new_summary(queries: Sequence[Query], models: Sequence[Params], request: Request, device: str) -> dict[str, Any]:
    settings = {"seed": request.seed, "seeds": request.seeds, **request.identity_settings(models[0])}
    run = _digest_of(models, request)
    for part in (part for query in queries for part in query.parts()):
        run.update(part)
    pairs = {"pairs": [query.name for query in queries]} if request.pairs else {}
    run.update(b"all pairs" if pairs else b"")
    return {
        "format": FORMAT,
        "status": "running",
        "run": run.hexdigest(),
        "params": models[0].summary(),
        "models": [{"name": model.name, **model.summary(), **request.identity_settings(model)} for model in models],
        "settings": settings,
        "device": device,
        "versions": {"warpfold": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "input_warnings": {
            query.name: [notice.record() for notice in query.notices] for query in queries if query.notices
        },
        "predictions": [],
        "failures": [],
        "ranking": {},
        **pairs,
        "refused": {},  # why fast operations were not used, and how often
        "seconds": 0.0,
    }


def _digest_of(models: Sequence[Params], request: Request, *more: Any) -> "hashlib._Hash":
    """Return a digest of everything but the queries that decides the result."""
    identities = [[model.digest, request.identity_settings(model)] for model in models]
    return hashlib.sha256(json.dumps([request.seed, request.seeds, identities, *more]).encode())


class ModelInMemory:
    """The loaded model; its parameters are freed before those of the next model are loaded."""

    def __init__(self, request: Request, team: Team) -> None:
        self.request, self.team = request, team
        self._name: str | None = None
        self._predictor: Predictor | None = None

    def load(self, params: Params) -> Predictor:
        """Return the predictor of a model.  Errors: UserError as in `prediction.predictor.load`."""
        if self._predictor is None or self._name != params.name:
            self._predictor = None
            request, sample = self.request, params.sample
            self._predictor = load(
                params.path, request.device, request.chunk, request.precision, sample, self.team, request.kernels,
                request.offload, request.memory, max_msa=request.max_msa, max_extra=request.max_extra,
                dropout=request.dropout, chain_gap=request.chain_gap, graphs=request.graphs,
            )  # fmt: skip
            self._predictor.recycling = request.recycling
            self._name = params.name
        return self._predictor


def _fold(
    memory: ModelInMemory, groups: Sequence[Group], folder: PredictionFolder, tell: Progress
) -> tuple[Clock, dict[str, int]]:
    """Fold groups into a folder; return the seconds of all processes, and why fast operations were not used.

    Errors: UserError for parameters that do not fit, or a cluster that cannot be reached; TeamError.
    """
    bar, team, request = ProgressOfRun(tell, len(folder.items), groups), memory.team, memory.request
    clock, refused, refused_before = Clock(), dict[str, int](), refusals()
    if not request.starts_processes:
        has_data_ranks = team.mesh.data.size > 1
        recorder = folder.recorder() if team.is_example_leader else None

        def record(outcome: FoldOutcome) -> None:
            if recorder is not None:
                recorder.add(outcome)
            bar.move([outcome.item])

        write = _writer(folder.out, folder.is_several, None if recorder is None else recorder.shortlist, request)
        rank_groups = taken(groups, team) if has_data_ranks else groups
        clock = fold_groups(memory.load, request.fold_options, team, rank_groups, write, record, bar.follow)
        if has_data_ranks:
            team.wait_for_all("the end of the predictions")
        return clock, refusals(refused_before)
    out, workers = folder.out.absolute(), 0 if request.cluster else request.workers
    tables = None if folder.tables is None else replace(folder.tables, out=out)

    def left(some: list[FoldJob]) -> list[FoldJob]:
        """Return the jobs of workers that died, without the predictions that they had finished."""
        finished_keys = {key_of(record["key"]) for record in read_records(out, folder.run) if "entry" in record}
        groups = [
            [tuple(item for item in group if item.key not in finished_keys) for group in job.groups] for job in some
        ]
        return [
            replace(job, groups=[group for group in left_groups if group]) for job, left_groups in zip(some, groups)
        ]

    request = request.for_workers()
    with pool(request.workers, request.cluster) as executor:
        assert executor is not None
        jobs = [
            FoldJob(job_groups, out, folder.run, folder.is_several, request, workers, tables, folder.keep, are_hidden())
            for job_groups in in_jobs(groups, JOBS_PER_WORKER * executor.size)
        ]
        for job, (seconds, refusals_of_job) in zip(jobs, in_order(fold_job, jobs, executor, again=left)):
            clock.add(seconds)
            for reason, count in refusals_of_job.items():
                refused[reason] = refused.get(reason, 0) + count
            bar.move([item for group in job.groups for item in group])
    return clock, refused


@dataclass(frozen=True)
class FoldJob:
    """Groups for a worker, and how it folds and writes them."""

    groups: Sequence[Group]
    out: Path
    run: str
    several: bool
    request: Request
    workers: int  # of this machine; 0 on a cluster
    tables: ScoreTables | None
    keep: int | Selection | None
    quiet: bool


def in_jobs(groups: Sequence[Group], count: int) -> Iterator[list[Group]]:
    """Split groups into jobs of neighbours with one model, each of about 1 / count of the total cost."""
    max_cost, job_groups = cost_of(groups) / count, list[Group]()
    for group in groups:
        if job_groups and (cost_of([*job_groups, group]) > max_cost or group[0].model != job_groups[0][0].model):
            yield job_groups
            job_groups = []
        job_groups = [*job_groups, group]
    if job_groups:
        yield job_groups


def fold_job(job: FoldJob) -> tuple[Clock, dict[str, int]]:
    """Fold groups in a worker process, which keeps its model from job to job; return the same as `_fold`.

    The worker writes the files and the records.  On a machine of several GPUs it uses the GPU of its own number.
    """
    refused_before, number = refusals(), worker_number()
    device = _device_of(job.request)
    if device == "cuda" and number is not None and torch.cuda.device_count() > 1:
        device = f"cuda:{number % torch.cuda.device_count()}"
    if device == "cpu" and job.workers:
        torch.set_num_threads(max(1, cores() // job.workers))
    memory = _memory_of(replace(job.request, device=device))
    shortlist = Shortlist(job.keep) if isinstance(job.keep, Selection) else None
    recorder = Recorder(job.out, job.run, job.tables, shortlist, job.quiet)
    write = _writer(job.out, job.several, shortlist, job.request)
    clock = fold_groups(memory.load, memory.request.fold_options, memory.team, job.groups, write, recorder.add)
    return clock, refusals(refused_before)


_worker_memory: ModelInMemory | None = None


def _memory_of(request: Request) -> ModelInMemory:
    """Return the worker's model, which stays loaded between jobs of one request."""
    global _worker_memory
    if _worker_memory is None or _worker_memory.request != request:
        _worker_memory = ModelInMemory(request, Team())
    return _worker_memory


def _writer(out: Path, several: bool, shortlist: Shortlist | None, request: Request) -> Write:
    wants_files = None if shortlist is None else lambda entry: shortlist.wants(row_of(entry))
    pair = None if request.store is None else request.pair_representation

    def write(item: FoldItem, prediction: Prediction) -> dict[str, Any]:
        """Write a prediction with the notices, templates and guess of its query."""
        outcomes = [asdict(outcome) for outcome in item.query.outcomes]
        below = item.below if several else ""
        query, detailed = item.query, replace(prediction, templates=outcomes)
        details = {**detailed.details, "model": item.model.name}
        if query.guess is not None:
            details |= {"initial_guess": Path(query.guess.source).name, "fixed_chains": list(query.fixed)}
        detailed = replace(detailed, details=details)
        notices, fixed, designed = query.notices, query.fixed, query.designed
        return write_prediction(detailed, out, below, notices, fixed, designed, wants_files, pair, request.figures)

    return write


class ProgressOfRun:
    """Report the number of predictions, the position of the model in one, and the time left by their predicted costs.

    One thread folds while another writes the files of the group before, and both report: the number never falls.
    """

    def __init__(self, tell: Progress, total: int, groups: Sequence[Group]) -> None:
        self._tell, self._total = tell, total
        self._done = total - sum(map(len, groups))  # by an earlier run, or by other processes
        self._cost, self._left, self._start = 0.0, cost_of(groups), time.perf_counter()
        self._shown: float = self._done
        self._lock = threading.Lock()
        tell(self._done, total, groups[0][0].query.name if groups else "")

    def follow(self, group: Group, place: PassPlace) -> None:
        """Show the position of the model in a group, while the files of the group before may still be written."""
        cost = place.share * cost_of([group])
        name = group[0].query.name if len(group) == 1 else f"{len(group)} together"
        short_name = name if len(name) <= 8 else f"{name[:7]}…"  # the line fits 80 columns
        self._show(place.share * len(group), f"{short_name}{self._time_left(cost)}, {place}")

    def move(self, items: Sequence[FoldItem]) -> None:
        self._done += len(items)
        for item in items:
            self._cost, self._left = self._cost + item.cost, self._left - item.cost
        self._show(0, f"{items[-1].query.name}{self._time_left()}")

    def _show(self, more: float, what: str) -> None:
        with self._lock:
            self._shown = max(self._shown, min(self._done + more, self._total))
            self._tell(self._shown, self._total, what)

    def _time_left(self, cost: float = 0.0) -> str:
        """Return the text for the time left, with this much of the current group's cost done; "" if unknown."""
        done_cost, left_cost = self._cost + cost, self._left - cost
        seconds = (time.perf_counter() - self._start) * left_cost / done_cost if done_cost else 0.0
        return f", {as_time(seconds)} left" if left_cost > 0 and seconds >= 1 else ""
