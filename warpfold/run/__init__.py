"""What a user asks for: train, predict, relax, score, a demo; and the pages and files that come of it.

train.py: the loop; config.py, examples.py (which come next), ledger.py (which were used), results.py (the log),
validation.py (when, and for how long), spare.py (by processes that do not train), watching.py (what it shows), ranks.py
(several processes).  curves.py and curves_page.py: what `warpfold watch` draws of its log.  passes.py: where
in a forward pass a model is.
commands.py: what Python and the command line both call; arguments.py: what is wrong with what Python gives.
predict.py: a run.  What goes in: queries.py (files), fold_input.py (Python), fold_options.py, params.py,
predict_templates.py.  What folds: predictor.py, many of them fold_many.py (Python); read_out.py: what is kept.
params_file.py: what a file of parameters is; first_weights.py: `--init`.  notebook.py: how a prediction shows itself.
What comes out: outputs.py (files of one prediction), ranking.py, interfaces.py (where predicted
chains meet), sanity.py (breaks, clashes).
relax.py: in memory; relax_files.py: of files and folders; amber.py: the force field, all that knows OpenMM.
score.py: two structures; metrics.py: lDDT, TM, GDT; score_complex.py: interfaces, by dockq.py, under the mapping that
chain_mapping.py finds.
report.py: the page, from report.html; figures.py: what is drawn on it; demo.py and demo_report.py: the demo's.
"""
