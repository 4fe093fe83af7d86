"""Errors that a person can act on: one line that says what was wrong, where, and what to do."""


class UserError(Exception):
    """Bad input, not a bug.  The command line prints it as one line (no stack trace) and exits with 2.

    The message names the file or the setting, what is wrong with it, and the cure.
    """

    exit_code = 2
