"""Take the mean of gradients over the replicas of any model while its backward pass runs.

Gradients lie in flat buffers (engine/flat.py), and a buffer is cut into buckets of equal length, wherever parameters
begin: a bucket is sent as soon as all that lie in it have their gradients.  Hooks fire in another order on each rank,
and other parameters take part; so buckets are sent in one order everywhere, that of the first rank's first pass, and
what took no part is sent as zeros.  When `backward()` returns, every p.grad is the mean, as after torch's DDP.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from warpfold.engine.compressed import BufferPart
from warpfold.engine.flat_buffer import FlatBuffer, set_hook
from warpfold.engine.gradient_buckets import FlatBucket, GradientLeaf, cut, gaps, put
from warpfold.errors import UserError
from warpfold.parallel.compress import CompressionConfig
from warpfold.parallel.exchange import Exchange, Hierarchical, Stages, Wire, finish
from warpfold.parallel.waits import LostError, SerialThread, Work, waiting


class GradientMean:
    """Reduce the gradients of one backward pass after the other, by hooks on the leaves of autograd.

    exchange: None: one all-reduce for each bucket.  sharded: each rank has the mean of its own pieces only afterwards
    (`pieces`), and NaN in the others, so that nobody takes them for a mean.  extras: exchanges that follow each pass's.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        wire: Wire,
        exchange: Exchange | None,
        compression: CompressionConfig | None,
        bucket_bytes: float,
        sharded: bool,
        extras: Sequence[Callable[[], Stages[None]]] = (),
    ) -> None:
        self.buffers, self.wire, self.exchange, self.sharded = list(buffers), wire, exchange, sharded
        self.extras = list(extras)
        ranks, self.device = wire.group.size, buffers[0].gradient.device
        self.compressed: list[BufferPart] = []
        if compression is not None:
            within, of = (
                (exchange.within, exchange.between.wire) if isinstance(exchange, Hierarchical) else (None, wire)
            )
            self.compressed = [BufferPart(buffer, compression, of, within) for buffer in buffers]
        self.scale = 1.0 if self.compressed else 1 / ranks
        self.buckets: list[FlatBucket] = []
        self.leaves: list[GradientLeaf] = []
        for number, buffer in enumerate(buffers):
            self._add(number, buffer, cut(len(buffer.gradient), buffer.gradient.itemsize, bucket_bytes, ranks))
        self.order = list(range(len(self.buckets)))[::-1]
        self.order.sort(key=lambda b: (-self.buckets[b].buffer, -self.buckets[b].where.start))
        self.gaps = [gaps(buffer) for buffer in buffers] if sharded else []
        staged = exchange is not None and not self.compressed
        self._thread = SerialThread() if staged and self.device.type == "cpu" else None
        self._side = torch.cuda.Stream(self.device) if staged and self.device.type == "cuda" else None
        self.syncing, self.synced, self.ordered = True, False, False
        self.alone = False  # whether this rank has no more batches, and only takes part for the others' sake
        self._reset()
        for number, leaf in enumerate(self.leaves):  # in place of Flat's own hook, or of earlier Replicas'
            set_hook(leaf.parameter, partial(self._arrived, number))

    def _add(self, number: int, buffer: FlatBuffer, cuts: Sequence[slice]) -> None:
        first = len(self.buckets)
        inside: list[list[int]] = [[] for _ in cuts]
        for name, place in buffer.places.items():
            within = [k for k, c in enumerate(cuts) if c.start < place.stop and place.start < c.stop]
            for k in within:
                inside[k].append(len(self.leaves))
            p = buffer.parameters[name]
            node = get_gradient_edge(p).node
            self.leaves.append(GradientLeaf(name, p, buffer.gradients[name], node, tuple(first + k for k in within)))
        self.buckets += [FlatBucket(number, c, tuple(of)) for c, of in zip(cuts, inside)]

    # A backward pass

    def _reset(self) -> None:
        self._due: list[int] | None = None  # how many gradients each bucket waits for; None: no pass has begun
        self._sent = 0  # how many buckets of `order` were
        self._placed = bytearray(len(self.leaves))
        self._complete: list[int] = []  # buckets, in the order in which they had all their gradients
        self._running: list[Stages[None]] = []  # exchanges that have begun
        self._launches: list[Future[None]] = []
        # Which parameters were used, on any rank once the work has ended; last, ranks less the first that has batches.
        self._flags: Tensor | None = None
        self._flags_work = Work(None, "")

    def _arrived(self, number: int, parameter: Tensor) -> None:
        """Note that a parameter has its gradient of this pass: autograd calls this once, whatever its uses."""
        if not self.syncing:
            put(self.leaves[number], 1.0)
            self.synced = False
            return
        if self._due is None:
            self._begin(number)
        assert self._due is not None
        self._place(number)
        for bucket in self.leaves[number].buckets:
            self._due[bucket] -= 1
            if self._due[bucket] < 0:
                raise RuntimeError(
                    f"{self.leaves[number].name}: a gradient after its bucket was sent; checkpoint with "
                    "use_reentrant=False, and call backward() once for each loss"
                )
            if not self._due[bucket]:
                self._complete.append(bucket)
        self._send_all(due=True)

    def _begin(self, number: int | None = None) -> None:
        """Begin a pass: find what takes part, and tell the others; number: of the first leaf that arrived."""
        self._due = [0] * len(self.buckets)
        used = [0] * (len(self.leaves) + 1)
        used[-1] = 0 if self.alone else self.wire.group.size - self.wire.group.rank
        for k, leaf in enumerate(self.leaves):
            takes_part = number is not None and torch._C._will_engine_execute_node(leaf.node)
            if takes_part:  # what torch.autograd.graph.register_multi_grad_hook asks
                for bucket in leaf.buckets:
                    self._due[bucket] += 1
            used[k] = takes_part or leaf.parameter.grad is not None
        if number is not None:
            self._complete += [bucket for bucket, due in enumerate(self._due) if not due]
        self._flags = torch.tensor(used, dtype=torch.int32, device=self.device)
        self._flags_work = self.wire.all_reduce(self._flags, dist.ReduceOp.MAX)
        if number is not None:
            self._check_fresh(self.leaves[number])
            torch.autograd.Variable._execution_engine.queue_callback(self.complete)

    def _check_fresh(self, leaf: GradientLeaf) -> None:
        """Raise UserError where a gradient was added to pieces that other ranks own."""
        grad = leaf.parameter.grad
        again = self.sharded and self.synced and grad is not None and grad.data_ptr() == leaf.view.data_ptr()
        if again and bool(leaf.view.isnan().any()):
            raise UserError(
                "Replicas(shard=True): a second backward pass before step(), when the ranks have shared the gradients "
                "out already; put all passes of a step but the last under replicas.no_sync()"
            )

    def _send_all(self, due: bool) -> None:
        while self._sent < len(self.order):
            bucket = self.order[self._sent]
            if due and self._due is not None and self._due[bucket]:
                return
            self._sent += 1
            self._send(self.buckets[bucket])

    def _send(self, bucket: FlatBucket) -> None:
        """Begin the exchange of a bucket, with all gradients in their places."""
        for number in bucket.leaves:
            self._place(number)
        if self.compressed:
            return
        exchange = self._exchange(bucket)
        if self._thread is not None:
            self._launches.append(self._thread.submit(partial(self._push, exchange)))
        elif self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._side):
                finish([exchange])  # the stream waits, not the host
        else:
            next(exchange)
            self._running.append(exchange)

    def _place(self, number: int) -> None:
        """Put a gradient, or zeros where there is none, into its place, once in a pass."""
        if not self._placed[number]:
            self._placed[number] = True
            put(self.leaves[number], self.scale)

    def _push(self, exchange: Stages[None]) -> None:
        """Begin an exchange, and move those before it on by a stage: in one order on every rank (in the thread)."""
        next(exchange)
        self._running = [e for e in self._running if next(e, True) is None]
        self._running.append(exchange)

    def _exchange(self, bucket: FlatBucket) -> Stages[None]:
        x = self.buffers[bucket.buffer].gradient[bucket.where]
        if self.exchange is None:
            work = self.wire.all_reduce(x)
            yield
            work.wait()
            return
        owned = yield from self.exchange.reduce_scatter(x)
        if self.sharded:
            x.fill_(torch.nan)
            x[self._piece(len(x))] = owned
        else:
            yield from self.exchange.all_gather(owned, x)

    def complete(self) -> None:
        """End a pass: send what is left, wait for all, and give a gradient to what was used on other ranks.

        Errors: LostError, one line, where another rank has ended or does not come.
        """
        try:
            self._complete_pass()
        except LostError as error:
            rank, ranks = self.wire.group.rank, self.wire.group.size
            raise LostError(
                error.name,
                error.seconds,
                RuntimeError(
                    f"Replicas: rank {rank} of {ranks} waited {error.seconds:.0f} s for the others at {error.name!r} "
                    f"({str(error).splitlines()[0]}); has one ended, failed or had fewer batches? Give all equally "
                    "many, or put the loop under `with replicas.join():`"
                ),
            ) from error

    def _complete_pass(self) -> None:
        if self._due is None:
            self._begin()
        self._send_all(due=False)
        for launch in self._launches:
            launch.result()
        with torch.no_grad():
            extras = [begin() for begin in self.extras]
            for extra in extras:
                next(extra, None)
            finish([*self._running, *extras])
            if self._side is not None:
                torch.cuda.current_stream(self.device).wait_stream(self._side)
            for part in self.compressed:
                part.mean()
            for buffer, between in zip(self.buffers, self.gaps):
                buffer.gradient[between] = 0
        self._flags_work.wait()
        absent = [(k, leaf) for k, leaf in enumerate(self.leaves) if leaf.parameter.grad is None]
        if absent:
            assert self._flags is not None
            used = self._flags.tolist()  # on a GPU, the host waits for it
            for k, leaf in absent:
                if used[k]:
                    leaf.parameter.grad = leaf.view
        self._learn_order()
        self._reset()
        self.synced = True

    def _learn_order(self) -> None:
        """Send buckets in the order in which the first rank's first pass had them ready, from now on, on every rank."""
        if self.ordered:
            return
        left = [bucket for bucket in self.order if bucket not in self._complete]
        order = torch.tensor(self._complete + left, device=self.device)
        with waiting("the order of buckets"):
            dist.broadcast(order, 0, group=self.wire.group.handle)
        self.order, self.ordered = order.tolist(), True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of backward passes within the context on their ranks, to be added up."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    def shadow(self) -> bool:
        """Take part in one pass of the others without a gradient; return False, having done nothing, when none has one.

        Every rank that has no more batches calls it, until it says False.
        """
        self.alone = True
        self._clear()
        self._begin()
        if others := self.first_active() < self.wire.group.size:
            self.complete()
            self._clear()
        else:
            self._reset()
        self.alone = False
        return others

    def first_active(self) -> int:
        """Return the first rank that has a batch in this pass; the number of ranks where none has."""
        assert self._flags is not None
        self._flags_work.wait()
        return self.wire.group.size - int(self._flags[-1])

    def _clear(self) -> None:
        for leaf in self.leaves:
            leaf.parameter.grad = None

    # What the optimizer calls

    def finish(self) -> None:
        """Make sure that every gradient is the mean, before a step reads it."""
        if self.syncing and not self.synced:
            self.complete()

    def begin(self) -> None:
        """Make the weights whole after a step, where each rank has updated its pieces only."""
        self.synced = False
        if self.sharded:
            self._gather([buffer.weights for buffer in self.buffers])

    def sum(self, x: Tensor) -> Tensor:
        """Add up x, which every rank computed from the pieces that it owns, over the ranks.  Changes x."""
        if self.sharded:
            self.wire.all_reduce(x).wait()
        return x

    def pieces(self) -> list[list[slice]]:
        """Return which slices of each buffer this rank updates, from first to last: a piece of every bucket."""
        if not self.sharded:
            return [[slice(0, len(buffer.weights))] for buffer in self.buffers]
        found: list[list[slice]] = [[] for _ in self.buffers]
        for bucket in sorted(self.buckets, key=lambda b: b.where.start):
            piece = self._piece(bucket.where.stop - bucket.where.start)
            found[bucket.buffer].append(slice(bucket.where.start + piece.start, bucket.where.start + piece.stop))
        return found

    def all_gather(self, number: int, owned: Tensor) -> Tensor:
        """Return a whole flat tensor of buffer `number` from what every rank owns: its pieces, joined."""
        if not self.sharded:
            return owned
        whole = owned.new_zeros(len(self.buffers[number].weights))
        pieces = self.pieces()[number]
        for piece, part in zip(pieces, owned.split([piece.stop - piece.start for piece in pieces])):
            whole[piece] = part
        self._gather([whole], number)
        return whole

    def _gather(self, flat: Sequence[Tensor], first: int = 0) -> None:
        """Fill flat tensors, of buffers from `first` on, with the pieces of all ranks; each has its own."""
        assert self.exchange is not None
        begun = []
        for bucket in self.buckets:
            if first <= bucket.buffer < first + len(flat):
                out = flat[bucket.buffer - first][bucket.where]
                begun.append(self.exchange.all_gather(out[self._piece(len(out))].clone(), out, exact=True))
        finish(begun)

    def _piece(self, length: int) -> slice:
        assert self.exchange is not None
        each = length // self.wire.group.size
        return slice(self.exchange.index * each, (self.exchange.index + 1) * each)
