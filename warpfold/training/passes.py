"""Follow a forward pass of a model from outside: nothing of the model knows of it, so that no number changes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from warpfold.model.alphafold import AlphaFold
from warpfold.model.axial import Block
from warpfold.ops.dispatch import Loops, watching

Kind = tuple[int, int, str]  # of a layer: its stack, its place in a block, its class


class PassPlace(NamedTuple):
    """Say where a forward pass is."""

    number: int  # the pass, from 1
    passes: int  # of them in all, if recycling does not end early
    block: int  # of the trunk, from 1
    blocks: int
    share: float  # how much of all passes is done, 0 to 1, by the seconds that layers of each kind took
    slice: int = 1  # of the slices that a layer computes one after another, from 1
    slices: int = 1

    def __str__(self) -> str:
        slices = f", slice {self.slice}/{self.slices}" if self.slices > 1 else ""
        return f"pass {self.number}/{self.passes}, block {self.block}/{self.blocks}{slices}"


class LayerTimes:
    """How much of the layer that runs is done, and what layers cost, by the seconds that each kind took last.

    A layer goes through loops, one after another: the last one of its kind says when each of them begins.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._marks: dict[Kind, list[float]] = {}  # seconds at which its loops began, and at which it ended
        self._kind: Kind | None = None
        self._began, self._loops = 0.0, list[float]()

    def begin(self, kind: Kind | None) -> None:
        """Note that a layer begins, or none; so the one before has ended."""
        now = self._clock()
        if self._kind is not None:
            self._marks[self._kind] = [*self._loops, now - self._began]
        self._kind, self._began, self._loops = kind, now, []

    def drop(self) -> None:
        """Forget the layer that ran: it has not ended."""
        self._kind = None

    def begin_loop(self) -> None:
        """Note that the layer begins another loop."""
        self._loops.append(self._clock() - self._began)

    def within(self, done: float) -> float:
        """Return how much of the layer is done, 0 to 1, where so much of its last loop is."""
        count = len(self._loops)
        if self._kind is None or not count:
            return 0.0
        marks = self._marks.get(self._kind, [])
        if count < len(marks) and marks[-1] > 0:
            return (marks[count - 1] + done * (marks[count] - marks[count - 1])) / marks[-1]
        return 1 - 0.5 ** (count - 1) * (1 - done / 2)  # half of what is left: nobody knows how many loops come

    def cost(self, kind: Kind) -> float:
        """Return the seconds of a layer: of its kind, of its class in another stack, or the mean of those known."""
        if (own := self._marks.get(kind)) is not None:
            return own[-1]
        alike = [marks[-1] for other, marks in self._marks.items() if other[2] == kind[2]]
        known = alike or [marks[-1] for marks in self._marks.values()]
        return sum(known) / len(known) if known else 1.0


class _Follower:
    """Knows from hooks and loops where a model is, and tells it."""

    def __init__(
        self,
        model: AlphaFold,
        passes: int,
        tell: Callable[[PassPlace], object],
        often: float,
        clock: Callable[[], float],
    ) -> None:
        self.passes, self.tell, self.often, self.clock = passes, tell, often, clock
        self.modules = (model.extra_stack, model.evoformer)
        self.stacks = [[one for one in stack.blocks if isinstance(one, Block)] for stack in self.modules]
        self.kinds: list[list[Kind]] = [[], []]  # of the layers of a block of each stack
        self.times = LayerTimes(clock)
        self.number, self.here = 1, (0, -1, 0)  # the pass; stack, block and layer
        self.ended = False  # the trunk, in this pass
        self.inside: int | None = None  # which stack runs
        # Where several ranks share a stack, its layers and blocks are not called as modules, but blocks are a loop.
        self.by_layer, self.coming = False, 0  # the next block of that loop
        self.said, self.highest = float("-inf"), 0.0

    def hooks(self) -> Iterator[Any]:
        """Yield the handles of the hooks on the model."""
        for s, (module, blocks) in enumerate(zip(self.modules, self.stacks)):
            yield module.register_forward_pre_hook(lambda *_, s=s: self.enter(s))
            yield module.register_forward_hook(lambda *_, s=s: self.leave(s))
            for b, block in enumerate(blocks):
                layers = list(dict.fromkeys(step.layer for step in block.steps))
                self.kinds[s] = self.kinds[s] or [(s, k, type(layer).__name__) for k, layer in enumerate(layers)]
                for k, layer in enumerate(layers):
                    yield layer.register_forward_pre_hook(lambda *_, at=(s, b, k): self.arrive(*at))

    def enter(self, stack: int) -> None:
        """Note that a stack begins."""
        self.inside, self.by_layer, self.coming = stack, False, 0
        self.times.drop()

    def leave(self, stack: int) -> None:
        """Note that a stack has ended."""
        self.inside = None
        self.times.begin(None)
        self.ended = stack == len(self.modules) - 1
        if self.ended:
            self.say(1.0)

    def arrive(self, s: int, b: int, k: int) -> None:
        """Note that a layer begins."""
        if self.ended:
            self.number, self.ended = min(self.number + 1, self.passes), False
        elif (s, b, k) <= self.here:  # memory has run out: all over again, by a tighter plan
            self.number, self.highest = 1, 0.0
        self.here, self.by_layer = (s, b, k), True
        self.times.begin(self.kinds[s][k])
        self.say(0.0)

    def turn(self, loops: Loops) -> None:
        """Note a turn of a loop."""
        if self.inside is None:
            self.say(0.0)
            return
        if not self.by_layer:  # the outer loop is the stack's own, over its blocks
            (b, _), *loops = loops
            if not loops:
                if b == self.coming < len(self.stacks[self.inside]):  # and not what is gathered after the last one
                    self.coming += 1
                    self.kinds[self.inside] = [(self.inside, 0, "block")]
                    self.arrive(self.inside, b, 0)
                    self.by_layer = False
                return
        if len(loops) == 1 and loops[0][0] == 0:
            self.times.begin_loop()
        done = 0.0
        for turns, count in reversed(loops):
            done = (turns + done) / count
        self.say(done, loops[0][0] + 1, loops[0][1])

    def say(self, done: float, slice: int = 1, slices: int = 1) -> None:
        """Tell where the model is.  done: of the loop that runs."""
        now = self.clock()
        if now - self.said < self.often:
            return
        self.said = now
        of_pass = 1.0 if self.ended else self._share_of_pass(done)
        self.highest = max(self.highest, min((self.number - 1 + of_pass) / self.passes, 1.0))
        block = sum(map(len, self.stacks[: self.here[0]])) + max(self.here[1], 0) + 1
        blocks = max(sum(map(len, self.stacks)), 1)
        self.tell(PassPlace(self.number, self.passes, block, blocks, self.highest, slice, slices))

    def _share_of_pass(self, done: float) -> float:
        """Return how much of the pass is done, 0 to 1."""
        costs = [[self.times.cost(kind) for kind in kinds] for kinds in self.kinds]
        stacks = [len(blocks) * sum(each) for blocks, each in zip(self.stacks, costs)]
        s, b, k = self.here
        if b < 0 or sum(stacks) <= 0:
            return 0.0
        here = sum(stacks[:s]) + b * sum(costs[s]) + sum(costs[s][:k]) + self.times.within(done) * costs[s][k]
        return min(here / sum(stacks), 1.0)


@contextmanager
def followed(
    model: AlphaFold,
    passes: int,
    tell: Callable[[PassPlace], object],
    often: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[None]:
    """Tell where the model is, within the context: before each of the trunk's layers and each slice that they compute.

    What `tell` raises ends the pass.  passes: of one forward call, its ensemble counted.  Where several ranks share a
    protein, block by block and slice by slice.  often: seconds between two words at least.
    """
    follower = _Follower(model, passes, tell, often, clock)
    hooks = list(follower.hooks())
    try:
        with watching(follower.turn):
            yield
    finally:
        for hook in hooks:
            hook.remove()
