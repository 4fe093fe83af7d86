"""Reference cases of whole models: recycling, ensembling, every head, every loss, gradients of the total.

Some quantities are discrete: the target bins of losses, the naming of ambiguous atoms, violations. Rounding moves a
value on an edge to either side, and losses and gradients jump (by at most 1e-3). This does not relax the tolerances.
Instead, decisions that depend on rounding follow the reference, so that everything else is compared strictly:

* Our functions compute discrete quantities from the reference's structure. Our own structure is compared separately.
* The aligned error of a residue in its own frame is zero, which is the edge of the first bin. In compiled code rounding
  makes most of these errors positive, and the affected residues differ even between the reference's loss and its
  gradient. For the gradient, the residues are inferred from the gradient of the layer that the bins affect directly.
  All other gradients must then agree.

Both add a note to the result.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.golden.config import is_multimer, loss_config, model_config
from tests.golden.geometry import true_distances, violation_metrics
from tests.golden.layers import pairs
from tests.golden.multimer import clustered, matrices, with_template_names
from tests.golden.reference import BrokenCase, CaseOutputs, ReferenceCase, Tensors, load
from warpfold.batch import FEATURES, Arrays, Batch, at_pass, to_tensors
from warpfold.geometry.rigid import Rigid
from warpfold.model.alphafold import AlphaFold, Output
from warpfold.model.heads import distogram_breaks, pae_breaks
from warpfold.model.losses import WEIGHTED, LossConfig, Terms, renamed_truth, total_loss
from warpfold.model.structure import StructureOutput
from warpfold.model.violations import find_violations
from warpfold.model.weights.deepmind import PREFIX

SCOPE = PREFIX.rstrip("/")
PAE_HEAD = f"{SCOPE}/predicted_aligned_error_head/logits"
BINNED = ("plddt", "predicted_aligned_error")  # losses whose target bins depend on the structure
ON_EDGE = "on an edge: decided on the reference's structure"
OWN_ERROR = "own errors of zero, on an edge: decided by the reference's gradient"
AT_MOST = 200_000  # sets of residues to try
STRUCTURE_LOSSES = ("fape", "sidechain_fape", "chi_loss", "angle_norm_loss")
HEAD_LOSSES = {
    "structure_module": "structure_module",
    "distogram": "distogram",
    "masked_msa": "masked_msa",
    "plddt": "predicted_lddt",
    "experimentally_resolved": "experimentally_resolved",
    "predicted_aligned_error": "predicted_aligned_error",
}


def whole_model(case: ReferenceCase) -> CaseOutputs:
    """Run a monomer or a multimer on the case's features."""
    return _whole_multimer(case) if is_multimer(case.config) else _whole_monomer(case)


def _whole_multimer(case: ReferenceCase) -> CaseOutputs:
    """Run a multimer, whose cases have no losses and the same features in every pass.

    The clusters are the first rows of the alignment, and fully masked ones come last (see the README of the cases).
    """
    config, trunk = model_config(case.config, case.params), case.config["embeddings_and_evoformer"]
    x = {name: torch.from_numpy(array) for name, array in case.inputs.items()}
    bias, seen = case.inputs["cluster_bias_mask"], case.inputs["msa_mask"].any(-1)
    order = np.argsort(-bias - seen, kind="stable")
    alignment = clustered(x, order, trunk["num_msa"], trunk["num_extra_msa"])
    target_feat = F.pad(F.one_hot(x["aatype"].long(), 21), (1, 0))
    names = ("aatype", "residue_index", "seq_mask", "asym_id", "entity_id", "sym_id")
    batch = to_tensors({name: x[name] for name in names} | with_template_names(x) | {"target_feat": target_feat})
    model = load(AlphaFold(config), case, SCOPE)
    with torch.no_grad():
        output = model(batch | alignment)
    outputs = outputs_of(output) | {
        "structure_module/traj": matrices(output.structure.frames),
        "structure_module/final_rigids": matrices(output.structure.frames[-1]),
        "num_recycles": torch.tensor(output.recycles),
    }
    msa_mask = x["msa_mask"][order[: trunk["num_msa"]]]
    return CaseOutputs(outputs, model, SCOPE, valid=valid_entries(outputs, x["seq_mask"], msa_mask))


def _whole_monomer(case: ReferenceCase) -> CaseOutputs:
    """Run a monomer on the case's features, with their number of passes.

    If the case has no gradients, nothing is saved for the backward pass.
    """
    config = model_config(case.config, case.params)
    features = case.inputs
    if not case.config["resample_msa_in_recycling"]:  # every recycling has the same samples
        features = {name: np.concatenate([x] * (config.recycles + 1)) for name, x in features.items()}
    passes = len(features["msa_feat"])
    ensemble, rest = divmod(passes, config.recycles + 1)
    if rest or not ensemble:
        raise BrokenCase(f"{case.name}: features of {passes} passes for {config.recycles} recycles")
    last = config.recycles * ensemble  # the pass whose alignment the masked-MSA head and the losses see
    batch = to_tensors(_features(features, last))
    model = load(AlphaFold(replace(config, ensemble=ensemble)), case, SCOPE)
    with torch.set_grad_enabled(bool(case.asks("grad_params"))):
        output = model(batch)
        steady = replace(output, structure=reference_structure(case, output.structure))
        total, terms, notes = _losses(case, output, steady, batch, last)
    labels = _labels(case, steady.structure, batch)
    notes |= differences(_labels(case, output.structure, batch), labels)
    outputs = outputs_of(output) | terms | labels
    outputs["structure_module/traj"] = output.structure.traj
    outputs["structure_module/final_affines"] = output.structure.traj[-1]
    outputs["distogram/true_dist"] = true_distances(batch["pseudo_beta"])
    step = _own_errors(case, model, output, batch, total)
    if step is not None:
        notes[f"grad_params/{PAE_HEAD}//bias"] = OWN_ERROR
    return CaseOutputs(
        outputs,
        module=model,
        scope=SCOPE,
        objective=total if step is None else total + step,
        valid=valid_entries(outputs, batch["seq_mask"], at_pass(batch, last, ["msa_mask"])["msa_mask"]),
        quaternions=("out/structure_module/traj", "out/structure_module/final_affines"),
        notes=notes,
    )


def _own_errors(case: ReferenceCase, model: AlphaFold, output: Output, batch: Batch, total: Tensor) -> Tensor | None:
    """Compute the correction of the total loss for the reference's rounding of own errors; see `own_error_step`."""
    share = loss_config(case.config["heads"]).predicted_aligned_error
    if not (total.requires_grad and share and model.pae is not None and output.pae_logits is not None):
        return None
    linear = model.pae.logits
    weight, bias = torch.autograd.grad(total, [linear.weight, linear.bias], retain_graph=True)
    ours = torch.cat([weight.T, bias[None]]).numpy() / share
    theirs = np.vstack([case.expected[f"grad_params/{PAE_HEAD}//{name}"] for name in ("weights", "bias")]) / share
    log_p = output.pae_logits.log_softmax(-1)
    step = own_error_step(ours, theirs, output.pair, log_p, batch["backbone_affine_mask"])
    return None if step is None else share * step


def _losses(
    case: ReferenceCase, output: Output, steady: Output, batch: Batch, last: int
) -> tuple[Tensor, Terms, dict[str, str]]:
    """Compute the total loss, all losses by official names, and notes. `steady` determines the target bins."""
    config = loss_config(case.config["heads"])
    total, terms = total_loss(output, batch, _weighing(config, [w for w in WEIGHTED if w not in BINNED]), last)
    notes: dict[str, str] = {}
    if any(getattr(config, name) for name in BINNED):
        aims = _weighing(config, BINNED)
        more, binned = total_loss(steady, batch, aims, last)
        total, terms = total + more, terms | binned
        own = {f"{HEAD_LOSSES[name]}/loss": x for name, x in total_loss(output, batch, aims, last)[1].items()}
        notes = differences(own, {f"{HEAD_LOSSES[name]}/loss": x for name, x in binned.items()})
    losses = {f"{theirs}/loss": terms[ours] for ours, theirs in HEAD_LOSSES.items() if ours in terms}
    losses |= {f"structure_module/{name}": terms[name] for name in STRUCTURE_LOSSES if name in terms}
    return total, losses | {"total_loss": total}, notes


def _weighing(config: LossConfig, names: Sequence[str]) -> LossConfig:
    """Return the same settings with the weights of all other losses set to 0."""
    changes: dict[str, Any] = {name: 0.0 for name in WEIGHTED if name not in names}
    return replace(config, **changes)


def _features(features: Arrays, last: int) -> Arrays:
    """Convert the official features, which have a leading axis of passes, to ours (batch.FEATURES).

    Features without such an axis in ours must be the same in every pass.
    """
    ours: Arrays = {}
    for name, array in features.items():
        if name not in FEATURES:
            continue
        if FEATURES[name].per_pass:
            ours[name] = array
            continue
        if not all(np.array_equal(array[0], other) for other in array[1:]):
            raise BrokenCase(f"features.npz: {name} differs between passes")
        ours[name] = array[last]
    return ours


def outputs_of(output: Output) -> Tensors:
    """Return representations, logits, atoms and angles by the official code's names."""
    s = output.structure
    outputs = {
        "representations/msa": output.msa,
        "representations/pair": output.pair,
        "representations/single": output.single,
        "representations/msa_first_row": output.msa_first_row,
        "representations/structure_module": s.single,
        "distogram/logits": output.distogram_logits,
        "distogram/bin_edges": distogram_breaks(output.distogram_logits.shape[-1]),
        "masked_msa/logits": output.masked_msa_logits,
        "predicted_lddt/logits": output.plddt_logits,
        "experimentally_resolved/logits": output.resolved_logits,
        "structure_module/final_atom14_positions": s.final_atom14,
        "structure_module/final_atom_positions": s.final_atom37,
        "structure_module/sidechains/angles_sin_cos": s.angles,
        "structure_module/sidechains/unnormalized_angles_sin_cos": s.unnormalized_angles,
        "structure_module/sidechains/atom_pos": s.atom14,
    }
    if output.pae_logits is not None:
        outputs["predicted_aligned_error/logits"] = output.pae_logits
        outputs["predicted_aligned_error/breaks"] = pae_breaks(output.pae_logits.shape[-1])
    return outputs


def _labels(case: ReferenceCase, structure: StructureOutput, batch: Batch) -> Tensors:
    """Compute the renamed truth that fits the structure best, and the violations, by the official names."""
    atom14, exists, index = structure.final_atom14, batch["atom14_atom_exists"], batch["residue_index"]
    renamed = renamed_truth(atom14, batch)
    with torch.no_grad():
        config = loss_config(case.config["heads"])
        factor, overlap = config.violation_tolerance_factor, config.clash_overlap_tolerance
        found = find_violations(
            atom14, exists, batch["aatype"], index, tolerance_factor=factor, overlap_tolerance=overlap
        )
        metrics = violation_metrics(found, atom14, exists, index, batch["seq_mask"])
    return {
        "structure_module/alt_naming_is_better": renamed.swapped.float(),
        "structure_module/renamed_atom14_gt_positions": renamed.positions,
        "structure_module/renamed_atom14_gt_exists": renamed.mask,
        **{f"structure_module/metrics/{name}": value for name, value in metrics.items()},
    }


def valid_entries(outputs: Tensors, seq_mask: Tensor, msa_mask: Tensor) -> Tensors:
    """Return the mask of each output for the residues [r] and alignment rows [s, r] that exist."""
    residues, msa = seq_mask > 0, msa_mask > 0
    r = len(residues)
    valid: Tensors = {}
    for name, x in outputs.items():
        if name in ("representations/msa", "masked_msa/logits"):
            valid[f"out/{name}"] = msa
        elif x.shape[:2] == (r, r):
            valid[f"out/{name}"] = pairs(seq_mask)
        elif x.shape[:1] == (r,):
            valid[f"out/{name}"] = residues
        elif name == "structure_module/traj" or name.startswith("structure_module/sidechains/"):
            valid[f"out/{name}"] = residues.expand(len(x), r)
    return valid


# Decisions that depend on rounding


def reference_structure(case: ReferenceCase, ours: StructureOutput) -> StructureOutput:
    """Return our structure with the reference's backbone and final atoms, if the case has them."""
    stored = {
        name: torch.from_numpy(case.expected[f"out/structure_module/{name}"])
        for name in ("traj", "final_atom14_positions", "final_atom_positions")
        if f"out/structure_module/{name}" in case.expected
    }
    traj = stored.get("traj", ours.traj)
    return replace(
        ours,
        traj=traj,
        frames=Rigid.from_quaternion7(traj),
        final_atom14=stored.get("final_atom14_positions", ours.final_atom14),
        final_atom37=stored.get("final_atom_positions", ours.final_atom37),
    )


def differences(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, str]:
    """Describe the discrete quantities that differ between our structure and the reference's, by output."""
    return {f"out/{name}": ON_EDGE for name, x in ours.items() if not torch.equal(x, theirs[name])}


def own_error_step(ours: np.ndarray, theirs: np.ndarray, pair: Tensor, log_p: Tensor, mask: Tensor) -> Tensor | None:
    """Compute the correction of the aligned-error loss that puts own errors of zero in the bins of the reference.

    ours, theirs: [c_z + 1, bins], the gradient of this loss with respect to the head's weights and bias, ours with all
    own errors in the second bin. pair: [N, N, c_z], the head's input. log_p: [N, N, bins], its log-probabilities.
    mask: [N]. Moving residue i to the first bin adds pair[i, i] over the number of pairs to column 1 of the gradient,
    and subtracts it from column 0. Returns None if no residue was moved, or too many to try.
    """
    pairs = float(mask.sum()) ** 2
    moved = ((theirs - ours)[:, 1] - (theirs - ours)[:, 0]) / 2 * pairs
    count, residues = round(float(moved[-1])), np.flatnonzero(mask.numpy() > 0)
    if count < 1 or math.comb(len(residues), count) > AT_MOST:
        return None
    own = pair.detach().numpy()[residues, residues]
    choices = np.array(list(itertools.combinations(range(len(residues)), count)))
    miss = np.linalg.norm(own[choices].sum(1) - moved[:-1], axis=-1)
    chosen = residues[choices[miss.argmin()]]
    return (log_p[chosen, chosen, 1] - log_p[chosen, chosen, 0]).sum() / pairs
