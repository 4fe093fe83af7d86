"""Helpers for tests of training: a store of small synthetic proteins, and settings of a run that takes seconds."""

import dataclasses
import json
import math
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import tiny_config
from warpfold.data.example.raw_example import RawExample, from_sequence
from warpfold.data.features.choose import SampleConfig
from warpfold.data.store.store import Store, StoreWriter, pack_record
from warpfold.data.store.stored_example import example_arrays, example_notes
from warpfold.engine import learn as learning
from warpfold.engine.optim import OptimConfig
from warpfold.geometry.residue import ATOM_ORDER, RESTYPES
from warpfold.model.alphafold import HeadsConfig
from warpfold.model.evoformer import EvoformerConfig, PairConfig
from warpfold.model.template import TemplateConfig
from warpfold.training.config import RunConfig, TrainConfig

# A residue of a helix about the z axis.  The next one is rotated by 100 degrees and raised by 1.5 angstrom.
HELIX = {
    "N": (0.0, 1.46, -0.9),
    "CA": (0.0, 2.28, 0.0),
    "C": (1.2, 1.6, 0.9),
    "O": (1.9, 2.3, 1.6),
    "CB": (-0.9, 3.3, 0.5),
}


def helix(name: str, length: int, seed: int, sequence: str = "") -> RawExample:
    """Make a helix (backbone and CB), by default with a random sequence, and an alignment of five rows."""
    rng = np.random.default_rng(seed)
    letters = np.array(list(RESTYPES))
    sequence = sequence or "".join(rng.choice(letters, length))
    rows = ["".join(np.where(rng.random(length) < 0.3, rng.choice(letters, length), list(sequence))) for _ in range(5)]
    raw = from_sequence(sequence, name=name)
    codes = np.array([[RESTYPES.index(letter) for letter in row] for row in [sequence, *rows]], np.uint8)
    positions, mask = np.zeros((length, 37, 3), np.float32), np.zeros((length, 37), np.uint8)
    for i in range(length):
        angle = np.deg2rad(100 * i)
        turn = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]])
        for atom, place in HELIX.items():
            if atom != "CB" or sequence[i] != "G":
                positions[i, ATOM_ORDER[atom]] = turn @ place + [0, 0, 1.5 * i]
                mask[i, ATOM_ORDER[atom]] = 1
    return dataclasses.replace(
        raw, msa=codes, deletions=np.zeros(codes.shape, np.uint16), positions=positions, mask=mask, resolution=1.0
    )


def make_store(path: Path, proteins: int = 6) -> Store:
    with StoreWriter(path) as writer:
        for i in range(proteins):
            raw = helix(f"helix{i}", 10 + i, seed=i)
            meta = {"length": len(raw.aatype), "depth": len(raw.msa), "cluster": str(i)}
            writer.add(raw.name, pack_record(example_arrays(raw), example_notes(raw)), meta)
        writer.finish()
    return Store(path)


def tiny_run(**train) -> RunConfig:
    """Return settings with dropout, recycling and two examples per step, which all use random numbers."""
    defaults = {"steps": 6, "validation": 0.3, "validate_every": 3, "save_every": 2, "keep": 2, "order": "uniform"}
    # With a smaller share the number of validations would depend on measured times.
    defaults |= {"validation_share": 1.0}
    return RunConfig(
        model=tiny_config(
            recycles=1,
            evoformer=EvoformerConfig(blocks=1, heads=2, c_outer=4, pair=PairConfig(c_triangle=4, heads=2)),
            templates=TemplateConfig(enabled=False),
            heads=HeadsConfig(plddt_c=8),
        ),
        data=SampleConfig(crop=8, max_msa=3, max_extra=4),
        optim=OptimConfig(accumulate=2, warmup_steps=2, average_decay=0.5),
        train=TrainConfig(**(defaults | train)),
    )


CLOCK = ("samples_per_second", "waiting", "waiting_so_far", "time", "seconds")


def scored(lddt_ca: float, **other: Any) -> dict[str, Any]:
    """Return the scores of a validation example, by default of a whole single chain."""
    numbers = {"interface_lddt": math.nan, "dockq": math.nan, "loss": 2.0, "terms": {"fape": 1.0}, "residues": [9, 9]}
    return {"lddt_ca": lddt_ca} | numbers | other


def rows(folder: Path, whole: bool = True, kind: str = "") -> list[dict]:
    """Read the rows of metrics.jsonl without their timings, of one kind or all.

    whole: False leaves out the last line, which a kill cut off.
    """
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    parsed = [json.loads(line) for line in (lines if whole else lines[:-1])]
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in parsed if kind in ("", line["kind"])]


def steps(folder: Path) -> list[dict]:
    """Read the rows of steps."""
    return rows(folder, kind="step")


def poison(patch: pytest.MonkeyPatch, *bad: int, grows: bool = True) -> None:
    """Make the losses of these calls, counted from 0, NaN.  grows: also their gradients."""
    original, calls = learning.total_loss, count()

    def poisoned(*args: Any, **more: Any) -> Any:
        loss, terms = original(*args, **more)
        if next(calls) not in bad:
            return loss, terms
        return (loss * math.nan if grows else loss + math.nan), terms

    patch.setattr(learning, "total_loss", poisoned)


def equal_tensors(a: Path, b: Path) -> bool:
    """Whether all bits of the tensors in two safetensors files are equal."""
    one, other = load_file(a), load_file(b)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
