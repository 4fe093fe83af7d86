"""Write chains as mmCIF and PDB text, which gemmi and `read_structure` can read.

Predictions are written as ModelCIF, with pLDDT also in the B column. The generator of sample proteins uses this module
too.
"""

import itertools
import re
import textwrap
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
# The dictionary of predictions. Later versions did not change the items that are written here.
MODELCIF = ("mmcif_ma.dic", "1.4.2", "https://raw.githubusercontent.com/ihmwg/ModelCIF/master/dist/mmcif_ma.dic")


@dataclass(frozen=True)
class Modelling:
    """Provenance of a predicted structure for ModelCIF.

    details: description of the prediction, such as recycles and templates. scores: scores of the whole model ("pTM",
    "ipTM"). refined_by: name and version of the program that refined the model.
    """

    details: str | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    refined_by: tuple[str, str] | None = None


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
    """Write chains as mmCIF: SEQRES, numbering, atoms, and the metadata of the experiment.

    b_factors: [N] or [N, 37] per chain, 0 by default. release_date: YYYY-MM-DD. resolution: angstrom.
    predicted: write ModelCIF with targets, model, protocol, software, and pLDDT (0 to 100, from `b_factors`) of each
    residue (the mean of its atoms) and of the whole model.
    Positions have three decimals. Residues without atoms appear only in the sequence. Raises ValueError if an array
    does not fit its chain or a position is not finite.
    """
    bs = _check_b_factors(chains, b_factors)
    entities = {sequence: str(i + 1) for i, sequence in enumerate(dict.fromkeys(c.sequence for c in chains))}
    letters = itertools.chain.from_iterable(itertools.product(ascii_uppercase, repeat=n) for n in itertools.count(1))
    labels = ["".join(label) for label in itertools.islice(letters, len(chains))]  # A to Z, AA, AB
    block = re.sub(r"[^\x21-\x7e]", "_", name) or "structure"
    parts = [
        f"data_{block}\n#\n",
        _items("entry", [("id", block)]),
        _items("struct", [("entry_id", block), ("title", name)]),
    ]
    if method is not None:
        parts.append(_items("exptl", [("entry_id", block), ("method", method)]))
    if resolution is not None and method is not None and "MICROSCOPY" in method.upper():
        items = [("entry_id", block), ("id", 1), ("resolution", resolution)]
        parts.append(_items("em_3d_reconstruction", items))
    elif resolution is not None:
        items = [("entry_id", block), ("pdbx_refine_id", method or "?"), ("ls_d_res_high", resolution)]
        parts.append(_items("refine", items))
    if release_date is not None:
        tags = "ordinal data_content_type major_revision minor_revision revision_date"
        parts.append(_loop("pdbx_audit_revision_history", tags, [(1, "Structure model", 1, 0, release_date)]))
    # The entities, their SEQRES, their chains, and the author's residue numbers.
    strands = {s: ",".join(c.id for c in chains if c.sequence == s) for s in entities}
    names = {letter: _three_letters(letter) for s in entities for letter in s}
    kinds = {mon: "peptide linking" if mon == "GLY" else "L-peptide linking" for mon in sorted({*names.values()})}
    numbering = []
    for chain, label in zip(chains, labels):
        present = np.max(chain.mask, axis=1) > 0
        for i, letter in enumerate(chain.sequence):
            (number, code), mon = _author_number(chain, i), names[letter]
            has_number = bool(present[i] or chain.author_numbers[i])
            author = (number if has_number else None, *((number, mon) if present[i] else (None, None)))
            numbering.append((label, entities[chain.sequence], i + 1, mon, *author, chain.id, code or "."))
    parts += [
        _loop("entity", "id type", [(e, "polymer") for e in entities.values()]),
        _loop(
            "entity_poly",
            "entity_id type pdbx_seq_one_letter_code_can pdbx_strand_id",
            [(e, "polypeptide(L)", s, strands[s]) for s, e in entities.items()],
        ),
        _loop("chem_comp", "id type", kinds.items()),
        _loop(
            "entity_poly_seq",
            "entity_id num mon_id hetero",
            [(e, i + 1, names[letter], "n") for s, e in entities.items() for i, letter in enumerate(s)],
        ),
        _loop("struct_asym", "id entity_id", [(label, entities[c.sequence]) for c, label in zip(chains, labels)]),
        _loop(
            "pdbx_poly_seq_scheme",
            "asym_id entity_id seq_id mon_id pdb_seq_num auth_seq_num auth_mon_id pdb_strand_id pdb_ins_code",
            numbering,
        ),
    ]
    atoms: list[str] = []
    for chain, b, label in zip(chains, bs, labels):
        author_name, entity = _value(chain.id), entities[chain.sequence]
        for i, atom, (x, y, z), b_factor in _list_atoms(chain, b):
            number, code = _author_number(chain, i)
            atoms.append(
                f"ATOM {len(atoms) + 1} {atom[0]} {atom} . {names[chain.sequence[i]]} {label} {entity} {i + 1} "
                f"{code or '?'} {x:.3f} {y:.3f} {z:.3f} 1.00 {b_factor:.2f} {number} {author_name} 1\n"
            )
    elements = sorted({ATOM_TYPES[atom][0] for chain in chains for atom in np.flatnonzero((chain.mask > 0).any(0))})
    tags = (
        "group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id label_entity_id label_seq_id "
        "pdbx_PDB_ins_code Cartn_x Cartn_y Cartn_z occupancy B_iso_or_equiv auth_seq_id auth_asym_id "
        "pdbx_PDB_model_num"
    )
    parts += [_loop("atom_type", "symbol", zip(elements)), _loop_of_lines("atom_site", tags, atoms)]
    if predicted is not None:
        parts += _model_categories(name, chains, bs, entities, labels, predicted)
    return "".join(parts)


def write_pdb(
    name: str, chains: Sequence[Chain], *, b_factors: Sequence[np.ndarray] | None = None, remarks: Sequence[str] = ()
) -> str:
    """Write chains as PDB text: TITLE, REMARK, SEQRES and atoms.

    b_factors: as in `write_mmcif`. remarks: provenance, wrapped into lines of REMARK 250 (other types of study).
    Raises UserError if the structure exceeds the columns of the format: more than 62 chains or 99,999 atoms, chain
    names of two letters, or numbers too long for their columns. Write such structures as mmCIF.
    """
    remedy = "the PDB format cannot hold it. Write mmCIF."
    bs = _check_b_factors(chains, b_factors)
    atoms = sum(int((c.mask > 0).sum()) for c in chains)
    if len(chains) > len(PDB_CHAINS):
        raise UserError(f"{name}: {len(chains)} chains, more than {len(PDB_CHAINS)}; {remedy}")
    # TER records have serial numbers too.
    if atoms + len(chains) > ATOM_LIMIT:
        raise UserError(f"{name}: {atoms} atoms, more than {ATOM_LIMIT}; {remedy}")
    for chain in chains:
        if chain.id not in PDB_CHAINS or len(chain.id) != 1:
            raise UserError(f"{name}: chain name {chain.id!r} is not one letter or digit; {remedy}")
        xyz = chain.positions[chain.mask > 0]
        if xyz.size and (xyz.max() > 9999.999 or xyz.min() < -999.999):
            raise UserError(f"{name}: chain {chain.id} has coordinates beyond eight columns; {remedy}")
    title = re.sub(r"[^\x20-\x7e]", "_", name)
    lines = [f"TITLE     {title[:70]}".rstrip()]
    for remark in remarks:
        lines += [f"REMARK 250 {line}" for line in textwrap.wrap(re.sub(r"[^\x20-\x7e]", "_", remark), 69)]
    for chain in chains:
        names = [_three_letters(c) for c in chain.sequence]
        lines += [
            f"SEQRES {row + 1:3d} {chain.id} {len(names):4d}  {' '.join(names[13 * row : 13 * row + 13])}"
            for row in range((len(names) + 12) // 13)
        ]
    serial = 0
    for chain, b in zip(chains, bs):
        end = ""
        for i, atom, (x, y, z), b_factor in _list_atoms(chain, b):
            serial += 1
            number, code = _author_number(chain, i)
            if not -999 <= number <= 9999:
                raise UserError(f"{name}: residue number {number} of chain {chain.id} is beyond four columns; {remedy}")
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


def move_atoms(text: str, rotation: np.ndarray, translation: np.ndarray) -> str:
    """Move the atoms of a file of `write_mmcif` or `write_pdb` to `x @ rotation.T + translation`.

    rotation: [3, 3]. translation: [3], angstrom. Raises UserError if PDB columns cannot hold a new position.
    """
    lines, is_mmcif = text.split("\n"), text.startswith("data_")
    for i, line in enumerate(lines):
        if not line.startswith("ATOM "):
            continue
        words = line.split(" ") if is_mmcif else [line[start : start + 8] for start in (30, 38, 46)]
        xyz = np.array(words[10:13] if is_mmcif else words, np.float64) @ rotation.T + translation
        if is_mmcif:
            lines[i] = " ".join([*words[:10], *(f"{x:.3f}" for x in xyz), *words[13:]])
        elif xyz.max() > 9999.999 or xyz.min() < -999.999:
            raise UserError("a moved atom is beyond eight columns; the PDB format cannot hold it. Write mmCIF.")
        else:
            lines[i] = line[:30] + "".join(f"{x:8.3f}" for x in xyz) + line[54:]
    return "\n".join(lines)


def _three_letters(letter: str) -> str:
    """Convert a one-letter residue code to three letters; unknown letters become UNK."""
    return RESTYPE_3[RESTYPE_ORDER.get(letter, UNKNOWN)]


def _check_b_factors(chains: Sequence[Chain], b_factors: Sequence[np.ndarray] | None) -> list[np.ndarray]:
    """Expand the B factors of each chain to [N, 37]. Raises ValueError for arrays that cannot be written correctly."""
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


def _list_atoms(chain: Chain, b: np.ndarray) -> Iterable[tuple[int, str, list[float], float]]:
    """Yield residue index, atom name, position and B factor of each unmasked atom, in order."""
    residues, atoms = np.nonzero(chain.mask > 0)
    xyz = chain.positions[residues, atoms].astype(np.float64).tolist()
    names = [ATOM_TYPES[a] for a in atoms]
    yield from zip(residues.tolist(), names, xyz, b[residues, atoms].tolist())


def _author_number(chain: Chain, i: int) -> tuple[int, str]:
    """Return the author's number and insertion code of residue i, or its position in the sequence from 1."""
    match = re.fullmatch(r"(-?\d+)([A-Za-z]?)", chain.author_numbers[i])
    return (int(match[1]), match[2]) if match else (i + 1, "")


def _value(value: object) -> str:
    """Format a CIF value, with quotes if the syntax requires them. None becomes '?', other than ASCII becomes '_'."""
    text = "?" if value is None else re.sub(r"[^\t\n\r -~]", "_", str(value))
    reserved = re.match(r"data_|save_|(loop_|stop_|global_)\Z", text, re.IGNORECASE | re.ASCII)
    if text and not re.search(r"[\s'\"]", text) and text[0] not in "_#$[];" and not reserved:
        return text
    quote = next((q for q in "'\"" if q not in text), None)
    if quote is None or "\n" in text:
        text = re.sub(r"[\s']", " ", text)
        quote = "'"
    return f"{quote}{text}{quote}"


def _items(category: str, items: Iterable[tuple[str, object]]) -> str:
    """Format a category with a single row as tag-value pairs."""
    return "".join(f"_{category}.{tag} {_value(value)}\n" for tag, value in items) + "#\n"


def _loop(category: str, tags: str, rows: Iterable[Iterable[object]]) -> str:
    """Format a category with several rows as a loop."""
    return _loop_of_lines(category, tags, [" ".join(map(_value, row)) + "\n" for row in rows])


def _loop_of_lines(category: str, tags: str, lines: Sequence[str]) -> str:
    """Format a loop of finished lines. Returns "" without lines, because CIF does not allow empty loops."""
    header = "loop_\n" + "".join(f"_{category}.{tag}\n" for tag in tags.split())
    return header + "".join(lines) + "#\n" if lines else ""


def _model_categories(
    name: str,
    chains: Sequence[Chain],
    bs: Sequence[np.ndarray],
    entities: dict[str, str],
    labels: Sequence[str],
    how: Modelling,
) -> Iterable[str]:
    """Yield the ModelCIF categories of a computed model, except coordinates.

    Data 1 to E are the sequences of the E entities and form group 1. Data E + 1 is the model and forms group 2. The
    confidence is the pLDDT of each residue, its mean, and the scores of the whole model.
    """
    model = len(entities) + 1
    yield _items("audit_conform", zip(("dict_name", "dict_version", "dict_location"), MODELCIF))
    targets = [(e, f"sequence of entity {e}", "target") for e in entities.values()]
    yield _loop("ma_data", "id name content_type", [*targets, (model, name, "model coordinates")])
    groups = [(data, 1 if data < model else 2, data) for data in range(1, model + 1)]
    yield _loop("ma_data_group", "ordinal_id group_id data_id", groups)
    # The origin of the sequences is unknown, and the value "reference database" would require a database name.
    yield _loop("ma_target_entity", "entity_id data_id origin", [(e, e, "designed") for e in entities.values()])
    instances = [(label, entities[chain.sequence]) for chain, label in zip(chains, labels)]
    yield _loop("ma_target_entity_instance", "asym_id entity_id", instances)
    programs = [("WarpFold", __version__, "structure prediction by an AlphaFold2-class model")]
    steps = [(1, 1, 1, "modeling", "structure prediction", how.details, 1, 1, 2)]
    if how.refined_by:
        programs.append((*how.refined_by, "restrained minimisation of the energy"))
        steps.append((2, 1, 2, "model refinement", "relaxation in the Amber99SB force field", None, 2, 2, 2))
    software = [
        (i, program, version, "model building", "program", purpose)
        for i, (program, version, purpose) in enumerate(programs, 1)
    ]
    yield _loop("software", "pdbx_ordinal name version classification type description", software)
    yield _loop("ma_software_group", "ordinal_id group_id software_id", [(i, i, i) for i, *_ in software])
    tags = "ordinal_id protocol_id step_id method_type step_name details software_group_id input_data_group_id"
    yield _loop("ma_protocol_step", f"{tags} output_data_group_id", steps)
    yield _loop(
        "ma_model_list", "ordinal_id model_id model_name model_type data_id", [(1, 1, name, "Ab initio model", model)]
    )
    local, values = [], []
    for chain, b, label in zip(chains, bs, labels):
        for i in np.flatnonzero(np.max(chain.mask, axis=1) > 0):
            plddt = float(b[i][chain.mask[i] > 0].mean())
            values.append(plddt)
            residue = (label, int(i) + 1, _three_letters(chain.sequence[i]))
            local.append((len(values), 1, *residue, 2, f"{plddt:.2f}"))
    whole = {1: f"{float(np.mean(values)):.2f}"} if values else {}
    whole |= {3 + i: f"{score:.4f}" for i, score in enumerate(how.scores.values())}
    metrics = [(1, "global", "pLDDT", "pLDDT", 1), (2, "local", "pLDDT", "pLDDT", 1)]
    metrics += [(3 + i, "global", kind, kind, 1) for i, kind in enumerate(how.scores)]
    yield _loop("ma_qa_metric", "id mode name type software_group_id", metrics)
    rows = [(i, 1, metric, value) for i, (metric, value) in enumerate(whole.items(), 1)]
    yield _loop("ma_qa_metric_global", "ordinal_id model_id metric_id metric_value", rows)
    tags = "ordinal_id model_id label_asym_id label_seq_id label_comp_id metric_id metric_value"
    yield _loop("ma_qa_metric_local", tags, local)
