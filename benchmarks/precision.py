"""Does bf16 change predictions by more than seeds do?

    python -m benchmarks.precision --demo DEMO --out benchmarks/results/NAME.json
    python -m benchmarks.precision --params params_model_1_ptm.npz --out published.json

DEMO is the folder of `warpfold demo`. The model that was trained there folds the proteins that were held out. Real
proteins with alignments (../shared/realdata) are folded by that model, by the models of reference cases (random
parameters, ../shared/golden) and by the files of --params. Each protein is folded with every seed, in fp32 and in bf16.
The measures are mean pLDDT (0 to 100) and lDDT-Ca to the known structure (0 to 1). The effect of bf16 is the mean
absolute difference between the two precisions of one seed. The effect of seeds is that between two seeds in fp32.
"""

import argparse
import datetime
import itertools
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import warpfold
from warpfold.cost.machine import device_name
from warpfold.data.store.stored_example import read_assembly
from warpfold.data.structure.chain import Structure
from warpfold.data.structure.mmcif import read_structure
from warpfold.evaluation.before_after import measure
from warpfold.parallel.plan import Precision
from warpfold.prediction.outputs import Prediction
from warpfold.prediction.predictor import Predictor
from warpfold.scoring.score import score

ROOT = Path(__file__).parents[1]
REFERENCES = ("monomer_truesize_model_1_ptm_rec1", "monomer_model_1_ptm_rec2")
MEASURES = ("mean_plddt", "lddt_ca")
MakePredictor = Callable[[Precision], Predictor]


@dataclass(frozen=True)
class Protein:
    """A protein to fold.

    fold: with a predictor and a seed.  lddt_ca: of a prediction, to the known structure.
    """

    name: str
    residues: int
    fold: Callable[[Predictor, int], Prediction]
    lddt_ca: Callable[[Prediction], float]


def effects(make: MakePredictor, proteins: Sequence[Protein], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Fold proteins in both precisions with every seed; return the effects of bf16 and of seeds on each protein."""
    values: dict[str, dict[str, np.ndarray]] = {protein.name: {} for protein in proteins}
    for precision in ("fp32", "bf16"):
        predictor = make(precision)
        for protein in proteins:
            folded = [protein.fold(predictor, seed) for seed in seeds]
            values[protein.name][precision] = np.array([[one.mean_plddt, protein.lddt_ca(one)] for one in folded])
    rows = []
    for protein in proteins:
        fp32, bf16 = values[protein.name]["fp32"], values[protein.name]["bf16"]
        of_seeds = np.array([abs(a - b) for a, b in itertools.combinations(fp32, 2)])
        row: dict[str, Any] = {"name": protein.name, "residues": protein.residues}
        for column, key in enumerate(MEASURES):
            row[key] = {
                "fp32": round(float(fp32[:, column].mean()), 4),
                "bf16": round(float(bf16[:, column].mean()), 4),
                "effect_of_bf16": round(float(abs(bf16 - fp32)[:, column].mean()), 5),
                "effect_of_seeds": round(float(of_seeds[:, column].mean()), 5),
            }
        rows.append(row)
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compute the mean effects over proteins, and count the proteins that bf16 changes less than seeds do."""
    found: dict[str, Any] = {"proteins": len(rows)}
    for key in MEASURES:
        both = np.array([[row[key]["effect_of_bf16"], row[key]["effect_of_seeds"]] for row in rows])
        signed = [row[key]["bf16"] - row[key]["fp32"] for row in rows]
        found[key] = {
            "effect_of_bf16": round(float(both[:, 0].mean()), 5),
            "effect_of_seeds": round(float(both[:, 1].mean()), 5),
            "bf16_changes_less": f"{int((both[:, 0] <= both[:, 1]).sum())} of {len(rows)}",
            "mean_change_by_bf16": round(float(np.mean(signed)), 5),
        }
    return found


def generated(demo: Path, names: Sequence[str]) -> Iterator[Protein]:
    """Yield proteins of the demo, whose structures are known."""
    store = warpfold.Store(demo / "store")
    for name in names:
        assembly = read_assembly(store, name)
        if len(chain := name.rpartition("_")[2]) == 1:
            assembly = replace(assembly, ids=(chain,))
        example = replace(assembly, chains=tuple(chain.take(slice(None)) for chain in assembly.chains))

        def fold(predictor: Predictor, seed: int, example: Any = example) -> Prediction:
            return predictor.fold_example(example, seed=seed, representations=False)

        def lddt_ca(prediction: Prediction, assembly: Any = assembly) -> float:
            return measure(assembly, prediction, prediction).scores[1].lddt_ca

        yield Protein(name, assembly.length, fold, lddt_ca)


def real(folder: Path, longest: int) -> Iterator[Protein]:
    """Yield real proteins of at most `longest` residues that have an alignment and a structure of their own."""
    for path in sorted(folder.glob("msas/*/structure__*")):
        query = path.parent / "query.fasta"
        sequence = "".join(line for line in query.read_text().splitlines() if not line.startswith(">"))
        rows = sorted(path.parent.glob("*.a3m*"))[:1]
        if len(sequence) > longest or not rows:
            continue
        truth = read_structure(path)

        def fold(predictor: Predictor, seed: int, sequence: str = sequence, rows: Any = rows) -> Prediction:
            return predictor.fold(sequence, rows, seed=seed, representations=False)

        def lddt_ca(prediction: Prediction, truth: Structure = truth) -> float:
            return score(prediction.structure(), truth).lddt_ca

        yield Protein(path.parent.name, len(sequence), fold, lddt_ca)


def reference(folder: Path) -> MakePredictor:
    """Build a factory of predictors for the model of a reference case."""
    from tests.golden.config import model_config
    from tests.golden.models import SCOPE
    from tests.golden.reference import find, load, read
    from warpfold.model.alphafold import AlphaFold

    (files,) = find(folder)
    case = read(files)

    def make(precision: Precision) -> Predictor:
        model = load(AlphaFold(model_config(case.config, case.params)), case, SCOPE)
        assert isinstance(model, AlphaFold)
        return Predictor(model, precision=precision)

    return make


def of_file(path: Path, device: str | None) -> MakePredictor:
    """Build a factory of predictors for a file of parameters."""
    return lambda precision: warpfold.load(path, device, precision=precision)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--demo", type=Path, help="folder of `warpfold demo`")
    parser.add_argument("--params", type=Path, nargs="*", default=[], help="files of parameters")
    parser.add_argument("--device", help="of the demo's model and --params; default: as predict")
    parser.add_argument("--shared", type=Path, default=ROOT / "../shared", help="folder of realdata and golden")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--longest", type=int, default=130, help="residues of a real protein")
    given = parser.parse_args()
    torch.set_num_threads(1)
    proteins, seeds = list(real(given.shared / "realdata", given.longest)), range(given.seeds)
    parts: dict[str, tuple[MakePredictor, list[Protein]]] = {}
    if given.demo is not None:
        trained = of_file(given.demo / "run" / "params.safetensors", given.device)
        names = [one["name"] for one in json.loads((given.demo / "summary.json").read_text())["predictions"]]
        parts["trained on generated proteins, held-out ones"] = trained, list(generated(given.demo, names))
        parts["trained on generated proteins, real ones"] = trained, proteins
    shortest = sorted(proteins, key=lambda one: one.residues)[:3]  # for models that take long
    for name in () if given.params else REFERENCES:
        case = given.shared / "golden" / "models" / name
        parts[f"random parameters of {name}, real proteins"] = reference(case), shortest
    for path in given.params:
        parts[f"{path.name}, real proteins"] = of_file(path, given.device), proteins
    found: dict[str, Any] = {}
    for title, (make, some) in parts.items():
        rows = effects(make, some, seeds)
        found[title] = {**summary(rows), "rows": rows}
        print(title, json.dumps(summary(rows)), flush=True)
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": device_name(torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "seeds": given.seeds,
        "parts": found,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
