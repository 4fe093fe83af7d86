"""Test the end of recycling and other options that are part of the identity of a run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.examples import templates
from tests.helpers import filled_model, tiny_config
from tests.ranks import run_ranks
from warpfold import predict
from warpfold.data.features.choose import SampleConfig
from warpfold.data.structure.mmcif import read_structure
from warpfold.errors import UserError
from warpfold.parallel.mesh import make_mesh
from warpfold.parallel.team import ProcessInfo, Team
from warpfold.prediction.predictor import Predictor, load

SEQUENCE = "MKTAYIAKQRQISFVKSH"


@pytest.fixture
def query(tmp_path: Path) -> Path:
    path = tmp_path / "one.fasta"
    path.write_text(f">one\n{SEQUENCE}\n")
    return path


@pytest.mark.parametrize(
    ("recycling", "passes"),
    [
        ({"max_recycles": "17:1"}, 1),
        ({"max_recycles": (18, 1)}, 3),
        ({"recycle_tolerance": 1e6}, 1),
        ({"dropout": True, "batch": 4}, 3),
    ],
)
def test_recycling_ends_by_length_or_tolerance_and_is_part_of_a_run_as_dropout_is(
    recycling: dict[str, Any], passes: int, query: Path, tiny_params: Path, tmp_path: Path
) -> None:
    options = {"recycles": 3} | recycling
    summary = predict(query, tiny_params, tmp_path / "out", **options)
    assert summary["predictions"][0]["recycles"] == passes
    assert recycling.keys() - {"batch"} <= summary["settings"].keys()
    # These options change the result.
    with pytest.raises(UserError, match="output of another run"):
        predict(query, tiny_params, tmp_path / "out", recycles=3)


def test_contacts_and_distogram_on_demand(query: Path, tiny_params: Path, tmp_path: Path) -> None:
    summary = predict(query, tiny_params, tmp_path / "out", distogram=True)
    files = summary["predictions"][0]["files"]
    distogram = np.load(tmp_path / "out/one" / files["distogram"], allow_pickle=False)
    arrays = np.load(tmp_path / "out/one" / files["arrays"], allow_pickle=False)
    n = len(SEQUENCE)
    assert distogram.shape == (n, n, 64)
    assert distogram.dtype == np.float16
    np.testing.assert_allclose(distogram.astype(float).sum(-1), 1, atol=64 * 2**-12)
    np.testing.assert_array_equal(distogram, distogram.swapaxes(0, 1))
    assert arrays["contacts"].shape == (n, n)
    assert arrays["distogram_edges"].shape == (63,)
    folded = load(tiny_params, "cpu", chunk=4).fold(SEQUENCE, name="one", distogram=True)
    np.testing.assert_allclose(folded.distogram.astype(float), distogram, atol=1e-3)
    np.testing.assert_allclose(folded.contacts, distogram[..., :19].sum(-1, dtype=float), atol=2e-3)


def test_dropout_is_drawn_by_the_seed_and_alike_under_every_plan() -> None:
    """The results agree for the template stack, on several ranks and with z in host memory.

    The structure module has no dropout.
    """
    config = tiny_config()
    model = filled_model(replace(config, evoformer=replace(config.evoformer, outer="first")))
    given = templates(2, len(SEQUENCE))

    def fold(dropout: bool, seed: int = 0, team: Team | None = None, **plan: Any) -> np.ndarray:
        predictor = Predictor(model, team=team, sample=SampleConfig(masked_fraction=0.0), **plan)
        predictor.dropout = dropout
        return predictor.fold(SEQUENCE, templates=given, seed=seed, recycles=1).positions

    def on_a_rank(axial: int, branch: int) -> np.ndarray:
        mesh = make_mesh(1, axial, branch)
        return fold(True, team=Team(ProcessInfo(mesh.world.rank, axial * branch), mesh))

    sure, drawn = fold(False), fold(True)
    # Without dropout, nothing depends on the seed.
    np.testing.assert_array_equal(fold(False, seed=1), sure)
    np.testing.assert_array_equal(fold(True), drawn)
    np.testing.assert_array_equal(fold(False), sure)
    assert np.abs(drawn - sure).max() > 0.05
    assert np.abs(fold(True, seed=1) - drawn).max() > 0.05
    plans: list[dict[str, Any]] = [{"chunk": 0}, {"chunk": 4}, {"chunk": 5, "offload": True}, {"kernels": "strict"}]
    for plan in plans:
        np.testing.assert_allclose(fold(True, **plan), drawn, atol=2e-3, err_msg=str(plan))
    for axial, branch in ((3, 1), (2, 2)):
        for found in run_ranks(on_a_rank, axial * branch, axial, branch):
            np.testing.assert_allclose(found, drawn, atol=2e-3, err_msg=f"{axial} x {branch}")


def test_recycles_are_saved(query: Path, tiny_params: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"recycles": 3, "save_recycles": True, "max_recycles": (17, 2)}
    entry = predict(query, tiny_params, tmp_path / "out", **options)["predictions"][0]
    files = [entry["files"][f"recycle_{number}"] for number in range(2)]
    assert files == ["one_recycle_0.cif", "one_recycle_1.cif"]
    predictor = load(tiny_params, "cpu", chunk=4)
    for number, (file, scores) in enumerate(zip(files, entry["recycled"], strict=True)):
        # A run with fewer recycles has the same passes and ends with this one.
        alone = predictor.fold(SEQUENCE, recycles=number)
        (chain,) = read_structure(tmp_path / "out/one" / file).chains.values()
        np.testing.assert_allclose(chain.positions, alone.positions * alone.mask[..., None], atol=2e-3)
        assert scores == {
            "mean_plddt": pytest.approx(alone.mean_plddt, abs=0.02),
            "ptm": pytest.approx(alone.ptm, abs=1e-3),
            "iptm": None,
        }
    (tmp_path / "out/one" / files[1]).unlink()
    # The protein is folded again because a file is missing.
    predict(query, tiny_params, tmp_path / "out", **options)
    assert (tmp_path / "out/one" / files[1]).is_file()
    predictor.fold(SEQUENCE, name="one").save(tmp_path / "out/one", overwrite=True)
    # Overwriting removes the files of the earlier prediction.
    assert not list((tmp_path / "out/one").glob("*_recycle_*"))
