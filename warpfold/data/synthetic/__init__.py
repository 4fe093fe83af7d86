"""Sample proteins with alignments, made from nothing: folds, backbones, side chains, sequences and their evolution."""
