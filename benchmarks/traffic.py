"""What the ranks of a plan send each other in an Evoformer block, counted: one runs on fake ranks, and this listens.

`warpfold/cost/traffic.py` says the same in closed form (a law test compares the two), so that a plan can be judged
without running anything, and what it costs: what `Plan.by_channels` is held to when it chooses how products are cut.
"""

from dataclasses import replace

import torch

from warpfold.cost.fake import fake_ranks
from warpfold.cost.traffic import PHASES, Move, Traffic, TrafficBlock
from warpfold.model.evoformer import Evoformer
from warpfold.parallel.collectives import shard_sizes
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import DTYPES, Plan
from warpfold.parallel.waits import Event, watched


def count(plan: Plan, block: TrafficBlock, branch_rank: int = 0) -> list[Move]:
    """Count what one more block in a stack sends under `plan`, while it runs forward and backward on fake ranks.

    Counts are those of the first axial rank of branch `branch_rank`; no other rank holds more.
    """
    less, more = (_count(plan, block, blocks, branch_rank) for blocks in (1, 2))
    return [
        Move(name, move.kind, **{phase: getattr(move, phase) - getattr(less[name], phase) for phase in PHASES})
        for name, move in more.items()
    ]


def _count(plan: Plan, block: TrafficBlock, blocks: int, branch_rank: int) -> dict[str, Move]:
    """Count what a stack of `blocks` blocks sends."""
    events: list[Event] = []
    with fake_ranks(axial=plan.axial, branch=plan.branch, rank=branch_rank) as mesh, watched(events.append):
        config = replace(block.evoformer, blocks=blocks)
        stack = Execution(plan, mesh).bind(Evoformer(block.c_m, block.c_z, config, block.global_column))
        here, dtype = shard_sizes(block.residues, plan.axial)[0], DTYPES[plan.precision]
        m = torch.empty(block.sequences, here, block.c_m, dtype=dtype, requires_grad=True)
        z = torch.empty(here, block.residues, block.c_z, dtype=dtype, requires_grad=True)
        m, z = stack(m, z, torch.empty(block.sequences, block.residues), torch.empty(here, block.residues))
        before = len(events)
        torch.autograd.backward((m, z), (torch.empty_like(m), torch.empty_like(z)))
    found: dict[str, Move] = {}
    for index, event in enumerate(events):
        if event.what == "start":
            phase = "backward" if event.backward else "forward" if index < before else "recomputed"
            name = event.name.strip()
            move = found.setdefault(name, Move(name, event.kind))
            found[name] = replace(move, **{phase: getattr(move, phase) + Traffic(1, event.bytes)})
    return found
