"""Test `warpfold finetune` at a very small scale: it runs every stage, resumes, and writes nothing for bad input."""

import dataclasses
import hashlib
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import warpfold
from tests.finetuning.test_relatives import store_of
from tests.helpers import tiny_model
from tests.test_cli import run
from warpfold import settings
from warpfold.data.load.order import Source, split_keys
from warpfold.data.search.search import SearchOptions
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import entry_keys
from warpfold.data.structure.mmcif import read_structure
from warpfold.data.structure.write import write_mmcif
from warpfold.data.synthetic.folder import generate
from warpfold.errors import UserError
from warpfold.evaluation.before_after import (
    CA,
    DOCKQ,
    INTERFACE_LDDT,
    LDDT,
    Measure,
    fold_before_after,
    means,
    target_with_truth,
    true_chains,
)
from warpfold.finetuning.finetune import (
    CHAIN,
    COMPLEX,
    FinetuneOptions,
    TrainingLine,
    _rehearsal,
    _searched,
    both_models,
    compared_scores,
    distinct_entries,
)
from warpfold.finetuning.page import verdict
from warpfold.finetuning.split import Split
from warpfold.model.alphafold import AlphaFold, HeadsConfig
from warpfold.model.template import TemplateConfig
from warpfold.model.weights.files import save_params
from warpfold.progress import no_progress
from warpfold.scoring.intervals import paired_difference
from warpfold.training.config import RunConfig

SMALL = {
    "data.max_msa": 4,
    "data.max_extra": 4,
    "data.crop": 32,
    "optim.accumulate": 1,
    "plan.precision": "fp32",
    "train.validate_every": 2,
    "loss.violation": 0.0,
}


@pytest.fixture(scope="module")
def proteins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finetuning") / "proteins"
    generate(folder, 14, 5, max_length=32)
    return folder


@pytest.fixture(scope="module")
def given(proteins: Path, tiny_params: Path) -> dict[str, Any]:
    return {"structures": proteins / "mmcif", "msas": proteins / "msas", "init": tiny_params, "steps": 4, "set": SMALL}


@pytest.fixture(scope="module")
def done(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("finetuning") / "tuned"
    return out, warpfold.finetune(out=out, device="cpu", **given)


def test_everything_is_there(done: tuple[Path, dict[str, Any]]) -> None:
    out, result = done
    assert json.loads(json.dumps(result)) == json.loads((out / "summary.json").read_text())
    assert result["status"] == "complete"
    assert sum(result["entries"].values()) == 14
    held = result["entries"]["test"]
    for folder in ("before", "after"):
        assert len(list((out / folder).iterdir())) == held
    assert set(result["compared"]["test"]) == {"lddt_ca", "lddt", "tm", "gdt_ts"}
    assert result["compared"]["test"]["lddt_ca"]["targets"] == held
    page, card = (out / "report.html").read_text(), (out / "card.md").read_text()
    assert verdict(result) in card
    assert {"packing", "training", "folding"} <= set(result["seconds"])
    assert "Is it better?" in page
    assert result["params"]["sha256"] in card
    assert "`store`, " in card
    for text in ("| what was trained | all |", "| split | by cluster", "## Validations", "accumulate = "):
        assert text in card
    for scores in result["compared"]["test"].values():
        assert f"{scores['before']:.4f} | {scores['after']:.4f}" in card


def test_the_summary_says_what_was_done(
    done: tuple[Path, dict[str, Any]], given: dict[str, Any], tiny_params: Path
) -> None:
    out, result = done
    test, config = result["settings"]["train"]["test"], settings.build(RunConfig, result["settings"])
    assert result["entries"] == {"training": 10, "validation": 2, "test": 2}
    assert (sorted(result["tested"]), result["chains"], result["dropped"]) == (sorted(test), 14, {})
    assert (result["without_alignment"], result["left_out"], result["split_by"]) == ([], {}, "cluster")
    assert (result["format"], result["seed"], result["split_identity"]) == ("warpfold-finetune-1", 0, 0.3)
    assert (result["steps"], result["ended"], result["command"]) == (4, None, "")
    for kind, path in (("init", tiny_params), ("params", out / "params.safetensors")):
        assert result[kind]["file"] == path.name
        assert result[kind]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert result["folded"] == {
        "recycles": config.model.recycles,
        "ensemble": config.model.ensemble,
        "max_msa": 4,
        "max_extra": 4,
        "max_templates": 0,
        "seed": 0,
        "equal_weights": result["params"]["step"] == 0,
    }
    assert set(result["machine"]) == {"device", "threads", "system"}
    assert (result["machine"]["device"], set(result["versions"])) == ("cpu", {"warpfold", "torch", "python"})
    assert list(result["seconds"]) == ["searching", "packing", "training", "folding"]
    assert all(0 <= value < 300 and value == round(value, 1) for value in result["seconds"].values())
    assert result["seconds"]["training"] > 0
    # The predictions are those after training.
    assert len(result["predictions"]) == 2
    for name, entry in zip(result["tested"], result["predictions"]):
        assert entry["name"] == name
        with np.load(out / "after" / entry["folder"] / entry["files"]["arrays"], allow_pickle=False) as arrays:
            assert entry["mean_plddt"] == pytest.approx(arrays["plddt"].mean(), abs=0.006)
    after = json.loads(json.dumps(result["predictions"]))
    assert all((out / "before" / entry["folder"]).is_dir() for entry in after)
    assert [row["kind"] for row in map(json.loads, (out / "run/metrics.jsonl").open())].count("validation") >= 2


def test_the_test_was_neither_trained_on_nor_validated(done: tuple[Path, dict[str, Any]]) -> None:
    out, result = done
    rows = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    seen = {name for row in rows if row["kind"] == "step" for name in row["examples"]}
    validated = {name for row in rows if row["kind"] == "validation" for name in row["examples"]}
    test = set(result["settings"]["train"]["test"])
    assert test
    assert not test & (seen | validated)
    assert not seen & validated


def test_the_parameters_are_those_of_the_best_validation(done: tuple[Path, dict[str, Any]]) -> None:
    out, result = done
    rows = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    scores = {row["step"]: row["lddt_ca"] for row in rows if row["kind"] == "validation"}
    assert scores[result["params"]["step"]] == max(scores.values())
    kept = (out / "run" / "params_best.safetensors").read_bytes()
    assert (out / "params.safetensors").read_bytes() == kept


def test_the_same_split_again(done: tuple[Path, dict[str, Any]], given: dict[str, Any], tmp_path: Path) -> None:
    out, split = tmp_path / "tuned", done[0] / "split.toml"
    warpfold.finetune(out=out, device="cpu", split=split, seed=7, trainable="structure", **{**given, "steps": 2})
    assert (out / "split.toml").read_text() == split.read_text()


def test_a_general_store_is_rehearsed(done: tuple[Path, dict[str, Any]], given: dict[str, Any], tmp_path: Path) -> None:
    # A tenth of the general store, two proteins, is held out to measure what the model forgets.
    generate(tmp_path / "others", 20, 6, max_length=32)
    warpfold.pack(tmp_path / "others/mmcif", tmp_path / "others/msas", tmp_path / "general")
    again = {**given, "steps": 12}
    result = warpfold.finetune(out=tmp_path / "tuned", device="cpu", rehearse=f"{tmp_path / 'general'}=0.5", **again)
    rows = [json.loads(line) for line in (tmp_path / "tuned/run/metrics.jsonl").read_text().splitlines()]
    drawn = {name.split(":")[0] for row in rows if row["kind"] == "step" for name in row["examples"]}
    assert drawn == {"store", "general"}
    assert result["compared"]["general"]["lddt_ca"]["targets"] == 2
    # The predictions of the summary are those of the test alone, and both are in the folders.
    assert [entry["name"] for entry in result["predictions"]] == result["tested"]
    assert len(list((tmp_path / "tuned/after").iterdir())) == len(result["tested"]) + 2
    assert (tmp_path / "tuned/report.html").read_text().count("Held-out entries of the general store") >= 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"structures": "few"}, "too few"),
        ({"msas": "strangers"}, "no alignment has the sequence"),
        ({"init": "nowhere.safetensors"}, "nowhere.safetensors"),
        ({"set": {"model.c_z": 20}}, "parameters of another model"),
        ({"set": {"data.crop": 0}}, "crop"),
        ({"trainable": "evofrmer"}, "evoformer"),
        ({"adapters": 2, "set": {"finetune.adapters.on": ["nowhere"]}}, "nowhere"),
        ({"split": "split.toml", "one_family": True}, "leave one of them out"),
        ({"rehearse": "general=2"}, "general"),
    ],
)
def test_bad_input(
    given: dict[str, Any], proteins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few").mkdir()
    for file in sorted((proteins / "mmcif").iterdir())[:5]:
        shutil.copy(file, tmp_path / "few")
    (tmp_path / "strangers").mkdir()
    (tmp_path / "strangers" / "other.a3m").write_text(">other\nMKVLAAGIVGLLLAAGCQWPFWEK\n")
    (tmp_path / "split.toml").write_text("")
    with pytest.raises(UserError, match=says) as error:
        warpfold.finetune(out=tmp_path / "tuned", device="cpu", **{**given, **change})
    assert "\n" not in str(error.value)
    assert not (tmp_path / "tuned" / "params.safetensors").exists()
    assert not (tmp_path / "tuned" / "run").exists()


def test_a_mistake_does_not_take_the_folder(given: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    with pytest.raises(UserError, match="no such file or folder"):
        warpfold.finetune(out=out, device="cpu", **{**given, "structures": tmp_path / "nowhere"})
    assert warpfold.finetune(out=out, device="cpu", **{**given, "steps": 1})["status"] == "complete"
    with pytest.raises(UserError, match="another run"):
        warpfold.finetune(out=out, device="cpu", **{**given, "steps": 2})


def test_kept_starting_parameters_are_said(given: dict[str, Any], proteins: Path, tmp_path: Path) -> None:
    """Train with a learning rate that ruins the model.

    The report states that nothing improved, why training ended, and what to try.
    """
    msas = tmp_path / "msas"
    shutil.copytree(proteins / "msas", msas)
    missing = sorted(msas.iterdir())[0]
    missing.unlink()
    ruin = {**SMALL, "optim.learning_rate": 10.0, "optim.warmup_steps": 1, "optim.average_decay": 0.0}
    ruin |= {"train.validate_every": 1, "train.patience": 2, "optim.clip_norm": 1e6}
    out = tmp_path / "tuned"
    lines = list[str]()
    again = {**given, "msas": msas, "set": ruin, "steps": 6}
    result = warpfold.finetune(out=out, device="cpu", progress=lambda _, __, what: lines.append(what), **again)
    assert result["params"]["step"] == 0
    assert result["folded"]["equal_weights"]
    assert "train.patience" in result["ended"]
    said = verdict(result)
    assert said.startswith("Not better: the starting parameters were kept")
    assert "Training ended after step 2 (2 validations in a row" in said
    assert "--set optim.learning_rate=2.5" in said
    assert said in (out / "card.md").read_text()
    assert "the starting parameters were kept" in (out / "report.html").read_text()
    assert len(result["without_alignment"]) == 1
    assert "1 of 14 chains without an alignment" in (out / "report.html").read_text()


def test_the_log_of_training_has_loss_speed_and_eta(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text changes only every 30 s and at validations, so that a log has no repeated lines."""
    texts, clock = list[str](), iter(range(0, 1000, 10))
    monkeypatch.setattr("warpfold.finetuning.finetune.time.monotonic", lambda: next(clock))
    line = TrainingLine(20, lambda _, __, what: texts.append(what))
    for step in range(1, 11):
        line({"kind": "step", "step": step, "loss": 2.0 - step / 10, "samples_per_second": 0.5})
    line({"kind": "validation", "step": 10, "lddt_ca": 0.7})
    printed = [text for before, text in zip(["", *texts], texts) if text != before]
    assert printed == [
        "training: loss 1.900, 2 s/sample",
        "training: loss 1.600, 2 s/sample, ETA 3 min",
        "training: loss 1.300, 2 s/sample, ETA 2 min",
        "training: loss 1.000, 2 s/sample, ETA 2 min",
        "training: validation lDDT-Cα 0.700, ETA 2 min",
    ]


def test_the_line_of_training_at_other_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other kinds repeat the last text."""
    lines = list[tuple[int, int, str]]()
    clock = iter([0.0, 0.0, 5.0, 29.5, 30.0, 61.0])
    monkeypatch.setattr("warpfold.finetuning.finetune.time.monotonic", lambda: next(clock))
    line = TrainingLine(7, lambda *given: lines.append(given))
    line({"kind": "start", "step": 0})
    line({"kind": "validation", "step": 0, "lddt_ca": 0.5})
    first = "training: loss 2.000, 1 samples/s, ETA 50 s"
    for step, rate in ((1, 7.0), (2, 7.0), (3, 1.0)):
        line({"kind": "step", "step": step, "loss": 2.0, "samples_per_second": rate})
    line({"kind": "step", "step": 4, "loss": 1.0, "samples_per_second": 0.999})
    before = "training: validation lDDT-Cα 0.500"
    # The three steps until the last row took 56 s, and three more are left.
    last = "training: loss 1.000, 1 s/sample, ETA 56 s"
    assert lines == [(0, 7, "training"), *((step, 7, before) for step in range(3)), (3, 7, first), (4, 7, last)]


def test_scores_are_compared_over_clusters() -> None:
    """Entries without one of the two scores are left out, and measures without any entry are missing."""
    pairs = [(0.12345, 0.41234), (0.3, 0.2), (math.nan, 0.9), (0.9, math.nan), (0.5, 0.9)]
    measured: list[Any] = [SimpleNamespace(predictions=(None, None), scores=pair) for pair in pairs]
    measures = [Measure("one", "", lambda _, score: score), Measure("none", "", lambda _, score: math.nan)]
    clusters = dict(zip("abcde", ("x", "y", "z", "z", "x")))
    expected = paired_difference([0.41234, 0.2, 0.9], [0.12345, 0.3, 0.5], ["x", "y", "x"])
    assert compared_scores(measured, measures, clusters) == {
        "one": {
            "before": round((0.311725 + 0.3) / 2, 4),
            "after": round((0.65617 + 0.2) / 2, 4),
            "difference": expected.difference,
            "interval": None,
            "verdict": None,
            "targets": 3,
            "clusters": 2,
            "wins": 2,
            "losses": 1,
        }
    }
    with pytest.raises(ValueError, match=r"argument 2"):
        compared_scores(measured[:4], measures, clusters)


def test_measures_of_proteins_and_complexes() -> None:
    score: Any = SimpleNamespace(
        lddt_ca=0.1, lddt=0.2, tm=0.3, gdt_ts=0.4, complex=SimpleNamespace(ilddt=0.5, dockq=0.6)
    )
    folded: Any = SimpleNamespace(predictions=(None, None), scores=(score, score))
    found = [(measure.key, *measure.of(folded)) for measure in COMPLEX]
    keys = ("lddt_ca", "lddt", "tm", "gdt_ts", "interface_lddt", "dockq")
    assert found == [(key, value, value) for key, value in zip(keys, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6))]
    assert COMPLEX[:4] == CHAIN
    score.lddt = None
    assert math.isnan(COMPLEX[1].of(folded)[0])


def test_every_option_that_affects_the_result_is_in_the_identity(tmp_path: Path) -> None:
    for name in ("init", "other", "split.toml"):
        (tmp_path / name).write_text(name)
    store = store_of(tmp_path / "store", {"a_A": "MKVLAAGIVG"})
    base = FinetuneOptions(structures=[Path("s")], init=tmp_path / "init")
    plain: dict[str, Any] = {"split": None, "one_family": False, "split_identity": 0.3, "trainable": (), "adapters": 0}
    plain |= {"msas": (), "search": (), "rehearse": None, "steps": None, "changes": (), "seed": 0, "workers": 1}
    assert base == FinetuneOptions(structures=[Path("s")], init=base.init, **plain, processes=1, memory=None)
    changes: list[dict[str, Any]] = [
        *({"structures": [Path(name)]} for name in ("t", "u")),
        *({"msas": [Path("s")]}, {"init": tmp_path / "other"}, {"search": ["s"]}, {"split": tmp_path / "split.toml"}),
        *({"rehearse": Source(store, weight=weight)} for weight in (0.5, 0.25)),
        *({"one_family": True}, {"split_identity": 0.5}, {"trainable": ["s"]}, {"adapters": 2}, {"steps": 2}),
        *({"changes": ["s"]}, {"seed": 1}),
    ]
    digests = [base.identity(), *(dataclasses.replace(base, **change).identity() for change in changes)]
    assert len(set(digests)) == len(digests)
    same = [{"workers": 2}, {"processes": 2}, {"memory": 9}]
    assert {dataclasses.replace(base, **change).identity() for change in same} == {base.identity()}
    (tmp_path / "init").write_text("changed")
    assert base.identity() != digests[0]


def test_each_sequence_is_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The FASTA file has the distinct sequences, and the alignments are written into the folder of the run."""
    generate(tmp_path / "proteins", 2, 5, max_length=32)
    first, second = sorted((tmp_path / "proteins/mmcif").iterdir())
    chains = [next(iter(read_structure(path).chains.values())) for path in (first, second)]
    first.with_name("9cpy.cif").write_text(write_mmcif("9cpy", chains[:1]))
    calls = list[Any]()

    def search(*given: Any) -> dict[str, Any]:
        calls.append(given)
        return {"failures": [{"name": "q", "error": "too long"}]}

    monkeypatch.setattr("warpfold.finetuning.finetune.searching.search", search)
    monkeypatch.setattr("warpfold.finetuning.finetune.Database.parse", lambda *given: given)
    options = FinetuneOptions(structures=[tmp_path / "proteins/mmcif"], init=tmp_path, search=["one", "two"], workers=2)
    warned = list[str]()
    monkeypatch.setattr("warpfold.finetuning.finetune.log.warning", lambda text, *values: warned.append(text % values))
    assert _searched(options, tmp_path / "out", no_progress) == tmp_path / "out/alignments"
    records = (tmp_path / "out/sequences.fasta").read_text().splitlines()
    assert records[1::2] == [chain.sequence for chain in chains]
    assert all(name.startswith(">") for name in records[::2])
    ((fasta, databases, alignments, *_, search_options, told),) = calls
    assert (fasta, alignments, told) == ([tmp_path / "out/sequences.fasta"], tmp_path / "out/alignments", no_progress)
    assert databases == [("one", {}), ("two", {})]
    assert search_options == SearchOptions(None, 2, None, None, None)
    assert warned == ["no alignment of q: too long"]


def sequences_of(count: int, seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    return ["".join(random.choice(list("ARNDCQEGHILKMFPSTWYV"), 40)) for _ in range(count)]


def test_the_rehearsed_entries(tmp_path: Path) -> None:
    """A tenth of the general store measures forgetting; relatives of tests and validations are left out."""
    own = sequences_of(3, 0)
    store = store_of(tmp_path / "own", dict(zip(("train_A", "valid_A", "test_A"), own)))
    split = Split(by="cluster", training=("train_A",), validation=("valid_A",), test=("test_A",))
    general = [*own, *sequences_of(27, 1)]
    source = Source(store_of(tmp_path / "general", {f"g{n:02d}_A": x for n, x in enumerate(general)}), weight=0.25)
    options = FinetuneOptions(structures=[], init=tmp_path, rehearse=source)
    assert _rehearsal(dataclasses.replace(options, rehearse=None), False, store, split) == (None, [], 0)
    seen = set[str]()
    for seed in range(12):
        rehearsed, forgotten, left_out = _rehearsal(dataclasses.replace(options, seed=seed), False, store, split)
        assert rehearsed is not None
        assert (rehearsed.store, rehearsed.weight) == (source.store, 0.25)
        drawn = split_keys(source.store, 3, seed)[1]
        # Relatives of training and validation entries cannot measure forgetting; those of tests can.
        assert forgotten == [key for key in drawn if key not in ("g00_A", "g01_A")]
        left = {"g01_A", "g02_A"} - set(forgotten)
        assert list(rehearsed.keys) == [key for key in source.keys if key not in left]
        assert left_out == len(left)
        seen |= set(drawn)
    assert {"g00_A", "g01_A", "g02_A"} & seen
    few = Source(store_of(tmp_path / "few", {f"f{n}_A": x for n, x in enumerate(sequences_of(8, 5))}))
    assert len(_rehearsal(dataclasses.replace(options, rehearse=few), False, store, split)[1]) == 1
    related = store_of(tmp_path / "related", {"r0_A": own[1], "r1_A": own[2]})
    with pytest.raises(UserError) as raised:
        _rehearsal(dataclasses.replace(options, rehearse=Source(related)), False, store, split)
    assert str(raised.value) == (
        f"{tmp_path / 'related'}: every entry is related to the test or the validation. Leave --rehearse out, or raise "
        "--split-identity"
    )


def test_at_most_24_entries_measure_forgetting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More entries are drawn if a cluster has several."""
    store = store_of(tmp_path / "own", {"a_A": "M" + "AG" * 20})
    split = Split(by="cluster", training=("a_A",), validation=("a_A",), test=("a_A",))
    made = store_of(tmp_path / "general", {f"g{n:03d}_A": x for n, x in enumerate(sequences_of(251, 2))})
    options = FinetuneOptions(structures=[], init=tmp_path, rehearse=Source(made))
    assert len(_rehearsal(options, False, store, split)[1]) == 24
    drawn = list(made.keys)[:30]
    monkeypatch.setattr("warpfold.finetuning.finetune.split_keys", lambda *given: (None, drawn))
    assert _rehearsal(options, False, store, split)[1] == drawn[:24]


def test_new_heads_start_with_the_weights_of_the_seed(tmp_path: Path) -> None:
    """The model before training lacks the PAE head. One other tensor differs between the two models."""
    init, params = tmp_path / "init.safetensors", tmp_path / "params.safetensors"
    templates = TemplateConfig(enabled=False)
    bare = tiny_model(templates=templates, heads=HeadsConfig(plddt_c=8, pae=False))
    trained = tiny_model(templates=templates)
    config: Any = SimpleNamespace(train=SimpleNamespace(seed=3, new_heads=True))
    save_params(init, bare)
    torch.manual_seed(3)
    expected = AlphaFold(trained.config).state_dict()
    started = bare.state_dict()
    expected |= started
    with torch.no_grad():
        trained.load_state_dict(expected)
    save_params(params, trained)
    torch.manual_seed(5)
    before, after = both_models(init, params, config, "cpu")
    assert before is after
    name = next(iter(started))
    with torch.no_grad():
        trained.get_parameter(name).add_(1)
    save_params(params, trained)
    before, after = both_models(init, params, config, "cpu")
    assert before is not after
    assert before.sample == after.sample
    found = before.model.state_dict()
    assert found.keys() == expected.keys()
    assert [key for key, value in expected.items() if not torch.equal(found[key], value)] == []
    assert [key for key, value in after.model.state_dict().items() if not torch.equal(expected[key], value)] == [name]


def test_settings_are_no_difference(given: dict[str, Any], tmp_path: Path) -> None:
    """Trained heads move no atom, so all differences are exactly zero for any settings."""
    changed = {**SMALL, "data.max_msa": 2, "data.max_extra": 2, "model.recycles": 1}
    again = {**given, "set": changed, "trainable": "heads", "steps": 2}
    result = warpfold.finetune(out=tmp_path / "tuned", device="cpu", **again)
    assert (result["folded"]["max_msa"], result["folded"]["max_extra"], result["folded"]["recycles"]) == (2, 2, 1)
    for scores in result["compared"]["test"].values():
        assert (scores["difference"], scores["wins"], scores["losses"]) == (0, 0, 0)
    assert "with 1 recycle, 2 clustered and 2 extra alignment rows" in (tmp_path / "tuned/card.md").read_text()


def test_a_misspelt_setting_is_refused_before_packing(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.crp"):
        warpfold.finetune(out=tmp_path / "out", device="cpu", **{**given, "set": {"data.crp": 16}})
    assert not (tmp_path / "out").exists()


def test_equal_weights_are_folded_once(done: tuple[Path, dict[str, Any]], tiny_params: Path) -> None:
    config = settings.build(RunConfig, done[1]["settings"])
    before, after = both_models(tiny_params, tiny_params, config, "cpu")
    assert before is after
    (one,) = fold_before_after(Store(done[0] / "store"), done[1]["tested"][:1], before, after, 0)
    assert one.predictions[0] is one.predictions[1]
    target = target_with_truth(done[0] / "after", done[1]["predictions"][0], one, [LDDT], "before")
    (truth,) = true_chains(one)
    apart = target.truth_ca - one.trained.ca[truth.mask[:, CA] > 0]
    assert np.sqrt((apart**2).sum(-1).mean()) == pytest.approx(one.scores[1].rmsd, rel=1e-3)


def test_scores_that_do_not_exist_are_left_out(done: tuple[Path, dict[str, Any]], tiny_params: Path) -> None:
    """A single chain has no interface, so its DockQ is undefined rather than 0."""
    config, keys = settings.build(RunConfig, done[1]["settings"]), done[1]["tested"]
    models = both_models(tiny_params, tiny_params, config, "cpu")
    measured = list(fold_before_after(Store(done[0] / "store"), keys, *models, 0))
    assert all(map(math.isnan, DOCKQ.of(measured[0]) + INTERFACE_LDDT.of(measured[0])))
    found = compared_scores(measured, COMPLEX, dict.fromkeys(keys, "x"))
    assert "dockq" not in found
    assert found["lddt_ca"]["targets"] == len(keys)
    assert means([DOCKQ], measured) == {"dockq": {"untrained": None, "trained": None}}
    # The means are over the examples that have the score.
    score = Measure("key", "label", lambda prediction, value: value)
    pairs = [(0.1, 0.4), (0.3, 0.5), (math.nan, 0.9), (0.5, 0.9)]
    examples: list[Any] = [SimpleNamespace(predictions=(None, None), scores=pair) for pair in pairs]
    assert score.means(examples) == {"untrained": 0.3, "trained": 0.6}


def test_one_chain_of_each_sequence_is_tested(tmp_path: Path) -> None:
    """Of two entries with the same sequence, only the first is tested, with its cluster of the store."""
    generate(tmp_path / "proteins", 3, 5, max_length=32)
    first, *_ = files = sorted((tmp_path / "proteins/mmcif").iterdir())
    copy = write_mmcif("9cpy", list(read_structure(first).chains.values()))
    first.with_name("9cpy.cif").write_text(copy)
    warpfold.pack(tmp_path / "proteins/mmcif", out=tmp_path / "store")
    store = Store(tmp_path / "store")
    keys = entry_keys(store, assemblies=False)
    found = distinct_entries(store, keys)
    assert (len(keys), len(found), len(files)) == (4, 3, 3)
    assert set(distinct_entries(store, keys, by="chain").values()) == set(found)
    assert len(set(found.values())) == 3


def test_a_fragment_is_in_the_cluster_of_its_protein(tmp_path: Path) -> None:
    generate(tmp_path / "proteins", 2, 5, max_length=60)
    first = sorted((tmp_path / "proteins/mmcif").iterdir())[0]
    (whole,) = read_structure(first).chains.values()
    part = slice(0, 2 * len(whole.sequence) // 3)
    arrays = {name: getattr(whole, name)[part] for name in ("sequence", "positions", "mask", "residue_index")}
    cut = dataclasses.replace(whole, **arrays, author_numbers=whole.author_numbers[part])
    first.with_name("9cut.cif").write_text(write_mmcif("9cut", [cut]))
    warpfold.pack(tmp_path / "proteins/mmcif", out=tmp_path / "store")
    store = Store(tmp_path / "store")
    found = distinct_entries(store, entry_keys(store, assemblies=False))
    assert (len(found), len(set(found.values()))) == (3, 2)


def test_words_follow_the_interval() -> None:
    def said(after: list[float], before: list[float]) -> str:
        found = paired_difference(after, before).to_dict()
        return verdict({"compared": {"test": {"lddt_ca": found}}, "params": {"step": 1}})

    low, high = [0.2, 0.3, 0.25, 0.3] * 2, [0.5, 0.6, 0.65, 0.6] * 2
    assert said(high, low).startswith("Better")
    assert said(low, high).startswith("Worse")
    assert said([0.5, 0.3, 0.7, 0.4] * 2, [0.3, 0.5, 0.7, 0.4] * 2).startswith("No clear difference")
    assert said(high[1:], low[1:]).startswith("No verdict: the test has 7 proteins of 7 clusters")


def test_on_the_command_line(capsys: pytest.CaptureFixture[str], given: dict[str, Any], tmp_path: Path) -> None:
    files = "--init", given["init"], "--out", tmp_path / "out"
    code, out, err = run(capsys, "finetune", "--structures", tmp_path, *files)
    assert (code, out, len(err.strip().splitlines())) == (2, "", 1)
