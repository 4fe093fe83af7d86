"""How packing runs changes nothing: workers, a cluster, parts, kills at any moment; what is finished stays."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.data.pack.killers import Here
from tests.data.pack.pack_inputs import ONE, TWO, alignment, chain, contents, packed, stopped, structure
from warpfold.bulk import JobPart
from warpfold.data.pack import jobs as pack_jobs
from warpfold.data.pack import merge as merging
from warpfold.data.pack import pack as packing
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.pack import merge, pack
from warpfold.data.pack.part import PartFolder, PartWriter, part_path
from warpfold.data.pack.report import store_summary_text, summarize_store
from warpfold.data.store.store import Store
from warpfold.errors import UserError

ROOT = Path(__file__).parents[3]


def parts_of(files: Path, count: int, name: str = "store", **options: object) -> list[Path]:
    parts = [JobPart(number, count) for number in range(1, count + 1)]
    for part in parts:
        packed(files, name, part=part, **options)
    return [part_path(files / name, part) for part in parts]


def test_workers_and_other_places_make_the_same_bytes(files: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    packed(files, workers=2, progress=lambda *call: calls.append(call))
    assert contents(files / "store") == whole
    assert {stage for _, _, stage in calls} == {"reading alignments", "packing", "clustering", "writing"}
    assert all(done <= total for done, total, _ in calls)
    assert (10, 10, "packing") in calls
    for name in ("structures", "msas"):
        shutil.copytree(files / name, tmp_path / "elsewhere/deeper" / name)  # with their times
    packed(tmp_path / "elsewhere/deeper")
    assert contents(tmp_path / "elsewhere/deeper/store") == whole


def test_parts_make_the_same_store_and_report_what_they_did(files: Path, whole: dict[str, bytes]) -> None:
    for count in (2, 3):
        parts = parts_of(files, count, f"store{count}")
        report = merge(parts[::-1], files / f"store{count}")
        assert contents(files / f"store{count}") == whole
        assert all(part.exists() for part in parts)
        again = merge(parts, files / f"store{count}")
        assert (report.finished_before, again.finished_before) == (False, True)
        assert again.entries == report.entries
        reports = [packed(files, f"store{count}", part=JobPart(n, count)) for n in range(1, count + 1)]  # nothing to do
        done = sorted(entry.name for report in reports for entry in report.kept if "gz" not in entry.file)
        assert done == ["1mut_A", "1non_A", "1one_A", "1one_B", "1one_C", "1two_A"]


def test_parts_that_do_not_belong_together(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = parts_of(files, 2)
    other = parts_of(files, 2, "other", options=PackOptions(min_length=12, require_msa=True))
    (third,) = parts_of(files, 1, "third")
    for parts, message in (
        ([one], r"of 2 parts, 2 is missing; give all"),
        ([one, one], r"part 1/2, and so is .*part-1-of-2; give each part once"),
        ([one, other[1]], r"belongs to another store than .*\(it differs in --min-length, --require-msa\)"),
        ([one, two, third], r"is part 1/1, .* is 1/2; give the parts of one run"),
        ([one, files / "msas"], r"msas: not a part of a store"),
        ([stopped(files, monkeypatch)], r"part 1/1 is unfinished; repeat its command"),
    ):
        with pytest.raises(UserError, match=message):
            merge(parts, files / "store")
    assert not (files / "store").exists()
    merge([one, two], files / "store")
    with pytest.raises(UserError, match=r"store: exists already, packed from other inputs or options \(--min-length"):
        merge(other, files / "store")


def test_a_finished_store_and_what_is_none_are_left_as_they_are(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = packed(files)
    before = contents(files / "store")
    monkeypatch.setattr(packing, "_fill", lambda *_: pytest.fail("work was done"))
    again = packed(files)
    assert (first.finished_before, again.finished_before) == (False, True)
    assert (again.entries, again.unused) == (first.entries, first.unused)
    for change, message in (
        (lambda: packed(files, options=PackOptions(min_length=11)), "--min-length"),
        (lambda: pack([files / "structures"], [], files / "store"), "alignments files"),
        (lambda: pack([files / "structures/1one.cif"], [files / "msas"], files / "store"), "structures files"),
        (lambda: os.utime(files / "structures/1one.cif", ns=(1, 1)) or packed(files), "structures files"),
    ):
        with pytest.raises(UserError, match=rf"exists already, packed from other .*\({message}\); remove it"):
            change()
    assert contents(files / "store") == before
    (files / "other").mkdir()
    (files / "other/precious").touch()
    with pytest.raises(UserError, match=r"other: exists already; remove it, or choose another name"):
        packed(files, "other")
    assert [file.name for file in (files / "other").iterdir()] == ["precious"]


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


def test_whatever_a_kill_leaves_of_a_part_the_store_is_the_same(
    files: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_jobs, "IsolatedProcess", Here)  # a process for each is slow
    part = stopped(files, monkeypatch)
    good = {name: (part / name).read_bytes() for name in ("plan.json", "journal", "records")}
    rng = random.Random(0)
    cuts = {name: [0, 1, len(data) - 1, len(data), *rng.sample(range(len(data)), 4)] for name, data in good.items()}
    endings = [b"", b"\0" * 100, b'00000000 ["structure x",1,[],0]\n']

    def goes_on(journal: bytes, records: bytes) -> bool:
        part.mkdir(exist_ok=True)
        for name, data in {**good, "journal": journal, "records": records}.items():
            (part / name).write_bytes(data)
        packed(files)
        same = contents(files / "store") == whole
        shutil.rmtree(files / "store")
        return same

    for journal, records in zip(cuts["journal"], rng.sample(cuts["records"], 8)):
        torn = good["journal"][:journal] + rng.choice(endings), good["records"][:records] + rng.choice(endings)
        assert goes_on(*torn), (journal, records)
    place = len(good["records"]) // 2  # damage in the middle: what follows is made again
    assert goes_on(good["journal"], good["records"][:place] + b"\xff\x00" + good["records"][place + 2 :])


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
    monkeypatch.setattr(merging, "cluster_sequences", lambda *_: pytest.fail("clusters were made again"))
    packed(files)
    assert contents(files / "store") == whole
    part.mkdir()  # a kill after the store appeared, before the part went
    assert packed(files).finished_before
    assert not part.exists()


@pytest.mark.parametrize("left", ["whole", "damaged", "of other sequences"])
def test_clusters_are_made_once_however_often_a_merge_is_killed(
    files: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    def together(sequences: Sequence[str], *_: object) -> list[int]:
        made.append(len(sequences))
        return [0] * len(sequences)

    def stop(done: int, total: int, stage: str) -> None:
        if stage == "writing":
            raise KeyboardInterrupt

    made: list[int] = []
    monkeypatch.setattr(merging, "cluster_sequences", together)
    monkeypatch.setattr(merging, "clustered_by", lambda _: "MMseqs2 14")
    parts = parts_of(files, 2)
    with pytest.raises(KeyboardInterrupt):
        merge(parts, files / "store", progress=stop)
    assert made == [6]
    if left == "damaged":
        (parts[0] / "clusters.json").write_text('{"made_of": 3')
    elif left == "of other sequences":
        structure(files / "structures/9new.cif", chain("A", ONE[::-1]))
    (parts[0] / ".clusters.json.0123abcd").write_text("draft of a killed process")
    if left == "whole":  # goes on where the program is not
        monkeypatch.setattr(merging, "clustered_by", lambda _: pytest.fail("looked for a program"))
    merge(parts_of(files, 2), files / "store")
    store = Store(files / "store")
    assert made == {"whole": [6], "damaged": [6, 6], "of other sequences": [6, 7]}[left]
    assert set(store.column("cluster")) == {store.keys[0]}
    assert json.loads(store.file("sources.json") or "")["clustered"] == "MMseqs2 14"
    assert "clusters by     MMseqs2 14" in store_summary_text(summarize_store(Store(files / "store")))


def test_an_unfinished_run_with_other_options_is_refused(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = part_path(files / "store", JobPart(1, 1))
    part.mkdir()
    (part / "plan.json").write_text("killed here")  # before it did anything: it binds nobody
    stopped(files, monkeypatch)
    with pytest.raises(
        UserError, match=r"part-1-of-1: an unfinished run with other .*\(--max-single, structures files"
    ):
        pack([files / "structures/1one.cif"], [files / "msas"], files / "store", PackOptions(max_single=0.7))
    with monkeypatch.context() as patch:
        patch.setattr(packing, "__version__", "9.9")
        with pytest.raises(UserError, match=r"\(WarpFold .*, not 9\.9\)"):
            packed(files)

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


# ---- a run that continues with other inputs


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The structure files that are read from here on."""
    read: list[str] = []
    whole = packing.read_chains
    monkeypatch.setattr(
        packing, "read_chains", lambda job: read.append(job[0].name.partition("/")[2]) or whole(job)
    )  # fmt: skip
    return read


CHANGES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "one structure more": (lambda f: structure(f / "structures/9new.cif", chain("A", TWO[::-1])), ["9new.cif"]),
    "a copy less": (lambda f: (f / "structures/1one.cif").unlink(), []),
    "a structure changed": (
        lambda f: structure(f / "structures/1mut.cif", chain("A", "C" + ONE[1:], shift=9.0)),
        ["1mut.cif"],
    ),
    "one alignment more, of a chain's name": (lambda f: alignment(f / "msas/1mut_A.a3m", "C" + ONE[1:]), ["1mut.cif"]),
    "one alignment more, of nobody": (lambda f: alignment(f / "msas/x.a3m", "W" * 30), []),
    "one alignment less": (
        lambda f: (f / "msas/1two/hits.a3m").unlink(),
        ["1one.cif", "1one.cif.gz", "deep/1two.cif"],
    ),
    "an alignment changed": (
        lambda f: alignment(f / "msas/1two/hits.a3m", TWO, TWO[::-1], TWO),
        ["1one.cif", "1one.cif.gz", "deep/1two.cif"],
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_continues_with_other_inputs_as_if_they_had_been_there_before(
    files: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    stopped(files, monkeypatch)
    change, again = CHANGES[name]
    change(files)
    read = count_reads(monkeypatch)
    packed(files)
    assert sorted(read) == sorted(again)
    packed(files, "fresh")
    assert contents(files / "store") == contents(files / "fresh")


def test_templates_that_come_or_go_make_what_looked_for_them_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, sequence in (("1one", ONE), ("1two", TWO)):
        structure(tmp_path / f"structures/{name}.cif", chain("A", sequence))
    alignment(tmp_path / "msas/1one_A/bfd.a3m", ONE, ONE[::-1])
    alignment(tmp_path / "msas/1one_A/hmmsearch.a3m", ONE).write_text(f">9tem_A/1-30 mol:protein\nC{ONE[1:]}\n")
    stopped(tmp_path, monkeypatch, hits=[tmp_path / "msas"])
    structure(tmp_path / "structures/9tem.cif", chain("A", "C" + ONE[1:]), released="2000-01-01")
    read = count_reads(monkeypatch)
    packed(tmp_path, hits=[tmp_path / "msas"])
    assert sorted(read) == ["1one.cif", "9tem.cif"]
    monkeypatch.undo()
    packed(tmp_path, "fresh", hits=[tmp_path / "msas"], workers=2)
    assert contents(tmp_path / "store") == contents(tmp_path / "fresh")
    assert Store(tmp_path / "store").column("templates")[0] == 1


def test_a_finished_part_continues_with_other_inputs(files: Path) -> None:
    two = JobPart(1, 2), JobPart(2, 2)
    packed(files, part=two[0])
    structure(files / "structures/9new.cif", chain("A", TWO[::-1]))
    packed(files, part=two[1])
    parts = [part_path(files / "store", part) for part in two]
    with pytest.raises(UserError, match="structures files"):
        merge(parts, files / "store")
    packed(files, part=two[0])
    merge(parts, files / "store")
    packed(files, "fresh")
    assert contents(files / "store") == contents(files / "fresh")


# ---- what parts share


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes in Linux's /proc")
@pytest.mark.parametrize("named", [True, False])
def test_a_task_of_a_job_array_reads_its_share_of_the_alignments(tmp_path: Path, named: bool) -> None:
    """Stockholm files, which must be read whole for their queries.  Where names do not tell whose they are, the first
    of these tasks, which run one after another, reads them all, and the others find them read."""
    count, sizes, overhead = 4, {}, 300_000  # bytes of plans, answers and modules
    for number in range(16):
        sequence = ONE[number:] + TWO + ONE[:number]
        structure(tmp_path / f"structures/{number:02d}ab.cif", chain("A", sequence))
        path = tmp_path / "msas" / (f"{number:02d}ab_A" if named else f"x{number}") / "bfd.sto"
        path.parent.mkdir(parents=True)
        rows = "".join(f"r{i} {sequence[::-1]}\n" for i in range(3000))
        path.write_text(f"# STOCKHOLM 1.0\n\nq {sequence}\n{rows}//\n")
        sizes[f"{number:02d}ab_A"] = path.stat().st_size
    packed(tmp_path, "whole")

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])

    read, share = [], []
    for number in range(1, count + 1):
        before = bytes_read()
        report = packed(tmp_path, part=JobPart(number, count))
        read.append(bytes_read() - before)
        share.append(sum(sizes[entry.name] for entry in report.kept))
    total = sum(sizes.values())
    assert sum(share) == total
    if named:  # for its query, and to be packed
        assert all(2 * own <= by <= 2 * own + overhead for own, by in zip(share, read)), (share, read)
    else:
        assert sum(read) <= 2 * total + count * overhead
        assert read[0] <= total + share[0] + overhead
        assert all(by <= own + overhead for own, by in zip(share[1:], read[1:])), (share, read)
    merge([part_path(tmp_path / "store", JobPart(n, count)) for n in range(1, count + 1)], tmp_path / "store")
    assert contents(tmp_path / "store") == contents(tmp_path / "whole")


def test_queries_of_parts_with_other_options_are_not_taken(files: Path, whole: dict[str, bytes]) -> None:
    packed(files, part=JobPart(1, 2), options=PackOptions(max_file_gb=1e-9))  # in which no alignment has a query
    packed(files, part=JobPart(2, 2))
    part = part_path(files / "store", JobPart(1, 2))
    shutil.rmtree(part)
    packed(files, part=JobPart(1, 2))
    merge([part, part_path(files / "store", JobPart(2, 2))], files / "store")
    assert contents(files / "store") == whole


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in Linux's /proc")
def test_parts_hold_no_file_open_and_may_be_many(files: Path) -> None:
    """A thousand tasks have more parts than a process may have files."""
    packed(files, part=JobPart(1, 1))
    before = len(os.listdir("/proc/self/fd"))
    opened = [PartFolder(part_path(files / "store", JobPart(1, 1))) for _ in range(8)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert opened[0].structures()
    assert packed(files, part=JobPart(1, 10**15)).entries == []


def test_records_beyond_what_one_read_gives_are_whole(
    files: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux reads at most 0x7ffff000 bytes at a time; here 100."""
    records = stopped(files, monkeypatch) / "records"
    size = records.stat().st_size
    capped = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, offset: capped(file, min(size, 100), offset))
    read = count_reads(monkeypatch)
    stopped(files, monkeypatch)
    assert (read, records.stat().st_size) == ([], size)
    packed(files)
    assert contents(files / "store") == whole
    assert list(Store(files / "store").verify()) == []
