"""`warpfold watch` on the command line; how a stopped command says to go on."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import warpfold
from tests.report.test_curves import make_run
from tests.test_cli import refused, run
from warpfold.cli import common, main


def test_curves_as_text_and_as_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    code, out, err = run(capsys, "watch", folder)  # no terminal: once
    assert (code, err) == (0, "")
    assert out.startswith("run  step 40 of 100  no news for")
    assert "held-out lDDT-Cα 0.400" in out
    code, out, _ = run(capsys, "watch", folder, "--html", tmp_path / "page.html", "--once")
    assert (code, out) == (0, f"{tmp_path / 'page.html'}: open it in a browser\n")
    assert "<svg" in (tmp_path / "page.html").read_text()
    assert "no such folder" in refused(run(capsys, "watch", tmp_path / "nowhere"))
    assert "not the folder of a training run" in refused(run(capsys, "watch", folder, tmp_path / "run" / ".."))


def test_a_page_follows_a_run_until_it_has_finished(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=39, of=40)
    (folder / "settings.toml").write_text("[train]\nsteps = 40\nvalidation = 0.0\n")

    def finish() -> None:
        time.sleep(0.2)
        with open(folder / "metrics.jsonl", "a") as file:
            file.write('{"kind": "step", "step": 40, "loss": 1.0, "samples_per_second": 1.0, "waiting_so_far": 0.0}\n')

    thread = threading.Thread(target=finish)
    thread.start()
    assert run(capsys, "watch", folder, "--html", tmp_path / "page.html", "--every", "0.5")[0] == 0
    thread.join()
    assert "40 of 40" in (tmp_path / "page.html").read_text()


def test_ctrl_c_is_how_one_leaves(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder, page = make_run(tmp_path / "run"), tmp_path / "page.html"

    def leave() -> None:
        while not page.exists():  # it is watching from then on
            time.sleep(0.01)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=leave)
    thread.start()
    assert run(capsys, "watch", folder, "--html", page)[0] == 0
    thread.join()


def test_ctrl_c_is_answered_before_all_has_ended(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def slow(*_: object, **__: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        finally:
            seen.append(capfd.readouterr().err)

    monkeypatch.setattr("warpfold.data.synthetic.folder.generate", slow)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        main(["sample", "--out", str(tmp_path / "out")])
    assert (ended.value.code, seen) == (130, ["stopping\n"])
    assert signal.getsignal(signal.SIGINT) is before


STUCK = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from warpfold import cli
from warpfold.data.synthetic import folder

def stuck(*_, **__):
    with ThreadPoolExecutor(1, "features") as maker:
        maker.submit(lambda: (print("at work", flush=True), threading.Event().wait())).result()

folder.generate = stuck
cli.main(["sample", "--out", "out"])
"""


def test_a_second_ctrl_c_ends_at_once_whatever_a_thread_waits_for(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(warpfold.__file__).parents[1])}
    child = subprocess.Popen(
        [sys.executable, "-c", STUCK],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stderr is not None
    try:
        assert child.stdout.readline() == "at work\n"
        child.send_signal(signal.SIGINT)
        assert child.stderr.readline() == "stopping\n"
        with pytest.raises(subprocess.TimeoutExpired):  # the thread goes on
            child.wait(0.2)
        child.send_signal(signal.SIGINT)
        # A shell calls both 130; the second is Python's, if the first came before the pool waited for its thread.
        assert child.wait(60) in (-signal.SIGINT, 130)
    finally:
        child.kill()
        child.communicate()


def test_a_stopped_command_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("warpfold.data.synthetic.folder.generate", stopped)
    assert run(capsys, "sample", "--out", tmp_path / "a b") == (
        130,
        "",
        f"stopped; to start again: warpfold sample --out '{tmp_path / 'a b'}'\n",
    )
    for given, said in (
        (["train", "tiny", "--set", "a=[1, 2]"], "the same command continues: warpfold train tiny --set 'a=[1, 2]'"),
        (["predict", "a.fasta", "--force"], "the same command continues: warpfold predict a.fasta"),
    ):
        monkeypatch.setattr(common, "GIVEN", given)
        assert common.how_to_go_on() == said
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert common.how_to_go_on() == "the same command continues"
