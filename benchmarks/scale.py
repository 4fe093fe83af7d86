"""The answers of docs/scale.md, simulated: what devices, links, loaders and failures do to a training, with pictures.

    python -m benchmarks.scale --out benchmarks/results/scale-DATE.json        (some minutes; records ten plans)
    python -m benchmarks.scale --draw benchmarks/results/scale-DATE.json docs/scale

H100s by their data sheet (modelled), 8 on each node, NVLink 4; bf16, nothing recomputed, 256 examples a step.
"""

import argparse
import datetime
import io
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from warpfold.cost.machine import planned_cluster, planned_machine
from warpfold.cost.rates import of_gpu
from warpfold.cost.record import Await, Begin, RecordedStep, record
from warpfold.cost.replay import Pace, ReplayedStep, replay
from warpfold.cost.simulation import Chance, Interruptions, Steps, draw_steps, whole_training
from warpfold.parallel.exchange import SyncConfig
from warpfold.parallel.plan import Plan
from warpfold.report.charts import GREY, INK
from warpfold.report.figures import AMBER, BLUE, STYLE
from warpfold.training.config import load_settings
from warpfold.training.planning import training_job

EXAMPLES, AXIAL, DEVICES = 256, (1, 2, 4, 8), (256, 512, 1024, 2048)
LINKS = ("eth25", "eth100", "ib100", "ib200", "ib400")
STEPS = 39_063  # 10 million examples, 256 at a time
Row = dict[str, Any]


def recorded(settings: str, plan: Plan) -> tuple[Plan, RecordedStep, int]:
    """Record a plan of a preset; return also its recycles."""
    given = load_settings(settings)
    job = training_job(given, given.config())
    found = record(job, plan, 1, 8)
    # Of several examples of a rank all but the last do the same, and send no gradients to other data ranks.
    quiet = {e.number for e in found.last if isinstance(e, Begin) and e.group in ("data", "node", "nodes")}
    some = [e for e in found.last if not (isinstance(e, Begin | Await) and e.number in quiet)]
    return plan, replace(found, example=some), job.recycles


def timed(
    found: tuple[Plan, RecordedStep, int], devices: int, link: str = "ib400"
) -> tuple[Plan, int, dict[int, ReplayedStep]]:
    """Return the plan on so many devices, examples of a data rank and step, and a step's times by its passes."""
    plan, schedule, recycles = found
    plan = replace(plan, data=devices // plan.axial)
    examples = EXAMPLES // plan.data
    pace = Pace.of(of_gpu("H100"), planned_cluster(planned_machine("H100", None, devices), 8, link))
    times = {n: replay(replace(schedule, examples=examples).step(n), plan, pace) for n in range(recycles + 1)}
    return plan, examples, times


def drawn(given: tuple[Plan, int, dict[int, ReplayedStep]], chance: Chance = Chance(workers=0)) -> Steps:  # noqa: B008
    """Draw steps of all ranks."""
    plan, examples, times = given
    return draw_steps(times, plan.data, plan.axial, chance, examples, 200)


def row(steps: Steps, **more: Any) -> Row:
    """Return the figures of steps for JSON."""
    parts = {name: round(seconds, 5) for name, seconds in steps.parts.items()}
    return {**more, "mean": round(steps.mean, 5), "from": round(steps.percentile(5), 5),
            "to": round(steps.percentile(95), 5), "parts": parts}  # fmt: skip


def by_ranks(settings: str, plan: Plan, axial: Iterable[int]) -> dict[tuple[int, bool], tuple[Plan, RecordedStep, int]]:
    """Record a plan by its axial ranks, and by whether their messages are in graphs: of one rank there are none."""
    return {
        (ranks, graphs): recorded(settings, replace(plan, axial=ranks, graph=graphs or "auto"))
        for ranks in axial
        for graphs in ((False, True) if ranks > 1 else (False,))
    }


def on_devices(found: dict[tuple[int, bool], tuple[Plan, RecordedStep, int]], settings: str) -> list[Row]:
    """Return steps on more and more devices."""
    return [
        row(drawn(timed(one, devices)), settings=settings, axial=axial, devices=devices, graphs=graphs)
        for (axial, graphs), one in found.items()
        for devices in DEVICES
        if devices // axial <= EXAMPLES
    ]


def links(found: dict[str, tuple[Plan, RecordedStep, int]]) -> list[Row]:
    """Return steps of 128 devices over other links between nodes."""
    return [row(drawn(timed(one, 128, link)), way=name, link=link) for name, one in found.items() for link in LINKS]


def loaders(found: tuple[Plan, RecordedStep, int]) -> list[Row]:
    """Return steps of 256 devices by how many processes make examples, and how long each example takes."""
    given, rows = timed(found, 256), []
    for seconds in (0.5, 1.0, 2.0, 4.0):
        for workers in (1, 2, 3, 4, 6, 8, 12, 16):
            steps = drawn(given, Chance(workers=workers, example=seconds))
            rows.append(row(steps, example=seconds, workers=workers))
    return rows


def failures(step: float) -> list[Row]:
    """Return whole trainings of 256 devices by failures a day, and steps between two checkpoints."""
    rows = []
    for every in (100, 500, 2000):
        for number in (0, 1, 2, 5, 10, 20, 50):
            told = Interruptions(failures=number, restart=300, save_every=every, save=0.08)
            whole = whole_training(step, STEPS, told)
            rows.append({"save_every": every, "failures": number, "hours": whole.seconds / 3600})
    return rows


def simulated(tell: Callable[[str, list[Row]], None]) -> None:
    """Find all answers; tell: of each part, as it comes."""
    plan = Plan(data=EXAMPLES, precision="bf16", sizes=2)
    found = by_ranks("monomer", plan, AXIAL)
    alone = found[1, False]
    tell("failures", failures(drawn(timed(alone, 256)).mean))
    tell("loaders", loaders(alone))
    tell("devices", on_devices(found, "monomer"))
    tiered = replace(plan, data=128, sync=SyncConfig(strategy="hierarchical"))
    tell(
        "links",
        links({"axial 1": alone, "axial 1, hierarchical": recorded("monomer", tiered), "axial 8": found[8, True]}),
    )
    found.clear()
    tell("finetune", on_devices(by_ranks("finetune", plan, (1, 8)), "finetune"))


@mpl.rc_context(STYLE)
def draw(report: dict[str, Any], folder: Path, png: Path | None = None) -> None:
    """Write the pictures that there are answers for; png: where they also go to be looked at."""
    drawings = {"devices": _devices, "axial": _axial, "links": _links, "loaders": _loaders, "failures": _failures}
    for name, drawing in drawings.items():
        if NEEDS[name] not in report:
            continue
        figure = Figure(figsize=(5.2, 3.1), layout="constrained")
        drawing(figure.add_subplot(), report)
        for kind, where in (("svg", folder), ("png", png)):
            if where is not None:
                out = io.BytesIO()
                figure.savefig(out, format=kind, dpi=110, metadata={"Date": None} if kind == "svg" else None)
                (where / f"{name}.{kind}").write_bytes(out.getvalue())


NEEDS = {"devices": "devices", "axial": "finetune", "links": "links", "loaders": "loaders", "failures": "failures"}
COLORS = (BLUE, AMBER, INK, GREY)


def _lines(axes: Axes, rows: list[Row], by: str, x: str, y: Any, label: str) -> None:
    for color, value in zip(COLORS, dict.fromkeys(one[by] for one in rows)):
        some = [one for one in rows if one[by] == value]
        axes.plot([one[x] for one in some], [y(one) for one in some], "o-", color=color, markersize=3.5,
                  label=label.format(value))  # fmt: skip
    axes.legend(frameon=False, fontsize=8)
    axes.set_ylim(bottom=0)


def _devices(axes: Axes, report: dict[str, Any]) -> None:
    rows = [one for one in report["devices"] if one["graphs"] or one["axial"] == 1]
    _lines(axes, rows, "axial", "devices", lambda one: EXAMPLES / one["mean"], "axial {}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(DEVICES, [f"{n:,}" for n in DEVICES])
    axes.set_xlabel("H100s")
    axes.set_ylabel("examples a second")


def _axial(axes: Axes, report: dict[str, Any]) -> None:
    rows = []
    for settings, part in (("256 residues", "devices"), ("384 residues", "finetune")):
        for graphs in (False, True):
            same = [one for one in report[part] if one["devices"] == 256 * one["axial"]]
            some = [one for one in same if one["axial"] == 1 or one["graphs"] is graphs]
            base = next(one["mean"] for one in some if one["axial"] == 1)
            name = f"{settings}{', with graphs' if graphs else ''}"
            rows += [{"name": name, "axial": one["axial"], "gain": base / one["mean"]} for one in some]
    _lines(axes, rows, "name", "axial", lambda one: one["gain"], "{}")
    axes.set_xticks(AXIAL)
    axes.set_xlabel("ranks that share an example")
    axes.set_ylabel("times as fast as one")


def _links(axes: Axes, report: dict[str, Any]) -> None:
    rows = [{**one, "at": LINKS.index(one["link"])} for one in report["links"]]
    _lines(axes, rows, "way", "at", lambda one: one["mean"], "{}")
    axes.set_xticks(range(len(LINKS)), LINKS)
    axes.set_ylabel("seconds of a step, 128 H100s")


def _loaders(axes: Axes, report: dict[str, Any]) -> None:
    _lines(axes, report["loaders"], "example", "workers", lambda one: one["mean"], "{:g} s to make an example")
    axes.set_xlabel("processes of each rank that make examples")
    axes.set_ylabel("seconds of a step, 256 H100s")


def _failures(axes: Axes, report: dict[str, Any]) -> None:
    rows = report["failures"]
    least = min(one["hours"] for one in rows)
    gain = partial(lambda one: 100 * (one["hours"] / least - 1))
    _lines(axes, rows, "save_every", "failures", gain, "a checkpoint every {} steps")
    axes.set_xlabel("failures a day, 256 H100s")
    axes.set_ylabel("% longer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the answers go, as JSON")
    parser.add_argument("--png", type=Path, help="with --draw: a folder for the same as PNG")
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("JSON", "FOLDER"), help="draw answers; nothing else")
    arguments = parser.parse_args()
    if arguments.draw:
        draw(json.loads(arguments.draw[0].read_text(encoding="utf-8")), arguments.draw[1], arguments.png)
        return
    report: dict[str, Any] = {"what": __doc__.split("\n\n")[-1].strip(), "date": datetime.date.today().isoformat()}

    def tell(part: str, rows: list[Row]) -> None:
        report[part] = rows
        print(part, len(rows), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    simulated(tell)


if __name__ == "__main__":
    main()
