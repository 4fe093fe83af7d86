"""Test `warpfold params fetch`: names, extraction from a tar, the source record of a file, existing files."""

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

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


def test_the_table_of_published_files() -> None:
    """Only models 1 and 2 of DeepMind's single chains have templates, so the others are smaller."""
    deepmind = {name: one for name, one in PUBLISHED.items() if one.terms is table.ALPHAFOLD}
    dates = {"": "2022-12-06", "_ptm": "2022-12-06", "_multimer_v3": "2022-12-06"}
    dates |= {"_multimer_v2": "2022-03-02", "_multimer": "2022-01-19"}
    assert {
        name: (one.file, one.megabytes, one.address, one.sha256, one.in_archive) for name, one in deepmind.items()
    } == {
        f"model_{number}{family}": (
            f"params_model_{number}{family}.npz",
            373 if number < 3 or "multimer" in family else 372,
            f"https://storage.googleapis.com/alphafold/alphafold_params_{date}.tar",
            None,
            True,
        )
        for family, date in dates.items()
        for number in (1, 2, 3, 4, 5)
    }
    openfold = {name: one for name, one in PUBLISHED.items() if name not in deepmind}
    assert [*openfold] == [*SETS["openfold"]]
    for name, one in openfold.items():
        assert (one.file, one.in_archive, one.terms) == (f"{name}.pt", False, table.OPENFOLD)
        assert one.megabytes == (373 if "no_templ" in name else 375)
        assert one.address.endswith(f"/{name}.pt")
        assert ("s3.amazonaws" in one.address) == (name == "initial_training")
        assert (one.sha256 is None) == (name in ("initial_training", "finetuning_no_templ_1"))
    assert [*SETS["alphafold"]] == [name for name in deepmind if not name.endswith(("multimer", "multimer_v2"))]
    assert deepmind["model_1"].attribution == (
        "params_model_1.npz, of the AlphaFold parameters, by DeepMind Technologies Limited; CC BY 4.0 "
        "(https://creativecommons.org/licenses/by/4.0/); unchanged"
    )


@pytest.mark.parametrize(("name", "hint"), [("ptxyz", "Did you mean ptm? "), ("0123", "")])
def test_unknown_names_have_a_hint_if_half_of_the_letters_agree(name: str, hint: str) -> None:
    with pytest.raises(UserError) as error:
        published(name)
    assert str(error.value) == (
        f"{name}: no published parameters of this name. {hint}List them with `warpfold params fetch`."
    )


def test_a_download_is_limited_noted_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files may have 2 GB, archives 20 GB. Files that are there already are only inspected."""
    limits, told, inspected = list[Any](), list[Any](), list[str]()
    content = packed(**{"a/params_model_2.npz": b"two", "params_model_3.npz": b"three", "LICENSE": b"text"})

    def receive(source: Any, file: Any, name: str, limit: int, progress: Any) -> str:
        limits.append((source, name, limit))
        file.write(content)
        return "https://mirror/x.tar"

    def fetch_file(source: Any, path: Path, sha256: str | None, limit: int, progress: Any) -> str:
        limits.append((source, path.name, limit, sha256))
        path.write_bytes(b"four")
        return "https://mirror/x.pt"

    def inspect(path: Path) -> str:
        inspected.append(path.name)
        return path.name

    monkeypatch.setattr("warpfold.download.receive", receive)
    monkeypatch.setattr("warpfold.download.fetch_file", fetch_file)
    monkeypatch.setitem(SETS, "both", ("model_2", "model_3", "initial_training"))
    names = ["params_model_2.npz", "params_model_3.npz", "initial_training.pt"]
    progress = lambda *given: told.append(given)  # noqa: E731
    for _ in range(2):
        assert table.fetch_params("both", tmp_path / "new/out", inspect, progress=progress) == names
    assert inspected == names * 2
    tar, pt = PUBLISHED["model_2"].address, PUBLISHED["initial_training"].address
    assert limits == [(tar, TAR, 20 * 10**9), (pt, "initial_training.pt", 2 * 10**9, None)]
    checks = [(index, 3, f"checking {name}") for index, name in enumerate(names)]
    assert told == [(0, 2, f"extracting {names[0]}"), (1, 2, f"extracting {names[1]}"), *checks, *checks]
    note_path = tmp_path / "new/out/params_model_2.npz.source.json"
    note = json.loads(note_path.read_text())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", note.pop("fetched"))
    assert note == {
        "name": "model_2", "file": names[0], "size": 3, "sha256": hashlib.sha256(b"two").hexdigest(),
        "published_sha256": None, "address": "https://mirror/x.tar", "published_at": tar,
        **asdict(table.ALPHAFOLD), "attribution": PUBLISHED["model_2"].attribution,
    }  # fmt: skip
    assert note_path.read_text().startswith('{\n "name": "model_2",\n "file"')
    assert note_path.read_text().endswith("}\n")
    other = json.loads((tmp_path / "new/out/initial_training.pt.source.json").read_text())
    assert (other["address"], other["size"]) == ("https://mirror/x.pt", 4)
    assert other["sha256"] == hashlib.sha256(b"four").hexdigest()


def test_members_that_are_too_large_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "LARGEST", 5)
    for content, there in ((b"12345", True), (b"123456", False)):
        (tmp_path / TAR).write_bytes(packed(**{"params_model_1.npz": content}))
        out = tmp_path / f"{len(content)}"
        if there:
            assert table.fetch_params("model_1", out, Path.read_bytes, str(tmp_path)) == [content]
        else:
            with pytest.raises(UserError, match=r"has no params_model_1\.npz\. Give the published archive"):
                table.fetch_params("model_1", out, Path.read_bytes, str(tmp_path))


def test_a_damaged_file_that_was_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a file that this call downloaded is deleted, with its note."""

    def fetch_file(source: Any, path: Path, *_: Any) -> str:
        path.write_bytes(b"new")
        return "https://mirror"

    def refuse(path: Path) -> None:
        raise UserError(f"{path.name}: is damaged")

    monkeypatch.setattr("warpfold.download.fetch_file", fetch_file)
    with pytest.raises(UserError, match=r"initial_training\.pt: is damaged"):
        table.fetch_params("initial_training", tmp_path, refuse)
    assert contents(tmp_path) == {}
    table.fetch_params("initial_training", tmp_path, str)
    before = contents(tmp_path)
    with pytest.raises(UserError, match=r"initial_training\.pt: is damaged"):
        table.fetch_params("initial_training", tmp_path, refuse)
    assert contents(tmp_path) == before
    (tmp_path / "finetuning_2.pt").write_bytes(b"another")
    with pytest.raises(UserError) as error:
        table.fetch_params("finetuning_2", tmp_path, str)
    digest = hashlib.sha256(b"another").hexdigest()
    assert str(error.value) == (
        f"{tmp_path / 'finetuning_2.pt'}: is there, and is another file than finetuning_2: its SHA-256 is {digest}, "
        f"not {PUBLISHED['finetuning_2'].sha256}"
    )


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
        (gzip.compress(packed(**{"params_model_1.npz": b"no arrays"})), "not a tar that can be read"),
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
