"""Measure peak memory and time against length under every kind of plan, and compare them with the estimates.

    python -m benchmarks.length --quick --out benchmarks/results/NAME.json   (3 GB)
    python -m benchmarks.length --residues 256,512,1024,2048 --longest 300 --out ...            (16 GB, an hour)

The model "blocks" has two blocks of the true width, and the model "whole" has all parts at a small width. Each case has
its own processes. Its peak is the memory (VmHWM) of the largest rank beyond the imports. The figure (.svg, next to the
JSON file) shows measurements and estimates, including estimates of the whole model in bf16 on a GPU to more than 10,000
residues.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.length_figure import picture
from warpfold.batch import LABELS
from warpfold.cost.example import ExampleSizes, Job, predict_example, random_example, shortened
from warpfold.cost.machine import describe
from warpfold.cost.measured_rates import measured
from warpfold.cost.memory import estimate_memory
from warpfold.cost.rates import of_gpu
from warpfold.cost.replay import step_time
from warpfold.device import keep_memory
from warpfold.engine.packed import PackedWeights
from warpfold.errors import UserError
from warpfold.model.alphafold import AlphaFold, HeadsConfig, ModelConfig
from warpfold.model.evoformer import EvoformerConfig, PairConfig
from warpfold.model.structure import StructureConfig
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import Mesh, make_mesh
from warpfold.parallel.plan import DTYPES, Plan

PTM = ModelConfig(heads=HeadsConfig(pae=True), recycles=0)
BLOCKS = replace(shortened(PTM, 2), extra_blocks=1, templates=replace(PTM.templates, enabled=False))
SMALL = replace(
    BLOCKS, c_m=32, c_z=32, c_s=64, c_e=16,
    evoformer=EvoformerConfig(blocks=4, heads=4, c_outer=8, transition=2, pair=PairConfig(c_triangle=32, transition=2)),
    structure=StructureConfig(c=64, heads=4, sidechain_c=32),
)  # fmt: skip
MODELS = {"blocks": BLOCKS, "whole": SMALL}
CHUNK = 16  # rows of z
PLANS = {
    "whole": Plan(),
    "chunked": Plan(chunk=CHUNK),
    "in place": Plan(chunk=CHUNK, in_place=True),
    "offload": Plan(chunk=CHUNK, in_place=True, offload=True),
    "2 ranks": Plan(chunk=CHUNK, in_place=True, axial=2),
    "4 ranks": Plan(chunk=CHUNK, in_place=True, axial=4),
}
ROWS, EXTRA = 32, 64  # of the alignment, in what is measured; little memory beside z, as of long proteins
LARGE_CHUNK = 64  # of the plans on a GPU
FAR = (256, 512, 1024, 2048, 4096, 6000, 8192, 10_000, 16_384)
SEPARATE = 4096  # residues; farther, an estimate of slices that are not in place takes minutes, as it runs each of them
GPU = "A100"
WAITS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000", "GLOO_SOCKET_IFNAME": "lo"}
LIMIT = 3600.0  # seconds of a case


@dataclass(frozen=True)
class Case:
    """A measurement: the names of a model and a plan, and a length."""

    model: str
    plan: str
    residues: int

    @property
    def job(self) -> Job:
        """The model and the sizes."""
        sizes = ExampleSizes(residues=self.residues, sequences=ROWS, extra=EXTRA, templates=0)
        return Job(model=MODELS[self.model], sizes=sizes, recycles=0)


def cases(
    models: Sequence[str], plans: Sequence[str], lengths: Sequence[int], most: float, longest: float
) -> Iterator[Case]:
    """Yield the cases whose estimates are within the limits of memory (all processes) and seconds."""
    for residues in lengths:
        for model in models:
            for plan in plans:
                case = Case(model, plan, residues)
                memory = PLANS[plan].axial * estimate_memory(case.job, PLANS[plan]).peak
                alone = replace(PLANS[plan], axial=1)  # ranks share the cores of this machine
                seconds = step_time(case.job, alone, measured("cpu", torch.float32)).total
                if memory <= most and seconds <= longest:
                    yield case
                else:
                    print(f"left out: {case}, {memory / 1e9:.1f} GB, {seconds:.0f} s planned", flush=True)


def measure(case: Case, threads: int) -> dict[str, Any]:
    """Run a case in its own processes, and return its seconds and the peak of its largest rank, or the error."""
    ranks = PLANS[case.plan].axial
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.length", "--case", case.model, case.plan, str(case.residues)]
        environment = {**os.environ, **WAITS, "OMP_NUM_THREADS": str(max(1, threads // ranks))}
        processes = [
            subprocess.Popen(
                [*command, "--rank", str(rank), "--meet", f"{folder}/store"],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        said = [process.communicate(timeout=LIMIT) for process in processes]
    if any(process.returncode for process in processes):
        reasons = [err.strip().splitlines()[-1] for _, err in said if err.strip()]
        return {"failed": reasons[0] if reasons else "a process was ended"}
    found = [json.loads(out.splitlines()[-1]) for out, _ in said]
    peak = max(one["peak_bytes"] for one in found)
    return found[0] | {"peak_bytes": peak, "planned_bytes": estimate_memory(case.job, PLANS[case.plan]).peak}


def run(case: Case, rank: int, meet: str) -> dict[str, Any]:
    """Run a case as one of its ranks after a short warm-up, then measure the rates for the estimate."""
    plan, job = PLANS[case.plan], case.job
    mesh = Mesh()
    if plan.axial > 1:
        store = dist.FileStore(meet, plan.axial)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.axial, timeout=timedelta(seconds=LIMIT))
        mesh = make_mesh(1, plan.axial, 1)
    keep_memory()  # as the command line does on a CPU
    before = status("VmRSS")
    torch.manual_seed(0)
    model = AlphaFold(job.model).eval()
    PackedWeights(model, DTYPES[plan.precision])
    Execution(plan, mesh).bind(model)
    for residues in (min(64, job.sizes.residues), job.sizes.residues):
        batch = random_example(job.model, replace(job.sizes, residues=residues), "cpu")
        batch = {name: x for name, x in batch.items() if name not in LABELS}
        start = time.perf_counter()
        with torch.no_grad():
            predict_example(model, batch, job.recycles)
        seconds = time.perf_counter() - start
    peak = status("VmHWM") - before
    if rank:
        return {"peak_bytes": peak}
    planned = step_time(job, plan, measured("cpu", torch.float32)).total
    return {"seconds": seconds, "planned_seconds": planned, "peak_bytes": peak}


def status(name: str) -> int:
    """Read the memory of this process in bytes (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def planned(plans: Sequence[str], lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Estimate a pass of a whole monomer with 512 + 1,024 rows in bf16 on a GPU."""
    rows, rates = [], of_gpu(GPU)
    for name in plans:
        plan = PLANS[name]
        plan = replace(plan, precision="bf16", chunk=plan.chunk and LARGE_CHUNK)
        for residues in lengths:
            if plan.chunk and not plan.in_place and residues > SEPARATE:
                break
            sizes = ExampleSizes(residues=residues, sequences=512, extra=1024, templates=0)
            job = Job(model=replace(PTM, templates=BLOCKS.templates), sizes=sizes, recycles=0)
            try:
                peak = estimate_memory(job, plan, "cuda").peak
            except RuntimeError as error:
                rows.append({"plan": name, "residues": residues, "failed": str(error).splitlines()[0]})
                print(rows[-1], flush=True)
                break
            rows.append({"plan": name, "residues": residues, "peak_bytes": peak,
                         "seconds": step_time(job, plan, rates).total})  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the results go, as JSON, and the picture beside them")
    parser.add_argument("--residues", default="256,512,1024,2048")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--most", type=float, default=16.0, help="GB that all processes of a case may take together")
    parser.add_argument("--longest", type=float, default=600.0, help="seconds of a case, as the plan says")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of all processes of a case together")
    parser.add_argument("--far", default=",".join(map(str, FAR)), help="lengths of the plan's figures; none: leave out")
    parser.add_argument("--quick", action="store_true", help="128 to 384 residues, at most 3 GB, the plan's to 10,000")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--meet", default="", help=argparse.SUPPRESS)
    parser.add_argument("--draw", type=Path, help="draw the picture of results again")
    arguments = parser.parse_args()
    if arguments.draw:
        arguments.draw.with_suffix(".svg").write_text(picture(json.loads(arguments.draw.read_text())))
        return
    if arguments.case:
        model, plan, residues = arguments.case
        print(json.dumps(run(Case(model, plan, int(residues)), arguments.rank, arguments.meet)))
        return
    if arguments.quick:
        arguments.residues, arguments.most, arguments.far = "128,192,256,384", 3.0, "256,1024,4096,10000"
    lengths, far = ([int(n) for n in text.split(",") if n] for text in (arguments.residues, arguments.far))
    unknown = set(arguments.plans.split(",")) - set(PLANS) | set(arguments.models.split(",")) - set(MODELS)
    if unknown:
        raise UserError(f"{', '.join(sorted(unknown))}: plans are {', '.join(PLANS)}, models {', '.join(MODELS)}")
    results = []
    models, plans = arguments.models.split(","), arguments.plans.split(",")
    for case in cases(models, plans, lengths, arguments.most * 1e9, arguments.longest):
        results.append(
            {"model": case.model, "plan": case.plan, "residues": case.residues} | measure(case, arguments.threads)
        )
        print(results[-1], flush=True)
    report = {
        "what": f"peak memory and seconds of one pass, {ROWS} + {EXTRA} rows, fp32, slices of {CHUNK} rows; "
        f"the plan's figures: a monomer with 512 + 1,024 rows, bf16, one pass, {GPU}, modelled",
        "date": datetime.date.today().isoformat(),
        "machine": describe(torch.device("cpu")),
        "threads": arguments.threads,
        "load_average": round(os.getloadavg()[1], 1),
        "results": results,
        "planned": planned(plans, far),
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
        arguments.out.with_suffix(".svg").write_text(picture(report))


if __name__ == "__main__":
    main()
