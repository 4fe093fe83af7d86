"""The style check of `./dev check` finds unclear phrases in prose, and only there."""

from pathlib import Path

import pytest

from tests.prose import find_phrases


@pytest.mark.parametrize(
    "sentence",
    [
        "Check of what is kept",
        "a copy of that which the caller gave",
        "nobody wrote what pads the rows",
        "the weights lie beside the model",
        "Of a chain the first residue.",
        "Take the rows first; then the columns; and the rest of them",
    ],
)
def test_unclear_sentences_are_found(tmp_path: Path, sentence: str) -> None:
    module, page = tmp_path / "module.py", tmp_path / "page.md"
    module.write_text(f'"""{sentence}"""\n')
    page.write_text(f"# Title\n\n{sentence}\n")
    for path in (module, page):
        count, phrases = find_phrases(path)
        assert count == 1
        assert phrases


@pytest.mark.parametrize(
    "source",
    [
        '"""Pad the rows to a multiple of 16."""\n',
        'name = "the weights lie beside the model"\n',
        '"""Call `beside(what_is_left)` to place the model."""\n',
    ],
)
def test_clear_sentences_and_code_are_not_found(tmp_path: Path, source: str) -> None:
    module = tmp_path / "module.py"
    module.write_text(source)
    assert not find_phrases(module)[1]


def test_code_blocks_of_a_page_are_not_prose(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```bash\nnobody wrote what pads the rows\n```\n")
    assert find_phrases(page) == (0, [])


def test_comments_and_errors_are_prose(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('# nobody wrote these rows\nraise ValueError("the file of what is left")\n')
    assert [line for line, _, _ in find_phrases(module)[1]] == [1, 2]
