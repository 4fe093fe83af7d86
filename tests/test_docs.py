"""Check the pages: Python examples run, and imports, commands, options, files and links exist."""

import ast
import html
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from pprint import pformat
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from warpfold import cli
from warpfold.cli.predict import ALIASES
from warpfold.prediction.outputs import Prediction

ROOT = Path(__file__).parents[1]
# Files of DeepMind's code.
OFFICIAL = {"data/pipeline.py", "data/mmcif_parsing.py", "data/templates.py"}
# Packages whose users have a page. Their tests run in separate environments.
FOREIGN = {"transformers", "boltz", "openfold3"}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def test_python_example_runs(tmp_path: Path, tiny_params: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = blocks(ROOT / "README.md", "python")
    assert len(example.strip().splitlines()) <= 10
    shutil.copy(tiny_params, tmp_path / "params.safetensors")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    prediction = names["prediction"]
    n = len(prediction.sequence)  # type: ignore[attr-defined]
    for kind, shape in (("positions", (n, 37, 3)), ("plddt", (n,)), ("pae", (n, n)), ("single", (n, 20))):
        array = getattr(prediction, kind)
        assert array.shape == shape
        assert np.isfinite(array).all()
    assert list(tmp_path.glob("*/*.cif"))


# Commands and file names are in backticks or in code blocks.


def quoted(page: Path) -> list[str]:
    """Return the inline code of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]


def wrong_options(line: str) -> set[str]:
    """Return the unknown options, or the unknown command, of a `warpfold ...` line."""
    # Another command follows `--`.
    words = line.split("#")[0].partition(" -- ")[0].split()
    command = cli.typer.main.get_command(cli.app).commands.get(words[1])  # type: ignore[attr-defined]
    if command is None:
        return {words[1]}
    # A group has subcommands.
    command = getattr(command, "commands", {}).get(words[2] if len(words) > 2 else "", command)
    known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
    known |= set(ALIASES) if words[1] == "predict" else set()
    return {word for word in words if word.startswith("--")} - known


def test_commands_and_options_exist() -> None:
    wrong = []
    for page in PAGES:
        lines = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
        asked = (line for line in (*lines, *quoted(page)) if re.match(r"warpfold +[a-z]", line))
        wrong += [f"{page.name}: {line}" for line in asked if wrong_options(line)]
    assert not wrong


def test_imports_exist() -> None:
    absent = {name for name in FOREIGN if importlib.util.find_spec(name) is None}
    wrong = []
    for page in PAGES:
        files = {block[2:].partition(".py\n")[0] for block in blocks(page, "python") if block.startswith("# ")}
        nodes = [node for block in blocks(page, "python") for node in ast.walk(ast.parse(block))]
        for node in nodes:
            # Skip files that the page itself writes, and packages that are not installed.
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] not in files | absent:
                module = importlib.import_module(str(node.module))
                names = (alias.name for alias in node.names)
                wrong += [f"{page.name}: {node.module}.{name}" for name in names if not hasattr(module, name)]
    assert not wrong


def test_files_exist() -> None:
    """Check the paths on a page, from the repository's root or from the package: `tests/ranks.py`, `ops/cpu`."""
    outside = {"warpfold", "tests", "benchmarks", "docs", "settings"}
    rooms = {path.name for path in (ROOT / "warpfold").iterdir() if path.is_dir()}
    wrong = []
    for page in PAGES:
        for code in quoted(page):
            room, *rest = code.split("/")
            if not rest or not re.fullmatch(r"[\w./*-]+", code):
                continue
            # Paths like run/metrics.jsonl are files of a user's run.
            ours = room in rooms and (code.endswith(".py") or (room != "run" and "." not in code))
            there = ROOT if room in outside else ROOT / "warpfold"
            if (room in outside or (ours and code not in OFFICIAL)) and not list(there.glob(code.rstrip("/"))):
                wrong.append(f"{page.name}: {code}")
    assert not wrong


def test_links_lead_somewhere() -> None:
    wrong = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)\s]+)?\)", page.read_text(encoding="utf-8")):
            there = page.parent / target if target else page
            if "://" in target:
                continue
            headings = re.findall(r"^#+ (.*)", there.read_text(encoding="utf-8"), re.M) if anchor else []
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            if not there.exists() or (anchor and anchor[1:] not in anchors):
                wrong.append(f"{page.name}: {target}{anchor}")
    assert not wrong


# ---- pages that run


@pytest.mark.parametrize("page", ["python", "kit", "evoformer"])
def test_every_block_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the blocks in the order of the page, in one process.

    A block that begins with `# NAME.py` becomes a file of that name, which later blocks import.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(blocks(ROOT / "docs" / "howto" / f"{page}.md", "python")):
        if name := re.match(r"# (\w+\.py)\n", block):
            assert not (tmp_path / name[1]).exists(), name[1]
            (tmp_path / name[1]).write_text(block, encoding="utf-8")
        else:
            exec(compile(block, f"{page}.md, block {number}", "exec"), names)
    assert page != "python" or (tmp_path / "folded" / "query.cif").exists()


# Any free port: other tests may use torchrun's default port at the same time.
RENDEZVOUS = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")


def test_the_evoformer_page_runs_on_two_ranks(tmp_path: Path) -> None:
    """The script of the page compares each rank's shard with the whole trunk."""
    page = ROOT / "docs" / "howto" / "evoformer.md"
    (script,) = (block for block in blocks(page, "python") if block.startswith("# two_ranks.py\n"))
    (command,) = (line for block in blocks(page, "bash") for line in block.splitlines())
    (tmp_path / "two_ranks.py").write_text(script, encoding="utf-8")
    program, *arguments = command.split()
    assert program == "torchrun"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *RENDEZVOUS, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # The ranks share stdout, so that their lines may be joined.
    lines = sorted(re.findall(r"rank \d: rows \d+ of \d+", done.stdout))
    assert lines == ["rank 0: rows 11 of 21", "rank 1: rows 10 of 21"]


ACCELERATED = blocks(ROOT / "docs" / "howto" / "accelerate.md", "python")


def packages(block: str) -> set[str]:
    """Return the packages that a block imports."""
    nodes = list(ast.walk(ast.parse(block)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name.partition(".")[0] for name in plain | {str(n.module) for n in nodes if isinstance(n, ast.ImportFrom)}}


@pytest.mark.parametrize(
    "block", ACCELERATED, ids=lambda block: "-".join(sorted(packages(block) - {"torch", "warpfold"}))
)
def test_blocks_of_accelerate_run_each_by_itself(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each block of the page separately, and skip it if its package is not installed."""
    monkeypatch.setattr("warpfold.adapt.accelerate.keep_memory", lambda: None)
    if missing := [name for name in sorted(packages(block)) if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{missing[0]} is not installed: ./dev adapters")
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(block, "accelerate.md", "exec"), names)
    assert len(names) > 2


def test_there_is_a_block_for_every_kind_of_user() -> None:
    assert {"transformers", "boltz", "openfold3"} <= set().union(*map(packages, ACCELERATED))
    assert sum(packages(block) <= {"torch", "warpfold"} for block in ACCELERATED) == 3


def run_cell(source: str, name: str, names: dict[str, Any]) -> Any:
    """Run a cell as a notebook does.  Returns the value of its last line if that line is an expression."""
    tree, last = ast.parse(source), None
    if isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
    exec(compile(tree, name, "exec"), names)
    return None if last is None else eval(compile(last, name, "eval"), names)


def run_notebook(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], dict[str, Any]]:
    """Run a notebook in a folder, and compare the output of its cells with the stored output, apart from numbers.

    Returns the values that the cells show, and the notebook's variables.
    """
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    real_run = subprocess.run

    def run_without_pip(command: Any, *arguments: Any, **options: Any) -> Any:
        assert "pip" not in command, "WarpFold is installed already"
        return real_run(command, *arguments, **options)

    monkeypatch.setattr(subprocess, "run", run_without_pip)
    names: dict[str, Any] = {"__name__": "__main__"}
    sources = ["".join(cell["source"]) for cell in cells]
    shown = [run_cell(source, f"{path.name}, cell {number}", names) for number, source in enumerate(sources)]
    stored = [{k: data for output in cell["outputs"] for k, data in output.get("data", {}).items()} for cell in cells]
    said = [told("".join(data.get("text/plain", "None"))) for data in stored]
    assert said == [told(pformat(one, sort_dicts=False)) for one in shown], "run docs/site/run_notebook.py"
    pictures = [hasattr(one, "picture") or isinstance(one, Figure) for one in shown]
    assert ["image/png" in data for data in stored] == pictures
    return shown, names


def told(text: str) -> str:
    """Replace numbers and folders in the output of a cell."""
    return re.sub(r"\d+", "N", re.sub(r"[^\s']*/", "", text))


def test_the_notebook_of_folding_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, names = run_notebook(ROOT / "docs" / "fold.ipynb", tmp_path, monkeypatch)
    folded = next(value for value in shown if hasattr(value, "_repr_html_"))
    page = folded._repr_html_()
    assert page.startswith("<iframe srcdoc=")
    assert "3Dmol" in page
    assert "predicted aligned error" in page.lower()
    assert [bool(result.prediction) for result in shown[-1]] == [True, True, False]
    assert (names["folder"] / "example.cif").exists()
    assert folded._repr_png_().startswith(b"\x89PNG")


def test_the_notebook_of_design_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    _, names = run_notebook(ROOT / "docs" / "design.ipynb", tmp_path, monkeypatch)
    assert [row["name"] for row in names["rows"]] == [*names["designs"], "random 1", "random 2", "random 3"]
    assert all(len(values) == names["settings"].steps for values in names["curves"].values())
    assert names["fasta"].read_text().splitlines()[1] == names["designs"]["first"]


@pytest.mark.parametrize("name", ["fold", "design"])
def test_a_notebook_is_stored_with_what_it_shows(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.ipynb").read_text(encoding="utf-8")
    assert len(text) < 300_000
    assert not re.search(r'[\s"\'(<]/(home|root|tmp|work|Users)/', text)
    counts = [cell["execution_count"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))  # run once, from top to bottom
    assert "iframe" not in text


def test_a_page_in_a_frame_cannot_leave_it() -> None:
    """The page escapes names given by users, and the frame escapes the page."""
    name, three = 'x"><script>alert(1)</script>', np.full(3, 50.0)
    made = Prediction(name, "GGG", np.zeros((3, 37, 3)), np.zeros((3, 37)), three, None, None, None)
    inner = made._repr_html_().removeprefix('<iframe srcdoc="')
    page, _, rest = inner.partition('"')
    assert rest.startswith(' title="')
    assert "<script>alert" not in html.unescape(page)
    assert "&lt;script&gt;alert" in html.unescape(page)


def test_pages_that_the_package_names_exist() -> None:
    """Docstrings and messages name pages of this repository, except for three pages of other projects."""
    generated = {"commands", "python", "settings", "messages"}
    foreign = {"docs/source/OpenFold_Parameters.md", "docs/prediction.md", "docs/input.md"}
    wrong = []
    for path in (ROOT / "warpfold").rglob("*.py"):
        for match in re.finditer(r"(?<![\w/.])docs/[\w/]+\.md", path.read_text(encoding="utf-8")):
            page = ROOT / match[0]
            is_generated = page.parent.name == "reference" and page.stem in generated
            if not page.is_file() and not is_generated and match[0] not in foreign:
                wrong.append(f"{path.relative_to(ROOT)}: {match[0]}")
    assert not wrong
