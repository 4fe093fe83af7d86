"""Test --keep: numbers, the best predictions, and expressions, which are parsed and never executed."""

import itertools
from typing import Any

import pytest

from warpfold.errors import UserError
from warpfold.scoring.selection import MORE_IS_BETTER, NUMBERS, OF_COMPLEXES, Selection, Shortlist, keep_of

EXAMPLE = '"ipsae > 0.6 and rmsd < 2"'
COLUMNS = (
    "mean_plddt, ptm, iptm, ranking_confidence, pair_iptm, ipsae, ipsae_ab, ipsae_ba, ipsae15, pdockq, pdockq2, lis, "
    "pae_interaction, interface_pae, interface_plddt, binder_plddt, contacts, clashes, rmsd, binder_rmsd, target_rmsd"
)


def row(name: str = "q", **known: Any) -> dict[str, Any]:
    return dict.fromkeys(NUMBERS) | {"name": name, "model": "m", "seed": 0} | known


@pytest.mark.parametrize(
    ("text", "known", "kept"),
    [
        ("ipsae > 0.6 and rmsd < 2", {"ipsae": 0.7, "rmsd": 1.0}, True),
        ("ipsae > 0.6 and rmsd < 2", {"ipsae": 0.6, "rmsd": 1.0}, False),
        ("ipsae > 0.6 and rmsd < 2", {"ipsae": 0.7}, False),  # the RMSD is not known
        ("ipsae > 0.6 or rmsd < 2", {"ipsae": 0.7}, True),
        ("ipsae > 0.6 or rmsd < 2", {"ipsae": 0.5}, False),
        ("not rmsd >= 2", {"rmsd": 1.0}, True),
        ("not rmsd >= 2", {}, False),
        ("0.5 < ipsae <= 0.7", {"ipsae": 0.7}, True),
        ("0.5 < ipsae <= 0.7", {"ipsae": 0.71}, False),
        ("clashes == 0 and (iptm > .5 or mean_plddt > 80)", {"clashes": 0, "iptm": 0.4, "mean_plddt": 81}, True),
        ("ipsae_ab >= ipsae_ba", {"ipsae_ab": 0.5, "ipsae_ba": 0.4}, True),
        ("rmsd > -1 and clashes != 2", {"rmsd": 0.0, "clashes": 3}, True),
        ("rmsd > -1", {"rmsd": -1.5}, False),
        ("-1 <= rmsd", {"rmsd": -1.0}, True),
        ("length == 7 or seed == 1", {"length": 7}, True),
        ("ipsae > rmsd", {"ipsae": 0.7}, False),  # the RMSD is not known
    ],
)
def test_expressions(text: str, known: dict[str, Any], kept: bool) -> None:
    selection = keep_of(text)
    assert isinstance(selection, Selection)
    assert selection.chosen([row(**known), row()]) == ({0} if kept else set())
    assert Shortlist(selection).wants(row(**known)) == kept


@pytest.mark.parametrize("operator", ["and", "or"])
def test_unknown_scores_are_neither_true_nor_false(operator: str) -> None:
    """Compare with Kleene logic, in which `and` is a minimum and `or` a maximum."""
    truths = {0.2: 0, None: 1, 0.8: 2}
    for values in itertools.product(truths, repeat=2):
        known = dict(zip(("ipsae", "iptm"), values))
        truth = (min if operator == "and" else max)(truths[value] for value in values)
        text = f"ipsae > 0.5 {operator} iptm > 0.5"
        assert Selection(text).chosen([row(**known)]) == ({0} if truth == 2 else set())
        assert Selection(f"not ({text})").chosen([row(**known)]) == ({0} if truth == 0 else set())


def test_numbers_are_of_each_query() -> None:
    assert [keep_of(one) for one in (None, 1, 3, "3", " 3 ", "007")] == [None, 1, 3, 3, 3, 7]


@pytest.mark.parametrize(
    ("text", "expected", "scores"),
    [
        ("best:100", Selection("best:100", 100, None), []),
        (" best:2:rmsd ", Selection("best:2:rmsd", 2, "rmsd"), ["rmsd"]),
        ("ipsae  > 0.6 and\trmsd < 2", Selection("ipsae > 0.6 and rmsd < 2"), ["ipsae", "rmsd"]),
    ],
)
def test_selections_name_the_scores_that_they_read(text: str, expected: Selection, scores: list[str]) -> None:
    assert keep_of(text) == expected
    assert expected.scores == scores


COUNT = f"write a number, best:100, best:100:ipsae, or {EXAMPLE}"
WRITE = f"Write comparisons with and, or, not: {EXAMPLE}"
REFUSED: list[tuple[Any, str]] = [
    *((given, COUNT) for given in (0, -1, True, False, 0.5, "", "best:", "best:0", "best:x", "best:3:")),
    ("best:3:foo", f"unknown score foo. Use one of {COLUMNS}"),
    ("best:3:length", f"unknown score length. Use one of {COLUMNS}"),
    ("best:3:ipsae:", f"unknown score ipsae:. Use one of {COLUMNS}"),
    ("ipsae > foo", f"unknown column foo. Use one of {COLUMNS}, length, seed"),
    ("0", f"0 is not a comparison. {WRITE}"),
    ("1234567890", f"1234567890 is not a comparison. {WRITE}"),
    ("ipsae >", f"not an expression. {WRITE}"),
    ("ipsae", f"ipsae is not a comparison. {WRITE}"),
    ("~(ipsae > 1)", f"~(ipsae > 1) is not a comparison. {WRITE}"),
    ("ipsae > 1 or open(1)", f"open(1) is not a comparison. {WRITE}"),
    ("1 < 2", f"1 < 2 does not compare a score with a number. {WRITE}"),
    ("ipsae in rmsd", f"ipsae in rmsd does not compare a score with a number. {WRITE}"),
    ("1 < ipsae is rmsd", f"1 < ipsae is rmsd does not compare a score with a number. {WRITE}"),
    ("ipsae > True", f"True is neither a column nor a number. {WRITE}"),
    ("ipsae > 'a'", f"'a' is neither a column nor a number. {WRITE}"),
    ("ipsae > +1", f"+1 is neither a column nor a number. {WRITE}"),
    ("ipsae > -rmsd", f"rmsd is neither a column nor a number. {WRITE}"),
    # 80 and 81 characters
    (f"ipsae > 0.{68 * '6'} >", f"not an expression. {WRITE}"),
    (f"ipsae > 0.{69 * '6'} >", f"not an expression. {WRITE}"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_is_no_selection_is_refused(given: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        keep_of(given)
    # Expressions of more than 80 characters are shortened.
    shown = f"{given[:77]}..." if len(str(given)) > 80 else given
    assert str(error.value) == f"--keep {shown}: {message}"


def test_expressions_have_at_most_1000_characters() -> None:
    text = "ipsae > 0." + 990 * "6"
    assert keep_of(text) == Selection(text)
    with pytest.raises(UserError, match="not an expression"):
        keep_of(f"{text}6")


def test_errors_rmsds_and_clashes_are_better_if_lower() -> None:
    lower = {"pae_interaction", "interface_pae", "clashes", "rmsd", "binder_rmsd", "target_rmsd"}
    for score in MORE_IS_BETTER:
        rows = [row("a", **{score: 2}), row("b", **{score: 3}), row("c")]
        assert Selection("", 1, score).chosen(rows) == ({0} if score in lower else {1})
        assert Selection("", 2, score).chosen(rows) == {0, 1}
    alone = {"mean_plddt", "ptm", "ranking_confidence", "rmsd", "binder_rmsd", "target_rmsd"}
    assert [name for name in COLUMNS.split(", ") if name not in alone] == OF_COMPLEXES


def test_the_best_are_sorted_as_the_score_is_meant() -> None:
    rows = [row("a", ipsae=0.5, rmsd=4.0), row("b", ipsae=0.9, rmsd=9.0), row("c"), row("d", ipsae=0.7, rmsd=1.0)]
    assert Selection("", 2, "ipsae").chosen(rows) == {1, 3}
    assert Selection("", 2, "rmsd").chosen(rows) == {0, 3}
    assert Selection("", 9, "rmsd").chosen(rows) == {0, 1, 2, 3}
    alike = [row(name, ipsae=0.5) for name in "cab"]
    # Ties are decided by name, in any order of the rows.
    assert Selection("", 2, "ipsae").chosen(alike) == {1, 2}
    # Then by model, and then by seed.
    for value in (0.5, None):
        same = [row(ipsae=value, model=model, seed=seed) for model, seed in (("b", 1), ("a", 2), ("a", 1), (None, 3))]
        assert [Selection("", count, "ipsae").chosen(same) for count in (1, 2, 3)] == [{3}, {2, 3}, {1, 2, 3}]


def test_a_shortlist_holds_what_may_be_among_the_best_of_all() -> None:
    best = Shortlist(Selection("", 2, "ipsae"))
    beaten = []
    for number, value in enumerate([0.1, 0.5, None, 0.3, 0.2, 0.9]):
        one = row(f"q{number}", ipsae=value)
        if best.wants(one):
            beaten += best.add(one, number)
    assert beaten == [0, 3]
    # A second prediction with the key of the last candidate is none.
    assert [best.wants(row("q1", ipsae=0.5)), best.wants(row("q0", ipsae=0.5))] == [False, True]


def test_a_shortlist_of_matches_displaces_none() -> None:
    matching = Shortlist(Selection("ipsae > 0.6"))
    assert [matching.wants(row(ipsae=value)) for value in (0.7, 0.6, None)] == [True, False, False]
    assert [matching.add(row(ipsae=value), value) for value in (0.7, 0.8)] == [[], []]
