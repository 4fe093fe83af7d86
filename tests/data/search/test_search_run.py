"""Run searches with a stand-in for an engine: report, files, cache, progress, failures, and the size of passes."""

import itertools
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from warpfold import __version__
from warpfold.bulk import JobPart
from warpfold.data.formats.alignment import write_fasta
from warpfold.data.search import search as searching
from warpfold.data.search.database import Database, Engine, SearchQuery, Survey, Tell
from warpfold.data.search.hmmer import Hmmsearch, Jackhmmer
from warpfold.data.search.programs import HHblits, MMseqs2
from warpfold.data.search.search import Cache, SearchOptions, cache_key, search
from warpfold.errors import UserError

PROTEINS = {"p0": "MKTAYIAKQR", "p1": "GSHMLEER", "p2": "WWLKDEYP", "twin": "GSHMLEER"}


def rows_of(sequence: str) -> str:
    return f">a\n{sequence}\n>b\n-{sequence[1:]}\n"


@dataclass(frozen=True)
class StandIn(Engine):
    """An engine that returns two rows for each query. Class attributes collect its calls."""

    per_pass: int = 3
    setting: int = 1
    name = "stand-in"
    calls: list[tuple[Any, ...]] = field(default_factory=list, compare=False)
    fails: tuple[str, ...] = ()
    breaks: bool = False

    def queries_per_pass(self, threads: int) -> int:
        return self.per_pass

    def identity(self) -> dict[str, Any]:
        return {"engine": self.name, "setting": self.setting}

    def survey(self, path: Path, tell: Tell) -> Survey:
        self.calls.append(("survey", path))
        tell(5, 0)
        return Survey(path.read_text(), 7, 70)

    def search(
        self, queries: Sequence[SearchQuery], path: Path, survey: Survey, max_rows: int | None, threads: int, tell: Tell
    ) -> list[str | UserError]:
        self.calls.append((tuple(q.sequence for q in queries), path, survey.records, max_rows, threads))
        if self.breaks:
            raise UserError("broken")
        tell(1, 4)
        tell(3, 0)
        return [UserError("no room") if q.sequence in self.fails else rows_of(q.sequence) for q in queries]


class OtherStandIn(StandIn):
    name = "other"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Write queries and a database. There are six cores."""
    monkeypatch.setattr(searching, "cores", lambda: 6)
    fasta, database = tmp_path / "q.fasta", tmp_path / "db.fa"
    fasta.write_text(write_fasta(PROTEINS.items()))
    database.write_text("digest")
    return fasta, database


def test_the_report_and_files_of_a_search(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fasta, path = files
    hit_calls: list[tuple[Any, ...]] = []

    def find_hits(
        self: Hmmsearch,
        queries: Sequence[SearchQuery],
        path: Path,
        survey: Survey,
        max_rows: int | None,
        threads: int,
        tell: Tell,
    ) -> list[str]:
        hit_calls.append((tuple((q.sequence, q.rows) for q in queries), path, survey.records, max_rows, threads))
        return [f"# STOCKHOLM 1.0\n\n#=GF x\n1abc_A/1-9 {q.sequence}\n//\n" for q in queries]

    monkeypatch.setattr(Hmmsearch, "search", find_hits)
    monkeypatch.setattr(Hmmsearch, "survey", lambda self, path, tell: StandIn().survey(path, tell))
    monkeypatch.setattr(searching, "TEMPLATE_BATCH", 2)
    engine, out = StandIn(per_pass=2), tmp_path / "out"
    reported: list[tuple[int, int, str]] = []
    states: list[str] = []

    def note(done: int, total: int, what: str) -> None:
        reported.append((done, total, what))
        if (out / "search.json").exists():
            states.append(json.loads((out / "search.json").read_text())["status"])

    databases = [Database("db", path, 9), Database("other", path)]
    # Each look at the clock takes 1.23456 seconds.
    looks = itertools.count()
    monkeypatch.setattr(searching.time, "perf_counter", lambda: 1.23456 * next(looks))
    report = search([fasta], databases, out, engine, path, progress=note)
    assert states == ["running"] * (len(reported) - 2)
    assert (out / "search.json").read_text() == json.dumps(report, indent=1) + "\n"
    # A pass has two looks, and so has the report that the search is running.
    assert report.pop("seconds") == round(1.23456 * (2 * 6 + 2), 3)

    def entry(name: str, database: str, hits: int) -> dict[str, object]:
        seconds = 1.235 if name == "p2" else 0.617
        return {"file": f"{name}/{database}", "hits": hits, "seconds": seconds, "cached": False}

    survey = {"digest": "digest", "records": 7, "residues": 70}
    assert report == {
        "format": "warpfold-search-1",
        "warpfold": __version__,
        "python": platform.python_version(),
        "status": "complete",
        "part": None,
        "databases": [
            {"name": name, "path": str(path), "max_rows": rows, **survey, "search": used.identity()}
            for name, rows, used in (("db", 9, engine), ("other", None, engine), ("templates", None, Hmmsearch()))
        ],
        "proteins": [
            {
                "name": name,
                "length": len(sequence),
                "databases": {
                    "db": entry(name, "db.a3m", 2),
                    "other": entry(name, "other.a3m", 2),
                    "templates": entry(name, "templates.sto", 1),
                },
            }
            for name, sequence in PROTEINS.items()
        ],
        "failures": [],
    }
    for name, sequence in PROTEINS.items():
        rows = rows_of(sequence)
        assert (out / name / "db.a3m").read_text() == f">{name}\n{sequence}\n{rows}"
        hits = f"# STOCKHOLM 1.0\n\n#=GF x\n1abc_A/1-9 {sequence}\n//\n"
        assert (out / name / "templates.sto").read_text() == hits
    first, second, third = PROTEINS["p0"], PROTEINS["p1"], PROTEINS["p2"]
    assert engine.calls == [
        ("survey", path),
        ((first, second), path, 7, 9, 6),
        ((third,), path, 7, 9, 6),
        ((first, second), path, 7, None, 6),
        ((third,), path, 7, None, 6),
    ]
    # Templates are searched with the rows of the first database, and without a limit of rows.
    queries = [tuple((s, rows_of(s)) for s in batch) for batch in ((first, second), (third,))]
    assert hit_calls == [(query, path, 7, None, 6) for query in queries]
    progress = "0 db, 0 other, 0 db 25%, 0 db, 1 db, 2 db, 2 db 25%, 2 db, 3 db, 3 other 25%, 3 other, 4 other, "
    progress += "5 other, 5 other 25%, 5 other, 6 other, 6 templates, 7 templates, "
    progress += "8 templates, 8 templates, 9 templates"
    told = [f"{done} {what.replace(',', '')}" for done, total, what in reported[2:] if total == 9]
    assert ", ".join(told) == progress
    assert reported[:2] == [(5, 0, "reading db"), (5, 0, "reading templates")]
    assert len(told) == len(reported) - 2


def test_a_second_search_is_read_from_the_cache(files: tuple[Path, Path], tmp_path: Path) -> None:
    fasta, path = files
    kept = SearchOptions(cache=tmp_path / "kept")
    search([fasta], [Database("db", path, 9)], tmp_path / "out", StandIn(), options=kept)
    engine = StandIn()
    report = search([fasta], [Database("new", path, 9)], tmp_path / "out2", engine, options=kept)
    assert engine.calls == []
    for protein in report["proteins"]:
        entry = {"file": f"{protein['name']}/new.a3m", "hits": 2, "seconds": 0.0, "cached": True}
        assert protein["databases"] == {"new": entry}
    # Whatever changes the result is searched anew.
    for database, other in ((Database("db", path, 8), StandIn()), (Database("db", path, 9), StandIn(setting=2))):
        search([fasta], [database], tmp_path / "out3", other, options=kept)
        assert len(other.calls) == 1
    path.write_text("changed")
    changed = StandIn()
    search([fasta], [Database("db", path, 9)], tmp_path / "out4", changed, options=kept)
    assert [call[0] for call in changed.calls] == ["survey", tuple(dict.fromkeys(PROTEINS.values()))]


def test_surveys_are_cached_by_files_and_engine(tmp_path: Path) -> None:
    cache, path = Cache(tmp_path / "cache"), tmp_path / "db[1]"
    path.write_text("digest")
    engine, reported = StandIn(), []

    def survey(used: Engine = engine) -> Survey:
        return cache.survey(Database("db", path), used, lambda *each: reported.append(each))

    for _ in range(2):
        assert survey() == Survey("digest", 7, 70)
    assert engine.calls == [("survey", path)]
    assert reported == [(5, 0, "reading db")]
    (tmp_path / "db[1].index").write_text("x")
    survey()
    survey()
    assert len(engine.calls) == 2
    (tmp_path / "db1").write_text("x")
    survey()
    assert len(engine.calls) == 2
    path.touch()
    survey()
    assert len(engine.calls) == 3
    other = OtherStandIn()
    survey(other)
    assert len(other.calls) == 1


def test_the_cache_holds_text_by_key(tmp_path: Path) -> None:
    cache, key = Cache(tmp_path / "new/cache"), cache_key("a", {"b": 1, "a": 2}, [3])
    assert key == cache_key("a", {"a": 2, "b": 1}, [3]) != cache_key("a", {"b": 1, "a": 2}, [4])
    assert len(key) == 32
    assert cache.get(key) is None
    cache.put(key, "é\ntext")
    assert cache.get(key) == "é\ntext"
    (entry,) = (tmp_path / "new/cache").glob("*/*")
    assert (entry.parent.name, entry.name) == (key[:2], f"{key}.zst")
    entry.write_bytes(entry.read_bytes()[:-3])
    assert cache.get(key) is None


@pytest.mark.parametrize(
    ("count", "options", "per_pass", "sizes", "threads"),
    [
        (5, SearchOptions(), 3, [3, 2], 6),
        (5, SearchOptions(threads=2), 3, [3, 2], 2),
        (6, SearchOptions(threads=2), 10, [6], 2),
        (7, SearchOptions(workers=3), 10, [3, 3, 1], 2),
        (7, SearchOptions(workers=3, threads=5), 2, [2, 2, 2, 1], 5),
        (2, SearchOptions(workers=9), 10, [1, 1], 1),
        (0, SearchOptions(workers=2), 10, [], 3),
        (9, SearchOptions(cluster="tcp://host:1"), 10, [4, 4, 1], 1),
        (9, SearchOptions(cluster="tcp://host:1", threads=3), 2, [2, 2, 2, 2, 1], 3),
    ],
)
def test_queries_share_passes(
    files: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    options: SearchOptions,
    per_pass: int,
    sizes: list[int],
    threads: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    engine, path = StandIn(per_pass), Path("db.fa")
    target = searching.DatabaseSearch(Database("db", path, 9), engine, {}, Survey("x", 7))
    sequences = {f"p{i}": "MK" + "A" * i for i in range(count)}
    run = searching._SearchRun(
        tmp_path / "out", Cache(tmp_path / "cache"), options, lambda *each: None, sequences, [target]
    )
    jobs = list(run._make_jobs(target, list(sequences.values())))
    assert [len(job.queries) for job in jobs] == sizes
    assert [query.sequence for job in jobs for query in job.queries] == [*sequences.values()]
    assert all(job.threads == threads for job in jobs)
    used = tmp_path / "db.fa" if options.cluster else path
    assert all(job.search.database == Database("db", used, 9) for job in jobs)


def test_failures(files: tuple[Path, Path], tmp_path: Path) -> None:
    """A query that fails has no templates. If a program fails, all its queries do."""
    fasta, path = files
    engine = StandIn(fails=(PROTEINS["p1"],))
    seqres = tmp_path / "seqres.fa"
    seqres.write_text(">1abc_A mol:protein\nMKTAYIAKQRWWLKDEYP\n")
    reported: list[int] = []
    report = search(
        [fasta],
        [Database("db", path)],
        tmp_path / "out",
        engine,
        seqres,
        progress=lambda *each: reported.append(each[0]),
    )
    assert report["status"] == "failed"
    assert reported == [5, 1, 0, 0, 0, 1, 2, 3, 4, 4, 4, 5, 6]
    failed = [{"name": name, "database": "db", "error": "no room"} for name in ("p1", "twin")]
    assert report["failures"][:2] == failed
    start = {"database": "templates", "error": "db gave no alignment to start from"}
    assert report["failures"][2:] == [{"name": name, **start} for name in ("p1", "twin")]
    broken = search([fasta], [Database("db", path)], tmp_path / "out2", StandIn(breaks=True))
    assert broken["failures"] == [
        {"name": name, "database": "db", "error": "broken"} for name in ("p0", "p1", "twin", "p2")
    ]
    assert [protein["databases"] for protein in broken["proteins"]] == [{}] * 4
    # A sequence that cannot be searched for is no protein of the report.
    fasta.write_text(write_fasta([("x", 3 * "X"), ("long", "MK" * 50_000), ("longer", "MK" * 50_000 + "A")]))
    odd = search([fasta], [Database("db", path)], tmp_path / "out3", StandIn())
    assert [protein["name"] for protein in odd["proteins"]] == ["long"]
    assert [failure["name"] for failure in odd["failures"]] == ["x", "longer"]
    assert all(failure.keys() == {"name", "error"} for failure in odd["failures"])


def test_parts_share_the_sequences(files: tuple[Path, Path], tmp_path: Path) -> None:
    fasta, path = files
    names = []
    for number in (1, 2):
        options = SearchOptions(part=JobPart(number, 2))
        report = search([fasta], [Database("db", path)], tmp_path / "out", StandIn(), options=options)
        assert json.loads((tmp_path / f"out/search-{number}-of-2.json").read_text()) == report
        assert report["part"] == f"{number}/2"
        names.append([protein["name"] for protein in report["proteins"]])
    assert names == [["p0", "p2"], ["p1", "twin"]]


def test_arguments_that_do_not_fit_are_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    fasta, path = files
    out = tmp_path / "out"
    twice = [Database("db", path), Database("DB", path)]
    with pytest.raises(UserError) as caught:
        search([fasta], twice, out, StandIn())
    assert str(caught.value) == f"--database {path}: another is called db too. Use NAME=FILE."
    with pytest.raises(UserError) as caught:
        search([fasta], [Database("Templates", path)], out, StandIn(), path)
    assert str(caught.value) == f"--database {path}: another is called Templates too. Use NAME=FILE."
    with pytest.raises(UserError) as caught:
        search([fasta], [Database("db", path)], out, StandIn(), tmp_path / "none")
    assert str(caught.value) == (
        f"{tmp_path}/none: no such file. Pass a FASTA file like pdb_seqres, or remove the option."
    )
    assert not out.exists()
    assert search([fasta], [Database("templates", path)], out, StandIn())["status"] == "complete"


def test_defaults_of_engines_and_options() -> None:
    assert {"jackhmmer": Jackhmmer, "mmseqs2": MMseqs2, "hhblits": HHblits} == searching.ENGINES
    assert (Jackhmmer(), MMseqs2(), HHblits()) == (Jackhmmer(1, 1e-4), MMseqs2(3, 1e-3, 7.5), HHblits(3, 1e-3))
    assert SearchOptions() == SearchOptions(None, 1, None, None, None)
    assert cache_key(1) != cache_key(2)
    assert (searching.TEMPLATE_BATCH, searching.CLUSTER_PASS) == (256, 4)
    assert [engine().queries_per_pass(threads) for engine in (MMseqs2, HHblits) for threads in (1, 9)] == [
        256,
        256,
        1,
        1,
    ]
    assert [Jackhmmer().queries_per_pass(threads) for threads in (1, 4, 5, 16)] == [4, 4, 5, 16]
