"""Train: the loop and what is around it.

train.py: the loop; config.py, examples.py (which come next), ledger.py (which were used), results.py (the log),
validation.py, validate.py (from outside), watching.py (progress), ranks.py (several processes),
planning.py (before it runs), passes.py (where in a forward pass a model is), card.py (of the parameters).
"""
