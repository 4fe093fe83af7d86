"""The fast path on a GPU: Triton kernels, their launches, and the tables of how each is launched on which GPU."""
