"""An adapter for each kind of layer.  What is left to a package is where it keeps the parts, and what differs:

    class TheirFeedForward(TransitionAdapter):
        serves = ("their.package:FeedForward",)
        signature = "(self, x)"
        names = "norm=ln up=w1 down=w2"

`names` says where a module keeps each part of our layer; a name that begins with "norm" is a normalisation, any other
a projection, or a number that is kept as it is (heads=mha.no_heads).

    q=mha.linear_q     inside of another module
    a,b=p_in           one projection of theirs makes two of ours, in this order, with as many outputs each
    up=fc1,fc2         two of theirs are one of ours, the outputs of the first in front

Tables that are here already have the names that OpenFold gave, which several packages kept.

`takes` says what theirs calls the arguments of ours: x, other, mask and rows (of a slice); "x=z mask" where it has no
other two.  `refuses` are arguments that change what is computed, with the reason why a call that gives one is
left to their own code.  Any other argument, such as a choice of kernels, changes nothing and is not read.

Where a table is not enough, a package overrides: `names_of` (its modules differ), `check` (modules that it does not
serve), `forward` (arguments that mean something else; all of them come by their names), `example` (so that they are
compared as they are called), `layer` (what else our layer is made of).
"""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from warpfold.adapt.adapter import Adapter, AttentionOf, LinearOf, NormOf, NotServed, RandomInputs, StackedOf, made_of
from warpfold.model.axial import COLS, ROWS, Executable
from warpfold.model.evoformer import OuterProductMean, Transition, TriangleAttention, TriangleMultiplication
from warpfold.model.layers import NoNorm
from warpfold.model.pair_bias import AttentionPairBias, PairWeightedAveraging

LEAST = 2**18  # numbers of z, or of s, that are worth our operations on a CPU: measured of Boltz and Protenix
SEQUENCES = 5  # of an example
Example = tuple[tuple[Any, ...], dict[str, Any]]
Parts = dict[str, Any]


class LayerAdapter(Adapter):
    """An adapter whose layer is made by a table of names; see the module's docstring."""

    kind: ClassVar[type[Executable]]  # our layer
    names: ClassVar[str] = ""
    takes: ClassVar[str] = "x mask"
    refuses: ClassVar[Mapping[str, str]] = {}
    refuses_fp16: ClassVar[Literal["", "autocast", "any"]] = ""  # where their own code scales its factors
    settings: ClassVar[Mapping[str, Any]] = {}  # of our layer, the same for all modules
    batch: ClassVar[tuple[int, ...]] = (2,)  # leading axes of an example

    def build(self, module: Any) -> Executable:
        """Make our layer of the module's parts."""
        self.check(module)
        return made_of(self.kind, **self.layer(module, self.parts(module)))

    def check(self, module: Any) -> None:
        """Raise NotServed for a module that is not as we know it."""

    def names_of(self, module: Any) -> str:
        """Name the places of a module's parts; of a name that is there twice the last counts."""
        return self.names

    def layer(self, module: Any, parts: Parts) -> Parts:
        """Complete the parts with the settings that our layer has besides."""
        return {**parts, **self.settings}

    def parts(self, module: Any) -> Parts:
        """Find the parts that the table names.  Errors: NotServed for a part that a module goes without."""
        found: Parts = {}
        for names, paths in dict(entry.split("=") for entry in self.names_of(module).split()).items():
            ours, theirs = names.split(","), [attrgetter(path)(module) for path in paths.split(",")]
            if any(part is None for part in theirs):
                raise NotServed(f"no {names}")
            if not all(isinstance(part, nn.Module) for part in theirs):
                (found[names],) = theirs
            elif names.startswith("norm"):
                found[names] = NormOf(*theirs)
            elif len(theirs) > 1:
                found[names] = StackedOf(*map(LinearOf, theirs))
            else:
                packed, count = LinearOf(*theirs), len(ours)
                each = len(packed.weight) // count
                cuts = [slice(i * each, (i + 1) * each) for i in range(count)] if count > 1 else [None]
                found |= {name: LinearOf(packed.module, cut) for name, cut in zip(ours, cuts)}
        return found

    def inputs(self, module: Any, *names: str) -> list[int]:
        """Count the channels that go into some parts of a module."""
        parts = self.parts(module)
        return [int(parts[name].weight.shape[-1]) for name in names]

    @property
    def theirs(self) -> dict[str, str]:
        """Their names of the arguments that ours takes, by ours."""
        return {ours: theirs or ours for ours, _, theirs in (entry.partition("=") for entry in self.takes.split())}

    def forward(self, layer: Any, *_: Any, **given: Any) -> Any:
        """Compute the update of the arguments that are given by their names.  Errors: NotServed for what it refuses."""
        for name, why in self.refuses.items():
            if given.get(name) is not None and given[name] is not False:
                raise NotServed(why)
        taken: dict[str, Any] = {ours: given.get(theirs) for ours, theirs in self.theirs.items()}
        if self.refuses_fp16:
            refuse_fp16(taken["x"], everywhere=self.refuses_fp16 == "any")
        return self.compute(layer, **taken)

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        """Return the update of x, without x."""
        return self.update(layer, x, mask_of(x, mask), other, rows)

    def drawn(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        """Draw x, other and mask of about n residues."""
        raise NotImplementedError

    def example(self, module: Any, n: int, random: RandomInputs) -> Example:
        drawn = self.drawn(module, n, random)
        return (), {theirs: drawn[ours] for ours, theirs in self.theirs.items() if ours in drawn}


class TriangleProductAdapter(LayerAdapter):
    """Triangle multiplication; parts: norm, a, b, a_gate, b_gate, gate, norm_out, out.

    outgoing  x_ij = sum_k a_ik b_jk         incoming  x_ij = sum_k a_ki b_kj
    """

    operation = "triangle_multiplication"
    kind = TriangleMultiplication
    names = (
        "norm=layer_norm_in a=linear_a_p b=linear_b_p a_gate=linear_a_g b_gate=linear_b_g gate=linear_g "
        "norm_out=layer_norm_out out=linear_z"
    )

    def outgoing(self, module: Any) -> bool:
        """Return whether a product is outgoing."""
        return bool(module._outgoing)

    def layer(self, module: Any, parts: Parts) -> Parts:
        """Complete the parts.  Errors: NotServed where the two norms differ in eps."""
        outgoing = self.outgoing(module)
        if not outgoing:  # of ours, a has the column in both
            exchanged = {"a": "b", "b": "a", "a_gate": "b_gate", "b_gate": "a_gate"}
            parts = {exchanged.get(name, name): part for name, part in parts.items()}
        how = {"outgoing": outgoing, "axis": ROWS if outgoing else COLS, "fused": False}
        if parts["norm"].eps != parts["norm_out"].eps:
            raise NotServed("its two norms differ in eps")
        return {**parts, **how, "channels": len(parts["norm_out"].weight)}

    def forward(self, layer: Any, *_: Any, **given: Any) -> Any:
        """Compute the update of z [*, n, n, c]; z with it, in place, where the caller wants that (OpenFold's way)."""
        dz = super().forward(layer, **given)
        return given[self.theirs["x"]].add_(dz) if given.get("inplace_safe") and given.get("_add_with_inplace") else dz

    def drawn(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        (c,) = self.inputs(module, "gate")
        return {"x": random(*self.batch, n, n, c), "mask": random.mask(*self.batch, n, n)}


class GatedAttentionAdapter(LayerAdapter):
    """A gated attention of any kind; parts: q, k, v, gate, out, heads, and what the kind wants."""

    operation = "gated_attention"

    def layer(self, module: Any, parts: Parts) -> Parts:
        attention = AttentionOf(int(parts.pop("heads")), *(parts.pop(name) for name in ("q", "k", "v", "gate", "out")))
        return {**parts, "attention": attention, **self.settings}


def attention_names(start: str) -> str:
    """Name the projections of an attention that begin alike and end with q, k, v, g and o."""
    return f"q={start}q k={start}k v={start}v gate={start}g out={start}o"


class TriangleAttentionAdapter(GatedAttentionAdapter):
    """Triangle attention; parts: those of an attention, norm, bias.  The bias of the ending node is of z transposed."""

    kind = TriangleAttention
    names = f"norm=layer_norm bias=linear heads=mha.no_heads {attention_names('mha.linear_')}"
    takes = "x mask rows=chunk_size"

    def starting(self, module: Any) -> bool:
        """Return whether it attends within rows."""
        return bool(module.starting)

    def layer(self, module: Any, parts: Parts) -> Parts:
        starting = self.starting(module)
        return {**super().layer(module, parts), "by_column": not starting, "axis": ROWS if starting else COLS}

    def drawn(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        (c,) = self.inputs(module, "bias")
        return {"x": random(*self.batch, n, n, c), "mask": random.mask(*self.batch, n, n)}


class TransitionAdapter(LayerAdapter):
    """A perceptron at each position, with ReLU; parts: norm, up, down."""

    operation = "transition"
    kind = Transition
    takes = "x"
    settings: ClassVar = {"activation": "relu"}
    adds: ClassVar[bool] = False  # theirs adds x itself

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        # Every position has a mask: nothing reads it.
        return self.renew(layer, x, x[..., 0]) if self.adds else self.update(layer, x, x[..., 0], rows=rows)

    def drawn(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        (c,) = self.inputs(module, "up")
        return {"x": random(*self.batch, n, n, c), "mask": random.mask(*self.batch, n, n)}


class SwigluAdapter(TransitionAdapter):
    """The same with SwiGLU: `up` makes the gate, then the value."""

    settings: ClassVar = {"activation": "swiglu"}


class OuterProductAdapter(LayerAdapter):
    """The outer product mean; parts: norm, a, b, out.  `settings`: what divides it (`OuterProductMean`)."""

    operation = "outer_product"
    kind = OuterProductMean
    names = "norm=layer_norm a=linear_1 b=linear_2 out=linear_out"
    takes = "x=m mask rows=chunk_size"

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        """Return the update of z, of x, which is m [*, s, n, c]; mask [*, s, n]."""
        n = x.shape[-2]
        z = x.new_empty(()).expand(*x.shape[:-3], n, n, len(layer.out.weight))  # of this shape; nothing reads it
        return self.update(layer, z, mask_of(x, mask), x, rows)

    def drawn(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        (c,) = self.inputs(module, "a")
        return {"x": random(*self.batch, SEQUENCES, n, c), "mask": random.mask(*self.batch, SEQUENCES, n)}


class PairWeightedAveragingAdapter(LayerAdapter):
    """Each sequence averaged over residues, with weights from z, whose mask it takes; parts: norm, norm_z, bias, v,
    gate, out."""

    operation = "pair_weighted_averaging"
    kind = PairWeightedAveraging
    takes = "x=m other=z mask"

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        return self.update(layer, x, mask_of(other, mask), other, rows)

    def drawn(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        c_m, c_z = self.inputs(module, "v", "bias")
        m, z = random(*self.batch, SEQUENCES, n, c_m), random(*self.batch, n, n, c_z)
        return {"x": m, "other": z, "mask": random.mask(*self.batch, n, n)}


class AttentionPairBiasAdapter(GatedAttentionAdapter):
    """Attention of s, biased by z; parts: those of an attention; norm, unless s comes normalised; norm_z and bias,
    unless z is the bias itself."""

    operation = "attention_pair_bias"
    kind = AttentionPairBias
    takes = "x=s other=z mask"

    def layer(self, module: Any, parts: Parts) -> Parts:
        return {"norm": NoNorm(), "norm_z": None, "bias": None, **super().layer(module, parts)}

    def compute(self, layer: Any, x: Tensor, mask: Any = None, other: Any = None, rows: Any = None) -> Any:
        """Return the update of s [*, n, c], one row; z [*, n, n, c]; mask [*, n]."""
        if x.shape[:-2] != other.shape[:-3]:
            raise NotServed("samples that share z")
        return self.update(layer, x.unsqueeze(ROWS), mask_of(x, mask).unsqueeze(-2), other).squeeze(ROWS)

    def drawn(self, module: Any, n: int, random: RandomInputs) -> dict[str, Tensor]:
        parts = self.parts(module)
        c_s, c_z = parts["q"].weight.shape[-1], parts["bias"].weight.shape[-1] if "bias" in parts else parts["heads"]
        s, z = random(*self.batch, n, c_s), random(*self.batch, n, n, c_z)
        return {"x": s, "other": z, "mask": random.mask(*self.batch, n)}


def mask_of(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mask of x [*, c], of its dtype: ones where there is none."""
    return x.new_ones(x.shape[:-1]) if mask is None else mask.to(x.dtype).expand(x.shape[:-1])


def refuse_fp16(x: Tensor, everywhere: bool = False) -> None:
    """Raise NotServed where autocast gives fp16: much code then scales its factors, lest products overflow.

    everywhere: for x in fp16, too.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16:
        raise NotServed("autocast to fp16")
    if everywhere and x.dtype == torch.float16:
        raise NotServed("fp16")
