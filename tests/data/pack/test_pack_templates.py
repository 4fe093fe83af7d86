"""Templates in packing: hits are found, filtered by date and entry, and their atoms lie in the store."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.data.pack.pack_inputs import ONE, TWO, alignment, chain, structure
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.pack import find_inputs, pack
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import read_example


def hmmsearch(path: Path, *hits: tuple[str, str]) -> None:
    """Hits of ONE's length, as hmmsearch writes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = "".join(f"{name}/1-{len(row.replace('-', ''))} {row}\n" for name, row in hits)
    path.write_text(f"# STOCKHOLM 1.0\n\n{rows}#=GC RF {'x' * len(ONE)}\n//\n")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A query, its alignment with hits beside it, and the structures that they name."""
    structure(tmp_path / "s/1one.cif", chain("A", ONE), chain("B", ONE), released="2005-01-01")
    structure(tmp_path / "s/1old.cif", chain("A", "C" + ONE[1:], shift=7.0), released="2001-01-01")
    structure(tmp_path / "s/1new.cif", chain("A", "D" + ONE[1:]), released="2006-01-01")
    structure(tmp_path / "s/2old.cif", chain("A", "E" + ONE[1:25] + "A"), released="2003-01-01")
    alignment(tmp_path / "m/1one_A/bfd.a3m", ONE, ONE[::-1])
    hmmsearch(
        tmp_path / "m/1one_A/hmm_output.sto",
        ("1one_B", ONE),
        ("1new_A", "D" + ONE[1:]),
        ("1old_A", "C" + ONE[1:]),
        ("2old_A", "E" + ONE[1:25] + "-----"),
        ("9xyz_A", "F" + ONE[1:]),
    )
    return tmp_path


def packed(files: Path, name: str = "store", **options: object) -> Store:
    pack([files / "s"], [files / "m"], files / name, hits=[files / "m"], **options)  # type: ignore[arg-type]
    return Store(files / name)


def test_templates_lie_in_the_store_and_the_report_counts_them(files: Path) -> None:
    report = pack([files / "s"], [files / "m"], files / "store", hits=[files / "m"])
    store = Store(files / "store")
    entries = {entry.name: entry for entry in report.kept}
    for name in ("1one_A", "1one_B"):  # the copy has them too, by the alignment that it shares
        raw = read_example(store, name)
        assert raw.templates is not None
        assert raw.templates.names == ("1old_A", "2old_A")
        truth = chain("A", "C" + ONE[1:], shift=7.0)
        same = np.array([letter != "R" for letter in ONE])  # whose NH1 and NH2 the reader names by their geometry
        np.testing.assert_allclose(raw.templates.positions[0][same], truth.positions[same], atol=1e-3)
        assert raw.templates.mask[1, 25:].sum() == 0
        assert (entries[name].templates, entries[name].hits) == (2, ["m/1one_A/hmm_output.sto"])
        assert entries[name].templates_refused == {
            "is of the query's own entry": 1,
            "came out N, after N": 1,
            "has no N.cif or N.cif.gz; add it, or do without": 1,
        }
    assert dict(zip(store.keys, store.column("templates")))["1one_A"] == 2
    assert report.unused_hits == {}
    assert ", 4 templates" in report.summary()


def test_a_store_without_templates_says_why(files: Path) -> None:
    """Hits ask for them, but the folder is the wrong one."""
    (files / "elsewhere").mkdir()
    structure(files / "elsewhere/3old.cif", chain("A", TWO))
    report = pack(
        [files / "s"], [files / "m"], files / "o", hits=[files / "m"], template_structures=[files / "elsewhere"]
    )
    # 1one_A and its copy, five hits each: one of the query's own entry, four without a file
    assert report.summary().endswith(
        ", 0 of 10 templates used: 8 have no structure in the folders given (1new, 1old, 2old, ...); "
        "2 x is of the query's own entry"
    )
    assert [entry.templates_missing for entry in report.kept if entry.hits] == [4, 4]
    assert report.summary().endswith(f", {report.warnings()[0]}")


def test_alignments_of_one_row_are_said(tmp_path: Path) -> None:
    structure(tmp_path / "s/1one.cif", chain("A", ONE))
    (tmp_path / "m").mkdir()
    (tmp_path / "m/1one_A.a3m").write_text(f">q\n{ONE}\n")
    report = pack([tmp_path / "s"], [tmp_path / "m"], tmp_path / "store")
    assert report.warnings() == ["1 alignment has one row, the chain's own: 1one_A"]


def test_no_template_is_newer_than_the_chain_or_the_day_given(files: Path) -> None:
    store = packed(files, options=PackOptions(max_template_date="2002-01-01"))
    assert read_example(store, "1one_A").templates.names == ("1old_A",)  # type: ignore[union-attr]
    store = packed(files, "earlier", options=PackOptions(max_template_date="1999-01-01"))
    assert read_example(store, "1one_A").templates is None


def test_structures_of_templates_may_lie_elsewhere(files: Path) -> None:
    for name in ("a/1old", "b/2old"):
        (files / name).parent.mkdir()
        shutil.move(files / f"s/{name[2:]}.cif", files / f"{name}.cif")
    raw = read_example(packed(files, template_structures=[files / "a", files / "b"]), "1one_A")
    assert raw.templates is not None
    assert raw.templates.names == ("1old_A", "2old_A")
    assert find_inputs([files / "s/1one.cif"], hits=[files / "m"]).folders == (files / "s",)


def test_bad_hits_and_bad_structures_of_templates_stop_nothing(files: Path) -> None:
    (files / "s/1old.cif").write_text("data_1old\n_entry.id 1old\n")  # no coordinates
    alignment(files / "m/2one_A/bfd.a3m", TWO)
    structure(files / "s/2one.cif", chain("A", TWO))
    (files / "m/2one_A/x.hhr").write_text("Query q\ncut")
    report = pack([files / "s"], [files / "m"], files / "store", hits=[files / "m"])
    entries = {entry.name: entry for entry in report.kept}
    assert entries["1one_A"].templates == 1
    assert any("has no atoms" in reason for reason in entries["1one_A"].templates_refused)
    assert entries["2one_A"].templates == 0
    assert "cut short" in report.unused_hits["m/2one_A/x.hhr"]
    assert [entry.name for entry in report.dropped] == ["1old.cif"]


def test_workers_extract_the_same_templates(files: Path) -> None:
    packed(files, "a")
    packed(files, "b", workers=2)
    assert all((files / "b" / file.name).read_bytes() == file.read_bytes() for file in (files / "a").iterdir())
