"""Errors that a user can act on: one line that says where, what is wrong, and what to do."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

LONG, LONG_WORD = 2000, 300  # letters of a message, and of a word in it, that are shown


class UserError(Exception):
    """Bad input, not a bug.  The command line prints one line, without a stack trace, and exits with 2.

    The message names the file or the setting, says what is wrong with it, and what to do.  It is one line: of what
    others wrote into it, ends of lines become blanks, and what has no end is cut.
    """

    exit_code = 2

    def __str__(self) -> str:
        """Return the message."""
        text = super().__str__()
        text = text if text.isprintable() else re.sub(r"\s*[\r\n\v\f]\s*", " ", text)
        if len(text) > LONG_WORD:
            text = re.sub(rf"\S{{{LONG_WORD},}}", lambda word: f"{word[0][:LONG_WORD]}...", text)
        return text if len(text) <= LONG else f"{text[: LONG // 2]} ... {text[-LONG // 2 :]}"


class StorageError(UserError):
    """Where data lie cannot be read or written now: the next item fails, too, so that no item is to blame.

    What goes on after an item's UserError ends with this one.
    """


class DiskError(StorageError):
    """A disk that is full, read-only or broken."""


class LostError(RuntimeError):
    """A collective failed while this process waited for others: one has ended, or did not come in time."""

    def __init__(self, name: str, seconds: float, error: RuntimeError) -> None:
        super().__init__(str(error))
        self.name, self.seconds = name, seconds  # what was waited for, and how long


def listed(names: Sequence[str], most: int = 5, between: str = ", ") -> str:
    """Return the first of some names, and how many more there are: an error is one line that people read."""
    more = len(names) - most
    return between.join(names[:most]) + (f"{between}and {more} more" if more > 0 else "")


def printable(text: str) -> str:
    """Return text that others wrote without what a terminal would obey: escape sequences and other controls."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


_options_given = False
_OPTION = re.compile(r"`[^`]*`|(?<![\w-])--([a-z][a-z0-9-]*)")  # commands stay as they are


@contextmanager
def options_given() -> Iterator[None]:
    """Have errors name options, --max-hits, within the context: they came from a command line."""
    global _options_given
    before, _options_given = _options_given, True
    try:
        yield
    finally:
        _options_given = before


def called(name: str) -> str:
    """Return the name by which the user knows an argument: an option's, where a command line was given."""
    return f"--{name.replace('_', '-')}" if _options_given else name


def given(name: str, value: object) -> str:
    """Return an argument with its value, as the user wrote it: "--recycles -1", or from Python "recycles = -1"."""
    said = f"{value:g}" if isinstance(value, float) else value
    return f"{called(name)} {said}" if _options_given else f"{called(name)} = {said}"


def as_arguments(message: str, names: Mapping[str, str]) -> str:
    """Return a message for who called from Python: --max-hits is max_hits there, unless a command line was given.

    names: of options with underscores, and what they are called there; another one stays as it is.
    """
    if _options_given:
        return message

    def named(found: re.Match[str]) -> str:
        return names.get((found[1] or "").replace("-", "_"), found[0])

    return _OPTION.sub(named, message)
