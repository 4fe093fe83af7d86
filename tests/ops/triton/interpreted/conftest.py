"""These tests run kernels in Triton's interpreter, in a process that `test_interpreted.py` starts for them all.

Tiles are those of default.json, which a GPU gets; only sums over programs, whose many small programs would take half of
the time, are made in larger ones, but in their own test.
"""

import os
from collections.abc import Iterator

import pytest

from warpfold.ops.triton.launch import configs, forced

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETING else ["test_*.py"]

if INTERPRETING:
    import triton.language as tl
    from triton.runtime import interpreter

    from warpfold.ops import dispatch

    dispatch.interpret()
    _dot = interpreter.InterpreterBuilder.create_dot

    def _exact_dot(self, a, b, d, *rest):
        """The interpreter multiplies the raw bits of bf16 numbers; widened first, the product is right."""
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.create_fp_ext(x, tl.float32) for x in (a, b))
        return _dot(self, a, b, d, *rest)

    interpreter.InterpreterBuilder.create_dot = _exact_dot
    _call = interpreter.InterpretedFunction.__call__

    def _quick_call(self, *args, **kwargs):
        """Each call of a function within a kernel patches triton.language anew: for ours, the kernel's launch has."""
        ours = self.fn.__module__.startswith("warpfold.")
        return self.rewrite()(*args, **kwargs) if ours else _call(self, *args, **kwargs)

    interpreter.InterpretedFunction.__call__ = _quick_call


@pytest.fixture(autouse=True)
def large_sums(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sum over programs in few large tiles, but for their own test, which does as a GPU would."""
    if request.module.__name__.endswith("test_sums"):
        yield
        return
    with forced({"sum_partials": configs("BLOCK_P BLOCK_N", (128, 4096, 4, 1))[0]}):
        yield
