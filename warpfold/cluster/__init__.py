"""Measure the links and collectives of a cluster, and check its configuration."""
