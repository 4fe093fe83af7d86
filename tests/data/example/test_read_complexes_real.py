"""Pair real alignments, and compare with features of the official code where the data has them."""

from pathlib import Path

import numpy as np
import pytest

from tests.data.example.test_pairing import reference
from warpfold.data.example.pairing import hash_name, pair_rows, species_of
from warpfold.data.example.query_files import Complex, assemble
from warpfold.data.example.raw_example import from_sequence
from warpfold.data.formats.alignment import CODE_LETTERS, parse_fasta
from warpfold.data.formats.input_files import read_chain_alignments

REALDATA = (Path(__file__).parents[3] / "../shared/realdata").resolve()
pytestmark = pytest.mark.skipif(not REALDATA.is_dir(), reason="../shared/realdata is not here")
HHBLITS = "ACDEFGHIKLMNPQRSTVWYX-"  # the order of the official `msa` feature


def real(*targets: str) -> tuple[Complex, list[Path]]:
    folders = [REALDATA / "msas" / target for target in targets]
    sequences = tuple(parse_fasta((folder / "query.fasta").read_bytes())[0][1] for folder in folders)
    return Complex("real", tuple(targets), sequences), folders


def test_alignments_and_species_are_those_of_the_official_features() -> None:
    """Compare unpaired rows and the species of each with AlphaFold-Multimer's features of A0A024R1R8."""
    official = np.load(REALDATA / "features/alphapulldown_A0A024R1R8.npz", allow_pickle=False)
    query, folders = real("A0A024R1R8")
    alignments = read_chain_alignments(folders, query.sequences, "real")
    (raw,) = assemble(query, alignments)[0].chains
    assert raw.pairing is not None
    alone = raw.whole_rows(np.flatnonzero(raw.pairing.unpaired))
    codes = np.array([HHBLITS.index(chr(letter)) for letter in CODE_LETTERS])
    np.testing.assert_array_equal(codes[alone], official["msa"])
    headers = {
        name for alignment in alignments.of(query.sequences[0]) if alignment.stands_alone for name in alignment.names
    }
    ours = {species_of(name) for name in headers}
    theirs = {name.decode() for name in official["msa_species_identifiers"]} - {""}
    assert len(theirs) > 100
    assert theirs <= ours  # it also reads taxon numbers of UniRef headers
    # Rows of UniProt are only for pairing.
    assert (~raw.pairing.unpaired).sum() == len(raw.pairing) - len(official["msa"]) > 1000
    assert not raw.pairing.species[raw.pairing.unpaired].any()
    assert np.uint64(hash_name("PANTR")) in raw.pairing.species


def test_a_homodimer_with_few_sequences() -> None:
    query, folders = real("2q2k_A")
    (raw,) = assemble(query, read_chain_alignments(folders, query.sequences, "real"))[0].chains
    # The 20 rows of UniProt have three different sequences: of 51 residues, of 39, and a distant one.
    assert raw.pairing is not None
    assert (raw.depth, raw.pairing.unpaired.sum()) == (23, 20)
    species = raw.pairing.species[~raw.pairing.unpaired].tolist()
    assert species == [hash_name(name) for name in ("9STAP", "STAAU", "9STAP")]


def test_alignments_made_for_pairing_pair_by_the_rules() -> None:
    query, folders = real("1k1a_A", "7pzb_A", "102m_A")
    assembly, notes = assemble(query, read_chain_alignments(folders, query.sequences, "real"))
    assert notes == []
    pairings = [chain.pairing for chain in assembly.chains]
    assert all(one is not None for one in pairings)
    assert [int((~one.unpaired).sum()) for one in pairings if one] == [4952, 6012, 760]
    pairs = pair_rows(pairings)
    assert [tuple(rows) for rows in pairs.tolist()] == reference([one for one in pairings if one])
    assert len(pairs) == 892
    for rows in pairs[1:]:
        assert len({int(one.species[row]) for one, row in zip(pairings, rows) if one and row >= 0}) == 1


def test_headers_without_species_pair_nothing_and_it_is_said() -> None:
    query, folders = real("HBB", "PIGK")
    assembly, notes = assemble(query, read_chain_alignments(folders, query.sequences, "real"))
    assert [chain.pairing for chain in assembly.chains] == [None, None]
    assert notes
    assert "name no species" in notes[0]


@pytest.mark.parametrize(("one", "other"), [("1a00_A", "1a2y_B"), ("A0A024R1R8", "1a00_A")], ids=["a3m", "Stockholm"])
def test_rows_of_uniref_are_paired_by_their_own_organism(one: str, other: str) -> None:
    """A cluster's common taxon may be "root". The row is the sequence of its representative, which has one organism."""
    sequences = real(one, other)[0].sequences
    alignments = []
    for target, sequence in zip((one, other), sequences):
        (file,) = (REALDATA / "msas" / target).glob("uniref90_hits.*")
        alignments += read_chain_alignments([file], [sequence], "real").of(sequence)
    examples = [from_sequence(*given, pairing=True) for given in zip(sequences, ([each] for each in alignments))]
    names: list[dict[bytes, set[str]]] = [{}, {}]
    for alignment, found in zip(alignments, names):
        for row, name in zip(alignment.rows, alignment.names):
            _, _, representative = name.partition("RepID=")
            found.setdefault(row.tobytes(), set()).add(representative.partition("_")[2])
    pairs = pair_rows([each.pairing for each in examples])[1:]
    assert len(pairs) > 50
    for rows in pairs:
        organisms = [found[each.msa[row].tobytes()] for each, row, found in zip(examples, rows, names)]
        assert organisms[0] & organisms[1]
