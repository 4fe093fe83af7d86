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
import json
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.reliability.figures import keep
from tests.continued import (
    PREDICT,
    SCENARIOS,
    Compared,
    Scenario,
    be_warpfold,
    contents,
    differing,
    import_all,
    read,
    training,
    write_inputs,
)
from tests.ranks import free_port
from warpfold import settings
from warpfold.engine.optim import OptimConfig
from warpfold.geometry.residue import RESTYPES
from warpfold.parallel.compress import CompressionConfig
from warpfold.parallel.plan import Plan

STEPS = 6
ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "200"}


# What is compared


def of_training_elsewhere(out: Path) -> Compared:
    """Read the log and the averaged weights, which depend on the number of processes only by rounding."""
    steps = [row for row in read(out / "metrics.jsonl") if row["kind"] == "step"]
    return {"log": steps, "params": load_file(out / "params.safetensors")}


def of_arrays(out: Path) -> Compared:
    """Read the arrays of predictions."""
    return {path.name: dict(np.load(path, allow_pickle=False)) for path in sorted(out.rglob("*.npz"))}


# Running and killing


def begin(scenario: Scenario, inputs: Path, folder: Path, ranks: int, log: Path) -> int:
    """Start a command in a session of its own, with as many processes; return the first one's id.

    Its output is the subfolder `out`.
    """
    arguments, port = scenario.arguments(inputs, Path("out"), ranks), free_port()
    if not folder.exists():
        folder.mkdir(parents=True)
        scenario.before(inputs, folder / "out")
    leader = os.fork()
    if leader:
        return leader
    os.setsid()
    os.chdir(folder)
    scenario.patch()
    if ranks == 1:
        be_warpfold(arguments, log, ENV)
    children = []
    for rank in range(ranks):
        there = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        child = os.fork()
        if not child:
            be_warpfold(arguments, log, ENV | {"MASTER_ADDR": "127.0.0.1"} | {k: str(v) for k, v in there.items()})
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
        self.inputs = work / "inputs"
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
            folder, said = self.work / "undisturbed" / plain / attempt, self.work / f"undisturbed-{plain}.txt"
            shutil.rmtree(folder, ignore_errors=True)
            start = time.monotonic()
            code = wait(begin(scenario, self.inputs, folder, scenario.ranks[-1], said), 600)
            spent.append(time.monotonic() - start)
            import_all(said)
            if code != 0:
                raise SystemExit(f"{scenario.name}: the undisturbed run ended with {code}; {said} has what it said")
            found.append(scenario.compared(folder / "out"))
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
        said, length = folder / "said.txt", self.lengths[scenario.name]
        kills, missed, trouble, start = 0, 0, list[str](), time.monotonic()
        wanted = draw.choice((1, 1, 2, 3))
        for attempt in range(wanted):
            ranks = scenario.ranks[attempt % len(scenario.ranks)]
            moment = draw.uniform(0, length if not attempt else 0.7 * length)
            began = time.monotonic()
            leader = begin(scenario, self.inputs, folder, ranks, said)
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
        leader = begin(scenario, self.inputs, folder, scenario.ranks[-1], said)
        code = wait(leader, 60 + 20 * length)
        self.lengths[scenario.name] = max(self.lengths[scenario.name], time.monotonic() - began)
        if code is None:
            kill_session(leader)
            trouble.append("the continued run hangs")
        elif code:
            trouble.append(f"the continued run ended with {code}")
        else:
            trouble += differing(self.reference[scenario.name], scenario.compared(folder / "out"), scenario.exact)
        if "Traceback" in said.read_text(errors="replace"):
            trouble.append("a traceback")
        whole = self.work / "undisturbed" / re.sub(r"\W+", "-", scenario.name) / "second/out"
        there, expected = ({str(path.relative_to(one)) for path in one.rglob("*")} for one in (folder / "out", whole))
        left = sorted(there - expected) if scenario.exact else []
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


def write_database(folder: Path) -> None:
    """Write proteins, and a database that takes a while to search."""
    draw, letters = np.random.default_rng(0), np.array(list(RESTYPES))
    queries = ["".join(draw.choice(letters, 80)) for _ in range(5)]
    (folder / "long.fasta").write_text("".join(f">q{i}\n{one}\n" for i, one in enumerate(queries)))
    with open(folder / "large.fasta", "w") as file:
        for i in range(6000):
            own = np.array(list(queries[i % 5]))
            share = 0.4 if i % 10 == 0 else 1.0
            row = np.where(draw.random(len(own)) < share, draw.choice(letters, len(own)), own)
            file.write(f">d{i}\n{''.join(row)}\n")


def make_scenarios(work: Path) -> list[Scenario]:
    """Write the inputs, and return the commands: those of `SCENARIOS`, and others that are too slow for a test."""
    inputs = write_inputs(work / "inputs")
    write_database(inputs)

    def train(
        name: str,
        ranks: Sequence[int],
        weight: float,
        compared: Callable[[Path], Compared] = contents,
        exact: bool = True,
        plans: Callable[[int], Plan] = lambda ranks: Plan(data=ranks, threads=1),
        accumulate: int = 2,
        optim: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Scenario:
        """Write settings, whose plan may depend on the number of processes, and return a training."""
        config = training(**{"steps": STEPS, "save_every": 1, "validate_every": 3, "validation": 0.15} | changes)
        optim = {"accumulate": accumulate, "warmup_steps": 2, "average_decay": 0.5} | (optim or {})
        file = re.sub(r"\W+", "-", name)
        for number in set(ranks):
            text = settings.to_toml(replace(config, optim=OptimConfig(**optim), plan=plans(number)))
            if config.train.idle:  # left to the planner
                text = text.replace("data = 1\n", "", 1).replace("idle = 1\n", "idle = 0\n")
            (inputs / f"{file}-{number}.toml").write_text(text)
        words = f"train IN/{file}-RANKS.toml --data IN/store --device cpu --out OUT"
        return Scenario(f"train: {name}", words, compared, ranks=tuple(ranks), exact=exact, weight=weight)

    def axial(ranks: int) -> Plan:
        return Plan(axial=ranks, threads=1)

    compressed = {"compression": CompressionConfig(method="topk", start=2, warmup=2, ratio=0.1)}
    low_rank = {"compression": CompressionConfig(method="powersgd", start=2, rank=2)}
    pack = "pack --structures IN/proteins --msas IN/proteins --assemblies --out OUT/store"
    search = "search IN/long.fasta --database d=IN/large.fasta --threads 1 --out OUT"
    grouped = PREDICT.replace(" --batch 1", "").replace("--recycles 0", "--recycles 3")
    return [
        *(replace(one, weight=2.0) for one in SCENARIOS),
        train("one rank, two loader processes", [1], 0.4, workers=2),
        train("two data ranks", [2], 4),
        train("two axial ranks", [2], 2, plans=axial),
        train("four ranks, two by two", [4], 3, plans=lambda n: Plan(data=2, axial=2, threads=1)),
        train("two data ranks, top-k compression", [2], 2, optim=compressed),
        train("four data ranks, PowerSGD", [4], 2, optim=low_rank, accumulate=4),
        train("three ranks, of which one is spare", [3], 3, idle=1, plans=lambda n: Plan(threads=1)),
        train("two, one and four ranks in turn", [2, 1, 4, 2], 3, of_training_elsewhere, False, accumulate=4),
        Scenario("pack: many", pack, weight=4),
        Scenario("pack: two workers", f"{pack} --workers 2", weight=0.5),
        Scenario("predict: several in a pass", f"predict {grouped} --out OUT", of_arrays, exact=False, weight=2),
        Scenario("predict: two workers", f"predict {PREDICT} --workers 2 --out OUT", weight=0.4),
        Scenario("search: a large database", search, weight=4),
    ]


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
    # Runs change their working directory.
    chosen.work = chosen.work.resolve()
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
