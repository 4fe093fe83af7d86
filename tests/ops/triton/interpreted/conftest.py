"""These tests run kernels in Triton's interpreter, in a process that `test_interpreted.py` starts for them all.

A program costs the same whatever its size, so tiles are large; tests that ask for `default_tiles` run in those of
default.json, which a GPU gets.
"""

import os
from collections.abc import Iterator

import pytest

from warpfold.ops import dispatch
from warpfold.ops.triton.launch import KernelConfig, forced, kernels

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
LARGE = dict(BLOCK_M=64, BLOCK_C=128, BLOCK_I=128, BLOCK_O=128, BLOCK_Q=64, BLOCK_K=64, ROWS=2)
LARGE |= dict(BLOCK_P=128, BLOCK_N=4096, BLOCK=1024, BLOCK_F=32, BLOCK_H=64)
LARGE |= dict(TILE_I=16, TILE_J=16, TILE_C=4, BLOCK_S=64, BLOCK_Z=64)
collect_ignore_glob = [] if INTERPRETING else ["test_*.py"]

if INTERPRETING:
    import triton.language as tl
    from triton.runtime import interpreter

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
    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_tensor_anew(tensor, scope):
        """Of Triton 3.6, a number is an array [1] to numpy, which from 2.4 on does not take that for an integer."""
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_tensor_anew


@pytest.fixture(autouse=True)
def interpreting() -> Iterator[None]:
    """Give tensors on a CPU to the Triton kernels."""
    with dispatch.interpreting():
        yield


@pytest.fixture
def default_tiles() -> None:
    """Ask for the tiles of default.json."""


@pytest.fixture(autouse=True)
def large_tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """Launch every kernel with large tiles, unless the test asks for `default_tiles`."""
    if "default_tiles" in request.fixturenames:
        yield
        return
    with forced({n: KernelConfig({s: LARGE[s] for s in k.candidates[0].sizes}, 4, 1) for n, k in kernels().items()}):
        yield
