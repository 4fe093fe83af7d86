"""Test z in host memory: any slices can be stored and fetched, and no operation loads the full tensor by accident."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from warpfold import host
from warpfold.errors import UserError
from warpfold.host import HostTensor, fetch, fetch_each, store
from warpfold.parallel import execution
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan

ROWS, COLS = -3, -2
CPU = torch.device("cpu")


def slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


@pytest.mark.parametrize("leading", [(), (2,)])
@pytest.mark.parametrize("tile", [1, 4, 16])
@pytest.mark.parametrize("size", [3, 4, 11])
@pytest.mark.parametrize(
    ("device", "bands"), [(CPU, False), (CPU, True), pytest.param(torch.device("cuda", 0), True, marks=pytest.mark.gpu)]
)
def test_what_is_stored_is_what_is_fetched(
    leading: tuple[int, ...], tile: int, size: int, device: torch.device, bands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bands: copy bands, as for a GPU."""
    # These 200 bytes hold several tiles or less than one, depending on the tile size.
    monkeypatch.setattr(host, "SEGMENT", 200)
    monkeypatch.setattr(host, "backend", lambda _: "triton" if bands else "cpu")
    shape = (*leading, 11, 11, 3)
    x = torch.randn(shape, device=device)
    kept = HostTensor(shape, x.dtype, device, tile)
    assert (kept.shape, kept.dtype, kept.device) == (x.shape, x.dtype, x.device)
    assert not fetch(kept, slice(0, 11)).any()
    for axis, other in ((ROWS, COLS), (COLS, ROWS)):
        for part in slices(11, size):
            store(kept, part, fetch(x, part, axis), axis)
        for part, found in fetch_each(kept, slices(11, 5), other):
            assert torch.equal(found, fetch(x, part, other))
        x = x.flip(other)


class Copies(TorchDispatchMode):
    """Record the bytes of each copy between host memory and a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._opname == "_foreach_copy_":
            # torch copies tensors that are not contiguous through temporary memory.
            assert all(x.is_contiguous() for each in args[:2] for x in each)
            self.found += [x.nbytes for x in args[1]]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunk", [4, 8])
def test_to_a_gpu_whole_bands_travel_in_few_pieces(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A band of rows is one copy, and a band of columns is one copy per tile.

    Each value is copied once, except for the padding of the last tiles. No copy is unnecessary.
    """
    for module in (host, execution):
        monkeypatch.setattr(module, "backend", lambda _: "triton")
    rows, c = 30, 2
    z = Execution(Plan(chunk=chunk, in_place=True, offload=True)).pair_memory(torch.zeros(1), (rows, rows, c))
    assert isinstance(z, HostTensor)
    tiles = -(-rows // chunk)
    row, tile = tiles * chunk**2 * c * 4, chunk**2 * c * 4
    for axis, each in ((ROWS, [row]), (COLS, [tile] * tiles)):
        with Copies() as copies:
            for part, found in fetch_each(z, slices(rows, chunk), axis):
                store(z, part, found, axis)
        assert copies.found == each * 2 * tiles
    with Copies() as copies:
        fetch(z, slice(0, rows))
    assert copies.found == [row] * tiles
    with Copies() as copies:
        store(z, slice(1, 3), torch.zeros(2, rows, c))
    # The slice is only part of a band, so the band is read first.
    assert copies.found == [row] * 2


def test_an_ordinary_tensor_is_not_copied() -> None:
    x = torch.randn(5, 5, 2)
    for part, found in fetch_each(x, slices(5, 2), COLS):
        found += 1
        store(x, part, found, COLS)
        assert found.data_ptr() == x[:, part].data_ptr()
    store(x, slice(1, 3), torch.zeros(2, 5, 2))
    assert not x[1:3].any()


def test_no_operation_takes_it_whole() -> None:
    kept = HostTensor((5, 5, 2), torch.float32, CPU, 2)
    for function in (lambda: kept + 1, lambda: kept[0], lambda: torch.cat([kept, kept]), lambda: kept.clone()):
        with pytest.raises(RuntimeError, match="Fetch its rows"):
            function()


def test_the_file_has_no_name_and_goes_with_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kept = HostTensor((64, 64, 16), torch.bfloat16, CPU, 8)
    assert not list(tmp_path.iterdir())
    if hasattr(os, "posix_fallocate"):

        def full(*_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(UserError, match=r"cannot create a file of 0\.0 GB .*TMPDIR"):
            HostTensor((64, 64, 16), torch.bfloat16, CPU, 8)
    assert kept.fetch(slice(0, 64)).sum() == 0


def test_without_memory_it_has_shapes() -> None:
    kept = HostTensor((5, 5, 2), torch.float32, torch.device("meta"), 2)
    assert fetch(kept, slice(1, 3), COLS).shape == (5, 2, 2)
    store(kept, slice(1, 3), torch.empty(2, 5, 2, device="meta"))
