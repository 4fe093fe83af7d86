"""Search with stand-ins for MMseqs2 and hhblits, which check their arguments and write results."""

import os
import stat
import sys
import textwrap
from pathlib import Path

import pytest

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
