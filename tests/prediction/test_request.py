"""Test the request of `predict`: help text, Python signature, and validation before torch is imported."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import warpfold
from tests.messages.table import CASES
from warpfold import cli
from warpfold.cli.predict import ESSENTIAL

ONE = "MKTAYIAKQRQISFVKSH"


def help_of(option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    with pytest.raises(SystemExit):
        cli.main(["predict", option])
    return capsys.readouterr().out.splitlines()


def test_help_is_short_and_help_all_names_every_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command: Any = typer.main.get_command(cli.app).commands["predict"]  # type: ignore[attr-defined]
    options = {one.name: one.opts[0] for one in command.params if one.param_type_name == "option"}
    assert set(ESSENTIAL) < set(options)
    short, full = (help_of(option, monkeypatch, capsys) for option in ("--help", "--help-all"))
    assert len(ESSENTIAL) <= 13
    assert len(short) < 100
    for lines, names in ((short, [options[name] for name in ESSENTIAL]), (full, list(options.values()))):
        assert max(map(len, lines)) <= 80
        words = " ".join(lines).replace(",", " ").split()
        assert not set(names) - set(words)
        assert not [word for word in words if word.startswith("--") and word.endswith("…")]
    assert "--save-recycles" not in " ".join(short).split("Example:")[0]


RUN = """
import shlex, sys
from warpfold import cli
for line in {lines}:
    try: cli.main(shlex.split(line)[1:])
    except SystemExit as end: print("torch" in sys.modules, end.code)
"""


def test_a_request_is_checked_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "p.npz").write_bytes(b"parameters")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("mine")
    # The messages are tested with their tables.
    lines = [case.call for case in CASES if "--params p.npz" in case.call]
    code = RUN.format(lines=lines)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert len(lines) > 15
    assert done.stdout.splitlines() == ["False 2"] * len(lines), done.stderr


def test_a_cluster_without_dask_leaves_nothing(
    tmp_path: Path, tiny_params: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.setitem(sys.modules, "distributed.scheduler", None)
    with pytest.raises(warpfold.UserError, match=r"^cluster tcp://host:1: needs Dask"):
        warpfold.predict(ONE, tiny_params, tmp_path / "out", device="cpu", cluster="tcp://host:1")
    assert not list(tmp_path.iterdir())


def test_python_checks_a_request_before_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys, warpfold\n"
        f"try: warpfold.predict({ONE!r}, 'none.npz', 'out', device='cpu')\n"
        "except warpfold.UserError as error: print(error, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "none.npz: no such file. Check the path. False\n"
