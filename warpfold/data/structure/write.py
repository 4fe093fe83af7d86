"""Write structures: mmCIF and PDB text of chains, which gemmi and `read_structure` read back.

Used for predictions (ModelCIF, pLDDT in the B column too) and by the generator of sample proteins.
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase

import numpy as np

from warpfold import __version__
from warpfold.data.structure.chain import Chain
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM_TYPES, RESTYPE_3, RESTYPE_ORDER, UNKNOWN

PDB_CHAINS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
ATOM_LIMIT = 99_999  # five columns for the serial number
# The dictionary that predictions follow; what they have did not change in its later versions.
MODELCIF = ("mmcif_ma.dic", "1.4.2", "https://raw.githubusercontent.com/ihmwg/ModelCIF/master/dist/mmcif_ma.dic")


@dataclass(frozen=True)
class Modelling:
    """How a predicted structure was made, as ModelCIF says it beside pLDDT."""

    details: str | None = None  # of the prediction, such as its recycles and templates
    scores: Mapping[str, float] = field(default_factory=dict)  # of the whole model: "pTM", "ipTM"
    refined_by: tuple[str, str] | None = None  # a program and its version


def write_mmcif(
    name: str,
    chains: Sequence[Chain],
    *,
    b_factors: Sequence[np.ndarray] | None = None,
    method: str | None = None,
    resolution: float | None = None,
    release_date: str | None = None,
    predicted: Modelling | None = None,
) -> str:
    """Return mmCIF text of `chains`: SEQRES, numbering, atoms, and what is known of the experiment.

    b_factors: per chain [N] or [N, 37]; 0 without.  With `predicted` they are pLDDT (0..100), and the file is ModelCIF:
    targets, model, protocol, software, and pLDDT of each residue (the mean of its atoms) and of the whole model.
    `release_date` is YYYY-MM-DD, `resolution` in angstrom.  Positions keep three decimals.  Residues without atoms
    appear in the sequence only.  Errors: ValueError if an array does not fit its chain or a position is not finite.
    """
    bs = _checked_b_factors(chains, b_factors)
    entities = {sequence: str(i + 1) for i, sequence in enumerate(dict.fromkeys(c.sequence for c in chains))}
    letters = itertools.chain.from_iterable(itertools.product(ascii_uppercase, repeat=n) for n in itertools.count(1))
    labels = ["".join(found) for found in itertools.islice(letters, len(chains))]  # A to Z, AA, AB, ...
    block = re.sub(r"[^\x21-\x7e]", "_", name) or "structure"
    parts = [
        f"data_{block}\n#\n",
        _items("entry", [("id", block)]),
        _items("struct", [("entry_id", block), ("title", name)]),
        *_experiment(block, method, resolution, release_date),
        *_sequences(chains, entities, labels),
        _atoms(chains, bs, entities, labels),
    ]
    if predicted is not None:
        parts += _modelling(name, chains, entities, labels, predicted)
        parts += _confidence(chains, bs, labels, predicted.scores)
    return "".join(parts)


def write_pdb(name: str, chains: Sequence[Chain], *, b_factors: Sequence[np.ndarray] | None = None) -> str:
    """Return PDB text of `chains`: TITLE, SEQRES, atoms.  b_factors as in `write_mmcif`.

    Errors: UserError if the format's columns cannot hold the structure (more than 62 chains or 99,999 atoms, chain
    names of two letters, numbers too long for their columns): mmCIF can.
    """
    cure = "the PDB format cannot hold it; write mmCIF"
    bs = _checked_b_factors(chains, b_factors)
    atoms = sum(int((c.mask > 0).sum()) for c in chains)
    if len(chains) > len(PDB_CHAINS):
        raise UserError(f"{name}: {len(chains)} chains, more than {len(PDB_CHAINS)}; {cure}")
    if atoms + len(chains) > ATOM_LIMIT:  # TER records take serial numbers too
        raise UserError(f"{name}: {atoms} atoms, more than {ATOM_LIMIT}; {cure}")
    for chain in chains:
        if chain.id not in PDB_CHAINS or len(chain.id) != 1:
            raise UserError(f"{name}: chain name {chain.id!r} is not one letter or digit; {cure}")
        xyz = chain.positions[chain.mask > 0]
        if xyz.size and (xyz.max() > 9999.999 or xyz.min() < -999.999):
            raise UserError(f"{name}: chain {chain.id} has coordinates beyond eight columns; {cure}")
    title = re.sub(r"[^\x20-\x7e]", "_", name)
    lines = [f"TITLE     {title[:70]}".rstrip()]
    for chain in chains:
        names = [_three_letters(c) for c in chain.sequence]
        lines += [
            f"SEQRES {row + 1:3d} {chain.id} {len(names):4d}  {' '.join(names[13 * row : 13 * row + 13])}"
            for row in range((len(names) + 12) // 13)
        ]
    serial = 0
    for chain, b in zip(chains, bs):
        end = ""
        for i, atom, (x, y, z), b_factor in _each_atom(chain, b):
            serial += 1
            number, code = _author_number(chain, i)
            if not -999 <= number <= 9999:
                raise UserError(f"{name}: residue number {number} of chain {chain.id} is beyond four columns; {cure}")
            residue = f"{_three_letters(chain.sequence[i])} {chain.id}{number:4d}{code or ' '}"
            element = atom[0]
            lines.append(
                f"ATOM  {serial:5d}  {atom:<3} {residue}   {x:8.3f}{y:8.3f}{z:8.3f}"
                f"{1.0:6.2f}{min(b_factor, 999.99):6.2f}          {element:>2}"
            )
            end = f"TER   {serial + 1:5d}      {residue}"
        if end:
            lines.append(end)
            serial += 1
    return "\n".join([*lines, "END", ""])


def _three_letters(letter: str) -> str:
    return RESTYPE_3[RESTYPE_ORDER.get(letter, UNKNOWN)]


def _checked_b_factors(chains: Sequence[Chain], b_factors: Sequence[np.ndarray] | None) -> list[np.ndarray]:
    """Return B factors per chain, [N, 37]; raise ValueError for anything that could not be written correctly."""
    if b_factors is not None and len(b_factors) != len(chains):
        raise ValueError(f"{len(b_factors)} arrays of B factors for {len(chains)} chains")
    if len({chain.id for chain in chains}) != len(chains):
        raise ValueError("two chains of one name")
    checked = []
    for chain, b in zip(chains, b_factors if b_factors is not None else [np.zeros(())] * len(chains)):
        n = len(chain.sequence)
        if chain.positions.shape != (n, 37, 3) or chain.mask.shape != (n, 37):
            raise ValueError(f"chain {chain.id}: positions or mask do not fit its {n} residues")
        if not np.isfinite(chain.positions[chain.mask > 0]).all():
            raise ValueError(f"chain {chain.id}: a position is not finite")
        b = np.asarray(b, dtype=np.float64)
        checked.append(np.broadcast_to(b[:, None] if b.ndim == 1 else b, (n, 37)))
    return checked


def _each_atom(chain: Chain, b: np.ndarray) -> Iterable[tuple[int, str, list[float], float]]:
    """Yield residue index, atom name, position and B factor of every atom that is there, in order."""
    residues, atoms = np.nonzero(chain.mask > 0)
    xyz = chain.positions[residues, atoms].astype(np.float64).tolist()
    names = [ATOM_TYPES[a] for a in atoms]
    yield from zip(residues.tolist(), names, xyz, b[residues, atoms].tolist())


def _author_number(chain: Chain, i: int) -> tuple[int, str]:
    """Return number and insertion code of residue i: the author's, or its place in the sequence if there is none."""
    found = re.fullmatch(r"(-?\d+)([A-Za-z]?)", chain.author_numbers[i])
    return (int(found[1]), found[2]) if found else (i + 1, "")


def _value(value: object) -> str:
    """Return one CIF value, quoted if the syntax asks for it; '?' for None."""
    text = "?" if value is None else re.sub(r"[^\t\n\r -~]", "_", str(value))  # CIF is ASCII
    reserved = re.match(r"data_|save_|(loop_|stop_|global_)\Z", text, re.IGNORECASE | re.ASCII)
    if text and not re.search(r"[\s'\"]", text) and text[0] not in "_#$[];" and not reserved:
        return text
    quote = next((q for q in "'\"" if q not in text), None)
    if quote is None or "\n" in text:
        text = re.sub(r"[\s']", " ", text)
        quote = "'"
    return f"{quote}{text}{quote}"


def _items(category: str, items: Iterable[tuple[str, object]]) -> str:
    return "".join(f"_{category}.{tag} {_value(value)}\n" for tag, value in items) + "#\n"


def _loop(category: str, tags: str, rows: Iterable[Iterable[object]]) -> str:
    return _loop_of_lines(category, tags, [" ".join(map(_value, row)) + "\n" for row in rows])


def _loop_of_lines(category: str, tags: str, lines: Sequence[str]) -> str:
    """Return a loop; nothing where it has no rows, which CIF does not allow."""
    header = "loop_\n" + "".join(f"_{category}.{tag}\n" for tag in tags.split())
    return header + "".join(lines) + "#\n" if lines else ""


def _experiment(block: str, method: str | None, resolution: float | None, release_date: str | None) -> Iterable[str]:
    """Yield method, resolution (in the category of the method) and the date of the first release."""
    if method is not None:
        yield _items("exptl", [("entry_id", block), ("method", method)])
    if resolution is not None and method is not None and "MICROSCOPY" in method.upper():
        yield _items("em_3d_reconstruction", [("entry_id", block), ("id", 1), ("resolution", resolution)])
    elif resolution is not None:
        yield _items("refine", [("entry_id", block), ("pdbx_refine_id", method or "?"), ("ls_d_res_high", resolution)])
    if release_date is not None:
        tags = "ordinal data_content_type major_revision minor_revision revision_date"
        yield _loop("pdbx_audit_revision_history", tags, [(1, "Structure model", 1, 0, release_date)])


def _sequences(chains: Sequence[Chain], entities: dict[str, str], labels: Sequence[str]) -> Iterable[str]:
    """Yield entities, their SEQRES, the chains that have them, and how the author numbers the residues."""
    yield _loop("entity", "id type", [(e, "polymer") for e in entities.values()])
    strands = {s: ",".join(c.id for c in chains if c.sequence == s) for s in entities}
    yield _loop(
        "entity_poly",
        "entity_id type pdbx_seq_one_letter_code_can pdbx_strand_id",
        [(e, "polypeptide(L)", s, strands[s]) for s, e in entities.items()],
    )
    used = sorted({_three_letters(letter) for s in entities for letter in s})
    yield _loop("chem_comp", "id type", [(c, "peptide linking" if c == "GLY" else "L-peptide linking") for c in used])
    yield _loop(
        "entity_poly_seq",
        "entity_id num mon_id hetero",
        [(e, i + 1, _three_letters(letter), "n") for s, e in entities.items() for i, letter in enumerate(s)],
    )
    yield _loop("struct_asym", "id entity_id", [(label, entities[c.sequence]) for c, label in zip(chains, labels)])
    rows = []
    for chain, label in zip(chains, labels):
        present = np.max(chain.mask, axis=1) > 0
        for i, letter in enumerate(chain.sequence):
            number, code = _author_number(chain, i)
            known = bool(present[i] or chain.author_numbers[i])
            mon = _three_letters(letter)
            seen = (number, mon) if present[i] else (None, None)
            rows.append(
                (label, entities[chain.sequence], i + 1, mon, number if known else None, *seen, chain.id, code or ".")
            )
    tags = "asym_id entity_id seq_id mon_id pdb_seq_num auth_seq_num auth_mon_id pdb_strand_id pdb_ins_code"
    yield _loop("pdbx_poly_seq_scheme", tags, rows)


def _atoms(chains: Sequence[Chain], bs: Sequence[np.ndarray], entities: dict[str, str], labels: Sequence[str]) -> str:
    tags = (
        "group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id label_entity_id label_seq_id "
        "pdbx_PDB_ins_code Cartn_x Cartn_y Cartn_z occupancy B_iso_or_equiv auth_seq_id auth_asym_id "
        "pdbx_PDB_model_num"
    )
    lines: list[str] = []
    for chain, b, label in zip(chains, bs, labels):
        author, entity = _value(chain.id), entities[chain.sequence]
        for i, atom, (x, y, z), b_factor in _each_atom(chain, b):
            number, code = _author_number(chain, i)
            monomer = _three_letters(chain.sequence[i])
            lines.append(
                f"ATOM {len(lines) + 1} {atom[0]} {atom} . {monomer} {label} {entity} {i + 1} "
                f"{code or '?'} {x:.3f} {y:.3f} {z:.3f} 1.00 {b_factor:.2f} {number} {author} 1\n"
            )
    elements = sorted({ATOM_TYPES[atom][0] for chain in chains for atom in np.flatnonzero((chain.mask > 0).any(0))})
    types = _loop("atom_type", "symbol", [(element,) for element in elements])
    return types + _loop_of_lines("atom_site", tags, lines)


def _modelling(
    name: str, chains: Sequence[Chain], entities: dict[str, str], labels: Sequence[str], how: Modelling
) -> Iterable[str]:
    """Yield what ModelCIF wants of a computed model beside coordinates and confidence.

    Data 1 to E are the sequences of the E entities, data E + 1 is the model; so are the groups 1 and 2 of them.
    """
    model = len(entities) + 1
    yield _items("audit_conform", zip(("dict_name", "dict_version", "dict_location"), MODELCIF))
    targets = [(e, f"sequence of entity {e}", "target") for e in entities.values()]
    yield _loop("ma_data", "id name content_type", [*targets, (model, name, "model coordinates")])
    groups = [(data, 1 if data < model else 2, data) for data in range(1, model + 1)]
    yield _loop("ma_data_group", "ordinal_id group_id data_id", groups)
    # Where a sequence comes from is not known, and a "reference database" would have to be named.
    yield _loop("ma_target_entity", "entity_id data_id origin", [(e, e, "designed") for e in entities.values()])
    instances = [(label, entities[chain.sequence]) for chain, label in zip(chains, labels)]
    yield _loop("ma_target_entity_instance", "asym_id entity_id", instances)
    programs = [("WarpFold", __version__, "structure prediction by an AlphaFold2-class model")]
    steps = [(1, 1, 1, "modeling", "structure prediction", how.details, 1, 1, 2)]
    if how.refined_by:
        programs.append((*how.refined_by, "restrained minimisation of the energy"))
        steps.append((2, 1, 2, "model refinement", "relaxation in the Amber99SB force field", None, 2, 2, 2))
    software = [(i, *one[:2], "model building", "program", one[2]) for i, one in enumerate(programs, 1)]
    yield _loop("software", "pdbx_ordinal name version classification type description", software)
    yield _loop("ma_software_group", "ordinal_id group_id software_id", [(i, i, i) for i, *_ in software])
    tags = "ordinal_id protocol_id step_id method_type step_name details software_group_id input_data_group_id"
    yield _loop("ma_protocol_step", f"{tags} output_data_group_id", steps)
    yield _loop(
        "ma_model_list", "ordinal_id model_id model_name model_type data_id", [(1, 1, name, "Ab initio model", model)]
    )


def _confidence(
    chains: Sequence[Chain], bs: Sequence[np.ndarray], labels: Sequence[str], scores: Mapping[str, float]
) -> Iterable[str]:
    """Yield pLDDT as ModelCIF has it, per residue and its mean, and what else is known of the whole model."""
    local, values = [], []
    for chain, b, label in zip(chains, bs, labels):
        for i in np.flatnonzero(np.max(chain.mask, axis=1) > 0):
            plddt = float(b[i][chain.mask[i] > 0].mean())
            values.append(plddt)
            residue = (label, int(i) + 1, _three_letters(chain.sequence[i]))
            local.append((len(values), 1, *residue, 2, f"{plddt:.2f}"))
    whole = {1: f"{float(np.mean(values)):.2f}"} if values else {}
    whole |= {3 + i: f"{score:.4f}" for i, score in enumerate(scores.values())}
    metrics = [(1, "global", "pLDDT", "pLDDT", 1), (2, "local", "pLDDT", "pLDDT", 1)]
    metrics += [(3 + i, "global", kind, kind, 1) for i, kind in enumerate(scores)]
    yield _loop("ma_qa_metric", "id mode name type software_group_id", metrics)
    rows = [(i, 1, metric, value) for i, (metric, value) in enumerate(whole.items(), 1)]
    yield _loop("ma_qa_metric_global", "ordinal_id model_id metric_id metric_value", rows)
    tags = "ordinal_id model_id label_asym_id label_seq_id label_comp_id metric_id metric_value"
    yield _loop("ma_qa_metric_local", tags, local)
