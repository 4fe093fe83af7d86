"""Read the files of a store in a folder, and copies of them for network file systems."""

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from warpfold.data.store import local
from warpfold.data.store.local import Folder, copies_folder, is_local, local_copy, map_file
from warpfold.errors import UserError
from warpfold.files import digest_of

DATA = bytes(range(200))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    for name in ("a", "b", "c"):
        (tmp_path / f"here/{name}").parent.mkdir(exist_ok=True)
        (tmp_path / f"here/{name}").write_bytes(DATA)
    return Folder(tmp_path / "here")


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty folder for temporary files."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_ranges_sizes_and_whole_files_are_read(folder: Folder) -> None:
    ranges = [(0, 5), (3, 3), (190, 200), (198, 300), (250, 260)]
    assert folder.read("a", ranges) == [DATA[begin:end] for begin, end in ranges]
    assert (folder.whole("b"), folder.size("b")) == (DATA, 200)
    assert folder.forget("a", 0, 5) is False
    assert folder.view("a", 200, digest_of(DATA), False) == DATA
    with pytest.raises(
        UserError, match=r"/a: 200 bytes, 199 expected: cut short or not this store's\. Copy it again\.$"
    ):
        folder.view("a", 199, digest_of(DATA), True)
    with pytest.raises(UserError, match=r"/a: damaged \(checksum\)\. Copy it again\.$"):
        folder.view("a", 200, digest_of(b""), False)
    assert folder.view("a", 200, digest_of(b""), True) == DATA
    for call in (folder.whole, folder.size, lambda name: folder.read(name, [(0, 1)])):
        with pytest.raises(FileNotFoundError):
            call("none")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in Linux's /proc")
def test_few_files_stay_open(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MAX_OPEN_FILES", 2)
    before = open_files()
    views = [map_file(folder.path / "a", 200) for _ in range(3)]
    assert open_files() == before + 3
    del views
    for name in ("a", "b", "a", "c", "c"):
        assert folder.read(name, [(0, 1)]) == [DATA[:1]]
    assert open_files() == before + 2
    (folder.path / "c").unlink()
    (folder.path / "b").unlink()
    assert folder.read("c", [(0, 1)]) == [DATA[:1]]
    folder.close()
    assert open_files() == before
    with pytest.raises(FileNotFoundError):
        folder.read("c", [(0, 1)])
    assert folder.read("a", [(0, 1)]) == [DATA[:1]]


def test_a_file_stays_open_while_a_thread_reads_it(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may open the same file at the same time, or so many files that this one is closed."""
    read = local.pread
    monkeypatch.setattr(local, "pread", lambda *arguments: (folder.close(), read(*arguments))[1])
    assert folder.read("a", [(0, 5), (7, 9)]) == [DATA[:5], DATA[7:9]]


def test_all_files_are_dropped_from_the_page_cache(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.path / "below").mkdir()
    dropped: dict[str, Sequence[int]] = {}

    def drop(file: int, *more: int) -> None:
        dropped[Path(os.readlink(f"/proc/self/fd/{file}")).name] = more

    monkeypatch.setattr(os, "posix_fadvise", drop)
    folder.cool()
    assert dropped == dict.fromkeys("abc", (0, 0, os.POSIX_FADV_DONTNEED))


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [("ext4", True), ("xfs", True), ("nfs4", False), ("fuse.sshfs", False), ("", False), ("tmpfs nfs4", True)],
)
def test_local_disks_are_told_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: str, expected: bool
) -> None:
    """The mount of the folder decides, not other mounts."""
    device = os.stat(tmp_path).st_dev
    mounts = [("0:999999", "nfs4" if expected else "ext4")]
    mounts += [(f"{os.major(device)}:{os.minor(device)}", kind) for kind in kinds.split()]
    lines = [f"36 35 {number} / /mnt rw,noatime master:1 - {kind} /dev/x rw" for number, kind in mounts]
    monkeypatch.setattr(Path, "read_text", lambda path, **_: {"/proc/self/mountinfo": "\n".join(lines)}[str(path)])
    assert is_local(tmp_path) is expected

    def missing(path: Path, **_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert is_local(tmp_path) is False


def test_a_copy_is_made_once_and_checked_once_per_machine(
    folder: Folder, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, asked = folder.whole, list[str]()
    monkeypatch.setattr(folder, "whole", lambda name: (asked.append(name), whole(name))[1])
    digest = digest_of(DATA)
    for checked in (False, True, False):
        assert local_copy(folder, "a", 200, digest, checked) == DATA
    assert asked == ["a"]
    (copy,) = copies_folder().iterdir()
    assert copy.name == f"{digest}.wfi"
    copy.write_bytes(bytes(200))
    # Another process has checked it.
    assert local_copy(folder, "a", 200, digest, True) == bytes(200)
    assert local_copy(folder, "a", 200, digest, False) == DATA
    assert asked == ["a", "a"]
    copy.unlink()
    for size, expected in ((199, digest), (200, digest_of(b"x"))):
        with pytest.raises(UserError, match=r"^a: 200 bytes, damaged or cut short\. Copy the store again\.$"):
            local_copy(folder, "a", size, expected, True)
    assert list(copies_folder().iterdir()) == []


def test_copies_that_are_unused_for_a_month_are_removed(folder: Folder, scratch: Path) -> None:
    copies, month, now = copies_folder(), 30 * 24 * 3600, time.time()
    for name, age in (("new", 0), ("old", month - 600), ("older", month + 600), ("oldest", 3 * month)):
        (copies / f"{name}.wfi").touch()
        os.utime(copies / f"{name}.wfi", (now - age, now - age))
    (copies / "other").touch()
    os.utime(copies / "other", (0, 0))
    local_copy(folder, "a", 200, digest_of(DATA), False)
    assert {path.name for path in copies.iterdir()} == {"new.wfi", "old.wfi", "other", f"{digest_of(DATA)}.wfi"}


def test_a_copy_that_another_process_removes_is_no_error(
    folder: Folder, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, copies = copies_folder() / "old.wfi", [copies_folder() / "gone.wfi", copies_folder() / "old.wfi"]
    old.touch()
    os.utime(old, (0, 0))
    monkeypatch.setattr(Path, "glob", lambda *_: iter(copies))
    assert local_copy(folder, "a", 200, digest_of(DATA), False) == DATA
    assert not old.exists()


def test_no_space_for_a_copy_is_one_line(folder: Folder, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    size = 1_600_000
    (folder.path / "a").write_bytes(bytes(size))
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(
        UserError,
        match=r"No space left on device\. Make room\. Set TMPDIR to a folder of this machine with 2 MB free\.$",
    ):
        local_copy(folder, "a", size, digest_of(bytes(size)), False)


def test_copies_are_private(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copies_folder()
    assert (folder, folder.stat().st_mode & 0o7777) == (scratch / f"warpfold-{os.getuid()}", 0o700)
    assert copies_folder() == folder
    refused = r"is not a private folder of yours\. Remove it, or set TMPDIR to another folder\.$"
    for mode in (0o701, 0o710, 0o704, 0o720):
        folder.chmod(mode)
        with pytest.raises(UserError, match=refused):
            copies_folder()
    folder.chmod(0o700)
    folder.rename(scratch / "elsewhere")
    folder.symlink_to(scratch / "elsewhere")
    with pytest.raises(UserError, match=refused):
        copies_folder()
    folder.unlink()
    folder.touch()
    with pytest.raises(UserError, match="cannot be written: File exists"):
        copies_folder()
    # Somebody else has made a folder of this user's name.
    monkeypatch.setattr(os, "getuid", lambda: 123_456)
    with pytest.raises(UserError, match=rf"warpfold-123456: {refused}"):
        copies_folder()
