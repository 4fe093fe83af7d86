"""accelerate: the layers that it swaps and leaves, the models that it refuses, and that a model is preserved."""

import copy
import importlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize

import warpfold
from tests.adapt import stand_in
from tests.adapt.stand_in import KNOWN, ServesAttention, ServesMlp, TheirMlp, TheirModel, inputs
from warpfold.adapt import accelerate as subject
from warpfold.adapt.adapter import RandomInputs, is_swapped
from warpfold.adapt.report import Acceleration, LayerKind, LayerSpeed
from warpfold.adapt.verify import brief_speed, compare
from warpfold.bench.timing import Subject, Times
from warpfold.errors import UserError
from warpfold.ops.dispatch import refusals


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "adapters", lambda: KNOWN)
    monkeypatch.setattr(subject, "keep_memory", lambda: None)


@pytest.fixture
def model() -> TheirModel:
    torch.manual_seed(0)
    return TheirModel()


def gradients(model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Compute the output and the gradients of the trainable parameters."""
    x, mask = inputs(dtype=dtype)
    y = model(x, mask)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {"output": y, **dict(zip(named, torch.autograd.grad(y.square().sum(), list(named.values()))))}


def assert_near(a: dict[str, Tensor], b: dict[str, Tensor], most: float = 1e-5) -> None:
    assert list(a) == list(b)
    for name, x in a.items():
        assert x.dtype == b[name].dtype
        apart, scale = (x - b[name]).abs().max(), x.abs().max()
        assert apart <= most * scale, (name, float(apart / scale))


# ---- a model is preserved


def test_layers_compute_by_ours_and_the_model_stays_what_it_was(model: TheirModel) -> None:
    want, keys, kinds = gradients(model), list(model.state_dict()), [type(m) for m in model.modules()]
    hooked: list[Any] = []
    model.blocks[0].mlp.register_forward_hook(lambda *of: hooked.append(of))
    assert warpfold.accelerate(model) is model
    assert_near(gradients(model), want)
    assert len(hooked) == 1  # once, not by the comparison
    assert list(model.state_dict()) == keys
    assert all(isinstance(m, kind) for m, kind in zip(model.modules(), kinds))
    assert [kind.operation for kind in warpfold.acceleration(model).swapped] == [
        "triangle_multiplication",
        "gated_attention",
        "transition",
    ]
    warpfold.restore(model)
    assert [type(m) for m in model.modules()] == kinds
    assert not any(name.startswith("_warpfold") for m in model.modules() for name in vars(m))
    assert all(torch.equal(a, b) for a, b in zip(gradients(model).values(), want.values()))


@pytest.mark.parametrize(("flags", "is_slow"), [("fma avx2", True), ("avx512_bf16 avx512_fp16", False)])
def test_a_model_in_16_bits_on_a_cpu_that_lacks_them_is_said_once_with_the_cure(
    model: TheirModel, flags: str, is_slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: {flags}\n")
    monkeypatch.setattr("warpfold.device.Path", lambda _: tmp_path / "cpuinfo")
    warpfold.accelerate(model.bfloat16(), verify=False)
    said = capsys.readouterr().out
    assert said.count("bf16 is many times slower than fp32 on this CPU") == is_slow
    assert ("model.float()" in said) == is_slow
    assert "fp16 is" not in said


def test_copies_and_pickles_compute_by_ours_with_parameters_of_their_own(model: TheirModel) -> None:
    pickle = importlib.import_module("pickle")  # users do; we never load one
    x, mask = inputs()
    warpfold.accelerate(model)
    y = model(x, mask)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert is_swapped(other.blocks[0].mlp)
        assert torch.equal(other(x, mask), y)
        with torch.no_grad():
            other.blocks[0].mlp.down.weight.mul_(2)
        assert not torch.equal(other(x, mask), y)
        assert torch.equal(model(x, mask), y)
        warpfold.restore(other)


def test_parameters_may_be_cast_loaded_frozen_shared_and_replaced(model: TheirModel) -> None:
    plain = copy.deepcopy(model)
    warpfold.accelerate(model)
    torch.manual_seed(1)
    loaded = TheirModel().state_dict()
    for one in (model, plain):
        one.load_state_dict(loaded)
        one.blocks[1].mlp.up.weight = one.blocks[0].mlp.up.weight  # tied
        one.blocks[0].attention.q.weight = nn.Parameter(one.blocks[0].attention.q.weight * 2)
        one.blocks[1].attention.requires_grad_(False)
        one.double()
    assert_near(gradients(model, torch.float64), gradients(plain, torch.float64), 1e-12)
    assert all(p.grad is None for p in model.blocks[1].attention.parameters())


def test_a_module_that_is_there_twice_is_one_layer(model: TheirModel) -> None:
    model.blocks[1].mlp = model.blocks[0].mlp
    want = gradients(model)
    warpfold.accelerate(model)
    assert_near(gradients(model), want)
    assert sum(len(kind.names) for kind in warpfold.acceleration(model).swapped) == 5


def test_autocast_gives_the_dtypes_of_their_own_code(model: TheirModel) -> None:
    """Autocast is on during the comparison or comes later. Both round to bf16 in different places, by 2^-8 each."""
    x, mask = inputs()
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        want = plain(x, mask)
        warpfold.accelerate(model, only="transition")
        got = model(x, mask)
    assert got.dtype == want.dtype == torch.bfloat16
    assert (got - want).abs().max() <= 2**-5 * want.abs().max()


def test_torch_compiles_what_was_swapped(model: TheirModel) -> None:
    mlp, x = warpfold.accelerate(model).blocks[0].mlp, torch.randn(2, 16)
    torch._dynamo.reset()
    assert (torch.compile(mlp, backend="eager", fullgraph=True)(x) - mlp(x)).abs().max() < 1e-6


def test_what_hooks_on_the_parts_of_a_layer_is_called(model: TheirModel) -> None:
    """With a hook on a submodule, or a replaced or parametrised one, the module's own code computes."""
    x, mask = inputs()
    warpfold.accelerate(model)
    before, y = refusals(), model(x, mask)
    seen: list[Any] = []
    handle = model.blocks[0].mlp.up.register_forward_hook(lambda *of: seen.append(of))
    assert torch.allclose(model(x, mask), y, atol=1e-5)
    assert len(seen) == 1
    handle.remove()
    old = model.blocks[0].mlp.up
    model.blocks[0].mlp.up = nn.Sequential(old, _Doubled())
    doubled = model(x, mask)
    assert not torch.allclose(doubled, y, atol=1e-5)
    model.blocks[0].mlp.up = nn.Linear(16, 64)  # swapped again, with its own parameters
    model.blocks[0].mlp.up.load_state_dict({name: 2 * p for name, p in old.state_dict().items()})
    counted = refusals(before)
    assert torch.allclose(model(x, mask), doubled, atol=1e-5)
    assert refusals(before) == counted
    parametrize.register_parametrization(old, "weight", _Doubled())
    model.blocks[0].mlp.up = old
    with torch.no_grad():
        old.bias.mul_(2)
    assert torch.allclose(model(x, mask), doubled, atol=1e-5)
    assert sum("TheirMlp" in name for name in refusals(before)) == 3


class _Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


# ---- swapped layers


def test_only_names_modules_and_operations(model: TheirModel) -> None:
    def swapped(only: Any) -> set[str]:
        other = warpfold.accelerate(copy.deepcopy(model), only=only)
        return {name for kind in warpfold.acceleration(other).swapped for name in kind.names}

    assert swapped("transition") == {"blocks.0.mlp", "blocks.1.mlp"}
    assert swapped("blocks.1") == swapped("blocks.1.*") == {f"blocks.1.{n}" for n in ("product", "attention", "mlp")}
    assert swapped(["blocks.?.mlp", "blocks.0.product"]) == {"blocks.0.mlp", "blocks.1.mlp", "blocks.0.product"}


def test_a_layer_that_does_not_agree_is_left(model: TheirModel, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(ServesMlp):
        def forward(self, layer: Any, x: Tensor) -> Tensor:
            return 1.01 * super().forward(layer, x)

    class Cast(ServesMlp):
        def forward(self, layer: Any, x: Tensor) -> Tensor:
            return super().forward(layer, x).double()

    for wrong, why in ((Wrong, "differs by 0.0"), (Cast, "dtype of the output")):
        monkeypatch.setattr(subject, "adapters", lambda wrong=wrong: {**KNOWN, wrong.serves[0]: wrong()})
        other = warpfold.accelerate(copy.deepcopy(model))
        left = [kind for kind in warpfold.acceleration(other).left if kind.class_name == "TheirMlp"]
        assert [why in kind.why for kind in left] == [True]
        with pytest.raises(UserError, match=r"blocks.0.mlp .* cannot be swapped: differs"):
            warpfold.accelerate(copy.deepcopy(model), strict=True)


def test_comparison_redraws_what_is_zero() -> None:
    """A layer whose last projection is zero would agree with anything."""

    class Forgets(ServesMlp):
        def forward(self, layer: Any, x: Tensor) -> Tensor:
            return super().forward(layer, 0 * x)

    module = TheirMlp(8)
    nn.init.zeros_(module.down.weight)
    nn.init.zeros_(module.down.bias)
    assert not compare(module, Forgets()).agrees
    assert compare(module, ServesMlp()).agrees
    assert not module.down.weight.any()
    assert module.training


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_frozen_model_is_compared_where_gradients_are_off(model: TheirModel, mode: Callable[[], Any]) -> None:
    model.requires_grad_(False).eval()
    with mode():
        warpfold.accelerate(model)
    assert not any(p.requires_grad for p in model.parameters())


def test_speed_decides_where_it_is_asked_to(model: TheirModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(module: nn.Module, adapter: Any, size: int | None) -> LayerSpeed:
        assert size == 5
        return LayerSpeed(0.9, 1.5, 0.5) if isinstance(adapter, ServesMlp) else LayerSpeed(1.7, 1.5, 0.4)

    monkeypatch.setattr(subject, "measured_speed", measured)
    report = warpfold.acceleration(warpfold.accelerate(model, verify="speed", size=5))
    assert {kind.class_name for kind in report.swapped} == {"TheirAttention", "TheirProduct"}
    assert str(report).splitlines()[1].endswith("1.70x faster  1.50x faster  0.40")
    text = " ".join(str(report).split())
    assert "slower here: forward 1.11x slower, forward and backward together 1.50x faster, with 0.50 of the" in text


@pytest.mark.parametrize(
    ("change", "swapped"),
    [
        (lambda model: model.train(), False),
        (lambda model: model.eval(), True),
        (lambda model: model.train().requires_grad_(False), True),
    ],
)
def test_a_model_that_is_not_trained_is_judged_by_its_forward_pass(
    change: Callable[[nn.Module], nn.Module], swapped: bool, model: TheirModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "brief_speed", lambda *_: LayerSpeed(2.7, 0.8, None))
    report = warpfold.acceleration(warpfold.accelerate(change(model)))
    text = " ".join(str(report).split())
    assert bool(report.swapped) == swapped
    assert ("judged by the forward pass" in text) == swapped
    assert ("forward 2.70x faster, forward and backward together 1.25x slower" in text) != swapped


SLOW, CLOSE, FAST = 1.2, 0.95, 0.5  # seconds of ours; their own code takes 1


@pytest.mark.parametrize(
    ("at_64", "at_128", "timed", "swapped"),
    [
        (FAST, SLOW, [64], True),  # clear from the brief timing
        (CLOSE, FAST, [64, 128], True),
        (SLOW, CLOSE, [64, 128], True),  # the longer timing decides
        (CLOSE, SLOW, [64, 128], False),
        (SLOW, SLOW, [64, 128], False),
    ],
)
def test_what_is_slower_is_left_unless_something_else_is_asked_for(
    at_64: float, at_128: float, timed: list[int], swapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def clock(ways: list[Subject], *_: Any) -> dict[str, Times]:
        sizes.append(ways[0].grad[0].shape[1])
        ours = {64: at_64, 128: at_128}[sizes[-1]]
        return {
            way.name: Times(
                {part: [1.0 if way.name == "theirs" else ours] for part in ("forward", "training", "backward")}
            )
            for way in ways
        }

    monkeypatch.setattr(subject, "brief_speed", brief_speed)
    monkeypatch.setattr("warpfold.adapt.verify.measure", clock)
    model = TheirMlp(8)
    report = warpfold.acceleration(warpfold.accelerate(model))  # leaving everything is no error
    assert (sizes, is_swapped(model)) == (timed, swapped)
    assert ("slower here: forward 1.20x slower" in str(report)) != swapped
    assert ("verify=True swaps it, too" in " ".join(str(report).split())) != swapped  # regardless of line breaks
    warpfold.restore(model)
    options: list[dict[str, Any]] = [{"verify": True}, {"only": "transition"}, {"strict": True}, {"memory": "1 GB"}]
    for asked in options:
        report = warpfold.acceleration(warpfold.accelerate(model, **asked))
        assert is_swapped(model)
        assert ("not timed" in str(report)) == ("verify" not in asked)
        warpfold.restore(model)
    assert sizes == timed


def test_what_cannot_be_timed_is_swapped_and_said(model: TheirModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def clock(ways: list[Subject], *_: Any) -> dict[str, Times]:
        return {way.name: Times(failed="out of memory") for way in ways}

    with monkeypatch.context() as patched:
        patched.setattr(subject, "brief_speed", brief_speed)
        patched.setattr("warpfold.adapt.verify.measure", clock)
        report = warpfold.acceleration(warpfold.accelerate(model))
        assert len(report.swapped) == 3
        assert "memory did not suffice to time it" in " ".join(str(report).split())
        warpfold.restore(model)
        with pytest.raises(RuntimeError, match="out of memory"):
            warpfold.accelerate(model, verify="speed")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)  # two processes disturb each other's timing
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    report = warpfold.acceleration(warpfold.accelerate(model))
    assert len(report.swapped) == 3
    assert "not timed" in str(report)


# ---- refused models and arguments


def strict(model: nn.Module) -> nn.Module:
    return warpfold.accelerate(model, strict=True)


def test_strict_makes_refusals_errors(model: TheirModel) -> None:
    x, mask = inputs()
    attention = warpfold.accelerate(model).blocks[0].attention
    attention(torch.randn(1, 9, 9, 16))  # without a mask, their own code computes
    warpfold.restore(model)
    strict(model)
    model(x, mask)
    with pytest.raises(UserError, match="TheirAttention: no mask; without strict"):
        attention(torch.randn(1, 9, 9, 16))


class Renamed(stand_in.TheirMlp):
    """A newer version whose forward has other arguments."""


def _with(change: Callable[[TheirModel], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = TheirModel()
        changed = change(model)
        return changed if isinstance(changed, nn.Module) else model

    return make


def _quantised(model: TheirModel) -> None:
    model.head.weight = nn.Parameter(torch.zeros(5, 16, dtype=torch.int8), requires_grad=False)


REFUSED = {
    "no model": (lambda: 3, "a int is no torch.nn.Module"),
    "nothing known": (lambda: nn.Linear(2, 2), "nothing to swap in this Linear: no layer of torch that is known"),
    "no parameters": (lambda: nn.ReLU(), "nothing to swap in this ReLU"),
    "compiled": (lambda: torch.compile(TheirModel()), "is compiled; accelerate the model first"),
    "compiled inside": (_with(lambda m: m.blocks[0].compile()), "blocks.0 is compiled"),
    "scripted": (lambda: torch.jit.script(nn.Linear(2, 2)), "is scripted"),
    "traced": (lambda: torch.fx.symbolic_trace(nn.Linear(2, 2)), "is a traced graph"),
    "quantised": (_with(_quantised), "head.weight is torch.int8: a quantised model"),
    "twice": (lambda: warpfold.accelerate(TheirModel()), "accelerated already; warpfold.restore"),
    "complex": (_with(lambda m: m.to(torch.complex64)), "is torch.complex64"),
    "meta": (_with(lambda m: m.to("meta")), "has no memory"),
    "lazy": (lambda: nn.Sequential(TheirModel(), nn.LazyLinear(3)), "has no shape yet"),
    "in DataParallel": (lambda: nn.DataParallel(TheirModel()), "wrapped in DataParallel"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:UserWarning")
def test_bad_models_are_refused_in_a_line(name: str) -> None:
    make, why = REFUSED[name]
    model: Any = make()
    before = [type(m) for m in model.modules()] if isinstance(model, nn.Module) else []
    with pytest.raises(UserError, match=why) as error:
        warpfold.accelerate(model)
    assert "\n" not in str(error.value)
    assert not before or [type(m) for m in model.modules()] == before


def test_bad_arguments_are_refused(model: TheirModel) -> None:
    for options, why in (
        ({"only": "trunk.*"}, "only='trunk.*' is neither the name of a layer that is known nor of"),
        ({"only": ["transition", "head"]}, "only='head' is neither"),
        ({"verify": "fast"}, "verify='fast': not True"),
        ({"memory": "24"}, "24: not an amount of memory"),
    ):
        with pytest.raises(UserError, match=why.replace("*", r"\*")):
            warpfold.accelerate(model, **options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="is not accelerated"):
        warpfold.restore(model)
    with pytest.raises(UserError, match="is not accelerated"):
        warpfold.acceleration(model)


def test_a_changed_class_is_left_and_says_why(model: TheirModel, monkeypatch: pytest.MonkeyPatch) -> None:
    class Newer(TheirMlp):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return scale * super().forward(x)

    class Older(ServesAttention):
        signature = "(self, x, mask=None)"

    class Parts(stand_in.ServesProduct):
        def build(self, module: Any) -> Any:
            return module.proj_in

    model.blocks[0].mlp = Newer(16)
    monkeypatch.setattr(subject, "adapters", lambda: {**KNOWN, **{a.serves[0]: a() for a in (Older, Parts)}})
    report = warpfold.acceleration(warpfold.accelerate(model))
    why = {kind.class_name: kind.why for kind in report.left}
    assert why["Newer"] == "Newer has a forward of its own"
    assert why["TheirAttention"] == (
        "its forward is (self, x, mask=None, chunk_size=None), and (self, x, mask=None) is known"
    )
    assert "no attribute 'proj_in'" in why["TheirProduct"]
    assert [kind.names for kind in report.swapped] == [("blocks.1.mlp",)]


def test_nothing_is_half_done_where_a_later_layer_fails(model: TheirModel, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(ServesMlp):
        made = 0

        def build(self, module: Any) -> Any:
            Fails.made += 1
            if Fails.made > 4:
                raise RuntimeError("a bug")
            return super().build(module)

    monkeypatch.setattr(subject, "adapters", lambda: {**KNOWN, Fails.serves[0]: Fails()})
    with pytest.raises(RuntimeError, match="a bug"):
        warpfold.accelerate(model)
    assert not any(is_swapped(m) for m in model.modules())


# ---- wrapped models


@pytest.fixture
def alone(tmp_path: Any) -> Iterator[None]:
    """Initialise a process group of one process."""
    if torch.distributed.is_initialized():
        pytest.skip("this process is one of others")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_within_distributed_data_parallel_layers_are_swapped(model: TheirModel, alone: None) -> None:
    want = gradients(model)
    wrapped = warpfold.accelerate(nn.parallel.DistributedDataParallel(model), only="blocks.0")
    assert {kind.class_name for kind in warpfold.acceleration(wrapped).swapped} == {
        "TheirProduct",
        "TheirAttention",
        "TheirMlp",
    }
    x, mask = inputs()
    wrapped(x, mask).square().sum().backward()
    got = {"output": model(x, mask), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}
    assert_near(got, want)
    warpfold.restore(wrapped)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module.*returned a view tensor")
def test_sharded_models_are_refused_and_may_be_sharded_after(model: TheirModel, alone: None) -> None:
    x, mask = inputs()
    want = model(x, mask)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    sharded = copy.deepcopy(model)
    fully_shard(sharded, mesh=mesh)
    with pytest.raises(UserError, match=r"is sharded \(FSDP\)"):
        warpfold.accelerate(sharded)
    warpfold.accelerate(model)
    for part in (model.blocks[0].mlp, model.blocks[1].mlp.up, model):  # a layer, a submodule, everything
        fully_shard(part, mesh=mesh)
    y = model(x, mask)
    assert (y - want).abs().max() < 1e-5
    y.sum().backward()
    with pytest.raises(UserError, match="was wrapped since it was swapped"):
        warpfold.restore(model)
    assert sum(is_swapped(m) for m in model.modules()) == 6


def test_long_verification_shows_progress(
    model: TheirModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = subject._checked

    def slow(*given: Any) -> LayerKind:
        time.sleep(0.3)
        return served(*given)

    warpfold.restore(warpfold.accelerate(model))
    assert "checking" not in capsys.readouterr().err
    monkeypatch.setattr(subject, "_checked", slow)
    monkeypatch.setattr(subject, "PROGRESS_SECONDS", 0.05)
    warpfold.accelerate(model)
    lines = capsys.readouterr().err.splitlines()
    assert any(re.fullmatch(r"accelerate: checking TheirMlp \(.*\), \d+ s so far", line) for line in lines)


class LucidTriangle(nn.Module):
    """IgFold's triangle product: five projections of the input and one back, with a norm before each."""

    def __init__(self, c: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.to_out_norm = nn.LayerNorm(c), nn.LayerNorm(hidden)
        for name in ("left_proj", "right_proj", "left_gate", "right_gate", "out_gate"):
            setattr(self, name, nn.Linear(c, hidden))
        self.to_out = nn.Linear(hidden, c)


class BiasedAttention(nn.Module):
    """Attention with q, k, v, gate and a pair bias."""

    def __init__(self, c: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(c)
        self.q, self.k, self.v, self.gate, self.out = (nn.Linear(c, c) for _ in range(5))
        self.bias = nn.Linear(c, heads)


class Perceptrons(nn.Module):
    """A layer with as many projections that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.a, self.b, self.c, self.d, self.e, self.f = (nn.Linear(8 + i, 8) for i in range(6))


def test_a_class_that_looks_like_a_known_layer_is_named_with_the_page_on_adapters() -> None:
    page = "has no adapter: docs/howto/accelerate.md (How to serve another class) shows how to write one"
    blocks = nn.ModuleList(LucidTriangle(8, hidden) for hidden in (8, 8))
    assert subject.lookalikes(blocks) == [f"LucidTriangle (*) looks like a triangle product and {page}"]
    assert "triangle product" in subject.lookalikes(LucidTriangle(8, 16))[0]
    (attention,) = subject.lookalikes(BiasedAttention(8, 2))
    assert attention.startswith("BiasedAttention ((the model)) looks like attention with a pair bias and")
    assert not subject.lookalikes(Perceptrons())
    with pytest.raises(UserError, match=r"nothing to swap.*; LucidTriangle .* looks like a triangle product"):
        warpfold.accelerate(LucidTriangle(8, 8))


def test_layers_that_are_served_are_no_lookalikes(model: TheirModel) -> None:
    assert not subject.lookalikes(model)


# ---- the report


def test_the_table_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    names = tuple(f"model.pairformer_stack.blocks.{i}.pair_stack.tri_att_starting_node.layer" for i in range(48))
    kinds = (
        LayerKind(names, "TriangleAttentionStartingNode", "triangle_multiplication", difference=3e-7, parameters=75,
                  speed=LayerSpeed(1.7, 1.52, 0.4)),
        LayerKind(names, "SelfAttention", why="its forward is (self, " + "x, " * 60 + "), and (self, x) is known"),
        *(LayerKind((f"head.{i}",), "Linear", why="no operation of ours") for i in range(90)),
    )  # fmt: skip
    for columns in (60, 80, 120, 300):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = str(Acceleration(kinds, 100, ("a note",)))
        assert max(map(len, text.splitlines())) <= min(max(columns, 80), 120)
        assert "48 T" in text
        assert "left, no operation of ours: 90 Linear" in text
        assert "75% of 100 parameters" in text
        assert len(text.splitlines()) < 12


def test_random_inputs_are_those_of_their_seed() -> None:
    like = torch.zeros(1, dtype=torch.bfloat16)
    a, b = (RandomInputs(like, 3) for _ in range(2))
    assert torch.equal(a(2, 3), b(2, 3))
    assert a.mask(4, 5)[:, 0].all()
