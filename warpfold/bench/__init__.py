"""Measure the speed of operations, models and loaders, and check what a machine can do."""
