"""Predict structures.

request.py: the options of a run.  predict.py: a run of a request.  Inputs: queries.py (files and Python), params.py,
templates.py.  Folding: predictor.py (one query, from Python), folding.py (many), read_out.py (from the model's outputs
to a prediction).  Outputs: outputs.py (files and summary of one prediction), folder.py (the output folder and its
records), pages.py (the report), notices.py (warnings), sanity.py (breaks, clashes).
published.py: the download of published parameters.
"""
