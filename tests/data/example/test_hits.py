"""Read the hits of HHsearch and hmmsearch: which residues are aligned, and which files are refused."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from warpfold.data.example.hits import Hit, parse_hhr, parse_hits, read_hits
from warpfold.errors import UserError
from warpfold.geometry.residue import RESTYPES

REALDATA = (Path(__file__).parents[3] / "../shared/realdata").resolve()
QUERY = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ"


def random_rows(rng: np.random.Generator, query: str = QUERY) -> tuple[int, str, int, str]:
    """Return a random local alignment: first position and row of the query, and those of a random hit."""
    start = int(rng.integers(0, 8))
    top: list[str] = []
    below: list[str] = []
    for letter in query[start : int(rng.integers(20, len(query)))]:
        kind = rng.random()
        if kind < 0.1 and top:
            top.append("-")
            below.append(RESTYPES[rng.integers(20)])
        top.append(letter)
        below.append("-" if kind > 0.85 and top[1:] else RESTYPES[rng.integers(20)])
    return start, "".join(top), int(rng.integers(0, 90)), "".join(below)


def hhr(rows: list[tuple[int, str, int, str]], width: int = 13) -> str:
    """Return an .hhr file of alignments, `width` columns a line."""
    text = f"Query         q\nMatch_columns {len(QUERY)}\n\n No Hit                             Prob E-value\n"
    text += "".join(f"{i + 1:3d} {i}ABC_A Something that binds   99.0 1E-20\n" for i in range(len(rows)))
    for i, (q, top, t, below) in enumerate(rows):
        aligned = sum(a != "-" != b for a, b in zip(top, below))
        text += f"\nNo {i + 1}  \n>{i}ABC_A Something; that binds\nProb=99.0  E-value=1e-20  Aligned_cols={aligned}"
        text += f"  Identities=9%  Sum_probs={10.5 + i}\n\n"
        for at in range(0, len(top), width):
            a, b = top[at : at + width], below[at : at + width]
            lines = [("Q ss_pred", None, "C" * len(a)), ("Q q", q, a), ("Q Consensus", q, a.lower())]
            lines += [("T Consensus", t, b.lower()), (f"T {i}ABC_A", t, b), ("T ss_dssp", None, "H" * len(b))]
            for name, first, letters in lines:
                last = "" if first is None else f" {first + sum(map(str.isalpha, letters)):4d} (200)"
                text += f"{name:16s} {'' if first is None else first + 1:>4} {letters}{last}\n"
            q, t = q + sum(map(str.isalpha, a)), t + sum(map(str.isalpha, b))
            text += "Confidence            99999\n\n"
    return text


def pairs(hit: Hit) -> list[tuple[int, str, int, str]]:
    """Return query position and letter, hit position (in the whole sequence) and letter of each column."""
    letters = [hit.sequence[i] for i in hit.hit_index]
    return list(zip(hit.query_index.tolist(), hit.query, (hit.hit_index + hit.start).tolist(), letters))


def expected(q: int, top: str, t: int, below: str) -> list[tuple[int, str, int, str]]:
    columns = []
    for a, b in zip(top, below):
        if a != "-" != b:
            columns.append((q, a, t, b))
        q, t = q + (a != "-"), t + (b != "-")
    return columns


@pytest.mark.parametrize("seed", range(5))
def test_hhr_columns(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [random_rows(rng) for _ in range(4)]
    hits = parse_hits(hhr(rows, width=int(rng.integers(5, 60))), QUERY)
    assert [pairs(hit) for hit in hits] == [expected(*row) for row in rows]
    assert [hit.sequence for hit in hits] == [row[3].replace("-", "") for row in rows]
    assert [(hit.pdb_id, hit.chain, hit.sum_probs) for hit in hits] == [(f"{i}abc", "A", 10.5 + i) for i in range(4)]
    assert hits[0].description == "Something; that binds"


def test_a_cut_hhr_is_refused_wherever_it_is_cut() -> None:
    rng = np.random.default_rng(1)
    text = hhr([random_rows(rng) for _ in range(2)])
    whole = [pairs(hit) for hit in parse_hhr(text)]
    with pytest.raises(UserError, match="cut short"):
        parse_hhr(text[: text.index(" No Hit ") + 12])
    last_letters = text.rindex("T 1ABC_A")
    ends = text.index("\n", last_letters)
    for cut in range(text.index("  1 0ABC_A") + 5, len(text)):
        if cut < ends:
            with pytest.raises(UserError, match="cut short"):
                parse_hhr(text[:cut])
        else:
            assert [pairs(hit) for hit in parse_hhr(text[:cut])] == whole


def test_names_without_a_chain_and_other_names() -> None:
    text = hhr([(0, QUERY, 0, QUERY)])
    for name, pdb_id, chain in (("2wga", "2wga", ""), ("my_fold_B", "my_fold", "B"), ("PF03676.14", "pf03676.14", "")):
        (hit,) = parse_hhr(text.replace(">0ABC_A", f">{name}"))
        assert (hit.name, hit.pdb_id, hit.chain) == (name, pdb_id, chain)


def test_hits_of_another_query_are_refused() -> None:
    text = hhr([(3, QUERY[3:25], 0, QUERY[3:25])])
    parse_hits(text, QUERY[:5] + "XX" + QUERY[7:])
    with pytest.raises(UserError, match=r"f\.hhr: its hits are of another sequence"):
        parse_hits(text, QUERY[::-1], "f.hhr")
    with pytest.raises(UserError, match="another sequence"):
        parse_hits(text, QUERY[:20])


def stockholm(rows: list[tuple[str, str, str]], reference: str, width: int = 11) -> str:
    """Return a Stockholm file in blocks. rows: (name, description, letters)."""
    text = "# STOCKHOLM 1.0\n#=GF ID q\n\n"
    text += "".join(f"#=GS {name} DE {note}\n" for name, note, _ in rows) + "\n"
    for at in range(0, len(reference), width):
        for name, _, letters in rows:
            part = letters[at : at + width]
            text += f"{name:16s} {part}\n#=GR {name:11s} PP {'9' * len(part)}\n"
        text += f"#=GC RF          {reference[at : at + width]}\n\n"
    return text + "//\n"


QUERY_5 = "MKTAY"
RF = "..xx.xxx."
ROWS = [
    ("1abc_A/3-9", "[subseq from] mol:protein length:20  LYSOZYME", "g.MKw-AYt"),
    ("1abc_B/1-3", "mol:protein length:3", "..-K.-AV."),
    ("9xyz_C/1-5", "mol:na length:5  RNA", "..MK.TAY."),
    ("1abc_A/3-9", "[subseq from] mol:protein length:20  LYSOZYME", "g.MKw-AYt"),  # databases list some entries twice
]


def test_hmmsearch_columns() -> None:
    hits = parse_hits(stockholm(ROWS, RF), QUERY_5)
    assert [hit.name for hit in hits] == ["1abc_A", "1abc_B", "1abc_A"]
    first, second, _ = hits
    assert (first.sequence, first.start, first.sum_probs) == ("GMKWAYT", 2, None)
    assert pairs(first) == [(0, "M", 3, "M"), (1, "K", 4, "K"), (3, "A", 6, "A"), (4, "Y", 7, "Y")]
    assert pairs(second) == [(1, "K", 0, "K"), (3, "A", 1, "A"), (4, "Y", 2, "V")]
    assert first.description.endswith("LYSOZYME")


def test_hmmsearch_as_a3m_is_the_same() -> None:
    records = [
        (name, note, "".join(c.upper() if r == "x" else c.lower() for c, r in zip(letters, RF)).replace(".", ""))
        for name, note, letters in ROWS
    ]
    a3m = "".join(f">{name} {note}\n{letters}\n" for name, note, letters in records)
    for hit, other in zip(parse_hits(stockholm(ROWS, RF), QUERY_5), parse_hits(a3m, QUERY_5), strict=True):
        assert (hit.name, hit.sequence, pairs(hit)) == (other.name, other.sequence, pairs(other))


def test_a_row_that_is_the_query_says_which_columns_are_its_own() -> None:
    for text in (
        stockholm([("q", "the query", "MK-TAY"), ("1abc_A/1-6", "", "MKWTAY")], "xxxxxx"),
        ">q\nMK-TAY\n>1abc_A/1-6\nMKWTAY\n",
        ">q\nMK-TAY\n>1abc_A/1-6\nMKwTAY\n",  # aligned FASTA in hmmsearch's letters
    ):
        hit = parse_hits(text, QUERY_5)[1]
        assert pairs(hit) == [(0, "M", 0, "M"), (1, "K", 1, "K"), (2, "T", 3, "T"), (3, "A", 4, "A"), (4, "Y", 5, "Y")]


LONG = "9" * 5000  # int() refuses so many digits, and int64 holds 18
ONE_HHR = hhr([(0, QUERY[:10], 0, QUERY[:10])])


def test_nothing_found_and_numbers_of_thousands_of_digits() -> None:
    assert parse_hits("# STOCKHOLM 1.0\n//\n", QUERY_5) == parse_hits(hhr([]), QUERY) == []
    (hit,) = parse_hhr(ONE_HHR.replace("Sum_probs=", f"Sum_probs={LONG}"))
    assert hit.sum_probs is not None
    assert np.isfinite(np.float32(hit.sum_probs))
    (hit,) = parse_hits(f">1abc_A/{LONG}-{LONG} mol:protein\n{QUERY}\n", QUERY)
    assert hit.start == 0


def test_damage_is_bad_input_and_nothing_worse() -> None:
    """Files with changed, dropped and repeated letters are read or refused with a UserError."""
    rng = np.random.default_rng(0)
    files = [hhr([random_rows(rng) for _ in range(2)]), stockholm(ROWS, RF), ">a\nMKTAY\n>b_C/1-2\nM-KTA-\n> \nMKTAY\n"]
    refusals = []
    for round_ in range(600):
        text = list(files[round_ % 3])
        for place in rng.integers(0, len(text), rng.integers(1, 8)):
            text[place] = str(rng.choice([*"Xx-.:/_ #>9\n\t", "", "".join(text[place : place + 40])]))
        try:
            parse_hits("".join(text), (QUERY, QUERY_5, QUERY_5)[round_ % 3])
        except UserError as error:
            refusals.append(str(error))
    assert 100 < len(refusals) < 600
    assert not [refusal for refusal in refusals if "\n" in refusal]


def test_files_may_be_packed_and_must_be_text(tmp_path: Path) -> None:
    text = hhr([(0, QUERY, 0, QUERY)])
    (tmp_path / "a.hhr.gz").write_bytes(gzip.compress(text.encode()))
    assert len(read_hits(tmp_path / "a.hhr.gz", QUERY)) == 1
    (tmp_path / "b.hhr").write_bytes(text.replace("\n", "\r\n").encode())
    assert len(read_hits(tmp_path / "b.hhr", QUERY)) == 1
    (tmp_path / "c.hhr").write_bytes(b"\xff\xfe\x00rubbish")
    with pytest.raises(UserError, match="is not text"):
        read_hits(tmp_path / "c.hhr", QUERY)
    with pytest.raises(UserError, match="no such file"):
        read_hits(tmp_path / "d.hhr", QUERY)


# ---- real files

HHR_COUNTS = {
    "1a00_A": 267,
    "1a0g_A": 112,
    "1a2y_B": 500,
    "6kwc_A": 60,
    "A0A024R1R8": 10,
    "MGYP004658859411": 500,
    "T0900": 25,
    "T1078": 100,
    "openfold_test73": 10,
    "5ptp_A": 500,
    "hhsuite_FAM69B": 124,
}


@pytest.mark.skipif(not REALDATA.is_dir(), reason="../shared/realdata is not here")
def test_every_real_hhr_is_read() -> None:
    files = sorted((REALDATA / "templates").rglob("*.hhr*"))
    assert len(files) == 16
    for file in files:
        data = file.read_bytes()
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode()
        hits = parse_hhr(text, str(file))
        assert len(hits) == HHR_COUNTS.get(file.parent.name, len(hits)) > 0
        for hit in hits:
            assert hit.query_index.shape == hit.hit_index.shape == (len(hit.query),)
            assert (np.diff(hit.query_index) > 0).all()
            assert (np.diff(hit.hit_index) > 0).all()
            assert hit.hit_index[-1] < len(hit.sequence)


@pytest.mark.skipif(not REALDATA.is_dir(), reason="../shared/realdata is not here")
def test_real_hits_agree_with_the_official_templates() -> None:
    """Compare letters with the feature dictionary that the official pipeline made from the same .hhr."""
    with np.load(REALDATA / "features/alphapulldown_A0A024R1R8.npz", allow_pickle=False) as official:
        query = official["sequence"][0].decode()
        sequences = {text.decode() for text in official["template_sequence"]}
    for hit in read_hits(REALDATA / "templates/A0A024R1R8/pdb_hits.hhr", query):
        row = ["-"] * len(query)
        for place, index in zip(hit.query_index, hit.hit_index):
            row[place] = hit.sequence[index]
        assert "".join(row) in sequences


@pytest.mark.skipif(not REALDATA.is_dir(), reason="../shared/realdata is not here")
def test_real_hmmsearch_output_is_read() -> None:
    counts = {"7qrr_A/hmm_output.sto.gz": 481, "P61626_lyso/pdb_hits.sto.gz": 1855, "A0A024R1R8/pdb_hits.sto.gz": 1635}
    counts |= {"5s8i_A/5s8i_A_0_hmmsearch.a3m.gz": 3490}
    for name, count in counts.items():
        file = REALDATA / "templates" / name
        query = "".join((REALDATA / "msas" / file.parent.name / "query.fasta").read_text().split("\n")[1:]).strip()
        hits = read_hits(file, query)
        assert len(hits) == count
        assert max(int(hit.query_index[-1]) for hit in hits) < len(query)


# ---- exact limits and messages


def refused(text: str, query: str, source: str = "f") -> str:
    with pytest.raises(UserError) as error:
        parse_hits(text, query, source)
    return str(error.value)


def block(name: str, query: str, target: str, aligned: int, more: str = "  Sum_probs=7") -> str:
    text = f"\nNo 1\n>{name} note \nProb=9.0  Aligned_cols={aligned}{more}\n\n"
    for side, row, first in (("Q q", query, 3), (f"T {name}", target, 6)):
        text += f"{side:16s} {first:4d} {row} {first + sum(map(str.isalpha, row)) - 1:4d} (99)\n" if row else ""
    return text


def listing(*blocks: str, announced: int | None = None) -> str:
    count = len(blocks) if announced is None else announced
    text = "Query         q\n\n No Hit                             Prob\n"
    return text + "".join(f"{i:3d} x 99.0\n" for i in range(1, count + 1)) + "".join(blocks)


def test_a_whole_hhr_hit() -> None:
    text = listing(block("1abc_A", "MkT-aW", "GH-xC~", 3), block("2xyz", "MK", "MK", 2, more=""))
    first, second = parse_hhr(text)
    assert (first.name, first.description, first.query, first.sequence) == ("1abc_A", "note", "MKA", "GHXC")
    assert (first.query_index.tolist(), first.hit_index.tolist()) == ([2, 3, 5], [0, 1, 3])
    assert (first.start, first.sum_probs) == (5, 7.0)
    assert (second.query_index.tolist(), second.sum_probs) == ([2, 3], None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Query q\n", "f: has no list of hits (' No Hit ...'), so it is cut short. Make it again."),
        ("Query q\n\n No Hit ", "f: has no list of hits (' No Hit ...'), so it is cut short. Make it again."),
        (
            listing(block("1abc_A", "MK", "MK", 2), announced=2),
            "f: lists 2 hits and aligns 1, so it is cut short (or was made with -B below -Z). Make it again.",
        ),
        (
            listing(block("1abc_A", "MK", "MK", 2), "\nNo 2\n>1abc_B\nProb=9\n"),
            "f: hit 2 has no name or no scores, so it is cut short. Make the file again.",
        ),
        (
            listing("\nNo 1\nAligned_cols=2\n"),
            "f: hit 1 has no name or no scores, so it is cut short. Make the file again.",
        ),
        (
            listing(block("1abc_A", "MK-T", "MK-", 2)),
            "f: hit 1, 1abc_A, announces 2 aligned columns and has 0, so it is cut short or damaged. Make the file "
            "again.",
        ),
        (
            listing(block("1abc_A", "M", "", 1)),
            "f: hit 1, 1abc_A, announces 1 aligned columns and has 0, so it is cut short or damaged. Make the file "
            "again.",
        ),
        (
            listing(block("1abc_A", "MK", "MK", 1)),
            "f: hit 1, 1abc_A, announces 1 aligned columns and has 2, so it is cut short or damaged. Make the file "
            "again.",
        ),
        (
            "q\t1abc_A\t99.0\t50\t1\n",
            "f: is a table of MMseqs2 or BLAST hits, which has no alignments. Pass the output of HHsearch (.hhr) or "
            "hmmsearch (.sto, .a3m).",
        ),
        (
            "rubbish",
            "f: is not a supported list of template hits. Pass the output of HHsearch (.hhr) or hmmsearch (.sto, "
            ".a3m).",
        ),
    ],
)
def test_lists_of_hits_that_cannot_be_read(text: str, message: str) -> None:
    assert refused(text, QUERY) == message


def test_nine_of_ten_letters_must_be_the_querys() -> None:
    """X is not counted, and the hit must end within the query. An empty hit has nothing to compare."""
    query = "GGMKTAYIAKQR"
    same = listing(block("1abc_A", "MKTAYIAKQR", "M" * 10, 10))
    assert len(parse_hits(same, query)) == 1
    assert len(parse_hits("\ufeff \n" + same.replace("\n", "\r\n"), query)) == 1
    assert len(parse_hits(same, "GGWKTAYIAKQR")) == 1
    message = (
        "f: its hits are of another sequence than the query of {} residues (hit 1abc_A has MKTAYIAKQR at residue 3). "
        "Pass the hits of this one."
    )
    assert refused(same, "GGWKTAYIAKQW") == message.format(12)
    assert refused(same, "GGWXTAYIAKQR") == message.format(12)
    assert refused(same, query[:-1]) == message.format(11)
    second = listing(block("1abc_B", "MKTAYIAKQR", "M" * 10, 10), block("1abc_A", "MKTAYIAKQR", "M" * 10, 10))
    assert "hit 1abc_B" in refused(second, "W" * 12)
    assert len(parse_hits(listing(block("1abc_A", "XXXX", "MKTA", 4)), query)) == 1
    (empty,) = parse_hits(listing(block("1abc_A", "", "", 1)), query)
    assert (empty.query, empty.start, empty.hit_index.tolist()) == ("", 0, [])


@pytest.mark.parametrize(
    ("name", "pdb_id", "chain"),
    [
        ("1ABC_A", "1abc", "A"),
        ("pdb_00001abc_B", "1abc", "B"),
        ("PDB_00011ABC", "pdb_00011abc", ""),
        ("pdb_00001abcd_B", "pdb_00001abcd", "B"),
        ("_A", "_a", "A"),
        ("my_fold_x_B", "my_fold_x", "B"),
        ("plain", "plain", ""),
    ],
)
def test_ids_and_chains_of_names(name: str, pdb_id: str, chain: str) -> None:
    hit = Hit(name, "", "", np.zeros(0, np.int64), "", np.zeros(0, np.int64), 0)
    assert (hit.pdb_id, hit.chain, hit.sum_probs) == (pdb_id, chain, None)


def fields(hits: list[Hit]) -> list[tuple[str, str, str, list[int], str, list[int], int]]:
    return [
        (
            hit.name,
            hit.description,
            hit.query,
            hit.query_index.tolist(),
            hit.sequence,
            hit.hit_index.tolist(),
            hit.start,
        )
        for hit in hits
    ]


@pytest.mark.parametrize(
    "text",
    [
        ">1abc_A/7-11 [subseq from] mol:protein x\nM-KTAW\n>q\nM-KTAY\n>q2\nMK-TAY\n>1xyz_A mol:na\nMKKTAY\n"
        ">2xyz_A\n-W----\n>3xyz_B a note\n-W.KTXY\n",
        "# STOCKHOLM 1.0\n#=GS 1abc_A/7-11 DE [subseq from] mol:protein x\n#=GS 1xyz_A DE mol:na\n"
        "#=GS 3xyz_B DE a note\n1abc_A/7-11 M-KTAW\nq M-KTAY\nq2 MK-TAY\n1xyz_A MKKTAY\n2xyz_A -W----\n"
        "3xyz_B -WKTXY\n#=GC RF xxxxxx\n//\n",
    ],
)
def test_rows_of_hmmsearch_in_whole(text: str) -> None:
    """The first row that is the query counts. Rows of nucleic acids or without pairs are left out."""
    five = [0, 1, 2, 3, 4]
    assert fields(parse_hits(text, QUERY_5)) == [
        ("1abc_A", "mol:protein x", "MKTAY", five, "MKTAW", [0, 1, 2, 3, 4], 6),
        ("q", "", "MKTAY", five, "MKTAY", five, 0),
        ("q2", "", "MTAY", [0, 2, 3, 4], "MKTAY", [0, 2, 3, 4], 0),
        ("3xyz_B", "a note", "KTAY", [1, 2, 3, 4], "WKTXY", [1, 2, 3, 4], 0),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "# STOCKHOLM 1.0\na MKTAY\n//\n",
            "f: has no #=GC RF line, so its match columns are unknown. Pass hmmsearch's original file.",
        ),
        (
            "# STOCKHOLM 1.0\na MKTAY\nb MKTA\n#=GC RF xxxxx\n//\n",
            "f: b has 4 columns, #=GC RF 5. Make the file again.",
        ),
        (">a\nMKTAY\n>b\nMKTA\n>c\nMKT\n", "f: its rows have 3 to 5 match columns. Make the file again."),
        (
            ">a\nMKTA\n>b\nMKTW\n",
            "f: has 4 match columns, the query 5 residues. Pass the hits of this query, searched with a profile in "
            "which each of its residues is a match column (hmmbuild --hand).",
        ),
        (
            ">a\nmkt\n",
            "f: has 0 match columns, the query 5 residues. Pass the hits of this query, searched with a profile in "
            "which each of its residues is a match column (hmmbuild --hand).",
        ),
        (
            ">a/3-8\nMKTAY\n",
            "f: a/3-8 has 5 residues, not those of its range. Make the file again.",
        ),
    ],
)
def test_rows_of_hmmsearch_that_cannot_be_read(text: str, message: str) -> None:
    assert refused(text, QUERY_5) == message


def test_aligned_fasta_has_rows_of_one_length() -> None:
    """Lower case in it is a column, unless the rows have equal numbers of match columns."""
    (hit,) = parse_hits(">a/1-5\nMKtAY\n", "MKAY")
    assert (hit.query_index.tolist(), hit.hit_index.tolist()) == ([0, 1, 2, 3], [0, 1, 3, 4])
    first, second = parse_hits(">a\nMKtAY\n>b\nMKTAY\n", QUERY_5)
    assert (first.query_index.tolist(), second.query_index.tolist()) == ([0, 1, 3, 4], [0, 1, 2, 3, 4])
