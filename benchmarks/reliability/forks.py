"""Run tests in forks of a process that has imported torch, so that a few tests start within one or two seconds.

The tests run in a copy of the checkout and import nothing from the checkout itself, so processes that they start see
the changes of the copy. A second process runs the tests in which Triton interprets kernels.
"""

import ctypes
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Tests in which Triton interprets its kernels.
INTERPRETED = "tests/ops/triton/interpreted/"
# Time limit for collecting tests, and between two tests, in seconds.
BETWEEN = 900.0
# A test is stopped after six times its normal duration and this many seconds.
PATIENCE = 20.0
# Memory limit of a process in bytes, because a fault may allocate everything.
MEMORY = 12 << 30
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "10000",
    "MKL_NUM_THREADS": "1",
}
# Modules that are imported before forking.
LOADED = ("hypothesis", "numpy", "torch", "torch._dynamo")
# The module of the copy in which probes record executed statements.
PROBES = "mutation_probes"


@dataclass
class Ran:
    """The outcomes ("passed", "failed", "skipped") and seconds of tests, in the order of their execution."""

    tests: dict[str, tuple[str, float]] = field(default_factory=dict)
    # The probes that each test executed.
    hits: dict[str, list[int]] = field(default_factory=dict)
    # The first test that failed or exceeded its time limit.
    failed: str = ""
    # "failed", "time", "collection" or "died".
    how: str = ""
    seconds: float = 0.0


def make_copy(folder: Path) -> Path:
    """Copy the files that git tracks to folder/checkout, and link ../shared."""
    copy = folder / "checkout"
    shutil.rmtree(copy, ignore_errors=True)
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.rstrip("\0").split("\0"):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    shared = folder / "shared"
    if (ROOT.parent / "shared").is_dir() and not shared.is_symlink():
        shared.symlink_to(ROOT.parent / "shared")
    return copy


class Forks:
    """Runs tests of a copy of the checkout, each list of tests in its own fork."""

    def __init__(self, copy: Path, interpreted: bool = False) -> None:
        self.copy = copy
        ours, theirs = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(ours[1])
            os.close(theirs[0])
            try:
                _Server(copy, interpreted).serve(os.fdopen(ours[0]), os.fdopen(theirs[1], "w"))
            finally:
                os._exit(1)
        os.close(ours[0])
        os.close(theirs[1])
        self._jobs, self._answers = os.fdopen(ours[1], "w"), os.fdopen(theirs[0])

    def run(self, tests: Sequence[str], known: dict[str, float] | None = None, first: bool = True) -> Ran:
        """Run tests in this order.

        first: stop at the first failure.
        known: the normal durations in seconds. Tests that take several times as long are stopped.
        """
        job = {"tests": list(tests), "known": known or {}, "first": first}
        self._jobs.write(json.dumps(job) + "\n")
        self._jobs.flush()
        return Ran(**json.loads(self._answers.readline()))

    def close(self) -> None:
        """End the process."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


class _Server:
    """The process from which tests are forked."""

    def __init__(self, copy: Path, interpreted: bool) -> None:
        self.copy = copy
        control = ctypes.CDLL(None).prctl
        control(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: children of a test that has gone are ours
        control(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: it ends with what asks it
        os.chdir(copy)
        os.environ.update(ENVIRONMENT, PYTHONPATH=str(copy))
        if interpreted:
            os.environ["TRITON_INTERPRET"] = "1"
        for name in [name for name in sys.modules if name.split(".")[0] in ("warpfold", "tests", "benchmarks")]:
            del sys.modules[name]
        sys.path[:] = [str(copy), *(p for p in sys.path if p and Path(p).resolve() not in (ROOT, copy))]
        for name in LOADED:
            importlib.import_module(name)

    def serve(self, jobs: Any, answers: Any) -> None:
        """Run jobs until the pipe is closed."""
        for line in jobs:
            answers.write(json.dumps(self._run(json.loads(line)).__dict__) + "\n")
            answers.flush()
        os._exit(0)

    def _run(self, job: dict[str, Any]) -> Ran:
        """Fork, follow what the fork says, and end it and all that it started."""
        begun, ran, (theirs, ours) = time.monotonic(), Ran(), os.pipe()
        child = os.fork()
        if child == 0:
            os.close(theirs)
            _child(job, self.copy, ours)
        os.close(ours)
        now, waited, rest = "collection", time.monotonic() + BETWEEN, b""
        while now:
            if not select.select([theirs], [], [], 1.0)[0]:
                gone = os.waitpid(child, os.WNOHANG)[0] == child and not select.select([theirs], [], [], 0.0)[0]
                if gone or time.monotonic() > waited:
                    ran.failed, ran.how = now, "died" if gone else "time"
                    break
                continue
            some = os.read(theirs, 1 << 20)
            if not some:
                ran.failed, ran.how = now, "collection" if now == "collection" else "died"
                break
            *lines, rest = (rest + some).split(b"\n")
            for line in lines:
                word, test, *more = json.loads(line)
                if word == "begin":
                    now, waited = test, time.monotonic() + PATIENCE + 6 * job["known"].get(test, 60.0)
                elif word == "end":
                    ran.tests[test] = (more[0], more[1])
                    ran.hits[test] = more[2]
                    now, waited = "between", time.monotonic() + BETWEEN
                    if more[0] == "failed" and not ran.failed:
                        ran.failed, ran.how = test, "failed"
                elif word == "done":
                    now = ""
            if ran.failed and job["first"]:
                break
        os.close(theirs)
        _end_children()
        ran.seconds = time.monotonic() - begun
        return ran


def _end_children() -> None:
    """Kill all descendants of this process."""
    while True:
        parents = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
        ours, more = {os.getpid()}, True
        while more:
            found = {pid for pid, parent in parents.items() if parent in ours} - ours
            ours, more = ours | found, bool(found)
        ours.discard(os.getpid())
        if not ours:
            return
        for pid in ours:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.02)


def _child(job: dict[str, Any], copy: Path, ours: int) -> None:
    """Run the tests of a job in this process and report each of them."""
    import resource

    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    log = os.open(copy.parent / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    temporary = copy.parent / "tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    arguments = ["-q", "-x"] if job["first"] else ["-q"]
    arguments += ["-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={temporary}", "--tb=short"]
    arguments += ["-m", "not slow and not gpu", "--hypothesis-seed=0", "--timeout=0", *job["tests"]]
    os.environ["PYTEST_ADDOPTS"] = ""
    code = pytest.main(arguments, plugins=[_Follower(job, ours)])
    if code in (0, 1, 5):
        os.write(ours, json.dumps(["done", ""]).encode() + b"\n")
    os._exit(0)


class _Follower:
    """A pytest plugin that orders the tests and reports the beginning and end of each."""

    def __init__(self, job: dict[str, Any], pipe: int) -> None:
        self._order = {test: place for place, test in enumerate(job["tests"])}
        self._pipe = pipe
        self._begun, self._outcome = 0.0, "passed"
        self._owner = os.getpid()  # a forked child of a test inherits the plugin, and has nothing to say
        try:
            self._probes = __import__(PROBES).ran
        except ImportError:
            self._probes = None

    def _say(self, *words: object) -> None:
        if os.getpid() == self._owner:
            os.write(self._pipe, json.dumps(words).encode() + b"\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: self._order.get(item.nodeid, len(self._order)))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._begun, self._outcome = time.monotonic(), "passed"
        if self._probes is not None:
            self._probes[:] = bytes(len(self._probes))
        self._say("begin", nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome != "passed" and not (report.skipped and self._outcome == "failed"):
            self._outcome = report.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        hits = []
        if self._probes is not None:
            whole = bytes(self._probes)
            hits = [place for place, value in enumerate(whole) if value]
        self._say("end", nodeid, self._outcome, round(time.monotonic() - self._begun, 3), hits)
