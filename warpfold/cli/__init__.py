"""The command line: read arguments, call one function of the package, print what it returns.

Exit codes: 0 everything asked for was done, 1 it was not, 2 the input is at fault (one line says how), 130 Ctrl-C.
On SIGTERM, `train` exits with 0, since its work is saved and the same command continues, and `pack` with 143.
A command is declared once, in a file here (`common.command`); heavy imports are inside its functions, so that `--help`
answers at once.
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
from warpfold.cli.common import GIVEN, StoppedByUser, app, how_to_go_on
from warpfold.errors import DiskError, UserError, printable
from warpfold.files import NO_ROOM, OF_DISKS
from warpfold.parallel.process import is_one_of_several

# Their files, in the order of --help; a file may have several commands.
FILES = "demo search pack plan train finetune predict distill design params score doctor bench"
for file in FILES.split():
    import_module(f"warpfold.cli.{file}")

from warpfold.cli.predict import INSTEAD  # noqa: E402  (whichever file comes first has its commands first in --help)

click = sys.modules[typer.BadParameter.__module__]  # click's exceptions, or the copy that newer typers carry


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line (`sys.argv` by default) and exit.  Bad input is one line on stderr, never a stack trace."""
    # Let waiting threads spin for some microseconds, then sleep.  If they spin on while another program runs on few
    # cores, a small model takes ten times as long; if they sleep at once, a block of short operations takes 1.6 times.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # Where a process is killed, torch's C++ would warn the others with a stack trace; who is missing is our own line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _make_streams_writable()
    GIVEN[:] = sys.argv[1:] if arguments is None else map(str, arguments)
    try:
        _check_not_empty(GIVEN)
        command = typer.main.get_command(app)
        with _answered():
            code = command.main(args=arguments, prog_name="warpfold", standalone_mode=False)
    except UserError as error:
        code = _complain(f"{error}; {how_to_go_on()}" if isinstance(error, DiskError) else str(error), error.exit_code)
    except click.UsageError as error:
        code = _complain(_misused(error), 2)
    except click.ClickException as error:
        code = _complain(error.format_message(), 2)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        code = _complain("torch is not installed; pip install -e . brings it (docs/install.md)", 1)
    except OSError as error:
        if error.filename is None and error.errno not in OF_DISKS:
            raise
        cure = "make room" if error.errno in NO_ROOM else "see to the disk"
        then = f"; {cure}; {how_to_go_on()}" if error.errno in OF_DISKS else ""
        code = _complain(f"{error.filename or 'writing'}: {error.strerror}{then}", 1)
    except (StoppedByUser, KeyboardInterrupt, typer.Abort) as stop:
        print(f"stopped; {how_to_go_on()}", file=sys.stderr)
        code = stop.code if isinstance(stop, StoppedByUser) else 130
    _leave(code if isinstance(code, int) else 0)


# Characters of our tables and messages that encodings other than UTF-8 lack.
_PLAIN = str.maketrans({"→": "->", "Å": "A", "α": "a", "β": "b", "×": "x", "±": "+-", "≤": "<=", "≥": ">=", "…": "..."})


def _make_streams_writable() -> None:
    """Make stdout and stderr take any text: in another encoding than UTF-8 with plain letters, closed ones drop it."""

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
def _answered() -> Iterator[None]:
    """Answer Ctrl-C at once, within the context: what a command has to end, such as a file, may take long.

    A second one ends the process as it is, whatever its threads wait for: files are whole or not there.
    """

    def answer(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # of the system: Python's would wait for what runs below Python
        shown = b"\x1b[?25h\nstopping; Ctrl-C again: at once\n"  # with the cursor, which a bar hides
        os.write(2, shown if os.isatty(2) else b"stopping\n")
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    ours = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, answer)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


def _check_not_empty(arguments: Sequence[str]) -> None:
    """Raise UserError for an empty argument: as a path it would be the current folder."""
    for before, argument in zip(["", *arguments], arguments):
        if not argument.strip() or re.fullmatch(r"--[\w.-]+=\s*", argument):
            where = argument.strip() or before or "the first argument"
            raise UserError(f"{where}: the value is empty; give one, or leave the option out")


def _leave(code: int) -> NoReturn:
    if is_one_of_several(os.environ):
        # Without Python's own end: after a failure torch's threads would wait for other processes, and those for this
        # one; and a thread that comes back from torch's C++ while the interpreter ends would abort the process.
        if not code:
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _complain(message: str, code: int) -> int:
    print("error: " + printable(" ".join(message.split())), file=sys.stderr)
    return code


def _misused(error: click.UsageError) -> str:  # type: ignore[name-defined]  # a module that is found when it runs
    """Explain a wrong command line in a sentence: what is wrong, what the option takes, and whose --help says more."""
    says, name = error.format_message().rstrip("."), GIVEN[0] if GIVEN else ""
    option = getattr(error, "option_name", "")
    if name == "predict" and "requires" not in says and option in INSTEAD:
        return f"no option {option}: here it is {INSTEAD[option]}; see warpfold predict --help"
    command = getattr(typer.main.get_command(app), "commands", {}).get(name)
    if command is None or error.ctx is not None:
        return f"{says}; see {error.ctx.command_path if error.ctx else 'warpfold'} --help"
    takes = "".join(f": {one.help.rstrip('.')}" for one in command.params if option in one.opts and "requires" in says)
    return f"{says}{takes}; see warpfold {name} --help"


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
    pass
