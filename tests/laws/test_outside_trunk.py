"""Outside the trunk, slices give the same results as a single computation, and hold little more memory than z."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.helpers import as_multimer, filled_model, random_batch, random_complex, tiny_config
from tests.ranks import run_ranks
from warpfold.batch import Batch, at_pass
from warpfold.cost.fake import fake_batch, fake_mesh
from warpfold.cost.recorder import Recorder
from warpfold.host import fetch
from warpfold.model import confidence
from warpfold.model.alphafold import AlphaFold, HeadsConfig, ModelConfig
from warpfold.model.confidence import predicted_errors
from warpfold.model.embed import MultimerConfig
from warpfold.model.evoformer import EvoformerConfig
from warpfold.model.heads import DistogramHead, LogitsHead, distogram_breaks, pae_breaks
from warpfold.model.structure import StructureConfig
from warpfold.model.template import TemplateConfig
from warpfold.ops import dispatch
from warpfold.ops.triton.launch import unlaunched
from warpfold.parallel.collectives import local_shard
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import make_mesh
from warpfold.parallel.plan import Plan

# Relative error in fp64, for rounding only
LIMIT = 1e-10
CHAINS = (5, 4)


def example(templates: int, several: bool) -> Batch:
    """Return a protein or complex of 9 residues in fp64; its last residue and its last template are masked."""
    size = 5, 6, templates
    batch = random_complex(CHAINS, 13, *size, 1, 0) if several else random_batch(9, *size, 1, 0)
    batch["seq_mask"][-1:] = 0
    if templates > 1:
        batch["template_mask"][-1:] = 0
    return {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}


def model_of(several: bool) -> AlphaFold:
    config = tiny_config()
    return filled_model(as_multimer(config, False) if several else config).double().eval()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("several", [False, True], ids=["chain", "complex"])
@pytest.mark.parametrize("templates", [0, 1, 4])
def test_in_place_is_whole(several: bool, templates: int) -> None:
    batch, model = example(templates, several), model_of(several)
    with torch.no_grad():
        whole = Execution(Plan(precision="fp64")).bind(model)(batch, 1)
        for how in ({"chunk": 1}, {"chunk": 4}, {"chunk": 4, "offload": True}):
            Execution(Plan(**how, in_place=True, precision="fp64")).bind(model)
            found = model.fold(batch, 1)
            pair, atoms = fetch(found.representations.pair, slice(0, 9)), found.structure.final_atom37
            assert error(pair, whole.pair) < LIMIT
            assert error(atoms, whole.structure.final_atom37) < LIMIT


# Chains in several pieces, and one residue without a chain
ASYM_ID = torch.tensor([1, 1, 1, 2, 2, 0, 3, 3, 1, 1, 3])


def heads() -> tuple[LogitsHead, DistogramHead, Tensor]:
    torch.manual_seed(3)
    pae, distogram = LogitsHead(6, 64).double(), DistogramHead(6, 64).double()
    for p in (*pae.parameters(), *distogram.parameters()):
        torch.nn.init.normal_(p)
    return pae, distogram, torch.randn(11, 11, 6).double()


def heads_in_slices(execution: Execution) -> dict[str, Tensor]:
    """Return the results of the heads for this rank's rows of z."""
    pae, distogram, z = heads()
    execution.bind(distogram)
    z = execution.residues.local_shard(z, -3)
    kept = execution.pair_memory(z, z.shape)
    execution.store(kept, slice(0, len(z)), z)
    found = predicted_errors(pae, kept, execution, ASYM_ID)
    slices = list(distogram.in_slices(kept))
    assert [i for rows, _ in slices for i in range(len(z))[rows]] == list(range(len(z)))
    return {
        "pae": found.pae,
        "ptm": torch.tensor(found.ptm, dtype=torch.float64),
        "iptm": torch.tensor(found.iptm, dtype=torch.float64),
        "pairs": found.chain_pair_iptm,
        "distogram": torch.cat([logits for _, logits in slices]),
    }


def heads_at_once() -> dict[str, Tensor]:
    pae, distogram, z = heads()
    return heads_in_slices(Execution(Plan(precision="fp64"))) | {
        "pae": confidence.pae(pae(z), pae_breaks()).float(),
        "distogram": distogram(z),
    }


@pytest.mark.parametrize("how", [{"chunk": 1}, {"chunk": 4}, {"chunk": 3, "offload": True}], ids=str)
def test_heads_in_slices_are_heads(how: dict[str, int]) -> None:
    plan = Plan(**how, in_place=bool(how), precision="fp64")
    with torch.no_grad():
        found, expected = heads_in_slices(Execution(plan)), heads_at_once()
    for name, x in expected.items():
        # PAE is stored in fp32.
        assert error(found[name], x) < (1e-6 if name == "pae" else LIMIT), name


@pytest.mark.parametrize("axial", [2, 4])
def test_heads_in_slices_are_heads_over_ranks(axial: int) -> None:
    def on_a_rank() -> dict[str, float]:
        mesh = make_mesh(1, axial, 1)
        with torch.no_grad():
            found = heads_in_slices(Execution(Plan(axial=axial, chunk=2, in_place=True, precision="fp64"), mesh))
            expected = heads_at_once()
        shards = {"pae", "distogram"}
        return {
            name: error(found[name], local_shard(x, 0, mesh.axial) if name in shards else x)
            for name, x in expected.items()
        }

    for errors in run_ranks(on_a_rank, axial):
        for name, worst in errors.items():
            assert worst < (1e-6 if name == "pae" else LIMIT), name


def test_contacts_are_nearer_than_8_angstrom() -> None:
    edges = distogram_breaks()
    near = confidence.contact_probabilities(torch.eye(64), edges)
    assert near.sum() == 19
    assert near[:19].all()
    assert edges[18] < 8 < edges[19]


def test_a_pass_moves_its_own_features_alone() -> None:
    batch, passes = random_batch(9, 5, 6, 2, 4, 0), 4
    # As on a device with its own memory
    model = filled_model(tiny_config()).eval().to("meta")
    rows = batch["msa_feat"].shape[-3]
    with Recorder() as memory, torch.no_grad():
        folded = model.fold(batch, passes - 1)
    assert folded.recycles == passes - 1
    assert folded.representations.pair.is_meta
    assert {x.shape[:-3] for x in memory.pieces if x.shape[-3:] == (rows, 9, 49)} <= {(1,), ()}


SLICES, RESIDUES = 16, 512


@pytest.mark.parametrize("multimer", [False, True], ids=["chain", "complex"])
def test_little_more_than_z_exists_outside_the_trunk(multimer: bool) -> None:
    """At full width on a GPU, relative to z, without tensors whose size is linear in the length."""
    sizes = {"pass": 1, "res": RESIDUES, "tmpl": 3, "seq": 4, "extra": 4} | ({"row": 8} if multimer else {})
    config = ModelConfig(templates=TemplateConfig(blocks=1, unit_vectors=multimer), heads=HeadsConfig(pae=True))
    config = replace(config, evoformer=EvoformerConfig(blocks=1), extra_blocks=1, structure=StructureConfig(layers=2))
    config = replace(config, multimer=MultimerConfig() if multimer else None)
    plan = Plan(chunk=RESIDUES // SLICES, in_place=True, precision="bf16")
    with dispatch.standing_for("cuda"), unlaunched(), fake_mesh() as mesh, torch.device("meta"), torch.no_grad():
        model = Execution(plan, mesh).bind(AlphaFold(config).eval())
        batch = at_pass(fake_batch(**sizes), 0)
        z = model.execution.pair_memory(batch["seq_mask"], (RESIDUES, RESIDUES, config.c_z))
        z_mask = batch["seq_mask"][:, None] * batch["seq_mask"]
        single = torch.empty(RESIDUES, config.c_s, dtype=z.dtype)
        parts = {
            # A template's pair representation and a factor; each is half as large as z.
            "templates": (lambda: model.templates(z, z_mask, batch), 1.0),
            "structure": (lambda: model.structure(single, z, batch["aatype"], batch["seq_mask"]), 0.0),
            "errors": (lambda: predicted_errors(model.pae, z, model.execution), 0.0),
            "distogram": (lambda: [None for _ in model.distogram.in_slices(z)], 0.0),
        }
        for name, (run, whole) in parts.items():
            with Recorder() as memory:
                run()
            assert memory.peak / z.nbytes < whole + 8 / SLICES, (name, memory.peak / z.nbytes, memory.at_peak[:9])
