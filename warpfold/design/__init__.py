"""Design of sequences by the gradient of a model: losses, settings, many starts from soft to hard, a page of them.

losses.py has what a design is judged by, settings.py the TOML of chains, losses and stages, run.py the starts, in a
folder where a stopped run continues, page.py its report.  The gradient is `Predictor.gradient`.
"""
