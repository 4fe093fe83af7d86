"""Save and load all state of a user's training loop in one call: docs/howto/kit.md.

FOLDER/step-00000100/    the files of engine/checkpoint.py: state.safetensors has tensors by name, such as
                         model.0.weight, and state.json has their structure and all other values
"""

import logging
import random
import re
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from warpfold.engine.checkpoint import Checkpoint, DamagedCheckpoint, StepFolders
from warpfold.engine.nested import Flattening, Leaf, from_portable, portable, unflatten
from warpfold.errors import UserError
from warpfold.parallel.mesh import world
from warpfold.parallel.messages import all_gather_object

logger = logging.getLogger("warpfold")

# ruff: noqa: NPY002 (the global generator is the one that datasets and models of others use)


class Resumed(NamedTuple):
    """The state of a resumed loop: the number of steps done, and the plain values saved in `more`."""

    step: int
    more: dict[str, Any]


class Checkpoints:
    """The checkpoints of a run in a folder, consistent after a `kill -9` at any moment, without pickle.

    keep: number of last checkpoints to retain.
    With several ranks, all must call `save` and `load_latest`.  Rank 0 writes, and all read the folder.  One run at a
    time writes to a folder.
    """

    def __init__(self, folder: Path | str, keep: int = 3) -> None:
        if keep < 1:
            raise UserError(f"Checkpoints: keep = {keep}. Pass an integer of at least 1.")
        self.folder = Path(folder)
        self._keep, self._folders, self._locked = keep, StepFolders(self.folder), False
        self._last_step: int | None = None  # last saved or loaded

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, ascending."""
        return self._folders.steps()

    def save(
        self,
        step: int,
        *,
        model: Any = None,
        optimizer: Any = None,
        loader: Any = None,
        scheduler: Any = None,
        more: Mapping[str, Any] | None = None,
    ) -> Path:
        """Save the states of objects, and the random states of Python, NumPy, torch and the GPU; return the folder.

        model, optimizer, loader, scheduler: objects with `state_dict`.
        more: by name, objects with `state_dict`, or plain values: tensors, arrays, numbers, strings, and dicts, lists
            and tuples of them.
        With several ranks, the random states and the loader of each are saved, and other states of rank 0.
        Errors: UserError for a value that a checkpoint cannot hold, for a failure to write, for a step that exists, and
        if another run writes to the folder.  Earlier checkpoints are untouched.
        """
        parts = _named(model, optimizer, scheduler)
        state: dict[str, Any] = {name: _state(f"Checkpoints: {name}", part) for name, part in parts.items()}
        state["more"] = {
            name: [True, _state(f"Checkpoints: more[{name!r}]", part)] if _has_state(part) else [False, part]
            for name, part in (more or {}).items()
        }
        generators: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            generators["cuda"] = torch.cuda.get_rng_state()
        rank_state = {"random": generators, "loader": None if loader is None else loader.state_dict()}
        group = world()
        # Rank 0 writes the states of all ranks.
        gathered = all_gather_object(portable(rank_state, "Checkpoints: loader"), group, f"a checkpoint of step {step}")
        state["ranks"] = [from_portable(value) for value in gathered]
        refusal = None
        if group.rank == 0:
            try:
                self._write(step, state)
            except UserError as error:
                refusal = str(error)
        self._raise_error_of_rank_zero(refusal)
        self._last_step = step
        return self._folders.step_path(step)

    def _write(self, step: int, state: dict[str, Any]) -> None:
        flattening = Flattening("Checkpoints: ")
        tree = flattening.tree(state)
        if not self._locked:
            # The folder stays locked against other runs for the lifetime of this object.
            weakref.finalize(self, self._folders.lock(self.folder).close)
            self._locked = True
        if step in self.steps():
            # A loop that ends where it began saves the same state again.
            if step == self._last_step:
                return
            raise UserError(
                f"{self._folders.step_path(step)}: exists already. Call load_latest() to continue from the last "
                "checkpoint, or choose another folder."
            )
        names = _names(flattening.places)
        tensors = {name: _on_host(name, leaf) for name, leaf in zip(names, flattening.leaves)}
        self._folders.save(Checkpoint(step, tensors, {"state": tree, "tensors": names}), self._keep)

    def load_latest(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        loader: Any = None,
        scheduler: Any = None,
        more: Mapping[str, Any] | None = None,
    ) -> Resumed:
        """Restore the states of objects and random numbers from the last intact checkpoint.

        Returns its step and the plain values of `more`.  Without a checkpoint it returns (0, {}), and changes nothing.
        A damaged checkpoint is renamed with a warning.
        Errors: UserError if all checkpoints are damaged, or if the last one lacks the state of an object.
        """
        checkpoint = self._load_on_all_ranks()
        if checkpoint is None:
            return Resumed(0, {})
        path = self._folders.step_path(checkpoint.step)
        try:
            names, tree = checkpoint.notes["tensors"], checkpoint.notes["state"]
            leaves = [checkpoint.tensors[name] for name in names]
            state = unflatten(tree, leaves.__getitem__, lambda number: leaves[number].numpy())
            ranks, saved_objects = state["ranks"], state["more"]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UserError(f"{path}: is no checkpoint of this kind ({error!r}). Choose another folder.") from error
        objects = {name: part for name, part in (more or {}).items() if _has_state(part)}
        main = _named(model, optimizer, scheduler)
        for name in (*main, *objects):
            if name not in (state if name in main else saved_objects):
                raise UserError(f"{path}: has no {name}. Leave it out, or choose another folder.")
        for name, part in main.items():
            part.load_state_dict(_restored(state[name]))
        for name, part in objects.items():
            part.load_state_dict(_restored(saved_objects[name][1]))
        # A loader and random numbers belong to a rank.  Additional ranks take the loader of the last one.
        group = world()
        rank_state = ranks[min(group.rank, len(ranks) - 1)]
        if loader is not None:
            if rank_state["loader"] is None:
                raise UserError(f"{path}: has no loader. Leave it out, or choose another folder.")
            loader.load_state_dict(rank_state["loader"])
        if group.size != len(ranks) and group.rank == 0:
            logger.warning("%s: is of %d ranks, now there are %d: not to the bit", path, len(ranks), group.size)
        if group.rank < len(ranks):
            generators = rank_state["random"]
            random.setstate(generators["python"])
            np.random.set_state(generators["numpy"])
            torch.set_rng_state(generators["torch"])
            if "cuda" in generators and torch.cuda.is_available():
                torch.cuda.set_rng_state(generators["cuda"])
        self._last_step = checkpoint.step
        return Resumed(
            checkpoint.step, {name: value for name, (has_state, value) in saved_objects.items() if not has_state}
        )

    def _load_on_all_ranks(self) -> Checkpoint | None:
        """Load the last intact checkpoint, the same one on every rank."""
        group = world()
        checkpoint, refusal = None, None
        if group.rank == 0 and self.folder.is_dir():
            try:
                checkpoint = self._folders.load_latest()
            except UserError as error:
                refusal = str(error)
        self._raise_error_of_rank_zero(refusal)
        # Rank 0 may have renamed damaged checkpoints, so it chooses the step.
        step = all_gather_object(None if checkpoint is None else checkpoint.step, group, "the last checkpoint")[0]
        if group.rank == 0 or step is None:
            return checkpoint
        try:
            return self._folders.load(step)
        except DamagedCheckpoint as error:
            raise UserError(f"{error}. All ranks read the folder: put it on a shared file system.") from error

    @staticmethod
    def _raise_error_of_rank_zero(refusal: str | None) -> None:
        """Raise the error of rank 0 on every rank, so that no rank waits for it."""
        if refusal := all_gather_object(refusal, world(), "rank zero's checkpoint")[0]:
            raise UserError(refusal)


def _named(model: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return {name: part for name, part in parts.items() if part is not None}


def _has_state(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _state(what: str, part: Any) -> dict[str, Any]:
    """Return an object's state, with the version metadata of a module."""
    if not _has_state(part):
        raise UserError(
            f"{what} is a {type(part).__name__} without state_dict and load_state_dict. Pass an object with both."
        )
    state = part.state_dict()
    return {"state": dict(state), "versions": getattr(state, "_metadata", None)}


def _restored(saved: dict[str, Any]) -> dict[str, Any]:
    if saved["versions"] is None:
        return saved["state"]
    state: Any = OrderedDict(saved["state"])
    state._metadata = saved["versions"]
    return state


def _names(places: list[str]) -> list[str]:
    """Convert places of tensors such as ['model']['state']['0.weight'] to unique names such as model.0.weight."""
    names: dict[str, None] = {}
    for number, place in enumerate(places):
        keys = [key.strip("'") for key in re.findall(r"\[([^\]]*)\]", place)]
        name = ".".join(key for at, key in enumerate(keys) if (at, key) != (1, "state")) or "value"
        names[f"{name}#{number}" if name in names else name] = None
    return list(names)


def _on_host(name: str, leaf: Leaf) -> Tensor:
    """Copy a leaf to a contiguous tensor in host memory that shares no storage with other tensors."""
    if isinstance(leaf, np.ndarray):
        try:
            return torch.from_numpy(leaf.copy())
        except TypeError as error:
            raise UserError(f"Checkpoints: {name} is an array of {leaf.dtype}. Use numbers.") from error
    if leaf.dtype == torch.complex128:
        raise UserError(
            f"Checkpoints: {name} is complex128, which safetensors lacks. Save its real and imaginary parts."
        )
    x = leaf.cpu().contiguous()
    return x.clone() if x.untyped_storage().nbytes() != x.nbytes else x
