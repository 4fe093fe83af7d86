"""Make raw examples: alignments fit the chain exactly or are refused, and the chain's arrays are copied."""

from datetime import date

import numpy as np

from warpfold.data.example.raw_example import check_map, from_chain, from_sequence, place_alignment
from warpfold.data.features.choose import SampleConfig
from warpfold.data.features.make import make_features
from warpfold.data.formats.alignment import Alignment, decode, encode, parse_a3m
from warpfold.data.similar.pairwise import column_map
from warpfold.data.structure.chain import Chain, Structure
from warpfold.geometry.residue import GAP

SEQUENCE = "MKVLAAGIVGLCAKWDERSTFYHNQPMEAL"


def alignment(*rows: str) -> Alignment:
    return parse_a3m("".join(f">{i}\n{row}\n" for i, row in enumerate(rows)))


def structure_of(sequence: str) -> tuple[Structure, Chain]:
    rng = np.random.default_rng(0)
    n = len(sequence)
    positions, mask = rng.normal(size=(n, 37, 3)).astype(np.float32), np.ones((n, 37), np.float32)
    chain = Chain("A", sequence, positions, mask, np.arange(n), ("",) * n)
    return Structure("1abc", "X-RAY DIFFRACTION", 1.8, date(2001, 2, 3), {"A": chain}), chain


def test_an_alignment_of_the_sequence_itself() -> None:
    raw = from_sequence("ACDE", [alignment("ACDE", "A-wyDE", "A-DE", "GGGG", "----")])
    assert raw.sequence == "ACDE"
    # A-DE repeats a row (insertions do not count), and ---- has only gaps
    np.testing.assert_array_equal(raw.msa, [[0, 4, 3, 6], [0, GAP, 3, 6], [7, 7, 7, 7]])
    np.testing.assert_array_equal(raw.deletions, [[0] * 4, [0, 0, 2, 0], [0] * 4])
    expected = [[(raw.msa[:, n] == code).mean() for code in range(22)] for n in range(4)]
    np.testing.assert_allclose(raw.profile, expected, atol=1e-7)
    np.testing.assert_array_equal(raw.residue_index, [0, 1, 2, 3])


def test_letters_beside_the_twenty_are_as_the_official_code_has_them() -> None:
    """They become X in the sequence (`map_unknown_to_x`); rows use the table of HHblits, the query row too."""
    letters, hhblits = "AUBZJOXC", "ACDEXXXC"
    raw = from_sequence(letters, [alignment(letters, "GUBZJOXC")])
    assert raw.sequence == "AXXXXXXC"
    assert decode(raw.msa[0]) == hhblits
    assert decode(raw.msa[1]) == "G" + hhblits[1:]
    assert raw.depth == 2
    features = make_features(raw, SampleConfig(), 0, ("test",))
    assert features["aatype"].tolist() == [0, 20, 20, 20, 20, 20, 20, 4]
    assert features["target_feat"].argmax(1).tolist() == [1, 21, 21, 21, 21, 21, 21, 5]


def test_a_precursor_is_cut_to_the_chain() -> None:
    long = "MGWLL" + SEQUENCE + "KRR"
    row = "AAAAA" + SEQUENCE[::-1] + "AAA"
    rows, deletions = place_alignment(alignment(long, row[:7] + "ggg" + row[7:], "LLLLL" + "-" * 33), SEQUENCE)
    np.testing.assert_array_equal(rows[:2], [encode(SEQUENCE), encode(SEQUENCE[::-1])])
    assert (rows[2] == GAP).all()
    assert deletions.sum() == deletions[1, 2] == 3


def test_tags_that_the_alignment_lacks_become_gaps() -> None:
    """A loop becomes gaps, too. A mutant's query is its own sequence; without an alignment it is the only row."""
    mutant = "C" + SEQUENCE[1:14] + "X" + SEQUENCE[15:]
    raw = from_sequence(mutant, [alignment(SEQUENCE, SEQUENCE[::-1])])
    assert raw.sequence == mutant
    np.testing.assert_array_equal(raw.msa[1], encode(SEQUENCE[::-1]))
    column, identity = column_map(SEQUENCE * 2, SEQUENCE + "GSGSGS" + SEQUENCE)
    np.testing.assert_array_equal(np.flatnonzero(column < 0), np.arange(30, 36))
    assert identity == 1
    assert (from_sequence("acx").sequence, from_sequence("acx").msa.shape) == ("ACX", (1, 3))  # lower case
    tagged = "GSHM" + SEQUENCE + "HHHHHH"
    raw = from_sequence(tagged, [alignment(SEQUENCE, SEQUENCE[::-1])])
    assert raw.sequence == tagged
    np.testing.assert_array_equal(raw.msa[0], encode(tagged))
    np.testing.assert_array_equal(raw.msa[1, 4:-6], encode(SEQUENCE[::-1]))
    assert (raw.msa[1, :4] == GAP).all()
    assert (raw.msa[1, -6:] == GAP).all()


def test_a_loop_cut_out_of_the_construct_counts_as_deleted() -> None:
    loop = SEQUENCE + "GGGWWPGGG" + SEQUENCE[::-1]
    other = "A" * 30 + "AAA---aaAAA" + "A" * 30
    rows, deletions = place_alignment(alignment(loop, other), SEQUENCE + SEQUENCE[::-1])
    np.testing.assert_array_equal(rows[0], encode(SEQUENCE + SEQUENCE[::-1]))
    assert (rows[1] == 0).all()
    assert deletions[1, 30] == 6 + 2
    assert deletions[1].sum() == 8
    assert deletions[0, 30] == 9


def test_rows_of_several_alignments_stand_in_order_each_once() -> None:
    a, b = alignment("ACDE", "AAAA", "CCCC"), alignment("ACDE", "CCCC", "DDDD", "ACDE")
    np.testing.assert_array_equal(from_sequence("ACDE", [a, b]).msa[:, 0], [0, 0, 4, 3])
    np.testing.assert_array_equal(from_sequence("ACDE", [b, a]).msa[:, 0], [0, 4, 3, 0])


def test_deletions_beyond_sixteen_bits_are_cut_off_not_wrapped() -> None:
    rows = np.array([[0, 1], [0, 1]], np.uint8)
    huge = Alignment(rows, np.array([[0, 0], [0, 70_000]], np.int32), ["a", "b"])
    assert place_alignment(huge, "AR")[1][1, 1] == 65_535


def test_a_chain_brings_its_coordinates() -> None:
    structure, chain = structure_of(SEQUENCE)
    raw = from_chain("1abc_A", structure, chain)
    assert (raw.resolution, raw.release_date, raw.sources) == (1.8, "2001-02-03", ())
    np.testing.assert_array_equal(raw.positions, chain.positions)


def test_an_alignment_of_half_the_residues_is_accepted() -> None:
    assert check_map(np.array([-1, 0]), 0.95) is None
