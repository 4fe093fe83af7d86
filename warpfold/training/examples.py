"""Choose the examples of a run: the held-out ones, those used before a checkpoint, and the next ones."""

import hashlib
import logging
import math
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from warpfold.batch import Arrays
from warpfold.bulk import in_order
from warpfold.data.example.raw_example import Assembly, RawExample
from warpfold.data.features.crop import fixed_crop
from warpfold.data.features.make import make_features
from warpfold.data.load.examples import ExampleDataset, Maker, Quarantine, RunOrder, only
from warpfold.data.load.order import Order, Source, costs, split_keys
from warpfold.data.load.relatives import related_entries
from warpfold.data.load.schedule import Schedule, State, share_of
from warpfold.data.store.index import Keys
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import StoredExample, entry_keys, open_entry
from warpfold.device import cores, default_workers
from warpfold.engine.checkpoint import Checkpoint, RunFolder
from warpfold.engine.loop import Log
from warpfold.engine.ready import Ready
from warpfold.engine.trunk import DrawnMaker, TrunkStore
from warpfold.errors import StorageError, UserError, listed
from warpfold.files import opened
from warpfold.keyed import keyed_rng
from warpfold.parallel.team import Team
from warpfold.training.config import RunConfig
from warpfold.training.ledger import Ledger

log = logging.getLogger("warpfold")


def fingerprint_origin(sources: Sequence[Source], init: Path | None, team: Team) -> dict[str, str]:
    """Compute fingerprints of the data and of the first weights.  The `checksum` of a store covers its contents.

    Rank 0 alone reads `init`.  All ranks call this.
    """
    data = b"".join(source.store.checksum.encode() for source in sources)
    if len(sources) > 1:
        total = sum(source.weight for source in sources)
        data += repr([source.weight / total for source in sources]).encode()
    first = "none"
    if init and team.is_rank_zero:
        with opened(init, unpack=False) as file:
            first = fingerprint(file.read())
    return {"store": fingerprint(data), "init": team.broadcast(first, "the first parameters")}


def fingerprint(data: bytes) -> str:
    """Compute a hash of 16 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def hold_out(data: Store | Sequence[Source], config: RunConfig) -> tuple[list[Source], list[tuple[Store, str]]]:
    """Hold validation examples out of the first source; return the sources to train on, and the held-out examples.

    A multimer is trained on the assemblies of a store, or on its chains if it has no assemblies.  A monomer is trained
    on chains.  If a source selects keys, other entries are not trained on.
    """
    assemblies, test = config.model.multimer is not None, set(config.train.test)
    first, *other_sources = [Source(data, assemblies=assemblies)] if isinstance(data, Store) else data
    if unknown := sorted(key for key in test if not any(key in source.keys for source in (first, *other_sources))):
        raise UserError(f"train.test: {listed(unknown, 3)} is in none of the stores")
    kinds = (entry_keys(first.store, assemblies=kind) for kind in (False, True))
    restricted = not any(np.array_equal(first.keys.rows, kind_keys.rows) for kind_keys in kinds)
    training, held_out = split(first.store, config, first.keys if restricted else None)
    other_sources = [Source(source.store, source.keys.without(test), source.weight) for source in other_sources]
    return [Source(first.store, training, first.weight), *other_sources], held_out


def without_relatives(
    sources: Sequence[Source], held_out: Sequence[tuple[Store, str]], config: RunConfig, team: Team
) -> tuple[list[Source], list[tuple[Store, str]]]:
    """Remove training entries related to the test or the validation, and validation entries related to the test.

    Nothing is done for one store without a test, of which whole clusters are held out.
    Rank 0 searches for related entries.  All ranks call this.
    """
    limit, test = config.train.related_identity, set(config.train.test)
    if not limit or not (test or (held_out and len(sources) > 1)):
        return list(sources), list(held_out)
    stores = dict.fromkeys(source.store for source in sources)
    tested = [(store, key) for store in stores for key in sorted(test) if key in store]
    # The first list has indices of held-out examples, and the others have indices of the keys of each source.
    related: list[list[int]] = []
    if team.is_rank_zero:
        threads = cores()
        related.append([])
        for store in dict.fromkeys(store for store, _ in held_out):
            numbers = [n for n, (other, _) in enumerate(held_out) if other is store]
            indices = related_entries(Source(store, [held_out[n][1] for n in numbers]), tested, limit, threads)
            related[0] += [numbers[i] for i in indices.tolist()]
        references = [*tested, *(example for n, example in enumerate(held_out) if n not in related[0])]
        related += [related_entries(source, references, limit, threads).tolist() for source in sources]
    validated, *left_out = team.broadcast(related, "the relatives of held-out entries")
    if count := sum(map(len, left_out)):
        log.info(
            "%s",
            f"{count:,} of {sum(len(source.keys) for source in sources):,} entries left out: related to the test or "
            f"the validation at {limit:.0%} identity or more (train.related_identity)",
        )
    if validated:
        log.info("%s", f"{len(validated)} of {len(held_out)} validated entries left out: related to the test")
    remaining = []
    for source, indices in zip(sources, left_out):
        keys = source.keys.take(np.setdiff1d(np.arange(len(source.keys)), indices))
        remaining.append(Source(source.store, keys, source.weight))
    return remaining, [example for n, example in enumerate(held_out) if n not in set(validated)]


def split(store: Store, config: RunConfig, keys: Keys | None = None) -> tuple[Keys, list[tuple[Store, str]]]:
    """Split a store; return the keys to train on, and the examples held out for validation.

    One example is held out for each cluster, or for each set of clusters in an assembly, since the chains of a cluster
    would repeat the result.  Of the entries that the settings name all are validated.  There are at most
    `validation_examples`.
    keys: the entries to train on, of which a share is held out; None for all of the store.
    """
    validation, assemblies, test = config.train.validation, config.model.multimer is not None, set(config.train.test)
    all_keys = entry_keys(store, assemblies)
    entries = (all_keys if keys is None else keys).without(test)
    held_out: Sequence[str]
    if isinstance(validation, str):
        training, other = entries, Store(validation)
        held_out = entry_keys(other, assemblies)
    elif isinstance(validation, float):
        other = store
        parts = split_keys(store, math.ceil(validation * len(entries)), config.train.seed, assemblies, keys)
        training, held_out = (part.without(test) for part in parts)
    else:
        if unknown := [key for key in validation if key not in store]:
            raise UserError(f"train.validation: {unknown[0]} is not in {store.path}")
        if duplicates := sorted(test & set(validation)):
            raise UserError(f"train.validation and train.test both name {duplicates[0]}. Remove it from one of them.")
        if not assemblies and (assembly_keys := [key for key in validation if key not in all_keys]):
            raise UserError(f"train.validation: {assembly_keys[0]} is an assembly. Name chains, or train a multimer.")
        other, held_out = store, list(validation)
        training = entries.without(validation)
    drawn = keyed_rng(config.train.seed, "validation").permutation(len(held_out)).tolist()
    if isinstance(validation, float | str):
        counts, chains = (
            Source(other, held_out).members() if held_out else (np.empty(0, np.int64), np.empty(0, np.int64))
        )
        clusters_of_examples = np.split(other.column("cluster").values[chains], np.cumsum(counts)[:-1])
        first: dict[frozenset[int], int] = {}
        for i in drawn:
            first.setdefault(frozenset(clusters_of_examples[i].tolist()), i)
        drawn = list(first.values())
    return training, [(other, held_out[i]) for i in sorted(drawn[: config.train.validation_examples])]


@dataclass(frozen=True)
class HeldOut:
    """A held-out example, or a fixed crop of it."""

    key: str
    features: Arrays
    residues: int  # before cropping
    reason: str = ""  # for missing features: a damaged entry, too little memory


def held_out_features(held_out: Sequence[tuple[Store, str]], config: RunConfig) -> Generator[HeldOut, None, None]:
    """Yield the held-out examples, cropped to `train.validation_residues`.

    Long chains keep their first residues, and large assemblies keep residues around an interface.
    An example that cannot be made has the reason, and is not replaced by another.
    A thread makes the features of the next example while the caller uses the current one.
    """
    passes, most = (config.model.recycles + 1) * config.model.ensemble, config.train.validation_residues

    def make(entry: tuple[Store, str]) -> HeldOut:
        """Read an example, crop it, and make its features."""
        store, key = entry
        try:
            example: StoredExample | RawExample | Assembly = open_entry(store, key, config.model.multimer is not None)
            length, crops = example.length, None
            if isinstance(example, Assembly):
                crops = fixed_crop(example, most, config.data.interface_distance)
            elif length > most:
                example = example.take(slice(most))
            seed, place = config.train.seed, (key, "validation")
            return HeldOut(key, make_features(example, config.data, seed, place, passes, crops=crops), length)
        except StorageError:
            raise
        except (UserError, MemoryError) as error:
            return HeldOut(key, {}, 0, str(error) or "too little memory")

    with ThreadPoolExecutor(1, "held-out") as thread:
        try:
            yield from in_order(make, held_out, thread, ahead=2)
        finally:
            # The caller may stop early.
            thread.shutdown(wait=False, cancel_futures=True)


def draw_recycles(config: RunConfig, step: int) -> int:
    """Draw the number of recycles of all examples of a step, uniform from 0 to the model's number.

    With `finetune.draws` the same few draws are repeated, so their numbers of recycles are stratified.  The first has
    the model's number, which validation and prediction use, and the others are spread evenly over smaller numbers.
    """
    if draws := config.finetune.draws:
        return config.model.recycles - config.finetune.draw(step, 1) * (config.model.recycles + 1) // draws
    return int(keyed_rng(config.train.seed, "recycles", step).integers(config.model.recycles + 1))  # Algorithm 31


def open_ledger(
    run: RunFolder, config: RunConfig, state: Checkpoint, origin: Mapping[str, str], replay: Path | None, team: Team
) -> Ledger:
    """Open the record of used examples.  Those after the last checkpoint, or those of `replay`, are used again."""
    # Two runs with equal values give the same entry to each example.
    data = [origin["store"], config.train.seed, config.train.order, config.train.validation]
    data += [config.train.test] if config.train.test else []
    place = state.step * share_of(config.optim.accumulate, team.mesh.data.size, team.mesh.data.rank)
    return Ledger(run.path, fingerprint(repr(data).encode()), place, used(config, state), replay, team)


def used(config: RunConfig, state: Checkpoint) -> State:
    """Return the examples that a run had used at a checkpoint."""
    notes = state.notes.get("loader", {"first": state.step * config.optim.accumulate, "early": ()})
    return State(notes["first"], tuple(notes["early"]))


def load(
    config: RunConfig,
    sources: Sequence[Source],
    state: Checkpoint,
    ledger: Ledger,
    log: Log,
    device: torch.device | str,
    team: Team,
    store: TrunkStore | None = None,
) -> tuple[RunOrder, Ready]:
    """Build the order of this rank's examples for the remaining steps, and their loader.

    The loader yields `Sample`s on the device.  Ranks that share an example each make it.
    store: the cached outputs of a frozen trunk.
    """
    order = Order(sources, config.train.seed, config.train.order)
    ranks, steps = team.mesh.data, max(0, config.train.steps - state.step)
    schedule = Schedule(
        used(config, state),
        steps,
        config.optim.accumulate,
        ranks.rank,
        ranks.size,
        costs(order, config.data) if ranks.size > 1 else None,
        ledger.replay,
    )

    def set_aside(name: str, index: int, reason: str) -> None:
        ledger.set_aside(name, index, reason)
        log({"kind": "quarantine", "step": log.step, "example": name, "reason": reason})

    def passes(step: int) -> int:
        # Without resampling all passes use one sample of the alignment.
        if not config.data.resample_msa:
            return 1
        return (draw_recycles(config, state.step + step) + 1) * config.model.ensemble

    make = Maker(
        tuple(source.store for source in sources),
        config.data,
        config.train.seed,
        assemblies=config.model.multimer is not None,
        sizes=config.plan.sizes,
        multiple=config.plan.multiple_on(torch.device(device).type),
    )
    quarantine = Quarantine(math.ceil(config.train.quarantine * len(order)), ledger.quarantined, set_aside)
    examples = RunOrder(order, schedule, quarantine, passes, ledger.use)
    return examples, Ready(
        ExampleDataset(
            DrawnMaker(make, config.finetune, config.optim.accumulate, store) if config.finetune.draws else make
        ),
        order=examples,
        collate=only,
        seed=config.train.seed,
        workers=default_workers(device) if config.train.workers is None else config.train.workers,
        ahead=config.train.ahead,
        window=config.train.window,
        device=device,
    )
