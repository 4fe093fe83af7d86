"""Errors that a user can act on: one line that says where, what is wrong, and what to do."""


class UserError(Exception):
    """Bad input, not a bug.  The command line prints one line, without a stack trace, and exits with 2.

    The message names the file or the setting, says what is wrong with it, and what to do.
    """

    exit_code = 2
