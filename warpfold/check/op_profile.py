"""Profiles of operations for benchmarks, the doctor and tuning.

An `OpProfile` describes which layers call the operation with which sizes, how to draw inputs with the strides of the
model's tensors, and its cost. The profiles of all operations are in check/cases.py.
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

# Fraction of masked keys in checks, where the last row is masked completely.
MASKED = 0.15
# Dropout rate.
DROPPED = 0.25
# Arguments without a gradient.
CONSTANT = (
    "mask", "a_mask", "b_mask", "factors", "true_frames", "true_points", "frame_mask", "point_mask", "pair_mask",
    "exists", "index", "order", "chain", "slot",
)  # fmt: skip
# Sequences x residues of initial training and of fine-tuning.
ALIGNMENTS = ("128x256", "512x384")
# An argument of an operation.
Argument = Tensor | DropoutFactors | float | str | None
# Kinds of shape in benchmarks, with their default sizes.
Kinds = Mapping[str, tuple[str, ...]]
# Fields of `OpCase`, as a field of `LayerSizes` or a constant.
Sizes = Mapping[str, str | int]
LayerKind = Literal[
    "attention", "pointwise attention", "global attention", "projection", "transition", "outer product",
    "triangle product", "triangle output", "fape", "clashes",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Sizes of layers and operations.

    length: positions in a row, or queries of attention. keys: of attention; 0 for as many as queries. width: of a head.
    channels: of the operand. bias: of attention. transposed: rows and positions are swapped in memory. dropped: with
    dropout. batches: of rows, each with its own bias. gated: a transition is a SwiGLU.
    """

    rows: int
    length: int
    keys: int = 0
    heads: int = 0
    width: int = 0
    channels: int = 0
    outputs: int = 0
    bias: bool = False
    transposed: bool = False
    dropped: bool = False
    batches: int = 1
    gated: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerSizes(_Sizes):
    """Sizes of a trunk layer for an example, which determine how it calls operations (check/sizes.py).

    projected: outputs of the projection of its normalised operand. hidden: channels within a transition, of a factor of
    a triangle product, or of an outer product's operands.
    """

    kind: LayerKind
    name: str
    projected: int = 0
    hidden: int = 0

    @property
    def inner(self) -> int:
        """Channels of the output of all heads."""
        return self.heads * self.width

    @property
    def expanded(self) -> bool:
        """Whether the output of the heads is equal at all positions of a row."""
        return self.kind == "global attention"


@dataclass(frozen=True, kw_only=True)
class OpCase(_Sizes):
    """An operation at one size, with positions [rows, length] from the view of the calling layer.

    For an outer product, [rows, keys] are the positions of the result, and `length` is the number of summed sequences.
    Global attention has one query. `outputs` are the outputs of norm_linear, the channels of o and g of a tail, or the
    hidden channels of a transition.
    where: the calling layer. drawn: a tail draws its dropout factors from seeded noise, as in training. expanded: o of
    a tail is equal at all positions of a row, with stride 0. full_rows: rows in the model if they were reduced, else 0.
    """

    op: str
    where: str
    drawn: bool = False
    expanded: bool = False
    full_rows: int = 0

    @property
    def attended(self) -> int:
        """Number of keys of a row."""
        return self.keys or self.length

    @property
    def logits(self) -> int:
        """Number of logits of all rows and heads; 0 if this is not attention."""
        return self.rows * self.heads * self.length * self.attended

    @property
    def row_count(self) -> str:
        """Number of rows in words: "256 rows", or "2 of 256 rows" if they were reduced."""
        return f"{self.rows} of {self.full_rows} rows" if self.full_rows else f"{self.rows} rows"

    def with_rows(self, rows: int) -> "OpCase":
        """Reduce the case to at most `rows` rows, but at least one complete batch."""
        if self.rows <= rows:
            return self
        batch_rows = self.rows // self.batches if self.batches > 1 else 1
        few = max(1, rows // batch_rows)
        batches = few if self.batches > 1 else 1
        return replace(self, rows=few * batch_rows, batches=batches, full_rows=self.full_rows or self.rows)


@dataclass(frozen=True)
class Cost:
    """Work of one pass: floating point operations of products, exponentials, and moved bytes."""

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
        # "meta" has no generator and no numbers.
        if self.device.type != "meta":
            self.generator = torch.Generator(self.device).manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Draw normal numbers."""
        x = torch.randn(*shape, generator=self.generator, device=self.device)
        return (x * scale).to(dtype or self.dtype)

    def parameter(self, *shape: int, mean: float = 0.0, scale: float = 0.1) -> Tensor:
        """Draw a parameter in fp32, like those of the model."""
        return self.normal(*shape, scale=scale, dtype=torch.float32) + mean

    def factors(self, *shape: int, drawn: bool) -> Factors:
        """Draw dropout factors. drawn: return a key instead, from which the operation draws them."""
        if drawn:
            noise = Noise().to(self.device)
            noise.seed(0)
            return noise.factors(shape, DROPPED, 0, torch.empty((), dtype=self.dtype, device=self.device))
        is_kept = torch.rand(*shape, generator=self.generator, device=self.device) > DROPPED
        return (is_kept / (1 - DROPPED)).to(self.dtype)

    def positions(self, case: OpCase, channels: int) -> Tensor:
        """Draw [rows, length, channels] or [batches, rows, ...] in the memory layout of the layer's tensors.

        The channels of a position are padded like those of projections (ops/linear.py).
        """
        rows, leading = case.rows // case.batches, ((case.batches,) if case.batches > 1 else ())
        order = (case.length, rows) if case.transposed else (rows, case.length)
        x = self.normal(*leading, *order, padded(channels))[..., :channels]
        return x.transpose(-2, -3) if case.transposed else x

    def mask(self, case: OpCase, masked: bool) -> Tensor:
        """Return a mask of ones. masked: draw a random mask, whose last row is zero."""
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
    """Arguments of a call in order, names of the arguments with a gradient, and the gradient of the output."""

    case: OpCase
    args: tuple[Argument, ...]
    names: tuple[str, ...]
    grad: Tensor

    @property
    def wanted(self) -> list[Tensor]:
        """Arguments with a gradient."""
        return [t for t in self.args if isinstance(t, Tensor) and t.requires_grad]


def _shape(argument: Argument) -> Argument:
    """Convert a tensor to "meta". Dropout factors do not affect shapes and are left out."""
    if isinstance(argument, Tensor):
        return argument.to("meta")
    return None if isinstance(argument, DropoutFactors) else argument


class OpProfile(ABC):
    """The profile of an operation. Each operation has a subclass in check/cases.py.

    name: on the command line and in tables. layers: kinds of layer that call it. part_of: another operation whose --op
    includes this one. tuned: it has its own kernels. peers: implementations of other packages (bench/peers.py).
    kinds: kinds of shape in benchmarks; empty if it is not benchmarked by itself. odd: test cases that find errors.
    sizes: fields of `OpCase` that differ from those of the calling layer.
    """

    name: ClassVar[str]
    op: ClassVar[Op[..., Tensor]]
    layers: ClassVar[tuple[LayerKind, ...]]
    part_of: ClassVar[str] = ""
    tuned: ClassVar[bool] = True
    peers: ClassVar[tuple[str, ...]] = ()
    kinds: ClassVar[Kinds] = {}
    odd: ClassVar[tuple[OpCase, ...]]
    sizes: ClassVar[Sizes]

    def case(self, layer: LayerSizes) -> OpCase | None:
        """Return the case with which a layer calls the operation; None if it does not call it."""
        if layer.kind not in self.layers:
            return None
        at = {"rows": layer.rows, "length": layer.length, "transposed": layer.transposed}
        at |= {name: size if isinstance(size, int) else getattr(layer, size) for name, size in self.sizes.items()}
        return OpCase(op=self.name, where=layer.name, **at)  # type: ignore[arg-type]  # bools

    @abstractmethod
    def arguments(self, case: OpCase, draw: RandomTensors, masked: bool) -> tuple[Argument, ...]:
        """Draw the arguments of a case. masked: with random masked keys, and one row of only masked keys."""

    def drawn(
        self, case: OpCase, draw: RandomTensors, masked: bool = False
    ) -> tuple[tuple[Argument, ...], tuple[str, ...]]:
        """Draw the arguments of a case; returns them with the names of those with a gradient."""
        args = self.arguments(case, draw, masked)
        names = []
        for name, t in zip(inspect.signature(self.op.definition).parameters, args):
            if isinstance(t, Tensor) and name not in CONSTANT:
                t.requires_grad_()
                names.append(name)
        return args, tuple(names)

    def inputs(self, case: OpCase, dtype: torch.dtype, device: torch.device, masked: bool) -> OpInputs:
        """Draw the arguments of a case and a gradient of its output with a fixed seed."""
        draw = RandomTensors(dtype, device)
        args, names = self.drawn(case, draw, masked)
        with torch.no_grad():
            out = self.op.definition(*map(_shape, args))
        return OpInputs(case, args, names, draw.normal(*out.shape))

    @abstractmethod
    def cost(self, case: OpCase, forward: bool, itemsize: int) -> Cost:
        """Compute the work of one pass, without the bytes of parameters (a few thousandths)."""

    def example(self, kind: str, s: int, r: int) -> OpCase:
        """Create a benchmark case with AlphaFold2's channels and heads (Supp. 1.4, 1.6): s sequences, r residues."""
        return OpCase(op=self.name, where=kind, rows=s, length=r, channels=256 if kind == "msa" else 128)

    def numbers(self, case: OpCase) -> int:
        """Return the elements of the largest tensor in the definition."""
        return case.rows * case.length * max(case.channels, case.outputs)

    def size(self, case: OpCase) -> str:
        """Describe the size: "256 rows of 256, 128 channels"."""
        return f"{case.row_count} of {case.length}, {case.channels} channels"


def attention_cost(case: OpCase, forward: bool, itemsize: int, key_heads: int) -> Cost:
    """Count two products forward (q k, p v) and five backward (q k again, dO v, and those for dq, dk, dv)."""
    queries = case.rows * case.heads * case.length * case.width
    keys = case.rows * case.attended * case.width * key_heads
    bias = case.batches * case.heads * case.length * case.attended if case.bias else 0
    # q, o, k and v; backward also dO, dq, dk and dv. The bias is read, and its gradient written.
    numbers = 2 * queries + 2 * keys + bias if forward else 4 * queries + 4 * keys + 2 * bias
    masks = 4 * case.rows * case.attended
    products = 2 if forward else 5
    return Cost(products * 2 * case.logits * case.width, case.logits, numbers * itemsize + masks)
