"""Any elementwise optimizer of torch on flat buffers: a model's parameters, gradients and moments in a few tensors.

A step is then a few operations whatever the number of parameters.  torch's own class takes it: it is given each piece
of a buffer as if that were one parameter.  Parameters that got no gradient are skipped, as torch skips them: a buffer
is cut into pieces where histories differ.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer as TorchOptimizer

from warpfold.engine.elementwise import not_elementwise
from warpfold.engine.flat_buffer import FlatBuffer, check_parameter
from warpfold.engine.flat_pieces import PieceOptimizer, States
from warpfold.errors import UserError

CHUNK = 2**20  # numbers whose norm is computed at a time
Kept = dict[nn.Parameter, Tensor]


class GradientReducer(Protocol):
    """What sums gradients over ranks (engine/replicas.py)."""

    def finish(self) -> None:
        """Have the mean gradient in place; p.grad is None where no rank has one.  Called before it is read."""
        ...

    def begin(self) -> None:
        """Have all weights in place after a step, and expect the next one's gradients."""
        ...

    def all_gather(self, number: int, compact: Tensor) -> Tensor:
        """Return the whole flat tensor of `buffers[number]` of what each rank owns.  All ranks call it."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over the ranks that own different parts."""
        ...


class Flat(TorchOptimizer):
    """A torch optimizer whose parameters, gradients and moments lie in flat buffers, with clipping and an average.

    It is used as torch's own: step, zero_grad, param_groups (schedulers change lr there), add_param_group, and
    state_dict, which interchanges with that of torch's class, both ways.
    Parameters become views of buffers: make it when the model is where it stays, of the dtype that it stays in.

    norm: the norm of the last step's gradient before clipping, on the device; None without `clip`.
    buffers: the FlatBuffers.  reducer: what sums gradients over ranks, or None.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        optimizer: type[TorchOptimizer],
        *,
        ema: float | None = None,
        clip: float | None = None,
        master: bool = False,
        **options: Any,
    ) -> None:
        """Lay the parameters out.

        params: a model, its parameters, or groups of them as torch has them.  optimizer: a class whose update of a
        number needs nothing of other numbers: Adam, AdamW, SGD, RMSprop, ...  options: its own (lr=, betas=, ...).
        ema: the share of itself that the moving average of the weights keeps in a step (0.999, say).
        clip: the greatest norm of the gradient, as of `torch.nn.utils.clip_grad_norm_` over all parameters.
        master: keep weights that are in 16 bits in fp32, too, and update those.
        Errors: UserError for an optimizer that is not elementwise, and for parameters that cannot lie in a buffer.
        """
        if ema is not None and not 0 <= ema < 1:
            raise UserError(f"Flat: ema = {ema} is not at least 0 and below 1; 0.999 is usual, None switches it off")
        if clip is not None and not clip > 0:
            raise UserError(f"Flat: clip = {clip} is not positive; None switches it off")
        if reason := not_elementwise(optimizer, options):
            raise UserError(f"Flat: {reason}")
        self.optimizer, self.options, self.ema, self.clip, self.master = optimizer, options, ema, clip, master
        self.norm: Tensor | None = None
        self.reducer: GradientReducer | None = None
        self.buffers: list[FlatBuffer] = []
        self._names: dict[nn.Parameter, str] = {}
        self._outside: list[nn.Parameter] = []  # frozen ones
        self._held: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []  # where the model has them
        self._laid_out = self._begun = False  # begun: a step was taken, or a state taken over
        self._pieces: PieceOptimizer
        if isinstance(params, nn.Module):
            self._names = {p: name for name, p in params.named_parameters()}
            every = [module._parameters for module in params.modules()]
            self._held = [(holder, key, p) for holder in every for key, p in holder.items() if p is not None]
            params = list(params.parameters())
        try:
            defaults = optimizer([torch.zeros(1)], **options).defaults
            super().__init__(params, defaults)
        except (TypeError, ValueError) as error:
            raise UserError(f"Flat: {optimizer.__name__} says: {error}") from error
        self._lay_out()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch does, and lay all parameters out anew."""
        if not self._laid_out:
            super().add_param_group(param_group)
            return
        self._alone("add a group before Replicas is made")
        super().add_param_group(param_group)
        self._lay_out()

    def __getstate__(self) -> dict[str, Any]:
        raise UserError(
            "Flat: it cannot be copied or pickled, as its parameters lie in its buffers; make a Flat of the copied "
            "model, and give it load_state_dict(optimizer.state_dict())"
        )

    # A step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with the gradients in p.grad; return what the closure returns, if one is given.

        Errors: RuntimeError where parameters do not lie in the buffers any more, UserError for a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.reducer is not None:
            self.reducer.finish()
        self._check_held()
        if any(p.grad is not None for p in self._outside):
            self._alone("unfreeze parameters before Replicas is made")
            self._lay_out()
        if self._pieces.find_present():
            self._publish()
        if self.clip is not None:
            self._clip(self.clip)
        for buffer in self.buffers:
            buffer.follow_weights()
        self._begun = True
        if self._pieces.step(self.param_groups):
            self._publish()
        for buffer in self.buffers:
            if buffer.master is not None:
                buffer.write_weights(buffer.master)
        if self.ema is not None:
            self._average(self.ema)
        if self.reducer is not None:
            self.reducer.begin()
        return loss

    def _clip(self, most: float) -> None:
        """Scale the gradients such that their norm is at most `most`."""
        gradients = self._pieces.gradients()
        if not self.buffers:
            return
        squares = torch.zeros((), dtype=torch.float64, device=self.buffers[0].weights.device)
        for kind in {(g.device, g.dtype) for g in gradients}:
            chunks = [chunk for g in gradients if (g.device, g.dtype) == kind for chunk in g.split(CHUNK)]
            norms = torch._foreach_norm(chunks, 2, torch.promote_types(kind[1], torch.float32))
            squares += torch.stack(list(norms)).double().square().sum().to(squares.device)
        if self.reducer is not None:
            squares = self.reducer.sum(squares)
        norm = squares.sqrt()
        self.norm = norm.to(torch.float32)
        factor = (most / (norm + 1e-6)).clamp(max=1.0)  # torch.nn.utils.clip_grad_norm_ has the 1e-6
        if factor.device.type == "cpu" and factor == 1:  # reading a number of a CPU waits for nothing
            return
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))

    def _average(self, ema: float) -> None:
        """Have the average follow the weights."""
        for buffer in self.buffers:
            assert buffer.average is not None
            now = buffer.owned(buffer.weights) if buffer.master is None else buffer.master
            buffer.average.lerp_(now.to(buffer.average.dtype), 1 - ema)

    # The average

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the model the moving average of its weights within the block; without `ema` that is an error.

        Buffers of modules (running statistics) and frozen parameters are as they are.
        """
        if self.ema is None:
            raise UserError("Flat: there is no average of the weights; make it with ema=0.999, say")
        trained = [buffer.weights.clone() for buffer in self.buffers]
        with torch.no_grad():
            for number, buffer in enumerate(self.buffers):
                assert buffer.average is not None
                buffer.weights.copy_(self._gathered(number, buffer.average))
        try:
            yield
        finally:
            for buffer, weights in zip(self.buffers, trained):
                buffer.weights.copy_(weights)

    def averaged_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return a copy of the model's state_dict with averaged weights, and buffers as they are."""
        with self.averaged():
            return {name: value.clone() for name, value in model.state_dict().items()}

    # The state

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's class has it, with "average" and "master" (a tensor for each parameter) beside.

        "cuts" says where pieces begin, for a run that continues to the bit.  The tensors are views, as torch's are.
        """
        packed = super().state_dict()
        index = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        packed["state"] = {index[p]: state for p, state in self._whole().items() if state}
        for kind in ("average", "master"):
            if found := self._kept(kind):
                packed[kind] = {index[p]: value for p, value in found.items()}
        packed["cuts"] = [index[list(b.parameters.values())[i]] for b in self.buffers for i in sorted(b.cuts)]
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state of this class, or of torch's, whose lack of an average begins one with the weights."""
        super().load_state_dict(dict(state_dict))
        self._begun = True
        every = [p for group in self.param_groups for p in group["params"]]
        states = {p: self.state[p] for p in every if p in self.state}
        if self.master:  # torch has cast them to 16 bits
            states = {p: dict(state_dict["state"][i]) for i, p in enumerate(every) if p in states}
        average, master = ({every[i]: x for i, x in state_dict.get(k, {}).items()} for k in ("average", "master"))
        self._fill(states, average, master, {every[i] for i in state_dict.get("cuts", ())})

    def own(self, pieces: list[list[slice]]) -> None:
        """Update from now on only these slices of each buffer; other ranks update the rest, and `reducer` gathers.

        Slices begin and end at multiples of buckets.ALIGN and ascend.  The state is kept for them alone.
        """
        states, average, master = self._whole(), self._kept("average"), self._kept("master")
        if not self._begun:  # the weights may be another rank's by now
            average, master = {}, {}
        for buffer, own in zip(self.buffers, pieces, strict=True):
            buffer.own = own
        self._fill(states, average, master, set())

    # How it lies

    def _lay_out(self) -> None:
        """Lay out all parameters that are trained, and keep what was kept of them."""
        states = self._whole() if self._laid_out else {}
        average, master = self._kept("average"), self._kept("master")
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        found: dict[tuple[int, torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
        self._outside = []
        seen: set[nn.Parameter] = set()
        for number, group in enumerate(self.param_groups):
            names = group.get(
                "param_names", [self._names.get(p, f"{number}.{i}") for i, p in enumerate(group["params"])]
            )
            for name, p in zip(names, group["params"]):
                if p in seen:
                    raise UserError(f"Flat: {name} is given twice; give each parameter once")
                seen.add(p)
                if not p.requires_grad and p.grad is None:
                    self._outside.append(p)
                    continue
                check_parameter(name, p)
                if p.numel():
                    found.setdefault((number, p.dtype, p.device), {})[name] = p
        self.buffers = [FlatBuffer(key[0], named, ranks, self.master) for key, named in found.items()]
        self._fill(states, average, master, set())
        self._laid_out = True

    def _fill(self, states: States, average: Kept, master: Kept, cuts: Collection[nn.Parameter]) -> None:
        """Have the buffers hold a state of each parameter; what it lacks begins anew."""
        for buffer in self.buffers:
            buffer.cut_at(i for i, p in enumerate(buffer.parameters.values()) if p in cuts)
            wide = torch.promote_types(buffer.weights.dtype, torch.float32)
            if buffer.master is not None:
                named = {name: master.get(p, p.detach()) for name, p in buffer.parameters.items()}
                buffer.master = buffer.joined(named, wide)
            if self.ema is not None:
                named = {name: average.get(p, master.get(p, p.detach())) for name, p in buffer.parameters.items()}
                buffer.average = buffer.joined(named, wide)
        self._pieces = PieceOptimizer(self.optimizer, self.options, self.param_groups, self.buffers, states)
        self._publish()

    def _publish(self) -> None:
        """Show in `state` what is kept of each parameter."""
        self.state = defaultdict(dict)
        for p, state in self._pieces.live().items():
            self.state[p] = state

    def _whole(self) -> States:
        return self._pieces.whole(self.param_groups, self.reducer)

    def _kept(self, kind: str) -> Kept:
        """Return the "average" or "master" of each parameter, where there are any."""
        found: Kept = {}
        for number, buffer in enumerate(self.buffers):
            flat: Tensor | None = getattr(buffer, kind)
            if flat is not None:
                whole = self._gathered(number, flat)
                found |= {p: buffer.view(whole, name) for name, p in buffer.parameters.items()}
        return found

    def _gathered(self, number: int, compact: Tensor) -> Tensor:
        """Return a whole flat tensor of what each rank owns."""
        if not self.buffers[number].sharded:
            return compact
        assert self.reducer is not None
        return self.reducer.all_gather(number, compact)

    def _check_held(self) -> None:
        """Make sure that the model still has these parameters: others would not be trained, silently."""
        for holder, key, p in self._held:
            if holder.get(key) is not p:
                raise RuntimeError(
                    f"{self._names[p]}: the model has another parameter in its place since the optimizer was made "
                    "(load_state_dict(assign=True), a parametrization, fully_shard); make the optimizer afterwards"
                )

    def _alone(self, cure: str) -> None:
        if self.reducer is not None:
            raise UserError(f"Flat: its buffers are being summed over ranks and cannot be laid out anew; {cure}")
