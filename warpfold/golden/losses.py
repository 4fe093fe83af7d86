"""Reference cases of the losses, with their gradients."""

from collections.abc import Callable

import torch
from torch import Tensor

from warpfold.geometry import atoms, residue
from warpfold.geometry.rigid import Rigid
from warpfold.golden.answer import Answer, tensors
from warpfold.golden.read import Case
from warpfold.model import losses
from warpfold.model.fape import backbone_fape
from warpfold.model.violations import Violations, find_violations, violation_metrics

CA = residue.ATOM_ORDER["CA"]


def _answer(outputs: dict[str, Tensor], inputs: dict[str, Tensor]) -> Answer:
    """An answer of which residues count by `seq_mask`, where the case has one."""
    mask = inputs["seq_mask"] > 0 if "seq_mask" in inputs else None
    residues = {} if mask is None else {f"out/{n}": mask for n, x in outputs.items() if x.shape[:1] == mask.shape}
    return Answer(outputs, inputs, valid=residues)


def _resolved_well(inputs: dict[str, Tensor]) -> Tensor:
    return losses.well_resolved(inputs["resolution"], losses.LossConfig())


def _distogram(case: Case) -> Answer:
    x = tensors(case)
    beta = x["pseudo_beta"]
    loss = losses.distogram_loss(x["logits"], x["bin_edges"], beta, x["pseudo_beta_mask"])
    distance = torch.sqrt(1e-6 + (beta[:, None] - beta[None]).square().sum(-1))
    return _answer({"loss": loss, "true_dist": distance}, x)


def _experimentally_resolved(case: Case) -> Answer:
    x = tensors(case)
    loss = losses.experimentally_resolved_loss(x["logits"], x["all_atom_mask"], x["atom37_atom_exists"])
    return _answer({"loss": loss * _resolved_well(x)}, x)


def _masked_msa(case: Case) -> Answer:
    x = tensors(case)
    return _answer({"loss": losses.masked_msa_loss(x["logits"], x["true_msa"], x["bert_mask"])}, x)


def _plddt(case: Case) -> Answer:
    x = tensors(case)
    ca, true_ca = x["final_atom_positions"][:, CA], x["all_atom_positions"][:, CA]
    mask = x["all_atom_mask"][:, CA]
    loss = losses.plddt_loss(x["logits"], ca, true_ca, mask) * _resolved_well(x)
    score = losses.lddt(ca, true_ca, mask, per_residue=True)[None]
    return _answer({"loss": loss, "lddt_ca": score}, x)


def _predicted_aligned_error(case: Case) -> Answer:
    x = tensors(case)
    frames, true_frames = (Rigid.from_quaternion7(x[name]) for name in ("final_affines", "backbone_affine_tensor"))
    mask = x["backbone_affine_mask"]
    loss = losses.predicted_aligned_error_loss(x["logits"], x["breaks"], frames, true_frames, mask)
    return _answer({"loss": loss * _resolved_well(x)}, x)


def _backbone_fape(case: Case) -> Answer:
    x = tensors(case)
    layers = backbone_fape(
        Rigid.from_quaternion7(x["traj"]),
        Rigid.from_quaternion7(x["backbone_affine_tensor"]),
        x["backbone_affine_mask"],
        clamp=case.config["clamp_distance"],
        clamped=x.get("use_clamped_fape", 1.0),
    )
    return _answer({"loss": layers.mean(), "fape": layers[-1]}, x)


def _normalised(angles: Tensor) -> Tensor:
    """(sin, cos) of length one, as the structure module makes them (Algorithm 20, line 14)."""
    return angles * torch.rsqrt(angles.square().sum(-1, keepdim=True).clamp(min=1e-12))


def _sidechain_fape(case: Case) -> Answer:
    x = tensors(case)
    angles = _normalised(x["unnormalized_angles"])
    frames = atoms.torsions_to_frames(x["aatype"], Rigid.from_quaternion7(x["affine"]), angles)
    atom14 = atoms.frames_to_atom14(x["aatype"], frames)
    renamed = atoms.rename_ground_truth(
        atom14,
        x["atom14_gt_positions"],
        x["atom14_gt_exists"],
        x["atom14_alt_gt_positions"],
        x["atom14_alt_gt_exists"],
        x["atom14_atom_is_ambiguous"],
    )
    loss = losses.renamed_sidechain_fape(frames, atom14, x, case.config["atom_clamp_distance"])
    outputs = {
        "loss": loss,
        "pred_frames": frames.to_flat12(),
        "pred_atom14": atom14,
        "alt_naming_is_better": renamed.swapped.float(),
        "renamed_atom14_gt_positions": renamed.positions,
        "renamed_atom14_gt_exists": renamed.mask,
    }
    return _answer(outputs, x)


def _torsion_angle(case: Case) -> Answer:
    x = tensors(case)
    unnormalised = x["unnormalized_angles"]
    angles = _normalised(unnormalised)
    chi, norm = losses.torsion_angle_loss(
        angles, unnormalised, x["chi_angles"], x["chi_mask"], x["aatype"], x["seq_mask"]
    )
    loss = case.config["chi_weight"] * chi + case.config["angle_norm_weight"] * norm
    return _answer({"angles": angles, "loss": loss, "chi_loss": chi, "angle_norm_loss": norm}, x)


def _violation(case: Case) -> Answer:
    x = tensors(case)
    positions, exists = x["atom14_pred_positions"], x["atom14_atom_exists"]
    found = find_violations(
        positions,
        exists,
        x["aatype"],
        x["residue_index"],
        tolerance_factor=case.config["violation_tolerance_factor"],
        overlap_tolerance=case.config["clash_overlap_tolerance"],
    )
    metrics = violation_metrics(found, positions, exists, x["residue_index"], x["seq_mask"])
    outputs = {
        "loss": case.config["structural_violation_loss_weight"] * found.loss,
        **{f"violations/{name}": value for name, value in violation_parts(found).items()},
        **{f"metrics/{name}": value for name, value in metrics.items()},
    }
    return _answer(outputs, x)


def violation_parts(found: Violations) -> dict[str, Tensor]:
    """Violations by the official code's names."""
    bonds, clashes, within = found.connections, found.clashes, found.within
    return {
        "between_residues/bonds_c_n_loss_mean": bonds.c_n_loss,
        "between_residues/angles_ca_c_n_loss_mean": bonds.ca_c_n_loss,
        "between_residues/angles_c_n_ca_loss_mean": bonds.c_n_ca_loss,
        "between_residues/connections_per_residue_loss_sum": bonds.per_residue_loss,
        "between_residues/connections_per_residue_violation_mask": bonds.per_residue_mask,
        "between_residues/clashes_mean_loss": clashes.mean_loss,
        "between_residues/clashes_per_atom_loss_sum": clashes.per_atom_loss,
        "between_residues/clashes_per_atom_clash_mask": clashes.per_atom_mask,
        "within_residues/per_atom_loss_sum": within.per_atom_loss,
        "within_residues/per_atom_violations": within.per_atom_mask,
        "total_per_residue_violations_mask": found.per_residue_mask,
    }


LOSSES: dict[str, Callable[[Case], Answer]] = {
    "distogram_loss": _distogram,
    "experimentally_resolved_loss": _experimentally_resolved,
    "fape_backbone": _backbone_fape,
    "fape_sidechain": _sidechain_fape,
    "masked_msa_loss": _masked_msa,
    "plddt_loss": _plddt,
    "predicted_aligned_error_loss": _predicted_aligned_error,
    "structural_violation": _violation,
    "torsion_angle_loss": _torsion_angle,
}
