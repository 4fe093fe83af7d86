"""Models of other packages: let their layers compute with our operations.

One file per package maps its classes to our layers. The class attributes of its adapters are described in `adapter.py`
(`serves`, `signature`, `least` ...) and `kinds.py` (`names`, `takes`, `refuses` ...). `accelerate.py` swaps the layers
of a model, and `verify.py` compares a swapped layer with its own code.
"""
