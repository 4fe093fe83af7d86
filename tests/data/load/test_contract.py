"""Check that the order of examples follows from the seed alone (docs/explanation/parallel_training.md)."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count, takewhile
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.load.test_loader import Loader
from tests.data.load.test_schedule import make
from warpfold.data.load.blocks import BlockReader, BlockWriter
from warpfold.data.load.examples import ExampleDataset, Quarantine, RunOrder, only
from warpfold.data.load.order import Order, Source
from warpfold.data.load.schedule import Draw, Schedule, State, share_of
from warpfold.data.load.workers import Failed, Made, Outcome
from warpfold.data.store.store import Store
from warpfold.engine.ready_maker import BatchMaker

EXAMPLES, STEPS = 6, 7  # per step; per run: six epochs of a store of seven


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make(tmp_path_factory.mktemp("contract") / "store", [f"e{i}" for i in range(7)], {"e0": 800})


class AnyOrder:
    """Make examples without features, and finish jobs in random order. Bad entries fail."""

    def __init__(self, random: Random, bad: set[str]) -> None:
        self._random, self._bad, self._jobs = random, bad, list[tuple[int, Sequence[Any]]]()
        self._make, self._writer, self._reader = (
            BatchMaker(ExampleDataset(lambda *_: {}), only, 0),
            BlockWriter(),
            BlockReader(),
        )
        self.outcomes: dict[int, Outcome] = {}

    @property
    def changed(self) -> AbstractContextManager[None]:
        return self._looked_at()

    def submit(self, ticket: int, job: Sequence[Any]) -> None:
        self._jobs.append((ticket, job))

    @contextmanager
    def _looked_at(self) -> Iterator[None]:
        """Finish some jobs before the caller looks for results; none finishes meanwhile."""
        while self._jobs and self._random.random() < 0.6:
            self.wait()
        yield

    def wait(self) -> None:
        ticket, (epoch, [index]) = self._jobs.pop(self._random.randrange(len(self._jobs)))
        written = self._writer.write(self._make(epoch, [index]))
        made = Made(written.layout, self._reader.read(written).copy())
        self.outcomes[ticket] = Failed(f"{index[1]}: damaged") if index[1] in self._bad else made

    def close(self) -> None: ...


class Run:
    """A run that is stopped and killed at random: its files, and the examples used by each step."""

    def __init__(self, store: Store, random: Random, bad: set[str], windows: Sequence[int]) -> None:
        self.order, self.random, self.bad, self.windows = Order([Source(store)], seed=3), random, bad, windows
        self.checkpoint = 0, State()  # step -> examples used
        self.orders: dict[tuple[int, int], dict[int, Draw]] = {}  # ranks, rank: the lines of its order.txt
        self.aside: list[str] = []
        self.steps: dict[int, tuple[int, set[tuple[int, str]]]] = {}  # as repeated last: ranks, index and name

    def session(self) -> None:
        """Continue from the checkpoint on some ranks for some steps, save some, and die in the middle of one."""
        random, (begin, state) = self.random, self.checkpoint
        ranks, window = random.choice((1, 2, 3, 5, 6)), random.choice(self.windows)
        lines = [self.orders.setdefault((ranks, rank), {}) for rank in range(ranks)]
        shares = [share_of(EXAMPLES, ranks, rank) for rank in range(ranks)]
        replay = [
            [draw for draw in takewhile(lambda draw: draw is not None, map(known.get, count(begin * share))) if draw]
            for known, share in zip(lines, shares)
        ]
        numbers = [draw.number for draws in replay for draw in draws]
        # As in `warpfold.training.ledger.Ledger`.
        if len(set(numbers)) < len(numbers) or any(n < state.first or n in state.early for n in numbers):
            replay = []

        def loader(rank: int) -> Loader:
            """Yield the examples of a rank. Their lines are written before they are used."""
            places, schedule = count(begin * shares[rank]), (state, STEPS - begin, EXAMPLES, rank, ranks, cost, replay)
            order = RunOrder(
                self.order, Schedule(*schedule),
                Quarantine(len(self.bad), self.aside, lambda name, *_: self.aside.append(name)),
                lambda step: 1 + (begin + step) % 2, lambda draw: lines[rank].update({next(places): draw}),
            )  # fmt: skip
            return Loader(order, None, workers=2, ahead=2 + rank, window=window)

        loaders = [loader(rank) for rank in range(ranks)]
        repeated = loaders[0].order.schedule.repeated
        for step in range(begin, random.randint(begin + 1, STEPS)):
            used = [next(one) for one, share in zip(loaders, shares) for _ in range(share)]
            now = {(sample.index, sample.name) for sample in used}
            assert len(now) == EXAMPLES
            if step < begin + repeated and self.steps.get(step, (0,))[0] == ranks:
                assert self.steps[step][1] == now  # whatever its first window was
            self.steps[step] = ranks, now
            if step + 1 == STEPS or random.random() < 0.4:
                self.checkpoint = step + 1, loaders[0].order.state([one.order.exchanged() for one in loaders])
        else:
            for one in loaders if step + 1 < STEPS else ():
                for _ in range(random.randrange(one.order.schedule.share)):
                    next(one)


def cost(index: int) -> float:
    return 1 + index * 7 % 5


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.sets(st.sampled_from(range(7)), max_size=3), st.booleans())
def test_what_a_run_sees_follows_from_the_seed(store: Store, seed: int, bad: set[int], windowed: bool) -> None:
    """For any number of ranks, any stops, kills and damaged entries, with a window and in order."""
    names, random = {f"e{i}" for i in bad}, Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warpfold.engine.ready_maker.Workers", lambda *_: AnyOrder(random, names))
        run = Run(store, random, names, (0, 2, 5) if windowed else (0,))
        while run.checkpoint[0] < STEPS:
            run.session()
    order = Order([Source(store)], seed=3)

    def name(number: int) -> str:
        """Return the entry of an index: the first one drawn that is not damaged."""
        return next(one for draw in count() if (one := order.entry(number, draw).name) not in names)

    assert run.checkpoint[1] == State(STEPS * EXAMPLES)
    used = [example for step in range(STEPS) for example in run.steps[step][1]]
    assert sorted(used) == [(number, name(number)) for number in range(STEPS * EXAMPLES)]
    if not windowed:
        for step, (_, examples) in run.steps.items():
            assert {number for number, _ in examples} == set(range(step * EXAMPLES, (step + 1) * EXAMPLES))
