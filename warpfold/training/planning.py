"""Choose plans for the memory that is free when a command folds or trains, and log each choice in one line."""

import logging
import math
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from warpfold.batch import Batch
from warpfold.check.sizes import UNCROPPED
from warpfold.cluster.links import measure_cluster
from warpfold.cost.example import ExampleSizes, Job
from warpfold.cost.launches import launches_of
from warpfold.cost.links import Cluster, one_node
from warpfold.cost.machine import Machine, this_machine
from warpfold.cost.planner import (
    CHOSEN_IN_TRAINING,
    VARIED_KEYS,
    Choice,
    candidates,
    choose,
    describe_plan,
    estimate,
    is_evident,
    needed_bytes,
    next_smaller_plan,
    ranks_of,
    single_device_plan,
    variants,
    why_not_fit,
)
from warpfold.cost.rates import Rates
from warpfold.cost.record import features_of
from warpfold.cost.replay import step_time
from warpfold.cost.report import choice_in_words, describe_links
from warpfold.data.features.make import padded_shape
from warpfold.data.load.examples import Sample
from warpfold.engine.gradient import Through
from warpfold.errors import UserError
from warpfold.memory import is_out_of_memory
from warpfold.model.alphafold import ModelConfig
from warpfold.ops import dispatch
from warpfold.parallel.plan import DTYPES, Plan
from warpfold.parallel.team import Team
from warpfold.progress import as_time
from warpfold.settings import build, plain, to_dict
from warpfold.training.config import GivenSettings, RunConfig

log = logging.getLogger("warpfold.plan")

COMPILE_LOG_SECONDS = 5.0  # between two lines about kernels that are being compiled
# A prediction is recorded as a graph if the free memory is at least this multiple of the memory that it needs.  The
# pool of the graphs holds the peak of the trunk and the pools of shorter proteins.  The structure module and the heads
# take memory outside of the pool.
GRAPHS_HOLD = 4
SUMMARY_KEYS = ("chunk", "in_place", "offload", "axial", "branch")  # of a plan


@dataclass(frozen=True)
class FoldPlan:
    """The plan by which an example is folded.

    description: the plan in words.
    details: numbers for the summary.
    residues: of the example.
    choice: None if another process made the choice.
    ran_out: the plans that were tried before and ran out of memory.
    """

    plan: Plan
    description: str
    details: Mapping[str, Any]
    residues: int
    choice: Choice | None = None
    ran_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, choice: Choice, ran_out: tuple[str, ...] = ()) -> "FoldPlan":
        """Describe a choice in words and in numbers."""
        time, description = choice.chosen.time, choice_in_words(choice)
        details = {
            **{name: getattr(choice.plan, name) for name in SUMMARY_KEYS},
            "bytes": needed_bytes(choice.memory, choice.machine),
            "free": choice.machine.free,
            "seconds": None if time is None else round(time.total, 1),
            "said": description,
            "ran_out": list(ran_out),
        }
        return cls(choice.plan, description, details, choice.job.sizes.residues, choice, ran_out)


class FoldPlanner:
    """Choose a plan for each example, and remember the sizes at which memory ran out.

    fixed: keys of the plan that are not chosen.
    memory: the largest number of bytes to use on the device.
    team: all ranks that share an example call every method, and get the plan for the rank with the least memory.
    graphs: record the trunk as a graph if the device has graphs and enough memory.
    """

    def __init__(
        self,
        model: ModelConfig,
        device: torch.device | str,
        fixed: Mapping[str, Any] | None = None,
        memory: int | None = None,
        team: Team | None = None,
        graphs: bool = False,
    ) -> None:
        self.graphs = graphs
        self.model, self.device, self.fixed, self.memory = model, torch.device(device), dict(fixed or {}), memory
        self.team = team or Team()
        # Examples of this many residues or more ran out of memory with graphs.
        self._unrecorded = math.inf
        # Residues of an example, and the bytes that it did not get although they were reported as free.
        self._limits: list[tuple[int, int]] = []
        self._last_logged = ""
        self._last_choice: Choice | None = None

    def choose(
        self,
        sizes: ExampleSizes,
        recycles: int,
        ensemble: int = 1,
        representations: bool = False,
        gradient: Through | None = None,
    ) -> FoldPlan:
        """Choose a plan as `check` does, compile its kernels, and log the plan when it changes.

        Plans of examples that trivially fit are not logged until another plan was.
        """
        fold_plan = self.check(sizes, recycles, ensemble, representations, gradient)
        job = Job(model=replace(self.model, ensemble=ensemble), sizes=sizes, recycles=recycles, gradient=gradient)
        compile_kernels(job, fold_plan.plan, self.device)
        trivially_fits = fold_plan.choice is not None and fold_plan.choice.trivially_fits
        plan = describe_plan(fold_plan.plan) + (", graphs" if fold_plan.plan.graph is True else "")
        if plan != self._last_logged and not (trivially_fits and not self._last_logged):
            self._last_logged = plan
            log.info("plan for %d residues: %s", sizes.residues, fold_plan.description)
        return fold_plan

    def check(
        self,
        sizes: ExampleSizes,
        recycles: int,
        ensemble: int = 1,
        representations: bool = False,
        gradient: Through | None = None,
    ) -> FoldPlan:
        """Choose a plan for an example of these sizes and the memory that is free now, without logging it.

        gradient: the passes through which the gradient by the sequence goes; None if there is no gradient.
        Errors: UserError if no plan fits, with the remedy, or for keys that exclude each other.
        """
        model = replace(self.model, ensemble=ensemble)
        job = Job(model=model, sizes=sizes, recycles=recycles, representations=representations, gradient=gradient)
        machine = this_machine(self.device, loaded=True, memory=self.memory)
        # A shorter example that ran out of memory limits the memory of longer ones.
        free = min([machine.free, *(limit for shorter, limit in self._limits if shorter <= sizes.residues)])
        machine = replace(machine, free=free, devices=self.team.mesh.model.size)
        if self.team.mesh.model.size == 1:
            choice = self._choose(job, machine)
            fold_plan = FoldPlan.of(choice)
            recorded = replace(choice.plan, graph=True)
            if not self.graphs or gradient is not None or choice.plan.chunk is not None:
                return fold_plan
            if recorded.why_no_graphs(machine.kind) is not None or sizes.residues >= self._unrecorded:
                return fold_plan
            if GRAPHS_HOLD * needed_bytes(choice.memory, choice.machine) > machine.free:
                return fold_plan
            description = f"{fold_plan.description}; the trunk is recorded as a CUDA graph"
            details = {**fold_plan.details, "said": description, "graphs": True}
            return replace(fold_plan, plan=recorded, description=description, details=details)
        # The first of the ranks that share the example chooses a plan for the least free memory of any of them.
        free = min(self.team.all_gather_object_of_example(machine.free, "free memory"))
        message: dict[str, Any] = {}
        if self.team.is_example_leader:
            try:
                fold_plan = FoldPlan.of(self._choose(job, replace(machine, free=free)))
                message = {"plan": to_dict(fold_plan.plan), "details": fold_plan.details}
            except UserError as error:
                message = {"refused": str(error)}
        message = self.team.all_gather_object_of_example(message, "the plan")[0]
        if "refused" in message:
            raise UserError(message["refused"])
        details = message["details"]
        return FoldPlan(build(Plan, message["plan"], "plan"), details["said"], details, sizes.residues)

    def _choose(self, job: Job, machine: Machine) -> Choice:
        """Choose a plan, or reuse the last choice for an equal job that needs at most half of the free memory.

        A choice takes about 10 ms, which is noticeable for thousands of small designs.
        """
        if (last := self._last_choice) is not None and last.job == job:
            needed = needed_bytes(last.memory, last.machine)
            same_machine = replace(last.machine, free=machine.free, host=machine.host) == machine
            similar_memory = abs(last.machine.free - machine.free) <= last.machine.free / 10
            if same_machine and 2 * needed <= machine.free and similar_memory:
                return replace(last, machine=machine)
        self._last_choice = None
        grid = {"axial": self.team.mesh.axial.size, "branch": self.team.mesh.branch.size}
        try:
            self._last_choice = choose(job, machine, {**grid, **self.fixed})
        except ValueError as error:
            raise UserError(str(error)) from error
        return self._last_choice

    def after(self, failed: FoldPlan, error: BaseException) -> FoldPlan:
        """Return the next tighter plan after one that ran out of memory, and remember the size of the example.

        The first step is the same plan without graphs, whose memory nothing else can use.
        Errors: `error` itself if it is not about memory.  UserError if no plan is tighter.
        """
        # The other ranks of a shared example wait for this one in the middle of a pass, so it cannot start again.
        if not is_out_of_memory(error) or failed.choice is None or self.team.process.ranks > 1:
            raise error
        plan_text = describe_plan(failed.plan)
        if failed.plan.graph is True:
            self._unrecorded = failed.residues
            log.warning(
                "%d residues: out of memory (%s) with CUDA graphs; next plan: without", failed.residues, plan_text
            )
            return FoldPlan.of(failed.choice, (*failed.ran_out, f"{plan_text}, graphs"))
        following = next_smaller_plan(failed.choice)
        if following is None:
            raise UserError(
                f"{failed.residues} residues: out of memory even with the tightest plan ({plan_text})"
            ) from None
        needed = needed_bytes(failed.choice.memory, failed.choice.machine)
        self._limits.append((failed.residues, needed - 1))
        fold_plan = FoldPlan.of(following, (*failed.ran_out, plan_text))
        log.warning("%d residues: out of memory (%s); next plan: %s", failed.residues, plan_text, fold_plan.description)
        return fold_plan


def compile_kernels(job: Job, plan: Plan, device: torch.device | str) -> None:
    """Compile the kernels of a job on a CUDA device that Triton's cache lacks, in parallel, and log the progress.

    Otherwise the first pass would compile one kernel after another without any message.  Jobs with equal numbers of
    residues and similar numbers of alignment rows launch the same kernels, so a process looks at them once.  If kernels
    cannot be compiled ahead, the reason is logged, and they are compiled when they are first launched.
    """
    device = torch.device(device)
    if device.type != "cuda" or plan.kernels == "definition" or _without_kernels(device):
        return
    rows = {name: getattr(job.sizes, name).bit_length() for name in ("sequences", "extra")}
    job_class = replace(job, sizes=replace(job.sizes, **rows), recycles=min(job.recycles, 1), representations=False)
    if (job_class, plan, device) in _compiled_for:
        return
    _compiled_for.add((job_class, plan, device))
    if torch.version.hip is not None:
        log.info("kernels are compiled when they are first launched: on AMD GPUs none is compiled ahead")
        return
    from triton.backends.compiler import GPUTarget

    from warpfold.ops.triton.ahead import compile_ahead
    from warpfold.ops.triton.launch import launched_on

    started = last_log = time.monotonic()

    def log_progress(done: int, total: int, what: str) -> None:
        nonlocal last_log
        now = time.monotonic()
        if done == 0 or now >= last_log + COMPILE_LOG_SECONDS:
            log.info("%s", what)
            last_log = now

    major, minor = torch.cuda.get_device_capability(device)
    try:
        with launched_on(device):
            launches = launches_of(job, plan)
        compiled = compile_ahead(launches, GPUTarget("cuda", 10 * major + minor, 32), log_progress, launchers=True)
    except OSError as error:
        log.info("kernels are compiled when they are first launched: Triton's cache cannot be written (%s)", error)
        return
    if compiled.compiled:
        seconds = as_time(time.monotonic() - started)
        log.info("%d kernels compiled in %s; %d were in the cache", compiled.compiled, seconds, compiled.cached)
    if compiled.failed:
        log.info("%d kernels are compiled when they are first launched: %s", len(compiled.failed), compiled.failed[0])


_compiled_for: set[tuple[Job, Plan, torch.device]] = set()


def _without_kernels(device: torch.device) -> bool:
    return dispatch.unsupported_device((torch.empty(0, device=device),)) is not None


def compile_for_training(config: RunConfig, device: torch.device | str) -> None:
    """Compile the kernels that a training step launches for examples of the largest size (`compile_kernels`)."""
    if torch.device(device).type != "cuda":
        return
    job, plan = training_job(config), config.plan
    padded = padded_shape(features_of(job, 1), plan.multiple_on("cuda"), config.data, plan.sizes)
    sizes = ExampleSizes(
        residues=padded["res"], sequences=padded["seq"], extra=padded["extra"], templates=padded.get("tmpl", 0)
    )
    compile_kernels(replace(job, sizes=sizes), plan, device)


@contextmanager
def explain_out_of_memory(
    config: RunConfig, step: int, device: torch.device | str, examples: Sequence[Sample] = ()
) -> Iterator[None]:
    """Convert an out-of-memory error into a UserError with a remedy; other errors pass.

    step: the number of steps done before.  examples: those that go through the model together; none in the update.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        kind = torch.device(device).type
        names = ", ".join(f"{example.key or example.name} ({sizes_of_batch(example.features)})" for example in examples)
        plan = describe_plan(config.plan, training=True)
        raise UserError(
            f"step {step + 1}: out of memory on {kind} with {names or 'the update of the weights'}; plan: {plan}. "
            f"Set {setting_with_less_memory(config, kind)}; the same command then continues from the last checkpoint."
        ) from error


def setting_with_less_memory(config: RunConfig, kind: str) -> str:
    """Return the assignment that lowers the peak memory of a training step at the least cost of time.

    kind: type of the device.  Keys of the plan may change when a run continues; another crop needs a new run.
    """
    plan = config.plan
    if plan.batch > 1:
        return f"plan.batch = {plan.batch // 2}"
    if plan.recompute is None:
        return 'plan.recompute = "block"'
    if plan.keep_blocks:
        return f"plan.keep_blocks = {plan.keep_blocks // 2}"
    if plan.recompute == "layer":
        return 'plan.recompute = "block"'
    if kind == "cuda" and not plan.offload and plan.axial * plan.branch == 1:
        return "plan.offload = true"
    if plan.chunk is None or plan.chunk > 4:
        return f"plan.chunk = {64 if plan.chunk is None else max(plan.chunk // 2, 4)}"
    return f"plan.axial = {2 * plan.axial} on more processes, or in a new run data.crop below {config.data.crop}"


def sizes_of_batch(batch: Batch) -> ExampleSizes:
    """Return the sizes of an example that is ready for the model; for a batch, of one example of the same memory."""
    clusters, residues = batch["bert_mask"].shape[-2:]
    extra = batch["extra_rows"].shape[-1] if "extra_rows" in batch else batch["extra_msa"].shape[-2]
    templates = batch["template_aatype"].shape[-2] if "template_aatype" in batch else 0
    side = math.ceil(math.prod(batch["aatype"].shape[:-1]) ** 0.5)
    return ExampleSizes(residues=side * residues, sequences=side * clusters, extra=side * extra, templates=templates)


def grid_for(
    model: ModelConfig,
    jobs: Sequence[ExampleSizes],
    recycles: int,
    device: torch.device | str,
    fixed: Mapping[str, Any],
    memory: int | None,
    team: Team,
) -> Plan:
    """Choose the grid of a run's processes: each example on as few ranks as the largest example needs and is fast on.

    All ranks call this, and get the choice of rank 0 for the smallest device.
    """
    machine = this_machine(device, loaded=True, memory=memory)
    free = int(team.smallest(machine.free, "free memory"))
    grid: dict[str, Any] = {}
    if team.is_rank_zero:
        largest = max(jobs, key=lambda sizes: sizes.residues)
        job = Job(model=model, sizes=largest, recycles=recycles)
        smallest = replace(machine, free=free, devices=team.process.ranks)
        try:
            plan = choose(job, smallest, fixed, examples=len(jobs)).plan
        except UserError:
            # The largest example fits nowhere.  It fails later by itself, and the others are folded on all ranks.
            plan = Plan(axial=team.process.ranks)
        grid = {"data": plan.data, "axial": plan.axial}
        spare = plan.data - len(jobs)
        if spare > 0:
            log.warning(
                "%d of %d processes have nothing to do: no protein is faster on more of them",
                spare * plan.axial,
                team.process.ranks,
            )
    return Plan(**team.broadcast(grid, "the plan of the run"))


def training_job(config: RunConfig) -> Job:
    """Build the job of one training step on one example of the largest size."""
    data = config.data
    sizes = ExampleSizes(
        residues=data.crop or UNCROPPED, sequences=data.max_msa, extra=data.max_extra, templates=data.max_templates
    )
    return Job(
        model=config.model,
        sizes=sizes,
        recycles=config.model.recycles,
        loss=config.loss,
        optim=config.optim,
        finetune=config.finetune,
    )


def plan_training(
    given: GivenSettings,
    out: Path,
    device: torch.device | str,
    memory: int | None = None,
    team: Team | None = None,
    cluster: Cluster | None = None,
) -> tuple[RunConfig, str]:
    """Choose the plan of a run; return its settings and a description of the plan.

    The description of a plan that trivially fits on one device is empty.
    A run that is continued on an equal number of processes uses the plan in its folder, except for keys that the user
    gives.  All ranks call this and get the choice of rank 0 for the smallest of their devices.
    cluster: the links between the ranks.  If it is None, several ranks measure them when there is a choice.
    Errors: UserError if no plan fits, and for a cluster of another number of ranks; see also `GivenSettings.config`.
    """
    team = team or Team()
    ranks = team.process.ranks
    if cluster is not None and cluster.ranks != ranks:
        raise UserError(
            f"the cluster has {cluster.ranks} ranks, and {ranks} {'is' if ranks == 1 else 'are'} training; "
            "measure it with as many, or leave --cluster out"
        )
    if not given.auto:
        return given.config(), ""
    free = this_machine(device, memory=memory)
    machine = replace(free, free=int(team.smallest(free.free, "free memory")), devices=ranks)
    earlier = team.broadcast(_plan_of_run(given, out, ranks), "the plan of an earlier run")
    keys = earlier or _choose_keys(given, machine, torch.device(device), team, cluster)
    description = keys.pop("said")
    config = given.config(**keys)
    if idle := ranks - ranks_of(config.plan):
        # The settings in the run's folder note how many processes are idle (`_plan_of_run`).
        config = replace(config, train=replace(config.train, idle=idle))
    return config, description


def _choose_keys(
    given: GivenSettings, machine: Machine, device: torch.device, team: Team, cluster: Cluster | None
) -> dict[str, Any]:
    """Choose keys of the plan, the same on all ranks; "said" is their description."""
    config = given.config()
    job, rates = training_job(config), None
    fixed, sync = given.fixed_on_ranks(CHOSEN_IN_TRAINING)
    if config.train.window:
        # Examples come in the order in which they are ready, so ranks cannot share one.
        fixed = {"axial": 1, "branch": 1, **fixed}
    if config.data.crop is None:
        # Without a crop padding would not give equal lengths.
        fixed = {"sizes": config.plan.sizes, **fixed}
    try:
        if machine.devices > 1:
            plans, node = candidates(job, machine, fixed, sync), one_node(machine.devices)
            is_open = len(plans) > 1 or (plans[0].recompute is not None and "keep_blocks" not in fixed)
            is_open = is_open or any(variants(key, job, plans[0], node, fixed, sync) for key in VARIED_KEYS)
            on_one_node = cluster is None and team.process.ranks_per_node == machine.devices
            if is_open and on_one_node and is_evident(job, plans[0], machine):
                # An evident plan depends on the speed of neither the links nor the devices.  Rank 0 alone estimates
                # whether the plan fits, and the other ranks must follow it.
                lacks = why_not_fit(estimate(job, plans[0], machine), machine) if team.is_rank_zero else ""
                is_open = bool(team.broadcast({"lacks": lacks}, "whether the plan is evident")["lacks"])
            if is_open:
                cluster = cluster or measure_cluster(team, device)
                rates = _rates(job, machine, cluster, fixed, sync)
        keys: dict[str, Any] = {}
        if team.is_rank_zero:
            choice = choose(job, machine, fixed, sync, cluster, rates)
            keys = {name: plain(getattr(choice.plan, name)) for name in CHOSEN_IN_TRAINING}
            links = "" if machine.devices == 1 or cluster is None else f"; {describe_links(cluster)}"
            keys["said"] = "" if choice.trivially_fits else choice_in_words(choice) + links
    except ValueError as error:
        raise UserError(f"{given.source}: {error}") from error
    keys = team.broadcast(keys, "the plan of the run")
    return keys


def graphs_in_words(plan: Plan, device: torch.device | str) -> str:
    """Describe whether passes are recorded as graphs; empty on a device without graphs unless they are requested."""
    kind = torch.device(device).type
    if (reason := plan.why_no_graphs(kind)) is not None:
        return f"off, as {reason}" if kind == "cuda" or plan.graph is True else ""
    padded = f", examples padded to {plan.sizes} sizes of each axis" if plan.sizes else ""
    return f"passes are recorded and replayed{padded}"


def _rates(
    job: Job, machine: Machine, cluster: Cluster, fixed: Mapping[str, Any], sync: Mapping[str, Any]
) -> Rates | None:
    """Measure the rates of this device while all ranks do the same, as they will in the run; None if unknown.

    A rate is measured when it is first read, so this times plans that read most of the rates.
    """
    plans = candidates(job, machine, fixed, sync, cluster)
    rates = machine.rates(DTYPES[plans[0].precision])
    few = replace(job, optim=job.optim and replace(job.optim, accumulate=1))
    try:
        single = single_device_plan(plans[0])
        for plan in (single, replace(single, axial=max(plan.axial for plan in plans))):
            if rates is not None:
                step_time(few, replace(plan, batch=1), rates)
    except ValueError:
        # There is no rate for this dtype.
        return None
    return rates


def _plan_of_run(given: GivenSettings, out: Path, ranks: int) -> dict[str, Any]:
    """Read the keys that were chosen when a run began; empty if it began on another number of processes."""
    path, names = out / "settings.toml", CHOSEN_IN_TRAINING
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        plan, idle = build(Plan, values["plan"], str(path), "plan."), int(values["train"]["idle"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, UserError):
        # The file is missing, or `train` reports its error.
        return {}
    fixed, sync = given.fixed_on_ranks(names)
    if any(getattr(plan, name) != value for name, value in fixed.items() if name in names):
        return {}
    if any(getattr(plan.sync, name) != value for name, value in sync.items() if name != "check_every"):
        return {}
    if ranks != ranks_of(plan) + idle:
        return {}
    plan = replace(plan, **fixed, sync=replace(plan.sync, **sync))
    description = f"{describe_plan(plan, training=True)}, as in {path}"
    return {name: plain(getattr(plan, name)) for name in names} | {"said": description}
