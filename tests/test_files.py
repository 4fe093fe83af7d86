"""Test that files appear only complete, and that file names are valid on every system."""

import copy
import errno
import gzip
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import zstandard
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from warpfold.errors import DiskError, UserError
from warpfold.files import (
    check_tensors,
    file_name,
    is_given_pipe,
    opened,
    pread,
    read_file,
    sealed_tensors,
    update_file,
    write_atomically,
)


def test_full_disk_keeps_the_previous_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_atomically(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"summary\.json: cannot be written: No space left on device"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("number", "kind", "cure"),
    [
        (errno.ENOSPC, DiskError, ". Make room."),
        (errno.EDQUOT, DiskError, ". Make room."),
        (errno.EROFS, DiskError, ". Check the disk."),
        (errno.EIO, DiskError, ". Check the disk."),
        (errno.EACCES, UserError, "."),
        (errno.ENAMETOOLONG, UserError, "."),
    ],
)
def test_what_is_the_disks_fault_is_told_from_what_is_one_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[UserError], cure: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(UserError) as said:
        write_atomically(tmp_path / "x", "new")
    assert str(said.value) == f"{tmp_path / 'x'}: cannot be written: {os.strerror(number)}{cure}"
    # A worker process sends an error by its arguments, as a copy does.
    assert type(said.value) is type(copy.copy(said.value)) is kind


@pytest.mark.parametrize(
    ("name", "expected"),
    [("P12345", "P12345"), ("sp|P1|A_B", "sp_P1_A_B"), ("../../etc", "_.._etc"), ("", "target"), ("蛋白", "__")],
)
def test_file_names_are_safe(name: str, expected: str) -> None:
    assert file_name(name) == expected


def test_a_file_that_has_its_content_already_keeps_its_time(tmp_path: Path) -> None:
    path = tmp_path / "new" / "one.a3m"
    update_file(path, b"one")
    os.utime(path, (1, 1))
    update_file(path, b"one")
    assert path.stat().st_mtime == 1
    update_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert path.stat().st_mtime > 1
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(UserError, match=r"one\.a3m: cannot be written: File exists"):
        update_file(path / "one.a3m", b"")


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_new_files_have_the_mode_that_the_umask_leaves(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "private", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o666 & ~mask


def test_pipes_sockets_and_devices_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        monkeypatch.chdir(tmp_path)  # socket paths must be short
        bound.bind("socket")
        for path in (tmp_path / "pipe", tmp_path / "socket", Path("/dev/zero")):
            with pytest.raises(UserError, match=r"is a pipe, a socket or a device\. Pass a regular file"), opened(path):
                pass
            with pytest.raises(UserError, match="is a pipe, a socket or a device"):
                read_file(path)


@pytest.fixture
def given_pipe() -> Iterator[Callable[[bytes], Path]]:
    """Create pipes like a shell's for <(command).  A pipe contains some bytes, and its write end is closed."""
    ends = []

    def make(content: bytes) -> Path:
        read, write = os.pipe()
        ends.append(read)
        os.write(write, content)
        os.close(write)
        return Path(f"/dev/fd/{read}")

    yield make
    for end in ends:
        os.close(end)


def test_a_pipe_that_this_process_was_given_is_read_where_that_is_asked_for(
    tmp_path: Path, given_pipe: Callable[[bytes], Path]
) -> None:
    assert read_file(given_pipe(b"MKT"), pipe=True) == b"MKT"
    assert read_file(given_pipe(gzip.compress(b"MKT")), pipe=True) == b"MKT"
    for content in (b"A" * 3000, gzip.compress(b"A" * 3000)):
        assert read_file(given_pipe(content), 3000, pipe=True) == b"A" * 3000
        with pytest.raises(UserError, match="has more than"):
            read_file(given_pipe(content), 2999, pipe=True)
    with pytest.raises(UserError, match="is a pipe, a socket or a device"):
        read_file(given_pipe(b"MKT"))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for path in (tmp_path / "pipe", tmp_path / "link", Path("/dev/zero"), tmp_path / "none"):
        assert not is_given_pipe(path)
    with pytest.raises(UserError, match="is a pipe, a socket or a device"):
        read_file(tmp_path / "pipe", pipe=True)


def test_a_file_that_unpacks_to_more_than_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(gzip.compress(b"A" * 1000) * 3)  # three gzip members
    assert read_file(path, 3000) == b"A" * 3000
    with pytest.raises(UserError, match=r"bomb: has more than 2\.999e-06 GB when unpacked"):
        read_file(path, 2999)
    path.write_bytes(b"A" * 3000)
    assert len(read_file(path, 3000)) == 3000
    with pytest.raises(UserError, match=r"bomb: has more than"):
        read_file(path, 2999)
    inner = gzip.compress(bytes(10**6))
    path.write_bytes(gzip.compress(inner))
    # Only the outer stream is unpacked.
    assert read_file(path, 2000) == inner
    packed = zstandard.ZstdCompressor().compress(bytes(10**6))
    path.write_bytes(packed)
    # Other formats are not unpacked.
    assert read_file(path, 2000) == packed


def test_a_bomb_takes_no_memory(tmp_path: Path) -> None:
    """Refuse 1.5 GB of zeros, with an address space of 1 GiB and a limit of 1.2 GB for the file."""
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(1 << 24)) * 96)
    code = f"""
import resource
from pathlib import Path
from warpfold.errors import UserError
from warpfold.files import read_file
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    read_file(Path({str(path)!r}), 1_200_000_000)
except UserError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "bomb.gz: has more than 1.2 GB when unpacked" in done.stdout


def test_reading_at_a_place_goes_on_where_the_system_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux reads at most 0x7ffff000 bytes at a time.  The test replaces this limit by 7 bytes."""
    path, whole = tmp_path / "file", bytes(range(100))
    path.write_bytes(whole)
    capped = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, offset: capped(file, min(size, 7), offset))
    with open(path, "rb") as file:
        assert pread(file.fileno(), 50, 3) == whole[3:53]
        assert pread(file.fileno(), 50, 90) == whole[90:]
        assert pread(file.fileno(), 0, 3) == b""


def test_sealed_tensors_are_told_from_every_file_with_another_bit(tmp_path: Path) -> None:
    """A flipped bit in the name of the checksum hides the checksum, but the tensors are intact."""
    tensors, path = (
        {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(1, dtype=torch.int64)},
        tmp_path / "a.safetensors",
    )
    data = b"".join(sealed_tensors(save(tensors, {"about": "x"})))
    path.write_bytes(data)
    check_tensors(path)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_file(path).items())
    refused = 0
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
        try:
            check_tensors(path)
            found = load_file(path)
        except (ValueError, SafetensorError):
            refused += 1
        else:
            assert b'"checksum"' not in path.read_bytes()
            assert all(torch.equal(tensor, tensors[name]) for name, tensor in found.items())
    assert refused > len(data) - 20
    # Other programs and earlier versions write no checksum.
    path.write_bytes(save(tensors))
    check_tensors(path)


def test_an_error_is_one_line_whatever_it_quotes() -> None:
    said = str(UserError("a.csv: has\r\n " + "x" * 5000 + "; remove it\n"))
    assert said == "a.csv: has " + "x" * 300 + "... remove it "
    assert str(UserError("a.csv: " + "no " * 5000 + "; remove it")).endswith("no ; remove it")
    assert len(str(UserError("a.csv: " + "no " * 5000 + "; remove it"))) < 2100
