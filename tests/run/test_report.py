"""The report: one file that needs nothing else, whatever names and messages it is given."""

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from warpfold.run import figures
from warpfold.run.report import ReportPage, ReportTable, Section, Target, render, write_report

NASTY = '</script><script>alert("1")</script>&'


class Page(HTMLParser):
    """Tags with their attributes, and the text outside scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] not in ("script", "style"):
            self.text += data


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
    page = Page(html)
    assert html.count("<svg role=") == 3 + 2 * 3  # each target: trace, pLDDT, PAE
    for text in ("A title & more", "How it went.", "71.5", "2 clashes", "seed 0", "truth"):
        assert text in page.text
    links = [a["href"] for t, a in page.tags if t == "a"]
    assert links == ["#target-0"]  # the row of "one" alone has a structure
    assert "$" not in re.sub(
        r"<script>.*?</script>|\$3Dmol", "", html, flags=re.S
    )  # every place of the frame is filled


def test_same_report_same_bytes() -> None:
    assert render(report(target())) == render(report(target()))


def test_no_viewer_without_structures() -> None:
    assert len(render(report())) < 150_000


@pytest.mark.parametrize("n", [1, 2, 3])
def test_very_short_proteins_can_be_drawn(n: int) -> None:
    assert f"{'A' * n}</p>" in render(report(target(n=n)))


def test_plddt_classes() -> None:
    colors = [figures.plddt_color(v) for v in (100, 90, 89.9, 70, 50, 49.9, 0)]
    assert colors == [c for c, k in zip([c for _, c, _ in figures.CLASSES], (2, 2, 1, 2)) for _ in range(k)]
    lightness = [
        sum(int(color[i : i + 2], 16) * w for i, w in ((1, 3), (3, 6), (5, 1))) for color in dict.fromkeys(colors)
    ]
    assert lightness == sorted(lightness)  # a grey print keeps the order
