"""Claims about GPUs are on the page Limitations alone."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Limitations, and the list of measurements that a GPU should run next.
PLACES = {"docs/limitations.md", "benchmarks/README.md"}
STALE = re.compile(
    r"(?i)\b(no|nothing|never|not|none|without)\b[^.|\n]{0,60}"
    r"\b(run|ran|measured|tried|at hand|available)\b[^.|\n]{0,30}\bGPUs?\b"
    r"|\bno GPUs?\b[^.|\n]{0,30}\b(has|have|was|were)\b[^.|\n]{0,20}\b(run|ran|at hand|available)\b"
    r"|\bon (?:a )?GPUs? (?:not run|nothing)\b"
)


def pages() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]


def test_only_the_limitations_say_what_has_run_on_a_gpu() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in pages()
        if str(path.relative_to(ROOT)) not in PLACES
        for number, line in enumerate(path.read_text().split("\n"), 1)
        for match in STALE.finditer(line)
        if "limitations.md#what-has-run-on-a-gpu" not in line
    ]
    assert not found


def test_the_sentences_that_went_stale_would_be_found() -> None:
    for sentence in (
        "On a GPU nothing has been run yet.",
        "**nothing was measured on a GPU**, as none was available",
        "No GPU has run either.",
        "No GPU was at hand: figures are modelled",
        "Nothing has been measured on a GPU",
        "not run on GPUs",
    ):
        assert STALE.search(sentence), sentence
