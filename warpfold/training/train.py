"""Train: one flat loop, the supplement's recipe (Supp. 1.11).

Everything random is keyed by (seed, step or example), never by a generator's state: a run that was killed continues
from its last checkpoint and is, to the bit, the run that was not.
"""

import hashlib
import json
import logging
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from warpfold import settings
from warpfold.cost.machine import name as device_name
from warpfold.data.load.examples import RunOrder
from warpfold.data.load.order import Source
from warpfold.data.store.store import Store
from warpfold.device import Snapshot, unsupported_on_mps
from warpfold.engine.checkpoint import Checkpoint, RunFolder
from warpfold.engine.learn import DeviceResult, Learner, in_batches
from warpfold.engine.loop import Log, StopSignals
from warpfold.engine.optim import Optimizer
from warpfold.engine.trainable import adapters_state, freeze, frozen_state, merged_state, trained_parts
from warpfold.engine.trunk import FrozenTrunk, TrunkStore, largest_store
from warpfold.engine.watch import TensorBoard, Watching, WeightsAndBiases, as_watchers
from warpfold.errors import UserError, listed
from warpfold.model.alphafold import AlphaFold
from warpfold.model.weights.files import load_model, save_params
from warpfold.ops.dispatch import refusals
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import DTYPES
from warpfold.parallel.team import Team
from warpfold.training.card import run_card
from warpfold.training.config import RunConfig
from warpfold.training.examples import (
    draw_recycles,
    fingerprint,
    fingerprint_origin,
    hold_out,
    load,
    open_ledger,
    without_relatives,
)
from warpfold.training.first_weights import start_from, take_moments
from warpfold.training.planning import compile_for_training, explain_out_of_memory
from warpfold.training.ranks import begin_end_step, end_step, next_examples, stop_requested
from warpfold.training.results import ExampleResult, SkippedExamples, begin_results, rate_taken, read_results, step_row
from warpfold.training.validation import Validation

FIXED_IN_A_RUN = ("seed", "order", "validation", "test", "related_identity")  # keys of [train]
BEST = "params_best.safetensors"
CARD = "card.md"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How a run ended."""

    steps: int  # done, including those before a resume
    finished: bool  # False: stopped by a signal; the same command continues
    lddt_ca: float | None  # held out, averaged weights, at the last validation, of all there was time for
    params: Path  # the averaged weights
    best: int = -1  # the step of the best validation, whose weights are in params_best.safetensors; -1: there is none
    quarantined: tuple[str, ...] = ()  # entries that could not be used; quarantine.jsonl has the reasons
    signal: int = 0  # the one that stopped it; 0: none
    refused: Mapping[str, int] = field(default_factory=dict)  # why fast operations were not used, and how often
    unrecorded: Mapping[str, int] = field(default_factory=dict)  # and why graphs were not (`plan.graph`)
    rerecorded: int = 0  # graphs that were recorded again; more than a few: the run was slower than necessary


def train(
    config: RunConfig,
    data: Store | Sequence[Source],
    out: Path | str,
    *,
    init: Path | None = None,
    replay: Path | None = None,
    device: torch.device | str = "cpu",
    watch: Watching | None = None,
    team: Team | None = None,
    command: str = "",
) -> Summary:
    """Train on a store, or on a mixture of several, into the folder `out`, or continue the run that is there.

    Examples are held out of the first source.  init: parameters to start from, in any format that is read.  replay:
    order.txt of a run of the same data and seed.  watch: who is told (engine/watch.py).  team: all ranks call this.
    command: that gives the same run, for its card.
    Errors: UserError for a folder of another run, a loss that is not finite, a full disk, too many unusable entries.
    """
    # An Apple GPU adds in no fixed order, so no recomputation has the same bits.
    if reason := unsupported_on_mps(device, {"train.digest_every": config.train.digest_every > 0}):
        raise UserError(reason)
    team, (sources, held_out), before, watch = team or Team(), hold_out(data, config), refusals(), as_watchers(watch)
    sources, held_out = without_relatives(sources, held_out, config, team)
    trained_parts(config.model, config.finetune).check_pae_loss(config.loss)
    origin = fingerprint_origin(sources, init, team)
    execution = Execution(config.plan, team.mesh)
    model = execution.bind(initial_model(config, init, team).to(device))
    plan, ranks_per_node = config.plan, team.process.ranks_per_node
    # Operations read its weights in the dtype that the plan computes in; losses in fp16 are scaled.
    dtype, scaling = DTYPES[plan.precision], plan.precision == "fp16"
    stops = config.train.on_nonfinite == "stop"
    options = dtype, scaling, plan.batch, execution.records, stops
    optimizer = Optimizer(model, config.optim, team.mesh, plan.sync, ranks_per_node, *options)
    trunk = frozen_trunk(model, config)  # before a checkpoint is read: passes before the last take the first weights
    learner = Learner(model, optimizer, config.loss, config.train.seed, team, trunk)
    with ExitStack() as stack:
        run = stack.enter_context(RunFolder(out, team.is_rank_zero, "lddt_ca"))
        signals = stack.enter_context(StopSignals())
        claim(run, config, origin, team)
        state = restore(run, optimizer, origin, team)
        if config.train.moments and not state.step:
            take_moments(optimizer, init, team)
        if team.is_rank_zero and config.finetune.freezes:
            run.write_frozen(frozen_state(model), again=not state.step)
        skipped = SkippedExamples(config.train.max_skipped, state.notes.get("skipped", ()))
        log = stack.enter_context(open_log(run, config, state, watch, team))
        signals.answer = partial(log.phase, "stopping")
        ledger = stack.enter_context(open_ledger(run, config, state, origin, replay, team))
        store = keep_trunk(run, config, sources, origin, team, torch.device(device).type)
        if trunk is not None:
            trunk.store = store
        examples, loader = load(config, sources, state, ledger, log, device, team, store)
        samples = iter(stack.enter_context(loader))  # its processes begin to make the first examples
        validation = Validation(model, optimizer, held_out, config, state, log, signals, team)
        step, timer = state.step, validation.timer
        stop = stop_requested(signals, team) or validation.catch_up(step)
        ended = keep_best(run, model, optimizer, step, config, team)
        if config.train.digest_every and step < config.train.steps and not (stop or ended):
            setup = describe_setup(config, sources, init, torch.device(device), team)
            log({"kind": "session", "step": step, "digest": state_digest(optimizer, team), "setup": setup})
        slow_first = plan.compile or torch.device(device).type == "cuda"  # minutes: layers or kernels are compiled
        log.phase("compiling" if slow_first else "training")
        if step < config.train.steps and not (stop or ended):
            compile_for_training(config, device)
        while step < config.train.steps and not stop and not ended:
            recycles = draw_recycles(config, step)  # the same on every rank
            on_device: list[DeviceResult] = []
            for batch in in_batches(next_examples(samples, optimizer.share, timer, team), config.plan.batch):
                with explain_out_of_memory(config, step, device, batch):
                    on_device += learner.learn(batch, recycles)  # forward, losses, backward; clipped, added
            with explain_out_of_memory(config, step, device):
                copied, weights = begin_results(on_device), optimizer.weights if stops else optimizer.weights.clone()
                learner.step(step)  # the mean over the examples; Adam; the moving average
            results = read_results(on_device, copied)  # here the host waits for the device, and nowhere before
            save_failures(run, config, optimizer, weights, on_device, results, step, recycles, team)
            end = begin_end_step(step + 1, results, timer, ledger, signals, team, log.on_all, optimizer.most)
            results, stop = end_step(end, timer, examples, ledger, team)  # those of all ranks, on rank 0
            log(step_row(step + 1, results, rate_taken(config.optim, step, results), recycles, timer))
            skipped.add(step := step + 1, results, config.optim.accumulate)
            stop = stop or (signals.received if team.process.ranks == 1 else 0)  # it may have arrived meanwhile
            rounds = 0 if stop else validation.rounds_at(step)
            saves = step == config.train.steps or stop or rounds or not step % config.train.save_every
            # Every checkpoint has a digest in the log, so that a replay can start from it.
            if (every := config.train.digest_every) and (saves or not step % every):
                log({"kind": "digest", "step": step, "digest": state_digest(optimizer, team)})
            if saves:
                notes = {"skipped": skipped.places, "seconds": asdict(validation.spending), **origin}
                save(run, model, optimizer, step, examples, notes, config, log, team)
            if rounds:
                stop = validation(step, rounds)
                ended = keep_best(run, model, optimizer, step, config, team)
                if ended:
                    log({"kind": "end", "step": step, "best": ended[0], "reason": ended[1]})
            log.phase("training", left=validation.left(step))
        log.finished = bool(ended) or (step >= config.train.steps and not (stop and validation.is_owed(step)))
        if log.finished and team.is_rank_zero and (step > state.step or not (run.path / CARD).exists()):
            run.wait_for_writing()
            values, best = settings.to_dict(config), run.best()[0]
            ranks = team.mesh.world.size
            text = run_card(run.path, values, sources, len(held_out), init, device, ranks, command, best)
            run.replace_file(CARD, lambda path: path.write_text(text, encoding="utf-8"))
    lddt_ca = (log.validation or {}).get("lddt_ca")
    how: dict[str, Any] = {"steps": step, "finished": log.finished, "lddt_ca": lddt_ca, "signal": stop}
    how["best"] = run.best()[0]
    team.tell_idle(how)
    slow: dict[str, Any] = {"refused": refusals(before), "unrecorded": execution.graphs.refused}
    slow["rerecorded"] = execution.graphs.rerecorded
    return Summary(**how, params=run.params, quarantined=tuple(ledger.quarantined), **slow)


# The beginning of a run


def claim(run: RunFolder, config: RunConfig, origin: Mapping[str, str], team: Team) -> None:
    """Write the resolved settings into the folder, on rank 0.

    Errors: UserError if it holds another run, with the keys that differ, or if the ranks do not see the same.
    """
    own = identity(settings.to_dict(config))
    if team.is_rank_zero:
        text = run.settings_text()
        try:
            # A run of an earlier version lacks settings that are new: their defaults are what it had.
            there = identity(settings.merge(settings.to_dict(RunConfig()), tomllib.loads(text or "")))
        except (tomllib.TOMLDecodeError, AttributeError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{run.path / 'settings.toml'}: damaged ({error}); restore it or choose another --out"
            ) from error
        if text is not None and (differing := settings.differences(own, there)):
            what = listed(differing, between="; ")
            raise UserError(
                f"{run.path}: holds a run with other settings ({what}); choose another --out, or its settings"
            )
        run.write_settings(settings.to_toml(config))
    seen = {**origin, "settings": fingerprint(repr(own).encode()), "last checkpoint": run.latest()}
    said = team.if_different(seen, "the beginning of the run")
    for rank, there in enumerate(said):
        if differing := [name for name, value in there.items() if value != said[0][name]]:
            raise UserError(
                f"rank {rank} and rank 0 differ in {' and '.join(differing)}; give all ranks the same, and put "
                f"{run.path} on a file system that all machines share"
            )


def identity(values: settings.Mapped) -> settings.Mapped:
    """Return the settings that must stay the same in a run; how it executes, saves and ends may change on resuming."""
    fixed = {name: values[name] for name in ("model", "loss", "data", "optim")}
    fixed["finetune"] = {name: value for name, value in values["finetune"].items() if name != "trunk"}  # kept or not
    return {**fixed, "train": {name: values["train"][name] for name in FIXED_IN_A_RUN}}


def initial_model(config: RunConfig, init: Path | None, team: Team | None = None) -> AlphaFold:
    """Return the model with its first weights: drawn by the seed, or read from a file that must fit the settings.

    Rank 0 alone reads the file; all call this.
    """
    team = team or Team()
    torch.manual_seed(config.train.seed)
    model = AlphaFold(config.model)
    if init is not None:
        if team.is_rank_zero:
            start_from(model, load_model(init), str(init), config.train.new_heads)
        model.load_state_dict(team.broadcast_tensors(model.state_dict(), "the first parameters"))
    freeze(model, config.finetune, config.train.seed).check_losses(config.loss)
    return model.train()


def frozen_trunk(model: AlphaFold, config: RunConfig) -> FrozenTrunk | None:
    """Return what runs the trunk where nothing of it is trained and examples have few draws; else None."""
    trained, one = trained_parts(config.model, config.finetune), config.finetune
    if trained.trunk or not one.draws:
        return None
    draw, recycles = partial(one.draw, examples=config.optim.accumulate), partial(draw_recycles, config)
    return FrozenTrunk(model, config.train.seed, draw, recycles, trained.has_masked_msa)


def keep_trunk(
    run: RunFolder, config: RunConfig, sources: Sequence[Source], origin: Mapping[str, str], team: Team, device: str
) -> TrunkStore | None:
    """Return the store of what the trunk makes, and say how large it may get, or why there is none.

    Errors: UserError where it is asked for (`finetune.trunk = "cached"`) and impossible, or the disk has no room.
    """
    asked, plan = config.finetune.trunk, config.plan
    if asked == "computed":
        return None
    why = trained_parts(config.model, config.finetune).why_not_cached()
    if why is None and (plan.axial > 1 or plan.batch > 1):
        why = f"{'plan.axial' if plan.axial > 1 else 'plan.batch'} is above 1"
    store, said = TrunkStore(run.path / "trunk"), ""
    if why is None and team.is_rank_zero:
        examples, dtype = config.train.steps * config.optim.accumulate, DTYPES[plan.precision]
        sizes = config.finetune.draws, examples, config.model, config.data.crop, config.data.max_msa, dtype
        try:
            said = store.check_room(*largest_store(sources, *sizes))
            about = settings.to_dict(config)
            padding = plan.sizes, plan.multiple_on(device)
            made_by = [identity(about), plan.precision, *padding, sorted(origin.items())]
            store.begin(fingerprint(repr(made_by).encode()))
        except UserError as error:
            why = str(error)
    why, said = team.broadcast([why, said], "the store of the trunk")
    log = logging.getLogger("warpfold.plan")
    if why is None:
        if team.is_rank_zero:
            log.info("trunk: kept in %s, %s, in %s, as nothing of it is trained", store.folder, said, plan.precision)
        return store
    if asked == "cached":
        raise UserError(f'finetune.trunk = "cached" is impossible: {why}')
    if team.is_rank_zero:
        log.info("trunk: computed each time, as %s", why)
    return None


def open_log(run: RunFolder, config: RunConfig, state: Checkpoint, watch: Watching | None, team: Team) -> Log:
    """Open the log: rank 0 writes it, and those listen who were given or are asked for by the settings."""
    watchers = as_watchers(watch)
    train = config.train
    if team.is_rank_zero:
        watchers += [TensorBoard(run.path / "tensorboard")] if train.tensorboard else []
        if train.wandb != "off":
            told = settings.to_dict(config)
            watchers.append(WeightsAndBiases(run.path, online=train.wandb == "online", settings=told))
    # Without a checkpoint the run begins again: even the validation of the untrained model, at step 0, is dropped.
    validation = None
    if team.is_rank_zero:
        validation = run.open_log(state.step or -1)
        run.prune(train.keep)  # it may have been stopped while it deleted old checkpoints
    validation = team.broadcast(validation, "the log")
    log = Log(run if team.is_rank_zero else None, state.step, train.steps, validation, watchers)
    log.on_all = team.largest(bool(watchers) and not team.is_rank_zero, "who watches") > 0
    return log


# Digests


def state_digest(optimizer: Optimizer, team: Team) -> str:
    """Compute the digest of the whole state: SHA-256 of the ranks' digests, in the order of ranks.  All call this."""
    digests = team.all_gather(optimizer.digest(), "the digest of the state").wait()
    return hashlib.sha256(digests.numpy().tobytes()).hexdigest()


def describe_setup(
    config: RunConfig, sources: Sequence[Source], init: Path | None, device: torch.device, team: Team
) -> dict[str, Any]:
    """Describe, JSON-able, what a replay needs besides the folder of the run, and what the bits of a step depend on."""
    return {
        "ranks": team.process.ranks,
        "device": f"{device.type}, {device_name(device)}",
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "stores": [[str(source.store.path.resolve()), source.weight] for source in sources],
        "init": None if init is None else str(init.resolve()),
        "plan": settings.to_dict(config.plan),
    }


# Checkpoints


def restore(run: RunFolder, optimizer: Optimizer, origin: Mapping[str, str], team: Team) -> Checkpoint:
    """Bring weights and optimizer to the last checkpoint that is whole, and return its notes; step 0 without one.

    Rank 0 alone reads it; all call this.
    Errors: UserError where the run began from other data or other weights, or where all checkpoints are damaged;
    ReplicaError where the ranks' weights are not the same afterwards.
    """
    found = run.load_latest() if team.is_rank_zero else None
    known = team.broadcast(found and [found.step, found.notes], "reading the last checkpoint")
    if known is None:
        return Checkpoint(0, {}, {})
    state = Checkpoint(known[0], {}, known[1])
    for name, value in origin.items():
        if state.notes.get(name) != value:
            raise UserError(f"{run.path}: its run began with another {name}; choose another --out, or give the same")
    optimizer.restore(team.broadcast_tensors(found.tensors if found else None, "the last checkpoint"))
    return state


def save(
    run: RunFolder,
    model: AlphaFold,
    optimizer: Optimizer,
    step: int,
    examples: RunOrder,
    notes: dict[str, Any],
    config: RunConfig,
    log: Log,
    team: Team,
) -> None:
    """Write params.safetensors (averaged weights), then the checkpoint: a run is finished only when both are there.

    Of adapters params.safetensors has the weights that they make; they alone are in adapters.safetensors.
    They are written from copies, while the next steps run; the one before must have been written.
    """
    log.phase("saving")
    # What all ranks together have used: it lets any other number of ranks go on.
    used = examples.state(
        team.of_example_leaders(team.all_gather_object(examples.exchanged(), "a checkpoint", to_all=False))
    )
    with optimizer.averaged():
        params = Snapshot.of(merged_state(model) if team.is_rank_zero else {})
        adapters = Snapshot.of(adapters_state(model) if team.is_rank_zero else {})
    state = optimizer.state()
    tensors = Snapshot.of(state if team.is_rank_zero else {})

    def write() -> None:
        data = settings.to_dict(config.data)
        run.replace_file("params.safetensors", lambda path: save_params(path, model, data, params.wait()))
        if small := adapters.wait():
            about = {"finetune": json.dumps(settings.to_dict(config.finetune))}
            run.replace_file("adapters.safetensors", lambda path: save_file(small, path, about))
        run.save(Checkpoint(step, tensors.wait(), {"loader": asdict(used), **notes}), config.train.keep)

    if team.is_rank_zero:
        run.write_beside(write)


def keep_best(
    run: RunFolder, model: AlphaFold, optimizer: Optimizer, step: int, config: RunConfig, team: Team
) -> tuple[int, str] | None:
    """Write params_best.safetensors, the averaged weights, if the validation after this step is the best so far.

    Returns the step of the best and the reason, where so many followed it that the run ends (`train.patience`).
    All ranks call this.
    """
    best, since = team.broadcast(run.best(), "the best validation")
    if best == step:
        with optimizer.averaged():
            params = Snapshot.of(merged_state(model) if team.is_rank_zero else {})
        if team.is_rank_zero:
            data = settings.to_dict(config.data)
            run.write_beside(lambda: run.replace_file(BEST, lambda path: save_params(path, model, data, params.wait())))
    if not 0 < config.train.patience <= since:
        return None
    return best, f"{since} validations in a row are no better than that after step {best} (train.patience)"


# What goes wrong


def save_failures(
    run: RunFolder,
    config: RunConfig,
    optimizer: Optimizer,
    weights: Tensor,
    on_device: Sequence[DeviceResult],
    results: Sequence[ExampleResult],
    step: int,
    recycles: int,
    team: Team,
) -> None:
    """Save what reproduces a loss or gradient that is not finite; UserError unless the settings say to skip it.

    weights: flat, that the examples went through.  Of the ranks that share an example, the first saves; the message of
    the UserError reaches all.
    """
    size = config.plan.batch
    for number, (example, one) in enumerate(zip((there.example for there in on_device), results)):
        if one.finite:
            continue
        first = number - number % size
        batch = [there.key for there in results[first : first + size]]  # their gradients cannot be told apart
        notes = {
            **asdict(one),
            "step": step,
            "index": example.index,
            "seed": config.train.seed,
            "recycles": recycles,
            "plan": settings.to_dict(config.plan),
            "batch": batch,
        }
        where = ""
        if team.is_example_leader:
            arrays = {name: tensor.numpy(force=True) for name, tensor in example.features.items()}
            where = str(run.save_failure(example.index, arrays, optimizer.named_weights(weights), notes))
        where = team.all_gather_object_of_example(where, "saving what is not finite")[0]
        if config.train.on_nonfinite == "stop":
            raise UserError(
                f"step {step}: the loss or gradient of {' and '.join(batch)} is not finite; see {where} for what "
                'reproduces it; train.on_nonfinite = "skip" goes on without such examples'
            )
