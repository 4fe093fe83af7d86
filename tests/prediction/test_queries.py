"""Test queries: the bytes that identify them, alignments of chains, pairs, templates, guesses, Python arguments."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.helpers import tiny_config
from tests.prediction.runs import write_entry
from warpfold.arguments import WrongArgument
from warpfold.data.example import query_files
from warpfold.data.example.complex import Complex
from warpfold.data.example.pairing import Pairing
from warpfold.data.example.raw_example import RawExample, Templates, from_sequence
from warpfold.data.example.templates import TemplateOutcome
from warpfold.data.features.choose import SampleConfig
from warpfold.data.formats.alignment import Alignment, parse_a3m
from warpfold.data.formats.input_files import ChainAlignments
from warpfold.data.search import fetch as fetch_module
from warpfold.data.search.server import ServerGone
from warpfold.errors import StorageError, UserError
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.model.template import TemplateConfig
from warpfold.prediction import queries
from warpfold.prediction.notices import Notice
from warpfold.prediction.params import Params
from warpfold.prediction.queries import (
    Query,
    ReadQueries,
    add_templates,
    all_pairs,
    chain_of_pairs,
    check_guess,
    each_given,
    fetching,
    lacking_of,
    make_query,
    pair_names,
    query_of,
    read_given,
    read_queries,
    with_guess,
    with_guesses,
    with_templates,
)
from warpfold.prediction.templates import TemplateSources

ONE, TWO = "MKTAYIAKQRQISFVKSH", "GSHMLEERLGLIEVQ"


def said(notices: Sequence[Notice]) -> list[str]:
    return [notice.text for notice in notices]


def params(name: str = "m", templates: bool = True, most: int = 4) -> Params:
    config = tiny_config() if templates else tiny_config(templates=TemplateConfig(enabled=False))
    return Params(name, Path(name), name, config, SampleConfig(max_templates=most))


def templates_of(length: int, count: int) -> Templates:
    shape = (count, length)
    positions, mask = np.full((*shape, 37, 3), 2, np.float32), np.ones((*shape, 37), np.uint8)
    names = tuple(f"t{i}_A" for i in range(count))
    return Templates(np.full(shape, 3, np.uint8), positions, mask, names, np.zeros(count, np.float32))


def alignment(sequence: str, *rows: str, stands_alone: bool = True) -> Alignment:
    text = f">q\n{sequence}\n" + "".join(f">r{i}\n{row}\n" for i, row in enumerate(rows))
    return replace(parse_a3m(text, "x", sequence), stands_alone=stands_alone)


def guess(*chains: str, missing: Sequence[tuple[str, int]] = ()) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    arrays = {id: (np.ones((len(letters), 37, 3)), np.ones((len(letters), 37))) for id, letters in zip("ABCD", chains)}
    for id, residue in missing:
        arrays[id][1][residue, ATOM_ORDER["CB"]] = 0
    return arrays


# ---- Query


def test_the_counts_of_a_query() -> None:
    first = replace(from_sequence("MKV", [alignment("MKV", "MKA", "MKI")]), templates=templates_of(3, 2))
    second = from_sequence("GGGG")
    query = Query("q", ("A", "B", "C"), ("MKV", "GGGG", "MKV"), (first, second, first))
    assert (query.residues, query.rows, query.templates, query.is_complex) == (10, 4, 2, True)
    assert [replace(query, fixed=fixed).templates for fixed in (("A",), ("B",), ("B", "C"))] == [3, 2, 3]
    single = Query("q", ("A",), ("GGGG",), (second,))
    assert (single.residues, single.rows, single.templates, single.is_complex) == (4, 1, 0, False)
    assert (query.assembly.name, query.assembly.ids, query.assembly.chains) == ("q", query.ids, query.chains)
    assert (single.outcomes, single.notices, single.structure, single.guess, single.fixed) == ((), (), None, None, ())
    structure, other = (with_guess(single, guess("GGGG")).guess for _ in range(2))
    assert [replace(single, structure=a, guess=b).designed for a, b in ((structure, None), (structure, other))] == [
        structure, other,
    ]  # fmt: skip
    assert (single.designed, replace(single, guess=other).designed) == (None, other)
    for frozen, name in ((single, "name"), (ReadQueries({}, [], []), "hits")):
        with pytest.raises(FrozenInstanceError):
            setattr(frozen, name, "x")


def test_the_bytes_that_identify_a_query() -> None:
    """Every array that decides the prediction counts, in order; notices, outcomes and the structure do not."""
    rows, deletions = np.array([[1, 2, 3], [4, 5, 21]], np.uint8), np.array([[0, 0, 0], [0, 7, 0]], np.uint16)
    pairing = Pairing(
        np.array([11, 12, 13, 14], np.uint64)[::2], np.array([1, 0.5], np.float32), np.array([21, 22], np.uint64),
        np.array([True, False]),
    )  # fmt: skip
    plain = from_sequence("GG")
    chain = replace(from_sequence("RND"), msa=rows, deletions=deletions, pairing=pairing, templates=templates_of(3, 1))
    query = Query("name", ("A", "B"), ("RND", "GG"), (chain, plain))
    expected = [
        b"name\nA,B\n",
        *(bytes([1, 2, 3]), rows.tobytes(), deletions.tobytes()),
        *(np.array([11, 13], np.uint64).tobytes(), np.array([1, 0.5], np.float32).tobytes()),
        *(np.array([21, 22], np.uint64).tobytes(), bytes([1, 0])),
        *(bytes([3] * 3), np.full(333, 2, np.float32).tobytes(), bytes([1] * 111)),
        *(bytes([7, 7]), bytes([7, 7]), bytes(4)),
    ]
    assert [*query.parts()] == expected
    guessed = with_guess(query, guess("RND", "GG"), ["B", "A"])
    assert guessed.guess is not None
    last = f"{guessed.guess.digest}\nB,A\n".encode()
    assert [*guessed.parts()] == [*expected, last]
    assert [*replace(query, structure=guessed.guess, notices=[Notice("no_hits")]).parts()] == expected


def test_notices_that_all_queries_share_become_those_of_the_run() -> None:
    a, b, c, d = (Notice("input", {"text": text}) for text in "abcd")
    one, two = (Query(name, ("A",), ("GG",), (from_sequence("GG"),)) for name in ("one", "two"))
    error = UserError("bad")
    found: dict[str, Query | UserError]
    found = {"one": replace(one, notices=[a, b, c]), "bad": error, "two": replace(two, notices=[c, d, a])}
    read = ReadQueries(found, [d], ["hits"])
    assert ([query.name for query in read.queries], read.errors) == (["one", "two"], {"bad": error})
    hoisted = read.hoist_common_notices()
    assert ([*hoisted.found], hoisted.errors, hoisted.hits) == (["one", "bad", "two"], {"bad": error}, ["hits"])
    assert [said(query.notices) for query in hoisted.queries] == [["b"], ["d"]]
    assert said(hoisted.notices) == ["d", "a", "c"]
    for names in (["one", "bad"], ["bad"], list[str]()):
        alone = ReadQueries({name: found[name] for name in names}, [d], [])
        assert alone.hoist_common_notices() == alone


# ---- Files


def test_reading_with_a_server_and_a_check(tmp_path: Path) -> None:
    (tmp_path / "q.fasta").write_text(f">one\n{ONE}\n>pair\n{ONE}:{TWO}\n>no\n{TWO}\n>nucleic\n{'ACGT' * 9}\n")
    (tmp_path / "one.a3m").write_text(f">one\n{ONE}\n>r\n{ONE[:-1]}A\n")
    (tmp_path / "two.a3m").write_text(f">two\n{TWO}\n>r\n{TWO[:-1]}A\n>s\n{TWO[:-1]}V\n")
    asked = list[Any]()

    def fetch(lacking: Sequence[tuple[Complex, list[str]]]) -> list[Path]:
        asked.append([(record.name, missing) for record, missing in lacking])
        return [tmp_path / "two.a3m"]

    def check(record: Complex) -> None:
        if record.name == "no":
            raise UserError("no: not this one")

    read = read_given(tmp_path / "q.fasta", [tmp_path / "one.a3m"], fetch=fetch, check=check)
    assert asked == [[("pair", [TWO])]]
    assert [*read.found] == ["one", "pair", "no", "nucleic"]
    assert [[chain.depth for chain in query.chains] for query in read.queries] == [[2], [2, 3]]
    assert (str(read.errors["no"]), "nucleic acid" in str(read.errors["nucleic"])) == ("no: not this one", True)
    assert (read.notices, read.hits) == ([], [])
    # Of fixed chains, only these are asked for; of none lacking, nothing.
    for fixed, names in ((("A",), []), (("B",), [[("pair", [TWO])]]), ((), [[("pair", [TWO])]])):
        asked.clear()
        read_given(tmp_path / "q.fasta", [tmp_path / "one.a3m"], fetch=fetch, check=check, fixed=fixed)
        assert asked == names
    asked.clear()
    read_given(tmp_path / "q.fasta", [tmp_path / "one.a3m", tmp_path / "two.a3m"], fetch=fetch, check=check)
    assert asked == []


def test_what_is_read_of_records(tmp_path: Path) -> None:
    (tmp_path / "good.fasta").write_text(f">one\n{ONE}\n>two\n{TWO}\n")
    (tmp_path / "bad.fasta").write_text(f">three\n{ONE}\n>bad\nMK1V\n")
    path = tmp_path / "good.fasta"
    assert [(one.name, one.ids) for one in read_queries(path, [])] == [("one", ("A",)), ("two", ("A",))]
    assert [(one.name, one.ids) for one in read_queries(path, [], True)] == [("good", ("one", "two"))]
    with pytest.raises(UserError, match="position 3 has '1'"):
        read_queries([path, tmp_path / "bad.fasta"], [])
    (tmp_path / "x.a3m").write_text(">x\nMKVVVV\n")
    with pytest.raises(UserError, match=re.escape(f"is not the sequence of any record in {path}. Pass")):
        read_given(path, [tmp_path / "x.a3m"])
    with pytest.raises(UserError, match=re.escape(f"any record in {path}, {ONE * 2}. Pass")):
        read_given([path, ONE * 2], [tmp_path / "x.a3m"])
    beside = read_given([path, tmp_path / "bad.fasta"], [tmp_path / "x.a3m"])
    assert said(beside.notices) == [f"alignments of none of the sequences, not used: 1 ({tmp_path / 'x.a3m'})"]
    # Chains of pairs are read one by one.
    pairs = read_given([path, f"{ONE}:{TWO}"], [], pairs=True)
    assert [(one.name, said(one.notices), one.chains[0].pairing is None) for one in pairs.queries] == [
        (name, ["no alignment: folded by the sequence alone"], True) for name in ("one", "two")
    ]
    assert [str(error) for error in pairs.errors.values()] == [
        "query: is a complex, and --pairs pairs single chains. Pass each chain as a record."
    ]
    # The chain of a structure of one chain is A.
    entry = write_entry(tmp_path / "s.cif", {"Q": ONE}, "2020-01-01")
    (query,) = read_queries(entry, [])
    assert (query.ids, query.structure is not None and query.structure.names) == (("A",), ("A",))
    (chain,) = read_given(entry, [], pairs=True).queries
    assert (chain.ids, chain.structure) == (("A",), None)


def test_the_query_of_one_chain() -> None:
    own, found = alignment(ONE, ONE[:-1] + "A"), alignment(ONE, ONE[:-1] + "V", ONE[:-1] + "I")
    hits = alignment(ONE, ONE[:-1] + "G", ONE[:-1] + "L", ONE[:-1] + "M", stands_alone=False)
    record = Complex("q", ("A",), (ONE,), notes=("note",))

    def query(*alignments: Alignment, of: Sequence[Alignment] = ()) -> tuple[int, list[str]]:
        given = ChainAlignments({ONE: list(of)}, []) if of else None
        made = make_query(replace(record, alignments=alignments), given)
        return made.rows, said(made.notices)

    alone = ": folded by the sequence alone"
    pairing = "rows of alignments for pairing (named uniprot or pair), not used for a single protein that has other "
    assert query() == (1, ["note", f"no alignment{alone}"])
    assert query(alignment(ONE)) == (1, ["note", f"its alignment has one row, its own{alone}"])
    assert query(own) == (2, ["note"])
    assert query(own, of=[found]) == (4, ["note"])
    assert query(own, of=[hits, found]) == (4, ["note", f"{pairing}rows: 3"])
    assert query(hits) == (4, ["note"])
    assert query(alignment(ONE), of=[hits]) == (
        1, ["note", f"{pairing}rows: 3", f"its alignment has one row, its own{alone}"],
    )  # fmt: skip
    made = make_query(replace(record, sequences=("MUV",)))
    assert (made.name, made.ids, made.sequences, made.structure) == ("q", ("A",), ("MUV",), None)
    # A complex shares the examples that were made before.
    cache: dict[str, RawExample] = {}
    pair = make_query(Complex("p", ("A", "B", "C"), (ONE, TWO, ONE), notes=("note",)), None, cache)
    assert ([*cache], pair.chains[0] is pair.chains[2] is cache[ONE]) == ([ONE, TWO], True)
    assert said(pair.notices) == ["note", f"no alignment for chains A, B, C{alone}"]
    again = make_query(Complex("r", ("A", "B"), (TWO, TWO)), None, cache)
    assert again.chains[0] is cache[TWO]
    chain = chain_of_pairs(replace(record, ids=("X",)), None, cache)
    assert (chain.ids, chain.chains[0] is cache[ONE], said(chain.notices)) == (
        ("X",), True, ["note", f"no alignment{alone}"],
    )  # fmt: skip
    deep = chain_of_pairs(replace(record, alignments=(own,)))
    assert (deep.rows, said(deep.notices)) == (2, ["note"])


def test_pairs_of_chains() -> None:
    assert pair_names(["a", "b"]) == {(0, 0): "a_and_a", (0, 1): "a_and_b", (1, 1): "b_and_b"}
    assert pair_names([]) == {}
    # Ambiguous, also in letter case, and too long for a file.
    assert [*pair_names(["a", "b_and_c", "A_and_b", "C"]).values()] == [
        *("a_and_a", "a_and_b_and_c", "a_and_A_and_b", "a_and_C", "b_and_c_and_b_and_c", "b_and_c_and_A_and_b"),
        *("b_and_c_and_C", "A_and_b_and_A_and_b", "pair_3_and_4", "C_and_C"),
    ]
    assert pair_names(["x" * 200])[0, 0] == "pair_1_and_1"
    outcomes = [TemplateOutcome(name, True, "") for name in ("1abc_A", "2abc_A")]
    one, two = (
        Query(name, ("A",), (letters,), (from_sequence(letters),), [outcome], [Notice("no_hits")])
        for name, letters, outcome in (("one", ONE, outcomes[0]), ("two", TWO, outcomes[1]))
    )
    pairs = all_pairs([one, two])
    assert [(pair.name, pair.ids, pair.sequences, pair.outcomes, pair.notices) for pair in pairs] == [
        ("one_and_one", ("A", "B"), (ONE, ONE), [outcomes[0]], ()),
        ("one_and_two", ("A", "B"), (ONE, TWO), outcomes, ()),
        ("two_and_two", ("A", "B"), (TWO, TWO), [outcomes[1]], ()),
    ]
    assert [tuple(map(id, pair.chains)) for pair in pairs] == [
        tuple(map(id, chains))
        for chains in (one.chains * 2, (*one.chains, *two.chains), two.chains * 2)
    ]  # fmt: skip


def test_sequences_without_an_alignment() -> None:
    query = Complex("q", ("A", "B", "C"), (ONE, TWO, "MUV"))
    assert lacking_of(query, None) == [ONE, TWO, "MUV"]
    assert lacking_of(query, None, ("B", "C")) == [TWO, "MUV"]
    assert lacking_of(query, ChainAlignments({TWO: [alignment(TWO)]}, [])) == [ONE, "MUV"]
    assert lacking_of(replace(query, alignments=(alignment("MCV"), alignment(TWO))), None) == [ONE]
    assert lacking_of(replace(query, alignments=(alignment(ONE),)), None, ("A",)) == []


# ---- Templates


def test_as_many_templates_are_sought_as_any_model_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    sought = list[Any]()

    def find(asked: Sequence[Any], sources: Any, most: int, refused: Any) -> list[Any]:
        sought.append(([one.names for one in asked], most, refused))
        return [(templates_of(len(one.sequence), 1), []) for one in asked]

    monkeypatch.setattr(queries, "find_templates", find)
    models = [params("few", most=1), params("none", templates=False, most=9), params("many", most=3)]
    single, pair = query_of(ONE, None, "one"), query_of({"A": ONE, "b": TWO, "C": ONE}, None, "pair")
    alone, together = TemplateSources(), ["pair_A", "pair_C", "pair_A"]
    completed = with_templates([single, pair], alone, models, ["bad"])
    assert sought[0] == ([("one",), tuple(together), ("pair_b", "pair_b")], 3, ["bad"])
    assert [[chain.templates_count for chain in query.chains] for query in completed] == [[1], [1, 1, 1]]
    for refused in ((), ["bad"]):
        with_templates([pair], alone, models[:1], refused)
    assert [names for names, _, _ in sought[1:]] == [
        [("A", "C", "A", "C", *together), ("b", "b", "pair_b", "pair_b")],
        [tuple(together), ("pair_b", "pair_b")],
    ]
    assert [most for _, most, _ in sought] == [3, 1, 1]


def test_templates_of_several_models_and_queries(tmp_path: Path) -> None:
    file = write_entry(tmp_path / "t.cif", {"A": ONE, "B": TWO}, "2020-01-01")
    none, few, many = params("none", templates=False), params("few", most=1), params("many", most=2)
    single = query_of(ONE, None, "one")
    trio = query_of([ONE, TWO, ONE], None, "trio")
    sources = TemplateSources(files=[f"{file}:A"])
    (completed,) = with_templates([single], sources, [none, few])
    assert (completed.templates, completed.chains[0].templates_count) == (1, 1)
    assert [(outcome.used, outcome.chains) for outcome in completed.outcomes] == [(True, ())]
    (completed,) = with_templates([replace(trio, notices=[Notice("no_hits")])], sources, [many])
    assert [chain.templates_count for chain in completed.chains] == [1, 0, 1]
    assert [outcome.chains for outcome in completed.outcomes] == [("A", "C")]
    assert [notice.kind for notice in completed.notices] == ["no_hits"]
    both = TemplateSources(files=[f"B={file}:B", f"{file}:A"])
    (completed,) = with_templates([trio], both, [few])
    assert [chain.templates_count for chain in completed.chains] == [1, 1, 1]
    assert [outcome.chains for outcome in completed.outcomes] == [("A", "C"), ("B",)]
    with pytest.raises(UserError, match="no template parts"):
        with_templates([single], sources, [none])
    with pytest.raises(UserError, match=r"templates given: 2, the model takes 1\."):
        with_templates([single], TemplateSources(files=[f"{file}:A"] * 2), [many, few])
    with pytest.raises(UserError, match=r"none is X\. .*it is for: A="):
        with_templates([trio], TemplateSources(files=[f"X={file}"]), [many])
    with pytest.raises(UserError, match="the model takes 0"):
        with_templates([single], TemplateSources(), [params(most=0)])


def test_templates_from_python(tmp_path: Path) -> None:
    file = write_entry(tmp_path / "t.cif", {"A": ONE, "B": TWO}, "2020-01-01")
    single, pair, model = query_of(ONE, None, "one"), query_of([ONE, TWO], None, "pair"), params(most=2)
    arrays = templates_of(len(ONE), 2)
    completed = add_templates(single, model, arrays, None, None, None)
    assert (completed.chains[0].templates, completed.outcomes, completed.notices) == (arrays, (), [])
    assert add_templates(single, model, None, None, None, None) is single
    assert add_templates(single, model, [f"{file}:A"], None, None, None).templates == 1
    assert [chain.templates_count for chain in add_templates(pair, model, file, None, None, None).chains] == [1, 1]
    for query, given, why in (
        (pair, arrays, "templates of a complex: give their files"),
        (single, templates_of(len(ONE), 3), "templates given: 3, the model takes 2"),
    ):
        with pytest.raises(UserError, match=why):
            add_templates(query, model, given, None, None, None)
    with pytest.raises(UserError, match="has no effect without hits"):
        add_templates(single, model, None, None, tmp_path, None)
    with pytest.raises(UserError, match="has no effect without hits"):
        add_templates(single, model, None, None, None, "2020-01-01")


# ---- Guesses


def test_the_notices_of_a_guess() -> None:
    query = query_of({"A": "MKV", "B": "AAAAA"}, None, "q")
    query = replace(query, notices=[Notice("input", {"text": "first"})])
    assert with_guess(query, None, ("X",)) is query
    guessed = with_guess(query, guess("MKV", "AAAAA", missing=[("A", 1), ("B", 4)]), ["A"])
    assert guessed.fixed == ("A",)
    assert [(one.kind, one.values) for one in guessed.notices[1:]] == [
        ("guess_gaps", {"count": 2, "detail": "A 2, B 5"})
    ]
    assert guessed.notices[0].text == "first"
    assert guessed.guess is not None
    other = replace(guessed.guess, sequences=("MKV", "AGAGG"), seen=tuple(np.ones((n, 2), bool) for n in (3, 5)))
    differing = with_guess(query, other, ("B", "A"))
    assert [(one.kind, one.values) for one in differing.notices[1:]] == [
        ("fixed_differs", {"count": 3, "detail": "B 2, B 4, B 5"})
    ]
    assert said(with_guess(query, other, ("A",)).notices) == ["first"]
    itself = replace(query, structure=other)
    assert (with_guess(itself, "self").guess, with_guess(itself, "self").fixed) == (other, ())
    for given, fixed, why in (
        ("self", (), "q: is no structure that it could start from. Name a file or a folder instead."),
        (other, ("A", "X", "Y"), "q: has no chain X to be fixed. Choose from A, B."),
        (guess("MKV"), (), "has other chains"),
    ):
        with pytest.raises(UserError, match=re.escape(why)):
            with_guess(query, given, fixed)
    check_guess(None, (), [params(templates=False)])
    check_guess("g.pdb", (), [params(templates=False)])
    check_guess("g.pdb", ("A",), [params(templates=False), params()])
    with pytest.raises(UserError, match=r"^--fixed-chains needs --initial-guess, the structure"):
        check_guess(None, ("A",), [params()])
    with pytest.raises(UserError, match="no template parts"):
        check_guess("g.pdb", ("A",), [params(templates=False)])


def test_guesses_of_many_queries(tmp_path: Path) -> None:
    error = UserError("bad")
    found: Mapping[str, Query | UserError] = {
        **{name: query_of(ONE, None, name) for name in ("one", "two")},
        "bad": error,
    }
    write_entry(tmp_path / "one.cif", {"A": ONE}, "2020-01-01")
    guessed = with_guesses(found, tmp_path, ("A",))
    assert [*guessed] == ["one", "two", "bad"]
    first = guessed["one"]
    assert isinstance(first, Query)
    assert (first.fixed, first.guess is not None and first.guess.source) == (("A",), str(tmp_path / "one.cif"))
    assert ("has no structure of two. Add" in str(guessed["two"]), guessed["bad"]) == (True, error)
    one = query_of(ONE, None, "one")
    assert with_guess(one, str(tmp_path / "one.cif")).guess is not None
    assert with_guesses(found, None, ()) == found
    assert ["is no structure" in str(one) for one in with_guesses(found, "self", ()).values()] == [True, True, False]


# ---- Python arguments


@pytest.mark.parametrize(
    ("sequence", "chains"),
    [
        (ONE.lower(), {"A": ONE}),
        (f"{ONE}:{TWO}", {"A": ONE, "B": TWO}),
        ([ONE], {"A": ONE}),
        ((ONE, TWO), {"A": ONE, "B": TWO}),
        ({"X": TWO, "b": ONE.lower()}, {"X": TWO, "b": ONE}),
    ],
)
def test_sequences_from_python(sequence: Any, chains: dict[str, str]) -> None:
    query = query_of(sequence, None, "q")
    assert (query.name, dict(zip(query.ids, query.sequences)), [*query.notices]) == ("q", chains, [])


@pytest.mark.parametrize(
    ("sequence", "given", "said", "is_wrong"),
    [
        (" ", None, "q: the sequence has no residues. Pass a letter for each.", False),
        ("a.fasta", None, "q: sequence = 'a.fasta': is no sequence. Fold a file with fold_many.", False),
        ("a/b", None, "q: sequence = 'a/b': is no sequence. Fold a file with fold_many.", False),
        (3, None, "sequence = 3: a text is needed, or those of the chains of a complex. Fold files with", True),
        ([], None, "q: sequence = []: has no chains. Pass at least one.", False),
        ({}, None, "q: sequence = {}: has no chains. Pass at least one.", False),
        ([ONE, 3], None, "q: chain B = 3: a text is needed", True),
        ({1: ONE}, None, f"q: chain 1 = '{ONE}': a text is needed", True),
        ("MK1", None, "q: has '1' at position 3", False),
        ([ONE, "MK1"], None, "q B: has '1' at position 3", False),
        ([ONE, TWO], 3, "alignment = 3: files, a list or a mapping of chains is needed", True),
        ([ONE, TWO], {"A": None, "X": None}, "q: an alignment for chain X, but the chains are A, B", False),
        ([ONE, TWO], [None] * 3, "q: 2 chains and 3 alignments. Pass one for each, or none.", False),
        ([ONE, TWO], [None, 3], "q B: alignment = 3: rows, an Alignment, or files are needed", True),
        (ONE, [ONE, 3], "q: alignment = ['", True),
        (ONE, [Path("one.a3m"), ONE], "q: alignment = [", True),
        (ONE, 3, "q: alignment = 3: rows, an Alignment, or files are needed", True),
        (ONE, alignment(TWO), "q: its first row has 15 residues, the query has 18", False),
        ([ONE, TWO], [None, alignment(ONE)], "q B: its first row has 18 residues", False),
        (ONE, "none.a3m", "none.a3m", False),
    ],
)
def test_wrong_arguments_of_a_query(sequence: Any, given: Any, said: str, is_wrong: bool) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as failed:
        query_of(sequence, given, "q")
    assert isinstance(failed.value, WrongArgument) is is_wrong


def test_alignments_from_python(tmp_path: Path) -> None:
    other, third = ONE[:-1] + "A", TWO[:-1] + "A"
    for name, text in (("one", f">o\n{ONE}\n>r\n{other}\n"), ("two", f">t\n{TWO}\n>r\n{third}\n>s\n{TWO[:-1]}V\n")):
        (tmp_path / f"{name}.a3m").write_text(text)
    (tmp_path / "x").mkdir()
    (tmp_path / "x/x.a3m").write_text(">x\nMKVVVV\n")
    one, two, x = tmp_path / "one.a3m", tmp_path / "two.a3m", tmp_path / "x"
    unused = "alignments of none of the sequences, not used: 1 (x/x.a3m)"
    bare = "no alignment for chain A: folded by the sequence alone"
    own = "its alignment has one row, its own: folded by the sequence alone"
    pair = [ONE, TWO]
    table: list[tuple[Any, Any, list[int], list[str]]] = [
        (ONE, None, [1], []),
        (ONE, [], [1], []),
        (ONE, [ONE], [1], [own]),
        (ONE, [other], [2], []),
        (ONE, [ONE, other], [2], []),
        (ONE, alignment(ONE, other), [2], []),
        (ONE, one, [2], []),
        (ONE, str(one), [2], []),
        (ONE, [one], [2], []),
        (ONE, [one, x], [2], [unused]),
        ([ONE], [one], [2], []),
        ([ONE], [[other, other[:-1] + "V"]], [3], []),
        (pair, None, [1, 1], []),
        (pair, (), [1, 1], []),
        (pair, [one, two], [2, 3], []),
        (pair, [one, two, x], [2, 3], [unused]),
        (pair, two, [1, 3], [bare]),
        (pair, [None, [two, x]], [1, 3], [unused, bare]),
        (pair, {"B": two}, [1, 3], [bare]),
        (pair, [None, [third]], [1, 2], [bare]),
        (pair, [one, None], [2, 1], [bare.replace("A", "B")]),
        (pair, [[other]], [2, 1], [bare.replace("A", "B")]),
        ({"B": ONE, "A": TWO}, {"A": two}, [1, 3], [bare.replace("A", "B")]),
    ]
    for sequence, given, depths, notices in table:
        query = query_of(sequence, given, "q")
        found = [text for text in said(query.notices) if "no rows are paired" not in text]
        assert ([chain.depth for chain in query.chains], found) == (depths, notices), (sequence, given)


def test_a_server_completes_the_alignments_from_python(tmp_path: Path) -> None:
    two = tmp_path / "two.a3m"
    two.write_text(f">t\n{TWO}\n>r\n{TWO[:-1]}A\n")
    asked = list[Any]()

    def fetch(lacking: Sequence[tuple[Complex, list[str]]]) -> list[Path]:
        asked.append([(record.name, record.ids, missing) for record, missing in lacking])
        return [two]

    query = query_of([ONE, TWO], [[ONE[:-1] + "A"]], "q", fetch)
    assert ([chain.depth for chain in query.chains], asked) == ([2, 2], [[("q", ("A", "B"), [TWO])]])
    query = query_of(TWO, None, "q", fetch)
    assert (query.rows, said(query.notices), asked[1:]) == (2, [], [[("q", ("A",), [TWO])]])
    assert query_of([ONE, TWO], None, "q", fetch, ("B",)).rows == 3
    assert asked[2:] == [[("q", ("A", "B"), [TWO])]]
    one = tmp_path / "one.a3m"
    one.write_text(f">o\n{ONE}\n>r\n{ONE[:-1]}A\n")
    assert query_of([ONE, TWO], one, "q", fetch).rows == 4
    assert asked[3:] == [[("q", ("A", "B"), [TWO])]]
    query_of(TWO, [TWO[:-1] + "V"], "q", fetch)
    assert len(asked) == 4


def test_fetching_checks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[Any]()

    def answer(server: Any, requests: Any, tell: Any) -> list[Path]:
        calls.append((server, [(one.name, dict(one.sequences)) for one in requests], tell))
        return [Path("a.a3m")]

    monkeypatch.setattr(fetch_module, "fetch_alignments", answer)
    checked, server, tell = list[str](), SimpleNamespace(), object()
    fetch = fetching(server, lambda query: checked.append(query.name), tell)  # type: ignore[arg-type]
    query = Complex("q", ("A", "B"), (ONE, TWO))
    assert fetch([(query, [TWO]), (Complex("r", ("A",), (ONE,)), [ONE])]) == [Path("a.a3m")]
    assert (checked, calls) == (["q", "r"], [(server, [("q", {"q_B": TWO}), ("r", {"r": ONE})], tell)])


def given(sequences: Any, alignments: Any = None, templates: Any = None, **changes: Any) -> dict[str, Any]:
    """Read queries, whose templates become their outcomes."""

    def complete(query: Query, templates: Any) -> Query:
        if isinstance(templates, Exception):
            raise templates
        return replace(query, outcomes=[templates])

    options: dict[str, Any] = {"together": False, "fetch": None, "check": lambda query: None, "complete": complete}
    return each_given(sequences, alignments, templates, **options | changes)


def test_many_queries_from_python(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = given([ONE, f"{ONE}:{TWO}", "MK1"], [[ONE[:-1] + "A"], None, None], [1, 2, 3])
    assert [*found] == ["query_1", "query_2", "query_3"]
    assert [(one.name, one.rows, one.outcomes) for one in [*found.values()][:2]] == [
        ("query_1", 2, [1]),
        ("query_2", 2, [2]),
    ]
    assert "has '1' at position 3" in str(found["query_3"])
    found = given({"a": ONE, "b": TWO}, {"b": [TWO[:-1] + "A"]}, {"a": 5})
    assert [(name, one.rows, one.outcomes) for name, one in found.items()] == [("a", 1, [5]), ("b", 2, [None])]
    failing = {"a": UserError("mine"), "b": None}
    assert str(given({"a": ONE, "b": TWO}, templates=failing)["a"]) == "mine"
    for error in (WrongArgument("x"), ServerGone("x"), StorageError("x")):
        with pytest.raises(type(error)):
            given({"a": ONE}, templates={"a": error})
    # Files.
    (tmp_path / "q.fasta").write_text(f">one\n{ONE}\n>bad\nMK1V\n>two\n{TWO}\n")
    (tmp_path / "x").mkdir()
    (tmp_path / "x/x.a3m").write_text(">x\nMKVVVV\n")
    (tmp_path / "one.a3m").write_text(f">one\n{ONE}\n>r\n{ONE[:-1]}A\n")
    with caplog.at_level(logging.WARNING, "warpfold"):
        found = given(tmp_path / "q.fasta", [tmp_path / "one.a3m", tmp_path / "x"], {"two": 7})
    assert caplog.messages == ["alignments of none of the sequences, not used: 1 (x/x.a3m)"]
    assert [*found] == ["one", "bad", "two"]
    assert (found["one"].rows, found["two"].outcomes, "position 3" in str(found["bad"])) == (2, [7], True)
    assert [*given(str(tmp_path / "q.fasta"), templates=[1, 2, 3])] == ["one", "bad", "two"]
    assert [*given([ONE, str(tmp_path / "q.fasta")])] == ["query", "one", "bad", "two"]
    assert [*given([tmp_path / "q.fasta"], together=True)] == ["q"]

    def check(record: Complex) -> None:
        raise UserError(f"not {record.name}")

    assert str(given(tmp_path / "q.fasta", check=check)["two"]) == "not two"


def test_guesses_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = guess(ONE)
    for guesses in ({"query_2": arrays}, [None, arrays]):
        found = given([ONE, ONE], guesses=guesses, fixed=("A",))
        assert [(one.guess is not None, one.fixed) for one in found.values()] == [(False, ()), (True, ("A",))]
    file = write_entry(tmp_path / "g.cif", {"A": ONE}, "2020-01-01")
    found = given([ONE, TWO], guesses=file, fixed=("A",))
    assert (found["query_1"].fixed, "has other chains" in str(found["query_2"])) == (("A",), True)
    itself = given(file, guesses="self")["g"]
    assert itself.guess.digest == itself.structure.digest
    monkeypatch.setattr(query_files, "STDIN", file)
    assert [one.sequences for one in given("-").values()] == [(ONE,)]


@pytest.mark.parametrize(
    ("sequences", "options", "said"),
    [
        (ONE, {}, f"sequences = '{ONE}': no such file. Pass a list for sequences: [...]."),
        (3, {}, "sequences = 3: a list, name -> sequence, or a file is needed"),
        ({"": ONE}, {}, "sequences: the name '': a text is needed"),
        ({1: ONE}, {}, "sequences: the name 1: a text is needed"),
        ([ONE], {"alignments": {"x": None}}, "alignments: there is no x among the sequences"),
        ([ONE], {"alignments": 3}, "alignments = 3: a list is needed, one for each sequence, or name -> ... of some"),
        ([ONE], {"templates": [1, 2]}, "templates: 2 for 1 sequences. Pass one for each, or name -> ... of some."),
        ([ONE, TWO], {"templates": [1]}, "templates: 1 for 2 sequences."),
        ([ONE], {"guesses": [None, None]}, "initial_guess: 2 for 1 sequences."),
        ([ONE], {"guesses": {"x": None}}, "initial_guess: there is no x among the sequences"),
    ],
)
def test_wrong_arguments_of_many_queries(sequences: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(WrongArgument, match=re.escape(said)):
        given(sequences, **options)
    assert [*given([ONE], alignments=[], templates=())] == ["query_1"]
