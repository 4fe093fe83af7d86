"""`warpfold predict` as a function: `warpfold.predict(...)` and the command are one (docs/python.md)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from warpfold import arguments
from warpfold.arguments import PathLike, Paths
from warpfold.bulk import JobPart
from warpfold.commands import memory_of
from warpfold.errors import UserError
from warpfold.prediction.fold_options import PredictOptions, Recycling, batch_of
from warpfold.prediction.predict import predict as fold_all
from warpfold.prediction.queries import ServerLike, server_of
from warpfold.prediction.share import Share
from warpfold.prediction.templates import TemplateSources
from warpfold.progress import Progress

if TYPE_CHECKING:
    from warpfold.parallel.team import Team

Precision = Literal["fp32", "bf16", "bf16_all", "fp16"]
WhichRelaxed = Literal["all", "best", "none"]
# Options that are whole numbers: the least that each may be.
LEAST = {
    "seed": None, "seeds": 1, "num_models": 1, "keep": 1, "recycles": 0, "ensemble": 1, "max_msa": 1, "max_extra": 0,
    "chunk": 0,
}  # fmt: skip


@arguments.names_arguments()
def predict(
    query: Paths,
    params: Paths,
    out: PathLike,
    *,
    num_models: int | None = None,
    msa: Paths | None = None,
    msa_server: ServerLike = None,
    msa_cache: PathLike | None = None,
    complex: bool | None = None,
    template: Paths | None = None,
    hits: Paths | None = None,
    template_structures: PathLike | None = None,
    max_template_date: str | None = None,
    seed: int = 0,
    seeds: int = 1,
    recycles: int | None = None,
    recycle_tolerance: float | None = None,
    max_recycles: str | tuple[int, int] | None = None,
    ensemble: int | None = None,
    dropout: bool = False,
    max_msa: int | None = None,
    max_extra: int | None = None,
    representations: bool = False,
    distogram: bool = False,
    save_recycles: bool = False,
    keep: int | None = None,
    device: str | None = None,
    chunk: int | None = None,
    offload: bool | None = None,
    memory: str | int | None = None,
    precision: Precision = "fp32",
    batch: int | str = "auto",
    workers: int = 1,
    shard: str | None = None,
    cluster: str | None = None,
    strict: bool = False,
    relax: WhichRelaxed = "none",
    force: bool = False,
    progress: Progress | None = None,
    team: "Team | None" = None,
) -> dict[str, Any]:
    """Fold every query with each of the parameters and seeds into the folder `out`; return its summary.

    query: files, folders, "-" or sequences.  params: files, or folders of them.  msa, template, hits: files that belong
    to sequences by what is in them, or by their names.  msa_server: the address of a server that is asked for
    alignments that are missing; without it none is.  complex: whether the records of a FASTA file are one complex.
    memory: "24GB" or bytes.  team: processes that share proteins; all call this.  A stopped run continues by the same
    call.  Returns what `--json` prints: proteins that failed are under "failures" (docs/outputs.md).
    Errors: UserError for bad input and arguments, where nothing is written, and for an `out` that is something else.
    """
    return _predict(**locals())


def _predict(query: Any, params: Any, out: Any, relax: Any, progress: Any, team: Any, **given: Any) -> dict[str, Any]:
    """Check the arguments of `predict`, and do it."""
    options, which, team = _options(given), _relaxed(relax), arguments.team_of(team)
    sources = TemplateSources(
        files=[str(one) for one in arguments.paths("template", given["template"])],
        hits=arguments.paths("hits", given["hits"]),
        structures=arguments.path_or_none("template_structures", given["template_structures"]),
        max_date=arguments.text_or_none("max_template_date", given["max_template_date"]),
    )
    share = Share(
        part=arguments.part_of(given["shard"]) or JobPart(1, 1),
        workers=arguments.whole("workers", given["workers"], 1),
        cluster=arguments.text_or_none("cluster", given["cluster"]),
    )
    folder, tell = arguments.path("out", out), arguments.progress_of(progress)
    queries, parameters = arguments.queries("query", query), arguments.paths("params", params)
    for name, found in (("query", queries), ("params", parameters)):
        if not found:
            raise UserError(f"{name}: is empty; name {'what to fold' if name == 'query' else 'files of parameters'}")
    summary = fold_all(
        queries, arguments.paths("msa", given["msa"]), parameters, folder, options, tell, sources, team, share,
        server_of(given["msa_server"], given["msa_cache"], folder / "alignments"),
    )  # fmt: skip
    if not team.is_rank_zero:
        return summary
    return relax_predictions(summary, folder, which, options.device or "cpu", tell)


def _options(given: Mapping[str, Any]) -> PredictOptions:
    """Return how to fold.  Errors: UserError for an argument of a wrong kind."""
    known: dict[str, Any] = {name: _number(name, given[name]) for name in LEAST}
    flags = "dropout", "representations", "distogram", "save_recycles", "force"
    known |= {name: arguments.flag(name, given[name]) for name in flags}
    for field, name in (("together", "complex"), ("offload", "offload")):
        known[field] = None if given[name] is None else arguments.flag(name, given[name])
    return PredictOptions(
        device=arguments.device_of(given["device"]),
        recycling=Recycling.of(given["recycle_tolerance"], given["max_recycles"]),
        batch=batch_of(given["batch"]),
        memory=memory_of(given["memory"]),
        precision=arguments.one_of("precision", given["precision"], get_args(Precision)),  # type: ignore[arg-type]
        kernels="strict" if arguments.flag("strict", given["strict"]) else "fast",
        **known,
    )


def _number(name: str, value: Any) -> int | None:
    """Return a whole number in the range of its option; None: the default, of those that have one."""
    if value is None and name not in ("seed", "seeds"):
        return None
    return arguments.whole(name, value, LEAST[name])


def _relaxed(which: Any) -> WhichRelaxed:
    """Return which predictions are relaxed.  Errors: UserError where OpenMM is missing: before hours of work."""
    found: Any = arguments.one_of("relax", which, get_args(WhichRelaxed))
    if found != "none":
        from warpfold.relax.amber import require_openmm

        require_openmm()
    return found


def relax_predictions(
    summary: dict[str, Any], out: Path, which: WhichRelaxed, device: str, progress: Progress
) -> dict[str, Any]:
    """Relax what `predict` wrote into `out`; return its summary with the reports, and with what failed here too."""
    if which == "none" or summary["status"] == "running":  # others are at work
        return summary
    from warpfold.relax.files import relax_paths

    done = relax_paths([out], device, which, progress=progress)
    written = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    failed = [{"name": one["name"], "error": f"relaxation: {one['error']}"} for one in done["failures"]]
    return written | {"failures": [*written["failures"], *failed]}
