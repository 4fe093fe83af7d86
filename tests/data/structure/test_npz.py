"""Structures that others have processed: the chains are those of the mmCIF that they were made of; what is refused."""

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.entries import random_chain
from tests.data.formats.test_processed import Trap
from tests.data.pack.pack_inputs import ONE, TWO
from tests.data.structure.released import Residues, boltz, openfold3, packed, residues_of
from warpfold.data.formats import alignment
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.pack import pack
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.mmcif import parse_structure, read_structure
from warpfold.data.structure.write import write_mmcif
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM_ORDER

Tables = dict[str, np.ndarray]
REALDATA = Path(__file__).parents[3] / "../shared/realdata/mmcif"
LAYOUTS: dict[str, Callable[..., Tables]] = {
    "Boltz-1": boltz,
    "Boltz-2": lambda chains: boltz(chains, version=2),
    "OpenFold3": openfold3,
}
LIGAND: Residues = [("HEM", [("FE", (1.0, 2.0, 3.0)), ("NA", None)])]
STRAND: Residues = [("DA", [("P", (1.0, 2.0, 3.0)), ("O5'", (2.0, 2.0, 3.0))]), ("DC", [("P", None)])]


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Callable[..., Tables]:
    return LAYOUTS[request.param]


def equal(found: Chain, chain: Chain) -> bool:
    """Whether a chain has the sequence, the atoms and the places of another."""
    pairs = [(getattr(found, name), getattr(chain, name)) for name in ("positions", "mask", "residue_index")]
    alike = all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)
    return found.sequence == chain.sequence and alike


def only(tables: Tables, source: str = "1abc.npz") -> Chain:
    (chain,) = parse_structure(packed(tables), source).chains.values()
    return chain


def test_a_chain_is_what_its_mmcif_is(layout: Callable[..., Tables]) -> None:
    """With residues that were not seen at both ends and inside, and every type of residue."""
    sequence = "ARNDCQEGHILKMFPSTWYVARRGA"
    chains = [random_chain("A", sequence, 1, missing=(0, 1, 7, 8, 24)), random_chain("B", sequence[::-1], 2)]
    chains.append(random_chain("C", sequence, 3, missing=(3,)))
    chains = [replace(chain, sequence=f"{chain.sequence[:20]}X{chain.sequence[21:]}") for chain in chains]
    whole = parse_structure(write_mmcif("1abc", chains), "1abc.cif")
    numbers = [0, 1, 0] if layout is not openfold3 else [1, 2, 1]
    data = layout([(c.id, 0, n, residues_of(c)) for c, n in zip(whole.chains.values(), numbers)])
    found = parse_structure(packed(data), "1ABC.npz")
    assert found.id == "1abc"
    assert list(found.chains) == ["A", "B", "C"]
    assert all(equal(found.chains[name], chain) for name, chain in whole.chains.items())
    assert [chain.entity for chain in found.chains.values()] == ["1", "2", "1"]
    assert found.chains["A"].residue_index[0] == 0
    assert not found.chains["A"].mask[:2].any()
    if layout is openfold3:  # unseen residues have no number
        assert found.chains["A"].author_numbers[:4] == ("", "", "13", "14")
    assert (found.method, found.resolution, found.release_date) == (None, None, None)


@pytest.mark.skipif(not REALDATA.is_dir(), reason="needs ../shared/realdata")
@pytest.mark.parametrize("entry", ["1crn", "1ake", "1a0a", "1a4w", "1exb"])
def test_real_chains_too(entry: str, layout: Callable[..., Tables]) -> None:
    """But for what no format of these keeps: OXT, and other than the twenty."""
    whole = read_structure(REALDATA / f"{entry}.cif.gz")
    for chain in whole.chains.values():
        chain.mask[:, ATOM_ORDER["OXT"]] = 0
        chain.positions[:, ATOM_ORDER["OXT"]] = 0
    data = layout([(name, 0, i, residues_of(chain)) for i, (name, chain) in enumerate(whole.chains.items(), 1)])
    found = parse_structure(packed(data))
    assert [equal(found.chains[name], chain) for name, chain in whole.chains.items()] == [True] * len(whole.chains)


def test_only_proteins_are_kept(layout: Callable[..., Tables]) -> None:
    """Nucleic acids are named by mmCIF's kinds, which the two number otherwise; ligands are not, as of mmCIF."""
    protein, dna = residues_of(random_chain("A", ONE)), 1 if layout is not openfold3 else 2
    data = layout([("L", 3, 5, LIGAND), ("D", dna, 2, STRAND), ("A", 0, 1, protein), ("R", 3 - dna, 3, STRAND)])
    found = parse_structure(packed(data))
    assert list(found.chains) == ["A"]
    assert found.dropped == {"D": "polydeoxyribonucleotide", "R": "polyribonucleotide"}


def test_modified_residues_and_mirrored_chains(layout: Callable[..., Tables]) -> None:
    """Phosphotyrosine is Y, what no table knows X; a chain of D-amino acids is no polypeptide(L)."""
    plain = residues_of(random_chain("A", "GAYGG"))
    changed = [*plain[:2], ("PTR", [*plain[2][1], ("P", (1.0, 1.0, 1.0))]), ("ZZZ9", plain[3][1]), plain[4]]
    mirrored: Residues = [("DAL", atoms) for _, atoms in residues_of(random_chain("D", "AAAA"))]
    found = parse_structure(packed(layout([("A", 0, 1, changed), ("D", 0, 2, mirrored)])))
    assert found.chains["A"].sequence == "GAYXG"
    assert found.chains["A"].mask[2].sum() == 12
    assert found.dropped == {"D": "polypeptide(d)"}


def test_what_boltz_masks_is_left_out_and_its_b_factors_are_read() -> None:
    chains = [random_chain("A", ONE), random_chain("B", TWO)]
    data = boltz([*((f"{c.id}1", 0, 0, residues_of(c)) for c in chains), ("L1", 3, 1, LIGAND)], version=2)
    data["mask"][1:] = False
    found = parse_structure(packed(data))
    assert list(found.chains) == ["A1"]
    assert found.dropped == {"B1": "left out by those who made the file (its mask)"}
    assert found.chains["A1"].b_factors is not None
    assert found.chains["A1"].b_factors[:2].tolist() == [51.0, 59.0]  # CA is the second atom of eight


def test_copies_and_mixtures_of_openfold3() -> None:
    """Chains of one author's name get their numbers; of a mixture the residue of the largest occupancy counts."""
    first, second = residues_of(random_chain("A", "GSG")), residues_of(random_chain("A", "GTG", 1))
    data = openfold3([("A", 0, 1, [first[0], first[1], second[1], first[2]]), ("A", 0, 1, first), ("A", 0, 1, second)])
    place = data["res_id"]
    place[(data["chain_id"] == "1") & (place > 2)] -= 1
    data["occupancy"][(data["res_name"] == "THR") & (data["chain_id"] == "1")] = 0.4
    data["occupancy"][(data["res_name"] == "SER") & (data["chain_id"] == "1")] = 0.6
    found = parse_structure(packed(data))
    assert {name: chain.sequence for name, chain in found.chains.items()} == {"A": "GSG", "A-2": "GSG", "A-3": "GTG"}
    data["occupancy"][(data["res_name"] == "THR") & (data["chain_id"] == "1")] = 0.8
    assert parse_structure(packed(data)).chains["A"].sequence == "GTG"


def test_atoms_in_any_order_of_chains_and_gaps_in_numbers() -> None:
    """A plain AtomArray: residues that it lacks are unknown, from the first place on."""
    chain = random_chain("A", "GAVL")
    data = openfold3([("A", 0, 1, residues_of(chain)), ("B", 0, 2, residues_of(random_chain("B", "GGGG")))])
    order = np.argsort(data["res_id"], kind="stable")  # chains by turns
    data = {name: array[order] for name, array in data.items() if name not in ("bonds", "entity_id", "auth_asym_id")}
    data["res_id"] = np.where(data["res_id"] > 2, data["res_id"] + 3, data["res_id"]) + 1
    data["chain_id"] = data["chain_id"].astype(int)
    found = parse_structure(packed(data)).chains
    assert {name: one.sequence for name, one in found.items()} == {"1": "XGAXXXVL", "2": "XGGXXXGG"}
    np.testing.assert_array_equal(found["1"].positions[[1, 2, 6, 7]], chain.positions)


def change(tables: Tables, table: str, field: str | None, at: Any, value: Any) -> Tables:
    changed = {name: array.copy() for name, array in tables.items()}
    (changed[table] if field is None else changed[table][field])[at] = value
    return changed


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 8]) + data[at + 1 :]


def bomb(tables: Tables) -> bytes:
    """An archive that says that it unpacks to 5 GB."""
    data = packed(tables)
    size = zipfile.ZipFile(io.BytesIO(data)).getinfo("atoms.npy" if "atoms" in tables else "coord.npy").file_size
    assert data.count(size.to_bytes(4, "little")) >= 1
    at = data.rindex(size.to_bytes(4, "little"))
    return data[:at] + (0xFFFFFFF0).to_bytes(4, "little") + data[at + 4 :]


PAIR = [("A", 0, 1, residues_of(random_chain("A", "GAVL"))), ("B", 0, 2, residues_of(random_chain("B", "GAVLG")))]
BOLTZ, ATOMS = boltz(PAIR), openfold3(PAIR)
TRAP = np.array([Trap(Path("executed"))], object)
REFUSED: dict[str, tuple[Tables | bytes, str]] = {
    "cut short": (packed(BOLTZ)[:-40], "is no structure of Boltz or OpenFold3, or damaged .*; fetch it again"),
    "a byte": (flipped(packed(BOLTZ), 300), "is no structure .* or damaged"),
    "an array's name": (
        packed(ATOMS)[::-1].replace(b"di_mysa_htua", b"di_mysa_htuA", 1)[::-1],
        "is no structure .* or damaged",
    ),
    "another archive": ({"msa": np.zeros(3)}, "holds msa, and no structure of Boltz or OpenFold3; leave it out"),
    "nothing": ({"bonds": np.zeros(3)}, "holds bonds, and no structure"),
    "objects": (BOLTZ | {"atoms": TRAP}, "atoms.npy holds Python objects, .* execute a pickle"),
    "objects in what is not known": ({"uniref90_hits": TRAP}, "uniref90_hits.npy holds Python objects"),
    "an object in a table": (BOLTZ | {"mask": np.array([(TRAP[0],)], [("x", "O")])}, "is no structure"),
    "a zip bomb": (bomb(BOLTZ), "has more than 4 GB when unpacked"),
    "no table": (BOLTZ | {"atoms": np.zeros(5)}, "is no structure"),
    "another type": (BOLTZ | {"mask": np.ones(2)}, r"an array of float64 \[2\] in the place of another"),
    "a mask of more": (BOLTZ | {"mask": np.ones(3, bool)}, "another number of chains in the mask"),
    "atoms beyond the table": (change(BOLTZ, "residues", "atom_num", 8, 10**9), "atom_idx and atom_num are not all"),
    "fewer atoms": (change(BOLTZ, "residues", "atom_num", 8, 1), "atom_idx and atom_num are not all"),
    "negative": (change(BOLTZ, "residues", "atom_num", 1, -5), "atom_idx and atom_num are not all"),
    "residues of two": (change(BOLTZ, "chains", "res_idx", 1, 2), "res_idx and res_num are not all"),
    "a place twice": (change(BOLTZ, "residues", "res_idx", 1, 0), "residues of a chain are not in order"),
    "a place far off": (change(BOLTZ, "residues", "res_idx", 3, 2**31 - 1), "not in order, or far apart"),
    "a first place far off": (change(ATOMS, "res_id", None, slice(None), 10**9), "not in order, or far apart"),
    "before the first": (change(ATOMS, "res_id", None, 0, 0), "not in order, or far apart"),
    "NaN": (
        change(BOLTZ, "atoms", "coords", 3, np.nan),
        "atom O of residue 1 of chain A has a position that is not a number",
    ),
    "half a position": (change(ATOMS, "coord", None, (0, 1), np.nan), "atom N .* position that is not a number"),
    "infinite": (change(ATOMS, "coord", None, 0, np.inf), "atom N .* position that is not a number or far too large"),
    "two of a name": (change(BOLTZ, "chains", "name", slice(None), "A"), "two chains of one name"),
    "a name of lines": (change(BOLTZ, "residues", "name", 0, "A\nB"), r"the name 'A\\nB'"),
    "no name": (change(BOLTZ, "chains", "name", 0, ""), "the name ''"),
    "of fewer atoms": (ATOMS | {"res_id": ATOMS["res_id"][:-1]}, "arrays of different numbers of atoms"),
    "nothing seen": (change(ATOMS, "coord", None, slice(None), np.nan), "has no atoms of a protein"),
    "no chains": (boltz([]), "has no atoms of a protein"),
    "a ligand alone": (boltz([("L", 3, 0, LIGAND)]), "has no atoms of a protein"),
    "another molecule": (change(BOLTZ, "chains", "mol_type", slice(None), 7), "A: molecules of type 7"),
    "DNA alone": (openfold3([("D", 2, 1, STRAND)]), r"has no protein chain that can be used \(D: polydeoxyribo"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_is_one_line(what: str) -> None:
    given, message = REFUSED[what]
    with pytest.raises(UserError, match=rf"^x\.npz: .*{message}") as caught:
        parse_structure(given if isinstance(given, bytes) else packed(given), "x.npz")
    assert "\n" not in str(caught.value)
    assert not Path("executed").exists()


@pytest.mark.parametrize("tables", [BOLTZ, boltz(PAIR, version=2), ATOMS], ids=LAYOUTS)
def test_any_change_of_a_number_is_refused_or_read_as_a_structure(tables: Tables) -> None:
    """Archives have checksums; these are files that somebody wrote wrong."""
    rng, errors, read = np.random.default_rng(0), list[str](), 0
    for _ in range(150):
        changed = {name: array.copy() for name, array in tables.items()}
        array = changed[str(rng.choice([name for name in tables if len(tables[name])]))]
        if array.dtype.names:
            array = array[str(rng.choice(array.dtype.names))]
        for place in rng.integers(0, len(array), rng.integers(1, 3)):
            raw = bytes(rng.integers(0, 256, array[place].nbytes, dtype=np.uint8))
            kept = np.frombuffer(raw, array.dtype).reshape(array.shape[1:]) if array.dtype.kind != "U" else "!"
            array[place] = rng.choice([0, 1, 2, -1]) if array.dtype.kind in "iu" and rng.random() < 0.5 else kept
        try:
            found = parse_structure(packed(changed), "x.npz")
        except UserError as error:
            errors.append(str(error))
        else:
            read += 1
            for chain in found.chains.values():
                assert np.abs(chain.positions).max() < 1e6
                assert len(chain.sequence) == len(chain.positions) < 1000
    assert read > 10
    assert len(errors) > 10
    assert not any("\n" in error for error in errors)


def test_objects_that_are_not_read_do_no_harm() -> None:
    """An annotation of somebody's own: what can be read safely is."""
    assert equal(only(boltz(PAIR[:1]) | {"pocket": TRAP}), only(boltz(PAIR[:1])))


def test_sizes_are_checked_before_anything_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment, "LARGEST", 1000)
    with pytest.raises(UserError, match=r"x\.npz: has more than 1e-06 GB when unpacked; leave it out"):
        parse_structure(packed(ATOMS), "x.npz")


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


RECORD = {"resolution": 1.5, "method": "x-ray diffraction", "deposited": "1997-01-01", "released": "1998-04-08"}


def test_pack_reads_boltzs_set_with_its_manifest(tmp_path: Path) -> None:
    """Resolution, method and release come from the manifest; alignments by sequence; a new manifest is a new input."""
    folder, out = tmp_path / "rcsb_processed_targets", tmp_path / "store"
    for entry, sequence in (("1one", ONE), ("1two", TWO), ("1non", ONE[::-1])):
        write(
            folder / f"structures/{entry}.npz", packed(boltz([("A1", 0, 0, residues_of(random_chain("A", sequence)))]))
        )
    write(folder / "structures/bad.npz", packed(BOLTZ | {"atoms": TRAP}))
    records = [{"id": "1one", "structure": RECORD, "chains": [{"chain_id": 0, "id": "1two"}], "interfaces": []}]
    records += [{"id": "1two", "structure": RECORD | {"resolution": 0.0, "released": ""}, "chains": []}]
    (folder / "manifest.json").write_text(json.dumps(records))
    report = pack([folder / "structures"], [], out)
    found = {entry.name: (entry.resolution, entry.method, entry.release_date) for entry in report.kept}
    assert found["1one_A1"] == (1.5, "X-RAY DIFFRACTION", "1998-04-08")
    assert found["1two_A1"] == (None, "X-RAY DIFFRACTION", None)
    assert found["1non_A1"] == (None, None, None)
    assert [entry.name for entry in report.dropped] == ["bad.npz"]
    assert "structures/bad.npz: atoms.npy holds Python objects" in report.dropped[0].reason
    assert pack([folder / "structures"], [], out).kept == report.kept
    (folder / "manifest.json").write_text(json.dumps(records[:1]))
    with pytest.raises(UserError, match="other inputs"):
        pack([folder / "structures"], [], out)


def test_pack_reads_openfold3s_set_with_its_caches(tmp_path: Path) -> None:
    """As they lie in its bucket, and as its scripts leave them; `structure.npz` is called as its folder."""
    data = packed(openfold3([("A", 0, 1, residues_of(random_chain("A", ONE)))]))
    cache = {"_type": "ClusteredDatasetCache", "name": "train", "structure_data": {}}
    cache["structure_data"] = {
        "1one": {"release_date": "2020-02-03", "resolution": float("nan"), "chains": {"1": {"label_asym_id": "A"}}},
        "1two": {"release_date": "2021-02-03", "status": "success", "experimental_method": "SOLUTION NMR,EPR",
                 "resolution": 2.5, "token_count": 3, "chains": {}},
    }  # fmt: skip
    for root, place in ((tmp_path / "set", "dataset_caches/training_cache.json"), (tmp_path / "own", "metadata.json")):
        between = "preprocessed_pdb_data/standard/structure_files" if root.name == "set" else "structure_files"
        for name in ("1one/1one.npz", "1two/1two.npz", "MGYP01/structure.npz"):
            write(root / between / name, data)
        write(root / place, json.dumps(cache, indent=4 if root.name == "own" else None).encode())
        report = pack([root / between], [], tmp_path / f"{root.name}.store", PackOptions(max_resolution=9))
        found = {entry.name: (entry.resolution, entry.method, entry.release_date) for entry in report.kept}
        assert found == {
            "1one_A": (None, None, "2020-02-03"),
            "1two_A": (2.5, "SOLUTION NMR; EPR", "2021-02-03"),
            "MGYP01_A": (None, None, None),
        }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps([{"id": "1one", "structure": RECORD}])[:-2], "manifest.json: is cut short, or no JSON"),
        (json.dumps([{"id": "1one", "structure": RECORD | {"resolution": "low"}}]), "its record of 1one is damaged"),
        (json.dumps([{"id": "1one", "structure": RECORD | {"method": 3}}]), "its record of 1one is damaged"),
        ('[{"id": "1one", "structure": {"resolution" 3}}]', "its record of 1one is damaged"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path / "structures/1one.npz", packed(BOLTZ))
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=message):
        pack([tmp_path / "structures"], [], tmp_path / "store")


def test_a_record_across_two_pieces_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from warpfold.data.formats.input_files import find
    from warpfold.data.pack import records

    write(tmp_path / "structures/1one.npz", packed(BOLTZ))
    text = json.dumps([{"id": f"{i:04d}", "structure": RECORD, "chains": []} for i in range(30)])
    text = text[:-1] + ", " + json.dumps({"id": "1one", "structure": RECORD}) + "]"
    (tmp_path / "manifest.json").write_text(text)
    for piece in (64, 100, 1000):
        monkeypatch.setattr(records, "_PIECE", piece)
        found, _ = records.find_experiments(find([tmp_path / "structures"], (".npz",), "structures"))
        assert found["structures/1one.npz"].release_date == date(1998, 4, 8)
