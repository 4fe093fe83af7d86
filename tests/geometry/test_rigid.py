"""Rigid motions are a group, and their parametrisations agree."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from warpfold.geometry.rigid import (
    Rigid,
    multiply,
    normalize,
    quaternion_multiply,
    quaternion_to_rotation,
    rotate,
    rotation_to_quaternion,
    update_affine,
)

EXACT = {"rtol": 0.0, "atol": 1e-10}
seeds = st.integers(0, 2**31)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def unit_quaternions(seed: int, *shape: int) -> Tensor:
    q = draw(seed, *shape, 4)
    return q / q.norm(dim=-1, keepdim=True)


def motions(seed: int, *shape: int) -> Rigid:
    return Rigid(quaternion_to_rotation(unit_quaternions(seed, *shape)), 10 * draw(seed + 1, *shape, 3))


def assert_equal(first: Rigid, second: Rigid) -> None:
    torch.testing.assert_close(first.rotation, second.rotation, **EXACT)
    torch.testing.assert_close(first.translation, second.translation, **EXACT)


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_group_laws(seed: int) -> None:
    a, b, c = (motions(seed + i, 4) for i in (0, 10, 20))
    one = Rigid.identity((4,), dtype=torch.float64)
    assert_equal(a.compose(b).compose(c), a.compose(b.compose(c)))
    assert_equal(a.compose(one), a)
    assert_equal(one.compose(a), a)
    assert_equal(a.compose(a.invert()), one)
    assert_equal(a.compose(b).invert(), b.invert().compose(a.invert()))


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_motions_act_on_points_and_keep_distances(seed: int) -> None:
    a, b, points = motions(seed, 4), motions(seed + 10, 4), draw(seed + 20, 4, 3)
    torch.testing.assert_close(a.compose(b).apply(points), a.apply(b.apply(points)), **EXACT)
    torch.testing.assert_close(a.invert_apply(a.apply(points)), points, **EXACT)
    torch.testing.assert_close(a.invert().apply(points), a.invert_apply(points), **EXACT)
    pair = a.apply(points) - a.apply(points + 1.0)
    torch.testing.assert_close(pair.norm(dim=-1), torch.full((4,), math.sqrt(3), dtype=torch.float64), **EXACT)


def test_rotate_and_multiply_are_the_matrix_products() -> None:
    a, b, v = draw(0, 5, 3, 3), draw(1, 5, 3, 3), draw(2, 5, 3)
    torch.testing.assert_close(multiply(a, b), a @ b)
    torch.testing.assert_close(rotate(a, v), (a @ v[..., None])[..., 0])


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_quaternions_multiply_as_their_rotations_do(seed: int) -> None:
    p, q = unit_quaternions(seed, 6), unit_quaternions(seed + 1, 6)
    product = quaternion_to_rotation(quaternion_multiply(p, q))
    torch.testing.assert_close(product, multiply(quaternion_to_rotation(p), quaternion_to_rotation(q)), **EXACT)
    torch.testing.assert_close(torch.linalg.det(product), torch.ones(6, dtype=torch.float64), **EXACT)


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_rotation_to_quaternion_and_back(seed: int) -> None:
    q = unit_quaternions(seed, 6)
    back = rotation_to_quaternion(quaternion_to_rotation(q))
    torch.testing.assert_close(back, torch.where(q[..., :1] < 0, -q, q), **EXACT)


def test_half_turns_have_quaternions() -> None:
    """At half a turn w is zero, so a formula that divides by w would fail."""
    half_turns = torch.diag_embed(torch.tensor([[1.0, -1, -1], [-1, 1, -1], [-1, -1, 1]], dtype=torch.float64))
    found = rotation_to_quaternion(half_turns)
    torch.testing.assert_close(found.abs(), torch.eye(4, dtype=torch.float64)[1:])
    torch.testing.assert_close(quaternion_to_rotation(found), half_turns)


def test_flat_forms_and_back() -> None:
    a = motions(3, 2, 5)
    assert_equal(Rigid.from_flat12(a.to_flat12()), a)
    assert_equal(Rigid.from_quaternion7(a.to_quaternion7()), a)
    torch.testing.assert_close(a.to_flat12()[..., 9:], a.translation)


def test_three_points_make_the_frame_they_lie_in() -> None:
    x1, x2, x3 = draw(5, 7, 3), draw(6, 7, 3), draw(7, 7, 3)
    frame = Rigid.from_three_points(x1, x2, x3)
    zero, one = torch.zeros(7, dtype=torch.float64), torch.eye(3, dtype=torch.float64).expand(7, 3, 3)
    torch.testing.assert_close(multiply(frame.rotation, frame.rotation.mT), one, rtol=0, atol=1e-6)
    torch.testing.assert_close(frame.invert_apply(x2), zero[:, None].expand(7, 3))
    on_axis, in_plane = frame.invert_apply(x3), frame.invert_apply(x1)
    torch.testing.assert_close(on_axis[:, 1:], zero[:, None].expand(7, 2), rtol=0, atol=1e-6)
    assert (on_axis[:, 0] > 0).all()
    torch.testing.assert_close(in_plane[:, 2], zero, rtol=0, atol=1e-6)
    assert (in_plane[:, 1] > 0).all()


@pytest.mark.parametrize("points", [torch.zeros(3, 3), torch.tensor([[0.0, 0, 0], [1, 1, 1], [2, 2, 2]])])
def test_degenerate_points_have_finite_gradients(points: Tensor) -> None:
    points.requires_grad_()
    frame = Rigid.from_three_points(*points)
    frame.to_flat12().sum().backward()
    assert frame.rotation.isfinite().all()
    assert points.grad is not None
    assert points.grad.isfinite().all()


def test_indexing_stacking_and_joining() -> None:
    a = motions(8, 2, 3)
    assert a.shape == (2, 3)
    assert a[..., None].shape == (2, 3, 1)
    assert a[:, None].shape == (2, 1, 3)
    assert a[0].shape == (3,)
    assert a[..., 1:].shape == (2, 2)
    for axis in (0, -1):
        stacked = Rigid.stack([a, a.invert()], axis)
        assert stacked.rotation.shape[:-2] == stacked.shape == ((2, 2, 3) if axis == 0 else (2, 3, 2))
        assert Rigid.cat([a, a], axis).shape == ((4, 3) if axis == 0 else (2, 6))
    assert_equal(Rigid.stack([a, a.invert()], -1)[..., 1], a.invert())


def test_backbone_update_is_the_composition_with_a_small_motion() -> None:
    """Algorithm 23: the same as composing with the rotation of (1, b, c, d), normalised."""
    affine = torch.cat([unit_quaternions(9, 6), draw(10, 6, 3)], dim=-1)
    update = draw(11, 6, 6)
    small = normalize(torch.cat([torch.ones(6, 1, dtype=torch.float64), update[:, :3]], dim=-1), eps=0.0)
    expected = Rigid.from_quaternion7(affine).compose(Rigid(quaternion_to_rotation(small), update[:, 3:]))
    assert_equal(Rigid.from_quaternion7(update_affine(affine, update)), expected)
