"""The report of a packing run: the outcome of every chain and file, as JSON, as a table and in one line."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from warpfold.data.store.store import VERSION, Store
from warpfold.data.store.stored_example import members
from warpfold.data.structure.chain import parse_date

NO_FILE = "has no N.cif"  # how the reason begins for which a template counts as missing (`count_refusals`)
NONE_REFUSED: Mapping[str, int] = {}
CONFIDENCES = ("plddt", "pae", "kl", "masked")
TABLE = (
    *("name", "status", "reason", "length", "depth", "templates", "resolution", "release_date", "cluster"),
    *("templates_refused", "alignments", "hits", "file", *CONFIDENCES),
)


@dataclass(slots=True)
class PackEntry:
    """The outcome of one chain, of one assembly, or of one file that could not be read.

    The fields after `chains` are for the merge: no report has them, and no comparison.
    """

    name: str
    file: str
    kept: bool
    reason: str = ""  # why it was dropped, or a note
    length: int = 0
    depth: int = 0  # alignment rows
    templates: int = 0
    resolution: float | None = None
    release_date: str | None = None  # YYYY-MM-DD: a column of a table
    cluster: str | None = None
    plddt: float | None = None  # of a prediction: the means of its pLDDT, of its PAE and of the KL filter's confidence
    pae: float | None = None
    kl: float | None = None
    masked: int = 0  # its residues that are masked
    alignments: Sequence[str] = ()
    hits: Sequence[str] = ()
    templates_refused: Mapping[str, int] = field(default_factory=dict)  # reason, how many
    templates_missing: int = 0  # of these, those whose structure is not there
    structures_missing: Sequence[str] = ()  # their entries, the first four
    chains: Sequence[str] = ()  # of an assembly: the names of its chains; empty for a chain
    sequence: str = field(default="", compare=False)
    entity: str = field(default="", compare=False)  # as files of clusters name it, "1abc_1"
    method: str | None = field(default=None, compare=False)
    shares: str = field(default="", compare=False)  # the chain whose record holds this one's alignment
    # Which of its file's records it is, and the bytes and the crc of that record's header.
    record: Sequence[int] = field(default=(), compare=False)

    @classmethod
    def found(cls, data: Mapping[str, Any]) -> "PackEntry":
        """Make an entry of plain data; a million of them share what many have: texts, and nothing."""
        plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}
        entry = cls(**plain)
        entry.templates_refused = entry.templates_refused or NONE_REFUSED
        for name in ("reason", "release_date", "method"):
            if (text := getattr(entry, name)) is not None:
                setattr(entry, name, sys.intern(text))
        return entry

    def to_json(self) -> dict[str, Any]:
        """Return the fields that a report shows, as plain data for JSON: some for assemblies or predictions only."""
        named = (one.name for one in fields(self) if one.compare)
        only = {"chains": bool(self.chains), **dict.fromkeys(CONFIDENCES, self.plddt is not None)}
        shown = {name: getattr(self, name) for name in named if only.get(name, True)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in shown.items()}


@dataclass(frozen=True)
class PackReport:
    """The report of a run; `pack.json` and `pack.tsv` in the store hold the same."""

    entries: list[PackEntry]  # by file, then by name
    unused: dict[str, str]  # alignment file -> why no chain uses it
    unused_hits: dict[str, str] = field(default_factory=dict)
    finished_before: bool = False  # nothing was done: the store existed, with the same inputs and options

    def __post_init__(self) -> None:
        self.entries.sort(key=lambda entry: (entry.file, entry.name))

    def __repr__(self) -> str:
        return f"<PackReport: {self.summary()}>"

    @property
    def kept(self) -> list[PackEntry]:
        return [entry for entry in self.entries if entry.kept]

    @property
    def chains(self) -> list[PackEntry]:
        """The chains that are kept."""
        return [entry for entry in self.kept if not entry.chains]

    @property
    def assemblies(self) -> list[PackEntry]:
        """The assemblies that are kept."""
        return [entry for entry in self.kept if entry.chains]

    @property
    def dropped(self) -> list[PackEntry]:
        return [entry for entry in self.entries if not entry.kept]

    def to_json(self) -> dict[str, Any]:
        """Return kept and dropped entries, how often each reason occurs, and unused files, as plain data for JSON."""
        entries = {"kept": self.kept, "dropped": self.dropped}
        return {name: [one.to_json() for one in some] for name, some in entries.items()} | self._counted()

    def _counted(self) -> dict[str, dict[str, Any]]:
        reasons = Counter(entry.reason for entry in self.dropped)
        return {
            "reasons": dict(reasons.most_common()),
            "unused_alignments": self.unused,
            "unused_hits": self.unused_hits,
        }

    def text(self) -> Iterator[str]:
        """Yield `to_json` as text, an entry per line: there may be a million."""
        before = "{"
        for name, entries in (("kept", self.kept), ("dropped", self.dropped)):
            yield f'{before}\n "{name}": ['
            for number, entry in enumerate(entries):
                yield f"{',' if number else ''}\n  {json.dumps(entry.to_json(), ensure_ascii=False)}"
            before = "\n ],"
        for name, value in self._counted().items():
            lines = (json.dumps({key: one}, ensure_ascii=False)[1:-1] for key, one in value.items())
            yield f'{before}\n "{name}": {{' + ",".join(f"\n  {line}" for line in lines)
            before = "\n },"
        yield "\n }\n}\n"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "PackReport":
        """Read the report of a store that was finished before."""
        entries = [PackEntry.found(entry) for entry in [*data["kept"], *data["dropped"]]]
        return cls(entries, data["unused_alignments"], data["unused_hits"], finished_before=True)

    def table(self) -> Iterator[str]:
        """Yield tab-separated lines, one per entry and per unused file, after a header."""
        yield "\t".join(TABLE) + "\n"
        for entry in self.entries:
            refused = "; ".join(f"{n} x {why}" for why, n in entry.templates_refused.items())
            other: dict[str, Any] = {"status": "kept" if entry.kept else "dropped", "templates_refused": refused}
            other |= {"masked": None} if entry.plddt is None else {}
            row = (other[name] if name in other else getattr(entry, name) for name in TABLE)
            yield "\t".join(map(_cell, row)) + "\n"
        for what, unused in (("alignment", self.unused), ("hits", self.unused_hits)):
            for file, why in unused.items():
                cells = {"file": file, "reason": why, "status": f"unused {what}"}
                yield "\t".join(_cell(cells.get(name)) for name in TABLE) + "\n"

    def summary(self) -> str:
        """Return one line of numbers."""
        alone = sum(not entry.alignments for entry in self.chains)
        text = f"{len(self.chains)} chains kept ({alone} with their sequence alone), {len(self.dropped)} dropped, "
        text += f"{len(self.unused)} alignments unused"
        if self.assemblies:
            text += f", {len(self.assemblies)} assemblies of {sum(len(one.chains) for one in self.assemblies)} chains"
        if any(entry.hits for entry in self.kept):
            count = sum(entry.templates for entry in self.chains)
            text += f", {count} templates" if count else f", {self._no_templates()}"
        if predicted := [entry for entry in self.chains if entry.plddt is not None]:
            residues = sum(entry.length for entry in predicted)
            plddt = sum((entry.plddt or 0) * entry.length for entry in predicted) / residues
            masked = sum(entry.masked for entry in predicted)
            with_kl = sum(entry.kl is not None for entry in predicted)
            text += f", mean pLDDT {plddt:.1f}, {masked / residues:.0%} of the residues masked"
            text += f", KL filter on {with_kl} of them" if with_kl else ", no KL filter (too few have distograms)"
        return text

    def warnings(self) -> list[str]:
        """List inputs that were asked for and are not used, a sentence each."""
        found = []
        if any(entry.hits for entry in self.kept) and not any(entry.templates for entry in self.chains):
            found.append(self._no_templates())
        if thin := [entry.name for entry in self.chains if entry.alignments and entry.depth <= 1]:
            what = "alignment has" if len(thin) == 1 else "alignments have"
            found.append(f"{len(thin)} {what} one row, the chain's own: {_some(thin)}")
        return found

    def _no_templates(self) -> str:
        """Say why there is not a single template, though there are files of hits."""
        reasons: Counter[str] = Counter()
        for entry in self.kept:
            reasons.update(entry.templates_refused)
        offered, missing = reasons.total(), sum(entry.templates_missing for entry in self.kept)
        if not offered:
            return "0 templates: the files hold no hits"
        why = [f"{n} x {reason}" for reason, n in reasons.most_common() if not reason.startswith(NO_FILE)]
        if missing:
            names = list(dict.fromkeys(one for entry in self.kept for one in entry.structures_missing))
            count = "" if missing == offered else "1 has " if missing == 1 else f"{missing} have "
            why.insert(0, f"{count}no structure in the folders given ({_some(names)})")
        return f"0 of {offered} templates used: {'; '.join(why)}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _cell(value: Any) -> str:
    value = " ".join(value) if isinstance(value, list | tuple) else value
    return "" if value is None else " ".join(str(value).split())


def summarize_store(store: Store) -> dict[str, Any]:
    """Summarize a store as plain data for JSON; "packed": its inputs and options, if `pack` made it."""
    counts, _ = members(store)
    chains, assemblies = np.flatnonzero(counts == 0), np.flatnonzero(counts)

    def column(name: str, of_assemblies: bool = False) -> list[Any]:
        values = store.column(name).take(assemblies if of_assemblies else chains) if name in store.columns else ()
        return [value for value in values if value is not None]

    lengths, depths, templates, dates = map(column, ("length", "depth", "templates", "release_date"))
    days = [day for text in dates if (day := parse_date(text)) is not None]
    origin = store.file("sources.json")
    return {
        "path": str(store.path),
        "format": VERSION,
        "bytes": store.nbytes,
        "shards": len(store.index.shards),
        "entries": len(chains),
        "residues": sum(lengths),
        "length": _quartiles(lengths),
        "depth": _quartiles(depths),
        "alone": sum(depth <= 1 for depth in depths),
        "templates": _quartiles(templates),
        "with_templates": sum(count > 0 for count in templates),
        "clusters": len(set(column("cluster"))),
        "resolution": _quartiles(column("resolution")),
        "release_date": [min(days).isoformat(), max(days).isoformat()] if days else None,
        "assemblies": len(assemblies),
        "assembly_chains": _quartiles(counts[assemblies].tolist()),
        "assembly_length": _quartiles(column("length", of_assemblies=True)),
        "packed": json.loads(origin) if origin is not None else None,
    }


def _quartiles(values: Sequence[float]) -> dict[str, float] | None:
    ordered = sorted(values)
    shares = {"min": 0.0, "25%": 0.25, "median": 0.5, "75%": 0.75, "max": 1.0}
    return {name: ordered[round(share * (len(ordered) - 1))] for name, share in shares.items()} if ordered else None


def store_summary_text(found: Mapping[str, Any]) -> str:
    """Format the result of `summarize_store` as text for people."""

    def values(name: str) -> str:
        return ", ".join(f"{key} {value:g}" for key, value in (found[name] or {}).items()) or "unknown"

    rows = {
        "entries": f"{found['entries']:,} in {found['clusters']:,} clusters, {found['residues']:,} residues",
        "length": values("length"),
        "alignment rows": f"{values('depth')}; {found['alone']:,} entries with their sequence alone",
        "templates": f"{values('templates')}; {found['with_templates']:,} entries with any",
        "resolution (Å)": values("resolution"),
        "released": " to ".join(found["release_date"] or ["unknown"]),
        "size": f"{found['bytes'] / 1e6:,.1f} MB in {found['shards']} shards, format {found['format']}",
    }
    if count := found["assemblies"]:
        rows["assemblies"] = f"{count:,}; chains: {values('assembly_chains')}; length: {values('assembly_length')}"
    if packed := found["packed"]:
        inputs = ((name, one) for name, one in packed["inputs"].items() if one["files"])
        options = (f"{name.replace('_', '-')} {one}" for name, one in packed["options"].items() if one is not None)
        rows["packed by"] = f"WarpFold {packed['warpfold']}"
        rows["from"] = ", ".join(f"{one['files']:,} {name} ({one['bytes'] / 1e6:,.1f} MB)" for name, one in inputs)
        rows["options"] = ", ".join(options)
        if packed.get("clustered"):
            rows["clusters by"] = packed["clustered"]
    return "\n".join(f"{name:16s}{text}" for name, text in rows.items())
