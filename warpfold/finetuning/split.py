"""Split a store into what is trained on, what validates the training, and what tests the result.

A test protein with a relative in training tells how well the model remembers, not how well it folds.  So whole clusters
go to one part.  The split is a file, so that another run, or another program, can be held to the same.
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

LEAST = 10  # entries below which nothing can be held out that would tell anything
SHARE = 0.15  # of the entries that validate, and as many that test
MOST = 60  # entries that validate or test, at most
FEWEST = 8  # clusters below which differences say little

log = logging.getLogger("warpfold")


@dataclass(frozen=True, kw_only=True)
class Split:
    """The parts of a store, by key; by: "cluster", or "chain" where relatives of a test entry may be in training."""

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
    """Draw a split of all entries of a store: of assemblies, or of chains.

    Clusters with related chains (data/similar/relatives.py, at `min_identity`) are joined.  Whole clusters are held out
    until there are enough entries, but none that is larger than all that is to be held out.  A warning says if there
    are fewer than `FEWEST` clusters.
    Errors: UserError for too few entries, and where clusters leave one of the parts empty.
    """
    keys = entry_keys(store, assemblies)
    if len(keys) < LEAST:
        raise UserError(
            f"{len(keys)} structures are too few: with fewer than {LEAST} a test of one or two proteins says nothing, "
            "and training mostly remembers them; add structures, or train without a test (warpfold train)"
        )
    held = min(MOST, max(2, round(SHARE * len(keys))))
    if by == "chain":
        order = keyed_rng(seed, "split").permutation(len(keys)).tolist()
        test, validation = set(order[:held]), set(order[held : 2 * held])
        places = {"test": test, "validation": validation, "training": set(order) - test - validation}
        return Split(by=by, **{name: tuple(keys[i] for i in sorted(part)) for name, part in places.items()})
    clusters: dict[str, list[str]] = {}
    source = Source(store, assemblies=assemblies)
    for key, cluster in zip(keys, families(source, joined_clusters(source), min_identity, cores())):
        clusters.setdefault(cluster, []).append(key)
    count, largest = len(clusters), max(clusters.values(), key=len)
    family = f"the largest, of {largest[0]}, has {len(largest)} of the {len(keys)} structures"
    parts: dict[str, set[str]] = {"test": set(), "validation": set()}
    for cluster in keyed_rng(seed, "split").permutation(sorted(clusters)).tolist():
        part = min(parts.values(), key=len)
        if len(part) < held and len(part) + len(clusters[cluster]) <= 2 * held:  # those that are larger train
            part.update(clusters.pop(cluster))
    if not all(parts.values()) or not clusters:
        raise UserError(
            f"the {len(keys)} structures are of {count} cluster{'s' * (count > 1)}, too few or too unequal to "
            f"hold some out without relatives in training; {family}; add proteins of other families, raise "
            "--split-identity, or split by chain and say: --one-family"
        )
    if count < FEWEST:
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
    """Read a split, and check it against a store.

    Errors: UserError for a file that is no split, for entries that the store lacks or that are in two parts, an empty
    part, and a cluster in two parts of a split by cluster.
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
    keys, where = entry_keys(store, assemblies), dict[str, str]()
    clusters = dict(zip(keys, joined_clusters(Source(store, assemblies=assemblies))))
    first: dict[str, tuple[str, str]] = {}
    for name, part in parts.items():
        if not part:
            raise UserError(f"{path}: {name} is empty")
        for key in part:
            if key not in clusters:
                raise UserError(f"{path}: {key} ({name}) is not among the structures that could be used")
            if key in where:
                raise UserError(f"{path}: {key} is in {where[key]} and in {name}")
            where[key] = name
            other, there = first.setdefault(clusters[key], (key, name))
            if split.by == "cluster" and there != name:
                raise UserError(
                    f"{path}: {other} ({there}) and {key} ({name}) are of one cluster; put them into one part, or say "
                    'by = "chain"'
                )
    return split


def without_relatives(split: Split, store: Store, min_identity: float) -> Split:
    """Leave out of a split by cluster what is related to a part that judges it.

    Validation entries must not be related to the test, nor training entries to the test or the validation.
    Errors: UserError if a part would be empty.
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
