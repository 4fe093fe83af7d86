"""benchmarks/gpu_session.sh and what it prints last, as far as a machine without a GPU can say."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_table import COUNTED_NOTHING, FULL, FULL_STEP, lines
from warpfold.bench.model import block_name, step_name
from warpfold.cli.bench import measured

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu_session.sh"


def session(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "OUT"}
    environment |= {"PYTHON": sys.executable, **variables}
    return subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")
def test_without_a_gpu_it_is_one_line(tmp_path: Path) -> None:
    before = sorted((ROOT / "benchmarks" / "results").iterdir())
    for variables in ({}, {"OUT": str(tmp_path / "out")}):
        ended = session("1", **variables)
        assert ended.returncode == 2
        assert ended.stdout == ""
        assert ended.stderr == "gpu_session: no GPU that torch can use; nothing was run\n"
    assert not (tmp_path / "out").exists()
    assert sorted((ROOT / "benchmarks" / "results").iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "python", "says"),
    [
        ((), sys.executable, "which call? 1, 2 or 3"),
        (("4",), sys.executable, "4: not known"),
        (("--rehearse", "now"), sys.executable, "now: not known"),
        (("1", "2"), sys.executable, "one call at a time"),
        (("1",), "/bin/false", "cannot import torch"),
    ],
)
def test_wrong_use_is_one_line(arguments: tuple[str, ...], python: str, says: str) -> None:
    ended = session(*arguments, PYTHON=python)
    assert ended.returncode == 2
    assert says in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_help() -> None:
    ended = session("--help")
    assert ended.returncode == 0
    assert "--rehearse" in ended.stdout
    assert "#" not in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("call", ["1", "2", "3"])
def test_rehearsal_is_labelled_and_keeps_nothing(call: str, tmp_path: Path) -> None:
    """Every command line of the session, at toy sizes, without the packages that the machine that is lent has not."""
    before = sorted((ROOT / "benchmarks" / "results").iterdir())
    ended = session("--rehearse", call, OUT=str(tmp_path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("not a GPU result") == 3
    assert "FAILED" not in ended.stdout
    assert " met " not in ended.stdout  # a toy has no bar
    assert not list(tmp_path.iterdir())
    assert sorted((ROOT / "benchmarks" / "results").iterdir()) == before


# ---- the table


def row(op: str, shape: str, direction: str, **figures: object) -> dict[str, object]:
    return {"op": op, "shape": shape, "dtype": "bf16", "way": "ours", "pass": direction, "note": "", **figures}


def of_block(direction: str, **figures: object) -> dict[str, object]:
    return {"what": FULL, "way": "ours", "pass": direction, "note": "", **figures}


def of_step(**figures: object) -> dict[str, object]:
    return {"what": FULL_STEP, "way": "graph", "pass": "step", "note": "", **figures}


@pytest.mark.parametrize(
    ("found", "verdicts"),
    [
        (row("attention", "starting:256", "forward", ms=0.07), ["met"]),
        (row("attention", "starting:256", "backward", ms=0.22), ["MISSED"]),
        (row("attention", "starting:384", "backward", ms=0.5), [""]),  # no bar
        (row("attention", "starting:256", "forward", ms=0.07) | {"way": "sdpa"}, [""]),  # not ours
        (row("transition", "pair:256", "forward", ms=0.07), [""]),
        (of_block("training", ms=1.0, launches=26), ["met"]),
        (of_block("forward", ms=0.9, launches=26), ["", "MISSED"]),
        (of_block("backward", ms=4.0, launches=55), ["MISSED", "met"]),
        (of_block("training", ms=1.0) | {"what": FULL.replace("256", "12")}, [""]),  # a toy
        (of_step(ms=350.0, wall_ms=420.0), ["MISSED"]),  # until the result is there
        (of_step(ms=350.0, wall_ms=380.0), ["met"]),
        (of_step(ms=350.0, wall_ms=380.0) | {"what": FULL_STEP.replace("recycles 0", "recycles 3")}, [""]),
    ],
)
def test_figures_beside_their_bars(found: dict[str, object], verdicts: list[str]) -> None:
    assert [line.verdict for line in lines("part", found, "NVIDIA H200")] == verdicts
    assert {line.verdict for line in lines("part", found, "another") if "launches" not in line.what} == {""}


def test_the_sizes_of_targets_are_those_that_are_measured() -> None:
    given = measured("monomer", [], {}, None, 0)
    assert (block_name(given), step_name(given)) == (FULL, FULL_STEP)


def table(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/gpu_table.py", folder]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_count_of_none_is_an_error_and_no_bar_met(tmp_path: Path) -> None:
    rows = [of_block("forward", ms=0.9, launches=0), of_block("backward", ms=0.9, launches=None)]
    (tmp_path / "block.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = table(tmp_path)
    assert ended.returncode == 1
    assert ended.stdout.count(COUNTED_NOTHING) == 2
    assert " met" not in ended.stdout


def test_of_a_part_that_was_stopped_the_rows_count(tmp_path: Path) -> None:
    (tmp_path / "block.jsonl").write_text(json.dumps(of_block("training", ms=1.25)) + '\n{"way": "defi')
    (tmp_path / "doctor.jsonl").write_text(
        json.dumps(
            {"op": "gate", "where": "pair", "shape": "4 rows", "dtype": "bf16", "way": "triton", "verdict": "ok"}
        )
        + "\n"
        + json.dumps(
            {"op": "tail", "where": "msa", "shape": "4 rows", "dtype": "bf16", "way": "triton", "verdict": "RED"}
        )
        + "\n"
    )
    ended = table(tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "1.25" in ended.stdout
    assert "1 of 2 checks are fine" in ended.stdout
    assert "tail 4 rows" in ended.stdout
    assert "RED" in ended.stdout
    assert "gate" not in ended.stdout


# ---- the parts, by a stand-in for Python that runs none of them


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """As if there were a GPU: the block fails after a row, the doctor takes longer than its box, a step with recycling
    writes a row and never ends, and the rest does nothing."""
    path = tmp_path / "python"
    one = json.dumps(of_block("training", ms=1.25))
    path.write_text(
        "#!/bin/bash\n"
        f'echo "$*" >> "{tmp_path}/asked"\n'
        "rows=/dev/null\n"
        'for ((i = 1; i < $#; i++)); do [[ "${!i}" != --rows ]] || { i=$((i + 1)); rows="${!i}"; }; done\n'
        'case "$*" in\n'
        '  *cuda.is_available*get_device_name*) echo "NVIDIA Stand-in 9000" ;;\n'
        f'  *gpu_table.py*) exec "{sys.executable}" "$@" ;;\n'
        f"""  *"bench --block"*) echo '{one}' > "$rows"; echo wrong >&2; exit 7 ;;\n"""
        '  *"doctor --kernels"*) exit 124 ;;\n'
        f"""  *"--recycles 3"*) echo '{one}' > "$rows"; [[ -z "$HANG" ]] || sleep 300 ;;\n"""
        "esac\n"
    )
    path.chmod(0o755)
    return path


def held(archive: Path) -> dict[str, str]:
    """The files of an archive."""
    with tarfile.open(archive) as found:
        files = {Path(m.name).name: found.extractfile(m) for m in found.getmembers() if m.isfile()}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def test_a_part_that_fails_is_said_and_the_next_one_runs(tmp_path: Path, stand_in: Path) -> None:
    ended = session("1", PYTHON=str(stand_in), OUT=str(tmp_path / "out"))
    assert ended.returncode == 1
    says = ended.stdout.splitlines()
    assert any(line.startswith("block ") and "FAILED, exit code 7: wrong" in line for line in says)
    assert any(line.startswith("doctor-bf16 ") and "out of its 65 s" in line for line in says)
    assert any(line.startswith("step-kept ") and " ok " in line for line in says)
    assert any("1.25" in line and FULL in line for line in says)
    assert "REHEARSAL" not in ended.stdout
    (archive,) = (tmp_path / "out").iterdir()
    assert archive.name.startswith("NVIDIA-Stand-in-9000-2")
    files = held(archive)
    assert {"parts.tsv", "block.jsonl", "block.log", "step-kept.out"} <= set(files)
    assert "compiled-ahead\tok" in files["parts.tsv"]


def test_a_call_that_is_killed_keeps_what_was_finished_and_measured(tmp_path: Path, stand_in: Path) -> None:
    """The machine ends it without warning: SIGKILL, to all that it runs."""
    environment = os.environ | {"PYTHON": str(stand_in), "OUT": str(tmp_path / "out"), "HANG": "1"}
    running = subprocess.Popen(
        [SCRIPT, "1"], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )

    def kept() -> dict[str, str]:
        archives = list((tmp_path / "out").glob("*.tar.gz"))
        return held(archives[0]) if archives else {}

    while "step-recycled.jsonl" not in kept():  # of the part that hangs
        assert running.poll() is None
        time.sleep(0.5)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    files = kept()
    assert json.loads(files["step-recycled.jsonl"])["ms"] == 1.25
    assert files["parts.tsv"].splitlines()[-1].startswith("step-kept\tok")
    assert "step-kept-recycled.log" not in files


@pytest.mark.parametrize("call", ["1", "2", "3"])
def test_the_boxes_of_a_call_are_less_than_its_limit(call: str, tmp_path: Path, stand_in: Path) -> None:
    """Else the script says so and runs nothing."""
    ended = session(call, PYTHON=str(stand_in), OUT=str(tmp_path / "out"))
    assert "boxes" not in ended.stderr
    assert (tmp_path / "asked").read_text().count("gpu_ahead.py") == 1
