"""Replicas: train any model on many processes, as torch's DistributedDataParallel does, with less to send.

    optimizer = warpfold.Flat(model, torch.optim.Adam, lr=1e-3)
    replicas = warpfold.Replicas(model, optimizer)  # under torchrun, after init_process_group
    for batch in loader:
        loss(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

The model is not wrapped: it is called as before.  Without a process group everything here does nothing.
"""

import platform
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from warpfold.engine.compressed import carried_over, take_over
from warpfold.engine.flat import Flat
from warpfold.engine.mean import GradientMean
from warpfold.engine.state_messages import as_bytes, broadcast_bytes, broadcast_state, from_bytes
from warpfold.errors import UserError
from warpfold.parallel.compress import CompressionConfig
from warpfold.parallel.exchange import Bf16, Exchange, Plain, Stages, Wire, make_hierarchical
from warpfold.parallel.mesh import Group, Mesh, time_limit
from warpfold.parallel.replicas import check_replicas

Compression = Literal["bf16", "int8", "1bit", "topk", "powersgd"]


class Replicas:
    """Keep the replicas of a model on all ranks of the process group the same.

    The first weights and buffers are those of rank 0.  After `backward()` every gradient is the mean over the ranks,
    and the model's buffers (statistics of BatchNorm) are those of rank 0; what no rank used has no gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Flat,
        *,
        hierarchical: bool = False,
        compression: Compression | CompressionConfig | None = None,
        shard: bool = False,
        bucket_mb: float = 4.0,
        ranks_per_node: int | None = None,
    ) -> None:
        """Send rank 0's weights to all, and have each backward pass take the mean.  Every rank must call it.

        hierarchical: add up within each node, then between nodes.
        compression: "bf16" rounds what is sent; "int8" from the first step on, "1bit", "topk" and "powersgd" after
        1,000 whole steps (or as a CompressionConfig says) carry over what they leave out.
        shard: each rank keeps the optimizer's state of its part only (ZeRO, stage 1).
        bucket_mb: MB of gradients that are sent together.
        ranks_per_node: of hierarchical sums; None: neighbours whose machines have one name.
        Errors: UserError, one line, for a model or a choice that this does not serve.
        """
        self.model, self.optimizer = model, optimizer
        self.mean: GradientMean | None = None
        config = _config(compression)
        _check(model, optimizer, config, shard, bucket_mb)
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        world = Group(
            "data", dist.get_rank(), dist.get_world_size(), (*range(dist.get_world_size()),), dist.group.WORLD
        )
        self.wire, self._device = Wire(world), optimizer.buffers[0].weights.device
        _check_group(self._device, world)
        _check_same(model, optimizer, self.wire, self._device)
        self._joining = False
        self._held = [(module._buffers, name) for module in model.modules() for name in module._buffers]
        self._begin_together()
        exchange: Exchange | None = None
        if hierarchical:
            exchange = self._hierarchical(ranks_per_node, compression == "bf16")
        if exchange is None and compression == "bf16":
            exchange = Bf16(self.wire)
        if exchange is None and shard:
            exchange = Plain(self.wire)
        buffers = [self._buffers] if self._held else []
        self.mean = GradientMean(optimizer.buffers, self.wire, exchange, config, bucket_mb * 1e6, shard, buffers)
        optimizer.own(self.mean.pieces())
        optimizer.reducer = self.mean

    def _begin_together(self) -> None:
        """Give every rank the weights and buffers of rank 0, and what the optimizer has made of the weights."""
        flat = {id(p) for buffer in self.optimizer.buffers for p in buffer.parameters.values()}
        frozen = [p.detach() for p in self.model.parameters() if id(p) not in flat]
        flats = [(buffer.weights, buffer.average, buffer.master) for buffer in self.optimizer.buffers]
        with torch.no_grad():
            broadcast_bytes([x for three in flats for x in three if x is not None], 0, self.wire)
            broadcast_bytes([*frozen, *self._module_buffers()], 0, self.wire)

    def _hierarchical(self, ranks_per_node: int | None, rounded: bool) -> Exchange | None:
        """Return sums within nodes and then between them; None where every node has one rank, or there is one node."""
        group = self.wire.group
        each = ranks_per_node or _ranks_per_node(self._device, self.wire)
        if each in (1, group.size):
            return None
        if group.size % each:
            raise UserError(
                f"Replicas: hierarchical sums need as many ranks on each node; {group.size} ranks do not divide by "
                f"ranks_per_node = {each}; leave hierarchical=True out"
            )
        mesh = Mesh(data=group, world=group, limit=time_limit(group.handle, self._device))
        exchange = make_hierarchical(mesh, each)
        if rounded:
            exchange.between = Bf16(exchange.between.wire)
        return exchange

    # Buffers of modules

    def _module_buffers(self) -> list[Tensor]:
        found = {id(b): b.detach() for held, name in self._held if (b := held.get(name)) is not None}
        return list(found.values())

    def _buffers(self) -> Stages[None]:
        """Give every rank the module buffers of rank 0: an exchange that follows each backward pass."""
        buffers = self._module_buffers()
        if not buffers:
            return
        flat, source = as_bytes(buffers), self._source
        work = self.wire.broadcast(flat, source)
        yield
        work.wait()
        if self.wire.group.rank != source:
            from_bytes(flat, buffers)

    @property
    def _source(self) -> int:
        """The rank whose module buffers all get: the first; under `join` the first that still has batches."""
        assert self.mean is not None
        return self.mean.first_active() if self._joining else 0

    # What a loop calls

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of backward passes within the context on their ranks: for all but a step's last."""
        with nullcontext() if self.mean is None else self.mean.no_sync():
            yield

    @contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks have different numbers of batches: put the loop within the context.

        A rank that has no more takes part with zeros, so that the mean stays that over all ranks (as torch's Join by
        default); in the end all have the weights, buffers and optimizer's state of one that went on longest.
        Errors: UserError with shard=True, where a rank would have to take the others' steps.
        """
        mean = self.mean
        if mean is None:
            yield
            return
        if mean.sharded:
            raise UserError(
                "Replicas(shard=True) cannot join(): give all ranks equally many batches, or leave shard out"
            )
        self._joining = True
        try:
            yield
            missed = 0
            while mean.shadow():
                missed += 1
        finally:
            self._joining = False
        size, rank = self.wire.group.size, self.wire.group.rank
        found = torch.tensor([(size - rank) * (missed == 0), missed], device=self._device)
        self.wire.all_reduce(found, dist.ReduceOp.MAX).wait()
        last, most = size - int(found[0]), int(found[1])
        if not most:
            return  # all had equally many
        with torch.no_grad():
            broadcast_bytes([buffer.weights for buffer in self.optimizer.buffers], last, self.wire)
            broadcast_bytes(self._module_buffers(), last, self.wire)
        state = broadcast_state(self.optimizer.state_dict(), last, self.wire, self._device)
        if self.wire.group.rank != last:
            self.optimizer.load_state_dict(state)
        self.optimizer.zero_grad()

    def check(self, when: str = "now") -> None:
        """Compare the weights of all ranks, bit by bit.  Every rank must call it.

        Errors: ReplicaError, on every rank, that names parameters and ranks.
        """
        if self.mean is not None:
            for buffer in self.optimizer.buffers:
                check_replicas(buffer.weights, buffer.layout, self.wire.group, when)

    def state_dict(self) -> dict[str, Tensor]:
        """Return what compression carries over, complete on rank 0; {} without.  Every rank must call it."""
        return {} if self.mean is None else carried_over(self.mean.compressed, self.wire)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` returned on rank 0, on as many ranks or others."""
        if self.mean is not None:
            take_over(self.mean.compressed, state, self.wire.group.rank)


def _config(compression: Compression | CompressionConfig | None) -> CompressionConfig | None:
    """Return the settings of a compressor; None where gradients are sent whole, or rounded."""
    if isinstance(compression, CompressionConfig):
        return None if compression.method == "none" else compression
    if compression is None or compression == "bf16":
        return None
    if compression not in get_args(Compression):
        raise UserError(
            f'Replicas: compression = "{compression}" is not one of {", ".join(get_args(Compression))}, None'
        )
    return CompressionConfig(method=compression, start=0 if compression == "int8" else CompressionConfig.start)


def _check(model: nn.Module, optimizer: Flat, config: CompressionConfig | None, shard: bool, bucket_mb: float) -> None:
    """Raise UserError for what this process can see is not served."""
    if not isinstance(optimizer, Flat):
        raise UserError(
            f"Replicas: the optimizer is a {type(optimizer).__name__}, which keeps gradients apart; make it with "
            f"warpfold.Flat(model, torch.optim.{type(optimizer).__name__}, ...)"
        )
    if optimizer.reducer is not None:
        raise UserError("Replicas: this optimizer has its Replicas already; make them once")
    if shard and config is not None:
        raise UserError("Replicas: shard=True gathers whole weights, which costs what compression saves; choose one")
    if not bucket_mb > 0:
        raise UserError(f"Replicas: bucket_mb = {bucket_mb} must be positive")
    if found := next((name for module in model.modules() if (name := _wrapper(module))), None):
        raise UserError(
            f"Replicas: the model is wrapped in torch's {found}, which takes means itself; leave one of the two out"
        )
    own = {id(p) for buffer in optimizer.buffers for p in buffer.parameters.values()}
    for name, p in model.named_parameters():
        if hasattr(p, "device_mesh"):
            raise UserError(
                f"Replicas: {name} is a DTensor, sharded by torch; use torch's own data parallelism with it"
            )
        if p.requires_grad and id(p) not in own:
            raise UserError(
                f"Replicas: {name} requires a gradient but is not the optimizer's, so nobody would take its mean; give "
                "it to Flat, or freeze it (requires_grad_(False)) before"
            )
    devices = {str(buffer.weights.device) for buffer in optimizer.buffers}
    if len(devices) != 1:
        raise UserError(f"Replicas: parameters on {', '.join(sorted(devices)) or 'no device'}; one device per process")


def _wrapper(module: nn.Module) -> str | None:
    """Return the name of the class of torch's that distributes a module; None for an ordinary one."""
    bases = {base.__name__ for base in type(module).__mro__ if base.__module__.startswith("torch.")}
    names = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel")
    return next((name for name in names if name in bases), None)


def _check_group(device: torch.device, world: Group) -> None:
    assert world.handle is not None
    served = [str(d) for d in world.handle._device_types]
    if device.type not in served:
        raise UserError(
            f"Replicas: the process group serves {', '.join(served)}, and the model is on {device.type}; move it "
            'before Flat is made, or initialise the group with "cpu:gloo,cuda:nccl"'
        )


def _check_same(model: nn.Module, optimizer: Flat, wire: Wire, device: torch.device) -> None:
    """Raise UserError on every rank where the ranks' models differ in names, shapes, dtypes or groups."""
    lines = [f"{name} {list(p.shape)} {p.dtype} {p.requires_grad}" for name, p in model.named_parameters()]
    lines += [f"{name} {list(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    lines += [
        f"{name} of group {buffer.group}, {len(buffer.weights)}"
        for buffer in optimizer.buffers
        for name in buffer.places
    ]
    for numbers in ([len(lines)], [zlib.crc32(line.encode()) for line in lines]):
        both = torch.tensor([numbers, [-n for n in numbers]], device=device)
        wire.all_reduce(both, dist.ReduceOp.MAX).wait()
        if differ := (both[0] != -both[1]).nonzero().flatten().tolist():
            what = f"{numbers[0]} tensors" if len(numbers) == 1 < len(lines) else lines[differ[0]]
            raise UserError(f"Replicas: the ranks have different models; on rank {wire.group.rank} there is {what}")


def _ranks_per_node(device: torch.device, wire: Wire) -> int:
    """Return how many neighbours are on each machine, by its name.  Errors: UserError where that differs."""
    own = torch.tensor([zlib.crc32(platform.node().encode())], device=device)
    names = torch.empty(wire.group.size, dtype=own.dtype, device=device)
    wire.all_gather(names, own).wait()
    runs = torch.unique_consecutive(names, return_counts=True)[1].tolist()
    if len(set(runs)) > 1:
        raise UserError(
            f"Replicas: hierarchical sums need as many ranks on each node; here are {', '.join(map(str, runs))} in a "
            "row on one; leave hierarchical=True out, or say ranks_per_node"
        )
    return int(runs[0])
