"""Test the request of `predict`: help text, Python signature, and validation before torch is imported."""

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import warpfold
from warpfold import cli
from warpfold.arguments import declaration
from warpfold.cli.predict import ESSENTIAL
from warpfold.prediction.request import Request

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


def test_python_writes_out_what_a_request_declares() -> None:
    """`warpfold.predict` has the types and defaults of `Request`; its docstring has the help text of each option."""
    arguments = dict(inspect.signature(warpfold.predict).parameters)
    assert {"progress", "team"} == arguments.keys() - {field.name for field in dataclasses.fields(Request)}
    hints = inspect.get_annotations(inspect.unwrap(warpfold.predict))
    for field in dataclasses.fields(Request):
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        assert arguments[field.name].default == default, field.name
        assert (arguments[field.name].kind is inspect.Parameter.KEYWORD_ONLY) == field.kw_only, field.name
        kind, option = declaration(field.type)
        assert hints[field.name] == kind, field.name
        assert option is not None
        assert f"\n    {field.name}: {option.help}" in str(warpfold.predict.__doc__)


# Wrong arguments and the expected messages. {} stands for a folder with a.a3m and taken/file.
WRONG = {
    "query": (["none.fasta", "--params", "p.npz", "-o", "out"], "none.fasta: no such file"),
    "long text": (["no sequence " * 30, "--params", "p.npz", "-o", "out"], "no such file; check the path"),
    "params": ([ONE, "--params", "none.npz", "-o", "out"], "none.npz: no such file"),
    "msa": ([ONE, "--params", "p.npz", "-o", "out", "--msa", "none.a3m"], "none.a3m: no such file"),
    "template": ([ONE, "--params", "p.npz", "-o", "out", "--template", "none.cif:A"], "none.cif: no such file"),
    "long template": (
        [ONE, "--params", "p.npz", "-o", "out", "--template", f"{'x' * 300}.cif:A"],
        "no such file; check",
    ),
    "guess": ([ONE, "--params", "p.npz", "-o", "out", "--initial-guess", "none.pdb"], "none.pdb: no such file"),
    "hits": ([ONE, "--params", "p.npz", "-o", "out", "--hits", "a.hhr"], "--template-structures"),
    "out is a file": ([ONE, "--params", "p.npz", "-o", "p.npz"], "p.npz: is a file"),
    "out is taken": ([ONE, "--params", "p.npz", "-o", "taken"], "taken: holds something else"),
    "address": ([ONE, "--params", "p.npz", "-o", "s3://bucket/x"], "is an address"),
    "device": ([ONE, "--params", "p.npz", "-o", "out", "--device", "gpu"], "--device gpu: not known. Pass cpu"),
    "shard": ([ONE, "--params", "p.npz", "-o", "out", "--shard", "3/2"], "--shard 3/2: expected I/N"),
    "memory": ([ONE, "--params", "p.npz", "-o", "out", "--memory", "24"], "not an amount of memory"),
    "fixed": ([ONE, "--params", "p.npz", "-o", "out", "--fixed-chains", "A"], "needs --initial-guess"),
    "cache": ([ONE, "--params", "p.npz", "-o", "out", "--msa-cache", "c"], "no effect without --msa-server"),
    "server": ([ONE, "--params", "p.npz", "-o", "out", "--msa-server", "host"], "no http or https address"),
    "store": ([ONE, "--params", "p.npz", "-o", "out", "--representations", "x.store", "--keep", "best:x"], "--keep"),
}
RUN = """
import sys
from warpfold import cli
for words in {words}:
    try: cli.main(["predict", *words])
    except SystemExit as end: print("torch" in sys.modules, end.code, file=sys.stderr)
"""


def test_a_request_is_checked_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "p.npz").write_bytes(b"parameters")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("mine")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    code = RUN.format(words=[words for words, _ in WRONG.values()])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert lines[1::2] == ["False 2"] * len(WRONG), done.stderr
    for line, (case, (_, message)) in zip(lines[::2], WRONG.items(), strict=True):
        assert line.startswith("error: "), case
        assert message in line, case
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_python_checks_a_request_before_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys, warpfold\n"
        f"try: warpfold.predict({ONE!r}, 'none.npz', 'out', device='cpu')\n"
        "except warpfold.UserError as error: print(error, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "none.npz: no such file; check the path False\n"
