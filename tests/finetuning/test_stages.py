"""Test the stages of fine-tuning before training: the arguments of training, the log, and the reuse of a folder."""

import json
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.finetuning.test_relatives import store_of
from warpfold.data.load.order import Source
from warpfold.data.store.store import Store
from warpfold.data.structure.mmcif import read_structure
from warpfold.data.structure.write import write_mmcif
from warpfold.data.synthetic.folder import generate
from warpfold.errors import UserError
from warpfold.finetuning import finetune as finetuning
from warpfold.finetuning.finetune import FinetuneOptions, finetune
from warpfold.finetuning.split import Split

IDENTITY = re.compile(r'"cluster_identity": ?([\d.]+)')
SMALL = ("data.max_msa=4", "data.max_extra=4", "data.crop=32", "optim.accumulate=1", "plan.precision=fp32")


@pytest.fixture(scope="module")
def proteins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages") / "proteins"
    generate(folder, 12, 5, max_length=32)
    return folder


@pytest.fixture
def options(proteins: Path, tiny_params: Path) -> FinetuneOptions:
    folders = {"structures": [proteins / "mmcif"], "msas": [proteins / "msas"]}
    return FinetuneOptions(**folders, init=tiny_params, steps=4, changes=SMALL, seed=3)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """Let training write a file and stop at once.  Returns its arguments."""
    calls = list[SimpleNamespace]()

    def train(ranks: int, config: Any, sources: Any, out: Path, **rest: Any) -> Any:
        calls.append(SimpleNamespace(ranks=ranks, config=config, sources=sources, out=out, **rest))
        out.mkdir()
        (out / "state").write_text("")
        return SimpleNamespace(finished=False)

    monkeypatch.setattr(finetuning, "train_here", train)
    return calls


def stopped(options: FinetuneOptions, out: Path, **more: Any) -> dict[str, Any]:
    """Fine-tune until training stops, and return the summary."""
    with pytest.raises(KeyboardInterrupt):
        finetune(options, out, **more)
    return json.loads((out / "summary.json").read_text())


def cluster_identity(store: Path) -> float:
    """Return the identity with which the chains of a store were clustered, from its record of the options."""
    (found,) = {value for path in store.glob("*.json") for value in IDENTITY.findall(path.read_text())}
    return float(found)


def test_training_gets_the_split_and_the_rehearsed_store(
    options: FinetuneOptions, trained: list[SimpleNamespace], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "warpfold.plan")
    random = np.random.default_rng(0)
    sequences = {f"g{n:02d}_A": "".join(random.choice(list("ARNDCQEGHILKMFPSTWYV"), 40)) for n in range(20)}
    general = Source(store_of(tmp_path / "general", sequences), weight=0.25)
    for rehearsed in (None, general):
        out = tmp_path / f"out{rehearsed is not None}"
        summary = stopped(replace(options, rehearse=rehearsed, processes=4), out)
        given = trained.pop()
        assert (summary["status"], summary["format"]) == ("running", "warpfold-finetune-1")
        assert summary["run"] == replace(options, rehearse=rehearsed).identity()
        # One example per step cannot be shared by several processes.
        assert (given.ranks, given.config.plan.data, given.out, given.init) == (1, 1, out / "run", options.init)
        assert (given.device, given.watch.steps, given.config.train.seed) == ("cpu", 4, 3)
        store = Store(out / "store")
        first, *others = given.sources
        assert (first.store.path, sorted(first.keys)) == (store.path, sorted(store.keys))
        assert [source.weight for source in given.sources] == ([1.0] if rehearsed is None else [0.75, 0.25])
        assert [source.store for source in others] == ([] if rehearsed is None else [general.store])
        train = given.config.train
        test = [key for key in train.test if key in store]
        assert (len(train.validation), len(test)) == (2, 2)
        forgotten = train.test[len(test) :]
        assert len(forgotten) == (0 if rehearsed is None else 2)
        assert set(forgotten) <= set(sequences)
        text = "8 training, 2 validation, 2 test (by cluster); 4 steps of 1 example, crop 32, learning rate "
        assert caplog.messages[-1].startswith(f"{text}{given.config.optim.learning_rate:g}")
        assert cluster_identity(out / "store") == 0.4
    assert len(caplog.messages) == 2


def test_a_raised_identity_divides_the_clusters_of_the_store(
    options: FinetuneOptions, trained: list[SimpleNamespace], tmp_path: Path
) -> None:
    stopped(replace(options, split_identity=0.5, one_family=True), tmp_path / "out")
    assert cluster_identity(tmp_path / "out/store") == 0.5
    assert 'by = "chain"' in (tmp_path / "out/split.toml").read_text()


def test_relatives_in_a_given_split_are_left_out_and_counted(
    options: FinetuneOptions,
    trained: list[SimpleNamespace],
    proteins: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A fragment of a test protein is in another cluster of the store, and was to be trained on."""
    caplog.set_level(logging.INFO, "warpfold.plan")
    shutil.copytree(proteins / "mmcif", tmp_path / "mmcif")
    first, *others = sorted((tmp_path / "mmcif").iterdir())
    (whole,) = read_structure(first).chains.values()
    part = slice(0, 2 * len(whole.sequence) // 3)
    arrays = {name: getattr(whole, name)[part] for name in ("sequence", "positions", "mask", "residue_index")}
    cut = replace(whole, **arrays, author_numbers=whole.author_numbers[part])
    first.with_name("9cut.cif").write_text(write_mmcif("9cut", [cut]))
    # Chains of fewer than ten residues are dropped.
    short = replace(cut, **{name: value[:6] for name, value in arrays.items()}, author_numbers=cut.author_numbers[:6])
    first.with_name("9sho.cif").write_text(write_mmcif("9sho", [short]))
    keys = [f"{path.stem}_A" for path in others]
    training, test = (*keys[:8], f"9cut_{cut.id}"), (f"{first.stem}_A",)
    Split(by="cluster", training=training, validation=(keys[8],), test=test).write(tmp_path / "split.toml")
    given = replace(options, structures=[tmp_path / "mmcif"], split=tmp_path / "split.toml")
    stopped(given, tmp_path / "out")
    assert caplog.messages[0] == f"1 chain dropped, with the reasons in {tmp_path / 'out/store/pack.json'}"
    assert "1 training entries left out: related to tests or validations, at 30%" in caplog.messages
    assert not [text for text in caplog.messages if " validation entries left out" in text]
    assert sorted(trained[0].sources[0].keys) == sorted([*keys[:9], *test])


def test_the_folder_of_a_mistake_is_put_aside(
    options: FinetuneOptions, trained: list[SimpleNamespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until training starts, another command may use the folder. Later it needs `force`."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(finetuning, "planned", lambda *given: (_ for _ in ()).throw(UserError("no memory")))
        for _ in range(2):
            with pytest.raises(UserError, match="no memory"):
                finetune(options, out)
        # The same command continues in the folder.
        assert sorted(path.name for path in out.iterdir()) == ["split.toml", "store", "summary.json"]
    split = (out / "split.toml").read_text()
    other = replace(options, seed=4)
    stopped(other, out)
    assert (out / "earlier-1/split.toml").read_text() == split != (out / "split.toml").read_text()
    assert sorted(path.name for path in (out / "earlier-1").iterdir()) == ["split.toml", "store"]
    with pytest.raises(UserError, match="holds the output of another run"):
        finetune(options, out)
    stopped(options, out, force=True)
    assert sorted(path.name for path in (out / "earlier-2").iterdir()) == ["run", "split.toml", "store"]
    assert (out / "split.toml").read_text() == split
    stopped(options, out, force=True)
    assert (out / "earlier-3/run/state").is_file()


def test_alignments_of_other_proteins_are_refused(
    options: FinetuneOptions, trained: list[SimpleNamespace], tmp_path: Path
) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "q.a3m").write_text(">q\nMKVLAAGIVGLLLAAGCQWPFWEK\n")
    with pytest.raises(UserError) as raised:
        finetune(replace(options, msas=[tmp_path / name for name in "abc"]), tmp_path / "out")
    assert str(raised.value) == (
        f"{tmp_path / 'a'}, {tmp_path / 'b'}, and 1 more: no alignment has the sequence of one of the structures (no "
        "kept chain has this sequence); name the folder of theirs, or leave --msas out to train without"
    )
    assert trained == []


def test_proteins_without_an_alignment_are_a_warning(
    options: FinetuneOptions,
    trained: list[SimpleNamespace],
    proteins: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An alignment of two rows is an alignment."""
    shutil.copytree(proteins / "msas", tmp_path / "msas")
    first, second, *_ = sorted((tmp_path / "msas").iterdir())
    first.unlink()
    lines = second.read_text().splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith(">")]
    second.write_text("\n".join(lines[: starts[2]]) + "\n")
    stopped(replace(options, msas=[tmp_path / "msas"]), tmp_path / "out")
    (text,) = caplog.messages
    assert text.startswith("1 of 12 chains without an alignment, used by the sequence alone: ")
    caplog.clear()
    stopped(options, tmp_path / "all")
    assert caplog.messages == []
    # Without --msas every chain is used by its sequence alone.
    stopped(replace(options, msas=()), tmp_path / "none")
    assert caplog.messages[0].startswith("12 of 12 chains without an alignment")


def test_alignments_are_searched_on_request(
    options: FinetuneOptions,
    trained: list[SimpleNamespace],
    proteins: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The alignments of a search are used with those of --msas."""
    asked = list[Any]()

    def searched(options: FinetuneOptions, out: Path, tell: Any) -> Path:
        asked.append(options.search)
        return proteins / "msas"

    monkeypatch.setattr(finetuning, "_searched", searched)
    stopped(replace(options, msas=(), search=("db",)), tmp_path / "out")
    stopped(options, tmp_path / "other")
    assert asked == [("db",)]


def test_a_split_and_one_family_exclude_each_other(options: FinetuneOptions, tmp_path: Path) -> None:
    (tmp_path / "split.toml").write_text("")
    with pytest.raises(UserError, match="--one-family draws a split, and --split gives one; leave one of them out"):
        finetune(replace(options, split=tmp_path / "split.toml", one_family=True), tmp_path / "out")
    with pytest.raises(UserError, match=r"data\.crp"):
        finetune(replace(options, changes=["data.crp=3"]), tmp_path / "out")
    assert not (tmp_path / "out").exists()
