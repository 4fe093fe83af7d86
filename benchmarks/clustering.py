"""Measure how two settings that save time change the features: `clustering = "crop"` and `max_cost`.

    python benchmarks/clustering.py ALIGNMENT ... --out benchmarks/results/NAME.json

Each alignment is sampled as in initial training (crop 256, 128 clusters, 1,024 extra rows, block deletion). The
results are:

* rows: the number of rows in the file, after block deletion, and after the row budget.
* crop: the residues of the chain and of the crop.
* moved: the share of rows that join another cluster if only the crop is compared. Centres are not counted.
* profile: the total variation distance (0 to 1) between the cluster profiles and those of the paper, for equal centres
  and masks, as a mean over columns and clusters: with clusters of the crop, and with the rows of the budget.
"""

import argparse
import datetime
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from warpfold.data.example.raw_example import RawExample, from_sequence
from warpfold.data.features.choose import SampleConfig, keyed_rng, row_budget, sample_with_query, select
from warpfold.data.features.msa import PROFILE, mask_msa, nearest_cluster, write_codes
from warpfold.data.formats.alignment import read_alignment
from warpfold.geometry.residue import GAP

PAPER = SampleConfig(crop=256, max_msa=128, max_extra=1024)  # initial training, Supp. table 4
BUDGET = 8.0  # `max_cost`


def profiles(msa: np.ndarray, masked: np.ndarray, cluster: np.ndarray) -> np.ndarray:
    """Compute the frequencies of codes in each cluster: float32 [S, N, 23].

    cluster: int64 [R], the cluster of each row that is not a centre, or S for none."""
    feat = np.zeros((*masked.shape, 49), np.float32)
    rows, joined = np.concatenate([masked, msa]), np.concatenate([np.arange(len(masked)), cluster])
    write_codes(feat, masked, rows, joined, np.bincount(joined, minlength=len(masked))[: len(masked)] + 1e-6)
    return feat[..., PROFILE]


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """Compute the mean total variation distance between two sets of profiles."""
    return float(np.abs(one - other).sum(-1).mean() / 2)


def effect(raw: RawExample, draw: int) -> dict[str, float]:
    """Measure the effect of both settings on one draw of an example."""
    key = (raw.name, draw)
    chosen = select(raw.length, raw.depth, PAPER, 0, key, train=True)
    fewer = select(raw.length, raw.depth, replace(PAPER, max_cost=BUDGET), 0, key, train=True).rows
    span = slice(chosen.start, chosen.stop)
    # centres among the rows that the budget leaves, so that all three have the same
    centres = sample_with_query(fewer, min(PAPER.max_msa, len(fewer)), keyed_rng(0, *key, "clusters"))
    masked, _ = mask_msa(raw.msa[centres], raw.profile, PAPER, keyed_rng(0, *key, "mask"))
    others = np.setdiff1d(chosen.rows, centres)
    if not len(others):
        return {}
    msa, none = raw.msa[others], len(centres)
    by_chain = nearest_cluster(msa, masked[None])[0]
    by_crop = nearest_cluster(msa[:, span], masked[None, :, span])[0]
    by_crop[(msa[:, span] == GAP).all(1)] = none
    kept = np.where(np.isin(others, fewer), by_chain, none)
    paper, crop, budget = (profiles(msa[:, span], masked[:, span], each) for each in (by_chain, by_crop, kept))
    return {
        "rows": len(chosen.rows),
        "rows within the budget": len(fewer),
        "moved": float((by_chain != by_crop).mean()),
        "profile, clusters of the crop": apart(paper, crop),
        "profile, row budget": apart(paper, budget),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("alignments", type=Path, nargs="+")
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    for path in arguments.alignments:
        alignment = read_alignment(path)
        raw = from_sequence(alignment.query, [alignment], f"{path.parent.name}/{path.name}")
        found = [each for draw in range(arguments.draws) if (each := effect(raw, draw))]
        if found:
            means = {name: round(float(np.mean([each[name] for each in found])), 4) for name in found[0]}
            sizes = {
                "length": raw.length,
                "depth": raw.depth,
                "most rows": row_budget(raw.length, replace(PAPER, max_cost=BUDGET)),
            }
            results.append({"alignment": raw.name, **sizes, **means})
            print(results[-1], flush=True)
    report = {
        "what": "what clusters of the crop and the row budget change, beside the paper's way",
        "date": datetime.date.today().isoformat(),
        "draws": arguments.draws,
        "max_cost": BUDGET,
        "results": sorted(results, key=lambda result: (result["length"], result["depth"])),
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
