"""The heads: what the model predicts besides the structure (Supp. 1.9.6 to 1.9.10).

Each is a small module from one representation to logits in fp32, named part by part as in DeepMind's parameters.
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
    """Supp. 1.9.8: pair -> logits of the distance between beta carbons.  z [*, N, N, c_z] -> [*, N, N, bins].

    Symmetric in i and j by construction: half of the logits from either side.  DeepMind: `distogram_head`.
    """

    def __init__(self, c_z: int, bins: int = 64) -> None:
        super().__init__()
        self.half_logits = Linear(c_z, bins, init="final")

    def forward(self, z: Tensor) -> Tensor:
        half: Tensor = self.half_logits(upcast_half(z))
        return half + self.residues.transposed(half, half.shape[-2])

    def in_slices(self, z: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the logits of some of this process's rows at a time, [*, rows, N, bins], with which they are.

        All processes that share the example go through it together: of the columns that each wants, all have a part.
        """
        fetch, length = self.execution.fetch, z.shape[-2]
        spans = self.residues.shard_spans(length)
        number = max(len(self.execution.rows(span.stop - span.start)) for span in spans)
        for index, rows in enumerate(_cut(slice(0, z.shape[-3]), number)):
            wanted = [fetch(z, _cut(span, number)[index], -2) for span in spans]  # by each process, in their order
            columns = self.half_logits(upcast_half(wanted[0] if len(wanted) == 1 else torch.cat(wanted, -2)))
            del wanted
            columns = self.residues.transposed(columns, length)
            yield rows, self.half_logits(upcast_half(fetch(z, rows))) + columns


def _cut(span: slice, number: int) -> list[slice]:
    """Return so many parts of a span, the first of which are one longer where it does not divide."""
    each, more = divmod(span.stop - span.start, number)
    ends = [span.start + each * k + min(k, more) for k in range(number + 1)]
    return [slice(*pair) for pair in pairwise(ends)]


class LogitsHead(nn.Module):
    """One projection to logits: [*, c] -> [*, classes].

    Masked MSA (Supp. 1.9.9): m [*, S, N, c_m] -> what was there before masking, 23 classes: 20 amino acids, X, gap,
    mask (Multimer: 22).  Experimentally resolved (1.9.10): s [*, N, c_s] -> whether an experiment resolves each of the
    37 atoms.  Aligned error (1.9.7): z [*, N, N, c_z] -> bins of the error of Ca j in the frame of residue i.
    """

    def __init__(self, c: int, classes: int) -> None:
        super().__init__()
        self.logits = Linear(c, classes, init="final")

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.logits(upcast_half(x))
        return logits


class PLDDTHead(Executable):
    """Algorithm 29: structure module's single -> logits of each residue's lDDT-Ca.  s [*, N, c_s] -> [*, N, bins].

    DeepMind: `predicted_lddt_head`.
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
