"""Gradients of all ranks made one, while the backward pass still runs.

The gradient of an example is the SUM over its model ranks of what each rank's graph yields; the step's is the MEAN over
the data ranks.  A bucket of the flat gradient is sent as soon as its parameters have theirs.  In what order hooks
fire differs between ranks, and so does which parameters take part (samples without templates, branches): buckets are
always sent in one order, and those that nothing came for are sent as the zeros that they are.
"""

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from warpfold.errors import UserError
from warpfold.parallel.buckets import Layout
from warpfold.parallel.compress import CompressionConfig
from warpfold.parallel.exchange import (
    STRATEGIES,
    Exchange,
    Hierarchical,
    Stages,
    SyncConfig,
    Wire,
    choose,
    finish,
    make_exchanges,
    no_weights,
)
from warpfold.parallel.inorder import InOrder
from warpfold.parallel.mesh import Mesh
from warpfold.parallel.powersgd import make_compressor
from warpfold.parallel.waits import Work, waiting

HANDLE = "_warpfold_gradient_hook"  # the parameter's attribute that says who hears of its gradient


class Reducer:
    """One example after the other: `begin`, backward, `finish`; after the last of a step, `mean`.

    A rank owns a shard of the flat buffers: of each bucket the piece of its model rank, and of that, with
    `shard_state`, the piece of its data rank.  Where there is one process, that is everything, and nothing travels.
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
    ) -> None:
        """gradient: flat; each parameter's grad is its view.

        Errors: UserError for a strategy that these ranks are not placed for, or that cannot be with this compression.
        """
        self.layout, self.mesh, self.config, self.gradient = layout, mesh, config, gradient
        self.model_wire, self.data_wire = Wire(mesh.model), Wire(mesh.data)
        self.summed = gradient if mesh.model.size == 1 else gradient.new_empty(layout.size // mesh.model.size)
        self.pieces = layout.within(mesh.model.size)  # of `summed`, a piece of each bucket
        self._late: Tensor | None = None  # how much each data rank's last example counts
        self._late_work = Work(None, "")  # on its way
        self._count: tuple[Tensor, Work] | None = None  # of the examples that were used, on its way
        self._travels: list[Stages[Tensor]] = []  # exchanges that have begun, in the order of the buckets
        both = mesh.model.size > 1 and mesh.data.size > 1
        self._side = torch.cuda.Stream(gradient.device) if both and gradient.is_cuda else None
        self._thread = InOrder() if both and not gradient.is_cuda else None
        self.exchanges = make_exchanges(config.strategy, mesh, self.data_wire, ranks_per_node)
        self.strategy = next(iter(self.exchanges))
        segments = layout.segments(mesh.model.size, mesh.model.rank)
        self.compressor = make_compressor(compression, self.data_wire, self.summed, segments)
        if self.compressor and (config.shard_state or config.strategy != "plain"):
            raise UserError(
                f'optim.compression.method = "{compression.method}" goes with plan.sync.strategy = "plain" and without '
                "plan.sync.shard_state, whose gathered weights would cost what compression saves"
            )
        if mesh.world.size > 1:
            self._watch(parameters)
        self.begin(early=False)

    # An example

    def begin(self, early: bool, add_to: Tensor | None = None) -> None:
        """Expect one backward pass.

        early: the data ranks' exchange begins in it too, of the example's gradient, or of what `add_to` then holds.
        """
        self.early, self._add_to = early and self.mesh.data.size > 1 and self.compressor is None, add_to
        self.sent_buckets = 0
        self._sums: list[Work] = []
        self._launches: list[Future[None]] = []
        self._due: list[int] | None = None

    def finish(self) -> Tensor:
        """After the backward pass: the example's gradient, summed over the model ranks, in this one's shard of it."""
        if self.mesh.world.size > 1:
            while self.sent_buckets < len(self.pieces):
                self._send()
            for launch in self._launches:
                launch.result()
            if self._side is not None:
                torch.cuda.current_stream().wait_stream(self._side)
            for work in self._sums:
                work.wait()
            for travel in self._travels:
                next(travel)  # all has arrived, and what was sent may be written over
        return self.summed

    def _watch(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Hear of every gradient that is there; a reducer that did so before does not any more."""
        self._nodes = [[get_gradient_edge(parameters[name]).node for name in names] for names in self.layout.members]
        for bucket, names in enumerate(self.layout.members):
            for name in names:
                hook = partial(self._arrived, bucket, name, parameters[name].grad)
                if earlier := getattr(parameters[name], HANDLE, None):
                    earlier.remove()
                setattr(parameters[name], HANDLE, parameters[name].register_post_accumulate_grad_hook(hook))

    def _arrived(self, bucket: int, name: str, view: Tensor | None, parameter: Tensor) -> None:
        """A parameter has its gradient, the sum over all its uses: autograd calls this once in a backward pass."""
        if parameter.grad is not view:
            raise RuntimeError(f"{name}: its grad is not the optimiser's buffer any more; do not set it to None")
        if bucket < self.sent_buckets:
            raise RuntimeError(f"{name}: a gradient after it was sent; collect() follows each example's one backward()")
        if self._due is None:  # the first of this pass: which will take part is known now
            takes_part = torch._C._will_engine_execute_node  # what torch.autograd.graph.register_multi_grad_hook asks
            self._due = [sum(map(takes_part, nodes)) for nodes in self._nodes]
        self._due[bucket] -= 1
        while self.sent_buckets < len(self._due) and not self._due[self.sent_buckets]:
            self._send()

    def _send(self) -> None:
        """Start the sum of the next bucket, and have its exchange follow."""
        bucket = self.sent_buckets
        self.sent_buckets += 1
        if self.mesh.model.size > 1:
            out, x = self.summed[self.pieces[bucket]], self.gradient[self.layout.buckets[bucket]]
            self._sums.append(self.model_wire.sum_pieces(out, x))
        if not self.early:
            return
        if self._thread is not None:
            self._launches.append(self._thread.submit(partial(self._launch, bucket)))
        elif self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                self._launch(bucket)
        else:
            self._launch(bucket)

    def _launch(self, bucket: int) -> None:
        """Start the exchange of a bucket after its sum, which is waited for.

        The backward pass must not wait: the other branch rank, whose part of the sum it would be, may at that moment
        wait for a gradient that this one has yet to send.  So on a GPU a stream beside waits, and the order in which
        collectives are launched is that of the program, on all communicators together; with gloo, where an exchange
        cannot be queued behind a sum of another group, a thread beside waits, and launches bucket after bucket.
        """
        if self._sums:
            self._sums[bucket].wait()
        x = self.summed[self.pieces[bucket]]
        if self._add_to is not None:
            x = self._add_to[self.pieces[bucket]].add_(x)
        travel = self.exchange.scatter(x, self._weights)
        next(travel)
        self._travels.append(travel)

    # A step

    def weigh(self, factor: Tensor) -> None:
        """What this rank's example, exchanged early, counts: its clipping factor, known only when all of it is."""
        self._late = self.gradient.new_empty(self.mesh.data.size)
        self._late_work = self.data_wire.gather(self._late, factor.to(self._late.dtype).reshape(1))

    def _weights(self) -> Tensor | None:
        """What each data rank's example counts, asked for when all has arrived."""
        self._late_work.wait()
        return self._late

    def count(self, examples: Tensor) -> None:
        """Begin to add up how many examples all data ranks have used since the last step; this one: `examples`."""
        if self.mesh.data.size > 1 and self._late is None:  # otherwise the weights say it
            number = examples.to(self.gradient.dtype, copy=True).reshape(1)
            self._count = number, self.data_wire.begin_sum(number)

    def used(self, examples: Tensor) -> Tensor:
        """Return how many examples all data ranks have used since the last step; this one has used `examples`."""
        if self.mesh.data.size == 1:
            return examples
        if (weights := self._weights()) is not None:
            return weights.count_nonzero()
        if self._count is None:
            self.count(examples)
        assert self._count is not None
        (number, work), self._count = self._count, None
        work.wait()
        return number[0]

    def mean(self, total: Tensor, examples: Tensor) -> Tensor:
        """The mean over the data ranks, and over the `examples` of each, in this rank's shard.

        total: each rank's sum over its examples, in the shard of its model rank; it is written over.
        examples: on average of the ranks; of 0 the result is 0.
        """
        if self.compressor is not None and not examples:  # to know it, the host waits
            return total  # 0; what the compressor carries over stays for the next step
        examples = torch.where(examples == 0, 1, examples.double())
        if self.mesh.data.size == 1:
            return total.div_(examples)
        if self.compressor is not None:
            return self.compressor.mean(total.div_(examples))
        travels = self._travels or [self.exchange.scatter(total[piece], no_weights) for piece in self.pieces]
        owned = [piece.div_(examples * self.mesh.data.size) for piece in finish(travels)]
        self._travels, self._late, self._late_work = [], None, Work(None, "")
        if self.config.shard_state:
            return torch.cat(owned[::-1])
        finish([self.exchange.gather(piece, total[place]) for piece, place in zip(owned, self.pieces)])
        return total

    # Shards

    @property
    def exchange(self) -> Exchange:
        return self.exchanges[self.strategy]

    @property
    def sharded(self) -> bool:
        """Whether a rank owns less than a model rank's shard."""
        return self.config.shard_state and self.mesh.data.size > 1

    @property
    def parts(self) -> int:
        """How many shards there are."""
        return self.mesh.model.size * (self.mesh.data.size if self.sharded else 1)

    @property
    def index(self) -> int:
        """Which is this rank's."""
        return (
            self.mesh.model.rank * self.mesh.data.size + self.exchange.index if self.sharded else self.mesh.model.rank
        )

    def own(self, flat: Tensor) -> Tensor:
        """This rank's shard of a flat buffer: a copy, or the buffer itself where it owns everything."""
        return self.layout.cut(flat, self.parts, self.index)

    def spread(self, owned: Tensor, out: Tensor) -> Tensor:
        """Make `out` the whole of which each rank owns a shard.  Every rank must call it."""
        if self.parts == 1:
            return out if out is owned else out.copy_(owned)
        buckets = zip(self.layout.within(self.parts), self.layout.buckets)
        finish([self._spread(owned[piece], out[bucket]) for piece, bucket in buckets])
        return out

    def _spread(self, piece: Tensor, out: Tensor) -> Stages[None]:
        if self.sharded:
            of_model = out if self.mesh.model.size == 1 else piece.new_empty(len(out) // self.mesh.model.size)
            yield from self.exchange.gather(piece, of_model, exact=True)
            piece = of_model
        if self.mesh.model.size > 1:
            work = self.model_wire.gather(out, piece)
            yield
            work.wait()

    def choose(self, hidden: bool) -> dict[str, float]:
        """Where there is a choice of strategies, measure and choose (see `exchange.choose`); seconds of each."""
        if len(self.exchanges) == 1:
            return {}
        total = torch.zeros_like(self.summed)
        self.strategy, seconds = choose(self.exchanges, self.mesh, total, self.pieces, hidden)
        return seconds

    def sum_of_shards(self, x: Tensor, data: bool = True) -> Tensor:
        """x, which every rank took from its shard, summed over the shards: each part of the whole is counted once.

        data: the shard is what `own` gives; otherwise what `finish` gives.  Changes x.
        """
        if self.mesh.model.size > 1:
            self.model_wire.sum(x)
        if data and self.sharded:
            self.data_wire.sum(x)
        return x

    def norm(self, shard: Tensor, data: bool, loss: Tensor | None = None) -> Tensor:
        """The norm of a flat vector from its shards, a number on the device; `data` as above.

        NaN where any rank's `loss` is not finite.
        """
        norm = torch.linalg.vector_norm(shard)
        if loss is not None:
            norm = norm + 0 * loss.detach()
        if self.mesh.model.size > 1 or (data and self.sharded):
            norm = self.sum_of_shards(norm.double().square(), data).sqrt()
        return norm

    def sent(self) -> Counter[str]:
        """Bytes that this rank has sent, by where and what."""
        wires = {"model": self.model_wire.sent, "data": self.data_wire.sent}
        if isinstance(self.exchange, Hierarchical):
            wires["nodes"] = self.exchange.sent()
        return Counter({f"{where} {kind}": n for where, sent in wires.items() for kind, n in sent.items()})

    # The state

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint needs to go on to the bit.  Every rank must call it; the first one's is complete.

        "sync.strategy", where it was chosen by measurement; "compression.steps", "compression.ranks" and
        "compression.KIND.d.NAME" of data rank d; "compression.shared.m-M" of model rank m of M.
        """
        found = {}
        if len(self.exchanges) > 1:
            found["sync.strategy"] = torch.tensor(STRATEGIES.index(self.strategy))
        if self.compressor is None:
            return found
        found["compression.steps"] = torch.tensor(self.compressor.steps)
        found["compression.ranks"] = torch.tensor(self.mesh.data.size)
        for kind, local in self.compressor.local.items():
            for rank, source in enumerate(self.mesh.data.ranks):
                shard = local.clone()
                with waiting("the state of the data ranks"):
                    dist.broadcast(shard, source, group=self.mesh.data.handle)
                whole = self._whole(shard)
                if self.mesh.world.rank == 0:
                    for name in self.layout.places:
                        found[f"compression.{kind}.{rank}.{name}"] = self.layout.view(whole, name).cpu()
        size = self.mesh.model.size
        for m, row in enumerate(self._rows(self.compressor.shared)):
            found[f"compression.shared.{m}-{size}"] = row
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state`; with another number of data ranks each takes the mean of what all had left to say."""
        if "sync.strategy" in state and (name := STRATEGIES[int(state["sync.strategy"])]) in self.exchanges:
            self.strategy = name
        if self.compressor is None or "compression.steps" not in state:
            return
        self.compressor.steps = int(state["compression.steps"])
        before = int(state["compression.ranks"])
        for kind, local in self.compressor.local.items():
            ranks = [self.mesh.data.rank] if before == self.mesh.data.size else range(before)
            whole = torch.zeros_like(self.gradient)
            for rank in ranks:
                for name in self.layout.places:
                    self.layout.view(whole, name).add_(state[f"compression.{kind}.{rank}.{name}"].to(whole.device))
            local.copy_(self.layout.cut(whole.div_(len(ranks)), self.mesh.model.size, self.mesh.model.rank))
        shared = state.get(f"compression.shared.{self.mesh.model.rank}-{self.mesh.model.size}")
        if shared is not None and shared.shape == self.compressor.shared.shape:  # else it starts anew: it is a guess
            self.compressor.shared.copy_(shared)

    def _whole(self, shard: Tensor) -> Tensor:
        """A flat buffer from the model ranks' shards."""
        if self.mesh.model.size == 1:
            return shard
        whole = torch.empty_like(self.gradient)
        for piece, bucket in zip(self.pieces, self.layout.buckets):
            self.model_wire.gather(whole[bucket], shard[piece]).wait()
        return whole

    def _rows(self, x: Tensor) -> list[Tensor]:
        """The flat tensors of all model ranks, whatever their lengths."""
        if self.mesh.model.size == 1:
            return [x]
        lengths = x.new_empty(self.mesh.model.size, dtype=torch.int64)
        self.model_wire.gather(lengths, lengths.new_tensor([len(x)])).wait()
        longest = int(lengths.max())
        rows = x.new_empty(self.mesh.model.size * longest)
        self.model_wire.gather(rows, torch.cat([x, x.new_zeros(longest - len(x))])).wait()
        return [row[:length] for row, length in zip(rows.view(len(lengths), longest), lengths.tolist())]
