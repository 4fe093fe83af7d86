"""Run jackhmmer and hmmsearch in process: results equal HMMER's, however the database is cut."""

import gzip
import math
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyhmmer
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyhmmer.easel import DigitalSequenceBlock, SequenceFile, TextSequence
from pyhmmer.plan7 import Pipeline

from tests.data.search.families import database, family, headers
from warpfold.data.example.hits import parse_hits
from warpfold.data.formats.alignment import write_fasta
from warpfold.data.search import hmmer as search_hmmer
from warpfold.data.search.database import SearchQuery, read_chunks, survey_fasta
from warpfold.data.search.hmmer import AMINO, Hmmsearch, Jackhmmer
from warpfold.errors import UserError


def found(engine, queries, path: Path, most: int = 10_000, threads: int = 1) -> list[str]:
    results = engine.search(queries, path, survey_fasta(path), most, threads, lambda done, total: None)
    assert all(isinstance(result, str) for result in results)
    return results


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return database(tmp_path_factory.mktemp("three") / "three.fasta", 0, 1, 2)


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_rows_are_those_of_hmmer(three: Path, iterations: int) -> None:
    """Compare with pyhmmer's own iterations on the whole database in memory."""
    sequence = family(1)[0]
    with SequenceFile(three, digital=True, alphabet=AMINO) as file:
        targets: DigitalSequenceBlock = file.read_block()
    pipeline = Pipeline(AMINO, Z=len(targets), **Jackhmmer().thresholds)
    search = pipeline.iterate_seq(TextSequence(name="query", sequence=sequence).digitize(AMINO), targets)
    *_, result = islice(search, iterations)  # fewer if it converges
    wanted = Counter(
        (f"{hit.name}/{domain.alignment.target_from}-{domain.alignment.target_to}", domain.alignment.target_sequence)
        for hit in result.hits.included
        for domain in hit.domains.included
    )
    lines = found(Jackhmmer(iterations), [SearchQuery(sequence)], three)[0].splitlines()
    assert wanted == Counter((a[1:].split()[0], b.strip("-")) for a, b in zip(lines[::2], lines[1::2]))
    assert len(wanted) > 20


def test_how_the_database_is_cut_does_not_matter(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queries = [SearchQuery(family(i)[0]) for i in range(3)]
    whole = found(Jackhmmer(2), queries, three)
    templates = found(Hmmsearch(), queries, three)
    monkeypatch.setattr(search_hmmer, "read_chunks", partial(read_chunks, size=700))
    assert found(Jackhmmer(2), queries, three, threads=3) == whole
    assert found(Hmmsearch(), queries, three, threads=3) == templates
    assert found(Jackhmmer(2), queries[::-1], three) == whole[::-1]


def test_the_best_rows_are_kept(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query = SearchQuery(family(2)[0])
    every = found(Jackhmmer(), [query], three)[0].splitlines()
    monkeypatch.setattr(search_hmmer, "read_chunks", partial(read_chunks, size=700))  # cut many times
    for most in (2, 5, 17):
        assert found(Jackhmmer(), [query], three, most)[0].splitlines() == every[: 2 * (most - 1)]


def test_rows_are_on_the_query(three: Path) -> None:
    sequence, relatives = family(0)
    whole = {name.split()[0]: letters for name, letters in relatives}
    lines = found(Jackhmmer(), [SearchQuery(sequence)], three)[0].splitlines()
    for header, row in zip(lines[::2], lines[1::2]):
        name, _, rest = header[1:].partition("/")
        first, last = map(int, rest.split()[0].split("-"))
        assert sum(not letter.islower() for letter in row) == len(sequence)
        assert row.replace("-", "").upper() == whole[name][first - 1 : last]
        assert header.endswith("relative of 0")


def test_targets_that_are_odd(three: Path, tmp_path: Path) -> None:
    """There are stop codons, unknown residues, an empty and a too long target; the others are still found."""
    sequence = family(0)[0]
    half = len(sequence) // 2
    stopped = f"{sequence[:half]}*{sequence[half:]}"
    path = tmp_path / "odd.fasta.gz"
    odd = {
        "long": sequence * 2600,
        "empty": "",
        "stop": stopped,
        "unknown": sequence[:-2] + "XX",
        "low": sequence.lower(),
    }
    path.write_bytes(gzip.compress((write_fasta(odd.items()) + three.read_text()).encode()))
    names = [name.rpartition("/")[0] for name in headers(found(Jackhmmer(), [SearchQuery(sequence)], path)[0])]
    assert {"stop", "unknown", "low"} <= set(names)
    assert "long" not in names
    assert survey_fasta(path).records == survey_fasta(three).records + 5
    row = found(Jackhmmer(), [SearchQuery(sequence)], path)[0].split(">stop/")[1].split("\n")[1]
    assert row == f"{sequence[:half]}x{sequence[half:]}"


def test_domains_are_rows_in_their_order(three: Path, tmp_path: Path) -> None:
    sequence = family(0)[0]
    path = tmp_path / "twice.fasta"
    path.write_text(f">twice\nMK{sequence}{family(2)[0] * 3}{sequence}\n" + three.read_text())
    names = headers(found(Jackhmmer(), [SearchQuery(sequence)], path)[0])
    second = 2 + len(sequence) + 3 * len(family(2)[0])  # residues before it; as text, "3-..." would follow "1..."
    assert second >= 100
    assert names[:2] == [f"twice/{start + 1}-{start + len(sequence)}" for start in (2, second)]


def test_one_query_that_fails_leaves_the_others(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = search_hmmer._search

    def fails_for_one(profile, *rest):
        if len(family(1)[0]) == profile.M:
            raise MemoryError("no room")
        return search(profile, *rest)

    monkeypatch.setattr(search_hmmer, "_search", fails_for_one)
    arguments = (three, survey_fasta(three), 100, 1, lambda done, total: None)
    results = Jackhmmer(2).search([SearchQuery(family(i)[0]) for i in range(2)], *arguments)
    assert isinstance(results[0], str)
    assert isinstance(results[1], UserError)
    assert "no room" in str(results[1])
    monkeypatch.setattr(search_hmmer, "_search", search)
    build = search_hmmer._next_profile

    def fails_to_build(sequence, hits):
        if sequence == family(0)[0]:
            raise MemoryError
        return build(sequence, hits)

    monkeypatch.setattr(search_hmmer, "_next_profile", fails_to_build)
    results = Jackhmmer(2).search([SearchQuery(family(i)[0]) for i in range(2)], *arguments)
    assert str(results[0]) == "HMMER: MemoryError"
    assert isinstance(results[1], str)


def test_template_hits_are_on_the_query(tmp_path: Path) -> None:
    sequence, relatives = family(3)
    seqres = "".join(f">{i}abc_A mol:protein length:{len(row)}  X\n{row}\n" for i, (_, row) in enumerate(relatives[:9]))
    nucleic = ">9dna_A mol:na length:12  DNA\nACGTTGCA0123\n"  # with letters that are no amino acids
    path = tmp_path / "seqres.txt"
    end = seqres.index("\n>") + 1
    path.write_text(seqres[:end] + nucleic + seqres[end:])
    rows = found(Jackhmmer(), [SearchQuery(sequence)], database(tmp_path / "db.fasta", 3))[0]
    hits = parse_hits(found(Hmmsearch(), [SearchQuery(sequence, rows)], path)[0], sequence)
    assert {hit.name for hit in hits} == {f"{i}abc_A" for i in range(9)}
    path.write_text(">1abc_A mol:protein\nGG\n")
    assert parse_hits(found(Hmmsearch(), [SearchQuery(family(0)[0])], path)[0], family(0)[0]) == []
    for hit in hits:
        whole = relatives[int(hit.name[0])][1]
        assert whole[hit.start :].startswith(hit.sequence)
        assert hit.query == "".join(sequence[i] for i in hit.query_index)
        assert np.mean([a == hit.sequence[i] for a, i in zip(hit.query, hit.hit_index)]) > 0.3


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.sampled_from(["", "a", "wy"]), min_size=7, max_size=7), min_size=6, max_size=9))
def test_a_profile_has_a_state_for_each_residue_of_the_query_whatever_rows_insert(insertions: list[list[str]]) -> None:
    """Rows have insertions before each column and after the last. Where the rows have a W, so has the profile."""
    rows = [before[0] + "".join(a + b for a, b in zip("MKWAYG", before[1:])) for before in insertions]
    text = "".join(f">{i} x\n{row}\n" for i, row in enumerate(rows))
    profile = search_hmmer._alignment_profile(SearchQuery("MKTAYG", text))
    best = np.asarray(profile.match_emissions)[1:].argmax(1)
    assert "".join(AMINO.symbols[i] for i in best) == "MKWAYG"


def test_settings_are_those_of_alphafold() -> None:
    jackhmmer = {"E": 1e-4, "domE": 10.0, "incE": 1e-4, "incdomE": 1e-3, "F1": 5e-4, "F2": 5e-5, "F3": 5e-7}
    assert Jackhmmer().thresholds == jackhmmer
    assert Jackhmmer(e_value=0.5).thresholds == jackhmmer | {"E": 0.5, "incE": 0.5}
    version = {"pyhmmer": pyhmmer.__version__}
    assert Jackhmmer(3).identity() == {"engine": "jackhmmer", **version, "iterations": 3, **jackhmmer}
    hmmsearch = dict.fromkeys(("E", "domE", "incE", "incdomE"), 100.0) | dict.fromkeys(("F1", "F2", "F3"), 0.1)
    assert Hmmsearch().thresholds == hmmsearch
    assert Hmmsearch().identity() == {"engine": "hmmsearch", **version, **hmmsearch}
    assert search_hmmer.MAX_RESIDUES == 100_000
    assert search_hmmer.NO_TEMPLATES == "# STOCKHOLM 1.0\n//\n"


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_targets_that_are_too_long_for_hmmer_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    sequence, relatives = family(0)
    path, query = tmp_path / "db.fasta", [SearchQuery(sequence)]
    path.write_text(write_fasta(relatives))

    def found_names() -> set[str]:
        return {name.partition("/")[0] for name in headers(found(Jackhmmer(), query, path, threads=threads)[0])}

    every = found_names()
    length_of = {name.split()[0]: len(row) for name, row in relatives if name.split()[0] in every}
    longest = max(length_of.values())
    monkeypatch.setattr(search_hmmer, "MAX_RESIDUES", longest)
    assert found_names() == every
    monkeypatch.setattr(search_hmmer, "MAX_RESIDUES", longest - 1)
    assert found_names() == {name for name, length in length_of.items() if length < longest} < every
    # A block in which all targets are too long is skipped as a whole.
    monkeypatch.setattr(search_hmmer, "MAX_RESIDUES", 1)
    assert found(Jackhmmer(), query, path, threads=threads) == [""]


def test_a_chunk_may_have_nucleic_acids_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence, relatives = family(0)
    proteins = write_fasta([(f"{i}abc_A mol:protein", row) for i, (_, row) in enumerate(relatives[:3])])
    path = tmp_path / "seqres.txt"
    path.write_text(proteins + ">9dna_A mol:na x\nACGT\n>8dna_A mol:na x\nACGT\n" * 9 + proteins.replace("abc", "xyz"))
    whole = found(Hmmsearch(), [SearchQuery(sequence)], path)
    monkeypatch.setattr(search_hmmer, "read_chunks", partial(read_chunks, size=20))
    assert found(Hmmsearch(), [SearchQuery(sequence)], path) == whole


def test_progress_counts_the_records_of_each_pass(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_hmmer, "read_chunks", partial(read_chunks, size=2000))
    queries = [SearchQuery(family(i)[0]) for i in range(2)]
    survey = survey_fasta(three)
    blocks = [chunk.count(b">") for chunk in read_chunks(three, 2000)]
    assert len(blocks) > 2
    counts = np.cumsum(blocks).tolist()
    reported: list[tuple[int, int]] = []
    for engine, passes in ((Jackhmmer(), 1), (Jackhmmer(2), 2), (Hmmsearch(), 1)):
        reported.clear()
        engine.search(queries, three, survey, None, 2, lambda *each: reported.append(each))
        assert reported == [(done, survey.records) for done in counts] * passes


def test_without_a_limit_all_rows_are_kept(three: Path) -> None:
    query = SearchQuery(family(1)[0])
    arguments = ([query], three, survey_fasta(three))
    tell = lambda done, total: None  # noqa: E731
    (every,) = Jackhmmer().search(*arguments, None, 1, tell)
    assert every == found(Jackhmmer(), [query], three)[0]
    assert Jackhmmer().search(*arguments, 3, 1, tell) == ["\n".join(str(every).split("\n")[:4]) + "\n"]


def hit(name: str, score: float, *p_values: float, description: str = "", letters: str = "MK*") -> SimpleNamespace:
    """Make a hit with a domain for each p-value, at columns 2 to 4 and residues 11 to 13 of the target."""
    alignment = SimpleNamespace(target_from=11, target_to=13, hmm_from=2, hmm_to=4, target_sequence=letters)
    domains = [SimpleNamespace(pvalue=value, alignment=alignment) for value in p_values]
    return SimpleNamespace(name=name, description=description, score=score, domains=domains)


def hits(*included: SimpleNamespace, reported: int) -> SimpleNamespace:
    return SimpleNamespace(included=included, reported=range(reported))


def names_of(rows: search_hmmer._BestRows) -> list[str]:
    return [line[1:].partition("/")[0] for line in rows.a3m().splitlines()[::2]]


def test_rows_of_a_target_have_its_range_and_description() -> None:
    rows = search_hmmer._BestRows(None, 10, 1.0)
    rows.add(hits(hit("a", 5.0, 0.1, description="some protein"), hit("b", 9.0, 0.1, letters="M-k"), reported=2), 6)
    assert rows.a3m() == ">b/11-13\n-M-k--\n>a/11-13 some protein\n-MKx--\n"


def test_a_domain_counts_if_its_e_value_is_at_most_the_threshold() -> None:
    """The E-value is the p-value times the number of reported targets, which grows with each block."""
    rows = search_hmmer._BestRows(None, 100, 0.5)
    rows.add(hits(hit("a", 5.0, 0.25, 0.125, 0.26), hit("b", 4.0, 0.0625), reported=2), 6)
    assert names_of(rows) == ["a", "a", "b"]
    rows.add(hits(hit("c", 6.0, 0.125), reported=2), 6)
    assert names_of(rows) == ["c", "a", "b"]
    rows.add(hits(reported=4), 6)
    assert names_of(rows) == ["b"]


def test_ties_are_ordered_by_name_and_domains_by_number() -> None:
    rows = search_hmmer._BestRows(3, 100, 0.5)
    rows.add(hits(hit("b", 5.0, 0.2, 0.1), hit("a", 5.0, 0.1), hit("c", 9.0, 0.1), reported=1), 6)
    assert names_of(rows) == ["c", "a", "b"]


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_rows_that_cannot_be_among_the_best_are_dropped(limit: int) -> None:
    """The result is that of all rows. Uncertain rows, which may be excluded later, do not replace certain ones."""
    rng = np.random.default_rng(limit)
    for _ in range(60):
        rows, every = (search_hmmer._BestRows(most, 64, 1.0) for most in (limit, None))
        for _ in range(6):
            block = hits(
                *(
                    hit(f"t{rng.integers(10**6)}", float(rng.normal()), float(rng.choice([1 / 64, 1 / 16, 1 / 4])))
                    for _ in range(int(rng.integers(0, 7)))
                ),
                reported=int(rng.integers(0, 10)),
            )
            rows.add(block, 6)
            every.add(block, 6)
            assert rows.reported <= 64
        assert names_of(rows) == names_of(every)[:limit]
    # Certain rows leave room for no others.
    few = search_hmmer._BestRows(limit, 64, 1.0)
    for i in range(50):
        few.add(hits(hit(f"t{i}", float(i), 1 / 64), reported=1), 6)
        assert len(few.rows) <= 2 * limit
    assert names_of(few) == [f"t{i}" for i in range(49, 49 - limit, -1)]
    assert math.isclose(few.threshold, 1.0)


def test_template_hits_are_those_of_the_command(tmp_path: Path) -> None:
    """The text has a name and an author, and a row for each domain."""
    sequence, relatives = family(0)
    path = tmp_path / "seqres.txt"
    # Fragments leave columns of the query without residues.
    path.write_text(write_fasta([(f"{i}abc_A", row[6:-6]) for i, (_, row) in enumerate(relatives[:3])]))
    text = found(Hmmsearch(), [SearchQuery(sequence)], path)[0]
    lines = text.splitlines()
    assert lines[0] == "# STOCKHOLM 1.0"
    assert "#=GF ID query" in lines
    assert "#=GF AU hmmsearch (HMMER, pyhmmer)" in lines
    assert sum(line.startswith(("0abc_A/", "1abc_A/", "2abc_A/")) for line in lines) == 3
    (reference,) = (line.split()[2] for line in lines if line.startswith("#=GC RF"))
    assert sum(letter not in ".~" for letter in reference) == len(sequence)
    path.write_text(">x\nGGGG\n")
    assert found(Hmmsearch(), [SearchQuery(sequence)], path) == ["# STOCKHOLM 1.0\n//\n"]


def test_the_first_failure_of_a_query_is_kept() -> None:
    failed: dict[int, UserError] = {}

    def fail(error: Exception) -> None:
        raise error

    assert search_hmmer._attempt(1, lambda: 5, failed) == 5
    assert search_hmmer._attempt(1, partial(fail, MemoryError("no room")), failed) is None
    assert search_hmmer._attempt(1, partial(fail, MemoryError("again")), failed) is None
    assert search_hmmer._attempt(1, lambda: 5, failed) is None
    assert search_hmmer._attempt(2, partial(fail, MemoryError()), failed) is None
    assert {query: str(error) for query, error in failed.items()} == {1: "HMMER: no room", 2: "HMMER: MemoryError"}
    with pytest.raises(ValueError, match="other"):
        search_hmmer._attempt(3, partial(fail, ValueError("other")), failed)
