"""`warpfold distill`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from warpfold.arguments import PathLike, Paths, checked, paths, queries, writes
from warpfold.cli.common import Answer, StoppedByUser, command, log_plans, on_sigterm, this_process, warn
from warpfold.cli.pack import pack
from warpfold.cli.predict import run
from warpfold.data.pack.options import ExampleOptions
from warpfold.errors import UserError
from warpfold.prediction.request import Request, ServerLike, WhichRelaxed
from warpfold.progress import Progress, progress_bar

SHOWN = 20  # reasons for which predictions are dropped


@checked(Request, ExampleOptions)
def distill(
    query: Paths,
    params: Paths,
    out: Annotated[PathLike, writes("The store; the same command continues a stopped run.")],
    *,
    predictions: Annotated[PathLike | None, writes("Folder for the predictions; default: OUT.predictions.")] = None,
    min_length: int = 10,
    max_length: int | None = None,
    min_depth: int = 1,
    min_plddt: float = 50.0,
    max_pae: float | None = None,
    min_kl: float = 0.5,
    cluster_identity: float = 0.4,
    msa: Paths | None = None,
    msa_server: ServerLike = None,
    msa_cache: PathLike | None = None,
    template: Paths | None = None,
    hits: Paths | None = None,
    template_structures: PathLike | None = None,
    max_template_date: str | None = None,
    initial_guess: PathLike | Mapping[str, Any] | None = None,
    fixed_chains: str | Sequence[str] | None = None,
    num_models: int | None = None,
    complex: bool | None = None,
    pairs: Literal["all"] | None = None,
    seed: int = 0,
    seeds: int = 1,
    recycles: int | None = None,
    recycle_tolerance: float | None = None,
    max_recycles: str | tuple[int, int] | None = None,
    ensemble: int | None = None,
    dropout: bool = False,
    max_msa: int | None = None,
    max_extra: int | None = None,
    chain_gap: int | None = None,
    relax: WhichRelaxed = "none",
    representations: bool | PathLike | None = None,
    pair_representation: Literal["pooled", "whole"] = "pooled",
    distogram: bool = False,
    save_recycles: bool = False,
    figures: bool = True,
    zip: bool = False,
    keep: int | str | None = None,
    device: str | None = None,
    chunk: int | None = None,
    offload: bool | None = None,
    graphs: bool = True,
    memory: str | int | None = None,
    precision: Literal["auto", "fp32", "bf16", "bf16_all", "fp16"] = "auto",
    batch: int | str = "auto",
    workers: int = 1,
    cluster: str | None = None,
    shard: str | None = None,
    strict: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Fold sequences and pack the confident predictions into a store for `train` (self-distillation, Supp. 1.3).

    Folds as `predict` does, into the folder `predictions`, and packs the predictions with their alignments. Returns
    "predictions", the folder; "failures", as for `predict`; and "store", the report of `pack`, or None while other jobs
    (`shard`) are still folding. The same call continues a stopped run.
    Errors: UserError for bad input and arguments, if `out` is not a store, and if nothing was folded.
    """
    values, store = locals(), Path(out)
    folder = store.with_name(f"{store.name}.predictions") if predictions is None else Path(predictions)
    request = Request(**{field.name: values[field.name] for field in fields(Request)} | {"out": folder})
    # Otherwise `pack` would raise this error after hours of folding.
    if store.exists() and not (store / "sources.json").is_file():
        raise UserError(f"{store}: exists already. Remove it, or choose another name.")
    summary = run(request, progress)
    answer: dict[str, Any] = {"predictions": str(folder), "failures": summary["failures"], "store": None}
    if summary["status"] == "running":
        return answer
    if not summary["predictions"]:
        raise UserError(f"{folder}: none of the sequences was folded. See its summary.json for the reasons.")
    report = pack(
        predicted=folder,
        msas=_alignments(request, folder) or None,
        out=store,
        workers=workers,
        cluster=cluster,
        progress=progress,
        **{field.name: values[field.name] for field in fields(ExampleOptions)},
    )
    return {**answer, "store": report.to_json(), "summary": report.summary()}


def _alignments(given: Request, folder: Path) -> list[Path]:
    """List the files and folders of the alignments with which the sequences were folded."""
    from warpfold.data.formats.input_files import ALIGNMENTS, find

    candidates = [*paths("msa", given.msa), Path(given.msa_cache or folder / "alignments")]
    candidates += [
        Path(query) for query in queries("query", given.query) if not isinstance(query, str) or "\n" not in query
    ]
    alignment_paths = []
    for path in candidates:
        try:
            is_alignment = path.is_dir() or (path.is_file() and path.name.removesuffix(".gz").endswith(ALIGNMENTS))
            if is_alignment and find([path], ALIGNMENTS, "alignments"):
                alignment_paths.append(path)
        except (OSError, UserError):  # a sequence itself, too long to be a name; a folder without alignments
            continue
    return alignment_paths


@command(
    distill,
    continues=True,
    example="Example:  warpfold distill sequences.fasta --msa msas/ --params params.safetensors --out distilled",
)
def distill_in_shell(given: dict[str, Any]) -> Answer:
    """Fold sequences and pack the confident predictions into a store for `train` (self-distillation, Supp. 1.3)."""
    if this_process().ranks > 1:
        raise UserError("distill: runs without torchrun. Pass --workers, or --shard for several machines.")
    # As `pack` does: files that are being read must not be blamed for the death of the process.
    with on_sigterm(StoppedByUser(143)), progress_bar(remaining=False) as bar, log_plans():
        report = distill(**given, progress=bar)
    for failure in report["failures"]:
        warn(f"failed {failure['name']}: {failure['error']}")
    return Answer(report, _lines(report, given["out"]), int(bool(report["failures"])))


def _lines(found: dict[str, Any], out: Path) -> Iterator[str]:
    if found["store"] is None:
        yield "this part is done; the last part packs all"
        return
    reasons = list(found["store"]["reasons"].items())
    yield from (f"dropped {count}: {reason}" for reason, count in reasons[:SHOWN])
    if len(reasons) > SHOWN:
        yield f"... and {len(reasons) - SHOWN} more reasons, in {out / 'pack.tsv'}"
    yield f"{out}: {found['summary']}"
