"""Adapters, by which layers of other packages compute with our operations: one `Adapter` for each class of theirs.

An adapter names the classes that it serves and the signature of their `forward`. `build` makes one of our layers from
the submodules of theirs, `forward` computes with it what their `forward` computes, and `example` draws inputs for a
comparison. `kinds.py` has most of this for each kind of trunk layer, so an adapter is a table of names and exceptions.

Nothing is imported from other packages, since their classes are recognised by name. At each call our layer reads the
parameters through the modules that hold them, so parameters may be moved, cast, frozen or replaced.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from warpfold.errors import UserError
from warpfold.model.axial import AxialUpdate, Executable, PlainExecution
from warpfold.model.layers import DrawsNoise
from warpfold.ops.dispatch import kernels, report_refusal, small_on_cpu
from warpfold.ops.linear import EPS, layer_norm

L = TypeVar("L", bound=Executable)
# Attributes of a swapped module: our layer, which is not a submodule, and the submodules from which it was built.
LAYER = "_warpfold_layer"
PARTS = "_warpfold_parts"


class NotServed(UserError):
    """The reason why an adapter does not serve a module, or the arguments of a call."""


class RandomInputs:
    """Draw random tensors with the dtype and device of `like`; the same seed gives the same tensors."""

    def __init__(self, like: Tensor, seed: int = 0) -> None:
        self.like, self.generator = like, torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        """Draw normal numbers."""
        return torch.randn(shape, generator=self.generator).to(self.like)

    def mask(self, *shape: int) -> Tensor:
        """Draw zeros and ones, mostly ones. The first of each row is one."""
        mask = (torch.rand(shape, generator=self.generator) < 0.8).to(self.like)
        mask[..., 0] = 1
        return mask


class Adapter:
    """Base of adapters, which let modules of some classes compute with our operations. An adapter has no state."""

    # The classes, as "package.module:Class".
    serves: ClassVar[tuple[str, ...]] = ()
    # The signature of their forward, or of several versions, as `inspect` prints it without annotations. "": any.
    signature: ClassVar[str | tuple[str, ...]] = ""
    # The name of our operation, for reports.
    operation: ClassVar[str] = ""
    # On a CPU, their own code is used for a first argument with fewer numbers, where it is as fast.
    least: ClassVar[int] = 0
    # Attributes to set for a comparison, to disable kernels or roundings that exist in 16 bits only.
    compared_with: ClassVar[Mapping[str, Any]] = {}
    # Their own code multiplies in fp32, and expects that all parameters have one dtype.
    computes_in_fp32: ClassVar[bool] = False
    # A layer of torch itself, which is swapped only if it is asked for, or measured to be a gain.
    plain: ClassVar[bool] = False

    def knows(self, module: nn.Module) -> bool:
        """Whether a module of a served class is such a layer. Override this if the class alone does not decide."""
        return True

    def build(self, module: nn.Module) -> Executable:
        """Build our layer from the module's submodules. Raises NotServed for a module that differs from ours."""
        raise NotImplementedError

    def forward(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the module's own forward with our layer. Arguments are passed by name where they have one.

        Raises NotServed for arguments that our layer does not support.
        """
        raise NotImplementedError

    def example(self, module: nn.Module, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Draw arguments of the module's forward for about n residues, for a comparison."""
        raise NotImplementedError

    def compared(self, output: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the entries of an output on which both must agree, without entries that are undefined by a mask."""
        return output

    def cast(self, module: nn.Module, dtype: torch.dtype) -> nn.Module:
        """Cast a module's parameters in place. Override this if the package keeps some in fp32."""
        return module if self.computes_in_fp32 else module.to(dtype)

    @classmethod
    def update(
        cls, layer: AxialUpdate, x: Tensor, mask: Tensor, other: Tensor | None = None, rows: int | None = None
    ) -> Tensor:
        """Compute the residual update of x with the layer's execution, under autocast in its dtype.

        rows: the number of rows in a slice, if the caller chose one.
        """
        x, other = cast_by_autocast(x), None if other is None else cast_by_autocast(other)
        with layer.computing():
            return layer.execution.layer(layer, x, mask, other, False, rows)

    @classmethod
    def add_update(cls, layer: AxialUpdate, x: Tensor, mask: Tensor) -> Tensor:
        """Compute x plus its update, in one operation unless autocast gives the update another dtype than x."""
        if cast_by_autocast(x).dtype != x.dtype:
            return x + cls.update(layer, x, mask)
        with layer.computing():
            return layer.execution.layer(layer, x, mask)


def cast_by_autocast(x: Tensor) -> Tensor:
    """Cast x to the dtype of products under autocast, if it is enabled."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) and x.is_floating_point() else x


class ForeignLinear:
    """A linear layer of another model with the interface that our layers expect, or some of its outputs.

    outputs: the range of outputs. None: all.
    """

    packed = None

    def __init__(self, module: nn.Module, outputs: slice | None = None) -> None:
        check_part(module)
        self.module, self.outputs = module, outputs

    @property
    def weight(self) -> Tensor:
        """The weight [o, c]."""
        weight = _checked_weight(self.module)
        return weight if self.outputs is None else weight[self.outputs]

    @property
    def bias(self) -> Tensor | None:
        """The bias [o], if there is one."""
        bias: Tensor | None = getattr(self.module, "bias", None)
        return bias if bias is None or self.outputs is None else bias[self.outputs]

    def __call__(self, x: Tensor) -> Tensor:
        bias = self.bias
        return nn.functional.linear(x, self.weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class StackedLinear:
    """Several projections of one tensor as one, with concatenated outputs. Either all have a bias or none has."""

    packed = None

    def __init__(self, *projections: ForeignLinear) -> None:
        self.projections = projections

    @property
    def weight(self) -> Tensor:
        """The weights [o, c]."""
        return torch.cat([projection.weight for projection in self.projections])

    @property
    def bias(self) -> Tensor | None:
        """The biases [o], if there are any."""
        biases = [projection.bias for projection in self.projections]
        existing = [bias for bias in biases if bias is not None]
        if len(existing) not in (0, len(biases)):
            raise NotServed("projections with and without a bias are one")
        return torch.cat(existing) if existing else None


class ForeignNorm:
    """A layer normalisation of another model with the interface that our layers expect."""

    def __init__(self, module: nn.Module) -> None:
        check_part(module)
        self.module = module

    @property
    def weight(self) -> Tensor:
        """The weight [c]. Raises NotServed for a norm without one."""
        return _checked_weight(self.module)

    @property
    def bias(self) -> Tensor | None:
        """The bias [c], if there is one."""
        bias: Tensor | None = getattr(self.module, "bias", None)
        return bias

    @property
    def eps(self) -> float:
        """The number that is added to the variance."""
        return float(getattr(self.module, "eps", EPS))

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


def check_part(module: nn.Module) -> None:
    """Raise NotServed for a submodule that computes more than its parameters imply."""
    name = type(module).__name__
    if any(True for _ in module.children()):
        raise NotServed(f"its {name} has modules inside, such as an adapter of low rank")
    if "forward" in vars(module):
        raise NotServed(f"the forward of its {name} was replaced")
    if getattr(module, "precision", None) is not None:
        raise NotServed(f"a {name} with a precision of its own")
    _checked_weight(module)


def _checked_weight(module: nn.Module) -> Tensor:
    """Return the weight of a submodule. Raises NotServed if it is missing, quantised or sharded."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        raise NotServed(f"its {type(module).__name__} has no weight")
    # Under compilation the weight was checked before.
    if not torch.compiler.is_compiling():
        kind = type(weight)
        if not (weight.is_floating_point() and kind.__module__.startswith("torch.") and kind.__name__ != "DTensor"):
            raise NotServed(f"the weight of its {type(module).__name__} is a {kind.__name__} of {weight.dtype}")
    return weight


@dataclass(frozen=True)
class ForeignAttention:
    """The gated attention of another model with the interface of `GatedAttention`."""

    heads: int
    q: ForeignLinear
    k: ForeignLinear
    v: ForeignLinear
    gate: ForeignLinear
    out: ForeignLinear

    @property
    def projections(self) -> tuple[ForeignLinear, ...]:
        """The projections of the normalised input, in the order of `joined`."""
        return self.gate, self.q, self.k, self.v


def assemble(kind: type[L], **parts: Any) -> L:
    """Assemble a layer of ours from submodules of another model, without creating or copying parameters."""
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    if isinstance(layer, DrawsNoise):
        DrawsNoise.__init__(layer)
    # The other model applies dropout. This comes before the submodules are set, since it must not change them.
    layer.eval()
    for name, part in parts.items():
        setattr(layer, name, part)
    return layer


def qualified_name(kind: type) -> str:
    """Return the name of a class, "package.module:Class"."""
    return f"{kind.__module__}:{kind.__qualname__}"


def find_adapter(module: nn.Module, known: Mapping[str, Adapter]) -> tuple[Adapter | None, str | None]:
    """Return the adapter of a module, and the reason why the module cannot be swapped; None if there is none."""
    kind: Any = type(module)
    served = next((base for base in kind.__mro__ if qualified_name(base) in known), None)
    if served is None or not known[qualified_name(served)].knows(module):
        return None, None
    adapter = known[qualified_name(served)]
    if adapter.signature and kind.forward is not served.forward:
        # Many classes derive from torch's and compute something else. These have no adapter.
        return (None, None) if adapter.plain else (adapter, f"{kind.__name__} has a forward of its own")
    signature = bare_signature(kind.forward)
    expected = (adapter.signature,) if isinstance(adapter.signature, str) else adapter.signature
    if adapter.signature and signature not in expected:
        return adapter, f"its forward is {signature}, and {' or '.join(expected)} is known"
    if "forward" in vars(module):
        return adapter, "its forward was replaced"
    return adapter, None


_swapped: dict[tuple[type[nn.Module], type[Adapter]], type[nn.Module]] = {}


def swapped_class(kind: type[nn.Module], adapter: type[Adapter]) -> type[nn.Module]:
    """Create a subclass of a class whose forward computes with an adapter."""
    if (kind, adapter) in _swapped:
        return _swapped[kind, adapter]
    instance, theirs = adapter(), kind.forward
    names = positional_names(theirs)

    @wraps(theirs)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Compute their forward with our operations, or with their code if the adapter does not serve the call."""
        if instance.least and small_on_cpu(next(iter((*args, *kwargs.values())), None), instance.least):
            return theirs(self, *args, **kwargs)
        try:
            named = {**dict(zip(names, args)), **kwargs}
            return instance.forward(_current_layer(self, instance), *args[len(names) :], **named)
        except NotServed as refusal:
            _report(self, f"{kind.__name__}: {refusal}")
        return theirs(self, *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        return _empty_swapped, (kind, adapter), vars(self)

    body = {"forward": forward, "__reduce_ex__": reduce, "__module__": kind.__module__, "original": (kind, adapter)}
    body |= {"__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    subclass = _swapped[kind, adapter] = type(kind.__name__, (kind,), body)
    return subclass


def _empty_swapped(kind: type[nn.Module], adapter: type[Adapter]) -> nn.Module:
    """Create a swapped module without attributes, which copying and unpickling fill."""
    swapped = swapped_class(kind, adapter)
    return swapped.__new__(swapped)


def _current_layer(module: nn.Module, adapter: Adapter) -> Executable:
    """Return the layer of a swapped module, and rebuild it if submodules were replaced.

    Raises NotServed if a submodule has a hook, or is no longer supported. The module's own forward is then used.
    """
    layer: Executable = vars(module)[LAYER]
    # The compiler has guards for replaced submodules.
    if torch.compiler.is_compiling():
        return layer
    parts = _parts(module)
    if len(parts) != len(vars(module)[PARTS]) or any(a is not b for a, b in zip(parts, vars(module)[PARTS])):
        execution, layer = layer.execution, adapter.build(module)
        _set_layer(module, layer, execution)
    for part in parts:
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            raise NotServed(f"its {type(part).__name__} has a hook, which would not be called")
    return layer


def _parts(module: nn.Module) -> tuple[nn.Module, ...]:
    return tuple(part for part in module.modules() if part is not module)


def _set_layer(module: nn.Module, layer: Executable, execution: PlainExecution | None) -> None:
    """Store a layer in a module, but not as a submodule, since it has no parameters of its own."""
    if execution is not None:
        layer.execution = execution
    object.__setattr__(module, LAYER, layer)
    object.__setattr__(module, PARTS, _parts(module))


def _report(module: nn.Module, refusal: str) -> None:
    """Count a call that a module's own forward computes. Raises UserError if its kernels are "strict"."""
    with vars(module)[LAYER].computing():
        if kernels() == "strict":
            raise UserError(f"{refusal}; without strict its own code would compute it")
        report_refusal(refusal)


def is_swapped(module: nn.Module) -> bool:
    """Whether a module computes with our operations."""
    return LAYER in vars(module)


def swap(module: nn.Module, adapter: Adapter, layer: Executable, execution: PlainExecution | None = None) -> None:
    """Let a module compute with our layer from now on. execution: None computes everything at once."""
    _set_layer(module, layer, execution)
    module.__class__ = swapped_class(type(module), type(adapter))


def was_wrapped(module: nn.Module) -> bool:
    """Whether the class of a swapped module was changed since, for example by sharding."""
    return type(module) is not swapped_class(*type(module).original)  # type: ignore[attr-defined]


def swap_back(module: nn.Module) -> None:
    """Restore the own class of a swapped module whose class was not changed since."""
    module.__class__ = type(module).original[0]  # type: ignore[attr-defined]
    del vars(module)[LAYER], vars(module)[PARTS]


# Signatures of functions of other packages.


def bare_signature(function: Callable[..., Any]) -> str:
    """Return the signature of a function without annotations."""
    signature = _signature(function)
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function, or for a wrapper (*args, **kwargs) that of the one function it wraps."""
    signature = inspect.signature(function)
    anything = [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
    if [p.kind for p in signature.parameters.values()] == anything:
        closure = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        functions = [x for x in closure if inspect.isfunction(x)]
        if len(functions) == 1:
            return _signature(functions[0])
    return signature


def positional_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a method's positional parameters without self."""
    parameters = _signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)[1:]
