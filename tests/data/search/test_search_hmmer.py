"""Run jackhmmer and hmmsearch in process: results equal HMMER's, however the database is cut."""

import gzip
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
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
