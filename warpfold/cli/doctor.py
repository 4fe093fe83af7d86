"""`warpfold doctor`: checks of a single process, and of all processes of a job."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warpfold.arguments import Device, PathLike, checked, decides, path_or_none, progress_of, reads, writes
from warpfold.cli.common import (
    Answer,
    AsJson,
    Lists,
    check_outputs,
    chosen,
    command,
    device_of,
    on_sigterm,
    show,
    table,
    this_process,
    warn,
)
from warpfold.errors import UserError
from warpfold.files import row_file
from warpfold.progress import Progress, are_hidden, no_progress, progress_bar

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from warpfold.bench.doctor import Finding
    from warpfold.cluster.doctor import Examined
    from warpfold.cluster.rules import Outcome
    from warpfold.cost.memory import MemoryCheck
    from warpfold.parallel.team import Team
    from warpfold.training.replay import Replay

HINT = (
    "Check every operation on this device against its definition: warpfold doctor --kernels. Check all ranks, their "
    "links and files, under torchrun or srun: warpfold doctor --cluster."
)
RED, YELLOW, GREEN = typer.colors.RED, typer.colors.YELLOW, typer.colors.GREEN
COLORS = dict.fromkeys(("WRONG", "wrong"), RED) | {"ok": GREEN}
COLORS |= dict.fromkeys(("Slow", "Short", "Newer than tested", "Never tried", "note"), YELLOW)
SEVERITY: tuple["Outcome", ...] = ("wrong", "note", "not checked", "ok")


class WithoutFile(Lists):
    """A command without file arguments, with an error for `--cluster FILE`, which other commands accept."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raises UserError for a file among them."""
        ctx.allow_extra_args = True
        unparsed = super().parse_args(ctx, args)
        if unparsed:
            raise UserError(
                f"{unparsed[0]}: the doctor reads no file. Measure a cluster with doctor --cluster --out FILE, and "
                "pass the file to plan and train: --cluster FILE."
            )
        return unparsed


@checked(**{"from": "start"})
def doctor(
    *,
    kernels: Annotated[
        bool, decides("Check every operation, forward and backward, against its definition (a minute).")
    ] = False,
    settings: Annotated[
        str | None,
        reads("TOML file or preset with the sizes; default: tiny on a CPU, monomer on a GPU.", path="local"),
    ] = None,
    dtype: Annotated[list[str] | None, decides("With --kernels: bf16, fp32; default: both.")] = None,
    rows: Annotated[
        PathLike | None, writes("With --kernels: file for findings as they come, one JSON object per line.")
    ] = None,
    cluster: Annotated[
        bool, decides("Check all ranks, their links and a folder; start it like training (seconds).")
    ] = False,
    folder: Annotated[PathLike | None, reads("With --cluster: test this folder, where runs will be written.")] = None,
    link: Annotated[
        str | None, reads("With --cluster: expected network: ib400, roce100x2, eth25 (Gb/s, adapters).")
    ] = None,
    out: Annotated[PathLike | None, writes("With --cluster: file for the measured links, for plan and train.")] = None,
    replay: Annotated[
        PathLike | None,
        reads("Folder of a training run with train.digest_every: recompute its steps and compare digests."),
    ] = None,
    start: Annotated[
        int | None, decides("With --replay: step of the first checkpoint; default: the first one.", "--from")
    ] = None,
    device: Device = None,
    progress: Progress | None = None,
    team: "Team | None" = None,
) -> dict[str, Any]:
    """Describe this machine, or check that it computes correctly.

    Returns the output of `--json`: the machine and a verdict in sentences; with `kernels`, a finding for each operation
    and the number of wrong ones, "red"; with `cluster`, the findings and the number of "wrong" ones; with `replay`, the
    first "interval" of steps whose digests differ, or None.
    team: the processes that are checked together. All of them call this function.
    Errors: UserError for options that exclude each other, bad files and settings; TeamError if a rank does not answer.
    """
    check_options(locals())
    import torch

    from warpfold.parallel.team import team_of

    tell, processes = progress_of(progress), team_of(team)
    torch_device = torch.device(device_of(device, processes.process))
    if replay is not None:
        from warpfold.training.replay import replay as recompute

        return asdict(recompute(Path(replay), start, torch_device, processes, tell))
    if cluster:
        return check_cluster(
            processes, torch_device, folder, link, out, lambda so_far, what: tell(0, 1, what)
        ).as_json()
    if kernels:
        return check_kernels(torch_device, settings, dtype or (), path_or_none("rows", rows), tell)[0]
    from warpfold.bench.doctor import of_machine
    from warpfold.check.versions import describe_versions
    from warpfold.cost.machine import describe

    return {"machine": describe(torch_device), "verdict": [*of_machine(torch_device), describe_versions()]}


def check_options(options: Mapping[str, Any]) -> None:
    """Raise UserError for options of the doctor that exclude each other."""
    has_kernel_options = any(options[name] for name in ("settings", "dtype", "rows"))
    if options["start"] is not None and options["replay"] is None:
        raise UserError("--from: requires --replay. Add --replay RUN.")
    if options["replay"] is not None and (options["cluster"] or options["kernels"]):
        raise UserError("--replay: cannot be combined with --kernels or --cluster. Use one of them at a time.")
    if options["cluster"]:
        if options["kernels"] or has_kernel_options:
            raise UserError(
                "--cluster: cannot be combined with --kernels, --settings, --dtype or --rows. Check the operations in "
                "one process."
            )
    elif any(options[name] for name in ("folder", "link", "out")):
        raise UserError("--folder, --link, --out: require --cluster. Add --cluster.")
    if has_kernel_options and not options["kernels"]:
        raise UserError("--settings, --dtype, --rows: require --kernels. Add --kernels.")


def check_kernels(
    where: "torch.device",
    settings: str | None,
    dtypes: Sequence[str],
    rows: Path | None,
    progress: Progress,
) -> "tuple[dict[str, Any], list[Finding], MemoryCheck | None]":
    """Check every operation at the sizes of settings.  Returns the report, and the findings and the memory in it."""
    from warpfold import settings as toml
    from warpfold.bench import doctor as checks
    from warpfold.bench.doctor import of_findings, of_machine
    from warpfold.check.versions import describe_versions
    from warpfold.cost.memory import check_memory

    source = settings or ("monomer" if where.type == "cuda" else "tiny")
    cases = checks.cases_of(toml.load(source), source)
    dtypes = chosen("--dtype", dtypes, checks.DTYPES) or list(checks.DTYPES)
    check_outputs(rows)
    with row_file(rows) as sink:
        findings = checks.examine(cases, where, dtypes, progress, sink)
    # mps does not report its peak memory.
    memory = None if where.type == "mps" else check_memory(where)
    verdict = [*of_findings(findings, source, where), *of_machine(where), describe_versions()]
    report = {**checks.report(findings, where, source), "memory": memory and asdict(memory), "verdict": verdict}
    return report, findings, memory


def check_cluster(
    team: "Team",
    where: "torch.device",
    folder: PathLike | None,
    link: str | None,
    out: PathLike | None,
    report: "Callable[[Examined, str], None]",
) -> "Examined":
    """Check the ranks of a team, and write the measured links to `out`.  report: as in `examine_cluster`."""
    from warpfold.cluster.doctor import examine_cluster
    from warpfold.device import unsupported_on_mps

    if reason := unsupported_on_mps(where, {"--cluster": True}):
        raise UserError(reason)
    if team.is_rank_zero:
        check_outputs(path_or_none("out", out))
    examined = examine_cluster(team, where, os.environ, path_or_none("folder", folder), link, report)
    if team.is_rank_zero:
        save_links(examined, out)
    return examined


def save_links(examined: "Examined", out: PathLike | None) -> None:
    """Write the measured links to a file, if there are any and a file was given."""
    if out is not None and examined.cluster is not None:
        examined.cluster.save(Path(out))


@command(
    doctor,
    cls=WithoutFile,
    example="Example:  warpfold doctor --kernels --settings monomer;  "
    "torchrun --nproc-per-node 8 -m warpfold doctor --cluster --folder runs --out cluster.toml\n\n"
    "Compute a run again:  warpfold doctor --replay run --from 400",
)
def doctor_in_shell(given: dict[str, Any], as_json: AsJson = False) -> None:
    """Describe this machine, and check that it computes correctly; exit with 1 if it does not."""
    check_options(given)
    if given["replay"] is not None:
        raise typer.Exit(_replay_in_shell(given, as_json))
    if given["cluster"]:
        raise typer.Exit(_cluster_in_shell(given, as_json))
    if not given["kernels"]:
        report = doctor(**given)
        show(Answer(report, [*_facts(report["machine"]), *_colored(report["verdict"]), f"\n{HINT}"]), as_json)
        return
    import torch

    torch_device = torch.device(device_of(given["device"]))
    with progress_bar() as progress:
        kernels = check_kernels(torch_device, given["settings"], given["dtype"] or (), given["rows"], progress)
    report, findings, memory = kernels
    for finding in findings:
        if finding.verdict.red:
            warn(f"red: {finding.verdict.says()}")
    text: list[str | Table] = [*_facts(report["machine"]), *_findings(findings, torch_device.type, report["settings"])]
    text += [*([] if memory is None else [memory.says()]), *_colored(report["verdict"])]
    show(Answer(report, text), as_json)
    raise typer.Exit(int(bool(report["red"])))


def _replay_in_shell(given: dict[str, Any], as_json: bool) -> int:
    """Recompute steps of a run with all processes, and print the result on rank 0; returns 1 on a difference."""
    from warpfold.parallel.team import distributed_context
    from warpfold.training.replay import Replay

    process = this_process()
    bar = progress_bar(every=30.0) if process.rank == 0 else nullcontext(no_progress)
    with distributed_context(process, None, device_of(given["device"], process)) as team:
        with bar as progress:
            replayed = Replay(**doctor(**given, progress=progress, team=team))
        # Print before any rank exits, because torchrun ends all ranks when one exits with 1.
        if team.is_rank_zero:
            show(Answer(asdict(replayed), replay_report(replayed)), as_json)
    return 0 if replayed.interval is None else 1


def _cluster_in_shell(given: dict[str, Any], as_json: bool) -> int:
    """Check the cluster with all processes, and print the findings on rank 0; returns 1 if something is wrong."""
    import torch

    from warpfold.cluster.doctor import LIMIT, Examined
    from warpfold.cluster.rules import ClusterFinding
    from warpfold.cost.links import network
    from warpfold.parallel.team import TeamError, distributed_context

    began, process = time.monotonic(), this_process()
    torch_device = torch.device(device_of(given["device"], process))
    # Report a wrong option before the ranks wait for each other.
    if given["link"] is not None:
        network(given["link"], process.ranks_per_node)
    if process.rank == 0:
        check_outputs(given["out"])
    # A guess until the nodes report their ranks.
    count_per_node = process.ranks_per_node
    nodes = [
        list(range(process.ranks))[start : start + count_per_node] for start in range(0, process.ranks, count_per_node)
    ]
    latest = [Examined(nodes, torch_device.type)]

    def report(so_far: Examined, what: str) -> None:
        latest[:] = [so_far]
        if process.rank == 0 and not are_hidden():
            warn(f"checking {what} ...")

    # On SIGTERM, report the findings so far.
    team_error = TeamError(
        f"rank {process.rank} was asked to end (SIGTERM): torchrun does so when another rank of the node has "
        "ended, whose log has the reason; Slurm when the time is over"
    )
    try:
        with on_sigterm(team_error), distributed_context(process, None, torch_device, LIMIT, LIMIT) as team:
            examined = check_cluster(team, torch_device, given["folder"], given["link"], given["out"], report)
            # Print before the other ranks may exit, because torchrun ends all ranks when one exits with 1.
            if team.is_rank_zero:
                show(cluster_report(examined, given["out"]), as_json)
    except TeamError as error:
        if process.rank == 0:
            remedy = "check the logs of that process and its node (dmesg), or leave the node out"
            rank_finding = ClusterFinding("ranks", "all ranks answer", "wrong", str(error), remedy)
            so_far = replace(latest[0], findings=[*latest[0].findings, rank_finding], seconds=time.monotonic() - began)
            save_links(so_far, given["out"])
            show(cluster_report(so_far, given["out"]), as_json)
        raise
    return 1 if examined.wrong else 0


def replay_report(found: "Replay") -> list[str]:
    """Format the result of a replay in a few lines."""
    compared = f"{found.equal} digest{'s' * (found.equal > 1)}"
    left_out_lines = [typer.style(f"not compared: {found.left_out}", fg=YELLOW)] if found.left_out else []
    if found.interval is None:
        return [typer.style(f"all {compared} equal, steps {found.start} to {found.last}", fg=GREEN), *left_out_lines]
    equal_step, different_step = found.interval
    lines = [f"{compared} equal, steps {found.start} to {equal_step}"]
    if equal_step == different_step:
        problem = f"step {different_step}: the state that the run continued from is not the state that it had saved"
        return [*lines, typer.style(problem, fg=RED), *left_out_lines]
    steps_text = (
        f"step {different_step}" if different_step == equal_step + 1 else f"steps {equal_step + 1} to {different_step}"
    )
    lines.append(typer.style(f"{steps_text}: the digest after step {different_step} differs", fg=RED))
    if found.unstable_step is None:
        lines.append("a second recomputation has the digests of the first: this machine repeats its work")
    else:
        lines.append(
            f"a second recomputation differs from the first in step {found.unstable_step}: this machine is not "
            "reproducible, and the run may be correct. Check the machine with warpfold doctor --kernels"
        )
    return [*lines, *left_out_lines]


def _facts(machine: dict[str, str]) -> list[str]:
    """Format the description of a machine."""
    wide = max(map(len, machine))
    return [f"{key:{wide}}  {value}" for key, value in machine.items()]


def _colored(sentences: list[str]) -> list[str]:
    """Colour the sentences of a verdict by their first words."""
    return ["", *(typer.style(sentence, fg=COLORS.get(sentence.partition(":")[0])) for sentence in sentences)]


def _findings(findings: "list[Finding]", kind: str, source: str) -> "Iterator[str | Table]":
    """Yield the table of the checked operations, and notes on it."""
    from warpfold.bench.doctor import HEADS
    from warpfold.bench.doctor import table as rows_of

    if kind == "cpu":
        yield "\nNo GPU is checked: these are the CPU's fast paths."
    yield f"\nSizes of {source}. Errors to fp64, ours / the definition's. Speeds are rough, from a few passes.\n"
    yield table(HEADS, rows_of(findings), lambda row: "bold red" if row[-1] == "RED" else "")
    if any(finding.verdict.case.full_rows for finding in findings):
        yield "if rows were reduced, speeds are those of the reduced case"


def cluster_report(examined: "Examined", out: Path | None) -> Answer:
    """Format the findings of a cluster.  out: the file of its measured links."""

    def text() -> Iterator[str]:
        """Yield the printed lines."""
        ranks, nodes = sum(map(len, examined.nodes)), len(examined.nodes)
        yield f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}, {examined.device}\n"
        missing: dict[str, list[str]] = {}
        for finding in sorted(examined.findings, key=lambda finding: SEVERITY.index(finding.outcome)):
            if finding.outcome == "not checked":
                missing.setdefault(finding.says, []).append(finding.check)
                continue
            remedy = f"  -> {finding.cure}" if finding.cure else ""
            outcome = f"{finding.outcome.upper() if finding.outcome == 'wrong' else finding.outcome:5}"
            outcome = typer.style(outcome, fg=COLORS.get(finding.outcome))
            yield f"{outcome} {finding.topic}: {finding.check}: {finding.says}{remedy}"
        for reason, checks in missing.items():
            yield f"not checked: {', '.join(checks)}: {reason}"
        outcomes = [finding.outcome for finding in examined.findings]
        counts = [f"{outcomes.count(outcome)} {outcome}" for outcome in SEVERITY]
        yield f"\n{', '.join(counts)}; {examined.seconds:.0f} s"
        if ranks == 1:
            yield "no ranks and no links were compared: start the command on all processes, with torchrun or srun"
        if out and examined.cluster:
            yield f"measured links: {out}; `plan --cluster` and `train --cluster` read it"
        elif out:
            warn(f"{out}: not written, because there are no links, or the nodes differ in size")

    return Answer(examined.as_json(), text(), bool(examined.wrong))
