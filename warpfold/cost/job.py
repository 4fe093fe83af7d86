"""What is to be run, before it is known how: a model and the sizes of an example, to fold it or to train on it."""

from dataclasses import dataclass

from warpfold.cost.example import ExampleSizes
from warpfold.engine.optim import OptimConfig
from warpfold.model.alphafold import ModelConfig
from warpfold.model.losses import LossConfig


@dataclass(frozen=True, kw_only=True)
class Job:
    """One example through a model: what its memory and its time depend on, beside the plan and the devices.

    sizes: of the example, as the model gets it.  recycles: passes before the last; at most, where recycling may stop
    early.  loss, optim: of a training; None: a prediction.  representations: a prediction keeps single, pair and msa.
    """

    model: ModelConfig
    sizes: ExampleSizes
    recycles: int = 3
    loss: LossConfig | None = None
    optim: OptimConfig | None = None
    representations: bool = False

    @property
    def training(self) -> bool:
        """Whether there is a backward pass."""
        return self.loss is not None
