"""Damaged inputs: what becomes of every reader when a file is flipped, cut, doubled, shuffled, encoded otherwise.

    python -m benchmarks.reliability inputs [--cases 100000] [--seed 0] [--work FOLDER] [--figures F.json]
    python -m benchmarks.reliability inputs --only 4711        # one case again, with its traceback

Each case damages one whole file in one to three ways (`mutate.py`) and reads it (`readers.py`).  It may be refused, by
one line that names it, or read.  Findings are: another exception, a warning of NumPy's, more than `SECONDS` seconds of
CPU, more than `MEMORY` bytes, descriptors that stay open, and damage that was accepted silently.  Chunks of cases run
in forked children, so that a crash or an endless loop costs one case.  Stopped, the same command continues.
"""

import argparse
import bisect
import gc
import json
import mmap
import os
import random
import resource
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from benchmarks.reliability.damage import damage
from benchmarks.reliability.figures import keep
from benchmarks.reliability.readers import Reader, Silent, check_line, make_readers, odd_numbers, plain, same
from warpfold.errors import UserError

SECONDS, MEMORY = 5, 1 << 30
CHUNK = 250  # cases of one child
STILL = 60.0  # seconds of the clock without a step: it hangs, or the machine does
OUTCOMES = ("refused", "read, the same", "read, something else", "finding")


class Cases:
    """The cases of a seed: which reader, which file, what damage."""

    def __init__(self, readers: Sequence[Reader], seed: int) -> None:
        self.readers, self.seed = readers, seed
        self._sums = list(accumulate(reader.weight for reader in readers))

    def draw(self, number: int) -> tuple[Reader, int, str, bytes, list[str]]:
        """Return the reader of a case, its base, the name of the file that is damaged, its content, and how."""
        draw = random.Random(f"{self.seed} {number}")
        reader = self.readers[bisect.bisect(self._sums, draw.random() * self._sums[-1])]
        base = draw.randrange(len(reader.bases))
        names = [name for name in reader.bases[base] if reader.damaged in name]
        name = draw.choice(names)
        whole = reader.bases[base][name]
        data, how = damage(draw, whole, reader.text, reader.packed)
        return reader, base, name, data, how


def try_case(cases: Cases, number: int, place: Path, meanings: dict[tuple[str, int], Any]) -> tuple[int, str]:
    """Read a damaged file; return the outcome's number, and what was found, if anything."""
    reader, base, name, data, how = cases.draw(number)
    files = dict(reader.bases[base])
    whole = files[name]
    files[name] = data
    write(place, files)
    said = f"{reader.name}, {name}, {' and '.join(how)}: "
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            found = plain(reader.read(place))
    except UserError as error:
        try:
            check_line(error)
        except Silent as why:
            return 3, f"{said}{why}"
        text = str(error)
        if reader.named and not any(part in text for part in (str(place), *map(os.path.basename, files))):
            return 3, f"{said}names no file: {text[:200]}"
        if "more memory than there is" in text:
            return 3, f"{said}{text[:200]}"
        return 0, ""
    except Silent as why:
        return 3, f"{said}silent: {why}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        last = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in last if "/warpfold/" in frame.filename][-1:] or last[-1:]
        where = f"{Path(ours[0].filename).name}:{ours[0].lineno}" if ours else "?"
        return 3, f"{said}{type(error).__name__} at {where}: {str(error)[:160]!r}"
    if data == whole:
        return 1, ""
    if odd := next(odd_numbers(found), None):
        return 3, f"{said}silent: {odd}"
    before = meanings[reader.name, base]
    if reader.rows:
        left = list(before)
        for row in found:
            if not any(same(row, one) for one in left):
                return 3, f"{said}silent: a row that was not written"
        return 1 if same(found, before) else 2, ""
    if same(found, before):
        return 1, ""
    if reader.sealed or (how[0] == "gz" and how[1] not in ("append", "repeat")):  # archives may follow each other
        return 3, f"{said}silent: a checksum covers this, and another meaning was read"
    between = data.rstrip().endswith(b"\n#")  # mmCIF cut between two categories is whole as far as it goes
    if reader.ends and how in (["truncate"], ["cut_line"]) and data.rstrip() != whole.rstrip() and not between:
        return 3, f"{said}silent: cut short, and read as something else"
    return 2, ""


def write(place: Path, files: Any) -> None:
    """Write the files of a case into an empty folder."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name, data in files.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def understand(readers: Sequence[Reader], place: Path) -> dict[tuple[str, int], Any]:
    """Read every whole file: what it means."""
    found = {}
    for reader in readers:
        for number, base in enumerate(reader.bases):
            write(place, base)
            found[reader.name, number] = plain(reader.read(place))
    return found


def descriptors() -> Counter[str]:
    """List what this process has open."""
    found = Counter[str]()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the listing itself is gone
            found[os.readlink(entry)] += 1
    return Counter({name: count for name, count in found.items() if "/matplotlib/" not in name})  # its fonts stay open


def run_chunk(cases: Cases, numbers: range, place: Path, meanings: Any, shared: mmap.mmap, out: int) -> None:
    """Try some cases in this forked process; the parent sees where it is, and outlives it."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1), os.dup2(silence, 2)
    before = descriptors()
    for number in numbers:
        shared[:8] = number.to_bytes(8, "little")
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, 10 * SECONDS)  # the default action ends the process
        outcome, what = try_case(cases, number, place, meanings)
        spent = time.process_time() - start
        if spent > SECONDS:
            reader, _, name, _, how = cases.draw(number)
            outcome, what = 3, f"{reader.name}, {name}, {' and '.join(how)}: {spent:.1f} s of CPU"
        os.write(out, (json.dumps([number, outcome, what]) + "\n").encode())
    gc.collect()
    if left := descriptors() - before:
        what = f"{sum(left.values())} descriptors stay open: {', '.join(left)}"
        os.write(out, (json.dumps([numbers[0], 3, f"cases {numbers[0]} to {numbers[-1]}: {what}"]) + "\n").encode())
    os._exit(0)


def try_all(cases: Cases, numbers: range, place: Path, meanings: Any, log: Path) -> None:
    """Try the cases that the log does not have yet, a line for each."""
    done = (
        {json.loads(line)[0] for line in log.read_text().splitlines() if line.endswith("]")} if log.exists() else set()
    )
    shared = mmap.mmap(-1, 8)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    gc.collect()
    gc.freeze()
    number = numbers.start
    began = time.monotonic()
    while number < numbers.stop:
        if number in done:
            number += 1
            continue
        chunk = range(number, min(number + CHUNK, numbers.stop))
        child = os.fork()
        if not child:
            run_chunk(cases, chunk, place, meanings, shared, out)
        at, since, status = -1, time.monotonic(), 0
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            now = int.from_bytes(shared[:8], "little")
            at, since = (at, since) if now == at else (now, time.monotonic())
            if time.monotonic() - since > STILL:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.02)
        status = ended[1]
        number = chunk.stop
        if status:
            number = int.from_bytes(shared[:8], "little")
            reader, _, name, _, how = cases.draw(number)
            what = f"ended by signal {status & 127}" if status & 127 else f"exit code {status >> 8}"
            line = [number, 3, f"{reader.name}, {name}, {' and '.join(how)}: the process was {what}"]
            os.write(out, (json.dumps(line) + "\n").encode())
            number += 1
        if number % 2000 < CHUNK:
            rate = (number - numbers.start) / (time.monotonic() - began)
            print(f"{number} of {numbers.stop}, {rate:.0f} a second", flush=True)


def summarize(cases: Cases, numbers: range, log: Path) -> dict[str, Any]:
    """Count the outcomes by reader, and list the findings, one of each kind."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    findings: list[str] = []
    seen: set[int] = set()
    for line in log.read_text().splitlines():
        number, outcome, what = json.loads(line)
        if number in seen and outcome != 3:
            continue
        seen.add(number)
        counts[cases.draw(number)[0].name][OUTCOMES[outcome]] += 1
        if outcome == 3:
            findings.append(f"case {number}: {what}")
    return {
        "cases": len(seen & set(numbers)),
        "outcomes": {name: sum(one[name] for one in counts.values()) for name in OUTCOMES},
        "findings": findings[:200],
        "by_reader": {name: dict(one) for name, one in sorted(counts.items())},
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="reliability inputs", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "warpfold-inputs")
    parser.add_argument("--reader", help="Only readers whose names contain this.")
    parser.add_argument("--only", type=int, help="The number of a case to try again, here.")
    parser.add_argument("--figures", type=Path)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    chosen.work.mkdir(parents=True, exist_ok=True)
    readers = [one for one in make_readers(chosen.work) if (chosen.reader or "") in one.name]
    cases, numbers = Cases(readers, chosen.seed), range(chosen.cases)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        place = Path(folder) / "case"
        meanings = understand(readers, place)
        if chosen.only is not None:
            reader, base, name, data, how = cases.draw(chosen.only)
            print(reader.name, name, how, len(data), len(reader.bases[base][name]))
            print(try_case(cases, chosen.only, place, meanings))
            shutil.copytree(place, chosen.work / f"case-{chosen.only}", dirs_exist_ok=True)
            found = reader.read(place)
            print(found)
            return
        log = chosen.work / f"cases-{chosen.seed}-{chosen.reader or 'all'}.jsonl"
        start = time.monotonic()
        try_all(cases, numbers, place, meanings, log)
    figures = {
        "seed": chosen.seed,
        "seconds": round(time.monotonic() - start),
        "readers": len(readers),
        **summarize(cases, numbers, log),
    }
    keep("inputs", __doc__, arguments, figures, chosen.figures)
