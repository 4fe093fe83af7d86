"""Predict structures: what goes in, what folds it, and what comes out.

predict.py: a run, and who folds it.  Inputs: queries.py (files and Python), fold_options.py, params.py, templates.py.
Folding: predictor.py (Python), folding.py (many), read_out.py (what is kept).  Outputs: outputs.py (files and summary
of one prediction), folder.py (of many, and the journal), pages.py (the report), notices.py (warnings), sanity.py
(breaks, clashes).  published.py: parameters that others have published, and how they come.
"""
