"""Training on complexes: which entries a model is trained on, what is measured, and that a run can be continued."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.run.runs import equal_tensors, helix, make_store, rows, tiny_run
from warpfold.data.example.assembly import Assembly
from warpfold.data.store.store import ASSEMBLIES, Store, StoreWriter, pack_record
from warpfold.data.store.stored_assembly import pack_assembly, read_assembly
from warpfold.data.store.stored_example import StoredExample, example_arrays, example_notes
from warpfold.errors import UserError
from warpfold.model.embed import MultimerConfig
from warpfold.model.losses import ca_lddt
from warpfold.run.config import RunConfig
from warpfold.run.examples import hold_out, leading_part
from warpfold.run.results import validation_row
from warpfold.run.train import train

ASIDE = np.eye(3, 4)[None] + np.array([[[0, 0, 0, 0]] * 3, [[0, 0, 0, 9.0]] + [[0, 0, 0, 0]] * 2])  # 9 angstrom


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Six helices, and pairs of them side by side: of equal ones, and of different ones."""
    path = tmp_path_factory.mktemp("complexes") / "store"
    with StoreWriter(path, version=ASSEMBLIES) as writer:
        for i in range(6):
            raw = helix(f"helix{i}", 10 + i, seed=i)
            meta = {"length": raw.length, "depth": raw.depth, "cluster": str(i), "chains": None}
            writer.add(raw.name, pack_record(example_arrays(raw), example_notes(raw)), meta)
        for i in range(6):
            keys = [f"helix{i}", f"helix{i}" if i % 2 else f"helix{(i + 1) % 6}"]
            entities = [1, 1] if i % 2 else [1, 2]
            record = pack_assembly(f"pair{i}", ("A", "B"), keys, entities, ASIDE, resolution=1.0)
            writer.add(f"pair{i}", record, {"length": 22, "depth": 6, "cluster": None, "chains": keys})
        writer.finish()
    return Store(path)


def multimer_run(**changes) -> RunConfig:
    """`tiny_run` as a multimer."""
    run = tiny_run(**({"steps": 4, "validation": ("pair1", "pair4"), "validate_every": 2} | changes))
    heads = dataclasses.replace(run.model.heads, msa_classes=22)
    structure = dataclasses.replace(run.model.structure, scalar_bias=False, position_scale=20.0)
    evoformer = dataclasses.replace(run.model.evoformer, outer="first")
    model = dataclasses.replace(
        run.model, multimer=MultimerConfig(), heads=heads, structure=structure, evoformer=evoformer
    )
    data = dataclasses.replace(run.data, crop=20, max_templates=0)
    loss = dataclasses.replace(
        run.loss, center_of_mass=1.0, violation=0.03, average_clashes=True, fape_softening=0.0, bonds="multimer"
    )
    return dataclasses.replace(run, model=model, data=data, loss=loss)


@pytest.fixture(scope="module")
def unbroken(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("complexes") / "run"
    train(multimer_run(), store, out)
    return out


def test_a_multimer_is_trained_on_assemblies(unbroken: Path) -> None:
    steps = [row for row in rows(unbroken) if row["kind"] == "step"]
    assert {name for row in steps for name in row["examples"]} <= {f"pair{i}" for i in (0, 2, 3, 5)}
    assert all(max(row["lengths"]) <= 20 for row in steps)
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in steps)
    assert {"fape", "interface_fape", "center_of_mass", "violation"} <= set(steps[0]["terms"])


def test_complexes_are_validated_between_their_chains_too(unbroken: Path) -> None:
    found = [row for row in rows(unbroken) if row["kind"] == "validation"]
    assert [row["step"] for row in found] == [0, 2, 4]
    for row in found:
        assert set(row["interfaces"]) == set(row["examples"]) == {"pair1", "pair4"}
        assert row["interface_lddt"] == pytest.approx(np.mean(list(row["interfaces"].values())))
        assert 0 <= row["interface_lddt"] <= 1


def test_a_run_on_complexes_can_be_continued(store: Store, unbroken: Path, tmp_path: Path) -> None:
    train(multimer_run(steps=2), store, tmp_path / "run")
    train(multimer_run(), store, tmp_path / "run")
    assert equal_tensors(unbroken / "params.safetensors", tmp_path / "run" / "params.safetensors")


def test_a_monomer_is_trained_on_the_chains_and_a_multimer_on_chains_if_there_is_nothing_else(
    store: Store, tmp_path: Path
) -> None:
    (source,), held_out = hold_out(store, tiny_run(validation=("helix0",)))
    assert sorted(source.keys) == [f"helix{i}" for i in range(1, 6)]
    assert [key for _, key in held_out] == ["helix0"]
    chains = make_store(tmp_path / "chains", 3)
    run = multimer_run(steps=1, validation=("helix2",))
    (source,), _ = hold_out(chains, run)
    assert sorted(source.keys) == ["helix0", "helix1"]
    train(run, chains, tmp_path / "run")
    step = next(row for row in rows(tmp_path / "run") if row["kind"] == "step")
    assert step["terms"]["interface_fape"] == step["terms"]["center_of_mass"] == 0
    validation = next(row for row in rows(tmp_path / "run") if row["kind"] == "validation")
    assert "interface_lddt" not in validation


def test_a_share_is_held_out_of_the_assemblies(store: Store) -> None:
    (source,), held_out = hold_out(store, multimer_run(validation=0.3))
    assert {*source.keys, *(key for _, key in held_out)} <= {f"pair{i}" for i in range(6)}
    assert held_out


def test_a_monomer_is_not_validated_on_an_assembly(store: Store) -> None:
    with pytest.raises(UserError, match="pair1 is an assembly"):
        hold_out(store, tiny_run(validation=("helix1", "pair1")))


def test_validation_takes_whole_chains_as_far_as_they_go(store: Store) -> None:
    pair = read_assembly(store, "pair1")  # of 11 residues each
    assert [part.length for part in (leading_part(pair, n) for n in (5, 11, 21, 22, 99))] == [5, 11, 11, 22, 22]
    part = leading_part(pair, 21)
    assert isinstance(part, Assembly)
    assert part.ids == ("A",)
    assert part.operators is not None
    assert len(part.operators) == 1
    assert leading_part(StoredExample(store, "helix3"), 7).length == 7


def test_what_keeps_chains_apart_needs_a_multimer() -> None:
    run = multimer_run()
    with pytest.raises(ValueError, match="leave it out"):
        dataclasses.replace(run, model=dataclasses.replace(run.model, multimer=None))


def test_lddt_between_chains_is_of_pairs_of_different_chains() -> None:
    truth = torch.randn(8, 37, 3, generator=torch.Generator().manual_seed(0))
    moved = truth + torch.tensor([1, 1, 1, 1, 0, 0, 0, 0])[:, None, None] * 1.5
    batch = {"all_atom_positions": truth, "all_atom_mask": torch.ones(8, 37), "aatype": torch.zeros(8).long()}
    output = dataclasses.make_dataclass("Output", ["structure"])(
        dataclasses.make_dataclass("Structure", ["final_atom37"])(moved)
    )
    assert math.isnan(float(ca_lddt(output, batch, between=True)))
    batch["asym_id"] = torch.tensor([1, 1, 1, 1, 2, 2, 2, 2])
    between, all_pairs = (float(ca_lddt(output, batch, which)) for which in (True, False))
    assert between < 1
    assert all_pairs == pytest.approx((32 * between + 24) / 56)  # the pairs within the chains did not move


def test_a_row_has_interfaces_if_any_example_has() -> None:
    row = validation_row(3, {"a": 0.5, "b": 0.7}, {"a": math.nan, "b": 0.2})
    assert (row["interface_lddt"], row["interfaces"]) == (0.2, {"b": 0.2})
    assert "interface_lddt" not in validation_row(3, {"a": 0.5}, {"a": math.nan})
