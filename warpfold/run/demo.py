"""`warpfold demo`: the whole of WarpFold on two CPU cores, from made-up proteins to a report on what was learnt.

    OUT/proteins/      mmCIF and A3M files, made here
    OUT/store/         the same, packed
    OUT/run/           the training run (docs/training.md)
    OUT/predictions/   held-out proteins, folded (docs/outputs.md)
    OUT/report.html    what came of it, for people
    OUT/summary.json   the same for programs

Each part is finished before the next begins and is kept: the same command continues a demo that was stopped.
"""

import hashlib
import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from warpfold import __version__, settings
from warpfold.data.pack.pack import pack
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import read_example
from warpfold.data.synthetic.proteins import generate
from warpfold.engine.log import Row
from warpfold.files import write_atomically
from warpfold.run import metrics
from warpfold.run.demo_report import Measured, ca_pair, demo_report
from warpfold.run.outputs import claim_folder
from warpfold.run.predict import keep
from warpfold.run.predictor import Predictor, load
from warpfold.run.report import write_report
from warpfold.run.train import RunConfig, initial_model, split, train

FORMAT = "warpfold-demo-1"
PRESET = "tiny"
PROTEINS = 240
LONGEST = 40  # residues: small proteins train fast
MEASURED = 12  # proteins of each kind, trained on and held out, whose accuracy is measured before and after
PARTS = ("proteins", "store", "run", "predictions", "report.html")

# Where each stage ends on the progress bar, in percent of the usual time.
PERCENT = {"making proteins": 5, "packing": 6, "training": 94, "folding": 98, "writing the report": 100}

Progress = Callable[[int, int, str], None]


def run_demo(
    out: Path,
    *,
    seed: int = 0,
    force: bool = False,
    proteins: int = PROTEINS,
    changes: Sequence[str] = (),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Make proteins, train, fold, report; returns what is in `out/summary.json`.

    proteins: how many to make.  changes: settings over those of the preset, "train.steps=10".
    A demo that was stopped is continued; with `force` one of other settings is put aside
    (OUT/earlier-1).
    Errors: UserError for an `out` that holds something else; KeyboardInterrupt when training is stopped by a signal.
    """
    tell = Stages(progress)
    config = settings.build(RunConfig, settings.load(PRESET, [f"train.seed={seed}", *changes]), PRESET)
    run = hashlib.sha256(json.dumps([settings.to_dict(config), proteins, __version__]).encode()).hexdigest()
    earlier = claim_folder(out, FORMAT, run, force)
    if earlier is not None and force:
        _put_aside(out)
    out.mkdir(parents=True, exist_ok=True)
    _write_summary(out, {"format": FORMAT, "run": run, "status": "running"})

    tell("making proteins")
    if not (out / "proteins").is_dir():
        generate(
            out / "proteins",
            proteins,
            seed,
            max_length=LONGEST,
            progress=lambda done, total, what: tell.part(done / total),
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
    _write_summary(out, result)
    tell.done()
    return result


class Stages:
    """Turns stages, and the steps of training, into percents of the whole; remembers how long each stage took."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress or (lambda done, total, what: None)
        self.seconds: dict[str, float] = {}
        self.stage, self.news, self.percent, self.began = "", "", 0, time.perf_counter()

    def __call__(self, stage: str) -> None:
        self._close()
        self.stage, self.news = stage, ""
        self.part(0.0)

    def training(self, row: Row, steps: int) -> None:
        """A row of the training's log."""
        if row["kind"] == "validation":
            self.news = f", lDDT-Cα of held-out proteins {row['lddt_ca']:.2f}"
        self.part(row["step"] / steps)

    def part(self, share: float) -> None:
        """How much of the current stage is done, 0 to 1."""
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
    """Move what an earlier demo made into OUT/earlier-N: somebody may have put something into its folders."""
    made = [out / name for name in PARTS if os.path.lexists(out / name)]
    if made:
        aside = next(path for n in itertools.count(1) if not os.path.lexists(path := out / f"earlier-{n}"))
        aside.mkdir()
        for path in made:
            path.rename(aside / path.name)


def _write_summary(out: Path, summary: dict[str, Any]) -> None:
    write_atomically(out / "summary.json", json.dumps(summary, indent=2) + "\n")
