"""benchmarks/gpu_session.sh and what it prints last, as far as a machine without a GPU can say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_table import COUNTED_NOTHING, FULL, FULL_STEP, Line, lines, read
from warpfold.cli.common import measured
from warpfold.tune.bench_model import block_name, step_name

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
        ended = session(**variables)
        assert ended.returncode == 2
        assert ended.stdout == ""
        assert ended.stderr == "gpu_session: no GPU that torch can use; nothing was run\n"
    assert not (tmp_path / "out").exists()
    assert sorted((ROOT / "benchmarks" / "results").iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "python", "says"),
    [
        (("--fast",), sys.executable, "--fast: not known"),
        (("--rehearse", "now"), sys.executable, "one argument at most"),
        ((), "/bin/false", "cannot import torch"),
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
def test_rehearsal_is_labelled_and_keeps_nothing() -> None:
    before = sorted((ROOT / "benchmarks" / "results").iterdir())
    ended = session("--rehearse")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("not a GPU result") == 2
    assert "FAILED" not in ended.stdout
    assert " met" not in ended.stdout  # a toy has no bar
    assert sorted((ROOT / "benchmarks" / "results").iterdir()) == before


# ---- the table


def row(op: str, shape: str, direction: str, **figures: float) -> dict[str, object]:
    return {"op": op, "shape": shape, "way": "ours", "pass": direction, "share_of_limit": 0.5, **figures}


def test_figures_beside_their_bars() -> None:
    found = {
        "triangles": {
            "rows": [
                row("attention", "starting:256", "forward", ms=0.07),
                row("attention", "starting:256", "backward", ms=0.22),
                row("attention", "starting:384", "backward", ms=0.5),
            ]
        },
        "norms": {
            "rows": [row("layer_norm", "pair:256", "forward", ms=0.01, gb_per_s=3800.0)],
            "ceilings": {"bf16": {"gb_per_s": 4300.0}},
        },
        "block": {
            "rows": [
                of_block("forward", ms=0.9, launches=26),
                of_block("training", ms=1.0, launches=26),
                of_block("backward", ms=4.0, launches=55),
            ]
        },
        "step": {"rows": [{"what": FULL_STEP, "way": "ours", "pass": "step", "ms": 350.0, "wall_ms": 420.0}]},
    }
    table = {line.what: line for line in lines(found, "NVIDIA H200")}
    verdicts = {what: line.verdict for what, line in table.items()}
    assert verdicts == {
        "triangle attention forward, N 256": "met",
        "triangle attention forward, N 384": "not measured",
        "triangle attention forward, N 1024": "not measured",
        "triangle attention forward, N 2048": "not measured",
        "triangle attention backward, N 256": "MISSED",
        "triangle attention backward, N 384": "no bar for this GPU",
        "triangle attention backward, N 1024": "not measured",
        "triangle attention backward, N 2048": "not measured",
        "LayerNorm [256, 256, 128] forward, of copy bandwidth": "met",
        "LayerNorm [256, 256, 128] backward, of copy bandwidth": "not measured",
        "Evoformer block 128 x 256 forward": "met",
        "Evoformer block 128 x 256 backward": "MISSED",
        "launches per block, forward": "MISSED",
        "launches per block, backward": "met",
        "training step 256, 128 + 1024 rows, no recycling": "MISSED",
    }
    assert table["LayerNorm [256, 256, 128] forward, of copy bandwidth"].measured == pytest.approx(3800 / 4300)
    assert {line.verdict for line in lines({}, "NVIDIA A100-SXM4-80GB")} == {"not measured"}


def of_block(direction: str, **figures: object) -> dict[str, object]:
    return {"what": FULL, "way": "ours", "pass": direction, **figures}


def test_the_sizes_of_targets_are_those_that_are_measured() -> None:
    given = measured("monomer", [], {}, None, 0)
    assert (block_name(given), step_name(given)) == (FULL, FULL_STEP)


def test_a_toy_has_no_figure_of_targets() -> None:
    toy = {"block": {"rows": [of_block("training", ms=1.0, launches=9) | {"what": FULL.replace("256", "12")}]}}
    assert {line.verdict for line in lines(toy, "NVIDIA H200")} == {"not measured"}


def test_a_count_of_none_is_an_error_and_no_bar_met(tmp_path: Path) -> None:
    rows = [of_block("forward", ms=0.9, launches=0), of_block("backward", ms=0.9, launches=None)]
    verdicts = {line.what: line.verdict for line in lines({"block": {"rows": rows}}, "NVIDIA H200")}
    for direction in ("forward", "backward"):
        assert verdicts[f"launches per block, {direction}"] == COUNTED_NOTHING
    (tmp_path / "block.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "benchmarks/gpu_table.py", tmp_path, "--out", tmp_path / "table.json"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert COUNTED_NOTHING in ended.stdout


def test_bars_that_are_least() -> None:
    assert Line("", 0.9, 0.85, "", least=True).verdict == "met"
    assert Line("", 0.8, 0.85, "", least=True).verdict == "MISSED"


def test_a_part_that_was_stopped_is_not_measured(tmp_path: Path) -> None:
    (tmp_path / "block.json").write_text('{"ways": {"fast"')
    (tmp_path / "norms.json").write_text("")
    (tmp_path / "doctor.json").write_text(json.dumps({"red": 0}))
    assert read(tmp_path) == {"doctor": {"red": 0}}
    (tmp_path / "block.jsonl").write_text('{"way": "ours"}\n{"way": "defi')  # what was written as it came stays
    assert read(tmp_path)["block"] == {"stopped": True, "rows": [{"way": "ours"}]}
    table = tmp_path / "table.json"
    command = [sys.executable, "benchmarks/gpu_table.py", tmp_path, "--out", table]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode != 0  # the doctor's list is missing: said, not guessed
    (tmp_path / "doctor.json").unlink()
    (tmp_path / "parts.tsv").write_text("Evoformer block\tout of its 75 s\t75\n")
    subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(table.read_text())["parts"] == [
        {"part": "Evoformer block", "ended": "out of its 75 s", "seconds": "75"}
    ]


# ---- the parts, by a stand-in for Python that runs none of them


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """As if there were a GPU: triangles fail after a row, norms take longer than their box, the rest prints nothing."""
    path = tmp_path / "python"
    one = json.dumps(row("attention", "starting:256", "forward", ms=0.5))
    path.write_text(
        "#!/bin/bash\n"
        f'echo "$*" >> "{tmp_path}/asked"\n'
        "rows=/dev/null\n"
        'for ((i = 1; i < $#; i++)); do [[ "${!i}" != --rows ]] || { i=$((i + 1)); rows="${!i}"; }; done\n'
        'case "$*" in\n'
        '  *cuda.is_available*) echo "NVIDIA Stand-in 9000" ;;\n'
        f'  *gpu_table.py*) exec "{sys.executable}" "$@" ;;\n'
        f"""  *"--op attention --shapes starting:256,"*) echo '{one}' > "$rows"; echo wrong >&2; exit 7 ;;\n"""
        '  *"bench --op layer_norm"*) exit 124 ;;\n'
        '  *) echo "{}" ;;\n'
        "esac\n"
    )
    path.chmod(0o755)
    return path


def test_a_part_that_fails_is_said_and_the_next_one_runs(tmp_path: Path, stand_in: Path) -> None:
    ended = session(PYTHON=str(stand_in), OUT=str(tmp_path / "out"))
    assert ended.returncode == 1
    says = ended.stdout.splitlines()
    assert any(line.startswith("triangle attention ") and "FAILED, exit code 7: " in line for line in says)
    assert any(line.startswith("norms") and "out of its 30 s" in line for line in says)
    assert any(line.startswith("Evoformer block ") and " ok " in line for line in says)
    assert any(line.endswith("not measured") for line in says)
    assert any(line.startswith("triangle attention forward, N 256") and "0.5 ms" in line for line in says)
    assert "REHEARSAL" not in ended.stdout
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert all(name.startswith("NVIDIA-Stand-in-9000-2") for name in files)
    assert {name.rpartition(".")[2] for name in files} == {"json", "jsonl", "log"}
    (result,) = (path for path in (tmp_path / "out").glob("*.json"))
    ends = {part["part"]: part["ended"] for part in json.loads(result.read_text())["parts"]}
    assert ends["launches of attention"] == ends["Evoformer block"] == "ok"
    assert ends["triangle attention"].startswith("FAILED")


def test_the_headline_comes_first_and_the_tests_last(tmp_path: Path, stand_in: Path) -> None:
    """All is compiled before, and the headline is of the default launches: tuning comes after it."""
    session(PYTHON=str(stand_in), OUT=str(tmp_path / "out"))
    asked = (tmp_path / "asked").read_text().splitlines()
    order = ["gpu_ahead.py", "--shapes starting:256,", "--block", "--step", " profile ", " tune ", "pytest -m"]
    places = [next(i for i, line in enumerate(asked) if what in line) for what in order]
    assert places == sorted(places)
    assert all("--rows" in line for line in asked if " bench " in line)
