"""WarpFold: AlphaFold2-class models in PyTorch, trained, fine-tuned and run."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warpfold.run.outputs import Prediction
    from warpfold.run.predictor import Predictor, load

__version__ = "0.1.0"
__all__ = ["Prediction", "Predictor", "__version__", "load"]


def __getattr__(name: str) -> Any:
    """The Python interface, imported at first use: `import warpfold` alone does not load torch."""
    if name in ("Predictor", "load"):
        from warpfold.run import predictor

        return getattr(predictor, name)
    if name == "Prediction":
        from warpfold.run.outputs import Prediction

        return Prediction
    raise AttributeError(f"module 'warpfold' has no attribute {name!r}")
