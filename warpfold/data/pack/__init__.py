"""Pack stores: find the inputs, run the jobs of a part (match alignments to chains, build records), merge, report."""
