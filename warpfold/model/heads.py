"""The heads, which predict logits from the representations (Supp. 1.9.6 to 1.9.10).

The logits are in fp32. The submodules have the names of DeepMind's parameters. As in evoformer.py, the docstring of
each head contains its definition, which a test executes.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

from warpfold.model.axial import Executable
from warpfold.model.layers import LayerNorm, Linear
from warpfold.ops.dispatch import upcast_half


def distogram_breaks(bins: int = 64) -> Tensor:
    """Return the inner edges [bins - 1] of the distogram's distance bins, angstrom, fp32 (Supp. 1.9.8)."""
    return torch.linspace(2.3125, 21.6875, bins - 1)


def pae_breaks(bins: int = 64) -> Tensor:
    """Return the inner edges [bins - 1] of the aligned-error bins, angstrom, fp32; the last is open (Supp. 1.9.7)."""
    return torch.linspace(0.0, 31.0, bins - 1)


class DistogramHead(Executable):
    """Logits of the distances between beta carbons (Supp. 1.9.8), symmetric in i and j.

        half_logits(z) + half_logits(z).transpose(0, 1)

    z: [*, N, N, c_z]. Returns [*, N, N, bins]. DeepMind: `distogram_head`.
    """

    def __init__(self, c_z: int, bins: int = 64) -> None:
        super().__init__()
        self.half_logits = Linear(c_z, bins, init="final")

    def forward(self, z: Tensor) -> Tensor:
        half: Tensor = self.half_logits(upcast_half(z))
        return half + self.residues.transposed(half, half.shape[-2])

    def in_slices(self, z: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of this process's rows and their logits, [*, rows, N, bins].

        All processes that share the example must iterate together, since each holds rows of the others' columns.
        """
        fetch, length = self.execution.fetch, z.shape[-2]
        spans = self.residues.shard_spans(length)
        number = max(len(self.execution.rows(span.stop - span.start)) for span in spans)
        for index, rows in enumerate(_cut(slice(0, z.shape[-3]), number)):
            # The columns that each process needs in this iteration, in the order of the processes.
            needed = [fetch(z, _cut(span, number)[index], -2) for span in spans]
            columns = self.half_logits(upcast_half(needed[0] if len(needed) == 1 else torch.cat(needed, -2)))
            del needed
            columns = self.residues.transposed(columns, length)
            yield rows, self.half_logits(upcast_half(fetch(z, rows))) + columns


def _cut(span: slice, number: int) -> list[slice]:
    """Split a span into `number` slices whose lengths differ by at most one."""
    length, longer = divmod(span.stop - span.start, number)
    ends = [span.start + length * k + min(k, longer) for k in range(number + 1)]
    return [slice(*pair) for pair in pairwise(ends)]


class LogitsHead(nn.Module):
    """A projection to logits: [*, c] -> [*, classes].

        logits(x)

    Three heads have this form. The masked-MSA head (Supp. 1.9.9) predicts the residues before masking from m: 20 amino
    acids, X, gap and mask (23 classes; Multimer: 22). The experimentally-resolved head (1.9.10) predicts from s which
    of the 37 atoms are resolved. The aligned-error head (1.9.7) predicts from z the bins of the error of CA j in the
    frame of residue i.
    """

    def __init__(self, c: int, classes: int) -> None:
        super().__init__()
        self.logits = Linear(c, classes, init="final")

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.logits(upcast_half(x))
        return logits


class PLDDTHead(Executable):
    """Algorithm 29, predictPerResidueLDDT_Ca, up to the softmax: logits of the lDDT-CA of each residue.

        a = relu(act_1(relu(act_0(input_layer_norm(s)))))
        logits(a)

    s: [*, N, c_s], from the structure module. Returns [*, N, bins]. DeepMind: `predicted_lddt_head`.
    """

    def __init__(self, c_s: int, c: int = 128, bins: int = 50) -> None:
        super().__init__()
        self.input_layer_norm = LayerNorm(c_s)
        self.act_0 = Linear(c_s, c, init="relu")
        self.act_1 = Linear(c, c, init="relu")
        self.logits = Linear(c, bins, init="final")

    def forward(self, s: Tensor) -> Tensor:
        s = self.input_layer_norm(self.around_trunk(s))
        s = self.act_0(s).relu()
        s = self.act_1(s).relu()
        logits: Tensor = self.logits(upcast_half(s))
        return logits
