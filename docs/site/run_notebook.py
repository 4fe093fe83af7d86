"""Run docs/fold.ipynb in Jupyter and store what its cells show, after `./dev demo`, whose parameters it takes.

    .venv/bin/pip install nbclient ipykernel
    .venv/bin/python docs/site/run_notebook.py

Pages in frames are left out: each holds the whole viewer, and where notebooks are only shown no frame is.
"""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

PATH = Path(__file__).parents[1] / "fold.ipynb"

notebook = nbformat.read(PATH, as_version=4)
NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": PATH.parent}}).execute()
for cell in notebook.cells:
    cell.metadata = {}  # when it ran
    for output in cell.get("outputs", ()):
        output.get("data", {}).pop("text/html", None)
notebook.metadata.language_info = {"name": "python"}
nbformat.write(notebook, PATH)
