"""Models of other packages: let their layers compute with our operations.

One file per package maps its classes to our layers (see `adapter.py`). `accelerate.py` swaps the layers of a model, and
`verify.py` compares a swapped layer with its own code.
"""
