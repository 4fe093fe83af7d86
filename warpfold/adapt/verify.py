"""Compare a layer of another model's with ours: results and times, with the same parameters and input, both passes.

Every parameter is drawn anew, as layers whose last projection begins with zeros agree with anything.  The truth is
their own code in fp64; ours may be as far from it as theirs is in the module's dtype, or a little more.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from warpfold.adapt.adapter import Adapter, NotServed, RandomInputs, swap
from warpfold.adapt.report import LayerSpeed
from warpfold.bench.timing import SLOWER, Times, measure, subject, tensors_of
from warpfold.memory import is_out_of_memory
from warpfold.model.axial import PlainExecution
from warpfold.ops.dispatch import always_fast

SIZES = (7, 33)  # residues: below a tile of any kernel, and above, both odd
TIMES = 4.0  # theirs: so far from the truth may we be
GRADIENT = "gradient of "  # how their names begin
NEGLIGIBLE = 0.1  # of the steepest gradient: one may be zero but for rounding, as of what shifts all logits alike
ENOUGH = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # or so far, relative


@dataclass(frozen=True)
class Comparison:
    """How far two ways to compute a layer are apart, relative to the largest number of each tensor."""

    difference: float  # ours from theirs, the greatest of all tensors
    where: str  # "output", or "gradient of NAME"
    agrees: bool


def compare(module: nn.Module, adapter: Adapter, seed: int = 0, execution: PlainExecution | None = None) -> Comparison:
    """Compare both ways to compute a module, of which nothing is changed; the worst of several sizes.

    Under autocast, if it is on.  execution: how ours computes (None: all at once).
    Errors: NotServed where the adapter does not serve the module, or it cannot be copied.
    """
    worst = Comparison(0.0, "output", True)
    for n in SIZES:
        with torch.inference_mode(False), torch.enable_grad():
            found = _compare(module, adapter, seed, n, execution)
        if (not found.agrees, found.difference) > (not worst.agrees, worst.difference) or math.isnan(found.difference):
            worst = found
    return worst


def _compare(module: nn.Module, adapter: Adapter, seed: int, n: int, execution: PlainExecution | None) -> Comparison:
    theirs = redrawn(copy_of(module), seed)
    for name, value in adapter.compared_with.items():
        setattr(theirs, name, value)
    ours = copy.deepcopy(theirs)
    swap(ours, adapter, adapter.build(ours), execution)
    like = narrowest(theirs)
    with their_own_code(torch.float64), StaysDouble():
        truth = _results(copy.deepcopy(theirs).double(), adapter, n, like.double())
    with their_own_code(like.dtype):
        by_them = _results(theirs, adapter, n, like)
    with always_fast():
        by_us = _results(ours, adapter, n, like)
    worst = Comparison(0.0, "output", True)
    steepest = max(
        (float(x.abs().max()) for name, x in truth.items() if name.startswith(GRADIENT) and x.numel()), default=0.0
    )
    for name, exact in truth.items():
        one, other = by_us[name], by_them[name]
        if one.shape != other.shape or one.dtype != other.dtype:
            return Comparison(math.inf, f"shape or dtype of the {name}", False)
        least = NEGLIGIBLE * steepest if name.startswith(GRADIENT) else 0.0
        scale = max(float(exact.abs().max()), least, 1e-30) if exact.numel() else 1.0
        apart = _apart(one, other) / scale
        error, allowed = (_apart(x, exact) / scale for x in (one, other))
        agrees = error <= max(TIMES * allowed, ENOUGH[_coarsest(like)])
        if (not agrees, apart) > (not worst.agrees, worst.difference) or math.isnan(apart):
            worst = Comparison(apart, name, agrees)
    return worst


def _apart(a: Tensor, b: Tensor) -> float:
    """Return the greatest difference of two tensors; 0 of two without elements."""
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def _coarsest(like: Tensor) -> torch.dtype:
    """Return the dtype of which the rounding counts: of the parameters, or of autocast."""
    kind = like.device.type
    if torch.is_autocast_enabled(kind) and like.dtype == torch.float32:
        return torch.get_autocast_dtype(kind)
    return like.dtype


def copy_of(module: nn.Module) -> nn.Module:
    """Return a copy of a module to be tried: in eval mode, without hooks, with a gradient for every parameter.

    Errors: NotServed for one that cannot be copied.
    """
    try:
        copied = copy.deepcopy(module).eval().requires_grad_()
    except (RuntimeError, TypeError) as error:
        raise NotServed(f"it cannot be copied to be compared: {str(error).splitlines()[0]}") from error
    for part in copied.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks):
            hooks.clear()
    return copied


@contextmanager
def their_own_code(dtype: torch.dtype) -> Iterator[None]:
    """Within the context, where a module's own code runs with parameters of a dtype: raise NotServed if it fails.

    Not for want of memory: that error passes.
    """
    try:
        yield
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        if is_out_of_memory(error):
            raise
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise NotServed(
            f"its own code does not run with parameters of {str(dtype).removeprefix('torch.')}: {said}"
        ) from error


class StaysDouble(TorchFunctionMode):
    """Within the context what is fp64 stays so where code casts it to fp32, as some does before it multiplies or adds.

    So all of such code can be had in fp64; parts of it could not be run otherwise, for dtypes that do not fit.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        to_fp32 = any(given is torch.float32 for given in (*args[1:], *kwargs.values()))
        casts = to_fp32 and func in (torch.Tensor.to, torch.Tensor.type)
        if (casts or func is torch.Tensor.float) and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **kwargs)


def narrowest(module: nn.Module) -> Tensor:
    """Return a parameter of the dtype with fewest bits, which inputs have: some packages keep norms in fp32."""
    return min((p for p in module.parameters() if p.is_floating_point()), key=lambda p: p.dtype.itemsize)


def redrawn(module: nn.Module, seed: int) -> nn.Module:
    """Return a module with every parameter drawn anew, in place: no zeros, no ones, outputs of the order of one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            drawn = torch.randn(p.shape, generator=generator)
            if p.dim() > 1:
                drawn *= p[0].numel() ** -0.5
            else:
                drawn = drawn * 0.3 + (name.rpartition(".")[2] == "weight")
            p.copy_(drawn)
    return module


def _results(module: nn.Module, adapter: Adapter, n: int, like: Tensor) -> dict[str, Tensor]:
    """Return the outputs of a module for the adapter's example, and the gradients of inputs and parameters."""
    random = RandomInputs(like, seed=n)
    args, kwargs = adapter.example(module, n, random)
    given = inputs_of(args, kwargs)
    for x in given.values():
        x.requires_grad_()
    given |= {name: p for name, p in module.named_parameters() if p.requires_grad}
    outputs = list(tensors_of(adapter.compared(module(*args, **kwargs), args, kwargs)))
    loss = sum((x * random(*x.shape)).sum() for x in outputs)
    assert isinstance(loss, Tensor)
    found = torch.autograd.grad(loss, list(given.values()), allow_unused=True)
    results = {f"output {i}" if i else "output": x.detach() for i, x in enumerate(outputs)}
    return results | {
        f"{GRADIENT}{name}": torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(given.items(), found)
    }


def inputs_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the arguments that a gradient goes to: tensors of numbers, but for masks of zeros and ones."""
    return {
        f"input {name}": x
        for name, x in (*enumerate(args), *kwargs.items())
        if isinstance(x, Tensor) and x.is_floating_point() and not bool(((x == 0) | (x == 1)).all())
    }


# How fast each way is.  Both take turns, so that a slow minute of the machine affects both; medians count.

SIZE = {"cpu": 128, "cuda": 256}  # residues or tokens
REPEATS = {"cpu": 5, "cuda": 20}
BUDGET = {"cpu": 10.0, "cuda": 2.0}  # seconds for each way, without its warm-up
FASTER, SMALLER = 1.05, 0.9  # least gain of a layer of plain torch: in speed, in its share of the memory
GLANCE, TURNS, SECONDS, CLEAR = 64, 3, 1.0, 1.1  # of a glance on a CPU: residues, repeats, budget, what settles it


def glanced_speed(module: nn.Module, adapter: Adapter) -> LayerSpeed:
    """Time both ways in about a second: on a CPU at a small size, and as `measured_speed` does only if that is close.

    Errors: as of `measured_speed`.
    """
    if narrowest(module).device.type == "cpu":
        speed = _timed(module, adapter, GLANCE, TURNS, SECONDS, peaks=False)
        if min(speed.forward, speed.both or speed.forward) >= CLEAR:
            return speed
    return measured_speed(module, adapter)


def measured_speed(module: nn.Module, adapter: Adapter, size: int | None = None) -> LayerSpeed:
    """Time both ways to compute a module, of which nothing is changed, forward and backward.

    size: residues or tokens.  Errors: NotServed where it cannot be copied, or its own code does not run; RuntimeError
    where a way fails later, as without memory.
    """
    kind = narrowest(module).device.type
    return _timed(module, adapter, size or SIZE[kind], REPEATS[kind], BUDGET[kind])


def _timed(
    module: nn.Module, adapter: Adapter, size: int, repeats: int, budget: float, peaks: bool = True
) -> LayerSpeed:
    """Time both ways at a size, so often, in so many seconds for each at most; peaks: of memory, too."""
    with torch.inference_mode(False), torch.enable_grad():
        theirs = redrawn(copy_of(module), 0)
        ours = copy_of(theirs)
        swap(ours, adapter, adapter.build(ours))
        like = narrowest(theirs)
        args, kwargs = adapter.example(theirs, size, RandomInputs(like))
        given = [x.requires_grad_() for x in inputs_of(args, kwargs).values()]

        with their_own_code(like.dtype):
            ways = [subject("theirs", partial(theirs, *args, **kwargs), [*given, *theirs.parameters()])]
        ways.append(subject("ours", partial(ours, *args, **kwargs), [*given, *ours.parameters()]))
        times = measure(ways, like.device, repeats, budget, peaks)
    for found in times.values():
        if found.failed:
            error = torch.OutOfMemoryError if found.failed == "out of memory" else RuntimeError
            raise error(f"{type(module).__name__}: {found.failed}")
    return ratios(times["theirs"], times["ours"])


def ratios(theirs: Times, ours: Times) -> LayerSpeed:
    """Return how often faster the second is than the first."""

    both = [times.median("training", "backward") or 0.0 for times in (theirs, ours)]
    forward = (theirs.median("forward") or 0.0) / max(ours.median("forward") or 0.0, 1e-9)
    memory = None
    if theirs.peaks.get("both") and "both" in ours.peaks:
        memory = ours.peaks["both"] / theirs.peaks["both"]
    return LayerSpeed(forward, both[0] / max(both[1], 1e-9), memory)


def gain(speed: LayerSpeed, plain: bool, trains: bool = True) -> str:
    """Return why a layer that was timed is left, or nothing: it is slower here, or of plain torch and no better.

    trains: whether the model is trained; otherwise the forward pass alone decides.
    """
    passes = [speed.forward] if speed.both is None or not trains else [speed.forward, speed.both]
    if min(passes) < SLOWER:
        return f"slower here: {speed}"
    better = max(passes) > FASTER or (speed.memory is not None and speed.memory < SMALLER)
    return f"neither faster nor smaller here: {speed}" if plain and not better else ""
