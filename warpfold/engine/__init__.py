"""What any training loop needs, whatever it trains: nothing here knows what a model computes or what an example is.

optim       the optimizer on flat buffers (packed): clipping, the mean over examples and ranks, averages, loss scaling,
            and its update rules, a class each: Adam, LAMB, LARS
comm_hook   compressed gradients in torch's DistributedDataParallel
ready       batches of any dataset, made ahead (ready_maker)
resume      checkpoints of what any loop has: models, optimizers, loaders, random numbers (nested)
checkpoint  a run's folder: settings, checkpoints, log; whole after a `kill -9` at any moment
loop        the surroundings of a loop: its timer, its log, its stop signals
watch       who is told of a run: TensorBoard, Weights & Biases, or whatever a user gives
"""
