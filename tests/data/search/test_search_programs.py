"""Search with stand-ins for MMseqs2 and hhblits, which check their arguments and write results."""

import gzip
import hashlib
import os
import re
import stat
import sys
import textwrap
from pathlib import Path

import pytest

from warpfold.data.formats.alignment import write_fasta
from warpfold.data.search import programs as searching
from warpfold.data.search.database import Database, SearchQuery, Survey
from warpfold.data.search.programs import HHblits, MMseqs2
from warpfold.data.search.search import search
from warpfold.errors import UserError

SEQUENCES = ("MKTAYIAKQRQISFVKSHFS", "GSHMWWLKDEYPRNQTV")

# A stand-in for MMseqs2: createdb, search and result2msa copy the FASTA file, and unpackdb writes one A3M file per
# sequence, in another order.
MMSEQS = """
    options = dict(zip(rest, rest[1:]))
    if command == "version":
        print("14-test")
    elif command == "createdb":
        Path(rest[1]).write_text(Path(rest[0]).read_text())
    elif command == "search":
        assert options["--num-iterations"] == "3" and options["-a"] == "1" and options["--max-seqs"] == "3"
        assert options["-e"] == options["--e-profile"] == "0.001" and options["--threads"] == "2"
        assert Path(rest[1] + ".dbtype").exists()
        Path(rest[2]).write_text(Path(rest[0]).read_text())
    elif command == "result2msa":
        assert options["--msa-format-mode"] == "6"
        Path(rest[3]).write_text(Path(rest[2]).read_text())
    elif command == "unpackdb":
        Path(rest[1]).mkdir()
        assert options["--unpack-name-mode"] == "0"
        for record in reversed(Path(rest[0]).read_text()[1:].split("\\n>")):
            name, sequence = record.split()
            row = sequence[:5] + "ll" + sequence[5:-1] + "-"
            hits = "".join(f">hit{i}\\t99\\t0.9\\t1E-9\\t0\\t8\\t9\\t2\\t{len(row)}\\t40\\n{row}\\n" for i in range(5))
            text = f">{name}\\n{sequence}\\n{hits}"
            Path(rest[1], f"key{name}" + options["--unpack-suffix"]).write_text(text)
    else:
        sys.exit(f"what is {command}?")
"""

HHBLITS = """
    if command == "-h":
        print("HHblits 3.3.0:\\nusage ...")
        sys.exit()
    options = dict(zip([command, *rest], rest))
    assert options["-n"] == "3" and options["-e"] == "0.001" and options["-maxfilt"] == "100000"
    assert options["-realign_max"] == "100000" and options["-maxseq"] == "1000000" and options["-cpu"] == "2"
    assert options["-min_prefilter_hits"] == "1000" and Path(options["-d"] + "_a3m.ffdata").exists()
    query = Path(options["-i"]).read_text()
    sequence = "".join(query.split("\\n")[1:])
    if sequence.startswith("GSHM"):
        sys.exit("first line\\nout of memory")
    Path(options["-oa3m"]).write_text(query + f">UniRef100_A some protein\\n{sequence[:-2]}--\\n")
"""


def install(folder: Path, name: str, body: str) -> None:
    """Install a Python program that runs `body` with its first argument as `command` and the others as `rest`."""
    program = folder / name
    lines = ["import sys", "from pathlib import Path", "command, *rest = sys.argv[1:]", textwrap.dedent(body)]
    program.write_text(f"#!{sys.executable}\n" + "\n".join(lines))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    install(folder, "mmseqs", MMSEQS)
    install(folder, "hhblits", HHBLITS)
    for ending in (".dbtype", "", ".index", "_a3m.ffdata", "_a3m.ffindex"):
        (tmp_path / f"db{ending}").write_text("something")
    return folder


def found(engine: MMseqs2 | HHblits, path: Path) -> list[str | UserError]:
    queries = [SearchQuery(sequence) for sequence in SEQUENCES]
    return engine.search(queries, path, Survey(""), 3, 2, lambda done, total: None)


def test_mmseqs(programs: Path) -> None:
    results = found(MMseqs2(), programs.parent / "db")
    for sequence, result in zip(SEQUENCES, results):
        row = f"{sequence[:5]}ll{sequence[5:-1]}-"
        assert result == f">hit0/3-{len(row) + 1}\n{row}\n>hit1/3-{len(row) + 1}\n{row}\n"  # of 5; with the query, 2
    assert MMseqs2().identity()["program"] == "14-test"


def test_hhblits_fails_for_one_and_says_why(programs: Path) -> None:
    good, bad = found(HHblits(), programs.parent / "db")
    assert good == f">UniRef100_A some protein\n{SEQUENCES[0][:-2]}--\n"
    assert "`hhblits -i` failed (1): first line / out of memory" in str(bad)
    assert HHblits().identity()["program"] == "HHblits 3.3.0"


@pytest.mark.parametrize("engine", [MMseqs2(), HHblits()])
def test_a_missing_program_and_another_database_are_named(
    engine: MMseqs2 | HHblits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"is not on PATH\. Install it"):
        engine.identity()
    (tmp_path / "some.fasta").write_text(">a\nMKV\n")
    with pytest.raises(UserError, match="not a database of this engine"):
        engine.survey(tmp_path / "some.fasta", lambda done, total: None)


def test_a_program_that_fails_or_answers_something_else_fails_its_queries_only(programs: Path, tmp_path: Path) -> None:
    install(programs, "hhblits", HHBLITS.replace('options["-cpu"] == "2"', "True").replace("query + f", "f"))
    install(programs, "mmseqs", MMSEQS.replace("Path(rest[1]).write_text(Path(rest[0]).read_text())", "sys.exit(7)", 1))
    query = tmp_path / "query.fasta"
    query.write_text(f">one\n{SEQUENCES[0]}\n>two\n{SEQUENCES[0]}A\n")
    for engine, said in ((HHblits(), "hhblits: its first row"), (MMseqs2(), "`mmseqs createdb` failed (7)")):
        report = search([query], [Database("db", tmp_path / "db")], tmp_path / f"out-{engine.name}", engine)
        assert report["status"] == "failed"
        assert [failure["name"] for failure in report["failures"]] == ["one", "two"]
        assert said in report["failures"][0]["error"]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace programs. Returns a list that collects their command lines, with temporary folders as TMP."""
    lines: list[str] = []

    def run(command: list[str]) -> str:
        lines.append(re.sub(r"\S*/warpfold-(mmseqs|hhblits)-\w+", r"\1", " ".join(command)))
        if "unpackdb" in command:
            rows = Path(command[3])
            rows.mkdir()
            # Query 0 has no file. The last row of query 1 is on two lines.
            text = f">1\n{SEQUENCES[1]}\n>a\t9\t1\t0\t0\t16\t17\t4\t20\t30\n{SEQUENCES[1]}\n"
            text += f">b two words\n{SEQUENCES[1][:5]}\n{SEQUENCES[1][5:]}\n>c\t1\n{SEQUENCES[1]}\n"
            (rows / "7.a3m").write_text(text + "\0")
            (rows / "7.txt").write_text("other")
            assert (rows.parent / "queries.fasta").read_text() == write_fasta(enumerate(SEQUENCES))  # type: ignore[arg-type]
        if "-oa3m" in command:
            query = Path(command[2]).read_text()
            assert query in [write_fasta([("query", sequence)]) for sequence in SEQUENCES]
            Path(command[6]).write_text(query + f">u\n{query.split()[1]}\n")
        return "program 1.2:\n usage \n"

    monkeypatch.setattr(searching, "run_program", run)
    return lines


def search_in(engine: MMseqs2 | HHblits, most: int | None, threads: int = 5) -> list[str | UserError]:
    queries = [SearchQuery(sequence) for sequence in SEQUENCES]
    return engine.search(queries, Path("/data/db"), Survey(""), most, threads, lambda done, total: None)


def mmseqs_lines(iterations: int, sensitivity: float, e_value: float, most: int) -> list[str]:
    return [
        "mmseqs createdb mmseqs/queries.fasta mmseqs/query -v 1",
        f"mmseqs search mmseqs/query /data/db mmseqs/hits mmseqs/work -a 1 --num-iterations {iterations} "
        f"-s {sensitivity} -e {e_value} --e-profile {e_value} --max-seqs {most} --threads 5 -v 1",
        "mmseqs result2msa mmseqs/query /data/db mmseqs/hits mmseqs/msa --msa-format-mode 6 --threads 5 -v 1",
        "mmseqs unpackdb mmseqs/msa mmseqs/rows --unpack-name-mode 0 --unpack-suffix .a3m -v 1",
    ]


def test_commands_of_mmseqs(commands: list[str]) -> None:
    row = SEQUENCES[1]
    rows = [f">a/5-21\n{row}\n", f">b two words\n{row}\n", f">c\t1\n{row}\n"]
    assert search_in(MMseqs2(), None) == ["", "".join(rows)]
    assert search_in(MMseqs2(1, 0.5, 4.0), 3) == ["", "".join(rows[:2])]
    assert commands == mmseqs_lines(3, 7.5, 0.001, 10_000) + mmseqs_lines(1, 4.0, 0.5, 3)


def test_commands_of_hhblits(commands: list[str]) -> None:
    assert search_in(HHblits(), None) == [f">u\n{sequence}\n" for sequence in SEQUENCES]
    assert search_in(HHblits(1, 0.5), 1) == ["", ""]
    line = (
        "hhblits -i hhblits/query.fasta -d /data/db -oa3m hhblits/rows.a3m -o /dev/null -cpu 5 -n {} -e {} "
        "-maxseq 1000000 -realign_max 100000 -maxfilt 100000 -min_prefilter_hits 1000 -v 1"
    )
    assert commands == [line.format(3, 0.001)] * 2 + [line.format(1, 0.5)] * 2


def test_identities(commands: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching.shutil, "which", lambda name: f"/bin/{name}")
    assert MMseqs2(2).identity() == {
        "engine": "mmseqs2",
        "program": "program 1.2:\n usage",
        "iterations": 2,
        "e_value": 0.001,
        "sensitivity": 7.5,
    }
    assert HHblits(2).identity() == {"engine": "hhblits", "program": "program 1.2", "iterations": 2, "e_value": 0.001}
    assert commands == ["/bin/mmseqs version", "/bin/hhblits -h"]
    monkeypatch.setattr(searching.shutil, "which", lambda name: None)
    for engine, name, package in ((MMseqs2(), "mmseqs", "mmseqs2"), (HHblits(), "hhblits", "hhsuite")):
        with pytest.raises(UserError) as caught:
            engine.identity()
        assert str(caught.value) == (
            f"--engine {engine.name}: `{name}` is not on PATH. Install it (apt install {package}, or conda install -c "
            f"bioconda {package}) or use jackhmmer."
        )


def test_a_digest_is_of_names_sizes_and_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert searching.DIGEST_BYTES == 2**20
    monkeypatch.setattr(searching, "DIGEST_BYTES", 4)
    # The files are not unpacked.
    packed = gzip.compress(b"abcde", mtime=0)
    contents = {"db": b"0123456789", "db.dbtype": b"x", "db.lookup": packed, "other": b"y"}
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "db_folder").mkdir()

    def digest_of(*parts: bytes) -> Survey:
        return Survey(hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest(), 0, 0)

    parts = [b"db\x0010\x0001236789", b"db.dbtype\x001\x00xx"]
    parts.append(b"db.lookup\x00%d\x00" % len(packed) + packed[:4] + packed[-4:])
    tell = lambda done, total: None  # noqa: E731
    assert MMseqs2().survey(tmp_path / "db", tell) == digest_of(*parts)
    with pytest.raises(UserError) as caught:
        HHblits().survey(tmp_path / "db", tell)
    assert str(caught.value) == (
        f"{tmp_path}/db: not a database of this engine (db_a3m.ffdata is missing). Pass an HH-suite database without "
        "this ending."
    )
    with pytest.raises(UserError) as caught:
        MMseqs2().survey(tmp_path / "other", tell)
    assert str(caught.value) == (
        f"{tmp_path}/other: not a database of this engine (other.dbtype is missing). Make one with `mmseqs createdb "
        f"{tmp_path}/other DATABASE`, and pass that."
    )
    (tmp_path / "db_a3m.ffdata").write_bytes(b"")
    assert HHblits().survey(tmp_path / "db", tell) == digest_of(*parts, b"db_a3m.ffdata\x000\x00")
