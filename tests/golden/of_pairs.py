"""Reference cases of confidence: pLDDT, PAE, pTM, ipTM by the official code; scores of interfaces by their papers."""

from itertools import permutations

import numpy as np
import torch
from torch import nn

from tests.golden.reference import CaseOutputs, ReferenceCase, Tensors, tensors
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.model import confidence
from warpfold.scoring.interface import IPSAE_CUTOFFS, beta_contacts, chain_pair_scores, ipsae

# Zhu's own script scores a chain against all others by CA. The last score is not published.
LEFT_OUT = ("out/pdockq2_chain_elofsson", "out/chain_pair_iptm_whole_d0_asym")
WAYS = ("ipsae_asym", "ipsae_d0chn_asym", "ipsae_d0dom_asym")
OF_PAIRS = {"ipsae": "ipsae10/ipsae_asym", "ipsae15": "ipsae15/ipsae_asym", "pdockq2": "pdockq2", "lis": "lis_asym"}


def confidences(case: ReferenceCase) -> CaseOutputs:
    """Compute all scores of one complex from its logits and its CA and CB."""
    x = tensors(case)
    several = case.inputs["asym_id"].max() > 1
    found = confidence.predicted_errors(nn.Identity(), x["pae_logits"], asym_id=x["asym_id"])
    assert found.iptm is not None
    assert found.chain_pair_iptm is not None
    plddt = confidence.plddt(x["plddt_logits"])
    ptm, iptm = torch.tensor(found.ptm), torch.tensor(found.iptm if several else 0.0)
    pairs = found.chain_pair_iptm
    outputs: Tensors = {
        "plddt": plddt,
        "pae": found.pae,
        "max_pae": torch.tensor(found.max_pae),
        "ptm": ptm,
        "iptm": iptm,
        "ranking_confidence_multimer": confidence.ranking_confidence(plddt, ptm, iptm),
        "chain_ptm": pairs.diagonal(),
        "chain_pair_iptm": pairs - pairs.diagonal().diag(),
    }
    of_pairs = pair_arrays(case, found.pae.numpy(), plddt.numpy())
    arrays = {name: torch.from_numpy(array) for name, array in of_pairs.items()}
    return CaseOutputs(outputs | arrays, left_out=LEFT_OUT)


def pair_arrays(case: ReferenceCase, pae: np.ndarray, plddt: np.ndarray) -> dict[str, np.ndarray]:
    """Return the scores of every two chains in the reference's layout."""
    asym_id = case.inputs["asym_id"]
    count, n = int(asym_id.max()), len(asym_id)
    positions, mask = np.zeros((n, 37, 3)), np.zeros((n, 37))
    for name in ("CA", "CB"):
        positions[:, ATOM_ORDER[name]] = case.inputs[f"{name.lower()}_positions"]
        mask[:, ATOM_ORDER[name]] = 1
    named = [f"ipsae{cutoff:g}/{what}" for cutoff in IPSAE_CUTOFFS for what in (*WAYS, "n0dom", "iptm_pae_d0chn_asym")]
    found = {name: np.zeros((count, count)) for name in (*named, "pdockq", "pdockq2", "lis_asym", "lis")}
    contacts = found["n_contacts_cb8"] = np.zeros((count, count), np.int64)
    for cutoff in IPSAE_CUTOFFS:
        key = f"ipsae{cutoff:g}"
        found[f"{key}/ipsae_byres"], found[f"{key}/n0res_byres"] = np.zeros((2, count, n))
        for a, b in permutations(range(count), 2):
            here = asym_id == a + 1
            errors = pae[here][:, asym_id == b + 1]
            one, every = ipsae(errors, cutoff), ipsae(errors, np.inf)
            for name, value in zip(WAYS[1:], (one.d0chn, one.d0dom)):
                found[f"{key}/{name}"][a, b] = value
            found[f"{key}/n0dom"][a, b] = one.residues
            found[f"{key}/iptm_pae_d0chn_asym"][a, b] = every.d0chn
            found[f"{key}/ipsae_byres"][b, here], found[f"{key}/n0res_byres"][b, here] = one.per_frame, one.counted
    for pair in chain_pair_scores(pae, plddt, positions, mask, asym_id, [str(k) for k in range(count)]):
        a, b = map(int, pair.chains)
        for name in ("pdockq", "lis"):
            found[name][a, b] = found[name][b, a] = getattr(pair, name)
        for ours, theirs in OF_PAIRS.items():
            found[theirs][a, b], found[theirs][b, a] = getattr(pair, f"{ours}_ab"), getattr(pair, f"{ours}_ba")
        first, second = (slice(*np.flatnonzero(asym_id == k + 1)[[0, -1]] + [0, 1]) for k in (a, b))
        contacts[a, b] = contacts[b, a] = len(beta_contacts(positions, mask, first, second)[0])
    for name in [name for name in found if name.endswith("_asym") and name != "lis_asym"] + ["pdockq2"]:
        found[f"{name.removesuffix('_asym')}_max"] = np.maximum(found[name], found[name].T)
    return found
