"""Kernels compiled for GPUs that need not be here.

Arguments are specialised as Triton's JIT does (which integers are one, which are divisible by 16, which need 64 bits),
so the compiled code is the code that would run.  Works on launches noted by `launch.recorded`, and not under
TRITON_INTERPRET.
"""

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as triton_compile
from triton.compiler.compiler import make_backend
from triton.compiler.errors import CompilationError
from triton.runtime.jit import create_function_from_signature

from warpfold.ops.triton.launch import KernelLaunch


def source(launch: KernelLaunch, target: GPUTarget) -> tuple[ASTSource, Any]:
    """Return the kernel as Triton would specialise it for these arguments, and its options."""
    fn, backend = launch.kernel.function, make_backend(target)
    bind = create_function_from_signature(fn.signature, fn.params, backend)
    bound, specialised, given = bind(**launch.arguments, **launch.options)
    parsed, signature, constants, attributes = fn._pack_args(backend, launch.options, bound, specialised, given)
    return ASTSource(fn, signature, constants, attributes), parsed


def compiled(launch: KernelLaunch, target: GPUTarget) -> Any:
    """Compile a launch for a target.  Errors: Triton's own, for what cannot be compiled."""
    specialised, options = source(launch, target)
    return triton_compile(specialised, target=target, options=options.__dict__)


def identity(launch: KernelLaunch, target: GPUTarget) -> str:
    """Return the identity of a launch's code: of launches with the same one, one has to be compiled."""
    specialised, options = source(launch, target)
    return f"{launch.kernel.name}-{specialised.hash()}-{options.hash()}"


def make_launcher(kernel: Any) -> None:
    """Have Triton put what launches a compiled kernel into its cache: in 3.6 a C source of its own, for the system's
    compiler; since 3.7 one serves all kernels, and there is nothing to do.

    Errors: AssertionError of Triton's where the library of the driver, libcuda.so.1, is not found.
    """
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(kernel.src, kernel.metadata)


def reason(error: BaseException) -> str:
    """Return in a line why Triton refused a kernel: its innermost error, without the source that it quotes."""
    while error.__cause__ is not None:
        error = error.__cause__
    without = getattr(error, "error_message", None) if isinstance(error, CompilationError) else None
    said = str(without or error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
