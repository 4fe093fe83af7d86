"""Run all of WarpFold on two CPU cores: make proteins, train, fold, and report what the model learned.

    OUT/proteins/      mmCIF and A3M files, made here
    OUT/store/         the same, packed
    OUT/run/           the training run (docs/training.md)
    OUT/predictions/   held-out proteins, folded (docs/outputs.md)
    OUT/report.html    the result, for people
    OUT/summary.json   the same, for programs

Each part is finished before the next begins, and is kept: the same command continues a demo that was stopped.
"""

import hashlib
import itertools
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from warpfold import __version__, settings
from warpfold.data.example.raw_example import RawExample
from warpfold.data.pack.pack import pack
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import read_example
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.write import write_mmcif
from warpfold.data.synthetic.folder import generate
from warpfold.engine.loop import Row
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.progress import Progress, no_progress
from warpfold.run import figures, metrics
from warpfold.run.config import RunConfig
from warpfold.run.examples import split
from warpfold.run.outputs import Prediction, claim_folder, write_summary
from warpfold.run.predict import keep
from warpfold.run.predictor import Predictor, load
from warpfold.run.report import ReportPage, ReportTable, Section, Target, target_of, write_report
from warpfold.run.train import initial_model, train

CA = ATOM_ORDER["CA"]
DRAWN = 4  # held-out proteins shown in 3D
FORMAT = "warpfold-demo-1"
PRESET = "tiny"
PROTEINS = 240
LONGEST = 40  # residues: small proteins train fast
MEASURED = 12  # proteins of each kind, trained on and held out, whose accuracy is measured before and after
PARTS = ("proteins", "store", "run", "predictions", "report.html")

# Where each stage ends on the progress bar, in percent of the usual time.
PERCENT = {"making proteins": 5, "packing": 6, "training": 94, "folding": 98, "writing the report": 100}


@dataclass(frozen=True)
class Measured:
    """One protein folded by the untrained and by the trained model."""

    raw: RawExample
    before: float  # lDDT-Ca, 0 to 1
    after: float
    prediction: Prediction  # the trained model's
    lddt: np.ndarray  # [N], 0 to 1, of the trained model, NaN where nothing is known


def run_demo(
    out: Path,
    *,
    seed: int = 0,
    force: bool = False,
    proteins: int = PROTEINS,
    changes: Sequence[str] = (),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Make proteins, train, fold, report; return what is in `out/summary.json`.

    proteins: how many to make.  changes: settings over those of the preset, "train.steps=10".
    A demo that was stopped is continued; with `force`, one with other settings is moved to OUT/earlier-1.
    Errors: UserError for an `out` that holds something else; KeyboardInterrupt when training is stopped by a signal.
    """
    tell = Stages(progress)
    config = settings.build(RunConfig, settings.load(PRESET, [f"train.seed={seed}", *changes]), PRESET)
    run = hashlib.sha256(json.dumps([settings.to_dict(config), proteins, __version__]).encode()).hexdigest()
    earlier = claim_folder(out, FORMAT, run, force)
    if earlier is not None and force:
        _put_aside(out)
    write_summary(out, {"format": FORMAT, "run": run, "status": "running"})

    tell("making proteins")
    if not (out / "proteins").is_dir():
        generate(
            out / "proteins",
            proteins,
            seed,
            max_length=LONGEST,
            progress=lambda done, total, _: tell.part(done / total),
        )
    tell("packing")
    if not (out / "store").is_dir():
        pack([out / "proteins"], [out / "proteins"], out / "store")
    store = Store(out / "store")
    tell("training")
    summary = train(config, store, out / "run", watch=lambda row: tell.training(row, config.train.steps))
    if not summary.finished:
        raise KeyboardInterrupt
    tell("folding")
    measured = measure(config, store, summary.params, tell)
    tell("writing the report")
    entries = [keep(m.prediction, out / "predictions") for m in measured["held_out"]]
    result = _result(config, run, len(store), measured, entries, tell)
    write_report(out / "report.html", demo_report(out, result, measured))
    write_summary(out, result)
    tell.done()
    return result


class Stages:
    """Turn stages, and the steps of training, into percents of the whole, and time each stage."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress or no_progress
        self.seconds: dict[str, float] = {}
        self.stage, self.news, self.percent, self.began = "", "", 0, time.perf_counter()

    def __call__(self, stage: str) -> None:
        self._close()
        self.stage, self.news = stage, ""
        self.part(0.0)

    def training(self, row: Row, steps: int) -> None:
        """Show a row of the training's log."""
        if row["kind"] == "validation":
            self.news = f", lDDT-Cα of held-out proteins {row['lddt_ca']:.2f}"
        self.part(row["step"] / steps)

    def part(self, share: float) -> None:
        """Show how much of the current stage is done, 0 to 1."""
        end = PERCENT[self.stage]
        self.progress(int(self.percent + share * (end - self.percent)), 100, self.stage + self.news)

    def done(self) -> None:
        self._close()
        self.progress(100, 100, "done")

    def _close(self) -> None:
        now = time.perf_counter()
        if self.stage:
            self.seconds[self.stage] = round(now - self.began, 1)
            self.percent = PERCENT[self.stage]
        self.began = now


def measure(config: RunConfig, store: Store, params: Path, tell: Stages) -> dict[str, list[Measured]]:
    """Fold proteins of the training set and held-out ones with the first and with the last parameters."""
    trained_on, held_out = split(store, config)
    keys = {"training": trained_on[:MEASURED], "held_out": [key for _, key in held_out][:MEASURED]}
    models = Predictor(initial_model(config, None), sample=config.data), load(params, "cpu")
    total, found = sum(map(len, keys.values())), 0
    measured: dict[str, list[Measured]] = {}
    for kind, names in keys.items():
        measured[kind] = []
        for key in names:
            raw = read_example(store, key)
            before, after = (model.fold_example(raw, seed=config.train.seed, representations=False) for model in models)
            lddt = metrics.lddt_per_residue(*ca_pair(after, raw))
            scores = [metrics.lddt(*ca_pair(prediction, raw)) for prediction in (before, after)]
            measured[kind].append(Measured(raw, scores[0], scores[1], after, lddt))
            found += 1
            tell.part(found / total)
    return measured


def _result(
    config: RunConfig,
    run: str,
    proteins: int,
    measured: dict[str, list[Measured]],
    entries: list[dict[str, Any]],
    tell: Stages,
) -> dict[str, Any]:
    model = initial_model(config, None)
    return {
        "format": FORMAT,
        "run": run,
        "status": "complete",
        "seed": config.train.seed,
        "proteins": proteins,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": config.train.steps,
        **{
            kind: {
                "proteins": len(found),
                "untrained": round(float(np.mean([m.before for m in found])), 4),
                "trained": round(float(np.mean([m.after for m in found])), 4),
            }
            for kind, found in measured.items()
        },
        "predictions": [
            {**entry, "lddt_ca": {"untrained": round(m.before, 4), "trained": round(m.after, 4)}}
            for entry, m in zip(entries, measured["held_out"])
        ],
        "seconds": tell.seconds,  # of each finished stage, in this run
        "threads": torch.get_num_threads(),
        "versions": {"warpfold": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def _put_aside(out: Path) -> None:
    """Move the output of an earlier demo into OUT/earlier-N: somebody may have put files into its folders."""
    made = [out / name for name in PARTS if os.path.lexists(out / name)]
    if made:
        aside = next(path for n in itertools.count(1) if not os.path.lexists(path := out / f"earlier-{n}"))
        aside.mkdir()
        for path in made:
            path.rename(aside / path.name)


# The report


def ca_pair(prediction: Prediction, raw: RawExample) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return predicted and true Cα [N, 1, 3] of an example with coordinates, and which are known [N, 1]."""
    assert raw.positions is not None
    assert raw.mask is not None
    return prediction.positions[:, [CA]], raw.positions[:, [CA]], raw.mask[:, [CA]]


def demo_report(out: Path, result: Mapping[str, Any], measured: Mapping[str, Sequence[Measured]]) -> ReportPage:
    """Return the page: `result` is the summary, whose predictions are in `out/predictions`, ordered as `measured`."""
    held_out = measured["held_out"]
    drawn = sorted(range(len(held_out)), key=lambda i: -held_out[i].after)[:: max(1, len(held_out) // DRAWN)][:DRAWN]
    scores, seconds, versions = result["held_out"], result["seconds"], result["versions"]
    return ReportPage(
        title="WarpFold learns to fold",
        lead="A small AlphaFold2, trained here and now on made-up proteins, folds some that it has never seen.",
        facts=[
            ("lDDT-Cα of held-out proteins, trained", f"{scores['trained']:.2f}"),
            ("the same, untrained", f"{scores['untrained']:.2f}"),
            ("training steps", f"{result['steps']:,}"),
            ("parameters", f"{result['parameters']:,}"),
            ("minutes in all", f"{sum(seconds.values()) / 60:.1f}"),
        ],
        sections=[_training(out / "run" / "metrics.jsonl", result), _held_out(held_out)],
        targets=[_target(out / "predictions", result["predictions"][i], held_out[i]) for i in drawn],
        footer=[
            f"WarpFold {versions['warpfold']} · torch {versions['torch']} · seed {result['seed']} · "
            + " · ".join(f"{stage} {value:.0f} s" for stage, value in seconds.items()),
            "Everything on this page is in this folder: summary.json, run/metrics.jsonl, predictions/.",
        ],
    )


def _training(log: Path, result: Mapping[str, Any]) -> Section:
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if row["kind"] == "step" and row["loss"] is not None]
    validations = [row for row in rows if row["kind"] == "validation"]
    x = [row["step"] for row in steps]
    lddt = [
        figures.Curve("training", x, [row["lddt_ca"] for row in steps]),
        figures.Curve("held out", [v["step"] for v in validations], [v["lddt_ca"] for v in validations], points=True),
    ]
    trained, held_out = result["training"], result["held_out"]
    return Section(
        "Training",
        f"{result['proteins']} proteins were made from ideal bond geometry, with alignments that vary as contacts "
        f"allow; some were held out, new sequences and structures of the same kinds of fold. lDDT-Cα, 0 to 1, is the "
        f"share of distances between Cα that are right. "
        f"Afterwards it is {trained['trained']:.2f} on {trained['proteins']} proteins of the training set "
        f"({trained['untrained']:.2f} before) and {held_out['trained']:.2f} on {held_out['proteins']} held out "
        f"({held_out['untrained']:.2f} before).",
        [
            (
                figures.draw_curves(lddt, "lDDT-Cα", (0, 1)),
                "Held out: with the averaged weights. Training: of each step's crops, before its update.",
            ),
            (
                figures.draw_curves([figures.Curve("training loss", x, [row["loss"] for row in steps])], "loss"),
                "AlphaFold2's loss: frames, torsions, distances, masked alignment, confidence.",
            ),
        ],
    )


def _held_out(measured: Sequence[Measured]) -> Section:
    known = [(m.prediction.plddt[i], 100 * m.lddt[i]) for m in measured for i in np.flatnonzero(~np.isnan(m.lddt))]
    names = [m.raw.name for m in measured]
    header = [
        "protein",
        "residues",
        "alignment rows",
        "lDDT-Cα before",
        "lDDT-Cα after",
        "pLDDT",
        "TM-score",
        "RMSD, Å",
    ]
    rows = []
    for m in measured:
        predicted, truth, mask = (array[:, 0] for array in ca_pair(m.prediction, m.raw))
        pair = predicted[mask > 0], truth[mask > 0]
        sizes = [str(len(m.raw.aatype)), str(len(m.raw.msa))]
        scores = [f"{m.before:.2f}", f"{m.after:.2f}", f"{m.prediction.mean_plddt:.0f}"]
        overlap = [f"{metrics.overlap(*pair).tm:.2f}", f"{metrics.rmsd(*pair):.1f}"]
        rows.append([m.raw.name, *sizes, *scores, *overlap])
    return Section(
        "Proteins it never saw",
        figures=[
            (
                figures.draw_improvement(names, [m.before for m in measured], [m.after for m in measured]),
                "Each held-out protein, before and after training.",
            ),
            (
                figures.draw_calibration([p for p, _ in known], [v for _, v in known], "residue"),
                "Does it know what it knows? Expected against measured, residue by residue.",
            ),
        ],
        table=ReportTable(header, rows),
    )


def _target(predictions: Path, entry: Mapping[str, Any], measured: Measured) -> Target:
    """Return a prediction with its truth superposed on it."""
    raw = measured.raw
    assert raw.positions is not None
    assert raw.mask is not None
    predicted, truth, mask = (array[:, 0] for array in ca_pair(measured.prediction, raw))
    there = mask > 0
    rotation, translation = metrics.superpose(truth[there], predicted[there])
    moved = ((raw.positions @ rotation.T + translation) * raw.mask[..., None]).astype(np.float32)
    numbers = tuple(str(i + 1) for i in range(len(raw.aatype)))
    chain = Chain("A", raw.sequence, moved, raw.mask.astype(np.float32), raw.residue_index, numbers)
    return target_of(
        predictions,
        entry,
        numbers=[("lDDT-Cα", f"{measured.after:.2f}"), ("untrained", f"{measured.before:.2f}")],
        truth_mmcif=write_mmcif(f"{raw.name} truth", [chain]),
        truth_ca=moved[there, CA],
        lddt=100 * measured.lddt,
    )
