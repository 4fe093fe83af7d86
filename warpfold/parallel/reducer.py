"""Reduce the gradients of all ranks during the backward pass.

The gradient of an example is the SUM of the gradients of its model ranks' graphs. The gradient of a step is the MEAN
over the data ranks. A bucket of the flat gradient is sent as soon as all of its parameters have their gradients. The
order of the hooks and the set of parameters that take part differ between ranks (samples without templates, branches).
Buckets are therefore always sent in the same order, and parameters without a gradient are sent as zeros.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from warpfold.device import outside_graph
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

# Attribute of a leaf tensor with the handle of its hook.
HANDLE = "_warpfold_gradient_hook"


class Reducer:
    """Reduce one example after another: `begin`, backward, `finish`; after the last example of a step, `mean`.

    A rank owns a shard of the flat buffers. The shard contains the piece of its model rank of each bucket and, with
    `shard_state`, only the piece of its data rank of that. A single process owns everything, and sends nothing.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        gradient: Tensor,
        layout: Layout,
        mesh: Mesh,
        config: SyncConfig,
        compression: CompressionConfig,
        ranks_per_node: int | None,
        records: bool,
    ) -> None:
        """gradient: flat buffer; each parameter's grad is a view of it.
        records: whether backward passes are replayed as graphs. If ranks share an example, gradients are then sent
        after the backward pass instead of during it.

        Raises UserError for a strategy that the placement of the ranks or the compression does not allow.
        """
        self.layout, self.mesh, self.config, self.gradient = layout, mesh, config, gradient
        self.model_wire, self.data_wire = Wire(mesh.model), Wire(mesh.data)
        self.summed = gradient if mesh.model.size == 1 else gradient.new_empty(layout.size // mesh.model.size)
        # The piece of each bucket in `summed`.
        self.pieces = layout.within(mesh.model.size)
        # Clipping factors of all data ranks' last examples, and the collective that gathers them.
        self._clip_factors: Tensor | None = None
        self._clip_work = Work(None, "")
        # The number of examples used by all data ranks, and the collective that sums it.
        self._count: tuple[Tensor, Work] | None = None
        # Exchanges that have begun, in the order of the buckets.
        self._in_flight: list[Stages[Tensor]] = []
        # With both kinds of sums, the second waits for the first outside of the backward pass (see `_launch`).
        has_both_sums = mesh.model.size > 1 and mesh.data.size > 1
        self._side = torch.cuda.Stream(gradient.device) if has_both_sums and gradient.is_cuda else None
        self._thread = SerialThread() if has_both_sums and not gradient.is_cuda else None
        self.exchanges = make_exchanges(config.strategy, mesh, self.data_wire, ranks_per_node)
        self.strategy = next(iter(self.exchanges))
        segments = layout.segments(mesh.model.size, mesh.model.rank)
        self.compressor = make_compressor(compression, self.data_wire, self.summed, segments)
        # Compression errors from a run with more data ranks, saved again for a later run that compresses.
        self._unused_state: dict[str, Tensor] = {}
        if self.compressor and (config.shard_state or config.strategy != "plain"):
            raise UserError(
                f'optim.compression.method = "{compression.method}" needs plan.sync.strategy = "plain" and '
                "plan.sync.shard_state = false, because gathering the weights would cost what compression saves."
            )
        self._bucket = {name: bucket for bucket, names in enumerate(layout.members) for name in names}
        self.records = records
        # The autograd nodes, and the leaves, at which the gradients of each bucket arrive.
        self._nodes: list[list[Node]] = [[] for _ in layout.members]
        self._leaves: list[list[Tensor]] = [[] for _ in layout.members]
        # Called before a bucket is sent, to write deferred gradients into the buffer.
        self.settle: Callable[[], None] = lambda: None
        for name, p in parameters.items():
            self.watch(name, p)
        self.begin(early=False)

    def use_executor(self, executor: Any) -> None:
        """Begin exchanges with `executor.submit` instead of the thread, if the reducer has one."""
        if self._thread is not None:
            self._thread = executor

    # An example

    def begin(self, early: bool, add_to: Tensor | None = None) -> None:
        """Prepare for one backward pass.

        early: start the data ranks' exchange during the pass, with the gradient of this example or, if given, its sum
        with `add_to`.
        """
        self.early, self._add_to = early and self.mesh.data.size > 1 and self.compressor is None, add_to
        self.sent_buckets = 0
        self._sums: list[Work] = []
        self._launches: list[Future[None]] = []
        self._due: list[int] | None = None

    def finish(self) -> Tensor:
        """Complete the sums after the backward pass; returns this rank's shard of the example's gradient."""
        if self.mesh.world.size > 1:
            # Buckets whose parameters took no part are sent as zeros.
            while self.sent_buckets < len(self.pieces):
                self._send()
            # The thread must have started every exchange, and `result` raises its errors.
            for launch in self._launches:
                launch.result()
            # The side stream's collectives write to buffers that the current stream reads next.
            if self._side is not None:
                torch.cuda.current_stream().wait_stream(self._side)
            for work in self._sums:
                work.wait()
            # Wait for the contributions, so that the next backward pass may overwrite the send buffers.
            for exchange in self._in_flight if self.early else ():
                next(exchange)
        return self.summed

    def watch(self, name: str, leaf: Tensor) -> None:
        """Register a hook for gradients at an autograd leaf that belong to the bucket of the parameter `name`.

        Replaces the hook of an earlier reducer.
        """
        if earlier := getattr(leaf, HANDLE, None):
            earlier.remove()
        if self.mesh.world.size == 1 or (self.records and self.mesh.model.size > 1):
            return
        bucket = self._bucket[name]
        self._leaves[bucket].append(leaf)
        if not self.records:
            # A node runs on the stream on which it was created. While passes are recorded, the nodes must be created on
            # the recording stream, so they are looked up in each pass.
            self._nodes[bucket].append(get_gradient_edge(leaf).node)
        hook = partial(self._arrived, bucket, name)
        setattr(leaf, HANDLE, leaf.register_post_accumulate_grad_hook(hook))

    def _arrived(self, bucket: int, name: str, leaf: Tensor) -> None:
        """Count the gradient of a leaf, which autograd reports once per pass after summing all of the leaf's uses."""
        if bucket < self.sent_buckets:
            raise RuntimeError(
                f"{name}: its gradient changed after it was sent. Call collect() after one backward() per example."
            )
        if self._due is None:
            # The first gradient of this pass: only now does autograd know which parameters take part.
            nodes = self._nodes
            if self.records:
                nodes = [[get_gradient_edge(leaf).node for leaf in leaves] for leaves in self._leaves]
            self._due = taking_part(nodes)
        self._due[bucket] -= 1
        while self.sent_buckets < len(self._due) and not self._due[self.sent_buckets]:
            self._send()

    def _send(self) -> None:
        """Start the sum of the next bucket over the model ranks, followed by its exchange between data ranks."""
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
            # The gradient was written, and its sum started, on the current stream.
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                self._launch(bucket)
        else:
            outside_graph(partial(self._launch, bucket))

    def _launch(self, bucket: int) -> None:
        """Wait for the sum of a bucket, and start its exchange between data ranks.

        The backward pass must not wait here: the other branch rank, whose contribution is missing, may itself wait for
        a gradient that this rank has not sent yet. On a GPU a side stream waits instead, and all collectives are
        launched in program order on every communicator. With gloo, which cannot queue a collective behind one of
        another group, a thread waits and launches bucket after bucket.
        """
        # A replayed graph calls no hooks, so the count is updated here, too.
        self.sent_buckets = max(self.sent_buckets, bucket + 1)
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
        """Start to gather the clipping factor of this rank's example, which was sent before its norm was known."""
        self._clip_factors = self.gradient.new_empty(self.mesh.data.size)
        self._clip_work = self.data_wire.all_gather(self._clip_factors, factor.to(self.gradient.dtype).reshape(1))

    def _factors(self) -> Tensor | None:
        """Wait for the clipping factors of all data ranks' examples; called when all gradients have arrived."""
        self._clip_work.wait()
        return self._clip_factors

    def count(self, examples: Tensor) -> None:
        """Start to sum the numbers of examples that the data ranks have used since the last step.

        examples: number of this rank.
        """
        # With clipping factors, the number of non-zero factors is the result.
        if self.mesh.data.size > 1 and self._clip_factors is None:
            number = examples.to(self.gradient.dtype, copy=True).reshape(1)
            self._count = number, self.data_wire.all_reduce(number)

    def used(self, examples: Tensor) -> Tensor:
        """Return the number of examples that all data ranks have used since the last step. examples: of this rank."""
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
        """Compute this rank's shard of the mean over data ranks and their examples, as a vector and a factor.

        The mean is the product of the two, which the optimiser's update computes. The factor has a wider dtype.
        total: this rank's sum over its examples, in the shard of its model rank; it is overwritten.
        examples: mean of the ranks' numbers of examples. If it is 0, the result is 0.
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
        finish([self.exchange.all_gather(piece, total[span]) for piece, span in zip(owned, self.pieces)])
        return total, factor

    # Shards

    @property
    def exchange(self) -> Exchange:
        return self.exchanges[self.strategy]

    @property
    def sharded(self) -> bool:
        """Whether data ranks own different pieces of a model rank's shard."""
        return self.config.shard_state and self.mesh.data.size > 1

    @property
    def shards(self) -> int:
        """Number of shards."""
        return self.mesh.model.size * (self.mesh.data.size if self.sharded else 1)

    @property
    def shard_index(self) -> int:
        """Index of this rank's shard."""
        model = self.mesh.model.rank
        return model * self.mesh.data.size + self.exchange.index if self.sharded else model

    def local_shard(self, flat: Tensor) -> Tensor:
        """Return this rank's shard of a flat buffer as a copy, or the buffer itself if the rank owns everything."""
        return self.layout.shard(flat, self.shards, self.shard_index)

    def all_gather(self, owned: Tensor, out: Tensor) -> Tensor:
        """Gather the ranks' shards into `out`. Every rank must call it."""
        if self.shards == 1:
            return out if out is owned else out.copy_(owned)
        buckets = zip(self.layout.within(self.shards), self.layout.buckets)
        finish([self._all_gather(owned[piece], out[bucket]) for piece, bucket in buckets])
        return out

    def _all_gather(self, piece: Tensor, out: Tensor) -> Stages[None]:
        if self.sharded:
            model_piece = out if self.mesh.model.size == 1 else piece.new_empty(len(out) // self.mesh.model.size)
            yield from self.exchange.all_gather(piece, model_piece, exact=True)
            piece = model_piece
        if self.mesh.model.size > 1:
            work = self.model_wire.all_gather(out, piece)
            yield
            work.wait()

    def choose(self, hidden: bool) -> dict[str, float]:
        """Choose the fastest strategy by measurement (see `exchange.choose`); returns the seconds of each."""
        if len(self.exchanges) == 1:
            return {}
        total = torch.zeros_like(self.summed)
        self.strategy, seconds = choose(self.exchanges, self.mesh, total, self.pieces, hidden)
        return seconds

    def sum_of_shards(self, x: Tensor, data: bool = True) -> Tensor:
        """Sum x, which every rank has computed from its shard, over all shards in place; each shard counts once.

        data: x was computed from the shard of `local_shard`; otherwise from that of `finish`.
        """
        if self.mesh.model.size > 1:
            self.model_wire.all_reduce(x).wait()
        if data and self.sharded:
            self.data_wire.all_reduce(x).wait()
        return x

    def sum_over_data(self, x: Tensor) -> Tensor:
        """Sum x, which should be small, over the data ranks in place."""
        if self.mesh.data.size > 1:
            self.data_wire.all_reduce(x).wait()
        return x

    def norm(self, shard: Tensor, data: bool, loss: Tensor | None = None) -> Tensor:
        """Compute the norm of a flat vector from its shards, on the device; NaN if a rank's `loss` is not finite.

        data: see `sum_of_shards`.
        """
        norm = torch.linalg.vector_norm(shard)
        if loss is not None:
            norm = norm + 0 * loss.detach()
        if self.mesh.model.size > 1 or (data and self.sharded):
            norm = self.sum_of_shards(norm.double().square(), data).sqrt()
        return norm

    # The state

    def state(self) -> dict[str, Tensor]:
        """Gather the tensors with which a checkpoint continues bitwise, all on rank 0. Every rank must call it.

        The names are "sync.strategy" if it was chosen by measurement, "compression.steps", "compression.ranks",
        "compression.KIND.d.NAME" for data rank d, and "compression.shared.m-M" for model rank m of M.
        """
        state = {}
        if len(self.exchanges) > 1:
            state["sync.strategy"] = torch.tensor(STRATEGIES.index(self.strategy))
        if self.compressor is None:
            return state | self._unused_state
        state["compression.steps"] = torch.tensor(self.compressor.steps)
        state["compression.ranks"] = torch.tensor(self.mesh.data.size)
        for kind, local in self.compressor.local.items():
            for rank, source in enumerate(self.mesh.data.ranks):
                shard = local.clone()
                # One data rank's shards at a time, so that rank 0 needs memory for a single one.
                with waiting("the state of the data ranks"):
                    dist.broadcast(shard, source, group=self.mesh.data.handle)
                whole = self.all_gather(shard, torch.empty_like(self.gradient))
                if self.mesh.world.rank == 0:
                    whole = whole.cpu()
                    for name in self.layout.places:
                        state[f"compression.{kind}.{rank}.{name}"] = self.layout.view(whole, name)
        size = self.mesh.model.size
        for m, row in enumerate(self._gather_rows(self.compressor.shared)):
            state[f"compression.shared.{m}-{size}"] = row
        return state

    def compression_errors(self) -> list[Tensor]:
        """Return the tensors that the compressor of this rank carries from step to step."""
        return [] if self.compressor is None else [*self.compressor.local.values(), self.compressor.shared]

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state. If the number of data ranks has changed, each gets the mean of all carried errors.

        A single data rank compresses nothing, and saves the state unchanged in its own checkpoints.
        """
        if "sync.strategy" in state and (name := STRATEGIES[int(state["sync.strategy"])]) in self.exchanges:
            self.strategy = name
        if self.compressor is None or "compression.steps" not in state:
            if self.mesh.world.rank == 0:
                self._unused_state = {name: x.cpu() for name, x in state.items() if name.startswith("compression.")}
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
        # With another number of model ranks the shapes differ, and the power iteration starts afresh.
        if shared is not None and shared.shape == self.compressor.shared.shape:
            self.compressor.shared.copy_(shared)

    def _gather_rows(self, x: Tensor) -> list[Tensor]:
        """Gather flat tensors of different lengths from all model ranks."""
        if self.mesh.model.size == 1:
            return [x]
        lengths = x.new_empty(self.mesh.model.size, dtype=torch.int64)
        self.model_wire.all_gather(lengths, lengths.new_tensor([len(x)])).wait()
        longest = int(lengths.max())
        rows = x.new_empty(self.mesh.model.size * longest)
        self.model_wire.all_gather(rows, torch.cat([x, x.new_zeros(longest - len(x))])).wait()
        return [row[:length] for row, length in zip(rows.view(len(lengths), longest), lengths.tolist())]


class ReplicaError(RuntimeError):
    """Weights differ between ranks that should hold the same."""


def check_replicas(weights: Tensor, layout: Layout, world: Group, when: str) -> None:
    """Compare the flat weights of all ranks bitwise, parameter by parameter. Every rank must call it.

    Raises ReplicaError on every rank. Its message lists the first parameters that differ with the ranks that agree, the
    largest group first.
    """
    if world.size == 1:
        return
    sums = checksums(weights, layout.places.values())
    # The maximum of ~x is ~ the minimum of x, so one collective gives both.
    extremes = torch.cat([sums, ~sums])
    with waiting(f"comparing the weights {when}"):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=world.handle)
    largest, smallest = extremes[: len(sums)], ~extremes[len(sums) :]
    if torch.equal(largest, smallest):
        return
    table = sums.new_empty(world.size * len(sums))
    with waiting(f"comparing the weights {when}"):
        all_gather_flat(table, sums, group=world.handle)
    table = table.view(world.size, -1).cpu()
    differences = []
    for number, name in enumerate(layout.places):
        column = table[:, number].tolist()
        versions = [version for version, _ in Counter(column).most_common()]
        if len(versions) > 1:
            groups = [
                ", ".join(str(rank) for rank, rank_version in enumerate(column) if rank_version == version)
                for version in versions
            ]
            differences.append(f"{name} (rank {' against '.join(groups)})")
    ending = f" and {len(differences) - 3} parameters more" if len(differences) > 3 else ""
    raise ReplicaError(
        f"{when}: weights differ between the {world.size} ranks: {'; '.join(differences[:3])}{ending}. "
        "Continue from the last checkpoint, and check the memory, device and software of these ranks."
    )


def checksums(flat: Tensor, places: Iterable[slice]) -> Tensor:
    """Compute a checksum of each part of a flat tensor, such as each parameter; int64 [parts]."""
    return torch.cat([row_checksums(flat[None, place]) for place in places])


def row_checksums(rows: Tensor) -> Tensor:
    """Compute a checksum of each row of a tensor [rows, length] of any dtype; int64 [rows].

    It is the sum, modulo 2^64, of the elements' bits times odd factors that depend on their index. A change of a single
    element always changes it, and any other change almost surely does.
    """
    bits = rows.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()])
    factors = torch.arange(rows.shape[1], device=rows.device) * 0x1E3779B97F4A7C15 | 1
    return (bits * factors).sum(1)
