"""The launch table of a GPU: the choice from times, writing and reading, and the command.

The times are invented, since there is no GPU. tests/ops/triton/test_gpu.py runs kernels on a GPU.
"""

import json
import random
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.deadly import always_kills, kills
from tests.test_cli import run
from warpfold import bulk
from warpfold.bench import kernels as tuning
from warpfold.bench.kernels import (
    MAX_CHECKED,
    IsolatedBench,
    Seconds,
    Timed,
    TuningTask,
    choose,
    choose_kernels,
    launches_of,
    report,
    ship,
    timed,
    trial_launches,
    tuning_tasks,
    with_room,
    workloads,
    write,
)
from warpfold.bulk import IsolatedProcess
from warpfold.check.cases import TUNED
from warpfold.check.op_profile import OpCase
from warpfold.errors import UserError
from warpfold.ops.triton import launch as launches
from warpfold.ops.triton.launch import (
    SHIPPED,
    KernelConfig,
    TableEntry,
    config_for,
    kernels,
    read,
    table_for,
    triton_version,
)

A, B, C = (KernelConfig({"BLOCK": 2**i}, 4, 2) for i in (4, 5, 6))
HEAD = {"gpu": "NVIDIA Toy 9000", "driver": "1.2", "torch": "2", "triton": triton_version(), "date": "2026-11-20"}


def times(
    kernel: str, key: tuple[int, ...], out: dict[KernelConfig, str] | None = None, **seconds: list[float]
) -> Timed:
    """Return the timings of the candidates a, b and c."""
    found = {{"a": A, "b": B, "c": C}[name]: taken for name, taken in seconds.items()}
    return Timed(kernel, key, "somewhere", found, out or {})


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        # The fastest mean does not win: a single slow repeat is no evidence.
        ([times("k", (1,), a=[3.0, 3.0, 3.0], b=[2.0, 2.0, 90.0], c=[1.0, 4.0, 4.0])], [((1,), B)]),
        # Among nearly equal candidates, the first one wins.
        ([times("k", (1,), a=[1.009], b=[1.0])], [((1,), A)]),
        ([times("k", (1,), a=[1.011], b=[1.0])], [((1,), B)]),
        ([times("k", (1,), b=[1.009], a=[1.0])], [((1,), B)]),
        # Workloads with the same key are decided together.
        ([times("k", (1,), a=[1.0], b=[3.0]), times("k", (2,), a=[1.0], b=[3.0]), times("k", (1,), a=[9.0], b=[4.0])],
         [((1,), B), ((2,), A)]),
    ],
)  # fmt: skip
def test_the_fastest_is_chosen(found: list[Timed], chosen: list[tuple[tuple[int, ...], KernelConfig]]) -> None:
    assert choose(found) == [TableEntry("k", key, config) for key, config in chosen]


def test_a_candidate_that_is_out_at_one_place_is_out() -> None:
    found = [times("k", (1,), a=[1.0], b=[2.0]), times("k", (1,), {A: "not exact: output"}, b=[2.0])]
    assert choose(found) == [TableEntry("k", (1,), B)]
    assert report(found, choose(found)) == [
        {
            "kernel": "k",
            "key": [1],
            "launch": "BLOCK 32, 4 warps, 2 stages",
            "microseconds": 4e6,
            "slowest": 4e6,
            "timed": 1,
            "out": {"BLOCK 16, 4 warps, 2 stages": "not exact: output"},
            "places": ["somewhere", "somewhere"],
        }
    ]


def test_none_left_is_one_line() -> None:
    with pytest.raises(UserError, match=r"k \(1,\): it gets no entry, because no candidate works: not exact: dq"):
        choose([times("k", (1,), {A: "not exact: dq", B: "too large", C: "too large"})])


@given(order=st.permutations(range(4)), seed=st.integers(0, 99))
def test_the_order_of_places_decides_nothing(order, seed) -> None:
    draw = random.Random(seed)
    found = [times("k", (i % 2,), a=[draw.random()], b=[draw.random()], c=[draw.random()]) for i in range(4)]
    assert choose([found[i] for i in order]) == choose(found)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> torch.device:
    """Pretend that there is a GPU, with an empty home folder."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: HEAD["gpu"])
    monkeypatch.setattr(launches, "home", lambda: tmp_path)
    monkeypatch.setattr(launches, "family_table", lambda device: read(SHIPPED / "default.json"))
    launches.reset()
    return torch.device("cuda:0")


def test_what_is_written_is_what_is_launched(gpu: torch.device, tmp_path: Path) -> None:
    entries = [TableEntry("toy", (32, 256), A), TableEntry("toy", (32, 1024), B)]
    path = write(tmp_path, HEAD, entries)
    assert path.name == "NVIDIA-Toy-9000.json"
    assert table_for(gpu)[1] == "made on this machine for NVIDIA Toy 9000"
    assert dict(read(path).head) == HEAD
    assert config_for("toy", (32, 300), gpu) == A
    assert config_for("toy", (32, 800), gpu) == B
    assert sum('"kernel"' in line for line in path.read_text().splitlines()) == 2


def test_kernels_that_a_table_lacks_are_launched_by_the_default(gpu: torch.device, tmp_path: Path) -> None:
    write(tmp_path, HEAD, [TableEntry("toy", (1,), A)])
    known = read(SHIPPED / "default.json").entries[0]
    assert config_for(known.kernel, known.key, gpu) == known.config


def test_tuning_one_operation_keeps_the_others(gpu: torch.device, tmp_path: Path) -> None:
    write(tmp_path, HEAD, [TableEntry("one", (1,), A), TableEntry("two", (1,), A)])
    path = write(tmp_path, {**HEAD, "date": "2026-11-21"}, [TableEntry("two", (2,), B)])
    assert read(path).entries == (TableEntry("one", (1,), A), TableEntry("two", (2,), B))
    assert read(path).head["date"] == "2026-11-21"


# ---- tuning tasks


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("op", TUNED)
def test_every_operation_has_tasks(op: str, quick: bool) -> None:
    found = tuning_tasks(workloads([op], quick), quick)
    assert found
    assert all(task.candidates for task in found)
    keys = [(task.kernel, task.key) for task in found]
    # The tasks of a key are adjacent: its entry is written as soon as it is known.
    assert keys == sorted(keys, key=keys.index)


def test_quick_tuning_inherits_nothing_from_another_layers_rows() -> None:
    """Quick tuning covers each layer that may have a different optimum.

    The row attention of an alignment and of a triangle have the same key, and are decided together. Starting and ending
    nodes have the same sizes, so that one of them suffices.
    """
    found = [task for task in tuning_tasks(workloads(["attention"], True), True) if task.kernel == "attention_forward"]
    first = [str(task.workload) for task in found if task.key == found[0].key]
    assert sum("msa row" in place for place in first) == 1
    assert sum("triangle" in place for place in first) == 1
    everything = [task for task in tuning_tasks(workloads(["attention"], True)) if task.key == found[0].key]
    assert sum("triangle" in str(task.workload) for task in everything if task.kernel == "attention_forward") == 2


def test_entries_are_known_as_soon_as_their_last_place_was_timed(tmp_path: Path) -> None:
    todo = [task for task in tuning_tasks(workloads(["attention"], True), True) if len(task.candidates) > 1]
    known: list[tuple[int, TableEntry]] = []
    done: list[TuningTask] = []

    class Noting(Toy):
        def time(self, task: TuningTask) -> tuple[Seconds, dict[KernelConfig, str]]:
            done.append(task)
            return super().time(task)

    rows: list[dict[str, Any]] = []
    found = timed(
        todo,
        Noting(largest).time,
        known=lambda entries: known.extend((len(done), e) for e in entries),
        sink=rows.append,
    )
    assert [(row["kernel"], tuple(row["key"])) for row in rows] == [(task.kernel, task.key) for task in todo]
    assert all(row["microseconds"] and row["out"] for row in rows)
    assert sorted((e.kernel, e.key) for _, e in known) == sorted((e.kernel, e.key) for e in choose(found))
    assert all(entry in choose(found) for _, entry in known)
    for count, entry in known:
        assert (todo[count - 1].kernel, todo[count - 1].key) == (entry.kernel, entry.key)
        assert not [task for task in todo[count:] if (task.kernel, task.key) == (entry.kernel, entry.key)]


def test_entries_of_other_keys_stay_while_a_kernel_is_tuned_and_those_of_another_triton_do_not(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD, [TableEntry("one", (1,), A), TableEntry("one", (2,), A)])
    write(tmp_path, HEAD, [TableEntry("one", (2,), B)], whole=False)
    assert read(path).entries == (TableEntry("one", (1,), A), TableEntry("one", (2,), B))
    write(tmp_path, {**HEAD, "triton": "2.0"}, [TableEntry("two", (1,), C)], whole=False)
    assert read(path).entries == (TableEntry("two", (1,), C),)


def test_a_shipped_table_takes_the_entries_of_a_tuned_one_and_no_version(tmp_path: Path) -> None:
    family = tmp_path / "sm_90.json"
    family.write_text(
        '{"how": "by hand", "launches": ['
        '{"kernel": "one", "key": [1], "sizes": {"X": 9}, "warps": 1, "stages": 1},'
        '{"kernel": "two", "key": [1], "sizes": {"X": 9}, "warps": 1, "stages": 1}]}'
    )
    tuned = write(tmp_path, HEAD, [TableEntry("one", (1,), A), TableEntry("one", (2,), B)])
    assert ship(tuned, family) == 2
    assert read(family).entries[:2] == (TableEntry("one", (1,), A), TableEntry("one", (2,), B))
    assert [(e.kernel, dict(e.config.sizes)) for e in read(family).entries[2:]] == [("two", {"X": 9})]
    assert dict(read(family).head) == {"how": "by hand", "tuned": f"{HEAD['gpu']}, {HEAD['date']}"}


def test_chosen_kernels_are_tuned_in_the_order_given() -> None:
    todo = tuning_tasks(workloads(["attention"], True), True)
    found = choose_kernels(todo, ["attention_dbias", "attention_short:32x2x256x256"])
    assert list(dict.fromkeys(task.kernel for task in found)) == ["attention_dbias", "attention_short"]
    assert {task.key for task in found if task.kernel == "attention_short"} == {(32, 2, 256, 256)}
    with pytest.raises(UserError, match=r"--kernel attention_shor: nothing to tune. Choose from: attention_dbias, "):
        choose_kernels(todo, ["attention_shor"])
    with pytest.raises(UserError, match=r"--kernel attention_short:1: .* attention_short:32x2x256x256, "):
        choose_kernels(todo, ["attention_short:1"])


def test_trials_launch_each_candidate_and_the_other_kernels_of_the_operation() -> None:
    """The trials use the sizes of the model and of the check; `tune` compiles the kernels of both in advance."""
    (task, *_) = (t for t in tuning_tasks(workloads(["attention"], True), True) if t.kernel == "attention_dbias")
    launches = list(trial_launches(task))
    assert {launch.config for launch in launches if launch.kernel.name == task.kernel} == set(task.candidates)
    assert {"attention_forward", "attention_short"} <= {launch.kernel.name for launch in launches}
    grids = {launch.grid for launch in launches if launch.kernel.name == "attention_forward"}
    assert len(grids) == 2


def test_every_kernel_is_tuned() -> None:
    """All kernels are tuned, except the one for more channels than the model has, and the optimizer's single choice."""
    tuned = {task.kernel for task in tuning_tasks(workloads(TUNED))}
    assert set(kernels()) - tuned == {"adam_step", "norm_linear_wide"}


def test_the_draw_of_noise_has_one_launch_which_is_that_of_the_table() -> None:
    """The factors of a pair are about 30,000 numbers, which cost less than a launch, so that there is no choice."""
    (only,) = kernels()["keep"].candidates
    assert [e.config for e in read(SHIPPED / "default.json").entries if e.kernel == "keep"] == [only]


def test_tails_are_tuned_as_they_draw() -> None:
    """The tuned tails draw their factors, as in training, and their launches fit the registers that this needs."""
    drawing = [
        call
        for workload in workloads(["tail"])
        for call in launches_of(workload)
        if call.arguments.get("key") is not None and workload.dtype == "bf16"
    ]
    assert {call.kernel.name for call in drawing} == {"tail", "tail_backward"}


def test_attention_is_tuned_at_every_width_of_the_model() -> None:
    found = {task.key[0] for task in tuning_tasks(workloads(["attention"], True)) if task.kernel == "attention_forward"}
    assert found == {8, 16, 32}


def test_a_forced_launch_is_what_runs() -> None:
    """A forced configuration is launched, as the trials of a task require."""
    task = tuning_tasks(workloads(["gate"], True), True)[0]
    for candidate in task.candidates[:3]:
        with launches.forced({task.kernel: candidate}):
            mine = [call for call in launches_of(task.workload) if call.kernel.name == task.kernel]
        assert mine
        assert {call.config for call in mine} == {candidate}


def test_cases_are_checked_at_a_size_that_fits() -> None:
    large = OpCase(op="attention", where="x", rows=4096, length=512, heads=8, width=32, bias=True)
    assert with_room(large).logits <= MAX_CHECKED
    assert with_room(large).rows == MAX_CHECKED // (512 * 512 * 8)
    small = OpCase(op="gate", where="x", rows=8, length=8, channels=16)
    assert with_room(small) is small


class Toy:
    """A bench whose times are a function of kernel and candidate."""

    def __init__(self, seconds: Callable[[str, KernelConfig], float]) -> None:
        self.seconds = seconds

    def time(self, task: TuningTask) -> tuple[Seconds, dict[KernelConfig, str]]:
        last = task.candidates[-1]
        kept = [c for c in task.candidates if c != last]
        return {c: [self.seconds(task.kernel, c)] * 3 for c in kept}, {last: "not exact: output"}


def largest(kernel: str, candidate: KernelConfig) -> float:
    """Return a time for which the largest tiles win."""
    return 1.0 / sum(candidate.sizes.values()) + 1e-3 * candidate.warps


def test_tuning_by_made_up_times_gives_a_table_that_is_used(gpu: torch.device, tmp_path: Path) -> None:
    todo = [task for task in tuning_tasks(workloads(["gate"], True), True)]
    entries = choose(timed(todo, Toy(largest).time))
    write(tmp_path, HEAD, entries)
    for entry in entries:
        candidates = next(task.candidates for task in todo if task.kernel == entry.kernel)
        assert entry.config == min(candidates[:-1], key=lambda c: largest(entry.kernel, c))
        assert config_for(entry.kernel, entry.key, gpu) == entry.config


# ---- the command


def test_a_candidate_that_breaks_the_device_is_out_and_the_others_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    (task, *_) = tuning_tasks(workloads(["gate"], quick=True), quick=True)
    three = task.candidates[:3]
    monkeypatch.setattr(TuningTask, "candidates", three)
    # Each candidate that breaks its process causes a new one, which would take seconds to load torch.
    context = get_context("forkserver")
    context.set_forkserver_preload([kills.__module__])
    monkeypatch.setattr(bulk, "get_context", lambda method: context)
    first, second, *rest = task.candidates
    with IsolatedProcess() as process:
        seconds, out = IsolatedBench(torch.device("cpu"), process, kills).time(task)
        assert list(seconds) == rest
        assert out == {first: "not exact", second: "its code broke the device's context"}
        seconds, out = IsolatedBench(torch.device("cpu"), process, always_kills).time(task)
        assert not seconds
        assert list(out) == task.candidates


def test_a_dry_run_lists_the_trials(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "tune", "--op", "gate,layer_norm", "--quick", "--dry-run")
    assert (code, err) == (0, "")
    held = json.loads(run(capsys, "tune", "--op", "gate,layer_norm", "--quick", "--dry-run", "--json")[1])
    assert {row["kernel"] for row in held["launches"]} >= {"gate", "gate_backward", "layer_norm"}
    assert out.endswith(f"{sum(row['candidates'] for row in held['launches'])} trials; nothing was run\n")


def test_the_command_writes_the_table_and_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tune_on(
        device: object, ops: list[str], quick: bool, folder: object, progress: object, kernels: list[str], sink: Any
    ) -> list[Timed]:
        todo = tuning_tasks(workloads(ops, quick), quick)
        return timed(choose_kernels(todo, kernels) if kernels else todo, Toy(largest).time, sink=sink)

    monkeypatch.setattr(tuning, "tune_on", tune_on)
    monkeypatch.setattr(tuning, "head", lambda device: HEAD)
    code, out, _ = run(capsys, "tune", "--op", "gate", "--quick", "--device", "cpu", "--out", tmp_path / "new")
    path = tmp_path / "new" / "NVIDIA-Toy-9000.json"
    assert code == 0
    assert out.rstrip().endswith(f"wrote {path}")
    entries = read(path).entries
    assert {entry.kernel for entry in entries} == {"gate", "gate_backward"}
    assert "BLOCK_C" in out
    arguments = ["--kernel", "gate:128x2", "--device", "cpu", "--out", tmp_path / "new", "--rows", tmp_path / "rows"]
    assert run(capsys, "tune", "--op", "gate", "--quick", *arguments)[0] == 0
    # The entries of the kernel's other keys are still there.
    assert read(path).entries == entries
    assert json.loads((tmp_path / "rows").read_text())["kernel"] == "gate"
