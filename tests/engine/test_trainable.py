"""Test trained and frozen parameters: names, gradients and buffers; and adapters against the dense weight."""

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.helpers import filled_model, random_batch, tiny_config
from warpfold.batch import Batch
from warpfold.engine.optim import OptimConfig, Optimizer
from warpfold.engine.trainable import AdapterConfig, FinetuneConfig, Trained, freeze, frozen_state, merged_state
from warpfold.errors import UserError
from warpfold.geometry.labels import structure_labels
from warpfold.model.alphafold import AlphaFold
from warpfold.model.layers import AdaptedLinear, Linear, joined
from warpfold.model.losses import LossConfig, total_loss
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan

LOSSES = LossConfig(predicted_aligned_error=0.1, experimentally_resolved=0.01)


def example(n: int = 7) -> Batch:
    batch = random_batch(n, 4, 5, 2, 1, 0)
    batch["all_atom_positions"] = 4 * torch.randn(n, 37, 3, generator=torch.Generator().manual_seed(0))
    batch["all_atom_mask"] = batch["atom37_atom_exists"].clone()
    batch["resolution"], batch["use_clamped_fape"] = torch.tensor(2.0), torch.tensor(1.0)
    return batch | structure_labels(batch["aatype"], batch["all_atom_positions"], batch["all_atom_mask"])


def loss_of(model: AlphaFold) -> Tensor:
    model.noise.seed(0)
    dtype = next(model.parameters()).dtype
    batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in example().items()}
    return total_loss(model(batch, 0), batch, LOSSES)[0]


def only(*trainable: str, on: tuple[str, ...] = (), rank: int = 2, scale: float = 1.0) -> FinetuneConfig:
    return FinetuneConfig(trainable=trainable, adapters=AdapterConfig(on=on, rank=rank, scale=scale))


@pytest.mark.parametrize(
    ("config", "first"),
    [
        (only("all"), "input"),
        (only("structure"), "structure"),
        (only("heads"), "distogram"),
        (only("evoformer.blocks.1", "pae"), "evoformer"),
        (only("*.outer.out.bias"), "extra_stack"),
        (only(on=("evoformer.*.out",)), "evoformer"),
        (only("plddt.logits.bias", on=("structure",)), "plddt"),
    ],
)
def test_what_is_named_alone_has_a_gradient_and_everything_a_step_needs(config: FinetuneConfig, first: str) -> None:
    model = filled_model(tiny_config())
    trained = freeze(model, config)
    assert trained.names[0].split(".")[0] == first
    assert config.freezes == bool(frozen_state(model))
    named = dict(model.named_parameters())
    size = sum(named[name].numel() for name in trained.names)
    optimizer = Optimizer(model, OptimConfig(warmup_steps=1))
    before = {name: p.detach().clone() for name, p in named.items()}
    # In the first step B is zero, and so is the gradient of A.
    for step in range(2):
        loss_of(model).backward()
        optimizer.collect()
        optimizer.step(step)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved <= set(trained.names)
    # Some gradients are zero in exact arithmetic.
    assert len(moved) > 0.8 * len(trained.names)
    state = optimizer.state()
    assert {name.partition(".")[2] for name in state if name.startswith("moment1.")} == set(trained.names)
    padded = optimizer.weights.numel()
    assert size <= padded < size + 64 * len(trained.names) + 64
    buffers = (optimizer.gradient, optimizer.total, optimizer.average, *optimizer.rule.moments.values())
    assert {x.numel() for x in buffers} == {padded}  # also of messages
    assert all(p.grad is None for name, p in model.named_parameters() if name not in trained.names)
    assert frozen_state(model).keys() == named.keys() - set(trained.names)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_frozen_weights_lie_packed_in_the_dtype_of_operations(precision: str) -> None:
    model = Execution(Plan(precision=precision)).bind(filled_model(tiny_config()))  # type: ignore[arg-type]
    freeze(model, only("structure"))
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    optimizer = Optimizer(model, OptimConfig(), dtype=dtype)
    loss_of(model).backward()
    rest = optimizer.packed.frozen_pack
    assert rest is not None
    assert rest.gradient is None
    assert rest.compute.dtype == dtype
    assert rest.leaves()
    assert not any(leaf.requires_grad for leaf in rest.leaves())
    layer = model.evoformer.blocks[0].pair.starting
    weight, _ = joined(dtype, *layer.projections)
    assert weight.untyped_storage().data_ptr() == rest.compute.untyped_storage().data_ptr()
    torch.testing.assert_close(weight, torch.cat([p.weight for p in layer.projections]).to(dtype), rtol=0, atol=0)
    with torch.no_grad():
        layer.projections[0].weight.mul_(2)  # like `load_state_dict`
    weight, _ = joined(dtype, *layer.projections)
    torch.testing.assert_close(weight, torch.cat([p.weight for p in layer.projections]).to(dtype), rtol=0, atol=0)


def test_the_backward_pass_ends_at_the_first_trained_layer() -> None:
    model = filled_model(tiny_config())
    freeze(model, only("evoformer.blocks.1"))
    seen: dict[str, bool] = {}
    for name in ("input", "extra_stack", "evoformer.blocks.0", "evoformer.blocks.1", "structure"):
        hook = model.get_submodule(name).register_forward_hook
        hook(lambda _m, _a, out, name=name: seen.__setitem__(name, any(x.requires_grad for x in _tensors(out))))
    loss_of(model).backward()
    assert seen == {"extra_stack": False, "evoformer.blocks.0": False, "evoformer.blocks.1": True, "structure": True}


def _tensors(out: object) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    parts = out if isinstance(out, tuple) else vars(out).values() if hasattr(out, "__dict__") else ()
    return [x for part in parts for x in _tensors(part)]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (only("structur"), '"structur" is not the name of a parameter of this model. Did you mean structure'),
        (only("xyz"), "Its modules are input, "),
        (only("structure", on=("evoformer.*.nowhere",)), "finetune.adapters.on: .* is not the name of a projection"),
        (only("all", on=("evoformer",)), r"finetune.trainable has evoformer\S+weight, on which finetune.adapters.on"),
        (only("templates.nothing"), "is not the name of a parameter"),
    ],
)
def test_names_that_are_nowhere_are_refused(config: FinetuneConfig, said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        Trained(filled_model(tiny_config()), config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (only("structure", on=("evoformer.blocks.1.*.out",)), r"evoformer\.blocks\.1\.\S+ is trained"),
        (only("structure", "masked_msa"), "the head masked_msa is trained, which reads whole alignments"),
        (only("structure"), "finetune.draws is 0"),
    ],
)
def test_what_keeps_a_trunk_from_being_cached_is_named(config: FinetuneConfig, why: str) -> None:
    trained = Trained(filled_model(tiny_config()), config)
    assert re.match(why, trained.why_not_cached() or "")
    assert Trained(filled_model(tiny_config()), replace(only("structure"), draws=1)).why_not_cached() is None


def test_heads_without_a_loss_are_refused() -> None:
    trained = Trained(filled_model(tiny_config()), only("pae", "resolved"))
    trained.check_losses(LOSSES)
    with pytest.raises(UserError, match=r"pae and resolved would learn nothing, since .*experimentally_resolved = 0"):
        trained.check_losses(LossConfig())


@pytest.mark.parametrize(
    "values", [{"trainable": ()}, {"draws": -1}, {"trunk": "cached"}, {"adapters": AdapterConfig}], ids=str
)
def test_settings_that_make_no_sense_are_refused(values: dict) -> None:
    with pytest.raises(ValueError, match=r"trains nothing|negative|draws above 0|rank must"):
        FinetuneConfig(**(values | ({"adapters": AdapterConfig(rank=0)} if "adapters" in values else {})))


# Adapters


def in_fp64(model: AlphaFold, plan: Plan | None = None) -> AlphaFold:
    return Execution(replace(plan or Plan(), precision="fp64")).bind(model)


def adapted(scale: float = 0.5, **more: object) -> tuple[AlphaFold, Trained]:
    """Make a model in fp64 with adapters on all projections and a nonzero B."""
    model = in_fp64(filled_model(tiny_config(**more)))
    trained = freeze(model, only(on=("*",), scale=scale))
    for module in model.modules():
        if isinstance(module, AdaptedLinear):
            torch.nn.init.normal_(module.adapter_b, std=0.1)
    return model, trained


def test_a_model_with_adapters_begins_as_it_was() -> None:
    plain, model = filled_model(tiny_config()), filled_model(tiny_config())
    freeze(model, only(on=("*",)))
    assert torch.equal(loss_of(model), loss_of(plain))
    a = [m.adapter_a for m in model.modules() if isinstance(m, AdaptedLinear)]
    assert all(0.2 < float(x.detach().std()) * x.shape[1] ** 0.5 < 3 for x in a)
    again = filled_model(tiny_config())
    freeze(again, only(on=("*",)))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters()))


def test_adapters_merge_exactly_and_leave_the_usual_names() -> None:
    model, trained = adapted()
    plain = in_fp64(filled_model(tiny_config()))
    assert merged_state(model).keys() == plain.state_dict().keys()
    plain.load_state_dict(merged_state(model))
    assert torch.equal(loss_of(model), loss_of(plain))
    assert len(trained.names) == 2 * len(trained.adapted) == 2 * sum(isinstance(m, Linear) for m in plain.modules())


@pytest.mark.parametrize(
    "plan",
    [Plan(), Plan(recompute="block"), Plan(recompute="layer", chunk=3), Plan(kernels="definition")],
    ids=["whole", "recomputed", "chunks", "definition"],
)
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_adapters_are_those_of_the_dense_form(plan: Plan, packed: bool) -> None:
    scale = 0.5
    (model, trained), plain = adapted(scale), in_fp64(filled_model(tiny_config()))
    plain.load_state_dict(merged_state(model))
    in_fp64(model, plan)
    if packed:
        Optimizer(model, OptimConfig())
    loss_of(model).backward()
    loss_of(plain).backward()
    largest = max(float(p.grad.norm()) for p in plain.parameters() if p.grad is not None)
    for name in trained.adapted:
        layer, dense = model.get_submodule(name), plain.get_submodule(name).weight.grad
        if dense is None:
            assert layer.adapter_a.grad is None or not layer.adapter_a.grad.any()
            continue
        for found, expected in (
            (layer.adapter_a.grad, scale * layer.adapter_b.T @ dense),
            (layer.adapter_b.grad, scale * dense @ layer.adapter_a.T),
        ):
            # A gradient that is zero in exact arithmetic is the rounding error of sums of large numbers.
            size = max(float(expected.detach().norm()), 1e-6 * largest)
            assert float((found - expected).detach().norm()) <= 1e-10 * size, name
