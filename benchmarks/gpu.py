"""Measure on a GPU what no CPU can answer: commands A, B and C of at most 330, 180 and 80 seconds.

    python -m benchmarks.gpu prepare         on a CPU: compile every kernel for the GPU machine into .gpu/triton.tar.xz
    python -m benchmarks.gpu A               cuBLAS at our shapes, the training step, predictions, and correctness
    python -m benchmarks.gpu B               launch tables of the most expensive kernels; a block and steps with them
    python -m benchmarks.gpu C               triangle attention and triangle product, ours and other packages'
    python -m benchmarks.gpu A --rehearse    the same processes on a CPU, at toy sizes
    python -m benchmarks.gpu ship TABLE      put the launches of B's table into the package's table for Hopper

Each part of a command is a process with a time limit, to which the time that earlier parts left unused is added. A part
that crashes or hangs is reported, and the next one runs. Rows are appended to files as they are measured. The results
are one archive in $OUT, or in benchmarks/results, which is rewritten every five seconds, so a command that is killed
loses nothing. The exit code is 1 if a part failed. benchmarks/README.md says what each row answers.
"""

import argparse
import json
import lzma
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Archives that git ignores and that are carried to the GPU machine, where they are unpacked to SCRATCH.
CARRIED = ROOT / ".gpu"
# Triton's cache names its files by absolute path, so this folder is the same on both machines.
SCRATCH = Path("/tmp/warpfold-gpu")
TRITON, PEERS = SCRATCH / "triton", SCRATCH / "peers"
TABLES = Path("~/.cache/warpfold/tuned").expanduser()  # where `warpfold tune` writes
# The versions of the GPU machine: those of other ones have other cache keys.
MACHINE = {"python": "3.12", "torch": "2.11", "triton": "3.6.0"}
CARRIED_MIB = 64
LIMITS = {"A": 330, "B": 180, "C": 80}  # seconds
SAVE_EVERY = 5.0  # seconds
LARGEST_FILE = 6 * 2**20  # bytes; a reply brings back 16 MiB a file
SHOWN = 16  # rows of a part that are printed at the end: a reply shows 12,000 characters

LARGE = {"residues": 384, "sequences": 512, "extra": 5120}  # an example of fine-tuning
TRIANGLES = (256, 512, 1024)  # residues
# What a training block spends most on (results/gpu-h200-2026-11-26.json), the most expensive first, at 132 alignment
# rows (128 and 4 of templates) and 256 residues.
TUNED = (
    "attention_short:32x2x256x256", "outer_products:132", "outer_products:128",
    "attention_forward:32x2x256x256", "attention_dbias:32x2x256x256", "attention_short:32x1x132x132",
    "layer_norm_backward:256x2", "norm_linear_backward:256x64", "norm_linear:256x1024", "outer_product:132x32x128",
    "norm_linear:128x516",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A process with a time limit in seconds; arguments: of Python, where ROWS stands for the file of the rows."""

    name: str
    seconds: int
    arguments: Sequence[str]


def parts_of(command: str, toy: bool = False) -> list[Part]:
    """Return the parts of a command in their order; toy: at the sizes of a rehearsal on a CPU."""
    output = ("--device", "cpu" if toy else "cuda", "--rows", "ROWS")
    settings = ("--settings", "tiny" if toy else "monomer", "--dtype", "bf16")
    small = "--residues 12 --sequences 4 --extra 4 --templates 1 --blocks 1 --repeats 1" if toy else "--repeats 5"
    block = small if toy else f"{small} --sequences 132"  # as in a step, with the rows of four templates
    large = " ".join(f"--{name} {size}" for name, size in LARGE.items())

    def measured(name: str) -> tuple[str, ...]:
        return ("-m", "benchmarks.gpu_parts", name, *output, *(("--toy",) if toy else ()))

    def warpfold(*arguments: str) -> tuple[str, ...]:
        return ("-m", "warpfold", *arguments, *output)

    def step(ways: str, more: str = small) -> tuple[str, ...]:
        return warpfold("bench", "--step", *settings, "--ways", "ours" if toy else ways, *more.split())

    def peer(op: str, kind: str, ways: str) -> tuple[str, ...]:
        shapes = ",".join(f"{kind}:{n}" for n in ((12,) if toy else TRIANGLES))
        few = ("--repeats", "1" if toy else "10", "--unchecked")
        return warpfold("bench", "--op", op, "--shapes", shapes, "--ways", ways, "--dtype", "bf16", *few)

    if command == "A":
        pytest = ("-m", "pytest", "-m", "gpu", "-v", "--no-header", "-p", "no:cacheprovider")
        return [
            Part("prepared", 50, measured("prepared")),
            Part("products", 20, measured("products")),
            Part("step", 27, step("kept-graph")),
            Part("step-recycled", 30, step("kept-graph", f"{small} --recycles 3")),
            Part("kernels", 18, measured("kernels")),
            Part("predictions", 65, measured("predictions")),
            Part("graphs", 50, (*pytest, "--co" if toy else "-n4", "tests/laws/test_gpu_graphs.py")),
            Part("doctor", 65, warpfold("doctor", "--kernels", *settings)),
        ]
    if command == "B":
        tuned = [word for kernel in TUNED for word in ("--kernel", kernel)]
        where = ("--dry-run",) if toy else output
        return [
            Part("tune", 100, ("-m", "warpfold", "tune", "--quick", *tuned, *where)),
            Part("block", 20, warpfold("bench", "--block", *settings, "--ways", "ours", *block.split())),
            Part("step", 25, step("kept-graph")),
            Part("step-384", 33, step("graph", small if toy else f"{large} --repeats 2")),
        ]
    return [
        Part("attention", 24, peer("attention", "starting", "sdpa,ours")),
        Part("attention-cuequivariance", 18, peer("attention", "starting", "cuequivariance")),
        Part("product", 20, peer("triangle_multiplication", "outgoing", "ours,cuequivariance")),
        # Last, because it tunes itself at the first call of a size.
        Part("attention-trifast", 15, peer("attention", "starting", "trifast")),
    ]


@dataclass
class Results:
    """The folder of a command's results, and the archive that holds it and the launch tables of this machine."""

    folder: Path
    archive: Path
    saved: float = 0.0

    def save(self) -> None:
        """Rewrite the archive."""
        draft = self.archive.with_name(f"{self.archive.name}.new")
        with tarfile.open(draft, "w:gz") as archive:
            for path in [*sorted(self.folder.iterdir()), *sorted(TABLES.glob("*.json"))]:
                if path.stat().st_size <= LARGEST_FILE:
                    archive.add(path, path.name)
        draft.replace(self.archive)
        self.saved = time.monotonic()


def run(parts: Sequence[Part], results: Results, start: float, python: str = sys.executable) -> bool:
    """Run parts one after another, each at most until the limits of all parts up to it are over.

    start: of the command, by `time.monotonic`.  Returns whether all succeeded.
    """
    environment = {**os.environ, "TRITON_CACHE_DIR": str(TRITON), "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(PEERS), *filter(None, [os.environ.get("PYTHONPATH")])])
    deadline, outcomes = start, []
    for part in parts:
        deadline += part.seconds
        began, kernels = time.monotonic(), compiled_kernels()
        outcome = run_part(part, results, python, environment, deadline)
        row = {"part": part.name, "outcome": outcome, "seconds": round(time.monotonic() - began, 1)}
        row["compiled"] = compiled_kernels() - kernels
        with (results.folder / "parts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        results.save()
        print(in_words(row), flush=True)
        outcomes.append(outcome)
    return all(outcome == "ok" for outcome in outcomes)


def run_part(part: Part, results: Results, python: str, environment: Mapping[str, str], deadline: float) -> str:
    """Run a part until a time; return "ok", or why it is not."""
    log, rows = (results.folder / f"{part.name}.{ending}" for ending in ("log", "jsonl"))
    arguments = [str(rows) if word == "ROWS" else word for word in part.arguments]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [python, *arguments], cwd=ROOT, env=environment, stdout=file, stderr=file, process_group=0
        )
        while process.poll() is None and time.monotonic() < deadline:
            if time.monotonic() >= results.saved + SAVE_EVERY:
                results.save()
            time.sleep(0.1)
        code = process.poll()
        # The part's own workers end too, or they would disturb the next measurement.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code is None:
        return "out of time"
    last = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
    return f"failed, exit code {code}: {last[:160]}" if code else "ok"


def compiled_kernels() -> int:
    """Count the kernels in Triton's cache."""
    return sum(1 for _ in TRITON.glob("*/*.cubin"))


def in_words(row: Mapping[str, Any]) -> str:
    """Return a row as a line of text, numbers with four digits."""
    shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}
    return ", ".join(f"{key} {value}" for key, value in shown.items() if value not in (None, "", [], {}))


def print_rows(folder: Path) -> None:
    """Print the measured rows, in the order of their files' last change; a torn last line is left out."""
    text = ""
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
        if path.stem == "parts":
            continue
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        fine = [line for line in lines if '"verdict": "ok' in line]  # of the doctor
        text += f"\n{path.stem}{f': {len(fine)} checks ok' if fine else ''}\n"
        others = [line for line in lines if line not in fine]
        text += "".join(f"  {in_words(json.loads(line))[:180]}\n" for line in others[:SHOWN])
        text += f"  {len(others) - SHOWN} more rows are in the archive\n" if len(others) > SHOWN else ""
    print(text)


def unpack() -> None:
    """Unpack the carried archives, unless an earlier command on this machine has; report those that are damaged."""
    for archive in sorted(CARRIED.glob("*.tar.xz")):
        done = SCRATCH / f"{archive.name}.{archive.stat().st_size}"
        if done.exists():
            continue
        try:
            with tarfile.open(archive) as file:
                file.extractall(SCRATCH, filter="data")
            done.touch()
        except (OSError, EOFError, tarfile.TarError, lzma.LZMAError) as error:  # measured all the same, but slowly
            print(f"{archive}: not unpacked: {error}. Pack it again.", flush=True)


def prepare(arguments: Sequence[str]) -> None:
    """Compile all kernels and tuning candidates into SCRATCH, and pack what Triton reads of them.

    arguments: passed on to `gpu_parts prepared`.
    """
    here = {"python": ".".join(map(str, sys.version_info[:2])), "torch": version("torch"), "triton": version("triton")}
    wrong = [f"{name} {here[name]}" for name in MACHINE if not here[name].startswith(MACHINE[name])]
    if wrong:
        wanted = ", ".join(f"{name} {number}" for name, number in MACHINE.items())
        raise SystemExit(f"gpu prepare: {', '.join(wrong)}: the GPU machine has {wanted}. Run it with these versions.")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(TRITON), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.gpu_parts", "prepared", "--device", "cpu", "--candidates", *arguments]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    CARRIED.mkdir(exist_ok=True)
    packed = CARRIED / "triton.tar.xz"
    with tarfile.open(packed, "w:xz") as archive:
        for path in sorted([*TRITON.glob("*/*.cubin"), *TRITON.glob("*/*.json")]):
            archive.add(path, path.relative_to(SCRATCH))
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    tree = sum(path.lstat().st_size for path in files if path.exists()) / 2**20
    print(
        f"{packed}: {compiled_kernels()} kernels, {packed.stat().st_size / 2**20:.1f} MiB; the tree has {tree:.1f} MiB"
    )
    if tree + packed.stat().st_size / 2**20 > CARRIED_MIB:
        raise SystemExit(f"{packed}: more than {CARRIED_MIB} MiB with the tree. Remove kernels from TUNED.")


def main() -> int:
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["prepare", "ship", *LIMITS])
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, at toy sizes")
    given, more = parser.parse_known_args()
    if given.command == "prepare":
        prepare(more)
        return 0
    if given.command == "ship" and len(more) == 1:
        from warpfold.bench.kernels import ship
        from warpfold.ops.triton.launch import SHIPPED

        entries = ship(Path(more[0]), SHIPPED / "sm_90.json")
        print(f"{entries} entries written to {SHIPPED / 'sm_90.json'}; check them: ./dev triton")
        return 0
    if more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    SCRATCH.mkdir(parents=True, exist_ok=True)
    unpack()
    out = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    out.mkdir(parents=True, exist_ok=True)
    name = f"{'rehearsal' if given.rehearse else 'gpu'}-{given.command}-{time.strftime('%Y-%m-%d-%H%M%S')}"
    with tempfile.TemporaryDirectory() as folder:
        results = Results(Path(folder), out / f"{name}.tar.gz")
        parts = parts_of(given.command, given.rehearse)
        if given.rehearse:  # a CPU may be shared
            parts = [replace(part, seconds=5 * part.seconds) for part in parts]
        succeeded = run(parts, results, start)
        print_rows(results.folder)
    print(f"{'a rehearsal on a CPU, not a GPU result' if given.rehearse else 'results'}: {results.archive}")
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
