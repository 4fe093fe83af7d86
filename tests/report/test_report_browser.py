"""Test the report in a real browser: pointing, clicking, selecting and downloading, by mouse and keyboard."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gemmi
import numpy as np
import pytest

from tests.report.browser import CHROMIUM, Browser
from tests.training.runs import helix
from warpfold.prediction.folder import copy_by_rank, rank_predictions
from warpfold.prediction.outputs import Prediction, write_prediction
from warpfold.prediction.pages import prediction_report
from warpfold.report.coverage import Coverage
from warpfold.report.report import write_report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")

LENGTHS = {"H": 24, "x": 16}
# Left, top, right and bottom of the plot area of a PAE chart, relative to the chart's size.
PLOT = (46 / 380, 18 / 408, 366 / 380, 338 / 408)


def prediction(name: str, lengths: dict[str, int], seed: int) -> Prediction:
    """Build a prediction of parallel helices, one per chain."""
    rng, total = np.random.default_rng(seed), sum(lengths.values())
    parts = [helix(chain, length, seed) for chain, length in lengths.items()]
    mask = np.concatenate([part.mask for part in parts if part.mask is not None]).astype(np.float32)
    moved = [part.positions + np.float32([12 * i, 0, 0]) for i, part in enumerate(parts) if part.positions is not None]
    several = len(lengths) > 1
    depth = rng.integers(1, 90, total).astype(np.int32)
    rows = np.sort(rng.integers(1, 102, (90, 1)))[::-1].repeat(total, 1).astype(np.uint8)
    return Prediction(
        name=name,
        sequence="".join(part.sequence for part in parts),
        positions=np.concatenate(moved) * mask[..., None],
        mask=mask,
        plddt=rng.uniform(40, 99, total).astype(np.float32),
        pae=rng.uniform(0, 31.75, (total, total)).astype(np.float32),
        max_pae=31.75,
        ptm=0.75,
        chain_ids=tuple(lengths),
        asym_id=np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), [*lengths.values()]) if several else None,
        iptm=0.85 if several else None,
        coverage=Coverage(depth, rows, 90),
        details={"seed": seed, "msa_depth": 90, "templates": [], "seconds": {"features": 0.1, "model": 1.0}},
    )


def write_page(out: Path, predictions: list[Prediction]) -> list[dict[str, Any]]:
    """Write predictions and the report as `predict` does.  Returns the entries of the predictions."""
    several = len({one.name for one in predictions}) < len(predictions)
    entries = [
        write_prediction(one, out, f"m_seed_{i}" if several else "") | {"model": "m"}
        for i, one in enumerate(predictions)
    ]
    entries, ranking = rank_predictions(entries)
    summary = {
        "predictions": copy_by_rank(out, entries) if several else entries,
        "ranking": ranking,
        "failures": [],
        "seconds": 1.0,
        "models": [{"file": "m.npz", "sha256": "0"}],
        "versions": {"warpfold": "0", "torch": "0"},
        "device": "cpu",
        "settings": {"seed": 0, "seeds": len(predictions)},
        "warnings": [{"text": "alignments of none of the sequences: other.a3m"}],
        "input_warnings": {},
    }
    write_report(out / "report.html", prediction_report(out, summary))
    return entries


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Prediction]:
    """Write a report of one complex.  Returns its folder, the entry and the prediction."""
    made, out = prediction("pair", LENGTHS, 0), tmp_path_factory.mktemp("pair")
    return out, write_page(out, [made])[0], made


@pytest.fixture(autouse=True)
def window(browser: Browser) -> None:
    """Reset the window, because another test may have resized it or emulated printing."""
    browser.resize(900, 640)
    browser.media()


@pytest.fixture
def page(browser: Browser, pair: tuple[Path, dict[str, Any], Prediction]) -> Iterator[Browser]:
    """Open the page of the complex in its initial state."""
    if (pair[0] / "report.html").as_uri() not in browser.requests:
        browser.open(pair[0] / "report.html")
        browser.until("typeof panels !== 'undefined' && [...panels.values()][0]?.pae")
        browser.run("window.panel = [...panels.values()][0]; 0")
        browser.until("panel.viewer")
    browser.run("panel.select(null); panel.point(null)")
    browser.until("panel.readout.innerText === ''")
    yield browser
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("data:", "blob:"))] == [
        (pair[0] / "report.html").as_uri()
    ]


def at_pae(browser: Browser, scored: int, aligned: int) -> tuple[float, float]:
    """Return the point of the PAE chart for the error of one residue when aligned on another."""
    left, top, right, bottom = PLOT
    n = sum(LENGTHS.values())
    x, y = left + (right - left) * (scored + 0.5) / n, top + (bottom - top) * (aligned + 0.5) / n
    return browser.place('[data-kind="pae"]', x, y)


def letters(browser: Browser, name: str) -> list[int]:
    """Return the positions of the sequence letters that have this CSS class."""
    script = (
        f"[...document.querySelectorAll('.sequence i')].flatMap((e, i) => e.classList.contains('{name}') ? [i] : [])"
    )
    return browser.run(script)


def says(browser: Browser, pattern: str) -> str:
    """Wait until the line below the structure matches the pattern."""
    return browser.until(f"(document.querySelector('.readout').innerText.match(/{pattern}/) || [''])[0]")


def named(made: Prediction, place: int) -> str:
    code = gemmi.expand_one_letter(made.sequence[place], gemmi.ResidueKind.AA).capitalize()
    first = LENGTHS["H"]
    return f"H {code} {place + 1}" if place < first else f"x {code} {place - first + 1}"


def test_pointing_at_pae_names_residues_and_shows_them(
    page: Browser, pair: tuple[Path, dict[str, Any], Prediction]
) -> None:
    made = pair[2]
    assert made.pae is not None
    page.mouse("Moved", at_pae(page, 30, 5))
    says(page, f"{named(made, 30)} seen from {named(made, 5)}: expected error {round(float(made.pae[5, 30]))} Å")
    assert letters(page, "at") == [5, 30]
    page.mouse("Moved", (2, 2))
    page.until("document.querySelector('.readout').innerText === ''")
    assert letters(page, "at") == []


def test_dragging_over_pae_selects_in_sequence_and_structure(
    page: Browser, pair: tuple[Path, dict[str, Any], Prediction]
) -> None:
    made = pair[2]
    assert made.pae is not None
    page.drag(at_pae(page, 26, 3), at_pae(page, 31, 8))
    mean = float(np.rint(made.pae[3:9, 26:32]).mean())
    text = says(page, "mean expected error [0-9.]+")
    assert abs(float(text.rsplit(" ", 1)[1]) - mean) <= 0.0501
    assert letters(page, "scored") == [*range(26, 32)]
    assert letters(page, "aligned") == [*range(3, 9)]
    colors = page.run("[27, 4, 15].map(place => panel.color(panel.middle.get(place)))")
    assert len(set(colors)) == 3
    place = "document.querySelector('[name=\"clear\"]').getBoundingClientRect().y + scrollY"
    before = page.run(place)
    page.mouse("Moved", (2, 2))
    page.until("panel.at.scored === null && panel.drawing === null")
    # The button must not move under the mouse.
    assert page.run(place) == before
    page.click('[name="clear"]')
    page.until("document.querySelector('.sequence .scored') === null")
    color = page.run("panel.color(panel.middle.get(15))")
    assert color == next(c for bound, c in ((90, "#0053D6"), (70, "#65CBF3"), (50, "#FFDB13"), (-1, "#FF7D45"))
                         if round(float(made.plddt[15]), 2) > bound)  # fmt: skip


def test_pointing_at_the_structure_names_the_residue(
    page: Browser, pair: tuple[Path, dict[str, Any], Prediction]
) -> None:
    page.place(".viewer")
    script = "(s => [s.x - scrollX, s.y - scrollY])(panel.viewer.modelToScreen(panel.middle.get({})))"
    at = page.run(script.format(12))
    page.mouse("Moved", at)
    text = says(page, "H [A-Z][a-z]+ [0-9]+: pLDDT [0-9.]+")
    number = int(re.findall(r" (\d+):", text)[0])
    # The residue may be one in front of the requested one.
    assert np.hypot(*np.subtract(page.run(script.format(number - 1)), at)) < 60
    assert letters(page, "at") == [number - 1]


def test_pointing_at_a_letter_or_at_plddt_says_the_same(
    page: Browser, pair: tuple[Path, dict[str, Any], Prediction]
) -> None:
    made = pair[2]
    page.mouse("Moved", page.place(".sequence p:nth-of-type(2) i:nth-of-type(3)"))
    wanted = f"{named(made, 26)}: pLDDT {round(float(made.plddt[26]), 2):.1f}"
    says(page, wanted)
    # Marks are in pLDDT, in coverage, and twice in PAE.
    assert page.run("document.querySelectorAll('.marks path').length") >= 3
    page.mouse("Moved", page.place('[data-kind="plddt"]', (40 + 432 * 26.5 / 40) / 480, 0.5))
    says(page, wanted)


def test_the_keyboard_moves_selects_and_clears(page: Browser, pair: tuple[Path, dict[str, Any], Prediction]) -> None:
    made = pair[2]
    # The mouse stays there while the page scrolls below it.
    page.mouse("Moved", page.place('[data-kind="plddt"]'))
    says(page, "pLDDT")
    page.run("document.querySelector('.sequence').focus(); panel.point(null)")
    page.key("ArrowRight", times=4)
    says(page, named(made, 3))
    box = "document.querySelector('.sequence')"
    assert page.run(f"{box}.getAttribute('role')") == "slider"
    assert page.run(f"{box}.getAttribute('aria-valuenow')") == "4"
    assert named(made, 3) in page.run(f"{box}.getAttribute('aria-valuetext')")
    page.key("ArrowRight", shift=True, times=3)
    page.until("document.querySelectorAll('.sequence .scored').length === 4")
    assert letters(page, "scored") == [3, 4, 5, 6]
    page.key("Escape")
    page.until("document.querySelector('.sequence .scored') === null")
    page.run("document.querySelector('[data-kind=\"pae\"]').focus()")
    page.key("ArrowRight")
    page.key("ArrowDown", times=2)
    page.key("ArrowRight", times=3)
    says(page, f"{named(made, 3)} seen from {named(made, 2)}")
    focusable = page.run("[...document.querySelectorAll('[tabindex]')].every(e => e.getAttribute('aria-label'))")
    assert focusable


def test_downloads_are_the_files(page: Browser, pair: tuple[Path, dict[str, Any], Prediction]) -> None:
    out, entry, made = pair
    folder, files = out / entry["folder"], entry["files"]
    for button, name in (("mmCIF", "mmcif"), ("PAE", "pae"), ("PDB", "pdb")):
        page.click(f'[name="{button}"]')
        found = page.download(files[name]).decode()
        written = (folder / files[name]).read_text()
        if name == "mmcif":
            assert found == written
        elif name == "pae":
            assert json.loads(found) == json.loads(written)
        else:
            atoms = [line for line in written.splitlines() if line.startswith(("ATOM", "TER", "END"))]
            assert found.splitlines() == atoms
    page.click('[name="pLDDT"]')
    rows = page.download("pair_plddt.csv").decode().splitlines()
    assert rows[0] == "chain,residue,amino_acid,plddt"
    assert rows[25] == f"x,1,{made.sequence[24]},{round(float(made.plddt[24]), 2):g}"
    page.click('[name="FASTA"]')
    assert page.download("pair.fasta").decode() == f">pair H\n{made.sequence[:24]}\n>pair x\n{made.sequence[24:]}\n"
    page.click('[name="picture"]')
    assert page.download("pair.png").startswith(b"\x89PNG")


def test_dark_narrow_and_on_paper(page: Browser, tmp_path: Path) -> None:
    page.media(prefers_color_scheme="dark")
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(18, 24, 30)"
    page.resize(360, 740)
    # Nothing is wider than a phone's screen.
    assert page.run("document.documentElement.scrollWidth") <= 360
    page.media("print", prefers_color_scheme="dark")
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.run("document.querySelector('.controls').checkVisibility()") is False
    assert page.run("document.querySelector('.viewer > svg').checkVisibility()") is True
    page.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


def test_without_webgl_all_but_the_structure_answers(browser: Browser, tmp_path: Path) -> None:
    write_page(tmp_path / "flat", [prediction("one", {"A": 12}, 0)])
    assert 'name="ranks"' not in (tmp_path / "flat/report.html").read_text()
    script = "HTMLCanvasElement.prototype.getContext = () => null"
    added = browser.ask("Page.addScriptToEvaluateOnNewDocument", source=script)
    browser.open(tmp_path / "flat/report.html")
    browser.ask("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])
    browser.until("typeof panels !== 'undefined' && panels.size === 1")
    browser.mouse("Moved", browser.place(".sequence i:nth-of-type(3)"))
    says(browser, "3: pLDDT [0-9.]+")
    assert browser.run("document.querySelector('.viewer > svg').checkVisibility()") is True
    assert browser.run("document.querySelector('[name=\"picture\"]').checkVisibility()") is False
    browser.click('[name="FASTA"]')
    assert browser.download("one.fasta").startswith(b">one\n")
    assert browser.errors == []


def test_several_predictions_stand_side_by_side(browser: Browser, tmp_path: Path) -> None:
    write_page(tmp_path / "out", [prediction("one", {"A": 12}, seed) for seed in range(3)])
    browser.open(tmp_path / "out/report.html")
    assert browser.run("document.querySelectorAll('div.small use').length") == 3
    assert "other.a3m" in browser.run("document.querySelector('header .warnings').innerText")
    browser.click("div.small a:nth-of-type(2)")
    browser.until("location.hash === '#target-1'")
    assert browser.run("document.querySelectorAll('div.small a').length") == 3
    # The superposed predictions are shown together.
    browser.until("[...panels.values()].find(one => one.article.id === 'target-1')?.viewer")
    browser.run("window.panel = [...panels.values()].find(one => one.article.id === 'target-1'); 0")
    assert browser.run("[panel.viewer.getModelList().length, panel.ranks]") == [1, None]
    browser.click("#target-1 [name='ranks']")
    browser.until("panel.ranks?.length === 2")
    assert browser.run("panel.viewer.getModelList().length") == 3
    browser.click("#target-1 [name='ranks']")
    browser.until("!panel.on('ranks')")
    assert browser.run("panel.viewer.getModelList().length") == 3
    assert browser.errors == []


@pytest.mark.slow
def test_few_structures_are_live_at_a_time(browser: Browser, tmp_path: Path) -> None:
    """Browsers allow about sixteen WebGL contexts."""
    write_page(tmp_path / "many", [prediction(f"p{i}", {"A": 9}, i) for i in range(8)])
    browser.open(tmp_path / "many/report.html")
    browser.until("typeof panels !== 'undefined'")
    for i in range(8):
        browser.run(f"document.querySelector('#target-{i} .viewer').scrollIntoView({{block: 'center'}})")
        browser.until(f"panels.get(document.querySelector('#target-{i}'))?.viewer")
    assert browser.run("live.length") == 6
    assert browser.run("document.querySelectorAll('.viewer.live').length") == 6
    assert browser.errors == []
