"""Run notebooks in Jupyter and store their output.  Run `./dev demo` first, because they use its parameters.

    .venv/bin/pip install nbclient ipykernel
    .venv/bin/python docs/site/run_notebook.py docs/*.ipynb

HTML output is removed: each frame contains the whole viewer, and static views of notebooks show no frames.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

for path in map(Path, sys.argv[1:]):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": path.parent}}).execute()
    for cell in notebook.cells:
        # The metadata contain execution times.
        cell.metadata = {}
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop("text/html", None)
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, path)
