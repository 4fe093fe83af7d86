"""What `predict` writes, read by others' parsers: structures, pLDDT, PAE as ChimeraX, PyMOL and Mol* take them.

Those that are not installed are skipped: pip install biopython biotite modelcif.
"""

import json
from pathlib import Path

import gemmi
import numpy as np
import pytest

from tests.run.test_report_browser import LENGTHS, prediction
from warpfold.run.outputs import Prediction

NAMES = {letter: gemmi.expand_one_letter(letter, gemmi.ResidueKind.AA) for letter in "ARNDCQEGHILKMFPSTWYV"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Prediction]:
    """A saved complex of two chains, H and x."""
    made = prediction("pair", LENGTHS, 3)
    folder = tmp_path_factory.mktemp("pair")
    made.save(folder)
    return folder, made


def spelled(made: Prediction) -> list[tuple[str, int, str]]:
    """Return chain, number and name of every residue."""
    return [
        (chain, i + 1, NAMES[letter])
        for chain, span in made.spans.items()
        for i, letter in enumerate(made.sequence[span])
    ]


@pytest.mark.parametrize("ending", [".cif", ".pdb"])
def test_biopython(pair: tuple[Path, Prediction], ending: str) -> None:
    parsers = pytest.importorskip("Bio.PDB", reason="pip install biopython")
    folder, made = pair
    parser = parsers.MMCIFParser(QUIET=True) if ending == ".cif" else parsers.PDBParser(QUIET=True)
    (model,) = parser.get_structure("pair", str(folder / f"pair{ending}"))
    residues = [residue for chain in model for residue in chain]
    assert [(r.get_parent().id, r.id[1], r.resname) for r in residues] == spelled(made)
    assert {r.id[0] for r in residues} == {" "}  # none is a heteroatom
    np.testing.assert_allclose([r["CA"].bfactor for r in residues], made.plddt, atol=0.0051)
    np.testing.assert_allclose([r["CA"].coord for r in residues], made.ca, atol=0.00051)


def test_biotite(pair: tuple[Path, Prediction]) -> None:
    pytest.importorskip("biotite", reason="pip install biotite")
    from biotite.structure.io import pdb, pdbx

    folder, made = pair
    for array in (
        pdbx.get_structure(pdbx.CIFFile.read(folder / "pair.cif"), model=1, extra_fields=["b_factor"]),
        pdb.PDBFile.read(folder / "pair.pdb").get_structure(model=1, extra_fields=["b_factor"]),
    ):
        ca = array[array.atom_name == "CA"]
        assert list(zip(ca.chain_id, ca.res_id.tolist(), ca.res_name)) == spelled(made)
        np.testing.assert_allclose(ca.b_factor, made.plddt, atol=0.0051)
        np.testing.assert_allclose(ca.coord, made.ca, atol=0.00051)


def test_modelcif(pair: tuple[Path, Prediction]) -> None:
    """The metric by which Mol* colours: pLDDT of each residue, and of the model."""
    reader = pytest.importorskip("modelcif.reader", reason="pip install modelcif")
    folder, made = pair
    with (folder / "pair.cif").open() as file:
        (system,) = reader.read(file)
    metrics = [metric for group in system.model_groups for model in group for metric in model.qa_metrics]
    local = [metric for metric in metrics if hasattr(metric, "seq_id") or hasattr(metric, "residue")]
    assert len(local) == len(made.sequence)
    np.testing.assert_allclose([float(metric.value) for metric in local], made.plddt, atol=0.0051)
    assert {metric.type for metric in metrics} == {"pLDDT"}


def test_what_molstar_looks_for(pair: tuple[Path, Prediction]) -> None:
    """`ma_qa_metric.id` and `ma_qa_metric_local.ordinal_id`, residues by label: its model-archive extension."""
    folder, made = pair
    block = gemmi.cif.read(str(folder / "pair.cif")).sole_block()
    kinds = block.find("_ma_qa_metric.", ["id", "mode", "name", "type"])
    local = next(row[0] for row in kinds if row[1] == "local")
    assert [list(row)[1:] for row in kinds] == [["global", "pLDDT", "pLDDT"], ["local", "pLDDT", "pLDDT"]]
    tags = ["ordinal_id", "model_id", "label_asym_id", "label_seq_id", "label_comp_id", "metric_id", "metric_value"]
    rows = block.find("_ma_qa_metric_local.", tags)
    assert {row[5] for row in rows} == {local}
    labels = dict(zip("AB", made.spans))
    assert [(labels[row[2]], int(row[3]), row[4]) for row in rows] == spelled(made)
    np.testing.assert_allclose([float(row[6]) for row in rows], made.plddt, atol=0.0051)


def test_what_chimerax_takes_for_errors(pair: tuple[Path, Prediction]) -> None:
    """The `.npz` of the structure's name, by its "pae"; or JSON, a list of AlphaFold DB's or ColabFold's "pae"."""
    folder, made = pair
    with np.load(folder / "pair.npz", allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["pae"], made.pae)
    (first,) = json.loads((folder / "pair_pae.json").read_text())
    assert np.shape(first["predicted_aligned_error"]) == np.shape(made.pae)
    np.testing.assert_allclose(json.loads((folder / "pair_scores.json").read_text())["pae"], made.pae, atol=0.0051)
