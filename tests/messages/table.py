"""Read the tables of refused input, and run their calls."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from tests.messages import calls
from warpfold import cli
from warpfold.errors import UserError

TABLES = sorted(Path(__file__).parent.glob("*.toml"))
PROGRESS = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ")


@dataclass(frozen=True)
class Case:
    """A call that is refused.

    call: a command line that begins with "warpfold", or an expression with the names of `calls`.
    message: the complete line of the error, in which [...] stands for any text.
    exit_code: of a command. without: "cuda" if the message is that of a machine without a GPU.
    needs: an optional package without which the message is another one.
    """

    call: str
    message: str
    exit_code: int = 2
    without: str = ""
    needs: str = ""

    def matches(self, message: str) -> bool:
        """Return whether a message is the expected one."""
        pattern = ".*".join(map(re.escape, self.message.split("[...]")))
        return re.fullmatch(pattern, message) is not None


def read_table(path: Path) -> Iterator[Case]:
    """Yield the cases of a table.

    A header is a call with {} in the place where the keys below it go; the value of a key is the message, or a table
    with the fields of `Case`.
    """
    for call, rows in tomllib.loads(path.read_text(encoding="utf-8")).items():
        for given, says in rows.items():
            fields = {"message": says} if isinstance(says, str) else says
            yield Case(call.replace("{}", given), **fields)


CASES = [case for path in TABLES for case in read_table(path)]


def remove_written() -> None:
    """Remove the files that an expression has written as its input, and their folders."""
    for path in calls.written:
        path.unlink()
    for folder in sorted({parent for path in calls.written for parent in path.parents} - {Path()}, reverse=True):
        folder.rmdir()
    calls.written.clear()


def run(call: str) -> tuple[int, str]:
    """Run a call, which must be refused.  Returns the exit code (of an expression 2) and the message of the error."""
    if not call.startswith("warpfold "):
        try:
            eval(call, vars(calls))
        except UserError as error:
            return 2, str(error)
        finally:
            remove_written()
        raise AssertionError(f"{call} was not refused")
    out, err, code = StringIO(), StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            cli.main(shlex.split(call)[1:])
        except SystemExit as ended:
            code = int(ended.code or 0)
    *before, line = err.getvalue().splitlines() or [""]
    # On a slow machine, progress lines may precede the error.
    assert all(map(PROGRESS.match, before)), err.getvalue()
    assert (out.getvalue(), line[:7]) == ("", "error: "), (out.getvalue(), err.getvalue())
    return code, line.removeprefix("error: ")
