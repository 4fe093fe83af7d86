"""Make raw examples: alignments fit the chain exactly or are refused, and the chain's arrays are copied."""

from dataclasses import replace
from datetime import date

import numpy as np
import pytest

from tests.data.examples import example, templates
from warpfold.data.example import raw_example
from warpfold.data.example.pairing import make_pairing
from warpfold.data.example.raw_example import (
    MIN_CONFIDENCE,
    Assembly,
    RawExample,
    as_slice,
    check_map,
    compute_profile,
    concatenate_templates,
    from_chain,
    from_sequence,
    mask_residues,
    merge,
    place_alignment,
)
from warpfold.data.features.choose import SampleConfig
from warpfold.data.features.make import make_features
from warpfold.data.formats.alignment import Alignment, decode, encode, parse_a3m
from warpfold.data.similar.pairwise import column_map
from warpfold.data.structure.chain import Chain, Structure
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM_ORDER, GAP

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


@pytest.mark.parametrize(
    ("column", "identity", "reason"),
    [
        ([-1, 0], 0.9, None),
        ([-1, 0], 0.899, "covers 1 of 2 residues, 90% identical"),
        ([-1, 0, -1], 1.0, "covers 1 of 3 residues, 100% identical"),
        ([0, 1, -1], 0.95, None),
    ],
)
def test_an_alignment_of_half_the_residues_is_accepted(column: list[int], identity: float, reason: str | None) -> None:
    expected = reason and f"its query is another protein, or too small a fragment: {reason} (90% and half are needed)"
    assert check_map(np.array(column), identity) == expected


def test_an_alignment_of_another_protein_is_refused() -> None:
    with pytest.raises(UserError) as error:
        place_alignment(alignment("WWWWWWWWWW"), "MKTAYIAKQR")
    assert str(error.value) == (
        "alignment: its query is another protein, or too small a fragment: covers 10 of 10 residues, 0% identical "
        "(90% and half are needed). Pass the alignment of this protein."
    )


def test_sequences_that_cannot_be_examples() -> None:
    with pytest.raises(UserError) as error:
        from_sequence("", name="q")
    assert str(error.value) == "q: no residues. Pass an amino acid sequence."
    unknown = Alignment(np.full((1, 3), 20, np.uint8), np.zeros((1, 3), np.int32), ["q"])
    with pytest.raises(UserError) as error:
        from_sequence("XJO", [unknown])
    assert str(error.value) == (
        "query: every residue is unknown (X), so it cannot be aligned. Pass an amino acid sequence."
    )
    assert (from_sequence("XJO").sequence, from_sequence("XJO").name) == (3 * "X", "query")
    assert from_sequence("XAO", [alignment("XAO")]).depth == 1
    with pytest.raises(UserError, match="q: has '1' at position 2"):
        from_sequence("A1", name="q")


@pytest.mark.parametrize("seed", range(4))
def test_residues_that_the_chain_lacks_count_as_deletions_except_at_the_ends(seed: int) -> None:
    rng = np.random.default_rng(seed)
    query, chain = "GWWH" + SEQUENCE + "KRRW", SEQUENCE[:9] + SEQUENCE[13:24] + SEQUENCE[25:]
    columns = [*range(4, 13), *range(17, 28), *range(29, 34)]
    rows = rng.choice([0, 5, GAP], (5, len(query))).astype(np.uint8)
    rows[0] = encode(query)
    inserted = rng.choice([0, 0, 1, 3, 70_000], rows.shape).astype(np.int32)
    placed, deletions = place_alignment(Alignment(rows, inserted, [""] * 5), chain)
    expected = np.zeros((5, len(chain)), int)
    for n in range(5):
        # The first residue has its own insertions only.
        before = columns[0] - 1
        for at, column in enumerate(columns):
            passed = range(before + 1, column)
            count = inserted[n, column] + sum(inserted[n, c] + (rows[n, c] != GAP) for c in passed)
            expected[n, at], before = min(count, 65_535), column
    np.testing.assert_array_equal(deletions, expected)
    np.testing.assert_array_equal(placed, rows[:, columns])
    assert (placed.dtype, deletions.dtype) == (np.uint8, np.uint16)


def test_residues_after_the_first_one_may_be_missing() -> None:
    rows = alignment(SEQUENCE, SEQUENCE[0] + "-W" + SEQUENCE[3:])
    deletions = place_alignment(rows, SEQUENCE[0] + SEQUENCE[3:])[1]
    assert [{n: int(row[n]) for n in np.flatnonzero(row)} for row in deletions] == [{1: 2}, {1: 1}]


def test_a_chain_starts_with_the_insertions_of_its_first_residue() -> None:
    tagged = "HHH" + SEQUENCE
    inserted = np.zeros((2, 30), np.int32)
    inserted[1, [0, 7]] = 2, 4
    rows = np.stack([encode(SEQUENCE)] * 2)
    deletions = place_alignment(Alignment(rows, inserted, ["", ""]), tagged)[1]
    assert {n: int(deletions[1, n]) for n in np.flatnonzero(deletions[1])} == {3: 2, 10: 4}
    assert not deletions[0].any()


def test_rows_are_stacked_once_and_keep_their_first_deletions() -> None:
    query = encode("ACDE")
    first = (np.stack([query, encode("AAAA"), query, np.full(4, GAP, np.uint8)]), np.arange(16).reshape(4, 4))
    second = (np.stack([query, encode("AAAA"), encode("CCCC")]), np.arange(20, 32).reshape(3, 4))
    msa, deletions = merge(query, [(rows, counts.astype(np.uint16)) for rows, counts in (first, second)])
    assert [decode(row) for row in msa] == ["ACDE", "AAAA", "CCCC"]
    np.testing.assert_array_equal(deletions, [[0] * 4, [4, 5, 6, 7], [28, 29, 30, 31]])
    assert [array.shape for array in merge(query, [])] == [(1, 4), (1, 4)]
    assert (msa.dtype, deletions.dtype, merge(query, [])[1].dtype) == (np.uint8, np.uint16, np.uint16)


@pytest.mark.parametrize("rows", [1, 7, 1024])
def test_the_profile_is_the_frequency_in_each_column(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_example, "PROFILE_ROWS", rows)
    msa = np.random.default_rng(0).integers(0, 22, (30, 5)).astype(np.uint8)
    profile = compute_profile(msa)
    assert (profile.shape, profile.dtype) == ((5, 22), np.float32)
    expected = [[(msa[:, n] == code).mean() for code in range(22)] for n in range(5)]
    np.testing.assert_allclose(profile, expected, rtol=0, atol=1e-7)


# ---- parts of an example


def whole() -> RawExample:
    """Return an example with every array."""
    raw = example(length=9, depth=12)
    species = np.arange(len(raw.msa), dtype=np.uint64)
    return replace(
        raw,
        templates=templates(5, 9),
        pairing=make_pairing(raw.msa, species, np.ones(len(raw.msa), bool)),
        confidence=np.array([10, 49.5, 50, 90, 50, 0, 100, 60, 70], np.float16),
    )


@pytest.mark.parametrize("residues", [slice(2, 6), np.array([2, 3, 4, 5]), np.array([0, 4, 7]), np.array([], int)])
@pytest.mark.parametrize("rows", [None, np.array([0, 3, 5])])
@pytest.mark.parametrize("chosen", [None, np.array([1, 4]), np.array([], int)])
def test_residues_rows_and_templates_are_selected(
    residues: slice | np.ndarray, rows: np.ndarray | None, chosen: np.ndarray | None
) -> None:
    raw = whole()
    picked = np.arange(raw.depth) if rows is None else rows
    at = np.arange(9)[residues]
    given = None if rows is None else raw.whole_rows(rows)
    for part in (raw.take(residues, rows, chosen), raw.take(residues, rows, chosen, given)):
        for name in ("aatype", "residue_index", "profile", "positions", "mask", "confidence"):
            np.testing.assert_array_equal(getattr(part, name), getattr(raw, name)[at])
        np.testing.assert_array_equal(part.msa, raw.msa[picked][:, at])
        np.testing.assert_array_equal(part.deletions, raw.deletions[picked][:, at])
        assert raw.pairing is not None
        assert part.pairing is not None
        np.testing.assert_array_equal(part.pairing.species, raw.pairing.species[picked])
        np.testing.assert_array_equal(part.pairing.digest, raw.pairing.digest[picked])
        numbers = range(5) if chosen is None else chosen.tolist()
        assert part.templates_count == len(numbers)
        if part.templates is not None:
            assert raw.templates is not None
            assert part.templates.names == tuple(f"{n}abc_A" for n in numbers)
            for name in ("aatype", "positions", "mask"):
                array = getattr(raw.templates, name)
                np.testing.assert_array_equal(getattr(part.templates, name), array[[*numbers]][:, at])
            np.testing.assert_array_equal(part.templates.sum_probs, raw.templates.sum_probs[[*numbers]])
        assert (part.templates is None) == (len(numbers) == 0)


def test_a_bare_example_has_nothing_to_select() -> None:
    raw = from_sequence("ACDEF")
    part = raw.take(slice(1, 3), templates=np.array([0]))
    assert (part.positions, part.mask, part.confidence, part.templates, part.pairing) == (None,) * 5
    assert (raw.length, raw.depth, raw.templates_count, raw.is_predicted, part.length) == (5, 1, 0, False, 2)
    assert raw.atoms(np.array([0])) is None
    assert raw.ca_positions() is None
    assert replace(raw, positions=np.zeros((5, 37, 3))).ca_positions() is None
    assert replace(raw, mask=np.zeros((5, 37))).atoms(np.array([0])) is None


def test_atoms_of_confident_residues() -> None:
    raw = whole()
    assert raw.positions is not None
    assert raw.mask is not None
    residues = np.array([0, 1, 2, 3, 5])
    for least, clear in ((MIN_CONFIDENCE, [0, 1, 4]), (50.5, [0, 1, 2, 4]), (0.0, []), (90.5, [0, 1, 2, 3, 4])):
        found = raw.atoms(residues, least)
        assert found is not None
        mask = raw.mask[residues]
        mask[clear] = 0
        np.testing.assert_array_equal(found[0], raw.positions[residues])
        np.testing.assert_array_equal(found[1], mask)
    everything = raw.atoms(residues)
    assert everything is not None
    np.testing.assert_array_equal(everything[1], raw.mask[residues])
    experimental = replace(raw, confidence=None).atoms(residues, 99.0)
    assert experimental is not None
    np.testing.assert_array_equal(experimental[1], raw.mask[residues])
    assert (raw.is_predicted, replace(raw, confidence=None).is_predicted) == (True, False)
    ca = raw.ca_positions()
    assert ca is not None
    np.testing.assert_array_equal(ca[0], raw.positions[:, ATOM_ORDER["CA"]])
    np.testing.assert_array_equal(ca[1], raw.mask[:, ATOM_ORDER["CA"]])
    mask = np.ones((3, 37), np.uint8)
    assert mask_residues(mask, None) is mask
    assert mask_residues(mask, np.array([True, False, True])).sum(1).tolist() == [37, 0, 37]


def test_indices_without_gaps_become_a_slice() -> None:
    assert as_slice(np.array([3, 4, 5])) == slice(3, 6)
    assert as_slice(np.array([7])) == slice(7, 8)
    for residues in (np.array([3, 5]), np.array([3, 4, 6]), np.array([], int)):
        assert as_slice(residues) is residues


def test_templates_of_one_chain_are_joined_in_order() -> None:
    one, two = templates(2, 4), templates(1, 4, seed=1)
    assert concatenate_templates([]) is None
    assert concatenate_templates([one]) is one
    joined = concatenate_templates([one, two])
    assert joined is not None
    assert (len(joined), joined.names) == (3, ("0abc_A", "1abc_A", "0abc_A"))
    for name in ("aatype", "positions", "mask", "sum_probs"):
        np.testing.assert_array_equal(getattr(joined, name), [*getattr(one, name), *getattr(two, name)])
    part = joined.take(np.array([0, 2]))
    assert part.names == joined.names
    for name in ("aatype", "positions", "mask"):
        np.testing.assert_array_equal(getattr(part, name), getattr(joined, name)[:, [0, 2]])
    np.testing.assert_array_equal(part.sum_probs, joined.sum_probs)


def test_entities_and_copies_are_numbered_from_1() -> None:
    chains = tuple(from_sequence(sequence) for sequence in ("AC", "DEF", "AC", "GH", "DEF", "AC"))
    assembly = Assembly("x", tuple("ABCDEF"), chains)
    assert assembly.entity_id.tolist() == [1, 2, 1, 3, 2, 1]
    assert assembly.sym_id.tolist() == [1, 1, 2, 1, 2, 3]
    assert (assembly.length, assembly.operators, assembly.fixed) == (14, None, ())
    known = replace(assembly, entities=(4, 5, 4, 6, 5, 5))
    assert known.entity_id.tolist() == [4, 5, 4, 6, 5, 5]
    assert known.sym_id.tolist() == [1, 1, 2, 1, 2, 3]
    assert (assembly.entity_id.dtype, known.entity_id.dtype) == (np.int64, np.int64)


def test_a_chain_and_its_alignments_are_an_example() -> None:
    structure, chain = structure_of(SEQUENCE)
    chain = replace(chain, residue_index=np.arange(5, 35), mask=chain.mask * 0.5)
    chain.mask[3] = 0
    rows = parse_a3m(f">q\n{SEQUENCE}\n>tr|A0A000|A0A000_RAT\n{SEQUENCE[::-1]}\n")
    raw = from_chain("1abc_A", structure, chain, [rows], ["a.a3m", "b.a3m"])
    assert (raw.name, raw.depth, raw.pairing, raw.sources) == ("1abc_A", 2, None, ("a.a3m", "b.a3m"))
    assert raw.positions is not None
    assert raw.mask is not None
    np.testing.assert_array_equal(raw.residue_index, chain.residue_index)
    np.testing.assert_array_equal(raw.mask, chain.mask > 0)
    arrays = (raw.residue_index, raw.positions, raw.mask, raw.msa, raw.deletions, raw.profile)
    types = ("int32", "float32", "uint8", "uint8", "uint16", "float32")
    assert tuple(array.dtype for array in arrays) == types
    assert from_chain("1abc_A", structure, chain, [rows], pairing=True).pairing is not None
    undated = from_chain("1abc_A", replace(structure, release_date=None), chain)
    assert (undated.release_date, undated.depth) == (None, 1)
