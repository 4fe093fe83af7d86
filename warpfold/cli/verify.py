"""`warpfold verify`."""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from warpfold.arguments import PathLike, Paths, function, path, paths, progress_of, reads, runs, writes
from warpfold.cli.common import Answer, command, device_of, plans_said, table, warn
from warpfold.cli.predict import PredictCommand
from warpfold.errors import UserError, listed
from warpfold.prediction.fold_options import (
    Hits,
    MaxTemplateDate,
    MsaCache,
    MsaServer,
    PredictOptions,
    TemplateStructures,
)
from warpfold.progress import Progress, progress_bar
from warpfold.scoring.selection import Selection

if TYPE_CHECKING:
    from rich.table import Table

log = logging.getLogger("warpfold.plan")

# What the folder of a run has.
TARGETS, PREDICTIONS, REPORT, TABLE = "targets.fasta", "predictions", "verify.json", "verify.csv"


@dataclass(frozen=True, kw_only=True)
class VerifyCommand(PredictOptions):
    """Fold and score a public list of proteins, with hashes of everything, and compare with the published mean."""

    targets: Annotated[PathLike, reads("List of chains and published figures, TOML (docs/verify.md); or cameo2022.")]
    params: Annotated[Paths, reads("As of `predict`; several: each has its mean.")]
    structures: Annotated[PathLike, reads("Folder of the entries' mmCIF files, 1abc.cif or 1abc.cif.gz.")]
    out: Annotated[PathLike, writes("Folder for predictions and tables; a stopped run continues in it.")]
    fetch: Annotated[bool, reads("Download the entries that --structures lacks, from the PDB.")] = False
    source: Annotated[
        PathLike | None, reads("With --fetch: a mirror's address, or a folder.", "--from", shell=str | None)
    ] = None
    msa: Annotated[Paths | None, reads("Alignments, or folders of them; every target needs one.")] = None
    msa_server: MsaServer = None
    msa_cache: MsaCache = None
    hits: Hits = None
    template_structures: TemplateStructures = None
    max_template_date: MaxTemplateDate = None
    workers: Annotated[int, runs("Processes that each keep the model; of several GPUs each takes its own.", min=1)] = 1
    complex: bool | None = field(default=False, init=False)  # every target is folded alone
    chain_gap: int | None = field(default=None, init=False)
    pairs: Literal["all"] | None = field(default=None, init=False)
    progress: Progress | None = None

    def __call__(self) -> dict[str, Any]:
        """Fold and score every target; return what `OUT/verify.json` has (docs/verify.md).

        Targets that could not be folded or scored are under "failures".  A stopped run continues by the same call.
        Errors: UserError for a bad list, structures that are missing or others than listed, targets without alignment
        where there are some, and an `out` that is something else.
        """
        import torch

        from warpfold.cost import machine
        from warpfold.files import as_csv, refuse_foreign, update_file, write_atomically
        from warpfold.scoring.manifest import fetch_structures, read_manifest, read_truths
        from warpfold.scoring.verify import alignments_of, report, score_targets

        if isinstance(self.selection, Selection):
            raise UserError(f"--keep {self.keep}: every structure is scored; give a number, or leave it out")
        tell, out, folder = progress_of(self.progress), path("out", self.out), path("structures", self.structures)
        manifest = read_manifest(path("targets", self.targets))
        if self.source is not None and not self.fetch:
            raise UserError("--from: has no effect without --fetch; give both, or neither")
        if self.fetch:
            fetch_structures(manifest, folder, self.source, tell)
        truths = read_truths(manifest, folder, tell)
        msa = paths("msa", self.msa)
        alignments = alignments_of(truths, msa)
        bare = [truth.target.name for truth in truths if truth.target.name not in alignments]
        if msa and bare and self.msa_server is None:
            raise UserError(f"--msa: has no alignment for {listed(bare)}; give one for each, or name --msa-server")
        refuse_foreign(out, {TARGETS, PREDICTIONS, REPORT, TABLE}.__contains__)
        fasta = "".join(f">{truth.target.name}\n{truth.chain.sequence}\n" for truth in truths).encode()
        if (out / TARGETS).is_file() and (out / TARGETS).read_bytes() != fasta and not self.force:
            raise UserError(f"{out}: holds the output of another run; name a new folder, or replace it with --force")
        update_file(out / TARGETS, fasta)
        if len(bare) == len(truths) and self.msa_server is None:
            log.warning("no alignments: this mean will not be comparable with published ones; give --msa")
        server = None if self.msa_server is None else (self.msa_cache or out / PREDICTIONS / "alignments")
        summary = PredictCommand(
            query=[out / TARGETS],
            params=self.params,
            out=out / PREDICTIONS,
            msa=msa or None,
            msa_server=self.msa_server,
            msa_cache=self.msa_cache,
            hits=self.hits,
            template_structures=self.template_structures,
            max_template_date=self.max_template_date,
            workers=self.workers,
            progress=tell,
            **vars(self.only(PredictOptions)),
        )()
        if server is not None and Path(server).is_dir():
            alignments = alignments_of(truths, [*msa, Path(server)])
        summary["device"] = machine.name(torch.device(summary["device"]))
        found = report(manifest, summary, *score_targets(out / PREDICTIONS, summary, truths, alignments, tell))
        write_atomically(out / REPORT, json.dumps(found, indent=2, allow_nan=False) + "\n")
        rows = found["targets"]
        write_atomically(out / TABLE, as_csv([*rows[0]] if rows else [], rows))
        return found


verify = function(VerifyCommand)

HEADS = (
    *("target", "residues", "resolved", "lDDT-Ca", "lDDT", "GDT-TS", "TM", "pLDDT", "rows"),
    *("structure", "prediction", "alignment"),
)


@command(
    VerifyCommand,
    continues=True,
    example="Example:  warpfold verify --params finetuning_ptm_1.pt --targets cameo.toml --structures mmcif --msa msas "
    "--out verified\n\nWith the entries from the PDB and alignments from a server:  warpfold verify --params "
    "finetuning_ptm_1.pt --targets cameo.toml --structures mmcif --fetch --msa-server URL --out verified",
)
def verify_in_shell(given: dict[str, Any]) -> Answer:
    """Print the tables, and say what failed."""
    given["device"] = device_of(given["device"])
    with progress_bar(remaining=False, every=30.0) as progress, plans_said():
        found = verify(**given, progress=progress)
    for warning in found["warnings"]:
        warn(f"warning: {warning['text']}")
    for failure in found["failures"]:
        warn(f"failed {failure['name']}: {failure['error']}")
    return Answer(found, _tables(found, Path(given["out"])), bool(found["failures"]))


def _tables(found: dict[str, Any], out: Path) -> "Iterator[str | Table]":
    """Yield what is printed: a table of the targets of each file of parameters, and its mean."""
    for model in found["models"]:
        rows = [row for row in found["targets"] if row["model"] == model["name"]]
        yield table(HEADS, map(_row, rows))
        yield ""
        if not rows:
            yield f"{model['file']}: no target was folded and scored"
            continue
        span = ", 95% bootstrap interval {:.4f} to {:.4f}".format(*model["interval"]) if model["interval"] else ""
        over = f"{model['scored']} targets of {found['manifest']['targets']}"
        yield f"{model['file']}, SHA-256 {model['sha256']}"
        yield f"mean lDDT-Ca {model['lddt_ca']:.4f} over {over}{span}"
        aligned = model["scored"] - model["without_alignment"]
        yield f"with an alignment: {aligned} targets; with templates: {model['with_templates']}"
        yield model["verdict"]
    published, manifest = found["published"], found["manifest"]
    yield from (f"published: {text}" for text in (published["source"], published["note"]) if text)
    yield f"{manifest['file']}, SHA-256 {manifest['sha256']}"
    yield ", ".join([found["device"], *(f"{name} {version}" for name, version in found["versions"].items())])
    yield f"to send: {out / REPORT}, or the rows alone, {out / TABLE}"


def _row(row: dict[str, Any]) -> list[str]:
    scores = ("-" if row[key] is None else f"{row[key]:.4f}" for key in ("lddt_ca", "lddt", "gdt_ts", "tm"))
    hashes = ((row[f"{key}_sha256"] or "-")[:12] for key in ("structure", "prediction", "alignment"))
    numbers = map(str, (row["residues"], row["resolved"]))
    return [row["target"], *numbers, *scores, f"{row['plddt']:.1f}", str(row["alignment_rows"]), *hashes]
