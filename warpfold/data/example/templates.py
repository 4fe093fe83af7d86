"""Templates from a search's hits or from files: known structures aligned to the residues of a chain (Supp. 1.2.3).

The atoms of up to 20 templates are prepared here; which of them an example gets is drawn anew each time
(`data/features/choose.py`).
"""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np

from warpfold.data.example.hits import Hit
from warpfold.data.example.raw_example import MOST_STORED, Templates, join
from warpfold.data.formats.alignment import encode
from warpfold.data.similar.pairwise import MIN_IDENTITY, column_map
from warpfold.data.structure.chain import Chain, Structure
from warpfold.data.structure.library import Library, MissingStructure
from warpfold.data.structure.mmcif import read_structure
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM_ORDER, GAP

MIN_ALIGNED = 0.1  # of the query's residues: a hit must align more
MIN_RESIDUES = 10  # of a hit
MAX_SUBSEQUENCE = 0.95  # of the query's residues: a longer piece of it is the query
MIN_ATOMS = 5  # that a template must have on the query
MAX_CA_DISTANCE = 150.0  # angstrom, of neighbours in a template's chain (AlphaFold2's data/templates.py)
LOW_IDENTITY = 0.3  # below it an alignment of two sequences alone is doubtful (docs/howto/alignments.md)


@dataclass(frozen=True)
class TemplateOutcome:
    """What became of one hit, or of one file that the user gave."""

    name: str  # "1abc_A"; if it was not used, the hit's name in its file
    used: bool
    note: str  # why it was refused, or what is unusual about it; may be empty
    residues: int = 0  # of the query that have atoms of the template
    identity: float = 0.0  # 0 to 1, over the aligned residues
    sum_probs: float | None = None
    missing: bool = False  # refused because there is no file of its structure
    chains: tuple[str, ...] = ()  # of a complex: those that it was offered to


def count_refusals(outcomes: Sequence[TemplateOutcome]) -> dict[str, int]:
    """Count the reasons for refusals, the most frequent first.

    Reasons that differ in names and numbers only are counted together: "came out N, after N".
    """
    notes = [one.note.rpartition(": ")[2] if one.missing else one.note for one in outcomes if not one.used]
    kinds = (re.sub(r"\b\d[\w-]*", "N", re.sub(r"^\S*/\S*: ", "", note)) for note in notes)
    return dict(Counter(kinds).most_common())


def templates_from_hits(
    query: str,
    hits: Sequence[Hit],
    library: Library,
    max_date: date | None = None,
    limit: int = MOST_STORED,
    exclude: Collection[str] = (),
) -> tuple[Templates | None, list[TemplateOutcome]]:
    """Return the `limit` best usable hits of a query (None without any) and the outcome of each hit.

    Hits are tried in the order of their sum_probs, those without in the order of the file.  max_date: templates that
    were released later, or whose date is unknown, are refused.  exclude: PDB ids, lower case, such as the query's own.
    Also refused, as in AlphaFold2 (Supp. 1.2.3): hits that align a tenth of the query or less, have fewer than 10
    residues, or are the query itself (more than 95 % of it); and hmmsearch's hits, whose database has every copy of a
    chain, if they put the same residues on the same places as a better one.  A hit that cannot be read or placed, or
    whose chain has a jump, is refused as well: one bad file does not stop the others.
    """
    kept: list[Templates] = []
    outcomes: list[TemplateOutcome] = []
    seen: dict[bytes, str] = {}
    for hit in sorted(hits, key=lambda hit: -(hit.sum_probs or 0.0)):
        if len(kept) == limit:
            outcomes.append(_refused(hit, "enough better ones are used"))
            continue
        try:
            entry = library.current(hit.pdb_id)
            if entry is None or (reason := _refusal(hit, entry, query, exclude, library, max_date)):
                outcomes.append(_refused(hit, "its entry was removed from the PDB" if entry is None else reason or ""))
                continue
            chain, places, note = _locate(hit, library.read(entry))
            if entry != hit.pdb_id:
                note = "; ".join(filter(None, [f"of {entry}, which replaced {hit.pdb_id}", note]))
            places = places[hit.hit_index]
            known = places >= 0
            name = f"{entry}_{chain.id}"
            template = _put_on(len(query), hit.query_index[known], chain, places[known], name, hit.sum_probs or 0.0)
        except UserError as error:
            outcomes.append(_refused(hit, str(error), missing=isinstance(error, MissingStructure)))
            continue
        if hit.sum_probs is None and (twin := seen.get(template.aatype.tobytes())):
            outcomes.append(_refused(hit, f"has the same residues in the same places as {twin}"))
            continue
        seen[template.aatype.tobytes()] = name
        kept.append(template)
        outcomes.append(_used(query, template, note, hit.sum_probs))
    return join(kept), outcomes


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


def _refusal(
    hit: Hit, entry: str, query: str, exclude: Collection[str], library: Library, max_date: date | None
) -> str | None:
    """Return why a hit is refused before its atoms are looked at, or None.  entry: the one of its structure.

    The thresholds are AlphaFold2's (Supp. 1.2.3 and its open code).
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
        return f"has no release date, and none after {max_date} is allowed"
    return f"came out {released}, after {max_date}" if released > max_date else None


def _locate(hit: Hit, structure: Structure) -> tuple[Chain, np.ndarray, str]:
    """Find a hit's sequence in a structure: its chain, each residue's place in it (int64, -1 for none), and a note.

    The chain that the hit names is searched first, then the others; X matches any residue.  If no chain has exactly
    this sequence, it is aligned to the named chain (to all, if that name does not exist), and must be 90 % identical
    (Supp. 1.2.3).
    """
    named = [structure.chains[hit.chain]] if hit.chain in structure.chains else []
    others = [chain for chain in structure.chains.values() if chain.id != hit.chain]
    pattern = re.compile(hit.sequence.replace("X", "."))
    for chain in [*named, *others]:
        # The sequence may occur twice, as a repeat: the place that the hit names comes first.
        found = pattern.match(chain.sequence, hit.start) or pattern.search(chain.sequence)
        if found:
            expected = hit.chain in ("", chain.id)
            note = "" if expected else f"of chain {chain.id}, which has the hit's sequence"
            return chain, np.arange(found.start(), found.end()), note
    maps = [(chain, *column_map(chain.sequence, hit.sequence)) for chain in named or others]
    chain, places, identity = max(maps, key=lambda found: found[2] * (found[1] >= 0).mean())
    placed = (places >= 0).mean()
    if min(identity, placed) < MIN_IDENTITY:
        raise UserError(
            f"{structure.id}: chain {chain.id} has another sequence than the hit: {placed:.0%} aligned, {identity:.0%} "
            f"identical ({MIN_IDENTITY:.0%} are needed); give the entry's present file"
        )
    return chain, places, f"aligned anew to chain {chain.id}, {identity:.0%} identical"


def template_from_file(query: str, path: str | Path, chain: str | None = None) -> tuple[Templates, TemplateOutcome]:
    """Align a structure that the user gives to the query; its name, date and similarity do not matter.

    mmCIF or PDB, gz or not.  chain: the author's name; None: the one with most residues equal to the query's.
    The query is aligned globally with the chain's whole sequence, by BLOSUM62 (`pairwise.column_map`).
    Errors: UserError for a file that cannot be used, a chain that is not there, or too few aligned atoms.
    """
    structure = read_structure(path)
    structure.check_placed(str(path))
    if chain is not None and chain not in structure.chains:
        why = structure.dropped.get(chain)
        raise UserError(
            f"{path}: {f'chain {chain} cannot be used ({why})' if why else f'has no protein chain {chain}'}; "
            f"choose from {', '.join(structure.chains)}"
        )
    chains = structure.chains.values() if chain is None else [structure.chains[chain]]
    maps = [(one, column_map(one.sequence, query, homologs=True)) for one in chains]

    def equal_and_seen(found: tuple[Chain, tuple[np.ndarray, float]]) -> int:
        one, (places, _) = found
        seen = one.mask.max(axis=1) > 0
        pairs = zip(places.tolist(), query)
        return sum(place >= 0 and one.sequence[place] == letter and bool(seen[place]) for place, letter in pairs)

    best, (places, identity) = max(maps, key=equal_and_seen)
    entry = Path(path).name.removesuffix(".gz").rpartition(".")[0] or Path(path).name
    known = places >= 0
    try:
        template = _put_on(len(query), np.flatnonzero(known), best, places[known], f"{entry}_{best.id}", known.sum())
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    notes = [*structure.notes]
    notes += [f"chain {best.id} of {', '.join(structure.chains)}"] if len(maps) > 1 else []
    notes += ["few residues are equal, so the alignment is doubtful"] if identity < LOW_IDENTITY else []
    return template, _used(query, template, "; ".join(notes), None)


def _put_on(
    length: int, query_index: np.ndarray, chain: Chain, places: np.ndarray, name: str, sum_probs: float
) -> Templates:
    """Return one template: residue `places[c]` of a chain on residue `query_index[c]` of a query of `length`.

    Errors: UserError for too few atoms, or if two neighbours in the chain, both seen, have their CA too far apart: as
    AlphaFold2's `_check_residue_distances` (data/templates.py), of the whole chain and not of its aligned part.
    """
    ca = ATOM_ORDER["CA"]
    seen = chain.mask[:, ca] > 0
    jumps = np.linalg.norm(np.diff(chain.positions[:, ca].astype(np.float64), axis=0), axis=-1)
    jumps[~(seen[1:] & seen[:-1])] = 0.0
    if jumps.max(initial=0.0) > MAX_CA_DISTANCE:
        place = int(jumps.argmax())
        raise UserError(
            f"{name}: the CA of residues {place + 1} and {place + 2} of its sequence are {jumps[place]:.0f} angstrom "
            f"apart ({MAX_CA_DISTANCE:.0f} at most); choose another template"
        )
    aatype = np.full((1, length), GAP, np.uint8)
    positions = np.zeros((1, length, 37, 3), np.float32)
    mask = np.zeros((1, length, 37), np.uint8)
    aatype[0, query_index] = encode(chain.sequence, name)[places]
    positions[0, query_index] = chain.positions[places]
    mask[0, query_index] = chain.mask[places] > 0
    if mask.sum() < MIN_ATOMS:
        aligned = f"{len(places)} of its residues are aligned"
        raise UserError(f"{name}: {aligned}, with fewer than {MIN_ATOMS} atoms; choose another template")
    return Templates(aatype, positions, mask, (name,), np.array([sum_probs], np.float32))
