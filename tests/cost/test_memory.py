"""The estimated memory of a plan equals what torch's allocator reports, with and without the parts that are skipped."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers import as_multimer, tiny_config
from tests.ranks import run_ranks
from warpfold.cost import memory, record
from warpfold.cost.example import ExampleSizes, Job
from warpfold.cost.fake import fake_mesh
from warpfold.cost.memory import MemoryEstimate, estimate_memory, measured_memory, most_allocated, with_margin
from warpfold.cost.recorder import Recorder
from warpfold.engine.optim import OptimConfig, Optimizer
from warpfold.engine.trainable import FinetuneConfig
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.model.losses import LossConfig
from warpfold.model.template import TemplatePointwiseAttention
from warpfold.ops import dispatch
from warpfold.parallel.compress import CompressionConfig
from warpfold.parallel.mesh import make_mesh
from warpfold.parallel.plan import Plan

SIZES = ExampleSizes(residues=24, sequences=6, extra=10, templates=2)
LOSSES = LossConfig(violation=1.0, experimentally_resolved=0.01)
IN_PLACE = {"chunk": 4, "in_place": True}


def job_of(training: bool, blocks: int = 2, sizes: ExampleSizes = SIZES, model: ModelConfig | None = None) -> Job:
    given = tiny_config() if model is None else model
    deep = replace(given, evoformer=replace(given.evoformer, blocks=blocks), extra_blocks=blocks)
    more: dict[str, Any] = {"loss": LOSSES, "optim": OptimConfig()} if training else {}
    return Job(model=deep, sizes=sizes, recycles=1, **more)


@pytest.fixture
def run_everything(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that disables the shortcuts of the recorder: skipped blocks, skipped turns and cached runs."""

    def change() -> None:
        monkeypatch.setattr(record, "BLOCKS", 10**6)
        monkeypatch.setattr(record, "FOLDED_BLOCKS", 10**6)
        monkeypatch.setattr(record, "needs_every_parameter", lambda optim, finetune: True)
        monkeypatch.setattr(dispatch, "SUBSAMPLED_ITERATIONS", 10**6)
        monkeypatch.setattr(Recorder, "run", lambda self, what, function, args, kwargs: function(*args, **kwargs))
        forget()

    def forget() -> None:
        memory._estimate_memory.cache_clear()
        record._record_example.cache_clear()
        record.record_optimizer.cache_clear()

    yield change  # type: ignore[misc]
    forget()


@pytest.fixture(scope="module", autouse=True)
def tables() -> None:
    """Create the constant tables on "meta" once, as their 80 kB would distort the estimates of such a small model."""
    for training in (False, True):
        estimate_memory(job_of(training, sizes=replace(SIZES, residues=4)), Plan())


MEASURED = [
    (False, {}),
    (False, IN_PLACE),
    (False, {"precision": "bf16"}),
    (True, {}),
    (True, {"recompute": "layer"}),
    (True, {"recompute": "block", "keep_blocks": 2, "precision": "bf16"}),
]


@pytest.mark.parametrize(("training", "plan"), MEASURED, ids=str)
def test_it_is_what_the_allocator_gives(training: bool, plan: dict[str, Any]) -> None:
    """The estimate must be within 10 %, and is within about 1 %: the rest is workspace inside torch's operations."""
    job = job_of(training, blocks=3 if "keep_blocks" in plan else 1)
    assert estimate_memory(job, Plan(**plan)).peak == pytest.approx(measured_memory(job, Plan(**plan)), rel=0.05)


@pytest.mark.parametrize("plan", [{}, {"recompute": "block"}, {"recompute": "layer", "chunk": 10}], ids=str)
@pytest.mark.parametrize("multimer", [False, True])
def test_it_is_of_a_gradient_by_the_sequence_too(multimer: bool, plan: dict[str, Any]) -> None:
    model = as_multimer(tiny_config()) if multimer else tiny_config()
    sizes = ExampleSizes(residues=40, sequences=2, extra=1, templates=1)
    job = replace(job_of(False, blocks=2, model=model, sizes=sizes), gradient="last")
    assert estimate_memory(job, Plan(**plan)).peak == pytest.approx(measured_memory(job, Plan(**plan)), rel=0.05)
    through_all = replace(job, gradient="all")
    needed = measured_memory(through_all, Plan(**plan))
    assert 0.95 * needed < estimate_memory(through_all, Plan(**plan)).peak < 1.3 * needed


def test_a_gradient_of_700_residues_fits_into_16_gb() -> None:
    """Plan the monomer with the aligned-error head in bf16, without an alignment.

    It needs half of the memory if activations are kept in host memory.
    """
    config = ModelConfig()
    model = replace(config, heads=replace(config.heads, pae=True))
    sizes = ExampleSizes(residues=700, sequences=1, extra=1, templates=0)
    job = Job(model=model, sizes=sizes, gradient="last")
    for limit, plan in ((16, Plan(recompute="block")), (8, Plan(recompute="layer", offload=True))):
        found = estimate_memory(job, replace(plan, precision="bf16"), "cuda")
        assert with_margin(found.peak, "cuda") <= limit * GB


@pytest.mark.parametrize("method", ["powersgd", "topk", "int8", "1bit"])
def test_what_compression_holds_and_needs_counts(method: Any) -> None:
    """The state and the workspace of each compression method are part of the estimate.

    Earlier, the quantised methods crashed here, and the peak of the update lacked 1.9 GB of PowerSGD.
    """
    config = job_of(True, blocks=2).model
    optim = OptimConfig(accumulate=2, compression=CompressionConfig(method=method, start=0))

    def on_a_rank() -> tuple[int, int]:
        optimizer = Optimizer(AlphaFold(config), optim, make_mesh(2))
        compressor = optimizer.reducer.compressor
        assert compressor is not None
        kept = [*vars(compressor).values(), *compressor.local.values(), *getattr(compressor, "groups", {}).values()]
        held = sum(x.nbytes for x in kept if isinstance(x, torch.Tensor))
        optimizer.total.normal_()
        # The compressor may have to restore its residual, and the copy for that counts too.
        used = torch.tensor(True)
        return held, most_allocated(lambda: compressor.mean(optimizer.total, used))

    held, needed = run_ranks(on_a_rank, 2)[0]
    estimated, without = (
        record.record_optimizer(config, Plan(data=2), one, "cpu", FinetuneConfig())
        for one in (optim, OptimConfig(accumulate=2))
    )
    assert estimated.held - without.held == pytest.approx(held, rel=0.02)
    # The recorder does not see the workspace inside torch's operations (topk's 32-bit indices become 64-bit), and a GPU
    # encodes everything at once.
    assert estimated.update - estimated.held == pytest.approx(needed, rel=0.25)


def test_templates_in_bf16_are_projected_without_copies_of_the_weight() -> None:
    """The projection does not copy the weight for every pair.

    Torch makes that copy where axes are moved: 9.4 MB here, next to 1.2 MB of everything else.
    """
    layer = TemplatePointwiseAttention(c_z=8, c_t=64, heads=4, width=16).bfloat16().requires_grad_(False)
    z, t = torch.randn(24, 24, 8, dtype=torch.bfloat16), torch.randn(2, 24, 24, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert most_allocated(lambda: layer(z, t, torch.ones(2))) < 24 * 24 * 64 * 64 * 2 / 2


def test_of_a_complex_too() -> None:
    job = job_of(False, blocks=1, model=as_multimer(tiny_config()))
    assert estimate_memory(job, Plan(**IN_PLACE)).peak == pytest.approx(
        measured_memory(job, Plan(**IN_PLACE)), rel=0.05
    )


@pytest.mark.parametrize(
    ("training", "plan", "device"),
    [
        (False, IN_PLACE, "cpu"),
        (True, {"recompute": "block", "keep_blocks": 4}, "cuda"),
        (True, {"axial": 2, "recompute": "block"}, "cpu"),
    ],
    ids=str,
)
def test_what_is_left_out_is_alike(training: bool, plan: dict, device: str, run_everything: Callable[[], None]) -> None:
    job = job_of(training, blocks=8, sizes=replace(SIZES, residues=12, templates=0))
    few = estimate_memory(job, Plan(**plan), device)
    run_everything()
    everything = estimate_memory(job, Plan(**plan), device)
    # The parameter that represents all others does not include one constant of the model.
    assert few.weights == pytest.approx(everything.weights, rel=0, abs=max(16, record.UNIT[device]))
    assert few.peak == pytest.approx(everything.peak, rel=0.005)


def test_a_block_more_that_is_kept_costs_the_same_each_time() -> None:
    job = job_of(True, blocks=9, sizes=replace(SIZES, residues=12, templates=0))
    peaks = [estimate_memory(job, Plan(recompute="layer", keep_blocks=count), "cuda").peak for count in (4, 5, 6)]
    assert peaks[1] - peaks[0] == peaks[2] - peaks[1] > 0


def test_owners_add_up_and_the_course_reaches_the_peak() -> None:
    for training, plan in ((False, Plan(chunk=4, in_place=True)), (True, Plan(recompute="block"))):
        found = estimate_memory(job_of(training), plan)
        assert sum(found.at_peak.values()) == found.peak == max(sum(held.values()) for _, held in found.course)
        assert found.at_peak["weights"] == found.weights
        assert 20 < len(found.course) <= memory.MAX_MOMENTS + 4
        assert {"z", "m", "factors"} <= {owner for _, held in found.course for owner in held}
    assert found.at_peak["kept"] > 0


def test_a_long_protein_takes_no_longer() -> None:
    def operations(residues: int) -> int:
        sizes = ExampleSizes(residues=residues, sequences=128, extra=256, templates=1)
        return len(record.record_example(job_of(False, sizes=sizes), Plan(chunk=4, in_place=True), "cuda").pieces)

    assert operations(8000) == operations(2000)


def test_z_in_host_memory_is_not_on_the_device() -> None:
    sizes = ExampleSizes(residues=400, sequences=4, extra=4, templates=0)
    job, plan = job_of(False, sizes=sizes), Plan(chunk=4, in_place=True)
    there, away = (estimate_memory(job, replace(plan, offload=offload), "cuda") for offload in (False, True))
    of_z = 400 * 400 * job.model.c_z * 4
    assert away.host - there.host == of_z
    # PAE, which is copied to host memory row by row
    assert there.host == pytest.approx(400 * 400 * 4, rel=0.01)
    # One more slice is in transit.
    assert away.peak <= there.peak - 0.7 * of_z
    assert away.at_peak.get("z", 0) == 0


def test_what_a_training_keeps_in_host_memory_is_not_on_the_device() -> None:
    sizes = ExampleSizes(residues=160, sequences=64, extra=4, templates=0)
    there, away = (
        estimate_memory(job_of(True, sizes=sizes), Plan(offload=offload), "cuda") for offload in (False, True)
    )
    assert there.host < 2**20 < away.host
    assert away.at_peak["kept"] < 0.7 * there.at_peak["kept"]
    assert away.peak < there.peak


def test_more_ranks_hold_less() -> None:
    def of(ranks: int) -> MemoryEstimate:
        sizes = ExampleSizes(residues=96, sequences=8, extra=8, templates=0)
        plan = Plan(axial=ranks, recompute="block", triangle="channels")
        return estimate_memory(job_of(True, sizes=sizes), plan, "cuda")

    one, four = of(1), of(4)
    # Each rank has its share of the optimizer's state.
    assert one.weights / 4 < four.weights < one.weights
    assert four.peak - four.weights < 0.5 * (one.peak - one.weights)


# The memory of cards in bytes
GB, CARD = 10**9, {24: 24 << 30, 40: 40 << 30, 80: 80 << 30}


@pytest.mark.parametrize(
    ("residues", "offload", "limit", "card"),
    [(10_000, False, 61 * GB, 80), (6_000, False, 24 * GB, 24), (8_000, True, 24 * GB, 24)],
)
def test_long_proteins_fit(residues: int, offload: bool, limit: int, card: int) -> None:
    """Plan the monomer with the aligned-error head, 512 + 1,024 rows, bf16.

    Beside the alignment, the device holds z and one factor, or with z in host memory, one factor.
    """
    config = ModelConfig()
    model = replace(config, heads=replace(config.heads, pae=True))
    sizes = ExampleSizes(residues=residues, sequences=512, extra=1024, templates=0)
    plan = Plan(chunk=64, in_place=True, offload=offload, precision="bf16")
    found = estimate_memory(Job(model=model, sizes=sizes), plan, "cuda")
    assert found.peak <= limit
    assert with_margin(found.peak, "cuda") <= CARD[card]
    z = residues**2 * model.c_z * 2
    apart = "m", "extra", "features", "weights", "loading"
    beside = [sum(held for name, held in at.items() if name not in apart) for _, at in found.course]
    assert max(beside) <= (1.1 if offload else 2.1) * z


def test_fine_tuning_fits() -> None:
    """Plan 384 residues and 512 + 5,120 rows in bf16: they fit on 40 GB, and on 80 GB with fewer blocks recomputed."""
    sizes = ExampleSizes(residues=384, sequences=512, extra=5120, templates=4)
    job = Job(model=ModelConfig(), sizes=sizes, recycles=1, loss=LOSSES, optim=OptimConfig())

    def needs(kept: int) -> int:
        plan = Plan(recompute="block", keep_blocks=kept, precision="bf16")
        return with_margin(estimate_memory(job, plan, "cuda").peak, "cuda")

    assert needs(3) <= CARD[40] < needs(20) <= CARD[80]


def test_the_margin_is_added() -> None:
    assert with_margin(0) > 0
    assert with_margin(10**9, "cuda:0") > with_margin(10**9, "cpu") > 10**9


def test_fake_ranks_beside_real_ones() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        for _ in range(2):
            with fake_mesh(axial=3) as mesh, torch.device("meta"):
                assert mesh.axial.size == dist.get_world_size() == 3
        assert dist.get_world_size() == 1
        assert dist.get_backend() == "gloo"
        for each in (None, group, dist.new_group([0])):
            x = torch.ones(2)
            dist.all_reduce(x, group=each)
            assert x.tolist() == [1, 1]
    finally:
        dist.destroy_process_group()
