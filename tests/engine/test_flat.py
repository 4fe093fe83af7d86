"""Flat: torch's own optimizers on flat buffers do what they do on the parameters themselves."""

import contextlib
import copy
import threading
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.ranks import run_ranks
from warpfold.engine.flat import Flat
from warpfold.engine.flat_buffer import LARGE
from warpfold.errors import UserError

CLASSES: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.Adam, {}),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.1, "betas": (0.8, 0.9)}),
    (optim.Adam, {"foreach": False, "maximize": True}),
    (optim.Adam, {"foreach": True}),
    (optim.Adam, {"fused": True, "eps": 1e-3}),
    (optim.AdamW, {"weight_decay": 0.1}),
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.Adamax, {}),
    (optim.Adadelta, {}),
    (optim.ASGD, {"lr": 0.1}),
    (optim.Rprop, {}),
]


def small(dtype: torch.dtype = torch.float64, seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(7, 33), nn.LayerNorm(33), nn.Linear(33, 130), nn.Linear(130, 140), nn.Linear(140, 120)
    ).to(dtype)


def backward(model: nn.Sequential, step: int, skip: bool = False) -> None:
    """Add the gradient of a step to that of the parameters, or to that of the first ones only."""
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
    h = model[:3](x)
    (h if skip else model[3:](h)).square().mean().backward()


def steps(model: nn.Sequential, optimizer: optim.Optimizer, numbers: range, clip: float | None = None) -> None:
    for step in numbers:
        optimizer.zero_grad()
        backward(model, step, skip=step % 3 == 1)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def assert_equal(a: nn.Module, b: nn.Module, rtol: float = 1e-11) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=rtol * p.abs().max().item())


@st.composite
def trainings(draw: st.DrawFn) -> tuple[Any, ...]:
    shape = st.lists(st.integers(1, 9), max_size=3).map(tuple) | st.just((0, 3))
    groups = draw(st.lists(st.lists(shape, min_size=1, max_size=5), min_size=1, max_size=3))
    count = sum(map(len, groups))
    used = draw(st.lists(st.lists(st.booleans(), min_size=count, max_size=count), min_size=1, max_size=5))
    return groups, used, draw(st.sampled_from(CLASSES)), draw(st.sampled_from([None, 0.5]))


@settings(max_examples=25, deadline=None)
@given(trainings())
def test_groups_shapes_and_unused_parameters(training: tuple[Any, ...]) -> None:
    shapes, used, (optimizer, options), clip = training
    random = torch.Generator().manual_seed(3)

    def make() -> list[nn.Parameter]:
        torch.manual_seed(5)
        return [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for group in shapes for shape in group]

    def in_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        left = iter(parameters)
        return [{"params": [next(left) for _ in group], "lr": 0.01 * (1 + i)} for i, group in enumerate(shapes)]

    theirs, ours = make(), make()
    own, flat = optimizer(in_groups(theirs), **options), Flat(in_groups(ours), optimizer, clip=clip, **options)
    for pattern in used:
        own.zero_grad()
        flat.zero_grad()
        for p, q, is_used in zip(theirs, ours, pattern):
            if is_used:
                factor = torch.randn(p.shape, generator=random, dtype=p.dtype)
                for x in (p, q):
                    (x * factor).sin().sum().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(theirs, clip)
        own.step()
        flat.step()
    for p, q in zip(theirs, ours):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)
    a, b = own.state_dict(), flat.state_dict()
    assert b["param_groups"] == a["param_groups"]
    for i, state in a["state"].items():
        if theirs[i].numel():
            assert state.keys() == b["state"][i].keys()
            for key, value in state.items():
                torch.testing.assert_close(value, b["state"][i][key], rtol=1e-9, atol=1e-9, check_dtype=False)


@pytest.mark.parametrize(("optimizer", "options"), CLASSES[:2] + CLASSES[7:10])
def test_a_state_goes_both_ways_while_training(optimizer: type[optim.Optimizer], options: dict[str, Any]) -> None:
    ours, theirs = small(), small()
    flat, own = Flat(ours, optimizer, clip=0.1, **options), optimizer(theirs.parameters(), **options)
    steps(ours, flat, range(5))
    steps(theirs, own, range(5), clip=0.1)
    state = flat.state_dict()
    other = optimizer(ours.parameters(), **options)  # torch's goes on with ours, ours with torch's
    other.load_state_dict({key: copy.deepcopy(state[key]) for key in ("state", "param_groups")})
    continued = Flat(theirs, optimizer, clip=0.1, **options)
    continued.load_state_dict(own.state_dict())
    steps(ours, other, range(5, 9), clip=0.1)
    steps(theirs, continued, range(5, 9))
    assert_equal(ours, theirs)


def test_a_run_continues_to_the_bit() -> None:
    a, b = small(torch.float32), small(torch.float32)
    first, through = Flat(a, optim.Adam, ema=0.9), Flat(b, optim.Adam, ema=0.9)
    steps(a, first, range(5))
    steps(b, through, range(9))
    again = small(torch.float32, seed=2)
    second = Flat(again, optim.Adam, ema=0.9)
    again.load_state_dict(copy.deepcopy(a.state_dict()))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    steps(again, second, range(5, 9))
    for p, q in zip(b.parameters(), again.parameters()):
        assert torch.equal(p, q)
    for x, y in zip(through.averaged_state_dict(b).values(), second.averaged_state_dict(again).values()):
        assert torch.equal(x, y)


def test_state_shows_what_torch_would() -> None:
    ours, theirs = small(), small()
    flat, own = Flat(ours, optim.Adam), optim.Adam(theirs.parameters())
    assert not flat.state
    for optimizer, model in ((flat, ours), (own, theirs)):
        steps(model, optimizer, range(4))
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert flat.state[p].keys() == own.state[q].keys()
        for key, value in own.state[q].items():
            torch.testing.assert_close(flat.state[p][key], value, check_dtype=False)
    moment = flat.state[ours[0].weight]["exp_avg"]
    assert moment.untyped_storage().data_ptr() == flat.state[ours[4].bias]["exp_avg"].untyped_storage().data_ptr()


def test_schedulers_and_groups_added_later() -> None:
    ours, theirs = small(), small()
    flat, own = Flat(ours[:3], optim.AdamW, lr=0.1), optim.AdamW(theirs[:3].parameters(), lr=0.1)
    schedules = [optim.lr_scheduler.OneCycleLR(o, 0.1, 12) for o in (flat, own)]  # it changes betas, too
    for step in range(9):
        if step == 4:
            schedules = []
            flat.add_param_group({"params": list(ours[3:].parameters()), "lr": 0.01})
            own.add_param_group({"params": list(theirs[3:].parameters()), "lr": 0.01})
        for model, optimizer in ((ours, flat), (theirs, own)):
            steps(model, optimizer, range(step, step + 1))
        for schedule in schedules:
            schedule.step()
    assert_equal(ours, theirs)
    assert flat.param_groups[0]["betas"] == own.param_groups[0]["betas"] != (0.9, 0.999)


def test_gradients_add_up_and_are_where_they_are_looked_for() -> None:
    ours, theirs = small(), small()
    flat, own = Flat(ours, optim.Adam), optim.Adam(theirs.parameters())
    for step in range(4):
        for model, optimizer in ((ours, flat), (theirs, own)):
            optimizer.zero_grad(set_to_none=step != 2)
            backward(model, step, skip=True)
            backward(model, step + 10, skip=step == 2)
            if step == 3:
                model[0].bias.grad = torch.ones_like(model[0].bias)  # somebody's own
                model[2].weight.grad = None
            optimizer.step()
        for p, q in zip(ours.parameters(), theirs.parameters()):
            assert (p.grad is None) == (q.grad is None)
            torch.testing.assert_close(p.grad, q.grad)
    assert_equal(ours, theirs)
    buffer = flat.buffers[0]
    assert ours[3].weight.numel() > LARGE < ours[4].weight.numel()
    apart = [name for name, p in buffer.parameters.items() if p.grad is not buffer.gradients[name]]
    assert apart == ["2.weight", "4.weight"]  # the first has none, the other's is read where it lies
    buffer.gather(everything=True)
    assert ours[4].weight.grad is buffer.gradients["4.weight"]
    torch.testing.assert_close(ours[4].weight.grad, theirs[4].weight.grad)


def test_a_closure_is_called_with_a_graph() -> None:
    ours, theirs = small(), small()
    losses = []
    for model, optimizer in ((ours, Flat(ours, optim.SGD, lr=0.1)), (theirs, optim.SGD(theirs.parameters(), lr=0.1))):

        def closure(model: nn.Module = model, optimizer: optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 7, dtype=torch.float64)).square().sum()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure))
    assert torch.equal(*losses)
    assert_equal(ours, theirs)


def test_tied_frozen_and_unfrozen_parameters() -> None:
    models, optimizers = [small(), small()], []
    for model in models:
        model[3] = nn.Linear(130, 130).double()
        model[4] = nn.Linear(130, 130).double()
        model[4].weight = model[3].weight
        for linear in (model[3], model[4]):
            nn.init.constant_(linear.bias, 0.1)
        nn.init.eye_(model[3].weight)
        model[2].weight.requires_grad_(False)
        ours = model is models[0]
        optimizers.append(Flat(model, optim.Adam, ema=0.5) if ours else optim.Adam(model.parameters()))
    for step in range(6):
        for model, optimizer in zip(models, optimizers):
            model[2].weight.requires_grad_(step >= 3)
            model[0].bias.requires_grad_(step < 4)
            steps(model, optimizer, range(step, step + 1))
    assert_equal(*models)
    assert len(optimizers[0].param_groups[0]["params"]) == len(list(models[0].parameters()))


def test_the_average_of_the_weights() -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))
    model[1].bias.requires_grad_(False)
    flat = Flat(model, optim.SGD, lr=0.3, ema=0.75)
    expected = [p.detach().clone() for p in model.parameters()]
    for step in range(4):
        flat.zero_grad()
        model(torch.randn(6, 7, generator=torch.Generator().manual_seed(step))).pow(3).sum().backward()
        flat.step()
        expected = [e.lerp(p.detach(), 0.25) for e, p in zip(expected, model.parameters())]
    trained = [p.detach().clone() for p in model.parameters()]
    with contextlib.suppress(ZeroDivisionError), flat.averaged():
        torch.testing.assert_close([p.detach() for p in model.parameters()], expected)
        raise ZeroDivisionError
    assert all(map(torch.equal, model.parameters(), trained))
    averaged = flat.averaged_state_dict(model)
    torch.testing.assert_close([averaged[name] for name, _ in model.named_parameters()], expected)
    assert torch.equal(averaged["1.running_mean"], model[1].running_mean)
    with pytest.raises(UserError, match=r"Flat: there is no average .*ema=0.999"), Flat(small(), optim.SGD).averaged():
        pass


def test_a_gradient_scaler_skips_overflows() -> None:
    ours, theirs = small(torch.float32), small(torch.float32)
    for model, optimizer in ((ours, Flat(ours, optim.Adam)), (theirs, optim.Adam(theirs.parameters()))):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(5):
            optimizer.zero_grad()
            scale = float("inf") if step == 2 else 1.0
            scaler.scale(model(torch.ones(2, 7)).square().sum() * scale).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert_equal(ours, theirs, rtol=1e-5)


def test_several_dtypes_and_master_weights() -> None:
    def make() -> nn.Sequential:
        model = small(torch.float32)
        model[3].to(torch.bfloat16)
        return model

    def learn(model: nn.Sequential, optimizer: optim.Optimizer, masters: Sequence[Tensor] = ()) -> None:
        for step in range(6):
            model.zero_grad()
            h = model[3](model[:3](torch.full((2, 7), float(step))).bfloat16())
            model[4](h.float()).square().mean().backward()
            for master, p in zip(masters, model[3].parameters()):
                assert p.grad is not None
                master.grad = p.grad.float()
            optimizer.step()
            for master, p in zip(masters, model[3].parameters()):
                p.data.copy_(master)

    options: dict[str, Any] = {"lr": 0.01, "momentum": 0.5, "foreach": False}
    ours, theirs = make(), make()
    learn(ours, Flat(ours, optim.SGD, **options))
    learn(theirs, optim.SGD(theirs.parameters(), **options))
    assert_equal(ours, theirs, rtol=2**-7)

    ours, theirs = make(), make()
    masters = [p.detach().float() for p in theirs[3].parameters()]
    others = [p for p in theirs.parameters() if p.dtype == torch.float32]
    flat = Flat(ours, optim.SGD, master=True, ema=0.9, **options)
    learn(ours, flat)
    learn(theirs, optim.SGD([*others, *masters], **options), masters)
    state = flat.state_dict()
    assert state["state"][6]["momentum_buffer"].dtype == torch.float32
    torch.testing.assert_close(state["master"][6], masters[0], rtol=1e-4, atol=1e-5)
    assert_equal(ours, theirs, rtol=2**-7)
    again = make()
    again.load_state_dict(ours.state_dict())
    other = Flat(again, optim.SGD, master=True, **options)
    other.load_state_dict(state)
    assert torch.equal(other.state_dict()["master"][6], state["master"][6])
    ours[3].weight.data.zero_()  # written by somebody else
    with torch.no_grad():
        ours[3].weight.fill_(1.0)
    flat.zero_grad()
    flat.step()
    assert torch.equal(flat.state_dict()["master"][6], torch.ones(140, 130))


def test_strides_stay() -> None:
    conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    before = conv.weight.detach().clone()
    flat = Flat(conv, optim.Adam)
    assert torch.equal(conv.weight, before)
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    conv(torch.ones(1, 3, 5, 5)).sum().backward()
    flat.step()
    assert flat.state[conv.weight]["exp_avg"].stride() == conv.weight.stride()


class Trust(optim.SGD):
    """Scale each parameter's update by the norm of its weights, as LAMB does."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad * p.data.norm(), alpha=group["lr"])


class Sign(optim.Optimizer):
    """Step by the sign of the gradient; torch has no such class."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.sub_(p.grad.sign(), alpha=group["lr"])
                    self.state[p]["before"] = p.grad.clone()  # another tensor each time


def test_an_optimizer_that_torch_does_not_have() -> None:
    ours, theirs = small(), small()
    flat = Flat(ours, Sign, lr=0.1)
    steps(ours, flat, range(5))
    steps(theirs, Sign(theirs.parameters(), lr=0.1), range(5))
    assert_equal(ours, theirs)
    assert torch.equal(flat.state[ours[0].weight]["before"], ours[0].weight.grad)


@pytest.mark.parametrize(
    ("optimizer", "options", "reason"),
    [
        (optim.LBFGS, {}, "LBFGS"),
        (optim.Muon, {}, "Muon does not run on flat tensors"),
        (optim.Adafactor, {}, "Adafactor changes a number by what other numbers"),
        (Trust, {"lr": 0.1}, "Trust changes a number by what other numbers"),
        (optim.SparseAdam, {}, "SparseAdam"),
        (optim.Adam, {"differentiable": True}, "differentiable"),
        (optim.Adam, {"lr": -1.0}, "Adam says: Invalid learning rate"),
        (optim.Adam, {"rate": 1.0}, "Adam says: .*unexpected keyword argument"),
        (optim.Adam, {"ema": 1.5}, "ema = 1.5 is not"),
        (optim.Adam, {"clip": 0.0}, "clip = 0.0 is not positive"),
        ("adam", {}, "'adam' is not a class of torch.optim"),
    ],
)
def test_refused_optimizers(optimizer: Any, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=f"^Flat: .*{reason}[^\n]*$"):
        Flat(nn.Linear(3, 2), optimizer, **options)


def test_refused_parameters() -> None:
    for model, reason in (
        (nn.Linear(3, 2, device="meta"), "weight is on the meta device"),
        (nn.LazyLinear(3), "weight is lazy"),
        (nn.Linear(3, 2, dtype=torch.complex64), "weight is torch.strided, torch.complex64"),
        (nn.ReLU(), "Adam says: optimizer got an empty parameter list"),
    ):
        with pytest.raises(UserError, match=f"^Flat: {reason}[^\n]*$"):
            Flat(model, optim.Adam)
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(UserError, match="some parameters appear in more than one"):
        Flat([{"params": [p]}, {"params": [p]}], optim.Adam)
    embedding = nn.Embedding(5, 3, sparse=True)
    flat = Flat(embedding, optim.SGD)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UserError, match=r"gradient of weight is sparse.*SparseAdam"):
        flat.step()


def test_what_moves_the_parameters_is_an_error() -> None:
    model = small()
    flat = Flat(model, optim.Adam)
    with pytest.raises(UserError, match="cannot be copied or pickled"):
        copy.deepcopy(flat)
    alone = copy.deepcopy(model)  # a model with parameters of its own
    backward(alone, 0)
    assert all(p.grad is None for p in model.parameters())
    second = Flat(model, optim.Adam)
    backward(model, 0)
    with pytest.raises(RuntimeError, match=r"0.weight: it does not lie in the buffer .* another Flat took it over"):
        flat.step()
    second.step()
    nn.utils.parametrizations.weight_norm(model[2])
    with pytest.raises(RuntimeError, match=r"2.weight: the model has another parameter in its place"):
        second.step()
    nn.utils.parametrize.remove_parametrizations(model[2], "weight")
    second = Flat(model, optim.Adam)
    model.float()
    with pytest.raises(RuntimeError, match="the model was moved, to a device or dtype"):
        second.step()


@pytest.mark.parametrize("optimizer", [optim.Adam, optim.Adagrad])
def test_an_average_begins_with_the_weights_that_all_ranks_have(optimizer: type[optim.Optimizer]) -> None:
    model = small()
    flat = Flat(model, optimizer, ema=0.5)
    with torch.no_grad():
        model[0].weight.fill_(2.0)  # rank zero's
    flat.own([buffer.own for buffer in flat.buffers])
    assert flat.averaged_state_dict(model)["0.weight"].eq(2).all()
    steps(model, flat, range(1))
    before = flat.averaged_state_dict(model)
    flat.own([buffer.own for buffer in flat.buffers])
    assert torch.equal(flat.averaged_state_dict(model)["0.weight"], before["0.weight"])


class Halves:
    """Two ranks in one process, as threads: what a reducer of sharded buffers does."""

    def __init__(self, flats: list[Flat], rank: int, meeting: threading.Barrier, table: dict[int, Any]) -> None:
        self.flats, self.rank, self.meeting, self.table = flats, rank, meeting, table

    def _both(self, mine: Any) -> list[Any]:
        self.table[self.rank] = mine
        self.meeting.wait()
        found = [self.table[0], self.table[1]]
        self.meeting.wait()
        return found

    def finish(self) -> None:
        """Both have the same gradient already."""

    def begin(self) -> None:
        for number, buffer in enumerate(self.flats[self.rank].buffers):
            with torch.no_grad():
                buffer.weights.copy_(self.all_gather(number, buffer.owned(buffer.weights)))

    def all_gather(self, number: int, compact: Tensor) -> Tensor:
        whole = torch.empty(self.flats[self.rank].buffers[number].layout.size, dtype=compact.dtype)
        for flat, part in zip(self.flats, self._both(compact.clone())):
            at = 0
            for where in flat.buffers[number].own:
                whole[where] = part[at : at + where.stop - where.start]
                at += where.stop - where.start
        return whole

    def sum(self, x: Tensor) -> Tensor:
        return sum(self._both(x.clone()), torch.zeros_like(x))


@pytest.mark.parametrize(("optimizer", "options"), [CLASSES[1], CLASSES[7], CLASSES[11]])
def test_ranks_share_the_state_out(optimizer: type[optim.Optimizer], options: dict[str, Any]) -> None:
    models, alone = [small(), small()], small()
    flats = [Flat(model, optimizer, ema=0.9, clip=0.1, **options) for model in models]
    own = Flat(alone, optimizer, ema=0.9, clip=0.1, **options)
    table: dict[int, Any] = {}
    meeting = threading.Barrier(2, timeout=60)
    size = flats[0].buffers[0].layout.size
    cuts = [0, 64, size // 64 * 16, size // 64 * 48, size]  # inside parameters, too
    states: dict[int, Any] = {}

    def work(rank: int) -> None:
        flat = flats[rank]
        flat.reducer = Halves(flats, rank, meeting, table)
        flat.own([[slice(a, b) for a, b in list(pairwise(cuts))[rank::2]]])
        steps(models[rank], flat, range(5))
        states[rank] = copy.deepcopy(flat.state_dict()), flat.averaged_state_dict(models[rank])
        flat.load_state_dict(states[rank][0])
        steps(models[rank], flat, range(5, 7))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    steps(alone, own, range(5))
    for thread in threads:
        thread.join()
    whole, averaged = own.state_dict(), own.averaged_state_dict(alone)
    kept = sum(len(flat.buffers[0].moments[key]) for flat in flats for key in flat.buffers[0].moments)
    assert kept == size * len(own.buffers[0].moments)
    for state, average in states.values():
        assert state["param_groups"] == whole["param_groups"]
        for i, values in whole["state"].items():
            torch.testing.assert_close(state["state"][i], values, check_dtype=False)
        torch.testing.assert_close(average, averaged)
    steps(alone, own, range(5, 7))
    for model in models:
        assert_equal(alone, model)


def test_torch_distributed_checkpoint(tmp_path: Path) -> None:
    a, b = small(torch.float32), small(torch.float32, seed=2)
    first, second = Flat(a, optim.Adam), Flat(b, optim.Adam)
    steps(a, first, range(5))
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        dcp.save(dict(zip(("model", "optimizer"), get_state_dict(a, first))), checkpoint_id=tmp_path)
        state = dict(zip(("model", "optimizer"), get_state_dict(b, second)))
        dcp.load(state, checkpoint_id=tmp_path)
    set_state_dict(b, second, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    steps(a, first, range(5, 9))
    steps(b, second, range(5, 9))
    assert_equal(a, b, rtol=1e-6)


def test_fully_shard_is_refused_before_and_after() -> None:
    def ours(rank: int = 0) -> None:
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Linear(7, 3)
        before = Flat(model, optim.Adam)
        fully_shard(model, mesh=mesh)
        with pytest.raises(UserError, match=r"weight is a DTensor, as fully_shard.* warpfold.Replicas\(shard=True\)"):
            Flat(model, optim.Adam)
        model(torch.ones(2, 7)).sum().backward()
        with pytest.raises(RuntimeError, match=r"weight: the model has another parameter .*fully_shard"):
            before.step()

    run_ranks(ours, 1)
