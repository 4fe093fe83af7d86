"""Find structures of entries in folders, under every name and through the list of obsolete entries, and cache them."""

from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

import pytest

from tests.data.entries import random_chain
from warpfold.data.structure import library as libraries
from warpfold.data.structure.chain import Structure
from warpfold.data.structure.library import Library, MissingStructure
from warpfold.data.structure.write import write_mmcif
from warpfold.errors import UserError
from warpfold.files import LARGEST


def put(folder: Path, *names: str) -> Library:
    """Create files, and a library of the folder."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return Library(folder)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Replace the readers. Returns a list that collects what is read: function, file name, limit."""
    calls: list[tuple[str, str, int]] = []

    def read(path: Path, limit: int = 0) -> Structure:
        calls.append(("structure", path.name, limit))
        if "bad" in path.name:
            raise UserError(f"{path.name}: is damaged")
        return Structure(path.name, None, None, None, {})

    def read_date(path: Path, limit: int = 0) -> date | None:
        calls.append(("date", path.name, limit))
        return None if "none" in path.name else date(2020, 1, 2)

    monkeypatch.setattr(libraries, "read_structure", read)
    monkeypatch.setattr(libraries, "read_release_date", read_date)
    return calls


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["1abc.cif"], "1abc.cif"),
        (["1ABC.cif.gz"], "1ABC.cif.gz"),
        (["pdb_00001abc.cif"], "pdb_00001abc.cif"),
        (["PDB_00001ABC.cif"], "PDB_00001ABC.cif"),
        (["1abc.mmcif"], "1abc.mmcif"),
        (["1ABC.MMCIF.GZ"], "1ABC.MMCIF.GZ"),
        (["ab/1abc.cif.gz"], "ab/1abc.cif.gz"),
        (["AB/1ABC.cif"], "AB/1ABC.cif"),
        (["some/where/1abc.cif"], "some/where/1abc.cif"),
        # A file is preferred to one in a subfolder, and a plain one to a packed one.
        (["1abc.cif.gz", "1abc.cif", "ab/1abc.cif"], "1abc.cif"),
        (["ab/1abc.cif", "1ABC.cif.gz"], "1ABC.cif.gz"),
        (["a/1abc.cif", "ab/1abc.cif"], "ab/1abc.cif"),
        (["a/1abc.cif", "ab/1abc.mmcif"], "a/1abc.cif"),
        # Other names are tried in the order of paths.
        (["z/1abc.mmcif", "b/1abc.mmcif", "c/1abc.mmcif"], "b/1abc.mmcif"),
        (["b/1abc.mmcif", "b/1ABC.mmcif"], "b/1ABC.mmcif"),
        (["1abc.pdb", "x1abc.cif", "1abc.cif.bak", "1abc", "2abc.cif", "1abcd.cif", "ab/"], None),
    ],
)
def test_an_entry_has_many_names(tmp_path: Path, names: Sequence[str], found: str | None) -> None:
    library = put(tmp_path, *(name for name in names if not name.endswith("/")))
    for spelling in ("1abc", "1ABC", "pdb_00001abc", "PDB_00001ABC"):
        assert library.has(spelling) == (found is not None)
        if found is not None:
            assert library.find(spelling) == tmp_path / found
        else:
            with pytest.raises(MissingStructure) as caught:
                library.find(spelling)
            assert str(caught.value) == f"{tmp_path}: has no 1abc.cif or 1abc.cif.gz. Add it, or do without."


def test_folders_are_walked_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def walk(top: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        folders = ["z", "b", "c"]
        yield str(top), folders, []
        for folder in folders:
            yield f"{top}/{folder}", [], ["1abc.mmcif"]

    monkeypatch.setattr(libraries.os, "walk", walk)
    assert Library(tmp_path).find("1abc") == tmp_path / "b/1abc.mmcif"


def test_ids_of_other_archives_and_several_folders(tmp_path: Path) -> None:
    put(tmp_path / "a", "deep/1abc.mmcif", "AF-P1-F1.cif")
    put(tmp_path / "b", "1abc.cif", "2abc.cif")
    library = Library(tmp_path / "a", str(tmp_path / "b"))
    assert library.find("1abc") == tmp_path / "a/deep/1abc.mmcif"
    assert library.find("2abc") == tmp_path / "b/2abc.cif"
    assert library.find("af-p1-f1") == library.find("AF-P1-F1") == tmp_path / "a/AF-P1-F1.cif"
    with pytest.raises(MissingStructure, match=rf"^{tmp_path}/a, {tmp_path}/b: has no 3abc\.cif or"):
        library.find("3abc")
    with pytest.raises(UserError) as caught:
        Library(tmp_path / "a", tmp_path / "c")
    assert str(caught.value) == f"{tmp_path}/c: is not a folder. Pass the folder of the templates' mmCIF files."


def test_obsolete_entries(tmp_path: Path) -> None:
    """The list in the folder counts before the list in its parent folder."""
    folder = tmp_path / "files"
    put(folder, "2new.cif", "3old.cif", "4gon.cif")
    (folder / "obsolete.dat").write_text(
        " LIST OF OBSOLETE COORDINATE ENTRIES\n"
        "OBSLTE    26-SEP-06 1OLD     2NEW 9NEW\n"
        "OBSLTE    31-JUL-94 3OLD     2NEW\n"
        "OBSLTE    06-NOV-19 4GON\n"
        "OBSLTE    06-NOV-19\n"
        "OTHER     06-NOV-19 2NEW    1OLD\n"
        "OBSLTE    1-JAN-20 7lost 8LOST\n"
        "OBSLTE    06-NOV-19 5GON\n"
    )
    (tmp_path / "obsolete.dat").write_text("OBSLTE    1-JAN-20 1OLD 3OLD\nOBSLTE    1-JAN-20 6OLD 2NEW\n")
    library = Library(folder)
    current = {"1old": "2new", "2new": "2new", "3old": "3old", "4gon": None, "5gon": None, "6old": "2new"}
    current |= {"7lost": "8lost", "9any": "9any"}
    assert {name: library.current(name) for name in current} == current
    files = {"1old": "2new.cif", "3old": "3old.cif", "4gon": "4gon.cif", "6OLD": "2new.cif"}
    assert {name: library.find(name).name for name in files} == files
    assert [library.has(name) for name in ("1old", "5gon", "7lost", "9any")] == [True, False, False, False]


def test_the_last_structures_are_kept(tmp_path: Path, reads: list[tuple[str, str, int]]) -> None:
    put(tmp_path, "1bad.cif", *(f"{i}abc.cif" for i in range(1, 6)), "1none.cif")
    library = Library(tmp_path, keep=2, limit=77)
    for name in ("1abc", "2abc", "1abc", "3abc", "1abc", "2abc"):
        assert library.read(name).id == f"{name}.cif"
    # Of three, the one that was used least recently is read again.
    assert reads == [("structure", f"{i}abc.cif", 77) for i in (1, 2, 3, 2)]
    for _ in range(2):
        with pytest.raises(UserError, match=r"^1bad\.cif: is damaged$"):
            library.read("1bad")
        with pytest.raises(MissingStructure):
            library.read("9abc")
    assert reads[4:] == [("structure", "1bad.cif", 77)]
    assert library.release_date("1abc") == library.release_date("1abc") == date(2020, 1, 2)
    assert library.release_date("1none") is library.release_date("1none") is None
    assert reads[5:] == [("date", "1abc.cif", 77), ("date", "1none.cif", 77)]
    copy = Library.__new__(Library)
    copy.__dict__.update(library.__getstate__())
    assert copy.read("2abc").id == "2abc.cif"
    assert copy.release_date("1abc") == date(2020, 1, 2)
    assert [call[:2] for call in reads[7:]] == [("structure", "2abc.cif"), ("date", "1abc.cif")]


def test_sixteen_structures_of_any_size_are_kept_by_default(tmp_path: Path, reads: list[tuple[str, str, int]]) -> None:
    names = [f"{i}{i}aa" for i in range(9)] + [f"{i}{i}bb" for i in range(8)]
    library = put(tmp_path, *(f"{name}.cif" for name in names))
    for name in [*names[:16], *names[:16]]:
        library.read(name)
    assert reads == [("structure", f"{name}.cif", LARGEST) for name in names[:16]]
    library.read(names[16])
    library.read(names[0])
    assert len(reads) == 18


def test_a_structure_is_read_from_its_file(tmp_path: Path) -> None:
    text = write_mmcif("1abc", [random_chain("A", "MKV")], release_date="2011-02-03")
    (tmp_path / "1abc.cif").write_text(text)
    library = Library(tmp_path)
    assert library.read("1abc").chains["A"].sequence == "MKV"
    assert library.release_date("1abc") == date(2011, 2, 3)
    small = Library(tmp_path, limit=100)
    for read in (small.read, small.release_date):
        with pytest.raises(UserError, match="1abc"):
            read("1abc")
