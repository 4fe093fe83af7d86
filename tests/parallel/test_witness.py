"""The witness: planted flips of bits are found and named, nothing else is, and it costs what its share says."""

import json
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ranks import RankError, run_ranks
from tests.recorder import OperationRecorder
from tests.training.flips import PLACES, Flip, config_for, plant, run
from tests.training.runs import equal_tensors, make_store, steps
from tests.training.test_train_ranks import PARTS, team_of
from warpfold import device, settings
from warpfold.cli import main
from warpfold.data.store.store import Store
from warpfold.engine.checkpoint import RunFolder
from warpfold.engine.learn import Learner
from warpfold.engine.trainable import FinetuneConfig
from warpfold.errors import UserError
from warpfold.parallel import team as parallel
from warpfold.parallel.compress import CompressionConfig
from warpfold.parallel.exchange import SyncConfig, Wire, followed
from warpfold.parallel.plan import Plan
from warpfold.parallel.team import Team
from warpfold.parallel.witness import CorruptionError, Messages, Witness, distance, is_witnessed, most_agree
from warpfold.training.config import TrainConfig
from warpfold.training.train import train


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("witness") / "store", proteins=4)


# What is drawn


def test_steps_are_drawn_at_the_share_and_independently() -> None:
    for share in (0.01, 0.3):
        drawn = np.array([is_witnessed(7, step, share) for step in range(5_000)])
        assert abs(drawn.mean() - share) < 4 * (share * (1 - share) / len(drawn)) ** 0.5
        after = drawn[1:][drawn[:-1]]  # those that follow one that was drawn
        assert abs(after.mean() - share) < 4 * (share * (1 - share) / len(after)) ** 0.5
        other = np.array([is_witnessed(8, step, share) for step in range(5_000)])
        both = (drawn & other).mean()
        assert abs(both - share**2) < 4 * (share**2 / len(drawn)) ** 0.5
    assert not any(is_witnessed(7, step, 0.0) for step in range(100))
    assert all(is_witnessed(7, step, 1.0) for step in range(100))


def test_every_other_rank_is_looked_at_equally_often_and_none_by_itself() -> None:
    for ranks in (2, 3, 8):
        found = Counter(distance(3, step, ranks) for step in range(2_000))
        assert set(found) == set(range(1, ranks))
        expected = 2_000 / (ranks - 1)
        assert all(abs(count - expected) < 4 * expected**0.5 for count in found.values())
    assert distance(3, 5, 1) == 0


@pytest.mark.parametrize(
    ("votes", "right"), [([1, 1, 2], 1), ([2, 1, 1, 1], 1), ([1, 2], None), ([1, 2, 3, 3], 3), ([1, 1, 2, 2], None)]
)
def test_most_votes_decide_and_a_tie_does_not(votes: list[int], right: int | None) -> None:
    assert most_agree(votes) == right


# What is found


def expected(place: str, ranks: int) -> tuple[int, tuple[int, ...], bool] | None:
    """The step at which a flip at step 0 on the last rank is found, who is named, and whether that is decided."""
    last = ranks - 1
    if (place, ranks) in (("message", 1), ("resting weight", 1)):  # there are none; nothing has the same to compare
        return None
    if place == "resting weight":
        return (1, (0, 1), False) if ranks == 2 else (1, (last,), True)
    if place == "message":
        return 0, (int(0.3 * ranks), last), False
    return 0, (last,), True


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("place", PLACES)
def test_a_flipped_bit_is_found_and_named(
    place: Any, ranks: int, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(Flip(place, 0, ranks - 1, 0.3), monkeypatch)
    found = run(config_for(Plan(data=ranks)), store, tmp_path / "run")
    if (wanted := expected(place, ranks)) is None:
        assert found == ""
        return
    assert isinstance(found, tuple), found
    step, finding = found
    assert (step, finding.ranks, finding.decided) == wanted
    (row,) = map(json.loads, (tmp_path / "run/corruption.jsonl").read_text().splitlines())
    assert (row["step"], tuple(row["ranks"]), row["decided"], row["excluded"]) == (*wanted, [])
    assert row["hosts"] == [[platform.node(), "cpu"]] * len(finding.ranks)
    assert not list((tmp_path / "run/checkpoints").glob("step-*"))  # what is wrong is not saved


@pytest.mark.parametrize(
    ("place", "plan", "ranks", "decided"),
    [
        ("moment", Plan(data=2, sync=SyncConfig(shard_state=True)), (1,), True),
        ("update", Plan(data=2, sync=SyncConfig(shard_state=True)), (1,), True),
        ("gradient", Plan(axial=2), (0, 1), False),  # those who share an example, of whom one cannot be told
        ("activation", Plan(data=2, axial=2), (2, 3), False),
    ],
)
def test_so_it_is_where_ranks_hold_or_compute_parts(
    place: Any,
    plan: Plan,
    ranks: tuple[int, ...],
    decided: bool,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(Flip(place, 0, plan.data * plan.axial - 1, 0.3), monkeypatch)
    found = run(config_for(plan), store, tmp_path / "run")
    assert isinstance(found, tuple), found
    assert (found[1].ranks, found[1].decided) == (ranks, decided)


def test_a_flip_that_passes_is_found_exactly_at_the_steps_that_are_drawn(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(steps=6, witness=0.5, seed=1)
    drawn = [is_witnessed(1, step, 0.5) for step in range(6)]
    assert 0 < sum(drawn) < 6
    for step in range(6):
        with monkeypatch.context() as patch:
            plant(Flip("gradient", step, 0), patch)
            try:
                train(config, store, tmp_path / f"{step}")
                found = False
            except CorruptionError as error:
                found = error.step == step
        assert found == drawn[step]


@pytest.mark.slow
def test_flips_anywhere_are_found_at_the_share(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, found, runs, share = np.random.default_rng(0), 0, 60, 0.3
    for number in range(runs):
        place = ("weight", "moment", "activation", "gradient")[number % 4]
        flip = Flip(place, int(rng.integers(3)), 0, rng.random(), int(rng.integers(16, 23)))  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            plant(flip, patch)
            found += run(config_for(steps=3, witness=share, seed=number), store, tmp_path / f"{number}") != ""
    assert abs(found - share * runs) < 3 * (share * (1 - share) * runs) ** 0.5


def test_messages_are_compared_whatever_they_are_of() -> None:
    """Of any dtype, to all and from all; and a sum that is made twice."""

    def on_a_rank(dtype: torch.dtype) -> tuple[list[tuple[int, int]], bool]:
        wire, messages = Wire(team_of(2).mesh.data), Messages()
        with followed(messages):
            x = torch.arange(8).to(dtype)
            arrived, joined = torch.empty_like(x), torch.empty(16, dtype=dtype)
            works = [wire.all_to_all(arrived, x), wire.all_gather(joined, x)]
            if wire.group.rank == 1:  # before this rank looks at what has arrived from rank 0
                for work in works:
                    work.work.wait()  # type: ignore[union-attr]
                joined[3] += 1
            for work in works:
                work.wait()
            messages.computed(x, x + wire.group.rank)
        return messages.wrong()

    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        assert run_ranks(on_a_rank, 2, dtype) == [([], False), ([(0, 1)], True)]


class Still:
    """A state that never changes."""

    updates: ClassVar = [{}, {}]

    def witness(self, on: bool) -> None: ...

    def checksums(self) -> dict[str, Tensor]:
        return {"weights": torch.ones(1, dtype=torch.int64)}

    def parts(self, what: str) -> tuple[int, list[str]]:
        return -1, ["w"]


VERDICTS: list[tuple[list[int], list[int], list[list[tuple[int, int]]], tuple[int, ...], bool]] = [
    ([1, 7, 7], [7, 7, 7], [], (0,), True),
    ([1, 7, 7], [7, 7, 5], [], (0, 2), True),  # the last is wrong only when all compute it once more
    ([1, 7, 7], [1, 7, 5], [], (0, 2), False),  # two say the one, two the other
    ([7, 7, 7], [], [[], [(0, 1)], []], (0, 1), False),
    ([7, 7, 7], [], [[], [(0, 1)], [(0, 2)]], (0,), True),
    ([7, 7, 7], [], [[], [(0, 1)], [(1, 2)]], (1,), True),
    ([7, 7, 7], [], [[(2, 0)], [(0, 1)], [(1, 2)]], (0, 1, 2), False),
]


def test_who_is_wrong_of_three() -> None:
    """By what each says of its own work and, computing it once more, of rank 0's; or of messages that changed."""

    def of(number: int) -> dict[str, Tensor]:
        return {"gradient": torch.tensor([number])}

    def on_a_rank() -> list[tuple[tuple[int, ...], bool]]:
        team, found = team_of(3), []
        rank = team.process.rank
        for own, once_more, links, *_ in VERDICTS:
            # Twice the trial; the work of another (rank 2 computes rank 0's); and once more.
            says = iter([7, 7, 7, *once_more[rank : rank + 1]])
            witness = Witness(1.0, 0, team, "cpu", Still(), 0, lambda *_: "")
            witness.begin(0)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Messages, "wrong", lambda self, links=links: (links[rank], False))
                try:
                    witness.check_work(0, [], lambda own=own: of(own[rank]), lambda work, says=says: of(next(says)))
                    witness.check_update(0)
                except CorruptionError as error:
                    found.append((error.finding.ranks, error.finding.decided))
                finally:
                    witness._stack.close()
        return found

    assert distance(0, 0, 3) == 1
    assert run_ranks(on_a_rank, 3) == [[(ranks, decided) for *_, ranks, decided in VERDICTS]] * 3


# What is not


PLANS = {
    "alone": (Plan(), 1, {}),
    "batch": (Plan(batch=2), 2, {"clip": "step"}),
    "an example each": (Plan(data=2), 2, {}),
    "unequal shares, sharded": (Plan(data=2, sync=SyncConfig(shard_state=True)), 3, {"name": "lamb"}),
    "compressed": (Plan(data=2), 2, {"compression": CompressionConfig(method="powersgd", start=0)}),
    "axial": (Plan(data=2, axial=2), 2, {"average": "uniform"}),
    "fp16": (Plan(precision="fp16", data=2), 2, {}),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_run_with_a_witness_is_the_run_to_the_bit(name: str, store: Store, tmp_path: Path) -> None:
    """No false alarm, and nothing that it computes besides is left in the run."""
    plan, accumulate, optim = PLANS[name]
    for share in (0.0, 1.0):
        assert run(config_for(plan, accumulate, optim, witness=share, steps=3), store, tmp_path / f"{share}") == ""
    one, other = (steps(tmp_path / f"{share}") for share in (0.0, 1.0))
    assert [row.pop("witnessed") for row in other] == [True] * 3
    assert one == other
    name = "checkpoints/step-00000003/state.safetensors"
    assert equal_tensors(tmp_path / "0.0" / name, tmp_path / "1.0" / name)


def test_so_it_is_with_graphs_and_with_a_trunk_that_is_kept(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "find_recorder", lambda _: OperationRecorder())
    for name, plan, part in (
        ("recorded", Plan(data=2, sizes=1, graph=True), FinetuneConfig()),
        ("cached", Plan(), PARTS["cached"]),
    ):
        for share in (0.0, 0.6):
            config = replace(config_for(plan, 3, steps=3, witness=share), finetune=part)
            assert run(config, store, tmp_path / f"{name}-{share}") == ""
        files = (tmp_path / f"{name}-{share}/params.safetensors" for share in (0.0, 0.6))
        assert equal_tensors(*files)


def test_a_run_that_goes_on_witnesses_the_same_steps(store: Store, tmp_path: Path) -> None:
    for last in (2, 6):
        train(config_for(steps=last, witness=0.5), store, tmp_path / "stopped")
    train(config_for(steps=6, witness=0.5), store, tmp_path / "run")
    assert steps(tmp_path / "stopped") == steps(tmp_path / "run")
    drawn = [step + 1 for step in range(6) if is_witnessed(0, step, 0.5)]
    assert [row["step"] for row in steps(tmp_path / "run") if "witnessed" in row] == drawn


def test_it_computes_as_many_examples_again_as_the_share_says(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, learnt = Learner._learn, [0]

    def counted(self: Learner, examples: Sequence[Any], recycles: int) -> dict[str, Tensor]:
        learnt[0] += len(examples)
        return original(self, examples, recycles)

    monkeypatch.setattr(Learner, "_learn", counted)
    config = config_for(accumulate=3, steps=5, witness=0.5)
    train(config, store, tmp_path / "run")
    drawn = sum(is_witnessed(0, step, 0.5) for step in range(5))
    assert 0 < drawn < 5
    assert learnt[0] == 3 * 5 + 3 * drawn + 2  # the trial at the start: one example, twice


# Where bits differ anyhow


@pytest.mark.parametrize(
    ("ranks", "always", "reason"),
    [
        (1, False, r"train.witness = 1: rank 0 \(host .*, cpu\) computed an example twice, with different bits"),
        (2, False, r"rank 1 \(host .*, cpu\) computed an example twice, with different bits"),
        (2, True, r"rank 1 \(host .*\) and rank 0 \(host .*\) compute different bits from the same example"),
    ],
)
def test_what_does_not_repeat_is_refused_at_the_start(
    ranks: int, always: bool, reason: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = Learner.again, [0]

    def on_a_rank() -> None:
        team = team_of(ranks)

        def noisy(self: Learner, *args: Any) -> dict[str, Tensor]:
            found = original(self, *args)
            calls[0] += 1
            if team.process.rank == ranks - 1 and (always or calls[0] == 2):
                found["gradient"][0] += 1
            return found

        monkeypatch.setattr(Learner, "again", noisy)
        train(config_for(Plan(data=ranks), witness=1.0), store, tmp_path / "run", team=team)

    with pytest.raises(RankError, match=reason):
        run_ranks(on_a_rank, ranks)
    assert not (tmp_path / "run/corruption.jsonl").exists()


def test_where_no_order_is_fixed_nothing_is_compared() -> None:
    with pytest.raises(UserError, match="on an Apple GPU sums are made in no fixed order"):
        Witness(0.1, 0, Team(), "mps", None, 0, lambda *_: "")  # type: ignore[arg-type]


# What follows


def test_who_is_wrong_is_excluded_where_that_is_asked_for_and_known(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        plant(Flip("gradient", 1, 0), patch)
        with pytest.raises(CorruptionError, match=f"the same command refuses {platform.node()} from now on"):
            train(config_for(on_corruption="exclude"), store, tmp_path / "run")
    assert CorruptionError.exit_code == 3
    with pytest.raises(UserError, match=f"corruption.jsonl: host {platform.node()} computed wrongly and is excluded"):
        train(config_for(), store, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(platform, "node", lambda: "another")
        assert train(config_for(), store, tmp_path / "run").finished
    (tmp_path / "run/corruption.jsonl").write_text("{")
    with pytest.raises(UserError, match=r"corruption.jsonl: damaged .*; remove it, and no host is excluded"):
        train(config_for(), store, tmp_path / "run")

    monkeypatch.undo()
    plant(Flip("message", 1, 1), monkeypatch)
    found = run(config_for(Plan(data=2), on_corruption="exclude"), store, tmp_path / "undecided")
    assert isinstance(found, tuple)
    RunFolder(tmp_path / "undecided", writes=False).refuse_host(platform.node())


def test_a_command_says_so_by_its_exit_code_and_is_refused_before_ranks_meet(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "settings.toml", tmp_path / "run"
    path.write_text(settings.to_toml(config_for(on_corruption="exclude")))
    command = ["train", str(path), "--data", str(store.path), "--out", str(out), "--device", "cpu"]
    plant(Flip("gradient", 1, 0), monkeypatch)
    for code, said in (
        (3, "error: step 1: the gradient of rank 0's examples"),
        (2, "computed wrongly and is excluded"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == code
        assert said in capsys.readouterr().err
        monkeypatch.setattr(parallel, "distributed_context", lambda *_: pytest.fail("they meet"))


def test_checkpoints_that_may_hold_it_are_set_aside(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight of one of two ranks changes after step 2 (0, 1 ...); all was well when step 1 began, and step 5 is the
    next that is drawn: the checkpoint of 1 stays, and those of 2 to 5 do not."""
    seed = next(
        s for s in range(500) if [is_witnessed(s, k, 0.3) for k in range(6)] == [False, True, *[False] * 3, True]
    )
    config = config_for(Plan(data=2), steps=6, witness=0.3, seed=seed, save_every=1, keep=9)
    plain = replace(config, train=replace(config.train, witness=0.0))
    assert run(plain, store, tmp_path / "plain") == ""
    with monkeypatch.context() as patch:
        plant(Flip("resting weight", 2, 1), patch)
        found = run(config, store, tmp_path / "run")
    assert isinstance(found, tuple)
    assert (found[0], found[1].since) == (5, 1)
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names == [*(f"damaged-step-0000000{step}" for step in range(2, 6)), "step-00000001"]
    assert run(config, store, tmp_path / "run") == ""
    assert equal_tensors(tmp_path / "run/params.safetensors", tmp_path / "plain/params.safetensors")


def test_a_share_is_a_share() -> None:
    with pytest.raises(ValueError, match="witness is a share of the steps: between 0 and 1"):
        TrainConfig(witness=1.5)
