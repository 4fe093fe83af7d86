"""Packing: files found, alignments matched to their chains, everything dropped named; the same bytes however made."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from warpfold.batch import to_tensors
from warpfold.data.formats import write_fasta
from warpfold.data.loader import Loader, read_example
from warpfold.data.mmcif import Chain
from warpfold.data.pack import Filters, Matcher, Report, find_files, pack
from warpfold.data.sample import SampleConfig
from warpfold.data.store import Store
from warpfold.data.write import write_mmcif
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM37_MASK, RESTYPE_ORDER

REAL = Path(__file__).parents[3] / "shared/realdata"
ONE = "MKVLAAGIVGLCAKWDERSTFYHNQPMEAL"
TWO = "GSWYQNTRAEEDIKHFMPVCLLGTASWNDR"


def chain(name: str, sequence: str, resolved: int | None = None) -> Chain:
    """A chain of random coordinates, 4 angstrom from residue to residue."""
    n = len(sequence)
    steps = np.arange(n)[:, None, None] * np.array([4.0, 0, 0])
    positions = steps + np.random.default_rng(0).normal(size=(n, 37, 3)).round(3)
    mask = np.stack([ATOM37_MASK[RESTYPE_ORDER[letter]] for letter in sequence])
    mask[n if resolved is None else resolved :] = 0
    positions = (positions * mask[..., None]).astype(np.float32)
    return Chain(name, sequence, positions, mask.astype(np.float32), np.arange(n), tuple(str(i + 1) for i in range(n)))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Structures and alignments, good and bad."""
    structures, msas = tmp_path / "structures", tmp_path / "msas"
    (structures / "deep").mkdir(parents=True)
    (msas / "1two").mkdir(parents=True)

    def structure(name: str, *chains: Chain, resolution: float | None = 2.0, folder: str = ".") -> None:
        (structures / folder / f"{name}.cif").write_text(write_mmcif(name, chains, resolution=resolution))

    def alignment(name: str, *rows: str) -> None:
        (msas / name).write_text(write_fasta([(str(i), row) for i, row in enumerate(rows)]))

    structure("1one", chain("A", ONE), chain("B", TWO))
    structure("1two", chain("A", "GGGGG" + TWO), folder="deep")
    structure("1mut", chain("A", "C" + ONE[1:]))
    structure("1non", chain("A", ONE[::-1]))
    structure("1low", chain("A", ONE), resolution=9.5)
    structure("1pol", chain("A", "A" * 28 + "GG"))
    structure("1sho", chain("A", ONE[:5]))
    structure("1gap", chain("A", ONE, resolved=3))
    (structures / "bad.cif").write_text("data_x\n")
    (structures / "1one.cif.gz").write_bytes(gzip.compress((structures / "1one.cif").read_bytes()))
    (structures / "notes.txt").write_text("not a structure")
    alignment("a.a3m", ONE, ONE[:15] + "-" * 15, "A" * 30)
    alignment("b.a3m", "MM" + ONE + "KK", "C" * 34)
    alignment("1two/hits.a3m", TWO, TWO[::-1])
    alignment("1non_A.a3m", "WWWWWWWWWW" + TWO[:10], "A" * 20)
    alignment("c.a3m", "LLLLLPPPPPLLLLLPPPPP")
    (msas / "bad.a3m").write_text(">q\nACDEF\n>r\nACD\n")
    return tmp_path


def packed(files: Path, name: str = "store", **options: object) -> Report:
    return pack([files / "structures"], [files / "msas"], files / name, **options)  # type: ignore[arg-type]


def test_everything_is_kept_or_named_with_its_reason(files: Path) -> None:
    report = packed(files)
    kept = {entry.name: entry for entry in report.kept}
    assert sorted(kept) == ["1mut_A", "1non_A", "1one_A", "1one_B", "1two_A"]
    names = {key: sorted(Path(file).name for file in entry.alignments) for key, entry in kept.items()}
    assert names == {
        "1one_A": ["a.a3m", "b.a3m"],  # its own, and its precursor's
        "1one_B": ["hits.a3m"],
        "1two_A": ["hits.a3m"],  # by name and, but for a tag, by sequence
        "1mut_A": ["a.a3m"],  # the nearest
        "1non_A": [],
    }
    assert (kept["1one_A"].depth, kept["1one_A"].length) == (4, 30)
    assert "1non_A.a3m: its query is another protein" in kept["1non_A"].reason
    dropped = {(entry.name, Path(entry.file).name): entry.reason for entry in report.dropped}
    expected = {
        ("1low_A", "1low.cif"): "resolution 9.5 Å, over 9",
        ("1pol_A", "1pol.cif"): "93% of the sequence is A, over 80%",
        ("1sho_A", "1sho.cif"): "5 residues, fewer than 10",
        ("1gap_A", "1gap.cif"): "3 residues with a CA, fewer than 10",
        ("1one_A", "1one.cif.gz"): "the same name as in",
        ("1one_B", "1one.cif.gz"): "the same name as in",
        ("bad.cif", "bad.cif"): "bad.cif:",
    }
    assert dropped.keys() == expected.keys()
    assert all(reason in dropped[key] for key, reason in expected.items())
    unused = {Path(file).name: reason for file, reason in report.unused.items()}
    assert sorted(unused) == ["1non_A.a3m", "bad.a3m", "c.a3m"]
    assert "no chain" in unused["c.a3m"]
    assert "bad.a3m" in unused["bad.a3m"]
    assert report.summary() == "5 chains kept (1 with their sequence alone), 7 dropped, 3 alignments unused"
    assert json.loads((files / "store/pack.json").read_text()) == report.to_json()


def test_what_is_packed_is_what_was_in_the_files(files: Path) -> None:
    packed(files)
    store = Store(files / "store")
    assert store.column("length") == [len(read_example(store, key).aatype) for key in store.keys]
    raw = read_example(store, "1one_A")
    original = chain("A", ONE)
    assert raw.sequence == ONE
    assert raw.sources == ("msas/a.a3m", "msas/b.a3m")
    assert raw.resolution == 2.0
    same = np.array(list(ONE)) != "R"  # whose NH1 and NH2 the reader names by their geometry
    np.testing.assert_allclose(raw.positions[same], original.positions[same], atol=1e-3)
    np.testing.assert_array_equal(raw.mask, original.mask)
    assert raw.msa.shape == (4, 30)
    np.testing.assert_array_equal(raw.msa[2:, 0], [RESTYPE_ORDER["A"], RESTYPE_ORDER["C"]])
    loader = Loader(store, SampleConfig(crop=16, max_msa=3), seed=0)
    for key, features in loader.stream(range(5)):
        assert key in store
        batch = to_tensors(features)
        assert len(batch["aatype"]) == 16


def test_chains_without_alignment_can_be_left_out(files: Path) -> None:
    report = packed(files, filters=Filters(require_msa=True))
    assert "1non_A" not in {entry.name for entry in report.kept}
    (reason,) = [entry.reason for entry in report.dropped if entry.name == "1non_A"]
    assert reason.startswith("no alignment: 1non_A.a3m: its query is another protein")


def test_without_alignments_every_chain_stands_alone(files: Path) -> None:
    report = pack([files / "structures"], [], files / "store")
    assert {entry.depth for entry in report.kept} == {1}


def test_workers_make_the_same_bytes(files: Path) -> None:
    packed(files, "a")
    calls: list[tuple[str, int, int]] = []
    packed(files, "b", workers=2, progress=lambda *call: calls.append(call))
    for file in (files / "a").iterdir():
        assert file.read_bytes() == (files / "b" / file.name).read_bytes()
    assert {stage for stage, _, _ in calls} == {"reading structures", "reading alignments", "packing"}
    assert all(done <= total for _, done, total in calls)


def test_nothing_kept_leaves_nothing(files: Path) -> None:
    with pytest.raises(UserError, match=r"nothing to keep, entries: \d+; most often: \d+ residues, fewer than 1000"):
        packed(files, filters=Filters(min_length=1000))
    assert sorted(path.name for path in files.iterdir()) == ["msas", "structures"]


def test_an_output_that_exists_is_refused_before_any_work(files: Path) -> None:
    (files / "store").mkdir()
    with pytest.raises(UserError, match="exists already"):
        packed(files, progress=lambda stage, done, total: pytest.fail("work was done"))


def test_paths_that_lead_nowhere(files: Path) -> None:
    with pytest.raises(UserError, match="nowhere: no such file"):
        pack([files / "nowhere"], [], files / "store")
    with pytest.raises(UserError, match="no alignments found"):
        pack([files / "structures"], [files / "structures"], files / "store")
    named = find_files([files / "structures/notes.txt"], [".cif"], "structures")
    assert named == [files / "structures/notes.txt"]  # what is named is taken, whatever it is called


def test_the_matcher_prefers_the_same_sequence_then_the_name_then_the_nearest() -> None:
    near, far = "C" + ONE[1:], ONE[:20] + "WWWWWWWWWW"
    files = [
        (Path("m/x.a3m"), ONE),
        (Path("m/near.a3m"), near),
        (Path("9abc_Z/y.a3m"), "CC" + ONE[2:]),
        (Path("f"), far),
    ]
    assert Matcher(files).find("1abc_A", ONE) == ([Path("m/x.a3m")], "")
    assert Matcher(files).find("9ABC_Z", ONE) == ([Path("9abc_Z/y.a3m"), Path("m/x.a3m")], "")
    assert Matcher(files[1:]).find("1abc_A", ONE) == ([Path("m/near.a3m")], "")
    assert Matcher(files[3:]).find("1abc_A", ONE) == ([], "")
    assert Matcher([]).find("1abc_A", ONE) == ([], "")


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
    assert not list(Store(tmp_path / "store").verify())
