"""Test that only the page Limitations makes claims about GPUs, and only the page Benchmarks has measured values."""

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


# ---- measured values

# The generated page, and the limitations.  Decision records may contain the values on which a decision rests.
MEASURED = {"docs/benchmarks.md", "docs/limitations.md"}
VALUE = re.compile(
    r"(?<![\w.])\d[\d.,]*(?:\s+to\s+\d[\d.,]*)?\s*(?:"
    r"(?:ms|µs|us|milliseconds?|seconds?|minutes?|hours?|s a step|s/step)\b"
    r"|(?:times as fast|times faster|x faster|x as fast|% faster|times the speed)\b"
    r"|(?:GiB|GB|TB)\b"
    r"|(?:examples|samples|proteins|steps|sequences)(?: a second|/s)\b"
    r"|[TG]FLOP(?:/s|S)?\b)"
    r"|\b(?:lDDT(?:-Cα)?|RMSD|TM-score|DockQ) (?:of |from |is |was )?\d"
)
LABELS = re.compile(r"(?i)\b(modelled|counted|estimate[ds]?)\b")
# Values that are not measurements of WarpFold: page, words of the line, reason.
ALLOWED = [
    ("README.md", "In about 8 minutes on two CPU cores", "the duration of the demo"),
    ("CONTRIBUTING.md", "a download of about 6 GB", "the size of a download"),
    ("docs/install.md", "takes about 5 GB on disk", "the size of a download"),
    ("docs/install.md", "one tar of 5.6 GB", "the size of a download"),
    ("docs/tutorials/first_protein.md", "6 GB of disk for the download", "the size of a download"),
    ("docs/tutorials/first_protein.md", "once: 5.6 GB", "the size of a download"),
    ("docs/howto/import.md", "130 GB and 88 GB", "the size of a download"),
    ("docs/howto/clusters.md", "below 1 GB with several GPUs", "a limit of the system"),
    ("docs/howto/clusters.md", "less than 3 GB free", "a limit of the check"),
    ("docs/howto/alignments.md", "asked again after 5 s", "a pause of the client"),
    ("docs/howto/alignments.md", "given up after 4 hours", "a limit of the client"),
    ("docs/howto/alignments.md", "below 1 GB (4 GB unpacked)", "a limit of the client"),
    ("docs/reference/errors.md", "unpacks to more than 4 GB", "a limit of the reader"),
    ("docs/reference/formats.md", "may have 4 GB", "a limit of the reader"),
]


def paragraphs(text: str) -> list[list[tuple[int, str]]]:
    """Split a page into paragraphs of numbered lines, without code."""
    found: list[list[tuple[int, str]]] = [[]]
    in_code = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("```"):
            in_code = not in_code
        elif not in_code and line.strip():
            found[-1].append((number, re.sub(r"`[^`]*`", "", line)))
        elif found[-1]:
            found.append([])
    return found


def measured_values(page: str, text: str) -> list[str]:
    """Find values that read like measurements.

    Values are exempt if their paragraph, or the paragraph above it, labels them, for example as modelled.
    """
    found = []
    above = ""
    for paragraph in paragraphs(text):
        whole = " ".join(line for _, line in paragraph)
        if not LABELS.search(f"{above} {whole}"):
            found += [
                f"{page}:{number}: {match[0]}"
                for number, line in paragraph
                for match in VALUE.finditer(line)
                if not any(name == page and words in line for name, words, _ in ALLOWED)
            ]
        above = whole
    return found


def test_only_the_benchmarks_state_measured_values() -> None:
    found = []
    for path in [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        page = path.relative_to(ROOT).as_posix()
        if page not in MEASURED and "decisions" not in path.parts:
            found += measured_values(page, path.read_text(encoding="utf-8"))
    assert not found, "put results into benchmarks/results, or give a reason in ALLOWED"


def test_every_allowed_value_is_still_there() -> None:
    for page, words, _ in ALLOWED:
        assert words in re.sub(r"`[^`]*`", "", (ROOT / page).read_text(encoding="utf-8")), (page, words)


def test_measured_values_would_be_found() -> None:
    for sentence in (
        "A step takes 492 ms.",
        "It is 1.51 times as fast.",
        "The trunk needs 61.8 GB on one device.",
        "It makes 32 samples a second.",
        "lDDT-Cα 0.996 on the training chain",
        "In 4.4 minutes it learns the chain.",
    ):
        assert measured_values("page", sentence), sentence
    assert not measured_values("page", "A step takes 492 ms (modelled).")
    assert not measured_values("page", "```\n492 ms\n```")
