"""Clusters: what joins their devices, what their collectives take, and what is wrong with them."""
