"""The fast ways as torch knows them: `torch.library` operations with shapes (fake) and gradients (autograd).

One registration serves every device: `dispatch.implementation` picks the kernels.  So `torch.compile`, `opcheck` and
selective checkpointing see one opaque operation per call, forward and backward.
"""
