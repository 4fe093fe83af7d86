"""Run the tables of refused input: the exit code, one complete line, and nothing written."""

import sys
from pathlib import Path

import pytest
import torch

from tests.messages.inputs import write_inputs
from tests.messages.table import CASES, Case, run


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size and the time of every file."""
    found = {str(path): path.lstat() for path in folder.rglob("*")}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.call)
def test_refused_input_is_one_line(case: Case, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.without == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    if case.needs:
        pytest.importorskip(case.needs, reason=f"{case.needs} is not installed")
    monkeypatch.chdir(inputs)
    # Modules of the folder are imported without a trace.
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    before = state(inputs)
    code, message = run(case.call)
    assert case.matches(message), message
    assert code == case.exit_code
    assert state(inputs) == before
