"""The names in the expressions of the tables: functions without a command, and helpers that build their arguments."""

# ruff: noqa: F401  (the tables use these names)

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import warpfold
from tests.data.entries import random_chain
from tests.data.example.test_hits import LONG, ONE_HHR, RF, stockholm
from tests.data.example.test_hits import ROWS as HIT_ROWS
from tests.data.example.test_raw_example import SEQUENCE as PROTEIN
from tests.data.example.test_raw_example import alignment as rows
from tests.data.formats.test_chain_alignments import COMPLEX as CHAINS
from tests.data.formats.test_formats import A3M, COMPLEX, HITS, MMSEQS, STO
from tests.parallel.test_srun import task
from tests.prediction.test_predictor_gradient import predictor as differentiable
from tests.sequence_design.test_design_run import VALUES as DESIGN
from tests.sequence_design.test_design_run import predictor as designer
from warpfold.arguments import parse_memory
from warpfold.bench.doctor import cases_of
from warpfold.bench.feeding import Emulation
from warpfold.bulk import JobPart
from warpfold.cost.links import network
from warpfold.data.example.complex import Complex
from warpfold.data.example.hits import parse_hits
from warpfold.data.example.query_files import read_complexes
from warpfold.data.example.raw_example import from_sequence
from warpfold.data.formats.alignment import Alignment, parse_a3m, parse_alignment, parse_chain_alignments, table_rows
from warpfold.data.formats.input_files import ALIGNMENTS, find
from warpfold.data.formats.predictions import read_pae
from warpfold.data.pack.options import PackOptions
from warpfold.data.search.server import AlignmentServer
from warpfold.data.similar.clusters import read_clusters
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.write import write_pdb
from warpfold.data.synthetic.folder import generate
from warpfold.engine.gradient import loss_of_every_output
from warpfold.evaluation.layouts import find_predictions
from warpfold.evaluation.suite import read_suite
from warpfold.evaluation.truths import Truths
from warpfold.model.weights.files import load_model
from warpfold.ops.triton.launch import read as read_launches
from warpfold.parallel.process import torchrun_from_srun
from warpfold.parallel.team import ProcessInfo
from warpfold.prediction.predictor import Predictor, load
from warpfold.prediction.request import Request
from warpfold.prediction.templates import TemplateSources
from warpfold.scoring.selection import keep_of
from warpfold.sequence_design.losses import Losses, LossWeights
from warpfold.sequence_design.run import run_design
from warpfold.sequence_design.settings import load_design
from warpfold.training.config import load_settings

ONE, TWO, ROW = "MKTAYIAKQRQISFVKSH", "GSHMLEERLGL", "-KTAYLAKQRQISFVRSH"
DIMER = {"A": ONE, "B": TWO}
written: list[Path] = []


def file(name: str, content: str | bytes) -> Path:
    """Write an input of a single case, which the runner removes afterwards."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    written.append(path)
    return path


def folder(*names: str, **contents: str) -> Path:
    """Write files into a new folder, like `file`."""
    for name in names:
        file(f"new/{name}", "x")
    for name, content in contents.items():
        file(f"new/{name}", content)
    return Path("new")


def find_alignments(path: Path) -> object:
    """Find the alignments of a file."""
    return find([path], ALIGNMENTS, "alignments")


@cache
def predictor(params: str = "tiny") -> Predictor:
    """Load parameters of the shared folder, once for all cases."""
    found = load(f"{params}.safetensors", device="cpu")
    if params == "tiny":
        # Wrong arguments are refused before anything is computed.
        found.prepare = None  # type: ignore[assignment, method-assign]
    return found


def gradient(**arguments: Any) -> object:
    """Call `Predictor.gradient` with these arguments and otherwise valid ones."""
    return differentiable().gradient(**{"logits": np.zeros((4, 20)), "loss": loss_of_every_output} | arguments)


def check_losses(weights: dict[str, float], **problem: Any) -> None:
    """Check the weights of a design."""
    Losses(LossWeights(**weights)).check(**problem)


def far_chain() -> Chain:
    """Return a chain that is too far from the origin for the PDB format."""
    chain = random_chain("A", "GG")
    return replace(chain, positions=chain.positions + 10_000)


def task_with(**changes: str | None) -> dict[str, str]:
    """Return srun's variables of a task, some of them changed or (None) removed."""
    return {name: value for name, value in {**task(0, 0), **changes}.items() if value is not None}
