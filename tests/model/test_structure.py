"""The structure module: shapes and units, its gradients, masks, dropout, and the smallest cases."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.launches import Launches
from warpfold.geometry.rigid import Rigid, normalize, quaternion_to_rotation
from warpfold.model.structure import (
    FoldIteration,
    InvariantPointAttention,
    StructureConfig,
    StructureModule,
    StructureOutput,
)

C_S, C_Z = 6, 5
SMALL = StructureConfig(
    layers=3, c=8, heads=2, c_hidden=3, qk_points=2, v_points=3, sidechain_c=7, sidechain_blocks=2, dropout=0.0
)


def filled(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Draw all parameters, none of them zero, so that every path counts."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = 0.4 * torch.randn(parameter.shape, generator=generator)
    return module.eval()


def inputs(n: int, *batch: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Draw s, z and aatype."""
    generator = torch.Generator().manual_seed(seed)
    s = torch.randn(*batch, n, C_S, generator=generator).to(dtype)
    z = torch.randn(*batch, n, n, C_Z, generator=generator).to(dtype)
    return s, z, torch.randint(0, 21, (*batch, n), generator=generator)


def tensors(output: StructureOutput) -> dict[str, Tensor]:
    flat = dict(vars(output))
    return {k: v.to_flat12() if isinstance(v, Rigid) else v for k, v in flat.items()}


@pytest.fixture
def module() -> StructureModule:
    module = filled(StructureModule(C_S, C_Z, SMALL))
    assert isinstance(module, StructureModule)
    return module


def test_a_fresh_module_leaves_all_residues_at_the_origin() -> None:
    """The last layers of updates are initialised with zeros, so training starts from the "black hole" (line 4)."""
    s, z, aatype = inputs(4)
    out = StructureModule(C_S, C_Z, SMALL).eval()(s, z, aatype, torch.ones(4))
    assert torch.equal(out.traj, torch.tensor([1.0, 0, 0, 0, 0, 0, 0]).expand(3, 4, 7))


def test_points_at_the_origin_have_finite_gradients() -> None:
    """The norm of a value point that is exactly zero has no derivative."""
    ipa = InvariantPointAttention(SMALL.c, C_Z, heads=2, c_hidden=3, qk_points=2, v_points=3)
    for linear in (ipa.kv_point_local, ipa.q_point_local):
        torch.nn.init.zeros_(linear.weight)
    torch.nn.init.ones_(ipa.output_projection.weight)
    _, z, _ = inputs(4)
    ipa(torch.randn(4, SMALL.c), z, Rigid.identity((4,)), torch.ones(4)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in ipa.parameters())


def test_leading_axes_are_a_batch(module: StructureModule) -> None:
    s, z, aatype = inputs(4, 2)
    mask = torch.ones(2, 4)
    mask[1, 3] = 0
    together = tensors(module(s, z, aatype, mask))
    for b in range(2):
        for name, alone in tensors(module(s[b], z[b], aatype[b], mask[b])).items():
            per_layer = alone.shape[0] == SMALL.layers
            of_batch = together[name][:, b] if per_layer else together[name][b]
            torch.testing.assert_close(of_batch, alone, rtol=1e-4, atol=1e-4)


def test_masked_residues_have_no_influence(module: StructureModule) -> None:
    s, z, aatype = inputs(6)
    mask = torch.tensor([1.0, 1, 1, 1, 0, 0])
    padded = tensors(module(s, z, aatype, mask))
    for name, alone in tensors(module(s[:4], z[:4, :4], aatype[:4], mask[:4])).items():
        cut = padded[name][:, :4] if alone.shape[0] == SMALL.layers else padded[name][:4]
        torch.testing.assert_close(cut, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("n", "value"), [(1, 1.0), (1, 0.0), (3, 0.0)], ids=["one", "one masked", "all masked"])
def test_smallest_cases_are_finite_with_finite_gradients(module: StructureModule, n: int, value: float) -> None:
    s, z, aatype = inputs(n)
    s.requires_grad_()
    out = tensors(module(s, z, aatype, torch.full((n,), value)))
    assert all(x.isfinite().all() for x in out.values())
    sum(x.square().sum() for x in out.values()).backward()
    grads = [s.grad, *(p.grad for p in module.parameters())]
    assert all(g is not None and g.isfinite().all() for g in grads)


def test_rotations_pass_no_gradient_to_the_layer_before(
    module: StructureModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Algorithm 20, line 20. The gradient does pass through translations."""
    arriving: list[Tensor] = []
    advance = module.fold_iteration.advance
    monkeypatch.setattr(module.fold_iteration, "advance", lambda *args: (arriving.append(args[2]), advance(*args))[1])
    s, z, aatype = inputs(4)
    module(s, z, aatype, torch.ones(4))
    weight = module.fold_iteration.affine_update.weight
    assert (arriving[1][..., :4] != arriving[0][..., :4]).any()
    turned = arriving[1][..., :4].sum()
    moved = arriving[1][..., 4:].sum()
    assert not torch.autograd.grad(turned, weight, retain_graph=True)[0].any()
    assert torch.autograd.grad(moved, weight)[0].any()


def test_dropout_is_seeded_and_differs_between_layers() -> None:
    s, z, _ = inputs(4)
    module = filled(FoldIteration(C_S, C_Z, replace(SMALL, dropout=0.5)))
    assert isinstance(module, FoldIteration)
    arguments = (torch.randn(4, SMALL.c), s, z, Rigid.identity((4,)).to_quaternion7(), torch.ones(4))
    still = module(*arguments)[0]
    module.train()
    module.noise.seed(1)
    first, again, second = (module(*arguments, layer=layer)[0] for layer in (0, 0, 1))
    module.noise.seed(2)
    other = module(*arguments)[0]
    assert torch.equal(first, again)
    for x in (still, second, other):
        assert not torch.equal(first, x)


def one_point_after_another(ipa: InvariantPointAttention, s: Tensor, z: Tensor, at: Rigid, mask: Tensor) -> Tensor:
    """Compute Algorithm 22 literally, with all differences of points, [N, N, H, P, 3]."""
    h, c = ipa.heads, ipa.c_hidden

    def points(linear: torch.nn.Module) -> Tensor:
        local = linear(s).unflatten(-1, (3, h, -1)).movedim(-3, -1)
        return at[..., None, None].apply(local)

    q, (k, v) = ipa.q_scalar(s).unflatten(-1, (h, -1)), ipa.kv_scalar(s).unflatten(-1, (h, -1)).split(c, -1)
    q_points = points(ipa.q_point_local)
    k_points, v_points = points(ipa.kv_point_local).split((ipa.qk_points, ipa.v_points), -2)
    squared = (q_points[:, None] - k_points[None]).square().sum((-1, -2))
    gamma = torch.nn.functional.softplus(ipa.trainable_point_weights)
    logits = torch.einsum("ihc,jhc->ijh", q, k) / c**0.5 + ipa.attention_2d(z)
    logits = (logits - gamma * (2 / (9 * ipa.qk_points)) ** 0.5 / 2 * squared) / 3**0.5
    logits = logits - 1e5 * (mask[:, None] * (1 - mask))[..., None]
    a = logits.softmax(1)
    o_points = at[..., None, None].invert_apply(torch.einsum("ijh,jhpx->ihpx", a, v_points))
    lengths = (o_points.square().sum(-1) + 1e-8).sqrt()
    o, o_pair = torch.einsum("ijh,jhc->ihc", a, v), torch.einsum("ijh,ijc->ihc", a, z)
    parts = [o, *o_points.unbind(-1), lengths, o_pair]
    return ipa.output_projection(torch.cat([x.flatten(1) for x in parts], -1))


@pytest.mark.parametrize("scalar_bias", [True, False])
def test_attention_is_the_algorithms(scalar_bias: bool) -> None:
    """It agrees to rounding in fp64. In fp32, for a protein of 200 angstrom, it is about as exact as the algorithm."""
    n = 30
    ipa = filled(InvariantPointAttention(8, 5, 3, 4, qk_points=4, v_points=3, scalar_bias=scalar_bias))
    generator = torch.Generator().manual_seed(5)
    s, z, q, x = (torch.randn(n, *shape, generator=generator) for shape in ((8,), (n, 5), (4,), (3,)))
    mask = (torch.rand(n, generator=generator) > 0.2).float()
    flat = torch.cat([normalize(q), 10 * x / x.norm(dim=-1, keepdim=True)], -1)
    found, definition = (
        f(s, z, Rigid.from_quaternion7(flat), mask) for f in (ipa, lambda *x: one_point_after_another(ipa, *x))
    )
    ipa, s, z, flat, mask = (x.double() for x in (ipa, s, z, flat, mask))
    exact = one_point_after_another(ipa, s, z, Rigid.from_quaternion7(flat), mask)
    torch.testing.assert_close(ipa(s, z, Rigid.from_quaternion7(flat), mask), exact, rtol=1e-10, atol=1e-10)
    # Four squares of 10 (100 angstrom), times their factor, in units in the last place of fp32.
    squares = 4 * (2 * 10) ** 2 * torch.nn.functional.softplus(ipa.trainable_point_weights).max() / 18**0.5
    assert (found - exact).abs().max() <= 2 * (definition - exact).abs().max() + squares * 2**-24 * exact.abs().max()


def test_attention_does_not_lose_digits_far_from_the_origin() -> None:
    """Far from the origin, squares of coordinates that are not centred would cancel."""
    ipa = filled(InvariantPointAttention(8, 5, 3, 4, qk_points=4, v_points=3))
    generator = torch.Generator().manual_seed(6)
    s, z, q, x = (torch.randn(12, *shape, generator=generator) for shape in ((8,), (12, 5), (4,), (3,)))
    rotation = quaternion_to_rotation(normalize(q))
    x = (x * 256).round() / 256  # a grid, so that moving is exact
    here, there = (ipa(s, z, Rigid(rotation, x + shift), torch.ones(12)) for shift in (0, 512))
    assert (here - there).abs().max() < 1e-4 * here.abs().max()


@pytest.mark.parametrize("training", [False, True])
def test_attention_makes_nothing_larger_than_its_logits_or_z(training: bool) -> None:
    n, h, c_z = 64, 6, 4
    ipa = filled(InvariantPointAttention(8, c_z, h, 4, qk_points=2, v_points=2))
    s, z = torch.randn(n, 8, requires_grad=training), torch.randn(n, n, c_z, requires_grad=training)
    with Launches() as launches, torch.set_grad_enabled(training):
        update = ipa(s, z, Rigid.identity((n,)), torch.ones(n))
        if training:
            update.square().sum().backward()
    assert launches.largest[0] <= n * n * max(h, c_z), launches.largest


def test_the_module_launches_half_of_what_it_did() -> None:
    """Eight layers were 1772 operations forward and 3835 backward."""
    module = filled(StructureModule(C_S, C_Z, replace(SMALL, layers=8, transition_layers=3, dropout=0.1))).train()
    s, z, aatype = inputs(5)
    z.requires_grad_()
    module(s, z, aatype, torch.ones(5))  # tables are cached at the first call
    with Launches() as forward:
        out = module(s, z, aatype, torch.ones(5))
        loss = out.final_atom14.sum() + out.single.sum() + out.traj.sum() + out.unnormalized_angles.sum()
    with Launches() as backward:
        loss.backward()
    assert forward.count < 1772 / 2
    assert backward.count < 3835 / 2
