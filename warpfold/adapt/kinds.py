"""Base adapters for each kind of layer. A package's adapter adds a table of names and the differences:

    class TheirFeedForward(TransitionAdapter):
        serves = ("their.package:FeedForward",)
        signature = "(self, x)"
        names = "norm=ln up=w1 down=w2"

`names` maps the parts of our layer to attributes of their module. A part whose name begins with "norm" is a
normalisation. Any other part is a projection, or a number that is passed on (heads=mha.no_heads).

    q=mha.linear_q     the attribute of a submodule
    a,b=p_in           one projection of theirs is two of ours, in this order, with equal numbers of outputs
    up=fc1,fc2         two projections of theirs are one of ours, with the outputs of the first in front

The default tables have OpenFold's names, which several packages use.

`takes` maps our arguments x, other, mask and rows (of a slice) to the names of their arguments, such as "x=z mask".
`refuses` lists arguments that change the results, with the reason why a call with one of them is left to their own
code. All other arguments, such as a choice of kernels, do not change the results and are not read.

If a table is not enough, override `names_of` (for modules with other names), `check` (to refuse modules), `forward`
(for arguments with another meaning; all are passed by name), `example` (to compare as the package calls its modules)
or `layer` (for other attributes of our layer).
"""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from warpfold.adapt.adapter import (
    Adapter,
    ForeignAttention,
    ForeignLinear,
    ForeignNorm,
    NotServed,
    RandomInputs,
    StackedLinear,
    assemble,
)
from warpfold.model.axial import COLS, ROWS, Executable
from warpfold.model.evoformer import OuterProductMean, Transition, TriangleAttention, TriangleMultiplication
from warpfold.model.layers import NoNorm
from warpfold.model.pair_bias import AttentionPairBias, PairWeightedAveraging

# Numbers of z, or of s, from which our operations are faster on a CPU, measured with Boltz and Protenix.
LEAST = 2**18
# Sequences of an example.
SEQUENCES = 5
Example = tuple[tuple[Any, ...], dict[str, Any]]
Parts = dict[str, Any]


class LayerAdapter(Adapter):
    """An adapter whose layer is built from a table of names; see the module's docstring."""

    # Our layer.
    kind: ClassVar[type[Executable]]
    names: ClassVar[str] = ""
    takes: ClassVar[str] = "x mask"
    refuses: ClassVar[Mapping[str, str]] = {}
    # When to refuse fp16, in which their own code scales its factors.
    refuses_fp16: ClassVar[Literal["", "autocast", "any"]] = ""
    # Attributes of our layer that are the same for all modules.
    settings: ClassVar[Mapping[str, Any]] = {}
    # Leading axes of an example.
    batch: ClassVar[tuple[int, ...]] = (2,)

    def build(self, module: Any) -> Executable:
        """Build our layer from the module's submodules."""
        self.check(module)
        return assemble(self.kind, **self.layer(module, self.parts(module)))

    def check(self, module: Any) -> None:
        """Raise NotServed for a module that our layer does not support."""

    def names_of(self, module: Any) -> str:
        """Return the table of names for a module. If a part occurs twice, the last entry counts."""
        return self.names

    def layer(self, module: Any, parts: Parts) -> Parts:
        """Add the other attributes of our layer to the parts."""
        return {**parts, **self.settings}

    def parts(self, module: Any) -> Parts:
        """Collect the parts that the table names. Raises NotServed for a part that the module lacks."""
        parts: Parts = {}
        for names, paths in dict(entry.split("=") for entry in self.names_of(module).split()).items():
            ours, theirs = names.split(","), [attrgetter(path)(module) for path in paths.split(",")]
            if any(part is None for part in theirs):
                raise NotServed(f"no {names}")
            if not all(isinstance(part, nn.Module) for part in theirs):
                (parts[names],) = theirs
            elif names.startswith("norm"):
                parts[names] = ForeignNorm(*theirs)
            elif len(theirs) > 1:
                parts[names] = StackedLinear(*map(ForeignLinear, theirs))
            else:
                packed, count = ForeignLinear(*theirs), len(ours)
                outputs = len(packed.weight) // count
                slices = [slice(i * outputs, (i + 1) * outputs) for i in range(count)] if count > 1 else [None]
                parts |= {name: ForeignLinear(packed.module, s) for name, s in zip(ours, slices)}
        return parts

    def inputs(self, module: Any, *names: str) -> list[int]:
        """Return the numbers of input channels of some parts of a module."""
        parts = self.parts(module)
        return [int(parts[name].weight.shape[-1]) for name in names]

    @property
    def theirs(self) -> dict[str, str]:
        """The names of their arguments, by the names of ours."""
        return {ours: theirs or ours for ours, _, theirs in (entry.partition("=") for entry in self.takes.split())}

    def forward(self, layer: Any, *_: Any, **given: Any) -> Any:
        """Compute the update from arguments by their names. Raises NotServed for arguments in `refuses`."""
        for name, reason in self.refuses.items():
            if given.get(name) is not None and given[name] is not False:
                raise NotServed(reason)
        our_arguments: dict[str, Any] = {ours: given.get(theirs) for ours, theirs in self.theirs.items()}
        if self.refuses_fp16:
            refuse_fp16(our_arguments["x"], everywhere=self.refuses_fp16 == "any")
        return self.compute(layer, **our_arguments)

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        """Compute the update of x, without x."""
        return self.update(layer, x, mask_or_ones(x, mask), other, rows)

    def draw_inputs(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        """Draw x, other and mask for about n residues."""
        raise NotImplementedError

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        drawn = self.draw_inputs(module, n, random)
        return (), {theirs: drawn[ours] for ours, theirs in self.theirs.items() if ours in drawn}


class TriangleProductAdapter(LayerAdapter):
    """Triangle multiplication, with parts norm, a, b, a_gate, b_gate, gate, norm_out, out.

    outgoing  x_ij = sum_k a_ik b_jk         incoming  x_ij = sum_k a_ki b_kj
    """

    operation = "triangle_multiplication"
    kind = TriangleMultiplication
    names = (
        "norm=layer_norm_in a=linear_a_p b=linear_b_p a_gate=linear_a_g b_gate=linear_b_g gate=linear_g "
        "norm_out=layer_norm_out out=linear_z"
    )

    def outgoing(self, module: Any) -> bool:
        """Whether a module's product is outgoing."""
        return bool(module._outgoing)

    def layer(self, module: Any, parts: Parts) -> Parts:
        """Add the other attributes of our layer. Raises NotServed if the two norms differ in eps."""
        outgoing = self.outgoing(module)
        # In our incoming layer, a and b are exchanged (`TriangleMultiplication`).
        if not outgoing:
            exchanged = {"a": "b", "b": "a", "a_gate": "b_gate", "b_gate": "a_gate"}
            parts = {exchanged.get(name, name): part for name, part in parts.items()}
        attributes = {"outgoing": outgoing, "axis": ROWS if outgoing else COLS, "fused": False}
        if parts["norm"].eps != parts["norm_out"].eps:
            raise NotServed("its two norms differ in eps")
        return {**parts, **attributes, "channels": len(parts["norm_out"].weight)}

    def forward(self, layer: Any, *_: Any, **given: Any) -> Any:
        """Compute the update of z [*, n, n, c], or add it to z in place with OpenFold's arguments for this."""
        dz = super().forward(layer, **given)
        return given[self.theirs["x"]].add_(dz) if given.get("inplace_safe") and given.get("_add_with_inplace") else dz

    def draw_inputs(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        (c,) = self.inputs(module, "gate")
        return {"x": random(*self.batch, n, n, c), "mask": random.mask(*self.batch, n, n)}


class GatedAttentionAdapter(LayerAdapter):
    """Base of gated attentions, with parts q, k, v, gate, out, heads, and others of the kind."""

    operation = "gated_attention"

    def layer(self, module: Any, parts: Parts) -> Parts:
        attention = ForeignAttention(
            int(parts.pop("heads")), *(parts.pop(name) for name in ("q", "k", "v", "gate", "out"))
        )
        return {**parts, "attention": attention, **self.settings}


def attention_names(start: str) -> str:
    """Return the table of an attention's projections with a common prefix and the suffixes q, k, v, g and o."""
    return f"q={start}q k={start}k v={start}v gate={start}g out={start}o"


class TriangleAttentionAdapter(GatedAttentionAdapter):
    """Triangle attention, with the parts of an attention, norm and bias.

    The bias of the ending node comes from z transposed.
    """

    kind = TriangleAttention
    names = f"norm=layer_norm bias=linear heads=mha.no_heads {attention_names('mha.linear_')}"
    takes = "x mask rows=chunk_size"

    def starting(self, module: Any) -> bool:
        """Whether a module attends within rows."""
        return bool(module.starting)

    def layer(self, module: Any, parts: Parts) -> Parts:
        starting = self.starting(module)
        return {**super().layer(module, parts), "by_column": not starting, "axis": ROWS if starting else COLS}

    def draw_inputs(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        (c,) = self.inputs(module, "bias")
        return {"x": random(*self.batch, n, n, c), "mask": random.mask(*self.batch, n, n)}


class TransitionAdapter(LayerAdapter):
    """A perceptron with ReLU at each position, with parts norm, up, down."""

    operation = "transition"
    kind = Transition
    takes = "x"
    settings: ClassVar = {"activation": "relu"}
    # Whether their layer adds x itself.
    adds: ClassVar[bool] = False

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        # The mask is not read, so any tensor of its shape will do.
        return self.add_update(layer, x, x[..., 0]) if self.adds else self.update(layer, x, x[..., 0], rows=rows)

    def draw_inputs(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        (c,) = self.inputs(module, "up")
        return {"x": random(*self.batch, n, n, c), "mask": random.mask(*self.batch, n, n)}


class SwigluAdapter(TransitionAdapter):
    """A perceptron with SwiGLU. The output of `up` is the gate, then the value."""

    settings: ClassVar = {"activation": "swiglu"}


class OuterProductAdapter(LayerAdapter):
    """The outer product mean, with parts norm, a, b, out. `settings` describe the division (`OuterProductMean`)."""

    operation = "outer_product"
    kind = OuterProductMean
    names = "norm=layer_norm a=linear_1 b=linear_2 out=linear_out"
    takes = "x=m mask rows=chunk_size"

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        """Compute the update of z from x, which is m [*, s, n, c]; mask: [*, s, n]."""
        n = x.shape[-2]
        # Only the shape of z is read.
        z = x.new_empty(()).expand(*x.shape[:-3], n, n, len(layer.out.weight))
        return self.update(layer, z, mask_or_ones(x, mask), x, rows)

    def draw_inputs(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        (c,) = self.inputs(module, "a")
        return {"x": random(*self.batch, SEQUENCES, n, c), "mask": random.mask(*self.batch, SEQUENCES, n)}


class PairWeightedAveragingAdapter(LayerAdapter):
    """Pair-weighted averaging, with parts norm, norm_z, bias, v, gate, out. The mask is that of z."""

    operation = "pair_weighted_averaging"
    kind = PairWeightedAveraging
    takes = "x=m other=z mask"

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        return self.update(layer, x, mask_or_ones(other, mask), other, rows)

    def draw_inputs(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        c_m, c_z = self.inputs(module, "v", "bias")
        m, z = random(*self.batch, SEQUENCES, n, c_m), random(*self.batch, n, n, c_z)
        return {"x": m, "other": z, "mask": random.mask(*self.batch, n, n)}


class AttentionPairBiasAdapter(GatedAttentionAdapter):
    """Attention of s with pair bias, with the parts of an attention, norm, norm_z and bias.

    norm is missing if s is normalised already. norm_z and bias are missing if z is the bias itself.
    """

    operation = "attention_pair_bias"
    kind = AttentionPairBias
    takes = "x=s other=z mask"

    def layer(self, module: Any, parts: Parts) -> Parts:
        return {"norm": NoNorm(), "norm_z": None, "bias": None, **super().layer(module, parts)}

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        """Compute the update of s [*, n, c], which is one row of our layer; z: [*, n, n, c]; mask: [*, n]."""
        if x.shape[:-2] != other.shape[:-3]:
            raise NotServed("samples that share z")
        return self.update(layer, x.unsqueeze(ROWS), mask_or_ones(x, mask).unsqueeze(-2), other).squeeze(ROWS)

    def draw_inputs(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        parts = self.parts(module)
        c_s, c_z = parts["q"].weight.shape[-1], parts["bias"].weight.shape[-1] if "bias" in parts else parts["heads"]
        s, z = random(*self.batch, n, c_s), random(*self.batch, n, n, c_z)
        return {"x": s, "other": z, "mask": random.mask(*self.batch, n)}


def mask_or_ones(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mask of x [*, c] in the dtype of x, or ones if it is None."""
    return x.new_ones(x.shape[:-1]) if mask is None else mask.to(x.dtype).expand(x.shape[:-1])


def refuse_fp16(x: Tensor, everywhere: bool = False) -> None:
    """Raise NotServed under autocast to fp16, where some packages scale their factors to avoid overflows.

    everywhere: also if x is in fp16.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16:
        raise NotServed("autocast to fp16")
    if everywhere and x.dtype == torch.float16:
        raise NotServed("fp16")
