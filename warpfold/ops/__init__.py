"""Operations: each has a definition in plain torch, and fast paths in cpu/ and triton/.

dispatch         registration, and the choice between definition and fast path
layers           operations that are whole layers of the trunk
attention        attention with a pair bias
triangle         triangle multiplication
transition       norm, two-layer MLP and residual
outer            the outer product mean
linear           layer norm, gate and projection
pairs            pairwise sums of losses
adam             a step of Adam on flat buffers
noise            dropout from a counter-based generator
tensors          large matrices in blocks, deterministic lookups, exact products
capabilities     what a GPU can do
torch_internals  the private interfaces of torch, which no other file uses
"""
