"""A small EsmFold (transformers) with random weights, before and after `accelerate`."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from warpfold.adapt.accelerate import accelerate, acceleration
from warpfold.adapt.adapter import is_swapped
from warpfold.adapt.verify import redrawn

pytest.importorskip("transformers", reason="transformers is not installed: ./dev adapters esmfold")

PROTEINS = ["MKTAYIAKQRQISFVKSHFS", "GSHMRYLACWDEF"]
OUTPUTS = ("positions", "s_s", "s_z", "plddt", "ptm_logits", "distogram_logits", "lm_logits", "angles")


def esmfold(dropout: float = 0.0) -> Any:
    from transformers import EsmConfig, EsmForProteinFolding

    structure = {"sequence_dim": 24, "pairwise_dim": 16, "resnet_dim": 16, "num_blocks": 2, "dropout_rate": dropout}
    trunk = {"num_blocks": 2, "sequence_state_dim": 48, "pairwise_state_dim": 32, "sequence_head_width": 12}
    trunk |= {"pairwise_head_width": 8, "position_bins": 8, "dropout": dropout, "structure_module": structure}
    config = EsmConfig(
        is_folding_model=True,
        esmfold_config={"fp16_esm": False, "trunk": trunk},
        vocab_size=33,
        pad_token_id=1,
        mask_token_id=32,
        position_embedding_type="rotary",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    return redrawn(EsmForProteinFolding(config).eval(), 0)


def both(model: Any) -> tuple[Any, Any]:
    """Build a model and an accelerated copy."""
    return model, accelerate(copy.deepcopy(model))


def residues(*lengths: int) -> dict[str, Tensor]:
    """Draw random residues and the mask of chains of these lengths."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 20, (len(lengths), max(lengths)), generator=generator)
    return {"input_ids": ids, "attention_mask": (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()}


def furthest(theirs: Any, ours: Any, mask: Tensor | None = None) -> float:
    """Compute the largest difference of any output, relative to its largest number, within a mask [b, r]."""
    found = []
    for name in OUTPUTS:
        a, b = getattr(theirs, name), getattr(ours, name)
        assert a.isfinite().all()
        if mask is not None:
            a, b = (valid(x, mask) for x in (a, b))
        found.append(float((a - b).abs().max() / a.abs().max()))
    return max(found)


def valid(x: Tensor, mask: Tensor) -> Tensor:
    """Set an output to zero for masked residues, or pairs of residues."""
    at = 0 if x.shape[:2] == mask.shape else 1  # some outputs begin with an axis of layers
    shape = (1,) * at + tuple(mask.shape)
    kept = mask.view(shape + (1,) * (x.dim() - len(shape)))
    if x.shape[at + 1 : at + 3] == (mask.shape[1], mask.shape[1]):
        kept = kept * mask.view((1,) * at + (mask.shape[0], 1, mask.shape[1]) + (1,) * (x.dim() - at - 3))
    return x * kept


def test_the_trunk_is_swapped() -> None:
    _, ours = both(esmfold())
    swapped = {kind.class_name: len(kind.names) for kind in acceleration(ours).swapped}
    assert swapped["EsmFoldResidueMLP"] == 2
    assert sum(is_swapped(module) for module in ours.modules()) == 16
    assert all(kind.difference is not None and kind.difference < 2e-5 for kind in acceleration(ours).swapped)


@pytest.mark.parametrize("lengths", [(33,), (24, 17)], ids=["one", "padded"])
def test_outputs(lengths: tuple[int, ...]) -> None:
    theirs, ours = both(esmfold())
    batch = residues(*lengths)
    with torch.no_grad():
        before, after = (model(**batch, num_recycles=1) for model in (theirs, ours))
    assert furthest(before, after, batch["attention_mask"]) < 1e-5


def test_gradients() -> None:
    theirs, ours = both(esmfold().double())
    batch = residues(21, 14)
    for model in (theirs, ours):
        out = model(**batch, num_recycles=1)
        weighed = [valid(getattr(out, name), batch["attention_mask"]).square().mean() for name in OUTPUTS]
        sum(weighed).backward()
    largest = max(float(p.grad.abs().max()) for p in theirs.parameters() if p.grad is not None)
    for (name, a), b in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            assert float((a.grad - b.grad).abs().max()) < 1e-9 * largest, name


def test_chunks() -> None:
    theirs, ours = both(esmfold())
    for model in (theirs, ours):
        model.trunk.set_chunk_size(5)
    with torch.no_grad():
        assert furthest(*(model(**residues(19), num_recycles=0) for model in (theirs, ours))) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("autocast", [False, True], ids=["cast", "autocast"])
def test_half_precision(dtype: torch.dtype, autocast: bool) -> None:
    """The error of an accelerated block in half precision is about that of its own code."""
    theirs, ours = (model.trunk.blocks[0] for model in both(esmfold()))
    s, z, mask = torch.randn(1, 20, 48), torch.randn(1, 20, 20, 32), torch.ones(1, 20, dtype=torch.int64)
    exact = copy.deepcopy(theirs).double()(s.double(), z.double(), mask)
    if not autocast:
        theirs, ours, s, z = theirs.to(dtype), ours.to(dtype), s.to(dtype), z.to(dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        before, after = theirs(s, z, mask), ours(s, z, mask)
    for a, b, truth in zip(before, after, exact):
        assert a.dtype == b.dtype
        assert (b - truth).norm() < 2 * (a - truth).norm()


def test_infer() -> None:
    theirs, ours = both(esmfold())
    before, after = (model.infer(PROTEINS) for model in (theirs, ours))
    there = torch.arange(20) < torch.tensor([len(one) for one in PROTEINS])[:, None]
    assert furthest(before, after, there.long()) < 1e-5
    assert ours.infer_pdb(PROTEINS[1]).count("ATOM") == theirs.infer_pdb(PROTEINS[1]).count("ATOM") > 0


def test_dropout_draws_what_theirs_draws() -> None:
    theirs, ours = (model.trunk.blocks[0].double().train() for model in both(esmfold(dropout=0.2)))
    s, z, results = torch.randn(1, 9, 48).double(), torch.randn(1, 9, 9, 32).double(), []
    for block in (theirs, ours):
        torch.manual_seed(3)
        results.append(block(s, z, torch.ones(1, 9, dtype=torch.int64)))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    assert any(is_swapped(module) for module in ours.modules())
