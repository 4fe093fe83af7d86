"""A file server of our own, in a thread: it has ranges and ETags, as stores have, and misbehaves as it is told."""

import hashlib
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# What is done instead of an answer: a status with headers; bytes after which the connection is closed ("cut 1000"),
# or is not ("stall 1000"); "drop" before any; "slow": a byte every 20 ms; "endless": without a length, for ever.
Fault = str | tuple[int, dict[str, str]]


@dataclass
class FileServer:
    """Its address, its files by path, the faults that come before its next proper answers, and what it was asked."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    ranges: bool = True
    tags: bool = True  # or dates
    if_range: bool = True  # heeds If-Range
    headers: dict[str, str] = field(default_factory=dict)  # of every answer, over its own
    asked: list[tuple[str, str]] = field(default_factory=list)  # path, Range


@contextmanager
def serving(files: dict[str, bytes] | None = None) -> Iterator[FileServer]:
    """Give a server at work."""
    server = FileServer(files=dict(files or {}))

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            with suppress(OSError):  # the client has had enough
                self.respond(server.files.get(re.sub(r"^(http://[^/]+)?/", "", self.path)))

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
            fault = server.faults.pop(0) if server.faults else None
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
            start = int(re.sub(r"\D", "", self.headers["Range"] or "0"))
            changed = server.if_range and (self.headers["If-Range"] or tag) not in (tag, *known.values())
            if not server.ranges or changed:
                start = 0
            if start and start >= len(data):
                self.head(416, {"Content-Range": f"bytes */{len(data)}"})
                return
            part = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
            self.head(206 if start else 200, {"Content-Length": str(len(data) - start), **known, **part})
            self.send(data[start:], fault)

        def send(self, data: bytes, fault: str | None) -> None:
            what, _, count = (fault or "").partition(" ")
            while what == "endless":
                self.wfile.write(bytes(1 << 16))
            for byte in data if what == "slow" else b"":
                self.wfile.write(bytes([byte]))
                time.sleep(0.02)
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
