"""Reference cases of residue geometry, of confidence and of the losses, with their gradients."""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from tests.golden.config import POSITION_SCALE
from tests.golden.multimer import frames_and_chi, matrices, rigid_of
from tests.golden.reference import CaseOutputs, Compute, ReferenceCase, Tensors
from warpfold.geometry import atoms, residue
from warpfold.geometry.labels import structure_labels
from warpfold.geometry.rigid import Rigid, rotation_to_quaternion, update_affine
from warpfold.model import confidence, losses
from warpfold.model.losses import backbone_fape, frame_aligned_point_error
from warpfold.model.violations import CA_ATOM, Code, Violations, find_violations

CA = residue.ATOM_ORDER["CA"]
CA_CA = 3.80209737096  # CA to CA of a trans peptide, angstrom


def _expected(case: ReferenceCase, name: str) -> Tensor:
    """Return an expected output that defines which entries of the others count."""
    return torch.from_numpy(case.expected[f"out/{name}"])


def _atom37_to_frames(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    groups = atoms.atom37_to_frames(x["aatype"], x["all_atom_positions"], x["all_atom_mask"])
    defined = _expected(case, "rigidgroups_gt_exists") > 0
    outputs = {
        "rigidgroups_gt_frames": groups.frames.to_flat12(),
        "rigidgroups_alt_gt_frames": groups.alt_frames.to_flat12(),
        "rigidgroups_gt_exists": groups.mask,
        "rigidgroups_group_exists": groups.exists,
        "rigidgroups_group_is_ambiguous": groups.ambiguous,
    }
    valid = {f"out/{name}": defined for name in ("rigidgroups_gt_frames", "rigidgroups_alt_gt_frames")}
    return CaseOutputs(outputs, valid=valid)


def _atom37_to_torsions(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    torsions = atoms.atom37_to_torsions(x["aatype"], x["all_atom_positions"], x["all_atom_mask"])
    outputs = {
        "torsion_angles_sin_cos": torsions.sin_cos[None],
        "alt_torsion_angles_sin_cos": torsions.alt_sin_cos[None],
        "torsion_angles_mask": torsions.mask[None],
    }
    defined = _expected(case, "torsion_angles_mask") > 0
    valid = {f"out/{name}": defined for name in ("torsion_angles_sin_cos", "alt_torsion_angles_sin_cos")}
    return CaseOutputs(outputs, valid=valid)


def _renamed(x: Tensors, predicted: Tensor) -> Tensors:
    """Return the ground truth in the naming of ambiguous atoms that fits the prediction best."""
    names = ("gt_positions", "gt_exists", "alt_gt_positions", "alt_gt_exists", "atom_is_ambiguous")
    renamed = atoms.rename_ground_truth(predicted, *(x[f"atom14_{name}"] for name in names))
    return {
        "alt_naming_is_better": renamed.swapped.float(),
        "renamed_atom14_gt_positions": renamed.positions,
        "renamed_atom14_gt_exists": renamed.mask,
    }


def _distogram_bins(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    last_edge = {"rec": 20.75, "templ": 50.75}
    return CaseOutputs(
        {n: atoms.distogram_bins(x["p"], 3.25, end, _expected(case, n).shape[-1]) for n, end in last_edge.items()}
    )


def _fape(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    fape = frame_aligned_point_error(
        Rigid.from_flat12(x["pred_frames"]),
        x["pred_positions"],
        Rigid.from_flat12(x["target_frames"]),
        x["target_positions"],
        x["frames_mask"],
        x["positions_mask"],
    )
    return CaseOutputs({"fape": fape})


def _lddt(case: ReferenceCase, x: Tensors, per_residue: bool = False) -> CaseOutputs:
    mask = x["true_points_mask"][..., 0]
    return CaseOutputs({"lddt": losses.lddt(x["predicted_points"], x["true_points"], mask, per_residue=per_residue)})


def _three_points(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    frames = Rigid.from_three_points(x["n_xyz"], x["ca_xyz"], x["c_xyz"])
    return CaseOutputs({"rot": frames.rotation, "trans": frames.translation})


def _pseudo_beta(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    positions = atoms.pseudo_beta(x["aatype"], x["all_atom_positions"])
    return CaseOutputs({"pseudo_beta": positions, "mask": atoms.pseudo_beta_mask(x["aatype"], x["all_atom_mask"])})


def _quat_affine(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    new = update_affine(x["affine"], x["update"])
    frames = Rigid.from_quaternion7(new)
    outputs = {
        "rotation": Rigid.from_quaternion7(x["affine"]).rotation,
        "new_affine": new,
        "new_rotation": frames.rotation,
        "apply": frames[..., None].apply(x["points"]),
        "invert": frames[..., None].invert_apply(x["points"]),
        "scaled": torch.cat([new[..., :4], new[..., 4:] * POSITION_SCALE], -1),
    }
    return CaseOutputs(outputs, quaternions=("out/new_affine", "out/scaled"))


def _rotation_to_quaternion(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    return CaseOutputs({"quat": rotation_to_quaternion(x["rot"])}, quaternions=("out/quat",))


def _torsions_to_atoms(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    frames = atoms.torsions_to_frames(x["aatype"], Rigid.from_quaternion7(x["affine"]), x["torsion_angles_sin_cos"])
    atom14 = atoms.frames_to_atom14(x["aatype"], frames)
    atom37 = atoms.atom14_to_atom37(x["aatype"], atom14)
    return CaseOutputs({"frames": frames.to_flat12(), "atom14_pos": atom14, "atom37_pos": atom37})


def _confidence(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    plddt = confidence.plddt(x["plddt_logits"])
    found = confidence.predicted_errors(nn.Identity(), x["pae_logits"], asym_id=x["asym_id"])
    assert found.iptm is not None
    ptm, iptm = torch.tensor(found.ptm), torch.tensor(found.iptm)
    return CaseOutputs(
        {
            "plddt": plddt,
            "predicted_aligned_error": confidence.pae(x["pae_logits"], x["breaks"]),
            "max_predicted_aligned_error": torch.tensor(found.max_pae),
            "ptm": ptm,
            "iptm": iptm,
            "ranking_confidence_multimer": confidence.ranking_confidence(plddt, ptm, iptm),
            "ranking_confidence_monomer": confidence.ranking_confidence(plddt),
        }
    )


# Losses


def _loss(outputs: Tensors, x: Tensors) -> CaseOutputs:
    """Build the outputs of a loss. In outputs per residue, only residues in `seq_mask` count."""
    mask = x["seq_mask"] > 0 if "seq_mask" in x else None
    residues = {} if mask is None else {f"out/{n}": mask for n, y in outputs.items() if y.shape[:1] == mask.shape}
    return CaseOutputs(outputs, valid=residues)


def _resolved_well(x: Tensors) -> Tensor:
    return losses.well_resolved(x["resolution"], losses.LossConfig())


def _distogram(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    beta = x["pseudo_beta"]
    loss = losses.distogram_loss(x["logits"], x["bin_edges"], beta, x["pseudo_beta_mask"])
    return _loss({"loss": loss, "true_dist": true_distances(beta)}, x)


def true_distances(beta: Tensor) -> Tensor:
    """Compute the distances [N, N] between points [N, 3] as the official distogram head reports them."""
    return torch.sqrt(1e-6 + (beta[:, None] - beta[None]).square().sum(-1))


def _experimentally_resolved(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    loss = losses.experimentally_resolved_loss(x["logits"], x["all_atom_mask"], x["atom37_atom_exists"])
    return _loss({"loss": loss * _resolved_well(x)}, x)


def _masked_msa(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    return _loss({"loss": losses.masked_msa_loss(x["logits"], x["true_msa"], x["bert_mask"])}, x)


def _plddt(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    names = ("final_atom_positions", "all_atom_positions", "all_atom_mask")
    ca, true_ca, mask = (x[name][:, CA] for name in names)
    loss = losses.plddt_loss(x["logits"], ca, true_ca, mask) * _resolved_well(x)
    return _loss({"loss": loss, "lddt_ca": losses.lddt(ca, true_ca, mask, per_residue=True)[None]}, x)


def _predicted_aligned_error(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    frames, true_frames = (Rigid.from_quaternion7(x[name]) for name in ("final_affines", "backbone_affine_tensor"))
    mask = x["backbone_affine_mask"]
    loss = losses.predicted_aligned_error_loss(x["logits"], x["breaks"], frames, true_frames, mask)
    return _loss({"loss": loss * _resolved_well(x)}, x)


def _backbone_fape(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    layers = backbone_fape(
        Rigid.from_quaternion7(x["traj"]),
        Rigid.from_quaternion7(x["backbone_affine_tensor"]),
        x["backbone_affine_mask"],
        clamp=case.config["clamp_distance"],
        clamped=x.get("use_clamped_fape", 1.0),
    )
    return _loss({"loss": layers.mean(), "fape": layers[-1]}, x)


def _normalized(angles: Tensor) -> Tensor:
    """Scale (sin, cos) to length one, as the structure module does (Algorithm 20, line 14)."""
    return angles * torch.rsqrt(angles.square().sum(-1, keepdim=True).clamp(min=1e-12))


def _sidechain_fape(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    angles = _normalized(x["unnormalized_angles"])
    frames = atoms.torsions_to_frames(x["aatype"], Rigid.from_quaternion7(x["affine"]), angles)
    atom14 = atoms.frames_to_atom14(x["aatype"], frames)
    loss = losses.renamed_sidechain_fape(frames, atom14, x, case.config["atom_clamp_distance"])
    outputs = {"loss": loss, "pred_frames": frames.to_flat12(), "pred_atom14": atom14}
    return _loss(outputs | _renamed(x, atom14), x)


def _torsion_angle(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    unnormalized = x["unnormalized_angles"]
    angles = _normalized(unnormalized)
    truth = (x[name] for name in ("chi_angles", "chi_mask", "aatype", "seq_mask"))
    chi, norm = losses.torsion_angle_loss(angles, unnormalized, *truth)
    loss = case.config["chi_weight"] * chi + case.config["angle_norm_weight"] * norm
    return _loss({"angles": angles, "loss": loss, "chi_loss": chi, "angle_norm_loss": norm}, x)


def _structure_of_complex(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    """Compute the structure module's loss of a complex: within chains, between chains, side chains, torsions."""
    aatype, c = x["aatype"], case.config
    config = losses.LossConfig(
        sidechain_fraction=c["sidechain"]["weight_frac"],
        chi=c["chi_weight"],
        angle_norm=c["angle_norm_weight"],
        fape_clamp=c["intra"]["atom_clamp_distance"],
        interface_clamp=c["interface"]["atom_clamp_distance"],
        interface_scale=c["interface"]["loss_unit_distance"],
        fape_softening=0.0,
    )
    labels = structure_labels(aatype, x["all_atom_positions"], x["all_atom_mask"])
    frames = rigid_of(x["traj"])
    angles = _normalized(x["unnormalized_angles"])
    groups = atoms.torsions_to_frames(aatype.expand(len(angles), -1), frames, angles)
    atom14 = atoms.frames_to_atom14(aatype, groups[-1])
    layers = losses.backbone_losses(frames, x | labels, config)
    sidechain = losses.renamed_sidechain_fape(groups[-1], atom14, labels, config.fape_clamp, config.fape_softening)
    chi_labels = labels["chi_angles"], labels["chi_mask"], aatype, x["seq_mask"]
    chi, norm = losses.torsion_angle_loss(angles, x["unnormalized_angles"], *chi_labels)
    intra, interface = layers["fape"].mean(), layers["interface_fape"].mean()
    torsions = config.chi * chi + config.angle_norm * norm
    outputs = {
        "loss": (1 - config.sidechain_fraction) * (intra + interface)
        + config.sidechain_fraction * sidechain
        + torsions,
        "intra_bb_loss": intra,
        "interface_bb_loss": interface,
        "intra_fape_last": layers["fape"][-1],
        "interface_fape_last": layers["interface_fape"][-1],
        "sidechain_fape": sidechain,
        "chi_loss": chi,
        "angle_norm_loss": norm,
        "sup_chi_loss": torsions,
        "pred_frames": matrices(groups[-1]),
        "pred_atom14": atom14,
    }
    found = _loss(outputs | _truth_of_complex(aatype, atom14, labels), x)
    undefined = {"gt_backbone": "backbone_affine_mask", "gt_frames": "rigidgroups_gt_exists", "chi_angles": "chi_mask"}
    undefined["renamed_chi_angles"] = "chi_mask"
    valid = {f"out/{name}": labels[mask] > 0 for name, mask in undefined.items()}
    return replace(found, valid=dict(found.valid) | valid)


def _truth_of_complex(aatype: Tensor, atom14: Tensor, labels: Tensors) -> Tensors:
    """Return the labels of a complex by the reference's names, in the better of their two namings."""
    truth = losses.renamed_truth(atom14, labels)
    swapped = truth.swapped[:, None]
    groups = torch.where(swapped[..., None], labels["rigidgroups_alt_gt_frames"], labels["rigidgroups_gt_frames"])
    chi = labels["chi_angles"]
    turns = swapped * atoms.residue_rows("CHI_PI_PERIODIC", aatype) > 0
    return {
        "alt_naming_is_better": truth.swapped.float(),
        "gt_backbone": matrices(Rigid.from_quaternion7(labels["backbone_affine_tensor"])),
        "gt_backbone_mask": labels["backbone_affine_mask"],
        "chi_angles": chi,
        "chi_mask": labels["chi_mask"],
        "renamed_chi_angles": torch.where(turns, chi - math.pi * chi.sign(), chi),
        "gt_frames": matrices(Rigid.from_flat12(groups)),
        "gt_frames_mask": labels["rigidgroups_gt_exists"],
        "gt_atom14": truth.positions,
        "gt_atom14_mask": truth.mask,
    }


def _violation_of_complex(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    return _violation(case, x, "multimer")


def _violation(case: ReferenceCase, x: Tensors, bonds: Code = "monomer") -> CaseOutputs:
    positions, exists = x["atom14_pred_positions"], x["atom14_atom_exists"]
    found = find_violations(
        positions,
        exists,
        x["aatype"],
        x["residue_index"],
        x.get("asym_id"),
        tolerance_factor=case.config["violation_tolerance_factor"],
        overlap_tolerance=case.config["clash_overlap_tolerance"],
        bonds=bonds,
    )
    metrics = violation_metrics(found, positions, exists, x["residue_index"], x["seq_mask"], x.get("asym_id"))
    outputs = {
        "loss": case.config["structural_violation_loss_weight"] * found.loss,
        **{f"violations/{name}": value for name, value in _violation_parts(found).items()},
        **{f"metrics/{name}": value for name, value in metrics.items()},
    }
    return _loss(outputs, x)


def violation_metrics(
    violations: Violations,
    atoms: Tensor,
    atom_mask: Tensor,
    residue_index: Tensor,
    seq_mask: Tensor,
    asym_id: Tensor | None = None,
) -> dict[str, Tensor]:
    """Compute the share of residues (0 to 1) with each kind of violation, by the names of DeepMind's code.

    `violations_extreme_ca_ca_distance` is the share of neighbours whose CA are 1.5 angstrom too far apart.
    """
    chain = torch.zeros_like(residue_index) if asym_id is None else asym_id
    follows = (residue_index.diff() == 1) & (chain.diff() == 0)

    def share(value: Tensor, mask: Tensor) -> Tensor:
        return (mask * value).sum() / (1e-10 + mask.sum())

    ca, has_ca = atoms[:, CA_ATOM], atom_mask[:, CA_ATOM]
    pairs = has_ca[:-1] * has_ca[1:] * follows
    too_far = torch.sqrt(1e-6 + (ca[:-1] - ca[1:]).square().sum(-1)) - CA_CA > 1.5
    return {
        "violations_extreme_ca_ca_distance": share(too_far, pairs),
        "violations_between_residue_bond": share(violations.connections.per_residue_mask, seq_mask),
        "violations_between_residue_clash": share(violations.clashes.per_atom_mask.amax(-1), seq_mask),
        "violations_within_residue": share(violations.within.per_atom_mask.amax(-1), seq_mask),
        "violations_per_residue": share(violations.per_residue_mask, seq_mask),
    }


def _violation_parts(found: Violations) -> Tensors:
    """Return the violations by the official code's names."""
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


GEOMETRY: dict[str, Compute] = {
    "atom37_to_frames": _atom37_to_frames,
    "atom37_to_frames_multimer": frames_and_chi,
    "atom37_to_torsion_angles": _atom37_to_torsions,
    "compute_renamed_ground_truth": lambda case, x: CaseOutputs(_renamed(x, x["atom14_pred_positions"])),
    "confidence": _confidence,
    "dgram_from_positions": _distogram_bins,
    "frame_aligned_point_error": _fape,
    "lddt": _lddt,
    "lddt_per_residue": lambda case, x: _lddt(case, x, per_residue=True),
    "make_transform_from_reference": _three_points,
    "pseudo_beta": _pseudo_beta,
    "quat_affine": _quat_affine,
    "rot_to_quat": _rotation_to_quaternion,
    "torsion_angles_to_frames_and_atom14": _torsions_to_atoms,
}
LOSSES: dict[str, Compute] = {
    "distogram_loss": _distogram,
    "experimentally_resolved_loss": _experimentally_resolved,
    "fape_backbone": _backbone_fape,
    "fape_sidechain": _sidechain_fape,
    "masked_msa_loss": _masked_msa,
    "multimer_losses": _structure_of_complex,
    "plddt_loss": _plddt,
    "predicted_aligned_error_loss": _predicted_aligned_error,
    "structural_violation": _violation,
    "structural_violation_multimer": _violation_of_complex,
    "torsion_angle_loss": _torsion_angle,
}
