"""Which of torch's optimizers work number by number, and what they keep: only those can run on flat buffers."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, optim

# Those of torch; any other class is tried on a few numbers.
ELEMENTWISE = (
    *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD),
    *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
)
# Where torch has one kernel for a whole step, which it takes on request only.
FUSED: dict[type[optim.Optimizer], tuple[str, ...]] = {
    optim.Adam: ("cpu", "cuda"),
    optim.AdamW: ("cpu", "cuda"),
    optim.SGD: ("cpu", "cuda"),
    optim.Adagrad: ("cpu",),
}
REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def not_elementwise(optimizer: type[optim.Optimizer], options: Mapping[str, Any]) -> str | None:
    """Return why an optimizer cannot run on flat buffers, and what to do, or None.

    A class that torch does not have takes three steps with two small parameters, and with the same numbers in one.
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, optim.Optimizer)):
        return (
            f"{optimizer!r} is not a class of torch.optim; pass the class itself (torch.optim.Adam), then its options"
        )
    if options.get("differentiable"):
        return "differentiable=True needs a graph through the update; use torch's own class"
    if optimizer in ELEMENTWISE:
        return None
    cure = "use the class itself for the parameters that need it, and Flat for the others"
    numbers = torch.linspace(-1, 1, 17).cos()
    apart = [numbers[:12].reshape(3, 4).clone(), numbers[12:].clone()]
    joined = [numbers.clone()]
    try:
        _walk(optimizer, apart, options, {}, 3)
        _walk(optimizer, joined, options, {}, 3)
    except REFUSALS as error:
        return f"{optimizer.__name__} does not run on flat tensors ({error}); {cure}"
    if not torch.allclose(torch.cat([p.flatten() for p in apart]), joined[0], rtol=1e-5, atol=1e-7):
        return f"{optimizer.__name__} changes a number by what other numbers of its parameter are; {cure}"
    return None


def kept_by(
    optimizer: type[optim.Optimizer], options: Mapping[str, Any], group: Mapping[str, Any], like: Tensor
) -> tuple[dict[str, Any], set[str]]:
    """Return what an optimizer keeps of a parameter after a step, and the names of what it keeps for each number.

    group: the options of the parameter's group.  like: a tensor of its dtype and device.
    """
    p = like.new_zeros(16)
    state = _walk(optimizer, [p], options, group, steps=1).state[p]
    return dict(state), {key for key, value in state.items() if isinstance(value, Tensor) and value.shape == p.shape}


def _walk(
    optimizer: type[optim.Optimizer],
    parameters: list[Tensor],
    options: Mapping[str, Any],
    group: Mapping[str, Any],
    steps: int,
) -> optim.Optimizer:
    """Take steps; the gradients are a function of the parameters' first numbers and of the step."""
    inner = optimizer([{**copy.deepcopy(dict(group)), "params": parameters}], **copy.deepcopy(dict(options)))
    first = [p.clone() for p in parameters]
    for step in range(1, steps + 1):
        for p, x in zip(parameters, first):
            p.grad = (7 * step * x).sin()
        inner.step()
    return inner
