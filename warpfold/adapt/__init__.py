"""Other people's models: layers of theirs that compute by operations of ours.

A file per package says which of its classes are which layers (`adapter.py` says how); `accelerate.py` swaps them in a
model, `verify.py` compares both ways.
"""
