"""Finish packing: make clusters, the report and the store from the results of all parts."""

import json
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from warpfold.data.pack.part import HIT_FILES, Manifest, PartFolder, differences
from warpfold.data.pack.report import PackEntry, PackReport
from warpfold.data.similar.clusters import cluster_sequences, clustering_program, read_clusters
from warpfold.data.store.store import Packed, StoreWriter
from warpfold.data.store.stored_example import CHAINS
from warpfold.errors import UserError
from warpfold.files import read_file
from warpfold.progress import Progress

META = ("length", "depth", "templates", "resolution", "release_date", "method")  # columns of the index, of `PackEntry`


def finished_report(out: Path, manifest: Manifest) -> PackReport | None:
    """Return the report of the store `out`; None if nothing has that name yet.

    Errors: UserError if it is something else, or a store of other inputs or options.
    """
    if not out.exists():
        return None
    try:
        origin = json.loads(read_file(out / "sources.json"))
        report = PackReport.from_json(json.loads(read_file(out / "pack.json")))
        found = differences(origin, manifest)
    except (UserError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{out}: exists already. Remove it, or choose another name") from None
    if found:
        raise UserError(
            f"{out}: exists already, packed from other inputs or options ({', '.join(found)}). Remove it, or "
            "choose another name"
        )
    return report


def report_part(part: PartFolder) -> PackReport:
    """Return the report of one part among several: what is kept and dropped; what is unused is not known yet."""
    return PackReport([entry for _, _, entries in _outcomes([part], {}) for entry in entries], {})


def merge_parts(
    parts: Sequence[PartFolder],
    out: Path,
    manifest: Manifest,
    executor: Executor | None,
    progress: Progress,
    threads: int = 1,
) -> PackReport:
    """Write the store `out` from parts that belong together and are finished, unless there is no chain to keep.

    If two files have a chain with the same name, the first file (by name) counts.  The records are copied in the order
    of the files' names, so that the store is the same for any number of parts.
    manifest: of this run, which decides the clusters.  threads: of the program that makes clusters of many sequences.
    Errors: UserError if `out` exists or cannot be written, for the file of clusters, and as of `cluster_sequences`.
    """
    bad: dict[str, str] = {}
    outcomes = _outcomes(parts, bad)
    report = PackReport([entry for _, _, entries in outcomes for entry in entries], {})
    _find_unused(report, parts, bad)
    if not report.kept:
        return report
    chains = [entry for _, _, entries in outcomes for entry in entries if entry.kept and not entry.chains]
    columns = (*META, *(("plddt",) if "predicted" in manifest["inputs"] else ()))
    with StoreWriter(out) as writer:
        # Clusters come before the records are copied: where they cannot be made, the run ends at once.
        progress(0, 1, "clustering")
        clusters, program = _clusters(chains, manifest, executor, threads)
        for entry, cluster in zip(chains, clusters):
            entry.cluster, entry.sequence = cluster, ""  # which is no longer needed
        done, total = 0, len(report.kept)
        for number, job, entries in outcomes:
            if not any(entry.kept for entry in entries):
                continue
            result = parts[number].read(job)
            for entry, stored in zip(entries, result.data["entries"]):
                if not entry.kept:
                    continue
                index, header, crc = stored["record"]
                meta = {name: getattr(entry, name) for name in columns}
                meta |= {CHAINS: list(entry.chains) or None} if "assemblies" in manifest["options"] else {}
                meta |= {"cluster": entry.cluster}
                writer.add(entry.name, Packed(result.records[index], header, crc, entry.shares), meta)
                done += 1
                progress(done, total, "writing")
        origin: dict[str, Any] = {name: manifest[name] for name in ("warpfold", "options", "inputs")}
        origin |= {"clustered": program} if program else {}
        sources = json.dumps(origin, indent=1) + "\n"
        writer.finish({"pack.json": report.text(), "pack.tsv": report.table(), "sources.json": sources})
    return report


def _outcomes(parts: Sequence[PartFolder], bad: dict[str, str]) -> list[tuple[int, str, list[PackEntry]]]:
    """Return the entries of each structure file, with its part and its job, in the order of the files' names.

    Of entries with the same name only the first is kept.  An assembly comes after its chains, and is kept if they are.
    bad: gets the alignments and hits that could not be read, and why.
    """
    jobs = sorted((job, number) for number, part in enumerate(parts) for job in part.structures())
    holders: dict[str, str] = {}
    outcomes = []
    for job, number in jobs:
        data = parts[number].read(job, with_records=False).data
        entries = [PackEntry.found(entry) for entry in data["entries"]]
        gone = {entry.name: holders[entry.name] for entry in entries if entry.kept and entry.name in holders}
        lost: set[str] = set()  # chains that are not kept after all
        for entry in entries:
            reason = ""
            if entry.name in gone:
                reason = f"the same name as in {gone[entry.name]}"
            elif entry.shares in gone:
                reason = f"a copy of {entry.shares}, which is also in {gone[entry.shares]}"
            elif absent := [chain for chain in entry.chains if chain in lost]:
                reason = f"its chain {absent[0]} is also in another file"
            if entry.kept and reason:
                entry.kept, entry.reason, entry.chains = False, reason, ()
            if entry.kept:
                holders[entry.name] = entry.file
            else:
                lost.add(entry.name)
            entry.record = ()  # read again with the record itself: of a million entries they take 150 MB
        outcomes.append((number, job, entries))
        bad.update(data["bad"])
    return outcomes


def _clusters(
    chains: Sequence[PackEntry], manifest: Manifest, executor: Executor | None, threads: int
) -> tuple[list[str], str]:
    """Return the name of each chain's cluster: from a file, or that of the cluster's representative; and the program
    that made them, "" for none but this.
    """
    keys, sequences = [chain.name for chain in chains], [chain.sequence for chain in chains]
    first = dict(zip(reversed(sequences), reversed(keys)))
    if manifest["clusters"]:
        named = read_clusters(manifest["clusters"], keys, {chain.name: chain.entity for chain in chains})
        return [named.get(one.name, first[one.sequence]) for one in chains], ""
    identity = manifest["options"]["cluster_identity"]
    if identity >= 1:
        return [first[sequence] for sequence in sequences], ""
    program = clustering_program(sequences)
    clusters = cluster_sequences(sequences, identity, executor, threads, program)
    return [keys[index] for index in clusters], program


def _find_unused(report: PackReport, parts: Sequence[PartFolder], bad: dict[str, str]) -> None:
    """Put into the report which alignments and hits no chain uses, and why.  bad: those that could not be read."""
    used = {name for chain in report.chains for name in chain.alignments}
    sequences = {chain.sequence for chain in report.chains}
    for name, query, error in sorted(query for part in parts for query in part.queries()):
        if name not in used:
            alike = "its chains have alignments that bear their names"
            none = "no chain that is kept has this sequence"
            report.unused[name] = error or bad.get(name) or (alike if sequences & {*query.split(":")} else none)
    used = {name for chain in report.chains for name in chain.hits}
    for name, why in parts[0].read(HIT_FILES).data:
        if name not in used or name in bad:
            report.unused_hits[name] = why or bad.get(name, "no chain that is kept has this name")
