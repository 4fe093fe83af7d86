"""AlphaFold-Multimer: the effects of chains, entities, copies and templates, and the end of recycling."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers import (
    as_multimer,
    filled_model,
    random_complex,
    tiny_config,
    tiny_multimer,
)
from warpfold.batch import FEATURES, Batch
from warpfold.geometry.rigid import Rigid
from warpfold.model.alphafold import AlphaFold, Output, distance_change
from warpfold.model.embed import ChainRelativePosition
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan

CHAINS = (4, 3, 4)
CLOSE = {"rtol": 0.0, "atol": 1e-9}  # fp64, for numbers of some 10


def double(batch: Batch) -> Batch:
    return {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}


@torch.no_grad()
def folded(model: AlphaFold, batch: Batch, recycles: int | None = None) -> Output:
    """Fold in fp64."""
    output: Output = Execution(Plan(precision="fp64")).bind(model).eval()(double(batch), recycles)
    return output


def per_residue(output: Output) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return outputs with the axis of residues in front: single, atoms, pairs, and masked-MSA logits."""
    return output.single, output.structure.final_atom14, output.pae_logits, output.masked_msa_logits.transpose(0, 1)


# Relative positions


def one_hot_positions(position: ChainRelativePosition, batch: Batch) -> Tensor:
    """Compute the embedding as in the paper, by one-hot features times the weight."""
    asym, entity, sym, index = (batch[name] for name in ("asym_id", "entity_id", "sym_id", "residue_index"))
    rows = []
    for i in range(len(asym)):
        for j in range(len(asym)):
            offset = min(max(int(index[i] - index[j]), -32), 32) + 32 if asym[i] == asym[j] else 65
            copies = min(max(int(sym[i] - sym[j]), -2), 2) + 2 if entity[i] == entity[j] else 5
            parts = (F.one_hot(torch.tensor(offset), 66), (entity[i] == entity[j])[None])
            rows.append(torch.cat((*parts, F.one_hot(torch.tensor(copies), 6))))
    features = torch.stack(rows).to(position.linear.weight.dtype).unflatten(0, (len(asym), -1))
    return position.linear(features)


def test_positions_are_the_product_with_one_hot_features() -> None:
    torch.manual_seed(0)
    position = ChainRelativePosition(5).double()
    torch.nn.init.normal_(position.linear.bias)
    batch = {
        "asym_id": torch.tensor([1, 1, 1, 2, 2, 3, 4, 5, 6, 6, 0, 0]),
        "entity_id": torch.tensor([1, 1, 1, 2, 2, 1, 1, 1, 2, 2, 0, 0]),
        "sym_id": torch.tensor([1, 1, 1, 1, 1, 2, 3, 4, 2, 2, 0, 0]),
        "residue_index": torch.tensor([0, 1, 40, 4_999, 2**40, 0, 1, 2, 7, 3, 0, 0]),
    }
    found = position(batch)
    torch.testing.assert_close(found, one_hot_positions(position, batch), rtol=0, atol=1e-12)


def test_positions_of_many_chains_stay_in_the_table() -> None:
    """With 62 chains and large numbers, an index out of range would raise an error (on a GPU: abort)."""
    n = 620
    chain = torch.arange(n) * 62 // n + 1
    index = torch.arange(n) * 10_000_019 - 2**33
    batch = {"asym_id": chain, "entity_id": chain % 3 + 1, "sym_id": chain // 3 + 1, "residue_index": index}
    assert ChainRelativePosition(1)(batch).isfinite().all()


# Laws of the whole model


@pytest.mark.parametrize("fused", [True, False])
def test_the_place_of_a_residue_in_the_arrays_means_nothing(fused: bool) -> None:
    """Chains, copies and neighbours are defined by their numbers, so the order of residues does not matter."""
    model, batch = filled_model(as_multimer(tiny_config(), fused)), random_complex(CHAINS)
    order = torch.randperm(sum(CHAINS), generator=torch.Generator().manual_seed(1))
    shuffled = {}
    for name, x in batch.items():
        axes = FEATURES[name].axes
        shuffled[name] = x.index_select(axes.index("res") - len(axes), order) if "res" in axes else x
    a, b = per_residue(folded(model, batch)), per_residue(folded(model, shuffled))
    torch.testing.assert_close(a[0][order], b[0], **CLOSE)
    torch.testing.assert_close(a[1][order], b[1], **CLOSE)
    torch.testing.assert_close(a[2][order][:, order], b[2], **CLOSE)
    torch.testing.assert_close(a[3][order], b[3], **CLOSE)


def test_a_template_says_nothing_of_two_chains() -> None:
    """The relative position of a template's chains has no effect, but the fold of each chain has."""
    model, batch = tiny_multimer(), random_complex(CHAINS)
    motion = Rigid.from_quaternion7(torch.tensor([0.5, -0.5, 0.5, 0.5, 8.0, -3.0, 5.0]))

    def with_moved(moves: Tensor) -> Batch:
        changed = dict(batch)
        for name, where in (
            ("template_all_atom_positions", moves[:, None, None]),
            ("template_pseudo_beta", moves[:, None]),
        ):
            changed[name] = torch.where(where, motion.apply(batch[name]), batch[name])
        return changed

    expected = per_residue(folded(model, batch))
    for a, b in zip(per_residue(folded(model, with_moved(batch["asym_id"] == 2))), expected):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)  # atoms were moved in fp32
    inside = torch.arange(sum(CHAINS)) == 5
    assert not torch.allclose(per_residue(folded(model, with_moved(inside)))[2], expected[2], atol=1e-3)


def test_a_template_that_is_missing_counts_in_the_mean() -> None:
    """As in the official code, it has residue types but no atoms, and the mean is over all templates."""
    model, batch = tiny_multimer(), random_complex(CHAINS, templates=1)
    absent = {
        name: torch.cat((x, torch.zeros_like(x))) if name.startswith("template_") else x for name, x in batch.items()
    }
    assert not torch.allclose(folded(model, absent).pair, folded(model, batch).pair, atol=1e-3)


def test_a_batch_without_templates_folds() -> None:
    model, batch = tiny_multimer(), random_complex(CHAINS, templates=0)
    assert folded(model, batch).pair.isfinite().all()
    z = torch.randn(11, 11, 12).double()
    assert torch.equal(model.templates(z.clone(), torch.ones(11, 11).double(), double(batch)), z)


# The end of recycling


def test_the_change_of_distances_is_a_masked_root_mean_square() -> None:
    g = torch.Generator().manual_seed(0)
    before, after = (5 * torch.randn(6, 37, 3, generator=g).double() for _ in range(2))
    mask = torch.tensor([1, 1, 0, 1, 1, 0]).double()
    squares = []
    for i in range(6):
        for j in range(6):
            if mask[i] and mask[j]:
                a, b = ((x[i, 1] - x[j, 1]).norm() for x in (before, after))
                squares.append(float(a - b) ** 2)
    expected = (sum(squares) / len(squares) + 1e-8) ** 0.5
    assert float(distance_change(before, after, mask)) == pytest.approx(expected, rel=1e-9)
    moved = Rigid.from_quaternion7(torch.tensor([0.6, 0.8, 0, 0, 9, 9, 9]).double()).apply(before)
    assert float(distance_change(before, moved, mask)) == pytest.approx(1e-4, rel=1e-3)  # the root of 1e-8


def test_recycling_ends_when_a_pass_changes_little() -> None:
    batch, most = random_complex(CHAINS), 4
    free = tiny_multimer()
    positions = [torch.zeros(sum(CHAINS), 37, 3).double()]
    positions += [folded(free, batch, n).structure.final_atom37 for n in range(most)]
    changes = [float(distance_change(a, b, batch["seq_mask"].double())) for a, b in pairwise(positions)]
    assert folded(free, batch, most).recycles == most
    for tolerance in (*(1.001 * change for change in changes[1:3]), -1.0):
        # One more pass follows the first pass that changes the distances by at most the tolerance.
        settled = next((n for n, change in enumerate(changes, 1) if change <= tolerance), most)
        model = tiny_multimer(recycle_tolerance=tolerance)
        output = folded(model, batch, most)
        assert output.recycles == settled
        assert torch.equal(output.pair, folded(free, batch, settled).pair)
        assert folded(model, batch, 0).recycles == 0


def test_training_recycles_as_often_as_was_drawn() -> None:
    model, batch = tiny_multimer(recycle_tolerance=1e9), random_complex(CHAINS)
    assert model.train()(batch, 2).recycles == 2
    assert model.eval()(batch, 2).recycles == 1
