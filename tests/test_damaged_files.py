"""Test that damaged files of all kinds are detected by checksum, or cause a one-line error that names the file."""

import io
import json
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers import tiny_model
from tests.model.test_openfold_files import as_openfold
from tests.model.torch_files import save
from tests.training.runs import make_store, tiny_run
from warpfold.data.formats.predictions import read_pae
from warpfold.data.load.schedule import State
from warpfold.data.pack.part import PartFolder
from warpfold.data.pack.predicted import read_distogram
from warpfold.data.store.store import Store
from warpfold.engine.checkpoint import StepFolders
from warpfold.engine.trunk import TrunkStore
from warpfold.errors import UserError
from warpfold.finetuning.split import read_split
from warpfold.model.weights.files import load_model, save_params
from warpfold.ops.triton import launch
from warpfold.training.ledger import Ledger
from warpfold.training.train import train
from warpfold.training.validate import settings_of


def flipped(path: Path, place: int) -> Path:
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)
    return path


def test_a_bit_of_the_parameters(tmp_path: Path) -> None:
    model = tiny_model(recycles=3)
    save_params(tmp_path / "p.safetensors", model)
    save(tmp_path / "p.pt", as_openfold(model))
    with zipfile.ZipFile(tmp_path / "p.pt") as file:
        inside = file.getinfo("archive/data/7").header_offset + 80
    # torch would read the first archive of this file, but the checksums belong to the last archive.
    twice = tmp_path / "twice.pt"
    twice.write_bytes(2 * (tmp_path / "p.pt").read_bytes())
    with pytest.raises(UserError, match=r"twice\.pt: .*begins with something else"):
        load_model(twice)
    for path, place in ((tmp_path / "p.safetensors", -33), (tmp_path / "p.pt", inside)):
        load_model(path)
        with pytest.raises(UserError, match=rf"{path.name}: .* does not fit its checksum"):
            load_model(flipped(path, place))


def test_a_bit_of_what_a_trunk_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trunk = TrunkStore(tmp_path / "trunk")
    trunk.begin("about")
    path = trunk.path(0, "key", 0)
    trunk.write(path, {"pair": torch.randn(4, 4, 3), "aatype": torch.arange(4)})
    assert trunk.features(path) is not None
    flipped(path, -5)
    assert trunk.read(path, torch.device("cpu")) is None
    assert trunk.features(path) is None
    assert "it does not fit its checksum" in caplog.text


def test_archives_of_arrays_that_are_damaged_anywhere(tmp_path: Path) -> None:
    content = io.BytesIO()
    np.savez_compressed(content, pae=np.ones((5, 5), np.float32))
    path = tmp_path / "x.npz"
    for place in range(len(content.getvalue())):
        path.write_bytes(content.getvalue())
        with suppress(UserError):
            assert np.array_equal(read_pae(flipped(path, place), np.ones(5, bool)), np.ones((5, 5)))


@pytest.mark.parametrize("wrong", [np.nan, -0.5, 1.5])
def test_a_distogram_of_no_probabilities(tmp_path: Path, wrong: float) -> None:
    distogram = np.full((4, 4, 8), 1 / 8, np.float16)
    distogram[1, 2, 3] = wrong
    np.save(tmp_path / "x.npy", distogram)
    with pytest.raises(UserError, match=r"x\.npy: a distogram with values that are not probabilities"):
        read_distogram(tmp_path / "x.npy")


def test_a_head_of_an_array_that_does_not_end(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.full((4, 4, 8), 1 / 8, np.float16))
    data = (tmp_path / "x.npy").read_bytes().replace(b"8), }", b"8 ,((")
    (tmp_path / "x.npy").write_bytes(data)
    with pytest.raises(UserError, match=r"x\.npy: not a distogram"):
        read_distogram(tmp_path / "x.npy")
    for read, name in ((load_model, "pae.npz"), (lambda path: read_pae(path, np.ones(4, bool)), "pae.npz")):
        with zipfile.ZipFile(tmp_path / name, "w") as file:
            file.writestr("pae.npy", data)
        with pytest.raises(UserError, match=name):
            read(tmp_path / name)


DEEP = "[" * 100_000 + "\n"
READERS: dict[str, Callable[[Path], object]] = {
    "checksums.json": lambda path: StepFolders(path.parents[1]).load(2),
    "settings.toml": lambda path: settings_of(path.parent),
    "quarantine.jsonl": lambda path: Ledger(path.parent, "x", 0, State()),
    "store.json": lambda path: Store(path.parent),
    # Reading fails before it needs the second argument.
    "split.toml": lambda path: read_split(path, None),  # type: ignore[arg-type]
    "launches.json": launch.read,
    "plan.json": lambda path: PartFolder(path.parent),
}


@pytest.mark.parametrize("name", READERS)
def test_brackets_without_end(tmp_path: Path, name: str) -> None:
    """Python's parsers raise other errors for deeply nested brackets."""
    place = tmp_path / "checkpoints/step-00000002" if name == "checksums.json" else tmp_path
    place.mkdir(parents=True, exist_ok=True)
    path = place / name
    path.write_text(f"a = {DEEP}" if name.endswith("toml") else DEEP)
    with pytest.raises(UserError, match=str(tmp_path)):
        READERS[name](path)


def test_a_part_of_no_store(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"part": "1/1/1", "format": "warpfold-part", "version": 1}))
    with pytest.raises(UserError, match=rf"{tmp_path}: not a part of a store"):
        PartFolder(tmp_path)


def test_settings_of_a_run_that_are_none(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    for text in ("train = 3", f"a = {DEEP}", "[model]\nc_m = 1\n[train]\nseed = [[]]"):
        (tmp_path / "run/settings.toml").write_text(text)
        with pytest.raises(UserError, match=str(tmp_path / "run")):
            train(tiny_run(steps=1), store, tmp_path / "run")


def test_a_full_disk_is_to_be_made_room_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from warpfold.prediction.predictor import Predictor

    found = Predictor(tiny_model()).fold("MKVLA", recycles=0)

    def full(*args: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(UserError, match=r"No space left on device\. Make room"):
        found.save(tmp_path / "out")
