"""AlphaFold2 and AlphaFold-Multimer: Algorithm 2 with recycling (Algorithms 30 to 32) and ensembling."""

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
    # AlphaFold-Multimer: 22, without the mask.
    msa_classes: int = 23
    plddt_c: int = 128
    plddt_bins: int = 50
    # Whether there is a head for the aligned error, as in the "ptm" models.
    pae: bool = False
    pae_bins: int = 64


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """All settings that determine the results of the model. The defaults are model_1 (Supp. tables 4 and 5).

    With `multimer` the embedders are AlphaFold-Multimer's. The preset settings/multimer.toml has its other settings.
    """

    c_m: int = 256
    c_z: int = 128
    c_s: int = 384
    c_e: int = 64
    # Largest offset of relative positions (Algorithm 4).
    max_relative: int = 32
    # Passes through the trunk, less one (Supp. 1.10).
    recycles: int = 3
    # A prediction stops recycling when the distances between CA change by at most this, in angstrom (Multimer v3: 0.5).
    recycle_tolerance: float | None = None
    # Alignment samples that are averaged in each pass (Supp. 1.11.2).
    ensemble: int = 1
    evoformer: EvoformerConfig = field(default_factory=EvoformerConfig)
    # Blocks of the extra MSA stack (Algorithm 18), which otherwise has the Evoformer's settings.
    extra_blocks: int = 4
    templates: TemplateConfig = field(default_factory=TemplateConfig)
    structure: StructureConfig = field(default_factory=StructureConfig)
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    # The settings of AlphaFold-Multimer. None: a monomer.
    multimer: MultimerConfig | None = None


@dataclass(frozen=True)
class Representations:
    """The trunk's outputs of one pass.

    msa: [*, s, r, c_m], without template rows. pair: [*, r, r, c_z]. single: [*, r, c_s]. msa_first_row: [*, r, c_m].
    """

    msa: Tensor
    pair: Tensor
    single: Tensor
    msa_first_row: Tensor


@dataclass(frozen=True)
class Recycled:
    """The outputs of a pass that the next pass reads (Algorithm 32), without gradient.

    msa_first_row: [*, r, c_m]. pair: [*, r, r, c_z]. positions: [*, r, 37, 3], angstrom.
    """

    msa_first_row: Tensor
    pair: Tensor
    positions: Tensor


class LastPass(NamedTuple):
    """Trunk and structure-module outputs of the last pass, before the heads. recycles: the passes before it."""

    representations: Representations
    structure: StructureOutput
    recycles: int

    def unbind(self) -> list["LastPass"]:
        """Split the outputs of a batch, which have one leading axis, into those of its examples."""
        examples = zip(_unbind(self.representations, 0), _unbind(self.structure, 0))
        return [LastPass(representations, structure, self.recycles) for representations, structure in examples]


@dataclass(frozen=True)
class Output:
    """The outputs of the last pass: representations, structure, and the heads' logits (fp32).

    msa, pair, single, msa_first_row: see `Representations`. distogram_logits: [*, r, r, 64]. masked_msa_logits: [*, s,
    r, 23], in a multimer 22. plddt_logits: [*, r, 50]. resolved_logits: [*, r, 37]. pae_logits: [*, r, r, 64].
    recycles: the passes before this one, after a whole `forward`.
    """

    msa: Tensor
    pair: Tensor
    single: Tensor
    msa_first_row: Tensor
    structure: StructureOutput
    distogram_logits: Tensor
    masked_msa_logits: Tensor
    plddt_logits: Tensor
    resolved_logits: Tensor
    pae_logits: Tensor | None
    recycles: int = 0

    def unbind(self) -> list["Output"]:
        """Split the outputs of a batch, which have one leading axis, into those of its examples."""
        return _unbind(self, 0)


# The tensors of `StructureOutput` with an axis of layers before the batch axis. Its frames have one too.
PER_LAYER_FIELDS = ("angles", "unnormalized_angles", "atom14", "traj")


def _unbind(output: Any, axis: int) -> list[Any]:
    """Split a dataclass of tensors along an axis, or in a structure along the axis after that of the layers."""
    split: dict[str, Sequence[Any]] = {}
    for name in (f.name for f in fields(output)):
        x = getattr(output, name)
        if isinstance(x, StructureOutput):
            split[name] = _unbind(x, 0)
        elif isinstance(x, Rigid):
            split[name] = _unbind(x, 1)
        elif isinstance(x, Tensor):
            split[name] = x.unbind(int(name in PER_LAYER_FIELDS) or axis)
    count = len(next(iter(split.values())))
    return [replace(output, **{name: values[i] for name, values in split.items()}) for i in range(count)]


class AlphaFold(Executable):
    """Algorithm 2, Inference, with recycling (Algorithms 30 and 31), on a batch of features (warpfold/batch.py).

        z_mask, beta = seq_mask[:, None] * seq_mask, pseudo_beta(aatype, positions)
        z = input.pair(batch, dtype, rows) + recycling.pair(pair, beta, rows)
        z = templates(z, z_mask, batch)
        e, z = extra_stack(extra(batch, dtype), z, extra_msa_mask, z_mask)
        m, (t, t_mask) = input.msa(batch, dtype), templates.rows(batch, dtype)
        m = cat([m[:1] + recycling.msa(msa_first_row), m[1:], t])
        m, z = evoformer(m, z, cat([msa_mask, t_mask]), z_mask)
        atoms = structure(single(m[0]), z, aatype, seq_mask).final_atom37
        m[0], z, atoms

    These lines are one pass on one sample of the alignment; features go by their names. The next pass reads the results
    as msa_first_row, pair and positions, which are zeros in the first pass. There are `config.recycles` + 1 passes.
    With `config.ensemble` above 1, the trunk's results are averaged over samples of the alignment in each pass.

    If a plan shards an example over processes, m is sharded along residues and z along rows (model/axial.py). The batch
    and all tensors per residue are whole on every process.
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
        self.resolved = LogitsHead(c.c_s, 37)
        self.pae = LogitsHead(c.c_z, c.heads.pae_bins) if c.heads.pae else None
        # True if no parameter of the trunk is trained. The trunk then saves no tensors for a gradient.
        self.frozen_trunk = False
        self.noise = Noise()
        # All layers draw from one source of dropout noise, each from its own stream. The gap lets a layer use the next
        # 999 streams too.
        layers = [module for module in self.modules() if isinstance(module, DrawsNoise)]
        for number, layer in enumerate(layers):
            layer.noise, layer.stream = self.noise, 1000 * number

    def forward(self, batch: Batch, recycles: int | None = None, start: Recycled | None = None) -> Output:
        """Fold one example in `recycles` + 1 passes, by default the settings'. Only the last pass has a gradient.

        With a `recycle_tolerance`, and outside of training, there may be fewer passes: if a pass changes the distances
        between CA (initially those of `start`) by at most this, the next pass is the last.
        batch: features per pass have a `pass` axis of length 1 or (recycles + 1) x ensemble, recycle-major.
        start: see `recycle`.
        Raises ValueError if the length of the `pass` axis does not fit.
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
        """Run all passes like `forward`, but no heads, whose logits are the largest tensors of all.

        batch: may be in host memory and in narrower dtypes than the feature table's. Each pass moves the features that
        it reads to the device. watch, start: see `recycle`.
        """
        recycled, done = self.recycle(batch, recycles, watch, start=start)
        inputs = self.inputs_of_pass(batch, done, recycled)
        if torch.is_grad_enabled():
            return LastPass(*self.one_pass(inputs), done)
        return LastPass(*self._prediction_pass(inputs), done)

    def recycle(
        self,
        batch: Batch,
        recycles: int | None = None,
        watch: Callable[[Recycled, Tensor], object] | None = None,
        early: Function | None = None,
        start: Recycled | None = None,
    ) -> tuple[Recycled, int]:
        """Run the passes before the last. Return their result and their number.

        early: the function that runs one pass, instead of `recycling_pass`.
        watch: called after each pass with its result, which the next pass may overwrite, and with the structure
        module's activations [*, r, c], from which pLDDT follows.
        start: the input of the first pass (`first_recycled`), which it may overwrite. None: zeros.
        """
        recycles = self.config.recycles if recycles is None else recycles
        needed = (recycles + 1) * self.config.ensemble
        name = "msa_feat" if self.config.multimer is None else "centre_rows"
        samples = batch[name].shape[-len(FEATURES[name].axes)]
        if samples not in (1, needed):
            raise ValueError(
                f"batch: {samples} samples of the alignment, but the model needs {needed}. "
                "Pass (recycles + 1) x ensemble samples, or 1 for all passes."
            )
        recycled, done, settled = start or self.first_recycled(batch), 0, False
        while done < recycles and not settled:
            with torch.no_grad():
                inputs = self.inputs_of_pass(batch, done, recycled)
                # Training records a whole pass as a graph. A prediction records the trunk only, so that all passes
                # share one graph.
                if self.training or early is not None:
                    results = self.execution.call(self, early or self.recycling_pass, inputs)
                else:
                    results = self._recycled_results(*self._prediction_pass(inputs))
            activations, previous = results.pop("activations"), recycled.positions
            recycled = Recycled(**results)
            if watch is not None:
                watch(recycled, activations)
            done, tolerance = done + 1, self.config.recycle_tolerance
            if tolerance is not None and not self.training:
                mask = batch["seq_mask"].to(self.device)
                change = distance_change(previous, recycled.positions, mask, self.residues)
                settled = bool((change <= tolerance).all())
        return recycled, done

    def last_pass(self, inputs: Mapping[str, Tensor]) -> Output:
        """Run the pass that has a gradient, and the heads.

        inputs: `inputs_of_pass`, or the results of `trunk_pass` with the features of the residues and the labels.
        """
        if "single" not in inputs:
            return self.output(*self.one_pass(inputs))
        self.noise.key, single = inputs["key"], inputs["single"]
        with self.computing():
            structure = self.structure(single, inputs["pair"], inputs["aatype"], inputs["seq_mask"])
        # `trunk_pass` returned either the alignment or its logits. In the second case the alignment gets no rows.
        msa = inputs.get("msa", single.new_empty(*single.shape[:-2], 0, *inputs["msa_first_row"].shape[-2:]))
        representations = Representations(msa, inputs["pair"], single, inputs["msa_first_row"])
        return self.output(representations, structure, inputs.get("masked_msa_logits"))

    def trunk_pass(self, inputs: Mapping[str, Tensor], msa: bool = False) -> dict[str, Tensor]:
        """Run the trunk of a pass, and return the inputs of the structure module and the heads, for `last_pass`.

        inputs: `inputs_of_pass`. msa: whether to return the alignment. If not, the logits of the masked-MSA head are
        returned, which are far smaller.
        """
        results = self.trunk_representations(inputs)
        alignment = results.pop("msa")
        return results | ({"msa": alignment} if msa else {"masked_msa_logits": self.masked_msa(alignment)})

    def trunk_representations(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the trunk of a pass, and return its representations by name, as graphs need. inputs: `inputs_of_pass`."""
        return dict(vars(self._ensembled_trunk(inputs)))

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.single.weight.device

    def inputs_of_pass(self, batch: Batch, index: int, recycled: Recycled) -> dict[str, Tensor]:
        """Return all inputs of pass `index` as tensors by name, so that a captured graph can be replayed with others.

        The inputs are the features with this pass's samples of the alignment, the fields of `Recycled`, and the key of
        the dropout noise, which this call sets for the pass.
        """
        samples = on_device(passes(batch, index * self.config.ensemble, self.config.ensemble), self.device)
        self.noise.at_pass(index)
        return {**samples, **vars(recycled), "key": self.noise.key}

    def recycling_pass(self, inputs: Mapping[str, Tensor], structure_module: StructureModule | None = None) -> Named:
        """Run a pass before the last. structure_module: used instead of the model's."""
        return self._recycled_results(*self.one_pass(inputs, structure_module))

    @staticmethod
    def _recycled_results(representations: Representations, structure: StructureOutput) -> Named:
        """Return the fields of `Recycled` and the structure module's activations, by name."""
        recycled = Recycled(representations.msa_first_row, representations.pair, structure.final_atom37)
        return {**vars(recycled), "activations": structure.single}

    def _prediction_pass(self, inputs: Mapping[str, Tensor]) -> tuple[Representations, StructureOutput]:
        """Run a pass of a prediction. The execution may replay the trunk from one graph that serves all passes.

        inputs: `inputs_of_pass`.
        """
        representations = Representations(**self.execution.call(self, self.trunk_representations, inputs))
        with self.computing():
            structure = self.structure(
                representations.single, representations.pair, inputs["aatype"], inputs["seq_mask"]
            )
        return representations, structure

    def one_pass(
        self, inputs: Mapping[str, Tensor], structure_module: StructureModule | None = None
    ) -> tuple[Representations, StructureOutput]:
        """Run a pass: the trunk, averaged over the ensemble, and the structure module (Algorithms 30 and 31).

        inputs: `inputs_of_pass`. structure_module: used instead of the model's.
        """
        mean = self._ensembled_trunk(inputs)
        with self.computing():
            module = structure_module or self.structure
            return mean, module(mean.single, mean.pair, inputs["aatype"], inputs["seq_mask"])

    def _ensembled_trunk(self, inputs: Mapping[str, Tensor]) -> Representations:
        """Run the trunk of a pass on each sample of the alignment, and average (msa: that of the first sample).

        inputs: `inputs_of_pass`.
        """
        recycled = Recycled(*(inputs[field.name] for field in fields(Recycled)))
        batch = {name: x for name, x in inputs.items() if name in FEATURES}
        self.noise.key, count, total = inputs["key"], self.config.ensemble, None
        with self.computing(), torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen_trunk):
            for member in range(count):
                pair = recycled.pair
                # In place, the trunk overwrites its input. All samples but the last therefore work on a copy.
                if self.execution.in_place and member < count - 1:
                    pair = self.execution.pair_memory(self.single.weight, recycled.pair.shape)
                    for rows in self.execution.rows(pair.shape[-3]):
                        self.execution.store(pair, rows, self.execution.fetch(recycled.pair, rows))
                results = self.trunk(self.sample(batch, member), replace(recycled, pair=pair))
                total = results if total is None else self._sum(total, results)
            assert total is not None
            if count == 1:
                return total
            pair = self.map_rows_(total.pair, lambda rows, old: old / count)
            return replace(total, pair=pair, single=total.single / count, msa_first_row=total.msa_first_row / count)

    def _sum(self, a: Representations, b: Representations) -> Representations:
        """Add two samples' representations; msa is that of the first, which alone the masked-MSA head reads."""
        pair = self.map_rows_(a.pair, lambda rows, old: old + self.execution.fetch(b.pair, rows))
        return replace(a, pair=pair, single=a.single + b.single, msa_first_row=a.msa_first_row + b.msa_first_row)

    def sample(self, batch: Batch, index: int) -> Batch:
        """Return the features of one sample of the alignment; for a multimer, compute its clusters."""
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
        # The extra MSA is released before m is computed, to save memory.
        z = self.extra_stack(self.extra(batch, dtype), z, batch["extra_msa_mask"], z_mask)[1]
        m, m_mask = self._first_msa(batch, recycled.msa_first_row)
        m, z = self.evoformer(m, z, m_mask, z_mask)
        # A copy, since a view would keep all of m in memory.
        m_first = m[..., 0, :, :].clone()
        single = self.residues.all_gather(self.single(m_first), -2, seq_mask.shape[-1])
        return Representations(m[..., : batch["msa_mask"].shape[-2], :, :], z, single, m_first)

    def _first_msa(self, batch: Batch, first_row: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the first m, with template rows at its end, and its mask."""
        m, mask, dtype = self.input.msa(batch, self.execution.dtype), batch["msa_mask"], self.execution.dtype
        all_rows = [m[..., :1, :, :] + self.recycling.msa(first_row)[..., None, :, :], m[..., 1:, :, :]]
        if self.templates is not None and self.templates.rows is not None and batch["template_mask"].shape[-1]:
            rows, rows_mask = self.templates.rows(batch, dtype)
            all_rows, mask = [*all_rows, rows], torch.cat((mask, rows_mask), -2)
        return torch.cat(all_rows, -3), mask

    def output(
        self,
        representations: Representations,
        structure: StructureOutput,
        masked_msa_logits: Tensor | None = None,
    ) -> Output:
        """Run the heads (Supp. 1.9), in fp32, on the results of a pass.

        masked_msa_logits: used instead of running the masked-MSA head.
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
        """Return the input of the first pass: zeros (Algorithm 32), or the positions of an initial guess.

        guess: [*, r, 37, 3], angstrom. It is used like the positions of a previous pass: only the binned distances
        between CB (CA where the batch has glycine) enter. As in the official code there is no mask, and a missing atom
        is at the origin. Two residues without CB therefore have distance 0, as all residues do in a first pass without
        a guess, and their distance from another residue depends on where the guess lies relative to the origin.
        """
        c, aatype, dtype = self.config, batch["aatype"], self.execution.dtype
        # `like` is a tensor on the model's device.
        shape, shard, like = aatype.shape, self.residues.local_shard(aatype, -1).shape, self.single.weight
        return Recycled(
            like.new_zeros(*shard, c.c_m, dtype=dtype),
            self.execution.pair_memory(like, (*shard, shape[-1], c.c_z)),
            like.new_zeros(*shape, 37, 3) if guess is None else guess.to(like),
        )


def distance_change(before: Tensor, after: Tensor, mask: Tensor, residues: Residues = ALL) -> Tensor:
    """Compute the root mean square change of the distances between CA over all pairs, [*], angstrom.

    before, after: [*, r, 37, 3], the positions of two passes; mask: [*, r]. AlphaFold-Multimer stops recycling by this
    measure (official code, `recycle_cond`, after AF2Complex). residues: the residues whose rows this process computes.
    All processes get the same number, so that they stop together.
    """

    def distances(positions: Tensor) -> Tensor:
        ca = positions[..., CA, :]
        return torch.cdist(residues.local_shard(ca, -2), ca, compute_mode="donot_use_mm_for_euclid_dist")

    squared = (distances(before) - distances(after)).square()
    rows = (squared * mask[..., None, :]).sum(-1) * residues.local_shard(mask, -1)
    total = residues.all_gather(rows, -1, mask.shape[-1]).sum(-1)
    return (total / (mask.sum(-1).square() + 1e-10) + 1e-8).sqrt()
