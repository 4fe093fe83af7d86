"""A prediction, and how it becomes files, all of them or none, and an entry of the summary."""

import contextlib
import html
import io
import json
import os
import re
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import numpy as np
import torch

from warpfold.data.example.templates import TemplateOutcome, count_refusals
from warpfold.data.store.store import Packed, pack_record
from warpfold.data.structure.chain import Chain, Structure
from warpfold.errors import UserError, listed
from warpfold.files import checksum, file_name, read_file, write_atomically, writing
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.model import confidence
from warpfold.prediction.notices import Notice
from warpfold.prediction.sanity import check_geometry, confidence_notices
from warpfold.prediction.summary_file import RECORDS
from warpfold.report.coverage import Coverage
from warpfold.report.report import ReportPage, Target, Warned, render
from warpfold.scoring.interface import PairScore, chain_pair_scores
from warpfold.scoring.score_table import PAIRS, PARQUET, SCORES, design_scores, pair_records

StoredPair = Literal["pooled", "whole"]
_RECORD = struct.Struct("<II")  # before the bytes of a record: those of its header, and their checksum
# In an output folder: no protein's folder.
RESERVED = ("alignments", RECORDS, "report.html", "summary.json", SCORES, PAIRS, PARQUET)
FRAME = 900  # pixels of the frame in a notebook; what is longer scrolls
# Arrays that stay when a prediction is thinned.
SMALL = (
    *("positions", "mask", "plddt", "asym_id", "chain_pair_iptm"),
    *("coverage_depth", "coverage_rows", "coverage_total"),
)
_DRAFT = re.compile(r"\.(.+)\.[0-9a-f]{32}\.partial")  # of `_draft`

# DeepMind's letters for the classes of pLDDT, in `alphafold/common/confidence.py`: high, medium, low, disordered.
CATEGORIES = ((90.0, "H"), (70.0, "M"), (50.0, "L"), (0.0, "D"))


@dataclass(frozen=True)
class PassStructure:
    """What a pass before the last had found, of N residues, and how sure the model was of it; as in `Prediction`."""

    positions: np.ndarray
    plddt: np.ndarray
    ptm: float | None
    iptm: float | None

    def scores(self) -> dict[str, float | None]:
        """Return the scores for the summary, rounded."""
        scores = {name: getattr(self, name) for name in ("ptm", "iptm")}
        rounded = {name: None if one is None else round(one, 4) for name, one in scores.items()}
        return {"mean_plddt": round(float(self.plddt.mean()), 2), **rounded}


@dataclass(frozen=True, repr=False)
class Prediction:
    """One folded protein of N residues, or a complex of K chains with N residues in all; float32 NumPy, angstrom.

    Representations, None unless asked for: single [N, c_s], pair [N, N, c_z], msa [S, N, c_m], and structure_module
    [N, c_s], the single representation that the structure module ends with.
    """

    name: str
    sequence: str  # of a complex, that of its chains, one after another
    positions: np.ndarray  # [N, 37, 3], atoms in the order of geometry.residue.ATOM_TYPES
    mask: np.ndarray  # [N, 37], 1 where the residue type has the atom
    plddt: np.ndarray  # [N], 0 to 100
    pae: np.ndarray | None  # [N, N]: error of residue j when aligned on residue i; None without the PAE head
    max_pae: float | None  # the largest value that pae can take
    ptm: float | None  # 0 to 1; None without the PAE head
    single: np.ndarray | None = None
    pair: np.ndarray | None = None
    msa: np.ndarray | None = None
    structure_module: np.ndarray | None = None
    details: Mapping[str, Any] = field(default_factory=dict)  # for summary.json: seed, recycles, seconds, ...
    templates: Sequence[Mapping[str, Any]] = ()  # the outcome of each template that was offered
    chain_ids: tuple[str, ...] = ("A",)  # [K]
    asym_id: np.ndarray | None = (
        None  # int32 [N], the place of each residue's chain in `chain_ids`, from 1; None: K = 1
    )
    iptm: float | None = None  # 0 to 1, of a complex
    # [K, K], 0 to 1: the ipTM of each two chains alone; on the diagonal the pTM of each chain alone
    chain_pair_iptm: np.ndarray | None = None
    # Where asked for: probabilities that beta carbons are nearer than 8 angstrom, and of their distances.
    contacts: np.ndarray | None = None  # float16 [N, N]
    distogram: np.ndarray | None = None  # float16 [N, N, 64]; it may lie in a temporary file
    distogram_edges: np.ndarray | None = None  # float32 [63], angstrom: between its bins
    coverage: Coverage | None = None  # of the alignment
    # Where asked for: of the heads, float32: plddt [N, 50], resolved [N, 37], masked_msa [S, N, 23 or 22], distogram
    # and, if there is that head, pae [N, N, 64]; the last two may lie in temporary files.
    logits: Mapping[str, np.ndarray] = field(default_factory=dict)
    recycled: Sequence[PassStructure] = ()  # of the passes before the last, where asked for

    def __repr__(self) -> str:
        chains = f" in {len(self.chain_ids)} chains" if len(self.chain_ids) > 1 else ""
        known = ("ipTM", self.iptm), ("pTM", self.ptm)
        scores = "".join(f", {title} {score:.2f}" for title, score in known if score is not None)
        return f"<Prediction {self.name}: {len(self.sequence)} residues{chains}, pLDDT {self.mean_plddt:.1f}{scores}>"

    def _repr_html_(self) -> str:
        """Return the report's page in a frame of its own, as notebooks show it; styles and scripts stay in it."""
        page, title = html.escape(self.page(), quote=True), html.escape(self.name, quote=True)
        return f'<iframe srcdoc="{page}" title="{title}" width="100%" height="{FRAME}" style="border:0"></iframe>'

    def picture(self) -> bytes:
        """Return a PNG: the structure coloured by pLDDT, and PAE beside it."""
        from warpfold.report.figures import draw_prediction  # here: it loads matplotlib

        return draw_prediction(self._target())

    _repr_png_ = picture  # what a notebook shows where no scripts may run, as on GitHub

    def page(self) -> str:
        """Return a report of this prediction alone: structure, pLDDT, PAE, as one page that needs nothing else."""
        doubts = (notice.record() for notice in confidence_notices(self.plddt, self.ptm, self.iptm))
        warnings = [Warned(record["text"]) for record in (*self.details.get("warnings", ()), *doubts)]
        return render(ReportPage(self.name, "Folded by WarpFold.", targets=[self._target()], warnings=warnings))

    def _target(self) -> Target:
        known = ("ipTM", self.iptm), ("pTM", self.ptm)
        return Target(
            name=self.name,
            sequence=":".join(self.sequence[span] for span in self.spans.values()),
            plddt=self.plddt,
            ca=self.ca,
            mmcif=self.mmcif(),
            pae=self.pae,
            max_pae=self.max_pae or 0.0,
            numbers=[
                ("residues", str(len(self.sequence))),
                ("mean pLDDT", f"{self.mean_plddt:.1f}"),
                *((title, f"{score:.2f}") for title, score in known if score is not None),
            ],
            chains=self.spans if len(self.spans) > 1 else {},
            coverage=self.coverage,
        )

    @property
    def ca(self) -> np.ndarray:
        """Return the Cα positions [N, 3], angstrom."""
        return self.positions[:, ATOM_ORDER["CA"]]

    @property
    def mean_plddt(self) -> float:
        return float(self.plddt.mean())

    @property
    def chain_ptm(self) -> np.ndarray | None:
        """Return the pTM of each chain of a complex alone [K], 0 to 1; None without the PAE head."""
        return None if self.chain_pair_iptm is None else self.chain_pair_iptm.diagonal()

    @property
    def ranking_confidence(self) -> float:
        """Return the score that ranks predictions: 0.8 ipTM + 0.2 pTM of a complex, 0 to 1, or the mean pLDDT."""
        tm = () if self.iptm is None or self.ptm is None else (torch.tensor(self.ptm), torch.tensor(self.iptm))
        return float(confidence.ranking_confidence(torch.from_numpy(self.plddt), *tm))

    @property
    def spans(self) -> dict[str, slice]:
        """Return the residues of each chain: id -> slice of the N residues, in the user's order."""
        if self.asym_id is None:
            return {self.chain_ids[0]: slice(0, len(self.sequence))}
        starts = np.searchsorted(self.asym_id, np.arange(1, len(self.chain_ids) + 2)).tolist()
        return {chain: slice(*span) for chain, span in zip(self.chain_ids, pairwise(starts))}

    def chains(self) -> list[Chain]:
        """Return the predicted chains, each numbered from 1."""
        found = []
        for chain, span in self.spans.items():
            sequence = self.sequence[span]
            index = np.arange(len(sequence))
            numbers = tuple(str(i + 1) for i in index)
            found.append(Chain(chain, sequence, self.positions[span], self.mask[span], index, numbers))
        return found

    def structure(self) -> Structure:
        """Return the predicted structure as that of a file that was read."""
        return Structure(self.name, None, None, None, {chain.id: chain for chain in self.chains()})

    def mmcif(self) -> str:
        """Return ModelCIF text, pLDDT in the B column too."""
        from warpfold.data.structure.write import Modelling, write_mmcif

        known = {name: self.details[name] for name in ("recycles", "templates") if self.details.get(name)}
        facts = [f"{name}: {', '.join(one) if isinstance(one, list) else one}" for name, one in known.items()]
        scores = {name: one for name, one in (("pTM", self.ptm), ("ipTM", self.iptm)) if one is not None}
        how = Modelling("; ".join(facts) or None, scores)
        return write_mmcif(self.name, self.chains(), b_factors=self._plddt_by_chain, predicted=how)

    @cached_property
    def pair_scores(self) -> list[PairScore]:
        """Return the scores of each pair of chains in order (docs/howto/score.md); empty for one chain."""
        if self.asym_id is None:
            return []
        arrays = self.plddt, self.positions, self.mask, self.asym_id
        return chain_pair_scores(self.pae, *arrays, self.chain_ids, self.chain_pair_iptm)

    def design_scores(
        self, fixed: Sequence[str] = (), given: Mapping[str, Chain] | None = None
    ) -> dict[str, float | int | str | None]:
        """Return the scores of binder and target, as a row of scores.csv has them (docs/howto/score.md).

        fixed: the chains of the target; by default all but the last.  given: the complex that was designed, by chain.
        """
        chains = {chain.id: chain for chain in self.chains()}
        plddt = {chain: self.plddt[span] for chain, span in self.spans.items()}
        return design_scores(chains, plddt, self.pair_scores, fixed, given)

    def confidences(self) -> dict[str, float | None]:
        """Return the scores of the whole prediction as files have them; ipTM is None of a single chain."""
        tm = {name: getattr(self, name) for name in ("ptm", "iptm")}
        return {
            "mean_plddt": round(self.mean_plddt, 2),
            **{name: None if one is None else round(one, 4) for name, one in tm.items()},
            "ranking_confidence": round(self.ranking_confidence, 6),
        }

    def pdb(self) -> str:
        """Return PDB text, pLDDT in the B column.  Errors: UserError where the format cannot hold the structure."""
        from warpfold.data.structure.write import write_pdb

        return write_pdb(self.name, self.chains(), b_factors=self._plddt_by_chain)

    @property
    def _plddt_by_chain(self) -> list[np.ndarray]:
        return [self.plddt[span] for span in self.spans.values()]

    def record(self, pair: StoredPair) -> Packed:
        """Pack the representations but msa, in half precision, as a record of a store (docs/reference/outputs.md).

        Errors: UserError where a value is too large for half precision.
        """
        assert self.single is not None
        assert self.pair is not None
        assert self.structure_module is not None
        arrays = {"single": self.single, "structure_module": self.structure_module}
        if pair == "whole":
            arrays["pair"] = self.pair
        else:
            arrays |= {"pair_rows": self.pair.mean(1), "pair_columns": self.pair.mean(0)}
        with np.errstate(over="ignore"):
            halves = {name: array.astype(np.float16) for name, array in arrays.items()}
        for name, array in halves.items():
            if not np.isfinite(array).all():
                raise UserError(
                    f"{self.name}: {name} has values that half precision does not hold (up to "
                    f"{np.abs(arrays[name]).max():g}); keep representations in the .npz"
                )
        sequence = ":".join(self.sequence[span] for span in self.spans.values())
        return pack_record(halves, {"name": self.name, "sequence": sequence, "chains": list(self.spans)})

    def save(
        self, folder: Path | str, overwrite: bool = False, stored_pair: StoredPair | None = None
    ) -> dict[str, str]:
        """Write all files of this prediction into `folder` (docs/reference/outputs.md); return kind -> file name.

        The files are named after the protein, so a folder may hold many predictions, and whatever else is in it is
        left alone.  A new folder appears complete or not at all; in one that exists, each file does.
        overwrite: replace an earlier prediction of a protein of this name.  The PDB file is left out where the format
        cannot hold the structure.  stored_pair: write the representations as a record for a store, not into the .npz.
        Errors: UserError where a file of such a name exists (with `overwrite`, one that does not belong to a
        prediction), or when the folder cannot be written.
        """
        folder = Path(folder)
        names = _names_in(folder, self.name, len(self.recycled))
        _check_free(folder, names, overwrite)
        known = ["positions", "mask", "plddt", "pae", "asym_id", "chain_pair_iptm", "contacts", "distogram_edges"]
        known += [] if stored_pair else ["single", "pair", "msa", "structure_module"]
        arrays = {name: getattr(self, name) for name in known if getattr(self, name) is not None}
        arrays |= self.coverage.arrays() if self.coverage else {}
        texts = {"mmcif": self.mmcif(), "plddt": json.dumps(plddt_json(self.plddt, self.spans))}
        for number, earlier in enumerate(self.recycled):
            texts[f"recycle_{number}"] = replace(self, **vars(earlier), details={"recycles": number}).mmcif()
        with contextlib.suppress(UserError):
            texts["pdb"] = self.pdb()
        if self.templates:
            texts["templates"] = json.dumps(list(self.templates), indent=1)
        with writing(folder, "name another folder"), _draft(folder) as draft:
            np.savez_compressed(draft / names["arrays"], **arrays)
            for kind, text in texts.items():
                (draft / names[kind]).write_text(text, encoding="utf-8")
            if self.pae is not None and self.max_pae is not None:
                write_pae(draft / names["pae"], self.pae, self.max_pae)
            scores = self.plddt, self.pae, self.ptm, self.iptm, self.chain_pair_iptm
            write_scores(draft / names["scores"], *scores, pair_records(self.pair_scores))
            if self.distogram is not None:
                np.save(draft / names["distogram"], self.distogram, allow_pickle=False)
            if stored_pair:
                record = self.record(stored_pair)
                head = _RECORD.pack(record.header, record.crc)
                (draft / names["representations"]).write_bytes(head + record.data)
            written = {kind: name for kind, name in names.items() if (draft / name).exists()}
            _move_into(draft, folder, names)
        return written


def read_record(path: Path) -> Packed:
    """Read a record of representations that `Prediction.save` wrote."""
    data = read_file(path)
    return Packed(data[_RECORD.size :], *_RECORD.unpack(data[: _RECORD.size]))


def write_prediction(
    prediction: Prediction,
    out: Path,
    below: str = "",
    notices: Sequence[Notice] = (),
    fixed: Sequence[str] = (),
    given: Mapping[str, Chain] | None = None,
    wanted: Callable[[Mapping[str, Any]], bool] | None = None,
    stored_pair: StoredPair | None = None,
) -> dict[str, Any]:
    """Check a prediction's geometry, write it into its own folder in `out`, and return its entry in the summary.

    below: the folder in that of the protein, where it has several predictions.  notices: what else is to be said.
    fixed, given: as of `Prediction.design_scores`.  wanted: told all but the files, says whether they are to be there.
    stored_pair: as of `Prediction.save`.
    """
    outcomes = [TemplateOutcome(**outcome) for outcome in prediction.templates]
    details = dict(prediction.details)
    chains, lost = _of_complex(prediction, details.pop("chain_depths", {})), details.pop("warnings", ())
    if prediction.asym_id is not None or given is not None:
        chains["scores"] = prediction.design_scores(fixed, given)
    geometry = check_geometry(prediction.positions, prediction.mask, prediction.asym_id)
    doubts = confidence_notices(prediction.plddt, prediction.ptm, prediction.iptm)
    folder = f"{file_name(prediction.name)}/{below}".rstrip("/")
    head, scores = {"name": prediction.name, "folder": folder}, prediction.confidences()
    known = {
        "length": len(prediction.sequence),
        "sequence": ":".join(prediction.sequence[span] for span in prediction.spans.values()),
        "mean_plddt": scores["mean_plddt"],
        "ptm": scores["ptm"],
        **chains,
        "ranking_confidence": scores["ranking_confidence"],
        **details,
        **({"recycled": [one.scores() for one in prediction.recycled]} if prediction.recycled else {}),
        "templates_unused": sum(not outcome.used for outcome in outcomes),
        "templates_refused": count_refusals(outcomes),
        "templates_missing": sum(outcome.missing for outcome in outcomes),
        "geometry": asdict(geometry),
    }
    refuse_links(out, folder)
    files: dict[str, str] = {}
    if kept := wanted is None or wanted(head | known):
        # The earlier run was killed, or is replaced with --force.
        files = prediction.save(out / folder, overwrite=True, stored_pair=stored_pair)
    warnings = [
        *(notice.record() for notice in notices),
        *lost,
        *(notice.record() for notice in _input_notices(prediction, files)),
        *(notice.record() for notice in (*geometry.notices(), *doubts)),
    ]
    entry = {**head, "files": files, "checksums": checksums_of(out / folder, files), **known, "warnings": warnings}
    return entry if kept else drop_prediction(out, entry)


def drop_prediction(out: Path, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Delete the files of a prediction, and its folders if nothing else is in them; return its entry without them."""
    folder = out / entry["folder"]
    remove_prediction(folder, entry["name"])
    if folder.parent != out:
        with contextlib.suppress(OSError):  # other predictions of the query are there, or it has gone already
            folder.parent.rmdir()
    return {**entry, "files": {}, "checksums": {}, "dropped": True}


def _of_complex(prediction: Prediction, depths: Mapping[str, int]) -> dict[str, Any]:
    """Return the summary's keys of complexes.  depths: rows of each chain's alignment."""
    if prediction.asym_id is None:
        return {}
    pairs = prediction.chain_pair_iptm
    ptm = [None] * len(prediction.spans) if pairs is None else pairs.diagonal().astype(float).round(4).tolist()
    return {
        "iptm": prediction.confidences()["iptm"],
        "chains": [
            {
                "id": chain,
                "length": span.stop - span.start,
                "mean_plddt": round(float(prediction.plddt[span].mean()), 2),
                "ptm": one,
                "msa_depth": depths.get(chain),
            }
            for (chain, span), one in zip(prediction.spans.items(), ptm)
        ],
        "chain_pair_iptm": None if pairs is None else np.round(pairs.astype(float), 4).tolist(),
        "interfaces": [
            {
                "chains": list(one.chains),
                "iptm": None if one.iptm is None else round(one.iptm, 4),
                "plddt": None if one.interface_plddt is None else round(one.interface_plddt, 2),
                "contacts": one.contacts,
            }
            for one in prediction.pair_scores
            if one.contacts
        ],
        "pair_scores": pair_records(prediction.pair_scores),
    }


def _input_notices(prediction: Prediction, files: Mapping[str, str]) -> Iterator[Notice]:
    """Yield warnings about residues that are X, which have no atoms, and about a PDB file that is missing."""
    places = [
        f"{chain} {place}" if prediction.asym_id is not None else str(place)
        for chain, span in prediction.spans.items()
        for place, letter in enumerate(prediction.sequence[span], 1)
        if letter == "X"
    ]
    if places:
        yield Notice("unknown_residues", {"count": len(places), "detail": f"X at {listed(places)}"})
    if files and "pdb" not in files:
        try:
            prediction.pdb()
        except UserError as error:
            why = str(error).removeprefix(prediction.name + ": ").removesuffix("; write mmCIF")
            yield Notice("no_pdb", {"why": why})


def plddt_json(plddt: np.ndarray, spans: Mapping[str, slice]) -> dict[str, list[Any]]:
    """Return pLDDT [N] in the layout of AlphaFold DB's confidence files; of a complex, with each residue's chain."""
    lengths = {chain: span.stop - span.start for chain, span in spans.items()}
    chains = {"chainId": [chain for chain, length in lengths.items() for _ in range(length)]}
    return {
        **(chains if len(spans) > 1 else {}),
        "residueNumber": [i + 1 for length in lengths.values() for i in range(length)],
        "confidenceScore": [round(float(value), 2) for value in plddt],
        "confidenceCategory": [next(letter for bound, letter in CATEGORIES if value >= bound) for value in plddt],
    }


def write_pae(path: Path, pae: np.ndarray, max_pae: float) -> None:
    """Write PAE [N, N] in the layout of AlphaFold DB's files: whole angstroms, in a list of one.

    Row by row: as numbers of Python all would be 32 bytes each.
    """
    with path.open("w", encoding="utf-8") as file:
        file.write('[{"predicted_aligned_error": [')
        file.writelines(_rows(pae, 1))
        file.write(f'], "max_predicted_aligned_error": {json.dumps(round(float(max_pae), 2))}}}]')


def write_scores(
    path: Path,
    plddt: np.ndarray,
    pae: np.ndarray | None,
    ptm: float | None,
    iptm: float | None = None,
    chain_pair_iptm: np.ndarray | None = None,
    pair_scores: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write pLDDT [N], PAE [N, N], pTM and ipTM in the layout of ColabFold's `*_scores_*.json`: two decimals.

    `max_pae` is the largest error in `pae`.  What is None has no key, as there.  chain_pair_iptm [K, K] of a complex,
    and the pTM of its chains on the diagonal, have AlphaFold 3's keys.
    pair_scores: as of `pair_records`.
    """
    head: dict[str, Any] = {"plddt": [round(float(value), 2) for value in plddt]}
    if pae is not None:
        head["max_pae"] = float(pae.max())
    tail: dict[str, Any] = {"ptm": ptm, "iptm": iptm}
    tail = {key: round(float(value), 2) for key, value in tail.items() if value is not None}
    if chain_pair_iptm is not None:
        pairs = chain_pair_iptm.astype(float).round(2)
        tail |= {"chain_ptm": pairs.diagonal().tolist(), "chain_pair_iptm": pairs.tolist()}
    if pair_scores:
        tail["pair_scores"] = pair_scores
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(head)[:-1])
        if pae is not None:
            file.write(', "pae": [')
            file.writelines(_rows(pae, 100))
            file.write("]")
        file.write(", " * bool(tail) + json.dumps(tail)[1:])


def _rows(values: np.ndarray, parts: int) -> Iterator[str]:
    """Yield the JSON of a matrix [N, N] of at least 0, a row at a time, rounded to whole numbers or parts of 1.

    From a table of the few numbers that there are: several times as fast as `json.dumps`.
    """
    numbers = range(round(parts * float(values.max(initial=0))) + 2)
    texts = [json.dumps(number if parts == 1 else number / parts) for number in numbers]
    for index, row in enumerate(values):
        line = ", ".join(map(texts.__getitem__, np.rint(parts * row.astype(np.float64)).astype(int).tolist()))
        yield f"{', ' * (index > 0)}[{line}]"


def file_names(protein: str, recycles: Iterable[int] = ()) -> dict[str, str]:
    """Return the names of a prediction's files, by kind; the arrays first, by which a prediction is recognized.

    recycles: the passes before the last whose structures are kept, from 0.
    """
    stem = file_name(protein)
    endings = {
        "arrays": ".npz",
        "mmcif": ".cif",
        "plddt": "_plddt.json",
        "pdb": ".pdb",
        "pae": "_pae.json",
        "scores": "_scores.json",
        "distogram": "_distogram.npy",
        "representations": "_representations.record",
        "templates": "_templates.json",
        "relaxed": "_relaxed.json",  # of relax/files.py; they go when the prediction goes
        "relaxed_mmcif": "_relaxed.cif",
        "relaxed_pdb": "_relaxed.pdb",
        **{f"recycle_{number}": f"_recycle_{number}.cif" for number in recycles},
    }
    return {kind: stem + ending for kind, ending in endings.items()}


def _names_in(folder: Path, protein: str, recycles: int = 0) -> dict[str, str]:
    """Return `file_names` with all passes whose structures are in a prediction's folder, and so many in any case."""
    name = re.compile(re.escape(file_name(protein)) + r"_recycle_(\d+)\.cif")
    files = folder.iterdir() if folder.is_dir() else ()
    found = {int(match[1]) for file in files if (match := name.fullmatch(file.name))}
    return file_names(protein, found.union(range(recycles)))


def remove_prediction(folder: Path, protein: str) -> None:
    """Delete the files of a prediction from its folder, and the folder if nothing else is in it.

    Whatever is not a prediction of this name stays.  Errors: UserError when something cannot be removed.
    """
    if folder.is_symlink() or not _is_prediction(folder / file_names(protein)["arrays"]):
        return
    names = _names_in(folder, protein)
    try:
        for name in reversed(names.values()):
            if (folder / name).is_file():
                (folder / name).unlink()
        if not any(folder.iterdir()):
            folder.rmdir()
    except OSError as error:
        raise UserError(f"{folder}: cannot be removed: {error.strerror or error}") from error


def checksums_of(folder: Path, files: Mapping[str, str]) -> dict[str, list[Any]]:
    """Return kind -> size in bytes and digest of a prediction's files, by which `damaged_files` knows them."""
    return {kind: [(folder / file).stat().st_size, checksum(folder / file)] for kind, file in files.items()}


def damaged_files(out: Path, entry: Mapping[str, Any], thorough: bool = True) -> list[Path]:
    """Return which files of an entry of the summary are missing or, bit for bit, not what was written.

    thorough: False looks whether they are there, and reads none.
    """
    known = entry.get("checksums", {})

    def is_whole(kind: str, path: Path) -> bool:
        if not thorough or not path.is_file():
            return path.is_file()
        return [path.stat().st_size] == known.get(kind, [])[:1] and checksum(path) == known[kind][1]

    with writing(out / entry["folder"]):
        paths = {kind: out / entry["folder"] / file for kind, file in entry["files"].items()}
        return [path for kind, path in paths.items() if not is_whole(kind, path)]


def clear_damaged(out: Path, entry: Mapping[str, Any], damaged: Sequence[Path]) -> None:
    """Make room for a prediction that is made again: rename what is damaged, which somebody may have edited.

    Its other files are deleted: they are what was written, and are written again.
    """
    folder = out / entry["folder"]
    with writing(folder):
        for path in damaged:
            if path.is_file():
                names = (f"damaged-{path.name}{end}" for end in ("", *(f"-{n}" for n in range(2, 10_000))))
                path.rename(next(aside for aside in map(folder.joinpath, names) if not aside.exists()))
        for file in _names_in(folder, entry["name"]).values():
            if (folder / file).is_file():
                (folder / file).unlink()


def refuse_links(out: Path, folder: str) -> None:
    """Raise UserError where a prediction's folder, or that of its protein, is a link to somewhere else."""
    for place in (out / folder, *(out / folder).parents):
        if place == out:
            return
        if place.is_symlink():
            raise UserError(
                f"{place}: is a symbolic link, and nothing is written through it; remove it, or name another folder"
            )


def thin_prediction(folder: Path, protein: str, files: Mapping[str, str]) -> dict[str, str]:
    """Take away what grows with the square of the length: PAE, representations, distogram; return the files that stay.

    files: kind -> file name, of a prediction of this name.  Whatever else is in the folder stays.
    Errors: UserError when something cannot be written or removed.
    """
    names = file_names(protein)
    path = folder / names["arrays"]
    gone = {kind for kind in ("pae", "scores", "distogram", "representations") if files.get(kind) == names[kind]}
    if folder.is_symlink() or not _is_prediction(path):
        return dict(files)
    with writing(folder):
        with np.load(path, allow_pickle=False) as arrays:
            kept = {name: arrays[name] for name in arrays.files if name in SMALL}
        content = io.BytesIO()
        np.savez_compressed(content, **kept)
        write_atomically(path, content.getvalue())
        for kind in gone:
            (folder / names[kind]).unlink(missing_ok=True)
    return {kind: name for kind, name in files.items() if kind not in gone}


def _check_free(folder: Path, names: Mapping[str, str], overwrite: bool) -> None:
    """Raise UserError unless all of `names` are free in `folder`, or belong to a prediction that may be replaced."""
    taken = [folder / name for name in names.values() if os.path.lexists(folder / name)]
    if not taken:
        return
    if not overwrite:
        raise UserError(
            f"{taken[0]}: exists already; fold with another name=, save into another folder, or replace it with "
            "overwrite=True"
        )
    links = [path for path in taken if path.is_symlink() or not path.is_file()]
    if links or not _is_prediction(folder / names["arrays"]):
        raise UserError(
            f"{(links or taken)[0]}: does not belong to a prediction and is left alone; save into another "
            "folder, or fold with another name="
        )


def _is_prediction(path: Path) -> bool:
    """Return whether this is a prediction's file of arrays."""
    try:
        with zipfile.ZipFile(path) as file:
            return {"positions.npy", "mask.npy", "plddt.npy"} <= set(file.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


@contextlib.contextmanager
def _draft(folder: Path) -> Iterator[Path]:
    """Make an empty folder on the same disk as `folder`; it is deleted afterwards."""
    beside = folder if folder.is_dir() else folder.parent
    beside.mkdir(parents=True, exist_ok=True)
    draft = beside / f".{folder.name}.{uuid4().hex}.partial"
    draft.mkdir()
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def remove_drafts(folders: Iterable[Path]) -> None:
    """Remove what a kill has left of predictions that are to go into these folders."""
    names: dict[Path, set[str]] = {}
    for folder in folders:
        for place in (folder, folder.parent):
            names.setdefault(place, set()).add(folder.name)
    for place, own in names.items():
        for path in place.iterdir() if place.is_dir() else ():
            if (draft := _DRAFT.fullmatch(path.name)) and draft[1] in own and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)


def _move_into(draft: Path, folder: Path, names: Mapping[str, str]) -> None:
    """Move a prediction's files to where they belong, and delete those that only the earlier prediction had.

    The arrays go first and are never deleted: what a kill leaves half-replaced is still recognized as a prediction.
    """
    if not folder.is_dir():
        os.rename(draft, folder)  # fails where another process has made it meanwhile
        return
    for name in names.values():
        if (draft / name).exists():
            os.replace(draft / name, folder / name)
        elif (folder / name).is_file():
            (folder / name).unlink()
