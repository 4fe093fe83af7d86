"""Run one rank of many alone and without computing.

Collectives end at once (torch's fake process group), and tensors have only shapes (device "meta"). Therefore plans for
512 ranks and thousands of residues can be evaluated on any machine.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from warpfold.batch import FEATURES, Batch
from warpfold.ops.torch_internals import fake_process_group
from warpfold.parallel.mesh import Mesh, make_mesh


@contextmanager
def fake_mesh(data: int = 1, axial: int = 1, branch: int = 1, rank: int = 0) -> Iterator[Mesh]:
    """Act as rank `rank` of a grid without other processes. Raises RuntimeError if contexts are nested."""
    if data * axial * branch == 1:
        yield Mesh()
        return
    if dist.is_initialized() and dist.get_backend() == "fake":
        raise RuntimeError("fake ranks need a process without a process group")
    with fake_process_group(rank, data * axial * branch):
        with torch.device("meta"):
            mesh = make_mesh(data, axial, branch)
        yield mesh


def fake_batch(**sizes: int) -> Batch:
    """Create the features and labels of warpfold/batch.py on "meta" whose named axes all have a size in `sizes`."""
    batch: Batch = {}
    for name, feature in FEATURES.items():
        if {axis for axis in feature.axes if isinstance(axis, str)} <= set(sizes):
            shape = [sizes[axis] if isinstance(axis, str) else axis for axis in feature.axes]
            batch[name] = torch.empty(shape, dtype=getattr(torch, feature.dtype), device="meta")
    return batch
