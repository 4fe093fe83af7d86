"""Check operations against their definitions: cases of every operation, and the errors of the fast paths."""
