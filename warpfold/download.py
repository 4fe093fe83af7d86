"""HTTP for published parameters and the alignment server: sessions that retry, bounded bodies, resumed downloads.

The user always names the source. Proxies and certificates follow the environment: HTTPS_PROXY, NO_PROXY,
REQUESTS_CA_BUNDLE.
"""

import contextlib
import logging
import os
import re
import shutil
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from warpfold import __version__
from warpfold.errors import UserError, printable
from warpfold.files import is_address, opened, writing
from warpfold.progress import Progress, no_progress

if TYPE_CHECKING:
    from requests import Response, Session

TIMEOUT = 60.0  # seconds without a byte
CHUNK_BYTES = 1 << 20
# Seconds before a download's second attempt, and the longest pause.
BACKOFF = (2.0, 60.0)
# Consecutive broken connections with at most CHUNK_BYTES of new data.
MAX_BREAKS = 6
MAX_REDIRECTS = 10
# These errors may be temporary: request timeout, too early, too many requests, and all server errors.
BUSY = frozenset({408, 425, 429, *range(500, 600)})


class DownloadFailed(UserError):
    """A download failed because of the network or the server, not because of the user's input."""

    exit_code = 1


def source_of(address: str, base: str | os.PathLike[str] | None) -> str | Path:
    """Return the source of a published file: its address, or the file of the same name under `base`.

    base: the address of a mirror, a folder, or the file itself.  Raises UserError for any other base.
    """
    name = address.rpartition("/")[2]
    if base is None:
        return address
    if is_address(str(base)):
        mirror = check_address(str(base), "--from").rstrip("/")
        return mirror if mirror.endswith(f"/{name}") else f"{mirror}/{name}"
    path = Path(base)
    local_file = path / name if path.is_dir() else path
    if not local_file.is_file():
        missing = f"the folder has no {name}" if path.is_dir() else "is no http(s) address, and no such file or folder"
        raise UserError(f"--from {base}: {missing}; it is published at {address}")
    return local_file


def check_address(address: str, option: str) -> str:
    """Validate and return an http(s) address.  Raises UserError that names the option for any other address."""
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


def open_session(
    tries: int,
    connect_tries: int,
    backoff: tuple[float, float],
    tell: Callable[[str], None],
    wait: Callable[[float], None] = time.sleep,
) -> "Session":
    """Open a session that repeats requests while the server is busy or unreachable.

    tries, connect_tries: the largest number of attempts, and of attempts without a connection.
    backoff: seconds before the second attempt, doubled after each attempt, and the longest pause, which also limits
    Retry-After.
    tell: called with one line before each pause.  wait: sleeps.
    """
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.exceptions import InvalidHeader
    from urllib3.util import Retry

    first, longest = backoff

    class BoundedRetry(Retry):
        def increment(self, method: Any = None, url: Any = None, response: Any = None, *rest: Any, **more: Any) -> Any:
            # urllib3 would otherwise read the whole body of the error page, which may have no end.
            if response is not None:
                response.close()
            return super().increment(method, url, response, *rest, **more)

        def sleep(self, response: Any = None) -> None:
            """Wait as long as the server asks, or twice as long as before, but never longer than `longest`."""
            pause = first * 2 ** (len(self.history) - 1)
            if response is not None:
                with contextlib.suppress(InvalidHeader):
                    pause = self.get_retry_after(response) or pause
            pause, last = min(pause, longest), self.history[-1]
            problem = f"answers {last.status}" if last.error is None else f"does not answer ({reason_of(last.error)})"
            tell(f"{problem}, asking again in {pause:.0f} s")
            wait(pause)

    retry = BoundedRetry(
        total=tries - 1, connect=connect_tries - 1, other=connect_tries - 1, allowed_methods=None,
        status_forcelist=BUSY, raise_on_status=False,
    )  # fmt: skip
    session = requests.Session()
    session.headers.update({"User-Agent": f"WarpFold/{__version__}", "Accept-Encoding": "identity"})
    session.hooks["response"].append(_close_redirect)
    session.mount("https://", HTTPAdapter(max_retries=retry))
    session.mount("http://", HTTPAdapter(max_retries=retry))
    return session


def _close_redirect(response: "Response", **_: Any) -> None:
    """Close a redirect, whose whole body requests would otherwise read even if it does not follow it."""
    if response.is_redirect:
        response.close()


def reason_of(error: BaseException) -> str:
    """Return the innermost cause of a failed connection in a few words."""
    for inner in (getattr(error, "reason", None), *error.args, error.__cause__):
        if isinstance(inner, BaseException):
            return reason_of(inner)
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return printable(" ".join(text.split())) or type(error).__name__


def read_body(response: "Response") -> Iterator[bytes]:
    """Yield the body as it arrives, without waiting for full chunks.

    Raises requests.ConnectionError if the connection breaks or the body is shorter than announced.
    """
    import requests
    from urllib3.exceptions import HTTPError

    try:
        while chunk := response.raw.read1(CHUNK_BYTES, decode_content=False):
            yield chunk
    # A chunk with an invalid length raises ValueError.
    except (HTTPError, ValueError) as error:
        raise requests.ConnectionError(error) from error


def fetch_file(
    source: str | Path, path: Path, sha256: str | None, max_bytes: int, progress: Progress = no_progress
) -> str:
    """Download or copy a file to `path`, which must not exist.  The file appears only complete and verified.

    Returns the address after redirects.
    Raises the errors of `receive`, and UserError for a file with another hash and for an unwritable folder.
    """
    import pooch

    pooch.get_logger().setLevel(logging.WARNING)
    address = str(source)

    def write_draft(url: str, draft: str, _: Any) -> None:
        nonlocal address
        with open(draft, "wb") as file:
            address = receive(source, file, path.name, max_bytes, progress)
            # Only the owner can read pooch's temporary file. Give it the permissions of any new file.
            os.umask(mask := os.umask(0o077))
            os.fchmod(file.fileno(), 0o666 & ~mask)
            os.fsync(file.fileno())

    try:
        with writing(path):
            folder = os.path.abspath(path.parent)
            pooch.retrieve(address, sha256 and f"sha256:{sha256}", path.name, folder, downloader=write_draft)
    except ValueError:  # pooch: hashes differ
        raise UserError(
            f"{source}: is not the published file, whose SHA-256 is {sha256}. Try another source."
        ) from None
    return address


def receive(source: str | Path, file: IO[bytes], name: str, max_bytes: int, progress: Progress = no_progress) -> str:
    """Download or copy a file into an open, empty file, and return the address after redirects.

    If the connection breaks, only the remainder is requested.  The response is used only if its ETag or date and its
    total size show that it continues the same file.  Otherwise the download restarts.
    progress: receives megabytes.
    Raises DownloadFailed if the network or the server fails, and UserError for a file of more than `max_bytes` or a
    full disk.
    """
    if isinstance(source, Path):
        with opened(source, unpack=False) as stream:
            shutil.copyfileobj(stream, file, CHUNK_BYTES)
        return str(source)
    import requests

    size, total, validator, breaks = 0, 0, "", 0

    def tell(what: str) -> None:
        progress(size / 1e6, max(1, round((total or size) / 1e6)), f"{name}, {what}")

    with open_session(5, 3, BACKOFF, tell) as session:
        while True:
            headers = {"Range": f"bytes={size}-", "If-Range": validator} if size and total and validator else {}
            before = size
            try:
                with _get(session, source, headers) as response:
                    if response.status_code == 206 and headers:
                        part = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
                        same = part and int(part[1]) == size and part[2] in ("*", str(total))
                        # A response to If-Range must repeat the ETag, but may omit the date.
                        new_validator = _validator(response)
                        if not same or (new_validator != validator and (new_validator or validator.startswith('"'))):
                            size, total, validator = 0, 0, ""
                            raise requests.ConnectionError("another file than before")
                    elif response.status_code == 200:
                        size, total, validator = 0, _length(response, source, name), _validator(response)
                    else:
                        raise DownloadFailed(
                            f"{source}: answers {response.status_code} {printable(response.reason or '')}. "
                            "Give another source with --from."
                        )
                    too_large = UserError(f"{source}: is larger than it should be. Give another source with --from.")
                    if total > max_bytes:
                        raise too_large
                    file.seek(size)
                    file.truncate()
                    disk = os.fstatvfs(file.fileno())
                    if total - size > (free := disk.f_bavail * disk.f_frsize):
                        raise UserError(
                            f"{name}: needs {(total - size) / 1e9:.2f} GB, and the disk has {free / 1e9:.2f} GB free. "
                            "Make room, or choose another folder with --out."
                        )
                    began, before = time.monotonic(), size
                    for chunk in read_body(response):
                        file.write(chunk)
                        size += len(chunk)
                        if size > (total or max_bytes):
                            raise too_large
                        tell(f"MB, {(size - before) / max(time.monotonic() - began, 1e-3) / 1e6:.1f} MB/s")
                    if size < total:
                        raise requests.ConnectionError(f"{size:,} of {total:,} bytes")
                    file.flush()
                    return str(response.url)
            except requests.RequestException as error:
                breaks = 0 if size - before > CHUNK_BYTES else breaks + 1
                # Before the first byte, the session has already retried.
                if breaks >= MAX_BREAKS or not (size or before):
                    raise DownloadFailed(
                        f"{source}: does not answer ({reason_of(error)}). Try later, set HTTPS_PROXY behind a proxy, "
                        "or give a mirror or a folder with --from."
                    ) from None
                tell(f"connection lost ({reason_of(error)})")
                time.sleep(min(BACKOFF[0] * breaks, BACKOFF[1]))


def _get(session: "Session", address: str, headers: dict[str, str]) -> "Response":
    """Request an address and follow its redirects, but never from https to another protocol."""
    for _ in range(MAX_REDIRECTS):
        try:
            response = session.get(address, headers=headers, timeout=TIMEOUT, stream=True, allow_redirects=False)
            if not response.is_redirect:
                return response
            target = urllib.parse.urljoin(address, response.headers["Location"])
            scheme = urllib.parse.urlsplit(target).scheme
        except ValueError as error:
            raise DownloadFailed(f"{address}: redirects to no address ({error}). Give --from.") from None
        safe = ("https",) if address.startswith("https:") else ("http", "https")
        if scheme not in safe:
            raise DownloadFailed(
                f"{address}: redirects to {printable(target[:100])}, which is not {safe[-1]}. "
                "Give another source with --from."
            )
        address = target
    raise DownloadFailed(f"{address}: redirects more than {MAX_REDIRECTS} times. Give another source with --from.")


def _validator(response: "Response") -> str:
    """Return the ETag of a file, unless it is a weak one, or its date."""
    tag = response.headers.get("ETag", "")
    return tag if tag.startswith('"') else response.headers.get("Last-Modified", "")


def _length(response: "Response", source: str, name: str) -> int:
    """Return the size of a file according to its headers, or 0 for chunked transfer, which marks its end.

    Raises DownloadFailed for a page instead of a file, a compressed file, and an unknown size.
    """
    headers = response.headers
    if headers.get("Content-Encoding", "identity") != "identity":
        raise DownloadFailed(f"{source}: is sent compressed, which was not requested. Give another source with --from.")
    if headers.get("Content-Type", "").startswith("text/html"):
        raise DownloadFailed(f"{source}: answers with a page, not with a file. Log in to the network, or give --from.")
    length = headers.get("Content-Length", "")
    if re.fullmatch(r"\d{1,15}", length):
        return int(length)
    if headers.get("Transfer-Encoding", "").lower() != "chunked":
        raise DownloadFailed(f"{source}: does not state the file's size. Give another source with --from.")
    return 0
