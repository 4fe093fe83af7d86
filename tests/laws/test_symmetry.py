"""Symmetries of the structure module: space has no origin and no preferred direction, and residues have no number.

With random weights in fp64, a rigid motion of all frames moves the structure and changes nothing else, a reflection
changes the result, and renumbering the residues renumbers the structure.
"""

import pytest
import torch
from torch import Tensor, nn

from warpfold.geometry.atoms import frames_to_atom14, residue_rows, torsions_to_frames
from warpfold.geometry.rigid import Rigid, quaternion_multiply, rotate
from warpfold.model.structure import (
    FoldIteration,
    InvariantPointAttention,
    StructureConfig,
    normalize_angles,
)

N, C_S, C_Z = 6, 10, 7
CONFIG = StructureConfig(layers=4, c=12, heads=3, c_hidden=4, qk_points=3, v_points=4, sidechain_c=9)
CLOSE = {"rtol": 0.0, "atol": 1e-9}
SEEDS = range(3)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def affines(seed: int, *shape: int) -> Tensor:
    """Return random quaternions and translations [*shape, 7]."""
    q = draw(seed, *shape, 4)
    return torch.cat([q / q.norm(dim=-1, keepdim=True), 3 * draw(seed + 100, *shape, 3)], dim=-1)


def moved(motion: Tensor, affine: Tensor) -> Tensor:
    """Return the frames after a motion [7] of the whole space, as quaternions."""
    turned = quaternion_multiply(motion[..., :4].expand_as(affine[..., :4]), affine[..., :4])
    return torch.cat([turned, Rigid.from_quaternion7(motion).apply(affine[..., 4:])], dim=-1)


def fill(module: nn.Module) -> None:
    """Convert to fp64, and set all parameters to values other than 0, so that each path has an effect."""
    module.double().eval()
    for k, parameter in enumerate(module.parameters()):
        parameter.data = 0.4 * draw(k, *parameter.shape)


@pytest.fixture
def mask() -> Tensor:
    return torch.tensor([1, 1, 1, 0, 1, 1], dtype=torch.float64)


@pytest.fixture
def ipa() -> InvariantPointAttention:
    module = InvariantPointAttention(CONFIG.c, C_Z, CONFIG.heads, CONFIG.c_hidden, CONFIG.qk_points, CONFIG.v_points)
    fill(module)
    return module


@pytest.fixture
def fold() -> FoldIteration:
    module = FoldIteration(C_S, C_Z, CONFIG)
    fill(module)
    return module


@pytest.mark.parametrize("seed", SEEDS)
def test_attention_does_not_see_where_the_protein_is(ipa: InvariantPointAttention, mask: Tensor, seed: int) -> None:
    s, z, affine = draw(seed, N, CONFIG.c), draw(seed + 1, N, N, C_Z), affines(seed, N)
    here = ipa(s, z, Rigid.from_quaternion7(affine), mask)
    there = ipa(s, z, Rigid.from_quaternion7(moved(affines(seed + 7), affine)), mask)
    torch.testing.assert_close(there, here, **CLOSE)


@pytest.mark.parametrize("seed", SEEDS)
def test_attention_does_see_the_frames(ipa: InvariantPointAttention, mask: Tensor, seed: int) -> None:
    """Moving a single residue, or reflecting all, changes the result for others.

    Otherwise the test above would be void.
    """
    s, z, affine = draw(seed, N, CONFIG.c), draw(seed + 1, N, N, C_Z), affines(seed, N)
    frames = Rigid.from_quaternion7(affine)
    here = ipa(s, z, frames, mask)
    alone = torch.cat([moved(affines(seed + 7), affine[:1]), affine[1:]])
    assert (ipa(s, z, Rigid.from_quaternion7(alone), mask) - here)[1].abs().max() > 1e-3
    # The mirror image of a frame becomes a frame again if one of its axes is reversed.
    mirror = torch.diag(torch.tensor([1.0, 1, -1], dtype=torch.float64))
    reflected = Rigid(mirror @ frames.rotation @ mirror, rotate(mirror, frames.translation))
    assert (ipa(s, z, reflected, mask) - here).abs().max() > 1e-3


@pytest.mark.parametrize("seed", SEEDS)
def test_layers_move_with_the_frames(fold: FoldIteration, mask: Tensor, seed: int) -> None:
    """In three successive layers, activations and torsions stay the same, and frames and atoms move."""
    s_initial, z, motion = draw(seed, N, C_S), draw(seed + 1, N, N, C_Z), affines(seed + 7)
    here = there = draw(seed + 2, N, CONFIG.c)
    affine = affines(seed, N)
    affine_there = moved(motion, affine)
    for layer in range(3):
        here, affine, angles = fold(here, s_initial, z, affine, mask, layer)
        there, affine_there, angles_there = fold(there, s_initial, z, affine_there, mask, layer)
    torch.testing.assert_close(there, here, **CLOSE)
    torch.testing.assert_close(angles_there, angles, **CLOSE)
    torch.testing.assert_close(affine_there, moved(motion, affine), **CLOSE)

    aatype = torch.arange(N) * 3
    atoms, atoms_there = (
        frames_to_atom14(aatype, torsions_to_frames(aatype, Rigid.from_quaternion7(x), normalize_angles(angles)))
        for x in (affine, affine_there)
    )
    exists = residue_rows("ATOM14_MASK", aatype)[..., None]
    torch.testing.assert_close(atoms_there, Rigid.from_quaternion7(motion).apply(atoms) * exists, **CLOSE)
