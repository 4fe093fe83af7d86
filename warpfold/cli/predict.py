"""`warpfold predict`."""

from contextlib import AbstractContextManager, nullcontext
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
    Memory,
    MsaServer,
    Precision,
    Seed,
    Strict,
    alignment_server,
    app,
    argument,
    decides,
    device_of,
    plans_said,
    reads,
    runs,
    say_refused,
    show,
    this_process,
    writes,
)
from warpfold.cli.relax import Relax, RelaxOption, relaxed_line
from warpfold.progress import Progress, progress_bar

Queries = Annotated[
    list[str],
    argument(
        "FASTA (A:B is a complex), CSV (id,sequence), alignments (A3M, Stockholm), structures (their chains), "
        "folders of these, - (standard input), or a sequence itself.",
        metavar="QUERY...",
    ),
]
Params = Annotated[
    list[Path],
    reads(
        "WarpFold's .safetensors, DeepMind's params_model_*.npz, or a folder of these; several: each folds, and they "
        "are ranked."
    ),
]
NumModels = Annotated[int | None, reads("Of the parameters, use this many.", "--num-models", min=1)]
MsaCache = Annotated[
    Path | None, writes("Folder for a server's answers, for several runs to share; default: OUT/alignments.")
]
Keep = Annotated[
    int | None,
    writes(
        "Of each protein's ranked predictions, the best so many keep all files, the others none that grow with the "
        "square of the length; default: all keep all.",
        "--keep",
        min=1,
    ),
]
Out = Annotated[Path, writes("Folder for the predictions; a stopped run continues in it.", "--out", "-o")]
Msa = Annotated[
    list[Path] | None, reads("Alignments, or folders of them; each goes to the sequence that is its first row.")
]
Together = Annotated[
    bool | None,
    reads(
        "Whether the records of a FASTA file are the chains of one complex; default: if --params are a multimer's.",
        "--complex/--no-complex",
        show_default=False,
    ),
]
Template = Annotated[
    list[str] | None,
    reads(
        "FILE or FILE:CHAIN: mmCIF or PDB structures, templates for every record, whatever their date; in a "
        "complex for the chains that they fit, or ID=FILE for chain ID."
    ),
]
Hits = Annotated[
    list[Path] | None,
    reads("Template hits, .hhr or hmmsearch's; with several records, NAME.hhr for each, of a complex ID.hhr."),
]
TemplateStructures = Annotated[Path | None, reads("Folder of mmCIF files that the hits point to.")]
MaxTemplateDate = Annotated[str | None, reads("YYYY-MM-DD; hits whose structure came out later are refused.")]
Seeds = Annotated[int, decides("Predict with this many seeds, SEED, SEED + 1 ..., and rank them.", min=1)]
Recycles = Annotated[int | None, decides("Passes after the first; default: the model's.", min=0)]
Tolerance = Annotated[
    float | None,
    decides(
        "Angstrom: recycle no more once distances between CA change by less (ColabFold's early stop); default: "
        "the model's.",
        "--recycle-tolerance",
    ),
]
MaxRecycles = Annotated[
    str | None,
    decides("LENGTH:RECYCLES, such as 1500:3: at most so many passes after the first where there are more residues."),
]
Ensemble = Annotated[int | None, decides("Samples of the alignment that each pass averages over.", min=1)]
Dropout = Annotated[
    bool,
    decides(
        "Drop parts of the trunk's updates as in training, drawn by the seed: seeds then differ more.", "--dropout"
    ),
]
MaxMsa = Annotated[int | None, decides("Cluster centres of the alignment; default: as trained.", min=1)]
MaxExtra = Annotated[int | None, decides("Rows of the extra alignment; default: as trained.", min=0)]
Representations = Annotated[bool, writes("Keep single, pair and msa in the .npz.", "--representations")]
Distogram = Annotated[bool, writes("Keep contacts in the .npz, and the distogram in a .npy.", "--distogram")]
SaveRecycles = Annotated[
    bool,
    writes("Write the structures of the passes before the last too: NAME_recycle_0.cif and so on.", "--save-recycles"),
]
Chunk = Annotated[int | None, runs("Rows computed at a time, 0 for all; default: what fits and is fast.", min=0)]
Offloaded = Annotated[
    bool | None,
    runs(
        "Whether the pair representation lies in host memory; default: where nothing else fits.",
        "--offload/--no-offload",
        show_default=False,
    ),
]
Batch = Annotated[
    str,
    runs("Short single chains that share a pass of the model, at most; auto: where that was measured to help."),
]
Shard = Annotated[
    str | None, runs("I/N: only the I-th of N parts, for job arrays that share --out; the last writes the summary.")
]
PredictWorkers = Annotated[
    int, runs("Processes that each keep the model; of several GPUs each takes its own.", "--workers", min=1)
]
Cluster = Annotated[str | None, runs("Address of a Dask scheduler, tcp://host:8786, whose workers fold.")]
TrunkPrecision = Annotated[Precision, runs("Precision of the trunk's activations; bf16_all: of what follows it too.")]


WARNED = 20  # warnings that are printed at most


@app.command(
    cls=Lists,
    epilog="Example:  warpfold predict query.fasta --msa query.a3m --params params.safetensors --out folded\n\n"
    "A complex, a FASTA record for each chain:  warpfold predict dimer.fasta --msa msas/ "
    "--params params_model_*_multimer_v3.npz --seeds 2 --out folded\n\n"
    "Many different structures of one protein:  warpfold predict q.a3m --params params.npz --seeds 50 --dropout "
    "--out folded\n\n"
    "What each pass found:  warpfold predict q.a3m --params params.npz --recycles 12 --save-recycles --out folded\n\n"
    "A proteome, by a job array of 8:  warpfold predict all.fasta --params params.npz --shard $I/8 --out folded\n\n"
    "Long ones on several processes, under torchrun: docs/parallel.md.  Many on several machines: docs/throughput.md.",
)
def predict(
    query: Queries,
    params: Params,
    out: Out,
    num_models: NumModels = None,
    msa: Msa = None,
    msa_server: MsaServer = None,
    complex: Together = None,
    template: Template = None,
    hits: Hits = None,
    template_structures: TemplateStructures = None,
    max_template_date: MaxTemplateDate = None,
    seed: Seed = 0,
    seeds: Seeds = 1,
    recycles: Recycles = None,
    recycle_tolerance: Tolerance = None,
    max_recycles: MaxRecycles = None,
    ensemble: Ensemble = None,
    dropout: Dropout = False,
    max_msa: MaxMsa = None,
    max_extra: MaxExtra = None,
    representations: Representations = False,
    distogram: Distogram = False,
    save_recycles: SaveRecycles = False,
    keep: Keep = None,
    msa_cache: MsaCache = None,
    device: Device = None,
    chunk: Chunk = None,
    offload: Offloaded = None,
    memory: Memory = None,
    precision: TrunkPrecision = Precision.fp32,
    axial: Axial = None,
    branch: Branch = None,
    batch: Batch = "auto",
    workers: PredictWorkers = 1,
    shard: Shard = None,
    cluster: Cluster = None,
    strict: Strict = False,
    relax: RelaxOption = Relax.none,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Fold proteins and complexes: mmCIF, PDB, pLDDT, PAE, a summary and a report; rank models and seeds."""
    _run(**locals())


def _run(
    out: Path,
    device: str | None,
    msa_server: str | None,
    msa_cache: Path | None,
    axial: int | None,
    branch: int | None,
    relax: Relax,
    as_json: bool,
    **given: Any,
) -> None:
    """Have the processes meet and fold, relax what was predicted, and say how it went; ends the command."""
    from warpfold.parallel.plan import Plan
    from warpfold.parallel.team import distributed_context
    from warpfold.predict_command import predict as fold
    from warpfold.predict_command import relax_predictions

    process = this_process()
    where, server = device_of(device, process), alignment_server(msa_server, msa_cache, out / "alignments")
    # Without either, how the processes share out the proteins is chosen when these are known.
    plan = None if axial is None and branch is None else Plan(axial=axial or 1, branch=branch or 1)
    with distributed_context(process, plan, where) as team, _bar(process.rank) as progress, plans_said(process):
        summary = fold(out=out, device=where, msa_server=server, progress=progress, team=team, **given)
    if team.is_rank_zero:
        if summary["status"] == "running":
            _say_others(given["shard"] or "1/1", out, relax)
        with progress_bar() as bar:  # the other processes have ended
            summary = relax_predictions(summary, out, relax.value, where, bar)
        _say(summary, out, as_json)
    raise typer.Exit(1 if summary["failures"] or any(map(_lacks_templates, summary["predictions"])) else 0)


def _say_others(part: str, out: Path, relax: Relax) -> None:
    """Say that others are at work on the rest, or have yet to begin."""
    then = f", then `warpfold relax {out}`" if relax != Relax.none else ""
    typer.echo(f"part {part} is done; the last part writes {out / 'summary.json'}{then}", err=True)


def _bar(rank: int) -> AbstractContextManager[Progress | None]:
    """Return the bar of the first of several processes; the caller says how much time is left."""
    return progress_bar(remaining=False, every=30.0) if rank == 0 else nullcontext()


def _lacks_templates(entry: dict[str, Any]) -> bool:
    """Return whether a protein got no template though it had hits, because there is none of their structures."""
    return not entry["templates"] and entry.get("templates_missing", 0) > 0


def _say(summary: dict[str, Any], out: Path, as_json: bool) -> None:
    """Print the summary, or a line for each prediction; and in any case what is to be known of the input or failed."""
    from warpfold.prediction.pages import warnings_of

    say_refused(summary["refused"])
    if as_json:
        show(summary)
    for entry in [] if as_json else summary["predictions"]:
        typer.echo(_line(entry, out))
        if "relaxed" in entry:
            typer.echo(relaxed_line(f"{entry['name']} relaxed", entry["relaxed"]))
    if not as_json and summary["status"] != "running":
        typer.echo(f"report: {out / 'report.html'}")
    warnings = warnings_of(summary)
    for one in warnings[:WARNED]:
        typer.echo(f"{one.heading('queries') or 'warning: '}{one.said}", err=True)
    if len(warnings) > WARNED:
        typer.echo(f"and {len(warnings) - WARNED} more warnings, in {out / 'summary.json'}", err=True)
    for failure in summary["failures"]:
        of = f" ({failure['model']}, seed {failure['seed']})" if "model" in failure else ""
        typer.echo(f"failed {failure['name']}{of}: {failure['error']}", err=True)


def _line(entry: dict[str, Any], out: Path) -> str:
    """Return what is printed of a prediction."""
    chains = f" ({len(entry['chains'])} chains)" if "chains" in entry else ""
    rank = f", rank {entry['rank']}" if "ranked" in entry else ""
    scores = [f"mean pLDDT {entry['mean_plddt']:.1f}"]
    known = [(title, entry.get(key)) for key, title in (("iptm", "ipTM"), ("ptm", "pTM"))]
    scores += [f"{title} {score:.2f}" for title, score in known if score is not None]
    if entry["templates"]:
        scores.append(f"templates {', '.join(entry['templates'])}")
    return f"{entry['name']}{chains}{rank}: {', '.join(scores)}, {out / entry['folder']}"
