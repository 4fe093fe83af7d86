"""What a prediction is, and how it becomes files: structures, confidence, arrays; whole or not at all."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.data.mmcif import Chain
from warpfold.errors import UserError
from warpfold.files import file_name
from warpfold.geometry.residue import ATOM_ORDER

# AlphaFold DB's letters for the classes of pLDDT: high, medium, low, disordered.
CATEGORIES = ((90.0, "H"), (70.0, "M"), (50.0, "L"), (0.0, "D"))


@dataclass(frozen=True)
class Prediction:
    """One folded protein of N residues; arrays are float32 NumPy, lengths in angstrom.

    Representations, None where they were not asked for: single [N, c_s], pair [N, N, c_z], msa [S, N, c_m].
    """

    name: str
    sequence: str
    positions: np.ndarray  # [N, 37, 3], atoms in the order of geometry.residue.ATOM_TYPES
    mask: np.ndarray  # [N, 37], 1 where the residue type has the atom
    plddt: np.ndarray  # [N], 0 to 100
    pae: np.ndarray | None  # [N, N]: error of residue j when aligned on residue i; None without the PAE head
    max_pae: float | None  # the largest value that pae can take
    ptm: float | None  # 0 to 1; None without the PAE head
    single: np.ndarray | None = None
    pair: np.ndarray | None = None
    msa: np.ndarray | None = None
    details: Mapping[str, Any] = field(default_factory=dict)  # for summary.json: seed, recycles, seconds, ...
    templates: Sequence[Mapping[str, Any]] = ()  # what became of each template that was offered

    @property
    def ca(self) -> np.ndarray:
        """Cα positions [N, 3], angstrom."""
        return self.positions[:, ATOM_ORDER["CA"]]

    @property
    def mean_plddt(self) -> float:
        return float(self.plddt.mean())

    def chain(self) -> Chain:
        """The prediction as chain A, numbered from 1."""
        n = len(self.sequence)
        numbers = tuple(str(i + 1) for i in range(n))
        return Chain("A", self.sequence, self.positions, self.mask, np.arange(n), numbers)

    def mmcif(self) -> str:
        """mmCIF text, pLDDT in the B column and as ModelCIF's metric."""
        from warpfold.data.write import write_mmcif

        return write_mmcif(self.name, [self.chain()], b_factors=[self.plddt], predicted=True)

    def pdb(self) -> str:
        """PDB text, pLDDT in the B column.  Errors: UserError where the format cannot hold the structure."""
        from warpfold.data.write import write_pdb

        return write_pdb(self.name, [self.chain()], b_factors=[self.plddt])

    def save(self, folder: Path | str) -> dict[str, str]:
        """Write all files of this prediction into a new `folder` (docs/outputs.md lists them); returns kind -> name.

        The folder appears whole or not at all; one of that name is replaced.  The PDB file is left out where the
        format cannot hold the structure.  Errors: UserError when the folder cannot be written.
        """
        folder = Path(folder)
        stem = file_name(self.name)
        known = ("positions", "mask", "plddt", "pae", "single", "pair", "msa")
        arrays = {name: getattr(self, name) for name in known if getattr(self, name) is not None}
        files = {"mmcif": f"{stem}.cif", "plddt": f"{stem}_plddt.json", "arrays": f"{stem}.npz"}
        with new_folder(folder) as draft:
            (draft / files["mmcif"]).write_text(self.mmcif(), encoding="utf-8")
            (draft / files["plddt"]).write_text(json.dumps(plddt_json(self.plddt)), encoding="utf-8")
            with contextlib.suppress(UserError):
                text = self.pdb()
                files["pdb"] = f"{stem}.pdb"
                (draft / files["pdb"]).write_text(text, encoding="utf-8")
            if self.pae is not None and self.max_pae is not None:
                files["pae"] = f"{stem}_pae.json"
                (draft / files["pae"]).write_text(json.dumps(pae_json(self.pae, self.max_pae)), encoding="utf-8")
            if self.templates:
                files["templates"] = f"{stem}_templates.json"
                (draft / files["templates"]).write_text(json.dumps(list(self.templates), indent=1), encoding="utf-8")
            np.savez_compressed(draft / files["arrays"], **arrays)
        return files


def plddt_json(plddt: np.ndarray) -> dict[str, list[Any]]:
    """pLDDT [N] in the layout of AlphaFold DB's confidence files."""
    return {
        "residueNumber": list(range(1, len(plddt) + 1)),
        "confidenceScore": [round(float(value), 2) for value in plddt],
        "confidenceCategory": [next(letter for bound, letter in CATEGORIES if value >= bound) for value in plddt],
    }


def pae_json(pae: np.ndarray, max_pae: float) -> list[dict[str, Any]]:
    """PAE [N, N] in the layout of AlphaFold DB's files: whole angstroms, in a list of one."""
    rounded = np.rint(pae).astype(int).tolist()
    return [{"predicted_aligned_error": rounded, "max_predicted_aligned_error": round(float(max_pae), 2)}]


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A draft folder to write into that becomes `folder` when the block ends well, and vanishes when it does not.

    Errors: UserError when it cannot be written.
    """
    draft = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        draft.chmod(0o755)
        yield draft
        if folder.exists():
            old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.old."))
            os.replace(folder, old / folder.name)
            os.replace(draft, folder)
            shutil.rmtree(old)
        else:
            os.replace(draft, folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror or error}") from error
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)


def claim_folder(folder: Path, kind: str, run: str, force: bool = False) -> dict[str, Any] | None:
    """See that an output folder is ours to write: None for a new or empty one, else the summary that is in it.

    `kind` is the summary's "format", `run` the digest that tells one run's inputs from another's.  With `force` a
    folder of another run of that kind will do.  Nothing is written.
    Errors: UserError for a file in its place, or for a folder that holds something else.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; name a folder for the output")
    if not folder.is_dir() or not any(folder.iterdir()):
        return None
    try:
        found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or found.get("format") != kind:
        raise UserError(f"{folder}: holds something else, which is left alone; name a new or an empty folder")
    if found.get("run") != run and not force:
        raise UserError(f"{folder}: holds the output of another run; name a new folder, or replace it with --force")
    return found
