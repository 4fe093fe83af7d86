"""Plans and executions: what is refused, what a later one leaves of an earlier one, and the way of m and z."""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch._inductor.cpp_builder
from torch import Tensor
from torch._inductor.exc import InvalidCxxCompiler

from tests.helpers import random_batch, tiny_config, tiny_model
from tests.ranks import run_ranks
from warpfold.errors import UserError
from warpfold.model.alphafold import AlphaFold
from warpfold.model.axial import COLS, PLAIN, ROWS, Executable, Step, Steps
from warpfold.model.evoformer import Evoformer, EvoformerBlock, EvoformerConfig, PairConfig, Transition
from warpfold.ops import dispatch
from warpfold.parallel.collectives import local_shard as local_shard
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import Group, Mesh, make_mesh
from warpfold.parallel.plan import Plan
from warpfold.parallel.sharded import layout_plan

DOCS = (Path(__file__).parents[2] / "docs" / "plans.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"axial": 0}, "axial 0"),
        ({"branch": 3}, "plan.branch is 3"),
        ({"chunk": 0}, "plan.chunk is 0"),
        ({"in_place": True}, "needs plan.chunk"),
        ({"in_place": True, "chunk": 4, "recompute": "block"}, "choose one"),
        ({"threads": 0}, "plan.threads is 0"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Plan(**settings)


def test_branches_need_independent_halves() -> None:
    plan = Plan(branch=2)
    assert plan.unsupported_reason("first") is None
    assert plan.unsupported_reason("last") is None

    def on_a_rank() -> None:
        with pytest.raises(UserError, match="independent halves") as refusal:
            Execution(plan, make_mesh(branch=2)).bind(tiny_model())
        assert str(refusal.value) == plan.unsupported_reason("middle")

    run_ranks(on_a_rank, 2)


class Odd(EvoformerBlock):
    """A block with a step that the contract does not know: plain torch on whole states, in its `forward`."""

    def forward(self, *states_and_masks: Tensor) -> tuple[Tensor, Tensor]:
        m, z = super().forward(*states_and_masks)
        return m, z + torch.nn.functional.silu(z)


class PlainStep(EvoformerBlock):
    """A block with such a step among its steps."""

    @property
    def steps(self) -> Steps:
        return *super().steps, Step("z", Silu())


class Silu(torch.nn.Module):
    """z + silu(z), within its mask."""

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        return z + torch.nn.functional.silu(z) * mask[..., None].to(z.dtype)


def odd(kind: type[EvoformerBlock], outer: str = "middle") -> AlphaFold:
    """The tiny model with one block of another kind."""
    config = EvoformerConfig(blocks=2, heads=4, c_outer=6, outer=outer, pair=PairConfig(c_triangle=8))  # type: ignore[arg-type]
    model = tiny_model(evoformer=config)
    model.evoformer.blocks[-1].__class__ = kind
    return model


@pytest.mark.parametrize("kind", [Odd, PlainStep])
def test_a_step_that_the_contract_does_not_know_runs_under_every_plan_of_one_device(kind: type[EvoformerBlock]) -> None:
    batch = random_batch(passes=2)
    expected = odd(kind)(batch).distogram_logits
    without = odd(EvoformerBlock)(batch).distogram_logits
    assert (expected - without).norm() > 1e-2 * expected.norm()
    for plan in (Plan(chunk=3), Plan(recompute="block"), Plan(chunk=2, in_place=True)):
        with torch.set_grad_enabled(plan.recompute is not None):
            found = Execution(plan).bind(odd(kind))(batch).distogram_logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)  # slices add in another order, in fp32


def test_a_step_that_the_contract_does_not_know_runs_on_branch_ranks() -> None:
    def on_a_rank() -> None:
        batch = random_batch(passes=2)
        expected = odd(PlainStep, "first")(batch).distogram_logits
        found = Execution(Plan(branch=2), make_mesh(branch=2)).bind(odd(PlainStep, "first"))(batch).distogram_logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    run_ranks(on_a_rank, 2)


AXIAL, BRANCH = Mesh(axial=Group("axial", 0, 2, (0, 1))), Mesh(branch=Group("branch", 0, 2, (0, 1)))


@pytest.mark.parametrize(
    ("model", "plan", "mesh", "says"),
    [
        (lambda: odd(Odd), Plan(axial=2), AXIAL, r"plan.axial = 2 .*evoformer.*\(Odd\) has a forward of its own"),
        (lambda: odd(Odd, "first"), Plan(branch=2), BRANCH, r"plan.branch = 2 .*\(Odd\) has a forward of its own"),
        (lambda: odd(PlainStep), Plan(axial=2), AXIAL, r"plan.axial = 2 .*Silu in evoformer.* has none"),
        (tiny_model, Plan(branch=2), BRANCH, "independent halves"),
    ],
)
def test_a_plan_that_cannot_run_a_model_says_why_and_leaves_it_as_it_was(
    model: Callable[[], AlphaFold], plan: Plan, mesh: Mesh, says: str
) -> None:
    made, batch = model(), random_batch(passes=2)
    expected = made(batch).distogram_logits
    with pytest.raises(UserError, match=says):
        Execution(plan, mesh).bind(made)
    assert all(module.execution is PLAIN for module in made.modules() if isinstance(module, Executable))
    torch.testing.assert_close(made(batch).distogram_logits, expected, rtol=0, atol=0)


@contextmanager
def failing(model: AlphaFold) -> Iterator[None]:
    """Have a layer of the model fail, as where memory runs out."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("prepare", "update"):
            patch.setattr(model.evoformer.blocks[1].pair.starting, name, Mock(side_effect=MemoryError))
        yield


def test_a_forward_that_failed_leaves_nothing_behind() -> None:
    """What a layer's failure interrupted is computed anew as if nothing had been."""
    model, batch = tiny_model(), random_batch(passes=2)
    for plan in (Plan(), Plan(chunk=3), Plan(recompute="block"), Plan(chunk=2, in_place=True)):
        Execution(plan).bind(model)
        with torch.set_grad_enabled(plan.recompute is not None):
            expected = model(batch).distogram_logits
            with failing(model), pytest.raises(MemoryError):
                model(batch)
            found = model(batch).distogram_logits
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_nor_does_one_on_several_ranks() -> None:
    """A block that had failed under an axial plan was once silently the identity in the next call."""

    def on_a_rank() -> None:
        batch, mesh = random_batch(passes=2), make_mesh(axial=2)
        whole = tiny_model()(batch).distogram_logits
        model = Execution(Plan(axial=2), mesh).bind(tiny_model())
        with failing(model), pytest.raises(MemoryError):
            model(batch)
        found = model(batch).distogram_logits
        torch.testing.assert_close(found, local_shard(whole, -3, mesh.axial), rtol=1e-4, atol=1e-4)

    run_ranks(on_a_rank, 2)


def test_two_models_of_one_process_run_differently() -> None:
    """Which kernels a model uses is its own affair, and of no other model's."""
    seen: list[str] = []
    strict, plain, batch = tiny_model(), tiny_model(), random_batch(passes=1)
    Execution(Plan(kernels="strict")).bind(strict)
    Execution(Plan(kernels="definition")).bind(plain)
    for model in (strict, plain):
        layer = model.evoformer.blocks[0].pair.transition
        layer.register_forward_hook(lambda *_: seen.append(dispatch.kernels()))
    before = dispatch.kernels()
    for model in (strict, plain, strict):
        model(batch, recycles=0)
    assert seen == ["strict", "definition", "strict"]
    assert dispatch.kernels() == before


def test_an_execution_says_what_it_does() -> None:
    assert str(Execution()) == "one device, fp32, fast kernels"
    plan = Plan(axial=2, chunk=8, in_place=True, precision="bf16", kernels="strict")
    assert str(Execution(plan, AXIAL)) == "axial 2 x branch 1, rank 0, slices of 8 rows, in place, bf16, strict kernels"


def test_a_layer_outside_of_blocks_is_not_cut_in_silence() -> None:
    model = torch.nn.ModuleDict({"lonely": Transition(8)})
    with pytest.raises(UserError, match=r"lonely \(Transition\) stands in no block"):
        Execution(Plan(axial=2), AXIAL).bind(model)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Plan(), Plan(kernels="definition")])
def test_a_bound_stack_is_one_graph(plan: Plan) -> None:
    """Binding breaks no graph: torch.compile takes stack, blocks, layers and the choice of kernels whole."""
    stack = Execution(plan).bind(Evoformer(8, 6, EvoformerConfig(blocks=1, heads=2, pair=PairConfig(heads=2)))).eval()
    given = torch.randn(4, 7, 8), torch.randn(7, 7, 6), torch.ones(4, 7), torch.ones(7, 7)
    with torch.no_grad():
        compiled = torch.compile(stack, backend="aot_eager", fullgraph=True)(*given)
        torch.testing.assert_close(compiled, stack(*given), rtol=1e-5, atol=1e-5)


def test_ranks_need_a_mesh_of_their_sizes() -> None:
    with pytest.raises(ValueError, match="needs a mesh"):
        Execution(Plan(axial=2)).bind(tiny_model())
    with pytest.raises(ValueError, match="needs a mesh"):
        Execution(Plan(axial=2), make_mesh()).bind(tiny_model())


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
            assert set(vars(module)) - before <= {"execution"}  # nothing else was ever put on a module
            assert not isinstance(module, Executable) or module.execution is later
        assert model.residues is fresh.residues
        torch.testing.assert_close(model(batch).distogram_logits, fresh(batch).distogram_logits, rtol=0, atol=0)

    batch = random_batch(passes=2)
    run_ranks(on_a_rank, 4)


def test_triangle_products_are_cut_by_channels_where_that_moves_less() -> None:
    alphafold = {"channels": 128, "c_z": 128, "itemsize": 2}
    assert Plan(triangle="gather").by_channels(256, 8, **alphafold) is False
    assert Plan(triangle="channels").by_channels(256, 2, **alphafold) is True
    # 8 ranks save 2 * 7 * 6 / 8^2 of z, of which 256 residues in bf16 have 16 MiB: 21 MiB; two calls cost 0.5 MiB.
    assert Plan().by_channels(256, 8, **alphafold) is True
    assert Plan().by_channels(256, 2, **alphafold) is False  # two ranks save nothing
    # Two ranks, few channels of the product: what counts is that z need not be turned.
    assert Plan().by_channels(256, 2, channels=32, c_z=128, itemsize=2) is True
    # 48 residues on 3 ranks save 4 / 9 of z: 0.25 MiB in bf16; with four times the channels, in fp32, 2 MiB.
    assert Plan().by_channels(48, 3, **alphafold) is False
    assert Plan().by_channels(48, 3, channels=512, c_z=512, itemsize=4) is True


# The way of the states


def way(outer: str, by_channels: bool) -> list[dict[str, str]]:
    """Of every layer of a block among others: what it works on, and what it sends on its way to another cut."""
    config = EvoformerConfig(blocks=3, heads=2, outer=outer, pair=PairConfig(heads=2))  # type: ignore[arg-type]
    stack = Evoformer(8, 8, config)
    blocks: Any = [*stack.blocks]
    steps = [layout for block in layout_plan("", blocks, by_channels) for layout in block.steps]
    held = {"m": {COLS}, "z": {ROWS}}  # the slices that are there or on their way
    rows = []
    for number, step in enumerate(steps):
        x, other = ("m", "z") if ".msa." in f".{step.name.strip()}." else ("z", "m")
        sent = []
        if step.other_next is not None and step.other_next not in held[other]:
            held[other].add(step.other_next)
            sent.append(f"{other} to {'rows' if step.other_next == ROWS else 'columns'}")
        held[x] = {step.axis}
        if step.next is not None and step.next != step.axis:
            held[x].add(step.next)
            sent.append(f"{x} to {'rows' if step.next == ROWS else 'columns'}")
        if len(steps) // 3 <= number < len(steps) // 3 * 2:
            axis = "rows" if step.axis == ROWS else "columns"
            rows.append({"layer": step.name.strip(), "works on": f"{axis} of {x}", "sends": ", ".join(sent)})
    return rows


def tables() -> dict[str, list[dict[str, str]]]:
    """The tables of docs/plans.md by the heading that they stand under."""
    found: dict[str, list[dict[str, str]]] = {}
    for part in re.split(r"^#+ ", DOCS, flags=re.MULTILINE)[1:]:
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
    documented = [{key: row[key] for key in ("layer", "works on", "sends")} for row in tables()[heading]]
    assert documented == way(outer, by_channels)


def test_every_setting_is_documented() -> None:
    assert {row["setting"] for row in tables()["Settings"]} == {f"plan.{field.name}" for field in fields(Plan)}


def test_a_stack_of_one_state_enters_and_leaves_by_rows() -> None:
    templates = tiny_model(templates=tiny_config().templates).templates
    assert templates is not None
    blocks: Any = [*templates.stack.blocks]
    (layout,) = layout_plan("t", blocks, False)
    steps = layout.steps
    assert [step.name for step in steps] == [
        f"t {layer}" for layer in ("starting", "ending", "outgoing", "incoming", "transition")
    ]
    assert [step.axis for step in steps] == [ROWS, COLS, ROWS, COLS, COLS]
    assert steps[-1].next == ROWS


def _gradients(plan: Plan) -> list[torch.Tensor]:
    torch.manual_seed(0)
    stack = Evoformer(8, 6, EvoformerConfig(blocks=1, heads=2, c_outer=3, pair=PairConfig(heads=2, c_triangle=5)))
    for p in stack.parameters():
        torch.nn.init.normal_(p, std=0.3)
    Execution(plan).bind(stack.double())
    m, z = torch.randn(4, 7, 8).double(), torch.randn(7, 7, 6).double()
    m, z = stack(m, z, torch.ones(4, 7).double(), torch.ones(7, 7).double())
    loss = m.sin().sum() + z.sin().sum()
    return [loss.detach(), *torch.autograd.grad(loss, list(stack.parameters()))]


def _apart(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest of what is expected."""
    scale = max(float(g.norm()) for g in expected)
    return max(float((a - b).norm()) for a, b in zip(found, expected)) / scale


@pytest.mark.parametrize("plan", [{}, {"chunk": 3}, {"recompute": "block"}])
def test_compiled_layers_are_those_layers(plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _gradients(Plan(**plan))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # graphs, without a C++ compiler
    monkeypatch.setattr(torch._inductor.cpp_builder, "get_cpp_compiler", lambda: "c++")
    assert _apart(_gradients(Plan(**plan, compile=True)), expected) <= 1e-10


@pytest.mark.slow
def test_compiled_by_inductor_too() -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    assert _apart(_gradients(Plan(compile=True)), _gradients(Plan())) <= 1e-10


def test_a_later_plan_leaves_nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor.cpp_builder, "get_cpp_compiler", lambda: "c++")
    model = tiny_model()
    Execution(Plan(compile=True)).bind(model)
    Execution().bind(model)
    calls: list[str] = []
    monkeypatch.setattr(torch._dynamo.eval_frame, "set_eval_frame", lambda *_: calls.append("compiled"))
    model(random_batch(passes=1), recycles=0)
    assert not calls


def test_compiling_without_a_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(torch._inductor.cpp_builder, "get_cpp_compiler", none)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="C\\+\\+ compiler"):
        Execution(Plan(compile=True)).bind(tiny_model())
