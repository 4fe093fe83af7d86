"""The front end of the installed Triton accepts all launches; the interpreter accepts code that it rejects.

The launches are recorded from the real code on meta tensors: training steps and predictions of every preset, the checks
of `warpfold doctor --kernels`, layers of third-party models, and sizes that users may choose.
`./dev triton` runs these tests with the oldest Triton that pyproject.toml admits; under --slow every launch is compiled
to the end, for each architecture.
"""

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from triton.backends.nvidia.compiler import PTXASError
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError
from triton.runtime.jit import JITFunction

from tests.ops.triton.budgets import BUDGETS, SM_80, front_end
from tests.ops.triton.model_launches import FOREIGN, foreign_launches, launches_of, one_block
from tests.ops.triton.toy_kernels import COPY, UNEVEN, copy_launch
from warpfold import settings
from warpfold.bench.doctor import cases_of, cut
from warpfold.bench.kernels import Workload, launching
from warpfold.bench.kernels import launches_of as launches_of_workload
from warpfold.check.cases import ODD, OPS, inputs
from warpfold.check.checks import DTYPES, run
from warpfold.check.op_profile import OpCase
from warpfold.cost.example import ExampleSizes, TrainingStep, bench_of
from warpfold.cost.recorder import Recorder
from warpfold.ops import triton as package
from warpfold.ops.triton.compile import compiled, identity, reason, source
from warpfold.ops.triton.launch import KernelLaunch, kernels
from warpfold.parallel.plan import Plan, Precision

pytestmark = [pytest.mark.timeout(900), pytest.mark.offline]
# Multiples of 16, other sizes, and 1, for which Triton generates different code.
UNEVEN_SIZES = ExampleSizes(residues=37, sequences=5, extra=1, templates=1)
FOLDED = {
    64: ExampleSizes(residues=256, sequences=132, extra=1024, templates=4),
    16: UNEVEN_SIZES,
}  # by rows of a slice


def training(preset: str, precision: Precision) -> Iterator[KernelLaunch]:
    """Yield the launches of whole steps: drawn dropout, recycling, all losses, clipping, Adam, averaged weights."""
    bench = bench_of(settings.load(preset), preset)
    for sizes in (bench.sizes, UNEVEN_SIZES):
        plan = replace(bench.plan, precision=precision)
        one = replace(bench, model=one_block(bench.model), plan=plan, sizes=sizes, recycles=1)
        with torch.device("meta"), launching() as launches, Recorder():
            step = TrainingStep(one, "meta")
            step.bind(plan)
            step()
        yield from launches


def folding(preset: str, precision: Precision) -> Iterator[KernelLaunch]:
    """Yield the launches of predictions: whole, in slices, in place, on two ranks."""
    model = bench_of(settings.load(preset), preset).model
    for chunk, n in FOLDED.items():
        sizes = {"res": n.residues, "seq": n.sequences, "extra": n.extra, "tmpl": n.templates}
        if model.multimer is not None:
            sizes["row"] = n.sequences + n.extra
        for more in ({}, {"chunk": chunk}, {"chunk": chunk, "in_place": True}, {"axial": 2}):
            yield from launches_of(Plan(precision=precision, **more), model, sizes, training=False)


def doctor(preset: str, precision: Precision) -> Iterator[KernelLaunch]:
    """Yield the launches of `warpfold doctor --kernels`."""
    for case in cases_of(settings.load(preset), preset):
        yield from launches_of_workload(Workload(case.op, cut(case, torch.device("cuda")), precision))


def foreign(name: str, precision: Precision) -> Iterator[KernelLaunch]:
    """Yield the launches of a layer of third-party models."""
    yield from foreign_launches(name, PRECISIONS[precision])


Source = Callable[[str, Precision], Iterator[KernelLaunch]]
PRECISIONS: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
# The others, under --slow, differ only in numbers or dtype.
QUICK: dict[tuple[Source, str], set[Precision]] = {
    (training, "monomer"): {"bf16", "fp32"},
    (training, "multimer"): {"bf16"},
    (training, "tiny"): {"bf16"},
    (folding, "monomer"): {"bf16", "fp32"},
    (folding, "tiny"): {"bf16"},
    (doctor, "monomer"): {"bf16"},
    (doctor, "multimer"): {"fp32"},
    **{(foreign, name): {"bf16", "fp32"} for name in FOREIGN},
}
# Layers that torch computes in fp32 without our kernels.
WITHOUT_FP32 = ("triangle product", "outer product")
EVERY: list[tuple[Source, str, Precision]] = [
    *((of, preset, p) for of in (training, folding) for preset in settings.presets() for p in PRECISIONS),
    *((doctor, preset, p) for preset in settings.presets() for p in DTYPES),
    *((foreign, name, p) for name in FOREIGN for p in PRECISIONS if p != "fp32" or name not in WITHOUT_FP32),
]
CHOSEN = [one for one in EVERY if one[2] in QUICK.get(one[:2], ())]
every = pytest.mark.parametrize(
    ("of", "what", "precision"),
    [pytest.param(*one, marks=() if one in CHOSEN else pytest.mark.slow) for one in EVERY],
    ids=[f"{of.__name__}-{what}-{precision}" for of, what, precision in EVERY],
)
_answers: dict[str, tuple[str, frozenset[str]]] = {}  # by identity of the code
_given: dict[str, tuple[str, frozenset[str]]] = {}  # by input of the front end


@cache
def recorded(of: Source, what: str, precision: Precision) -> dict[str, KernelLaunch]:
    return by_code(of(what, precision))


def by_code(launches: Iterable[KernelLaunch]) -> dict[str, KernelLaunch]:
    """Return the launches with different code, by the identity of the code."""
    return {identity(launch, SM_80): launch for launch in launches}


def refused(launches: Mapping[str, KernelLaunch]) -> list[str]:
    """Return the launches that the front end rejects, with the reasons.

    The front end only passes divisibility by 16 to later passes, so launches that differ in nothing else, half of all,
    are compiled once.
    """
    for key in launches.keys() - _answers.keys():
        specialised, options = source(launches[key], SM_80)
        bare = ASTSource(specialised.fn, specialised.signature, specialised.constants, {})
        _answers[key] = _answer(f"{options.hash()}-{bare.hash()}", launches[key])
    return sorted({_answers[key][0] for key in launches} - {""})


def _answer(key: str, launch: KernelLaunch) -> tuple[str, frozenset[str]]:
    """Return the reason why the front end rejects a launch, or "", and the functions that it compiled."""
    if key not in _given:
        try:
            functions = re.findall(r'tt\.func \w+ @"?([\w.]+?)(?:__|["(])', front_end(launch))
            _given[key] = "", frozenset(name.rpartition(".")[2] for name in functions)
        except CompilationError as error:
            _given[key] = f"{launch.kernel.name} {launch.key} {launch.config}: {reason(error)}", frozenset()
    return _given[key]


@every
def test_no_launch_is_refused(of: Source, what: str, precision: Precision) -> None:
    launches = recorded(of, what, precision)
    assert launches
    assert not refused(launches)


def test_no_kernel_is_forgotten() -> None:
    """The launches include every kernel and reach every function of the package that Triton compiles."""
    launches = {key: launch for source in CHOSEN for key, launch in recorded(*source).items()}
    assert not refused(launches)
    assert {launch.kernel.name for launch in launches.values()} == set(kernels())
    modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    written = {name for m in modules for name, f in vars(m).items() if isinstance(f, JITFunction)}
    assert written <= {name for key in launches for name in _answers[key][1]}


SIZES = {
    "rows": st.integers(1, 40),
    "length": st.integers(1, 70) | st.sampled_from((128, 390)),
    "keys": st.integers(1, 40),
    "heads": st.integers(1, 9),
    "width": st.sampled_from((8, 16, 24, 32, 48, 64)) | st.integers(1, 70),
    "channels": st.integers(1, 300),
    "outputs": st.integers(1, 300),
    "batches": st.integers(1, 3),
}


@st.composite
def sizes_of_users(draw: st.DrawFn) -> tuple[OpCase, torch.dtype]:
    """Yield launches of operations at all sizes that settings or calls allow."""
    case = draw(st.sampled_from(ODD))
    chosen = {name: draw(sizes) for name, sizes in SIZES.items() if getattr(case, name) > 1}
    chosen["rows"] = chosen.get("rows", 1) * chosen.get("batches", 1)
    dtype = draw(st.sampled_from((torch.bfloat16, torch.float16, torch.float32)))
    return replace(case, **chosen), dtype


@examples(max_examples=60, deadline=None)
@given(sizes_of_users())
def test_sizes_that_users_choose_are_served_or_left_to_the_definition(drawn: tuple[OpCase, torch.dtype]) -> None:
    case, dtype = drawn
    op, given = OPS[case.op], inputs(case, dtype, "meta")
    with launching() as launches:
        if op.unsupported_reason(*given.args) is None:
            run(op.fast, given)
    assert not refused(by_code(launches))


@pytest.mark.parametrize("width", [24, 48])
def test_one_query_of_heads_whose_width_is_no_power_of_two(width: int) -> None:
    case = next(case for case in ODD if case.where == "template pointwise")
    launches = launches_of_workload(Workload(case.op, replace(case, width=width), "bf16"))
    assert {launch.kernel.name for launch in launches} == {"attention_forward", "attention_short"}
    assert not refused(by_code(launches))


def test_what_the_interpreter_takes_is_refused() -> None:
    """The tests above can fail."""
    assert not refused(by_code([copy_launch(COPY, 4, 64)]))
    (why,) = refused(by_code([copy_launch(UNEVEN, 4, 64)]))
    assert why.startswith("_copy_uneven")
    assert "power of 2" in why


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("arch", BUDGETS)
@every
def test_every_launch_is_compiled_to_the_end(of: Source, what: str, precision: Precision, arch: str) -> None:
    failed = []
    for launch in recorded(of, what, precision).values():
        try:
            compiled(launch, BUDGETS[arch].target)
        except (CompilationError, PTXASError, RuntimeError) as error:
            failed.append(f"{launch.kernel.name} {launch.key} {launch.config}: {reason(error)}")
    assert not failed
