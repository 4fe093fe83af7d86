"""Validate the checkpoints of a run in a separate process while it trains, on another machine or device.

    RUN/evaluations.jsonl    a row for each checkpoint, like the rows of validations in metrics.jsonl
    RUN/best.safetensors     the averaged weights of the best checkpoint

The process reads only the folder of the run, so that every bit of the training stays the same.
"""

import json
import logging
import time
import tomllib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from warpfold import settings
from warpfold.data.load.order import Source
from warpfold.engine.checkpoint import FROZEN, AppendedFile, Checkpoint, DamagedCheckpoint, StepFolders, finite
from warpfold.engine.packed import PackedWeights
from warpfold.engine.trainable import freeze, merged_state
from warpfold.engine.watch import Row, Watching, as_watchers
from warpfold.errors import UserError
from warpfold.files import wait_for_lock
from warpfold.model.alphafold import AlphaFold
from warpfold.model.weights.files import save_params
from warpfold.parallel.plan import DTYPES, log_precision, resolve_precision
from warpfold.parallel.team import Team
from warpfold.training.config import RunConfig
from warpfold.training.examples import fingerprint_origin, held_out_features, hold_out
from warpfold.training.validation import Judge, Scores, validation_row

logger = logging.getLogger("warpfold")

LOG, BEST = "evaluations.jsonl", "best.safetensors"
POLL_SECONDS = 2.0


def validate(
    run: Path,
    data: Sequence[Source],
    *,
    follow: bool = False,
    device: torch.device | str = "cpu",
    watch: Watching | None = None,
) -> list[Row]:
    """Fold the held-out examples with the averaged weights of each checkpoint that has no row yet; return the new rows.

    run: the folder of a training.
    data: the sources of its training data, in the same order.
    follow: wait for further checkpoints until the one of the last step.
    watch: watchers of the rows (engine/watch.py).
    Checkpoints that the run deletes before they are evaluated are left out.
    Errors: UserError for a folder without a run, for other data, and if another process evaluates the run.
    """
    config = settings_of(run)
    _, held_out = hold_out(data, config)
    if not held_out:
        raise UserError(f"{run}: its settings hold nothing out. Train with train.validation above 0.")
    origin, watchers = fingerprint_origin(data, None, Team())["store"], as_watchers(watch)
    folders, device = StepFolders(run / "checkpoints"), torch.device(device)
    model = AlphaFold(config.model).to(device).eval()
    freeze(model, config.finetune)
    if config.finetune.freezes:
        # Each checkpoint has the other parameters.
        model.load_state_dict(load_file(run / FROZEN), strict=False)
    # This device may support another precision than the device of the training.
    precision = resolve_precision("auto", device)
    config = replace(config, plan=replace(config.plan, precision=precision))
    log_precision("auto", precision, device)
    packed = PackedWeights(model, DTYPES[config.plan.precision])
    judge = Judge(model, config, device, lambda _: None)
    busy_error = UserError(f"{run}: another `warpfold validate` is writing there. End it first.")
    new_rows: list[Row] = []
    with wait_for_lock(run / ".validate-lock", busy_error), closing(AppendedFile(run / LOG)) as log:
        try:
            rows = [json.loads(line) for line in (run / LOG).read_text(encoding="utf-8").splitlines()]
            best = max((float(row["lddt_ca"]) for row in rows if _is_whole(row)), default=-1.0)
            evaluated_steps = {int(row["step"]) for row in rows}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{run / LOG}: damaged ({error}). Remove it, and its steps are evaluated again.") from None
        for watcher in watchers:
            watcher.on_begin(max(evaluated_steps, default=0))
        while True:
            for step in (step for step in folders.steps() if step not in evaluated_steps):
                evaluated_steps.add(step)
                try:
                    checkpoint = folders.load(step)
                except DamagedCheckpoint as error:
                    gone = not folders.step_path(step).exists()
                    reason = "the run has deleted it meanwhile" if gone else error
                    logger.warning("step %d is not evaluated: %s", step, reason)
                    continue
                if checkpoint.notes.get("store") != origin:
                    raise UserError(f"{run}: its run trains on other data. Pass the same --data in the same order.")
                for name, average in _averages_of(checkpoint).items():
                    packed.parameters[name].data.copy_(average)
                packed.refresh()
                began = time.perf_counter()
                with torch.no_grad(), closing(held_out_features(held_out, config)) as examples:
                    scores: dict[str, Scores] = {example.key: judge.scores(example) for example in examples}
                row = validation_row(step, [key for _, key in held_out], scores)
                row |= {"seconds": round(time.perf_counter() - began, 3), "time": round(time.time(), 3)}
                row["precision"] = config.plan.precision
                if _is_whole(row) and row["lddt_ca"] > best:
                    best = row["lddt_ca"]
                    save_params(run / BEST, model, settings.to_dict(config.data), merged_state(model))
                log.write(json.dumps(finite(row)) + "\n")
                new_rows.append(row)
                for watcher in watchers:
                    watcher.on_metrics(row)
            if not follow or max(evaluated_steps, default=0) >= config.train.steps:
                break
            # A run may end before its last step (`train.patience`).
            lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            if lines and '"kind": "end"' in lines[-1]:
                break
            time.sleep(POLL_SECONDS)
        for watcher in watchers:
            watcher.on_end(max(evaluated_steps, default=0) >= config.train.steps)
    return new_rows


def settings_of(run: Path) -> RunConfig:
    """Read the settings of a run.  Errors: UserError for a folder without settings."""
    path = run / "settings.toml"
    try:
        return settings.build(RunConfig, tomllib.loads(path.read_text(encoding="utf-8")), str(path))
    except OSError as error:
        raise UserError(f"{run}: not the folder of a training run ({path.name}: {error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is damaged ({error}). Restore it.") from error


def _averages_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the averaged weights of a checkpoint, by parameter."""
    tensors = checkpoint.tensors.items()
    return {name.removeprefix("average."): x for name, x in tensors if name.startswith("average.")}


def _is_whole(row: Row) -> bool:
    """Whether a row covers all held-out examples, so that it can be compared with other rows."""
    return "of" not in row and isinstance(row.get("lddt_ca"), float)
