"""Predict structures: what goes in, what folds it, and what comes out.

predict.py: a run.  Inputs: queries.py (files), fold_input.py (Python), fold_options.py, params.py, templates.py,
servers.py.  Folding: predictor.py, fold_many.py (Python), folding.py, share.py (several processes); read_out.py: what
is kept.  Outputs: outputs.py (files of one prediction), folder.py and journal.py (of many), ranking.py, interfaces.py,
sanity.py (breaks, clashes), notebook.py.
"""
