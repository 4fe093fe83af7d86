"""Reliability measurements: `python -m benchmarks.reliability` (docs/explanation/exactness.md)."""
