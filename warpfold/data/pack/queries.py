"""The queries of alignments, each read once by all tasks of a job array together.

By the names of files alone every alignment is one part's: the one that packs the structure whose name it bears.  A part
reads the queries of its own alignments and writes them into its folder.  For most chains these are enough, since an
alignment that bears a chain's name comes first.  A chain without one may have any alignment: its part then takes the
queries of the other parts from their folders, beside its own, and reads what nobody has read yet.
"""

import json
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from warpfold.bulk import JobPart
from warpfold.data.formats.input_files import InputFile
from warpfold.data.pack.build import ChainJob, Options, read_queries
from warpfold.data.pack.match import HitsMatcher, Matcher, of_same_protein
from warpfold.data.pack.part import Identity, Query, is_alike, part_paths, query_job, whole_lines
from warpfold.data.pack.work import DIED, Task, Work

BATCH = 64  # alignments whose queries one job reads
LOOK = 10.0  # seconds after which the folders of the other parts are looked at again, if that takes no time
SELDOM = 20  # times as long as a look takes is spent otherwise


def own_structures(structures: Sequence[InputFile], part: JobPart) -> list[InputFile]:
    """Return the structure files of a part: which they are follows from their names, whatever else there is."""
    return [source for source in structures if _is_of(source.name, part)]


def own_alignments(alignments: Sequence[InputFile], structures: Sequence[InputFile], part: JobPart) -> list[InputFile]:
    """Return the alignments whose queries a part reads: those that bear its structures' names, and some others."""
    if part.count == 1:
        return list(alignments)
    entries = {source.path.name.partition(".")[0].lower(): source.name for source in reversed(structures)}
    own = []
    for source in alignments:
        named = (entries[entry] for name in sorted(source.bears) if (entry := name.partition("_")[0]) in entries)
        if _is_of(next(named, source.name), part):
            own.append(source)
    return own


def _is_of(name: str, part: JobPart) -> bool:
    number = int.from_bytes(blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")
    return number % part.count == part.number - 1


class Queries:
    """The queries of alignments, read when they are asked for.

    out: the store; the folders of its other parts lie beside it, as soon as they are begun.
    """

    def __init__(self, work: Work, options: Options, part: JobPart, out: Path) -> None:
        self.work, self.options, self.part, self.out = work, options, part, out
        self.found: dict[Identity, Query] = dict(work.writer.queries)
        self._others: Counter[Path] = Counter()  # bytes of each part's queries that were read
        self._next_look = -math.inf

    def __getitem__(self, source: InputFile) -> Query:
        """Return the query of an alignment that was read, and what is wrong with it."""
        return self.found[source.version]

    def known(self, sources: Sequence[InputFile]) -> list[tuple[InputFile, str]]:
        """Return those of some alignments whose queries are known, each with its query."""
        found = ((source, self.found.get(source.version, ("", ""))) for source in sources)
        return [(source, query) for source, (query, error) in found if query]

    def need(self, sources: Sequence[InputFile], tell: Callable[[int], None] = lambda done: None) -> None:
        """Read the queries of these alignments, but for those that are known here or in another part.

        tell: of how many are known.
        """
        missing = [source for source in sources if source.version not in self.found]
        if not missing:
            return
        done = len(sources) - len(missing)
        for task, result in self.work.do(self._tasks(missing)):
            batch: Sequence[InputFile] = task.call[1][0]
            queries = [("", f"{source.name}: {DIED}") for source in batch] if result is None else result
            rows = [(source.version, query) for source, query in zip(batch, queries)]
            self.work.writer.add_queries(rows)
            self.found.update(rows)
            done += len(rows)
            tell(done)
        tell(len(sources))

    def need_all(self, sources: Sequence[InputFile], tell: Callable[[int], None]) -> None:
        """Do as `need` does, in an order of this part's own: parts that run at once then read different files."""
        self._next_look = -math.inf  # a look now saves reading what the others have read
        self._look_at_others()
        missing = [source for source in sources if source.version not in self.found]
        batches = [missing[start : start + BATCH] for start in range(0, len(missing), BATCH)]
        random.Random(self.part.number).shuffle(batches)
        self.need([source for batch in batches for source in batch], tell)

    def _tasks(self, sources: Sequence[InputFile]) -> Iterator[Task]:
        """Yield jobs as they are handed out: what another part has read meanwhile is no job any more."""
        for start in range(0, len(sources), BATCH):
            self._look_at_others()
            batch = [one for one in sources[start : start + BATCH] if one.version not in self.found]
            if batch:
                singles = tuple(self._task([source]) for source in batch)
                yield self._task(batch, singles if len(batch) > 1 else ())

    def _task(self, batch: Sequence[InputFile], singles: tuple[Task, ...] = ()) -> Task:
        names = tuple(query_job(source.version) for source in batch)
        return Task(names, (read_queries, (batch, self.options.limit)), singles)

    def _look_at_others(self) -> None:
        """Take what other parts of the same options and version have written since the last look."""
        begun = time.monotonic()
        if begun < self._next_look:
            return
        for path in part_paths(self.out, self.part.count):
            at = self._others[path]
            if path == self.work.writer.path or (at == 0 and not is_alike(path, self.work.writer.plan)):
                continue
            with suppress(OSError):  # begun or removed this very moment, or not ours to read
                for text, length in whole_lines(path / "queries", at):
                    for name, size, changed, query, error in json.loads(text):
                        self.found[(name, size, changed)] = (query, error)
                    self._others[path] += length
        now = time.monotonic()
        self._next_look = now + max(LOOK, SELDOM * (now - begun))


class Matching:
    """Which alignments and template hits belong to a chain, found with as few queries as that takes."""

    def __init__(
        self,
        queries: Queries,
        alignments: Sequence[InputFile],
        hits: Sequence[InputFile],
        tell: Callable[[int], None] = lambda done: None,
    ) -> None:
        self.queries, self.alignments, self.tell = queries, alignments, tell
        self.min_identity = queries.options.min_identity
        self._names: dict[str, list[InputFile]] = defaultdict(list)
        for source in alignments:
            for name in source.bears:
                self._names[name].append(source)
        self._hits = HitsMatcher(hits, self._queries_under)
        self._matcher: Matcher | None = None  # of all alignments, once a chain needs it

    def find(self, key: str, chain: str, sequence: str) -> ChainJob:
        """Return the job of a chain: `key` is "1crn_A", `chain` "A".  The rules are `Matcher`'s and `HitsMatcher`'s."""
        named = self._names.get(key.lower(), [])
        self.queries.need(named)
        found, note = of_same_protein(self.queries.known(named), sequence, self.min_identity)
        if not found:
            found, note = self._all().find(key, sequence)
        return ChainJob(chain, found, self._hits.find(key, sequence, found), note)

    def _queries_under(self, name: str) -> set[str]:
        """Return the queries of all alignments that bear a name; once two differ, the others need not be read."""
        bearers = self._names[name]
        if len({query for _, query in self.queries.known(bearers)}) < 2:
            self.queries.need(bearers)
        return {query for _, query in self.queries.known(bearers)}

    def _all(self) -> Matcher:
        if self._matcher is None:
            self.queries.need_all(self.alignments, self.tell)
            self._matcher = Matcher(self.queries.known(self.alignments), self.min_identity)
        return self._matcher
