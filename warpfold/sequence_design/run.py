"""Run designs from many starts in a folder in which the same command continues a stopped run.

    OUT/run.json              the inputs: settings, seed, digests of the parameters and the target
    OUT/starts/NAME.*         the state of each start (.safetensors) and one row per step (.jsonl)
    OUT/designs/NAME.*        the finished design (.cif and .json)
    OUT/designs.fasta, .csv   all designs, best first, for `warpfold predict`
    OUT/design.json, report.html

Each step is a function of the state before it, so a run that was killed ends with the same files, bit for bit.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.data.structure.chain import Chain
from warpfold.data.structure.mmcif import read_structure
from warpfold.errors import UserError
from warpfold.files import as_csv, lock_file, refuse_foreign, remove_own, sha256, write_atomically, writing
from warpfold.geometry.residue import RESTYPES
from warpfold.keyed import keyed_rng
from warpfold.model.soft import AMINO_ACIDS, FREE, SoftChain, soft_chains
from warpfold.prediction.predictor import Gradient, Predictor
from warpfold.progress import Progress, no_progress
from warpfold.report.report import write_report
from warpfold.sequence_design.losses import Losses, TargetStructure
from warpfold.sequence_design.page import design_page
from warpfold.sequence_design.settings import DesignSettings, StepSettings, fixed_letters
from warpfold.sequence_design.state import StartState, read_rows
from warpfold.settings import differences, to_dict

# The number of steps with a sequence logo in the report.
LOGOS = 8
RUN, SUMMARY, PAGE, FASTA, TABLE = "run.json", "design.json", "report.html", "designs.fasta", "designs.csv"
FILES = (RUN, SUMMARY, PAGE, FASTA, TABLE)
FOLDERS = ("starts", "designs")
# The files of a run in its folders, including temporary files.
OWN_FILE = re.compile(r"\.?design_\d+\.(safetensors|jsonl|cif|json)(\.\w+)?")


@dataclass(frozen=True)
class Problem:
    """A design problem: the designed chains, the fixed letters and the losses.

    free: the number of designed residues by key of the logits.
    fixed: the letters of each chain, with FREE for designed residues.
    """

    free: dict[str, int]
    fixed: dict[str, str]
    losses: Losses

    @classmethod
    def of(cls, settings: DesignSettings, pae: bool) -> "Problem":
        """Read the target, if any, and check that chains and losses are consistent.

        pae: whether the parameters have a head for aligned errors.
        Errors: UserError for an unreadable file and for inconsistent chains or losses.
        """
        target_chains: Mapping[str, Chain] = {}
        if settings.target:
            structure = read_structure(Path(settings.target))
            structure.check_placed(settings.target)
            target_chains = structure.chains
        chain_settings = settings.chains or {id: len(chain.sequence) for id, chain in target_chains.items()}
        if not chain_settings:
            raise UserError("chains: there are none. Pass their lengths, such as --set chains.A=100, or a target.")
        free, fixed = dict[str, int](), dict[str, str]()
        for key, length_or_letters in chain_settings.items():
            letters = fixed_letters(length_or_letters)
            if FREE in letters:
                free[key] = len(letters)
            for id in key.split(","):
                fixed[id.strip()] = letters
        if not free:
            raise UserError(f'chains: all residues are fixed. Write "{FREE}" for the residues to design.')
        chains = soft_chains({key: np.zeros((n, AMINO_ACIDS)) for key, n in free.items()}, fixed)
        lengths = {id: len(chain.fixed) for id, chain in chains.items()}
        target = TargetStructure.of(lengths, target_chains) if target_chains else None
        copies = any("," in key for key in chain_settings)
        for number, stage in enumerate(settings.stages, 1):
            losses = Losses(replace(settings.loss, **stage.weights), settings.shape, target)
            try:
                losses.check(pae, len(chains), copies)
            except UserError as error:
                raise UserError(f"stage {number}: {error}") from None
        return cls(free, fixed, losses)


def run_design(
    predictor: Predictor,
    settings: DesignSettings,
    out: Path,
    starts: int = 1,
    seed: int = 0,
    params: str = "",
    force: bool = False,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Design from each start that is not finished, and return the content of OUT/design.json.

    starts: the number of designs; a later call may ask for more.
    params: a digest of the parameters, which identifies the run.
    force: replace another run in `out`.
    Errors: UserError if `out` holds other files or another run, and those of `Problem.of`.
    """
    problem = Problem.of(settings, predictor.model.config.heads.pae)
    identity = {"settings": to_dict(settings), "seed": seed, "params": params, "precision": predictor.precision}
    identity["target"] = sha256(Path(settings.target)) if settings.target else ""
    identity |= {} if predictor.chain_gap is None else {"chain_gap": predictor.chain_gap}
    _refuse_others(out)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with lock_file(
        out / "lock", UserError(f"{out}: another process is writing designs here. Wait for it, or use another folder.")
    ):
        _identify(out, identity, force)
        with writing(out):
            for folder in FOLDERS:
                (out / folder).mkdir(exist_ok=True)
        total = starts * settings.steps
        for number in range(1, starts + 1):
            name = f"design_{number:04}"
            if not (out / "designs" / f"{name}.json").is_file():
                done = (number - 1) * settings.steps
                _run_start(predictor, problem, settings, out, name, seed, done, total, progress)
        progress(total, total, "")
        return _summarise(out, identity, starts, problem)


def _refuse_others(out: Path) -> None:
    """Raise UserError if the folder holds files that do not belong to a run of `design`."""
    is_run = (out / RUN).is_file()
    names = {*FOLDERS, "lock", *(FILES if is_run else ())}
    # A killed run leaves temporary files, whose names start with a dot.
    refuse_foreign(out, lambda name: name in names or name.startswith("."))
    for folder in FOLDERS:
        refuse_foreign(out / folder, lambda name: is_run and OWN_FILE.fullmatch(name))


def _identify(out: Path, about: Mapping[str, Any], force: bool) -> None:
    """Write the inputs of the run, or check that they equal those of the existing run. force: replace that run."""
    path = out / RUN
    text = json.dumps(about, indent=1)
    if path.is_file():
        try:
            existing = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, RecursionError) as error:
            if not force:
                raise UserError(f"{path}: damaged ({error}). Restore it, or start again with --force.") from None
            existing = {}
        if existing == json.loads(text):
            return
        if not force:
            difference = differences(dict(about), existing)[0]
            raise UserError(f"{out}: holds another run ({difference}). Use a new folder, or replace it with --force.")
        for folder in FOLDERS:
            remove_own(out / folder, OWN_FILE.fullmatch)
        remove_own(out, FILES.__contains__)
    write_atomically(path, text)


def _run_start(
    predictor: Predictor, problem: Problem, settings: DesignSettings, out: Path, name: str, seed: int,
    done: int, total: int, progress: Progress,
) -> None:  # fmt: skip
    """Run the remaining steps of a start and write its design."""
    path, journal = out / "starts" / f"{name}.safetensors", out / "starts" / f"{name}.jsonl"
    state = StartState.read(path) or StartState(first_logits(problem.free, settings.spread, seed, name), logos={})
    # A kill between the two writes of a step leaves a row without its state. That step runs again.
    rows = read_rows(journal, state.step)
    write_atomically(journal, "".join(json.dumps(row) + "\n" for row in rows))
    shown = {step for step in np.linspace(0, settings.steps - 1, LOGOS).astype(int).tolist()}
    assert state.logos is not None
    for step in range(state.step, settings.steps):
        progress(done + step, total, name)
        current = settings.at(step)
        if step in shown:
            state.logos[step] = _shares(problem, state.logits, current)
        gradient = _gradient(predictor, problem, settings, state.logits, current, seed, name)
        spans, sequence = gradient.prediction.spans, gradient.prediction.sequence
        letters = {key: sequence[spans[key.split(",")[0].strip()]] for key in problem.free}
        if current.hard == 1.0 and (state.best is None or gradient.loss < state.best):
            state.best, state.letters = gradient.loss, letters
        row: dict[str, Any] = {key: value for key, value in vars(current).items() if key != "weights"}
        row |= {"step": step, "loss": gradient.loss, "terms": gradient.terms}
        row |= {"plddt": gradient.prediction.mean_plddt, "letters": letters}
        with writing(journal), journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        assert isinstance(gradient.grad, dict)
        for key, grad in gradient.grad.items():
            state.logits[key] = updated_logits(state.logits[key], grad, current.rate)
        state.step = step + 1
        state.write(path)
    _finish(predictor, problem, settings, state, out, name, seed)


def first_logits(free: Mapping[str, int], spread: float, seed: int, name: str) -> dict[str, np.ndarray]:
    """Draw the initial logits [N, 20] of a start, by key, with the standard deviation `spread`."""
    return {
        key: (spread * keyed_rng(seed, "design", name, key).normal(size=(n, AMINO_ACIDS))).astype(np.float32)
        for key, n in free.items()
    }


def updated_logits(logits: np.ndarray, grad: np.ndarray, rate: float) -> np.ndarray:
    """Update logits [N, 20] by a gradient step that is independent of the scale of the loss.

    The gradient is scaled to the norm sqrt(number of free residues): ColabDesign, colabdesign/af/design.py.
    """
    norm, free = float(np.linalg.norm(grad)), int(grad.any(-1).sum())
    scale = np.sqrt(free) / norm if norm > 0 else 0.0
    return (logits - rate * scale * grad).astype(np.float32)


def _gradient(
    predictor: Predictor, problem: Problem, settings: DesignSettings, logits: Mapping[str, np.ndarray],
    step: StepSettings, seed: int, name: str,
) -> Gradient:  # fmt: skip
    problem.losses.weights = step.weights
    return predictor.gradient(
        logits,
        problem.losses,
        fixed=problem.fixed,
        templates=list(settings.templates) or None,
        soft=step.soft,
        temperature=step.temperature,
        hard=step.hard,
        recycles=settings.recycles,
        through=settings.through,
        seed=seed,
        name=name,
    )


def _chains(problem: Problem, logits: Mapping[str, np.ndarray]) -> dict[str, SoftChain]:
    """Return the first chain of each key of the logits, by key."""
    chains = soft_chains(logits, problem.fixed)
    return {key: chains[key.split(",")[0].strip()] for key in problem.free}


def _shares(problem: Problem, logits: Mapping[str, np.ndarray], step: StepSettings) -> np.ndarray:
    """Compute the softmax of the logits of all free chains, concatenated: [N, 20]."""
    shares = [chain.enter(1.0, step.temperature, step.hard).detach() for chain in _chains(problem, logits).values()]
    return np.concatenate([x.numpy()[:, :AMINO_ACIDS] for x in shares]).astype(np.float32)


def _finish(
    predictor: Predictor, problem: Problem, settings: DesignSettings, state: StartState, out: Path, name: str, seed: int
) -> None:
    """Fold the best hard sequence of a start, or else its last sequence, and write the design."""
    letters = state.letters or {key: chain.letters for key, chain in _chains(problem, state.logits).items()}
    chains = soft_chains({key: np.zeros((n, AMINO_ACIDS)) for key, n in problem.free.items()}, problem.fixed)
    sequences = {id: letters.get(chain.key or "", chain.fixed) for id, chain in chains.items()}
    last = replace(settings.at(settings.steps - 1), hard=1.0, soft=1.0)
    hard = {key: one_hot(letters[key]) for key in problem.free}
    gradient = _gradient(predictor, problem, settings, hard, last, seed, name)
    prediction = gradient.prediction
    entry = {
        "name": name,
        "loss": gradient.loss,
        "terms": gradient.terms,
        "mean_plddt": prediction.mean_plddt,
        "ptm": prediction.ptm,
        "iptm": prediction.iptm,
        "sequence": ":".join(sequences.values()),
        "chains": sequences,
        "designed": letters,
        "plddt": [round(float(x), 2) for x in prediction.plddt],
    }
    write_atomically(out / "designs" / f"{name}.cif", prediction.mmcif())
    write_atomically(out / "designs" / f"{name}.json", json.dumps(entry, indent=1))


def one_hot(letters: str) -> np.ndarray:
    """Encode letters as logits [N, 20]. Only fixed letters can be X, which is encoded as A."""
    return np.eye(AMINO_ACIDS, dtype=np.float32)[[max(RESTYPES.find(letter), 0) for letter in letters]]


def _read_design(path: Path) -> dict[str, Any]:
    """Read a file that `_finish` wrote. Errors: UserError for a damaged file."""
    try:
        design = json.loads(path.read_text(encoding="utf-8"))
        if missing := {"ptm", "iptm", "chains", "designed"} - set(design):
            raise KeyError(*sorted(missing))
        numbers = [
            float(x) for x in (design["loss"], design["mean_plddt"], *design["terms"].values(), *design["plddt"])
        ]
        letters = design["sequence"].replace(":", "")
        has_letters = len(letters) == len(design["plddt"]) and set(letters) <= {*RESTYPES, "X"}
        if design["name"] != path.stem or not has_letters or not np.isfinite(numbers).all():
            raise ValueError("inconsistent values")
        # Raises ValueError for 1e999, which json reads as infinity.
        json.dumps(design, allow_nan=False)
        return dict(design)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: damaged ({error}). Remove it and run the command again.") from None


def _summarise(out: Path, about: Mapping[str, Any], starts: int, problem: Problem) -> dict[str, Any]:
    """Write the tables and the page of all finished designs, best first, and return the summary."""
    files = sorted((out / "designs").glob("design_*.json"))
    designs = [_read_design(file) for file in files]
    designs.sort(key=lambda design: (design["loss"], design["name"]))
    summary = {**about, "starts": starts, "designs": designs}
    write_atomically(out / FASTA, "".join(f">{design['name']}\n{design['sequence']}\n" for design in designs))
    names = ["name", "loss", "mean_plddt", "ptm", "iptm", *(f"loss.{term}" for term in designs[0]["terms"]), "sequence"]
    rows = (design | {f"loss.{term}": value for term, value in design["terms"].items()} for design in designs)
    write_atomically(out / TABLE, as_csv(names, rows))
    write_atomically(out / SUMMARY, json.dumps(summary, indent=1, allow_nan=False) + "\n")
    write_report(out / PAGE, design_page(out, summary, problem.free))
    return summary
