"""The precision of a plan: the modules that run in 16 bits or stay in fp32, and equal decrease of the loss."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import as_multimer, tiny_config
from tests.laws.test_plans import Work, example
from warpfold.batch import Batch
from warpfold.engine.optim import OptimConfig, Optimizer
from warpfold.model.alphafold import AlphaFold, HeadsConfig, ModelConfig
from warpfold.model.evoformer import EvoformerConfig, PairConfig
from warpfold.model.losses import LossConfig, total_loss
from warpfold.model.permutation import with_truth
from warpfold.model.structure import StructureConfig
from warpfold.model.template import TemplateConfig
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import DTYPES, Plan, Precision

HALF = (torch.bfloat16, torch.float16)
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_cdist_forward"}
# Never in 16 bits
EXACT = {"_softmax", "native_layer_norm", "rsqrt", "log", "exp", "_log_softmax"}
TRUNK = ("input", "recycling", "templates", "extra", "extra_stack", "evoformer", "single")
LOGITS = ("distogram", "masked_msa", "plddt", "resolved", "pae")
# Modules with projections in fp32 in spite of a 16-bit trunk, by name
ISLANDS: dict[Precision, set[str]] = {
    "bf16": {"structure", *LOGITS},
    "fp16": {"structure", *LOGITS},
    # In the structure module, the logits and points of its attention, which it computes itself; in each head, its
    # logits
    "bf16_all": {
        "structure",
        "distogram.half_logits", "masked_msa.logits", "plddt.logits", "resolved.logits", "pae.logits",
    },
}  # fmt: skip
HALVES: list[Precision] = ["bf16", "bf16_all", "fp16"]


class Dtypes(TorchDispatchMode):
    """Record the dtypes of products, and of operations that must be exact, in each module of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.within = [""]
        self.products: dict[str, set[torch.dtype]] = defaultdict(set)
        # Operations that must be exact, but returned 16 bits
        self.narrow: set[str] = set()
        self.handles = []
        for name, module in model.named_modules():
            self.handles.append(module.register_forward_pre_hook(lambda *_, name=name: self.within.append(name)))
            self.handles.append(module.register_forward_hook(self._leave))

    def _leave(self, *_: object) -> None:
        self.within.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple | list) else out
        if isinstance(first, Tensor) and first.is_floating_point():
            name = func._opname.removesuffix("_") if func._opname[-2:-1] != "_" else func._opname
            if name in PRODUCTS:
                self.products[self.within[-1]].add(first.dtype)
            if name in EXACT and first.dtype in HALF:
                self.narrow.add(f"{name} in {self.within[-1]}")
        return out


@contextmanager
def watched(model: nn.Module) -> Iterator[Dtypes]:
    with Dtypes(model) as seen:
        yield seen
    for handle in seen.handles:
        handle.remove()


def features(work: Work) -> Batch:
    return {name: x.float() if x.is_floating_point() else x for name, x in example(work, 0).items()}


def part_of(name: str, parts: Any) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


@pytest.mark.parametrize("multimer", [False, True])
@pytest.mark.parametrize("precision", HALVES)
def test_the_islands_are_those_that_are_listed(precision: Precision, multimer: bool) -> None:
    """Check forward passes of the definitions with recycling, and the losses. Fast paths are compared with these."""
    config = as_multimer(tiny_config()) if multimer else tiny_config()
    batch = features(Work(recycles=1, **({"residues": 11, "chains": (4, 3, 4)} if multimer else {})))
    model = AlphaFold(config).eval()
    Execution(Plan(precision=precision, kernels="definition")).bind(model)
    with watched(model) as seen:
        output = model(batch, recycles=1)
        truth = with_truth(batch, output.structure.final_atom37)
        loss, terms = total_loss(output, truth, LossConfig(violation=1.0))
    assert not seen.narrow
    dtype = DTYPES[precision]
    counting = [name for name in seen.products if name.endswith(".outer")]
    # Sequences are counted exactly.
    assert all(seen.products.pop(name) == {dtype, torch.float32} for name in counting)
    islands = {name for name, dtypes in seen.products.items() if dtypes - {dtype}}
    assert {name for name in islands if not part_of(name, ISLANDS[precision])} <= {""}, "in the losses alone"
    assert all(any(part_of(name, {island}) for name in islands) for island in ISLANDS[precision])
    assert all(dtypes == {dtype} for name, dtypes in seen.products.items() if part_of(name, TRUNK))
    # The module's layers project in bf16, but its own projection of z is in fp32.
    if precision == "bf16_all":
        assert seen.products.pop("structure") == {dtype, torch.float32}
        assert all(dtypes == {dtype} for name, dtypes in seen.products.items() if part_of(name, ["structure"]))
    exact = [loss, *terms.values(), *vars(output.structure).values(), output.plddt_logits, output.distogram_logits]
    exact = [t for t in exact if isinstance(t, Tensor) and t is not output.structure.single]
    assert {t.dtype for t in exact} <= {torch.float32, torch.float64}
    assert output.pair.dtype == output.msa.dtype == dtype


def small() -> ModelConfig:
    return tiny_config(
        recycles=0,
        evoformer=EvoformerConfig(blocks=1, heads=2, c_outer=4, pair=PairConfig(c_triangle=4, heads=2)),
        templates=TemplateConfig(enabled=False),
        heads=HeadsConfig(plddt_c=8),
        structure=StructureConfig(layers=1, c=20, heads=2, c_hidden=4, qk_points=2, v_points=3, sidechain_c=8),
    )


def curve(precision: Precision, steps: int) -> tuple[Tensor, Optimizer]:
    """Return the losses of training on one protein, and the optimizer after the last step."""
    torch.manual_seed(0)
    model = AlphaFold(small()).train()
    Execution(Plan(precision=precision)).bind(model)
    config = OptimConfig(learning_rate=3e-3, warmup_steps=5)
    optimizer = Optimizer(model, config, dtype=DTYPES[precision], scaling=precision == "fp16")
    batch, losses = features(Work(templates=None)), []
    for step in range(steps):
        model.noise.seed(0, step)
        loss, _ = total_loss(model(batch), batch, LossConfig())
        optimizer.scaled(loss).backward()
        optimizer.collect(loss)
        optimizer.step(step)
        losses.append(loss.detach())
    return torch.stack(losses), optimizer


def test_trainings_fall_alike() -> None:
    """Compare means of ten steps, which average out the rounding of single steps; fp16 omits the first overflows."""
    exact, _ = curve("fp32", 40)
    smooth = exact.view(-1, 10).mean(1)
    fallen = smooth[0] - smooth[-1]
    assert fallen > 0.5 * smooth[0]
    for precision in HALVES:
        losses, optimizer = curve(precision, 40)
        assert losses.isfinite().all()
        assert (losses.view(-1, 10).mean(1) - smooth).abs().max() < 0.1 * fallen, precision
        if precision == "fp16":
            assert optimizer.loss_scale is not None
            assert optimizer.loss_scale.scale > 1
            assert optimizer.rule.steps > 30
