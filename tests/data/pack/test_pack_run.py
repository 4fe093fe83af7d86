"""How packing runs changes nothing: workers, a cluster, parts, kills at any moment; what is finished stays."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.data.pack.killers import Here
from tests.data.pack.pack_inputs import contents, make_files, packed
from warpfold.bulk import JobPart
from warpfold.data.pack import inputs as packing_inputs
from warpfold.data.pack import jobs as pack_jobs
from warpfold.data.pack import pack as packing
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.pack import merge, pack
from warpfold.data.pack.part import VERSION, PartWriter, part_path
from warpfold.data.pack.report import PackReport
from warpfold.data.store.store import Store
from warpfold.errors import UserError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return make_files(tmp_path)


@pytest.fixture
def whole(files: Path) -> dict[str, bytes]:
    """The store that one undisturbed run makes."""
    packed(files, "whole")
    return contents(files / "whole")


def parts_of(files: Path, count: int, name: str = "store", **options: object) -> list[Path]:
    for number in range(1, count + 1):
        packed(files, name, part=JobPart(number, count), **options)
    return [part_path(files / name, JobPart(number, count)) for number in range(1, count + 1)]


def test_workers_make_the_same_bytes(files: Path, whole: dict[str, bytes]) -> None:
    calls: list[tuple[int, int, str]] = []
    packed(files, workers=2, progress=lambda *call: calls.append(call))
    assert contents(files / "store") == whole
    assert {stage for _, _, stage in calls} == {"reading alignments", "packing", "clustering", "writing"}
    assert all(done <= total for done, total, _ in calls)
    assert (10, 10, "packing") in calls


def test_the_same_files_elsewhere_make_the_same_bytes(files: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere/deeper"
    moved.mkdir(parents=True)
    for name in ("structures", "msas"):
        shutil.copytree(files / name, moved / name)  # with their times
    packed(moved)
    assert contents(moved / "store") == whole


@pytest.mark.slow
def test_a_dask_cluster_makes_the_same_bytes(files: Path, whole: dict[str, bytes]) -> None:
    distributed = pytest.importorskip("distributed", reason="Dask is not installed: pip install 'warpfold[cluster]'")
    with distributed.LocalCluster(2, processes=True, threads_per_worker=1, dashboard_address=None) as cluster:
        packed(files, cluster=cluster.scheduler_address)
    assert contents(files / "store") == whole


def test_parts_make_the_same_bytes(files: Path, whole: dict[str, bytes]) -> None:
    for count in (2, 3):
        parts = parts_of(files, count, f"store{count}")
        report = merge(parts[::-1], files / f"store{count}")
        assert contents(files / f"store{count}") == whole
        assert all(part.exists() for part in parts)
        assert not report.finished_before
        again = merge(parts, files / f"store{count}")
        assert again.finished_before
        assert again.entries == report.entries


def test_parts_that_do_not_belong_together(files: Path) -> None:
    one, two = parts_of(files, 2)
    other = parts_of(files, 2, "other", options=PackOptions(min_length=12, require_msa=True))
    (third,) = parts_of(files, 1, "third")
    for parts, message in (
        ([one], r"of 2 parts, 2 is missing; give all"),
        ([one, one], r"part 1/2, and so is .*part-1-of-2; give each part once"),
        ([one, other[1]], r"belongs to another store than .*\(it differs in --min-length, --require-msa\)"),
        ([one, two, third], r"is part 1/1, .* is 1/2; give the parts of one run"),
        ([one, files / "msas"], r"msas: not a part of a store"),
    ):
        with pytest.raises(UserError, match=message):
            merge(parts, files / "store")
    assert not (files / "store").exists()
    merge([one, two], files / "store")
    with pytest.raises(UserError, match=r"store: exists already, packed from other inputs or options \(--min-length"):
        merge(other, files / "store")


def test_a_finished_store_is_left_as_it_is(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = packed(files)
    before = contents(files / "store")
    monkeypatch.setattr(packing, "_fill", lambda *_: pytest.fail("work was done"))
    again = packed(files)
    assert again.finished_before
    assert not first.finished_before
    assert again.entries == first.entries
    assert again.unused == first.unused
    for change, message in (
        (lambda: packed(files, options=PackOptions(min_length=11)), "--min-length"),
        (lambda: pack([files / "structures"], [], files / "store"), "alignments files"),
        (lambda: pack([files / "structures/1one.cif"], [files / "msas"], files / "store"), "structures files"),
        (lambda: _touch(files / "structures/1one.cif") or packed(files), "structures files"),
    ):
        with pytest.raises(UserError, match=rf"exists already, packed from other .*\({message}\); remove it"):
            change()
    assert contents(files / "store") == before


def _touch(file: Path) -> None:
    os.utime(file, ns=(1, 1))


def test_what_is_no_store_is_never_overwritten(files: Path) -> None:
    (files / "store").mkdir()
    (files / "store/precious").touch()
    with pytest.raises(UserError, match=r"store: exists already; remove it, or choose another name"):
        packed(files)
    assert [file.name for file in (files / "store").iterdir()] == ["precious"]


def test_a_killed_run_continues(files: Path, whole: dict[str, bytes]) -> None:
    code = f"""
import os, signal
from pathlib import Path
from tests.data.pack.pack_inputs import packed

def progress(done, total, stage):
    if stage == "packing" and done == 5:
        os.kill(os.getpid(), signal.SIGKILL)

packed(Path({str(files)!r}), progress=progress)
"""
    result = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert result.returncode == -signal.SIGKILL
    assert not (files / "store").exists()
    done: list[int] = []
    packed(files, progress=lambda count, total, stage: done.append(count) if stage == "packing" else None)
    assert done == [5, 6, 7, 8, 9, 10]
    assert contents(files / "store") == whole
    assert not part_path(files / "store", JobPart(1, 1)).exists()


def _stopped(files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The part of a run that was stopped when all jobs were done."""
    with monkeypatch.context() as patch:
        patch.setattr(PartWriter, "finish", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            packed(files)
    return part_path(files / "store", JobPart(1, 1))


def _interrupt(_: PartWriter) -> None:
    raise KeyboardInterrupt


def test_whatever_a_kill_leaves_of_a_part_the_store_is_the_same(
    files: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_jobs, "IsolatedProcess", Here)  # a process for each is slow
    part = _stopped(files, monkeypatch)
    good = {name: (part / name).read_bytes() for name in ("journal", "records")}
    rng = random.Random(0)
    cuts = {name: [0, 1, len(data) - 1, len(data), *rng.sample(range(len(data)), 4)] for name, data in good.items()}
    endings = [b"", b"\0" * 100, b'00000000 ["structure x",1,[],0]\n']
    for journal, records in zip(cuts["journal"], rng.sample(cuts["records"], 8)):
        part.mkdir(exist_ok=True)
        (part / "plan.json").write_text(_plan(files))
        (part / "journal").write_bytes(good["journal"][:journal] + rng.choice(endings))
        (part / "records").write_bytes(good["records"][:records] + rng.choice(endings))
        packed(files)
        assert contents(files / "store") == whole, (journal, records)
        shutil.rmtree(files / "store")
    place = len(good["records"]) // 2  # damage in the middle: what follows is made again
    part.mkdir(exist_ok=True)
    (part / "plan.json").write_text(_plan(files))
    (part / "journal").write_bytes(good["journal"])
    (part / "records").write_bytes(good["records"][:place] + b"\xff\x00" + good["records"][place + 2 :])
    packed(files)
    assert contents(files / "store") == whole


def _plan(files: Path) -> str:
    inputs = packing.find_inputs([files / "structures"], [files / "msas"])
    return json.dumps({"format": "warpfold-part", "version": VERSION, **inputs.manifest(PackOptions(), JobPart(1, 1))})


def test_a_kill_while_the_store_is_written(
    files: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(done: int, total: int, stage: str) -> None:
        if stage == "writing" and done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packed(files, progress=stop)
    part = part_path(files / "store", JobPart(1, 1))
    assert part.exists()
    (files / "store.partial").mkdir()
    (files / "store.partial/shard-00000.wfs").write_bytes(b"left by a kill")
    monkeypatch.setattr(packing, "_fill", lambda *_: pytest.fail("work was done again"))
    packed(files)
    assert contents(files / "store") == whole
    part.mkdir()  # a kill after the store appeared, before the part went
    assert packed(files).finished_before
    assert not part.exists()


def test_an_unfinished_run_with_other_options_is_refused(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stopped(files, monkeypatch)
    with pytest.raises(
        UserError, match=r"part-1-of-1: an unfinished run with other .*\(--max-single, structures files"
    ):
        pack([files / "structures/1one.cif"], [files / "msas"], files / "store", PackOptions(max_single=0.7))
    with monkeypatch.context() as patch:
        patch.setattr(packing_inputs, "__version__", "9.9")
        with pytest.raises(UserError, match=r"\(WarpFold .*, not 9\.9\)"):
            packed(files)
    packed(files)
    assert list(Store(files / "store").verify()) == []


def test_a_run_that_did_nothing_yet_binds_nobody(files: Path) -> None:
    part = part_path(files / "store", JobPart(1, 1))
    part.mkdir()
    (part / "plan.json").write_text("killed here")
    packed(files, options=PackOptions(min_length=12))
    assert list(Store(files / "store").verify()) == []


def test_an_unfinished_part_is_not_merged(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"part 1/1 is unfinished; repeat its command"):
        merge([_stopped(files, monkeypatch)], files / "store")


def test_two_runs_at_a_time(files: Path) -> None:
    def second(done: int, total: int, stage: str) -> None:
        with pytest.raises(UserError, match="another process is writing"):
            packed(files)

    packed(files, progress=second)
    assert list(Store(files / "store").verify()) == []


def test_a_full_disk_is_one_line_and_nothing_is_lost(
    files: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    add, calls = PartWriter.add, []

    def full(self: PartWriter, job: str, data: object, records: Sequence[bytes] = ()) -> None:
        calls.append(job)
        if len(calls) == 6:
            self._records_file.close()
            self._records_file = open("/dev/full", "wb")  # noqa: SIM115 (closed by the writer)
        add(self, job, data, records)

    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    with monkeypatch.context() as patch:
        patch.setattr(PartWriter, "add", full)
        with pytest.raises(UserError, match="part-1-of-1: cannot be written: No space left"):
            packed(files)
    packed(files)
    assert contents(files / "store") == whole


def test_a_part_reports_what_it_did(files: Path) -> None:
    reports: list[PackReport] = [packed(files, part=JobPart(number, 2)) for number in (1, 2)]
    assert all(report.kept for report in reports)
    done = {entry.name for report in reports for entry in report.kept}
    assert done == {"1mut_A", "1non_A", "1one_A", "1one_B", "1one_C", "1two_A"}
    assert packed(files, part=JobPart(1, 2)).entries == reports[0].entries  # again: nothing to do
