"""Get alignments from the server that the user has named; nobody is asked otherwise (docs/predict.md)."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from warpfold import arguments
from warpfold.arguments import PathLike
from warpfold.data.example.complexes import Complex
from warpfold.errors import UserError
from warpfold.prediction.queries import FetchAlignments
from warpfold.progress import Progress, no_progress

if TYPE_CHECKING:
    from warpfold.data.search.server import AlignmentServer

ServerLike = Union[str, "AlignmentServer", None]
log = logging.getLogger("warpfold.plan")  # what it does is told where plans are


def server_of(server: Any, cache: PathLike | None, default: Path) -> "AlignmentServer | None":
    """Return the server that is meant by an address, or None; cache: the folder for its answers, if not `default`.

    Errors: UserError for an address that is none, and for a cache without a server.
    """
    if server is None:
        if cache is not None:
            raise UserError("--msa-cache has no effect without --msa-server; name a server, or leave it out")
        return None
    from warpfold.data.search.server import AlignmentServer

    if isinstance(server, AlignmentServer):
        return server
    folder = arguments.path_or_none("msa_cache", cache) or default
    return AlignmentServer(arguments.text("msa_server", server), folder, say=log.info)


def fetching(
    server: "AlignmentServer", check: Callable[[Complex], None], tell: Progress = no_progress
) -> FetchAlignments:
    """Return what gets the alignments that queries lack.  check: given each query, before any is sent.

    Errors: UserError as of `data.search.fetch.alignments_of`.
    """

    def fetch(lacking: Sequence[tuple[Complex, list[str]]]) -> list[Path]:
        from warpfold.data.search.fetch import alignments_of, wanted_of

        for one, _ in lacking:
            check(one)
        chains = [(one, dict(zip(one.ids, one.sequences)), without) for one, without in lacking]
        return alignments_of(server, [wanted_of(one.name, own, without) for one, own, without in chains], tell)

    return fetch
