"""A communication hook for torch's DistributedDataParallel that sends less: gradients compressed with error feedback.

    model = DistributedDataParallel(model)
    state = warpfold.CompressionState(model, "int8")
    model.register_comm_hook(state, warpfold.compression_hook)

What compression leaves out of a step is carried over to later ones (parallel/compress.py).  torch has bf16 and low rank
itself: `bf16_compress_hook` and `powerSGD_hook` of torch.distributed.algorithms.ddp_comm_hooks.
"""

import concurrent.futures
import platform
import zlib
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from warpfold.errors import LostError, UserError
from warpfold.parallel.compress import CompressionConfig, Compressor, make_compressor
from warpfold.parallel.exchange import ALIGN, Layout, Plain, Wire, finish, make_hierarchical
from warpfold.parallel.mesh import Group, Mesh, split, time_limit, world
from warpfold.parallel.waits import SerialThread, waiting

Compression = Literal["int8", "1bit"]
Carried = dict[str, Tensor]  # by the name of a parameter: what is carried over, flat


class CompressionState:
    """What `compression_hook` knows: how to send gradients, and what was left out of the steps so far.

    The collectives are those of process groups of its own, so that several models may train side by side.  The mean is
    the same on all ranks to the bit.  A gradient that is not finite on one rank is so on all.  The loop must skip such
    a step, as GradScaler does: the residuals of all buckets are then what they were before the step.  `state_dict`
    and `load_state_dict` are for checkpoints.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        method: Compression,
        *,
        start: int | None = None,
        hierarchical: bool = False,
        ranks_per_node: int | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Make the process groups: every rank must call it, before the first backward pass.

        method: "int8" sends a quarter of fp32's bytes, "1bit" a thirtieth: codes, with a scale for every 256 numbers.
        start: how many first steps send whole gradients; by default none with int8, 1,000 with 1bit.
        hierarchical: add up within each node, then between nodes, where alone gradients are compressed.
        ranks_per_node: None: neighbours whose machines have one name.
        scaler: the loop's GradScaler: what is carried over must not depend on its scale, which changes.
        Errors: UserError for anything else, and where nodes do not have equally many ranks.
        """
        if not isinstance(model, DistributedDataParallel):
            raise UserError(
                f"CompressionState: the model is a {type(model).__name__}; wrap it in DistributedDataParallel first"
            )
        if method not in get_args(Compression):
            raise UserError(f'CompressionState: method = "{method}" is not one of {", ".join(get_args(Compression))}')
        first = start if start is not None else 0 if method == "int8" else CompressionConfig.start
        try:
            self.config = CompressionConfig(method=method, start=first)
        except ValueError as error:
            raise UserError(f"CompressionState: {error}") from error
        self.steps, self.scaler = 0, scaler
        self.names: dict[nn.Parameter, str] = {p: name for name, p in model.module.named_parameters()}
        device = next(model.parameters()).device
        everybody = world()
        limit = time_limit(everybody.handle, device)
        self.group = split("gradient", [everybody.ranks], limit)
        self.wire = Wire(self.group)  # of those that compress together
        self.within: Plain | None = None  # of the ranks of a node, which add up first
        if hierarchical:
            each = ranks_per_node or _ranks_per_node(self.group, device)
            if self.group.size % each:
                raise UserError(
                    f"CompressionState: hierarchical sums need as many ranks on each node; {self.group.size} ranks do "
                    f"not divide by ranks_per_node = {each}; leave hierarchical=True out"
                )
            if 1 < each < self.group.size:
                made = make_hierarchical(Mesh(data=self.group, world=self.group, limit=limit), each)
                self.within, self.wire = made.within, made.between.wire
        # A CPU's collectives hold up the thread that waits for them: not that of the backward pass.
        self._thread = SerialThread() if device.type == "cpu" else None
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._parts: dict[int, _Part] = {}  # by the number of the bucket
        # Of the backward pass under way, by the number of the bucket: the residual before the pass, and whether the
        # mean is finite.
        self._pass: dict[int, tuple[Tensor, Tensor]] = {}
        self._carried: Carried = {}  # of parameters whose bucket is not known yet: of this rank's unit, whole
        self._pending: Future[Tensor] | None = None

    # A backward pass

    def reduce(self, number: int, x: Tensor, parameters: list[Tensor], last: bool) -> Future[Tensor]:
        """Begin to take the mean of a bucket; the future has it.  DDP calls it for one bucket after another."""
        devices: list[int | str | torch.device] | None = [x.device] if x.device.type == "cuda" else None
        future: Future[Tensor] = Future(devices=devices)
        self._pending = future

        def run() -> None:
            """Take the mean, and hand it to DDP."""
            with torch.no_grad():
                mean = x if self.group.size == 1 else self._mean(number, x, parameters)
                if last:
                    self._finish_pass()
            self.steps += last
            future.set_result(mean)

        def ended(done: concurrent.futures.Future[None]) -> None:
            """Pass on what `run` raised."""
            error = done.exception()
            if isinstance(error, LostError):
                error = RuntimeError(
                    f"compression_hook: rank {self.group.rank} of {self.group.size} waited {error.seconds:.0f} s for "
                    f"the others at {error.name!r} ({str(error).splitlines()[0]}); has one ended, failed or had fewer "
                    "batches? Give all equally many, or put the loop under torch.distributed.algorithms.Join"
                )
            if error is not None:  # DDP raises it at the end of the pass
                future.set_exception(error)  # type: ignore[arg-type]  # mypy: torch annotates the value's type

        if self._thread is not None:
            self._thread.submit(run).add_done_callback(ended)
        elif self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(self._side):
                run()
        else:
            run()
        return future

    def _mean(self, number: int, x: Tensor, parameters: list[Tensor]) -> Tensor:
        names = tuple(self.names[p] for p in parameters)  # type: ignore[index]
        part = self._parts.get(number)
        if part is not None and part.names != names:  # DDP has made its buckets anew, on all ranks at once
            self._carried = self._by_name()
            self._parts.clear()
            self._pass.clear()  # of a pass that was broken off
            part = None
        if part is None:
            part = self._parts[number] = _Part(self, names, [p.shape for p in parameters], x)
            part.take(self._carried)
        scale = None if self.scaler is None else self.scaler.scale(x.new_ones(()))
        if scale is not None:
            x = x / scale
        before = part.residual.clone()
        mean = part.mean(x, self.steps)
        mean = mean if scale is None else mean * scale
        self._pass[number] = before, mean.isfinite().all()
        return mean

    def _finish_pass(self) -> None:
        """Restore the residuals of all buckets where one of the pass was not finite, since the loop skips the step.

        All ranks have the same means, so they decide alike without a message.
        """
        if self._pass:
            counts = torch.stack([finite for _, finite in self._pass.values()]).all()
            for number, (before, _) in self._pass.items():
                residual = self._parts[number].residual
                residual.copy_(torch.where(counts, residual, before))
            self._pass.clear()

    # Checkpoints

    def _by_name(self) -> Carried:
        """Collect the residual of this rank's unit, by parameter.  Every rank of a node must call it."""
        found = dict(self._carried)
        for _, part in sorted(self._parts.items()):
            found.update(part.by_name())
        return found

    def state_dict(self) -> dict[str, object]:
        """Return the residuals, complete on rank 0.  Every rank must call it, between two steps.

        "carried": by name of a parameter, [units, numbers]; a unit is what compresses together: a rank, or a
        node.  "steps": how many were taken.
        """
        if self._pending is not None:
            self._pending.wait()
        each = 1 if self.within is None else self.within.wire.group.size
        carried: Carried = {}
        for name, x in self._by_name().items():
            rows = []
            for rank in self.group.ranks[::each]:
                row = x.clone()
                with waiting("what compression carries over"):
                    dist.broadcast(row, rank, group=self.group.handle)
                rows.append(row)
            if self.group.rank == 0:
                carried[name] = torch.stack(rows).cpu()
        return {"steps": self.steps, "carried": carried}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take over what `state_dict` returned on rank 0; with another number of units each takes the mean of all.

        Errors: UserError where it is of another model.
        """
        each = 1 if self.within is None else self.within.wire.group.size
        units, unit = self.group.size // each, self.group.rank // each
        sizes = {name: p.numel() for p, name in self.names.items()}
        self._parts.clear()
        self._carried = {}
        self.steps = int(state["steps"])  # type: ignore[call-overload]
        for name, rows in state["carried"].items():  # type: ignore[attr-defined]
            if rows.shape[1] != sizes.get(name):
                raise UserError(
                    f"CompressionState: {name} has {rows.shape[1]} numbers in the checkpoint and "
                    f"{sizes.get(name, 'none')} in the model; load what this model's state saved"
                )
            self._carried[name] = rows[unit] if len(rows) == units else rows.mean(0)


def compression_hook(state: CompressionState, bucket: dist.GradBucket) -> Future[Tensor]:
    """Replace a bucket's gradients by their mean over the ranks: for `DistributedDataParallel.register_comm_hook`."""
    return state.reduce(bucket.index(), bucket.buffer(), bucket.parameters(), bucket.is_last())


class _Part:
    """What of one bucket this rank compresses: all of it, or the part that it adds up for its node."""

    def __init__(
        self, state: CompressionState, names: tuple[str, ...], shapes: list[torch.Size], gradient: Tensor
    ) -> None:
        self.names, self.within = names, state.within
        ends = [0, *accumulate(shape.numel() for shape in shapes)]
        places = {name: slice(*ends_of) for name, ends_of in zip(names, pairwise(ends))}
        self.end, self.padding = ends[-1], -ends[-1] % (ALIGN * state.group.size)
        whole = slice(0, self.end + self.padding)
        self.layout = Layout(places, dict(zip(names, shapes)), (whole,), (names,), whole.stop)
        self.each, self.index = (1, 0) if self.within is None else (self.within.wire.group.size, self.within.index)
        segments = self.layout.segments(self.each, self.index)
        self.dtype = torch.promote_types(gradient.dtype, torch.float32)
        like = torch.empty(whole.stop // self.each, dtype=self.dtype, device=gradient.device)
        made = make_compressor(state.config, state.wire, like, segments)
        assert made is not None  # there are several units
        self.compressor: Compressor = made
        self.residual = made.local["residual"]  # what this rank carries over

    def mean(self, x: Tensor, steps: int) -> Tensor:
        """Return the mean of flat gradients over all ranks; steps: how many there were before."""
        padded = F.pad(x.to(self.dtype), (0, self.padding))
        if self.within is None:
            padded = self._compressed(padded, steps)
        else:
            (of_node,) = finish([self.within.reduce_scatter(padded)])
            finish([self.within.all_gather(self._compressed(of_node.div_(self.each), steps), padded)])
        return padded[: self.end].to(x.dtype)

    def _compressed(self, x: Tensor, steps: int) -> Tensor:
        """Return the compressed mean; the residual is updated."""
        self.compressor.steps = steps
        return self.compressor.mean(x)

    def by_name(self) -> Carried:
        """Join the residual, by parameter, from the ranks of a node, all of which must call it."""
        whole = self.residual
        if self.within is not None:
            whole = whole.new_empty(len(whole) * self.each)
            finish([self.within.all_gather(self.residual, whole)])
        return {name: whole[place].clone() for name, place in self.layout.places.items()}

    def take(self, carried: Carried) -> None:
        """Take over, and out of `carried`, what belongs to this part's parameters."""
        whole = self.residual.new_zeros(self.layout.size)
        for name, place in self.layout.places.items():
            if name in carried:
                whole[place] = carried.pop(name).to(whole)
        self.residual.copy_(self.layout.shard(whole, self.each, self.index))


def _ranks_per_node(group: Group, device: torch.device) -> int:
    """Return how many neighbours are on each machine, by its name.  Errors: UserError where that differs."""
    if group.size == 1:
        return 1
    own = torch.tensor([zlib.crc32(platform.node().encode())], device=device)
    names = torch.empty(group.size, dtype=own.dtype, device=device)
    Wire(group).all_gather(names, own).wait()
    runs = torch.unique_consecutive(names, return_counts=True)[1].tolist()
    if len(set(runs)) > 1:
        raise UserError(
            "CompressionState: hierarchical sums need as many ranks on each node; here are "
            f"{', '.join(map(str, runs))} in a row on one; leave hierarchical=True out, or say ranks_per_node"
        )
    return int(runs[0])
