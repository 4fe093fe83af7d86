"""Weights as operations read them: all of a model's in one flat buffer, those that are used together lying together.

    weights   every parameter is a view of it; the optimizer works on it
    compute   the same in the dtype that operations compute in, written once per step; where that is theirs, `weights`
    gradient  in the dtype of `weights`; a parameter's grad is a view of it, once a backward pass has reached it

A layer asks for the weights of projections of one tensor by `model.layers.joined`, and gets a view of one of the first
two: no cast and no copy.  Where they are trained, the view is a leaf of autograd whose gradients go to the third.

Gradients do not go there one by one: a leaf that has no grad when a backward pass begins (`release`) takes a gradient
as it is, a hook puts it to those that wait, and one addition brings `WAITING` of them to their places.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from warpfold.model.layers import AdaptedLinear, Linear
from warpfold.ops.torch_internals import call_after_backward
from warpfold.parallel.exchange import Layout, make_layout

Joined = tuple[Tensor, Tensor | None]
Watch = Callable[[str, Tensor], None]
WAITING = 64  # gradients, at most: as many as one launch of torch's takes, and more than a block has
HANDLE = "_warpfold_packed_hook"  # the attribute of a leaf that holds the handle of its hook


class PackedWeights:
    """The weights of a model in one buffer, which its linear layers hand to operations from now on.

    A weight may still be written through its parameter: a copy in another dtype is then written anew when it is asked
    for.  What writes `weights` directly calls `refresh`.  A parameter that was replaced or moved elsewhere is read
    where it is, cast and joined on the way; so are the parameters of a copy of the model, which is not packed, and one
    with a hook (`register_hook`).  Post-accumulate hooks of a parameter are not called: the leaf has the gradient.
    """

    @torch.inference_mode(False)  # what is made in inference may serve training later
    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        trained: bool = False,
        bucket_bytes: float = float("inf"),
        ranks: int = 1,
        frozen: bool = False,
    ) -> None:
        """Move the parameters of `model`, of one dtype and on one device, into one buffer.

        dtype: that operations compute in; None: that of the parameters.  trained: only those that require a gradient,
        which gets a buffer, too; the others are packed apart, to be read (`rest`).  bucket_bytes, ranks: as of
        `make_layout`.  frozen: only those that require no gradient.
        """
        every = dict(model.named_parameters())
        order, together = packed_order(model)
        wanted = [
            every[name].requires_grad if trained else not (frozen and every[name].requires_grad) for name in order
        ]
        self.parameters = {name: every[name] for name, one in zip(order, wanted) if one}
        self.layout: Layout = make_layout(self.parameters, bucket_bytes, ranks, together)
        some = next(iter(self.parameters.values()))
        self.weights = torch.zeros(self.layout.size, device=some.device, dtype=some.dtype)
        self.gradient = torch.zeros_like(self.weights) if trained else None
        self._waiting: list[Tensor] = []  # gradients, and the places to which they are to be added
        self._into: list[Tensor] = []
        self.places: dict[int, Tensor] = {}  # to which the gradient of each leaf is added, by the leaf's id
        self._arrived: dict[int, Tensor] = {}  # the leaves that have a grad, though gradients arrive there
        self._released: set[int] = set()  # and those that have none, so that they take what comes
        own = (module._parameters for module in model.modules() if isinstance(module, Linear))
        linears = {id(p) for parameters in own for p in (parameters["weight"], parameters["bias"])}
        for name, p in self.parameters.items():
            self.layout.view(self.weights, name).copy_(p.detach())
            p.data = self.layout.view(self.weights, name)  # what changes the buffer changes the parameter
            if self.gradient is not None:
                self._receive(p, self.layout.view(self.gradient, name))
                if id(p) not in linears:  # they are read joined
                    self._take_grad(p)
        self.compute = self.weights if dtype in (None, some.dtype) else self.weights.to(dtype)
        self.watch: Watch | None = None  # told of every leaf, with the name of its first parameter
        self._found: dict[tuple[object, ...], tuple[list[_Source], Joined] | None] = {}
        self.versions = {name: p._version for name, p in self.parameters.items()}  # that `compute` was made of
        self._written = sum(self.versions.values())
        self.names = {id(p): name for name, p in self.parameters.items()}
        self._held = []  # where each parameter was found, and where its weights lie now
        for module in model.modules():
            for key, held in module._parameters.items():
                if held is not None and id(held) in self.names:
                    self._held.append((module._parameters, key, held, held.data_ptr(), self.places.get(id(held))))
            if isinstance(module, Linear) and any(id(p) in self.names for p in module._parameters.values()):
                module.packed = self
        # A layer of which a part is trained and a part is not is read where it is.
        self.rest: PackedWeights | None = None
        if trained and not all(wanted):
            self.rest = PackedWeights(model, dtype, frozen=True)

    def __deepcopy__(self, memo: object) -> None:
        """Return nothing: a copy of a model has weights of its own."""

    @property
    def copy(self) -> Tensor | None:
        """The copy of `weights` in another dtype, if there is one."""
        return None if self.compute is self.weights else self.compute

    def refresh(self) -> None:
        """Write `compute` anew; to be called after `weights` was written to."""
        if self.compute is not self.weights:
            self.compute.copy_(self.weights)

    @property
    def in_place(self) -> bool:
        """Whether all parameters and their gradients still lie here: none was replaced, moved or packed elsewhere."""
        return all(
            holder.get(key) is p
            and p.data_ptr() == address
            and (p.grad is grad or (p.grad is None and id(p) in self._released))
            for holder, key, p, address, grad in self._held
        )

    def catch_up(self) -> None:
        """Bring the copy up to date where parameters were written to, before a graph is replayed that reads it.

        What asks `joined` does not need it.
        """
        if self.copy is None:
            return
        if self.rest is not None:
            self.rest.catch_up()
        written = sum(p._version for p in self.parameters.values())
        if written != self._written:
            self._written = written
            self.refresh()

    def leaves(self) -> list[Tensor]:
        """Return all leaves that were handed out so far."""
        return [t for found in self._found.values() if found is not None for t in found[1] if t is not None]

    def release(self) -> None:
        """Get ready for a backward pass: leaves at which gradients arrived before have no grad until they do again.

        Right without it too: autograd then adds each gradient by itself.
        """
        # A backward pass that failed has left gradients behind, and no callback would add them.
        self.settle()
        for leaf in self._arrived.values():
            leaf.grad = None
        self._released.update(self._arrived)
        self._arrived.clear()

    def settle(self) -> None:
        """Add the gradients that wait to the buffer; the end of a backward pass does it."""
        if self._waiting:
            torch._foreach_add_(self._into, self._waiting)
            self._waiting.clear()
            self._into.clear()

    def _receive(self, leaf: Tensor, place: Tensor) -> None:
        """Have gradients of a leaf go to their place in this buffer, and no more to an earlier one's."""
        leaf.grad = self.places[id(leaf)] = place
        if earlier := getattr(leaf, HANDLE, None):
            earlier.remove()
        setattr(leaf, HANDLE, leaf.register_post_accumulate_grad_hook(partial(self._gather, place)))

    def _take_grad(self, leaf: Tensor) -> None:
        leaf.grad = None
        self._released.add(id(leaf))

    def _gather(self, place: Tensor, leaf: Tensor) -> None:
        """Take the gradient of a leaf, of all its uses: autograd calls this once in a backward pass."""
        self._arrived[id(leaf)] = leaf
        if leaf.grad is place:  # autograd has added it
            return
        assert leaf.grad is not None
        if not self._waiting:
            # One callback covers all gradients that wait until then.
            call_after_backward(self.settle)
        self._waiting.append(leaf.grad)
        self._into.append(place)
        self._released.discard(id(leaf))
        leaf.grad = place
        if len(self._waiting) == WAITING:
            self.settle()

    def joined(self, dtype: torch.dtype, projections: tuple[Linear, ...]) -> Joined | None:
        """Return the weights of projections as one [o, c], and their biases, in `dtype`; None if they do not lie so."""
        key = (dtype, *map(id, projections))
        if key not in self._found:
            self._found[key] = self._find(dtype, projections)
        found = self._found[key]
        if found is None:
            return None
        sources, leaves = found
        trained = self.gradient is not None
        differentiated = torch.is_grad_enabled()
        for source in sources:  # this runs for every layer of every pass
            p = source.parameter
            if source.holder.get(source.key) is not p or p.data_ptr() != source.address:
                return None  # it was replaced, or moved
            if differentiated and p._backward_hooks:
                return None  # a hook was registered to see its gradient
            if differentiated and p.requires_grad != trained:
                return None  # it was frozen since; or its gradient would not reach the parameter
            if p._version != source.version:
                self._copy_again(source, leaves, dtype)
        return leaves

    def _find(self, dtype: torch.dtype, projections: tuple[Linear, ...]) -> tuple[list["_Source"], Joined] | None:
        """Make the result of `joined`, and note its sources; None where the parameters lie elsewhere or apart."""
        linears = [one for one in projections if isinstance(one, Linear) and not isinstance(one, AdaptedLinear)]
        if len(linears) < len(projections) or dtype not in (self.compute.dtype, self.weights.dtype):
            return None
        biases = [(linear, "bias") for linear in linears if linear.bias is not None]
        if any(linear.bias is None for linear in linears[: len(biases)]):
            return None  # zeros would lie between them
        weights = [(linear, "weight") for linear in linears]
        joined = [[getattr(linear, key) for linear, key in some] for some in (weights, biases) if some]
        if not all(map(self._adjacent, joined)):
            return None
        weight, *bias = (self._leaf(dtype, parameters) for parameters in joined)
        return [_Source(self, *where) for where in weights + biases], (weight, bias[0] if bias else None)

    def _adjacent(self, parameters: list[Tensor]) -> bool:
        """Return whether parameters lie here one after another."""
        names = [self.names.get(id(p)) for p in parameters]
        places = [self.layout.places[name] for name in names if name is not None]
        return len(places) == len(names) and all(a.stop == b.start for a, b in pairwise(places))

    def _copy_again(self, source: "_Source", leaves: Joined, dtype: torch.dtype) -> None:
        """Bring the copy of a parameter up to date, which was written to."""
        p = source.parameter
        source.version = p._version
        # A backward pass that still needs the old values is to notice.
        increment_version([leaf for leaf in leaves if leaf is not None and not isinstance(leaf, nn.Parameter)])
        if dtype != self.weights.dtype:
            with torch.no_grad():
                self.layout.view(self.compute, source.name).copy_(p)

    @torch.inference_mode(False)  # as above
    def _leaf(self, dtype: torch.dtype, parameters: list[Tensor]) -> Tensor:
        """Return parameters [o, ...] that lie one after another as one tensor, joined along their first axis."""
        names = [self.names[id(p)] for p in parameters]
        places = [self.layout.places[name] for name in names]
        if len(parameters) == 1 and dtype == self.weights.dtype:
            if self.gradient is not None:
                self._take_grad(parameters[0])
            return parameters[0]
        where = slice(places[0].start, places[-1].stop)
        rest = parameters[0].shape[1:]
        flat = self.compute if dtype == self.compute.dtype else self.weights
        # Not flat[where]: it would count writes to all of the buffer as its own.
        leaf = flat.new_empty(0).set_(flat[where].view(-1, *rest))  # type: ignore[call-overload]
        if self.gradient is not None:
            leaf.requires_grad_()
            # Gradients of bf16 weights are accumulated in fp32.
            leaf.grad_dtype = self.gradient.dtype
            self._receive(leaf, self.gradient[where].view(-1, *rest))
            if self.watch is not None:
                self.watch(names[0], leaf)
            self._take_grad(leaf)
        return leaf


class _Source:
    """A parameter of which a leaf was made, and how it was then."""

    def __init__(self, packed: PackedWeights, linear: Linear, key: str) -> None:
        self.linear, self.holder, self.key = linear, linear._parameters, key  # the layer is kept, as its id is in a key
        parameter = self.holder[key]
        assert parameter is not None
        self.parameter: nn.Parameter = parameter
        self.name = packed.names[id(parameter)]
        place = packed.layout.places[self.name]
        self.address = packed.weights.data_ptr() + place.start * packed.weights.element_size()
        self.version = packed.versions[self.name]


def packed_order(model: nn.Module) -> tuple[list[str], set[str]]:
    """Return the names of a model's parameters in the order in which they are packed, that of the forward pass.

    And those that must not be separated from the one before.  A module's `projections` are its linear layers that
    project one tensor: their weights lie one after another, then their biases.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    first: dict[str, list[str]] = {}  # the groups, by the name that comes first in the model
    grouped: set[str] = set()
    position = {name: i for i, name in enumerate(names.values())}
    for module in model.modules():  # a layer comes before its parts, and may have joined more than they
        linears: tuple[Linear, ...] = getattr(module, "projections", ())
        group = [names[id(linear._parameters["weight"])] for linear in linears]  # of an adapted one, what is adapted
        group += [names[id(linear.bias)] for linear in linears if linear.bias is not None]
        if group and not grouped & set(group):
            grouped |= set(group)
            first[min(group, key=position.__getitem__)] = group
    order = [
        name for start in names.values() if start in first or start not in grouped for name in first.get(start, [start])
    ]
    return order, {name for group in first.values() for name in group[1:]}
