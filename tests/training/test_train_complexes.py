"""Test training on complexes: the choice of entries, the scores of validations, and resuming."""

import dataclasses
import gzip
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.runs import equal_tensors, helix, make_store, rows, steps, tiny_run
from warpfold.batch import to_tensors
from warpfold.data.example.raw_example import Assembly, from_sequence
from warpfold.data.features.crop import fixed_crop, near_other_chain, read_ca
from warpfold.data.load.order import Source
from warpfold.data.store.store import Store, StoreWriter, pack_record
from warpfold.data.store.stored_example import example_arrays, example_notes, pack_assembly, read_assembly
from warpfold.data.structure.mmcif import parse_structure
from warpfold.errors import UserError
from warpfold.model.embed import MultimerConfig
from warpfold.model.losses import ca_lddt
from warpfold.model.permutation import with_truth
from warpfold.training.config import RunConfig
from warpfold.training.examples import held_out_features, hold_out
from warpfold.training.train import train
from warpfold.training.validation import mean_dockq

REAL = (Path(__file__).parents[2] / "../shared/realdata/mmcif").resolve()
ASIDE = np.eye(3, 4)[None] + np.array([[[0, 0, 0, 0]] * 3, [[0, 0, 0, 9.0]] + [[0, 0, 0, 0]] * 2])  # 9 angstrom


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Make a store of six helices and of pairs of equal and different helices."""
    path = tmp_path_factory.mktemp("complexes") / "store"
    with StoreWriter(path) as writer:
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
    """Return the settings of `tiny_run` for a multimer."""
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
    found = steps(unbroken)
    assert {name for row in found for name in row["examples"]} <= {f"pair{i}" for i in (0, 2, 3, 5)}
    assert all(max(row["lengths"]) <= 20 for row in found)
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in found)
    assert {"fape", "interface_fape", "center_of_mass", "violation"} <= set(found[0]["terms"])


def test_complexes_are_validated_between_their_chains_too(unbroken: Path) -> None:
    found = rows(unbroken, kind="validation")
    assert [row["step"] for row in found] == [0, 2, 4]
    for row in found:
        assert set(row["interfaces"]) == set(row["examples"]) == {"pair1", "pair4"}
        assert row["interface_lddt"] == pytest.approx(np.mean(list(row["interfaces"].values())))
        assert 0 <= row["interface_lddt"] <= 1
        assert set(row["docked"]) == {"pair1", "pair4"}
        assert row["dockq"] == pytest.approx(np.mean(list(row["docked"].values())))
        assert math.isfinite(row["loss"])
        assert "cut" not in row
    step = steps(unbroken)[0]
    assert [set(row["terms"]) for row in found] == [set(step["terms"])] * 3


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
    step = steps(tmp_path / "run")[0]
    assert step["terms"]["interface_fape"] == step["terms"]["center_of_mass"] == 0
    validation = rows(tmp_path / "run", kind="validation")[0]
    assert "interface_lddt" not in validation


def test_a_share_is_held_out_of_the_assemblies(store: Store) -> None:
    (source,), held_out = hold_out(store, multimer_run(validation=0.3))
    assert {*source.keys, *(key for _, key in held_out)} <= {f"pair{i}" for i in range(6)}
    assert held_out


def test_a_share_is_held_out_of_the_keys_of_a_source(store: Store) -> None:
    keys = [f"helix{i}" for i in range(4)]
    (source,), held_out = hold_out([Source(store, keys)], tiny_run(validation=0.25))
    held = [key for _, key in held_out]
    assert len(held) >= 1
    assert sorted([*source.keys, *held]) == keys
    (source,), held_out = hold_out([Source(store, keys)], tiny_run(validation=("helix5",)))
    assert sorted(source.keys) == keys
    assert [key for _, key in held_out] == ["helix5"]
    pairs = ["pair0", "pair2", "pair4"]
    (source,), held_out = hold_out([Source(store, pairs)], multimer_run(validation=0.3))
    assert sorted([*source.keys, *(key for _, key in held_out)]) == pairs


def test_a_monomer_is_not_validated_on_an_assembly(store: Store) -> None:
    with pytest.raises(UserError, match="pair1 is an assembly"):
        hold_out(store, tiny_run(validation=("helix1", "pair1")))


def test_validation_takes_whole_assemblies_or_what_lies_around_an_interface(store: Store) -> None:
    pair = read_assembly(store, "pair1")  # 11 residues each
    whole = [np.arange(11), np.arange(11)]
    for size in (22, 99):
        assert all(map(np.array_equal, fixed_crop(pair, size, 10.0), whole))
    crop = fixed_crop(pair, 12, 10.0)
    assert all(map(np.array_equal, crop, fixed_crop(pair, 12, 10.0)))
    ca, _ = read_ca(pair) or pytest.fail("no atoms")
    here, there = ca[crop[0]], ca[11 + crop[1]]
    assert len(here) + len(there) == 12
    assert np.linalg.norm(here[:, None] - there, axis=-1).min() < 10
    apart = dataclasses.replace(pair, operators=pair.operators + 99 * np.eye(3, 4, 3) * [[[0]], [[1]]])
    # Without an interface the crop has the first residues.
    assert [len(part) for part in fixed_crop(apart, 12, 10.0)] == [11, 1]


def test_a_validation_says_what_it_cut_and_a_long_chain_is_cut_too(store: Store, tmp_path: Path) -> None:
    train(multimer_run(steps=1, validation_residues=14), store, tmp_path / "run")
    row = rows(tmp_path / "run", kind="validation")[0]
    assert row["cut"] == {"pair1": [14, 22], "pair4": [14, 29]}
    assert (row["cropped"], row["residues"], row["whole_residues"]) == (2, 28, 51)
    assert set(row["docked"]) == {"pair1", "pair4"}  # both have interfaces
    held_out = [(store, "helix3")]
    (chain,) = held_out_features(held_out, tiny_run(validation_residues=7))
    assert (chain.features["aatype"].shape, chain.residues) == ((7,), 13)


@pytest.mark.skipif(not REAL.is_dir(), reason="../shared/realdata is not here")
@pytest.mark.parametrize("name", ["1fbl", "3p0g", "5kds"])
def test_real_assemblies_that_are_too_large_show_an_interface(name: str) -> None:
    """The first whole chains within 512 residues are only one chain."""
    entry = parse_structure(gzip.decompress((REAL / f"{name}.cif.gz").read_bytes()))
    placed, chains = entry.assembly(), []
    for chain in (entry.chains[one.chain] for one in placed.chains):
        raw = from_sequence(chain.sequence, name=chain.id)
        chains.append(dataclasses.replace(raw, positions=chain.positions, mask=chain.mask))
    assembly = Assembly(name, tuple(placed.ids), tuple(chains), np.stack([one.operator for one in placed.chains]))
    crops = fixed_crop(assembly, 512, 10.0)
    ca, seen = read_ca(assembly) or pytest.fail("no atoms")
    chain = np.repeat(np.arange(len(chains)), [one.length for one in chains])
    kept = np.flatnonzero(np.isin(np.arange(len(chain)), in_assembly(crops, assembly)) & seen)
    assert sum(map(len, crops)) == 512
    assert near_other_chain(ca[kept], seen[kept], chain[kept], 10.0, np.arange(len(kept))).sum() >= 2


def in_assembly(crops: list[np.ndarray], assembly: Assembly) -> np.ndarray:
    """Return the indices of the residues of a crop in the whole assembly."""
    starts = np.cumsum([0, *(chain.length for chain in assembly.chains[:-1])])
    return np.concatenate([start + crop for start, crop in zip(starts, crops, strict=True)])


def test_dockq_is_of_the_interfaces_of_the_truth(store: Store) -> None:
    (example,) = held_out_features([(store, "pair1")], multimer_run())
    batch = to_tensors(example.features, "cpu")
    atoms, mask = batch["copy_atom_positions"][0], batch["copy_atom_mask"][0]
    truth = with_truth(batch, atoms)
    assert mean_dockq(truth["all_atom_positions"], truth) == pytest.approx(1.0)
    second = (batch["asym_id"] == 2)[:, None, None]
    moved = truth["all_atom_positions"] + 8 * second * mask[..., None]
    assert 0 < mean_dockq(moved, truth) < 0.6
    assert math.isnan(mean_dockq(moved, truth | {"all_atom_positions": truth["all_atom_positions"] + 99 * second}))
    assert mean_dockq(torch.full_like(moved, math.nan), truth) == 0
    assert math.isnan(mean_dockq(moved, {name: x for name, x in truth.items() if name != "asym_id"}))


def test_what_keeps_chains_apart_needs_a_multimer() -> None:
    run = multimer_run()
    with pytest.raises(ValueError, match="Remove it, or train a multimer"):
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
    # The 24 pairs within the chains did not move.
    assert all_pairs == pytest.approx((32 * between + 24) / 56)
