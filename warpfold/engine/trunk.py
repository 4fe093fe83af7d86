"""What a trunk of which nothing is trained makes of an example: once for each of its draws, and kept in a folder.

    RUN/trunk/trunk.json            what the entries were made with: with anything else they are made again
    RUN/trunk/HASH.safetensors      of one example and draw: single, pair, the first row of the alignment, the logits of
                                    the masked-MSA head, and the features of the residues and labels

An entry is made when its example first comes, and appears whole or not at all.  The trunk is not trained, but the
positions that a pass hands to the next are the structure module's: so the passes before the last take its first
weights, whether entries are kept or not.
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
OF_TRUNK = {
    *("target_feat", "msa_feat", "msa_mask", "extra_msa", "extra_has_deletion", "extra_deletion_value"),
    *("extra_msa_mask", "alignment", "alignment_mask", "alignment_deletions", "centre_rows", "extra_rows"),
    *(
        "soft_alignment",
        "soft_extra",
        "masked_msa",
        "template_aatype",
        "template_all_atom_positions",
        "template_all_atom_masks",
    ),
    *("template_pseudo_beta", "template_pseudo_beta_mask", "template_mask"),
}


@dataclass(frozen=True)
class TrunkStore:
    """The entries in a folder."""

    folder: Path

    def path(self, source: int, key: str, draw: int) -> Path:
        """Return where the entry of a draw of a source's key is, or will be."""
        name = hashlib.blake2b(repr((source, key, draw)).encode(), digest_size=16).hexdigest()
        return self.folder / f"{name}.safetensors"

    def begin(self, about: str) -> None:
        """Make the folder; entries that were made with something else are removed, and what a kill left."""
        text = json.dumps(about)
        self.folder.mkdir(exist_ok=True)
        for left in self.folder.glob("*.partial"):
            left.unlink()
        path = self.folder / ABOUT
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            return
        for entry in self.folder.glob("*.safetensors"):
            entry.unlink()
        path.write_text(text, encoding="utf-8")

    def read(self, path: Path, device: torch.device) -> Batch | None:
        """Return an entry; None where there is none, or a damaged one, which is made again."""
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
        """Return the features of an entry alone; None as of `read`."""
        try:
            check_tensors(path, always=True)
            with safe_open(path, framework="numpy") as file:
                return {name: file.get_tensor(name) for name in file.keys() if name in FEATURES}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError):
            return None

    def write(self, path: Path, tensors: Batch) -> None:
        """Write an entry.  Errors: UserError where the disk is full."""
        partial = path.with_name(f"{path.name}.{uuid4().hex}.partial")
        try:
            with open(partial, "wb") as file:
                file.writelines(sealed_tensors(save({name: x.cpu().contiguous() for name, x in tensors.items()})))
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise UserError(
                f"{path}: could not be written ({error.strerror}); make room, or set finetune.trunk to "
                '"computed", and start again'
            ) from error

    @property
    def bytes(self) -> int:
        """The bytes of all entries that there are."""
        return sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))

    def check_room(self, needed: int, entries: int) -> str:
        """Say how large the store may get.  Errors: UserError where the disk has less room than what is lacking."""
        free, there = shutil.disk_usage(self.folder.parent).free, self.bytes if self.folder.is_dir() else 0
        size = f"up to {needed / 1e9:.2g} GB for {entries:,} draws of examples"
        if needed - there > free:
            raise UserError(
                f"{self.folder}: what the trunk makes needs {size}, and {free / 1e9:.2g} GB are free; lower "
                'finetune.draws or data.crop, make room, or set finetune.trunk to "computed"'
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
    """Return the bytes that a run's entries need at most, about, and how many there are.

    draws: of each example.  examples: of the whole run.  rows: of the alignment.  dtype: of the trunk.
    """
    lengths = [length for source in sources for length in source.column("length")]
    sizes = sorted((_entry_bytes(min(n, crop or n), model, rows, dtype) for n in lengths), reverse=True)
    entries = min(draws * len(sizes), examples)
    whole, rest = divmod(entries, draws)
    return draws * sum(sizes[:whole]) + rest * sum(sizes[whole : whole + 1]), entries


def _entry_bytes(n: int, model: ModelConfig, rows: int, dtype: torch.dtype) -> int:
    axes = {"res": n, "seq": rows, "pass": model.ensemble, "copy": 1}
    features = sum(
        np.dtype(feature.dtype).itemsize * int(np.prod([axes[a] if isinstance(a, str) else a for a in feature.axes]))
        for name, feature in FEATURES.items()
        if name not in OF_TRUNK
    )
    return (
        features + dtype.itemsize * n * (n * model.c_z + model.c_s + model.c_m) + 4 * rows * n * model.heads.msa_classes
    )


@dataclass(frozen=True)
class DrawnMaker:
    """Make the features of examples of which each has few draws; of an entry that is kept, what is left to read.

    make: of a new draw every time.  examples: of a step.
    """

    make: Maker
    finetune: FinetuneConfig
    examples: int
    store: TrunkStore | None = None

    def __call__(self, source: int, key: str, index: int, passes: int) -> Arrays:
        """Return the features of a store's entry `key`, of the draw of example `index`.  Errors: as of `Maker`."""
        draw = self.finetune.draw(index, self.examples)
        kept = None if self.store is None else self.store.features(self.store.path(source, key, draw))
        return kept or self.make(source, key, draw, passes)


class FrozenTrunk:
    """Runs the trunk of a model on examples, or reads what it made of them before.

    draw: of an example's number, which draw it is.  recycles: of a draw, how often it is recycled.  msa: the masked-MSA
    head is trained, and reads the alignment.  store: of the entries that are kept; None: everything is computed.
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
        """Copy the structure module: as its weights are now, passes before the last take them."""
        first = copy.deepcopy(model.structure, {id(model.noise): model.noise}).requires_grad_(False)
        self._early, self._last = partial(model.early_pass, structure_module=first), partial(model.trunk_pass, msa=msa)
        self.model, self.seed, self.draw, self.recycles, self.store = model, seed, draw, recycles, store

    def inputs(self, examples: Sequence[Sample]) -> Batch:
        """Return what `AlphaFold.last_pass` needs of examples that go through the model together, the key apart."""
        one, model = examples[0], self.model
        draw = self.draw(one.index)
        path = None if self.store is None else self.store.path(one.source, one.key, draw)
        if self.store is not None and path is not None and (kept := self.store.read(path, model.device)) is not None:
            return kept
        features = one.features if len(examples) == 1 else stack([example.features for example in examples])
        keys = [(self.seed, draw)] * len(examples)
        model.noise.seed(*keys[0]) if len(keys) == 1 else model.noise.seed_batch(keys)
        with torch.no_grad():
            recycled, done = model.recycle(features, self.recycles(draw), early=self._early)
            found = model.execution.call(model, self._last, model.inputs_of_pass(features, done, recycled))
        count = model.config.ensemble
        left = on_device(passes(features, done * count, count), model.device)
        found = {name: x for name, x in left.items() if name not in OF_TRUNK} | found
        if self.store is not None and path is not None:
            self.store.write(path, found)
        return found
