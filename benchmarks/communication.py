"""What axial and branch plans send and hold, counted on fake ranks: no rank, no data, any machine.

    python benchmarks/communication.py --out benchmarks/results/NAME.json        (some minutes; --no-memory: seconds)

Bytes are those that one rank sends to others in one Evoformer block (128 sequences, AlphaFold2's widths, bf16).
"""

import argparse
import datetime
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.traffic import Move, TrafficBlock, count, moves, seconds, total
from tests.helpers import memory_of
from warpfold.cost.links import LINKS
from warpfold.cost.recorder import MemoryPiece
from warpfold.model.alphafold import HeadsConfig, ModelConfig
from warpfold.model.evoformer import EvoformerConfig
from warpfold.model.losses import LossConfig
from warpfold.parallel.plan import Plan

# FastFold's placement (Cheng et al. 2022; fastfold/model/fastnn): its number, what moves, how, whether it is waited for
# at once, and the moves here that stand for it.  Rows 3, 4 and 14 move nothing.
FASTFOLD = [
    (1, "MSA row attention: pair bias", "gather", False, ["msa.row shared 0"]),
    (2, "m, rows to columns", "turn", True, ["m to columns"]),
    (5, "outer product mean: right factor", "gather", False, ["outer shared 0", "outer shared 1"]),
    (6, "m, columns to rows", "turn", False, ["m to rows"]),
    (7, "outgoing product: factor", "gather", False, ["pair.outgoing"]),
    (8, "z, rows to columns", "turn", True, ["z to columns"]),
    (9, "incoming product: factor", "gather", False, ["pair.incoming"]),
    (10, "z, columns to rows", "turn", True, ["z to rows"]),
    (11, "starting attention: bias", "gather", False, ["pair.starting shared 0"]),
    (12, "z, rows to columns", "turn", True, ["z to columns"]),
    (13, "ending attention: bias", "gather", False, ["pair.ending shared 0"]),
    (15, "z, columns to rows", "turn", True, ["z to rows"]),
]
RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
RESIDUES = (256, 384, 1024, 2048)
FINE_TUNING = LossConfig(experimentally_resolved=0.01, violation=1.0, predicted_aligned_error=0.1)  # Supp. 1.9


def fastfold_bytes(block: TrafficBlock, ranks: int, number: int) -> int:
    """Return the bytes that a rank sends in row `number` of FastFold's placement, forward, in bf16."""
    s, n = block.sequences, block.residues
    gathered = {1: n * n * 8, 5: s * n * 32, 7: n * n * 128, 9: n * n * 128, 11: n * n * 4, 13: n * n * 4}
    if number in gathered:
        return gathered[number] * 2 * (ranks - 1) // ranks
    turned = s * n * block.c_m if number in (2, 6) else n * n * block.c_z
    return turned * 2 * (ranks - 1) // ranks**2


def placement(block: TrafficBlock, ranks: int) -> list[dict[str, Any]]:
    """Return FastFold's rows with its MB and those counted here, forward and backward."""
    counted = {way: count(Plan(axial=ranks, triangle=way, precision="bf16"), block) for way in ("gather", "channels")}
    rows = []
    for number, what, kind, waits, names in FASTFOLD:
        sent = fastfold_bytes(block, ranks, number)
        row: dict[str, Any] = {"row": number, "what": what, "fastfold": kind + (", waited for" if waits else "")}
        row |= {"fastfold_forward": mb(sent), "fastfold_backward": mb(sent if kind == "turn" else 0)}
        for way, found in counted.items():
            mine = [m for m in found if any(m.name.startswith(name) for name in names)]
            turns_of_z = [other for *_, names_of in FASTFOLD for other in names_of].count(names[0])
            for phase in ("forward", "backward"):
                row[f"{way}_{phase}"] = mb(total(mine, phase).bytes / turns_of_z)
        rows.append(row)
    return rows


def mb(size: float) -> float:
    return round(size / 1e6, 3)


def figures(found: list[Move]) -> dict[str, Any]:
    """Return the calls and MB of each pass."""
    return {
        phase: {"calls": total(found, phase).calls, "mb": mb(total(found, phase).bytes)}
        for phase in ("forward", "recomputed", "backward")
    }


def sums() -> list[dict[str, Any]]:
    """Count for every number of ranks, with both triangle schedules and recomputation; then with branches."""
    rows = []
    for residues in RESIDUES:
        block = TrafficBlock(residues=residues)
        for ranks in RANKS:
            row: dict[str, Any] = {"residues": residues, "axial": ranks}
            row["fastfold_forward_mb"] = mb(sum(fastfold_bytes(block, ranks, number) for number, *_ in FASTFOLD))
            for way in ("gather", "channels"):
                row[way] = figures(count(Plan(axial=ranks, triangle=way, precision="bf16", recompute="block"), block))
            rows.append(row)
    first = EvoformerConfig(outer="first")
    for ranks in (1, 4, 8):
        plan = Plan(axial=ranks, branch=2, precision="bf16", recompute="block")
        for branch, name in enumerate(("msa", "pair")):
            found = count(plan, TrafficBlock(evoformer=first), branch)
            swapped = mb(total([m for m in found if m.kind == "sendrecv"], "forward").bytes)
            rows.append({"residues": 256, "axial": ranks, "branch": name, "swap_mb": swapped, "all": figures(found)})
    return rows


def choices() -> list[dict[str, Any]]:
    """Model, for each link, residues and ranks, the milliseconds of a block's moves; and say what a plan chooses."""
    rows = []
    for name, link in LINKS.items():
        for residues in RESIDUES:
            for ranks in (2, 4, 8, 16):
                gathered, cut = (
                    seconds(moves(TrafficBlock(residues=residues), ranks, way), link) for way in (False, True)
                )
                chosen = (
                    "channels" if Plan().by_channels(residues, ranks, channels=128, c_z=128, itemsize=2) else "gather"
                )
                ms = {"gather_ms": round(1e3 * gathered, 3), "channels_ms": round(1e3 * cut, 3)}
                rows.append({"link": name, "residues": residues, "axial": ranks, **ms, "chosen": chosen})
    return rows


def memory(what: str, residues: int, losses: LossConfig | None) -> list[dict[str, Any]]:
    """Count the most that the first of p ranks holds, and how much of it half as many ranks would hold too.

    With losses: a training step on a crop, 48 blocks, recomputation.  Without: folding, slices of 4 rows in place, for
    which the number of blocks does not matter.  One recycling pass; triangle products cut by channels.
    """
    rows: list[dict[str, Any]] = []
    before: set[tuple[tuple[int, ...], str]] = set()
    for p in (1, 2, 4, 8, 16):
        plan = Plan(axial=p, triangle="channels", precision="bf16")
        sizes = {"res": residues, "seq": 128, "extra": 1024, "tmpl": 1}
        config = ModelConfig(heads=HeadsConfig(pae=True))
        if losses is None:
            plan = replace(plan, chunk=4, in_place=True)
            config = replace(config, extra_blocks=1, evoformer=EvoformerConfig(blocks=1))
        else:
            plan = replace(plan, recompute="block")
        found = memory_of(plan, config, sizes, losses)
        same = [h for h in found.at_peak if (h.shape, h.made_by) in before]
        before = {(h.shape, h.made_by) for h in found.at_peak}
        row = {"residues": residues, "axial": p, "peak_mb": mb(found.peak), "whole_z_mb": mb(residues**2 * 128 * 2)}
        row["of_one_rank"] = round(found.peak / 1e6 / rows[0]["peak_mb"], 3) if rows else 1.0
        row["as_on_half_the_ranks_mb"] = mb(sum(h.bytes for h in same))
        row["most"] = [[mb(size), *what] for what, size in largest(found.at_peak)]
        rows.append(row)
        print(what, {k: v for k, v in row.items() if k != "most"}, flush=True)
        for item in row["most"]:
            print("   ", *item, flush=True)
    return rows


def largest(held: list[MemoryPiece]) -> list[tuple[tuple[str, str], int]]:
    """Return the four kinds of memory that take most."""
    sizes: dict[tuple[str, str], int] = {}
    for h in held:
        what = (" x ".join(map(str, h.shape)), h.made_by)
        sizes[what] = sizes.get(what, 0) + h.bytes
    return sorted(sizes.items(), key=lambda item: -item[1])[:4]


def show(rows: list[dict[str, Any]]) -> None:
    """Print rows as lines."""
    for row in rows:
        print(" | ".join(f"{k} {v}" if not isinstance(v, Mapping) else f"{k} {_short(v)}" for k, v in row.items()))


def _short(passes: Mapping[str, Mapping[str, Any]]) -> str:
    return ", ".join(f"{name} {f['calls']} calls {f['mb']} MB" for name, f in passes.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    parser.add_argument("--no-memory", action="store_true", help="leave out what ranks hold, which takes minutes")
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "what": "counted on fake ranks: what a rank sends in an Evoformer block, and what it holds",
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "placement_256_residues_8_ranks": placement(TrafficBlock(), 8),
        "sums": sums(),
        "links": {name: asdict(link) for name, link in LINKS.items()},
        "choices_modelled": choices(),
    }
    for table in ("placement_256_residues_8_ranks", "sums", "choices_modelled"):
        show(report[table])
    if not arguments.no_memory:
        cases = [
            ("initial training", 256, LossConfig()),
            ("fine-tuning", 384, FINE_TUNING),
            ("folding", 512, None),
            ("folding", 1024, None),
        ]
        for what, residues, losses in cases:
            report[f"memory, {what}, {residues} residues"] = memory(what, residues, losses)
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
