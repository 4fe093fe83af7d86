"""Violations: none in an ideal chain, each kind where it was introduced, and correct gradients."""

import pytest
import torch

from tests.model.proteins import encode, example
from warpfold.model.violations import (
    C_ATOM,
    clash_violations,
    connection_violations,
    find_violations,
    within_residue_violations,
)

SEQUENCE = "GASDFKYE"


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def chain():
    """Build (atoms, atom_mask, aatype, residue_index) of an ideal strand."""
    batch = example(SEQUENCE).batch
    return batch["atom14_gt_positions"], batch["atom14_atom_exists"], batch["aatype"], batch["residue_index"]


def test_an_ideal_chain_has_no_violations(chain):
    found = find_violations(*chain)
    assert found.loss == 0
    assert not found.per_residue_mask.any()


def test_a_broken_peptide_bond_is_found_at_both_residues_and_nowhere_else(chain):
    atoms, atom_mask, aatype, index = chain
    atoms = atoms.clone()
    atoms[4:] += torch.tensor([30.0, 0.0, 0.0])
    found = find_violations(atoms, atom_mask, aatype, index)
    assert found.per_residue_mask.nonzero().flatten().tolist() == [3, 4]
    assert found.connections.c_n_loss > 1
    assert found.clashes.per_atom_loss.sum() == found.within.per_atom_loss.sum() == 0
    # no bond across a gap in the sequence
    index = index.clone()
    index[4:] += 5
    assert connection_violations(atoms, atom_mask, aatype, index).loss == 0


def test_a_bond_may_be_longer_before_a_proline(chain):
    atoms, atom_mask, _, index = (x[:2].clone() for x in chain)
    c, n = atoms[0, C_ATOM].clone(), atoms[1, 0].clone()
    atoms[1] += (n - c) / (n - c).norm() * 0.19  # 1.519 angstrom: allowed up to 1.533 before proline, 1.497 else
    length = {
        letter: connection_violations(atoms, atom_mask, encode("G" + letter), index, 12.0).c_n_loss for letter in "AP"
    }
    assert length["A"] > 0.01
    assert length["P"] == 0


def test_a_clash_counts_at_both_atoms_by_its_overlap(chain):
    atoms, atom_mask, aatype, index = chain
    atoms = atoms.clone()
    atoms[5, 8] = atoms[1, 4] + torch.tensor([0.0, 0.0, 1.0])  # lysine's NZ to alanine's CB
    found = clash_violations(atoms, atom_mask, aatype, index)
    overlap = 1.55 + 1.7 - 1.5 - 1.0
    torch.testing.assert_close(found.per_atom_loss[1, 4], torch.tensor(overlap), rtol=1e-4, atol=1e-4)
    assert found.per_atom_mask[5, 8] == found.per_atom_mask[1, 4] == 1
    assert found.per_atom_loss[5, 8] >= found.per_atom_loss[1, 4]


def test_the_peptide_bond_and_a_disulfide_are_no_clashes():
    atoms = torch.zeros(2, 14, 3)
    atoms[:, 5] = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])  # 1 angstrom, where 2.1 is allowed
    mask = torch.zeros(2, 14)
    mask[:, 5] = 1
    assert clash_violations(atoms, mask, encode("CC"), torch.tensor([0, 9])).mean_loss == 0
    atoms, mask = atoms.roll((-3, 0), (1, 2)), mask.roll(-3, 1)  # now at the position of C
    assert clash_violations(atoms, mask, encode("CC"), torch.tensor([0, 9])).mean_loss > 0
    bond, bond_mask = torch.zeros(2, 14, 3), torch.zeros(2, 14)
    bond[1, 0, 0] = 1.0
    bond_mask[0, C_ATOM] = bond_mask[1, 0] = 1
    chains = torch.tensor([1, 2])
    assert clash_violations(bond, bond_mask, encode("GG"), torch.arange(2)).mean_loss == 0
    assert clash_violations(bond, bond_mask, encode("GG"), torch.arange(2), chains).mean_loss > 0


def test_a_distorted_side_chain_is_found(chain):
    atoms, atom_mask, aatype, _ = chain
    atoms = atoms.clone()
    assert within_residue_violations(atoms, atom_mask, aatype).mean_loss == 0
    atoms[4, 10] += 1.0  # phenylalanine's CZ
    found = within_residue_violations(atoms, atom_mask, aatype)
    assert found.per_atom_mask[4, 10] == 1
    assert not found.per_atom_mask[[0, 1, 2, 3, 5, 6, 7]].any()
