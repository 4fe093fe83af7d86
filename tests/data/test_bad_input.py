"""Give bad data to commands: one line names the file or entry, with the right exit code, and no partial output.

These tests need a damaged store, an odd folder or a full disk. The other refusals are in tests/messages.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.data.pack.pack_inputs import ONE, TWO, chain, refused, run, structure
from tests.training.runs import tiny_run
from warpfold import settings
from warpfold.data.pack.pack import pack
from warpfold.data.store import store as store_module
from warpfold.data.store.store import Store
from warpfold.geometry.residue import RESTYPES

LETTERS = np.array(list(RESTYPES))
LONG, DEEP = 5_000, 100_000  # residues, alignment rows


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a store of four small chains, one of 5,000 residues, and one with an alignment of 100,000 rows."""
    folder = tmp_path_factory.mktemp("packed")
    rng = np.random.default_rng(0)
    for number in range(4):
        structure(folder / f"s/{number}abc.cif", chain("A", "".join(rng.choice(LETTERS, 20 + number))))
    structure(folder / "s/5big.cif", chain("A", "".join(rng.choice(LETTERS, LONG)), resolved=60))
    structure(folder / "s/6one.cif", chain("A", ONE))
    rows = np.frombuffer(b"ACDEFGHIKLMNPQRSTVWY-", np.uint8)[rng.integers(0, 21, (DEEP, len(ONE)))]
    text = f">q\n{ONE}\n".encode() + b"".join(b">r\n" + row.tobytes() + b"\n" for row in rows)
    (folder / "deep.a3m").write_bytes(text)
    pack([folder / "s"], [folder / "deep.a3m"], folder / "store")
    return folder / "store"


@pytest.fixture
def store(packed: Path, tmp_path: Path) -> Path:
    """Copy the store, to be damaged."""
    return Path(shutil.copytree(packed, tmp_path / "store"))


def train(capsys: pytest.CaptureFixture[str], store: Path, **changes: object) -> tuple[int, str, str]:
    config = tiny_run(validation=0.0, workers=0, **changes)
    (store.parent / "run.toml").write_text(settings.to_toml(config))
    return run(capsys, "train", store.parent / "run.toml", "--data", store, "--out", store.parent / "run")


# ---- stores


def test_a_missing_shard_is_damage(capsys: pytest.CaptureFixture[str], store: Path) -> None:
    (store / "shard-00000.wfs").unlink()
    code, out, err = run(capsys, "pack", "--verify", store)
    assert (code, "shard-00000.wfs: cannot be read: No such file" in out + err) == (1, True)


def flip(store: Path, key: str) -> None:
    """Change a byte of a record's first blob."""
    index = Store(store).index
    place = {name: int(column[index.row(key)]) for name, column in index.where.items()}
    with open(store / index.shards[place["shard"]][0], "r+b") as shard:
        shard.seek(place["offset"] + place["header"] + 3)
        byte = shard.read(1)[0]
        shard.seek(-1, os.SEEK_CUR)
        shard.write(bytes([byte ^ 0x20]))


def test_training_goes_on_without_a_damaged_entry(capsys: pytest.CaptureFixture[str], store: Path) -> None:
    flip(store, "1abc_A")
    code, out, err = train(capsys, store, steps=6)
    assert code == 0
    assert "6 steps" in out
    assert "entries that could not be used: 1 (1abc_A)" in err
    (line,) = (store.parent / "run/quarantine.jsonl").read_text().splitlines()
    assert "1abc_A, aatype: damaged (checksum" in line


def test_long_chains_and_deep_alignments_train(capsys: pytest.CaptureFixture[str], packed: Path) -> None:
    opened = Store(packed)
    assert dict(zip(opened.keys, opened.column("length")))["5big_A"] == LONG
    assert dict(zip(opened.keys, opened.column("depth")))["6one_A"] == DEEP + 1
    code, _, err = train(capsys, packed, steps=6)
    assert (code, [line for line in err.splitlines() if "  step " not in line]) == (0, [])  # progress, no warnings
    lines = [json.loads(line) for line in (packed.parent / "run/metrics.jsonl").read_text().splitlines()]
    used = {name for line in lines for name in line.get("examples", ())}
    assert {"5big_A", "6one_A"} <= used


# ---- folders and names


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """Write a folder with unusual names, loops, broken links, a pipe, and two structures."""
    folder = tmp_path / "odd names, 日本"
    structure(folder / "a b/1öne ü.cif", chain("A", ONE))
    structure(folder / "[x]*?/1two.cif", chain("A", TWO))
    (folder / "two\nlines.cif").write_text("data_x\n")
    (folder / "loop").symlink_to(folder)
    (folder / "a b/again").symlink_to(folder / "a b")
    (folder / "broken.cif").symlink_to(folder / "nowhere")
    (folder / "folder.cif").mkdir()
    os.mkfifo(folder / "pipe.cif")
    return folder


def test_odd_folders_are_read_once(capsys: pytest.CaptureFixture[str], odd: Path) -> None:
    code, out, err = run(capsys, "pack", "--structures", odd, "--out", odd / "störe")
    assert (code, err) == (0, "")
    dropped, summary = out.splitlines()  # one line each, whatever the names
    assert dropped.startswith("dropped two lines.cif: ")
    assert summary == f"{odd / 'störe'}: 2 chains kept (2 with their sequence alone), 1 dropped, 0 alignments unused"
    assert run(capsys, "pack", "--verify", odd / "störe")[0] == 0


def test_a_locked_folder_is_not_passed_over(
    capsys: pytest.CaptureFixture[str], odd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = os.scandir

    def locked(path: str) -> object:
        if os.path.basename(path) == "a b":
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", locked)  # root, who may run this, ignores modes
    message = refused(run(capsys, "pack", "--structures", odd, "--out", odd.parent / "store"))
    assert f"{odd / 'a b'}: cannot be read (Permission denied). Check its permissions" in message


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_disk_that_fills_up_while_the_store_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    structure(tmp_path / "s/1one.cif", chain("A", ONE))
    command = ("pack", "--structures", tmp_path / "s", "--out", tmp_path / "store")
    with monkeypatch.context() as full:
        full.setattr(store_module, "open", lambda path, mode: open("/dev/full", "wb"), raising=False)  # noqa: SIM115
        assert f"{tmp_path / 'store'}: cannot be written: No space left" in refused(run(capsys, *command))
    assert names(tmp_path) == ["s", "store.part-1-of-1"]
    assert run(capsys, *command)[0] == 0  # continues from the part
    assert names(tmp_path) == ["s", "store"]
