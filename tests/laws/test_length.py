"""Memory of a long protein: slices in place need one z and one factor; with z in host memory, one factor."""

import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import random_batch, tiny_config, tiny_model
from warpfold.cost.recorder import Recorder
from warpfold.host import HostTensor, fetch
from warpfold.model.evoformer import Evoformer, EvoformerBlock, EvoformerConfig
from warpfold.ops import dispatch, triangle
from warpfold.ops.dispatch import Kernels
from warpfold.ops.triton.launch import unlaunched
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan, Precision
from warpfold.parallel.slices import slices

ROWS, COLS = -3, -2


def stack(c_m: int, c_z: int, config: EvoformerConfig, extra: bool = False) -> Evoformer:
    torch.manual_seed(0)
    made = Evoformer(c_m, c_z, config, global_column=extra)
    for p in made.parameters():
        nn.init.normal_(p, std=0.3)
    return made.eval()


def states(sequences: int, residues: int, c_m: int, c_z: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    m, z = (
        torch.randn(*shape, generator=g).double() for shape in ((sequences, residues, c_m), (residues, residues, c_z))
    )
    m_mask, z_mask = torch.ones(sequences, residues).double(), torch.ones(residues, residues).double()
    m_mask[:, -1] = z_mask[-1] = z_mask[:, -1] = 0
    return m, z, m_mask, z_mask


@pytest.mark.parametrize("outer", ["first", "middle", "last"])
@pytest.mark.parametrize(("chunk", "extra"), [(1, False), (4, True), (20, False)])
def test_a_trunk_whose_z_lies_in_host_memory_computes_the_same(
    outer: str, chunk: int, extra: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = replace(tiny_config().evoformer, outer=outer)
    trunk, (m, z, *masks) = stack(8, 12, config, extra).double(), states(5, 11, 8, 12)
    with torch.no_grad():
        expected = trunk(m, z, *masks)
        execution = Execution(Plan(chunk=chunk, in_place=True, offload=True, precision="fp64"))
        execution.bind(trunk)
        kept = execution.pair_memory(z, z.shape)
        assert isinstance(kept, HostTensor)
        execution.store(kept, slice(0, 11), z)
        new_m, new_z = trunk(m.clone(), kept, *masks)
    assert new_z is kept
    torch.testing.assert_close(new_m, expected[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(fetch(kept, slice(0, 11)), expected[1], rtol=1e-10, atol=1e-10)
    assert not list(tmp_path.iterdir())


def test_without_in_place_nothing_lies_in_host_memory() -> None:
    like = torch.zeros(1)
    for plan in (Plan(), Plan(chunk=2), Plan(offload=True), Plan(chunk=2, in_place=True)):
        assert not isinstance(Execution(plan).pair_memory(like, (5, 5, 2)), HostTensor)


@pytest.mark.parametrize("name", ["m", "extra", "template"])
def test_a_slice_of_anything_holds_as_many_numbers_as_one_of_z(name: str) -> None:
    chunk, residues = 6, 48
    most = chunk * residues * 128
    shape = {"m": (96, residues, 256), "extra": (400, residues, 64), "template": (1, residues, residues, 64)}[name]
    x = torch.empty(shape, device="meta")
    for axis in (ROWS, COLS):
        found = slices(x, axis, most)
        assert [part.start for part in found[1:]] == [part.stop for part in found[:-1]]
        assert (found[0].start, found[-1].stop) == (0, x.shape[axis])
        each = x.numel() // x.shape[axis]
        size = found[0].stop
        assert size == 1 or size * each <= most
        assert size == x.shape[axis] or (size + 1) * each > most


def trunk_memory(plan: Plan, device: str, layers: tuple[str, ...] = ()) -> tuple[float, list[tuple[str, str, float]]]:
    """Return the peak of a block (or some of its layers) at full width without m, and the tensors at the peak.

    All sizes are relative to z in the dtype of the trunk.
    """
    residues, sequences = 512, 64
    with dispatch.standing_for(device), unlaunched() if device == "cuda" else nullcontext(), torch.device("meta"):  # type: ignore[arg-type]
        block = EvoformerBlock(256, 128, EvoformerConfig()).eval()
        execution = Execution(plan)
        execution.bind(block)
        masks = {"m": torch.empty(sequences, residues), "z": torch.empty(residues, residues)}
        m = torch.empty(sequences, residues, 256, dtype=execution.dtype)
        with torch.no_grad(), Recorder() as memory:
            held = {"m": m, "z": execution.pair_memory(m, (residues, residues, 128))}
            for step in block.steps:
                if not layers or any(step.layer is block.get_submodule(name) for name in layers):
                    others = () if step.other is None else (held[step.other],)
                    held[step.state] = step.layer(held[step.state], masks[step.masked], *others)
    size = residues**2 * 128 * execution.dtype.itemsize
    return memory.peak / size, [(piece.made_by, str(piece.shape), piece.bytes / size) for piece in memory.at_peak[:8]]


# A CPU's operations run block by block, which is slow to record. The default is therefore the layers with the highest
# peak.
MOST = "pair.outgoing", "pair.starting"
SLOW = pytest.param("cpu", (), marks=pytest.mark.slow)


@pytest.mark.parametrize(("device", "layers"), [("cpu", MOST[:1]), SLOW, ("cuda", ())])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_slices_in_place_hold_one_z_and_one_factor(precision: Precision, device: str, layers: tuple[str, ...]) -> None:
    peak, what = trunk_memory(Plan(chunk=8, in_place=True, precision=precision), device, layers)
    # In fp32, a GPU computes slices of triangle products with torch operations, which hold ten slices at a time instead
    # of five: 0.16 z here.
    assert 2 < peak <= (2.2 if (precision, device) == ("fp32", "cuda") else 2.1), what


@pytest.mark.parametrize(("device", "layers"), [("cpu", MOST[:1]), SLOW, ("cuda", MOST)])
def test_with_z_in_host_memory_there_is_one_factor(device: str, layers: tuple[str, ...]) -> None:
    plan = Plan(chunk=4, in_place=True, offload=True, precision="bf16")
    peak, what = trunk_memory(plan, device, layers)
    assert 1 < peak <= 1.1, what


class Products(TorchDispatchMode):
    """Record the row strides of the factors and results of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.pitches: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Include the products inside the operation.
        if func.namespace == "warpfold":
            with self:
                return dispatch.runs[func._opname](*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func._opname == "bmm":
            self.pitches += [max(x.stride()[-2:]) for x in (*args, out)]
        return out


def products_in_slices(z: Tensor, kernels: Kernels) -> tuple[Tensor, list[int]]:
    """Return z after both triangle products of a block in slices, and the row strides of the products."""
    torch.manual_seed(0)
    block = EvoformerBlock(4, 8, tiny_config().evoformer).eval()
    for p in block.parameters():
        nn.init.normal_(p, std=0.3)
    Execution(Plan(chunk=8, in_place=True, precision="bf16", kernels=kernels)).bind(block)
    with Products() as products, torch.no_grad():
        for layer in (block.pair.outgoing, block.pair.incoming):
            z = layer(z, torch.ones(z.shape[:-1]))
    return z, products.pitches


def test_sliced_products_on_a_gpu_have_rows_at_wide_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row strides suit cuBLAS for any length: it reads and writes wide words if they are multiples of 16 bytes."""
    with dispatch.standing_for("cuda"), unlaunched(), torch.device("meta"):
        _, pitches = products_in_slices(torch.empty(43, 43, 8, dtype=torch.bfloat16), "fast")
    assert pitches
    assert not any(pitch % 8 for pitch in pitches)
    z = torch.randn(43, 43, 8).bfloat16()
    expected, _ = products_in_slices(z.clone(), "definition")
    monkeypatch.setattr(triangle, "backend", lambda _: "triton")
    assert torch.equal(products_in_slices(z.clone(), "definition")[0], expected)


@pytest.mark.parametrize("templates", [0, 3])
def test_a_fold_with_z_in_host_memory_is_the_fold(templates: int) -> None:
    model = tiny_model().double()
    batch = {k: x.double() if x.is_floating_point() else x for k, x in random_batch(templates=templates).items()}
    found = []
    for plan in (Plan(precision="fp64"), Plan(precision="fp64", chunk=2, in_place=True, offload=True)):
        with torch.no_grad():
            folded = Execution(plan).bind(model).fold(batch)
            pair = folded.representations.pair
        assert isinstance(pair, HostTensor) == plan.offload
        whole = fetch(pair, slice(0, pair.shape[-3]))
        found.append((whole, folded.representations.single, folded.structure.final_atom37))
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)
