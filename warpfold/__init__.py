"""WarpFold: AlphaFold2-class models in PyTorch, trained, fine-tuned and run."""

import importlib
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warpfold import ops
    from warpfold.adapt.accelerate import Acceleration, accelerate, acceleration, restore
    from warpfold.adapt.plain import biased_attention
    from warpfold.cli.bench import profile, tune
    from warpfold.cli.demo import demo, sample
    from warpfold.cli.design import design
    from warpfold.cli.distill import distill
    from warpfold.cli.doctor import doctor
    from warpfold.cli.finetune import finetune
    from warpfold.cli.pack import pack
    from warpfold.cli.params import fetch_params, params
    from warpfold.cli.plan import plan
    from warpfold.cli.predict import predict, relax
    from warpfold.cli.score import evaluate, golden, score
    from warpfold.cli.search import search
    from warpfold.cli.train import train, validate
    from warpfold.data.store.store import Store
    from warpfold.engine.comm_hook import CompressionState, compression_hook
    from warpfold.engine.ready import Ready
    from warpfold.engine.resume import Checkpoints
    from warpfold.engine.watch import Phase, TensorBoard, Watcher, WeightsAndBiases
    from warpfold.errors import UserError
    from warpfold.model.alphafold import AlphaFold
    from warpfold.model.evoformer import (
        Evoformer,
        EvoformerConfig,
        MSAColumnAttention,
        MSARowAttention,
        OuterProductMean,
        PairConfig,
        PairStack,
        Transition,
        TriangleAttention,
        TriangleMultiplication,
    )
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
    "MSAColumnAttention",
    "MSARowAttention",
    "OuterProductMean",
    "PairConfig",
    "PairStack",
    "ParamsFile",
    "Phase",
    "Plan",
    "Prediction",
    "Predictor",
    "Ready",
    "Store",
    "TensorBoard",
    "Transition",
    "TriangleAttention",
    "TriangleMultiplication",
    "UserError",
    "Watcher",
    "WeightsAndBiases",
    "__version__",
    "accelerate",
    "acceleration",
    "biased_attention",
    "compression_hook",
    "demo",
    "design",
    "distill",
    "doctor",
    "evaluate",
    "fetch_params",
    "finetune",
    "golden",
    "load",
    "ops",
    "pack",
    "params",
    "plan",
    "predict",
    "profile",
    "relax",
    "restore",
    "sample",
    "score",
    "search",
    "train",
    "tune",
    "validate",
]

# The names of each module. Modules are imported at first use, so that `import warpfold` does not load torch.
_NAMES = {
    "warpfold": "ops",
    "warpfold.adapt.accelerate": "Acceleration accelerate acceleration restore",
    "warpfold.adapt.plain": "biased_attention",
    "warpfold.cli.bench": "profile tune",
    "warpfold.cli.demo": "demo sample",
    "warpfold.cli.design": "design",
    "warpfold.cli.distill": "distill",
    "warpfold.cli.doctor": "doctor",
    "warpfold.cli.finetune": "finetune",
    "warpfold.cli.pack": "pack",
    "warpfold.cli.params": "fetch_params params",
    "warpfold.cli.plan": "plan",
    "warpfold.cli.predict": "predict relax",
    "warpfold.cli.score": "evaluate golden score",
    "warpfold.cli.search": "search",
    "warpfold.cli.train": "train validate",
    "warpfold.data.store.store": "Store",
    "warpfold.engine.comm_hook": "CompressionState compression_hook",
    "warpfold.engine.ready": "Ready",
    "warpfold.engine.resume": "Checkpoints",
    "warpfold.engine.watch": "Phase TensorBoard Watcher WeightsAndBiases",
    "warpfold.errors": "UserError",
    "warpfold.model.alphafold": "AlphaFold",
    "warpfold.model.evoformer": (
        "Evoformer EvoformerConfig MSAColumnAttention MSARowAttention OuterProductMean PairConfig PairStack Transition "
        "TriangleAttention TriangleMultiplication"
    ),
    "warpfold.parallel.execution": "Execution",
    "warpfold.parallel.plan": "Plan",
    "warpfold.prediction.outputs": "Prediction",
    "warpfold.prediction.params": "ParamsFile",
    "warpfold.prediction.predictor": "FoldResult Gradient Predictor load",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


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
