"""Structures that Boltz and OpenFold3 have processed, arrays in an .npz, as the mmCIF that `mmcif.py` reads.

Boltz's are four tables, a row for each chain, residue and atom, each naming its rows in the next (`Structure` and
`StructureV2` in boltz/src/boltz/data/types.py, made by its scripts/process/mmcif.py).  OpenFold3's are biotite's
AtomArray, an array for each annotation of the atoms (openfold3/core/data/io/structure/atom_array.py, made by
preprocess_pdb_of3.py).  Both have one conformation of the first assembly, and list what was not seen: residues keep
their places in SEQRES.
"""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import gemmi
import numpy as np
from gemmi import cif

from warpfold.data.formats.alignment import check_archive
from warpfold.data.structure.pdb import LONGEST_GAP
from warpfold.errors import UserError, listed, printable
from warpfold.files import DAMAGED_ARRAYS

BOLTZ = ("chains", "residues", "atoms", "mask")
OPENFOLD3 = ("coord", "chain_id", "res_id", "res_name", "atom_name", "molecule_type_id")
_MORE = ("entity_id", "auth_asym_id", "auth_seq_id", "ins_code", "occupancy", "b_factor")  # of AtomArrays that have it
_PROTEIN, _RNA, _DNA, _LIGAND = "polypeptide(L)", "polyribonucleotide", "polydeoxyribonucleotide", "ligand"
_BOLTZ_KINDS, _OPENFOLD3_KINDS = (_PROTEIN, _DNA, _RNA, _LIGAND), (_PROTEIN, _RNA, _DNA, _LIGAND)
_MASKED = "left out by those who made the file (its mask)"
_PLAIN = re.compile(r"[\w.+-]{1,40}", re.ASCII)  # a name that needs no quotes in mmCIF

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class _Polymers:
    """Chains [C], their residues [R] in order, and the atoms [A] that were seen."""

    labels: list[str]  # of the chains, unique
    authors: list[str]
    entities: list[str]
    kinds: list[str]
    chain: np.ndarray  # of each residue
    place: np.ndarray  # of each residue in its chain's SEQRES, from 1; the same for several where it is a mixture
    residues: list[str]
    residue: np.ndarray  # of each atom
    columns: dict[str, np.ndarray]  # text of the atoms, by mmCIF's names


def read(data: bytes, source: str) -> cif.Block:
    """Return the polymers of an .npz as an mmCIF block with SEQRES.  What an experiment was it does not say.

    Errors: UserError for an archive that is damaged, holds something else, or holds Python objects.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            names = next((names for names in (BOLTZ, OPENFOLD3) if set(names) <= set(file.files)), ())
            own = [name for name in (*names, *_MORE) if name in file.files] if names else file.files
            check_archive(data, source, "the mmCIF file that it was made of", own)
            if not names:
                found = printable(listed(own, 4)) or "nothing"
                raise UserError(f"{source}: holds {found}, and no structure of Boltz or OpenFold3; leave it out")
            arrays = {name: file[name] for name in own}
        block = _block(_of_boltz(arrays) if names == BOLTZ else _of_atoms(arrays))
    except (*DAMAGED_ARRAYS, KeyError, IndexError, TypeError) as error:
        why = printable(" ".join(str(error).split()))
        raise UserError(
            f"{source}: is no structure of Boltz or OpenFold3, or damaged ({why}); fetch it again, or give mmCIF"
        ) from None
    if not len(block.find_values("_atom_site.id")):
        raise UserError(f"{source}: has no atoms of a protein or a nucleic acid; leave it out")
    block.name = entry_name(source)
    return block


def entry_name(source: str) -> str:
    """Return the entry of a file by its name, or its folder's: 1abc/1abc.npz, MGYP000740162793/structure.npz."""
    path = PurePath(source)
    name = path.name.partition(".")[0]
    return path.parent.name if name == "structure" and path.parent.name else name


def _of_boltz(arrays: Arrays) -> _Polymers:
    chains, residues, atoms = arrays["chains"], arrays["residues"], arrays["atoms"]
    chain = np.repeat(np.arange(len(chains)), _counts(chains, "res", len(residues)))
    residue = np.repeat(np.arange(len(residues)), _counts(residues, "atom", len(atoms)))
    place = _checked(residues["res_idx"], "i").astype(np.int64) + 1
    if (np.diff(place)[np.diff(chain) == 0] < 1).any():
        raise ValueError("residues of a chain are not in order")
    names = atoms["name"]
    if names.dtype.kind != "U":  # four bytes, each less 32
        letters = np.ascontiguousarray(_checked(names, "i", 4).astype(np.uint8) + 32)
        names = letters.view("S4")[:, 0].astype(str)
    shown = np.flatnonzero(_checked(atoms["is_present"], "b"))
    columns = _columns(names[shown], _checked(atoms["coords"], "f", 3)[shown])
    if "bfactor" in (atoms.dtype.names or ()):
        columns["B_iso_or_equiv"] = _texts(atoms["bfactor"][shown], "f")
    kinds = [_kind(_BOLTZ_KINDS, number) for number in _checked(chains["mol_type"], "i").tolist()]
    # gemmi's number of the entity, in the order of the file, in which the PDB's entities are called 1, 2, 3 ...
    entities = [str(number + 1) for number in _checked(chains["entity_id"], "i").tolist()]
    if len(arrays["mask"]) != len(chains):
        raise ValueError("another number of chains in the mask")
    for i in np.flatnonzero(~_checked(arrays["mask"], "b")):
        if kinds[i] != _LIGAND:
            kinds[i], entities[i] = _MASKED, f"{entities[i]}-masked-{i}"
    labels = _texts(chains["name"], "U").tolist()
    return _Polymers(
        labels, labels, entities, kinds, chain, place, _texts(residues["name"], "U").tolist(), residue[shown], columns
    )


def _of_atoms(arrays: Arrays) -> _Polymers:
    if len({len(array) for array in arrays.values()}) != 1:
        raise ValueError("arrays of different numbers of atoms")
    _, first, chain = np.unique(_texts(arrays["chain_id"], "Uiu"), return_index=True, return_inverse=True)
    chain, first = first.argsort().argsort()[chain], np.sort(first)  # in the order of the file
    kinds = [_kind(_OPENFOLD3_KINDS, number) for number in _checked(arrays["molecule_type_id"], "iu")[first].tolist()]
    order = np.argsort(chain, kind="stable")
    chain, every = chain[order], {name: array[order] for name, array in arrays.items()}
    place, names = _checked(every["res_id"], "iu").astype(np.int64), every["res_name"]
    begins = np.ones(len(order), bool)
    begins[1:] = (np.diff(chain) != 0) | (np.diff(place) != 0) | (names[1:] != names[:-1])
    xyz = _checked(every["coord"], "f", 3)
    seen = ~np.isnan(xyz).all(1)  # what was not seen is there, without a position
    columns = _columns(every["atom_name"][seen], xyz[seen])
    for name, tag in (("auth_seq_id", "auth_seq_id"), ("ins_code", "pdbx_PDB_ins_code")):
        if name in every:
            columns[tag] = _texts(every[name][seen], "Uiu")
    for name, tag in (("b_factor", "B_iso_or_equiv"), ("occupancy", "occupancy")):
        if name in every:
            columns[tag] = _texts(every[name][seen], "f")
    labels = _texts(arrays["chain_id"][first], "Uiu").tolist()
    authors = _texts(arrays["auth_asym_id"][first], "Uiu").tolist() if "auth_asym_id" in arrays else labels
    entities = _texts(arrays["entity_id"][first], "Uiu").tolist() if "entity_id" in arrays else labels
    residue = np.cumsum(begins)[seen] - 1
    return _Polymers(
        labels,
        authors,
        entities,
        kinds,
        chain[begins],
        place[begins],
        _texts(names[begins], "U").tolist(),
        residue,
        columns,
    )


def _block(polymers: _Polymers) -> cif.Block:
    """Write polymers as mmCIF.  Residues that a chain does not name, 200 on end at most, are unknown ones."""
    labels, entities, kinds = polymers.labels, polymers.entities, polymers.kinds
    chain, place = polymers.chain, polymers.place
    names = {*labels, *polymers.authors, *entities, *polymers.residues}
    if odd := sorted(name for name in names if not _PLAIN.fullmatch(name)):
        raise ValueError(f"the name {odd[0][:20]!r}")
    if len(set(labels)) < len(labels):
        raise ValueError("two chains of one name")
    jumps, begins = np.diff(place, prepend=0), np.diff(chain, prepend=-1) != 0
    jumps[begins] = place[begins]
    in_polymer = np.array([kind != _LIGAND for kind in kinds], bool)[chain]
    if ((jumps < begins) | (jumps > LONGEST_GAP + 1))[in_polymer].any():
        raise ValueError("residues of a chain are not in order, or far apart")
    sequences: dict[str, dict[int, dict[str, None]]] = {}
    for i in np.flatnonzero(in_polymer).tolist():
        sequences.setdefault(entities[chain[i]], {}).setdefault(int(place[i]), {})[polymers.residues[i]] = None
    types = {entity: kind for entity, kind in zip(entities, kinds) if entity in sequences}
    for entity, places in sequences.items():  # the PDB's polypeptide(D), which these formats call protein
        first = [gemmi.find_tabulated_residue(next(iter(found))).kind for found in places.values()]
        if types[entity] == _PROTEIN and 2 * first.count(gemmi.ResidueKind.AAD) > len(first):
            types[entity] = "polypeptide(D)"
    tags = ("entity_id", "num", "mon_id")
    rows = [
        (entity, str(place), name)
        for entity, places in sequences.items()
        for place in range(1, max(places) + 1)
        for name in places.get(place, ("UNK",))
    ]
    atoms = np.flatnonzero(in_polymer[polymers.residue])
    own = polymers.residue[atoms]
    labels_of, authors_of, entities_of, names_of = map(
        np.array, (labels, polymers.authors, entities, polymers.residues)
    )
    block = cif.Block("")
    block.set_mmcif_category("_entity_poly.", {"entity_id": [*types], "type": [*types.values()]})
    block.set_mmcif_category("_entity_poly_seq.", {tag: [row[i] for row in rows] for i, tag in enumerate(tags)})
    block.set_mmcif_category("_struct_asym.", {"id": labels, "entity_id": entities})
    block.set_mmcif_category("_pdbx_poly_seq_scheme.", {"asym_id": labels, "pdb_strand_id": polymers.authors})
    block.set_mmcif_category(
        "_atom_site.",
        {
            "id": atoms.astype(str).tolist(),
            "label_asym_id": labels_of[chain[own]].tolist(),
            "auth_asym_id": authors_of[chain[own]].tolist(),
            "label_entity_id": entities_of[chain[own]].tolist(),
            "label_seq_id": place[own].astype(str).tolist(),
            "label_comp_id": names_of[own].tolist(),
            **{name: column[atoms].tolist() for name, column in polymers.columns.items()},
        },
    )
    return block


def _columns(names: np.ndarray, positions: np.ndarray) -> dict[str, np.ndarray]:
    """Return columns of mmCIF for atoms' names, without blanks around them, and their positions [A, 3]."""
    own = {"label_atom_id": np.char.strip(_checked(names, "U"))}
    return own | {f"Cartn_{axis}": positions[:, i].astype(str) for i, axis in enumerate("xyz")}


def _counts(table: np.ndarray, what: str, total: int) -> np.ndarray:
    """Return how many rows of the next table each row has.  Errors: ValueError unless they are all, in order."""
    starts, counts = (_checked(table[f"{what}_{end}"], "i").astype(np.int64) for end in ("idx", "num"))
    if (counts < 0).any() or counts.sum() != total or (starts != np.cumsum(counts) - counts).any():
        raise ValueError(f"{what}_idx and {what}_num are not all rows of the next table in their order")
    return counts


def _kind(kinds: Sequence[str], number: int) -> str:
    return kinds[number] if 0 <= number < len(kinds) else f"molecules of type {number}"


def _texts(array: np.ndarray, kinds: str) -> np.ndarray:
    return _checked(array, kinds).astype(str)


def _checked(array: np.ndarray, kinds: str, *inner: int) -> np.ndarray:
    """Return an array [rows, *inner] as it is.  Errors: ValueError for another type or shape."""
    if array.dtype.kind not in kinds or array.shape[1:] != inner or not array.ndim:
        raise ValueError(f"an array of {array.dtype} {list(array.shape)} in the place of another")
    return array
