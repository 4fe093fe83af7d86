"""`warpfold doctor` and `warpfold bench --op`: help, exit codes, nothing timed that is wrong."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.test_cli import refused, run
from warpfold.check import cases
from warpfold.cli import bench
from warpfold.ops.attention import attention
from warpfold.ops.linear import gate

PARSERS = ("gemmi", "pyhmmer", "zstandard")  # machines that only compute may lack them
QUICK = ("--device", "cpu", "--repeats", "1", "--ways", "definition,ours")


@pytest.mark.parametrize("command", ["doctor", "bench"])
def test_help_shows_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, err = run(capsys, command, "--help")
    assert (code, err) == (0, "")
    assert f"Example: warpfold {command}" in " ".join(out.split())


def test_doctor_alone_says_what_is_here_and_what_it_could_do(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "doctor", "--device", "cpu")
    assert (code, err) == (0, "")
    assert torch.__version__ in out
    assert "warpfold doctor --kernels" in out
    held = json.loads(run(capsys, "doctor", "--device", "cpu", "--json")[1])
    assert held["machine"]["torch"] == torch.__version__


def test_help_names_every_operation() -> None:
    assert (bench.BENCHED, bench.TUNED) == (cases.BENCHED, cases.TUNED)


def test_it_needs_no_parser() -> None:
    code = f"import sys; sys.modules.update(dict.fromkeys({PARSERS}))\n"
    code += "from warpfold import cli, settings\nfrom warpfold.bench import doctor, ops\n"
    code += "assert doctor.cases_of(settings.load('monomer'), 'monomer')\n"
    code += "cli.main(['doctor', '--kernels', '--settings', 'nowhere'])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stderr.startswith("error: nowhere: no such settings file")
    assert ended.returncode == 2


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Settings of a model with few and small operations."""
    path = tmp_path / "small.toml"
    path.write_text(
        "[model]\nc_m = 16\nc_z = 8\nextra_blocks = 0\n[model.evoformer]\nheads = 2\n"
        "[model.evoformer.pair]\nheads = 2\nc_triangle = 8\n[model.templates]\nenabled = false\n"
        "[data]\ncrop = 9\nmax_msa = 4\n"
    )
    return path


def test_doctor_of_sound_kernels(capsys: pytest.CaptureFixture[str], small: Path) -> None:
    code, out, err = run(capsys, "doctor", "--kernels", "--settings", small, "--device", "cpu", "--json")
    held = json.loads(out)
    wrong = [op for op in held["ops"] if op["verdict"] == "RED"]
    assert (code, err, wrong) == (0, "", [])
    assert {op["dtype"] for op in held["ops"]} == {"fp32", "bf16"}
    assert {op["where"] for op in held["ops"]} >= {"msa row", "msa column", "triangle starting", "triangle ending"}


def test_doctor_of_a_broken_kernel(
    capsys: pytest.CaptureFixture[str], small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "fast", lambda x, g: gate.definition(x, g) * 1.5)
    code, out, err = run(capsys, "doctor", "--kernels", "--settings", small, "--device", "cpu")
    assert code == 1
    assert "RED" in out
    assert "No GPU is checked" in out
    assert "red: gate" in err
    assert all(line.startswith("red: ") and "from fp64" in line for line in err.splitlines())


def test_bench_of_an_operation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = ("--csv", tmp_path / "f.csv", "--plot", tmp_path / "f.png")
    code, out, _ = run(capsys, "bench", "--op", "gate,layer_norm", "--shapes", "pair:8", *QUICK, *files)
    assert code == 0
    assert "gate" in out
    assert "TFLOP/s" in out
    with (tmp_path / "f.csv").open() as file:
        assert {line["way"] for line in csv.DictReader(file)} == {"definition", "ours"}
    assert (tmp_path / "f.png").stat().st_size > 1000


def test_bench_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "bench", "--op", "gate", "--op", "tail", "--shapes", "pair:8", *QUICK, "--json")
    assert code == 0
    assert {row["op"] for row in json.loads(out)["rows"]} == {"gate", "tail"}


def test_bench_times_nothing_that_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(attention, "fast", lambda *args: attention.definition(*args) * 1.5)
    files = ("--csv", tmp_path / "f.csv")
    code, out, err = run(capsys, "bench", "--op", "attention", "--shapes", "starting:12", *QUICK, *files)
    assert code == 1
    assert out == ""
    assert all(line.startswith(("red: attention", "red: global_attention")) for line in err.splitlines())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bench"], "--op"),
        (["bench", "--quick"], "--op"),
        (["bench", "--op", "convolution"], "not one of attention"),
        (["bench", "--op", "gate", "--dtype", "fp8"], "--dtype fp8"),
        (["bench", "--op", "gate", "--ways", "sdpa"], "--ways sdpa"),
        (["bench", "--op", "attention", "--shapes", "row:256"], "SEQUENCESxRESIDUES"),
        (["bench", "--op", "gate", "--shapes", "starting:12"], "none is a shape of gate"),
        (["bench", "--op", "gate", "--device", "cuda:77"], "--device"),
        (["bench", "--quick", "data", "--store", "x"], "options of `data` go behind it"),
        (["doctor", "--settings", "tiny"], "--settings"),
        (["doctor", "--kernels", "--settings", "nowhere"], "no such settings file"),
    ],
)
def test_wrong_usage_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert says in refused(run(capsys, *arguments))
