"""Compile kernels for GPUs that need not be present.

Arguments are specialised like in Triton's JIT (integers that are 1, that are multiples of 16, that need 64 bits), so
the compiled code is the code that would run.  This works on launches recorded by `launch.recorded`, and not under
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
    """Specialise the kernel of a launch like Triton's JIT, and return it with its options."""
    fn, backend = launch.kernel.function, make_backend(target)
    bind = create_function_from_signature(fn.signature, fn.params, backend)
    bound, specialised, given = bind(**launch.arguments, **launch.options)
    parsed, signature, constants, attributes = fn._pack_args(backend, launch.options, bound, specialised, given)
    return ASTSource(fn, signature, constants, attributes), parsed


def compiled(launch: KernelLaunch, target: GPUTarget) -> Any:
    """Compile a launch for a target.  Raises Triton's errors for kernels that cannot be compiled."""
    specialised, options = source(launch, target)
    return triton_compile(specialised, target=target, options=options.__dict__)


def identity(launch: KernelLaunch, target: GPUTarget) -> str:
    """Return the identity of a launch's code.  Launches with the same identity share their code."""
    specialised, options = source(launch, target)
    return f"{launch.kernel.name}-{specialised.hash()}-{options.hash()}"


def make_launcher(kernel: Any) -> None:
    """Make Triton store the launcher of a compiled kernel in its cache.

    Triton 3.6 compiles a C source for each kernel with the system's compiler.  Since 3.7 one launcher serves all
    kernels, and there is nothing to do.
    Raises Triton's AssertionError if the driver's library libcuda.so.1 is not found.
    """
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(kernel.src, kernel.metadata)


def reason(error: BaseException) -> str:
    """Return a line with the reason why Triton rejected a kernel: the innermost error without the quoted source."""
    while error.__cause__ is not None:
        error = error.__cause__
    message = getattr(error, "error_message", None) if isinstance(error, CompilationError) else None
    lines = str(message or error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
