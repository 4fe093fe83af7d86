"""The layout of parameters in one flat buffer: buckets are sent whole, and each rank may own a piece of each."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# Each parameter starts at a multiple of 64 bytes, as if it had been allocated alone: matrix kernels are faster so.
ALIGN = 16


@dataclass(frozen=True)
class Segment:
    """The part of a parameter that lies in a shard."""

    name: str
    where: slice  # in the shard
    first: int  # the index, in the flat parameter, of the part's first element
    shape: torch.Size  # of the whole parameter


@dataclass(frozen=True)
class Layout:
    """Parameters in the order of the forward pass; buckets in the order in which their gradients come, the reverse.

    A bucket's length and start are divisible by the number of ranks.  Shard `index` of `parts` joins piece `index` of
    every bucket; the bucket that lies at a:b of the whole lies at a/parts:b/parts of the shard.
    """

    places: dict[str, slice]
    shapes: dict[str, torch.Size]
    buckets: tuple[slice, ...]
    members: tuple[tuple[str, ...], ...]  # of each bucket
    size: int

    def view(self, flat: Tensor, name: str) -> Tensor:
        """Return a parameter's part of a flat buffer, in the parameter's shape."""
        return flat[self.places[name]].view(self.shapes[name])

    def within(self, parts: int) -> list[slice]:
        """Return where the buckets' pieces lie in a shard, in the order of the buckets."""
        return [slice(b.start // parts, b.stop // parts) for b in self.buckets]

    def shard(self, flat: Tensor, parts: int, index: int) -> Tensor:
        """Return shard `index` of `parts`: a copy, or `flat` itself if there is only one."""
        if parts == 1:
            return flat
        return torch.cat([flat[bucket].view(parts, -1)[index] for bucket in reversed(self.buckets)])

    def segments(self, parts: int = 1, index: int = 0) -> list[Segment]:
        """Return which parts of which parameters lie in shard `index` of `parts`, in the order of the shard."""
        found = []
        for bucket, names in zip(reversed(self.buckets), reversed(self.members)):
            length = (bucket.stop - bucket.start) // parts
            begin, offset = bucket.start + index * length, bucket.start // parts
            for name in names:
                place = self.places[name]
                start, stop = max(place.start, begin), min(place.stop, begin + length)
                if start < stop:
                    where = slice(offset + start - begin, offset + stop - begin)
                    found.append(Segment(name, where, start - place.start, self.shapes[name]))
        return found


def make_layout(
    parameters: Mapping[str, Tensor], bucket_bytes: float, ranks: int, together: Collection[str] = ()
) -> Layout:
    """Lay out parameters, named in the order of the forward pass, for `ranks` ranks in all.

    A bucket is closed as soon as it has `bucket_bytes`; a parameter is never split between buckets, and those in
    `together` stay in the bucket of the one before.  Whatever is a multiple of ALIGN long has the next right behind it.
    """
    groups: list[list[str]] = [[]]
    filled = 0
    closed = False
    for name in reversed(list(parameters)):
        if filled >= bucket_bytes and closed:
            groups.append([])
            filled = 0
        groups[-1].insert(0, name)
        filled += parameters[name].nbytes
        closed = name not in together
    places, buckets, end = {}, [], 0
    for group in reversed(groups):
        start = end
        for name in group:
            places[name] = slice(end, end + parameters[name].numel())
            end += _up(parameters[name].numel(), ALIGN)
        end = start + _up(end - start, ALIGN * ranks)
        buckets.append(slice(start, end))
    shapes = {name: p.shape for name, p in parameters.items()}
    return Layout(places, shapes, tuple(reversed(buckets)), tuple(map(tuple, groups)), end)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
