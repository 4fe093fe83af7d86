"""Test downloads: a file is complete and verified or absent, and lost connections resume, for any server behaviour."""

import hashlib
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.downloads import Fault, FileServer, serving
from warpfold import download
from warpfold.download import DownloadFailed, fetch_file, source_of
from warpfold.errors import UserError

DATA = random.Random(0).randbytes(300_000)
SHA256 = hashlib.sha256(DATA).hexdigest()
ALONE = """
import sys
from pathlib import Path
from warpfold.download import fetch_file
fetch_file(sys.argv[1], Path(sys.argv[2]), None, 10**9)
"""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setattr(download, "TIMEOUT", 0.5)
    monkeypatch.setattr(download, "BACKOFF", (0.01, 0.02))
    with serving({"a.npz": DATA}) as found:
        yield found


def fetch(server: FileServer, folder: Path, sha256: str | None = None, max_bytes: int = 10**6, **more: Any) -> bytes:
    fetch_file(f"{server.url}/a.npz", folder / "a.npz", sha256, max_bytes, **more)
    assert os.listdir(folder) == ["a.npz"]
    return (folder / "a.npz").read_bytes()


def test_a_file_comes_complete_and_verified(server: FileServer, tmp_path: Path) -> None:
    told: list[tuple[float, int, str]] = []
    umask = os.umask(0o027)
    try:
        assert fetch(server, tmp_path, SHA256, progress=lambda *one: told.append(one)) == DATA
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "a.npz").stat().st_mode) == 0o640
    assert told[-1][0] == 0.3
    assert "MB/s" in told[-1][2]
    assert server.asked == [("/a.npz", "")]


@pytest.mark.parametrize("tags", [True, False])
@pytest.mark.parametrize("fault", ["cut 100000", "stall 100000"])
def test_a_lost_connection_is_resumed(server: FileServer, tmp_path: Path, fault: str, tags: bool) -> None:
    server.faults, server.tags = [fault, "drop", (503, {"Retry-After": "0"}), fault], tags
    assert fetch(server, tmp_path) == DATA
    begun = [0 if not asked else int(asked.removeprefix("bytes=").rstrip("-")) for _, asked in server.asked]
    assert begun == [0, 100_000, 100_000, 100_000, 200_000]


@pytest.mark.parametrize(
    ("change", "headers", "requests"),
    [
        ("nothing", {}, 2),
        ("its server ignores ranges", {}, 2),
        ("its server heeds If-Range", {}, 2),
        ("its server ignores If-Range", {}, 3),  # a 206 with another ETag
        ("another total", {"Content-Range": "bytes 100000-299999/299999"}, 3),
        ("another start", {"Content-Range": "bytes 5-299999/300000"}, 3),
        ("an unknown total", {"Content-Range": "bytes 100000-299999/*"}, 2),
        # A weak ETag does not identify the bytes, so no range is requested.
        ("a weak ETag", {"ETag": "W/weak"}, 2),
    ],
)
def test_two_files_are_never_joined(
    server: FileServer, tmp_path: Path, change: str, headers: dict[str, str], requests: int
) -> None:
    server.ranges, server.if_range = "ignores ranges" not in change, "ignores If-Range" not in change
    server.headers = headers
    data = DATA[::-1] if "If-Range" in change else DATA

    def replace(*_: object) -> None:
        server.files["a.npz"] = data

    server.faults = ["cut 100000"]
    assert fetch(server, tmp_path, progress=replace) == data
    assert len(server.asked) == requests


def test_a_part_is_not_taken_for_the_whole(server: FileServer, tmp_path: Path) -> None:
    """A 206 may end before the file does, and need not state the total again."""
    server.faults = ["cut 100000", (206, {"Content-Range": "bytes 100000-99999/*", "ETag": f'"{SHA256[:8]}"'})]
    assert fetch(server, tmp_path) == DATA
    assert server.asked[-1] == ("/a.npz", "bytes=100000-")


@pytest.mark.parametrize(
    ("faults", "headers", "more", "error", "says"),
    [
        ([], {}, {"sha256": "0" * 64}, UserError, "is not the published file, whose SHA-256 is 000"),
        ([], {}, {"max_bytes": 1000}, UserError, "is larger than it should be"),
        ([(404, {})], {}, {}, DownloadFailed, r"answers 404 Not Found\. Give another source with --from"),
        ([(403, {})], {}, {}, DownloadFailed, "answers 403 Forbidden"),
        ([(503, {})] * 5, {}, {}, DownloadFailed, "answers 503"),
        ([], {"Content-Type": "text/html; charset=utf-8"}, {}, DownloadFailed, "answers with a page, not with a file"),
        ([], {"Content-Encoding": "gzip"}, {}, DownloadFailed, "is sent compressed"),
        ([], {"Content-Length": "many"}, {}, DownloadFailed, "does not state the file's size"),
        ([], {"Content-Length": "9" * 12}, {}, UserError, "is larger than it should be"),
        ([], {"Content-Length": "9" * 12}, {"max_bytes": 10**12}, UserError, r"needs 1000\.00 GB, and the disk has"),
        ([(302, {"Location": "/a.npz"})] * 20, {}, {}, DownloadFailed, "redirects more than 10 times"),
        ([(302, {"Location": "ftp://127.0.0.1/a.npz"})], {}, {}, DownloadFailed, "which is not https"),
        ([(302, {"Location": "file:///etc/passwd"})], {}, {}, DownloadFailed, "which is not https"),
        (["drop"] * 5, {}, {}, DownloadFailed, r"does not answer \(.*set HTTPS_PROXY behind a proxy"),
        (["cut 10", *["cut 0"] * 6], {}, {}, DownloadFailed, "does not answer"),
        ([(206, {})], {}, {}, DownloadFailed, "answers 206"),
    ],
)
def test_anything_but_the_file_is_refused(
    server: FileServer,
    tmp_path: Path,
    faults: list[Fault],
    headers: dict[str, str],
    more: dict[str, Any],
    error: type[UserError],
    says: str,
) -> None:
    server.faults, server.headers = list(faults), headers
    with pytest.raises(error, match=says) as found:
        fetch(server, tmp_path, **more)
    assert str(found.value).isprintable()
    assert os.listdir(tmp_path) == []


def test_redirects_are_followed_but_never_leave_https(server: FileServer, tmp_path: Path) -> None:
    server.faults, server.files["store/a.npz"] = [(302, {"Location": "/store/a.npz"})], DATA
    assert fetch_file(f"{server.url}/a.npz", tmp_path / "a.npz", None, 10**6) == f"{server.url}/store/a.npz"
    redirect = SimpleNamespace(is_redirect=True, close=lambda: None, headers={"Location": "http://host/b"})
    with pytest.raises(DownloadFailed, match="redirects to http://host/b, which is not https"):
        download._get(SimpleNamespace(get=lambda *_, **__: redirect), "https://host/a", {})  # type: ignore[arg-type]


def test_proxies_come_from_the_environment(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(download, "TIMEOUT", 20.0)
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.setenv("https_proxy", server.url)
    fetch_file("http://parameters.invalid/a.npz", tmp_path / "a.npz", SHA256, 10**6)
    assert server.asked == [("http://parameters.invalid/a.npz", "")]
    with pytest.raises(DownloadFailed, match="Tunnel connection failed: 403 Forbidden"):
        fetch_file("https://parameters.invalid/b.npz", tmp_path / "b.npz", None, 10**6)
    assert server.asked[-1] == ("parameters.invalid:443", "CONNECT")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "a.npz").unlink()
    assert fetch(server, tmp_path) == DATA
    assert server.asked[-1] == ("/a.npz", "")


def test_a_full_disk_is_one_line(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=1000))
        with pytest.raises(UserError, match=r"needs 0\.00 GB, and the disk has 0\.00 GB free\. Make room"):
            fetch(server, tmp_path)
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n" + ALONE
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, f"{server.url}/a.npz", str(tmp_path / "a.npz")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "a.npz: cannot be written: File too large" in ended.stderr
    assert os.listdir(tmp_path) == []


def test_an_interrupted_download_leaves_nothing(server: FileServer, tmp_path: Path) -> None:
    server.faults = ["slow"]
    # A shell makes background jobs ignore SIGINT, and processes that the tests start inherit this.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + ALONE
    alone = [sys.executable, "-c", code, f"{server.url}/a.npz", str(tmp_path / "a.npz")]
    with subprocess.Popen(alone, stderr=subprocess.DEVNULL) as process:
        while not os.listdir(tmp_path):
            time.sleep(0.02)
        assert os.listdir(tmp_path) != ["a.npz"]
        process.send_signal(signal.SIGINT)
    assert os.listdir(tmp_path) == []


def test_from_a_mirror_a_folder_or_a_file(tmp_path: Path) -> None:
    address, there = "https://host/sets/a.npz", tmp_path / "a.npz"
    there.write_bytes(DATA)
    assert source_of(address, None) == address
    assert (
        source_of(address, "http://mirror/x/") == source_of(address, "http://mirror/x/a.npz") == "http://mirror/x/a.npz"
    )
    assert source_of(address, tmp_path) == source_of(address, str(there)) == there
    for base, says in {
        "http://user@mirror": "has a user",
        "s3://bucket/x": "is no http or https address",
        str(tmp_path / "none"): "no such file or folder; it is published at https://host/sets/a.npz",
    }.items():
        with pytest.raises(UserError, match=rf"^--from .*{says}"):
            source_of(address, base)
    with pytest.raises(UserError, match=r"the folder has no b\.npz"):
        source_of("https://host/b.npz", tmp_path)
    (tmp_path / "copy").mkdir()
    assert fetch_file(there, tmp_path / "copy" / "a.npz", SHA256, 10**6) == str(there)
    assert (tmp_path / "copy" / "a.npz").read_bytes() == DATA
    with pytest.raises(UserError, match="is not the published file"):
        fetch_file(there, tmp_path / "b.npz", "0" * 64, 10**6)
    assert sorted(os.listdir(tmp_path)) == ["a.npz", "copy"]
