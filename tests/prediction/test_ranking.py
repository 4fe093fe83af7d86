"""Test ranking and its scores: interfaces of complexes, contacts, geometry across chains."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import gemmi
import numpy as np
import pytest

from tests.prediction.runs import contents
from tests.training.runs import helix
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.mmcif import parse_structure
from warpfold.data.structure.write import move_atoms
from warpfold.errors import UserError
from warpfold.prediction.folder import copy_by_rank, rank_predictions
from warpfold.prediction.outputs import Prediction, write_prediction
from warpfold.prediction.sanity import check_geometry, confidence_notices
from warpfold.scoring import metrics
from warpfold.scoring.dockq import residue_pairs


def entry(name: str, model: str, plddt: float, score: float, **more: Any) -> dict[str, Any]:
    given = {"name": name, "model": model, "seed": 0, "folder": f"{name}/{model}", "mean_plddt": plddt}
    return given | {"ranking_confidence": score} | more


def helices(count: int, apart: float, ids: tuple[str, ...] | None = None) -> Prediction:
    """Build a prediction of parallel helices: one chain of 10 residues each, at this distance in angstrom."""
    raw = helix("one", 10, 0)
    assert raw.positions is not None
    assert raw.mask is not None
    move = np.zeros((count, 1, 1, 3), np.float32)
    move[:, 0, 0, 0] = apart * np.arange(count)
    mask = np.tile(raw.mask, (count, 1)).astype(np.float32)
    return Prediction(
        name="helices",
        sequence=raw.sequence * count,
        positions=(raw.positions + move).reshape(-1, 37, 3) * mask[..., None],
        mask=mask,
        plddt=np.arange(10.0 * count, dtype=np.float32),
        pae=np.zeros((10 * count, 10 * count), np.float32),
        max_pae=31.75,
        ptm=0.5,
        chain_ids=ids or tuple(f"C{i}" for i in range(count)),
        asym_id=np.repeat(np.arange(count, dtype=np.int32) + 1, 10),
        iptm=0.25,
        chain_pair_iptm=np.full((count, count), 0.75, np.float32),
    )


def test_complexes_are_ranked_by_tm_and_chains_by_plddt() -> None:
    entries = [
        entry("dimer", "a", 90, 0.2, iptm=0.2),
        entry("dimer", "b", 50, 0.7, iptm=0.7),
        entry("one", "a", 60, 60.0),
        entry("one", "b", 70, 70.0),
    ]
    ranked, ranking = rank_predictions(entries)
    assert [(e["name"], e["model"], e["rank"]) for e in ranked] == [
        ("dimer", "b", 1),
        ("dimer", "a", 2),
        ("one", "b", 1),
        ("one", "a", 2),
    ]
    assert [ranking[name]["by"] for name in ("dimer", "one")] == ["0.8 ipTM + 0.2 pTM", "mean pLDDT"]
    again, _ = rank_predictions(ranked[::-1])
    assert [e["folder"] for e in again[2:]] == [e["folder"] for e in ranked[:2]]


def test_where_a_model_says_no_iptm_all_are_ranked_by_plddt() -> None:
    entries = [entry("dimer", "a", 90, 0.2, iptm=0.2), entry("dimer", "b", 50, 50.0, iptm=None)]
    ranked, ranking = rank_predictions(entries)
    assert [(e["model"], e["ranking_confidence"]) for e in ranked] == [("a", 90), ("b", 50)]
    assert ranking["dimer"]["by"] == "mean pLDDT"


def test_contacts_are_those_of_all_distances() -> None:
    rng = np.random.default_rng(0)
    sizes = (13, 9)
    one, other = (rng.normal(0, 12, (n, 37, 3)) for n in sizes)
    masks = [rng.permuted(np.tile(np.arange(37) < 8, (n, 1)), axis=1) for n in sizes]
    masks[0][4] = False  # a residue without atoms
    distance = np.linalg.norm(one[:, :, None, None] - other[None, None], axis=-1)
    distance[~(masks[0][:, :, None, None] & masks[1][None, None])] = np.inf
    expected = np.argwhere(distance.min((1, 3)) <= 8)
    chains = [
        Chain(name, "A" * n, positions, mask.astype(np.float32), np.arange(n), ("",) * n)
        for name, n, positions, mask in zip("AB", sizes, (one, other), masks)
    ]
    assert 0 < len(expected) < 13 * 9
    np.testing.assert_array_equal(residue_pairs(*chains, masks[0], masks[1], 8.0).indices, expected)


def test_interfaces_are_where_chains_meet() -> None:
    first, apart, second = helices(3, 9.0).pair_scores
    assert (first.chains, second.chains) == (("C0", "C1"), ("C1", "C2"))
    assert first.contacts == second.contacts > apart.contacts == 0
    assert first.iptm == 0.75
    # All residues of both chains are in the interface; their pLDDT is 0 to 19.
    assert first.interface_plddt == pytest.approx(9.5)


def test_a_chain_ends_where_the_next_begins() -> None:
    p = helices(2, 10.0)
    assert check_geometry(p.positions, p.mask, p.asym_id).chain_breaks == 0
    assert check_geometry(p.positions, p.mask).chain_breaks == 1
    touching = helices(2, 10.0)
    # Move the N atoms of the second chain so that the first of them coincides with the last C of the first chain.
    touching.positions[10:, 0] += touching.positions[9, 2] - touching.positions[10, 0]
    apart = check_geometry(touching.positions, touching.mask, touching.asym_id).clashes
    assert apart == check_geometry(touching.positions, touching.mask).clashes + 1


def test_what_pdb_cannot_hold_is_said(tmp_path: Any) -> None:
    """Chain names of several letters, and more than 62 chains, are written only to mmCIF."""
    kept = write_prediction(helices(2, 10.0), tmp_path)
    assert "pdb" not in kept["files"]
    assert (
        "no PDB file: chain name 'C0' is not one letter or digit; the PDB format cannot hold it"
        in kept["warnings"][0]["text"]
    )
    kept = write_prediction(helices(63, 10.0), tmp_path / "many")
    assert kept["warnings"][0]["text"].startswith("no PDB file: 63 chains, more than 62;")
    assert [chain["id"] for chain in kept["chains"]][-1] == "C62"
    assert "pdb" in write_prediction(helices(2, 10.0, ("A", "b")), tmp_path / "letters")["files"]
    with pytest.raises(UserError, match="63 chains"):
        helices(63, 10.0).pdb()


@pytest.mark.parametrize(
    ("plddt", "ptm", "iptm", "words"),
    [
        ([90] * 4, 0.9, None, []),
        ([69] * 4, 0.9, None, ["low confidence: mean pLDDT 69.0, below 70"]),
        ([49] * 4, None, None, ["very low confidence: mean pLDDT 49"]),
        ([49, 95, 95, 95], None, None, ["25% of the residues"]),
        ([90] * 31, 0.49, None, ["pTM 0.49, below 0.5"]),
        # The protein is too short for a meaningful pTM.
        ([90] * 30, 0.1, None, []),
        ([90] * 4, 0.9, 0.79, ["ipTM 0.79, below 0.8: the interface may be right or wrong"]),
        ([90] * 4, 0.3, 0.59, ["ipTM 0.59, below 0.6: the interface is probably wrong"]),
        ([90] * 4, 0.9, 0.81, []),
    ],
)
def test_doubts_are_said(plddt: list[float], ptm: float | None, iptm: float | None, words: list[str]) -> None:
    found = confidence_notices(np.array(plddt, np.float32), ptm, iptm)
    assert len(found) == len(words)
    assert all(notice.text.startswith(word) for notice, word in zip(found, words))


@pytest.mark.parametrize(
    ("plddt", "ptm", "iptm", "found"),
    [
        ([70] * 4, None, None, []),
        ([69.5] * 4, None, None, [("plddt_low", {"mean_plddt": 69.5})]),
        ([50] * 4, None, None, [("plddt_low", {"mean_plddt": 50})]),
        ([49.5] * 4, None, None, [("plddt_very_low", {"mean_plddt": 49.5})]),
        ([49, 51, 50, 50], None, None, [("plddt_low", {"mean_plddt": 50}), ("disorder", {"share": 0.25})]),
        ([49, 90, 90, 90, 90], None, None, []),
        ([50, 50, 90, 95], None, None, []),
        ([90] * 31, 0.5, None, []),
        ([90] * 31, 0.49, None, [("ptm_low", {"ptm": 0.49})]),
        ([90] * 31, 0.1, 0.8, []),
        ([90] * 31, None, 0.79, [("iptm_unsure", {"iptm": 0.79})]),
        ([90] * 31, None, 0.6, [("iptm_unsure", {"iptm": 0.6})]),
        ([90] * 31, None, 0.59, [("iptm_low", {"iptm": 0.59})]),
    ],
)
def test_doubts_begin_below_the_limits(
    plddt: list[float], ptm: float | None, iptm: float | None, found: list[tuple[str, dict[str, float]]]
) -> None:
    notices = confidence_notices(np.array(plddt, np.float32), ptm, iptm)
    assert [(notice.kind, dict(notice.values)) for notice in notices] == found


@pytest.mark.parametrize("plddt", [95.0, 30.0])
def test_ranked_copies_are_superposed_on_the_best(tmp_path: Path, plddt: float) -> None:
    """The confident residues decide; without any, all residues do. Confidences and the predictions' own files stay."""
    rng, best = np.random.default_rng(0), helices(2, 10.0, ("A", "b"))
    entries = []
    for rank in range(1, 4):
        rotation = np.linalg.qr(rng.normal(size=(3, 3)))[0]
        rotation *= np.linalg.det(rotation)
        positions = best.positions.copy()
        if plddt > 70:
            positions[:5] += 60 * rng.normal(size=3)  # an end that is not confident
        positions = (positions @ rotation.T + 40 * rng.normal(size=3)) * best.mask[..., None]
        # The best prediction is confident of its end, the others are not.
        values = np.where((np.arange(20) < 5) & (rank > 1), 30.0, plddt).astype(np.float32)
        made = replace(best, name="one", positions=positions.astype(np.float32), plddt=values)
        made = replace(made, details={"model": f"model_{rank}", "seed": rank, "recycles": 3})
        entries.append(write_prediction(made, tmp_path, str(rank)) | {"rank": rank})
    before = contents(tmp_path)
    ranked = copy_by_rank(tmp_path, entries)
    after = contents(tmp_path)
    assert {name: after[name] for name in before} == before
    assert copy_by_rank(tmp_path, ranked) == ranked
    assert contents(tmp_path) == after
    compared = slice(5 if plddt > 70 else 0, 20)
    for kind, number in product(("mmcif", "pdb"), (2, 3)):
        first, own, moved = (
            parse_structure((tmp_path / path).read_bytes())
            for path in (
                ranked[0]["ranked"][kind],
                f"{entries[number - 1]['folder']}/{entries[number - 1]['files'][kind]}",
                ranked[number - 1]["ranked"][kind],
            )
        )
        ca = [np.concatenate([c.positions[:, 1] for c in s.chains.values()])[compared] for s in (first, own, moved)]
        np.testing.assert_allclose(ca[2], ca[0], atol=0.003)
        assert np.abs(ca[1] - ca[0]).max() > 1
        for chain in own.chains:
            assert metrics.rmsd(own.chains[chain].positions[:, 1], moved.chains[chain].positions[:, 1]) < 0.002
        # Without the coordinates and confidences, the texts are equal.
        texts = [
            (tmp_path / path).read_text() for path in (ranked[0]["ranked"][kind], ranked[number - 1]["ranked"][kind])
        ]
        bare = [re.sub(r"-?\d+\.\d{2,3}(?!\d)", "", text).replace(" ", "") for text in texts]
        assert bare[0].replace("model_1", f"model_{number}").replace("seed:1", f"seed:{number}") == bare[1]


def test_an_atom_that_moves_beyond_the_columns_of_pdb() -> None:
    text, still, far = helices(1, 10.0, ("A",)).pdb(), np.eye(3), np.array([0, 0, 9999.0])
    assert move_atoms(text, still, np.zeros(3)) == text.replace("-0.000", " 0.000")
    with pytest.raises(UserError, match=r"beyond eight columns.*Write mmCIF\."):
        move_atoms(text, still, far)
    mmcif = parse_structure(move_atoms(helices(1, 10.0, ("A",)).mmcif(), still, far).encode())
    assert mmcif.chains["A"].positions.max() > 9990


def test_the_model_and_the_seed_are_in_both_structure_files() -> None:
    """REMARK 250 of PDB and the protocol of mmCIF have them. Long names and letters beyond ASCII fit the columns."""
    made = replace(helices(2, 10.0, ("A", "b")), details={"model": "m" * 99 + "é", "seed": 12, "recycles": 3})
    structure, lines = gemmi.read_pdb_string(made.pdb()), made.pdb().splitlines()
    assert structure.raw_remarks == [line for line in lines if line.startswith("REMARK 250 ")]
    assert max(map(len, lines)) == 80
    text = " ".join(line[11:] for line in structure.raw_remarks)
    assert text.startswith("Predicted by WarpFold ")
    assert "recycles: 3 model: " in text
    assert text.replace(" ", "").endswith(f"{'m' * 99}_seed:12")
    assert {chain: one.sequence for chain, one in parse_structure(made.pdb().encode()).chains.items()} == {
        chain: made.sequence[span] for chain, span in made.spans.items()
    }
    (step,) = gemmi.cif.read_string(made.mmcif())[0].find("_ma_protocol_step.", ["details"])
    assert step.str(0) == f"recycles: 3; model: {'m' * 99}_; seed: 12"
    assert "model: \n" not in replace(made, details={}).pdb()


def test_copies_of_what_was_thinned_go(tmp_path: Path) -> None:
    entries = []
    for rank, model in enumerate("ab", 1):
        folder = tmp_path / "one" / model
        folder.mkdir(parents=True)
        files = {"mmcif": "one.cif", "scores": "one_scores.json"}
        for name in files.values():
            (folder / name).write_text(f"{model} {name}")
        np.savez(folder / "one.npz", positions=np.ones((4, 37, 3)), mask=np.ones((4, 37)), plddt=np.ones(4))
        entries.append(entry("one", model, 90 - rank, 90 - rank, rank=rank, files=files | {"arrays": "one.npz"}))
    ranked = copy_by_rank(tmp_path, entries)
    (tmp_path / "one" / "notes_scores.json").write_text("mine")
    assert ranked[1]["ranked"] == {"mmcif": "one/one_rank_2.cif", "scores": "one/one_rank_2_scores.json"}
    # The former best prediction is second now and has no scores file any more.
    thinned = {"mmcif": "one.cif", "arrays": "one.npz"}
    swapped = [ranked[1] | {"rank": 1}, ranked[0] | {"rank": 2, "files": thinned}]
    again = copy_by_rank(tmp_path, swapped)
    assert [one["ranked"].get("scores") for one in again] == ["one/one_rank_1_scores.json", None]
    found = {path.name: path.read_text() for path in (tmp_path / "one").iterdir() if path.is_file()}
    assert found == {
        "one_rank_1.cif": "b one.cif",
        "one_rank_2.cif": "a one.cif",
        "one_rank_1_scores.json": "b one_scores.json",
        "notes_scores.json": "mine",
    }
