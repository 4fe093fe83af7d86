"""`predict` as a function: what it writes, which alignment goes where, how it continues, what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import warpfold
from tests.helpers import tiny_model
from warpfold.errors import UserError
from warpfold.model.weights import save_params
from warpfold.parallel.plan import inference_plan
from warpfold.run import predict as module
from warpfold.run.predict import Options, predict, read_queries
from warpfold.run.predictor import Predictor, load

ONE, TWO = "MKTAYIAKQRQISFVKSH", "GSHMLEERLGL"
FASTA = f">one first\n{ONE}\n>two\n{TWO}\n"
A3M = f">one\n{ONE}\n>a\nMKTAYIAKQRQaaISFVK--\n>b\n-KTAYLAKQRQISFVRSH\n"


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    path = tmp_path / "q.fasta"
    path.write_text(FASTA)
    return path


@pytest.fixture
def a3m(tmp_path: Path) -> Path:
    path = tmp_path / "one.a3m"
    path.write_text(A3M)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_every_record_is_folded(tmp_path: Path, fasta: Path, a3m: Path, tiny_params: Path) -> None:
    out = tmp_path / "out"
    seen: list[tuple[int, int, str]] = []
    summary = predict(fasta, [a3m], tiny_params, out, progress=lambda *at: seen.append(at))
    assert summary == json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["failures"]) == ("complete", [])
    assert [(e["name"], e["length"], e["msa_depth"]) for e in summary["predictions"]] == [
        ("one", 18, 3),
        ("two", 11, 1),
    ]
    for entry in summary["predictions"]:
        assert set(entry["files"]) == {"mmcif", "pdb", "plddt", "pae", "arrays"}
        assert all((out / entry["folder"] / name).stat().st_size for name in entry["files"].values())
    assert {p.name for p in out.iterdir()} == {"one", "two", "summary.json", "report.html"}
    assert seen[-1][:2] == (2, 2)


def test_same_seed_same_files_other_seed_others(tmp_path: Path, a3m: Path, tiny_params: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        predict(a3m, [], tiny_params, tmp_path / name, Options(seed=seed))
    a, b, c = (contents(tmp_path / name / "one") for name in "abc")
    assert a == b
    assert a["one.cif"] != c["one.cif"]


def test_recycles_ensemble_and_representations(tmp_path: Path, a3m: Path, tiny_params: Path) -> None:
    options = Options(recycles=0, ensemble=2, representations=True)
    entry = predict(a3m, [], tiny_params, tmp_path / "out", options)["predictions"][0]
    assert (entry["recycles"], entry["ensemble"]) == (0, 2)
    with np.load(tmp_path / "out" / "one" / "one.npz", allow_pickle=False) as arrays:
        assert arrays["single"].shape == (18, 20)
        assert arrays["pair"].shape == (18, 18, 12)
        assert arrays["msa"].shape == (3, 18, 16)


def test_a_failure_is_named_and_leaves_the_others_be(
    tmp_path: Path, fasta: Path, tiny_params: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fold = Predictor.fold

    def failing(self: Predictor, sequence: str, *args: object, **more: object) -> warpfold.Prediction:
        if sequence == ONE:
            raise RuntimeError("out of\nmemory")
        return fold(self, sequence, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Predictor, "fold", failing)
    out = tmp_path / "out"
    summary = predict(fasta, [], tiny_params, out)
    assert summary["failures"] == [{"name": "one", "error": "RuntimeError: out of memory"}]
    assert summary["status"] == "failed"
    assert [e["name"] for e in summary["predictions"]] == ["two"]
    assert not (out / "one").exists()
    assert "out of memory" in (out / "report.html").read_text()

    monkeypatch.setattr(Predictor, "fold", fold)
    again = predict(fasta, [], tiny_params, out)  # only what failed is folded
    assert again["status"] == "complete"
    assert again["predictions"][0] == summary["predictions"][0]


def test_a_stopped_run_continues(
    tmp_path: Path, fasta: Path, tiny_params: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, one = tmp_path / "out", module.fold_one

    def stopped(predictor: Predictor, query: module.Query, *args: object) -> dict[str, object]:
        if query.name == "two":
            raise KeyboardInterrupt
        return one(predictor, query, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "fold_one", stopped)
    with pytest.raises(KeyboardInterrupt):
        predict(fasta, [], tiny_params, out)
    assert json.loads((out / "summary.json").read_text())["status"] == "running"
    before = (out / "one" / "one.cif").stat().st_mtime_ns
    monkeypatch.setattr(module, "fold_one", one)
    assert len(predict(fasta, [], tiny_params, out)["predictions"]) == 2
    assert (out / "one" / "one.cif").stat().st_mtime_ns == before


def test_another_run_is_refused_and_replaced_by_force(
    tmp_path: Path, fasta: Path, a3m: Path, tiny_params: Path
) -> None:
    out = tmp_path / "out"
    predict(fasta, [], tiny_params, out)
    before = contents(out)
    with pytest.raises(UserError, match="another run"):
        predict(a3m, [], tiny_params, out)
    assert contents(out) == before
    predict(a3m, [], tiny_params, out, Options(force=True))
    assert {p.name for p in out.iterdir()} == {"one", "summary.json", "report.html"}
    with pytest.raises(UserError, match="something else"):
        predict(a3m, [], tiny_params, tmp_path, Options(force=True))


def test_alignments_find_their_records(tmp_path: Path, fasta: Path, a3m: Path) -> None:
    more = tmp_path / "more.sto"
    more.write_text(f"# STOCKHOLM 1.0\none {ONE}\nz   MKTAYIAKQRQISFVKSA\n//\n")
    queries = read_queries(fasta, [more, a3m])
    assert [(q.name, len(q.alignment)) for q in queries] == [("one", 4), ("two", 1)]
    (own,) = read_queries(a3m, [more])
    assert (own.name, own.sequence, len(own.alignment)) == ("one", ONE, 4)


@pytest.mark.parametrize(
    ("query", "msa", "message"),
    [
        (">a\nMKT\n>A\nGSH\n", None, "several records are called a"),
        (">a\nMKT1\n", None, "'1'"),
        (">a\n\n", None, "no sequence"),
        ("", None, "is empty"),
        ("MKT\n", None, "does not start with a '>'"),
        (">a\nMKT\n", ">b\nMKV\n", "differs from the query"),
        (">a\nMKT\n", ">a\nMKT\n>b\nMK\n", "row 2"),
        (FASTA, ">b\nMKV\n", "the sequence of no record"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    tmp_path: Path, tiny_params: Path, query: str, msa: str | None, message: str
) -> None:
    (tmp_path / "q.fasta").write_text(query)
    msas = [tmp_path / "q.a3m"] if msa else []
    if msa:
        msas[0].write_text(msa)
    with pytest.raises(UserError, match=message) as error:
        predict(tmp_path / "q.fasta", msas, tiny_params, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_parameters_that_are_none(tmp_path: Path, fasta: Path) -> None:
    wrong = tmp_path / "params.npz"
    np.savez(wrong, a=np.zeros(3))
    for params, message in ((tmp_path / "missing", "cannot be read"), (fasta, "safetensors"), (wrong, "params.npz")):
        with pytest.raises(UserError, match=message):
            predict(fasta, [], params, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- from Python


def test_folding_in_memory(tiny_params: Path) -> None:
    predictor = load(tiny_params, device="cpu")
    rows = ["MKTAYIAKQRQaaISFVK--", "-KTAYLAKQRQISFVRSH"]
    p = predictor.fold(ONE, rows)
    n = len(ONE)
    assert (p.positions.shape, p.mask.shape, p.plddt.shape) == ((n, 37, 3), (n, 37), (n,))
    assert p.pae is not None
    assert p.single is not None
    assert p.details["msa_depth"] == 3
    assert 0 <= p.plddt.min() <= p.plddt.max() <= 100
    assert p.max_pae is not None
    assert 0 <= p.pae.min() <= p.pae.max() <= p.max_pae
    with_query = predictor.fold(ONE.lower(), [ONE, *rows])
    np.testing.assert_array_equal(p.positions, with_query.positions)
    assert predictor.fold(ONE, rows, representations=False).pair is None


def test_unusual_letters_are_what_the_alphabet_says(tiny_params: Path) -> None:
    predictor = load(tiny_params, device="cpu")
    assert predictor.fold("MUBZX").sequence == "MCDEX"
    with pytest.raises(UserError, match="no amino acid"):
        predictor.fold("MK*")


def test_chunks_change_rounding_alone(tiny_params: Path) -> None:
    whole = load(tiny_params, device="cpu", chunk=0).fold(ONE, ["-KTAYLAKQRQISFVRSH"])
    sliced = load(tiny_params, device="cpu", chunk=5).fold(ONE, ["-KTAYLAKQRQISFVRSH"])
    np.testing.assert_allclose(whole.plddt, sliced.plddt, atol=1e-2)
    np.testing.assert_allclose(whole.pair, sliced.pair, atol=1e-3)


def test_the_settings_of_the_model_stay(tiny_params: Path) -> None:
    predictor = load(tiny_params, device="cpu")
    before = replace(predictor.model.config)
    predictor.fold(TWO, recycles=0, ensemble=3)
    assert predictor.model.config == before
    with pytest.raises(UserError, match="recycles"):
        predictor.fold(TWO, recycles=-1)


def test_long_proteins_are_cut_and_short_ones_are_not() -> None:
    import torch

    def chunk(residues: int, clusters: int, extra: int) -> int | None:
        batch = {"msa_feat": torch.empty(1, clusters, residues, 0), "extra_msa": torch.empty(1, extra, residues)}
        plan = inference_plan(batch)
        assert plan.in_place == (plan.chunk is not None)
        return plan.chunk

    assert chunk(60, 32, 64) is None
    assert chunk(400, 128, 5120) == 6
    assert chunk(20_000, 512, 5120) == 4


def test_folding_samples_the_alignment_as_training_did(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    save_params(path, tiny_model(), {"max_msa": 7, "max_extra": 3, "empty_extra": "query"})
    sample = load(path).sample
    assert (sample.max_msa, sample.max_extra, sample.empty_extra) == (7, 3, "query")
    save_params(path, tiny_model())
    assert (load(path).sample.max_msa, load(path).sample.max_extra) == (512, 5120)
