"""Test `warpfold params fetch`: names, extraction from a tar, the source record of a file, existing files."""

import io
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import warpfold
from tests.downloads import FileServer, serving
from tests.published import write_archive, write_like
from tests.test_cli import run
from tests.test_nothing_lost import contents
from warpfold.download import DownloadFailed
from warpfold.errors import UserError
from warpfold.prediction import published as table
from warpfold.prediction.published import PUBLISHED, SETS, licence_of, published

TAR = "alphafold_params_2022-12-06.tar"


@pytest.fixture(scope="module")
def tar(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Build DeepMind's archive with some of its models."""
    names = ["model_1", "model_3_ptm", "model_1_ptm", "model_1_multimer_v3"]
    return write_archive(tmp_path_factory.mktemp("tar") / TAR, names).read_bytes()


@pytest.fixture
def server(tar: bytes) -> Iterator[FileServer]:
    with serving({TAR: tar}) as found:
        yield found


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("model_1_ptm", ["params_model_1_ptm.npz"]),
        ("params_model_1_ptm.npz", ["params_model_1_ptm.npz"]),
        ("Model-5-multimer-v3", ["params_model_5_multimer_v3.npz"]),
        ("finetuning_ptm_1", ["finetuning_ptm_1.pt"]),
        ("openfold-finetuning_ptm_1.pt", ["finetuning_ptm_1.pt"]),
        ("multimer", [f"params_model_{number}_multimer_v3.npz" for number in range(1, 6)]),
        ("alphafold2_multimer_v2", [f"params_model_{number}_multimer_v2.npz" for number in range(1, 6)]),
    ],
)
def test_names_that_people_guess(name: str, files: list[str]) -> None:
    assert [one.file for one in published(name)] == files


def test_what_the_table_says_of_each() -> None:
    assert len(published(TAR)) == 15
    assert len(published("openfold")) == 10
    assert {name for names in SETS.values() for name in names} == set(PUBLISHED)
    for name in ("monomer", "ptm", "multimer", "multimer_v2", "multimer_v1"):
        assert [file.removeprefix("model_")[0] for file in SETS[name]] == list("12345")
    for one in PUBLISHED.values():
        assert one.address.startswith("https://")
        assert one.sha256 is None or re.fullmatch("[0-9a-f]{64}", one.sha256)
        assert 370 < one.megabytes < 380
    digests = [one.sha256 for one in PUBLISHED.values() if one.sha256]
    assert len(digests) == len(set(digests)) == 8
    with pytest.raises(UserError, match=r"finetunning_ptm_1: .*Did you mean finetuning_ptm_1"):
        published("finetunning_ptm_1")


def test_a_model_is_taken_from_the_tar_checked_and_folds(
    server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "params"
    command = ("params", "fetch", "model_1_ptm", "--from", server.url, "--out", out)
    server.faults = ["cut 100000"]
    code, said, before = run(capsys, *command)
    assert code == 0
    assert "AlphaFold2, single chains, with templates" in said
    assert "complete, all finite" in said
    assert "licence: CC BY 4.0, https://creativecommons.org/licenses/by/4.0/" in before
    assert [asked for _, asked in server.asked] == ["", "bytes=100000-"]
    assert sorted(os.listdir(out)) == ["params_model_1_ptm.npz", "params_model_1_ptm.npz.source.json"]
    note = json.loads((out / "params_model_1_ptm.npz.source.json").read_text())
    assert note["sha256"] == warpfold.params(out / note["file"]).sha256
    assert note["address"] == f"{server.url}/{TAR}"
    assert note["published_at"].endswith(f"alphafold/{TAR}")
    assert note["published_sha256"] is None
    assert "by DeepMind Technologies Limited; CC BY 4.0" in note["attribution"]
    # The second run finds the file and sends no request.
    assert run(capsys, *command)[0] == 0
    assert len(server.asked) == 2
    model = warpfold.load(out / "params_model_1_ptm.npz", device="cpu")
    assert model.fold("MKTAYIAKQRQ", recycles=0).pae is not None


def test_files_that_are_there_stay(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / TAR).write_bytes(server.files[TAR])  # the user's file
    (tmp_path / "params_model_1.npz").write_bytes(b"mine")
    before = contents(tmp_path)
    with pytest.raises(UserError, match=r"params_model_1\.npz: is there, and nothing says that it is model_1"):
        warpfold.fetch_params("model_1", out=tmp_path, source=server.url)
    assert contents(tmp_path) == before
    warpfold.fetch_params("model_1_ptm", out=tmp_path, source=server.url)
    assert contents(tmp_path).items() > before.items()
    with open(tmp_path / "params_model_1_ptm.npz", "ab") as file:
        file.write(b"more")
    with pytest.raises(UserError, match="is another file than model_1_ptm: its SHA-256 is"):
        warpfold.fetch_params("model_1_ptm", out=tmp_path, source=server.url)


def test_a_folder_or_the_tar_itself_stays(tar: bytes, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    archive = tmp_path / "here" / TAR
    archive.write_bytes(tar)
    for source, name in ((tmp_path / "here", "model_3_ptm"), (archive, "model_1_multimer_v3")):
        (found,) = warpfold.fetch_params(name, out=tmp_path / "out", source=str(source))
        assert found.problems == ()
    assert contents(tmp_path / "here") == {TAR: tar}


def test_openfolds_are_files_of_their_own(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_like("finetuning_ptm_1", tmp_path).read_bytes()
    server.files["finetuning_ptm_1.pt"] = data
    with pytest.raises(UserError, match="is not the published file, whose SHA-256 is"):
        warpfold.fetch_params("finetuning_ptm_1", out=tmp_path / "out", source=server.url)
    assert os.listdir(tmp_path / "out") == []
    one = replace(PUBLISHED["finetuning_ptm_1"], sha256=None)
    monkeypatch.setitem(table.PUBLISHED, one.name, one)
    (found,) = warpfold.fetch_params("openfold-finetuning_ptm_1", out=tmp_path / "out", source=server.url)
    assert (found.format, found.problems) == ("OpenFold", ())
    assert warpfold.fetch_params("finetuning_ptm_1", out=tmp_path / "out")[0].sha256 == found.sha256


def test_licences_are_those_of_recognized_files(tmp_path: Path) -> None:
    """A file is recognized by its digest, by the note of a download, or by the name of a file without a digest."""
    named, other = tmp_path / "params_model_1.npz", tmp_path / "finetuning_ptm_1.pt"
    cc_by = "CC BY 4.0 (https://creativecommons.org/licenses/by/4.0/) by "
    assert licence_of(named, "a") == f"{cc_by}DeepMind Technologies Limited, if this is the published file of that name"
    assert licence_of(tmp_path / "x.pt", str(PUBLISHED[other.stem].sha256)) == f"{cc_by}{table.OPENFOLD.by}"
    assert licence_of(other, "a") is None
    assert licence_of(tmp_path / "own.safetensors", "a") is None
    note = tmp_path / "params_model_1.npz.source.json"
    for name, certain in (("model_1", True), ("model_9", False), (["model_1"], False)):
        note.write_text(json.dumps({"name": name, "sha256": "a"}))
        assert (licence_of(named, "a") == f"{cc_by}DeepMind Technologies Limited") is certain
    assert str(licence_of(named, "b")).endswith("of that name")
    for damaged in ("", "[1]", "{"):
        note.write_text(damaged)
        assert str(licence_of(named, "a")).endswith("of that name")


def packed(**members: bytes) -> bytes:
    """Build a tar of these files, preceded by links and a folder with the name of the requested file."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as made:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE):
            link = tarfile.TarInfo("params_model_1.npz")
            link.type, link.linkname = kind, "/etc/passwd"
            made.addfile(link)
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            made.addfile(member, io.BytesIO(data))
    return out.getvalue()


def member(size: int, kind: bytes = tarfile.REGTYPE, pax: dict[str, str] | None = None) -> bytes:
    """Build a tar of one member with 512 bytes whose header states another size."""
    made = tarfile.TarInfo("params_model_1.npz")
    made.size, made.type, made.pax_headers = size, kind, pax or {}
    return made.tobuf(tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT) + bytes(512)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"no tar at all" * 100, "not a tar that can be read"),
        (member(10**15, tarfile.GNUTYPE_LONGNAME), "not a tar that can be read"),
        (member(-(10**15), tarfile.GNUTYPE_LONGNAME), "not a tar that can be read"),
        (member(2**70), "not a tar that can be read"),
        (member(1, pax={"size": "9" * 400}), "not a tar that can be read"),
        (member(1, pax={"size": "9" * 5000}), "params_model_1.npz: not a readable .npz"),
        (packed(), r"has no params_model_1\.npz\. Give the published archive"),
        (packed(**{"params_model_1.npz": bytes(50_000)})[:30_000], "not a tar that can be read"),
        (packed(**{"../../params_model_1.npz": b"no arrays"}), "params_model_1.npz: not a readable .npz"),
    ],
)
def test_a_tar_that_is_none_or_means_harm(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / TAR).write_bytes(data)
    with pytest.raises(UserError, match=says):
        warpfold.fetch_params("model_1", out=tmp_path / "a" / "b", source=str(tmp_path / TAR))
    # Nothing is left that the next run could mistake for the parameters.
    assert contents(tmp_path) == {TAR: data}


def test_a_killed_download_leaves_no_archive(server: FileServer, tmp_path: Path) -> None:
    """An archive that is left behind would take 5.6 GB, and the next run would mistake it for the user's file."""
    server.faults = ["slow"]
    code = "import sys, warpfold; warpfold.fetch_params('model_1', out=sys.argv[1], source=sys.argv[2])"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "out"), server.url]) as process:
        while not server.asked:
            time.sleep(0.02)
        process.kill()
    assert os.listdir(tmp_path / "out") == []


def test_the_list_and_wrong_use(server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = run(capsys, "params", "fetch")
    assert code == 0
    assert all(re.search(rf"^ *{name} ", said, re.M) for name in (*SETS, "finetuning_ptm_2"))
    assert len(json.loads(run(capsys, "params", "fetch", "--json")[1])) == len(PUBLISHED)
    with pytest.raises(UserError, match="name is missing"):
        warpfold.fetch_params()
    server.faults = [(403, {})]
    with pytest.raises(DownloadFailed, match="answers 403"):
        warpfold.fetch_params("ptm", out=tmp_path / "other", source=server.url)
    # This tar does not contain model_2.
    assert run(capsys, "params", "fetch", "model_2", "--from", server.url, "--out", tmp_path)[0] == 2
