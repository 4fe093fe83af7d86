"""Ask an alignment server that the user has named, in ColabFold's protocol (docs/howto/alignments.md).

The protocol, as the server's own code has it (github.com/soedinglab/MMseqs2-App, backend/server.go, jobsystem.go):

* POST ticket/msa or ticket/pair, with the form fields q (FASTA) and mode, answers {"id": ..., "status": ...};
* GET ticket/ID answers the same until the status is COMPLETE; RATELIMIT, MAINTENANCE, ERROR and UNKNOWN are others;
* GET result/download/ID answers a tar.gz of uniref.a3m, bfd.mgnify30.metaeuk30.smag30.a3m, pdb70.m8, or pair.a3m, in
  which each query's alignment ends with NUL; its records are numbered from 101, as they were in q.

An id is a hash of q and mode, so that asking twice costs the server nothing.
"""

import contextlib
import fcntl
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from warpfold.data.search.answer import DamagedAnswer, read_pairs, read_rows, unpacked
from warpfold.download import BUSY, check_address, open_session, read_body, reason_of
from warpfold.errors import UserError, printable
from warpfold.files import NO_LOCKS, digest_of, write_atomically, writing

if TYPE_CHECKING:
    import requests

FIRST = 101  # the number of the first record in q
MSA, PAIR = "ticket/msa", "ticket/pair"
MODES = {MSA: "env", PAIR: "pairgreedy"}  # ColabFold's defaults: environmental sequences, too; pairs of any chains
_ID = re.compile(r"[\w=-]{1,200}", re.ASCII)  # it becomes part of an address

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """How long to wait for a server, how often to ask, and how much to accept; seconds and bytes."""

    request: float = 60.0  # the body of a status, in all; without a byte
    download: float = 1800.0  # the body of an alignment, in all
    ticket: float = 4 * 3600.0  # from asking for it to its end
    between: float = 1.0  # requests, at least
    poll: tuple[float, float] = (4.0, 40.0)  # between questions after a ticket: at first, and at most
    retry: tuple[float, float] = (
        5.0,
        300.0,
    )  # after a failure: at first, doubled each time; at most, Retry-After too
    tries: int = 8  # of a request, until the server counts as gone
    first_tries: int = 3  # to reach it at all: the address may be wrong
    packed: int = 10**9  # of an answer
    unpacked: int = 4 * 10**9


class ServerGone(UserError):
    """The server cannot be used now: there is no point in asking for another sequence."""


class NoAnswer(UserError):
    """The server has no alignment for this query; it may have others."""


@dataclass
class AlignmentServer:
    """A server, and the folder in which its answers and tickets are kept, by sequence and settings.

    say: told in a line what happens.  wait: sleeps for some seconds.
    Errors: UserError for an address that is none.
    """

    url: str
    cache: Path
    limits: ServerLimits = field(default_factory=ServerLimits)
    say: Callable[[str], None] = lambda line: None
    wait: Callable[[float], None] = field(default_factory=lambda: time.sleep)
    _last: float = field(default=float("-inf"), repr=False)  # when it was asked last
    _is_there: bool = field(default=False, repr=False)  # it has answered something

    def __post_init__(self) -> None:
        self.url = check_address(self.url.rstrip("/"), "--msa-server")

    def alignments(self, sequence: str) -> list[Path]:
        """Return the files of a sequence's alignments, and of template hits (.m8).

        Errors: `NoAnswer`, `ServerGone`; UserError where the cache cannot be written.
        """
        return self._answer(MSA, [sequence])

    def pairs(self, sequences: Sequence[str]) -> list[Path]:
        """Return the files of the pairs of rows of different sequences of a complex.  Errors: as in `alignments`."""
        return self._answer(PAIR, sequences)

    def known(self, endpoint: str, sequences: Sequence[str]) -> list[Path] | None:
        """Return the files of an answer that is kept, or None."""
        folder = self._folder(endpoint, sequences)
        files = _read_json(folder / "answer.json").get("files")
        found = [folder / str(name) for name in files] if isinstance(files, list) else []
        return found if found and all(map(Path.is_file, found)) else None

    def _folder(self, endpoint: str, sequences: Sequence[str]) -> Path:
        text = json.dumps([self.url, endpoint, MODES[endpoint], *sequences])
        return self.cache / digest_of(text.encode())

    def _answer(self, endpoint: str, sequences: Sequence[str]) -> list[Path]:
        if (found := self.known(endpoint, sequences)) is not None:
            return found
        with self._alone():
            if (found := self.known(endpoint, sequences)) is not None:  # another process has asked meanwhile
                return found
            return self._fetch(endpoint, sequences)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until no other process that shares the cache is asking the server."""
        with writing(self.cache):
            self.cache.mkdir(parents=True, exist_ok=True)
            file = open(self.cache / "lock", "a", encoding="utf-8")  # noqa: SIM115 (closed below)
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            yield

    def _fetch(self, endpoint: str, sequences: Sequence[str]) -> list[Path]:
        """Ask for an answer, or go on asking for one whose ticket is kept, and keep it."""
        folder, end = self._folder(endpoint, sequences), time.monotonic() + self.limits.ticket
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        ticket = str(_read_json(folder / "ticket.json").get("id") or "")
        for _ in range(self.limits.tries):
            try:
                if not _ID.fullmatch(ticket):
                    ticket = self._submit(endpoint, sequences, end)
                    self._keep_ticket(folder, ticket)
                found = self._download(ticket, endpoint, sequences) if self._is_complete(ticket, end) else None
            except NoAnswer:
                self._keep_ticket(folder, "")  # the next run asks anew
                raise
            if found is not None:
                for name, text in found.items():
                    write_atomically(folder / name, text, sync=False)
                about = {"server": self.url, "mode": MODES[endpoint], "sequences": [*sequences], "files": [*found]}
                write_atomically(folder / "answer.json", json.dumps(about, indent=1), sync=False)
                return [folder / name for name in found]
            ticket = ""  # the server has forgotten it
        raise ServerGone(f"{self.url}: forgets its tickets again and again; try later")

    def _keep_ticket(self, folder: Path, ticket: str) -> None:
        write_atomically(folder / "ticket.json", json.dumps({"id": ticket, "server": self.url}), sync=False)

    def _submit(self, endpoint: str, sequences: Sequence[str], end: float) -> str:
        """Return the id of a new ticket."""
        fasta = "".join(f">{FIRST + place}\n{sequence}\n" for place, sequence in enumerate(sequences))
        found = self._status(endpoint, {"q": fasta, "mode": MODES[endpoint]}, end)
        ticket = found.get("id")
        if not isinstance(ticket, str) or not _ID.fullmatch(ticket):
            raise ServerGone(f"{self.url}: gives no ticket ({str(found)[:100]}); is it an alignment server?")
        return ticket

    def _is_complete(self, ticket: str, end: float) -> bool:
        """Wait for a ticket's end; return whether there is an answer, and not a ticket that the server lacks."""
        pause, most = self.limits.poll
        while (status := self._status(f"ticket/{ticket}", None, end)["status"]) in ("PENDING", "RUNNING"):
            self._check_time(end, status)
            self.wait(pause)
            pause = min(1.5 * pause, most)
        return bool(status == "COMPLETE")

    def _check_time(self, end: float, status: str) -> None:
        if time.monotonic() > end:
            raise ServerGone(
                f"{self.url}: has no answer after {self.limits.ticket / 60:.0f} min ({status}); the ticket is kept, "
                "and the same command goes on asking for it"
            )

    def _status(self, path: str, form: dict[str, str] | None, end: float) -> dict[str, Any]:
        """Ask for a ticket's status: PENDING, RUNNING, COMPLETE or UNKNOWN; wait while the server is too busy.

        Errors: NoAnswer for ERROR; ServerGone for MAINTENANCE, or if it stays too busy.
        """
        pause, most = self.limits.retry
        while True:
            found = self._ask(path, form, _read_status, 1 << 20, self.limits.request) or {"status": "UNKNOWN"}
            status = found["status"]
            if status == "ERROR":
                raise NoAnswer(f"{self.url}: answers ERROR. Check that these are protein sequences, or try later")
            if status == "MAINTENANCE":
                raise ServerGone(f"{self.url}: is under maintenance; try later: what it answered before is kept")
            if status != "RATELIMIT":
                return found
            self._check_time(end, status)
            self.say(f"{self.url}: is busy, asked again in {pause:.0f} s")
            self.wait(pause)
            pause = min(2 * pause, most)

    def _download(self, ticket: str, endpoint: str, sequences: Sequence[str]) -> dict[str, str] | None:
        """Return the files of an answer by name, checked; None if the server has it no more.

        Errors: NoAnswer if it stays damaged, or is of another sequence.
        """

        def read(packed: IO[bytes]) -> dict[str, str]:
            found = unpacked(packed, self.limits.unpacked)
            return read_rows(found, sequences[0]) if endpoint == MSA else read_pairs(found, sequences, FIRST)

        path, limits = f"result/download/{ticket}", self.limits
        try:
            return self._ask(path, None, read, limits.packed, limits.download, min(3, limits.tries))
        except DamagedAnswer as error:
            raise NoAnswer(f"{self.url}: its answer cannot be used: it {error}. Try later") from None

    def _ask(
        self,
        path: str,
        form: dict[str, str] | None,
        read: Callable[[IO[bytes]], Answer],
        max_bytes: int,
        seconds: float,
        tries: int | None = None,
    ) -> Answer | None:
        """Send a request until there is an answer that `read` accepts, and return what `read` returns.

        form: sent by POST.  max_bytes, seconds: bounds of the answer's body.
        None: the server has no such thing (404).
        Errors: ServerGone if the server does not answer, or refuses; DamagedAnswer if `read` refuses every answer.
        """
        import requests

        limits, tries = self.limits, tries or self.limits.tries
        method, timeout = "GET" if form is None else "POST", min(seconds, limits.request)
        connect_tries = limits.tries if self._is_there else limits.first_tries

        def tell(line: str) -> None:
            self.say(f"{self.url}: {line}")

        with open_session(limits.tries, connect_tries, limits.retry, tell, self.wait) as session:
            for attempt in range(1, tries + 1):
                self.wait(max(0.0, self._last + limits.between - time.monotonic()))
                self._last = time.monotonic()
                try:
                    response = session.request(
                        method, f"{self.url}/{path}", data=form, stream=True, allow_redirects=False, timeout=timeout
                    )
                # ValueError: a redirect to what is no address.
                except (requests.RequestException, ValueError) as error:
                    raise self._gone(f"does not answer ({reason_of(error)})") from None
                self._is_there = True
                with response, tempfile.TemporaryFile() as file:
                    if response.status_code == 404 and form is None:
                        return None
                    if response.status_code != 200:
                        raise self._refusal(response, path)
                    last: UserError | DamagedAnswer
                    try:
                        end = time.monotonic() + seconds
                        for chunk in read_body(response):
                            file.write(chunk)
                            if file.tell() > max_bytes:
                                raise DamagedAnswer(f"has more than {max_bytes / 1e6:g} MB")
                            if time.monotonic() > end:
                                raise requests.Timeout
                        file.seek(0)
                        return read(file)
                    except requests.Timeout:
                        last = self._gone(f"sends no complete answer within {seconds:g} s")
                    except requests.RequestException as error:
                        last = DamagedAnswer(f"is cut short ({reason_of(error)})")
                    except DamagedAnswer as error:
                        last = error
                if attempt < tries:
                    pause = min(limits.retry[0] * 2 ** (attempt - 1), limits.retry[1])
                    tell(f"its answer cannot be used, asking again in {pause:.0f} s")
                    self.wait(pause)
        if isinstance(last, DamagedAnswer) and not path.startswith("result"):
            raise ServerGone(f"{self.url}: its answer {last}. Check that this is the address of an alignment server.")
        raise last

    def _gone(self, problem: str) -> ServerGone:
        return ServerGone(f"{self.url}: {problem}. Try later: earlier answers are kept.")

    def _refusal(self, response: "requests.Response", path: str) -> ServerGone:
        """Return the error of a status that is neither success nor "no such thing"."""
        if response.is_redirect:
            target = printable(response.headers["Location"][:100])
            return ServerGone(f"{self.url}: redirects to {target}. Give that server to --msa-server if you trust it.")
        status = f"answers {response.status_code} {printable(response.reason or '')}"
        if response.status_code in BUSY:
            return self._gone(status)
        return ServerGone(f"{self.url}: {status} to {path.partition('/')[0]}. Check the address.")


def _read_status(file: IO[bytes]) -> dict[str, Any]:
    """Parse a ticket's status.  Errors: DamagedAnswer for anything else."""
    data = file.read()
    try:
        found = json.loads(data)
        return {**found, "status": str(found["status"])}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedAnswer(f"is {data[:60].decode(errors='replace')!r}, which says nothing of a ticket") from None


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of the cache; an empty one where the file is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
