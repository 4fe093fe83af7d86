"""Time a layer of another model's both ways, on the device at hand: `accelerate(model, verify="speed")`.

Both ways take turns, so that a slow minute of the machine affects both; medians count.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from warpfold.adapt.adapter import Adapter, RandomInputs, swap
from warpfold.adapt.report import LayerSpeed
from warpfold.adapt.verify import copy_of, inputs_of, narrowest, redrawn, tensors_of, their_own_code
from warpfold.bench.timing import Subject, Times, measure

SIZE = {"cpu": 128, "cuda": 256}  # residues or tokens
REPEATS = {"cpu": 5, "cuda": 20}
BUDGET = {"cpu": 10.0, "cuda": 2.0}  # seconds for each way, without its warm-up
SLOWER, FASTER, SMALLER = 0.97, 1.05, 0.9  # what is between the first two is what a clock cannot tell


def measured_speed(module: nn.Module, adapter: Adapter, size: int | None = None) -> LayerSpeed:
    """Time both ways to compute a module, of which nothing is changed, forward and backward.

    size: residues or tokens.  Errors: NotServed where it cannot be copied, or its own code does not run; RuntimeError
    where a way fails later, as without memory.
    """
    with torch.inference_mode(False), torch.enable_grad():
        theirs = redrawn(copy_of(module), 0)
        ours = copy_of(theirs)
        swap(ours, adapter, adapter.build(ours))
        like = narrowest(theirs)
        kind = like.device.type
        args, kwargs = adapter.example(theirs, size or SIZE[kind], RandomInputs(like))
        given = [x.requires_grad_() for x in inputs_of(args, kwargs).values()]

        def run(way: nn.Module) -> Callable[[], Any]:
            return lambda: way(*args, **kwargs)

        with their_own_code(like.dtype):
            ways = [subject("theirs", run(theirs), [*given, *theirs.parameters()])]
        ways.append(subject("ours", run(ours), [*given, *ours.parameters()]))
        times = measure(ways, like.device, REPEATS[kind], BUDGET[kind])
    for found in times.values():
        if found.failed:
            raise RuntimeError(f"{type(module).__name__}: {found.failed}")
    return ratios(times["theirs"], times["ours"])


def subject(name: str, run: Callable[[], Any], wanted: list[Tensor]) -> Subject:
    """Return a way to compute something, for `tune.timing.measure`; wanted: what has a gradient, if it has one."""

    def forward() -> tuple[Tensor, ...]:
        kept = not torch.is_grad_enabled()
        return tuple(x for x in tensors_of(run()) if x.is_floating_point() and (kept or x.requires_grad))

    outputs = forward()
    found = torch.autograd.grad([x.sum() for x in outputs], wanted, allow_unused=True) if outputs else []
    used = [x for x, gradient in zip(wanted, found) if gradient is not None]
    return Subject(name, forward, used, tuple(torch.ones_like(x) for x in outputs))


def ratios(theirs: Times, ours: Times) -> LayerSpeed:
    """Return how often faster the second is than the first."""

    def both(times: Times) -> float:
        return (times.median("training") or 0.0) + (times.median("backward") or 0.0)

    forward = (theirs.median("forward") or 0.0) / max(ours.median("forward") or 0.0, 1e-9)
    memory = None
    if theirs.backward_peak and ours.backward_peak is not None:
        memory = ours.backward_peak / theirs.backward_peak
    return LayerSpeed(forward, both(theirs) / max(both(ours), 1e-9), memory)


def gain(speed: LayerSpeed, plain: bool) -> str:
    """Return why a layer that was timed is left, or nothing: it is slower here, or of plain torch and no better."""
    passes = [speed.forward] if speed.both is None else [speed.forward, speed.both]
    if min(passes) < SLOWER:
        return f"slower here: {speed}"
    better = max(passes) > FASTER or (speed.memory is not None and speed.memory < SMALLER)
    return f"neither faster nor smaller here: {speed}" if plain and not better else ""
