"""Build tiny monomer and multimer models and batches of random features for tests."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from warpfold.batch import Batch
from warpfold.cost.fake import fake_batch, fake_mesh
from warpfold.cost.recorder import Recorder
from warpfold.engine.packed import PackedWeights
from warpfold.geometry.residue import ATOM14_MASK, ATOM37_MASK
from warpfold.model.alphafold import AlphaFold, HeadsConfig, ModelConfig
from warpfold.model.embed import MultimerConfig
from warpfold.model.evoformer import EvoformerConfig, PairConfig
from warpfold.model.losses import LossConfig, total_loss
from warpfold.model.structure import StructureConfig
from warpfold.model.template import TemplateConfig
from warpfold.model.weights.files import save_params
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan


def tiny_config(**changes) -> ModelConfig:
    """Build the settings of a complete AlphaFold2 with a few thousand parameters."""
    settings = {
        "c_m": 16,
        "c_z": 12,
        "c_s": 20,
        "c_e": 8,
        "recycles": 1,
        "evoformer": EvoformerConfig(blocks=2, heads=4, c_outer=6, pair=PairConfig(c_triangle=8)),
        "extra_blocks": 1,
        "templates": TemplateConfig(
            c=8, blocks=1, attention_width=4, pair=PairConfig(c_triangle=6, transition=2, order="attention_first")
        ),
        "structure": StructureConfig(layers=2, c=20, heads=2, c_hidden=4, qk_points=2, v_points=3, sidechain_c=8),
        "heads": HeadsConfig(plddt_c=8, pae=True),
    }
    return ModelConfig(**(settings | changes))


def as_multimer(config: ModelConfig, fused: bool = True) -> ModelConfig:
    """Change a monomer's settings to those of AlphaFold-Multimer.  fused: use version 3."""
    pairs = replace(config.evoformer.pair, fused=fused)
    template_pairs = replace(config.templates.pair, fused=fused, order="multiplication_first")
    return replace(
        config,
        multimer=MultimerConfig(),
        evoformer=replace(config.evoformer, outer="first", pair=pairs),
        templates=replace(config.templates, unit_vectors=True, pair=template_pairs),
        structure=replace(config.structure, scalar_bias=False, position_scale=20.0),
        heads=replace(config.heads, msa_classes=22, pae=True),
    )


def filled_model(config: ModelConfig, seed: int = 0) -> AlphaFold:
    """Build a model without zero parameters, so that every path affects the output."""
    torch.manual_seed(seed)
    model = AlphaFold(config)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model.eval()


def tiny_model(seed: int = 0, **changes) -> AlphaFold:
    """Build the tiny monomer, filled."""
    return filled_model(tiny_config(**changes), seed)


def tiny_multimer(seed: int = 0, **changes) -> AlphaFold:
    """Build the tiny multimer, filled."""
    return filled_model(as_multimer(tiny_config(**changes)), seed)


def random_batch(residues=9, sequences=5, extra=6, templates=2, passes=1, seed=0) -> Batch:
    """Generate random features of one example, with masks: the model's inputs of the feature table."""
    g = torch.Generator().manual_seed(seed)
    n, s, e, t, p = residues, sequences, extra, templates, passes

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    def codes(high, *shape):
        return torch.randint(high, shape, generator=g)

    def mask(*shape):
        return (torch.rand(*shape, generator=g) > 0.15).float()

    aatype = codes(20, n)
    template_mask = mask(t, n, 37) * torch.from_numpy(ATOM37_MASK)[codes(20, t, n)]
    batch = {
        "aatype": aatype,
        "residue_index": torch.arange(n) + (torch.arange(n) > n // 2) * 40,
        "seq_mask": mask(n),
        "target_feat": normal(n, 22),
        "msa_feat": normal(p, s, n, 49),
        "msa_mask": mask(p, s, n),
        "true_msa": codes(22, p, s, n),
        "bert_mask": 1 - mask(p, s, n),
        "extra_msa": codes(23, p, e, n),
        "extra_has_deletion": mask(p, e, n),
        "extra_deletion_value": normal(p, e, n).abs(),
        "extra_msa_mask": mask(p, e, n),
        "template_aatype": codes(22, t, n),
        "template_all_atom_positions": 5 * normal(t, n, 37, 3),
        "template_all_atom_masks": template_mask,
        "template_pseudo_beta": 5 * normal(t, n, 3),
        "template_pseudo_beta_mask": mask(t, n),
        "template_mask": torch.ones(t),
        "atom14_atom_exists": torch.from_numpy(ATOM14_MASK)[aatype],
        "atom37_atom_exists": torch.from_numpy(ATOM37_MASK)[aatype],
    }
    batch["seq_mask"][0] = 1
    return batch


def random_complex(chains=(4, 3, 4), rows=9, sequences=4, extra=3, templates=2, passes=1, seed=0) -> Batch:
    """Generate random features of a complex, as `random_batch`.  Chains of equal length are copies."""
    g = torch.Generator().manual_seed(1000 + seed)
    n, batch = sum(chains), random_batch(sum(chains), sequences, extra, templates, passes, seed)
    for name in ("msa_feat", "msa_mask", "extra_msa", "extra_has_deletion", "extra_deletion_value", "extra_msa_mask"):
        del batch[name]
    entities = [sorted(set(chains)).index(length) + 1 for length in chains]
    copies = [entities[: i + 1].count(entity) for i, entity in enumerate(entities)]
    for name, ids in (("asym_id", range(1, len(chains) + 1)), ("entity_id", entities), ("sym_id", copies)):
        batch[name] = torch.tensor(list(ids)).repeat_interleave(torch.tensor(chains))
    batch["residue_index"] = torch.cat([torch.arange(length) for length in chains])
    batch["alignment"] = torch.randint(22, (rows, n), generator=g).byte()
    batch["alignment_mask"] = (torch.rand(rows, n, generator=g) > 0.15).byte()
    batch["alignment_deletions"] = torch.randint(3, (rows, n), generator=g).short()
    order = torch.stack([torch.randperm(rows - 1, generator=g) + 1 for _ in range(passes)])
    batch["centre_rows"] = torch.cat((torch.zeros(passes, 1).long(), order[:, : sequences - 1]), 1)
    batch["extra_rows"] = order[:, sequences - 1 :][:, :extra]
    batch["true_msa"] = batch["alignment"][batch["centre_rows"]].long()
    batch["masked_msa"] = torch.where(batch["bert_mask"] > 0, 22, batch["true_msa"])
    return batch


def save_uneven_params(path: Path) -> None:
    """Write parameters of the tiny model whose pLDDT is high for some residues and low for others."""
    model = tiny_model(templates=TemplateConfig(enabled=False))
    with torch.no_grad():
        model.plddt.logits.weight.normal_(std=0.5, generator=torch.Generator().manual_seed(0))
    save_params(path, model)


class StandInStreams:
    """Stand-ins for CUDA streams on a CPU, which do nothing.  said: the recorded waits.  now: the current stream."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.now = "main"

    def stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.said.append(f"{name} waits for {other.name}"))

    @contextmanager
    def on(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.now = self.now, stream.name
        yield
        self.now = before

    def put(self, patch: pytest.MonkeyPatch) -> None:
        """Replace torch's functions by these."""
        patch.setattr(torch.cuda, "current_stream", lambda *_: self.stream(self.now))
        patch.setattr(torch.cuda, "stream", self.on)


def memory_of(
    plan: Plan, config: ModelConfig, sizes: Mapping[str, int], losses: LossConfig | None = None, recycles: int = 1
) -> Recorder:
    """Record the memory of the first rank while it folds an example, or trains on it with `losses`.

    Parameters, packed or not, their gradients and the example itself are not included.
    sizes: of the feature table's named axes (`pass` is 1).
    """
    training = losses is not None
    with fake_mesh(plan.data, plan.axial, plan.branch) as mesh, torch.device("meta"):
        model = AlphaFold(config).train(training)
        Execution(plan, mesh).bind(model)
        model.noise.seed(0)
        packed = PackedWeights(model, model.execution.dtype, trained=training)
        batch = fake_batch(**{"pass": 1, **sizes})
        with Recorder() as memory, torch.set_grad_enabled(training):
            output = model(batch, recycles)
            if losses is not None:
                total_loss(output, batch, losses, residues=model.residues)[0].backward()
        del packed
    return memory
