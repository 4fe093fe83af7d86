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
