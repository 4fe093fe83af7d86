"""Dates: parsed in one place, compared as `datetime.date` and never as text (2017-1-2, 20170102 and 2017-W01-1 are one
day, and texts of them sort in no useful order)."""

import re
from datetime import date

from warpfold.errors import UserError

_WEEK = re.compile(r"\d{4}-?W\d{2}", re.ASCII)  # no day: `fromisoformat` takes its Monday
_PLAIN = re.compile(r"(\d{4})-(\d{1,2})-(\d{1,2})", re.ASCII)  # mmCIF's dictionary allows 2017-7-26


def parse_date(text: str | None) -> date | None:
    """Return the day that `text` names, or None if it names none.

    Accepted are ISO 8601's spellings, 2017-07-26, 20170726, 2017-W30-3 and 2017W303, and mmCIF's without leading zeros,
    2017-7-26.  For dates in files, which may be anything.
    """
    text = (text or "").strip()
    if _WEEK.fullmatch(text):
        return None
    plain = _PLAIN.fullmatch(text)
    try:
        return date(*map(int, plain.groups())) if plain else date.fromisoformat(text)
    except ValueError:
        return None


def given_date(text: str | None, option: str) -> date | None:
    """Return the day that a user gave, or None for None.  Errors: UserError, naming `option`, for what is no date."""
    day = parse_date(text)
    if text is not None and day is None:
        raise UserError(f"{option} {text}: is no date; write it as YYYY-MM-DD, for example 2018-04-30")
    return day
