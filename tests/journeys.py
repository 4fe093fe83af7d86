"""Measure journeys through the package: how many files and functions a reader visits to follow one operation.

    python tests/journeys.py                            # this checkout; the table of docs/explanation/architecture.md
    python tests/journeys.py --root ../before --json    # another checkout, for a program to read
    python tests/journeys.py triangle layer --show      # these journeys only; executed functions, on stderr

sys.setprofile counts the files and functions of the package that are executed, and their calls. Everything runs once
before it is counted, so that caches are full and modules are loaded. Comprehensions and lambdas count as their
enclosing function. Code that does not run is counted in the source.

The script supports checkouts of different ages, so it looks up names when it needs them, in the whole package. If a
name is gone, the script reports it: add the new name next to the old name in this file.
"""

import argparse
import ast
import importlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

OWN = Path(__file__).resolve()
ROOT = OWN.parents[1]  # the measured checkout (--root)
# These pages describe the journeys.
NOT_COUNTED = (
    "CHANGELOG.md",
    "tests/journeys.py",
    "tests/faults.toml",
    "docs/explanation/architecture.md",
)
MOST_FILES = 15  # per folder
SHOW = False


@dataclass(frozen=True)
class Row:
    """One or several related measurements of a journey."""

    what: str
    files: int | None = None
    functions: int | None = None
    calls: int | None = None
    note: str = ""


class Gone(Exception):
    """A name that the script needs is no longer defined in the measured checkout."""


# Reading the source


def sources(folder: str = "warpfold", root: Path | None = None) -> dict[str, str]:
    """Read every Python file below a folder of the checkout.  Keys: paths relative to the checkout."""
    root = root or ROOT
    return {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted((root / folder).rglob("*.py"))
    }


def module_name(path: str) -> str:
    """Return the dotted name of a file."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def find(*names: str, under: str = "") -> Any:
    """Find the first of `names` that a module of the package defines.

    under: text that the module's path contains.  Raises Gone if no module defines any of the names.
    """
    for name in names:
        defined = re.compile(rf"^(?:class|def) {name}\b|^{name}(?:: [^=\n]+)? = |^    {name} = ", re.M)
        for path, text in sources().items():
            if under in path and defined.search(text):
                module = importlib.import_module(module_name(path))
                if hasattr(module, name):
                    return getattr(module, name)
    raise Gone(f"{' or '.join(names)} is not defined in warpfold/**{under}**; tell tests/journeys.py its new name")


def naming(what: str, word: str) -> Row:
    """Count the files that contain a word, and list those of the package.

    Only files that git tracks count, without changelogs.
    """
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    kept = (name for name in tracked if name not in NOT_COUNTED and not name.startswith("benchmarks/results/"))
    # `_` ends a word: triangle_factor_backward contains triangle_factor.
    named = re.compile(rf"(?<![A-Za-z0-9]){word}(?![A-Za-z0-9])")
    found = [
        name
        for name in kept
        if name.endswith((".py", ".md", ".json", ".toml", ".sh"))
        and (ROOT / name).exists()
        and named.search((ROOT / name).read_text(encoding="utf-8"))
    ]
    ours = [name.removeprefix("warpfold/") for name in found if name.startswith("warpfold/")]
    return Row(what, len(found), note=f"{len(ours)} in the package: {', '.join(ours)}")


def imported(text: str) -> set[str]:
    """List the modules, and possibly names in them, that a file imports anywhere, even only for type checkers."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    others = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return plain | {n for node in others for n in (node.module or "", *(f"{node.module}.{a.name}" for a in node.names))}


def circles(root: Path | None = None) -> list[list[str]]:
    """Find every group of modules that import each other, directly or through other modules of the group."""
    texts = {module_name(path): text for path, text in sources(root=root).items() if path != "warpfold/__init__.py"}
    reached = {name: (imported(text) & texts.keys()) - {name} for name, text in texts.items()}
    grown = True
    while grown:
        grown = False
        for of_one in reached.values():
            more = set().union(*(reached[name] for name in of_one)) - of_one
            of_one |= more
            grown = grown or bool(more)
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in reached}
    return sorted(sorted(group) for group in groups if group)


def rooms(root: Path | None = None) -> dict[str, int]:
    """Count the files of each folder of the package, without `__init__` and without subfolders."""
    return dict(Counter(path.rpartition("/")[0] for path in sources(root=root) if not path.endswith("__init__.py")))


# Counting executed functions


class Trace:
    """Context that counts the calls of every function of the package."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self._prefix = str(ROOT / "warpfold") + os.sep

    def __enter__(self) -> "Trace":
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self._prefix) and not code.co_name.startswith("<"):
            self.calls[code.co_filename.removeprefix(self._prefix), code.co_qualname] += 1


def counted(what: str, work: Callable[[], object]) -> Row:
    """Count the files, functions and calls that the second run of `work` executes."""
    work()
    with Trace() as trace:
        work()
    if SHOW:
        for (file, function), calls in sorted(trace.calls.items()):
            print(f"  {file}: {function} {calls}", file=sys.stderr)
    return Row(what, len({file for file, _ in trace.calls}), len(trace.calls), sum(trace.calls.values()))


def elsewhere(journey: str, root: Path | None = None, **environment: str) -> list[Row]:
    """Measure a journey in another process with these environment variables, and possibly of another checkout."""
    command = [sys.executable, str(OWN), "--root", str(root or ROOT), "--json", journey, *(["--show"] if SHOW else [])]
    ran = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    print(ran.stderr, end="", file=sys.stderr)
    if ran.returncode:
        raise Gone(ran.stderr.strip().splitlines()[-1] if ran.stderr else f"exit code {ran.returncode}")
    return [Row(**row) for row in json.loads(ran.stdout)]


@contextmanager
def sample() -> Iterator[tuple[Path, Path]]:
    """Generate one sample protein.  Its mmCIF file and alignment exist within the context."""
    with tempfile.TemporaryDirectory() as folder:
        find("generate", under="data")(Path(folder) / "one", 1)
        (structure,), (alignment,) = (list((Path(folder) / "one").glob(f"*/*.{kind}")) for kind in ("cif", "a3m"))
        yield structure, alignment


def features_of(structure: Path, alignment: Path, crop: int) -> dict[str, Any]:
    """Compute the features of the only chain of an mmCIF file and its alignment, as in training."""
    read = find("read_structure")(structure)
    (chain,) = read.chains.values()
    raw = find("from_chain")("one", read, chain, [find("read_alignment")(alignment)])
    config = find("SampleConfig")(crop=crop, max_msa=8, max_extra=16)
    arrays: dict[str, Any] = find("make_features")(raw, config, 0, ("one", 0), train=True)
    return arrays


# The journeys


def triangle(what: str, kernels: str = "fast", size: int = 64, channels: int = 128) -> Row:
    """Measure one triangle product of Algorithm 11."""
    import torch

    layer = find("TriangleMultiplication")(channels, channels, outgoing=True).eval()
    z, mask = torch.randn(size, size, channels), torch.ones(size, size)
    with find("using", under="ops")(kernels):
        return counted(f"one triangle product, {what}", lambda: layer(z, mask))


def journey_triangle() -> list[Row]:
    """Measure a triangle product on every backend."""
    # Triton reads TRITON_INTERPRET when a kernel is defined, so this needs a separate process.
    interpreted = elsewhere("_interpreted", TRITON_INTERPRET="1")
    return [triangle("by its definition", "definition"), triangle("fast on a CPU"), *interpreted]


def journey__interpreted() -> list[Row]:
    """Measure the GPU's triangle product, in a process that was started with TRITON_INTERPRET=1."""
    with find("interpreting", under="ops")():
        return [triangle("by a GPU's kernels, interpreted", size=16, channels=32)]


def journey_block() -> list[Row]:
    """Measure one Evoformer block, forward."""
    import torch

    stack = find("Evoformer")(16, 12, find("EvoformerConfig")(blocks=1)).eval()
    m, z = torch.randn(5, 9, 16), torch.randn(9, 9, 12)
    return [counted("one Evoformer block, forward", lambda: stack(m, z, torch.ones(5, 9), torch.ones(9, 9)))]


def journey_step() -> list[Row]:
    """Measure one training step of the tiny model on a sample protein."""
    with sample() as files:
        batch = find("to_tensors", under="batch")(features_of(*files, crop=23))
    model = importlib.import_module("tests.helpers").tiny_model().train()
    optimizer = find("Optimizer")(model, find("OptimConfig")())
    total_loss, losses = find("total_loss"), find("LossConfig")()

    def step() -> None:
        loss, _ = total_loss(model(batch, 0), batch, losses)
        loss.backward()
        optimizer.collect(loss)
        optimizer.step(0)

    return [counted("one training step: model, losses, backward, optimizer", step)]


def journey_mmcif() -> list[Row]:
    """Measure the computation of features from an mmCIF file and its alignment."""
    with sample() as files:
        return [counted("one mmCIF and its alignment to features", lambda: features_of(*files, crop=23))]


def journey_naming() -> list[Row]:
    """Count the files that name one operation, option or optimizer: the files to edit when adding another."""
    return [
        naming("a fused operation: files that name triangle_factor", "triangle_factor"),
        naming("an option of a command: files that name max_recycles", "max_recycles"),
        naming("an optimizer: files that name LAMB", "[Ll]amb"),
    ]


def journey_house() -> list[Row]:
    """Count files, functions and lines of the package, circular imports, full folders, and names that are used once."""
    texts = sources()
    lengths, once, in_once = [], 0, 0
    for text in texts.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lengths.append((node.end_lineno or node.lineno) - node.lineno + 1)
                if re.match("_[a-z]", node.name) and len(re.findall(rf"\b{node.name}\b", text)) == 2:
                    once, in_once = once + 1, in_once + lengths[-1]
    lines, of_tests = (sum(text.count("\n") for text in held.values()) for held in (texts, sources("tests")))
    turning, full = circles(), {room: count for room, count in rooms().items() if count > MOST_FILES}
    within = ", ".join(f"{room} {count}" for room, count in sorted(full.items()))
    middle = f"{lines} lines; functions of {statistics.median(lengths):g} lines in the median"
    return [
        Row("the package", len(texts), len(lengths), note=middle),
        Row("the tests", len(sources("tests")), note=f"{of_tests} lines"),
        Row("files in circles", sum(map(len, turning)), note="; ".join(map(" - ".join, turning))),
        Row(f"rooms of more than {MOST_FILES} files", len(full), note=within),
        Row("private functions that are used once", functions=once, note=f"{in_once} lines"),
    ]


LAYER = '''

class GatedMLP(AxialUpdate):
    """A gated MLP on every pair alone: what a newcomer adds to the pair stack."""

    axis = None

    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm = LayerNorm(c)
        self.value = Linear(c, 2 * c, init="relu")
        self.gate = Linear(c, 2 * c)
        self.out = Linear(2 * c, c)

    def update(self, read: Read, mask: Tensor, shared: Shared, x: Tensor | None, factors: Factors | None) -> Tensor:
        n = self.norm(read)
        return residual(x, self.out(self.value(n).relu() * self.gate(n).sigmoid()) * mask[..., None], factors)
'''
# Edits that add the layer to a block: lines of model/evoformer.py and their replacements.
IN_A_BLOCK = {
    "        self.transition = Transition(c_z, c.transition, c.activation)\n": "        self.mlp = GatedMLP(c_z)\n",
    'Step("z", self.transition)': ', Step("z", self.mlp)',
}
PLANS: dict[str, dict[str, Any]] = {
    "whole": {},
    "in chunks": {"chunk": 3},
    "in place": {"chunk": 3, "in_place": True},
    "recomputed": {"recompute": "block"},
    "axial = 2": {"axial": 2},
}


def add_layer(root: Path) -> int:
    """Write the layer into the package below `root`, and add it to the pair stack.  Returns the number of added lines.

    Raises Gone if the code of a block has changed.
    """
    path = root / "warpfold/model/evoformer.py"
    text = path.read_text(encoding="utf-8")
    for there, more in IN_A_BLOCK.items():
        if text.count(there) != 1:
            raise Gone(f"{there.strip()} is not in model/evoformer.py once: tell IN_A_BLOCK how a block takes a layer")
        text = text.replace(there, there + more)
    start = text.index("\n\nclass ")
    text = text[:start] + LAYER.rstrip() + "\n" + text[start:]
    path.write_text(text, encoding="utf-8")
    return sum(bool(line.strip()) for line in LAYER.splitlines()) + len(IN_A_BLOCK)


def journey_layer() -> list[Row]:
    """Add a gated MLP to the pair stack of a copy, run it under every plan, and compare with the unsharded model."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        for name in ("warpfold", "tests", "settings"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        added = add_layer(copy)
        (row,) = elsewhere("_layer", copy)
    return [replace(row, what=f"a gated MLP in the pair stack: {added} lines", files=1)]


def journey__layer() -> list[Row]:
    """Run the tiny model, which has a new layer, under every plan, and compare the results with the default plan's."""
    import torch

    helpers, run_ranks = importlib.import_module("tests.helpers"), importlib.import_module("tests.ranks").run_ranks
    torch.set_num_threads(1)
    batch = helpers.random_batch(residues=7)

    def fold(settings: dict[str, Any]) -> torch.Tensor:
        model = helpers.tiny_model()
        assert any("mlp" in name for name, _ in model.named_parameters()), "the layer is not in the model"
        plan = find("Plan", under="parallel")(precision="fp64", **settings)
        mesh = find("make_mesh")(plan.data, plan.axial, plan.branch) if plan.axial > 1 else None
        find("Execution", under="parallel")(plan, mesh).bind(model)
        double = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
        with torch.no_grad() if plan.in_place else nullcontext():
            positions: torch.Tensor = model(double, 0).structure.final_atom37.detach()
        return positions

    expected = fold({})
    said = []
    for name, settings in PLANS.items():
        found = run_ranks(fold, settings["axial"], settings) if "axial" in settings else [fold(settings)]
        error = max(float((one - expected).abs().max() / expected.abs().max()) for one in found)
        said.append(name if error < 1e-10 else f"{name} DIFFERS BY {error:.1e}")
    return [Row("layer", note="runs unchanged: " + ", ".join(said))]


JOURNEYS = ("triangle", "block", "step", "mmcif", "layer", "naming", "house")


def table(rows: Sequence[Row]) -> str:
    """Format the rows as text."""
    lines = [f"{'':56} {'files':>6} {'functions':>10} {'calls':>7}"]
    for row in rows:
        numbers = zip((row.files, row.functions, row.calls), (6, 10, 7))
        cells = [f"{'' if n is None else n:>{width}}" for n, width in numbers]
        lines.append(" ".join([f"{row.what:56}", *cells]).rstrip())
        lines += [f"    {row.note}"] if row.note else []
    return "\n".join(lines)


def main() -> int:
    """Measure and print the selected journeys.  Returns 1 if a name that one of them needs is gone."""
    global ROOT, SHOW
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("journeys", nargs="*", help=f"of {', '.join(JOURNEYS)} (default: all)")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to measure (default: this one)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--show", action="store_true", help="say on stderr what was executed")
    given = parser.parse_args()
    ROOT, SHOW = given.root.resolve(), given.show
    # Replace this folder, because its subfolders have the names of the package's.
    sys.path[0] = str(ROOT)
    rows, gone = [], False
    for name in given.journeys or JOURNEYS:
        try:
            rows += globals()[f"journey_{name}"]()
        except Gone as error:
            gone = True
            print(f"{name}: {error}", file=sys.stderr)
    print(json.dumps([asdict(row) for row in rows], indent=1) if given.json else table(rows))
    return int(gone)


if __name__ == "__main__":
    sys.exit(main())
