"""Evaluate folders of predictions against their structures: `warpfold evaluate`.

evaluate.py is the entry point. layouts.py finds the predictions of supported programs, and truths.py their reference
structures. measure.py scores one prediction, confidence.py compares pLDDT and PAE with the measured errors, and
tables.py computes means, groups and comparisons. parts.py shares results between the tasks of a job array. page.py
builds the report.
"""
