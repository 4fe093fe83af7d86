"""Pack with workers, a cluster, parts and kills at any moment: the store is the same, and results are kept."""

import errno
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.data.pack.killers import Here
from tests.data.pack.pack_inputs import ONE, TWO, alignment, chain, contents, draft_of, packed, stopped, structure
from warpfold import __version__
from warpfold.bulk import JobPart
from warpfold.data.formats.input_files import digest, find
from warpfold.data.pack import jobs as pack_jobs
from warpfold.data.pack import merge as merging
from warpfold.data.pack import pack as packing
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.pack import find_inputs, is_in_part, merge, pack
from warpfold.data.pack.part import PartFolder, part_path
from warpfold.data.pack.predicted import LATER, SAME
from warpfold.data.pack.report import PackEntry, PackReport, store_summary_text, summarize_store
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
    first, two = parts_of(files, 2)
    other = parts_of(files, 2, "other", options=PackOptions(min_length=12, require_msa=True))
    (third,) = parts_of(files, 1, "third")
    stopped(files, monkeypatch)
    unfinished = part_path(files / "store", JobPart(1, 1))
    for parts, message in (
        ([first], r"of 2 parts, 2 is missing. Pass all"),
        ([first, first], r"part 1/2, and so is .*part-1-of-2. Pass every part once"),
        ([first, other[1]], r"belongs to another store than .*\(it differs in --min-length, --require-msa\)"),
        ([first, two, third], r"is part 1/1, .* is 1/2. Pass the parts of one run"),
        ([first, files / "msas"], r"msas: not a part of a store"),
        (
            [unfinished],
            r"store.part-1-of-1: is unfinished. Repeat its command",
        ),
    ):
        with pytest.raises(UserError, match=message):
            merge(parts, files / "store")
    assert not (files / "store").exists()
    merge([first, two], files / "store")
    with pytest.raises(UserError, match=r"store: exists already, packed from other inputs or options \(--min-length"):
        merge(other, files / "store")


def test_a_damaged_part_is_not_merged(files: Path, whole: dict[str, bytes]) -> None:
    parts, draw, merged = parts_of(files, 2), random.Random(0), 0
    refused: list[tuple[Path, str]] = []
    for part in parts:
        for path in part.iterdir():
            good = path.read_bytes()
            flips = [good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :] for at in draw.sample(range(len(good)), 4)]
            for damaged in (*flips, good[:-1], good + b"x", b"", None):
                path.unlink()
                if damaged is not None:
                    path.write_bytes(damaged)
                try:
                    merge(parts, files / "store")
                except UserError as error:
                    refused.append((part, str(error)))
                else:  # the record is of a chain that is dropped, because another file has it too
                    assert path.name != "plan.json" or json.loads(path.read_bytes()) == json.loads(good)
                    assert contents(files / "store") == whole
                    shutil.rmtree(files / "store")
                    merged += 1
                path.write_bytes(good)
    assert merged < 30
    for part, line in refused:
        assert re.match(rf"{part}.*(damaged|not a part|another version)|{parts[1]}.*another store", line)
    merge(parts, files / "store")
    assert contents(files / "store") == whole


def test_a_finished_store_and_what_is_none_are_left_as_they_are(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = packed(files)
    before = contents(files / "store")
    monkeypatch.setattr(packing, "_run_jobs", lambda *_: pytest.fail("work was done"))
    again = packed(files)
    assert (first.finished_before, again.finished_before) == (False, True)
    assert (again.entries, again.unused) == (first.entries, first.unused)
    for change, message in (
        (lambda: packed(files, options=PackOptions(min_length=11)), "--min-length"),
        (lambda: pack([files / "structures"], [], files / "store"), "alignments files"),
        (lambda: pack([files / "structures/1one.cif"], [files / "msas"], files / "store"), "structures files"),
        (lambda: os.utime(files / "structures/1one.cif", ns=(1, 1)) or packed(files), "structures files"),
    ):
        with pytest.raises(UserError, match=rf"exists already, packed from other .*\({message}\)\. Remove it"):
            change()
    assert contents(files / "store") == before
    (files / "other").mkdir()
    (files / "other/precious").touch()
    with pytest.raises(UserError, match=r"other: exists already. Remove it, or choose another name"):
        packed(files, "other")
    assert [file.name for file in (files / "other").iterdir()] == ["precious"]


def test_whatever_a_kill_leaves_of_a_part_the_store_is_the_same(
    files: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_jobs, "IsolatedProcess", Here)  # one process for each is slow
    part = stopped(files, monkeypatch)
    good, draw = contents(part), random.Random(0)
    results = sorted(name for name in good if name not in ("plan.json", "lock", "tried"))
    assert len(results) > 10
    for _ in range(16):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        left = {"plan.json": good["plan.json"], ".plan.json.0123abcd": b"half", "tried": b'"structure x"\n[1]\n"str'}
        for name in results:
            data, at = good[name], draw.randrange(len(good[name]))
            other = good[draw.choice(results)]
            torn = [
                data,
                data,
                data[:at],
                data + bytes(9),
                data[:at] + b"\0" + data[at + 1 :],
                bytes(len(data)),
                b"",
                other,
            ]
            left[name] = draw.choice(torn)
            if draw.random() < 0.3:  # before it was renamed
                left[f".{name}.89abcdef"] = left.pop(name)
        for name, data in left.items():
            (part / name).write_bytes(data)
        packed(files)
        assert contents(files / "store") == whole
        assert not part.exists()
        shutil.rmtree(files / "store")


def test_the_program_of_the_clusters_is_said(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "cluster_sequences", lambda sequences, *_: [0] * len(sequences))
    monkeypatch.setattr(merging, "clustering_program", lambda _: "MMseqs2 14")
    merge(parts_of(files, 2), files / "store")
    store = Store(files / "store")
    assert set(store.column("cluster")) == {store.keys[0]}
    assert json.loads(store.file("sources.json") or "")["clustered"] == "MMseqs2 14"
    assert "clusters by     MMseqs2 14" in store_summary_text(summarize_store(store))


def test_an_unfinished_run_with_other_options_is_refused(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = draft_of(files)
    part.mkdir()
    (part / "plan.json").write_text("killed here")  # before any work: other options are allowed
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
    replace, calls = os.replace, []

    def full(draft: Path, path: Path) -> None:
        calls.append(path)
        if len(calls) >= 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(draft, path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(UserError, match=r"part-1-of-1.*: cannot be written: No space left.*Make room"):
            packed(files)
    assert len([path for path in draft_of(files).iterdir() if len(path.name) == 32]) == 4  # and plan.json
    packed(files)
    assert contents(files / "store") == whole


# ---- a run that continues with other inputs


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the structure files that are read from now on."""
    read: list[str] = []
    whole = packing.read_chains
    monkeypatch.setattr(
        packing, "read_chains", lambda job: read.append(job[0].name.partition("/")[2]) or whole(job)
    )  # fmt: skip
    return read


CHANGES: dict[str, Callable[[Path], Any]] = {
    "structures": lambda f: structure(f / "structures/9new.cif", chain("A", TWO[::-1])),
    "alignments": lambda f: (f / "msas/1two/hits.a3m").unlink(),
}


@pytest.mark.parametrize("what", CHANGES)
def test_an_unfinished_run_and_a_finished_part_are_of_their_inputs_alone(
    files: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    stopped(files, monkeypatch)
    (part, _) = parts_of(files, 2)
    before = contents(part)
    CHANGES[what](files)
    with pytest.raises(UserError, match=rf"an unfinished run with other inputs .*\({what} files\).*\.partial to start"):
        packed(files)
    with pytest.raises(UserError, match=rf"-1-of-2: packed from other inputs or options \({what} files\)\. Remove it"):
        packed(files, part=JobPart(1, 2))
    assert contents(part) == before


@pytest.mark.parametrize("how", ["--cluster-identity", "--clusters"])
def test_other_clusters_need_no_other_records(files: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """For example, the merge reports after hours of packing that MMseqs2 is missing."""
    more: dict[str, Any] = {"options": PackOptions(cluster_identity=1.0)}
    if how == "--clusters":
        (files / "clusters").write_text("1one_A 1two_A\n1mut_A\n")
        more = {"clusters": files / "clusters"}
    packed(files, "fresh", **more)
    with monkeypatch.context() as patch:
        patch.setattr(merging, "clustering_program", lambda _: (_ for _ in ()).throw(UserError("no MMseqs2")))
        with pytest.raises(UserError, match="no MMseqs2"):
            packed(files)
    parts_of(files, 2)
    with pytest.raises(UserError, match=r"-1-of-2: packed from other inputs or options \(.*cluster"):
        packed(files, part=JobPart(1, 2), **more)
    read = count_reads(monkeypatch)
    packed(files, **more)
    assert read == []
    assert contents(files / "store") == contents(files / "fresh")


# ---- results shared by parts


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes in Linux's /proc")
@pytest.mark.parametrize("named", [True, False])
def test_a_task_of_a_job_array_reads_its_share_of_the_alignments(tmp_path: Path, named: bool) -> None:
    """The query of a Stockholm file is known after reading all of it. If file names do not name the chains, the first
    of these tasks, which run one after another, reads all files, and the others use its results."""
    count, sizes, overhead = 4, {}, 300_000  # bytes of plans, results and modules
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
        assert all(2 * size <= by <= 2 * size + overhead for size, by in zip(share, read)), (share, read)
    else:
        assert sum(read) <= 2 * total + count * overhead
        assert read[0] <= total + share[0] + overhead
        assert all(by <= size + overhead for size, by in zip(share[1:], read[1:])), (share, read)
    merge([part_path(tmp_path / "store", JobPart(n, count)) for n in range(1, count + 1)], tmp_path / "store")
    assert contents(tmp_path / "store") == contents(tmp_path / "whole")


@pytest.mark.parametrize("left", ["", '{"made_of": ["x"]}', '{"made_of": 1, "queries": 3', "half", "of other options"])
def test_a_bad_file_of_shared_queries_is_written_anew(files: Path, whole: dict[str, bytes], left: str) -> None:
    if left in ("half", "of other options"):
        parts_of(files, 2, "good")
        good = json.loads((files / "good.part-queries").read_text())
        good["queries"] = [["A" * 30, ""] for _ in good["queries"]]
        good["made_of"] = ["0.0", *good["made_of"][1:]]
        left = json.dumps(good)[: -9 if left == "half" else None]
    (files / "store.part-queries").write_text(left)
    merge(parts_of(files, 2), files / "store")
    assert contents(files / "store") == whole
    assert json.loads((files / "store.part-queries").read_text())["queries"]


def test_a_file_of_the_users_with_that_name_is_left_alone(files: Path) -> None:
    (files / "store.part-queries").write_text("precious")
    with pytest.raises(UserError, match=r"store\.part-queries: exists already, and holds no queries. Move it away"):
        parts_of(files, 2)
    assert (files / "store.part-queries").read_text() == "precious"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in Linux's /proc")
def test_parts_hold_no_file_open_and_may_be_many(files: Path) -> None:
    """A thousand tasks have more parts than a process may have open files."""
    packed(files, part=JobPart(1, 1))
    before = len(os.listdir("/proc/self/fd"))
    opened = [PartFolder(part_path(files / "store", JobPart(1, 1))) for _ in range(8)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert opened[0].structures()
    assert packed(files, part=JobPart(1, 10**15)).entries == []


def test_records_beyond_what_one_read_gives_are_whole(
    files: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux reads at most 0x7ffff000 bytes at a time; here it is 100."""
    stopped(files, monkeypatch)
    capped = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, offset: capped(file, min(size, 100), offset))
    read = count_reads(monkeypatch)
    stopped(files, monkeypatch)
    assert read == []
    packed(files)
    assert contents(files / "store") == whole
    assert list(Store(files / "store").verify()) == []


# ---- inputs


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Write structures `s`, alignments and hits `m`, hits `h`, structures of templates `t`, and clusters `c`."""
    names = (
        "s/1abc.cif", "s/2abc.pdb.gz", "s/deep/3abc.ent", "m/x.a3m", "m/1abc_A/pdb70_hits.hhr", "m/1abc_A/bfd.sto",
        "m/2abc/hmm_output.sto", "h/y.hhr", "h/z.a3m", "t/x.cif", "t/y.mmcif.gz", "t/z.pdb", "c", "s/1abc.json",
    )  # fmt: skip
    for number, name in enumerate(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x" * number)
    return tmp_path


def names_of(inputs: packing.PackInputs, *kinds: str) -> list[list[str]]:
    return [[file.name for file in getattr(inputs, kind)] for kind in kinds]


def test_inputs_are_told_apart_by_their_names_and_by_where_they_are_passed(many: Path) -> None:
    kinds = ("structures", "alignments", "hits", "unrequested", "library")
    structures, alignments = ["s/1abc.cif", "s/2abc.pdb.gz", "s/deep/3abc.ent"], ["m/1abc_A/bfd.sto", "m/x.a3m"]
    hits = ["m/1abc_A/pdb70_hits.hhr", "m/2abc/hmm_output.sto"]
    inputs = find_inputs([many / "s"], [many / "m"])
    assert names_of(inputs, *kinds) == [structures, alignments, [], hits, []]
    assert (inputs.folders, inputs.clusters, inputs.predicted) == ((), None, {})
    # The alignments of `msas` are not read as hits too.
    inputs = find_inputs([many / "s"], [many / "m"], [many / "h", many / "m"])
    assert names_of(inputs, *kinds) == [structures, alignments, ["h/y.hhr", "h/z.a3m", *hits], [], []]
    assert inputs.folders == (many / "s",)
    some = [many / "s/1abc.cif", many / "s/deep/3abc.ent", many / "s/2abc.pdb.gz"]
    inputs = find_inputs(some, [], [many / "h"], clusters=many / "c")
    assert inputs.folders == (many / "s", many / "s/deep")
    assert inputs.clusters == many / "c"
    inputs = find_inputs(some[:1], [], [many / "h"], [many / "t", many / "t/z.pdb"])
    assert names_of(inputs, "structures", "library") == [["s/1abc.cif"], ["t/x.cif", "t/y.mmcif.gz", "t/z.pdb"]]
    assert inputs.folders == (many / "t",)
    inputs = find_inputs(some[:1], [], [many / "h"], [many / "t"], min_kl=0.5)
    assert names_of(inputs, "library") == [["t/x.cif", "t/y.mmcif.gz"]]
    assert list(inputs.predicted) == ["s/1abc.cif"]


@pytest.mark.parametrize("predicted", [False, True])
def test_a_manifest_describes_inputs_and_options(many: Path, predicted: bool) -> None:
    (many / "s/1abc_pae.json").write_text("x" * 100)
    inputs = find_inputs(
        [many / "s"], [many / "m"], [many / "h"], [many / "t"], many / "c", 0.5 if predicted else None
    )  # fmt: skip

    def described(files: list[Any]) -> dict[str, Any]:
        return {"files": len(files), "bytes": sum(file.size for file in files), "digest": digest(files)}

    kinds = {name: getattr(inputs, name) for name in ("alignments", "hits", "library")}
    kinds["clusters"] = find([many / "c"], (), "clusters")
    kinds["predicted" if predicted else "structures"] = inputs.structures
    if predicted:
        kinds["predicted"] = [*inputs.structures, *find([many / "s/1abc_pae.json"], (), "confidences")]
    options = PackOptions(min_length=3)
    manifest = inputs.manifest(options, JobPart(2, 3))
    assert manifest == {
        "part": "2/3",
        "warpfold": __version__,
        "options": options.recorded(predicted),
        "inputs": {name: described(files) for name, files in kinds.items()},
        "clusters": str(many / "c"),
    }
    size = 0 + 1 + 2 + 100 * predicted
    assert manifest["inputs"]["predicted" if predicted else "structures"]["bytes"] == size
    bare = find_inputs([many / "s"]).manifest(options, JobPart(1, 1))
    assert (bare["clusters"], bare["inputs"]["clusters"]) == (None, described([]))


def test_each_file_is_of_one_part(tmp_path: Path) -> None:
    for count in (1, 2, 7):
        parts = [JobPart(number, count) for number in range(1, count + 1)]
        for i in range(50):
            assert sum(is_in_part(f"s/{i}.cif", part) for part in parts) == 1
        assert all(any(is_in_part(f"s/{i}.cif", part) for i in range(50)) for part in parts)
    # The tasks of a job array may run different builds.
    assert [n for n in range(1, 8) if is_in_part("structures/1one\udcff.cif", JobPart(n, 7))] == [2]
    for name in ("1abc", "2abc", "3abc"):
        structure(tmp_path / f"s/{name.upper()}.x.cif", chain("A", ONE))
    structure(tmp_path / "s/a/1ABC.cif", chain("A", ONE))
    names = ("1abc_A", "1abc", "2abc_B/bfd", "3abc_A/1abc_A", "x", "1ab", "3abc/y")
    for name in names:
        alignment(tmp_path / f"m/{name}.a3m", ONE)
    inputs = find_inputs([tmp_path / "s"], [tmp_path / "m"])
    assert inputs.alignments_of(JobPart(1, 1)) is inputs.alignments
    for count in (2, 5, 11):
        parts = [JobPart(number, count) for number in range(1, count + 1)]
        found = {f"m/{name}.a3m": [part for part in parts if is_in_part(f"m/{name}.a3m", part)] for name in names}
        # The first structure of an entry, and the first entry of an alignment.
        for name, entry in (
            ("1abc_A", "1ABC.x"), ("1abc", "1ABC.x"), ("2abc_B/bfd", "2ABC.x"), ("3abc_A/1abc_A", "1ABC.x"),
            ("3abc/y", "3ABC.x"),
        ):  # fmt: skip
            found[f"m/{name}.a3m"] = [part for part in parts if is_in_part(f"s/{entry}.cif", part)]
        for part in parts:
            expected = sorted(name for name, of in found.items() if of == [part])
            assert [file.name for file in inputs.alignments_of(part)] == expected


# ---- the order of work


def test_the_largest_files_are_packed_first_and_progress_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, letters in (("1abc", ONE), ("2abc", ONE * 3), ("3abc", TWO), ("4abc", ONE * 2)):
        structure(tmp_path / f"structures/{name}.cif", chain("A", letters))
    alignment(tmp_path / "msas/3ABC_A/x.a3m", TWO, *(["A" * 30 + TWO[:i].lower() for i in range(30)] * 300))
    alignment(tmp_path / "msas/1abc_A.a3m", ONE)
    read = count_reads(monkeypatch)
    calls: list[tuple[float, int, str]] = []
    packed(tmp_path, progress=lambda *call: calls.append(call))
    assert read == ["3abc.cif", "2abc.cif", "4abc.cif", "1abc.cif"]
    assert calls == [
        (2, 2, "reading alignments"),
        *((done, 4, "packing") for done in range(5)),
        (0, 1, "clustering"),
        *((done, 4, "writing") for done in range(1, 5)),
    ]


def test_a_continued_run_counts_what_is_done(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[float, int, str]] = []

    def stop(done: float, total: int, stage: str) -> None:
        if (done, stage) == (3, "packing"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packed(files, progress=stop)
    packed(files, progress=lambda *call: calls.append(call))
    packing_calls = [call for call in calls if call[2] == "packing"]
    assert packing_calls == [(done, 10, "packing") for done in range(3, 11)]
    assert not [call for call in calls if call[2] == "reading alignments"]


def test_what_a_killed_run_leaves_beside_its_store_is_removed(files: Path) -> None:
    packed(files)
    part = part_path(files / "store", JobPart(1, 1))
    shutil.copytree(parts_of(files, 1, "other")[0], part)
    assert packed(files).finished_before
    assert not part.exists()


def test_one_process_packs_by_default(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[int, str | None]] = []

    @contextmanager
    def pool(workers: int, cluster: str | None) -> Iterator[None]:
        used.append((workers, cluster))
        yield None

    monkeypatch.setattr(packing, "pool", pool)
    packed(files)
    merge(parts_of(files, 2, "other"), files / "other")
    assert used == [(1, None)] * 4
    merge(parts_of(files, 1, "third"), files / "third", workers=3, cluster="x")
    assert used[4:] == [(1, None), (3, "x")]


def test_the_most_frequent_reason_is_named(tmp_path: Path) -> None:
    def entries(*reasons: str) -> PackReport:
        return PackReport([PackEntry(str(i), "x", False, reason) for i, reason in enumerate(reasons)], {})

    for reasons, named in ((["a", "b", "b", SAME, SAME, SAME, LATER], "b"), ([SAME, LATER, LATER], LATER)):
        with pytest.raises(UserError) as caught:
            packing._require_entries(entries(*reasons), tmp_path)
        text = f"{tmp_path}: all {len(reasons)} entries are dropped; the most frequent reason: {named}"
        assert str(caught.value) == text
    report = PackReport([PackEntry("x", "x", True)], {})
    assert packing._require_entries(report, tmp_path) is report


def test_predictions_are_no_templates(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^pack: --hits with --predicted needs --template-structures: predictions are"):
        pack([tmp_path], [], tmp_path / "store", hits=[tmp_path], predicted=True)
    for more in ({"template_structures": [tmp_path]}, {"hits": []}):
        with pytest.raises(UserError, match="no structures found"):
            pack([tmp_path], [], tmp_path / "store", **{"hits": [tmp_path], "predicted": True, **more})
