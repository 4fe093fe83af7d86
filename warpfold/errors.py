"""Errors that a user can act on: one line that says where, what is wrong, and what to do."""

from collections.abc import Sequence


class UserError(Exception):
    """Bad input, not a bug.  The command line prints one line, without a stack trace, and exits with 2.

    The message names the file or the setting, says what is wrong with it, and what to do.
    """

    exit_code = 2


def listed(names: Sequence[str], most: int = 5, between: str = ", ") -> str:
    """Return the first of some names, and how many more there are: an error is one line that people read."""
    more = len(names) - most
    return between.join(names[:most]) + (f"{between}and {more} more" if more > 0 else "")
