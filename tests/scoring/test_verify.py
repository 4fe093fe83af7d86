"""`warpfold verify`: what is compared with what, the means and their verdict, what fails and what is refused."""

import csv
import gzip
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import warpfold
from tests.data.entries import random_chain
from tests.data.search.alignment_server import serving as alignment_server
from tests.downloads import serving
from warpfold import cli
from warpfold.data.structure.mmcif import read_structure
from warpfold.data.structure.write import write_mmcif
from warpfold.data.synthetic.folder import generate
from warpfold.errors import UserError
from warpfold.scoring.manifest import Manifest, Published, Target, read_manifest, read_truths
from warpfold.scoring.score import score_files
from warpfold.scoring.verify import score_targets, verdict

HEAD = '[published]\nsource = "a paper"\nnote = "without templates"\nlddt_ca = {tiny = 0.5}\n[targets]\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sample proteins as the PDB has entries: other names of chains, numbers from 5, residues that nobody saw."""
    made = tmp_path_factory.mktemp("verify")
    generate(made / "sample", 2, 0)
    (made / "mmcif").mkdir()
    names = []
    for number, file in enumerate(sorted((made / "sample/mmcif").iterdir())):
        chain = read_structure(file).chains["A"]
        mask = chain.mask.copy()
        mask[3:6] = 0
        numbers = tuple(str(place + 5) for place in range(len(chain.sequence)))
        chain = replace(chain, id="BB", mask=mask, positions=chain.positions * mask[..., None], author_numbers=numbers)
        text = write_mmcif(f"9ab{number}", [chain], release_date="2021-10-20")
        (made / f"mmcif/9ab{number}.cif").write_text(text)
        names.append(f"9ab{number}_BB = {{released = 2021-10-20}}\n")
    (made / "list.toml").write_text(HEAD + "".join(names))
    return made


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["verify", "--device", "cpu", *map(str, arguments)])
    return int(stopped.value.code or 0), *capsys.readouterr()


def test_scores_are_those_of_score_and_hashes_those_of_the_files(
    tmp_path: Path, folder: Path, tiny_params: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, asked = tmp_path / "out", ("--params", tiny_params, "--structures", folder / "mmcif")
    asked = (*asked, "--targets", folder / "list.toml", "--msa", folder / "sample/msas", "--out", tmp_path / "out")
    code, said, _ = run(capsys, *asked, "--seeds", 2)
    assert code == 0
    found = json.loads((out / "verify.json").read_text())
    (model,) = found["models"]
    assert [(row["target"], row["seed"]) for row in found["targets"]] == [
        (f"9ab{i}_BB", seed) for i in (0, 1) for seed in (0, 1)
    ]
    for row in found["targets"]:
        pdb_id, place = row["target"][:4], f"{row['target']}/tiny_seed_{row['seed']}"
        (predicted,) = (out / "predictions" / place).glob("9ab?_BB.cif")
        one = score_files(predicted, folder / f"mmcif/{pdb_id}.cif")
        assert [row[key] for key in ("lddt_ca", "lddt", "gdt_ts", "tm")] == [one.lddt_ca, one.lddt, one.gdt_ts, one.tm]
        assert row["resolved"] == one.residues == row["residues"] - 3
        assert row["alignment_rows"] > 1
        alignment = folder / f"sample/msas/sample0000{pdb_id[-1]}_A.a3m"
        for key, file in (
            ("structure", folder / f"mmcif/{pdb_id}.cif"),
            ("prediction", predicted),
            ("alignment", alignment),
        ):
            assert row[f"{key}_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert model["lddt_ca"] == pytest.approx(np.mean([row["lddt_ca"] for row in found["targets"]]), abs=1e-12)
    assert model["sha256"] == hashlib.sha256(tiny_params.read_bytes()).hexdigest()
    assert found["manifest"]["sha256"] == hashlib.sha256((folder / "list.toml").read_bytes()).hexdigest()
    assert f"mean lDDT-Ca {model['lddt_ca']:.4f} over 2 targets of 2, 95% bootstrap interval" in said
    for text in (model["verdict"], "published: without templates", model["sha256"], found["manifest"]["sha256"]):
        assert text in said
    table = list(csv.DictReader((out / "verify.csv").open()))
    assert [row["prediction_sha256"] for row in table] == [row["prediction_sha256"] for row in found["targets"]]

    # The same command does nothing anew; another list is not mixed into it.
    before = (out / "predictions/summary.json").stat().st_mtime_ns, (out / "verify.json").read_bytes()
    assert run(capsys, *asked, "--seeds", 2)[0] == 0
    assert (out / "verify.json").read_bytes() == before[1]
    (tmp_path / "other.toml").write_text("[targets]\n9ab0_BB = {}\n")
    code, _, said = run(capsys, *asked, "--targets", tmp_path / "other.toml")
    assert (code, "holds the output of another run" in said) == (2, True)
    assert (out / "verify.json").read_bytes() == before[1]


def test_residues_correspond_by_their_places_in_seqres(tmp_path: Path) -> None:
    """Where a sequence repeats itself, the authors' numbers fit as well, and are of other residues."""
    predicted, truth = random_chain("A", "GS" * 20), random_chain("X", "GS" * 20, missing=range(30, 40), first=5)
    (tmp_path / "9abc_X.cif").write_text(write_mmcif("9abc_X", [predicted]))
    (tmp_path / "9abc.cif").write_text(write_mmcif("9abc", [truth]))
    naive = score_files(tmp_path / "9abc_X.cif", tmp_path / "9abc.cif")
    assert naive.paired == naive.residues == 30
    assert naive.lddt_ca < 0.9
    manifest = Manifest(tmp_path, "", "", "", Published(), [Target("9abc", "X")])
    truths = read_truths(manifest, tmp_path, lambda *told: None)
    entry = {"name": "9abc_X", "folder": ".", "files": {"mmcif": "9abc_X.cif"}, "model": "m", "seed": 0, "length": 40}
    entry |= {"mean_plddt": 50.0, "msa_given": 1, "templates": []}
    summary = {"predictions": [entry], "failures": []}
    (row,), failures = score_targets(tmp_path, summary, truths, {}, lambda *told: None)
    assert not failures
    assert (row["lddt_ca"], row["resolved"]) == (1.0, 30)


def test_what_fails_is_named_and_no_mean_is_silent_about_it(
    tmp_path: Path, folder: Path, tiny_params: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One residue has no distances to others; and without alignments nothing is compared."""
    chain = read_structure(folder / "mmcif/9ab0.cif").chains["BB"]
    mask = chain.mask.copy()
    mask[1:] = 0
    (tmp_path / "9ab2.cif").write_text(write_mmcif("9ab2", [replace(chain, mask=mask)]))
    (tmp_path / "9ab0.cif.gz").write_bytes(gzip.compress((folder / "mmcif/9ab0.cif").read_bytes()))
    (tmp_path / "list.toml").write_text(HEAD + "9AB0_BB = {}\n9ab2_BB = {}\n")
    asked = ("--params", tiny_params, "--targets", tmp_path / "list.toml", "--structures", tmp_path)
    code, said, warned = run(capsys, *asked, "--out", tmp_path / "out")
    assert code == 1
    assert "failed 9ab2_BB: no two Ca of its structure are near enough to be scored" in warned
    assert "no alignments: this mean will not be comparable" in warned
    assert "published 0.5000: too few targets for an interval; NOT comparable: 1 of 2 targets are not in this" in said
    assert "1 were folded without an alignment" in said
    (row,) = json.loads((tmp_path / "out/verify.json").read_text())["targets"]
    assert (row["target"], row["alignment_sha256"]) == ("9ab0_BB", None)
    digest = hashlib.sha256((folder / "mmcif/9ab0.cif").read_bytes()).hexdigest()
    assert row["structure_sha256"] == digest  # of what is in the .gz


def test_structures_are_fetched_if_asked_and_what_is_there_is_kept(
    tmp_path: Path, folder: Path, tiny_params: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = {
        f"pdb/{name}.cif.gz": gzip.compress((folder / f"mmcif/{name}.cif").read_bytes()) for name in ("9ab0", "9ab1")
    }
    (tmp_path / "list.toml").write_text((folder / "list.toml").read_text() + "9ab7_A = {}\n")
    asked = ("--params", tiny_params, "--structures", tmp_path / "new/mmcif", "--out", tmp_path / "out", "--fetch")
    asked = (*asked, "--msa", folder / "sample/msas")
    with serving(there) as server:
        mirror = ("--from", f"{server.url}/pdb")
        code, _, error = run(capsys, *asked, *mirror, "--targets", tmp_path / "list.toml")
        assert (code, "1 of 3 targets cannot be used: 9ab7_A: " in error) == (2, True)
        assert run(capsys, *asked, *mirror, "--targets", folder / "list.toml")[0] == 0
        assert [path for path, _ in server.asked] == [f"/pdb/9ab{i}.cif.gz" for i in (0, 1, 7)]
    rows = json.loads((tmp_path / "out/verify.json").read_text())["targets"]
    assert [row["target"] for row in rows] == ["9ab0_BB", "9ab1_BB"]
    assert run(capsys, *asked, "--targets", folder / "list.toml")[0] == 0  # nothing is lacking, so nothing is asked


def test_alignments_of_a_server_are_named_by_their_hashes(
    tmp_path: Path, folder: Path, tiny_params: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    asked = {"targets": folder / "list.toml", "params": tiny_params, "structures": folder / "mmcif", "device": "cpu"}
    given = folder / "sample/msas/sample00000_A.a3m"
    with alignment_server() as server:
        found = warpfold.verify(**asked, msa=given, msa_server=server.url, out=tmp_path / "out")
    first, second = found["targets"]
    assert first["alignment_sha256"] == hashlib.sha256(given.read_bytes()).hexdigest()
    kept = [*(tmp_path / "out/predictions/alignments").glob("*/*.a3m")]
    first_uniref = sorted(kept, key=lambda file: file.name != "uniref.a3m")  # as they are stacked
    joined = b"".join(file.read_bytes() for file in first_uniref)
    assert len(kept) == 2
    assert second["alignment_sha256"] == hashlib.sha256(joined).hexdigest()
    assert second["alignment_rows"] > 1
    assert found["msa_server"] == server.url
    assert found["models"][0]["without_alignment"] == 0


def test_verdicts() -> None:
    published = Published(lddt_ca={"p": 0.9})
    found = {"name": "p", "lddt_ca": 0.85, "scored": 5, "without_alignment": 0, "published": 0.9}
    for span, said in (
        ((0.8, 0.95), "published 0.9000 lies within the interval"),
        ((0.8, 0.89), "published 0.9000 lies outside the interval: this mean is 0.0500 lower"),
        ((0.91, 0.95), "published 0.9000 lies outside the interval: this mean is 0.0500 lower"),
        (None, "published 0.9000: too few targets for an interval"),
    ):
        assert verdict(found | {"interval": span}, published, 5) == said
    some = found | {"interval": (0.8, 0.95), "scored": 4, "without_alignment": 2}
    assert verdict(some, published, 5).endswith(
        "; NOT comparable: 1 of 5 targets are not in this mean, 2 were folded without an alignment"
    )
    other = found | {"interval": (0.8, 0.95), "name": "q", "published": None}
    assert verdict(other, published, 5) == "nothing to compare with: published of p, not of q"


# What is in a list of targets, and what is said of it.
LISTS = {
    "": "is empty",
    "[targets]\n": "has no targets",
    'title = "t"\n': "has no targets",
    "[targets\n": "not valid TOML",
    "[targets]\n9ab0_BB = {}\n9ab0_BB = {}\n": "not valid TOML",
    "[targets]\n9ab0_BB = {}\n9AB0_BB = {}\n": "9ab0_BB and 9ab0_BB are one name",
    "[targets]\n9ab0 = {}\n": "9ab0 is no target; write PDB id, _ and the authors' chain name: 7abc_A",
    "[targets]\n9ab0_BB = {release = 2021-10-20}\n": "did you mean targets.9ab0_BB.released?",
    '[targets]\n9ab0_BB = {released = "soon"}\n': "a date",
    "[targets]\n9ab0_BB = {released = 2021-10-21}\n": "was released on 2021-10-20, not on 2021-10-21 as listed",
    '[targets]\n9ab0_BB = {sha256 = "0"}\n': "not what is listed; fetch the version that was meant",
    "[targets]\n9ab0_A = {}\n": "no protein chain A; by their authors' names it has BB",
    "[targets]\n9ab0_BB = {}\n9ab7_A = {}\n": "1 of 2 targets cannot be used: 9ab7_A: ",
    "[targets]\n9ab1_BB = {}\n": "--msa: has no alignment for 9ab1_BB",
    "[published]\nlddt_ca = {p = true}\n[targets]\n9ab0_BB = {}\n": "published.lddt_ca.p = true: a number expected",
}


@pytest.mark.parametrize("text", LISTS)
def test_bad_lists_are_refused_before_anything_is_written(
    text: str, tmp_path: Path, folder: Path, tiny_params: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "list.toml"
    path.write_text(text)
    asked = ("--params", tiny_params, "--targets", path, "--structures", folder / "mmcif", "--out", tmp_path / "out")
    code, said, error = run(capsys, *asked, "--msa", folder / "sample/msas/sample00000_A.a3m")
    assert (code, said) == (2, "")
    assert error.startswith("error: ")
    assert LISTS[text] in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_and_a_file_of_another_entry_are_refused(
    tmp_path: Path, folder: Path, tiny_params: Path
) -> None:
    asked = {"targets": folder / "list.toml", "params": tiny_params, "device": "cpu"}
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("")
    with pytest.raises(UserError, match=r"holds thesis.tex, which WarpFold did not write"):
        warpfold.verify(**asked, structures=folder / "mmcif", out=tmp_path / "out")
    (tmp_path / "mmcif").mkdir()
    for name in ("9ab0", "9ab1"):
        (tmp_path / f"mmcif/{name}.cif").write_bytes((folder / "mmcif/9ab0.cif").read_bytes())
    with pytest.raises(UserError, match=r"1 of 2 targets cannot be used: 9ab1_BB: .*9ab1.cif: is of entry 9ab0"):
        warpfold.verify(**asked, structures=tmp_path / "mmcif", out=tmp_path / "new")
    with pytest.raises(UserError, match=r"--from: has no effect without fetch"):
        warpfold.verify(**asked, structures=folder / "mmcif", out=tmp_path / "new", source=tmp_path)


def test_the_list_that_comes_along_is_whole() -> None:
    manifest = read_manifest(Path("cameo2022"))
    assert len(manifest.targets) == len({target.name for target in manifest.targets}) == 183
    assert Target("7whf", "G") in manifest.targets


def test_an_obsolete_entry_is_not_silently_another_one(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "9ab1.cif").write_bytes((folder / "mmcif/9ab1.cif").read_bytes())
    (tmp_path / "obsolete.dat").write_text("OBSLTE    26-SEP-06 9AB0     9AB1\n")
    manifest = Manifest(tmp_path, "", "", "", Published(), [Target("9ab0", "BB")])
    with pytest.raises(UserError, match="the PDB has replaced this entry by 9ab1"):
        read_truths(manifest, tmp_path, lambda *told: None)
