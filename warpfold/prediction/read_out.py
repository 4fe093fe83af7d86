"""Make a prediction from a model's last pass: structure, confidences, optional outputs, some rows of z at a time."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from warpfold.batch import Batch
from warpfold.data.example.query_files import list_chains
from warpfold.data.example.raw_example import Assembly, RawExample
from warpfold.data.features.choose import SampleConfig, choose_templates
from warpfold.host import HostTensor, in_file
from warpfold.model import confidence
from warpfold.model.alphafold import AlphaFold, LastPass, Recycled
from warpfold.model.heads import distogram_breaks
from warpfold.ops.dispatch import uniform_loop
from warpfold.parallel.team import Team
from warpfold.prediction.notices import Notice
from warpfold.prediction.outputs import PassStructure, Prediction
from warpfold.prediction.request import FoldOptions
from warpfold.report.coverage import Coverage, entities_of, seen_rows


@dataclass(frozen=True)
class Prepared:
    """The input of the model: features of all passes, in host memory."""

    assembly: Assembly
    batch: Batch
    seed: int
    recycles: int
    ensemble: int
    seconds: float  # for making the features
    coverage: Coverage | None = None  # of the alignment
    guess: Tensor | None = None  # [N, 37, 3] angstrom: positions at the start of the first pass

    @property
    def sizes(self) -> tuple[int, int]:
        """The rows of the clustered alignment and the residues, without padding."""
        sequences, residues = self.batch["bert_mask"].shape[-2:]
        return sequences, residues


@dataclass(frozen=True)
class ReadOut:
    """Make predictions from a model's last passes; all processes of the team that share an example call it.

    A pass may be padded (`padded_shape`).  Predictions have the sizes of the example without padding.
    """

    model: AlphaFold
    team: Team

    def prediction(self, prepared: Prepared, folded: LastPass, options: FoldOptions) -> Prediction:
        """Make a prediction with its confidences."""
        model, (trunk, structure, _), assembly = self.model, folded, prepared.assembly
        asym_id, (sequences, length), padded = self._asym_id(prepared), prepared.sizes, trunk.single.shape[-2]
        single, activations, msa = trunk.single[:length], structure.single[:length], trunk.msa[:sequences]
        logits: dict[str, np.ndarray | None] = {}
        with model.computing():
            plddt_logits = model.plddt(activations)
            plddt = confidence.plddt(plddt_logits)
            errors = None
            if model.pae is not None:
                errors = confidence.predicted_errors(model.pae, trunk.pair, model.execution, asym_id, length)
            distances = self._distances(trunk.pair, length, options)
            if options.logits:
                logits = {"plddt": _numpy(plddt_logits), "resolved": _numpy(model.resolved(single))}
                logits["masked_msa"] = self._whole(model.masked_msa(msa), -2, padded, length)
                logits["distogram"] = distances.pop("logits")
                if model.pae is not None:
                    logits["pae"] = self._pae_logits(model.pae, trunk.pair, length)
        pairs, pair = None if errors is None else errors.chain_pair_iptm, trunk.pair
        # No operation can take a tensor in host memory whole.
        if options.representations and isinstance(trunk.pair, HostTensor):
            pair = torch.empty(trunk.pair.shape, dtype=trunk.pair.dtype)
            for part in model.execution.rows(trunk.pair.shape[-3]):
                pair[part] = model.execution.fetch(trunk.pair, part).to("cpu")
        return Prediction(
            name=assembly.name,
            sequence="".join(chain.sequence for chain in assembly.chains),
            positions=_numpy(structure.final_atom37[:length]),
            mask=_numpy(prepared.batch["atom37_atom_exists"]),
            plddt=_numpy(plddt),
            pae=None if errors is None else self._whole(errors.pae, -2, padded, length),
            max_pae=None if errors is None else errors.max_pae,
            ptm=None if errors is None else errors.ptm,
            single=_numpy(single) if options.representations else None,
            pair=self._whole(pair[:, :length], -3, padded, length) if options.representations else None,
            msa=self._whole(msa, -2, padded, length) if options.representations else None,
            structure_module=_numpy(activations) if options.representations else None,
            chain_ids=assembly.ids,
            asym_id=None if asym_id is None else asym_id.cpu().numpy().astype(np.int32),
            iptm=None if errors is None else errors.iptm,
            chain_pair_iptm=None if pairs is None else _numpy(pairs),
            coverage=prepared.coverage,
            logits={name: array for name, array in logits.items() if array is not None},
            **distances,
        )

    def of_pass(self, prepared: Prepared, recycled: Recycled, activations: Tensor) -> PassStructure:
        """Read out a pass before the last, from its recycled state and the structure module's activations."""
        model, errors, (_, length) = self.model, None, prepared.sizes
        with model.computing():
            plddt = confidence.plddt(model.plddt(activations[:length]))
            if model.pae is not None:
                asym_id = self._asym_id(prepared)
                errors = confidence.predicted_errors(model.pae, recycled.pair, model.execution, asym_id, length)
        tm_scores = (None, None) if errors is None else (errors.ptm, errors.iptm)
        return PassStructure(_numpy(recycled.positions[:length]), _numpy(plddt), *tm_scores)

    def _asym_id(self, prepared: Prepared) -> Tensor | None:
        """Return the chain of each residue of a complex, from 1; None for a single chain."""
        lengths = [chain.length for chain in prepared.assembly.chains]
        chain = torch.arange(1, len(lengths) + 1).repeat_interleave(torch.tensor(lengths))
        return chain.to(self.model.device) if len(lengths) > 1 else None

    def _whole(
        self, x: Tensor, axis: int, padded: int, length: int, dtype: torch.dtype = torch.float32
    ) -> np.ndarray | None:
        """Gather a tensor that is sharded along residues, without their padding; None on ranks other than 0."""
        gathered = self.team.gather_shards(x, axis, padded, dtype)
        return None if gathered is None else gathered.narrow(axis, 0, length).numpy()

    def _distances(self, z: Tensor, length: int, options: FoldOptions) -> dict[str, Any]:
        """Compute the requested outputs of the distogram head: logits, probabilities, contacts, and edges of the bins.

        Tensors of all pairs and bins are in temporary files.
        """
        if not (options.distogram or options.logits):
            return {}
        shape, padded = (z.shape[-3], length, self.model.config.heads.distogram_bins), z.shape[-2]
        edges, contacts = distogram_breaks(shape[-1]), torch.empty(shape[:-1], dtype=torch.float16)
        raw = _in_file(shape, torch.float32, "logits") if options.logits else None
        distogram = _in_file(shape, torch.float16, "--distogram") if options.distogram else None
        for rows, with_padding in self.model.distogram.in_slices(z):
            logits = with_padding[..., :length, :]
            if raw is not None:
                raw[rows] = logits.to("cpu")
            if distogram is not None:
                probabilities = logits.softmax(-1)
                distogram[rows] = probabilities.to("cpu", torch.float16)
                contacts[rows] = confidence.contact_probabilities(probabilities, edges).to("cpu", torch.float16)
        distances: dict[str, Any] = {} if raw is None else {"logits": self._gathered(raw, padded, length, "logits")}
        if distogram is not None:
            distances["distogram"] = self._gathered(distogram, padded, length, "--distogram")
            distances["contacts"] = self._whole(contacts, -2, padded, length, torch.float16)
            distances["distogram_edges"] = edges.numpy()
        return distances

    def _pae_logits(self, head: nn.Module, z: Tensor, length: int) -> np.ndarray | None:
        """Compute the logits of the aligned error, in a temporary file."""
        logits = _in_file((z.shape[-3], length, self.model.config.heads.pae_bins), torch.float32, "logits")
        for rows in uniform_loop(self.model.execution.rows(z.shape[-3])):
            logits[rows] = head(self.model.execution.fetch(z, rows)[..., :length, :]).to("cpu")
        return self._gathered(logits, z.shape[-2], length, "logits")

    def _gathered(self, x: Tensor, padded: int, length: int, asked_by: str) -> np.ndarray | None:
        """Gather a tensor in files, residues by residues by bins, from the ranks; None on ranks other than 0."""
        gathered_file = None
        if self.team.mesh.axial.size > 1 and self.team.is_example_leader:
            gathered_file = _in_file((padded, *x.shape[1:]), x.dtype, asked_by)
        gathered = self.team.gather_shards(x, -3, padded, out=gathered_file)
        return None if gathered is None else gathered[:length].numpy()


def _in_file(shape: tuple[int, ...], dtype: torch.dtype, asked_by: str) -> Tensor:
    return in_file(math.prod(shape), dtype, asked_by).view(shape)


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()


def details_of(prepared: Prepared, recycles: int, seconds: float, sample: SampleConfig | None) -> dict[str, Any]:
    """Return the details for the summary: how an example was folded, and the seconds it took.

    msa_depth: alignment rows that the model saw; msa_given: rows in the input.  Complexes also have the number of
    paired rows, the rows of each chain, and a warning about chains of which no row reached the model.
    sample: how templates are chosen; None for a model that takes none.
    """
    assembly, rows = prepared.assembly, seen_rows(prepared.batch)
    has_rows = entities_of(rows, assembly)
    depths = dict(zip(assembly.ids, has_rows.sum(0)[assembly.entity_id - 1].tolist()))
    distinct_chains = {chain.sequence: chain for chain in assembly.chains}.values()  # copies once
    complex_details: dict[str, Any] = {}
    if len(assembly.chains) > 1:
        complex_details = {
            "chain_depths": depths,
            "paired_rows": int((has_rows.sum(1) > 1).sum() - (has_rows.shape[1] > 1)),
        }
    if lost_ids := [id for id, chain in zip(assembly.ids, assembly.chains) if depths[id] < 2 <= chain.depth]:
        chains_text = f" for {list_chains(lost_ids)}" if len(assembly.chains) > 1 else ""
        complex_details["warnings"] = [Notice("rows_lost", {"of": chains_text}).record()]
    templates = [template.names[0] for template in assembly.fixed if template is not None and sample is not None]
    for chain in distinct_chains:
        if sample is not None and isinstance(chain, RawExample) and chain.templates is not None:
            indices = choose_templates(len(chain.templates), sample.max_templates, None)
            templates += chain.templates.choose(indices).names
    return {
        "seed": prepared.seed,
        "recycles": recycles,
        "ensemble": prepared.ensemble,
        "msa_depth": len(rows),
        "msa_given": sum(chain.depth for chain in distinct_chains),
        **complex_details,
        "templates": templates,
        "seconds": {"features": round(prepared.seconds, 3), "model": round(seconds, 3)},
    }
