"""Structures as Boltz and OpenFold3 write them, of chains in memory: their own types and layouts (see `npz.py`)."""

import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from warpfold.data.structure.chain import Chain
from warpfold.geometry.residue import ATOM37_MASK, ATOM_TYPES, RESTYPE_3, RESTYPE_ORDER

ATOM = [("name", "4i1"), ("element", "i1"), ("charge", "i1"), ("coords", "3f4"), ("conformer", "3f4")]
ATOM += [("is_present", "?"), ("chirality", "i1")]
ATOM_2 = [("name", "<U4"), ("coords", "3f4"), ("is_present", "?"), ("bfactor", "f4"), ("plddt", "f4")]
RESIDUE = [("name", "<U5"), ("res_type", "i1"), ("res_idx", "i4"), ("atom_idx", "i4"), ("atom_num", "i4")]
RESIDUE += [("atom_center", "i4"), ("atom_disto", "i4"), ("is_standard", "?"), ("is_present", "?")]
CHAIN = [("name", "<U5"), ("mol_type", "i1"), *((f"{name}_id", "i4") for name in ("entity", "sym", "asym"))]
CHAIN += [(name, "i4") for name in ("atom_idx", "atom_num", "res_idx", "res_num")]

Atoms = list[tuple[str, Sequence[float] | None]]  # name and position, None where it was not seen
Residues = list[tuple[str, Atoms]]  # all of a chain


def residues_of(chain: Chain) -> Residues:
    """All residues with all heavy atoms that their types have, as both list them."""
    found: Residues = []
    for letter, positions, mask in zip(chain.sequence, chain.positions, chain.mask):
        known = ATOM37_MASK[RESTYPE_ORDER.get(letter, 20)] if letter != "X" else mask
        atoms = [(ATOM_TYPES[i], positions[i] if mask[i] else None) for i in np.flatnonzero(known)]
        found.append((RESTYPE_3[RESTYPE_ORDER[letter]] if letter != "X" else "UNK", atoms))
    return found


def packed(arrays: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def _rows(chains: Sequence[tuple[str, int, int, Residues]]) -> Iterator[tuple[int, int, str, str, Any]]:
    for number, (_, _, _, residues) in enumerate(chains):
        for place, (name, atoms) in enumerate(residues):
            for atom, position in atoms:
                yield number, place, name, atom, position


def boltz(chains: Sequence[tuple[str, int, int, Residues]], version: int = 1) -> dict[str, np.ndarray]:
    """`Structure` or `StructureV2`; chains: name, mol_type, entity_id and residues."""
    counts = [[len(atoms) for _, atoms in residues] for _, _, _, residues in chains]
    rows, own, atoms, begin, residue = [], [], [], 0, 0
    for number, ((name, kind, entity, residues), each) in enumerate(zip(chains, counts)):
        rows.append((name, kind, entity, 0, number, begin, sum(each), residue, len(residues)))
        residue += len(residues)
        for place, (monomer, found) in enumerate(residues):
            seen = any(position is not None for _, position in found)
            own.append((monomer, 2, place, begin, len(found), begin, begin, True, seen))
            begin += len(found)
    for *_, atom, position in _rows(chains):
        xyz, seen = (0, 0, 0) if position is None else tuple(position), position is not None
        if version == 1:
            code = [ord(letter) - 32 for letter in atom] + [0] * (4 - len(atom))
            atoms.append((code, 6, 0, xyz, (0, 0, 0), seen, 0))
        else:
            atoms.append((atom, xyz, seen, 50.0 + len(atoms) % 40, 1.0))
    last = [("cyclic_period", "i4")] if version == 2 else []
    tables = {
        "atoms": np.array(atoms, ATOM if version == 1 else ATOM_2),
        "residues": np.array(own, RESIDUE),
        "chains": np.array([row + (0,) * len(last) for row in rows], CHAIN + last),
        "bonds": np.zeros(0, [("atom_1", "i4"), ("atom_2", "i4"), ("type", "i1")]),
        "interfaces": np.zeros(0, [("chain_1", "i4"), ("chain_2", "i4")]),
        "mask": np.ones(len(chains), bool),
    }
    if version == 2:
        tables["coords"] = tables["atoms"]["coords"].reshape(-1, 1, 3).view([("coords", "3f4")]).reshape(-1)
        tables["ensemble"] = np.array([(0, len(atoms))], [("atom_coord_idx", "i4"), ("atom_num", "i4")])
    return tables


def openfold3(chains: Sequence[tuple[str, int, int, Residues]]) -> dict[str, np.ndarray]:
    """An AtomArray's annotations; chains: the author's name, molecule_type_id, entity_id and residues."""
    rows = list(_rows(chains))
    number = np.array([row[0] for row in rows])
    place = np.array([row[1] + 1 for row in rows])
    seen = np.array([row[4] is not None for row in rows])
    return {
        "coord": np.array([row[4] if row[4] is not None else (np.nan,) * 3 for row in rows], np.float32),
        "bonds": np.zeros((0, 3), np.uint32),
        "chain_id": (number + 1).astype("<U4"),
        "res_id": place,
        "ins_code": np.full(len(rows), "", "<U1"),
        "res_name": np.array([row[2] for row in rows], "<U5"),
        "hetero": np.zeros(len(rows), bool),
        "atom_name": np.array([row[3] for row in rows], "<U6"),
        "element": np.array([row[3][0] for row in rows], "<U2"),
        "occupancy": seen.astype(float),
        "charge": np.zeros(len(rows), int),
        "auth_asym_id": np.array([chains[i][0] for i in number], "<U4"),
        "auth_seq_id": place + 10,
        "entity_id": np.array([chains[i][2] for i in number]),
        "molecule_type_id": np.array([chains[i][1] for i in number]),
    }
