"""Which residues this process holds: what the model asks for outside the trunk's layers.

There, m [*, s, r, c] is cut along residues and z [*, i, j, c] along its rows, and everything without a pair axis or
an alignment is whole.  On one device all residues are here, and every question is answered with what was asked about.
A plan puts another object in its place (parallel/sharded.py); the model never knows.
"""

from torch import Tensor, nn


class Residues:
    """All residues.  `axis` counts from the right; `length` is the number of residues of the whole example.

    The loss of an example is a sum over the processes that share it: what comes from a slice is counted as it is, what
    every process computes alike (of `cuts` slices, or in `copies` of the same slice) is divided by their number.
    """

    cuts = 1
    copies = 1

    def mine(self, x: Tensor, axis: int) -> Tensor:
        """The slice of this process, of a tensor that every process has whole."""
        return x

    def whole(self, x: Tensor, axis: int, length: int) -> Tensor:
        """The whole, of a tensor of which every process has its slice."""
        return x

    def transposed(self, z: Tensor, length: int) -> Tensor:
        """This process's rows of z [*, i, j, c] with i and j exchanged."""
        return z.transpose(-3, -2)


ALL = Residues()


class Resident(nn.Module):
    """A module that asks which residues are here."""

    residues: Residues = ALL  # set from outside, as schedules are
