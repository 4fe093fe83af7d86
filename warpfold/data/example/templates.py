"""Build templates from template hits or from files: structures aligned to the residues of a chain (Supp. 1.2.3).

This module prepares the atoms of up to 20 templates. `data/features/choose.py` samples from them for each example.
"""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np

from warpfold.data.example.hits import Hit
from warpfold.data.example.raw_example import MAX_TEMPLATES, Templates, concatenate_templates
from warpfold.data.formats.alignment import encode
from warpfold.data.similar.pairwise import MIN_IDENTITY, column_map
from warpfold.data.structure.chain import Chain, Structure
from warpfold.data.structure.library import Library, MissingStructure
from warpfold.data.structure.mmcif import read_structure
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM_ORDER, GAP

# A hit must align more than this fraction of the query's residues.
MIN_ALIGNED = 0.1
MIN_RESIDUES = 10  # of a hit
# A hit that is a longer fraction of the query counts as the query itself.
MAX_SUBSEQUENCE = 0.95
MIN_ATOMS = 5  # of a template on the query
# Largest distance in angstrom between neighbours in a template's chain (AlphaFold2's data/templates.py).
MAX_CA_DISTANCE = 150.0
# An alignment of only two sequences with a lower identity is doubtful (docs/howto/alignments.md).
LOW_IDENTITY = 0.3


@dataclass(frozen=True)
class TemplateOutcome:
    """The result of a template hit or of a user's template file.

    name: "1abc_A"; if it was not used, the hit's name in its file. note: the reason for a refusal, or a remark; may be
    empty. residues: number of query residues with template atoms. identity: 0 to 1, over the aligned residues. missing:
    refused because its structure has no file. chains: chains of a complex for which it was considered.
    """

    name: str
    used: bool
    note: str
    residues: int = 0
    identity: float = 0.0
    sum_probs: float | None = None
    missing: bool = False
    chains: tuple[str, ...] = ()


def count_refusals(outcomes: Sequence[TemplateOutcome]) -> dict[str, int]:
    """Count the reasons for refusals, most frequent first.

    Reasons that differ only in names and numbers are counted together: "released N, after N".
    """
    refused = [outcome for outcome in outcomes if not outcome.used]
    notes = [outcome.note.rpartition(": ")[2] if outcome.missing else outcome.note for outcome in refused]
    kinds = (re.sub(r"\b\d[\w-]*", "N", re.sub(r"^\S*/\S*: ", "", note)) for note in notes)
    return dict(Counter(kinds).most_common())


def templates_from_hits(
    query: str,
    hits: Sequence[Hit],
    library: Library,
    max_date: date | None = None,
    limit: int = MAX_TEMPLATES,
    exclude: Collection[str] = (),
) -> tuple[Templates | None, list[TemplateOutcome]]:
    """Build templates of the `limit` best usable hits of a query. Returns them (None if there are none), and outcomes.

    Hits are tried by descending sum_probs; hits without it in file order. max_date: refuse templates that were released
    later or have no date. exclude: refuse these PDB ids (lower case), such as the query's own.
    As in AlphaFold2 (Supp. 1.2.3), hits are also refused if they align at most a tenth of the query, have fewer than 10
    residues, or are more than 95 % of the query itself. Hits of hmmsearch, whose database contains every copy of a
    chain, are refused if they place the same residues as a better hit. An unreadable structure, a hit that does not
    match it, and a chain with a jump lead to a refusal of that hit only.
    """
    used: list[Templates] = []
    outcomes: list[TemplateOutcome] = []
    used_sequences: dict[bytes, str] = {}
    for hit in sorted(hits, key=lambda hit: -(hit.sum_probs or 0.0)):
        if len(used) == limit:
            outcomes.append(_refused(hit, "enough better templates are used"))
            continue
        try:
            entry = library.current(hit.pdb_id)
            if entry is None or (reason := _refusal_reason(hit, entry, query, exclude, library, max_date)):
                outcomes.append(_refused(hit, "its entry was removed from the PDB" if entry is None else reason or ""))
                continue
            chain, residues, note = _locate_hit(hit, library.read(entry))
            if entry != hit.pdb_id:
                note = "; ".join(filter(None, [f"of {entry}, which replaced {hit.pdb_id}", note]))
            residues = residues[hit.hit_index]
            is_in_chain = residues >= 0
            name = f"{entry}_{chain.id}"
            query_index, residues = hit.query_index[is_in_chain], residues[is_in_chain]
            template = _make_template(len(query), query_index, chain, residues, name, hit.sum_probs or 0.0)
        except UserError as error:
            outcomes.append(_refused(hit, str(error), missing=isinstance(error, MissingStructure)))
            continue
        if hit.sum_probs is None and (twin := used_sequences.get(template.aatype.tobytes())):
            outcomes.append(_refused(hit, f"has the same aligned residues as {twin}"))
            continue
        used_sequences[template.aatype.tobytes()] = name
        used.append(template)
        outcomes.append(_used(query, template, note, hit.sum_probs))
    return concatenate_templates(used), outcomes


def _refused(hit: Hit, reason: str, missing: bool = False) -> TemplateOutcome:
    return TemplateOutcome(hit.name, used=False, note=reason, sum_probs=hit.sum_probs, missing=missing)


def _used(query: str, template: Templates, note: str, sum_probs: float | None) -> TemplateOutcome:
    aligned = template.aatype[0] != GAP
    return TemplateOutcome(
        name=template.names[0],
        used=True,
        note=note,
        residues=int(template.mask[0].any(1).sum()),
        identity=round(float((encode(query) == template.aatype[0])[aligned].mean()), 4),
        sum_probs=sum_probs,
    )


def _refusal_reason(
    hit: Hit, entry: str, query: str, exclude: Collection[str], library: Library, max_date: date | None
) -> str | None:
    """Return the reason to refuse a hit without reading its atoms, or None. entry: the PDB id of its structure.

    The thresholds are those of AlphaFold2 (Supp. 1.2.3 and its source code).
    """
    columns, residues = len(hit.query_index), len(hit.sequence)
    if entry in exclude:
        return "is of the query's own entry"
    if columns <= MIN_ALIGNED * len(query):
        return f"aligns {columns} of the query's {len(query)} residues; more than a tenth is needed"
    if residues < MIN_RESIDUES:
        return f"has {residues} residues; {MIN_RESIDUES} are needed"
    if hit.sequence in query and residues > MAX_SUBSEQUENCE * len(query):
        return f"is the query itself ({residues} of its {len(query)} residues)"
    if max_date is None:
        return None
    released = library.release_date(entry)
    if released is None:
        return f"has no release date, but must not be released after {max_date}"
    return f"released {released}, after {max_date}" if released > max_date else None


def _locate_hit(hit: Hit, structure: Structure) -> tuple[Chain, np.ndarray, str]:
    """Find a hit's sequence in a structure. Returns its chain, residue indices in it (int64, -1 for none), and a note.

    The chain named by the hit is searched first, then the others; X matches any residue. If no chain contains this
    sequence, it is aligned to the named chain (to all chains if there is none of that name) and must be 90 % identical
    (Supp. 1.2.3).
    """
    named = [structure.chains[hit.chain]] if hit.chain in structure.chains else []
    other_chains = [chain for chain in structure.chains.values() if chain.id != hit.chain]
    pattern = re.compile(hit.sequence.replace("X", "."))
    for chain in [*named, *other_chains]:
        # The sequence may be repeated in the chain, so the position given by the hit is tried first.
        match = pattern.match(chain.sequence, hit.start) or pattern.search(chain.sequence)
        if match:
            is_named = hit.chain in ("", chain.id)
            note = "" if is_named else f"of chain {chain.id}, which has the hit's sequence"
            return chain, np.arange(match.start(), match.end()), note
    maps = [(chain, *column_map(chain.sequence, hit.sequence)) for chain in named or other_chains]
    chain, residues, identity = max(maps, key=lambda candidate: candidate[2] * np.count_nonzero(candidate[1] >= 0))
    aligned = (residues >= 0).mean()
    if min(identity, aligned) < MIN_IDENTITY:
        raise UserError(
            f"{structure.id}: chain {chain.id} has another sequence than the hit: {aligned:.0%} aligned, "
            f"{identity:.0%} identical ({MIN_IDENTITY:.0%} are needed). Fetch the current file of the entry."
        )
    return chain, residues, f"realigned to chain {chain.id}, {identity:.0%} identical"


def template_from_file(query: str, path: str | Path, chain: str | None = None) -> tuple[Templates, TemplateOutcome]:
    """Build a template from a user's structure file (mmCIF or PDB, gzipped or not) of any name, date and identity.

    The query is aligned globally with the chain's whole sequence by BLOSUM62 (`pairwise.column_map`). chain: the
    author's name; None selects the chain with most observed residues equal to the query's.
    Raises UserError for an unusable file, a missing chain, or too few aligned atoms.
    """
    structure = read_structure(path)
    structure.check_placed(str(path))
    if chain is not None and chain not in structure.chains:
        reason = structure.dropped.get(chain)
        raise UserError(
            f"{path}: {f'chain {chain} cannot be used ({reason})' if reason else f'has no protein chain {chain}'}. "
            f"Choose from {', '.join(structure.chains)}."
        )
    chains = structure.chains.values() if chain is None else [structure.chains[chain]]
    maps = [(candidate, column_map(candidate.sequence, query, homologs=True)) for candidate in chains]

    def count_equal(mapped: tuple[Chain, tuple[np.ndarray, float]]) -> int:
        """Count the observed residues that equal the query's."""
        candidate, (residues, _) = mapped
        is_observed = candidate.mask.max(axis=1) > 0
        pairs = zip(residues.tolist(), query)
        return sum(i >= 0 and candidate.sequence[i] == letter and bool(is_observed[i]) for i, letter in pairs)

    best, (residues, identity) = max(maps, key=count_equal)
    entry = Path(path).name.removesuffix(".gz").rpartition(".")[0] or Path(path).name
    aligned = np.flatnonzero(residues >= 0)
    name = f"{entry}_{best.id}"
    try:
        template = _make_template(len(query), aligned, best, residues[aligned], name, len(aligned))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    notes = [*structure.notes]
    notes += [f"chain {best.id} of {', '.join(structure.chains)}"] if len(maps) > 1 else []
    notes += ["few residues are identical, so the alignment is doubtful"] if identity < LOW_IDENTITY else []
    return template, _used(query, template, "; ".join(notes), None)


def _make_template(
    length: int, query_index: np.ndarray, chain: Chain, residues: np.ndarray, name: str, sum_probs: float
) -> Templates:
    """Build a template with residue `residues[c]` of a chain on residue `query_index[c]` of a query of `length`.

    Raises UserError for too few atoms, and if the CA of two observed neighbours in the chain are too far apart. As in
    AlphaFold2's `_check_residue_distances` (data/templates.py), the whole chain is checked, not only the aligned
    residues.
    """
    ca = ATOM_ORDER["CA"]
    has_ca = chain.mask[:, ca] > 0
    jumps = np.linalg.norm(np.diff(chain.positions[:, ca].astype(np.float64), axis=0), axis=-1)
    jumps[~(has_ca[1:] & has_ca[:-1])] = 0.0
    if jumps.max(initial=0.0) > MAX_CA_DISTANCE:
        i = int(jumps.argmax())
        raise UserError(
            f"{name}: the CA of residues {i + 1} and {i + 2} of its sequence are {jumps[i]:.0f} angstrom apart "
            f"({MAX_CA_DISTANCE:.0f} at most). Choose another template."
        )
    aatype = np.full((1, length), GAP, np.uint8)
    positions = np.zeros((1, length, 37, 3), np.float32)
    mask = np.zeros((1, length, 37), np.uint8)
    aatype[0, query_index] = encode(chain.sequence, name)[residues]
    positions[0, query_index] = chain.positions[residues]
    mask[0, query_index] = chain.mask[residues] > 0
    if mask.sum() < MIN_ATOMS:
        raise UserError(
            f"{name}: {len(residues)} of its residues are aligned, with fewer than {MIN_ATOMS} atoms. Choose another "
            "template."
        )
    return Templates(aatype, positions, mask, (name,), np.array([sum_probs], np.float32))
