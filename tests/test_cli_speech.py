"""What all commands share: -q, -v, -o, and completion in a shell."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_cli import run, structure
from warpfold import cli
from warpfold.cli.common import speaking
from warpfold.errors import UserError
from warpfold.progress import progress_bar


def test_quiet_prints_nothing_but_json_and_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one = structure(tmp_path)
    loud = run(capsys, "score", one, one)
    assert (loud[0], loud[1] != "") == (0, True)
    assert run(capsys, "score", one, one, "-q") == (0, "", "")
    code, out, _ = run(capsys, "score", one, one, "--quiet", "--json")
    assert (code, json.loads(out)["lddt"]) == (0, 1.0)
    assert run(capsys, "score", one, tmp_path / "none.cif", "-q")[2].startswith("error: ")


def test_verbose_says_where_an_error_came_from(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ("score", structure(tmp_path), tmp_path / "none.cif")
    code, _, plain = run(capsys, *asked)
    assert (code, plain.count("\n")) == (2, 1)
    code, _, long = run(capsys, *asked, "-v")
    assert code == 2
    assert long.startswith("Traceback")
    assert long.endswith(plain)


def test_verbose_passes_on_what_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("warpfold.somewhere")
    with speaking(quiet=False, verbose=True, as_json=False):
        log.info("slices of 4 rows")
    log.info("nobody hears this")
    assert capsys.readouterr().err.endswith("warpfold.somewhere: slices of 4 rows\n")


def test_quiet_hides_bars_and_ends_with_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        with speaking(quiet=True, verbose=False, as_json=False), progress_bar(narrate=True) as move:
            move(1, 2, "something long")
            print("a result")
            raise UserError("bad: input")

    with pytest.raises(UserError, match="bad"):
        command()
    assert capsys.readouterr() == ("", "")
    with progress_bar(narrate=True) as move:
        move(1, 2, "something else")
    assert "something else" in capsys.readouterr().err


def test_o_is_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, _ = run(capsys, "sample", "--proteins", 1, "-o", tmp_path / "made", "-q")
    assert code == 0
    assert (tmp_path / "made").is_dir()


def test_a_shell_completes_commands_and_options() -> None:
    def completed(words: str) -> list[str]:
        asked = {"_WARPFOLD_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        code = "from warpfold import cli; cli.main()"
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    assert completed("warpfold do") == ["doctor"]
    assert {"--out", "--quiet"} <= set(completed("warpfold train --"))


def test_every_command_has_them() -> None:
    import typer

    for name, command in typer.main.get_command(cli.app).commands.items():  # type: ignore[attr-defined]
        names = {option for parameter in command.params for option in parameter.opts}
        assert {"-q", "--quiet", "-v", "--verbose"} <= names, name
        assert ("--out" in names) == ("-o" in names), name
