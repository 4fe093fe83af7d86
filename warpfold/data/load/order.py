"""Which entry of which store each number of a run's examples is: a pure function of the data and the seed."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from warpfold.data.features.choose import SampleConfig, predicted_assembly_cost, predicted_cost
from warpfold.data.store.index import Column, Keys
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import CHAINS, entry_keys, members
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
        if keys is None:
            keys = entry_keys(store, assemblies)
        if isinstance(keys, Keys) and keys.whole is store.index:
            self.keys = keys
        else:
            rows = np.array([store.index.row(key) for key in keys], np.int64)
            if (rows < 0).any():
                raise self._absent(keys[int(np.argmin(rows))])
            self.keys = Keys(store.index, rows)
        if not self.keys:
            raise UserError(f"{store.path}: no entries to draw from")
        counts, rows = self.members()
        if (rows < 0).any():
            entry = self.keys[int(np.searchsorted(np.cumsum(counts), np.argmin(rows), side="right"))]
            raise self._absent(
                next(chain for chain in store.column(CHAINS)[store.index.row(entry)] if chain not in store)
            )
        if not 0 < weight < float("inf"):
            raise UserError(f"{store.path}: weight {weight}. Pass a positive number")

    def _absent(self, key: str) -> UserError:
        return UserError(f"{self.store.path}: has no entry {key!r}. Pack the store again, or name others")

    def column(self, name: str) -> Column:
        """Return one value of the index for each of `keys`."""
        return self.store.column(name).take(self.keys.rows)

    def members(self) -> tuple[np.ndarray, np.ndarray]:
        """Return how many different chains each entry has, and of all in turn the rows of these in the store.

        A chain is its own only one, as is each entry of most stores.
        """
        rows = self.keys.rows
        if not members(self.store)[0].any():
            return np.ones(len(rows), np.int64), rows
        counts, chains = self.column(CHAINS).members
        entry = np.repeat(np.arange(len(rows)), np.maximum(counts, 1))
        every = rows[entry]
        every[np.repeat(counts > 0, np.maximum(counts, 1))] = chains
        _, first = np.unique(entry * (len(self.store) + 1) + every, return_index=True)
        first.sort()  # each once, in the order of the entry
        return np.bincount(entry[first], minlength=len(rows)), every[first]


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
    counts, chains = source.members()
    clusters = source.store.column("cluster").values + 1  # 0: in none
    once = np.unique(chains)  # a cluster has the chains that may be drawn
    sizes = np.bincount(clusters[once])
    lengths = np.clip(source.store.column("length").values[chains], 256, 512)
    weights = lengths / 512 / sizes[clusters[chains]]
    return np.bincount(np.repeat(np.arange(len(counts)), counts), weights)


def split_keys(
    store: Store, held_out: int, seed: int, assemblies: bool = False, keys: Keys | None = None
) -> tuple[Keys, Keys]:
    """Return keys to train on and keys held out, in the store's order; no cluster is split between them.

    held_out: the least number of keys to hold out; whole clusters, drawn by the seed, are held out until it is reached.
    assemblies: of assemblies, not of chains; clusters that meet in an assembly are held out together.  Many proteins of
    the PDB are joined in this way, so of these groups, those that are larger than what is to be held out come last.
    keys: the entries to split; None: all.
    Errors: UserError if nothing would remain to train on.
    """
    source = Source(store, keys, assemblies=assemblies)
    _, groups = np.unique(_joined(source)[0], return_inverse=True)  # numbered in the order of their names
    sizes = np.bincount(groups)
    drawn = keyed_rng(seed, "held out").permutation(len(sizes))
    if assemblies:
        drawn = drawn[np.argsort(np.maximum(sizes[drawn] - held_out, 0), kind="stable")]
    held_before = np.cumsum(sizes[drawn]) - sizes[drawn]
    held = np.isin(groups, drawn[held_before < held_out])
    if held.all():
        raise UserError(
            f"{store.path}: holding out {held_out} of {len(groups)} leaves none to train on. Hold out fewer"
        )
    return source.keys.take(np.flatnonzero(~held)), source.keys.take(np.flatnonzero(held))


def joined_clusters(source: Source) -> list[str]:
    """Return the cluster of each entry; clusters of which chains are in one assembly are one, named by the first."""
    ranks, names = _joined(source)
    return [names[rank] for rank in ranks.tolist()]


def _joined(source: Source) -> tuple[np.ndarray, dict[int, str]]:
    """Return the cluster of each entry as the rank of its name among all names, and the names by their ranks."""
    counts, chains = source.members()
    column = source.store.column("cluster")
    assert column.texts is not None
    ranks = column.texts.ranks()
    begins, own = np.cumsum(counts) - counts, ranks[column.values[chains]]
    label = np.arange(len(ranks))  # of a cluster, the first that is joined with it as far as is known
    while True:
        least = np.minimum.reduceat(label[own], begins)  # of each entry
        low = label.copy()
        np.minimum.at(low, own, np.repeat(least, counts))
        low = low[low]
        if np.array_equal(low, label):
            return label[own[begins]], {int(rank): column.texts[code] for code, rank in enumerate(ranks)}
        label = low


def costs(order: Order, config: SampleConfig) -> Callable[[int], float]:
    """Return a function from an example to its predicted cost: that of making it, and that of computing with it.

    The latter grows with the square of its residues.  Both are relative to their means over the data, since either can
    hold up a step.
    """
    lengths = [source.column("length").values for source in order.sources]
    making = [making_costs(source, config) for source in order.sources]
    computing = [np.minimum(length, config.crop or length) ** 2.0 for length in lengths]
    means = [float(np.concatenate(kind).mean()) for kind in (making, computing)]

    def cost(index: int) -> float:
        source, place, *_ = order.entry(index)
        return float(making[source][place] / means[0] + computing[source][place] / means[1])

    return cost


def making_costs(source: Source, config: SampleConfig) -> np.ndarray:
    """Return the predicted cost of making an example of each entry of a source."""
    lengths, depths = (source.store.column(name).values for name in ("length", "depth"))
    rows = source.keys.rows
    if not members(source.store)[0][rows].any():
        return np.array([predicted_cost(int(lengths[row]), int(depths[row]), config) for row in rows])
    clusters = source.store.column("cluster").values
    assemblies = source.store.column(CHAINS)

    def cost(row: int) -> float:
        if (chains := assemblies[row]) is None:
            return predicted_cost(int(lengths[row]), int(depths[row]), config)
        # Chains that are so alike are of one entity.
        copies = Counter(
            (int(lengths[at]), int(depths[at]), int(clusters[at])) for at in map(source.store.index.row, chains)
        )
        return predicted_assembly_cost([(count * size[0], size[1]) for size, count in copies.items()], config)

    return np.array([cost(row) for row in rows.tolist()])
