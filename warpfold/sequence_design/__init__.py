"""Design sequences by the gradient of a model, from many starts whose sequences go from soft to hard.

losses.py defines the losses, settings.py the TOML file (chains, losses, stages), run.py runs the starts in a folder in
which a stopped run continues, and page.py writes the report. `Predictor.gradient` computes the gradient.
"""
