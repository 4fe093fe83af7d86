"""Unpack and validate archives of an alignment server: whole results, and every reason for a refusal."""

import io
import tarfile

import pytest

from tests.data.search.alignment_server import packed
from warpfold.data.search import answer
from warpfold.data.search.answer import DamagedAnswer, read_pairs, read_rows, unpack_answer

ONE, TWO = "MKTAYIAKQR", "GSHMLEER"


def unpacked(files: dict[str, str | bytes], limit: int = 10**6) -> dict[str, str]:
    return unpack_answer(io.BytesIO(packed(files)), limit)


def refusal(*arguments: object, read: object = unpack_answer) -> str:
    with pytest.raises(DamagedAnswer) as caught:
        read(*arguments)  # type: ignore[operator]
    return str(caught.value)


def test_alignments_and_hits_are_unpacked_by_name() -> None:
    files: dict[str, str | bytes] = {
        "./uniref.a3m": ">1\nMK\n",
        "bfd.mgnify30.metaeuk30.smag30.a3m": "é",
        "pdb70.m8": "",
        "a_b+c-1.m8": "hits",
        "9.a3m": "",
        "x" * 101 + ".a3m": "long",
        # These names are ignored.
        "x" * 102 + ".a3m": "too long",
        "folder/x.a3m": "no",
        "../x.a3m": "no",
        "/x.a3m": "no",
        ".x.a3m": "no",
        "-x.a3m": "no",
        "x.a3m.sh": "no",
        "x.sto": b"\xff",
        "é.a3m": "no",
    }
    kept = {name.removeprefix("./"): text for name, text in list(files.items())[:6]}
    assert unpacked(files) == kept
    assert [*unpacked(files)] == [*kept]


def test_links_and_folders_are_ignored() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, kind in (("folder.a3m", tarfile.DIRTYPE), ("link.a3m", tarfile.SYMTYPE), ("x.a3m", tarfile.REGTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "x.a3m"
            archive.addfile(member, io.BytesIO(b""))
    assert unpack_answer(io.BytesIO(out.getvalue()), 10**6) == {"x.a3m": ""}


def test_sizes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    data = packed({"x.a3m": "x" * 3000})
    # Tar files are padded to 10,240 bytes.
    assert unpack_answer(io.BytesIO(data), 10_240) == {"x.a3m": "x" * 3000}
    monkeypatch.setattr(answer, "_CHUNK", 1000)
    assert unpack_answer(io.BytesIO(data), 10_240) == {"x.a3m": "x" * 3000}
    assert refusal(io.BytesIO(data), 10_239) == "has more than 0.010239 MB when unpacked"
    for count in (1000, 1001):
        many = packed({f"{i}.txt": "" for i in range(count - 1)} | {"x.a3m": ""})
        if count == 1000:
            assert unpack_answer(io.BytesIO(many), 10**7) == {"x.a3m": ""}
        else:
            assert refusal(io.BytesIO(many), 10**7) == "has more than 1000 files"


def test_archives_that_are_damaged() -> None:
    assert refusal(io.BytesIO(packed({"x.m8": "hits", "x.txt": "text"})), 10**6) == "has no alignment"
    assert refusal(io.BytesIO(packed({"x.a3m": b"\xff"})), 10**6) == "is not text"
    assert refusal(io.BytesIO(b"text"), 10**6) == "is not a complete tar.gz (Not a gzipped file (b'te'))"
    whole = packed({"x.a3m": "x"})
    assert refusal(io.BytesIO(whole[:-9]), 10**6).startswith("is not a complete tar.gz (Compressed file ended")


def test_rows_start_with_the_sequence() -> None:
    masked = ONE.replace("Y", "X")
    files = {
        "a.a3m": f">101 name\n{masked}\n>hit one\n{ONE[:-1]}-\n\0",
        "b.a3m": f"\0\n>101\n{ONE[:4]}\n{ONE[4:]}\n",
        "c.m8": "101\thit\0\n\x00102\thit\n",
    }
    assert read_rows(files, ONE) == {
        "a.a3m": f">query\n{ONE}\n>hit one\n{ONE[:-1]}-\n",
        "b.a3m": f">query\n{ONE}\n",
        "c.m8": "101\thit\n102\thit\n",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f">1\n{ONE}\n\0>2\n{ONE}\n\0", "has 2 alignments in x.a3m instead of one"),
        ("\0\n\0", "has no alignment in x.a3m"),
        ("", "has no alignment in x.a3m"),
        (f"{ONE}\n", "has no alignment in x.a3m"),
        (f">1\n{ONE}\n\0{ONE}\n\0", "has no alignment in x.a3m"),
        (f">1\n{ONE}A\n", "is of another sequence in x.a3m (MKTAYIAKQRA ..., 11 residues)"),
        (f">1\n{'MKTAYIAKQW' * 3}\n", "is of another sequence in x.a3m (MKTAYIAKQWMKTAYIAKQW ..., 30 residues)"),
        (f">1\n{ONE[:-1]}A\n", "is of another sequence in x.a3m (MKTAYIAKQA ..., 10 residues)"),
    ],
)
def test_rows_of_something_else_are_refused(text: str, message: str) -> None:
    assert refusal({"x.a3m": text}, ONE, read=read_rows) == message


def test_rows_that_are_no_alignment_are_refused() -> None:
    assert "not an amino acid" in refusal({"x.a3m": ">1\nMK1\n"}, ONE, read=read_rows)
    assert "x.a3m" in refusal({"x.a3m": f">1\n{ONE}\n>hit\nMK\n"}, ONE, read=read_rows)
    # X of the answer stands for any residue, X of the query for itself only.
    masked = ONE.replace("Y", "X")
    assert "is of another sequence" in refusal({"x.a3m": f">1\n{ONE}\n"}, masked, read=read_rows)


def pair_text(*entries: tuple[str, str, int]) -> str:
    """Write an alignment per entry: number, sequence, and count of further rows."""
    return "".join(
        f">{number}\n{sequence}\n" + "".join(f">hit{i}\n{sequence}\n" for i in range(depth)) + "\0"
        for number, sequence, depth in entries
    )


def test_pairs_are_joined_in_the_order_of_the_sequences() -> None:
    text = pair_text(("8", TWO, 2), ("7", ONE, 2)).replace(">8\n", ">8 text\twith blanks\n")
    wanted = "\0".join(f">query\n{s}\n>hit0\n{s}\n>hit1\n{s}\n" for s in (ONE, TWO))
    assert read_pairs({"pair.a3m": text, "x.m8": "no"}, [ONE, TWO], 7) == {"pair.a3m": wanted}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (pair_text(("7", ONE, 1)), "has 1 alignments in pair.a3m instead of 2"),
        (pair_text(("7", ONE, 1), ("9", TWO, 1)), "has 2 alignments in pair.a3m instead of 2"),
        (pair_text(("7", ONE, 1), ("8", TWO, 1), ("9", TWO, 1)), "has 3 alignments in pair.a3m instead of 2"),
        (pair_text(("8", ONE, 1), ("7", TWO, 1)), "is of another sequence in pair.a3m (GSHMLEER ..., 8 residues)"),
        (
            pair_text(("7", ONE, 2), ("8", TWO, 1)),
            "has alignments of different depth in pair.a3m, which cannot be pairs",
        ),
    ],
)
def test_pairs_that_do_not_fit_are_refused(text: str, message: str) -> None:
    assert refusal({"pair.a3m": text}, [ONE, TWO], 7, read=read_pairs) == message
