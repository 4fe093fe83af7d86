"""Plant faults in the package, one at a time, and check whether the tests find them.

    python tests/faults.py                        # run all of tests/faults.toml (ten minutes on one core)
    python tests/faults.py --only gate mask       # run the faults whose names contain one of these words
    python tests/faults.py --check                # run no tests; list the faults whose source is gone
    python tests/faults.py --root ../before       # test another checkout

The source of a fault is searched for in every file of the package, so that a fault survives a move. If the source is
gone, the table reports it: find the code that does its work now, and quote that code in tests/faults.toml. The results
are in docs/explanation/exactness.md.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

OWN = Path(__file__).resolve()
LIMIT = 900  # seconds per test file
GONE = ("missed", "source no longer there", "no such tests")


@dataclass(frozen=True)
class Fault:
    """A change of the source, and the tests that should find it.

    tests: names of test files in any folder, or FILE::TEST.
    """

    name: str
    source: str
    instead: str
    tests: str
    path: str = ""

    def place(self, root: Path) -> Path | None:
        """Find the file of the package that contains the source.  Returns None unless it occurs exactly once."""
        files = (path for path in (root / "warpfold").rglob("*.py") if self.path in path.relative_to(root).as_posix())
        found = [path for path in files for _ in range(path.read_text(encoding="utf-8").count(self.source))]
        return found[0] if len(found) == 1 else None

    def files(self, root: Path) -> list[str]:
        """List the existing test files, or single tests if the file still defines them, likeliest first."""
        found = []
        for name, _, test in (one.partition("::") for one in self.tests.split()):
            for path in sorted((root / "tests").rglob(f"{name}.py")):
                known = test and f"def {test}(" in path.read_text(encoding="utf-8")
                found.append(f"{path.relative_to(root)}::{test}" if known else str(path.relative_to(root)))
        return found


def plant(fault: Fault, root: Path, copy: Path) -> str:
    """Run a fault's tests in a copy that contains the fault.

    Returns the test that fails, or one of `GONE` if no test fails.
    """
    where, tests = fault.place(root), fault.files(root)
    if where is None or not tests:
        return GONE[1] if where is None else GONE[2]
    broken = copy / where.relative_to(root)
    text = broken.read_text(encoding="utf-8")
    broken.write_text(text.replace(fault.source, fault.instead), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-xq", "-n0", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    try:
        for test in tests:
            try:
                ran = subprocess.run(
                    [*command, test], cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT
                )
            except subprocess.TimeoutExpired:
                return f"{test}: does not end"
            # pytest exits with 5 if it selects no test: the file has only slow tests.
            if ran.returncode not in (0, 5):
                failed = re.search(r"^(?:FAILED|ERROR) \S*?([\w.]+\.py(?:::\w+)*)", ran.stdout, re.M)
                return failed[1] if failed else f"{test}: exit code {ran.returncode}"
        return GONE[0]
    finally:
        broken.write_text(text, encoding="utf-8")


def main() -> int:
    """Plant the selected faults.  Returns 1 if a fault was missed or could not be planted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="faults whose name has one of these")
    parser.add_argument("--root", type=Path, default=OWN.parents[1], help="the checkout to test (default: this one)")
    parser.add_argument("--check", action="store_true", help="run no tests: name the faults whose source is gone")
    given = parser.parse_args()
    table = tomllib.loads(OWN.with_suffix(".toml").read_text(encoding="utf-8"))
    faults = [Fault(name, **values) for name, values in table.items() if any(word in name for word in given.only)]
    root, lost = given.root.resolve(), 0
    if given.check:
        gone = [fault.name for fault in faults if fault.place(root) is None or not fault.files(root)]
        print("\n".join(gone) or f"all {len(faults)} are there")
        return int(bool(gone))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "site", "demo"))
        for fault in faults:
            begun = time.monotonic()
            found = plant(fault, root, copy)
            lost += found in GONE
            print(f"| {fault.name} | {found} | {time.monotonic() - begun:.0f} s |", flush=True)
    print(f"{len(faults) - lost} of {len(faults)} found")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
