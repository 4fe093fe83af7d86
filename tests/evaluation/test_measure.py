"""Test the row of one prediction: its scores, confidence, geometry and files, and the notes on its pairing."""

import hashlib
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from tests.scoring.complexes import disturbed, heterodimer, renamed, without
from tests.scoring.test_score import part, protein, structure
from warpfold.data.formats.predictions import read_pae
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.mmcif import parse_structure
from warpfold.data.structure.write import write_mmcif
from warpfold.evaluation.confidence import pae_sums, plddt_sums
from warpfold.evaluation.layouts import PredictedFile
from warpfold.evaluation.measure import Comparison, Job, Measured, measure, pairing_notes
from warpfold.evaluation.truths import Truth
from warpfold.geometry.residue import RESTYPES
from warpfold.prediction.sanity import check_geometry
from warpfold.scoring.chain_mapping import CA
from warpfold.scoring.score import pair


def test_the_row_of_a_complex(tmp_path: Path) -> None:
    """Compare with the scores of the two structures, and with the pLDDT and the geometry of the atoms."""
    reference = heterodimer()
    predicted = renamed(disturbed(reference, 0.2, 1.0, 0.3), "CD")
    predicted["C"] = without(predicted["C"], slice(7, 9))
    b_factors = [np.linspace(20, 90, len(chain.sequence)) for chain in predicted.values()]
    files = tmp_path / "p.cif", tmp_path / "t.cif", tmp_path / "p.a3m"
    files[0].write_text(write_mmcif("p", list(predicted.values()), b_factors=b_factors))
    files[1].write_text(write_mmcif("t", list(reference.values()), release_date="2024-05-01"))
    files[2].write_text(">q\nAC\n>r\nAC\n")
    # The file has only the residues with atoms.
    np.savez(tmp_path / "p.npz", pae=np.random.default_rng(0).uniform(0, 30, (68, 68)))
    file = PredictedFile("target", files[0], "AlphaFold", ("t",), 2, "model", pae=tmp_path / "p.npz")
    job = Job(replace(file, alignments=(files[2],)), Truth("t", files[1]))
    found = measure(job)
    paired = pair(*(parse_structure(path.read_bytes(), str(path)) for path in files[:2]))
    score = paired.score()
    assert score.complex is not None
    chains = list(paired.predicted.chains.values())
    positions, mask = (np.concatenate([getattr(chain, name) for chain in chains]) for name in ("positions", "mask"))
    geometry = check_geometry(positions, mask, np.array([0] * 40 + [1] * 30))
    # Residues without atoms have no pLDDT.
    plddt = np.concatenate(b_factors)[np.r_[0:7, 9:70]]
    assert found.row == {
        "target": "target",
        "model": "model",
        "rank": 2,
        "residues": 70,
        "paired": 68,
        "coverage": 68 / 70,
        **{key: getattr(score, key) for key in ("identity", "lddt", "lddt_ca", "gdt_ts", "gdt_ha", "tm", "rmsd")},
        **{key: getattr(score.complex, key) for key in ("dockq", "ilddt", "qs_global", "ics", "ips")},
        "interfaces": [asdict(interface) for interface in score.complex.interfaces],
        "plddt": pytest.approx(plddt.mean(), abs=0.01),
        "clashes": geometry.clashes,
        "chain_breaks": geometry.chain_breaks,
        "depth": 2,
        "length": 70,
        "chains": {"C": "A", "D": "B"},
        "notes": [*score.notes, "chain C: residues of the truth that the prediction lacks: 2 of 40"],
        "prediction": str(files[0]),
        "prediction_sha256": hashlib.sha256(files[0].read_bytes()).hexdigest(),
        "truth": str(files[1]),
        "truth_sha256": hashlib.sha256(files[1].read_bytes()).hexdigest(),
        "truth_chains": ["A", "B"],
        "released": "2024-05-01",
        "sequences": [chain.sequence for chain in reference.values()],
    }
    assert len(score.complex.interfaces) == 1
    assert (found.job, found.error) == (job, None)
    # By default, the chains of the file are compared.
    assert Comparison() == Comparison(assembly=False, chains=None, allow_unplaced=False)
    by_chain = {name: chain.b_factors for name, chain in paired.predicted.chains.items() if chain.b_factors is not None}
    assert found.plddt is not None
    assert found.plddt.to_dict() == plddt_sums(paired, {k: v.astype(np.float64) for k, v in by_chain.items()}).to_dict()
    assert found.pae is not None
    assert found.pae.to_dict() == pae_sums(paired, read_pae(tmp_path / "p.npz", mask[:, CA] > 0)).to_dict()
    # The depth that the program reports takes precedence over the alignment, also if it is 0.
    assert measure(replace(job, prediction=replace(job.prediction, depth=0))).row["depth"] == 0


def write_pair(folder: Path, predicted: Chain, truth: Chain, b: float = 50.0) -> Job:
    paths = folder / "p.cif", folder / "t.cif"
    for path, chain in zip(paths, (predicted, truth)):
        path.write_text(write_mmcif(path.stem, [chain], b_factors=[np.full(len(chain.sequence), b)]))
    return Job(PredictedFile("p", paths[0], "plain files", ("t",)), Truth("t", paths[1]))


def test_what_a_single_chain_does_not_have(tmp_path: Path) -> None:
    job = write_pair(tmp_path, protein("A", 30, 1), protein("A", 30, 1))
    (tmp_path / "pae.json").write_text("[]")
    found = measure(replace(job, prediction=replace(job.prediction, pae=tmp_path / "pae.json")))
    none = ("dockq", "ilddt", "qs_global", "ics", "ips", "plddt", "depth", "released")
    assert {key: found.row[key] for key in none} == dict.fromkeys(none)
    assert (found.row["interfaces"], found.row["rank"], found.plddt, found.pae) == ([], 1, None, None)
    first, second = found.row["notes"]
    assert first == "no pLDDT: its B column is 50 throughout"
    assert second.startswith("no PAE: pae.json: no PAE in a supported layout")
    known = measure(replace(job, prediction=replace(job.prediction, layout="AlphaFold")))
    assert (known.row["plddt"], known.row["notes"]) == (50.0, [])


def test_structures_that_cannot_be_scored(tmp_path: Path) -> None:
    chain = protein("A", 2, 1)
    far = chain.positions + np.array([0, 50])[:, None, None] * chain.mask[..., None]
    job = write_pair(tmp_path, chain, replace(chain, positions=far.astype(np.float32)))
    assert measure(job) == Measured(
        job, error=f"{tmp_path / 't.cif'}: no two Ca atoms are near enough for lDDT. Use a larger structure"
    )
    job = write_pair(tmp_path, protein("A", 30, 1), protein("A", 30, 9))
    error = measure(job).error
    assert error is not None
    assert error.startswith(f"{tmp_path / 'p.cif'} against {tmp_path / 't.cif'}: no predicted chain resembles")


def test_a_prediction_of_ca_alone_is_scored(tmp_path: Path) -> None:
    chain = protein("A", 30, 1)
    mask = np.zeros_like(chain.mask)
    mask[:, CA] = 1
    row = measure(write_pair(tmp_path, replace(chain, mask=mask), chain)).row
    assert (row["lddt"], row["lddt_ca"], row["paired"]) == (None, 1.0, 30)


def test_named_chains_are_compared(tmp_path: Path) -> None:
    """Two copies of a chain would be mapped by position."""
    copies = [
        protein("A", 30, 1),
        replace(protein("B", 30, 1), positions=protein("B", 30, 1).positions + np.float32(30)),
    ]
    for name in ("p", "t"):
        (tmp_path / f"{name}.cif").write_text(write_mmcif(name, copies))
    job = Job(PredictedFile("p", tmp_path / "p.cif", "CASP", ("t",)), Truth("t", tmp_path / "t.cif"))
    assert measure(job).row["chains"] == {"A": "A", "B": "B"}
    row = measure(replace(job, options=Comparison(chains={"A": "B"}))).row
    assert row["chains"] == {"A": "B"}
    assert row["notes"][:2] == [
        "chains of the truth without a counterpart: A",
        "predicted chains without a counterpart: B",
    ]


WHOLE = protein("A", 40, 1)


def numbered(numbers: list[str]) -> Chain:
    return replace(WHOLE, author_numbers=tuple(numbers))


def shifted(by: int) -> Chain:
    return numbered([str(i + 1 + by) for i in range(40)])


OTHER_LETTERS = str.maketrans(RESTYPES, "".join("G" if letter == "A" else "A" for letter in RESTYPES))
BY_SEQUENCE = "residues are numbered differently in the truth and paired by sequence"


@pytest.mark.parametrize(
    ("predicted", "truth", "notes"),
    [
        (WHOLE, WHOLE, []),
        (WHOLE, shifted(1), ["the truth's residues are numbered 1 higher"]),
        (WHOLE, shifted(-5), ["the truth's residues are numbered 5 lower"]),
        (shifted(-60), shifted(-50), ["the truth's residues are numbered 10 higher"]),
        # Some numbers differ, and some have an insertion code or are missing.
        (WHOLE, numbered([str(i + 1 + i // 20) for i in range(40)]), [BY_SEQUENCE]),
        (WHOLE, numbered([f"{i + 2}A" if i == 7 else str(i + 2) for i in range(40)]), [BY_SEQUENCE]),
        (numbered([""] * 40), WHOLE, [BY_SEQUENCE]),
        (part(WHOLE, slice(0, 30)), WHOLE, ["residues of the truth that the prediction lacks: 10 of 40"]),
        (WHOLE, part(WHOLE, slice(0, 30)), ["predicted residues that the truth lacks, not scored: 10"]),
        (
            part(WHOLE, slice(0, 35)),
            part(WHOLE, slice(2, 40)),
            [
                "residues of the truth that the prediction lacks: 5 of 38",
                "predicted residues that the truth lacks, not scored: 2",
            ],
        ),
        (
            replace(
                WHOLE, sequence=WHOLE.sequence[:-2] + "".join("G" if x == "A" else "A" for x in WHOLE.sequence[-2:])
            ),
            WHOLE,
            ["other amino acids than in the truth: 2"],
        ),
    ],
)
def test_notes_on_the_pairing(predicted: Chain, truth: Chain, notes: list[str]) -> None:
    assert pairing_notes(pair(structure(predicted), structure(truth))) == notes


def test_notes_on_several_chains() -> None:
    reference = heterodimer()
    predicted = {"A": without(reference["A"], slice(0, 1)), "B": reference["B"]}
    other = [replace(protein(name, 20, 8), sequence=letter * 20) for name, letter in (("C", "K"), ("D", "W"))]
    both = pair(structure(*predicted.values(), other[0]), structure(*reference.values(), other[1]))
    assert pairing_notes(both) == [
        "chain A: residues of the truth that the prediction lacks: 1 of 40",
        "chains of the truth without a counterpart: D",
        "predicted chains without a counterpart: C",
    ]
    one = pair(structure(predicted["A"]), structure(reference["A"]))
    assert pairing_notes(one) == ["residues of the truth that the prediction lacks: 1 of 40"]
    assert int((predicted["A"].mask[:, CA] > 0).sum()) == 39
