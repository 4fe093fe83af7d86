"""Training of AlphaFold models.

train.py         the loop, from setup to the model card
config.py        the settings of a run
examples.py      held-out examples, used examples, and their loader
ledger.py        the record of used and unusable examples
first_weights.py parameters and moments to start from
frozen_trunk.py  setup of fine-tuning behind a frozen trunk
validation.py    validations during training
validate.py      validations by a separate process
replay.py        recomputation of steps, to find wrong ones
planning.py      plans for the memory that is free
processes.py     several processes on one machine
passes.py        progress of a forward pass
terminal.py      progress of a run in a terminal
card.py          the card of trained parameters
"""
