"""Every plan that the planner can choose gives the results of one device, in fp64.

Compared are the outputs of predictions, with the heads as `run.predictor` calls them, and the losses and gradients of
training.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.laws.test_plans import (
    LIMIT,
    LOSSES,
    STOPPED,
    Work,
    above,
    answer,
    errors,
    example,
    model_for,
    on_one_device,
)
from tests.ranks import run_ranks
from warpfold.cost import planner
from warpfold.cost.example import ExampleSizes, Job
from warpfold.cost.links import Cluster, Link
from warpfold.cost.machine import Machine
from warpfold.engine.optim import OptimConfig
from warpfold.model.confidence import predicted_errors
from warpfold.parallel.collectives import local_shard
from warpfold.parallel.exchange import SyncConfig
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import Mesh, make_mesh
from warpfold.parallel.plan import Plan

CUT = {"msa": -2, "pair": -3, "msa_first_row": -2, "distogram": -3, "pae": -2}
# PAE is stored in fp32.
PAE_LIMIT = 1e-6
FOLDED = {
    "chain": Work(residues=11, templates=3, recycles=1, padded=1),
    "averaged": Work(residues=7, templates=None, recycles=1, ensemble=3, padded=1),
    "complex": STOPPED,
}
TRAINED = Work(residues=7, templates=1)


# All plans are bound to the same model.
made = cache(model_for)


def job_of(work: Work, training: bool = False) -> Job:
    sizes = ExampleSizes(
        residues=work.residues, sequences=work.sequences, extra=work.extra, templates=work.templates or 0
    )
    learns: dict[str, Any] = {"loss": LOSSES, "optim": OptimConfig(accumulate=2)} if training else {}
    return Job(model=made(work).config, sizes=sizes, recycles=work.recycles, **learns)


def ladder(job: Job, devices: int, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Return all plans that the planner considers for some devices of both kinds, with both triangle products."""
    # So that few residues have many slices
    monkeypatch.setattr(planner, "MIN_CHUNK", 1)
    found: dict[Plan, None] = {}
    for kind in ("cpu", "cuda"):
        for plan in planner.candidates(job, Machine(kind=kind, free=1, devices=devices), {"precision": "fp64"}):  # type: ignore[arg-type]
            ways = ("gather", "channels") if plan.axial > 1 and not plan.in_place else (plan.triangle,)
            kept = (0, 1) if plan.recompute and not plan.offload else (0,)
            for way in ways:  # gradient exchange: parallel/test_reducer.py
                found |= {replace(plan, triangle=way, keep_blocks=k, sync=SyncConfig()): None for k in kept}  # type: ignore[arg-type]
    return list(found)


def folded(work: Work, plan: Plan, mesh: Mesh) -> dict[str, Tensor]:
    """Return the results of a prediction on this rank."""
    batch, model = example(work, 0), Execution(plan, mesh).bind(made(work))
    execution, asym_id = model.execution, batch.get("asym_id")
    with torch.no_grad():
        last = model.fold(batch, work.recycles)
        r, s = last.representations, last.structure
        told = predicted_errors(model.pae, r.pair, execution, asym_id)
        found = {
            "recycles": torch.tensor(float(last.recycles)),
            "msa": r.msa,
            "msa_first_row": r.msa_first_row,
            "single": r.single,
            "pair": torch.cat([execution.fetch(r.pair, rows) for rows in execution.rows(r.pair.shape[-3])], -3),
            "structure": s.single,
            "atoms": s.final_atom37,
            "traj": s.traj,
            "plddt": model.plddt(s.single),
            "pae": told.pae.double(),
            "ptm": torch.tensor([told.ptm, told.iptm or 0.0], dtype=torch.float64),
            "distogram": torch.cat([logits for _, logits in model.distogram.in_slices(r.pair)], -3),
        }
    return found if told.chain_pair_iptm is None else found | {"pairs": told.chain_pair_iptm}


@cache
def at_once(name: str) -> dict[str, Tensor]:
    return folded(FOLDED[name], Plan(precision="fp64"), Mesh())


def wrong(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], mesh: Mesh) -> dict[str, float]:
    """Return the relative errors larger than rounding; an output that is sharded is compared with this rank's shard."""
    found_wrong = {}
    for name, whole in expected.items():
        there = local_shard(whole, CUT[name], mesh.axial) if name in CUT else whole
        error = float((found[name] - there).norm() / whole.norm())
        if not error < (PAE_LIMIT if name == "pae" else LIMIT):
            found_wrong[name] = error
    assert found.keys() == expected.keys()
    return found_wrong


SLOW = [pytest.param(name, devices, marks=pytest.mark.slow) for name, devices in (("averaged", 4), ("complex", 4))]


@pytest.mark.parametrize(
    ("name", "devices"), [("chain", 4), *SLOW, *((name, devices) for name in FOLDED for devices in (1, 2))]
)
def test_a_prediction_as_planned_is_the_whole(name: str, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    work, expected = FOLDED[name], at_once(name)
    plans = [p for p in ladder(job_of(work), devices, monkeypatch) if p.axial == devices]
    kinds = {(p.chunk is not None, p.in_place, p.offload) for p in plans}
    assert kinds == {(False, False, False), (True, True, False), *([(True, True, True)] if devices == 1 else [])}
    assert len({p.chunk for p in plans}) > 2

    def on_a_rank() -> dict[str, dict[str, float]]:
        mesh = make_mesh(1, devices, 1) if devices > 1 else Mesh()
        found = {str(plan): wrong(folded(work, plan, mesh), expected, mesh) for plan in plans}
        return {plan: differences for plan, differences in found.items() if differences}

    assert all(found == {} for found in ([on_a_rank()] if devices == 1 else run_ranks(on_a_rank, devices)))


def test_a_training_as_planned_is_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [plan for devices in (1, 2) for plan in ladder(job_of(TRAINED, True), devices, monkeypatch)]
    kinds = {(p.recompute, p.keep_blocks, p.offload) for p in plans}
    assert kinds >= {
        (None, 0, False),
        *((r, *w) for r in ("block", "layer") for w in ((0, False), (1, False), (0, True))),
    }
    assert {p.axial for p in plans} == {1, 2}
    expected = on_one_device(TRAINED, 1)[0]
    for ranks in (1, 2):  # with more data ranks, each has its own example; their sum: tests/laws/test_plans.py
        some = [plan for plan in plans if plan.axial == ranks and plan.data == 1]

        def on_a_rank(some: list[Plan] = some, ranks: int = ranks) -> list[dict[str, float]]:
            mesh = make_mesh(axial=ranks)
            return [errors(answer(TRAINED, plan, mesh), expected, mesh) for plan in some]

        for plan, *found in zip(some, *run_ranks(on_a_rank, ranks, timeout=500), strict=True):
            assert above(found) == {}, plan


def test_more_devices_than_the_law_has_take_the_same_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for eight devices differ from the compared plans only in the number of ranks."""
    for training in (False, True):
        job = job_of(TRAINED, training)
        few, many = ({replace(p, axial=min(p.axial, 2), data=1, triangle="auto") for p in ladder(job, n, monkeypatch)}
                     for n in (2, 8))  # fmt: skip
        few |= {replace(p, axial=1, data=1) for p in ladder(job, 1, monkeypatch)}
        assert many <= few
        assert math.prod((len(few), len(many))) > 1


def test_plans_on_a_cluster_take_ways_that_were_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """All plans on a cluster were compared, apart from the exchange of gradients and from batches.

    parallel/test_reducer.py and laws/test_batches.py check those.
    """
    job, link = job_of(TRAINED, training=True), Link(1e-5, 1e9)
    compared = {replace(p, data=1, keep_blocks=0) for ranks in (1, 2) for p in ladder(job, ranks, monkeypatch)}
    for ranks in (2, 4):
        cluster = Cluster(ranks=ranks, per_node=ranks // 2, within=link, between=link)
        for rough in planner.candidates(job, Machine(kind="cuda", free=1, devices=ranks), {"precision": "fp64"}):
            changed = (planner.variants(key, job, rough, cluster, {}, {}) for key in planner.VARIED_KEYS)
            for plan in (rough, *chain(*changed)):
                # Either of the two
                by_bytes = plan.axial > 1 and plan.triangle == "auto"
                triangle = "gather" if by_bytes else plan.triangle
                alike = replace(plan, data=1, axial=min(plan.axial, 2), batch=1, sync=SyncConfig(), triangle=triangle)
                assert alike in compared
