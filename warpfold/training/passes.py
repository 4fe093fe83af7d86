"""Track the progress of forward passes with hooks, which do not change any number."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from warpfold.model.alphafold import AlphaFold
from warpfold.model.axial import Block
from warpfold.ops.dispatch import Loops, watching


class PassPlace(NamedTuple):
    """The position of a running forward pass."""

    number: int  # the pass, from 1
    passes: int  # the number of passes, unless recycling ends early
    block: int  # of the trunk, from 1
    blocks: int
    share: float  # of all passes that is done, 0 to 1, by the seconds that blocks took
    slice: int = 1  # of the slices of a layer, from 1
    slices: int = 1

    def __str__(self) -> str:
        slices = f", slice {self.slice}/{self.slices}" if self.slices > 1 else ""
        return f"pass {self.number}/{self.passes}, block {self.block}/{self.blocks}{slices}"


class _Follower:
    """Track the position of a model with hooks on its layers and with its loops, and report it.

    The share of a pass follows from the time of the last block of each stack.  Within a block it follows from the
    clock, and in the first block from the number of layers.
    """

    def __init__(
        self,
        model: AlphaFold,
        passes: int,
        report: Callable[[PassPlace], object],
        interval: float,
        clock: Callable[[], float],
    ) -> None:
        self.passes, self.report, self.interval, self.clock = passes, report, interval, clock
        self.modules = (model.extra_stack, model.evoformer)
        self.stacks = [[block for block in stack.blocks if isinstance(block, Block)] for stack in self.modules]
        self.layers = [1, 1]  # of a block of each stack
        self.seconds: list[float | None] = [None, None]  # of a block of each stack
        self.block_start: float | None = None
        self.number, self.here = 1, (0, -1, 0)  # the pass; stack, block and layer
        self.trunk_ended = False  # in this pass
        self.stack: int | None = None  # the stack that runs
        # Where several ranks share a stack, its layers and blocks are not called as modules, but blocks are a loop.
        self.by_layer = False
        self.next_block = 0  # of that loop
        self.last_report, self.highest = float("-inf"), 0.0

    def hooks(self) -> Iterator[Any]:
        """Register the hooks on the model and yield their handles."""
        for s, (module, blocks) in enumerate(zip(self.modules, self.stacks)):
            yield module.register_forward_pre_hook(lambda *_, s=s: self.enter_stack(s))
            yield module.register_forward_hook(lambda *_, s=s: self.leave_stack(s))
            for b, block in enumerate(blocks):
                layers = list(dict.fromkeys(step.layer for step in block.steps))
                self.layers[s] = len(layers)
                for k, layer in enumerate(layers):
                    yield layer.register_forward_pre_hook(lambda *_, at=(s, b, k): self.enter_layer(*at))

    def enter_stack(self, stack: int) -> None:
        self.stack, self.by_layer, self.next_block, self.block_start = stack, False, 0, None

    def leave_stack(self, stack: int) -> None:
        self._time_block(stack)
        self.stack, self.block_start = None, None
        self.trunk_ended = stack == len(self.modules) - 1
        if self.trunk_ended:
            self.report_place()

    def enter_layer(self, s: int, b: int, k: int) -> None:
        """Update the position at the start of a layer, and of a block if the layer is its first."""
        if self.trunk_ended:
            self.number, self.trunk_ended = min(self.number + 1, self.passes), False
        elif (s, b, k) <= self.here:
            # Memory ran out, and the example starts again under a tighter plan.
            self.number, self.highest = 1, 0.0
        if k == 0:
            self._time_block(s)
            self.block_start = self.clock()
        self.here, self.by_layer = (s, b, k), True
        self.report_place()

    def _time_block(self, stack: int) -> None:
        if self.block_start is not None:
            self.seconds[stack] = self.clock() - self.block_start

    def iterate(self, loops: Loops) -> None:
        """Update the position at an iteration of a loop."""
        if self.stack is None:
            self.report_place()
            return
        if not self.by_layer:
            # The outer loop is the one of the stack over its blocks.
            (b, _), *loops = loops
            if not loops:
                # The last iteration gathers results after the last block.
                if b == self.next_block < len(self.stacks[self.stack]):
                    self.next_block += 1
                    self.enter_layer(self.stack, b, 0)
                    self.by_layer = False
                return
        self.report_place(loops[0][0] + 1, loops[0][1])

    def report_place(self, slice: int = 1, slices: int = 1) -> None:
        """Report the position, unless the last report was less than `interval` seconds ago."""
        now = self.clock()
        if now - self.last_report < self.interval:
            return
        self.last_report = now
        (s, b, k), counts = self.here, [len(blocks) for blocks in self.stacks]
        # The time of a block that has not run yet is the mean of the others.
        measured = [seconds for seconds in self.seconds if seconds]
        costs = [seconds or (sum(measured) / len(measured) if measured else 1.0) for seconds in self.seconds]
        within_block = k / self.layers[s]
        if self.block_start is not None and self.seconds[s]:
            within_block = min((now - self.block_start) / costs[s], 1.0)
        whole = sum(count * cost for count, cost in zip(counts, costs))
        before = sum(count * cost for count, cost in zip(counts[:s], costs))
        in_pass = (before + (b + within_block) * costs[s]) / whole if b >= 0 and whole else 0.0
        in_pass = 1.0 if self.trunk_ended else in_pass
        # Estimates change with the measured times, but a progress bar must not move back.
        self.highest = max(self.highest, min((self.number - 1 + in_pass) / self.passes, 1.0))
        block = sum(counts[:s]) + max(b, 0) + 1
        self.report(PassPlace(self.number, self.passes, block, max(sum(counts), 1), self.highest, slice, slices))


@contextmanager
def followed(
    model: AlphaFold,
    passes: int,
    report: Callable[[PassPlace], object],
    interval: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[None]:
    """Report the position of the model within the context, before each layer of the trunk and each of its slices.

    If several ranks share a protein, the position is reported for each block and slice.
    passes: of one forward call, its ensemble included.
    report: an exception that it raises ends the pass.
    interval: minimum seconds between two reports.
    """
    follower = _Follower(model, passes, report, interval, clock)
    hooks = list(follower.hooks())
    try:
        with watching(follower.iterate):
            yield
    finally:
        for hook in hooks:
            hook.remove()
