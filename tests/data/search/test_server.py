"""Ask the alignment server that a user names: requests, their rate, the cache, and checks of answers."""

import errno
import gzip
import json
import socket
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.data.search.alignment_server import Fault, Server, msa_files, packed, pair_files, sending, serving
from warpfold.data.formats.alignment import read_alignment
from warpfold.data.search import server as serving_module
from warpfold.data.search.fetch import ServerRequest, fetch, search_by_server
from warpfold.data.search.server import MSA, PAIR, AlignmentServer, NoAnswer, ServerGone, ServerLimits
from warpfold.errors import UserError

ONE, TWO = "MKTAYIAKQRQISFVKSH", "GSHMLEERLGLIEVQ"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    with serving() as server:
        yield server


class Clock:
    """Records the waits of a client instead of sleeping."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.said: list[str] = []

    def client(self, host: Server, cache: Path, **limits: object) -> AlignmentServer:
        quick = {"between": 0.0, "tries": 4} | limits
        return AlignmentServer(
            host.url, cache, ServerLimits(**quick), self.said.append, lambda s: self.waits.append(s) if s else None
        )


def test_an_alignment_is_asked_for_once_and_kept(host: Server, tmp_path: Path) -> None:
    clock = Clock()
    host.faults["ticket"] = ["PENDING", "RUNNING", "RUNNING"]
    files = clock.client(host, tmp_path).alignments(ONE)
    assert [file.name for file in files] == ["uniref.a3m", "bfd.mgnify30.metaeuk30.smag30.a3m", "pdb70.m8"]
    assert read_alignment(files[0], ONE).names == ["query", "uniref_0\t95\t0.5"]
    assert (host.sequences, host.modes) == ([(ONE,)], ["env"])
    assert host.paths() == ["ticket/msa", *["ticket"] * 4, "result/download"]
    assert all(agent.startswith("WarpFold/") for _, agent in host.asked)
    assert clock.waits == [4.0, 6.0, 9.0]  # less and less often
    assert clock.client(host, tmp_path).alignments(ONE) == files
    assert len(host.asked) == 6
    clock.waits.clear()
    clock.client(host, tmp_path / "other", between=60.0).alignments(ONE)  # not more often than allowed
    assert len(clock.waits) == 2
    assert all(59 < wait <= 60 for wait in clock.waits)
    odd = ONE.replace("Y", "U")  # may be replaced by X
    host.answer = lambda *_: packed({"uniref.a3m": f">101\n{odd.replace('U', 'X')}\n>a\n{odd}\n"})
    (file,) = Clock().client(host, tmp_path).alignments(odd)
    assert read_alignment(file, odd).query == ONE.replace("Y", "C")


@pytest.mark.parametrize(
    ("where", "faults", "waits"),
    [
        ("ticket/msa", [(503, {}), (502, {})], [5.0, 10.0]),
        ("ticket/msa", ["drop", "RATELIMIT", "RATELIMIT"], [5.0, 5.0, 10.0]),
        ("ticket/msa", [(429, {"Retry-After": "77"}), (500, {"Retry-After": "never"})], [77.0, 10.0]),
        ("ticket/msa", [(429, {"Retry-After": "99999999"})], [300.0]),
        ("ticket", ["drop", (504, {}), "<html>busy</html>"], [5.0, 10.0, 5.0]),
        ("ticket", ["RATELIMIT", "RUNNING"], [5.0, 4.0]),
        ("download", ["cut", (500, {})], [5.0, 5.0]),
        ("download", ["drop"], [5.0]),
    ],
)
def test_what_passes_is_waited_for(
    host: Server, tmp_path: Path, where: str, faults: list[Fault], waits: list[float]
) -> None:
    clock = Clock()
    host.faults[where] = [*faults]
    assert len(clock.client(host, tmp_path).alignments(ONE)) == 3
    assert clock.waits == waits
    assert len(host.sequences) <= 1 + len(faults) * (where == "ticket/msa")


@pytest.mark.parametrize(
    ("where", "faults", "error", "said"),
    [
        ("ticket/msa", ["MAINTENANCE"], ServerGone, "is under maintenance. Try later"),
        ("ticket/msa", ["ERROR"], NoAnswer, "answers ERROR"),
        ("ticket", ["ERROR"], NoAnswer, "answers ERROR"),
        ("ticket", ["MAINTENANCE"], ServerGone, "maintenance"),
        ("ticket/msa", [(403, {})], ServerGone, "answers 403 Forbidden to ticket. Check the address"),
        ("ticket/msa", [(404, {})], ServerGone, "answers 404 Not Found to ticket. Check the address"),
        ("ticket/msa", [(503, {})] * 4, ServerGone, "answers 503 Service Unavailable. Try later"),
        ("ticket/msa", ["drop"] * 4, ServerGone, "does not answer"),
        ("ticket/msa", ["<html>hello</html>"] * 4, ServerGone, "Check that this is the address of an alignment server"),
        ("ticket/msa", ["PENDING"], ServerGone, "returns no ticket"),
        ("download", ["cut"] * 3, NoAnswer, "is cut short"),
    ],
)
def test_what_does_not_pass_is_one_line(
    host: Server, tmp_path: Path, where: str, faults: list[Fault], error: type[UserError], said: str
) -> None:
    host.faults[where] = [*faults]
    with pytest.raises(error, match=said) as caught:
        Clock().client(host, tmp_path).alignments(ONE)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(host.url)
    host.faults.clear()
    assert len(Clock().client(host, tmp_path).alignments(ONE)) == 3  # the next run succeeds


def test_an_address_where_nobody_answers_is_given_up_soon(tmp_path: Path) -> None:
    waits: list[float] = []
    limits = ServerLimits(between=0.0)
    nobody = AlignmentServer("http://127.0.0.1:1", tmp_path, limits, wait=lambda s: waits.append(s) if s else None)
    with pytest.raises(ServerGone, match="does not answer"):
        nobody.alignments(ONE)
    assert waits == [5.0, 10.0]


def test_a_killed_run_goes_on_with_its_ticket(host: Server, tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def kill(seconds: float) -> None:
        if seconds:
            raise Killed

    host.faults["ticket"] = ["RUNNING"]
    client = Clock().client(host, tmp_path)
    client.wait = kill
    with pytest.raises(Killed):
        client.alignments(ONE)
    assert Clock().client(host, tmp_path).alignments(ONE)
    assert host.sequences == [(ONE,)]  # not requested again
    host.tickets.clear()
    (tmp_path / "other").mkdir()
    client = Clock().client(host, tmp_path / "other")
    host.faults["ticket"], client.wait = ["RUNNING"], kill
    with pytest.raises(Killed):
        client.alignments(ONE)
    host.tickets.clear()  # the server has forgotten it
    assert Clock().client(host, tmp_path / "other").alignments(ONE)
    assert len(host.sequences) == 3


def test_a_ticket_that_does_not_end_is_given_up_and_kept(host: Server, tmp_path: Path) -> None:
    host.faults["ticket"] = ["RUNNING"] * 3
    with pytest.raises(
        ServerGone,
        match=r"no answer after 0 min \(RUNNING\)\. Repeat the command later to continue: the ticket is kept",
    ):
        Clock().client(host, tmp_path, ticket=0.0).alignments(ONE)
    assert json.loads(next(tmp_path.glob("*/ticket.json")).read_text())["id"] == "T0"
    host.faults.clear()
    assert Clock().client(host, tmp_path).alignments(ONE)
    assert len(host.sequences) == 1


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (packed(msa_files([TWO])), "is of another sequence in uniref.a3m"),
        (packed(msa_files([ONE, TWO])), "has 2 alignments in uniref.a3m"),
        (packed({"msa.sh": "x"}), "has no alignment"),
        (packed({"uniref.a3m": "nothing"}), "has no alignment in uniref.a3m"),
        (packed({"uniref.a3m": f">101\n{ONE}\n>a\nMK1\n"}), "'1', which is not an amino acid"),
        (packed({"uniref.a3m": b">101\n\xff\n"}), "is not text"),
        (packed({"../uniref.a3m": f">101\n{ONE}\n", "/uniref.a3m": f">101\n{ONE}\n"}), "has no alignment"),
        (packed({}, links=["uniref.a3m"]), "has no alignment"),
        (packed({"uniref.a3m": f">101\n{ONE}\n" + "-" * 5000}), "has more than 0.004 MB when unpacked"),
        (packed({"uniref.a3m": "x"})[:-9], "is not a complete tar.gz"),
        (b"not an archive", "is not a complete tar.gz"),
        (b"", "is not a complete tar.gz"),
        (bytes(range(256)) * 8, "has more than 0.002 MB"),
    ],
    ids=map(str, range(13)),  # no bytes: gzip writes a date, and xdist needs the same test names twice
)
def test_nothing_of_an_answer_is_believed(host: Server, tmp_path: Path, data: bytes, said: str) -> None:
    host.answer = lambda endpoint, sequences: data
    with pytest.raises(NoAnswer, match=said) as caught:
        Clock().client(
            host, tmp_path / "cache", packed=2000, unpacked=4000 if "unpacked" in said else 10**6
        ).alignments(ONE)
    assert "\n" not in str(caught.value)
    assert {file.name for file in tmp_path.rglob("*") if file.is_file()} <= {"lock", "ticket.json"}


def http(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body


COMPLETE = http(b'{"id": "T0", "status": "COMPLETE"}')
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("before", [(), (COMPLETE, COMPLETE)], ids=["ticket", "alignment"])
@pytest.mark.parametrize(
    "slow",
    [
        http(b"{" + b" " * 200),
        CHUNKED + b"1\r\n{\r\n" * 25,
    ],
    ids=["body", "chunks"],
)
def test_a_server_that_answers_byte_by_byte_is_given_up(
    before: tuple[bytes, ...], slow: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte arrives within the limit, but all bytes together do not."""
    monkeypatch.setenv("no_proxy", "*")
    limits = ServerLimits(between=0.0, request=0.5, download=0.5, tries=1)
    says = r"sends no complete answer within 0\.5 s"
    with sending(*before, slow, pause=0.02) as url, pytest.raises(ServerGone, match=says):
        AlignmentServer(url, tmp_path, limits).alignments(ONE)


def tar(name: str, size: int, kind: bytes = tarfile.REGTYPE, pax: dict[str, str] | None = None) -> bytes:
    """Return a tar.gz of a member of 512 bytes whose header says `size`."""
    member = tarfile.TarInfo(name)
    member.size, member.type, member.pax_headers = size, kind, pax or {}
    return http(gzip.compress(member.tobuf(tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT) + bytes(512), mtime=0))


SPARSE = {"GNU.sparse.size": str(10**15), "GNU.sparse.map": "0,1", "GNU.sparse.name": "uniref.a3m"}


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([http(b"[" * 10**5)], "not the status of a ticket"),
        ([b"HTTP/1.1 302 Found\r\nLocation: http://[::1\r\n\r\n"], "Invalid IPv6 URL"),
        ([CHUNKED + b"-5\r\n{}"], "is cut short"),
        ([b"HTTP/1.1 403 \x1b[2Jgone\x07\r\n\r\n"], r"answers 403 \?\[2Jgone\? to ticket"),
        ([b"\x1b[31mhello\r\n\r\n"], r"does not answer \(\?\[31mhello"),
        ([http(b" " * (1 << 21))], "has more than 1.04858 MB"),
        ([b"HTTP/1.1 302 Found\r\nLocation: /\r\n\r\n" + b" " * (1 << 21)], "redirects to /"),
        ([COMPLETE, COMPLETE, tar("uniref.a3m", 10**15)], "not a complete tar.gz"),
        ([COMPLETE, COMPLETE, tar("long", 10**15, tarfile.GNUTYPE_LONGNAME)], "not a complete tar.gz"),
        ([COMPLETE, COMPLETE, tar("uniref.a3m", 1, pax=SPARSE)], "has no alignment"),
        ([COMPLETE, COMPLETE, http(gzip.compress(b""))], "not a complete tar.gz"),
    ],
    ids=range(11),
)
def test_what_a_hostile_server_sends_is_one_line(
    answers: list[bytes], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with sending(*answers) as url, pytest.raises(UserError, match=said) as caught:
        AlignmentServer(url, tmp_path, ServerLimits(between=0.0, tries=1)).alignments(ONE)
    assert str(caught.value).isprintable()


def test_pairs_are_of_all_chains_row_by_row(host: Server, tmp_path: Path) -> None:
    (file,) = Clock().client(host, tmp_path).pairs([ONE, TWO])
    assert (host.paths()[0], host.modes) == ("ticket/pair", ["pairgreedy"])
    assert file.read_text() == f">query\n{ONE}\n>p\n{ONE[:-1]}A\n\0>query\n{TWO}\n>p\n{TWO[:-1]}A\n"
    for sequences, said in (((ONE,), "1 alignments in pair.a3m instead of 2"), ((TWO, ONE), "is of another sequence")):
        host.answer = lambda endpoint, _, sequences=sequences: packed(pair_files(sequences))
        with pytest.raises(NoAnswer, match=said):
            Clock().client(host, tmp_path / said).pairs([ONE, TWO])
    uneven = f">101\n{ONE}\n>a\n{ONE}\n\0>102\n{TWO}\n\0"
    host.answer = lambda *_: packed({"pair.a3m": uneven})
    with pytest.raises(NoAnswer, match=r"of different depth in pair\.a3m"):
        Clock().client(host, tmp_path / "uneven").pairs([ONE, TWO])


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_no_redirect_is_followed(host: Server, tmp_path: Path, name: str) -> None:
    with serving() as other:
        elsewhere = other.url.replace("127.0.0.1", name) + "/ticket/T0"
        host.faults["ticket"] = [(302, {"Location": elsewhere})]
        with pytest.raises(ServerGone, match=f"redirects to http://{name}"):
            Clock().client(host, tmp_path).alignments(ONE)
        assert other.asked == []


def test_several_proteins_are_asked_for_one_after_another(host: Server, tmp_path: Path) -> None:
    clock = Clock()
    host.faults["ticket/msa"] = ["ERROR"]
    wanted = [
        ServerRequest("one", {"one": ONE}),
        ServerRequest("both", {"both_A": ONE, "both_B": TWO}, paired=True),
        ServerRequest("rna", {"rna": "ACGUACGUACGUACGU"}),
    ]
    answers = fetch(clock.client(host, tmp_path), wanted)
    assert list(answers.alignments) == [TWO]
    assert list(answers.pairs) == ["both"]
    assert answers.failures["one"].endswith("or try later.")
    assert "nucleic" in answers.failures["rna"]
    assert answers.failures["both_A"] == answers.failures["one"]
    assert host.sequences == [(ONE,), (TWO,), (ONE, TWO)]  # the RNA is not sent
    assert clock.said[0] == f"sending 2 sequences to {host.url} (one, both_B, both); answers are kept in {tmp_path}"


def test_a_search_writes_what_predict_reads(host: Server, tmp_path: Path) -> None:
    table = tmp_path / "q.csv"
    table.write_text(f"id,sequence\nx,{ONE}:{TWO}:{ONE}\ny,{TWO}\n")
    report = search_by_server([table], Clock().client(host, tmp_path / "out/cache"), tmp_path / "out")
    assert report["status"] == "complete"
    assert {file.parent.name for file in (tmp_path / "out").glob("[xy]*/*")} == {"x", "x_A", "x_B", "y"}
    assert (tmp_path / "out/x_A/uniref.a3m").read_text().startswith(f">x_A\n{ONE}\n>uniref_0")
    assert report["proteins"][0]["databases"]["uniref"] == {"file": "x_A/uniref.a3m", "hits": 1}
    asked = len(host.asked)
    again = search_by_server([table], Clock().client(host, tmp_path / "out/cache"), tmp_path / "out")
    assert len(host.asked) == asked
    assert again["proteins"] == report["proteins"]


def test_nothing_is_sent_unasked(tmp_path: Path, tiny_params: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`predict` opens no socket, whatever is missing, unless a server is named."""
    from warpfold import predict

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    summary = predict([ONE], tiny_params, tmp_path / "out", device="cpu", recycles=0)
    assert summary["msa_server"] is None
    assert summary["predictions"][0]["warnings"][0]["kind"] == "no_alignment"


# ---- limits, cache and messages


def test_limits_are_generous_by_default(tmp_path: Path) -> None:
    assert vars(AlignmentServer("http://host", tmp_path).limits) == {
        "request": 60.0,
        "download": 1800.0,
        "ticket": 14_400.0,
        "between": 1.0,
        "poll": (4.0, 40.0),
        "retry": (5.0, 300.0),
        "tries": 8,
        "first_tries": 3,
        "packed": 1_000_000_000,
        "unpacked": 4_000_000_000,
    }


def test_an_answer_is_cached_by_server_kind_and_sequences(host: Server, tmp_path: Path) -> None:
    client = Clock().client(host, tmp_path)
    assert client.cached(MSA, [ONE]) is None
    files = client.alignments(ONE)
    assert client.cached(MSA, [ONE]) == files
    assert client.cached(MSA, [TWO]) is client.cached(PAIR, [ONE]) is client.cached(MSA, [ONE, TWO]) is None
    assert AlignmentServer(host.url + "/", tmp_path).cached(MSA, [ONE]) == files
    assert AlignmentServer(host.url + "/other", tmp_path).cached(MSA, [ONE]) is None
    assert json.loads((files[0].parent / "answer.json").read_text()) == {
        "server": host.url,
        "mode": "env",
        "sequences": [ONE],
        "files": [file.name for file in files],
    }
    assert json.loads((files[0].parent / "ticket.json").read_text()) == {"id": "T0", "server": host.url}
    for text in ('{"files": []}', '{"files": "uniref.a3m"}', "[1]", "[" * 10**5, "{", ""):
        (files[0].parent / "answer.json").write_text(text)
        assert client.cached(MSA, [ONE]) is None
    (files[0].parent / "answer.json").write_text(json.dumps({"files": ["uniref.a3m", "pdb70.m8"]}))
    assert client.cached(MSA, [ONE]) == [files[0], files[2]]
    files[2].unlink()
    assert client.cached(MSA, [ONE]) is None


def test_an_answer_that_another_process_has_fetched_is_not_requested(
    host: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, client = (Clock().client(host, tmp_path) for _ in range(2))
    answers = iter([None, other.alignments(ONE)])
    asked = len(host.asked)
    monkeypatch.setattr(client, "cached", lambda *_: next(answers))
    assert len(client.alignments(ONE)) == 3
    assert len(host.asked) == asked


def test_a_file_system_without_locks_is_used_without(
    host: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = [errno.ENOLCK, errno.EIO]

    def flock(file: object, operation: int) -> None:
        assert operation == serving_module.fcntl.LOCK_EX
        raise OSError(codes.pop(0), "no")

    monkeypatch.setattr(serving_module.fcntl, "flock", flock)
    assert len(Clock().client(host, tmp_path).alignments(ONE)) == 3
    with pytest.raises(OSError, match="no"):
        Clock().client(host, tmp_path).alignments(TWO)
    assert (tmp_path / "lock").exists()


def test_pauses_grow_to_their_limits(host: Server, tmp_path: Path) -> None:
    clock = Clock()
    host.faults["ticket"] = ["PENDING"] * 6
    clock.client(host, tmp_path, poll=(4.0, 10.0)).alignments(ONE)
    assert clock.waits == [4.0, 6.0, 9.0, 10.0, 10.0, 10.0]
    clock = Clock()
    host.faults["ticket/msa"] = ["RATELIMIT"] * 4
    clock.client(host, tmp_path, retry=(5.0, 15.0)).alignments(TWO)
    assert clock.waits == [5.0, 10.0, 15.0, 15.0]
    assert clock.said == [f"{host.url}: is busy, asked again in {seconds} s" for seconds in (5, 10, 15, 15)]
    clock = Clock()
    host.faults["ticket/msa"] = ["<html>no</html>"] * 4
    clock.client(host, tmp_path, retry=(5.0, 15.0), tries=5).alignments(TWO + "A")
    assert clock.waits == [5.0, 10.0, 15.0, 15.0]
    said = "its answer cannot be used, asking again in {} s"
    assert clock.said == [f"{host.url}: {said.format(seconds)}" for seconds in (5, 10, 15, 15)]


@pytest.mark.parametrize(("tries", "downloads"), [(1, 1), (2, 2), (3, 3), (5, 3)])
def test_a_damaged_answer_is_downloaded_three_times(host: Server, tmp_path: Path, tries: int, downloads: int) -> None:
    clock = Clock()
    host.faults["download"] = ["cut"] * downloads
    with pytest.raises(NoAnswer, match=r": its answer cannot be used: it is cut short \(.*\)\. Try later\.$"):
        clock.client(host, tmp_path, tries=tries).alignments(ONE)
    assert host.paths().count("result/download") == downloads
    assert len(clock.waits) == downloads - 1
    # The ticket is not used again.
    assert json.loads(next(tmp_path.glob("*/ticket.json")).read_text())["id"] == ""


def test_a_server_that_forgets_its_tickets_is_given_up(host: Server, tmp_path: Path) -> None:
    host.faults["ticket"] = ["UNKNOWN"] * 9
    with pytest.raises(ServerGone) as caught:
        Clock().client(host, tmp_path, tries=4).alignments(ONE)
    assert str(caught.value) == f"{host.url}: forgets its tickets repeatedly. Try later."
    assert len(host.sequences) == 4
    host.faults["ticket"] = ["UNKNOWN"] * 3
    assert len(Clock().client(host, tmp_path / "other", tries=4).alignments(TWO)) == 3
    host.faults["download"] = [(404, {})] * 2
    assert len(Clock().client(host, tmp_path / "third", tries=4).alignments(TWO)) == 3


@pytest.mark.parametrize(
    ("where", "fault", "message"),
    [
        ("ticket/msa", "MAINTENANCE", "is under maintenance. Try later: earlier answers are kept."),
        ("ticket/msa", "ERROR", "answers ERROR. Check that these are protein sequences, or try later."),
        (
            "ticket/msa",
            "PENDING",
            "returns no ticket ({'id': '', 'status': 'PENDING'}). Check that this is an alignment server.",
        ),
        ("ticket/msa", (403, {}), "answers 403 Forbidden to ticket. Check the address."),
        ("download", (410, {}), "answers 410 Gone to result. Check the address."),
        ("download", (503, {}), "answers 503 Service Unavailable. Try later: earlier answers are kept."),
        (
            "ticket",
            (302, {"Location": "http://other/" + "x" * 200}),
            f"redirects to http://other/{'x' * 87}. Pass that server to --msa-server if you trust it.",
        ),
        (
            "ticket/msa",
            "<" + "x" * 100,
            f"its answer is '<{'x' * 59}', not the status of a ticket. Check that this is the address of an alignment "
            "server.",
        ),
        ("ticket", "drop", None),
    ],
)
def test_messages(host: Server, tmp_path: Path, where: str, fault: Fault, message: str | None) -> None:
    host.faults[where] = [fault]
    with pytest.raises(UserError) as caught:
        Clock().client(host, tmp_path, tries=1, first_tries=1).alignments(ONE)
    if message is None:
        assert str(caught.value).startswith(f"{host.url}: does not answer (")
        assert str(caught.value).endswith("). Try later: earlier answers are kept.")
    else:
        assert str(caught.value) == f"{host.url}: {message}"


def test_a_ticket_has_the_time_of_its_limit(host: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(serving_module.time, "monotonic", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    host.faults["ticket"] = ["RUNNING"] * 3
    limits = ServerLimits(between=0.0, ticket=180.0, poll=(90.0, 90.0))
    # The third status is read at the limit, the fourth after it.
    assert len(AlignmentServer(host.url, tmp_path, limits, wait=wait).alignments(ONE)) == 3
    host.faults["ticket"] = ["RUNNING"] * 9
    with pytest.raises(ServerGone) as caught:
        AlignmentServer(host.url, tmp_path, limits, wait=wait).alignments(TWO)
    assert str(caught.value) == (
        f"{host.url}: has no answer after 3 min (RUNNING). Repeat the command later to continue: the ticket is kept."
    )
    assert len(host.faults["ticket"]) == 5
    host.faults.clear()
    host.faults["ticket/msa"] = ["RATELIMIT"] * 9
    limits = ServerLimits(between=0.0, ticket=10.0, retry=(5.0, 5.0))
    with pytest.raises(ServerGone, match=r"no answer after 0 min \(RATELIMIT\)"):
        AlignmentServer(host.url, tmp_path, limits, wait=wait).alignments(TWO + "A")
    assert len(host.faults["ticket/msa"]) == 5


def test_requests_are_spaced(host: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = [1000.0], list[float]()
    monkeypatch.setattr(serving_module.time, "monotonic", lambda: now[0])

    def wait(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds + 0.25

    limits = ServerLimits(between=2.0)
    AlignmentServer(host.url, tmp_path, limits, wait=wait).alignments(ONE)
    # Each request is 0.25 s after the wait before it.
    assert waits == [0.0, 2.0, 2.0]
    waits.clear()
    AlignmentServer(host.url, tmp_path, ServerLimits(between=0.0), wait=wait).alignments(TWO)
    assert waits == [0.0, 0.0, 0.0]


def test_a_server_that_has_answered_is_given_more_time(host: Server, tmp_path: Path) -> None:
    clock = Clock()
    client = clock.client(host, tmp_path / "new/cache", tries=5, first_tries=2)
    client.alignments(ONE)
    client.url = "http://127.0.0.1:1"
    with pytest.raises(ServerGone, match="does not answer"):
        client.alignments(TWO)
    assert clock.waits == [5.0, 10.0, 20.0, 40.0]


def test_the_time_of_a_request_is_limited(host: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, float]] = []
    original = requests.Session.request

    def request(self: requests.Session, method: str, url: str, **options: Any) -> requests.Response:
        assert options["stream"]
        assert not options["allow_redirects"]
        seen.append((method, options["timeout"]))
        return original(self, method, url, **options)

    monkeypatch.setattr(requests.Session, "request", request)
    Clock().client(host, tmp_path, request=7.0, download=5.0).alignments(ONE)
    assert seen == [("POST", 7.0), ("GET", 7.0), ("GET", 5.0)]
    seen.clear()
    Clock().client(host, tmp_path, request=7.0, download=9.0).alignments(TWO)
    assert seen[-1] == ("GET", 7.0)


def test_sizes_of_answers_at_their_limits(host: Server, tmp_path: Path) -> None:
    data = packed(msa_files([ONE]))
    host.answer = lambda *_: data
    assert len(Clock().client(host, tmp_path, packed=len(data)).alignments(ONE)) == 3
    with pytest.raises(NoAnswer) as caught:
        Clock().client(host, tmp_path / "other", packed=len(data) - 1, tries=1).alignments(ONE)
    size = f"{(len(data) - 1) / 1e6:g}"
    assert str(caught.value) == f"{host.url}: its answer cannot be used: it has more than {size} MB. Try later."


def test_every_chain_is_numbered_in_the_request(host: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forms: list[object] = []
    original = AlignmentServer._status

    def status(self: AlignmentServer, path: str, form: dict[str, str] | None, end: float) -> dict:
        forms.append((path, form))
        return original(self, path, form, end)

    monkeypatch.setattr(AlignmentServer, "_status", status)
    client = Clock().client(host, tmp_path)
    client.pairs([ONE, TWO])
    assert forms == [
        ("ticket/pair", {"q": f">101\n{ONE}\n>102\n{TWO}\n", "mode": "pairgreedy"}),
        ("ticket/T0", None),
    ]
    assert "_last" not in repr(client)
    assert "_has_answered" not in repr(client)


@pytest.mark.parametrize("text", ["[]", "1", '"x"', "{}", '{"state": "COMPLETE"}', "\udcff", "null"])
def test_what_is_no_status_is_shown(text: str, tmp_path: Path) -> None:
    path = tmp_path / "status"
    path.write_bytes(text.encode(errors="surrogateescape"))
    shown = text.replace("\udcff", "\ufffd")
    with path.open("rb") as file, pytest.raises(serving_module.DamagedAnswer) as caught:
        serving_module._read_status(file)
    assert str(caught.value) == f"is {shown!r}, not the status of a ticket"
    path.write_text('{"status": 3, "id": "x"}')
    with path.open("rb") as file:
        assert serving_module._read_status(file) == {"status": "3", "id": "x"}
