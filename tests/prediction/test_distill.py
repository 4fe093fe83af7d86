"""Test `warpfold distill`: one command folds sequences and packs them, and continues after a stop."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.data.pack.pack_inputs import ONE, TWO, alignment, contents, refused, run
from tests.helpers import save_uneven_params
from warpfold.data.pack import pack as packing
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import StoredExample


@pytest.fixture
def inputs(tmp_path: Path) -> tuple[str | Path, ...]:
    """Write sequences, one alignment, and parameters that predict high pLDDT for some residues and low for others."""
    (tmp_path / "q.fasta").write_text(f">one\n{ONE}\n>two\n{TWO}\n")
    alignment(tmp_path / "msas/one.a3m", ONE, ONE[:15] + "-" * 15)
    save_uneven_params(tmp_path / "p.safetensors")
    files = tmp_path / "q.fasta", "--msa", tmp_path / "msas", "--params", tmp_path / "p.safetensors"
    return "distill", *files, "--device", "cpu", "--out", tmp_path / "store", "--min-plddt", "1"


def test_sequences_become_a_store(
    inputs: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(packing, "merge_parts", interrupted)
        assert run(capsys, *inputs)[0] == 130
    assert not (tmp_path / "store").exists()
    arrays = tmp_path / "store.predictions/one/one.npz"
    written = arrays.stat().st_mtime_ns
    code, out, err = run(capsys, *inputs)
    assert code == 0, err
    assert arrays.stat().st_mtime_ns == written  # not folded again
    assert "2 chains kept (1 with their sequence alone)" in out
    # The PDB files are dropped.
    assert "dropped 2: another file of the same prediction is packed" in out
    store = Store(tmp_path / "store")
    one = StoredExample(store, "one_A")
    assert (one.sequence, one.depth, one.is_predicted) == (ONE, 2, True)
    with np.load(arrays, allow_pickle=False) as found:
        raw = one.take(slice(None))
        np.testing.assert_allclose(raw.positions, found["positions"] * found["mask"][..., None], atol=1e-3)
        np.testing.assert_allclose(raw.confidence, found["plddt"], atol=0.05)
    before = contents(tmp_path / "store")
    assert run(capsys, *inputs)[0] == 0
    assert contents(tmp_path / "store") == before


def test_what_is_refused_comes_before_anything_is_folded(
    inputs: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").mkdir()
    assert "store: exists already" in refused(run(capsys, *inputs))
    assert not (tmp_path / "store.predictions").exists()
    (tmp_path / "store").rmdir()
    # The command ends with os._exit when it is one of several processes.
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29599")
    assert "runs without torchrun" in run(capsys, *inputs)[2]
