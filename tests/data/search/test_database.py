"""Read FASTA databases in chunks of any size: records, surveys, refusals; names and limits of databases; outputs."""

import gzip
import hashlib
import json
from functools import partial
from pathlib import Path

import pytest

from warpfold.data.search import database
from warpfold.data.search.database import (
    Database,
    Survey,
    check_output,
    parse_max_hits,
    read_chunks,
    survey_fasta,
    unsearchable_reason,
)
from warpfold.errors import UserError

RECORDS = [
    ">a first protein\nMKV\nLLW\n",
    ">b\n\n",
    ">c mol:protein length:5\r\nACDE*\r\n",
    ">d mol:na length:4  DNA\nACGT0123\n",
    "> e blank before the name\nmkvx\n",
    ">f mol:na length:8  RNA\nACGU>not a header\n",
    ">g mentions >mol:na in its name\nWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWW\n",
    ">h last\nGG",
]
TEXT = "".join(RECORDS).encode()


NUCLEIC = "looks like nucleic acids (only A, C, G, T, U, N). Pass a protein database."
ILLEGAL = "which is not an amino acid. Correct or remove it (a database has no gaps)"


def refusal(path: Path, read: object = survey_fasta) -> str:
    with pytest.raises(UserError) as caught:
        list(read(path)) if read is read_chunks else read(path)  # type: ignore[operator]
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value).removeprefix(f"{path}: ")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "db.fasta"


@pytest.mark.parametrize("size", [*range(6, 60), 1000])
def test_chunks_have_whole_records(path: Path, size: int) -> None:
    """The records of nucleic acids are left out, wherever the file is cut."""
    path.write_bytes(b"\xef\xbb\xbf\n " + TEXT)
    chunks = list(read_chunks(path, size))
    assert all(chunk.startswith(b">") for chunk in chunks)
    read = b"".join(chunk + b"\n" * (not chunk.endswith(b"\n")) for chunk in chunks)
    proteins = [record for record in RECORDS if " mol:na " not in record]
    # A chunk with nucleic acids is written anew, without blank lines at the ends of records.
    assert read.split() == "".join(proteins).encode().split()
    records = sum(chunk.count(b"\n>") + chunk.startswith(b">") for chunk in chunks)
    assert records == len(proteins)
    if size == 1000:
        assert len(chunks) == 1
    # A chunk ends with the block in which the next record starts.
    assert max(map(len, chunks)) <= max(map(len, RECORDS)) + size


def test_chunks_without_nucleic_acids_are_the_file(path: Path) -> None:
    proteins = [record for record in RECORDS if " mol:na " not in record]
    path.write_text("".join(proteins))
    packed = path.with_name("packed")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for size in range(1, 80):
        chunks = list(read_chunks(path, size))
        assert b"".join(chunks) == path.read_bytes()
        assert all(chunk.endswith(b"\n") for chunk in chunks[:-1])
        assert list(read_chunks(packed, size)) == chunks
        if size == 1:
            assert [chunk.decode() for chunk in chunks] == proteins
    assert list(read_chunks(path)) == [path.read_bytes()]


def test_nucleic_acids_are_left_out_of_a_chunk() -> None:
    chunk = b">a mol:protein\nMK\n\n>b mol:na x\nAC\n>c\nmol:na \n MK mol:na \n>d mol:na x"
    assert database._drop_nucleic(chunk) == b">a mol:protein\nMK\n>c\nmol:na \n MK mol:na\n"
    assert database._drop_nucleic(b">a mol:na x\nAC\n") == b""
    assert database._drop_nucleic(b">a\nMK\n\n") == b">a\nMK\n\n"


def test_a_file_that_is_no_database_is_refused(path: Path) -> None:
    for data, message in (
        (b"", "is empty. Pass a FASTA database."),
        (b"\xef\xbb\xbf \n\n", "is empty. Pass a FASTA database."),
        (b"MKV\n>a\nMKV\n", "does not start with a '>' header line. Pass a FASTA database."),
    ):
        path.write_bytes(data)
        assert refusal(path) == refusal(path, read_chunks) == message
    path.write_bytes(gzip.compress(TEXT)[:-5])
    assert "cut short" in refusal(path)


@pytest.mark.parametrize("size", [7, 20, 50, 1000])
def test_a_survey_counts_records_and_residues(path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    proteins = "".join(record for record in RECORDS if " mol:na " not in record)
    path.write_text(proteins)
    monkeypatch.setattr(database, "read_chunks", partial(read_chunks, size=size))
    reported: list[tuple[int, int]] = []
    survey = survey_fasta(path, lambda done, total: reported.append((done, total)))
    digest = hashlib.blake2b(proteins.encode(), digest_size=16).hexdigest()
    assert survey == survey_fasta(path) == Survey(digest, 6, 6 + 0 + 5 + 4 + 38 + 2)
    assert reported[-1] == (6, 0)
    assert reported == sorted(reported)
    assert len(reported) == len(list(read_chunks(path, size)))


@pytest.mark.parametrize("size", [3, 11, 1000])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (">a\nMK\n>\nMK\n", "record 2 has no name. Give every sequence a name"),
        (">a\nMK\n>b\nMK\n> \t\nMK\n>\n", "record 3 has no name. Give every sequence a name"),
        (
            ">a\nMK\n>b c\nMKV\n M-K\n",
            f"record 2, 'b', position 5 has '-', {ILLEGAL}",
        ),
        (
            ">a\nMK\n>b c\n1MK2\n>c\n-\n",
            f"record 2, 'b', position 1 has '1', {ILLEGAL}",
        ),
        (b">a\nMK\n>b \xff\nMK\n", "record 2, 'b', is not UTF-8 text. Save the file as UTF-8"),
        (b">a\nMK\n>\xff b\nMK\n", "record 2, '\ufffd', is not UTF-8 text. Save the file as UTF-8"),
        (">a\n\n>b\n", "has no sequences. Fetch the file again."),
        (
            ">a\nACGTACGTACGT\n>b\nACGUACGUNN\n",
            "looks like nucleic acids (only A, C, G, T, U, N). Pass a protein database.",
        ),
    ],
)
def test_a_survey_names_the_first_bad_record(
    path: Path, text: str | bytes, message: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    monkeypatch.setattr(database, "read_chunks", partial(read_chunks, size=max(size, 4)))
    assert refusal(path) == message


def test_one_protein_makes_a_protein_database(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "read_chunks", partial(read_chunks, size=4))
    for records in ((">a\nMKVLLW\n", ">b\nACGTACGTACGT\n"), (">b\nACGTACGTACGT\n", ">a\nMKVLLW\n"), (">a\nGAGA\n",)):
        path.write_text("".join(records))
        assert survey_fasta(path).records == len(records)


def test_defaults_of_databases(path: Path) -> None:
    assert database.CHUNK == 32 * 2**20
    assert Survey("x") == Survey("x", 0, 0)
    path.write_bytes(TEXT)
    assert list(read_chunks(path)) == list(read_chunks(path, 32 * 2**20))


# ---- names, limits and outputs


def test_databases_are_named_after_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text, name, file in (
        ("x.fasta", "x", "x.fasta"),
        ("dir/Some.v2.FA.gz", "Some.v2", "dir/Some.v2.FA.gz"),
        ("y=z.fa", "y", "z.fa"),
        ("y+1=a=b.fa", "y+1", "a=b.fa"),
        ("a.faa", "a", "a.faa"),
        ("a.fsa.txt", "a", "a.fsa.txt"),
    ):
        assert Database.parse(text) == Database(name, Path(file))
    (tmp_path / "real=file.fa").touch()
    with pytest.raises(UserError) as caught:
        Database.parse("real=file.fa")
    assert str(caught.value) == (
        "--database real=file.fa: 'real=file' is not valid as a file name. Pass another one: NAME=real=file.fa."
    )
    for text, name in (("=x.fa", ""), ("é=x.fa", "é"), ("-a=x.fa", "-a"), ("a b=x.fa", "a b")):
        with pytest.raises(UserError) as caught:
            Database.parse(text)
        assert str(caught.value) == (
            f"--database {text}: {name!r} is not valid as a file name. Pass another one: NAME=x.fa."
        )
    assert Database.parse("uniref90x.fa", {"uniref90x": 3}).max_rows == 3
    assert Database.parse("x.fa", {"uniref90x": 3}).max_rows is None
    assert Database.parse("xuniref90.fa").max_rows is None


def test_limits_of_rows() -> None:
    assert parse_max_hits(["7", "a=2", "b=c=30"]) == {"": 7, "a": 2, "b=c": 30}
    assert parse_max_hits([]) == {}
    for text in ("1", "0", "a=1", "x", "a=", "-3", "2.5"):
        with pytest.raises(UserError) as caught:
            parse_max_hits(["9", text])
        assert str(caught.value) == (
            f"--max-hits {text}: not N or NAME=N. Pass a number from 2 on, which includes the query."
        )


@pytest.mark.parametrize(
    ("sequence", "longest", "reason"),
    [
        ("MKV", None, None),
        ("MKV", 3, None),
        ("MKVL", 3, "4 residues, more than HMMER's 3. Search for its domains"),
        ("ACGTACGTAC", None, "looks like nucleic acid (only A, C, G, T, U, N). WarpFold searches for proteins"),
        ("XXXX", 4, "has none of the 20 amino acids, so there is nothing to search for"),
        ("JOX", None, "has none of the 20 amino acids, so there is nothing to search for"),
        ("XXV", None, None),
        ("BBB", None, None),
    ],
)
def test_what_cannot_be_searched_for(sequence: str, longest: int | None, reason: str | None) -> None:
    assert unsearchable_reason(sequence, longest) == reason


@pytest.mark.parametrize(
    ("files", "accepted"),
    [
        ({}, True),
        ({".hidden": ""}, True),
        ({"cache/x": ""}, True),
        ({"cache/x": "", "other": ""}, False),
        ({"search.json": json.dumps({"format": "warpfold-search-1"}), "p0/x.a3m": ""}, True),
        ({"search-1-of-2.json": json.dumps({"format": "warpfold-search-1"}), "search-2-of-2.json": "["}, True),
        ({"search.json": json.dumps({"format": "other"})}, False),
        ({"search.json": json.dumps(["format"])}, False),
        ({"search.json": "[" * 100_000}, False),
        ({"search.json": ""}, False),
        ({"other.json": json.dumps({"format": "warpfold-search-1"})}, False),
    ],
)
def test_an_output_is_new_or_that_of_a_search(files: dict[str, str], accepted: bool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    check_output(out)
    for name, text in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
    if accepted:
        check_output(out)
    else:
        with pytest.raises(UserError) as caught:
            check_output(out)
        assert str(caught.value) == f"{out}: contains other files. Pass a new or an empty folder."
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as caught:
        check_output(tmp_path / "file")
    assert str(caught.value) == f"{tmp_path}/file: is a file. Pass a folder for the output."
