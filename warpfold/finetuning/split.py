"""Split a store into training, validation and test entries.

A test protein with a relative in training measures memory rather than accuracy, so whole clusters belong to one part.
The split is a file that other runs and other programs can use.
"""

import logging
import tomllib
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np

from warpfold.data.load.order import Source, joined_clusters
from warpfold.data.load.relatives import families, related_entries
from warpfold.data.similar.relatives import MIN_IDENTITY
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import entry_keys
from warpfold.device import cores
from warpfold.errors import UserError, listed
from warpfold.files import write_atomically
from warpfold.keyed import keyed_rng
from warpfold.settings import toml_value

# With fewer entries no test set is large enough to be informative.
MIN_ENTRIES = 10
# Fraction of the entries for validation and again for the test, and the largest size of each.
SHARE = 0.15
MAX_HELD_OUT = 60
# With fewer clusters differences are rarely significant.
MIN_CLUSTERS = 8

log = logging.getLogger("warpfold")


@dataclass(frozen=True, kw_only=True)
class Split:
    """The keys of each part. by: "cluster", or "chain" if training may contain relatives of test entries."""

    by: str
    training: tuple[str, ...]
    validation: tuple[str, ...]
    test: tuple[str, ...]

    @property
    def parts(self) -> dict[str, tuple[str, ...]]:
        """The three parts by their names."""
        return {"training": self.training, "validation": self.validation, "test": self.test}

    def write(self, path: Path) -> None:
        """Write the split as TOML."""
        lines = [
            "# Which entries are trained on, which choose the best parameters, and which test them.  `warpfold",
            '# finetune --split` takes this file.  by = "cluster": no cluster is in two parts.',
        ]
        for name, value in asdict(self).items():
            lines += (
                [f"{name} = {toml_value(value)}"]
                if isinstance(value, str)
                else ["", f"{name} = [", *(f"    {toml_value(key)}," for key in value), "]"]
            )
        write_atomically(path, "\n".join(lines) + "\n")


def make_split(
    store: Store, seed: int, assemblies: bool = False, by: str = "cluster", min_identity: float = MIN_IDENTITY
) -> Split:
    """Draw a split of all entries of a store, which are assemblies or chains.

    Clusters with related chains (data/similar/relatives.py, at `min_identity`) are joined. Whole clusters are held out
    until validation and test have enough entries. Clusters larger than both together stay in training. Fewer than
    `MIN_CLUSTERS` clusters cause a warning.
    Raises UserError for too few entries, and if a part would be empty.
    """
    keys = entry_keys(store, assemblies)
    if len(keys) < MIN_ENTRIES:
        raise UserError(
            f"{len(keys)} structures are too few: with fewer than {MIN_ENTRIES} a test of one or two proteins says "
            "nothing, and training mostly remembers them; add structures, or train without a test (warpfold train)"
        )
    held_out_size = min(MAX_HELD_OUT, max(2, round(SHARE * len(keys))))
    if by == "chain":
        order = keyed_rng(seed, "split").permutation(len(keys)).tolist()
        test, validation = set(order[:held_out_size]), set(order[held_out_size : 2 * held_out_size])
        indices = {"test": test, "validation": validation, "training": set(order) - test - validation}
        return Split(by=by, **{name: tuple(keys[i] for i in sorted(part)) for name, part in indices.items()})
    clusters: dict[str, list[str]] = {}
    source = Source(store, assemblies=assemblies)
    for key, cluster in zip(keys, families(source, joined_clusters(source), min_identity, cores())):
        clusters.setdefault(cluster, []).append(key)
    count, largest = len(clusters), max(clusters.values(), key=len)
    family = f"the largest, of {largest[0]}, has {len(largest)} of the {len(keys)} structures"
    parts: dict[str, set[str]] = {"test": set(), "validation": set()}
    for cluster in keyed_rng(seed, "split").permutation(sorted(clusters)).tolist():
        part = min(parts.values(), key=len)
        if len(part) < held_out_size and len(part) + len(clusters[cluster]) <= 2 * held_out_size:
            part.update(clusters.pop(cluster))
    if not all(parts.values()):
        raise UserError(
            f"the {len(keys)} structures are of {count} cluster{'s' * (count > 1)}, too few or too unequal to "
            f"hold some out without relatives in training; {family}; add proteins of other families, raise "
            "--split-identity, or split by chain and say: --one-family"
        )
    if count < MIN_CLUSTERS:
        log.warning(
            "%s",
            f"the structures are of {count} clusters of related proteins, too few for a verdict; {family}; add "
            "proteins of other families, or raise --split-identity",
        )
    held_out = parts["test"] | parts["validation"]
    return Split(
        by=by,
        training=tuple(key for key in keys if key not in held_out),
        validation=tuple(key for key in keys if key in parts["validation"]),
        test=tuple(key for key in keys if key in parts["test"]),
    )


def read_split(path: Path, store: Store, assemblies: bool = False) -> Split:
    """Read a split and validate it against a store.

    Raises UserError for an invalid file, unknown entries, entries in two parts, empty parts, and clusters in two parts
    of a split by cluster.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        parts = {name: tuple(map(str, values[name])) for name in ("training", "validation", "test")}
        split = Split(by=values["by"], **parts)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: is not a split ({error}); `warpfold finetune` writes one, split.toml") from error
    if split.by not in ("cluster", "chain"):
        raise UserError(f'{path}: by = "{split.by}" is neither "cluster" nor "chain"')
    if extra := set(values) - {field.name for field in fields(Split)}:
        raise UserError(f"{path}: has no key {listed(sorted(extra))}")
    keys, part_of = entry_keys(store, assemblies), dict[str, str]()
    clusters = dict(zip(keys, joined_clusters(Source(store, assemblies=assemblies))))
    first: dict[str, tuple[str, str]] = {}
    for name, part in parts.items():
        if not part:
            raise UserError(f"{path}: {name} is empty")
        for key in part:
            if key not in clusters:
                raise UserError(f"{path}: {key} ({name}) is not among the structures that could be used")
            if key in part_of:
                raise UserError(f"{path}: {key} is in {part_of[key]} and in {name}")
            part_of[key] = name
            other, other_part = first.setdefault(clusters[key], (key, name))
            if split.by == "cluster" and other_part != name:
                raise UserError(
                    f"{path}: {other} ({other_part}) and {key} ({name}) are of one cluster; put them into one part, "
                    'or say by = "chain"'
                )
    return split


def without_relatives(split: Split, store: Store, min_identity: float) -> Split:
    """Remove entries from a split by cluster that are related to entries of a later part.

    Validation entries must not be related to the test, and training entries to neither validation nor test.
    Raises UserError if a part would be empty.
    """
    if split.by != "cluster":
        return split
    threads = cores()

    def unrelated(name: str, keys: tuple[str, ...], held_out: tuple[str, ...]) -> tuple[str, ...]:
        """Return the keys that are related to no held-out entry."""
        entries = [(store, key) for key in held_out]
        related = related_entries(Source(store, keys), entries, min_identity, threads)
        if len(related) == len(keys):
            raise UserError(
                f"split: every {name} entry has relatives among those that judge it; move them into one part, raise "
                '--split-identity, or say by = "chain"'
            )
        return tuple(keys[place] for place in np.setdiff1d(np.arange(len(keys)), related).tolist())

    validation = unrelated("validation", split.validation, split.test)
    training = unrelated("training", split.training, (*split.test, *validation))
    return replace(split, training=training, validation=validation)
