"""Compare WarpFold with DeepMind's official code: the cases of this folder, and of ../shared/golden* if present."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.golden import models
from tests.golden.config import model_config
from tests.golden.models import whole_model
from tests.golden.reference import CaseFiles, find, read
from tests.golden.run import PASS, run_case
from tests.training.runs import make_store, tiny_run
from warpfold.cli.params import params
from warpfold.engine.trainable import AdapterConfig, FinetuneConfig
from warpfold.model.weights.files import load_model
from warpfold.training.train import train

HERE = Path(__file__).parent
ALL = [folder for name in ("golden", "golden_design") if (folder := HERE.parents[2] / "shared" / name).is_dir()]
SELECTED = find(HERE)
WHOLE = {one.name for one in SELECTED if one.kind != "models_design"}  # the selection lacks their outputs
OTHERS = [one for folder in ALL for one in find(folder) if one.name not in WHOLE]


def _check(files: CaseFiles) -> None:
    result = run_case(files)
    bad = "; ".join(f"{c.what}: {c.error:.3g} > {c.bound:.3g}" for c in result.worst_first[:5] if not c.ok)
    assert result.verdict == PASS, f"{result.case} {result.verdict}: {result.reason or bad}"


@pytest.mark.parametrize("files", SELECTED, ids=lambda files: files.name)
def test_selected_case(files: CaseFiles) -> None:
    _check(files)


@pytest.mark.parametrize("files", OTHERS or [None], ids=lambda files: getattr(files, "name", "none"))
def test_shared_case(files: CaseFiles | None) -> None:
    if files is None:
        pytest.skip("no ../shared beside this checkout; tests/golden holds a selection of it")
    _check(files)


@pytest.mark.parametrize("name", ["monomer_model_1_ptm_guess", "multimer_v3_dimer_guess"])
def test_without_its_initial_guess_a_case_fails(name: str, tmp_path: Path) -> None:
    shutil.copytree(HERE / "models_design" / name, tmp_path / "models_design" / name)
    with np.load(tmp_path / "models_design" / name / "prev.npz", allow_pickle=False) as file:
        arrays = {key: np.zeros_like(file[key]) for key in file.files}
    np.savez(tmp_path / "models_design" / name / "prev.npz", **arrays)
    failed = [check.what for check in run_case(find(tmp_path)[0]).checks if not check.ok]
    assert {"out/representations/pair", "out/structure_module/final_atom_positions"} <= {*failed}


def test_what_was_fine_tuned_goes_back_to_deepminds_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fine-tuned model, written as DeepMind's arrays and read like a case, has the same outputs."""
    case = read(next(files for files in SELECTED if "monomer_model_1_ptm_rec2" in files.name))
    np.savez(tmp_path / "params_model_1_ptm.npz", **case.params)
    finetune = FinetuneConfig(trainable=("structure",), adapters=AdapterConfig(on=("evoformer",), rank=2))
    config = dataclasses.replace(tiny_run(steps=3, validate_every=1), finetune=finetune)
    config = dataclasses.replace(config, model=model_config(case.config, case.params))
    train(config, make_store(tmp_path / "store"), tmp_path / "run", init=tmp_path / "params_model_1_ptm.npz")

    written = params(tmp_path / "run", out=tmp_path / "tuned.npz").written
    assert written == tmp_path / "tuned.npz"
    with np.load(written, allow_pickle=False) as file:
        tuned = {name: file[name] for name in file.files}
    assert {name: (x.shape, x.dtype) for name, x in tuned.items()} == {
        name: (x.shape, x.dtype) for name, x in case.params.items()
    }
    theirs = whole_model(dataclasses.replace(case, params=tuned))
    ours = load_model(tmp_path / "run/params_best.safetensors").eval()
    monkeypatch.setattr(models, "load", lambda *_: ours)
    for name, x in whole_model(case).outputs.items():
        assert torch.equal(x, theirs.outputs[name]), name
    pair = case.expected["out/representations/pair"]
    assert np.abs(theirs.outputs["representations/pair"].detach().numpy() - pair).max() > 1e-4 * np.abs(pair).max()
