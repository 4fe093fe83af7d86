"""Test files and folders given by mistake: the error is one line with a remedy, and nothing is left behind."""

import sys
from pathlib import Path

import pytest
import torch

import warpfold
from tests.test_cli import refused, run
from warpfold.errors import as_arguments, options_given
from warpfold.prediction.predictor import load

ONE = "MKTAYIAKQRQISFVKSH"
DOCUMENTS = {
    "a PDF document": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n",
    "a zip archive or an office document": b"PK\x03\x04\x14\x00",
    "a web page": b"<!DOCTYPE html><html><body>404</body></html>",
}


@pytest.mark.parametrize("what", DOCUMENTS)
def test_a_document_is_called_one(
    what: str, tmp_path: Path, tiny_params: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("q.fasta", "q.a3m", "q.csv"):
        Path(name).write_bytes(DOCUMENTS[what])
        says = f"{name}: is {what}, not sequences or an alignment. Pass these as plain text."
        with pytest.raises(warpfold.UserError) as error:
            warpfold.predict(name, tiny_params, "out", device="cpu")
        assert str(error.value) == says
    assert says in refused(run(capsys, "predict", "q.csv", "--params", tiny_params, "-o", "out", "--device", "cpu"))
    with pytest.raises(warpfold.UserError, match=f"q.a3m: is {what}"):
        load(tiny_params, "cpu").fold(ONE, "q.a3m")
    assert not Path("out").exists()


def test_parameters_that_are_a_web_page_are_no_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "params_model_1.npz").write_bytes(DOCUMENTS["a web page"])
    said = refused(run(capsys, "params", tmp_path / "params_model_1.npz"))
    assert said.endswith("not a readable .npz (no archive of arrays); fetch it again, or name another file\n")


def test_a_folder_below_a_file_is_no_place(
    tmp_path: Path, tiny_params: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    for out in ("file", "file/x", "file/x/y"):
        said = refused(run(capsys, "predict", ONE, "--params", tiny_params, "-o", tmp_path / out, "--device", "cpu"))
        assert said == f"error: {tmp_path / 'file'}: is a file; name a folder for the output\n"
    prediction = load(tiny_params, "cpu").fold(ONE, recycles=0)
    with pytest.raises(warpfold.UserError, match=r"file: cannot be written: .*; name another folder$"):
        prediction.save(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_options_are_named_as_they_were_given(
    tmp_path: Path, tiny_params: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same error names `--option` on the command line and the argument in Python."""
    more = ("--params", tiny_params, "-o", tmp_path / "out", "--device")
    assert "error: --device gpu: not known. " in refused(run(capsys, "predict", ONE, *more, "gpu"))
    said = refused(run(capsys, "predict", ONE, *more, "cpu", "--msa-server", "host"))
    assert said.startswith("error: --msa-server host: is no http or https address")
    said = refused(run(capsys, "search", ONE, "--database", "d", "--e-value", -1, "-o", tmp_path / "out"))
    assert said == "error: --e-value -1: a number over 0 is needed\n"
    with pytest.raises(warpfold.UserError, match=r"^msa_server host: is no http"):
        warpfold.predict(ONE, tiny_params, tmp_path / "out", msa_server="host", device="cpu")
    given = "--a-b 1: start torchrun --nproc 2 with `warpfold --a-b`, not --c"
    assert as_arguments(given, {"a_b": "a_b"}) == "a_b 1: start torchrun --nproc 2 with `warpfold --a-b`, not --c"
    with options_given():
        assert as_arguments(given, {"a_b": "a_b"}) == given


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--shard=0/4", "--shard 0/4: expected I/N with I from 1 to N, for example 3/8"),
        ("--shard=a/b", "--shard a/b: expected I/N"),
        ("--batch=0", "--batch 0: a number from 1 on, or auto"),
        ("--batch=many", "--batch many: a number from 1 on, or auto"),
        ("--recycle-tolerance=nan", "--recycle-tolerance"),
        ("--max-recycles=1500", "--max-recycles 1500: is not LENGTH:RECYCLES; write two numbers, such as 1500:3"),
        ("--max-recycles=a:b", "--max-recycles a:b: is not LENGTH:RECYCLES"),
        ("--memory=24", "not an amount of memory"),
        ("--memory=-1GB", "not an amount of memory"),
        ("--memory=lots", "not an amount of memory"),
    ],
)
def test_options_that_mean_nothing(
    given: str, said: str, tmp_path: Path, tiny_params: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(run(capsys, "predict", ONE, "--params", tiny_params, "-o", tmp_path / "out", given))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--device", "Voodoo 2"], "--device Voodoo 2: not known. Pass cpu, cuda or one of A100"),
        (["--device", "GPU"], "--device GPU: not known. Pass cuda"),
        (["--device", "cuda"], "this machine has none. Pass the memory of the device: --memory 24GB"),
        (["--memory", "24"], "not an amount of memory"),
        (["--residues", "0"], "greater than or equal to 1"),
        (["--figure", "x.pdf"], "ends in .png or .svg"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_plans_of_nothing(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(run(capsys, "plan", "tiny", *given))


def test_a_cluster_without_dask_leaves_nothing(
    tmp_path: Path, tiny_params: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.setitem(sys.modules, "distributed.scheduler", None)
    with pytest.raises(warpfold.UserError, match=r"^cluster tcp://host:1: needs Dask"):
        warpfold.predict(ONE, tiny_params, tmp_path / "out", device="cpu", cluster="tcp://host:1")
    assert not list(tmp_path.iterdir())
