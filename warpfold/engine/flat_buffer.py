"""Parameters of one group, dtype and device in one flat tensor, their gradients in another, and what is kept of each.

    weights    every parameter is a view of it
    gradient   where gradients are put; zeros between parameters
    moments    what the optimizer keeps for every number, by its own names ("exp_avg" ...)
    average    the moving average of the weights
    master     the weights in fp32, where they are in 16 bits and this is wanted

The last three cover what this process updates (`own`), joined: everything, unless ranks share it out.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from warpfold.errors import UserError
from warpfold.parallel.buckets import make_layout

# Numbers: a larger gradient is put into its place as soon as it is there, and its memory freed; or, on a CPU, where a
# step is not quicker for fewer large tensors, it is read where it lies, and the place stays unused.
LARGE = 2**14
# The handle of each parameter's hook: not an attribute of the parameter, with which it would be pickled.
_handles: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@dataclass(eq=False)
class FlatPiece:
    """A run of a buffer that an optimizer takes for one parameter: all in it have been stepped at the same times."""

    buffer: "FlatBuffer"
    where: slice  # of the buffer
    local: slice  # of its moments
    first: int  # of the buffer's parameters, those from first to last - 1 lie in it
    last: int
    weights: Tensor  # or master weights: what the optimizer works on
    place: Tensor  # of its gradient
    alone: nn.Parameter | None  # the parameter whose gradient is read where it lies

    @property
    def gradient(self) -> Tensor:
        """The gradient of what lies in it."""
        if self.alone is None or self.alone.grad is None:
            return self.place
        first = self.buffer.starts[self.first]
        return self.alone.grad.detach().view(-1)[self.where.start - first : self.where.stop - first]


class FlatBuffer:
    """Parameters in one flat tensor, and their gradients in another.

    p.grad says what a backward pass has reached, as in torch: it is None after `zero_grad`.  A gradient may lie
    anywhere until `gather` puts it into its place, `gradients[name]`, which p.grad then is (large ones on a CPU stay
    where they are, unless it is told otherwise).  The place of a parameter without gradient holds whatever it held.
    """

    def __init__(self, group: int, parameters: Mapping[str, nn.Parameter], ranks: int, master: bool) -> None:
        """Move parameters of one dtype and device into a buffer, whose length is divisible by `ranks`.

        group: of the optimizer's.  master: keep weights that are in 16 bits in fp32, too.
        """
        self.group, self.parameters = group, dict(parameters)
        self.layout = make_layout(self.parameters, float("inf"), ranks)
        self.places = self.layout.places
        self.starts = [place.start for place in self.places.values()]
        some = next(iter(self.parameters.values()))
        self.weights = torch.zeros(self.layout.size, dtype=some.dtype, device=some.device)
        self.gradient = torch.zeros_like(self.weights)
        # As they lie in memory now (channels_last, say), without holes.
        self._strides = {name: torch.empty_like(p, device="meta").stride() for name, p in self.parameters.items()}
        self.gradients = {name: self.view(self.gradient, name) for name in self.places}
        narrow = some.dtype in (torch.float16, torch.bfloat16)
        self.master = self.weights.float() if master and narrow else None
        self._direct: dict[str, nn.Parameter] = {}
        if some.device.type == "cpu" and self.master is None:
            lengths = [b - a for a, b in pairwise([*self.starts, self.layout.size])]  # with what follows them
            for length, (name, p) in zip(lengths, self.parameters.items()):
                if p.numel() == length >= LARGE and p.is_contiguous():
                    self._direct[name] = p
        for name, p in self.parameters.items():
            self.view(self.weights, name).copy_(p.detach())
            p.data = self.view(self.weights, name)  # what changes the buffer changes the parameter
            at_once = p.numel() >= LARGE and name not in self._direct
            set_hook(p, partial(_put, self.gradients[name]) if at_once else None)
        self._held = [(name, p, self.gradients[name], p.data_ptr()) for name, p in self.parameters.items()]
        self.own: list[slice] = [slice(0, self.layout.size)]
        self.cuts: set[int] = set()  # the numbers of the parameters at which a piece begins
        self.cut_at(())
        self.moments: dict[str, Tensor] = {}
        self.average: Tensor | None = None
        self._versions = self._written()

    def view(self, flat: Tensor, name: str) -> Tensor:
        """Return a parameter's part of a flat tensor of the buffer's length, in the parameter's shape."""
        return flat[self.places[name]].as_strided(self.layout.shapes[name], self._strides[name])

    # Gradients

    @torch.no_grad()
    def gather(self, everything: bool = False) -> list[bool]:
        """Put gradients into their places; return which parameters have one, in order.

        everything: those, too, that are read where they lie.
        Errors: RuntimeError where a parameter does not lie in the buffer any more, UserError for a sparse gradient.
        """
        present, sources, targets, found = [], [], [], []
        for name, p, view, address in self._held:
            if p.data_ptr() != address:
                raise RuntimeError(
                    f"{name}: it does not lie in the buffer of its warpfold.Flat any more: the model was moved, to a "
                    "device or dtype, or another Flat took it over; make the optimizer when the model is where it stays"
                )
            gradient = p.grad
            present.append(gradient is not None)
            if gradient is None or gradient is view:
                continue
            if name in self._direct and not everything and _is_plain(gradient, view):
                continue
            if gradient.layout != torch.strided:
                raise UserError(
                    f"Flat: the gradient of {name} is sparse; make it dense (nn.Embedding(sparse=False)), or give this "
                    "parameter to torch.optim.SparseAdam"
                )
            sources.append(gradient.detach() if gradient.requires_grad else gradient)
            targets.append(view)
            if gradient.dtype == view.dtype:
                found.append((p, view))
        if sources:
            torch._foreach_copy_(targets, sources)
            for p, view in found:
                p.grad = view
        return present

    def zero_absent(self) -> None:
        """Write zeros into the places of parameters that have no gradient."""
        absent = [view for _, p, view, _ in self._held if p.grad is None]
        if absent:
            torch._foreach_zero_(absent)

    # What is kept

    @property
    def sharded(self) -> bool:
        """Whether other ranks update a part of it."""
        return self.own != [slice(0, self.layout.size)]

    def owned(self, flat: Tensor) -> Tensor:
        """Return what this process updates of a flat tensor: itself, or a copy of the own slices, joined."""
        return torch.cat([flat[where] for where in self.own]) if self.sharded else flat

    def joined(self, values: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the owned part of a new flat tensor that holds a value for each named parameter, zeros elsewhere."""
        flat = torch.zeros(self.layout.size, dtype=dtype, device=self.weights.device)
        for name, value in values.items():
            self.view(flat, name).copy_(value)
        return self.owned(flat)

    def follow_weights(self) -> None:
        """Bring the master weights up to date where parameters were written to by others."""
        versions = self._written()
        if self.master is None or versions == self._versions:
            return
        self._versions = versions
        now = self.owned(self.weights)
        self.master.copy_(torch.where(self.master.to(now.dtype) == now, self.master, now))

    def write_weights(self, values: Tensor) -> None:
        """Write the owned part of the weights."""
        at = 0
        for where in self.own:
            self.weights[where].copy_(values[at : at + where.stop - where.start])
            at += where.stop - where.start

    def _written(self) -> int:
        return sum(p._version for p in self.parameters.values())

    # Pieces

    def cut_at(self, numbers: Iterable[int]) -> None:
        """Have pieces begin at these parameters only, and around those whose gradient is read where it lies."""
        alone = {i for i, name in enumerate(self.places) if name in self._direct}
        self.cuts = {i for i in {*numbers, *alone, *(i + 1 for i in alone)} if 0 < i < len(self.places)}

    def cut(self, limit: int | None) -> list[FlatPiece]:
        """Return the pieces of what this process updates: cut at `cuts`, and none of several parameters longer than
        `limit`.
        """
        found, offset, names = [], 0, list(self.places)
        for own in self.own:
            at = {self.starts[i] for i in self.cuts if own.start < self.starts[i] < own.stop}
            for a, b in pairwise(sorted({own.start, own.stop} | at)):
                first = bisect_right(self.starts, a) - 1
                alone = self._direct.get(names[first])
                most = b - a if limit is None or alone is not None else limit
                for start in range(a, b, most):
                    where = slice(start, min(b, start + most))
                    local = slice(where.start + offset - own.start, where.stop + offset - own.start)
                    first = bisect_right(self.starts, where.start) - 1
                    last = bisect_left(self.starts, where.stop)
                    weights = self.weights[where] if self.master is None else self.master[local]
                    found.append(FlatPiece(self, where, local, first, last, weights, self.gradient[where], alone))
            offset += own.stop - own.start
        return found


def _is_plain(gradient: Tensor, view: Tensor) -> bool:
    """Return whether a gradient can be read where it lies."""
    return gradient.layout == torch.strided and gradient.dtype == view.dtype and gradient.is_contiguous()


def set_hook(p: Tensor, hook: Callable[[Tensor], None] | None) -> None:
    """Have a parameter's gradient handled by `hook` as soon as it is there, in place of an earlier one's."""
    if earlier := _handles.pop(p, None):
        earlier.remove()
    if hook is not None:
        _handles[p] = p.register_post_accumulate_grad_hook(hook)


@torch.no_grad()
def _put(view: Tensor, p: Tensor) -> None:
    """Put a gradient that has just arrived into its place, unless it has a graph of its own or is sparse."""
    gradient = p.grad
    if gradient is None or gradient is view or gradient.requires_grad:
        return
    if gradient.layout == torch.strided and gradient.dtype == view.dtype:
        view.copy_(gradient)
        p.grad = view


def changes(values: Sequence[object], cuts: Collection[int]) -> Iterable[int]:
    """Yield the numbers of the values that differ from the one before and are not among `cuts`."""
    for i, (before, value) in enumerate(pairwise(values), 1):
        if before != value and i not in cuts:
            yield i


def check_parameter(name: str, p: Tensor) -> None:
    """Raise UserError for a parameter that cannot be a part of a flat tensor."""
    reason = None
    if isinstance(p, nn.UninitializedParameter):
        reason = "is lazy; call the model once before the optimizer is made"
    elif type(p.data) is not Tensor:
        reason = (
            f"is a {type(p.data).__name__}, as fully_shard, tensor parallelism and quantisation make them; use "
            "torch's own optimizer, or warpfold.Replicas(shard=True) in place of fully_shard"
        )
    elif p.is_meta:
        reason = "is on the meta device; load the weights first (model.to_empty, load_state_dict)"
    elif p.layout != torch.strided or not p.is_floating_point():
        reason = f"is {p.layout}, {p.dtype}; only dense real numbers lie in a buffer: leave it to torch's own optimizer"
    if reason:
        raise UserError(f"Flat: {name} {reason}")
