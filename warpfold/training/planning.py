"""Plans as they are made when the command line folds or trains: for what is free at that moment, and said in a line."""

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
from warpfold.cost.example import ExampleSizes, Job, sizes_of
from warpfold.cost.launches import launches_of
from warpfold.cost.links import Cluster, one_node
from warpfold.cost.machine import Machine, this_machine
from warpfold.cost.planner import (
    CHOSEN_IN_TRAINING,
    Choice,
    alone,
    candidates,
    choose,
    describe_plan,
    estimate,
    is_evident,
    joined,
    needed_bytes,
    ranks_of,
    tighter,
    variants,
    why_not_fit,
)
from warpfold.cost.rates import Rates
from warpfold.cost.record import features_of
from warpfold.cost.replay import step_time
from warpfold.cost.report import choice_in_words
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

TELL_EVERY = 5.0  # seconds between two lines about kernels that are being compiled
# A prediction is recorded where so many times the memory that it needs is free.  The graphs' pool holds the peak of the
# trunk and what shorter proteins left there; the structure module and the heads take memory outside of the pool.
GRAPHS_HOLD = 4
SAID = ("chunk", "in_place", "offload", "axial", "branch")  # keys of a plan that a summary names


@dataclass(frozen=True)
class FoldPlan:
    """How an example is folded, and how that came about.

    said: in words.  details: for the summary.  residues: of the example.  choice: where this process made it itself.
    ran_out: the plans that were tried before and ran out of memory.
    """

    plan: Plan
    said: str
    details: Mapping[str, Any]
    residues: int
    choice: Choice | None = None
    ran_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, choice: Choice, ran_out: tuple[str, ...] = ()) -> "FoldPlan":
        """Describe a choice in words and in numbers."""
        keys = {name: getattr(choice.plan, name) for name in SAID}
        numbers = {"bytes": needed_bytes(choice.memory, choice.machine), "free": choice.machine.free}
        time, said = choice.chosen.time, choice_in_words(choice)
        seconds = None if time is None else round(time.total, 1)
        details = {**keys, **numbers, "seconds": seconds, "said": said, "ran_out": list(ran_out)}
        return cls(choice.plan, said, details, choice.job.sizes.residues, choice, ran_out)


class FoldPlanner:
    """Chooses how each example is folded, and remembers what ran out of memory.

    fixed: keys of the plan that stay.  memory: bytes that may be used on the device at most.  team: all ranks that
    share an example call everything here, and get the plan that suits the one with the least memory.  graphs: whether
    the trunk is recorded as a graph where the device has graphs and enough memory.
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
        self._unrecorded = math.inf  # residues from which memory ran out with graphs
        self._limits: list[tuple[int, int]] = []  # residues, and bytes that were not there though they were said to be
        self._last = ""
        self._kept: Choice | None = None

    def choose(
        self,
        sizes: ExampleSizes,
        recycles: int,
        ensemble: int = 1,
        representations: bool = False,
        gradient: Through | None = None,
    ) -> FoldPlan:
        """Return the plan as `check` does, and say it where it is another than the last; nothing of small ones."""
        found = self.check(sizes, recycles, ensemble, representations, gradient)
        job = Job(model=replace(self.model, ensemble=ensemble), sizes=sizes, recycles=recycles, gradient=gradient)
        compile_kernels(job, found.plan, self.device)
        evident = found.choice is not None and found.choice.trivially_fits
        plan = describe_plan(found.plan) + (", graphs" if found.plan.graph is True else "")
        if plan != self._last and not (evident and not self._last):
            self._last = plan
            log.info("plan for %d residues: %s", sizes.residues, found.said)
        return found

    def check(
        self,
        sizes: ExampleSizes,
        recycles: int,
        ensemble: int = 1,
        representations: bool = False,
        gradient: Through | None = None,
    ) -> FoldPlan:
        """Return the plan for an example of these sizes, for what is free now, and say nothing.

        gradient: by the sequence, through so many passes; None: it is folded alone.
        Errors: UserError where nothing fits, saying what would, or for keys that no plan can have together.
        """
        model = replace(self.model, ensemble=ensemble)
        job = Job(model=model, sizes=sizes, recycles=recycles, representations=representations, gradient=gradient)
        machine = this_machine(self.device, loaded=True, memory=self.memory)
        # Where a shorter one has met less, that is what there is.
        free = min([machine.free, *(limit for shorter, limit in self._limits if shorter <= sizes.residues)])
        machine = replace(machine, free=free, devices=self.team.mesh.model.size)
        if self.team.mesh.model.size == 1:
            choice = self._choose(job, machine)
            found = FoldPlan.of(choice)
            recorded = replace(choice.plan, graph=True)
            if not self.graphs or gradient is not None or choice.plan.chunk is not None:
                return found
            if recorded.why_no_graphs(machine.kind) is not None or sizes.residues >= self._unrecorded:
                return found
            if GRAPHS_HOLD * needed_bytes(choice.memory, choice.machine) > machine.free:
                return found
            said = f"{found.said}; the trunk is recorded as a CUDA graph"
            return replace(found, plan=recorded, said=said, details={**found.details, "said": said, "graphs": True})
        free = min(self.team.all_gather_object_of_example(machine.free, "free memory"))
        told: dict[str, Any] = {}
        if self.team.is_example_leader:  # the first of the ranks that share the example chooses, and tells the others
            try:
                own = FoldPlan.of(self._choose(job, replace(machine, free=free)))
                told = {"plan": to_dict(own.plan), "details": own.details}
            except UserError as error:
                told = {"refused": str(error)}
        told = self.team.all_gather_object_of_example(told, "the plan")[0]
        if "refused" in told:
            raise UserError(told["refused"])
        return FoldPlan(build(Plan, told["plan"], "plan"), told["details"]["said"], told["details"], sizes.residues)

    def _choose(self, job: Job, machine: Machine) -> Choice:
        """Choose, or go on as with the last example: one like it, which needs no more than half of what is free.

        To choose takes some 10 ms, of which thousands of small designs would notice each.
        """
        if (kept := self._kept) is not None and kept.job == job:
            needed = needed_bytes(kept.memory, kept.machine)
            alike = replace(kept.machine, free=machine.free, host=machine.host) == machine
            if alike and 2 * needed <= machine.free and abs(kept.machine.free - machine.free) <= kept.machine.free / 10:
                return replace(kept, machine=machine)
        self._kept = None  # where nothing fits, nothing is known
        grid = {"axial": self.team.mesh.axial.size, "branch": self.team.mesh.branch.size}
        try:
            self._kept = choose(job, machine, {**grid, **self.fixed})
        except ValueError as error:
            raise UserError(str(error)) from error
        return self._kept

    def after(self, failed: FoldPlan, error: BaseException) -> FoldPlan:
        """Return the next tighter plan where one ran out of memory, and remember that for examples as long or longer.

        Without graphs first: their memory is free for nothing else.

        Errors: `error` itself if it is of another kind, or where several ranks share the example: the others wait for
        this one in the middle of it; UserError where nothing is tighter.
        """
        if not is_out_of_memory(error) or failed.choice is None or self.team.process.ranks > 1:
            raise error
        what = describe_plan(failed.plan)
        if failed.plan.graph is True:
            self._unrecorded = failed.residues
            log.warning("%d residues: out of memory (%s) with CUDA graphs; next plan: without", failed.residues, what)
            return FoldPlan.of(failed.choice, (*failed.ran_out, f"{what}, graphs"))
        following = tighter(failed.choice)
        if following is None:
            raise UserError(f"{failed.residues} residues: out of memory even with the tightest plan ({what})") from None
        needed = needed_bytes(failed.choice.memory, failed.choice.machine)
        self._limits.append((failed.residues, needed - 1))
        found = FoldPlan.of(following, (*failed.ran_out, what))
        log.warning("%d residues: out of memory (%s); next plan: %s", failed.residues, what, found.said)
        return found


def compile_kernels(job: Job, plan: Plan, device: torch.device | str) -> None:
    """Compile the kernels that a job launches on a CUDA device and Triton's cache lacks, in parallel, and say so.

    Otherwise the first pass would compile one kernel after another without a word.  Jobs of the same residues and of
    similar numbers of alignment rows launch the same kernels, and are looked at once in a process.  Where kernels
    cannot be compiled ahead, a line says why, and they are compiled when they are first launched.
    """
    device = torch.device(device)
    if device.type != "cuda" or plan.kernels == "definition" or _without_kernels(device):
        return
    rows = {name: getattr(job.sizes, name).bit_length() for name in ("sequences", "extra")}
    alike = replace(job, sizes=replace(job.sizes, **rows), recycles=min(job.recycles, 1), representations=False)
    if (alike, plan, device) in _compiled_for:
        return
    _compiled_for.add((alike, plan, device))
    if torch.version.hip is not None:
        log.info("kernels are compiled when they are first launched: on AMD GPUs none is compiled ahead")
        return
    from triton.backends.compiler import GPUTarget

    from warpfold.ops.triton.ahead import compile_ahead
    from warpfold.ops.triton.launch import launched_on

    started = told = time.monotonic()

    def tell(done: int, total: int, what: str) -> None:
        nonlocal told
        now = time.monotonic()
        if done == 0 or now >= told + TELL_EVERY:
            log.info("%s", what)
            told = now

    major, minor = torch.cuda.get_device_capability(device)
    try:
        with launched_on(device):
            launches = launches_of(job, plan)
        found = compile_ahead(launches, GPUTarget("cuda", 10 * major + minor, 32), tell, launchers=True)
    except OSError as error:
        log.info("kernels are compiled when they are first launched: Triton's cache cannot be written (%s)", error)
        return
    if found.compiled:
        seconds = as_time(time.monotonic() - started)
        log.info("%d kernels compiled in %s; %d were in the cache", found.compiled, seconds, found.cached)
    if found.failed:
        log.info("%d kernels are compiled when they are first launched: %s", len(found.failed), found.failed[0])


_compiled_for: set[tuple[Job, Plan, torch.device]] = set()


def _without_kernels(device: torch.device) -> bool:
    return dispatch.unsupported_device((torch.empty(0, device=device),)) is not None


def compile_for_training(config: RunConfig, device: torch.device | str) -> None:
    """Compile the kernels that a training step launches for examples of the largest size (`compile_kernels`)."""
    if torch.device(device).type != "cuda":
        return
    data, plan = config.data, config.plan
    templates = data.max_templates if config.model.templates.enabled else 0
    largest = ExampleSizes(
        residues=data.crop or UNCROPPED, sequences=data.max_msa, extra=data.max_extra, templates=templates
    )
    job = Job(
        model=config.model,
        sizes=largest,
        recycles=config.model.recycles,
        loss=config.loss,
        optim=config.optim,
        finetune=config.finetune,
    )
    padded = padded_shape(features_of(job, 1), plan.multiple_on("cuda"), data, plan.sizes)
    sizes = ExampleSizes(
        residues=padded["res"], sequences=padded["seq"], extra=padded["extra"], templates=padded.get("tmpl", 0)
    )
    compile_kernels(replace(job, sizes=sizes), plan, device)


@contextmanager
def explain_out_of_memory(
    config: RunConfig, step: int, device: torch.device | str, examples: Sequence[Sample] = ()
) -> Iterator[None]:
    """Turn an error that says that there was no memory left into a UserError; other errors pass.

    step: steps done before this one.  examples: those that go through the model together; none in the update.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        kind = torch.device(device).type
        names = ", ".join(f"{one.key or one.name} ({sizes_of_batch(one.features)})" for one in examples)
        plan = describe_plan(config.plan, training=True)
        raise UserError(
            f"step {step + 1}: out of memory on {kind} with {names or 'the update of the weights'}; plan: {plan}. "
            f"Set {setting_with_less_memory(config, kind)}; the same command then continues from the last checkpoint."
        ) from error


def setting_with_less_memory(config: RunConfig, kind: str) -> str:
    """Return the assignment of the key that lowers the peak of a training step and costs least time.

    kind: of the device.  Keys of the plan may change when a run continues; the crop needs a new run.
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
    """Return the sizes of an example that is ready for the model; of several together, of one as large as all."""
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
    """Return the grid of a run's processes: each example on as few as the largest needs, and as is fast.

    All ranks call this, and get what the first chooses for the smallest device.
    """
    machine = this_machine(device, loaded=True, memory=memory)
    free = int(team.smallest(machine.free, "free memory"))
    told: dict[str, Any] = {}
    if team.is_rank_zero:
        largest = max(jobs, key=lambda sizes: sizes.residues)
        job = Job(model=model, sizes=largest, recycles=recycles)
        there = replace(machine, free=free, devices=team.process.ranks)
        try:
            plan = choose(job, there, fixed, examples=len(jobs)).plan
        except (
            UserError
        ):  # the largest fits nowhere; that is its own failure, and others have as many ranks as there are
            plan = Plan(axial=team.process.ranks)
        told = {"data": plan.data, "axial": plan.axial}
        spare = plan.data - len(jobs)
        if spare > 0:
            log.warning(
                "%d of %d processes have nothing to do: no protein is faster on more of them",
                spare * plan.axial,
                team.process.ranks,
            )
    return Plan(**team.broadcast(told, "the plan of the run"))


def training_job(given: GivenSettings, config: RunConfig) -> Job:
    """Return the job of one training step, with one example of the largest size."""
    sizes = sizes_of(given.values, given.source)
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
    """Return the settings of a run with the plan that suits its devices, and what is to be said of it.

    Of a small one on one device nothing is said.  A run that is continued on as many processes goes on with the plan
    that stands in its folder, but for keys that are given.  All ranks call this and get what the first chooses, for the
    smallest of their devices.  cluster: how they are joined; None: several measure it, if there is anything to choose.
    Errors: UserError where nothing fits, saying what would, for a cluster of other ranks, and as of
    `GivenSettings.config`.
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
    told = earlier or _chosen(given, machine, torch.device(device), team, cluster)
    said = told.pop("said")
    config = given.config(**told)
    if idle := ranks - ranks_of(config.plan):  # they wait; it stands in the run's folder how many there were
        config = replace(config, train=replace(config.train, idle=idle))
    return config, said


def _chosen(
    given: GivenSettings, machine: Machine, device: torch.device, team: Team, cluster: Cluster | None
) -> dict[str, Any]:
    """Return the keys that are chosen, the same on all ranks, and what is to be said of them."""
    config = given.config()
    job, rates = training_job(given, config), None
    fixed, sync = given.fixed_on_ranks(CHOSEN_IN_TRAINING)
    if config.train.window:  # examples come as they are ready, so none can be shared
        fixed = {"axial": 1, "branch": 1, **fixed}
    if config.data.crop is None:  # their lengths would still be all kinds
        fixed = {"sizes": config.plan.sizes, **fixed}
    try:
        if machine.devices > 1:
            plans, there = candidates(job, machine, fixed, sync), one_node(machine.devices)
            is_open = len(plans) > 1 or (plans[0].recompute is not None and "keep_blocks" not in fixed)
            is_open = is_open or any(variants(job, plans[0], there, fixed, sync))
            on_one_node = cluster is None and team.process.ranks_per_node == machine.devices
            if is_open and on_one_node and is_evident(job, plans[0], machine):
                # An evident plan needs neither the speed of the links nor that of the devices.  The first rank alone
                # knows whether it fits, and the others must do as it does.
                lacks = why_not_fit(estimate(job, plans[0], machine), machine) if team.is_rank_zero else ""
                is_open = bool(team.broadcast({"lacks": lacks}, "whether the plan is evident")["lacks"])
            if is_open:
                cluster = cluster or measure_cluster(team, device)
                rates = _rates(job, machine, cluster, fixed, sync)
        told: dict[str, Any] = {}
        if team.is_rank_zero:
            choice = choose(job, machine, fixed, sync, cluster, rates)
            told = {name: plain(getattr(choice.plan, name)) for name in CHOSEN_IN_TRAINING}
            links = "" if machine.devices == 1 or cluster is None else f"; {joined(cluster)}"
            told["said"] = "" if choice.trivially_fits else choice_in_words(choice) + links
    except ValueError as error:
        raise UserError(f"{given.source}: {error}") from error
    chosen: dict[str, Any] = team.broadcast(told, "the plan of the run")
    return chosen


def graphs_in_words(plan: Plan, device: torch.device | str) -> str:
    """Say whether passes are recorded as graphs; nothing where there are none on such a device, nor asked for."""
    kind = torch.device(device).type
    if (why := plan.why_no_graphs(kind)) is not None:
        return f"off, as {why}" if kind == "cuda" or plan.graph is True else ""
    padded = f", examples padded to {plan.sizes} sizes of each axis" if plan.sizes else ""
    return f"passes are recorded and replayed{padded}"


def _rates(
    job: Job, machine: Machine, cluster: Cluster, fixed: Mapping[str, Any], sync: Mapping[str, Any]
) -> Rates | None:
    """Measure the rates of this device while all ranks do the same, as they will in the run; None: not known.

    Rates are measured when they are first read, so plans are timed here that ask for most of them.
    """
    plans = candidates(job, machine, fixed, sync, cluster)
    rates = machine.rates(DTYPES[plans[0].precision])
    few = replace(job, optim=job.optim and replace(job.optim, accumulate=1))
    try:
        for plan in (alone(plans[0]), replace(alone(plans[0]), axial=max(plan.axial for plan in plans))):
            if rates is not None:
                step_time(few, replace(plan, batch=1), rates)
    except ValueError:  # no rate of this dtype
        return None
    return rates


def _plan_of_run(given: GivenSettings, out: Path, ranks: int) -> dict[str, Any]:
    """Return the keys that were chosen when a run began, if it began on as many processes; else nothing."""
    path, names = out / "settings.toml", CHOSEN_IN_TRAINING
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        plan, noted = build(Plan, values["plan"], str(path), "plan."), int(values["train"]["idle"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, UserError):
        return {}  # there is none, or `train` will say what is wrong with it
    fixed, sync = given.fixed_on_ranks(names)
    if any(getattr(plan, name) != value for name, value in fixed.items() if name in names):
        return {}
    if any(getattr(plan.sync, name) != value for name, value in sync.items() if name != "check_every"):
        return {}
    if ranks != ranks_of(plan) + noted:
        return {}
    plan = replace(plan, **fixed, sync=replace(plan.sync, **sync))
    said = f"{describe_plan(plan, training=True)}, as in {path}"
    return {name: plain(getattr(plan, name)) for name in names} | {"said": said}
