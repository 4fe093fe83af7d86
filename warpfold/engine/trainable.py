"""Select the trained parameters of a model by name, and add low-rank adapters to its projections.

Frozen parameters require no gradient.  Autograd therefore stops below the first trained layer, and the optimizer, the
exchange of gradients and the checkpoints contain the trained parameters alone.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn

from warpfold.errors import UserError
from warpfold.keyed import keyed_rng
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.model.layers import AdaptedLinear, Linear
from warpfold.model.losses import LossConfig

# Head -> the weight of the loss from which this head alone learns.
HEADS = {
    "distogram": "distogram",
    "masked_msa": "masked_msa",
    "plddt": "plddt",
    "resolved": "experimentally_resolved",
    "pae": "predicted_aligned_error",
}
BEHIND_TRUNK = ("structure", *HEADS)  # modules of a model that the trunk does not need
ADAPTER = ("adapter_a", "adapter_b")  # parameters


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """[finetune.adapters]: a projection's weight is W + scale B A, and only A and B are trained.

    on: names or patterns of projections.
    rank: of B A.
    scale: alpha / r of Hu et al. 2021 (section 4.1), which does not depend on the rank.
    A is initialised with normal numbers of variance 1 / c_in and B with zeros, so the model is unchanged at first.
    """

    on: tuple[str, ...] = ()
    rank: int = 8
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.scale > 0:
            raise ValueError("rank must be at least 1, and scale positive")


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """[finetune]: which parameters are trained, and how many random draws each example has.

    trainable: "all", "heads", or names or patterns of parameters or modules ("structure", "evoformer.blocks.4?.*"); []
        to train adapters alone.
    draws: number of different draws of each example.  A draw decides the crop, alignment rows, recycles, and the
        dropout of a frozen trunk.  0: a new draw every time.
    trunk: the outputs of a frozen trunk are "computed" each time or "cached" in the run's folder, for each draw.
        "auto": cached if possible.
    """

    trainable: tuple[str, ...] = ("all",)
    draws: int = 0
    trunk: Literal["computed", "cached", "auto"] = "computed"
    adapters: AdapterConfig = field(default_factory=AdapterConfig)

    def __post_init__(self) -> None:
        if not self.trainable and not self.adapters.on:
            raise ValueError('trainable = [] without adapters.on trains nothing; name parameters, or "all"')
        if self.draws < 0:
            raise ValueError("draws must not be negative; 0 draws each example anew every time")
        if self.trunk == "cached" and not self.draws:
            raise ValueError('trunk = "cached" needs draws above 0, the number of samples cached for each example')

    @property
    def freezes(self) -> bool:
        """Whether some parameters are not trained."""
        return self.trainable != ("all",) or bool(self.adapters.on)

    def draw(self, index: int, examples: int) -> int:
        """Compute the number of the draw of example `index`, which all `examples` of a step share."""
        return index // examples % self.draws if self.draws else index


class Trained:
    """The names of a model's parameters that are trained, and of the projections that have an adapter."""

    def __init__(self, model: nn.Module, config: FinetuneConfig) -> None:
        """Errors: UserError for a pattern without a match, and if the projection of an adapter is itself trained."""
        self.config = config
        linears = [name for name, module in model.named_modules() if isinstance(module, Linear)]
        parameters = [name for name, _ in model.named_parameters()]
        self.adapted = _matching(config.adapters.on, linears, "finetune.adapters.on", "a projection")
        patterns = [pattern for name in config.trainable for pattern in (HEADS if name == "heads" else (name,))]
        if "heads" in config.trainable:
            patterns = [p for p in patterns if p not in HEADS or getattr(model, p, None) is not None]
        plain = (
            parameters
            if "all" in config.trainable
            else _matching(patterns, parameters, "finetune.trainable", "a parameter")
        )
        if overlap := sorted({f"{name}.weight" for name in self.adapted} & set(plain)):
            raise UserError(
                f"finetune.trainable has {overlap[0]}, on which finetune.adapters.on puts an adapter. Train one of "
                "the two (trainable = [] trains adapters alone)."
            )
        self.names = [*plain, *(f"{name}.{part}" for name in self.adapted for part in ADAPTER)]

    @property
    def trunk(self) -> bool:
        """Whether a parameter of the trunk is trained."""
        return not all(name.split(".")[0] in BEHIND_TRUNK for name in self.names)

    @property
    def has_masked_msa(self) -> bool:
        """Whether the masked-MSA head is trained, which reads whole alignments."""
        return any(name.startswith("masked_msa.") for name in self.names)

    def check_losses(self, loss: LossConfig) -> None:
        """Raise UserError if only heads are trained and their losses have no weight."""
        tops = {name.split(".")[0] for name in self.names}
        if all(top in HEADS and not getattr(loss, HEADS[top]) for top in tops):
            weights = " and ".join(f"loss.{HEADS[top]}" for top in sorted(tops))
            heads = " and ".join(sorted(tops))
            raise UserError(
                f"finetune.trainable: {heads} would learn nothing, since {weights} = 0. Set a weight above 0."
            )

    def check_pae_loss(self, loss: LossConfig) -> None:
        """Raise UserError if the PAE head is trained and its loss has no weight.

        Otherwise pTM, ipTM and PAE of the trained model would come from a head that never saw the trained trunk.
        """
        if not loss.predicted_aligned_error and any(name.split(".")[0] == "pae" for name in self.names):
            raise UserError(
                "loss.predicted_aligned_error: is 0, so the PAE head would learn nothing. Add --set "
                "loss.predicted_aligned_error=0.1 (Supp. 1.9.7), or name the trained parameters in finetune.trainable."
            )

    def why_not_cached(self) -> str | None:
        """Return the reason why outputs of the trunk cannot be cached; None if they can."""
        if self.trunk:
            name = next(name for name in self.names if name.split(".")[0] not in BEHIND_TRUNK)
            return f"{name} is trained"
        if self.has_masked_msa:
            return "the head masked_msa is trained, which reads whole alignments"
        return None if self.config.draws else "finetune.draws is 0: no example comes twice"


def _matching(patterns: Sequence[str], names: Sequence[str], setting: str, what: str) -> list[str]:
    """Return the names that match a pattern, or that are in a module that matches one, in the order of `names`."""
    matches: set[str] = set()
    for pattern in patterns:
        # The pattern may match the first parts of a name, which are a module.
        depth = pattern.count(".") + 1
        new = {
            name
            for name in names
            if fnmatchcase(name, pattern)
            or (name.count(".") >= depth and fnmatchcase(".".join(name.split(".")[:depth]), pattern))
        }
        if not new:
            modules = dict.fromkeys(
                ".".join(name.split(".")[:n]) for name in names for n in range(1, name.count(".") + 1)
            )
            near = difflib.get_close_matches(pattern, [*modules, *names], n=3, cutoff=0.5)
            tops = dict.fromkeys(name.split(".")[0] for name in names)
            hint = f"Did you mean {' or '.join(near)}?" if near else f"Its modules are {', '.join(tops)}."
            raise UserError(f'{setting}: "{pattern}" is not the name of {what} of this model. {hint}')
        matches |= new
    return [name for name in names if name in matches]


@lru_cache(maxsize=16)
def trained_parts(model: ModelConfig, config: FinetuneConfig) -> Trained:
    """Select the trained parameters of the model of these settings, without memory.  Errors: see `Trained`."""
    with torch.device("meta"):
        return Trained(AlphaFold(model), config)


def freeze(model: nn.Module, config: FinetuneConfig, seed: int = 0) -> Trained:
    """Freeze all parameters that the settings do not name, and add adapters to projections.

    Call it before the model's weights are packed.  seed: adapters are keyed by it and by their names.
    Errors: see `Trained`; the model is then unchanged.
    """
    trained = Trained(model, config)
    for name in trained.adapted:
        linear, rank = model.get_submodule(name), config.adapters.rank
        assert isinstance(linear, Linear)
        outputs, inputs = linear.weight.shape
        a = linear.weight.new_empty(rank, inputs, requires_grad=False)
        if a.device.type != "meta":
            drawn = keyed_rng(seed, "adapter", name).standard_normal((rank, inputs)) / inputs**0.5
            a.copy_(torch.from_numpy(drawn))
        linear.register_parameter("adapter_a", nn.Parameter(a))
        linear.register_parameter("adapter_b", nn.Parameter(linear.weight.new_zeros(outputs, rank)))
        linear.__class__ = AdaptedLinear
        assert isinstance(linear, AdaptedLinear)
        linear.scale = config.adapters.scale
    names = set(trained.names)
    for name, p in model.named_parameters():
        p.requires_grad_(name in names)
    if isinstance(model, AlphaFold):
        model.frozen_trunk = not trained.trunk
    return trained


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's state by its usual names, with adapters merged into their weights."""
    state = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            state[f"{name}.weight"] = module.weight.detach()
            for part in ADAPTER:
                del state[f"{name}.{part}"]
    return state


def adapters_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's adapters alone."""
    return {name: x for name, x in model.state_dict().items() if name.rpartition(".")[2] in ADAPTER}


def frozen_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the frozen parameters, which checkpoints lack."""
    return {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
