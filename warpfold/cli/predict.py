"""`warpfold predict` and `warpfold relax`."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from warpfold import arguments
from warpfold.arguments import Cluster, Device, PathLike, Paths, Shard, Workers, argument, decides, paths, reads, writes
from warpfold.bulk import JobPart
from warpfold.cli.common import (
    Answer,
    AsJson,
    Axial,
    Branch,
    Lists,
    command,
    device_of,
    plans_said,
    say_refused,
    show,
    this_process,
    warn,
)
from warpfold.errors import UserError
from warpfold.prediction.fold_options import (
    FixedChains,
    Hits,
    InitialGuess,
    MaxTemplateDate,
    MsaCache,
    MsaServer,
    PredictOptions,
    Template,
    TemplateStructures,
)
from warpfold.progress import Progress, progress_bar

if TYPE_CHECKING:
    from warpfold.parallel.team import Team

WARNED = 20  # warnings that are printed at most

# ColabFold's names of options, and the words that stand for them here.
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
# Those of ColabFold and OpenFold whose values mean something else here: what to give.
INSTEAD = {
    "--config_preset": "--params: a file of parameters says which model it is of",
    "--custom-template-path": "--template FILE ... (a file, or FILE:CHAIN, for each template)",
    "--jax_param_path": "--params",
    "--model-type": "--params: of a folder with parameters of several kinds, those are taken that the queries need",
    "--model_device": "--device",
    "--msa-mode": "--msa FILE, or --msa-server URL; without either the sequence is folded alone",
    "--num-relax": "--relax best, or --relax all",
    "--openfold_checkpoint_path": "--params",
    "--output_dir": "--out",
    "--templates": "--template FILE, or --hits with --template-structures; no server is asked for templates",
    "--use-gpu-relax": "--device: relaxation runs where the model does",
    "--use_precomputed_alignments": "--msa FOLDER",
}
WhichRelaxed = Literal["all", "best", "none"]


@dataclass(frozen=True, kw_only=True)
class PredictCommand(PredictOptions):
    """Fold proteins and complexes: mmCIF, PDB, pLDDT, PAE, a summary and a report; rank models and seeds."""

    query: Annotated[
        Paths,
        argument(
            "FASTA (A:B is a complex), CSV (id,sequence), alignments (A3M, Stockholm), structures (their chains), "
            "jobs of Boltz and AlphaFold 3 (YAML, JSON), folders of these, - (standard input), or a sequence itself.",
            metavar="QUERY...",
            shell=list[str],
            path="local",
        ),
    ] = field(kw_only=False)
    params: Annotated[
        Paths,
        reads(
            "WarpFold's .safetensors, DeepMind's params_model_*.npz, or a folder of these; several: each folds, and "
            "they are ranked."
        ),
    ] = field(kw_only=False)
    out: Annotated[PathLike, writes("Folder for the predictions; a stopped run continues in it.")] = field(
        kw_only=False
    )
    msa: Annotated[
        Paths | None, reads("Alignments, or folders of them; each goes to the sequence that is its first row.")
    ] = None
    msa_server: MsaServer = None
    msa_cache: MsaCache = None
    template: Template = None
    hits: Hits = None
    template_structures: TemplateStructures = None
    max_template_date: MaxTemplateDate = None
    initial_guess: InitialGuess = None
    fixed_chains: FixedChains = None
    workers: Workers = 1
    cluster: Cluster = None
    shard: Shard = None
    relax: Annotated[
        WhichRelaxed, decides("Relax all predictions, or of each query the best one, with OpenMM: docs/howto/score.md.")
    ] = "none"
    progress: Progress | None = None
    team: "Team | None" = None

    def __call__(self) -> dict[str, Any]:
        """Fold every query with each of the parameters and seeds into the folder `out`; return its summary.

        Alignments, templates and hits belong to sequences by what is in them, or by their names.  team: processes that
        share proteins; all call this.  A stopped run continues by the same call.  Returns what `--json` prints:
        proteins that failed are under "failures" (docs/reference/outputs.md).
        Errors: UserError for bad input and arguments, where nothing is written, and for an `out` that is something
        else.
        """
        from warpfold.parallel.team import team_of
        from warpfold.prediction.predict import Share
        from warpfold.prediction.predict import predict as fold_all
        from warpfold.prediction.queries import fixed_chains, server_of
        from warpfold.prediction.templates import TemplateSources

        _check_relax(self.relax)
        team, tell, out = team_of(self.team), arguments.progress_of(self.progress), Path(self.out)
        sources = TemplateSources(
            files=[str(one) for one in paths("template", self.template)],
            hits=paths("hits", self.hits),
            structures=arguments.path_or_none("template_structures", self.template_structures),
            max_date=self.max_template_date,
        )
        part = JobPart.parse(self.shard) if self.shard else JobPart(1, 1)
        share = Share(part=part, workers=self.workers, cluster=self.cluster)
        asked, parameters = arguments.queries("query", self.query), paths("params", self.params)
        for name, found in (("query", asked), ("params", parameters)):
            if not found:
                what = "what to fold" if name == "query" else "files of parameters"
                raise UserError(f"{name}: is empty; name {what}")
        options = replace(self.only(PredictOptions), device=device_of(self.device))
        server = server_of(self.msa_server, self.msa_cache, out / "alignments")
        guess = self.initial_guess
        guess = guess if guess == "self" else arguments.path_or_none("initial_guess", guess)
        summary = fold_all(
            asked, paths("msa", self.msa), parameters, out, options, tell, sources, team, share, server,
            guess, fixed_chains(self.fixed_chains),
        )  # fmt: skip
        if not team.is_rank_zero:
            return summary
        return relax_predictions(summary, out, self.relax, options.device or "cpu", tell)


def _check_relax(which: WhichRelaxed) -> None:
    """Raise UserError where OpenMM is missing: before hours of work, not after them."""
    if which != "none":
        from warpfold.relax.amber import require_openmm

        require_openmm()


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


predict = arguments.function(PredictCommand)


class Predict(Lists):
    """The command `predict`, which takes ColabFold's names of its options too.

    --representations needs no value: alone, it means those of the .npz.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse words with our names in the place of ColabFold's, and a value for --representations."""
        words = []
        for place, one in enumerate(args):
            name, equals, value = one.partition("=")
            *before, last = ALIASES.get(name, (name,))
            words += [*before, last + equals + value]
            if words[-1] == "--representations" and not "".join(args[place + 1 : place + 2]).endswith(".store"):
                words.append("npz")
        return super().parse_args(ctx, words)


@command(
    PredictCommand,
    cls=Predict,
    continues=True,
    example="Example:  warpfold predict query.fasta --msa query.a3m --params params.safetensors --out folded\n\n"
    "A complex, a FASTA record for each chain:  warpfold predict dimer.fasta --msa msas/ "
    "--params params_model_*_multimer_v3.npz --seeds 2 --out folded\n\n"
    "Many different structures of one protein:  warpfold predict q.a3m --params params.npz --seeds 50 --dropout "
    "--out folded\n\n"
    "What each pass found:  warpfold predict q.a3m --params params.npz --recycles 12 --save-recycles --out folded\n\n"
    "A proteome, by a job array of 8:  warpfold predict all.fasta --params params.npz --shard $I/8 --out folded\n\n"
    "Long ones on several processes, under torchrun: docs/howto/clusters.md.  Many, on several machines: "
    "docs/howto/many_proteins.md.\n\n"
    "ColabFold's names of options (--num-recycle, --num-seeds, --amber ...) work too: docs/howto/migrate.md.",
)
def predict_in_shell(
    given: dict[str, Any], axial: Axial = None, branch: Branch = None, as_json: AsJson = False
) -> None:
    """Have the processes meet and fold, relax what was predicted, and say how it went."""
    from warpfold.parallel.plan import Plan
    from warpfold.parallel.team import distributed_context
    from warpfold.prediction.pages import warnings_of

    process, out, relax = this_process(), given["out"], given.pop("relax")
    _check_relax(relax)
    given["device"] = where = device_of(given["device"], process)
    # Without either, how the processes share out the proteins is chosen when these are known.
    plan = None if axial is None and branch is None else Plan(axial=axial or 1, branch=branch or 1)
    # Of several processes the first has a bar; `predict` says how much time is left.
    bar = progress_bar(remaining=False, every=30.0) if process.rank == 0 else nullcontext()
    with distributed_context(process, plan, where) as team, bar as progress, plans_said(process.rank):
        summary = predict(**given, progress=progress, team=team)
    if team.is_rank_zero:
        if summary["status"] == "running":  # others are at work on the rest, or have yet to begin
            then = f", then `warpfold relax {out}`" if relax != "none" else ""
            part = given["shard"] or "1/1"
            warn(f"part {part} is done; the last part writes {out / 'summary.json'}{then}")
        with progress_bar() as tell:  # the other processes have ended
            summary = relax_predictions(summary, out, relax, where, tell)
        say_refused(summary["refused"])
        show(Answer(summary, _lines(summary, out)), as_json)
        warnings = warnings_of(summary)
        for one in warnings[:WARNED]:
            warn(f"{one.heading('queries') or 'warning: '}{one.said}")
        if len(warnings) > WARNED:
            warn(f"and {len(warnings) - WARNED} more warnings, in {out / 'summary.json'}")
        for failure in summary["failures"]:
            of = f" ({failure['model']}, seed {failure['seed']})" if "model" in failure else ""
            warn(f"failed {failure['name']}{of}: {failure['error']}")
    # A protein may have hits, and there is none of their structures.
    lack = any(not one["templates"] and one.get("templates_missing", 0) > 0 for one in summary["predictions"])
    raise typer.Exit(1 if summary["failures"] or lack else 0)


def _lines(summary: dict[str, Any], out: Path) -> Iterator[str]:
    """Yield what is printed of each prediction."""
    for entry in summary["predictions"]:
        chains = f" ({len(entry['chains'])} chains)" if "chains" in entry else ""
        rank = f", rank {entry['rank']}" if "ranked" in entry else ""
        scores = [f"mean pLDDT {entry['mean_plddt']:.1f}"]
        known = [(title, entry.get(key)) for key, title in (("iptm", "ipTM"), ("ptm", "pTM"))]
        scores += [f"{title} {score:.2f}" for title, score in known if score is not None]
        if entry["templates"]:
            scores.append(f"templates {', '.join(entry['templates'])}")
        where = "not kept" if entry.get("dropped") else out / entry["folder"]
        yield f"{entry['name']}{chains}{rank}: {', '.join(scores)}, {where}"
        if "relaxed" in entry:
            yield relaxed_line(f"{entry['name']} relaxed", entry["relaxed"])
    if summary["status"] != "running":
        yield from (f"table: {out / name}" for name in summary.get("tables", ()))
        if "store" in summary:
            yield f"representations: {summary['store']}"
        yield f"report: {out / 'report.html'}"


@command(continues=True, example="Example:  warpfold relax folded")
def relax(
    paths: Annotated[list[Path], argument("Folders of `warpfold predict`; mmCIF or PDB files.")],
    best: Annotated[bool, decides("Of several predictions of one query, only the one that is ranked first.")] = False,
    device: Device = None,
    force: Annotated[bool, writes("Relax again what is relaxed already.")] = False,
) -> Answer:
    """Remove clashes and broken bonds with Amber's force field; needs OpenMM: pip install "warpfold\\[relax]"."""
    from warpfold.relax.files import relax_paths

    with progress_bar() as progress:
        done = relax_paths(paths, device_of(device), "best" if best else "all", force, progress)
    lines = (
        f"{relaxed_line(one['name'], one)}{', kept' if one['kept'] else ''}, {one['path']}" for one in done["relaxed"]
    )
    for failure in done["failures"]:
        warn(f"failed {failure['name']}: {failure['error']}")
    return Answer(done, lines, bool(done["failures"]))


def relaxed_line(name: str, report: dict[str, Any]) -> str:
    """Describe the relaxation of a structure in a line."""
    before, after = (report[f"violations_{when}"]["residues"] for when in ("before", "after"))
    mirrored = f", D residues {report['mirrored']}" if report["mirrored"] else ""
    return (
        f"{name}: residues with violations {before} → {after}, energy {_energy(report['energy_before'])} → "
        f"{_energy(report['energy_after'])} kcal/mol, Cα moved {report['ca_rmsd']:.2f} Å (at most "
        f"{report['ca_max']:.2f}), rounds {report['rounds']}, {report['seconds']:.0f} s, {report['platform']}{mirrored}"
    )


def _energy(energy: float | None) -> str:
    return "infinite" if energy is None else f"{energy:.3g}" if abs(energy) >= 1e6 else f"{energy:.0f}"
