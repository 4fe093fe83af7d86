"""The command line: help, exit codes, and one line for whatever input may be wrong with."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from warpfold import __version__, cli
from warpfold.cli import common
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.write import write_mmcif
from warpfold.geometry.residue import ATOM37_MASK, RESTYPES

COMMANDS = ("demo", "sample", "search", "pack", "train", "predict", "relax", "score", "golden", "profile", "bench data")
SEQUENCE = "MKTAYIAKQRQISFVKSHFS"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of `warpfold ARGUMENTS`."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def refused(result: tuple[int, str, str]) -> str:
    """The one line of an error that is the input's fault; before it, on a slow machine, lines of progress."""
    code, out, err = result
    assert code == 2
    assert out == ""
    *before, error = err.splitlines(keepends=True)
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", line) for line in before), err
    assert error.startswith("error: ")
    return error


def structure(tmp_path: Path, name: str = "one.cif", sequence: str = SEQUENCE, **changes: object) -> Path:
    """An mmCIF file of one chain, a loose helix with every atom near its Cα; `changes`: mask or positions."""
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


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, err = run(capsys, *command.split(), "--help")
    assert (code, err) == (0, "")
    assert f"Example: warpfold {command}" in " ".join(out.split())


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--help")
    assert all(command.split()[0] in out for command in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"warpfold {__version__}\n", "")


def test_help_does_not_import_torch() -> None:
    code = "import sys\nfrom warpfold import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'numpy', 'matplotlib', 'gemmi'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["predict"], "missing argument"),
        (["predict", "q.fasta", "--out", "o"], "--params"),
        (["fold"], "no such command"),
        (["score", "a", "b", "--quick"], "--quick"),
        (["predict", "q.fasta", "--params", "p", "--out", "o", "--recycles", "-1"], "--recycles"),
        (["pack", "--out", "o", "--structures"], "--structures"),
        (["pack", "--out", "o", "--structures", ""], "--structures: the value is empty"),
        (["pack", "--out", "o", "--structures="], "--structures=: the value is empty"),
    ],
)
def test_wrong_usage_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert says in refused(run(capsys, *arguments)).lower()


# ---- commands


def test_lists_take_several_values() -> None:
    assert common.repeat_names(["q", "--msa", "a", "b", "--seed", "1", "--msa", "c"], {"--msa"}) == [
        *("q", "--msa", "a", "--msa", "b", "--seed", "1", "--msa", "c")
    ]


def test_pack_lists_what_it_dropped(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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


def test_predict_and_score(capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_params: Path) -> None:
    query, out = tmp_path / "q.fasta", tmp_path / "out"
    query.write_text(f">one\n{SEQUENCE}\n")
    code, text, err = run(capsys, "predict", query, "--params", tiny_params, "--out", out, "--device", "cpu")
    assert (code, err.splitlines()[0]) == (0, "one: no alignment: folded by the sequence alone")
    assert "one: mean pLDDT" in text
    code, text, _ = run(capsys, "predict", query, "--params", tiny_params, "--out", out, "--device", "cpu", "--json")
    assert json.loads(text) == json.loads((out / "summary.json").read_text())
    truth = structure(tmp_path)
    code, text, _ = run(capsys, "score", out / "one" / "one.cif", truth, "--json")
    scores = json.loads(text)
    assert scores["paired"] == len(SEQUENCE)
    assert 0 <= scores["lddt_ca"] <= 1
    code, text, _ = run(capsys, "score", truth, truth)
    assert "1.0000" in text


def test_predict_exits_with_1_when_one_fails(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_params: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from warpfold.prediction.predictor import Predictor

    def fail(*args: object, **more: object) -> None:
        raise MemoryError("too long")

    monkeypatch.setattr(Predictor, "compute", fail)
    (tmp_path / "q.fasta").write_text(f">one\n{SEQUENCE}\n")
    files = (tmp_path / "q.fasta", "--params", tiny_params, "--out", tmp_path / "out", "--device", "cpu")
    code, _, err = run(capsys, "predict", *files)
    assert code == 1
    assert err == "one: no alignment: folded by the sequence alone\nfailed one: MemoryError: too long\n"


def test_ctrl_c_exits_with_130(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from warpfold.scoring import score

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(score, "score_files", interrupted)
    code, out, err = run(capsys, "score", "a.cif", "b.cif")
    assert (code, out) == (130, "")
    assert "Traceback" not in err


def test_bugs_keep_their_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    from warpfold.scoring import score

    def broken(*args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(score, "score_files", broken)
    with pytest.raises(ZeroDivisionError):  # Python prints it and exits with 1
        cli.main(["score", "a.cif", "b.cif"])


# ---- bad input: one line, exit 2, nothing written


def no_atoms(text: str) -> str:
    return text[: text.index("loop_\n_atom_site.")]


def ca_only(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join(x for x in lines if not x.startswith("ATOM") or " CA " in x)


BAD_STRUCTURES = {
    "truncated": (lambda t: t[: len(t) * 2 // 3], ""),
    "empty": (lambda t: "", "empty"),
    "no atoms": (no_atoms, ""),
    "Ca alone": (ca_only, ""),
    "not a number": (lambda t: re.sub(r"(ATOM 5 .* \? )\S+", r"\1nan", t), ""),
    "another format": (lambda t: "<html>404</html>", ""),
}


@pytest.mark.parametrize("kind", BAD_STRUCTURES)
def test_bad_structures(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    good = structure(tmp_path)
    bad = tmp_path / "bad.cif"
    spoil, says = BAD_STRUCTURES[kind]
    bad.write_text(spoil(good.read_text()))
    message = refused(run(capsys, "pack", "--structures", bad, "--out", tmp_path / "store"))
    assert says in message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.cif", "one.cif"]


@pytest.mark.parametrize(
    ("query", "msa", "says"),
    [
        (b">a\nMKT\xff\n", None, "UTF-8"),
        (b">a\nMK7T\n", None, "'7'"),
        (b"", None, "empty"),
        (b">a\nMKTAYIAK\n", b">a\nMKTAYIAK\n>b\nMKTA\n", "row 2"),
        (b">a\nMKTAYIAK\n", b">a\nMKTAYIAV\n", "differs from the query"),
        (b">a\nMKTAYIAK\n", b"\x1f\x8bbroken", "gzip"),
        (b">a\nACGTACGTACGTACGT\n", None, "nucleic"),
    ],
)
def test_bad_sequences(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_params: Path, query: bytes, msa: bytes | None, says: str
) -> None:
    (tmp_path / "q.fasta").write_bytes(query)
    arguments: list[object] = ["predict", tmp_path / "q.fasta", "--params", tiny_params, "--out", tmp_path / "out"]
    if msa is not None:
        (tmp_path / "q.a3m").write_bytes(msa)
        arguments += ["--msa", tmp_path / "q.a3m"]
    assert says in refused(run(capsys, *arguments))
    assert not (tmp_path / "out").exists()


def test_crlf_and_gzip_are_accepted(capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_params: Path) -> None:
    (tmp_path / "q.fasta").write_bytes(f">one\r\n{SEQUENCE}\r\n".encode())
    (tmp_path / "q.a3m.gz").write_bytes(gzip.compress(f">one\r\n{SEQUENCE}\r\n>x\r\n{SEQUENCE[:-1]}-\r\n".encode()))
    arguments = (tmp_path / "q.fasta", "--msa", tmp_path / "q.a3m.gz", "--params", tiny_params, "--device", "cpu")
    code, out, _ = run(capsys, "predict", *arguments, "--out", tmp_path / "out", "--json")
    assert code == 0
    assert json.loads(out)["predictions"][0]["msa_depth"] == 2


@pytest.mark.slow
def test_a_pipe_that_a_user_names_is_read(tmp_path: Path, tiny_params: Path) -> None:
    """`predict <(zcat q.fa.gz) --msa /dev/stdin`, and no pipe where a file is read more than once."""
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


def test_bad_parameters(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    query, out = tmp_path / "q.fasta", tmp_path / "out"
    query.write_text(f">one\n{SEQUENCE}\n")
    np.savez(tmp_path / "wrong.npz", weights=np.zeros((3, 3)))
    (tmp_path / "short.safetensors").write_bytes(b"\0" * 5)
    for params in (tmp_path / "none.npz", tmp_path / "wrong.npz", tmp_path / "short.safetensors", tmp_path):
        message = refused(run(capsys, "predict", query, "--params", params, "--out", out, "--device", "cpu"))
        assert params.name in message
        assert not out.exists()


def test_an_output_folder_of_something_else(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_params: Path
) -> None:
    query, out = tmp_path / "q.fasta", tmp_path / "out"
    query.write_text(f">one\n{SEQUENCE}\n")
    out.mkdir()
    (out / "thesis.tex").write_text("precious")
    for force in ([], ["--force"]):
        files = (query, "--params", tiny_params, "--out", out, "--device", "cpu", *force)
        assert "something else" in refused(run(capsys, "predict", *files))
        assert [p.name for p in out.iterdir()] == ["thesis.tex"]


def test_training_into_a_folder_of_something_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    assert run(capsys, "pack", "--structures", structure(tmp_path), "--out", store)[0] == 0
    out.mkdir()
    (out / "thesis.tex").write_text("precious")
    files = ("tiny", "--data", store, "--out", out, "--set", "train.validation=0.0")
    assert "something else" in refused(run(capsys, "train", *files))
    assert [p.name for p in out.iterdir()] == ["thesis.tex"]


def test_bad_settings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text("[model]\nc_mm = 3\n")
    out = tmp_path / "run"
    message = refused(run(capsys, "train", tmp_path / "s.toml", "--data", tmp_path / "none", "--out", out))
    assert "model.c_mm is not a setting; did you mean model.c_m?" in message
    assert "no such settings file" in refused(run(capsys, "train", "none", "--data", tmp_path, "--out", out))
    (tmp_path / "s.toml").write_text("[model]\nc_m = 8\n")
    assert "none" in refused(run(capsys, "train", tmp_path / "s.toml", "--data", tmp_path / "none", "--out", out))
    assert not out.exists()


def test_unknown_device(capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_params: Path) -> None:
    (tmp_path / "q.fasta").write_text(f">one\n{SEQUENCE}\n")
    files = (tmp_path / "q.fasta", "--params", tiny_params, "--out", tmp_path / "out")
    for device in ("gpu", "cuda:99"):
        assert f"--device {device}" in refused(run(capsys, "predict", *files, "--device", device))


def test_files_that_are_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    for arguments in (
        ("score", missing, missing),
        ("golden", missing),
        ("pack", "--structures", missing, "--out", tmp_path / "store"),
        ("predict", missing, "--params", missing, "--out", tmp_path / "out"),
    ):
        assert "missing" in refused(run(capsys, *arguments))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "ours"), [("--num-recycle", "--recycles"), ("--amber", "--relax best"), ("--num-seeds", "--seeds")]
)
def test_options_of_other_programs_are_named_as_they_are_here(
    option: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(run(capsys, "predict", "a.fasta", option, 3))
    assert f"no option {option}: here it is {ours}; see warpfold predict --help" in message


@pytest.mark.parametrize(
    ("device", "cure"), [("A100", "give cpu, cuda, or cuda:1"), ("cuda", "give cpu, or "), ("cuda:99", "give cpu, or ")]
)
def test_a_device_that_is_not_there_is_answered_with_what_to_give(
    device: str, cure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    message = refused(run(capsys, "doctor", "--device", device))
    assert f"--device {device}: " in message
    assert cure in message


def test_an_error_does_not_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert "?[2Jnone.fasta" in refused(run(capsys, "params", "\x1b[2Jnone.fasta"))


def test_without_torch_a_command_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    code, _, err = run(capsys, "doctor")
    assert (code, err.count("\n")) == (1, 1)
    assert "torch is not installed; pip install" in err
