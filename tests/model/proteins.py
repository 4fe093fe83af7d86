"""A small protein with ideal bonds, its labels, and a perfect prediction of it, for the tests of the losses."""

import math
from types import SimpleNamespace

import torch
from torch import Tensor

from warpfold.geometry import atoms, residue
from warpfold.geometry.rigid import Rigid

PHI, PSI = math.radians(-120.0), math.radians(130.0)  # an extended strand


def encode(sequence: str) -> Tensor:
    """Convert one-letter codes to aatype."""
    return torch.tensor([residue.RESTYPES.index(letter) for letter in sequence])


def place(a: Tensor, b: Tensor, c: Tensor, length: float, angle: float, torsion: float) -> Tensor:
    """Compute the point at `length` from c with this angle at c to b and this torsion about b-c to a (radian)."""
    x = (c - b) / (c - b).norm()
    normal = torch.linalg.cross(b - a, x)
    normal = normal / normal.norm()
    y = torch.linalg.cross(normal, x)
    return c + length * (-math.cos(angle) * x + math.sin(angle) * (math.cos(torsion) * y + math.sin(torsion) * normal))


def backbone(n: int) -> Rigid:
    """Build the backbone frames of a strand of n residues with ideal bonds and angles and trans peptides, in fp64."""
    c_n, ca_c_n, c_n_ca = 1.329, math.acos(residue.CA_C_N_COS[0]), math.acos(residue.C_N_CA_COS[0])
    chain = [torch.tensor(x, dtype=torch.float64) for x in ([-0.525, 1.363, 0.0], [0.0, 0.0, 0.0], [1.526, 0.0, 0.0])]
    for _ in range(n - 1):
        chain.append(place(*chain[-3:], c_n, ca_c_n, PSI))
        chain.append(place(*chain[-3:], 1.4606, c_n_ca, math.pi))
        chain.append(place(*chain[-3:], 1.526, math.radians(111.07), PHI))
    points = torch.stack(chain).view(n, 3, 3)
    return Rigid.from_three_points(points[:, 0], points[:, 1], points[:, 2])


def example(sequence: str = "GASDFKYE", seed: int = 0, dtype: torch.dtype = torch.float32) -> SimpleNamespace:
    """Build `batch`, all labels of a strand of this sequence, and `output`, a model output that predicts it exactly.

    The output has three layers, of which the last is perfect. The logits of the heads are random.
    """
    generator = torch.Generator().manual_seed(seed)
    aatype, n = encode(sequence), len(sequence)
    chi = torch.rand(n, 4, generator=generator, dtype=torch.float64) * 2 * math.pi - math.pi
    torsion = torch.cat([torch.tensor([[math.pi, PHI, PSI]]).expand(n, 3), chi], -1)
    angles = torch.stack([torsion.sin(), torsion.cos()], -1)
    frames = backbone(n)
    groups = atoms.torsions_to_frames(aatype, frames, angles)
    atom14 = atoms.frames_to_atom14(aatype, groups)
    atom37 = atoms.atom14_to_atom37(aatype, atom14)
    mask14, mask37 = (atoms.residue_rows(name, aatype).double() for name in ("ATOM14_MASK", "ATOM37_MASK"))
    truth = atoms.atom37_to_frames(aatype, atom37, mask37)
    batch = {
        "seq_mask": torch.ones(n),
        "true_msa": aatype[None, None].expand(1, 2, n),
        "bert_mask": torch.ones(1, 2, n),
        "atom14_atom_exists": mask14,
        "atom37_atom_exists": mask37,
        "all_atom_positions": atom37,
        "all_atom_mask": mask37,
        "resolution": torch.tensor(2.0),
        "use_clamped_fape": torch.tensor(1.0),
        "pseudo_beta": atoms.pseudo_beta(aatype, atom37),
        "pseudo_beta_mask": torch.ones(n),
        "backbone_affine_tensor": truth.frames[:, 0].to_quaternion7(),
        "backbone_affine_mask": torch.ones(n),
        "rigidgroups_gt_frames": truth.frames.to_flat12(),
        "rigidgroups_alt_gt_frames": truth.alt_frames.to_flat12(),
        "rigidgroups_gt_exists": truth.mask,
        "atom14_gt_positions": atom14,
        "atom14_alt_gt_positions": atoms.swap_atom14(aatype, atom14),
        "atom14_gt_exists": mask14,
        "atom14_alt_gt_exists": atoms.swap_atom14(aatype, mask14),
        "atom14_atom_is_ambiguous": atoms.residue_rows("ATOM14_AMBIGUOUS", aatype),
        "chi_angles": chi,
        "chi_mask": atoms.residue_rows("CHI_MASK", aatype),
    }
    batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
    batch |= {"aatype": aatype, "residue_index": torch.arange(n)}

    def cast(rigid: Rigid) -> Rigid:
        return Rigid(rigid.rotation.to(dtype), rigid.translation.to(dtype))

    structure = SimpleNamespace(
        frames=cast(Rigid.stack([frames] * 3)),
        sidechain_frames=cast(Rigid.stack([groups] * 3)),
        angles=angles.to(dtype).expand(3, n, 7, 2),
        unnormalized_angles=angles.to(dtype).expand(3, n, 7, 2),
        final_atom14=atom14.to(dtype),
        final_atom37=atom37.to(dtype),
    )

    def logits(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    output = SimpleNamespace(
        structure=structure,
        distogram_logits=logits(n, n, 64),
        masked_msa_logits=logits(2, n, 23),
        plddt_logits=logits(n, 50),
        resolved_logits=logits(n, 37),
        pae_logits=logits(n, n, 64),
    )
    return SimpleNamespace(batch=batch, output=output)


def random_motion(generator: torch.Generator) -> Rigid:
    """Draw a rotation and a translation of some 20 angstrom, in fp64."""
    quaternion = torch.randn(4, generator=generator, dtype=torch.float64)
    shift = 20 * torch.randn(3, generator=generator, dtype=torch.float64)
    return Rigid.from_quaternion7(torch.cat([quaternion / quaternion.norm(), shift]))


def random_frames(generator: torch.Generator, *shape: int) -> Rigid:
    """Draw frames at random positions with random orientations, in fp64."""
    quaternion = torch.randn(*shape, 4, generator=generator, dtype=torch.float64)
    quaternion = quaternion / quaternion.norm(dim=-1, keepdim=True)
    return Rigid.from_quaternion7(
        torch.cat([quaternion, 5 * torch.randn(*shape, 3, generator=generator, dtype=torch.float64)], -1)
    )
