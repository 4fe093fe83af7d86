"""Parameters: DeepMind's arrays both ways, files, and refusals that name what does not fit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers import random_batch, tiny_config, tiny_model
from warpfold.errors import UserError
from warpfold.model.alphafold import AlphaFold
from warpfold.model.deepmind import PREFIX, arrays, config_from_deepmind, from_deepmind, to_deepmind
from warpfold.model.weights import data_settings, load_model, save_params

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


def test_the_published_layout():
    params = {k: v.shape for k, v in to_deepmind(AlphaFold(CONFIG)).items()}
    block = "evoformer/evoformer_iteration/"
    assert params[block + "msa_column_attention/attention//query_w"] == (2, 16, 4, 4)
    assert params[block + "msa_column_attention/attention//output_w"] == (2, 4, 4, 16)
    assert params[block + "outer_product_mean//output_w"] == (2, 6, 6, 12)
    assert params["evoformer/extra_msa_stack/msa_column_global_attention/attention//key_w"] == (1, 8, 2)
    assert params["evoformer/pair_activiations//weights"] == (65, 12)
    assert params["predicted_aligned_error_head/logits//weights"] == (12, 64)


def test_npz_round_trip_infers_the_settings(tmp_path):
    model = tiny_model()
    np.savez(tmp_path / "params.npz", **{PREFIX + k: v for k, v in to_deepmind(model).items()})
    loaded = load_model(tmp_path / "params.npz")
    assert replace(loaded.config, recycles=1, structure=model.config.structure).evoformer.heads == 4
    assert loaded.config.heads == model.config.heads
    assert loaded.config.templates.c == model.config.templates.c
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), loaded.state_dict().values()))


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


def test_multimer_parameters_are_refused_by_name():
    with pytest.raises(UserError, match="Multimer"):
        config_from_deepmind(
            {PREFIX + "evoformer/~_relative_encoding/position_activations//weights": np.zeros((73, 128))}
        )


def test_bad_files_are_refused(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"nonsense")
    (tmp_path / "b.npz").write_bytes(b"nonsense")
    np.savez(tmp_path / "c.npz", x=np.zeros(3))
    np.savez(tmp_path / "d.npz", x=np.array([{}], dtype=object))
    save_params(tmp_path / "e.safetensors", tiny_model())
    whole = (tmp_path / "e.safetensors").read_bytes()
    (tmp_path / "e.safetensors").write_bytes(whole[: len(whole) // 2])
    for name in ("a.safetensors", "b.npz", "c.npz", "d.npz", "e.safetensors", "missing.npz"):
        with pytest.raises(UserError, match=name.replace(".", r"\.")):
            load_model(tmp_path / name)


def test_how_examples_were_drawn_travels_with_the_parameters(tmp_path):
    save_params(tmp_path / "p.safetensors", tiny_model(), {"max_msa": 16, "crop": None})
    assert data_settings(tmp_path / "p.safetensors") == {"max_msa": 16, "crop": None}
    save_params(tmp_path / "q.safetensors", tiny_model())
    assert data_settings(tmp_path / "q.safetensors") == {}
    assert data_settings(tmp_path / "params_model_1.npz") == {}
