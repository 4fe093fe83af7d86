"""Fetch a file that the user has asked for by name from a public address, or from a folder, whole or not at all.

What has come stays beside the file as NAME.fetching, with what the server said of it in NAME.fetching.json, so that the
same call goes on where the last one stopped.  Proxies are those of HTTPS_PROXY, HTTP_PROXY and NO_PROXY: urllib's.
"""

import hashlib
import http.client
import io
import json
import os
import re
import shutil
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

from warpfold import __version__
from warpfold.errors import UserError, printable
from warpfold.files import lock_file, opened, write_atomically, writing
from warpfold.progress import Progress, no_progress

AGENT = {"User-Agent": f"WarpFold/{__version__}"}
_PIECE = 1 << 20
_HEADERS = 1 << 20  # bytes that an answer may have beside the file: headers, and pages that redirect


class DownloadFailed(UserError):
    """The network or the server is at fault; what has come is kept, and the same call goes on."""

    exit_code = 1


class NotThere(DownloadFailed):
    """The server has no such file."""


class _TryAgain(Exception):
    """An answer that another attempt may better; seconds: what the server asks to wait."""

    def __init__(self, why: str, seconds: float | None = None) -> None:
        super().__init__(why)
        self.seconds = seconds


@dataclass(frozen=True, kw_only=True)
class DownloadLimits:
    """How long to wait for a server, and how often to ask again; seconds and bytes per second."""

    idle: float = 60.0  # without a byte, until a connection counts as lost
    slowest: float = 1000.0  # bytes per second over `idle`; below, a connection counts as lost
    total: float = 48 * 3600.0  # from the call to the last byte
    retry: tuple[float, float] = (2.0, 120.0)  # after a failure: at first, doubled each time, at most
    tries: int = 6  # in a row with hardly a new byte, until the server counts as gone
    first_tries: int = 3  # for the first byte: the network may not be there at all


@dataclass(frozen=True)
class Downloaded:
    """A file that is there and whole.

    address: where it came from, after redirections, or the file that was copied.  was_there: nothing was fetched.
    """

    path: Path
    address: str
    size: int
    sha256: str
    was_there: bool = False


def source_of(address: str, base: str | os.PathLike[str] | None) -> str | Path:
    """Return where to fetch a published file from: its address, or the file of its name under `base`.

    base: a mirror's address; a folder; the file itself.  Errors: UserError for a base that is none of these.
    """
    name = address.rpartition("/")[2]
    if base is None:
        return address
    if is_address(str(base)):
        mirror = check_address(str(base), "--from").rstrip("/")
        return mirror if mirror.endswith(f"/{name}") else f"{mirror}/{name}"
    path = Path(base)
    found = path / name if path.is_dir() else path
    if not found.is_file():
        missing = f"the folder has no {name}" if path.is_dir() else "is no http(s) address, and no such file or folder"
        raise UserError(f"--from {base}: {missing}; it is published at {address}")
    return found


def is_address(text: str) -> bool:
    """Return whether a text is meant as an address, and not as a path."""
    return bool(re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", text))


def check_address(address: str, option: str) -> str:
    """Return an http(s) address.  Errors: UserError for another one, about an option that gave it."""
    try:
        parts = urllib.parse.urlsplit(address)
        _ = parts.port
    except ValueError as error:
        raise UserError(f"{option} {address}: {error}; give an address such as https://host") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UserError(f"{option} {address}: is no http or https address; give one such as https://host")
    if parts.username is not None or not re.fullmatch(r"[!-~]+", address):
        raise UserError(f"{option} {address}: has a user or characters that do not belong there")
    return address


def download(
    source: str | Path,
    path: Path,
    *,
    sha256: str | None = None,
    most: int = 20 * 10**9,
    limits: DownloadLimits = DownloadLimits(),
    progress: Progress = no_progress,
) -> Downloaded:
    """Fetch a file from an http(s) address, or copy it, checked while it comes; it appears whole or not at all.

    A file that is there already is checked and kept, and nothing is asked.
    sha256: that it must have.  most: bytes that it may have.  progress: told megabytes.
    Errors: NotThere; DownloadFailed where the network or the server fails; UserError for a file that is too large, or
    of another hash, which is not kept, a bad address, and where nothing can be written.
    """
    if isinstance(source, str):
        check_address(source, "address")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    wanted = _Wanted(path, str(source), sha256, most)
    if path.exists():
        return wanted.there()
    with writing(wanted.part), lock_file(wanted.part, UserError(f"{path}: another process is fetching it")):
        if path.exists():  # that process has ended meanwhile
            wanted.part.unlink()
            return wanted.there()
        with open(wanted.part, "r+b") as file:
            come = _Come(wanted, file, progress)
            if isinstance(source, Path):
                come.restart()
                with opened(source, unpack=False) as stream:
                    come.total = os.fstat(stream.fileno()).st_size
                    come.take(stream.read)
                address = str(source)
            else:
                address = _fetch(come, limits)
            return come.finish(address)


@dataclass(frozen=True)
class _Wanted:
    """What is asked for."""

    path: Path
    source: str
    sha256: str | None
    most: int

    @property
    def part(self) -> Path:
        return self.path.with_name(f"{self.path.name}.fetching")

    @property
    def note(self) -> Path:
        return self.path.with_name(f"{self.path.name}.fetching.json")

    def there(self) -> Downloaded:
        """Return the file that is there already.  Errors: UserError if it is another one."""
        with opened(self.path, unpack=False) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # it has readinto
            size = file.tell()
        if wrong := self.differs(digest):
            raise UserError(f"{self.path}: is there, and is another file: {wrong}; move it away, or remove it")
        return Downloaded(self.path, str(self.path), size, digest, was_there=True)

    def differs(self, digest: str) -> str:
        """Return how a whole file differs from what is asked for, or nothing."""
        return "" if self.sha256 in (None, digest) else f"its SHA-256 is {digest}, not {self.sha256}"


@dataclass
class _Come:
    """What has come of a file: the bytes of the part, their hash, and what the server has said of the whole."""

    wanted: _Wanted
    file: IO[bytes]
    progress: Progress
    size: int = 0
    total: int | None = None  # that the server has named
    digest: Any = field(default_factory=hashlib.sha256)
    began: tuple[float, int] = (0.0, 0)  # when this connection was opened, with how many bytes

    def resume(self) -> dict[str, str]:
        """Take up what an earlier call has left; return the headers that ask for the rest, or none to begin anew.

        The rest fits only if it is of the same file: the server says so by its ETag or date, or the hash will.
        """
        try:
            note = json.loads(self.wanted.note.read_text(encoding="utf-8"))
            known = {name: str(note[name]) for name in ("source", "sha256", "validator")}
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            known = {}
        same = known.get("source") == self.wanted.source and known["validator"]
        by_hash = self.wanted.sha256 is not None and known.get("sha256") == self.wanted.sha256
        if not (same or by_hash):
            self.restart()
            return {}
        if not self.size:
            self.file.seek(0)
            while piece := self.file.read(_PIECE):
                self.digest.update(piece)
                self.size += len(piece)
        if not self.size:
            return {}
        return {"Range": f"bytes={self.size}-"} | ({"If-Range": known["validator"]} if same else {})

    def restart(self) -> None:
        """Forget what has come."""
        self.file.seek(0)
        self.file.truncate()
        self.size, self.total, self.digest = 0, None, hashlib.sha256()

    def heard(self, headers: Any) -> None:
        """Keep what the server says of the file: its ETag, unless it is a weak one, or its date."""
        tag = headers.get("ETag") or ""
        validator = tag if tag.startswith('"') else headers.get("Last-Modified") or ""
        note = {"source": self.wanted.source, "sha256": self.wanted.sha256 or "", "validator": validator}
        write_atomically(self.wanted.note, json.dumps(note), sync=False)

    def check_sizes(self) -> None:
        """Raise UserError if the size that is named is too large, or more than the disk has."""
        w = self.wanted
        if (self.total or self.size) > w.most:
            self.forget(f"has more than {w.most / 1e9:g} GB")
        left = (self.total or self.size) - self.size
        if left > (free := shutil.disk_usage(w.part.parent).free):
            raise UserError(f"{w.path}: {left / 1e9:.2f} GB are to come, and the disk has {free / 1e9:.2f} GB free")

    def take(self, read: Callable[[int], bytes], check: Callable[[int], None] = lambda size: None) -> None:
        """Append what `read` gives, up to its end, or the size that the file has to have."""
        self.check_sizes()
        self.began = time.monotonic(), self.size
        end = self.total or self.wanted.most
        while piece := read(_PIECE):
            with writing(self.wanted.part):
                self.file.write(piece)
            self.digest.update(piece)
            self.size += len(piece)
            check(self.size)
            self.tell()
            if self.size > end:
                self.forget(f"has more than the {end:,} bytes that it should have")

    def tell(self, what: str | None = None) -> None:
        """Report the progress, in megabytes, and the speed of this connection."""
        when, size = self.began
        speed = (self.size - size) / max(time.monotonic() - when, 1e-3) / 1e6
        done = self.size / 1e6
        total = (self.total or self.size) / 1e6
        self.progress(done, max(1, round(total)), f"{self.wanted.path.name}, {what or f'MB, {speed:.1f} MB/s'}")

    def forget(self, why: str) -> NoReturn:
        """Remove what has come, which is of no use, and raise UserError."""
        self.wanted.part.unlink(missing_ok=True)
        self.wanted.note.unlink(missing_ok=True)
        raise UserError(f"{self.wanted.source}: {why}; nothing of it is kept")

    def finish(self, address: str) -> Downloaded:
        """Check the whole and give it its name."""
        digest = self.digest.hexdigest()
        if wrong := self.wanted.differs(digest):
            self.forget(f"is not the published file: {wrong}")
        self.file.flush()
        os.fsync(self.file.fileno())
        os.replace(self.wanted.part, self.wanted.path)
        self.wanted.note.unlink(missing_ok=True)
        return Downloaded(self.wanted.path, address, self.size, digest)


def _fetch(come: _Come, limits: DownloadLimits) -> str:
    """Ask until the whole file has come; return its address, after redirections.

    Errors: as of `download`.
    """
    source, end = come.wanted.source, time.monotonic() + limits.total
    pause, most = limits.retry
    failed, best = 0, 0  # in a row, with hardly a new byte; bytes that had come at most
    while True:
        try:
            return _ask(come, limits, end)
        except urllib.error.HTTPError as error:
            with error:
                why, after = f"answers {error.code} {printable(error.reason)}", retry_after(error)
            if error.code in (404, 410):
                raise NotThere(f"{source}: {why}; give another place with --from") from None
            if error.code not in (408, 425, 429) and error.code < 500:
                raise DownloadFailed(f"{source}: {why}; give another place with --from") from None
        except _TryAgain as error:
            why, after = str(error), error.seconds
        except (OSError, http.client.HTTPException) as error:
            why, after = f"does not answer ({reason_of(error)})", None
        if come.size - best > limits.slowest * limits.idle:
            failed, best, pause = 0, come.size, limits.retry[0]
        failed += 1
        pause_now = pause if after is None else max(after, pause)
        if failed >= (limits.tries if come.size else limits.first_tries) or time.monotonic() + pause_now > end:
            raise DownloadFailed(
                f"{source}: {why}; {come.size / 1e6:.1f} MB are kept, and the same command goes on with them; "
                "behind a proxy set HTTPS_PROXY, from a mirror or a folder give --from"
            )
        come.tell(f"{why}, asked again in {pause_now:.0f} s")
        time.sleep(pause_now)
        pause = min(2 * pause, most)


def _ask(come: _Come, limits: DownloadLimits, end: float) -> str:
    """Ask once for what is missing, and take it; return the address that had it."""
    request = urllib.request.Request(come.wanted.source, headers={**AGENT, "Accept-Encoding": "identity"})
    for name, value in (rest := come.resume()).items():
        request.add_header(name, value)
    most = come.wanted.most + _HEADERS
    bounds = Bounded(most, limits.idle, lambda said: DownloadFailed(f"{come.wanted.source}: {said}"))
    opener = urllib.request.build_opener(_NeverLessSafe, bounds)
    try:
        answer = opener.open(request, timeout=limits.idle)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not rest:
            raise
        error.close()
        if re.fullmatch(rf"bytes \*/{come.size}", error.headers.get("Content-Range") or ""):
            return error.url or come.wanted.source  # all of it had come
        come.restart()
        raise _TryAgain("has another file by now") from None
    except ValueError as error:  # of urllib and http.client: an address or a length that is none
        raise http.client.HTTPException(f"is not HTTP: {error}") from None
    with answer:
        bounds.allow(end - time.monotonic())
        _heed(come, answer, rest)
        window = (time.monotonic(), come.size)

        def fast_enough(size: int) -> None:
            nonlocal window
            when, had = window
            if (passed := time.monotonic() - when) >= limits.idle:
                if size - had < passed * limits.slowest:
                    raise TimeoutError(f"{size - had} bytes in {passed:.0f} s")
                window = time.monotonic(), size

        come.take(answer.read1, fast_enough)
        if come.size < (whole := come.total or 0):
            raise _TryAgain(f"ended after {come.size:,} of {whole:,} bytes")
        return str(answer.url)


def _heed(come: _Come, answer: Any, rest: dict[str, str]) -> None:
    """Read what an answer's headers say; begin anew where it is not the rest that was asked for."""
    headers, source = answer.headers, come.wanted.source
    encoding, kind = headers.get("Content-Encoding") or "identity", headers.get_content_type()
    if encoding != "identity":
        raise DownloadFailed(f"{source}: answers with the encoding {printable(encoding)}, which nobody asked for")
    if kind == "text/html" and not come.wanted.path.name.endswith((".html", ".htm")):
        raise DownloadFailed(f"{source}: answers with a page, not with a file; is there a login between?")
    length = headers.get("Content-Length")
    total = int(length) if length and re.fullmatch(r"\d{1,15}", length) else None
    if answer.status == 206 and rest:
        found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", headers.get("Content-Range") or "")
        if found is None or int(found[1]) != come.size:
            come.restart()
            raise _TryAgain("gives another part than was asked for")
        come.total = None if found[3] == "*" else int(found[3])
        come.file.seek(come.size)
    elif answer.status == 200:
        come.restart()
        come.total = total
        if total is None and not answer.chunked and come.wanted.sha256 is None:
            raise DownloadFailed(f"{source}: does not say how long the file is: nobody could tell whether it was whole")
    else:
        raise DownloadFailed(f"{source}: answers {answer.status}, which is no file")
    come.heard(headers)


# ---- what every connection keeps to


def retry_after(error: urllib.error.HTTPError) -> float | None:
    """Return the seconds that a server asks to wait; None: it names none, or a time of day."""
    text = (error.headers.get("Retry-After") or "").strip()
    return float(text) if re.fullmatch(r"\d{1,9}", text) else None


def reason_of(error: Exception) -> str:
    """Return in some words why a connection failed."""
    reason = getattr(error, "reason", None) or error
    return printable(" ".join(str(reason).split())) or type(reason).__name__


class Bounded(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    """Opens connections whose answers, headers and all, are no larger than `most` and there within `seconds` from now.

    A socket's own timeout begins anew with every byte, and urllib reads the whole of a redirection.
    too_large: the error of a larger one, made of what is said of it.
    """

    def __init__(self, most: int, seconds: float, too_large: Callable[[str], Exception]) -> None:
        super().__init__()
        self.most, self.too_large = most, too_large
        self.allow(seconds)

    def allow(self, seconds: float) -> None:
        """Have the answer be there within `seconds` from now."""
        self.seconds, self.end = seconds, time.monotonic() + seconds

    def do_open(self, http_class: Any, req: Any, **more: Any) -> Any:
        def connect(host: str, **options: Any) -> http.client.HTTPConnection:
            connection: http.client.HTTPConnection = http_class(host, **options)
            connection.response_class = self._response  # type: ignore[assignment]  # http.client only calls it
            return connection

        return super().do_open(connect, req, **more)

    def _response(self, sock: socket.socket, *arguments: Any, **more: Any) -> http.client.HTTPResponse:
        response = http.client.HTTPResponse(sock, *arguments, **more)
        response.fp.close()
        response.fp = io.BufferedReader(_Received(sock, self))
        return response


class _Received(io.RawIOBase):
    """What a socket receives within the bounds of `Bounded`."""

    def __init__(self, sock: socket.socket, bounds: Bounded) -> None:
        super().__init__()
        self._socket, self._bounds, self._idle, self._size = sock, bounds, sock.gettimeout(), 0
        self._raw = sock.makefile("rb", buffering=0)  # keeps the socket open when the connection lets go of it

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Receive what there is, once."""
        left = self._bounds.end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"not all of it within {self._bounds.seconds:g} s")
        self._socket.settimeout(left if self._idle is None else min(left, self._idle))
        count = self._raw.readinto(buffer)
        self._size += count or 0
        if self._size > self._bounds.most:
            raise self._bounds.too_large(f"has more than {self._bounds.most / 1e6:g} MB")
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _NeverLessSafe(urllib.request.HTTPRedirectHandler):
    """Follows redirections to any host, as publishers' stores have them, but from https to nothing else."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        old, new = urllib.parse.urlsplit(req.full_url).scheme, urllib.parse.urlsplit(newurl).scheme
        if new != "https" and (old, new) != ("http", "http"):
            raise DownloadFailed(f"{req.full_url}: leads to {printable(newurl[:100])}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
