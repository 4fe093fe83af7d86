"""Test every command on full, read-only and shared disks and with jumping clocks: its files, errors and continuation.

    python -m benchmarks.reliability disk [--work FOLDER] [--only TEXT] [--most N] [--figures F.json]

Each command runs undisturbed and under these conditions:

* *size*: a file system (tmpfs) with room for 0, 1, 2 ... pages, up to the need of the command.
* *files*: a file system with room for 0, 1, 2 ... files and folders.
* *call*: the n-th call that changes the disk (open to write, mkdir, replace, rename, link, truncate, fsync) fails with
  ENOSPC, for each n.
* *from*: all calls from the n-th one on fail with EROFS, as after remounting a file system read-only.
* *denied*: all calls fail with EACCES.
* *clock*: `time.time` jumps by a day, forwards or backwards, at some call.
* *two*: a second run of the same command in the same folder.

The exit code must be 2, or 1 for system errors that do not concern the input. stderr must have one line that begins
with `error:` and no traceback. Every file with a final name must equal that of the undisturbed run, or that of an
earlier moment for files that are replaced during the run. As soon as there is room, the same command must end as the
undisturbed run did. There are some 1,600 cases, and each takes about as long as the command. `--most` limits the cases
of a kind and command. WORK/disk-COMMAND.jsonl has a line for each case. The same command continues a stopped series.
Mounting needs root. Without it, *size* and *files* are left out, and the results say so.
"""

import argparse
import builtins
import ctypes
import errno
import io
import json
import os
import random
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.reliability.figures import keep
from benchmarks.reliability.kills import ENV, kill_session, wait
from tests.continued import SCENARIOS, Compared, Scenario, be_warpfold, differing, import_all, write_inputs
from warpfold.data.store.store import Store
from warpfold.engine.checkpoint import AppendedFile, StepFolders
from warpfold.errors import UserError
from warpfold.model.weights.files import load_model

PAGE = 4096
CHANGES = ("mkdir", "replace", "rename", "link", "truncate", "ftruncate", "fsync", "open")
LIBC = ctypes.CDLL(None, use_errno=True)

Patch = Callable[[], None]  # what a forked process changes before it becomes the command


# Commands


NAMES = ("pack", "search", "predict", "design", "train")
COMMANDS = [one for one in SCENARIOS if one.name in NAMES]
COMMANDS.append(Scenario("params", "params IN/tiny.safetensors --out OUT/p.npz"))


def half_written(scenario: Scenario, out: Path, reference: dict[str, bytes]) -> list[str]:
    """List the files that have a final name but are incomplete."""
    found = []
    if scenario.name == "train":
        for step in (folders := StepFolders(out / "checkpoints")).steps():
            with suppress_and_note(found):
                folders.load(step)
        for path in out.glob("params*.safetensors"):
            with suppress_and_note(found):
                load_model(path)
    if scenario.name == "pack" and (out / "store").exists():
        with suppress_and_note(found):
            found += list(Store(out / "store").verify())
    whole = {"predict": (".cif", ".pdb", ".npz", ".json"), "params": (".npz",), "search": (".a3m",)}
    for path in out.rglob("*"):
        name = str(path.relative_to(out))
        if path.name.endswith(whole.get(scenario.name, ())) and path.is_file() and not path.name.startswith("."):
            if path.name in ("summary.json", "search.json") or ".partial" in str(path):
                continue
            if path.read_bytes() != reference.get(name):
                found.append(f"{name} is half there")
        is_design = scenario.name == "design" and path.parent.name == "designs" and not path.name.startswith(".")
        if is_design and path.read_bytes() != reference.get(name):
            found.append(f"{name} is half there")
    return found


@contextmanager
def suppress_and_note(found: list[str]) -> Iterator[None]:
    """Note a UserError."""
    try:
        yield
    except UserError as error:
        found.append(str(error))


# What goes wrong


def mount(place: Path, size: int, files: int, more: str = "") -> bool:
    """Mount a tmpfs with so much room, or change that of one; return whether that is permitted."""
    place.mkdir(parents=True, exist_ok=True)
    flags = 32 if more == "remount" else 0  # MS_REMOUNT
    options = f"size={size},nr_inodes={files}".encode()
    return LIBC.mount(b"tmpfs", str(place).encode(), b"tmpfs", flags, options) == 0


def unmount(place: Path) -> None:
    LIBC.umount2(str(place).encode(), 2)  # MNT_DETACH


def failing(number: int, code: int, onwards: bool, place: Path, counted: Path | None = None) -> Patch:
    """Make the `number`-th call that changes the disk below `place` fail, or all calls from that one on.

    counted: the file for the number of such calls, written at the end of the process.
    """

    def patch() -> None:
        calls = 0
        root, top = f"{place}/", os.getpid()

        def check(where: Any) -> None:
            nonlocal calls
            if isinstance(where, int):
                with suppress(OSError):
                    where = os.readlink(f"/proc/self/fd/{where}")
            if not isinstance(where, str | os.PathLike) or not os.fspath(where).startswith(root):
                return
            calls += 1
            if counted is not None and os.getpid() == top:
                counted.write_text(str(calls))
            if calls == number or (onwards and calls > number):
                raise OSError(code, os.strerror(code), os.fspath(where))

        def wrap(name: str) -> None:
            real = getattr(os, name)

            def wrapped(path: Any, *args: Any, **more: Any) -> Any:
                if name != "open" or (args and args[0] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
                    check(path)
                return real(path, *args, **more)

            setattr(os, name, wrapped)

        def opened(file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
            if set(mode) & set("wax+"):
                check(file)
            return real_open(file, mode, *args, **more)

        real_open = builtins.open
        for name in CHANGES:
            wrap(name)
        builtins.open = io.open = opened  # type: ignore[assignment]

    return patch


def jumping(number: int, seconds: float) -> Patch:
    """Let the clock jump at its `number`-th reading."""

    def patch() -> None:
        real, readings = time.time, 0

        def read() -> float:
            nonlocal readings
            readings += 1
            return real() + (seconds if readings >= number else 0.0)

        time.time = read

    return patch


# Trying


def begin(scenario: Scenario, inputs: Path, out: Path, said: Path, patch: Patch | None = None) -> int:
    """Start a command in a fork, with what goes wrong."""
    leader = os.fork()
    if leader:
        return leader
    os.setsid()
    if patch is not None:
        patch()
    be_warpfold(scenario.arguments(inputs, out), said, ENV)


def run(scenario: Scenario, inputs: Path, out: Path, said: Path, patch: Patch | None = None) -> int:
    """Run a command to its end; -9 after ten minutes."""
    said.unlink(missing_ok=True)
    leader = begin(scenario, inputs, out, said, patch)
    code = wait(leader, 600)
    if code is None:
        kill_session(leader)
        return -9
    return code


def complaint(said: Path, code: int) -> list[str]:
    """List the faults of a command's error output."""
    text = said.read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.startswith("error:")]
    if "Traceback" in text:
        return [f"a traceback: {text.strip().splitlines()[-1][:300]}"]
    if code not in (1, 2) or len(lines) != 1:
        return [f"exit code {code}, {len(lines)} lines of error: {text.strip()[-300:]!r}"]
    return []


class Trier:
    """Tries a command with one thing going wrong after the other."""

    def __init__(self, scenario: Scenario, work: Path, most: int | None) -> None:
        self.scenario, self.work, self.most = scenario, work, most
        self.place, self.inputs = work / "disk", work / "inputs"
        self.said = work / f"disk-{scenario.name}.txt"
        self.log = work / f"disk-{scenario.name}.jsonl"
        lines = self.log.read_text().split("\n")[:-1] if self.log.exists() else ()
        self.rows = [json.loads(line) for line in lines]
        self.tried = {(row["kind"], row["number"]) for row in self.rows}
        self.clear()
        for _ in range(2):  # the first one imports
            shutil.rmtree(self.out, ignore_errors=True)
            if (code := run(scenario, self.inputs, self.prepared(), self.said)) != 0:
                raise SystemExit(f"{scenario.name}: the undisturbed run ended with {code}: {self.said}")
            import_all(self.said)
        self.reference: Compared = scenario.compared(self.out)
        self.bytes = {str(p.relative_to(self.out)): p.read_bytes() for p in self.out.rglob("*") if p.is_file()}
        self.used = sum(-(-len(data) // PAGE) for data in self.bytes.values())
        self.files = len(list(self.out.rglob("*")))

    @property
    def out(self) -> Path:
        return self.place / "out"

    def prepared(self) -> Path:
        """Make the folder that a command's own is made in."""
        if self.scenario.name in ("pack", "params"):
            self.out.mkdir(parents=True, exist_ok=True)
        else:
            self.out.parent.mkdir(parents=True, exist_ok=True)
        return self.out

    def clear(self) -> None:
        unmount(self.place)
        shutil.rmtree(self.place, ignore_errors=True)

    def chosen(self, kind: str, first: int, count: int) -> list[int]:
        """Choose which of so many cases of a kind are tried, and leave out those that were."""
        every = np.linspace(0, count - 1, min(count, self.most or count)).astype(int) if count else ()
        return sorted({first + int(x) for x in every} - {number for of, number in self.tried if of == kind})

    def note(self, kind: str, number: int, failed: bool, found: Sequence[str]) -> None:
        """Write down what became of a case."""
        self.rows.append({"kind": kind, "number": number, "failed": failed, "trouble": found[:3]})
        with closing(AppendedFile(self.log)) as file:
            file.write(json.dumps(self.rows[-1]) + "\n")

    def figures(self) -> dict[str, Any]:
        """Count the cases by their kinds, and list what went wrong."""
        return {
            "tried": dict(Counter(row["kind"] for row in self.rows)),
            "ended_with_an_error": dict(Counter(row["kind"] for row in self.rows if row["failed"])),
            "trouble": [f"{row['kind']} {row['number']}: {what}" for row in self.rows for what in row["trouble"]],
        }

    def judge(self, kind: str, number: int, code: int) -> None:
        """Look at what a run has left that met trouble, and continue it."""
        found: list[str] = []
        if code != 0:
            found += complaint(self.said, code)
            if self.out.exists():
                found += half_written(self.scenario, self.out, self.bytes)
        text = self.said.read_text(errors="replace")
        said = next((line for line in text.splitlines() if line.startswith("error:")), "")
        if code != 0 and not found and not re.search(r"[Nn]o space|[Rr]ead-only|[Dd]enied|written|made|writing", said):
            found.append(f"the error does not say what is wrong: {said}")
        if kind in ("size", "files"):
            mount(self.place, 1 << 30, 100_000, "remount")
        # After exit code 0, what failed did not matter.
        again = run(self.scenario, self.inputs, self.prepared(), self.said) if code else 0
        if again:
            text = self.said.read_text(errors="replace").strip()
            found.append(f"the same command then ended with {again}: {text[-300:]!r}")
        else:
            found += differing(self.reference, self.scenario.compared(self.out), exact=True)
        self.note(kind, number, code != 0, found)

    def disks(self) -> bool:
        """Try disks without room; return whether they could be mounted."""
        for kind, count in (("size", self.used + 4), ("files", self.files + 4)):
            numbers = self.chosen(kind, 1, count)
            while numbers:
                for number in numbers:
                    self.clear()
                    size = number * PAGE if kind == "size" else 1 << 30
                    if not mount(self.place, size, 100_000 if kind == "size" else number + 1):
                        return False
                    with suppress(OSError):
                        self.prepared()
                    self.judge(kind, number, run(self.scenario, self.inputs, self.out, self.said))
                # Of some files there are two for a moment, the old one and the new one: more than is left at the end.
                last = max(row["number"] for row in self.rows if row["kind"] == kind)
                failed = any(row["failed"] for row in self.rows if (row["kind"], row["number"]) == (kind, last))
                numbers = [last + 1] if failed and self.most is None else []
        self.clear()
        return True

    def calls(self) -> None:
        """Let calls fail that change the disk."""
        self.clear()
        counted = self.work / "counted"
        run(self.scenario, self.inputs, self.prepared(), self.said, failing(0, 0, False, self.place, counted))
        calls = int(counted.read_text())
        for kind, code, onwards in (("call", errno.ENOSPC, False), ("from", errno.EROFS, True)):
            for number in self.chosen(kind, 1, calls):
                self.clear()
                patch = failing(number, code, onwards, self.place)
                self.judge(kind, number, run(self.scenario, self.inputs, self.prepared(), self.said, patch))
        for number in self.chosen("denied", 1, 1):
            self.clear()
            patch = failing(number, errno.EACCES, True, self.place)
            self.judge("denied", number, run(self.scenario, self.inputs, self.prepared(), self.said, patch))

    def clocks(self) -> None:
        """Let the clock jump."""
        for number in (1, 2, 5, 20, 50, 150):
            for days in (-1, 1):
                if ("clock", days * number) in self.tried:
                    continue
                self.clear()
                code = run(self.scenario, self.inputs, self.prepared(), self.said, jumping(number, 86_400.0 * days))
                found = [f"exit code {code}"] if code else []
                found += [] if code else differing(self.reference, self.scenario.compared(self.out), exact=True)
                if "Traceback" in self.said.read_text(errors="replace"):
                    found.append("a traceback")
                self.note("clock", days * number, code != 0, found)

    def two(self) -> None:
        """Begin a second run while the first one runs."""
        start = time.monotonic()
        self.clear()
        run(self.scenario, self.inputs, self.prepared(), self.said)
        length = time.monotonic() - start
        for number in range(6):
            if ("two", number) in self.tried:
                continue
            self.clear()
            draw = random.Random(number)
            other = self.said.with_suffix(".other.txt")
            self.said.unlink(missing_ok=True)
            other.unlink(missing_ok=True)
            first = begin(self.scenario, self.inputs, self.prepared(), self.said)
            early = wait(first, draw.uniform(0, 0.8 * length))
            second = begin(self.scenario, self.inputs, self.out, other)
            codes = [wait(first, 600) if early is None else early, wait(second, 600)]
            found = []
            for code, said in zip(codes, (self.said, other)):
                if code:
                    found += complaint(said, code)
            if 0 not in codes:
                found.append(f"both ended with {codes}")
            again = run(self.scenario, self.inputs, self.out, self.said)
            if again and self.scenario.name != "params":
                found.append(f"the same command then ended with {again}")
            found += differing(self.reference, self.scenario.compared(self.out), exact=True)
            self.note("two", number, any(codes), found)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="reliability disk", description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "warpfold-disk")
    parser.add_argument("--only", default="", help="Only commands whose names contain this.")
    parser.add_argument("--most", type=int, help="Cases of a kind and a command; all by default.")
    parser.add_argument("--figures", type=Path)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    chosen.work.mkdir(parents=True, exist_ok=True)
    rows, mounted = {}, True
    write_inputs(chosen.work / "inputs")
    for scenario in COMMANDS:
        if chosen.only in scenario.name:
            trier = Trier(scenario, chosen.work, chosen.most)
            trier.calls()
            trier.clocks()
            trier.two()
            mounted = trier.disks() and mounted
            trier.clear()
            rows[scenario.name] = trier.figures()
            print(json.dumps({scenario.name: rows[scenario.name]}, indent=1), flush=True)
    figures = {
        "disks_could_be_mounted": mounted,
        "tried": sum(sum(one["tried"].values()) for one in rows.values()),
        "trouble": sum(len(one["trouble"]) for one in rows.values()),
        "by_command": rows,
    }
    keep("disk", __doc__, arguments, figures, chosen.figures)
