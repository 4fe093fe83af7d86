"""Request alignments of many queries from a stand-in for a server: order, failures, messages and written files."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from warpfold import __version__
from warpfold.data.example.query_files import Complex
from warpfold.data.search.fetch import (
    Fetched,
    ServerRequest,
    fetch,
    fetch_alignments,
    make_request,
    search_by_server,
)
from warpfold.data.search.server import MSA, NoAnswer, ServerGone
from warpfold.errors import UserError

ONE, TWO, THREE = "MKTAYIAKQR", "GSHMLEER", "WWLKDEYP"
RNA = "ACGUACGUACGU"


@dataclass
class StandIn:
    """A server that writes its answers at once. fails: names of sequences by error; gone: the one that ends all."""

    cache: Path
    url: str = "http://host"
    fails: Sequence[str] = ()
    gone: str = ""
    has: set[tuple[str, ...]] = field(default_factory=set)
    calls: list[tuple[str, ...]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        self.said.append(line)

    def cached(self, endpoint: str, sequences: Sequence[str]) -> list[Path] | None:
        assert (endpoint == MSA) == (len(sequences) == 1)
        return [] if tuple(sequences) in self.has else None

    def alignments(self, sequence: str) -> list[Path]:
        self._call(sequence)
        rows = self.cache / f"{sequence}/uniref.a3m"
        rows.parent.mkdir(parents=True)
        rows.write_text(f">query\n{sequence}\n>hit\n{sequence}\n>hit2\n{sequence}\n")
        hits = rows.with_name("pdb70.m8")
        hits.write_text("1\n2\n3\n")
        return [rows, hits]

    def pairs(self, sequences: Sequence[str]) -> list[Path]:
        self._call(*sequences)
        pairs = self.cache / f"{'-'.join(sequences)}/pair.a3m"
        pairs.parent.mkdir(parents=True)
        pairs.write_text("\0".join(f">query\n{sequence}\n>p\n{sequence}\n" for sequence in sequences))
        return [pairs]

    def _call(self, *sequences: str) -> None:
        self.calls.append(sequences)
        if sequences[0] in self.fails:
            raise NoAnswer(f"no answer for {sequences[0]}")
        if sequences[0] == self.gone:
            raise ServerGone("gone")


REQUESTS = [
    ServerRequest("x", {"x_A": ONE, "x_B": TWO}, paired=True),
    ServerRequest("y", {"y": TWO}),
    ServerRequest("z", {"z_A": THREE, "z_B": RNA}, paired=True),
    ServerRequest("w", {"w": ONE}),
]


def test_each_sequence_is_requested_once(tmp_path: Path) -> None:
    server, reported = StandIn(tmp_path), []
    fetched = fetch(server, REQUESTS, lambda *report: reported.append(report))  # type: ignore[arg-type]
    assert server.calls == [(ONE,), (TWO,), (THREE,), (ONE, TWO)]
    names = ["x_A", "x_B", "z_A", "z_B", "x", "z"]
    assert reported == [(i, 6, f"asking http://host for {name}") for i, name in enumerate(names)]
    assert [*fetched.alignments] == [ONE, TWO, THREE]
    assert [file.name for file in fetched.alignments[TWO]] == ["uniref.a3m", "pdb70.m8"]
    assert {name: [file.name for file in files] for name, files in fetched.pairs.items()} == {"x": ["pair.a3m"]}
    reason = "looks like nucleic acid (only A, C, G, T, U, N). WarpFold searches for proteins"
    assert fetched.failures == {"z_B": reason, "z": reason}
    # Neither the RNA nor the complex with it leaves this machine.
    assert server.said == [f"sending 3 sequences to http://host (x_A, x_B, z_A, x); answers are kept in {tmp_path}"]


@pytest.mark.parametrize(
    ("has", "said"),
    [
        ({(ONE,), (TWO,), (THREE,), (ONE, TWO)}, None),
        ({(ONE,), (TWO,), (ONE, TWO)}, "1 sequence to http://host (z_A)"),
        ({(ONE,), (TWO,), (THREE,)}, "2 sequences to http://host (x)"),
    ],
)
def test_what_leaves_the_machine_is_told(tmp_path: Path, has: set[tuple[str, ...]], said: str | None) -> None:
    server = StandIn(tmp_path, has=has)
    fetch(server, REQUESTS)  # type: ignore[arg-type]
    assert server.said == ([] if said is None else [f"sending {said}; answers are kept in {tmp_path}"])


def test_failures_are_those_of_every_name(tmp_path: Path) -> None:
    server = StandIn(tmp_path, fails=[ONE])
    fetched = fetch(server, REQUESTS)  # type: ignore[arg-type]
    message = f"no answer for {ONE}"
    assert {name: fetched.failures[name] for name in ("x_A", "w", "x")} == dict.fromkeys(("x_A", "w", "x"), message)
    assert [*fetched.alignments] == [TWO, THREE]
    assert fetched.pairs == {}
    with pytest.raises(ServerGone) as caught:
        fetch(StandIn(tmp_path / "gone", gone=TWO), REQUESTS)  # type: ignore[arg-type]
    assert str(caught.value) == "x_B: gone"
    assert Fetched() == Fetched({}, {}, {})


@pytest.mark.parametrize(
    ("count", "also"),
    [(1, ""), (2, " (p1 too)"), (3, " (p1, p2 too)"), (4, " (p1, p2, p3 too)"), (5, " (p1, p2, p3 ... too)")],
)
def test_any_failure_is_an_error_of_a_prediction(tmp_path: Path, count: int, also: str) -> None:
    sequences = [ONE + "A" * i for i in range(5)]
    server = StandIn(tmp_path, fails=sequences[:count])
    requests = [ServerRequest(f"p{i}", {f"p{i}": sequence}) for i, sequence in enumerate(sequences)]
    with pytest.raises(UserError) as caught:
        fetch_alignments(server, requests)  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"p0: no answer for {ONE}{also}. Pass alignments of these with --msa, remove them, or try again; other answers "
        f"are kept in {tmp_path}."
    )


def test_the_files_of_a_prediction_are_alignments(tmp_path: Path) -> None:
    files = fetch_alignments(StandIn(tmp_path), REQUESTS[:2])  # type: ignore[arg-type]
    names = [f"{ONE}/uniref.a3m", f"{TWO}/uniref.a3m", f"{ONE}-{TWO}/pair.a3m"]
    assert [str(file.relative_to(tmp_path)) for file in files] == names


@pytest.mark.parametrize(
    ("sequences", "lacking", "names", "paired"),
    [
        ((ONE,), None, {"q": ONE}, False),
        ((ONE,), [], {}, False),
        ((ONE,), [ONE], {"q": ONE}, False),
        ((ONE, TWO, ONE), None, {"q_A": ONE, "q_B": TWO}, True),
        ((ONE, TWO, ONE), [ONE, TWO], {"q_A": ONE, "q_B": TWO}, True),
        ((ONE, TWO, ONE), [TWO], {"q_B": TWO}, False),
        ((ONE, ONE), None, {"q_A": ONE}, False),
    ],
)
def test_pairs_are_requested_if_all_alignments_are(
    sequences: tuple[str, ...], lacking: list[str] | None, names: dict[str, str], paired: bool
) -> None:
    query = Complex("q", tuple("ABC"[: len(sequences)]), sequences)
    assert make_request(query, lacking) == ServerRequest("q", names, paired)
    if lacking is None:
        assert make_request(query) == ServerRequest("q", names, paired)
    assert ServerRequest("q", names) == ServerRequest("q", names, False)


def test_a_search_writes_its_report_and_files(tmp_path: Path) -> None:
    table = tmp_path / "q.csv"
    table.write_text(f"id,sequence\nx,{ONE}:{TWO}:{ONE}\ny,{TWO}\nrna,{RNA}\n")
    out = tmp_path / "out"
    report = search_by_server([table], StandIn(tmp_path / "kept"), out)  # type: ignore[arg-type]
    assert report == json.loads((out / "search.json").read_text())
    assert 0.0 <= report.pop("seconds") < 100.0

    def files(name: str) -> dict[str, dict[str, object]]:
        return {
            "uniref": {"file": f"{name}/uniref.a3m", "hits": 2},
            "pdb70": {"file": f"{name}/pdb70.m8", "hits": 3},
        }

    reason = "looks like nucleic acid (only A, C, G, T, U, N). WarpFold searches for proteins"
    assert report == {
        "format": "warpfold-search-1",
        "warpfold": __version__,
        "status": "failed",
        "part": None,
        "databases": [],
        "server": "http://host",
        "proteins": [
            {"name": "x_A", "length": 10, "databases": files("x_A")},
            {"name": "x_B", "length": 8, "databases": files("x_B")},
            {"name": "x", "length": 18, "databases": {"pair": {"file": "x/pair.a3m", "hits": 1}}},
            {"name": "y", "length": 8, "databases": files("y")},
        ],
        "failures": [{"name": "rna", "error": reason}],
    }
    texts = {str(file.relative_to(out)): file.read_text() for file in out.glob("*/*")}
    alignment = ">{name}\n{sequence}\n>hit\n{sequence}\n>hit2\n{sequence}\n"
    assert texts == {
        **{
            f"{n}/uniref.a3m": alignment.format(name=n, sequence=s) for n, s in (("x_A", ONE), ("x_B", TWO), ("y", TWO))
        },
        **{f"{name}/pdb70.m8": "1\n2\n3\n" for name in ("x_A", "x_B", "y")},
        "x/pair.a3m": f">query\n{ONE}\n>p\n{ONE}\n\0>query\n{TWO}\n>p\n{TWO}\n",
    }
    table.write_text(f"id,sequence\ny,{TWO}\n")
    again = search_by_server([table], StandIn(tmp_path / "kept2"), out)  # type: ignore[arg-type]
    assert (again["status"], again["failures"]) == ("complete", [])
    with pytest.raises(UserError, match="is a file"):
        search_by_server([table], StandIn(tmp_path / "kept3"), table)  # type: ignore[arg-type]


def test_a_stopped_search_is_running(tmp_path: Path) -> None:
    table = tmp_path / "q.csv"
    table.write_text(f"id,sequence\ny,{TWO}\n")
    with pytest.raises(ServerGone):
        search_by_server([table], StandIn(tmp_path / "kept", gone=TWO), tmp_path / "out")  # type: ignore[arg-type]
    report = json.loads((tmp_path / "out/search.json").read_text())
    assert (report["status"], report["proteins"], report["failures"], report["seconds"]) == ("running", [], [], 0.0)
