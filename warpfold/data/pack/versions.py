"""Versions of a finished store: what each was made of, removing entries, and writing a store without what is gone."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from warpfold.data.pack.part import Manifest, differences
from warpfold.data.pack.report import PackEntry, PackReport
from warpfold.data.store.storage import Place
from warpfold.data.store.store import Store, StoreWriter
from warpfold.data.store.stored_example import CHAINS, members
from warpfold.errors import UserError, listed
from warpfold.progress import Progress, no_progress

# A version's sources.json: what it was made from, as a part's manifest says it, and "clustered": by which program, if
# not by WarpFold; "removed": which keys it is without.
ORIGIN = ("warpfold", "options", "inputs")


def origin_text(manifest: Manifest, removed: Sequence[str] = ()) -> str:
    """Return the text of sources.json."""
    found = {name: manifest[name] for name in ORIGIN} | ({"removed": list(removed)} if removed else {})
    if manifest.get("clustered"):
        found["clustered"] = manifest["clustered"]
    return json.dumps(found, indent=1) + "\n"


def origin_of(store: Store) -> Manifest:
    """Return what sources.json says of a version.  Errors: UserError for a store that `pack` did not make."""
    try:
        found = json.loads(store.file("sources.json") or "{}")
        other = {"removed": found.get("removed", []), "clustered": found.get("clustered", "")}
        return {name: found[name] for name in ORIGIN} | other
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{store.path}: has no sources.json; only stores that `warpfold pack` made can change"
        ) from None


def updated_report(out: Place, manifest: Manifest) -> PackReport | None:
    """Return the report of the newest version of the store `out` if it was made from these inputs, else None.

    Errors: UserError for what is no store, or one of other options.
    """
    store = Store(out)
    origin = origin_of(store)
    if found := differences(
        {"options": origin["options"], "inputs": {}}, {"options": manifest["options"], "inputs": {}}
    ):
        raise UserError(f"{out}: was packed with other options ({', '.join(found)}); a store has one set of them")
    kinds = ("predicted" in origin["inputs"], bool(origin["inputs"].get("clusters", {}).get("files")))
    own = ("predicted" in manifest["inputs"], bool(manifest["clusters"]))
    for what, there, here in zip(("--predicted", "--clusters"), kinds, own):
        if there != here:
            raise UserError(f"{out}: was packed {'with' if there else 'without'} {what}; add entries the same way")
    if origin["inputs"] != manifest["inputs"] or origin["removed"]:
        return None
    return PackReport.from_json(json.loads(store.file("pack.json") or "{}"))


def remove(out: Place, keys: Sequence[str], scratch: Path | None = None) -> Store:
    """Make a version of the store `out` without some entries, and return it; no shard changes.

    The same call again changes nothing.  scratch: as of `StoreWriter`.
    Errors: UserError for a key that is not there, for a chain of an assembly that stays, and where nothing would stay.
    """
    names = sorted(set(keys))
    with StoreWriter(out, grow=True, scratch=scratch) as writer:
        base = writer.base
        origin = origin_of(base)
        if origin["removed"] == names:
            return base
        if missing := [name for name in names if name not in base]:
            raise UserError(
                f"{out}: version {base.number} has no {listed(missing, 3)}; leave it out of --remove, or look up the "
                "names in pack.tsv"
            )
        if len(names) == len(base):
            raise UserError(f"{out}: nothing would be left; remove the folder instead")
        counts, chains = members(base)
        own = np.repeat(np.arange(len(base)), counts)
        gone = np.array([base.index.row(name) for name in names])
        needed = np.isin(chains, gone) & ~np.isin(own, gone)
        if needed.any():
            assembly = base.keys[int(own[needed][0])]
            raise UserError(f"{out}: {assembly} has the chain {base.keys[int(chains[needed][0])]}; remove it too")
        writer.finish({"sources.json": origin_text(origin, names)}, names)
    return Store(out)


def whole_report(store: Store) -> PackReport:
    """Return the report of all that a version has, of the reports of the runs that made it and those before it."""
    if store.number < 2:
        return PackReport.from_json(json.loads(store.file("pack.json") or "{}"))
    kept: dict[str, PackEntry] = {}
    dropped: list[PackEntry] = []
    unused: dict[str, str] = {}
    unused_hits: dict[str, str] = {}
    for number in range(1, store.number + 1):
        if (text := Store(store.path, number, checked=True).file("pack.json")) is None:  # some entries were removed
            continue
        report = PackReport.from_json(json.loads(text))
        kept |= {entry.name: entry for entry in report.kept}
        dropped += report.dropped
        unused |= report.unused
        unused_hits |= report.unused_hits
    return PackReport([*(entry for name, entry in kept.items() if name in store), *dropped], unused, unused_hits)


def compact(store: Store, out: Place, progress: Progress = no_progress, scratch: Path | None = None) -> Store:
    """Write the store `out` of what a version has, in its order, without what was replaced or removed; return it.

    Of a store of formats 2 and 3 it makes one of the present format.  A record whose shared arrays lay in one that is
    gone has them itself.  Parts that were merged in place become the shards that one run would have made.
    scratch: as of `StoreWriter`.
    Errors: UserError if `out` exists or cannot be written, and for a damaged record.
    """
    files: dict[str, str | Iterable[str]]
    files = {name: text for name in ("pack.json", "pack.tsv", "sources.json") if (text := store.file(name)) is not None}
    if store.number > 1:
        report = whole_report(store)
        origins = [origin_of(Store(store.path, number, True)) for number in range(1, store.number + 1)]
        files["pack.json"], files["pack.tsv"] = report.text(), report.table()
        made = [origin for origin in origins if not origin["removed"]]
        kinds = list(dict.fromkeys(kind for origin in made for kind in origin["inputs"]))
        inputs = {}
        for kind in kinds:
            each = [origin["inputs"][kind] for origin in made if kind in origin["inputs"]]
            digests = " ".join(one["digest"] for one in each)
            inputs[kind] = {name: sum(one[name] for one in each) for name in ("files", "bytes")} | {"digest": digests}
        files["sources.json"] = origin_text(made[-1] | {"inputs": inputs})
    columns = [(name, store.column(name)) for name in store.columns]
    if store.version < 3:
        columns = [(name, column) for name, column in columns if name != CHAINS]
    with StoreWriter(out, scratch=scratch) as writer:
        for row, key in enumerate(store.keys):
            writer.add(key, store.packed(key), {name: column[row] for name, column in columns})
            progress(row + 1, len(store), "writing")
        writer.finish(files)
    return Store(out)
