"""Run the tutorials: every command, file and Python block of a page, in order, in one empty folder.

The tests reduce the steps and proteins of a page; `slow` runs every page unchanged.  Pages that download parameters or
ask an alignment server run with stand-ins for both.
"""

import re
import shlex
from pathlib import Path

import pytest

from tests.data.example.test_hits import hhr
from tests.data.search.alignment_server import serving
from tests.prediction.runs import write_entry
from tests.published import write_archive, write_like
from tests.test_cli import run
from warpfold.data.synthetic.folder import generate
from warpfold.prediction.published import SETS

DOCS = Path(__file__).parents[1] / "docs"
DOWNLOADING = [DOCS / "howto" / "migrate.md", DOCS / "tutorials" / "first_protein.md"]
PAGES = sorted({*(DOCS / "tutorials").glob("*.md")} - {*DOWNLOADING})
# Replacements of text on the pages: smaller amounts that still show that a page runs.
FEW = {
    "--proteins 60": "--proteins 6",
    "--proteins 40": "--proteins 6",
    "--proteins 20": "--proteins 12",
    "--dimers 20": "--dimers 4",
    "--set train.steps=400": "--set train.steps=2",
    "--set train.steps=120": "--set train.steps=2",
    "--set train.steps=20 ": "--set train.steps=2 ",
    "--steps 40": "--steps 2",
    "validation_examples=4": "validation_examples=1",
}
SMALLER = ("model.c_m=8", "model.c_z=8", "model.c_s=8", "model.evoformer.blocks=1", "model.structure.layers=1")


def parts(text: str) -> list[tuple[str, str, str]]:
    """Return the blocks of a page: language, file name in the sentence before it, and content.

    Blocks of text without a file name are left out.
    """
    found = re.findall(r"([^\n]*)\n\n?```(\w+)\n(.*?)^```", text, flags=re.M | re.S)
    named = [(language, "".join(re.findall(r"as `([\w.]+)`", before)), content) for before, language, content in found]
    return [one for one in named if one[0] != "text" or one[1]]


def follow(text: str, capsys: pytest.CaptureFixture[str], extra: tuple[str, ...] = ()) -> str:
    """Run all blocks of a page in the current folder, and return the printed text."""
    said = []
    names: dict[str, object] = {"__name__": "__main__"}
    for language, name, content in parts(text):
        if language in ("toml", "text", "yaml", "json"):
            assert name, content
            Path(name).write_text(content)
        elif language == "python":
            exec(compile(content, "tutorial", "exec"), names)
            said.append(capsys.readouterr().out)
        else:
            for line in content.replace("\\\n", " ").splitlines():
                program, *arguments = shlex.split(line, comments=True)
                if program == "pip":
                    continue
                assert program == "warpfold", line
                changes = [word for change in extra for word in ("--set", change)] if arguments[0] == "train" else []
                code, out, err = run(capsys, *arguments, *changes)
                assert code == 0, f"{line}: {err}"
                said.append(out + err)
    return "\n".join(said)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_runs_on_a_small_scale(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    for much, little in FEW.items():
        text = text.replace(much, little)
    assert follow(text, capsys, SMALLER)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_runs_as_it_is(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    said = follow(text, capsys)
    for block in re.findall(r"^```text\n(.*?)^```", text, flags=re.M | re.S):
        assert block.strip() in said


def test_what_is_made_small_is_on_the_pages() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert not [much for much in FEW if much not in text]


def test_the_page_of_designs_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Use stand-ins for published parameters, short chains, one start and a stage of two steps."""
    monkeypatch.chdir(tmp_path)
    for name in ("model_1_ptm", "model_1_multimer_v3"):
        write_like(name, Path())
    write_entry(Path("fold.cif"), {"A": "MKTAYIAKQR"}, "2010-01-01")
    Path("designs").mkdir()
    write_entry(Path("designs/one.cif"), {"A": "MKTAYIAKQR", "B": "MQIFVKTLTG"}, "2010-01-01")
    text = (DOCS / "howto/design.md").read_text(encoding="utf-8")
    for much, little in (
        ("chains.A=100 --starts 10", "chains.A=8"),
        ("chains.B=80", "chains.B=6"),
        ('"A,B" = 40', '"A,B" = 5'),
    ):
        assert much in text
        text = text.replace(much, little)
    text = re.sub(r"^(warpfold design .*)", r"\1 --set stages=[{steps=2,hard=1.0}]", text, flags=re.M)
    said = follow(text, capsys)
    assert said.count("report.html") == 8
    assert "a gradient" in said or "700 residues" in said or "100 residues" in said


def openfold_folders() -> None:
    """Write an OpenFold user's files: FASTA files, alignments and hits by protein, PDB entries, parameters."""
    generate(Path("made"), 6, max_length=40)
    for name in ("fasta_dir", "template_mmcif", "mmcifs"):
        Path(name).mkdir()
    for path in sorted(Path("made/msas").glob("*.a3m")):
        query = path.read_text().splitlines()[1]
        Path(f"fasta_dir/{path.stem}.fasta").write_text(f">{path.stem}\n{query}\n")
        hits = hhr([(0, query, 0, query[::-1])]).replace("Match_columns 33", f"Match_columns {len(query)}")
        for folder in ("alignments", "training_alignments"):
            into = Path(folder, path.stem)
            into.mkdir(parents=True)
            (into / "bfd_uniclust_hits.a3m").write_text(path.read_text())
            (into / "hhsearch_output.hhr").write_text(hits)
    # The template of the last protein's hit.
    write_entry(Path("template_mmcif/0abc.cif"), {"A": query[::-1]}, "2010-01-01")
    for path in Path("made/mmcif").glob("*.cif"):
        path.rename(Path("mmcifs", path.name))
    write_like("finetuning_ptm_2", Path())


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an archive like DeepMind's, of small random parameters."""
    folder = tmp_path_factory.mktemp("mirror")
    write_archive(folder / "alphafold_params_2022-12-06.tar", [*SETS["ptm"], *SETS["multimer"]])
    return folder


@pytest.mark.parametrize("page", DOWNLOADING, ids=lambda page: page.stem)
def test_a_page_that_downloads_runs(
    page: Path, mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.chdir(tmp_path)
    is_migration = page.stem == "migrate"
    if is_migration:
        openfold_folders()
    text = page.read_text(encoding="utf-8").replace("params fetch", f"params fetch --from {mirror}")
    with serving() as server:
        said = follow(text.replace("https://api.colabfold.com", server.url), capsys)
    assert "report: " in said
    assert server.sequences
    assert not is_migration or "templates 0abc_A" in said
