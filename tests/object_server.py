"""An object store for tests: moto's S3 on a port of this machine, where requests fail as they are told to."""

import os
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

REFUSALS = {
    "busy": ("503 Service Unavailable", "SlowDown", "Please reduce your request rate."),
    "denied": ("403 Forbidden", "AccessDenied", "Access Denied"),
    "expired": ("400 Bad Request", "ExpiredToken", "The provided token has expired."),
    "skewed": ("403 Forbidden", "RequestTimeTooSkewed", "The difference between the request time is too large."),
}


@dataclass
class Fault:
    """What happens to the next `count` requests of a method whose path has some text."""

    kind: str  # of REFUSALS; "slow": after a second; "torn": half of the answer; "flipped": with another byte in it
    count: int
    method: str
    having: str


@dataclass
class ObjectServer:
    """A bucket, the requests that were made, and the faults that are to come."""

    address: str  # http://127.0.0.1:PORT
    bucket: str
    requests: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}"

    def fail(self, kind: str, count: int = 1, method: str = "GET", having: str = "") -> None:
        self.faults.append(Fault(kind, count, method, having))

    def client(self) -> Any:
        import boto3

        return boto3.client("s3", endpoint_url=self.address)

    def put(self, key: str, data: bytes) -> None:
        self.client().put_object(Bucket=self.bucket, Key=key, Body=data)

    def delete(self, key: str) -> None:
        self.client().delete_object(Bucket=self.bucket, Key=key)

    def upload(self, folder: Path, name: str) -> None:
        """Copy a folder into the bucket, as `aws s3 cp --recursive` does."""
        for file in folder.iterdir():
            self.put(f"{name}/{file.name}", file.read_bytes())

    def publish(self) -> None:
        """Let everybody read all that was written."""
        client = self.client()
        for found in client.list_objects_v2(Bucket=self.bucket)["Contents"]:
            client.put_object_acl(Bucket=self.bucket, Key=found["Key"], ACL="public-read")

    def environment(self, cache: Path) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "WARPFOLD_CACHE": str(cache),
        }

    def application(self, moto: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
        """Return moto's application behind the faults."""

        def serve(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            """Answer one request, as the first fault says that fits it."""
            method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
            self.requests.append(f"{method} {path} {environ.get('HTTP_RANGE', '')}".strip())
            fault = next((f for f in self.faults if f.count and f.method == method and f.having in path), None)
            if fault is None:
                return moto(environ, start)
            fault.count -= 1
            if fault.kind in REFUSALS:
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                status, code, message = REFUSALS[fault.kind]
                body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
                start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
                return [body]
            if fault.kind == "slow":
                time.sleep(1)
                return moto(environ, start)
            body = b"".join(moto(environ, start))
            middle = len(body) // 2
            return (
                [body[:middle]]
                if fault.kind == "torn"
                else [body[:middle], bytes([body[middle] ^ 1]), body[middle + 1 :]]
            )

        return serve


@contextmanager
def object_server(bucket: str) -> Iterator[ObjectServer]:
    """Serve a bucket; skip the test where moto is not installed."""
    pytest.importorskip("obstore", reason="needs obstore: pip install 'warpfold[objects]'")
    server = pytest.importorskip("moto.server", reason="needs moto: pip install 'moto[s3]' flask flask-cors")
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *_: object) -> None:
            """Say nothing."""

    found = ObjectServer("", bucket)
    moto = server.DomainDispatcherApplication(server.create_backend_app)
    serving = make_server("127.0.0.1", 0, found.application(moto), threaded=True, request_handler=Quiet)
    found.address = f"http://127.0.0.1:{serving.port}"
    thread = threading.Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    urllib.request.urlopen(urllib.request.Request(f"{found.address}/{bucket}", method="PUT"))
    yield found
    serving.shutdown()
    thread.join()


@pytest.fixture
def objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """Serve a bucket of this test alone, with the environment that leads there."""
    with object_server(f"bucket-{os.getpid()}-{abs(hash(str(tmp_path))) % 10**9}") as server:
        for name, value in server.environment(tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        yield server
