"""Test the pairing of residues, by number or by alignment if the numbers are shifted, and the pairing of chains."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import warpfold
from tests.data.entries import random_chain
from warpfold.data.structure.chain import Chain, Structure
from warpfold.data.structure.write import write_pdb
from warpfold.errors import UserError
from warpfold.scoring.score import score

LETTERS = "ARNDCQEGHILKMFPSTWYV"


def structure(*chains: Chain) -> Structure:
    return Structure("x", None, None, None, {chain.id: chain for chain in chains})


@given(st.integers(50, 120), st.integers(20, 100), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_a_redesigned_sequence_is_paired_by_its_numbers(length: int, identity: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    original = "".join(rng.choice(list(LETTERS), length))
    changed = rng.permutation(length)[: length - length * identity // 100]
    letters = list(original)
    for i in changed:
        letters[i] = rng.choice([x for x in LETTERS if x != letters[i]])
    truth = random_chain("A", original, seed)
    found = score(structure(replace(truth, sequence="".join(letters))), structure(truth))
    assert found.paired == length
    assert found.rmsd < 1e-3


@given(st.integers(40, 120), st.integers(1, 20), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_the_same_sequence_numbered_otherwise_is_aligned(length: int, offset: int, seed: int) -> None:
    sequence = "".join(np.random.default_rng(seed).choice(list(LETTERS), length))
    truth = random_chain("A", sequence, seed)
    shifted = replace(truth, author_numbers=tuple(str(int(number) + offset) for number in truth.author_numbers))
    found = score(structure(shifted), structure(truth))
    assert found.paired == length
    assert found.rmsd < 1e-3


def test_unlike_chains_are_refused_with_the_option_that_compares_them() -> None:
    a, b = random_chain("A", "AAAAAAAAAA" * 4), random_chain("B", "WWWWWWWWWW" * 4)
    with pytest.raises(UserError, match="--chains A:B"):
        score(structure(a), structure(b))
    assert score(structure(a), structure(b), {"A": "B"}).paired == 40


@pytest.fixture
def antibody(tmp_path: Path) -> tuple[Path, Path]:
    """Write an antigen A between a heavy and a light chain, and a model in which the light chain is moved away."""
    rng = np.random.default_rng(3)
    sequences = {name: "".join(rng.choice(list(LETTERS), n)) for name, n in (("A", 40), ("H", 30), ("L", 30))}
    chains = {name: random_chain(name, sequence, i) for i, (name, sequence) in enumerate(sequences.items())}
    moved = chains["L"].positions + np.float32(60) * (chains["L"].mask[..., None] > 0)
    model = [
        replace(chains["A"], id="X"),
        replace(chains["L"], id="Y", positions=moved.astype(np.float32)),
        replace(chains["H"], id="Z"),
    ]
    for name, written in (("truth", [*chains.values()]), ("model", model)):
        (tmp_path / f"{name}.pdb").write_text(write_pdb(name, written))
    return tmp_path / "model.pdb", tmp_path / "truth.pdb"


def test_partners_have_one_interface(antibody: tuple[Path, Path]) -> None:
    model, truth = antibody
    alone = warpfold.score(truth, truth, chains="A:HL").complex
    assert alone is not None
    (interface,) = alone.interfaces
    assert (interface.chains, interface.predicted, interface.dockq) == (("A", "H+L"), ("A", "H+L"), 1.0)
    found = warpfold.score(model, truth, chains="A:HL").complex
    assert found is not None
    (interface,) = found.interfaces
    assert interface.chains == ("A", "H+L")
    assert interface.predicted == ("X", "Z+Y")
    each = {one.chains: one for one in warpfold.score(model, truth).complex.interfaces}  # type: ignore[union-attr]
    # The contacts of both chains are added.
    both = [each["A", "H"], each["A", "L"]]
    assert interface.contacts == sum(one.contacts for one in both)
    assert interface.fnat == pytest.approx(sum(one.fnat * one.contacts for one in both) / interface.contacts)


def test_partners_in_evaluate(antibody: tuple[Path, Path]) -> None:
    model, truth = antibody
    for folder, path in (("predictions", model), ("truth", truth)):
        (path.parent / folder).mkdir()
        (path.parent / folder / "complex.pdb").write_text(path.read_text())
    found = warpfold.evaluate(model.parent / "predictions", truth.parent / "truth", chains="A:HL")
    (row,) = found["sets"][0]["rows"]
    assert [interface["chains"] for interface in row["interfaces"]] == [("A", "H+L")]


def test_a_chain_in_both_partners_is_refused(antibody: tuple[Path, Path]) -> None:
    with pytest.raises(UserError, match="chain H is named twice"):
        warpfold.score(*antibody, chains="H:HL")
