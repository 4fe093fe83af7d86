"""What any training loop needs, whatever it trains: nothing here knows what a model computes or what an example is.

optim       the optimizer on flat buffers: clipping, the mean over examples and ranks, averaged weights, schedule
rules       update rules, a class each: Adam, LAMB, LARS
loss_scale  dynamic loss scaling, for gradients in fp16
comm_hook   compressed gradients in torch's DistributedDataParallel
ready       batches of any dataset, made ahead (ready_maker, ready_record)
resume      checkpoints of what any loop has: models, optimizers, loaders, random numbers (nested, randomness)
checkpoint  a run's folder: settings, checkpoints (step_folders), log; whole after a `kill -9` at any moment
loop        the surroundings of a loop: its timer, its log, its stop signals
watch       who is told of a run: TensorBoard, Weights & Biases, a CSV file, or whatever a user gives
"""
