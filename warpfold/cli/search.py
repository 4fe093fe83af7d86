"""`warpfold search`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from warpfold.cli.common import (
    AsJson,
    Lists,
    MsaServer,
    Workers,
    alignment_server,
    app,
    argument,
    decides,
    reads,
    runs,
    show,
    writes,
)
from warpfold.errors import UserError
from warpfold.progress import progress_bar


class EngineName(StrEnum):
    """The program that searches."""

    jackhmmer = "jackhmmer"
    mmseqs2 = "mmseqs2"
    hhblits = "hhblits"


@app.command(
    cls=Lists,
    epilog="Example:  warpfold search proteins.fasta --database uniref90=uniref90.fasta mgnify=mgy_clusters.fa.gz "
    "--template-database pdb_seqres.txt --out found",
)
def search(
    queries: Annotated[
        list[str],
        argument("What `predict` takes: files, folders, - or sequences; every different chain is searched for."),
    ],
    database: Annotated[
        list[str] | None,
        reads(
            "FILE or NAME=FILE: FASTA, gz or not; for mmseqs2 and hhblits in their own format. `uniprot` is to pair."
        ),
    ] = None,
    out: Annotated[
        Path | None, writes("Folder for NAME/DATABASE.a3m; the same command continues a stopped run.", "--out", "-o")
    ] = None,
    msa_server: MsaServer = None,
    template_database: Annotated[Path | None, reads("FASTA like pdb_seqres, to find template hits in.")] = None,
    engine: Annotated[EngineName, decides("jackhmmer is built in; the others must be installed.")] = (
        EngineName.jackhmmer
    ),
    iterations: Annotated[
        int | None, decides("1 to 3; default: 1 for jackhmmer, 3 for the others, as in AlphaFold2.", min=1, max=3)
    ] = None,
    e_value: Annotated[
        float | None, decides("Of a hit, at most; default: 1e-4 for jackhmmer, 1e-3 for others.")
    ] = None,
    max_hits: Annotated[
        list[str] | None,
        decides(
            "[NAME=]N rows of an alignment, with the query; default: uniref90 10000, mgnify 501, uniprot 50000, or all."
        ),
    ] = None,
    cache: Annotated[
        Path | None, runs("Folder where results are kept, for several runs to share; default: OUT/cache.")
    ] = None,
    workers: Workers = 1,
    threads: Annotated[int | None, runs("Threads of a process; default: all cores, shared equally.", min=1)] = None,
    cluster: Annotated[str | None, runs("Address of a Dask scheduler, tcp://host:8786.")] = None,
    shard: Annotated[str | None, runs("I/N: only the I-th of N parts, for job arrays; all write to one OUT.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find alignments and template hits for proteins, in databases that you have, or on a server if you name one."""
    from warpfold import commands

    if out is None:
        raise UserError("search: --out is missing; name the folder for what is found")
    server = alignment_server(msa_server, cache if msa_server else None, out / "cache")
    with progress_bar() as progress:
        report = commands.search(
            queries, database, out, msa_server=server, template_database=template_database, engine=engine.value,
            iterations=iterations, e_value=e_value,
            max_hits=max_hits, cache=cache, workers=workers, threads=threads, cluster=cluster, shard=shard,
            progress=progress,
        )  # fmt: skip
    _say(report, out, as_json)


def _say(report: dict[str, Any], out: Path, as_json: bool) -> None:
    """Print the report, or a line for each protein, and what was not found; ends the command."""
    if as_json:
        show(report)
    else:
        for protein in report["proteins"]:
            found = (f"{entry['hits']} in {name}" for name, entry in protein["databases"].items())
            typer.echo(f"{protein['name']}: {', '.join(found) or 'nothing'}")
        typer.echo(f"{out}: {len(report['proteins'])} proteins, {report['seconds']:.0f} s")
    found_in = [(one["name"], one["databases"].values()) for one in report["proteins"]]
    alone = [name for name, each in found_in if not any(e["hits"] for e in each if e["file"].endswith(".a3m"))]
    if alone:
        some = ", ".join(alone[:5]) + (" ..." if len(alone) > 5 else "")
        typer.echo(f"warning: no hit in any database, an alignment of one row: {some}", err=True)
    for failure in report["failures"]:
        where = f" in {failure['database']}" if "database" in failure else ""
        typer.echo(f"failed {failure['name']}{where}: {failure['error']}", err=True)
    raise typer.Exit(1 if report["failures"] else 0)
