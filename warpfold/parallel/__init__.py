"""Running a model on one device or many.

plan         how a model runs; changes results only by rounding
execution    runs a model as a plan says
slices       layers in slices
sharded      stacks over several ranks
mesh         the grid of ranks: data x axial x branch
collectives  differentiable, asynchronous collectives
reducer      sums of gradients during the backward pass (exchange, compress)
team         the processes of a run (process, messages)
heartbeat    ends a run that would hang (waits)
"""
