"""Finish packing: compute clusters, and write the report and the store from the results of all parts."""

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

# Columns of the index, from fields of `PackEntry`.
META = ("length", "depth", "templates", "resolution", "release_date", "method")


def finished_report(out: Path, manifest: Manifest) -> PackReport | None:
    """Read the report of the store `out`; None if it does not exist.

    Raises UserError if `out` is something else, or a store of other inputs or options.
    """
    if not out.exists():
        return None
    try:
        origin = json.loads(read_file(out / "sources.json"))
        report = PackReport.from_json(json.loads(read_file(out / "pack.json")))
        changes = differences(origin, manifest)
    except (UserError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{out}: exists already. Remove it, or choose another name.") from None
    if changes:
        raise UserError(
            f"{out}: exists already, packed from other inputs or options ({', '.join(changes)}). Remove it, or "
            "choose another name."
        )
    return report


def report_part(part: PartFolder) -> PackReport:
    """Build the report of a part: kept and dropped entries. Unused files are known only after the merge."""
    return PackReport([entry for _, _, entries in _read_outcomes([part], {}) for entry in entries], {})


def merge_parts(
    parts: Sequence[PartFolder],
    out: Path,
    manifest: Manifest,
    executor: Executor | None,
    progress: Progress,
    threads: int,
) -> PackReport:
    """Write the store `out` from the finished parts of one run, unless no chain is kept. Returns the report.

    If two files have a chain with the same name, the first file (by name) is used. Records are copied in the order of
    the file names, so that the store does not depend on the number of parts.
    manifest: of this run, with the settings of the clusters. threads: of MMseqs2.
    Raises UserError if `out` exists or cannot be written, for an invalid file of clusters, and the errors of
    `cluster_sequences`.
    """
    bad: dict[str, str] = {}
    outcomes = _read_outcomes(parts, bad)
    report = PackReport([entry for _, _, entries in outcomes for entry in entries], {})
    # Unused alignments and hits, with the reasons.
    used = {name for chain in report.chains for name in chain.alignments}
    sequences = {chain.sequence for chain in report.chains}
    for name, query, error in sorted(query for part in parts for query in part.queries()):
        if name not in used:
            is_kept = bool(sequences & {*query.split(":")})
            reason = "its chains have alignments of their names" if is_kept else "no kept chain has this sequence"
            report.unused[name] = error or bad.get(name) or reason
    used = {name for chain in report.chains for name in chain.hits}
    for name, cause in parts[0].read(HIT_FILES).data:
        if name not in used or name in bad:
            report.unused_hits[name] = cause or bad.get(name, "no kept chain has this name")
    if not report.kept:
        return report
    chains = [entry for _, _, entries in outcomes for entry in entries if entry.kept and not entry.chains]
    columns = (*META, *(("plddt",) if "predicted" in manifest["inputs"] else ()))
    with StoreWriter(out) as writer:
        # Clusters are computed before the records are copied, so that an error ends the run early.
        progress(0, 1, "clustering")
        clusters, program = _cluster_chains(chains, manifest, executor, threads)
        for entry, cluster in zip(chains, clusters):
            # The sequences are no longer needed.
            entry.cluster, entry.sequence = cluster, ""
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


def _read_outcomes(parts: Sequence[PartFolder], bad: dict[str, str]) -> list[tuple[int, str, list[PackEntry]]]:
    """Read the entries of each structure file, sorted by file name. Returns tuples of part, job and entries.

    Of entries with one name, only the first is kept. An assembly follows its chains, and is kept only if they are.
    bad: receives the alignments and hits that could not be read, with the reasons.
    """
    jobs = sorted((job, number) for number, part in enumerate(parts) for job in part.structures())
    holders: dict[str, str] = {}
    outcomes = []
    for job, number in jobs:
        data = parts[number].read(job, with_records=False).data
        entries = [PackEntry.from_json(entry) for entry in data["entries"]]
        repeated = {entry.name: holders[entry.name] for entry in entries if entry.kept and entry.name in holders}
        # Entries of this file that are not kept.
        dropped: set[str] = set()
        for entry in entries:
            reason = ""
            if entry.name in repeated:
                reason = f"the same name as in {repeated[entry.name]}"
            elif entry.shares in repeated:
                reason = f"a copy of {entry.shares}, which is also in {repeated[entry.shares]}"
            elif missing := [chain for chain in entry.chains if chain in dropped]:
                reason = f"its chain {missing[0]} is also in another file"
            if entry.kept and reason:
                entry.kept, entry.reason, entry.chains = False, reason, ()
            if entry.kept:
                holders[entry.name] = entry.file
            else:
                dropped.add(entry.name)
            # This is read again with the record itself. A million of them would take 150 MB.
            entry.record = ()
        outcomes.append((number, job, entries))
        bad.update(data["bad"])
    return outcomes


def _cluster_chains(
    chains: Sequence[PackEntry], manifest: Manifest, executor: Executor | None, threads: int
) -> tuple[list[str], str]:
    """Return the name of each chain's cluster, and the program that computed the clusters ("" for this one).

    A name comes from the file of clusters, or is that of the cluster's representative.
    """
    keys, sequences = [chain.name for chain in chains], [chain.sequence for chain in chains]
    first = dict(zip(reversed(sequences), reversed(keys)))
    if manifest["clusters"]:
        named = read_clusters(manifest["clusters"], keys, {chain.name: chain.entity for chain in chains})
        return [named.get(chain.name, first[chain.sequence]) for chain in chains], ""
    identity = manifest["options"]["cluster_identity"]
    if identity >= 1:
        return [first[sequence] for sequence in sequences], ""
    program = clustering_program(sequences)
    clusters = cluster_sequences(sequences, identity, executor, threads, program)
    return [keys[index] for index in clusters], program
