"""Losses: zero for perfect predictions, invariant under rigid motions, independent of masked entries, never NaN."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from tests.launches import Launches
from tests.model.proteins import example, random_frames, random_motion
from warpfold.geometry.rigid import Rigid
from warpfold.model import losses
from warpfold.model.heads import distogram_breaks
from warpfold.model.losses import CA_ATOM, LossConfig, backbone_fape, frame_aligned_point_error, lddt, total_loss
from warpfold.ops.pairs import aligned_errors, overlaps

EVERYTHING = LossConfig(violation=1.0, experimentally_resolved=0.01, predicted_aligned_error=0.1)
FLOOR = 1e-3  # the least FAPE: sqrt(1e-4) angstrom over the scale of 10


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def scene(generator, frames=6, points=9):
    """Draw predicted and true frames, points and masks in fp64."""
    predicted, true = random_frames(generator, frames), random_frames(generator, frames)
    x, true_x = (5 * torch.randn(points, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    return predicted, x, true, true_x, torch.ones(frames), torch.ones(points)


# FAPE


@pytest.mark.parametrize("clamp", [10.0, None])
def test_fape_does_not_see_rigid_motions_of_either_structure(generator, clamp):
    frames, x, true_frames, true_x, *masks = scene(generator)
    fape = frame_aligned_point_error(frames, x, true_frames, true_x, *masks, clamp)
    motion, other = random_motion(generator), random_motion(generator)
    moved = frame_aligned_point_error(
        motion[None].compose(frames),
        motion.apply(x),
        other[None].compose(true_frames),
        other.apply(true_x),
        *masks,
        clamp,
    )
    torch.testing.assert_close(fape, moved)


def test_fape_tells_a_mirror_image(generator):
    frames = random_frames(generator, 8)
    x = frames.translation
    mirror = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    flip = torch.diag(mirror)
    mirrored = Rigid(flip @ frames.rotation @ flip, x * mirror)
    distances, mirrored_distances = torch.cdist(x, x), torch.cdist(x * mirror, x * mirror)
    torch.testing.assert_close(distances, mirrored_distances)
    assert backbone_fape(mirrored, frames, torch.ones(8)) > 0.1


def test_fape_is_clamped_at_one_by_default_and_by_its_share(generator):
    frames, x, true_frames, true_x, *masks = scene(generator)
    far = x + torch.tensor([1000.0, 0.0, 0.0])
    arguments = (frames, far, true_frames, true_x, *masks)
    clamped = frame_aligned_point_error(*arguments)
    assert clamped == pytest.approx(1.0, rel=1e-3)
    free = frame_aligned_point_error(*arguments, clamp=None)
    assert free == pytest.approx(100, rel=0.05)
    half = frame_aligned_point_error(*arguments, clamped=torch.tensor(0.5))
    torch.testing.assert_close(half, (clamped + free) / 2)


def test_masked_frames_and_points_do_not_matter(generator):
    frames, x, true_frames, true_x, frame_mask, point_mask = scene(generator)
    frame_mask[2:4] = 0
    point_mask[5:] = 0
    fape = frame_aligned_point_error(frames, x, true_frames, true_x, frame_mask, point_mask)
    keep, kept = frame_mask > 0, point_mask > 0
    few = frame_aligned_point_error(
        frames[keep], x[kept], true_frames[keep], true_x[kept], frame_mask[keep], point_mask[kept]
    )
    torch.testing.assert_close(fape, few)


# lDDT


def test_lddt_looks_within_15_angstrom_of_the_truth_and_at_unmasked_atoms():
    line = torch.tensor([[0.0, 0.0, 0.0], [4.0, 0.0, 0.0], [30.0, 0.0, 0.0]])
    moved = line.clone()
    moved[2] += 100
    assert lddt(moved, line, torch.ones(3)) == 1
    moved[1] += 100
    assert lddt(moved, line, torch.tensor([1.0, 0.0, 1.0])) == 1
    torch.testing.assert_close(lddt(moved, line, torch.ones(3), per_residue=True), torch.tensor([0.0, 0.0, 1.0]))


# The other terms


def test_only_masked_msa_places_count():
    logits, target = torch.randn(2, 3, 22), torch.zeros(2, 3, dtype=torch.long)
    one = torch.zeros(2, 3)
    one[1, 2] = 1
    expected = -logits[1, 2].log_softmax(-1)[0]
    torch.testing.assert_close(losses.masked_msa_loss(logits, target, one), expected)
    assert losses.masked_msa_loss(logits, target, torch.zeros(2, 3)) == 0


def test_distances_fall_into_their_bins():
    beta = torch.tensor([[0.0, 0.0, 0.0], [2.5, 0.0, 0.0], [100.0, 0.0, 0.0]])
    bins = torch.tensor([[0, 1, 63], [1, 0, 63], [63, 63, 0]])
    logits = 100.0 * torch.nn.functional.one_hot(bins, 64)
    assert losses.distogram_loss(logits, distogram_breaks(), beta, torch.ones(3)) < 1e-6


def test_plddt_is_taught_the_true_lddt_in_the_last_bin_when_perfect():
    x = torch.randn(6, 3)
    logits = torch.zeros(6, 50)
    logits[:, 49] = 100
    assert losses.plddt_loss(logits, x, x, torch.ones(6)) < 1e-6


def test_the_aligned_error_of_a_residue_alone_is_in_the_bin_above_zero():
    e = example("G")
    terms = {}
    for bin in (0, 1):
        e.output.pae_logits = 100.0 * torch.nn.functional.one_hot(torch.tensor([[bin]]), 64)
        terms[bin] = total_loss(e.output, e.batch, EVERYTHING)[1]["predicted_aligned_error"]
    assert terms[1] < 1e-6
    assert terms[0] > 99


def test_a_chi_may_be_turned_by_pi_only_where_it_looks_the_same():
    aatype = torch.tensor([3, 2])  # aspartate's chi2 is symmetric, asparagine's is not
    chi = torch.tensor([[0.3, 0.5, 0.0, 0.0], [0.3, 0.5, 0.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 2)

    def error(turn):
        torsion = torch.cat([torch.zeros(2, 3), chi + torch.tensor(turn)], -1)
        angles = torch.stack([torsion.sin(), torsion.cos()], -1)[None]
        return [
            float(losses.torsion_angle_loss(angles, angles, chi, mask * m, aatype, torch.ones(2))[0])
            for m in torch.eye(2)[..., None]
        ]

    assert error([0.0, 0.0, 0.0, 0.0]) == pytest.approx([0, 0], abs=1e-6)
    assert error([0.0, math.pi, 0.0, 0.0]) == pytest.approx([0, 2], abs=1e-6)  # (4 + 0) / 2
    assert error([math.pi, 0.0, 0.0, 0.0]) == pytest.approx([2, 2], abs=1e-6)


# All together


def test_a_perfect_prediction_has_no_loss_in_the_structure():
    e = example("GASDFKYE", dtype=torch.float64)
    terms = losses.structure_loss(e.output.structure, e.batch, EVERYTHING)
    assert terms["fape"] == pytest.approx(FLOOR, rel=1e-2)
    assert terms["sidechain_fape"] == pytest.approx(FLOOR, rel=1e-2)
    assert terms["chi_loss"] + terms["angle_norm_loss"] + terms["violation"] < 1e-5


def test_the_total_is_the_weighted_sum_and_a_weight_of_0_drops_the_term():
    e = example()
    total, terms = total_loss(e.output, e.batch, EVERYTHING)
    weights = {name: getattr(EVERYTHING, name) for name in losses.WEIGHTED}
    torch.testing.assert_close(total, sum(weight * terms[name] for name, weight in weights.items()))
    parts = {"fape", "sidechain_fape", "chi_loss", "angle_norm_loss", "violation"}
    assert set(terms) == set(weights) | parts

    only = dataclasses.replace(LossConfig(), **dict.fromkeys(losses.WEIGHTED, 0.0) | {"distogram": 0.3})
    total, terms = total_loss(e.output, {k: e.batch[k] for k in ("pseudo_beta", "pseudo_beta_mask")}, only)
    assert set(terms) == {"distogram"}
    torch.testing.assert_close(total, 0.3 * terms["distogram"])


def test_nothing_to_learn_is_refused():
    with pytest.raises(ValueError, match="not all may be 0"):
        LossConfig(**dict.fromkeys(losses.WEIGHTED, 0.0))
    with pytest.raises(ValueError, match="negative"):
        LossConfig(distogram=-1.0)


def test_scaling_by_length():
    e = example("GASDFKYE" * 2)
    plain, _ = total_loss(e.output, e.batch, LossConfig())
    scaled, _ = total_loss(e.output, e.batch, LossConfig(scale_by_length=True))
    torch.testing.assert_close(scaled, 4 * plain)


@pytest.mark.parametrize("resolution", [0.0, 3.1, 9.0])
def test_confidence_learns_from_good_structures_only(resolution):
    e = example()
    _, good = total_loss(e.output, e.batch, EVERYTHING)
    _, terms = total_loss(e.output, e.batch | {"resolution": torch.tensor(resolution)}, EVERYTHING)
    for name in ("plddt", "experimentally_resolved", "predicted_aligned_error"):
        assert good[name] > 0
        assert terms[name] == 0
    assert terms["distogram"] == good["distogram"]


def test_the_pass_decides_which_msa_is_right():
    e = example()
    msa = e.batch["true_msa"]
    batch = e.batch | {
        "true_msa": torch.cat([(msa + 1) % 20, msa]),
        "bert_mask": e.batch["bert_mask"].expand(2, -1, -1),
    }
    _, expected = total_loss(e.output, e.batch, LossConfig())
    _, last = total_loss(e.output, batch, LossConfig())
    _, first = total_loss(e.output, batch, LossConfig(), pass_index=0)
    assert last["masked_msa"] == expected["masked_msa"] != first["masked_msa"]


def test_labels_of_what_was_not_resolved_do_not_matter():
    e = example()
    batch = dict(e.batch)
    unseen = torch.zeros(len(batch["aatype"]), dtype=torch.bool)
    unseen[[2, 5]] = True
    masks = ["all_atom_mask", "pseudo_beta_mask", "backbone_affine_mask", "rigidgroups_gt_exists", "chi_mask"]
    masks += ["atom14_gt_exists", "atom14_alt_gt_exists"]
    for name in masks:
        batch[name] = batch[name] * ~unseen.view(-1, *(1,) * (batch[name].dim() - 1))
    garbage = dict(batch)
    for name in ["all_atom_positions", "pseudo_beta", "atom14_gt_positions", "atom14_alt_gt_positions", "chi_angles"]:
        hidden = unseen.view(-1, *(1,) * (batch[name].dim() - 1))
        garbage[name] = torch.where(hidden, 50 * torch.randn_like(batch[name]), batch[name])
    torch.testing.assert_close(total_loss(e.output, garbage, EVERYTHING), total_loss(e.output, batch, EVERYTHING))


def leaves(output):
    """Copy the tensors of an output to leaves that require gradients, and rebuild the output from them."""
    found = []

    def leaf(x):
        found.append(x.detach().clone().requires_grad_())
        return found[-1]

    def walk(x):
        if torch.is_tensor(x):
            return leaf(x)
        if isinstance(x, Rigid):
            return Rigid(leaf(x.rotation), leaf(x.translation))
        return type(x)(**{name: walk(value) for name, value in vars(x).items()})

    return walk(output), found


def test_losses_launch_half_of_what_they_did(monkeypatch):
    """The losses of fine-tuning were 552 operations forward and 557 backward. An operation of ours counts as two."""
    for op in (aligned_errors, overlaps):
        monkeypatch.setattr(op, "prefer_definition", None)  # it is, for so few residues
    e = example()
    output, _ = leaves(e.output)
    total_loss(output, e.batch, EVERYTHING)  # tables are cached at the first call
    with Launches() as forward:
        total, _ = total_loss(output, e.batch, EVERYTHING)
    with Launches() as backward:
        total.backward()
    assert {name: forward.operations[f"warpfold::{name}"] for name in ("aligned_errors", "overlaps")} == {
        "aligned_errors": 2,
        "overlaps": 1,
    }
    assert forward.count + backward.count + 6 < (552 + 557) / 2


@pytest.mark.parametrize("sequence", ["G", "K", "GASDFKYE"])
@pytest.mark.parametrize("labels", ["all", "none"])
@pytest.mark.parametrize("prediction", ["perfect", "collapsed"])
def test_gradients_are_finite_in_degenerate_cases(sequence, labels, prediction):
    e = example(sequence)
    if labels == "none":
        e.batch |= {
            name: 0 * x for name, x in e.batch.items() if "mask" in name or "exists" in name or "affine" in name
        }
    output, tensors = leaves(e.output)
    if prediction == "collapsed":  # all atoms at one position, all angles zero
        with torch.no_grad():
            for x in tensors:
                x.zero_()
    total, terms = total_loss(output, e.batch, EVERYTHING)
    total.backward()
    assert all(torch.isfinite(x).all() for x in (total, *terms.values()))
    gradients = [x.grad for x in tensors if x.grad is not None]
    assert len(gradients) >= 8
    assert all(torch.isfinite(g).all() for g in gradients)


def test_a_wanted_head_that_is_missing_is_named():
    e = example()
    e.output.pae_logits = None
    with pytest.raises(ValueError, match="predicted_aligned_error"):
        total_loss(e.output, e.batch, EVERYTHING)


@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_the_lddt_of_a_training_step_is_the_one_that_is_defined(noise: float) -> None:
    """Some resolved CA are beyond the radius of each other, and the unresolved CA are anywhere."""
    truth = 8 * torch.randn(20, 37, 3)
    mask = (torch.rand(20, 37) > 0.3).float()
    moved = torch.where(mask[..., None] > 0, truth + noise * torch.randn(20, 37, 3), 0)
    output = SimpleNamespace(structure=SimpleNamespace(final_atom37=moved))
    batch = {"all_atom_positions": truth, "all_atom_mask": mask}
    expected = lddt(moved[:, CA_ATOM], truth[:, CA_ATOM], mask[:, CA_ATOM])
    assert 0.2 < expected < 1 or not noise
    found = losses.ca_lddt(output, batch)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, check_dtype=False)
