"""Compare dates as days, in every spelling, and never as text."""

from datetime import date

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.entries import backbone, entry
from warpfold.data.pack.build import drop_reason
from warpfold.data.pack.options import PackOptions
from warpfold.data.structure.chain import Structure, parse_date, parse_date_option
from warpfold.data.structure.mmcif import parse_structure
from warpfold.errors import UserError

SPELLINGS = (
    lambda day: day.isoformat(),
    lambda day: day.strftime("%Y%m%d"),
    lambda day: f"{day.year:04d}-{day.month}-{day.day}",
    lambda day: "{:04d}-W{:02d}-{:d}".format(*day.isocalendar()),
    lambda day: "{:04d}W{:02d}{:d}".format(*day.isocalendar()),
)
DAYS = st.dates(date(1000, 1, 5), date(9998, 12, 31))  # ISO years have four digits
SPELLED = st.tuples(DAYS, st.sampled_from(SPELLINGS)).map(lambda pair: (pair[0], pair[1](pair[0])))


@settings(deadline=None)
@given(SPELLED)
def test_every_spelling_is_its_day(spelled: tuple[date, str]) -> None:
    day, text = spelled
    assert parse_date(text) == parse_date(f" {text}\n") == parse_date_option(text, "--cutoff") == day


@pytest.mark.parametrize(
    "text",
    [
        "",
        "?",
        "2017",
        "2017-01",
        "2017-13-01",
        "2017-02-30",
        "02.01.2017",
        "1/2/2017",
        "May",
        "2017-01-02T00",
        "2017-W30",
        "2017W30",
    ],
)
def test_what_is_no_date(text: str) -> None:
    assert parse_date(text) is None
    with pytest.raises(UserError, match=r"--cutoff .*is not a date. Write it as YYYY-MM-DD") as caught:
        parse_date_option(text, "--cutoff")
    assert "\n" not in str(caught.value)
    assert parse_date(None) is parse_date_option(None, "--cutoff") is None


def released(text: str) -> Structure:
    history = f"_pdbx_audit_revision_history.ordinal 1\n_pdbx_audit_revision_history.revision_date '{text}'\n#\n"
    rows = [row for place in range(1, 13) for row in backbone("GLY", place)]
    return parse_structure(entry(rows, ["GLY"] * 12, more=history))


@settings(deadline=None)
@given(file=SPELLED, after=SPELLED, before=SPELLED)
def test_the_filters_of_pack_agree_with_datetime(
    file: tuple[date, str], after: tuple[date, str], before: tuple[date, str]
) -> None:
    structure = released(file[1])
    options = PackOptions(released_after=after[1], released_before=before[1], max_single=1.0)
    assert (drop_reason(options, structure, structure.chains["A"], {}) is None) == (after[0] <= file[0] < before[0])
    assert options == PackOptions(released_after=str(after[0]), released_before=str(before[0]), max_single=1.0)


def test_a_file_whose_date_is_none_is_dropped_with_that_reason() -> None:
    structure = released("soon")
    assert structure.release_date is None
    options = PackOptions(released_after="19000101", max_single=1.0)
    assert drop_reason(options, structure, structure.chains["A"], {}) == "no release date"
