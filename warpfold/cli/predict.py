"""`warpfold predict`."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from warpfold.cli.common import (
    AsJson,
    Axial,
    Branch,
    Device,
    Force,
    Lists,
    Precision,
    Seed,
    Strict,
    app,
    argument,
    decides,
    device_of,
    reads,
    runs,
    say_refused,
    show,
    writes,
)
from warpfold.cli.relax import Relax, RelaxOption, relax_predictions, relaxed_line
from warpfold.progress import progress_bar


@app.command(
    cls=Lists, epilog="Example:  warpfold predict query.fasta --msa query.a3m --params params.safetensors --out folded"
)
def predict(
    query: Annotated[
        Path, argument("FASTA (every record is folded; also /dev/stdin), or an alignment (A3M, Stockholm).")
    ],
    params: Annotated[Path, reads("WarpFold's .safetensors, or DeepMind's params_model_*.npz (monomer, ptm).")],
    out: Annotated[Path, writes("Folder for the predictions; a stopped run continues in it.")],
    msa: Annotated[
        list[Path] | None, reads("Alignments of the records; each goes to the record that is its first row.")
    ] = None,
    template: Annotated[
        list[str] | None,
        reads("FILE or FILE:CHAIN: mmCIF or PDB structures, templates for every record, whatever their date."),
    ] = None,
    hits: Annotated[
        list[Path] | None, reads("Template hits, .hhr or hmmsearch's; with several records, NAME.hhr for each.")
    ] = None,
    template_structures: Annotated[Path | None, reads("Folder of mmCIF files that the hits point to.")] = None,
    max_template_date: Annotated[
        str | None, reads("YYYY-MM-DD; hits whose structure came out later are refused.")
    ] = None,
    seed: Seed = 0,
    recycles: Annotated[int | None, decides("Passes after the first; default: the model's.", min=0)] = None,
    ensemble: Annotated[int | None, decides("Samples of the alignment that each pass averages over.", min=1)] = None,
    max_msa: Annotated[int | None, decides("Cluster centres of the alignment; default: as trained.", min=1)] = None,
    max_extra: Annotated[int | None, decides("Rows of the extra alignment; default: as trained.", min=0)] = None,
    representations: Annotated[bool, writes("Keep single, pair and msa in the .npz.", "--representations")] = False,
    device: Device = None,
    chunk: Annotated[int | None, runs("Rows computed at a time, 0 for all; default: what fits.", min=0)] = None,
    precision: Annotated[Precision, runs("Precision of the trunk's activations.")] = Precision.fp32,
    axial: Axial = None,
    branch: Branch = None,
    strict: Strict = False,
    relax: RelaxOption = Relax.none,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Fold sequences: mmCIF, PDB, pLDDT, PAE, a summary and a report.

    Long ones on several processes, under torchrun: docs/parallel.md.
    """
    from warpfold.parallel.plan import Plan
    from warpfold.parallel.team import ProcessInfo, distributed_context
    from warpfold.run import predict as prediction
    from warpfold.run.predict_templates import TemplateSources

    sources = TemplateSources(
        files=template or [], hits=hits or [], structures=template_structures, max_date=max_template_date)  # fmt: skip
    process = ProcessInfo.from_environment(os.environ)
    options = prediction.PredictOptions(
        seed=seed, recycles=recycles, ensemble=ensemble, max_msa=max_msa, max_extra=max_extra,
        device=device_of(device, process), chunk=chunk, precision=precision.value,
        representations=representations, force=force, kernels="strict" if strict else "fast",
    )  # fmt: skip
    bar, plan = progress_bar() if process.rank == 0 else nullcontext(), Plan(axial=axial or 1, branch=branch or 1)
    with distributed_context(process, plan, options.device or "cpu") as team, bar as progress:
        summary = prediction.predict(query, msa or [], params, out, options, progress, sources, team)
    if team.is_rank_zero:
        summary = relax_predictions(summary, out, relax, options.device)
        _say(summary, out, as_json)
    raise typer.Exit(1 if summary["failures"] or any(map(_lacks_templates, summary["predictions"])) else 0)


def _lacks_templates(entry: dict[str, Any]) -> bool:
    """Return whether a protein got no template though it had hits, for want of their structures."""
    return not entry["templates"] and entry.get("templates_missing", 0) > 0


def _say(summary: dict[str, Any], out: Path, as_json: bool) -> None:
    """Print the summary, or a line for each protein; and in any case what failed."""
    say_refused(summary["refused"])
    if as_json:
        show(summary)
    for entry in [] if as_json else summary["predictions"]:
        ptm = "" if entry["ptm"] is None else f", pTM {entry['ptm']:.2f}"
        used = f", templates {', '.join(entry['templates'])}" if entry.get("templates") else ""
        typer.echo(f"{entry['name']}: mean pLDDT {entry['mean_plddt']:.1f}{ptm}{used}, {out / entry['folder']}")
    for entry in [] if as_json else summary["predictions"]:
        if "relaxed" in entry:
            typer.echo(relaxed_line(f"{entry['name']} relaxed", entry["relaxed"]))
    if not as_json:
        typer.echo(f"report: {out / 'report.html'}")
    for entry in summary["predictions"]:
        refused = entry.get("templates_refused", {})
        if entry.get("templates_missing") or (refused and not entry["templates"]):
            reasons = "; ".join(f"{count} x {why}" for why, count in refused.items())
            what = "some hits are no templates" if entry["templates"] else "no template"
            typer.echo(f"{entry['name']}: {what}: {reasons}", err=True)
    for failure in summary["failures"]:
        typer.echo(f"failed {failure['name']}: {failure['error']}", err=True)
