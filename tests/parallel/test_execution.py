"""Executions beside what a person does to a model: replaces, copies, calls or declares parts of it."""

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._inductor.cpp_builder
from torch import Tensor, nn

from tests.helpers import random_batch, tiny_config, tiny_model
from tests.ranks import run_ranks
from warpfold.errors import UserError
from warpfold.model import axial
from warpfold.model.axial import COLS, ROWS, Block, BlockStack, Executable, Step, Steps, Tensors
from warpfold.model.evoformer import (
    AttentionUpdate,
    EvoformerBlock,
    EvoformerConfig,
    GatedAttention,
    MSAColumnAttention,
    PairConfig,
    PairStack,
    Transition,
)
from warpfold.model.layers import LayerNorm
from warpfold.ops import dispatch
from warpfold.parallel.collectives import local_shard
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import Group, Mesh, make_mesh
from warpfold.parallel.plan import Plan

AXIAL = Mesh(axial=Group("axial", 0, 2, (0, 1)))
PAIR = PairConfig(heads=2, c_triangle=5)
ENTERS = {"m": COLS, "z": ROWS}
LIMIT = 1e-10


def randomised(module: Any) -> Any:
    """The module in fp64, without dropout, no weight zero."""
    torch.manual_seed(0)
    for p in module.parameters():
        nn.init.normal_(p, std=0.3)
    return module.double().eval()


def block() -> EvoformerBlock:
    return EvoformerBlock(8, 6, EvoformerConfig(heads=2, c_outer=3, pair=PAIR))


def given(states: tuple[str, ...] = ("m", "z")) -> tuple[Tensors, Tensors]:
    """States of 4 sequences and 7 residues, and their masks; the last residue is padding."""
    g = torch.Generator().manual_seed(1)
    m, z = (torch.randn(*shape, generator=g).double() for shape in ((4, 7, 8), (7, 7, 6)))
    m_mask, z_mask = torch.ones(4, 7).double(), torch.ones(7, 7).double()
    m_mask[:, -1] = z_mask[-1] = z_mask[:, -1] = 0
    both = {"m": (m, m_mask), "z": (z, z_mask)}
    return tuple(both[s][0] for s in states), tuple(both[s][1] for s in states)


def shards(states: Tensors, masks: Tensors, names: tuple[str, ...], mesh: Mesh) -> tuple[Tensors, Tensors]:
    """This rank's shards of them: m along residues, z and its mask along rows; the mask of m is whole."""
    cut = tuple(local_shard(x, ENTERS[name], mesh.axial) for name, x in zip(names, states))
    return cut, tuple(x if name == "m" else local_shard(x, -2, mesh.axial) for name, x in zip(names, masks))


def error_on_two_ranks(
    make: Callable[[], Any],
    names: tuple[str, ...] = ("m", "z"),
    after: Callable[[Any], Any] = lambda module: None,
    **plan: Any,
) -> float:
    """How far two axial ranks are from one device at most.  after: what is done to a module once it is bound."""

    def on_a_rank() -> float:
        mesh = make_mesh(axial=2)
        execution = Execution(Plan(axial=2, precision="fp64", **plan), mesh)
        alone, bound = randomised(make()), execution.bind(randomised(make()))
        after(alone)
        after(bound)
        states, masks = given(names)
        expected = alone(*states, *masks)
        cut, cut_masks = shards(states, masks, names, mesh)
        found = bound(*cut, *cut_masks)
        assert len(found) == len(names)
        assert all(x.isfinite().all() for x in found)
        wholes = zip(found, names, expected)
        return max(float((x - local_shard(whole, ENTERS[name], mesh.axial)).abs().max()) for x, name, whole in wholes)

    return max(run_ranks(on_a_rank, 2, timeout=200))


class Stack(BlockStack):
    """Some blocks of some states."""

    def __init__(self, *blocks: Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, *states_and_masks: Tensor) -> Tensors:
        half = len(states_and_masks) // 2
        return self.execution.stack(self, states_and_masks[:half], states_and_masks[half:])


class RowAttention(AttentionUpdate):
    """Attention within each sequence, without a bias."""

    axis = ROWS

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = LayerNorm(8), GatedAttention(8, heads=2)


class Alignment(Block):
    """A block that has no pair representation."""

    states = ("m",)

    def __init__(self) -> None:
        super().__init__()
        self.row, self.column, self.transition = RowAttention(), MSAColumnAttention(8, heads=2), Transition(8)

    @property
    def steps(self) -> Steps:
        return Step("m", self.row), Step("m", self.transition), Step("m", self.column)


class Twice(PairStack):
    """A pair stack that uses two of its layers twice."""

    @property
    def steps(self) -> Steps:
        return *super().steps, Step("z", self.ending), Step("z", self.outgoing)


class Short(PairStack):
    """A product and an attention: few graphs to compile."""

    @property
    def steps(self) -> Steps:
        return super().steps[1:3]


def test_a_block_that_stands_alone() -> None:
    assert error_on_two_ranks(block) < LIMIT


@pytest.mark.parametrize("kind", [Alignment, lambda: Stack(Alignment(), Alignment())])
def test_blocks_of_m_alone(kind: Callable[[], Any]) -> None:
    assert error_on_two_ranks(kind, ("m",)) < LIMIT


def test_blocks_of_z_alone() -> None:
    assert error_on_two_ranks(lambda: Stack(PairStack(6, PAIR), PairStack(6, PAIR)), ("z",)) < LIMIT


def test_a_layer_used_twice() -> None:
    assert error_on_two_ranks(lambda: Twice(6, PAIR), ("z",)) < LIMIT


def test_a_block_used_twice() -> None:
    def make() -> Stack:
        one = block()
        return Stack(one, one)

    assert error_on_two_ranks(make) < LIMIT


def test_a_stack_without_blocks_returns_what_it_is_given() -> None:
    assert error_on_two_ranks(Stack) < LIMIT


def test_what_is_replaced_after_binding_is_what_runs() -> None:
    def other_layer(module: EvoformerBlock) -> None:
        module.msa.transition = randomised(MSAColumnAttention(8, heads=2))

    def more_steps(module: PairStack) -> None:
        module.__class__ = Twice

    def fewer_blocks(stack: Stack) -> None:
        del stack.blocks[0]

    assert error_on_two_ranks(block, after=other_layer) < LIMIT
    assert error_on_two_ranks(lambda: PairStack(6, PAIR), ("z",), after=more_steps) < LIMIT
    assert error_on_two_ranks(lambda: Stack(block(), block()), after=fewer_blocks) < LIMIT


@pytest.mark.parametrize("triangle", ["gather", "channels"])
def test_compiled_layers_on_ranks(monkeypatch: pytest.MonkeyPatch, triangle: str) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(torch._inductor.cpp_builder, "get_cpp_compiler", lambda: "c++")
    assert error_on_two_ranks(lambda: Short(6, PAIR), ("z",), compile=True, triangle=triangle) < LIMIT


class Adapter(nn.Module):
    """Plain torch around a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, mask: Tensor, *other: Tensor) -> Tensor:
        return self.layer(x, mask, *other) + 0.1 * x.mean()


class OwnForward(Transition):
    """A layer whose `forward` does more than the contract says."""

    def forward(self, x: Tensor, mask: Tensor, other: Tensor | None = None) -> Tensor:
        return 2 * super().forward(x, mask, other)


def test_a_layer_that_cannot_be_cut_is_refused_also_after_binding() -> None:
    def adapted() -> EvoformerBlock:
        module = block()
        module.pair.starting = Adapter(module.pair.starting)  # type: ignore[assignment]
        return module

    def doubled() -> EvoformerBlock:
        module = block()
        module.msa.transition = OwnForward(8)
        return module

    plan, bound = Plan(axial=2), block()
    execution = Execution(plan, AXIAL)
    with pytest.raises(UserError, match=r"Adapter in the block \(EvoformerBlock\)"):
        execution.bind(adapted())
    with pytest.raises(UserError, match=r"OwnForward in the block \(EvoformerBlock\)"):
        execution.bind(doubled())
    execution.bind(bound)
    bound.pair.starting = Adapter(bound.pair.starting)  # type: ignore[assignment]
    states, masks = given()
    with pytest.raises(UserError, match="Adapter"):
        bound(*states, *masks)


def test_a_layer_beside_the_blocks_of_a_stack_is_refused() -> None:
    stack = Stack(block())
    stack.last = Transition(6)
    with pytest.raises(UserError, match=r"last \(Transition\) stands in no block"):
        Execution(Plan(axial=2), AXIAL).bind(stack)


def test_a_part_that_was_not_bound_is_not_run_on_shards() -> None:
    """A layer or a block alone, or a copy of a stack, would take its shard for the whole."""
    stack = Execution(Plan(axial=2), AXIAL).bind(Stack(block())).double()
    states, masks = given()
    for part in (copy.deepcopy(stack), stack.blocks[0]):
        with pytest.raises(ValueError, match="bind"):
            part(*states, *masks)
    with pytest.raises(ValueError, match=r"Transition.* outside"):
        stack.blocks[0].pair.transition(states[1], masks[1])


class Wrong(EvoformerBlock):
    """A block with a step that reads a state it does not have."""

    @property
    def steps(self) -> Steps:
        return *super().steps, Step("z", self.outer, "s")


def test_a_step_of_an_unknown_state_is_named() -> None:
    wrong = Wrong(8, 6, EvoformerConfig(heads=2, c_outer=3, pair=PAIR)).double()
    states, masks = given()
    with pytest.raises(ValueError, match=r"Wrong: .*OuterProductMean.* 's'.* m, z"):
        wrong(*states, *masks)
    with pytest.raises(ValueError, match=r"Wrong: .*OuterProductMean.* 's'.* m, z"):
        Execution(Plan(axial=2), AXIAL).bind(wrong)


def test_a_block_is_called_with_its_states_and_their_masks() -> None:
    states, masks = given()
    with pytest.raises(ValueError, match=r"EvoformerBlock .*m, z.*4 .* 3"):
        block().double()(*states, masks[0])


def test_a_copy_runs_as_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(torch._inductor.cpp_builder, "get_cpp_compiler", lambda: "c++")
    for plan in (Plan(chunk=3, precision="fp64"), Plan(compile=True, precision="fp64")):
        execution = Execution(plan)
        model = execution.bind(randomised(block()))
        other = copy.deepcopy(model)
        assert all(module.execution is execution for module in other.modules() if isinstance(module, Executable))
        states, masks = given()
        for p in other.parameters():
            nn.init.normal_(p, std=0.2)
        found, original = other(*states, *masks), model(*states, *masks)
        expected = Execution(Plan()).bind(other)(*states, *masks)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        assert (found[1] - original[1]).norm() > 1e-3


def test_binding_changes_no_name_of_a_checkpoint() -> None:
    model, fresh = tiny_model(), tiny_model()
    Execution(Plan(chunk=2, recompute="block")).bind(model)
    assert model.state_dict().keys() == fresh.state_dict().keys()
    assert [name for name, _ in model.named_modules()] == [name for name, _ in fresh.named_modules()]


def test_templates_run_together_and_one_by_one_where_layers_run_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so they do where they are so large that each fills a device; the result is the same."""
    model, batch = (
        tiny_model().double(),
        {k: x.double() if x.is_floating_point() else x for k, x in random_batch(templates=3).items()},
    )
    seen: list[int] = []
    model.templates.stack.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[-4]))

    def pair(plan: Plan) -> Tensor:
        seen.clear()
        return Execution(plan).bind(model)(batch, 0).pair

    together = pair(Plan(precision="fp64"))
    assert seen == [3]
    torch.testing.assert_close(pair(Plan(precision="fp64", chunk=4)), together, rtol=LIMIT, atol=LIMIT)
    assert seen == [1, 1, 1]
    monkeypatch.setattr(axial, "TOGETHER", 2 * 9 * 9)
    torch.testing.assert_close(pair(Plan(precision="fp64")), together, rtol=LIMIT, atol=LIMIT)
    assert seen == [2, 1]


def test_a_part_may_be_bound_alone_and_twice() -> None:
    batch = random_batch(passes=1)
    model = tiny_model()
    expected = model(batch, recycles=0).distogram_logits
    execution = Execution(Plan(chunk=2))
    execution.bind(model.evoformer)
    execution.bind(model.evoformer)
    assert model.extra_stack.execution is not execution
    torch.testing.assert_close(model(batch, recycles=0).distogram_logits, expected, rtol=1e-4, atol=1e-4)


def test_a_model_uses_its_kernels_in_any_thread_and_where_it_is_recomputed() -> None:
    seen: list[tuple[bool, str]] = []
    model = Execution(Plan(kernels="definition", recompute="block")).bind(tiny_model(templates=tiny_config().templates))
    here = threading.get_ident()

    class Spy(nn.Module):
        def forward(self, z: Tensor, mask: Tensor) -> Tensor:
            seen.append((threading.get_ident() == here, dispatch.kernels()))
            return z

    class Spied(EvoformerBlock):
        @property
        def steps(self) -> Steps:
            return Step("z", spy), *super().steps

    spy = Spy()
    model.evoformer.blocks[0].__class__ = Spied

    def train() -> None:
        model(random_batch(passes=1), recycles=0).distogram_logits.sum().backward()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [(False, "definition")] * 2  # forward, and again in the backward pass
    assert dispatch.kernels() == "fast"
