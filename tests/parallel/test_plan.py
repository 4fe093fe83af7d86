"""Plans: what is refused, what a later plan leaves of an earlier one, and the way of m and z through a block."""

import re
import shutil
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
from warpfold.model.axial import COLS, ROWS, AxialUpdate, BlockStack, Branching
from warpfold.model.evoformer import Evoformer, EvoformerBlock, EvoformerConfig
from warpfold.model.pair import PairConfig
from warpfold.model.residues import ALL, Resident
from warpfold.parallel.mesh import Group, Mesh, make_mesh
from warpfold.parallel.plan import Plan, apply
from warpfold.parallel.sharded import itinerary

DOCS = (Path(__file__).parents[2] / "docs" / "plans.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"axial": 0}, "axial 0"),
        ({"branch": 3}, "plan.branch is 3"),
        ({"chunk": 0}, "plan.chunk is 0"),
        ({"in_place": True}, "needs plan.chunk"),
        ({"in_place": True, "chunk": 4, "recompute": True}, "choose one"),
        ({"threads": 0}, "plan.threads is 0"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Plan(**settings)


def test_branches_need_independent_halves() -> None:
    plan = Plan(branch=2)
    assert plan.refuses("first") is None
    assert plan.refuses("last") is None

    def on_a_rank() -> None:
        with pytest.raises(UserError, match="independent halves") as refusal:
            apply(plan, tiny_model(), make_mesh(branch=2))
        assert str(refusal.value) == plan.refuses("middle")

    run_ranks(on_a_rank, 2)


class Odd(EvoformerBlock):
    """A block that computes with the states between its layers, which an axial plan cannot follow."""

    def forward(self, m: Tensor, z: Tensor, m_mask: Tensor, z_mask: Tensor) -> tuple[Tensor, Tensor]:
        m, z = super().forward(m, z, m_mask, z_mask)
        return m, z + torch.nn.functional.silu(z)


@pytest.mark.parametrize("fails", ["a block", "the order"])
def test_a_plan_that_failed_leaves_the_model_as_it_was_without_one(fails: str) -> None:
    """An axial plan that cannot be put on must not leave layers that note who asks, or half a plan."""
    model, batch = tiny_model(), random_batch(passes=2)
    outputs = [model(batch).distogram_logits]
    if fails == "a block":
        model.evoformer.blocks[-1].__class__ = Odd
        outputs = [model(batch).distogram_logits]
        with pytest.raises(TypeError):
            apply(Plan(axial=2), model, Mesh(axial=Group("axial", 0, 2, (0, 1))))
    else:
        with pytest.raises(UserError, match="independent halves"):
            apply(Plan(branch=2), model, Mesh(branch=Group("branch", 0, 2, (0, 1))))
    outputs.append(model(batch).distogram_logits)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)


def test_a_forward_that_failed_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under any schedule of one device: what a layer's failure interrupted is computed anew as if nothing had been."""
    model, batch = tiny_model(), random_batch(passes=2)
    for plan in (Plan(), Plan(chunk=3), Plan(recompute=True), Plan(chunk=2, in_place=True)):
        apply(plan, model)
        with torch.set_grad_enabled(plan.recompute):
            expected = model(batch).distogram_logits
            with monkeypatch.context() as patch:
                for name in ("update", "add"):
                    patch.setattr(model.evoformer.blocks[1].pair.starting, name, Mock(side_effect=MemoryError))
                with pytest.raises(MemoryError):
                    model(batch)
            found = model(batch).distogram_logits
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_ranks_need_a_mesh_of_their_sizes() -> None:
    with pytest.raises(ValueError, match="needs a mesh"):
        apply(Plan(axial=2), tiny_model())
    with pytest.raises(ValueError, match="needs a mesh"):
        apply(Plan(axial=2), tiny_model(), make_mesh())


def test_a_later_plan_leaves_nothing_of_an_earlier_one() -> None:
    def on_a_rank() -> None:
        first = EvoformerConfig(blocks=2, heads=4, c_outer=6, outer="first", pair=PairConfig(c_triangle=8))
        mesh = make_mesh(axial=2, branch=2)
        model, fresh = tiny_model(evoformer=first), tiny_model(evoformer=first)
        apply(Plan(axial=2, branch=2, recompute=True, chunk=2), model, mesh)
        residents = [m for m in model.modules() if isinstance(m, Resident)]
        assert all(m.residues.cuts == 2 for m in residents)
        apply(Plan(), model)
        apply(Plan(), fresh)
        for module, other in zip(model.modules(), fresh.modules()):
            for kind, name in ((AxialUpdate, "schedule"), (BlockStack, "run"), (Branching, "branches")):
                if isinstance(module, kind):
                    assert getattr(module, name) is getattr(other, name)
        assert all(m.residues is ALL for m in residents)

    run_ranks(on_a_rank, 4)


def test_triangle_products_are_cut_by_channels_where_that_moves_less() -> None:
    assert Plan(triangle="gather").by_channels(256, 8) is False
    assert Plan(triangle="channels").by_channels(256, 2) is True
    assert {Plan().by_channels(256, ranks) for ranks in (2, 8)} <= {False, True}


# The way of the states


def way(outer: str, by_channels: bool) -> list[dict[str, str]]:
    """Of every layer of a block among others: what it works on, and what it sends on its way to another cut."""
    config = EvoformerConfig(blocks=3, heads=2, outer=outer, pair=PairConfig(heads=2))  # type: ignore[arg-type]
    stack = Evoformer(8, 8, config)
    steps = itinerary("", stack.blocks, by_channels).steps
    held = {"m": {COLS}, "z": {ROWS}}  # the slices that are there or on their way
    rows = []
    for number, step in enumerate(steps.values()):
        x, source = ("m", "z") if ".msa." in f".{step.name.strip()}." else ("z", "m")
        sent = []
        if step.source_next is not None and step.source_next not in held[source]:
            held[source].add(step.source_next)
            sent.append(f"{source} to {'rows' if step.source_next == ROWS else 'columns'}")
        held[x] = {step.axis}
        if step.x_next is not None and step.x_next != step.axis:
            held[x].add(step.x_next)
            sent.append(f"{x} to {'rows' if step.x_next == ROWS else 'columns'}")
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
    steps = list(itinerary("t", templates.stack.blocks, False).steps.values())
    assert [step.name for step in steps] == [
        f"t {layer}" for layer in ("starting", "ending", "outgoing", "incoming", "transition")
    ]
    assert [step.axis for step in steps] == [ROWS, COLS, ROWS, COLS, COLS]
    assert steps[-1].x_next == ROWS


def _gradients(plan: Plan) -> list[torch.Tensor]:
    torch.manual_seed(0)
    stack = Evoformer(8, 6, EvoformerConfig(blocks=1, heads=2, c_outer=3, pair=PairConfig(heads=2, c_triangle=5)))
    for p in stack.parameters():
        torch.nn.init.normal_(p, std=0.3)
    apply(plan, stack.double())
    m, z = torch.randn(4, 7, 8).double(), torch.randn(7, 7, 6).double()
    m, z = stack(m, z, torch.ones(4, 7).double(), torch.ones(7, 7).double())
    loss = m.sin().sum() + z.sin().sum()
    return [loss.detach(), *torch.autograd.grad(loss, list(stack.parameters()))]


def _apart(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest of what is expected."""
    scale = max(float(g.norm()) for g in expected)
    return max(float((a - b).norm()) for a, b in zip(found, expected)) / scale


@pytest.mark.parametrize("plan", [{}, {"chunk": 3}, {"recompute": True}])
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
    apply(Plan(compile=True), model)
    layers = [m for m in model.modules() if isinstance(m, AxialUpdate)]
    assert any("update" in layer.__dict__ for layer in layers)
    apply(Plan(), model)
    assert not any("update" in layer.__dict__ for layer in layers)


def test_compiling_without_a_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(torch._inductor.cpp_builder, "get_cpp_compiler", none)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="C\\+\\+ compiler"):
        apply(Plan(compile=True), tiny_model())
