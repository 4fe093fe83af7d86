"""Designs from many starts, in a folder where the same call continues: what is done is kept, step by step.

    OUT/run.json              what decides the designs: settings, seed, digests of the parameters and the target
    OUT/starts/NAME.*         of each start its state, .safetensors, and a row for each of its steps, .jsonl
    OUT/designs/NAME.cif      and .json: what became of it; done when both are there
    OUT/designs.fasta, .csv   all designs, the best first, for `warpfold predict`
    OUT/design.json, report.html

A step is a function of the state before it, so a run that was killed ends with the same files, bit for bit.
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
from warpfold.design.losses import Losses, TargetStructure
from warpfold.design.page import design_page
from warpfold.design.settings import DesignSettings, StepSettings, fixed_letters
from warpfold.design.state import StartState, read_rows
from warpfold.errors import UserError
from warpfold.files import as_csv, lock_file, refuse_foreign, remove_own, sha256, write_atomically, writing
from warpfold.geometry.residue import RESTYPES
from warpfold.keyed import keyed_rng
from warpfold.model.soft import AMINO_ACIDS, FREE, SoftChain, soft_chains
from warpfold.prediction.predictor import Gradient, Predictor
from warpfold.progress import Progress, no_progress
from warpfold.report.report import write_report
from warpfold.settings import differences, to_dict

LOGOS = 8  # of a start: its sequence at so many steps
RUN, SUMMARY, PAGE, FASTA, TABLE = "run.json", "design.json", "report.html", "designs.fasta", "designs.csv"
FILES = (RUN, SUMMARY, PAGE, FASTA, TABLE)
FOLDERS = ("starts", "designs")
OWN_FILE = re.compile(r"\.?design_\d+\.(safetensors|jsonl|cif|json)(\.\w+)?")  # in its folders; with drafts


@dataclass(frozen=True)
class Problem:
    """What is designed: the chains, of which some have logits, and what they are judged by.

    free: residues of each key of the logits.  fixed: letters of each chain, FREE where it is free.
    """

    free: dict[str, int]
    fixed: dict[str, str]
    losses: Losses

    @classmethod
    def of(cls, settings: DesignSettings, pae: bool) -> "Problem":
        """Read the target, if there is one, and check that all goes together; pae: as `errors` of `Losses.check`.

        Errors: UserError for a file that cannot be read, and chains or losses that do not fit.
        """
        known: Mapping[str, Chain] = {}
        if settings.target:
            structure = read_structure(Path(settings.target))
            structure.check_placed(settings.target)
            known = structure.chains
        given = settings.chains or {id: len(chain.sequence) for id, chain in known.items()}
        if not given:
            raise UserError("chains: there are none; give how many residues, such as --set chains.A=100, or a target")
        free, fixed = dict[str, int](), dict[str, str]()
        for key, what in given.items():
            letters = fixed_letters(what)
            if FREE in letters:
                free[key] = len(letters)
            for id in key.split(","):
                fixed[id.strip()] = letters
        if not free:
            raise UserError(f'chains: every letter is given; "{FREE}" stands where one is to be designed')
        chains = soft_chains({key: np.zeros((n, AMINO_ACIDS)) for key, n in free.items()}, fixed)
        lengths = {id: len(one.fixed) for id, one in chains.items()}
        target = TargetStructure.of(lengths, known) if known else None
        copies = any("," in key for key in given)
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
    """Design from each start that is not done yet, and return what OUT/design.json has.

    params: a digest of the parameters, by which a run is known.  starts: more of them may be asked for later.
    Errors: UserError for a folder of another run or of something else, and as of `Problem.of`.
    """
    problem = Problem.of(settings, predictor.model.config.heads.pae)
    about = {"settings": to_dict(settings), "seed": seed, "params": params, "precision": predictor.precision}
    about["target"] = sha256(Path(settings.target)) if settings.target else ""
    about |= {} if predictor.chain_gap is None else {"chain_gap": predictor.chain_gap}
    _refuse_others(out)
    with writing(out):
        for folder in (out, out / "starts", out / "designs"):
            folder.mkdir(parents=True, exist_ok=True)
    with lock_file(
        out / "lock", UserError(f"{out}: another process designs here; wait for it, or name another folder")
    ):
        _identify(out, about, force)
        total = starts * settings.steps
        for number in range(1, starts + 1):
            name = f"design_{number:04}"
            if not (out / "designs" / f"{name}.json").is_file():
                done = (number - 1) * settings.steps
                _run_start(predictor, problem, settings, out, name, seed, done, total, progress)
        progress(total, total, "")
        return _summarise(out, about, starts, problem)


def _refuse_others(out: Path) -> None:
    """Raise UserError for a folder that is no run's: one with other files, or with folders of these names in use."""
    known = (out / RUN).is_file()
    own = {*FOLDERS, "lock", *(FILES if known else ())}
    refuse_foreign(out, lambda name: name in own or name.startswith("."))  # the latter: what a kill left
    for folder in FOLDERS:
        refuse_foreign(out / folder, lambda name: known and OWN_FILE.fullmatch(name))


def _identify(out: Path, about: Mapping[str, Any], force: bool) -> None:
    """Note what decides the run, or see that it is the same one; force: else begin anew."""
    path = out / RUN
    text = json.dumps(about, indent=1)
    if path.is_file():
        try:
            known = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, RecursionError) as error:
            if not force:
                raise UserError(f"{path}: damaged ({error}); put a copy back, or begin anew with --force") from None
            known = {}
        if known == json.loads(text):
            return
        if not force:
            what = differences(dict(about), known)[0]
            raise UserError(f"{out}: holds another run ({what}); name a new folder, or replace it with --force")
        for folder in FOLDERS:
            remove_own(out / folder, OWN_FILE.fullmatch)
            (out / folder).mkdir(exist_ok=True)
        remove_own(out, FILES.__contains__)
    write_atomically(path, text)


def _run_start(
    predictor: Predictor, problem: Problem, settings: DesignSettings, out: Path, name: str, seed: int,
    done: int, total: int, progress: Progress,
) -> None:  # fmt: skip
    """Go through the stages from where the start stands, and write what became of it."""
    path, journal = out / "starts" / f"{name}.safetensors", out / "starts" / f"{name}.jsonl"
    state = StartState.read(path) or StartState(first_logits(problem.free, settings.spread, seed, name), logos={})
    rows = read_rows(journal, state.step)  # without that of a step whose state was not written any more
    write_atomically(journal, "".join(json.dumps(row) + "\n" for row in rows))
    shown = {step for step in np.linspace(0, settings.steps - 1, LOGOS).astype(int).tolist()}
    assert state.logos is not None
    for step in range(state.step, settings.steps):
        progress(done + step, total, name)
        now = settings.at(step)
        if step in shown:
            state.logos[step] = _shares(problem, state.logits, now)
        found = _gradient(predictor, problem, settings, state.logits, now, seed, name)
        spans, sequence = found.prediction.spans, found.prediction.sequence
        letters = {key: sequence[spans[key.split(",")[0].strip()]] for key in problem.free}
        if now.hard == 1.0 and (state.best is None or found.loss < state.best):
            state.best, state.letters = found.loss, letters
        row: dict[str, Any] = {key: value for key, value in vars(now).items() if key != "weights"}
        row |= {"step": step, "loss": found.loss, "terms": found.terms}
        row |= {"plddt": found.prediction.mean_plddt, "letters": letters}
        with writing(journal), journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        assert isinstance(found.grad, dict)
        for key, grad in found.grad.items():
            state.logits[key] = moved(state.logits[key], grad, now.rate)
        state.step = step + 1
        state.write(path)
    _finish(predictor, problem, settings, state, out, name, seed)


def first_logits(free: Mapping[str, int], spread: float, seed: int, name: str) -> dict[str, np.ndarray]:
    """Draw the logits [N, 20] that a start begins with."""
    return {
        key: (spread * keyed_rng(seed, "design", name, key).normal(size=(n, AMINO_ACIDS))).astype(np.float32)
        for key, n in free.items()
    }


def moved(logits: np.ndarray, grad: np.ndarray, rate: float) -> np.ndarray:
    """Return logits [N, 20] after a step against their gradient, which is scaled to the root of how many are free.

    So the step does not depend on how large the loss is (ColabDesign, colabdesign/af/design.py).
    """
    norm, free = float(np.linalg.norm(grad)), int(grad.any(-1).sum())
    scale = np.sqrt(free) / norm if norm > 0 else 0.0
    return (logits - rate * scale * grad).astype(np.float32)


def _gradient(
    predictor: Predictor, problem: Problem, settings: DesignSettings, logits: Mapping[str, np.ndarray],
    now: StepSettings, seed: int, name: str,
) -> Gradient:  # fmt: skip
    problem.losses.weights = now.weights
    return predictor.gradient(
        logits,
        problem.losses,
        fixed=problem.fixed,
        templates=list(settings.templates) or None,
        soft=now.soft,
        temperature=now.temperature,
        hard=now.hard,
        recycles=settings.recycles,
        through=settings.through,
        seed=seed,
        name=name,
    )


def _chains(problem: Problem, logits: Mapping[str, np.ndarray]) -> dict[str, SoftChain]:
    """Return the first chain of each key of the logits, by key."""
    chains = soft_chains(logits, problem.fixed)
    return {key: chains[key.split(",")[0].strip()] for key in problem.free}


def _shares(problem: Problem, logits: Mapping[str, np.ndarray], now: StepSettings) -> np.ndarray:
    """Return the softmax of the free chains' logits, one below another, [N, 20]."""
    each = [one.enter(1.0, now.temperature, now.hard).detach() for one in _chains(problem, logits).values()]
    return np.concatenate([x.numpy()[:, :AMINO_ACIDS] for x in each]).astype(np.float32)


def _finish(
    predictor: Predictor, problem: Problem, settings: DesignSettings, state: StartState, out: Path, name: str, seed: int
) -> None:
    """Fold the best hard sequence of a start, or its last one, and write the design."""
    letters = state.letters or {key: one.letters for key, one in _chains(problem, state.logits).items()}
    codes = soft_chains({key: np.zeros((n, AMINO_ACIDS)) for key, n in problem.free.items()}, problem.fixed)
    whole = {id: letters.get(one.key or "", one.fixed) for id, one in codes.items()}
    last = replace(settings.at(settings.steps - 1), hard=1.0, soft=1.0)
    hard = {key: one_hot(letters[key]) for key in problem.free}
    found = _gradient(predictor, problem, settings, hard, last, seed, name)
    prediction = found.prediction
    entry = {
        "name": name,
        "loss": found.loss,
        "terms": found.terms,
        "mean_plddt": prediction.mean_plddt,
        "ptm": prediction.ptm,
        "iptm": prediction.iptm,
        "sequence": ":".join(whole.values()),
        "chains": whole,
        "designed": letters,
        "plddt": [round(float(x), 2) for x in prediction.plddt],
    }
    write_atomically(out / "designs" / f"{name}.cif", prediction.mmcif())
    write_atomically(out / "designs" / f"{name}.json", json.dumps(entry, indent=1))


def one_hot(letters: str) -> np.ndarray:
    """Return logits [N, 20] whose most likely letters these are; X counts as A, which only a fixed letter can be."""
    return np.eye(AMINO_ACIDS, dtype=np.float32)[[max(RESTYPES.find(letter), 0) for letter in letters]]


def _read_design(path: Path) -> dict[str, Any]:
    """Read what `_finish` has written.  Errors: UserError for a file that is damaged."""
    try:
        one = json.loads(path.read_text(encoding="utf-8"))
        if lacking := {"ptm", "iptm", "chains", "designed"} - set(one):
            raise KeyError(*sorted(lacking))
        numbers = [float(x) for x in (one["loss"], one["mean_plddt"], *one["terms"].values(), *one["plddt"])]
        letters = one["sequence"].replace(":", "")
        whole = one["name"] == path.stem and len(letters) == len(one["plddt"]) and set(letters) <= {*RESTYPES, "X"}
        if not whole or not np.isfinite(numbers).all():
            raise ValueError("it is not as it was written")
        json.dumps(one, allow_nan=False)  # ValueError for 1e999, which was read as infinity
        return dict(one)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: damaged ({error}); remove it, and it is made again") from None


def _summarise(out: Path, about: Mapping[str, Any], starts: int, problem: Problem) -> dict[str, Any]:
    """Write the tables and the page of all designs that are done, the best first, and return the summary."""
    files = sorted((out / "designs").glob("design_*.json"))
    designs = [_read_design(file) for file in files]
    designs.sort(key=lambda one: (one["loss"], one["name"]))
    summary = {**about, "starts": starts, "designs": designs}
    write_atomically(out / FASTA, "".join(f">{one['name']}\n{one['sequence']}\n" for one in designs))
    names = ["name", "loss", "mean_plddt", "ptm", "iptm", *(f"loss.{term}" for term in designs[0]["terms"]), "sequence"]
    rows = (one | {f"loss.{term}": value for term, value in one["terms"].items()} for one in designs)
    write_atomically(out / TABLE, as_csv(names, rows))
    write_atomically(out / SUMMARY, json.dumps(summary, indent=1, allow_nan=False) + "\n")
    write_report(out / PAGE, design_page(out, summary, problem.free))
    return summary
