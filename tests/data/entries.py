"""Write structure files of a few residues. Each test changes one thing in them."""

from collections.abc import Mapping, Sequence

import numpy as np

from warpfold.data.structure.chain import Chain
from warpfold.geometry.residue import ATOM37_MASK, ATOM_ORDER, RESTYPE_ORDER

Atom = dict[str, object]
TAGS = (
    *("group_PDB", "id", "type_symbol", "label_atom_id", "label_alt_id", "label_comp_id", "label_asym_id"),
    *("label_entity_id", "label_seq_id", "pdbx_PDB_ins_code", "Cartn_x", "Cartn_y", "Cartn_z", "occupancy"),
    *("auth_seq_id", "auth_asym_id", "pdbx_PDB_model_num"),
)
TURN = (0, -1, 0, 5, 1, 0, 0, 0, 0, 0, 1, 0)  # a quarter around z, then 5 along x
SHIFT = (1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 7)
ONE = (1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0)
OPERATORS = {"1": ONE, "2": TURN, "3": SHIFT, "X0": TURN}
SHORT = {"altloc": "label_alt_id", "author": "auth_seq_id", "code": "pdbx_PDB_ins_code"}


def atom(name: str, residue: str, place: int, x: float | str = 0.0, **changes: object) -> Atom:
    """Return a row of atom_site. changes: tag -> value; `altloc`, `author`, `code`, `chain` are short names of tags."""
    row: Atom = dict.fromkeys(TAGS, "?")
    row |= {"group_PDB": "ATOM", "label_atom_id": name, "label_alt_id": ".", "label_comp_id": residue}
    row |= {"label_seq_id": place, "Cartn_x": x, "Cartn_y": 1.0, "Cartn_z": place * 3.8, "occupancy": 1.0}
    row |= {"auth_seq_id": place, "pdbx_PDB_model_num": 1, "type_symbol": name[0], "label_entity_id": 1}
    chain = changes.pop("chain", "A")
    row |= {"label_asym_id": chain, "auth_asym_id": chain}
    return row | {SHORT.get(key, key): value for key, value in changes.items()}


def backbone(residue: str, place: int, **changes: object) -> list[Atom]:
    """Make the rows of N, CA, C and O of a residue, 3.8 angstrom from those of the previous residue."""
    return [atom(name, residue, place, float(i), **dict(changes)) for i, name in enumerate(("N", "CA", "C", "O"))]


def entry(
    atoms: Sequence[Atom],
    sequence: Sequence[str],
    kind: str = "polypeptide(L)",
    more: str = "",
    without: Sequence[str] = (),
) -> str:
    """Make the text of an mmCIF file with one entity.

    sequence: residue names; a position may have two, 'SER/THR'. without: columns to leave out.
    """
    rows = [(place + 1, name) for place, names in enumerate(sequence) for name in names.split("/")]
    text = "data_TEST\n#\n_entry.id TEST\n#\n" + more
    if sequence:
        text += f"_entity_poly.entity_id 1\n_entity_poly.type '{kind}'\n#\n"
        text += "loop_\n_entity_poly_seq.entity_id\n_entity_poly_seq.num\n_entity_poly_seq.mon_id\n"
        text += "".join(f"1 {place} {name}\n" for place, name in rows) + "#\n"
    tags = [tag for tag in TAGS if tag not in without]
    text += "loop_\n" + "".join(f"_atom_site.{tag}\n" for tag in tags)
    return text + "".join(" ".join(str(row[tag]) for tag in tags) + "\n" for row in atoms) + "#\n"


def random_chain(name: str, sequence: str, seed: int = 0, missing: Sequence[int] = (), first: int = 1) -> Chain:
    """A chain with every atom of its residues but the missing ones, at random places on the PDB's grid of 0.001.

    Within a cube of 80 angstrom: no two atoms are further apart than a template's neighbours may be (150).
    """
    rng = np.random.default_rng(seed)
    n = len(sequence)
    types = np.array([RESTYPE_ORDER[letter] for letter in sequence])
    mask = ATOM37_MASK[types].copy()
    mask[list(missing)] = 0.0
    positions = np.round(rng.uniform(-40, 40, (n, 37, 3)), 3).astype(np.float32) * mask[..., None]
    _name_arginines(positions, types)
    numbers = tuple("" if i in missing else str(i + first) for i in range(n))
    return Chain(name, sequence, positions, mask, np.arange(n, dtype=np.int64), numbers)


def _name_arginines(positions: np.ndarray, types: np.ndarray) -> None:
    """Swap NH1 and NH2 of arginines where NH2 is nearer to CD, as the reader does."""
    cd, nh1, nh2 = (ATOM_ORDER[name] for name in ("CD", "NH1", "NH2"))
    for i in np.flatnonzero(types == RESTYPE_ORDER["R"]):
        x = positions[i]
        x[[nh1, nh2]] = sorted(x[[nh1, nh2]], key=lambda nitrogen, x=x: float(np.linalg.norm(nitrogen - x[cd])))


def loop(category: str, tags: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = "loop_\n" + "".join(f"_{category}.{tag}\n" for tag in tags)
    return text + "".join(" ".join(f"'{value}'" for value in row) + "\n" for row in rows) + "#\n"


def assembly_text(
    generators: Sequence[tuple[str, str, str]], operators: Mapping[str, Sequence[float | str]] = OPERATORS
) -> str:
    """Return the mmCIF categories of assemblies. generators: (assembly, operators, chains)."""
    parts = [f"{part}" for row in "123" for part in (*(f"matrix[{row}][{c}]" for c in "123"), f"vector[{row}]")]
    return loop("pdbx_struct_assembly", ["id"], [[name] for name in dict.fromkeys(row[0] for row in generators)]) + (
        loop("pdbx_struct_assembly_gen", ["assembly_id", "oper_expression", "asym_id_list"], generators)
        + loop("pdbx_struct_oper_list", ["id", *parts], [[name, *rows] for name, rows in operators.items()])
    )
