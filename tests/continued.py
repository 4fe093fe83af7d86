"""Every command that continues a stopped run, on inputs of seconds, and how to run, stop and compare such commands."""

import dataclasses
import importlib
import json
import os
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import torch

# Forked runs would otherwise load this for seconds each.
import torch._dynamo

from tests.helpers import tiny_model
from tests.test_demo import SMALL
from tests.training.runs import CLOCK, tiny_run
from warpfold import cli, predict, settings
from warpfold.data.features.choose import SampleConfig
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.pack import pack
from warpfold.data.synthetic.folder import generate
from warpfold.engine.trainable import FinetuneConfig
from warpfold.model.weights.files import save_params
from warpfold.training.config import RunConfig

Compared = dict[str, Any]


# Comparing

# Keys whose values depend on time, free memory or processes, at any depth of JSON files, by file name; "seconds" in any
# file.
CHANGING = {
    "metrics.jsonl": set(CLOCK),
    "state.json": {"store"},
    "checksums.json": {"state.json"},
    "summary.json": {"free", "said", "checksum", "processes"},
    "search.json": {"cached"},
    "sources.json": {"digest"},
    "store.json": {"sources.json"},
}
# Pages that contain such values. Their numbers are not compared.
PAGES = ("card.md", "report.html")
# Locks, drafts that a kill leaves, and a log of all runs.
IGNORED = re.compile(r"lock|.*\.lock|\..*|predict\.log")


def without(found: Any, names: set[str]) -> Any:
    """Remove keys from parsed JSON."""
    if isinstance(found, dict):
        return {key: without(value, names) for key, value in found.items() if key not in names}
    return [without(value, names) for value in found] if isinstance(found, list) else found


def read(path: Path) -> Any:
    """Read a file of a command, without what differs between two undisturbed runs."""
    data, changing = path.read_bytes(), CHANGING.get(path.name, set()) | {"seconds"}
    if path.name in PAGES:
        return re.sub(r"[\d.:,-]+", "", data.decode())
    if path.suffix == ".json":
        return without(json.loads(data), changing)
    if path.suffix == ".jsonl":
        rows = [without(json.loads(line), changing) for line in data.splitlines()]
        return [row for row in rows if row.get("kind") != "session"]
    return data


def contents(out: Path) -> Compared:
    """Read all files of a folder by `read`."""
    paths = (path for path in sorted(out.rglob("*")) if path.is_file() and not IGNORED.fullmatch(path.name))
    return {str(path.relative_to(out)): read(path) for path in paths}


def of_demo(out: Path) -> Compared:
    """Read all files but those with the checksum of the store, which contains the times at which proteins were made."""
    return {name: found for name, found in contents(out).items() if name not in ("run/order.txt", "run/card.md")}


def differing(one: Any, other: Any, exact: bool = True, where: str = "") -> list[str]:
    """Say where two things differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        lacking = [f"{where}{key}: in one only" for key in one.keys() ^ other.keys()]
        return lacking + [
            line for k in one.keys() & other.keys() for line in differing(one[k], other[k], exact, f"{where}{k}: ")
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [line for i, (a, b) in enumerate(zip(one, other)) for line in differing(a, b, exact, f"{where}{i}: ")]
    if isinstance(one, torch.Tensor):
        one, other = one.numpy(), other.numpy()
    if isinstance(one, np.ndarray):
        if one.shape != other.shape or one.dtype != other.dtype:
            return [f"{where}another shape"]
        if one.tobytes() == other.tobytes():
            return []
        if not exact and one.dtype.kind == "f" and np.allclose(one, other, rtol=2e-3, atol=1e-4):
            return []
        return [f"{where}numbers differ" + (f" by {np.abs(one - other).max():.3g}" if one.dtype.kind == "f" else "")]
    if not exact and isinstance(one, float) and isinstance(other, float) and np.isclose(one, other, 2e-4, 1e-6):
        return []
    return [] if one == other else [f"{where}{str(one)[:60]!r} and {str(other)[:60]!r}"]


# Running


@dataclass(frozen=True)
class Scenario:
    """A command that continues a stopped run.

    words: the command line; IN is the folder of `write_inputs`, OUT the output, RANKS the number of processes.
    compared: reads what must be equal in the output folder.  before: writes what the command expects there, from the
    folders of the inputs and the output.  patch: changes the process that becomes the command.
    logs: patterns of files that the command appends to, so that a kill may leave half a line.
    For the benchmark: ranks, the processes of each attempt, the last number is that of the last one; exact, to the bit;
    weight, the share of the cycles.
    """

    name: str
    words: str
    compared: Callable[[Path], Compared] = contents
    before: Callable[[Path, Path], object] = lambda inputs, out: None
    patch: Callable[[], None] = lambda: None
    logs: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (1,)
    exact: bool = True
    weight: float = 1.0

    @property
    def command(self) -> str:
        """Return the name of the command."""
        return self.words.split()[0]

    def arguments(self, inputs: Path, out: Path, ranks: int = 1) -> list[str]:
        """Return the arguments of `warpfold`."""
        values = {r"\bIN\b": str(inputs), r"\bOUT\b": str(out), r"\bRANKS\b": str(ranks)}
        words = self.words.split()
        for name, value in values.items():
            words = [re.sub(name, lambda _, value=value: value, word) for word in words]
        return words


def be_warpfold(arguments: Sequence[str], log: Path, variables: Mapping[str, str]) -> NoReturn:
    """Be a process of `warpfold`, in a fork.  Appends stdout and stderr to `log`."""
    code = 70
    try:
        said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        # A shell makes its background jobs ignore Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(variables)
        sys.argv = ["warpfold", *arguments]
        cli.main(list(arguments))
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    log.with_suffix(".modules").write_text("\n".join(sys.modules))
    os._exit(code)


def import_all(log: Path) -> None:
    """Import what a run has imported, so that later runs begin at once."""
    names = log.with_suffix(".modules")
    for name in names.read_text().splitlines() if names.exists() else ():
        if name not in sys.modules and name.partition(".")[0] in ("warpfold", "torch", "matplotlib", "rich", "scipy"):
            with suppress(ImportError):
                importlib.import_module(name)


# The commands

DESIGN = """
spread = 1.0
chains.A = 6
loss = {plddt = 1.0, contacts = 0.3}
shape = {contact_separation = 2}
stages = [{steps = 2, soft = [0.0, 1.0]}, {steps = 1, temperature = [1.0, 0.1]}, {steps = 2, hard = 1.0}]
"""


def training(**train: Any) -> RunConfig:
    """Return settings with dropout, recycling, two examples a step, and the heads that design needs."""
    return dataclasses.replace(tiny_run(**train), data=SampleConfig(crop=12, max_msa=3, max_extra=4, max_templates=0))


def write_inputs(folder: Path) -> Path:
    """Write, where they are not there yet: proteins with alignments, a store, settings, parameters, queries."""
    if (folder / "done").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    generate(folder / "proteins", 9, dimers=1, depth=(4, 8), min_length=30, max_length=34)
    generate(folder / "few", 1, dimers=1, depth=(4, 8), min_length=30, max_length=34)
    pack([folder / "proteins"], [folder / "proteins"], folder / "store", PackOptions(assemblies=True))
    model = tiny_model(templates=dataclasses.replace(tiny_model().config.templates, enabled=False))
    save_params(folder / "tiny.safetensors", model, {"max_msa": 4, "max_extra": 4, "max_templates": 0})
    # The last two checkpoints stay, and that of the best validation so far. These steps make it one of the last two,
    # whenever the writing thread deletes old checkpoints.
    for name, config in {
        "train": training(steps=4, save_every=1, validate_every=3, digest_every=1),
        "cached": dataclasses.replace(
            training(steps=3, save_every=1, validate_every=2),
            finetune=FinetuneConfig(trainable=("structure", "plddt"), draws=2, trunk="cached"),
        ),
    }.items():
        (folder / f"{name}.toml").write_text(settings.to_toml(config))
    (folder / "design.toml").write_text(DESIGN)
    rows = [path.read_text().split("\n")[1] for path in sorted((folder / "proteins/msas").glob("*_A.a3m"))]
    (folder / "queries.fasta").write_text("".join(f">q{i}\n{row[: 12 + i]}\n" for i, row in enumerate(rows[:3])))
    (folder / "rows.fasta").write_text("".join(f">q{i}\n{row}\n" for i, row in enumerate(rows[:3])))
    (folder / "database.fasta").write_text("".join(f">d{i}\n{row}\n" for i, row in enumerate(rows)))
    given = {"device": "cpu", "recycles": 0, "batch": 1, "figures": False}
    predict(folder / "queries.fasta", folder / "tiny.safetensors", folder / "predicted", **given)
    (folder / "done").touch()
    return folder


class StandInForceField:
    """Stand in for OpenMM: leave the atoms where they are."""

    platform, disulfides = "none", 0

    def __init__(self, residues: Any, *_: object) -> None:
        self.residues = residues

    def minimise(self, free: np.ndarray) -> None:
        pass

    def energy(self) -> float:
        return 0.0

    def positions(self) -> np.ndarray:
        return self.residues.positions


def without_openmm() -> None:
    """Make `relax` independent of OpenMM, which few machines have."""
    from warpfold.relaxation import files, relax

    files.require_openmm = lambda: SimpleNamespace(__version__="0")  # type: ignore[assignment]
    relax.Amber = StandInForceField  # type: ignore[assignment, misc]


def with_small_settings() -> None:
    """Shorten `demo`."""
    from warpfold import demo_run

    whole = demo_run.run_demo
    small = {"proteins": 6, "changes": SMALL, "processes": 1}
    demo_run.run_demo = lambda out, **given: whole(out, **{**given, **small})


def predicted(inputs: Path, out: Path) -> None:
    """Write the output of `predict`."""
    shutil.copytree(inputs / "predicted", out)


PREDICT = "IN/queries.fasta --params IN/tiny.safetensors --device cpu --recycles 0 --batch 1"
TUNE = (
    "finetune --structures IN/proteins --msas IN/proteins --init IN/tiny.safetensors --out OUT --steps 2 --device cpu "
    "--one-family --trainable plddt --adapters 2 "
    '--set data.max_msa=4 --set data.max_extra=4 --set data.crop=12 --set plan.precision="fp32" --set plan.threads=1 '
    "--set optim.accumulate=1 --set train.validate_every=1 --set train.save_every=1 --set loss.violation=0.0"
)
TRAIN_LOGS = ("metrics.jsonl", "order.txt")
SCENARIOS = (
    Scenario("train", "train IN/train.toml --data IN/store --device cpu --out OUT", logs=TRAIN_LOGS),
    Scenario(
        "train the structure module, with a cached trunk",
        "train IN/cached.toml --data IN/store --device cpu --out OUT", logs=TRAIN_LOGS,
    ),
    Scenario("pack", "pack --structures IN/few --msas IN/few --assemblies --out OUT/store"),
    Scenario("search", "search IN/rows.fasta --database d=IN/database.fasta --threads 1 --out OUT"),
    Scenario("predict", f"predict {PREDICT} --out OUT"),
    Scenario(
        "predict the best two into a store",
        f"predict {PREDICT} --keep best:2 --no-figures --representations OUT/r.store --out OUT/folded",
    ),
    Scenario("distill", f"distill {PREDICT} --min-plddt 1 --no-figures --out OUT/store"),
    Scenario(
        "design", "design IN/design.toml --params IN/tiny.safetensors --device cpu --starts 2 --out OUT",
        logs=("starts/*.jsonl",),
    ),
    Scenario("finetune", TUNE),
    Scenario("demo", "demo --out OUT", of_demo, patch=with_small_settings),
    Scenario("relax", "relax OUT", before=predicted, patch=without_openmm),
)  # fmt: skip
