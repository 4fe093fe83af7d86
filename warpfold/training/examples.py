"""Choose the examples of a run: which are held out, which it has used, and which come next."""

import hashlib
import logging
import math
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """Return fingerprints of the data and of the first weights; a store's `checksum` covers its contents.

    Rank 0 alone reads `init`.
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
    """Return a short hash."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def hold_out(data: Store | Sequence[Source], config: RunConfig) -> tuple[list[Source], list[tuple[Store, str]]]:
    """Return the sources to train on, and the examples held out of the first for validation.

    A multimer is trained on the assemblies of the stores, or on chains where a store has none; a monomer on chains.
    Of a source with keys of its own no other entry is trained on.
    """
    assemblies, test = config.model.multimer is not None, set(config.train.test)
    first, *others = [Source(data, assemblies=assemblies)] if isinstance(data, Store) else data
    if unknown := sorted(key for key in test if not any(key in source.keys for source in (first, *others))):
        raise UserError(f"train.test: {listed(unknown, 3)} is in none of the stores")
    kinds = (entry_keys(first.store, assemblies=kind) for kind in (False, True))
    restricted = not any(np.array_equal(first.keys.rows, every.rows) for every in kinds)
    training, held_out = split(first.store, config, first.keys if restricted else None)
    others = [Source(one.store, one.keys.without(test), one.weight) for one in others]
    return [Source(first.store, training, first.weight), *others], held_out


def without_relatives(
    sources: Sequence[Source], held_out: Sequence[tuple[Store, str]], config: RunConfig, team: Team
) -> tuple[list[Source], list[tuple[Store, str]]]:
    """Leave out entries that are related to the test or the validation, and validated ones related to the test.

    That is done for several stores, and where there is a test.  Of one store without a test whole clusters are held
    out.  Rank 0 searches; all call this.
    """
    limit, test = config.train.related_identity, set(config.train.test)
    if not limit or not (test or (held_out and len(sources) > 1)):
        return list(sources), list(held_out)
    stores = dict.fromkeys(source.store for source in sources)
    tested = [(store, key) for store in stores for key in sorted(test) if key in store]
    found: list[Any] = []
    if team.is_rank_zero:
        threads = cores()
        found.append([])
        for store in dict.fromkeys(store for store, _ in held_out):
            numbers = [n for n, one in enumerate(held_out) if one[0] is store]
            places = related_entries(Source(store, [held_out[n][1] for n in numbers]), tested, limit, threads)
            found[0] += [numbers[place] for place in places.tolist()]
        kept = [*tested, *(one for n, one in enumerate(held_out) if n not in found[0])]
        found += [related_entries(source, kept, limit, threads).tolist() for source in sources]
    validated, *left_out = team.broadcast(found, "the relatives of held-out entries")
    if count := sum(map(len, left_out)):
        log.info(
            "%s",
            f"{count:,} of {sum(len(one.keys) for one in sources):,} entries left out: related to the test or the "
            f"validation at {limit:.0%} identity or more (train.related_identity)",
        )
    if validated:
        log.info("%s", f"{len(validated)} of {len(held_out)} validated entries left out: related to the test")
    remaining = [
        Source(one.store, one.keys.take(np.setdiff1d(np.arange(len(one.keys)), there)), one.weight)
        for one, there in zip(sources, left_out)
    ]
    return remaining, [one for n, one in enumerate(held_out) if n not in set(validated)]


def split(store: Store, config: RunConfig, keys: Keys | None = None) -> tuple[Keys, list[tuple[Store, str]]]:
    """Return the keys to train on, and the examples held out for validation.

    One example for each cluster, or for each set of clusters that meet in an assembly: of a family that is held out
    every chain would say the same.  What the settings name is all validated, at most `validation_examples`.
    keys: the entries that may be trained on, of which a share is held out; None: all.
    """
    wanted, assemblies, test = config.train.validation, config.model.multimer is not None, set(config.train.test)
    every = entry_keys(store, assemblies)
    entries = (every if keys is None else keys).without(test)
    held: Sequence[str]
    if isinstance(wanted, str):
        training, other = entries, Store(wanted)
        held = entry_keys(other, assemblies)
    elif isinstance(wanted, float):
        other = store
        parts = split_keys(store, math.ceil(wanted * len(entries)), config.train.seed, assemblies, keys)
        training, held = (part.without(test) for part in parts)
    else:
        if unknown := [key for key in wanted if key not in store]:
            raise UserError(f"train.validation: {unknown[0]} is not in {store.path}")
        if both := sorted(test & set(wanted)):
            raise UserError(f"train.validation and train.test both name {both[0]}; leave it out of one of them")
        if not assemblies and (wrong := [key for key in wanted if key not in every]):
            raise UserError(f"train.validation: {wrong[0]} is an assembly; give chains, or train a multimer")
        other, held = store, list(wanted)
        training = entries.without(wanted)
    drawn = keyed_rng(config.train.seed, "validation").permutation(len(held)).tolist()
    if isinstance(wanted, float | str):
        counts, chains = Source(other, held).members() if held else (np.empty(0, np.int64), np.empty(0, np.int64))
        each = np.split(other.column("cluster").values[chains], np.cumsum(counts)[:-1])
        first: dict[frozenset[int], int] = {}
        for i in drawn:
            first.setdefault(frozenset(each[i].tolist()), i)
        drawn = list(first.values())
    return training, [(other, held[i]) for i in sorted(drawn[: config.train.validation_examples])]


@dataclass(frozen=True)
class HeldOut:
    """A held-out example, or the part of it that is validated, which is always the same."""

    key: str
    features: Arrays
    residues: int  # of the whole
    reason: str = ""  # why there are no features: the entry is damaged, or too large for the memory


def held_out_features(held_out: Sequence[tuple[Store, str]], config: RunConfig) -> Generator[HeldOut, None, None]:
    """Yield the held-out examples: of a long chain the first residues, of a large assembly those around an interface.

    One that cannot be made has the reason, and no other takes its place.
    A thread makes the features of the next one while the caller uses these.
    """
    passes, most = (config.model.recycles + 1) * config.model.ensemble, config.train.validation_residues

    def make(one: tuple[Store, str]) -> HeldOut:
        """Read an example, cut it, and make its features."""
        store, key = one
        try:
            return made(store, key)
        except StorageError:
            raise
        except (UserError, MemoryError) as error:
            return HeldOut(key, {}, 0, str(error) or "too little memory")

    def made(store: Store, key: str) -> HeldOut:
        """Read, cut and make, whatever is wrong."""
        part: StoredExample | RawExample | Assembly = open_entry(store, key, config.model.multimer is not None)
        whole, crops = part.length, None
        if isinstance(part, Assembly):
            crops = fixed_crop(part, most, config.data.interface_distance)
        elif whole > most:
            part = part.take(slice(most))
        drawn = config.train.seed, (key, "validation")
        features = make_features(part, config.data, *drawn, passes, crops=crops)
        return HeldOut(key, features, whole)

    with ThreadPoolExecutor(1, "held-out") as thread:
        try:
            yield from in_order(make, held_out, thread, ahead=2)
        finally:
            thread.shutdown(wait=False, cancel_futures=True)  # where the caller wants no more


def draw_recycles(config: RunConfig, step: int) -> int:
    """Draw the number of recycles of a step's examples, uniform from 0 to the model's number; all have the same.

    With `finetune.draws` the same few draws come for ever, so their numbers are stratified: the first has the model's
    number, with which validation and prediction run, and the others are spread evenly over the smaller ones.
    """
    if draws := config.finetune.draws:
        return config.model.recycles - config.finetune.draw(step, 1) * (config.model.recycles + 1) // draws
    return int(keyed_rng(config.train.seed, "recycles", step).integers(config.model.recycles + 1))  # Algorithm 31


def open_ledger(
    run: RunFolder, config: RunConfig, state: Checkpoint, origin: Mapping[str, str], replay: Path | None, team: Team
) -> Ledger:
    """Open the record of the examples used so far; those after the last checkpoint, or `replay`, are used again."""
    decides = [origin["store"], config.train.seed, config.train.order, config.train.validation]
    decides += [config.train.test] if config.train.test else []
    place = state.step * share_of(config.optim.accumulate, team.mesh.data.size, team.mesh.data.rank)
    return Ledger(run.path, fingerprint(repr(decides).encode()), place, used(config, state), replay, team)


def used(config: RunConfig, state: Checkpoint) -> State:
    """Return which examples a run had used at a checkpoint."""
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
    """Return the order of this rank's examples of the steps that remain, and their loader.

    The loader yields `Sample`s on the device.  Ranks that share examples make the same.

    store: of what a trunk that is not trained has made of them.
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
        if not config.data.resample_msa:  # one sample serves every pass
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
