"""Files that are there whole, and names that every system bears."""

import os
from pathlib import Path

import pytest

from warpfold.errors import UserError
from warpfold.files import file_name, update_file, write_atomically


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
