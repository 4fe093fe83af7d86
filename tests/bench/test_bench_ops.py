"""The bench of operations: shapes, implementations (other packages as documented stubs), clocks and files."""

import csv
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.bench import ops as bench_ops
from warpfold.bench import peers
from warpfold.bench.ops import COLUMNS, STYLES, bench, picture, table, write_csv
from warpfold.bench.peers import WAYS, too_large
from warpfold.bench.timing import Subject, measure
from warpfold.check.cases import OPS, PROFILES, inputs
from warpfold.check.checks import truth
from warpfold.check.op_profile import OpCase, OpInputs
from warpfold.check.sizes import shapes
from warpfold.cost.memory import most_allocated
from warpfold.errors import UserError
from warpfold.ops.attention import attention

CPU = torch.device("cpu")
SMALL = ["row:3x16", "column:5x7", "global:9x4", "starting:12", "ending:12"]


def found(shape: str, dtype: torch.dtype = torch.float32) -> OpInputs:
    ((_, case),) = shapes("attention", [shape])
    return inputs(case, dtype, CPU)


# ---- shapes


def test_shapes_of_their_names() -> None:
    named = dict(shapes("attention", ["row:128x256", "ending:64"]))
    row, ending = named["row:128x256"], named["ending:64"]
    assert (row.rows, row.length, row.heads, row.width, row.bias) == (128, 256, 8, 32, True)
    assert (ending.rows, ending.length, ending.heads, ending.transposed) == (64, 64, 4, True)
    assert [name for name, _ in shapes("attention", ["starting"])] == [
        f"starting:{n}" for n in PROFILES["attention"].kinds["starting"]
    ]
    assert len(shapes("attention", quick=True)) == 5
    assert {name.partition(":")[0] for name, _ in shapes("tail")} == {"pair", "msa", "dropout"}
    # This kind belongs to another operation.
    assert shapes("tail", ["starting"]) == []


# ---- implementations


@pytest.mark.parametrize("shape", SMALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_computes_the_same(shape: str, dtype: torch.dtype) -> None:
    given = found(shape, dtype)
    true = truth(OPS[given.case.op].definition, given.args, given.grad, given.names)
    for way in WAYS["attention"]:
        if way.name == "compile" or way.unsupported_reason(given) is not None:
            continue
        subject = way.make(given)
        out = subject.forward()
        assert out.shape == given.grad.shape, way.name
        gradients = torch.autograd.grad(out, subject.wanted, subject.grad)
        assert [str(e) for e in true.errors([out, *gradients]) if e.red] == [], way.name


def stand_in(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
    """Compute attention on [..., heads, n, d], as other packages do; keys with hidden = True are ignored."""
    logits = q @ k.mT * q.shape[-1] ** -0.5
    logits = logits if bias is None else logits + bias
    return (logits if hidden is None else logits.masked_fill(hidden, -1e9)).softmax(-1) @ v


def trifast(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """q [h, n, n, d], bias [h, n, n], mask [n, n] with True for hidden keys (from trifast's tests and README)."""
    assert bias.dim() == 3
    return stand_in(q, k, v, bias[:, None], mask[None, :, None, :])


def cuequivariance(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """q [B, N, H, Q, D], bias [B, 1, H, Q, K], mask [B, N, 1, 1, K] with True for visible keys (documentation)."""
    assert bias.shape[1] == 1
    assert mask.shape[2:4] == (1, 1)
    return stand_in(q, k, v, bias, ~mask)


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [batch, n, heads, d] (from its interface)."""
    return stand_in(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)


@pytest.mark.parametrize(
    ("name", "shape", "package", "back"),
    [
        ("trifast", "starting:12", SimpleNamespace(triangle_attention=trifast), lambda t: t.movedim(0, -2)),
        ("trifast", "ending:12", SimpleNamespace(triangle_attention=trifast), lambda t: t.movedim(0, -2)),
        (
            "cuequivariance",
            "row:3x16",
            SimpleNamespace(triangle_attention=cuequivariance),
            lambda t: t[0].transpose(-2, -3),
        ),
        ("flash-attn", "column:5x7", SimpleNamespace(flash_attn_func=flash), lambda t: t),
    ],
)
def test_others_get_what_they_document(
    monkeypatch: pytest.MonkeyPatch, name: str, shape: str, package: object, back: object
) -> None:
    """With our arguments, other packages (stubs of their documented signatures) compute our result."""
    given = found(shape)
    keys = given.args[3]
    assert keys is not None
    # One key of one row is hidden, except for flash-attn, which takes no mask.
    keys[0, 0] = 0
    if name == "flash-attn":
        keys[0, 0] = 1
    monkeypatch.setattr(peers.importlib, "import_module", lambda _: package)
    subject = next(way for way in WAYS["attention"] if way.name == name).make(given)
    out = subject.forward()
    torch.testing.assert_close(back(out), attention.definition(*given.args))  # type: ignore[operator]
    ours = torch.autograd.grad(attention.definition(*given.args), given.wanted, given.grad)
    theirs = torch.autograd.grad(out, subject.wanted, subject.grad)
    assert len(theirs) == len(ours)
    assert sum(float(t.square().sum()) for t in theirs) == pytest.approx(sum(float(t.square().sum()) for t in ours))


def triangle_multiplicative_update(
    x: Tensor, direction: str, mask: Tensor | None = None, eps: float = 1e-5, **weights: Tensor
) -> Tensor:
    """x [B, N, N, C], mask [B, N, N], p_in and g_in [2 D, C], p_out [C, D], g_out [C, C] (from its documentation)."""

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}_weight"], weights[f"{name}_bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}_weight"], weights[f"{name}_bias"], eps)

    assert mask is not None
    n = norm(x, "norm_in")
    a, b = (linear(n, "p_in") * linear(n, "g_in").sigmoid() * mask[..., None]).chunk(2, -1)
    product = torch.einsum("bikc,bjkc->bijc" if direction == "outgoing" else "bkic,bkjc->bijc", a, b)
    return linear(norm(product, "norm_out"), "p_out") * linear(n, "g_out").sigmoid()


@pytest.mark.parametrize("kind", ["outgoing", "incoming"])
def test_another_triangle_product_gets_what_it_documents(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Another package's triangle product computes our update, without dropout and the residual."""
    ((_, case),) = shapes("triangle_multiplication", [f"{kind}:12"])
    given = inputs(replace(case, dropped=False, drawn=False), torch.float32, torch.device("cpu"))
    package = SimpleNamespace(triangle_multiplicative_update=triangle_multiplicative_update)
    monkeypatch.setattr(peers.importlib, "import_module", lambda _: package)
    subject = next(way for way in WAYS["triangle_multiplication"] if way.name == "cuequivariance").make(given)
    expected = OPS["triangle_multiplication"].definition(*given.args, residual=False)
    torch.testing.assert_close(subject.forward()[0], expected)
    ours = torch.autograd.grad(expected, given.wanted, given.grad)
    theirs = torch.autograd.grad(subject.forward(), subject.wanted, subject.grad)
    assert sum(float(t.square().sum()) for t in theirs) == pytest.approx(sum(float(t.square().sum()) for t in ours))


def test_others_are_left_alone_where_they_cannot_run() -> None:
    reasons = {way.name: way.unsupported_reason(found("starting:12")) for way in WAYS["attention"]}
    assert reasons["trifast"] == reasons["cuequivariance"] == "for GPUs only"
    assert reasons["flash-attn"] == "takes no bias"
    assert reasons["definition"] is reasons["ours"] is None


def test_what_would_not_fit_is_not_tried() -> None:
    small = found("starting:12")
    huge = OpCase(op="attention", where="", rows=2**15, length=2**15, heads=4, width=32)
    definition, ours = WAYS["attention"][0], WAYS["attention"][-1]
    assert too_large(definition, small) is None
    said = too_large(definition, OpInputs(huge, small.args, small.names, small.grad))
    assert said is not None
    assert "GiB" in said
    assert too_large(ours, OpInputs(huge, small.args, small.names, small.grad)) is None


# ---- clocks


def subject(name: str, forward: object) -> Subject:
    x = torch.ones(4, requires_grad=True)
    return Subject(name, lambda: forward(x), [x], torch.ones(4))  # type: ignore[operator]


def test_a_slow_way_is_timed_less_and_a_broken_one_not() -> None:
    def broken(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB\nmore")

    def wrong(x: Tensor) -> Tensor:
        raise RuntimeError("no kernel image\nfor this device")

    # On a busy machine, the actual pauses are longer than 0.02 s.
    slept: list[float] = []

    def sleeping(x: Tensor) -> Tensor:
        began = time.perf_counter()
        time.sleep(0.02)
        slept.append(time.perf_counter() - began)
        return x * 1

    slow = subject("slow", sleeping)
    ways = [slow, subject("broken", broken), subject("wrong", wrong)]
    times = measure(ways, CPU, repeats=9, budget=0.1, peaks=False)
    assert 1 <= len(times["slow"].seconds["forward"]) < 4
    median = times["slow"].median("forward")
    assert median is not None
    assert min(slept) <= median < 10 * max(slept)
    assert times["broken"].failed == "out of memory"
    assert times["wrong"].failed == "failed: RuntimeError: no kernel image"
    assert times["broken"].median("forward") is None


def test_peaks_are_what_torch_held() -> None:
    def several() -> None:
        a = torch.empty(1024, 1024)
        b = torch.empty(1024, 1024)
        del a
        c = torch.empty(1024, 1024)
        del b, c

    assert most_allocated(several) == 2 * 4 * 1024**2
    assert most_allocated(lambda: None) == 0
    # Modes do not see the operations inside registered operations, but they do see their memory.
    given = found("starting:12")
    assert most_allocated(WAYS["attention"][-1].make(given).forward) >= given.grad.numel() * 4
    times = measure([subject("x", lambda x: x * 2)], CPU, repeats=1)["x"]
    # The result, and a scalar of torch
    assert 16 <= times.peaks["forward"] < 64


# ---- complete runs


@pytest.fixture(scope="module")
def result() -> dict[str, object]:
    return bench(
        ["attention", "gate"], CPU, ["fp32"], ["starting:12", "row:3x16", "pair:8"], repeats=2,
        ways=["definition", "sdpa", "trifast", "ours"],
    )  # fmt: skip


def test_rows_hold_both_passes_of_every_way(result: dict[str, object]) -> None:
    rows = result["rows"]
    assert isinstance(rows, list)
    measured = {(r["op"], r["shape"], r["way"], r["pass"]) for r in rows if "ms" in r}
    for op, shape in (("attention", "starting:12"), ("attention", "row:3x16"), ("gate", "pair:8")):
        for way in ("definition", "ours", *(["sdpa"] if op == "attention" else [])):
            assert {(op, shape, way, "forward"), (op, shape, way, "backward")} <= measured
    assert {r["note"] for r in rows if r["way"] == "trifast"} <= {"for GPUs only", "for triangles only"}
    plain = next(r for r in rows if r["way"] == "definition")
    assert plain["times_definition"] == 1
    assert plain["share_of_limit"] == pytest.approx(plain["limit_ms"] / plain["ms"])
    assert plain["peak_mib"] > 0
    assert {"torch", "device"} <= set(result["machine"])  # type: ignore[arg-type]
    heads, lines = table(rows)
    assert {len(line) for line in lines} == {len(heads)}
    json.dumps(result, allow_nan=False)


def test_files_of_it(result: dict[str, object], tmp_path: Path) -> None:
    write_csv(result, tmp_path / "figures.csv")
    with (tmp_path / "figures.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(result["rows"])  # type: ignore[arg-type]
    assert set(COLUMNS) < set(lines[0])
    assert lines[0]["machine"].startswith("device ")
    assert float(lines[0]["ms"]) > 0
    picture(result, tmp_path / "figures.png")
    assert (tmp_path / "figures.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(UserError, match="unknown format"):
        picture(result, tmp_path / "figures.xyz")
    with pytest.raises(UserError, match="nothing was measured"):
        picture({**result, "rows": []}, tmp_path / "none.png")


def test_every_way_has_a_colour_and_a_marker_of_its_own() -> None:
    assert {way.name for ways in WAYS.values() for way in ways} == set(STYLES)
    assert (
        len({colour for colour, _ in STYLES.values()}) == len({marker for _, marker in STYLES.values()}) == len(STYLES)
    )


def test_what_is_too_large_is_named_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench_ops.MAX_LOGITS, "cpu", 4 * 12**3)
    left = bench(["attention"], CPU, ["fp32"], ["starting", "starting:12"], repeats=1, ways=["ours"])["left_out"]
    assert left == [f"attention starting:{n}" for n in PROFILES["attention"].kinds["starting"]]
    # This shape is larger than the limit, but was requested.
    named = bench(["attention"], CPU, ["fp32"], ["starting:16"], repeats=1, ways=["ours"])
    assert named["left_out"] == []
    assert {row["shape"] for row in named["rows"]} == {"starting:16"}
