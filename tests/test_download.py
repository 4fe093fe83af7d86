"""Fetching a named file: whole or not at all, taken up where it stopped, whatever the server does."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.downloads import Fault, FileServer, serving
from warpfold.download import DownloadFailed, DownloadLimits, NotThere, download, source_of
from warpfold.errors import UserError

DATA = random.Random(0).randbytes(300_000)
SHA256 = hashlib.sha256(DATA).hexdigest()
QUICK = DownloadLimits(idle=0.3, retry=(0.01, 0.02), tries=4, first_tries=2)
ALONE = """
import sys
from pathlib import Path
from warpfold.download import download
download(sys.argv[1], Path(sys.argv[2]))
"""


@pytest.fixture
def server() -> Iterator[FileServer]:
    with serving({"a.npz": DATA}) as found:
        yield found


def fetch(server: FileServer, folder: Path, **more: Any) -> Any:
    return download(f"{server.url}/a.npz", folder / "a.npz", limits=more.pop("limits", QUICK), **more)


def test_a_file_comes_whole_and_is_then_there(server: FileServer, tmp_path: Path) -> None:
    told: list[tuple[float, int, str]] = []
    found = fetch(server, tmp_path / "new", sha256=SHA256, progress=lambda *one: told.append(one))
    assert found.path.read_bytes() == DATA
    assert (found.size, found.sha256) == (len(DATA), SHA256)
    assert os.listdir(tmp_path / "new") == ["a.npz"]
    assert told[-1][0] == 0.3
    assert "MB/s" in told[-1][2]
    assert fetch(server, tmp_path / "new", sha256=SHA256).was_there
    assert len(server.asked) == 1
    with pytest.raises(UserError, match=r"a\.npz: is there, and is another file: its SHA-256 is"):
        fetch(server, tmp_path / "new", sha256="0" * 64)
    assert found.path.read_bytes() == DATA


@pytest.mark.parametrize("tags", [True, False])
@pytest.mark.parametrize("fault", ["cut 100000", "stall 100000"])
def test_a_broken_connection_is_taken_up(server: FileServer, tmp_path: Path, fault: str, tags: bool) -> None:
    server.faults, server.tags = [fault, "drop", (503, {"Retry-After": "0"}), fault], tags
    assert fetch(server, tmp_path).sha256 == SHA256
    begun = [0 if not asked else int(asked.removeprefix("bytes=").rstrip("-")) for _, asked in server.asked]
    assert begun[0] == 0
    assert begun[1] == begun[2] == begun[3] == 100_000
    assert begun[4] == 200_000


def stopped(server: FileServer, folder: Path, **more: Any) -> None:
    """Have the first 100,000 bytes come, and no more."""
    server.faults = ["cut 100000", "drop", "drop", "drop"]
    with pytest.raises(DownloadFailed, match=r"0\.1 MB are kept, and the same command goes on") as error:
        fetch(server, folder, **more)
    assert error.value.exit_code == 1
    assert (folder / "a.npz.fetching").stat().st_size == 100_000
    assert not (folder / "a.npz").exists()
    server.asked.clear()


@pytest.mark.parametrize(
    ("change", "first", "more"),
    [
        ("nothing", "bytes=100000-", {}),
        ("no ranges", "bytes=100000-", {}),
        ("another file by now", "bytes=100000-", {}),
        ("no note", "", {}),
        ("no tags, a hash", "bytes=100000-", {"sha256": SHA256}),
        ("another mirror, a hash", "bytes=100000-", {"sha256": SHA256}),
        ("another mirror", "", {}),
    ],
)
def test_the_next_call_goes_on(
    server: FileServer, tmp_path: Path, change: str, first: str, more: dict[str, str]
) -> None:
    if "no tags" in change:
        server.headers = {"ETag": "W/weak"}
    stopped(server, tmp_path, **more)
    server.ranges, data = change != "no ranges", DATA
    if "by now" in change:
        data = server.files["a.npz"] = DATA[::-1]
    if change == "no note":
        (tmp_path / "a.npz.fetching.json").unlink()
    server.files["mirror/a.npz"] = data
    place = "/mirror" if "mirror" in change else ""
    found = download(f"{server.url}{place}/a.npz", tmp_path / "a.npz", limits=QUICK, **more)  # type: ignore[arg-type]
    assert found.path.read_bytes() == data
    assert server.asked[0][1] == first
    assert os.listdir(tmp_path) == ["a.npz"]


def test_a_part_that_has_all_is_the_file(server: FileServer, tmp_path: Path) -> None:
    stopped(server, tmp_path)
    (tmp_path / "a.npz.fetching").write_bytes(DATA)
    assert fetch(server, tmp_path).sha256 == SHA256
    assert len(server.asked) == 1
    (tmp_path / "a.npz").unlink()
    stopped(server, tmp_path)
    (tmp_path / "a.npz.fetching").write_bytes(DATA + b"more")
    assert fetch(server, tmp_path).sha256 == SHA256
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("faults", "headers", "more", "error", "says"),
    [
        ([], {}, {"sha256": "0" * 64}, UserError, "is not the published file: its SHA-256 is"),
        ([], {}, {"most": 1000}, UserError, "has more than 1e-06 GB"),
        ([(404, {})], {}, {}, NotThere, "answers 404 Not Found; give another place with --from"),
        ([(403, {})], {}, {}, DownloadFailed, "answers 403 Forbidden"),
        ([], {"Content-Type": "text/html; charset=utf-8"}, {}, DownloadFailed, "answers with a page, not with a file"),
        ([], {"Content-Encoding": "gzip"}, {}, DownloadFailed, "the encoding gzip, which nobody asked for"),
        ([], {"Content-Length": "many"}, {}, DownloadFailed, "does not say how long the file is"),
        (["endless"], {"Content-Length": "many"}, {"sha256": SHA256, "most": 10**6}, UserError, "has more than the"),
        ([(302, {"Location": "/a.npz"})] * 20, {}, {}, DownloadFailed, "infinite loop"),
        ([(302, {"Location": "ftp://127.0.0.1/a.npz"})], {}, {}, DownloadFailed, "which is not https"),
        ([(302, {"Location": "file:///etc/passwd"})], {}, {}, DownloadFailed, "is not allowed"),
        (["drop"] * 2, {}, {}, DownloadFailed, "does not answer .*behind a proxy set HTTPS_PROXY"),
        (["slow"] * 4, {}, {}, DownloadFailed, r"does not answer \(\d+ bytes in 0 s\)"),
        ([(206, {})], {}, {}, DownloadFailed, "answers 206, which is no file"),
    ],
)
def test_what_is_not_the_file_is_not_kept(
    server: FileServer,
    tmp_path: Path,
    faults: list[Fault],
    headers: dict[str, str],
    more: dict[str, Any],
    error: type[UserError],
    says: str,
) -> None:
    server.faults, server.headers = list(faults), headers
    with pytest.raises(error, match=says):
        fetch(server, tmp_path, **more)
    assert not (tmp_path / "a.npz").exists()
    if error is UserError:
        assert os.listdir(tmp_path) == []


def test_another_rest_than_was_asked_for_is_not_taken(server: FileServer, tmp_path: Path) -> None:
    stopped(server, tmp_path)
    server.headers = {"Content-Range": f"bytes 5-{len(DATA) - 1}/{len(DATA)}"}
    with pytest.raises(DownloadFailed):
        fetch(server, tmp_path, limits=DownloadLimits(retry=(0.01, 0.01), first_tries=1, tries=1))
    server.headers = {}
    assert fetch(server, tmp_path).sha256 == SHA256


def test_redirections_keep_the_range_and_never_leave_https(server: FileServer, tmp_path: Path) -> None:
    from urllib.request import Request

    from warpfold.download import _NeverLessSafe

    stopped(server, tmp_path)
    server.faults, server.files["store/a.npz"] = [(302, {"Location": "/store/a.npz"})], DATA
    found = fetch(server, tmp_path)
    assert found.address.endswith("/store/a.npz")
    assert server.asked == [
        ("/a.npz", "bytes=100000-"),
        ("/store/a.npz", "bytes=100000-"),
    ]
    with pytest.raises(DownloadFailed, match="leads to http://host/b, which is not https"):
        _NeverLessSafe().redirect_request(Request("https://host/a"), None, 302, "", {}, "http://host/b")


def test_a_proxy_is_asked_unless_it_is_not_wanted(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.setenv("https_proxy", server.url)
    patient = replace(QUICK, idle=20.0)  # of a server that answers, on a machine that may be busy
    assert download("http://parameters.invalid/a.npz", tmp_path / "a.npz", limits=patient).sha256 == SHA256
    assert server.asked == [("http://parameters.invalid/a.npz", "")]
    with pytest.raises(DownloadFailed, match="Tunnel connection failed: 403 Forbidden"):
        download("https://parameters.invalid/b.npz", tmp_path / "b.npz", limits=patient)
    assert server.asked[-1] == ("parameters.invalid:443", "CONNECT")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "a.npz").unlink()
    fetch(server, tmp_path)
    assert server.asked[-1] == ("/a.npz", "")


def test_a_full_disk_is_said_before_and_after(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UserError, match=r"0\.00 GB are to come, and the disk has 0\.00 GB free"):
        fetch(server, tmp_path)
    monkeypatch.undo()
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
    assert "a.npz.fetching: cannot be written: File too large" in ended.stderr
    assert len(server.asked) == 2


def test_ctrl_c_leaves_a_part_that_the_same_call_continues(server: FileServer, tmp_path: Path) -> None:
    server.faults = ["slow"]
    path = tmp_path / "a.npz"
    # A shell has what it starts in the background ignore SIGINT, and so all that the tests start.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + ALONE
    alone = [sys.executable, "-c", code, f"{server.url}/a.npz", str(path)]
    with subprocess.Popen(alone, stderr=subprocess.DEVNULL) as process:
        while not (note := path.with_name("a.npz.fetching.json")).exists():
            time.sleep(0.02)
        with pytest.raises(UserError, match="another process is fetching it"):
            fetch(server, tmp_path)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
    assert json.loads(note.read_text())["source"] == f"{server.url}/a.npz"
    come = path.with_name("a.npz.fetching").stat().st_size
    assert 0 < come < 1000
    assert fetch(server, tmp_path).sha256 == SHA256
    assert server.asked[-1] == ("/a.npz", f"bytes={come}-")


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
    assert download(there, tmp_path / "copy" / "a.npz", sha256=SHA256).size == len(DATA)
    with pytest.raises(UserError, match="is not the published file"):
        download(there, tmp_path / "b.npz", sha256="0" * 64)
    assert sorted(os.listdir(tmp_path)) == ["a.npz", "copy"]
