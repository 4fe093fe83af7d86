"""Test text that terminals, pages and parsers may misread: encodings, closed streams, markup, formulas, odd numbers."""

import base64
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import warpfold
from tests.data.structure.test_awkward_files import pdb_chain, plain
from warpfold.data.example.job_files import read_jobs
from warpfold.report.figures import draw_shares
from warpfold.report.report import ReportPage, Section, render


def score(folder: Path, encoding: str | None = None, close: str = "") -> subprocess.CompletedProcess[bytes]:
    path = folder / "a.pdb"
    path.write_text(pdb_chain(plain("GASTVLKEVG"), "A") + "END\n")
    environment = os.environ | ({"PYTHONIOENCODING": encoding} if encoding else {})
    command = f'"{sys.executable}" -m warpfold score "{path}" "{path}" {close}'
    return subprocess.run(command, shell=True, env=environment, capture_output=True, check=False, timeout=120)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "gbk", "koi8-r"])
def test_output_in_other_encodings(encoding: str, tmp_path: Path) -> None:
    ended = score(tmp_path, encoding)
    assert ended.returncode == 0, ended.stderr
    assert b"RMSD of Ca         0.000" in ended.stdout


@pytest.mark.parametrize("close", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams(close: str, tmp_path: Path) -> None:
    ended = score(tmp_path, close=close)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_labels_of_figures_are_escaped_and_are_no_formulas() -> None:
    name = '"><script>alert(1)</script> $\\frac{$'
    svg = draw_shares({name: np.linspace(0, 1, 5).tolist()}, name)
    assert "<script>" not in svg
    assert "&lt;script&gt;" in svg


def test_a_page_allows_its_own_scripts_and_styles_alone() -> None:
    figure = '<i class="a" style="color:red">x</i><b style="top:0">y</b>'
    page = render(ReportPage("t", "l", sections=[Section("s", figures=[(figure, "c")])]))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "unsafe" not in policy[1]
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    for content in (*scripts, *re.findall(r"<style[^>]*>(.*?)</style>", page, re.DOTALL)):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'" in policy[1]
    assert " style=" not in page
    assert '<i class="a s0">x</i><b class="s1">y</b>' in page
    assert ".s0.s0.s0{color:red}" in page


@pytest.mark.parametrize("version", ["1:1:1:1.0", "0x" + "f" * 4000, "9" * 5000, "1:30", "NO"])
def test_numbers_of_yaml_are_those_of_the_core_schema(version: str) -> None:
    text = f"version: {version}\nsequences:\n- protein: {{id: A, sequence: MKTAYIAKQR}}\n"
    (job,) = read_jobs(text.encode(), ".yaml", "x.yaml", Path(), "x")
    assert job.error
    assert "\n" not in job.error


@pytest.mark.parametrize("id", ["NO", "N", "y", "on", "1e5", "07"])
def test_ids_of_yaml_that_look_like_other_things(id: str) -> None:
    text = f"version: 1\nsequences:\n- protein: {{id: {id}, sequence: MKTAYIAKQR}}\n"
    (job,) = read_jobs(text.encode(), ".yaml", "x.yaml", Path(), "x")
    assert job.error or job.ids == (id,)


def test_names_of_folders_in_evaluations(tmp_path: Path) -> None:
    for folder in ("truth", "$\\frac{$", "<script>x<"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "t.pdb").write_text(pdb_chain(plain("GASTVLKEVG"), "A") + "END\n")
    one, other = tmp_path / "$\\frac{$", tmp_path / "<script>x<"
    warpfold.evaluate(one, tmp_path / "truth", against=[other], out=tmp_path / "out")
    assert "<script>x<" not in (tmp_path / "out/report.html").read_text()
