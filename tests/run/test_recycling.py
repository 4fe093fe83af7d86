"""When recycling ends, and what else a prediction is asked for: options that are part of a run."""

from pathlib import Path

import numpy as np
import pytest

from warpfold import cli
from warpfold.errors import UserError
from warpfold.run.predict import PredictOptions, predict
from warpfold.run.predictor import Recycling, load

SEQUENCE = "MKTAYIAKQRQISFVKSH"


@pytest.fixture
def query(tmp_path: Path) -> Path:
    path = tmp_path / "one.fasta"
    path.write_text(f">one\n{SEQUENCE}\n")
    return path


@pytest.mark.parametrize(
    ("recycling", "passes"),
    [(Recycling(long=(17, 1)), 1), (Recycling(long=(18, 1)), 3), (Recycling(tolerance=1e6), 1)],
)
def test_recycling_ends_by_length_or_tolerance(
    recycling: Recycling, passes: int, query: Path, tiny_params: Path, tmp_path: Path
) -> None:
    options = PredictOptions(recycles=3, recycling=recycling)
    summary = predict(query, [], tiny_params, tmp_path / "out", options)
    assert summary["predictions"][0]["recycles"] == passes
    with pytest.raises(UserError, match="output of another run"):  # it changes the result
        predict(query, [], tiny_params, tmp_path / "out", PredictOptions(recycles=3))


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--recycle-tolerance=-1", "--recycle-tolerance -1: angstrom, at least 0"),
        ("--recycle-tolerance=nan", "--recycle-tolerance nan: angstrom, at least 0"),
        ("--max-recycles=1500", "--max-recycles 1500: is not LENGTH:RECYCLES; write two numbers, such as 1500:3"),
        ("--max-recycles=a:b", "--max-recycles a:b: is not LENGTH:RECYCLES; write two numbers, such as 1500:3"),
    ],
)
def test_bad_options_are_one_line(
    option: str, said: str, query: Path, tiny_params: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["predict", str(query), "--params", str(tiny_params), "--out", str(tmp_path / "out"), option]
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert capsys.readouterr().err.strip().endswith(said)
    assert not (tmp_path / "out").exists()


def test_contacts_and_distogram_on_demand(query: Path, tiny_params: Path, tmp_path: Path) -> None:
    summary = predict(query, [], tiny_params, tmp_path / "out", PredictOptions(distogram=True))
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
