"""Outputs of a frozen trunk, computed for each draw of an example and cached in a folder.

    RUN/trunk/trunk.json            identifies weights and settings; entries made with others are deleted
    RUN/trunk/HASH.safetensors      for one example and draw: single, pair, the first row of the alignment, the logits
                                    of the masked-MSA head, and the features of the residues and labels

An entry is written atomically when its example is first used.
The trunk is frozen, but each pass recycles positions of the structure module, which may be trained.  The passes before
the last therefore use the first weights of the structure module, whether entries are cached or not.
"""

import copy
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from uuid import uuid4

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from warpfold.batch import FEATURES, Arrays, Batch, on_device, passes, stack
from warpfold.data.load.examples import Maker, Sample
from warpfold.data.load.order import Source
from warpfold.engine.trainable import FinetuneConfig
from warpfold.errors import UserError
from warpfold.files import check_tensors, sealed_tensors
from warpfold.model.alphafold import AlphaFold, ModelConfig

log = logging.getLogger("warpfold")

ABOUT = "trunk.json"
# Features that only the trunk reads.
TRUNK_FEATURES = {
    *("target_feat", "msa_feat", "msa_mask", "extra_msa", "extra_has_deletion", "extra_deletion_value"),
    *("extra_msa_mask", "alignment", "alignment_mask", "alignment_deletions", "centre_rows", "extra_rows"),
    *("soft_alignment", "soft_extra", "masked_msa", "template_aatype", "template_all_atom_positions"),
    *("template_all_atom_masks", "template_pseudo_beta", "template_pseudo_beta_mask", "template_mask"),
}


@dataclass(frozen=True)
class TrunkStore:
    """The cached entries in a folder."""

    folder: Path

    def path(self, source: int, key: str, draw: int) -> Path:
        """Return the path of the entry of a draw of a source's key."""
        name = hashlib.blake2b(repr((source, key, draw)).encode(), digest_size=16).hexdigest()
        return self.folder / f"{name}.safetensors"

    def begin(self, about: str) -> None:
        """Create the folder; delete partial entries and entries that were made with other weights or settings."""
        text = json.dumps(about)
        self.folder.mkdir(exist_ok=True)
        for leftover in self.folder.glob("*.partial"):
            leftover.unlink()
        path = self.folder / ABOUT
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            return
        for entry in self.folder.glob("*.safetensors"):
            entry.unlink()
        path.write_text(text, encoding="utf-8")

    def read(self, path: Path, device: torch.device) -> Batch | None:
        """Load an entry; None if it is missing or damaged, so that it is made again."""
        try:
            check_tensors(path, always=True)
            with safe_open(path, framework="pt", device=str(device)) as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError, ValueError) as error:
            log.warning("%s: damaged (%s), and made again", path, error)
            return None

    def features(self, path: Path) -> Arrays | None:
        """Load only the features of an entry; None if it is missing or damaged."""
        try:
            check_tensors(path, always=True)
            with safe_open(path, framework="numpy") as file:
                return {name: file.get_tensor(name) for name in file.keys() if name in FEATURES}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError):
            return None

    def write(self, path: Path, tensors: Batch) -> None:
        """Write an entry atomically.  Errors: UserError if the disk is full."""
        partial = path.with_name(f"{path.name}.{uuid4().hex}.partial")
        try:
            with open(partial, "wb") as file:
                file.writelines(sealed_tensors(save({name: x.cpu().contiguous() for name, x in tensors.items()})))
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise UserError(
                f"{path}: could not be written ({error.strerror}). Make room, or set finetune.trunk to "
                '"computed", and start again.'
            ) from error

    @property
    def bytes(self) -> int:
        """The size of all entries."""
        return sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))

    def check_room(self, needed: int, entries: int) -> str:
        """Describe the maximum size of the store.  Errors: UserError if the disk has too little room for it."""
        free, existing = shutil.disk_usage(self.folder.parent).free, self.bytes if self.folder.is_dir() else 0
        size = f"up to {needed / 1e9:.2g} GB for {entries:,} draws of examples"
        if needed - existing > free:
            raise UserError(
                f"{self.folder}: the outputs of the trunk need {size}, and {free / 1e9:.2g} GB are free. Lower "
                'finetune.draws or data.crop, make room, or set finetune.trunk to "computed".'
            )
        return size


def largest_store(
    sources: Sequence[Source],
    draws: int,
    examples: int,
    model: ModelConfig,
    crop: int | None,
    rows: int,
    dtype: torch.dtype,
) -> tuple[int, int]:
    """Estimate the maximum bytes of a run's entries; return them and the number of entries.

    draws: of each example.  examples: of the whole run.  rows: of the alignment.  dtype: of the trunk.
    """
    lengths = [length for source in sources for length in source.column("length")]
    sizes = sorted((_entry_bytes(min(n, crop or n), model, rows, dtype) for n in lengths), reverse=True)
    entries = min(draws * len(sizes), examples)
    # A short run may use the largest examples only.
    complete, remaining = divmod(entries, draws)
    return draws * sum(sizes[:complete]) + remaining * sum(sizes[complete : complete + 1]), entries


def _entry_bytes(n: int, model: ModelConfig, rows: int, dtype: torch.dtype) -> int:
    axes = {"res": n, "seq": rows, "pass": model.ensemble, "copy": 1}
    features = sum(
        np.dtype(feature.dtype).itemsize * int(np.prod([axes[a] if isinstance(a, str) else a for a in feature.axes]))
        for name, feature in FEATURES.items()
        if name not in TRUNK_FEATURES
    )
    return (
        features + dtype.itemsize * n * (n * model.c_z + model.c_s + model.c_m) + 4 * rows * n * model.heads.msa_classes
    )


@dataclass(frozen=True)
class DrawnMaker:
    """Make the features of examples that have few draws, or load the remaining features of a cached entry.

    make: makes a new draw every time.  examples: of a step.
    """

    make: Maker
    finetune: FinetuneConfig
    examples: int
    store: TrunkStore | None = None

    def __call__(self, source: int, key: str, index: int, passes: int) -> Arrays:
        """Make the features of a store's entry `key` for the draw of example `index`.  Errors: see `Maker`."""
        draw = self.finetune.draw(index, self.examples)
        cached = None if self.store is None else self.store.features(self.store.path(source, key, draw))
        return cached or self.make(source, key, draw, passes)


class FrozenTrunk:
    """Compute the outputs of a model's trunk, or load them from a store.

    draw: maps the number of an example to the number of its draw.
    recycles: maps the number of a draw to its number of recycles.
    msa: include the whole MSA representation, which a trained masked-MSA head reads.
    store: the cached entries; None to compute all.
    """

    def __init__(
        self,
        model: AlphaFold,
        seed: int,
        draw: Callable[[int], int],
        recycles: Callable[[int], int],
        msa: bool = False,
        store: TrunkStore | None = None,
    ) -> None:
        """Copy the structure module with its current weights, for the passes before the last."""
        first = copy.deepcopy(model.structure, {id(model.noise): model.noise}).requires_grad_(False)
        self._early, self._last = (
            partial(model.recycling_pass, structure_module=first),
            partial(model.trunk_pass, msa=msa),
        )
        self.model, self.seed, self.draw, self.recycles, self.store = model, seed, draw, recycles, store

    def inputs(self, examples: Sequence[Sample]) -> Batch:
        """Compute or load the inputs of `AlphaFold.last_pass` for a batch of examples, without the dropout key."""
        first, model = examples[0], self.model
        draw = self.draw(first.index)
        path = None if self.store is None else self.store.path(first.source, first.key, draw)
        if self.store is not None and path is not None and (cached := self.store.read(path, model.device)) is not None:
            return cached
        features = first.features if len(examples) == 1 else stack([example.features for example in examples])
        keys = [(self.seed, draw)] * len(examples)
        model.noise.seed(*keys[0]) if len(keys) == 1 else model.noise.seed_batch(keys)
        with torch.no_grad():
            recycled, done = model.recycle(features, self.recycles(draw), early=self._early)
            outputs = model.execution.call(model, self._last, model.inputs_of_pass(features, done, recycled))
        count = model.config.ensemble
        last = on_device(passes(features, done * count, count), model.device)
        inputs = {name: x for name, x in last.items() if name not in TRUNK_FEATURES} | outputs
        if self.store is not None and path is not None:
            self.store.write(path, inputs)
        return inputs
