"""Test the site of docs/: every page is in the navigation, nothing is loaded from other hosts, and the site builds."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LIST = re.compile(r"\s*([*-]|\d+\.) ")


def site_module(name: str) -> ModuleType:
    """Import a module of docs/site, which is not on Python's path."""
    spec = importlib.util.spec_from_file_location(f"site_{name}", DOCS / "site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    named = re.findall(r"- (?:[^\n]*: )?([\w/.-]+\.md)$", navigation, re.M)
    made = {
        "reference/commands.md",
        "reference/python.md",
        "reference/settings.md",
        "reference/messages.md",
        "notebook.md",
        "design_notebook.md",
    }
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(named) == sorted(pages | made), (
        "put a new page into `nav` of mkdocs.yml, where a newcomer looks for it"
    )


def test_lists_stand_apart() -> None:
    """GitHub renders a list directly below a paragraph as a list, but the site renders it as text."""
    below = []
    for page in [*DOCS.rglob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for paragraph in re.split(r"\n\s*\n", text):
            lines = paragraph.strip("\n").splitlines()
            if lines and not LIST.match(lines[0]) and not lines[0].startswith("#"):
                below += [f"{page.name}: {line}" for line in lines if re.match(r"[*-] \w", line)]
    assert not below


def test_nothing_that_is_said_to_run_is_elsewhere() -> None:
    """The repository contains every file that the pages name."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    assert not [page.name for page in pages if "../shared" in page.read_text(encoding="utf-8")]


def test_requirements_are_pinned() -> None:
    lines = (DOCS / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert not [
        line for line in lines if line and not line.startswith("#") and not re.fullmatch(r"[\w.-]+==[\w.]+", line)
    ]


@pytest.mark.parametrize(
    ("text", "kind", "found"),
    [
        ('<script src="https://cdn.example/a.js"></script>', ".html", ["https://cdn.example/a.js"]),
        ("<script src=//cdn.example/a.js></script>", ".html", ["//cdn.example/a.js"]),
        ('<link rel="preconnect" href="https://fonts.example">', ".html", ["https://fonts.example"]),
        ('<img srcset="a.png 1x, https://cdn.example/b.png 2x">', ".html", ["https://cdn.example/b.png"]),
        ("<style>@import 'https://fonts.example/x.css';</style>", ".html", ["https://fonts.example/x.css"]),
        ("a { background: url( 'http://cdn.example/x.png' ) }", ".css", ["http://cdn.example/x.png"]),
        ('<svg xmlns="http://www.w3.org/2000/svg"><image href="https://cdn.example/x.png"/></svg>', ".svg",
         ["https://cdn.example/x.png"]),
        ('<a href="https://example.org">read</a><link rel="canonical" href="https://example.org">', ".html", []),
        ('<script src="assets/a.js"></script><code>https://example.org/a.js</code>', ".html", []),
    ],
)  # fmt: skip
def test_what_is_loaded_from_elsewhere_is_found(text: str, kind: str, found: list[str]) -> None:
    assert site_module("external").loaded(text, kind) == found


def test_every_setting_is_on_its_page() -> None:
    from warpfold import settings
    from warpfold.training.config import RunConfig

    page = site_module("reference").settings_reference()
    keys = [key for key in settings.plain(RunConfig()) if f"\n## {key}\n" not in page]
    assert not keys
    assert "| `learning_rate` | `float` | `0.001` |" in page


def test_the_benchmarks_are_those_of_the_results() -> None:
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert page == site_module("benchmarks").page(), "run: python docs/site/benchmarks.py"


def test_messages_of_bad_input_are_on_their_page() -> None:
    page = site_module("reference").messages()
    assert page.count("\n* `") > 500
    for path in (ROOT / "warpfold").rglob("*.py"):
        if re.search(r'raise UserError\(f?"', path.read_text(encoding="utf-8")):
            assert f"\n## {path.relative_to(ROOT / 'warpfold').as_posix()}\n" in page


def test_every_command_and_option_is_on_its_page() -> None:
    from typer.main import get_command

    from warpfold.cli import app

    page = site_module("reference").commands()
    prose = "".join(path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md"))
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        assert f"\n## {name}" in page
        assert f"warpfold {name}" in prose, f"no page uses `warpfold {name}`"
        missing = [p.opts for p in command.params if not p.hidden and p.name != "help" and f"`{p.opts[0]}`" not in page]
        assert not [names for names in missing if names[0].startswith("-")]


@pytest.mark.parametrize(
    ("name", "title", "code", "shown", "pictures"),
    [
        ("fold", "Fold a protein", "results = predictor.fold_many(", "<Prediction example: ", ["Structure and PAE"]),
        (
            "design",
            "Design a protein",
            "import matplotlib",
            "<Gradient: ",
            ["Losses of each step", "Structure and PAE"],
        ),
    ],
)
def test_a_notebook_is_a_page(name: str, title: str, code: str, shown: str, pictures: list[str]) -> None:
    page = site_module("reference").notebook(f"{name}.ipynb")
    assert page.startswith(f"# {title}\n")
    assert f"({name}.ipynb)" in page  # link for downloading
    assert f"```python\n{code}" in page
    assert f"```text\n{shown}" in page
    assert re.findall(r'<img alt="([^"]*)" src="data:image/png;base64,iVBOR', page) == pictures
    assert page.count("```") % 2 == 0


def mkdocs() -> list[str]:
    """Return the mkdocs command of `./dev docs` or of this environment, or an empty list if there is none."""
    made = ROOT / ".docs" / "bin" / "python"
    if made.exists():
        return [str(made), "-m", "mkdocs"]
    return [sys.executable, "-m", "mkdocs"] if importlib.util.find_spec("material") else []


@pytest.mark.skipif(not mkdocs(), reason="mkdocs-material is not installed: ./dev docs makes an environment with it")
def test_the_site_is_built(tmp_path: Path) -> None:
    done = subprocess.run(
        [*mkdocs(), "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "iframe-worker" not in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    # Pages that are opened from disk need this file for their search.
    assert (tmp_path / "site" / "search" / "search_index.js").exists()
    # Links to notebooks lead to the pages that are generated from them.
    for page, notebook in (("python", "notebook"), ("design", "design_notebook")):
        text = (tmp_path / "site" / "howto" / f"{page}.html").read_text(encoding="utf-8")
        assert f'href="../{notebook}.html"' in text
    pages = (tmp_path / "site" / "reference" / "python.html").read_text(encoding="utf-8")
    assert "MSA" in pages or "alignment" in pages  # text of docstrings
