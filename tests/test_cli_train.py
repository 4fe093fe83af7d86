"""`warpfold train` on the command line: stores with weights, an order to follow, what it says of unusable entries."""

import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest

from tests.training.runs import make_store, rows, tiny_run
from warpfold import settings
from warpfold.cli import main
from warpfold.cli.common import this_process
from warpfold.cli.train import sources_of
from warpfold.data.store.store import Store
from warpfold.errors import UserError


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Store]:
    folder = tmp_path_factory.mktemp("cli")
    return [make_store(folder / "pdb"), make_store(folder / "distilled", proteins=4)]


def test_stores_have_weights(stores: list[Store], tmp_path: Path) -> None:
    one, other = (str(store.path) for store in stores)
    assert [(s.store.path.name, s.weight) for s in sources_of([f"{one}=0.25", other])] == [
        ("pdb", 0.25),
        ("distilled", 1.0),
    ]
    shutil.copytree(one, tmp_path / "a=2")
    assert [s.weight for s in sources_of([str(tmp_path / "a=2")])] == [1.0]  # it is called so
    with pytest.raises(UserError, match="'much' is not a number; expected STORE or STORE=WEIGHT"):
        sources_of([f"{one}=much"])
    with pytest.raises(UserError, match=r"weight -1.0; give a positive number"):
        sources_of([f"{one}=-1"])


def test_a_mixture_is_trained_on_and_its_order_followed(
    stores: list[Store], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.toml").write_text(settings.to_toml(tiny_run(steps=2, validation=0.0)))
    shard = shutil.copytree(stores[1].path, tmp_path / "damaged") / "shard-00000.wfs"
    data = bytearray(shard.read_bytes())
    for key in ("helix0", "helix1", "helix2"):
        data[stores[1].record(key).arrays["msa"].starts[0]] ^= 1
    shard.write_bytes(data)
    command = ["train", str(tmp_path / "tiny.toml"), "--data", f"{stores[0].path}=0.1", f"{shard.parent}=0.9", "--json"]
    command += ["--set", "train.quarantine=0.5"]
    said = {}
    for out, more in (("run", []), ("again", ["--replay", str(tmp_path / "run/order.txt")])):
        with pytest.raises(SystemExit) as end:
            main([*command, "--out", str(tmp_path / out), *more])
        assert not end.value.code
        said[out] = capsys.readouterr()
    names = json.loads(said["run"].out)["quarantined"]
    assert sorted(names) == [f"damaged:helix{i}" for i in range(3)]
    assert "entries that could not be used: 3 (" in said["run"].err
    assert "quarantine.jsonl has the reasons" in said["run"].err
    assert re.search(r"^[-\d]+ [:\d]+  step 1/2  loss \d.*  waiting .*  ETA ", said["run"].err, re.M)  # no terminal
    assert json.loads(said["again"].out)["quarantined"] == []  # they are not in the order
    both = [[row for row in rows(tmp_path / out) if row["kind"] == "step"] for out in ("run", "again")]
    assert both[0] == both[1]


def test_ctrl_c_ends_with_the_command_that_goes_on(
    stores: list[Store], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.toml").write_text(settings.to_toml(tiny_run(steps=9, validation=0.0)))
    command = ["train", str(tmp_path / "tiny.toml"), "--data", str(stores[0].path), "--out", str(tmp_path / "a run")]

    def stop(_: object, row: dict) -> None:
        if row["step"] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("warpfold.training.watching.TrainingProgress.on_metrics", stop)
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 130
    err = capfd.readouterr().err
    assert "stopping after this step; Ctrl-C again: at once\n" in err
    assert err.endswith(f"stopped after 1 steps; the same command continues: {shlex.join(['warpfold', *command])}\n")


@pytest.mark.parametrize(("ranks", "lazy"), [(64, None), (65, "1")])
def test_many_processes_connect_when_they_first_send(
    ranks: int, lazy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": 3, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "")  # so that what is set is undone
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    assert this_process().ranks == ranks
    assert os.environ.get("TORCH_GLOO_LAZY_INIT") == lazy
