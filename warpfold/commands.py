"""Commands as functions: `warpfold.train(...)` and `warpfold train` are one (docs/python.md).

Names and defaults are the command line's, which calls these; a test compares them.  What is wrong with an argument is a
UserError at the call, before any work is done.
"""

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union

from warpfold import arguments
from warpfold.arguments import Changes, PathLike, Paths
from warpfold.errors import UserError
from warpfold.progress import Progress
from warpfold.settings import build

if TYPE_CHECKING:  # what a command needs loads when it is called: `pack` runs without torch
    from warpfold.data.load.order import Source
    from warpfold.data.pack.inputs import PackOptions
    from warpfold.data.pack.report import PackReport
    from warpfold.data.search.database import Database
    from warpfold.data.search.server import AlignmentServer
    from warpfold.data.store.store import Store
    from warpfold.engine.watch import Watching
    from warpfold.parallel.team import Team
    from warpfold.prediction.outputs import Prediction
    from warpfold.scoring.score import Score
    from warpfold.training.config import GivenSettings, RunConfig
    from warpfold.training.train import Summary

log = logging.getLogger("warpfold.plan")

StoreLike = Union[PathLike, "Store", "Source"]  # a path may end in =WEIGHT
Settings = Union[PathLike, Mapping[str, Any], "RunConfig", "GivenSettings"]
Engine = Literal["jackhmmer", "mmseqs2", "hhblits"]


@arguments.names_arguments()
def sample(
    out: PathLike,
    *,
    proteins: int = 200,
    dimers: int = 0,
    min_length: int = 30,
    max_length: int = 60,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Make sample proteins with alignments in the new folder `out`, to try things on; return what each of them is."""
    from warpfold.data.synthetic.folder import generate

    return generate(
        arguments.path("out", out),
        arguments.whole("proteins", proteins, 0),
        arguments.whole("seed", seed),
        dimers=arguments.whole("dimers", dimers, 0),
        min_length=arguments.whole("min_length", min_length, 1),
        max_length=arguments.whole("max_length", max_length, 1),
        progress=arguments.progress_of(progress),
    )


@arguments.names_arguments()
def search(
    queries: Paths,
    database: Paths | Mapping[str, PathLike] | None = None,
    out: PathLike | None = None,
    *,
    msa_server: "str | AlignmentServer | None" = None,
    template_database: PathLike | None = None,
    engine: Engine = "jackhmmer",
    iterations: int | None = None,
    e_value: float | None = None,
    max_hits: int | Mapping[str, int] | Sequence[str] | None = None,
    cache: PathLike | None = None,
    workers: int = 1,
    threads: int | None = None,
    cluster: str | None = None,
    shard: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Find alignments and template hits for proteins, in databases that you have, or on a server that you name.

    queries: files, folders, or sequences.  database: files, NAME=FILE, or name -> file.  msa_server: the address of a
    server to ask instead; without it none is.  max_hits: rows of an alignment, of all databases or by name.
    Returns the report, as in `out/search.json`: proteins that failed are named under "failures".
    Errors: UserError for bad queries or arguments, and an `out` that holds something else.
    """
    if out is None:
        raise UserError("search: out is missing; name the folder for what is found")
    if msa_server is not None:
        of_databases = {
            "--database": database, "--template-database": template_database, "--iterations": iterations,
            "--e-value": e_value, "--max-hits": max_hits, "--cluster": cluster, "--shard": shard,
        }  # fmt: skip
        for name in (name for name, value in of_databases.items() if value):
            raise UserError(f"{name}: has no effect with --msa-server; leave one of them out")
        return _ask(arguments.queries("queries", queries), msa_server, arguments.path("out", out), cache, progress)
    if not database:
        raise UserError("search: --database is missing; name one that you have, or a server with --msa-server")
    from warpfold.data.search import search as searching

    name = arguments.one_of("engine", engine, searching.ENGINES)
    chosen = {
        "iterations": arguments.whole_or_none("iterations", iterations, 1, 3),
        "e_value": arguments.number_or_none("e_value", e_value, over=0),
    }
    finder = searching.ENGINES[name](**{key: value for key, value in chosen.items() if value is not None})
    options = searching.SearchOptions(
        arguments.path_or_none("cache", cache), arguments.whole("workers", workers, 1),
        arguments.whole_or_none("threads", threads, 1), arguments.text_or_none("cluster", cluster),
        arguments.part_of(shard),
    )  # fmt: skip
    return searching.search(
        arguments.queries("queries", queries),
        _databases(database, max_hits),
        arguments.path("out", out),
        finder,
        arguments.path_or_none("template_database", template_database),
        options,
        arguments.progress_of(progress),
    )


def _databases(
    database: Paths | Mapping[str, PathLike], max_hits: int | Mapping[str, int] | Sequence[str] | None
) -> "list[Database]":
    """Return databases, however they are given.  Errors: UserError for names and numbers that are none."""
    from warpfold.data.search.database import Database, parse_max_hits

    if isinstance(max_hits, Mapping):
        most = [f"{key}={count}" for key, count in max_hits.items()]
    else:
        most = [str(max_hits)] if isinstance(max_hits, int | str) else list(max_hits or ())
    rows = parse_max_hits(most)
    if isinstance(database, Mapping):
        given = [f"{key}={os.fspath(arguments.path('database', file))}" for key, file in database.items()]
    else:
        given = [str(file) for file in arguments.paths("database", database)]
    return [Database.parse(text, rows) for text in given]


def _ask(
    queries: list[str | Path], server: "str | AlignmentServer", out: Path, cache: PathLike | None, tell: Progress | None
) -> dict[str, Any]:
    """Ask a server for all alignments."""
    from warpfold.data.search.fetch import search_by_server
    from warpfold.data.search.server import AlignmentServer

    if not isinstance(server, AlignmentServer):
        folder = arguments.path_or_none("cache", cache) or out / "cache"
        server = AlignmentServer(arguments.text("msa_server", server), folder, say=log.info)
    return search_by_server(queries, server, out, arguments.progress_of(tell))


@arguments.names_arguments()
def pack(
    structures: Paths | None = None,
    msas: Paths | None = None,
    out: PathLike | None = None,
    *,
    hits: Paths | None = None,
    template_structures: Paths | None = None,
    clusters: PathLike | None = None,
    max_resolution: float = 9.0,
    max_single: float = 0.8,
    min_length: int = 10,
    max_length: int | None = None,
    released_after: str | None = None,
    released_before: str | None = None,
    require_msa: bool = False,
    max_template_date: str | None = None,
    cluster_identity: float = 0.4,
    assemblies: bool = False,
    all_assemblies: bool = False,
    max_chains: int = 20,
    max_residues: int = 10_000,
    max_file_gb: float = 4.0,
    workers: int = 1,
    cluster: str | None = None,
    shard: str | None = None,
    merge: Paths | None = None,
    progress: Progress | None = None,
) -> "PackReport":
    """Make the store `out`, from which `train` reads, of structures, alignments and template hits; return the report.

    merge: in place of packing, join the parts that `shard` made.  A stopped run is continued by the same call.
    Errors: UserError for bad arguments and paths, where nothing is kept, and for an `out` that is something else.
    """
    from warpfold.data.pack import pack as packing

    if out is None:
        raise UserError("pack: out is missing; name the store to make")
    if (structures is None) == (merge is None):
        raise UserError("pack: give structures, or parts to merge, and not both")
    workers, tell = arguments.whole("workers", workers, 1), arguments.progress_of(progress)
    cluster, part = arguments.text_or_none("cluster", cluster), arguments.part_of(shard)
    if merge is not None:
        parts = arguments.paths("merge", merge)
        return packing.merge(parts, arguments.path("out", out), workers, cluster, tell)
    options = _pack_options(
        assemblies, all_assemblies, max_resolution=max_resolution, max_single=max_single, min_length=min_length,
        max_length=max_length, released_after=released_after, released_before=released_before, require_msa=require_msa,
        max_template_date=max_template_date, cluster_identity=cluster_identity, max_chains=max_chains,
        max_residues=max_residues, max_file_gb=max_file_gb,
    )  # fmt: skip
    return packing.pack(
        arguments.paths("structures", structures), arguments.paths("msas", msas), arguments.path("out", out), options,
        hits=arguments.paths("hits", hits), clusters=arguments.path_or_none("clusters", clusters),
        template_structures=arguments.paths("template_structures", template_structures),
        workers=workers, cluster=cluster, part=part, progress=tell,
    )  # fmt: skip


def _pack_options(assemblies: bool, all_assemblies: bool, **given: Any) -> "PackOptions":
    """Return what decides the content of a store.  Errors: UserError for what is of a wrong kind."""
    from warpfold.data.pack.inputs import PackOptions

    kind = "first" if arguments.flag("assemblies", assemblies) else "none"
    given["assemblies"] = "all" if arguments.flag("all_assemblies", all_assemblies) else kind
    known = {name: value for name, value in given.items() if value is not None}
    odd: dict[str, Any] = {name: x for name, x in known.items() if isinstance(x, float) and not math.isfinite(x)}
    kinds = build(PackOptions, {name: value for name, value in known.items() if name not in odd}, "pack")
    return replace(kinds, **odd)  # which refuses them by the options' names


@arguments.names_arguments()
def train(
    settings: Settings,
    data: StoreLike | Sequence[StoreLike],
    out: PathLike,
    *,
    init: PathLike | None = None,
    replay: PathLike | None = None,
    set: Changes | None = None,
    device: str | None = None,
    memory: str | int | None = None,
    cluster: PathLike | None = None,
    strict: bool = False,
    watch: "Watching | None" = None,
    team: "Team | None" = None,
) -> "Summary":
    """Train or fine-tune into the folder `out`, or continue the run that is there; return how it ended.

    settings: a preset's name, a TOML file, its values, or a `RunConfig`.  data: stores, or their paths, each with
    =WEIGHT if it has one.  init: parameters to start from.  set: settings over those, {"train.steps": 500}.  memory:
    of the device, "24GB" or bytes.  cluster: how the processes are joined, a file of `warpfold doctor --cluster`; else
    they measure it.  watch: who is told of the run: watchers, or functions of each row of metrics.jsonl
    (docs/watching.md).  team: processes that train together; all call this.
    Errors: UserError for bad arguments, settings, stores and parameters, and a folder of another run.
    """
    from warpfold.cost.links import read_cluster
    from warpfold.device import slow_precision
    from warpfold.engine.checkpoint import RunFolder
    from warpfold.engine.loop import StopSignals
    from warpfold.engine.watch import as_watchers
    from warpfold.training import train as training
    from warpfold.training.planning import plan_training

    team, links = arguments.team_of(team), arguments.path_or_none("cluster", cluster)
    changes = arguments.changes_of("set", set)
    changes += ['plan.kernels="strict"'] if arguments.flag("strict", strict) else []
    given = as_settings(settings, changes)
    where, folder, most = arguments.device_of(device), arguments.path("out", out), memory_of(memory)
    first, followed = arguments.path_or_none("init", init), arguments.path_or_none("replay", replay)
    told = as_watchers(watch)
    stores = sources_of(data, given.config().model.multimer is not None)
    joined = None if links is None else read_cluster(links)
    if first is not None:  # before minutes of planning, by one process: a file of hundreds of MB may be read
        _check_init(given, first, team)
    config, said = plan_training(given, folder, where, most, team, joined)
    team.remesh(config.plan, idle=given.auto)
    if team.process.is_idle:
        log.warning("rank %d: the plan has no use for this process; it waits until the run ends", team.process.rank)
        with StopSignals():  # the others end the run
            return training.Summary(**team.wait_idle(), params=RunFolder(folder, writes=False).params)
    if said and team.is_rank_zero:
        log.info("plan: %s", said)
    if team.is_rank_zero and (slow := slow_precision(config.plan.precision, where)):
        log.warning("%s", slow)
    return training.train(config, stores, folder, init=first, replay=followed, device=where, watch=told, team=team)


@arguments.names_arguments()
def evaluate(
    run: PathLike,
    data: StoreLike | Sequence[StoreLike],
    *,
    follow: bool = False,
    device: str | None = None,
    watch: "Watching | None" = None,
) -> list[dict[str, Any]]:
    """Fold the held-out proteins of a training with each of its checkpoints that has no row yet; return the new rows.

    run: the folder of `train`.  data: the stores that it trains on.  follow: wait for further checkpoints, until that
    of the last step.  watch: who is told: watchers, or functions of each row.
    Errors: UserError for a folder that is no run's, for other data, and where another process evaluates the run.
    """
    from warpfold.training import evaluate as evaluating

    folder = arguments.path("run", run)
    stores = sources_of(data, evaluating.settings_of(folder).model.multimer is not None)
    where, waits = arguments.device_of(device), arguments.flag("follow", follow)
    return evaluating.evaluate(folder, stores, follow=waits, device=where, watch=watch)


def _check_init(given: "GivenSettings", init: Path, team: "Team") -> None:
    """Raise UserError, on all ranks, for parameters that do not fit the settings of a training."""
    from warpfold.training.first_weights import check_first

    config, wrong = given.config(), ""
    if team.is_rank_zero:
        try:
            check_first(config.model, init, config.train.new_heads)
        except UserError as error:
            wrong = str(error)
    if wrong := team.broadcast(wrong, "the parameters to start from"):
        raise UserError(wrong)


def as_settings(settings: Settings, changes: Sequence[str] = ()) -> "GivenSettings":
    """Return the settings of a run, however they are given.  Errors: UserError for what is none."""
    from warpfold.training.config import GivenSettings, RunConfig, load_settings

    if isinstance(settings, GivenSettings):
        if changes:
            raise UserError(f"{changes[0]}: these settings have been read; change them when they are")
        return settings
    if not isinstance(settings, str | os.PathLike | Mapping | RunConfig):
        what = arguments.shown(settings)
        raise UserError(f"settings = {what}: a preset's name, a TOML file, a mapping or a RunConfig is needed")
    return load_settings(Path(settings) if isinstance(settings, os.PathLike) else settings, changes)


def sources_of(data: StoreLike | Sequence[StoreLike], assemblies: bool = False) -> "list[Source]":
    """Return stores with their weights: of "pdb=0.25" 0.25, of one without any 1.

    assemblies: to draw complexes from, where a store has any, not chains.
    Errors: UserError for what is no store.
    """
    from warpfold.data.load.order import Source
    from warpfold.data.store.store import Store

    several: Sequence[Any] = data if arguments.is_list(data) else [data]  # type: ignore[assignment]
    if not several:
        raise UserError("data: is empty; name a store that `warpfold pack` made")
    found = []
    for one in several:
        if isinstance(one, Source):
            found.append(one)
            continue
        weight = "1"
        if not isinstance(one, Store):
            path, equals, weight = str(arguments.path("data", one)).rpartition("=")
            if not equals or Path(one).exists():
                path, weight = str(one), "1"
        try:
            store = one if isinstance(one, Store) else Store(path)
            found.append(Source(store, weight=float(weight), assemblies=assemblies))
        except ValueError:
            raise UserError(f"--data {one}: {weight!r} is not a number; expected STORE or STORE=WEIGHT") from None
    return found


def memory_of(memory: str | int | None) -> int | None:
    """Return an amount of memory in bytes, given so or as "24GB".  Errors: UserError for anything else."""
    from warpfold.cost.machine import parse_memory

    return parse_memory(memory) if isinstance(memory, str) else arguments.whole_or_none("memory", memory, 1)


@arguments.names_arguments()
def score(
    predicted: "PathLike | Prediction",
    reference: "PathLike | Prediction",
    *,
    chains: str | Mapping[str, str] | None = None,
    assembly: bool = False,
) -> "Score":
    """Compare a structure with its reference: lDDT, GDT, TM-score, RMSD; of complexes also DockQ and other scores.

    Either is an mmCIF or PDB file, or a prediction.  chains: predicted -> reference, also as "A:B,B:C"; default: by
    sequence.  assembly: compare with the first biological assembly of the reference.
    Errors: UserError for files that cannot be read or have nothing in common.
    """
    from warpfold.scoring import score as scoring

    named = chain_pairs(chains) if isinstance(chains, str) else chains
    if named is not None and not isinstance(named, Mapping):
        raise UserError(f'chains = {arguments.shown(chains)}: expected pairs, {{"A": "B"}} or "A:B"')
    ours, theirs = (
        arguments.path(what, given) if not hasattr(given, "structure") else given.structure()
        for what, given in (("predicted", predicted), ("reference", reference))
    )
    return scoring.score_files(ours, theirs, named, arguments.flag("assembly", assembly))


def chain_pairs(text: str) -> dict[str, str]:
    """Return the pairs of "A:B,B:C", predicted -> reference.  Errors: UserError for anything else."""
    pairs = [pair.split(":") for pair in text.split(",")]
    if any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise UserError(f"--chains {text}: expected pairs of predicted:reference, for example A:B,B:C")
    named = dict(pairs)
    if len(named) < len(pairs):
        raise UserError(f"--chains {text}: names a predicted chain twice; name each once")
    return named
