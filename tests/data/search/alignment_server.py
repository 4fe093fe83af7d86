"""Serve alignments in a thread by ColabFold's protocol, with faults that a test sets."""

import io
import json
import socket
import tarfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# What is sent instead of the next answers: an HTTP status with headers, a ticket status, or a fault.
Fault = str | tuple[int, dict[str, str]]


def packed(files: dict[str, str | bytes], links: Sequence[str] = ()) -> bytes:
    """Return a tar.gz of these files, and of links with these names."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, text in files.items():
            data = text.encode() if isinstance(text, str) else text
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for name in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(member)
    return out.getvalue()


def msa_files(sequences: Sequence[str]) -> dict[str, str | bytes]:
    """Return the server's alignments: in each database, a row with the first residue changed."""
    blocks = {
        name: "".join(
            f">{101 + i}\n{sequence}\n>{name}_{i}\t95\t0.5\nA{sequence[1:]}\n\0" for i, sequence in enumerate(sequences)
        )
        for name in ("uniref", "bfd.mgnify30.metaeuk30.smag30")
    }
    hits = "".join(f"{101 + i}\t1abc_A\t0.9\t18\t1\t0\t1\t18\t1\t18\t1e-9\t99\t18M\n" for i in range(len(sequences)))
    return {**{f"{name}.a3m": text for name, text in blocks.items()}, "pdb70.m8": hits, "msa.sh": "#!/bin/sh\n"}


def pair_files(sequences: Sequence[str]) -> dict[str, str | bytes]:
    """Return the paired alignments: rows of the sequences with the last residue changed."""
    return {
        "pair.a3m": "".join(f">{101 + i}\n{sequence}\n>p\n{sequence[:-1]}A\n\0" for i, sequence in enumerate(sequences))
    }


@dataclass
class Server:
    """A server: its address, its requests, and the faults that it sends before its next answers, by path."""

    url: str = ""
    asked: list[tuple[str, str]] = field(default_factory=list)  # path, User-Agent
    sequences: list[tuple[str, ...]] = field(default_factory=list)  # of each ticket that was requested
    modes: list[str] = field(default_factory=list)
    tickets: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)  # id -> endpoint, sequences
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    answer: Callable[[str, tuple[str, ...]], bytes] = lambda endpoint, sequences: packed(
        (pair_files if endpoint == "ticket/pair" else msa_files)(sequences)
    )

    def paths(self) -> list[str]:
        return [path.rpartition("/")[0] if "ticket/T" in path or "download" in path else path for path, _ in self.asked]


@contextmanager
def serving() -> Iterator[Server]:
    """Run a server within the context."""
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.respond(self.path.lstrip("/"), "")

        def do_POST(self) -> None:
            self.respond(self.path.lstrip("/"), self.rfile.read(int(self.headers["Content-Length"])).decode())

        def send(self, code: int, data: bytes, headers: dict[str, str] | None = None, size: int | None = None) -> None:
            self.send_response(code)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data) if size is None else size))
            self.end_headers()
            self.wfile.write(data)

        def respond(self, path: str, form: str) -> None:
            server.asked.append((path, self.headers["User-Agent"]))
            kind = path if form else "download" if "download" in path else "ticket"
            ticket = self.submitted(path, form) if form else path.rpartition("/")[2]
            fault = server.faults.get(kind, []).pop(0) if server.faults.get(kind) else None
            if isinstance(fault, tuple):
                self.send(fault[0], b"<html>no</html>", fault[1])
            elif fault == "drop":
                self.connection.close()
            elif fault == "cut":
                data = self.result(ticket)
                self.send(200, data[: len(data) // 2], size=len(data))
            elif fault is not None and fault.startswith("<"):
                self.send(200, fault.encode())
            elif kind == "download":
                self.send(200, self.result(ticket))
            else:
                known = ticket in server.tickets
                status = fault or ("COMPLETE" if known and not form else "PENDING" if known else "UNKNOWN")
                self.send(200, json.dumps({"id": "" if fault and form else ticket, "status": status}).encode())

        def result(self, ticket: str) -> bytes:
            return server.answer(*server.tickets[ticket])

        def submitted(self, path: str, form: str) -> str:
            values = urllib.parse.parse_qs(form)
            sequences = tuple(values["q"][0].split("\n")[1::2])
            server.sequences.append(sequences)
            server.modes.append(values["mode"][0])
            ticket = f"T{len(server.tickets)}"
            server.tickets[ticket] = path, sequences
            return ticket

    host = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{host.server_address[1]}"
    thread = threading.Thread(target=host.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        host.shutdown()
        host.server_close()
        thread.join()


@contextmanager
def sending(*answers: bytes, pause: float = 0.0) -> Iterator[str]:
    """Run a server that answers requests with these bytes, one after another. Yields its address.

    pause: seconds after every byte of the last.
    """
    listener = socket.create_server(("127.0.0.1", 0))

    def answer_all() -> None:
        for number, answer in enumerate(answers, 1):
            connection, _ = listener.accept()
            with connection, suppress(OSError):  # the client has closed the connection
                asked = connection.makefile("rb")
                head = b"".join(iter(asked.readline, b"\r\n")).lower()  # reset if closed before
                asked.read(int((head.partition(b"content-length:")[2].split() or [b"0"])[0]))
                step = 1 if pause and number == len(answers) else len(answer)
                for place in range(0, len(answer), step):
                    connection.sendall(answer[place : place + step])
                    time.sleep(pause)

    thread = threading.Thread(target=answer_all, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()
