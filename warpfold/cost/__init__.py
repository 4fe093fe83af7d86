"""Memory and time of jobs, estimated before they run, and the choice of a plan.

example         random examples, blocks and models of any size; `Job`, what runs
fake            one rank of many, alone and without computing
watch           the position of a run in a model, and the owners of its tensors
recorder        allocations, operations and collectives of code on meta tensors
record          the record of one rank under a plan
launches        kernel launches of a GPU
rates           speed of a device from its data sheet, and the cost of operations
measured_rates  speed of this machine
links           connections between devices
machine         the devices for which a plan is made
replay          the time of a record
memory          the memory of a plan, estimated and measured
planner         the choice of the fastest plan that fits
report          the description of the choice
"""
