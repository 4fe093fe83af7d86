"""Train a model (Supp. 1.11).  `train` is the loop from top to bottom: setup, steps, log, checkpoints, model card.

The functions below `train` follow in the order in which it calls them.
Random numbers are keyed by the seed and by a step or an example, and no generator has a state.  A run that was killed
continues from its last checkpoint and has the same bits as a run that was not interrupted.
"""

import hashlib
import json
import math
import tomllib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from warpfold import settings
from warpfold.batch import to_tensors
from warpfold.cost.machine import device_name
from warpfold.data.load.examples import RunOrder, Sample
from warpfold.data.load.order import Source
from warpfold.data.store.store import Store
from warpfold.device import Snapshot, unsupported_on_mps
from warpfold.engine.checkpoint import Checkpoint, RunFolder
from warpfold.engine.learn import DeviceResult, Learner, in_batches
from warpfold.engine.loop import Log, StepTimer, StopSignals
from warpfold.engine.optim import Optimizer, learning_rate
from warpfold.engine.trainable import adapters_state, freeze, frozen_state, merged_state, trained_parts
from warpfold.engine.watch import Row, TensorBoard, Watching, WeightsAndBiases, as_watchers
from warpfold.errors import UserError, listed
from warpfold.model.alphafold import AlphaFold
from warpfold.model.weights.files import load_model, save_params
from warpfold.ops.dispatch import refusals
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import DTYPES
from warpfold.parallel.team import Team
from warpfold.training.card import run_card
from warpfold.training.config import RunConfig, fixed_settings
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
from warpfold.training.frozen_trunk import make_frozen_trunk, open_trunk_store
from warpfold.training.ledger import Ledger
from warpfold.training.planning import compile_for_training, explain_out_of_memory
from warpfold.training.validation import Validation, mean_without_nan

BEST = "params_best.safetensors"
CARD = "card.md"
NAME_BYTES = 64  # of an example's key, in a message of fixed size
# Numbers of an example in that message, each a float64; integers below 2**53 are exact.
MESSAGE_NUMBERS = ("length", "index", "loss", "norm", "lddt_ca", "overflowed")
SKIP_WINDOW = 1_000  # examples in a row, for train.max_skipped


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The outcome of a run."""

    steps: int  # done, including those before a resume
    finished: bool  # False: stopped by a signal; the same command continues
    lddt_ca: float | None  # of the averaged weights, at the last validation
    params: Path  # the averaged weights
    best: int = -1  # step of the best validation, -1: none; params_best.safetensors has its weights
    quarantined: tuple[str, ...] = ()  # unusable entries; quarantine.jsonl has the reasons
    signal: int = 0  # that stopped the run; 0: none
    refused: Mapping[str, int] = field(default_factory=dict)  # reason -> count of operations without a fast path
    unrecorded: Mapping[str, int] = field(default_factory=dict)  # reason -> count of passes without a graph
    rerecorded: int = 0  # graphs recorded again; more than a few slow a run down


@dataclass(frozen=True)
class ExampleResult:
    """The result of one example of a step, in plain numbers."""

    key: str
    length: int
    loss: float
    norm: float  # of its gradient, before clipping
    lddt_ca: float
    terms: dict[str, float]
    index: int = 0  # its number among the run's examples
    overflowed: bool = False  # its gradient was too large for the loss scale of fp16, which is then halved

    @property
    def finite(self) -> bool:
        """Whether the example is sound.  An overflow is the fault of the loss scale, not of the example."""
        return math.isfinite(self.loss) and (math.isfinite(self.norm) or self.overflowed)

    @property
    def used(self) -> bool:
        """Whether its gradient is part of the step's gradient."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


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
    """Train on a store, or on a mixture of several, in the folder `out`.  A run that is there already is continued.

    Validation examples are held out of the first source.
    init: parameters to start from, in any supported format.
    replay: order.txt of a run with the same data and seed, whose order of examples is followed.
    watch: watchers of the run (engine/watch.py).  team: all ranks call this function.
    command: the command line that gives the same run, for the model card.
    Errors: UserError for a folder of another run, a loss that is not finite, a full disk, too many unusable entries.
    """
    # ---- Data and model

    # An Apple GPU adds in no fixed order, so a recomputation would have other digests.
    if reason := unsupported_on_mps(device, {"train.digest_every": config.train.digest_every > 0}):
        raise UserError(reason)
    team, watch, refused_before = team or Team(), as_watchers(watch), refusals()
    train_config, plan, ranks = config.train, config.plan, team.mesh.world.size
    sources, held_out = hold_out(data, config)
    # Collective: rank 0 searches for related entries and broadcasts them.
    sources, held_out = without_relatives(sources, held_out, config, team)
    trained_parts(config.model, config.finetune).check_pae_loss(config.loss)
    # Collective: rank 0 alone reads the file `init`, and all ranks compare the fingerprints in `claim`.
    origin = fingerprint_origin(sources, init, team)
    execution = Execution(plan, team.mesh)
    # Collective: rank 0 reads the first parameters and broadcasts them.
    model = execution.bind(initial_model(config, init, team).to(device))

    # Collective: the optimizer compares the first weights of all ranks.
    stops = train_config.on_nonfinite == "stop"
    optimizer = Optimizer(
        model,
        config.optim,
        team.mesh,
        plan.sync,
        ranks_per_node=team.process.ranks_per_node,
        dtype=DTYPES[plan.precision],
        scaling=plan.precision == "fp16",
        batch=plan.batch,
        uses_graphs=execution.records,
        skip_whole_steps=stops,
    )
    # The trunk is copied before a checkpoint is read: the passes before the last use the first weights.
    trunk = make_frozen_trunk(model, config)
    learner = Learner(model, optimizer, config.loss, train_config.seed, team, trunk)

    with ExitStack() as stack:
        # ---- Folder, checkpoint, log, loader

        run = stack.enter_context(RunFolder(out, team.is_rank_zero, "lddt_ca"))
        signals = stack.enter_context(StopSignals())
        # Collective: all ranks must have the same settings, data and last checkpoint.
        claim(run, config, origin, team)
        # Collective: rank 0 reads the checkpoint and broadcasts it.
        state = restore(run, optimizer, origin, team)
        if train_config.moments and not state.step:
            take_moments(optimizer, init, team)
        if team.is_rank_zero and config.finetune.freezes:
            run.write_frozen(frozen_state(model), overwrite=not state.step)
        skipped = SkippedExamples(train_config.max_skipped, state.notes.get("skipped", ()))
        log = stack.enter_context(open_log(run, config, state, watch, team))
        signals.answer = partial(log.phase, "stopping")
        ledger = stack.enter_context(open_ledger(run, config, state, origin, replay, team))
        store = open_trunk_store(run, config, sources, origin, team, torch.device(device).type)
        if trunk is not None:
            trunk.store = store
        examples, loader = load(config, sources, state, ledger, log, device, team, store)
        # The worker processes begin to make the first examples here, while the first weights are validated.
        samples = iter(stack.enter_context(loader))
        validation = Validation(model, optimizer, held_out, config, state, log, signals, team)
        step, timer = state.step, validation.timer

        # Collective: the ranks agree whether to stop, since a rank that stopped alone would leave the others waiting.
        stop = int(team.largest(signals.received, "stopping or going on")) or validation.catch_up(step)
        early_end = keep_best(run, model, optimizer, step, config, team)
        trains = step < train_config.steps and not (stop or early_end)
        if train_config.digest_every and trains:
            setup = describe_setup(config, sources, init, torch.device(device), team)
            log({"kind": "session", "step": step, "digest": state_digest(optimizer, team), "setup": setup})
        # Compiling layers or kernels may take minutes, so the watchers are told before the first step.
        log.phase("compiling" if plan.compile or torch.device(device).type == "cuda" else "training")
        if trains:
            compile_for_training(config, device)

        # ---- Steps

        while step < train_config.steps and not (stop or early_end):
            # Forward, backward, clipping: every example is clipped by itself and added to the step's gradient.
            recycles = draw_recycles(config, step)  # the same on every rank
            on_device: list[DeviceResult] = []
            for batch in in_batches(next_examples(samples, optimizer.share, timer, team), plan.batch):
                with explain_out_of_memory(config, step, device, batch):
                    on_device += learner.learn(batch, recycles)

            # Update: the mean over the examples, the optimizer's rule, the moving average.
            with explain_out_of_memory(config, step, device):
                # One copy brings the numbers of all examples to the host.  It is queued before the update, so that
                # reading it does not wait for the update.
                copied = Snapshot.of({"numbers": torch.stack([result.numbers() for result in on_device])})
                # `save_failures` needs the weights that the examples went through.  With "stop" a step with a
                # failure leaves the weights as they were; with "skip" the update overwrites them.
                weights = optimizer.weights if stops else optimizer.weights.clone()
                learner.step(step)
            # The only wait of a step for the device: all its work has been queued by now.
            results = read_results(on_device, copied)
            save_failures(run, config, optimizer, weights, on_device, results, step, recycles, team)

            # Collective: rank 0 gets the results of all ranks for the log; all ranks get the signal that one received.
            results, stop = gather_results(
                step + 1, results, timer, examples, ledger, signals, team, log.on_all, optimizer.most
            )
            # The rate is 0 if the step changed nothing.  `learner.step` returns the same number as a tensor, for which
            # the host would wait: the mean over examples is finite if all of them are.
            used = sum(example.used for example in results)
            is_taken = used == len(results) if config.optim.clip == "step" else used > 0
            rate = learning_rate(config.optim, step) if is_taken else 0.0
            log(step_row(step + 1, results, rate, recycles, timer))
            step += 1
            skipped.add(step, results, config.optim.accumulate)
            # A single process need not agree with others, so a signal that came since then stops it now.
            stop = stop or (signals.received if team.process.ranks == 1 else 0)

            # Collective: rank 0 decides by its clock whether there is time to validate.
            rounds = 0 if stop else validation.rounds_at(step)
            saves = step == train_config.steps or stop or rounds or not step % train_config.save_every
            # Every checkpoint has a digest in the log, so that a replay can start from it.
            # Collective: the digest covers the state of all ranks.
            if (interval := train_config.digest_every) and (saves or not step % interval):
                log({"kind": "digest", "step": step, "digest": state_digest(optimizer, team)})
            if saves:
                # Collective: a checkpoint holds the shards of all ranks.  A thread writes it during the next steps.
                notes = {"skipped": skipped.places, "seconds": asdict(validation.spending), **origin}
                save(run, model, optimizer, step, examples, notes, config, log, team)
            if rounds:
                # Collective: the ranks share the held-out examples.
                stop = validation(step, rounds)
                early_end = keep_best(run, model, optimizer, step, config, team)
                if early_end:
                    log({"kind": "end", "step": step, "best": early_end[0], "reason": early_end[1]})
            log.phase("training", left=validation.seconds_left(step))

        # ---- End

        log.finished = bool(early_end) or (step >= train_config.steps and not (stop and validation.is_owed(step)))
        if log.finished and team.is_rank_zero and (step > state.step or not (run.path / CARD).exists()):
            # The card describes the parameter files, so these must be on the disk.
            run.wait_for_writing()
            values, best = settings.to_dict(config), run.best()[0]
            text = run_card(run.path, values, sources, held_out=len(held_out), init=init, device=device, ranks=ranks,
                            command=command, best=best)  # fmt: skip
            run.replace_file(CARD, lambda path: path.write_text(text, encoding="utf-8"))

    outcome: dict[str, Any] = {
        "steps": step,
        "finished": log.finished,
        "lddt_ca": (log.validation or {}).get("lddt_ca"),
        "signal": stop,
        "best": run.best()[0],
    }
    # Processes that the plan leaves idle wait for this message.
    team.tell_idle(outcome)
    return Summary(
        **outcome,
        params=run.params,
        quarantined=tuple(ledger.quarantined),
        refused=refusals(refused_before),
        unrecorded=execution.graphs.refused,
        rerecorded=execution.graphs.rerecorded,
    )


# ---- Setup


def claim(run: RunFolder, config: RunConfig, origin: Mapping[str, str], team: Team) -> None:
    """Write the resolved settings into the folder, on rank 0.  All ranks call this.

    Errors: UserError if the folder holds a run with other settings, with the keys that differ, or if the ranks differ
    in settings, data or the last checkpoint that they see.
    """
    expected = fixed_settings(settings.to_dict(config))
    if team.is_rank_zero:
        text = run.settings_text()
        try:
            # A run of an earlier version lacks newer settings.  It used their defaults.
            counterpart = fixed_settings(settings.merge(settings.to_dict(RunConfig()), tomllib.loads(text or "")))
        except (tomllib.TOMLDecodeError, AttributeError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{run.path / 'settings.toml'}: damaged ({error}). Restore it, or choose another --out."
            ) from error
        if text is not None and (differing := settings.differences(expected, counterpart)):
            changed_keys = listed(differing, between="; ")
            raise UserError(
                f"{run.path}: holds a run with other settings ({changed_keys}). Choose another --out, or its settings."
            )
        run.write_settings(settings.to_toml(config))
    # A rank on another machine may have other data, or a folder that is not the one of rank 0.
    observed = {**origin, "settings": fingerprint(repr(expected).encode()), "last checkpoint": run.latest()}
    seen_by_ranks = team.if_different(observed, "the beginning of the run")
    for rank, counterpart in enumerate(seen_by_ranks):
        if differing := [name for name, value in counterpart.items() if value != seen_by_ranks[0][name]]:
            raise UserError(
                f"rank {rank} and rank 0 differ in {' and '.join(differing)}. Give all ranks the same, and put "
                f"{run.path} on a file system that all machines share."
            )


def initial_model(config: RunConfig, init: Path | None, team: Team | None = None) -> AlphaFold:
    """Build the model with its first weights: drawn by the seed, or read from a file that must fit the settings.

    Rank 0 alone reads the file.  All ranks call this.
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


def restore(run: RunFolder, optimizer: Optimizer, origin: Mapping[str, str], team: Team) -> Checkpoint:
    """Load weights and optimizer state from the last intact checkpoint, and return its notes; step 0 without one.

    Rank 0 alone reads the checkpoint.  All ranks call this.
    Errors: UserError where the run began from other data or other weights, or where all checkpoints are damaged;
    ReplicaError where the ranks' weights differ afterwards.
    """
    checkpoint = run.load_latest() if team.is_rank_zero else None
    header = team.broadcast(checkpoint and [checkpoint.step, checkpoint.notes], "reading the last checkpoint")
    if header is None:
        return Checkpoint(0, {}, {})
    state = Checkpoint(header[0], {}, header[1])
    for name, value in origin.items():
        if state.notes.get(name) != value:
            raise UserError(f"{run.path}: its run began with another {name}. Choose another --out, or pass the same.")
    optimizer.restore(team.broadcast_tensors(checkpoint.tensors if checkpoint else None, "the last checkpoint"))
    return state


def open_log(run: RunFolder, config: RunConfig, state: Checkpoint, watch: Watching | None, team: Team) -> Log:
    """Open the log, which rank 0 writes, with the watchers of the caller and of the settings.  All ranks call this."""
    watchers = as_watchers(watch)
    train = config.train
    validation = None
    if team.is_rank_zero:
        watchers += [TensorBoard(run.path / "tensorboard")] if train.tensorboard else []
        if train.wandb != "off":
            values = settings.to_dict(config)
            watchers.append(WeightsAndBiases(run.path, online=train.wandb == "online", settings=values))
        # Without a checkpoint the run begins again, so even the validation of step 0 is dropped from the log.
        validation = run.open_log(state.step or -1)
        # The run may have been killed while it deleted old checkpoints.
        run.prune(train.keep)
    # All ranks must know whether a validation is due.
    validation = team.broadcast(validation, "the log")
    log = Log(run if team.is_rank_zero else None, state.step, train.steps, validation, watchers)
    # If any other rank has watchers, all ranks get whole rows.
    log.on_all = team.largest(bool(watchers) and not team.is_rank_zero, "who watches") > 0
    return log


# ---- Digests of the state


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


# ---- One step


def next_examples(samples: Iterator[Sample], count: int, timer: StepTimer, team: Team) -> Iterator[Sample]:
    """Begin a step and yield this rank's examples of it.

    Errors: UserError on all ranks that share an example if they have different ones, because one could not make it.
    """
    timer.begin()
    for _ in range(count):
        with timer.waiting():
            example = next(samples)
            # Codes and masks of one byte are widened here, on the device.
            example = replace(example, features=to_tensors(example.features))
        # Ranks that share an example compare it before they compute: slices of different examples do not fit together.
        identity = torch.tensor([example.index, zlib.crc32(example.name.encode())])
        identities = team.all_gather_of_example(identity, "the next example").wait()
        if bool((identities != identity).any()):
            names = team.all_gather_object_of_example([example.index, example.name], "the next example")
            mismatches = ", ".join(f"rank {rank} has {name}" for rank, (_, name) in zip(team.mesh.model.ranks, names))
            raise UserError(
                f"example {example.index}: {mismatches}, but they share it. One of them could not make it, perhaps for "
                "lack of memory. Run the same command to continue from the last checkpoint."
            )
        yield example


def read_results(on_device: Sequence[DeviceResult], copied: Snapshot) -> list[ExampleResult]:
    """Wait until the results of this rank's examples are on the host, and convert them to plain numbers."""
    results = []
    for device_result, (*losses, norm, lddt_ca, overflowed, length) in zip(
        on_device, copied.wait()["numbers"].tolist()
    ):
        terms = dict(zip(device_result.losses, losses))
        loss, example = terms.pop(""), device_result.example
        numbers = int(length), loss, norm, lddt_ca, terms, example.index
        results.append(ExampleResult(example.name, *numbers, overflowed=bool(overflowed)))
    return results


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
    """Save what reproduces a loss or gradient that is not finite.  UserError unless the settings say to skip it.

    weights: flat, those that the examples went through.
    The first of the ranks that share an example saves it, and the UserError reaches all of them.
    """
    size = config.plan.batch
    for number, (example, result) in enumerate(zip((device_result.example for device_result in on_device), results)):
        if result.finite:
            continue
        # The gradients of the examples of one batch cannot be told apart, so all of them are named.
        first = number - number % size
        batch = [member.key for member in results[first : first + size]]
        notes = {
            **asdict(result),
            "step": step,
            "index": example.index,
            "seed": config.train.seed,
            "recycles": recycles,
            "plan": settings.to_dict(config.plan),
            "batch": batch,
        }
        folder = ""
        if team.is_example_leader:
            arrays = {name: tensor.numpy(force=True) for name, tensor in example.features.items()}
            folder = str(run.save_failure(example.index, arrays, optimizer.named_weights(weights), notes))
        # The others wait for the path, which their error names.
        folder = team.all_gather_object_of_example(folder, "saving what is not finite")[0]
        if config.train.on_nonfinite == "stop":
            raise UserError(
                f"step {step}: the loss or gradient of {' and '.join(batch)} is not finite. {folder} has what "
                'reproduces it. To continue without such examples, set train.on_nonfinite = "skip".'
            )


def gather_results(
    step: int,
    results: list[ExampleResult],
    timer: StepTimer,
    examples: RunOrder,
    ledger: Ledger,
    signals: StopSignals,
    team: Team,
    to_all: bool = False,
    most: int = 0,
) -> tuple[list[ExampleResult], int]:
    """Gather the results of a step's examples, sorted by number, and the signal that stops the run (0: none).

    to_all: every rank gets the results.  Otherwise rank 0 does, which writes the log, and the other ranks get their own
    results, or all of them if an example is not finite.
    most: the largest number of examples of any rank, if another rank may have more than this one.
    The timer is set to the longest wait of any rank, and every rank learns which entries others have quarantined.
    A signal that has come to any rank before the call is known to all of them; a later one after the next step.
    """
    # Two messages of fixed size travel at the same time.  The optimizer's work on the device goes on meanwhile.
    keys = [example.key.encode() for example in results]
    not_finite = not all(example.finite for example in results)
    flags = [signals.received, timer.waited, ledger.unshared, max(map(len, keys)), not_finite]
    largest = team.begin_largest(torch.tensor(flags, dtype=torch.float64), f"the end of step {step}")
    rows = [[getattr(example, name) for name in MESSAGE_NUMBERS] + list(example.terms.values()) for example in results]
    room, width, terms = max(most, len(results)), len(rows[0]), tuple(results[0].terms)
    rows += [[0.0] * width] * (room - len(results))
    # The bytes of the names are reinterpreted as float64, so that one tensor holds everything.
    padded_keys = b"".join(key[:NAME_BYTES].ljust(NAME_BYTES, b"\0") for key in keys).ljust(room * NAME_BYTES, b"\0")
    names = np.frombuffer(padded_keys, np.float64)
    message = torch.from_numpy(np.concatenate([[len(results)], np.array(rows, np.float64).ravel(), names]))
    gathering = team.all_gather(message, f"the results of step {step}", to_all)
    received, timer.waited, quarantined, longest, any_not_finite = largest.wait()[0].tolist()
    messages = gathering.wait()

    # The lists of entries and names beyond the fixed size are rare, so all ranks gather them as JSON only then.
    if quarantined:
        unshared = team.all_gather_object(ledger.take_unshared(), f"entries that were set aside until step {step}")
        for entries in unshared:
            for name, index, reason in entries:
                examples.quarantine.add(name, index, reason)
        # `add` has put the entries of the other ranks into this rank's ledger, too.
        ledger.take_unshared()
    if longest > NAME_BYTES or any_not_finite:
        objects = team.all_gather_object([asdict(result) for result in results], f"all results of step {step}")
        all_results = [ExampleResult(**example) for rank in team.of_example_leaders(objects) for example in rank]
    elif not len(messages):
        all_results = results
    else:
        all_results = []
        # Ranks that share an example send the same message.
        for row in messages[:: team.mesh.model.size].contiguous().numpy():
            count, numbers, name_bytes = int(row[0]), row[1 : 1 + room * width], row[1 + room * width :].tobytes()
            for i, (length, index, loss, norm, lddt_ca, overflowed, *term_losses) in enumerate(
                numbers.reshape(room, width)[:count].tolist()
            ):
                key = name_bytes[i * NAME_BYTES : (i + 1) * NAME_BYTES].rstrip(b"\0").decode()
                values = int(length), loss, norm, lddt_ca, dict(zip(terms, term_losses)), int(index)
                all_results.append(ExampleResult(key, *values, overflowed=bool(overflowed)))
    return sorted(all_results, key=lambda example: example.index), int(received)


def step_row(step: int, results: Sequence[ExampleResult], rate: float, recycles: int, timer: StepTimer) -> Row:
    """End the timing of a step and build its row of the log: means over the examples that are finite."""
    seconds, waiting, waiting_so_far = timer.end()
    finite = [example for example in results if example.finite]
    names = finite[0].terms if finite else {}
    return {
        "kind": "step",
        "step": step,
        "loss": mean_without_nan([example.loss for example in finite]),
        "lddt_ca": mean_without_nan([example.lddt_ca for example in finite]),
        "terms": {name: mean_without_nan([example.terms[name] for example in finite]) for name in names},
        "grad_norm": mean_without_nan([example.norm for example in finite if example.used]),
        "learning_rate": rate,
        "recycles": recycles,
        "examples": [example.key for example in results],
        "lengths": [example.length for example in results],
        "skipped": len(results) - len(finite),
        "overflowed": sum(example.overflowed for example in results),
        "samples_per_second": len(results) / seconds,
        "waiting": waiting,
        "waiting_so_far": waiting_so_far,
    }


class SkippedExamples:
    """The examples among the last `SKIP_WINDOW` that were skipped because they were not finite; equal on all ranks.

    A few are bad luck, many are divergence.  Skipped examples add nothing to a step (engine/optim.py).  The positions
    are part of a checkpoint.
    """

    def __init__(self, most: int, places: Sequence[int] = ()) -> None:
        """most: train.max_skipped.  places: `places` of the checkpoint that the run continues from."""
        self.most = most
        self.places = list(places)  # how many examples the run had used before each

    def add(self, step: int, results: Sequence[ExampleResult], examples: int = 0) -> None:
        """Count the skipped examples of a step.  step: the number of steps done, this one included.

        results: of all examples, in an order that is the same on all ranks.  Where all are finite, a part of the
        step's `examples` will do.
        Errors: UserError when more than `most` of `SKIP_WINDOW` examples in a row were skipped.
        """
        end = step * (examples or len(results))
        for place, example in enumerate(results, end - len(results)):
            if example.finite:
                continue
            self.places = [*(p for p in self.places if p > place - SKIP_WINDOW), place]
            if len(self.places) > self.most:
                raise UserError(
                    f"step {step}: the loss or gradient of {len(self.places)} of the last "
                    f"{min(place + 1, SKIP_WINDOW)} examples is not finite, and train.max_skipped = {self.most}: the "
                    "run diverges. Its failures folder has what reproduces the first of them, and the checkpoints "
                    "before them are retained."
                )
        self.places = [p for p in self.places if p >= end - SKIP_WINDOW]


# ---- Checkpoints


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
    """Write params.safetensors (averaged weights), then the checkpoint.  A finished run has both.

    If adapters are trained, params.safetensors has the weights with the adapters merged, and adapters.safetensors has
    the adapters alone.  All ranks call this.
    """
    log.phase("saving")
    # The examples that all ranks together have used let a run continue on any number of ranks.
    used = examples.state(
        team.of_example_leaders(team.all_gather_object(examples.exchanged(), "a checkpoint", to_all=False))
    )
    # Copies, so that the next steps may change the weights while a thread writes the files.  `averaged` and `state`
    # gather the shards of all ranks.
    with optimizer.averaged():
        params = Snapshot.of(merged_state(model) if team.is_rank_zero else {})
        adapters = Snapshot.of(adapters_state(model) if team.is_rank_zero else {})
    state = optimizer.state()
    tensors = Snapshot.of(state if team.is_rank_zero else {})

    def write() -> None:
        data = settings.to_dict(config.data)
        run.replace_file("params.safetensors", lambda path: save_params(path, model, data, params.wait()))
        if small := adapters.wait():
            adapter_metadata = {"finetune": json.dumps(settings.to_dict(config.finetune))}
            run.replace_file("adapters.safetensors", lambda path: save_file(small, path, adapter_metadata))
        run.save(Checkpoint(step, tensors.wait(), {"loader": asdict(used), **notes}), config.train.keep)

    if team.is_rank_zero:
        # Waits until the checkpoint before is on the disk, so that one copy at most is in memory.
        run.write_in_background(write)


def keep_best(
    run: RunFolder, model: AlphaFold, optimizer: Optimizer, step: int, config: RunConfig, team: Team
) -> tuple[int, str] | None:
    """Write params_best.safetensors, the averaged weights, if the validation after this step is the best so far.

    Returns the step of the best validation and a reason if the run ends now (`train.patience`).  All ranks call this.
    """
    # Rank 0 alone has the scores.
    best, since = team.broadcast(run.best(), "the best validation")
    if best == step:
        # Collective: the shards of the average are gathered.
        with optimizer.averaged():
            params = Snapshot.of(merged_state(model) if team.is_rank_zero else {})
        if team.is_rank_zero:
            data = settings.to_dict(config.data)
            run.write_in_background(
                lambda: run.replace_file(BEST, lambda path: save_params(path, model, data, params.wait()))
            )
    if not 0 < config.train.patience <= since:
        return None
    return best, f"{since} validations in a row are no better than that after step {best} (train.patience)"
