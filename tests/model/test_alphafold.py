"""The whole model: recycling, ensembling, plans, degenerate inputs, precision."""

from dataclasses import asdict, fields, replace

import pytest
import torch

from tests.helpers import random_batch, random_complex, tiny_config, tiny_model, tiny_multimer
from warpfold.batch import FEATURES
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.model.evoformer import MSARowAttention
from warpfold.model.heads import PLDDTHead
from warpfold.model.template import TemplateConfig, TemplatePairStack
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan


def tensors(output):
    """Collect the tensors of an output by name."""
    out = {f.name: getattr(output, f.name) for f in fields(output) if isinstance(getattr(output, f.name), torch.Tensor)}
    s = output.structure
    return out | {"atoms": s.final_atom37, "angles": s.angles, "backbone": s.frames.translation}


def assert_same(a, b, tolerance):
    a, b = tensors(a), tensors(b)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_the_defaults_are_those_of_alphafold2():
    """Supp. 1.2.7 to 1.9 and the official model/config.py, model_1. Settings of later models are off."""
    pair = {"heads": 4, "head_width": None, "transition": 4, "activation": "relu", "rate": 0.25, "fused": False}
    evoformer = {"blocks": 48, "heads": 8, "transition": 4, "activation": "relu", "rate": 0.15, "c_outer": 32}
    templates = {"enabled": True, "c": 64, "blocks": 2, "heads": 4, "attention_width": 16, "torsion_rows": True}
    structure = {"layers": 8, "c": 384, "heads": 12, "c_hidden": 16, "qk_points": 4, "v_points": 8, "scalar_bias": True}
    structure |= {"transition_layers": 3, "position_scale": 10.0, "sidechain_c": 128, "sidechain_blocks": 2}
    heads = {"distogram_bins": 64, "msa_classes": 23, "plddt_c": 128, "plddt_bins": 50, "pae": False, "pae_bins": 64}
    of_templates = pair | {"c_triangle": 64, "transition": 2, "order": "attention_first"}
    assert asdict(ModelConfig()) == {
        "c_m": 256,
        "c_z": 128,
        "c_s": 384,
        "c_e": 64,
        "max_relative": 32,
        "recycles": 3,
        "recycle_tolerance": None,
        "ensemble": 1,
        "extra_blocks": 4,
        "multimer": None,
        "evoformer": evoformer
        | {"outer": "middle", "pair": pair | {"c_triangle": 128, "order": "multiplication_first"}},
        "templates": templates | {"unit_vectors": False, "pair": of_templates},
        "structure": structure | {"dropout": 0.1},
        "heads": heads,
    }
    assert MSARowAttention(8, 8).dropout_rate == 0.15
    assert PLDDTHead(8).act_0.weight.shape[0] == 128
    assert TemplatePairStack(TemplateConfig()).blocks[0].transition.up.weight.shape == (2 * 64, 64)


def test_noise_differs_between_steps_and_repeats_within_one():
    model, batch = tiny_model().train(), random_batch()
    outs = []
    for step in (1, 1, 2):
        model.noise.seed(0, step)
        outs.append(model(batch).pair)
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_recycling_changes_the_result_and_is_constant_for_the_gradient():
    model, batch = tiny_model(), random_batch()
    assert not torch.allclose(model(batch, recycles=0).pair, model(batch, recycles=2).pair)
    out = model(batch, recycles=2)
    out.pair.sum().backward()
    assert model.recycling.norm_z.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("make", "batch"), [(tiny_model, random_batch), (tiny_multimer, lambda **of: random_complex((4, 3, 2), **of))]
)
def test_passes_use_their_own_alignment(make, batch):
    model, three = make().eval(), batch(passes=3)
    last = {k: v.narrow(0, 2, 1) if FEATURES[k].per_pass else v for k, v in three.items()}
    assert not torch.allclose(model(three, recycles=2).msa, model(last, recycles=2).msa)
    with pytest.raises(ValueError, match="3 samples"):
        model(three, recycles=1)


def masked(batch):
    names = ("seq_mask", "msa_mask", "extra_msa_mask", "alignment_mask", "template_mask", "template_all_atom_masks")
    return {name: torch.zeros_like(x) if name in names else x for name, x in batch.items()}


DEGENERATE = {
    "one residue, no template": (tiny_model, lambda: random_batch(1, 1, 1, 0)),
    "one residue": (tiny_model, lambda: random_batch(1, 5, 2, 1)),
    "one sequence": (tiny_model, lambda: random_batch(3, 1, 1, 2)),
    "all masked": (tiny_model, lambda: masked(random_batch())),
    "a chain of one": (tiny_multimer, lambda: random_complex((1,), 2, 1, 1, 0)),
    "chains of one": (tiny_multimer, lambda: random_complex((1, 1, 1), 3, 2, 1, 1)),
    "a masked complex": (tiny_multimer, lambda: masked(random_complex((4, 3, 4)))),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_examples_are_finite(name, precision):
    make, batch = DEGENERATE[name]
    model = Execution(Plan(precision=precision)).bind(make()).train()
    total = sum(t.float().square().mean() for t in tensors(model(batch())).values())
    total.backward()
    assert total.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_an_ensemble_of_equals_is_one():
    batch = random_batch()
    one, two = tiny_model(), tiny_model(ensemble=2)
    with torch.no_grad():
        assert_same(two(batch), one(batch), 1e-4)


def test_padding_does_not_reach_the_rest():
    model, batch = tiny_model(), random_batch(residues=9)
    batch["seq_mask"] = torch.ones(9)
    batch["seq_mask"][7:] = 0
    for name in ("msa_mask", "extra_msa_mask"):
        batch[name][..., 7:] = 0
    for name in ("template_all_atom_masks", "template_pseudo_beta_mask"):
        batch[name][:, 7:] = 0
    other = dict(batch)
    for name in ("target_feat", "msa_feat", "extra_deletion_value"):
        other[name] = batch[name].clone()
        other[name][
            (..., slice(7, None), slice(None)) if name != "extra_deletion_value" else (..., slice(7, None))
        ] += 3
    with torch.no_grad():
        a, b = model(batch), model(other)
    assert torch.equal(a.pair[:7, :7], b.pair[:7, :7])  # masked entries contribute exactly 0
    assert torch.equal(a.structure.final_atom37[:7], b.structure.final_atom37[:7])


def test_templates_that_are_padding_add_nothing_to_the_pair_representation():
    model, batch = tiny_model(), random_batch(templates=2)
    z = torch.randn(*batch["aatype"].shape, batch["aatype"].shape[-1], model.config.c_z)
    padding = {**batch, "template_mask": torch.zeros(2)}
    assert torch.equal(model.templates(z.clone(), torch.ones(z.shape[:-1]), padding), z)
    assert not torch.equal(model.templates(z.clone(), torch.ones(z.shape[:-1]), batch), z)


def test_templates_count_and_none_is_none():
    model = tiny_model()
    with_two, without = random_batch(templates=2), random_batch(templates=0)
    assert not torch.allclose(model(with_two).pair, model({**with_two, "template_mask": torch.zeros(2)}).pair)
    assert model(without).pair.isfinite().all()
    bare = {k: v for k, v in without.items() if not k.startswith("template")}
    config = tiny_config()
    no_templates = tiny_model(templates=replace(config.templates, enabled=False))
    assert no_templates(bare).pair.isfinite().all()


def test_a_fresh_model_starts_as_an_identity():
    torch.manual_seed(0)
    model, batch = AlphaFold(tiny_config()).eval(), random_batch()
    m = torch.randn(5, 9, 16)
    z = torch.randn(9, 9, 12)
    m_out, z_out = model.evoformer(m, z, batch["msa_mask"][0], torch.ones(9, 9))
    assert torch.equal(m, m_out)  # every update ends in a projection of zeros (Supp. 1.11.4)
    assert torch.equal(z, z_out)


def test_transitions_may_be_swiglu():
    """The settings of both halves of a block select SwiGLU, without biases and with as many gates as values."""
    config = tiny_config()
    pair = replace(config.evoformer.pair, activation="swiglu")
    trunk = replace(config.evoformer, activation="swiglu", pair=pair, blocks=1)
    model = AlphaFold(replace(config, evoformer=trunk)).eval()
    names = {name: p.shape for name, p in model.evoformer.named_parameters() if ".transition." in name}
    assert names == {
        f"blocks.0.{half}.transition.{name}": shape
        for half, c in (("msa", 16), ("pair", 12))
        for name, shape in {
            "norm.weight": (c,),
            "norm.bias": (c,),
            "up.weight": (2 * 4 * c, c),
            "down.weight": (c, 4 * c),
        }.items()
    }
    assert model(random_batch()).pair.isfinite().all()
