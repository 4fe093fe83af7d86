"""Commands on tiny inputs, whose output is recorded."""

import contextlib
import io
import itertools
import shlex
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

from tests.data.search.families import database, queries
from tests.helpers import as_multimer, filled_model, tiny_config
from tests.recorded.transcript import transcript
from warpfold import cli
from warpfold.data.structure.mmcif import read_structure
from warpfold.data.structure.write import write_mmcif
from warpfold.data.synthetic.folder import generate
from warpfold.model.template import TemplateConfig
from warpfold.model.weights.files import save_params

SEQUENCES = {"one": "MKTAYIAKQRQISFVKSHFSR", "two": "GSDPEKLLRAIEEAL"}
SAMPLE = "--max-msa 4 --max-extra 4 --recycles 1 --device cpu"
SMALL = {
    "data": "data.max_msa=4 data.max_extra=4 data.crop=32",
    "train": "optim.accumulate=1 plan.precision=fp32 loss.violation=0.0 train.validate_every=2",
}

# Each command runs in a folder that holds the inputs, and writes to `out`.
COMMANDS = {
    "sample": ["sample --proteins 1 --dimers 1 --max-length 32 --seed 3 --out out"],
    "pack": [
        "pack --structures proteins/mmcif --msas proteins/msas --out out/store --max-length 30",
        "pack --info out/store",
    ],
    "search": ["search queries.fasta --database db=db.fasta --template-database db.fasta --out out"],
    "params": [
        "params one.safetensors --check --out out.npz",
        "params multimer.safetensors --toml",
        "params out.npz --json",
    ],
    "predict": [f"predict two.fasta --msa one.a3m --params one.safetensors two.safetensors --out out {SAMPLE}"],
    "predict_templates": [
        f"predict one.a3m --params templates.safetensors --template proteins/mmcif/{{first}} --out out {SAMPLE}"
    ],
    "predict_complex": [f"predict dimer.fasta --params multimer.safetensors --distogram --out out {SAMPLE}"],
    "predict_pairs": [
        f"predict two.fasta --pairs all --params multimer.safetensors --keep 2:iptm --out out {SAMPLE}",
        f"predict two.fasta --pairs all --params multimer.safetensors --keep 2 --out out {SAMPLE}",
    ],
    "predict_jobs": [f"predict job.json job.yaml jobs.csv bad.json --params one.safetensors --out out {SAMPLE}"],
    "distill": [
        f"distill two.fasta --msa one.a3m --params one.safetensors --min-plddt 1 --min-kl 0 --out out/store {SAMPLE}",
    ],
    "score": [
        "score near/{first} proteins/mmcif/{first}",
        "score near/{dimer} proteins/mmcif/{dimer} --json",
        "score near/{dimer} proteins/mmcif/{dimer} --chains A:B,B:A",
    ],
    "evaluate": [
        "evaluate near proteins/mmcif --against far --out out",
    ],
    "design": [
        "design own.toml --params one.safetensors --starts 2 --seed 3 --device cpu --out out",
    ],
    "finetune": [
        "finetune --structures proteins/mmcif --msas proteins/msas --init one.safetensors --steps 4 --device cpu "
        f"--set {SMALL['data']} {SMALL['train']} --out out",
    ],
}


def make_inputs(folder: Path) -> dict[str, str]:
    """Write proteins, alignments, predictions, parameters and jobs.  Returns the names of some of the files."""
    generate(folder / "proteins", 8, seed=5, dimers=2, max_length=32, depth=(4, 10))
    files = sorted((folder / "proteins/mmcif").iterdir())
    random = np.random.default_rng(0)
    for name, noise in (("near", 0.4), ("far", 2.0)):
        (folder / name).mkdir()
        for file in files:
            chains = [
                replace(chain, positions=(chain.positions + random.normal(0, noise, (1, 1, 3)) + random.normal(
                    0, noise, chain.positions.shape) * chain.mask[..., None]).astype(np.float32))
                for chain in read_structure(file).chains.values()
            ]  # fmt: skip
            confidences = [np.linspace(60, 90 - 10 * noise, len(chain.sequence)) for chain in chains]
            (folder / name / file.name).write_text(write_mmcif(file.stem, chains, b_factors=confidences))
    (folder / "two.fasta").write_text("".join(f">{name}\n{sequence}\n" for name, sequence in SEQUENCES.items()))
    (folder / "dimer.fasta").write_text(f">pair\n{SEQUENCES['one']}:{SEQUENCES['two']}\n")
    rows = [SEQUENCES["one"], "MKTAYIAKQRQaaISFVK----L", "-KTAYLAKQRQISFVRSHFS-"]
    (folder / "one.a3m").write_text("".join(f">row{i}\n{row}\n" for i, row in enumerate(rows)))
    (folder / "job.json").write_text(
        '{"name": "af3", "dialect": "alphafold3", "version": 1, "modelSeeds": [1], "sequences": '
        f'[{{"protein": {{"id": "A", "sequence": "{SEQUENCES["two"]}"}}}}]}}'
    )
    (folder / "bad.json").write_text('{"name": "bad", "dialect": "alphafold3", "version": 1, "sequences": []}')
    (folder / "job.yaml").write_text(
        f"version: 1\nsequences:\n- protein:\n    id: A\n    sequence: {SEQUENCES['two']}\n    msa: empty\n"
    )
    (folder / "jobs.csv").write_text(f"id,sequence\ncsv,{SEQUENCES['one']}\n")
    (folder / "own.toml").write_text(
        "chains = {A = 6}\nspread = 1.0\nloss = {plddt = 1.0, contacts = 0.3}\nshape = {contact_separation = 2}\n"
        "stages = [{steps = 2, soft = [0.0, 1.0]}, {steps = 2, hard = 1.0, rate = 1.0}]\n"
    )
    queries(folder / "queries.fasta", 0, 1)
    database(folder / "db.fasta", 0, 1, 2)
    config = tiny_config()
    plain = tiny_config(templates=TemplateConfig(enabled=False))
    save_params(folder / "one.safetensors", filled_model(plain))
    save_params(folder / "two.safetensors", filled_model(plain, seed=1))
    save_params(folder / "templates.safetensors", filled_model(config))
    save_params(folder / "multimer.safetensors", filled_model(as_multimer(plain)))
    dimer = next(file for file in files if len(read_structure(file).chains) == 2)
    return {"first": files[0].name, "dimer": dimer.name}


def run(folder: Path, name: str, names: dict[str, str]) -> str:
    """Run the commands of one record in a folder of inputs.  Returns their printed text and their files."""
    parts = []
    for line in COMMANDS[name]:
        words = ["warpfold", *shlex.split(line.format(**names))]
        printed = io.StringIO()
        # The clock advances by a microsecond at each reading, so measured times are printed as zero.
        clock = mock.patch("time.perf_counter", side_effect=(1e-6 * reading for reading in itertools.count()))
        shell = mock.patch("sys.argv", words)
        with clock, shell, contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                cli.main(words[1:])
            except SystemExit as stopped:
                printed.write(f"exit code {stopped.code or 0}\n")
        parts.append(f"$ {shlex.join(words)}\n{printed.getvalue()}")
    return transcript(folder / "out", "".join(parts))
