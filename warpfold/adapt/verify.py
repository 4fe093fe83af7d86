"""Compare a layer of another package with ours: results and times of both passes, with the same parameters and inputs.

All parameters are drawn at random, since layers whose last projection is initialised with zeros agree with anything.
The reference is their own code in fp64. The error of ours may be a few times the error of theirs in the module's dtype.
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

# Residues, below and above the tiles of all kernels, both odd.
SIZES = (7, 33)
# Our error may be this many times theirs, or this large relative to the tensor's largest number.
MAX_ERROR_RATIO = 4.0
TOLERANCES = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# Prefix of the names of gradients.
GRADIENT = "gradient of "
# The scale of a gradient is at least this share of the largest gradient: the gradient of a parameter that shifts all
# logits equally is zero except for rounding.
MIN_GRADIENT_SCALE = 0.1


@dataclass(frozen=True)
class Comparison:
    """The difference between their code and ours.

    difference: the largest of all tensors, relative to the largest number of each. where: the tensor with the largest
    difference, "output" or "gradient of NAME".
    """

    difference: float
    where: str
    agrees: bool


def compare(module: nn.Module, adapter: Adapter, seed: int = 0, execution: PlainExecution | None = None) -> Comparison:
    """Compare a module's own code with ours, on copies, and return the worst result of several sizes.

    If autocast is enabled, it applies. execution: of our layer; None computes everything at once.
    Raises NotServed if the adapter does not serve the module, or if the module cannot be copied.
    """
    worst = Comparison(0.0, "output", True)
    for n in SIZES:
        with torch.inference_mode(False), torch.enable_grad():
            result = _compare(module, adapter, seed, n, execution)
        if (not result.agrees, result.difference) > (not worst.agrees, worst.difference) or math.isnan(
            result.difference
        ):
            worst = result
    return worst


def _compare(module: nn.Module, adapter: Adapter, seed: int, n: int, execution: PlainExecution | None) -> Comparison:
    theirs = redrawn(copy_for_trial(module), seed)
    for name, value in adapter.compared_with.items():
        setattr(theirs, name, value)
    ours = copy.deepcopy(theirs)
    swap(ours, adapter, adapter.build(ours), execution)
    like = narrowest(theirs)
    with their_own_code(torch.float64), StaysDouble():
        truth = _results(copy.deepcopy(theirs).double(), adapter, n, like.double())
    with their_own_code(like.dtype):
        their_results = _results(theirs, adapter, n, like)
    with always_fast():
        our_results = _results(ours, adapter, n, like)
    worst = Comparison(0.0, "output", True)
    # The dtype that determines the rounding: that of autocast for fp32 parameters, else the parameters'.
    kind, rounding = like.device.type, like.dtype
    if torch.is_autocast_enabled(kind) and rounding == torch.float32:
        rounding = torch.get_autocast_dtype(kind)
    largest_gradient = max(
        (float(x.abs().max()) for name, x in truth.items() if name.startswith(GRADIENT) and x.numel()), default=0.0
    )
    for name, exact in truth.items():
        our, their = our_results[name], their_results[name]
        if our.shape != their.shape or our.dtype != their.dtype:
            return Comparison(math.inf, f"shape or dtype of the {name}", False)
        min_scale = MIN_GRADIENT_SCALE * largest_gradient if name.startswith(GRADIENT) else 0.0
        scale = max(float(exact.abs().max()), min_scale, 1e-30) if exact.numel() else 1.0
        difference = _max_difference(our, their) / scale
        our_error, their_error = (_max_difference(x, exact) / scale for x in (our, their))
        agrees = our_error <= max(MAX_ERROR_RATIO * their_error, TOLERANCES[rounding])
        if (not agrees, difference) > (not worst.agrees, worst.difference) or math.isnan(difference):
            worst = Comparison(difference, name, agrees)
    return worst


def _max_difference(a: Tensor, b: Tensor) -> float:
    """Compute the largest difference of two tensors, or 0 for tensors without elements."""
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def copy_for_trial(module: nn.Module) -> nn.Module:
    """Copy a module for a comparison: in eval mode, without hooks, with gradients for all parameters.

    Raises NotServed if the module cannot be copied.
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
    """Convert errors of a module's own code, run with parameters of a dtype, to NotServed; not if memory runs out."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        if is_out_of_memory(error):
            raise
        message = (str(error) or type(error).__name__).splitlines()[0]
        raise NotServed(
            f"its own code does not run with parameters of {str(dtype).removeprefix('torch.')}: {message}"
        ) from error


class StaysDouble(TorchFunctionMode):
    """Ignore casts from fp64 to fp32 within the context.

    Some packages cast to fp32 before products or sums. Without this, their code could not run in fp64, or would fail
    because of different dtypes.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        to_fp32 = any(argument is torch.float32 for argument in (*args[1:], *kwargs.values()))
        casts = to_fp32 and func in (torch.Tensor.to, torch.Tensor.type)
        if (casts or func is torch.Tensor.float) and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **kwargs)


def narrowest(module: nn.Module) -> Tensor:
    """Return a parameter of the narrowest dtype, which is that of the inputs: some packages keep norms in fp32."""
    return min((p for p in module.parameters() if p.is_floating_point()), key=lambda p: p.dtype.itemsize)


def redrawn(module: nn.Module, seed: int) -> nn.Module:
    """Draw all parameters of a module at random, in place, without zeros and ones, with outputs of the order of one."""
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
    """Compute the outputs of a module for the adapter's example, and the gradients of inputs and parameters."""
    random = RandomInputs(like, seed=n)
    args, kwargs = adapter.example(module, n, random)
    leaves = differentiable_inputs(args, kwargs)
    for x in leaves.values():
        x.requires_grad_()
    leaves |= {name: p for name, p in module.named_parameters() if p.requires_grad}
    outputs = list(tensors_of(adapter.compared(module(*args, **kwargs), args, kwargs)))
    loss = sum((x * random(*x.shape)).sum() for x in outputs)
    assert isinstance(loss, Tensor)
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    results = {f"output {i}" if i else "output": x.detach() for i, x in enumerate(outputs)}
    return results | {
        f"{GRADIENT}{name}": torch.zeros_like(x) if gradient is None else gradient
        for (name, x), gradient in zip(leaves.items(), gradients)
    }


def differentiable_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the floating-point arguments by name, without masks of zeros and ones."""
    return {
        f"input {name}": x
        for name, x in (*enumerate(args), *kwargs.items())
        if isinstance(x, Tensor) and x.is_floating_point() and not bool(((x == 0) | (x == 1)).all())
    }


# Timing. Both ways alternate, so that a slow minute of the machine affects both, and medians are compared.

# Residues or tokens.
SIZE = {"cpu": 128, "cuda": 256}
REPEATS = {"cpu": 5, "cuda": 20}
# Seconds for each way, without its warm-up.
BUDGET = {"cpu": 10.0, "cuda": 2.0}
# A layer of plain torch is swapped if it is this much faster, or needs less than this share of the memory.
MIN_SPEEDUP, MAX_MEMORY_SHARE = 1.05, 0.9
# A brief timing on a CPU: residues, repeats, seconds, and the speedup from which no longer timing follows.
BRIEF_SIZE, BRIEF_REPEATS, BRIEF_BUDGET, CLEAR_SPEEDUP = 64, 3, 1.0, 1.1


def brief_speed(module: nn.Module, adapter: Adapter) -> LayerSpeed:
    """Time both ways briefly on a CPU, in about a second. If the result is close, or on a GPU, use `measured_speed`.

    Raises the errors of `measured_speed`.
    """
    if narrowest(module).device.type == "cpu":
        speed = _time_both(module, adapter, BRIEF_SIZE, BRIEF_REPEATS, BRIEF_BUDGET, peaks=False)
        if min(speed.forward, speed.both or speed.forward) >= CLEAR_SPEEDUP:
            return speed
    return measured_speed(module, adapter)


def measured_speed(module: nn.Module, adapter: Adapter, size: int | None = None) -> LayerSpeed:
    """Time both ways to compute a module, forward and backward, on copies.

    size: residues or tokens. Raises NotServed if the module cannot be copied or its own code does not run, and
    RuntimeError if one of them fails later, for example because memory runs out.
    """
    kind = narrowest(module).device.type
    return _time_both(module, adapter, size or SIZE[kind], REPEATS[kind], BUDGET[kind])


def _time_both(
    module: nn.Module, adapter: Adapter, size: int, repeats: int, budget: float, peaks: bool = True
) -> LayerSpeed:
    """Time both ways `repeats` times at a size, in at most `budget` seconds each. peaks: measure memory too."""
    with torch.inference_mode(False), torch.enable_grad():
        theirs = redrawn(copy_for_trial(module), 0)
        ours = copy_for_trial(theirs)
        swap(ours, adapter, adapter.build(ours))
        like = narrowest(theirs)
        args, kwargs = adapter.example(theirs, size, RandomInputs(like))
        inputs = [x.requires_grad_() for x in differentiable_inputs(args, kwargs).values()]

        with their_own_code(like.dtype):
            subjects = [subject("theirs", partial(theirs, *args, **kwargs), [*inputs, *theirs.parameters()])]
        subjects.append(subject("ours", partial(ours, *args, **kwargs), [*inputs, *ours.parameters()]))
        times = measure(subjects, like.device, repeats, budget, peaks)
    for result in times.values():
        if result.failed:
            error = torch.OutOfMemoryError if result.failed == "out of memory" else RuntimeError
            raise error(f"{type(module).__name__}: {result.failed}")
    return ratios(times["theirs"], times["ours"])


def ratios(theirs: Times, ours: Times) -> LayerSpeed:
    """Compute how many times faster ours is than theirs."""
    both = [times.median("training", "backward") or 0.0 for times in (theirs, ours)]
    forward = (theirs.median("forward") or 0.0) / max(ours.median("forward") or 0.0, 1e-9)
    memory = None
    if theirs.peaks.get("both") and "both" in ours.peaks:
        memory = ours.peaks["both"] / theirs.peaks["both"]
    return LayerSpeed(forward, both[0] / max(both[1], 1e-9), memory)


def reason_to_leave(speed: LayerSpeed, plain: bool, trains: bool = True) -> str:
    """Return why a timed layer is left: it is slower here, or of plain torch and no gain. "" if it is not left.

    trains: whether the model is trained. If not, only the forward pass is judged.
    """
    passes = [speed.forward] if speed.both is None or not trains else [speed.forward, speed.both]
    if min(passes) < SLOWER:
        return f"slower here: {speed}"
    better = max(passes) > MIN_SPEEDUP or (speed.memory is not None and speed.memory < MAX_MEMORY_SHARE)
    return f"neither faster nor smaller here: {speed}" if plain and not better else ""
