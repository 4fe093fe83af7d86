"""Test --keep: numbers, the best predictions, and expressions, which are parsed and never executed."""

from typing import Any

import pytest

from warpfold.scoring.selection import NUMBERS, Selection, Shortlist, keep_of


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
    ],
)
def test_expressions(text: str, known: dict[str, Any], kept: bool) -> None:
    selection = keep_of(text)
    assert isinstance(selection, Selection)
    assert selection.chosen([row(**known), row()]) == ({0} if kept else set())
    assert Shortlist(selection).wants(row(**known)) == kept


def test_numbers_are_of_each_query() -> None:
    assert [keep_of(one) for one in (None, 3, "3", " 3 ")] == [None, 3, 3, 3]


def test_the_best_are_sorted_as_the_score_is_meant() -> None:
    rows = [row("a", ipsae=0.5, rmsd=4.0), row("b", ipsae=0.9, rmsd=9.0), row("c"), row("d", ipsae=0.7, rmsd=1.0)]
    assert Selection("", 2, "ipsae").chosen(rows) == {1, 3}
    assert Selection("", 2, "rmsd").chosen(rows) == {0, 3}
    assert Selection("", 9, "rmsd").chosen(rows) == {0, 1, 2, 3}
    alike = [row(name, ipsae=0.5) for name in "cab"]
    # Ties are decided by name, in any order of the rows.
    assert Selection("", 2, "ipsae").chosen(alike) == {1, 2}


def test_a_shortlist_holds_what_may_be_among_the_best_of_all() -> None:
    best = Shortlist(Selection("", 2, "ipsae"))
    beaten = []
    for number, value in enumerate([0.1, 0.5, None, 0.3, 0.2, 0.9]):
        one = row(f"q{number}", ipsae=value)
        if best.wants(one):
            beaten += best.add(one, number)
    assert beaten == [0, 3]
