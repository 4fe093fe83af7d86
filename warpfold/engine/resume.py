"""Checkpoints of a loop that a user wrote: what it needs to continue to the bit, in one call: docs/howto/kit.md.

FOLDER/step-00000100/    as in engine/checkpoint.py: tensors by name, such as model.0.weight, in
                         state.safetensors; how they belong together, and all else, in state.json
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
from warpfold.engine.nested import Flattening, Leaf, portable, unflatten, unported
from warpfold.errors import UserError
from warpfold.parallel.mesh import world
from warpfold.parallel.messages import all_gather_object

logger = logging.getLogger("warpfold")

# ruff: noqa: NPY002 (the global generator is the one that datasets and models of others use)


class Resumed(NamedTuple):
    """Say where a loop goes on: the steps that were done, and the plain values that were saved in `more`."""

    step: int
    more: dict[str, Any]


class Checkpoints:
    """The checkpoints of a run in a folder, whole after a `kill -9` at any moment; no pickle.

    keep: how many of the last ones stay.  Of several ranks, rank zero writes, and all must call `save` and
    `load_latest`; all read the folder.  One run at a time writes to a folder.
    """

    def __init__(self, folder: Path | str, keep: int = 3) -> None:
        if keep < 1:
            raise UserError(f"Checkpoints: keep = {keep}; give a whole number of at least 1")
        self.folder = Path(folder)
        self._keep, self._folders, self._locked = keep, StepFolders(self.folder), False
        self._done: int | None = None  # the step that was saved or loaded last

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
        """Save what was given, and the random numbers of Python, NumPy, torch and the GPU; return the folder.

        Each has `state_dict`; of `more`, by names, also plain values: tensors, arrays, numbers, strings, and dicts,
        lists and tuples of them.  With several ranks, each has random numbers and a loader of its own; the others are
        rank zero's.
        Errors: UserError for what a checkpoint cannot hold, where it cannot be written (what was saved before is
        untouched), for a step that is there already, and where another run writes to the folder.
        """
        parts = _named(model, optimizer, scheduler)
        state: dict[str, Any] = {name: _state(f"Checkpoints: {name}", part) for name, part in parts.items()}
        state["more"] = {
            name: [True, _state(f"Checkpoints: more[{name!r}]", part)] if _has_state(part) else [False, part]
            for name, part in (more or {}).items()
        }
        own = {"random": random_state(), "loader": None if loader is None else loader.state_dict()}
        group = world()
        gathered = all_gather_object(portable(own, "Checkpoints: loader"), group, f"a checkpoint of step {step}")
        state["ranks"] = [unported(one) for one in gathered]
        refusal = None
        if group.rank == 0:
            try:
                self._write(step, state)
            except UserError as error:
                refusal = str(error)
        self._raise_of_rank_zero(refusal)
        self._done = step
        return self._folders.step_path(step)

    def _write(self, step: int, state: dict[str, Any]) -> None:
        flattening = Flattening("Checkpoints: ")
        tree = flattening.tree(state)
        self._lock()
        if step in self.steps():
            if step == self._done:
                return  # a loop that ends where it began
            raise UserError(
                f"{self._folders.step_path(step)}: exists already; call load_latest() to continue from what is there, "
                "or choose another folder"
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
        """Continue from the last checkpoint that is whole: everything given gets its state, and random numbers theirs.

        Return its step and the plain values of `more`; without a checkpoint (0, {}), and nothing is changed.
        A damaged checkpoint is renamed, with a warning.
        Errors: UserError where all are damaged, or the checkpoint lacks what is asked for.
        """
        found = self._find()
        if found is None:
            return Resumed(0, {})
        path = self._folders.step_path(found.step)
        try:
            names, tree = found.notes["tensors"], found.notes["state"]
            leaves = [found.tensors[name] for name in names]
            state = unflatten(tree, leaves.__getitem__, lambda number: leaves[number].numpy())
            ranks, others = state["ranks"], state["more"]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UserError(f"{path}: is no checkpoint of this kind ({error!r}); choose another folder") from error
        objects = {name: part for name, part in (more or {}).items() if _has_state(part)}
        asked = _named(model, optimizer, scheduler)
        for name in (*asked, *objects):
            if name not in (state if name in asked else others):
                raise UserError(f"{path}: has no {name}; leave it out, or choose another folder")
        for name, part in asked.items():
            part.load_state_dict(_restored(state[name]))
        for name, part in objects.items():
            part.load_state_dict(_restored(others[name][1]))
        self._load_own(path, ranks, loader)
        self._done = found.step
        return Resumed(found.step, {name: value for name, (has_state, value) in others.items() if not has_state})

    def _load_own(self, path: Path, ranks: list[dict[str, Any]], loader: Any) -> None:
        """Give this rank its own loader's state and random numbers."""
        group = world()
        own = ranks[min(group.rank, len(ranks) - 1)]
        if loader is not None:
            if own["loader"] is None:
                raise UserError(f"{path}: has no loader; leave it out, or choose another folder")
            loader.load_state_dict(own["loader"])
        if group.size != len(ranks) and group.rank == 0:
            logger.warning("%s: is of %d ranks, now there are %d: not to the bit", path, len(ranks), group.size)
        if group.rank < len(ranks):
            set_random_state(own["random"])

    def _find(self) -> Checkpoint | None:
        """Return the last checkpoint that is whole, the same on every rank."""
        group = world()
        found, refusal = None, None
        if group.rank == 0 and self.folder.is_dir():
            try:
                found = self._folders.load_latest()
            except UserError as error:
                refusal = str(error)
        self._raise_of_rank_zero(refusal)
        step = all_gather_object(None if found is None else found.step, group, "the last checkpoint")[0]
        if group.rank == 0 or step is None:
            return found
        try:
            return self._folders.load(step)
        except DamagedCheckpoint as error:
            raise UserError(f"{error}; every rank reads the folder: put it where all can") from error

    def _lock(self) -> None:
        """Keep other runs out, as long as this object is there."""
        if self._locked:
            return
        weakref.finalize(self, self._folders.lock(self.folder).close)
        self._locked = True

    @staticmethod
    def _raise_of_rank_zero(refusal: str | None) -> None:
        """Raise on every rank what rank zero was refused, so that none waits for it."""
        if refusal := all_gather_object(refusal, world(), "rank zero's checkpoint")[0]:
            raise UserError(refusal)


def _named(model: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return {name: part for name, part in parts.items() if part is not None}


def _has_state(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _state(what: str, part: Any) -> dict[str, Any]:
    """Return an object's state, with what a module notes of its versions."""
    if not _has_state(part):
        raise UserError(f"{what} is a {type(part).__name__} without state_dict and load_state_dict; give one with them")
    state = part.state_dict()
    return {"state": dict(state), "versions": getattr(state, "_metadata", None)}


def _restored(saved: dict[str, Any]) -> dict[str, Any]:
    if saved["versions"] is None:
        return saved["state"]
    state: Any = OrderedDict(saved["state"])
    state._metadata = saved["versions"]
    return state


def _names(places: list[str]) -> list[str]:
    """Return names of tensors such as model.0.weight for their places such as ['model']['state']['0.weight']."""
    names: dict[str, None] = {}
    for number, place in enumerate(places):
        keys = [key.strip("'") for key in re.findall(r"\[([^\]]*)\]", place)]
        name = ".".join(key for at, key in enumerate(keys) if (at, key) != (1, "state")) or "value"
        names[f"{name}#{number}" if name in names else name] = None
    return list(names)


def _on_host(name: str, leaf: Leaf) -> Tensor:
    """Return a tensor of its own memory to be written."""
    if isinstance(leaf, np.ndarray):
        try:
            return torch.from_numpy(leaf.copy())
        except TypeError as error:
            raise UserError(f"Checkpoints: {name} is an array of {leaf.dtype}; give numbers") from error
    if leaf.dtype == torch.complex128:
        raise UserError(f"Checkpoints: {name} is complex128, which safetensors lacks; give its real and imaginary part")
    x = leaf.cpu().contiguous()
    return x.clone() if x.untyped_storage().nbytes() != x.nbytes else x


def random_state() -> dict[str, Any]:
    """Return the state of all generators, that of the current GPU too: nested values, with arrays."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Go on with a state that `random_state` returned; that of a GPU where there is one."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
