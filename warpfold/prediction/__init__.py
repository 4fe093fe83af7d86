"""Predict structures: what goes in, what folds it, and what comes out.

predict.py: a run.  Inputs: queries.py (files and Python), fold_options.py, params.py, templates.py.  Folding:
predictor.py (Python), folding.py (many), share.py (several processes), read_out.py (what is kept).  Outputs: outputs.py
(files of one prediction), entries.py (what the summary has of it), folder.py and journal.py (of many), pages.py (the
report), notices.py (warnings), sanity.py (breaks, clashes).
"""
