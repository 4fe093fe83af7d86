"""Run notebooks in Jupyter and store what their cells show, after `./dev demo`, whose parameters they take.

    .venv/bin/pip install nbclient ipykernel
    .venv/bin/python docs/site/run_notebook.py docs/*.ipynb

Pages in frames are left out: each holds the whole viewer, and where notebooks are only shown no frame is.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

for path in map(Path, sys.argv[1:]):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": path.parent}}).execute()
    for cell in notebook.cells:
        cell.metadata = {}  # when it ran
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop("text/html", None)
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, path)
