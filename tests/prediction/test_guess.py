"""Test initial guesses and fixed chains: files and arrays, proteins and complexes, monomer and multimer parameters."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import tiny_config, tiny_model, tiny_multimer
from tests.prediction.runs import run_cli, write_entry
from warpfold.data.example.complex import Complex
from warpfold.data.example.guess import as_guess
from warpfold.data.example.raw_example import RawExample
from warpfold.data.formats.alignment import parse_a3m
from warpfold.data.structure.mmcif import read_structure
from warpfold.data.structure.write import write_pdb
from warpfold.errors import UserError
from warpfold.geometry.residue import GAP
from warpfold.model.alphafold import AlphaFold
from warpfold.model.weights.files import save_params
from warpfold.prediction.predictor import Predictor, load
from warpfold.prediction.queries import make_query, query_of, read_queries, with_guess, with_templates
from warpfold.prediction.templates import TemplateSources

TARGET, BINDER = "MKTAYIAKQRQISFVKSH", "GSHMLEERLGL"
DIMER = {"A": TARGET, "B": BINDER}


def design(folder: Path, name: str = "one", chains: dict[str, str] = DIMER, seed: int = 0) -> Path:
    return write_entry(folder / f"{name}.cif", chains, "2020-01-01", seed)


def arrays(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {id: (chain.positions, chain.mask) for id, chain in read_structure(path).chains.items()}


def predictor(model: AlphaFold, gap: int | None = None) -> Predictor:
    found = Predictor(model)
    found.chain_gap = gap
    return found


MODELS = {"multimer": (tiny_multimer, None), "monomer": (tiny_model, 200)}


@pytest.fixture(params=MODELS)
def folds(request: pytest.FixtureRequest) -> Predictor:
    make, gap = MODELS[request.param]
    return predictor(make(), gap)


def same(a: Any, b: Any) -> bool:
    return np.array_equal(a.positions, b.positions) and np.array_equal(a.pae, b.pae)


def test_a_guess_counts_wherever_it_comes_from(folds: Predictor, tmp_path: Path) -> None:
    path = design(tmp_path)
    none, given = (folds.fold(DIMER, recycles=0, **more) for more in ({}, {"initial_guess": path}))
    assert not same(none, given)
    assert given.iptm is not None
    assert given.chain_pair_iptm.shape == (2, 2)
    assert same(given, folds.fold(DIMER, recycles=0, initial_guess=arrays(path)))
    folder = tmp_path / "designs"
    folder.mkdir()
    shutil.copy(path, folder / "query_1.cif")
    for how in (path, folder, [path], {"query_1": arrays(path)}):
        assert same(given, folds.fold_many([DIMER], initial_guess=how)[0].prediction) is (
            folds.model.config.recycles == 0
        )
    [itself] = folds.fold_many(path, initial_guess="self", recycles=0)
    assert same(given, itself.prediction)


def test_of_zeros_a_guess_is_none(folds: Predictor) -> None:
    zeros = {id: (np.zeros((len(one), 37, 3)), np.zeros((len(one), 37))) for id, one in DIMER.items()}
    none, given = folds.fold(DIMER, recycles=0), folds.fold(DIMER, recycles=0, initial_guess=zeros)
    assert same(none, given)
    assert [one["kind"] for one in given.details["warnings"]] == ["guess_gaps"]


def test_a_fixed_chain_is_its_own_template_and_no_other(folds: Predictor, tmp_path: Path) -> None:
    """A fixed chain is not a template of its copy either, although copies share their templates otherwise."""
    chains = {"A": TARGET, "B": BINDER, "C": TARGET}
    path = design(tmp_path, chains=chains)
    query = with_guess(query_of(chains, (), "trio"), path, ("C",))
    prepared = folds.prepare(query.assembly, initial_guess=query.guess, fixed=query.fixed)
    mask, types = (prepared.batch[name].numpy() for name in ("template_all_atom_masks", "template_aatype"))
    spans, own = {"A": slice(0, 18), "B": slice(18, 29), "C": slice(29, 47)}, read_structure(path).chains["C"]
    assert np.array_equal(mask[0, spans["C"]], own.mask)
    assert np.array_equal(prepared.batch["template_all_atom_positions"][0, spans["C"]], own.positions)
    assert not mask[0, : spans["C"].start].any()
    assert not mask[1:].any()
    assert set(types[0, : spans["C"].start]) == ({GAP} if folds.chain_gap else {0})
    assert len(mask) == (1 if folds.chain_gap else folds.sample.max_templates)
    found = folds.compute(prepared)
    assert found.details["templates"] == ["one_C"]
    bare = folds.prepare(query.assembly, initial_guess=query.guess)
    assert not same(found, folds.compute(bare))


def test_other_templates_follow_a_fixed_chains_own(folds: Predictor, tmp_path: Path) -> None:
    path, other = design(tmp_path), write_entry(tmp_path / "other.cif", {"X": TARGET}, "2020-01-01", 3)
    query = folds.with_templates(query_of(DIMER, (), "dimer"), other)
    prepared = folds.prepare(query.assembly, initial_guess=path, fixed=("A",))
    places, wanted = prepared.batch["template_all_atom_positions"], (path, other)
    for i, one in enumerate(wanted):
        assert np.array_equal(places[i, :18], next(iter(read_structure(one).chains.values())).positions)


def test_a_gap_tells_chains_apart(tmp_path: Path) -> None:
    folds, name = predictor(tiny_model(), 200), tmp_path / "tiny.safetensors"
    batch = folds.prepare(query_of([TARGET, BINDER], (), "dimer").assembly).batch
    assert batch["residue_index"].tolist() == [*range(18), *range(218, 229)]
    assert not same(folds.fold([TARGET, BINDER]), folds.fold(TARGET + BINDER))
    with pytest.raises(UserError, match="chain_gap 200, or fold each chain"):
        Predictor(tiny_model()).fold([TARGET, BINDER])
    save_params(name, tiny_model())
    assert same(load(name, chain_gap=200).fold([TARGET, BINDER]), folds.fold([TARGET, BINDER]))
    save_params(tmp_path / "multimer.safetensors", tiny_multimer())
    with pytest.raises(UserError, match=r"chain_gap: multimer\.safetensors is AlphaFold-Multimer's"):
        load(tmp_path / "multimer.safetensors", chain_gap=200)


def test_with_a_gap_rows_are_paired_and_stand_alone() -> None:
    rows = {"A": [TARGET.replace("K", "R")], "B": [BINDER.replace("G", "A"), BINDER.replace("L", "I")]}
    folds = predictor(tiny_model(), 200)
    folds.sample = replace(folds.sample, masked_fraction=0.0)
    seen = folds.prepare(query_of(DIMER, rows, "dimer").assembly).batch["true_msa"][0].numpy()
    assert len(seen) == 4
    assert sorted((row[:18] != GAP).any() * 2 + (row[18:] != GAP).any() for row in seen) == [1, 1, 2, 3]


def test_designs_that_share_a_pass_have_their_own_guess(tmp_path: Path) -> None:
    folds = predictor(tiny_model(), 200)
    designs = {"long": DIMER, "short": {"A": TARGET[:12], "B": BINDER}, "none": DIMER}
    guesses = {name: design(tmp_path, name, one) for name, one in designs.items() if name != "none"}
    together = folds.fold_many(designs, initial_guess=guesses, batch=3)
    alone = [folds.fold(one, name=name, initial_guess=guesses.get(name)) for name, one in designs.items()]
    assert {one.prediction.details.get("together") for one in together} == {3}
    for one, other in zip(together, alone):
        np.testing.assert_allclose(one.prediction.positions, other.positions, rtol=0, atol=1e-3)
        np.testing.assert_allclose(one.prediction.iptm, other.iptm, rtol=0, atol=1e-5)


def test_designs_share_what_is_their_targets(tmp_path: Path) -> None:
    """All designs share the target's alignment and templates in memory.

    An alignment that one design provides for the target is used for that design only.
    """
    folder = tmp_path / "designs"
    folder.mkdir()
    for seed, binder in enumerate((BINDER, "ACDEFGHIKLM", "MLKIHGFEDCA")):
        design(folder, f"design_{seed}", {"A": binder, "B": TARGET}, seed)
    (tmp_path / "target.a3m").write_text(f">b\n{TARGET}\n>row\n{TARGET.replace('K', 'R')}\n")
    given = read_queries(folder, [tmp_path / "target.a3m"])
    sources = TemplateSources(files=[f"B={write_entry(tmp_path / 'other.cif', {'X': TARGET}, '2020-01-01', 3)}"])
    read = with_templates(given, sources, [predictor(tiny_multimer()).as_params])
    assert len({id(one.chains[1].msa) for one in read}) == len({id(one.chains[1].templates) for one in read}) == 1
    assert read[0].chains[1].depth == 2
    assert [one.chains[0].sequence for one in read] == [one.sequences[0] for one in read]
    rows = parse_a3m(f">b\n{TARGET}\n>row\n{TARGET.replace('Q', 'E')}\n")
    own, made = Complex("own", ("A", "B"), (BINDER, TARGET), (rows,)), dict[str, RawExample]()
    alone, with_rows = make_query(replace(own, alignments=()), None, made), make_query(own, None, made)
    assert [one.chains[1].depth for one in (alone, with_rows)] == [1, 2]


@pytest.fixture
def params(tmp_path: Path) -> dict[str, Path]:
    config = tiny_config()
    made = {
        "monomer": tiny_model(),
        "bare": tiny_model(templates=replace(config.templates, enabled=False)),
        "multimer": tiny_multimer(),
    }
    for name, model in made.items():
        save_params(tmp_path / f"{name}.safetensors", model)
    return {name: tmp_path / f"{name}.safetensors" for name in made}


def test_the_command_scores_a_folder_of_designs(
    tmp_path: Path, params: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Design "two" lacks residues in its fixed chain. Design "three" has other chains and fails alone."""
    folder, guesses = tmp_path / "designs", tmp_path / "guesses"
    folder.mkdir(), guesses.mkdir()
    for seed, name in enumerate(("one", "two")):
        design(folder, name, seed=seed)
    design(folder, "three", {"A": TARGET, "B": BINDER + "A"})
    chains = list(read_structure(folder / "two.cif").chains.values())
    chains[0].mask[3:6] = 0
    (guesses / "two.pdb").write_text(write_pdb("two", chains))
    for name in ("one", "three"):
        shutil.copy(folder / "one.cif", guesses / f"{name}.cif")
    given = (folder, "--params", params["monomer"], "--out", tmp_path / "out", "--recycles", 0, "--chain-gap", 200)
    given += "--fixed-chains", "A"
    code, _, said = run_cli(capsys, *given, "--initial-guess", guesses)
    assert code == 1
    assert "three.cif: has other chains (residues) than three: A (18), B (11), not A (18), B (12). Pass a" in said
    assert "placed at the origin: 3 (A 4, A 5, A 6)" in " ".join(said.split())
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert [one["name"] for one in summary["failures"]] == ["three"]
    entries = {one["name"]: one for one in summary["predictions"]}
    assert [entries["one"][key] for key in ("initial_guess", "fixed_chains")] == ["one.cif", ["A"]]
    assert {name: one["templates"] for name, one in entries.items()} == {"one": ["one_A"], "two": ["two_A"]}
    assert all(one["iptm"] is not None for one in entries.values())
    # The same guesses continue the run; other guesses are another run.
    assert run_cli(capsys, *given, "--initial-guess", guesses)[0] == 1
    code, _, said = run_cli(capsys, *given, "--initial-guess", "self")
    assert code == 2
    assert "holds the output of another run" in said
    assert run_cli(capsys, *given, "--initial-guess", "self", "--force")[0] == 0
    found = json.loads((tmp_path / "out/summary.json").read_text())["predictions"]
    itself = next(one for one in found if one["name"] == "one")
    assert itself["mean_plddt"] == entries["one"]["mean_plddt"]


def test_designs_are_compared_with_the_structure_that_they_are(
    tmp_path: Path, params: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The RMSD is given with and without a guess. A warning that concerns all designs is a warning of the run."""
    folder = tmp_path / "designs"
    folder.mkdir()
    for seed, (name, binder) in enumerate({"one": BINDER, "two": BINDER[::-1], "three": BINDER + "A"}.items()):
        design(folder, name, {"A": TARGET, "B": binder}, seed)
    given = (folder, "--params", params["multimer"], "--recycles", 0, "--out")
    bare = "no alignment for chains A, B: folded by the sequence alone"
    assert run_cli(capsys, *given, tmp_path / "plain", "--keep", "rmsd < 1000")[0] == 0
    summary = json.loads((tmp_path / "plain/summary.json").read_text())
    assert [one["scores"]["rmsd"] > 1 for one in summary["predictions"]] == [True] * 3
    assert [one["text"] for one in summary["input_warnings"]["two"]] == [bare]

    guessed = "--initial-guess", "self", "--fixed-chains", "A"
    code, _, said = run_cli(capsys, *given, tmp_path / "guessed", *guessed, "--keep", "best:1")
    assert code == 0
    summary = json.loads((tmp_path / "guessed/summary.json").read_text())
    assert ([one["text"] for one in summary["warnings"]], summary["input_warnings"]) == ([bare], {})
    assert said.count(bare) == 1
    assert sum(not one.get("dropped") for one in summary["predictions"]) == 1
    rows = load(params["multimer"], "cpu").score_designs(folder, recycles=0, initial_guess="self", fixed="A")
    for row, entry in zip(rows, summary["predictions"], strict=True):
        assert (row["target"], row["binder"], row["error"]) == ("A", "B", "")
        assert row["rmsd"] == pytest.approx(entry["scores"]["rmsd"], abs=1e-3)
    [alone] = load(params["monomer"], "cpu").score_designs(
        design(tmp_path, "single", {"X": TARGET}), recycles=0, initial_guess="self", fixed="A"
    )
    assert alone["rmsd"] == alone["binder_rmsd"] > 1  # no other chain
    code, _, said = run_cli(capsys, *given, tmp_path / "pairs", "--initial-guess", "self", "--pairs", "all")
    assert (code, said.count("\n")) == (2, 1)
    assert "--pairs: no structure of its complexes is known. Leave --initial-guess out." in said


def test_a_fixed_chain_without_template_parts_is_a_warning(
    tmp_path: Path, params: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """One of two parameter files has template parts."""
    given = design(tmp_path), "--initial-guess", "self", "--fixed-chains", "A", "--chain-gap", 200
    models = "--params", params["bare"], "--params", params["monomer"]
    code, _, said = run_cli(capsys, *given, *models, "--out", tmp_path / "out")
    assert (code, "no template is used with bare.safetensors" in " ".join(said.split())) == (0, True), said


def test_a_file_that_changed_since_is_refused(tmp_path: Path) -> None:
    path = design(tmp_path)
    guess = as_guess(path, "one", DIMER)
    design(tmp_path, seed=1)
    with pytest.raises(UserError, match="has changed since the run began"):
        guess["A"]
    assert set(guess) == {"A", "B"}


def test_chains_of_an_assembly_stand_where_it_has_them(tmp_path: Path) -> None:
    """The symmetry of the file makes a second, moved copy of its only chain, which is part of the guess."""
    text = design(tmp_path, chains={"A": TARGET}).read_text()
    path = tmp_path / "twice.cif"
    text += (
        "loop_\n_pdbx_struct_assembly_gen.assembly_id\n_pdbx_struct_assembly_gen.oper_expression\n"
        "_pdbx_struct_assembly_gen.asym_id_list\n1 1,2 A\n"
        "loop_\n_pdbx_struct_oper_list.id\n"
        + "".join(f"_pdbx_struct_oper_list.matrix[{i}][{j}]\n" for i in (1, 2, 3) for j in (1, 2, 3))
        + "".join(f"_pdbx_struct_oper_list.vector[{i}]\n" for i in (1, 2, 3))
        + "1 1 0 0 0 1 0 0 0 1 0 0 0\n2 1 0 0 0 1 0 0 0 1 30 0 0\n#\n"
    )
    path.write_text(text)
    guess = as_guess(path, "twice", {"A": TARGET, "A-2": TARGET})
    moved = guess["A"].positions + np.array([30, 0, 0]) * guess["A"].mask[..., None]
    np.testing.assert_allclose(guess["A-2"].positions, moved, rtol=0, atol=1e-4)
