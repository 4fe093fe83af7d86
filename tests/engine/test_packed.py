"""Test packed weights: operations read the current values of parameters, and gradients reach the buffer."""

import copy
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from warpfold.cost.launches import Operations
from warpfold.engine.optim import OptimConfig, Optimizer
from warpfold.engine.packed import GROUP, PackedWeights, packed_order
from warpfold.model.evoformer import Evoformer, EvoformerConfig, GatedAttention, MSARowAttention, PairConfig
from warpfold.model.layers import AdaptedLinear, LayerNorm, Linear, joined
from warpfold.model.pair_bias import AttentionPairBias
from warpfold.ops import dispatch
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan

C_M, C_Z, S, R = 32, 16, 5, 7
PLANS = {
    "whole": Plan(),
    "chunk": Plan(chunk=3),
    "recompute": Plan(recompute="block"),
    "recompute layers": Plan(recompute="layer"),
    "definition": Plan(kernels="definition"),
}


def stack(blocks: int = 2, seed: int = 0, **pair: bool) -> Evoformer:
    torch.manual_seed(seed)
    config = EvoformerConfig(blocks=blocks, heads=2, c_outer=16, pair=PairConfig(heads=2, c_triangle=16, **pair))  # type: ignore[arg-type]
    model = Evoformer(C_M, C_Z, config)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model.eval()


def states(dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    m, z = torch.randn(S, R, C_M).to(dtype), torch.randn(R, R, C_Z).to(dtype)
    m_mask, z_mask = (torch.rand(S, R) > 0.2).float(), (torch.rand(R, R) > 0.2).float()
    return m, z, m_mask, z_mask


def loss(model: nn.Module, dtype: torch.dtype) -> Tensor:
    return sum((t.double().sin().sum() for t in model(*states(dtype))), torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("fused", [False, True])
def test_values_and_gradients_are_those_of_the_parameters(plan: str, fused: bool) -> None:
    plain, model = stack(fused=fused).double(), stack(fused=fused).double()
    Execution(PLANS[plan]).bind(plain)
    Execution(PLANS[plan]).bind(model)
    packed = PackedWeights(model, trained=True)
    expected, got = loss(plain, torch.float64), loss(model, torch.float64)
    expected.backward()
    got.backward()
    # The sums have another order, so rounding differs: 2^-53 of sums of about 1e3, a hundred times over.
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-10)
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(
            p.grad, q.grad, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert packed.leaves()


def test_weights_read_together_lie_together_and_state_dicts_are_as_they_were() -> None:
    model = stack()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    packed = PackedWeights(model, torch.bfloat16)
    order, together = packed_order(model)
    assert sorted(order) == sorted(before)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    block = model.blocks[0]
    with torch.no_grad():
        for layer in (block.pair.starting, block.pair.outgoing, block.outer, block.msa.row.attention):
            weight, bias = joined(torch.bfloat16, *layer.projections)
            assert weight.untyped_storage().data_ptr() == packed.compute.untyped_storage().data_ptr()
            assert torch.equal(weight, torch.cat([p.weight for p in layer.projections]).bfloat16())
            biases = [p.bias for p in layer.projections if p.bias is not None]
            assert bias is not None
            assert torch.equal(bias, torch.cat(biases).bfloat16())
            assert weight.data_ptr() % 32 == 0
    assert "blocks.0.pair.starting.bias.weight" in together


def test_a_bias_behind_a_projection_without_one_is_read_where_it_is() -> None:
    """The zeros before the bias are no parameter, so the projections are joined for each use."""
    layer, results = AttentionPairBias(C_M, C_Z, heads=2).double(), []
    for i, p in enumerate(layer.parameters()):
        torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(i))
    given = [torch.arange(n, dtype=torch.float64).sin() for n in (4 * C_M, 16 * C_Z)]
    s, z = given[0].view(1, 4, C_M), given[1].view(4, 4, C_Z)
    for pack in (False, True):
        packed = PackedWeights(layer, trained=True) if pack else None
        dx = layer(s, torch.ones(1, 4), z, residual=False)
        dx.sum().backward()
        results.append([dx.detach(), *(p.grad.clone() for p in layer.parameters())])
        assert packed is None or packed.joined(torch.float64, layer.projections) is None
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class Copies(TorchDispatchMode):
    """Record operations that join, cast or fill as many numbers as a weight has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        # The last axes of weights.  Activations have 5 or 7 before them.
        weights = (C_M, C_Z)
        if name in ("cat", "_to_copy") and isinstance(out, Tensor) and out.dim() == 2 and out.shape[-1] in weights:
            self.found.append(f"{name} {list(out.shape)}")
        return out


def test_no_weight_is_joined_or_cast_in_a_pass() -> None:
    model = Execution(Plan(precision="bf16")).bind(stack())
    with Copies() as seen:
        loss(model, torch.bfloat16)
    assert seen.found, "without packing they are"
    PackedWeights(model, torch.bfloat16, trained=True)
    with Copies() as seen:
        loss(model, torch.bfloat16)
    assert not seen.found


def test_gradients_of_half_precision_arrive_unrounded() -> None:
    model = Linear(16, 16)
    packed = PackedWeights(model, torch.bfloat16, trained=True)
    weight, _ = joined(torch.bfloat16, model)
    assert weight.dtype == torch.bfloat16
    for _ in range(3):
        Third.apply(weight).backward()
    assert torch.equal(model.weight.grad, torch.full((16, 16), 1 / 3) * 3)
    assert packed.gradient is not None
    assert packed.gradient.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_added_many_at_a_time(dtype: torch.dtype) -> None:
    """No gradient is copied, and a second pass without `release` adds the same bits one by one."""
    model, found = stack(), []
    packed = PackedWeights(model, dtype, trained=True)
    with dispatch.always_fast():
        loss(model, dtype)  # creates the leaves
        linears = {id(p) for module in model.modules() if isinstance(module, Linear) for p in module.parameters()}
        leaves = {id(t) for t in (*packed.leaves(), *model.parameters())} - linears | {id(t) for t in packed.leaves()}
        for released in (True, False, True):
            assert packed.gradient is not None
            packed.gradient.zero_()
            if released:
                packed.release()
            sums, out = Counter[str](), loss(model, dtype)
            with Operations(lambda func, args, kwargs, out, sums=sums: sums.update([func._opname])):
                out.backward()
            found.append((sums["_foreach_add_"], sums["clone"], packed.gradient.clone()))
    assert len(leaves) > GROUP
    assert [lists for lists, *_ in found] == [-(-len(leaves) // GROUP), 0, -(-len(leaves) // GROUP)]
    assert len({clones for _, clones, _ in found}) == 1
    assert torch.equal(found[0][2], found[1][2])
    assert torch.equal(found[0][2], found[2][2])


def test_what_waits_when_a_backward_pass_fails_is_added_with_the_next() -> None:
    model = Linear(16, 16)
    packed = PackedWeights(model, torch.bfloat16, trained=True)
    weight, _ = joined(torch.bfloat16, model)
    failing = weight.detach().clone().requires_grad_()
    failing.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        # The backward pass begins with the last one.
        (Third.apply(failing) + Third.apply(weight)).backward()
    assert not model.weight.grad.any()
    packed.release()
    Third.apply(weight).backward()
    assert torch.equal(model.weight.grad, torch.full((16, 16), 1 / 3) * 2)


def test_a_gradient_that_was_set_to_none_is_made_anew_before_a_pass_and_missed_after_it() -> None:
    model = nn.LayerNorm(16)
    optimizer = Optimizer(model, OptimConfig())
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        model(torch.arange(16.0)).square().sum().backward()
        assert torch.equal(model.weight.grad, optimizer.gradient[: len(model.weight)])
        assert optimizer.gradient.any()
        optimizer.collect()
    model(torch.arange(16.0)).square().sum().backward()
    model.zero_grad(set_to_none=True)
    with pytest.raises(RuntimeError, match="a grad was set to None"):
        optimizer.collect()


class Third(torch.autograd.Function):
    """A sum with a gradient of 1/3 in fp32."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return x.float().sum()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return torch.full((16, 16), 1 / 3)


def _fill(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.25)


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: torch.full_like(p, 0.25) for name, p in model.state_dict().items()})


def _replace(model: nn.Module) -> None:
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.full_like(p, 0.25)))


def _replace_one(model: nn.Module) -> None:
    linear = next(module for module in model.modules() if isinstance(module, Linear))
    linear.weight = nn.Parameter(torch.full_like(linear.weight, 0.25))


def _move(model: nn.Module) -> None:
    model.double().float()
    _fill(model)


def _data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = torch.full_like(p, 0.25)


@pytest.mark.parametrize("write", [_fill, _load, _replace, _move, _data])
@pytest.mark.parametrize("used_before", [False, True])
def test_what_is_written_to_parameters_is_read(write: Callable[[nn.Module], None], used_before: bool) -> None:
    plain, model = stack(), stack()
    PackedWeights(model, torch.bfloat16)
    with torch.no_grad():
        if used_before:
            model(*states(torch.bfloat16))
        write(model)
        _fill(plain)
        for got, expected in zip(model(*states(torch.bfloat16)), plain(*states(torch.bfloat16))):
            assert torch.equal(got, expected)


def _replace_norm(layer: MSARowAttention) -> None:
    layer.norm = LayerNorm(C_M)
    nn.init.constant_(layer.norm.weight, 0.5)


def _replace_attention(layer: MSARowAttention) -> None:
    torch.manual_seed(3)
    layer.attention = GatedAttention(C_M, 2)
    for p in layer.attention.parameters():
        nn.init.normal_(p, std=0.3)


def _replace_projection(layer: MSARowAttention) -> None:
    layer.attention.k = Linear(C_M, C_M, bias=False)
    nn.init.constant_(layer.attention.k.weight, 0.1)


def _remove_bias(layer: MSARowAttention) -> None:
    layer.attention.out.bias = None


def _adapt(layer: MSARowAttention) -> None:
    v = layer.attention.v
    v.__class__ = AdaptedLinear
    v.adapter_a, v.adapter_b, v.scale = nn.Parameter(torch.ones(1, C_M)), nn.Parameter(torch.ones(C_M, 1)), 0.5


@pytest.mark.parametrize(
    "change", [_fill, _replace_norm, _replace_attention, _replace_projection, _remove_bias, _adapt, lambda layer: None]
)
@pytest.mark.parametrize("trained", [False, True])
def test_a_layer_s_parameters_are_gathered_again_only_when_something_changes(
    change: Callable[[MSARowAttention], None], trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, z, mask, _ = states(torch.bfloat16)
    plain, model = stack().blocks[0].msa.row, stack().blocks[0].msa.row
    PackedWeights(model, torch.bfloat16, trained=trained)
    gather, calls = MSARowAttention.gather_weights, Counter[MSARowAttention]()

    def counted(layer: MSARowAttention, dtype: torch.dtype, variant: bool) -> object:
        calls[layer] += 1
        return gather(layer, dtype, variant)

    monkeypatch.setattr(MSARowAttention, "gather_weights", counted)
    with torch.set_grad_enabled(trained):
        for _ in range(3):
            model(m, mask, z)
        assert calls[model] == 1
        for layer in (plain, model):
            change(layer)
        for _ in range(2):
            # Weights in bf16 are rounded before or while they are joined: the same numbers.
            torch.testing.assert_close(model(m, mask, z), plain(m, mask, z), rtol=0, atol=0)


def test_a_copy_has_weights_of_its_own() -> None:
    model = stack()
    PackedWeights(model, torch.bfloat16)
    other = copy.deepcopy(model)
    with torch.no_grad():
        expected = model(*states(torch.bfloat16))
        _fill(model)
        for got, before in zip(other(*states(torch.bfloat16)), expected):
            assert torch.equal(got, before)


def test_packed_for_reading_alone_gradients_still_reach_the_parameters() -> None:
    model = stack()
    PackedWeights(model)
    loss(model, torch.float32).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_what_is_frozen_later_gets_no_gradient() -> None:
    model = stack()
    packed = PackedWeights(model, trained=True)
    loss(model, torch.float32).backward()
    assert packed.gradient is not None
    packed.gradient.zero_()
    model.blocks[0].pair.starting.attention.q.weight.requires_grad_(False)
    loss(model, torch.float32).backward()
    assert not model.blocks[0].pair.starting.attention.q.weight.grad.any()
    assert model.blocks[0].pair.starting.attention.k.weight.grad.any()


def test_what_is_written_between_the_passes_is_noticed() -> None:
    model = stack()
    PackedWeights(model, torch.bfloat16, trained=True)
    out = loss(model, torch.bfloat16)
    _fill(model)
    loss(model, torch.bfloat16)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_hooks_of_a_parameter_see_its_gradient_and_may_change_it() -> None:
    model = stack()
    packed = PackedWeights(model, torch.bfloat16, trained=True)
    loss(model, torch.bfloat16).backward()
    weight = model.blocks[0].pair.starting.attention.q.weight
    expected = weight.grad.clone()
    assert packed.gradient is not None
    packed.gradient.zero_()
    weight.register_hook(lambda grad: 2 * grad)
    loss(model, torch.bfloat16).backward()
    # The values are cast to bf16 and back, with an error of 2^-8 of the largest.
    torch.testing.assert_close(weight.grad, 2 * expected, rtol=0, atol=float(expected.abs().max()) / 64)


def test_weights_that_two_layers_share_get_the_sum_of_their_gradients() -> None:
    torch.manual_seed(0)
    plain, model = (nn.Sequential(Linear(16, 16), Linear(16, 16)) for _ in range(2))
    for one in (plain, model):
        one.load_state_dict(plain.state_dict())
        one[1].weight = one[0].weight
    packed = PackedWeights(model, torch.bfloat16, trained=True)
    x = torch.randn(3, 16).bfloat16()
    plain(x).float().sum().backward()
    model(x).float().sum().backward()
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad, rtol=2**-7, atol=2**-7)
    with torch.no_grad():
        model[1].weight.fill_(0.5)
        assert torch.equal(model(torch.ones(1, 16)), model[1](model[0](torch.ones(1, 16))))
        assert joined(torch.bfloat16, model[0])[0].eq(0.5).all()
    assert packed.in_place


@pytest.mark.parametrize(
    "write", [_replace, _replace_one, _move, _data, nn.Module.half, lambda model: PackedWeights(model)]
)
def test_an_optimizer_notices_that_the_model_has_left(write: Callable[[nn.Module], None]) -> None:
    """Otherwise the optimizer would continue without an effect."""
    model = stack()
    optimizer = Optimizer(model, OptimConfig())
    write(model)
    with pytest.raises(RuntimeError, match="not in this Optimizer's buffers any more"):
        optimizer.collect()


def test_what_is_written_between_two_steps_may_be_read_twice_in_a_pass() -> None:
    """The layers of the structure module share their weights."""
    linear = Linear(16, 16)
    PackedWeights(linear, trained=True)
    for scale in (0.5, 0.25):
        y = torch.ones(2, 16)
        linear.load_state_dict({name: scale * p for name, p in linear.state_dict().items()})
        for _ in range(3):
            y = linear(y)
        y.sum().backward()
    assert linear.weight.grad.all()


@pytest.mark.parametrize("packed_there", [True, False])
def test_what_inference_mode_has_used_can_be_trained(packed_there: bool) -> None:
    model = Linear(16, 16)
    x = torch.ones(2, 16).bfloat16()
    if not packed_there:
        PackedWeights(model, torch.bfloat16, trained=True)
    with torch.inference_mode():
        if packed_there:
            PackedWeights(model, torch.bfloat16, trained=True)
        model(x)
    model(x).float().sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.all()


def test_the_optimizer_writes_both() -> None:
    """Test a step, the context of `averaged`, the time after it, and a checkpoint."""
    model = Execution(Plan(precision="bf16")).bind(stack())
    optimizer = Optimizer(model, OptimConfig(warmup_steps=1, learning_rate=0.1), dtype=torch.bfloat16)
    first = {name: x.clone() for name, x in optimizer.state().items()}
    seen = []
    for step in range(2):
        loss(model, torch.bfloat16).backward()
        optimizer.collect()
        optimizer.step(step)
        seen.append(optimizer.packed.compute.clone())
        assert torch.equal(seen[-1], optimizer.weights.bfloat16())
    with optimizer.averaged():
        assert torch.equal(optimizer.packed.compute, optimizer.weights.bfloat16())
    assert torch.equal(optimizer.packed.compute, seen[-1])
    optimizer.restore(first)
    assert torch.equal(optimizer.packed.compute, optimizer.weights.bfloat16())
    assert not torch.equal(optimizer.packed.compute, seen[-1])
