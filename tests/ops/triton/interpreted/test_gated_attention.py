"""gated_attention: the Triton kernels over the memory that they share, interpreted, against the definition."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.ops.triton.layouts import exact_bf16, laid, poisoned, within
from warpfold.check.checks import Argument, answer, wrong
from warpfold.ops import dispatch
from warpfold.ops.attention import gated_attention
from warpfold.ops.noise import Noise
from warpfold.ops.triton.launch import recorded

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Layer:
    """One layer: lead, the axes before K and the channels; bias: where it comes from; biases: of both."""

    lead: tuple[int, ...]
    length: int
    channels: int
    heads: int
    width: int
    bias: str = ""  # "own", "given" or "given, projected"
    turned: bool = False
    biases: bool = True
    dropout: str = ""  # "given" or "drawn"
    alone: bool = False  # the update without x; its norm has no bias either

    def arguments(self, dtype: torch.dtype) -> list[Argument]:
        """Numbers within memory of NaN; some keys of every row are masked, and all of the last row's."""
        shape, c, inner = (*self.lead, self.length), self.channels, self.heads * self.width
        order = (*range(len(self.lead) - 1), len(self.lead), len(self.lead) - 1, len(self.lead) + 1)
        x = within(laid((*shape, c), order if self.turned else None, 8), dtype)
        outputs = 4 * inner + (self.heads if self.bias == "own" else 0)
        mask = (laid(shape) > -1).to(dtype)
        mask[..., -1, :] = 0
        bias = None
        if self.bias.startswith("given"):  # or, heads innermost, as a projection makes it
            square = (*self.lead[:-1], self.length, self.length)
            bias = laid((*square[:-2], self.heads, *square[-2:]))
            bias = laid((*square, self.heads)).movedim(-1, -3) if self.bias == "given, projected" else bias
        parameters = (
            *(laid((c,), mean=1.0), None if self.alone else laid((c,)), laid((outputs, c)) * c**-0.5),
            laid((inner,)) if self.biases else None,
            *(laid((c, inner)) * inner**-0.5, laid((c,)) if self.biases else None),
        )
        given = (None if p is None else within(p, torch.float32) for p in parameters)
        arguments = [x, *given, mask, None if bias is None else within(bias, dtype), self.heads, self.factors(x)]
        return [*arguments, 1e-5, False] if self.alone else arguments

    def factors(self, x: Tensor) -> Argument:
        """Dropout factors that all rows share."""
        shape = (*(1 for _ in self.lead), self.length, self.channels)
        if self.dropout == "drawn":
            noise = Noise()
            noise.seed(1)
            return noise.factors(shape, 0.25, 3, x)
        return ((laid(shape) > -0.5) * 1.25).to(x.dtype) if self.dropout else None


LAYERS = {
    "triangle, starting": Layer((9,), 9, 16, 2, 8, "own", dropout="drawn"),
    "triangle, ending": Layer((9,), 9, 16, 1, 16, "own", turned=True, dropout="given"),
    "row of an alignment": Layer((3,), 21, 24, 2, 24, "given, projected"),
    "column of an alignment": Layer((5,), 7, 16, 1, 48, turned=True),
    "batch, no biases": Layer((2, 3), 3, 16, 2, 8, "own", biases=False),
    "batch, given bias": Layer((2, 2), 18, 16, 1, 32, "given"),
    "update alone": Layer((2, 7), 7, 16, 2, 8, "own", biases=False, dropout="drawn", alone=True),
    "update alone, turned": Layer((5,), 7, 16, 1, 24, turned=True, alone=True),
}


EACH = [("fp32", name) for name in LAYERS]
EACH += [
    ("fp16", "triangle, starting"),
    ("fp16", "update alone"),
    ("bf16", "triangle, ending"),
    ("bf16", "row of an alignment"),
]


@pytest.mark.parametrize(("dtype", "name"), EACH)
def test_is_as_exact_as_the_definition(monkeypatch: pytest.MonkeyPatch, dtype: str, name: str) -> None:
    layer = LAYERS[name]
    args = layer.arguments(DTYPES[dtype])
    grad = within(laid((*layer.lead, layer.length, layer.channels)), DTYPES[dtype]).detach()
    assert gated_attention.unsupported_reason(*args) is None
    with poisoned(monkeypatch), exact_bf16(monkeypatch):
        ours = answer(gated_attention.fast, args, grad)
    assert not wrong(gated_attention.definition, args, grad, ours)
    assert ours[0].stride() == ours[1].stride()  # of the new residual and of the gradient of x


def test_without_a_gradient_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    args = [t.detach() if isinstance(t, Tensor) else t for t in LAYERS["triangle, starting"].arguments(torch.float32)]
    with dispatch.using("strict"), poisoned(monkeypatch):
        first = gated_attention(*args)
        again = gated_attention(*(t.requires_grad_() if i == 0 else t for i, t in enumerate(args)))
    assert torch.equal(first, again)


def test_launches_nothing_but_its_kernels() -> None:
    """Three forward; backward what they need, over one gradient of the projection, which all of them share."""
    args = LAYERS["triangle, starting"].arguments(torch.float16)
    with recorded(run=True) as launches:
        out = gated_attention.fast(*args)
        forward = [launch.kernel.name for launch in launches]
        launches.clear()
        out.sum().backward()
    assert [name.removesuffix("_fp32") for name in forward] == ["norm_linear", "attention_forward", "tail"]
    wrote = {}
    for launch in launches:
        for name in ("dg", "dq", "dk", "dv", "dbias", "grad"):
            t = launch.arguments.get(name)
            if t is not None and hasattr(t, "data") and launch.kernel.name != "attention_dbias":
                wrote[launch.kernel.name, name] = t.data.untyped_storage().data_ptr()
    (dy,) = {place for (kernel, name), place in wrote.items() if name == "grad" and kernel.startswith("norm_linear")}
    assert {name for (_, name), place in wrote.items() if place == dy} >= {"dg", "dq", "dk", "dv", "dbias", "grad"}


@pytest.mark.parametrize(("change", "reason"), [({"width": 12}, "heads 12 wide"), ({"channels": 8}, "8 channels")])
def test_other_sizes_are_refused(change: dict[str, int], reason: str) -> None:
    sizes = {"lead": (3,), "length": 4, "channels": 16, "heads": 1, "width": 8} | change
    found = gated_attention.unsupported_reason(*Layer(**sizes).arguments(torch.float32))
    assert found is not None
    assert found.startswith(reason)
