"""Labels of whole examples: the table, the head that learns them with the trunk, and what a prediction says."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.pack.pack_inputs import refused, run
from tests.helpers import random_batch, tiny_config, tiny_model
from tests.training.runs import make_store, rows, steps, tiny_run
from warpfold import predict, settings, train
from warpfold.batch import stack
from warpfold.data.store.store import Store
from warpfold.errors import UserError
from warpfold.model.alphafold import HeadsConfig
from warpfold.model.heads import LabelsConfig
from warpfold.model.losses import LossConfig, label_loss, total_loss
from warpfold.model.weights.files import load_model, save_params
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan
from warpfold.prediction.params import inspect_params

LENGTHS = "entry,value\n" + "".join(f"helix{i},{10 + i}\n" for i in range(6))
CLASSES = "entry,class,notes\n" + "".join(f'helix{i},{"long" if i > 2 else "short"},"a, b"\n' for i in range(5))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("labels") / "store")


def table(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def labelled(labels: LabelsConfig, seed: int = 0) -> Any:
    return tiny_model(seed, heads=HeadsConfig(plddt_c=8, pae=True, labels=labels))


def test_the_head_pools_what_is_not_padding_and_its_gradient_reaches_the_trunk() -> None:
    model, batch = labelled(LabelsConfig(c=6)), random_batch()
    output = model(batch, 0)
    mask = batch["seq_mask"]
    single = model.labels.single_norm(output.single)[mask > 0].mean(0)
    pair = model.labels.pair_norm(output.pair)[mask > 0][:, mask > 0].mean((0, 1))
    by_hand = model.labels.logits(model.labels.hidden(torch.cat([single, pair])).relu())
    torch.testing.assert_close(output.label_logits, by_hand)
    label_loss(output.label_logits, torch.tensor(2.0), torch.tensor(1.0)).backward()
    for part in (model.labels, model.evoformer, model.extra_stack, model.single, model.input):
        assert any(p.grad is not None and p.grad.abs().max() > 0 for p in part.parameters())
    assert all(p.grad is None or not p.grad.any() for p in model.structure.parameters())


def test_slices_and_batches_compute_the_same() -> None:
    model = labelled(LabelsConfig(classes=("a", "b"), c=6))
    first, other = random_batch(seed=0), random_batch(residues=7, seed=1)
    with torch.no_grad():
        alone = [model(batch, 0).label_logits for batch in (first, other)]
        together = model(stack([first, other]), 0).label_logits
        torch.testing.assert_close(together, torch.stack(alone), rtol=1e-4, atol=1e-4)
        sliced = Execution(Plan(chunk=2, in_place=True)).bind(model)(first, 0).label_logits
    torch.testing.assert_close(sliced, alone[0], rtol=1e-4, atol=1e-4)


def test_the_loss_is_not_scaled_by_length_and_without_a_label_there_is_none() -> None:
    """Only of the label: cross-entropy, or the squared error of a standardised value."""
    logits = torch.tensor([0.3, -1.0, 2.0])
    expected = -logits.log_softmax(-1)[2]
    torch.testing.assert_close(label_loss(logits, torch.tensor(2.0), torch.tensor(1.0)), expected)
    assert label_loss(logits, torch.tensor(0.0), torch.tensor(0.0)) == 0
    torch.testing.assert_close(
        label_loss(torch.tensor([0.5]), torch.tensor(2.0), torch.tensor(1.0)), torch.tensor(2.25)
    )
    model, batch = labelled(LabelsConfig(c=6)), random_batch()
    batch |= {"all_atom_mask": batch["atom37_atom_exists"], "resolution": torch.tensor(2.0)}
    config = dataclasses.replace(LossConfig(), structure_module=0.0, distogram=0.0, plddt=0.0)
    with torch.no_grad():
        output = model(batch, 0)
        plain, _ = total_loss(output, batch, config)
        for scaled in (False, True):
            asked = dataclasses.replace(config, label=3.0, scale_by_length=scaled)
            known = {"label": torch.tensor(2.0), "label_mask": torch.tensor(1.0)}
            loss, terms = total_loss(output, batch | known, asked)
            rest = plain * (batch["seq_mask"].sum().sqrt() if scaled else 1)
            torch.testing.assert_close(loss, rest + 3 * terms["label"])
            torch.testing.assert_close(terms["label"], (output.label_logits[0] - 2).square())
            without, none = total_loss(output, batch | known | {"label_mask": torch.tensor(0.0)}, asked)
            assert none["label"] == 0
            torch.testing.assert_close(without, rest)


def test_a_run_learns_values_and_predict_writes_them(store: Store, tmp_path: Path) -> None:
    config = tiny_run(steps=60, validation=("helix5",), validate_every=0, save_every=60, workers=0)
    loss = dataclasses.replace(config.loss, structure_module=1e-3, distogram=0.0, masked_msa=0.0, plddt=0.0)
    config = dataclasses.replace(config, loss=loss, optim=dataclasses.replace(config.optim, learning_rate=5e-3))
    csv = table(tmp_path / "lengths.csv", LENGTHS)
    done = train(config, store.path, tmp_path / "run", labels=csv, device="cpu")
    losses = [row["terms"]["label"] for row in steps(tmp_path / "run")]
    assert np.mean(losses[-10:]) < 0.3 * np.mean(losses[:10])
    assert "label" in rows(tmp_path / "run", kind="validation")[-1]["terms"]
    own = load_model(done.params).config.heads.labels
    assert (own.mean, own.classes) == (12.5, ())
    assert own.scale == pytest.approx(np.std(np.arange(6)))
    assert train(config, store.path, tmp_path / "run", labels=csv, device="cpu") == done
    swapped = LENGTHS.replace("helix0,10", "helix0,11").replace("helix1,11", "helix1,10")
    changed = table(tmp_path / "other.csv", swapped)
    with pytest.raises(UserError, match="another labels"):
        train(config, store.path, tmp_path / "run", labels=changed, device="cpu")

    sequence = "MKVLAAGIVGLC"
    found = predict(sequence, done.params, tmp_path / "folded", device="cpu")
    (entry,) = found["predictions"]
    assert entry["label"].keys() == {"value"}
    assert 8 < entry["label"]["value"] < 17
    scores = json.loads((tmp_path / "folded" / entry["folder"] / entry["files"]["scores"]).read_text())
    assert scores["label"] == entry["label"]


def test_classes_partly_labelled(store: Store, tmp_path: Path) -> None:
    csv = table(tmp_path / "classes.csv", CLASSES)  # helix5 has none
    given = {**settings.to_dict(tiny_run(steps=2, validation=0.0)), "plan": {"batch": 2}}
    given["optim"] = {**given["optim"], "clip": "step"}
    done = train(given, store.path, tmp_path / "run", labels=csv, device="cpu")
    model = load_model(done.params)
    assert model.config.heads.labels.classes == ("long", "short")
    found = predict("MKVLAAGIVGLC", done.params, tmp_path / "folded", device="cpu")
    label = found["predictions"][0]["label"]
    assert list(label) == ["long", "short"]
    assert sum(label.values()) == pytest.approx(1, abs=1e-3)
    written = inspect_params(done.params, target=tmp_path / "official.npz")
    assert "without the head for labels" in " ".join(written.notes)
    assert load_model(tmp_path / "official.npz").labels is None


def test_a_head_is_added_to_parameters_without_one_and_taken_along(store: Store, tmp_path: Path) -> None:
    config, csv = tiny_run(steps=1, validation=0.0), table(tmp_path / "classes.csv", CLASSES)
    first = train(config, store.path, tmp_path / "first", device="cpu").params
    second = train(config, store.path, tmp_path / "second", init=first, labels=csv, device="cpu").params
    assert load_model(second).labels is not None
    train(config, store.path, tmp_path / "third", init=second, labels=csv, device="cpu")
    with pytest.raises(UserError, match=r"has the head labels, which the settings lack; labels follows the file"):
        train(config, store.path, tmp_path / "fourth", init=second, device="cpu")


@pytest.mark.parametrize(
    ("text", "more", "says"),
    [
        ("entry,value\nhelix0,1\nhelix9,2\n", (), "1 of 2 entries are in none of the stores (helix9)"),
        ("entry,value,class\nhelix0,1,a\n", (), "has both value and class"),
        ("chain,value\nhelix0,1\n", (), "has the columns chain, value; the columns entry and one of"),
        ("", (), "is empty"),
        ("entry,value\nhelix0,1\nhelix0,2\n", (), "line 3 names helix0 again"),
        ("entry,value\nhelix0,high\nhelix1,2\n", (), "the value of helix0 is 'high'; a number is needed"),
        ("entry,value\nhelix0,nan\nhelix1,2\n", (), "the value of helix0 is 'nan'; a number is needed"),
        ("entry,value\nhelix0,\n", (), "line 2 lacks its label"),
        ("entry,value\nhelix0\n", (), "line 2 has 1 cells, the first 2"),
        ("entry,value\nhelix0,1\nhelix1,1\n", (), "its labels are all alike (2 entries)"),
        (CLASSES, ('model.heads.labels.classes=["long","wide"]',), "has the classes short, which model.heads.labels"),
        (LENGTHS, ('model.heads.labels.classes=["long","wide"]',), "has values, but model.heads.labels.classes names"),
        (CLASSES, ('model.heads.labels.classes=["long"]',), "at least two different ones are needed"),
    ],
)
def test_what_is_wrong_with_a_table_is_one_line_before_anything_is_written(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, more: tuple[str, ...], says: str
) -> None:
    csv = table(tmp_path / "labels.csv", text)
    changes = [word for change in more for word in ("--set", change)]
    given = "--data", store.path, "--out", tmp_path / "run", "--labels", csv, "--device", "cpu"
    assert says in refused(run(capsys, "train", "tiny", *given, *changes))
    assert not (tmp_path / "run").exists()


def test_settings_that_are_given_stay(store: Store, tmp_path: Path) -> None:
    config = tiny_run(steps=1, validation=0.0)
    fixed = {"model.heads.labels.mean": 3.0, "model.heads.labels.scale": 2.0, "model.heads.labels.c": 5}
    csv = table(tmp_path / "lengths.csv", LENGTHS)
    done = train(config, store.path, tmp_path / "run", labels=csv, set=fixed, device="cpu")
    assert load_model(done.params).config.heads.labels == LabelsConfig(c=5, mean=3.0, scale=2.0)
    model = labelled(LabelsConfig(mean=3.0, scale=2.0))
    assert model.labels.said(torch.tensor([0.5])) == {"value": 4.0}
    save_params(tmp_path / "p.safetensors", model)
    assert load_model(tmp_path / "p.safetensors").config == model.config != tiny_config()
