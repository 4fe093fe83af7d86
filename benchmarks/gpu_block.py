"""One Evoformer block on a GPU: milliseconds forward and backward, peak memory, kernels launched, a profile.

    python benchmarks/gpu_block.py [--profile profile.txt] > block.json

128 sequences, 256 residues, AlphaFold2's channels, bf16 activations: the row of TARGETS.  Beside it the definitions.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warpfold.model.evoformer import Evoformer, EvoformerConfig
from warpfold.ops.dispatch import Kernels, refusals, using
from warpfold.ops.noise import Noise
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import DTYPES, Plan
from warpfold.tune.machine import describe
from warpfold.tune.timing import Subject, measure

FULL, TOY = (128, 256, 256, 128), (4, 12, 64, 32)  # sequences, residues, c_m, c_z


class Block:
    """A block and its inputs; m and z have gradients, as inside a stack."""

    def __init__(self, size: tuple[int, int, int, int], device: torch.device) -> None:
        s, r, c_m, c_z = size
        torch.manual_seed(0)
        self.stack = Execution(Plan(precision="bf16")).bind(Evoformer(c_m, c_z, EvoformerConfig(blocks=1)).to(device))
        for p in self.stack.parameters():
            torch.nn.init.normal_(p, std=0.02)
        for module in self.stack.modules():
            if isinstance(module, Noise):
                module.seed(0)
        dtype = DTYPES["bf16"]
        self.m = torch.randn(s, r, c_m, device=device).to(dtype).requires_grad_()
        self.z = torch.randn(r, r, c_z, device=device).to(dtype).requires_grad_()
        self.masks = torch.ones(s, r, device=device), torch.ones(r, r, device=device)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return m and z after the block, with dropout from seeded noise, as in training."""
        m, z = self.stack(self.m, self.z, *self.masks)
        return m, z

    @property
    def wanted(self) -> list[Tensor]:
        """The tensors whose gradients a training step computes."""
        return [self.m, self.z, *self.stack.parameters()]


def subject(block: Block, kernels: Kernels) -> Subject:
    """Return the block as a subject, computed with those kernels."""

    def forward() -> tuple[Tensor, Tensor]:
        with using(kernels):
            return block.forward()

    grads = torch.randn_like(block.m), torch.randn_like(block.z)
    return Subject(kernels, forward, block.wanted, grads)


@contextmanager
def profiled(found: list[Any]) -> Iterator[None]:
    """Profile what runs within the context, and append the profile to the list."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        yield
        torch.cuda.synchronize()
    found.append(profile)


def launches(profile: Any) -> dict[str, int]:
    """Count the kernels, copies and fills of memory that ran on the device, and the calls that launched a kernel."""
    events = profile.events()
    names = [e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    moves = [n for n in names if n.startswith(("Memcpy", "Memset"))]
    calls = sum("LaunchKernel" in e.name for e in events)
    return {"kernels": len(names) - len(moves), "copies and fills": len(moves), "launch calls": calls}


def counted(one: Subject, profile_to: Path | None) -> dict[str, Any]:
    """Count the launches of a forward pass without gradient and of a backward pass, with parameters' gradients."""
    profiles: list[Any] = []
    with profiled(profiles), torch.no_grad():
        one.forward()
    out = one.forward()
    with profiled(profiles):
        torch.autograd.grad(out, one.wanted, one.grad)
    if profile_to is not None:
        tables = [p.key_averages().table(sort_by="self_device_time_total", row_limit=40) for p in profiles]
        profile_to.write_text("forward\n" + tables[0] + "\nbackward\n" + tables[1], encoding="utf-8")
    return {name: launches(profile) for name, profile in zip(("forward", "backward"), profiles)}


def replayed(one: Subject, repeats: int = 20) -> float | str:
    """Return the milliseconds of the forward pass replayed as a CUDA graph, or why it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.no_grad(), torch.cuda.graph(graph):
            one.forward()
    except RuntimeError as error:
        return f"cannot be captured: {str(error).splitlines()[0]}"
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", type=Path, help="file for the profile's tables")
    parser.add_argument("--toy", action="store_true", help="a block of toy size: to rehearse, never to report")
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    size = TOY if arguments.toy else FULL
    block = Block(size, device)
    subjects = [subject(block, "fast"), subject(block, "definition")]
    report: dict[str, Any] = {
        "what": "Evoformer block, {} x {}, c_m {}, c_z {}, bf16".format(*size),
        "full_size": size == FULL,
        "machine": describe(device),
        "ways": {},
    }
    for name, times in measure(subjects, device, arguments.repeats).items():
        report["ways"][name] = {
            "failed": times.failed,
            **{f"{p}_ms": _milliseconds(times.median(p)) for p in ("forward", "training", "backward")},
            **{f"{p}_peak_mib": _mib(getattr(times, f"{p}_peak")) for p in ("forward", "backward")},
        }
    if device.type == "cuda":
        report["launches"] = counted(subjects[0], arguments.profile)
        report["launches_of_definition"] = counted(subjects[1], None)
        report["forward_as_graph_ms"] = replayed(subjects[0])
    report["refused"] = refusals()
    json.dump(report, sys.stdout, indent=1)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _mib(count: int | None) -> float | None:
    return None if count is None else count / 2**20


if __name__ == "__main__":
    main()
