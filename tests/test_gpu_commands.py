"""Test benchmarks/gpu.py on a CPU: its commands, and parts that crash, hang, or are killed."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu import LIMITS, Part, Results, parts_of, print_rows, run

ROOT = Path(__file__).parents[1]
ROW = '{"what": "main block", "us": 1.25}'


@pytest.fixture(autouse=True)
def scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Replace the machine's folders by temporary folders."""
    for name in ("SCRATCH", "TRITON", "PEERS", "TABLES", "CARRIED"):
        monkeypatch.setattr(gpu, name, tmp_path / name.lower())
    return tmp_path


@pytest.fixture
def results(tmp_path: Path) -> Results:
    (tmp_path / "results").mkdir()
    return Results(tmp_path / "results", tmp_path / "gpu-A.tar.gz")


def held(archive: Path) -> dict[str, str]:
    """Read the text of an archive's files.  Keys: names."""
    with tarfile.open(archive) as found:
        files = {member.name: found.extractfile(member) for member in found.getmembers()}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def outcomes(archive: Path) -> dict[str, str]:
    rows = [json.loads(line) for line in held(archive)["parts.jsonl"].splitlines()]
    return {row["part"]: row["outcome"] for row in rows}


def script(name: str, seconds: int, text: str) -> Part:
    """Build a part that writes a row and then runs the code in `text`."""
    return Part(
        name, seconds, ("-c", f"import sys, time, os; open(sys.argv[1], 'w').write({ROW + chr(10)!r}); {text}", "ROWS")
    )


@pytest.mark.parametrize("command", LIMITS)
def test_the_parts_fit_into_the_limit_and_a_rehearsal_has_the_same(command: str) -> None:
    parts = parts_of(command)
    # Unpacking and starting take two seconds.
    assert sum(part.seconds for part in parts) <= LIMITS[command] - 2
    assert [(part.name, part.seconds) for part in parts_of(command, toy=True)] == [(p.name, p.seconds) for p in parts]
    assert len({part.name for part in parts}) == len(parts)


@pytest.mark.parametrize("command", LIMITS)
def test_every_part_of_a_command_runs_whatever_becomes_of_the_others(
    command: str, results: Results, tmp_path: Path
) -> None:
    """With a stand-in for Python, the second part crashes after a row, and the third writes a row and hangs."""
    parts = parts_of(command)
    stand_in = tmp_path / "python"
    stand_in.write_text(f"""#!/bin/bash
for ((i = 1; i <= $#; i++)); do [[ "${{!i}}" != --rows ]] || {{ i=$((i + 1)); rows="${{!i}}"; }}; done
echo '{ROW}' >"$rows"
case "$rows" in
  */{parts[1].name}.jsonl) echo "CUDA error: an illegal memory access" >&2; exit 7 ;;
  */{parts[2].name}.jsonl) sleep 100 & sleep 100 ;;
esac
""")
    stand_in.chmod(0o755)
    assert not run([replace(part, seconds=2) for part in parts], results, time.monotonic(), str(stand_in))
    found = outcomes(results.archive)
    assert list(found) == [part.name for part in parts]
    assert found.pop(parts[1].name) == "failed, exit code 7: CUDA error: an illegal memory access"
    assert found.pop(parts[2].name) == "out of time"
    assert set(found.values()) == {"ok"}
    measured = [f"{part.name}.jsonl" for part in parts if "ROWS" in part.arguments]
    assert [held(results.archive)[name] for name in measured] == [ROW + "\n"] * len(measured)


def test_time_that_a_part_leaves_goes_to_the_next_and_none_takes_that_of_others(results: Results) -> None:
    parts = [script("quick", 3, ""), script("slow", 1, "time.sleep(1.5)"), script("hangs", 0, "time.sleep(60)")]
    began = time.monotonic()
    run([*parts, script("last", 5, "")], results, began)
    assert outcomes(results.archive) == {"quick": "ok", "slow": "ok", "hangs": "out of time", "last": "ok"}
    assert time.monotonic() - began < 9


def test_workers_of_a_part_end_with_it(results: Results, tmp_path: Path) -> None:
    """Workers end even after success, because they would disturb the next measurement."""
    noted = tmp_path / "pid"
    text = f"import subprocess; open({str(noted)!r}, 'w').write(str(subprocess.Popen(['sleep', '50']).pid))"
    assert run([script("starts a worker", 20, text)], results, time.monotonic())
    status, deadline = Path(f"/proc/{noted.read_text()}/status"), time.monotonic() + 20
    while status.exists() and "zombie" not in status.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_launch_tables_of_the_machine_are_kept_and_large_files_are_not(
    results: Results, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scratch / "tables").mkdir()
    (scratch / "tables" / "NVIDIA-H200.json").write_text("{}")
    (results.folder / "trace.json").write_text("x" * 2000)
    monkeypatch.setattr(gpu, "LARGEST_FILE", 1000)
    results.save()
    assert held(results.archive) == {"NVIDIA-H200.json": "{}"}


def test_a_command_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    """The machine kills all processes without a warning while the second part runs."""
    (tmp_path / "results").mkdir()
    code = f"""
import time
from pathlib import Path
from benchmarks import gpu
gpu.SAVE_EVERY, gpu.TRITON = 0.1, Path({str(tmp_path)!r})
write = "open(sys.argv[1], 'w').write('1')"
parts = [gpu.Part("done", 60, ("-c", f"import sys; {{write}}", "ROWS")),
         gpu.Part("hangs", 60, ("-c", f"import sys, time; {{write}}; sys.stdout.flush(); time.sleep(60)", "ROWS"))]
results = gpu.Results(Path({str(tmp_path / "results")!r}), Path({str(tmp_path / "gpu.tar.gz")!r}))
gpu.run(parts, results, time.monotonic())
"""
    running = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "gpu.tar.gz").exists() or "hangs.jsonl" not in held(tmp_path / "gpu.tar.gz"):
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    files = held(tmp_path / "gpu.tar.gz")
    assert files["done.jsonl"] == "1"
    assert outcomes(tmp_path / "gpu.tar.gz") == {"done": "ok"}


def test_the_rows_are_printed_and_a_torn_one_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "parts.jsonl").write_text('{"part": "step"}\n')
    (tmp_path / "step.jsonl").write_text('{"way": "kept-graph", "ms": 410.4321, "note": ""}\n{"way": "gra')
    checks = [{"op": "gate", "verdict": "ok"}, {"op": "gate", "verdict": "ok; small"}, {"op": "tail", "verdict": "RED"}]
    (tmp_path / "doctor.jsonl").write_text("".join(json.dumps(row) + "\n" for row in checks))
    print_rows(tmp_path)
    lines = capsys.readouterr().out.split("\n")
    assert "  way kept-graph, ms 410.4" in lines
    assert "doctor: 2 checks ok" in lines
    assert "  op tail, verdict RED" in lines
    assert not [line for line in lines if "gra" in line and "kept" not in line]


def test_carried_archives_are_unpacked_once(scratch: Path) -> None:
    (scratch / "carried").mkdir()
    (scratch / "kernel.cubin").write_text("code")
    with tarfile.open(scratch / "carried" / "triton.tar.xz", "w:xz") as archive:
        archive.add(scratch / "kernel.cubin", "triton/KEY/kernel.cubin")
    gpu.SCRATCH.mkdir()
    for expected in ("code", "newer"):
        gpu.unpack()
        kernel = gpu.SCRATCH / "triton/KEY/kernel.cubin"
        assert kernel.read_text() == expected
        kernel.write_text("newer")


def test_a_damaged_archive_keeps_nothing_from_being_measured(scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (scratch / "carried").mkdir()
    gpu.SCRATCH.mkdir()
    (scratch / "carried" / "peers.tar.xz").write_bytes(b"\xfd7zXZ\x00torn")
    gpu.unpack()
    assert "peers.tar.xz: not unpacked: " in capsys.readouterr().out


def test_kernels_are_prepared_with_the_versions_of_the_gpu_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "version", lambda name: "2.13.0" if name == "torch" else "3.6.0")
    monkeypatch.setattr(sys, "version_info", (3, 12, 1))
    with pytest.raises(SystemExit, match=r"^gpu prepare: torch 2.13.0: the GPU machine has python 3.12, torch 2.11"):
        gpu.prepare([])


@pytest.mark.parametrize(
    ("arguments", "says"), [((), "required"), (("D",), "invalid choice"), (("A", "-x"), "unrecog")]
)
def test_wrong_use_is_an_error(arguments: tuple[str, ...], says: str) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert says in ended.stderr


def test_the_commands_of_the_readme_are_short_and_carry_what_is_prepared() -> None:
    text = (ROOT / "benchmarks/README.md").read_text()
    for command in LIMITS:
        (line,) = [line for line in text.splitlines() if line.startswith("| `python3 -m benchmarks.gpu " + command)]
        assert ".gpu/" in line
        assert len(line.split("`")[1]) <= 2000


@pytest.mark.slow
# A busy machine may need five times the limit of command A.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", LIMITS)
def test_a_rehearsal_runs_every_part(command: str, tmp_path: Path) -> None:
    """Run the same processes at toy sizes, without the packages that the GPU machine lacks."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('gemmi', 'pyhmmer', 'zstandard', 'requests', 'pooch', 's3fs'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    environment: dict[str, Any] = os.environ | {"OUT": str(tmp_path), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", command, "--rehearse"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "not a GPU result" in ended.stdout
    (archive,) = tmp_path.glob("rehearsal-*.tar.gz")
    assert set(outcomes(archive).values()) == {"ok"}
