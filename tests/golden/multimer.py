"""Reference cases of AlphaFold-Multimer's frames, clusters, relative positions and templates."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.golden.config import template_config
from tests.golden.reference import CaseOutputs, ReferenceCase, Tensors, load
from warpfold.batch import at_pass, to_tensors
from warpfold.data.example.raw_example import compute_profile
from warpfold.geometry import atoms
from warpfold.geometry.labels import structure_labels
from warpfold.geometry.rigid import Rigid
from warpfold.model.clusters import CLASSES, cluster_features
from warpfold.model.embed import ChainRelativePosition
from warpfold.model.template import ChainTemplateEmbedder, ChiTemplateRows

PROFILE, DELETION_MEAN = slice(25, 48), 48  # channels of msa_feat


def matrices(frames: Rigid) -> Tensor:
    """Convert frames [*] to Multimer's [*, 3, 4]: the rotation, and the translation as a fourth column."""
    return torch.cat([frames.rotation, frames.translation[..., None]], -1)


def rigid_of(matrix: Tensor) -> Rigid:
    """Invert `matrices`."""
    return Rigid(matrix[..., :3], matrix[..., 3])


def frames_and_chi(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    """Compute the frames of the rigid groups and the angles of the side chains."""
    structure = x["aatype"], x["all_atom_positions"], x["all_atom_mask"]
    groups, labels = atoms.atom37_to_frames(*structure), structure_labels(*structure)
    outputs = {
        "chi_angles": labels["chi_angles"],
        "chi_mask": labels["chi_mask"],
        "rigidgroups_gt_frames": matrices(groups.frames),
        "rigidgroups_alt_gt_frames": matrices(groups.alt_frames),
        "rigidgroups_gt_exists": groups.mask,
        "rigidgroups_group_exists": groups.exists,
        "rigidgroups_group_is_ambiguous": groups.ambiguous,
    }
    valid = {f"out/{name}": groups.mask > 0 for name in ("rigidgroups_gt_frames", "rigidgroups_alt_gt_frames")}
    return CaseOutputs(outputs, valid=valid | {"out/chi_angles": labels["chi_mask"] > 0})


def clustered(rows: Tensors, order: np.ndarray, centres: int, extra: int, masked: Tensor | None = None) -> Tensors:
    """Convert an alignment of the official code to the features of one pass from which clusters are computed.

    rows: msa, deletion_matrix, msa_mask [R, N]. order: the order of the rows, with the centres first, then the extra
    MSA. masked: the centres after masking; None: nothing is masked.
    """
    first = order[:centres]
    return to_tensors(
        {
            "alignment": rows["msa"],
            "alignment_mask": rows["msa_mask"],
            "alignment_deletions": rows["deletion_matrix"],
            "centre_rows": first[None],
            "extra_rows": order[centres:][None, :extra],
            "masked_msa": (rows["msa"] * rows["msa_mask"])[first][None] if masked is None else masked[None],
            "true_msa": rows["msa"][first][None],
        }
    )


def msa_processing(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    """Compute the features of clusters from the recorded order of rows and the recorded masking."""
    centres, order = case.meta["num_msa"], case.inputs["index_order"]
    batch = at_pass(clustered(x, order, centres, len(order), x["masked_msa"]), 0)
    features, used = cluster_features(batch), slice(case.meta["num_extra_msa"])
    feat, rest = features["msa_feat"], order[centres:]
    deletions = torch.stack((features["extra_has_deletion"], features["extra_deletion_value"]), -1)
    msa, mask = case.inputs["msa"], case.inputs["msa_mask"] > 0
    profile = np.zeros((msa.shape[1], 22), np.float32)
    for i in np.flatnonzero(mask.any(0)):  # our alignments have no masked cells
        profile[i] = compute_profile(msa[mask[:, i], i : i + 1])
    outputs = {
        "msa_profile": torch.from_numpy(profile),
        "sampled_msa": batch["true_msa"],
        "true_msa": batch["true_msa"],
        "sampled_extra_msa": features["extra_msa"],
        "sampled_extra_msa_mask": features["extra_msa_mask"],
        "sampled_extra_deletion_matrix": x["deletion_matrix"][rest],
        "bert_mask": torch.from_numpy(case.expected["out/bert_mask"]),  # passed on unchanged
        "msa_feat": feat,
        "cluster_profile": feat[..., PROFILE],
        "cluster_deletion_mean": 3 * torch.tan(feat[..., DELETION_MEAN] * (torch.pi / 2)),
        "extra_msa_feat": torch.cat((F.one_hot(features["extra_msa"], CLASSES), deletions), -1)[used],
        "extra_msa_mask_used": features["extra_msa_mask"][used],
    }
    return CaseOutputs(outputs)


def relative_positions(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    """Compute the embedding of relative positions, with chain, entity and copy."""
    c, c_z = case.config, case.expected["out/out"].shape[-1]
    position = ChainRelativePosition(c_z, c["max_relative_idx"], c["max_relative_chain"])
    out = load(position, case, "evoformer")(x)
    return CaseOutputs({"out": out}, position, "evoformer")


def with_template_names(x: Tensors) -> Tensors:
    """Return the arrays of templates and derived features by our names."""
    aatype, positions, mask = (x[f"template_{n}"] for n in ("aatype", "all_atom_positions", "all_atom_mask"))
    return {
        "template_aatype": aatype,
        "template_all_atom_positions": positions,
        "template_all_atom_masks": mask,
        "template_pseudo_beta": atoms.pseudo_beta(aatype, positions),
        "template_pseudo_beta_mask": atoms.pseudo_beta_mask(aatype, mask),
        "template_mask": torch.ones(len(aatype)),
    }


def template_mean(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    """Compute the update of z from templates."""
    z, mask = x["query_embedding"], x["padding_mask_2d"]
    embedder = ChainTemplateEmbedder(1, z.shape[-1], template_config(case.config))
    embedder.rows = None
    load(embedder, case, "")
    # A chain is numbered by its first residue.
    batch = with_template_names(x) | {"asym_id": x["multichain_mask_2d"].float().argmax(-1)}
    valid = {"out/out": mask > 0, "grad_in/query_embedding": mask > 0}
    return CaseOutputs({"out": embedder(z, mask, batch) - z}, embedder, "", valid=valid)


def template_rows(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    """Compute the rows of m from templates."""
    rows = load(ChiTemplateRows(case.meta["num_channel"]), case, "")
    act, mask = rows(with_template_names(x), torch.float32)
    return CaseOutputs({"act": act, "mask": mask}, rows, "")
