"""Pack biological assemblies with their chains: `pack --assemblies`."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.entries import ONE as IDENTITY
from tests.data.entries import TURN, assembly_text
from tests.data.pack.pack_inputs import ONE, TWO, alignment, chain, contents, packed, structure
from warpfold.bulk import JobPart
from warpfold.data.example.pairing import pair_rows
from warpfold.data.example.raw_example import Assembly, from_chain
from warpfold.data.features.choose import SampleConfig
from warpfold.data.features.crop import read_ca
from warpfold.data.features.make import make_features
from warpfold.data.formats.alignment import decode, parse_alignment
from warpfold.data.load.examples import Maker
from warpfold.data.load.order import Order, Source
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.pack import merge, pack
from warpfold.data.pack.part import part_path
from warpfold.data.pack.report import PackReport, store_summary_text, summarize_store
from warpfold.data.store.store import Store, StoreWriter, pack_record
from warpfold.data.store.stored_example import (
    StoredExample,
    entry_keys,
    open_entry,
    read_assembly,
)
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.mmcif import read_structure
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM_ORDER

REALDATA = (Path(__file__).parents[3] / "../shared/realdata").resolve()
realdata = pytest.mark.skipif(not REALDATA.is_dir(), reason="../shared/realdata is not here")
FIRST, ALL = PackOptions(assemblies=True), PackOptions(all_assemblies=True)


def entry(path: Path, chains: Sequence[Chain], *generators: tuple[str, str, str]) -> Path:
    """Return an entry of these chains, with label_asym_id A, B ..., and these assemblies."""
    structure(path, *chains)
    path.write_text(path.read_text() + assembly_text(generators))
    return path


def report_of(report: PackReport, name: str) -> str:
    entry = next(e for e in report.entries if e.name == name)
    return f"{'kept' if entry.kept else 'dropped'}: {entry.reason}"


@pytest.fixture
def files(files: Path) -> Path:
    """Write the files of the other tests, and entries with assemblies."""
    here = files / "structures"
    pair = [chain("H", ONE), chain("L", TWO)]
    entry(here / "2sym.cif", pair, ("1", "1,2", "A,B"), ("2", "1", "B"))
    entry(here / "2mis.cif", pair, ("1", "1,7", "A,B"))
    entry(here / "2big.cif", pair, ("1", "(1-3)(1-3)(1-3)(1-3)", "A,B"))
    entry(here / "2abs.cif", [chain("A", ONE), chain("B", ONE[:4])], ("1", "1", "A,B,C"))
    entry(here / "2non.cif", [chain("A", ONE), chain("B", ONE[:4])], ("1", "1", "B"))
    return files


def test_assemblies_are_packed_with_their_chains_and_operators(files: Path) -> None:
    report = packed(files, options=FIRST)
    store = Store(files / "store")
    keys = list(entry_keys(store, assemblies=True))
    assert sorted(keys) == [f"{name}-assembly1" for name in ("1mut", "1non", "1one", "1two", "2abs", "2sym")]
    assert sorted([*keys, *entry_keys(store, assemblies=False)]) == sorted(store.keys)
    assembly = read_assembly(store, "2sym-assembly1")
    assert (assembly.name, assembly.ids) == ("2sym-assembly1", ("H", "L", "H-2", "L-2"))
    assert assembly.operators is not None
    np.testing.assert_array_equal(assembly.operators.reshape(4, 12), [IDENTITY, IDENTITY, TURN, TURN])
    assert assembly.entity_id.tolist() == [1, 2, 1, 2]
    assert assembly.sym_id.tolist() == [1, 1, 2, 2]
    assert [c.sequence for c in assembly.chains] == [ONE, TWO] * 2
    assert assembly.chains[0] is assembly.chains[2]
    first = read_assembly(store, "1one-assembly1")
    assert (first.ids, first.operators, first.entity_id.tolist()) == (("A", "B", "C"), None, [1, 2, 1])
    meta = {name: dict(zip(store.keys, store.column(name)))["2sym-assembly1"] for name in store.columns}
    assert (meta["length"], meta["chains"], meta["cluster"]) == (120, ["2sym_H", "2sym_L"] * 2, None)
    assert len(report.chains) == len(entry_keys(store, assemblies=False))
    assert {entry.name for entry in report.assemblies} == set(keys)
    assert list(store.verify()) == []


def test_what_is_left_out_is_reported(files: Path) -> None:
    report = packed(files, options=FIRST)
    store = Store(files / "store")
    assert report_of(report, "2sym-assembly1") == "kept: "
    assert "2mis.cif: an assembly needs operator 7, which is missing" in report_of(report, "2mis-assembly1")
    assert report_of(report, "2big-assembly1") == "dropped: 28 chains, more than 20"
    absent = "kept: without B: 4 residues, fewer than 10; without C: is not in the file"
    assert report_of(report, "2abs-assembly1") == absent
    assert read_assembly(store, "2abs-assembly1").ids == ("A",)
    assert report_of(report, "2non-assembly1") == "dropped: none of its chains is kept"
    # Chains are kept without their assembly.
    assert {"2mis_H", "2big_L", "2non_A"} <= set(entry_keys(store, assemblies=False))
    saved = PackReport.from_json(json.loads((files / "store/pack.json").read_text()))
    assert [entry.chains for entry in saved.assemblies] == [entry.chains for entry in report.assemblies]
    assert "2sym-assembly1\tkept" in (files / "store/pack.tsv").read_text()
    assert f"{len(report.assemblies)} assemblies of" in report.summary()
    limited = packed(files, "limited", options=PackOptions(all_assemblies=True, max_chains=2, max_residues=59))
    assert report_of(limited, "2sym-assembly1") == "dropped: 4 chains, more than 2"
    assert report_of(limited, "2sym-assembly2") == "kept: "
    limited = packed(files, "other", options=PackOptions(assemblies=True, max_residues=119))
    assert report_of(limited, "2sym-assembly1") == "dropped: 120 residues, more than 119"
    packed(files, "plain")
    summary, plain = (summarize_store(Store(files / name)) for name in ("store", "plain"))
    same = ("entries", "residues", "length", "depth", "clusters", "alone")
    assert {name: summary[name] for name in same} == {name: plain[name] for name in same}
    assert (summary["assemblies"], plain["assemblies"], summary["assembly_chains"]["max"]) == (6, 0, 4)
    assert "assemblies      6; chains: min 1" in store_summary_text(summary)
    assert "assemblies" not in store_summary_text(plain)


def test_an_assembly_has_the_rows_and_templates_of_its_entities(tmp_path: Path) -> None:
    pair = [chain("A", ONE), chain("B", TWO), chain("C", ONE, shift=9.0)]
    structure(tmp_path / "s/1abc.cif", *pair, resolution=2.5, released="2005-01-01")
    text = (tmp_path / "s/1abc.cif").read_text() + assembly_text([("1", "1,2", "A,B,C"), ("x", "1", "C")])
    (tmp_path / "s/1abc.cif").write_text(text)
    structure(tmp_path / "t/1old.cif", chain("A", "C" + ONE[1:]), released="2001-01-01")
    alignment(tmp_path / "m/1abc_A.a3m", ONE, ONE[::-1], "G" + ONE[1:])
    alignment(tmp_path / "m/1abc_C.a3m", ONE, ONE[::-1], "G" + ONE[1:])
    alignment(tmp_path / "m/1abc_B.a3m", TWO, TWO[::-1])
    for name in ("1abc_A", "1abc_C"):
        hits = alignment(tmp_path / f"h/{name}.hmmsearch.a3m")
        hits.write_text(f">1old_A/1-30 mol:protein\nC{ONE[1:]}\n")
    found = {"hits": [tmp_path / "h"], "template_structures": [tmp_path / "t"]}

    def made(name: str, **options: Any) -> dict[str, Any]:
        chosen = PackOptions(**{"all_assemblies": True, **options})
        report = pack([tmp_path / "s"], [tmp_path / "m"], tmp_path / name, chosen, **found)
        return {entry.name: entry for entry in report.entries}

    entries = made("store", max_chains=6, max_residues=180)
    assert [(name, entry.depth, entry.templates) for name, entry in entries.items()] == [
        ("1abc-assembly1", 5, 1), ("1abc-assemblyx", 3, 1), ("1abc_A", 3, 1), ("1abc_B", 2, 0), ("1abc_C", 3, 1),
    ]  # fmt: skip
    first = entries["1abc-assembly1"]
    assert (first.length, first.resolution, first.release_date, first.chains) == (
        180, 2.5, "2005-01-01", ("1abc_A", "1abc_B", "1abc_C") * 2,
    )  # fmt: skip
    store = Store(tmp_path / "store")
    assert list(store.keys) == ["1abc_A", "1abc_B", "1abc_C", "1abc-assembly1", "1abc-assemblyx"]
    assert store.record("1abc-assembly1").notes == {
        "name": "1abc-assembly1", "ids": ["A", "B", "C", "A-2", "B-2", "C-2"],
        "chains": ["1abc_A", "1abc_B", "1abc_C"] * 2, "entities": [1, 2, 1] * 2, "resolution": 2.5,
        "release_date": "2005-01-01",
    }  # fmt: skip
    assert store.record("1abc-assemblyx").notes["entities"] == [1]
    assert made("few", max_chains=5)["1abc-assembly1"].reason == "6 chains, more than 5"
    assert made("small", max_residues=179)["1abc-assembly1"].reason == "180 residues, more than 179"
    assert list(made("first", assemblies=True, all_assemblies=False)) == [
        "1abc-assembly1", "1abc_A", "1abc_B", "1abc_C",
    ]  # fmt: skip


def test_a_store_without_assemblies_has_no_trace_of_them(files: Path) -> None:
    packed(files)
    store = Store(files / "store")
    assert "chains" not in store.columns
    assert not any(b"assembl" in data or b"max_chains" in data for data in contents(files / "store").values())
    assert entry_keys(store, assemblies=True) == entry_keys(store, assemblies=False) == store.keys
    alone = open_entry(store, "1one_A", assemblies=True)
    assert not isinstance(alone, StoredExample)
    assert (alone.ids, alone.operators, alone.entity_id.tolist()) == (("1one_A",), None, [1])


def test_any_number_of_parts_gives_the_same_store(files: Path) -> None:
    packed(files, options=FIRST)
    parts = [JobPart(number, 3) for number in (1, 2, 3)]
    for part in parts:
        packed(files, "parts", options=FIRST, part=part)
    merge([part_path(files / "parts", part) for part in parts], files / "parts")
    assert contents(files / "store") == contents(files / "parts")
    assert packed(files, options=FIRST).finished_before
    with pytest.raises(UserError, match="--assemblies"):
        packed(files)


def test_an_assembly_whose_chains_come_from_another_file_is_dropped(tmp_path: Path) -> None:
    here = tmp_path / "structures"
    structure(here / "a.cif", chain("A", ONE))
    (here / "a.cif").rename(here / "1abc.cif")
    (here / "1abc.cif").write_text((here / "1abc.cif").read_text().replace("entry.id a", "entry.id 1abc"))
    entry(here / "z/1abc.cif", [chain("A", ONE), chain("B", TWO)], ("2", "1", "A,B"))
    report = pack([here], [], tmp_path / "store", ALL)
    assert report_of(report, "1abc-assembly1") == "kept: "
    assert "its chain 1abc_A is also in" in report_of(report, "1abc-assembly2")
    assert sorted(Store(tmp_path / "store").keys) == ["1abc-assembly1", "1abc_A", "1abc_B"]


def write_rows(path: Path, sequence: str, species: Sequence[str]) -> Path:
    """Write an alignment whose rows, of these organisms, differ from its query in one residue each."""
    rows = [("query", sequence)]
    for i, name in enumerate(species):
        rows.append((f"tr|A0A{i:03d}|A0A{i:03d}_{name}/1-30", sequence[:i] + "G" * 2 + sequence[i + 2 :]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f">{name}\n{row}\n" for name, row in rows))
    return path


def test_what_pairs_rows_is_stored_and_copies_share_it(tmp_path: Path) -> None:
    structure(tmp_path / "s/1abc.cif", chain("A", ONE), chain("B", TWO), chain("C", ONE, shift=9.0))
    first = write_rows(tmp_path / "m/1abc_A/hits.a3m", ONE, ["HUMAN", "MOUSE", "YEAST"])
    write_rows(tmp_path / "m/1abc_C/hits.a3m", ONE, ["HUMAN", "MOUSE", "YEAST"])
    write_rows(tmp_path / "m/1abc_B/hits.a3m", TWO, ["RAT"])
    apart = write_rows(tmp_path / "m/1abc_B/uniprot_hits.a3m", TWO, ["YEAST", "HUMAN"])
    pack([tmp_path / "s"], [tmp_path / "m"], tmp_path / "store", FIRST)
    store = Store(tmp_path / "store")
    entry = read_structure(tmp_path / "s/1abc.cif")
    alignments = [parse_alignment(first.read_bytes(), "x")]
    raw = from_chain("1abc_A", entry, entry.chains["A"], alignments, pairing=True)
    stored = StoredExample(store, "1abc_A")
    assert raw.pairing is not None
    assert stored.pairing is not None
    for name, array in vars(raw.pairing).items():
        found = getattr(stored.pairing, name)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
    assert raw.pairing.species.astype(bool).tolist() == [False, True, True, True]
    part = stored.take(slice(3, 9), np.array([0, 2]))
    assert part.pairing is not None
    np.testing.assert_array_equal(part.pairing.species, raw.pairing.species[[0, 2]])
    # Rows that are only for pairing come last, and examples of single chains lack them.
    both, alone = open_entry(store, "1abc-assembly1", True).chains[1], open_entry(store, "1abc_B", False)
    assert both.pairing is not None
    assert both.depth == 1 + 1 + 2
    assert both.pairing.unpaired.tolist() == [True, True, False, False]
    assert (alone.depth, alone.pairing) == (2, None)
    np.testing.assert_array_equal(alone.take(slice(30)).msa, StoredExample(store, "1abc_B").take(slice(None)).msa[:2])
    assert apart.exists()


def rewritten(store: Store, out: Path, key: str, without: str = "", **edits: Callable[[Any], Any]) -> Store:
    """Copy a store with changed arrays or notes of one entry, and perhaps without an entry."""
    with StoreWriter(out) as writer:
        for place, name in enumerate(store.keys):
            record = store.record(name)
            arrays, notes = {each: record.read(each) for each in record.arrays}, dict(record.notes)
            for each, edit in edits.items() if name == key else ():
                held = arrays if each in arrays else notes
                if (value := edit(held.pop(each))) is not None:
                    held[each] = value
            meta = {column: store.column(column)[place] for column in store.columns}
            if name != without:
                writer.add(name, pack_record(arrays, notes), meta)
        writer.finish()
    return Store(out)


def test_records_that_contradict_themselves_are_refused(tmp_path: Path) -> None:
    store = stored_pairs(tmp_path)
    key, chain = "1abc-assembly1", "1abc_A"

    def refused(said: str, entry: str = chain, **edits: Callable[[Any], Any]) -> None:
        shutil.rmtree(tmp_path / "other", ignore_errors=True)
        other = rewritten(store, tmp_path / "other", entry, **edits)
        with pytest.raises(UserError, match=rf"other: {entry}: {said}. Pack the store again"):
            make_features(read_assembly(other, key), SampleConfig(crop=20), 0, (key, 0), 1, train=True)

    assert rewritten(store, tmp_path / "same", chain, aatype=lambda array: array).record(chain).arrays.keys()
    for name in ("pairing_species", "pairing_identity", "pairing_digest", "pairing_unpaired", "ca", "positions"):
        refused(f"{name} do not fit", **{name: lambda array: array[:-1]})
    refused("pairing_digest do not fit", pairing_digest=lambda array: None)
    refused("pairing_unpaired do not fit", pairing_unpaired=lambda array: array.astype(np.float32))
    refused("mask do not fit", mask=lambda array: None)
    refused("its chains and operators do not fit", key, operators=lambda array: array[:-1])
    refused("its chains and operators do not fit", key, operators=lambda array: array * np.nan)
    refused("its chains and operators do not fit", key, ids=lambda ids: ids[:-1])
    refused("its chains and operators do not fit", key, entities=lambda numbers: numbers[:-1])
    lacking = rewritten(store, tmp_path / "lacking", "", without="1abc_B")
    with pytest.raises(UserError, match=r"lacking: has no entry '1abc_B'\. Pack the store again"):
        Source(lacking, assemblies=True)


def stored_pairs(path: Path) -> Store:
    """Write a store of an assembly of two chains and their copies, with alignments for pairing."""
    entry(path / "s/1abc.cif", [chain("A", ONE), chain("B", TWO)], ("1", "1,2", "A,B"))
    for name, sequence in (("A", ONE), ("B", TWO)):
        write_rows(path / f"m/1abc_{name}/hits.a3m", sequence, ["HUMAN", "MOUSE"])
    pack([path / "s"], [path / "m"], path / "store", FIRST)
    return Store(path / "store")


def test_the_alignment_of_a_complex_gives_each_chain_its_rows_and_pairs(tmp_path: Path) -> None:
    entry(tmp_path / "s/1abc.cif", [chain("A", ONE), chain("B", TWO)], ("1", "1,2", "A,B"))
    rows = [
        ONE + TWO,
        ONE[:-1] + "W" + TWO[:-1] + "W",
        "-" * len(ONE) + TWO[:-1] + "Y",
        ONE[:-1] + "F" + "-" * len(TWO),
    ]
    text = f"#{len(ONE)},{len(TWO)}\t2,2\n" + "".join(f">{place}\n{row}\n" for place, row in enumerate(rows))
    for name in ("1abc", "other"):  # found by its name, or by the start of it
        for suffix, more in (("a3m", ""), ("wrong.a3m", "-")):
            (tmp_path / f"{name}-{suffix}").mkdir()
            (tmp_path / f"{name}-{suffix}/{name}.a3m").write_text(text + more)
        out = tmp_path / f"{name}.store"
        report = pack([tmp_path / "s"], [tmp_path / f"{name}-a3m"], out, FIRST)
        assert not report.unused
        assembly = read_assembly(Store(out), "1abc-assembly1")
        assert [c.depth for c in assembly.chains] == [3, 3, 3, 3]
        pairs = pair_rows([c.pairing for c in assembly.chains[:2]])
        assert pairs.tolist() == [[0, 0], [2, 2]]
        for example, end in zip(assembly.chains, "WW"):
            assert decode(example.whole_rows(np.array([2]))[0])[-1] == end
        damaged = pack([tmp_path / "s"], [tmp_path / f"{name}-wrong.a3m"], tmp_path / f"{name}.damaged", FIRST)
        assert "row 4, '3', has" in next(iter(damaged.unused.values()))


@pytest.mark.parametrize("spatial", [0.0, 1.0])
def test_features_from_the_store_are_those_from_memory(files: Path, spatial: float) -> None:
    packed(files, options=FIRST)
    store = Store(files / "store")
    stored = read_assembly(store, "2sym-assembly1")
    for member in stored.chains:
        ca, raw = member.ca_positions(), member.take(slice(None))
        assert ca is not None
        assert raw.positions is not None
        assert "ca" in store.record(raw.name).arrays
        np.testing.assert_array_equal(ca[0], raw.positions[:, ATOM_ORDER["CA"]])
    memory = Assembly(
        stored.name, stored.ids, tuple(chain.take(slice(None)) for chain in stored.chains), stored.operators
    )
    config = SampleConfig(crop=40, max_msa=4, max_extra=4, spatial_fraction=spatial, interface_distance=100.0)
    for step in range(3):
        actual, expected = (make_features(x, config, 0, ("2sym", step), 2, True) for x in (stored, memory))
        assert actual.keys() == expected.keys()
        for name, array in actual.items():
            np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.mark.parametrize("assemblies", [True, False])
def test_a_maker_makes_what_its_model_takes(files: Path, assemblies: bool) -> None:
    packed(files, options=FIRST)
    packed(files, "plain")
    stores = Store(files / "store"), Store(files / "plain")
    make = Maker(stores, SampleConfig(crop=50, max_msa=4, max_extra=4), seed=0, assemblies=assemblies)
    order = Order([Source(store, assemblies=assemblies) for store in stores], seed=0)
    for index in range(20):
        entry = order.entry(index)
        features = make(entry.source, entry.key, index, 1)
        assert ("asym_id" in features) == assemblies
        assert len(features["aatype"]) <= 50
    if assemblies:
        features = make(0, "2sym-assembly1", 0, 1)
        assert features["copy_atom_positions"].shape == (2, 50, 37, 3)


# ---- real entries with their real alignments

ENTRIES = ("2hhb", "2q2k", "1hho", "1ncb", "3zee", "1a0a")
ALIGNMENTS = ("1a00_A", "HBB", "2q2k_A")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("realdata") / "store"
    files = [file for name in ENTRIES for file in (REALDATA / "mmcif").glob(f"{name}.cif*")]
    report = pack(files, [REALDATA / "msas" / name for name in ALIGNMENTS], path, PackOptions(assemblies=True))
    reasons = {entry.name: entry.reason for entry in report.entries}
    assert reasons["2hhb-assembly1"] == "without HEM: not a polymer; without PO4: not a polymer"
    assert reasons["1a0a-assembly1"].startswith("without C: polydeoxyribonucleotide; without D: poly")
    assert reasons["3zee-assembly1"] == "49 chains, more than 20"
    return Store(path)


@realdata
def test_haemoglobin_is_two_copies_of_two_chains(real: Store) -> None:
    whole, half = read_assembly(real, "2hhb-assembly1"), read_assembly(real, "1hho-assembly1")
    assert whole.ids == ("A", "B", "C", "D")
    assert half.ids == ("A", "B", "A-2", "B-2")  # the other half, by crystal symmetry
    for assembly in (whole, half):
        assert assembly.entity_id.tolist() == [1, 2, 1, 2]
        assert [c.length for c in assembly.chains] == [141, 146, 141, 146]
        assert len({c.depth for c in assembly.chains[::2]}) == 1  # copies share the alignment
        assert assembly.chains[0].depth > 1000
        ca_of_all = read_ca(assembly)
        assert ca_of_all is not None
        ca = np.split(ca_of_all[0], np.cumsum([141, 146, 141]))
        for alpha, beta in ((0, 1), (0, 3), (1, 2), (2, 3)):  # each alpha chain touches both beta chains
            assert np.linalg.norm(ca[alpha][:, None] - ca[beta], axis=-1).min() < 8
        for k, positions in enumerate(ca):  # and no chains overlap
            rest = np.concatenate(ca[:k] + ca[k + 1 :])
            assert np.linalg.norm(positions[:, None] - rest, axis=-1).min() > 3


@realdata
def test_rows_of_a_real_alignment_have_their_organisms(real: Store) -> None:
    pairing = read_assembly(real, "2q2k-assembly1").chains[0].pairing
    assert pairing is not None
    apart = ~pairing.unpaired
    assert apart.any()  # of uniprot_hits.sto
    assert (pairing.species[apart] != 0).mean() > 0.9
    assert not pairing.species[~apart].any()  # an alignment for pairing is the only one that is paired


@realdata
def test_real_assemblies_have_features(real: Store) -> None:
    config = SampleConfig(crop=128, max_msa=16, max_extra=32)
    for key in ("2hhb-assembly1", "2q2k-assembly1", "1ncb-assembly1", "1a0a-assembly1"):
        features = make_features(read_assembly(real, key), config, 0, (key, 0), 1, train=True)
        copies = read_assembly(real, key).sym_id.max()
        assert features["copy_atom_positions"].shape[:2] <= (copies, 128)
        assert len(features["aatype"]) == min(128, read_assembly(real, key).length)
