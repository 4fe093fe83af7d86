"""Run `warpfold pack` at the command line: parts, merging, verifying, reports, interruption."""

import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.data.pack.pack_inputs import contents, refused, run
from warpfold.data.pack import pack as packing


def test_parts_are_packed_and_merged(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    inputs = ("--structures", files / "structures", "--msas", files / "msas")
    assert run(capsys, "pack", *inputs, "--out", files / "whole")[0] == 0
    for number in (1, 2):
        code, out, _ = run(capsys, "pack", *inputs, "--out", files / "store", "--shard", f"{number}/2")
        assert code == 0
        assert f"store.part-{number}-of-2: part {number}/2, " in out
        assert out.endswith(f"warpfold pack --merge {files}/store.part-*-of-2 --out {files}/store\n")
    parts = sorted(files.glob("store.part-*-of-2"))
    code, out, _ = run(capsys, "pack", "--merge", *parts, "--out", files / "store")
    assert code == 0
    assert "store: 6 chains kept" in out
    assert contents(files / "store") == contents(files / "whole")
    assert "store: was finished before" in run(capsys, "pack", "--merge", *parts, "--out", files / "store")[1]
    assert "2 is missing" in refused(run(capsys, "pack", "--merge", parts[0], "--out", files / "other"))


def test_verify_and_info(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    store = files / "store"
    assert run(capsys, "pack", "--structures", files / "structures", "--out", store)[0] == 0
    code, out, _ = run(capsys, "pack", "--verify", store)
    assert (code, out) == (0, f"{store}: 6 entries, none damaged\n")
    code, out, _ = run(capsys, "pack", "--info", store)
    assert code == 0
    assert "6 in 3 clusters, 185 residues" in out
    code, out, _ = run(capsys, "pack", "--info", store, "--json")
    assert json.loads(out)["packed"]["options"]["max_resolution"] == 9.0

    shard = store / "shard-00000.wfs"
    good = bytearray(shard.read_bytes())
    good[200] ^= 1  # in the first record
    shard.write_bytes(good)
    code, out, err = run(capsys, "pack", "--verify", store)
    assert (code, err) == (1, "")
    assert "shard-00000.wfs: 1mut_A: damaged" in out.splitlines()[0]
    assert out.splitlines()[1:] == [f"{store}: 1 damaged"]
    shard.write_bytes(good[:-5])
    code, out, _ = run(capsys, "pack", "--verify", store, "--json")
    assert code == 1
    assert "truncated" in json.loads(out)["damaged"][0]
    assert "truncated" in refused(run(capsys, "pack", "--info", store))
    assert "not a store" in refused(run(capsys, "pack", "--verify", files))


def test_sigterm_is_a_stop_and_no_death(
    capsys: pytest.CaptureFixture[str], files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedulers send it before they kill. Jobs that are running are not blamed for the end of the run."""
    read = packing.read_chains

    def interrupted(job: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return read(job)

    handler = signal.getsignal(signal.SIGTERM)
    inputs = ("--structures", files / "structures", "--msas", files / "msas")
    with monkeypatch.context() as patch:
        patch.setattr(packing, "read_chains", interrupted)
        code, out, err = run(capsys, "pack", *inputs, "--out", files / "store")
    assert (code, out) == (143, "")
    again = ["warpfold", "pack", *map(str, inputs), "--out", str(files / "store")]
    assert err == f"stopped; the same command continues: {shlex.join(again)}\n"
    assert signal.getsignal(signal.SIGTERM) is handler
    assert not (files / "store.part-1-of-1.partial/tried").read_text()
    assert run(capsys, "pack", *inputs, "--out", files / "store")[0] == 0


def test_assemblies_are_asked_for(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    inputs = ("--structures", files / "structures")
    for option, name in (("--assemblies", "first"), ("--all-assemblies", "all")):
        code, out, _ = run(capsys, "pack", *inputs, option, "--max-chains", 2, "--out", files / name)
        assert code == 0
        assert "dropped 1one-assembly1: 3 chains, more than 2\n" in out
        assert out.endswith(" 3 assemblies of 3 chains\n")
        code, out, _ = run(capsys, "pack", "--info", files / name)
        assert f"assemblies {name}, max-chains 2" in out
        assert "assemblies      3; chains: min 1" in out
    assert "--max-chains" in refused(run(capsys, "pack", *inputs, "--assemblies", "--out", files / "first"))
    assert "already" in refused(run(capsys, "pack", *inputs, "--out", files / "first"))
