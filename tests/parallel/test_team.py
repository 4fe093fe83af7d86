"""Processes of a run: rendezvous, communication, and a common end with reasons."""

import contextlib
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

# Imported before the forks, each of which would load it otherwise.
import torch._dynamo
import torch.distributed as dist
from torch import Tensor

from tests.ranks import FAILED, FINE, LONG, Crew, run_ranks
from warpfold.engine.checkpoint import Checkpoint, RunFolder
from warpfold.errors import LostError, UserError
from warpfold.parallel import heartbeat, waits
from warpfold.parallel import team as module
from warpfold.parallel.collectives import all_gather, local_shard
from warpfold.parallel.exchange import Wire
from warpfold.parallel.mesh import make_mesh
from warpfold.parallel.messages import pieces
from warpfold.parallel.plan import Plan
from warpfold.parallel.team import ProcessInfo, Team, TeamError, distributed_context
from warpfold.parallel.waits import Event

GRACE = 2.0  # seconds, in these tests
# Seconds for a collective and for the rendezvous, sufficient on a busy machine.
LIMIT = 4.0


@pytest.fixture
def crew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Crew:
    for name, seconds in (("BEAT", 0.2), ("SILENT", 1.2), ("GRACE", GRACE)):
        monkeypatch.setattr(heartbeat, name, seconds)
    return Crew(tmp_path)


def test_pieces_of_a_broadcast_are_full_and_hold_everything() -> None:
    flat = [torch.arange(start, stop, dtype=torch.uint8) for start, stop in ((0, 3), (3, 4), (4, 15), (15, 20))]
    found = [torch.cat(piece) for piece in pieces(flat, 6)]
    assert [len(piece) for piece in found] == [6, 6, 6, 2]
    assert torch.cat(found).tolist() == list(range(20))


def test_processes_meet_talk_work_alone_and_then_together(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of rank zero stay there, tensors arrive bitwise, and groups are reused."""
    # Bytes: tensors are split and joined.
    monkeypatch.setattr(module, "BROADCAST_BYTES", 16)
    given = {
        "weights": torch.arange(9.0).view(3, 3).mT,
        "steps": torch.tensor(7),
        "nothing": torch.empty(0, 4),
        "half": torch.tensor([1.0, math.nan, -0.0], dtype=torch.bfloat16),
        "flag": torch.tensor([True, False]),
    }

    def receive(team: Team) -> None:
        found = team.broadcast_tensors(given if team.is_rank_zero else None, "a checkpoint")
        assert list(found) == list(given)
        for name, x in given.items():
            assert (found[name].shape, found[name].dtype) == (x.shape, x.dtype)
            assert found[name].tolist() == x.tolist() or name == "half"
        assert found["half"].view(torch.int16).tolist() == given["half"].view(torch.int16).tolist()
        assert team.broadcast({"ä": 1} if team.is_rank_zero else None, "its notes") == {"ä": 1}
        assert team.broadcast_tensors({} if team.is_rank_zero else None, "no tensors") == {}

    def talk(team: Team) -> None:
        rank = team.process.rank
        assert (team.is_example_leader, team.mesh.axial.size, team.mesh.data.size) == (True, 1, 4)
        said = team.all_gather_object({"rank": rank, "ä": [math.nan, 0.1 * rank] * rank}, "a meeting")
        assert [len(one["ä"]) for one in said] == [0, 2, 4, 6]
        assert [one["ä"][1] for one in said[1:]] == [0.1, 0.2, 0.1 * 3]
        assert math.isnan(said[3]["ä"][0])
        assert (team.largest(rank - 2.5, "a number"), team.smallest(rank, "a number")) == (0.5, 0)
        assert team.if_different({"settings": [1, "ä"]}, "settings") == []
        assert team.if_different({"settings": rank // 3}, "settings") == [{"settings": rank // 3} for rank in range(4)]
        found = team.all_gather_object(["ä" * rank], "a checkpoint", to_all=False)
        assert found == ([["ä" * rank] for rank in range(4)] if rank == 0 else [])
        rows = team.all_gather(torch.full((3,), rank), "results", to_all=False).wait()
        assert rows.tolist() == ([[rank] * 3 for rank in range(4)] if rank == 0 else [])
        receive(team)

        axial = team.broadcast({"axial": 4} if rank == 0 else None, "the plan")
        mesh = team.remesh(Plan(**axial))
        whole = all_gather(torch.full((1,), rank), 0, 4, team.mesh.axial, "x").wait()
        assert whole.tolist() == [0, 1, 2, 3]
        assert team.is_example_leader == (rank == 0)
        team.remesh(Plan(data=2, axial=2))
        whole = all_gather(torch.full((1,), rank), 0, 2, team.mesh.axial, "x").wait()
        assert whole.tolist() == ([0, 1] if rank < 2 else [2, 3])
        assert team.of_example_leaders(team.all_gather_object(rank, "another")) == [0, 2]
        assert team.all_gather_object_of_example(rank, "an example") == ([0, 1] if rank < 2 else [2, 3])
        assert (team.is_rank_zero, team.is_example_leader) == (rank == 0, rank in (0, 2))
        with pytest.raises(UserError, match="axial 3 x branch 1 needs 3 processes, there are 4"):
            team.remesh(Plan(axial=3))
        assert team.mesh.axial.size == 2
        assert team.remesh(Plan(axial=4)) is mesh

    codes, said = crew.run(talk, Plan(data=4))
    assert (codes, said) == ([FINE] * 4, [""] * 4)
    receive(Team())


def test_alone_one_hears_oneself_and_has_nobody_to_wait_for() -> None:
    with distributed_context(ProcessInfo(), None) as team:
        assert team.all_gather_object(1, "") == team.all_gather_object_of_example(1, "") == [1]
        assert team.of_example_leaders([1]) == [1]
        assert team.is_rank_zero
        assert team.is_example_leader
        assert (team.largest(2.5, ""), team.smallest(3, ""), team.if_different(1, "")) == (2.5, 3, [])
        assert [team.take("queries"), team.take("queries"), team.take("others")] == [0, 1, 0]
        team.wait_for_all("the end")
        assert team.remesh(Plan()).axial.size == 1
        with pytest.raises(UserError, match="there are 1"):
            team.remesh(Plan(axial=2))


@pytest.mark.parametrize(("nodes", "all_told"), [((4, 2), 2), ((2, 1), 1), ((1, 1), 1)])
def test_all_believe_the_same_of_unequal_machines(crew: Crew, nodes: tuple[int, ...], all_told: int) -> None:
    """Otherwise some ranks would sum within machines, and wait for ranks that do not."""

    def look(team: Team) -> None:
        assert team.process.ranks_per_node == all_told

    codes, said = crew.run(look, Plan(data=sum(nodes)), nodes=nodes)
    assert (codes, said) == ([FINE] * sum(nodes), [""] * sum(nodes))


@pytest.mark.parametrize("lazy", ["0", "1"])
def test_when_one_fails_the_others_end_and_say_why(crew: Crew, monkeypatch: pytest.MonkeyPatch, lazy: str) -> None:
    """Also if gloo connects ranks at their first message, as beyond 64 ranks: they connect at the start."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", lazy)

    def fail(team: Team) -> None:
        if team.process.rank == 1:
            raise UserError("out/state: no space left; make room")
        team.all_gather_object(0, "a checkpoint")

    codes, said = crew.run(fail, Plan(data=3))
    assert codes == [FAILED] * 3
    assert said[1] == "UserError: out/state: no space left; make room\n"
    assert all("TeamError: rank 1 failed: out/state: no space left; make room" in said[rank] for rank in (0, 2))


def fill_stderr() -> None:
    """Replace the stderr of this process by a full pipe that has no reader."""
    _, full = os.pipe()
    os.set_blocking(full, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(full, b"x" * 4096):
            pass
    os.set_blocking(full, True)
    sys.stderr = open(full, "w")  # noqa: SIM115 (ends with the process)


@pytest.mark.parametrize(("who", "keeps", "deaf"), [(1, False, False), (0, True, False), (1, False, True)])
def test_where_no_exception_reaches_a_process_it_is_ended(crew: Crew, who: int, keeps: bool, deaf: bool) -> None:
    """The process prints the reason even if the store ends with the failed rank.

    It also ends if its output has no reader.
    """

    def fail(team: Team) -> None:
        team.all_gather_object(0, "a step")
        if team.process.rank == who:
            raise UserError("bad data")
        if deaf:
            fill_stderr()
        # Like a kernel that waits for other ranks.
        time.sleep(LONG)

    codes, said = crew.run(fail, Plan(data=2), keeps=keeps)
    assert (codes[who], codes[1 - who]) == (FAILED, 1)
    assert deaf or said[1 - who] == f"error: rank {who} failed: bad data\n"


def test_who_keeps_the_store_may_end_first(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    destroy = dist.destroy_process_group

    def slowly() -> None:
        # As long as many connections may take.
        time.sleep(0 if dist.get_rank() == 0 else GRACE + 1.5)
        destroy()

    monkeypatch.setattr(dist, "destroy_process_group", slowly)
    codes, said = crew.run(lambda team: team.all_gather_object(0, "a step"), Plan(data=2), keeps=True)
    assert (codes, said) == ([FINE] * 2, [""] * 2)


@pytest.mark.parametrize("who", [1, 0])
def test_a_killed_process_is_named(crew: Crew, who: int) -> None:
    """Including rank 0, whose store ends with it."""

    def die(team: Team) -> None:
        team.all_gather_object(0, "a step")
        time.sleep(2 * heartbeat.BEAT)
        if team.process.rank == who:
            os.kill(os.getpid(), signal.SIGKILL)
        team.all_gather_object(0, "the next step")

    codes, said = crew.run(die, Plan(data=2), keeps=who == 0)
    assert (codes[who], codes[1 - who]) == (-signal.SIGKILL, FAILED)
    says = rf"TeamError: rank {1 - who} waited for others at 'the next step'; "
    says += ".*: rank 0 has ended\n" if who == 0 else "rank 1 is dead or frozen: last heard of .* at 'a step'\n"
    assert re.match(says, said[1 - who])


def slices(team: Team) -> None:
    all_gather(torch.ones(2), 0, 4, team.mesh.axial, "z of the trunk").wait()


def gradients(team: Team) -> None:
    Wire(team.mesh.data).all_reduce(torch.ones(1)).wait()


def meeting(team: Team) -> None:
    team.all_gather_object(0, "a meeting")


@pytest.mark.parametrize(
    ("plan", "wait", "name"),
    [
        (Plan(axial=2), slices, "all_gather of z of the trunk"),
        (Plan(data=2), gradients, "all_reduce of gradients or weights over data ranks"),
        (Plan(data=2), meeting, "a meeting"),
    ],
    ids=["slices", "gradients", "meeting"],
)
def test_who_does_not_arrive_is_named_and_where_it_is(
    crew: Crew, plan: Plan, wait: Callable[[Team], None], name: str
) -> None:
    def hang(team: Team) -> None:
        team.all_gather_object(0, "the step before")
        if team.process.rank == 1:
            time.sleep(LONG)
        wait(team)

    codes, said = crew.run(hang, replace(plan, time_limit=LIMIT))
    here = f"rank 0 waited for others at '{name}'; rank 1 did not arrive: it is at 'the step before'"
    assert f"TeamError: {here}" in said[0]
    assert codes == [FAILED, 1]
    assert f"error: rank 0 failed: {here}" in said[1]


def test_a_process_without_exceptions_notices_that_another_is_missing(crew: Crew) -> None:
    def hang(team: Team) -> None:
        team.all_gather_object(0, "a step")
        if team.process.rank == 0:
            team.note(Event("start", "a kernel of NCCL's", "all_reduce", 0, carries="gradients"))
        time.sleep(LONG)

    codes, said = crew.run(hang, Plan(data=2, time_limit=LIMIT))
    assert codes == [1, 1]
    assert (
        "rank 0 waited for others at \"all_reduce of a kernel of NCCL's\"; rank 1 did not arrive: it is at 'a step'"
        in said[0]
    )


def test_an_error_that_speaks_of_time_keeps_its_own_words(crew: Crew) -> None:
    """The place where an error was raised decides, not its message."""

    def fail(team: Team) -> None:
        team.all_gather_object(0, "a step")
        if team.process.rank == 1:
            raise RuntimeError("example 7: the annotation's timeout column: connection reset")
        team.all_gather_object(0, "the next step")

    _, said = crew.run(fail, Plan(data=2))
    assert "RuntimeError: example 7: the annotation's timeout column: connection reset" in said[1]
    assert "TeamError" not in said[1]
    assert "TeamError: rank 1 failed: RuntimeError: example 7: the annotation's timeout column" in said[0]
    assert "caused by LostError\ncaused by RuntimeError\n" in said[0]  # gloo's error


@pytest.mark.parametrize("keeps", [True, False])
def test_a_frozen_rank_is_named_in_time_also_if_it_keeps_the_store(crew: Crew, keeps: bool) -> None:
    def freeze(team: Team) -> None:
        team.all_gather_object(0, "a step")
        if team.process.rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        team.all_gather_object(0, "the next step")

    codes, said = crew.run(freeze, Plan(data=3, time_limit=LIMIT), keeps=keeps, lost=(0,))
    assert codes == [-signal.SIGKILL, FAILED, FAILED]
    for text in said[1:]:
        if keeps:
            assert "waited for others at 'the next step'; the store where they meet has not answered for" in text
            assert "rank 0, which keeps it, is dead or frozen" in text
        # The second rank to end may get the reason from the first.
        else:
            assert "waited for others at 'the next step'; rank 0 is dead or frozen: last heard of" in text


def test_a_store_that_falls_silent_ends_every_rank_in_time(crew: Crew) -> None:
    """Including ranks that wait for nothing but the store, because they could not learn of failures any more."""
    keeper = crew.keep_store()

    def go_on(team: Team) -> None:
        team.all_gather_object(0, "a step")
        time.sleep(2 * heartbeat.BEAT)
        if team.process.rank == 0:
            os.kill(keeper, signal.SIGSTOP)
        else:
            team.all_gather_object(0, "the next step")
        time.sleep(LONG)

    codes, said = crew.run(go_on, Plan(data=2, time_limit=LIMIT))
    assert codes == [1, FAILED]
    for text in said:
        assert "the store where they meet has not answered for" in text
        assert "torchrun's agent at 127.0.0.1" in text
    assert "rank 1 waited for others at 'the next step'" in said[1]


def test_a_store_that_is_silent_from_the_beginning_ends_the_meeting_in_time(crew: Crew) -> None:
    keeper = crew.keep_store()
    port = crew._port()
    os.kill(keeper, signal.SIGSTOP)
    crew._port = lambda: port
    codes, said = crew.run(lambda team: None, Plan(data=2, time_limit=LIMIT, start_limit=LIMIT))
    assert all(code in (1, FAILED) for code in codes)
    assert all("127.0.0.1" in text for text in said)


class Ended(Exception):
    """Raised instead of ending the process."""


def watched_until_it_ends(watchdog: heartbeat.Watchdog, stopped: float = 0.0) -> tuple[float, list[float]]:
    """Return when a watchdog ends its process, in simulated time, and when it asked for the reason.

    stopped: seconds for which the process is stopped at the beginning; they are subtracted.
    """
    now, asked = -stopped, list[float]()

    def beat(seconds: float) -> bool:
        nonlocal now
        now += seconds + (stopped if now < 1 - stopped else 0)
        return False

    watchdog.explain = lambda name, seconds: asked.append(now) or name
    watchdog._end = SimpleNamespace(wait=beat)  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now))
        patch.setattr(heartbeat, "_terminate", Mock(side_effect=Ended))
        with pytest.raises(Ended):
            watchdog._watch()
    return now, asked


@pytest.mark.parametrize("stopped", [0.0, 1e6])
def test_the_watchdog_ends_a_wait_within_seconds_of_the_limit(stopped: float) -> None:
    """Time in which the process was stopped does not count.

    Writing a checkpoint postpones the end for a limited time.
    """
    with waits.waiting("the others"):
        ended, asked = watched_until_it_ends(heartbeat.Watchdog(600.0, lambda *_: ""), stopped)
    # A collective gives up by itself before.
    assert 600 < asked[0] < 605
    assert 600 < ended <= 610
    failed = heartbeat.Watchdog(600.0, lambda *_: "")
    failed.reason = "rank 1 failed"
    with waits.saving():
        assert 600 < watched_until_it_ends(failed)[0] <= 610


def test_who_writes_a_checkpoint_is_spared_when_another_fails(crew: Crew) -> None:
    """Its end is postponed if its collective raises or if it waits where no exception reaches it.

    Others end at once.
    """
    for stuck in (False, True):
        out = crew.folder / f"run-{stuck}"

        def train(team: Team, stuck: bool = stuck, out: Path = out) -> None:
            with RunFolder(out, team.is_rank_zero) as run:
                if team.is_rank_zero:
                    (run.path / "settings.toml").write_text("")
                    run.write_in_background(lambda: (time.sleep(2 * GRACE), run.save(Checkpoint(3, {}, {}), 1)))
                team.all_gather_object(0, "a step")
                if team.process.rank == 1:
                    raise UserError("bad data")
                if stuck and team.is_rank_zero:
                    time.sleep(LONG)
                team.all_gather_object(0, "the next step")

        codes, said = crew.run(train, Plan(data=2))
        assert codes == [1 if stuck else FAILED, FAILED]
        assert "rank 1 failed: bad data" in said[0]
        assert RunFolder(out, writes=False).load_latest().step == 3


def test_who_computes_for_long_is_left_alone(crew: Crew) -> None:
    """A slow validation, a compilation, or a garbage collection that blocks all threads is no wait."""

    def compute(team: Team) -> None:
        team.all_gather_object(0, "a step")
        team.note(Event("start", "a sum that is under way meanwhile", "all_reduce", 0, carries="gradients"))
        time.sleep(LIMIT + GRACE + 1)
        team.all_gather_object(0, "the next step")

    codes, said = crew.run(compute, Plan(data=2, time_limit=LIMIT))
    assert (codes, said) == ([FINE] * 2, [""] * 2)


def test_the_next_attempt_meets_in_the_same_store(crew: Crew) -> None:
    def die(team: Team) -> None:
        if team.process.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        team.all_gather_object(0, "a step")

    assert crew.run(die, Plan(data=2))[0] == [FAILED, -signal.SIGKILL]
    assert crew.run(lambda team: team.all_gather_object(0, "a step"), Plan(data=2)) == ([FINE, FINE], ["", ""])


def test_a_process_group_is_bound_to_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    began = Mock()
    monkeypatch.setattr(module.dist, "init_process_group", began)
    monkeypatch.setattr(module.dist, "TCPStore", lambda *_, **__: dist.HashStore())
    monkeypatch.setattr(module, "agree_on_name", lambda *_: "name")
    monkeypatch.setattr(torch.cuda, "set_device", Mock())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    process = ProcessInfo(0, 2, 0, 2, "127.0.0.1")
    for device, bound in (("cuda", torch.device("cuda:3")), ("cpu", None)):
        module._initialise(process, Plan(data=2), torch.device(device))
        assert began.call_args.kwargs == {"device_id": bound}


def test_a_grid_that_is_not_filled_is_refused_before_anyone_is_met() -> None:
    with pytest.raises(UserError, match=r"data 2 x axial 2 x branch 1 needs 4 processes, there are 3. Start it with"):
        distributed_context(ProcessInfo(ranks=3, address="nowhere"), Plan(data=2, axial=2)).__enter__()
    with pytest.raises(UserError, match="there are 1"):
        distributed_context(ProcessInfo(), Plan(axial=2)).__enter__()


def test_those_who_do_not_come_are_missed_at_the_meeting() -> None:
    """There is a separate limit for the start, and the message names the missing ranks."""
    says = (
        r"rank 0: the 2 processes did not meet at 127\.0\.0\.1:\d+ within 0\.5 s: no sign of rank 1.*plan\.start_limit"
    )
    for plan, limits in ((Plan(data=2, start_limit=0.5), ()), (None, (600.0, 0.5))):
        began = time.monotonic()
        with pytest.raises(TeamError, match=says):
            distributed_context(ProcessInfo(ranks=2, address="127.0.0.1"), plan, "cpu", *limits).__enter__()
        assert time.monotonic() - began < 60


def test_the_start_may_take_longer_than_a_step(crew: Crew) -> None:
    def work(team: Team) -> None:
        team.all_gather_object(0, "a step")

    codes, said = crew.run(work, Plan(data=2, time_limit=LIMIT, start_limit=60.0), late=LIMIT + 3 * heartbeat.BEAT)
    assert (codes, said) == ([FINE] * 2, [""] * 2)


def test_of_many_ranks_a_few_read_how_far_all_are_and_the_others_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost rank fails thousands of collectives at once, and not every rank may read all heartbeats."""
    for name, seconds in (("BEAT", 0.02), ("SILENT", 0.06)):
        monkeypatch.setattr(heartbeat, name, seconds)
    shared = dist.HashStore()
    for rank in range(64):
        shared.set(str(rank), '[0, 0, 0, "a step", 0.0]')
    read: list[int] = []

    def beating(rank: int) -> heartbeat.Heartbeat:
        store = Mock(wraps=shared)
        store.multi_get.side_effect = lambda keys: (read.append(rank), shared.multi_get(keys))[1]
        watchdog = heartbeat.Watchdog(60.0, lambda name, seconds: "")
        return heartbeat.Heartbeat(store, rank, 64, "rank 0", 60.0, watchdog, heartbeat.Position, lambda: (rank,))

    lost = LostError("a step", 60.0, RuntimeError("closed"))
    late, first = beating(63), beating(3)
    with pytest.raises(TeamError, match="rank 3 waited for others at 'a step'"), first:
        raise lost
    assert read == [3]
    with pytest.raises(TeamError, match="rank 3 failed: rank 3 waited for others"), late:
        raise lost
    assert read == [3]
    read.clear()
    shared.delete_key("failed")
    with (
        pytest.raises(TeamError, match="rank 63 waited for others at 'a step'"),
        beating(63),
    ):  # the first ranks are gone
        raise lost
    assert read == [63]


def test_who_waits_for_long_knows_from_its_own_memory_how_far_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT", 0.02)
    store = Mock(wraps=dist.HashStore())
    store.set("1", '[0, 0, 0, "the beginning", 0.0]')

    def here() -> heartbeat.Position:
        # A new object each time, which counts as progress.
        return heartbeat.Position(1, name="a step")

    watchdog = heartbeat.Watchdog(0.4, lambda name, seconds: "")
    with heartbeat.Heartbeat(store, 0, 2, "rank 1", 0.4, watchdog, here, lambda: ()) as beats:
        time.sleep(0.3)
        # A rank that does not wait need not know.
        assert not store.multi_get.called
        with waits.waiting("a step"):
            end = time.monotonic() + 5
            while not store.multi_get.called and time.monotonic() < end:
                time.sleep(0.02)
            said = beats.explain_timeout("a step", 1.0)
    assert said == "rank 0 waited for others at 'a step' for 1 s; rank 1 did not arrive: it is at 'the beginning'"


def test_who_has_told_those_left_over_waits_until_they_know(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(Team, "_store", property(lambda team: store))
    # It gives up after ten beats.
    monkeypatch.setattr(module, "BEAT", 100.0)
    first, spare = (Team(ProcessInfo(rank, ranks=1, idle=1)) for rank in (0, 1))
    telling = threading.Thread(target=first.tell_idle, args=({"steps": 3},), daemon=True)
    telling.start()
    store.wait(["done"])
    time.sleep(0.1)
    assert telling.is_alive()
    assert spare.wait_idle() == {"steps": 3}
    telling.join(5)
    assert not telling.is_alive()


def test_work_is_shared_out_as_it_is_done(crew: Crew, tmp_path: Path) -> None:
    """Each job is taken once by all ranks that share an example. The wait at the end may exceed the time limit."""

    def work(team: Team) -> None:
        for round in ("first", "second"):
            while (job := team.take(round)) < 6:
                (tmp_path / f"{round}-{job}-{team.process.rank}").touch()
        if team.process.rank == 0:
            time.sleep(6)
        team.wait_for_all("the end of the queries")
        assert team.all_gather_object_of_example(0, "still there") == [0, 0]
        team.remesh(Plan(axial=4))

    codes, said = crew.run(work, Plan(data=2, axial=2, time_limit=4.0))
    assert (codes, said) == ([FINE] * 4, [""] * 4)
    names = [path.name.split("-") for path in tmp_path.glob("*-*-*")]
    for round in ("first", "second"):
        found = {job: sorted(rank for a, b, rank in names if (a, b) == (round, job)) for job in map(str, range(6))}
        assert all(ranks in (["0", "1"], ["2", "3"]) for ranks in found.values()), found


def test_who_waits_for_all_hears_of_a_failure(crew: Crew) -> None:
    def fail(team: Team) -> None:
        if team.process.rank == 1:
            raise UserError("bad data")
        team.wait_for_all("the end")

    codes, said = crew.run(fail, Plan(data=2))
    assert codes == [FAILED] * 2
    assert said[0] == "TeamError: rank 1 failed: bad data\n"


@pytest.mark.parametrize(("shape", "axis"), [((7, 3, 2), -3), ((3, 7, 2), -2), ((2, 4), 0), ((7, 0), 0)])
def test_results_come_in_pieces(shape: tuple[int, ...], axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of any length, cast piece by piece, optionally into a given tensor. No rank holds more than a piece."""
    monkeypatch.setattr(module, "BROADCAST_BYTES", 16)
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.bfloat16).view(shape)

    def on_a_rank() -> tuple[Tensor | None, Tensor | None, list[int]]:
        mesh = make_mesh(axial=3)
        team = Team(ProcessInfo(mesh.world.rank, 3), mesh)
        shard = local_shard(whole, axis, mesh.axial)
        pieces = [(start, x) for start, x in team.pieces_of_shards(shard, axis, shape[axis], torch.float32)]
        bytes = [x.nbytes for _, x in pieces if x.shape[axis] > 1]
        out = torch.zeros(shape, dtype=torch.float64)
        return (
            team.gather_shards(shard, axis, shape[axis], torch.float32),
            team.gather_shards(shard, axis, shape[axis], out=out),
            bytes,
        )

    (found, found_there, bytes), *others = run_ranks(on_a_rank, 3)
    assert others == [(None, None, []), (None, None, [])]
    assert found is not None
    assert found_there is not None
    assert found.dtype == torch.float32
    assert torch.equal(found, whole.float())
    assert torch.equal(found_there, whole.double())
    assert all(size <= 16 for size in bytes)


def test_one_process_has_the_whole_already() -> None:
    x = torch.arange(6.0).view(3, 2)
    found = Team().gather_shards(x, 0, 3)
    assert found is not None
    assert found.data_ptr() == x.data_ptr()
    assert torch.equal(Team().gather_shards(x.bfloat16(), 0, 3, torch.float32), x)
