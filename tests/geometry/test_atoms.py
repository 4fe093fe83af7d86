"""Torsions, frames and atoms describe the same structure: conversions are inverses of each other."""

import math

import pytest
import torch
from torch import Tensor

from warpfold.geometry import residue
from warpfold.geometry.atoms import (
    atom14_to_atom37,
    atom37_to_atom14,
    atom37_to_frames,
    atom37_to_torsions,
    dihedral,
    distance_bins,
    distogram_bins,
    frames_to_atom14,
    pseudo_beta,
    pseudo_beta_mask,
    rename_ground_truth,
    residue_rows,
    swap_atom14,
    torsions_to_frames,
)
from warpfold.geometry.rigid import Rigid, normalize

ALL_TYPES = torch.arange(21)


def backbones(n: int, generator: torch.Generator) -> Rigid:
    q = normalize(torch.randn(n, 4, dtype=torch.float64, generator=generator), eps=0.0)
    t = 10 * torch.randn(n, 3, dtype=torch.float64, generator=generator)
    return Rigid.from_quaternion7(torch.cat([q, t], dim=-1))


def unit_angles(n: int, generator: torch.Generator) -> Tensor:
    turns = 2 * math.pi * torch.rand(n, 7, dtype=torch.float64, generator=generator)
    return torch.stack([turns.sin(), turns.cos()], dim=-1)


@pytest.fixture
def structure() -> tuple[Tensor, Rigid, Tensor, Rigid, Tensor]:
    """Build one residue of every type: aatype, backbone, angles, frames of the rigid groups, atom37, in fp64."""
    generator = torch.Generator().manual_seed(0)
    backbone, angles = backbones(21, generator), unit_angles(21, generator)
    frames = torsions_to_frames(ALL_TYPES, backbone, angles)
    return ALL_TYPES, backbone, angles, frames, atom14_to_atom37(ALL_TYPES, frames_to_atom14(ALL_TYPES, frames))


def test_atom14_to_atom37_and_back() -> None:
    x = torch.randn(2, 21, 14, 3) * residue_rows("ATOM14_MASK", ALL_TYPES)[..., None]
    every = ALL_TYPES.expand(2, 21)
    torch.testing.assert_close(atom37_to_atom14(every, atom14_to_atom37(every, x)), x, rtol=0, atol=0)
    mask = residue_rows("ATOM37_MASK", ALL_TYPES)
    assert torch.equal(atom14_to_atom37(ALL_TYPES, residue_rows("ATOM14_MASK", ALL_TYPES)), mask)


def test_built_torsions_are_read_back(structure: tuple[Tensor, Rigid, Tensor, Rigid, Tensor]) -> None:
    aatype, _, angles, _, atom37 = structure
    torsions = atom37_to_torsions(aatype, atom37, residue_rows("ATOM37_MASK", aatype).double())
    found, mask = torsions.sin_cos[:, 2:], torsions.mask[:, 2:]
    assert torch.equal(mask[:, 1:], residue_rows("CHI_MASK", aatype).double())
    assert torch.equal(mask[:20, 0], torch.ones(20, dtype=torch.float64))
    # The tables give positions to a thousandth of an angstrom, so some atoms are slightly off their planes.
    torch.testing.assert_close(found, angles[:, 2:] * mask[..., None], rtol=0, atol=3e-3)


def test_built_frames_are_read_back(structure: tuple[Tensor, Rigid, Tensor, Rigid, Tensor]) -> None:
    aatype, _, _, frames, atom37 = structure
    groups = atom37_to_frames(aatype, atom37, residue_rows("ATOM37_MASK", aatype).double())
    assert torch.equal(groups.mask[:20], residue_rows("GROUP_MASK", aatype)[:20].double())
    assert not groups.mask[residue.UNKNOWN].any()
    there = groups.mask[..., None]
    torch.testing.assert_close(groups.frames.to_flat12() * there, frames.to_flat12() * there, rtol=0, atol=5e-3)


def test_alternative_labels_are_the_labels_of_the_swapped_names(
    structure: tuple[Tensor, Rigid, Tensor, Rigid, Tensor],
) -> None:
    aatype, _, _, _, atom37 = structure
    mask = residue_rows("ATOM37_MASK", aatype).double()
    renamed = atom14_to_atom37(aatype, swap_atom14(aatype, atom37_to_atom14(aatype, atom37)))
    one, other = (atom37_to_frames(aatype, x, mask) for x in (atom37, renamed))
    there = one.mask[..., None]
    # Side chains are symmetric to about a hundredth of an angstrom only.
    torch.testing.assert_close(one.alt_frames.to_flat12() * there, other.frames.to_flat12() * there, rtol=0, atol=0.02)
    assert (one.frames.rotation != one.alt_frames.rotation).any(-1).any(-1).double().equal(one.ambiguous)
    first, second = (atom37_to_torsions(aatype, x, mask) for x in (atom37, renamed))
    torch.testing.assert_close(first.alt_sin_cos, second.sin_cos, rtol=0, atol=0.02)
    assert not torch.allclose(first.sin_cos, first.alt_sin_cos)


def test_atoms_move_with_the_backbone(structure: tuple[Tensor, Rigid, Tensor, Rigid, Tensor]) -> None:
    aatype, backbone, angles, frames, _ = structure
    motion = backbones(1, torch.Generator().manual_seed(1))
    moved = torsions_to_frames(aatype, motion.compose(backbone), angles)
    mask = residue_rows("ATOM14_MASK", aatype)[..., None]
    expected = motion.apply(frames_to_atom14(aatype, frames)) * mask
    torch.testing.assert_close(frames_to_atom14(aatype, moved), expected)


def test_dihedral_has_the_sign_of_iupac() -> None:
    """Viewed along b-c, a positive torsion rotates the far bond clockwise."""
    a, b, c, d = torch.tensor([[0.0, 1, 0], [0, 0, 0], [1, 0, 0], [1, 0, 1]], dtype=torch.float64)
    torch.testing.assert_close(dihedral(a, b, c, d), torch.tensor([1.0, 0], dtype=torch.float64), rtol=0, atol=1e-7)


def test_torsions_that_are_not_there_are_zero() -> None:
    positions, mask = torch.randn(3, 37, 3), torch.ones(3, 37)
    mask[1, residue.ATOM_ORDER["C"]] = 0
    aatype = torch.tensor([residue.RESTYPE_ORDER["K"]] * 2 + [residue.GAP])
    torsions = atom37_to_torsions(aatype, positions, mask)
    assert torsions.mask[0].tolist() == [0, 0, 1, 1, 1, 1, 1]  # nothing before the first residue
    assert torsions.mask[1].tolist() == [1, 0, 0, 1, 1, 1, 1]
    assert torsions.mask[2].tolist() == [0, 0, 1, 0, 0, 0, 0]
    assert not torsions.sin_cos[torsions.mask == 0].any()
    torch.testing.assert_close(torsions.sin_cos.norm(dim=-1), torsions.mask)


def test_pseudo_beta_is_alpha_for_glycine() -> None:
    aatype = torch.tensor([residue.RESTYPE_ORDER["G"], residue.RESTYPE_ORDER["A"]])
    positions, mask = torch.randn(2, 37, 3), torch.rand(2, 37)
    ca, cb = residue.ATOM_ORDER["CA"], residue.ATOM_ORDER["CB"]
    assert torch.equal(pseudo_beta(aatype, positions), torch.stack([positions[0, ca], positions[1, cb]]))
    assert torch.equal(pseudo_beta_mask(aatype, mask), torch.stack([mask[0, ca], mask[1, cb]]))


def test_numbers_of_bins_are_the_places_of_the_ones() -> None:
    """A distance on an edge, below the first bin or beyond the last has no bin."""
    generator = torch.Generator().manual_seed(0)
    along = torch.tensor([0.0, 3.25, 4.5, 10.75, 20.75, 21.0, 9999.0, 10_001.0, 2.0])
    positions = torch.cat(
        [8 * torch.randn(40, 3, generator=generator), torch.nn.functional.pad(along[:, None], (0, 2))]
    )
    one_hot = distogram_bins(positions, 3.25, 20.75, 15, positions[5:])
    found = distance_bins(positions, 3.25, 20.75, 15, positions[5:])
    assert torch.equal(torch.nn.functional.one_hot(found, 16)[..., 1:].float(), one_hot)
    assert (found == 0).any()
    assert found.max() == 15


def test_renaming_finds_the_names_that_fit(structure: tuple[Tensor, Rigid, Tensor, Rigid, Tensor]) -> None:
    aatype, _, _, _, atom37 = structure
    truth = atom37_to_atom14(aatype, atom37)
    alternative = swap_atom14(aatype, truth)
    mask, ambiguous = residue_rows("ATOM14_MASK", aatype).double(), residue_rows("ATOM14_AMBIGUOUS", aatype).double()
    # A prediction that is exact except for the naming of half of the types.
    wrong = ALL_TYPES % 2 == 0
    predicted = torch.where(wrong[:, None, None], alternative, truth)
    found = rename_ground_truth(predicted, truth, mask, alternative, mask, ambiguous)
    assert torch.equal(found.swapped, wrong & ambiguous.any(-1))
    assert 0 < found.swapped.sum() < ambiguous.any(-1).sum()
    torch.testing.assert_close(found.positions, predicted)


def test_renaming_does_not_look_at_what_is_missing(structure: tuple[Tensor, Rigid, Tensor, Rigid, Tensor]) -> None:
    aatype, _, _, _, atom37 = structure
    truth = atom37_to_atom14(aatype, atom37)
    alternative, ambiguous = swap_atom14(aatype, truth), residue_rows("ATOM14_AMBIGUOUS", aatype).double()
    nothing = torch.zeros_like(ambiguous)
    assert not rename_ground_truth(alternative, truth, nothing, alternative, nothing, ambiguous).swapped.any()


def test_tables_seen_in_inference_serve_training() -> None:
    """A table that is cached under inference_mode must not poison the graph of a later training step."""
    from warpfold.geometry import atoms

    atoms._table.cache_clear()
    frames = torsions_to_frames(ALL_TYPES, Rigid.identity((21,)), torch.randn(21, 7, 2))
    atoms._table.cache_clear()
    with torch.inference_mode():
        frames_to_atom14(ALL_TYPES, frames)
    angles = torch.randn(21, 7, 2, requires_grad=True)
    frames = torsions_to_frames(ALL_TYPES, Rigid.identity((21,)), angles)
    frames_to_atom14(ALL_TYPES, frames).sum().backward()
    assert angles.grad is not None
