"""Test the rows of score tables and of designs, and the files that they are written to."""

import csv
import io
import sys
from dataclasses import asdict, fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.data.entries import random_chain
from warpfold.errors import UserError
from warpfold.scoring import score_table
from warpfold.scoring.interface import PairScore, rmsd_to_given
from warpfold.scoring.score_table import (
    COLUMNS,
    PAIR_COLUMNS,
    ScoreTables,
    check_tables,
    design_scores,
    pair_records,
    pair_rows,
    remove_tables,
    row_of,
)

LENGTHS = {"A": 10, "B": 30, "C": 5}
CHAINS = {name: random_chain(name, "A" * n, seed=n) for name, n in LENGTHS.items()}
PLDDT = {name: np.linspace(50, 60 + n, n) for name, n in LENGTHS.items()}
# The scores of the best interface that are in the row of a design, with values of more than four decimals.
OF_INTERFACE = (
    *("ipsae", "ipsae_ab", "ipsae_ba", "ipsae15", "pdockq", "pdockq2", "lis", "interface_pae", "interface_plddt"),
)


def pair(chains: str, **values: Any) -> PairScore:
    """Build the scores of two chains. By default, each score is a different number that depends on the chains."""
    names = [one.name for one in fields(PairScore) if one.name != "chains"]
    scores: dict[str, Any] = {name: ord(chains[1]) / 7 + k / 3 for k, name in enumerate(names)}
    return PairScore(chains=(chains[0], chains[1]), **scores | {"contacts": 1, "clashes": 0} | values)


def row(
    pairs: list[PairScore], fixed: tuple[str, ...] = (), given: dict[str, Any] | None = None, ids: str = "ABC"
) -> dict[str, Any]:
    return design_scores({id: CHAINS[id] for id in ids}, PLDDT, pairs, fixed, given)


def mean_plddt(ids: str) -> float:
    return round(float(np.mean([x for id in ids for x in PLDDT[id]])), 4)


def expected_row(best: PairScore, **values: Any) -> dict[str, Any]:
    scores = {name: getattr(best, name) for name in OF_INTERFACE} | {"pair_iptm": best.iptm}
    scores = {name: value if value is None else round(value, 4) for name, value in scores.items()}
    return scores | {"interface": ":".join(best.chains)} | values


def test_the_row_of_a_design_has_the_scores_of_its_best_interface() -> None:
    pairs = [
        pair("AB", ipsae=0.9, contacts=50, clashes=7, pae_interaction=1.0),
        pair("AC", ipsae=0.70004, contacts=9, clashes=1, pae_interaction=4.0),
        pair("BC", ipsae=0.3, contacts=20, clashes=90, pae_interaction=20.0),
    ]
    of_c = {"contacts": 29, "clashes": 91, "pae_interaction": 16.0, "binder_plddt": mean_plddt("C")}
    names = {"binder": "C", "target": "A:B"}
    expected = expected_row(pairs[1], **of_c, **names)
    assert row(pairs) == row(pairs, ("A", "B")) == row(pairs, ("A", "B", "C")) == row(pairs, ("Q",)) == expected
    assert expected["ipsae"] == 0.7
    # With chain A fixed, the binder consists of B and C.
    of_bc = {"contacts": 59, "clashes": 8, "pae_interaction": round(10 / 7, 4), "binder_plddt": mean_plddt("BC")}
    assert row(pairs, ("A",)) == expected_row(pairs[0], **of_bc, binder="B:C", target="A")
    # The RMSDs of the binder to a given complex are added.
    given = {id: random_chain(id, "A" * n, seed=n + 1) for id, n in LENGTHS.items()}
    rmsds = rmsd_to_given(CHAINS, given, ["A", "B"], ["C"])
    found = row(pairs, given=given)
    assert found == expected | {name: round(value or 0, 4) for name, value in rmsds.items()}
    assert len(found) == len(expected) + 3


def test_the_best_interface_has_the_highest_ipsae_and_then_the_most_contacts() -> None:
    for values, best in (
        ([(None, 3), (None, 5)], "BC"),
        ([(None, 5), (None, 5)], "AC"),
        ([(0.0, 9), (0.0005, 1)], "BC"),
        ([(0.4, 2), (0.4, 3)], "BC"),
        ([(0.5, 2), (0.4, 3)], "AC"),
    ):
        pairs = [pair("AB", ipsae=1.0)]
        pairs += [pair(ids, ipsae=ipsae, contacts=count) for ids, (ipsae, count) in zip(("AC", "BC"), values)]
        assert row(pairs)["interface"] == ":".join(best)


def test_without_aligned_errors_or_interfaces_the_row_is_shorter() -> None:
    pairs = [pair("AC", ipsae=None, pae_interaction=None), pair("BC", ipsae=None, pae_interaction=None, contacts=4)]
    expected = expected_row(pairs[1], binder="C", target="A:B", contacts=5, clashes=0, pae_interaction=None)
    assert row(pairs) == expected | {"binder_plddt": mean_plddt("C")}
    assert row([], ids="B") == row([], ("B",), ids="B") == {
        "binder": "B", "target": "", "binder_plddt": mean_plddt("B")
    }  # fmt: skip


def entry(name: str, seed: int, **more: Any) -> dict[str, Any]:
    """Build the entry of a prediction in summary.json."""
    return {"name": name, "model": "m", "seed": seed, "length": 45, "ptm": 0.5, "unlisted": 1} | more


FILES = {"folder": "out/d1", "files": {"mmcif": "d1.cif", "scores": "d1.json"}}


def test_rows_and_records_of_a_prediction() -> None:
    scores = {"binder": "C", "ipsae": 0.7, "ptm": 0.6, "other": 1}
    nothing = dict.fromkeys(COLUMNS)
    assert row_of(entry("d1", 3, scores=scores, **FILES)) == nothing | {
        "name": "d1", "model": "m", "seed": 3, "length": 45, "ptm": 0.6, "binder": "C", "ipsae": 0.7,
        "structure": "out/d1/d1.cif",
    }  # fmt: skip
    for files in ({}, {"folder": "x", "files": {}}, {"files": None}):
        plain = row_of(entry("d2", 0, **files))
        assert plain == nothing | {"name": "d2", "model": "m", "seed": 0, "length": 45, "ptm": 0.5}
        assert [*plain] == [*COLUMNS]
    assert row_of({}) == nothing
    pairs = [pair("AB", iptm=0.123456, ipsae=None), pair("AC")]
    records = pair_records(pairs)
    for record, one in zip(records, pairs, strict=True):
        values = {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(one).items()}
        assert record == values | {"chains": list(one.chains)}
    rows = pair_rows(entry("d1", 3, pair_scores=records))
    assert [[*one] for one in rows] == [[*PAIR_COLUMNS]] * 2
    for one, record in zip(rows, records, strict=True):
        names = {"name": "d1", "model": "m", "seed": 3}
        assert one == names | {"chain_a": "A", "chain_b": record["chains"][1]} | {
            name: value for name, value in record.items() if name != "chains"
        }
    assert pair_rows(entry("d1", 3)) == []
    assert pair_rows({"pair_scores": [{"chains": ["A", "B"], "lis": 1}]}) == [
        dict.fromkeys(PAIR_COLUMNS) | {"chain_a": "A", "chain_b": "B", "lis": 1}
    ]


ENTRIES = [entry(f"d{k}", k, pair_scores=pair_records([pair("AB"), pair("AC")])) for k in range(3)]


def text_of(columns: tuple[str, ...], rows: list[dict[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


SCORES_TEXT = text_of(COLUMNS, [row_of(one) for one in ENTRIES])
PAIRS_TEXT = text_of(PAIR_COLUMNS, [one for of in ENTRIES for one in pair_rows(of)])


@pytest.mark.parametrize("pairs", [False, True])
def test_tables_grow_row_by_row_or_are_rebuilt(tmp_path: Path, pairs: bool) -> None:
    tables = ScoreTables(tmp_path, pairs=True) if pairs else ScoreTables(tmp_path)
    names = ["scores.csv", "scores_pairs.csv"] if pairs else ["scores.csv"]
    texts = dict(zip(names, (SCORES_TEXT, PAIRS_TEXT)))
    assert tables.names == names
    for one in ENTRIES:
        tables.append(one)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == texts
    # A killed process leaves an incomplete line, and what precedes it stays.
    with open(tmp_path / "scores.csv", "ab") as file:
        file.write(b"d3,m,3,4")
    tables.append(ENTRIES[0])
    assert (tmp_path / "scores.csv").read_bytes() == SCORES_TEXT + SCORES_TEXT.splitlines(keepends=True)[1]
    assert tables.rebuild(iter(ENTRIES)) == tables.rebuild(ENTRIES, finished=False) == names
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == texts


@pytest.mark.parametrize(
    "left",
    [b"", b"n", b"name,model", SCORES_TEXT[:-1], SCORES_TEXT + 300 * b"x", SCORES_TEXT * 50, SCORES_TEXT * 50 + b"d3"],
)
def test_whatever_a_killed_process_left_of_a_table_is_completed(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "scores.csv").write_bytes(left)
    ScoreTables(tmp_path).append(ENTRIES[2])
    header, *_, last = SCORES_TEXT.splitlines(keepends=True)
    complete = left[: left.rfind(b"\n") + 1] or header
    assert (tmp_path / "scores.csv").read_bytes() == complete + last


def test_a_long_table_is_read_from_its_end(tmp_path: Path) -> None:
    long = SCORES_TEXT * 1000
    assert len(long) > 2 * (1 << 16)
    (tmp_path / "scores.csv").write_bytes(long + b"incomplete")
    ScoreTables(tmp_path).append(ENTRIES[2])
    assert (tmp_path / "scores.csv").read_bytes() == long + SCORES_TEXT.splitlines(keepends=True)[-1]


def test_a_finished_table_is_also_written_as_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace pyarrow, which need not be installed, by a module that writes its arguments."""
    pyarrow, parquet = ModuleType("pyarrow"), ModuleType("pyarrow.parquet")
    names: dict[str, Any] = {"string": "text", "float64": "float", "int64": "integer"}
    for name, value in names.items():
        setattr(pyarrow, name, lambda value=value: value)
    pyarrow.schema = lambda columns: columns  # type: ignore[attr-defined]
    pyarrow.Table = SimpleNamespace(from_pylist=lambda rows, schema: (rows, schema))  # type: ignore[attr-defined]
    written = []

    def write_table(table: Any, file: io.BytesIO) -> None:
        written.append(table)
        file.write(b"parquet")

    parquet.write_table = write_table  # type: ignore[attr-defined]
    pyarrow.parquet = parquet  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyarrow", pyarrow)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    tables = ScoreTables(tmp_path, pairs=True)
    assert tables.rebuild(ENTRIES) == ["scores.csv", "scores_pairs.csv"]
    assert written == []
    assert tables.rebuild(ENTRIES, finished=True) == ["scores.csv", "scores_pairs.csv", "scores.parquet"]
    assert (tmp_path / "scores.parquet").read_bytes() == b"parquet"
    ((rows, schema),) = written
    assert rows == [row_of(one) for one in ENTRIES]
    kinds = dict.fromkeys(COLUMNS, "float")
    kinds |= dict.fromkeys(("name", "model", "binder", "target", "interface", "structure"), "text")
    kinds |= dict.fromkeys(("seed", "length", "contacts", "clashes"), "integer")
    assert schema == [*kinds.items()]


def test_without_pyarrow_there_is_no_parquet_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert ScoreTables(tmp_path).rebuild(ENTRIES, finished=True) == ["scores.csv"]
    assert [path.name for path in tmp_path.iterdir()] == ["scores.csv"]


def test_files_of_somebody_else_are_neither_overwritten_nor_removed(tmp_path: Path) -> None:
    tables = ScoreTables(tmp_path, pairs=True)
    check_tables(tmp_path, tables, {})
    # A link to a file that does not exist is a file, too.
    (tmp_path / "scores_pairs.csv").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError) as error:
        check_tables(tmp_path, tables, {"tables": ["scores.csv"]})
    assert str(error.value) == (
        f"{tmp_path / 'scores_pairs.csv'}: not written by WarpFold, which writes a table of this name. Move the file"
    )
    check_tables(tmp_path, tables, {"tables": ["scores.csv", "scores_pairs.csv"]})
    check_tables(tmp_path, ScoreTables(tmp_path), {})
    check_tables(tmp_path, None, {})
    (tmp_path / "mine.csv").write_text("mine")
    (tmp_path / "scores.csv").write_text("name")
    remove_tables(tmp_path, ["scores_pairs.csv", "mine.csv", "scores.parquet"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.csv", "scores.csv"]


def test_a_table_that_cannot_be_written_is_an_error_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"scores\.csv: cannot be written"):
        ScoreTables(tmp_path / "nowhere").append(ENTRIES[0])
    (tmp_path / "scores.csv").mkdir()
    with pytest.raises(UserError, match=r"scores\.csv: cannot be written"):
        remove_tables(tmp_path, [score_table.SCORES])
