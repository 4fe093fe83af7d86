"""Measure whether a student learns from the predictions of its teacher, in a small round of distillation.

    python benchmarks/distill.py --out benchmarks/results/NAME.json

A few generated proteins have structures for training, more have only an alignment, and others are held out. A teacher
(`tiny`) trains on the structures. `warpfold distill` folds the proteins without structures and keeps the confident
predictions. Then three runs continue from the teacher: on the structures alone, on the mixture of the paper (0.25
structures, 0.75 predictions), and on that mixture with true structures, which is the upper limit of distillation.
Each model folds the held-out proteins. The script reports lDDT-Ca, and the mean paired differences with 95 % bootstrap
intervals over proteins.
"""

import argparse
import datetime
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import warpfold as wf

SURE = 40.0  # pLDDT: so young a model is never as sure as the paper wants, 50
PLACES = {"few": 32, "others": 120, "held out": 32}  # proteins


def lay_out(folder: Path) -> dict[str, Path]:
    """Generate proteins and sort them into one folder for each purpose."""
    places = {purpose: folder / purpose for purpose in PLACES}
    if (folder / "all").exists():  # the script was stopped, and goes on
        return places
    wf.sample(folder / "all", proteins=sum(PLACES.values()), min_length=24, max_length=36, seed=11)
    structures = sorted((folder / "all/mmcif").iterdir())
    for place, purpose in enumerate(np.repeat(list(PLACES), list(PLACES.values()))):
        places[purpose].mkdir(exist_ok=True)
        shutil.copy(structures[place], places[purpose])
    return places


def held_out(params: Path, folder: Path, truth: Path) -> dict[str, float]:
    """Fold the held-out proteins with these parameters, and compute their lDDT-Ca."""
    found = wf.predict(
        sorted(truth.iterdir()), params, folder / f"folded_{params.parent.name}", msa=folder / "all/msas"
    )
    scores = {}
    for entry in found["predictions"]:
        place = folder / f"folded_{params.parent.name}" / entry["folder"] / entry["files"]["mmcif"]
        (true,) = (one for one in truth.iterdir() if entry["name"].startswith(one.name.split(".")[0]))
        scores[true.name] = wf.score(place, true).lddt_ca
    return scores


def compared(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, Any]:
    """Compute the mean difference of paired scores with its 95 % bootstrap interval over proteins."""
    differences = np.array([ours[name] - theirs[name] for name in ours])
    draws = np.random.default_rng(0).choice(differences, (10_000, len(differences))).mean(1)
    interval = [round(float(x), 4) for x in np.quantile(draws, (0.025, 0.975))]
    return {"difference": round(float(differences.mean()), 4), "interval": interval, "proteins": len(differences)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=800, help="of the teacher")
    parser.add_argument("--more", type=int, default=400, help="steps of each run after it")
    parser.add_argument("--work", type=Path, help="folder to work in; default: a temporary one")
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = given.work or Path(tempfile.mkdtemp(prefix="distill-"))
    folder.mkdir(parents=True, exist_ok=True)
    began, msas = time.time(), folder / "all/msas"
    places = lay_out(folder)
    for purpose in ("few", "others"):
        wf.pack(places[purpose], msas, folder / f"{purpose}_store")
    fixed = {"train.steps": given.steps, "train.validation": 0.0, "data.crop": 36, "data.min_confidence": SURE}
    teacher = wf.train("tiny", folder / "few_store", folder / "teacher", set=fixed).params
    sequences = folder / "others.fasta"
    stored = wf.Store(folder / "others_store")
    report = json.loads((folder / "others_store/pack.json").read_text())
    assert len(report["kept"]) == len(stored)
    from warpfold.data.store.stored_example import StoredExample

    lines = [f">{key}\n{StoredExample(stored, key).sequence}\n" for key in stored.keys]
    sequences.write_text("".join(lines))
    distilled = wf.distill(sequences, teacher, folder / "distilled", msa=msas, min_plddt=0.0)
    runs = {
        "structures alone": [folder / "few_store"],
        "mixture": [f"{folder}/few_store=0.25", f"{folder}/distilled=0.75"],
        "mixture of true structures": [f"{folder}/few_store=0.25", f"{folder}/others_store=0.75"],
    }
    scores = {"teacher": held_out(teacher, folder, places["held out"])}
    for name, data in runs.items():
        params = wf.train(
            "tiny", data, folder / name.replace(" ", "_"), init=teacher, set=fixed | {"train.steps": given.more}
        ).params
        scores[name] = held_out(params, folder, places["held out"])
    alone = scores["structures alone"]
    result = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "steps": {"teacher": given.steps, "each run after it": given.more},
        "proteins": PLACES,
        "distilled": {
            "kept": len(distilled["store"]["kept"]),
            "reasons": distilled["store"]["reasons"],
            "summary": distilled["summary"],
        },
        "lddt_ca": {name: round(float(np.mean(list(each.values()))), 4) for name, each in scores.items()},
        "against the structures alone": {
            name: compared(each, alone) for name, each in scores.items() if each is not alone
        },
        "seconds": round(time.time() - began),
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
