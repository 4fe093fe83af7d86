"""Calls of every operation that a recipe repeats, by their names in `tests/ops/cases.py`."""

REPEATED = [
    "layer_norm 20, turned", "norm_linear 128 to 8, many axes", "norm_linear 384 to 3, planes", "gate turned",
    "gated_linear_residual odd", "triangle_factor b of columns, fused", "transition 40, SwiGLU, a batch",
    "outer_product odd", "outer_product_mean added last, turned", "triangle_multiplication outgoing",
    "triangle_multiplication rows of outgoing", "triangle_multiplication incoming, rows that are padded",
    "gated_attention triangle, ending",
    "gated_attention row of an alignment", "gated_attention batch, given bias", "attention two slabs",
    "global_attention", "aligned_errors chains", "overlaps of every pair",
]  # fmt: skip
