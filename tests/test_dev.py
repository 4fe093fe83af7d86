"""Test `./dev` without its downloads: help, errors, and the changes after which it installs again."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A stand-in for Python in a copy of the checkout: it creates an "environment" whose pip only logs its calls.
FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
  *version_info*) exit 0 ;;
  *python_version*) echo 3.12.0 ;;
  *"import ensurepip"*) exit 0 ;;
  *"-m venv"*) mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python" ;;
  *"pip install"*)
    echo "Collecting torch==2.13.0 (from warpfold)"; echo "$*" >> "$FAKE_LOG"
    [[ "${FAKE_PIP:-0}" == 0 ]] || echo "ERROR: no such package"
    exit "${FAKE_PIP:-0}" ;;
  *"-m mkdocs"*) echo "mkdocs: $*" ;;
  *pytest*) echo "pytest: $*"; exit "${FAKE_TESTS:-0}" ;;
esac
"""

# A stand-in for uv. It fails unless FAKE_UV is 0.
FAKE_UV = """#!/usr/bin/env bash
[[ "${FAKE_UV:-1}" == 0 ]] || exit 1
echo "uv $*" >> "$FAKE_LOG"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "a checkout"
    root.mkdir()
    for name in ("dev", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, root / name)
    shutil.copytree(ROOT / ".ci", root / ".ci")
    (tmp_path / "bin").mkdir()
    for path, script in ((tmp_path / "python", FAKE_PYTHON), (tmp_path / "bin" / "uv", FAKE_UV)):
        path.write_text(script)
        path.chmod(0o755)
    return root


def dev(root: Path, *arguments: str, script: str = "dev", **env: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{root.parent / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": str(root.parent / "python"),
        "FAKE_LOG": str(root.parent / "log"),
        **env,
    }
    return subprocess.run(
        [str(root / script), *arguments], capture_output=True, text=True, cwd="/", env=environment, check=False
    )


def installs(root: Path) -> int:
    log = root.parent / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_help() -> None:
    for arguments in ((), ("--help",), ("help",)):
        done = dev(ROOT, *arguments)
        assert done.returncode == 0
        assert all(
            f"\n  {command} " in done.stdout
            for command in ("demo", "test", "check", "triton", "adapters", "docs", "wheel", "setup")
        )


def test_installs_once_and_again_when_requirements_change_or_the_checkout_moves(checkout: Path) -> None:
    done = dev(checkout, "setup")
    assert done.returncode == 0, done.stderr
    assert "torch==2.13.0\n" in done.stdout
    assert dev(checkout, "setup").returncode == 0
    assert installs(checkout) == 1
    with (checkout / "constraints.txt").open("a") as file:
        file.write("numpy==2.0\n")
    dev(checkout, "setup")
    assert installs(checkout) == 2
    moved = checkout.rename(checkout.parent / "moved")
    assert dev(moved, "setup").returncode == 0
    assert installs(moved) == 3


def test_uv_installs_where_it_works(checkout: Path) -> None:
    assert dev(checkout, "setup", FAKE_UV="0").returncode == 0
    (line,) = (checkout.parent / "log").read_text().splitlines()
    assert line.startswith("uv pip install --python ")
    assert "-c constraints.txt" in line
    shutil.rmtree(checkout / ".venv")
    done = dev(checkout, "setup")
    assert done.returncode == 0
    assert "uv failed" in done.stdout
    assert installs(checkout) == 2


def test_a_failed_install_says_so_and_heals(checkout: Path) -> None:
    done = dev(checkout, "setup", FAKE_PIP="1")
    assert done.returncode == 2
    assert "dev: the installation failed" in done.stderr
    assert dev(checkout, "setup").returncode == 0
    assert installs(checkout) == 2


@pytest.mark.parametrize("failing", [(), ("test",), ("docs", "wheel")], ids=" ".join)
def test_continuous_integration_does_it_all_and_says_what_failed(checkout: Path, failing: tuple[str, ...]) -> None:
    assert "\n./dev test " in (ROOT / "README.md").read_text(encoding="utf-8")
    fails = "".join(f'[[ "$*" != {command} ]] || exit 3; ' for command in failing)
    (checkout / "dev").write_text(f'#!/usr/bin/env bash\necho "did $*"; {fails}true\n')
    done = dev(checkout, script=".ci/run")
    assert done.returncode == (1 if failing else 0)
    lines = done.stdout.splitlines()
    commands = ["test", "triton", "docs", "wheel"]
    assert lines[:-4] == [f"did {command}" for command in commands]
    said = [f"./dev {command}: {'failed, exit code 3' if command in failing else 'passed'}" for command in commands]
    assert [line.partition(" (")[0] for line in lines[-4:]] == said


def test_the_suite_and_a_part_of_it(checkout: Path) -> None:
    whole = dev(checkout, "test")
    assert whole.returncode == 0
    assert "-m not slow and not gpu and not offline" in whole.stdout
    slow = dev(checkout, "test", "--slow", "-x", "tests/model").stdout
    assert "not slow" not in slow
    assert slow.strip().endswith("-x tests/model")


def test_another_torch_has_an_environment_that_is_kept(checkout: Path) -> None:
    done = dev(checkout, "test", "--torch", "2.11", "-x", "tests/model")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("-x tests/model")
    assert not (checkout / ".venv").exists()
    log = (checkout.parent / "log").read_text()
    assert "torch==2.11.*" in log
    assert "constraints.txt" not in log
    assert dev(checkout, "test", "--torch", "2.15", "--slow").returncode == 0
    assert dev(checkout, "test", "--torch", "2.11").returncode == 0
    assert installs(checkout) == 2
    assert sorted(path.name for path in (checkout / ".torch").iterdir()) == ["2.11", "2.15"]


def test_another_triton_is_installed_once_and_its_failure_is_seen(checkout: Path) -> None:
    done = dev(checkout, "triton")
    assert done.returncode == 0
    assert "-m offline and not slow and not gpu tests/ops/triton" in done.stdout
    log = (checkout.parent / "log").read_text()
    assert re.findall(r"triton==(\S+)\n", log) == ["3.6", "3.9.0"]
    done = dev(checkout, "triton", "3.6", "--slow", FAKE_TESTS="1")
    assert done.returncode == 1
    assert done.stdout.strip().endswith("-m not gpu tests/ops/triton")
    # The environment is installed once, and Triton twice.
    assert installs(checkout) == 3


@pytest.fixture
def packages(checkout: Path) -> Path:
    folder = checkout / "tests/adapt/environments"
    folder.mkdir(parents=True)
    (folder / "one.txt").write_text("one==1\n")
    (folder / "one.bare.txt").write_text("wants-another-torch==2\n")
    (folder / "two.bare.txt").write_text("two==2\n")
    return folder


def test_adapters_have_an_environment_each(checkout: Path, packages: Path) -> None:
    done = dev(checkout, "adapters")
    assert done.returncode == 0, done.stderr
    assert [line.partition("pytest:")[0] for line in done.stdout.splitlines() if "passed" in line] == [
        "one: passed: ",
        "two: passed: ",
    ]
    log = (checkout.parent / "log").read_text().splitlines()
    assert all("-c constraints.txt" in line for line in log)
    assert {name.name for name in (checkout / ".adapters").iterdir()} == {"one", "two"}
    assert not (checkout / ".venv").exists()
    assert dev(checkout, "adapters").returncode == 0
    assert installs(checkout) == len(log)  # nothing changed
    (packages / "two.bare.txt").write_text("two==3\n")
    dev(checkout, "adapters")
    # Only the environment of `two` is installed again: WarpFold, and the package.
    assert installs(checkout) == len(log) + 2


def test_adapters_without_what_they_require(checkout: Path, packages: Path) -> None:
    dev(checkout, "adapters", "one")
    log = [line for line in (checkout.parent / "log").read_text().splitlines() if "environments/" in line]
    named = {line.split("environments/")[1].split(".txt")[0]: "--no-deps" in line for line in log}
    assert named == {"one": False, "one.bare": True}


def test_adapters_say_what_failed_and_heal(checkout: Path, packages: Path) -> None:
    done = dev(checkout, "adapters", "two", FAKE_PIP="1")
    assert done.returncode == 1
    assert "two: not installed: ERROR: no such package (see " in done.stdout
    done = dev(checkout, "adapters", "two", FAKE_TESTS="1")
    assert done.returncode == 1
    assert "two: failed: pytest: -m pytest" in done.stdout
    assert dev(checkout, "adapters", "two").returncode == 0
    done = dev(checkout, "adapters", "tow")
    assert done.returncode == 2
    assert "adapters: no package 'tow'" in done.stderr


def test_docs_have_an_environment_of_their_own(checkout: Path) -> None:
    (checkout / "docs").mkdir()
    requirements = checkout / "docs" / "requirements.txt"
    requirements.write_text("mkdocs==1\n")
    done = dev(checkout, "docs")
    assert done.returncode == 0, done.stderr
    assert "mkdocs build --strict" in done.stdout
    # With --quiet, --strict would count no warnings.
    assert "--quiet" not in done.stdout
    assert dev(checkout, "docs").returncode == 0
    assert installs(checkout) == 1
    assert not (checkout / ".venv").exists()
    requirements.write_text("mkdocs==2\n")
    dev(checkout, "docs")
    assert installs(checkout) == 2


def test_adapters_that_want_a_certain_python(checkout: Path, packages: Path) -> None:
    (packages / "three.bare.txt").write_text("# python: 3.99\nthree==3\n")
    # The stand-in for Python claims to be any requested version.
    done = dev(checkout, "adapters", "three")
    assert done.returncode == 0, done.stderr
    (packages / "three.txt").write_text("more\n")
    done = dev(checkout, "adapters", "three", PYTHON="/bin/false")
    assert done.returncode == 1
    assert "three: not installed: it needs Python 3.99. Name one: PYTHON=/path/to/python3.99" in done.stdout


@pytest.mark.parametrize(
    ("words", "environment", "says"),
    [
        ("tset", {}, "no command 'tset'"),
        ("wheel 3.9", {}, "wheel: '3.9' is neither --whole nor one of 3.11 to 3.14"),
        ("test --torch", {}, "dev: --torch '': give a version, such as 2.15"),
        ("test --torch tests/model", {}, "dev: --torch 'tests/model': give a version, such as 2.15"),
        ("setup", {"PYTHON": "/bin/false"}, "dev: PYTHON=/bin/false is not a Python from 3.11 to 3.14"),
    ],
)
def test_what_cannot_be_is_one_line(checkout: Path, words: str, environment: dict[str, str], says: str) -> None:
    done = dev(checkout, *words.split(), **environment)
    assert done.returncode == 2
    assert says in done.stderr
    assert installs(checkout) == 0
    assert not (checkout / ".venv").exists()
