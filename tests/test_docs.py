"""The pages keep their word: Python examples run or import what exists; commands, options, files and links exist."""

import ast
import importlib
import importlib.util
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from warpfold import cli

ROOT = Path(__file__).parents[1]
OFFICIAL = {"data/pipeline.py", "data/mmcif_parsing.py", "data/templates.py"}  # of DeepMind's code
FOREIGN = {"transformers", "boltz", "openfold3"}  # whose users a page is for; their own tests need them
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


# What a page says of the command line or of files stands between backticks, or in a block.


def quoted(page: Path) -> list[str]:
    """Return what stands between backticks in a page's text, blocks of code apart."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]


def wrong_options(line: str) -> set[str]:
    """Return the options of a `warpfold ...` line that its command lacks, or the command that there is not."""
    words = line.split("#")[0].partition(" -- ")[0].split()  # behind it stands another command
    command = cli.typer.main.get_command(cli.app).commands.get(words[1])  # type: ignore[attr-defined]
    if command is None:
        return {words[1]}
    command = getattr(command, "commands", {}).get(words[2] if len(words) > 2 else "", command)  # a group's
    known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
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
            # What the page itself writes apart, and packages whose own tests run what is of them.
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
            # run/metrics.jsonl and its like are files of somebody's run.
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
