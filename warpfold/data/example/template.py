"""Templates: known structures on the residues of a chain (Supp. 1.2.3), and the features that the model sees of them.

What can be prepared ahead, atoms of up to 20 templates, is a `Templates`; which of them an example gets is drawn anew
each time (`choose_templates`).
"""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import torch

from warpfold.batch import FEATURES, Arrays
from warpfold.data.example.hits import Hit
from warpfold.data.formats.alignment import encode
from warpfold.data.similar.pairwise import MIN_IDENTITY, column_map
from warpfold.data.structure.library import Library, MissingStructure
from warpfold.data.structure.mmcif import Chain, Structure, read_structure
from warpfold.errors import UserError
from warpfold.geometry import atoms
from warpfold.geometry.residue import ATOM_ORDER, GAP

MOST_STORED = 20  # the best of the search; training chooses among these (Supp. 1.2.3)
MIN_ALIGNED = 0.1  # of the query's residues: a hit must align more
MIN_RESIDUES = 10  # of a hit
MAX_SUBSEQUENCE = 0.95  # of the query's residues: a longer piece of it is the query
MIN_ATOMS = 5  # that a template must have on the query
MAX_CA_DISTANCE = 150.0  # angstrom, of neighbours in a template's chain (AlphaFold2's data/templates.py)
LOW_IDENTITY = 0.3  # below it an alignment of two sequences alone is doubtful (docs/templates.md)


@dataclass(frozen=True)
class Templates:
    """T structures on the N residues of a chain, best first.  What no template residue stands for is masked."""

    aatype: np.ndarray  # uint8 [T, N], the template's residues: 0-19, 20 = X, 21 = gap
    positions: np.ndarray  # float32 [T, N, 37, 3], angstrom, 0 where masked
    mask: np.ndarray  # uint8 [T, N, 37]
    names: tuple[str, ...]  # [T], such as "1abc_A"
    sum_probs: np.ndarray  # float32 [T], expected number of correctly aligned residues

    def __len__(self) -> int:
        return len(self.names)

    def take(self, start: int, stop: int) -> "Templates":
        """Residues [start, stop) of every template."""
        span = slice(start, stop)
        return Templates(self.aatype[:, span], self.positions[:, span], self.mask[:, span], self.names, self.sum_probs)

    def choose(self, indices: np.ndarray) -> "Templates":
        """The templates at `indices` (int [K]), in that order."""
        return Templates(
            self.aatype[indices],
            self.positions[indices],
            self.mask[indices],
            tuple(self.names[i] for i in indices),
            self.sum_probs[indices],
        )


def join(templates: Sequence[Templates]) -> Templates | None:
    """Templates of one chain, one after another; None for none."""
    if not templates:
        return None
    aatype, positions, mask, sum_probs = (
        np.concatenate([getattr(one, name) for one in templates])
        for name in ("aatype", "positions", "mask", "sum_probs")
    )
    return Templates(aatype, positions, mask, tuple(name for one in templates for name in one.names), sum_probs)


def choose_templates(count: int, most: int, rng: np.random.Generator | None) -> np.ndarray:
    """Which of `count` templates (best first) an example gets: int64 [K], ascending, K <= `most`.

    Training (with `rng`): k = min(uniform[0, n], most) random ones of the n that there are, at most 20 (Supp. 1.2.3),
    so that the model learns to do without.  Inference (`rng` None): the best.
    """
    if rng is None:
        return np.arange(min(count, most))
    count = min(count, MOST_STORED)
    size = min(int(rng.integers(0, count + 1)), most)
    return np.sort(rng.choice(count, size, replace=False)).astype(np.int64)


def template_features(templates: Templates | None, length: int) -> Arrays:
    """The template features of the feature table (`warpfold.batch.FEATURES`); arrays of none without templates.

    `length`: residues of the example.  The pseudo beta is CB, or CA of glycine (Supp. 1.2.9, table 1); it is of the
    template's own residue type, and masked where that atom was not seen.
    """
    if templates is None or not len(templates):
        sizes = {"tmpl": 0, "res": length}
        return {
            name: np.zeros([sizes[axis] if isinstance(axis, str) else axis for axis in feature.axes], feature.dtype)
            for name, feature in FEATURES.items()
            if name.startswith("template_")
        }
    if templates.aatype.shape[1] != length:
        raise ValueError(f"templates of {templates.aatype.shape[1]} residues for an example of {length}")
    aatype, positions = templates.aatype.astype(np.int64), templates.positions
    mask = templates.mask.astype(np.float32)
    codes, xyz, seen = (torch.from_numpy(array) for array in (aatype, positions, mask))
    return {
        "template_aatype": aatype,
        "template_all_atom_positions": positions,
        "template_all_atom_masks": mask,
        "template_pseudo_beta": atoms.pseudo_beta(codes, xyz).numpy(),
        "template_pseudo_beta_mask": atoms.pseudo_beta_mask(codes, seen).numpy(),
        "template_mask": np.ones(len(templates), np.float32),
    }


@dataclass(frozen=True)
class TemplateOutcome:
    """What became of one hit, or of one file that the user gave."""

    name: str  # "1abc_A"; of a hit that was not used, as its file has it
    used: bool
    note: str  # why it was refused, or what is not as expected about it; "" otherwise
    residues: int = 0  # of the query, on which atoms of the template stand
    identity: float = 0.0  # 0 to 1, over the aligned residues
    sum_probs: float | None = None
    missing: bool = False  # refused because there is no file of its structure


def count_refusals(outcomes: Sequence[TemplateOutcome]) -> dict[str, int]:
    """Return how often each reason occurs among what was not used, most often first; reasons without names and
    numbers, such as "came out N, after N"."""
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
    """The `limit` best usable hits of a query, by sum_probs (hits without: as in the file), and what became of each.

    max_date: templates that came out later, or no one knows when, are refused.  exclude: PDB ids, lower case, such as
    the query's own.  Further refused, as AlphaFold2 does (Supp. 1.2.3): hits that align a tenth of the query or less,
    have fewer than 10 residues, or are the query itself (a part of it, of more than 95 %); and of hmmsearch's, whose
    database has every copy of a chain, those that put the same residues on the same places.  A hit that cannot be read
    or placed, or has a jump in its chain, is refused too: no file stops the others.  None in place of no templates.
    """
    kept: list[Templates] = []
    outcomes: list[TemplateOutcome] = []
    seen: dict[bytes, str] = {}
    for hit in sorted(hits, key=lambda hit: -(hit.sum_probs or 0.0)):
        if len(kept) == limit:
            outcomes.append(_refused(hit, "enough better ones are used"))
            continue
        try:
            if reason := _refusal(hit, query, exclude) or _too_new(hit, library, max_date):
                outcomes.append(_refused(hit, reason))
                continue
            template, outcome = _from_hit(query, hit, library.read(hit.pdb_id))
        except UserError as error:
            outcomes.append(_refused(hit, str(error), missing=isinstance(error, MissingStructure)))
            continue
        if hit.sum_probs is None and (twin := seen.get(template.aatype.tobytes())):
            outcomes.append(_refused(hit, f"has the same residues in the same places as {twin}"))
            continue
        seen[template.aatype.tobytes()] = outcome.name
        kept.append(template)
        outcomes.append(outcome)
    return join(kept), outcomes


def _refused(hit: Hit, reason: str, missing: bool = False) -> TemplateOutcome:
    return TemplateOutcome(hit.name, used=False, note=reason, sum_probs=hit.sum_probs, missing=missing)


def _refusal(hit: Hit, query: str, exclude: Collection[str]) -> str | None:
    """Why a hit is refused whatever its structure; the thresholds are AlphaFold2's (Supp. 1.2.3 and its open code)."""
    columns, residues = len(hit.query_index), len(hit.sequence)
    if hit.pdb_id in exclude:
        return "is of the query's own entry"
    if columns <= MIN_ALIGNED * len(query):
        return f"aligns {columns} of the query's {len(query)} residues; more than a tenth is needed"
    if residues < MIN_RESIDUES:
        return f"has {residues} residues; {MIN_RESIDUES} are needed"
    if hit.sequence in query and residues > MAX_SUBSEQUENCE * len(query):
        return f"is the query itself ({residues} of its {len(query)} residues)"
    return None


def _too_new(hit: Hit, library: Library, max_date: date | None) -> str | None:
    if max_date is None:
        return None
    released = library.release_date(hit.pdb_id)
    if released is None:
        return f"has no release date, and none after {max_date} is allowed"
    return f"came out {released}, after {max_date}" if released > max_date else None


def _from_hit(query: str, hit: Hit, structure: Structure) -> tuple[Templates, TemplateOutcome]:
    """A hit's atoms on the query.  Errors: UserError where its sequence or its atoms are not in the structure."""
    chain, places, note = _locate(hit, structure)
    places = places[hit.hit_index]
    known = places >= 0
    name = f"{hit.pdb_id}_{chain.id}"
    template = _put_on(len(query), hit.query_index[known], chain, places[known], name, hit.sum_probs or 0.0)
    return template, _outcome(query, template, note, hit.sum_probs)


def _locate(hit: Hit, structure: Structure) -> tuple[Chain, np.ndarray, str]:
    """The chain of a hit, where each residue of the hit's sequence stands in it (int64, -1 nowhere), and a note.

    First the chain that the hit names, then the others; X stands for any residue.  Where none holds the sequence as it
    is, it is aligned to that chain (to all, if there is none of the name), and must be 90 % identical (Supp. 1.2.3).
    """
    named = [structure.chains[hit.chain]] if hit.chain in structure.chains else []
    others = [chain for chain in structure.chains.values() if chain.id != hit.chain]
    pattern = re.compile(hit.sequence.replace("X", "."))
    for chain in [*named, *others]:
        # A repeat may stand there twice: where the hit says first.
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
    """A structure that the user gives, whatever its name, date and likeness, aligned to the query.

    mmCIF or PDB, gz or not.  chain: the author's name; None takes the one with most residues equal to the query's.
    The alignment is global, by BLOSUM62 (`pairwise.column_map`), of the query with the chain's whole sequence.
    Errors: UserError for a file that cannot be used, a chain that is not there, or nothing aligned that was seen.
    """
    structure = read_structure(path)
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
    notes = [f"chain {best.id} of {', '.join(structure.chains)}"] if len(maps) > 1 else []
    notes += ["few residues are equal, so the alignment is doubtful"] if identity < LOW_IDENTITY else []
    return template, _outcome(query, template, "; ".join(notes), None)


def _put_on(
    length: int, query_index: np.ndarray, chain: Chain, places: np.ndarray, name: str, sum_probs: float
) -> Templates:
    """Return one template: residue `places[c]` of a chain on residue `query_index[c]` of a query of `length`.

    Errors: UserError for a chain with a jump in it, or too few atoms.
    """
    _refuse_jumps(chain, name)
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


def _refuse_jumps(chain: Chain, name: str) -> None:
    """Raise UserError if two neighbours in the chain, both seen, have their CA too far apart.

    As AlphaFold2's `_check_residue_distances` (data/templates.py), of the whole chain and not of its aligned part.
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


def _outcome(query: str, template: Templates, note: str, sum_probs: float | None) -> TemplateOutcome:
    """The report of a template that is used."""
    aligned = template.aatype[0] != GAP
    return TemplateOutcome(
        name=template.names[0],
        used=True,
        note=note,
        residues=int(template.mask[0].any(1).sum()),
        identity=round(float((encode(query) == template.aatype[0])[aligned].mean()), 4),
        sum_probs=sum_probs,
    )
