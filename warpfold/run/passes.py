"""Follow a forward pass of a model from outside: nothing of the model knows of it, so that no number changes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from warpfold.model.alphafold import AlphaFold
from warpfold.model.axial import Block


class PassPlace(NamedTuple):
    """Say where a forward pass is."""

    number: int  # the pass, from 1
    passes: int  # of them in all, if recycling does not end early
    block: int  # of the trunk, from 1
    blocks: int
    within: float = 0.0  # how much of the block's layers is done, 0 to 1

    @property
    def share(self) -> float:
        """Return how much of the whole is done, 0 to 1, as if every layer took the same."""
        return min(((self.number - 1) * self.blocks + self.block - 1 + self.within) / (self.passes * self.blocks), 1.0)

    def __str__(self) -> str:
        return f"pass {self.number}/{self.passes}, block {self.block}/{self.blocks}"


@contextmanager
def followed(model: AlphaFold, passes: int, tell: Callable[[PassPlace], object]) -> Iterator[None]:
    """Tell where the model is, within the context, before each of the trunk's layers; what `tell` raises ends the pass.

    passes: of one forward call, its ensemble counted.  Where several ranks share a protein, only after each pass.
    """
    blocks = [one for one in (*model.extra_stack.blocks, *model.evoformer.blocks) if isinstance(one, Block)]
    number, block = 1, 0

    def told(within: float = 0.0) -> None:
        tell(PassPlace(min(number, passes), passes, max(block, 1), max(len(blocks), 1), within))

    def before_block(*_: Any) -> None:
        nonlocal number, block
        if block >= len(blocks):  # of the next sample of the alignment, or pass
            number, block = number + 1, 0
        block += 1
        told()

    def before_layer(within: float) -> Callable[..., None]:
        return lambda *_: told(within)

    def after_trunk(*_: Any) -> None:
        nonlocal number
        if not block:  # blocks that several ranks share are not called as modules
            number += 1
        told(1.0 if block else 0.0)

    hooks = [model.structure.register_forward_pre_hook(after_trunk)]
    for one in blocks:
        hooks.append(one.register_forward_pre_hook(before_block))
        layers = list(dict.fromkeys(step.layer for step in one.steps))
        hooks += [layer.register_forward_pre_hook(before_layer(i / len(layers))) for i, layer in enumerate(layers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
