"""Run the whole pipeline on two CPU cores: make proteins or dimers, pack, train, fold, and report.

    OUT/proteins/      generated mmCIF and A3M files
    OUT/store/         the packed proteins
    OUT/run/           the training run (docs/howto/train.md)
    OUT/predictions/   predictions of held-out proteins (docs/reference/outputs.md)
    OUT/report.html    the results for people
    OUT/prediction.png the best prediction of a held-out protein and its true structure
    OUT/summary.json   the results for programs

Each stage is complete before the next begins, so the same command continues a stopped demo.
"""

import hashlib
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from warpfold import __version__, settings
from warpfold.data.load.order import Source
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.pack import pack
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import entry_keys
from warpfold.data.synthetic.folder import generate
from warpfold.data.synthetic.folds import FOLDS
from warpfold.demo_report import DIMERS, PROTEINS, demo_report
from warpfold.engine.watch import Row
from warpfold.evaluation.before_after import LDDT, Measured, fold_before_after, means
from warpfold.files import claim_folder, put_aside, write_atomically, write_summary
from warpfold.prediction.outputs import write_prediction
from warpfold.prediction.predictor import Predictor, load
from warpfold.progress import Progress, no_progress
from warpfold.report.figures import draw_prediction
from warpfold.report.report import write_report
from warpfold.training.config import RunConfig
from warpfold.training.examples import split
from warpfold.training.processes import train_here
from warpfold.training.train import initial_model

FORMAT = "warpfold-demo-1"
# The number of training and of held-out proteins that are folded before and after training.
MEASURED = 12
PARTS = ("proteins", "store", "run", "predictions", "report.html", "prediction.png")

# Where each stage ends on the progress bar, in percent of the usual time.
PERCENT = {"making proteins": 5, "packing": 6, "training": 94, "folding": 98, "writing the report": 100}


def run_demo(
    out: Path,
    *,
    multimer: bool = False,
    seed: int = 0,
    force: bool = False,
    proteins: int | None = None,
    changes: Sequence[str] = (),
    processes: int = 1,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run the demo and return the content of `out/summary.json`. The same call continues a stopped demo.

    multimer: make dimers and train a multimer.
    force: move a demo with other settings to OUT/earlier-1.
    proteins: the number of proteins or dimers. The default depends on `multimer`.
    changes: overrides of the preset's settings, such as "train.steps=10".
    processes: the largest number of training processes, which share the examples of a step.
    Errors: UserError if `out` holds other files; KeyboardInterrupt if a signal stops training.
    """
    tell, subject = Stages(progress), DIMERS if multimer else PROTEINS
    count = subject.count if proteins is None else proteins
    config = settings.build(RunConfig, settings.load(subject.preset, [f"train.seed={seed}", *changes]), subject.preset)
    run = hashlib.sha256(json.dumps([settings.to_dict(config), count, __version__]).encode()).hexdigest()
    earlier = claim_folder(out, FORMAT, run, force)
    if earlier is not None and force:
        put_aside(out, PARTS)
    write_summary(out, {"format": FORMAT, "run": run, "status": "running"})

    tell("making proteins")
    if not (out / "proteins").is_dir():
        generate(
            out / "proteins",
            0 if multimer else count,
            seed,
            dimers=count if multimer else 0,
            max_length=subject.longest,
            folds=[fold for fold in FOLDS if fold.name not in subject.left_out],
            progress=lambda done, total, _: tell.part(done / total),
        )
    tell("packing")
    if not (out / "store").is_dir():
        options = PackOptions(assemblies=multimer)
        pack([out / "proteins"], [out / "proteins"], out / "store", options)
    store = Store(out / "store")
    tell("training")
    ranks = min(processes, config.optim.accumulate)
    sources, shared = [Source(store, assemblies=multimer)], replace(config, plan=replace(config.plan, data=ranks))
    summary = train_here(ranks, shared, sources, out / "run", watch=lambda row: tell.training(row, config.train.steps))
    if not summary.finished:
        raise KeyboardInterrupt
    tell("folding")
    measured = fold_examples(config, store, summary.params, tell)
    tell("writing the report")
    entries = [write_prediction(measurement.trained, out / "predictions") for measurement in measured["held_out"]]
    result = {
        "format": FORMAT,
        "run": run,
        "status": "complete",
        "seed": config.train.seed,
        "proteins": len(entry_keys(store, multimer)),
        "parameters": sum(p.numel() for p in initial_model(config, None).parameters()),
        "steps": config.train.steps,
        **{
            kind: {"proteins": len(measurements), **LDDT.means(measurements), **means(subject.interface, measurements)}
            for kind, measurements in measured.items()
        },
        "predictions": [
            {**means([LDDT, *subject.interface], [measurement]), **entry}
            for entry, measurement in zip(entries, measured["held_out"])
        ],
        # The duration of each stage that this call ran.
        "seconds": tell.seconds,
        "threads": torch.get_num_threads(),
        "versions": {"warpfold": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    page = demo_report(out, result, measured, subject)
    write_report(out / "report.html", page)
    write_atomically(out / "prediction.png", draw_prediction(page.targets[0]))
    result = write_summary(out, result)
    tell.done()
    return result


class Stages:
    """Convert stages and training steps to a percentage of the whole demo, and time each stage."""

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
        """Show the finished share of the current stage, 0 to 1."""
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


def fold_examples(config: RunConfig, store: Store, params: Path, tell: Stages) -> dict[str, list[Measured]]:
    """Fold training and held-out examples with the initial and with the trained parameters."""
    trained_on, held_out = split(store, config)
    keys = {"training": trained_on[:MEASURED], "held_out": [key for _, key in held_out][:MEASURED]}
    models = Predictor(initial_model(config, None), sample=config.data), load(params, "cpu")
    total, finished = sum(map(len, keys.values())), 0
    measured: dict[str, list[Measured]] = {}
    for kind, names in keys.items():
        measured[kind] = []
        for measurement in fold_before_after(store, names, *models, config.train.seed):
            measured[kind].append(measurement)
            finished += 1
            tell.part(finished / total)
    return measured
