"""Reduce the gradients of all ranks while the backward pass still runs.

The gradient of an example is the SUM over its model ranks of what each rank's graph yields; the step's is the MEAN over
the data ranks.  A bucket of the flat gradient is sent as soon as its parameters have their gradients.  Hooks fire in
another order on each rank, and other parameters take part (samples without templates, branches): so buckets are always
sent in one order, and parameters that took no part are sent as zeros.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from warpfold.device import between
from warpfold.errors import UserError
from warpfold.ops.dispatch import widen
from warpfold.ops.torch_internals import all_gather_flat, taking_part
from warpfold.parallel.compress import CompressionConfig, make_compressor
from warpfold.parallel.exchange import (
    STRATEGIES,
    Exchange,
    Layout,
    Stages,
    SyncConfig,
    Wire,
    choose,
    finish,
    make_exchanges,
)
from warpfold.parallel.mesh import Group, Mesh
from warpfold.parallel.waits import SerialThread, Work, waiting

HANDLE = "_warpfold_gradient_hook"  # the attribute of a leaf that holds the handle of its hook


class Reducer:
    """Reduce one example after the other: `begin`, backward, `finish`; after the last of a step, `mean`.

    A rank owns a shard of the flat buffers: of each bucket the piece of its model rank, and of that, with
    `shard_state`, the piece of its data rank.  A single process owns everything, and sends nothing.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        gradient: Tensor,
        layout: Layout,
        mesh: Mesh,
        config: SyncConfig,
        compression: CompressionConfig,
        ranks_per_node: int | None = None,
        records: bool = False,
    ) -> None:
        """gradient: flat; each parameter's grad is a view of it.  records: whether graphs replay backward passes; where
        ranks share an example, gradients then travel behind these, not during them.

        Errors: UserError for a strategy that these ranks are not placed for, or that this compression does not allow.
        """
        self.layout, self.mesh, self.config, self.gradient = layout, mesh, config, gradient
        self.model_wire, self.data_wire = Wire(mesh.model), Wire(mesh.data)
        self.summed = gradient if mesh.model.size == 1 else gradient.new_empty(layout.size // mesh.model.size)
        self.pieces = layout.within(mesh.model.size)  # of `summed`: a piece of each bucket
        self._clip_factors: Tensor | None = None  # of each data rank's last example
        self._clip_work = Work(None, "")  # the collective that brings them
        self._count: tuple[Tensor, Work] | None = None  # how many examples were used, and the collective of it
        self._in_flight: list[Stages[Tensor]] = []  # exchanges that have begun, in the order of the buckets
        both = mesh.model.size > 1 and mesh.data.size > 1
        self._side = torch.cuda.Stream(gradient.device) if both and gradient.is_cuda else None
        self._thread = SerialThread() if both and not gradient.is_cuda else None
        self.exchanges = make_exchanges(config.strategy, mesh, self.data_wire, ranks_per_node)
        self.strategy = next(iter(self.exchanges))
        segments = layout.segments(mesh.model.size, mesh.model.rank)
        self.compressor = make_compressor(compression, self.data_wire, self.summed, segments)
        self._held: dict[str, Tensor] = {}  # what ranks carried over before this data rank was alone: for those to come
        if self.compressor and (config.shard_state or config.strategy != "plain"):
            raise UserError(
                f'optim.compression.method = "{compression.method}" goes with plan.sync.strategy = "plain" and without '
                "plan.sync.shard_state, whose gathered weights would cost what compression saves"
            )
        self._bucket = {name: bucket for bucket, names in enumerate(layout.members) for name in names}
        self.records = records
        self._nodes: list[list[Node]] = [[] for _ in layout.members]  # where gradients of each bucket arrive
        self._leaves: list[list[Tensor]] = [[] for _ in layout.members]
        self.settle: Callable[[], None] = lambda: None  # called before a bucket is sent: gradients may wait elsewhere
        for name, p in parameters.items():
            self.watch(name, p)
        self.begin(early=False)

    # An example

    def begin(self, early: bool, add_to: Tensor | None = None) -> None:
        """Expect one backward pass.

        early: the data ranks' exchange begins in it, of this example's gradient, or of its sum with `add_to`.
        """
        self.early, self._add_to = early and self.mesh.data.size > 1 and self.compressor is None, add_to
        self.sent_buckets = 0
        self._sums: list[Work] = []
        self._launches: list[Future[None]] = []
        self._due: list[int] | None = None

    def finish(self) -> Tensor:
        """Return, after the backward pass, this rank's shard of the example's gradient, summed over the model ranks."""
        if self.mesh.world.size > 1:
            while self.sent_buckets < len(self.pieces):
                self._send()
            for launch in self._launches:
                launch.result()
            if self._side is not None:
                torch.cuda.current_stream().wait_stream(self._side)
            for work in self._sums:
                work.wait()
            for exchange in self._in_flight if self.early else ():
                next(exchange)  # all has arrived, and what was sent may be written over
        return self.summed

    def watch(self, name: str, leaf: Tensor) -> None:
        """Expect gradients at a leaf of autograd that go to the bucket of the parameter `name`.

        In place of an earlier reducer's hook.
        """
        if earlier := getattr(leaf, HANDLE, None):
            earlier.remove()
        if self.mesh.world.size == 1 or (self.records and self.mesh.model.size > 1):
            return
        bucket = self._bucket[name]
        self._leaves[bucket].append(leaf)
        if not self.records:  # a node works on the stream on which it was made: of a pass that is recorded, on that one
            self._nodes[bucket].append(get_gradient_edge(leaf).node)
        hook = partial(self._arrived, bucket, name)
        setattr(leaf, HANDLE, leaf.register_post_accumulate_grad_hook(hook))

    def _arrived(self, bucket: int, name: str, leaf: Tensor) -> None:
        """Note that a leaf has its gradient, of all its uses: autograd calls this once in a backward pass."""
        if bucket < self.sent_buckets:
            raise RuntimeError(f"{name}: a gradient after it was sent; collect() follows each example's one backward()")
        if self._due is None:  # the first of this pass: now autograd knows which parameters take part
            nodes = self._nodes
            if self.records:
                nodes = [[get_gradient_edge(leaf).node for leaf in leaves] for leaves in self._leaves]
            self._due = taking_part(nodes)
        self._due[bucket] -= 1
        while self.sent_buckets < len(self._due) and not self._due[self.sent_buckets]:
            self._send()

    def _send(self) -> None:
        """Start the sum of the next bucket over the model ranks, and have its exchange between data ranks follow."""
        self.settle()
        bucket = self.sent_buckets
        self.sent_buckets += 1
        if self.mesh.model.size > 1:
            out, x = self.summed[self.pieces[bucket]], self.gradient[self.layout.buckets[bucket]]
            self._sums.append(self.model_wire.reduce_scatter(out, x))
        if not self.early:
            return
        if self._thread is not None:
            self._launches.append(self._thread.submit(partial(self._launch, bucket)))
        elif self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                self._launch(bucket)
        else:
            between(partial(self._launch, bucket))

    def _launch(self, bucket: int) -> None:
        """Wait for the sum of a bucket, and start its exchange.

        The backward pass must not wait: the other branch rank, whose part of the sum is missing, may itself be waiting
        for a gradient that this rank has yet to send.  So on a GPU a side stream waits, and all collectives are
        launched in the order of the program, whatever their communicator; with gloo, which cannot queue a collective
        behind one of another group, a thread waits and launches bucket after bucket.
        """
        self.sent_buckets = max(self.sent_buckets, bucket + 1)  # a graph that is replayed calls no hooks
        if self._sums:
            self._sums[bucket].wait()
        x = self.summed[self.pieces[bucket]]
        if self._add_to is not None:
            x = self._add_to[self.pieces[bucket]].add_(x)
        exchange = self.exchange.reduce_scatter(x, self._factors)
        next(exchange)
        self._in_flight.append(exchange)

    # A step

    def set_clip_factor(self, factor: Tensor) -> None:
        """Set the clipping factor of this rank's example, which was sent before its whole norm was known."""
        self._clip_factors = self.gradient.new_empty(self.mesh.data.size)
        self._clip_work = self.data_wire.all_gather(self._clip_factors, factor.to(self.gradient.dtype).reshape(1))

    def _factors(self) -> Tensor | None:
        """Return the clipping factors of all data ranks' examples; called when all gradients have arrived."""
        self._clip_work.wait()
        return self._clip_factors

    def count(self, examples: Tensor) -> None:
        """Begin to add up how many examples all data ranks have used since the last step; this one: `examples`."""
        if self.mesh.data.size > 1 and self._clip_factors is None:  # clip factors say it too
            number = examples.to(self.gradient.dtype, copy=True).reshape(1)
            self._count = number, self.data_wire.all_reduce(number)

    def used(self, examples: Tensor) -> Tensor:
        """Return how many examples all data ranks have used since the last step; this one has used `examples`."""
        if self.mesh.data.size == 1:
            return examples
        if (factors := self._factors()) is not None:
            return factors.count_nonzero()
        if self._count is None:
            self.count(examples)
        assert self._count is not None
        (number, work), self._count = self._count, None
        work.wait()
        return number[0]

    def mean(self, total: Tensor, examples: Tensor) -> tuple[Tensor, Tensor]:
        """Return a vector and a factor, widened: this rank's shard of the mean over the data ranks and the `examples`
        of each is their product, which the update makes on its way.

        total: this rank's sum over its examples, in the shard of its model rank; it is overwritten.
        examples: the mean of the ranks' numbers of examples; where it is 0, so is the result.
        """
        factor = 1 / torch.where(examples == 0, 1, widen(examples))
        if self.mesh.data.size == 1:
            return total, factor
        if self.compressor is not None:
            return self.compressor.mean(total.mul_(factor), examples > 0), torch.ones_like(factor)
        exchanges = self._in_flight or [self.exchange.reduce_scatter(total[p]) for p in self.pieces]
        owned, factor = finish(exchanges), factor / self.mesh.data.size
        self._in_flight, self._clip_factors, self._clip_work = [], None, Work(None, "")
        if self.config.shard_state:
            return torch.cat(owned[::-1]), factor
        finish([self.exchange.all_gather(piece, total[where]) for piece, where in zip(owned, self.pieces)])
        return total, factor

    # Shards

    @property
    def exchange(self) -> Exchange:
        return self.exchanges[self.strategy]

    @property
    def sharded(self) -> bool:
        """Whether a rank owns less than a model rank's shard."""
        return self.config.shard_state and self.mesh.data.size > 1

    @property
    def shards(self) -> int:
        """How many shards there are."""
        return self.mesh.model.size * (self.mesh.data.size if self.sharded else 1)

    @property
    def shard_index(self) -> int:
        """Which of them is this rank's."""
        model = self.mesh.model.rank
        return model * self.mesh.data.size + self.exchange.index if self.sharded else model

    def local_shard(self, flat: Tensor) -> Tensor:
        """Return this rank's shard of a flat buffer: a copy, or the buffer itself where it owns everything."""
        return self.layout.shard(flat, self.shards, self.shard_index)

    def all_gather(self, owned: Tensor, out: Tensor) -> Tensor:
        """Join the shards that the ranks own into `out`.  Every rank must call it."""
        if self.shards == 1:
            return out if out is owned else out.copy_(owned)
        buckets = zip(self.layout.within(self.shards), self.layout.buckets)
        finish([self._all_gather(owned[piece], out[bucket]) for piece, bucket in buckets])
        return out

    def _all_gather(self, piece: Tensor, out: Tensor) -> Stages[None]:
        if self.sharded:
            of_model = out if self.mesh.model.size == 1 else piece.new_empty(len(out) // self.mesh.model.size)
            yield from self.exchange.all_gather(piece, of_model, exact=True)
            piece = of_model
        if self.mesh.model.size > 1:
            work = self.model_wire.all_gather(out, piece)
            yield
            work.wait()

    def choose(self, hidden: bool) -> dict[str, float]:
        """Choose between strategies by measuring them (see `exchange.choose`); return the seconds of each."""
        if len(self.exchanges) == 1:
            return {}
        total = torch.zeros_like(self.summed)
        self.strategy, seconds = choose(self.exchanges, self.mesh, total, self.pieces, hidden)
        return seconds

    def sum_of_shards(self, x: Tensor, data: bool = True) -> Tensor:
        """Add up x, which every rank computed from its shard, over the shards: each counts once.  Changes x.

        data: the shard is that of `local_shard`; otherwise that of `finish`.
        """
        if self.mesh.model.size > 1:
            self.model_wire.all_reduce(x).wait()
        if data and self.sharded:
            self.data_wire.all_reduce(x).wait()
        return x

    def sum_over_data(self, x: Tensor) -> Tensor:
        """Add up x, a few numbers, over the data ranks.  Changes x."""
        if self.mesh.data.size > 1:
            self.data_wire.all_reduce(x).wait()
        return x

    def norm(self, shard: Tensor, data: bool, loss: Tensor | None = None) -> Tensor:
        """Return the norm of a flat vector from its shards, on the device; NaN if a rank's `loss` is not finite.

        data: as of `sum_of_shards`.
        """
        norm = torch.linalg.vector_norm(shard)
        if loss is not None:
            norm = norm + 0 * loss.detach()
        if self.mesh.model.size > 1 or (data and self.sharded):
            norm = self.sum_of_shards(norm.double().square(), data).sqrt()
        return norm

    # The state

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint needs to continue to the bit: all on rank 0.  Every rank must call it.

        "sync.strategy", where it was chosen by measurement; "compression.steps", "compression.ranks" and
        "compression.KIND.d.NAME" of data rank d; "compression.shared.m-M" of model rank m of M.
        """
        found = {}
        if len(self.exchanges) > 1:
            found["sync.strategy"] = torch.tensor(STRATEGIES.index(self.strategy))
        if self.compressor is None:
            return found | self._held
        found["compression.steps"] = torch.tensor(self.compressor.steps)
        found["compression.ranks"] = torch.tensor(self.mesh.data.size)
        for kind, local in self.compressor.local.items():
            for rank, source in enumerate(self.mesh.data.ranks):
                shard = local.clone()
                with waiting("the state of the data ranks"):
                    dist.broadcast(shard, source, group=self.mesh.data.handle)
                whole = self.all_gather(shard, torch.empty_like(self.gradient))
                if self.mesh.world.rank == 0:
                    whole = whole.cpu()
                    for name in self.layout.places:
                        found[f"compression.{kind}.{rank}.{name}"] = self.layout.view(whole, name)
        size = self.mesh.model.size
        for m, row in enumerate(self._rows(self.compressor.shared)):
            found[f"compression.shared.{m}-{size}"] = row
        return found

    def compression_errors(self) -> list[Tensor]:
        """Return the tensors that the compressor of this rank carries from step to step."""
        return [] if self.compressor is None else [*self.compressor.local.values(), self.compressor.shared]

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state; with another number of data ranks, each takes the mean of what all had carried over.

        One data rank alone, which compresses nothing, holds it as it is for its own checkpoints.
        """
        if "sync.strategy" in state and (name := STRATEGIES[int(state["sync.strategy"])]) in self.exchanges:
            self.strategy = name
        if self.compressor is None or "compression.steps" not in state:
            if self.mesh.world.rank == 0:
                self._held = {name: x.cpu() for name, x in state.items() if name.startswith("compression.")}
            return
        self.compressor.steps = int(state["compression.steps"])
        before = int(state["compression.ranks"])
        for kind, local in self.compressor.local.items():
            ranks = [self.mesh.data.rank] if before == self.mesh.data.size else range(before)
            whole = torch.zeros_like(self.gradient)
            for rank in ranks:
                for name in self.layout.places:
                    self.layout.view(whole, name).add_(state[f"compression.{kind}.{rank}.{name}"].to(whole.device))
            local.copy_(self.layout.shard(whole.div_(len(ranks)), self.mesh.model.size, self.mesh.model.rank))
        shared = state.get(f"compression.shared.{self.mesh.model.rank}-{self.mesh.model.size}")
        if shared is not None and shared.shape == self.compressor.shared.shape:  # else start cold
            self.compressor.shared.copy_(shared)

    def _rows(self, x: Tensor) -> list[Tensor]:
        """Return the flat tensors of all model ranks, whatever their lengths."""
        if self.mesh.model.size == 1:
            return [x]
        lengths = x.new_empty(self.mesh.model.size, dtype=torch.int64)
        self.model_wire.all_gather(lengths, lengths.new_tensor([len(x)])).wait()
        longest = int(lengths.max())
        rows = x.new_empty(self.mesh.model.size * longest)
        self.model_wire.all_gather(rows, torch.cat([x, x.new_zeros(longest - len(x))])).wait()
        return [row[:length] for row, length in zip(rows.view(len(lengths), longest), lengths.tolist())]


class ReplicaError(RuntimeError):
    """Ranks that should hold the same weights do not."""


def check_replicas(weights: Tensor, layout: Layout, world: Group, when: str) -> None:
    """Compare the flat weights of all ranks, parameter by parameter and bit by bit.  Every rank must call it.

    Errors: ReplicaError on every rank, with the first parameters that differ and which ranks agree, most of them first.
    """
    if world.size == 1:
        return
    sums = checksums(weights, layout.places.values())
    extremes = torch.cat([sums, ~sums])  # the largest of ~x is ~ the smallest x
    with waiting(f"comparing the weights {when}"):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=world.handle)
    largest, smallest = extremes[: len(sums)], ~extremes[len(sums) :]
    if torch.equal(largest, smallest):
        return
    table = sums.new_empty(world.size * len(sums))
    with waiting(f"comparing the weights {when}"):
        all_gather_flat(table, sums, group=world.handle)
    table = table.view(world.size, -1).cpu()
    found = []
    for number, name in enumerate(layout.places):
        column = table[:, number].tolist()
        versions = [version for version, _ in Counter(column).most_common()]
        if len(versions) > 1:
            alike = [", ".join(str(rank) for rank, of in enumerate(column) if of == version) for version in versions]
            found.append(f"{name} (rank {' against '.join(alike)})")
    more = f" and {len(found) - 3} parameters more" if len(found) > 3 else ""
    raise ReplicaError(
        f"{when}: weights differ between the {world.size} ranks: {'; '.join(found[:3])}{more}; "
        "continue from the last checkpoint, and suspect those ranks' memory, device or software"
    )


def checksums(flat: Tensor, places: Iterable[slice]) -> Tensor:
    """Return a checksum of each part of a flat tensor, such as each parameter, int64 [parts]."""
    return torch.cat([row_checksums(flat[None, where]) for where in places])


def row_checksums(rows: Tensor) -> Tensor:
    """Return a checksum of each row, int64 [rows], of a tensor [rows, length] of any dtype.

    It is the sum, modulo 2^64, of the elements' bits times odd factors that depend on their index.  A change of any one
    element changes it; so does, almost surely, any other change.
    """
    bits = rows.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()])
    factors = torch.arange(rows.shape[1], device=rows.device) * 0x1E3779B97F4A7C15 | 1
    return (bits * factors).sum(1)
