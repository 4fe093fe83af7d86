"""Select chains by the options of pack, name entries, and read queries and structures."""

import gzip
import json
import zlib
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from tests.data.pack.pack_inputs import ONE, TWO, alignment, chain, structure
from warpfold.data.formats.input_files import InputFile
from warpfold.data.pack import build as pack_build
from warpfold.data.pack.build import (
    BuildJob,
    ChainJob,
    build,
    drop_reason,
    files_to_name_by,
    read_chains,
    read_queries,
)
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.predicted import PredictedFile
from warpfold.data.pack.report import PackEntry
from warpfold.data.structure.chain import Chain, Structure
from warpfold.errors import UserError

DEFAULTS: dict[str, Any] = {
    "min_length": 10, "max_length": None, "min_depth": 1, "min_plddt": 50.0, "max_pae": None, "min_kl": 0.5,
    "cluster_identity": 0.4, "max_resolution": 9.0, "max_single": 0.8, "released_after": None, "released_before": None,
    "require_msa": False, "max_template_date": None, "assemblies": False, "all_assemblies": False, "max_chains": 20,
    "max_residues": 10_000, "max_file_gb": 4.0,
}  # fmt: skip
OF_PREDICTIONS = ("min_plddt", "max_pae", "min_kl")
OF_ASSEMBLIES = ("assemblies", "max_chains", "max_residues")


# ---- options


@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        ("min_length", [1], [0]),
        ("max_length", [1, None], [0]),
        ("min_depth", [1], [0]),
        ("min_plddt", [0.0, 100.0], [-0.01, 100.01]),
        ("max_pae", [0.01, None], [0.0]),
        ("min_kl", [0.0], [-0.01]),
        ("cluster_identity", [0.0, 1.0], [-0.01, 1.01]),
        ("max_resolution", [0.1], ["x"]),
        ("max_single", [0.01, 1.0], [1.01]),
        ("max_chains", [1], [0]),
        ("max_residues", [1], [0]),
        ("max_file_gb", [0.001, 1e6], [0.0, 1_000_001.0]),
        ("released_after", ["2000-01-02"], ["yesterday"]),
        ("released_before", ["2000-01-02"], ["2000-13-02"]),
        ("max_template_date", ["2000-01-02"], [""]),
    ],
)
def test_options_have_limits(name: str, accepted: list[Any], refused: list[Any]) -> None:
    for value in accepted:
        assert asdict(PackOptions(**{name: value})) == DEFAULTS | {name: value}
    for value in refused:
        with pytest.raises(UserError, match=f"^({name} = |--{name.replace('_', '-')} )"):
            PackOptions(**{name: value})


def test_a_store_records_the_options_that_concern_it() -> None:
    assert asdict(PackOptions()) == DEFAULTS
    hidden = ("min_depth", "all_assemblies", *OF_PREDICTIONS, *OF_ASSEMBLIES)
    plain = {name: value for name, value in DEFAULTS.items() if name not in hidden}
    of_predictions = {name: DEFAULTS[name] for name in OF_PREDICTIONS}
    of_assemblies = {"max_chains": 20, "max_residues": 10_000}
    for options, predicted, more in (
        ({}, False, {}),
        ({"min_depth": 2}, False, {"min_depth": 2}),
        ({}, True, of_predictions),
        ({"assemblies": True}, False, of_assemblies | {"assemblies": "first"}),
        ({"all_assemblies": True}, True, of_assemblies | of_predictions | {"assemblies": "all"}),
        ({"assemblies": True, "all_assemblies": True}, False, of_assemblies | {"assemblies": "all"}),
        ({"max_chains": 3, "max_pae": 5.0}, False, {}),
    ):
        recorded = PackOptions(**options)
        assert recorded.recorded(predicted) == plain | more
        assert recorded.has_assemblies == ("assemblies" in more)
    assert PackOptions().recorded() == PackOptions().recorded(False)


def test_days_have_one_spelling_and_gigabytes_are_bytes() -> None:
    options = PackOptions(released_after="2000-1-2", max_template_date="20010203", max_file_gb=0.5)
    assert (options.released_after, options.max_template_date) == ("2000-01-02", "2001-02-03")
    assert (options.day("released_after"), options.day("released_before")) == (date(2000, 1, 2), None)
    assert (options.limit, PackOptions().limit) == (500_000_000, 4_000_000_000)
    with pytest.raises(UserError, match=r"^--released-before 2000-02-30: is not a date\. Write it as YYYY-MM-DD"):
        PackOptions(released_before="2000-02-30")


# ---- chains


def entry(one: Chain, resolution: float | None = 2.0, released: str | None = None) -> Structure:
    day = None if released is None else date.fromisoformat(released)
    return Structure("1abc", "X-RAY DIFFRACTION", resolution, day, {"A": one})


@pytest.mark.parametrize(
    ("options", "more", "kept", "reason"),
    [
        ({"max_resolution": 2.0}, {}, True, None),
        ({"max_resolution": 1.99}, {}, False, "resolution 2 Å, over 1.99"),
        ({"max_resolution": 1.99}, {"resolution": None}, True, None),
        ({"released_after": "2000-01-02"}, {"released": "2000-01-02"}, True, None),
        ({"released_after": "2000-01-02"}, {"released": "2000-01-01"}, False, "released 2000-01-01, before 2000-01-02"),
        ({"released_before": "2000-01-02"}, {"released": "2000-01-01"}, True, None),
        (
            {"released_before": "2000-01-02"},
            {"released": "2000-01-02"},
            False,
            "released 2000-01-02, not before 2000-01-02",
        ),
        ({"released_after": "2000-01-02"}, {}, False, "no release date"),
        ({"released_before": "2000-01-02"}, {}, False, "no release date"),
        ({}, {"released": "2000-01-02"}, True, None),
        ({"min_length": 30}, {}, True, None),
        ({"min_length": 31}, {}, False, "30 residues, fewer than 31"),
        ({"max_length": 30}, {}, True, None),
        ({"max_length": 29}, {}, False, "30 residues, more than 29"),
        ({"min_length": 12}, {"resolved": 12}, True, None),
        ({"min_length": 12}, {"resolved": 11}, False, "11 residues with a CA, fewer than 12"),
        ({}, {"resolved": 10}, True, None),
        ({}, {"resolved": 9}, False, "9 residues with a CA, fewer than 10"),
        ({"max_single": 0.8}, {"sequence": "A" * 24 + "GSGSGS"}, True, None),
        ({}, {"sequence": "A" * 25 + "GSGSG"}, False, "83% of the sequence is A, over 80%"),
        ({"max_single": 1.0}, {"sequence": "A" * 30}, True, None),
        ({"min_length": 1}, {"sequence": ""}, False, "0 residues, fewer than 1"),
    ],
)
def test_chains_are_dropped_beyond_the_limits(
    options: dict[str, Any], more: dict[str, Any], kept: bool, reason: str | None
) -> None:
    one = chain("A", more.pop("sequence", ONE) or "A", more.pop("resolved", None))
    if reason is not None and reason.startswith("0 "):
        one = replace(one, sequence="", mask=one.mask[:0], positions=one.positions[:0])
    assert drop_reason(PackOptions(**options), entry(one, **more), one, {}) == reason
    assert kept is (reason is None)


@pytest.mark.parametrize(
    ("options", "confidence", "factors", "reason"),
    [
        ({}, {}, 0.0, None),
        ({}, {"plddt": 50.0}, 1.0, None),
        ({}, {"plddt": 49.96}, 1.0, "mean pLDDT 50.0, below 50"),
        ({"min_plddt": 70.5}, {"plddt": 70.0}, 1.0, "mean pLDDT 70.0, below 70.5"),
        ({}, {"plddt": 90.0, "pae": 99.0}, 1.0, None),
        ({"max_pae": 5.0}, {"plddt": 90.0, "pae": 5.0}, 1.0, None),
        ({"max_pae": 5.0}, {"plddt": 90.0, "pae": 5.1}, 1.0, "mean PAE 5.1 Å, over 5"),
        ({"max_pae": 5.0}, {"plddt": 90.0}, 1.0, "no file with its PAE"),
        ({"max_pae": 5.0}, {}, 1.0, None),
        ({}, {"plddt": 90.0}, 0.0, "no residue has a KL confidence of 0.5"),
        ({}, {"plddt": 90.0}, None, None),
        ({"min_kl": 0.25}, {"plddt": 90.0, "pae": 1.0}, 0.0, "no residue has a KL confidence of 0.25"),
    ],
)
def test_predictions_are_dropped_beyond_the_limits(
    options: dict[str, Any], confidence: dict[str, float], factors: float | None, reason: str | None
) -> None:
    values = None if factors is None else np.array([factors, *[0] * 29], np.float32)
    one = replace(chain("A", ONE), b_factors=values)
    assert drop_reason(PackOptions(**options), entry(one, resolution=None), one, confidence) == reason


def test_chains_to_drop_have_entries_with_the_fields_of_their_structure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = structure(tmp_path / "1abc.cif", chain("A", ONE), chain("B", ONE[:4]), released="2001-02-03")
    file = InputFile("here/1abc.cif", path)
    read = read_chains((file, PackOptions(), None, False))
    assert read.structure is not None
    assert (read.structure.id, list(read.structure.chains), read.confidence) == ("1abc", ["A"], {})
    assert read.structure.dropped == {"B": "4 residues, fewer than 10"}
    (dropped,) = read.dropped
    assert dropped.to_json() == {
        "name": "1abc_B", "file": "here/1abc.cif", "kept": False, "reason": "4 residues, fewer than 10", "length": 4,
        "depth": 0, "templates": 0, "resolution": 2.0, "release_date": "2001-02-03", "cluster": None, "alignments": [],
        "hits": [], "templates_refused": {}, "templates_missing": 0, "structures_missing": [],
    }  # fmt: skip
    assert dropped.method == read.structure.method
    read = read_chains((file, PackOptions(), PredictedFile("x", why_not="another is packed"), False))
    entry = PackEntry("1abc.cif", "here/1abc.cif", False, "another is packed")
    assert (read.structure, read.dropped, read.confidence) == (None, [entry], {})
    # Other polymers.
    given = Structure("1abc", None, None, None, {"A": chain("A", ONE)}, {"X": "a nucleic acid"})
    monkeypatch.setattr(pack_build, "parse_structure", lambda *_: given)
    read = read_chains((file, PackOptions(), None, False))
    assert read.structure is not None
    assert read.structure.dropped == {"X": "a nucleic acid"}
    assert read.dropped == [PackEntry("1abc_X", "here/1abc.cif", False, "a nucleic acid")]
    monkeypatch.undo()
    small = read_chains((file, PackOptions(max_file_gb=1e-6), None, False))
    assert small.structure is None
    assert [(entry.name, entry.file, entry.kept) for entry in small.dropped] == [("1abc.cif", "here/1abc.cif", False)]
    named = read_chains((replace(file, path=path.rename(tmp_path / "x.y.cif")), PackOptions(), None, True))
    assert named.structure is not None
    assert (named.structure.id, named.dropped[0].name) == ("x", "x_B")


@pytest.mark.parametrize(("depth", "shared"), [(31, {"profile"}), (32, {"profile", "msa"})])
def test_copies_share_arrays_of_a_kib(tmp_path: Path, depth: int, shared: set[str]) -> None:
    """Copies of a chain, which have one sequence and the same alignments and hits, are built together."""
    sequence = ONE + "KR"
    path = structure(tmp_path / "1abc.cif", *(chain(name, sequence, shift=i) for i, name in enumerate("ABCD")))
    letters = np.random.default_rng(0).choice(list(ONE), (depth - 1, 32))
    source = InputFile("m/a.a3m", alignment(tmp_path / "a.a3m", sequence, *("".join(row) for row in letters)))
    file = InputFile("1abc.cif", path)
    read = read_chains((file, PackOptions(), None, False)).structure
    assert read is not None
    jobs = [ChainJob(name, [source] if name != "C" else [], [], f"note {name}.") for name in "ABCD"]
    built = build(BuildJob(file, read, jobs, PackOptions(), ()))
    assert built.bad == {}
    assert [
        (entry.name, entry.kept, entry.shares, entry.reason, entry.depth, list(entry.alignments))
        for entry in built.entries
    ] == [
        ("1abc_A", True, "", "note A; note B; note D", depth, ["m/a.a3m"]),
        ("1abc_B", True, "1abc_A", "note A; note B; note D", depth, ["m/a.a3m"]),
        ("1abc_D", True, "1abc_A", "note A; note B; note D", depth, ["m/a.a3m"]),
        ("1abc_C", True, "", "note C", 1, []),
    ]
    for number, (entry, data) in enumerate(zip(built.entries, built.records, strict=True)):
        index, header, crc = entry.record
        assert (index, crc) == (number, zlib.crc32(data[:header]))
        content = json.loads(zstandard.ZstdDecompressor().decompress(data[:header]))
        assert content["notes"]["name"] == entry.name
        assert content["shared"] == (dict.fromkeys(shared, "1abc_A") if entry.shares else {})
        names = {name for name, *_ in content["arrays"]}
        assert names | set(content["shared"]) == {
            "positions", "mask", "aatype", "residue_index", "profile", "msa", "deletion_starts", "deletion_rows",
            "deletion_counts",
        }  # fmt: skip
        assert names.isdisjoint(content["shared"])
        assert (entry.sequence, entry.length, entry.file) == (sequence, 32, "1abc.cif")
        assert entry.entity == f"1abc_{read.chains[entry.name[-1]].entity}"


def test_rows_that_alphafold_does_not_use_are_left_out_with_a_note(tmp_path: Path) -> None:
    rows = "".join(f"r{i} {ONE[: i % 30]}{'A' * (30 - i % 30)}\n" for i in range(601))
    (tmp_path / "mgnify_hits.sto").write_text(f"# STOCKHOLM 1.0\n\nq {ONE}\n{rows}//\n")
    source = InputFile("m/mgnify_hits.sto", tmp_path / "mgnify_hits.sto")
    missing = InputFile("m/x.a3m", tmp_path / "x.a3m")
    file = InputFile("1abc.cif", structure(tmp_path / "1abc.cif", chain("A", ONE)))
    read = read_chains((file, PackOptions(), None, False)).structure
    assert read is not None
    job = ChainJob("A", [missing, source], [], "a note.")
    built = build(BuildJob(file, replace(read, notes=("of the reader",)), [job], PackOptions(), ()))
    (entry,) = built.entries
    assert entry.alignments == ["m/mgnify_hits.sto"]
    reader, note, error, rows_note = entry.reason.split("; ")
    assert (reader, note, built.bad) == ("of the reader", "a note", {"m/x.a3m": f"{error}."})
    assert rows_note.startswith("m/mgnify_hits.sto: the first 501 of 602 rows are used, as in AlphaFold")


# ---- names


def test_entries_of_one_id_are_named_by_their_files(tmp_path: Path) -> None:
    header = f"{'HEADER    HYDROLASE':<62}9ABC\n"
    # Only the first 16 KiB are read.
    late = "#" * ((1 << 14) - 12) + "\n_entry.id  1lat\n"
    contents = {
        "a.pdb": header, "b.pdb": header, "9abc.pdb": header,
        "c.cif": "data_c\n_entry.id   1XYZ\n", "d.cif.gz": "data_d\n_entry.id 1xyz\n", "1xyz.cif": "",
        "e.cif": "_entry.id pdb_00001qqq\n", "f.cif": "_entry.id alone\n",
        "g.cif": late, "h.cif": late,
        "i.cif": "no id", "j.cif": "no id either",
        "k.cif": "_entry.id SAME\n", "SAME.cif": "_entry.id SAME\n", "deep/k.cif": "_entry.id SAME\n",
        "pdb2abc.ent": "", "pdbx2ab.ent": "HEADER",
        "l.cif": "_entry.id 2ABC\n",
        "PDB3abc.ent": "_entry.id 3abc\n", "m.cif": "_entry.id 3abc\n",
    }  # fmt: skip
    files = []
    for name, text in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        data = text.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        files.append(InputFile(name, tmp_path / name))
    files.append(InputFile("gone.cif", tmp_path / "gone.cif"))
    expected = {
        "a.pdb", "b.pdb", "c.cif", "d.cif.gz", "k.cif", "deep/k.cif", "l.cif", "m.cif", "PDB3abc.ent",
    }  # fmt: skip
    assert files_to_name_by(files) == expected
    assert files_to_name_by(files[:1]) == frozenset()
    # Two files of one name are two files of one entry.
    assert files_to_name_by([file for file in files if file.name.endswith("k.cif")]) == frozenset()


def test_queries_are_read_with_their_errors(tmp_path: Path) -> None:
    files = [InputFile("m/a.a3m", alignment(tmp_path / "a.a3m", ONE, TWO)), InputFile("m/x.a3m", tmp_path / "x.a3m")]
    (tmp_path / "b.a3m").write_text(">q\nAC1\n")
    files.append(InputFile("m/b.a3m", tmp_path / "b.a3m"))
    first, missing, bad = read_queries((files, 1000))
    assert (first, missing[0], bad[0]) == ((ONE, ""), "", "")
    assert missing[1].startswith("m/x.a3m: no such file")
    assert bad[1].startswith("m/b.a3m: record 1")
    assert read_queries(([], 1000)) == []
