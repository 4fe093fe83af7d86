"""Record what one rank of a plan does in a training step: operations, and collectives begun and waited for, in order.

The step's own code runs on fake ranks (cost/fake.py): nothing is computed and nothing travels, but whatever would be
is seen, forward, recomputed and backward.  An entry of the record has no time; `replay.py` gives it one.
"""

from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from warpfold.batch import stack
from warpfold.check.op_profile import Cost
from warpfold.cost.costs import Arguments, arguments_of, call_cost, name_of
from warpfold.cost.fake import META, Memory, fake_mesh, tensors_in
from warpfold.cost.job import Job
from warpfold.cost.launches import ALLOCATE, products
from warpfold.cost.memory import features_of
from warpfold.cost.observe import size
from warpfold.cost.rates import TORCH, PassName
from warpfold.cost.work import EXPONENTIALS
from warpfold.engine.optim import OptimConfig, Optimizer
from warpfold.model.alphafold import AlphaFold
from warpfold.model.losses import total_loss
from warpfold.ops import dispatch
from warpfold.ops.dispatch import Op
from warpfold.ops.triton.launch import recorded
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import Mesh
from warpfold.parallel.plan import DTYPES, Plan
from warpfold.parallel.waits import Event, Work, watched
from warpfold.progress import Progress, no_progress

Phase = Literal["early", "forward", "recomputed", "backward", "update"]


@dataclass(slots=True)
class Operation:
    """One of our operations in one pass, or one of torch's; early: in a pass without gradient."""

    op: str  # as the rates of a device name it
    which: PassName
    cost: Cost
    dtype: torch.dtype
    launches: int  # kernels
    phase: Phase


@dataclass(frozen=True, slots=True)
class Begin:
    """A collective begins: `sent` bytes leave this rank.  after: what alone it waits for, on a side stream."""

    number: int
    kind: str
    group: str  # "axial", "branch", "model", "data"; "node" and "nodes" of hierarchical sums
    sent: int
    phase: Phase
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Await:
    """What follows needs the result of a collective."""

    number: int


Entry = Operation | Begin | Await


@dataclass(frozen=True)
class RecordedStep:
    """What a rank does.  early: in a pass without gradient; example: in the last pass and backward, where others of
    this rank follow; last: likewise, of a step's last example, whose gradients travel; update: at the end of a step.

    examples: of a rank and step.
    """

    early: list[Entry]
    example: list[Entry]
    last: list[Entry]
    update: list[Entry]
    examples: int = 1

    def step(self, recycles: int) -> list[Entry]:
        """Return what a rank does in a whole step with so many passes without gradient."""
        early = [again for turn in range(recycles) for again in _renumbered(self.early, turn)]
        found: list[Entry] = []
        for turn in range(self.examples):
            part = self.last if turn == self.examples - 1 else self.example
            found += _renumbered([*early, *part], turn * (recycles + 1))
        return found + self.update


def _renumbered(entries: list[Entry], turn: int) -> list[Entry]:
    """Return the entries as they come another time: collectives within them have other numbers."""
    if not turn:
        return entries
    begun = {entry.number for entry in entries if isinstance(entry, Begin)}
    more = turn << 32

    def moved(number: int) -> int:
        return number + more if number in begun else number

    found: list[Entry] = []
    for entry in entries:
        if isinstance(entry, Begin):
            entry = replace(entry, number=moved(entry.number), after=tuple(map(moved, entry.after)))
        elif isinstance(entry, Await):
            entry = Await(moved(entry.number))
        found.append(entry)
    return found


@dataclass
class _Call:
    """A call of one of our operations, whose autograd nodes have the numbers from `first` up to `end`."""

    op: Op[..., Any]
    given: Arguments
    entry: Operation
    first: int
    end: int = 0
    backward: Operation | None = None


class _Recorder(TorchDispatchMode):
    """Note, in order, what is dispatched, what our operations are called with, and which collectives are told of."""

    def __init__(self, kernels: list[Any]) -> None:
        super().__init__()
        self.kernels = kernels  # of Triton, that would have been launched so far
        self.entries: list[Entry] = []
        self.phase: Phase = "forward"
        self.aside = False  # on a side stream: what is waited for there holds up nothing but what begins there
        self._open: _Call | None = None
        self._calls: list[_Call] = []  # of forward passes, in order
        self._firsts: list[int] = []
        self._due: dict[str, deque[int]] = defaultdict(deque)  # gradients' collectives under way, by title
        self._after: list[int] = []
        self._gradients = 1 << 24  # numbers of their collectives, beyond those of slices

    # Operations

    def call(self, original: Callable[..., Any], op: Op[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Call an operation; what it does within is its own."""
        if self._open is not None or not any(isinstance(x, Tensor) for x in args):
            return original(op, *args, **kwargs)
        given = arguments_of(op, args, kwargs)
        first = next(x for x in given.values() if isinstance(x, Tensor))
        which: PassName = "training" if torch.is_grad_enabled() else "forward"
        forward = torch._C._current_graph_task_id() == -1
        phase = self.phase if forward else "recomputed"
        entry = Operation(name_of(op), which, call_cost(op, given, True), _float(first), 0, phase)
        self._open = made = _Call(op, given, entry, torch.autograd._get_sequence_nr() if forward else 0)
        try:
            result = original(op, *args, **kwargs)
        finally:
            self._open = None
        self.entries.append(entry)
        made.end = torch.autograd._get_sequence_nr()
        if forward and which == "training" and made.end > made.first:
            self._calls.append(made)
            self._firsts.append(made.first)
        return result

    def _owner(self) -> Operation | None:
        """Return what of ours is at work, forward or backward; None: torch by itself."""
        if self._open is not None:
            return self._open.entry
        if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():  # the latter: it recomputes
            return None
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        at = bisect_right(self._firsts, number) - 1
        if at < 0 or number >= self._calls[at].end:
            return None
        call = self._calls[at]
        if call.backward is None:
            cost = call_cost(call.op, call.given, False)
            call.backward = Operation(call.entry.op, "backward", cost, call.entry.dtype, 0, "backward")
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
            with self, torch._C.DisableTorchFunction():
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        results = tensors_in((out,), [])
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
        exps = sum(x.numel() for x in results) if func._opname in EXPONENTIALS else 0
        moved = sum(map(size, (*given, *results)))
        cost = Cost(products(func, args, kwargs, out), exps, moved)
        phase = self.phase
        if torch._C._current_graph_task_id() != -1:
            phase = "recomputed" if torch.is_grad_enabled() else "backward"
        self.entries.append(Operation(TORCH, "forward", cost, _float(results[0]), 1, phase))
        return out

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Take torch's word that nothing is compiled within, as `Memory` does."""
        return False

    # Collectives

    def told(self, event: Event) -> None:
        """Note that a collective begins, or, of an example's slices, that it is waited for."""
        if event.what == "wait":
            self.wait(event.number)
            return
        number, group = event.number, "branch" if event.kind == "sendrecv" else "axial"
        if event.carries == "gradients":
            self._gradients += 1
            number, group = self._gradients, event.name.split(" over ")[1].removesuffix(" ranks")
            self._due[event.title].append(number)
        phase = self.phase
        if torch._C._current_graph_task_id() != -1:
            phase = "backward" if event.backward or event.carries == "gradients" else "recomputed"
        self.entries.append(Begin(number, event.kind, group, event.bytes, phase, tuple(self._after)))
        self._after = [] if self.aside else self._after

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

    def taken(self) -> list[Entry]:
        """Return what was noted since the last time."""
        found, self.entries = self.entries, []
        return found


@cache
def _composite(func: Any) -> bool:
    """Return whether one of torch's operations is made of others, which are to be seen."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _float(x: Tensor) -> torch.dtype:
    """Return the dtype in which a device works on a tensor: fp32 stands for integers and fp64."""
    return x.dtype if x.dtype in (torch.bfloat16, torch.float16) else torch.float32


@contextmanager
def _listening(kernels: list[Any]) -> Iterator[_Recorder]:
    """Record whatever this thread does within the context."""
    recorder, wait = _Recorder(kernels), Work.wait
    with ExitStack() as undo:
        undo.enter_context(watched(recorder.told))
        undo.enter_context(dispatch.observed(recorder.call))
        Work.wait = lambda work: recorder.wait_for(work)  # type: ignore[method-assign, assignment]
        undo.callback(setattr, Work, "wait", wait)
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
    """Record the first rank of a plan, or of one of its branches, in a step of training; no other holds more.

    examples: of each data rank and step.  per_node: ranks of a node, for hierarchical sums.  gpu: count the kernels
    that a GPU would be told to launch; else operations are seen as wholes, as on a CPU.  branch: 0 computes m, 1 z.
    Errors: ValueError for a job that is no training, UserError as of `Reducer`.
    """
    if job.loss is None or job.optim is None:
        raise ValueError("what is recorded is a training: a job with losses and an optimizer")
    how = dispatch.interpreting() if gpu else dispatch.using("definition")
    plan = replace(plan, compile=False, graph=False, threads=None, kernels="fast" if gpu else "definition")
    turns = -(-examples // plan.batch)
    with fake_mesh(plan.data, plan.axial, plan.branch, branch) as mesh, how, recorded() as kernels, Memory() as memory:
        with META:
            model = AlphaFold(job.model).train()
        Execution(plan, mesh).bind(model)
        optimizer = _optimizer(model, job.optim, plan, mesh, turns, per_node)
        with _listening(kernels) as recorder:
            if optimizer.reducer._thread is not None:
                optimizer.reducer._thread = recorder  # type: ignore[assignment]
            with recorder:
                found = _parts(job, plan, model, optimizer, recorder, min(turns, 2), tell)
        del memory
    return replace(found, examples=turns)


def _optimizer(
    model: AlphaFold, optim: OptimConfig, plan: Plan, mesh: Mesh, turns: int, per_node: int | None
) -> Optimizer:
    """Return the optimizer of a step of one or two turns: the first stands for all but the last."""
    clip = "step" if plan.batch > 1 else optim.clip
    share = replace(optim, accumulate=plan.data * plan.batch * min(turns, 2), clip=clip)
    scaling = plan.precision == "fp16"
    sync = replace(plan.sync, strategy="plain") if plan.sync.strategy == "auto" else plan.sync
    return Optimizer(model, share, mesh, sync, per_node, DTYPES[plan.precision], scaling, plan.batch)


def _parts(
    job: Job, plan: Plan, model: AlphaFold, optimizer: Optimizer, recorder: _Recorder, turns: int, tell: Progress
) -> RecordedStep:
    """Run and record a step of `turns` examples or batches, with one pass without gradient."""
    assert job.loss is not None
    model.noise.seed(0)
    parts, steps = list[list[Entry]](), 3 * turns + 1
    early: list[Entry] = []
    batch = features_of(job, 2 * job.model.ensemble)
    features = batch if plan.batch == 1 else stack([batch] * plan.batch)
    recorder.taken()
    for turn in range(turns):
        tell(3 * turn, steps, "a pass without gradient")
        recorder.phase = "early"
        recycled, done = model.recycle(features, 1)
        early = recorder.taken()
        tell(3 * turn + 1, steps, "the last pass")
        recorder.phase = "forward"
        output = model.last_pass(model.inputs_of_pass(features, done, recycled))
        outputs = [output] if plan.batch == 1 else output.unbind()
        losses = [total_loss(one, batch, job.loss, residues=model.residues)[0] for one in outputs]
        tell(3 * turn + 2, steps, "the backward pass")
        torch.stack(losses).sum().backward()
        recorder.phase = "backward"
        optimizer.collect()
        parts.append(recorder.taken())
    tell(steps - 1, steps, "the update")
    recorder.phase = "update"
    optimizer.update()
    return RecordedStep(early, parts[0], parts[-1], recorder.taken())


def traffic(entries: list[Entry]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return how many collectives begin, and the bytes that leave in them, by group and phase."""
    calls: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    for entry in entries:
        if isinstance(entry, Begin):
            calls[entry.group, entry.phase] += 1
            sent[entry.group, entry.phase] += entry.sent
    return {key: (calls[key], sent[key]) for key in calls}
