"""Plant small faults in the package, one at a time, and see whether the tests that run the line find them.

    python -m benchmarks.reliability mutate --out FILE                   # some hours of one core; goes on where it was
    python -m benchmarks.reliability mutate --out FILE --counts scoring=20 design=10 --list      # only print the faults
    python -m benchmarks.reliability mutate --out FILE --report            # the tables of what is there
    python -m benchmarks.reliability mutate --out FILE --again survived --limit 600      # those, by more of their tests
    python -m benchmarks.reliability mutate --out FILE --idle              # tests that found nothing, and took long
    python -m benchmarks.reliability mutate --out FILE --idle --ask 6      # and which faults they find if asked

Faults are drawn from a seed (mutants.py).  Which tests run a statement is found once, by a copy of the package in which
each statement says that it ran (probes.py), and kept in --work.  Tests run in forks (forks.py), in a copy of the
checkout, the cheapest first, until one fails or --limit is used up; one that takes six times as long as without the
fault, and 20 seconds more, counts as failing.  A test that fails for the first time is run without the fault, too: if
it fails there, it is believed no more.  benchmarks/results/mutation-equivalent.toml names faults that change no result,
with the reason.
"""

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.reliability import mutants
from benchmarks.reliability.forks import INTERPRETED, ROOT, Forks, Ran, make_copy
from benchmarks.reliability.mutants import Mutant, draw, is_kernel
from benchmarks.reliability.probes import put_probes

COUNTS = {
    "ops": 30,
    "ops/cpu": 30,
    "ops/triton": 20,
    "model": 64,
    "parallel": 64,
    "engine": 64,
    "data/features": 60,
}
TESTS = (
    *("tests/ops", INTERPRETED, "tests/model", "tests/golden", "tests/engine", "tests/data/features", "tests/parallel"),
    *("tests/laws", "tests/check", "tests/sequence_design", "tests/test_fake.py", "tests/data/load", "tests/adapt"),
    *("tests/training", "tests/prediction"),
)
# One runs the interpreted tests in a process of its own, as is done here.
LEFT_OUT = ("tests/ops/triton/test_interpreted.py", "tests/prediction/test_throughput.py")
EQUIVALENT = ROOT / "benchmarks/results/mutation-equivalent.toml"


class Covered:
    """Which statements each test runs, and how long it takes; kept in a file that grows with the files of tests."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[tuple[str, int, bool]] = []
        self.tests: dict[str, dict[str, Any]] = {}
        self.files: dict[str, str] = {}
        for line in path.read_text().splitlines() if path.exists() else []:
            self._take(json.loads(line))

    def _take(self, entry: dict[str, Any]) -> None:
        if "lines" in entry:
            self.lines = [tuple(line) for line in entry["lines"]]
        else:
            self.files[entry["file"]] = entry["digest"]
            self.tests = {name: test for name, test in self.tests.items() if test["file"] != entry["file"]}
            self.tests |= {name: {**test, "file": entry["file"]} for name, test in entry["tests"].items()}

    def _keep(self, entry: dict[str, Any]) -> None:
        self._take(entry)
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def mend(self, work: Path) -> None:
        """Run those that failed with probes without any: torch.compile does not trace a function that has them."""
        failed: dict[str, list[str]] = defaultdict(list)
        for name, test in self.tests.items():
            if test["outcome"] == "failed":
                failed[test["file"]].append(name)
        if not failed:
            return
        copy = make_copy(work / "plain")
        for interpreted in {file.startswith(INTERPRETED) for file in failed}:
            forks = Forks(copy, interpreted)
            for file in (file for file in failed if file.startswith(INTERPRETED) == interpreted):
                ran = forks.run(failed[file], first=False)
                mended = {name: dict(test) for name, test in self.tests.items() if test["file"] == file}
                for name in failed[file]:
                    outcome, seconds = ran.tests.get(name, ("failed", 0.0))
                    mended[name] |= {"outcome": "fails" if outcome == "failed" else outcome, "seconds": seconds}
                    print(f"without probes: {name} {outcome}", flush=True)
                self._keep({"file": file, "digest": self.files[file], "tests": mended})
            forks.close()

    def fill(self, work: Path, files: list[str], folders: Iterable[str]) -> None:
        """Run new and changed test files in a copy with probes in these folders of the package."""
        digests = {file: digest([ROOT / file]) for file in files}
        missing = [file for file in files if self.files.get(file) != digests[file]]
        if not missing:
            return
        copy = make_copy(work / "probed")
        lines = put_probes(copy, folders)
        if not self.lines:
            self._keep({"lines": lines})
        forks: dict[bool, Forks] = {}
        for place, file in enumerate(missing):
            interpreted = file.startswith(INTERPRETED)
            if interpreted not in forks:
                forks[interpreted] = Forks(copy, interpreted)
            ran = forks[interpreted].run([file], first=False)
            tests = {
                name: {"outcome": outcome, "seconds": seconds, "hits": ran.hits[name]}
                for name, (outcome, seconds) in ran.tests.items()
            }
            self._keep({"file": file, "digest": digests[file], "tests": tests})
            outcomes = dict(Counter(test["outcome"] for test in tests.values()))
            print(f"{place + 1}/{len(missing)} {file} {ran.seconds:.0f} s {outcomes} {ran.how}", flush=True)
        for one in forks.values():
            one.close()

    def of(self, mutant: Mutant, kernel: bool) -> list[str]:
        """Return the tests that run a statement; of a kernel or a line that runs at import, those that run its file."""
        ids = {
            place
            for place, (path, line, _) in enumerate(self.lines)
            if path == mutant.path and line == mutant.statement
        }
        if kernel or not any(self.lines[place][2] for place in ids):
            ids = {place for place, (path, _, inside) in enumerate(self.lines) if path == mutant.path and inside}
        return [
            name
            for name, test in self.tests.items()
            if test["outcome"] == "passed"
            and not ids.isdisjoint(test["hits"])
            and (not kernel or name.startswith(INTERPRETED))
        ]


class Planter:
    """Plants faults in a copy of the checkout and runs tests there."""

    def __init__(self, work: Path, covered: Covered, limit: float) -> None:
        self.covered, self.limit = covered, limit
        self.copy = make_copy(work / "planted")
        self._forks: dict[bool, Forks] = {}
        self._trust = work / "trusted.json"
        self.trusted: dict[str, bool] = json.loads(self._trust.read_text()) if self._trust.exists() else {}
        self._planted = 10**9
        self.kills: Counter[tuple[str, str]] = Counter()  # of a test in a file

    def _run(self, tests: list[str], first: bool = True) -> Ran:
        interpreted = tests[0].startswith(INTERPRETED)
        if interpreted not in self._forks:
            self._forks[interpreted] = Forks(self.copy, interpreted)
        seconds = {name: self.covered.tests[name]["seconds"] for name in tests}
        return self._forks[interpreted].run(tests, seconds, first)

    def _run_planted(self, mutant: Mutant, tests: list[str], first: bool = True) -> Ran:
        """Run tests with a planted fault."""
        path = self.copy / "warpfold" / mutant.path
        self._planted += 1
        bring_back = replace_file(path, mutant.applied(path.read_text(encoding="utf-8")), self._planted)
        ran = self._run(tests, first)
        bring_back()
        return ran

    def _believed(self, test: str) -> bool:
        """Say whether a test passes without a fault, alone; it is asked once."""
        if test not in self.trusted:
            ran = self._run([test])
            self.trusted[test] = not ran.failed and ran.tests[test][0] == "passed"
            self._trust.write_text(json.dumps(self.trusted))
        return self.trusted[test]

    def _price(self, test: str, mutant: Mutant) -> float:
        """Rate the seconds of a test: those that found something in this file go first, and those of its room."""
        own = test.startswith(f"tests/{mutant.path.rpartition('/')[0]}")
        return self.covered.tests[test]["seconds"] / (1 + 2 * own + 3 * self.kills[mutant.path, test])

    def tests(self, mutant: Mutant) -> list[str]:
        """List the tests that run a fault and pass without one."""
        kernel = in_kernel((self.copy / "warpfold" / mutant.path).read_text(encoding="utf-8"), mutant)
        return [test for test in self.covered.of(mutant, kernel) if self.trusted.get(test, True)]

    def outcomes(self, mutant: Mutant, tests: list[str]) -> dict[str, str]:
        """Plant a fault, and run all of these tests, also after one that fails."""
        found: dict[str, str] = {}
        for left in by_process(tests):
            while left:
                ran = self._run_planted(mutant, left, first=False)
                found |= {test: outcome for test, (outcome, _) in ran.tests.items()}
                if ran.how in ("", "failed"):  # to the end
                    break
                found |= dict.fromkeys([ran.failed] if ran.failed in left else left, "failed")  # all: not even imported
                left = [test for test in left if test not in found]
        return found

    def plant(self, mutant: Mutant) -> dict[str, Any]:
        """Plant a fault, run its tests, and return the result: the fields of the fault, the outcome and the killer."""
        begun, ran_tests, tests = time.monotonic(), list[str](), self.tests(mutant)
        tests.sort(key=lambda test: self._price(test, mutant))
        whole = itertools.accumulate(self.covered.tests[test]["seconds"] for test in tests)
        chosen = [test for place, (test, seconds) in enumerate(zip(tests, whole)) if seconds <= self.limit or not place]
        outcome, killer, how = "survived" if tests else "not covered", "", ""
        for group in by_process(chosen):
            while group and outcome == "survived":
                ran = self._run_planted(mutant, group)
                ran_tests += ran.tests
                if not ran.failed:
                    break
                killer = ran.failed
                if killer in self.covered.tests and not self._believed(killer):
                    group = [test for test in group if self.trusted.get(test, True) and test not in ran.tests]
                    killer = ""
                    continue
                outcome, how = "killed", ran.how
                self.kills[mutant.path, killer] += 1
        return {
            **asdict(mutant),
            "name": mutant.name,
            "outcome": outcome,
            "killer": killer,
            "how": how,
            "ran": len(ran_tests),
            "covering": len(tests),
            "limit": self.limit,
            "seconds": round(time.monotonic() - begun, 1),
            "tests": ran_tests,
        }


def by_process(tests: Iterable[str]) -> list[list[str]]:
    """Group tests by the process that runs them: those in which Triton interprets its kernels have their own."""
    groups = [[t for t in tests if t.startswith(INTERPRETED) == interpreted] for interpreted in (False, True)]
    return [group for group in groups if group]


def replace_file(path: Path, text: str, moment: int) -> Callable[[], object]:
    """Write another text to a file; return what brings back the old one.

    moment: the modification time, from which Python detects stale bytecode. Every text of a file needs a new one.
    """
    kept = path.with_suffix(".kept")
    path.rename(kept)
    path.write_text(text, encoding="utf-8")
    os.utime(path, (moment, moment))
    return lambda: kept.rename(path)


def in_kernel(source: str, mutant: Mutant) -> bool:
    """Say whether a fault is in a function that Triton compiles."""
    import ast

    return any(
        is_kernel(node) and node.lineno <= mutant.line <= (node.end_lineno or 0)  # type: ignore[attr-defined]
        for node in ast.walk(ast.parse(source))
    )


def digest(paths: Iterable[Path]) -> str:
    """Return a hash of files."""
    whole = hashlib.sha256()
    for path in paths:
        whole.update(os.path.relpath(path, ROOT).encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()[:16]


def read(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Read results: the header, and of each fault what came last."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return lines[0], {line["name"]: line for line in lines[1:]}


def test_files(places: Iterable[str]) -> list[str]:
    """List files of tests."""
    found = []
    for place in places:
        path = ROOT / place
        found += [path] if path.is_file() else sorted(path.rglob("test_*.py"))
    names = dict.fromkeys(path.relative_to(ROOT).as_posix() for path in found)
    return [name for name in names if name not in LEFT_OUT]


def report(header: dict[str, Any], results: dict[str, dict[str, Any]]) -> None:
    """Print tables by room and by kind, and what survived."""
    known = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")) if EQUIVALENT.exists() else {}
    print(
        f"seed {header['seed']}, commit {header['commit']}, {len(results)} of {sum(header['counts'].values())} faults"
    )
    for word in ("room", "kind"):
        columns = "planted | change no result | on other devices alone | killed | survived | run by no test | score"
        print(f"\n| {word} | {columns} |\n|---|---|---|---|---|---|---|---|")
        groups: dict[str, Counter[str]] = defaultdict(Counter)
        for one in results.values():
            outcome = one["outcome"]
            if outcome != "killed" and one["name"] in known:
                outcome = "elsewhere" if "device" in known[one["name"]] else "equivalent"
            for group in (one[word], "all"):
                groups[group][outcome] += 1
        for group, counts in sorted(groups.items(), key=lambda item: item[0] == "all"):
            left = counts["killed"] + counts["survived"] + counts["not covered"]
            names = "equivalent", "elsewhere", "killed", "survived", "not covered"
            score = f"{100 * counts['killed'] / left:.1f} %" if left else ""
            print(f"| {group} | {' | '.join(map(str, (counts.total(), *(counts[n] for n in names))))} | {score} |")
    print()
    for one in results.values():
        if one["outcome"] != "killed":
            reason = known.get(one["name"], {}).get("reason", "")
            print(f"{one['outcome']}: {one['name']}  {one['before'][:70]!r} -> {one['after'][:70]!r}", end="")
            print(f"  ({one['ran']} of {one['covering']} tests)" + (f"  {reason}" if reason else ""))


def idle(results: dict[str, dict[str, Any]], covered: Covered) -> dict[str, int]:
    """Find tests of at least a second that found none of the faults they ran with: test -> number of faults."""
    runs: Counter[str] = Counter(test for one in results.values() for test in one.get("tests", ()))
    found = {one["killer"] for one in results.values()}
    names = [name for name in runs if name not in found and covered.tests.get(name, {"seconds": 0})["seconds"] >= 1]
    return {name: runs[name] for name in sorted(names, key=lambda name: -covered.tests[name]["seconds"])}


def ask(planter: Planter, killed: list[Mutant], tests: Iterable[str], number: int) -> None:
    """Run each test beside faults that others found, those that fewest tests run, and print which it finds itself."""
    covering = {mutant: planter.tests(mutant) for mutant in sorted(killed, key=lambda mutant: mutant.name)}
    asked: dict[Mutant, list[str]] = defaultdict(list)
    for test in tests:
        ran = [mutant for mutant, others in covering.items() if test in others]
        for mutant in sorted(ran, key=lambda mutant: len(covering[mutant]))[:number]:
            asked[mutant].append(test)
    found: dict[str, dict[str, bool]] = defaultdict(dict)
    for place, (mutant, names) in enumerate(asked.items()):
        outcomes = planter.outcomes(mutant, names)
        for name, outcome in outcomes.items():
            found[name][mutant.name] = outcome == "failed"
        print(
            f"{place + 1}/{len(asked)} {mutant.name}: {dict(Counter(outcomes.values()))}", file=sys.stderr, flush=True
        )
    for test in tests:
        which = [name for name, yes in found[test].items() if yes]
        seconds = planter.covered.tests[test]["seconds"]
        print(f"| {test} | {len(which)} of {len(found[test])} | {seconds:.1f} s | {' '.join(which)} |", flush=True)


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="results, a line for each fault; it grows")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "warpfold-mutants", help="copies and what tests run"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the usual number of faults")
    parser.add_argument(
        "--counts",
        nargs="+",
        metavar="FOLDER=N",
        help=f"the number of faults in each folder; default: {' '.join(f'{k}={v}' for k, v in COUNTS.items())}",
    )
    parser.add_argument("--list", action="store_true", help="print the faults that the seed draws, and stop")
    parser.add_argument(
        "--limit", type=float, default=60.0, help="seconds that the tests of a fault may take without it"
    )
    parser.add_argument("--only", nargs="+", default=[""], metavar="PART", help="faults whose name has one of these")
    parser.add_argument("--again", choices=("survived", "not covered", "killed"), help="run those once more")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files and folders of tests")
    parser.add_argument("--cover", action="store_true", help="only find out what tests run")
    parser.add_argument("--report", action="store_true", help="print tables of what is there")
    parser.add_argument("--idle", action="store_true", help="print tests that found nothing")
    parser.add_argument("--ask", type=int, metavar="N", help="with --idle: run each beside N faults that others found")
    given = parser.parse_args(arguments)
    if given.ask and not given.idle:
        parser.error("--ask goes with --idle")
    package = digest(sorted((ROOT / "warpfold").rglob("*.py")))
    given.work.mkdir(parents=True, exist_ok=True)
    try:
        counts = {folder: int(count) for folder, _, count in (item.partition("=") for item in given.counts or ())}
    except ValueError:
        parser.error("--counts takes FOLDER=N, such as scoring=20")
    counts = {folder: round(count * given.share) for folder, count in (counts or COUNTS).items()}
    # Probes depend on the package and on the folders that have them.
    folders = hashlib.sha256(" ".join(sorted(counts)).encode()).hexdigest()[:8]
    covered = Covered(given.work / f"covered-{package}-{folders}.jsonl")
    if given.report:
        report(*read(given.out))
        return 0
    if given.idle:
        _, results = read(given.out)
        tests = idle(results, covered)
        if given.ask:
            fields = Mutant.__dataclass_fields__
            faults = [Mutant(**{f: one[f] for f in fields}) for one in results.values() if one["outcome"] == "killed"]
            ask(Planter(given.work, covered, given.limit), faults, tests, given.ask)
        else:
            for name, met in tests.items():
                print(f"| {name} | {met} | {covered.tests[name]['seconds']:.1f} s |")
        return 0
    drawn = draw(ROOT / "warpfold", counts, given.seed)
    if given.list:
        for mutant in drawn:
            print(f"{mutant.name}  {mutant.before[:70]!r} -> {mutant.after[:70]!r}")
        return 0
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    header = {"seed": given.seed, "counts": counts, "package": package, "commit": commit.strip()}
    header["faults"] = digest([Path(mutants.__file__)])
    if given.out.exists():
        before, results = read(given.out)
        if any(before[name] != header[name] for name in ("seed", "counts", "package", "faults")):
            sys.exit(f"{given.out}: of another seed, number, package or mutants.py; name another file")
    else:
        results = {}
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(header) + "\n", encoding="utf-8")
    covered.fill(given.work, test_files(given.tests), counts)
    covered.mend(given.work)
    if given.cover:
        return 0
    planter = Planter(given.work, covered, given.limit)
    for one in results.values():
        planter.kills[one["path"], one["killer"]] += 1
    for place, mutant in enumerate(drawn):
        known = results.get(mutant.name)
        if not any(part in mutant.name for part in given.only) or (known and known["outcome"] != given.again):
            continue
        result = planter.plant(mutant)
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        print(
            f"{place + 1}/{len(drawn)} {result['outcome']} {mutant.name} {result['seconds']} s"
            f" {result['ran']}/{result['covering']} {result['killer']} {result['how']}",
            flush=True,
        )
    return 0
