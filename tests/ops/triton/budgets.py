"""The resources that a launch needs on each architecture, compiled without a GPU, against the limits.

This works on launches recorded by `launch.recorded`, and not under TRITON_INTERPRET.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from warpfold.ops.triton.compile import compiled, source
from warpfold.ops.triton.launch import KernelLaunch


@dataclass(frozen=True)
class Budget:
    """The limits of a program on an architecture.

    shared: bytes.  registers: per thread.  together: registers per thread times warps.  Nothing may be spilled.
    """

    target: GPUTarget
    shared: int
    registers: int
    together: int = 2048  # 65,536 registers for 32 threads a warp; AMD: 512 of each of 64 lanes, on 4 units


SM_80 = GPUTarget("cuda", 80, 32)
BUDGETS = {
    "sm_80": Budget(SM_80, 163 * 1024, 255),
    "sm_90": Budget(GPUTarget("cuda", 90, 32), 227 * 1024, 255),
    "sm_100": Budget(GPUTarget("cuda", 100, 32), 227 * 1024, 255),
    "gfx942": Budget(GPUTarget("hip", "gfx942", 64), 64 * 1024, 512),
}
# GPUs with 99 KB of shared memory per program: RTX 4090 and 5090.  The tests of the headline step compile for them.
SMALL = {arch: Budget(GPUTarget("cuda", int(arch[3:]), 32), 99 * 1024, 255) for arch in ("sm_89", "sm_120")}
COLUMNS = 512
# Instructions that write uniform registers, besides those that start with U.
MAKERS = ("R2UR", "S2UR", "VOTEU", "CS2UR", "REDUX")
_ttir: dict[str, str] = {}


@dataclass(frozen=True)
class Figures:
    """Resources and instructions of a compiled kernel.

    Bytes: shared, spilled (local memory of a thread).  Instructions in the code: tensor (tensor cores), wide (128-bit
    loads) and loads (of any width from global memory).
    """

    registers: int
    spilled: int
    shared: int
    tensor: int
    wide: int
    loads: int
    dots: int  # matrix products in Triton
    columns: int = 0  # tensor memory (Blackwell)
    wgmma: int = 0  # warpgroup products (Hopper)
    copies: int = 0  # asynchronous loads (cp.async, TMA)
    unwritten: tuple[str, ...] = ()  # reads of uninitialised uniform registers


def distinct(launches: Iterable[KernelLaunch], target: GPUTarget = SM_80) -> list[KernelLaunch]:
    """Return the first launch for each different code."""
    found: dict[tuple[str, str], KernelLaunch] = {}
    for launch in launches:
        specialised, options = source(launch, target)
        found.setdefault((specialised.hash(), options.hash()), launch)
    return list(found.values())


def ttir(launch: KernelLaunch, target: GPUTarget = SM_80) -> str:
    """Return the optimised TTIR of the kernel, with source locations."""
    specialised, options = source(launch, target)
    code = specialised.hash() + options.hash()  # same code, other numbers
    if code not in _ttir:
        _ttir[code] = _lowered(specialised, options, target)
    return _ttir[code]


def _lowered(specialised: ASTSource, options: Any, target: GPUTarget) -> str:
    backend, context = _prepared(target)
    stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
    backend.add_stages(stages, options, specialised.language)
    return str(stages["ttir"](_module(specialised, options, target, backend, context), {}))


def front_end(launch: KernelLaunch, target: GPUTarget = SM_80) -> str:
    """Compile the kernel's source with the front end of the compiler, without inlining functions.

    Raises CompilationError for code that it rejects.
    """
    return str(_module(*source(launch, target), target, *_prepared(target)))


def _prepared(target: GPUTarget) -> tuple[Any, Any]:
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    return backend, context


def _module(specialised: ASTSource, options: Any, target: GPUTarget, backend: Any, context: Any) -> Any:
    generators = backend.get_codegen_implementation(options)
    return specialised.make_ir(target, options, generators, backend.get_module_map(), context)


def figures(launch: KernelLaunch, target: GPUTarget) -> Figures:
    """Compile a launch for a target and read its figures.  Raises Triton's errors for kernels that do not compile."""
    read = _read_amd if target.backend == "hip" else _read_nvidia
    return read(compiled(launch, target))


def breaches(launch: KernelLaunch, found: Figures, budget: Budget) -> list[str]:
    """List the limits that a launch exceeds and the slow instructions that it has."""
    warps = launch.config.warps
    wrong = []
    if found.spilled:
        wrong.append(f"{found.spilled} bytes of a thread are spilled")
    if found.shared > budget.shared:
        wrong.append(f"{found.shared} bytes of shared memory, of {budget.shared}")
    if found.registers > budget.registers or found.registers * warps > budget.together:
        wrong.append(f"{found.registers} registers in {warps} warps, of {budget.registers} and {budget.together}")
    wrong += [f"the assembler left out what '{line}' reads" for line in found.unwritten]
    if found.columns > COLUMNS:
        wrong.append(f"{found.columns} columns of tensor memory, of {COLUMNS}")
    if found.dots and _dtype(launch) in ("bf16", "fp16"):
        if not found.tensor:
            wrong.append("matrix products without tensor cores")
        if not found.wide and budget.target.warp_size == 32:  # small tiles on 64 threads have none
            wrong.append("matrix products of which nothing is loaded in 128 bits at once")
    return wrong


def _dtype(launch: KernelLaunch) -> str:
    """Return Triton's name of the dtype of the first floating-point tensor among the arguments."""
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    dtypes = (str(t.dtype).removeprefix("torch.") for t in launch.tensors)
    return next((names[d] for d in dtypes if d in names), "")


def _read_nvidia(kernel: Any) -> Figures:
    used = _tool("cuobjdump", "-res-usage", kernel.asm["cubin"])
    registers, stack, local = (int(re.findall(rf"\b{name}:(\d+)", used)[-1]) for name in ("REG", "STACK", "LOCAL"))
    ptx = kernel.asm["ptx"]
    return Figures(
        registers,
        stack + local,
        kernel.metadata.shared,
        tensor=len(re.findall(r"\b(?:w?mma|wgmma\.mma_async|tcgen05\.mma)\.", ptx)),
        wide=len(re.findall(r"\bld\.global\S*\.(?:v4\.[bfu]32|v2\.[bfu]64)|\bcp\.async\.c[ag]\.\S+[^;]*, 0x10\b", ptx))
        + len(re.findall(r"\bcp\.async\.bulk\.tensor", ptx)),
        loads=len(re.findall(r"\bld\.global\b|\bcp\.async\.(?:c[ag]|bulk\.tensor)\b", ptx)),
        dots=_dots(kernel),
        columns=getattr(kernel.metadata, "tmem_size", None) or 0,
        wgmma=len(re.findall(r"\bwgmma\.mma_async\.", ptx)),
        copies=len(re.findall(r"\bcp\.async\.(?:c[ag]|bulk\.tensor)\b", ptx)),
        unwritten=_unwritten(kernel.asm["cubin"]) if "wgmma" in ptx else (),
    )


def _unwritten(binary: bytes) -> tuple[str, ...]:
    """Return the instructions of Hopper code that read a uniform register before any instruction wrote it.

    These registers hold the descriptors of wgmma's operands.  ptxas 12.8, which Triton 3.6 contains, omits the
    initialisation of some (on an H200, 2026-11-26, the gradient was NaN or the address illegal; without optimisation
    the code was right).
    """
    written, wrong = {"UR63"}, []
    for name, operands in re.findall(
        r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)\s*(.*?);", _tool("nvdisasm", "-c", binary)
    ):
        kind, parts = name.split(".")[0], [part.strip() for part in operands.split(",")]
        makes = kind in MAKERS or (kind.startswith("U") and kind not in ("UISETP", "UFSETP", "UPLOP3"))
        made = [parts.pop(0)] if makes and re.fullmatch(r"UR\d+", parts[0]) else []
        wide = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
        for part in parts:
            for text, first in re.findall(r"(g?desc\[)?\bUR(\d+)\b", part):
                of_register = len(parts) > 1 and parts.index(part) == 2  # left operand in registers
                places = {"gdesc[": range(2, 4) if of_register else range(4), "desc[": range(2)}.get(text, range(1))
                if not all(f"UR{int(first) + place}" in written for place in places):
                    wrong.append(f"{name} {operands.strip()}")
        for register in made:
            written |= {f"UR{int(register[2:]) + place}" for place in range(wide)}
    return tuple(wrong)


def _read_amd(kernel: Any) -> Figures:
    code = kernel.asm["amdgcn"]

    def number(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s*(\d+)", code)[-1])

    return Figures(
        number("vgpr_count"),
        max(number("private_segment_fixed_size"), 4 * number("vgpr_spill_count")),
        kernel.metadata.shared,
        tensor=len(re.findall(r"\bv_mfma_", code)),
        wide=len(re.findall(r"\b(?:global|buffer)_load_(?:lds_)?dwordx4\b", code)),
        loads=len(re.findall(r"\b(?:global|buffer)_load_", code)),
        dots=_dots(kernel),
    )


def _dots(kernel: Any) -> int:
    return str(kernel.asm["ttir"]).count("tt.dot ")


def _tool(name: str, option: str, binary: bytes) -> str:
    """Run a CUDA tool of Triton's wheel on a binary and return its output."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return subprocess.run([program, option, file.name], capture_output=True, text=True, check=True).stdout
