"""The private interfaces of torch that WarpFold uses; no other file uses any (tests/laws/test_hygiene.py).

All of them exist in torch 2.11 to 2.15, and there is no fallback: check/versions.py warns if torch is newer.  Each
function documents why no public interface suffices.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from torch.autograd.graph import Node

__all__ = ["DispatchMode", "tree_leaves"]

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])
Wrapper = TypeVar("Wrapper", bound=Tensor)

# ---- tensors and devices

# Fused attention on a CPU: q, k, v [n, h, K, d], dropout, whether causal, attn_mask -> out, lse.  The public function
# does not return lse, which the backward pass needs.
flash_attention_cpu: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def wrapper_tensor(cls: type[Wrapper], shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Wrapper:
    """Make a tensor of a subclass that has a shape and no memory."""
    return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Replace each tensor in nested containers by the function's result."""
    return tree_map_only(Tensor, function, value)


def members(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dictionaries of a module's submodules and parameters, in which a replacement is noticed."""
    return module._modules, module._parameters


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is the result of torch.compile, or was compiled in place."""
    # Compare names, because importing the class takes a second.
    wrapped = any(kind.__name__ == "OptimizedModule" for kind in type(module).__mro__)
    return wrapped or module._compiled_call_impl is not None


# () -> index of the current CUDA device, and index -> address of its current stream.  The public functions make several
# Python calls, which would slow down each operation.  Both are None if torch was built without CUDA.
current_cuda_device: Any = getattr(torch._C, "_cuda_getDevice", None)
current_cuda_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def device_sleep(cycles: int) -> None:
    """Let the current CUDA stream wait for this many cycles, so that the host can queue work ahead of a measurement."""
    torch.cuda._sleep(cycles)


def constant_when_traced(function: Function) -> Function:
    """Make torch.compile call a function while it traces and treat the result as a constant.

    `torch.compiler.assume_constant_result` does the same but imports all of torch._dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# ---- autograd


def in_backward() -> bool:
    """Return whether this thread is in a backward pass."""
    return torch._C._current_graph_task_id() != -1


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the current backward pass.

    The gradients of a pass are then added by a few kernels instead of one for each weight.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def current_node() -> "Node | None":
    """Return the node of autograd's graph that this thread runs."""
    return torch._C._current_autograd_node()


def next_node_number() -> int:
    """Return the sequence number of the next node that this thread creates."""
    return torch.autograd._get_sequence_nr()


def node_number(node: "Node") -> int:
    """Return the sequence number of a node; the numbers increase within a thread."""
    return node._sequence_nr()


def set_node_number(node: Any, number: int) -> None:
    """Set the sequence number of a node: autograd runs the ready node with the highest number first."""
    node._set_sequence_nr(number)


def taking_part(groups: "Sequence[Sequence[Node]]") -> list[int]:
    """Count the nodes of each group that the current backward pass will reach.

    Gradients are sent as soon as a bucket is complete, while the pass goes on.
    """
    return [sum(map(torch._C._will_engine_execute_node, nodes)) for nodes in groups]


# A context in which autograd sees no operation, so that results are not views of other tensors.  Under `torch.no_grad`
# operations still pass through autograd.
below_autograd: Any = torch._C._AutoDispatchBelowAutograd


def direct_function(
    save: Callable[[Any, tuple[Any, ...], Any], None], backward: Callable[..., tuple[Any, ...]]
) -> Callable[..., Any]:
    """Make a function (*inputs, compute) -> compute(inputs) with this gradient, past torch's dispatcher.

    `save(ctx, inputs, output)` and `backward(ctx, *gradients)` have the signatures that
    `torch.library.register_autograd` documents, which makes some thirty Python calls for each operation.  The public
    `Function.apply` makes one more for each argument, because it looks for wrappers of torch.func.
    """

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            inputs, compute = inputs[:-1], inputs[-1]
            with below_autograd():
                output = compute(inputs)
            save(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return *backward(ctx, *gradients), None

    apply: Callable[..., Any] = super(torch.autograd.Function, Direct).apply
    return apply


# ---- modes


def is_observed() -> bool:
    """Return whether a dispatch mode, a profiler or a torch.func transform is active in this thread.

    These would miss work in another thread, and work that bypasses torch's dispatcher.
    """
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch.autograd._profiler_enabled()
        or torch._C._are_functorch_transforms_active()
    )


def without_modes(function: Callable[..., T], *args: Any) -> T:
    """Call a function without the dispatch modes of this thread."""
    with _disable_current_modes():
        return function(*args)


def without_wrapper(func: Any) -> Callable[..., Any]:
    """Return the C function of a torch operation.  Calling the operation would add a Python call."""
    function: Callable[..., Any] = func._op
    return function


def is_composite(func: Any) -> bool:
    """Return whether a torch operation is composed of other operations."""
    is_composed: bool = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return is_composed


# ---- ranks

# Both work on flat buffers without gradients.  They are public, but torch 2.13 renamed them and warns of the old names.
all_gather_flat: Any = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
reduce_scatter_flat: Any = (
    getattr(torch.distributed, "reduce_scatter_single", None) or torch.distributed.reduce_scatter_tensor
)

# The tables of torch.distributed that list process groups.
_TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag", "pg_coalesce_state")
# The number of the first fake group, above those of real groups.
_FIRST_FAKE = 1 << 20


def set_group_limit(group: Any, device: torch.device, seconds: float) -> None:
    """Set how long a group's collectives on a device wait for other ranks.

    The public `group.set_timeout` sets one limit for all devices, but that of NCCL has to be longer than that of Gloo.
    """
    group._get_backend(device).set_timeout(timedelta(seconds=seconds))


def group_limit(group: Any, device: torch.device) -> float:
    """Return the limit of `set_group_limit` in seconds."""
    limit: timedelta = group._get_backend(device).options._timeout
    return limit.total_seconds()


@contextmanager
def fake_process_group(rank: int, ranks: int) -> Iterator[None]:
    """Act as one rank of many fake ranks within the context; collectives return at once.

    The process may also be a real rank, so the state of torch.distributed is saved and restored.
    """
    c10d = torch.distributed.distributed_c10d
    world = c10d._world
    saved = {name: dict(getattr(world, name)) for name in _TABLES}
    default, count, hook = world.default_pg, world.group_count, sys.excepthook
    c10d._update_default_pg(None)
    world.group_count = _FIRST_FAKE
    try:
        torch.distributed.init_process_group("fake", rank=rank, world_size=ranks)
        yield
    finally:
        for group in set(world.pg_map) - set(saved["pg_map"]):
            c10d._unregister_process_group(group.group_name)
        for name, before in saved.items():
            getattr(world, name).clear()
            getattr(world, name).update(before)
        world.group_count, sys.excepthook = count, hook
        c10d._update_default_pg(default)
