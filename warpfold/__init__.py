"""WarpFold: AlphaFold2-class models in PyTorch, trained, fine-tuned and run."""

import importlib
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warpfold import ops
    from warpfold.adapt.accelerate import Acceleration, accelerate, acceleration, restore
    from warpfold.adapt.plain import biased_attention
    from warpfold.cli.demo import sample
    from warpfold.cli.distill import distill
    from warpfold.cli.finetune import finetune
    from warpfold.cli.pack import pack
    from warpfold.cli.params import fetch_params, params
    from warpfold.cli.predict import predict
    from warpfold.cli.score import evaluate, score
    from warpfold.cli.search import search
    from warpfold.cli.train import train, validate
    from warpfold.data.store.store import Store
    from warpfold.engine.comm_hook import CompressionState, compression_hook
    from warpfold.engine.ready import Ready
    from warpfold.engine.resume import Checkpoints
    from warpfold.engine.watch import Phase, TensorBoard, Watcher, WeightsAndBiases
    from warpfold.errors import UserError
    from warpfold.model.alphafold import AlphaFold
    from warpfold.model.evoformer import Evoformer, EvoformerConfig
    from warpfold.parallel.execution import Execution
    from warpfold.parallel.plan import Plan
    from warpfold.prediction.outputs import Prediction
    from warpfold.prediction.params import ParamsFile
    from warpfold.prediction.predictor import FoldResult, Gradient, Predictor, load

__version__ = "0.1.0"
__all__ = [
    "Acceleration",
    "AlphaFold",
    "Checkpoints",
    "CompressionState",
    "Evoformer",
    "EvoformerConfig",
    "Execution",
    "FoldResult",
    "Gradient",
    "ParamsFile",
    "Phase",
    "Plan",
    "Prediction",
    "Predictor",
    "Ready",
    "Store",
    "TensorBoard",
    "UserError",
    "Watcher",
    "WeightsAndBiases",
    "__version__",
    "accelerate",
    "acceleration",
    "biased_attention",
    "compression_hook",
    "distill",
    "evaluate",
    "fetch_params",
    "finetune",
    "load",
    "ops",
    "pack",
    "params",
    "predict",
    "restore",
    "sample",
    "score",
    "search",
    "train",
    "validate",
]

# The module of each name. Modules are imported at first use, so that `import warpfold` does not load torch.
_MODULES = {
    **dict.fromkeys(("accelerate", "restore", "acceleration", "Acceleration"), "warpfold.adapt.accelerate"),
    "biased_attention": "warpfold.adapt.plain",
    **dict.fromkeys(("FoldResult", "Gradient", "Predictor", "load"), "warpfold.prediction.predictor"),
    **{
        name: f"warpfold.cli.{name}" for name in ("distill", "finetune", "pack", "params", "predict", "score", "search")
    },
    **dict.fromkeys(("train", "validate"), "warpfold.cli.train"),
    "evaluate": "warpfold.cli.score",
    "fetch_params": "warpfold.cli.params",
    "sample": "warpfold.cli.demo",
    "Checkpoints": "warpfold.engine.resume",
    **dict.fromkeys(("CompressionState", "compression_hook"), "warpfold.engine.comm_hook"),
    **dict.fromkeys(("Phase", "TensorBoard", "Watcher", "WeightsAndBiases"), "warpfold.engine.watch"),
    "AlphaFold": "warpfold.model.alphafold",
    **dict.fromkeys(("Evoformer", "EvoformerConfig"), "warpfold.model.evoformer"),
    "Execution": "warpfold.parallel.execution",
    "Plan": "warpfold.parallel.plan",
    "ops": "warpfold",
    "ParamsFile": "warpfold.prediction.params",
    "Prediction": "warpfold.prediction.outputs",
    "Ready": "warpfold.engine.ready",
    "Store": "warpfold.data.store.store",
    "UserError": "warpfold.errors",
}


def __getattr__(name: str) -> Any:
    """Import a name of the Python interface."""
    if name not in _MODULES:
        raise AttributeError(f"module 'warpfold' has no attribute {name!r}")
    if name == "ops":
        # Importing the layer functions also makes the other modules of operations available as attributes.
        importlib.import_module("warpfold.ops.layers")
        value = sys.modules["warpfold.ops"]
    else:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    if "torch" in sys.modules:
        _warn_of_versions()
    return value


# The cache limits the warning to one in each process.
@cache
def _warn_of_versions() -> None:
    """Warn if torch or Python is newer than the tested versions."""
    import warnings

    from warpfold.check.versions import newer_than_tested

    if newer := newer_than_tested():
        warnings.warn(newer, stacklevel=3)


def __dir__() -> list[str]:
    """List the names of the Python interface."""
    return __all__
