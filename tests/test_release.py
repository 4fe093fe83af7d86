"""Test the files of a release outside the package: citation, containers, environments, workflows, templates."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
YAML_FILES = sorted(
    path
    for pattern in ("CITATION.cff", "environment.yml", ".pre-commit-config.yaml", ".github/**/*.yml")
    for path in ROOT.glob(pattern)
)


def project() -> dict[str, object]:
    with open(ROOT / "pyproject.toml", "rb") as file:
        return tomllib.load(file)["project"]


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: path.name)
def test_yaml_files_are_valid(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_citation_states_version_and_licence_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == project()["version"]
    assert citation["license"] == project()["license"]
    assert {"cff-version", "title", "message", "authors"} <= citation.keys()


def test_containers_copy_files_that_exist_and_what_the_build_needs() -> None:
    docker = (ROOT / "containers/Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", docker, re.MULTILINE) for name in line.split()]
    apptainer = (ROOT / "containers/warpfold.def").read_text()
    section = apptainer.split("%files\n")[1].split("\n%")[0]
    assert sorted(line.split()[0] for line in section.split("\n") if line.strip()) == sorted(copied)
    assert {"pyproject.toml", "README.md", "settings", "warpfold"} <= set(copied)
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)
    assert set(copied) <= allowed


def test_lock_has_every_dependency_within_its_bounds() -> None:
    packaging = pytest.importorskip("packaging.requirements", reason="packaging is not installed")
    lines = [line for line in (ROOT / "requirements.lock").read_text().split("\n") if line and not line.startswith("#")]
    locked: dict[str, list[str]] = {}
    for line in lines:
        requirement = packaging.Requirement(line)
        locked.setdefault(requirement.name.lower(), []).append(str(requirement.specifier).removeprefix("=="))
    for text in project()["dependencies"]:  # type: ignore[attr-defined]
        requirement = packaging.Requirement(text)
        versions = locked[requirement.name.lower()]
        assert all(requirement.specifier.contains(version) for version in versions), text
    pinned = (ROOT / "constraints.txt").read_text()
    for name in ("torch", "triton"):
        assert f"{name}=={locked[name][0]}\n" in pinned


def test_workflow_calls_the_script_of_continuous_integration() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands == ["./dev check", ".ci/run"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o100
