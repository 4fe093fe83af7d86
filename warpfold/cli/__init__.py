"""The command line: parse arguments, call one function of the package, print the result.

Exit codes: 0 for success, 1 if something requested was not done, 2 for bad input (with a one-line error), 130 for
Ctrl-C. On SIGTERM, `train` saves its work and exits with 0, and `pack` exits with 143.
Each command is declared once, in a file of this folder (`common.command`). Heavy imports are inside its functions, so
that `--help` answers immediately.
"""

import atexit
import codecs
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Annotated, NoReturn

import typer

from warpfold import __version__
from warpfold.cli.common import GIVEN, StoppedByUser, app, resume_hint
from warpfold.errors import DiskError, UserError, printable
from warpfold.files import DISK_ERRORS, NO_ROOM
from warpfold.parallel.process import is_one_of_several

# The files of the commands, in the order of --help. A file may declare several commands.
FILES = "demo search pack plan train finetune predict distill design params score doctor bench"
for file in FILES.split():
    import_module(f"warpfold.cli.{file}")

from warpfold.cli.predict import INSTEAD  # noqa: E402  (whichever file comes first has its commands first in --help)

click = sys.modules[typer.BadParameter.__module__]  # click's exceptions, or the copy that newer typers carry


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line (default: `sys.argv`) and exit. Bad input prints one line on stderr, not a stack trace."""
    # Idle threads spin for some microseconds and then sleep. If they kept spinning, small models would be about ten
    # times slower next to another program on few cores. If they slept at once, blocks of short operations would be 1.6
    # times slower.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # If a process is killed, torch's C++ code would print stack traces in the others. We print one line instead.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _make_streams_writable()
    GIVEN[:] = sys.argv[1:] if arguments is None else map(str, arguments)
    try:
        _check_not_empty(GIVEN)
        command = typer.main.get_command(app)
        with _immediate_interrupt():
            code = command.main(args=arguments, prog_name="warpfold", standalone_mode=False)
    except UserError as error:
        hint = f" {_sentence(resume_hint())}" if isinstance(error, DiskError) else ""
        code = _complain(f"{error}{hint}", error.exit_code)
    except click.UsageError as error:
        code = _complain(_usage_message(error), 2)
    except click.ClickException as error:
        code = _complain(error.format_message(), 2)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        code = _complain("torch: not installed. Run pip install -e . (docs/install.md).", 1)
    except OSError as error:
        if error.filename is None and error.errno not in DISK_ERRORS:
            raise
        remedy = "Make room" if error.errno in NO_ROOM else "Check the disk"
        hint = f". {remedy}. {_sentence(resume_hint())}" if error.errno in DISK_ERRORS else ""
        code = _complain(f"{error.filename or 'writing'}: {error.strerror}{hint}", 1)
    except (StoppedByUser, KeyboardInterrupt, typer.Abort) as stop:
        print(f"stopped; {resume_hint()}", file=sys.stderr)
        code = stop.code if isinstance(stop, StoppedByUser) else 130
    _leave(code if isinstance(code, int) else 0)


# Characters of our tables and messages that encodings other than UTF-8 lack.
_PLAIN = str.maketrans({"→": "->", "Å": "A", "α": "a", "β": "b", "×": "x", "±": "+-", "≤": "<=", "≥": ">=", "…": "..."})


def _make_streams_writable() -> None:
    """Make stdout and stderr accept any text: replace unencodable characters, and ignore closed streams."""

    def plain(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError)
        text = error.object[error.start : error.end].translate(_PLAIN)
        return "".join(letter if letter.isascii() else "?" for letter in text), error.end

    codecs.register_error("warpfold.plain", plain)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # Python sets a stream to None whose descriptor was closed when it started.
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="warpfold.plain")


@contextmanager
def _immediate_interrupt() -> Iterator[None]:
    """Acknowledge Ctrl-C immediately within the context, because finishing a file may take long.

    A second Ctrl-C ends the process without waiting for its threads. Files are safe, because writes are atomic.
    """

    def answer(number: int, frame: FrameType | None) -> None:
        # The system's handler acts at once. Python's would wait for the running native code.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # The escape sequence shows the cursor, which a progress bar hides.
        message = b"\x1b[?25h\nstopping; Ctrl-C again: at once\n"
        os.write(2, message if os.isatty(2) else b"stopping\n")
        raise KeyboardInterrupt

    old_handler = signal.getsignal(signal.SIGINT)
    is_default = old_handler is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if is_default:
        signal.signal(signal.SIGINT, answer)
    try:
        yield
    finally:
        if is_default:
            signal.signal(signal.SIGINT, old_handler)


def _check_not_empty(arguments: Sequence[str]) -> None:
    """Raise UserError for an empty argument, which as a path would mean the current folder."""
    for previous, argument in zip(["", *arguments], arguments):
        if not argument.strip() or re.fullmatch(r"--[\w.-]+=\s*", argument):
            option = argument.strip() or previous or "the first argument"
            raise UserError(f"{option}: the value is empty. Pass a value, or leave the option out.")


def _leave(code: int) -> NoReturn:
    if is_one_of_several(os.environ):
        # Skip the shutdown of the interpreter. After a failure torch's threads would wait for other processes, which in
        # turn wait for this one. A thread that returns from torch's C++ code during shutdown would abort the process.
        if not code:
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _complain(message: str, code: int) -> int:
    print("error: " + printable(" ".join(message.split())), file=sys.stderr)
    return code


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _usage_message(error: click.UsageError) -> str:  # type: ignore[name-defined]  # a module that is found when it runs
    """Describe a usage error in one sentence: the problem, the values of the option, and the --help to read."""
    problem, name = error.format_message().rstrip("."), GIVEN[0] if GIVEN else ""
    option = getattr(error, "option_name", "")
    if name == "predict" and "requires" not in problem and option in INSTEAD:
        return f"{option}: not an option of predict. Use {INSTEAD[option]}. See warpfold predict --help."
    command = getattr(typer.main.get_command(app), "commands", {}).get(name)
    if "Missing option '--params'" in problem:
        return f"{problem}. Download some with `warpfold params fetch`, or train a small model with `warpfold demo`."
    if command is None or error.ctx is not None:
        return f"{problem}. See {error.ctx.command_path if error.ctx else 'warpfold'} --help."
    required = "".join(
        f": {parameter.help.rstrip('.')}"
        for parameter in command.params
        if option in parameter.opts and "requires" in problem
    )
    return f"{problem}{required}. See warpfold {name} --help."


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"warpfold {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The global options; `--version` acts in its callback."""
