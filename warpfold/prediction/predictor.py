"""Fold from Python: parameters stay loaded, sequences go in, predictions come out."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import numpy as np
import torch

from warpfold import arguments
from warpfold.arguments import Memory, PathLike, Seed, decides
from warpfold.batch import Batch, stack, to_tensors
from warpfold.data.example.guess import GuessLike, as_guess, guess_positions, own_template
from warpfold.data.example.query_files import Complex
from warpfold.data.example.raw_example import Assembly, Example, RawExample
from warpfold.data.features.choose import SampleConfig
from warpfold.data.features.make import concatenate_chains, make_features, pad_batch
from warpfold.data.features.msa import query_weight
from warpfold.device import caveats, device_of
from warpfold.engine.gradient import Loss, Through, gradient_by_shares
from warpfold.engine.packed import PackedWeights
from warpfold.errors import UserError, called
from warpfold.memory import release_memory
from warpfold.model.alphafold import AlphaFold, Recycled
from warpfold.model.soft import FREE, QueryPlace, soft_chains
from warpfold.model.weights.files import assumed_settings, data_settings, load_model
from warpfold.ops.dispatch import Kernels
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import DTYPES, Plan, PredictionPrecision, log_precision, resolve_precision
from warpfold.parallel.team import Team, team_of
from warpfold.prediction import request
from warpfold.prediction.folding import FoldItem, FoldOutcome, fold_groups, in_groups
from warpfold.prediction.outputs import PassStructure, Prediction
from warpfold.prediction.params import MULTIMERS, Params
from warpfold.prediction.queries import (
    Alignments,
    FetchAlignments,
    Query,
    Sequences,
    TemplatesLike,
    add_templates,
    check_guess,
    each_given,
    fetching,
    query_of,
    with_guess,
)
from warpfold.prediction.read_out import Prepared, ReadOut, details_of
from warpfold.progress import Progress
from warpfold.report.coverage import coverage_of, seen_rows
from warpfold.scoring.score_table import row_of
from warpfold.settings import build
from warpfold.training.planning import FoldPlan, FoldPlanner, sizes_of_batch

if TYPE_CHECKING:
    from warpfold.data.search.server import AlignmentServer

log = logging.getLogger("warpfold")
DEFAULTS = request.FoldOptions()
STRUCTURE_ONLY = request.FoldOptions(representations=False)
MAX_GRAPHS = 16  # padded lengths with a recorded trunk; each takes some tens of MB on the device
KEY = ("predict",)  # of the random draws for a prediction's features
CHECKED = arguments.checked(msa="alignment", template="templates", fixed_chains="fixed", strict='kernels="strict"')


@dataclass(frozen=True, repr=False)
class Gradient:
    """A loss of a prediction, and its gradient with respect to the logits of the sequence.

    terms: the terms of the loss by name, if it has any.  grad: in the shape of the logits, [N, 20] or by chain; 0 for
    fixed letters.  prediction: of the last pass, with the most likely letters.
    """

    loss: float
    terms: dict[str, float]
    grad: np.ndarray | dict[str, np.ndarray]
    prediction: Prediction

    def __repr__(self) -> str:
        return f"<Gradient: loss {self.loss:.4g}, {self.prediction!r}>"


@dataclass(frozen=True, repr=False)
class FoldResult:
    """The prediction of a protein, or the error; both are empty on ranks that do not own the result."""

    name: str
    prediction: Prediction | None = None
    error: str = ""

    def __repr__(self) -> str:
        return f"<FoldResult {self.name}: {self.error or self.prediction!r}>"


class Predictor:
    """A model that is ready to fold; create one with `load`, or from a model in memory.

    The plan for each protein depends on the free memory of the device at that moment (training/planning.py).  These
    arguments fix parts of it.  chunk: rows computed at a time, 0 for all.  offload: keep z in host memory.  memory: the
    bytes of the device that may be used.  graphs: record the trunk as a CUDA graph, which serves all recycles and all
    proteins of a padded length, if it fits.
    precision: of the trunk's activations, as in `resolve_precision`.  sample: how the alignment is sampled, by default
    as in AlphaFold2.  team: the processes that share each protein.  All call every method, and only rank 0 gets the
    large arrays of a prediction.
    kernels: as `Plan.kernels`.
    Errors: UserError for a model that the team cannot share.
    """

    @CHECKED
    def __init__(
        self,
        model: AlphaFold,
        device: str | torch.device = "cpu",
        chunk: request.Chunk = None,
        precision: PredictionPrecision = request.DEFAULT_PRECISION,
        sample: SampleConfig | None = None,
        team: Team | None = None,
        kernels: Kernels = "fast",
        offload: request.Offload = None,
        memory: Memory = None,
        graphs: request.ReplayGraphs = True,
    ) -> None:
        if not isinstance(model, AlphaFold):
            model_text = arguments.shown(model)
            raise arguments.WrongArgument(f"model = {model_text}: an AlphaFold is needed. Load files with load(FILE).")
        self.team = team_of(team)
        axial, branch = self.team.mesh.axial.size, self.team.mesh.branch.size
        if reason := Plan(axial=axial, branch=branch).unsupported_reason(model.config.evoformer.outer):
            raise UserError(reason)
        arguments.one_of("precision", precision, ("auto", *DTYPES))
        self._asked_precision = precision
        fixed_settings: dict[str, Any] = {"kernels": arguments.one_of("kernels", kernels, get_args(Kernels))}
        if chunk is not None:
            fixed_settings["chunk"] = chunk or None
        if offload is not None:
            fixed_settings["offload"] = offload
        size = None if memory is None else arguments.parse_memory(memory)
        self._fixed, self._memory, self._graphs = fixed_settings, size, graphs
        self.model = model
        self.sample = sample or SampleConfig()
        self.recycling = request.Recycling()
        self.dropout = False  # of the trunk, drawn by a prediction's seed
        self.chain_gap: int | None = None  # lets a single-chain model fold complexes
        self.pad_to: int | None = None  # as `Plan.pad_to`
        self.msa_server: AlignmentServer | None = None
        self.to(device)
        for caveat in caveats(self.precision, self.device) if self.team.is_rank_zero else ():
            log.warning("%s", caveat)

    @CHECKED
    def to(self, device: str | torch.device) -> "Predictor":
        """Move the model to another device, and return the predictor."""
        self.device = torch.device(device_of(device))
        self.precision = self._fixed["precision"] = resolve_precision(self._asked_precision, self.device)
        log_precision(self._asked_precision, self.precision, self.device)
        requested_plan = Plan(precision=self.precision, offload=self._fixed.get("offload", False))
        if reason := requested_plan.unsupported_on(self.device.type):
            raise UserError(reason)
        self.model.to(self.device).eval()
        PackedWeights(self.model, DTYPES[self.precision])
        self.planner = FoldPlanner(self.model.config, self.device, self._fixed, self._memory, self.team, self._graphs)
        return self

    def __repr__(self) -> str:
        kind = "single chains" if self.model.config.multimer is None else "complexes"
        count = sum(parameter.numel() for parameter in self.model.parameters())
        return f"<Predictor of {kind}: {count:,} parameters, {self.precision} on {self.device}>"

    @CHECKED
    def fold(
        self,
        sequence: Sequences,
        alignment: Alignments = (),
        templates: TemplatesLike = None,
        *,
        name: str = "query",
        seed: Seed = 0,
        recycles: request.Recycles = None,
        ensemble: request.Ensemble = None,
        representations: request.Representations = True,
        distogram: request.Distogram = False,
        logits: request.Logits = False,
        save_recycles: request.SaveRecycles = False,
        hits: request.Hits = None,
        template_structures: request.TemplateStructures = None,
        max_template_date: request.MaxTemplateDate = None,
        msa_server: request.MsaServer = None,
        msa_cache: request.MsaCache = None,
        initial_guess: request.InitialGuess = None,
        fixed: request.FixedChains = None,
    ) -> Prediction:
        """Fold `sequence` (one letter per residue) with an alignment: rows as in A3M, a file, or an `Alignment`.

        For a complex, pass the sequences of its chains, which become A, B and so on, or chain -> sequence.  Pass its
        alignments in the same way, as chain -> alignment for some chains, or as files, each of which belongs to the
        chain in its first row.  Rows are paired by the organisms in their names (docs/howto/fold_complexes.md).  Lower
        case letters in rows are insertions; the row of the query itself is optional.

        templates: mmCIF or PDB files, FILE or FILE:CHAIN, which are aligned here; in a complex to the chains that they
        fit, or ID=FILE for chain ID.  For a single sequence also `Templates` that are aligned already, best first.
        hits: files of HHsearch or hmmsearch, with the folder of the structures that they refer to.
        msa_server: the address of an alignment server, to which sequences without an alignment are sent.  Without it,
        here or in `load`, nothing is sent.  msa_cache: the folder for its answers, `alignments` by default.
        seed: for sampling and masking of the alignment; the same seed gives the same prediction.
        recycles, ensemble: default to the model's settings.
        representations: keep single, pair and msa, which are None otherwise.  distogram: keep contacts, the distogram
        and its edges.  logits: keep the logits of the heads.  save_recycles: keep the structures of the passes before
        the last.
        initial_guess: the structure from which the first pass starts, an mmCIF or PDB file, or chain -> (positions
        [N, 37, 3] in angstrom, mask [N, 37]).  fixed: chains that keep this structure, as their own templates
        (docs/howto/design.md).
        Errors: UserError for letters that are not residues, rows that do not fit the sequence, templates that cannot
        be used, more templates than the model takes, an initial guess of other chains, and arguments of wrong types.
        """
        options = request.FoldOptions(recycles, ensemble, representations, distogram, logits, save_recycles)
        fetch = self._fetching(msa_server, msa_cache)
        fixed_chains = request.parse_chains(fixed)
        check_guess(initial_guess, fixed_chains, [self.as_params])
        query = query_of(sequence, alignment, arguments.text("name", name), fetch, fixed_chains)
        query = self.with_templates(query, templates, hits, template_structures, max_template_date)
        query = with_guess(query, initial_guess, fixed_chains)
        prepared = self.prepare(
            query.assembly,
            seed=seed,
            recycles=recycles,
            ensemble=ensemble,
            initial_guess=query.guess,
            fixed=query.fixed,
        )
        return with_warnings(query, self.compute(prepared, options))

    def _fetching(self, server: request.MsaServer, cache: request.MsaCache) -> FetchAlignments | None:
        """Return a function that fetches alignments from the server of this call or of `load`; None without one."""
        alignment_server = request.server_of(server, cache, Path("alignments")) or self.msa_server
        return None if alignment_server is None else fetching(alignment_server, self.check)

    def with_templates(
        self,
        query: Query,
        templates: TemplatesLike = None,
        hits: request.Hits = None,
        template_structures: request.TemplateStructures = None,
        max_template_date: request.MaxTemplateDate = None,
    ) -> Query:
        """Add templates to a query.  Errors: UserError as in `fold`, and for a query that the model cannot fold."""
        if query.is_complex:
            self._check_complex(query.name)
        return add_templates(query, self.as_params, templates, hits, template_structures, max_template_date)

    @CHECKED
    def fold_many(
        self,
        sequences: Mapping[str, Sequences] | Sequence[Sequences] | PathLike,
        alignments: Any = (),
        templates: Any = (),
        *,
        seed: Seed = 0,
        recycles: request.Recycles = None,
        ensemble: request.Ensemble = None,
        representations: request.Representations = False,
        distogram: request.Distogram = False,
        logits: request.Logits = False,
        save_recycles: request.SaveRecycles = False,
        batch: request.Batch = "auto",
        msa_server: request.MsaServer = None,
        msa_cache: request.MsaCache = None,
        initial_guess: Any = None,
        fixed: request.FixedChains = None,
        progress: Progress | None = None,
    ) -> list[FoldResult]:
        """Fold many proteins and complexes; return a result for each, in order, including those that failed.

        sequences: a list, or name -> sequence, each as in `fold`; or a file or folder as for `warpfold predict`, "-"
        for standard input, or a list of these.  alignments, templates: a list, or name -> the argument of `fold`; with
        files, paths.  msa_server, msa_cache, fixed: as in `fold`.  initial_guess: a list, or name -> the argument of
        `fold`; or a file for all queries, a folder of NAME.pdb or NAME.cif, or "self": the query's own structure.
        The most expensive proteins are folded first.  Short ones share a pass of the model.  batch: the largest number
        in a pass; "auto": share where measurements showed a gain.  Features of the next proteins are made while the
        model computes.  progress: called with the finished number, the total, and the current name.
        Errors: UserError for arguments of wrong types; the error of one protein is in its result.
        """
        options = request.FoldOptions(recycles, ensemble, representations, distogram, logits, save_recycles)
        fetch = self._fetching(msa_server, msa_cache)
        queries = self._queries(sequences, alignments, templates, fetch, initial_guess, fixed)
        results: dict[str, FoldResult] = {}

        def record(name: str, prediction: Prediction | None, error: str) -> None:
            results[name] = FoldResult(name, prediction, error)

        self._fold_each(queries, options, seed, batch, record, progress)
        return [results[name] for name in queries]

    @CHECKED
    def score_designs(
        self,
        designs: Mapping[str, Sequences] | Sequence[Sequences] | PathLike,
        alignments: Any = (),
        templates: Any = (),
        *,
        seed: Seed = 0,
        recycles: request.Recycles = None,
        ensemble: request.Ensemble = None,
        batch: request.Batch = "auto",
        msa_server: request.MsaServer = None,
        msa_cache: request.MsaCache = None,
        initial_guess: Any = None,
        fixed: request.FixedChains = None,
        progress: Progress | None = None,
    ) -> list[dict[str, Any]]:
        """Fold designs and return a row of scores for each, in order, without keeping structures.

        designs: as the sequences of `fold_many`, TARGET:BINDER for example.  The other arguments are the same as there.
        A row has the columns of `scores.csv` (docs/reference/outputs.md), None for unknown values, and `error`: the
        reason why a design could not be folded, or "".  Use `warpfold.predict` with keep= to keep structures of some
        designs, and for runs that survive a kill.
        Errors: UserError for arguments of wrong types.
        """
        fetch = self._fetching(msa_server, msa_cache)
        queries = self._queries(designs, alignments, templates, fetch, initial_guess, fixed)
        rows: dict[str, dict[str, Any]] = {}

        def record(name: str, prediction: Prediction | None, error: str) -> None:
            """Build the row of a design."""
            entry: dict[str, Any] = {"name": name, "model": self.as_params.name, "seed": seed}
            design = queries[name]
            if prediction is not None and isinstance(design, Query):
                entry |= {"length": len(prediction.sequence), **prediction.confidences()}
                if design.is_complex or design.designed is not None:
                    entry["scores"] = prediction.design_scores(design.fixed, design.designed)
            rows[name] = row_of(entry) | {"error": error}

        self._fold_each(queries, request.FoldOptions(recycles, ensemble, False), seed, batch, record, progress)
        return [rows[name] for name in queries]

    def _queries(
        self,
        sequences: Mapping[str, Sequences] | Sequence[Sequences] | PathLike,
        alignments: Any,
        templates: Any,
        fetch: FetchAlignments | None,
        initial_guess: Any,
        fixed: request.FixedChains,
    ) -> dict[str, Query | UserError]:
        """Read the queries of `fold_many` by name; a query that cannot be folded becomes its error.

        Errors: UserError for guesses and fixed chains that the model cannot take.
        """
        is_multimer, chains = self.model.config.multimer is not None, request.parse_chains(fixed)
        check_guess(initial_guess, chains, [self.as_params])
        return each_given(
            sequences, alignments, templates, is_multimer, fetch, self.check, self.with_templates, initial_guess, chains
        )

    def _fold_each(
        self,
        queries: Mapping[str, Query | UserError],
        options: request.FoldOptions,
        seed: int,
        batch: int | str,
        record: Callable[[str, Prediction | None, str], None],
        progress: Progress | None,
    ) -> None:
        """Fold queries and call `record` with the name and the prediction or error of each, as they finish."""
        max_batch, tell, finished_count = request.parse_batch(batch), arguments.progress_of(progress), 0
        items = [
            FoldItem(self.as_params, query, seed) for query in queries.values() if not isinstance(query, UserError)
        ]
        for name, query in queries.items():
            if isinstance(query, UserError):
                record(name, None, str(query))
                finished_count += 1
        folds_alone = self.team.process.ranks > 1 or self.dropout or options.save_recycles
        tell(finished_count, len(queries), "folding")

        def record_outcome(outcome: FoldOutcome) -> None:
            nonlocal finished_count
            query, prediction = outcome.item.query, outcome.prediction
            record(query.name, None if prediction is None else with_warnings(query, prediction), outcome.error)
            finished_count += 1
            tell(finished_count, len(queries), query.name)

        groups = in_groups(items, 1 if folds_alone else max_batch, str(self.device), self.recycling, options.recycles)
        fold_groups(lambda params: self, options, self.team, groups, None, record_outcome)

    @CHECKED
    def gradient(
        self,
        logits: Any,
        loss: Loss,
        *,
        fixed: str | Mapping[str, str] | None = None,
        alignment: Alignments = (),
        templates: TemplatesLike = None,
        initial_guess: request.InitialGuess = None,
        soft: Annotated[float, decides("Share of the softmax; the rest is the logits themselves.", min=0, max=1)] = 1.0,
        temperature: Annotated[float, decides("Of the softmax.", above=0)] = 1.0,
        hard: Annotated[float, decides("Share of the most likely letters, straight through.", min=0, max=1)] = 0.0,
        recycles: request.Recycles = None,
        through: Through = "last",
        seed: Seed = 0,
        name: str = "design",
    ) -> Gradient:
        """Fold a sequence that is given as logits [N, 20]; return a loss and its gradient with respect to the logits.

        logits: columns in the order ARNDCQEGHILKMFPSTWYV; for a complex by chain, "A,B" for copies that share logits.
        The chains are folded in the order of their names.  fixed: letters that stay, with "-" for free positions, as
        "--C---", or by chain; a chain without logits has all of its letters here.
        soft, temperature, hard: the input sequence is soft * softmax(logits / temperature) + (1 - soft) * logits.  The
        share `hard` of it is moved to the most likely letters, with a straight-through gradient.  These letters decide
        which atoms exist.  The alignment is not masked.
        loss: a function of `warpfold.engine.gradient.ModelOutputs`, such as `warpfold.sequence_design.losses.Losses`,
        that returns a scalar, or terms by name.  recycles: passes before the last.  through: the gradient of the "last"
        pass, of "all", or the "mean" of the loss and the gradient of each pass.
        alignment, templates, initial_guess: as in `fold`; the rows of a chain with free positions must fit it column by
        column.
        Errors: UserError as in `fold`, for logits and letters that do not fit, and from the loss.
        """
        arguments.one_of("through", through, get_args(Through))
        dtype = torch.float64 if self.precision == "fp64" else torch.float32
        chains = soft_chains(logits, fixed, dtype)
        shares = torch.cat([chain.enter(soft, temperature, hard) for chain in chains.values()])
        designed = torch.cat([torch.full((len(chain.fixed),), FREE in chain.fixed) for chain in chains.values()])
        letters = {id: chain.letters for id, chain in chains.items()}
        sequence: Sequences = letters["A"] if [*letters] == ["A"] else letters
        query, single = query_of(sequence, alignment, arguments.text("name", name)), self.model.config.multimer is None
        if query.is_complex and single and self.chain_gap is None:
            raise UserError(
                f"{name}: a complex, but these parameters are for single chains. Pass AlphaFold-Multimer's "
                f"({MULTIMERS}), or {called('chain_gap')} 200."
            )
        query = with_guess(self.with_templates(query, templates), initial_guess)
        unmasked = copy(self)
        unmasked.sample = sample = replace(self.sample, masked_fraction=0.0)
        prepared = unmasked.prepare(query.assembly, seed=seed, recycles=recycles, initial_guess=query.guess)
        query_place, batch, assembly = None, prepared.batch, prepared.assembly
        if single:
            is_complex = len(assembly.chains) > 1
            example = concatenate_chains(assembly, sample, self.chain_gap or 0) if is_complex else assembly.chains[0]
            assert isinstance(example, RawExample)
            weight, is_extra = query_weight(example, sample, seed, KEY, len(batch["msa_feat"]))
            query_place = QueryPlace(torch.from_numpy(weight), is_extra)
            chain_index = np.repeat(np.arange(len(assembly.chains)), [chain.length for chain in assembly.chains])
            # Only the loss reads these.
            chain_features = {"asym_id": chain_index + 1, "entity_id": assembly.entity_id[chain_index]}
            batch = batch | {key: torch.from_numpy(ids) for key, ids in chain_features.items()}
        sizes = sizes_of_batch(batch)
        planned = self.planner.choose(sizes, prepared.recycles, prepared.ensemble, gradient=through)
        start = time.perf_counter()
        while True:
            try:
                with self._running(planned.plan, prepared):
                    loss_gradient = gradient_by_shares(
                        self.model, batch, shares, loss, query_place, prepared.recycles, through, self.team,
                        designed, prepared.guess,
                    )  # fmt: skip
                    prediction = self._read_out.prediction(prepared, loss_gradient.folded, STRUCTURE_ONLY)
                break
            except (RuntimeError, MemoryError) as error:
                planned = self.planner.after(planned, error)
            # After the except block, since the error holds references to tensors.
            release_memory(self.device)
        details = self._details(prepared, prepared.recycles, time.perf_counter() - start)
        prediction = replace(prediction, details=details | {"plan": dict(planned.details)})
        leaves = {
            chain.key: chain.logits for chain in chains.values() if chain.key is not None and chain.logits is not None
        }
        by_logits = torch.autograd.grad(shares, [*leaves.values()], loss_gradient.by_shares.to(shares))
        grads = {key: grad.numpy() for key, grad in zip(leaves, by_logits)}
        grad = grads if isinstance(logits, Mapping) else grads["A"]
        return Gradient(loss_gradient.loss, loss_gradient.terms, grad, with_warnings(query, prediction))

    @property
    def as_params(self) -> Params:
        """Return the model's description in the form of a file of parameters."""
        return Params("model", Path(), "", self.model.config, self.sample)

    def fold_example(
        self,
        assembly: Assembly,
        *,
        seed: Seed = 0,
        recycles: request.Recycles = None,
        ensemble: request.Ensemble = None,
        representations: request.Representations = True,
        distogram: request.Distogram = False,
        logits: request.Logits = False,
        save_recycles: request.SaveRecycles = False,
        initial_guess: GuessLike = None,
        fixed: Sequence[str] = (),
    ) -> Prediction:
        """Fold chains that are encoded already, as `fold` does; their coordinates are ignored."""
        check_guess(initial_guess, fixed, [self.as_params])
        prepared = self.prepare(
            assembly, seed=seed, recycles=recycles, ensemble=ensemble, initial_guess=initial_guess, fixed=fixed
        )
        return self.compute(
            prepared, request.FoldOptions(recycles, ensemble, representations, distogram, logits, save_recycles)
        )

    def prepare(
        self,
        assembly: Assembly,
        *,
        seed: Seed = 0,
        recycles: request.Recycles = None,
        ensemble: request.Ensemble = None,
        initial_guess: GuessLike = None,
        fixed: Sequence[str] = (),
    ) -> Prepared:
        """Make the features of one or several chains in host memory; a thread may do so while others compute.

        initial_guess, fixed: as in `fold`.
        """
        start, settings = time.perf_counter(), self.model.config
        recycles = settings.recycles if recycles is None else recycles
        ensemble = settings.ensemble if ensemble is None else ensemble
        if recycles < 0 or ensemble < 1:
            raise UserError(f"recycles = {recycles}, ensemble = {ensemble}: at least 0 and 1 are needed")
        if len(assembly.chains) > 1:
            self._check_complex(assembly.name)
        # The coordinates of the chains are ignored.
        assembly = replace(
            assembly,
            chains=tuple(
                replace(chain, positions=None, mask=None) if isinstance(chain, RawExample) else chain
                for chain in assembly.chains
            ),
        )
        positions = None
        if initial_guess is not None:
            sequences = {id: chain.sequence for id, chain in zip(assembly.ids, assembly.chains)}
            guess = as_guess(initial_guess, assembly.name, sequences)
            positions = torch.from_numpy(guess_positions(guess, assembly.ids))
            templates = (own_template(guess[id], guess.source) if id in fixed else None for id in assembly.ids)
            assembly = replace(assembly, fixed=tuple(templates) if fixed else ())
        recycles = self.recycling.at_most(recycles, assembly.length)
        model_input: Assembly | Example = assembly
        if settings.multimer is None:
            single = len(assembly.chains) == 1 and not fixed
            model_input = (
                assembly.chains[0] if single else concatenate_chains(assembly, self.sample, self.chain_gap or 0)
            )
        features = make_features(model_input, self.sample, seed, KEY, passes=(recycles + 1) * ensemble)
        batch = to_tensors(features, widen=False)
        seconds = time.perf_counter() - start
        coverage = coverage_of(seen_rows(batch), assembly)
        return Prepared(assembly, batch, seed, recycles, ensemble, seconds, coverage, positions)

    def compute(self, prepared: Prepared, options: request.FoldOptions = DEFAULTS) -> Prediction:
        """Choose a plan, run the model, and compute the confidences.

        If memory runs out, the next tighter plan is tried.
        Errors: UserError if no plan fits, or if even the tightest plan runs out of memory.
        """
        start, batch = time.perf_counter(), self._padded(prepared.batch)
        planned = self.plan(replace(prepared, batch=batch), options.representations)
        while True:
            try:
                recycles, prediction = self._fold(prepared, batch, planned.plan, options)
                break
            except (RuntimeError, MemoryError) as error:
                planned = self.planner.after(planned, error)
            # After the except block, since the error holds references to tensors.
            release_memory(self.device)
        details = self._details(prepared, recycles, time.perf_counter() - start) | {"plan": dict(planned.details)}
        return replace(prediction, details=details)

    def compute_together(
        self, several: Sequence[Prepared], options: request.FoldOptions = DEFAULTS
    ) -> list[Prediction]:
        """Run the model once on several proteins, padded to the largest.

        Each result equals that of the protein alone up to rounding, as products of other sizes may sum in another
        order.
        Errors: ValueError for different recycles or ensembles, if recycling may end early, if each protein draws
        dropout or saves its passes, and if z must be in host memory.
        """
        start, first = time.perf_counter(), several[0]
        if (self._tolerance and first.recycles > 1) or self.dropout or options.save_recycles:
            raise ValueError("proteins cannot share a pass if recycling may end early or is saved, or with dropout")
        if len({(prepared.recycles, prepared.ensemble) for prepared in several}) > 1:
            raise ValueError("proteins that share a pass need the same recycles and ensemble")
        batch = self._padded(stack([prepared.batch for prepared in several]))
        guess = torch.stack([_padded_guess(prepared.guess, batch["aatype"].shape[-1]) for prepared in several])
        planned = self.plan(replace(first, batch=batch), options.representations)
        if planned.plan.offload:
            raise ValueError("proteins cannot share a pass with z in host memory")
        predictions = []
        with self._running(planned.plan, first):
            folded = self.model.fold(batch, first.recycles, start=self.model.first_recycled(batch, guess))
            for prepared, last_pass in zip(several, folded.unbind()):
                predictions.append(self._read_out.prediction(prepared, last_pass, options))
        seconds = (time.perf_counter() - start) / len(several)
        pass_details = {"together": len(several), "plan": dict(planned.details)}
        details = [self._details(prepared, folded.recycles, seconds) | pass_details for prepared in several]
        return [replace(prediction, details=detail) for prediction, detail in zip(predictions, details)]

    def _details(self, prepared: Prepared, recycles: int, seconds: float) -> dict[str, Any]:
        details = details_of(prepared, recycles, seconds, None if self.model.templates is None else self.sample)
        return details | ({"dropout": True} if self.dropout else {})

    def _padded(self, batch: Batch) -> Batch:
        """Pad features to the shape for the device (`padded_shape`)."""
        return pad_batch(batch, Plan(pad_to=self.pad_to).multiple_on(self.device.type))

    def _fold(
        self, prepared: Prepared, batch: Batch, plan: Plan, options: request.FoldOptions
    ) -> tuple[int, Prediction]:
        """Fold a protein whose features were padded to `batch`; return the number of recycles and the prediction."""
        recycled: list[PassStructure] = []

        def watch(handed_on: Recycled, activations: torch.Tensor) -> None:
            recycled.append(self._read_out.of_pass(prepared, handed_on, activations))

        with self._running(plan, prepared):
            guess = _padded_guess(prepared.guess, batch["aatype"].shape[-1])
            start = self.model.first_recycled(batch, guess)
            watched = watch if options.save_recycles else None
            folded = self.model.fold(batch, prepared.recycles, watched, start)
            prediction = self._read_out.prediction(prepared, folded, options)
        return folded.recycles, replace(prediction, recycled=recycled)

    @property
    def _read_out(self) -> ReadOut:
        return ReadOut(self.model, self.team)

    @property
    def _tolerance(self) -> float | None:
        default_tolerance = self.model.config.recycle_tolerance
        return default_tolerance if self.recycling.tolerance is None else self.recycling.tolerance

    @contextmanager
    def _running(self, plan: Plan, prepared: Prepared) -> Iterator[None]:
        """Bind a plan and the settings of a prediction to the model, without gradients, within the context.

        Dropout applies to the trunk and the template stack but not to the structure module, as with AlphaFold's
        `eval_dropout` and ColabFold's `--use-dropout`.
        """
        plan, running = replace(plan, graph=False) if self.dropout else plan, self.model.execution
        # Keep an execution with the same plan, as its recorded graphs can be replayed.
        if not (plan.graph is True and isinstance(running, Execution) and running.plan == plan):
            execution = Execution(plan, self.team.mesh)
            execution.graphs.most = MAX_GRAPHS
            execution.bind(self.model)
        model, settings = self.model, self.model.config
        model.config = replace(settings, ensemble=prepared.ensemble, recycle_tolerance=self._tolerance)
        if self.dropout:
            model.noise.seed(prepared.seed)
            for stack in (model.templates, model.extra_stack, model.evoformer):
                if stack is not None:
                    stack.train()
        try:
            with torch.no_grad():
                yield
        finally:
            model.config = settings
            model.eval()

    def plan(self, prepared: Prepared, representations: request.Representations = True) -> FoldPlan:
        """Choose a plan for the memory that is free now.  Errors: UserError if no plan fits, with what would."""
        sizes = sizes_of_batch(prepared.batch)
        return self.planner.choose(sizes, prepared.recycles, prepared.ensemble, representations)

    def check(self, query: Complex) -> None:
        """Raise UserError for a complex that the model cannot fold."""
        if len(query.ids) > 1:
            self._check_complex(query.name)

    def _check_complex(self, name: str) -> None:
        """Raise UserError unless the model folds complexes."""
        if self.model.config.multimer is None and self.chain_gap is None:
            raise UserError(
                f"{name}: a complex, but these parameters are for single chains. Pass AlphaFold-Multimer's "
                f"({MULTIMERS}), {called('chain_gap')} 200, or fold each chain alone (from Python: fold_many)."
            )


def _padded_guess(guess: torch.Tensor | None, length: int) -> torch.Tensor:
    """Pad the positions from which the first pass starts to [length, 37, 3]; zeros without a guess."""
    positions = torch.zeros(length, 37, 3, dtype=None if guess is None else guess.dtype)
    if guess is not None:
        positions[: len(guess)] = guess
    return positions


def with_warnings(query: Query, prediction: Prediction) -> Prediction:
    """Add the outcomes of the templates and the warnings about the input to a prediction, and log the warnings."""
    warnings = [*(notice.record() for notice in query.notices), *prediction.details.get("warnings", ())]
    for warning in warnings:
        log.warning("%s: %s", query.name, warning["text"])
    details = {**prediction.details, **({"warnings": warnings} if warnings else {})}
    return replace(prediction, templates=[asdict(outcome) for outcome in query.outcomes], details=details)


@arguments.checked(strict='kernels="strict"')
def load(
    params: PathLike,
    device: str | torch.device | None = None,
    chunk: request.Chunk = None,
    precision: PredictionPrecision = request.DEFAULT_PRECISION,
    sample: SampleConfig | None = None,
    team: Team | None = None,
    kernels: Kernels = "fast",
    offload: request.Offload = None,
    memory: Memory = None,
    *,
    max_msa: request.MaxMsa = None,
    max_extra: request.MaxExtra = None,
    recycle_tolerance: request.RecycleTolerance = None,
    max_recycles: request.MaxRecycles = None,
    dropout: request.Dropout = False,
    chain_gap: request.ChainGap = None,
    graphs: request.ReplayGraphs = True,
    msa_server: request.MsaServer = None,
    msa_cache: request.MsaCache = None,
) -> Predictor:
    """Load parameters from a file: WarpFold's safetensors, DeepMind's params_model_*.npz, or OpenFold's .pt.

    device: by default the first GPU if there is one.  sample: by default as the parameters were trained; for
    DeepMind's files, this follows from the arrays and the name (`model.weights.data_settings`), and assumptions are
    logged.  max_msa, max_extra: rows of the clustered and of the extra alignment, instead of the sample's.
    recycle_tolerance, max_recycles: when recycling ends early (`Recycling`).  dropout: apply the trunk's dropout as in
    training, drawn by a prediction's seed; predictions of seeds then differ more.  chain_gap: lets parameters for
    single chains fold complexes, with residue numbers that jump by this much between chains.  memory: bytes, or "24GB".
    msa_server, msa_cache: for all queries, as in `Predictor.fold`.  The other arguments are those of `Predictor`.
    Errors: UserError for another kind of file, arrays that do not fit, and wrong arguments.
    """
    path, target_device = arguments.path("params", params), device_of(device)
    recycling = request.Recycling.parse(recycle_tolerance, max_recycles)
    server = request.server_of(msa_server, msa_cache, Path("alignments"))
    if sample is not None and not isinstance(sample, SampleConfig):
        raise arguments.WrongArgument(f"sample = {arguments.shown(sample)}: a SampleConfig is needed")
    rows: dict[str, Any] = {"max_msa": max_msa, "max_extra": max_extra}
    model = load_model(path)
    if chain_gap is not None and model.config.multimer is not None:
        raise UserError(f"--chain-gap: {path.name} is AlphaFold-Multimer's, which tells chains apart. Leave it out.")
    if sample is None:
        sample = build(SampleConfig, data_settings(path), str(path))
        if (assumed := assumed_settings(path)) and (team is None or team.is_rank_zero):
            log.warning("%s", assumed)
    sample = replace(sample, **{name: count for name, count in rows.items() if count is not None})
    predictor = Predictor(model, target_device, chunk, precision, sample, team, kernels, offload, memory, graphs)
    predictor.recycling, predictor.msa_server = recycling, server
    predictor.dropout, predictor.chain_gap = dropout, chain_gap
    return predictor
