"""Measure journeys through the package: how many files and functions somebody reads to follow one thing.

    python tests/journeys.py                            # this checkout; a table
    python tests/journeys.py --root ../before --json    # another checkout, for a program to read
    python tests/journeys.py triangle layer             # some journeys only

What runs is counted with sys.setprofile: files and functions of the package that were executed, and calls of them.
Everything has run once before it is counted, so caches are full and modules loaded.  Comprehensions and lambdas belong
to the function around them.  What does not run is counted by searching the files that git knows for a name.

The script serves checkouts of different ages, so it looks names up late, wherever in the package they are defined.
Where a name is gone it says so; add the new name beside the old one here.
"""

import argparse
import ast
import difflib
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
ROOT = OWN.parents[1]  # the checkout that is measured; --root names another
NOT_COUNTED = ("CHANGELOG.md", "tests/journeys.py", "docs/architecture.md")  # they tell of journeys
C_Z = 12  # channels of z in tests/helpers.py's model


@dataclass(frozen=True)
class Row:
    """One measured figure of a journey, or several that belong together."""

    journey: str
    what: str
    files: int | None = None
    functions: int | None = None
    calls: int | None = None
    note: str = ""


class Gone(Exception):
    """A name that the script needs is no longer defined in the measured checkout."""


# Finding things


def package() -> list[Path]:
    """Return every Python file of the package."""
    return sorted((ROOT / "warpfold").rglob("*.py"))


def find(*names: str, under: str = "") -> Any:
    """Return the first of `names` that a module of the package defines; `under`: a part of the module's path.

    Errors: Gone, with the names.
    """
    for name in names:
        defined = re.compile(rf"^(?:class|def) {name}\b|^{name}(?:: [^=\n]+)? = |^    {name} = ", re.M)
        for path in package():
            where = path.relative_to(ROOT).with_suffix("").as_posix()
            if under in where and defined.search(path.read_text(encoding="utf-8")):
                module = importlib.import_module(where.removesuffix("/__init__").replace("/", "."))
                if hasattr(module, name):
                    return getattr(module, name)
    raise Gone(f"{' or '.join(names)} is not defined in warpfold/**{under}**; tell tests/journeys.py its new name")


def tracked() -> list[str]:
    """Return the files that git knows."""
    return subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def naming(word: str) -> dict[str, list[str]]:
    """Return the files that name a word, by the folder at the root: those that git knows, changelogs apart."""
    found: dict[str, list[str]] = {}
    for name in tracked():
        path = ROOT / name
        if path.suffix not in (".py", ".md", ".json", ".toml", ".sh") or not path.exists():
            continue
        if name in NOT_COUNTED or name.startswith("benchmarks/results/"):
            continue
        # `_` counts as the end of a word: triangle_factor_backward names triangle_factor.
        if re.search(rf"(?<![A-Za-z0-9]){word}(?![A-Za-z0-9])", path.read_text(encoding="utf-8")):
            found.setdefault(name.split("/")[0], []).append(name)
    return found


def naming_row(journey: str, what: str, word: str) -> Row:
    """Return how many files name a word, and which of the package they are."""
    found = naming(word)
    ours = found.pop("warpfold", [])
    note = f"{len(ours)} in the package, " + ", ".join(f"{len(paths)} in {room}" for room, paths in found.items())
    short = ", ".join(name.removeprefix("warpfold/") for name in ours)
    return Row(journey, what, files=len(ours) + sum(map(len, found.values())), note=f"{note}: {short}")


# Counting what runs


class Trace:
    """Within it, every call of a function of the package is counted.

    holds: counts only calls in which it is true of the caller's local variables when the function returns.
    """

    def __init__(self, holds: Callable[[dict[str, Any]], bool] | None = None) -> None:
        self.holds = holds
        self.calls: Counter[tuple[str, str]] = Counter()
        self._prefix = str(ROOT / "warpfold") + os.sep

    def __enter__(self) -> "Trace":
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != ("return" if self.holds else "call") or not code.co_filename.startswith(self._prefix):
            return
        if not code.co_name.startswith("<") and (self.holds is None or self.holds(frame.f_locals)):
            self.calls[code.co_filename, code.co_qualname] += 1

    def row(self, journey: str, what: str, note: str = "") -> Row:
        files = {file for file, _ in self.calls}
        return Row(journey, what, len(files), len(self.calls), sum(self.calls.values()), note)


def counted(journey: str, what: str, work: Callable[[], object], holds: Any = None) -> Row:
    """Return what `work` executes, when it is done for the second time."""
    work()
    with Trace(holds) as trace:
        work()
    if SHOW:
        for (file, function), calls in sorted(trace.calls.items()):
            print(f"  {Path(file).relative_to(ROOT)}: {function} {calls}", file=sys.stderr)
    return trace.row(journey, what)


SHOW = False  # --show: what was executed, function by function


def holds_z(residues: int) -> Callable[[dict[str, Any]], bool]:
    """Return a test of local variables: whether one of them is z [*, residues, residues, C_Z], or wraps it."""
    import torch

    shape = (residues, residues, C_Z)

    def is_z(value: object, depth: int = 0) -> bool:
        if isinstance(value, torch.Tensor):
            return tuple(value.shape[-3:]) == shape
        if depth > 1 or isinstance(value, torch.nn.Module):
            return False
        if isinstance(value, tuple | list):
            return any(is_z(one, depth + 1) for one in value)
        inside = getattr(value, "__dict__", None) if type(value).__module__.startswith("warpfold.") else None
        return inside is not None and any(is_z(one, depth + 1) for one in inside.values())

    return lambda names: any(is_z(value) for value in names.values())


# The same work in checkouts of different ages


def bind(model: Any, **settings: Any) -> Any:
    """Put a plan of these settings on a model, for one process or for the ranks that are there."""
    plan = find("Plan", under="parallel")(**settings)
    mesh = None
    if plan.data * plan.axial * plan.branch > 1:
        mesh = find("make_mesh")(plan.data, plan.axial, plan.branch)
    try:
        return find("Execution", under="parallel")(plan, mesh).bind(model)
    except Gone:  # a checkout of before November 2026
        return find("apply", under="parallel")(plan, model, mesh)


@contextmanager
def sample() -> Iterator[tuple[Path, Path]]:
    """Make one sample protein; within the context its mmCIF and its alignment are there."""
    with tempfile.TemporaryDirectory() as folder:
        find("generate", under="data")(Path(folder) / "one", 1)
        (structure,), (alignment,) = (list((Path(folder) / "one").glob(f"*/*.{kind}")) for kind in ("cif", "a3m"))
        yield structure, alignment


def features_of(structure: Path, alignment: Path, crop: int | None = None) -> dict[str, Any]:
    """Return the features of the one chain of an mmCIF file with its alignment, as training makes them."""
    read = find("read_structure")(structure)
    (chain,) = read.chains.values()
    raw = find("from_chain")("one", read, chain, [find("read_alignment")(alignment)])
    config = find("SampleConfig")(crop=crop, max_msa=8, max_extra=16)
    arrays: dict[str, Any] = find("make_features")(raw, config, 0, ("one", 0), train=True)
    return arrays


def training_step(crop: int) -> Callable[[], object]:
    """Return one training step of the tiny model on a sample protein: forward, loss, backward, optimizer."""
    with sample() as files:
        batch = find("to_tensors", under="batch")(features_of(*files, crop=crop))
    model = importlib.import_module("tests.helpers").tiny_model().train()
    optimizer = find("Optimizer")(model, find("OptimConfig")())
    total_loss, losses = find("total_loss"), find("LossConfig")()

    def step() -> None:
        loss, _ = total_loss(model(batch, 0), batch, losses)
        loss.backward()
        optimizer.collect(loss)
        optimizer.step(0)

    return step


# The journeys


def journey_step() -> list[Row]:
    """1: z through one training step."""
    crop = 23
    step = training_step(crop)
    return [
        counted("step", "z through one training step: what holds it", step, holds_z(crop)),
        counted("step", "the whole step: model, losses, backward, optimizer", step),
    ]


def journey_block() -> list[Row]:
    """1b: one Evoformer block, forward."""
    import torch

    stack = find("Evoformer")(16, 12, find("EvoformerConfig")(blocks=1)).eval()
    m, z = torch.randn(5, 9, 16), torch.randn(9, 9, 12)
    return [counted("block", "one Evoformer block, forward", lambda: stack(m, z, torch.ones(5, 9), torch.ones(9, 9)))]


def triangle(residues: int, channels: int) -> Callable[[], object]:
    """Return one triangle product of Algorithm 11."""
    import torch

    layer = find("TriangleMultiplication")(channels, channels, outgoing=True).eval()
    z, mask = torch.randn(residues, residues, channels), torch.ones(residues, residues)
    return lambda: layer(z, mask)


def journey_triangle() -> list[Row]:
    """2: one triangle product by its definition, fast on a CPU, and by a GPU's kernels, interpreted."""
    rows = []
    for kernels, what in (("definition", "by its definition"), ("fast", "fast on a CPU")):
        with find("using", under="ops")(kernels):
            rows.append(counted("triangle", f"one triangle product, {what}", triangle(64, 128)))
    # Triton reads TRITON_INTERPRET when a kernel is defined, so this takes a process of its own.
    return rows + elsewhere("_interpreted", TRITON_INTERPRET="1")


def journey__interpreted() -> list[Row]:
    """Measure the triangle product of a GPU, in a process that was begun with TRITON_INTERPRET=1."""
    find("interpret", under="ops")()
    return [counted("triangle", "one triangle product, by a GPU's kernels", triangle(16, 32))]


def elsewhere(journey: str, root: Path | None = None, **environment: str) -> list[Row]:
    """Return a journey's rows, measured in another process with these environment variables, of another checkout."""
    command = [sys.executable, str(OWN), "--root", str(root or ROOT), "--json", journey, *(["--show"] if SHOW else [])]
    ran = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    print(ran.stderr, end="", file=sys.stderr)
    if ran.returncode:
        raise Gone(ran.stderr.strip().splitlines()[-1] if ran.stderr else f"exit code {ran.returncode}")
    return [Row(**row) for row in json.loads(ran.stdout)]


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

    def update(self, local: Tensors, shared: Tensors, mask: Tensor) -> Tensor:
        (n,) = local
        return self.out(self.value(n).relu() * self.gate(n).sigmoid()) * mask[..., None]
'''
# How a block takes the layer, for each design of a block: lines of model/pair.py, and what stands there then.
INIT = "        self.transition = Transition(c_z, c.transition, c.activation)\n"
DESIGNS = [
    {
        INIT: INIT + "        self.mlp = GatedMLP(c_z)\n",
        'Step("z", self.transition)\n': 'Step("z", self.transition), Step("z", self.mlp)\n',
    },
    {INIT: INIT + "        self.mlp = GatedMLP(c_z)\n"},  # layers ran in the order in which they were declared
]
PLANS: dict[str, dict[str, Any]] = {
    "whole": {},
    "in chunks": {"chunk": 3},
    "in place": {"chunk": 3, "in_place": True},
    "recomputed": {"recompute": "block"},
    "axial = 2": {"axial": 2},
}


def add_layer(root: Path) -> int:
    """Write the layer into the package below `root`, and into the pair stack; return how many lines changed.

    Errors: Gone, where no known design is left.
    """
    path = root / "warpfold/model/pair.py"
    text = path.read_text(encoding="utf-8")
    changes = next((changes for changes in DESIGNS if all(line in text for line in changes)), None)
    if changes is None:
        raise Gone("no place for a new layer of the pair stack in model/pair.py: add its lines to DESIGNS")
    new = text
    for there, then in changes.items():
        new = new.replace(there, then)
    start = new.index("\n\nclass ")
    new = new[:start] + LAYER.rstrip() + "\n" + new[start:]
    imported = re.search(r"^from warpfold\.model\.axial import .*$", new, re.M)
    if imported and "AxialUpdate" not in imported.group():
        new = new.replace(imported.group(), imported.group().replace("import ", "import AxialUpdate, "))
    path.write_text(new, encoding="utf-8")
    changed = difflib.ndiff(text.splitlines(), new.splitlines())
    return sum(line.startswith("+ ") and bool(line[2:].strip()) for line in changed)


def journey_layer() -> list[Row]:
    """3: a gated MLP in the pair stack, in a copy, run under every plan and compared with the whole."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        for name in ("warpfold", "tests", "settings"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        added = add_layer(copy)
        (row,) = elsewhere("_layer", copy)
    return [replace(row, what=f"a gated MLP in the pair stack: {added} lines", files=1)]


def journey__layer() -> list[Row]:
    """Run the tiny model, which has a new layer, under every plan; say which agree with the whole."""
    import torch

    helpers, run_ranks = importlib.import_module("tests.helpers"), importlib.import_module("tests.ranks").run_ranks
    torch.set_num_threads(1)
    batch = helpers.random_batch(residues=7)

    def fold(plan: dict[str, Any]) -> torch.Tensor:
        model = helpers.tiny_model()
        assert any("mlp" in name for name, _ in model.named_parameters()), "the layer is not in the model"
        bind(model, precision="fp64", **plan)
        double = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
        with torch.no_grad() if plan.get("in_place") else nullcontext():
            positions: torch.Tensor = model(double, 0).structure.final_atom37.detach()
        return positions

    expected = fold({})
    said = []
    for name, plan in PLANS.items():
        found = run_ranks(fold, plan["axial"], plan) if "axial" in plan else [fold(plan)]
        error = max(float((one - expected).abs().max() / expected.abs().max()) for one in found)
        said.append(name if error < 1e-10 else f"{name} DIFFERS BY {error:.1e}")
    return [Row("layer", "", note="runs unchanged: " + ", ".join(said))]


def journey_operation() -> list[Row]:
    """4: a new fused operation: the files that name an existing one."""
    return [naming_row("operation", "files that name triangle_factor", "triangle_factor")]


def journey_optimizer() -> list[Row]:
    """5: a new optimizer: the files that name an existing rule, and what runs in a step of it."""
    step = training_step(8)
    step()
    with Trace() as trace:
        step()
    rooms = tuple(f"{ROOT / 'warpfold' / room}{os.sep}" for room in ("engine", "run"))
    trace.calls = Counter({key: calls for key, calls in trace.calls.items() if key[0].startswith(rooms)})
    return [
        naming_row("optimizer", "files that name LAMB", "[Ll]amb"),
        trace.row("optimizer", "collect() and step(): what runs of engine/ and run/"),
    ]


def journey_tile() -> list[Row]:
    """6: a changed tile: the files that name one, and whether a test of the default suite fails where it is broken."""
    path = next((ROOT / "warpfold").rglob("default.json"), None)
    if path is None:
        raise Gone("default.json, the launch table of every GPU, is gone")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    launches = [number for number, line in enumerate(lines) if '"kernel"' in line]  # one a line
    tests = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    said, found = [], 0
    for number in (launches[i * len(launches) // TILES] for i in range(TILES)):
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "copy"
            for name in tracked():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
            # 24 is no power of two: Triton neither compiles it nor interprets it.
            broken = re.sub(r'("sizes": \{"\w+": )\d+', r"\g<1>24", lines[number])
            text = "".join([*lines[:number], broken, *lines[number + 1 :]])
            (copy / path.relative_to(ROOT)).write_text(text, encoding="utf-8")
            environment = os.environ | {"PYTHONPATH": str(copy)}
            ran = subprocess.run(
                [*tests, "tests/ops/triton"], cwd=copy, env=environment, capture_output=True, text=True
            )
        failed = re.findall(r"^FAILED \S+?::(\w+)", ran.stdout, re.M)
        found += bool(failed)
        said.append(f"{lines[number].strip()[:60]}...: {failed[0] if failed else 'no test fails'}")
    what = f"broken tiles that a default test finds: {found} of {TILES}, of {len(launches)} in the table"
    return [
        naming_row("tile", "files that name the tile BLOCK_Q of attention", "BLOCK_Q"),
        Row("tile", what, note="; ".join(said)),
    ]


def journey_mmcif() -> list[Row]:
    """7: an mmCIF file and its alignment to features."""
    with sample() as files:
        return [counted("mmcif", "one mmCIF and its alignment to features", lambda: features_of(*files, crop=23))]


def journey_size() -> list[Row]:
    """Count the package itself: files, functions and their median length, lines."""
    lengths, lines = [], 0
    for path in package():
        text = path.read_text(encoding="utf-8")
        lines += text.count("\n")
        functions = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
        lengths += [(n.end_lineno or n.lineno) - n.lineno + 1 for n in functions]
    note = f"{lines} lines; functions of {statistics.median(lengths):g} lines in the median"
    return [Row("size", "the package", len(package()), len(lengths), note=note)]


JOURNEYS = ("step", "block", "triangle", "layer", "operation", "optimizer", "mmcif", "size")
SLOW = ("tile",)  # minutes for each tile
TILES = 4


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text."""
    lines = [f"{'':52} {'files':>6} {'functions':>10} {'calls':>7}"]
    for row in rows:
        cells = [
            f"{'' if n is None else n:>{width}}" for n, width in zip((row.files, row.functions, row.calls), (6, 10, 7))
        ]
        lines.append(" ".join([f"{row.what:52}", *cells]).rstrip())
        if row.note:
            lines.append(f"    {row.note}")
    return "\n".join(lines)


def main() -> int:
    """Measure the journeys that were asked for, and print them; 1 where a name that one of them needs is gone."""
    global ROOT, SHOW, TILES
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("journeys", nargs="*", help=f"of {', '.join(JOURNEYS + SLOW)} (default: all but {SLOW[0]})")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to measure (default: this one)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--show", action="store_true", help="say on stderr what was executed")
    parser.add_argument("--tiles", type=int, default=TILES, help=f"tiles that `tile` breaks (default: {TILES})")
    given = parser.parse_args()
    ROOT, SHOW, TILES = given.root.resolve(), given.show, given.tiles
    sys.path[0] = str(ROOT)  # not this folder: its names are the package's rooms
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
