"""Reference cases of residue geometry, of lDDT and of confidence."""

from collections.abc import Callable

import torch
from torch import Tensor

from warpfold.geometry import atoms
from warpfold.geometry.rigid import Rigid, rotation_to_quaternion, update_affine
from warpfold.golden.answer import Answer, tensors
from warpfold.golden.config import POSITION_SCALE
from warpfold.golden.read import Case
from warpfold.model import confidence
from warpfold.model.fape import frame_aligned_point_error
from warpfold.model.losses import lddt


def _expected(case: Case, name: str) -> Tensor:
    """An expected output, for the cases that state in it which entries are defined."""
    return torch.from_numpy(case.expected[f"out/{name}"])


def _atom37_to_frames(case: Case) -> Answer:
    x = tensors(case)
    groups = atoms.atom37_to_frames(x["aatype"], x["all_atom_positions"], x["all_atom_mask"])
    defined = _expected(case, "rigidgroups_gt_exists") > 0
    names = ("rigidgroups_gt_frames", "rigidgroups_alt_gt_frames")
    return Answer(
        {
            "rigidgroups_gt_frames": groups.frames.to_flat12(),
            "rigidgroups_alt_gt_frames": groups.alt_frames.to_flat12(),
            "rigidgroups_gt_exists": groups.mask,
            "rigidgroups_group_exists": groups.exists,
            "rigidgroups_group_is_ambiguous": groups.ambiguous,
        },
        valid={f"out/{name}": defined for name in names},
    )


def _atom37_to_torsions(case: Case) -> Answer:
    x = tensors(case)
    torsions = atoms.atom37_to_torsions(x["aatype"], x["all_atom_positions"], x["all_atom_mask"])
    outputs = {
        "torsion_angles_sin_cos": torsions.sin_cos[None],
        "alt_torsion_angles_sin_cos": torsions.alt_sin_cos[None],
        "torsion_angles_mask": torsions.mask[None],
    }
    defined = _expected(case, "torsion_angles_mask") > 0
    names = ("torsion_angles_sin_cos", "alt_torsion_angles_sin_cos")
    return Answer(outputs, valid={f"out/{name}": defined for name in names})


def _renamed_ground_truth(case: Case) -> Answer:
    x = tensors(case)
    renamed = atoms.rename_ground_truth(
        x["atom14_pred_positions"],
        x["atom14_gt_positions"],
        x["atom14_gt_exists"],
        x["atom14_alt_gt_positions"],
        x["atom14_alt_gt_exists"],
        x["atom14_atom_is_ambiguous"],
    )
    return Answer(
        {
            "alt_naming_is_better": renamed.swapped.float(),
            "renamed_atom14_gt_positions": renamed.positions,
            "renamed_atom14_gt_exists": renamed.mask,
        }
    )


def _distogram_bins(case: Case) -> Answer:
    p = tensors(case)["p"]
    recycled = atoms.distogram_bins(p, 3.25, 20.75, _expected(case, "rec").shape[-1])
    templates = atoms.distogram_bins(p, 3.25, 50.75, _expected(case, "templ").shape[-1])
    return Answer({"rec": recycled, "templ": templates})


def _fape(case: Case) -> Answer:
    x = tensors(case)
    fape = frame_aligned_point_error(
        Rigid.from_flat12(x["pred_frames"]),
        x["pred_positions"],
        Rigid.from_flat12(x["target_frames"]),
        x["target_positions"],
        x["frames_mask"],
        x["positions_mask"],
    )
    return Answer({"fape": fape}, x)


def _lddt(per_residue: bool) -> Callable[[Case], Answer]:
    def answer(case: Case) -> Answer:
        x = tensors(case)
        mask = x["true_points_mask"][..., 0]
        return Answer({"lddt": lddt(x["predicted_points"], x["true_points"], mask, per_residue=per_residue)})

    return answer


def _three_points(case: Case) -> Answer:
    x = tensors(case)
    frames = Rigid.from_three_points(x["n_xyz"], x["ca_xyz"], x["c_xyz"])
    return Answer({"rot": frames.rotation, "trans": frames.translation})


def _pseudo_beta(case: Case) -> Answer:
    x = tensors(case)
    return Answer(
        {
            "pseudo_beta": atoms.pseudo_beta(x["aatype"], x["all_atom_positions"]),
            "mask": atoms.pseudo_beta_mask(x["aatype"], x["all_atom_mask"]),
        }
    )


def _quat_affine(case: Case) -> Answer:
    x = tensors(case)
    old, new = x["affine"], update_affine(x["affine"], x["update"])
    frames = Rigid.from_quaternion7(new)
    return Answer(
        {
            "rotation": Rigid.from_quaternion7(old).rotation,
            "new_affine": new,
            "new_rotation": frames.rotation,
            "apply": frames[..., None].apply(x["points"]),
            "invert": frames[..., None].invert_apply(x["points"]),
            "scaled": torch.cat([new[..., :4], new[..., 4:] * POSITION_SCALE], -1),
        },
        x,
        quaternions=("out/new_affine", "out/scaled"),
    )


def _rotation_to_quaternion(case: Case) -> Answer:
    return Answer({"quat": rotation_to_quaternion(tensors(case)["rot"])}, quaternions=("out/quat",))


def _torsions_to_atoms(case: Case) -> Answer:
    x = tensors(case)
    aatype, affine = x["aatype"], x["affine"]
    frames = atoms.torsions_to_frames(aatype, Rigid.from_quaternion7(affine), x["torsion_angles_sin_cos"])
    atom14 = atoms.frames_to_atom14(aatype, frames)
    return Answer(
        {
            "frames": frames.to_flat12(),
            "atom14_pos": atom14,
            "atom37_pos": atoms.atom14_to_atom37(aatype, atom14),
        },
        x,
    )


def _confidence(case: Case) -> Answer:
    x = tensors(case)
    plddt = confidence.plddt(x["plddt_logits"])
    ptm = confidence.ptm(x["pae_logits"], x["breaks"])
    iptm = confidence.iptm(x["pae_logits"], x["breaks"], x["asym_id"])
    return Answer(
        {
            "plddt": plddt,
            "predicted_aligned_error": confidence.pae(x["pae_logits"], x["breaks"]),
            "max_predicted_aligned_error": torch.tensor(confidence.max_pae(x["breaks"])),
            "ptm": ptm,
            "iptm": iptm,
            "ranking_confidence_multimer": confidence.ranking_confidence(plddt, ptm, iptm),
            "ranking_confidence_monomer": confidence.ranking_confidence(plddt),
        }
    )


GEOMETRY: dict[str, Callable[[Case], Answer]] = {
    "atom37_to_frames": _atom37_to_frames,
    "atom37_to_torsion_angles": _atom37_to_torsions,
    "compute_renamed_ground_truth": _renamed_ground_truth,
    "confidence": _confidence,
    "dgram_from_positions": _distogram_bins,
    "frame_aligned_point_error": _fape,
    "lddt": _lddt(per_residue=False),
    "lddt_per_residue": _lddt(per_residue=True),
    "make_transform_from_reference": _three_points,
    "pseudo_beta": _pseudo_beta,
    "quat_affine": _quat_affine,
    "rot_to_quat": _rotation_to_quaternion,
    "torsion_angles_to_frames_and_atom14": _torsions_to_atoms,
}
