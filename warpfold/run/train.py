"""Training: one flat loop, the supplement's recipe (Supp. 1.11).

Everything drawn is keyed by (seed, step or example), never by a generator's state: a run that was killed continues
from its last checkpoint and is, to the bit, the run that was not.
"""

import tomllib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warpfold import settings
from warpfold.batch import Batch, to_tensors
from warpfold.data.features.sample import make_features
from warpfold.data.load.loader import Loader, Sample
from warpfold.data.load.schedule import Source
from warpfold.data.store.example import StoredExample
from warpfold.data.store.store import Store
from warpfold.engine.checkpoint import Checkpoint, RunFolder
from warpfold.engine.log import Clock, Log, Row, Seen, Watcher, step_row, tensorboard, validation_row
from warpfold.engine.optim import Optimizer
from warpfold.engine.signals import StopSignals
from warpfold.engine.skipped import Skipped
from warpfold.errors import UserError
from warpfold.model.alphafold import AlphaFold, Output
from warpfold.model.losses import total_loss
from warpfold.model.weights import load_model, load_state, save_params
from warpfold.ops.dispatch import refusals
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import inference_plan
from warpfold.parallel.team import Team
from warpfold.run import metrics
from warpfold.run.config import RunConfig, TrainConfig
from warpfold.run.examples import draw_recycles, fingerprint, hold_out, load, open_ledger, origin, split
from warpfold.run.together import Sums, heard, meet, summing, take, tell

__all__ = ["RunConfig", "Summary", "TrainConfig", "draw_recycles", "initial_model", "split", "train"]

CA = 1  # in atom37


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How a run ended."""

    steps: int  # done, those before a resume included
    finished: bool  # False: stopped by a signal; the same command continues
    lddt_ca: float | None  # held out, averaged weights, at the last validation
    params: Path  # the averaged weights
    quarantined: tuple[str, ...] = ()  # entries that could not be used; quarantine.jsonl has the reasons
    signal: int = 0  # on which it stopped
    refused: Mapping[str, int] = field(default_factory=dict)  # what fast operations refused, and how often


def train(
    config: RunConfig,
    data: Store | Sequence[Source],
    out: Path | str,
    *,
    init: Path | None = None,
    replay: Path | None = None,
    device: torch.device | str = "cpu",
    watch: Watcher | None = None,
    team: Team | None = None,
) -> Summary:
    """Train on a store, or on a mixture of several, into the folder `out`, or continue the run that is there.

    Examples are held out of the first source.  init: parameters to start from, WarpFold's or DeepMind's.  replay: the
    order.txt of a run of the same data and seed.  watch: called with each row of metrics.jsonl.  team: the processes
    that train together, as `config.plan` wants them; all call this, the first one writes.
    Errors: UserError for a folder of another run, a loss that is not finite, a full disk, too many unusable entries.
    """
    team, (sources, held_out), before = team or Team(), hold_out(data, config), refusals()
    source = origin(sources, init, team)
    model = initial_model(config, init, team).to(device)
    Execution(config.plan, team.mesh).bind(model)
    optimizer = Optimizer(model, config.optim, team.mesh, config.plan.sync, team.launch.ranks_per_node)
    with ExitStack() as stack:
        run, signals = stack.enter_context(RunFolder(out, team.leads)), stack.enter_context(StopSignals())
        claim(run, config, source, team)
        state = restore(run, optimizer, source, team)
        skipped = Skipped(config.train.max_skipped, state.notes.get("skipped", ()))
        log = open_log(run, config, state, watch, team)
        ledger = stack.enter_context(open_ledger(run, config, state, source, replay, team))
        examples = stack.enter_context(load(config, sources, state, ledger, log, device, team))
        step, clock = state.step, Clock()
        if held_out and not (log.validation and log.validation["step"] == step) and validates(config, step):
            log(validate(model, optimizer, held_out, config, step, team))  # what a kill came before, after a resume
        stop = heard(signals, team)
        while step < config.train.steps and not stop:
            recycles, looks = draw_recycles(config, step), []  # the same on every rank
            for example in take(examples, optimizer.share, clock, team):
                model.noise.seed(config.train.seed, example.index)  # of dropout
                output = model(example.features, recycles)  # Algorithms 2 and 30 to 32
                loss, terms = total_loss(output, example.features, config.loss, residues=model.residues)  # Supp. 1.9
                sums = summing({"": loss, **terms}, team)  # over those that share the example
                loss.backward()
                norm = optimizer.collect(loss)  # clip this example's gradient, add it to the step's (Supp. 1.11.3)
                looks.append(look(example, output, sums, norm))
            seen = read(looks)  # here the host waits for the device, and nowhere before
            keep_what_is_not_finite(run, config, optimizer, looks, seen, step, recycles, team)
            told = tell(step + 1, seen, clock, ledger, signals, team)  # on its way while the optimiser works
            rate, step = optimizer.step(step), step + 1  # the mean over the examples; Adam; the moving average
            seen, stop = meet(told, clock, examples, ledger, team)  # those of all ranks
            log(step_row(step, seen, rate, recycles, clock))
            skipped.add(step, seen)
            stop = stop or (signals.came if team.launch.ranks == 1 else 0)  # it may have come since
            if step == config.train.steps or stop or due(step, config.train.save_every):
                notes = {"loader": used_by_all(examples, team), "skipped": skipped.places, **source}
                save(run, model, optimizer, step, notes, config, team)
            if held_out and validates(config, step):  # after saving: it may take long
                log(validate(model, optimizer, held_out, config, step, team))
    ended: dict[str, Any] = {"finished": step >= config.train.steps, "signal": stop, "refused": refusals(before)}
    return Summary(steps=step, lddt_ca=log.lddt_ca, params=run.params, quarantined=tuple(ledger.quarantined), **ended)


def due(step: int, every: int) -> bool:
    """Whether something that is done every so many steps is done after this one; never for 0."""
    return every > 0 and step % every == 0


def validates(config: RunConfig, step: int) -> bool:
    """Whether a run validates after this step: before the first, after the last, and every so many."""
    return step in (0, config.train.steps) or due(step, config.train.validate_every)


# The beginning of a run


def claim(run: RunFolder, config: RunConfig, origin: Mapping[str, str], team: Team) -> None:
    """Write the resolved settings into the folder, by the first process.

    Errors: UserError if it holds another run, with the keys that differ, or if processes do not see the same.
    """
    own = identity(settings.to_dict(config))
    if team.leads:
        text = run.settings_text()
        try:
            there = identity(tomllib.loads(text or ""))
        except (tomllib.TOMLDecodeError, AttributeError) as error:
            raise UserError(
                f"{run.path / 'settings.toml'}: damaged ({error}); restore it or choose another --out"
            ) from error
        if text is not None and (differing := settings.differences(own, there)):
            what = "; ".join(differing)
            raise UserError(
                f"{run.path}: holds a run with other settings ({what}); choose another --out, or its settings"
            )
        run.write_settings(settings.to_toml(config))
    seen = {**origin, "settings": fingerprint(repr(own).encode()), "last checkpoint": run.latest()}
    said = team.share(seen, "the beginning of the run")
    for rank, there in enumerate(said):
        if differing := [name for name, value in there.items() if value != said[0][name]]:
            raise UserError(
                f"rank {rank} has another {' and '.join(differing)} than rank 0; give all the same, and {run.path} "
                "on a file system that all machines share"
            )


def identity(values: settings.Mapped) -> settings.Mapped:
    """The settings that make a run that run; how it executes, saves and ends may change on the way."""
    fixed = {name: values.get(name, {}) for name in ("model", "loss", "data", "optim")}
    return {**fixed, "train": {name: values.get("train", {}).get(name) for name in ("seed", "order", "validation")}}


def initial_model(config: RunConfig, init: Path | None, team: Team | None = None) -> AlphaFold:
    """The model with its first weights: drawn by the seed, or those of a file, which must fit the settings.

    The first process of the team alone reads the file; all call this.
    """
    team = team or Team()
    torch.manual_seed(config.train.seed)
    model = AlphaFold(config.model)
    if init is not None:
        if team.leads:
            load_state(model, load_model(init).state_dict(), str(init))
        model.load_state_dict(team.tensors_from_first(model.state_dict(), "the first parameters"))
    return model.train()


def open_log(run: RunFolder, config: RunConfig, state: Checkpoint, watch: Watcher | None, team: Team) -> Log:
    """Where the rows go: written by the first process, and shown by `watch` and, if it is wanted, TensorBoard."""
    watchers = [watch] if watch else []
    if config.train.tensorboard and team.leads:
        watchers.insert(0, tensorboard(run.path / "tensorboard", state.step))
    # Without a checkpoint nothing that was logged counts, not even the validation of the untrained model.
    validation = run.open_log(state.step or -1) if team.leads else None
    validation = team.from_first(validation, "the log")
    return Log(run if team.leads else None, state.step, validation, watchers)


# Checkpoints


def restore(run: RunFolder, optimizer: Optimizer, origin: Mapping[str, str], team: Team) -> Checkpoint:
    """Bring weights and optimiser to the last checkpoint that is whole, and return its notes; step 0 without one.

    The first process alone reads it; all call this.
    Errors: UserError where the run began from other data or other weights, or where all checkpoints are damaged;
    ReplicaError where the ranks' weights are not the same afterwards.
    """
    found = run.load_latest() if team.leads else None
    known = team.from_first(found and [found.step, found.notes], "reading the last checkpoint")
    if known is None:
        return Checkpoint(0, {}, {})
    state = Checkpoint(known[0], {}, known[1])
    for name, value in origin.items():
        if state.notes.get(name) != value:
            raise UserError(f"{run.path}: its run began with another {name}; choose another --out, or give the same")
    optimizer.restore(team.tensors_from_first(found.tensors if found else None, "the last checkpoint"))
    return state


def used_by_all(examples: Loader, team: Team) -> dict[str, Any]:
    """Which examples all processes together have used, as a checkpoint notes it; at the end of a step."""
    return asdict(examples.state(team.spoken(team.share(examples.exchanged(), "a checkpoint"))))


def save(
    run: RunFolder,
    model: AlphaFold,
    optimizer: Optimizer,
    step: int,
    notes: dict[str, Any],
    config: RunConfig,
    team: Team,
) -> None:
    """Write params.safetensors (averaged weights), then the checkpoint: the run ends only when both are there."""
    with optimizer.averaged():
        if team.leads:
            run.replace_file("params.safetensors", lambda path: save_params(path, model, settings.to_dict(config.data)))
    tensors = optimizer.state()
    if team.leads:
        run.save(Checkpoint(step, tensors, notes), config.train.keep)


def keep_what_is_not_finite(
    run: RunFolder,
    config: RunConfig,
    optimizer: Optimizer,
    looks: Sequence["Look"],
    seen: Sequence[Seen],
    step: int,
    recycles: int,
    team: Team,
) -> None:
    """Save what reproduces a loss or gradient that is not finite; UserError unless the settings say to skip it.

    Of those that share an example, the first saves; the message of the UserError reaches all ranks.
    """
    for example, one in ((look.example, one) for look, one in zip(looks, seen) if not one.finite):
        notes = {
            **asdict(one),
            "step": step,
            "index": example.index,
            "seed": config.train.seed,
            "recycles": recycles,
            "plan": settings.to_dict(config.plan),
        }
        where = ""
        if team.speaks:
            arrays = {name: tensor.numpy(force=True) for name, tensor in example.features.items()}
            where = str(run.save_failure(example.index, arrays, optimizer.named_weights(), notes))
        where = team.share_example(where, "saving what is not finite")[0]
        if config.train.on_nonfinite == "stop":
            raise UserError(
                f"step {step}: the loss or gradient of {one.key} is not finite; see {where} for what "
                'reproduces it; train.on_nonfinite = "skip" goes on without such examples'
            )


# Looking at what came out


@dataclass(frozen=True)
class Look:
    """What an example came to: its loss, its terms by `names`, the norm of its gradient and lDDT-Ca, on the device."""

    example: Sample
    names: tuple[str, ...]
    numbers: Tensor  # float64


def look(example: Sample, output: Output, sums: Sums, norm: Tensor) -> Look:
    """Note what an example came to, without waiting for it; sums: of the loss, "", and its terms."""
    others = torch.stack([norm.double(), ca_lddt(output, example.features)])
    return Look(example, sums.names, torch.cat([sums.wait(), others]))


def read(looks: Sequence[Look]) -> list[Seen]:
    """What the examples of a step came to, as plain numbers: one copy from the device, which is waited for."""
    seen = []
    for of, (*plain, norm, lddt) in zip(looks, torch.stack([of.numbers for of in looks]).tolist()):
        terms = dict(zip(of.names, plain))
        loss, length = terms.pop(""), len(of.example.features["aatype"])
        seen.append(Seen(of.example.name, length, loss, norm, lddt, terms, of.example.index))
    return seen


@torch.no_grad()
def ca_lddt(output: Output, batch: Batch) -> Tensor:
    """lDDT-Ca of the predicted structure, 0 to 1; NaN where the truth has no two Ca that count.

    As `metrics.lddt`, but on the device, where it costs a training step next to nothing: a number there, in float64.
    """
    points, truth = output.structure.final_atom37[:, CA].double(), batch["all_atom_positions"][:, CA].double()
    moved, distance = (torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist") for x in (points, truth))
    known = batch["all_atom_mask"][:, CA] > 0
    pairs = (distance < metrics.LDDT_RADIUS) & known[:, None] & known
    pairs = pairs & ~torch.eye(len(known), dtype=torch.bool, device=known.device)
    error = (moved - distance).abs()
    kept = torch.stack([(error < tolerance) & pairs for tolerance in metrics.LDDT_TOLERANCES])
    return kept.sum().double() / (len(kept) * pairs.sum())


@torch.no_grad()
def validate(
    model: AlphaFold,
    optimizer: Optimizer,
    held_out: Sequence[tuple[Store, str]],
    config: RunConfig,
    step: int,
    team: Team,
) -> Row:
    """lDDT-Ca of every held-out example with the averaged weights (Supp. 1.11.7) and all recycles.

    The examples are dealt to the processes; each folds its own alone.
    """
    passes = (config.model.recycles + 1) * config.model.ensemble
    device = optimizer.weights.device
    found = {}
    model.eval()
    with optimizer.averaged():
        for store, key in held_out[team.launch.rank :: team.launch.ranks]:
            example = StoredExample(store, key)
            raw = example.take(0, min(example.length, config.train.validation_residues))
            features = make_features(raw, config.data, config.train.seed, (key, "validation"), passes)
            batch = to_tensors(features, device)
            Execution(replace(inference_plan(batch, config.plan.precision), kernels=config.plan.kernels)).bind(model)
            found[key] = float(ca_lddt(model(batch), batch))
    Execution(config.plan, team.mesh).bind(model).train()
    every = {key: lddt for part in team.share(found, "validation") for key, lddt in part.items()}
    return validation_row(step, {key: every[key] for _, key in held_out})
