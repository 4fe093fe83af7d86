"""A finished store grows: a version has what one run would have packed, and earlier versions stay as they were."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.pack.pack_inputs import ONE, TWO, alignment, chain, compacted, contents, packed, refused, run, structure
from tests.data.pack.test_pack_run import parts_of
from tests.data.store.old_store import write_old
from warpfold.bulk import JobPart
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.pack import merge, pack
from warpfold.data.pack.part import part_path
from warpfold.data.pack.report import PackReport
from warpfold.data.pack.versions import compact, remove, whole_report
from warpfold.data.store import store as stores
from warpfold.data.store.store import Store, StoreWriter, pack_record
from warpfold.errors import UserError
from warpfold.files import lock_folder

NEW = ONE[::-1][:20] + TWO[:9]


def said(store: Store) -> dict[str, Any]:
    """Everything that a store says: of each entry its columns, notes and arrays."""
    found = {}
    for row, key in enumerate(store.keys):
        record = store.record(key)
        arrays = {name: (record.read(name).tolist(), record.read(name).dtype.str) for name in record.arrays}
        found[key] = ({name: store.column(name)[row] for name in store.columns}, record.notes, arrays)
    return found


def files_of(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_merging_moves_no_record_and_a_part_that_goes_on_changes_no_store(files: Path, whole: dict[str, bytes]) -> None:
    parts = parts_of(files, 2)
    merge(parts, files / "store")
    store, before = Store(files / "store"), contents(files / "store")
    assert said(store) == said(Store(files / "whole"))
    for number, part in enumerate(parts):
        assert os.path.samefile(part / "records", files / f"store/shard-{number:05d}.wfs")
    structure(files / "structures/9new.cif", chain("A", NEW))
    parts_of(files, 2)
    assert contents(files / "store") == before
    assert compacted(files / "store") == whole
    assert compact(Store(files / "whole"), files / "again").keys == store.keys
    assert contents(files / "again") == whole


def test_without_hard_links_the_parts_are_copied(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", none)
    parts = parts_of(files, 2)
    merge(parts, files / "store")
    assert not os.path.samefile(parts[0] / "records", files / "store/shard-00000.wfs")
    assert len(Store(files / "store")) == 6


@pytest.mark.parametrize("options", [PackOptions(), PackOptions(assemblies=True)])
@pytest.mark.parametrize("in_parts", [False, True])
def test_a_version_has_what_one_run_would_have_packed(files: Path, options: PackOptions, in_parts: bool) -> None:
    out = files / "store"
    packed(files, options=options)
    before, old = said(Store(out)), contents(out)
    structure(files / "more/9new.cif", chain("A", NEW), chain("B", NEW), chain("C", ONE))
    structure(files / "more/9two.cif", chain("A", TWO, shift=9.0))
    changed = structure(
        files / "more/1one.cif", chain("A", ONE, shift=3.0), chain("B", TWO), chain("C", ONE, shift=1.0)
    )
    alignment(files / "msas/9new_A.a3m", NEW, "A" * 29)
    opened = Store(out)

    def update() -> PackReport:
        inputs: Any = [files / "more"], [files / "msas"], out, options
        if not in_parts:
            return pack(*inputs, update=True)
        parts = JobPart(1, 2), JobPart(2, 2)
        for part in parts:
            pack(*inputs, part=part)
        return merge([part_path(out, part) for part in parts], out, update=True)

    report, again = update(), update()
    assert (report.finished_before, again.finished_before) == (False, True)
    assert again.entries == report.entries
    new, now = Store(out), said(Store(out))
    assert (new.number, Store(f"{out}@1").number) == (2, 1)
    assert said(Store(f"{out}@1")) == said(opened) == before
    assert {name: data for name, data in contents(out).items() if name in old} | {
        "store.json": old["store.json"]
    } == old
    os.replace(changed, files / "structures/1one.cif")
    os.remove(files / "structures/1one.cif.gz")
    for name in ("9new.cif", "9two.cif"):
        os.replace(files / "more" / name, files / "structures" / name)
    packed(files, "once", options=options)
    once = said(Store(files / "once"))
    assert now == once
    assert now["1one_A"] != before["1one_A"]
    assert [*new.keys][: len(before)] == [*before]
    assert list(new.verify()) == []
    compact(new, files / "small")
    small = Store(files / "small")
    assert (said(small), small.number, small.keys) == (once, 1, new.keys)
    assert all({entry.name for entry in whole_report(one).kept} == {*now} for one in (new, small))
    size = sum((files / "once" / name).stat().st_size for name in files_of(files / "once") if name.endswith("wfs"))
    assert (files / "small/shard-00000.wfs").stat().st_size == size


def test_what_is_removed_is_gone_but_for_what_others_share(files: Path) -> None:
    out = files / "store"
    packed(files)
    before = said(Store(out))
    holder, sharer = "1one_A", "1one_C"
    assert Store(out)._header(Store(out).index.row(sharer), sharer)[2]
    store = remove(out, [holder, "1two_A"])
    assert said(store) == {key: one for key, one in before.items() if key not in (holder, "1two_A")}
    assert (store.number, list(store.verify())) == (2, [])
    assert {one.name for one in whole_report(store).kept} == {*store.keys}
    assert remove(out, ["1two_A", holder]).number == 2  # as the same command does that was killed at its end
    small = compact(store, files / "small")
    assert said(small) == said(store)
    assert len(small.index.where["shard"]) == len(small)
    assert remove(out, ["1mut_A"]).number == 3
    assert packed(files, update=True).finished_before is False  # which brings them back, at the end
    assert said(Store(out)) == before
    for keys, message in (
        (["1one_A", "9xyz_A", "9xyz_B"], r"version 4 has no 9xyz_A, 9xyz_B; leave it out"),
        ([*before], "nothing would be left"),
    ):
        with pytest.raises(UserError, match=message):
            remove(out, keys)
    assert Store(out).number == 4


def test_a_chain_of_an_assembly_is_not_removed_alone(files: Path) -> None:
    packed(files, options=PackOptions(assemblies=True))
    with pytest.raises(UserError, match=r"1two-assembly1 has the chain 1two_A; remove it too"):
        remove(files / "store", ["1two_A"])
    assert "1two_A" not in remove(files / "store", ["1two_A", "1two-assembly1"])


def test_what_cannot_grow_says_so(files: Path) -> None:
    out = files / "store"
    packed(files)
    inputs: Any = [files / "structures"], [files / "msas"]
    for how, message in (
        ({"options": PackOptions(min_length=12)}, r"packed with other options \(--min-length\)"),
        ({"clusters": files / "clusters"}, r"packed without --clusters; add entries the same way"),
    ):
        (files / "clusters").write_text("1one_A\n")
        with pytest.raises(UserError, match=message):
            pack(*inputs, out, update=True, **how)  # type: ignore[arg-type]
    write_old(files / "old", [[("a", pack_record({}, {}), {"length": 1})]])
    with pytest.raises(UserError, match=r"format 2 does not grow.*warpfold pack --compact .*old --out NEW"):
        remove(files / "old", ["a"])
    assert compact(Store(files / "old"), files / "new").keys == ["a"]
    with StoreWriter(files / "bare") as writer:
        writer.add("a", pack_record({}, {}), {})
        writer.finish()
    with pytest.raises(UserError, match=r"has no sources\.json; only stores that `warpfold pack` made"):
        pack(*inputs, files / "bare", update=True)
    with lock_folder(out, out), pytest.raises(UserError, match=r"store: another process is writing this store; wait"):
        remove(out, ["1one_A"])
    assert Store(out).number == 1


def test_clusters_of_a_file_name_the_new_entries_and_leave_the_others(files: Path) -> None:
    (files / "clusters").write_text("1one_A 1two_A\n1mut_A\n")
    packed(files, clusters=files / "clusters")
    before = dict(zip(Store(files / "store").keys, Store(files / "store").column("cluster")))
    structure(files / "more/9new.cif", chain("A", NEW), chain("B", ONE))
    (files / "clusters").write_text("9new_A 9xxx_A\n1mut_A\n")
    pack([files / "more"], [], files / "store", clusters=files / "clusters", update=True)
    now = dict(zip(Store(files / "store").keys, Store(files / "store").column("cluster")))
    assert now == before | {"9new_A": "9new_A", "9new_B": now["9new_B"]}
    assert now["9new_B"] == "1one_A"  # of the same sequence


# ---- kills


def base(path: Path) -> Path:
    with StoreWriter(path) as writer:
        for i, key in enumerate("abc"):
            own = {"x": np.arange(9 + i)} | ({} if key == "b" else {"y": np.arange(i)})
            writer.add(key, pack_record(own, {}, {"y": "a"} if key == "b" else None), {"length": i})
        writer.finish({"sources.json": "{}"})
    return path


def grow(path: Path, records: Path) -> None:
    record = pack_record({"x": np.arange(30)}, {"n": 1})
    with StoreWriter(path, grow=True) as writer:
        writer.add("d", record, {"length": 7})
        shard = writer.adopt(records)
        writer.locate("a", shard, 3, len(record.data), record, {"length": 8})
        writer.add("e", record, {"length": 9})
        writer.finish({"sources.json": "{1}"}, ["c"])


EVENTS: Sequence[tuple[Any, str]] = [
    (os, "fsync"), (os, "replace"), (os, "link"), (os, "open"), (Path, "unlink"), (stores, "sync_path"),
]  # fmt: skip


def killed_at(number: int, work: Callable[[], None]) -> bool:
    """Do `work` in a process that is killed before the event of this number; return whether it was."""
    child = os.fork()
    if child == 0:
        left = iter(range(number))

        def watched(call: Callable[..., Any]) -> Callable[..., Any]:
            def event(*given: Any, **named: Any) -> Any:
                if next(left, None) is None:
                    os._exit(9)
                return call(*given, **named)

            return event

        for owner, name in EVENTS:
            setattr(owner, name, watched(getattr(owner, name)))
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_a_kill_between_any_two_writes_leaves_the_old_version_or_the_new_one(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.write_bytes(b"???" + pack_record({"x": np.arange(30)}, {"n": 1}).data)
    grow(base(tmp_path / "undisturbed"), records)
    wanted, before = contents(tmp_path / "undisturbed"), records.read_bytes()
    number, versions = 0, []
    while True:
        path = base(tmp_path / f"s{number}")
        old = said_of(path)
        if not killed_at(number, lambda path=path: grow(path, records)):  # type: ignore[misc]
            break
        store = Store(path)
        versions.append(store.number)
        assert store.number == 2 or said_of(path) == old
        assert said_of(Path(f"{path}@1")) == old
        if store.number == 1:
            grow(path, records)
        assert records.read_bytes() == before
        assert contents(path) == wanted  # no draft of the killed process is left
        assert list(Store(path).verify()) == []
        number += 1
    assert number > 10
    assert versions == sorted(versions)
    assert {*versions} == {1, 2}


def said_of(path: Path) -> dict[str, Any]:
    store = Store(path)
    records = {key: store.record(key) for key in store.keys}
    return {key: {name: one.read(name).tolist() for name in one.arrays} for key, one in records.items()}


# ---- the command line


def test_the_command_line_updates_removes_and_compacts(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    out, msas = files / "store", files / "msas"
    packed(files)
    structure(files / "more/9new.cif", chain("A", NEW))
    code, said, _ = run(capsys, "pack", "--structures", files / "more", "--msas", msas, "--out", out, "--update")
    assert (code, "1 chains kept" in said) == (0, True)
    (files / "names").write_text("1mut_A\n1non_A\n")
    code, said, _ = run(capsys, "pack", "--remove", f"@{files / 'names'}", "1two_A", "--out", out)
    assert (code, said) == (0, f"{out}: version 3, 4 entries\n")
    code, said, _ = run(capsys, "pack", "--info", f"{out}@1")
    assert "entries         6 in" in said
    code, said, _ = run(capsys, "pack", "--compact", out, "--out", files / "small")
    assert (code, said) == (0, f"{files / 'small'}: version 1, 4 entries\n")
    assert run(capsys, "pack", "--verify", f"{out}@2")[:2] == (0, f"{out}@2: 7 entries, all whole\n")
    assert "has no version 9" in refused(run(capsys, "pack", "--info", f"{out}@9"))
    assert "version 3 has no 1mut_A" in refused(run(capsys, "pack", "--remove", "1mut_A", "--out", out))
