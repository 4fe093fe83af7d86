"""Make templates: selection of hits, placement of their atoms, reports, features of the model."""

import gzip
from collections.abc import Sequence
from dataclasses import replace
from datetime import date as day
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest

from tests.data.entries import random_chain
from tests.data.examples import templates as random_templates
from warpfold.batch import FEATURES, to_tensors
from warpfold.data.example.hits import Hit, read_hits
from warpfold.data.example.raw_example import Templates, concatenate_templates
from warpfold.data.example.templates import TemplateOutcome, count_refusals, template_from_file, templates_from_hits
from warpfold.data.features.choose import choose_templates
from warpfold.data.features.make import template_features
from warpfold.data.formats.alignment import decode
from warpfold.data.similar.pairwise import column_map, identity
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.library import Library
from warpfold.data.structure.mmcif import read_release_date, read_structure
from warpfold.data.structure.write import write_mmcif, write_pdb
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM_ORDER, GAP, RESTYPES
from warpfold.prediction.templates import TemplateQuery, TemplateSources, find_templates

REALDATA = (Path(__file__).parents[3] / "../shared/realdata").resolve()
RNG = np.random.default_rng(0)
QUERY = "".join(RESTYPES[i] for i in RNG.integers(0, 20, 60))
OTHER = "".join(RESTYPES[i] for i in RNG.integers(0, 20, 80))  # the query of the hits


def put(folder: Path, name: str, *chains: Chain, date: str | None = "2010-05-01") -> Path:
    """Write a file with these chains into the library."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = write_mmcif(path.name.split(".")[0].lower(), list(chains), release_date=date)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def hit(name: str = "1abc_A", sequence: str = OTHER[10:60], start: int = 10, **changes: object) -> Hit:
    """Return a hit whose residues 3, 4, ... align with residues 5, 6, ... of the query, with three gaps in each."""
    columns = len(sequence) - 6
    hit_index = np.delete(np.arange(3, 3 + columns), slice(20, 23))
    query_index = np.delete(np.arange(5, 5 + columns), slice(30, 33))
    letters = "".join(QUERY[i] for i in query_index)
    return replace(Hit(name, "", letters, query_index, sequence, hit_index, start, 20.0), **changes)


def one(result: tuple[Templates | None, list[TemplateOutcome]]) -> Templates:
    """Return the only template."""
    templates, outcomes = result
    assert templates is not None, outcomes
    assert len(templates) == 1
    return templates


def refusal(result: tuple[Templates | None, list[TemplateOutcome]]) -> str:
    templates, outcomes = result
    assert templates is None
    assert [outcome.used for outcome in outcomes] == [False]
    return outcomes[0].note


def assert_on(templates: Templates, chain: Chain, query_index: np.ndarray, places: np.ndarray) -> None:
    """Check that template 0 has these residues of `chain` at these positions of the query, and gaps elsewhere."""
    assert np.abs(templates.positions[0, query_index] - chain.positions[places]).max() < 6e-4
    assert np.array_equal(templates.mask[0, query_index], chain.mask[places])
    assert decode(templates.aatype[0, query_index]) == "".join(chain.sequence[i] for i in places)
    rest = np.setdiff1d(np.arange(templates.aatype.shape[1]), query_index)
    assert (templates.aatype[0, rest] == GAP).all()
    assert not templates.mask[0, rest].any()
    assert not templates.positions[0, rest].any()


# ---- from hits


def test_atoms_stand_where_the_hit_says(tmp_path: Path) -> None:
    chain = random_chain("A", OTHER, missing=[15, 16])
    put(tmp_path, "1abc.cif", chain)
    templates, (outcome,) = templates_from_hits(QUERY, [hit()], Library(tmp_path))
    templates = one((templates, [outcome]))
    assert_on(templates, chain, hit().query_index, hit().hit_index + 10)
    assert (templates.names, templates.sum_probs.tolist()) == (("1abc_A",), [20.0])
    assert (outcome.used, outcome.note, outcome.residues) == (True, "", 41 - 2)
    same = sum(QUERY[q] == OTHER[t + 10] for q, t in zip(hit().query_index, hit().hit_index))
    assert outcome.identity == pytest.approx(same / 41, abs=1e-4)


def test_the_sequence_is_found_where_the_hit_says_or_else_where_it_is(tmp_path: Path) -> None:
    repeated = random_chain("A", OTHER[:25] * 3)
    put(tmp_path, "2rep.cif", repeated)
    repeat = hit("2rep_A", sequence=OTHER[:25], start=25, query_index=np.arange(25), hit_index=np.arange(25))
    assert_on(one(templates_from_hits(QUERY, [repeat], Library(tmp_path))), repeated, np.arange(25), np.arange(25, 50))
    chain = random_chain("A", "GSHM" + OTHER)
    put(tmp_path, "1abc.cif", chain)
    result = templates_from_hits(QUERY, [hit()], Library(tmp_path))
    assert_on(one(result), chain, hit().query_index, hit().hit_index + 14)
    unknown = hit(sequence="X" + OTHER[11:59] + "X")
    assert_on(
        one(templates_from_hits(QUERY, [unknown], Library(tmp_path))),
        chain,
        unknown.query_index,
        unknown.hit_index + 14,
    )


def test_another_chain_is_taken_where_the_named_one_is_another_protein(tmp_path: Path) -> None:
    chain = random_chain("B", OTHER)
    put(tmp_path, "1abc.cif", random_chain("A", QUERY[::-1], 1), chain)
    templates, (outcome,) = templates_from_hits(QUERY, [hit()], Library(tmp_path))
    assert_on(one((templates, [outcome])), chain, hit().query_index, hit().hit_index + 10)
    assert outcome.name == "1abc_B"
    assert outcome.note == "of chain B, which has the hit's sequence"
    for name in ("1abc", "1ABC_Z"):  # no chain, or a missing one, is named
        assert one(templates_from_hits(QUERY, [hit(name)], Library(tmp_path))).names == ("1abc_B",)


def test_a_changed_sequence_is_aligned_anew(tmp_path: Path) -> None:
    # The file lacks residue 30, has two more residues after 40, and another one at 50.
    changed = OTHER[:30] + OTHER[31:41] + "WW" + OTHER[41:50] + ("A" if OTHER[50] != "A" else "C") + OTHER[51:]
    places = np.array([*range(30), -1, *range(30, 40), *range(42, 81)])
    chain = random_chain("A", changed)
    put(tmp_path, "1abc.cif", chain)
    templates, (outcome,) = templates_from_hits(QUERY, [hit()], Library(tmp_path))
    known = places[hit().hit_index + 10]
    assert_on(one((templates, [outcome])), chain, hit().query_index[known >= 0], known[known >= 0])
    assert "realigned to chain A, 98% identical" in outcome.note


def test_another_protein_or_nothing_seen_is_refused(tmp_path: Path) -> None:
    mutant = "".join(a if i % 7 else "W" if a != "W" else "A" for i, a in enumerate(OTHER))
    put(tmp_path, "1abc.cif", random_chain("A", mutant))
    put(tmp_path, "2abc.cif", random_chain("A", OTHER, missing=range(10, 60)))
    for name, said in (("1abc_A", "86% identical (90% are needed)"), ("2abc_A", "with fewer than 5 atoms")):
        assert said in refusal(templates_from_hits(QUERY, [hit(name)], Library(tmp_path)))
    assert templates_from_hits(QUERY, [], Library(tmp_path)) == (None, [])


def test_the_filters_of_the_paper(tmp_path: Path) -> None:
    put(tmp_path, "1abc.cif", random_chain("A", OTHER), random_chain("Q", "GS" + QUERY))
    put(tmp_path, "2xyz.cif", random_chain("A", OTHER), date=None)
    library = Library(tmp_path)

    def found(hit: Hit, **more: object) -> tuple[Templates | None, list[TemplateOutcome]]:
        return templates_from_hits(QUERY, [hit], library, **more)  # type: ignore[arg-type]

    assert "released 2010-05-01, after 2010-04-30" in refusal(found(hit(), max_date=day(2010, 4, 30)))
    assert one(found(hit(), max_date=day(2010, 5, 1)))
    assert "no release date" in refusal(found(hit("2xyz_A"), max_date=day(2010, 5, 1)))
    assert one(found(hit("2xyz_A")))
    assert "query's own entry" in refusal(found(hit(), exclude={"1abc"}))

    few = hit(query_index=np.arange(6), hit_index=np.arange(6))
    assert "aligns 6 of the query's 60 residues" in refusal(found(few))
    assert one(found(hit(query_index=np.arange(7), hit_index=np.arange(7))))
    short = np.arange(9)
    assert "has 9 residues" in refusal(found(hit(sequence=OTHER[:9], start=0, query_index=short, hit_index=short)))

    def itself(length: int) -> Hit:
        return hit(
            "1abc_Q", sequence=QUERY[:length], start=2, query_index=np.arange(length), hit_index=np.arange(length)
        )

    assert "is the query itself" in refusal(found(itself(58)))
    assert one(found(itself(57)))  # 95 % at most


@pytest.mark.parametrize("cutoff", ["2017-01-02", "20170102", "2017-1-2", "2017-W01-1", "2017W011"])
def test_no_spelling_of_the_cutoff_lets_a_later_template_in(tmp_path: Path, cutoff: str) -> None:
    put(tmp_path, "5h73.cif", random_chain("A", OTHER), date="2017-07-26")
    put(tmp_path, "1abc.cif", random_chain("A", OTHER, 1), date="2017-01-02")
    rows = "".join(f">{name}_A/11-60\n{OTHER[10:60]}{'-' * 10}\n" for name in ("5h73", "1abc"))
    (tmp_path / "hits.a3m").write_text(rows)
    sources = TemplateSources(hits=[tmp_path / "hits.a3m"], structures=tmp_path, max_date=cutoff)
    templates, outcomes = find_templates([TemplateQuery(QUERY, ("query",), ())], sources, most=4)[0]
    assert templates is not None
    assert templates.names == ("1abc_A",)
    assert outcomes[0].note == "released 2017-07-26, after 2017-01-02"


def with_jump(distance: float, unseen: Sequence[int] = ()) -> Chain:
    """Return a chain whose CA atoms of residues 70 and 71 are `distance` angstrom apart."""
    chain = random_chain("A", OTHER, missing=unseen)
    positions, ca = chain.positions.copy(), ATOM_ORDER["CA"]
    x = positions[:, ca]
    positions[70:] += x[69] + np.array([distance, 0, 0], np.float32) - random_chain("A", OTHER).positions[70, ca]
    return replace(chain, positions=positions * chain.mask[..., None])


@pytest.mark.parametrize(
    ("distance", "unseen", "refused"),
    [(149.0, (), False), (151.0, (), True), (5000.0, (), True), (5000.0, (70,), False)],  # unresolved
)
def test_a_jump_in_the_chain_is_refused_as_the_official_code_does(
    tmp_path: Path, distance: float, unseen: Sequence[int], refused: bool
) -> None:
    """As `_check_residue_distances`: resolved neighbours, aligned or not, are at most 150 angstrom apart."""
    path = put(tmp_path, "1abc.cif", with_jump(distance, unseen))
    result = templates_from_hits(QUERY, [hit()], Library(tmp_path))  # aligns residues 13 to 57
    if not refused:
        assert len(one(result)) == len(template_from_file(QUERY, path)[0]) == 1
        return
    assert f"residues 70 and 71 of its sequence are {distance:.0f} angstrom apart (150 at most)" in refusal(result)
    with pytest.raises(UserError, match=r"1abc\.cif: .* apart \(150 at most\). Choose another") as caught:
        template_from_file(QUERY, path)
    assert "\n" not in str(caught.value)


def test_obsolete_entries_are_replaced_or_refused(tmp_path: Path) -> None:
    """As in AlphaFold's layout, the list is next to the folder of structures."""
    folder = tmp_path / "mmcif_files"
    chain = random_chain("A", OTHER)
    for name in ("2new", "3old", "4gone"):
        put(folder, f"{name}.cif", chain)
    lines = ["    LIST OF OBSOLETE COORDINATE ENTRIES", "OBSLTE    26-SEP-06 1OLD     2NEW 9NEW"]
    lines += ["OBSLTE    31-JUL-94 3OLD     2NEW", "OBSLTE    06-NOV-19 4GONE"]
    hits = [hit(f"{name}_A") for name in ("1old", "3old", "4gone")]
    assert [outcome.used for outcome in templates_from_hits(QUERY, hits, Library(folder))[1]] == [False, True, True]
    (tmp_path / "obsolete.dat").write_text("\n".join(lines) + "\n")
    library = Library(folder)
    templates, outcomes = templates_from_hits(QUERY, hits, library)
    assert templates is not None
    assert templates.names == ("2new_A", "3old_A")
    assert [outcome.note for outcome in outcomes] == [
        "of 2new, which replaced 1old",
        "",
        "its entry was removed from the PDB",
    ]
    assert "is of the query's own entry" in refusal(templates_from_hits(QUERY, hits[:1], library, exclude=["2new"]))


def test_refusals_are_counted_by_kind(tmp_path: Path) -> None:
    put(tmp_path, "1abc.cif", random_chain("A", OTHER))
    put(tmp_path, "2abc.cif", with_jump(400.0))
    put(tmp_path, "3abc.cif", with_jump(500.0))
    hits = [hit(name) for name in ("7not_A", "8not_A", "9not_A", "1abc_A", "2abc_A", "3abc_A")]
    _, outcomes = templates_from_hits(QUERY, hits, Library(tmp_path), max_date=day(2000, 1, 1))
    assert [outcome.missing for outcome in outcomes] == [True] * 3 + [False] * 3
    assert count_refusals(outcomes) == {
        "has no N.cif or N.cif.gz. Add it, or do without.": 3,
        "released N, after N": 3,
    }
    _, outcomes = templates_from_hits(QUERY, hits, Library(tmp_path))
    assert list(count_refusals(outcomes).values()) == [3, 2]


def test_one_bad_file_leaves_the_others_be(tmp_path: Path) -> None:
    put(tmp_path, "1abc.cif", random_chain("A", OTHER))
    (tmp_path / "2cut.cif").write_text(put(tmp_path, "x.cif", random_chain("A", OTHER)).read_text()[:3000])
    (tmp_path / "3bad.cif.gz").write_bytes(b"\x1f\x8b rubbish")
    (tmp_path / "4non.cif").write_text("data_4non\n_entry.id 4non\n")
    hits = [hit(name) for name in ("2cut_A", "3bad_A", "4non_A", "5not_A", "../x_A", "1abc_A")]
    templates, outcomes = templates_from_hits(QUERY, hits, Library(tmp_path), max_date=day(2020, 1, 1))
    assert one((templates, outcomes)).names == ("1abc_A",)
    assert [outcome.used for outcome in outcomes] == [False] * 5 + [True]
    for outcome, reason in zip(outcomes, ("2cut", "gzip stream", "no atoms", "has no 5not.cif", "has no ../x.cif")):
        assert reason in outcome.note
        assert "\n" not in outcome.note


def test_the_best_come_first_and_no_more_than_the_limit(tmp_path: Path) -> None:
    put(tmp_path, "1abc.cif", *(random_chain(name, OTHER, seed) for seed, name in enumerate("ABCD")))
    hits = [hit(f"1abc_{name}", sum_probs=probs) for name, probs in zip("ABCD", (5.0, 30.0, 5.0, 40.5))]
    templates, outcomes = templates_from_hits(QUERY, hits, Library(tmp_path), limit=3)
    assert templates is not None
    assert templates.names == ("1abc_D", "1abc_B", "1abc_A")
    assert templates.sum_probs.tolist() == [40.5, 30.0, 5.0]
    assert [outcome.note for outcome in outcomes if not outcome.used] == ["enough better templates are used"]


def test_copies_of_a_chain_count_once_for_hmmsearch(tmp_path: Path) -> None:
    put(tmp_path, "1abc.cif", *(random_chain(name, OTHER, seed) for seed, name in enumerate("AB")))
    copies = [hit(f"1abc_{name}", sum_probs=None) for name in "ABA"]
    templates, outcomes = templates_from_hits(QUERY, copies, Library(tmp_path))
    assert one((templates, [o for o in outcomes if o.used])).names == ("1abc_A",)
    assert [outcome.note for outcome in outcomes] == ["", *["has the same aligned residues as 1abc_A"] * 2]
    shifted = replace(copies[1], query_index=copies[1].query_index + 1)
    both, _ = templates_from_hits(QUERY, [copies[0], shifted], Library(tmp_path))
    assert both is not None
    assert len(both) == 2


def assert_outcome(outcome: TemplateOutcome, **expected: object) -> None:
    refused = {"used": False, "note": "", "residues": 0, "identity": 0.0, "sum_probs": None, "missing": False}
    assert vars(outcome) == refused | {"chains": ()} | expected


def test_outcomes_in_whole(tmp_path: Path) -> None:
    put(tmp_path, "1abc.cif", random_chain("A", QUERY[:20] + OTHER[20:], missing=[11]))
    hits = [
        hit("1abc_A", QUERY[:20] + OTHER[20:40], 0, query_index=np.arange(10, 40), hit_index=np.arange(10, 40)),
        hit("2non_B", sum_probs=None),
        hit("1abc_A", QUERY[:10], 0, query_index=np.arange(10), hit_index=np.arange(10), sum_probs=0.5),
    ]
    templates, outcomes = templates_from_hits(QUERY, hits, Library(tmp_path))
    assert templates is not None
    assert templates.sum_probs.tolist() == [20.0, 0.5]
    same = 10 + sum(QUERY[n] == OTHER[n] for n in range(20, 40))
    used = {"name": "1abc_A", "used": True, "note": ""}
    assert_outcome(outcomes[0], **used, residues=29, identity=round(same / 30, 4), sum_probs=20.0)
    assert_outcome(outcomes[1], **used, residues=10, identity=1.0, sum_probs=0.5)
    assert outcomes[2].note.endswith("has no 2non.cif or 2non.cif.gz. Add it, or do without.")
    assert_outcome(outcomes[2], name="2non_B", note=outcomes[2].note, missing=True)
    assert count_refusals([*outcomes, outcomes[2]]) == {"has no N.cif or N.cif.gz. Add it, or do without.": 2}


def test_hits_without_probabilities_keep_the_order_of_the_file(tmp_path: Path) -> None:
    names = ("1abc", "2abc", "3abc")
    for n, name in enumerate(names):
        put(tmp_path, f"{name}.cif", random_chain("A", OTHER, n))
    pieces = [(n, {"query_index": np.arange(n, n + 20), "hit_index": np.arange(20)}) for n in range(3)]
    hits = [hit(f"{name}_A", sum_probs=None, **piece) for name, (_, piece) in zip(names, pieces)]
    hits += [hit(f"{name}_A", sum_probs=probs) for name, probs in (("3abc", 2.0**-12), ("2abc", 1.0))]
    templates, _ = templates_from_hits(QUERY, hits, Library(tmp_path))
    assert templates is not None
    assert templates.names == ("2abc_A", "3abc_A", "1abc_A", "2abc_A", "3abc_A")
    assert templates.sum_probs.tolist() == [1.0, 2.0**-12, 0.0, 0.0, 0.0]


def test_at_most_twenty_templates_are_made(tmp_path: Path) -> None:
    put(tmp_path, "1abc.cif", random_chain("A", OTHER))
    templates, outcomes = templates_from_hits(QUERY, [hit()] * 21, Library(tmp_path))
    assert templates is not None
    assert len(templates) == 20
    assert_outcome(outcomes[20], name="1abc_A", note="enough better templates are used", sum_probs=20.0)
    shortest = hit(sequence=OTHER[10:20], query_index=np.arange(10), hit_index=np.arange(10))
    assert one(templates_from_hits(QUERY, [shortest], Library(tmp_path)))


def test_exact_fractions_of_long_queries(tmp_path: Path) -> None:
    """More than a tenth must be aligned. A hit of more than 95 % of the query is the query."""
    query, sequence = QUERY * 17, OTHER * 2
    put(tmp_path, "1abc.cif", random_chain("A", sequence), random_chain("B", (QUERY + OTHER)[:110]))
    for columns, is_used in ((102, False), (103, True)):
        index = np.arange(columns)
        long = replace(hit(), sequence=sequence, start=0, query_index=index, hit_index=index)
        templates, (outcome,) = templates_from_hits(query, [long], Library(tmp_path))
        assert (templates is not None) is is_used
        note = f"aligns {columns} of the query's 1020 residues; more than a tenth is needed"
        assert outcome.note == ("" if is_used else note)
    query = (QUERY + OTHER)[:100]
    for length, is_used in ((95, True), (96, False)):
        index = np.arange(length)
        itself = replace(hit("1abc_B"), sequence=query[:length], start=0, query_index=index, hit_index=index)
        templates, (outcome,) = templates_from_hits(query, [itself], Library(tmp_path))
        assert (templates is not None) is is_used
        assert outcome.note == ("" if is_used else f"is the query itself ({length} of its 100 residues)")


def replaced(sequence: str, count: int) -> str:
    """Replace `count` letters at equal distances by W, or W by A."""
    at = set(np.linspace(2, len(sequence) - 3, count).astype(int).tolist())
    return "".join(letter if n not in at else "A" if letter == "W" else "W" for n, letter in enumerate(sequence))


HIT = OTHER[10:60]


@pytest.mark.parametrize(
    ("chains", "name", "used"),
    [
        ({"A": replaced(HIT, 5)}, "1abc_A", "A, 90%"),
        ({"A": replaced(HIT, 6)}, "1abc_A", "chain A has another sequence than the hit: 100% aligned, 88% identical"),
        ({"A": HIT[:45]}, "1abc_A", "A, 100%"),
        ({"A": HIT[:44]}, "1abc_A", "chain A has another sequence than the hit: 88% aligned, 100% identical"),
        # If the hit names none of several chains, the chain with the most identical residues is used.
        ({"A": HIT[:45], "B": replaced(HIT, 3), "C": replaced(HIT, 4)}, "1abc_Z", "B, 94%"),
        ({"A": replaced(HIT, 8), "B": HIT[:46], "C": HIT[:47]}, "1abc", "C, 100%"),
        ({"A": HIT[:46], "B": "GS" + HIT[:46]}, "1abc_Z", "A, 100%"),
        ({"A": HIT[:30], "B": replaced(HIT, 3)}, "1abc_A", "chain A has another sequence than the hit: 60% aligned"),
    ],
)
def test_a_chain_with_nine_of_ten_residues_is_used(
    tmp_path: Path, chains: dict[str, str], name: str, used: str
) -> None:
    put(tmp_path, "1abc.cif", *(random_chain(id, sequence) for id, sequence in chains.items()))
    templates, (outcome,) = templates_from_hits(QUERY, [hit(name)], Library(tmp_path))
    if templates is not None:
        assert outcome.note == f"realigned to chain {used} identical"
        assert outcome.name == f"1abc_{used[0]}"
    else:
        assert outcome.note.startswith(f"1abc: {used}")
        assert outcome.note.endswith(" identical (90% are needed). Fetch the current file of the entry.")


def test_five_atoms_make_a_template(tmp_path: Path) -> None:
    chain = random_chain("A", OTHER)
    few = replace(chain, mask=np.zeros_like(chain.mask))
    n, ca, c = (ATOM_ORDER[name] for name in ("N", "CA", "C"))
    few.mask[20, [n, ca, c]] = few.mask[21, [n, ca]] = 1
    put(tmp_path, "1abc.cif", replace(few, positions=chain.positions * few.mask[..., None]))
    template, outcome = template_from_file(OTHER, tmp_path / "1abc.cif")
    assert (template.mask.sum(), outcome.residues) == (5, 2)
    few.mask[21, n] = 0
    path = put(tmp_path, "2abc.cif", replace(few, positions=chain.positions * few.mask[..., None]))
    with pytest.raises(UserError) as error:
        template_from_file(OTHER, path)
    assert str(error.value) == (
        f"{path}: 2abc_A: 80 of its residues are aligned, with fewer than 5 atoms. Choose another template."
    )


# ---- the library


@pytest.mark.parametrize(
    "name", ["1abc.cif", "1ABC.cif.gz", "ab/1abc.cif.gz", "divided/ab/1abc.cif", "x/y/1Abc.CIF", "1abc.mmcif"]
)
def test_any_layout(tmp_path: Path, name: str) -> None:
    path = put(tmp_path, name, random_chain("A", OTHER))
    put(tmp_path, "zz/other.cif", random_chain("A", QUERY))
    assert Library(tmp_path).find("1aBc") == path
    assert Library(tmp_path).read("1abc").chains["A"].sequence == OTHER
    with pytest.raises(UserError, match=r"has no 2abc\.cif"):
        Library(tmp_path).find("2abc")
    with pytest.raises(UserError, match="is not a folder"):
        Library(tmp_path / "nowhere")


def test_a_file_is_read_once(tmp_path: Path) -> None:
    paths = [put(tmp_path, f"{i}abc.cif", random_chain("A", OTHER, i)) for i in range(3)]
    library = Library(tmp_path, keep=2)
    first, second = library.read("0abc"), library.read("1abc")
    for path in paths[:2]:
        path.unlink()
    assert library.read("0abc") is first
    library.read("2abc")  # the least recently used one is removed
    assert library.read("0abc") is first
    with pytest.raises(UserError, match=r"has no 1abc\.cif"):
        library.read("1abc")
    assert second.chains["A"].sequence == OTHER


def test_a_library_goes_to_another_process_without_what_it_read(tmp_path: Path) -> None:
    put(tmp_path, "x/y/1abc.cif", random_chain("A", OTHER))
    library = Library(tmp_path)
    assert library.release_date("1abc") == day(2010, 5, 1)
    library.read("1abc")
    message = bytes(ForkingPickler.dumps(library))
    assert len(message) < 1000
    assert ForkingPickler.loads(message).read("1abc").id == "1abc"


@pytest.mark.skipif(not REALDATA.is_dir(), reason="../shared/realdata is not here")
def test_the_date_alone_is_the_date_of_the_whole_file() -> None:
    files = sorted((REALDATA / "mmcif").glob("*.cif.gz"))[::6]
    assert [read_release_date(file) for file in files] == [read_structure(file).release_date for file in files]


# ---- files of the user


def test_a_file_of_any_name_and_format(tmp_path: Path) -> None:
    chain = random_chain("A", OTHER[:60])
    mmcif = put(tmp_path, "my model (final).cif", chain, date=None)
    pdb = tmp_path / "old.pdb"
    pdb.write_text(write_pdb("old", [chain]))
    for path, name in ((mmcif, "my model (final)_A"), (pdb, "old_A")):
        template, outcome = template_from_file(OTHER[:60], path)
        assert_on(template, chain, np.arange(60), np.arange(60))
        assert (outcome.name, outcome.used, outcome.identity, outcome.residues) == (name, True, 1.0, 60)


def test_the_best_chain_is_taken_and_said(tmp_path: Path) -> None:
    unseen, seen = random_chain("B", QUERY, missing=range(5, 60)), random_chain("C", QUERY[:50], 2)
    path = put(tmp_path, "x.cif", random_chain("A", OTHER, 1), unseen, seen)
    template, outcome = template_from_file(QUERY, path)
    assert template.names == ("x_C",)
    assert outcome.note == "chain C of A, B, C"
    assert "doubtful" in template_from_file(QUERY, put(tmp_path, "y.cif", random_chain("A", OTHER[:60])))[1].note
    assert template_from_file(QUERY, path, "B")[1].residues == 5


def test_a_homolog_is_aligned_with_its_gaps(tmp_path: Path) -> None:
    # A similar residue at every third position, one loop inserted, one removed.
    similar = str.maketrans("DEIVKRFYSTNQ", "EDVIRKYFTSQN")
    letters = [a.translate(similar) if i % 3 == 0 else a for i, a in enumerate(QUERY)]
    chain = random_chain("A", "GSHM" + "".join(letters[:25]) + "PGNGSP" + "".join(letters[25:40] + letters[46:]))
    template, outcome = template_from_file(QUERY, put(tmp_path, "x.cif", chain))
    places = np.concatenate([np.arange(4, 29), np.arange(35, 50), np.full(6, -1), np.arange(50, 64)])
    aligned = template.aatype[0] != GAP
    assert (aligned != (places >= 0)).sum() <= 2
    stands = np.abs(template.positions[0][aligned] - chain.positions[places[aligned]]).max(axis=(1, 2)) < 6e-4
    assert stands.mean() > 0.9
    assert outcome.identity > 0.6


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    seen = random_chain("A", OTHER)
    path = put(tmp_path, "x.cif", seen)
    with pytest.raises(UserError, match=r"x\.cif: has no protein chain Z. Choose from A"):
        template_from_file(QUERY, path, "Z")
    tail = put(tmp_path, "tail.cif", random_chain("A", QUERY + OTHER, missing=range(len(QUERY))))
    with pytest.raises(UserError, match=r"tail\.cif: .*with fewer than 5 atoms"):
        template_from_file(QUERY, tail)
    (tmp_path / "empty.cif").write_text("data_x\n_entry.id x\n")
    with pytest.raises(UserError, match="has no atoms"):
        template_from_file(QUERY, tmp_path / "empty.cif")
    with pytest.raises(UserError, match="no such file"):
        template_from_file(QUERY, tmp_path / "none.cif")


def test_the_first_of_equal_chains_is_taken(tmp_path: Path) -> None:
    template, _ = template_from_file(QUERY, put(tmp_path, "x.cif", *(random_chain(*one) for one in (
        ("A", QUERY[:50]), ("B", "GS" + QUERY[:50])
    ))))  # fmt: skip
    assert template.names == ("x_A",)
    shapes = [array.shape for array in (template.aatype, template.positions, template.mask, template.sum_probs)]
    assert shapes == [(1, 60), (1, 60, 37, 3), (1, 60, 37), (1,)]


def test_neighbours_may_be_150_angstrom_apart(tmp_path: Path) -> None:
    chain = random_chain("A", OTHER)
    positions = np.where(np.arange(80)[:, None, None] < 70, [1.0, 1, 1], [151.0, 1, 1]) * chain.mask[..., None]
    path = put(tmp_path, "x.cif", replace(chain, positions=positions.astype(np.float32)))
    assert template_from_file(OTHER, path)[1].used


def test_the_outcome_of_a_file_in_whole(tmp_path: Path) -> None:
    conserved = str.maketrans("DEIVKRFYSTNQ", "EDVIRKYFTSQN")
    query = "DEIVKRFYSTDEIVKRFYST"
    path = tmp_path / "noending"
    put(tmp_path, "x.cif", random_chain("A", query[:6] + query[6:].translate(conserved), missing=[0])).rename(path)
    template, outcome = template_from_file(query, str(path))
    assert (template.names, template.sum_probs.tolist()) == (("noending_A",), [20.0])
    assert_outcome(outcome, name="noending_A", used=True, residues=19, identity=0.3)
    path = put(
        tmp_path, "y.v2.cif.gz", random_chain("A", query[:5] + query[5:].translate(conserved)), random_chain("B", "GGG")
    )
    template, outcome = template_from_file(query, path)
    notes = "chain A of A, B; few residues are identical, so the alignment is doubtful"
    assert_outcome(outcome, name="y.v2_A", used=True, note=notes, residues=20, identity=0.25)
    assert template_from_file(query, path, "A")[1].note == "few residues are identical, so the alignment is doubtful"


def test_chains_and_residues_that_the_reader_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path, "x.cif", random_chain("A", OTHER), random_chain("B", OTHER))
    structure = replace(read_structure(path), dropped={"C": "is DNA"}, notes=("a note",))
    monkeypatch.setattr("warpfold.data.example.templates.read_structure", lambda _: structure)
    assert template_from_file(OTHER, path, "B")[1].note == "a note"
    for chain, problem in (("C", "chain C cannot be used (is DNA)"), ("D", "has no protein chain D")):
        with pytest.raises(UserError) as error:
            template_from_file(OTHER, path, chain)
        assert str(error.value) == f"{path}: {problem}. Choose from A, B."
    structure = replace(structure, unplaced=("ALA 12",))
    with pytest.raises(UserError, match=r"x\.cif: has residues with N, CA and C that are in no chain: 1 \(ALA 12\)"):
        template_from_file(OTHER, path)


# ---- two sequences


def test_identity_leaves_x_out() -> None:
    assert identity(np.array([0, 1, 2, -1]), "AXC", "ACDE") == 0.5
    assert identity(np.array([-1]), "A", "A") == 0.0


def test_homologs_are_aligned_by_likeness_and_versions_by_identity() -> None:
    assert column_map("GSWWDEIKLMKWW", "WWEDVRIMRWW", homologs=True)[0].tolist() == [*range(2, 13)]
    placed, share = column_map(QUERY, QUERY[:20] + QUERY[24:])
    assert (placed.tolist(), share) == ([*range(20), *range(24, 60)], 1.0)


@pytest.mark.skipif(not REALDATA.is_dir(), reason="../shared/realdata is not here")
def test_real_homologs_are_aligned_as_hhsearch_does() -> None:
    query = "".join((REALDATA / "msas/1a00_A/query.fasta").read_text().split("\n")[1:])
    agreement = []
    for hit in read_hits(REALDATA / "templates/1a00_A/pdb70_hits.hhr.gz", query)[:120:12]:
        column, _ = column_map(hit.sequence, query, homologs=True)
        agreement.append((column[hit.query_index] == hit.hit_index).mean())
    assert np.mean(agreement) > 0.8


# ---- what the model sees


def test_features_fit_the_table() -> None:
    for templates in (random_templates(5, 12), random_templates(0, 12), None):
        features = template_features(templates, 12)
        assert set(features) == {name for name in FEATURES if name.startswith("template_")}
        assert {name: str(array.dtype) for name, array in features.items()} == {n: FEATURES[n].dtype for n in features}
        to_tensors(features)
    with pytest.raises(ValueError, match="templates of 12 residues for an example of 11"):
        template_features(random_templates(5, 12), 11)


def test_chosen_templates_keep_their_order_and_their_names() -> None:
    templates = random_templates(5, 12)
    chosen = templates.choose(np.array([4, 1]))
    assert chosen.names == ("4abc_A", "1abc_A")
    assert np.array_equal(chosen.positions, templates.positions[[4, 1]])
    assert np.array_equal(chosen.sum_probs, templates.sum_probs[[4, 1]])
    again = concatenate_templates([templates.choose(np.array([i])) for i in range(5)])
    assert again is not None
    assert np.array_equal(again.mask, templates.mask)
    assert concatenate_templates([]) is None


def test_the_pseudo_beta_is_of_the_templates_own_residue() -> None:
    templates = random_templates(9, 12)
    features = template_features(templates, 12)
    glycine = templates.aatype == RESTYPES.index("G")
    assert glycine.any()
    for is_glycine, atom in ((True, "CA"), (False, "CB")):
        here = glycine == is_glycine
        place = ATOM_ORDER[atom]
        assert np.array_equal(features["template_pseudo_beta"][here], templates.positions[here][:, place])
        assert np.array_equal(features["template_pseudo_beta_mask"][here], templates.mask[here][:, place])


def test_choice_at_training_is_that_of_the_paper() -> None:
    """Draw k = min(uniform[0, n], 4) of the best 20, each equally likely (Supp. 1.2.3)."""
    rng = np.random.default_rng(0)
    draws = [choose_templates(30, 4, rng) for _ in range(6000)]
    sizes = np.bincount([len(draw) for draw in draws], minlength=5) / 6000
    assert np.abs(sizes - np.array([1, 1, 1, 1, 17]) / 21).max() < 0.02
    counts = np.bincount(np.concatenate(draws), minlength=30)
    assert not counts[20:].any()
    assert np.abs(counts[:20] / counts.sum() - 0.05).max() < 0.006
    assert all((np.diff(draw) > 0).all() for draw in draws)
    assert {len(choose_templates(0, 4, rng)) for _ in range(5)} == {0}


# ---- real files


@pytest.mark.skipif(not REALDATA.is_dir(), reason="../shared/realdata is not here")
def test_atoms_are_those_of_the_official_pipeline_to_the_bit() -> None:
    """Compare residue types, masks and coordinates of every available template with its features of the same .hhr."""
    with np.load(REALDATA / "features/openfold_alphafold_feature_dict.npz", allow_pickle=False) as file:
        official = {name: file[name] for name in file.files if name.startswith("template_") or name == "sequence"}
    query = official["sequence"][0].decode()
    hits = read_hits(REALDATA / "templates/openfold_test73/pdb70_hits.hhr", query)
    templates, outcomes = templates_from_hits(query, hits, Library(REALDATA / "mmcif"))
    assert templates is not None
    assert [o.name for o in outcomes if not o.used] == ["1HF9_B", "5KC1_F", "5KC1_J"]  # missing; unresolved in both
    names = [name.decode() for name in official["template_domain_names"]]
    wanted = [names.index(name) for name in templates.names]
    assert len(wanted) == 7
    assert [decode(row) for row in templates.aatype] == [official["template_sequence"][i].decode() for i in wanted]
    assert np.array_equal(templates.mask, official["template_all_atom_masks"][wanted])
    assert np.array_equal(templates.positions, official["template_all_atom_positions"][wanted])


@pytest.mark.skipif(not REALDATA.is_dir(), reason="../shared/realdata is not here")
def test_a_real_chain_is_its_own_template() -> None:
    path = REALDATA / "mmcif" / "2crb.cif.gz"
    chain = read_structure(path).chains["A"]
    template, outcome = template_from_file(chain.sequence, path, "A")
    assert np.array_equal(template.positions[0], chain.positions)
    assert np.array_equal(template.mask[0], chain.mask)
    assert outcome.identity == 1.0
