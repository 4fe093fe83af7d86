"""Follow a forward pass of a model from outside: nothing of the model knows of it, so that no number changes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from warpfold.model.alphafold import AlphaFold


class PassPlace(NamedTuple):
    """Where a forward pass is."""

    number: int  # the pass, from 1
    passes: int  # of them in all, if recycling does not end early
    block: int  # of the trunk, from 1
    blocks: int

    @property
    def share(self) -> float:
        """Return how much of the whole is done, 0 to 1, as if every block took the same."""
        return min(((self.number - 1) * self.blocks + self.block - 1) / (self.passes * self.blocks), 1.0)

    def __str__(self) -> str:
        return f"pass {self.number} of {self.passes}, block {self.block} of {self.blocks}"


@contextmanager
def followed(model: AlphaFold, passes: int, tell: Callable[[PassPlace], object]) -> Iterator[None]:
    """Tell where the model is, within the context, before each of the trunk's layers; what `tell` raises ends the pass.

    passes: of one forward call, its ensemble counted.  Where several ranks share a protein, only after each pass.
    """
    blocks: list[nn.Module] = [*model.extra_stack.blocks, *model.evoformer.blocks]
    seen = {"pass": 1, "block": 0}

    def place() -> PassPlace:
        return PassPlace(min(seen["pass"], passes), passes, max(seen["block"], 1), max(len(blocks), 1))

    def in_block(*_: Any) -> None:
        if seen["block"] >= len(blocks):  # of the next sample of the alignment, or pass
            seen["pass"], seen["block"] = seen["pass"] + 1, 0
        seen["block"] += 1
        tell(place())

    def in_layer(*_: Any) -> None:
        tell(place())

    def after_pass(*_: Any) -> None:
        if not seen["block"]:  # blocks that several ranks share are not called as modules
            seen["pass"] += 1
        tell(place())

    hooks = [block.register_forward_pre_hook(in_block) for block in blocks]
    hooks += [layer.register_forward_pre_hook(in_layer) for block in blocks for layer in block.children()]
    hooks.append(model.structure.register_forward_pre_hook(after_pass))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
