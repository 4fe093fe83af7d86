"""The fast paths on a GPU: Triton kernels, their launches, and the tables that say how each is launched on which GPU."""
