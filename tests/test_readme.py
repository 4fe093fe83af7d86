"""The README keeps its word: its Python example runs, its commands and options exist, its links lead somewhere."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from warpfold import cli

ROOT = Path(__file__).parents[1]
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_exist(page: Path) -> None:
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = line.split("#")[0].split()
            if words[:1] == ["warpfold"] and len(words) > 1 and not words[1].startswith("-"):
                command = cli.typer.main.get_command(cli.app).commands[words[1]]  # type: ignore[attr-defined]
                command = getattr(command, "commands", {}).get(words[2] if len(words) > 2 else "", command)  # a group's
                known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
                assert {word for word in words if word.startswith("--")} <= known, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"
