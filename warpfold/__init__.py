"""WarpFold: AlphaFold2-class models in PyTorch, trained, fine-tuned and run."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warpfold.adapt.accelerate import Acceleration, accelerate, acceleration, restore
    from warpfold.adapt.plain import biased_attention
    from warpfold.engine.flat import Flat
    from warpfold.engine.one_step import OneStep
    from warpfold.engine.ready import Ready
    from warpfold.engine.replicas import Replicas
    from warpfold.engine.resume import Checkpoints
    from warpfold.run.outputs import Prediction
    from warpfold.run.predictor import Predictor, load

__version__ = "0.1.0"
__all__ = [
    "Acceleration",
    "Checkpoints",
    "Flat",
    "OneStep",
    "Prediction",
    "Predictor",
    "Ready",
    "Replicas",
    "__version__",
    "accelerate",
    "acceleration",
    "biased_attention",
    "load",
    "restore",
]

# Where each name is; imported at first use: `import warpfold` alone does not load torch.
_MODULES = {
    **dict.fromkeys(("accelerate", "restore", "acceleration", "Acceleration"), "warpfold.adapt.accelerate"),
    "biased_attention": "warpfold.adapt.plain",
    **dict.fromkeys(("Predictor", "load"), "warpfold.run.predictor"),
    "Checkpoints": "warpfold.engine.resume",
    "Flat": "warpfold.engine.flat",
    "OneStep": "warpfold.engine.one_step",
    "Prediction": "warpfold.run.outputs",
    "Ready": "warpfold.engine.ready",
    "Replicas": "warpfold.engine.replicas",
}


def __getattr__(name: str) -> Any:
    """Return a name of the Python interface."""
    if name not in _MODULES:
        raise AttributeError(f"module 'warpfold' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
