"""Write folders of synthetic predictions and reference structures for tests of evaluation."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.scoring.test_score import moved, protein
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.write import write_mmcif

LENGTHS = {"alpha": 40, "Beta": 60, "gamma": 130}


def truths() -> dict[str, Chain]:
    """Build a reference chain for each target."""
    return {name: protein("A", length, seed) for seed, (name, length) in enumerate(LENGTHS.items())}


def noisy(chain: Chain, noise: float, seed: int = 0) -> Chain:
    """Build a prediction of a chain, with errors of its atoms and another position."""
    errors = np.random.default_rng(seed).normal(0, noise, chain.positions.shape) * chain.mask[..., None]
    return moved(replace(chain, positions=(chain.positions + errors).astype(np.float32)))


def write(folder: Path, chains: Mapping[str, Chain], plddt: float = 80.0) -> Path:
    """Write NAME.cif files.  The pLDDT rises along each chain, from 5 below to 5 above `plddt`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, chain in chains.items():
        b = plddt + np.linspace(-5, 5, len(chain.sequence))
        (folder / f"{name}.cif").write_text(write_mmcif(name, [chain], b_factors=[b]))
    return folder


def sets(folder: Path) -> tuple[Path, Path, Path]:
    """Write folders of good predictions, worse predictions and reference structures of three targets."""
    known = truths()
    good = {name: noisy(chain, 0.3, 1) for name, chain in known.items()}
    worse = {name: noisy(chain, 1.5, 2) for name, chain in known.items()}
    return write(folder / "good", good), write(folder / "worse", worse, 60.0), write(folder / "truth", known)
