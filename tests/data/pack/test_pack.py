"""Pack: find files, match alignments and hits to chains, name everything dropped, and store copies once."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.data.pack.pack_inputs import ONE, TWO, alignment, chain, packed, structure
from warpfold.batch import to_tensors
from warpfold.data.features.choose import SampleConfig
from warpfold.data.features.make import make_features
from warpfold.data.formats.input_files import InputFile
from warpfold.data.pack.match import Matcher, Queries
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.pack import pack
from warpfold.data.pack.report import PackReport, store_summary_text, summarize_store
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import StoredExample
from warpfold.data.structure.mmcif import read_structure
from warpfold.data.structure.write import write_pdb
from warpfold.errors import UserError
from warpfold.geometry.residue import RESTYPE_ORDER

REAL = Path(__file__).parents[4] / "shared/realdata"


def test_everything_is_kept_or_named_with_its_reason_in_the_report_and_in_the_store(files: Path) -> None:
    report = packed(files)
    kept = {entry.name: entry for entry in report.kept}
    assert {key: entry.alignments for key, entry in kept.items()} == {
        "1one_A": ("msas/a.a3m",),  # of exactly its sequence
        "1one_B": ("msas/1two/hits.a3m",),
        "1one_C": ("msas/a.a3m",),
        "1two_A": ("msas/1two/hits.a3m",),  # by name, of all residues except a tag
        "1mut_A": ("msas/a.a3m",),  # the nearest
        "1non_A": (),
    }
    assert (kept["1one_A"].depth, kept["1one_A"].length) == (3, 30)
    assert "msas/1non_A.a3m: its query is another protein" in kept["1non_A"].reason
    dropped = {(entry.name, entry.file): entry.reason for entry in report.dropped}
    expected = {
        ("1low_A", "structures/1low.cif"): "resolution 9.5 Å, over 9",
        ("1pol_A", "structures/1pol.cif"): "93% of the sequence is A, over 80%",
        ("1sho_A", "structures/1sho.cif"): "5 residues, fewer than 10",
        ("1gap_A", "structures/1gap.cif"): "3 residues with a CA, fewer than 10",
        ("1one_A", "structures/1one.cif.gz"): "the same name as in structures/1one.cif",
        ("1one_B", "structures/1one.cif.gz"): "the same name as in structures/1one.cif",
        ("1one_C", "structures/1one.cif.gz"): "the same name as in structures/1one.cif",
        ("bad.cif", "structures/bad.cif"): "structures/bad.cif: has no atoms",
    }
    assert dropped.keys() == expected.keys()
    assert all(dropped[key].startswith(reason) for key, reason in expected.items())
    assert {file: reason[:60] for file, reason in report.unused.items()} == {
        "msas/1non_A.a3m": "no kept chain has this sequence",
        "msas/b.a3m": "no kept chain has this sequence",
        "msas/c.a3m": "no kept chain has this sequence",
        "msas/bad.a3m": "msas/bad.a3m: record 1, 'q', position 3 has '1', which is not an amino acid"[:60],
        "msas/empty.a3m": "msas/empty.a3m: is empty. Fetch or write the file again.",
    }
    assert report.summary() == "6 chains kept (1 with their sequence alone), 8 dropped, 5 alignments unused"

    data = json.loads((files / "store/pack.json").read_text())
    assert data == report.to_json()
    assert PackReport.from_json(data).entries == report.entries
    assert data["reasons"]["the same name as in structures/1one.cif"] == 3
    header, *rows = [line.split("\t") for line in (files / "store/pack.tsv").read_text().splitlines()]
    table = [dict(zip(header, row, strict=True)) for row in rows]
    assert len(table) == len(report.entries) + len(report.unused)
    (kept,) = [row for row in table if row["name"] == "1one_A" and row["status"] == "kept"]
    assert (kept["length"], kept["depth"], kept["file"]) == ("30", "3", "structures/1one.cif")
    assert {row["status"] for row in table} == {"kept", "dropped", "unused alignment"}

    summary = summarize_store(Store(files / "store"))
    assert (summary["entries"], summary["alone"], summary["shards"], summary["residues"]) == (6, 1, 1, 5 * 30 + 35)
    assert summary["depth"] == {"min": 1, "25%": 2, "median": 2, "75%": 3, "max": 3}
    assert summary["packed"]["inputs"]["structures"]["files"] == 10
    text = store_summary_text(summary)
    assert "6 in 3 clusters, 185 residues" in text
    assert "10 structures" in text


def test_what_is_packed_is_what_was_in_the_files(files: Path) -> None:
    packed(files)
    store = Store(files / "store")
    for place, key in enumerate(store.keys):
        raw = StoredExample(store, key).take(slice(None))
        original = read_structure(next((files / "structures").rglob(f"{key[:4]}.cif"))).chains[key[5:]]
        assert raw.sequence == original.sequence
        np.testing.assert_array_equal(raw.positions, original.positions)
        np.testing.assert_array_equal(raw.mask, original.mask)
        assert (store.column("length")[place], store.column("depth")[place]) == (raw.length, raw.depth)
    raw = StoredExample(store, "1one_A").take(slice(None))
    assert (raw.sources, raw.resolution) == (("msas/a.a3m",), 2.0)
    np.testing.assert_array_equal(raw.msa[1:, 0], [RESTYPE_ORDER["M"], RESTYPE_ORDER["A"]])
    batch = to_tensors(make_features(raw, SampleConfig(crop=16, max_msa=3), 0, "key", 1, True))
    assert len(batch["aatype"]) == 16


def test_copies_of_a_chain_share_its_alignment(tmp_path: Path) -> None:
    letters = np.random.default_rng(0).choice(list(RESTYPE_ORDER), (400, 30))
    alignment(tmp_path / "m/a.a3m", ONE, *("".join(row) for row in letters))
    structure(tmp_path / "s/1one.cif", chain("A", ONE))
    structure(tmp_path / "s/1two.cif", *(chain(name, ONE, shift=i) for i, name in enumerate("ABCD")))
    for name in ("1one", "1two"):
        pack([tmp_path / f"s/{name}.cif"], [tmp_path / "m"], tmp_path / name)
    sizes = [(tmp_path / f"{name}/shard-00000.wfs").stat().st_size for name in ("1one", "1two")]
    assert sizes[1] - sizes[0] < 3 * 10_000 < sizes[0] * 3
    store = Store(tmp_path / "1two")
    first, last = (StoredExample(store, key).take(slice(None)) for key in ("1two_A", "1two_D"))
    assert last.name == "1two_D"
    np.testing.assert_array_equal(first.msa, last.msa)
    np.testing.assert_allclose(last.positions[last.mask > 0], first.positions[first.mask > 0] + 3, atol=1e-2)
    assert len(store.record("1two_D").arrays) == len(store.record("1two_A").arrays)


def test_a_copy_whose_original_is_in_another_file_goes_with_it(tmp_path: Path) -> None:
    structure(tmp_path / "s/a/1one.cif", chain("A", TWO))
    structure(tmp_path / "s/b/1one.cif", chain("A", ONE * 20), chain("B", ONE * 20, shift=9.0))
    report = pack([tmp_path / "s"], [], tmp_path / "store")
    assert [entry.name for entry in report.kept] == ["1one_A"]
    assert [entry.reason for entry in report.dropped] == [
        "the same name as in s/a/1one.cif",
        "a copy of 1one_A, which is also in s/a/1one.cif",
    ]
    assert StoredExample(Store(tmp_path / "store"), "1one_A").take(slice(None)).sequence == TWO


def test_release_dates(tmp_path: Path) -> None:
    for name, day in (("1old", "1999-12-31"), ("1mid", "2000-01-01"), ("1new", "2001-01-01"), ("1not", None)):
        structure(tmp_path / f"s/{name}.cif", chain("A", ONE), released=day)
    options = PackOptions(released_after="2000-01-01", released_before="2001-01-01")
    report = pack([tmp_path / "s"], [], tmp_path / "store", options)
    assert [(entry.name, entry.release_date) for entry in report.kept] == [("1mid_A", "2000-01-01")]
    assert [(entry.name, entry.reason) for entry in report.dropped] == [
        ("1new_A", "released 2001-01-01, not before 2001-01-01"),
        ("1not_A", "no release date"),
        ("1old_A", "released 1999-12-31, before 2000-01-01"),
    ]


def test_an_alignment_that_turns_out_bad_is_left_out_and_named(tmp_path: Path) -> None:
    structure(tmp_path / "s/1one.cif", chain("A", ONE))
    alignment(tmp_path / "m/good.a3m", ONE, ONE[::-1])
    alignment(tmp_path / "m/late.a3m", ONE, *[ONE] * 20, "ACD")  # the error is late in the file
    report = pack([tmp_path / "s"], [tmp_path / "m"], tmp_path / "store")
    (entry,) = report.kept
    assert (entry.alignments, entry.depth) == (("m/good.a3m",), 2)
    assert "m/late.a3m: row 22" in entry.reason
    assert "row 22" in report.unused["m/late.a3m"]
    (tmp_path / "m/good.a3m").unlink()
    with pytest.raises(UserError, match=r"the most frequent reason: no alignment: m/late\.a3m: row 22"):
        pack([tmp_path / "s"], [tmp_path / "m"], tmp_path / "other", PackOptions(require_msa=True))


def test_alignments_may_be_required_be_absent_or_have_one_row(files: Path) -> None:
    report = packed(files, options=PackOptions(require_msa=True))
    assert "1non_A" not in {entry.name for entry in report.kept}
    (reason,) = [entry.reason for entry in report.dropped if entry.name == "1non_A"]
    assert reason.startswith("no alignment: msas/1non_A.a3m: its query is another protein")
    report = pack([files / "structures"], [], files / "alone")
    assert {entry.depth for entry in report.kept} == {1}
    alignment(files / "m/1mut_A.a3m", "C" + ONE[1:])
    report = pack([files / "structures"], [files / "m"], files / "thin")
    assert "1mut_A" in report.warnings()[0]


def test_clusters_of_equal_sequences_of_similar_ones_or_of_a_file(files: Path) -> None:
    (files / "clusters.txt").write_text("1ONE_A 1mut_A\n1two_A 1ONE_B\n")
    for name, options, expected in (
        ("equal", {"options": PackOptions(cluster_identity=1)}, "1mut_A 1non_A 1one_A 1one_B 1one_A 1two_A"),
        ("similar", {}, "1mut_A 1non_A 1mut_A 1two_A 1mut_A 1two_A"),
        ("named", {"clusters": files / "clusters.txt"}, "1ONE_A 1non_A 1ONE_A 1two_A 1one_A 1two_A"),
    ):
        report = packed(files, name, **options)
        store = Store(files / name)
        assert dict(zip(store.keys, store.column("cluster"))) == {e.name: e.cluster for e in report.kept}
        clusters = [entry.cluster for entry in sorted(report.kept, key=lambda entry: entry.name)]
        sides = {tuple(sorted(i for i, c in enumerate(clusters) if c == cluster)) for cluster in clusters}
        wanted = expected.split()
        assert sides == {tuple(sorted(i for i, c in enumerate(wanted) if c == cluster)) for cluster in wanted}, name


def test_nothing_kept_leaves_nothing(files: Path) -> None:
    with pytest.raises(
        UserError, match=r"all \d+ entries are dropped; the most frequent reason: \d+ residues, fewer than 1000"
    ):
        packed(files, options=PackOptions(min_length=1000))
    assert sorted(path.name for path in files.iterdir()) == ["msas", "structures"]


# ---- the alignments of a chain


def source(name: str) -> InputFile:
    return InputFile(name, Path("/" + name))


class Known(Queries):
    """Queries that have been read already."""

    def __init__(self, alignments: Sequence[tuple[InputFile, str]]) -> None:
        self.read_so_far = {source.name: (query, "") for source, query in alignments}
        self.alignments, self.shared = [source for source, _ in alignments], None


def matched(alignments: Sequence[tuple[InputFile, str]], key: str, sequence: str) -> tuple[list[InputFile], str]:
    """Return the alignments of a chain and the note about them."""
    job = Matcher(Known(alignments), [source for source, _ in alignments]).find(key, key[-1], sequence)
    return job.alignments, job.note


def test_the_matcher_takes_the_name_then_the_sequence_then_the_entry_then_the_nearest() -> None:
    near, far = "C" + ONE[1:], ONE[:20] + "WWWWWWWWWW"
    longer, longest = "MM" + ONE, "MMMM" + ONE + "KK"
    x, same_chain, entry, n, f, l1, l2 = map(
        source, ("m/x.a3m", "9abc_Z/y.a3m", "m/9abc.a3m", "m/n.a3m", "m/f.a3m", "m/l1.a3m", "m/l2.a3m")
    )
    all_of_them = [
        (x, ONE),
        (same_chain, "CC" + ONE[2:]),
        (entry, ONE[:25]),
        (n, near),
        (f, far),
        (l1, longer),
        (l2, longest),
    ]
    for known, key, sequence, wanted in (
        (all_of_them, "9ABC_Z", ONE, [same_chain]),
        (all_of_them, "9abc_A", ONE, [x]),
        (all_of_them[2:], "9abc_A", ONE, [entry]),
        (all_of_them[3:], "9abc_A", ONE, [l1]),  # has it, and the fewest others
        (all_of_them[3:5], "9abc_A", ONE, [n]),
        ([(f, far)], "1abc_A", ONE, []),
        ([], "1abc_A", ONE, []),
        ([(x, ONE)], "1abc_A", "ACD", []),
    ):
        assert matched(known, key, sequence) == (wanted, ""), (key, sequence, wanted)
    alignments, note = matched([(same_chain, far)], "9abc_Z", ONE)
    assert alignments == []
    assert note.startswith("9abc_Z/y.a3m: its query is another protein")


def test_hits_belong_by_name_or_stand_beside_the_alignments() -> None:
    a, b, c, d = map(source, ("9abc_Z/a3m/u.a3m", "9xyz_A/a3m/u.a3m", "flat/1.a3m", "flat/2.a3m"))
    hits = [source("9abc_Z/hhr/pdb70.hhr"), source("flat/h.hhr"), source("other/1.hhr")]

    def found(key: str, *alignments: tuple[InputFile, str]) -> list[InputFile]:
        known = Known([*alignments, (b, TWO), (d, TWO)])
        return Matcher(known, [*(one for one, _ in alignments), b, d], hits).find(key, "A", ONE).hits

    assert found("9abc_z", (a, ONE)) == [hits[0]]
    assert found("1one_A", (a, ONE)) == [hits[0]]
    assert found("1one_A", (c, ONE)) == [hits[2]]  # `flat` has several sequences, `1` does not
    assert found("1one_A") == []


def test_real_pairs(tmp_path: Path) -> None:
    if not REAL.exists():
        pytest.skip("no real data beside the repository")
    names = {"102m": "102m_A", "2q2k": "2q2k_A", "8q4b": "5sak_A", "2hhb": "1a00_A"}
    structures = [REAL / f"mmcif/{name}.cif.gz" for name in names]
    report = pack(structures, [REAL / "msas" / folder for folder in names.values()], tmp_path / "store")
    depth = {entry.name: entry.depth for entry in report.kept}
    assert depth["102m_A"] == 836
    assert depth["8q4b_A"] > 4000  # its precursor's
    assert depth["2hhb_A"] == depth["2hhb_C"] > 4000
    assert depth["2hhb_B"] == 1


# ---- templates


@pytest.fixture
def queries(tmp_path: Path) -> Path:
    """Write a query, its alignment, hits next to it, and the structures that the hits name."""
    structure(tmp_path / "s/1one.cif", chain("A", ONE), chain("B", ONE), released="2005-01-01")
    structure(tmp_path / "s/1old.cif", chain("A", "C" + ONE[1:], shift=7.0), released="2001-01-01")
    structure(tmp_path / "s/1new.cif", chain("A", "D" + ONE[1:]), released="2006-01-01")
    structure(tmp_path / "s/2old.cif", chain("A", "E" + ONE[1:25] + "A"), released="2003-01-01")
    alignment(tmp_path / "m/1one_A/bfd.a3m", ONE, ONE[::-1])
    ends = {"1one_B": ONE, "1new_A": "D" + ONE[1:], "1old_A": "C" + ONE[1:], "2old_A": "E" + ONE[1:25] + "-----"}
    ends["9xyz_A"] = "F" + ONE[1:]
    rows = "".join(f"{name}/1-{len(row.replace('-', ''))} {row}\n" for name, row in ends.items())
    text = f"# STOCKHOLM 1.0\n\n{rows}#=GC RF {'x' * len(ONE)}\n//\n"
    (tmp_path / "m/1one_A/hmm_output.sto").write_text(text)  # as in hmmsearch's output
    return tmp_path


def pack_queries(files: Path, name: str = "store", **more: object) -> tuple[PackReport, Store]:
    report = pack([files / "s"], [files / "m"], files / name, hits=[files / "m"], **more)  # type: ignore[arg-type]
    return report, Store(files / name)


def names_of_templates(store: Store) -> tuple[str, ...]:
    templates = StoredExample(store, "1one_A").take(slice(None)).templates
    return () if templates is None else templates.names


def test_templates_lie_in_the_store_and_the_report_counts_them(queries: Path) -> None:
    report, store = pack_queries(queries)
    entries = {entry.name: entry for entry in report.kept}
    for name in ("1one_A", "1one_B"):  # the copy has them too, through the shared alignment
        raw = StoredExample(store, name).take(slice(None))
        assert raw.templates is not None
        assert raw.templates.names == ("1old_A", "2old_A")
        truth = chain("A", "C" + ONE[1:], shift=7.0)
        same = np.array([letter != "R" for letter in ONE])  # the reader names NH1 and NH2 by geometry
        np.testing.assert_allclose(raw.templates.positions[0][same], truth.positions[same], atol=1e-3)
        assert raw.templates.mask[1, 25:].sum() == 0
        assert (entries[name].templates, entries[name].hits) == (2, ("m/1one_A/hmm_output.sto",))
        assert entries[name].templates_refused == {
            "is of the query's own entry": 1,
            "released N, after N": 1,
            "has no N.cif or N.cif.gz. Add it, or do without.": 1,
        }
    assert dict(zip(store.keys, store.column("templates")))["1one_A"] == 2
    assert report.unused_hits == {}
    assert ", 4 templates" in report.summary()


def test_a_store_without_templates_says_why(queries: Path) -> None:
    """There are hits, but the folder lacks their structures."""
    structure(queries / "elsewhere/3old.cif", chain("A", TWO))
    report, _ = pack_queries(queries, template_structures=[queries / "elsewhere"])
    # 1one_A and its copy have five hits each: one of the query's own entry, four without a file
    assert report.summary().endswith(
        ", 0 of 10 templates used: 8 have no structure in the folders given (1new, 1old, 2old, ...); "
        "2 x is of the query's own entry"
    )
    assert report.summary().endswith(f", {report.warnings()[0]}")


def test_templates_are_as_old_as_asked_for_and_may_lie_elsewhere(queries: Path) -> None:
    for name, day, names in (("a", "2002-01-01", ("1old_A",)), ("b", "1999-01-01", ())):
        assert names_of_templates(pack_queries(queries, name, options=PackOptions(max_template_date=day))[1]) == names
    for name in ("x/1old", "y/2old"):
        (queries / name).parent.mkdir()
        shutil.move(queries / f"s/{name[2:]}.cif", queries / f"{name}.cif")
    _, store = pack_queries(queries, "c", template_structures=[queries / "x", queries / "y"])
    assert names_of_templates(store) == ("1old_A", "2old_A")


def test_templates_are_of_earlier_entries_than_their_chain_and_missing_ones_are_named(queries: Path) -> None:
    text = (queries / "m/1one_A/hmm_output.sto").read_text()
    more = "".join(f"{i}abc_A/1-30 {letter}{ONE[1:]}\n" for i, letter in zip("87654", "GHIKL"))
    (queries / "m/1one_A/hmm_output.sto").write_text(text.replace("9xyz_A/", more + "9xyz_A/"))
    report, store = pack_queries(queries, options=PackOptions(max_template_date="2010-01-01"))
    assert names_of_templates(store) == ("1old_A", "2old_A")
    entry = next(entry for entry in report.kept if entry.name == "1one_A")
    assert (entry.templates_missing, list(entry.structures_missing)) == (6, ["8abc", "7abc", "6abc", "5abc"])
    assert sum(entry.templates_refused.values()) == 8
    # The library of an earlier run is not used again.
    (queries / "s/1old.cif").unlink()
    structure(queries / "s/9xyz.cif", chain("A", "F" + ONE[1:]), released="2000-01-01")
    _, store = pack_queries(queries, "other")
    assert names_of_templates(store) == ("2old_A", "9xyz_A")


def test_bad_hits_and_bad_structures_of_templates_stop_nothing(queries: Path) -> None:
    (queries / "s/1old.cif").write_text("data_1old\n_entry.id 1old\n")  # no coordinates
    alignment(queries / "m/2one_A/bfd.a3m", TWO)
    structure(queries / "s/2one.cif", chain("A", TWO))
    (queries / "m/2one_A/x.hhr").write_text("Query q\ncut")
    report, _ = pack_queries(queries)
    entries = {entry.name: entry for entry in report.kept}
    assert (entries["1one_A"].templates, entries["2one_A"].templates) == (1, 0)
    assert any("has no atoms" in reason for reason in entries["1one_A"].templates_refused)
    assert "cut short" in report.unused_hits["m/2one_A/x.hhr"]
    assert [entry.name for entry in report.dropped] == ["1old.cif"]


def test_files_that_carry_one_entry_id_are_named_by_their_files(tmp_path: Path) -> None:
    """gemmi, PyMOL and pipelines write the HEADER of the first structure into all files."""
    header = f"{'HEADER    HYDROLASE':<62}9ABC\n"
    for i, name in enumerate(("design_1.pdb", "design_2.pdb", "9abc.pdb", "deep/pdb9xyz.ent", "alone.pdb")):
        path = tmp_path / "structures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        entry = {"deep/pdb9xyz.ent": "9XYZ", "alone.pdb": "9QQQ"}.get(name, "9ABC")
        text = write_pdb("x", [chain("A", (ONE, TWO)[i % 2], shift=float(i))])
        path.write_text(header.replace("9ABC", entry) + text)
    report = pack([tmp_path / "structures"], [], tmp_path / "store", PackOptions(require_msa=False))
    assert report.dropped == []
    assert {entry.name for entry in report.kept} == {"design_1_A", "design_2_A", "9abc_A", "9xyz_A", "9qqq_A"}


def test_an_entry_with_unplaced_residues_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "structures/bad.pdb"
    path.parent.mkdir()
    text = write_pdb("x", [chain("A", ONE)])
    seqres = "SEQRES   1 A   12  MET LYS VAL LEU ALA ALA GLY ILE VAL GLY LEU CYS\n"
    path.write_text(seqres + "\n".join(line for line in text.split("\n") if not line.startswith("SEQRES")))
    structure(tmp_path / "structures/1one.cif", chain("A", ONE))
    report = pack([tmp_path / "structures"], [], tmp_path / "store", PackOptions(require_msa=False))
    assert [entry.name for entry in report.kept] == ["1one_A"]
    (entry,) = report.dropped
    assert "residues with N, CA and C that are in no chain: 18" in entry.reason
