"""The measurements of benchmarks/gpu.py that no `warpfold` command makes, each in a process of its own.

python -m benchmarks.gpu_parts prepared|products|kernels|predictions --device cuda --rows FILE
"""

import argparse
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu import LARGE, TRIANGLES, TUNED
from warpfold import settings
from warpfold.batch import LABELS, Batch
from warpfold.bench import kernels as tuning
from warpfold.bench.doctor import cases_of, cut
from warpfold.bench.kernels import Workload, launches_of, launching
from warpfold.bench.model import KEPT
from warpfold.bench.timing import Whole, measure
from warpfold.check.sizes import shapes
from warpfold.cli.bench import TUNED as OPERATIONS
from warpfold.cli.bench import measured
from warpfold.cost.example import (
    BlockSizes,
    ExampleSizes,
    ModelBench,
    RandomBlock,
    TrainingStep,
    predict_example,
    random_example,
)
from warpfold.engine.packed import PackedWeights
from warpfold.files import row_file
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.ops.triton.launch import SHIPPED, KernelLaunch, read, table_used
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import DTYPES, Plan, Precision

Sink = Callable[[Mapping[str, Any]], None]
ARCHITECTURE, FAMILY = 90, SHIPPED / "sm_90.json"  # of the GPU machine, an H200
LENGTHS, FP32_LENGTH = (98, 304, 562, 914), 304  # for which others publish prediction times
ROWS = {"sequences": 512, "extra": 1024, "templates": 0}  # of a prediction, as AlphaFold2's model 5
RECYCLES = 3


@dataclass(frozen=True)
class Options:
    """device: where to measure.  toy: at sizes for a rehearsal on a CPU.  candidates: compile what B tries, too."""

    device: torch.device
    toy: bool = False
    candidates: bool = False
    workers: int | None = None

    def bench(self, blocks: int | None = 1, **sizes: int) -> ModelBench:
        """Return a model with so many blocks in each stack, and examples of the settings' sizes or of those given."""
        if self.toy:
            sizes = {"sequences": 4, "extra": 4, "templates": 1, "residues": 12}
            return measured("tiny", ["plan.precision=bf16"], sizes, 1, 1)
        return measured("monomer", ["plan.precision=bf16"], sizes, blocks, 1)

    def prediction(self, length: int, blocks: int | None = 1) -> ModelBench:
        """Return a model without templates and without the PAE head, and an example of this length."""
        given = self.bench(blocks, residues=length, **ROWS)
        templates, heads = replace(given.model.templates, enabled=False), replace(given.model.heads, pae=False)
        return replace(given, model=replace(given.model, templates=templates, heads=heads))


# ---- kernels compiled ahead


def prepared(options: Options, sink: Sink) -> None:
    """Compile what A, B and C launch, in many processes, and report what Triton's cache had.

    After a packed cache was unpacked, only Triton 3.6's launchers are left to be made, one for each kernel.
    """
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas_version
    from triton.runtime.cache import triton_key

    from warpfold.ops.triton.ahead import compile_ahead, is_cached

    target, on_gpu = GPUTarget("cuda", ARCHITECTURE, 32), options.device.type == "cuda"
    launches = recorded_launches(options)[: 2 if options.toy else None]
    key = hashlib.sha256(f"{triton_key()}{get_ptxas_version(ARCHITECTURE)}".encode()).hexdigest()[:12]
    cache = "hit" if is_cached(launches[0], target) else "miss"
    sink({"what": "first kernel", "cache": cache, "triton_key": key})
    found = compile_ahead(launches, target, workers=options.workers, launchers=on_gpu, again=on_gpu)
    sink({"what": "all kernels", "hits": found.cached, "misses": found.compiled, "failed": found.failed})


def recorded_launches(options: Options) -> list[KernelLaunch]:
    """Return every launch of commands A, B and C, the most important first, recorded on tensors without memory."""
    with table_used(read(FAMILY)):
        found = _of_step(options.bench(), KEPT)
        for extra in (False, True):
            with torch.device("meta"), launching() as launches:
                block = random_block(options, extra, "meta")
                with torch.no_grad():
                    block.forward()
                torch.autograd.grad(block.forward(), block.wanted, block.grads)
            found += launches
        for length, precision, _ in predictions_of(options):
            found += _of_prediction(options.prediction(length), precision)
        cases = cases_of(settings.load("tiny" if options.toy else "monomer"), "settings")
        operations = [Workload(case.op, cut(case, torch.device("cuda")), "bf16") for case in cases]
        if not options.toy:
            for given in graph_tests():
                found += _of_step(given, {})
            found += _of_step(options.bench(**LARGE), {})
            for n in TRIANGLES:
                for op, kind in (("attention", "starting"), ("triangle_multiplication", "outgoing")):
                    operations += [Workload(op, case, "bf16") for _, case in shapes(op, [f"{kind}:{n}"])]
        for operation in operations:
            found += launches_of(operation)
        if options.candidates:
            tasks = tuning.tuning_tasks(tuning.workloads(OPERATIONS, quick=True), quick=True)
            for task in tuning.choose_kernels(tasks, TUNED):
                found += tuning.trial_launches(task)
    return found


def _of_step(given: ModelBench, changes: Mapping[str, Any]) -> list[KernelLaunch]:
    with torch.device("meta"), launching() as launches:
        step = TrainingStep(given, "meta")
        step.bind(replace(given.plan, **changes))
        step()
    return launches


def _random_model(config: ModelConfig, plan: Plan, device: torch.device | str) -> AlphaFold:
    torch.manual_seed(0)
    return Execution(plan).bind(AlphaFold(config).to(device).eval())


def _of_prediction(given: ModelBench, precision: Precision) -> list[KernelLaunch]:
    with torch.device("meta"), torch.no_grad(), launching() as launches:
        model = _random_model(given.model, Plan(precision=precision), "meta")
        packed = PackedWeights(model, DTYPES[precision])
        predict_example(model, example_of(given, 2, torch.device("meta")), 1)
        del packed
    return launches


def graph_tests() -> list[ModelBench]:
    """Return the steps of tests/laws/test_gpu_graphs.py, but each with one example at a time."""
    from tests.helpers import tiny_config
    from tests.laws.test_gpu_graphs import SHAPES
    from tests.laws.test_graphs import CASES, LOSSES

    found = []
    for work, cases in zip(SHAPES, (list(CASES.values()), list(CASES.values())[:1])):
        sizes = ExampleSizes(
            residues=work.residues, sequences=work.sequences, extra=work.extra, templates=work.templates
        )
        for plan, optim in cases:
            given = {"model": tiny_config(recycles=2), "loss": LOSSES, "optim": optim, "plan": replace(plan, batch=1)}
            found.append(ModelBench(**given, sizes=sizes, recycles=1))
    return found


# ---- products of cuBLAS


def products(options: Options, sink: Sink) -> None:
    """Time cuBLAS at the shapes of a block's most expensive parts, with the L2 cache flushed before each run.

    The numbers of the rows are those of the designs in docs/decisions/0028.
    """
    s, n = (4, 12) if options.toy else (132, 256)  # alignment rows with those of templates; residues
    m, z = (s * n, 256), (n * n, 128)  # positions and channels of the alignment and of the pair representation
    groups: dict[str, list[tuple[str, int, int, int]]] = {
        "1 projections backward": [
            (kind, rows, o, c) for (rows, c), o in ((m, 1024), (z, 516), (z, 520), (z, 640)) for kind in ("dx", "dw")
        ] + [("dw", m[0], 1024, 264)],  # with a column of ones for the bias
        "3 outer product": [
            shape
            for k in (s, 4 * n)  # rows of the alignment, and of the extra one
            for shape in (("p", k, 32 * n, 32 * n), ("p", k, 32 * n, 8 * n), ("dx", 32 * n, 32 * n, k))
        ] + [(kind, n * n, 128, 1024) for kind in ("y", "dx", "dw")],
        "4 tails": [(kind, rows, c, c) for rows, c in (m, z) for kind in ("y", "dx", "dw")],
        "5 transitions": [
            (kind, rows, *sizes) for rows, c in (m, z) for sizes in ((4 * c, c), (c, 4 * c)) for kind in ("y", "dw")
        ],
        "6 projections forward": [("y", rows, o, c) for (rows, c), o in ((m, 1024), (z, 516), (z, 520), (z, 640))],
        "batched": [(kind, 128, size, size) for size in (n, n * 3 // 2) for kind in ("a bT", "aT b", "a b")],
        "norms and copies": [(kind, *rows_and_c, 0) for rows_and_c in (m, z) for kind in ("layer_norm", "copy")],
    }  # fmt: skip
    for row, group in groups.items():
        made = {f"{kind} {rows} x {o} x {c}": _product(kind, rows, o, c, options.device) for kind, rows, o, c in group}
        subjects = [Whole(name, run) for name, (run, _, _) in made.items()]
        times = measure(subjects, options.device, 2 if options.toy else 20, 2.0, peaks=False)
        for name, (_, flops, size) in made.items():
            seconds = times[name].median("whole")
            rates = (
                {"us": 1e6 * seconds, "tflops": flops / seconds / 1e12, "tb_per_s": size / seconds / 1e12}
                if seconds
                else {}
            )
            sink({"row": row, "what": name, **rates, "note": times[name].failed})


def _product(kind: str, rows: int, o: int, c: int, device: torch.device) -> tuple[Callable[[], Tensor], int, int]:
    """Return a call, its floating-point operations, and the bytes of its operands and its result.

    y = x wT, dx = dy w and dw = dyT x (in fp32), of x [rows, c] and w [o, c]; p = dyT x in bf16; batches of squares.
    """

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(torch.bfloat16)

    if kind in ("layer_norm", "copy"):
        x, scale, shift = drawn(rows, o), drawn(o), drawn(o)
        return x.clone if kind == "copy" else lambda: F.layer_norm(x, (o,), scale, shift), 0, 2 * 2 * rows * o
    if kind in ("a bT", "aT b", "a b"):
        a, b = drawn(rows, o, c), drawn(rows, o, c)
        left, right = a.mT if kind == "aT b" else a, b.mT if kind == "a bT" else b
        return lambda: torch.bmm(left, right), 2 * rows * o * c * c, 2 * 3 * rows * o * c
    x, dy, w = drawn(rows, c), drawn(rows, o), drawn(o, c)
    wide: dict[str, Any] = {"out_dtype": torch.float32} if device.type == "cuda" else {}  # a CPU has none
    calls: dict[str, Callable[[], Tensor]] = {
        "y": lambda: torch.mm(x, w.mT),
        "dx": lambda: torch.mm(dy, w),
        "dw": lambda: torch.mm(dy.mT, x, **wide),
        "p": lambda: torch.mm(dy.mT, x),
    }
    return calls[kind], 2 * rows * o * c, 2 * (rows * (o + c) + o * c) + (2 * o * c if kind == "dw" else 0)


# ---- kernels of a block


def random_block(options: Options, extra: bool, device: torch.device | str) -> RandomBlock:
    """Return a block of the main stack, or of the extra-MSA stack, at the sizes of a training step with templates."""
    given = options.bench()
    sizes = replace(given.sizes, sequences=given.sizes.sequences + given.sizes.templates)
    block = BlockSizes.of(given.model, sizes)
    if extra:
        block = replace(block, sequences=given.sizes.extra, c_m=given.model.c_e, global_column=True)
    return RandomBlock(block, Plan(precision="bf16"), device)


def kernels(options: Options, sink: Sink) -> None:
    """Sum up the device's time by kernel in a main block and an extra-MSA block, forward and both passes."""
    cuda, runs = options.device.type == "cuda", 3
    activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    for extra in (False, True):
        block = random_block(options, extra, options.device)

        def forward(block: RandomBlock = block) -> None:
            with torch.no_grad():
                block.forward()

        def both(block: RandomBlock = block) -> None:
            torch.autograd.grad(block.forward(), block.wanted, block.grads)

        for which, run in (("forward", forward), ("both", both)):
            for _ in range(2):
                run()
            with torch.profiler.profile(activities=[activity]) as profile:
                for _ in range(runs):
                    run()
                if cuda:
                    torch.cuda.synchronize()
            found = {
                event.key: (
                    (event.self_device_time_total if cuda else event.self_cpu_time_total) / runs,
                    event.count / runs,
                )
                for event in profile.key_averages()
                if not cuda or event.device_type == torch.autograd.DeviceType.CUDA
            }
            place = {"what": f"{'extra-MSA' if extra else 'main'} block, {block.sizes}, {which}"}
            sink({**place, "kernel": "all", "us": sum(us for us, _ in found.values())})
            for kernel, (us, launches) in sorted(found.items(), key=lambda item: -item[1][0]):
                if us:
                    sink({**place, "kernel": kernel[:80], "us": us, "launches": launches})


# ---- predictions


def predictions_of(options: Options) -> list[tuple[int, Precision, bool]]:
    """Return the lengths, precisions and whether passes are recorded as graphs, in the order of their measurement."""
    if options.toy:
        return [(12, "fp32", False), (12, "bf16", False)]
    return [(FP32_LENGTH, "fp32", False), *((length, "bf16", graph) for length in LENGTHS for graph in (False, True))]


def example_of(given: ModelBench, passes: int, device: torch.device) -> Batch:
    """Return a random example without labels."""
    return {
        name: x for name, x in random_example(given.model, given.sizes, device, passes).items() if name not in LABELS
    }


def predictions(options: Options, sink: Sink) -> None:
    """Fold random proteins by a whole model with random weights: seconds until the result, and until all was queued.

    A pass is a prediction without recycling. With graphs the first protein of a size runs as without, or is recorded,
    and the third is replayed; its atoms must equal those of the plain prediction.
    """
    positions: dict[tuple[int, Precision], Tensor] = {}
    models: dict[Precision, tuple[AlphaFold, PackedWeights]] = {}
    batches: dict[tuple[int, int], Batch] = {}
    for length, precision, graph in predictions_of(options):
        given, plan = options.prediction(length, blocks=None), Plan(precision=precision, graph=graph)
        if precision not in models:  # building one takes longer than a pass
            model = _random_model(given.model, plan, options.device)
            models[precision] = model, PackedWeights(model, DTYPES[precision])
        model, _ = models[precision]
        execution = Execution(plan)
        execution.bind(model)
        place = {"what": f"prediction, {given.sizes}", "precision": precision, "graphs": graph}
        for recycles in (0, RECYCLES):
            if (length, recycles) not in batches:
                batches[length, recycles] = example_of(given, recycles + 1, options.device)
        # The first pass compiles and loads kernels, and counts as warm-up.
        for recycles, protein in (
            [(RECYCLES, 1), (RECYCLES, 2), (RECYCLES, 3)] if graph else [(0, 0), (0, 1), (RECYCLES, 1)]
        ):
            row, atoms = _fold(model, batches[length, recycles], recycles, options.device)
            row = {"recycles": recycles, "protein": protein, **row}
            if recycles:
                expected = positions.setdefault((length, precision), atoms)
                row["equals_plain"] = torch.equal(expected, atoms)
            if graph:
                graphs = execution.graphs
                row |= {"recorded": graphs.recorded, "rerecorded": graphs.rerecorded, "refused": dict(graphs.refused)}
            sink(place | row)


def _fold(model: AlphaFold, batch: Batch, recycles: int, device: torch.device) -> tuple[dict[str, Any], Tensor]:
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.no_grad():
        folded = predict_example(model, batch, recycles)
    queued = time.perf_counter() - start
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return {"seconds": round(seconds, 4), "host_seconds": round(queued, 4)}, folded.structure.final_atom37


PARTS = {"prepared": prepared, "products": products, "kernels": kernels, "predictions": predictions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", type=torch.device, default="cuda")
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--candidates", action="store_true")
    parser.add_argument("--workers", type=int)
    given = vars(parser.parse_args())
    part, rows = given.pop("part"), given.pop("rows")
    with row_file(rows) as sink:
        PARTS[part](Options(**given), lambda row: (sink(row), print(row, flush=True)))


if __name__ == "__main__":
    main()
