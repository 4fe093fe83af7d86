"""Communication hook for torch's DistributedDataParallel that compresses gradients with error feedback.

    model = DistributedDataParallel(model)
    state = warpfold.CompressionState(model, "int8")
    model.register_comm_hook(state, warpfold.compression_hook)

The error of compression in a step is carried over to later steps (parallel/compress.py).  For bf16 and low rank, torch
has `bf16_compress_hook` and `powerSGD_hook` in torch.distributed.algorithms.ddp_comm_hooks.
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
Residuals = dict[str, Tensor]  # parameter name -> flat residual


class CompressionState:
    """State of `compression_hook`: process groups, compressors, and residuals of the steps so far.

    The process groups are its own, so that several models may train in one process.  All bits of the mean are equal on
    all ranks.  A gradient that is not finite on one rank becomes so on all ranks.  The loop must skip such a step, as
    GradScaler does.  The residuals of all buckets are then restored to their values before the step.
    A unit is what compresses by itself: a rank, or a node with hierarchical sums.
    Use `state_dict` and `load_state_dict` for checkpoints.
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
        """Create the process groups.  Every rank must call this before the first backward pass.

        method: "int8" sends a quarter of fp32's bytes, "1bit" a thirtieth.  Both send codes and a scale for every 256
            numbers.
        start: number of first steps that send whole gradients; by default 0 with int8 and 1,000 with 1bit.
        hierarchical: sum within each node without compression, then between nodes with compression.
        ranks_per_node: by default the number of neighbouring ranks whose machines have the same name.
        scaler: the loop's GradScaler.  Residuals must not depend on its scale, which changes.
        Errors: UserError for other arguments, and if nodes have different numbers of ranks.
        """
        if not isinstance(model, DistributedDataParallel):
            raise UserError(
                f"CompressionState: the model is a {type(model).__name__}. Wrap it in DistributedDataParallel first."
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
        every_rank = world()
        limit = time_limit(every_rank.handle, device)
        self.group = split("gradient", [every_rank.ranks], limit)
        self.wire = Wire(self.group)  # between units that compress
        self.within: Plain | None = None  # within a node, uncompressed
        if hierarchical:
            unit_size = ranks_per_node or _ranks_per_node(self.group, device)
            if self.group.size % unit_size:
                raise UserError(
                    f"CompressionState: hierarchical sums need equal numbers of ranks on all nodes, and "
                    f"{self.group.size} ranks do not divide by ranks_per_node = {unit_size}. Remove hierarchical=True."
                )
            if 1 < unit_size < self.group.size:
                hierarchy = make_hierarchical(Mesh(data=self.group, world=self.group, limit=limit), unit_size)
                self.within, self.wire = hierarchy.within, hierarchy.between.wire
        # Collectives on a CPU block the thread that waits for them, which must not be that of the backward pass.
        self._thread = SerialThread() if device.type == "cpu" else None
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buckets: dict[int, _Bucket] = {}  # by number
        # For each bucket of the current backward pass, the residual before the pass, and whether the mean is finite.
        self._pass: dict[int, tuple[Tensor, Tensor]] = {}
        # Whole residuals of this rank's unit, for parameters whose bucket is not known yet.
        self._carried: Residuals = {}
        self._pending: Future[Tensor] | None = None

    # A backward pass

    def reduce(self, number: int, x: Tensor, parameters: list[Tensor], last: bool) -> Future[Tensor]:
        """Begin to compute the mean of a bucket; return its future.  DDP calls this for one bucket after another."""
        devices: list[int | str | torch.device] | None = [x.device] if x.device.type == "cuda" else None
        future: Future[Tensor] = Future(devices=devices)
        self._pending = future

        def run() -> None:
            """Compute the mean, and hand it to DDP."""
            with torch.no_grad():
                mean = x if self.group.size == 1 else self._mean(number, x, parameters)
                if last:
                    self._finish_pass()
            self.steps += last
            future.set_result(mean)

        def ended(done: concurrent.futures.Future[None]) -> None:
            """Pass an exception of `run` to DDP, which raises it at the end of the pass."""
            error = done.exception()
            if isinstance(error, LostError):
                error = RuntimeError(
                    f"compression_hook: rank {self.group.rank} of {self.group.size} waited {error.seconds:.0f} s for "
                    f"the others at {error.name!r} ({str(error).splitlines()[0]}); has one ended, failed or had fewer "
                    "batches? Give all ranks equal numbers, or put the loop under torch.distributed.algorithms.Join."
                )
            if error is not None:
                future.set_exception(error)  # type: ignore[arg-type]  # mypy: torch annotates the value's type

        if self._thread is not None:
            self._thread.submit(run).add_done_callback(ended)
        elif self._side is not None:
            # The side stream waits for the gradients, and the backward pass continues on its own stream.
            self._side.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(self._side):
                run()
        else:
            run()
        return future

    def _mean(self, number: int, x: Tensor, parameters: list[Tensor]) -> Tensor:
        names = tuple(self.names[p] for p in parameters)  # type: ignore[index]
        bucket = self._buckets.get(number)
        if bucket is not None and bucket.names != names:
            # DDP has rebuilt its buckets, on all ranks at the same time.  Residuals of an interrupted pass are dropped.
            self._carried = self._residuals_by_name()
            self._buckets.clear()
            self._pass.clear()
            bucket = None
        if bucket is None:
            bucket = self._buckets[number] = _Bucket(self, names, [p.shape for p in parameters], x)
            bucket.claim_residuals(self._carried)
        scale = None if self.scaler is None else self.scaler.scale(x.new_ones(()))
        if scale is not None:
            x = x / scale
        before = bucket.residual.clone()
        mean = bucket.mean(x, self.steps)
        mean = mean if scale is None else mean * scale
        self._pass[number] = before, mean.isfinite().all()
        return mean

    def _finish_pass(self) -> None:
        """Restore the residuals of all buckets if the mean of one is not finite, since the loop skips the step.

        All ranks have the same means, so they make the same decision without a message.
        """
        if self._pass:
            is_finite = torch.stack([finite for _, finite in self._pass.values()]).all()
            for number, (before, _) in self._pass.items():
                residual = self._buckets[number].residual
                residual.copy_(torch.where(is_finite, residual, before))
            self._pass.clear()

    # Checkpoints

    def _residuals_by_name(self) -> Residuals:
        """Gather the residuals of this rank's unit, by parameter.  Every rank of a node must call this."""
        residuals = dict(self._carried)
        for _, bucket in sorted(self._buckets.items()):
            residuals.update(bucket.residuals_by_name())
        return residuals

    def state_dict(self) -> dict[str, object]:
        """Gather the residuals, complete on rank 0.  Every rank must call this, between two steps.

        "carried": by parameter name, [units, numbers].  "steps": the number of steps.
        """
        if self._pending is not None:
            self._pending.wait()
        unit_size = 1 if self.within is None else self.within.wire.group.size
        carried: Residuals = {}
        for name, x in self._residuals_by_name().items():
            rows = []
            for rank in self.group.ranks[::unit_size]:
                row = x.clone()
                with waiting("what compression carries over"):
                    dist.broadcast(row, rank, group=self.group.handle)
                rows.append(row)
            if self.group.rank == 0:
                carried[name] = torch.stack(rows).cpu()
        return {"steps": self.steps, "carried": carried}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore the state that `state_dict` returned on rank 0.  Every rank calls this with that state.

        If the number of units differs, each unit takes the mean of all.
        Errors: UserError for the state of another model.
        """
        unit_size = 1 if self.within is None else self.within.wire.group.size
        units, unit = self.group.size // unit_size, self.group.rank // unit_size
        sizes = {name: p.numel() for p, name in self.names.items()}
        self._buckets.clear()
        self._carried = {}
        self.steps = int(state["steps"])  # type: ignore[call-overload]
        for name, rows in state["carried"].items():  # type: ignore[attr-defined]
            if rows.shape[1] != sizes.get(name):
                raise UserError(
                    f"CompressionState: {name} has {rows.shape[1]} numbers in the checkpoint and "
                    f"{sizes.get(name, 'none')} in the model. Load a state of this model."
                )
            self._carried[name] = rows[unit] if len(rows) == units else rows.mean(0)


def compression_hook(state: CompressionState, bucket: dist.GradBucket) -> Future[Tensor]:
    """Replace a bucket's gradients by their mean over the ranks, for `DistributedDataParallel.register_comm_hook`."""
    return state.reduce(bucket.index(), bucket.buffer(), bucket.parameters(), bucket.is_last())


class _Bucket:
    """The compressor and the residual of this rank for a bucket, or for the shard that it sums for its node."""

    def __init__(
        self, state: CompressionState, names: tuple[str, ...], shapes: list[torch.Size], gradient: Tensor
    ) -> None:
        self.names, self.within = names, state.within
        ends = [0, *accumulate(shape.numel() for shape in shapes)]
        places = {name: slice(*ends_of) for name, ends_of in zip(names, pairwise(ends))}
        self.end, self.padding = ends[-1], -ends[-1] % (ALIGN * state.group.size)
        whole = slice(0, self.end + self.padding)
        self.layout = Layout(places, dict(zip(names, shapes)), (whole,), (names,), whole.stop)
        self.unit_size, self.index = (1, 0) if self.within is None else (self.within.wire.group.size, self.within.index)
        segments = self.layout.segments(self.unit_size, self.index)
        self.dtype = torch.promote_types(gradient.dtype, torch.float32)
        like = torch.empty(whole.stop // self.unit_size, dtype=self.dtype, device=gradient.device)
        compressor = make_compressor(state.config, state.wire, like, segments)
        # There are several units.
        assert compressor is not None
        self.compressor: Compressor = compressor
        self.residual = compressor.local["residual"]

    def mean(self, x: Tensor, steps: int) -> Tensor:
        """Compute the mean of flat gradients over all ranks, and update the residual.  steps: done before."""
        padded = F.pad(x.to(self.dtype), (0, self.padding))
        self.compressor.steps = steps
        if self.within is None:
            padded = self.compressor.mean(padded)
        else:
            # Each rank sums a shard within its node, compresses it between nodes, and the node gathers the shards.
            (shard,) = finish([self.within.reduce_scatter(padded)])
            finish([self.within.all_gather(self.compressor.mean(shard.div_(self.unit_size)), padded)])
        return padded[: self.end].to(x.dtype)

    def residuals_by_name(self) -> Residuals:
        """Gather the residual from the ranks of a node, all of which must call this, and split it by parameter."""
        whole = self.residual
        if self.within is not None:
            whole = whole.new_empty(len(whole) * self.unit_size)
            finish([self.within.all_gather(self.residual, whole)])
        return {name: whole[place].clone() for name, place in self.layout.places.items()}

    def claim_residuals(self, carried: Residuals) -> None:
        """Move the residuals of this bucket's parameters out of `carried`."""
        whole = self.residual.new_zeros(self.layout.size)
        for name, place in self.layout.places.items():
            if name in carried:
                whole[place] = carried.pop(name).to(whole)
        self.residual.copy_(self.layout.shard(whole, self.unit_size, self.index))


def _ranks_per_node(group: Group, device: torch.device) -> int:
    """Count the neighbouring ranks on each machine, by its name.  Errors: UserError if the counts differ."""
    if group.size == 1:
        return 1
    name = torch.tensor([zlib.crc32(platform.node().encode())], device=device)
    names = torch.empty(group.size, dtype=name.dtype, device=device)
    Wire(group).all_gather(names, name).wait()
    runs = torch.unique_consecutive(names, return_counts=True)[1].tolist()
    if len(set(runs)) > 1:
        raise UserError(
            "CompressionState: hierarchical sums need equal numbers of ranks on all nodes, and the nodes have "
            f"{', '.join(map(str, runs))} neighbouring ranks. Remove hierarchical=True, or pass ranks_per_node."
        )
    return int(runs[0])
