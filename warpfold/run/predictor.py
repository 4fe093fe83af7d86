"""Fold from Python: parameters stay loaded, sequences go in, predictions come out."""

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from warpfold.batch import Batch, stack, to_tensors
from warpfold.data.example.assembly import Assembly
from warpfold.data.example.raw_example import RawExample, Templates, from_sequence
from warpfold.data.features.choose import SampleConfig, choose_templates
from warpfold.data.features.make import make_features
from warpfold.engine.packed import PackedWeights
from warpfold.errors import UserError
from warpfold.host import HostTensor, in_file
from warpfold.memory import release_memory
from warpfold.model import confidence
from warpfold.model.alphafold import AlphaFold, LastPass
from warpfold.model.heads import distogram_breaks
from warpfold.model.weights import assumed_settings, data_settings, load_model
from warpfold.ops.dispatch import Kernels
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import DTYPES, Plan, Precision
from warpfold.parallel.team import Team
from warpfold.run.coverage import Coverage, coverage_of
from warpfold.run.fold_input import Rows, as_alignment, complex_of, depths_of, on_chains, without_atoms
from warpfold.run.outputs import Prediction
from warpfold.run.params import check_templates
from warpfold.run.planning import FoldPlan, FoldPlanner, sizes_of_batch
from warpfold.run.predict_templates import user_templates
from warpfold.settings import build

log = logging.getLogger("warpfold")


@dataclass(frozen=True)
class Recycling:
    """When recycling ends before all passes are done; it changes what is predicted.

    tolerance: angstrom, as `ModelConfig.recycle_tolerance`; None: the model's own.
    long: a protein of more than so many residues has at most so many passes after the first.
    Errors: UserError for what is not at least 0.
    """

    tolerance: float | None = None
    long: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.tolerance is not None and not 0 <= self.tolerance < math.inf:
            raise UserError(f"--recycle-tolerance {self.tolerance:g}: angstrom, at least 0")
        if self.long is not None and min(self.long) < 0:
            raise UserError(f"--max-recycles {self.long[0]}:{self.long[1]}: two numbers of at least 0")

    def at_most(self, recycles: int, residues: int) -> int:
        """Return how many of so many passes after the first a protein gets."""
        return recycles if self.long is None or residues <= self.long[0] else min(recycles, self.long[1])


@dataclass(frozen=True)
class Prepared:
    """An example as the model gets it: features in host memory, those of all passes."""

    assembly: Assembly
    batch: Batch
    seed: int
    recycles: int
    ensemble: int
    seconds: float  # that it took
    coverage: Coverage | None = None  # of the alignment


class Predictor:
    """A model ready to fold; make one with `load`, or from a model in memory.

    How each protein is folded is chosen for what is free on the device at that moment (run/planning.py), unless it is
    given: chunk: rows computed at a time, 0 for all.  offload: whether z lies in host memory.  memory: bytes that may
    be used on the device at most.
    precision: of the trunk's activations.  sample: how the alignment is sampled, by default as AlphaFold2 does.  team:
    processes that share each protein; all call everything here, and only rank 0 gets the large arrays of a prediction.
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
        offload: bool | None = None,
        memory: int | None = None,
    ) -> None:
        self.team = team or Team()
        axial, branch = self.team.mesh.axial.size, self.team.mesh.branch.size
        if reason := Plan(axial=axial, branch=branch).unsupported_reason(model.config.evoformer.outer):
            raise UserError(reason)
        self.model = model.to(device).eval()
        PackedWeights(model, DTYPES[precision])
        self.device = torch.device(device)
        fixed: dict[str, Any] = {"precision": precision, "kernels": kernels}
        fixed |= {} if chunk is None else {"chunk": chunk or None}
        fixed |= {} if offload is None else {"offload": offload}
        self.planner = FoldPlanner(model.config, self.device, fixed, memory, self.team)
        self.sample = sample or SampleConfig()
        self.recycling = Recycling()

    def fold(
        self,
        sequence: str | Sequence[str] | Mapping[str, str],
        alignment: Rows | Sequence[Rows] | Mapping[str, Rows] = (),
        templates: Templates | Sequence[str | Path] | None = None,
        *,
        name: str = "query",
        seed: int = 0,
        recycles: int | None = None,
        ensemble: int | None = None,
        representations: bool = True,
        distogram: bool = False,
    ) -> Prediction:
        """Fold `sequence` (one letter per residue), given rows aligned to it as in A3M: lower case is an insertion.

        A complex: the sequences of its chains, which are then A, B and so on, or chain -> sequence; and likewise their
        alignments, or chain -> alignment of those that have one.  Rows are paired by the organisms that an
        `Alignment`'s names give (docs/multimer.md).
        The query's own row may be among them or not.  templates: mmCIF or PDB files, FILE or FILE:CHAIN, aligned here
        (of a complex to the chains that they fit, or ID=FILE for chain ID); or, for a single sequence, `Templates`
        that are aligned already, best first.  seed: of the alignment's sampling and masking; the same seed gives the
        same prediction.  recycles, ensemble: default to the model's settings.  Without `representations` single, pair
        and msa of the result are None, and without `distogram` contacts, distogram and its edges.
        Errors: UserError for letters that are not residues, rows that do not fit the sequence, templates that cannot
        be used, or more of them than the model takes.
        """
        example: RawExample | Assembly
        if isinstance(sequence, str):
            rows = as_alignment(sequence, cast(Rows, alignment), name)
            if templates is not None:
                self.check_templates(len(templates))
                if not isinstance(templates, Templates):
                    templates = user_templates(sequence.upper(), templates)[0]
            example = replace(from_sequence(sequence.upper(), [rows], name), templates=templates)
        else:
            if isinstance(templates, Templates):
                raise UserError("templates of a complex: give their files, [ID=]FILE or [ID=]FILE:CHAIN")
            self._check_complex(name)
            example = complex_of(sequence, cast(Sequence[Rows] | Mapping[str, Rows], alignment), name)
            if templates:
                example = on_chains(example, list(map(str, templates)), self.check_templates)
        prepared = self.prepare(example, seed=seed, recycles=recycles, ensemble=ensemble)
        return self.compute(prepared, representations, distogram)

    def check_templates(self, count: int) -> None:
        """Raise UserError unless the model takes `count` templates."""
        check_templates(self.model.config, self.sample, count)

    def fold_example(
        self,
        example: RawExample | Assembly,
        *,
        seed: int = 0,
        recycles: int | None = None,
        ensemble: int | None = None,
        representations: bool = True,
        distogram: bool = False,
    ) -> Prediction:
        """Fold an example that is encoded already, as `fold` does; coordinates that it has are ignored."""
        prepared = self.prepare(example, seed=seed, recycles=recycles, ensemble=ensemble)
        return self.compute(prepared, representations, distogram)

    def prepare(
        self, example: RawExample | Assembly, *, seed: int = 0, recycles: int | None = None, ensemble: int | None = None
    ) -> "Prepared":
        """Make the features of an example, in host memory; a thread may do it while another example computes."""
        start, settings = time.perf_counter(), self.model.config
        recycles = settings.recycles if recycles is None else recycles
        ensemble = settings.ensemble if ensemble is None else ensemble
        if recycles < 0 or ensemble < 1:
            raise UserError(f"recycles = {recycles}, ensemble = {ensemble}: at least 0 and 1 are needed")
        if isinstance(example, Assembly):
            self._check_complex(example.name)
            assembly = replace(example, chains=tuple(map(without_atoms, example.chains)))
        else:
            example = replace(example, positions=None, mask=None)
            assembly = Assembly(example.name, ("A",), (example,))
        recycles = self.recycling.at_most(recycles, assembly.length)
        given = example if isinstance(example, RawExample) and settings.multimer is None else assembly
        features = make_features(given, self.sample, seed, ("predict",), passes=(recycles + 1) * ensemble)
        batch = to_tensors(features, widen=False)
        seconds = time.perf_counter() - start
        return Prepared(assembly, batch, seed, recycles, ensemble, seconds, coverage_of(assembly))

    def compute(self, prepared: "Prepared", representations: bool = True, distogram: bool = False) -> Prediction:
        """Run the model on features as the plan says, and say how sure it is.

        Where memory runs out, the next tighter plan is tried.
        Errors: UserError where nothing fits, or even the tightest plan runs out.
        """
        start, planned = time.perf_counter(), self.plan(prepared, representations)
        while True:
            try:
                recycles, prediction = self._fold(prepared, planned.plan, representations, distogram)
                break
            except (RuntimeError, MemoryError) as error:
                planned = self.planner.after(planned, error)
            release_memory(self.device)  # the error, and what it held, is gone
        details = self._details(prepared, recycles, time.perf_counter() - start) | {"plan": dict(planned.details)}
        return replace(prediction, details=details)

    def compute_together(
        self, several: Sequence["Prepared"], representations: bool = True, distogram: bool = False
    ) -> list[Prediction]:
        """Run the model once on single chains, padded to the largest; each has the result that it has alone.

        To rounding: products of other sizes may sum in another order.
        Errors: ValueError for complexes, for other recycles or ensembles, where recycling may end early, and where z
        must lie in host memory.
        """
        start, first, settings = time.perf_counter(), several[0], self.model.config
        if settings.multimer is not None or self._tolerance is not None:
            raise ValueError("complexes, and recycling that ends early, cannot share a pass")
        if len({(one.recycles, one.ensemble) for one in several}) > 1:
            raise ValueError("what shares a pass needs the same recycles and ensemble")
        batch = stack([one.batch for one in several])
        planned = self.plan(replace(first, batch=batch), representations)
        if planned.plan.offload:
            raise ValueError("with z in host memory each is folded alone")
        found = []
        with self._running(planned.plan, first.ensemble):
            folded = self.model.fold(batch, first.recycles)
            for one, part in zip(several, folded.unbind()):
                alone = part.without_padding(*one.batch["msa_mask"].shape[-2:])
                found.append(self._prediction(one, alone, representations, distogram))
        seconds = (time.perf_counter() - start) / len(several)
        more = {"together": len(several), "plan": dict(planned.details)}
        details = [self._details(one, folded.recycles, seconds) | more for one in several]
        return [replace(prediction, details=one) for prediction, one in zip(found, details)]

    def _details(self, prepared: "Prepared", recycles: int, seconds: float) -> dict[str, Any]:
        """Return what the summary says of how an example was folded, in so many seconds."""
        return {
            "seed": prepared.seed,
            "recycles": recycles,
            "ensemble": prepared.ensemble,
            **depths_of(prepared.assembly),
            "templates": self._used_templates(prepared.assembly),
            "seconds": {"features": round(prepared.seconds, 3), "model": round(seconds, 3)},
        }

    def _fold(self, prepared: "Prepared", plan: Plan, representations: bool, distogram: bool) -> tuple[int, Prediction]:
        with self._running(plan, prepared.ensemble):
            folded = self.model.fold(prepared.batch, prepared.recycles)
            return folded.recycles, self._prediction(prepared, folded, representations, distogram)

    @property
    def _tolerance(self) -> float | None:
        own = self.model.config.recycle_tolerance
        return own if self.recycling.tolerance is None else self.recycling.tolerance

    @contextmanager
    def _running(self, plan: Plan, ensemble: int) -> Iterator[None]:
        """Have the model run as a plan says, with the settings of a prediction, and without gradients."""
        Execution(plan, self.team.mesh).bind(self.model)
        settings = self.model.config
        self.model.config = replace(settings, ensemble=ensemble, recycle_tolerance=self._tolerance)
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.config = settings

    def plan(self, prepared: "Prepared", representations: bool = True) -> FoldPlan:
        """Return how an example is folded now.  Errors: UserError where nothing fits, saying what would."""
        sizes = sizes_of_batch(prepared.batch)
        return self.planner.choose(sizes, prepared.recycles, prepared.ensemble, representations)

    def _check_complex(self, name: str) -> None:
        """Raise UserError unless the model folds complexes."""
        if self.model.config.multimer is None:
            raise UserError(
                f"{name}: a complex, but these parameters are for single chains; give AlphaFold-Multimer's "
                "(params_model_*_multimer_*.npz), or fold each chain alone"
            )

    def _used_templates(self, assembly: Assembly) -> list[str]:
        """Return the names of the templates that the model sees, chain by chain, copies once."""
        used: list[str] = []
        entities = {chain.sequence: chain for chain in assembly.chains}
        for chain in entities.values() if self.model.templates is not None else ():
            if isinstance(chain, RawExample) and chain.templates is not None:
                chosen = choose_templates(len(chain.templates), self.sample.max_templates, None)
                used += chain.templates.choose(chosen).names
        return used

    def _prediction(self, prepared: Prepared, folded: LastPass, representations: bool, distogram: bool) -> Prediction:
        """Return a prediction, and how sure the model is of it; z is gone through some rows at a time."""
        model, (r, structure, _), assembly = self.model, folded, prepared.assembly
        several = len(assembly.chains) > 1
        asym_id = prepared.batch["asym_id"].to(self.device, torch.int64) if several else None
        with model.computing():
            plddt = confidence.plddt(model.plddt(structure.single))
            errors = None
            if model.pae is not None:
                errors = confidence.predicted_errors(model.pae, r.pair, model.execution, asym_id)
            distances = self._distogram(r.pair, assembly.length) if distogram else {}
        pairs = None if errors is None else errors.chain_pair_iptm
        return Prediction(
            name=assembly.name,
            sequence="".join(chain.sequence for chain in assembly.chains),
            positions=_numpy(structure.final_atom37),
            mask=_numpy(prepared.batch["atom37_atom_exists"]),
            plddt=_numpy(plddt),
            pae=None if errors is None else self._whole(errors.pae, -2, assembly.length),
            max_pae=None if errors is None else errors.max_pae,
            ptm=None if errors is None else errors.ptm,
            single=_numpy(r.single) if representations else None,
            pair=self._whole(self._in_main_memory(r.pair), -3, assembly.length) if representations else None,
            msa=self._whole(r.msa, -2, assembly.length) if representations else None,
            chain_ids=assembly.ids,
            asym_id=None if asym_id is None else asym_id.cpu().numpy().astype(np.int32),
            iptm=None if errors is None else errors.iptm,
            chain_pair_iptm=None if pairs is None else _numpy(pairs),
            coverage=prepared.coverage,
            **distances,
        )

    def _whole(self, x: Tensor, axis: int, length: int, dtype: torch.dtype = torch.float32) -> np.ndarray | None:
        """Collect a tensor that is sharded along residues; None on ranks other than 0."""
        found = self.team.gather_shards(x, axis, length, dtype)
        return None if found is None else found.numpy()

    def _in_main_memory(self, z: Tensor) -> Tensor:
        """Return z as an ordinary tensor where no operation can take it whole."""
        if not isinstance(z, HostTensor):
            return z
        found = torch.empty(z.shape, dtype=z.dtype)
        for rows in self.model.execution.rows(z.shape[-3]):
            found[rows] = self.model.execution.fetch(z, rows).to("cpu")
        return found

    def _distogram(self, z: Tensor, length: int) -> dict[str, Any]:
        """Return probabilities of distances, which lie in a temporary file, of contacts, and the edges of the bins."""
        head, shape = self.model.distogram, (*z.shape[:-1], self.model.config.heads.distogram_bins)
        edges, of_contacts = distogram_breaks(shape[-1]), torch.empty(shape[:-1], dtype=torch.float16)
        found = in_file(math.prod(shape), torch.float16, "--distogram").view(shape)
        for rows, logits in head.in_slices(z):
            probabilities = logits.softmax(-1)
            found[rows] = probabilities.to("cpu", torch.float16)
            of_contacts[rows] = confidence.contact_probabilities(probabilities, edges).to("cpu", torch.float16)
        whole = None
        if self.team.mesh.axial.size > 1 and self.team.is_example_leader:
            whole = in_file(length * length * shape[-1], torch.float16, "--distogram").view(length, *shape[1:])
        gathered = self.team.gather_shards(found, -3, length, out=whole)
        return {
            "distogram": None if gathered is None else gathered.numpy(),
            "contacts": self._whole(of_contacts, -2, length, torch.float16),
            "distogram_edges": edges.numpy(),
        }


def load(
    path: Path | str,
    device: str | torch.device | None = None,
    chunk: int | None = None,
    precision: Precision = "fp32",
    sample: SampleConfig | None = None,
    team: Team | None = None,
    kernels: Kernels = "fast",
    offload: bool | None = None,
    memory: int | None = None,
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
    return Predictor(model, device, chunk, precision, sample, team, kernels, offload, memory)


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()
