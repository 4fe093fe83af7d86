"""Finish packing: make clusters, the report and the store from the results of all parts."""

import json
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import fields
from pathlib import Path
from typing import Any

from warpfold.data.pack.part import JobResult, Manifest, PartFolder, differences
from warpfold.data.pack.report import PackEntry, PackReport
from warpfold.data.similar.clusters import cluster_sequences, read_clusters
from warpfold.data.store.store import ASSEMBLIES, VERSION, Packed, StoreWriter
from warpfold.errors import UserError
from warpfold.progress import Progress

Found = dict[str, Any]  # one of `BuiltChains.entries`
FileResults = list[tuple[PartFolder, JobResult, list[Found]]]


def finished_report(out: Path, manifest: Manifest) -> PackReport | None:
    """Return the report of the store `out`; None if nothing has that name yet.

    Errors: UserError if it is something else, or a store of other inputs or options.
    """
    if not out.exists():
        return None
    try:
        origin = json.loads((out / "sources.json").read_text(encoding="utf-8"))
        report = PackReport.from_json(json.loads((out / "pack.json").read_text(encoding="utf-8")))
        found = differences(origin, manifest)
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{out}: exists already; remove it, or choose another name") from None
    if found:
        raise UserError(
            f"{out}: exists already, packed from other inputs or options ({', '.join(found)}); remove it, or choose "
            "another name"
        )
    return report


def report_part(part: PartFolder) -> PackReport:
    """Return the report of one part among several: what is kept and dropped; what is unused is not known yet."""
    return _report(_drop_duplicates([part]), {}, {})


def merge_parts(parts: Sequence[PartFolder], out: Path, executor: Executor | None, progress: Progress) -> PackReport:
    """Write the store `out` from parts that belong together and are finished, unless there is no chain to keep.

    If two files have a chain with the same name, the first file (by name) counts.
    Errors: UserError if `out` exists or cannot be written, or for the file of clusters.
    """
    files = _drop_duplicates(parts)
    kept = [found for _, _, entries in files for found in entries if found["kept"]]
    chains = [found for found in kept if not found["chains"]]
    if kept:
        progress(0, 1, "clustering")
        for found, cluster in zip(chains, _clusters(chains, parts[0].manifest, executor)):
            found["cluster"] = cluster
    bad = {name: why for _, result, _ in files for name, why in result.data["bad"].items()}
    report = _report(files, _unused_alignments(parts, chains, bad), _unused_hits(parts[0], chains, bad))
    if not kept:
        return report
    with StoreWriter(out, version=ASSEMBLIES if "assemblies" in parts[0].manifest["options"] else VERSION) as writer:
        done = 0
        for part, result, entries in files:
            for found in entries:
                if found["kept"]:
                    place = found["record"]
                    record = Packed(part.record(result, place["number"]), place["header"], place["crc"])
                    writer.add(found["name"], record, found["meta"] | {"cluster": found["cluster"]})
                    done += 1
                    progress(done, len(kept), "writing")
        origin = {name: parts[0].manifest[name] for name in ("warpfold", "options", "inputs")}
        texts = {"pack.json": report.text(), "pack.tsv": report.table()}
        writer.finish(texts | {"sources.json": json.dumps(origin, indent=1) + "\n"})
    return report


def _report(files: FileResults, unused: dict[str, str], unused_hits: dict[str, str]) -> PackReport:
    names = {field.name for field in fields(PackEntry)}
    every = (found for _, _, each in files for found in each)
    entries = [PackEntry(**{name: value for name, value in found.items() if name in names}) for found in every]
    return PackReport(sorted(entries, key=lambda entry: entry.sort_key), unused, unused_hits)


def _drop_duplicates(parts: Sequence[PartFolder]) -> FileResults:
    """Return the structure files of all parts in the order of their names, each with its entries.

    Of entries with the same name only the first is kept.  An assembly comes after its chains, and is kept if they are.
    """
    jobs = sorted(((job, part, result) for part in parts for job, result in part.structures()), key=lambda j: j[0])
    holders: dict[str, str] = {}
    files = []
    for _, part, result in jobs:
        each: list[Found] = [dict(found) for found in result.data["entries"]]
        gone = {found["name"]: holders[found["name"]] for found in each if found["kept"] and found["name"] in holders}
        lost: set[str] = set()  # chains that are not kept after all
        for found in each:
            name, shares = found["name"], found.get("shares", "")
            if found["kept"] and name in gone:
                found |= {"kept": False, "reason": f"the same name as in {gone[name]}"}
            elif found["kept"] and shares in gone:
                found |= {"kept": False, "reason": f"a copy of {shares}, which is also in {gone[shares]}"}
            elif found["kept"] and (absent := [chain for chain in found["chains"] if chain in lost]):
                found |= {"kept": False, "reason": f"its chain {absent[0]} is also in another file", "chains": []}
            elif found["kept"]:
                holders[name] = found["file"]
            if not found["kept"]:
                lost.add(name)
        files.append((part, result, each))
    return files


def _clusters(kept: Sequence[Found], manifest: Manifest, executor: Executor | None) -> list[str]:
    """Return the name of each chain's cluster: from a file, or that of the cluster's representative."""
    keys, sequences = [found["name"] for found in kept], [found["sequence"] for found in kept]
    first: dict[str, str] = {}
    for key, sequence in zip(keys, sequences):
        first.setdefault(sequence, key)
    alone = [first[sequence] for sequence in sequences]
    if manifest["clusters"]:
        named = read_clusters(manifest["clusters"], keys, {found["name"]: found["entity"] for found in kept})
        return [named.get(key, other) for key, other in zip(keys, alone)]
    identity = manifest["options"]["cluster_identity"]
    if identity >= 1:
        return alone
    return [keys[index] for index in cluster_sequences(sequences, identity, executor)]


def _unused_alignments(parts: Sequence[PartFolder], kept: Sequence[Found], bad: dict[str, str]) -> dict[str, str]:
    used = {name for found in kept for name in found["alignments"]}
    sequences = {found["sequence"] for found in kept}
    unused = {}
    for name, query, error in sorted(row for part in parts for row in part.results["alignments"].data):
        if name not in used:
            alike = "its chains have alignments that bear their names"
            none = "no chain that is kept has this sequence"
            unused[name] = error or bad.get(name) or (alike if sequences & {*query.split(":")} else none)
    return unused


def _unused_hits(part: PartFolder, kept: Sequence[Found], bad: dict[str, str]) -> dict[str, str]:
    used = {name for found in kept for name in found["hits"]}
    hits = part.results["hits"].data if "hits" in part.results else []
    return {
        name: why or bad.get(name, "no chain that is kept has this name")
        for name, why in hits
        if name not in used or name in bad
    }
