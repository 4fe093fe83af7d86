"""Alignments that Boltz has processed: what they mean, and that nothing in an archive or beside it is executed."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.pack.pack_inputs import ONE, TWO, chain, structure
from warpfold.data.example.pairing import species_of
from warpfold.data.formats.alignment import Alignment, parse_a3m, parse_alignment, read_alignment
from warpfold.data.formats.input_files import InputFile, read_query
from warpfold.data.pack.pack import pack
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import read_example
from warpfold.data.structure.mmcif import parse_structure
from warpfold.errors import UserError
from warpfold.geometry.residue import GAP

TOKENS = {"-": 1} | {letter: 2 + i for i, letter in enumerate("ARNDCQEGHILKMFPSTWYVX")}
A3M = f">q\n{ONE}\n>a\n{ONE[:9]}aac{ONE[9:20]}{'-' * 10}\n>b\nw{'-' * 5}X{ONE[6:]}\n"


def processed(alignment: Alignment, taxa: list[int], path: Path | None = None, **changed: Any) -> bytes:
    """What Boltz writes of an alignment (its `MSA`): three tables, a row after the other."""
    token = np.array([*range(2, 23), TOKENS["-"]], np.int8)  # by our codes
    count, width = alignment.rows.shape
    per_row = (alignment.deletions > 0).sum(1)
    ends = per_row.cumsum()
    rows = [(i, taxa[i], i * width, (i + 1) * width, ends[i] - per_row[i], ends[i]) for i in range(count)]
    names = ("seq_idx", "taxonomy", "res_start", "res_end", "del_start", "del_end")
    arrays = {
        "sequences": np.array(rows, [(name, "i2" if name == "seq_idx" else "i4") for name in names]),
        "deletions": np.array(
            [(at, alignment.deletions[i, at]) for i, at in zip(*np.nonzero(alignment.deletions))],
            [("res_idx", "i2"), ("deletion", "i2")],
        ),
        "residues": token[alignment.rows].ravel().astype([("res_type", "i1")]),
    }
    file = io.BytesIO()
    np.savez_compressed(file, **(arrays | changed))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.getvalue())
    return file.getvalue()


def test_it_is_the_alignment_that_was_processed(tmp_path: Path) -> None:
    """Rows, deletions, organisms; by name, and with its query read for matching."""
    given = parse_a3m(A3M)
    path = tmp_path / "a.npz"
    processed(given, [-1, 9606, 10090], path)
    found = read_alignment(path, ONE)
    np.testing.assert_array_equal(found.rows, given.rows)
    np.testing.assert_array_equal(found.deletions, given.deletions)
    assert found.deletions.sum() == 4
    assert [species_of(name) for name in found.names] == [None, species_of("a TaxID=9606"), species_of("b TaxID=10090")]
    assert read_query(InputFile("a.npz", path)) == ONE
    with pytest.raises(UserError, match=r"a\.npz: its first row differs from the query"):
        read_alignment(path, ONE[:-1] + "W")


def test_pack_takes_them_by_their_queries(tmp_path: Path) -> None:
    structure(tmp_path / "structures/1one.cif", chain("A", ONE), chain("B", TWO))
    processed(parse_a3m(A3M), [-1, 9606, -1], tmp_path / "msas/0f3a.npz")
    np.savez(tmp_path / "msas/coordinates.npz", coord=np.zeros(3))
    report = pack([tmp_path / "structures"], [tmp_path / "msas"], tmp_path / "store")
    assert {entry.name: entry.alignments for entry in report.kept} == {"1one_A": ("msas/0f3a.npz",), "1one_B": ()}
    assert "msas/coordinates.npz: is no alignment of Boltz, or damaged" in report.unused["msas/coordinates.npz"]
    assert read_example(Store(tmp_path / "store"), "1one_A").depth == 3


class Trap:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return open, (str(self.path), "w")


def test_no_pickle_is_executed(tmp_path: Path) -> None:
    """Neither a pickle, as an alignment or a structure, nor objects in an archive, wherever they are in it."""
    trap = Trap(tmp_path / "executed")
    objects = np.array([trap], object)
    for arrays in ({"uniref90_hits": objects}, {"sequences": objects}):
        data = processed(parse_a3m(A3M), [-1, -1, -1], **arrays)
        with pytest.raises(UserError, match=r"m\.npz: \w+\.npy holds Python objects, .* would execute a pickle"):
            parse_alignment(data, "m.npz")
    for protocol in range(2, 6):
        data = b"\x80%ccio\nopen\n(V%b\nVw\ntR." % (protocol, bytes(trap.path))  # io.open(path, "w")
        for parse, cure in ((parse_alignment, "give these as plain text"), (parse_structure, "give mmCIF or PDB")):
            with pytest.raises(UserError, match=f"features.pkl: is a pickle, which may execute anything.*{cure}"):
                parse(data, "features.pkl")
    assert not trap.path.exists()


@pytest.mark.parametrize("what", ["cut short", "rows", "outside", "nucleic", "column", "no table", "query with a gap"])
def test_what_is_damaged_is_one_line(what: str) -> None:
    given, changed = parse_a3m(A3M), {}
    sequences = np.load(io.BytesIO(processed(given, [-1] * 3)), allow_pickle=False)["sequences"].copy()
    if what == "rows":
        sequences["res_end"][1] -= 1
    elif what == "outside":
        sequences["res_start"][2] += 1
        sequences["res_end"][2] += 1
    elif what == "nucleic":
        changed["residues"] = np.full(90, 28, np.int8).astype([("res_type", "i1")])
    elif what == "column":
        changed["deletions"] = np.array([(-1, 1)] * 2, [("res_idx", "i2"), ("deletion", "i2")])
    elif what == "no table":
        changed["residues"] = np.zeros(90, np.int8)
    elif what == "query with a gap":
        given.rows[0, 3] = GAP
    data = processed(given, [-1] * 3, **({"sequences": sequences} | changed))
    with pytest.raises(UserError, match=r"^m\.npz: [^\n]+\Z"):
        parse_alignment(data[:-40] if what == "cut short" else data, "m.npz")
