"""How layers that others wrote compute by our operations: an `Adapter` for each class.

An adapter names the classes that it serves and the signature of their `forward`, makes one of our layers of a
module's own parts (`build`), computes by it what their `forward` computes (`forward`), and says what to compare both
ways with (`example`).  For the layers of the trunk most of this is written already, kind by kind (`kinds.py`): there
an adapter is a table of names, and what differs.

Nothing is imported from a package: its classes are known by name.  Our layer reads the module's parameters through the
modules that hold them, each time it computes, so a parameter may be moved, cast, frozen or replaced.
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
LAYER = "_warpfold_layer"  # where a swapped module keeps our layer: an attribute, and no submodule
PARTS = "_warpfold_parts"  # and the modules inside it, of which the layer is made


class NotServed(UserError):
    """A module that an adapter does not serve, or arguments of one call: the message says why."""


class RandomInputs:
    """Random tensors for a layer's example, of one dtype and device; the same for the same seed."""

    def __init__(self, like: Tensor, seed: int = 0) -> None:
        self.like, self.generator = like, torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        """Return normal numbers."""
        return torch.randn(shape, generator=self.generator).to(self.like)

    def mask(self, *shape: int) -> Tensor:
        """Return zeros and ones, mostly ones; the first of each row is one."""
        mask = (torch.rand(shape, generator=self.generator) < 0.8).to(self.like)
        mask[..., 0] = 1
        return mask


class Adapter:
    """How modules of some classes compute by our operations.  An adapter has no state."""

    serves: ClassVar[tuple[str, ...]] = ()  # "package.module:Class"
    # Of their forward, as `inspect` prints it without annotations; of several versions; nothing: any.
    signature: ClassVar[str | tuple[str, ...]] = ""
    operation: ClassVar[str] = ""  # what computes, for people
    least: ClassVar[int] = 0  # numbers of the first argument below which their own code is as fast, on a CPU
    # Attributes of the copies that are compared: switches that ask for kernels or roundings of 16 bits alone.
    compared_with: ClassVar[Mapping[str, Any]] = {}
    in_fp32: ClassVar[bool] = False  # their own code multiplies in fp32, and wants parameters alike for what follows
    plain: ClassVar[bool] = False  # a layer of torch's own: swapped where it is asked for, or measured to be a gain

    def knows(self, module: nn.Module) -> bool:
        """Return whether a module of a class that it serves is such a layer at all: overridden where its parts say."""
        return True

    def build(self, module: nn.Module) -> Executable:
        """Return our layer, made of the module's parts.  Errors: NotServed for a module that differs."""
        raise NotImplementedError

    def forward(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute what the module's own forward does, of the same arguments, by their names.

        Errors: NotServed for some of them.
        """
        raise NotImplementedError

    def example(self, module: nn.Module, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of the module's forward for about n residues, to compare both ways."""
        raise NotImplementedError

    def compared(self, output: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the part of an output on which theirs and ours must agree: less where masked entries are undefined."""
        return output

    def cast(self, module: nn.Module, dtype: torch.dtype) -> nn.Module:
        """Cast a module's parameters in place; overridden where a package leaves some in fp32."""
        return module if self.in_fp32 else module.to(dtype)

    @classmethod
    def update(
        cls, layer: AxialUpdate, x: Tensor, mask: Tensor, other: Tensor | None = None, rows: int | None = None
    ) -> Tensor:
        """Return the residual update of x, as the layer's execution computes it.

        In the dtype of autocast where that is on.  rows: of a slice, where the caller has chosen; None: as it fits.
        """
        x, other = cast_by_autocast(x), None if other is None else cast_by_autocast(other)
        with layer.computing():
            return layer.execution.layer(layer, x, mask, other, False, rows)

    @classmethod
    def renew(cls, layer: AxialUpdate, x: Tensor, mask: Tensor) -> Tensor:
        """Return x with its update: one operation, unless autocast keeps x in another dtype than the update."""
        if cast_by_autocast(x).dtype != x.dtype:
            return x + cls.update(layer, x, mask)
        with layer.computing():
            return layer.execution.layer(layer, x, mask)


def cast_by_autocast(x: Tensor) -> Tensor:
    """Return x in the dtype that torch's autocast gives to products, where it is on."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) and x.is_floating_point() else x


class LinearOf:
    """The projection of a linear layer that is another model's, as our layers want one; or some of its outputs.

    outputs: which; None: all.
    """

    packed = None

    def __init__(self, module: nn.Module, outputs: slice | None = None) -> None:
        check_part(module)
        self.module, self.outputs = module, outputs

    @property
    def weight(self) -> Tensor:
        """The weight [o, c]."""
        weight = _weight_of(self.module)
        return weight if self.outputs is None else weight[self.outputs]

    @property
    def bias(self) -> Tensor | None:
        """The bias [o], if there is one."""
        bias: Tensor | None = getattr(self.module, "bias", None)
        return bias if bias is None or self.outputs is None else bias[self.outputs]

    def __call__(self, x: Tensor) -> Tensor:
        bias = self.bias
        return nn.functional.linear(x, self.weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class StackedOf:
    """Projections of one tensor as one, their outputs one below the other.  All of them have a bias, or none."""

    packed = None

    def __init__(self, *projections: LinearOf) -> None:
        self.projections = projections

    @property
    def weight(self) -> Tensor:
        """The weights [o, c]."""
        return torch.cat([projection.weight for projection in self.projections])

    @property
    def bias(self) -> Tensor | None:
        """The biases [o], if there are any."""
        biases = [projection.bias for projection in self.projections]
        given = [bias for bias in biases if bias is not None]
        if len(given) not in (0, len(biases)):
            raise NotServed("projections with and without a bias are one")
        return torch.cat(given) if given else None


class NormOf:
    """The layer normalisation of another model's, as our layers want one."""

    def __init__(self, module: nn.Module) -> None:
        check_part(module)
        self.module = module

    @property
    def weight(self) -> Tensor:
        """The weight [c].  Errors: NotServed for a norm that has none."""
        return _weight_of(self.module)

    @property
    def bias(self) -> Tensor | None:
        """The bias [c], if there is one."""
        bias: Tensor | None = getattr(self.module, "bias", None)
        return bias

    @property
    def eps(self) -> float:
        """What is added to the variance."""
        return float(getattr(self.module, "eps", EPS))

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


def check_part(module: nn.Module) -> None:
    """Raise NotServed for a part that is more than its parameters: what it computes would not be what we compute."""
    name = type(module).__name__
    if any(True for _ in module.children()):
        raise NotServed(f"its {name} has modules inside, such as an adapter of low rank")
    if "forward" in vars(module):
        raise NotServed(f"the forward of its {name} was replaced")
    if getattr(module, "precision", None) is not None:
        raise NotServed(f"a {name} with a precision of its own")
    _weight_of(module)


def _weight_of(module: nn.Module) -> Tensor:
    """Return the weight of a part.  Errors: NotServed for one that is quantised or sharded, or not there."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        raise NotServed(f"its {type(module).__name__} has no weight")
    if not torch.compiler.is_compiling():  # where it is known
        kind = type(weight)
        if not (weight.is_floating_point() and kind.__module__.startswith("torch.") and kind.__name__ != "DTensor"):
            raise NotServed(f"the weight of its {type(module).__name__} is a {kind.__name__} of {weight.dtype}")
    return weight


@dataclass(frozen=True)
class AttentionOf:
    """The parameters of a gated attention that are another model's, as our layers want them (`GatedAttention`)."""

    heads: int
    q: LinearOf
    k: LinearOf
    v: LinearOf
    gate: LinearOf
    out: LinearOf

    @property
    def projections(self) -> tuple[LinearOf, ...]:
        """The projections of the normalised input, in the order in which they are joined."""
        return self.gate, self.q, self.k, self.v


def made_of(kind: type[L], **parts: Any) -> L:
    """Return a layer of ours of which the parts are another model's: no parameter is made or copied."""
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    if isinstance(layer, DrawsNoise):
        DrawsNoise.__init__(layer)
    layer.eval()  # dropout is the other model's; and before it has parts, which stay as they are
    for name, part in parts.items():
        setattr(layer, name, part)
    return layer


def name_of(kind: type) -> str:
    """Return a class by its name, "package.module:Class"."""
    return f"{kind.__module__}:{kind.__qualname__}"


def adapter_of(module: nn.Module, known: Mapping[str, Adapter]) -> tuple[Adapter | None, str | None]:
    """Return the adapter of a module, if its class is known, and why the module cannot be swapped, if so."""
    kind: Any = type(module)
    served = next((one for one in kind.__mro__ if name_of(one) in known), None)
    if served is None or not known[name_of(served)].knows(module):
        return None, None
    adapter = known[name_of(served)]
    if adapter.signature and kind.forward is not served.forward:
        # Many a class is made of torch's, to compute something else: it is not known.
        return (None, None) if adapter.plain else (adapter, f"{kind.__name__} has a forward of its own")
    found = signature_of(kind.forward)
    known_as = (adapter.signature,) if isinstance(adapter.signature, str) else adapter.signature
    if adapter.signature and found not in known_as:
        return adapter, f"its forward is {found}, and {' or '.join(known_as)} is known"
    if "forward" in vars(module):
        return adapter, "its forward was replaced"
    return adapter, None


_swapped: dict[tuple[type[nn.Module], type[Adapter]], type[nn.Module]] = {}


def swapped_class(kind: type[nn.Module], adapter: type[Adapter]) -> type[nn.Module]:
    """Return a class like another, whose forward computes by an adapter; its instances are of the other class too."""
    if (kind, adapter) in _swapped:
        return _swapped[kind, adapter]
    how, theirs = adapter(), kind.forward
    places = places_of(theirs)

    @wraps(theirs)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Compute their forward by our operations, or by their code where the adapter does not serve the call."""
        if how.least and small_on_cpu(next(iter((*args, *kwargs.values())), None), how.least):
            return theirs(self, *args, **kwargs)
        try:
            named = {**dict(zip(places, args)), **kwargs}
            return how.forward(_layer_now(self, how), *args[len(places) :], **named)
        except NotServed as refusal:
            _report(self, f"{kind.__name__}: {refusal}")
        return theirs(self, *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        return _empty_swapped, (kind, adapter), vars(self)

    of_class = {"forward": forward, "__reduce_ex__": reduce, "__module__": kind.__module__, "original": (kind, adapter)}
    names = {"__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    made = _swapped[kind, adapter] = type(kind.__name__, (kind,), {**of_class, **names})
    return made


def _empty_swapped(kind: type[nn.Module], adapter: type[Adapter]) -> nn.Module:
    """Return a swapped module without attributes: copies and pickles of modules fill it."""
    swapped = swapped_class(kind, adapter)
    return swapped.__new__(swapped)


def _layer_now(module: nn.Module, adapter: Adapter) -> Executable:
    """Return the layer of a swapped module; made anew where parts of it were replaced since.

    Errors: NotServed where a part has a hook, or is no longer one that we serve: its own forward then counts.
    """
    layer: Executable = vars(module)[LAYER]
    if torch.compiler.is_compiling():  # it notices by itself what was replaced
        return layer
    parts = _parts(module)
    if len(parts) != len(vars(module)[PARTS]) or any(a is not b for a, b in zip(parts, vars(module)[PARTS])):
        execution, layer = layer.execution, adapter.build(module)
        _keep(module, layer, execution)
    for part in parts:
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            raise NotServed(f"its {type(part).__name__} has a hook, which would not be called")
    return layer


def _parts(module: nn.Module) -> tuple[nn.Module, ...]:
    return tuple(part for part in module.modules() if part is not module)


def _keep(module: nn.Module, layer: Executable, execution: PlainExecution | None) -> None:
    """Have a module keep a layer, not as a submodule: it has no parameters of its own."""
    if execution is not None:
        layer.execution = execution
    object.__setattr__(module, LAYER, layer)
    object.__setattr__(module, PARTS, _parts(module))


def _report(module: nn.Module, refusal: str) -> None:
    """Count that a call was left to a module's own forward.  Errors: UserError if its kernels are "strict"."""
    with vars(module)[LAYER].computing():
        if kernels() == "strict":
            raise UserError(f"{refusal}; without strict its own code would compute it")
        report_refusal(refusal)


def is_swapped(module: nn.Module) -> bool:
    """Return whether a module computes by our operations."""
    return LAYER in vars(module)


def swap(module: nn.Module, adapter: Adapter, layer: Executable, execution: PlainExecution | None = None) -> None:
    """Have a module compute by our layer from now on, as an execution says (None: at once, all of it)."""
    _keep(module, layer, execution)
    module.__class__ = swapped_class(type(module), type(adapter))


def was_wrapped(module: nn.Module) -> bool:
    """Return whether the class of a swapped module was changed since, as sharding does."""
    return type(module) is not swapped_class(*type(module).original)  # type: ignore[attr-defined]


def swap_back(module: nn.Module) -> None:
    """Have a swapped module, whose class was not changed since, compute as its own class does."""
    module.__class__ = type(module).original[0]  # type: ignore[attr-defined]
    del vars(module)[LAYER], vars(module)[PARTS]


# Signatures of other people's functions


def signature_of(function: Callable[..., Any]) -> str:
    """Return the signature of a function, without annotations."""
    given = _unwrapped(function)
    bare = [p.replace(annotation=p.empty) for p in given.parameters.values()]
    return str(given.replace(parameters=bare, return_annotation=given.empty))


def _unwrapped(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function, or of the only one that it wraps if it hands on whatever it is given."""
    given = inspect.signature(function)
    anything = [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
    if [p.kind for p in given.parameters.values()] == anything:
        wrapped = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        functions = [one for one in wrapped if inspect.isfunction(one)]
        if len(functions) == 1:
            return _unwrapped(functions[0])
    return given


def places_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a method's arguments that may be given by place, but for self."""
    found = _unwrapped(function).parameters.values()
    return tuple(p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD)[1:]
