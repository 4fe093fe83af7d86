"""`warpfold distill`."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

from warpfold.arguments import PathLike, function, path, paths, progress_of, queries, writes
from warpfold.cli.common import Answer, StoppedByUser, command, log_plans, on_sigterm, this_process, warn
from warpfold.cli.pack import PackCommand
from warpfold.cli.predict import run
from warpfold.data.pack.options import ExampleOptions
from warpfold.errors import UserError
from warpfold.prediction.request import Request
from warpfold.progress import Progress, progress_bar

SHOWN = 20  # reasons for which predictions are dropped


@dataclass(frozen=True, kw_only=True)
class DistillCommand(Request, ExampleOptions):
    """Fold sequences and pack the confident predictions into a store for `train` (self-distillation, Supp. 1.3)."""

    out: Annotated[PathLike, writes("The store; the same command continues a stopped run.")] = field(kw_only=False)
    predictions: Annotated[PathLike | None, writes("Folder for the predictions; default: OUT.predictions.")] = None
    progress: Progress | None = None

    def __call__(self) -> dict[str, Any]:
        """Fold as `predict` does, into the folder `predictions`, and pack the predictions with their alignments.

        Returns "predictions", the folder; "failures", as for `predict`; and "store", the report of `pack`, or None
        while other jobs (`shard`) are still folding. The same call continues a stopped run.
        Errors: UserError for bad input and arguments, if `out` is not a store, and if nothing was folded.
        """
        out = path("out", self.out)
        # Otherwise `pack` would raise this error after hours of folding.
        if out.exists() and not (out / "sources.json").is_file():
            raise UserError(f"{out}: exists already; remove it, or choose another name")
        folder = out.with_name(f"{out.name}.predictions") if self.predictions is None else Path(self.predictions)
        summary = run(replace(self.only(Request), out=folder), self.progress)
        found: dict[str, Any] = {"predictions": str(folder), "failures": summary["failures"], "store": None}
        if summary["status"] == "running":
            return found
        if not summary["predictions"]:
            raise UserError(f"{folder}: none of the sequences was folded; its summary.json says why")
        options = {one.name: getattr(self, one.name) for one in fields(ExampleOptions)}
        report = PackCommand(
            predicted=folder,
            msas=_alignments(self, folder) or None,
            out=out,
            workers=self.workers,
            cluster=self.cluster,
            progress=progress_of(self.progress),
            **options,
        )()
        return {**found, "store": report.to_json(), "summary": report.summary()}


def _alignments(given: Request, folder: Path) -> list[Path]:
    """List the files and folders of the alignments with which the sequences were folded."""
    from warpfold.data.formats.input_files import ALIGNMENTS, find

    every = [*paths("msa", given.msa), Path(given.msa_cache or folder / "alignments")]
    every += [Path(one) for one in queries("query", given.query) if not isinstance(one, str) or "\n" not in one]
    found = []
    for one in every:
        try:
            is_one = one.is_dir() or (one.is_file() and one.name.removesuffix(".gz").endswith(ALIGNMENTS))
            if is_one and find([one], ALIGNMENTS, "alignments"):
                found.append(one)
        except (OSError, UserError):  # a sequence itself, too long to be a name; a folder without alignments
            continue
    return found


distill = function(DistillCommand)


@command(
    DistillCommand,
    continues=True,
    example="Example:  warpfold distill sequences.fasta --msa msas/ --params params.safetensors --out distilled",
)
def distill_in_shell(given: dict[str, Any]) -> Answer:
    """Fold and pack under a progress bar, and print the number of packed predictions and the reasons for the others."""
    if this_process().ranks > 1:
        raise UserError("distill: runs without torchrun; take more processes by --workers, or machines by --shard")
    # As `pack` does: files that are being read must not be blamed for the death of the process.
    with on_sigterm(StoppedByUser(143)), progress_bar(remaining=False) as bar, log_plans():
        found = distill(**given, progress=bar)
    for failure in found["failures"]:
        warn(f"failed {failure['name']}: {failure['error']}")
    return Answer(found, _lines(found, given["out"]), int(bool(found["failures"])))


def _lines(found: dict[str, Any], out: Path) -> Iterator[str]:
    if found["store"] is None:
        yield "this part is done; the last part packs all"
        return
    reasons = list(found["store"]["reasons"].items())
    yield from (f"dropped {count}: {reason}" for reason, count in reasons[:SHOWN])
    if len(reasons) > SHOWN:
        yield f"... and {len(reasons) - SHOWN} more reasons, in {out / 'pack.tsv'}"
    yield f"{out}: {found['summary']}"
