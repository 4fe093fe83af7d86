"""Fold from Python: parameters stay loaded, sequences go in, predictions come out."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from warpfold.batch import to_tensors
from warpfold.data.example.raw_example import RawExample, Templates, from_sequence
from warpfold.data.features.choose import SampleConfig, choose_templates
from warpfold.data.features.make import make_features
from warpfold.data.formats import alignment as alphabet
from warpfold.data.formats.alignment import Alignment
from warpfold.data.formats.sequences import parse_a3m
from warpfold.errors import UserError
from warpfold.model import confidence
from warpfold.model.alphafold import AlphaFold, Output
from warpfold.model.heads import pae_breaks
from warpfold.model.weights import assumed_settings, data_settings, load_model
from warpfold.ops.dispatch import Kernels
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan, Precision, inference_plan
from warpfold.parallel.team import Team
from warpfold.run.outputs import Prediction
from warpfold.run.predict_templates import user_templates
from warpfold.settings import build

log = logging.getLogger("warpfold")


class Predictor:
    """A model ready to fold; make one with `load`, or from a model in memory.

    chunk: rows computed at a time; None chooses for each protein, so that long ones fit; 0 is all.  precision: of the
    trunk's activations.  sample: how the alignment is sampled, by default as AlphaFold2 does.  team: processes that
    share each protein; all call everything here, and only rank 0 gets the large arrays of a prediction.
    kernels: as `Plan.kernels`.
    Errors: UserError for a model that such a team cannot share.
    """

    def __init__(
        self,
        model: AlphaFold,
        device: str | torch.device = "cpu",
        chunk: int | None = None,
        precision: Precision = "fp32",
        sample: SampleConfig | None = None,
        team: Team | None = None,
        kernels: Kernels = "fast",
    ) -> None:
        self.team = team or Team()
        self.axial, self.branch = self.team.mesh.axial.size, self.team.mesh.branch.size
        if reason := Plan(axial=self.axial, branch=self.branch).unsupported_reason(model.config.evoformer.outer):
            raise UserError(reason)
        self.model = model.to(device).eval()
        self.device = torch.device(device)
        self.chunk, self.precision, self.kernels = chunk, precision, kernels
        self.sample = sample or SampleConfig()

    def fold(
        self,
        sequence: str,
        alignment: Alignment | Sequence[str] = (),
        templates: Templates | Sequence[str | Path] | None = None,
        *,
        name: str = "query",
        seed: int = 0,
        recycles: int | None = None,
        ensemble: int | None = None,
        representations: bool = True,
    ) -> Prediction:
        """Fold `sequence` (one letter per residue), given rows aligned to it as in A3M: lower case is an insertion.

        The query's own row may be among them or not.  templates: mmCIF or PDB files, FILE or FILE:CHAIN, aligned here;
        or `Templates` that are aligned already, best first.  seed: of the alignment's sampling and masking; the same
        seed gives the same prediction.  recycles, ensemble: default to the model's settings.  Without `representations`
        single, pair and msa of the result are None.
        Errors: UserError for letters that are not residues, rows that do not fit the sequence, templates that cannot
        be used, or more of them than the model takes.
        """
        alphabet.encode(sequence, name)  # an error for letters that are not residues
        query = sequence.upper()
        if not isinstance(alignment, Alignment):
            rows = "".join(f">alignment[{i}]\n{row}\n" for i, row in enumerate(alignment))
            alignment = parse_a3m(f">{name}\n{query}\n{rows}", name, query)
        if templates is not None:
            self.check_templates(len(templates))
            templates = templates if isinstance(templates, Templates) else user_templates(query, templates)[0]
        raw = replace(from_sequence(query, [alignment], name), templates=templates)
        return self.fold_example(raw, seed=seed, recycles=recycles, ensemble=ensemble, representations=representations)

    def check_templates(self, count: int) -> None:
        """Raise UserError unless the model takes `count` templates."""
        if count and self.model.templates is None:
            raise UserError(
                "these parameters have no template parts (of AlphaFold2's, model_3 to model_5 have none); "
                "give others, or no templates"
            )
        if count > self.sample.max_templates:
            most = self.sample.max_templates
            raise UserError(f"templates given: {count}, the model takes {most}; leave some out")

    def fold_example(
        self,
        raw: RawExample,
        *,
        seed: int = 0,
        recycles: int | None = None,
        ensemble: int | None = None,
        representations: bool = True,
    ) -> Prediction:
        """Fold an example that is encoded already, as `fold` does; coordinates that it has are ignored."""
        start = time.perf_counter()
        settings = self.model.config
        recycles = settings.recycles if recycles is None else recycles
        ensemble = settings.ensemble if ensemble is None else ensemble
        if recycles < 0 or ensemble < 1:
            raise UserError(f"recycles = {recycles}, ensemble = {ensemble}: at least 0 and 1 are needed")
        raw = replace(raw, positions=None, mask=None)
        features = make_features(raw, self.sample, seed, ("predict",), passes=(recycles + 1) * ensemble)
        batch = to_tensors(features, self.device)
        plan = inference_plan(batch, self.precision, self.chunk)
        plan = replace(plan, axial=self.axial, branch=self.branch, kernels=self.kernels)
        Execution(plan, self.team.mesh).bind(self.model)
        ready = time.perf_counter()

        self.model.config = replace(settings, ensemble=ensemble)
        try:
            with torch.no_grad():
                output = self.model(batch, recycles)
        finally:
            self.model.config = settings
        prediction = self._prediction(raw, output, batch["atom37_atom_exists"], representations)
        used: list[str] = []
        if raw.templates is not None and self.model.templates is not None:
            chosen = choose_templates(len(raw.templates), self.sample.max_templates, None)
            used = list(raw.templates.choose(chosen).names)
        details = {
            "seed": seed,
            "recycles": recycles,
            "ensemble": ensemble,
            "msa_depth": len(raw.msa),
            "templates": used,
            "seconds": {"features": round(ready - start, 3), "model": round(time.perf_counter() - ready, 3)},
        }
        return replace(prediction, details=details)

    def _prediction(self, raw: RawExample, output: Output, atoms: Tensor, representations: bool) -> Prediction:
        def whole(x: Tensor, axis: int) -> np.ndarray | None:
            """Collect a tensor that is sharded along residues; None on ranks other than 0."""
            found = self.team.gather_shards(x.float(), axis, len(raw.aatype))
            return None if found is None else found.numpy()

        pae = ptm = max_pae = None
        if output.pae_logits is not None:
            breaks = pae_breaks(output.pae_logits.shape[-1])
            pae, max_pae = whole(confidence.pae(output.pae_logits, breaks), -2), confidence.max_pae(breaks)
            ptm = float(confidence.ptm(output.pae_logits, breaks, residues=self.model.residues))
        return Prediction(
            name=raw.name,
            sequence=raw.sequence,
            positions=_numpy(output.structure.final_atom37),
            mask=_numpy(atoms),
            plddt=_numpy(confidence.plddt(output.plddt_logits)),
            pae=pae,
            max_pae=max_pae,
            ptm=ptm,
            single=_numpy(output.single) if representations else None,
            pair=whole(output.pair, -3) if representations else None,
            msa=whole(output.msa, -2) if representations else None,
        )


def load(
    path: Path | str,
    device: str | torch.device | None = None,
    chunk: int | None = None,
    precision: Precision = "fp32",
    sample: SampleConfig | None = None,
    team: Team | None = None,
    kernels: Kernels = "fast",
) -> Predictor:
    """Load parameters from a file: WarpFold's safetensors or DeepMind's params_model_*.npz (monomer, ptm).

    device: by default the first GPU if there is one.  sample: by default as the parameters were trained; for
    DeepMind's this follows from their arrays and name (`model.weights.data_settings`), and what has to be assumed is
    logged.  The rest is as in `Predictor`.
    Errors: UserError for a file that is neither, or whose arrays do not fit, naming all of them.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(path)
    if sample is None:
        sample = build(SampleConfig, data_settings(path), str(path))
        if (assumed := assumed_settings(path)) and (team is None or team.is_rank_zero):
            log.warning("%s", assumed)
    return Predictor(model, device, chunk, precision, sample, team, kernels)


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()
