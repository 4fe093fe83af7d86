"""Which entry of which store each number of a run's examples is: a pure function of the data and the seed."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from warpfold.data.features.choose import SampleConfig, predicted_assembly_cost, predicted_cost
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import chains_of, entry_keys
from warpfold.errors import UserError
from warpfold.keyed import keyed_rng

Weights = Literal["uniform", "paper"]
MIXTURE_BLOCK = 4096  # numbers whose stores are drawn at a time


class Source:
    """Entries of a store to draw from, and how often.

    keys: by default the chains of the store, or with `assemblies` its assemblies (`stored_example.entry_keys`).
    weight: relative to the other sources (Supp. 1.3: 0.25 for the PDB, 0.75 for self-distillation).
    """

    def __init__(
        self, store: Store, keys: Sequence[str] | None = None, weight: float = 1.0, assemblies: bool = False
    ) -> None:
        self.store, self.weight = store, weight
        self.keys = entry_keys(store, assemblies) if keys is None else keys
        members = chains_of(store)
        for key in self.keys:
            for name in (key, *members.get(key, ())):
                if name not in store:
                    raise UserError(f"{store.path}: has no entry {name!r}; pack the store again, or name others")
        if not self.keys:
            raise UserError(f"{store.path}: no entries to draw from")
        if not 0 < weight < float("inf"):
            raise UserError(f"{store.path}: weight {weight}; give a positive number")

    def column(self, name: str) -> list:
        """Return one value of the index for each of `keys`."""
        values = dict(zip(self.store.keys, self.store.column(name)))
        return [values[key] for key in self.keys]

    def chains(self) -> list[list[str]]:
        """Return the keys of the different chains of each entry, which is its own only chain in most stores."""
        assemblies = chains_of(self.store)
        return [list(dict.fromkeys(assemblies.get(key, (key,)))) for key in self.keys]


class SourceEntry(NamedTuple):
    """An entry of a source: which source, which of its keys, and its name in a run."""

    source: int
    place: int
    key: str
    name: str  # the key, prefixed by the name of its store if there are several


class Order:
    """The order of a run's examples: which entry each number is.

    With several sources each number draws its source by weight, and each source has an order of its own.
    weights: "uniform" goes through a new seeded permutation of a source in every epoch of it; "paper" draws with
    replacement, a chain with probability max(min(length, 512), 256) / 512 divided by the number of chains in its
    cluster (Supp. 1.2.5), and an assembly with the sum over its chains, a chain that it has several times counted once:
    as often as one of its chains would be drawn, so that families are balanced as for single chains.
    """

    def __init__(self, sources: Sequence[Source], seed: int, weights: Weights = "uniform") -> None:
        self.sources, self.seed = list(sources), seed
        names = [source.store.path.resolve().name for source in sources]
        alike = len(set(names)) < len(names)
        self._names = [str(source.store.path) for source in sources] if alike else names
        total = sum(source.weight for source in sources)
        self._shares = np.cumsum([source.weight / total for source in sources])
        self._cumulative = [np.cumsum(paper_weights(s)) for s in sources] if weights == "paper" else None
        self._permutations: dict[int, tuple[int, np.ndarray]] = {}  # source: epoch, permutation
        self._before = [np.zeros(len(sources), np.int64)]  # how often each source was drawn before each block
        self._block: tuple[int, np.ndarray] = -1, np.empty(0, np.int64)  # sources drawn in one block

    def __len__(self) -> int:
        """Return the number of entries of all sources."""
        return sum(len(source.keys) for source in self.sources)

    def entry(self, index: int, draw: int = 0) -> SourceEntry:
        """Return the entry of example `index`; with `draw` = 1, 2 ... a substitute for one that cannot be used.

        Substitutes are drawn from the same source with replacement, by the weights of the order.
        """
        source, number = self._source(index)
        if self._cumulative is not None:
            cumulative, parts = self._cumulative[source], (index, draw) if draw else (index,)
            level = self._rng(source, *parts).random() * cumulative[-1]
            return self.at(source, int(np.searchsorted(cumulative, level, side="right")))
        size = len(self.sources[source].keys)
        if draw:
            return self.at(source, int(self._rng(source, "replacement", index, draw).integers(size)))
        epoch, place = divmod(number, size)
        if self._permutations.get(source, (-1,))[0] != epoch:
            self._permutations[source] = epoch, self._rng(source, epoch).permutation(size)
        return self.at(source, int(self._permutations[source][1][place]))

    def at(self, source: int, place: int) -> SourceEntry:
        """Return the entry of a source's key."""
        key = self.sources[source].keys[place]
        return SourceEntry(source, place, key, key if len(self.sources) == 1 else f"{self._names[source]}:{key}")

    def _rng(self, source: int, *parts: str | int) -> np.random.Generator:
        return keyed_rng(self.seed, "order", *([f"source {source}"] if source else []), *parts)

    def _source(self, index: int) -> tuple[int, int]:
        """Return the source of an example, and how many examples before it are of the same source."""
        if len(self.sources) == 1:
            return 0, index
        block, place = divmod(index, MIXTURE_BLOCK)
        while len(self._before) <= block:  # counted once; ten million examples take a third of a second
            drawn = self._sources_of(len(self._before) - 1)
            self._before.append(self._before[-1] + np.bincount(drawn, minlength=len(self.sources)))
        if self._block[0] != block:
            self._block = block, self._sources_of(block)
        drawn = self._block[1]
        source = int(drawn[place])
        return source, int(self._before[block][source] + np.count_nonzero(drawn[:place] == source))

    def _sources_of(self, block: int) -> np.ndarray:
        levels = keyed_rng(self.seed, "mixture", block).random(MIXTURE_BLOCK)
        return np.minimum(np.searchsorted(self._shares, levels, side="right"), len(self.sources) - 1)


def paper_weights(source: Source) -> np.ndarray:
    """Return the probability with which each entry is drawn, up to a factor (Supp. 1.2.5; see `Order`)."""
    chains = source.chains()
    names = list(dict.fromkeys(itertools.chain.from_iterable(chains)))  # a cluster has the chains that may be drawn
    lengths, clusters = (dict(zip(source.store.keys, source.store.column(name))) for name in ("length", "cluster"))
    sizes = Counter(clusters[name] for name in names)
    weights = {name: min(max(lengths[name], 256), 512) / 512 / sizes[clusters[name]] for name in names}
    return np.array([sum(weights[name] for name in each) for each in chains])


def split_keys(store: Store, held_out: int, seed: int, assemblies: bool = False) -> tuple[list[str], list[str]]:
    """Return keys to train on and keys held out, in the store's order; no cluster is split between them.

    held_out: the least number of keys to hold out; whole clusters, drawn by the seed, are held out until it is reached.
    assemblies: of assemblies, not of chains; clusters that meet in an assembly are held out together.  Many proteins of
    the PDB are joined in this way, so of these groups, those that are larger than what is to be held out come last.
    Errors: UserError if nothing would remain to train on.
    """
    source = Source(store, assemblies=assemblies)
    groups = joined_clusters(source)
    order = keyed_rng(seed, "held out").permutation(sorted(set(groups)))
    sizes = Counter(groups)
    drawn = sorted(order.tolist(), key=lambda group: max(sizes[group] - held_out, 0) if assemblies else 0)
    taken: set[str] = set()
    held = 0
    for group in drawn:
        if held >= held_out:
            break
        taken.add(group)
        held += sizes[group]
    rest = [key for key, group in zip(source.keys, groups) if group not in taken]
    if not rest:
        raise UserError(
            f"{store.path}: holding out {held_out} of {len(groups)} leaves none to train on; hold out fewer"
        )
    return rest, [key for key, group in zip(source.keys, groups) if group in taken]


def joined_clusters(source: Source) -> list[str]:
    """Return the cluster of each entry; clusters of which chains are in one assembly are one, named by the first."""
    clusters = dict(zip(source.store.keys, source.store.column("cluster")))
    first: dict[str, str] = {}  # of a cluster, one with which it is joined, perhaps itself

    def root(name: str) -> str:
        while first.setdefault(name, name) != name:
            first[name] = first[first[name]]
            name = first[name]
        return name

    chains = source.chains()
    for each in chains:
        begin, *others = sorted({root(clusters[chain]) for chain in each})
        first.update(dict.fromkeys(others, begin))
    return [root(clusters[each[0]]) for each in chains]


def costs(order: Order, config: SampleConfig) -> Callable[[int], float]:
    """Return a function from an example to its predicted cost: that of making it, and that of computing with it.

    The latter grows with the square of its residues.  Both are relative to their means over the data, since either can
    hold up a step.
    """
    lengths = [np.array(source.column("length")) for source in order.sources]
    making = [making_costs(source, config) for source in order.sources]
    computing = [np.minimum(length, config.crop or length) ** 2.0 for length in lengths]
    means = [float(np.concatenate(kind).mean()) for kind in (making, computing)]

    def cost(index: int) -> float:
        source, place, *_ = order.entry(index)
        return float(making[source][place] / means[0] + computing[source][place] / means[1])

    return cost


def making_costs(source: Source, config: SampleConfig) -> np.ndarray:
    """Return the predicted cost of making an example of each entry of a source."""
    assemblies = chains_of(source.store)
    columns = (source.store.column(name) for name in ("length", "depth", "cluster"))
    sizes = dict(zip(source.store.keys, zip(*columns)))

    def cost(key: str) -> float:
        if key not in assemblies:
            length, depth, _ = sizes[key]
            return predicted_cost(length, depth, config)
        copies = Counter(sizes[chain] for chain in assemblies[key])  # chains that are so alike are of one entity
        return predicted_assembly_cost([(count * size[0], size[1]) for size, count in copies.items()], config)

    return np.array([cost(key) for key in source.keys])
