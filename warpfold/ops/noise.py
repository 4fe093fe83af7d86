"""Dropout noise that does not depend on how the work is cut: a counter-based generator.

The draw for element i of a tensor is a hash of (key, stream, i).  The key says which training step and pass this is and
is the same on every rank; the stream says which layer draws.  So slices, ranks, recomputation and devices all see the
same noise (DESIGN section 1.5), and no generator state has to be saved or restored.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


class Noise:
    """Where the layers of one model draw from.  Unseeded, it falls back on torch's own generator (ordinary dropout)."""

    def __init__(self) -> None:
        self.seeded = False
        # Two words of the key and the pass: a tensor, so that a new key does not recompile a graph.
        self.key = torch.zeros(3, dtype=torch.int64)

    def seed(self, *parts: int) -> None:
        """Derive the key from `parts`, for example (run seed, step, example)."""
        digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
        self.key[0] = int.from_bytes(digest[:4], "little")
        self.key[1] = int.from_bytes(digest[4:], "little")
        self.seeded = True

    def at_pass(self, index: int) -> None:
        """The passes of one example through the trunk draw differently."""
        self.key[2] = index

    def keep(self, shape: Sequence[int], rate: float, stream: int, like: Tensor) -> Tensor:
        """Dropout factors of `shape`: 0 with probability `rate`, else 1 / (1 - rate), in the dtype of `like`."""
        if self.seeded:
            uniform = self._uniform(math.prod(shape), stream, like.device).reshape(*shape)
        else:
            uniform = torch.rand(*shape, device=like.device)
        return (uniform >= rate).to(like.dtype) / (1 - rate)

    def _uniform(self, n: int, stream: int, device: torch.device) -> Tensor:
        first, second, index = self.key.to(device)
        x = _mix(torch.arange(n, device=device) ^ first)
        x = _mix((x + second + stream * 0x9E3779B9 + index * 0x85EBCA6B) & _LOW)
        return (x >> 8).float() * 2.0**-24


def _mix(x: Tensor) -> Tensor:
    """A 32-bit finaliser on int64 lanes; shifts and factors: C. Wellons, "Prospecting for Hash Functions", 2018."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _LOW
    x = (x ^ (x >> 15)) * 0x846CA68B & _LOW
    return x ^ (x >> 16)


def dropout(
    x: Tensor, rate: float, noise: Noise, stream: int, training: bool, shared_axis: int | None = None
) -> Tensor:
    """x with elements dropped at `rate`; one draw serves all of `shared_axis` where it is given (Supp. 1.11.6)."""
    if not training or rate == 0:
        return x
    shape = list(x.shape)
    if shared_axis is not None:
        shape[shared_axis] = 1
    return x * noise.keep(shape, rate, stream, x)
