"""What WarpFold uses of torch that is private or not in every version, and what it does in a torch without.

No other file uses such a thing, but for a few attributes as old as torch's classes (tests/laws/test_hygiene.py).  In a
torch that lacks an interface, as a later one may, the same numbers come in a slower way, which is said once, or what
needs it is refused with a UserError; tests/ops/test_torch_internals.py takes away each of them.
"""

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from warpfold.errors import UserError

if TYPE_CHECKING:
    from torch.autograd.graph import Node
    from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

T = TypeVar("T")
log = logging.getLogger("warpfold")


class Interface(NamedTuple):
    """Where torch has an interface, since when, and what happens in a torch without it.

    since: the first of torch 2.0, 2.1 and so on whose Python files or stubs name it; 2.11, the oldest that we run with,
    where none does.
    """

    home: str
    since: str
    without: str


_C10D, _GLOO = "torch.distributed.distributed_c10d", "torch._C._distributed_c10d.ProcessGroupGloo"
_ENGINE = "torch.autograd.Variable._execution_engine"
_PLANS = "plans are not chosen, nor memory and time estimated or profiled (to train: plan.auto = false)"
_SHARING = "ranks do not share an example in training (plan.axial, plan.branch)"
_CONTAINERS = "tensors are found in lists, tuples and dicts alone"
_LIMITS = "groups of ranks keep the time limits that they have"
_DIVIDED = "on a CPU threads share each of torch's operations, which is slower beside other programs"
_RANKS = "plans of several ranks are not estimated"

INTERFACES = {
    # tensors and devices
    "_scaled_dot_product_flash_attention_for_cpu": Interface(
        "torch.ops.aten", "2.3", "gated attention on a CPU is computed by its definition"
    ),
    "grad_dtype": Interface("torch.Tensor", "2.10", "weights are cast wherever they are read, not once in a step"),
    "_make_wrapper_subclass": Interface("torch.Tensor", "2.0", "z does not go to host memory (plan.offload)"),
    "_disabled_torch_function_impl": Interface("torch._C", "2.0", "z in host memory tells its shape more slowly"),
    "tree_leaves": Interface("torch.utils._pytree", "2.2", _CONTAINERS),
    "tree_map_only": Interface("torch.utils._pytree", "2.0", _CONTAINERS),
    "_compiled_call_impl": Interface("torch.nn.Module", "2.1", "accelerate does not notice model.compile()"),
    "_sleep": Interface("torch.cuda", "2.0", "times of a GPU may hold the host's, as nothing keeps it busy meanwhile"),
    # autograd
    "_will_engine_execute_node": Interface("torch._C", "2.0", "gradients travel after the backward pass, not in it"),
    "_current_graph_task_id": Interface("torch._C", "2.0", "a backward pass is known by the node that runs"),
    "_current_autograd_node": Interface("torch._C", "2.0", _PLANS),
    "queue_callback": Interface(_ENGINE, "2.0", "the gradient of each weight is added by itself"),
    "_get_sequence_nr": Interface("torch.autograd", "2.1", _PLANS),
    "_sequence_nr": Interface("torch._C._FunctionBase", "2.1", f"{_PLANS}; {_SHARING}"),
    "_set_sequence_nr": Interface("torch._C._FunctionBase", "2.11", _SHARING),
    # modes
    "TorchDispatchMode": Interface("torch.utils._python_dispatch", "2.0", f"{_PLANS}; operations are not checked"),
    "_disable_current_modes": Interface("torch.utils._python_dispatch", "2.0", "a thread does what modes must not see"),
    "_len_torch_dispatch_stack": Interface("torch._C", "2.0", _DIVIDED),
    "_profiler_enabled": Interface("torch.autograd", "2.0", _DIVIDED),
    "_dispatch_has_kernel_for_dispatch_key": Interface("torch._C", "2.0", _PLANS),
    "DisableTorchFunction": Interface("torch._C", "2.0", "modes of functions see some operations twice"),
    # ranks
    "_get_backend": Interface("torch.distributed.ProcessGroup", "2.3", _LIMITS),
    "_set_default_timeout": Interface(_GLOO, "2.0", _LIMITS),
    "_timeout": Interface(f"{_GLOO}._Options", "2.0", "a group of the caller's is taken to wait 600 s"),
    "FakeStore": Interface("torch.testing._internal.distributed.fake_pg", "2.1", _RANKS),
    "_world": Interface(_C10D, "2.0", _RANKS),
    "_update_default_pg": Interface(_C10D, "2.0", _RANKS),
    "_unregister_process_group": Interface(_C10D, "2.3", _RANKS),
}


def missing() -> dict[str, str]:
    """Return the interfaces that this torch lacks, by their whole names, and what happens without each."""
    return {_path(name): one.without for name, one in INTERFACES.items() if _look_up(name) is None}


def _path(name: str) -> str:
    return f"{INTERFACES[name].home}.{name}"


def _look_up(name: str) -> Any:
    """Return an interface; None where torch has it not, True where it is there and holds None."""
    found, names = torch, _path(name).split(".")
    for end, part in enumerate(names[1:], 2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(names[:end]))
            except ImportError:
                return None
        found = getattr(found, part)
    return True if found is None else found


# Each, or None.  `FakeStore` is looked up where it is used: who imports it adds a backend to torch.distributed.
_found: dict[str, Any] = {name: _look_up(name) for name in INTERFACES if name != "FakeStore"}


def _required(name: str) -> Any:
    """Return an interface.  Errors: UserError where this torch lacks it."""
    if _found[name] is None:
        raise UserError(
            f"torch {torch.__version__} has no {_path(name)}: {INTERFACES[name].without}; "
            "for that, install a torch that was tested (docs/install.md)"
        )
    return _found[name]


def _has(name: str) -> bool:
    """Return whether this torch has an interface; say once what happens where not."""
    if _found[name] is None:
        _say(name)
    return _found[name] is not None


@functools.cache
def _say(name: str) -> None:
    log.warning("torch %s has no %s: %s", torch.__version__, _path(name), INTERFACES[name].without)


# ---- tensors and devices

_flash = _found["_scaled_dot_product_flash_attention_for_cpu"]
# Fused attention on a CPU: q, k, v [n, h, K, d], dropout, whether causal, attn_mask -> out, lse.  None: not here.
flash_attention_cpu: Any = None if _flash is None else _flash.default
NO_FLASH_ATTENTION = "torch has no fused attention for CPUs any more"

# As the `__torch_function__` of a subclass: torch's functions do not ask it.  Else they ask, and it does what they do.
no_torch_function: Any = _found["_disabled_torch_function_impl"] or vars(Tensor)["__torch_function__"]


def allow_grad_dtype(leaf: Tensor, dtype: torch.dtype) -> bool:
    """Let the grad of a leaf of autograd have a dtype, which need not be the leaf's; return whether it may.

    Wraps `Tensor.grad_dtype`, since torch 2.10; without it, the two have to be the same.
    """
    if leaf.dtype == dtype:
        return True
    if not _has("grad_dtype"):
        return False
    leaf.grad_dtype = dtype
    return True


def wrapper_tensor(cls: type[T], shape: torch.Size, dtype: torch.dtype, device: torch.device) -> T:
    """Make a tensor of a subclass that has a shape and no memory.

    Wraps `Tensor._make_wrapper_subclass`, since torch 2.0.  Errors: UserError without it.
    """
    _has("_disabled_torch_function_impl")  # which the subclass should have: said here, where it is missed
    made: T = _required("_make_wrapper_subclass")(cls, shape, dtype=dtype, device=device)
    return made


def tree_leaves(value: Any) -> list[Any]:
    """Return what lies in nested containers.

    Wraps `torch.utils._pytree.tree_leaves`, since torch 2.2; without it, containers are lists, tuples and dicts.
    """
    if _has("tree_leaves"):
        found: list[Any] = _found["tree_leaves"](value)
        return found
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
    return [value] if parts is None else [leaf for part in parts for leaf in tree_leaves(part)]


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return nested containers with what a function makes of each tensor in its place.

    Wraps `torch.utils._pytree.tree_map_only`, since torch 2.0; without it, containers are lists, tuples and dicts.
    """
    if _has("tree_map_only"):
        return _found["tree_map_only"](Tensor, function, value)
    if isinstance(value, dict):
        return {key: map_tensors(function, part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [map_tensors(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return function(value) if isinstance(value, Tensor) else value


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is what torch.compile returned, which is known by its name, or was compiled in place.

    Wraps `Module._compiled_call_impl`, since torch 2.1; without it, the latter is not seen.
    """
    if any(kind.__name__ == "OptimizedModule" for kind in type(module).__mro__):  # to load its class takes a second
        return True
    return _has("_compiled_call_impl") and module._compiled_call_impl is not None


def device_sleep(cycles: int) -> bool:
    """Have the current CUDA stream wait for so many cycles of the device; return whether it does.

    Wraps `torch.cuda._sleep`, since torch 2.0; without it, it does not.
    """
    if not _has("_sleep"):
        return False
    _found["_sleep"](cycles)
    return True


# ---- autograd


def in_backward() -> bool:
    """Return whether this thread is in a backward pass.

    Wraps `torch._C._current_graph_task_id`, since torch 2.0; without it, whether there is a `current_node`.
    """
    if not _has("_current_graph_task_id"):
        return current_node() is not None
    number: int = _found["_current_graph_task_id"]()
    return number != -1


def call_after_backward(function: Callable[[], None], last: int | None) -> int | None:
    """Have a function called at the end of the backward pass that runs, unless it is `last`; return the pass's number.

    Wraps `torch._C._current_graph_task_id` and `queue_callback` of autograd's engine, since torch 2.0.  None in a torch
    without them: nothing is called.
    """
    if not (_has("_current_graph_task_id") and _has("queue_callback")):
        return None
    now: int = _found["_current_graph_task_id"]()
    if now != last:
        _found["queue_callback"](function)
    return now


def current_node() -> "Node | None":
    """Return the node of autograd's graph that this thread runs.

    Wraps `torch._C._current_autograd_node`, since torch 2.0.  Errors: UserError without it.
    """
    node: Node | None = _required("_current_autograd_node")()
    return node


def next_node_number() -> int:
    """Return the number that the next node gets which this thread makes.

    Wraps `torch.autograd._get_sequence_nr`, since torch 2.1.  Errors: UserError without it.
    """
    number: int = _required("_get_sequence_nr")()
    return number


def node_number(node: "Node") -> int:
    """Return the number of a node; it only grows within a thread.

    Wraps `Node._sequence_nr`, since torch 2.1.  Errors: UserError without it.
    """
    _required("_sequence_nr")
    return node._sequence_nr()


def set_node_number(node: Any, number: int) -> None:
    """Give a node another number: of the nodes that could run, autograd runs the one with the highest.

    Wraps `Node._set_sequence_nr`, since torch 2.11.  Errors: UserError without it.
    """
    _required("_set_sequence_nr")
    node._set_sequence_nr(number)


def taking_part(groups: "Sequence[Sequence[Node]]") -> list[int] | None:
    """Return how many nodes of each group the backward pass that runs will reach.

    Wraps `torch._C._will_engine_execute_node`, since torch 2.0, as torch's own `register_multi_grad_hook` does; without
    it, returns None.
    """
    if not _has("_will_engine_execute_node"):
        return None
    return [sum(map(_found["_will_engine_execute_node"], nodes)) for nodes in groups]


# ---- modes


if not TYPE_CHECKING:

    class _NoDispatchMode:
        def __init__(self) -> None:
            _required("TorchDispatchMode")

    # The base of modes that are told of every operation, since torch 2.0.  Errors: UserError in a torch without it.
    DispatchMode = _found["TorchDispatchMode"] or _NoDispatchMode


def is_observed() -> bool:
    """Return whether a `DispatchMode` or a profiler is told of what this thread does: of another thread's it would not.

    Wraps `torch._C._len_torch_dispatch_stack`, since torch 2.0, and `torch.autograd._profiler_enabled`; without one of
    them, it may be.
    """
    if not (_has("_len_torch_dispatch_stack") and _has("_profiler_enabled") and _has("TorchDispatchMode")):
        return True
    return bool(_found["_len_torch_dispatch_stack"]() or _found["_profiler_enabled"]())


def without_modes(function: Callable[..., T], *args: Any) -> T:
    """Call a function; no `DispatchMode` is told of what it does.

    Wraps `torch.utils._python_dispatch._disable_current_modes`, since torch 2.0; without it, a thread makes the call,
    which is in no mode.
    """
    if not _has("_disable_current_modes"):
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(function, *args).result()
    with _found["_disable_current_modes"]():
        return function(*args)


def without_torch_functions() -> AbstractContextManager[Any]:
    """Return a context within which torch's functions ask no `__torch_function__`, of modes or subclasses.

    Wraps `torch._C.DisableTorchFunction`, since torch 2.0; without it, they ask again.
    """
    context: AbstractContextManager[Any] = (
        _found["DisableTorchFunction"]() if _has("DisableTorchFunction") else nullcontext()
    )
    return context


def is_composite(func: Any) -> bool:
    """Return whether one of torch's operations is made of others.

    Wraps `torch._C._dispatch_has_kernel_for_dispatch_key`, since torch 2.0.  Errors: UserError without it.
    """
    found: bool = _required("_dispatch_has_kernel_for_dispatch_key")(func.name(), "CompositeImplicitAutograd")
    return found


# ---- ranks


def _renamed(name: str, before: str) -> Any:
    return getattr(torch.distributed, name, None) or getattr(torch.distributed, before, None)


# On flat buffers, without gradients; public, by their names since torch 2.13, and before.
all_gather_flat = _renamed("all_gather_single", before="all_gather_into_tensor")
reduce_scatter_flat = _renamed("reduce_scatter_single", before="reduce_scatter_tensor")

# What torch.distributed knows of groups.
_KNOWN = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag", "pg_coalesce_state")
_FIRST_FAKE = 1 << 20  # number of the first fake group: real ones have less


def set_group_limit(group: Any, device: torch.device, seconds: float) -> None:
    """Have a group's collectives on a device wait so long for other ranks, where its backend has such a limit.

    Wraps `ProcessGroup._get_backend`, since torch 2.3, and `_set_default_timeout` of its backends, since torch 2.0;
    without them, limits stay as they are.
    """
    if _has("_get_backend") and _has("_set_default_timeout"):
        backend = group._get_backend(device)
        if hasattr(backend, "_set_default_timeout"):  # the fake one has none
            backend._set_default_timeout(timedelta(seconds=seconds))


def group_limit(group: Any, device: torch.device) -> float | None:
    """Return how many seconds a group's collectives on a device wait for other ranks; None where it does not say.

    Wraps `ProcessGroup._get_backend`, since torch 2.3, and `_timeout` of its backends' options, since torch 2.0;
    without them, returns None.
    """
    if not (_has("_get_backend") and _has("_timeout")):
        return None
    options = getattr(group._get_backend(device), "options", None)
    limit = getattr(options, "_timeout", None)
    return limit.total_seconds() if isinstance(limit, timedelta) else None


@contextmanager
def fake_process_group(rank: int, ranks: int) -> Iterator[None]:
    """Be within the context one rank of many that do not exist: collectives end at once.

    What torch.distributed knows is kept aside meanwhile, as this process may be one of real ranks, too.
    Wraps `FakeStore`, since torch 2.1, and `_world`, `_update_default_pg` (since torch 2.0) and
    `_unregister_process_group` (since torch 2.3) of torch.distributed.  Errors: UserError without one of them.
    """
    _found.setdefault("FakeStore", _look_up("FakeStore"))
    world, store, update_default = _required("_world"), _required("FakeStore"), _required("_update_default_pg")
    unregister = _required("_unregister_process_group")
    known = {name: dict(getattr(world, name)) for name in _KNOWN}
    default, count, hook = world.default_pg, world.group_count, sys.excepthook
    update_default(None)
    world.group_count = _FIRST_FAKE
    try:
        torch.distributed.init_process_group("fake", store=store(), rank=rank, world_size=ranks)
        yield
    finally:
        for group in set(world.pg_map) - set(known["pg_map"]):
            unregister(group.group_name)
        for name, before in known.items():
            getattr(world, name).clear()
            getattr(world, name).update(before)
        world.group_count, sys.excepthook = count, hook
        update_default(default)
