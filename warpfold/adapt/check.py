"""Which models `accelerate` takes."""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from warpfold.adapt.adapter import is_swapped, name_of
from warpfold.errors import UserError

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cpu", "cuda")
QUANTISED = ("torch.ao.nn.", "torch.nn.quantized", "torch.nn.intrinsic")
SHARDED = ("FullyShardedDataParallel", "FSDPModule")


def check_model(model: nn.Module) -> None:
    """Raise UserError for what `accelerate` does not take."""
    if not isinstance(model, nn.Module):
        raise UserError(f"accelerate: a {type(model).__name__} is no torch.nn.Module; give the model")
    if isinstance(model, torch.jit.ScriptModule):
        raise UserError("accelerate: this model is scripted; accelerate the Python module, before torch.jit.script")
    if isinstance(model, torch.fx.GraphModule):
        raise UserError("accelerate: this model is a traced graph; accelerate it before tracing")
    if isinstance(model, DataParallel):
        raise UserError("accelerate: this model is wrapped in DataParallel; accelerate what is inside, then wrap it")
    for name, module in model.named_modules():
        _check_module(name or type(module).__name__, module)
    for name, p in model.named_parameters():
        _check_parameter(name, p)


def _check_module(name: str, module: nn.Module) -> None:
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    if isinstance(module, torch._dynamo.OptimizedModule) or compiled:
        raise UserError(f"accelerate: {name} is compiled; accelerate the model first, then torch.compile it")
    if is_swapped(module):
        raise UserError("accelerate: this model is accelerated already; warpfold.restore(model) undoes it")
    if name_of(type(module)).startswith(QUANTISED):
        raise UserError(f"accelerate: {name} is quantised: it computes by operations of its own; accelerate it before")
    if {kind.__name__ for kind in type(module).__mro__} & set(SHARDED):
        raise UserError(f"accelerate: {name} is sharded (FSDP); accelerate the model first, then shard it")


def _check_parameter(name: str, p: Tensor) -> None:
    if nn.parameter.is_lazy(p):
        raise UserError(f"accelerate: {name} has no shape yet; run the model once before")
    if type(p).__name__ == "DTensor":
        raise UserError(f"accelerate: {name} is sharded (DTensor); accelerate the model first, then shard it")
    if p.device.type == "meta":
        raise UserError(f"accelerate: {name} has no memory (it is on meta); load the weights first")
    if p.device.type not in DEVICES:
        raise UserError(f"accelerate: {name} is on {p.device}; layers are swapped on {' and '.join(DEVICES)}")
    if p.dtype not in DTYPES:
        raise UserError(f"accelerate: {name} is {p.dtype}: a quantised model computes by operations of its own")


def inside(model: nn.Module) -> nn.Module:
    """Return the model inside of DistributedDataParallel, whose names are those that its owner knows."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model
