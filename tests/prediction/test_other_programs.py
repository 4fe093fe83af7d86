"""Read the output of `predict` with other parsers: structures, pLDDT and PAE as ChimeraX, PyMOL and Mol* read them.

Tests of parsers that are not installed are skipped: pip install biopython biotite modelcif.
"""

import io
import json
from pathlib import Path

import gemmi
import numpy as np
import pytest

from tests.report.test_report_browser import LENGTHS, prediction
from warpfold.data.structure.write import Modelling, write_mmcif
from warpfold.prediction.outputs import Prediction

NAMES = {letter: gemmi.expand_one_letter(letter, gemmi.ResidueKind.AA) for letter in "ARNDCQEGHILKMFPSTWYV"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Prediction]:
    """Save a complex of two chains, H and x."""
    made = prediction("pair", LENGTHS, 3)
    folder = tmp_path_factory.mktemp("pair")
    made.save(folder)
    return folder, made


def spelled(made: Prediction) -> list[tuple[str, int, str]]:
    """List chain, number and name of every residue."""
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
    assert {r.id[0] for r in residues} == {" "}  # no heteroatoms
    np.testing.assert_allclose([r["CA"].bfactor for r in residues], made.plddt, atol=0.0051)
    np.testing.assert_allclose([r["CA"].coord for r in residues], made.ca, atol=0.00051)


def test_biotite(pair: tuple[Path, Prediction]) -> None:
    pytest.importorskip("biotite", reason="pip install biotite")
    from biotite.structure.io import pdb, pdbx

    folder, made = pair
    for array in (
        pdbx.get_structure(
            pdbx.CIFFile.read(folder / "pair.cif"), model=1, extra_fields=["b_factor"], use_author_fields=True
        ),
        pdb.PDBFile.read(folder / "pair.pdb").get_structure(model=1, extra_fields=["b_factor"]),
    ):
        ca = array[array.atom_name == "CA"]
        assert list(zip(ca.chain_id, ca.res_id.tolist(), ca.res_name)) == spelled(made)
        np.testing.assert_allclose(ca.b_factor, made.plddt, atol=0.0051)
        np.testing.assert_allclose(ca.coord, made.ca, atol=0.00051)


def test_modelcif(pair: tuple[Path, Prediction]) -> None:
    """The file has the pLDDT of each residue and of the model. Mol* colours by this metric."""
    reader = pytest.importorskip("modelcif.reader", reason="pip install modelcif")
    folder, made = pair
    with (folder / "pair.cif").open() as file:
        (system,) = reader.read(file)
    metrics = [metric for group in system.model_groups for model in group for metric in model.qa_metrics]
    local = [metric for metric in metrics if hasattr(metric, "seq_id") or hasattr(metric, "residue")]
    assert len(local) == len(made.sequence)
    np.testing.assert_allclose([float(metric.value) for metric in local], made.plddt, atol=0.0051)
    assert {metric.type for metric in metrics} == {"pLDDT", "pTM", "ipTM"}
    assert {one.name for one in system.software} == {"WarpFold"}
    (protocol,) = system.protocols
    assert [type(step).__name__ for step in protocol.steps] == ["ModelingStep"]
    assert [type(one).__name__ for one in protocol.steps[0].input_data] == ["Entity", "Entity"]


# Requirements of mmcif_ma.dic 1.4.2 (https://github.com/ihmwg/ModelCIF). DEMANDED has the mandatory items of the
# categories that a computed model needs, and of the categories to which they refer. The values of an item in PARENTS
# must be among the values of its parent item.
DEMANDED = {
    "audit_conform": "dict_name dict_version",
    "atom_type": "symbol",
    "entity": "id",
    "ma_data": "id name content_type",
    "ma_data_group": "ordinal_id group_id data_id",
    "ma_model_list": "ordinal_id model_id model_type data_id",
    "ma_protocol_step": "ordinal_id protocol_id step_id method_type",
    "ma_qa_metric": "id name type mode",
    "ma_qa_metric_global": "ordinal_id model_id metric_id metric_value",
    "ma_qa_metric_local": "ordinal_id model_id label_asym_id label_seq_id label_comp_id metric_id metric_value",
    "ma_software_group": "ordinal_id group_id software_id",
    "ma_target_entity": "entity_id data_id origin",
    "ma_target_entity_instance": "asym_id entity_id",
    "software": "pdbx_ordinal name classification",
    "struct_asym": "id entity_id",
}
PARENTS = {
    "atom_site.type_symbol": "atom_type.symbol",
    "atom_site.label_asym_id": "struct_asym.id",
    "atom_site.label_comp_id": "chem_comp.id",
    "atom_site.label_entity_id": "entity.id",
    "atom_site.pdbx_PDB_model_num": "ma_model_list.model_id",
    "ma_data_group.data_id": "ma_data.id",
    "ma_model_list.data_id": "ma_data.id",
    "ma_protocol_step.input_data_group_id": "ma_data_group.group_id",
    "ma_protocol_step.output_data_group_id": "ma_data_group.group_id",
    "ma_protocol_step.software_group_id": "ma_software_group.group_id",
    "ma_qa_metric.software_group_id": "ma_software_group.group_id",
    "ma_qa_metric_global.metric_id": "ma_qa_metric.id",
    "ma_qa_metric_global.model_id": "ma_model_list.model_id",
    "ma_qa_metric_local.label_asym_id": "atom_site.label_asym_id",
    "ma_qa_metric_local.metric_id": "ma_qa_metric.id",
    "ma_qa_metric_local.model_id": "ma_model_list.model_id",
    "ma_software_group.software_id": "software.pdbx_ordinal",
    "ma_target_entity.data_id": "ma_data.id",
    "ma_target_entity.entity_id": "entity.id",
    "ma_target_entity_instance.entity_id": "ma_target_entity.entity_id",
    "struct_asym.entity_id": "ma_target_entity_instance.entity_id",
    "struct_asym.id": "ma_target_entity_instance.asym_id",
}
KINDS = {
    "ma_data.content_type": {"target", "model coordinates"},
    "ma_model_list.model_type": {"Homology model", "Ab initio model", "Other"},
    "ma_protocol_step.method_type": {"modeling", "model refinement"},
    "ma_target_entity.origin": {"designed", "reference database"},
}
DICTIONARY = Path("/usr/share/libcifpp/mmcif_ma.dic")  # Debian package libcifpp-data


@pytest.fixture(scope="module", params=["predicted", "relaxed"])
def modelcif(request: pytest.FixtureRequest, pair: tuple[Path, Prediction]) -> str:
    """Return the mmCIF text of a prediction, as predicted or relaxed."""
    made = pair[1]
    if request.param == "predicted":
        return made.mmcif()
    plddt = [made.plddt[span] for span in made.spans.values()]
    return write_mmcif("pair", made.chains(), b_factors=plddt, predicted=Modelling(refined_by=("OpenMM", "8.6")))


def test_modelcif_has_what_its_dictionary_demands(modelcif: str) -> None:
    block = gemmi.cif.read_string(modelcif).sole_block()

    def values(item: str) -> set[str]:
        return set(map(gemmi.cif.as_string, block.find_values(f"_{item}")))

    for category, items in DEMANDED.items():
        table = block.find(f"_{category}.", items.split())
        assert len(table), category
        assert not any(gemmi.cif.is_null(cell) for row in table for cell in row), category
    for child, parent in PARENTS.items():
        assert values(child), child
        assert values(child) <= values(parent), child
    for item, known in KINDS.items():
        assert values(item) <= known, item


@pytest.mark.skipif(not DICTIONARY.is_file(), reason="the dictionary itself is in Debian's package libcifpp-data")
def test_modelcif_follows_the_whole_dictionary(modelcif: str) -> None:
    reader = pytest.importorskip("ihm.dictionary", reason="pip install modelcif")
    with DICTIONARY.open() as file:
        demands = reader.read(file)
    assert {"ma_data", "ma_model_list", "ma_protocol_step"} <= {
        c.name for c in demands.categories.values() if c.mandatory
    }
    demands.validate(io.StringIO(modelcif))  # raises a ValidatorError


def test_what_molstar_looks_for(pair: tuple[Path, Prediction]) -> None:
    """Mol*'s model-archive extension reads `ma_qa_metric` and `ma_qa_metric_local`, with residues by label."""
    folder, made = pair
    block = gemmi.cif.read(str(folder / "pair.cif")).sole_block()
    kinds = block.find("_ma_qa_metric.", ["id", "mode", "name", "type"])
    local = next(row[0] for row in kinds if row[1] == "local")
    assert [list(row)[1:] for row in kinds][:2] == [["global", "pLDDT", "pLDDT"], ["local", "pLDDT", "pLDDT"]]
    tags = ["ordinal_id", "model_id", "label_asym_id", "label_seq_id", "label_comp_id", "metric_id", "metric_value"]
    rows = block.find("_ma_qa_metric_local.", tags)
    assert {row[5] for row in rows} == {local}
    labels = dict(zip("AB", made.spans))
    assert [(labels[row[2]], int(row[3]), row[4]) for row in rows] == spelled(made)
    np.testing.assert_allclose([float(row[6]) for row in rows], made.plddt, atol=0.0051)


def test_what_chimerax_takes_for_errors(pair: tuple[Path, Prediction]) -> None:
    """ChimeraX reads "pae" of the `.npz` named like the structure, or JSON in the form of AlphaFold DB or ColabFold."""
    folder, made = pair
    with np.load(folder / "pair.npz", allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["pae"], made.pae)
    (first,) = json.loads((folder / "pair_pae.json").read_text())
    assert np.shape(first["predicted_aligned_error"]) == np.shape(made.pae)
    np.testing.assert_allclose(json.loads((folder / "pair_scores.json").read_text())["pae"], made.pae, atol=0.0051)
