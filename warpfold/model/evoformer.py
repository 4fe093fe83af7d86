"""The Evoformer block and the stack of them (Algorithms 6 and 18)."""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from warpfold.model.axial import Block, BlockStack, Step, Steps
from warpfold.model.msa import MSAStack, OuterProductMean
from warpfold.model.pair import PairConfig, PairStack
from warpfold.ops.transition import Activation


@dataclass(frozen=True, kw_only=True)
class EvoformerConfig:
    """The settings of an Evoformer stack; the defaults are the main stack's (Supp. 1.6)."""

    blocks: int = 48
    heads: int = 8  # Algorithms 7 and 8
    transition: int = 4  # Algorithm 9: n
    activation: Activation = "relu"  # of the transition; "swiglu" is AlphaFold3's: another model
    rate: float = 0.15  # dropout of row attention, Algorithm 6
    c_outer: int = 32  # Algorithm 10: c
    # Where the outer product stands: "middle" is AlphaFold2's order; "first" is Multimer's; with "last" both halves
    # read the block's input and the outer product closes it (HelixFold's parallel order: another model).
    outer: Literal["middle", "first", "last"] = "middle"
    pair: PairConfig = field(default_factory=PairConfig)


class EvoformerBlock(Block):
    """Algorithm 6 (and 18, with global column attention).

    m [*, s, r, c_m], z [*, r, r, c_z], m_mask [*, s, r], z_mask [*, r, r] -> m, z.
    """

    def __init__(self, c_m: int, c_z: int, config: EvoformerConfig, global_column: bool = False) -> None:
        super().__init__()
        self.order = config.outer
        c = config
        self.msa = MSAStack(c_m, c_z, c.heads, c.transition, c.rate, global_column, c.activation)
        self.outer = OuterProductMean(c_m, c_z, config.c_outer)
        self.pair = PairStack(c_z, config.pair)

    @property
    def steps(self) -> Steps:
        """The lines of Algorithm 6, with the outer product where the settings have it."""
        msa = Step("m", self.msa.row, "z"), Step("m", self.msa.column), Step("m", self.msa.transition)
        outer = (Step("z", self.outer, "m"),)
        pair = self.pair.steps
        return {"first": outer + msa + pair, "middle": msa + outer + pair, "last": msa + pair + outer}[self.order]


class Evoformer(BlockStack):
    """A stack of blocks: the main one, or the extra MSA stack (Algorithm 18) with `global_column`."""

    def __init__(self, c_m: int, c_z: int, config: EvoformerConfig, global_column: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(EvoformerBlock(c_m, c_z, config, global_column) for _ in range(config.blocks))

    def forward(self, m: Tensor, z: Tensor, m_mask: Tensor, z_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new m [*, s, r, c_m] and z [*, r, r, c_z], given m_mask [*, s, r] and z_mask [*, r, r]."""
        m, z = self.execution.stack(self, (m, z), (m_mask, z_mask))
        return m, z
