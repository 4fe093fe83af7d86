"""Notices about a protein or a run: each has a kind and values, from which its sentence is made."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warpfold.report.report import Warned

Value = str | int | float

# The sentence of each kind.  `detail`, shown in parentheses, applies to a single protein.
SENTENCES = {
    "input": "{text}",  # from reading the input, in its own words
    "no_alignment": "no alignment: folded by the sequence alone",
    "one_row": "its alignment has one row, its own: folded by the sequence alone",
    "pairing_rows": "rows of alignments for pairing (named uniprot or pair), not used for a single protein that has "
    "other rows: {rows:,}",
    "unused_alignments": "alignments of none of the sequences, not used: {count}{detail}",
    "rows_lost": "no row of the alignment{of} reached the model: folded by the sequence alone",
    "no_hits": "0 templates used: no hit for it in the files given",
    "templates_missing": "{used:,} of {offered:,} templates used: {missing:,} without a structure in {folder}{detail}",
    "templates_refused": "0 of {offered:,} templates used: {why}",
    "guess_gaps": "residues without Cβ in the initial guess, placed at the origin: {count}{detail}",
    "fixed_differs": "residues of fixed chains that differ from the initial guess: {count}{detail}",
    "unknown_residues": "not one of the twenty amino acids, so without atoms: {count}{detail}; write C for U to get "
    "cysteine",
    "no_pdb": "no PDB file: {why}",
    "chain_breaks": "chain breaks (neighbouring Cα too near or too far): {count}",
    "clashes": "clashes between atoms of different residues: {count}",
    "mirrored": "residues with mirrored Cα: {count}",
    "plddt_very_low": "very low confidence: mean pLDDT {mean_plddt:.1f}, below 50; the structure should not be "
    "interpreted",
    "plddt_low": "low confidence: mean pLDDT {mean_plddt:.1f}, below 70",
    "disorder": "{share:.0%} of the residues have a pLDDT below 50: they may be disordered and "
    "their positions have no meaning",
    "iptm_low": "ipTM {iptm:.2f}, below 0.6: the interface is probably wrong",
    "iptm_unsure": "ipTM {iptm:.2f}, below 0.8: the interface may be right or wrong",
    "ptm_low": "pTM {ptm:.2f}, below 0.5: the fold as a whole may be wrong",
}


@dataclass(frozen=True)
class Notice:
    """A kind of `SENTENCES` with the values of its sentence."""

    kind: str
    values: Mapping[str, Value] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return _sentence([self])

    def record(self) -> dict[str, Any]:
        """Convert to an entry of summary.json."""
        values = {key: value for key, value in self.values.items() if key != "text"}
        return {"kind": self.kind, "text": self.text, **({"values": values} if values else {})}


def noted(texts: Iterable[str]) -> list[Notice]:
    """Convert texts to notices about the input."""
    return [Notice("input", {"text": text}) for text in texts]


def shorten_list(names: Sequence[str]) -> str:
    """List at most three names, with dots for the others."""
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def of_record(record: Mapping[str, Any]) -> Notice:
    """Convert an entry of summary.json to a notice."""
    return Notice(record["kind"], {"text": record["text"]} if record["kind"] == "input" else record.get("values", {}))


def each_kind_once(found: Iterable[tuple[str, Notice]]) -> "list[Warned]":
    """Merge the notices of a kind, each with its protein's name, into one warning, in which numbers become a range."""
    from warpfold.report.report import Warned  # imports torch

    kinds: dict[tuple[Value, ...], dict[tuple[str, str], Notice]] = {}
    for name, notice in found:
        words = (value for key, value in notice.values.items() if isinstance(value, str) and key != "detail")
        kinds.setdefault((notice.kind, *words), {})[name, notice.text] = notice
    warned = []
    for notices in kinds.values():
        all_notices = [*notices.values()]
        details_by_name: dict[str, list[str]] = {}
        parts = _parts(all_notices)
        for (name, _), notice in notices.items():
            compared_parts = zip(_parts([notice]), parts)
            details_by_name.setdefault(name, []).append(
                ", ".join(values[0] for (_, _, values), (_, _, all_values) in compared_parts if len(all_values) > 1)
            )
        if len(details_by_name) == 1:
            warned += [Warned(notice.text, dict.fromkeys(details_by_name, "")) for notice in all_notices]
        else:
            warned.append(
                Warned(_sentence(all_notices), {name: "; ".join(details) for name, details in details_by_name.items()})
            )
    return warned


def _parts(notices: Sequence[Notice]) -> list[tuple[str, str, list[str]]]:
    """Split a sentence into (text before a value, name of the value, distinct values in order)."""
    parts = []
    for literal, name, spec, _ in Formatter().parse(SENTENCES[notices[0].kind]):
        values: list[Any] = list(dict.fromkeys(notice.values.get(name, "") for notice in notices)) if name else []
        if not any(isinstance(value, str) for value in values):
            values.sort()
        parts.append((literal, name or "", list(dict.fromkeys(format(value, spec or "") for value in values))))
    return parts


def _sentence(notices: Sequence[Notice]) -> str:
    """Write the sentence of notices of one kind, without details that differ."""
    text = ""
    for literal, name, values in _parts(notices):
        text += literal
        if name == "detail":
            text += f" ({values[0]})" if len(values) == 1 and values[0] else ""
        elif name:
            text += values[0] if len(values) == 1 else f"{values[0]} to {values[-1]}"
    return text
