"""Designs of a trained `tiny`: are they better than random sequences, and does another model agree?

    python benchmarks/design.py --out benchmarks/results/NAME.json

Generated proteins; two models (`tiny`), of two seeds, learn from them.  With the first, sequences are designed for
backbones of generated proteins that neither has seen (fixed backbone), and without any (hallucination).  Each design
and as many random sequences of its length are then judged by either model, by the loss of their hard sequence.  The
second model had no part in the design.  Of each problem: the mean losses, and the mean of the paired differences with
its 95 % interval by bootstrap over starts.
"""

import argparse
import datetime
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import warpfold as wf
from warpfold.data.structure.mmcif import read_structure
from warpfold.geometry.atoms import CA
from warpfold.geometry.residue import RESTYPES
from warpfold.model.losses import lddt as lddt_ca
from warpfold.sequence_design.run import Problem, one_hot, run_design
from warpfold.sequence_design.settings import DesignSettings, load_design

STAGES = [
    {"steps": 60, "soft": [0.0, 1.0]},
    {"steps": 30, "temperature": [1.0, 0.05]},
    {"steps": 10, "temperature": [0.05, 0.05], "hard": 1.0, "rate": 1.0},
]
LENGTH = 32  # residues of a hallucination
BACKBONES = 3


def judged(predictor: wf.Predictor, settings: DesignSettings, letters: str) -> tuple[float, wf.Prediction]:
    """Return the loss of a hard sequence under a model, and its prediction."""
    problem = Problem.of(settings, predictor.model.config.heads.pae)
    problem.losses.weights = settings.at(settings.steps - 1).weights
    found = predictor.gradient({"A": one_hot(letters)}, problem.losses, hard=1.0, recycles=settings.recycles)
    return found.loss, found.prediction


def compared(designed: list[float], random: list[float]) -> dict[str, Any]:
    """Return both means, and the mean difference with its 95 % interval; below 0: designs are better."""
    differences = np.array(designed) - np.array(random)
    draws = np.random.default_rng(0).choice(differences, (10_000, len(differences))).mean(1)
    interval = [round(float(x), 4) for x in np.quantile(draws, (0.025, 0.975))]
    mean = round(float(differences.mean()), 4)
    means = {"designed": round(float(np.mean(designed)), 4), "random": round(float(np.mean(random)), 4)}
    better = f"{int((differences < 0).sum())} of {len(differences)}"
    return {**means, "difference": mean, "interval": interval, "better": better}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--starts", type=int, default=8, help="of each problem")
    parser.add_argument("--steps", type=int, default=1500, help="of each training")
    parser.add_argument("--work", type=Path, help="folder to work in; default: a temporary one")
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = given.work or Path(tempfile.mkdtemp(prefix="design-"))
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "store").exists():
        wf.sample(folder / "proteins", proteins=240, min_length=24, max_length=36, seed=21)
        wf.sample(folder / "unseen", proteins=BACKBONES, min_length=28, max_length=36, seed=22)
        wf.pack(folder / "proteins", folder / "proteins", folder / "store")
    change = {"train.steps": given.steps, "train.validation": 0.0}
    models = [
        wf.load(wf.train("tiny", folder / "store", folder / f"run{seed}", set=change | {"train.seed": seed}).params)
        for seed in (0, 1)
    ]
    backbones = sorted((folder / "unseen").rglob("*.cif*"))
    problems: dict[str, dict[str, Any]] = {
        "hallucination": {"chains": {"A": LENGTH}, "loss": {"plddt": 1.0, "pae": 0.4, "contacts": 0.3}}
    }
    for number, path in enumerate(backbones, 1):
        problems[f"backbone {number}"] = {"target": str(path), "loss": {"distogram": 1.0, "fape": 1.0, "plddt": 0.1}}
    found: dict[str, Any] = {}
    for name, values in problems.items():
        shape = {"contact_separation": 6, "contact_distance": 8.0}
        settings = load_design({**values, "shape": shape, "stages": STAGES})
        out = folder / name.replace(" ", "_")
        designs = run_design(models[0], settings, out, given.starts, seed=5)["designs"]
        rng = np.random.default_rng(7)
        length = len(designs[0]["sequence"])
        random = ["".join(rng.choice(list(RESTYPES), length)) for _ in designs]
        designed = [one["sequence"] for one in designs]
        found[name] = {"sequences": designed, "random": random}
        for which, model in zip(("designer", "another"), models):
            both = [[judged(model, settings, one) for one in several] for several in zip(designed, random)]
            losses = [[loss for loss, _ in pair] for pair in both]
            about = {"loss": compared(*map(list, zip(*losses)))}
            plddt = [[-prediction.mean_plddt for _, prediction in pair] for pair in both]
            about["minus pLDDT"] = compared(*map(list, zip(*plddt)))
            if settings.target:
                (chain,) = read_structure(settings.target).chains.values()
                true, mask = torch.from_numpy(chain.positions[:, CA]), torch.from_numpy(chain.mask[:, CA])
                lddt = [[-float(lddt_ca(torch.from_numpy(p.ca), true, mask)) for _, p in pair] for pair in both]
                about["minus lDDT-Ca to the backbone"] = compared(*map(list, zip(*lddt)))
            found[name][which] = about
            print(name, which, json.dumps(about), flush=True)
    result = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "starts": given.starts,
        "training steps": given.steps,
        "stages": STAGES,
        "problems": found,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
