"""AlphaFold2 and AlphaFold-Multimer: Algorithm 2, with recycling (Algorithms 30 to 32) and ensembling."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpfold.batch import FEATURES, Batch, at_pass, on_device, passes
from warpfold.device import Function, Named
from warpfold.geometry.atoms import CA, pseudo_beta
from warpfold.geometry.rigid import Rigid
from warpfold.model.axial import ALL, Executable, Residues
from warpfold.model.clusters import cluster_features
from warpfold.model.embed import ExtraMSAEmbedder, InputEmbedder, MultimerConfig, RecyclingEmbedder
from warpfold.model.evoformer import Evoformer, EvoformerConfig
from warpfold.model.heads import DistogramHead, LogitsHead, PLDDTHead
from warpfold.model.layers import DrawsNoise, Linear
from warpfold.model.structure import StructureConfig, StructureModule, StructureOutput
from warpfold.model.template import ChainTemplateEmbedder, TemplateConfig, TemplateEmbedder
from warpfold.ops.noise import Noise


@dataclass(frozen=True, kw_only=True)
class HeadsConfig:
    """The settings of the output heads (Supp. 1.9)."""

    distogram_bins: int = 64
    msa_classes: int = 23  # AlphaFold-Multimer: 22, without the mask
    plddt_c: int = 128
    plddt_bins: int = 50
    pae: bool = False  # the "ptm" models
    pae_bins: int = 64


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that decides what the model computes.  The defaults are model_1 (Supp. tables 4 and 5).

    With `multimer` the embedders are AlphaFold-Multimer's; the preset settings/multimer.toml has what else differs.
    """

    c_m: int = 256
    c_z: int = 128
    c_s: int = 384
    c_e: int = 64
    max_relative: int = 32  # Algorithm 4
    recycles: int = 3  # Supp. 1.10; passes through the trunk, less one
    # Angstrom: a prediction recycles no more once the distances between CA change by less (Multimer v3: 0.5).
    recycle_tolerance: float | None = None
    ensemble: int = 1  # Supp. 1.11.2; alignment samples averaged in each pass
    evoformer: EvoformerConfig = field(default_factory=EvoformerConfig)
    extra_blocks: int = 4  # Algorithm 18; otherwise like the Evoformer
    templates: TemplateConfig = field(default_factory=TemplateConfig)
    structure: StructureConfig = field(default_factory=StructureConfig)
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    multimer: MultimerConfig | None = None  # None: the monomer


@dataclass(frozen=True)
class Representations:
    """What the trunk computes in one pass."""

    msa: Tensor  # [*, s, r, c_m], without template rows
    pair: Tensor  # [*, r, r, c_z]
    single: Tensor  # [*, r, c_s]
    msa_first_row: Tensor  # [*, r, c_m]


@dataclass(frozen=True)
class Recycled:
    """What one pass hands to the next (Algorithm 32); constants for the gradient."""

    msa_first_row: Tensor  # [*, r, c_m]
    pair: Tensor  # [*, r, r, c_z]
    positions: Tensor  # [*, r, 37, 3] angstrom


class LastPass(NamedTuple):
    """What a protein has folded to, before any head has looked at it."""

    representations: Representations
    structure: StructureOutput
    recycles: int  # passes before the last

    def unbind(self) -> list["LastPass"]:
        """Return the output of each example of a batch, which has one leading axis."""
        parts = zip(_unbound(self.representations, 0), _unbound(self.structure, 0))
        return [LastPass(representations, structure, self.recycles) for representations, structure in parts]


@dataclass(frozen=True)
class Output:
    """The last pass: representations, structure, and the heads' logits (fp32)."""

    msa: Tensor  # [*, s, r, c_m]
    pair: Tensor  # [*, r, r, c_z]
    single: Tensor  # [*, r, c_s]
    msa_first_row: Tensor  # [*, r, c_m]
    structure: StructureOutput
    distogram_logits: Tensor  # [*, r, r, 64]
    masked_msa_logits: Tensor  # [*, s, r, 23], in a multimer 22
    plddt_logits: Tensor  # [*, r, 50]
    resolved_logits: Tensor  # [*, r, 37]
    pae_logits: Tensor | None  # [*, r, r, 64]
    recycles: int = 0  # passes before this one, of a whole `forward`

    def unbind(self) -> list["Output"]:
        """Return the outputs of the examples of a batch, one leading axis."""
        return _unbound(self, 0)


PER_LAYER_FIELDS = ("angles", "unnormalized_angles", "atom14", "traj")  # of `StructureOutput`, and its frames


def _unbound(of: Any, axis: int) -> list[Any]:
    """Return a dataclass of tensors once for each place along an axis; in structures some have the layers before it."""
    parts: dict[str, Sequence[Any]] = {}
    for name in (f.name for f in fields(of)):
        x = getattr(of, name)
        if isinstance(x, StructureOutput):
            parts[name] = _unbound(x, 0)
        elif isinstance(x, Rigid):
            parts[name] = _unbound(x, 1)
        elif isinstance(x, Tensor):
            parts[name] = x.unbind(int(name in PER_LAYER_FIELDS) or axis)
    count = len(next(iter(parts.values())))
    return [replace(of, **{name: values[i] for name, values in parts.items()}) for i in range(count)]


class AlphaFold(Executable):
    """Algorithm 2 with recycling (Algorithms 30 and 31), on a batch of the feature table (warpfold/batch.py).

    Under a plan that shards an example over processes, each has its shard of what has a pair axis or an alignment:
    m cut along residues, z along its rows (model/axial.py).  The batch, and everything per residue, is whole.
    """

    def __init__(self, config: ModelConfig | None = None) -> None:
        super().__init__()
        self.config = c = ModelConfig() if config is None else config
        embedder = TemplateEmbedder if c.multimer is None else ChainTemplateEmbedder
        self.input = InputEmbedder(c.c_m, c.c_z, c.max_relative, c.multimer)
        self.recycling = RecyclingEmbedder(c.c_m, c.c_z)
        self.templates = embedder(c.c_m, c.c_z, c.templates) if c.templates.enabled else None
        self.extra = ExtraMSAEmbedder(c.c_e)
        self.extra_stack = Evoformer(c.c_e, c.c_z, replace(c.evoformer, blocks=c.extra_blocks), global_column=True)
        self.evoformer = Evoformer(c.c_m, c.c_z, c.evoformer)
        self.single = Linear(c.c_m, c.c_s)
        self.structure = StructureModule(c.c_s, c.c_z, c.structure)
        self.distogram = DistogramHead(c.c_z, c.heads.distogram_bins)
        self.masked_msa = LogitsHead(c.c_m, c.heads.msa_classes)
        self.plddt = PLDDTHead(c.structure.c, c.heads.plddt_c, c.heads.plddt_bins)
        self.resolved = LogitsHead(c.c_s, 37)  # atoms
        self.pae = LogitsHead(c.c_z, c.heads.pae_bins) if c.heads.pae else None
        self.frozen_trunk = False  # nothing of it is trained: then no pass keeps anything of it
        self.noise = Noise()
        # All layers draw from one source of dropout noise, each from streams of its own.
        layers = [module for module in self.modules() if isinstance(module, DrawsNoise)]
        for number, layer in enumerate(layers):
            layer.noise, layer.stream = self.noise, 1000 * number  # a layer may use the streams that follow its own

    def forward(self, batch: Batch, recycles: int | None = None, start: Recycled | None = None) -> Output:
        """Fold one example: `recycles` + 1 passes (default: the settings'), the gradient through the last alone.

        Outside of training there are fewer with a `recycle_tolerance`: when a pass hardly moved what the pass before
        had found (before the first: zeros, or the initial guess), one more follows, and it is the last.
        Per-pass features have a `pass` axis of 1 or of (recycles + 1) x ensemble, recycle-major.
        start: as of `recycle`.
        Errors: ValueError where the number of passes does not fit.
        """
        folded = self.fold(batch, recycles, start=start)
        return replace(self.output(folded.representations, folded.structure), recycles=folded.recycles)

    def fold(
        self,
        batch: Batch,
        recycles: int | None = None,
        watch: Callable[[Recycled, Tensor], object] | None = None,
        start: Recycled | None = None,
    ) -> LastPass:
        """Run all passes, as `forward` does, but no head: their logits are the largest tensors of all.

        The batch may be in host memory, and narrower than its table says: each pass moves what it sees.
        watch, start: as of `recycle`.
        """
        recycled, done = self.recycle(batch, recycles, watch, start=start)
        inputs = self.inputs_of_pass(batch, done, recycled)
        if torch.is_grad_enabled():
            return LastPass(*self.one_pass(inputs), done)
        return LastPass(*self._replayed_pass(inputs), done)

    def recycle(
        self,
        batch: Batch,
        recycles: int | None = None,
        watch: Callable[[Recycled, Tensor], object] | None = None,
        early: Function | None = None,
        start: Recycled | None = None,
    ) -> tuple[Recycled, int]:
        """Run the passes before the last; return what they hand to it, and how many they were.

        early: runs one of them, in place of `early_pass`.
        watch: given after each what it hands on, which the next may write over, and the structure module's activations
        [*, r, c], from which pLDDT follows.
        start: what the first pass is handed (`first_recycled`), and may write over; None: zeros.
        """
        recycles = self.config.recycles if recycles is None else recycles
        self._check_passes(batch, (recycles + 1) * self.config.ensemble)
        recycled, done, settled = start or self.first_recycled(batch), 0, False
        while done < recycles and not settled:
            with torch.no_grad():
                inputs = self.inputs_of_pass(batch, done, recycled)
                if self.training or early is not None:
                    found = self.execution.call(self, early or self.early_pass, inputs)
                else:
                    found = self._handed_on(*self._replayed_pass(inputs))
            activations, before = found.pop("activations"), recycled.positions
            recycled = Recycled(**found)
            if watch is not None:
                watch(recycled, activations)
            done, tolerance = done + 1, self.config.recycle_tolerance
            if tolerance is not None and not self.training:
                mask = batch["seq_mask"].to(self.device)
                change = distance_change(before, recycled.positions, mask, self.residues)
                settled = bool((change <= tolerance).all())
        return recycled, done

    def last_pass(self, inputs: Mapping[str, Tensor]) -> Output:
        """Run the pass that has a gradient, and the heads.

        inputs: `inputs_of_pass`; or what `trunk_pass` found, with the features of the residues and the labels.
        """
        if "single" not in inputs:
            return self.output(*self.one_pass(inputs))
        self.noise.key, single = inputs["key"], inputs["single"]
        with self.computing():
            structure = self.structure(single, inputs["pair"], inputs["aatype"], inputs["seq_mask"])
        # Of an alignment whose logits are there no row was kept.
        msa = inputs.get("msa", single.new_empty(*single.shape[:-2], 0, *inputs["msa_first_row"].shape[-2:]))
        found = Representations(msa, inputs["pair"], single, inputs["msa_first_row"])
        return self.output(found, structure, inputs.get("masked_msa_logits"))

    def trunk_pass(self, inputs: Mapping[str, Tensor], msa: bool = False) -> dict[str, Tensor]:
        """Run a pass of the trunk alone; return what the structure module and the heads read of it, for `last_pass`.

        inputs: `inputs_of_pass`.  msa: with the alignment; else with the logits that the masked-MSA head makes of it,
        which are far smaller.
        """
        found = self._trunk_of_pass(inputs)
        kept = {name: x for name, x in vars(found).items() if name != "msa"}
        return kept | ({"msa": found.msa} if msa else {"masked_msa_logits": self.masked_msa(found.msa)})

    def whole_trunk_pass(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run a pass of the trunk alone; return its representations by name.  inputs: `inputs_of_pass`."""
        return dict(vars(self._trunk_of_pass(inputs)))

    @property
    def device(self) -> torch.device:
        """Return where the model computes."""
        return self.single.weight.device

    def inputs_of_pass(self, batch: Batch, index: int, recycled: Recycled) -> dict[str, Tensor]:
        """Return all that pass `index` depends on, by name, as tensors: it may be replayed with others.

        The features with the samples of the alignment that it sees, the fields of `Recycled`, and the key of dropout.
        """
        samples = on_device(passes(batch, index * self.config.ensemble, self.config.ensemble), self.device)
        self.noise.at_pass(index)
        return {**samples, **vars(recycled), "key": self.noise.key}

    def early_pass(self, inputs: Mapping[str, Tensor], structure_module: StructureModule | None = None) -> Named:
        """Run a pass before the last.  structure_module: another than the model's."""
        return self._handed_on(*self.one_pass(inputs, structure_module))

    @staticmethod
    def _handed_on(representations: Representations, structure: StructureOutput) -> Named:
        recycled = Recycled(representations.msa_first_row, representations.pair, structure.final_atom37)
        return {**vars(recycled), "activations": structure.single}

    def _replayed_pass(self, inputs: Mapping[str, Tensor]) -> tuple[Representations, StructureOutput]:
        """Run a pass of a prediction: the trunk by a graph that serves every pass, and the structure module.

        inputs: `inputs_of_pass`.
        """
        representations = Representations(**self.execution.call(self, self.whole_trunk_pass, inputs))
        with self.computing():
            structure = self.structure(
                representations.single, representations.pair, inputs["aatype"], inputs["seq_mask"]
            )
        return representations, structure

    def one_pass(
        self, inputs: Mapping[str, Tensor], structure_module: StructureModule | None = None
    ) -> tuple[Representations, StructureOutput]:
        """Run a pass: the trunk, averaged over the ensemble, and the structure module (Algorithms 30 and 31).

        inputs: `inputs_of_pass`.  structure_module: as of `early_pass`.
        """
        mean = self._trunk_of_pass(inputs)
        with self.computing():
            module = structure_module or self.structure
            return mean, module(mean.single, mean.pair, inputs["aatype"], inputs["seq_mask"])

    def _trunk_of_pass(self, inputs: Mapping[str, Tensor]) -> Representations:
        recycled = Recycled(*(inputs[field.name] for field in fields(Recycled)))
        batch = {name: x for name, x in inputs.items() if name in FEATURES}
        self.noise.key = inputs["key"]
        with self.computing(), torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen_trunk):
            return self._mean(batch, recycled)

    def _mean(self, batch: Batch, recycled: Recycled) -> Representations:
        """Return the mean of what the trunk makes of each sample of the alignment."""
        count, given = self.config.ensemble, recycled.pair
        total = None
        for member in range(count):
            last = member == count - 1  # it alone may be written over what is recycled
            pair = given
            if self.execution.in_place and not last:
                pair = self.execution.pair_memory(self.single.weight, given.shape)
                for rows in self.execution.rows(given.shape[-3]):
                    self.execution.store(pair, rows, self.execution.fetch(given, rows))
            found = self.trunk(self.sample(batch, member), replace(recycled, pair=pair))
            total = found if total is None else self._sum(total, found)
        assert total is not None
        if count == 1:
            return total
        pair = self.map_rows_(total.pair, lambda rows, old: old / count)
        return replace(total, pair=pair, single=total.single / count, msa_first_row=total.msa_first_row / count)

    def _sum(self, a: Representations, b: Representations) -> Representations:
        """Return the sum, but for the alignment: the masked-MSA head reads that of the first alone."""
        pair = self.map_rows_(a.pair, lambda rows, old: old + self.execution.fetch(b.pair, rows))
        return replace(a, pair=pair, single=a.single + b.single, msa_first_row=a.msa_first_row + b.msa_first_row)

    def sample(self, batch: Batch, index: int) -> Batch:
        """Return the features of one sample of the alignment; a multimer's clusters are made here."""
        sample = at_pass(batch, index)
        if self.config.multimer is not None:
            sample |= cluster_features(sample, sample["target_feat"].dtype)
        return sample

    def trunk(self, batch: Batch, recycled: Recycled) -> Representations:
        """Run Algorithm 2, lines 4 to 19, on one sample of the alignment (no `pass` axis)."""
        seq_mask, dtype = batch["seq_mask"], self.execution.dtype
        z_mask = self.residues.local_shard(seq_mask, -1)[..., :, None] * seq_mask[..., None, :]
        beta = pseudo_beta(batch["aatype"], recycled.positions)
        z = self.map_rows_(
            recycled.pair, lambda rows, old: self.input.pair(batch, dtype, rows) + self.recycling.pair(old, beta, rows)
        )
        if self.templates is not None:
            z = self.templates(z, z_mask, batch)
        # m is made when the extra MSA is gone: it needs neither it nor what it made of z.
        z = self.extra_stack(self.extra(batch, dtype), z, batch["extra_msa_mask"], z_mask)[1]
        m, m_mask = self._first_msa(batch, recycled.msa_first_row)
        m, z = self.evoformer(m, z, m_mask, z_mask)
        m_first = m[..., 0, :, :].clone()  # what is recycled must not keep all of m
        single = self.residues.all_gather(self.single(m_first), -2, seq_mask.shape[-1])
        return Representations(m[..., : batch["msa_mask"].shape[-2], :, :], z, single, m_first)

    def _first_msa(self, batch: Batch, first_row: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first m, with the rows of the templates behind it, and its mask."""
        m, mask, dtype = self.input.msa(batch, self.execution.dtype), batch["msa_mask"], self.execution.dtype
        parts = [m[..., :1, :, :] + self.recycling.msa(first_row)[..., None, :, :], m[..., 1:, :, :]]
        if self.templates is not None and self.templates.rows is not None and batch["template_mask"].shape[-1]:
            rows, rows_mask = self.templates.rows(batch, dtype)
            parts, mask = [*parts, rows], torch.cat((mask, rows_mask), -2)
        return torch.cat(parts, -3), mask

    def output(
        self,
        representations: Representations,
        structure: StructureOutput,
        masked_msa_logits: Tensor | None = None,
    ) -> Output:
        """Run the heads (Supp. 1.9), in fp32, on the result of a pass.

        masked_msa_logits: where they are known.
        """
        r = representations
        return Output(
            msa=r.msa,
            pair=r.pair,
            single=r.single,
            msa_first_row=r.msa_first_row,
            structure=structure,
            distogram_logits=self.distogram(r.pair),
            masked_msa_logits=self.masked_msa(r.msa) if masked_msa_logits is None else masked_msa_logits,
            plddt_logits=self.plddt(structure.single),
            resolved_logits=self.resolved(r.single),
            pae_logits=None if self.pae is None else self.pae(r.pair),
        )

    def first_recycled(self, batch: Batch, guess: Tensor | None = None) -> Recycled:
        """Return what the first pass is handed: zeros (Algorithm 32), but for the positions of an initial guess.

        guess [*, r, 37, 3], angstrom: read as what a pass before would have found, by the binned distances between CB
        (CA where the batch has glycine) alone.  As in the official code there is no mask: an atom that is missing is at
        the origin.  So two residues without CB are 0 apart, as all are in a first pass without a guess, and from the
        others they are as far as these are from the origin: with missing atoms it matters where the guess lies.
        """
        c, aatype, dtype = self.config, batch["aatype"], self.execution.dtype
        shape, shard, like = aatype.shape, self.residues.local_shard(aatype, -1).shape, self.single.weight  # its device
        return Recycled(
            like.new_zeros(*shard, c.c_m, dtype=dtype),
            self.execution.pair_memory(like, (*shard, shape[-1], c.c_z)),
            like.new_zeros(*shape, 37, 3) if guess is None else guess.to(like),
        )

    def _check_passes(self, batch: Batch, passes: int) -> None:
        name = "msa_feat" if self.config.multimer is None else "centre_rows"
        there = batch[name].shape[-len(FEATURES[name].axes)]
        if there not in (1, passes):
            raise ValueError(
                f"the batch holds {there} samples of the alignment, but {passes} are needed: "
                f"(recycles + 1) x ensemble, or 1 that serves all"
            )


def distance_change(before: Tensor, after: Tensor, mask: Tensor, residues: Residues = ALL) -> Tensor:
    """Return how much the distances between CA changed: the root of the mean square over pairs, [*], angstrom.

    Positions [*, r, 37, 3] of two passes, mask [*, r].  AlphaFold-Multimer's measure for stopping (official code,
    `recycle_cond`, after AF2Complex).  residues: those whose rows are computed here; all processes get the same number,
    so that they stop together.
    """

    def distances(positions: Tensor) -> Tensor:
        ca = positions[..., CA, :]
        return torch.cdist(residues.local_shard(ca, -2), ca, compute_mode="donot_use_mm_for_euclid_dist")

    squared = (distances(before) - distances(after)).square()
    rows = (squared * mask[..., None, :]).sum(-1) * residues.local_shard(mask, -1)
    total = residues.all_gather(rows, -1, mask.shape[-1]).sum(-1)
    return (total / (mask.sum(-1).square() + 1e-10) + 1e-8).sqrt()
