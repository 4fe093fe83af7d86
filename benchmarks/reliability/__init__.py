"""Reliability as figures that anybody can repeat; `python -m benchmarks.reliability` (docs/reliability.md)."""
