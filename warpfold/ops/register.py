"""Make an operation from its definition: `@register(...)` is all that a fused operation needs beside its kernels.

    def _gate_backward(grad: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return empty_like(x), empty_like(g)

    @register(
        shapes="x [*, c], g [*, c], grad [*, c]",
        empty=lambda x, g: empty_like(x),
        backward=_gate_backward,
        gradients="x g",
    )
    def gate(x: Tensor, g: Tensor) -> Tensor:
        return x * g.sigmoid()

This registers `warpfold::gate` and `warpfold::gate_backward` with torch and returns an `Op` (ops/dispatch.py), which
calls the first where it can and the definition elsewhere.  `ops/cpu/gate.py` and `ops/triton/gate.py`, named like the
module of the definition, hold functions `gate` and `gate_backward` that compute them.  torch knows the rest from here:
the schema from the definition's type hints, the shapes and strides of the results (fake tensors, torch.compile), and
the gradient.  torch.compile, `opcheck` and selective checkpointing see one opaque operation per call, forward and
backward.  A second derivative is an error: the definition has it.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, get_type_hints

import torch
from torch import Tensor

from warpfold.ops import dispatch
from warpfold.ops.dispatch import Op, unsupported_device
from warpfold.ops.shapes import Shapes, Sizes

P = ParamSpec("P")
Check = Callable[[str, Sizes, Mapping[str, Any]], None]  # of the operation's name, sizes and operands
_TENSORS = (Tensor, Tensor | None)


class Expansion(NamedTuple):
    """How a parameter that torch has no type for becomes several operands of the registered operation."""

    types: Mapping[str, Any]  # of those operands, by name
    split: Callable[[Any, Tensor], tuple[Any, ...]]  # (argument, first argument) -> those operands


def register(
    *,
    shapes: str,
    empty: Callable[..., Tensor | tuple[Tensor, ...]],
    results: str = "out",
    backward: Callable[..., tuple[Tensor, ...]] | None = None,
    gradients: str = "",
    residual: str = "",
    same_dtype: str = "",
    check: Check | None = None,
    expand: Mapping[str, Expansion] | None = None,
    caller_shapes: str | None = None,
    adapter: Callable[..., Tensor] | None = None,
    unsupported_reason: Callable[..., str | None] | None = None,
    prefer_definition: Callable[..., bool] | None = None,
) -> Callable[[Callable[P, Tensor]], Op[P, Tensor]]:
    """Return a decorator that makes an `Op` of a definition.

    shapes: of all operands of the registered operation, of its results and of `grad`, as ops/shapes.py reads them.
    empty: of the definition's arguments, allocates the results; they must have the strides that the kernels return.
    results: the names of the results, of which the caller gets the first; the others are kept for the backward pass.
    backward: allocates the gradients that the backward operation returns.  Its signature decides what that is given:
        `grad`, then operands and results by their names, tensors first; then `NAME_wanted`, whether the gradient of
        NAME is wanted at all.
    gradients: the operands whose gradients `backward` returns, in order.
    residual: the operand to which the rest is added, so that its gradient is `grad` itself.
    same_dtype: operands that must share a dtype.
    check: raises ValueError for operands that `shapes` cannot describe.
    expand: parameters of the definition that are several operands of the registered operation.
    caller_shapes: the shapes that the definition's arguments must have, where `adapter` makes others of them.
    adapter: calls the registered operation, its first argument, with the definition's arguments, which are the rest.
    unsupported_reason: of the definition's arguments, why the fast way does not take them, or None; asked where
        devices, shapes and dtypes are right.
    prefer_definition: of the definition's arguments, whether the definition is faster.
    """

    def decorate(definition: Callable[P, Tensor]) -> Op[P, Tensor]:
        name, module = definition.__name__, definition.__module__.rpartition(".")[2]
        parameters, complete = _parameters(definition)
        outputs = results.split()

        operands = _operands(definition, expand or {})
        run = _torch_op(name, module, operands, len(outputs), shapes, check, expand or {}, empty)
        if backward is not None:
            needs = _operands(backward, expand or {})
            back = _torch_op(
                f"{name}_backward", module, needs, len(gradients.split()), shapes, check, expand or {}, backward
            )
            setup, differentiate = _autograd(back, list(operands), outputs, needs, gradients.split(), residual)
            run.register_autograd(differentiate, setup_context=setup)

        call = _caller(getattr(torch.ops.warpfold, name).default, len(outputs), parameters, expand or {})
        wanted = Shapes(caller_shapes or shapes, parameters)
        alike = [parameters.index(operand) for operand in same_dtype.split()]
        differ = " and ".join(", ".join(same_dtype.split()).rsplit(", ", 1)) + " differ in dtype"

        def fast(*args: Any, **kwargs: Any) -> Tensor:
            args = complete(args, kwargs)
            return call(*args) if adapter is None else adapter(call, *args)

        def reason(*args: Any, **kwargs: Any) -> str | None:
            args = complete(args, kwargs)
            given = [args[i] for i in wanted.positions]
            found = unsupported_device(given) or wanted.unsupported_reason(given)
            if found is not None:
                return found
            for i in alike:
                if args[i].dtype != args[alike[0]].dtype:
                    return differ
            return None if unsupported_reason is None else unsupported_reason(*args)

        def prefer(*args: Any, **kwargs: Any) -> bool:
            assert prefer_definition is not None
            return prefer_definition(*(complete(args, kwargs) if kwargs else args))  # sizes are never left out

        return Op(definition, fast, reason, None if prefer_definition is None else prefer)

    return decorate


def _parameters(definition: Callable[..., Any]) -> tuple[list[str], Callable[..., tuple[Any, ...]]]:
    """Return the names of a definition's parameters, and a function that makes (args, kwargs) one value for each."""
    signature = inspect.signature(definition)
    names = list(signature.parameters)
    by_name = {p.name: p.default for p in signature.parameters.values() if p.default is not p.empty}
    defaults, least = tuple(by_name.values()), len(names) - len(by_name)

    def complete(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if not kwargs and least <= len(args) <= len(names):  # the quickest way, as nearly always
            return args + defaults[len(args) - least :]
        rest, values = names[len(args) :], {**by_name, **kwargs}
        if all(name in values for name in rest) and all(name in rest for name in kwargs):
            return (*args, *(values[name] for name in rest))
        return signature.bind(*args, **kwargs).args  # raises the TypeError that a call of the definition would

    return names, complete


def _operands(function: Callable[..., Any], expand: Mapping[str, Expansion]) -> dict[str, Any]:
    """Return the operands of a registered operation, name and type, from a function's type hints."""
    operands: dict[str, Any] = {}
    hints = get_type_hints(function)
    for name in inspect.signature(function).parameters:
        operands.update(expand[name].types if name in expand else {name: hints[name]})
    return operands


def _torch_op(
    name: str,
    module: str,
    operands: Mapping[str, Any],
    returns: int,
    shapes: str,
    check: Check | None,
    expand: Mapping[str, Expansion],
    empty: Callable[..., Any],
) -> torch.library.CustomOpDef:
    """Register `warpfold::name` with torch: its schema, its checks, its implementations and its fake function."""
    dispatch.modules[name] = module
    qualified, names, required = f"warpfold::{name}", list(operands), Shapes(shapes, list(operands))

    def run(*args: Any) -> Any:
        sizes = required.require(qualified, args)
        if check is not None:
            check(qualified, sizes, dict(zip(names, args)))
        return dispatch.implementation(name, args[0])(*args)

    # torch reads the schema from the function's signature, so `run` gets the one that its operands make.
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(operand, kind, annotation=hint) for operand, hint in operands.items()],
        return_annotation=Tensor if returns == 1 else tuple[(Tensor,) * returns],  # type: ignore[misc]
    )
    op = torch.library.custom_op(qualified, run, mutates_args=())
    folded = {extra for expansion in expand.values() for extra in list(expansion.types)[1:]}

    @op.register_fake
    def _(*args: Any) -> Any:
        # `empty` takes the parameters as they were written: one for each that was expanded.
        return empty(*(arg for operand, arg in zip(names, args) if operand not in folded))

    return op


def _caller(
    op: torch._ops.OpOverload, outputs: int, parameters: list[str], expand: Mapping[str, Expansion]
) -> Callable[..., Tensor]:
    """Return a function of the definition's arguments that calls the registered operation for its first result."""
    if not expand:
        return op if outputs == 1 else lambda *args: op(*args)[0]
    ((name, expansion),) = expand.items()
    at = parameters.index(name)
    return lambda *args: op(*args[:at], *expansion.split(args[at], args[0]), *args[at + 1 :])


def _autograd(
    back: torch.library.CustomOpDef,
    operands: list[str],
    results: list[str],
    needs: Mapping[str, Any],
    gradients: list[str],
    residual: str,
) -> tuple[Callable[..., None], Callable[..., tuple[Tensor | None, ...]]]:
    """Return what torch asks for: the function that keeps what the backward pass needs, and the backward pass."""
    known = [*operands, *results]
    kept = {name: hint for name, hint in needs.items() if name in known}
    saved = [known.index(name) for name, hint in kept.items() if hint in _TENSORS]
    constants = [known.index(name) for name, hint in kept.items() if hint not in _TENSORS]
    flags = [operands.index(name.removesuffix("_wanted")) for name in needs if name.endswith("_wanted")]
    # Where the gradient of each operand is among those returned; the incoming one is put behind them.
    sources = [-1 if name == residual else gradients.index(name) if name in gradients else None for name in operands]
    run = getattr(torch.ops.warpfold, back._name).default

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        values = (*inputs, *(output if isinstance(output, tuple) else (output,)))
        ctx.save_for_backward(*(values[i] for i in saved))
        ctx.constants = [values[i] for i in constants]
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * len(sources)
        wanted = ctx.needs_input_grad
        found = run(grad, *ctx.saved_tensors, *ctx.constants, *(wanted[i] for i in flags))
        found = (found, grad) if isinstance(found, Tensor) else (*found, grad)
        return tuple(found[source] if source is not None and wanted[i] else None for i, source in enumerate(sources))

    return setup, differentiate
