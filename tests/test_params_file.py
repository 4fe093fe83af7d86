"""Test `warpfold params` and `train --init`: descriptions of files, formats, errors that name the setting to change."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import warpfold
from tests.helpers import as_multimer, filled_model, tiny_config, tiny_model
from tests.model.test_openfold_files import as_openfold
from tests.model.torch_files import save
from tests.test_cli import refused, run
from tests.test_nothing_lost import KINDS, contents, place
from tests.training.runs import make_store, tiny_run
from warpfold.errors import UserError
from warpfold.model.alphafold import AlphaFold
from warpfold.model.weights.deepmind import PREFIX, from_deepmind, to_deepmind
from warpfold.model.weights.files import load_model, save_params
from warpfold.settings import to_dict, toml_value
from warpfold.training.config import RunConfig, load_settings
from warpfold.training.train import initial_model

PUBLISHED = replace(tiny_config(), recycles=3, structure=replace(tiny_config().structure, layers=8))


def same(a: AlphaFold, b: AlphaFold) -> bool:
    found, other = a.state_dict(), b.state_dict()
    return found.keys() == other.keys() and all(torch.equal(found[name], other[name]) for name in found)


def test_every_format_becomes_every_other_and_computes_the_same(tmp_path: Path) -> None:
    model = filled_model(PUBLISHED)
    save(tmp_path / "a.pt", as_openfold(model))
    save_params(tmp_path / "a.safetensors", model, {"max_msa": 7})
    np.savez(tmp_path / "a.npz", **to_deepmind(model, PREFIX))  # type: ignore[arg-type]
    for source, format in (("a.pt", "OpenFold"), ("a.safetensors", "WarpFold"), ("a.npz", "DeepMind")):
        for ending in (".safetensors", ".npz"):
            out = tmp_path / f"of_{format}{ending}"
            found = warpfold.params(tmp_path / source, check=True, out=out)
            assert (found.format, found.problems, found.written) == (format, (), out)
            assert found.heads == ("distogram", "masked_msa", "plddt", "resolved", "pae")
            assert same(load_model(out), model)
            assert not [note for note in found.notes if "do not say" in note]
    assert warpfold.params(tmp_path / "of_WarpFold.safetensors").sample == {"max_msa": 7}
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_names_of_deepminds_arrays_have_one_slash() -> None:
    model, other = tiny_model(), tiny_model(seed=1)
    arrays = to_deepmind(model, PREFIX)
    assert all(name.startswith(PREFIX) and f"{PREFIX}/" not in name for name in arrays)
    from_deepmind(other, arrays, PREFIX)
    assert same(model, other)


def test_what_deepminds_arrays_do_not_say_is_said(tmp_path: Path) -> None:
    save_params(tmp_path / "a.safetensors", tiny_model())
    (note,) = warpfold.params(tmp_path / "a.safetensors", out=tmp_path / "b.npz").notes
    assert "do not say model.recycles: 1, not 3; model.structure.layers: 2, not 8" in note


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.safetensors"
    save_params(path, tiny_model())
    code, out, _ = run(capsys, "params", path, "--check")
    assert code == 0
    assert "AlphaFold2, single chains, with templates" in out
    assert "42,452 in 431 tensors" in out
    found = json.loads(run(capsys, "params", path, "--json")[1])
    assert found["format"] == "WarpFold"
    assert found["problems"] is None
    assert found["settings"]["c_m"] == 16
    (tmp_path / "model.toml").write_text(run(capsys, "params", path, "--toml")[1])
    assert load_settings(tmp_path / "model.toml").config().model == tiny_config()
    broken = tiny_model()
    broken.single.bias.data[3] = torch.nan
    save_params(path, broken)
    code, out, _ = run(capsys, "params", path, "--check")
    assert code == 1
    assert "problem      not finite: single.bias" in out
    zeros = tiny_model()
    zeros.single.bias.data.zero_()
    save_params(path, zeros)
    assert warpfold.params(path, check=True).problems == ()
    for parameter in zeros.parameters():
        parameter.data.zero_()
    save_params(path, zeros)
    assert warpfold.params(path, check=True).problems == ("all parameters are zero",)


@pytest.mark.parametrize("ending", ["npz", "safetensors"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_replaced(tmp_path: Path, kind: str, ending: str, tiny_params: Path) -> None:
    place(kind, tmp_path / f"out.{ending}")
    before = contents(tmp_path)
    with pytest.raises(UserError, match="exists already"):
        warpfold.params(tiny_params, out=tmp_path / f"out.{ending}")
    assert contents(tmp_path) == before


# ---- train --init


PAE_LOSS = "loss.predicted_aligned_error=0.1"


def settings_of(model: AlphaFold, *changes: str) -> RunConfig:
    config = replace(tiny_run(), model=model.config)
    return load_settings(config, changes).config()


def test_a_run_begins_with_any_format(tmp_path: Path) -> None:
    model = filled_model(replace(PUBLISHED, templates=replace(PUBLISHED.templates, enabled=False)))
    path = save(tmp_path / "a.pt", as_openfold(model))
    assert same(initial_model(settings_of(model), path), model)
    config = settings_of(model, "train.steps=1", "train.validation=0.0", "model.recycles=0", PAE_LOSS)
    summary = warpfold.train(config, make_store(tmp_path / "store"), tmp_path / "run", init=path, device="cpu")
    assert summary.finished


@pytest.mark.parametrize("has", [True, False])
def test_a_head_that_is_missing_or_surplus_is_named_with_its_setting(tmp_path: Path, has: bool) -> None:
    heads = {there: replace(tiny_config().heads, pae=there) for there in (True, False)}
    given, wanted = tiny_model(heads=heads[has]), tiny_model(seed=1, heads=heads[not has])
    save_params(tmp_path / "a.safetensors", given)
    with pytest.raises(UserError) as error:
        initial_model(settings_of(wanted), tmp_path / "a.safetensors")
    said = "has the head pae, which the settings lack" if has else "lacks the head pae, which the settings have"
    assert said in str(error.value)
    cure = f"model.heads.pae={str(has).lower()}"
    assert f"--set {cure}" in str(error.value)
    assert (f"--set {PAE_LOSS}" in str(error.value)) is has
    assert same(initial_model(settings_of(wanted, cure), tmp_path / "a.safetensors"), given)
    new = initial_model(settings_of(wanted, "train.new_heads=true"), tmp_path / "a.safetensors")
    ours = {name: tensor for name, tensor in new.state_dict().items() if not name.startswith("pae.")}
    assert all(torch.equal(tensor, given.state_dict()[name]) for name, tensor in ours.items())
    assert ("pae.logits.weight" in new.state_dict()) is not has


def test_settings_that_use_parameters_otherwise_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_params(tmp_path / "a.safetensors", tiny_model())
    initial_model(settings_of(tiny_model(), "model.recycles=2"), tmp_path / "a.safetensors")
    assert caplog.text == ""
    initial_model(settings_of(tiny_model(), "model.structure.layers=3"), tmp_path / "a.safetensors")
    assert "its parameters were of a model with model.structure.layers: 2, not 3" in caplog.text


def test_another_model_is_one_line_that_people_read_before_anything_is_planned_or_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(*_: object) -> None:
        raise AssertionError("planned before the sizes were compared")

    monkeypatch.setattr("warpfold.training.planning.plan_training", planned)
    save_params(tmp_path / "a.safetensors", tiny_model())
    make_store(tmp_path / "store")
    files = ("--data", tmp_path / "store", "--out", tmp_path / "run", "--init", tmp_path / "a.safetensors")
    message = refused(run(capsys, "train", "tiny", *files, "--device", "cpu"))
    assert "parameters of another model" in message
    assert "model.c_m: 16, not 32" in message
    assert "more" in message
    assert "warpfold params" in message
    assert len(message) < 800
    assert not (tmp_path / "run").exists()


def test_tensors_of_another_model_are_counted_and_some_are_named(tmp_path: Path) -> None:
    arrays = to_deepmind(tiny_model(), PREFIX)
    kept = {name: array for name, array in arrays.items() if "gating_linear" not in name}
    np.savez(tmp_path / "a.npz", **kept)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"\d+ missing: .* and \d+ more") as error:
        load_model(tmp_path / "a.npz")
    assert len(str(error.value)) < 800


def test_a_run_folder_without_settings_says_so_in_one_short_line(tmp_path: Path) -> None:
    store, config = make_store(tmp_path / "store"), tiny_run(steps=1, validation=0.0)
    warpfold.train(config, store, tmp_path / "run", device="cpu")
    (tmp_path / "run" / "settings.toml").write_text("")
    with pytest.raises(UserError, match="holds a run with other settings") as error:
        warpfold.train(config, store, tmp_path / "run", device="cpu")
    assert len(str(error.value)) < 1500
    assert toml_value(config.model.c_m) in str(error.value)


def test_the_description_of_a_file(tmp_path: Path) -> None:
    """Rows, JSON and settings have the same facts."""
    path, model = tmp_path / "a.safetensors", tiny_model()
    save_params(path, model, {"max_msa": 7})
    found = warpfold.params(path)
    digest = found.sha256
    count = sum(parameter.numel() for parameter in model.state_dict().values())
    rows = [
        ("file", str(path)), ("format", "WarpFold"), ("model", "AlphaFold2, single chains, with templates"),
        ("parameters", f"{count:,} in {len(model.state_dict())} tensors"),
        ("blocks", "2, before them 1 of the extra alignment"), ("channels", "m 16, z 12, s 20"),
        ("heads", "distogram, masked_msa, plddt, resolved, pae"), ("recycles", "1"), ("max_msa", "7"),
        ("sha256", digest),
    ]  # fmt: skip
    assert [*found.rows()] == rows
    assert (repr(found), found.problems, found.written) == (
        f"<ParamsFile {path}: WarpFold, AlphaFold2, single chains, with templates, {count:,} parameters>", None, None,
    )  # fmt: skip
    checked = replace(found, notes=("assumed",), problems=(), written=tmp_path / "b", sample={"max_extra": 5})
    assert [*checked.rows()] == [
        *rows[:8], ("max_extra", "5"), rows[9], ("note", "assumed"),
        ("check", "whole: every tensor there, all finite"), ("written", str(tmp_path / "b")),
    ]  # fmt: skip
    bad = replace(found, problems=("one", "two"))
    assert [*bad.rows()][10:] == [("problem", "one"), ("problem", "two"), ("check", "2 problems")]
    assert found.to_dict() == {
        "path": str(path), "written": None, "format": "WarpFold", "model": found.model, "parameters": count,
        "tensors": len(model.state_dict()), "sha256": digest, "sample": {"max_msa": 7}, "heads": found.heads,
        "notes": (), "problems": None, "settings": to_dict(found.config),
    }  # fmt: skip
    assert checked.to_dict()["written"] == str(tmp_path / "b")
    assert found.toml().startswith('base = "monomer"\n\n')
    assert "max_msa = 7" in found.toml()


def test_kinds_of_models_are_named(tmp_path: Path) -> None:
    for number, (config, kind) in enumerate(
        (
            (replace(tiny_config(), templates=replace(tiny_config().templates, enabled=False)),
             "AlphaFold2, single chains, without templates"),
            (as_multimer(tiny_config(), True), "AlphaFold-Multimer 3, with templates"),
            (as_multimer(tiny_config(), False), "AlphaFold-Multimer 1 or 2, with templates"),
        )
    ):  # fmt: skip
        save_params(tmp_path / f"{number}.safetensors", filled_model(config))
        found = warpfold.params(tmp_path / f"{number}.safetensors")
        assert found.model == kind
        assert found.toml().startswith(f'base = "{"multimer" if "Multimer" in kind else "monomer"}"')


def test_the_parameters_of_a_run_are_the_best_ones(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match=r"params\.safetensors"):
        warpfold.params(tmp_path)
    save_params(tmp_path / "params.safetensors", tiny_model(0))
    assert warpfold.params(tmp_path).path == tmp_path / "params.safetensors"
    save_params(tmp_path / "params_best.safetensors", tiny_model(1))
    assert warpfold.params(tmp_path).path == tmp_path / "params_best.safetensors"


def test_what_is_written_is_named_by_its_ending(tmp_path: Path) -> None:
    """A file for another program has a note on each setting that it does not contain, but not on those of training."""
    path = tmp_path / "a.safetensors"
    model = tiny_model()
    save_params(path, model)
    with pytest.raises(UserError, match=r"b\.pt: \.safetensors or \.npz is written\. Use one of these endings"):
        warpfold.params(path, out=tmp_path / "b.pt")
    with pytest.raises(UserError, match=r"a\.safetensors: "):
        warpfold.params(tmp_path / "missing.safetensors", out=path)
    assert warpfold.params(path, out=tmp_path / "b.safetensors").notes == ()
    assert same(load_model(tmp_path / "b.safetensors"), model)
    (note,) = warpfold.params(path, out=tmp_path / "b.npz").notes
    assert note.startswith(f"{tmp_path / 'b.npz'}: DeepMind's arrays do not say model.")
    assert note.endswith(": a reader takes the latter")
    assert not any(word in note for word in ("head_width", "dropout", "rate:"))
    evoformer, structure = PUBLISHED.evoformer, replace(PUBLISHED.structure, dropout=0.3)
    evoformer = replace(evoformer, pair=replace(evoformer.pair, rate=0.5))
    for number, config in enumerate((PUBLISHED, replace(PUBLISHED, evoformer=evoformer, structure=structure))):
        save_params(path, filled_model(config))
        assert warpfold.params(path, out=tmp_path / f"{number}.npz").notes == ()
        assert same(load_model(tmp_path / f"{number}.npz"), load_model(path))


def test_every_value_that_is_not_finite_is_found_only_by_a_check(tmp_path: Path) -> None:
    path, broken = tmp_path / "a.safetensors", tiny_model()
    names = [name for name, _ in broken.named_parameters()][:7]
    for name in names:
        broken.get_parameter(name).data.view(-1)[-1] = torch.inf
    save_params(path, broken)
    assert warpfold.params(path).problems is None
    (problem,) = warpfold.params(path, check=True).problems or ()
    assert problem.startswith("not finite: ")
    assert problem.endswith("and 2 more")
    # A zero in every tensor is no problem.
    model = tiny_model()
    for tensor in model.state_dict().values():
        tensor.view(-1)[0] = 0
    save_params(path, model)
    assert warpfold.params(path, check=True).problems == ()
    save_params(path, model, {"max_mas": 7})
    with pytest.raises(UserError, match="max_mas"):
        warpfold.params(path)
