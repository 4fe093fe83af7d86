"""Discovery and comparison of reference cases, and errors for broken files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import warpfold
from tests.golden.models import own_error_step
from tests.golden.reference import RoundingNoise, along_rotations, compare, find, read
from tests.golden.run import FAIL, NOT_RUN, PASS, CaseResult, run
from warpfold.cli import app
from warpfold.errors import UserError

CASES = Path(__file__).parent
UNIT = "units/template_pointwise_attention"
MODEL = "models/monomer_model_3_ensemble2_rec1"
VALUE = "attention//value_w"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create a folder with one unit and one loss, whose files a test may damage."""
    for name in (UNIT, "losses/torsion_angle_loss"):
        (tmp_path / name).parent.mkdir()
        for suffix in (".json", ".npz"):
            shutil.copy(CASES / f"{name}{suffix}", tmp_path / f"{name}{suffix}")
    return tmp_path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Create a folder with one whole model."""
    shutil.copytree(CASES / MODEL, tmp_path / MODEL)
    return tmp_path


def _rewrite(path: Path, changes: dict[str, np.ndarray | None]) -> None:
    """Change arrays of an npz, or remove them with None."""
    with np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    changed = {name: array for name, array in (arrays | changes).items() if array is not None}
    np.savez(path, **changed)


def _change(path: Path, change: Callable[[dict], object]) -> None:
    """Change values of a json file."""
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta))


def _result(folder: Path, name: str = UNIT) -> CaseResult:
    return next(result for result in run(folder) if result.case == name)


def _failed(folder: Path, name: str = UNIT) -> set[str]:
    """Return the names of the failed arrays."""
    result = _result(folder, name)
    assert result.verdict == FAIL
    return {check.what for check in result.checks if not check.ok}


def test_cases_are_found_selected_and_shown(folder: Path) -> None:
    for suffix in (".json", ".npz"):  # another size needs no entry
        shutil.copy(folder / f"{UNIT}{suffix}", folder / f"{UNIT}_other_seed{suffix}")
    seen: list[tuple[int, int, str]] = []
    results = run(folder, progress=lambda *at: seen.append(at))
    assert [result.verdict for result in results] == [PASS] * 3
    assert seen == [(0, 3, "losses/torsion_angle_loss"), (1, 3, UNIT), (2, 3, f"{UNIT}_other_seed"), (3, 3, "")]
    assert [result.case for result in run(folder / "units")] == [UNIT, f"{UNIT}_other_seed"]
    assert [result.case for result in run(folder, only="torsion")] == ["losses/torsion_angle_loss"]
    assert len(run(folder, only="units/*")) == 2
    with pytest.raises(UserError, match="none of the 3 cases"):
        run(folder, only="quantum")
    with pytest.raises(UserError, match="no such folder"):
        run(folder / "nowhere")
    (folder / "empty").mkdir()
    with pytest.raises(UserError, match="no reference case"):
        run(folder / "empty")


@pytest.mark.skipif(not (Path(warpfold.__file__).parents[1] / "tests").is_dir(), reason="not a clone")
def test_the_command_shows_a_table_or_data_and_exits_with_1_where_a_case_fails(folder: Path) -> None:
    shown = CliRunner().invoke(app, ["golden", str(folder)])
    assert (shown.exit_code, shown.stdout.splitlines()[-1]) == (0, "2 cases: 2 passed, 0 failed, 0 could not be run")
    (folder / f"{UNIT}.json").write_text("{")
    told = CliRunner().invoke(app, ["golden", str(folder), "--json"])
    data = json.loads(told.stdout)
    assert (told.exit_code, [case["verdict"] for case in data["cases"]]) == (1, [PASS, NOT_RUN])
    assert len(data["cases"][0]["checks"]) == len(read(find(folder)[0]).expected)
    assert {"what", "error", "bound", "ok"} <= data["cases"][0]["checks"][0].keys()


def test_a_wrong_output_or_gradient_fails_and_is_named(folder: Path) -> None:
    case = read(find(folder)[1])
    wrong = case.expected["out/out"].copy()
    wrong[0, 0, 0] += 1e-3
    changes = {"out/out": wrong, f"grad_params/{VALUE}": case.expected[f"grad_params/{VALUE}"] * 1.001}
    _rewrite(folder / f"{UNIT}.npz", changes)
    assert _failed(folder) == set(changes)
    [check] = [check for check in _result(folder).checks if check.what == "out/out"]
    assert check.error == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda json, npz: npz.write_bytes(b""), "EOFError"),
        (lambda json, npz: npz.write_bytes(npz.read_bytes()[:5000]), "BadZipFile"),
        (lambda json, npz: json.write_text("{"), "JSONDecodeError"),
        (lambda json, npz: json.unlink(), "No such file"),
        (lambda json, npz: _rewrite(npz, {"in/q": None}), "'q'"),
        (lambda json, npz: np.savez(npz, **{"in/q": np.array([{"a": 1}], dtype=object)}), "allow_pickle"),
    ],
)
def test_broken_files_could_not_be_run(folder: Path, damage: Callable[[Path, Path], object], reason: str) -> None:
    damage(folder / f"{UNIT}.json", folder / f"{UNIT}.npz")
    result = _result(folder)
    assert result.verdict == NOT_RUN
    assert reason in result.reason
    assert "\n" not in result.reason


def test_an_unknown_name_could_not_be_run(folder: Path) -> None:
    for suffix in (".json", ".npz"):
        (folder / f"{UNIT}{suffix}").rename(folder / f"units/quantum_attention{suffix}")
    assert "unknown name" in _result(folder, "units/quantum_attention").reason


ONES = np.ones(4)
JUDGED = {  # ours, theirs, noise, valid, whether it agrees
    "ten times the noise and a millionth of the scale": ([1.00019, 100], [1, 100], (1e-5, 100), None, True),
    "more": ([1.00021, 100], [1, 100], (1e-5, 100), None, False),
    "without noise the relative norm decides": (ONES * (1 + 0.9e-4), ONES, None, None, True),
    "a larger norm": (ONES * (1 + 1.1e-4), ONES, None, None, False),
    "zeros": (0 * ONES, 0 * ONES, None, None, True),
    "not zeros": (1e-3 * ONES, 0 * ONES, None, None, False),
    "noise of undefined entries is no excuse": (1.1 * ONES, ONES, (0.9, 1.0), None, False),
    "noise of a zero gradient is its bound": (2e-6 * ONES, -1e-6 * ONES, (1e-6, 1e-16), None, True),
    "more than that": (2e-5 * ONES, -1e-6 * ONES, (1e-6, 1e-16), None, False),
    "masked entries are not judged": ([[0, 0], [5, 5]], np.zeros((2, 2)), (0.0, 1.0), [True, False], True),
}


@pytest.mark.parametrize("name", JUDGED)
def test_arrays_are_judged_by_the_rule(name: str) -> None:
    ours, theirs, noise, valid, agrees = JUDGED[name]
    stated = None if noise is None else RoundingNoise(*noise)
    counts = None if valid is None else np.array(valid)
    assert compare("x", np.array(ours, float), np.array(theirs, float), stated, counts).ok == agrees


def test_what_is_not_finite_fails() -> None:
    assert not compare("x", np.array([np.nan, 1.0]), np.ones(2), RoundingNoise(1.0, 1.0)).ok
    assert not compare("x", np.array([np.inf, 1.0]), np.ones(2)).ok
    with pytest.raises(ValueError, match="shape"):
        compare("x", np.ones(3), np.ones(2))


def test_of_a_gradient_by_frames_what_leaves_them_frames_counts() -> None:
    rng = np.random.default_rng(0)
    rotation = np.linalg.qr(rng.normal(size=(5, 3, 3)))[0]
    rigid = np.concatenate([rotation, rng.normal(size=(5, 3, 1))], -1)
    gradient, symmetric = rng.normal(size=(5, 3, 4)), rng.normal(size=(5, 3, 3))
    stretched = gradient.copy()
    stretched[..., :3] += rotation @ (symmetric + np.swapaxes(symmetric, -1, -2))  # not along rotations
    expected = along_rotations(gradient, rigid)
    np.testing.assert_allclose(along_rotations(stretched, rigid), expected, rtol=0, atol=1e-12)
    small, turn = 1e-6, np.array([[0.0, 0, 0], [0, 0, -1], [0, 1, 0]])  # about x
    change = (gradient[..., :3] * (rotation @ (small * turn))).sum((-2, -1)) / small
    np.testing.assert_allclose(expected[:, 0], change, rtol=0, atol=1e-9)
    assert np.array_equal(expected[:, 3:], gradient[..., 3])


def test_a_whole_model_is_what_its_config_says(model: Path) -> None:
    path = model / MODEL / "config.json"
    _change(path, lambda meta: meta["config"]["heads"]["distogram"].update(weight=0.31))
    assert _failed(model, MODEL) == {"out/total_loss"}
    _change(path, lambda meta: meta["config"]["embeddings_and_evoformer"]["prev_pos"].update(max_bin=30.75))
    assert "prev_pos.max_bin = 30.75, WarpFold only 20.75" in _result(model, MODEL).reason
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        read(find(model)[0])


def test_own_errors_that_rounding_moved_are_found() -> None:
    rng = np.random.default_rng(0)
    n, c_z, bins, moved = 12, 5, 8, [3, 7]
    pair = rng.normal(size=(n, n, c_z)).astype(np.float32)
    mask = np.ones(n, np.float32)
    mask[-2:] = 0
    ours = rng.normal(size=(c_z + 1, bins))
    theirs = ours.copy()
    for i in moved:
        change = np.append(pair[i, i], 1.0) / mask.sum() ** 2
        theirs[:, 1] += change
        theirs[:, 0] -= change
    log_p = torch.log_softmax(torch.from_numpy(rng.normal(size=(n, n, bins))), -1)
    args = (torch.from_numpy(pair), log_p, torch.from_numpy(mask))
    step = own_error_step(ours, theirs, *args)
    assert step is not None
    expected = sum(float(log_p[i, i, 1] - log_p[i, i, 0]) for i in moved) / 100
    assert float(step) == pytest.approx(expected, rel=1e-6)
    assert own_error_step(ours, ours, *args) is None
