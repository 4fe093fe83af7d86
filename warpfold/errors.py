"""Errors that users can act on: one line with the object, the problem and the remedy."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

# Messages and words with more letters are truncated.
LONG, LONG_WORD = 2000, 300


class UserError(Exception):
    """Bad input, as opposed to a bug. The command line prints one line without a stack trace and exits with 2.

    The message has the form `<object>: <problem>. <Remedy in the imperative>.` Line breaks in quoted input become
    blanks, and long input is truncated.
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
    """A storage failure, which would make the next items fail as well.

    Commands that continue after an item's UserError stop at this one.
    """


class DiskError(StorageError):
    """A disk that is full, read-only or broken."""


class LostError(RuntimeError):
    """A collective failed because another process ended or did not arrive in time.

    name: the collective. seconds: how long this process waited.
    """

    def __init__(self, name: str, seconds: float, error: RuntimeError) -> None:
        super().__init__(str(error))
        self.name, self.seconds = name, seconds


def listed(names: Sequence[str], most: int = 5, between: str = ", ") -> str:
    """Join the first names and the number of further names to a text that fits a one-line error."""
    omitted = len(names) - most
    return between.join(names[:most]) + (f"{between}and {omitted} more" if omitted > 0 else "")


def printable(text: str) -> str:
    """Replace escape sequences and other control characters in foreign text, which a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


_options_given = False
# Commands in backticks are matched as a whole, and are not rewritten.
_OPTION = re.compile(r"`[^`]*`|(?<![\w-])--([a-z][a-z0-9-]*)")


@contextmanager
def options_given() -> Iterator[None]:
    """Write options (--max-hits) instead of arguments (max_hits) into errors within the context."""
    global _options_given
    before, _options_given = _options_given, True
    try:
        yield
    finally:
        _options_given = before


def called(name: str) -> str:
    """Return the user's name of an argument: the option, if the call came from the command line."""
    return f"--{name.replace('_', '-')}" if _options_given else name


def given(name: str, value: object) -> str:
    """Format an argument with its value as the user wrote it: "--recycles -1", or from Python "recycles = -1"."""
    text = f"{value:g}" if isinstance(value, float) else value
    return f"{called(name)} {text}" if _options_given else f"{called(name)} = {text}"


def as_arguments(message: str, names: Mapping[str, str]) -> str:
    """Replace options (--max-hits) in a message by Python arguments (max_hits), unless a command line was given.

    names: option name with underscores -> argument name. Other options are not replaced.
    """
    if _options_given:
        return message

    return _OPTION.sub(lambda match: names.get((match[1] or "").replace("-", "_"), match[0]), message)
