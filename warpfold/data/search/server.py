"""Request alignments from a server with ColabFold's protocol, if the user has named one (docs/howto/alignments.md).

The protocol, from the server's source code (github.com/soedinglab/MMseqs2-App, backend/server.go, jobsystem.go):

* POST ticket/msa or ticket/pair, with the form fields q (FASTA) and mode, returns {"id": ..., "status": ...}.
* GET ticket/ID returns the same until the status is COMPLETE. Other statuses are RATELIMIT, MAINTENANCE, ERROR and
  UNKNOWN.
* GET result/download/ID returns a tar.gz of uniref.a3m, bfd.mgnify30.metaeuk30.smag30.a3m, pdb70.m8, or pair.a3m, in
  which each query's alignment ends with NUL. Its records are numbered from 101, as in q.

An id is a hash of q and mode, so that a repeated request costs the server nothing.
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

from warpfold.data.search.answer import DamagedAnswer, read_pairs, read_rows, unpack_answer
from warpfold.download import BUSY, check_address, open_session, read_body, reason_of
from warpfold.errors import UserError, printable
from warpfold.files import NO_LOCKS, digest_of, write_atomically, writing

if TYPE_CHECKING:
    import requests

FIRST = 101  # number of the first record in q
MSA, PAIR = "ticket/msa", "ticket/pair"
# ColabFold's defaults: with environmental sequences, and pairs of any two or more chains.
MODES = {MSA: "env", PAIR: "pairgreedy"}
# Ids become part of an address.
_ID = re.compile(r"[\w=-]{1,200}", re.ASCII)

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Limits of times (seconds) and sizes (bytes) for requests to a server.

    request: for the body of a status, and without a byte. download: for the body of an alignment. ticket: from its
    request to its result. between: minimum between requests. poll: between status requests, first and largest. retry:
    after a failure, first (doubled each time) and largest (also for Retry-After). tries: attempts of a request.
    first_tries: attempts before the first answer, because the address may be wrong. packed, unpacked: sizes of an
    answer.
    """

    request: float = 60.0
    download: float = 1800.0
    ticket: float = 4 * 3600.0
    between: float = 1.0
    poll: tuple[float, float] = (4.0, 40.0)
    retry: tuple[float, float] = (5.0, 300.0)
    tries: int = 8
    first_tries: int = 3
    packed: int = 10**9
    unpacked: int = 4 * 10**9


class ServerGone(UserError):
    """Raised if the server cannot be used now, so that further requests are pointless."""


class NoAnswer(UserError):
    """Raised if the server has no alignment for a query. Other queries may succeed."""


@dataclass
class AlignmentServer:
    """A server, and the folder that caches its answers and tickets by sequence and settings.

    say: called with messages for the user. wait: sleeps for some seconds. Raises UserError for an invalid address.
    """

    url: str
    cache: Path
    limits: ServerLimits = field(default_factory=ServerLimits)
    say: Callable[[str], None] = lambda line: None
    wait: Callable[[float], None] = field(default_factory=lambda: time.sleep)
    # Time of the last request.
    _last: float = field(default=float("-inf"), repr=False)
    # Whether the server has answered any request.
    _has_answered: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        self.url = check_address(self.url.rstrip("/"), "--msa-server")

    def alignments(self, sequence: str) -> list[Path]:
        """Return the files of a sequence's alignments and template hits (.m8).

        Raises `NoAnswer`, `ServerGone`, and UserError if the cache cannot be written.
        """
        return self._answer(MSA, [sequence])

    def pairs(self, sequences: Sequence[str]) -> list[Path]:
        """Return the files of paired alignments of a complex's sequences. Raises the errors of `alignments`."""
        return self._answer(PAIR, sequences)

    def cached(self, endpoint: str, sequences: Sequence[str]) -> list[Path] | None:
        """Return the files of a cached answer, or None."""
        folder = self._folder(endpoint, sequences)
        names = _read_json(folder / "answer.json").get("files")
        files = [folder / str(name) for name in names] if isinstance(names, list) else []
        return files if files and all(map(Path.is_file, files)) else None

    def _folder(self, endpoint: str, sequences: Sequence[str]) -> Path:
        """Return the cache folder of an answer."""
        text = json.dumps([self.url, endpoint, MODES[endpoint], *sequences])
        return self.cache / digest_of(text.encode())

    def _answer(self, endpoint: str, sequences: Sequence[str]) -> list[Path]:
        """Return the files of an answer, from the cache or from the server."""
        if (files := self.cached(endpoint, sequences)) is not None:
            return files
        with self._exclusive():
            # Another process may have fetched the answer in the meantime.
            if (files := self.cached(endpoint, sequences)) is not None:
                return files
            return self._fetch(endpoint, sequences)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Wait until no other process with the same cache sends requests."""
        with writing(self.cache):
            self.cache.mkdir(parents=True, exist_ok=True)
            # The file is closed below.
            file = open(self.cache / "lock", "a", encoding="utf-8")  # noqa: SIM115
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            yield

    def _fetch(self, endpoint: str, sequences: Sequence[str]) -> list[Path]:
        """Request an answer, or continue with a cached ticket, and cache the answer."""
        folder, end = self._folder(endpoint, sequences), time.monotonic() + self.limits.ticket
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        ticket = str(_read_json(folder / "ticket.json").get("id") or "")
        for _ in range(self.limits.tries):
            try:
                if not _ID.fullmatch(ticket):
                    fasta = "".join(f">{FIRST + i}\n{sequence}\n" for i, sequence in enumerate(sequences))
                    status = self._status(endpoint, {"q": fasta, "mode": MODES[endpoint]}, end)
                    ticket = str(status.get("id"))
                    if not isinstance(status.get("id"), str) or not _ID.fullmatch(ticket):
                        raise ServerGone(
                            f"{self.url}: returns no ticket ({str(status)[:100]}). Check that this is an alignment "
                            "server."
                        )
                    self._save_ticket(folder, ticket)
                texts = self._download(ticket, endpoint, sequences) if self._is_complete(ticket, end) else None
            except NoAnswer:
                # The next run sends a new request.
                self._save_ticket(folder, "")
                raise
            if texts is not None:
                for name, text in texts.items():
                    write_atomically(folder / name, text, sync=False)
                answer = {"server": self.url, "mode": MODES[endpoint], "sequences": [*sequences], "files": [*texts]}
                write_atomically(folder / "answer.json", json.dumps(answer, indent=1), sync=False)
                return [folder / name for name in texts]
            # The server has forgotten the ticket.
            ticket = ""
        raise ServerGone(f"{self.url}: forgets its tickets repeatedly. Try later.")

    def _save_ticket(self, folder: Path, ticket: str) -> None:
        """Cache the id of a ticket."""
        write_atomically(folder / "ticket.json", json.dumps({"id": ticket, "server": self.url}), sync=False)

    def _is_complete(self, ticket: str, end: float) -> bool:
        """Wait until a ticket is finished. Returns whether there is an answer; False if the server lacks the ticket."""
        pause, longest = self.limits.poll
        while (status := self._status(f"ticket/{ticket}", None, end)["status"]) in ("PENDING", "RUNNING"):
            self._check_time(end, status)
            self.wait(pause)
            pause = min(1.5 * pause, longest)
        return bool(status == "COMPLETE")

    def _check_time(self, end: float, status: str) -> None:
        """Raise ServerGone after the time limit of a ticket."""
        if time.monotonic() > end:
            raise ServerGone(
                f"{self.url}: has no answer after {self.limits.ticket / 60:.0f} min ({status}). Repeat the command "
                "later to continue: the ticket is kept."
            )

    def _status(self, path: str, form: dict[str, str] | None, end: float) -> dict[str, Any]:
        """Request the status of a ticket (PENDING, RUNNING, COMPLETE or UNKNOWN), and wait while the server is busy.

        Raises NoAnswer for ERROR, and ServerGone for MAINTENANCE and if the server stays busy.
        """
        pause, longest = self.limits.retry
        while True:
            answer = self._request(path, form, _read_status, 1 << 20, self.limits.request) or {"status": "UNKNOWN"}
            status = answer["status"]
            if status == "ERROR":
                raise NoAnswer(f"{self.url}: answers ERROR. Check that these are protein sequences, or try later.")
            if status == "MAINTENANCE":
                raise ServerGone(f"{self.url}: is under maintenance. Try later: earlier answers are kept.")
            if status != "RATELIMIT":
                return answer
            self._check_time(end, status)
            self.say(f"{self.url}: is busy, asked again in {pause:.0f} s")
            self.wait(pause)
            pause = min(2 * pause, longest)

    def _download(self, ticket: str, endpoint: str, sequences: Sequence[str]) -> dict[str, str] | None:
        """Download and validate the files of an answer, by name; None if the server has deleted it.

        Raises NoAnswer if it is damaged repeatedly, or of another sequence.
        """

        def read(packed: IO[bytes]) -> dict[str, str]:
            files = unpack_answer(packed, self.limits.unpacked)
            return read_rows(files, sequences[0]) if endpoint == MSA else read_pairs(files, sequences, FIRST)

        path, limits = f"result/download/{ticket}", self.limits
        try:
            return self._request(path, None, read, limits.packed, limits.download, min(3, limits.tries))
        except DamagedAnswer as error:
            raise NoAnswer(f"{self.url}: its answer cannot be used: it {error}. Try later.") from None

    def _request(
        self,
        path: str,
        form: dict[str, str] | None,
        read: Callable[[IO[bytes]], Answer],
        max_bytes: int,
        seconds: float,
        tries: int | None = None,
    ) -> Answer | None:
        """Send a request until `read` accepts an answer; returns the result of `read`, or None for status 404.

        form: sent by POST. max_bytes, seconds: limits of the body. Raises ServerGone if the server does not answer or
        refuses, and DamagedAnswer if `read` rejects every answer.
        """
        import requests

        limits, tries = self.limits, tries or self.limits.tries
        method, timeout = "GET" if form is None else "POST", min(seconds, limits.request)
        connect_tries = limits.tries if self._has_answered else limits.first_tries

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
                # ValueError: the target of a redirect is not an address.
                except (requests.RequestException, ValueError) as error:
                    raise self._gone(f"does not answer ({reason_of(error)})") from None
                self._has_answered = True
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
        """Return the error of a server that does not answer."""
        return ServerGone(f"{self.url}: {problem}. Try later: earlier answers are kept.")

    def _refusal(self, response: "requests.Response", path: str) -> ServerGone:
        """Return the error of a status other than 200 and 404."""
        if response.is_redirect:
            target = printable(response.headers["Location"][:100])
            return ServerGone(f"{self.url}: redirects to {target}. Pass that server to --msa-server if you trust it.")
        status = f"answers {response.status_code} {printable(response.reason or '')}"
        if response.status_code in BUSY:
            return self._gone(status)
        return ServerGone(f"{self.url}: {status} to {path.partition('/')[0]}. Check the address.")


def _read_status(file: IO[bytes]) -> dict[str, Any]:
    """Parse the status of a ticket. Raises DamagedAnswer for other content."""
    data = file.read()
    try:
        status = json.loads(data)
        return {**status, "status": str(status["status"])}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedAnswer(f"is {data[:60].decode(errors='replace')!r}, not the status of a ticket") from None


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of the cache; an empty object if the file is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
