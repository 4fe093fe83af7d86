"""`warpfold search`."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from warpfold import arguments
from warpfold.arguments import (
    Cluster,
    PathLike,
    Paths,
    Shard,
    Workers,
    argument,
    checked,
    decides,
    reads,
    runs,
    writes,
)
from warpfold.bulk import JobPart
from warpfold.cli.common import Answer, command, log_plans, warn
from warpfold.errors import UserError, listed
from warpfold.prediction.request import MsaServer
from warpfold.progress import Progress, progress_bar


@checked()
def search(
    queries: Annotated[
        Paths,
        argument(
            "As for `predict`: files, folders, - or sequences; every unique chain is searched for.",
            shell=list[str],
            path="local",
        ),
    ],
    database: Annotated[
        Paths | Mapping[str, PathLike] | None,
        reads(
            "FILE or NAME=FILE: FASTA, gz or not; for mmseqs2 and hhblits in their format. `uniprot` is for pairing.",
            shell=list[str] | None,
            path="local",
        ),
    ] = None,
    out: Annotated[
        PathLike | None, writes("Folder for NAME/DATABASE.a3m; the same command continues a stopped run.")
    ] = None,
    *,
    msa_server: MsaServer = None,
    template_database: Annotated[PathLike | None, reads("FASTA like pdb_seqres, searched for template hits.")] = None,
    engine: Annotated[
        Literal["jackhmmer", "mmseqs2", "hhblits"], decides("jackhmmer is built in; the others must be installed.")
    ] = "jackhmmer",
    iterations: Annotated[
        int | None, decides("1 to 3; default: 1 for jackhmmer, 3 for the others, as in AlphaFold2.", min=1, max=3)
    ] = None,
    e_value: Annotated[
        float | None, decides("Largest E-value of a hit; default: 1e-4 for jackhmmer, 1e-3 for others.", above=0)
    ] = None,
    max_hits: Annotated[
        int | Mapping[str, int] | Sequence[str] | None,
        decides(
            "[NAME=]N rows of an alignment, with the query; default: uniref90 10000, mgnify 501, uniprot 50000, or "
            "all.",
            shell=list[str] | None,
        ),
    ] = None,
    cache: Annotated[
        PathLike | None, runs("Folder of cached results, which several runs may share; default: OUT/cache.")
    ] = None,
    workers: Workers = 1,
    threads: Annotated[int | None, runs("Threads of a process; default: all cores, shared equally.", min=1)] = None,
    cluster: Cluster = None,
    shard: Shard = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Search for alignments and template hits of proteins in local databases, or on a server if you name one.

    queries: files, folders, or sequences. database: files, or a mapping of names to files. max_hits: rows, or a mapping
    of names to rows. Returns the report of `out/search.json`, with failed proteins under "failures".
    Errors: UserError for invalid queries or arguments, and if `out` has other files.
    """
    if out is None:
        raise UserError("search: --out is missing. Pass a folder for the results.")
    query_inputs, folder, tell = arguments.queries("queries", queries), Path(out), arguments.progress_of(progress)
    if msa_server is not None:
        from warpfold.data.search.fetch import search_by_server
        from warpfold.prediction.request import server_of

        local_options = {
            "database": database,
            "template-database": template_database,
            "iterations": iterations,
            "e-value": e_value,
            "max-hits": max_hits,
            "cluster": cluster,
            "shard": shard,
        }
        for name in (name for name, value in local_options.items() if value):
            raise UserError(f"--{name}: has no effect with --msa-server. Remove one of them.")
        server = server_of(msa_server, cache, folder / "cache")
        assert server is not None
        return search_by_server(query_inputs, server, folder, tell)
    if not database:
        raise UserError("search: --database is missing. Pass a local database, or a server with --msa-server.")
    from warpfold.data.search import search as searching
    from warpfold.data.search.database import Database, parse_max_hits

    if isinstance(max_hits, Mapping):
        max_hits = [f"{key}={count}" for key, count in max_hits.items()]
    rows = parse_max_hits([str(max_hits)] if isinstance(max_hits, int | str) else list(max_hits or ()))
    if isinstance(database, Mapping):
        databases = [f"{key}={os.fspath(arguments.path('database', file))}" for key, file in database.items()]
    else:
        databases = [str(file) for file in arguments.paths("database", database)]
    settings = {"iterations": iterations, "e_value": e_value}
    return searching.search(
        query_inputs,
        [Database.parse(text, rows) for text in databases],
        folder,
        searching.ENGINES[engine](**{key: value for key, value in settings.items() if value is not None}),
        arguments.path_or_none("template_database", template_database),
        searching.SearchOptions(
            arguments.path_or_none("cache", cache),
            workers,
            threads,
            cluster,
            JobPart.parse(shard) if shard else None,
        ),
        tell,
    )


@command(
    search,
    continues=True,
    example="Example:  warpfold search proteins.fasta --database uniref90=uniref90.fasta mgnify=mgy_clusters.fa.gz "
    "--template-database pdb_seqres.txt --out found",
)
def search_in_shell(given: dict[str, Any]) -> Answer:
    """Search for alignments and template hits of proteins in local databases, or on a server if you name one."""
    with progress_bar() as progress, log_plans():
        report = search(**given, progress=progress)
    lines = []
    for protein in report["proteins"]:
        hits = (f"{entry['hits']} in {name}" for name, entry in protein["databases"].items())
        lines.append(f"{protein['name']}: {', '.join(hits) or 'nothing'}")
    lines.append(f"{given['out']}: {len(report['proteins'])} proteins, {report['seconds']:.0f} s")
    without_hits = [
        protein["name"]
        for protein in report["proteins"]
        if not any(entry["hits"] for entry in protein["databases"].values() if entry["file"].endswith(".a3m"))
    ]
    if without_hits:
        warn(f"warning: no hit in any database, an alignment of one row: {listed(without_hits)}")
    for failure in report["failures"]:
        database_text = f" in {failure['database']}" if "database" in failure else ""
        warn(f"failed {failure['name']}{database_text}: {failure['error']}")
    return Answer(report, lines, bool(report["failures"]))
