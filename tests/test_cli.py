"""Test the command line: help, output, exit codes, interruption. Refused input is in tests/messages."""

import errno
import gzip
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import typer

from tests.training.runs import make_store, rows, tiny_run
from warpfold import __version__, cli, settings
from warpfold.cli import common
from warpfold.cli.common import configure_output, this_process
from warpfold.cli.plan import machine_and_cluster
from warpfold.cli.train import sources_of
from warpfold.cost.report import describe_links
from warpfold.data.store.store import Store
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.write import write_mmcif
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM37_MASK, RESTYPES
from warpfold.prediction.request import Request
from warpfold.progress import progress_bar

SEQUENCE = "MKTAYIAKQRQISFVKSHFS"
Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *arguments: object) -> tuple[int, str, str]:
    """Run `warpfold ARGUMENTS`.  Returns the exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def refused(result: tuple[int, str, str]) -> str:
    """Return the line of an error that bad input causes.  On a slow machine, progress lines may precede it."""
    code, out, err = result
    assert code == 2
    assert out == ""
    *before, error = err.splitlines(keepends=True)
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", line) for line in before), err
    assert error.startswith("error: ")
    return error


def structure(tmp_path: Path, name: str = "one.cif", sequence: str = SEQUENCE, **changes: object) -> Path:
    """Write an mmCIF file of one chain: a loose helix with every atom near its Cα.

    changes: the mask or the positions.
    """
    n = len(sequence)
    turn = np.radians(100) * np.arange(n)
    ca = np.stack([2.3 * np.cos(turn), 2.3 * np.sin(turn), 1.5 * np.arange(n)], -1)
    spread = np.random.default_rng(0).normal(0, 1, (37, 3))
    arrays = {
        "positions": (ca[:, None] + spread).astype(np.float32),
        "mask": ATOM37_MASK[[RESTYPES.index(letter) for letter in sequence]],
    } | changes
    chain = Chain("A", sequence, residue_index=np.arange(n), author_numbers=tuple(map(str, range(1, n + 1))), **arrays)
    path = tmp_path / name
    path.write_text(write_mmcif("one", [chain], method="X-RAY DIFFRACTION", resolution=2.0, release_date="2001-01-01"))
    return path


# ---- help


def test_every_command_has_an_example_and_the_same_options(capsys: Capture) -> None:
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    for name, command in [*commands.items(), ("bench data", commands["bench"].commands["data"])]:
        names = {option for parameter in command.params for option in parameter.opts}
        assert {"-q", "--quiet", "-v", "--verbose"} <= names, name
        assert ("--out" in names) == ("-o" in names), name
        assert f"Example: warpfold {name}" in " ".join(command.epilog.split())
    code, out, err = run(capsys, "bench", "data", "--help")
    assert (code, err) == (0, "")
    assert "Example: warpfold bench data" in " ".join(out.split())
    assert all(name in run(capsys, "--help")[1] for name in commands)
    assert run(capsys, "--version") == (0, f"warpfold {__version__}\n", "")


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_help_does_not_import_torch() -> None:
    code = "import sys\nfrom warpfold import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\n"
    assert python(code + "print({'torch', 'numpy', 'matplotlib', 'gemmi'} & set(sys.modules))").endswith("set()\n")


def test_a_shell_completes_commands_and_options() -> None:
    for words, found in (("warpfold do", {"doctor"}), ("warpfold train --", {"--out", "--quiet"})):
        asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_WARPFOLD_COMPLETE": "complete_bash"}
        assert found <= set(python("from warpfold import cli; cli.main()", **asked).split())


def test_lists_take_several_values() -> None:
    assert common.repeat_names(["q", "--msa", "a", "b", "--seed", "1", "--msa", "c"], {"--msa"}) == [
        *("q", "--msa", "a", "--msa", "b", "--seed", "1", "--msa", "c")
    ]


# ---- output


def test_quiet_prints_nothing_but_json_and_errors(capsys: Capture, tmp_path: Path) -> None:
    one = structure(tmp_path)
    loud = run(capsys, "score", one, one)
    assert (loud[0], "1.0000" in loud[1]) == (0, True)
    assert run(capsys, "score", one, one, "-q") == (0, "", "")
    code, out, _ = run(capsys, "score", one, one, "--quiet", "--json")
    assert (code, json.loads(out)["lddt"]) == (0, 1.0)
    assert run(capsys, "score", one, tmp_path / "none.cif", "-q")[2].startswith("error: ")
    assert run(capsys, "sample", "--proteins", 1, "-o", tmp_path / "made", "-q") == (0, "", "")
    with configure_output(quiet=True, verbose=False, as_json=False), progress_bar(narrate=True) as move:
        move(1, 2, "something long")
        print("a result")
    assert capsys.readouterr() == ("", "")
    # Narration ends with its command.
    with progress_bar(narrate=True) as move:
        move(1, 2, "something else")
    assert "something else" in capsys.readouterr().err


def test_verbose_says_what_is_logged_and_where_an_error_came_from(capsys: Capture, tmp_path: Path) -> None:
    asked = ("score", structure(tmp_path), tmp_path / "none.cif")
    code, _, plain = run(capsys, *asked)
    assert (code, plain.count("\n")) == (2, 1)
    code, _, long = run(capsys, *asked, "-v")
    assert (code, long.startswith("Traceback"), long.endswith(plain)) == (2, True, True)
    log = logging.getLogger("warpfold.somewhere")
    with configure_output(quiet=False, verbose=True, as_json=False):
        log.info("slices of 4 rows")
    log.info("nobody hears this")
    assert capsys.readouterr().err.endswith("warpfold.somewhere: slices of 4 rows\n")


# ---- exit codes


def test_bugs_keep_their_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("warpfold.scoring.score.score_files", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["score", "a.cif", "b.cif"])


@pytest.mark.parametrize(
    ("number", "cure"), [(errno.ENOSPC, "Make room"), (errno.EDQUOT, "Make room"), (errno.EIO, "Check the disk")]
)
def test_a_disk_that_fails_is_no_bug(capsys: Capture, monkeypatch: pytest.MonkeyPatch, number: int, cure: str) -> None:
    def fails(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("warpfold.scoring.score.score_files", fails)
    code, _, said = run(capsys, "score", "a.cif", "b.cif")
    assert code == 1
    assert said == f"error: writing: {os.strerror(number)}. {cure}. To start again: warpfold score a.cif b.cif\n"


def test_without_torch_a_command_says_so(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    code, _, err = run(capsys, "doctor")
    assert (code, err.count("\n")) == (1, 1)
    assert "torch: not installed. Run pip install" in err


def test_pack_lists_what_it_dropped(capsys: Capture, tmp_path: Path) -> None:
    good, short = structure(tmp_path), structure(tmp_path, "short.cif", "MKT")
    broken = tmp_path / "broken.cif"
    broken.write_text(good.read_text()[: good.stat().st_size // 2])
    (tmp_path / "one.a3m").write_text(f">one\n{SEQUENCE}\n>x\n{SEQUENCE[:-2]}--\n")
    files = ["--structures", good, short, broken, "--msas", tmp_path / "one.a3m"]
    code, out, _ = run(capsys, "pack", *files, "--out", tmp_path / "store")
    assert code == 0
    assert "3 residues, fewer than 10" in out
    assert "broken.cif" in out
    code, out, _ = run(capsys, "pack", *files, "--out", tmp_path / "again", "--json")
    report = json.loads(out)
    assert [entry["depth"] for entry in report["kept"]] == [2]
    assert len(report["dropped"]) == 2
    assert "was finished before" in run(capsys, "pack", *files, "--out", tmp_path / "store")[1]


def test_predict_and_score(capsys: Capture, tmp_path: Path, tiny_params: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query, out = tmp_path / "q.fasta", tmp_path / "out"
    query.write_bytes(f">one\r\n{SEQUENCE}\r\n".encode())  # Windows line endings
    files = ("predict", query, "--params", tiny_params, "--device", "cpu", "--out")
    code, text, err = run(capsys, *files, out)
    assert (code, err.splitlines()[0]) == (0, "precision: fp32 (auto, on cpu)")
    assert err.splitlines()[1] == "one: no alignment: folded by the sequence alone"
    assert f"one ({len(SEQUENCE)} residues, 1 chain, 1 alignment row): mean pLDDT" in text
    assert json.loads(run(capsys, *files, out, "--json")[1]) == json.loads((out / "summary.json").read_text())
    scores = json.loads(run(capsys, "score", out / "one" / "one.cif", structure(tmp_path), "--json")[1])
    assert scores["paired"] == len(SEQUENCE)
    assert 0 <= scores["lddt_ca"] <= 1
    alignment = f">one\r\n{SEQUENCE}\r\n>x\r\n{SEQUENCE[:-1]}-\r\n".encode()
    (tmp_path / "q.a3m.gz").write_bytes(gzip.compress(alignment))
    found = run(capsys, *files, tmp_path / "deeper", "--msa", tmp_path / "q.a3m.gz", "--json")
    assert (found[0], json.loads(found[1])["predictions"][0]["msa_depth"]) == (0, 2)

    def fail(*args: object, **more: object) -> None:
        raise MemoryError("too long")

    monkeypatch.setattr("warpfold.prediction.predictor.Predictor.compute", fail)
    code, _, err = run(capsys, *files, tmp_path / "failed")
    assert code == 1
    assert err == (
        "precision: fp32 (auto, on cpu)\n"
        "one: no alignment: folded by the sequence alone\n"
        "failed one: MemoryError: too long\n"
    )


@pytest.mark.slow
def test_a_pipe_that_a_user_names_is_read(tmp_path: Path, tiny_params: Path) -> None:
    """Accept `predict <(zcat q.fa.gz) --msa /dev/stdin`, but refuse a pipe for a file that is read more than once."""
    (tmp_path / "q.fa.gz").write_bytes(gzip.compress(f">one\n{SEQUENCE}\n".encode()))
    command = f"{sys.executable} -m warpfold predict <(zcat q.fa.gz) --params {tiny_params} --out out --device cpu"
    alignment = f">one\n{SEQUENCE}\n>a\n{SEQUENCE[::-1]}\n"

    def bash(text: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        return subprocess.run(
            ["bash", "-c", text], cwd=tmp_path, env=environment, input=alignment, capture_output=True, text=True,
            check=False, timeout=100,
        )  # fmt: skip

    done = bash(f"cat | {command} --msa /dev/stdin")
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads((tmp_path / "out/summary.json").read_text())["predictions"]
    assert (entry["name"], entry["msa_depth"]) == ("one", 2)
    structure(tmp_path)
    packed = bash(f"{sys.executable} -m warpfold pack --structures one.cif --msas <(cat) --out store")
    assert packed.returncode == 0
    assert "is a pipe, a socket or a device" in packed.stdout


# ---- names of ColabFold


def test_predict_takes_colabfolds_names(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Request] = []

    def note(request: Request) -> None:
        seen.append(request)
        raise UserError("seen")

    monkeypatch.setattr("warpfold.cli.predict.check", note)
    theirs = (
        "--num-recycle 2 --num-seeds=3 --random-seed 4 --num-ensemble 2 --max-seq 8 --max-extra-seq 16 --use-dropout "
        "--amber --recycle-early-stop-tolerance 0.5 --host-url https://localhost --save-pair-representations --data a b"
    )
    ours = (
        "--recycles 2 --seeds 3 --seed 4 --ensemble 2 --max-msa 8 --max-extra 16 --dropout --relax all "
        "--recycle-tolerance 0.5 --msa-server https://localhost --representations --params a b"
    )
    for words in (theirs, ours):
        assert "seen" in refused(run(capsys, *f"predict q.fasta --out out --device cpu {words}".split()))
    assert seen[0] == seen[1]
    assert (seen[0].relax, seen[0].recycles, len(seen[0].params_paths)) == ("all", 2, 2)


# ---- interruption and resumption


def test_ctrl_c_is_answered_before_all_has_ended(
    capfd: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def slow(*_: object, **__: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        finally:
            seen.append(capfd.readouterr().err)

    monkeypatch.setattr("warpfold.data.synthetic.folder.generate", slow)
    # A shell makes its background jobs ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, out, err = run(capfd, "sample", "--out", tmp_path / "a b")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, out, seen) == (130, "", ["stopping\n"])
    assert err == f"stopped; to start again: warpfold sample --out '{tmp_path / 'a b'}'\n"


STUCK = """
import signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
from warpfold import cli
from warpfold.data.synthetic import folder

def stuck(*_, **__):
    with ThreadPoolExecutor(1, "features") as maker:
        maker.submit(lambda: (print("at work", flush=True), threading.Event().wait())).result()

folder.generate = stuck
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
cli.main(["sample", "--out", "out"])
"""


def test_a_second_ctrl_c_ends_at_once_whatever_a_thread_waits_for(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
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
        with pytest.raises(subprocess.TimeoutExpired):  # the thread continues
            child.wait(0.2)
        child.send_signal(signal.SIGINT)
        # A shell reports both as 130.  Python exits with 130 if the first SIGINT arrived before the pool waited for
        # its thread.
        assert child.wait(60) in (-signal.SIGINT, 130)
    finally:
        child.kill()
        child.communicate()


def test_a_stopped_command_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, said in (
        (["train", "tiny", "--set", "a=[1, 2]"], "the same command continues: warpfold train tiny --set 'a=[1, 2]'"),
        (["predict", "a.fasta", "--force"], "the same command continues: warpfold predict a.fasta"),
    ):
        monkeypatch.setattr(common, "GIVEN", given)
        assert common.resume_hint() == said
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert common.resume_hint() == "the same command continues"


# ---- train, plan


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Store]:
    folder = tmp_path_factory.mktemp("cli")
    return [make_store(folder / "pdb"), make_store(folder / "distilled", proteins=4)]


def test_stores_have_weights(stores: list[Store], tmp_path: Path) -> None:
    one, other = (str(store.path) for store in stores)
    weights = [(source.store.path.name, source.weight) for source in sources_of([f"{one}=0.25", other])]
    assert weights == [("pdb", 0.25), ("distilled", 1.0)]
    shutil.copytree(one, tmp_path / "a=2")
    # The folder's name contains `=2`.
    assert [s.weight for s in sources_of([str(tmp_path / "a=2")])] == [1.0]
    for wrong, says in (
        ("much", "'much' is not a number. Pass STORE or STORE=WEIGHT"),
        ("-1", "weight -1.0. Pass a positive"),
    ):
        with pytest.raises(UserError, match=says):
            sources_of([f"{one}={wrong}"])


def test_a_mixture_is_trained_on_and_its_order_followed(stores: list[Store], tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "tiny.toml").write_text(settings.to_toml(tiny_run(steps=2, validation=0.0)))
    shard = shutil.copytree(stores[1].path, tmp_path / "damaged") / "shard-00000.wfs"
    data = bytearray(shard.read_bytes())
    for key in ("helix0", "helix1", "helix2"):
        data[stores[1].record(key).arrays["msa"].starts[0]] ^= 1
    shard.write_bytes(data)
    command = ["train", tmp_path / "tiny.toml", "--data", f"{stores[0].path}=0.1", f"{shard.parent}=0.9", "--json"]
    command += ["--set", "train.quarantine=0.5"]
    code, out, err = run(capsys, *command, "--out", tmp_path / "run")
    assert code == 0
    assert sorted(json.loads(out)["quarantined"]) == [f"damaged:helix{i}" for i in range(3)]
    assert "entries that could not be used: 3 (" in err
    assert "quarantine.jsonl has the reasons" in err
    assert re.search(r"^[-\d]+ [:\d]+  step 1/2  loss \d.*  waiting .*  ETA ", err, re.M)  # no terminal
    code, out, _ = run(capsys, *command, "--out", tmp_path / "again", "--replay", tmp_path / "run/order.txt")
    # The recorded order does not contain the quarantined chains.
    assert (code, json.loads(out)["quarantined"]) == (0, [])
    both = [[row for row in rows(tmp_path / out) if row["kind"] == "step"] for out in ("run", "again")]
    assert both[0] == both[1]


@pytest.mark.parametrize(("ranks", "lazy"), [(64, None), (65, "1")])
def test_many_processes_connect_when_they_first_send(
    ranks: int, lazy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": 3, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    # monkeypatch then also removes the value that the function sets.
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "")
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    assert this_process().ranks == ranks
    assert os.environ.get("TORCH_GLOO_LAZY_INIT") == lazy


def test_devices_that_a_plan_leaves_idle_are_paid_for(capsys: Capture) -> None:
    """`plan` chooses as `train` would: the link is too slow to share one example between devices."""
    there = ("--device", "H100", "--devices", 4, "--link", "eth25")
    code, out, err = run(capsys, "plan", "tiny", *there, "--price", 2, "--json")
    assert code == 0, err
    chosen = json.loads(out)["targets"][0]
    assert "2 of 4 devices idle" in chosen["said"]  # two examples per step
    assert chosen["examples_per_second"] == pytest.approx(2 / chosen["seconds"])
    assert chosen["device_hours_per_million"] == pytest.approx(4 * 1e6 / chosen["examples_per_second"] / 3600)
    assert chosen["cost_per_million"] == pytest.approx(2 * chosen["device_hours_per_million"])
    assert 0 < chosen["efficiency"] <= 0.5


def test_devices_that_are_planned_for_are_on_nodes_of_eight() -> None:
    """`plan` once placed 256 devices on one node."""
    _, there = machine_and_cluster("H100", devices=256)
    assert there is not None
    assert describe_links(there).startswith("32 nodes of 8, 360 GB/s within and 320 GB/s between")


def test_every_length_of_a_plan_is_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    """A short protein next to a longer one got an upper bound that was a multiple of its memory, and no time."""
    alone, listed = (
        json.loads(run(capsys, "plan", "tiny", "--device", "H100", "--json", "--residues", *lengths)[1])["targets"][0]
        for lengths in (("40",), ("40", "80"))
    )
    for key in ("bytes", "seconds", "title"):
        assert listed[key] == alone[key]
