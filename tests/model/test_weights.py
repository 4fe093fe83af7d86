"""Parameters: conversion of DeepMind's arrays both ways, files, and errors that name wrong arrays."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

import warpfold
from tests.helpers import as_multimer, filled_model, random_batch, tiny_config, tiny_model
from warpfold import predict
from warpfold.errors import UserError
from warpfold.model.alphafold import AlphaFold
from warpfold.model.weights.deepmind import PREFIX, arrays, config_from_deepmind, from_deepmind, to_deepmind
from warpfold.model.weights.files import FORMAT, assumed_settings, data_settings, load_config, load_model, save_params

CONFIG = tiny_config()
FUSED = replace(CONFIG, evoformer=replace(CONFIG.evoformer, pair=replace(CONFIG.evoformer.pair, fused=True)))


@pytest.mark.parametrize("config", [CONFIG, FUSED, replace(CONFIG, templates=replace(CONFIG.templates, enabled=False))])
def test_every_tensor_has_one_array_and_the_round_trip_is_exact(config):
    torch.manual_seed(0)
    model, other = AlphaFold(config), AlphaFold(config)
    entries = list(arrays(model))
    assert sorted(a.ours for a in entries) == sorted(model.state_dict())
    assert len({(a.theirs, a.block) for a in entries}) == len(entries)
    params = to_deepmind(model)
    assert sum(p.size for p in params.values()) == sum(p.numel() for p in model.parameters())
    from_deepmind(other, params)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values()))
    again = to_deepmind(other)
    assert all(np.array_equal(params[k], again[k]) for k in params)


def test_safetensors_round_trip_computes_the_same(tmp_path):
    model, batch = tiny_model(), random_batch()
    save_params(tmp_path / "p.safetensors", model)
    loaded = load_model(tmp_path / "p.safetensors").eval()
    assert loaded.config == model.config
    assert torch.equal(loaded(batch).pair, model(batch).pair)
    assert [f.name for f in tmp_path.iterdir()] == ["p.safetensors"]


def test_the_same_parameters_are_the_same_bytes(tmp_path):
    files = [tmp_path / f"{number}.safetensors" for number in range(5)]
    for file in files:
        save_params(file, tiny_model(), {"max_msa": 16})
    assert len({file.read_bytes() for file in files}) == 1


def test_everything_that_does_not_fit_is_named():
    model = AlphaFold(CONFIG)
    params = to_deepmind(model)
    del params["evoformer/left_single//bias"]
    params["evoformer/another//bias"] = np.zeros(3)
    params["evoformer/right_single//bias"] = np.zeros(5)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(UserError) as error:
        from_deepmind(model, params)
    message = str(error.value)
    assert "1 missing: evoformer/left_single//bias" in message
    assert "1 surplus: evoformer/another//bias" in message
    assert "evoformer/right_single//bias [5], expected [12]" in message
    assert "\n" not in message
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_parameters_of_another_model_are_refused():
    with pytest.raises(UserError, match="not the parameters of AlphaFold2 or AlphaFold-Multimer"):
        config_from_deepmind(
            {PREFIX + "evoformer/~_relative_encoding/position_activations//weights": np.zeros((73, 128))}
        )


@pytest.mark.parametrize("fused", [True, False])
def test_multimer_parameters_load_strictly_and_are_written_back_exactly(tmp_path: Path, fused: bool) -> None:
    config = as_multimer(replace(CONFIG, structure=replace(CONFIG.structure, layers=8)), fused)  # no array shows these
    params = {PREFIX + name: array for name, array in to_deepmind(filled_model(config)).items()}
    path = tmp_path / "renamed.npz"
    np.savez(path, **params)
    model = load_model(path)
    expected = replace(config, recycles=20, recycle_tolerance=0.5) if fused else replace(config, recycles=3)
    widths = replace(config.evoformer.pair, head_width=3), replace(config.templates.pair, head_width=2)
    expected = replace(
        expected,
        evoformer=replace(expected.evoformer, pair=widths[0]),
        templates=replace(expected.templates, pair=widths[1], heads=4, attention_width=16),
    )
    assert model.config == expected
    again = to_deepmind(model)
    assert {PREFIX + name for name in again} == params.keys()
    assert all(np.array_equal(array, params[PREFIX + name]) for name, array in again.items())
    with pytest.raises(UserError, match="1 missing: evoformer/template_embedding/output_linear//bias"):
        from_deepmind(model, {n: a for n, a in again.items() if not n.endswith("output_linear//bias")})


def test_every_tensor_of_a_multimer_is_covered_once():
    """Keys and values of its structure module are two of DeepMind's arrays and one of our tensors."""
    model = filled_model(as_multimer(CONFIG))
    counts = {name: torch.zeros_like(x) for name, x in model.state_dict().items()}
    for a in arrays(model):
        part = torch.zeros_like(counts[a.ours])
        a.put(np.ones(a.stacked_shape, np.float32), part)
        counts[a.ours] += part
    assert all(torch.equal(x, torch.ones_like(x)) for x in counts.values())


def test_the_published_layout_of_multimer():
    """Names and shapes of the official parameters, by the recipe of a reference case."""
    case = Path(__file__).parents[1] / "golden" / "models" / "multimer_v3_earlystop"
    spec = json.loads((case / "param_spec.json").read_text())
    config = config_from_deepmind({name: np.empty(entry["shape"]) for name, entry in spec.items()})
    assert (config.recycles, config.recycle_tolerance, config.max_relative) == (20, 0.5, 32)
    model = AlphaFold(config)
    shapes = {PREFIX + name: list(array.shape) for name, array in to_deepmind(model).items()}
    assert shapes == {name: entry["shape"] for name, entry in spec.items()}


def changed(path: Path, text: str | None = None, **model: object) -> Path:
    """Write a safetensors file with changed settings, as a foreign file may have."""
    with safe_open(path, framework="pt") as file:
        found = json.loads(file.metadata()[FORMAT])
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    found["model"] |= model
    path.write_bytes(save(state, {FORMAT: json.dumps(found) if text is None else text}))
    return path


@pytest.mark.parametrize(
    "given",
    [
        *({"text": text} for text in ("[" * 10**5, "{", "[]", "{}", '{"model": 3}', '{"model": {}, "data": [1]}')),
        {"c_z": 200_000},  # would need 160 GB
        {"c_z": 2**62},
        {"c_m": -8},
        {"c_m": 0},
        {"extra_blocks": 300_000},
        {"evoformer": {"blocks": 300_000}},
        {"evoformer": {"heads": 0}},
        {"structure": {"sidechain_blocks": 300_000}},
        {"heads": {"pae_bins": -1}},
        {"templates": 5},
        {"recycles": "three"},
    ],
    ids=lambda given: str(given)[:40],
)
def test_settings_in_a_file_are_not_believed(tmp_path: Path, given: dict[str, Any]) -> None:
    save_params(tmp_path / "a.safetensors", tiny_model())
    path = changed(tmp_path / "a.safetensors", **given)
    for read in (load_config, load_model):
        with pytest.raises(UserError, match=r"a\.safetensors: ") as error:
            read(path)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 1000


def test_arrays_of_a_file_are_not_believed(tmp_path: Path) -> None:
    path, whole = tmp_path / "a.npz", to_deepmind(tiny_model(), PREFIX)
    name = next(name for name in whole if name.endswith("evoformer_iteration/outer_product_mean//output_b"))
    for odd in (whole[name].astype(str), whole[name].astype(complex), np.zeros((300_000, *whole[name].shape[1:]))):
        np.savez(path, **whole | {name: odd})
        with pytest.raises(UserError, match=r"misshapen: .*output_b"):
            load_model(path)
    np.savez(path, **whole)
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 10] = 99  # how its first array is compressed
    path.write_bytes(data)
    with pytest.raises(UserError, match="not a readable"):
        load_model(path)


def test_how_examples_were_drawn_travels_with_the_parameters(tmp_path):
    save_params(tmp_path / "p.safetensors", tiny_model(), {"max_msa": 16, "crop": None})
    assert data_settings(tmp_path / "p.safetensors") == {"max_msa": 16, "crop": None}
    save_params(tmp_path / "q.safetensors", tiny_model())
    assert data_settings(tmp_path / "q.safetensors") == {}


def save_deepmind(path: Path, templates: bool, multimer: bool = False, fused: bool = False) -> Path:
    """Write the parameters of a small model as DeepMind's arrays."""
    config = replace(CONFIG, templates=replace(CONFIG.templates, enabled=templates))
    config = as_multimer(config, fused) if multimer else config
    np.savez(path, **{PREFIX + name: array for name, array in to_deepmind(AlphaFold(config)).items()})
    return path


@pytest.mark.parametrize(
    ("name", "templates", "max_msa", "max_extra"),
    [  # Supp. table 5 and the official model/config.py
        ("params_model_1", True, 508, 5120),
        ("params_model_2", True, 508, 1024),
        ("params_model_3", False, 512, 5120),
        ("params_model_4", False, 512, 5120),
        ("params_model_5", False, 512, 1024),
        ("params_model_1_ptm", True, 508, 5120),
        ("params_model_2_ptm", True, 508, 1024),
        ("params_model_5_ptm", False, 512, 1024),
    ],
)
def test_deepminds_models_bring_their_alignment_sizes(
    tmp_path: Path, name: str, templates: bool, max_msa: int, max_extra: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_deepmind(tmp_path / f"{name}.npz", templates)
    assert data_settings(path) == {"max_msa": max_msa, "max_extra": max_extra}
    assert assumed_settings(path) is None
    sample = warpfold.load(path, device="cpu").sample
    assert (sample.max_msa, sample.max_extra) == (max_msa, max_extra)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("name", "fused", "max_msa", "max_extra", "recycles"),
    [  # CONFIG_MULTIMER and CONFIG_DIFFS of the official model/config.py; recycles of 1 and 2: of its release 2.1
        ("params_model_1_multimer", False, 252, 1152, (3, None)),
        ("params_model_4_multimer_v2", False, 252, 1152, (3, None)),
        ("params_model_1_multimer_v3", True, 508, 2048, (20, 0.5)),
        ("params_model_3_multimer_v3", True, 508, 2048, (20, 0.5)),
        ("params_model_4_multimer_v3", True, 508, 1152, (20, 0.5)),
        ("params_model_5_multimer_v3", True, 508, 1152, (20, 0.5)),
        ("params_model_5_multimer_v3", False, 252, 1152, (3, None)),  # the version follows from the arrays
        ("unfused", False, 252, 1152, (3, None)),  # all five sample equally
    ],
)
def test_multimer_models_bring_their_alignment_sizes_and_recycles(
    tmp_path: Path, name: str, fused: bool, max_msa: int, max_extra: int, recycles: tuple[int, float | None]
) -> None:
    path = save_deepmind(tmp_path / f"{name}.npz", True, True, fused)
    assert data_settings(path) == {"max_msa": max_msa, "max_extra": max_extra}
    assert assumed_settings(path) is None
    config = load_model(path).config
    assert (config.recycles, config.recycle_tolerance) == recycles


def test_which_multimer_model_of_version_3_is_assumed_aloud(tmp_path: Path) -> None:
    path = save_deepmind(tmp_path / "best.npz", True, True, True)
    assert data_settings(path) == {"max_msa": 508, "max_extra": 2048}
    assumed = assumed_settings(path)
    assert assumed is not None
    assert "number of the AlphaFold-Multimer 3 model (by its arrays one of 1, 2, 3, 4, 5)" in assumed
    assert "2048 rows of the extra alignment are assumed, model 4 takes 1152" in assumed


@pytest.mark.parametrize(
    ("name", "templates", "max_msa", "says"),
    [
        ("best", True, 508, "one of 1, 2): 5120 rows of the extra alignment are assumed, model 2 takes 1024"),
        ("best", False, 512, "one of 3, 4, 5): 5120 rows of the extra alignment are assumed, model 5 takes 1024"),
        ("params_model_2", False, 512, "one of 3, 4, 5)"),  # arrays contradict the name
        ("model_12", True, 508, "one of 1, 2)"),
    ],
)
def test_what_the_name_does_not_say_is_assumed_aloud(
    tmp_path: Path, name: str, templates: bool, max_msa: int, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_deepmind(tmp_path / f"{name}.npz", templates)
    assert data_settings(path) == {"max_msa": max_msa, "max_extra": 5120}
    assumed = assumed_settings(path)
    assert assumed is not None
    assert says in assumed
    assert "\n" not in assumed
    warpfold.load(path, device="cpu")
    assert caplog.messages == [assumed]


def test_predictions_use_them_and_say_what_was_assumed(tmp_path: Path) -> None:
    (tmp_path / "q.fasta").write_text(">one\nMKTAYIAKQR\n")
    for name, extra, assumed in (("params_model_2_ptm", 1024, False), ("renamed", 5120, True)):
        params = save_deepmind(tmp_path / f"{name}.npz", True)
        summary = predict(tmp_path / "q.fasta", params, tmp_path / name, device="cpu", recycles=0)
        assert (summary["settings"]["max_msa"], summary["settings"]["max_extra"]) == (508, extra)
        assert summary["params"]["assumed"] == (assumed_settings(params) if assumed else None)
