"""Replay a run: compute steps again from a checkpoint, and compare digests of the state with those in the run's log.

A device that computes wrongly once in a while, or memory that loses a bit, raises no error.  But every step of a run
repeats to the bit on the same kind of hardware.  With `train.digest_every`, metrics.jsonl holds digests of parameters
and optimizer state, and for each session a description of what the bits depend on (`train.describe_setup`).  A replay
calls `train` with these settings in the folder RUN/.replay, which it removes at the end.
"""

import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from warpfold import settings
from warpfold.data.load.order import Source
from warpfold.data.store.store import Store
from warpfold.engine.checkpoint import DamagedCheckpoint, RunFolder, StepFolders
from warpfold.engine.watch import Row, Watcher
from warpfold.errors import UserError, listed
from warpfold.files import wait_for_lock
from warpfold.parallel.plan import Plan
from warpfold.parallel.team import Team
from warpfold.progress import Progress, no_progress
from warpfold.training.config import RunConfig
from warpfold.training.examples import fingerprint_origin
from warpfold.training.train import describe_setup, train
from warpfold.training.validate import settings_of

NEVER = 10**9  # steps between checkpoints of a recomputation, which saves one at its end alone


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The outcome of a replay.

    start: the step of the checkpoint that the replay began with.
    last: the step of the last digest that was to be compared.
    equal: the number of equal digests in the log before the first difference, that of the checkpoint included.
    interval: the last step with an equal digest and the first step with a different one; None if all are equal.
    unstable_step: the first step at which a second recomputation differed from the first.  None if both were equal, so
        that this machine repeats its work, or if there was no interval to compute.
    left_out: the reason why later digests in the log were not compared; empty if there are none.
    """

    start: int
    last: int
    equal: int
    interval: tuple[int, int] | None = None
    unstable_step: int | None = None
    left_out: str = ""


@dataclass(frozen=True)
class LoggedRun:
    """The rows of metrics.jsonl that a replay needs, in the order of the log, each with its step."""

    digests: Sequence[tuple[int, str]]
    setups: Sequence[tuple[int, dict[str, Any], int]]  # of each session; the last number is its index in `digests`
    examples: dict[int, list[str]]

    def setup_after(self, step: int) -> tuple[dict[str, Any], int]:
        """Return the setup of the session that computed the next step, and the index of its first digest."""
        return [(setup, index) for began, setup, index in self.setups if began <= step][-1]

    def compare(self, computed: dict[int, str]) -> tuple[int, int, int]:
        """Count the equal digests before the first difference; return also the steps of the last one and of that.

        The step of the difference is -1 if there is none.
        """
        count, equal = 0, -1
        for step, digest in self.digests:
            if step in computed:
                if computed[step] != digest:
                    return count, equal, step
                count, equal = count + 1, step
        return count, equal, -1


class _Comparison(Watcher):
    """Collects the digests of a recomputation, and ends it where it cannot be compared with the run."""

    def __init__(self, run: Path, logged: LoggedRun, start: int, last: int, tell: Progress) -> None:
        self.run, self.logged, self.start, self.last, self.tell = run, logged, start, last, tell
        self.digests: dict[int, str] = {}

    def on_metrics(self, row: Row) -> None:
        """Take a row.  Errors: UserError for a checkpoint or an example that is not that of the log."""
        step = row["step"]
        if row["kind"] == "step":
            if row["examples"] != self.logged.examples.get(step, row["examples"]):
                raise UserError(
                    f"{self.run}: the replay draws other examples than the run in step {step}. Only a run that trains "
                    "on all entries of its stores can be replayed."
                )
            self.tell(step - self.start, self.last - self.start, f"step {step}")
        elif row["kind"] in ("digest", "session"):
            self.digests[step] = row["digest"]
            if step == self.start and any(
                at == step and row["digest"] != logged_digest for at, logged_digest in self.logged.digests
            ):
                raise UserError(
                    f"{self.run}: the checkpoint of step {step} does not have the digest that the log has for this "
                    "step. Choose another one with --from."
                )


def replay(run: Path, start: int | None, device: torch.device, team: Team, tell: Progress = no_progress) -> Replay:
    """Compute the steps of a run again, from a checkpoint to the last digest in its log, and compare the digests.

    start: the step of the checkpoint, by default the first one that has a digest in the log.
    tell: called after each step on rank 0.
    All ranks call this.  After a difference the replay goes on to the next checkpoint of the run, and then computes
    the steps since the checkpoint before once more.
    Errors: UserError for a folder without digests, and for other ranks, devices, versions, data or checkpoints.
    """
    config, logged = settings_of(run), read_log(run)
    checkpoint_steps = StepFolders(run / "checkpoints").steps()
    start = choose_start(run, start, checkpoint_steps, logged)
    setup, index = logged.setup_after(start)
    assemblies = config.model.multimer is not None
    sources = [Source(Store(path), weight=weight, assemblies=assemblies) for path, weight in setup["stores"]]
    init = None if setup["init"] is None else Path(setup["init"])
    present_setup = describe_setup(config, sources, init, device, team)
    if difference := setup_difference(run, setup, present_setup):
        raise UserError(f"{run}: {difference}")
    digests, left_out = _comparable_digests(run, logged, index, present_setup)
    last = max(step for step, _ in digests)
    compared = replace(logged, digests=[(step, digest) for step, digest in digests if step >= start])
    if start >= last:
        raise UserError(f"{run}: the log has no digest after step {start}. Choose an earlier checkpoint with --from.")
    # Each part of the replay is one call of `train`.  A part ends where a session of the run began, since the plan may
    # have changed there, and at checkpoints, so that a long replay does not go on for long after a difference.
    ends = sorted(
        {step for step in (*checkpoint_steps, *(step for step, *_ in logged.setups), last) if start < step <= last}
    )
    folder, computed = run / ".replay", dict[int, str]()

    def compute(begin: int, end: int) -> dict[int, str]:
        """Train from step `begin`, the last checkpoint in the folder of the replay, to `end`; return its digests."""
        comparison = _Comparison(run, compared, start, last, tell)
        settled = replay_config(config, logged.setup_after(begin)[0], end, device)
        team.remesh(settled.plan)
        summary = train(
            settled,
            sources,
            folder,
            init=init,
            replay=run / "order.txt",
            device=device,
            watch=comparison if team.is_rank_zero else None,
            team=team,
        )
        if not summary.finished:
            raise KeyboardInterrupt
        return comparison.digests

    equal, last_equal, first_different, unstable_step = 0, start, -1, None
    with ExitStack() as stack:
        if team.is_rank_zero:
            busy_error = UserError(f"{run}: another replay of this run goes on. Wait for its end.")
            stack.enter_context(wait_for_lock(run / ".replay-lock", busy_error))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        begin_folder(folder, run, start, config, fingerprint_origin(sources, init, team), team)
        for begin, end in zip([start, *ends], ends):
            first = compute(begin, end)
            computed |= first
            # No rank looks for the checkpoint of this part before rank 0 has written it and comes here.
            equal, last_equal, first_different = team.broadcast(compared.compare(computed), "the comparison of digests")
            if first_different < 0:
                continue
            # Either the run was wrong, or the replay is.  A second recomputation says whether this machine repeats.
            # If the log has two different digests of a step at which a session resumed, there is nothing to recompute.
            if last_equal < first_different:
                if team.is_rank_zero:
                    shutil.rmtree(StepFolders(folder / "checkpoints").step_path(end))
                team.broadcast(None, "the second recomputation")
                second = compute(begin, first_different)
                unstable_step = next((step for step in sorted(second) if second[step] != first[step]), None)
            break
        unstable_step = team.broadcast(unstable_step, "the comparison of recomputations")
    interval = None if first_different < 0 else (last_equal, first_different)
    return Replay(
        start=start, last=last, equal=equal, interval=interval, unstable_step=unstable_step, left_out=left_out
    )


def _comparable_digests(
    run: Path, logged: LoggedRun, index: int, present_setup: dict[str, Any]
) -> tuple[Sequence[tuple[int, str]], str]:
    """Return the digests from `index` on up to a session with another setup, and why later ones are left out.

    A digest depends on the number of ranks, so those of other sessions cannot be compared.
    """
    for step, setup, at in logged.setups:
        if at > index and (difference := setup_difference(run, setup, present_setup)):
            return logged.digests[index:at], f"steps after {step}: {difference}"
    return logged.digests[index:], ""


def read_log(run: Path) -> LoggedRun:
    """Read the digests, the sessions and the examples of a run.  Errors: UserError for a log without digests."""
    path = run / "metrics.jsonl"
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}). Give the folder of a training run.") from error
    digests, setups, examples = [], [], {}
    for line in lines:
        try:
            row = json.loads(line)
            if row["kind"] == "step":
                examples[int(row["step"])] = list(row["examples"])
            elif row["kind"] in ("digest", "session"):
                digests.append((int(row["step"]), str(row["digest"])))
            if row["kind"] == "session":
                setups.append((int(row["step"]), dict(row["setup"]), len(digests) - 1))
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # cut short by a kill
    if not digests or not setups:
        raise UserError(f"{path}: holds no digests. Train with --set train.digest_every=100.")
    return LoggedRun(digests, setups, examples)


def choose_start(run: Path, start: int | None, kept: Sequence[int], logged: LoggedRun) -> int:
    """Choose the checkpoint from which a replay starts: `start`, or the first one with a digest in the log.

    kept: the steps that have a checkpoint.  Errors: UserError where there is no such checkpoint.
    """
    if not kept:
        raise UserError(f"{run}: holds no checkpoint. Train on until one is saved (train.save_every).")
    first = min(step for step, *_ in logged.setups)

    def numbers(steps: Sequence[int]) -> str:
        return listed([str(step) for step in steps], 4)

    usable = [step for step in kept if step >= first and any(at == step for at, _ in logged.digests)]
    if not usable:
        raise UserError(
            f"{run}: the log has no digest of its checkpoints (steps {numbers(kept)}). Continue the run with "
            "train.digest_every, and replay from a later checkpoint."
        )
    if start is None:
        return usable[0]
    if start not in usable:
        missing = "no digest" if start in kept else "no checkpoint"
        raise UserError(f"{run}: has {missing} of step {start}. Choose one of {numbers(usable)} with --from.")
    return start


def setup_difference(run: Path, there: dict[str, Any], here: dict[str, Any]) -> str:
    """Say in what a session of the run differs from this replay, and what to do; empty if in nothing that matters."""
    if (ranks := there["ranks"]) != here["ranks"]:
        command = "warpfold doctor" if ranks == 1 else f"torchrun --nproc-per-node {ranks} -m warpfold doctor"
        return f"it was trained by {ranks} ranks, and the replay has {here['ranks']}. Use {command} --replay {run}."
    for key, remedy in (("device", "Replay it on that device"), ("torch", "Install that version")):
        if there[key] != here[key]:
            return f"it was trained with {key} {there[key]}, and the replay has {here[key]}. {remedy}."
    return ""


def begin_folder(folder: Path, run: Path, start: int, config: RunConfig, origin: dict[str, str], team: Team) -> None:
    """Write the settings and a checkpoint of the run into the folder of the replay, on rank 0.  All ranks call this.

    origin: fingerprints of the data and the first parameters that the replay uses.
    Errors: UserError where the run had others, or the checkpoint is damaged.
    """
    problem = ""
    if team.is_rank_zero:
        shutil.rmtree(folder, ignore_errors=True)  # of a replay that was killed
        try:
            checkpoint = StepFolders(run / "checkpoints").load(start)
            notes = checkpoint.notes
            origin_names = {"store": "stores", "init": "parameters to start from"}
            if differing := [origin_names[key] for key in origin_names if notes.get(key) != origin[key]]:
                problem = f"{run}: its {differing[0]} have changed since it began. Put them back as they were."
            else:
                with RunFolder(folder) as scratch:
                    scratch.write_settings(settings.to_toml(config))
                    scratch.save(checkpoint, keep=1)
        except DamagedCheckpoint as error:
            problem = f"{error}. Choose another one with --from."
    if problem := team.broadcast(problem, "the folder of the replay"):
        raise UserError(problem)


def replay_config(config: RunConfig, setup: dict[str, Any], end: int, device: torch.device) -> RunConfig:
    """Return the settings of a recomputation to step `end`: those of the run, with the plan of one of its sessions."""
    plan = settings.build(Plan, setup["plan"], "metrics.jsonl", "plan.")
    if device.type == "cpu" and plan.threads is None:
        plan = replace(plan, threads=setup["threads"])  # sums on a CPU depend on their number
    train = replace(
        config.train,
        steps=end,
        digest_every=1,
        save_every=NEVER,
        keep=2,  # the checkpoint before is needed for a second recomputation
        validate_every=0,
        validation_examples=0,
        patience=0,
        tensorboard=False,
        wandb="off",
    )
    return replace(config, plan=plan, train=train)
