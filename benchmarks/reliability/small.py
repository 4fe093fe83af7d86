"""Generate the small proteins, store, settings and parameters on which kills and full disks are tried."""

import dataclasses
from pathlib import Path
from typing import Any

from tests.helpers import as_multimer, filled_model, tiny_model
from tests.training.runs import tiny_run
from warpfold import settings
from warpfold.data.features.choose import SampleConfig
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.pack import pack
from warpfold.data.synthetic.folder import generate
from warpfold.model.weights.files import save_params
from warpfold.training.config import RunConfig

LENGTHS = {"min_length": 30, "max_length": 34}
DESIGN = """
spread = 1.0
chains.A = 8
loss = {plddt = 1.0, contacts = 0.3}
shape = {contact_separation = 2}
stages = [{steps = 6, soft = [0.0, 1.0]}, {steps = 4, temperature = [1.0, 0.1]}, {steps = 4, hard = 1.0}]
"""


def training(**train: Any) -> RunConfig:
    """The settings of a run of seconds, with dropout, recycling, two examples a step, and heads that design needs."""
    return dataclasses.replace(tiny_run(**train), data=SampleConfig(crop=12, max_msa=3, max_extra=4, max_templates=0))


def write_small(folder: Path) -> Path:
    """Write, where they are not there yet: proteins with alignments, a store, settings, parameters, queries."""
    if (folder / "done").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    proteins = folder / "proteins"
    if not proteins.exists():
        generate(proteins, 6, dimers=1, depth=(4, 8), **LENGTHS)
    if not (folder / "store").exists():
        pack([proteins], [proteins], folder / "store", PackOptions(assemblies=True))
    (folder / "tiny.toml").write_text(settings.to_toml(training()))
    (folder / "design.toml").write_text(DESIGN)
    model = tiny_model(templates=dataclasses.replace(tiny_model().config.templates, enabled=False))
    save_params(folder / "tiny.safetensors", model, {"max_msa": 4, "max_extra": 4, "max_templates": 0})
    pair = as_multimer(model.config)
    save_params(folder / "multimer.safetensors", filled_model(pair), {"max_msa": 4, "max_extra": 4, "max_templates": 0})
    rows = [path.read_text().split("\n")[1] for path in sorted((proteins / "msas").glob("*_A.a3m"))]
    (folder / "queries.fasta").write_text("".join(f">q{i}\n{row[: 12 + i]}\n" for i, row in enumerate(rows[:6])))
    (folder / "database.fasta").write_text("".join(f">d{i}\n{row}\n" for i, row in enumerate(rows)))
    (folder / "done").touch()
    return folder
