"""Test suites of `warpfold evaluate`: valid and invalid lists."""

from datetime import date
from pathlib import Path

import pytest

from warpfold.errors import UserError
from warpfold.evaluation.suite import Entry, read_suite, write_suite


def test_a_suite_is_read_as_it_was_written(tmp_path: Path) -> None:
    targets = {"T1": Entry(), "7abc_A": Entry(date(2021, 10, 20), "0f", ("A", "B"))}
    (tmp_path / "suite.toml").write_text(write_suite('a "title"', targets))
    suite = read_suite(tmp_path / "suite.toml")
    assert (suite.title, suite.targets) == ('a "title"', targets)


def test_the_bundled_list_is_whole() -> None:
    suite = read_suite(Path("cameo2022"))
    assert len(suite.targets) == 183
    assert suite.targets["7whf_G"] == Entry()


BAD_SUITES = {
    "": "is empty",
    "[targets]\n": "has no targets",
    'title = "t"\n': "has no targets",
    "[targets\n": "not valid TOML",
    "[targets]\nT1 = {}\nT1 = {}\n": "not valid TOML",
    "[targets]\nT1 = {}\nt1 = {}\n": "t1 and T1 differ only in case. Keep one",
    "[targets]\nT1 = {release = 2021-10-20}\n": "did you mean targets.T1.released?",
    '[targets]\nT1 = {released = "soon"}\n': "a date",
}


@pytest.mark.parametrize("text", BAD_SUITES)
def test_bad_suites_are_refused_in_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "suite.toml").write_text(text)
    with pytest.raises(UserError) as error:
        read_suite(tmp_path / "suite.toml")
    assert BAD_SUITES[text] in str(error.value)
    assert "suite.toml" in str(error.value)
    assert "\n" not in str(error.value)
