"""Plans and executions: errors, user changes of a bound model, several executions of a model, layouts of m and z."""

import copy
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import random_batch, tiny_config, tiny_model
from tests.ranks import run_ranks
from warpfold.errors import UserError
from warpfold.model import axial
from warpfold.model.alphafold import AlphaFold
from warpfold.model.axial import COLS, PLAIN, ROWS, AxialUpdate, Block, BlockStack, Executable, Step, Steps, Tensors
from warpfold.model.evoformer import (
    AttentionUpdate,
    Evoformer,
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
from warpfold.parallel import execution as executions
from warpfold.parallel.collectives import local_shard
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import Group, Mesh, make_mesh
from warpfold.parallel.plan import Plan
from warpfold.parallel.sharded import layout_plan
from warpfold.parallel.slices import longest_axis

DOCS = Path(__file__).parents[2] / "docs"
AXIAL, BRANCH = Mesh(axial=Group("axial", 0, 2, (0, 1))), Mesh(branch=Group("branch", 0, 2, (0, 1)))
PAIR = PairConfig(heads=2, c_triangle=5)
ENTERS = {"m": COLS, "z": ROWS}
LIMIT = 1e-10


def randomised(module: Any) -> Any:
    """Return the module in fp64, without dropout and without zero weights."""
    torch.manual_seed(0)
    for p in module.parameters():
        nn.init.normal_(p, std=0.3)
    return module.double().eval()


def block() -> EvoformerBlock:
    return EvoformerBlock(8, 6, EvoformerConfig(heads=2, c_outer=3, pair=PAIR))


def given(states: tuple[str, ...] = ("m", "z")) -> tuple[Tensors, Tensors]:
    """Create states of 4 sequences and 7 residues with masks, whose last residue is padding."""
    g = torch.Generator().manual_seed(1)
    m, z = (torch.randn(*shape, generator=g).double() for shape in ((4, 7, 8), (7, 7, 6)))
    m_mask, z_mask = torch.ones(4, 7).double(), torch.ones(7, 7).double()
    m_mask[:, -1] = z_mask[-1] = z_mask[:, -1] = 0
    both = {"m": (m, m_mask), "z": (z, z_mask)}
    return tuple(both[s][0] for s in states), tuple(both[s][1] for s in states)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile to graphs without a C++ compiler."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(executions, "cpp_compiler", lambda: "c++")


# User-defined blocks and layers


class Stack(BlockStack):
    """A stack of blocks with given states."""

    def __init__(self, *blocks: Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, *states_and_masks: Tensor) -> Tensors:
        half = len(states_and_masks) // 2
        return self.execution.stack(self, states_and_masks[:half], states_and_masks[half:])


class RowAttention(AttentionUpdate):
    """Attention within each sequence without a bias."""

    axis = ROWS

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = LayerNorm(8), GatedAttention(8, heads=2)


class Alignment(Block):
    """A block without a pair representation."""

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
    """A product and an attention, with few graphs to compile."""

    @property
    def steps(self) -> Steps:
        return super().steps[1:3]


class Wrong(EvoformerBlock):
    """A block with a step that reads a missing state."""

    @property
    def steps(self) -> Steps:
        return *super().steps, Step("z", self.outer, "s")


class Odd(EvoformerBlock):
    """A block with an extra step in its `forward`: plain torch on full states."""

    def forward(self, *states_and_masks: Tensor) -> tuple[Tensor, Tensor]:
        m, z = super().forward(*states_and_masks)
        return m, z + torch.nn.functional.silu(z)


class Silu(nn.Module):
    """Compute z + silu(z), masked."""

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        return z + torch.nn.functional.silu(z) * mask[..., None].to(z.dtype)


class PlainStep(EvoformerBlock):
    """A block with such a layer among its steps."""

    @property
    def steps(self) -> Steps:
        return *super().steps, Step("z", Silu())


class Adapter(nn.Module):
    """A plain torch module around a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, mask: Tensor, *other: Tensor) -> Tensor:
        return self.layer(x, mask, *other) + 0.1 * x.mean()


class OwnForward(Transition):
    """A layer with a `forward` that does more than the contract allows."""

    def forward(self, x: Tensor, mask: Tensor, other: Tensor | None = None) -> Tensor:
        return 2 * super().forward(x, mask, other)


def other_layer(module: EvoformerBlock) -> None:
    module.msa.transition = randomised(MSAColumnAttention(8, heads=2))


def more_steps(module: PairStack) -> None:
    module.__class__ = Twice


def fewer_blocks(stack: Stack) -> None:
    del stack.blocks[0]


def used_twice() -> Stack:
    one = block()
    return Stack(one, one)


@dataclass(frozen=True)
class Case:
    """A module that two axial ranks run. after: a change after binding."""

    make: Callable[[], Any]
    names: tuple[str, ...] = ("m", "z")
    after: Callable[[Any], None] = lambda module: None
    plan: Plan = field(default_factory=lambda: Plan(axial=2, precision="fp64"))

    def error(self) -> float:
        """Return the largest difference between this rank and a single device."""
        mesh = make_mesh(axial=2)
        alone, bound = randomised(self.make()), Execution(self.plan, mesh).bind(randomised(self.make()))
        self.after(alone)
        self.after(bound)
        states, masks = given(self.names)
        expected = alone(*states, *masks)
        # m is sharded along residues, z and its mask along rows, and the mask of m is full.
        cut = [local_shard(x, ENTERS[name], mesh.axial) for name, x in zip(self.names, states)]
        cut += [x if name == "m" else local_shard(x, -2, mesh.axial) for name, x in zip(self.names, masks)]
        found = bound(*cut)
        assert len(found) == len(self.names)
        assert all(x.isfinite().all() for x in found)
        wholes = zip(found, self.names, expected)
        return max(float((x - local_shard(whole, ENTERS[name], mesh.axial)).abs().max()) for x, name, whole in wholes)


COMPILED = [Plan(axial=2, precision="fp64", compile=True, triangle=way) for way in ("gather", "channels")]  # type: ignore[arg-type]
CASES = {
    "a block that stands alone": Case(block),
    "a block of m alone": Case(Alignment, ("m",)),
    "blocks of m alone": Case(lambda: Stack(Alignment(), Alignment()), ("m",)),
    "blocks of z alone": Case(lambda: Stack(PairStack(6, PAIR), PairStack(6, PAIR)), ("z",)),
    "a layer used twice": Case(lambda: Twice(6, PAIR), ("z",)),
    "a block used twice": Case(used_twice),
    "a stack without blocks": Case(Stack),
    "a layer replaced after binding": Case(block, after=other_layer),
    "steps added after binding": Case(lambda: PairStack(6, PAIR), ("z",), more_steps),
    "a block removed after binding": Case(lambda: Stack(block(), block()), after=fewer_blocks),
    "compiled, factors gathered": Case(lambda: Short(6, PAIR), ("z",), plan=COMPILED[0]),
    "compiled, by channels": Case(lambda: Short(6, PAIR), ("z",), plan=COMPILED[1]),
}


@pytest.mark.usefixtures("eager")
def test_what_stands_alone_is_used_twice_or_replaced_runs_on_ranks() -> None:
    for name, *found in zip(CASES, *run_ranks(lambda: [case.error() for case in CASES.values()], 2, timeout=200)):
        assert max(found) < LIMIT, name


# Slices


@pytest.mark.parametrize(("shape", "axis"), [((9, 7, 4), -3), ((7, 9, 4), -2), ((7, 7, 4), -3), ((3, 4, 100), -2)])
def test_the_longest_axis_is_none_of_channels_and_the_first_of_equal_ones(shape: tuple[int, ...], axis: int) -> None:
    assert longest_axis(torch.empty(shape)) == axis


def test_slices_of_every_state_hold_as_many_numbers_as_rows_of_z() -> None:
    """Where z has four rows in a slice, m with its larger number of channels has three rows or columns."""
    stack, sizes = Execution(Plan(chunk=4, kernels="definition")).bind(randomised(Stack(block()))), list[int]()
    states, masks = given()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        for layer in (module for module in stack.modules() if isinstance(module, AxialUpdate)):

            def update(*given: Any, original: Callable[..., Tensor] = layer.update) -> Tensor:
                sizes.append(given[0].numel())
                return original(*given)

            patch.setattr(layer, "update", update)
        found = stack(*states, *masks)
    assert max(sizes) == 4 * 7 * 6
    for x, whole in zip(found, randomised(Stack(block()))(*states, *masks)):
        torch.testing.assert_close(x, whole, rtol=LIMIT, atol=LIMIT)


# Errors


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"axial": 0}, "axial 0"),
        ({"branch": 3}, "plan.branch is 3"),
        ({"chunk": 0}, "plan.chunk is 0"),
        ({"in_place": True}, "needs plan.chunk"),
        ({"in_place": True, "chunk": 4, "recompute": "block"}, "choose one"),
        ({"threads": 0}, "plan.threads is 0"),
        ({"axial": 2, "recompute": "layer"}, r'plan.recompute = "layer" is for ranks that have an example each'),
        ({"branch": 2, "offload": True}, r"plan.offload is for ranks that have an example each"),
        ({"recompute": True}, r'plan.recompute is True: it must be "block", "layer" or none'),
        ({"keep_blocks": 1}, r"plan.keep_blocks is 1: .* needs plan.recompute"),
        ({"recompute": "block", "keep_blocks": -1}, r"plan.keep_blocks is -1"),
        ({"batch": 2, "axial": 2}, r"set plan.axial = 1, plan.branch = 1"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Plan(**settings)


def odd(kind: type[EvoformerBlock], outer: str = "middle") -> AlphaFold:
    """Create the tiny model with one block of another class."""
    config = EvoformerConfig(blocks=2, heads=4, c_outer=6, outer=outer, pair=PairConfig(c_triangle=8))  # type: ignore[arg-type]
    model = tiny_model(evoformer=config)
    model.evoformer.blocks[-1].__class__ = kind
    return model


def changed(name: str, layer: nn.Module) -> AlphaFold:
    """Create the tiny model with another layer in its last block."""
    model = tiny_model()
    model.evoformer.blocks[-1].set_submodule(name, layer)
    return model


def partly_frozen() -> AlphaFold:
    """Create the tiny model with independent halves, of which only the pair half of the last block is trained."""
    model = odd(EvoformerBlock, "first").requires_grad_(False)
    model.evoformer.blocks[-1].pair.requires_grad_(True)
    return model


def with_a_layer_beside_its_blocks() -> AlphaFold:
    model = tiny_model()
    model.evoformer.last = Transition(6)
    return model


@pytest.mark.parametrize(
    ("model", "plan", "mesh", "says"),
    [
        (lambda: odd(Odd), Plan(axial=2), AXIAL, r"plan.axial = 2: .*evoformer.*\(Odd\) overrides `forward`"),
        (lambda: odd(Odd, "first"), Plan(branch=2), BRANCH, r"plan.branch = 2: .*\(Odd\) overrides `forward`"),
        (lambda: odd(PlainStep), Plan(axial=2), AXIAL, r"plan.axial = 2: .*Silu in evoformer.* is not an AxialUpdate"),
        (lambda: odd(Wrong), Plan(axial=2), AXIAL, r"Wrong: .*OuterProductMean.* 's'.* m, z"),
        (lambda: changed("pair.starting", Adapter(Transition(6))), Plan(axial=2), AXIAL, r"Adapter in evoformer"),
        (lambda: changed("msa.transition", OwnForward(8)), Plan(axial=2), AXIAL, r"OwnForward in evoformer"),
        (with_a_layer_beside_its_blocks, Plan(axial=2), AXIAL, r"last \(Transition\) is not part of a block"),
        (tiny_model, Plan(branch=2), BRANCH, "needs blocks with independent halves"),
        (partly_frozen, Plan(branch=2), BRANCH, r"could have nothing to train. Set plan.branch = 1"),
        (tiny_model, Plan(axial=2), None, "needs a mesh"),
    ],
)
def test_a_plan_that_cannot_run_a_model_says_why_and_leaves_it_as_it_was(
    model: Callable[[], AlphaFold], plan: Plan, mesh: Mesh | None, says: str
) -> None:
    made = model()
    with pytest.raises((UserError, ValueError), match=says):
        Execution(plan, mesh).bind(made)
    assert all(module.execution is PLAIN for module in made.modules() if isinstance(module, Executable))


def test_what_was_not_bound_is_not_run_on_shards() -> None:
    """A layer or block alone, or a copy of a stack, would treat its shard as the full tensor."""
    states, masks = given()
    stack = Execution(Plan(axial=2), AXIAL).bind(Stack(block())).double()
    for part in (copy.deepcopy(stack), stack.blocks[0]):
        with pytest.raises(ValueError, match="Bind it first"):
            part(*states, *masks)
    with pytest.raises(ValueError, match=r"Transition.* outside"):
        stack.blocks[0].pair.transition(states[1], masks[1])
    bound = Execution(Plan(axial=2), AXIAL).bind(block())
    bound.pair.starting = Adapter(bound.pair.starting)  # type: ignore[assignment]
    with pytest.raises(UserError, match="Adapter"):
        bound(*states, *masks)
    with pytest.raises(ValueError, match=r"EvoformerBlock .*m, z.*4 .* 3"):
        block().double()(*states, masks[0])


def test_an_unknown_order_of_a_block_is_refused_where_it_is_set() -> None:
    with pytest.raises(ValueError, match="outer = 'midle': must be"):
        EvoformerConfig(outer="midle")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["whole", "mask", "columns"])
def test_states_that_are_not_the_shard_of_a_rank_are_refused_before_a_collective(wrong: str) -> None:
    (m, z), (m_mask, z_mask) = given()
    stack = Execution(Plan(axial=2), AXIAL).bind(Stack(block())).double()
    group = AXIAL.axial
    m, z_mask = local_shard(m, COLS, group), local_shard(z_mask, -2, group)
    z = z if wrong == "whole" else local_shard(z, COLS if wrong == "columns" else ROWS, group)
    m_mask = local_shard(m_mask, -1, group) if wrong == "mask" else m_mask
    with pytest.raises(ValueError, match=r"on rank 0 of 2, [mz] is \[.*Cut m along axis -2"):
        stack(m, z, m_mask, z_mask)


# Steps outside of the contract, and failures


@pytest.mark.parametrize("kind", [Odd, PlainStep])
def test_a_step_that_the_contract_does_not_know_runs_under_every_plan_of_one_device(kind: type[EvoformerBlock]) -> None:
    batch = random_batch(passes=2)
    expected = odd(kind)(batch).distogram_logits
    without = odd(EvoformerBlock)(batch).distogram_logits
    assert (expected - without).norm() > 1e-2 * expected.norm()
    for plan in (Plan(chunk=3), Plan(recompute="block"), Plan(chunk=2, in_place=True)):
        with torch.set_grad_enabled(plan.recompute is not None):
            found = Execution(plan).bind(odd(kind))(batch).distogram_logits
        # Slices add in another order, here in fp32.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@contextmanager
def failing(model: AlphaFold) -> Iterator[None]:
    """Make a layer of the model fail, as if memory had run out."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("prepare", "update"):
            patch.setattr(model.evoformer.blocks[1].pair.starting, name, Mock(side_effect=MemoryError))
        yield


def test_a_forward_that_failed_leaves_nothing_behind() -> None:
    """After a failure in a layer, the next forward pass is complete."""
    model, batch = tiny_model(), random_batch(passes=2)
    for plan in (Plan(), Plan(chunk=3), Plan(recompute="block"), Plan(chunk=2, in_place=True)):
        Execution(plan).bind(model)
        with torch.set_grad_enabled(plan.recompute is not None):
            expected = model(batch).distogram_logits
            with failing(model), pytest.raises(MemoryError):
                model(batch)
            found = model(batch).distogram_logits
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_nor_does_one_on_ranks_and_branches_run_steps_that_the_contract_does_not_know() -> None:
    """A block that failed under an axial plan must not be skipped in the next call."""

    def on_a_rank() -> None:
        batch, mesh = random_batch(passes=2), make_mesh(axial=2)
        whole = tiny_model()(batch).distogram_logits
        model = Execution(Plan(axial=2), mesh).bind(tiny_model())
        with failing(model), pytest.raises(MemoryError):
            model(batch)
        found = model(batch).distogram_logits
        torch.testing.assert_close(found, local_shard(whole, -3, mesh.axial), rtol=1e-4, atol=1e-4)
        expected = odd(PlainStep, "first")(batch).distogram_logits
        found = Execution(Plan(branch=2), make_mesh(branch=2)).bind(odd(PlainStep, "first"))(batch).distogram_logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    run_ranks(on_a_rank, 2)


# Several executions of one model


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
    # Forward, and recomputed in the backward pass.
    assert seen == [(False, "definition")] * 2
    assert dispatch.kernels() == "fast"


def test_an_execution_says_what_it_does() -> None:
    assert str(Execution()) == "one device, fp32, fast kernels"
    plan = Plan(axial=2, chunk=8, in_place=True, precision="bf16", kernels="strict")
    assert str(Execution(plan, AXIAL)) == "axial 2 x branch 1, rank 0, slices of 8 rows, in place, bf16, strict kernels"


def test_a_later_plan_leaves_nothing_of_an_earlier_one() -> None:
    def on_a_rank() -> None:
        first = EvoformerConfig(blocks=2, heads=4, c_outer=6, outer="first", pair=PairConfig(c_triangle=8))
        mesh = make_mesh(axial=2, branch=2)
        model, fresh = tiny_model(evoformer=first), tiny_model(evoformer=first)
        attributes = [set(vars(module)) for module in fresh.modules()]
        Execution(Plan(axial=2, branch=2, recompute="block", chunk=2), mesh).bind(model)
        assert model.residues.shards == 2
        later = Execution()
        later.bind(model)
        for module, before in zip(model.modules(), attributes):
            # Nothing else is set on a module.
            assert set(vars(module)) - before <= {"execution"}
            assert not isinstance(module, Executable) or module.execution is later
        assert model.residues is fresh.residues
        assert model.state_dict().keys() == fresh.state_dict().keys()
        torch.testing.assert_close(model(batch).distogram_logits, fresh(batch).distogram_logits, rtol=0, atol=0)

    batch = random_batch(passes=2)
    run_ranks(on_a_rank, 4)


@pytest.mark.usefixtures("eager")
def test_a_copy_runs_as_the_original() -> None:
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


def test_templates_run_together_and_one_by_one_where_layers_run_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large templates run one by one, too, if each fills a device. The result is the same."""
    batch = {k: x.double() if x.is_floating_point() else x for k, x in random_batch(templates=3).items()}
    model = tiny_model().double()
    seen: list[int] = []
    model.templates.stack.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[-4]))

    def pair(plan: Plan) -> Tensor:
        seen.clear()
        return Execution(plan).bind(model)(batch, 0).pair

    together = pair(Plan(precision="fp64"))
    assert seen == [3]
    torch.testing.assert_close(pair(Plan(precision="fp64", chunk=4)), together, rtol=LIMIT, atol=LIMIT)
    assert seen == [1, 1, 1]
    monkeypatch.setattr(axial, "TEMPLATE_BATCH_POSITIONS", 2 * 9 * 9)
    torch.testing.assert_close(pair(Plan(precision="fp64")), together, rtol=LIMIT, atol=LIMIT)
    assert seen == [2, 1]


# torch.compile


def gradients(plan: Plan) -> list[Tensor]:
    stack = Execution(plan).bind(randomised(Evoformer(8, 6, EvoformerConfig(blocks=1, heads=2, c_outer=3, pair=PAIR))))
    states, masks = given()
    loss = sum((x.sin().sum() for x in stack(*states, *masks)), torch.zeros(()))
    return [loss.detach(), *torch.autograd.grad(loss, list(stack.parameters()))]


def apart(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference relative to the largest expected value."""
    scale = max(float(g.norm()) for g in expected)
    return max(float((a - b).norm()) for a, b in zip(found, expected)) / scale


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("plan", [{}, {"chunk": 3}, {"recompute": "block"}])
def test_compiled_layers_are_those_layers(plan: dict[str, Any]) -> None:
    assert apart(gradients(Plan(**plan, compile=True)), gradients(Plan(**plan))) <= 1e-10


@pytest.mark.slow
def test_compiled_by_inductor_too() -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    assert apart(gradients(Plan(compile=True)), gradients(Plan())) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Plan(), Plan(kernels="definition")])
def test_a_bound_stack_is_one_graph(plan: Plan) -> None:
    """torch.compile captures stack, blocks, layers and the choice of kernels as a single graph."""
    stack = Execution(plan).bind(Evoformer(8, 6, EvoformerConfig(blocks=1, heads=2, pair=PairConfig(heads=2)))).eval()
    inputs = torch.randn(4, 7, 8), torch.randn(7, 7, 6), torch.ones(4, 7), torch.ones(7, 7)
    with torch.no_grad():
        compiled = torch.compile(stack, backend="aot_eager", fullgraph=True)(*inputs)
        torch.testing.assert_close(compiled, stack(*inputs), rtol=1e-5, atol=1e-5)


def test_compiling_without_a_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="C\\+\\+ compiler"):
        Execution(Plan(compile=True)).bind(tiny_model())


# Layouts of the states


def test_triangle_products_are_cut_by_channels_where_that_moves_less() -> None:
    alphafold = {"channels": 128, "c_z": 128, "itemsize": 2}
    assert Plan(triangle="gather").by_channels(256, 8, **alphafold) is False
    assert Plan(triangle="channels").by_channels(256, 2, **alphafold) is True
    # 8 ranks save 2 * 7 * 6 / 8^2 of z, which has 16 MiB for 256 residues in bf16: 21 MiB. Two calls cost 0.5 MiB.
    assert Plan().by_channels(256, 8, **alphafold) is True
    assert Plan().by_channels(256, 2, **alphafold) is False  # two ranks save nothing
    # With two ranks and few channels of the product, the resharding of z that is avoided decides.
    assert Plan().by_channels(256, 2, channels=32, c_z=128, itemsize=2) is True
    # 48 residues on 3 ranks save 4 / 9 of z: 0.25 MiB in bf16, and 2 MiB with four times the channels in fp32.
    assert Plan().by_channels(48, 3, **alphafold) is False
    assert Plan().by_channels(48, 3, channels=512, c_z=512, itemsize=4) is True


def test_the_choice_is_made_from_the_sizes_of_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, by_channels = [], Plan.by_channels
    monkeypatch.setattr(Plan, "by_channels", lambda plan, *sizes: chosen.append(sizes) or by_channels(plan, *sizes))
    batch = random_batch(9, 5, 6, 2)

    def on_a_rank() -> set[tuple[int, ...]]:
        chosen.clear()
        Execution(Plan(axial=2), make_mesh(1, 2, 1)).bind(tiny_model())(batch)
        return set(chosen)

    pair = tiny_config().evoformer.pair
    for found in run_ranks(on_a_rank, 2):
        assert (9, 2, pair.c_triangle, tiny_config().c_z, 4) in found
        assert all(sizes[:2] == (9, 2) and sizes[4] == 4 for sizes in found)


def way(outer: str, by_channels: bool) -> list[dict[str, str]]:
    """For each layer of a block, return the axes of its inputs, and the collectives that it starts."""
    config = EvoformerConfig(blocks=3, heads=2, outer=outer, pair=PairConfig(heads=2))  # type: ignore[arg-type]
    stack = Evoformer(8, 8, config)
    blocks: Any = [*stack.blocks]
    steps = [layout for block in layout_plan("", blocks, by_channels, Group("branch")) for layout in block.steps]
    # The shards that exist or are in flight.
    held = {"m": {COLS}, "z": {ROWS}}
    axes, rows = {ROWS: "rows", COLS: "columns"}, []
    for step in steps:
        x, other = ("m", "z") if ".msa." in f".{step.name.strip()}." else ("z", "m")
        sent = []
        if step.other_next is not None and step.other_next not in held[other]:
            held[other].add(step.other_next)
            sent.append(f"{other} to {axes[step.other_next]}")
        held[x] = {step.axis}
        if step.next is not None and step.next != step.axis:
            held[x].add(step.next)
            sent.append(f"{x} to {axes[step.next]}")
        rows.append({"layer": step.name.strip(), "works on": f"{axes[step.axis]} of {x}", "sends": ", ".join(sent)})
    return rows[len(steps) // 3 : len(steps) // 3 * 2]


def tables(page: str) -> dict[str, list[dict[str, str]]]:
    """Return the tables of a page by their headings."""
    found: dict[str, list[dict[str, str]]] = {}
    for part in re.split(r"^#+ ", (DOCS / "explanation" / page).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        heading, *lines = part.splitlines()
        cells = [[c.strip(" `") for c in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        if cells:
            found[heading] = [dict(zip(cells[0], row)) for row in cells[2:]]
    return found


@pytest.mark.parametrize(
    ("heading", "outer", "by_channels"),
    [
        ("AlphaFold2's order, factors gathered", "middle", False),
        ("AlphaFold2's order, by channels", "middle", True),
        ("Multimer's order, factors gathered", "first", False),
    ],
)
def test_the_documented_way_is_the_way(heading: str, outer: str, by_channels: bool) -> None:
    rows = tables("parallel_training.md")[heading]
    documented = [{key: row[key] for key in ("layer", "works on", "sends")} for row in rows]
    assert documented == way(outer, by_channels)


def test_every_setting_is_documented() -> None:
    assert {row["setting"] for row in tables("plans.md")["Settings"]} == {f"plan.{one.name}" for one in fields(Plan)}
