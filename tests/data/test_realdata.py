"""Read every real structure and alignment. Refusals, with their reasons, are listed here."""

import csv
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from warpfold.data.formats.alignment import parse_fasta, read_alignment
from warpfold.data.structure.chain import Structure
from warpfold.data.structure.mmcif import parse_structure, read_structure
from warpfold.data.structure.write import write_mmcif
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM_ORDER, GAP

REALDATA = (Path(__file__).parents[2] / "../shared/realdata").resolve()
pytestmark = pytest.mark.skipif(not REALDATA.is_dir(), reason="../shared/realdata is not here")

# STRUCTURES.tsv counts a residue as missing if it has no atom at all. These have atoms, but no known ones:
# ligands linked into a peptide, which are X here.
WITHOUT_KNOWN_ATOMS = {"1a2c": 1, "6lu7": 2}
# STRUCTURES.tsv has no resolution for these; the files have.
RESOLUTIONS = {"1kip": 2.10, "5y2e": 2.7, "6s61": 1.84, "6ydw": 4.2, "7rye": 3.9}
# They have a hit of hmmsearch instead of the query; with the query's sequence they would be read.
WITHOUT_QUERY = {"AP_TEST/pdb_hits.sto"}
SUFFIXES = {".a3m", ".a2m", ".sto", ".aln"}


def table(name: str) -> dict[str, dict[str, str]]:
    with (REALDATA / name).open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return {next(iter(row.values())): row for row in rows}


def missing(structure: Structure) -> int:
    return sum(int((~chain.mask.any(1)).sum()) for chain in structure.chains.values())


def assert_sound(structure: Structure) -> None:
    """Check what holds for every chain."""
    for chain in structure.chains.values():
        n = len(chain.sequence)
        assert chain.positions.shape == (n, 37, 3)
        assert len(chain.author_numbers) == n
        assert np.isfinite(chain.positions).all()
        assert not chain.positions[chain.mask == 0].any()
        bonds = [ATOM_ORDER[name] for name in ("N", "CA")]
        both = chain.mask[:, bonds].all(1)
        lengths = np.linalg.norm(np.diff(chain.positions[both][:, bonds], axis=1), axis=-1)
        assert np.median(lengths) == pytest.approx(1.46, abs=0.05)  # N to CA, Engh and Huber 1991: 1.458


def test_every_entry_parses_and_agrees_with_the_catalogue() -> None:
    wanted = table("STRUCTURES.tsv")
    paths = sorted((REALDATA / "mmcif").iterdir())
    assert len(paths) == len(wanted) == 213
    for path in paths:
        structure = read_structure(path)
        assert_sound(structure)
        name = path.name.split(".")[0]
        row, chains = wanted[name], structure.chains.values()
        assert structure.id == name.lower()
        assert structure.method.lower() == row["method"], name
        assert structure.release_date == date.fromisoformat(row["release"]), name
        assert len(chains) == int(row["prot_chains"]), name
        assert len({chain.sequence for chain in chains}) == int(row["distinct_prot"]), name
        assert max(len(chain.sequence) for chain in chains) == int(row["max_len"]), name
        assert sum(len(chain.sequence) for chain in chains) == int(row["total_res"]), name
        assert missing(structure) - WITHOUT_KNOWN_ATOMS.get(name, 0) == int(row["missing_res"]), name
        resolution = float(row["resolution"]) if row["resolution"] else RESOLUTIONS.get(name)
        assert structure.resolution == pytest.approx(resolution, abs=0.0051), name  # it has two decimals


def test_partial_entries_parse() -> None:
    paths = sorted((REALDATA / "mmcif_partial").iterdir())
    assert len(paths) == 28
    structures = {path.name.split("_")[0]: read_structure(path) for path in paths}
    for name, structure in structures.items():
        assert_sound(structure)
        assert structure.release_date == (date(2022, 7, 20) if name == "7qpd" else None)
    assert structures["2yr2"].chains["A"].author_numbers[0] == "5"  # no SEQRES: from the first residue seen
    assert structures["3nc3"].chains["A"].sequence.count("X") == 0  # SEQRES: missing residues have names
    assert missing(structures["3nc3"]) == 117
    assert list(structures["7qpd"].chains) == ["B", "T", "E", "M", "C"]  # the authors' names


def test_pdb_files_parse() -> None:
    paths = [
        *REALDATA.glob("pdb/*/*.pdb*"),
        *REALDATA.glob("msas/*/structure__*"),
        *REALDATA.glob("predictions/*/*.pdb*"),
    ]
    assert len(paths) > 60
    for path in paths:
        assert_sound(read_structure(path))
    hemoglobin = read_structure(REALDATA / "msas/1a00_A/structure__1A0Z.pdb.gz")
    assert [len(chain.sequence) for chain in hemoglobin.chains.values()] == [141, 146, 141, 146]
    assert (hemoglobin.release_date, hemoglobin.resolution) == (date(1998, 3, 18), 2.0)


def test_alignments_parse_with_and_without_their_query() -> None:
    depths: dict[str, int] = {}
    for path in sorted((REALDATA / "msas").glob("*/*")):
        fasta = path.parent / "query.fasta"
        if not SUFFIXES & set(path.suffixes) or str(path.relative_to(REALDATA / "msas")) in WITHOUT_QUERY:
            continue
        alignment = read_alignment(path)
        assert alignment.rows.max() <= GAP
        assert not (alignment.rows[0] == GAP).any()
        assert alignment.deletions.min() == 0
        depths[path.parent.name] = max(depths.get(path.parent.name, 0), len(alignment))
        if fasta.exists():
            assert np.array_equal(read_alignment(path, parse_fasta(fasta.read_bytes())[0][1]).rows, alignment.rows)
    for target, row in table("MSA_TARGETS.tsv").items():
        assert depths[target] == int(row["max_depth"]), target


def test_profile_hits_are_read_with_the_query() -> None:
    folder = REALDATA / "msas/AP_TEST"
    (name,) = WITHOUT_QUERY
    with pytest.raises(UserError, match="no row of the query"):
        read_alignment(REALDATA / "msas" / name)
    query = read_alignment(folder / "mgnify_hits.sto").query
    alignment = read_alignment(folder / "pdb_hits.sto", query)
    assert alignment.query == query
    assert [name.split()[0] for name in alignment.names[:2]] == ["query", "2n3f_A/26-46"]


def test_precursors_differ_from_their_structures() -> None:
    """The alignment of P61626 has a signal peptide, which the crystal lacks: they must not be matched silently."""
    alignment = read_alignment(REALDATA / "msas/P61626_lyso/P61626.a3m.gz")
    (chain,) = read_structure(REALDATA / "mmcif/133l.cif.gz").chains.values()
    with pytest.raises(UserError, match="148 residues, the query has 130"):
        alignment.check_query(chain.sequence)


@pytest.mark.parametrize("name", ["1crn", "1a2c", "1exb", "2jp1"])
def test_entries_survive_being_written(name: str) -> None:
    structure = read_structure(REALDATA / f"mmcif/{name}.cif.gz")
    chains = list(structure.chains.values())
    text = write_mmcif(structure.id, chains, method=structure.method, resolution=structure.resolution)
    back = parse_structure(text)
    assert (back.id, back.method, back.resolution) == (structure.id, structure.method, structure.resolution)
    for actual, chain in zip(back.chains.values(), chains):
        assert (actual.id, actual.sequence, actual.author_numbers) == (chain.id, chain.sequence, chain.author_numbers)
        assert np.array_equal(actual.mask, chain.mask)
        assert np.abs(actual.positions - chain.positions).max() < 6e-4
