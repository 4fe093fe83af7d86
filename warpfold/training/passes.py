"""Follow a forward pass of a model from outside: nothing of the model knows of it, so that no number changes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from warpfold.model.alphafold import AlphaFold
from warpfold.model.axial import Block
from warpfold.ops.dispatch import Loops, watching


class PassPlace(NamedTuple):
    """Say where a forward pass is."""

    number: int  # the pass, from 1
    passes: int  # of them in all, if recycling does not end early
    block: int  # of the trunk, from 1
    blocks: int
    share: float  # how much of all passes is done, 0 to 1, by the seconds that blocks took
    slice: int = 1  # of the slices that a layer computes one after another, from 1
    slices: int = 1

    def __str__(self) -> str:
        slices = f", slice {self.slice}/{self.slices}" if self.slices > 1 else ""
        return f"pass {self.number}/{self.passes}, block {self.block}/{self.blocks}{slices}"


class _Follower:
    """Knows from hooks and loops where a model is, and tells it.

    How much of a pass is done it knows by the seconds that a block of each stack took last; within a block by the
    clock, or by its layers in the first one.
    """

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
        self.layers = [1, 1]  # of a block of each stack
        self.seconds: list[float | None] = [None, None]  # of a block of each stack
        self.began: float | None = None  # the block
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
                self.layers[s] = len(layers)
                for k, layer in enumerate(layers):
                    yield layer.register_forward_pre_hook(lambda *_, at=(s, b, k): self.arrive(*at))

    def enter(self, stack: int) -> None:
        """Note that a stack begins."""
        self.inside, self.by_layer, self.coming, self.began = stack, False, 0, None

    def leave(self, stack: int) -> None:
        """Note that a stack has ended."""
        self._time_block(stack)
        self.inside, self.began = None, None
        self.ended = stack == len(self.modules) - 1
        if self.ended:
            self.say()

    def arrive(self, s: int, b: int, k: int) -> None:
        """Note that a layer begins, the first one of a block with it."""
        if self.ended:
            self.number, self.ended = min(self.number + 1, self.passes), False
        elif (s, b, k) <= self.here:  # memory has run out: all over again, by a tighter plan
            self.number, self.highest = 1, 0.0
        if k == 0:
            self._time_block(s)
            self.began = self.clock()
        self.here, self.by_layer = (s, b, k), True
        self.say()

    def _time_block(self, stack: int) -> None:
        if self.began is not None:
            self.seconds[stack] = self.clock() - self.began

    def turn(self, loops: Loops) -> None:
        """Note a turn of a loop."""
        if self.inside is None:
            self.say()
            return
        if not self.by_layer:  # the outer loop is the stack's own, over its blocks
            (b, _), *loops = loops
            if not loops:
                if b == self.coming < len(self.stacks[self.inside]):  # and not what is gathered after the last one
                    self.coming += 1
                    self.arrive(self.inside, b, 0)
                    self.by_layer = False
                return
        self.say(loops[0][0] + 1, loops[0][1])

    def say(self, slice: int = 1, slices: int = 1) -> None:
        """Tell where the model is."""
        now = self.clock()
        if now - self.said < self.often:
            return
        self.said = now
        (s, b, k), counts = self.here, [len(blocks) for blocks in self.stacks]
        known = [seconds for seconds in self.seconds if seconds]
        costs = [seconds or (sum(known) / len(known) if known else 1.0) for seconds in self.seconds]
        within = k / self.layers[s]
        if self.began is not None and self.seconds[s]:
            within = min((now - self.began) / costs[s], 1.0)
        whole = sum(count * cost for count, cost in zip(counts, costs))
        before = sum(count * cost for count, cost in zip(counts[:s], costs))
        of_pass = 1.0 if self.ended else (before + (b + within) * costs[s]) / whole if b >= 0 and whole else 0.0
        self.highest = max(self.highest, min((self.number - 1 + of_pass) / self.passes, 1.0))
        block = sum(counts[:s]) + max(b, 0) + 1
        self.tell(PassPlace(self.number, self.passes, block, max(sum(counts), 1), self.highest, slice, slices))


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
