"""Losses of complexes: invariant under exchange of equal chains and motions; centres of mass and clashes."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.model.proteins import example, random_motion
from warpfold.geometry import atoms
from warpfold.geometry.rigid import Rigid
from warpfold.model import losses
from warpfold.model.losses import LossConfig, backbone_fape, renamed_sidechain_fape, total_loss
from warpfold.model.permutation import with_truth
from warpfold.model.violations import center_of_mass_loss, clash_violations, connection_violations, find_violations
from warpfold.ops import tensors

SEQUENCE = "GADFKY"
N = len(SEQUENCE)
EVERYTHING = LossConfig(
    violation=0.03,
    center_of_mass=1.0,
    experimentally_resolved=0.01,
    predicted_aligned_error=0.1,
    fape_softening=0.0,
    average_clashes=True,
    every_clash=True,
    bonds="multimer",
)
CLOSE = {"rtol": 1e-7, "atol": 1e-8}  # the axes of a frame have length 1 to within 1e-8


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def complex_of(generator, copies=3, noise=1.0, missing=0.2):
    """Build a batch of three equal chains with all their truths, and the parameters of a noisy prediction."""
    one = example(SEQUENCE, dtype=torch.float64)
    motions = [random_motion(generator) for _ in range(copies)]
    n = copies * N
    truth = torch.stack([motion.apply(one.batch["all_atom_positions"]) for motion in motions])
    mask = one.batch["all_atom_mask"] * (torch.rand(copies, N, 1, generator=generator) > missing)
    chain = torch.arange(copies).repeat_interleave(N)
    batch = {name: one.batch[name].tile(copies, *[1] * (one.batch[name].dim() - 1)) for name in ("aatype", "seq_mask")}
    batch |= {name: one.batch[name].tile(copies, 1) for name in ("atom14_atom_exists", "atom37_atom_exists")}
    batch |= {
        "residue_index": torch.arange(N).tile(copies),
        "asym_id": chain + 1,
        "entity_id": torch.ones(n, dtype=torch.long),
        "sym_id": chain + 1,
        "copy_atom_positions": truth.tile(1, copies, 1, 1) * mask.tile(1, copies, 1)[..., None],
        "copy_atom_mask": mask.tile(1, copies, 1),
        "resolution": torch.tensor(2.0),
        "true_msa": torch.randint(0, 20, (1, 2, n), generator=generator),
        "bert_mask": torch.ones(1, 2, n, dtype=torch.float64),
    }

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    frames = one.output.structure.frames[-1]
    placed = Rigid.cat([motion[None].compose(frames) for motion in motions])
    predicted = {
        "rotation": placed.rotation,
        "translation": placed.translation + noise * draw(2, n, 3),
        "angles": one.output.structure.angles[0].tile(copies, 1, 1) + 0.3 * draw(2, n, 7, 2),
        "distogram_logits": draw(n, n, 64),
        "masked_msa_logits": draw(2, n, 22),
        "plddt_logits": draw(n, 50),
        "resolved_logits": draw(n, 37),
        "pae_logits": draw(n, n, 64),
    }
    return batch, predicted


def output_of(aatype: Tensor, predicted: dict[str, Tensor]) -> SimpleNamespace:
    """Build the output of a model from the parameters of a prediction."""
    translation, unnormalized = predicted["translation"], predicted["angles"]
    frames = Rigid(predicted["rotation"].expand(len(translation), -1, -1, -1), translation)
    angles = unnormalized / unnormalized.norm(dim=-1, keepdim=True)
    groups = atoms.torsions_to_frames(aatype.expand(len(angles), -1), frames, angles)
    atom14 = atoms.frames_to_atom14(aatype, groups[-1])
    structure = SimpleNamespace(
        frames=frames,
        sidechain_frames=groups,
        angles=angles,
        unnormalized_angles=unnormalized,
        final_atom14=atom14,
        final_atom37=atoms.atom14_to_atom37(aatype, atom14),
    )
    return SimpleNamespace(structure=structure, **{k: x for k, x in predicted.items() if k.endswith("logits")})


def judged(batch, predicted) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Compute the loss, its terms, and its gradients."""
    leaves = {name: x.clone().requires_grad_() for name, x in predicted.items()}
    loss, terms = total_loss(output_of(batch["aatype"], leaves), batch, EVERYTHING)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return loss.detach(), terms, dict(zip(leaves, gradients))


@pytest.mark.parametrize("what", ["truth", "prediction"])
def test_in_fp32_nothing_is_lost_300_angstrom_from_the_origin(generator, what):
    """Coordinates are on a grid, so that moving them is exact. Only the loss can lose digits."""
    batch, predicted = complex_of(generator, missing=0.0)
    batch = {name: x.float() if x.is_floating_point() else x for name, x in batch.items()}
    output = output_of(batch["aatype"], {name: x.float() for name, x in predicted.items()})
    structure = vars(output.structure)
    away = torch.tensor([300.0, -280.0, 310.0])

    def on_grid(x: Tensor, mask: Tensor | None, moved: bool) -> Tensor:
        there = (512 * x).round() / 512 + away * moved
        return there if mask is None else there * mask[..., None]

    def judged_at(moved: str | None) -> list[Tensor]:
        truth = on_grid(batch["copy_atom_positions"], batch["copy_atom_mask"], moved == "truth")
        ours = [
            on_grid(x, mask, moved == "prediction").requires_grad_()
            for x, mask in (
                (structure["frames"].translation, None),
                (structure["sidechain_frames"].translation, None),
                (structure["final_atom14"], batch["atom14_atom_exists"]),
                (structure["final_atom37"], batch["atom37_atom_exists"]),
            )
        ]
        names = ("frames", "sidechain_frames")
        frames = {name: Rigid(structure[name].rotation, at) for name, at in zip(names, ours)}
        there = SimpleNamespace(**structure | frames | dict(zip(("final_atom14", "final_atom37"), ours[2:])))
        whole = SimpleNamespace(**vars(output) | {"structure": there})
        loss, terms = total_loss(whole, batch | {"copy_atom_positions": truth}, EVERYTHING)
        return [loss.detach(), *terms.values(), *torch.autograd.grad(loss, ours)]

    for here, there in zip(judged_at(None), judged_at(what), strict=True):
        torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-6 * float(here.abs().max()))


def test_the_loss_does_not_change_when_copies_are_renumbered_or_the_truth_moves(generator):
    batch, predicted = complex_of(generator)
    found = judged(batch, predicted)
    assert all(torch.isfinite(x).all() for x in [found[0], *found[1].values(), *found[2].values()])
    assert {"interface_fape", "center_of_mass", "violation"} <= set(found[1])
    order = torch.tensor([2, 0, 1])
    renumbered = batch | {name: batch[name][order] for name in ("copy_atom_positions", "copy_atom_mask")}
    torch.testing.assert_close(judged(renumbered, predicted), found, **CLOSE)
    motion = random_motion(generator)
    moved = motion.apply(batch["copy_atom_positions"]) * batch["copy_atom_mask"][..., None]
    torch.testing.assert_close(judged(batch | {"copy_atom_positions": moved}, predicted), found, **CLOSE)


RESIDUE_AXES = {"distogram_logits": (0, 1), "pae_logits": (0, 1), "masked_msa_logits": (1,), "translation": (1,)}
RESIDUE_AXES |= {"angles": (1,), "true_msa": (2,), "bert_mask": (2,)}
RESIDUE_AXES |= {"copy_atom_positions": (1,), "copy_atom_mask": (1,), "resolution": ()}


def exchanged(named, order):
    """Reorder the residues of a batch and a prediction."""
    for name, x in named.items():
        for axis in RESIDUE_AXES.get(name, (0,)):
            x = x.index_select(axis, order)
        named = named | {name: x}
    return named


def test_the_loss_does_not_change_when_equal_chains_are_exchanged(generator):
    batch, predicted = complex_of(generator, noise=4.0)
    loss, terms, gradients = judged(batch, predicted)
    order = torch.tensor([1, 2, 0]).repeat_interleave(N) * N + torch.arange(N).tile(3)
    ids = {name: batch[name] for name in ("asym_id", "sym_id")}  # the first is still called the first
    found = judged(exchanged(batch, order) | ids, exchanged(predicted, order))
    torch.testing.assert_close(found, (loss, terms, exchanged(gradients, order)), **CLOSE)


def test_the_prediction_decides_whose_truth_a_copy_is(generator):
    batch, predicted = complex_of(generator, noise=0.3)
    right = total_loss(output_of(batch["aatype"], predicted), batch, EVERYTHING)[1]
    others = torch.tensor([1, 2, 0]).repeat_interleave(N) * N + torch.arange(N).tile(3)
    turned = predicted | {name: predicted[name].index_select(-2, others) for name in ("translation",)}
    turned |= {"rotation": predicted["rotation"][others], "angles": predicted["angles"][:, others]}
    again = total_loss(output_of(batch["aatype"], turned), batch, EVERYTHING)[1]
    for name in ("fape", "interface_fape", "sidechain_fape", "center_of_mass", "chi_loss"):
        torch.testing.assert_close(again[name], right[name], **CLOSE)
    fixed = with_truth(batch, output_of(batch["aatype"], predicted).structure.final_atom37)
    assert "copy_atom_positions" not in fixed
    wrong = total_loss(output_of(batch["aatype"], turned), fixed, EVERYTHING)[1]
    assert wrong["interface_fape"] > 5 * right["interface_fape"]


# FAPE


def test_fape_within_and_between_chains_are_means_over_their_own_pairs(generator):
    batch, predicted = complex_of(generator, missing=0.0)
    output = output_of(batch["aatype"], predicted)
    batch = with_truth(batch, output.structure.final_atom37)
    frames, true = output.structure.frames, Rigid.from_quaternion7(batch["backbone_affine_tensor"])
    found = losses.backbone_losses(frames, batch, EVERYTHING)
    seen = frames[..., :, None].invert_apply(frames.translation[..., None, :, :])
    apart = (seen - true[:, None].invert_apply(true.translation)).norm(dim=-1)
    same = batch["asym_id"][:, None] == batch["asym_id"]
    # The smallest distance is 1e-4 angstrom, that of a residue from itself.
    expected = apart.clamp(max=10.0)[:, same].mean(1) / 10, apart.clamp(max=30.0)[:, ~same].mean(1) / 20
    torch.testing.assert_close(found["fape"], expected[0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found["interface_fape"], expected[1], rtol=1e-6, atol=1e-5)


def test_a_single_chain_has_nothing_between_chains(generator):
    batch, predicted = complex_of(generator, copies=1)
    _, terms, gradients = judged(batch, predicted)
    assert terms["interface_fape"] == terms["center_of_mass"] == 0
    assert all(torch.isfinite(x).all() for x in gradients.values())
    output = output_of(batch["aatype"], predicted)
    batch = with_truth(batch, output.structure.final_atom37)
    true, mask = Rigid.from_quaternion7(batch["backbone_affine_tensor"]), batch["backbone_affine_mask"]
    alone = backbone_fape(output.structure.frames, true, mask, softening=0.0)
    torch.testing.assert_close(terms["fape"], alone[-1])  # the order of sums differs


def test_gradients_are_finite_where_nothing_was_seen_or_all_is_in_one_place(generator):
    batch, predicted = complex_of(generator)
    everywhere = predicted | {"translation": 0 * predicted["translation"], "angles": 0 * predicted["angles"] + 1}
    unseen = batch | {name: 0 * batch[name] for name in ("copy_atom_positions", "copy_atom_mask")}
    for b, p in ((batch, everywhere), (unseen, predicted), (unseen, everywhere)):
        loss, _, gradients = judged(b, p)
        assert torch.isfinite(loss)
        assert all(torch.isfinite(x).all() for x in gradients.values())


# Complexes of thousands of residues


def test_computing_pairs_in_blocks_changes_nothing(generator, monkeypatch):
    batch, predicted = complex_of(generator)
    predicted["translation"] *= 0.1  # clashes everywhere
    whole = judged(batch, predicted)
    monkeypatch.setattr(tensors, "PAIRS", 300)
    torch.testing.assert_close(judged(batch, predicted), whole, **CLOSE)


class Largest(TorchDispatchMode):
    """Record the number of elements of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))])
        return result


def test_no_more_than_a_block_of_pairs_is_in_memory(generator, monkeypatch):
    """This holds forward and backward, so that 5,000 residues with 4.9e9 pairs of atoms fit."""
    batch, predicted = complex_of(generator)
    structure = output_of(batch["aatype"], predicted).structure
    batch, exists = with_truth(batch, structure.final_atom37), batch["atom14_atom_exists"]
    atom14 = structure.final_atom14.requires_grad_()
    monkeypatch.setattr(tensors, "PAIRS", 8000)
    with Largest() as largest:
        clashes = clash_violations(atom14, exists, batch["aatype"], batch["residue_index"], batch["asym_id"])
        fape = renamed_sidechain_fape(structure.sidechain_frames[-1], atom14, batch)
        torch.autograd.grad(clashes.mean_loss + fape, atom14)
    assert largest.numel <= 8000 < 8 * 14 * len(exists) ** 2 / 4


# Centres of mass


def spheres(*centres: float) -> tuple[Tensor, Tensor]:
    """Build chains of four residues around points on a line, and their chain numbers."""
    corners = torch.tensor([[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]], dtype=torch.float64)
    points = [corners + torch.tensor([x, 0.0, 0.0]) for x in centres]
    return torch.cat(points), torch.arange(1, len(centres) + 1).repeat_interleave(4)


@pytest.mark.parametrize(("apart", "expected"), [(20.0, 0.0), (99.0, 0.0), (16.0, 0.0), (11.0, 5**2), (0.0, 16**2)])
def test_chains_that_come_too_near_are_pushed_apart(apart, expected):
    true, chain = spheres(0.0, 20.0)
    ca, _ = spheres(0.0, apart)
    found = center_of_mass_loss(ca, true, torch.ones(8), chain)
    assert float(found) == pytest.approx(expected / 400, rel=1e-5)  # 1e-5 angstrom is the least distance


def test_the_mean_is_over_pairs_of_chains_that_were_seen():
    true, chain = spheres(0.0, 20.0, 40.0, 60.0)
    ca, _ = spheres(0.0, 10.0, 40.0, 60.0)
    mask = (chain != 4).double()
    found = center_of_mass_loss(ca, true, mask, 7 * chain)  # numbers may have gaps, as in a crop of many chains
    assert float(found) == pytest.approx((6 / 20) ** 2 / 3, rel=1e-5)
    one = center_of_mass_loss(ca.requires_grad_(), true, (chain == 1).double(), chain)
    assert one == 0


# Violations


def two_chains_in_one_place(index: Tensor) -> tuple[Tensor, ...]:
    """Build two strands 1 angstrom apart, as arguments of the functions."""
    batch = example("GAS", dtype=torch.float64).batch
    positions = torch.cat([batch["atom14_gt_positions"], batch["atom14_gt_positions"] + torch.tensor([0.0, 0.0, 1.0])])
    return positions, batch["atom14_atom_exists"].tile(2, 1), batch["aatype"].tile(2), index


def test_equal_numbers_hide_clashes_between_chains_unless_every_pair_is_asked_for():
    arguments = two_chains_in_one_place(torch.arange(3).tile(2))
    chain = torch.tensor([1, 1, 1, 2, 2, 2])
    official, every = (clash_violations(*arguments, chain, every_pair=every) for every in (False, True))
    assert official.per_atom_loss.sum() > 0  # residues 1 and 2 of different chains are compared, 1 and 1 are not
    assert every.per_atom_loss.sum() > 1.5 * official.per_atom_loss.sum()
    assert (every.per_atom_pairs >= official.per_atom_pairs).all()
    apart = two_chains_in_one_place(torch.arange(6))  # no equal indices
    official, every = (clash_violations(*apart, chain, every_pair=every) for every in (False, True))
    assert torch.equal(every.per_atom_loss, official.per_atom_loss)


def test_no_bond_leads_from_chain_to_chain():
    positions, exists, aatype, _ = two_chains_in_one_place(torch.arange(3).tile(2))
    index = torch.arange(6)  # a crop may leave consecutive indices
    assert connection_violations(positions, exists, aatype, index).loss > 0
    assert connection_violations(positions, exists, aatype, index, asym_id=torch.tensor([1, 1, 1, 2, 2, 2])).loss == 0


def test_averaged_clashes_do_not_grow_with_the_protein():
    """With all atoms at one position, the mean error of an atom is that of one pair."""
    found = {}
    for length in (4, 16):
        exists = example("A" * length).batch["atom14_atom_exists"]
        batch = example("A" * length).batch
        violations = find_violations(
            torch.zeros(length, 14, 3), exists, batch["aatype"], torch.arange(length), torch.ones(length)
        )
        found[length] = (
            violations.loss - violations.connections.loss,
            (violations.averaged_loss - violations.connections.loss),
        )
    assert found[16][0] > 3 * found[4][0]
    assert found[16][1] < 1.5 * found[4][1] < 5  # angstrom: radii of at most 1.8, twice
