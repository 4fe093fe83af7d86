"""Validate a run during training: fold held-out examples for a bounded share of the time.

The number of validations depends on measured times, not on the settings alone.  The training never depends on it.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from warpfold.batch import Batch, to_tensors
from warpfold.data.features.make import pad_features, padded_shape
from warpfold.data.store.store import Store
from warpfold.data.structure.chain import Chain
from warpfold.engine.checkpoint import Checkpoint
from warpfold.engine.loop import Log, StepTimer, StopSignals
from warpfold.engine.optim import Optimizer
from warpfold.engine.watch import Row
from warpfold.errors import UserError
from warpfold.geometry.residue import RESTYPES
from warpfold.memory import release_memory
from warpfold.model.alphafold import AlphaFold
from warpfold.model.losses import ca_lddt, total_loss
from warpfold.model.permutation import with_truth
from warpfold.parallel.execution import Execution
from warpfold.parallel.team import Team
from warpfold.scoring.dockq import Docking
from warpfold.training.config import RunConfig
from warpfold.training.examples import HeldOut, held_out_features
from warpfold.training.passes import PassPlace, followed
from warpfold.training.planning import FoldPlanner, sizes_of_batch

logger = logging.getLogger("warpfold")


class _Stopped(Exception):
    """A signal came while an example was being folded."""


Scores = dict[str, Any] | str  # of `Judge`, or why an example failed
# A process with at least this many training examples may fold one example before its time is known.
NEGLIGIBLE_EXAMPLES = 100


@dataclass(frozen=True)
class Spending:
    """The time that a run has spent, in seconds."""

    training: float = 0.0  # in steps
    validation: float = 0.0
    round: float = 0.0  # of one example on every rank; 0: unknown

    def affords(self, share: float, rounds: int, progress: float) -> int:
        """Compute for how many rounds of a validation there is time: all or none, or some of them at the end.

        share: of the time that validations may take, below 1.
        progress: of the training, above 0.  At 1 the run ends, and at least one round is affordable.  Before that, the
            time of a whole last validation is reserved.
        """
        budget, cost = share / (1 - share) * self.training, rounds * self.round
        if progress < 1:
            # `budget / progress` is the budget of the whole run.
            return rounds if self.validation + cost <= min(budget, budget / progress - cost) else 0
        return min(rounds, max(1, int((budget - self.validation) / self.round + 1e-6)))


class Validation:
    """Run the validations of a training when they are due and affordable, and estimate when the run will end."""

    def __init__(
        self,
        model: AlphaFold,
        optimizer: Optimizer,
        held_out: Sequence[tuple[Store, str]],
        config: RunConfig,
        state: Checkpoint,
        log: Log,
        signals: StopSignals,
        team: Team,
    ) -> None:
        self.model, self.optimizer, self.held_out, self.config = model, optimizer, held_out, config
        self.log, self.signals, self.team = log, signals, team
        self.timer = StepTimer()
        self._earlier = Spending(**state.notes.get("seconds", {}))
        self._validating, self._round = 0.0, self._earlier.round
        # The times in the checkpoint lack a validation that ran after it.
        if log.validation and log.validation["step"] == state.step:
            self._validating = log.validation.get("seconds") or 0.0

    @property
    def rounds(self) -> int:
        """The number of examples that the first rank folds in a whole validation."""
        return -(-len(self.held_out) // self.team.process.ranks)

    @property
    def spending(self) -> Spending:
        """The time that the run has spent; part of a checkpoint."""
        training = self._earlier.training + self.timer.seconds
        return Spending(training, self._earlier.validation + self._validating, self._round)

    def is_owed(self, step: int) -> bool:
        """Whether the log lacks a validation that is due after this step.

        Validations are due before the first step, after the last, and every `validate_every` steps.
        """
        train = self.config.train
        due = step in (0, train.steps) or (train.validate_every > 0 and step % train.validate_every == 0)
        done = self.log.validation is not None and self.log.validation["step"] == step
        return bool(self.held_out) and due and not done

    def rounds_at(self, step: int) -> int:
        """Return the rounds with which a validation begins after this step, equal on all ranks; 0 for none."""
        # The clocks of the ranks differ, so rank 0 decides.
        return int(self.team.broadcast(self._affordable(step), "whether to validate")) if self.is_owed(step) else 0

    def _affordable(self, step: int) -> int:
        """Compute for how many rounds there is time by this rank's clock; 1 to measure the time of the first round."""
        config, now = self.config, self.spending
        share, steps = config.train.validation_share, config.train.steps
        if share >= 1:
            return self.rounds
        examples = steps * config.optim.accumulate // self.team.mesh.data.size  # of this process, in the whole run
        if not now.round:
            return int(step > 0 or examples >= NEGLIGIBLE_EXAMPLES)
        if step == 0:
            # The time of a step is not known yet.  As an estimate, an example takes the time of a round, scaled by the
            # square of its length.  Twice the validation must fit.
            size = min((config.data.crop or config.train.validation_residues) / config.train.validation_residues, 1.0)
            budget = share / (1 - share) * examples * now.round * size**2
            return self.rounds if 2 * self.rounds * now.round <= budget else 0
        return now.affords(share, self.rounds, step / steps)

    def catch_up(self, step: int) -> int:
        """Validate at the start of a session: the first weights, or a validation that a kill prevented.

        Returns the signal that stops the run, or 0.
        """
        rounds = self.rounds_at(step)
        return self(step, rounds) if rounds else 0

    def __call__(self, step: int, rounds: int) -> int:
        """Validate, beginning with a number of rounds; return the signal that stops the run, or 0.

        A validation that a signal interrupts is not logged, and is repeated when the run continues.

        The scores are lDDT-Ca of held-out examples with the averaged weights (Supp. 1.11.7) and all recycles, and for
        complexes also of the pairs between chains.  The ranks share the examples.  The worker processes of the loader
        continue meanwhile.
        """
        if self.log.run is not None:
            # A kill during the validation must not lose a step.
            self.log.run.wait_for_writing()
        began, execution = time.perf_counter(), self.model.execution
        self.model.eval()
        with torch.no_grad(), self.optimizer.averaged():
            rounds, own_scores = self._fold_share(step, rounds, began)
        # Restores the execution of the training, which has the recorded graphs.
        assert isinstance(execution, Execution)
        execution.bind(self.model).train()
        # Collective: the log has the scores of all ranks, and a signal to any rank stops all.
        gathered = self.team.all_gather_object([own_scores, self.signals.received], "validation")
        seconds = time.perf_counter() - began
        self._validating += seconds
        all_scores = {key: scores for rank_scores, _ in gathered for key, scores in rank_scores.items()}
        keys = [key for _, key in self.held_out[: rounds * self.team.process.ranks]]
        if all_scores.keys() >= set(keys):
            total = {"of": len(self.held_out)} if len(keys) < len(self.held_out) else {}
            self.log({**validation_row(step, keys, all_scores), **total, "seconds": round(seconds, 3)})
        return max(received for _, received in gathered)

    def _fold_share(self, step: int, rounds: int, began: float) -> tuple[int, dict[str, Scores]]:
        """Fold this rank's share of the examples; return the number of rounds and the scores.

        The number of rounds is larger than at first if the time of a round was unknown.  All ranks stop together.
        """
        ranks, rank = self.team.process.ranks, self.team.process.rank
        results: dict[str, Scores] = {}
        device = self.optimizer.weights.device

        def stop_on_signal(_: PassPlace) -> None:
            if self.signals.received:
                raise _Stopped

        judge, seconds_left = Judge(self.model, self.config, device, stop_on_signal), self.seconds_left(step)
        is_time_known = bool(self._round)
        features = held_out_features(self.held_out[rank::ranks], self.config)
        done = 0
        # Collective: all ranks stop after the same round if any of them has received a signal.
        while done < rounds and not self.team.largest(self.signals.received, "stopping or going on"):
            self.log.phase("validating", done * ranks, min(rounds * ranks, len(self.held_out)), seconds_left)
            if done * ranks + rank < len(self.held_out):
                example = next(features)
                with suppress(_Stopped):
                    results[example.key] = judge.scores(example)
            done += 1
            self._round = (time.perf_counter() - began) / done
            if not is_time_known and done == 1:
                # Collective: rank 0 decides by its clock, now that the time of a round is known.
                rounds = max(1, int(self.team.broadcast(self._affordable(step), "how much to validate")))
        features.close()
        return rounds, results

    def seconds_left(self, step: int) -> float | None:
        """Estimate the seconds until the run ends, its validations included; None before two steps."""
        train = self.config.train
        # The first step takes longer than the others.
        if self.timer.count < 2:
            return None
        training = (train.steps - step) * self.timer.mean
        interval = train.validate_every or train.steps
        validating = self.rounds * self._round * (-(-train.steps // interval) - step // interval)
        if train.validation_share < 1:
            now, ratio = self.spending, train.validation_share / (1 - train.validation_share)
            validating = min(validating, max(ratio * (now.training + training) - now.validation, self._round))
        return training + validating


class Judge:
    """Fold held-out examples with the current weights of a model, and score them.

    check: called between the blocks of the model.  An exception that it raises ends the folding.
    """

    def __init__(
        self, model: AlphaFold, config: RunConfig, device: torch.device, check: Callable[[PassPlace], object]
    ) -> None:
        self.model, self.loss, self.device, self._check = model, config.loss, device, check
        plan = config.plan
        self._multiple = plan.multiple_on(device.type)
        fixed = {"precision": plan.precision, "kernels": plan.kernels, "tf32": plan.tf32}
        self._planner = FoldPlanner(model.config, device, fixed)

    def scores(self, example: HeldOut) -> Scores:
        """Compute lDDT-Ca of all pairs and of pairs between chains, DockQ, the loss and its terms, and residue counts.

        Missing scores are NaN.  "residues" has the number of folded residues and the number before cropping.
        If memory runs out, the next tighter plan is tried.  If no plan fits, or the entry is damaged, the reason is
        returned instead of an error, because the training continues, and each restart would validate first.
        """
        if example.reason:
            return example.reason
        model, config = self.model, self.model.config
        padded = pad_features(example.features, padded_shape(example.features, self._multiple))
        batch = to_tensors(padded, self.device)
        try:
            fold_plan = self._planner.choose(sizes_of_batch(batch), config.recycles, config.ensemble)
            while True:
                try:
                    Execution(fold_plan.plan).bind(model)
                    with followed(model, (config.recycles + 1) * config.ensemble, self._check):
                        output = model(batch)
                    truth = with_truth(batch, output.structure.final_atom37)
                    loss, terms = total_loss(output, truth, self.loss, output.recycles * config.ensemble)
                    break
                except (RuntimeError, MemoryError) as error:
                    fold_plan = self._planner.after(fold_plan, error)
                # Outside the handler the traceback no longer holds tensors.
                release_memory(self.device)
        except UserError as error:
            return str(error)
        return {
            "lddt_ca": float(ca_lddt(output, truth)),
            "interface_lddt": float(ca_lddt(output, truth, between=True)),
            "dockq": mean_dockq(output.structure.final_atom37, truth),
            "loss": float(loss),
            "terms": {name: float(term) for name, term in terms.items()},
            "residues": [int(batch["seq_mask"].sum()), example.residues],
        }


def mean_dockq(atoms: Tensor, truth: Batch) -> float:
    """Compute the mean DockQ over the interfaces between the chains of the truth; NaN if no chains touch.

    atoms: the prediction, [N, 37, 3], angstrom.  Atoms that are not finite count as missing.
    truth: a batch with labels, in which equal chains are permuted to match the prediction.
    """
    if "asym_id" not in truth:
        return math.nan
    coordinates = atoms.float().cpu().numpy()
    finite = np.isfinite(coordinates).all(-1)
    names = ("asym_id", "aatype", "residue_index", "atom37_atom_exists", "all_atom_positions", "all_atom_mask")
    chain, aatype, index, exists, positions, mask = (truth[name].cpu().numpy() for name in names)
    predicted, reference = dict[str, Chain](), dict[str, Chain]()
    # Chain 0 is padding.
    for number in np.unique(chain[chain > 0]).tolist():
        rows, name = chain == number, str(number)
        sequence = "".join((*RESTYPES, "X")[code] for code in aatype[rows])
        for chains, x, resolved in ((predicted, coordinates, exists * finite), (reference, positions, mask)):
            chains[name] = Chain(name, sequence, x[rows], resolved[rows], index[rows], ("",) * len(sequence))
    same = {(name, name): np.arange(len(c.sequence))[:, None].repeat(2, 1) for name, c in reference.items()}
    docking = Docking(predicted, reference, same)
    scores = [docking.measure(pair, pair).dockq for pair in docking.native]
    return float(np.mean(scores)) if scores else math.nan


def validation_row(step: int, keys: Sequence[str], scores: Mapping[str, Scores]) -> Row:
    """Build the row of a validation: means over the examples `keys`, and the scores of each.  scores: of a `Judge`.

    The scores of interfaces are means over the examples that have interfaces.  Without such an example the row has
    none.
    If examples were left out, the row has the reasons, and `of` is the number of all examples.  Such a row is not
    compared with complete ones.
    """
    row: Row = {"kind": "validation", "step": step}
    folded = {key: result for key in keys if not isinstance(result := scores[key], str)}
    for name, counted_kind in (("lddt_ca", "examples"), ("interface_lddt", "interfaces"), ("dockq", "docked")):
        values = {key: example[name] for key, example in folded.items()}
        if counted_kind != "examples":
            values = {key: value for key, value in values.items() if not math.isnan(value)}
        if values or counted_kind == "examples":
            row |= {name: mean_without_nan(list(values.values())), counted_kind: values}
    examples = folded.values()
    if folded:
        row["loss"] = mean_without_nan([example["loss"] for example in examples])
        names = dict.fromkeys(name for example in examples for name in example["terms"])
        row["terms"] = {
            name: mean_without_nan([example["terms"].get(name, math.nan) for example in examples]) for name in names
        }
    sizes = {key: example["residues"] for key, example in folded.items()}
    if cut := {key: residues for key, residues in sizes.items() if residues[0] < residues[1]}:
        used, whole = map(sum, zip(*sizes.values()))
        row |= {"cropped": len(cut), "residues": used, "whole_residues": whole, "cut": cut}
    left_out = {key: scores[key] for key in keys if key not in folded}
    for key, reason in left_out.items():
        logger.warning("the validation after step %d leaves out %s: %s", step, key, reason)
    return {**row, "of": len(keys), "left_out": left_out} if left_out else row


def mean_without_nan(values: Sequence[float]) -> float:
    """Compute the mean of the values that are not NaN; NaN if there are none."""
    numbers = [value for value in values if not math.isnan(value)]
    return float(np.mean(numbers)) if numbers else float("nan")
