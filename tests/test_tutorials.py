"""The tutorials run: every command, file and Python block of a page, in their order, in one empty folder.

What a page does with many steps and proteins is done with few here; `slow` runs every page as it is.
"""

import re
import shlex
from pathlib import Path

import pytest

from tests.test_cli import run

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"
PAGES = sorted(FOLDER.glob("*.md"))
FEW = {  # what a page says -> what is enough to see that it runs
    "--proteins 60": "--proteins 6",
    "--proteins 20": "--proteins 6",
    "--set train.steps=400": "--set train.steps=2",
    "--set train.steps=160": "--set train.steps=3",
    "steps = 120": "steps = 2",
    "validation_examples=4": "validation_examples=1",
    "validation_examples = 4": "validation_examples = 1",
}
SMALLER = ("model.c_m=8", "model.c_z=8", "model.c_s=8", "model.evoformer.blocks=1", "model.structure.layers=1")


def parts(text: str) -> list[tuple[str, str, str]]:
    """The blocks of a page: language, what the sentence before it calls the file, content."""
    found = re.findall(r"([^\n]*)\n\n?```(bash|toml|python)\n(.*?)^```", text, flags=re.M | re.S)
    return [(language, "".join(re.findall(r"as `([\w.]+)`", before)), content) for before, language, content in found]


def follow(text: str, capsys: pytest.CaptureFixture[str], extra: tuple[str, ...] = ()) -> str:
    """Do all that a page says, in the current folder; return what was printed."""
    said = []
    names: dict[str, object] = {"__name__": "__main__"}
    for language, name, content in parts(text):
        if language == "toml":
            assert name, content
            Path(name).write_text(content)
        elif language == "python":
            exec(compile(content, "tutorial", "exec"), names)
            said.append(capsys.readouterr().out)
        else:
            for line in content.replace("\\\n", " ").splitlines():
                program, *arguments = shlex.split(line, comments=True)
                assert program == "warpfold", line
                changes = [word for change in extra for word in ("--set", change)] if arguments[0] == "train" else []
                code, out, err = run(capsys, *arguments, *changes)
                assert code == 0, f"{line}: {err}"
                said.append(out + err)
    return "\n".join(said)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_runs_on_a_small_scale(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    for much, little in FEW.items():
        text = text.replace(much, little)
    assert follow(text, capsys, SMALLER)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_runs_as_it_is(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    said = follow(text, capsys)
    for block in re.findall(r"^```text\n(.*?)^```", text, flags=re.M | re.S):
        assert block.strip() in said


def test_what_is_made_small_is_on_the_pages() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert not [much for much in FEW if much not in text]
