"""Fold queries with each set of parameters and each seed into an output folder (docs/reference/outputs.md).

This process folds, or ranks that each take some, processes of their own, or a Dask cluster.
"""

import hashlib
import json
import os
import platform
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from warpfold import __version__
from warpfold.bulk import JobPart, in_order, pool, require_cluster, worker_number
from warpfold.data.example.query_files import Complex, Given
from warpfold.device import cores
from warpfold.errors import UserError
from warpfold.files import file_name, is_given_pipe
from warpfold.ops.dispatch import refusals
from warpfold.parallel.plan import Precision, log_precision, resolve_precision
from warpfold.parallel.team import Team
from warpfold.prediction.fold_options import PredictOptions, batch_of
from warpfold.prediction.folder import WHOLE, Journal, PredictionFolder, RepresentationStore, key_of, read_journals
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
from warpfold.prediction.outputs import RESERVED, Prediction, claim_folder, write_prediction
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
from warpfold.prediction.templates import TemplateSources
from warpfold.progress import Progress, as_time, no_progress
from warpfold.scoring.score_table import ScoreTables, row_of
from warpfold.scoring.selection import OF_COMPLEXES, OF_ERRORS, OF_GIVEN, Selection, Shortlist
from warpfold.training.passes import PassPlace
from warpfold.training.planning import grid_for, log

if TYPE_CHECKING:
    from warpfold.data.search.server import AlignmentServer

FORMAT = "warpfold-predictions-1"
LONG = 1000  # residues, from which on planning takes long enough to be said
JOBS = 16  # of each worker: so many that all end at about one time, so few that starting one costs nothing


@dataclass(frozen=True, kw_only=True)
class Share:
    """Who folds: a part of the predictions, on several processes of this machine, or on a cluster (`bulk.pool`)."""

    part: JobPart = WHOLE
    workers: int = 1
    cluster: str | None = None

    @property
    def is_here(self) -> bool:
        """Whether this process folds itself."""
        return self.workers == 1 and self.cluster is None

    def check(self, team: Team, device: str | None) -> None:
        """Raise UserError where torchrun's processes would start others, or for more processes than GPUs."""
        if self.is_here:
            return
        if team.process.ranks > 1:
            raise UserError("--workers and --cluster start processes of their own: use them without torchrun")
        if self.cluster is not None:
            require_cluster(self.cluster)  # before a folder is begun
        if self.cluster is None and device is not None and device.startswith(("cuda", "mps")):
            gpus = torch.cuda.device_count() if device == "cuda" else 1
            if self.workers > gpus:
                raise UserError(f"--workers {self.workers}: more than --device {device} has GPUs ({gpus}); give {gpus}")


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
    guess: Path | str | None = None,
    fixed: Sequence[str] = (),
) -> dict[str, Any]:
    """Fold every query into `out`, with each of the parameters and seeds; return `out/summary.json`.

    query: files, folders or text (`read_query_files`).  params: files, or folders of them.
    A record that cannot be folded, or a prediction that fails, is named under "failures" and the others go on.  A run
    that was stopped continues: what is done is kept.  team: processes that share each protein; all call this, and rank
    0 writes.  An error on one of them, other than bad input, ends the run.
    share: who folds.  As long as others have parts to fold, what is returned is "running", and not that in the folder:
    its predictions and failures are those of this part.
    server: is asked for alignments of sequences that have none; without it nothing is sent anywhere.
    guess: where the first pass starts, a file, a folder of files by the queries' names, or `SELF`.  fixed: chains that
    are their own templates in it.
    Errors: UserError for bad input, or if no record can be folded (nothing is written), and for an `out` with something
    else, or where another one works.
    """
    options, tell, team, share = options or PredictOptions(), progress or no_progress, team or Team(), share or Share()
    start = time.perf_counter()
    for file in [*([query] if isinstance(query, Given) else query), *msas] if team.process.ranks > 1 else []:
        if file == "-" or (isinstance(file, Path) and is_given_pipe(file)):
            raise UserError(f"{file}: is a pipe, which several processes cannot share; give a regular file")
    share.check(team, options.device)
    device = _device_of(options)
    # One choice for all processes, since the run's identity contains it.
    asked_precision, precision = options.precision, _resolve_precision(options, share)
    precision = team.broadcast(precision, "the precision")
    options = replace(options, precision=precision)
    server = server if server is None or team.is_rank_zero else replace(server, say=lambda line: None)
    if options.pairs and guess is not None:
        raise UserError("--pairs makes complexes, of which no structure is known; leave --initial-guess out")
    read, models, asked = _read(query, msas, params, out, options, server, tell, fixed)
    if share.cluster is not None:  # whose workers are in another folder
        models = [replace(model, path=model.path.absolute()) for model in models]
    if guess is not None:
        tell(0, 1, "looking at the initial guesses")
        read = replace(read, found=with_guesses(read.found, guess, fixed)).common_said_once()
        if not read.queries:
            raise next(iter(read.errors.values()))
    check_guess(guess, fixed, models)
    chains = read.queries
    queries = all_pairs(chains) if options.pairs else chains
    total = len(models) * len(queries) * options.seeds
    if team.mesh.data.size > 1:
        _share_out(models, queries, options, team)
    memory = ModelInMemory(options, team)
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
        chains = with_templates(chains, templates, models, read.errors)
        queries = all_pairs(chains) if options.pairs else chains
    seeds = range(options.seed, options.seed + options.seeds)
    items = [FoldItem(*one) for one in product(models, queries, seeds)]
    new = _new_summary(chains, models, options, device)
    new |= {
        "warnings": _run_notices(read, models, templates, fixed),
        "msa_server": server and server.url,
        "asked": asked,
    }
    new["failures"] = [{"name": name, "error": one_line(error)} for name, error in read.errors.items()]
    tables, keep = None, _selection(options, queries, models)
    if isinstance(keep, Selection) or any(query.is_complex or query.designed is not None for query in queries):
        tables = ScoreTables(out, pairs=any(len(query.ids) > 2 for query in queries))
        new["tables"] = tables.names
        if not fixed and any(query.designed is not None and query.is_complex for query in queries):
            text = (
                "scores.csv takes the last chain for the binder and the other chains for its target; name the target "
                "with --fixed-chains if it is another"
            )
            new["warnings"] += [notice.record() for notice in noted([text])]
    store = None if options.store is None else RepresentationStore(options.store, new["run"])
    new |= {} if store is None else {"store": str(store.path)}
    folder = PredictionFolder(out, new, items, share.part, keep, tables, store)
    with closing(folder):
        todo = None
        if team.is_rank_zero:
            batch = 1 if team.process.ranks > 1 or options.alone else batch_of(options.batch)
            groups = in_groups(items, batch, device, options.recycling, options.recycles)
            todo = folder.begin(groups, options.force)
        todo = team.broadcast(todo, "the beginning of the run")
        log_precision(asked_precision, precision, None if share.cluster else device)
        clock, refused = _fold(memory, folder.groups_of(todo), folder, share, tell)
        tell(total, total, "writing the report")
        process = {"device": device, "seconds": round(time.perf_counter() - start, 3), **clock.summary()}
        summary = folder.finish(process, refused) if team.is_rank_zero else None
    return team.broadcast(summary, "the end of the run")


def _device_of(options: PredictOptions) -> str:
    return options.device or ("cuda" if torch.cuda.is_available() else "cpu")


def _resolve_precision(options: PredictOptions, share: Share) -> Precision:
    """Return the precision for the device that will fold; of a cluster, for the device of one of its workers."""
    if share.cluster is None or options.precision != "auto":
        return resolve_precision(options.precision, _device_of(options))
    with pool(share.workers, share.cluster) as executor:
        (precision,) = in_order(_precision_of_worker, [options], executor)
    return precision


def _precision_of_worker(options: PredictOptions) -> Precision:
    return resolve_precision(options.precision, _device_of(options))


def _read(
    given: Given | Sequence[Given],
    msas: Sequence[Path],
    params: Path | Sequence[Path],
    out: Path,
    options: PredictOptions,
    server: "AlignmentServer | None",
    tell: Progress,
    fixed: Sequence[str],
) -> tuple[ReadQueries, list[Params], str | None]:
    """Read queries and parameters; of a folder with parameters of several kinds, those that the queries need.

    Returns a digest of what a server was asked, too; None if it was not.
    """
    asked: str | None = None
    params = [params] if isinstance(params, Path) else params
    gap = options.chain_gap is not None
    waiting = not gap and any(path.is_dir() and len(families_in(path)) > 1 for path in params)
    models = [] if waiting else read_params(params_files(params, options.num_models))
    if gap and (able := [model.path.name for model in models if model.multimer]):
        raise UserError(f"--chain-gap: {able[0]} is AlphaFold-Multimer's, which tells chains apart; leave it out")

    def check(one: Complex) -> None:
        """Raise UserError for what cannot be folded here."""
        if options.pairs and len(one.ids) > 1:
            chain_of_pairs(one)  # which refuses it, before anything is fetched
        if file_name(one.name).lower() in RESERVED:  # its folder would be where the run itself writes
            raise UserError(
                f"{one.name}: no protein can have this name, because the output has {', '.join(RESERVED)} of its own; "
                "give the record another name"
            )
        _check_complexes([one.name] if (options.pairs or len(one.ids) > 1) and not gap else [], models)

    def fetch(lacking: Sequence[tuple[Complex, list[str]]]) -> list[Path]:
        """Ask the server, unless the folder would be refused afterwards."""
        nonlocal asked
        assert server is not None
        sent = [[one.name, [*one.ids], [*one.sequences], without] for one, without in lacking]
        asked = _digest_of(models, options, server.url, sent).hexdigest()
        earlier = claim_folder(out, FORMAT, "", force=True) or {"asked": asked}
        known = asked if earlier.get("msa_server") else None  # of a version that did not note it
        if earlier.get("asked", known) != asked:
            claim_folder(out, FORMAT, "another", options.force)
        return fetching(server, check, tell)(lacking)

    # Whether the records of a FASTA file are the chains of one complex.
    single = waiting or any(not model.multimer for model in models)
    together = not (single or options.pairs) if options.complex is None else options.complex
    asking = fetch if server is not None else None
    read = read_given(given, msas, together, asking, check, fixed, bool(options.pairs))
    if not read.queries:
        raise next(iter(read.errors.values()))
    if waiting:
        complexes = [query.name for query in read.queries if query.is_complex or options.pairs]
        models = read_params(params_files(params, options.num_models, complexes=bool(complexes)))
        _check_complexes(complexes, models)
    return read, models, asked


def _run_notices(
    read: ReadQueries, models: Sequence[Params], templates: TemplateSources | None, fixed: Sequence[str]
) -> list[dict[str, Any]]:
    """Return warnings about the run as a whole: requests that have no effect."""
    texts = []
    if read.hits and not (templates and templates.hits):
        texts.append(f"template hits are not used unless --hits names them: {shorten_list(read.hits)}")
    if (templates or fixed) and (
        without := [model.path.name for model in models if not model.config.templates.enabled]
    ):
        texts.append(f"no template is used with {', '.join(without)}, which take none")
    notices = [*read.notices, *(templates.notices if templates else ()), *noted(texts)]
    return [notice.record() for notice in notices]


def _selection(options: PredictOptions, queries: Sequence[Query], models: Sequence[Params]) -> int | Selection | None:
    """Return what keeps its files.  Errors: UserError for a score that these predictions do not have."""
    keep, complexes = options.selection, [query for query in queries if query.is_complex]
    if not isinstance(keep, Selection):
        return keep
    if keep.best is not None and keep.score is None:
        keep = replace(keep, score="ipsae" if complexes else "mean_plddt")
    for score in keep.scores:
        bare = [model.path for model in models if not model.config.heads.pae]
        if score in OF_ERRORS and bare:
            raise UserError(f"--keep {keep.text}: {bare[0]} has no head of aligned errors, so no {score}; name another")
        if score in OF_COMPLEXES and not complexes:
            raise UserError(f"--keep {keep.text}: single chains have no {score}; name another score")
        if score in OF_GIVEN and not any(query.designed is not None for query in queries):
            raise UserError(
                f"--keep {keep.text}: {score} is to a given complex; fold structures, or give --initial-guess"
            )
    return keep


def _share_out(models: Sequence[Params], queries: Sequence[Query], options: PredictOptions, team: Team) -> None:
    """Have the processes share each protein, or fold others, as is fastest; they have met without a plan."""
    device = _device_of(options)
    config, sample, recycles = models[0].config, models[0].sample, options.recycles
    sizes = [sizes_of_query(query, config, sample, whole=False) for query in queries] * (len(models) * options.seeds)
    fixed: dict[str, Any] = {"precision": options.precision, "kernels": options.kernels}
    fixed |= {} if options.chunk is None else {"chunk": options.chunk or None}
    recycles = config.recycles if recycles is None else recycles
    team.remesh(grid_for(config, sizes, recycles, device, fixed, options.memory_limit, team))


def _check_complexes(found: Sequence[str], models: Sequence[Params]) -> None:
    """Raise UserError if there is a complex, and a model that folds single chains alone.  found: names of complexes."""
    unable = [model.path for model in models if not model.multimer]
    if found and unable:
        raise UserError(
            f"{unable[0]}: parameters for single chains, but {found[0]} is a complex; give AlphaFold-Multimer's "
            f"({MULTIMERS}), --chain-gap 200, or fold each chain alone"
        )


def _new_summary(
    queries: Sequence[Query], models: Sequence[Params], options: PredictOptions, device: str
) -> dict[str, Any]:
    settings = {"seed": options.seed, "seeds": options.seeds, **options.identity_settings(models[0])}
    run = _digest_of(models, options)
    for part in (part for query in queries for part in query.parts()):
        run.update(part)
    pairs = {"pairs": [query.name for query in queries]} if options.pairs else {}
    run.update(b"all pairs" if pairs else b"")
    return {
        "format": FORMAT,
        "status": "running",
        "run": run.hexdigest(),
        "params": models[0].summary(),
        "models": [{"name": model.name, **model.summary(), **options.identity_settings(model)} for model in models],
        "settings": settings,
        "device": device,
        "versions": {"warpfold": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "input_warnings": {query.name: [one.record() for one in query.notices] for query in queries if query.notices},
        "predictions": [],
        "failures": [],
        "ranking": {},
        **pairs,
        "refused": {},  # why fast operations were not used, and how often
        "seconds": 0.0,
    }


def _digest_of(models: Sequence[Params], options: PredictOptions, *more: Any) -> "hashlib._Hash":
    """Return a digest of what decides the result beside the queries."""
    identities = [[model.digest, options.identity_settings(model)] for model in models]
    return hashlib.sha256(json.dumps([options.seed, options.seeds, identities, *more]).encode())


class ModelInMemory:
    """The model that folds: the parameters of one are given up before those of the next are loaded."""

    def __init__(self, options: PredictOptions, team: Team) -> None:
        self.options, self.team = options, team
        self._name: str | None = None
        self._predictor: Predictor | None = None

    def load(self, params: Params) -> Predictor:
        """Return the predictor of a model.  Errors: UserError as in `prediction.predictor.load`."""
        if self._predictor is None or self._name != params.name:
            self._predictor = None
            o, sample = self.options, params.sample
            self._predictor = load(
                params.path, o.device, o.chunk, o.precision, sample, self.team, o.kernels, o.offload, o.memory,
                max_msa=o.max_msa, max_extra=o.max_extra, dropout=o.dropout, chain_gap=o.chain_gap,
                graphs=o.graphs,
            )  # fmt: skip
            self._predictor.recycling = o.recycling
            self._name = params.name
        return self._predictor


def _fold(
    memory: ModelInMemory, groups: Sequence[Group], folder: PredictionFolder, share: Share, tell: Progress
) -> tuple[Clock, dict[str, int]]:
    """Fold groups into a folder; return the seconds of all who did, and why fast operations were not used.

    Errors: UserError for parameters that do not fit, or a cluster that is not there; TeamError.
    """
    bar, team, options = ProgressOfRun(tell, len(folder.items), groups), memory.team, memory.options
    clock, refused, refused_before = Clock(), dict[str, int](), refusals()
    if share.is_here:
        several = team.mesh.data.size > 1
        if folder.journal is None and team.is_example_leader and several:
            folder.journal = Journal(
                folder.out, folder.run, folder.part, f"rank{team.process.rank}", folder.tables, folder.shortlist()
            )

        def record(outcome: FoldOutcome) -> None:
            if folder.journal is not None:
                folder.journal.add(outcome)
            bar.move([outcome.item])

        shortlist = None if folder.journal is None else folder.journal.shortlist
        write = _writer(folder.out, folder.is_several, shortlist, options)
        mine = taken(groups, team) if several else groups
        clock = fold_groups(memory.load, options.asked, team, mine, write, record, bar.follow)
        if several:
            team.wait_for_all("the end of the predictions")
        return clock, refusals(refused_before)
    out, workers = folder.out.absolute(), 0 if share.cluster else share.workers
    tables = None if folder.tables is None else replace(folder.tables, out=out)

    def left(some: list[FoldJob]) -> list[FoldJob]:
        """Return jobs of workers that died without what they had done."""
        done = {key_of(row["of"]) for row in read_journals(out, folder.run) if "entry" in row}
        groups = [[tuple(item for item in group if item.key not in done) for group in job.groups] for job in some]
        return [replace(job, groups=[group for group in own if group]) for job, own in zip(some, groups)]

    with pool(share.workers, share.cluster) as executor:
        assert executor is not None
        jobs = [
            FoldJob(some, out, folder.run, folder.part, folder.is_several, options, workers, tables, folder.keep)
            for some in in_jobs(groups, JOBS * executor.size)
        ]
        for job, (seconds, refusals_of_job) in zip(jobs, in_order(fold_job, jobs, executor, again=left)):
            clock.add(seconds)
            for reason, count in refusals_of_job.items():
                refused[reason] = refused.get(reason, 0) + count
            bar.move([item for group in job.groups for item in group])
    return clock, refused


@dataclass(frozen=True)
class FoldJob:
    """Groups that a worker folds, and how."""

    groups: Sequence[Group]
    out: Path
    run: str
    part: JobPart
    several: bool
    options: PredictOptions
    workers: int  # of this machine; 0: of a cluster
    tables: ScoreTables | None
    keep: int | Selection | None


def in_jobs(groups: Sequence[Group], count: int) -> Iterator[list[Group]]:
    """Yield runs of neighbouring groups of one model, of a cost of about 1 / count of all together."""
    most, some = cost_of(groups) / count, list[Group]()
    for group in groups:
        if some and (cost_of([*some, group]) > most or group[0].model != some[0][0].model):
            yield some
            some = []
        some = [*some, group]
    if some:
        yield some


def fold_job(job: FoldJob) -> tuple[Clock, dict[str, int]]:
    """Fold groups in a worker process, which keeps its model from job to job; return what `_fold` does.

    It writes the files and a journal.  Of several GPUs it takes the one with its number.
    """
    refused_before, number = refusals(), worker_number()
    device = _device_of(job.options)
    if device == "cuda" and number is not None and torch.cuda.device_count() > 1:
        device = f"cuda:{number % torch.cuda.device_count()}"
    if device == "cpu" and job.workers:
        torch.set_num_threads(max(1, cores() // job.workers))
    memory, name = _memory_of(replace(job.options, device=device)), file_name(f"{platform.node()}-{os.getpid()}")
    shortlist = Shortlist(job.keep) if isinstance(job.keep, Selection) else None
    with closing(Journal(job.out, job.run, job.part, name, job.tables, shortlist)) as journal:
        write = _writer(job.out, job.several, shortlist, job.options)
        clock = fold_groups(memory.load, memory.options.asked, memory.team, job.groups, write, journal.add)
    return clock, refusals(refused_before)


@lru_cache(maxsize=1)
def _memory_of(options: PredictOptions) -> ModelInMemory:
    """Return the worker's model, which stays."""
    return ModelInMemory(options, Team())


def _writer(out: Path, several: bool, shortlist: Shortlist | None, options: PredictOptions) -> Write:
    wanted = None if shortlist is None else lambda entry: shortlist.wants(row_of(entry))
    pair = None if options.store is None else options.pair_representation

    def write(item: FoldItem, prediction: Prediction) -> dict[str, Any]:
        """Write a prediction with what its query says of it."""
        outcomes = [asdict(outcome) for outcome in item.query.outcomes]
        below = item.below if several else ""
        query, made = item.query, replace(prediction, templates=outcomes)
        details = {**made.details, "model": item.model.name}
        if query.guess is not None:
            details |= {"initial_guess": Path(query.guess.source).name, "fixed_chains": list(query.fixed)}
        made = replace(made, details=details)
        return write_prediction(made, out, below, query.notices, query.fixed, query.designed, wanted, pair)

    return write


class ProgressOfRun:
    """Tells how many predictions there are, where the model is in one, and the time that is left by what they cost.

    One thread folds while another writes what was folded before, and both tell: the number never falls.
    """

    def __init__(self, tell: Progress, total: int, groups: Sequence[Group]) -> None:
        self._tell, self._total = tell, total
        self._done = total - sum(map(len, groups))  # by an earlier run, or by others
        self._cost, self._left, self._start = 0.0, cost_of(groups), time.perf_counter()
        self._shown: float = self._done
        self._lock = threading.Lock()
        tell(self._done, total, groups[0][0].query.name if groups else "")

    def follow(self, group: Group, place: PassPlace) -> None:
        """Show where the model is in a group that it folds; what has been folded may still be being written."""
        cost = place.share * cost_of([group])
        name = group[0].query.name if len(group) == 1 else f"{len(group)} together"
        short = name if len(name) <= 8 else f"{name[:7]}…"  # all of it fits a terminal of 80 columns
        self._show(place.share * len(group), f"{short}{self._time_left(cost)}, {place}")

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
        """Return the words for the time that is left, where so much of what is being folded is done; or none."""
        done, left = self._cost + cost, self._left - cost
        seconds = (time.perf_counter() - self._start) * left / done if done else 0.0
        return f", {as_time(seconds)} left" if left > 0 and seconds >= 1 else ""
