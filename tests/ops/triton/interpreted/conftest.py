"""These tests run kernels in Triton's interpreter, in a process that `test_interpreted.py` starts for them all.

A program costs the same whatever its size, so tiles are large; tests that ask for `default_tiles` run in those of
default.json, which a GPU gets.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from warpfold.ops import dispatch
from warpfold.ops.triton.launch import KernelConfig, forced, kernels

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
LARGE = dict(BLOCK_M=64, BLOCK_C=128, BLOCK_I=128, BLOCK_O=128, BLOCK_Q=64, BLOCK_K=64, ROWS=2)
LARGE |= dict(BLOCK_P=128, BLOCK_N=4096, BLOCK=1024, BLOCK_F=32, BLOCK_H=64)
SMALLER = dict(BLOCK_Q=32, BLOCK_K=32, BLOCK=32)
LARGE |= dict(TILE_I=16, TILE_J=16, TILE_C=4, BLOCK_S=64, BLOCK_Z=64)
collect_ignore_glob = [] if INTERPRETING else ["test_*.py"]

if INTERPRETING:
    from triton.runtime import interpreter

    _builder, _tl = interpreter.InterpreterBuilder, interpreter.tl
    _dot, _cast = _builder.create_dot, _builder.cast_impl

    def _wide(t):
        if t.dtype.scalar != _tl.bfloat16:
            return t
        return interpreter.TensorHandle((t.data.astype(np.uint32) << 16).view(np.float32), _tl.float32)

    def _exact_dot(self, a, b, *rest):
        """The interpreter multiplies the raw bits of bf16 numbers, so widen them first."""
        return _dot(self, _wide(a), _wide(b), *rest)

    def _exact_cast(self, source, to):
        """The interpreter truncates fp32 to bf16, whereas a GPU rounds to nearest even."""
        if source.dtype.scalar != _tl.float32 or to.scalar != _tl.bfloat16:
            return _cast(self, source, to)
        bits = np.ascontiguousarray(source.data).view(np.uint32)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # NaN stays NaN
        return interpreter.TensorHandle(nearest.astype(np.uint16), _tl.bfloat16)

    _builder.create_dot, _builder.cast_impl = _exact_dot, _exact_cast
    _call = interpreter.InterpretedFunction.__call__

    _patched: set[str] = set()

    def _quick_call(self, *args, **kwargs):
        """Skip the patching of triton.language in each call of a function within a kernel.

        For our functions the kernel's launch has patched it, and for Triton's their first call, which is not undone.
        """
        if self.fn.__module__.startswith("warpfold.") or self.fn.__module__ in _patched:
            return self.rewrite()(*args, **kwargs)
        _patched.add(self.fn.__module__)
        return _call(self, *args, **kwargs)

    interpreter.InterpretedFunction.__call__ = _quick_call
    _np_dtype, _np_dtype_of_numbers = interpreter._get_np_dtype, cache(interpreter._get_np_dtype)

    def _quick_np_dtype(to):
        """The interpreter would build a table of all dtypes each time."""
        return _np_dtype(to) if to.scalar.is_ptr() else _np_dtype_of_numbers(to.scalar)

    interpreter._get_np_dtype = _quick_np_dtype
    # The interpreter also computes 32-bit sums and products in 64 bits, but checks them only if `debug` is on.
    _options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(_options, sanitize_overflow=_options.debug)
    _sizes = cache(lambda shape: (_tl.constexpr(math.prod(shape)), _tl.tuple([_tl.constexpr(size) for size in shape])))

    def _begin_tensor(self, handle, type):
        """Initialise `tensor` as usual, but share the tuple of sizes between tensors of a shape."""
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = _sizes(tuple(type.shape) if type.is_block() else ())

    _tl.tensor.__init__ = _begin_tensor
    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_tensor_anew(tensor, scope):
        """In Triton 3.6 a scalar is an array [1], which numpy 2.4 does not accept as an integer."""
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_tensor_anew


@pytest.fixture(autouse=True)
def interpreting() -> Iterator[None]:
    """Pass CPU tensors to the Triton kernels."""
    with dispatch.interpreting():
        yield


@pytest.fixture
def default_tiles() -> None:
    """Use the tiles of default.json."""


@pytest.fixture(autouse=True)
def large_tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """Launch all kernels with large tiles unless the test uses `default_tiles`.

    Attention has smaller tiles, so that a row has several."""
    if "default_tiles" in request.fixturenames:
        yield
        return
    chosen = {}
    for name, kernel in kernels().items():
        few = SMALLER if name.startswith("attention") else {}
        chosen[name] = KernelConfig({size: {**LARGE, **few}[size] for size in kernel.candidates[0].sizes}, 4, 1)
    with forced(chosen):
        yield
