"""`warpfold doctor --cluster`: what all processes of a run check together."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from warpfold.cli.common import device_of, show, show_table, this_process
from warpfold.errors import UserError
from warpfold.files import check_new, write_atomically
from warpfold.progress import are_hidden

if TYPE_CHECKING:
    from warpfold.cluster.doctor import Examined
    from warpfold.cluster.findings import ClusterFinding

FIGURES = (".png", ".svg")
COLORS = {"wrong": typer.colors.RED, "note": typer.colors.YELLOW, "ok": typer.colors.GREEN}
SEVERITY = ("wrong", "note", "not checked", "ok")


@dataclass(frozen=True)
class ResultFiles:
    """Hold where the results go."""

    cluster: Path | None
    figure: Path | None
    as_json: bool

    def check(self) -> None:
        """Raise UserError for files that cannot be made."""
        for file in filter(None, (self.cluster, self.figure)):
            check_new(file)
        if self.figure and self.figure.suffix not in FIGURES:
            raise UserError(f"--figure {self.figure}: not a picture that can be drawn; name it .png or .svg")


def check_cluster(
    stores: Sequence[Path], folder: Path | None, link: str | None, device: str | None, to: ResultFiles
) -> None:
    """Check the cluster with all processes, print from the first what was found, and exit on all: 1 if it is wrong."""
    import torch

    from warpfold.cluster.doctor import LIMIT, Asked, Examined, examine_cluster
    from warpfold.cost.links import network
    from warpfold.parallel.team import TeamError, distributed_context

    began, process = time.monotonic(), this_process()
    where = torch.device(device_of(device, process))
    if link is not None:
        network(link, process.ranks_per_node)
    if process.rank == 0:
        to.check()
    each = process.ranks_per_node  # of the nodes, until they say it themselves
    nodes = [list(range(process.ranks))[start : start + each] for start in range(0, process.ranks, each)]
    latest = [Examined(nodes, where.type)]

    def report(so_far: Examined, what: str) -> None:
        latest[:] = [so_far]
        if process.rank == 0 and not are_hidden():
            typer.echo(f"checking {what} ...", err=True)

    try:
        with _sigterm_as_error(process.rank), distributed_context(process, None, where, LIMIT) as team:
            found = examine_cluster(team, where, os.environ, Asked(stores, folder, link), report)
            if team.is_rank_zero:  # before the others may leave: torchrun ends all when one has
                _say(found, to)
    except TeamError as error:
        if process.rank == 0:
            _say(replace(latest[0], findings=[*latest[0].findings, _lost(error)], seconds=time.monotonic() - began), to)
        raise
    raise typer.Exit(1 if found.wrong else 0)


def _lost(error: UserError) -> "ClusterFinding":
    """Return the finding that a rank was lost, or did not come."""
    from warpfold.cluster.findings import ClusterFinding

    cure = "see what that process and its node say (its log, dmesg); leave the node out"
    return ClusterFinding("ranks", "all ranks answer", "wrong", str(error), cure)


@contextmanager
def _sigterm_as_error(rank: int) -> Iterator[None]:
    """Raise a TeamError at SIGTERM, within the context, so that a doctor that has to end says what it knows."""
    from warpfold.parallel.team import TeamError

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise TeamError(
            f"rank {rank} was asked to end (SIGTERM): torchrun does so when another rank of the node has ended, "
            "which says why itself; Slurm when the time is over"
        )

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(found: "Examined", to: ResultFiles) -> None:
    """Print a report, and write the files that were asked for."""
    if to.cluster and found.cluster:
        found.cluster.save(to.cluster)
    if to.figure and found.links:
        from warpfold.cluster.judge_links import matrices
        from warpfold.report.figures import draw_links

        write_atomically(to.figure, draw_links(matrices(found.links), to.figure.suffix[1:]))
    if to.as_json:
        show(found.as_json())
        return
    _tables(found)
    for one in sorted(found.findings, key=lambda one: SEVERITY.index(one.outcome)):
        typer.echo(_line(one))
    counts = [f"{sum(one.outcome == outcome for one in found.findings)} {outcome}" for outcome in SEVERITY]
    typer.echo(f"\n{', '.join(counts)}; {found.seconds:.0f} s")
    if to.cluster and found.cluster:
        typer.echo(f"measured links: {to.cluster}; `plan`, `train` and `simulate` read it")
    elif to.cluster:
        typer.echo(f"{to.cluster} was not written: there are no links, or nodes are not equal", err=True)


def _tables(found: "Examined") -> None:
    from warpfold.cluster.judge_links import WIDEST, draw, link_rows, matrices
    from warpfold.cluster.ranks import rank_table

    ranks = sum(map(len, found.nodes))
    typer.echo(
        f"{ranks} rank{'s' * (ranks > 1)} on {len(found.nodes)} node{'s' * (len(found.nodes) > 1)}, {found.device}"
    )
    if found.links:
        for matrix in matrices(found.links):
            typer.echo("\n" + "\n".join(draw(matrix)))
        typer.echo("")
        show_table(("links", "measured", "usual", "worst"), link_rows(found.links))
    if found.rates:
        typer.echo("")
        heads, rows = rank_table(found.rates, found.nodes, WIDEST)
        show_table(heads, rows)
    typer.echo("")


def _line(one: "ClusterFinding") -> str:
    color: Any = COLORS.get(one.outcome)
    cure = f"  -> {one.cure}" if one.cure else ""
    outcome = typer.style(f"{one.outcome.upper() if one.outcome == 'wrong' else one.outcome:11}", fg=color)
    return f"{outcome} {one.topic}: {one.check}: {one.says}{cure}"
