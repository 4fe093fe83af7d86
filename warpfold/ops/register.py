"""Make an operation from its definition: `@register(...)` is all that a fused operation needs beside its kernels.

    @register(
        shapes="x [*, c], g [*, c], grad [*, c]",
        keeps="x g",
        gradients="x g",
    )
    def gate(x: Tensor, g: Tensor) -> Tensor:
        return x * g.sigmoid()

This registers `warpfold::gate` and `warpfold::gate_backward` with torch and returns an `Op` (ops/dispatch.py), which
calls the first where it can and the definition elsewhere.  `ops/cpu/gate.py` and `ops/triton/gate.py`, named like the
module of the definition, hold functions `gate` and `gate_backward` that compute them, of their operands by name
(`dispatch.Operands`): an operand is declared here and used there, and stands nowhere else.  torch knows the rest from
here: the schema from the definition's type hints, the shapes and strides of the results (fake tensors, torch.compile),
and the gradient.  torch.compile, `opcheck` and selective checkpointing see one opaque operation per call, forward and
backward.  A second derivative is an error: the definition has it.  An operation that changes its operands in place
(`mutates`) returns nothing, and has no gradient.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar, get_type_hints

import torch
from torch import Tensor

from warpfold.ops import dispatch
from warpfold.ops.dispatch import Op, Operands, unsupported_device
from warpfold.ops.shapes import Shapes, Sizes
from warpfold.ops.tensors import empty_like, empty_parameters

P = ParamSpec("P")
R = TypeVar("R")
Registered = Callable[..., Any]  # an operation of torch.ops.warpfold


class Expansion(NamedTuple):
    """How a parameter that torch has no type for becomes several operands of the registered operation."""

    types: Mapping[str, Any]  # of those operands, by name; the first is named like the parameter
    split: Callable[[Any, Tensor], tuple[Any, ...]]  # (argument, first argument of all) -> those operands


@dataclass(frozen=True, kw_only=True)
class register:
    """What an operation needs to be one beside its definition, which this decorates.

    shapes: of all operands of the registered operation, of its results and of `grad`, as ops/shapes.py reads them.
    empty: of the operands, allocates the results; they must have the strides that the kernels return.  None: one
        result that lies as the first operand does.
    mutates: the operands that are changed in place, by an operation that has no results.
    results: the names of the results, of which the caller gets the first; the others are kept for the backward pass.
    keeps: what the backward operation is given beside `grad`: operands and results by their names; `NAME_wanted`:
        whether the gradient of NAME is wanted at all.
    gradients: the operands whose gradients the backward operation returns, at least two; none: there is no gradient.
    empty_gradients: of what the backward operation is given, allocates them, as `empty` does the results.  None: those
        of tensors with leading axes as the tensors lie, those of parameters as sums over all positions.
    residual: the operand to which the rest is added, so that its gradient is `grad` itself.
    same_dtype: operands that must share a dtype.
    kept: whether the operation has one operand more than the definition, the last: `kept`, whether a backward pass may
        follow.  Where it may not, the results but the first are left out, as tensors without elements.
    check: of (name, sizes, operands), raises ValueError for what `shapes` cannot describe.
    expand: a parameter of the definition that is several operands of the registered operation.
    caller_shapes: the shapes that the definition's arguments must have, where `adapter` makes others of them.
    adapter: of the registered operation and the definition's arguments by name, calls it with others.
    unsupported: of the definition's arguments by name, why the fast way does not take them, or None; asked where
        devices, shapes and dtypes are right.
    prefer_definition: of the definition's arguments by name, whether that is faster.
    """

    shapes: str
    empty: Callable[[Operands], Any] | None = None
    mutates: str = ""
    results: str = "out"
    keeps: str = ""
    gradients: str = ""
    empty_gradients: Callable[[Operands], tuple[Tensor, ...]] | None = None
    residual: str = ""
    same_dtype: str = ""
    kept: bool = False
    check: Callable[[str, Sizes, Operands], None] | None = None
    expand: Expansion | None = None
    caller_shapes: str | None = None
    adapter: Callable[..., Tensor] | None = None
    unsupported: Callable[[Any], str | None] | None = None
    prefer_definition: Callable[[Any], bool] | None = None

    def __call__(self, definition: Callable[P, R]) -> Op[P, R]:
        """Register the operation of a definition, and the backward one, and return the `Op`."""
        name, module = definition.__name__, definition.__module__.rpartition(".")[2]
        results, gradients = [] if self.mutates else self.results.split(), self.gradients.split()
        types = {**get_type_hints(definition), **dict.fromkeys((*results, "grad"), Tensor)}
        operands = self._operands(list(inspect.signature(definition).parameters), types)
        first = next(iter(operands))
        if self.kept:
            operands["kept"] = bool
        like_first = (lambda t: None) if self.mutates else (lambda t: empty_like(getattr(t, first)))
        op = self._define(name, module, operands, len(results), self.empty or like_first)
        if gradients:
            back, needs = f"{name}_backward", self._operands(["grad", *self.keeps.split()], types)
            needs = dict(sorted(needs.items(), key=lambda need: _kind(*need)))
            self._define(back, module, needs, len(gradients), self.empty_gradients or self._empty_gradients)
            save, differentiate = self._autograd(_registered(back), list(operands), needs)
            op.register_autograd(differentiate, setup_context=save)
        return self._choosing(definition, _registered(name))

    def _operands(self, names: Sequence[str], types: Mapping[str, Any]) -> dict[str, Any]:
        """Return the operands of a registered operation, name and type."""
        expanded = {} if self.expand is None else self.expand.types
        operands: dict[str, Any] = {}
        for name in names:
            operands.update(expanded if name in expanded else {name: bool if name.endswith("_wanted") else types[name]})
        return operands

    def _empty_gradients(self, t: Operands) -> tuple[Tensor, ...]:
        shapes = {operand.name: operand for operand in Shapes(self.shapes, self.gradients.split()).operands}
        leading = [name for name in self.gradients.split() if shapes[name].leading]
        parameters = [getattr(t, name) for name in self.gradients.split() if name not in leading]
        return *(empty_like(getattr(t, name)) for name in leading), *(
            empty_parameters(*parameters) if parameters else ()
        )

    def _define(
        self, name: str, module: str, operands: Mapping[str, Any], returns: int, empty: Callable[[Operands], Any]
    ) -> torch.library.CustomOpDef:
        """Register `warpfold::name` with torch: its schema, its checks, its implementations and its fake function."""
        dispatch.modules[name] = module, tuple(operands)
        qualified, shapes, check = f"warpfold::{name}", Shapes(self.shapes, list(operands)), self.check

        def run(*args: Any) -> Any:
            sizes = shapes.require(qualified, args)
            if check is not None:
                check(qualified, sizes, Operands(**dict(zip(operands, args))))
            return dispatch.implementation(name, args[0])(*args)

        # torch reads the schema from a function's signature: give `run` the one that its operands make.
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(operand, kind, annotation=hint) for operand, hint in operands.items()],
            return_annotation=(None, Tensor)[returns] if returns < 2 else tuple[(Tensor,) * returns],  # type: ignore[misc]
        )
        op = torch.library.custom_op(qualified, run, mutates_args=self.mutates.split())
        op.register_fake(lambda *args: empty(Operands(**dict(zip(operands, args)))))
        return op

    def _autograd(
        self, backward: Registered, operands: list[str], needs: Mapping[str, Any]
    ) -> tuple[Callable[..., None], Callable[..., tuple[Tensor | None, ...]]]:
        """Return what torch asks for: the function that keeps what the backward pass needs, and the backward pass."""
        known, gradients = [*operands, *self.results.split()], self.gradients.split()
        tensors = [name for name, hint in needs.items() if hint in (Tensor, Tensor | None)]
        saved = [known.index(name) for name in tensors if name in known]
        constants = [known.index(name) for name in needs if name in known and name not in tensors]
        flags = [operands.index(name.removesuffix("_wanted")) for name in needs if name.endswith("_wanted")]
        # Where the gradient of each operand is among those returned; `grad` itself is put behind them.
        places = {**{name: i for i, name in enumerate(gradients)}, self.residual: len(gradients)}
        sources = [places.get(name) for name in operands]

        def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            values = (*inputs, *(output if isinstance(output, tuple) else (output,)))
            ctx.save_for_backward(*(values[i] for i in saved))
            ctx.constants = [values[i] for i in constants]
            ctx.set_materialize_grads(False)

        def differentiate(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
            if grad is None:
                return (None,) * len(sources)
            wanted = ctx.needs_input_grad
            found = backward(grad, *ctx.saved_tensors, *ctx.constants, *(wanted[i] for i in flags))
            found = *found, grad
            return tuple([found[at] if at is not None and wanted[i] else None for i, at in enumerate(sources)])

        return save, differentiate

    def _choosing(self, definition: Callable[P, R], registered: Registered) -> Op[P, R]:
        """Return the `Op` of a definition, whose fast way is the registered operation."""
        parameters = list(inspect.signature(definition).parameters)
        shapes = Shapes(self.caller_shapes or self.shapes, parameters)
        adapter, unsupported, expand, kept = self.adapter, self.unsupported, self.expand, self.kept
        several = " " in self.results
        at = 0 if expand is None else parameters.index(next(iter(expand.types)))
        same = self.same_dtype.split()
        first, *others = [parameters.index(name) for name in same] or [0]
        all_have_shapes = shapes.positions == list(range(len(parameters)))
        differ = f"{', '.join(same[:-1])} and {''.join(same[-1:])} differ in dtype"

        def call(*args: Any) -> Any:
            if expand is not None:
                args = *args[:at], *expand.split(args[at], args[0]), *args[at + 1 :]
            out = registered(*args, torch.is_grad_enabled()) if kept else registered(*args)
            return out[0] if several else out

        def fast(given: Any) -> Any:
            return call(*given) if adapter is None else adapter(call, given)

        def why_not(given: Any) -> str | None:
            """Return why the fast way does not take these arguments, or None: first what all operations share."""
            shaped = given if all_have_shapes else [given[i] for i in shapes.positions]
            reason = unsupported_device(shaped) or shapes.unsupported_reason(shaped)
            if reason is not None:
                return reason
            for i in others:
                if given[i].dtype != given[first].dtype:
                    return differ
            return None if unsupported is None else unsupported(given)

        return Op(definition, fast, why_not, self.prefer_definition)


def _kind(name: str, hint: Any) -> int:
    """Return where an operand of a backward operation stands: `grad`, tensors, numbers, what is wanted."""
    if name == "grad":
        return 0
    return 1 if hint in (Tensor, Tensor | None) else 3 if name.endswith("_wanted") else 2


def _registered(name: str) -> Registered:
    """Return the overload of torch.ops.warpfold, which is called faster than the name that stands for all overloads."""
    overload: Registered = getattr(torch.ops.warpfold, name).default
    return overload
