"""Similar sequences: pairwise alignments, and clusters."""
