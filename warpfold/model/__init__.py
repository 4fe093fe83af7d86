"""AlphaFold2 and AlphaFold-Multimer, with the letters and numbers of the supplement.

alphafold    Algorithm 2, recycling and ensembling
embed        features to m and z (clusters: those of a multimer)
template     templates
evoformer    the Evoformer and its layers (axial: their contract; layers: their parts)
pair_bias    two layers of AlphaFold3
structure    the structure module
heads        logits of the heads (confidence: what follows from them)
losses       losses (violations, permutation)
soft         soft sequences for design
weights      parameters in files
"""
