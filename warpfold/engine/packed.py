"""Pack the weights of a model into one flat buffer, with the weights that are used together next to each other.

    weights   every parameter is a view of this buffer, on which the optimizer works
    compute   a copy in the dtype of the operations, written once per step; the same buffer if the dtypes are equal
    gradient  in the dtype of `weights`; the grad of a parameter is a view of it after a backward pass has reached it

`model.layers.joined` returns the weights of several projections of one tensor as a view of `compute` or `weights`,
without a cast or copy.  If they are trained, the view is a leaf of autograd whose gradients go to `gradient`.

Gradients are added in groups instead of one by one.  A leaf without a grad at the start of a backward pass (`release`)
takes the gradient as it is, a hook queues the gradient, and one addition adds `GROUP` queued gradients to the buffer.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from warpfold.model.axial import AxialUpdate
from warpfold.model.layers import AdaptedLinear, Linear
from warpfold.ops.torch_internals import call_after_backward, members
from warpfold.parallel.exchange import Layout, make_layout

Joined = tuple[Tensor, Tensor | None]
Watch = Callable[[str, Tensor], None]
GROUP = 64  # gradients per addition, one launch of torch's foreach kernels and more than a block has
HANDLE = "_warpfold_packed_hook"  # attribute of a leaf for the handle of its hook


class PackedWeights:
    """The weights of a model in one buffer, from which its linear layers pass them to operations.

    A weight may be written through its parameter; a copy in another dtype is then updated when it is next read.  Code
    that writes `weights` directly must call `refresh`.
    Some parameters are cast and joined for each use instead: those that were replaced or moved, those with a hook
    (`register_hook`), and those of a copy of the model, which is not packed.
    Post-accumulate hooks of a parameter are not called, since the leaf gets the gradient.
    """

    # Buffers that are created in inference may be trained later.
    @torch.inference_mode(False)
    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        trained: bool = False,
        bucket_bytes: float = float("inf"),
        ranks: int = 1,
        frozen: bool = False,
    ) -> None:
        """Move the parameters of `model`, which have one dtype and one device, into one buffer.

        dtype: of the operations; None for the dtype of the parameters.
        trained: pack the parameters that require a gradient, with a buffer for the gradient.  The other parameters get
            a buffer of their own (`frozen_pack`).
        bucket_bytes, ranks: see `make_layout`.
        frozen: pack only the parameters that require no gradient.
        """
        all_parameters = dict(model.named_parameters())
        order, together = packed_order(model)
        is_packed = {
            name: all_parameters[name].requires_grad if trained else not (frozen and all_parameters[name].requires_grad)
            for name in order
        }
        self.parameters = {name: all_parameters[name] for name in order if is_packed[name]}
        self.layout: Layout = make_layout(self.parameters, bucket_bytes, ranks, together)
        first = next(iter(self.parameters.values()))
        self.weights = torch.zeros(self.layout.size, device=first.device, dtype=first.dtype)
        self.gradient = torch.zeros_like(self.weights) if trained else None
        # Queued gradients, and the views of `gradient` to which they will be added.
        self._queued: list[Tensor] = []
        self._into: list[Tensor] = []
        self.places: dict[int, Tensor] = {}  # leaf id -> view of `gradient`
        self._arrived: dict[int, Tensor] = {}  # leaves that received a gradient
        self._released: set[int] = set()  # ids of leaves without a grad
        linear_parameters = (module._parameters for module in model.modules() if isinstance(module, Linear))
        linears = {id(p) for parameters in linear_parameters for p in (parameters["weight"], parameters["bias"])}
        for name, p in self.parameters.items():
            self.layout.view(self.weights, name).copy_(p.detach())
            # The parameter becomes a view of the buffer.
            p.data = self.layout.view(self.weights, name)
            if self.gradient is not None:
                self._receive(p, self.layout.view(self.gradient, name))
                # Parameters of linear layers are read through joined leaves, which take their gradients.
                if id(p) not in linears:
                    self._take_grad(p)
        self.compute = self.weights if dtype in (None, first.dtype) else self.weights.to(dtype)
        # Called for every leaf, with the name of its first parameter.
        self.watch: Watch | None = None
        self._joined: dict[tuple[object, ...], _Group | None] = {}
        # The group of each leaf, by the id of the leaf.
        self._group_of: dict[int, _Group] = {}
        # The parameters of whole layers.
        self._gathered: dict[tuple[object, ...], _Gathered] = {}
        # Versions of the parameters from which `compute` was written.
        self.versions = {name: p._version for name, p in self.parameters.items()}
        self._written = sum(self.versions.values())
        self.names = {id(p): name for name, p in self.parameters.items()}
        # The dictionary and key of each parameter, its address, and its view of `gradient`.
        self._holders = []
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in self.names:
                    self._holders.append(
                        (module._parameters, key, parameter, parameter.data_ptr(), self.places.get(id(parameter)))
                    )
            if isinstance(module, Linear) and any(id(p) in self.names for p in module._parameters.values()):
                module.packed = self
            if isinstance(module, AxialUpdate) and any(id(p) in self.names for p in module.parameters()):
                module.packed = self
        # A layer with both trained and frozen parameters reads them one by one.
        self.frozen_pack: PackedWeights | None = None
        if trained and not all(is_packed.values()):
            self.frozen_pack = PackedWeights(model, dtype, frozen=True)

    def __deepcopy__(self, memo: object) -> None:
        """Return None, since a copy of a model has its own weights."""

    @property
    def copy(self) -> Tensor | None:
        """The copy of `weights` in another dtype; None if there is no copy."""
        return None if self.compute is self.weights else self.compute

    def refresh(self) -> None:
        """Update `compute` after a write to `weights`."""
        if self.compute is not self.weights:
            self.compute.copy_(self.weights)

    @property
    def in_place(self) -> bool:
        """Whether all parameters and gradients are in these buffers.  False if one was replaced, moved or repacked."""
        return all(
            holder.get(key) is p
            and p.data_ptr() == address
            and (p.grad is grad or (p.grad is None and id(p) in self._released))
            for holder, key, p, address, grad in self._holders
        )

    def catch_up(self) -> None:
        """Update the copy after writes to parameters, before the replay of a graph that reads it.

        Callers of `joined` need not call this.
        """
        if self.copy is None:
            return
        if self.frozen_pack is not None:
            self.frozen_pack.catch_up()
        written = sum(p._version for p in self.parameters.values())
        if written != self._written:
            self._written = written
            self.refresh()

    def leaves(self) -> list[Tensor]:
        """Return all leaves that `joined` has returned so far."""
        return [leaf for entry in self._joined.values() if entry is not None for leaf in entry[1] if leaf is not None]

    def release(self) -> None:
        """Clear the grads of the leaves before a backward pass, so that they take the next gradients as they are.

        Without this call autograd adds each gradient by itself, with the same result.
        """
        # A backward pass that failed has left gradients behind, and no callback would add them.
        self.settle()
        for leaf in self._arrived.values():
            leaf.grad = None
        self._released.update(self._arrived)
        self._arrived.clear()

    def settle(self) -> None:
        """Add the queued gradients to the buffer.  This is called at the end of a backward pass."""
        if self._queued:
            torch._foreach_add_(self._into, self._queued)
            self._queued.clear()
            self._into.clear()

    def _receive(self, leaf: Tensor, place: Tensor) -> None:
        """Direct the gradients of a leaf to their place in this buffer, and no longer to that of an earlier pack."""
        leaf.grad = self.places[id(leaf)] = place
        if earlier := getattr(leaf, HANDLE, None):
            earlier.remove()
        setattr(leaf, HANDLE, leaf.register_post_accumulate_grad_hook(partial(self._gather, place)))

    def _take_grad(self, leaf: Tensor) -> None:
        leaf.grad = None
        self._released.add(id(leaf))

    def _gather(self, place: Tensor, leaf: Tensor) -> None:
        """Queue the gradient of a leaf.  Autograd calls this once in a backward pass, after all uses of the leaf."""
        self._arrived[id(leaf)] = leaf
        # Autograd has already added a gradient to a grad that was not released.
        if leaf.grad is place:
            return
        assert leaf.grad is not None
        if not self._queued:
            # One callback adds all gradients that are queued until then.
            call_after_backward(self.settle)
        self._queued.append(leaf.grad)
        self._into.append(place)
        self._released.discard(id(leaf))
        leaf.grad = place
        if len(self._queued) == GROUP:
            self.settle()

    def joined(self, dtype: torch.dtype, projections: tuple[Linear, ...]) -> Joined | None:
        """Return the weights of projections as one [o, c] and their biases, in `dtype`; None if this is impossible."""
        key = (dtype, *map(id, projections))
        if key not in self._joined:
            self._joined[key] = group = self._join(dtype, projections)
            if group is not None:
                self._group_of |= {id(leaf): group for leaf in group[1] if leaf is not None}
        group = self._joined[key]
        return group[1] if group is not None and self._is_current([group], dtype) else None

    def gathered(self, layer: AxialUpdate, dtype: torch.dtype, variant: bool) -> Any:
        """Return `layer.gather_weights(dtype, variant)`, and the same record again until a module or parameter changes.

        A record is cached if it consists of leaves of this buffer, and of parameters that are read as they are.
        """
        key = (id(layer), dtype, variant)
        entry = self._gathered.get(key)
        if entry is not None and entry.layer is layer:
            for holder, name, value, kind in entry.read:
                if holder.get(name) is not value or value.__class__ is not kind:
                    break
            else:
                if self._is_current(entry.groups, dtype):
                    return entry.weights
        weights = layer.gather_weights(dtype, variant)
        groups: list[_Group] = []
        modules = list(layer.modules())
        read_directly = {id(p) for m in modules if not isinstance(m, Linear) for p in m._parameters.values()}
        for t in weights:
            if (group := self._group_of.get(id(t))) is not None:
                groups.append(group)
            elif isinstance(t, Tensor) and id(t) not in read_directly:
                self._gathered.pop(key, None)
                return weights
        read = [
            (holder, name, value, type(value))
            for m in modules
            for holder in members(m)
            for name, value in holder.items()
        ]
        self._gathered[key] = _Gathered(layer, weights, groups, read)
        return weights

    def _is_current(self, groups: "Sequence[_Group]", dtype: torch.dtype) -> bool:
        """Return whether leaves still represent their parameters; update the copies of parameters that were written."""
        trained = self.gradient is not None
        is_grad_enabled = torch.is_grad_enabled()
        for sources, leaves in groups:
            # This loop runs for every layer of every pass.
            for source in sources:
                p = source.parameter
                # The parameter was replaced or moved.
                if source.holder.get(source.key) is not p or p.data_ptr() != source.address:
                    return False
                # The layer was adapted after packing.
                if source.linear.__class__ is not source.kind:
                    return False
                # A hook of the parameter must see its gradient.
                if is_grad_enabled and p._backward_hooks:
                    return False
                # The parameter was frozen or unfrozen after packing.
                if is_grad_enabled and p.requires_grad != trained:
                    return False
                if p._version != source.version:
                    # The parameter was written. A backward pass that still needs the old values must raise an error.
                    source.version = p._version
                    increment_version([x for x in leaves if x is not None and not isinstance(x, nn.Parameter)])
                    if dtype != self.weights.dtype:
                        with torch.no_grad():
                            self.layout.view(self.compute, source.name).copy_(p)
        return True

    def _join(self, dtype: torch.dtype, projections: tuple[Linear, ...]) -> "_Group | None":
        """Create the leaves of `joined`, and note their sources; None if the parameters are not adjacent here."""
        linears = [linear for linear in projections if isinstance(linear, Linear)]
        linears = [linear for linear in linears if not isinstance(linear, AdaptedLinear)]
        if len(linears) < len(projections) or dtype not in (self.compute.dtype, self.weights.dtype):
            return None
        biases = [(linear, "bias") for linear in linears if linear.bias is not None]
        # A projection without a bias before one with a bias would need zeros between the biases.
        if any(linear.bias is None for linear in linears[: len(biases)]):
            return None
        weights = [(linear, "weight") for linear in linears]
        joined = [[getattr(linear, key) for linear, key in group] for group in (weights, biases) if group]
        for parameters in joined:
            names = [self.names.get(id(p)) for p in parameters]
            places = [self.layout.places[name] for name in names if name is not None]
            if len(places) < len(names) or any(a.stop != b.start for a, b in pairwise(places)):
                return None
        weight, *bias = (self._leaf(dtype, parameters) for parameters in joined)
        return [_Source(self, *fields) for fields in weights + biases], (weight, bias[0] if bias else None)

    # Leaves that are created in inference may be trained later.
    @torch.inference_mode(False)
    def _leaf(self, dtype: torch.dtype, parameters: list[Tensor]) -> Tensor:
        """Return adjacent parameters [o, ...] as one tensor, joined along their first axis."""
        names = [self.names[id(p)] for p in parameters]
        places = [self.layout.places[name] for name in names]
        if len(parameters) == 1 and dtype == self.weights.dtype:
            if self.gradient is not None:
                self._take_grad(parameters[0])
            return parameters[0]
        span = slice(places[0].start, places[-1].stop)
        inner_shape = parameters[0].shape[1:]
        flat = self.compute if dtype == self.compute.dtype else self.weights
        # A view such as flat[where] would share its version counter with the whole buffer.
        leaf = flat.new_empty(0).set_(flat[span].view(-1, *inner_shape))  # type: ignore[call-overload]
        if self.gradient is not None:
            leaf.requires_grad_()
            # Gradients of bf16 weights are accumulated in fp32.
            leaf.grad_dtype = self.gradient.dtype
            self._receive(leaf, self.gradient[span].view(-1, *inner_shape))
            if self.watch is not None:
                self.watch(names[0], leaf)
            self._take_grad(leaf)
        return leaf


class _Source:
    """A parameter from which a leaf was made, with its address and version at that time."""

    def __init__(self, packed: PackedWeights, linear: Linear, key: str) -> None:
        # The reference keeps the layer alive, since its id is part of a key of `_joined`.
        self.linear, self.holder, self.key = linear, linear._parameters, key
        self.kind = linear.__class__
        parameter = self.holder[key]
        assert parameter is not None
        self.parameter: nn.Parameter = parameter
        self.name = packed.names[id(parameter)]
        place = packed.layout.places[self.name]
        self.address = packed.weights.data_ptr() + place.start * packed.weights.element_size()
        self.version = packed.versions[self.name]


_Group = tuple[list[_Source], Joined]


class _Gathered(NamedTuple):
    """The parameters of a layer, as gathered, and what they were gathered from.

    read: each module and parameter below the layer: the dictionary that holds it, its name, itself and its class.
    """

    layer: AxialUpdate
    weights: Any
    groups: list[_Group]
    read: list[tuple[dict[str, Any], str, Any, type]]


def packed_order(model: nn.Module) -> tuple[list[str], set[str]]:
    """List the names of a model's parameters in packing order, and the names that must follow their predecessor.

    The order is that of the forward pass.  The `projections` of a module are its linear layers that project the same
    tensor.  Their weights are packed one after another, and then their biases.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    first: dict[str, list[str]] = {}  # groups, by their first name
    grouped: set[str] = set()
    position = {name: i for i, name in enumerate(names.values())}
    # A layer precedes its submodules, and its group may be larger than theirs.
    for module in model.modules():
        linears: tuple[Linear, ...] = getattr(module, "projections", ())
        # An adapted layer is packed by its stored weight, without the adapter.
        group = [names[id(linear._parameters["weight"])] for linear in linears]
        group += [names[id(linear.bias)] for linear in linears if linear.bias is not None]
        if group and not grouped & set(group):
            grouped |= set(group)
            first[min(group, key=position.__getitem__)] = group
    order = [
        name for start in names.values() if start in first or start not in grouped for name in first.get(start, [start])
    ]
    return order, {name for group in first.values() for name in group[1:]}
