"""Start a training from parameters in a file, and from the moments of its run: what must fit, and what makes it fit."""

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
from warpfold.settings import differences, to_dict

log = logging.getLogger("warpfold")

# Settings of a model that no parameter depends on: those that change what it computes with them, and the others.
COMPUTES = {"layers", "position_scale", "order", "outer", "unit_vectors", "activation"}
FREE = {"recycles", "recycle_tolerance", "ensemble", "rate", "dropout", *COMPUTES}
HEADS = ("distogram", "masked_msa", "plddt", "resolved", "pae")


def check_first(config: ModelConfig, init: Path, new_heads: bool = False) -> None:
    """Raise what `start_from` would, for the model that settings describe, by sizes alone: nothing is allocated."""
    given = without_memory(load_config(init), str(init))
    _in_common(without_memory(config, "the settings"), given, str(init), new_heads)


def start_from(model: AlphaFold, given: AlphaFold, source: str, new_heads: bool = False) -> None:
    """Load the parameters of a model that was read from `source` into one that settings describe.

    new_heads: a head that only one of them has stays as it is drawn, or is left out.
    Errors: UserError that names the heads that are missing or surplus, or the settings that differ, and the cure.
    """
    load_state(model, _in_common(model, given, source, new_heads), source)
    if other := [one for one in _differing(model, given) if _key(one) in COMPUTES]:
        log.warning("%s: its parameters were of a model with %s", source, listed(other, between="; "))


def _in_common(model: AlphaFold, given: AlphaFold, source: str, new_heads: bool) -> dict[str, Tensor]:
    """Return the tensors that `model` starts with.  Errors: as in `start_from`."""
    own, found = model.state_dict(), given.state_dict()
    missing = [head for head in _heads(model) if head not in _heads(given)]
    surplus = [head for head in _heads(given) if head not in _heads(model)]
    if (missing or surplus) and new_heads:
        ours = {name: tensor for name, tensor in own.items() if name.split(".")[0] in missing}
        found = {name: tensor for name, tensor in found.items() if name.split(".")[0] not in surplus} | ours
        missing, surplus = [], []
    names = {name for head in (*missing, *surplus) for name in own.keys() | found.keys() if name.startswith(f"{head}.")}
    shapes = [{name: x.shape for name, x in state.items() if name not in names} for state in (own, found)]
    if shapes[0] != shapes[1] and (differ := [one for one in _differing(model, given) if _key(one) not in FREE]):
        raise UserError(
            f"{source}: parameters of another model than that of the settings (in the file {listed(differ, 4, '; ')}); "
            f"`warpfold params {source} --toml` prints its settings"
        )
    if missing or surplus:
        said = [f"lacks the head {head}, which the settings have" for head in missing]
        said += [f"has the head {head}, which the settings lack" for head in surplus]
        changes = [f"--set model.heads.{head}=false" for head in missing]
        changes += [f"--set model.heads.{head}=true" for head in surplus]
        # The presets without the PAE head give its loss no weight.
        changes += ["--set loss.predicted_aligned_error=0.1"] if "pae" in surplus else []
        new = "begins it at random" if missing else "leaves it out"
        raise UserError(
            f"{source}: {' and '.join(said)}; {' '.join(changes)} follows the file, --set train.new_heads=true {new}"
        )
    return found


def _heads(model: nn.Module) -> list[str]:
    return [head for head in HEADS if getattr(model, head) is not None]


def _differing(model: AlphaFold, given: AlphaFold) -> list[str]:
    """Return the settings in which two models differ, that of the file first."""
    return differences(to_dict(given.config), to_dict(model.config), "model.")


def _key(difference: str) -> str:
    """Return the last part of a setting's name."""
    return difference.partition(":")[0].rpartition(".")[2]


def check_moments(rule: str, init: Path | None) -> int:
    """Return the step of the checkpoint that has the moments of the parameters in `init`, the last one beside them.

    rule: optim.name.  Errors: UserError where there is none, or one of a run with another rule.
    """
    off = "or set train.moments=false"
    if init is None:
        raise UserError(
            f"train.moments: moments are taken from the run of --init; give it RUN/params.safetensors, {off}"
        )
    step = StepFolders(init.parent / "checkpoints").latest()
    if step is None:
        raise UserError(
            f"{init}: train.moments needs a run's checkpoints beside it; give RUN/params.safetensors, {off}"
        )
    before = settings.load(init.parent / "settings.toml").get("optim", {}).get("name", "adam")
    if before != rule:
        raise UserError(f"{init}: the moments of its run are those of optim.name={before}, not {rule}; set that, {off}")
    return step


def take_moments(optimizer: Optimizer, init: Path | None, team: Team) -> None:
    """Take the moments of the run in whose folder the parameters `init` are.  Errors: as of `check_moments`.

    Rank 0 alone reads them; all call this.  Adapters, which begin anew, and parameters new to the model have none.
    """
    found = None
    if team.is_rank_zero:
        step = check_moments(optimizer.config.name, init)
        assert init is not None
        found = StepFolders(init.parent / "checkpoints").load(step).tensors
        found = {
            name: x
            for name, x in found.items()
            if name == "steps" or (name.startswith(tuple(optimizer.rule.moments)) and not name.endswith(ADAPTER))
        }
    if lacking := optimizer.take_moments(team.broadcast_tensors(found, "the moments to start from")):
        log.info("parameters without moments in the run of %s: %s", init, listed(lacking, 4))
