"""Shared helpers of the prediction tests: run the command, read a folder's files, write a structure entry."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from warpfold import cli
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.write import write_mmcif
from warpfold.geometry.residue import ATOM37_MASK, RESTYPES


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["predict", *map(str, arguments), "--device", "cpu"])
    return int(stopped.value.code or 0), *capsys.readouterr()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def write_entry(path: Path, sequences: Mapping[str, str], date: str, seed: int = 0) -> Path:
    """Write an mmCIF entry with chains of these sequences and random atom positions."""
    rng = np.random.default_rng(seed)
    chains = [
        Chain(
            chain,
            sequence,
            rng.normal(scale=9, size=(len(sequence), 37, 3)).astype(np.float32),
            ATOM37_MASK[[RESTYPES.index(letter) for letter in sequence]],
            np.arange(len(sequence)),
            tuple(str(i + 1) for i in range(len(sequence))),
        )
        for chain, sequence in sequences.items()
    ]
    path.write_text(write_mmcif(path.stem, chains, release_date=date))
    return path
