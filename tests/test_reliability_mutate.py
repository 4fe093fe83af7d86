"""Test `python -m benchmarks.reliability mutate`: the planted faults, and the report of the tests that find them."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.reliability import forks, mutants, mutate

ROOT = Path(__file__).parents[1]
EDITS = [
    ("sign", "y = a + b", "y = a - b"),
    ("sign", "y = -a", "y = a"),
    ("sign", "y += a", "y -= a"),
    ("axis", "y = x.sum(dim=-1)", "y = x.sum(dim=-2)"),
    ("axis", "y = torch.cat((a, b), 0)", "y = torch.cat((a, b), 1)"),
    ("axis", "y = x.transpose(0, 1)", "y = x"),
    ("off by one", "y = x[1:]", "y = x[2:]"),
    ("off by one", "y = x[:-1]", "y = x[:0]"),
    ("off by one", "for i in range(n): f(i)", "for i in range((n) - 1): f(i)"),
    ("off by one", "y = n - 1", "y = (n)"),
    ("mask", "y = x * mask[..., None]", "y = (x)"),
    ("mask", "y = torch.where(c, a, b)", "y = a"),
    ("mask", "y = x.masked_fill(m, 0)", "y = x"),
    ("reduction", "y = x.mean(-1)", "y = x.sum(-1)"),
    ("reduction", "y = x.amax(-1)", "y = x.amin(-1)"),
    ("collective", "y = mesh.all_gather(x, -2)", "y = x"),
    ("collective", "dist.all_reduce(x)", "pass"),
    ("adjoint", "def backward(ctx, g):\n    return g, h", "def backward(ctx, g):\n    return (g) * 0, h"),
    ("adjoint", "def backward(ctx, g):\n    dx += g", "def backward(ctx, g):\n    dx = g"),
    ("stale", "y.copy_(x)", "pass"),
    ("stale", "def f():\n    self.y = x", "def f():\n    pass"),
    ("constant", "y = 0.5", "y = (0.5 * 1.01 + 1e-3)"),
    ("constant", "y = f(a, eps=1e-5)", "y = f(a, eps=(1e-5 * 100))"),
    ("constant", "y = f(a, whole=True)", "y = f(a, whole=False)"),
    ("comparison", "y = a < b", "y = a <= b"),
    ("comparison", "y = a is None", "y = a is not None"),
    ("comparison", "y = a and b", "y = a or b"),
    ("statement", "f(x)", "pass"),
    ("statement", "def f():\n    if a:\n        x = y", "def f():\n    if False:\n        x = y"),
]


@pytest.mark.parametrize(("kind", "before", "after"), EDITS)
def test_a_kind_makes_the_edit_that_it_says(kind: str, before: str, after: str) -> None:
    made = {one.applied(before): one.kind for one in mutants.mutants("model/x.py", before)}
    assert made.get(after) == kind


@pytest.mark.parametrize(
    "source",
    [
        '"""Add 1 + 2."""',
        "assert a + 1 < b",
        "raise_ = f'{a + 1} of {b - 1}'",
        "def __repr__(self):\n    return a + b",
        "x: Annotated[int, 1 + 2]",
        "def f(x: Shape[3]) -> Shape[4]: ...",
        "logger.info(a + b)",
        "import a",
    ],
)
def test_what_changes_no_result_is_left_alone(source: str) -> None:
    assert not mutants.mutants("model/x.py", source)


def test_a_draw_repeats_and_takes_each_kind_and_a_line_once() -> None:
    counts = {"model": 20, "engine": 20}
    drawn = mutants.draw(ROOT / "warpfold", counts, 3)
    assert drawn == mutants.draw(ROOT / "warpfold", counts, 3)
    assert drawn != mutants.draw(ROOT / "warpfold", counts, 4)
    assert len({(one.path, one.line) for one in drawn}) == 40
    assert len({one.kind for one in drawn if one.room == "model"}) >= 9
    for one in drawn:
        source = (ROOT / "warpfold" / one.path).read_text(encoding="utf-8")
        compile(one.applied(source), one.path, "exec")


TOY = """
def doubled(x):
    return x + x

def capped(x):
    if x >= 10:
        return 10
    return x

def in_a_child(x):
    return x - 2

def ends(n):
    while n > 0:
        n -= 1
    return n

def unused(x):
    return x + x + x
"""
TESTS = """
import subprocess, sys
from warpfold.ops import toy

def test_doubled():
    assert toy.doubled(3) == 6

def test_capped():
    assert [toy.capped(x) for x in (3, 10, 11)] == [3, 10, 10]

def test_a_child():
    code = "import sys; from warpfold.ops.toy import in_a_child; sys.exit(in_a_child(2))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

def test_ends():
    assert toy.ends(1) == 0

def test_that_fails():
    assert toy.doubled(3) == 7
"""


@pytest.mark.slow
def test_planted_faults_are_found_and_equivalent_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plant faults in a checkout of one file.

    A test that also fails without a fault does not count as finding it, and a second run plants nothing.
    """
    root = tmp_path / "root"
    files = {"warpfold/__init__.py": "", "warpfold/ops/__init__.py": "", "warpfold/ops/toy.py": TOY}
    files |= {"tests/__init__.py": "", "tests/test_toy.py": TESTS}
    files["pyproject.toml"] = "[tool.pytest.ini_options]\nmarkers = ['slow', 'gpu']\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "all"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    for module in (forks, mutate):
        monkeypatch.setattr(module, "ROOT", root)
    monkeypatch.setattr(forks, "LOADED", ())
    wanted = {(3, "-"), (6, ">"), (11, "+"), (15, "pass"), (19, "-")}
    drawn = [one for one in mutants.mutants("ops/toy.py", TOY) if (one.line, one.after) in wanted]
    monkeypatch.setattr(mutate, "draw", lambda *_: drawn)
    monkeypatch.setattr(forks, "PATIENCE", 3.0)
    arguments = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--tests", "tests"]
    assert mutate.main(arguments) == 0
    results = mutate.read(tmp_path / "out")[1].values()
    assert {(one["line"], one["outcome"], one["killer"].rpartition("::")[2], one["how"]) for one in results} == {
        (3, "killed", "test_doubled", "failed"),
        (6, "survived", "", ""),
        (11, "killed", "test_a_child", "failed"),
        (15, "killed", "test_ends", "time"),
        (19, "not covered", "", ""),
    }
    assert (root / "warpfold/ops/toy.py").read_text() == TOY, "the checkout is as it was"
    lines = (tmp_path / "out").read_text()
    assert mutate.main(arguments) == 0
    assert (tmp_path / "out").read_text() == lines
    capsys.readouterr()
    assert mutate.main([*arguments, "--report"]) == 0
    assert "survived: ops/toy.py:6" in capsys.readouterr().out
    covered = mutate.Covered(next((tmp_path / "work").glob("covered-*.jsonl")))
    planter, hangs = mutate.Planter(tmp_path / "work", covered, 60.0), next(one for one in drawn if one.line == 15)
    names = [f"tests/test_toy.py::test_{name}" for name in ("doubled", "ends", "capped")]
    assert planter.outcomes(hangs, names) == dict(zip(names, ("passed", "failed", "passed")))
    with pytest.raises(SystemExit):
        mutate.main([*arguments, "--ask", "2"])
    assert "--ask goes with --idle" in capsys.readouterr().err
