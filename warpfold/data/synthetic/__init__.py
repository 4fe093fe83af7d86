"""Generate sample proteins with alignments: folds, backbones, side chains, sequences and their evolution."""
