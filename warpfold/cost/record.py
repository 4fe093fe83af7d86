"""Record what one rank of a plan does in a training step or a fold: operations, and collectives begun and waited for.

The code itself runs on fake ranks (cost/fake.py): nothing is computed and nothing travels, but whatever would be is
seen, in order, forward, recomputed and backward.  Of what is alike little is run, and each entry says how often it
comes: two blocks of a stack stand for all, a few turns of a loop over slices for the others.  How gradients travel is
recorded by itself, with the optimizer of the whole model, and put in the places where its parameters have them.
An entry of the record has no time; `replay.py` gives it one.
"""

import inspect
import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn

from warpfold.batch import stack
from warpfold.check.cases import PROFILES
from warpfold.check.op_profile import Cost, OpCase
from warpfold.cost.example import Job
from warpfold.cost.fake import META, Memory, call_key, fake_mesh, tensors_in, uncollected
from warpfold.cost.launches import ALLOCATE, EXPONENTIALS, products
from warpfold.cost.memory import features_of, judge_example
from warpfold.cost.observe import MadeAt, size
from warpfold.cost.rates import TORCH, PassName
from warpfold.device import OnHost, Upload
from warpfold.engine.optim import OptimConfig, Optimizer
from warpfold.engine.packed import PackedWeights
from warpfold.engine.trainable import FinetuneConfig, freeze
from warpfold.host import HostTensor
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.model.axial import BlockStack
from warpfold.model.losses import total_loss
from warpfold.ops import dispatch
from warpfold.ops.dispatch import Op
from warpfold.ops.torch_internals import (
    DispatchMode,
    current_node,
    in_backward,
    is_composite,
    next_node_number,
    node_number,
)
from warpfold.ops.triangle import factor_channels
from warpfold.ops.triton.launch import unlaunched
from warpfold.parallel.exchange import SyncConfig
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import DTYPES, Plan
from warpfold.parallel.waits import Event, Work, watched
from warpfold.progress import Progress, no_progress

Arguments = Mapping[str, Any]  # of a call, by the names that the definition gives them
NAMES = {profile.op: name for name, profile in PROFILES.items()}


def name_of(op: Op[..., Any]) -> str:
    """Return the name under which the rates of a device know an operation."""
    return NAMES.get(op, op.name)


def arguments_of(op: Op[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    """Return the arguments of a call by name."""
    return _signature(op).bind(*args, **kwargs).arguments


@cache
def _signature(op: Op[..., Any]) -> inspect.Signature:
    return inspect.signature(op.definition)


def call_cost(op: Op[..., Any], given: Arguments, forward: bool) -> Cost:
    """Return the cost of one pass of a call; of an operation without a profile, the bytes that it is given."""
    name, first = name_of(op), next(x for x in given.values() if isinstance(x, Tensor))
    itemsize = first.element_size()
    if name == "triangle_multiplication" and given.get("b") is not None:
        return _slice_cost(first, given["b"], forward)
    if name not in CASES:
        return Cost(0, 0, (1 if forward else 2) * sum(x.nbytes for x in given.values() if isinstance(x, Tensor)))
    cost = PROFILES[name].cost(OpCase(op=name, where="", **CASES[name](given)), forward, itemsize)
    return scaled(cost, _together(first)) if name == "triangle_multiplication" else cost


def _together(x: Tensor) -> int:
    """Return how many pair representations go through an operation at once, which its profile knows one of."""
    return math.prod(x.shape[:-3])


def _positions(x: Tensor) -> dict[str, int]:
    """Return rows and their length, as far as a cost depends on them: each position by itself."""
    return {"rows": x.numel() // max(1, x.shape[-1]), "length": 1, "channels": x.shape[-1]}


def _attention(given: Arguments) -> dict[str, Any]:
    q, k, bias = given["q"], given["k"], given.get("bias")
    *_, queries, heads, width = q.shape
    keys = k.shape[-3]
    batches = 1 if bias is None else max(1, bias.numel() // (heads * queries * keys))
    rows = q.numel() // (queries * heads * width)
    at = {"rows": rows, "length": queries, "keys": keys, "heads": heads, "width": width}
    return at | {"bias": bias is not None, "batches": batches}


def _global_attention(given: Arguments) -> dict[str, Any]:
    q, k = given["q"], given["k"]
    *_, heads, width = q.shape
    return {"rows": q.numel() // (heads * width), "length": 1, "keys": k.shape[-2], "heads": heads, "width": width}


def _gated_attention(given: Arguments) -> dict[str, Any]:
    x, heads = given["x"], given["heads"]
    width = given["out_weight"].shape[1] // heads
    rows, own = x.numel() // (x.shape[-2] * x.shape[-1]), given["weight"].shape[0] > 4 * heads * width
    at = {"rows": rows, "length": x.shape[-2], "channels": x.shape[-1], "heads": heads, "width": width}
    return at | {"bias": own or given["bias"] is not None}


def _triangle_multiplication(given: Arguments) -> dict[str, Any]:
    x = given["x"]
    return {"rows": x.shape[-3], "length": x.shape[-2], "channels": x.shape[-1],
            "outputs": given["out_weight"].shape[1]}  # fmt: skip


def _transition(given: Arguments) -> dict[str, Any]:
    gated = given["up"].shape[0] > given["down"].shape[1]
    return _positions(given["x"]) | {"outputs": given["down"].shape[1], "gated": gated}


def _outer_product(given: Arguments) -> dict[str, Any]:
    a, b = given["a"], given["b"]
    return {"rows": a.shape[-2], "keys": b.shape[-2], "length": a.shape[-3], "channels": a.shape[-1],
            "outputs": given["weight"].shape[0]}  # fmt: skip


def _outer_product_mean(given: Arguments) -> dict[str, Any]:
    x, weight = given["x"], given["out_weight"]
    return {"rows": x.shape[-3], "length": x.shape[-2], "channels": x.shape[-1], "width": math.isqrt(weight.shape[1]),
            "outputs": weight.shape[0]}  # fmt: skip


def _aligned_errors(given: Arguments) -> dict[str, Any]:
    frames, points = given["frames"], given["points"]
    rows = frames.shape[-3]
    return {"rows": rows, "length": points.shape[-2], "batches": frames.numel() // (rows * 12)}


CASES: dict[str, Callable[[Arguments], dict[str, Any]]] = {
    "attention": _attention,
    "global_attention": _global_attention,
    "gated_attention": _gated_attention,
    "layer_norm": lambda given: _positions(given["x"]),
    "norm_linear": lambda given: _positions(given["x"]) | {"outputs": given["weight"].shape[0]},
    "gate": lambda given: _positions(given["x"]),
    "tail": lambda given: _positions(given["x"]) | {"outputs": given["o"].shape[-1]},
    "transition": _transition,
    "triangle_factor": lambda given: _positions(given["x"]) | {"outputs": factor_channels(given["weight"])},
    "triangle_multiplication": _triangle_multiplication,
    "outer_product": _outer_product,
    "outer_product_mean": _outer_product_mean,
    "aligned_errors": _aligned_errors,
    "overlaps": lambda given: {"rows": 1, "length": given["atoms"].shape[-2]},
}


def _slice_cost(x: Tensor, b: Tensor, forward: bool) -> Cost:
    """Return the cost of some rows or columns of a triangle product, where b is given: every slice reads all of it."""
    channels, (hidden, residues, _) = x.shape[-1], b.shape[-3:]
    positions, passes = x.numel() // max(1, channels), 1 if forward else 2
    # The projections of a and of its gate are made once more in the backward pass.
    factor = (1 if forward else 3) * 2 * positions * channels * 2 * hidden
    product = passes * 2 * positions * residues * hidden
    tail = passes * 2 * positions * channels * (channels + hidden)
    numbers = positions * (3 * channels + 4 * hidden) + b.numel()
    return Cost(factor + product + tail, positions * (hidden + channels), passes * numbers * x.element_size())


def scaled(cost: Cost, factor: float) -> Cost:
    """Return so many times a cost."""
    return Cost(cost.flops * factor, cost.exps * factor, cost.bytes * factor)


Phase = Literal["early", "forward", "recomputed", "backward", "update"]
BLOCKS = 2  # of a stack that are run, where the first is not like all
MAIN, STACKS = "evoformer", ("extra_stack", "evoformer")  # of which few blocks are run
HOST = "host"  # the group of what travels to host memory and back


@dataclass(slots=True)
class Operation:
    """One of our operations in one pass, or one of torch's; early: in a pass without gradient.

    op: as the rates of a device name it.  launches: kernels.  part: the stack that it belongs to, or "".
    times: how often it comes.  replayed: by a graph, so that the host launches none of its kernels.
    """

    op: str
    which: PassName
    cost: Cost
    dtype: torch.dtype
    launches: int
    phase: Phase
    part: str = ""
    times: float = 1.0
    replayed: bool = False


@dataclass(slots=True)
class Begin:
    """A collective begins: `sent` bytes leave this rank.  after: what alone it waits for, on a side stream.

    group: "axial", "branch", "model", "data"; "node" and "nodes" of hierarchical sums; "host": no collective, but what
    travels between a device and host memory.  replayed: as of an operation.
    """

    number: int
    kind: str
    group: str
    sent: int
    phase: Phase
    after: tuple[int, ...] = ()
    part: str = ""
    times: float = 1.0
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class Await:
    """What follows needs the result of a collective."""

    number: int


Entry = Operation | Begin | Await


@dataclass(frozen=True)
class RecordedStep:
    """What a rank does.  early: in a pass without gradient; example: in the last pass and backward, where others of
    this rank follow; last: likewise, of a step's last example, whose gradients travel; update: at the end of a step.

    examples: of a rank and step, or batches.  A fold has early passes and a last one.
    """

    early: Sequence[Entry]
    example: Sequence[Entry]
    last: Sequence[Entry]
    update: Sequence[Entry]
    examples: int = 1

    def step(self, recycles: float) -> list[Entry]:
        """Return the entries of a rank's whole step with so many passes without gradient.

        All examples but the last are alike, and so are passes: each entry comes as many times.
        """
        before = self.examples - 1
        return [
            *_times(self.early, recycles * before),
            *_times(self.example, before),
            *_times(self.early, recycles),
            *self.last,
            *self.update,
        ]


def _times(entries: Sequence[Entry], factor: float) -> Sequence[Entry]:
    """Return entries that come so many times as often."""
    if factor in (0, 1):
        return entries if factor else []
    return [entry if isinstance(entry, Await) else replace(entry, times=factor * entry.times) for entry in entries]


@dataclass
class _Call:
    """A call of one of our operations, whose autograd nodes have the numbers from `first` up to `end`."""

    op: Op[..., Any]
    given: Arguments
    entry: Operation
    first: int
    end: int = 0
    backward: Operation | None = None


class _Recorder(DispatchMode):
    """Note, in order, what is dispatched, what our operations are called with, and which collectives are told of."""

    def __init__(self, kernels: list[str], memory: Memory | None = None) -> None:
        super().__init__()
        self.kernels = kernels  # of Triton, that would have been launched so far
        self.memory = memory  # that repeats what was run with the like before
        self.entries: list[Entry] = []
        self.phase: Phase = "forward"
        self.aside = False  # on a side stream: what is waited for there holds up nothing but what begins there
        self._open: _Call | None = None
        self._calls: list[_Call] = []  # of forward passes, in order
        self._firsts: list[int] = []
        self._due: dict[str, deque[int]] = defaultdict(deque)  # gradients' collectives under way, by title
        self._after: list[int] = []
        self._gradients = 1 << 24  # numbers of their collectives, beyond those of slices
        self._part = ""  # of the model, that runs
        self._made_at = MadeAt[str]()
        self._uploads: dict[int, int] = {}
        self._noted: dict[Any, list[Entry]] = {}  # of stacks that may be called again
        self._launches: dict[Any, int] = {}  # of operations that may be

    # Places

    def watch(self, model: nn.Module) -> None:
        """Note from now on to which stack of a model an entry belongs."""
        self._made_at.since(0, "")
        for name in STACKS:
            module = getattr(model, name)
            assert isinstance(module, BlockStack)
            module.register_forward_pre_hook(lambda *_, name=name: self._enter(name))
            module.register_forward_hook(lambda *_: self._enter(""))

    def repeat(self, model: nn.Module) -> None:
        """Run each stack twice for each kind of arguments, and note the like again where it is called again.

        Twice: the first call makes what its layers keep.  For models without gradients on one device.
        """
        for module in model.modules():
            if isinstance(module, BlockStack):
                module.forward = partial(self._repeated, module, module.forward)

    def _repeated(self, stack: nn.Module, forward: Callable[..., Any], *args: Any) -> Any:
        assert self.memory is not None
        key, first = (stack, dispatch.turns(), *(x.shape for x in tensors_in(args, []))), len(self.entries)
        if key not in self._noted:
            self._noted[key] = []
            return forward(*args)
        out = self.memory.run(stack, forward, args, {})
        if len(self.entries) > first:
            self._noted[key] = self.entries[first:]
        else:
            self.entries += self._noted[key]
        return out

    def _enter(self, part: str) -> None:
        self._part = part
        self._made_at.now(part)

    @property
    def part(self) -> str:
        """The stack that is at work, forward or backward; a leaf's gradient belongs to the node before it."""
        if in_backward() and (found := self._made_at.of_current()) is not None:
            self._part = found
        return self._part

    # Operations

    def call(self, original: Callable[..., Any], op: Op[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Call an operation; what it does within is its own."""
        if self._open is not None or not any(isinstance(x, Tensor) for x in args):
            return original(op, *args, **kwargs)
        given = arguments_of(op, args, kwargs)
        first = next(x for x in given.values() if isinstance(x, Tensor))
        which: PassName = "training" if torch.is_grad_enabled() else "forward"
        forward = not in_backward()
        phase = self.phase if forward else "recomputed"
        cost, times = call_cost(op, given, True), dispatch.turns()
        entry = Operation(name_of(op), which, cost, _float(first), 0, phase, self.part, times)
        self._open = made = _Call(op, given, entry, next_node_number() if forward else 0)
        try:
            result = self._run(original, op, args, kwargs, entry)
        finally:
            self._open = None
        self.entries.append(entry)
        made.end = next_node_number()
        if forward and which == "training" and made.end > made.first:
            self._calls.append(made)
            self._firsts.append(made.first)
        return result

    def _run(
        self, original: Callable[..., Any], op: Op[..., Any], args: tuple[Any, ...], kwargs: Any, entry: Operation
    ) -> Any:
        """Call an operation; without gradients it is run once for each kind of arguments."""
        key = None if self.memory is None or torch.is_grad_enabled() else call_key(op, args, kwargs)
        if self.memory is None or key is None:
            return original(op, *args, **kwargs)
        result = self.memory.run(op, partial(original, op), args, kwargs)
        entry.launches = self._launches.setdefault(key, entry.launches)
        return result

    def _owner(self) -> Operation | None:
        """Return the operation of ours that is at work, forward or backward; None: torch by itself."""
        if self._open is not None:
            return self._open.entry
        if not in_backward() or torch.is_grad_enabled():  # the latter: it recomputes
            return None
        node = current_node()
        number = -1 if node is None else node_number(node)
        at = bisect_right(self._firsts, number) - 1
        if at < 0 or number >= self._calls[at].end:
            return None
        call = self._calls[at]
        if call.backward is None:
            cost = call_cost(call.op, call.given, False)
            call.backward = Operation(call.entry.op, "backward", cost, call.entry.dtype, 0, "backward", self.part)
            self.entries.append(call.backward)
        return call.backward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "warpfold":
            owner, before = self._owner(), len(self.kernels)
            with self:
                out = dispatch.implementation(func._opname, args[0])(*args, **kwargs)
            if owner is not None:
                owner.launches += len(self.kernels) - before
            return out
        if _composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        changed = out is None and func._schema.is_mutable  # lists of tensors, the first of what is given
        results = tensors_in(args[:1] if changed else (out,), [])
        if not results or func._opname in ALLOCATE:
            return out
        given = tensors_in(kwargs.values(), tensors_in(args, []))
        if not func._schema.is_mutable:
            storages = {x.untyped_storage()._cdata for x in given}
            if all(x.untyped_storage()._cdata in storages or not x.numel() for x in results):
                return out  # a view
        owner = self._owner()
        if owner is not None:
            owner.launches += 1
            return out
        phase = self.phase
        if in_backward():
            phase = "recomputed" if torch.is_grad_enabled() else "backward"
        exps = sum(x.numel() for x in results) if func._opname in EXPONENTIALS else 0
        moved = sum(map(size, (*given, *results)))
        cost = Cost(products(func, args, kwargs, out), exps, moved)
        self.entries.append(
            Operation(TORCH, "forward", cost, _float(results[0]), 1, phase, self.part, dispatch.turns())
        )
        return out

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Take torch's word that nothing is compiled within, as `Memory` does."""
        return False

    # What travels

    def told(self, event: Event) -> None:
        """Note that a collective begins, or, of an example's slices, that it is waited for."""
        if event.what == "wait":
            self.wait(event.number)
            return
        number, group = event.number, "branch" if event.kind == "sendrecv" else "axial"
        if event.carries == "gradients":
            number, group = self._next(), event.name.split(" over ")[1].removesuffix(" ranks")
            self._due[event.title].append(number)
        phase = self.phase
        if in_backward():
            phase = "backward" if event.backward or event.carries == "gradients" else "recomputed"
        after, times = tuple(self._after), dispatch.turns()
        self.entries.append(Begin(number, event.kind, group, event.bytes, phase, after, self.part, times))
        self._after = [] if self.aside else self._after

    def _next(self) -> int:
        self._gradients += 1
        return self._gradients

    def wait(self, number: int) -> None:
        """Note that what follows needs a collective's result."""
        if self.aside:
            self._after.append(number)
        else:
            self.entries.append(Await(number))

    def wait_for(self, work: Work) -> None:
        """Note a wait for gradients: those of one name are awaited in the order in which they began."""
        if self._due[work.name]:
            self.wait(self._due[work.name].popleft())

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Make a call at once, as on a side stream, in the place of a thread."""
        self.aside, done = True, Future[None]()
        call()
        self.aside, self._after = False, []
        done.set_result(None)
        return done

    def _moved(self, size: int, phase: Phase) -> Begin:
        """Return the beginning of a way to host memory or back."""
        return Begin(self._next(), HOST, HOST, size, phase, (), self.part, dispatch.turns())

    def kept(self, init: Callable[..., None], host: OnHost, x: Tensor, *given: Any) -> None:
        """Note that what is kept for the backward pass goes to host memory, and comes back."""
        self.entries.append(self._moved(2 * x.nbytes, self.phase))
        init(host, x, *given)

    def upload(self, start: Callable[..., Upload], *given: Any) -> Upload:
        """Note that a part of what lies in host memory begins to be fetched."""
        found = start(*given)
        begun = self._moved(found._copy.nbytes, self.phase)
        self.entries.append(begun)
        self._uploads[id(found)] = begun.number
        return found

    def fetched(self, wait: Callable[[Upload], Tensor], upload: Upload) -> Tensor:
        """Note that it is waited for."""
        if (number := self._uploads.pop(id(upload), None)) is not None:  # else of what is kept for the backward pass
            self.wait(number)
        return wait(upload)

    def stored(self, store: Callable[..., None], *given: Any) -> None:
        """Note that a part goes back to host memory."""
        self.entries.append(self._moved(given[2].nbytes, self.phase))
        store(*given)

    def taken(self) -> list[Entry]:
        """Return the entries since the last time."""
        found, self.entries = self.entries, []
        return found


_composite = cache(is_composite)  # made of others, which are to be seen


def _float(x: Tensor) -> torch.dtype:
    """Return the dtype in which a device works on a tensor: fp32 stands for integers and fp64."""
    return x.dtype if x.dtype in (torch.bfloat16, torch.float16) else torch.float32


@contextmanager
def _listening(kernels: list[str], memory: Memory | None = None) -> Iterator[_Recorder]:
    """Record whatever this thread does within the context."""
    recorder = _Recorder(kernels, memory)
    keep, start, fetch, store = OnHost.__init__, HostTensor._start, Upload.wait, HostTensor.store

    def kept(host: OnHost, *given: Any) -> None:
        recorder.kept(keep, host, *given)

    def started(host: HostTensor, *given: Any) -> Upload:
        return recorder.upload(start, host, *given)

    new: dict[tuple[type, str], Callable[..., Any]] = {
        (Work, "wait"): lambda work: recorder.wait_for(work),
        (OnHost, "__init__"): kept,
        (HostTensor, "_start"): started,
        (HostTensor, "store"): lambda *given: recorder.stored(store, *given),
        (Upload, "wait"): lambda upload: recorder.fetched(fetch, upload),
    }
    with ExitStack() as undo:
        undo.enter_context(watched(recorder.told))
        undo.enter_context(dispatch.observed(recorder.call))
        for (owner, name), function in new.items():
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, function)
        yield recorder


def record(
    job: Job,
    plan: Plan,
    examples: int = 1,
    per_node: int | None = None,
    gpu: bool = True,
    branch: int = 0,
    tell: Progress = no_progress,
) -> RecordedStep:
    """Record the first rank of a plan, or of one of its branches, in a fold or a step; no other has more to do.

    examples: of each data rank and step.  per_node: ranks of a node, for hierarchical sums.  gpu: count the kernels
    that a GPU would be told to launch; else operations are seen as wholes, as on a CPU.  branch: 0 computes m, 1 z.
    What is recorded is remembered.  Errors: UserError as of `Reducer`.
    """
    model, turns = job.model, -(-examples // plan.batch)
    blocks = BLOCKS if job.training or plan.axial * plan.branch > 1 else 1  # of a fold on one device all are alike
    main = replace(model.evoformer, blocks=min(blocks, model.evoformer.blocks))
    few = replace(model, evoformer=main, extra_blocks=min(blocks, model.extra_blocks))
    alone = Plan(**{**vars(plan), "data": 1, "sync": SyncConfig(), "keep_blocks": 0, "compile": False, "graph": False,
                    "threads": None, "sizes": 0, "kernels": "fast" if gpu else "definition"})  # fmt: skip
    tell(0, 2, "an example")
    shorter = replace(job, model=few, optim=None, recycles=0, finetune=job.finetune_of_few)
    early, last = _example(shorter, alone, gpu, branch)
    early, last = (_whole(entries, job, plan, blocks) for entries in (early, last))
    if job.optim is None:
        return RecordedStep(early, [], last, [])
    tell(1, 2, "the gradients' way")
    share = replace(job.optim, accumulate=plan.data * plan.batch * min(turns, 2),
                    clip="step" if plan.batch > 1 else job.optim.clip)  # fmt: skip
    graphs, apart = plan.why_no_graphs("cuda" if gpu else "cpu") is None, plan.axial * plan.branch > 1
    ranks = replace(alone, data=plan.data, sync=plan.sync, recompute=None, offload=False, chunk=None, in_place=False,
                    graph=graphs)  # fmt: skip
    way = _exchange(model, share, ranks, min(turns, 2), per_node, branch, job.finetune)
    update, collects = way[-1].update, [one.collect for one in way]
    if graphs:
        early = _replayed(early, job, plan, 2) if early else early
        last = _replayed(last, job, plan, 1)
        collects = [one.collect if apart or one.backward else _in_graph(one.collect) for one in way]
        if plan.data == 1 and not apart:
            update = _replayed(update, job, plan, 0)
    examples_ = [[*_with_gradients(last, one.backward), *collect] for one, collect in zip(way, collects)]
    return RecordedStep(early, examples_[0], examples_[-1], update, turns)


REPLAY = 8  # launches: a graph's own, and the copies of its inputs and results, one for each of their dtypes


def _replayed(entries: Sequence[Entry], job: Job, plan: Plan, copies: int) -> list[Entry]:
    """Return entries as a graph's, behind what its replay takes beside them; copies: of z, to and from the graph."""
    z = plan.batch * job.sizes.residues**2 * job.model.c_z * DTYPES[plan.precision].itemsize / plan.axial
    phase = next(one.phase for one in entries if isinstance(one, Operation))
    first = Operation(TORCH, "forward", Cost(0, 0, 2 * copies * z), torch.float32, REPLAY, phase)
    return [first, *_in_graph(entries)]


def _in_graph(entries: Sequence[Entry]) -> list[Entry]:
    """Return entries that a graph replays."""
    return [one if isinstance(one, Await) else replace(one, replayed=True) for one in entries]


def _whole(entries: list[Entry], job: Job, plan: Plan, most: int) -> list[Entry]:
    """Return the record of few blocks as one of all of them, of which the last may keep everything."""
    blocks = {"extra_stack": job.model.extra_blocks, MAIN: job.model.evoformer.blocks}
    found = []
    for entry in entries:
        if not isinstance(entry, Await) and (all_ := blocks.get(entry.part)):
            times = all_
            if entry.part == MAIN and entry.phase in ("recomputed", "backward"):
                kept = plan.keep_blocks if entry.phase == "recomputed" else 0
                times = max(0, job.backward_blocks - kept)
            entry = replace(entry, times=entry.times * times / min(most, all_))
        found.append(entry)
    return found


@lru_cache(maxsize=256)
def _example(job: Job, plan: Plan, gpu: bool, branch: int) -> tuple[list[Entry], list[Entry]]:
    """Record a pass without gradient, and the last pass: of a training with the losses and the backward pass."""
    how = dispatch.standing_for("cuda" if gpu else "cpu")
    ranks, kernels = fake_mesh(1, plan.axial, plan.branch, branch), list[str]()
    launched = unlaunched(lambda launch: kernels.append(launch.kernel.name))
    with ranks as mesh, how, launched, Memory() as memory, uncollected():
        with META:
            model = AlphaFold(job.model).train(job.training)
        Execution(plan, mesh).bind(model)
        if job.training:
            freeze(model, job.finetune)
        packed = PackedWeights(model, DTYPES[plan.precision], trained=job.training)
        model.noise.seed(0)
        batch = features_of(job, (2 if job.training else 1) * job.model.ensemble)
        features = batch if plan.batch == 1 else stack([batch] * plan.batch)
        with _listening(kernels, memory) as recorder, recorder, torch.set_grad_enabled(job.training):
            recorder.watch(model)
            recorder.phase = "early"
            if not job.training and mesh.world.size == 1:
                recorder.repeat(model)
            if job.loss is None:  # all passes are alike, and judged is the last
                recycled, done = model.recycle(features, 0)
                representations, structure = model.one_pass(model.inputs_of_pass(features, done, recycled))
                early = recorder.taken()
                judge_example(model, batch, representations, structure)
                recorder.entries = early + recorder.entries
            else:
                recycled, done = model.recycle(features, 1)
                early = recorder.taken()
                inputs = model.inputs_of_pass(features, done, recycled)
                if job.keeps_trunk(plan):  # then it is there already
                    with torch.no_grad():
                        inputs |= model.trunk_pass(inputs)
                    early = []
                    recorder.taken()
                recorder.phase = "forward"
                output = model.last_pass(inputs)
                outputs = [output] if plan.batch == 1 else output.unbind()
                losses = [total_loss(one, batch, job.loss, residues=model.residues)[0] for one in outputs]
                torch.stack(losses).sum().backward()
            last = recorder.taken()
        del packed, memory
    return early, last


@dataclass(frozen=True)
class _Way:
    """How the gradients of a backward pass travel: where in it collectives begin, and what follows.

    backward: of each the part whose gradients it waits for, the share of them that there are by then, and what begins.
    """

    backward: list[tuple[str, float, Begin]]
    collect: list[Entry]
    update: list[Entry]


@lru_cache(maxsize=256)
def _exchange(
    config: ModelConfig, optim: OptimConfig, plan: Plan, turns: int, per_node: int | None, branch: int,
    finetune: FinetuneConfig,
) -> list[_Way]:  # fmt: skip
    """Record the optimizer of a whole model in a step of one or two turns: the first stands for all but the last.

    Every parameter is given a gradient, the last of the model first, as a backward pass does.
    """
    sync = replace(plan.sync, strategy="plain") if plan.sync.strategy == "auto" else plan.sync
    found: list[_Way] = []
    with fake_mesh(plan.data, plan.axial, plan.branch, branch) as mesh:
        memory = Memory()
        with memory:
            with META:
                model = AlphaFold(config).train()
            freeze(model, finetune)
            dtype, scaling = DTYPES[plan.precision], plan.precision == "fp16"
            records = plan.graph is True
            optimizer = Optimizer(model, optim, mesh, sync, per_node, dtype, scaling, plan.batch, records)
        with _listening([]) as recorder:
            if optimizer.reducer._thread is not None:
                optimizer.reducer._thread = recorder  # type: ignore[assignment]
            named = optimizer.packed.parameters
            shares: dict[str, float] = {}  # of the gradients of its part that there are with a parameter's own
            for _, some in groupby(reversed(named), _part_of):
                group = list(some)
                shares |= {name: (number + 1) / len(group) for number, name in enumerate(group)}

            def arrived(name: str) -> None:
                begun = [entry for entry in recorder.taken() if isinstance(entry, Begin)]
                way.extend((_part_of(name), shares[name], replace(one, part=_part_of(name))) for one in begun)

            for turn in range(turns):
                recorder.phase, way = "backward", list[tuple[str, float, Begin]]()
                handles = [
                    p.register_post_accumulate_grad_hook(lambda _, name=name: arrived(name))
                    for name, p in named.items()
                ]
                sums = [p.sum() for p in named.values()]
                torch.autograd.backward(sums, [torch.ones_like(x) for x in sums])
                for handle in handles:
                    handle.remove()
                recorder.taken()
                with memory, recorder:
                    optimizer.collect()
                    collect = recorder.taken()
                    recorder.phase = "update"
                    if turn == turns - 1:
                        optimizer.update()
                    found.append(_Way(way, collect, recorder.taken()))
    return found


def _part_of(name: str) -> str:
    """Return the stack that a parameter belongs to; "": none of them."""
    top = name.partition(".")[0]
    return top if top in STACKS else ""


def _with_gradients(entries: list[Entry], begun: Sequence[tuple[str, float, Begin]]) -> list[Entry]:
    """Return a rank's entries of an example, with the collectives that begin when the gradients of a part are there.

    The gradients of what lies outside of the stacks come before theirs (heads) and behind them (embedders).
    """
    if not begun:
        return entries
    first = next((i for i, entry in enumerate(entries) if not isinstance(entry, Await) and _is_backward(entry)), 0)
    pieces = [(part, list(some)) for part, some in groupby(entries[first:], lambda e: getattr(e, "part", None))]
    runs: list[tuple[str, list[Entry]]] = []
    for part, some in pieces:  # what is awaited is part of what runs
        if runs and part in (None, runs[-1][0]):
            runs[-1][1].extend(some)
        else:
            runs.append((part or "", some))
    places: dict[int, list[tuple[int, Begin]]] = defaultdict(list)
    at, before = 0, ""
    for part, share, begin in begun:
        if part != before:  # the longest run of this part that is left
            later = [i for i in range(at + 1, len(runs)) if runs[i][0] == part]
            at, before = max(later, key=lambda i: len(runs[i][1]), default=at), part
        places[at].append((math.ceil(share * len(runs[at][1])), begin))
    found = entries[:first]
    for index, (_, some) in enumerate(runs):
        for number, entry in enumerate([*some, None], 1):
            found += [begin for place, begin in places[index] if place == number - 1]
            found += [] if entry is None else [entry]
    return found


def _is_backward(entry: Operation | Begin) -> bool:
    return entry.phase in ("recomputed", "backward")


def traffic(entries: Sequence[Entry]) -> dict[tuple[str, str], tuple[float, float]]:
    """Return how many collectives begin, and the bytes that leave in them, by group and phase."""
    calls, sent = defaultdict[tuple[str, str], float](float), defaultdict[tuple[str, str], float](float)
    for entry in entries:
        if isinstance(entry, Begin) and entry.group != HOST:
            calls[entry.group, entry.phase] += entry.times
            sent[entry.group, entry.phase] += entry.times * entry.sent
    return {key: (calls[key], sent[key]) for key in calls}
