"""Start a training from the parameters in a file and the moments of its run, after checking that they fit."""

import logging
from pathlib import Path

from torch import Tensor, nn

from warpfold import settings
from warpfold.engine.checkpoint import StepFolders
from warpfold.engine.optim import Optimizer
from warpfold.engine.trainable import ADAPTER
from warpfold.errors import UserError, listed
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.model.weights.files import load_config, load_state, without_memory
from warpfold.parallel.team import Team
from warpfold.settings import differing_values, to_dict

log = logging.getLogger("warpfold")

# Settings of a model on which no parameter's shape depends.  The first ones change its results for equal parameters.
RESULT_KEYS = {"layers", "position_scale", "order", "outer", "unit_vectors", "activation"}
SHAPELESS_KEYS = {"recycles", "recycle_tolerance", "ensemble", "rate", "dropout", *RESULT_KEYS}
HEADS = ("distogram", "masked_msa", "plddt", "resolved", "pae")


def check_first(config: ModelConfig, init: Path, new_heads: bool = False) -> None:
    """Raise the errors of `start_from` for the model of these settings, without allocating it."""
    file_model = without_memory(load_config(init), str(init))
    _first_tensors(without_memory(config, "the settings"), file_model, str(init), new_heads)


def start_from(model: AlphaFold, file_model: AlphaFold, source: str, new_heads: bool = False) -> None:
    """Load the parameters of a model that was read from `source` into the model of a run.

    new_heads: a head that only the run's model has keeps its random weights, and one that only the file has is left
        out.
    Errors: UserError that names the missing or surplus heads, or the settings that differ, with the remedy.
    """
    load_state(model, _first_tensors(model, file_model, source, new_heads), source)
    differing = _differing_settings(model, file_model)
    if other := [f"{key}: {values}" for key, values in differing.items() if key.rpartition(".")[2] in RESULT_KEYS]:
        log.warning("%s: its parameters were of a model with %s", source, listed(other, between="; "))


def _first_tensors(model: AlphaFold, file_model: AlphaFold, source: str, new_heads: bool) -> dict[str, Tensor]:
    """Select the tensors that `model` starts with.  Errors: see `start_from`."""
    model_state, file_state = model.state_dict(), file_model.state_dict()
    missing = [head for head in _heads(model) if head not in _heads(file_model)]
    surplus = [head for head in _heads(file_model) if head not in _heads(model)]
    if (missing or surplus) and new_heads:
        random_heads = {name: x for name, x in model_state.items() if name.split(".")[0] in missing}
        file_state = {name: x for name, x in file_state.items() if name.split(".")[0] not in surplus} | random_heads
        missing, surplus = [], []
    names = model_state.keys() | file_state.keys()
    in_heads = {name for head in (*missing, *surplus) for name in names if name.startswith(f"{head}.")}
    states = (model_state, file_state)
    shapes = [{name: x.shape for name, x in state.items() if name not in in_heads} for state in states]
    differing = _differing_settings(model, file_model)
    differ = [f"{key}: {values}" for key, values in differing.items() if key.rpartition(".")[2] not in SHAPELESS_KEYS]
    # Differences matter only if shapes differ.
    if shapes[0] != shapes[1] and differ:
        raise UserError(
            f"{source}: parameters of another model than that of the settings (in the file {listed(differ, 4, '; ')}). "
            f"`warpfold params {source} --toml` prints its settings."
        )
    if missing or surplus:
        problems = [f"lacks the head {head}, which the settings have" for head in missing]
        problems += [f"has the head {head}, which the settings lack" for head in surplus]
        changes = [f"--set model.heads.{head}=false" for head in missing]
        changes += [f"--set model.heads.{head}=true" for head in surplus]
        # The presets without the PAE head give its loss no weight.
        changes += ["--set loss.predicted_aligned_error=0.1"] if "pae" in surplus else []
        new = "begins it at random" if missing else "leaves it out"
        raise UserError(
            f"{source}: {' and '.join(problems)}. {' '.join(changes)} follows the file, "
            f"--set train.new_heads=true {new}."
        )
    return file_state


def _heads(model: nn.Module) -> list[str]:
    return [head for head in HEADS if getattr(model, head) is not None]


def _differing_settings(model: AlphaFold, file_model: AlphaFold) -> dict[str, str]:
    """Return the values of the settings in which two models differ, that of the file first."""
    return differing_values(to_dict(file_model.config), to_dict(model.config), "model.")


def check_moments(rule: str, init: Path | None) -> int:
    """Find the checkpoint with the moments of the parameters in `init`, the last one in their folder; return its step.

    rule: optim.name.  Errors: UserError if there is no checkpoint, or if its run has another rule.
    """
    off = "or set train.moments=false"
    if init is None:
        raise UserError(
            f"train.moments: moments are taken from the run of --init. Pass --init RUN/params.safetensors, {off}."
        )
    step = StepFolders(init.parent / "checkpoints").latest()
    if step is None:
        raise UserError(
            f"{init}: train.moments needs a run's checkpoints in the same folder. Pass RUN/params.safetensors, {off}."
        )
    before = settings.load(init.parent / "settings.toml").get("optim", {}).get("name", "adam")
    if before != rule:
        raise UserError(f"{init}: its run has the moments of optim.name={before}, not {rule}. Set that, {off}.")
    return step


def take_moments(optimizer: Optimizer, init: Path | None, team: Team) -> None:
    """Load the moments of the run whose folder has the parameters `init`.  Errors: see `check_moments`.

    Rank 0 alone reads them.  All ranks call this.  Adapters, which begin anew, and new parameters have zero moments.
    """
    moments = None
    if team.is_rank_zero:
        step = check_moments(optimizer.config.name, init)
        assert init is not None
        tensors = StepFolders(init.parent / "checkpoints").load(step).tensors
        moments = {
            name: x
            for name, x in tensors.items()
            if name == "steps" or (name.startswith(tuple(optimizer.rule.moments)) and not name.endswith(ADAPTER))
        }
    if lacking := optimizer.take_moments(team.broadcast_tensors(moments, "the moments to start from")):
        log.info("parameters without moments in the run of %s: %s", init, listed(lacking, 4))
