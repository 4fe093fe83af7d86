"""The losses of AlphaFold2 and of AlphaFold-Multimer, term by term as DeepMind's code computes them (Supp. 1.9).

All are for one example (no batch axis), compute in fp32 at least, and have finite gradients whatever is masked.
Coordinates are in angstrom.  Violations are found in violations.py.
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

# Angstrom; code: the monomer's distance is sqrt(d^2 + 1e-4), Multimer's sqrt(max(d^2, 1e-8)).
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
    seen, true = (upcast_half(x.to_matrix()) for x in (frames, true_frames))
    points, true_points = upcast_half(points), upcast_half(true_points)
    frame_mask, point_mask = frame_mask.to(seen.dtype), point_mask.to(seen.dtype)
    cap = math.inf if clamp is None else clamp
    sums = aligned_errors(seen, points, true, true_points, frame_mask, point_mask, pair_mask, cap, softening)
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
    """Return the FAPE of Ca positions from backbone frames (Algorithm 20): frames [*, N], true [N], mask [N] -> [*].

    One value for every leading axis of `frames`, for example for every layer; angstrom.  pair_mask [N, N]: of frames
    and Ca; the rest as in `frame_aligned_point_error`.
    """
    points, true_points = frames.translation, true_frames.translation
    return frame_aligned_point_error(
        frames, points, true_frames, true_points, mask, mask, clamp, clamped, scale, softening, pair_mask
    )


if TYPE_CHECKING:
    from warpfold.model.alphafold import Output
    from warpfold.model.structure import StructureOutput

CA_ATOM = residue.ATOM_ORDER["CA"]  # in atom37
LDDT_RADIUS, LDDT_TOLERANCES = 15.0, (0.5, 1.0, 2.0, 4.0)  # angstrom, as in scoring/metrics.py (Mariani et al. 2013)
# Square angstrom.  A residue's own Ca has no error in its own frame, and the first bin is for exactly that; but in
# DeepMind's compiled code rounding lifts it off zero, so that training has only ever seen it in the second bin.
OWN_ERROR = 1e-12
Terms = dict[str, Tensor]
# The terms of `total_loss` that are weighted and summed; each has its weight in LossConfig under its name.
WEIGHTED = (
    *("structure_module", "distogram", "masked_msa", "plddt"),
    *("experimentally_resolved", "predicted_aligned_error"),
)


@dataclass(frozen=True)
class LossConfig:
    """Weights and constants of `total_loss`.  A weight of 0 drops the term.

    The defaults are initial training's as DeepMind's code computes it, which lacks the factor of `scale_by_length`.
    Sources: "eq. 7" is that of Supp. 1.9, whose second line is fine-tuning's; "code" is the configuration that
    DeepMind published with its code (alphafold/model/config.py); "Multimer" is Evans et al. 2022, bioRxiv
    2021.10.04.463034v2, section 2.5.
    """

    structure_module: float = 1.0  # code; the three weights below bring the halves of eq. 7
    sidechain_fraction: float = 0.5  # eq. 7: L_FAPE (all atoms, last layer); the rest is L_aux's (Ca, mean over layers)
    chi: float = 0.5  # eq. 7: L_aux
    angle_norm: float = 0.01  # eq. 7: L_aux, times the 0.02 of Algorithm 27
    violation: float = 0.0  # eq. 7; 1.0 in fine-tuning
    distogram: float = 0.3  # eq. 7
    masked_msa: float = 2.0  # eq. 7
    plddt: float = 0.01  # eq. 7
    experimentally_resolved: float = 0.0  # eq. 7; 0.01 in fine-tuning
    predicted_aligned_error: float = 0.0  # code; 0.1 in the pTM models (Supp. 1.9.7)
    center_of_mass: float = 0.0  # Multimer, equation 1: 1.0, in the weights after v1; keeps chains apart
    fape_clamp: float = 10.0  # angstrom; Algorithm 28; of complexes within the chains
    interface_clamp: float = 30.0  # angstrom, of backbone FAPE between chains; Multimer: 30, code: 1000
    interface_scale: float = 20.0  # angstrom, the distance between chains that counts as 1; code
    fape_softening: float = SOFTENING  # angstrom: what keeps FAPE's root from 0; code: Multimer 0
    min_resolution: float = 0.1  # angstrom; Supp. 1.9.6: confidence is learnt from structures of 0.1 to 3.0 angstrom
    max_resolution: float = 3.0
    violation_tolerance_factor: float = 12.0  # standard deviations; Supp. 1.9.11
    clash_overlap_tolerance: float = 1.5  # angstrom; Supp. 1.9.11
    average_clashes: bool = False  # Multimer: an atom's clashes are averaged, not summed
    bonds: Code = "monomer"  # whose constants for peptide bonds: those of the monomer's code or of Multimer's
    # Between chains, the official code overlooks clashes of residues that have the same index, as homomers often have.
    every_clash: bool = False
    scale_by_length: bool = False  # Supp. 1.9: the loss times the square root of the number of residues in the crop

    def __post_init__(self) -> None:
        weights = [getattr(self, name) for name in WEIGHTED]
        if min(weights) < 0 or max(weights) == 0:
            raise ValueError(f"the weights of the losses are {weights}: none may be negative, and not all may be 0")


def total_loss(
    output: "Output", batch: Mapping[str, Tensor], config: LossConfig, pass_index: int = -1, residues: Residues = ALL
) -> tuple[Tensor, Terms]:
    """Return the weighted sum of all losses of one example, and the terms by name (Supp. 1.9, eq. 7).

    The terms are not weighted, and carry no gradient: they are there to be read.
    batch: the features of the whole example with its labels (warpfold/batch.py, no batch axis), from which the
    masked MSA of pass `pass_index` is taken: the last pass in training, its first ensemble member otherwise.
    residues: the model's.  Where they are sharded over processes, loss and terms are this one's parts of sums.
    Terms: "structure_module" and its parts "fape", "sidechain_fape", "chi_loss", "angle_norm_loss", "violation", of
    complexes "interface_fape" and "center_of_mass"; "distogram", "masked_msa", "plddt", "experimentally_resolved",
    "predicted_aligned_error".  Of a complex "fape" is that within the chains.
    Which copy of an entity is whose truth is decided here, if the batch leaves it open (`with_truth`).
    Errors: KeyError for a label that is missing; ValueError when a model without PAE head has a weight for it.
    """
    if COPIES in batch:
        batch = with_truth(batch, output.structure.final_atom37)
    terms: Terms = {}
    if config.structure_module:
        terms |= _divided(structure_loss(output.structure, batch, config), residues.shards)
    if config.distogram:
        logits = output.distogram_logits
        breaks = _on(distogram_breaks, logits.shape[-1], logits.device)
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
    """Return this process's part of terms that `number` processes compute."""
    return terms if number == 1 else {name: term / number for name, term in terms.items()}


def _confidence_losses(output: "Output", batch: Mapping[str, Tensor], config: LossConfig, residues: Residues) -> Terms:
    """Return the terms that are learnt from well resolved structures only."""
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
            raise ValueError("a loss on the predicted aligned error is wanted, but the model has no such head")
        terms["predicted_aligned_error"] = predicted_aligned_error_loss(
            output.pae_logits,
            _on(pae_breaks, output.pae_logits.shape[-1], output.pae_logits.device),
            output.structure.frames[-1],
            Rigid.from_quaternion7(batch["backbone_affine_tensor"]),
            batch["backbone_affine_mask"],
            OWN_ERROR,
            residues,
        )
    return {name: loss * well_resolved(batch["resolution"], config) for name, loss in terms.items()}


def well_resolved(resolution: Tensor, config: LossConfig) -> Tensor:
    """Return whether a resolution (angstrom; 0 = unknown) lies within the limits: bool, in its shape."""
    return (resolution >= config.min_resolution) & (resolution <= config.max_resolution)


def structure_loss(structure: "StructureOutput", batch: Mapping[str, Tensor], config: LossConfig) -> Terms:
    """Return the structure module's loss and its parts: FAPE, torsions, violations (terms of `total_loss`).

    Where the batch says which residues are of which chain, backbone FAPE is the sum of a part within the chains and a
    part between them, each a mean over its own pairs (Multimer, section 2.5).
    """
    layers = backbone_losses(structure.frames, batch, config)
    backbone = torch.stack([of_layers.mean() for of_layers in layers.values()]).sum()
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
    # As in DeepMind's outputs, the terms of FAPE are the last layer's; the loss has the mean over the layers.
    terms = {name: of_layers[-1] for name, of_layers in layers.items()}
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
    """Return the backbone FAPE [L] of frames [L, N] by its terms: "fape", and of complexes "interface_fape"."""
    true, mask = Rigid.from_quaternion7(batch["backbone_affine_tensor"]), batch["backbone_affine_mask"]
    clamped, softening = batch.get("use_clamped_fape", 1.0), config.fape_softening
    if "asym_id" not in batch:
        return {"fape": backbone_fape(frames, true, mask, config.fape_clamp, clamped, softening=softening)}
    same = batch["asym_id"][:, None] == batch["asym_id"][None, :]
    between = config.interface_clamp, clamped, config.interface_scale, softening, ~same
    return {
        "fape": backbone_fape(frames, true, mask, config.fape_clamp, clamped, softening=softening, pair_mask=same),
        "interface_fape": backbone_fape(frames, true, mask, *between),
    }


def renamed_truth(atom14: Tensor, batch: Mapping[str, Tensor]) -> RenamedTruth:
    """Return the labels `atom14_*` of a batch in the naming that is nearer to atom14 [N, 14, 3] (Algorithm 26)."""
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
    """Return the side-chain FAPE against the truth in the better of its two namings (Algorithms 26, 28).

    frames [N, 8], atom14 [N, 14, 3] in angstrom; batch: the labels `rigidgroups_*` and `atom14_*`.
    """
    truth = renamed_truth(atom14, batch)
    true_frames = torch.where(
        truth.swapped[:, None, None], batch["rigidgroups_alt_gt_frames"], batch["rigidgroups_gt_frames"]
    )
    seen, true = (
        Rigid(x.rotation.flatten(0, 1), x.translation.flatten(0, 1)) for x in (frames, Rigid.from_flat12(true_frames))
    )
    return frame_aligned_point_error(
        seen,
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
    """Return the squared error of the chi angles and their norms' deviation from one (Algorithm 27).

    angles, unnormalized [L, N, 7, 2] as (sin, cos), of which the last four are chi; chi_angles [N, 4] radian; chi_mask
    [N, 4]; aatype [N]; seq_mask [N].  A chi that looks the same turned by pi may be predicted either way.
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
    """Return the cross-entropy of binned distances between (pseudo) beta carbons (Supp. 1.9.8).

    logits [N, N, bins] (rows of the residues here), breaks [bins - 1] angstrom, pseudo_beta [N, 3], mask [N].
    """
    squared = (residues.local_shard(pseudo_beta, -2)[:, None, :] - pseudo_beta[None, :, :]).square().sum(-1)
    return _mean_of_pairs(_cross_entropy(logits, _bin(squared, breaks)), mask, 1e-6, residues)


def masked_msa_loss(logits: Tensor, true_msa: Tensor, bert_mask: Tensor, residues: Residues = ALL) -> Tensor:
    """Return the cross-entropy at the masked positions of the MSA (Supp. 1.9.9).

    logits [S, N, classes] (23; Multimer 22; columns of the residues here), true_msa [S, N] codes below `classes`,
    bert_mask [S, N].
    """
    error = _cross_entropy(logits, residues.local_shard(true_msa, -1))
    bert_mask = bert_mask.to(error.dtype)
    return (error * residues.local_shard(bert_mask, -1)).sum() / (1e-8 + bert_mask.sum())


def plddt_loss(logits: Tensor, ca: Tensor, true_ca: Tensor, mask: Tensor) -> Tensor:
    """Return the cross-entropy of each residue's binned lDDT-Ca (Supp. 1.9.6, Algorithm 29).

    logits [N, bins]; ca, true_ca [N, 3] angstrom; mask [N].  No gradient reaches the structure.
    """
    bins = logits.shape[-1]
    with torch.no_grad():
        score = lddt(ca, true_ca, mask, per_residue=True)
        target = (score * bins).floor().long().clamp(max=bins - 1)
    return _mean(_cross_entropy(logits, target), mask, 1e-8)


def experimentally_resolved_loss(logits: Tensor, resolved: Tensor, exists: Tensor) -> Tensor:
    """Return the binary cross-entropy of which atoms the experiment resolved (Supp. 1.9.10).

    logits, resolved (0 or 1), exists (which atoms the residue type has) [N, 37].
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
    """Return the cross-entropy of the binned error of Ca j in the frame of residue i (Supp. 1.9.7).

    logits [N, N, bins] (rows of the residues here), breaks [bins - 1] angstrom, frames [N] angstrom, mask [N].
    `epsilon`, square angstrom, is added to the squared errors.  No gradient reaches the frames.
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
    """Return the lDDT of one atom per residue, 0 to 1: the share of true distances below `cutoff` that are kept.

    points, true_points [*, N, 3] angstrom, mask [*, N] -> [*], or [*, N] when `per_residue`.  A distance is kept to a
    quarter for each of 0.5, 1, 2, 4 angstrom that bounds its error (Mariani et al. 2013; Supp. 1.9.6).  1 where there
    is nothing to compare.  Use under no_grad: the score has no useful gradient.
    """
    points, true_points, mask = upcast_half(points), upcast_half(true_points), upcast_half(mask)
    true_distance, distance = (
        torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist") for x in (true_points, points)
    )
    others = 1 - torch.eye(mask.shape[-1], dtype=mask.dtype, device=mask.device)
    scored = (true_distance < cutoff) * mask[..., :, None] * mask[..., None, :] * others
    error = (true_distance - distance).abs()
    kept = (4 - torch.bucketize(error, _on(_tolerances, 4, error.device).to(error), right=True)) / 4
    axes = (-1,) if per_residue else (-2, -1)
    # A product with the reciprocal, as in DeepMind's code: where a score lies on a bin's edge, the last bit decides.
    return (1e-10 + (scored * kept).sum(axes)) * (1 / (1e-10 + scored.sum(axes)))


@torch.no_grad()
def ca_lddt(output: "Output", batch: Mapping[str, Tensor], between: bool = False) -> Tensor:
    """Return lDDT-Ca of the predicted structure, 0 to 1; NaN where no pair of Ca in the truth counts.

    between: of the pairs between chains alone.  Widened, and on the device, where it takes almost no time of a
    training step.
    """
    found = output.structure.final_atom37, batch["all_atom_positions"]
    points, truth = (widen(atoms[:, CA_ATOM]) for atoms in found)
    # cdist through matrix products would lose the digits of near points
    moved, distance = (torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist") for x in (points, truth))
    known = batch["all_atom_mask"][:, CA_ATOM] > 0
    pairs = (distance < LDDT_RADIUS) & known[:, None] & known
    pairs = pairs & ~torch.eye(len(known), dtype=torch.bool, device=known.device)
    if between:
        chain = batch.get("asym_id", torch.zeros_like(batch["aatype"]))
        pairs = pairs & (chain[:, None] != chain)
    error = (moved - distance).abs()
    kept = torch.stack([(error < tolerance) & pairs for tolerance in LDDT_TOLERANCES])
    return widen(kept.sum()) / (len(kept) * pairs.sum())


def _tolerances(count: int) -> Tensor:
    return torch.tensor(LDDT_TOLERANCES[:count])


@functools.cache
@torch.inference_mode(False)  # what is made in inference may serve training later
def _on(breaks: Callable[[int], Tensor], bins: int, device: torch.device) -> Tensor:
    """Return the edges of bins on a device: copied there once, for a copy waits for the device."""
    return breaks(bins).to(device)


def _bin(squared: Tensor, breaks: Tensor) -> Tensor:
    """Return the index of the bin of each squared distance; one equal to an edge falls below it."""
    return torch.bucketize(squared, breaks.to(squared).square())


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return -log softmax(logits)[target]: logits [*, classes], target int64 [*] -> [*], fp32 at least."""
    # Flat: the kernel for several axes is not deterministic on a GPU.
    errors = F.cross_entropy(upcast_half(logits).flatten(0, -2), target.flatten(), reduction="none")
    return errors.view(target.shape)


def _mean_of_pairs(value: Tensor, mask: Tensor, epsilon: float, residues: Residues) -> Tensor:
    """Return the mean of value [N, N], given as this rank's rows, over the pairs where mask [N] is 1."""
    pairs = mask[:, None] * mask[None, :]
    return (value * residues.local_shard(pairs, -2)).sum() / (epsilon + pairs.sum())


def _mean(value: Tensor, mask: Tensor, epsilon: float) -> Tensor:
    """Return the mean where `mask` is 1 (broadcast over leading axes of `value`); 0 where there is none."""
    mask = mask.to(value.dtype).expand_as(value)
    return (value * mask).sum() / (epsilon + mask.sum())
