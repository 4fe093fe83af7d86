"""Match alignments and hits to chains: queries are read once, and the most similar ones are found."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.data.pack.pack_inputs import ONE, TWO
from warpfold import __version__
from warpfold.data.formats.input_files import InputFile, digest
from warpfold.data.pack import match
from warpfold.data.pack.jobs import DIED, PackJob
from warpfold.data.pack.match import Matcher, Queries
from warpfold.errors import UserError

LIMIT = 1000
RESIDUES = list("ACDEFGHIKLMNPQRSTVWY")


def source(name: str, size: int = 0) -> InputFile:
    return InputFile(name, Path("/" + name), size)


class Runner:
    """Run jobs of queries. The query of a file is its `queries`, and `kills` kill the process that reads them."""

    def __init__(self, queries: dict[str, str], stored: dict[str, tuple[str, str]] | None = None) -> None:
        self.queries, self.kills = queries, set[str]()
        self.read: list[list[str]] = []
        self.added: list[tuple[str, list[list[str]]]] = []
        self.writer = SimpleNamespace(
            queries=lambda: dict(stored or {}), add=lambda job, rows: self.added.append((job, rows))
        )

    def run(self, jobs: Iterable[PackJob]) -> Iterator[tuple[PackJob, Any]]:
        for job in jobs:
            function, (batch, limit) = job.call
            assert (function, limit) == (match.read_queries, LIMIT)
            names = [file.name for file in batch]
            if self.kills.intersection(names) and job.singles:
                yield from self.run(job.singles)
                continue
            self.read.append(names)
            results = [(query, "") if (query := self.queries[name]) else ("", f"{name}: bad") for name in names]
            yield job, None if self.kills.intersection(names) else results


def queries_of(runner: Runner, files: Sequence[InputFile], shared: Path | None = None) -> Queries:
    return Queries(runner, files, LIMIT, shared)  # type: ignore[arg-type]


def test_queries_are_read_in_batches_once_and_stored() -> None:
    files = [source(f"m/{i:03d}.a3m") for i in range(130)]
    contents = {file.name: "A" * (i + 1) for i, file in enumerate(files)} | {"m/005.a3m": "", "m/006.a3m": "AC:DE:AC"}
    runner = Runner(contents, {"m/000.a3m": ("STORED", ""), "m/129.a3m": ("", "an error")})
    runner.kills = {"m/070.a3m"}
    queries = queries_of(runner, files)
    calls: list[tuple[float, int, str]] = []
    queries.read(files, lambda *call: calls.append(call))
    names = [file.name for file in files]
    assert runner.read == [names[1:65], *([name] for name in names[65:129])]
    assert [job for job, _ in runner.added] == [f"queries {name}" for name in names[1:2] + names[65:129]]
    assert runner.added[0][1] == [
        [name, contents[name], "" if contents[name] else f"{name}: bad"] for name in names[1:65]
    ]
    assert runner.added[6][1] == [["m/070.a3m", "", f"m/070.a3m: {DIED}"]]
    assert calls == [(done, 130, "reading alignments") for done in (66, *range(67, 131))]
    # They are not read again, nor stored again.
    runner.read.clear()
    queries.read(files[3:9], lambda *call: calls.append(call))
    queries.keep(files)
    assert (runner.read, len(runner.added), len(calls)) == ([], 65, 65)
    assert queries.known(files[:8]) == [
        *((files[i], query) for i, query in ((0, "STORED"), (1, "AA"), (2, "AAA"), (3, "AAAA"), (4, "AAAAA"))),
        (files[6], "AC"),
        (files[6], "DE"),
        (files[7], "A" * 8),
    ]
    assert queries.known([files[70], files[129], source("m/unknown.a3m")]) == []


def test_queries_that_another_task_has_read_are_stored_too(tmp_path: Path) -> None:
    files = [source("m/a.a3m"), source("m/b.a3m")]
    shared = tmp_path / "queries"
    first = queries_of(Runner({"m/a.a3m": ONE, "m/b.a3m": ""}), files, shared)
    first.read_all(lambda *_: None)
    made_of = [__version__, LIMIT, digest(files)]
    assert json.loads(shared.read_text()) == {"made_of": made_of, "queries": [[ONE, ""], ["", "m/b.a3m: bad"]]}
    runner = Runner({})
    second = queries_of(runner, files, shared)
    assert second.known(files) == [(files[0], ONE)]
    second.read_all(lambda *_: None)
    assert second.read_so_far == first.read_so_far
    second.keep(files[:1])
    second.keep(files)
    second.keep(files)
    assert runner.added == [
        ("queries m/a.a3m", [["m/a.a3m", ONE, ""]]),
        ("queries m/b.a3m", [["m/b.a3m", "", "m/b.a3m: bad"]]),
    ]


@pytest.mark.parametrize("what", ["limit", "version", "files", "count", "text"])
def test_queries_of_other_files_are_read_again(tmp_path: Path, what: str) -> None:
    files, shared = [source("m/a.a3m"), source("m/b.a3m")], tmp_path / "queries"
    made_of: list[Any] = [__version__, LIMIT, digest(files)]
    queries: Any = [["OLD", ""], ["OLD", ""]]
    made_of = {
        "limit": [__version__, LIMIT + 1, digest(files)], "version": ["0", *made_of[1:]],
        "files": [*made_of[:2], digest([source("m/a.a3m", 1), files[1]])],
    }.get(what, made_of)  # fmt: skip
    queries = {"count": queries[:1], "text": ["abc", "de"]}.get(what, queries)
    shared.write_text(json.dumps({"made_of": made_of, "queries": queries}))
    runner = Runner({"m/a.a3m": ONE, "m/b.a3m": TWO})
    matcher = queries_of(runner, files, shared)
    matcher.read_all(lambda *_: None)
    assert runner.read == [["m/a.a3m", "m/b.a3m"]]
    assert [query for _, query in matcher.known(files)] == [ONE, TWO]
    assert json.loads(shared.read_text())["queries"] == [[ONE, ""], [TWO, ""]]
    shared.write_text("precious")
    with pytest.raises(UserError, match=r"queries: exists already, and holds no queries\. Move it away\.$"):
        queries_of(runner, files, shared).read_all(lambda *_: None)


def test_a_task_waits_for_another_that_reads_the_queries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, shared = [source("m/a.a3m"), source("m/b.a3m")], tmp_path / "queries"
    made_of = [__version__, LIMIT, digest(files)]
    locks: list[int] = []

    def wait(file: Any, kind: int) -> None:
        locks.append(kind)
        shared.write_text(json.dumps({"made_of": made_of, "queries": [[ONE, ""], [TWO, ""]]}))

    monkeypatch.setattr(match.fcntl, "flock", wait)
    queries = queries_of(Runner({}), files, shared)
    queries.read_all(lambda *_: None)
    assert [query for _, query in queries.known(files)] == [ONE, TWO]
    assert locks == [match.fcntl.LOCK_EX]


def test_a_task_that_knows_all_queries_reads_no_file_of_others(tmp_path: Path) -> None:
    files, shared = [source("m/a.a3m"), source("m/b.a3m")], tmp_path / "none/queries"
    runner = Runner({"m/a.a3m": ONE, "m/b.a3m": TWO})
    queries = queries_of(runner, files, shared)
    queries.read(files)
    queries.read_all(lambda *_: None)
    # The folder of the shared file does not exist.
    with pytest.raises(UserError, match="cannot be written"):
        queries_of(Runner({}, {"m/a.a3m": ("A", "")}), files, shared).read_all(lambda *_: None)


def test_as_few_queries_as_possible_are_read() -> None:
    files = [source(name) for name in ("1abc_A/x.a3m", "1abc_A/y.a3m", "1abc.a3m", "other.a3m")]
    contents = {"1abc_A/x.a3m": ONE, "1abc_A/y.a3m": ONE[:20], "1abc.a3m": TWO, "other.a3m": ONE[::-1]}
    hits = [source("1abc_A/h.hhr"), source("1abc/h.hhr")]
    for key, sequence, alignments, found, read in (
        ("1abc_A", ONE, [0, 1], [0], [[0, 1]]),
        ("1ABC_B", TWO, [2], [1], [[0, 1, 2, 3]]),
        ("1abc_A", ONE[::-1], [3], [0], [[0, 1], [2, 3]]),
        ("2abc_A", "W" * 30, [], [], [[0, 1, 2, 3]]),
    ):
        runner = Runner(contents)
        matcher = Matcher(queries_of(runner, files), files, hits)
        job = matcher.find(key, "A", sequence)
        assert (job.chain, job.alignments, job.hits) == ("A", [files[i] for i in alignments], [hits[i] for i in found])
        assert runner.read == [[files[i].name for i in batch] for batch in read], key
        assert matcher.find(key, "B", sequence).alignments == job.alignments
        assert len(runner.read) == len(read)


@pytest.mark.parametrize(
    ("queries", "read", "is_used"),
    [
        # The name `flat` has queries of two proteins, which the first two files show.
        ((ONE, ONE[:25], TWO), [[0, 1]], False),
        ((ONE, ONE, TWO), [[0, 1], [2]], False),
        ((ONE, ONE, ONE), [[0, 1], [2]], True),
    ],
)
def test_hits_beside_alignments_are_used_if_all_of_them_are_of_one_sequence(
    queries: tuple[str, ...], read: list[list[int]], is_used: bool
) -> None:
    files = [source(f"flat/{name}") for name in ("1abc_A.a3m", "1abc_A.x.a3m", "y.a3m")]
    hits = [source("flat/h.hhr")]
    runner = Runner({file.name: query for file, query in zip(files, queries)})
    job = Matcher(queries_of(runner, files), files, hits).find("1abc_A", "A", ONE)
    assert (job.alignments, job.hits) == (files[:2], hits if is_used else [])
    assert runner.read == [[files[i].name for i in batch] for batch in read]


def test_notes_name_the_alignments_of_other_proteins() -> None:
    files = [source(name) for name in ("1abc_A/x.a3m", "1abc_A/y.a3m", "1abc.a3m")]
    runner = Runner({"1abc_A/x.a3m": TWO, "1abc_A/y.a3m": f"{TWO}:{ONE}", "1abc.a3m": ONE[::-1]})
    find = Matcher(queries_of(runner, files), files).find
    job = find("1abc_A", "A", ONE)
    assert job.alignments == [files[1]]
    assert job.note.startswith("1abc_A/x.a3m: its query is another protein, or too small a fragment: covers ")
    assert job.note.count(".a3m") == 1
    job = find("1abc_A", "A", "W" * 30)
    assert job.alignments == []
    assert [part.partition(":")[0] for part in job.note.split("; ")] == [
        "1abc_A/x.a3m", "1abc_A/y.a3m", "1abc_A/y.a3m", "1abc.a3m",
    ]  # fmt: skip


def kmers(sequence: str) -> set[str]:
    return {sequence[i : i + 6] for i in range(len(sequence) - 5)}


def expected_similar(queries: Sequence[str], sequence: str) -> list[str]:
    """List the best query that contains the sequence or is in it, then the five that share most words of six."""
    words = kmers(sequence)
    shared = {query: len(words & kmers(query)) for query in queries}
    nested = [q for q in queries if shared[q] and (q in sequence or sequence in q)]
    best = sorted(nested, key=lambda q: (-min(len(q), len(sequence)), len(q), q))[:1]
    return best + sorted((q for q in queries if shared[q]), key=lambda q: (-shared[q], q))[:5]


@pytest.mark.parametrize("seed", range(4))
def test_similar_queries_contain_each_other_or_share_words(seed: int) -> None:
    rng = np.random.default_rng(seed)
    whole = "".join(rng.choice(RESIDUES, 60))
    queries = {"", "A", whole[:5], whole[:6], whole[3:9], "X" * 30, "AAAAAA" + whole + "CC", "XZ" + whole}
    for _ in range(40):
        begin, end = np.sort(rng.integers(0, 61, 2))
        part = whole[begin:end]
        queries |= {part, part[:20] + "".join(rng.choice(RESIDUES, 4)) + part[20:]}
    files = {query: source(f"m/{i}.a3m") for i, query in enumerate(sorted(queries))}
    index = match._QueryIndex([(file, query) for query, file in files.items()])
    assert index.sources == {query: [file] for query, file in files.items()}
    begin, end = np.sort(rng.integers(0, 61, 2))
    parts = [whole, whole[10:40], whole[begin:end], whole[:6], whole[:5], whole[::-1], "AAAAAAA", "", whole[:30] + TWO]
    for sequence in parts:
        assert index.similar(sequence) == expected_similar(sorted(queries), sequence), sequence
    assert match._QueryIndex([]).similar(whole) == []


def test_the_nearest_query_of_the_protein_is_used() -> None:
    """The first similar query need not be of the protein, for example if it is a fragment of it."""
    files = [source(f"m/{name}.a3m") for name in "abc"]
    queries = {"m/a.a3m": ONE[:12], "m/b.a3m": "W" + ONE[1:], "m/c.a3m": "W" + ONE[1:]}
    matcher = Matcher(queries_of(Runner(queries), files), files)
    assert matcher.find("1abc_A", "A", ONE).alignments == files[1:]
    assert matcher.find("1abc_A", "A", ONE[:10] + TWO[:20]).alignments == []


def test_words_are_numbers() -> None:
    assert match._list_kmers("ACDEFGH").tolist() == sorted(
        sum((ord(letter) - 64) * 32**i for i, letter in enumerate(word)) for word in ("ACDEFG", "CDEFGH")
    )
    assert match._list_kmers("AAAAAAAA").tolist() == [sum(32**i for i in range(6))]
    assert [len(match._list_kmers(text)) for text in ("ACDEF", "ACDEFG", "", "ACDéFG")] == [0, 1, 0, 1]
    assert match._list_kmers("A?????").tolist() == [1 + sum(31 * 32**i for i in range(1, 6))]
    assert match._list_kmers("A").dtype == np.int32
