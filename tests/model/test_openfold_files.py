"""OpenFold's checkpoints: names of both versions, settings from shapes, and no execution of their contents."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers import random_batch, tiny_config, tiny_model
from tests.model.torch_files import Called, save
from warpfold.errors import UserError
from warpfold.model.alphafold import AlphaFold
from warpfold.model.template import TemplateConfig
from warpfold.model.weights.files import assumed_settings, data_settings, load_config, load_model
from warpfold.model.weights.openfold import openfold_name

CONFIG = replace(
    tiny_config(), recycles=3, structure=replace(tiny_config().structure, layers=8)
)  # no tensor shows these


@pytest.fixture(scope="module")
def model() -> AlphaFold:
    return tiny_model(recycles=3, structure=CONFIG.structure)


def as_openfold(model: AlphaFold, version: int = 1) -> dict[str, Tensor]:
    """Rename a model's tensors to OpenFold's names."""
    found = {openfold_name(name): tensor for name, tensor in model.state_dict().items()}
    return {as_version(name, version): tensor for name, tensor in found.items()}


def as_version(name: str, version: int) -> str:
    """Convert a name of version 1 to that of the published files or of version 2."""
    block = name.startswith(("evoformer.blocks.", "extra_msa_stack.blocks."))
    parts = name.split(".")
    if block:
        layer = parts[3]
        if layer == "msa_att_col" and name.startswith("evoformer"):
            parts.insert(4, "_msa_att")
        if version == 1 and layer.startswith(("msa_transition", "outer", "tri_", "pair_")):
            parts.insert(3, "core")
        if version == 2 and layer.startswith(("tri_", "pair_")):
            parts.insert(3, "pair_stack")
        return ".".join(parts)
    if version == 1:
        return name.replace("template_single_embedder", "template_angle_embedder")
    if name.startswith("template_"):
        return f"template_embedder.{name}"
    return name.replace("_points.", "_points.linear.")


# DeepMind's array -> OpenFold's tensor, as OpenFold imports DeepMind's files (openfold/utils/import_weights.py).
SIDECHAIN = "structure_module/fold_iteration/rigid_sidechain/"
PUBLISHED = {
    "evoformer/preprocess_1d//weights": "input_embedder.linear_tf_m.weight",
    "evoformer/left_single//bias": "input_embedder.linear_tf_z_i.bias",
    "evoformer/pair_activiations//weights": "input_embedder.linear_relpos.weight",
    "evoformer/prev_pos_linear//weights": "recycling_embedder.linear.weight",
    "evoformer/extra_msa_activations//weights": "extra_msa_embedder.linear.weight",
    "evoformer/template_embedding/attention//query_w": "template_pointwise_att.mha.linear_q.weight",
    "evoformer/template_projection//weights": "template_single_embedder.linear_2.weight",
    "evoformer/single_activations//weights": "evoformer.linear.weight",
    "structure_module/fold_iteration/affine_update//bias": "structure_module.bb_update.linear.bias",
    "structure_module/fold_iteration/transition_1//weights": "structure_module.transition.layers.0.linear_2.weight",
    SIDECHAIN + "resblock2_1//bias": "structure_module.angle_resnet.layers.1.linear_2.bias",
    "predicted_lddt_head/act_1//weights": "aux_heads.plddt.linear_2.weight",
    "predicted_aligned_error_head/logits//weights": "aux_heads.tm.linear.weight",
    "experimentally_resolved_head/logits//bias": "aux_heads.experimentally_resolved.linear.bias",
}
BLOCK = "evoformer/evoformer_iteration/"
PUBLISHED_IN_BLOCKS = {
    "msa_row_attention_with_pair_bias//feat_2d_weights": "msa_att_row.linear_z.weight",
    "msa_row_attention_with_pair_bias/attention//gating_b": "msa_att_row.mha.linear_g.bias",
    "msa_column_attention/query_norm//scale": "msa_att_col.layer_norm_m.weight",
    "msa_transition/transition2//weights": "msa_transition.linear_2.weight",
    "outer_product_mean/right_projection//weights": "outer_product_mean.linear_2.weight",
    "outer_product_mean//output_w": "outer_product_mean.linear_out.weight",
    "triangle_multiplication_outgoing/left_projection//weights": "tri_mul_out.linear_a_p.weight",
    "triangle_multiplication_incoming/left_projection//weights": "tri_mul_in.linear_b_p.weight",  # exchanged
    "triangle_multiplication_incoming/right_gate//bias": "tri_mul_in.linear_a_g.bias",
    "triangle_multiplication_incoming/gating_linear//weights": "tri_mul_in.linear_g.weight",
    "triangle_attention_starting_node//feat_2d_weights": "tri_att_start.linear.weight",
    "triangle_attention_ending_node/attention//output_w": "tri_att_end.mha.linear_o.weight",
    "pair_transition/input_layer_norm//offset": "pair_transition.layer_norm.bias",
}


def test_names_are_those_of_openfolds_own_import(model: AlphaFold) -> None:
    from warpfold.model.weights.deepmind import arrays

    every = list(arrays(model))
    found = {array.theirs: openfold_name(array.ours) for array in every if array.block is None}
    assert {name: found[name] for name in PUBLISHED} == PUBLISHED
    blocks = {(a.theirs, a.block): openfold_name(a.ours) for a in every if a.theirs.startswith(BLOCK)}
    for name, theirs in PUBLISHED_IN_BLOCKS.items():
        assert [blocks[BLOCK + name, block] for block in (0, 1)] == [f"evoformer.blocks.{i}.{theirs}" for i in (0, 1)]
    assert len({openfold_name(name) for name in model.state_dict()}) == len(model.state_dict())


@pytest.mark.parametrize("version", [1, 2])
def test_a_checkpoint_computes_what_it_was_made_of(tmp_path: Path, model: AlphaFold, version: int) -> None:
    path = save(tmp_path / "finetuning_ptm_1.pt", as_openfold(model, version))
    found = load_model(path).eval()
    widths = {"head_width": 3}, {"head_width": 2}
    pair, template_pair = (replace(c.pair, **w) for c, w in zip((CONFIG.evoformer, CONFIG.templates), widths))
    expected = replace(
        CONFIG, evoformer=replace(CONFIG.evoformer, pair=pair), templates=replace(CONFIG.templates, pair=template_pair)
    )
    assert found.config == load_config(path) == expected
    batch = random_batch()
    with torch.no_grad():
        ours, theirs = model(batch, 0), found(batch, 0)
    assert torch.equal(ours.structure.final_atom37, theirs.structure.final_atom37)
    assert torch.equal(ours.pair, theirs.pair)
    assert data_settings(path) == {"max_msa": 508, "max_extra": 5120}
    assert "does not tell how its alignments were sampled" in str(assumed_settings(path))


def test_a_training_gives_its_averaged_weights(tmp_path: Path) -> None:
    model = tiny_model(templates=TemplateConfig(enabled=False))
    weights = {f"model.{name}": tensor + 1 for name, tensor in as_openfold(model).items()}
    training = {"state_dict": weights, "ema": {"params": as_openfold(model), "decay": 1}, "global_step": 7}
    for what, expected in ((training, 0), ({"state_dict": weights}, 1)):
        found = load_model(save(tmp_path / "last.ckpt", what)).state_dict()
        assert all(torch.equal(found[name], x + expected) for name, x in model.state_dict().items())
    assert data_settings(tmp_path / "last.ckpt") == {"max_msa": 512, "max_extra": 5120}


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    for module, name in (("os", "system"), ("posix", "system"), ("builtins", "exec"), ("subprocess", "call")):
        path = save(tmp_path / "evil.pt", {"a": Called(module, name, (f"touch {touched}",))})
        with pytest.raises(UserError, match=rf"holds more than tensors \({module}.{name}\), which is not executed"):
            load_model(path)
    assert not touched.exists()


def test_files_that_are_no_checkpoints(tmp_path: Path, model: AlphaFold) -> None:
    good = save(tmp_path / "good.pt", as_openfold(model)).read_bytes()
    path = tmp_path / "bad.pt"
    for data, says in ((b"nonsense", "not a checkpoint that torch"), (good[:2000], "not a checkpoint that torch")):
        path.write_bytes(data)
        with pytest.raises(UserError, match=says):
            load_model(path)
    for what, says in (
        ((1, 2), "holds no state dict"),
        ({"weight": torch.ones(2)}, "not the parameters of OpenFold's AlphaFold2; no usable tensor"),
        ({"structure_module.ipa.linear_k_points.linear.weight": torch.ones(2)}, "of a multimer are not supported"),
    ):
        with pytest.raises(UserError, match=says) as error:
            load_model(save(path, what))
        assert "\n" not in str(error.value)
    weights = as_openfold(model)
    del weights["aux_heads.plddt.linear_1.bias"]
    weights["aux_heads.new.weight"] = torch.ones(2)
    with pytest.raises(UserError, match=r"1 missing: plddt\.act_0\.bias; 1 surplus: aux_heads\.new\.weight"):
        load_model(save(path, weights))


def test_damaged_pickles_are_one_line(tmp_path: Path) -> None:
    """A file with any byte of its description changed is read, or refused in one line."""
    import zipfile

    save(tmp_path / "small.pt", {"a": torch.ones(2), "b": (1, True)})
    with zipfile.ZipFile(tmp_path / "small.pt") as file:
        members = {name: file.read(name) for name in file.namelist()}
    data = members["archive/data.pkl"]
    for place in range(0, len(data), 3):
        changed = data[:place] + bytes([data[place] ^ 0x15]) + data[place + 1 :]
        with zipfile.ZipFile(tmp_path / "bad.pt", "w") as file:
            for name, content in (members | {"archive/data.pkl": changed}).items():
                file.writestr(name, content)
        with pytest.raises(UserError) as error:
            load_model(tmp_path / "bad.pt")
        assert "\n" not in str(error.value)
