"""Read the log of training runs while they go on: how they stand in a few lines, and their curves as a page.

Nothing is asked of a run but the files in its folder, so one on another machine can be watched through a shared disk.
"""

import json
import re
import time
import tomllib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any, TypeGuard

from warpfold import settings
from warpfold.errors import UserError
from warpfold.files import writing
from warpfold.progress import as_time
from warpfold.report import figures
from warpfold.report.report import ReportPage, ReportTable, Section, write_report

FINE = 400  # points of a curve that is drawn
MADE_BY = "warpfold watch"  # near the beginning of a page that may be replaced
QUIET = 60.0  # seconds without a row, after which a run that usually writes more often is said to be quiet
RECENT = 200  # steps of which the speed is taken
MEAN_OF = 20  # steps of which the loss is said

# What is drawn, if it is there: the name in the log, and on the page.
OF_STEPS = {
    "loss": "loss",
    "lddt_ca": "lDDT-Cα of the crops trained on",
    "grad_norm": "gradient norm, before clipping",
    "learning_rate": "learning rate",
    "samples_per_second": "samples per second",
    "waiting": "share of time waiting for data",
}
HELD_OUT = {
    "loss": "loss of held-out examples",
    "lddt_ca": "lDDT-Cα of held-out examples",
    "interface_lddt": "lDDT-Cα between chains, held out",
    "dockq": "DockQ of held-out interfaces",
}

Points = list[tuple[float, float]]


class RunLog:
    """What a run has logged so far; `read` looks again.

    Errors: UserError for a folder that is none, or not a run's.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise UserError(f"{path}: no such folder; give the --out of `warpfold train`")
        if not any((self.path / name).is_file() for name in ("settings.toml", "metrics.jsonl")):
            inner = self.path / "run"
            cure = f"; did you mean {inner}?" if (inner / "settings.toml").is_file() else "; give one that has"
            raise UserError(f"{path}: not the folder of a training run, which has a metrics.jsonl{cure}")
        self.name = self.path.resolve().name
        self.settings: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []  # of steps
        self.validations: list[dict[str, Any]] = []  # of its log and of `warpfold validate`, in the order of steps
        self.ended_early = False
        self.odd = 0  # lines that are no rows of a log, and are left out
        self.read()

    def read(self) -> None:
        """Read the log, and the settings, with which a run may have been continued to another step."""
        path, given = self.path / "metrics.jsonl", self.path / "settings.toml"
        try:
            self.settings = tomllib.loads(given.read_text(encoding="utf-8")) if given.is_file() else {}
            train = self.settings.get("train", {})
            if not isinstance(train, dict) or type(train.get("steps", 0)) is not int:
                raise ValueError("train.steps is no whole number")
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read ({error.strerror}); check its permissions") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{given}: is damaged ({error}); restore it") from error
        logged, odd = _rows(path)
        evaluated, _ = _rows(self.path / "evaluations.jsonl")
        self.rows = [row for row in logged if row["kind"] == "step"]
        self.ended_early = bool(logged) and logged[-1]["kind"] == "end"
        # At one step a validation of some examples stands beside one of all.
        validations = [row for row in (*logged, *evaluated) if row["kind"] == "validation"]
        every = {(row["step"], "of" in row): row for row in validations}
        self.validations = [row for _, row in sorted(every.items())]
        self.odd = len(odd)
        if odd and not self.rows and not self.validations:
            raise UserError(f"{path}: line {odd[-1][:40]!r} is not of a run's log; give another folder")

    @property
    def step(self) -> int:
        """Return the steps done."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def steps(self) -> int:
        """Return the steps of the whole run."""
        return int(self.settings.get("train", {}).get("steps", 0)) or self.step

    @property
    def is_finished(self) -> bool:
        """Return whether all steps are done, and the last validation where the settings hold anything out.

        Or whether the run ended before, as no validation was better any more.
        """
        if self.ended_early:
            return True
        last = self.validations[-1]["step"] if self.validations else -1
        validated = last >= self.steps or not self.settings.get("train", {}).get("validation")
        return 0 < self.steps <= self.step and validated

    @property
    def news(self) -> float | None:
        """Return when the last row was written, in Unix seconds; None where no row says."""
        times = [rows[-1]["time"] for rows in (self.rows, self.validations) if rows and "time" in rows[-1]]
        return max(times) if times else None

    def seconds_left(self) -> float | None:
        """Return the seconds that the remaining steps take at the speed of the last ones, validations between them."""
        last = [row for row in self.rows[-RECENT:] if "time" in row]
        if len(last) < 2 or last[-1]["step"] == last[0]["step"]:
            return None
        each = (last[-1]["time"] - last[0]["time"]) / (last[-1]["step"] - last[0]["step"])
        return max(each, 0.0) * (self.steps - self.step)

    def state(self, now: float | None = None) -> str:
        """Return in words what the run does, as far as its files say."""
        if self.is_finished:
            return "finished"
        if self.news is None:
            return "no steps yet" if not self.rows else ""
        silence = (time.time() if now is None else now) - self.news
        usual = self.seconds_left() or 0.0
        each = usual / max(self.steps - self.step, 1)
        if silence > max(QUIET, 10 * each):
            return f"no news for {as_time(silence)}"
        return f"ETA {as_time(usual)}" if usual else "running"

    def curve(self, name: str) -> Points:
        """Return a quantity of the steps: "loss", or "terms/fape", where it is a number."""
        outer, _, inner = name.partition("/")
        found = ((row["step"], row.get(outer, {}).get(inner) if inner else row.get(outer)) for row in self.rows)
        return [(step, value) for step, value in found if is_number(value)]

    def held_out(self, name: str = "lddt_ca") -> Points:
        """Return a quantity of the validations that were whole."""
        found = ((row["step"], row.get(name)) for row in self.validations if "of" not in row)
        return [(step, value) for step, value in found if is_number(value)]


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value of a row is a finite number, of a size that sums and axes can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100


def is_row(row: Any) -> bool:
    """Return whether this is a row of a run's log, as far as it is read here."""
    if not isinstance(row, dict) or type(row.get("step")) is not int or not 0 <= row["step"] < 2**53:
        return False
    needed = ("samples_per_second", "waiting_so_far") if row.get("kind") == "step" else ()
    numbers = all(is_number(row.get(name)) for name in (*needed, *(name for name in ("time", "of") if name in row)))
    kinds = isinstance(row.get("terms", {}), dict) and isinstance(row.get("examples", []), list | dict)
    return isinstance(row.get("kind"), str) and numbers and kinds and ("of" not in row or "examples" in row)


def _rows(path: Path) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Return the rows of a log, and the lines that are none; the last line may be half there."""
    if not path.is_file():
        return [], []
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    rows: list[dict[str, Any]] = []
    odd: list[bytes] = []
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if is_row(row):
            rows.append(row)
        else:
            odd.append(line)
    return rows, odd


def open_runs(paths: Sequence[Path]) -> list[RunLog]:
    """Open the logs of runs, each with a name that no other has.  Errors: UserError as of `RunLog`."""
    runs = [RunLog(path) for path in dict.fromkeys(paths)]
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.path)
    return runs


def differing(runs: Sequence[RunLog]) -> list[tuple[str, str]]:
    """Compare the settings of each run with those of the first: the run's name, and its differences."""
    first = runs[0].settings
    pairs = [(run.name, settings.differences(run.settings, first)) for run in runs[1:]]
    return [(name, "; ".join(what)) for name, what in pairs if what]


def left_out(runs: Sequence[RunLog]) -> list[str]:
    """Return warnings about runs whose logs have lines that are no rows."""
    lines = [
        (run, "1 line of metrics.jsonl is" if run.odd == 1 else f"{run.odd} lines of metrics.jsonl are") for run in runs
    ]
    return [f"{run.name}: {what} damaged, and left out" for run, what in lines if run.odd]


def means(points: Points, bins: int, low: float, high: float) -> Points:
    """Return the means of points in so many equal bins from low to high, those that are empty left out."""
    sums: dict[int, list[float]] = {}
    for x, y in points:
        place = min(int((x - low) / (high - low or 1.0) * bins), bins - 1)
        one = sums.setdefault(place, [0.0, 0.0, 0.0])
        one[0], one[1], one[2] = one[0] + x, one[1] + y, one[2] + 1
    return [(x / count, y / count) for _, (x, y, count) in sorted(sums.items())]


def as_text(runs: Sequence[RunLog], now: float | None = None) -> str:
    """Return the state of runs, two lines for each, and the differences of their settings."""
    lines = []
    for run in runs:
        state, numbers = run.state(now), _numbers(run)
        lines.append(f"{run.name}  step {run.step:,} of {run.steps:,}{f'  {state}' if state else ''}")
        lines += ["  ".join(f"{name} {value}".strip() for name, value in numbers.items())] if numbers else []
    return "\n".join([*lines, *(f"{name}: {what}" for name, what in differing(runs)), *left_out(runs)])


def page(runs: Sequence[RunLog], every: float) -> ReportPage:
    """Return the curves of runs, all in one figure each; every: seconds until the page reloads itself."""
    names = ["loss", "held-out lDDT-Cα", "samples/s", "waiting"]
    rows = []
    for run in runs:
        numbers = _numbers(run)
        rows.append([run.name, f"{run.step:,} of {run.steps:,}", *(numbers.get(n, "-") for n in names), run.state()])
    of_steps = [(title, [(run.name, run.curve(name)) for run in runs], False) for name, title in OF_STEPS.items()]
    held_out = [(title, [(run.name, run.held_out(name)) for run in runs], True) for name, title in HELD_OUT.items()]
    drawn = [*of_steps[:1], *held_out, *of_steps[1:]]
    terms = dict.fromkeys(term for run in runs for row in run.rows[:1] for term in row.get("terms", {}))
    drawn += [(f"loss term {t}", [(run.name, run.curve(f"terms/{t}")) for run in runs], False) for t in terms]
    pictures = []
    for title, curves, dots in drawn:
        fine = [(name, means(points, FINE, 0.0, max(run.steps for run in runs))) for name, points in curves]
        some = [
            figures.Curve(name, [x for x, _ in points], [y for _, y in points], dots) for name, points in fine if points
        ]
        pictures += [(figures.draw_curves(some, title), "")] if some else []
    goes_on = not all(run.is_finished for run in runs)
    differs = [f"{name} differs from {runs[0].name}: {what}." for name, what in differing(runs)]
    again = f", again every {max(int(every), 1)} s while `warpfold watch` runs" if goes_on else ""
    return ReportPage(
        title=", ".join(run.name for run in runs),
        lead=" ".join([*differs, *left_out(runs)]),
        sections=[
            Section("Runs", table=ReportTable(["run", "step", *names, "state"], rows)),
            Section("Curves", figures=pictures),
            *(card for run in runs if (card := _card(run)) is not None),
        ],
        footer=[f"{', '.join(str(run.path) for run in runs)}; drawn {datetime.now():%Y-%m-%d %H:%M:%S}{again}"],
        made_by=MADE_BY,
        reload=max(int(every), 1) if goes_on else None,
    )


def _card(run: RunLog) -> Section | None:
    """Return what the card of a finished run says of it: data, parameters, machine, and the command that repeats it."""
    try:
        head, _, rest = (run.path / "card.md").read_text(encoding="utf-8").partition("\n## ")
    except (OSError, ValueError):
        return None
    rows = [found.groups() for found in re.finditer(r"^\| (\S.*?) \| (.*) \|$", head.replace("`", ""), re.MULTILINE)]
    command = re.search(r"```bash\n(.*?)\n```", rest, re.DOTALL)
    return Section(
        f"Card of {run.name}", table=ReportTable(["", ""], [*rows, ("made by", command[1] if command else "")])
    )


def write_page(path: Path, runs: Sequence[RunLog], every: float) -> None:
    """Write the page, whole or not at all.  Errors: UserError where anything but an earlier page is there."""
    if path.exists():
        with writing(path):
            begin = path.read_bytes()[:400] if path.is_file() else b""
        if f'content="{MADE_BY}"'.encode() not in begin:
            raise UserError(f"{path}: exists already, and is no page of `warpfold watch`; name another file")
    write_report(path, page(runs, every))


def _numbers(run: RunLog) -> dict[str, str]:
    """Return the numbers of the last step and validation, for people."""
    found = {}
    if run.rows:
        recent = [loss for _, loss in run.curve("loss")[-MEAN_OF:]]
        found["loss"] = f"{fmean(recent):.3f}" if recent else "-"
    if run.validations:
        row = run.validations[-1]
        of = f"{len(row['examples'])} of {row['of']} examples, " if "of" in row else ""
        score = f"{row['lddt_ca']:.3f}" if is_number(row.get("lddt_ca")) else "-"
        docked = f", DockQ {row['dockq']:.3f}" if is_number(row.get("dockq")) else ""
        found["held-out lDDT-Cα"] = f"{score}{docked} ({of}step {row['step']:,})"
    if run.rows:
        found["samples/s"] = f"{run.rows[-1]['samples_per_second']:.3g}"
        found["waiting"] = f"{run.rows[-1]['waiting_so_far']:.1%}"
    return found
