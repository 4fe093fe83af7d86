"""Parts of training loops: some for any model, some for WarpFold's own training.

For any PyTorch loop:

optim       the optimizer on flat buffers (packed): clipping, the mean over examples and ranks, averages, loss scaling,
            and its update rules Adam, LAMB and LARS
comm_hook   compressed gradients in torch's DistributedDataParallel
ready       a loader that makes the batches of any dataset ahead (epochs, ready_maker)
resume      checkpoints of models, optimizers, loaders and random numbers (nested)

For WarpFold's training:

learn       forward passes, losses and backward pass of a batch
trainable   trained parameters and adapters
trunk       cached outputs of a frozen trunk
gradient    gradients by a sequence, for design
checkpoint  a run's folder: settings, checkpoints, log; consistent after a `kill -9`
loop        the step timer, the log and the stop signals
watch       watchers of a run: TensorBoard, Weights & Biases, and those of users
"""
