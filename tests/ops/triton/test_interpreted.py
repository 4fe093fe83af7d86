"""Run the tests of `interpreted/` in a separate process, because Triton selects its interpreter when it is imported."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


# This takes about a minute of a core, which other tests may share.
@pytest.mark.timeout(900)
def test_kernels_in_the_interpreter() -> None:
    """The error contains the other process's failures with the output of pytest."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", str(HERE / "interpreted")]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=880)
    counts = re.findall(r"(\d+) passed", ran.stdout)
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-2_000:]
    assert counts
    assert int(counts[-1]) >= 40, "fewer tests than there were"


def test_they_are_left_out_where_kernels_are_compiled() -> None:
    """Tests of interpreted kernels are not collected in a process that compiles kernels."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--co", str(HERE / "interpreted")]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, ran.stdout[-2_000:] + ran.stderr[-2_000:]
