"""What the bench, the doctor and tuning have to know of an operation.

An `OpProfile` says all of it: which layers call the operation and with which sizes, how inputs are drawn (with the
strides that the model gives them), and what it costs.  Every operation has its profile in check/cases.py.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from warpfold.ops.dispatch import Op
from warpfold.ops.linear import padded
from warpfold.ops.noise import DropoutFactors, Factors, Noise

MASKED = 0.15  # the share of keys masked in checks, where the last row is masked throughout
DROPPED = 0.25  # the dropout rate
CONSTANT = (  # the arguments without a gradient
    "mask", "a_mask", "b_mask", "factors", "true_frames", "true_points", "frame_mask", "point_mask", "pair_mask",
    "exists", "index", "order", "chain", "slot",
)  # fmt: skip
ALIGNMENTS = ("128x256", "512x384")  # sequences x residues of initial training and of fine-tuning
Argument = Tensor | DropoutFactors | float | str | None  # of an operation
Kinds = Mapping[str, tuple[str, ...]]  # the bench's kinds of shape, and the sizes of each by default
Sizes = Mapping[str, str | int]  # of a case: which of the layer's it is, or a number
LayerKind = Literal[
    "attention", "pointwise attention", "global attention", "projection", "transition", "outer product",
    "triangle product", "triangle output", "fape", "clashes",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    rows: int
    length: int  # positions in a row; of attention: queries
    keys: int = 0  # 0: as many as queries
    heads: int = 0
    width: int = 0  # of a head
    channels: int = 0  # of the operand
    outputs: int = 0
    bias: bool = False  # of attention
    transposed: bool = False  # rows and positions lie in memory the other way round
    dropped: bool = False  # with dropout
    batches: int = 1  # in which rows lie, each with a bias of its own
    gated: bool = False  # a transition is a SwiGLU


@dataclass(frozen=True, kw_only=True)
class LayerSizes(_Sizes):
    """A layer of the trunk at the size of an example: what decides how it calls operations (check/sizes.py)."""

    kind: LayerKind
    name: str
    projected: int = 0  # what it projects its normalised operand to
    hidden: int = 0  # channels within a transition, a factor of a triangle product, an outer product's operands

    @property
    def inner(self) -> int:
        """The channels of what all heads give."""
        return self.heads * self.width

    @property
    def expanded(self) -> bool:
        """Whether what the heads give is the same at all positions of a row."""
        return self.kind == "global attention"


@dataclass(frozen=True, kw_only=True)
class OpCase(_Sizes):
    """One operation at one size: positions [rows, length], as the layer that calls it sees them.

    For an outer product, [rows, keys] are the positions of the result, and `length` the sequences that it sums over;
    global attention has one query.  `outputs` are of norm_linear; of a tail, the channels of o and g; of a transition,
    its hidden channels.
    """

    op: str
    where: str  # the layer that calls it
    drawn: bool = False  # a tail draws the factors of its dropout, from seeded noise, as in every training run
    expanded: bool = False  # a tail's o is the same at all positions of a row, with a stride of zero
    full_rows: int = 0  # how many rows the model has; 0: these

    @property
    def attended(self) -> int:
        """How many keys a row has."""
        return self.keys or self.length

    @property
    def logits(self) -> int:
        """How many logits all rows and heads have together; 0 if this is not attention."""
        return self.rows * self.heads * self.length * self.attended

    @property
    def row_count(self) -> str:
        """The rows in words: "256 rows", or "2 of 256 rows" where they were cut."""
        return f"{self.rows} of {self.full_rows} rows" if self.full_rows else f"{self.rows} rows"

    def with_rows(self, rows: int) -> "OpCase":
        """Return the case with at most that many rows, but whole batches, and at least one; lengths stay."""
        if self.rows <= rows:
            return self
        each = self.rows // self.batches if self.batches > 1 else 1
        few = max(1, rows // each)
        batches = few if self.batches > 1 else 1
        return replace(self, rows=few * each, batches=batches, full_rows=self.full_rows or self.rows)


@dataclass(frozen=True)
class Cost:
    """What one pass must do: floating point operations of products, exponentials, and bytes to move."""

    flops: float
    exps: float
    bytes: float


@dataclass
class RandomTensors:
    """Draw the random tensors of one case."""

    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.device.type != "meta":  # it has no generator, and needs none: there are no numbers
            self.generator = torch.Generator(self.device).manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Draw normal numbers."""
        x = torch.randn(*shape, generator=self.generator, device=self.device)
        return (x * scale).to(dtype or self.dtype)

    def parameter(self, *shape: int, mean: float = 0.0, scale: float = 0.1) -> Tensor:
        """Draw a parameter; like the model's, it stays in fp32."""
        return self.normal(*shape, scale=scale, dtype=torch.float32) + mean

    def factors(self, *shape: int, drawn: bool) -> Factors:
        """Draw dropout factors; drawn: leave it to the operation, which draws them from seeded noise."""
        if drawn:
            noise = Noise().to(self.device)
            noise.seed(0)
            return noise.factors(shape, DROPPED, 0, torch.empty((), dtype=self.dtype, device=self.device))
        kept = torch.rand(*shape, generator=self.generator, device=self.device) > DROPPED
        return (kept / (1 - DROPPED)).to(self.dtype)

    def positions(self, case: OpCase, channels: int) -> Tensor:
        """Draw [rows, length, channels] or [batches, rows, ...], laid out as that layer's tensors; each position's
        numbers lie as projections do (ops/linear.py)."""
        rows, leading = case.rows // case.batches, ((case.batches,) if case.batches > 1 else ())
        order = (case.length, rows) if case.transposed else (rows, case.length)
        x = self.normal(*leading, *order, padded(channels))[..., :channels]
        return x.transpose(-2, -3) if case.transposed else x

    def mask(self, case: OpCase, masked: bool) -> Tensor:
        """Return a mask of ones; masked: draw one, whose last row is zero."""
        rows, leading = case.rows // case.batches, ((case.batches,) if case.batches > 1 else ())
        shape = (*leading, case.attended, rows) if case.transposed else (*leading, rows, case.attended)
        mask = torch.ones(shape, device=self.device)
        mask = mask.mT if case.transposed else mask
        if masked:
            mask *= torch.rand(mask.shape, generator=self.generator, device=self.device) > MASKED
            mask[..., -1, :] = 0
        return mask


@dataclass(frozen=True)
class OpInputs:
    """The arguments of one call, in order, and the names of those that have a gradient."""

    case: OpCase
    args: tuple[Argument, ...]
    names: tuple[str, ...]  # of those with a gradient
    grad: Tensor  # that of the output

    @property
    def wanted(self) -> list[Tensor]:
        """The arguments with a gradient."""
        return [t for t in self.args if isinstance(t, Tensor) and t.requires_grad]


def _shape(argument: Argument) -> Argument:
    """Return a tensor without its numbers; dropout factors change no shape."""
    if isinstance(argument, Tensor):
        return argument.to("meta")
    return None if isinstance(argument, DropoutFactors) else argument


class OpProfile(ABC):
    """All that `tune` knows of one operation; a subclass for each stands in check/cases.py."""

    name: ClassVar[str]  # on the command line and in tables
    op: ClassVar[Op[..., Tensor]]
    layers: ClassVar[tuple[LayerKind, ...]]  # the kinds of layer that call it
    part_of: ClassVar[str] = ""  # the operation whose --op means this one too
    tuned: ClassVar[bool] = True  # it has kernels of its own
    peers: ClassVar[tuple[str, ...]] = ()  # ways of others to compute it (bench/peers.py)
    kinds: ClassVar[Kinds] = {}  # none: the bench does not time it by itself
    odd: ClassVar[tuple[OpCase, ...]]  # sizes that find mistakes
    sizes: ClassVar[Sizes]  # with which a layer calls it: of `OpCase`, where they are not the layer's own

    def case(self, layer: LayerSizes) -> OpCase | None:
        """Return how a layer calls the operation; None if it does not."""
        if layer.kind not in self.layers:
            return None
        at = {"rows": layer.rows, "length": layer.length, "transposed": layer.transposed}
        at |= {name: of if isinstance(of, int) else getattr(layer, of) for name, of in self.sizes.items()}
        return OpCase(op=self.name, where=layer.name, **at)  # type: ignore[arg-type]  # bools

    @abstractmethod
    def arguments(self, case: OpCase, draw: RandomTensors, masked: bool) -> tuple[Argument, ...]:
        """Draw the arguments of a case; masked: with some keys masked, and all keys of one row."""

    def drawn(
        self, case: OpCase, draw: RandomTensors, masked: bool = False
    ) -> tuple[tuple[Argument, ...], tuple[str, ...]]:
        """Draw the arguments of a case; return them, and the names of those with a gradient."""
        args = self.arguments(case, draw, masked)
        names = []
        for name, t in zip(inspect.signature(self.op.definition).parameters, args):
            if isinstance(t, Tensor) and name not in CONSTANT:
                t.requires_grad_()
                names.append(name)
        return args, tuple(names)

    def inputs(self, case: OpCase, dtype: torch.dtype, device: torch.device, masked: bool) -> OpInputs:
        """Draw the arguments of a case, and a gradient of its output, the same each time."""
        draw = RandomTensors(dtype, device)
        args, names = self.drawn(case, draw, masked)
        with torch.no_grad():
            out = self.op.definition(*map(_shape, args))
        return OpInputs(case, args, names, draw.normal(*out.shape))

    @abstractmethod
    def cost(self, case: OpCase, forward: bool, itemsize: int) -> Cost:
        """Count what one pass must do, without the bytes of parameters, a few thousandths."""

    def example(self, kind: str, s: int, r: int) -> OpCase:
        """Return a case of the bench with AlphaFold2's channels and heads (Supp. 1.4, 1.6): s sequences, r residues."""
        return OpCase(op=self.name, where=kind, rows=s, length=r, channels=256 if kind == "msa" else 128)

    def numbers(self, case: OpCase) -> int:
        """Count the numbers in the largest tensor that the definition holds."""
        return case.rows * case.length * max(case.channels, case.outputs)

    def size(self, case: OpCase) -> str:
        """Return the size in words: "256 rows of 256, 128 channels"."""
        return f"{case.row_count} of {case.length}, {case.channels} channels"


def attention_cost(case: OpCase, forward: bool, itemsize: int, key_heads: int) -> Cost:
    """Count two products forward (q k, p v) and five backward (q k again, dO v, and those for dq, dk, dv)."""
    queries = case.rows * case.heads * case.length * case.width
    keys = case.rows * case.attended * case.width * key_heads
    bias = case.batches * case.heads * case.length * case.attended if case.bias else 0
    # q, o and k, v; backward also dO and dq, and dk, dv; the bias is read, and its gradient written.
    numbers = 2 * queries + 2 * keys + bias if forward else 4 * queries + 4 * keys + 2 * bias
    masks = 4 * case.rows * case.attended
    products = 2 if forward else 5
    return Cost(products * 2 * case.logits * case.width, case.logits, numbers * itemsize + masks)
