"""Test `--keep` with best:N and expressions: the kept structures do not depend on kills, shards or earlier options."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import tiny_model
from tests.prediction.test_predict_complexes import ONE, TWO, multimer
from tests.prediction.test_score_table import BINDERS, DESIGNS, Killed, keys, options, rows
from warpfold import predict
from warpfold.evaluation.layouts import find_predictions
from warpfold.model.alphafold import HeadsConfig
from warpfold.model.weights.files import save_params
from warpfold.prediction.folder import Recorder
from warpfold.prediction.outputs import Prediction
from warpfold.relaxation.files import find_targets

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def params(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save random parameters of two multimers, a monomer, and a model without the PAE head."""
    folder = tmp_path_factory.mktemp("params")
    heads = HeadsConfig(plddt_c=8, msa_classes=22)
    models = {"first": multimer(0), "second": multimer(1), "monomer": tiny_model(), "bare": multimer(0, heads=heads)}
    for name, model in models.items():
        save_params(folder / f"{name}.safetensors", model)
    return {name: folder / f"{name}.safetensors" for name in models}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, params: dict[str, Path]) -> list[dict[str, Any]]:
    """Fold five designs with two models, keep all structures, and return the rows of the score table."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "designs.fasta").write_text(DESIGNS)
    predict(folder / "designs.fasta", two(params), folder / "out", **options())
    return [row | {"clashes": int(row["clashes"])} for row in rows(folder / "out/scores.csv")]


@pytest.fixture
def designs(tmp_path: Path) -> Path:
    (tmp_path / "designs.fasta").write_text(DESIGNS)
    return tmp_path / "designs.fasta"


def two(params: dict[str, Path]) -> list[Path]:
    return [params["first"], params["second"]]


def structures(out: Path) -> set[str]:
    return {str(path.relative_to(out).parent) for path in out.glob("*/*/*.cif")}


def best(whole: list[dict[str, Any]], count: int) -> set[str]:
    ordered = sorted(whole, key=lambda row: row["clashes"])
    return {str(Path(row["structure"]).parent) for row in ordered[:count]}


def check_kept(out: Path, whole: list[dict[str, Any]], kept: set[str]) -> None:
    """Check that the table has all rows, and that exactly the structures in `kept` exist."""
    assert structures(out) == kept
    found = rows(out / "scores.csv")
    assert sorted(keys(out / "scores.csv")) == sorted(f"{row['name']} {row['model']} 0" for row in whole)
    assert {str(Path(row["structure"]).parent) for row in found if row["structure"]} == kept
    by_key = {(row["name"], row["model"]): row["clashes"] for row in whole}
    assert all(int(row["clashes"]) == by_key[row["name"], row["model"]] for row in found)
    assert not (out / "records").exists()
    assert {path.name for path in out.iterdir() if path.is_dir()} == {place.split("/")[0] for place in kept}


def test_the_best_of_a_run_keep_their_structures(
    tmp_path: Path, designs: Path, params: dict[str, Path], whole: list[dict[str, Any]]
) -> None:
    out = tmp_path / "out"
    summary = predict(designs, two(params), out, **options(keep="best:3:clashes"))
    check_kept(out, whole, best(whole, 3))
    dropped = [entry for entry in summary["predictions"] if entry.get("dropped")]
    assert (len(summary["predictions"]), len(dropped), dropped[0]["files"]) == (10, 7, {})
    assert {Path(file.path).parent for file in find_predictions(out, all_models=True).files} <= {
        out / place for place in best(whole, 3)
    }
    assert len(list(find_targets(out))) == 3
    again = predict(designs, two(params), out, **options(keep="best:03:clashes"))
    assert again["predictions"] == summary["predictions"]


def test_a_later_run_makes_again_what_it_wants(
    tmp_path: Path, designs: Path, params: dict[str, Path], whole: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, add, folded = tmp_path / "out", Recorder.add, []

    def adding(recorder: Recorder, outcome: Any) -> None:
        folded.append(outcome.item.key)
        add(recorder, outcome)

    monkeypatch.setattr(Recorder, "add", adding)
    for keep, count, new in (
        ("best:2:clashes", 2, 10),
        ("best:4:clashes", 4, 2),
        ("best:1:clashes", 1, 0),
        (None, 10, 9),
        ("best:2:clashes", 2, 0),
    ):
        folded.clear()
        predict(designs, two(params), out, **options(keep=keep))
        assert len(folded) == new
        check_kept(out, whole, best(whole, count))
    folded.clear()
    # With keep=1, the best prediction of each design keeps all its files, and the others keep their structures.
    predict(designs, two(params), out, **options(keep=1))
    assert (len(folded), len(structures(out))) == (8, 10)


@pytest.mark.parametrize("keep", ["best:3:clashes", "expression"])
@pytest.mark.parametrize("after", [1, 4, 8])
def test_a_killed_run_keeps_the_same(
    tmp_path: Path,
    designs: Path,
    params: dict[str, Path],
    whole: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    keep: str,
    after: int,
) -> None:
    """Kill the run after a record is written and before anything is deleted.

    At no time are there more structures than the limit plus one.
    """
    out, kept = tmp_path / "out", best(whole, 3)
    if keep == "expression":
        most = sorted(row["clashes"] for row in whole)[2]
        keep = f"clashes <= {most}"
    write, lines, there = Recorder.write, list[Any](), [0]

    def dying(recorder: Recorder, key: Any, result: Any) -> None:
        write(recorder, key, result)
        if "entry" in result:
            lines.append(result)
            there.append(len(structures(out)))
        if len(lines) == after:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Recorder, "write", dying)
        with pytest.raises(Killed):
            predict(designs, two(params), out, **options(keep=keep))
    assert max(there) <= len(kept) + 1
    predict(designs, two(params), out, **options(keep=keep))
    check_kept(out, whole, kept)


def test_parts_and_workers_keep_the_same(
    tmp_path: Path, designs: Path, params: dict[str, Path], whole: list[dict[str, Any]]
) -> None:
    for number in (2, 3, 1):
        predict(designs, two(params), tmp_path / "out", **options(keep="best:2:clashes"), shard=f"{number}/3")
    check_kept(tmp_path / "out", whole, best(whole, 2))


@pytest.mark.slow
def test_workers_keep_the_same(
    tmp_path: Path, designs: Path, params: dict[str, Path], whole: list[dict[str, Any]]
) -> None:
    predict(designs, two(params), tmp_path / "out", **options(keep="best:2:clashes"), workers=2)
    check_kept(tmp_path / "out", whole, best(whole, 2))


def test_what_an_expression_refuses_is_never_written(
    tmp_path: Path, designs: Path, params: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, save = [], Prediction.save

    def saving(self: Prediction, *args: Any, **more: Any) -> dict[str, str]:
        saved.append(self.name)
        return save(self, *args, **more)

    monkeypatch.setattr(Prediction, "save", saving)
    (tmp_path / "out").mkdir()
    predict(designs, params["first"], tmp_path / "out", **options(keep="length > 30 and not mean_plddt < 0"))
    assert saved == [f"d{i}" for i, binder in enumerate(BINDERS) if len(binder) > 12]
    assert len(rows(tmp_path / "out/scores.csv")) == 5


def test_single_chains_are_kept_by_their_plddt(tmp_path: Path, params: dict[str, Path]) -> None:
    (tmp_path / "q.fasta").write_text(f">a\n{ONE}\n>b\n{TWO}\n>c\n{ONE}A\n")
    predict(tmp_path / "q.fasta", params["monomer"], tmp_path / "out", **options(keep="best:1"))
    found = rows(tmp_path / "out/scores.csv")
    top = max(found, key=lambda row: float(row["mean_plddt"]))
    assert [row["name"] for row in found if row["structure"]] == [top["name"]]
    assert {row["interface"] for row in found} == {""}
