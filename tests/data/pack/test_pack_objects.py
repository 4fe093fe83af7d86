"""`warpfold pack` to an address: the bytes of a folder, whatever is killed, in parts too; misuse is one line."""

import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from tests.data.pack.pack_inputs import ONE, chain, contents, refused, run, structure
from tests.object_server import ObjectServer, objects
from warpfold.data.store.store import Store

__all__ = ["objects"]  # a fixture


def whole_at(place: str) -> dict[str, bytes]:
    """The objects of a store whose names a folder's files have."""
    store = Store(place)
    names = ["store.json", "index-00001.wfi", "pack.json", "pack.tsv", "sources.json"]
    return {name: store.storage.whole(name) for name in (*names, *(shard for shard, _ in store.index.shards))}


@pytest.fixture
def command(files: Path, objects: ObjectServer) -> list[str]:
    """Pack to an address."""
    inputs = ["--structures", str(files / "structures"), "--msas", str(files / "msas")]
    return ["pack", *inputs, "--out", f"{objects.url}/store", "--scratch", str(files / "scratch")]


def test_a_store_at_an_address_is_that_of_a_folder(
    capsys: pytest.CaptureFixture[str], command: list[str], whole: dict[str, bytes], files: Path, objects: ObjectServer
) -> None:
    place = f"{objects.url}/store"
    code, out, _ = run(capsys, *command)
    assert code == 0
    assert f"{place}: 6 chains kept" in out
    assert whole_at(place) == whole
    assert not list((files / "scratch").iterdir())
    assert "was finished before" in run(capsys, *command)[1]
    assert run(capsys, "pack", "--verify", place)[:2] == (0, f"{place}: 6 entries, all whole\n")
    assert "6 in 3 clusters, 185 residues" in run(capsys, "pack", "--info", place)[1]
    # It grows, entries go, and it is written anew without what is gone.
    more, scratch = structure(files / "more/1new.cif", chain("A", ONE[5:] + "GGSSA")), ("--scratch", files / "scratch")
    assert run(capsys, "pack", "--structures", more, "--out", place, "--update", *scratch)[0] == 0
    assert run(capsys, "pack", "--remove", "1mut_A", "--out", place, *scratch)[0] == 0
    assert len(Store(place)) == 6
    assert run(capsys, "pack", "--compact", place, "--out", f"{objects.url}/small", *scratch)[0] == 0
    assert run(capsys, "pack", "--compact", place, "--out", files / "small")[0] == 0
    assert whole_at(f"{objects.url}/small") == contents(files / "small")
    code, out, err = run(capsys, "pack", "--verify", f"{objects.url}/none")
    assert (code, out) == (2, "")
    assert f"{objects.url}/none: not a store (store.json: no such object)" in err


def test_parts_are_uploaded_whole_and_merged_without_a_download(
    capsys: pytest.CaptureFixture[str], command: list[str], whole: dict[str, bytes], files: Path, objects: ObjectServer
) -> None:
    place = f"{objects.url}/store"
    for number in (1, 2):
        code, out, _ = run(capsys, *command, "--shard", f"{number}/2")
        assert code == 0
    merge = ("pack", "--merge", f"{place}.part-*-of-2", "--out", place, "--scratch", files / "scratch")
    assert out.endswith(f"warpfold pack --merge '{place}.part-*-of-2' --scratch FOLDER --out {place}\n")
    assert not list((files / "scratch").iterdir())
    assert "part 2/2" in run(capsys, *command, "--shard", "2/2")[1]  # it is there: nothing is done
    objects.requests.clear()
    assert run(capsys, *merge)[0] == 0
    assert not any(one.startswith("GET") and ("records" in one or "shard" in one) for one in objects.requests)
    assert run(capsys, "pack", "--compact", place, "--out", files / "compacted")[0] == 0
    assert contents(files / "compacted") == whole
    assert "is missing" in refused(run(capsys, *merge[:2], f"{place}.part-1-of-2", "--out", f"{place}2", *merge[-2:]))
    assert "make the store at an address" in refused(run(capsys, *merge[:3], "--out", files / "local"))


def test_any_kill_is_continued_to_the_same_bytes(
    capsys: pytest.CaptureFixture[str], command: list[str], whole: dict[str, bytes], objects: ObjectServer
) -> None:
    for after in (2, 4, 6):  # requests that write
        before = sum(one.startswith("PUT") for one in objects.requests)
        process = subprocess.Popen([sys.executable, "-m", "warpfold", *command], stderr=subprocess.DEVNULL)
        while process.poll() is None:
            if sum(one.startswith("PUT") for one in objects.requests) >= before + after:
                os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.002)
        process.wait()
    assert run(capsys, *command)[0] == 0
    assert whole_at(f"{objects.url}/store") == whole


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"--scratch": None}, "needs a folder of this machine .* give --scratch"),
        ({"--out": "s3://elsewhere/store"}, "there is no bucket elsewhere; mend the address"),
        ({"--out": "s3://bucket"}, "no name after the bucket; give s3://bucket/NAME"),
        ({"--out": "https://127.0.0.1:1/x/store"}, "cannot be reached|can be read, not written"),
    ],
)
def test_misuse_is_one_line(
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    changes: dict[str, str | None],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("warpfold.data.store.objects.PATIENCE", 0.1)
    monkeypatch.setattr("warpfold.data.store.objects.AT_ONCE", timedelta(seconds=0.1))
    for name, value in changes.items():
        at = command.index(name)
        command[at : at + 2] = [] if value is None else [name, value]
    assert re.search(said, refused(run(capsys, *command)))
