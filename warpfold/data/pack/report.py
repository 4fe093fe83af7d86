"""Report the outcome of every chain and file of a packing run as JSON, as a table, and in one line."""

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

# Start of the reason for a missing template structure (`count_refusals`).
NO_FILE = "has no N.cif"
NONE_REFUSED: Mapping[str, int] = {}
CONFIDENCES = ("plddt", "pae", "kl", "masked")
TABLE = (
    *("name", "status", "reason", "length", "depth", "templates", "resolution", "release_date", "cluster"),
    *("templates_refused", "alignments", "hits", "file", *CONFIDENCES),
)


@dataclass(slots=True)
class PackEntry:
    """The outcome of a chain, of an assembly, or of a file that could not be read.

    reason: why it was dropped, or a note. depth: alignment rows. release_date: YYYY-MM-DD. plddt, pae, kl: of a
    prediction, the means of pLDDT, PAE and the confidence of the KL filter. masked: number of masked residues.
    templates_refused: number of refused templates by reason. templates_missing: number of these without a structure.
    structures_missing: the first four missing PDB ids. chains: names of the chains of an assembly; empty for a chain.

    The fields after `chains` are for the merge, and not part of reports and comparisons. entity: as in cluster files
    ("1abc_1"). shares: the chain whose record holds the alignment. record: index of the record in its file, and size
    and CRC of its header.
    """

    name: str
    file: str
    kept: bool
    reason: str = ""
    length: int = 0
    depth: int = 0
    templates: int = 0
    resolution: float | None = None
    release_date: str | None = None
    cluster: str | None = None
    plddt: float | None = None
    pae: float | None = None
    kl: float | None = None
    masked: int = 0
    alignments: Sequence[str] = ()
    hits: Sequence[str] = ()
    templates_refused: Mapping[str, int] = field(default_factory=dict)
    templates_missing: int = 0
    structures_missing: Sequence[str] = ()
    chains: Sequence[str] = ()
    sequence: str = field(default="", compare=False)
    entity: str = field(default="", compare=False)
    method: str | None = field(default=None, compare=False)
    shares: str = field(default="", compare=False)
    record: Sequence[int] = field(default=(), compare=False)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "PackEntry":
        """Create an entry from JSON data. Entries share equal texts and empty values; there may be a million."""
        plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}
        entry = cls(**plain)
        entry.templates_refused = entry.templates_refused or NONE_REFUSED
        for name in ("reason", "release_date", "method"):
            if (text := getattr(entry, name)) is not None:
                setattr(entry, name, sys.intern(text))
        return entry

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the report as JSON data; some only for assemblies or predictions."""
        names = (entry_field.name for entry_field in fields(self) if entry_field.compare)
        optional = {"chains": bool(self.chains), **dict.fromkeys(CONFIDENCES, self.plddt is not None)}
        shown = {name: getattr(self, name) for name in names if optional.get(name, True)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in shown.items()}


@dataclass(frozen=True)
class PackReport:
    """The report of a run, which `pack.json` and `pack.tsv` in the store contain too.

    entries: sorted by file, then by name. unused: reason by alignment file. unused_hits: reason by hit file.
    finished_before: the store existed already, with the same inputs and options.
    """

    entries: list[PackEntry]
    unused: dict[str, str]
    unused_hits: dict[str, str] = field(default_factory=dict)
    finished_before: bool = False

    def __post_init__(self) -> None:
        self.entries.sort(key=lambda entry: (entry.file, entry.name))

    def __repr__(self) -> str:
        return f"<PackReport: {self.summary()}>"

    @property
    def kept(self) -> list[PackEntry]:
        return [entry for entry in self.entries if entry.kept]

    @property
    def chains(self) -> list[PackEntry]:
        """The kept chains."""
        return [entry for entry in self.kept if not entry.chains]

    @property
    def assemblies(self) -> list[PackEntry]:
        """The kept assemblies."""
        return [entry for entry in self.kept if entry.chains]

    @property
    def dropped(self) -> list[PackEntry]:
        return [entry for entry in self.entries if not entry.kept]

    def to_json(self) -> dict[str, Any]:
        """Return kept and dropped entries, counts of the reasons, and unused files as JSON data."""
        groups = {"kept": self.kept, "dropped": self.dropped}
        return {name: [entry.to_json() for entry in entries] for name, entries in groups.items()} | self._totals()

    def _totals(self) -> dict[str, dict[str, Any]]:
        """Count the reasons, and list unused files."""
        reasons = Counter(entry.reason for entry in self.dropped)
        return {
            "reasons": dict(reasons.most_common()),
            "unused_alignments": self.unused,
            "unused_hits": self.unused_hits,
        }

    def text(self) -> Iterator[str]:
        """Yield `to_json` as text with an entry per line, because there may be a million."""
        before = "{"
        for name, entries in (("kept", self.kept), ("dropped", self.dropped)):
            yield f'{before}\n "{name}": ['
            for number, entry in enumerate(entries):
                yield f"{',' if number else ''}\n  {json.dumps(entry.to_json(), ensure_ascii=False)}"
            before = "\n ],"
        for name, values in self._totals().items():
            lines = (json.dumps({key: value}, ensure_ascii=False)[1:-1] for key, value in values.items())
            yield f'{before}\n "{name}": {{' + ",".join(f"\n  {line}" for line in lines)
            before = "\n },"
        yield "\n }\n}\n"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "PackReport":
        """Create the report of a finished store from its `pack.json`."""
        entries = [PackEntry.from_json(entry) for entry in [*data["kept"], *data["dropped"]]]
        return cls(entries, data["unused_alignments"], data["unused_hits"], finished_before=True)

    def table(self) -> Iterator[str]:
        """Yield a header and tab-separated lines for each entry and each unused file."""
        yield "\t".join(TABLE) + "\n"
        for entry in self.entries:
            refused = "; ".join(f"{n} x {reason.rstrip('.')}" for reason, n in entry.templates_refused.items())
            other: dict[str, Any] = {"status": "kept" if entry.kept else "dropped", "templates_refused": refused}
            other |= {"masked": None} if entry.plddt is None else {}
            row = (other[name] if name in other else getattr(entry, name) for name in TABLE)
            yield "\t".join(map(_format_cell, row)) + "\n"
        for kind, unused in (("alignment", self.unused), ("hits", self.unused_hits)):
            for file, reason in unused.items():
                cells = {"file": file, "reason": reason, "status": f"unused {kind}"}
                yield "\t".join(_format_cell(cells.get(name)) for name in TABLE) + "\n"

    def summary(self) -> str:
        """Format the numbers of the report in one line."""
        bare = sum(not entry.alignments for entry in self.chains)
        text = f"{len(self.chains)} chains kept ({bare} with their sequence alone), {len(self.dropped)} dropped, "
        text += f"{len(self.unused)} alignments unused"
        if self.assemblies:
            chains = sum(len(entry.chains) for entry in self.assemblies)
            text += f", {len(self.assemblies)} assemblies of {chains} chains"
        if any(entry.hits for entry in self.kept):
            count = sum(entry.templates for entry in self.chains)
            text += f", {count} templates" if count else f", {self._explain_none()}"
        if predicted := [entry for entry in self.chains if entry.plddt is not None]:
            residues = sum(entry.length for entry in predicted)
            plddt = sum((entry.plddt or 0) * entry.length for entry in predicted) / residues
            masked = sum(entry.masked for entry in predicted)
            with_kl = sum(entry.kl is not None for entry in predicted)
            text += f", mean pLDDT {plddt:.1f}, {masked / residues:.0%} of the residues masked"
            text += f", KL filter on {with_kl} of them" if with_kl else ", no KL filter (too few have distograms)"
        return text

    def warnings(self) -> list[str]:
        """List warnings about inputs without effect."""
        warnings = []
        if any(entry.hits for entry in self.kept) and not any(entry.templates for entry in self.chains):
            warnings.append(self._explain_none())
        if single_row := [entry.name for entry in self.chains if entry.alignments and entry.depth <= 1]:
            subject = "alignment has" if len(single_row) == 1 else "alignments have"
            warnings.append(f"{len(single_row)} {subject} only the row of the chain itself: {_join_three(single_row)}")
        return warnings

    def _explain_none(self) -> str:
        """Explain why there are no templates although there are hit files."""
        reasons: Counter[str] = Counter()
        for entry in self.kept:
            reasons.update(entry.templates_refused)
        offered, missing = reasons.total(), sum(entry.templates_missing for entry in self.kept)
        if not offered:
            return "0 templates: the files contain no hits"
        causes = [f"{n} x {reason}" for reason, n in reasons.most_common() if not reason.startswith(NO_FILE)]
        if missing:
            names = list(dict.fromkeys(name for entry in self.kept for name in entry.structures_missing))
            count = "" if missing == offered else "1 has " if missing == 1 else f"{missing} have "
            causes.insert(0, f"{count}no structure in the folders given ({_join_three(names)})")
        return f"0 of {offered} templates used: {'; '.join(causes)}"


def _join_three(names: Sequence[str]) -> str:
    """Join the first three names."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _format_cell(value: Any) -> str:
    """Format a cell of the table."""
    value = " ".join(value) if isinstance(value, list | tuple) else value
    return "" if value is None else " ".join(str(value).split())


def summarize_store(store: Store) -> dict[str, Any]:
    """Summarise a store as JSON data. "packed" has its inputs and options, if `pack` made it."""
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
        "length": _compute_quartiles(lengths),
        "depth": _compute_quartiles(depths),
        "alone": sum(depth <= 1 for depth in depths),
        "templates": _compute_quartiles(templates),
        "with_templates": sum(count > 0 for count in templates),
        "clusters": len(set(column("cluster"))),
        "resolution": _compute_quartiles(column("resolution")),
        "release_date": [min(days).isoformat(), max(days).isoformat()] if days else None,
        "assemblies": len(assemblies),
        "assembly_chains": _compute_quartiles(counts[assemblies].tolist()),
        "assembly_length": _compute_quartiles(column("length", of_assemblies=True)),
        "packed": json.loads(origin) if origin is not None else None,
    }


def _compute_quartiles(values: Sequence[float]) -> dict[str, float] | None:
    """Compute minimum, quartiles and maximum; None without values."""
    ordered = sorted(values)
    fractions = {"min": 0.0, "25%": 0.25, "median": 0.5, "75%": 0.75, "max": 1.0}
    if not ordered:
        return None
    return {name: ordered[round(fraction * (len(ordered) - 1))] for name, fraction in fractions.items()}


def store_summary_text(summary: Mapping[str, Any]) -> str:
    """Format the result of `summarize_store` as text."""

    def values(name: str) -> str:
        return ", ".join(f"{key} {value:g}" for key, value in (summary[name] or {}).items()) or "unknown"

    rows = {
        "entries": f"{summary['entries']:,} in {summary['clusters']:,} clusters, {summary['residues']:,} residues",
        "length": values("length"),
        "alignment rows": f"{values('depth')}; {summary['alone']:,} entries with their sequence alone",
        "templates": f"{values('templates')}; {summary['with_templates']:,} entries with templates",
        "resolution (Å)": values("resolution"),
        "released": " to ".join(summary["release_date"] or ["unknown"]),
        "size": f"{summary['bytes'] / 1e6:,.1f} MB in {summary['shards']} shards, format {summary['format']}",
    }
    if count := summary["assemblies"]:
        rows["assemblies"] = f"{count:,}; chains: {values('assembly_chains')}; length: {values('assembly_length')}"
    if packed := summary["packed"]:
        inputs = ((name, files) for name, files in packed["inputs"].items() if files["files"])
        options = (f"{name.replace('_', '-')} {x}" for name, x in packed["options"].items() if x is not None)
        rows["packed by"] = f"WarpFold {packed['warpfold']}"
        rows["from"] = ", ".join(
            f"{files['files']:,} {name} ({files['bytes'] / 1e6:,.1f} MB)" for name, files in inputs
        )
        rows["options"] = ", ".join(options)
        if packed.get("clustered"):
            rows["clusters by"] = packed["clustered"]
    return "\n".join(f"{name:16s}{text}" for name, text in rows.items())
