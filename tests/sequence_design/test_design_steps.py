"""Run designs with a scripted model, and check every step, file and figure of the report against its definition."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import save

from tests.data.structure.test_awkward_files import pdb_chain, plain
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.write import write_mmcif
from warpfold.errors import UserError
from warpfold.files import sha256
from warpfold.geometry.residue import RESTYPES
from warpfold.prediction.predictor import Gradient, Predictor
from warpfold.report import figures
from warpfold.report.report import ReportTable
from warpfold.sequence_design.losses import LossShape, LossWeights
from warpfold.sequence_design.page import design_page
from warpfold.sequence_design.run import Problem, first_logits, one_hot, run_design, updated_logits
from warpfold.sequence_design.settings import (
    DesignSettings,
    Stage,
    StepSettings,
    fixed_letters,
    load_design,
)
from warpfold.sequence_design.state import StartState, read_rows
from warpfold.settings import to_dict

# Losses of the first eight steps are those of soft sequences, and lower. Two hard steps have the lowest loss.
LOSSES = [0.1 * step for step in range(12)] + [7.0, 4.0, 4.0, 5.0, 6.0, 9.0, 8.0, 7.0]
SETTINGS = DesignSettings(
    chains={"C": "MKX", "A,D": "-W---", "B": 3},
    recycles=2, through="mean", spread=0.5, templates=("C=known.cif:A",),
    loss=LossWeights(plddt=1.0, symmetry=0.25),
    stages=(
        Stage(steps=8, soft=(0.0, 0.5), temperature=(2.0, 1.0)),
        Stage(steps=4, hard=0.5, temperature=(0.5, 0.1), weights={"plddt": 3.0}),
        Stage(steps=8, hard=1.0, soft=(0.9, 0.8), temperature=(0.3, 0.2), rate=0.5, weights={"ptm": 0.5}),
    ),
)  # fmt: skip


class Stopped(Exception):
    """The scripted model has been called as often as the test allows."""


@dataclass
class Script:
    """A predictor with scripted results, which follow from the start and the number of its step.

    calls: the arguments of each call, with the weights of the losses at that time. limit: the number of calls.
    """

    losses: list[float] = field(default_factory=lambda: LOSSES)
    limit: int = 1000
    iptm: float | None = 0.25
    chain_gap: int | None = None
    precision: str = "fp32"
    calls: list[dict[str, Any]] = field(default_factory=list)
    model: Any = field(default_factory=lambda: SimpleNamespace(config=SimpleNamespace(heads=SimpleNamespace(pae=True))))
    steps: dict[str, int] = field(default_factory=dict)

    def letters(self, step: int) -> dict[str, str]:
        """Return the letters of the designed keys at a step, counted from 0."""
        return {"A,D": f"{RESTYPES[step % 20]}WAAA", "B": f"GG{RESTYPES[(step + 7) % 20]}"}

    def grad(self, step: int) -> dict[str, np.ndarray]:
        draw = np.random.default_rng(step)
        grads = {"A,D": draw.normal(size=(5, 20)), "B": 100 * draw.normal(size=(3, 20))}
        grads["A,D"][1] = 0
        return grads

    def gradient(self, logits: Mapping[str, np.ndarray], losses: Any, *, name: str, **more: Any) -> Gradient:
        if len(self.calls) == self.limit:
            raise Stopped
        given = {key: np.array(x) for key, x in logits.items()}
        self.calls.append({"logits": given, "weights": losses.weights, "name": name, **more})
        step = self.steps.get(name, 0)
        self.steps[name] = step + 1
        # The last call of a start folds the result.
        is_last = step == len(self.losses)
        letters = self.letters(step)
        if is_last:
            letters = {key: "".join(RESTYPES[i] for i in x.argmax(-1)) for key, x in given.items()}
        sequences = {"A": letters["A,D"], "B": letters["B"], "C": "MKX", "D": letters["A,D"]}
        ends = np.cumsum([len(x) for x in sequences.values()]).tolist()
        prediction = SimpleNamespace(
            sequence="".join(sequences.values()),
            spans={id: slice(end - len(x), end) for (id, x), end in zip(sequences.items(), ends)},
            mean_plddt=50.0 + step, ptm=0.5, iptm=self.iptm, plddt=np.arange(16) + 0.123,
            mmcif=lambda: write_mmcif(name, chains_of(sequences)),
        )  # fmt: skip
        loss = 3.5 - 0.5 * int(name[-1]) if is_last else self.losses[step]
        terms = {name: float(loss) for name, weight in vars(losses.weights).items() if weight}
        return Gradient(loss, terms, self.grad(step), cast(Any, prediction))


def chains_of(sequences: Mapping[str, str], spread: float = 3.0) -> list[Chain]:
    """Build chains with all atoms of each residue at one point, which is not the origin."""
    chains, start = [], 1
    for id, sequence in sequences.items():
        n = len(sequence)
        points = spread * np.arange(start, start + n)[:, None] * np.ones(3)
        positions = np.broadcast_to(points[:, None], (n, 37, 3)).astype(np.float32)
        chains.append(Chain(id, sequence, positions, np.ones((n, 37), np.float32), np.arange(n), ("",) * n))
        start += n
    return chains


@pytest.fixture(autouse=True)
def figures_without_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the figures of reports, which take most of the time."""
    monkeypatch.setattr(figures, "draw_curves", lambda curves, y, x_label: "<svg/>")
    monkeypatch.setattr(figures, "draw_logo", lambda shares: "<svg/>")


def run(script: Script, out: Path, settings: DesignSettings = SETTINGS, **more: Any) -> dict[str, Any]:
    return run_design(cast(Predictor, script), settings, out, **more)


def written(out: Path) -> dict[str, bytes]:
    """Return the files of a run, by name."""
    files = {str(path.relative_to(out)): path for path in out.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name != "lock"}


def softmax(x: np.ndarray) -> np.ndarray:
    shares = np.exp(x - x.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def settings_of_call(step: int, start: str, seed: int) -> dict[str, Any]:
    """Return the arguments of the scripted model at a step, without its logits."""
    current = SETTINGS.at(step)
    return {
        "weights": current.weights, "name": start, "fixed": {"C": "MKX", "A": "-W---", "D": "-W---", "B": "---"},
        "templates": ["C=known.cif:A"], "soft": current.soft, "temperature": current.temperature,
        "hard": current.hard, "recycles": 2, "through": "mean", "seed": seed,
    }  # fmt: skip


def test_every_step_follows_from_the_one_before_it(tmp_path: Path) -> None:
    script, told = Script(), list[tuple[float, int, str]]()
    summary = run(
        script, tmp_path / "a/out", starts=2, seed=5, params="abc", progress=lambda *about: told.append(about)
    )  # fmt: skip
    names = ["design_0001", "design_0002"]
    assert told == [(i, 40, names[i // 20]) for i in range(40)] + [(40, 40, "")]
    out, calls = tmp_path / "a/out", iter(script.calls)
    for number, name in enumerate(names, 1):
        logits = first_logits({"A,D": 5, "B": 3}, 0.5, 5, name)
        logos, rows = {}, []
        for step in range(20):
            call, current = next(calls), SETTINGS.at(step)
            for key, x in logits.items():
                np.testing.assert_array_equal(call["logits"].pop(key), x)
            assert call == {"logits": {}} | settings_of_call(step, name, 5)
            # Eight logos at equal distances, with fixed letters as such
            if step in (0, 2, 5, 8, 10, 13, 16, 19):
                shares = {key: softmax(x.astype(float) / current.temperature) for key, x in logits.items()}
                for key, x in shares.items():
                    shares[key] = x + current.hard * (np.eye(20)[x.argmax(-1)] - x)
                shares["A,D"][1] = np.eye(20)[RESTYPES.index("W")]
                logos[step] = np.concatenate([shares["A,D"], shares["B"]])
            terms = {loss: LOSSES[step] for loss, weight in vars(current.weights).items() if weight}
            rows.append({
                "stage": current.stage, "soft": current.soft, "temperature": current.temperature,
                "hard": current.hard, "rate": current.rate, "step": step, "loss": LOSSES[step], "terms": terms,
                "plddt": 50.0 + step, "letters": script.letters(step),
            })  # fmt: skip
            grads = script.grad(step)
            # The step has the length rate * sqrt(free residues).
            for key, free in (("A,D", 4), ("B", 3)):
                scaled = grads[key] * math.sqrt(free) / np.linalg.norm(grads[key])
                logits[key] = (logits[key] - current.rate * scaled).astype(np.float32)
        assert read_rows(out / f"starts/{name}.jsonl") == rows
        state = StartState.read(out / f"starts/{name}.safetensors")
        assert state is not None
        # The first of two equal losses of hard sequences is the best one.
        assert (state.step, state.best, state.letters) == (20, 4.0, script.letters(13))
        assert state.logits.keys() == logits.keys()
        for key, x in logits.items():
            np.testing.assert_array_equal(state.logits[key], x)
        assert state.logos is not None
        assert sorted(state.logos) == sorted(logos)
        for step, shares in logos.items():
            assert state.logos[step].dtype == np.float32
            np.testing.assert_allclose(state.logos[step], shares, atol=1e-6)
        letters, call = script.letters(13), next(calls)
        for key, x in call.pop("logits").items():
            np.testing.assert_array_equal(x, one_hot(letters[key]))
        assert call == settings_of_call(19, name, 5) | {"soft": 1.0, "hard": 1.0}
        loss = 3.5 - 0.5 * number
        chains = {"A": letters["A,D"], "B": letters["B"], "C": "MKX", "D": letters["A,D"]}
        entry = {
            "name": name, "loss": loss, "terms": {"plddt": loss, "ptm": loss, "symmetry": loss}, "mean_plddt": 70.0,
            "ptm": 0.5, "iptm": 0.25, "sequence": ":".join(chains.values()), "chains": chains, "designed": letters,
            "plddt": [i + 0.12 for i in range(16)],
        }  # fmt: skip
        assert (out / f"designs/{name}.json").read_text() == json.dumps(entry, indent=1)
        assert (out / f"designs/{name}.cif").read_text() == write_mmcif(name, chains_of(chains))
        # The second start has the lower loss.
        assert summary["designs"][2 - number] == entry
    about = {
        "settings": to_dict(SETTINGS), "seed": 5, "params": "abc", "precision": "fp32", "target": "",
    }  # fmt: skip
    about = json.loads(json.dumps(about))
    assert (out / "run.json").read_text() == json.dumps(about, indent=1)
    assert json.loads(json.dumps(summary)) == about | {"starts": 2, "designs": summary["designs"]}
    assert (out / "design.json").read_text() == json.dumps(summary, indent=1) + "\n"
    line = summary["designs"][0]["sequence"]
    assert (out / "designs.fasta").read_text() == f">design_0002\n{line}\n>design_0001\n{line}\n"
    assert (out / "designs.csv").read_text().split() == [
        "name,loss,mean_plddt,ptm,iptm,loss.plddt,loss.ptm,loss.symmetry,sequence",
        f"design_0002,2.5,70.0,0.5,0.25,2.5,2.5,2.5,{line}",
        f"design_0001,3.0,70.0,0.5,0.25,3.0,3.0,3.0,{line}",
    ]
    ends = ("starts", "jsonl"), ("starts", "safetensors"), ("designs", "cif"), ("designs", "json")
    files = {f"{folder}/{name}.{end}" for folder, end in ends for name in names}
    assert set(written(out)) == files | {"run.json", "design.json", "designs.fasta", "designs.csv", "report.html"}
    # A finished start is not run again.
    again = Script()
    assert run(again, out, starts=2, seed=5, params="abc") == summary
    assert not again.calls


@pytest.mark.parametrize("limit", [0, 1, 9, 12, 13, 20])
def test_a_stopped_run_ends_with_the_same_files(tmp_path: Path, limit: int) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    settings = replace(SETTINGS, stages=SETTINGS.stages[1:])
    losses = LOSSES[8:]
    run(Script(losses), whole, settings, starts=2)
    script = Script(losses, limit=limit)
    with pytest.raises(Stopped):
        run(script, stopped, settings, starts=2)
    # Killed between the two writes of a step, and within a line.
    name = f"design_{limit // 13 + 1:04}"
    done = limit % 13
    journal = stopped / f"starts/{name}.jsonl"
    assert len(read_rows(journal)) == min(done, 12)
    with journal.open("a") as file:
        file.write(json.dumps({"step": done, "loss": -9.0, "terms": {}, "hard": 1.0, "letters": {}}) + '\n{"st')
    (stopped / "starts/.design_0001.jsonl.x1").touch()
    (stopped / ".run.json.x1").touch()
    # The scripted model counts the steps that it has not forgotten.
    rest = Script(losses, steps={name: done} if done else {})
    run(rest, stopped, settings, starts=2)
    assert len(rest.calls) == 26 - limit
    for hidden in (".run.json.x1", "starts/.design_0001.jsonl.x1"):
        (stopped / hidden).unlink(missing_ok=True)
    assert written(stopped) == written(whole)


def test_without_a_hard_step_the_last_sequence_is_folded(tmp_path: Path) -> None:
    settings = replace(SETTINGS, templates=(), stages=(Stage(steps=2, hard=0.9),))
    script = Script([1.0, 2.0], iptm=None, chain_gap=200, precision="bf16")
    (design,) = run(script, tmp_path / "out", settings)["designs"]
    state = StartState.read(tmp_path / "out/starts/design_0001.safetensors")
    assert state is not None
    assert (state.best, state.letters) == (None, None)
    letters = {key: "".join(RESTYPES[i] for i in x.argmax(-1)) for key, x in state.logits.items()}
    letters["A,D"] = letters["A,D"][:1] + "W" + letters["A,D"][2:]
    assert design["designed"] == letters
    assert design["chains"] == {"A": letters["A,D"], "B": letters["B"], "C": "MKX", "D": letters["A,D"]}
    assert design["iptm"] is None
    assert {call["templates"] for call in script.calls} == {None}
    # By default there is one start with seed 0.
    assert {(call["seed"], call["name"]) for call in script.calls} == {(0, "design_0001")}
    about = json.loads((tmp_path / "out/run.json").read_text())
    assert {key: about[key] for key in about if key != "settings"} == {
        "seed": 0, "params": "", "precision": "bf16", "target": "", "chain_gap": 200}  # fmt: skip


def test_a_forced_run_leaves_nothing_of_the_one_before(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for damaged in (False, True):
        run(Script(), out, starts=2)
        if damaged:
            (out / "run.json").write_text("[1")
            with pytest.raises(UserError, match=r"run\.json: damaged"):
                run(Script(), out, starts=2)
        with pytest.raises(Stopped):
            run(Script(limit=0), out, seed=1, force=True)
        assert set(written(out)) == {"run.json", "starts/design_0001.jsonl"}
        assert json.loads((out / "run.json").read_text())["seed"] == 1
        run(Script(), out, seed=0, force=True)
        (out / "run.json").unlink()
        with pytest.raises(UserError, match=r"holds design\.json, which WarpFold did not write"):
            run(Script(), out)
        for file in ("design.json", "report.html", "designs.fasta", "designs.csv"):
            (out / file).unlink()
        # Without run.json, the files in the folders may be those of another program.
        with pytest.raises(UserError, match=r"starts: holds design_0001\.jsonl, which WarpFold did not write"):
            run(Script(), out)
        for folder in ("starts", "designs"):
            for file in (out / folder).iterdir():
                file.unlink()
        assert len(run(Script(), out)["designs"]) == 1
    other = replace(SETTINGS, spread=0.25)
    with pytest.raises(UserError) as refused:
        run(Script(), out, other)
    advice = "Use a new folder, or replace it with --force."
    assert str(refused.value) == f"{out}: holds another run (settings.spread: 0.25, not 0.5). {advice}"


DAMAGES: list[tuple[dict[str, Any], str]] = [
    ({"name": "design_0002"}, "inconsistent values"),
    ({"sequence": "WWWWW:GGG:MKX:WWWW"}, "inconsistent values"),
    ({"sequence": "WWWWW:GGG:MKX:WWWWJ"}, "inconsistent values"),
    ({"loss": math.nan}, "inconsistent values"),
    ({"mean_plddt": math.inf}, "inconsistent values"),
    ({"ptm": math.inf}, "Out of range float values are not JSON compliant"),
    ({"terms": {"plddt": math.nan}}, "inconsistent values"),
    ({"loss": "much"}, "could not convert"),
    ({"terms": 3}, "no attribute"),
    ({"iptm": ...}, "'iptm'"),
    ({"chains": ..., "designed": ...}, "('chains', 'designed')"),
]


def test_damaged_designs_are_refused_and_equal_losses_sorted_by_name(tmp_path: Path) -> None:
    out = tmp_path / "out"
    entry = run(Script(), out)["designs"][0]
    for changes, reason in DAMAGES:
        damaged = {key: value for key, value in (entry | changes).items() if value is not ...}
        (out / "designs/design_0001.json").write_text(json.dumps(damaged))
        with pytest.raises(UserError) as refused:
            run(Script(), out)
        text = str(refused.value)
        assert text.startswith(f"{out}/designs/design_0001.json: damaged (")
        assert reason in text
        assert text.endswith("). Remove it and run the command again.")
    chains = {"A": f"{RESTYPES}X"}
    everything = {"sequence": chains["A"], "chains": chains, "designed": chains, "plddt": [1.0] * 21}
    for name, loss in (("design_0003", 2.5), ("design_0002", 1.5), ("design_0001", 2.5)):
        (out / f"designs/{name}.json").write_text(json.dumps(entry | everything | {"name": name, "loss": loss}))
        (out / f"designs/{name}.cif").write_text(write_mmcif(name, chains_of(chains)))
        for end in ("jsonl", "safetensors"):
            (out / f"starts/{name}.{end}").write_bytes((out / f"starts/design_0001.{end}").read_bytes())
    found = run(Script(), out)
    assert [one["name"] for one in found["designs"]] == ["design_0002", "design_0001", "design_0003"]
    assert found["starts"] == 1


def test_letters_as_logits_and_steps_without_a_gradient() -> None:
    np.testing.assert_array_equal(one_hot("VXA"), np.eye(20)[[19, 0, 0]])
    logits = np.arange(60, dtype=np.float32).reshape(3, 20)
    assert updated_logits(logits, np.zeros((3, 20)), 0.5) is not logits
    np.testing.assert_array_equal(updated_logits(logits, np.zeros((3, 20)), 0.5), logits)
    grad = np.zeros((3, 20))
    grad[0, 3], grad[2, 5] = 0.003, -0.004
    expected = logits - 0.5 * math.sqrt(2) / 0.005 * grad
    np.testing.assert_allclose(updated_logits(logits, grad, 0.5), expected, rtol=1e-6)


# Settings of steps


def test_each_step_has_the_values_of_its_schedule() -> None:
    for step in range(20):
        stage, first = (0, 0) if step < 8 else (1, 8) if step < 12 else (2, 12)
        settings = SETTINGS.stages[stage]
        done = (step - first + 1) / settings.steps
        soft = settings.soft[0] * (1 - done) + settings.soft[1] * done
        temperature = settings.temperature[1] + (settings.temperature[0] - settings.temperature[1]) * (1 - done) ** 2
        rate = settings.rate * (1 - soft + soft * temperature)
        weights = replace(SETTINGS.loss, **[{}, {"plddt": 3.0}, {"ptm": 0.5}][stage])
        found = SETTINGS.at(step)
        assert found == StepSettings(stage, found.soft, found.temperature, settings.hard, found.rate, weights)
        assert (found.soft, found.temperature, found.rate) == pytest.approx((soft, temperature, rate), rel=1e-12)
    assert SETTINGS.steps == 20
    with pytest.raises(ValueError, match="step 20 is after the last stage"):
        SETTINGS.at(20)


def test_settings_have_their_defaults() -> None:
    assert Stage(steps=1) == Stage(
        steps=1, soft=(1.0, 1.0), temperature=(1.0, 1.0), hard=0.0, rate=0.1, weights={})  # fmt: skip
    assert DesignSettings() == DesignSettings(
        chains={}, target="", templates=(), recycles=0, through="last", spread=0.01, loss=LossWeights(),
        shape=LossShape(), stages=())  # fmt: skip
    assert (fixed_letters(3), fixed_letters("ac-")) == ("---", "AC-")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"stages": [{"steps": 0}]}, "steps = 0, rate = 0.1: steps must be at least 1 and rate above 0"),
        ({"stages": [{"steps": 1, "rate": 0.0}]}, "steps = 1, rate = 0.0: steps must be at least 1 and rate above 0"),
        *(
            ({"stages": [{"steps": 1, **stage}]}, "soft and hard must be between 0 and 1, and temperature above 0")
            for stage in (
                {"soft": [-0.1, 1.0]}, {"soft": [0.5, 1.1]}, {"hard": 1.1}, {"hard": -0.1},
                {"temperature": [1.0, 0.0]}, {"temperature": [0.0, 1.0]},
            )
        ),
        ({"stages": [{"steps": 1, "weights": {"plddt": 1.0, "pldt": 1.0}}]},
         f"weights: pldt is not a loss; known: {', '.join(vars(LossWeights()))}"),
        ({"recycles": -1}, "recycles = -1, spread = 0.01: must not be negative"),
        ({"spread": -0.5}, "recycles = 0, spread = -0.5: must not be negative"),
        ({"spread": math.nan}, "spread = nan: a finite number expected"),
        *(({"chains": {"A": value}}, f"chains.A = {value!r}: must be a number of residues, or letters")
          for value in (0, -1, "")),
        ({"stages": []}, "settings: has no stages. Add [[stages]] with their steps."),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as refused:
        load_design({"stages": [{"steps": 1}]} | values)
    assert str(refused.value).endswith(text)


def test_settings_at_their_limits_are_accepted(tmp_path: Path) -> None:
    stage: dict[str, Any] = {
        "steps": 1, "rate": 1e-3, "soft": [0.0, 1.0], "hard": 1.0, "temperature": [1e-3, 0.5], "weights": {"fape": 1.0},
    }  # fmt: skip
    values = {"stages": [stage], "recycles": 0, "spread": 0.0, "chains": {"A": 1, "B": "M"}}
    design = load_design(values)
    assert (design.recycles, design.spread, design.chains) == (0, 0.0, {"A": 1, "B": "M"})
    assert design.stages == (Stage(**stage | {"soft": (0.0, 1.0), "temperature": (1e-3, 0.5)}),)
    file = tmp_path / "own.toml"
    file.write_text("recycles = 1\n[[stages]]\nsteps = 4\n")
    assert load_design(file) == DesignSettings(recycles=1, stages=(Stage(steps=4),))
    assert load_design(str(file), ["recycles=3"]).recycles == 3
    with pytest.raises(UserError) as refused:
        load_design("bindr")
    assert str(refused.value) == (
        "bindr: no such settings file. Pass a path or a preset (binder, fixed_backbone, hallucination).")  # fmt: skip


# Chains and targets


def test_a_problem_has_the_chains_of_the_settings_or_of_the_target(tmp_path: Path) -> None:
    settings = replace(SETTINGS, chains=SETTINGS.chains | {"E , F": "a-"})
    problem = Problem.of(settings, pae=True)
    assert problem.free == {"A,D": 5, "B": 3, "E , F": 2}
    assert problem.fixed == {"C": "MKX", "A": "-W---", "D": "-W---", "B": "---", "E": "A-", "F": "A-"}
    assert problem.losses.target is None
    file = tmp_path / "target.cif"
    file.write_text(write_mmcif("target", chains_of({"A": "GMV", "B": "MK"})))
    free = replace(settings, chains={}, target=str(file), loss=LossWeights(fape=1.0))
    for chains in ({}, {"A": 3, "C": 1, "B": "M-"}):
        known = Problem.of(replace(free, chains=chains, stages=(Stage(steps=1),)), pae=False)
        assert known.free == ({"A": 3, "C": 1, "B": 2} if chains else {"A": 3, "B": 2})
        assert known.fixed == ({"A": "---", "C": "-", "B": "M-"} if chains else {"A": "---", "B": "--"})
        assert known.losses.target is not None
        # The chains of a design are in the order of their names.
        mask = known.losses.target.labels["backbone_affine_mask"].tolist()
        assert mask == [1.0] * 5 + [0.0] * (len(mask) - 5)
    run_of_target = replace(free, loss=LossWeights(plddt=1.0), chains=SETTINGS.chains, target=str(file))
    with pytest.raises(UserError, match="target: chain A has 3 residues, the design's 5"):
        run(Script(), tmp_path / "out", run_of_target)


def test_the_digest_of_the_target_identifies_a_run(tmp_path: Path) -> None:
    file = tmp_path / "target.cif"
    file.write_text(write_mmcif("target", chains_of({"B": "GMV"})))
    run(Script(), tmp_path / "out", replace(SETTINGS, target=str(file)))
    assert json.loads((tmp_path / "out/run.json").read_text())["target"] == sha256(file)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"chains": {}}, "chains: there are none. Pass their lengths, such as --set chains.A=100, or a target."),
        ({"chains": {"A": "MK", "B": "W"}}, 'chains: all residues are fixed. Write "-" for the residues to design.'),
        ({"chains": {"A": 3, "B": 3}}, "stage 1: loss.symmetry = 0.25: no chain has copies. "
         'Name copies "A,B", or set it to 0.'),
        ({"loss": LossWeights(plddt=1.0)},
         "stage 3: loss.ptm = 0.5: these parameters have no head for aligned errors. Use others, or set it to 0."),
    ],
)  # fmt: skip
def test_problems_that_cannot_be_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as refused:
        Problem.of(replace(SETTINGS, **changes), pae=False)
    assert str(refused.value) == text


def test_a_target_with_residues_in_no_chain_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "target.pdb"
    file.write_text("SEQRES   1 A    4  GLY ALA SER THR\n" + pdb_chain(plain("GASTW"), "A") + "TER\nEND\n")
    with pytest.raises(UserError, match=re.escape(f"{file}: has residues with N, CA and C that are in no chain: 1")):
        Problem.of(replace(SETTINGS, target=str(file)), pae=True)


# The state of a start


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    path, logits = tmp_path / "a.safetensors", {"A,D": np.ones((2, 20), np.float32)}
    assert StartState.read(path) is None
    state = StartState(logits)
    assert (state.step, state.best, state.letters, state.logos) == (0, None, None, None)
    state.write(path)
    found = StartState.read(path)
    assert found is not None
    assert (found.step, found.best, found.letters, found.logos) == (0, None, None, {})
    np.testing.assert_array_equal(found.logits["A,D"], logits["A,D"])
    # A file without a checksum is that of another program.
    path.write_bytes(save({"logits.A": logits["A,D"]}, {"state": json.dumps({"step": 1})}))
    with pytest.raises(UserError, match=r"damaged \(it does not fit its checksum\)\. Remove it to repeat this start"):
        StartState.read(path)


def test_rows_are_those_of_whole_lines_in_order(tmp_path: Path) -> None:
    path = tmp_path / "design_0001.jsonl"
    assert read_rows(path) == []
    rows = [{"step": i, "loss": 1.5, "terms": {}, "hard": 0.0, "letters": {}, "more": i} for i in range(3)]
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines) + '{"step": 3, "loss": 2}')
    assert read_rows(path) == rows
    assert read_rows(path, 2) == rows[:2]
    assert read_rows(path, 0) == []
    bad: list[Any] = [
        [rows[0], rows[2]],
        [rows[1]],
        [rows[0] | {"terms": 3}],
        [rows[0] | {"loss": math.inf}],
        ["text"],
        *(
            [rows[0], {key: x for key, x in rows[1].items() if key != missing}]
            for missing in ("step", "loss", "terms", "hard", "letters")
        ),
    ]
    for damaged in bad:
        path.write_text("".join(json.dumps(row) + "\n" for row in damaged))
        with pytest.raises(UserError) as refused:
            read_rows(path)
        assert str(refused.value).startswith(f"{path}: damaged (")
        assert str(refused.value).endswith(f"). Remove {tmp_path}/design_0001.* to repeat this start.")


# The report


@pytest.mark.parametrize("is_hard", [True, False])
def test_the_report_shows_the_best_designs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_hard: bool) -> None:
    (tmp_path / "designs").mkdir()
    (tmp_path / "starts").mkdir()
    designs = []
    for number in range(1, 8):
        name = f"design_{number:04}"
        chains = {"A": "MKV", "B": "GW"} if number != 2 else {"A": "MKVGW"}
        text = write_mmcif(name, chains_of(chains, spread=number))
        (tmp_path / f"designs/{name}.cif").write_text(text)
        rows = [
            {"step": step, "loss": number + step / 10, "letters": {}, "hard": float(is_hard) if step > 1 else 0.5,
             "terms": {"fape": 10.0 * step, **({"ptm": 5.0 + step} if step > 2 else {})}}
            for step in range(5)
        ]  # fmt: skip
        (tmp_path / f"starts/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        designs.append({
            "name": name, "loss": number + 0.12345, "terms": {"fape": 1.0, "ptm": 2.0}, "mean_plddt": 70.04 + number,
            "ptm": None if number == 3 else 0.126, "iptm": None if number == 2 else 0.5, "chains": chains,
            "sequence": ":".join(chains.values()), "designed": {"A": "MKV", "B": "GW"},
            "plddt": [10.0 * i for i in range(5)],
        })  # fmt: skip
    logos = {9: np.full((2, 20), 0.5, np.float32), 2: np.zeros((2, 20), np.float32)}
    state = StartState({"A": np.zeros((2, 20), np.float32)}, logos=logos if is_hard else None)
    state.write(tmp_path / "starts/design_0001.safetensors")
    monkeypatch.setattr(figures, "draw_curves", lambda curves, y, x_label: (tuple(curves), y, x_label))
    monkeypatch.setattr(figures, "draw_logo", lambda shares: float(shares.mean()))
    summary = {"designs": designs, "seed": 4, "params": "" if is_hard else "abc"}
    page = design_page(tmp_path, summary, {"A": 3, "B": 2})
    assert page.title == "Designs"
    assert page.lead == "7 designs of 3 residues (A), 2 residues (B) by WarpFold."
    assert page.facts == [("designs", "7"), ("lowest loss", "1.123"), ("its pLDDT", "71.0")]
    assert page.footer == [
        f"seed 4 · parameters {'from memory' if is_hard else 'abc'}",
        "Check designs.fasta with warpfold predict and other parameters: scores by the design's own are too high.",
    ]
    everything, losses, sequence = page.sections
    assert everything.table == ReportTable(
        ["design", "loss", "mean pLDDT", "pTM", "ipTM", "designed"],
        [[f"design_000{n}", f"{n + 0.12345:.4f}", f"{70.04 + n:.1f}",
          "–" if n == 3 else "0.13", "–" if n == 2 else "0.50", "MKV, GW"] for n in range(1, 8)],
    )  # fmt: skip
    assert losses.text == "Losses of soft and of hard sequences are not comparable." + (
        " The sequence is hard from step 2 on." if is_hard else "")  # fmt: skip
    steps = list(range(5))
    curves = [figures.Curve(f"design_000{n}", steps, [n + step / 10 for step in steps]) for n in range(1, 5)]
    terms = [figures.Curve("fape", steps, [10.0 * x for x in steps]), figures.Curve("ptm", [3, 4], [8.0, 9.0])]
    assert losses.figures == [
        ((tuple(curves), "loss", "step"), "The loss of the best designs."),
        ((tuple(terms), "weighted loss", "step"), "The terms of design_0001."),
    ]
    expected = [(0.0, "design_0001, step 2."), (0.5, "design_0001, step 9.")] if is_hard else []
    assert sequence.figures == expected
    assert [target.name for target in page.targets] == [f"design_000{n}" for n in range(1, 6)]
    for number, (target, design) in enumerate(zip(page.targets, designs), 1):
        assert target.sequence == design["sequence"]
        np.testing.assert_array_equal(target.plddt, [0, 10, 20, 30, 40])
        np.testing.assert_allclose(target.ca, number * np.arange(1, 6)[:, None] * np.ones(3), atol=1e-3)
        assert target.mmcif == (tmp_path / f"designs/{target.name}.cif").read_text()
        scores = [("pTM", design["ptm"]), ("ipTM", design["iptm"])]
        assert target.numbers == [
            ("loss", f"{number + 0.12345:.4f}"), ("mean pLDDT", f"{70.04 + number:.1f}"),
            *((title, f"{score:.2f}") for title, score in scores if score is not None),
        ]  # fmt: skip
        assert target.chains == ({} if number == 2 else {"A": slice(0, 3), "B": slice(3, 5)})
    # A start whose state is gone has no logos.
    (tmp_path / "starts/design_0001.safetensors").unlink()
    assert design_page(tmp_path, summary, {"A": 3}).sections[2].figures == []
