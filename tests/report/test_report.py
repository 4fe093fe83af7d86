"""Test the report: one self-contained file, for any names and messages."""

import io
import re
import warnings
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

from tests.training.runs import helix
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.write import Modelling, write_mmcif
from warpfold.report import charts, figures
from warpfold.report import report as report_module
from warpfold.report.coverage import Coverage
from warpfold.report.report import ReportPage, ReportTable, Section, Target, Warned, render, write_report

NASTY = '</script><script>alert("1")</script>&'


class Page(HTMLParser):
    """Parse a page into its tags with attributes, and the text outside scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.html = html
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] not in ("script", "style"):
            self.text += data

    def inside(self, name: str) -> list[str]:
        """Return the texts of the elements of a division, without inner tags."""
        division = re.findall(rf'<div class="{name}".*?</div>', self.html, flags=re.S)[0]
        parts = re.findall(r"<(?:span|b)[^>]*>(.*?)</(?:span|b)>", division, flags=re.S)
        return [re.sub(r"<[^>]*>", "", part) for part in parts]


def target(name: str = "one", n: int = 30, truth: bool = False) -> Target:
    rng = np.random.default_rng(0)
    ca = np.cumsum(rng.normal(0, 2.2, (n, 3)), 0)
    return Target(
        name=name,
        sequence="A" * n,
        plddt=rng.uniform(20, 100, n),
        ca=ca,
        mmcif=f"data_{NASTY}\n",
        pae=rng.uniform(0, 30, (n, n)),
        numbers=[("mean pLDDT", "71.5")],
        warnings=["2 clashes"],
        truth_mmcif="data_truth\n" if truth else None,
        truth_ca=ca + 1 if truth else None,
        lddt=rng.uniform(20, 100, n) if truth else None,
    )


def report(*targets: Target) -> ReportPage:
    names = ["one", "other"]
    drawn = [
        (figures.draw_curves([figures.Curve("loss", range(100), np.linspace(4, 1, 100))], "loss"), "falls"),
        (figures.draw_improvement(names, [0.2, 0.3], [0.6, 0.5]), ""),
        (figures.draw_calibration([60, 50], [61, 47], "protein"), ""),
    ]
    section = Section(
        "Training", "How it went.", drawn, ReportTable(["protein", "lDDT"], [["one", "0.6"], ["other", "0.5"]])
    )
    return ReportPage("A title & more", "A lead.", [("steps", "100")], [section], targets, ["seed 0"])


def test_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", report(target(truth=True)))
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(html)
    assert list(tmp_path.iterdir()) == [tmp_path / "report.html"]
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert "default-src 'none'" in policy
    for tag, attributes in page.tags:
        assert tag != "link"
        source = attributes.get("src") or attributes.get("xlink:href") or attributes.get("href") or ""
        assert source.startswith(("data:", "#")) or not source, (tag, source)


def test_what_users_write_is_escaped() -> None:
    page = Page(render(report(target(name=NASTY))))
    assert NASTY in page.text
    assert [t for t, _ in page.tags].count("script") == 3


def test_numbers_figures_and_targets_are_on_the_page() -> None:
    html = render(report(target(truth=True), target("second")))
    assert html == render(report(target(truth=True), target("second")))
    # Without structures, the page contains no viewer.
    assert len(render(report())) < 150_000
    assert "fill: var(--ink, #1c2733)" in html  # figures follow the theme
    assert "prefers-color-scheme: dark" in html
    page = Page(html)
    assert html.count("<svg role=") == 3 + 2 * 3  # each target: trace, pLDDT, PAE
    for text in ("A title & more", "How it went.", "71.5", "2 clashes", "seed 0", "truth"):
        assert text in page.text
    links = [a["href"] for t, a in page.tags if t == "a"]
    # Only the row of "one" has a structure.
    assert links == ["#target-0"]
    # Every placeholder of the template is filled.
    assert "$" not in re.sub(r"<script>.*?</script>|\$3Dmol", "", html, flags=re.S)


def colors_in(png: bytes) -> set[str]:
    """Return the colours of a picture, as `charts` writes them."""
    return {f"#{bytes(pixel).hex()}".upper() for pixel in np.unique(to_bytes(png).reshape(-1, 3), axis=0)}


def to_bytes(png: bytes) -> np.ndarray:
    return np.rint(255 * plt.imread(io.BytesIO(png), "png")[..., :3]).astype(np.uint8)


@pytest.mark.parametrize("truth", [False, True])
def test_a_prediction_is_a_picture(truth: bool) -> None:
    """Each class of pLDDT has the same colour in the structure and in the legend.  Small PAE is dark."""
    bent = helix("one", 24, 0).positions
    assert bent is not None
    ca, plddt = bent[:, 1], np.repeat([95.0, 80.0, 60.0, 30.0], 6)
    made = replace(target(n=24, truth=truth), ca=ca, plddt=plddt, pae=np.full((24, 24), 1.0))
    if truth:
        made = replace(made, truth_ca=ca + 8)
    png = figures.draw_prediction(made)
    assert png == figures.draw_prediction(made)
    assert len(png) < 150_000
    assert {color.upper() for _, color, _ in charts.CLASSES} <= colors_in(png)
    assert (charts.TRUTH.upper() in colors_in(png)) == truth
    alone = figures.draw_prediction(replace(made, pae=None, plddt=np.full(24, 95.0)))
    without_key = to_bytes(alone)[:-80]
    blue = np.array([0, 0x53, 0xD6])
    assert (without_key == blue).all(-1).any()
    two = figures.draw_prediction(replace(made, chains={"A": slice(0, 10), "B": slice(10, 24)}))
    assert to_bytes(two).shape == to_bytes(png).shape
    assert two != png  # chains have a border


@pytest.mark.parametrize("n", [1, 2, 3])
def test_very_short_proteins_can_be_drawn(n: int) -> None:
    page = Page(render(report(target(n=n))))
    assert page.inside("sequence") == ["A" * n]
    assert figures.draw_prediction(target(n=n)).startswith(b"\x89PNG")


@pytest.mark.parametrize("terms", [["loss"], [f"interface_contacts_{i}" for i in range(9)], ["x" * 90] * 2])
def test_a_key_leaves_room_for_the_plot(terms: list[str]) -> None:
    """Draw many curves with long names.  If the plot has no room, matplotlib warns and does not adapt the layout."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = figures.draw_curves([figures.Curve(name, range(60), np.linspace(4, 1, 60)) for name in terms], "loss")
    (width,), (height,) = (re.findall(rf'<svg[^>]* {side}="([\d.]+)pt"', text) for side in ("width", "height"))
    assert (float(height) > 2.8 * 72) == (len(terms) > 2)
    assert (float(width) > 4.7 * 72) == (len(terms[0]) > 80)


def test_the_sequence_is_numbered_by_chain_and_coloured_by_confidence() -> None:
    made = replace(target(n=26), sequence="ACDEFGHIKLMN:PQRSTVWYACDEFG", chains={"H": slice(0, 12), "x": slice(12, 26)})
    html = render(report(made))
    assert Page(html).inside("sequence") == ["H", "ACDEFGHIKL", "MN", "x", "PQRSTVWYAC", "DEFG"]
    assert re.findall(r'<span data-n="(\d+)">', html) == ["10", "10"]
    drawn = re.findall(r"<i class=p(\d)>", html)
    assert drawn == [str(charts.plddt_class(value)) for value in made.plddt]


def test_plddt_has_alphafold_db_colours_and_bands() -> None:
    colors = {100: "#0053D6", 90.01: "#0053D6", 90: "#65CBF3", 70.01: "#65CBF3", 70: "#FFDB13", 50.01: "#FFDB13"}
    for value, color in (colors | {50: "#FF7D45", 0: "#FF7D45"}).items():
        assert charts.CLASSES[charts.plddt_class(value)][1] == color
    style = (Path(report_module.__file__).parent / "report.css").read_text(encoding="utf-8")
    for place, (_, color, _) in enumerate(charts.CLASSES):
        assert f".p{place} {{ background: {color}; }}" in style


def test_warnings_stand_above_the_numbers() -> None:
    page = replace(
        report(target()), warnings=[Warned("hits match nothing"), Warned("a one-row alignment", {"one": ""})]
    )
    html = render(page)
    places = [
        html.index(text) for text in ("hits match nothing", "a one-row alignment", '<dl class="facts">', "2 clashes")
    ]
    assert places == sorted(places)
    assert html.index("2 clashes") < html.index("71.5")
    assert '<a href="#target-0">one</a>: a one-row alignment' in html


def test_a_warning_of_many_proteins_is_a_line_that_opens() -> None:
    """Warnings beyond the first few are also collapsed.  None is omitted."""
    about = {"one": "31", **{f"<{i}>": "40" for i in range(40)}}
    warnings = [Warned("low confidence: 31 to 40", about), *(Warned(f"warning {i}.") for i in range(50))]
    html = render(replace(report(target()), warnings=warnings)).split("</header>")[0]
    assert "<details><summary>41 proteins: low confidence: 31 to 40</summary>" in html
    assert '<a href="#target-0">one</a> 31<' in html
    open_lines = re.sub(r"(?<=</summary>).*?(?=</details>)", "", html, flags=re.S)
    assert open_lines.count("<li>") == report_module.WARNED + 1
    assert "<summary>and 43 more</summary>" in open_lines
    for text in (*(f"&lt;{i}&gt; 40<" for i in range(40)), *(f"warning {i}." for i in range(50))):
        assert html.count(text) == 1


def test_a_picture_keeps_its_numbers() -> None:
    """Check the encoding that the page's script reads: PNG filter 2 and palette indices."""
    codes = np.random.default_rng(0).integers(0, 33, (5, 7)).astype(np.uint8)
    png = charts.palette_png(codes, [(i, 2 * i, 3 * i) for i in range(33)], clear=True)
    image = plt.imread(io.BytesIO(png), "png")
    np.testing.assert_allclose(image[..., :3] * 255, codes[..., None] * np.array([1, 2, 3]), atol=0.01)
    np.testing.assert_array_equal(image[..., 3] == 0, codes == 0)


def test_errors_of_a_large_complex_are_drawn_in_means() -> None:
    pae = np.random.default_rng(0).uniform(0, 30, (2 * charts.LARGEST + 1,) * 2).astype(np.float32)
    small = charts.pooled(pae)
    assert small.shape == (683, 683)
    np.testing.assert_allclose(small[:2, :2], pae[:6, :6].reshape(2, 3, 2, 3).mean((1, 3)), rtol=1e-5)
    assert small[-1, -1] == pytest.approx(pae[2046:, 2046:].mean(), rel=1e-5)
    assert charts.pooled(pae[:9, :9]) is not None


def test_a_page_of_forty_proteins_is_small() -> None:
    """A protein of n residues takes at most 9,000 + 450 n + 4/3 n² bytes, because each error is a byte in base64.

    Errors of real predictions compress to a third of that size: about 120 kB for 300 residues, 5 MB for forty proteins.
    """
    n, rng, raw = 90, np.random.default_rng(1), helix("one", 90, 0)
    assert raw.positions is not None
    assert raw.mask is not None
    rows = np.where(rng.random((192, n)) < 0.9, rng.integers(1, 102, (192, 1)), 0).astype(np.uint8)
    coverage, numbers = Coverage(np.arange(n, dtype=np.int32), rows, 400), tuple(map(str, range(1, n + 1)))
    targets = []
    for i in range(5):
        positions = raw.positions + rng.normal(0, 1, raw.positions.shape).astype(np.float32)
        chain = Chain("A", raw.sequence, positions, raw.mask.astype(float), np.arange(n), numbers)
        plddt, pae = rng.uniform(20, 100, n), rng.uniform(0, 31.75, (n, n))
        text = write_mmcif(f"protein{i}", [chain], b_factors=[plddt], predicted=Modelling())
        targets.append(Target(f"protein{i}", raw.sequence, plddt, positions[:, 1], text, pae, coverage=coverage))
    one, five = (len(render(ReportPage("Forty", "", targets=targets[:count])).encode()) for count in (1, 5))
    assert (five - one) / 4 < 9_000 + 450 * n + 4 / 3 * n * n
    # The viewer takes 538 kB.
    assert one < 600_000 + 9_000 + 450 * n + 4 / 3 * n * n


def test_predictions_of_one_protein_stand_side_by_side() -> None:
    models = [replace(target(f"one, rank {i}"), group="one", note=f"{i}: model_{i}") for i in (1, 2)]
    html = render(report(*models, target("other")))
    assert Page(html).text.count("one: 2 predictions") == 1
    assert re.findall(r'<use href="#(pae-\d)"/>', html) == ["pae-0", "pae-1"]
    assert [re.search(f'<g id="{name}">', html) is not None for name in ("pae-0", "pae-1")] == [True, True]
    assert re.findall(r'<a href="#(target-\d)"><svg', html) == ["target-0", "target-1"]
