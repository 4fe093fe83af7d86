"""AlphaFold's optimizer (Supp. 1.11.3): each example's gradient is clipped, the mean feeds Adam, weights are averaged.

All parameters live in one flat buffer (engine/packed.py), and so do their gradients, Adam's moments and the moving
average.  Clipping, Adam and averaging are then a handful of operations whatever the number of parameters, instead of
thousands of tiny ones, and gradients of several ranks are summed in few pieces (parallel/reducer.py).
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

FIRST_SCALE = 2.0**16  # of a loss in fp16
MOST_SCALE = 2.0**24
SCALE_GROWTH = 2_000  # steps without an overflow, after which the scale is doubled
DIGEST_CHUNK = 2**22  # elements of a flat buffer in one checksum, for which the device needs 64 MiB of scratch memory


class LossScale:
    """Scale the loss for gradients in fp16 (Micikevicius et al. 2018, section 3.2): a power of two, on the device.

    Below 6e-8 a number is zero in fp16, and above 65,504 infinite.  The loss is multiplied before the backward pass, so
    that small gradients keep their digits, and the gradients of the parameters, which are summed in fp32, are divided:
    what is computed stays the same.  The scale is halved after a step in which a gradient overflowed, and doubled after
    `SCALE_GROWTH` steps in which none did; from 1 to `MOST_SCALE`.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), FIRST_SCALE, device=device)
        self.steps = torch.zeros((), device=device)  # since the scale was changed

    def overflowed(self, norm: Tensor, loss_is_finite: Tensor) -> Tensor:
        """Tell whether a smaller scale may bring the norm of a gradient below infinity.

        At a scale of 1, or where the loss itself is not finite, it cannot: that is a failure of the example.
        """
        return loss_is_finite & ~norm.isfinite() & (self.scale > 1)

    def update(self, overflowed: Tensor) -> None:
        """End a step; overflowed: whether any gradient of it has."""
        grown = self.steps + 1 >= SCALE_GROWTH
        up = torch.where(grown, (2 * self.scale).clamp(max=MOST_SCALE), self.scale)
        self.scale.copy_(torch.where(overflowed, (self.scale / 2).clamp(min=1), up))
        self.steps.copy_(torch.where(overflowed | grown, 0, self.steps + 1))

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint: "loss_scale.scale" and "loss_scale.steps"."""
        return {"loss_scale.scale": self.scale, "loss_scale.steps": self.steps}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Bring back a `state`; a run that had no scale so far begins with the first."""
        for name, tensor in self.state().items():
            if name in state:
                tensor.copy_(state[name])


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """[optim]: Supp. 1.11.3 and 1.11.7; its counts of samples are steps here, one step being 128 samples there.

    name: one of RULES; "lamb" and "lars" are for large batches and use weight_decay.
    decay: how the rate falls to decay_factor of itself: at once, at decay_after_steps (the paper's), or from there on,
        over decay_steps, by a line or half a cosine; then it stays.
    clip: what clip_norm bounds, each "example"'s gradient (the paper's), or the "step"'s, the mean over all examples.
    average: of weights: "exponential" (the paper's), of which average_decay stays at each step; or from average_from
        steps on "uniform", the mean of the weights after each step since (Izmailov et al. 2018).
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
    trust: float = 0.001  # lars: the share of a parameter's norm that a step of rate 1 may change
    clip: Literal["example", "step"] = "example"
    clip_norm: float = 0.1
    average: Literal["exponential", "uniform"] = "exponential"
    average_decay: float = 0.999
    average_from: int = 0
    accumulate: int = 1  # examples per step; data ranks share them, the first have one more where they must
    compression: CompressionConfig = field(default_factory=CompressionConfig)

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ValueError("accumulate must be at least 1")
        if (self.decay == "step") != (self.decay_steps == 0) or self.decay_steps < 0:
            raise ValueError(
                'decay = "linear" and "cosine" need decay_steps, over which the rate falls; "step" has none'
            )
        if not self.clip_norm > 0:
            raise ValueError("clip_norm must be positive; inf switches clipping off")
        if not 0 <= self.average_decay < 1:
            raise ValueError("average_decay must be at least 0 and below 1")
        if self.average_from < 0 or (self.average_from and self.average == "exponential"):
            raise ValueError('average_from is the step from which average = "uniform" begins; leave it out, or at 0')
        if self.name not in RULES:
            raise ValueError(f'name = "{self.name}" is not one of {", ".join(RULES)}')
        if self.weight_decay and not RULES[self.name].decays_weights:
            others = [name for name, rule in RULES.items() if rule.decays_weights]
            raise ValueError(f'name = "{self.name}" has no weight_decay; {" and ".join(others)} have')
        if self.clip == "step" and self.compression.method != "none":
            raise ValueError('compression needs clip = "example": the error that it carries over must be finite')


class Rule(ABC):
    """One way to change the flat part of the weights that this rank owns by a gradient.

    A new rule is a subclass of `PlainRule` with its name in `RULES`.  `optim.name` then finds it, checkpoints hold its
    state, and tests/engine/test_optim.py runs it against its definition once that is written there.
    A rule may keep two kinds of state; checkpoints hold both, and fit any number of ranks:

    moments     flat tensors of the shard's size, sharded as the weights are; in checkpoints "moment1.PARAMETER" ...
    replicated  tensors of any shape, the same on every rank: the steps taken, a number for each parameter, factors of
                a moment by row and by column (summed over the shards); in checkpoints under their own names
    """

    kept: ClassVar[tuple[str, ...]] = ()  # names of its moments
    decays_weights: ClassVar[bool] = True  # whether it uses optim.weight_decay

    def __init__(
        self,
        config: OptimConfig,
        weights: Tensor,
        segments: Sequence[Segment],
        names: Sequence[str],
        sum_shards: Callable[[Tensor], Tensor],
    ) -> None:
        """weights: the shard.  segments: where in it which part of which parameter lies.  names: of all parameters.

        sum_shards: sums a tensor over the ranks that hold the other shards, in place.
        """
        self.config, self.weights, self._sum_shards, self._names = config, weights, sum_shards, len(names)
        # A uniform average depends on the step; the optimizer updates it after the rule, which leaves it alone.
        self.average_decay = config.average_decay if config.average == "exponential" else 1.0
        self.moments = {name: torch.zeros_like(weights) for name in self.kept}
        self.steps = torch.zeros((), device=weights.device)  # float32, as torch's fused Adam wants it
        self.replicated = {"steps": self.steps}
        number = {name: i for i, name in enumerate(names)}
        # Runs of rows of ALIGN elements: parameters begin at multiples of ALIGN, so no row has two.  What lies between
        # parameters belongs to one more, after the last.
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
    def take(
        self, gradient: Tensor, scale: Tensor, used: Tensor, rate: Tensor, average: Tensor, packed: Tensor | None
    ) -> None:
        """Change the weights in place, their moving average, and their packed copy in another dtype.

        gradient: this rank's shard, which may be written over; times `scale` it is the mean.  used: whether to take the
        step at all: where not, nothing changes, whatever the gradient holds.  Numbers are tensors on the device, which
        the host does not wait for.
        """

    def norms(self, flat: Tensor) -> Tensor:
        """Compute the norm of each parameter, [parameters], of a flat vector of which this rank's shard is `flat`."""
        rows = widen(flat.view(-1, ALIGN).square().sum(1))
        squares = rows.new_zeros(self._names + 1)
        if flat.device.type == "mps":  # which has no segment_reduce; this adds in no fixed order
            owners = self._owners.repeat_interleave(self._lengths, output_size=self._rows)
            return self._sum_shards(squares.index_add_(0, owners, rows))[:-1].sqrt().to(flat.dtype)
        # unsafe: the check of the lengths would wait for the device.
        sums = torch.segment_reduce(rows, "sum", lengths=self._lengths, unsafe=True)
        squares[self._owners[1::2]] = sums[1::2]  # a shard has at most one part of a parameter
        return self._sum_shards(squares)[:-1].sqrt().to(flat.dtype)

    def per_row(self, numbers: Tensor) -> Tensor:
        """Repeat a number for each parameter over its rows of `ALIGN` elements, [rows, 1]; 1 between parameters."""
        padded = torch.cat([numbers, numbers.new_ones(1)])
        return padded[self._owners].repeat_interleave(self._lengths, output_size=self._rows)[:, None]


class PlainRule(Rule):
    """A rule that is written in plain torch, as `step`, and undone where the step is not used."""

    def take(
        self, gradient: Tensor, scale: Tensor, used: Tensor, rate: Tensor, average: Tensor, packed: Tensor | None
    ) -> None:
        """Take the rule's step; then put back what it changed, where the step is not used."""
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
        """Change the shard's weights in place; gradient: the mean, this rank's shard of it; `steps` counts this one."""


class Adam(Rule):
    """Adam (Kingma and Ba 2015, algorithm 1): one operation, one pass over the buffers."""

    kept = ("moment1", "moment2")
    decays_weights = False

    def take(
        self, gradient: Tensor, scale: Tensor, used: Tensor, rate: Tensor, average: Tensor, packed: Tensor | None
    ) -> None:
        c, m, v = self.config, self.moments["moment1"], self.moments["moment2"]
        self.steps += used
        numbers = used, scale.to(m.dtype), rate.to(m.dtype), self.steps
        factors = c.beta1, c.beta2, c.eps, self.average_decay
        adam_step(self.weights, gradient, m, v, average, packed, *numbers, *factors)


class Lamb(PlainRule):
    """LAMB (You et al. 2020, algorithm 2): Adam's step, scaled in each parameter to the norm of its weights.

    The scaling function of norms is the identity; a parameter that is zero, or whose step is, is not scaled.
    """

    kept = ("moment1", "moment2")

    def step(self, rate: Tensor, gradient: Tensor) -> None:
        """Update the moments; subtract their unbiased ratio plus weight decay, scaled."""
        c, weights = self.config, self.weights
        m, v = self.moments["moment1"], self.moments["moment2"]
        m.lerp_(gradient, 1 - c.beta1)
        v.mul_(c.beta2).addcmul_(gradient, gradient, value=1 - c.beta2)
        steps = widen(self.steps)  # stays on the device: reading it would make the host wait
        root = (v / (1 - c.beta2**steps)).sqrt_().add_(c.eps)
        update = (m / (1 - c.beta1**steps)).div_(root).add_(weights, alpha=c.weight_decay)
        have, want = self.norms(weights), self.norms(update)
        trust = torch.where((have > 0) & (want > 0), have / want, 1)
        weights.view(-1, ALIGN).sub_(update.view(-1, ALIGN).mul_(rate * self.per_row(trust)))


class Lars(PlainRule):
    """LARS (You et al. 2017, algorithm 1): momentum SGD whose rate in each parameter is trust |w| / (|g| + decay |w|).

    A parameter that is zero, or has no gradient, keeps the global rate.  The momentum is beta1.
    """

    kept = ("moment1",)

    def step(self, rate: Tensor, gradient: Tensor) -> None:
        c, weights = self.config, self.weights
        have, slope = self.norms(weights), self.norms(gradient)
        local = torch.where((have > 0) & (slope > 0), c.trust * have / (slope + c.weight_decay * have), 1)
        update = gradient.add(weights, alpha=c.weight_decay).view(-1, ALIGN).mul_(rate * self.per_row(local))
        weights.sub_(self.moments["moment1"].mul_(c.beta1).add_(update.view(-1)))


RULES: dict[str, type[Rule]] = {"adam": Adam, "lamb": Lamb, "lars": Lars}


def learning_rate(config: OptimConfig, step: int) -> float:
    """Return the rate of step 0, 1, ...: a linear rise, then constant, then lower (Supp. 1.11.3; `OptimConfig`)."""
    rise = min(1.0, (step + 1) / max(1, config.warmup_steps))
    if config.decay == "step":
        fallen = float(step >= config.decay_after_steps)
    else:
        fallen = min(1.0, max(0.0, (step + 1 - config.decay_after_steps) / config.decay_steps))
        fallen = fallen if config.decay == "linear" else (1 - math.cos(math.pi * fallen)) / 2
    return config.learning_rate * rise * (1 + fallen * (config.decay_factor - 1))


def unsupported_batch(config: OptimConfig, data: int, batch: int) -> str | None:
    """Say why `data` ranks cannot take their shares of a step's examples `batch` at a time; None if they can."""
    if batch > 1 and config.clip == "example":
        return (
            f"plan.batch = {batch}: one backward pass yields the sum of its examples' gradients, and optim.clip = "
            '"example" needs the norm of each; set optim.clip = "step", or leave plan.batch at 1'
        )
    if batch > 1 and config.accumulate % (data * batch):
        return (
            f"plan.batch = {batch} does not divide the examples of a step that each rank has (optim.accumulate = "
            f"{config.accumulate} over plan.data = {data}); choose one that does"
        )
    return None


class Optimizer:
    """Apply a rule to the mean of clipped per-example gradients, and keep the moving average of the weights.

    Call `collect(loss)` after each example's `loss.backward()`, and `step(i)` after `share` of them.
    The model's parameters (of one dtype, on one device) become views of one buffer, so do not move the model
    afterwards.  A second Optimizer of a model takes over its parameters, and the first then raises an error.
    With several ranks, all of them call everything here, at the same times; but where shares differ, one that has an
    example less leaves out the first `collect`, in which data ranks tell each other nothing.  Each updates the shard
    that it owns, and the weights are complete again after `step`.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        mesh: Mesh | None = None,
        sync: SyncConfig | None = None,
        ranks_per_node: int | None = None,
        dtype: torch.dtype | None = None,
        scaling: bool = False,
        batch: int = 1,
        records: bool = False,
        whole: bool = False,
    ) -> None:
        """Move the parameters of `model` into one buffer.

        mesh: None for one process.  ranks_per_node: needed by hierarchical sums; torchrun's LOCAL_WORLD_SIZE.
        dtype: that operations compute in; None: that of the parameters.
        scaling: scale losses (`scaled`) for gradients in fp16.  batch: examples of each backward pass.
        records: whether passes are recorded as graphs.
        whole: an example that is not finite leaves the whole step undone; else it is left out alone.
        Errors: UserError for `sync` settings, a batch or a number of examples that do not fit the ranks, ReplicaError
        where their first weights differ.
        """
        self.config, self.mesh, self.sync = config, mesh or Mesh(), sync or SyncConfig()
        data = self.mesh.data
        if data.size > config.accumulate:
            raise UserError(
                f"optim.accumulate = {config.accumulate} examples per step cannot be shared by plan.data = {data.size} "
                "ranks: each of them needs one; choose a smaller plan.data"
            )
        if reason := unsupported_batch(config, data.size, batch):
            raise UserError(reason)
        self.share = share_of(config.accumulate, data.size, data.rank)  # examples per step of this rank
        self.most = share_of(config.accumulate, data.size, 0)  # and of the first, which no other has more than
        self.batch, self.whole = batch, whole
        bucket_bytes = self.sync.bucket_bytes(self.mesh.data.size)
        self.packed = packed = PackedWeights(model, dtype, True, bucket_bytes, self.mesh.world.size)
        self.layout, self.weights, named = packed.layout, packed.weights, packed.parameters
        assert packed.gradient is not None
        self.gradient = packed.gradient  # of the current example; every p.grad is a view of it
        check_replicas(self.weights, self.layout, self.mesh.world, "at the start")
        compression = config.compression
        ways = self.sync, compression, ranks_per_node, records
        self.reducer = Reducer(named, self.gradient, self.layout, self.mesh, *ways)
        packed.watch, self.reducer.settle = self.reducer.watch, packed.settle
        self.measured = self.reducer.choose(hidden=self.most == 1 or config.clip == "step")
        self.total = torch.zeros_like(self.reducer.summed)  # of the clipped gradients since the last step
        self.owned = self.reducer.local_shard(self.weights)  # this rank's shard
        self.average = self.owned.clone()
        self.rate = widen(torch.zeros((), device=self.weights.device))
        self.newest = self.owned.new_zeros(())  # the share that a uniform average takes of the newest weights
        self.used, self.overflows = torch.zeros_like(self.rate), torch.zeros_like(self.rate)
        # Of the last example's gradient, always in the same memory: no first call of a graph is to leave a new tensor.
        self.overflowed = torch.zeros_like(self.rate, dtype=torch.bool)
        self.loss_scale = LossScale(self.weights.device) if scaling else None
        segments = self.layout.segments(self.reducer.shards, self.reducer.shard_index)
        self.rule = RULES[config.name](
            config, self.owned, segments, list(self.layout.places), self.reducer.sum_of_shards
        )
        self._prepare(self.most - self.share)

    def _clear_counts(self) -> None:
        self.used.zero_()  # how many of the examples were added; both keep their memory, which graphs have recorded
        self.overflows.zero_()  # and how many have overflowed

    def _prepare(self, examples: int) -> None:
        """Get ready for one more backward pass; the rank that has most has collected `examples` since the last step,
        so that all ranks' last ones come together.

        The data ranks may begin to exchange gradients during the last example's backward pass, unless its clipping
        factor has to be known first.  With one example per rank it need not be: what arrives is one example's gradient
        and can be scaled afterwards.
        """
        self.examples = examples
        self.packed.release()
        alone = self.most == self.batch
        weighed_late = alone and self.reducer.exchange.late_factors
        early = examples == self.most - self.batch and (self.config.clip == "step" or weighed_late)
        self.reducer.begin(early, add_to=None if alone else self.total)

    @property
    def sends(self) -> bool:
        """Whether data ranks begin to exchange gradients in the backward pass that comes next."""
        return self.reducer.early

    def scaled(self, loss: Tensor) -> Tensor:
        """Multiply the loss by the loss scale, where there is one: call `backward` of the result."""
        return loss if self.loss_scale is None else loss * self.loss_scale.scale

    def collect(self, loss: Tensor | None = None) -> Tensor:
        """Clip the gradient of one example by its global norm, add it to the step's sum, and clear it.

        Or that of a batch, whose `loss` is the sum of the examples' losses; only with clip = "step".

        Returns the norm before clipping, the same on all ranks that share the example; NaN where the `loss` (not the
        scaled one), or any rank's part of it, is not finite.  An example whose norm is not finite adds nothing and does
        not count in the mean.  With clip = "step" nothing is clipped here, and one such example makes the whole step
        change nothing.
        The norm is a tensor on the device: only reading it waits for the device.
        Errors: RuntimeError where parameters or their gradients no longer lie in this optimizer's buffers.
        """
        norm = self.add(loss)
        self.end_example()
        return norm

    def add(self, loss: Tensor | None = None) -> Tensor:
        """Do of `collect` what the device does.

        A graph can hold it, unless gradients are exchanged in the pass before (`sends`), or ranks share the example.
        """
        if not self.packed.in_place:
            raise RuntimeError(
                "weights or gradients are not in this Optimizer's buffers any more: another Optimizer took the model "
                "over, or a Predictor; the model was moved, to a device or dtype; or a grad was set to None (leave "
                "zero_grad out: collect does it)"
            )
        gradient = self.reducer.finish()
        norm = self.reducer.norm(gradient, data=False, loss=loss) * self._unscale
        used = norm.isfinite()
        self.overflowed.zero_()
        if self.loss_scale is not None:  # whether the loss itself is finite, of all ranks' parts
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
            gradient.masked_fill_(~used, 0)  # NaN times zero would be NaN
            self.total.addcmul_(gradient, factor.to(gradient.dtype))
        self.gradient.zero_()
        self.used.add_(used, alpha=self.batch)
        return norm

    def end_example(self) -> None:
        """Do the rest of `collect`, on the host: after a step's last example its exchange may begin."""
        self._prepare(self.examples + self.batch)
        if self.examples == self.most:
            self.reducer.count(self.used)

    def step(self, step: int, update: Callable[[], Tensor] | None = None) -> Tensor:
        """Apply the rule to the mean over the examples that were used, update the average; return the learning rate.

        Where no example was used nothing changes, neither weights nor moments nor average, and the rate is 0.  That is
        decided on the device, and the rate is a tensor there: the host waits for nothing.
        update: calls the method `update` in another way; it may have been recorded.
        Errors: ReplicaError, every `sync.check_every` steps, if the ranks' weights have come to differ.
        """
        self.rate.fill_(learning_rate(self.config, step))
        averaged = step + 1 - self.config.average_from  # weights, with those of this step
        self.newest.fill_(1 / averaged if averaged > 0 else 1 - self.config.average_decay)
        taken = self.update() if update is None else update()
        self._prepare(self.most - self.share)
        if self.sync.check_every and (step + 1) % self.sync.check_every == 0:
            check_replicas(self.weights, self.layout, self.mesh.world, f"after step {step + 1}")
        return taken

    def update(self) -> Tensor:
        """Take a step at the rate that lies in `rate`; return that rate, or 0 where nothing was changed.

        Nothing here depends on a number of the host, so that a graph of the device can hold it.
        """
        used = self.reducer.used(self.used)  # summed over all ranks
        gradient, scale = self.reducer.mean(self.total, used / self.mesh.data.size)
        overflows = None if self.loss_scale is None else self.reducer.sum_over_data(self.overflows)
        good = used > 0
        if self.whole:
            good &= used + (0 if overflows is None else overflows) == self.config.accumulate
        if self.config.clip == "step":
            scale = scale * self._unscale
            norm = self.reducer.norm(gradient, data=True) * scale
            scale = scale * self._factor(norm)
            good = (used == self.config.accumulate) & norm.isfinite()
        alone = self.owned is self.weights
        self.rule.take(gradient, scale, good, self.rate, self.average, self.packed.copy if alone else None)
        if self.config.average == "uniform":  # weights that a step left as they were count once more
            self.average.lerp_(self.owned, self.newest)
        if not alone:
            self.reducer.all_gather(self.owned, self.weights)
            self.packed.refresh()
        if self.loss_scale is not None and overflows is not None:
            self.loss_scale.update(overflows > 0)
        self.total.zero_()
        self._clear_counts()
        return torch.where(good, self.rate, 0)

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
        """Return the factor that brings a gradient of this norm within clip_norm, at most 1; widened."""
        return (self.config.clip_norm / widen(norm).clamp(min=1e-12)).clamp(max=1.0)

    @property
    def _unscale(self) -> Tensor | float:
        """What gradients are multiplied by to undo the loss scale, a power of two."""
        return 1.0 if self.loss_scale is None else 1 / self.loss_scale.scale

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the model the averaged weights within the block (for validation and for the saved parameters)."""
        trained = self.weights.clone()
        self.reducer.all_gather(self.average, self.weights)
        self.packed.refresh()
        try:
            yield
        finally:
            self.weights.copy_(trained)
            self.packed.refresh()

    def named_weights(self, weights: Tensor | None = None) -> dict[str, Tensor]:
        """Return the part "weights.NAME" of `state`; a rank may ask for it alone.  weights: a copy of earlier ones."""
        flat = self.weights if weights is None else weights
        return {f"weights.{name}": self.layout.view(flat, name) for name in self.layout.places}

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint: "weights.NAME", "average.NAME", "moment1.NAME", "moment2.NAME", "steps",
        and what the loss scale and the reducer add.

        The moments are those of Adam, other rules keep others.  Tensors are whole, however they lie on the ranks: a
        checkpoint fits any number of them.  World rank 0 has all.
        """
        named = self.named_weights()
        for kind, shard in self._sharded().items():
            whole = self.reducer.all_gather(shard, torch.empty_like(self.weights)) if self.reducer.shards > 1 else shard
            named |= {f"{kind}.{name}": self.layout.view(whole, name) for name in self.layout.places}
        scale = {} if self.loss_scale is None else self.loss_scale.state()
        return {**named, **self.rule.replicated, **scale, **self.reducer.state()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Bring back a `state`, exact to the bit on as many ranks as it was saved on.

        Errors: KeyError for a missing name, RuntimeError for one of another shape, ReplicaError where the ranks were
        given different weights.
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
        self._prepare(self.most - self.share)
        check_replicas(self.weights, self.layout, self.mesh.world, "after reading a checkpoint")

    def take_moments(self, state: Mapping[str, Tensor]) -> list[str]:
        """Take moments, and how many steps they are of, from the `state` of another run with the same rule.

        Returns the names of the parameters that have none there, or another shape; they keep zeros.
        """
        lacking = dict[str, None]()
        for kind, shard in self.rule.moments.items():
            whole = torch.zeros_like(self.weights)
            for name in self.layout.places:
                view, given = self.layout.view(whole, name), state.get(f"{kind}.{name}")
                if given is not None and given.shape == view.shape:
                    view.copy_(given)
                else:
                    lacking[name] = None
            shard.copy_(self.reducer.local_shard(whole))
        self.rule.steps.copy_(state["steps"])
        return list(lacking)

    def _sharded(self) -> dict[str, Tensor]:
        return {"average": self.average, **self.rule.moments}
