"""Kill every command that can continue with `kill -9` at random moments, and compare it with an undisturbed run.

    python -m benchmarks.reliability kills [--kills 1000] [--seed 0] [--work FOLDER] [--figures F.json] [--only TEXT]

A cycle draws a command and kills it one to three times, each time at a uniformly random moment of the undisturbed run.
It continues the run by the same command and compares the resulting files with those of the undisturbed run, bit for bit
where that is promised (docs/explanation/exactness.md) and to rounding otherwise. All processes of a run are killed at
once. Runs start in forks of a process that has imported their modules. Otherwise they are like those of a shell.
WORK/kills-SEED.jsonl has a line for each kill and each cycle. The same command continues a stopped series. Files that
differ are kept in WORK/cycle-N.
"""

import argparse
import importlib
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch._dynamo  # what forked runs would else load each for itself
from safetensors.torch import load_file

from benchmarks.reliability.figures import keep
from benchmarks.reliability.small import training, write_small
from tests.training.runs import CLOCK
from warpfold import cli, settings
from warpfold.data.synthetic.folder import generate
from warpfold.engine.optim import OptimConfig
from warpfold.engine.trainable import FinetuneConfig
from warpfold.geometry.residue import RESTYPES
from warpfold.parallel.compress import CompressionConfig
from warpfold.parallel.plan import Plan
from warpfold.training.config import RunConfig

STEPS = 6
ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "200"}
NUMBERS = {"rtol": 2e-4, "atol": 1e-6}  # what rounding may change in a row of a run's log

Compared = dict[str, Any]


@dataclass(frozen=True)
class Scenario:
    """A command that is killed.

    arguments: of `warpfold`, given the output folder and the number of processes.  compared: what of the folder must be
    equal.  ranks: processes, of which each attempt has the next number, and the last attempt the last.  exact: to the
    bit.  rows: of a finished run's log, to tell that it is whole.  weight: share of the cycles.
    """

    name: str
    arguments: Callable[[Path, int], list[str]]
    compared: Callable[[Path], Compared]
    ranks: tuple[int, ...] = (1,)
    exact: bool = True
    weight: float = 1.0


# What is compared


def of_training(out: Path) -> Compared:
    """The log without clocks, weights, their average, moments, the order of the examples."""
    parsed = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found: Compared = {"log": [{k: v for k, v in row.items() if k not in CLOCK} for row in parsed]}
    for path in sorted(out.glob("*.safetensors")):
        found[path.name] = load_file(path)
    for path in sorted((out / "checkpoints").glob("step-*")):
        found[path.name] = load_file(path / "state.safetensors")
    for path in sorted(out.glob("order*.txt")):
        found[path.name] = dict(line.split(" ", 1) for line in path.read_text().splitlines()[1:])
    return found


def of_training_elsewhere(out: Path) -> Compared:
    """The log and the averaged weights alone, which do not depend on how many processes there are."""
    found = of_training(out)
    return {"log": [row for row in found["log"] if row["kind"] == "step"], "params": found["params.safetensors"]}


def of_files(*endings: str, without: Sequence[str] = ()) -> Callable[[Path], Compared]:
    """The bytes of files with these endings."""

    def compared(out: Path) -> Compared:
        paths = (path for path in sorted(out.rglob("*")) if path.is_file() and path.name.endswith(endings))
        return {str(path.relative_to(out)): path.read_bytes() for path in paths if path.name not in without}

    return compared


def of_arrays(out: Path) -> Compared:
    """The arrays of predictions."""
    return {path.name: dict(np.load(path, allow_pickle=False)) for path in sorted(out.rglob("*.npz"))}


def of_design(out: Path) -> Compared:
    return of_files(".fasta", ".csv", ".cif", ".json", ".jsonl")(out)


def of_finetuning(out: Path) -> Compared:
    """The tuned parameters, the split, the predictions before and after, and the run within."""
    found = {f"run, {name}": value for name, value in of_training(out / "run").items()}
    return found | of_files(".safetensors", "split.toml", ".cif")(out)


def differing(one: Any, other: Any, exact: bool, where: str = "") -> list[str]:
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
    if not exact and isinstance(one, float) and isinstance(other, float) and np.isclose(one, other, **NUMBERS):
        return []
    return [] if one == other else [f"{where}{str(one)[:60]!r} and {str(other)[:60]!r}"]


# Running and killing


def warpfold(arguments: Sequence[str], log: Path, variables: dict[str, str]) -> NoReturn:
    """Be a process of `warpfold`, in a fork."""
    code = 70
    try:
        said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(variables)
        sys.argv = ["warpfold", *arguments]
        cli.main(list(arguments))
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    log.with_suffix(".modules").write_text("\n".join(sys.modules))
    os._exit(code)


def import_all(names: Path) -> None:
    """Import what a run has imported, so that the next one begins at once."""
    for name in names.read_text().splitlines() if names.exists() else ():
        if name not in sys.modules and name.partition(".")[0] in ("warpfold", "torch", "matplotlib", "rich", "scipy"):
            with suppress(ImportError):
                importlib.import_module(name)


def names_in(folder: Path) -> set[str]:
    """List the files and folders below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def free_port() -> int:
    """Find an unused port."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def begin(scenario: Scenario, out: Path, ranks: int, log: Path) -> int:
    """Start a command in a session of its own, with as many processes; return the first one's id."""
    arguments, port = scenario.arguments(out, ranks), free_port()
    leader = os.fork()
    if leader:
        return leader
    os.setsid()
    if ranks == 1:
        warpfold(arguments, log, ENV)
    children = []
    for rank in range(ranks):
        there = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        child = os.fork()
        if not child:
            warpfold(arguments, log, ENV | {"MASTER_ADDR": "127.0.0.1"} | {k: str(v) for k, v in there.items()})
        children.append(child)
    os._exit(max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children))


def of_session(session: int) -> list[int]:
    """List the living processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def wait(leader: int, seconds: float) -> int | None:
    """Wait for a process for so long; return its exit code, negative for a signal; None if it still runs."""
    end = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(leader, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            return None
        time.sleep(0.002)


def kill_session(leader: int) -> int:
    """Kill all processes of a session at once; return how many are left after three seconds."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:  # it has no session yet
        os.kill(leader, signal.SIGKILL)
    os.waitpid(leader, 0)
    for _ in range(300):
        if not (left := of_session(leader)):
            return 0
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return len(left)


class Killer:
    """Runs cycles and logs them. lengths: seconds of the undisturbed runs, by scenario."""

    def __init__(self, scenarios: Sequence[Scenario], work: Path, seed: int) -> None:
        self.scenarios, self.work, self.seed = scenarios, work, seed
        self.log = work / f"kills-{seed}.jsonl"
        self.lengths: dict[str, float] = {}
        self.reference: dict[str, Compared] = {}

    def undisturbed(self, scenario: Scenario) -> None:
        """Run a command twice without a kill, record its files and its duration, and check that it is reproducible."""
        if scenario.name in self.reference:
            return
        found, spent = [], []
        for attempt in ("first", "second"):
            plain = re.sub(r"\W+", "-", scenario.name)
            out, said = self.work / "undisturbed" / plain / attempt, self.work / f"undisturbed-{plain}.txt"
            shutil.rmtree(out, ignore_errors=True)
            out.parent.mkdir(parents=True, exist_ok=True)
            start = time.monotonic()
            code = wait(begin(scenario, out, scenario.ranks[-1], said), 600)
            spent.append(time.monotonic() - start)
            import_all(said.with_suffix(".modules"))
            if code != 0:
                raise SystemExit(f"{scenario.name}: the undisturbed run ended with {code}; {said} has what it said")
            found.append(scenario.compared(out))
        if lines := differing(*found, scenario.exact):
            raise SystemExit(f"{scenario.name}: two undisturbed runs differ, so nothing can be compared: {lines[:5]}")
        self.reference[scenario.name], self.lengths[scenario.name] = found[0], spent[1]

    def cycle(self, number: int) -> int:
        """Kill one command, continue it, compare; return the number of kills."""
        draw = random.Random(f"{self.seed} {number}")
        [scenario] = draw.choices(self.scenarios, [one.weight for one in self.scenarios])
        self.undisturbed(scenario)
        folder = self.work / f"cycle-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        out, said, length = folder / "out", folder / "said.txt", self.lengths[scenario.name]
        kills, missed, trouble, start = 0, 0, list[str](), time.monotonic()
        wanted = draw.choice((1, 1, 2, 3))
        for attempt in range(wanted):
            ranks = scenario.ranks[attempt % len(scenario.ranks)]
            moment = draw.uniform(0, length if not attempt else 0.7 * length)
            began = time.monotonic()
            leader = begin(scenario, out, ranks, said)
            code = wait(leader, moment)
            if code is not None:
                missed += 1
                if not attempt:  # the machine is less busy than it was
                    self.lengths[scenario.name] = time.monotonic() - began
                if code:
                    trouble.append(f"attempt {attempt} ended with {code} before it was killed")
                break
            if left := kill_session(leader):
                trouble.append(f"{left} processes outlived the kill")
            kills += 1
            self.write({"kind": "kill", "cycle": number, "scenario": scenario.name, "ranks": ranks,
                        "after": round(moment, 3), "of": round(length, 3)})  # fmt: skip
        began = time.monotonic()
        leader = begin(scenario, out, scenario.ranks[-1], said)
        code = wait(leader, 60 + 20 * length)
        self.lengths[scenario.name] = max(self.lengths[scenario.name], time.monotonic() - began)
        if code is None:
            kill_session(leader)
            trouble.append("the continued run hangs")
        elif code:
            trouble.append(f"the continued run ended with {code}")
        else:
            trouble += differing(self.reference[scenario.name], scenario.compared(out), scenario.exact)
        if "Traceback" in said.read_text(errors="replace"):
            trouble.append("a traceback")
        whole = self.work / "undisturbed" / re.sub(r"\W+", "-", scenario.name) / "second"
        left = sorted(names_in(out) - names_in(whole)) if scenario.exact else []
        self.write({"kind": "cycle", "cycle": number, "scenario": scenario.name, "kills": kills, "missed": missed,
                    "left_over": left[:10], "exact": scenario.exact, "equal": not trouble, "trouble": trouble[:10],
                    "seconds": round(time.monotonic() - start, 2)})  # fmt: skip
        if not trouble:
            shutil.rmtree(folder)
        return kills

    def write(self, row: dict[str, Any]) -> None:
        with open(self.log, "a") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """Read the rows of the log."""
        text = self.log.read_text() if self.log.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


# The commands


def write_more(work: Path) -> Path:
    """Write further inputs for kills: more proteins, and a database that takes a while to search."""
    small, more = write_small(work / "small"), work / "more"
    if not (more / "done").exists():
        shutil.rmtree(more, ignore_errors=True)
        more.mkdir(parents=True)
        generate(more / "proteins", 20, dimers=4, min_length=30, max_length=40, depth=(4, 40))
        draw, letters = np.random.default_rng(0), np.array(list(RESTYPES))
        queries = ["".join(draw.choice(letters, 80)) for _ in range(5)]
        (more / "queries.fasta").write_text("".join(f">q{i}\n{one}\n" for i, one in enumerate(queries)))
        with open(more / "database.fasta", "w") as file:
            for i in range(6000):
                own = np.array(list(queries[i % 5]))
                share = 0.4 if i % 10 == 0 else 1.0
                row = np.where(draw.random(len(own)) < share, draw.choice(letters, len(own)), own)
                file.write(f">d{i}\n{''.join(row)}\n")
        (more / "done").touch()
    return small


def write_settings(work: Path, name: str, **changes: Any) -> Path:
    """Write the settings of a training run."""
    train = {"steps": STEPS, "save_every": 1, "validate_every": 3, "validation": 0.15} | changes.pop("train", {})
    accumulate, more = changes.pop("accumulate", 2), changes.pop("optim", {})
    config: RunConfig = training(**train)
    config = replace(
        config, optim=OptimConfig(accumulate=accumulate, warmup_steps=2, average_decay=0.5, **more), **changes
    )
    path = work / f"{name.replace(' ', '-')}.toml"
    text = settings.to_toml(config)
    if config.train.idle:  # left to the planner
        text = text.replace("data = 1\n", "", 1).replace("idle = 1\n", "idle = 0\n")
    path.write_text(text)
    return path


def make_scenarios(work: Path) -> list[Scenario]:
    """Make the commands, and the files that they read."""
    small, more = write_more(work), work / "more"
    store, params = small / "store", small / "tiny.safetensors"

    def train(
        name: str,
        ranks: Sequence[int],
        weight: float,
        compared: Any = of_training,
        exact: bool = True,
        plans: Callable[[int], Plan] = lambda ranks: Plan(data=ranks, threads=1),
        **changes: Any,
    ) -> Scenario:
        """A training; its plan may depend on the number of processes."""
        files = {n: write_settings(work, f"{name} {n}", plan=plans(n), **dict(changes)) for n in set(ranks)}
        where = {n: ["train", str(file), "--data", str(store), "--device", "cpu"] for n, file in files.items()}
        return Scenario(
            f"train: {name}", lambda out, n: [*where[n], "--out", str(out)], compared, tuple(ranks), exact, weight
        )

    def fold(name: str, weight: float, *options: str, compared: Any, exact: bool = True) -> Scenario:
        """A prediction of six proteins."""
        given = ["predict", str(small / "queries.fasta"), "--params", str(params), "--device", "cpu", "--recycles", "3"]
        return Scenario(
            f"predict: {name}", lambda out, _: [*given, "--out", str(out), *options], compared, (1,), exact, weight
        )

    def pack(name: str, weight: float, *options: str) -> Scenario:
        """A store of 24 entries."""
        own = str(more / "proteins")
        given = ["pack", "--structures", own, "--msas", own, "--assemblies", *options]
        return Scenario(f"pack: {name}", lambda out, _: [*given, "--out", str(out)], of_files(""), (1,), True, weight)

    files_of_fold = of_files(".cif", ".pdb", ".npz", ".json", without=("summary.json",))
    of_alignments = of_files(".a3m", ".sto")
    search = ["search", str(more / "queries.fasta"), "--database", f"d={more / 'database.fasta'}", "--threads", "1"]
    design = ["design", str(small / "design.toml"), "--params", str(params), "--starts", "2", "--device", "cpu"]
    changes = {"data.max_msa": 4, "data.max_extra": 4, "data.crop": 16, "optim.accumulate": 1, "plan.threads": 1}
    changes |= {"plan.precision": '"fp32"', "train.validate_every": 2, "loss.violation": 0.0, "train.save_every": 1}
    tune = ["finetune", "--structures", str(more / "proteins/mmcif"), "--msas", str(more / "proteins/msas")]
    tune += ["--init", str(params), "--steps", "4", "--device", "cpu", "--one-family"]
    tune += [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    axial = lambda ranks: Plan(axial=ranks, threads=1)  # noqa: E731
    compressed = {"compression": CompressionConfig(method="topk", start=2, warmup=2, ratio=0.1)}
    low_rank = {"compression": CompressionConfig(method="powersgd", start=2, rank=2)}
    structure = FinetuneConfig(trainable=("structure", "plddt"), draws=2, trunk="auto")
    return [
        train("one rank", [1], 5),
        train("one rank, two loader processes", [1], 0.4, train={"workers": 2}),
        train("two data ranks", [2], 4),
        train("two axial ranks", [2], 2, plans=axial),
        train("four ranks, two by two", [4], 3, plans=lambda n: Plan(data=2, axial=2, threads=1)),
        train("two data ranks, top-k compression", [2], 2, optim=compressed),
        train("four data ranks, PowerSGD", [4], 2, optim=low_rank, accumulate=4),
        train("three ranks, of which one is spare", [3], 3, train={"idle": 1}, plans=lambda n: Plan(threads=1)),
        train("two, one and four ranks in turn", [2, 1, 4, 2], 3, of_training_elsewhere, False, accumulate=4),
        train("a part, what the frozen trunk made is kept", [1], 2, finetune=structure),
        pack("one process", 4),
        pack("two workers", 0.5, "--workers", "2"),
        fold("each alone", 4, "--batch", "1", compared=files_of_fold),
        fold("several in a pass", 2, compared=of_arrays, exact=False),
        fold("the best two", 2, "--batch", "1", "--keep", "best:2", compared=files_of_fold),
        fold("two workers", 0.4, "--batch", "1", "--workers", "2", compared=files_of_fold),
        Scenario("search", lambda out, _: [*search, "--out", str(out)], of_alignments, weight=4),
        Scenario("design", lambda out, _: [*design, "--out", str(out)], of_design, weight=3),
        Scenario("finetune", lambda out, _: [*tune, "--out", str(out)], of_finetuning, weight=1),
    ]  # fmt: skip


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count kills and cycles by command, and list what differed."""
    kills, cycles, by = Counter[str](), Counter[str](), defaultdict[str, list[float]](list)
    for row in rows:
        if row["kind"] == "kill":
            kills[row["scenario"]] += 1
            by[row["scenario"]].append(row["after"] / row["of"])
        else:
            cycles[row["scenario"]] += 1
    ended = [row for row in rows if row["kind"] == "cycle"]
    return {
        "kills": sum(kills.values()),
        "cycles": len(ended),
        "ended_before_the_kill": sum(row["missed"] for row in ended),
        "equal": sum(row["equal"] for row in ended),
        "with_files_left_over": sum(bool(row["left_over"]) for row in ended),
        "not_equal": [row for row in ended if not row["equal"]],
        "by_command": {
            name: {"kills": kills[name], "cycles": cycles[name], "compared": "to the bit" if exact else "to rounding"}
            for name, exact in sorted({row["scenario"]: row["exact"] for row in ended}.items())
        },
        "moments_by_fifths": np.histogram([m for one in by.values() for m in one], 5, (0, 1))[0].tolist(),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="reliability kills", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "warpfold-kills")
    parser.add_argument("--only", default="", help="Only commands whose names contain this.")
    parser.add_argument("--figures", type=Path)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    chosen.work.mkdir(parents=True, exist_ok=True)
    scenarios = [one for one in make_scenarios(chosen.work) if chosen.only in one.name]
    killer = Killer(scenarios, chosen.work, chosen.seed)
    done = killer.rows()
    number = 1 + max((row["cycle"] for row in done if row["kind"] == "cycle"), default=-1)
    kills = sum(row["kind"] == "kill" and row["cycle"] < number for row in done)
    while kills < chosen.kills:
        kills += killer.cycle(number)
        last = killer.rows()[-1]
        print(
            f"cycle {number}, {kills} kills: {last['scenario']}, {'equal' if last['equal'] else last['trouble']}",
            flush=True,
        )
        number += 1
    figures = {
        "seed": chosen.seed,
        **summarize([row for row in killer.rows() if row["cycle"] < number]),
    }
    keep("kills", __doc__, arguments, figures, chosen.figures)
