"""AlphaFold's optimizer (Supp. 1.11.3): per-example gradient clipping, Adam on the mean, and averaged weights.

All parameters are in one flat buffer (engine/packed.py), and so are their gradients, Adam's moments and the moving
average.  Clipping, Adam and averaging are therefore a few operations instead of thousands of small ones, and the
gradients of several ranks are summed in a few buckets (parallel/reducer.py).
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from warpfold.data.load.schedule import share_of
from warpfold.engine.packed import PackedWeights
from warpfold.errors import UserError
from warpfold.ops.adam import adam_step
from warpfold.ops.dispatch import widen
from warpfold.parallel.compress import CompressionConfig
from warpfold.parallel.exchange import ALIGN, Segment, SyncConfig
from warpfold.parallel.mesh import Mesh
from warpfold.parallel.reducer import Reducer, check_replicas, row_checksums

FIRST_LOSS_SCALE = 2.0**16
MAX_LOSS_SCALE = 2.0**24
SCALE_GROWTH_STEPS = 2_000  # without an overflow
DIGEST_CHUNK = 2**22  # elements per checksum, 64 MiB scratch memory


class LossScale:
    """Scale the loss for gradients in fp16 by a power of two on the device (Micikevicius et al. 2018, section 3.2).

    In fp16 numbers below 6e-8 are zero, and numbers above 65,504 are infinite.  The loss is multiplied before the
    backward pass, so that small gradients keep their digits.  The gradients of the parameters, which are summed in
    fp32, are divided by the scale, which restores the unscaled values.
    The scale is halved after a step in which a gradient overflowed, and doubled after `SCALE_GROWTH_STEPS` steps
    without an overflow.  It stays between 1 and `MAX_LOSS_SCALE`.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), FIRST_LOSS_SCALE, device=device)
        self.steps = torch.zeros((), device=device)  # since the last change

    def overflowed(self, norm: Tensor, loss_is_finite: Tensor) -> Tensor:
        """Whether a smaller scale may make the norm of a gradient finite, as a bool tensor.

        At a scale of 1, or if the loss itself is not finite, the example has failed.
        """
        return loss_is_finite & ~norm.isfinite() & (self.scale > 1)

    def update(self, overflowed: Tensor) -> None:
        """Update the scale at the end of a step.  overflowed: whether a gradient of the step overflowed."""
        grown = self.steps + 1 >= SCALE_GROWTH_STEPS
        grown_scale = torch.where(grown, (2 * self.scale).clamp(max=MAX_LOSS_SCALE), self.scale)
        self.scale.copy_(torch.where(overflowed, (self.scale / 2).clamp(min=1), grown_scale))
        self.steps.copy_(torch.where(overflowed | grown, 0, self.steps + 1))

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint: "loss_scale.scale" and "loss_scale.steps"."""
        return {"loss_scale.scale": self.scale, "loss_scale.steps": self.steps}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore a `state`.  A run without a scale so far begins with the first scale."""
        for name, tensor in self.state().items():
            if name in state:
                tensor.copy_(state[name])


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """[optim]: Supp. 1.11.3 and 1.11.7.  Counts are in steps of 128 samples.

    name: the update rule, one of `RULES`.  "lamb" and "lars" are for large batches and use weight_decay.
    decay: how the learning rate falls to decay_factor of its value.  "step" (the paper's): at once at
        decay_after_steps.  "linear" and "cosine": over the decay_steps after it.
    clip: the gradient that clip_norm bounds, that of each "example" (the paper's), or the mean of a "step".
    average: the average of the weights.  "exponential" (the paper's): with average_decay.  "uniform": the mean of the
        weights after each step from average_from on (Izmailov et al. 2018), and exponential before.
    """

    name: str = "adam"
    learning_rate: float = 1e-3
    warmup_steps: int = 1_000  # 128,000 samples
    decay: Literal["step", "linear", "cosine"] = "step"
    decay_after_steps: int = 50_000  # 6,400,000 samples
    decay_steps: int = 0
    decay_factor: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.0
    # With lars, the share of a parameter's norm that a step of rate 1 may change.
    trust: float = 0.001
    clip: Literal["example", "step"] = "example"
    clip_norm: float = 0.1
    average: Literal["exponential", "uniform"] = "exponential"
    average_decay: float = 0.999
    average_from: int = 0
    # Examples per step.  Data ranks share them, and the first ranks have one more if the division has a remainder.
    accumulate: int = 1
    compression: CompressionConfig = field(default_factory=CompressionConfig)

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ValueError("accumulate must be at least 1")
        if (self.decay == "step") != (self.decay_steps == 0) or self.decay_steps < 0:
            raise ValueError(
                'decay = "linear" and "cosine" need decay_steps, over which the rate falls; "step" has none'
            )
        if not self.clip_norm > 0:
            raise ValueError("clip_norm must be positive. Use inf to switch clipping off.")
        if not 0 <= self.average_decay < 1:
            raise ValueError("average_decay must be at least 0 and below 1")
        if self.average_from < 0 or (self.average_from and self.average == "exponential"):
            raise ValueError(
                'average_from is the first step of average = "uniform". Use a number of at least 0, and 0 with '
                '"exponential".'
            )
        if self.name not in RULES:
            raise ValueError(f'name = "{self.name}" is not one of {", ".join(RULES)}')
        if self.weight_decay and not RULES[self.name].decays_weights:
            decaying_rules = [name for name, rule in RULES.items() if rule.decays_weights]
            raise ValueError(f'name = "{self.name}" has no weight_decay. Use {" or ".join(decaying_rules)}.')
        if self.clip == "step" and self.compression.method != "none":
            raise ValueError('compression needs clip = "example": the error that it carries over must be finite')


class Rule(ABC):
    """Base class of update rules, which apply a gradient to the flat shard of the weights that this rank owns.

    To add a rule, write a subclass of `PlainRule`, name it in `RULES`, and write its definition in
    tests/engine/test_optim.py.  `optim.name` then finds it, and checkpoints include its state.
    A rule may have two kinds of state, which checkpoints store for any number of ranks:

    moments     flat tensors of the shard's size, sharded like the weights; in checkpoints "moment1.PARAMETER" ...
    replicated  tensors of any shape, equal on all ranks, such as the number of steps, a number for each parameter, or
                factors of a moment by row and column (summed over the shards); in checkpoints under their own names
    """

    moment_names: ClassVar[tuple[str, ...]] = ()
    decays_weights: ClassVar[bool] = True  # uses optim.weight_decay

    def __init__(
        self,
        config: OptimConfig,
        weights: Tensor,
        segments: Sequence[Segment],
        names: Sequence[str],
        sum_shards: Callable[[Tensor], Tensor],
    ) -> None:
        """weights: the shard.  segments: the parts of parameters in the shard.  names: of all parameters.

        sum_shards: sums a tensor in place over the ranks that own the other shards.
        """
        self.config, self.weights, self._sum_shards, self._names = config, weights, sum_shards, len(names)
        # A uniform average depends on the step, so the optimizer updates it after the rule.
        self.average_decay = config.average_decay if config.average == "exponential" else 1.0
        self.moments = {name: torch.zeros_like(weights) for name in self.moment_names}
        # float32, as torch's fused Adam requires.
        self.steps = torch.zeros((), device=weights.device)
        self.replicated = {"steps": self.steps}
        number = {name: i for i, name in enumerate(names)}
        # Runs of rows of ALIGN elements.  Parameters begin at multiples of ALIGN, so a row never has two of them.  The
        # padding between parameters belongs to an additional owner with the last number.
        owners, lengths, end = [], [], 0
        for segment in segments:
            start, stop = segment.where.start // ALIGN, -(-segment.where.stop // ALIGN)
            owners += [len(names), number[segment.name]]
            lengths += [start - end, stop - start]
            end = stop
        owners.append(len(names))
        lengths.append(len(weights) // ALIGN - end)
        self._owners = torch.tensor(owners, device=weights.device)
        self._lengths, self._rows = torch.tensor(lengths, device=weights.device), sum(lengths)

    @abstractmethod
    def apply(
        self, gradient: Tensor, scale: Tensor, used: Tensor, rate: Tensor, average: Tensor, packed: Tensor | None
    ) -> None:
        """Update the weights, their moving average, and their packed copy in another dtype in place.

        gradient: this rank's shard, which may be overwritten.  The mean gradient is `gradient * scale`.
        used: if False, nothing changes, whatever the gradient contains.
        All numbers are tensors on the device, so that the host does not wait.
        """

    def norms(self, flat: Tensor) -> Tensor:
        """Compute the norm of each parameter, [parameters], in a flat vector.  flat: this rank's shard of it."""
        rows = widen(flat.view(-1, ALIGN).square().sum(1))
        squares = rows.new_zeros(self._names + 1)
        if flat.device.type == "mps":
            # MPS lacks segment_reduce.  index_add_ adds in no fixed order.
            owners = self._owners.repeat_interleave(self._lengths, output_size=self._rows)
            return self._sum_shards(squares.index_add_(0, owners, rows))[:-1].sqrt().to(flat.dtype)
        # unsafe skips a check of the lengths that would wait for the device.
        sums = torch.segment_reduce(rows, "sum", lengths=self._lengths, unsafe=True)
        # A shard has at most one part of each parameter.
        squares[self._owners[1::2]] = sums[1::2]
        return self._sum_shards(squares)[:-1].sqrt().to(flat.dtype)

    def per_row(self, numbers: Tensor) -> Tensor:
        """Repeat a number per parameter over its rows of `ALIGN` elements, [rows, 1]; 1 for padding."""
        padded = torch.cat([numbers, numbers.new_ones(1)])
        return padded[self._owners].repeat_interleave(self._lengths, output_size=self._rows)[:, None]


class PlainRule(Rule):
    """A rule whose `step` is written in plain torch, and is undone if the step is not used."""

    def apply(
        self, gradient: Tensor, scale: Tensor, used: Tensor, rate: Tensor, average: Tensor, packed: Tensor | None
    ) -> None:
        """Take the rule's step, and restore all state if the step is not used."""
        changing = [self.weights, *self.moments.values(), *self.replicated.values()]
        before = [tensor.clone() for tensor in changing]
        self.steps += 1
        self.step(rate, torch.where(used, gradient.mul_(scale), 0))
        for tensor, old in zip(changing, before):
            tensor.copy_(torch.where(used, tensor, old))
        average.copy_(torch.where(used, average.lerp(self.weights, 1 - self.average_decay), average))
        if packed is not None:
            packed.copy_(self.weights)

    @abstractmethod
    def step(self, rate: Tensor, gradient: Tensor) -> None:
        """Update the shard's weights in place.  gradient: this rank's shard of the mean.  `steps` includes this one."""


class Adam(Rule):
    """Adam (Kingma and Ba 2015, algorithm 1) as one operation with one pass over the buffers."""

    moment_names = ("moment1", "moment2")
    decays_weights = False

    def apply(
        self, gradient: Tensor, scale: Tensor, used: Tensor, rate: Tensor, average: Tensor, packed: Tensor | None
    ) -> None:
        c, m, v = self.config, self.moments["moment1"], self.moments["moment2"]
        self.steps += used
        numbers = used, scale.to(m.dtype), rate.to(m.dtype), self.steps
        factors = c.beta1, c.beta2, c.eps, self.average_decay
        adam_step(self.weights, gradient, m, v, average, packed, *numbers, *factors)


class Lamb(PlainRule):
    """LAMB (You et al. 2020, algorithm 2): Adam's step, scaled for each parameter to the norm of its weights.

    The scaling function of norms is the identity.  If a parameter or its step is zero, the step is not scaled.
    """

    moment_names = ("moment1", "moment2")

    def step(self, rate: Tensor, gradient: Tensor) -> None:
        """Update the moments, and subtract their scaled unbiased ratio plus weight decay."""
        c, weights = self.config, self.weights
        m, v = self.moments["moment1"], self.moments["moment2"]
        m.lerp_(gradient, 1 - c.beta1)
        v.mul_(c.beta2).addcmul_(gradient, gradient, value=1 - c.beta2)
        # A tensor, since the host would wait for a number.
        steps = widen(self.steps)
        root = (v / (1 - c.beta2**steps)).sqrt_().add_(c.eps)
        update = (m / (1 - c.beta1**steps)).div_(root).add_(weights, alpha=c.weight_decay)
        have, want = self.norms(weights), self.norms(update)
        trust = torch.where((have > 0) & (want > 0), have / want, 1)
        weights.view(-1, ALIGN).sub_(update.view(-1, ALIGN).mul_(rate * self.per_row(trust)))


class Lars(PlainRule):
    """LARS (You et al. 2017, algorithm 1): momentum SGD with the rate trust |w| / (|g| + decay |w|) per parameter.

    If a parameter or its gradient is zero, the global rate applies.  The momentum is beta1.
    """

    moment_names = ("moment1",)

    def step(self, rate: Tensor, gradient: Tensor) -> None:
        c, weights = self.config, self.weights
        have, slope = self.norms(weights), self.norms(gradient)
        local = torch.where((have > 0) & (slope > 0), c.trust * have / (slope + c.weight_decay * have), 1)
        update = gradient.add(weights, alpha=c.weight_decay).view(-1, ALIGN).mul_(rate * self.per_row(local))
        weights.sub_(self.moments["moment1"].mul_(c.beta1).add_(update.view(-1)))


RULES: dict[str, type[Rule]] = {"adam": Adam, "lamb": Lamb, "lars": Lars}


def learning_rate(config: OptimConfig, step: int) -> float:
    """Compute the rate of step 0, 1, ...: a linear rise, then constant, then lower (Supp. 1.11.3; `OptimConfig`)."""
    rise = min(1.0, (step + 1) / max(1, config.warmup_steps))
    if config.decay == "step":
        fallen = float(step >= config.decay_after_steps)
    else:
        fallen = min(1.0, max(0.0, (step + 1 - config.decay_after_steps) / config.decay_steps))
        fallen = fallen if config.decay == "linear" else (1 - math.cos(math.pi * fallen)) / 2
    return config.learning_rate * rise * (1 + fallen * (config.decay_factor - 1))


def unsupported_batch(config: OptimConfig, data: int, batch: int) -> str | None:
    """Return the reason why `data` ranks cannot process a step's examples in batches of `batch`; None if they can."""
    if batch > 1 and config.clip == "example":
        return (
            f"plan.batch = {batch}: one backward pass yields the sum of its examples' gradients, and optim.clip = "
            '"example" needs the norm of each. Set optim.clip = "step", or plan.batch = 1.'
        )
    if batch > 1 and config.accumulate % (data * batch):
        return (
            f"plan.batch = {batch} does not divide the examples of a step that each rank has (optim.accumulate = "
            f"{config.accumulate} over plan.data = {data}). Choose a divisor."
        )
    return None


class Optimizer:
    """Apply an update rule to the mean of clipped per-example gradients, and average the weights.

    Call `collect(loss)` after each example's `loss.backward()`, and `step(i)` after `share` of them.
    The model's parameters, of one dtype and on one device, become views of one buffer, so the model must not be moved
    afterwards.  A second Optimizer for the model takes over its parameters, and the first then raises an error.
    With several ranks, all must call every method in the same order.  If shares differ, a rank with one example less
    skips the first `collect`, in which data ranks do not communicate.  Each rank updates its own shard, and the weights
    are complete again after `step`.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        mesh: Mesh | None = None,
        sync: SyncConfig | None = None,
        *,
        ranks_per_node: int | None = None,
        dtype: torch.dtype | None = None,
        scaling: bool = False,
        batch: int = 1,
        uses_graphs: bool = False,
        skip_whole_steps: bool = False,
    ) -> None:
        """Move the parameters of `model` into one buffer.

        mesh: None for one process.
        ranks_per_node: needed for hierarchical sums; torchrun's LOCAL_WORLD_SIZE.
        dtype: of the operations; None for the dtype of the parameters.
        scaling: scale losses (`scaled`) for gradients in fp16.
        batch: examples per backward pass.
        uses_graphs: passes are recorded as graphs.
        skip_whole_steps: skip the whole step if an example is not finite.  Otherwise only the example is skipped.
            An example whose gradient overflowed in fp16 does not count as not finite.
        Errors: UserError for `sync` settings, a batch or a number of examples that do not fit the ranks; ReplicaError
        if the first weights of the ranks differ.
        """
        self.config, self.mesh, self.sync = config, mesh or Mesh(), sync or SyncConfig()
        data = self.mesh.data
        if data.size > config.accumulate:
            raise UserError(
                f"optim.accumulate = {config.accumulate} examples per step cannot be shared by plan.data = {data.size} "
                "ranks: each of them needs one. Choose a smaller plan.data."
            )
        if reason := unsupported_batch(config, data.size, batch):
            raise UserError(reason)
        # Examples per step of this rank, and of the first rank, which has the most.
        self.share = share_of(config.accumulate, data.size, data.rank)
        self.most = share_of(config.accumulate, data.size, 0)
        self.batch, self.skip_whole_steps = batch, skip_whole_steps
        bucket_bytes = self.sync.bucket_bytes(self.mesh.data.size)
        self.packed = packed = PackedWeights(model, dtype, True, bucket_bytes, self.mesh.world.size)
        self.layout, self.weights, named = packed.layout, packed.weights, packed.parameters
        assert packed.gradient is not None
        # The gradient of the current example.  Every p.grad is a view of it.
        self.gradient = packed.gradient
        # Collective: different first weights would diverge silently.
        check_replicas(self.weights, self.layout, self.mesh.world, "at the start")
        compression = config.compression
        self.reducer = Reducer(
            named, self.gradient, self.layout, self.mesh, self.sync, compression, ranks_per_node, uses_graphs
        )
        packed.watch, self.reducer.settle = self.reducer.watch, packed.settle
        self.strategy_seconds = self.reducer.choose(hidden=self.most == 1 or config.clip == "step")
        self.total = torch.zeros_like(self.reducer.summed)  # clipped gradients of this step
        self.owned = self.reducer.local_shard(self.weights)
        self.average = self.owned.clone()
        # Graphs record the addresses of the following tensors, so these are only written in place.
        self.rate = widen(torch.zeros((), device=self.weights.device))
        self.newest = self.owned.new_zeros(())  # weight of the newest weights in a uniform average
        self.used, self.overflows = torch.zeros_like(self.rate), torch.zeros_like(self.rate)  # example counts
        self.overflowed = torch.zeros_like(self.rate, dtype=torch.bool)  # the last example
        self.loss_scale = LossScale(self.weights.device) if scaling else None
        segments = self.layout.segments(self.reducer.shards, self.reducer.shard_index)
        self.rule = RULES[config.name](
            config, self.owned, segments, list(self.layout.places), self.reducer.sum_of_shards
        )
        self._begin_step()

    def _clear_counts(self) -> None:
        self.used.zero_()
        self.overflows.zero_()

    def _begin_step(self) -> None:
        """Prepare the first backward pass of a step.

        Ranks with smaller shares count from a higher number, so that all ranks reach their last example together.
        """
        self._prepare(self.most - self.share)

    def _prepare(self, examples: int) -> None:
        """Prepare the next backward pass.  examples: collected since the last step by the rank that has the most.

        The data ranks may begin to exchange gradients during the backward pass of the last example, unless its clipping
        factor must be known first.  With one example per rank the gradient can be scaled after its arrival.
        """
        self.examples = examples
        self.packed.release()
        is_only_pass = self.most == self.batch
        scales_later = is_only_pass and self.reducer.exchange.late_factors
        early = examples == self.most - self.batch and (self.config.clip == "step" or scales_later)
        self.reducer.begin(early, add_to=None if is_only_pass else self.total)

    @property
    def sends(self) -> bool:
        """Whether data ranks exchange gradients during the next backward pass."""
        return self.reducer.early

    def scaled(self, loss: Tensor) -> Tensor:
        """Multiply the loss by the loss scale, if there is one.  Call `backward` of the result."""
        return loss if self.loss_scale is None else loss * self.loss_scale.scale

    def collect(self, loss: Tensor | None = None) -> Tensor:
        """Clip the gradient of an example by its global norm, add it to the step's sum, and clear it.

        With clip = "step" the gradient may be that of a batch, and `loss` is the sum of its losses.

        Returns the norm before clipping, equal on all ranks that share the example.  It is NaN if the unscaled `loss`,
        or any rank's part of it, is not finite.  An example whose norm is not finite adds nothing and does not count in
        the mean.  With clip = "step" nothing is clipped here, and one such example makes the whole step change nothing.
        The norm is a tensor on the device, and the host waits only if it reads the norm.
        Errors: RuntimeError if parameters or gradients are no longer in this optimizer's buffers.
        """
        norm = self.add_gradient(loss)
        self.begin_next_example()
        return norm

    def add_gradient(self, loss: Tensor | None = None) -> Tensor:
        """Device part of `collect`.

        A graph can hold it, unless gradients were exchanged in the pass (`sends`), or ranks share the example.
        """
        if not self.packed.in_place:
            raise RuntimeError(
                "weights or gradients are not in this Optimizer's buffers any more: another Optimizer or a Predictor "
                "took over the model, the model was moved to another device or dtype, or a grad was set to None. Do "
                "not call zero_grad: collect clears the gradients."
            )
        # Waits until the sums of this gradient over the ranks that share the example have arrived.
        gradient = self.reducer.finish()
        norm = self.reducer.norm(gradient, data=False, loss=loss) * self._unscale
        used = norm.isfinite()
        self.overflowed.zero_()
        if self.loss_scale is not None:
            # The norm of a zero gradient tells whether all ranks' parts of the loss are finite.
            finite = self.reducer.norm(norm.new_zeros(1), data=False, loss=loss).isfinite()
            self.overflowed.copy_(self.loss_scale.overflowed(norm, finite))
        self.overflows.add_(self.overflowed)
        factor = torch.where(used, self._factor(norm) * self._unscale, 0)
        if self.config.clip == "step":
            if not self.reducer.early:
                self.total.add_(gradient)
        elif self.reducer.early:
            self.reducer.set_clip_factor(factor)
        else:
            # A NaN would survive the multiplication by a factor of zero.
            gradient.masked_fill_(~used, 0)
            self.total.addcmul_(gradient, factor.to(gradient.dtype))
        self.gradient.zero_()
        self.used.add_(used, alpha=self.batch)
        return norm

    def begin_next_example(self) -> None:
        """Host part of `collect`.  After the last example of a step, the exchange of the number of examples begins."""
        self._prepare(self.examples + self.batch)
        if self.examples == self.most:
            self.reducer.count(self.used)

    def step(self, step: int, update: Callable[[], Tensor] | None = None) -> Tensor:
        """Apply the rule to the mean over the used examples, update the average, and return the learning rate.

        If no example was used, weights, moments and average do not change, and the rate is 0.  The device decides this,
        and the rate is a tensor on the device, so that the host does not wait.
        update: called instead of the method `update`, such as a recorded graph of it.
        Errors: ReplicaError if the ranks' weights differ, checked every `sync.check_every` steps.
        """
        self.rate.fill_(learning_rate(self.config, step))
        # The number of weights in the uniform average, including this step's.  Before `average_from` the average is
        # exponential.  At `average_from` the newest weights count fully, which restarts the average.
        averaged = step + 1 - self.config.average_from
        self.newest.fill_(1 / averaged if averaged > 0 else 1 - self.config.average_decay)
        rate = self.update() if update is None else update()
        self._begin_step()
        # Collective: the ranks compare checksums of their weights.
        if self.sync.check_every and (step + 1) % self.sync.check_every == 0:
            check_replicas(self.weights, self.layout, self.mesh.world, f"after step {step + 1}")
        return rate

    def update(self) -> Tensor:
        """Take a step at the rate in the tensor `rate`; return that rate, or 0 if nothing changed.

        No number of the host is used, so a graph of the device can hold this.
        """
        # The number of used examples of all data ranks, and the mean of their gradients, whose sums were begun before.
        used = self.reducer.used(self.used)
        gradient, scale = self.reducer.mean(self.total, used / self.mesh.data.size)
        overflows = None if self.loss_scale is None else self.reducer.sum_over_data(self.overflows)
        is_taken = used > 0
        if self.skip_whole_steps:
            is_taken &= used + (0 if overflows is None else overflows) == self.config.accumulate
        if self.config.clip == "step":
            scale = scale * self._unscale
            norm = self.reducer.norm(gradient, data=True) * scale
            scale = scale * self._factor(norm)
            is_taken = (used == self.config.accumulate) & norm.isfinite()
        owns_all = self.owned is self.weights
        self.rule.apply(gradient, scale, is_taken, self.rate, self.average, self.packed.copy if owns_all else None)
        if self.config.average == "uniform":
            # Weights that a skipped step left unchanged count once more.
            self.average.lerp_(self.owned, self.newest)
        if not owns_all:
            # Each rank has updated its own shard.
            self.reducer.all_gather(self.owned, self.weights)
            self.packed.refresh()
        if self.loss_scale is not None and overflows is not None:
            self.loss_scale.update(overflows > 0)
        self.total.zero_()
        self._clear_counts()
        return torch.where(is_taken, self.rate, 0)

    def digest(self) -> Tensor:
        """Compute the SHA-256 digest of this rank's weights and optimizer state: its 32 bytes as int64 [4], on the CPU.

        The device reduces the flat buffers to 64-bit checksums of `DIGEST_CHUNK` elements, and the host hashes these.
        A change of one element always changes the digest.  The host waits for the device.
        """
        scale = {} if self.loss_scale is None else self.loss_scale.state()
        state = [self.weights, *self._sharded().values(), *self.rule.replicated.values(), *scale.values()]
        state += self.reducer.compression_errors()
        chunks = (chunk for x in state for chunk in x.reshape(-1).split(DIGEST_CHUNK))
        sums = torch.cat([row_checksums(chunk[None]) for chunk in chunks])
        return torch.frombuffer(bytearray(hashlib.sha256(sums.cpu().numpy().tobytes()).digest()), dtype=torch.int64)

    def _factor(self, norm: Tensor) -> Tensor:
        """Compute the factor, at most 1, that limits a gradient of this norm to clip_norm; widened."""
        return (self.config.clip_norm / widen(norm).clamp(min=1e-12)).clamp(max=1.0)

    @property
    def _unscale(self) -> Tensor | float:
        """The factor that undoes the loss scale, a power of two."""
        return 1.0 if self.loss_scale is None else 1 / self.loss_scale.scale

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the model's weights by their average within the context.  All ranks enter it together."""
        trained = self.weights.clone()
        self.reducer.all_gather(self.average, self.weights)
        self.packed.refresh()
        try:
            yield
        finally:
            self.weights.copy_(trained)
            self.packed.refresh()

    def named_weights(self, weights: Tensor | None = None) -> dict[str, Tensor]:
        """Return the entries "weights.NAME" of `state`, without communication.  weights: a copy of earlier weights."""
        flat = self.weights if weights is None else weights
        return {f"weights.{name}": self.layout.view(flat, name) for name in self.layout.places}

    def state(self) -> dict[str, Tensor]:
        """Gather the tensors of a checkpoint: "weights.NAME", "average.NAME", moments such as "moment1.NAME", "steps",
        and the state of the loss scale and the reducer.

        The shards are joined, so a checkpoint fits any number of ranks.  All ranks call this, and world rank 0 gets all
        tensors.
        """
        named = self.named_weights()
        for kind, shard in self._sharded().items():
            whole = self.reducer.all_gather(shard, torch.empty_like(self.weights)) if self.reducer.shards > 1 else shard
            named |= {f"{kind}.{name}": self.layout.view(whole, name) for name in self.layout.places}
        scale = {} if self.loss_scale is None else self.loss_scale.state()
        return {**named, **self.rule.replicated, **scale, **self.reducer.state()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore a `state`.  All bits are restored if the number of ranks is that of the saved state.

        Errors: KeyError for a missing name, RuntimeError for a tensor of another shape, ReplicaError if the ranks get
        different weights.
        """
        self.reducer.restore(state)
        for kind, shard in {"weights": self.owned, **self._sharded()}.items():
            whole = torch.zeros_like(self.weights)
            for name in self.layout.places:
                self.layout.view(whole, name).copy_(state[f"{kind}.{name}"])
            shard.copy_(self.reducer.local_shard(whole))
            if kind == "weights":
                self.weights.copy_(whole)
                self.packed.refresh()
        for name, tensor in self.rule.replicated.items():
            tensor.copy_(state[name])
        if self.loss_scale is not None:
            self.loss_scale.restore(state)
        self._clear_counts()
        self._begin_step()
        check_replicas(self.weights, self.layout, self.mesh.world, "after reading a checkpoint")

    def take_moments(self, state: Mapping[str, Tensor]) -> list[str]:
        """Load moments and their number of steps from the `state` of another run with the same rule.

        Returns the names of the parameters whose moments are missing there or have another shape.  Their moments stay
        zero.
        """
        lacking = dict[str, None]()
        for kind, shard in self.rule.moments.items():
            whole = torch.zeros_like(self.weights)
            for name in self.layout.places:
                view, moment = self.layout.view(whole, name), state.get(f"{kind}.{name}")
                if moment is not None and moment.shape == view.shape:
                    view.copy_(moment)
                else:
                    lacking[name] = None
            shard.copy_(self.reducer.local_shard(whole))
        self.rule.steps.copy_(state["steps"])
        return list(lacking)

    def _sharded(self) -> dict[str, Tensor]:
        return {"average": self.average, **self.rule.moments}
