"""Training: one flat loop, the supplement's recipe (Supp. 1.11).

Everything drawn is keyed by (seed, step or example), never by a generator's state: a run that was killed continues
from its last checkpoint and is, to the bit, the run that was not.
"""

import hashlib
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from warpfold import settings
from warpfold.batch import Batch, to_tensors
from warpfold.data.loader import Loader, Weights, read_example, split_keys
from warpfold.data.sample import SampleConfig, keyed_rng, make_features
from warpfold.data.store import Store
from warpfold.errors import UserError
from warpfold.model.alphafold import AlphaFold, ModelConfig, Output
from warpfold.model.losses import LossConfig, total_loss
from warpfold.model.weights import load_model, load_state, save_params
from warpfold.parallel.plan import Plan, apply, inference_plan
from warpfold.run import metrics
from warpfold.run.checkpoint import Checkpoint, RunFolder
from warpfold.run.optim import OptimConfig, Optimizer
from warpfold.run.signals import StopSignals
from warpfold.run.watch import Clock, Log, Row, Seen, Watcher, step_row, tensorboard, validation_row

CA = 1  # in atom37


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """[train]: how long, on what, how it is watched, and what happens when something goes wrong."""

    steps: int = 78_125  # Supp. table 4: about 10 million samples, 128 per step
    seed: int = 0  # of the weights, the order of the examples, and all that is drawn
    order: Weights = "paper"  # Supp. 1.2.5; "uniform": each example once per epoch
    validation: float | tuple[str, ...] | str = 0.02  # share of the store or keys, held out; or another store's folder
    validation_examples: int = 64  # at most so many of them
    validation_residues: int = 512  # of each at most so many, from its start
    validate_every: int = 1_000  # steps; 0: at the beginning and the end only
    save_every: int = 500  # steps
    keep: int = 2  # last checkpoints that stay; the best stays too
    on_nonfinite: Literal["stop", "skip"] = "stop"  # what follows a loss or gradient that is not finite
    workers: int = 0  # processes that prepare examples; 0: the training process does it
    tensorboard: bool = False

    def __post_init__(self) -> None:
        if min(self.steps, self.save_every, self.keep) < 1:
            raise ValueError("steps, save_every and keep must be at least 1")
        if isinstance(self.validation, float) and not 0 <= self.validation < 1:
            raise ValueError("validation, as a share, must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run, a section of the TOML file each."""

    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    data: SampleConfig = field(default_factory=SampleConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    plan: Plan = field(default_factory=Plan)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if self.plan.in_place:
            raise ValueError("plan.in_place is for inference: training needs what it would write over; leave it out")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How a run ended."""

    steps: int  # done, those before a resume included
    finished: bool  # False: stopped by a signal; the same command continues
    lddt_ca: float | None  # held out, averaged weights, at the last validation
    params: Path  # the averaged weights


def train(
    config: RunConfig,
    store: Store,
    out: Path | str,
    *,
    init: Path | None = None,
    device: torch.device | str = "cpu",
    watch: Watcher | None = None,
) -> Summary:
    """Train on `store` into the folder `out`, or continue the run that is there.

    init: parameters to start from, WarpFold's or DeepMind's.  watch: called with each row of metrics.jsonl.
    Errors: UserError for a folder of another run, a loss that is not finite (by setting), a full disk.
    """
    seed, per_step, source = config.train.seed, config.optim.accumulate, origin(store, init)
    training, held_out = split(store, config)
    model = initial_model(config, init).to(device)
    apply(config.plan, model)
    optimizer = Optimizer(model, config.optim)
    with RunFolder(out) as run, StopSignals() as stop:
        claim(run, config)
        state = restore(run, optimizer, source)
        examples = Loader(store, config.data, seed, training, config.train.order).stream(
            range(state.step * per_step, config.train.steps * per_step),
            passes=lambda index: (draw_recycles(config, index // per_step) + 1) * config.model.ensemble,
            workers=config.train.workers,
        )
        log = Log(run, state.step, state.notes.get("validation"), watchers(run, config, state.step, watch))
        if state.step == 0 and held_out:
            log(validate(model, optimizer, held_out, config, 0))

        step = state.step
        while step < config.train.steps and not stop:
            recycles = draw_recycles(config, step)  # the same on every rank
            clock, seen = Clock(), []
            for index in range(step * per_step, (step + 1) * per_step):
                with clock.waiting():
                    key, features = next(examples)
                batch = to_tensors(features, device)
                model.noise.seed(seed, index)  # of dropout
                output = model(batch, recycles)  # Algorithms 2 and 30 to 32
                loss, terms = total_loss(output, batch, config.loss)  # Supp. 1.9, equation 7
                loss.backward()
                norm = optimizer.collect()  # clip the gradient of this example, add it to the step's (Supp. 1.11.3)
                seen.append(look(key, batch, output, loss, terms, norm))
                if not seen[-1].finite:
                    not_finite(run, config, optimizer, batch, seen[-1], index, recycles)
            rate = optimizer.step(step)  # the mean over the examples; Adam; the moving average of the weights
            step += 1
            log(step_row(step, seen, rate, recycles, clock))

            last = step == config.train.steps
            if held_out and (last or due(step, config.train.validate_every)):
                log(validate(model, optimizer, held_out, config, step))
            if last or stop or due(step, config.train.save_every):
                save(run, model, optimizer, step, {"validation": log.validation, **source}, config)
    done = step >= config.train.steps
    return Summary(steps=step, finished=done, lddt_ca=log.lddt_ca, params=run.path / "params.safetensors")


def draw_recycles(config: RunConfig, step: int) -> int:
    """How often the examples of a step are recycled: uniform from 0 to the model's number, one draw for all of them."""
    return int(keyed_rng(config.train.seed, "recycles", step).integers(config.model.recycles + 1))  # Algorithm 31


def due(step: int, every: int) -> bool:
    """Whether something that is done every so many steps is done after this one; never for 0."""
    return every > 0 and step % every == 0


# The beginning of a run


def claim(run: RunFolder, config: RunConfig) -> None:
    """Write the resolved settings into the folder; UserError if it holds another run, with the keys that differ."""
    text = run.settings_text()
    if text is not None:
        differing = settings.differences(identity(settings.to_dict(config)), identity(tomllib.loads(text)))
        if differing:
            what = "; ".join(differing)
            raise UserError(
                f"{run.path}: holds a run with other settings ({what}); choose another --out, or its settings"
            )
    run.write_settings(settings.to_toml(config))


def identity(values: settings.Mapped) -> settings.Mapped:
    """The settings that make a run that run; how it executes, saves and ends may change on the way."""
    fixed = {name: values.get(name, {}) for name in ("model", "loss", "data", "optim")}
    return {**fixed, "train": {name: values.get("train", {}).get(name) for name in ("seed", "order", "validation")}}


def origin(store: Store, init: Path | None) -> dict[str, str]:
    """Fingerprints of the data and of the first weights; the store's manifest holds its contents' checksums."""
    files = {"store": store.path / "store.json", "init": init}
    return {
        name: hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest() if file else "none"
        for name, file in files.items()
    }


def initial_model(config: RunConfig, init: Path | None) -> AlphaFold:
    """The model with its first weights: drawn by the seed, or those of a file, which must fit the settings."""
    torch.manual_seed(config.train.seed)
    model = AlphaFold(config.model)
    if init is not None:
        load_state(model, load_model(init).state_dict(), str(init))
    return model.train()


def split(store: Store, config: RunConfig) -> tuple[list[str], list[tuple[Store, str]]]:
    """Keys to train on, and the examples held out for validation."""
    wanted = config.train.validation
    if isinstance(wanted, str):
        training, other = store.keys, Store(wanted)
        held = other.keys
    elif isinstance(wanted, float):
        other = store
        training, held = split_keys(store, math.ceil(wanted * len(store)), config.train.seed)
    else:
        if unknown := [key for key in wanted if key not in store]:
            raise UserError(f"train.validation: {unknown[0]} is not in {store.path}")
        other, held = store, list(wanted)
        training = [key for key in store.keys if key not in wanted]
    drawn = keyed_rng(config.train.seed, "validation").permutation(len(held))[: config.train.validation_examples]
    return training, [(other, held[i]) for i in sorted(drawn)]


def watchers(run: RunFolder, config: RunConfig, step: int, watch: Watcher | None) -> list[Watcher]:
    """Who is told of every step: TensorBoard, where the settings want it, and `watch`."""
    own = [tensorboard(run.path / "tensorboard", step)] if config.train.tensorboard else []
    return own + ([watch] if watch else [])


# Checkpoints


def restore(run: RunFolder, optimizer: Optimizer, origin: dict[str, str]) -> Checkpoint:
    """Bring weights and optimiser to the last checkpoint; step 0 in a new folder.

    Errors: UserError where the run began from other data or other weights.
    """
    step = run.latest()
    if step is None:
        return Checkpoint(0, {}, {})
    state = run.load(step)
    for name, value in origin.items():
        if state.notes.get(name) != value:
            raise UserError(f"{run.path}: its run began with another {name}; choose another --out, or give the same")
    optimizer.restore(state.tensors)
    return state


def save(
    run: RunFolder, model: AlphaFold, optimizer: Optimizer, step: int, notes: dict[str, Any], config: RunConfig
) -> None:
    """Write params.safetensors (averaged weights), then the checkpoint: the run ends only when both are there."""
    with optimizer.averaged():
        run.replace_file("params.safetensors", lambda path: save_params(path, model, settings.to_dict(config.data)))
    run.save(Checkpoint(step, optimizer.state(), notes), config.train.keep)


def not_finite(
    run: RunFolder,
    config: RunConfig,
    optimizer: Optimizer,
    batch: Batch,
    seen: Seen,
    index: int,
    recycles: int,
) -> None:
    """A loss or gradient that is not finite: save what reproduces it; UserError unless the settings say to skip it."""
    notes = {
        **asdict(seen),
        "step": index // config.optim.accumulate,
        "index": index,
        "seed": config.train.seed,
        "recycles": recycles,
        "plan": settings.to_dict(config.plan),
    }
    arrays = {name: tensor.numpy(force=True) for name, tensor in batch.items()}
    where = run.save_failure(index, arrays, optimizer.state(), notes)
    if config.train.on_nonfinite == "stop":
        raise UserError(
            f"step {notes['step']}: the loss or gradient of {seen.key} is not finite; see {where} for what "
            'reproduces it; train.on_nonfinite = "skip" goes on without such examples'
        )


# Looking at what came out


def look(key: str, batch: Batch, output: Output, loss: Tensor, terms: Mapping[str, Tensor], norm: float) -> Seen:
    """What an example came to, as plain numbers."""
    plain = {name: float(term.detach()) for name, term in terms.items()}
    return Seen(key, len(batch["aatype"]), float(loss.detach()), norm, ca_lddt(output, batch), plain)


def ca_lddt(output: Output, batch: Batch) -> float:
    """lDDT-Ca of the predicted structure, 0 to 1; NaN where the truth has fewer than two Ca."""
    predicted = output.structure.final_atom37[:, [CA]].detach().numpy(force=True)
    truth, mask = (batch[name][:, [CA]].numpy(force=True) for name in ("all_atom_positions", "all_atom_mask"))
    return metrics.lddt(predicted, truth, mask)


@torch.no_grad()
def validate(
    model: AlphaFold, optimizer: Optimizer, held_out: Sequence[tuple[Store, str]], config: RunConfig, step: int
) -> Row:
    """lDDT-Ca of every held-out example with the averaged weights (Supp. 1.11.7) and all recycles."""
    passes = (config.model.recycles + 1) * config.model.ensemble
    device = optimizer.weights.device
    found = {}
    model.eval()
    with optimizer.averaged():
        for store, key in held_out:
            raw = read_example(store, key)
            raw = raw.take(0, min(len(raw.aatype), config.train.validation_residues), np.arange(len(raw.msa)))
            features = make_features(raw, config.data, config.train.seed, (key, "validation"), passes)
            batch = to_tensors(features, device)
            apply(inference_plan(batch, config.plan.precision), model)
            found[key] = ca_lddt(model(batch), batch)
    apply(config.plan, model).train()
    return validation_row(step, found)
