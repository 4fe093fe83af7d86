"""Provide a file server in a thread that supports ranges and ETags and misbehaves on request."""

import hashlib
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# The server's misbehaviour for one request. A tuple is sent as the response's status and headers.
# "cut 1000" sends 1000 bytes and closes the connection, and "stall 1000" sends 1000 bytes and pauses for a second.
# "drop" closes the connection before the response, "slow" sends a byte every 20 ms, "endless" never stops sending, and
# "flip" flips a bit of the last byte.
Fault = str | tuple[int, dict[str, str]]


@dataclass
class FileServer:
    """State of a file server.

    url: its address.  files: contents by path.  faults: faults of the next requests, one each; later requests are
    served normally.  asked: the requests so far.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    ranges: bool = True
    # False: send Last-Modified instead of an ETag.
    tags: bool = True
    if_range: bool = True  # honours If-Range
    # Headers of every response; they override the server's own.
    headers: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)  # path, Range
    # Faults apply only to paths that contain this text.
    faulty: str = ""


@contextmanager
def serving(files: dict[str, bytes] | None = None) -> Iterator[FileServer]:
    """Run a file server within the context."""
    server = FileServer(files=dict(files or {}))

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            # The client may close the connection early.
            with suppress(OSError):
                self.respond(server.files.get(re.sub(r"^(http://[^/]+)?/", "", self.path)))

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_CONNECT(self) -> None:
            server.asked.append((self.path, "CONNECT"))
            self.head(403, {})

        def head(self, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in ({"Content-Length": "0"} | headers | server.headers).items():
                self.send_header(name, value)
            self.end_headers()

        def respond(self, data: bytes | None) -> None:
            server.asked.append((self.path, self.headers["Range"] or ""))
            fault = server.faults.pop(0) if server.faults and server.faulty in self.path else None
            if isinstance(fault, tuple):
                self.head(*fault)
                return
            if fault == "drop":
                self.connection.close()
                return
            if data is None:
                self.head(404, {})
                return
            tag = f'"{hashlib.sha256(data).hexdigest()[:8]}"'
            known = {"ETag": tag} if server.tags else {"Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
            part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")
            changed = server.if_range and (self.headers["If-Range"] or tag) not in (tag, *known.values())
            if not server.ranges or changed:
                part = None
            start, end = (int(part[1]), min(int(part[2] or len(data)) + 1, len(data))) if part else (0, len(data))
            if start and start >= len(data):
                self.head(416, {"Content-Range": f"bytes */{len(data)}"})
                return
            extent = {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"} if part else {}
            self.head(206 if part else 200, {"Content-Length": str(end - start), **known, **extent})
            if self.command == "GET":
                self.send(data[start:end], fault)

        def send(self, data: bytes, fault: str | None) -> None:
            what, _, count = (fault or "").partition(" ")
            while what == "endless":
                self.wfile.write(bytes(1 << 16))
            for byte in data if what == "slow" else b"":
                self.wfile.write(bytes([byte]))
                time.sleep(0.02)
            if what == "flip":
                data = data[:-1] + bytes([data[-1] ^ 1])
            if what != "slow":
                self.wfile.write(data[: int(count) if count else None])
            if what == "stall":
                time.sleep(1)

    host = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    host.daemon_threads = True
    server.url = f"http://127.0.0.1:{host.server_address[1]}"
    thread = threading.Thread(target=host.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        host.shutdown()
        host.server_close()
        thread.join()
