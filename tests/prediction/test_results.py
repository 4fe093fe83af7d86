"""Test the files for people who read or publish results: archives of `--zip`, logs, reports, notices."""

import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.prediction.runs import contents, run_cli
from warpfold import cli, predict
from warpfold.errors import UserError
from warpfold.files import append_line
from warpfold.prediction import notices, pages
from warpfold.prediction.notices import Notice
from warpfold.prediction.outputs import file_names
from warpfold.prediction.pages import headline, prediction_report, target_of, warning_lines, write_archives
from warpfold.prediction.predictor import Predictor, Prepared
from warpfold.relaxation import amber
from warpfold.relaxation import files as relax_files
from warpfold.report.report import ReportPage, Warned

ONE, TWO = "MKTAYIAKQRQISFVKSH", "GSHMLEERLGL"
FIGURES = {f"_{name}.{form}" for name in ("plddt", "pae", "coverage") for form in ("png", "svg")}
FILES = {".cif", ".pdb", "_scores.json", *FIGURES}
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    path = tmp_path / "q.fasta"
    path.write_text(f">one\n{ONE}\n>two\n{TWO}\n")
    return path


def archived(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert {info.date_time[0] for info in archive.infolist()} == {1980}
        return {name: archive.read(name) for name in archive.namelist()}


def logged(out: Path) -> list[str]:
    """Read the messages of a log without their times."""
    lines = (out / "predict.log").read_text().splitlines()
    assert all(re.match(TIME, line) for line in lines)
    return [re.sub(TIME, "", line) for line in lines]


def test_an_archive_has_the_results_of_a_query(
    tmp_path: Path, fasta: Path, tiny_params: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = [fasta, "--params", tiny_params, "--out", out, "--recycles", 0, "--seeds", 2]
    _, said, _ = run_cli(capsys, *arguments)
    assert not list(out.rglob("*.zip"))
    (out / "one/notes.txt").write_text("mine")
    # The finished run only writes the archives.
    _, said, _ = run_cli(capsys, *arguments, "--zip")
    for name, other in (("one", "two"), ("two", "one")):
        path = out / name / f"{name}_results.zip"
        assert f"archive: {path}\n" in said
        files = archived(path)
        ranked = {f"{name}/{name}_rank_{rank}{ending}" for rank in (1, 2) for ending in FILES}
        assert files.keys() == {f"{name}/report.html", f"{name}/cite.bibtex", *ranked}
        for file in (f"{name}_rank_2.cif", f"{name}_rank_2.pdb", f"{name}_rank_1_scores.json"):
            assert files[f"{name}/{file}"] == (out / name / file).read_bytes()
        best = json.loads((out / "summary.json").read_text())["ranking"][name]["order"][0]["folder"]
        assert files[f"{name}/{name}_rank_1_plddt.svg"] == (out / best / f"{name}_plddt.svg").read_bytes()
        page = files[f"{name}/report.html"].decode()
        assert f"{name}, rank 2" in page
        assert f"{other}, rank 1" not in page
        assert re.search(r"<dt>residues</dt><dd>\d+</dd>.*<dt>chain</dt><dd>1</dd>.*<dt>alignment row</dt>", page)
    summary = json.loads((out / "summary.json").read_text())
    before = contents(out)
    write_archives(out, summary)
    assert contents(out) == before
    # Another run takes away the archives, too.
    predict(fasta, tiny_params, out, recycles=0, force=True)
    assert not list(out.rglob("*.zip"))
    assert (out / "one/notes.txt").read_text() == "mine"


def test_archives_of_single_and_of_dropped_predictions(tmp_path: Path, fasta: Path, tiny_params: Path) -> None:
    out = tmp_path / "out"
    predict(fasta, tiny_params, out, recycles=0, zip=True, figures=False)
    assert {Path(name).name for name in archived(out / "two/two_results.zip")} == {
        *("report.html", "cite.bibtex", "two.cif", "two.pdb", "two_scores.json"),
    }
    kept = predict(fasta, tiny_params, tmp_path / "kept", recycles=0, zip=True, keep="best:1")
    (best,) = (entry["name"] for entry in kept["predictions"] if entry["files"])
    assert [path.name for path in (tmp_path / "kept").rglob("*.zip")] == [f"{best}_results.zip"]
    # A prediction that is made again replaces its archive.
    (out / "one/one.cif").write_text("edited")
    predict(fasta, tiny_params, out, recycles=0, figures=False)
    assert [path.name for path in out.rglob("*.zip")] == ["two_results.zip"]


def test_relaxation_comes_before_the_archives_and_its_failures_are_logged(
    tmp_path: Path, fasta: Path, tiny_params: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def relax(target: relax_files.RelaxTarget, device: str) -> dict[str, Any]:
        if target.name == "two":
            raise UserError("two: cannot be relaxed")
        target.result(".pdb").write_text("relaxed")
        violations = {"residues": 1}
        report = {"energy_before": 1.0, "energy_after": 0.0, "ca_rmsd": 0.1}
        return report | {"violations_before": violations, "violations_after": violations}

    for module in (amber, relax_files):
        monkeypatch.setattr(module, "require_openmm", lambda: None)
    monkeypatch.setattr(relax_files, "relax_file", relax)
    out = tmp_path / "out"
    predict(fasta, tiny_params, out, recycles=0, figures=False, relax="all", zip=True)
    assert archived(out / "one/one_results.zip")["one/one_relaxed.pdb"] == b"relaxed"
    assert "Cα moved" in archived(out / "one/one_results.zip")["one/report.html"].decode()
    assert "two/two_relaxed.pdb" not in archived(out / "two/two_results.zip")
    assert logged(out)[-1] == "failed two: relaxation: two: cannot be relaxed"


def test_a_run_is_logged(
    tmp_path: Path,
    fasta: Path,
    tiny_params: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, compute = tmp_path / "out", Predictor.compute

    def failing(self: Predictor, prepared: Prepared, *args: Any) -> Any:
        if prepared.assembly.name == "two":
            raise RuntimeError("out of\nmemory")
        return compute(self, prepared, *args)

    monkeypatch.setattr(Predictor, "compute", failing)
    monkeypatch.setattr("sys.argv", ["warpfold", "predict", "a file.fasta"])
    arguments = [fasta, "--params", tiny_params, "--out", out, "--recycles", 0, "--batch", 1]
    assert run_cli(capsys, *arguments)[0] == 1
    lines = logged(out)
    assert re.fullmatch(r"WarpFold \S+, torch \S+, Python \S+: warpfold predict 'a file\.fasta'", lines[0])
    assert lines[1:3] == [
        "device cpu, precision fp32, 2 of 2 predictions to make",
        "precision: fp32 (auto, on cpu)",
    ]
    for line in (
        r"one \(\S+, seed 0\): 18 residues, 1 chain, 1 alignment row, mean pLDDT \S+, \S+ s",
        r"failed two \(\S+, seed 0\): RuntimeError: out of memory",
        "one, two: no alignment: folded by the sequence alone",
    ):
        assert len([one for one in lines if re.fullmatch(line, one)]) == 1, line
    assert re.fullmatch(r"failed: 1 predictions, 1 failures, \S+ s", lines[-1])
    monkeypatch.setattr(Predictor, "compute", compute)
    (out / "one/one.cif").write_text("edited")
    assert run_cli(capsys, *arguments)[0] == 0
    again = logged(out)[len(lines) :]
    assert again[1].endswith("one.cif: missing, or not what was written; it is predicted again")
    assert "device cpu, precision fp32, 2 of 2 predictions to make" in again
    assert sorted(line.split()[0] for line in again if " seed 0): " in line) == ["one", "two"]
    assert logged(out)[: len(lines)] == lines


def test_the_log_of_a_quiet_run_has_warnings_and_errors(
    tmp_path: Path, fasta: Path, tiny_params: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    run_cli(capsys, fasta, "--params", tiny_params, "--out", out, "--recycles", 0, "--quiet")
    lines = logged(out)
    assert "one, two: no alignment: folded by the sequence alone" in lines
    assert not [line for line in lines if line.startswith("WarpFold") or "device" in line or "mean pLDDT 0" in line]
    assert not [line for line in lines if "seed 0" in line]


def test_the_error_that_ends_a_run_is_logged_and_bad_input_writes_nothing(
    tmp_path: Path, fasta: Path, tiny_params: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError):
        predict(fasta, tiny_params, out, num_models=2)
    assert not out.exists()
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="something else"):
        predict(fasta, tiny_params, out, recycles=0)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    (out / "mine.txt").unlink()

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Predictor, "compute", stopped)
    with pytest.raises(KeyboardInterrupt):
        predict(fasta, tiny_params, out, recycles=0, batch=1)
    assert logged(out)[-1].startswith("stopped: KeyboardInterrupt")


def test_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "predict.log"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: append_line(path, f"{i} " + "x" * (i % 97)), range(800)))
    lines = logged(tmp_path)
    assert sorted(lines) == sorted(f"{i} {'x' * (i % 97)}".strip() for i in range(800))
    append_line(path, "two\nlines \x1b[31m\udc80")
    assert logged(tmp_path)[-1] == "two lines ?[31m?"
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "link.log").symlink_to(precious)
    for place in (tmp_path / "link.log", tmp_path / "none/predict.log", tmp_path):
        append_line(place, "lost")
    assert precious.read_text() == "mine"


def test_help_all_has_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    for option, there in (("--help", False), ("--help-all", True)):
        with pytest.raises(SystemExit):
            cli.main(["predict", option])
        assert ("--zip" in capsys.readouterr().out) == there


# ---- the report from a made-up summary

PLAIN = {"length": 4, "msa_depth": 1, "msa_given": 1, "mean_plddt": 71.26, "ptm": None, "sequence": "ACDE"}


def record(kind: str, **values: Any) -> dict[str, Any]:
    return Notice(kind, values).record()


def made(out: Path, name: str, files: Sequence[str] = ("arrays", "mmcif"), **more: Any) -> dict[str, Any]:
    """Write the files of a prediction with made-up contents; return its entry in the summary."""
    entry = PLAIN | {"name": name, "folder": name, "model": "m1", "seed": 0, "warnings": [], "templates_unused": 0}
    entry |= {"seconds": {"features": 0.25, "model": 1.5}, "templates": [], "ranking_confidence": 71.26} | more
    folder, names = out / str(entry["folder"]), file_names(name)
    folder.mkdir(parents=True, exist_ok=True)
    entry["files"] = {kind: names[kind] for kind in files}
    n = entry["length"]
    arrays = {"positions": np.arange(n * 111.0).reshape(n, 37, 3), "plddt": np.arange(float(n)), "pae": np.eye(n)}
    arrays |= {"coverage_depth": np.arange(n), "coverage_rows": np.ones((2, n)), "coverage_total": np.array(7)}
    for kind in files:
        if kind == "arrays":
            np.savez(folder / names[kind], **{key: arrays[key] for key in entry.pop("kept", arrays)})
        elif kind == "pae":
            (folder / names[kind]).write_text('[{"predicted_aligned_error": [], "max_predicted_aligned_error": 20.5}]')
        elif kind == "templates":
            (folder / names[kind]).write_text(json.dumps(entry.pop("outcomes")))
        else:
            (folder / names[kind]).write_text(f"{kind} of {entry['folder']}")
    return entry


def summary_of(*entries: dict[str, Any], failures: Sequence[dict[str, Any]] = (), **more: Any) -> dict[str, Any]:
    models = [{"file": f"{name}.npz", "sha256": f"digest of {name}"} for name in ("m1", "m2")]
    given = {"predictions": [*entries], "failures": [*failures], "input_warnings": {}, "models": models, "seconds": 9.6}
    given |= {"versions": {"warpfold": "7", "torch": "8"}, "settings": {"seed": 3, "seeds": 1}, "device": "cpu"}
    return given | more


def tables(page: ReportPage) -> dict[str, tuple[str, list[list[str]]]]:
    """Return the text and the table, with its header, of each section."""
    return {
        section.heading: (section.text, [[*row] for row in (section.table.header, *section.table.rows)])
        for section in page.sections
        if section.table is not None
    }


def test_the_report_of_one_protein(tmp_path: Path) -> None:
    """The warnings of the only prediction are at the head. Its table would repeat the numbers there."""
    outcomes = [
        {"name": "1abc_A", "used": True, "note": "close", "residues": 3, "identity": 0.756, "chains": []},
        {"name": "2xyz_B", "used": False, "note": "late", "residues": 0, "identity": 0.0, "chains": []},
    ]
    entry = made(
        tmp_path, "one", ("arrays", "mmcif", "pae", "templates", "pdb"), outcomes=outcomes, templates=["1abc_A"],
        templates_unused=1, ptm=0.456, warnings=[record("one_row")], msa_depth=1, msa_given=1200,
    )  # fmt: skip
    page = prediction_report(tmp_path, summary_of(entry, warnings=[{"text": "of the run"}]))
    assert (page.title, page.lead) == ("one", "Folded by WarpFold with m1.npz, m2.npz.")
    assert page.facts == [
        ("residues", "4"), ("chain", "1"), ("alignment rows", "1 of 1,200"), ("mean pLDDT", "71.3"), ("pTM", "0.46"),
        ("seconds in all", "10"),
    ]  # fmt: skip
    assert page.warnings == [
        Warned("of the run"),
        Warned("its alignment has one row, its own: folded by the sequence alone"),
    ]
    assert page.footer == [
        "WarpFold 7 · torch 8 · cpu · seed 3 · parameters sha256 digest of m1, digest of m2",
    ]
    assert tables(page) == {
        "Templates": (
            "NAME_templates.json in the protein's folder has the outcome of every template that was offered.",
            [
                ["protein", "template", "residues", "identity", "note"],
                ["one", "1abc_A", "3", "76%", "close"],
                ["one", "1 not used", "", "", ""],
            ],
        )
    }
    assert len(page.sections) == 1
    (target,) = page.targets
    assert (target.name, target.sequence, target.mmcif, target.max_pae) == ("one", "ACDE", "mmcif of one", 20.5)
    assert (target.has_pdb, target.chains, target.group, target.note) == (True, {}, "", "")
    assert (target.warnings, target.interfaces) == ([], [])
    assert target.numbers == [
        ("residues", "4"), ("mean pLDDT", "71.3"), ("pTM", "0.46"), ("alignment rows", "1 of 1,200"),
        ("templates", "1"),
    ]  # fmt: skip
    np.testing.assert_array_equal(target.ca, np.arange(4 * 111.0).reshape(4, 37, 3)[:, 1])
    np.testing.assert_array_equal(target.plddt, np.arange(4))
    np.testing.assert_array_equal(target.pae, np.eye(4))  # type: ignore[arg-type]
    assert target.coverage is not None
    assert (target.coverage.depth.tolist(), target.coverage.rows.tolist()) == ([0, 1, 2, 3], [[1] * 4] * 2)
    assert target.coverage.total == 7
    # With a failure, the page is about several proteins.
    page = prediction_report(tmp_path, summary_of(entry, failures=[{"name": "two", "error": "too long"}]))
    assert (page.title, page.targets[0].warnings) == ("Predicted structures", [record("one_row")["text"]])
    assert page.facts == [("proteins folded", "1"), ("failed", "1"), ("seconds in all", "10")]
    assert page.warnings == [Warned(record("one_row")["text"], {"one": ""})]
    assert tables(page)["Failed"] == ("", [["protein", "error"], ["two", "too long"]])
    assert tables(page)["All proteins"][1][1:] == [["one", "4", "1", "71.3", "0.46", "1.8", "1"]]


def test_the_report_of_ranked_complexes(tmp_path: Path) -> None:
    """Only the best prediction of a protein is in the table of proteins; all are in the ranking."""
    chains = [{"id": "A", "length": 3, "ptm": 0.5}, {"id": "B", "length": 1, "ptm": None}]
    ranked: dict[str, Any] = {"ranked": {"mmcif": "dimer/copy.cif"}, "msa_depth": 9, "msa_given": 9, "paired_rows": 2}
    ranked |= {"chains": chains, "together": 2, "pair_scores": []}
    interfaces = [{"chains": ["A", "B"], "iptm": None, "plddt": 66.66, "contacts": 12}]
    first = made(
        tmp_path, "dimer", folder="dimer/b", **ranked, rank=1, model="m2", seed=4, iptm=0.8, ptm=0.7,
        ranking_confidence=0.7777, interfaces=interfaces, warnings=[record("iptm_unsure", iptm=0.7)],
    )  # fmt: skip
    second = made(
        tmp_path, "dimer", ("arrays", "mmcif", "pdb"), folder="dimer/a", **ranked, rank=2, seed=3, iptm=0.1,
        ranking_confidence=0.1, kept=("positions", "plddt", "coverage_depth", "coverage_rows", "coverage_total"),
    )  # fmt: skip
    single = made(tmp_path, "single", ranked={"mmcif": "dimer/copy.cif"}, rank=1, msa_depth=2, msa_given=2)
    sixth = made(tmp_path, "single", folder="six", ranked={"mmcif": "dimer/copy.cif"}, rank=6)
    fifth = made(tmp_path, "single", folder="five", ranked={"mmcif": "dimer/copy.cif"}, rank=5)
    (tmp_path / "dimer/copy.cif").write_text("superposed")
    failure = {"name": "dimer", "model": "m1", "seed": 4, "error": "no"}
    ranking = {"dimer": {"by": "0.8 ipTM + 0.2 pTM"}, "single": {"by": "mean pLDDT"}}
    summary = summary_of(first, second, single, sixth, fifth, failures=[failure], ranking=ranking)
    summary["settings"] = {"seed": 3, "seeds": 2}
    summary["input_warnings"] = {"lost": [record("input", text="as given")], "dimer": []}
    page = prediction_report(tmp_path, summary)
    assert page.lead == "Folded by WarpFold with m1.npz, m2.npz, the best 4 drawn."
    assert page.facts == [("proteins folded", "2"), ("failed", "1"), ("seconds in all", "10")]
    assert "· seeds 3 to 4 ·" in page.footer[0]
    assert page.warnings == [
        Warned("as given", {"lost": ""}),
        Warned("ipTM 0.70, below 0.8: the interface may be right or wrong", {"dimer, rank 1": ""}),
    ]
    header = ["protein", "chains", "residues", "alignment rows", "mean pLDDT", "ipTM", "pTM", "seconds", "warnings"]
    assert tables(page) == {
        "All proteins": (
            "",
            [
                header,
                ["dimer, rank 1", "2", "4", "9", "71.3", "0.80", "0.70", "1.8", "1"],
                ["single, rank 1", "1", "4", "2", "71.3", "–", "–", "1.8", "0"],
            ],
        ),
        "Ranking": (
            "Best first, by 0.8 ipTM + 0.2 pTM or mean pLDDT.",
            [
                ["prediction", "model", "seed", "0.8 ipTM + 0.2 pTM", "mean pLDDT", "ipTM", "pTM"],
                ["dimer, rank 1", "m2", "4", "0.778", "71.3", "0.80", "0.70"],
                ["dimer, rank 2", "m1", "3", "0.100", "71.3", "0.10", "–"],
                ["single, rank 1", "m1", "0", "", "71.3", "–", "–"],
                ["single, rank 6", "m1", "0", "", "71.3", "–", "–"],
                ["single, rank 5", "m1", "0", "", "71.3", "–", "–"],
            ],
        ),
        "Failed": ("", [["protein", "error"], ["dimer (m1, seed 4)", "no"]]),
    }
    assert [target.name for target in page.targets] == [
        "dimer, rank 1", "dimer, rank 2", "single, rank 1", "single, rank 5",
    ]  # fmt: skip
    best, other, *_ = page.targets
    assert (best.mmcif, best.group, best.note) == ("superposed", "dimer", "rank 1: m2, seed 4")
    assert (best.chains, best.has_pdb, other.has_pdb) == ({"A": slice(0, 3), "B": slice(3, 4)}, False, True)
    assert best.interfaces == [["A-B", "–", "66.7", "12"]]
    assert best.warnings == ["ipTM 0.70, below 0.8: the interface may be right or wrong"]
    assert best.numbers == [
        ("residues", "4"), ("mean pLDDT", "71.3"), ("ipTM", "0.80"), ("pTM", "0.70"), ("pTM of each chain", "A 0.50"),
        ("alignment rows", "9"), ("paired rows", "2"), ("model", "m2"), ("seed", "4"),
    ]  # fmt: skip
    # The alignment of other ranks is the same. Without the file of the PAE there is no upper bound.
    assert (best.coverage is not None, other.coverage, other.pae, best.max_pae) == (True, None, None, 0.0)


@pytest.mark.parametrize("iptm", [{}, {"iptm": 0.5}])
def test_the_ranking_of_one_kind_has_its_columns(iptm: dict[str, float]) -> None:
    entry = PLAIN | {"name": "one", "model": "m1", "seed": 0, "ranking_confidence": 0.5} | iptm
    section = pages._ranking([entry], {"one": {"by": "mean pLDDT"}})
    assert section.table is not None
    columns = ["ipTM", "pTM"] if iptm else ["pTM"]
    assert section.table.header == ["prediction", "model", "seed", "mean pLDDT", *columns]
    assert section.table.rows == [["one", "m1", "0", "71.3", *(["0.50"] if iptm else []), "–"]]


def test_only_the_first_forty_predictions_with_files_are_drawn(tmp_path: Path) -> None:
    entry = made(tmp_path, "one")
    entries = [entry | {"name": f"p{i}"} for i in range(41)]
    page = prediction_report(tmp_path, summary_of(entries[0] | {"files": {}}, *entries[1:]))
    assert [target.name for target in page.targets] == [f"p{i}" for i in range(1, 41)]
    assert page.lead.endswith(", the first 40 drawn.")
    page = prediction_report(tmp_path, summary_of(*entries))
    assert [target.name for target in page.targets] == [f"p{i}" for i in range(40)]
    page = prediction_report(tmp_path, summary_of(*entries[:2]))
    assert page.lead == "Folded by WarpFold with m1.npz, m2.npz."
    assert [*tables(page)] == ["All proteins"]
    assert tables(page)["All proteins"][1] == [
        ["protein", "residues", "alignment rows", "mean pLDDT", "pTM", "seconds", "warnings"],
        ["p0", "4", "1", "71.3", "–", "1.8", "0"],
        ["p1", "4", "1", "71.3", "–", "1.8", "0"],
    ]
    nothing = prediction_report(tmp_path, summary_of(failures=[{"name": "two", "error": "too long"}], pairs=["A"]))
    assert (nothing.title, nothing.targets) == ("Predicted structures", [])
    assert [section.heading for section in nothing.sections] == ["Failed"]


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"length": 1, "msa_depth": 1}, "1 residue, 1 chain, 1 alignment row"),
        (
            {"length": 1345, "chains": [{}, {}], "msa_depth": 632, "msa_given": 1024},
            "1,345 residues, 2 chains, 632 of 1,024 alignment rows",
        ),
        ({"length": 2, "msa_depth": 1, "msa_given": 2}, "2 residues, 1 chain, 1 of 2 alignment rows"),
        ({"length": 2, "chains": [{}], "msa_depth": 1234}, "2 residues, 1 chain, 1,234 alignment rows"),
    ],
)
def test_the_headline_has_the_sizes(entry: dict[str, Any], text: str) -> None:
    assert headline(entry) == text


def test_the_tms_of_up_to_six_chains_are_shown(tmp_path: Path) -> None:
    chains = [{"id": name, "length": 1, "ptm": 0.1} for name in "ABCDEFG"]
    shown = {}
    for count in (1, 6, 7):
        entry = made(tmp_path, "one", chains=chains[:count], length=count)
        shown[count] = dict(target_of(tmp_path, entry, numbers=[("lDDT", "1")]).numbers)
        assert [*shown[count]][-1] == "lDDT"
    assert [shown[count].get("pTM of each chain") for count in shown] == [
        "A 0.10", "A 0.10, B 0.10, C 0.10, D 0.10, E 0.10, F 0.10", None,
    ]  # fmt: skip
    untested = made(tmp_path, "one", chains=[{"id": "A", "length": 4}])
    assert "pTM of each chain" not in dict(target_of(tmp_path, untested).numbers)
    assert target_of(tmp_path, entry, truth_mmcif="known").truth_mmcif == "known"


def test_relaxations_are_shown(tmp_path: Path) -> None:
    relaxed: dict[str, Any] = {"violations_before": {"residues": 7}, "violations_after": {"residues": 2}}
    relaxed |= {"energy_before": None, "energy_after": -1234.56, "ca_rmsd": 0.125}
    numbers = target_of(tmp_path, made(tmp_path, "one", relaxed=relaxed)).numbers
    assert numbers[-3:] == [
        ("relaxed: residues with violations", "7 → 2"),
        ("energy, kcal/mol", "infinite → -1235"),
        ("Cα moved, Å", "0.12"),
    ]


def test_the_time_is_plotted_for_ten_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []

    def draw(residues: Sequence[int], seconds: Mapping[str, Sequence[float]]) -> str:
        drawn.append((residues, seconds))
        return "<svg>"

    monkeypatch.setattr(pages.figures, "draw_seconds", draw)
    entries = [
        made(tmp_path, f"p{n}", (), length=n, seconds={"features": 0.5, "model": 0.25 * n}) for n in range(1, 11)
    ]
    processes = [
        {"computing": 6.0, "waiting_for_features": 3.0, "waiting_for_files": 1.0, "other": 9.0},
        {"computing": 2.0},
    ]
    page = prediction_report(tmp_path, summary_of(*entries, processes=processes))
    (section,) = (section for section in page.sections if section.heading == "Time")
    assert section.text == (
        "55 residues, 250 ms of the model each. Of 12 s in the last runs' loops the model computed 8 s and waited "
        "33.3%: 3.0 s for features, 1.0 s for files."
    )
    assert section.figures == [
        ("<svg>", "Each dot is a prediction; features are made while another one computes."),
    ]
    lengths = [*range(1, 11)]
    assert drawn == [(lengths, {"model": [0.25 * n for n in lengths], "features": [0.5] * 10})]
    entries[3]["together"] = 2
    page = prediction_report(tmp_path, summary_of(*entries))
    assert page.sections[-1].text == (
        "55 residues, 250 ms of the model each. Proteins that shared a pass share its seconds equally. "
    )
    page = prediction_report(tmp_path, summary_of(*entries, processes=[{}]))
    assert "loops" not in page.sections[-1].text
    page = prediction_report(tmp_path, summary_of(*entries[:9], entries[0], processes=processes))
    assert "Time" not in [section.heading for section in page.sections]


def test_pairs_are_a_symmetric_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []

    def draw(names: Sequence[str], matrices: Mapping[str, np.ndarray]) -> str:
        drawn.append((names, {title: np.nan_to_num(values, nan=-1).tolist() for title, values in matrices.items()}))
        return "<svg>"

    monkeypatch.setattr(pages.figures, "draw_pairs", draw)
    both = made(tmp_path, "a_and_b", (), iptm=0.5, scores={"ipsae": 0.25})
    own = made(tmp_path, "b_and_b", (), iptm=None)
    page = prediction_report(tmp_path, summary_of(both, own, pairs=["a", "b"]))
    first = page.sections[0]
    assert (first.heading, first.text) == ("All against all", "2 of 3 pairs of 2 chains. scores.csv has all numbers.")
    assert first.figures == [("<svg>", "Blank where a pair was not predicted.")]
    assert drawn == [(["a", "b"], {"ipTM": [[-1, 0.5], [0.5, -1]], "ipSAE": [[-1, 0.25], [0.25, -1]]})]
    page = prediction_report(tmp_path, summary_of(both | {"scores": {}}, pairs=["a", "b"]))
    assert [*drawn[-1][1]] == ["ipTM"]
    page = prediction_report(tmp_path, summary_of(own, pairs=["a", "b"]))
    assert (page.sections[0].figures, len(drawn)) == ([], 2)


def test_templates_of_complexes_have_their_chains(tmp_path: Path) -> None:
    outcomes = [{"name": "1abc_A", "used": True, "note": "", "residues": 3, "identity": 1, "chains": ["A", "B"]}]
    entry = made(tmp_path, "one", ("arrays", "mmcif", "templates"), outcomes=outcomes)
    page = prediction_report(tmp_path, summary_of(entry, made(tmp_path, "two")))
    assert tables(page)["Templates"][1][1:] == [["one", "1abc_A on A, B", "3", "100%", ""]]


def test_warnings_of_a_run_are_lines() -> None:
    entries = [{"name": "one", "warnings": [record("clashes", count=2)], "rank": 1},
               {"name": "one", "warnings": [record("clashes", count=5)], "rank": 2},
               {"name": "two", "warnings": [record("clashes", count=12)]}]  # fmt: skip
    given = {"predictions": entries, "input_warnings": {}, "warnings": [{"text": "of the run"}]}
    assert warning_lines(given) == [
        "warning: of the run",
        "one, two: clashes between atoms of different residues: 2 to 12",
    ]


def test_archives_are_reproducible_and_have_the_query_alone(tmp_path: Path) -> None:
    kinds = ("arrays", "mmcif", "pdb", "scores", "plddt", "pae_png", "coverage_svg", "relaxed_pdb", "relaxed_mmcif")
    one = made(tmp_path, "one", kinds)
    two = made(tmp_path, "two", rank=1, ranked={"mmcif": "two/two_rank_1.cif"})
    (tmp_path / "two/two_rank_1.cif").write_text("superposed")
    (tmp_path / "cite.bibtex").write_text("references")
    warned = {name: [record("input", text=f"about {name}")] for name in ("one", "two")}
    failures = [{"name": "two", "error": "failed later"}]
    dropped = made(tmp_path, "three", ())
    summary = summary_of(one, two, dropped, failures=failures, input_warnings=warned, pairs=["x"])
    write_archives(tmp_path, summary)
    assert sorted(path.name for path in tmp_path.rglob("*.zip")) == ["one_results.zip", "two_results.zip"]
    with zipfile.ZipFile(tmp_path / "one/one_results.zip") as archive:
        infos = archive.infolist()
        page = archive.read("one/report.html").decode()
        assert archive.read("one/one.pdb") == b"pdb of one"
    assert [info.filename for info in infos] == [
        f"one/{name}"
        for name in (
            "cite.bibtex", "one.cif", "one.pdb", "one_coverage.svg", "one_pae.png", "one_relaxed.cif",
            "one_relaxed.pdb", "one_scores.json", "report.html",
        )
    ]  # fmt: skip
    assert {info.date_time for info in infos} == {(1980, 1, 1, 0, 0, 0)}
    assert {(info.compress_type, info.external_attr) for info in infos} == {(zipfile.ZIP_DEFLATED, 0o644 << 16)}
    assert "about one" in page
    assert "about two" not in page
    assert "failed later" not in page
    with zipfile.ZipFile(tmp_path / "two/two_results.zip") as archive:
        assert "failed later" in archive.read("two/report.html").decode()
        assert archive.read("two/two_rank_1.cif") == b"superposed"


# ---- notices


@pytest.mark.parametrize(
    ("notice", "text"),
    [
        (Notice("input", {"text": "as given"}), "as given"),
        (Notice("pairing_rows", {"rows": 1234}), "rows of alignments for pairing (named uniprot or pair), not used for "
         "a single protein that has other rows: 1,234"),
        (Notice("unused_alignments", {"count": 2, "detail": "a, b"}),
         "alignments of none of the sequences, not used: 2 (a, b)"),
        (Notice("unused_alignments", {"count": 2, "detail": ""}), "alignments of none of the sequences, not used: 2"),
        (Notice("unused_alignments", {"count": 2}), "alignments of none of the sequences, not used: 2"),
        (Notice("rows_lost"), "no row of the alignment reached the model: folded by the sequence alone"),
        (Notice("disorder", {"share": 0.256}), "26% of the residues have a pLDDT below 50: they may be disordered and "
         "their positions have no meaning"),
    ],
)  # fmt: skip
def test_a_notice_survives_the_summary(notice: Notice, text: str) -> None:
    assert notice.text == text
    written = notice.record()
    assert written["text"] == text
    assert notices.of_record(written).record() == written
    values = {key: value for key, value in notice.values.items() if key != "text"}
    assert written.get("values", {}) == values
    assert ("values" in written) == bool(values)


def test_names_beyond_three_are_dots() -> None:
    assert [notices.shorten_list(["a", "b", "c", "d", "e"][:n]) for n in range(6)] == [
        "", "a", "a, b", "a, b, c", "a, b, c ...", "a, b, c ...",
    ]  # fmt: skip


def test_notices_are_merged_by_kind_and_words() -> None:
    def unused(count: int, detail: str) -> Notice:
        return Notice("unused_alignments", {"count": count, "detail": detail})

    def merged(*found: tuple[str, Notice]) -> list[tuple[str, dict[str, str]]]:
        return [(warned.said, dict(warned.about)) for warned in notices.each_kind_once(found)]

    same = "alignments of none of the sequences, not used: "
    # One protein: each notice is a sentence of its own.
    assert merged(("a", unused(2, "x")), ("a", unused(1, "y")), ("a", unused(2, "x"))) == [
        (f"{same}2 (x)", {"a": ""}),
        (f"{same}1 (y)", {"a": ""}),
    ]
    # Several: equal values stay in the sentence, others become a range, sorted as numbers.
    assert merged(("a", unused(2, "x")), ("b", unused(2, "x"))) == [(f"{same}2 (x)", {"a": "", "b": ""})]
    assert merged(("a", unused(2, "x")), ("b", unused(2, "y"))) == [(f"{same}2", {"a": "x", "b": "y"})]
    assert merged(("a", unused(10, "x")), ("b", unused(9, "x")), ("a", unused(30, "x"))) == [
        (f"{same}9 to 30 (x)", {"a": "10; 30", "b": "9"}),
    ]
    # Other words are another warning.
    assert merged(
        ("a", Notice("no_pdb", {"why": "long"})), ("b", Notice("no_pdb", {"why": "many"})), ("c", Notice("no_hits"))
    ) == [
        ("no PDB file: long", {"a": ""}),
        ("no PDB file: many", {"b": ""}),
        ("0 templates used: no hit for it in the files given", {"c": ""}),
    ]
    # A value that is known for one protein alone.
    assert merged(("a", unused(2, "x")), ("b", Notice("unused_alignments", {"detail": "x"}))) == [
        (f"{same}2 to  (x)", {"a": "2", "b": ""})
    ]
    assert merged() == []
