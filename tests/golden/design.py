"""Reference cases of design: the gradient of a whole model's outputs with respect to the features of a sequence.

The query is a soft sequence, or the first pass starts from positions of the case. In a multimer the features are part
of the case, or computed in the model from a soft alignment. The loss is the sum of output * cotangent. Its gradient is
compared as a whole and for each output.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.golden.config import is_multimer, model_config
from tests.golden.models import SCOPE, outputs_of, valid_entries
from tests.golden.multimer import clustered, matrices, with_template_names
from tests.golden.reference import BrokenCase, CaseOutputs, ReferenceCase, Tensors, load
from warpfold.batch import FEATURES, Batch, to_tensors
from warpfold.geometry.atoms import residue_rows
from warpfold.model.alphafold import AlphaFold, Recycled


def gradient_by_inputs(case: ReferenceCase) -> CaseOutputs:
    """Compute the gradients of each output, and of all outputs, with respect to the features that the case names."""
    model = load(AlphaFold(model_config(case.config, case.params)), case, SCOPE).requires_grad_(False)
    leaves = {name: torch.from_numpy(case.inputs[name]).requires_grad_() for name in case.meta["diff_inputs"]}
    multimer = is_multimer(case.config)
    batch, msa_mask = _multimer(case, model, leaves) if multimer else _monomer(case, leaves)
    outputs, loss_terms = _run(case, model, batch)
    gradients: Tensors = {}
    for name, loss in {**loss_terms, "total": torch.stack([*loss_terms.values()]).sum()}.items():
        found = torch.autograd.grad(loss, [*leaves.values()], retain_graph=True, allow_unused=True)
        for (leaf, x), grad in zip(leaves.items(), found):
            gradients[f"grad_in/{name}/{leaf}"] = torch.zeros_like(x) if grad is None else grad
    outputs["loss"] = torch.stack([*loss_terms.values()]).sum()
    outputs |= {f"loss_terms/{name}": x for name, x in loss_terms.items()}
    traj = () if multimer else ("out/structure_module/traj",)
    valid = valid_entries(outputs, batch["seq_mask"], msa_mask)
    return CaseOutputs(outputs, valid=valid, quaternions=traj, gradients=gradients)


def _run(case: ReferenceCase, model: AlphaFold, batch: Batch) -> tuple[Tensors, Tensors]:
    """Compute the outputs of the last pass, and the loss of each output with its cotangent."""
    guess = torch.from_numpy(case.inputs["prev_pos"]) if "prev_pos" in case.inputs else None
    recycled, outputs = model.first_recycled(batch, guess), Tensors()
    for index in range(model.config.recycles):
        with torch.no_grad():
            found = model.recycling_pass(model.inputs_of_pass(batch, index, recycled))
        del found["activations"]
        recycled = Recycled(**found)
        outputs[f"pass{index}/structure_module/final_atom_positions"] = recycled.positions
    output = model.last_pass(model.inputs_of_pass(batch, model.config.recycles, recycled))
    outputs |= outputs_of(output)
    outputs["structure_module/final_atom_mask"] = residue_rows("ATOM37_MASK", batch["aatype"])
    s = output.structure
    outputs["structure_module/traj"] = s.traj if model.config.multimer is None else matrices(s.frames)
    losses = {name: (outputs[name] * torch.from_numpy(one)).sum() for name, one in case.cotangents.items()}
    return outputs, losses


def _monomer(case: ReferenceCase, leaves: Tensors) -> tuple[Batch, Tensor]:
    """Return a monomer's batch of features with an axis of passes, and the mask of the last pass's alignment."""
    batch: dict[str, Tensor] = {}
    for name, array in case.inputs.items():
        if name not in FEATURES:
            continue
        x = leaves.get(name, torch.from_numpy(array))
        if not (FEATURES[name].per_pass or np.array_equal(array, np.broadcast_to(array[:1], array.shape))):
            raise BrokenCase(f"{case.name}: {name} differs between passes")
        batch[name] = x if FEATURES[name].per_pass else x[-1]
    return to_tensors(batch), batch["msa_mask"][-1]


def _multimer(case: ReferenceCase, model: AlphaFold, leaves: Tensors) -> tuple[Batch, Tensor]:
    """Return a multimer's batch and the mask of its clusters, from a soft alignment or from the features of the case.

    In the second case, `model.sample` is replaced by a function that returns them.
    """
    x = {name: torch.from_numpy(array) for name, array in case.inputs.items()} | leaves
    trunk = case.config["embeddings_and_evoformer"]
    order = np.argsort(-case.inputs["cluster_bias_mask"] - case.inputs["msa_mask"].any(-1), kind="stable")
    names = ("aatype", "residue_index", "seq_mask", "asym_id", "entity_id", "sym_id")
    batch = {name: x[name] for name in names} | with_template_names(x)
    if "msa_1hot" in x:
        batch |= clustered(x, order, trunk["num_msa"], trunk["num_extra_msa"])
        batch |= {"target_feat": F.pad(x["aatype_1hot"], (1, 0)), "soft_alignment": x["msa_1hot"]}
    else:
        extra, mask = x["extra_msa_feat"], x["extra_msa_feat_mask"]
        given = {"msa_feat": x["msa_feat"], "msa_mask": x["msa_feat_mask"], "extra_msa_mask": mask}
        given |= {"soft_extra": extra[..., :23], "extra_msa": torch.zeros_like(mask)}
        given |= {"extra_has_deletion": extra[..., 23], "extra_deletion_value": extra[..., 24]}
        model.sample = lambda batch, index: batch | given  # type: ignore[method-assign]
        batch["target_feat"] = F.pad(x["target_feat"], (1, 0))
    return to_tensors(batch), x["msa_mask"][order[: trunk["num_msa"]]]
