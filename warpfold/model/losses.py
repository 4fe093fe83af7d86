"""The losses of AlphaFold2 and of AlphaFold-Multimer, term by term as DeepMind's code computes them (Supp. 1.9).

All losses are for one example (no batch axis), compute in fp32 or wider, and have finite gradients under every mask.
Coordinates are in angstrom. violations.py has the loss on violations.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.batch import at_pass
from warpfold.geometry import residue
from warpfold.geometry.atoms import RenamedTruth, rename_ground_truth, residue_rows
from warpfold.geometry.rigid import Rigid
from warpfold.model.axial import ALL, Residues
from warpfold.model.heads import distogram_breaks, pae_breaks
from warpfold.model.permutation import COPIES, with_truth
from warpfold.model.violations import Code, center_of_mass_loss, find_violations
from warpfold.ops.dispatch import upcast_half, widen
from warpfold.ops.pairs import aligned_errors

# Angstrom. In DeepMind's code the monomer's distance is sqrt(d^2 + 1e-4) and Multimer's is sqrt(max(d^2, 1e-8)).
SOFTENING = 0.01


def frame_aligned_point_error(
    frames: Rigid,
    points: Tensor,
    true_frames: Rigid,
    true_points: Tensor,
    frame_mask: Tensor,
    point_mask: Tensor,
    clamp: float | None = 10.0,
    clamped: Tensor | float = 1.0,
    scale: float = 10.0,
    softening: float = SOFTENING,
    pair_mask: Tensor | None = None,
) -> Tensor:
    """Compute the frame aligned point error [*] (Algorithm 28, computeFAPE).

        seen, true = frames[:, None].invert_apply(points), true_frames[:, None].invert_apply(true_points)
        d = sqrt((seen - true).square().sum(-1) + softening**2)
        d = clamped * d.clamp(max=clamp) + (1 - clamped) * d
        mask = frame_mask[:, None] * point_mask
        (mask * d).sum() / scale / (1e-4 + mask.sum())

    frames, true_frames: [*, F], and points, true_points: [*, P, 3], in angstrom; their leading axes are broadcast.
    frame_mask: [*, F]; point_mask: [*, P]; pair_mask: [F, P], the pairs that count, by default all.
    clamp: upper limit of a distance, angstrom; None: no limit.
    clamped: the weight, 0 to 1, of the clamped distances (Supp. 1.11.5: 0 in 10 % of the examples).
    scale: the distance, angstrom, that counts as 1.
    softening: angstrom; gives a distance of 0 a gradient. With 0 (Multimer), short distances have none.

    The error is invariant under rigid motions of the prediction and of the truth, but not under reflections.
    """
    predicted, true = (upcast_half(x.to_matrix()) for x in (frames, true_frames))
    points, true_points = upcast_half(points), upcast_half(true_points)
    frame_mask, point_mask = frame_mask.to(predicted.dtype), point_mask.to(predicted.dtype)
    cap = math.inf if clamp is None else clamp
    sums = aligned_errors(predicted, points, true, true_points, frame_mask, point_mask, pair_mask, cap, softening)
    capped, whole = sums.unbind(-1)
    total = clamped * capped + (1 - clamped) * whole
    if pair_mask is None:
        weight = frame_mask.sum(-1) * point_mask.sum(-1)
    else:
        weight = (frame_mask[..., :, None] * point_mask[..., None, :] * pair_mask).sum((-2, -1))
    return total / scale / (1e-4 + weight)


def backbone_fape(
    frames: Rigid,
    true_frames: Rigid,
    mask: Tensor,
    clamp: float = 10.0,
    clamped: Tensor | float = 1.0,
    scale: float = 10.0,
    softening: float = SOFTENING,
    pair_mask: Tensor | None = None,
) -> Tensor:
    """Compute the FAPE of CA positions in backbone frames (Algorithm 20): frames [*, N], true [N], mask [N] -> [*].

    The leading axes of `frames` remain, for example one value per layer. pair_mask: [N, N], of frames and CA. For the
    other arguments see `frame_aligned_point_error`.
    """
    points, true_points = frames.translation, true_frames.translation
    return frame_aligned_point_error(
        frames, points, true_frames, true_points, mask, mask, clamp, clamped, scale, softening, pair_mask
    )


if TYPE_CHECKING:
    from warpfold.model.alphafold import Output
    from warpfold.model.structure import StructureOutput

# Index in atom37.
CA_ATOM = residue.ATOM_ORDER["CA"]
# Angstrom, as in scoring/metrics.py (Mariani et al. 2013).
LDDT_RADIUS, LDDT_TOLERANCES = 15.0, (0.5, 1.0, 2.0, 4.0)
# Square angstrom, added to squared aligned errors. The error of a residue's CA in its own frame is zero, which is the
# first bin. In DeepMind's compiled code rounding makes it positive, so the published models were trained with the
# second bin.
OWN_ERROR = 1e-12
Terms = dict[str, Tensor]
# The terms of `total_loss` that are weighted and summed. LossConfig has the weight of each under its name.
WEIGHTED = (
    *("structure_module", "distogram", "masked_msa", "plddt"),
    *("experimentally_resolved", "predicted_aligned_error"),
)


@dataclass(frozen=True)
class LossConfig:
    """Weights and constants of `total_loss`. A weight of 0 drops the term.

    The defaults are initial training's as DeepMind's code computes it, without the factor of `scale_by_length`.
    Sources: "eq. 7" is in Supp. 1.9, and its second line is fine-tuning's; "code" is the configuration that DeepMind
    published with its code (alphafold/model/config.py); "Multimer" is Evans et al. 2022, bioRxiv 2021.10.04.463034v2,
    section 2.5.
    """

    # Code. The next three weights supply the factors 0.5 of eq. 7.
    structure_module: float = 1.0
    # Eq. 7: the share of L_FAPE (all atoms, last layer). The remainder is that of L_aux (CA, mean over layers).
    sidechain_fraction: float = 0.5
    # Eq. 7: L_aux.
    chi: float = 0.5
    # Eq. 7: L_aux, times the 0.02 of Algorithm 27.
    angle_norm: float = 0.01
    # Eq. 7: 1.0 in fine-tuning.
    violation: float = 0.0
    # Eq. 7.
    distogram: float = 0.3
    # Eq. 7.
    masked_msa: float = 2.0
    # Eq. 7.
    plddt: float = 0.01
    # Eq. 7: 0.01 in fine-tuning.
    experimentally_resolved: float = 0.0
    # Code: 0.1 in the pTM models (Supp. 1.9.7).
    predicted_aligned_error: float = 0.0
    # Multimer, equation 1: 1.0 in the weights after v1. Keeps chains apart.
    center_of_mass: float = 0.0
    # Angstrom (Algorithm 28). In complexes, within the chains.
    fape_clamp: float = 10.0
    # Angstrom, for backbone FAPE between chains. Multimer: 30; code: 1000.
    interface_clamp: float = 30.0
    # Angstrom, the distance between chains that counts as 1 (code).
    interface_scale: float = 20.0
    # Angstrom, added in square under the root of FAPE. Code: 0 in Multimer.
    fape_softening: float = SOFTENING
    # Angstrom. Confidence is learnt from structures with a resolution from min to max (Supp. 1.9.6).
    min_resolution: float = 0.1
    max_resolution: float = 3.0
    # Standard deviations (Supp. 1.9.11).
    violation_tolerance_factor: float = 12.0
    # Angstrom (Supp. 1.9.11).
    clash_overlap_tolerance: float = 1.5
    # Whether to average the clashes of an atom instead of summing them (Multimer).
    average_clashes: bool = False
    # Whether to use the peptide-bond constants of the monomer's code or those of Multimer's.
    bonds: Code = "monomer"
    # Whether to count clashes between residues of different chains with the same index. The official code does not.
    every_clash: bool = False
    # Whether to multiply the loss by the square root of the number of residues in the crop (Supp. 1.9).
    scale_by_length: bool = False

    def __post_init__(self) -> None:
        weights = [getattr(self, name) for name in WEIGHTED]
        if min(weights) < 0 or max(weights) == 0:
            raise ValueError(f"the weights of the losses are {weights}: none may be negative, and not all may be 0")


def total_loss(
    output: "Output", batch: Mapping[str, Tensor], config: LossConfig, pass_index: int = -1, residues: Residues = ALL
) -> tuple[Tensor, Terms]:
    """Compute the weighted sum of all losses of one example, and the terms by name (Supp. 1.9, eq. 7).

    batch: the features and labels of the whole example (warpfold/batch.py, no batch axis). The masked-MSA loss uses
    pass `pass_index`: the last pass in training, else its first ensemble member.
    residues: the model's. If they are sharded over processes, the loss and the terms must be summed over processes.
    Returns the loss, and the terms unweighted and without gradient: "structure_module" and its components "fape",
    "sidechain_fape", "chi_loss", "angle_norm_loss", "violation" and, in complexes, "interface_fape" and
    "center_of_mass"; "distogram", "masked_msa", "plddt", "experimentally_resolved", "predicted_aligned_error". In a
    complex "fape" is the error within the chains.
    If the batch contains the copies of each entity, their permutation is resolved first (`with_truth`).
    Raises KeyError for a missing label, and ValueError if a model without PAE head has a weight for it.
    """
    if COPIES in batch:
        batch = with_truth(batch, output.structure.final_atom37)
    terms: Terms = {}
    if config.structure_module:
        terms |= _divided(structure_loss(output.structure, batch, config), residues.shards)
    if config.distogram:
        logits = output.distogram_logits
        breaks = _on_device(distogram_breaks, logits.shape[-1], logits.device)
        beta, beta_mask = batch["pseudo_beta"], batch["pseudo_beta_mask"]
        terms["distogram"] = distogram_loss(logits, breaks, beta, beta_mask, residues)
    if config.masked_msa:
        msa = at_pass(batch, pass_index, ("true_msa", "bert_mask"))
        terms["masked_msa"] = masked_msa_loss(output.masked_msa_logits, msa["true_msa"], msa["bert_mask"], residues)
    terms |= _confidence_losses(output, batch, config, residues)

    terms = _divided(terms, residues.replicas)
    total = torch.stack([getattr(config, name) * terms[name] for name in WEIGHTED if name in terms]).sum()
    if config.scale_by_length:
        total = total * batch["seq_mask"].sum().sqrt()
    return total, {name: term.detach() for name, term in terms.items()}


def _divided(terms: Terms, number: int) -> Terms:
    """Divide terms by the number of processes that compute them."""
    return terms if number == 1 else {name: term / number for name, term in terms.items()}


def _confidence_losses(output: "Output", batch: Mapping[str, Tensor], config: LossConfig, residues: Residues) -> Terms:
    """Compute the terms that count for well-resolved structures only."""
    terms: Terms = {}
    if config.plddt:
        ca, true_ca = (x[:, CA_ATOM] for x in (output.structure.final_atom37, batch["all_atom_positions"]))
        terms["plddt"] = plddt_loss(output.plddt_logits, ca, true_ca, batch["all_atom_mask"][:, CA_ATOM])
    if config.experimentally_resolved:
        terms["experimentally_resolved"] = experimentally_resolved_loss(
            output.resolved_logits, batch["all_atom_mask"], batch["atom37_atom_exists"]
        )
    terms = _divided(terms, residues.shards)
    if config.predicted_aligned_error:
        if output.pae_logits is None:
            raise ValueError(
                "loss.predicted_aligned_error: the model has no head for it. Set this weight to 0, or set "
                "model.heads.pae = true."
            )
        terms["predicted_aligned_error"] = predicted_aligned_error_loss(
            output.pae_logits,
            _on_device(pae_breaks, output.pae_logits.shape[-1], output.pae_logits.device),
            output.structure.frames[-1],
            Rigid.from_quaternion7(batch["backbone_affine_tensor"]),
            batch["backbone_affine_mask"],
            OWN_ERROR,
            residues,
        )
    return {name: loss * well_resolved(batch["resolution"], config) for name, loss in terms.items()}


def well_resolved(resolution: Tensor, config: LossConfig) -> Tensor:
    """Return whether a resolution (angstrom; 0 = unknown) is within the limits, as bool of the same shape."""
    return (resolution >= config.min_resolution) & (resolution <= config.max_resolution)


def structure_loss(structure: "StructureOutput", batch: Mapping[str, Tensor], config: LossConfig) -> Terms:
    """Compute the structure module's loss and its components: FAPE, torsions, violations (see `total_loss`).

    If the batch has asym_id, backbone FAPE is the sum of the error within the chains and the error between them, each
    averaged over its own pairs (Multimer, section 2.5).
    """
    backbone_terms = backbone_losses(structure.frames, batch, config)
    backbone = torch.stack([per_layer.mean() for per_layer in backbone_terms.values()]).sum()
    sidechain = renamed_sidechain_fape(
        structure.sidechain_frames[-1], structure.final_atom14, batch, config.fape_clamp, config.fape_softening
    )
    chi, norm = torsion_angle_loss(
        structure.angles,
        structure.unnormalized_angles,
        batch["chi_angles"],
        batch["chi_mask"],
        batch["aatype"],
        batch["seq_mask"],
    )
    fraction = config.sidechain_fraction
    loss = (1 - fraction) * backbone + fraction * sidechain + config.chi * chi + config.angle_norm * norm
    # As in DeepMind's outputs, the terms of FAPE are the last layer's, while the loss has the mean over the layers.
    terms = {name: per_layer[-1] for name, per_layer in backbone_terms.items()}
    terms |= {"sidechain_fape": sidechain, "chi_loss": chi, "angle_norm_loss": norm}
    if config.violation:
        violations = find_violations(
            structure.final_atom14,
            batch["atom14_atom_exists"],
            batch["aatype"],
            batch["residue_index"],
            batch.get("asym_id"),
            tolerance_factor=config.violation_tolerance_factor,
            overlap_tolerance=config.clash_overlap_tolerance,
            every_pair=config.every_clash,
            bonds=config.bonds,
        )
        terms["violation"] = violations.averaged_loss if config.average_clashes else violations.loss
        loss = loss + config.violation * terms["violation"]
    if config.center_of_mass:
        ca, true_ca = (x[:, CA_ATOM] for x in (structure.final_atom37, batch["all_atom_positions"]))
        terms["center_of_mass"] = center_of_mass_loss(ca, true_ca, batch["all_atom_mask"][:, CA_ATOM], batch["asym_id"])
        loss = loss + config.center_of_mass * terms["center_of_mass"]
    return terms | {"structure_module": loss}


def backbone_losses(frames: Rigid, batch: Mapping[str, Tensor], config: LossConfig) -> Terms:
    """Compute the backbone FAPE [L] of frames [L, N] by terms: "fape", and in complexes "interface_fape"."""
    true, mask = Rigid.from_quaternion7(batch["backbone_affine_tensor"]), batch["backbone_affine_mask"]
    clamped, softening = batch.get("use_clamped_fape", 1.0), config.fape_softening
    if "asym_id" not in batch:
        return {"fape": backbone_fape(frames, true, mask, config.fape_clamp, clamped, softening=softening)}
    same = batch["asym_id"][:, None] == batch["asym_id"][None, :]
    interface_options = config.interface_clamp, clamped, config.interface_scale, softening, ~same
    return {
        "fape": backbone_fape(frames, true, mask, config.fape_clamp, clamped, softening=softening, pair_mask=same),
        "interface_fape": backbone_fape(frames, true, mask, *interface_options),
    }


def renamed_truth(atom14: Tensor, batch: Mapping[str, Tensor]) -> RenamedTruth:
    """Return the labels `atom14_*` of a batch in the naming that is closer to atom14 [N, 14, 3] (Algorithm 26)."""
    return rename_ground_truth(
        atom14,
        batch["atom14_gt_positions"],
        batch["atom14_gt_exists"],
        batch["atom14_alt_gt_positions"],
        batch["atom14_alt_gt_exists"],
        batch["atom14_atom_is_ambiguous"],
    )


def renamed_sidechain_fape(
    frames: Rigid, atom14: Tensor, batch: Mapping[str, Tensor], clamp: float = 10.0, softening: float = SOFTENING
) -> Tensor:
    """Compute the side-chain FAPE against the truth in the better of its two namings (Algorithms 26, 28).

    frames: [N, 8]; atom14: [N, 14, 3], in angstrom; batch: the labels `rigidgroups_*` and `atom14_*`.
    """
    truth = renamed_truth(atom14, batch)
    true_frames = torch.where(
        truth.swapped[:, None, None], batch["rigidgroups_alt_gt_frames"], batch["rigidgroups_gt_frames"]
    )
    predicted, true = (
        Rigid(x.rotation.flatten(0, 1), x.translation.flatten(0, 1)) for x in (frames, Rigid.from_flat12(true_frames))
    )
    return frame_aligned_point_error(
        predicted,
        atom14.flatten(0, 1),
        true,
        truth.positions.flatten(0, 1),
        batch["rigidgroups_gt_exists"].flatten(),
        truth.mask.flatten(),
        clamp,
        softening=softening,
    )


def torsion_angle_loss(
    angles: Tensor, unnormalized: Tensor, chi_angles: Tensor, chi_mask: Tensor, aatype: Tensor, seq_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the squared error of the chi angles and the deviation of the norms from one (Algorithm 27).

    angles, unnormalized: [L, N, 7, 2] as (sin, cos), of which the last four are chi; chi_angles: [N, 4], radian;
    chi_mask: [N, 4]; aatype: [N]; seq_mask: [N]. For a chi angle with period pi, the nearer of both angles counts.
    """
    chi = upcast_half(angles)[..., 3:, :]
    true = torch.stack([chi_angles.sin(), chi_angles.cos()], dim=-1)
    turned = true * (1 - 2 * residue_rows("CHI_PI_PERIODIC", aatype))[..., None]
    error = torch.minimum((chi - true).square().sum(-1), (chi - turned).square().sum(-1))
    norm = torch.sqrt(1e-6 + upcast_half(unnormalized).square().sum(-1))
    return _mean(error, chi_mask, 1e-10), _mean((norm - 1).abs(), seq_mask[:, None], 1e-10)


def distogram_loss(
    logits: Tensor, breaks: Tensor, pseudo_beta: Tensor, mask: Tensor, residues: Residues = ALL
) -> Tensor:
    """Compute the cross-entropy of binned distances between (pseudo) beta carbons (Supp. 1.9.8, eq. 41).

    logits: [N, N, bins] (this process's rows); breaks: [bins - 1], angstrom; pseudo_beta: [N, 3]; mask: [N].
    """
    squared = (residues.local_shard(pseudo_beta, -2)[:, None, :] - pseudo_beta[None, :, :]).square().sum(-1)
    return _mean_of_pairs(_cross_entropy(logits, _bin(squared, breaks)), mask, 1e-6, residues)


def masked_msa_loss(logits: Tensor, true_msa: Tensor, bert_mask: Tensor, residues: Residues = ALL) -> Tensor:
    """Compute the cross-entropy at the masked positions of the MSA (Supp. 1.9.9).

    logits: [S, N, classes] (23 classes, Multimer 22; this process's columns); true_msa: [S, N], codes below `classes`;
    bert_mask: [S, N].
    """
    error = _cross_entropy(logits, residues.local_shard(true_msa, -1))
    bert_mask = bert_mask.to(error.dtype)
    return (error * residues.local_shard(bert_mask, -1)).sum() / (1e-8 + bert_mask.sum())


def plddt_loss(logits: Tensor, ca: Tensor, true_ca: Tensor, mask: Tensor) -> Tensor:
    """Compute the cross-entropy of each residue's binned lDDT-CA (Supp. 1.9.6, Algorithm 29).

    logits: [N, bins]; ca, true_ca: [N, 3], angstrom; mask: [N]. No gradient reaches the structure.
    """
    bins = logits.shape[-1]
    with torch.no_grad():
        score = lddt(ca, true_ca, mask, per_residue=True)
        target = (score * bins).floor().long().clamp(max=bins - 1)
    return _mean(_cross_entropy(logits, target), mask, 1e-8)


def experimentally_resolved_loss(logits: Tensor, resolved: Tensor, exists: Tensor) -> Tensor:
    """Compute the binary cross-entropy of the atoms that the experiment resolved (Supp. 1.9.10).

    logits, resolved (0 or 1), exists (whether the residue type has the atom): [N, 37].
    """
    logits = upcast_half(logits)
    error = F.binary_cross_entropy_with_logits(logits, resolved.to(logits.dtype), reduction="none")
    return _mean(error, exists, 1e-8)


def predicted_aligned_error_loss(
    logits: Tensor,
    breaks: Tensor,
    frames: Rigid,
    true_frames: Rigid,
    mask: Tensor,
    epsilon: Tensor | float = 0.0,
    residues: Residues = ALL,
) -> Tensor:
    """Compute the cross-entropy of the binned error of CA j in the frame of residue i (Supp. 1.9.7).

    logits: [N, N, bins] (this process's rows); breaks: [bins - 1], angstrom; frames, true_frames: [N], angstrom; mask:
    [N]; epsilon: square angstrom, added to the squared errors. No gradient reaches the frames.
    """
    with torch.no_grad():
        local, true_local = (
            Rigid(residues.local_shard(x.rotation, -3), residues.local_shard(x.translation, -2))[:, None].invert_apply(
                x.translation[None, :]
            )
            for x in (frames, true_frames)
        )
        target = _bin(epsilon + (local - true_local).square().sum(-1), breaks)
    return _mean_of_pairs(_cross_entropy(logits, target), mask, 1e-8, residues)


def lddt(
    points: Tensor, true_points: Tensor, mask: Tensor, cutoff: float = LDDT_RADIUS, per_residue: bool = False
) -> Tensor:
    """Compute the lDDT of one atom per residue, 0 to 1: the share of true distances below `cutoff` that are preserved.

    points, true_points: [*, N, 3], angstrom; mask: [*, N]. Returns [*], or [*, N] if `per_residue`. A distance counts a
    quarter for each of the tolerances 0.5, 1, 2 and 4 angstrom that its error is below (Mariani et al. 2013; Supp.
    1.9.6). The score is 1 if there is no pair. Use under no_grad: the score has no useful gradient.
    """
    points, true_points, mask = upcast_half(points), upcast_half(true_points), upcast_half(mask)
    true_distance, distance = (
        torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist") for x in (true_points, points)
    )
    off_diagonal = 1 - torch.eye(mask.shape[-1], dtype=mask.dtype, device=mask.device)
    scored = (true_distance < cutoff) * mask[..., :, None] * mask[..., None, :] * off_diagonal
    error = (true_distance - distance).abs()
    preserved = (4 - torch.bucketize(error, _on_device(_tolerances, 4, error.device).to(error), right=True)) / 4
    axes = (-1,) if per_residue else (-2, -1)
    # A product with the reciprocal, as in DeepMind's code: for a score on a bin's edge, the last bit selects the bin.
    return (1e-10 + (scored * preserved).sum(axes)) * (1 / (1e-10 + scored.sum(axes)))


@torch.no_grad()
def ca_lddt(output: "Output", batch: Mapping[str, Tensor], between: bool = False) -> Tensor:
    """Compute lDDT-CA of the predicted structure, 0 to 1; NaN if no pair of CA in the truth counts.

    between: whether to count only pairs in different chains. The computation is in a wider dtype and on the device, and
    takes a negligible share of a training step.
    """
    structures = output.structure.final_atom37, batch["all_atom_positions"]
    points, true_points = (widen(atoms[:, CA_ATOM]) for atoms in structures)
    # cdist by matrix products would lose the digits of near points.
    distance, true_distance = (
        torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist") for x in (points, true_points)
    )
    resolved = batch["all_atom_mask"][:, CA_ATOM] > 0
    pairs = (true_distance < LDDT_RADIUS) & resolved[:, None] & resolved
    pairs = pairs & ~torch.eye(len(resolved), dtype=torch.bool, device=resolved.device)
    if between:
        chain = batch.get("asym_id", torch.zeros_like(batch["aatype"]))
        pairs = pairs & (chain[:, None] != chain)
    error = (distance - true_distance).abs()
    preserved = torch.stack([(error < tolerance) & pairs for tolerance in LDDT_TOLERANCES])
    return widen(preserved.sum()) / (len(preserved) * pairs.sum())


def _tolerances(count: int) -> Tensor:
    return torch.tensor(LDDT_TOLERANCES[:count])


@functools.cache
# An inference tensor in the cache could not be used in training.
@torch.inference_mode(False)
def _on_device(breaks: Callable[[int], Tensor], bins: int, device: torch.device) -> Tensor:
    """Return the edges of bins on a device, cached because a copy waits for the device."""
    return breaks(bins).to(device)


def _bin(squared: Tensor, breaks: Tensor) -> Tensor:
    """Compute the bin of each squared distance. A distance equal to an edge is in the bin below."""
    return torch.bucketize(squared, breaks.to(squared).square())


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Compute -log softmax(logits)[target]: logits [*, classes], target int64 [*] -> [*], in fp32 or wider."""
    # Flattened, since torch's kernel for several axes is not deterministic on a GPU.
    errors = F.cross_entropy(upcast_half(logits).flatten(0, -2), target.flatten(), reduction="none")
    return errors.view(target.shape)


def _mean_of_pairs(value: Tensor, mask: Tensor, epsilon: float, residues: Residues) -> Tensor:
    """Compute the mean of value [N, N], of which this rank has its rows, over the pairs where mask [N] is 1."""
    pairs = mask[:, None] * mask[None, :]
    return (value * residues.local_shard(pairs, -2)).sum() / (epsilon + pairs.sum())


def _mean(value: Tensor, mask: Tensor, epsilon: float) -> Tensor:
    """Compute the mean where `mask` is 1 (broadcast over leading axes of `value`), or 0 if `mask` is all 0."""
    mask = mask.to(value.dtype).expand_as(value)
    return (value * mask).sum() / (epsilon + mask.sum())
