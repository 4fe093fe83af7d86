"""Packing: find the inputs, do the jobs of a part (match alignments to chains, build records), merge parts, report."""
