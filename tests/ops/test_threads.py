"""Parts of an operation in threads: all are computed, sums repeat, and observers miss nothing."""

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from warpfold.ops.cpu import threads
from warpfold.ops.cpu.threads import in_threads, summed
from warpfold.ops.dispatch import watching


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def sum_of(count: int, slow: int = -1) -> Tensor:
    """Sum fp32 numbers whose sum rounds; `slow`: the part that takes long."""
    numbers = torch.rand(count, 100, generator=torch.Generator().manual_seed(1))

    def compute(sums: list[Tensor], part: int) -> None:
        if part == slow:
            time.sleep(0.05)
        sums[0] += numbers[part]

    (found,) = summed(compute, zip(range(count)), lambda: [torch.zeros(100)])
    assert (found - numbers.double().sum(0)).abs().max() <= count**2 * 2**-24
    return found


@pytest.mark.parametrize("count", [0, 1, 5, 6, 7, 40])
def test_each_part_is_computed_once(count: int) -> None:
    done = torch.zeros(count)
    in_threads(lambda part: done[part].add_(1), zip(range(count)))
    assert torch.equal(done, torch.ones(count))
    sum_of(count)


def test_a_sum_does_not_depend_on_who_is_faster() -> None:
    expected = sum_of(40)
    assert all(torch.equal(sum_of(40, slow), expected) for slow in (0, 17, 39))


def test_a_thread_computes_alone_and_the_process_as_before() -> None:
    seen: set[tuple[str, int]] = set()
    together = threading.Barrier(2)  # both threads must take part

    def compute(part: int) -> None:
        together.wait(60)
        seen.add((threading.current_thread().name, torch.get_num_threads()))

    in_threads(compute, zip(range(40)))
    assert len(seen) > 1
    assert {count for _, count in seen} == {1}
    assert torch.get_num_threads() == 3
    assert "mkl_get_max_threads() : 1\n" not in torch.__config__.parallel_info()


def test_no_graph_is_made_and_inference_stays_inference() -> None:
    x, out = torch.ones(8, requires_grad=True), torch.empty(8)
    in_threads(lambda part: torch.mul(x[part], 2, out=out[part]), zip(range(8)))
    assert not out.requires_grad
    with torch.inference_mode():
        made = torch.zeros(8)
        in_threads(lambda part: made[part].add_(1), zip(range(8)))
    assert made.sum() == 8


def test_an_error_ends_it_and_no_part_computes_on() -> None:
    running = threading.Semaphore(0)

    def compute(part: int) -> None:
        if part == 3:
            raise ValueError("part 3")
        time.sleep(0.002)
        running.release()

    with pytest.raises(ValueError, match="part 3"):
        in_threads(compute, zip(range(100)))
    done = running._value
    time.sleep(0.01)
    assert done == running._value < 99


def test_an_operation_does_not_wait_for_that_of_another_thread() -> None:
    begun, go_on, done = threading.Semaphore(0), threading.Event(), torch.zeros(40)

    def hold(part: int) -> None:
        begun.release()
        go_on.wait(60)

    other = threading.Thread(target=lambda: in_threads(hold, zip(range(40))))
    other.start()
    for _ in range(3):  # all threads are taken
        begun.acquire(timeout=60)
    in_threads(lambda part: done[part].add_(1), zip(range(40)))
    assert not go_on.is_set()
    go_on.set()
    other.join()
    assert torch.equal(done, torch.ones(40))


def test_who_watches_is_told_in_the_thread_that_asked() -> None:
    told: list[tuple[int, int]] = []
    with watching(lambda loops: told.append((threading.get_ident(), loops[-1][1]))):
        in_threads(lambda part: None, zip(range(12)))
    assert told == [(threading.get_ident(), 12)] * 12


def test_what_a_mode_has_to_see_is_computed_here() -> None:
    class Seen(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.count += func._opname == "add_"
            return func(*args, **(kwargs or {}))

    x = torch.zeros(20)
    with Seen() as seen:
        in_threads(lambda part: x[part].add_(1), zip(range(20)))
    assert seen.count == 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_has_threads_of_its_own() -> None:
    expected = sum_of(40)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(sum_of(40), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_where_no_thread_can_compute_alone_torch_divides_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_can_compute_alone", lambda: False)
    names: set[str] = set()
    in_threads(lambda part: names.add(threading.current_thread().name), zip(range(40)))
    assert names == {threading.current_thread().name}
