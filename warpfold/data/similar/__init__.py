"""Compare sequences: pairwise alignments, clusters, and relatives of held-out proteins."""
