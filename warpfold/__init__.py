"""WarpFold: AlphaFold2-class models in PyTorch, trained, fine-tuned and run."""

__version__ = "0.1.0"
