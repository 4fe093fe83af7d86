"""Compute the features of an example: sample residues and rows, read them, and compute the arrays of the model."""
