"""Evaluate folders of predictions against their structures: `warpfold evaluate`.

layouts.py finds predictions, whoever wrote them, and truths.py what they are compared with; measure.py scores one, with
confidence.py for pLDDT and PAE; parts.py keeps what tasks of a job array score; tables.py has means, groups
and comparisons; page.py draws, evaluate.py does all of it.
"""
