"""`warpfold predict` and `warpfold relax`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from warpfold import arguments
from warpfold.arguments import Device, PathLike, Paths, argument, checked, decides, progress_of, writes
from warpfold.cli.common import (
    Answer,
    AsJson,
    Axial,
    Branch,
    Lists,
    command,
    device_of,
    log_plans,
    print_fallbacks,
    show,
    this_process,
    warn,
)
from warpfold.files import append_line
from warpfold.prediction.request import Request, ServerLike, WhichRelaxed
from warpfold.progress import Progress, progress_bar

if TYPE_CHECKING:
    from warpfold.parallel.team import Team

MAX_WARNINGS = 20  # printed at most

# ColabFold's names of options, and the words that replace them.
ALIASES = {
    "--amber": ("--relax", "all"),
    "--data": ("--params",),
    "--host-url": ("--msa-server",),
    "--max-extra-seq": ("--max-extra",),
    "--max-seq": ("--max-msa",),
    "--num-ensemble": ("--ensemble",),
    "--num-recycle": ("--recycles",),
    "--num-recycles": ("--recycles",),
    "--num-seeds": ("--seeds",),
    "--overwrite-existing-results": ("--force",),
    "--random-seed": ("--seed",),
    "--recycle-early-stop-tolerance": ("--recycle-tolerance",),
    "--save-pair-representations": ("--representations",),
    "--save-single-representations": ("--representations",),
    "--use-dropout": ("--dropout",),
}
# Options of ColabFold and OpenFold whose values mean something else here, and what to pass instead.
INSTEAD = {
    "--config_preset": "--params: a file of parameters says which model it is of",
    "--custom-template-path": "--template FILE ... (a file, or FILE:CHAIN, for each template)",
    "--jax_param_path": "--params",
    "--model-type": "--params: of a folder with parameters of several kinds, those are taken that the queries need",
    "--model_device": "--device",
    "--msa-mode": "--msa FILE, or --msa-server URL. Without either, the sequence is folded alone",
    "--num-relax": "--relax best, or --relax all",
    "--openfold_checkpoint_path": "--params",
    "--output_dir": "--out",
    "--templates": "--template FILE, or --hits with --template-structures. No server is asked for templates",
    "--use-gpu-relax": "--device: relaxation runs where the model does",
    "--use_precomputed_alignments": "--msa FOLDER",
}
# Options that --help shows; --help-all shows the others too.
ESSENTIAL = (
    *("params", "out", "msa", "msa_server", "template", "num_models", "recycles", "seeds", "relax", "device"),
    *("workers", "force", "help_all"),
)


@checked(Request)
def predict(
    query: Paths,
    params: Paths,
    out: PathLike,
    *,
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
    team: "Team | None" = None,
) -> dict[str, Any]:
    """Fold every query with each of the parameters and seeds into the folder `out`; return its summary.

    Alignments, templates and hits are assigned to sequences by their contents or their names.  team: the processes
    that share proteins, all of which call this function.  The same call continues a stopped run.  Returns the output
    of `--json`, with failed proteins under "failures" (docs/reference/outputs.md).
    Errors: UserError for bad input and arguments, before anything is written, and for an `out` that holds something
    else.
    """
    options = locals()
    progress, team = options.pop("progress"), options.pop("team")
    return run(Request(**options), progress, team)


def run(request: Request, progress: Progress | None = None, team: "Team | None" = None) -> dict[str, Any]:
    """Check a request, fold, and relax; return the summary, as `predict` does."""
    tell = progress_of(progress)
    check(request)
    from warpfold.parallel.team import team_of
    from warpfold.prediction import predict

    team = team_of(team)
    summary = predict.run(replace(request, device=device_of(request.device)), tell, team)
    return complete(request, summary, tell) if team.is_rank_zero else summary


def check(request: Request) -> None:
    """Check paths, options and packages without importing torch, before hours of work.  Errors: UserError."""
    request.check()
    if request.relax != "none":
        from warpfold.relaxation.amber import require_openmm

        require_openmm()


def complete(request: Request, summary: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Relax the predictions of a finished run and archive the results, if requested; return the summary."""
    summary = relax_predictions(request, summary, progress)
    if request.zip and summary["status"] != "running":
        from warpfold.prediction.pages import write_archives

        write_archives(request.folder, summary)
    return summary


def relax_predictions(request: Request, summary: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Relax the predictions of a finished run; return the summary with the reports and the failures of relaxation."""
    if request.relax == "none" or summary["status"] == "running":  # other processes are still folding
        return summary
    from warpfold.prediction.outputs import LOG
    from warpfold.relaxation.files import relax_paths

    out = request.folder
    report = relax_paths([out], device_of(request.device), request.relax, progress=progress)
    saved_summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    failed = [{"name": failure["name"], "error": f"relaxation: {failure['error']}"} for failure in report["failures"]]
    for failure in failed:
        append_line(out / LOG, f"failed {failure['name']}: {failure['error']}")
    return saved_summary | {"failures": [*saved_summary["failures"], *failed]}


class Predict(Lists):
    """The command `predict`, which also accepts ColabFold's names of its options, and has a short and a long help.

    --representations needs no value: alone, it means the representations in the .npz.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Replace ColabFold's names by ours, and add the value of a bare --representations."""
        words = []
        for index, word in enumerate(args):
            name, separator, value = word.partition("=")
            *first_options, last = ALIASES.get(name, (name,))
            words += [*first_options, last + separator + value]
            if words[-1] == "--representations" and not "".join(args[index + 1 : index + 2]).endswith(".store"):
                words.append("npz")
        return super().parse_args(ctx, words)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of the essential options."""
        all_parameters = self.params
        self.params = [
            parameter
            for parameter in all_parameters
            if parameter.name in ESSENTIAL or parameter.param_type_name == "argument"
        ]
        try:
            super().format_help(ctx, formatter)
        finally:
            self.params = all_parameters

    def full_help(self, ctx: Any) -> str:
        """Return the help of all options as plain text, which never cuts the name of an option."""
        formatter = ctx.make_formatter()
        super(TyperCommand, self).format_help(ctx, formatter)
        return str(formatter.getvalue().rstrip())


def _help_all(ctx: typer.Context, value: bool) -> None:
    if value:
        typer.echo(ctx.command.full_help(ctx))  # type: ignore[attr-defined]  # `Predict`
        raise typer.Exit


HelpAll = Annotated[
    bool, typer.Option("--help-all", help="Show all options.", is_eager=True, callback=_help_all, show_default=False)
]


@command(
    predict,
    cls=Predict,
    continues=True,
    example="Example:  warpfold predict query.fasta --msa query.a3m --params params.safetensors --out folded\n\n"
    "A complex, a FASTA record for each chain:  warpfold predict dimer.fasta --msa msas/ "
    "--params params_model_*_multimer_v3.npz --seeds 2 --out folded\n\n"
    "Many different structures of one protein:  warpfold predict q.a3m --params params.npz --seeds 50 --dropout "
    "--out folded\n\n"
    "The structure of every pass:  warpfold predict q.a3m --params params.npz --recycles 12 --save-recycles "
    "--out folded\n\n"
    "A proteome, by a job array of 8:  warpfold predict all.fasta --params params.npz --shard $I/8 --out folded\n\n"
    "Long proteins on several processes, under torchrun: docs/howto/clusters.md.  Many proteins on several machines: "
    "docs/howto/many_proteins.md.\n\n"
    "ColabFold's names of options (--num-recycle, --num-seeds, --amber ...) work too: docs/howto/migrate.md.",
)
def predict_in_shell(
    options: dict[str, Any],
    axial: Axial = None,
    branch: Branch = None,
    as_json: AsJson = False,
    help_all: HelpAll = False,
) -> None:
    """Fold proteins and complexes: mmCIF, PDB, pLDDT, PAE, a summary and a report; rank models and seeds."""
    request = Request(**options)
    check(request)
    from warpfold.parallel.plan import Plan
    from warpfold.parallel.team import distributed_context
    from warpfold.prediction import predict
    from warpfold.prediction.pages import warning_lines

    process, out = this_process(), request.folder
    device = device_of(request.device, process)
    request = replace(request, device=device)
    # Without --plan options, the process grid is chosen once the proteins are known.
    plan = None if axial is None and branch is None else Plan(axial=axial or 1, branch=branch or 1)
    # Only the first of several processes has a bar; `predict` adds the remaining time to it.
    bar = progress_bar(remaining=False, every=30.0) if process.rank == 0 else nullcontext()
    with distributed_context(process, plan, device) as team, bar as progress, log_plans(process.rank):
        summary = predict.run(request, progress_of(progress), team)
    if team.is_rank_zero:
        if summary["status"] == "running":  # other parts are being folded, or have not begun
            hint = f", then `warpfold relax {out}`" if request.relax != "none" else ""
            warn(f"part {request.part} is done; the last part writes {out / 'summary.json'}{hint}")
        with progress_bar() as progress:  # the other processes have ended
            summary = complete(request, summary, progress)
        print_fallbacks(summary["refused"])
        show(Answer(summary, _lines(summary, request)), as_json)
        warnings = warning_lines(summary)
        for warning in warnings[:MAX_WARNINGS]:
            warn(warning)
        if len(warnings) > MAX_WARNINGS:
            warn(f"and {len(warnings) - MAX_WARNINGS} more warnings, in {out / 'summary.json'}")
        for failure in summary["failures"]:
            model_text = f" ({failure['model']}, seed {failure['seed']})" if "model" in failure else ""
            warn(f"failed {failure['name']}{model_text}: {failure['error']}")
    # A protein whose template hits all lack their structure files is a failure too.
    lacks_templates = any(
        not entry["templates"] and entry.get("templates_missing", 0) > 0 for entry in summary["predictions"]
    )
    raise typer.Exit(1 if summary["failures"] or lacks_templates else 0)


def _lines(summary: dict[str, Any], request: Request) -> Iterator[str]:
    """Yield the printed lines of each prediction."""
    from warpfold.prediction.pages import archive_path, headline

    out = request.folder
    for entry in summary["predictions"]:
        sizes = f" ({headline(entry)})" if entry.get("rank", 1) == 1 else ""
        rank = f", rank {entry['rank']}" if "ranked" in entry else ""
        scores = [f"mean pLDDT {entry['mean_plddt']:.1f}"]
        tm_scores = [(title, entry.get(key)) for key, title in (("iptm", "ipTM"), ("ptm", "pTM"))]
        scores += [f"{title} {score:.2f}" for title, score in tm_scores if score is not None]
        if entry["templates"]:
            scores.append(f"templates {', '.join(entry['templates'])}")
        location = "not kept" if entry.get("dropped") else out / entry["folder"]
        yield f"{entry['name']}{sizes}{rank}: {', '.join(scores)}, {location}"
        if "relaxed" in entry:
            yield relaxed_line(f"{entry['name']} relaxed", entry["relaxed"])
    if summary["status"] != "running":
        yield from (f"table: {out / name}" for name in summary.get("tables", ()))
        if "store" in summary:
            yield f"representations: {summary['store']}"
        if request.zip:
            names = dict.fromkeys(entry["name"] for entry in summary["predictions"] if entry["files"])
            yield from (f"archive: {archive_path(out, name)}" for name in names)
        yield f"report: {out / 'report.html'}"


@checked()
def relax(
    paths: Annotated[Paths, argument("Folders of `warpfold predict`; mmCIF or PDB files.")],
    *,
    best: Annotated[bool, decides("Relax only the prediction of each query that is ranked first.")] = False,
    device: Device = None,
    force: Annotated[bool, writes("Relax again what is relaxed already.")] = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Remove clashes and broken bonds with Amber's force field; needs OpenMM: pip install ".[relax]".

    Returns the reports under "relaxed", and the failures under "failures". The same call continues a stopped run.
    Errors: UserError for files that cannot be read, and without OpenMM.
    """
    from warpfold.relaxation.files import relax_paths

    files = arguments.paths("paths", paths)
    return relax_paths(files, device_of(device), "best" if best else "all", force, progress_of(progress))


@command(relax, continues=True, example="Example:  warpfold relax folded")
def relax_in_shell(given: dict[str, Any]) -> Answer:
    """Remove clashes and broken bonds with Amber's force field; needs OpenMM: pip install ".\\[relax]"."""
    with progress_bar() as progress:
        report = relax(**given, progress=progress)
    lines = (
        f"{relaxed_line(entry['name'], entry)}{', kept' if entry['kept'] else ''}, {entry['path']}"
        for entry in report["relaxed"]
    )
    for failure in report["failures"]:
        warn(f"failed {failure['name']}: {failure['error']}")
    return Answer(report, lines, bool(report["failures"]))


def relaxed_line(name: str, report: dict[str, Any]) -> str:
    """Describe the relaxation of a structure in a line."""
    before, after = (report[f"violations_{moment}"]["residues"] for moment in ("before", "after"))
    mirrored = f", D residues {report['mirrored']}" if report["mirrored"] else ""
    return (
        f"{name}: residues with violations {before} → {after}, energy {_energy(report['energy_before'])} → "
        f"{_energy(report['energy_after'])} kcal/mol, Cα moved {report['ca_rmsd']:.2f} Å (at most "
        f"{report['ca_max']:.2f}), rounds {report['rounds']}, {report['seconds']:.0f} s, {report['platform']}{mirrored}"
    )


def _energy(energy: float | None) -> str:
    return "infinite" if energy is None else f"{energy:.3g}" if abs(energy) >= 1e6 else f"{energy:.0f}"
