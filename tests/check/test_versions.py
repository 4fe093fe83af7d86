"""Versions newer than the tested ones lead to one message, and the tested versions are defined in one place."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from warpfold.check.versions import TESTED, describe_versions, newer_than_tested

ROOT = Path(__file__).parents[2]
NEXT = {name: re.sub(r"\d+$", lambda minor: str(int(minor[0]) + 1), last) for name, (_, last) in TESTED.items()}


def use(monkeypatch: pytest.MonkeyPatch, torch: str, python: str) -> None:
    monkeypatch.setattr("warpfold.check.versions.version", lambda name: torch)
    monkeypatch.setattr("platform.python_version", lambda: python)


@pytest.mark.parametrize(
    ("torch", "python", "newer"),
    [
        ("2.11.0", "3.11.7", []),
        ("2.15.3+cu130", "3.14.8", []),
        # Versions are compared as numbers, and not as text. Pip refuses these.
        ("2.9.1", "3.9.1", []),
        (f"{NEXT['torch']}.0a0+git1234", "3.14.0", ["torch"]),
        ("3.0.0", f"{NEXT['Python']}.0rc1", ["torch", "Python"]),
    ],
)
def test_newer_versions_are_named(monkeypatch, torch: str, python: str, newer: list[str]) -> None:
    use(monkeypatch, torch, python)
    said = newer_than_tested()
    named = [name for name, found in (("torch", torch), ("Python", python)) if said and f"{name} {found}" in said]
    assert named == newer
    assert describe_versions().startswith("Newer than tested: " if newer else "Tested: ")
    assert said is None or "doctor --kernels" in said


# A separate process with a different version number of torch prints the message for two uses of Python, and for a
# command.
CODE = """
import sys, warnings
import warpfold.check.versions
warpfold.check.versions.version = lambda name: "9.0.0"
import warpfold
warpfold.UserError
sys.stderr.write("no torch yet\\n")
warpfold.load, warpfold.accelerate
sys.stderr.write("command\\n")
from warpfold.cli import main
main(["params", "--help"] if sys.argv[1] == "help" else ["params", "nothing.npz"])
"""


@pytest.mark.parametrize(("what", "lines"), [("help", 0), ("file", 1)])
def test_they_are_said_once_where_something_is_computed(what: str, lines: int) -> None:
    ran = subprocess.run([sys.executable, "-c", CODE, what], cwd=ROOT, capture_output=True, text=True, check=False)
    before, _, rest = ran.stderr.partition("no torch yet\n")
    python, _, command = rest.partition("command\n")
    assert [text.count("newer than tested: torch 9.0.0") for text in (before, python, command)] == [0, 1, lines]
    several = subprocess.run(
        [sys.executable, "-c", CODE, what],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
    )
    assert "newer than tested" not in several.stderr.partition("command\n")[2]


def test_what_is_tested_stands_in_one_place() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>={TESTED["torch"][0]}"' in project
    assert f'requires-python = ">={TESTED["Python"][0]}"' in project
    install = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:4] for line in install.splitlines() if re.match(r"\| 3\.\d+", line)]
    for name, found in (("Python", [row[0].strip() for row in rows]), ("torch", [row[1].strip() for row in rows])):
        for end in TESTED[name]:
            assert any(one == end or one.startswith(f"{end}.") for one in found), (name, end)
