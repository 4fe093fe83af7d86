"""The runner of reference cases: which cases it finds, how it judges, and what it reports about broken files."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from warpfold import golden
from warpfold.errors import UserError
from warpfold.golden.compare import along_rotations, compare, same_sign
from warpfold.golden.models import own_error_step
from warpfold.golden.read import BrokenCase, RoundingNoise, find, read

CASES = Path(__file__).parent
UNIT = "units/template_pointwise_attention"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one unit and one loss, whose files a test may damage."""
    for name in (UNIT, "losses/torsion_angle_loss"):
        (tmp_path / name).parent.mkdir()
        for suffix in (".json", ".npz"):
            shutil.copy(CASES / f"{name}{suffix}", tmp_path / f"{name}{suffix}")
    return tmp_path


def _rewrite(path: Path, **changes: np.ndarray | None) -> None:
    """Change arrays of an npz ("/" written as "__"), or drop them with None."""
    with np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    for name, array in changes.items():
        arrays.pop(name.replace("__", "/"))
        if array is not None:
            arrays[name.replace("__", "/")] = array
    np.savez(path, **arrays)


MODEL = "models/monomer_model_3_ensemble2_rec1"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with one whole model."""
    shutil.copytree(CASES / MODEL, tmp_path / MODEL)
    return tmp_path


def _verdict(folder: Path, name: str = UNIT) -> golden.CaseResult:
    return next(result for result in golden.run(folder) if result.case == name)


def test_cases_of_a_part_of_the_layout_pass(folder: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    results = golden.run(folder, progress=lambda *at: seen.append(at))
    assert [result.verdict for result in results] == [golden.PASS, golden.PASS]
    assert seen == [(0, 2, "losses/torsion_angle_loss"), (1, 2, UNIT), (2, 2, "")]
    assert golden.exit_code(results) == 0
    assert [result.case for result in golden.run(folder / "units")] == [UNIT]


def test_only_selects_by_word_and_by_pattern(folder: Path) -> None:
    assert [result.case for result in golden.run(folder, only="torsion")] == ["losses/torsion_angle_loss"]
    assert [result.case for result in golden.run(folder, only="units/*")] == [UNIT]
    with pytest.raises(UserError, match="none of the 2 cases"):
        golden.run(folder, only="quantum")


def test_a_folder_without_cases_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no reference case"):
        golden.run(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        golden.run(tmp_path / "nowhere")


def test_another_size_of_a_known_case_needs_no_entry(folder: Path) -> None:
    for suffix in (".json", ".npz"):
        shutil.copy(folder / f"{UNIT}{suffix}", folder / f"{UNIT}_other_seed{suffix}")
    assert _verdict(folder, f"{UNIT}_other_seed").verdict == golden.PASS


def test_a_wrong_number_fails_and_is_named(folder: Path) -> None:
    path = folder / f"{UNIT}.npz"
    wrong = read(find(folder)[1]).expected["out/out"].copy()
    wrong[0, 0, 0] += 1e-3
    _rewrite(path, out__out=wrong)
    result = _verdict(folder)
    assert result.verdict == golden.FAIL
    assert result.worst is not None
    assert result.worst.what == "out/out"
    assert result.worst.error == pytest.approx(1e-3, rel=1e-2)
    assert golden.exit_code([result]) == 1


def test_a_wrong_gradient_fails(folder: Path) -> None:
    case = read(find(folder)[1])
    name = "grad_params/attention//value_w"
    _rewrite(folder / f"{UNIT}.npz", **{name.replace("/", "__", 1): case.expected[name] * 1.001})
    assert [check.what for check in golden.failures(_verdict(folder))] == [name]


@pytest.mark.parametrize("keep", [0, 100, 5000])
def test_a_file_that_was_cut_short_could_not_be_run(folder: Path, keep: int) -> None:
    path = folder / f"{UNIT}.npz"
    path.write_bytes(path.read_bytes()[:keep])
    result = _verdict(folder)
    assert result.verdict == golden.NOT_RUN
    assert "template_pointwise_attention.npz" in result.reason
    assert "\n" not in result.reason
    assert golden.exit_code([result]) == 1


def test_spoilt_files_could_not_be_run(folder: Path) -> None:
    (folder / f"{UNIT}.json").write_text("{")
    assert "not JSON" in _verdict(folder).reason
    (folder / f"{UNIT}.json").unlink()
    assert _verdict(folder).verdict == golden.NOT_RUN
    (folder / "units" / "quantum_attention.json").write_text(json.dumps({"config": {}}))
    assert "npz" in _verdict(folder, "units/quantum_attention").reason


def test_an_unknown_name_could_not_be_run(folder: Path) -> None:
    for suffix in (".json", ".npz"):
        (folder / f"{UNIT}{suffix}").rename(folder / f"units/quantum_attention{suffix}")
    result = _verdict(folder, "units/quantum_attention")
    assert result.verdict == golden.NOT_RUN
    assert "unknown name" in result.reason


def test_missing_and_misshapen_parameters_are_named(folder: Path) -> None:
    _rewrite(folder / f"{UNIT}.npz", **{"params__attention//value_w": None})
    meta = json.loads((folder / f"{UNIT}.json").read_text())
    meta["param_spec"].pop("attention//value_w")
    (folder / f"{UNIT}.json").write_text(json.dumps(meta))
    result = _verdict(folder)
    assert result.verdict == golden.NOT_RUN
    assert "attention//value_w" in result.reason


def test_arrays_that_nobody_answers_could_not_be_run(folder: Path) -> None:
    _rewrite(folder / f"{UNIT}.npz", out__out=None)
    assert _verdict(folder).verdict == golden.NOT_RUN


def test_pickled_arrays_are_refused(folder: Path) -> None:
    np.savez(folder / f"{UNIT}.npz", **{"in/q": np.array([{"a": 1}], dtype=object)})
    result = _verdict(folder)
    assert result.verdict == golden.NOT_RUN
    assert "allow_pickle" in result.reason


def test_checksums_catch_another_generator(folder: Path) -> None:
    _rewrite(folder / f"{UNIT}.npz", **{f"params__attention//{k}": None for k in ("query_w", "key_w", "value_w")})
    _rewrite(folder / f"{UNIT}.npz", **{f"params__attention//{k}": None for k in ("output_w", "output_b")})
    meta = json.loads((folder / f"{UNIT}.json").read_text())
    meta["shapes"] = {}
    path = folder / f"{UNIT}.json"
    path.write_text(json.dumps(meta))
    assert _verdict(folder).verdict == golden.PASS  # made from the recipe
    meta["param_checksums"] = {"attention//query_w": {"sum": 1e3, "abs_sum": 1e3}}
    path.write_text(json.dumps(meta))
    assert "sums to" in _verdict(folder).reason


def test_an_entity_that_is_taken_for_another_fails(tmp_path: Path) -> None:
    for suffix in (".json", ".npz"):
        (tmp_path / "units").mkdir(exist_ok=True)
        shutil.copy(CASES / f"units/relpos_multimer{suffix}", tmp_path / f"units/relpos_multimer{suffix}")
    path = tmp_path / "units/relpos_multimer.npz"
    other = read(find(tmp_path)[0]).inputs["entity_id"].copy()
    assert _verdict(tmp_path, "units/relpos_multimer").verdict == golden.PASS
    other[-1] += 1
    _rewrite(path, in__entity_id=other)
    result = _verdict(tmp_path, "units/relpos_multimer")
    assert result.verdict == golden.FAIL
    assert golden.summary([result]) == "1 cases: 0 passed, 1 failed, 0 could not be run"
    assert golden.exit_code([result]) == 1


def test_results_are_shown_and_told(folder: Path) -> None:
    results = golden.run(folder)
    assert golden.table(results).row_count == 2
    told = json.loads(json.dumps(golden.as_data(results), allow_nan=False))
    assert [case["verdict"] for case in told["cases"]] == ["pass", "pass"]
    assert {"what", "error", "bound", "ok"} <= told["cases"][0]["worst"].keys()
    assert len(told["cases"][1]["checks"]) == 8


def test_bound_is_ten_times_the_noise_and_a_millionth_of_the_scale() -> None:
    theirs = np.array([1.0, 100.0])
    noise = RoundingNoise(max_abs_diff=1e-5, max_abs=100.0)
    assert compare("x", theirs + 1.9e-4, theirs, noise).ok
    assert not compare("x", theirs + 2.1e-4, theirs, noise).ok


def test_without_noise_the_relative_norm_decides() -> None:
    theirs = np.full(100, 2.0)
    assert compare("x", theirs * (1 + 0.9e-4), theirs).ok
    assert not compare("x", theirs * (1 + 1.1e-4), theirs).ok
    assert compare("x", np.zeros(3), np.zeros(3)).ok
    assert not compare("x", np.full(3, 1e-3), np.zeros(3)).ok


def test_noise_of_undefined_entries_is_no_excuse() -> None:
    theirs, noise = np.ones(4), RoundingNoise(max_abs_diff=0.9, max_abs=1.0)
    assert not compare("x", theirs * 1.1, theirs, noise).ok


def test_noise_of_a_zero_gradient_is_its_bound() -> None:
    noise = RoundingNoise(max_abs_diff=1e-6, max_abs=1e-16)
    assert compare("x", np.full(4, 2e-6), np.full(4, -1e-6), noise).ok
    assert not compare("x", np.full(4, 2e-5), np.full(4, -1e-6), noise).ok


def test_masked_entries_are_reported_and_not_judged() -> None:
    theirs = np.zeros((2, 3))
    ours = theirs.copy()
    ours[1] = 5.0
    check = compare("x", ours, theirs, RoundingNoise(0.0, 1.0), valid=np.array([True, False]))
    assert check.ok
    assert check.masked_error == 5.0


def test_what_is_not_finite_fails() -> None:
    assert not compare("x", np.array([np.nan, 1.0]), np.ones(2), RoundingNoise(1.0, 1.0)).ok
    assert not compare("x", np.array([np.inf, 1.0]), np.ones(2)).ok
    with pytest.raises(ValueError, match="shape"):
        compare("x", np.ones(3), np.ones(2))


def test_quaternions_count_up_to_sign() -> None:
    theirs = np.array([[0.5, 0.5, -0.5, 0.5, 1.0, 2.0, 3.0]])
    turned = theirs * np.array([-1, -1, -1, -1, 1, 1, 1])
    assert np.array_equal(same_sign(turned, theirs), theirs)
    assert np.array_equal(same_sign(theirs, theirs), theirs)


def test_of_a_gradient_by_frames_what_leaves_them_frames_counts() -> None:
    rng = np.random.default_rng(0)
    rotation = np.linalg.qr(rng.normal(size=(5, 3, 3)))[0]
    rigid = np.concatenate([rotation, rng.normal(size=(5, 3, 1))], -1)
    gradient, symmetric = rng.normal(size=(5, 3, 4)), rng.normal(size=(5, 3, 3))
    stretched = gradient.copy()
    stretched[..., :3] += rotation @ (symmetric + np.swapaxes(symmetric, -1, -2))  # along it, no rotation stays one
    expected = along_rotations(gradient, rigid)
    np.testing.assert_allclose(along_rotations(stretched, rigid), expected, rtol=0, atol=1e-12)
    small, turn = 1e-6, np.array([[0.0, 0, 0], [0, 0, -1], [0, 1, 0]])  # about x
    change = (gradient[..., :3] * (rotation @ (small * turn))).sum((-2, -1)) / small
    np.testing.assert_allclose(expected[:, 0], change, rtol=0, atol=1e-9)
    assert np.array_equal(expected[:, 3:], gradient[..., 3])


def test_every_selected_case_reads() -> None:
    for files in find(CASES):
        assert read(files).expected, files.name


def test_reader_refuses_a_model_without_config(tmp_path: Path) -> None:
    (tmp_path / "models" / "empty").mkdir(parents=True)
    with pytest.raises(BrokenCase, match=r"config\.json"):
        read(find(tmp_path)[0])


def test_a_whole_model_that_is_asked_for_something_else_could_not_be_run(model: Path) -> None:
    path = model / MODEL / "config.json"
    meta = json.loads(path.read_text())
    meta["config"]["embeddings_and_evoformer"]["prev_pos"]["max_bin"] = 30.75
    path.write_text(json.dumps(meta))
    result = _verdict(model, MODEL)
    assert result.verdict == golden.NOT_RUN
    assert "prev_pos.max_bin = 30.75, WarpFold only 20.75" in result.reason


def test_settings_of_a_whole_model_are_read_from_its_config(model: Path) -> None:
    path = model / MODEL / "config.json"
    meta = json.loads(path.read_text())
    meta["config"]["heads"]["structure_module"]["num_layer"] -= 1
    path.write_text(json.dumps(meta))
    assert "shape" in _verdict(model, MODEL).reason
    meta["config"]["heads"]["structure_module"]["num_layer"] += 1
    meta["config"]["heads"]["distogram"]["weight"] = 0.31
    path.write_text(json.dumps(meta))
    assert [check.what for check in golden.failures(_verdict(model, MODEL))] == ["out/total_loss"]


def test_wrong_numbers_of_a_whole_model_fail(model: Path) -> None:
    path = model / MODEL / "outputs.npz"
    name = "structure_module/final_atom_positions"
    wrong = read(find(model)[0]).expected[f"out/{name}"].copy()
    wrong[2, 1] += 0.05
    _rewrite(path, **{name.replace("/", "__", 1): wrong})
    assert f"out/{name}" in {check.what for check in golden.failures(_verdict(model, MODEL))}


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
