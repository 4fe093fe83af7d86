"""Map the numbers of a run's examples to entries of stores, as a pure function of the data and the seed."""

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
# Number of examples for which the sources are drawn at once.
MIXTURE_BLOCK = 4096


class Source:
    """Entries of a store to draw from, with the weight of the store.

    keys: by default the chains of the store, or with `assemblies` its assemblies (see `stored_example.entry_keys`).
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
                raise self._missing(keys[int(np.argmin(rows))])
            self.keys = Keys(store.index, rows)
        if not self.keys:
            raise UserError(f"{store.path}: no entries to draw from")
        counts, rows = self.members()
        if (rows < 0).any():
            entry = self.keys[int(np.searchsorted(np.cumsum(counts), np.argmin(rows), side="right"))]
            raise self._missing(
                next(chain for chain in store.column(CHAINS)[store.index.row(entry)] if chain not in store)
            )
        if not 0 < weight < float("inf"):
            raise UserError(f"{store.path}: weight {weight}. Pass a positive number.")

    def _missing(self, key: str) -> UserError:
        """Return the error for a key that the store lacks."""
        return UserError(f"{self.store.path}: has no entry {key!r}. Pack the store again, or name other entries.")

    def column(self, name: str) -> Column:
        """Return a column of the index for `keys`."""
        return self.store.column(name).take(self.keys.rows)

    def members(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of unique chains of each entry, and the rows of all these chains in the store.

        An entry that is a chain has itself as its only chain.
        """
        rows = self.keys.rows
        if not members(self.store)[0].any():
            return np.ones(len(rows), np.int64), rows
        counts, chains = self.column(CHAINS).members
        entry = np.repeat(np.arange(len(rows)), np.maximum(counts, 1))
        chain_rows = rows[entry]
        chain_rows[np.repeat(counts > 0, np.maximum(counts, 1))] = chains
        # A chain that an entry contains several times counts once, in its first position.
        _, first = np.unique(entry * (len(self.store) + 1) + chain_rows, return_index=True)
        first.sort()
        return np.bincount(entry[first], minlength=len(rows)), chain_rows[first]


class SourceEntry(NamedTuple):
    """An entry of a source.

    source: number of the source. place: index of the key in it. name: the key, with the name of its store as a prefix
    if there are several.
    """

    source: int
    place: int
    key: str
    name: str


class Order:
    """The order of a run's examples, which maps each number to an entry.

    With several sources, the source of each example is drawn by weight, and each source has a separate order.
    weights: "uniform" uses a new seeded permutation for every epoch of a source. "paper" draws with replacement, with
    probability max(min(length, 512), 256) / 512 divided by the number of chains in the cluster (Supp. 1.2.5). The
    probability of an assembly is the sum over its unique chains. It is drawn as often as any of its chains would be, so
    families are balanced as for single chains.
    """

    def __init__(self, sources: Sequence[Source], seed: int, weights: Weights = "uniform") -> None:
        self.sources, self.seed = list(sources), seed
        names = [source.store.path.resolve().name for source in sources]
        has_repeats = len(set(names)) < len(names)
        self._names = [str(source.store.path) for source in sources] if has_repeats else names
        total = sum(source.weight for source in sources)
        self._shares = np.cumsum([source.weight / total for source in sources])
        self._cumulative = [np.cumsum(paper_weights(s)) for s in sources] if weights == "paper" else None
        # Epoch and permutation of each source.
        self._permutations: dict[int, tuple[int, np.ndarray]] = {}
        # Number of examples of each source before each block.
        self._before = [np.zeros(len(sources), np.int64)]
        # The last block, and its sources.
        self._block: tuple[int, np.ndarray] = -1, np.array([], np.int64)

    def __len__(self) -> int:
        """Return the total number of entries."""
        return sum(len(source.keys) for source in self.sources)

    def entry(self, index: int, draw: int = 0) -> SourceEntry:
        """Return the entry of example `index`, or with `draw` > 0 its replacement number `draw`.

        Replacements of unusable entries are drawn from the same source with replacement, by the weights of the order.
        """
        source, number = self._locate_example(index)
        if self._cumulative is not None:
            cumulative, key = self._cumulative[source], (index, draw) if draw else (index,)
            level = self._keyed_rng(source, *key).random() * cumulative[-1]
            return self.at(source, int(np.searchsorted(cumulative, level, side="right")))
        size = len(self.sources[source].keys)
        if draw:
            return self.at(source, int(self._keyed_rng(source, "replacement", index, draw).integers(size)))
        epoch, place = divmod(number, size)
        if self._permutations.get(source, (-1,))[0] != epoch:
            self._permutations[source] = epoch, self._keyed_rng(source, epoch).permutation(size)
        return self.at(source, int(self._permutations[source][1][place]))

    def at(self, source: int, place: int) -> SourceEntry:
        """Return the entry at index `place` of a source's keys."""
        key = self.sources[source].keys[place]
        return SourceEntry(source, place, key, key if len(self.sources) == 1 else f"{self._names[source]}:{key}")

    def _keyed_rng(self, source: int, *key: str | int) -> np.random.Generator:
        """Return the keyed generator of a source."""
        return keyed_rng(self.seed, "order", *([f"source {source}"] if source else []), *key)

    def _locate_example(self, index: int) -> tuple[int, int]:
        """Return the source of an example, and the number of earlier examples of the same source."""
        if len(self.sources) == 1:
            return 0, index
        block, place = divmod(index, MIXTURE_BLOCK)
        # The counts are cached. Ten million examples take a third of a second.
        while len(self._before) <= block:
            drawn = self._draw_sources(len(self._before) - 1)
            self._before.append(self._before[-1] + np.bincount(drawn, minlength=len(self.sources)))
        if self._block[0] != block:
            self._block = block, self._draw_sources(block)
        drawn = self._block[1]
        source = int(drawn[place])
        return source, int(self._before[block][source] + np.count_nonzero(drawn[:place] == source))

    def _draw_sources(self, block: int) -> np.ndarray:
        """Draw the sources of a block of examples."""
        levels = keyed_rng(self.seed, "mixture", block).random(MIXTURE_BLOCK)
        return np.minimum(np.searchsorted(self._shares, levels, side="right"), len(self.sources) - 1)


def paper_weights(source: Source) -> np.ndarray:
    """Compute the probability of each entry up to a common factor (Supp. 1.2.5; see `Order`)."""
    counts, chains = source.members()
    # Cluster 0 stands for no cluster.
    clusters = source.store.column("cluster").values + 1
    # The size of a cluster counts only chains that may be drawn.
    sizes = np.bincount(clusters[np.unique(chains)])
    lengths = np.clip(source.store.column("length").values[chains], 256, 512)
    weights = lengths / 512 / sizes[clusters[chains]]
    return np.bincount(np.repeat(np.arange(len(counts)), counts), weights)


def split_keys(
    store: Store, held_out: int, seed: int, assemblies: bool = False, keys: Keys | None = None
) -> tuple[Keys, Keys]:
    """Split keys into training and held-out keys, in the store's order, without splitting a cluster.

    held_out: minimum number of held-out keys. Whole clusters, drawn by the seed, are held out until it is reached.
    assemblies: split assemblies instead of chains. Clusters that occur in one assembly are held out together. Many
    proteins of the PDB are connected in this way, so groups larger than `held_out` are drawn last.
    keys: the entries to split, by default all.
    Raises UserError if no training keys would remain.
    """
    source = Source(store, keys, assemblies=assemblies)
    # The groups are numbered in the order of their names.
    _, groups = np.unique(_join_clusters(source)[0], return_inverse=True)
    sizes = np.bincount(groups)
    drawn = keyed_rng(seed, "held out").permutation(len(sizes))
    if assemblies:
        drawn = drawn[np.argsort(np.maximum(sizes[drawn] - held_out, 0), kind="stable")]
    held_before = np.cumsum(sizes[drawn]) - sizes[drawn]
    is_held_out = np.isin(groups, drawn[held_before < held_out])
    if is_held_out.all():
        raise UserError(
            f"{store.path}: holding out {held_out} of {len(groups)} leaves no training entries. Hold out fewer."
        )
    return source.keys.take(np.flatnonzero(~is_held_out)), source.keys.take(np.flatnonzero(is_held_out))


def joined_clusters(source: Source) -> list[str]:
    """Return the cluster of each entry. Clusters that occur in one assembly are merged, and named by the first one."""
    ranks, names = _join_clusters(source)
    return [names[rank] for rank in ranks.tolist()]


def _join_clusters(source: Source) -> tuple[np.ndarray, dict[int, str]]:
    """Merge clusters that occur in one assembly (connected components, by label propagation).

    Returns the cluster of each entry as the rank of its name among all names, and the names by rank.
    """
    counts, chains = source.members()
    column = source.store.column("cluster")
    assert column.texts is not None
    ranks = column.texts.ranks()
    begins, chain_ranks = np.cumsum(counts) - counts, ranks[column.values[chains]]
    # The smallest rank that each cluster is known to be connected with.
    label = np.arange(len(ranks))
    while True:
        least = np.minimum.reduceat(label[chain_ranks], begins)
        lower = label.copy()
        np.minimum.at(lower, chain_ranks, np.repeat(least, counts))
        lower = lower[lower]
        if np.array_equal(lower, label):
            return label[chain_ranks[begins]], {int(rank): column.texts[code] for code, rank in enumerate(ranks)}
        label = lower


def costs(order: Order, config: SampleConfig) -> Callable[[int], float]:
    """Return a function that predicts the cost of an example: of its features, and of the model.

    The cost of the model grows with the square of the residues. Both costs are relative to their means over the data,
    because either may limit a step.
    """
    lengths = [source.column("length").values for source in order.sources]
    features = [feature_costs(source, config) for source in order.sources]
    model = [np.minimum(length, config.crop or length) ** 2.0 for length in lengths]
    means = [float(np.concatenate(kind).mean()) for kind in (features, model)]

    def cost(index: int) -> float:
        source, place, *_ = order.entry(index)
        return float(features[source][place] / means[0] + model[source][place] / means[1])

    return cost


def feature_costs(source: Source, config: SampleConfig) -> np.ndarray:
    """Predict the cost of the features of each entry of a source."""
    lengths, depths = (source.store.column(name).values for name in ("length", "depth"))
    rows = source.keys.rows
    if not members(source.store)[0][rows].any():
        return np.array([predicted_cost(int(lengths[row]), int(depths[row]), config) for row in rows])
    clusters = source.store.column("cluster").values
    assemblies = source.store.column(CHAINS)

    def cost(row: int) -> float:
        if (chains := assemblies[row]) is None:
            return predicted_cost(int(lengths[row]), int(depths[row]), config)
        # Chains with equal length, depth and cluster are counted as copies of an entity.
        copies = Counter(
            (int(lengths[at]), int(depths[at]), int(clusters[at])) for at in map(source.store.index.row, chains)
        )
        return predicted_assembly_cost([(count * size[0], size[1]) for size, count in copies.items()], config)

    return np.array([cost(row) for row in rows.tolist()])
