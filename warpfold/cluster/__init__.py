"""Measure a cluster: what joins its devices, what its collectives take, and what is wrong with them."""
