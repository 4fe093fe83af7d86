"""A prediction, its files, which appear all or not at all, and its entry in the summary."""

import contextlib
import html
import io
import itertools
import json
import os
import re
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import numpy as np
import torch

from warpfold import __version__
from warpfold.data.example.templates import TemplateOutcome, count_refusals
from warpfold.data.store.store import Packed, pack_record
from warpfold.data.structure.chain import Chain, Structure
from warpfold.errors import UserError, listed
from warpfold.files import RECORDS, checksum, file_name, read_file, write_atomically, writing
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.model import confidence
from warpfold.prediction.notices import Notice
from warpfold.prediction.sanity import check_geometry, confidence_notices
from warpfold.report.charts import FORMATS
from warpfold.report.coverage import Coverage
from warpfold.report.report import ReportPage, Target, Warned, render
from warpfold.scoring.interface import PairScore, chain_pair_scores
from warpfold.scoring.metrics import superpose
from warpfold.scoring.score_table import PAIRS, PARQUET, SCORES, design_scores, pair_records

StoredPair = Literal["pooled", "whole"]
_RECORD = struct.Struct("<II")  # size of the header, checksum
CITATIONS = "cite.bibtex"
LOG = "predict.log"
# Names in an output folder that no protein may have.
RESERVED = ("alignments", RECORDS, "report.html", "summary.json", CITATIONS, LOG, SCORES, PAIRS, PARQUET)
FRAME = 900  # height in a notebook, pixels
MAX_ATTEMPTS = 100  # to create a draft in a folder that other processes remove
# Arrays that stay when a prediction is thinned.
SMALL = (
    *("positions", "mask", "plddt", "asym_id", "chain_pair_iptm"),
    *("coverage_depth", "coverage_rows", "coverage_total"),
)
_DRAFT = re.compile(r"\.(.+)\.[0-9a-f]{32}\.partial")  # names of `_draft`

# DeepMind's letters for the classes of pLDDT (`alphafold/common/confidence.py`): high, medium, low, disordered.
CATEGORIES = ((90.0, "H"), (70.0, "M"), (50.0, "L"), (0.0, "D"))
CONFIDENT = 70.0  # pLDDT of residues whose backbone is probably right


@dataclass(frozen=True)
class PassStructure:
    """The structure and the confidences of a pass before the last, for N residues, as in `Prediction`."""

    positions: np.ndarray
    plddt: np.ndarray
    ptm: float | None
    iptm: float | None

    def scores(self) -> dict[str, float | None]:
        """Return the scores for the summary, rounded."""
        scores = {name: getattr(self, name) for name in ("ptm", "iptm")}
        rounded = {name: None if score is None else round(score, 4) for name, score in scores.items()}
        return {"mean_plddt": round(float(self.plddt.mean()), 2), **rounded}


@dataclass(frozen=True, repr=False)
class Prediction:
    """A folded protein of N residues, or a complex of K chains with N residues in total; float32 NumPy, angstrom.

    pae[i, j] is the error of residue j when aligned on residue i.
    Representations, None unless requested: single [N, c_s], pair [N, N, c_z], msa [S, N, c_m], and structure_module
    [N, c_s], the single representation at the end of the structure module.
    contacts: probabilities that beta carbons are nearer than 8 angstrom, if requested.
    logits: float32, if requested: plddt [N, 50], resolved [N, 37], masked_msa [S, N, 23 or 22], distogram
    [N, N, 64], and pae [N, N, 64] with the PAE head.  The last two and `distogram` may be memory-mapped temporary
    files.
    """

    name: str
    sequence: str  # of all chains, concatenated
    positions: np.ndarray  # [N, 37, 3], atoms in the order of geometry.residue.ATOM_TYPES
    mask: np.ndarray  # [N, 37], 1 where the residue type has the atom
    plddt: np.ndarray  # [N], 0 to 100
    pae: np.ndarray | None  # [N, N]; None without the PAE head
    max_pae: float | None  # upper bound of pae
    ptm: float | None  # 0 to 1; None without the PAE head
    single: np.ndarray | None = None
    pair: np.ndarray | None = None
    msa: np.ndarray | None = None
    structure_module: np.ndarray | None = None
    details: Mapping[str, Any] = field(default_factory=dict)  # for summary.json: seed, recycles, seconds, ...
    templates: Sequence[Mapping[str, Any]] = ()  # outcome of each offered template
    chain_ids: tuple[str, ...] = ("A",)  # [K]
    # int32 [N], the index of each residue's chain in `chain_ids`, from 1; None if K = 1
    asym_id: np.ndarray | None = None
    iptm: float | None = None  # 0 to 1, of a complex
    # [K, K], 0 to 1: the ipTM of each pair of chains alone; on the diagonal the pTM of each chain alone
    chain_pair_iptm: np.ndarray | None = None
    contacts: np.ndarray | None = None  # float16 [N, N]
    distogram: np.ndarray | None = None  # probabilities, float16 [N, N, 64]
    distogram_edges: np.ndarray | None = None  # float32 [63], angstrom
    coverage: Coverage | None = None  # of the alignment
    logits: Mapping[str, np.ndarray] = field(default_factory=dict)
    recycled: Sequence[PassStructure] = ()  # passes before the last

    def __repr__(self) -> str:
        chains = f" in {len(self.chain_ids)} chains" if len(self.chain_ids) > 1 else ""
        tm_scores = ("ipTM", self.iptm), ("pTM", self.ptm)
        scores = "".join(f", {title} {score:.2f}" for title, score in tm_scores if score is not None)
        return f"<Prediction {self.name}: {len(self.sequence)} residues{chains}, pLDDT {self.mean_plddt:.1f}{scores}>"

    def _repr_html_(self) -> str:
        """Return the report as a frame for notebooks, which isolates its styles and scripts."""
        page, title = html.escape(self.page(), quote=True), html.escape(self.name, quote=True)
        return f'<iframe srcdoc="{page}" title="{title}" width="100%" height="{FRAME}" style="border:0"></iframe>'

    def picture(self) -> bytes:
        """Return a PNG with the structure, coloured by pLDDT, and the PAE."""
        from warpfold.report.figures import draw_prediction  # loads matplotlib

        return draw_prediction(self._target())

    _repr_png_ = picture  # shown where no scripts may run, as on GitHub

    def page(self) -> str:
        """Return a report of this prediction as one self-contained page: structure, pLDDT, PAE."""
        notices = (notice.record() for notice in confidence_notices(self.plddt, self.ptm, self.iptm))
        warnings = [Warned(record["text"]) for record in (*self.details.get("warnings", ()), *notices)]
        return render(ReportPage(self.name, "Folded by WarpFold.", targets=[self._target()], warnings=warnings))

    def _target(self) -> Target:
        tm_scores = ("ipTM", self.iptm), ("pTM", self.ptm)
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
                *((title, f"{score:.2f}") for title, score in tm_scores if score is not None),
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
        """Compute the score that ranks predictions: 0.8 ipTM + 0.2 pTM of a complex, 0 to 1, or the mean pLDDT."""
        tm_scores = () if self.iptm is None or self.ptm is None else (torch.tensor(self.ptm), torch.tensor(self.iptm))
        return float(confidence.ranking_confidence(torch.from_numpy(self.plddt), *tm_scores))

    @property
    def spans(self) -> dict[str, slice]:
        """Return the residues of each chain: id -> slice of the N residues, in the user's order."""
        if self.asym_id is None:
            return {self.chain_ids[0]: slice(0, len(self.sequence))}
        # No residue has index 0, so the first end is the start of the first chain.
        ends = np.cumsum(np.bincount(self.asym_id)).tolist()
        return {chain: slice(*span) for chain, span in zip(self.chain_ids, itertools.pairwise(ends))}

    def chains(self) -> list[Chain]:
        """Return the predicted chains, each numbered from 1."""
        chains = []
        for chain, span in self.spans.items():
            sequence = self.sequence[span]
            index = np.arange(len(sequence))
            numbers = tuple(str(i + 1) for i in index)
            chains.append(Chain(chain, sequence, self.positions[span], self.mask[span], index, numbers))
        return chains

    def structure(self) -> Structure:
        """Return the predicted structure in the form of a structure file that was read."""
        return Structure(self.name, None, None, None, {chain.id: chain for chain in self.chains()})

    def mmcif(self) -> str:
        """Return ModelCIF text, with pLDDT also in the B column."""
        from warpfold.data.structure.write import Modelling, write_mmcif

        scores = {name: score for name, score in (("pTM", self.ptm), ("ipTM", self.iptm)) if score is not None}
        modelling = Modelling("; ".join(self._protocol) or None, scores)
        return write_mmcif(self.name, self.chains(), b_factors=self._plddt_by_chain, predicted=modelling)

    @property
    def _protocol(self) -> list[str]:
        """Return the facts for structure files; the parameters and the seed make copied files identifiable."""
        protocol = {name: self.details[name] for name in ("recycles", "templates") if self.details.get(name)}
        protocol |= {name: self.details[name] for name in ("model", "seed") if self.details.get(name) is not None}
        return [f"{name}: {', '.join(value) if isinstance(value, list) else value}" for name, value in protocol.items()]

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
        """Compute the scores of binder and target, as in a row of scores.csv (docs/howto/score.md).

        fixed: the chains of the target; by default all but the last.  given: the designed complex, by chain.
        """
        chains = {chain.id: chain for chain in self.chains()}
        plddt = {chain: self.plddt[span] for chain, span in self.spans.items()}
        return design_scores(chains, plddt, self.pair_scores, fixed, given)

    def confidences(self) -> dict[str, float | None]:
        """Return the scores of the whole prediction, rounded as in files; ipTM is None for a single chain."""
        tm_scores = {name: getattr(self, name) for name in ("ptm", "iptm")}
        return {
            "mean_plddt": round(self.mean_plddt, 2),
            **{name: None if score is None else round(score, 4) for name, score in tm_scores.items()},
            "ranking_confidence": round(self.ranking_confidence, 6),
        }

    def pdb(self) -> str:
        """Return PDB text, with pLDDT in the B column.  Errors: UserError if the format cannot hold the structure."""
        from warpfold.data.structure.write import write_pdb

        remarks = [f"Predicted by WarpFold {__version__}", *self._protocol]
        return write_pdb(self.name, self.chains(), b_factors=self._plddt_by_chain, remarks=remarks)

    @property
    def _plddt_by_chain(self) -> list[np.ndarray]:
        return [self.plddt[span] for span in self.spans.values()]

    def record(self, pair: StoredPair) -> Packed:
        """Pack the representations without msa, in half precision, as a record of a store (docs/reference/outputs.md).

        Errors: UserError if a value is too large for half precision.
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
                    f"{np.abs(arrays[name]).max():g}). Keep representations in the .npz."
                )
        sequence = ":".join(self.sequence[span] for span in self.spans.values())
        return pack_record(halves, {"name": self.name, "sequence": sequence, "chains": list(self.spans)})

    def figures(self) -> dict[str, bytes]:
        """Draw pLDDT, PAE and alignment coverage: suffix, such as "pae.svg" -> content of the file."""
        from warpfold.report.prediction_figures import draw_figures

        chains = self.spans if self.asym_id is not None else {}
        return draw_figures(self.plddt, self.pae, self.coverage, chains)

    def save(
        self,
        folder: Path | str,
        overwrite: bool = False,
        stored_pair: StoredPair | None = None,
        figures: bool = True,
    ) -> dict[str, str]:
        """Write all files of this prediction into `folder` (docs/reference/outputs.md); return kind -> file name.

        The files are named after the protein, so a folder may hold many predictions.  Other files in it stay.  A new
        folder appears complete or not at all; in an existing folder, this holds for each file.
        overwrite: replace an earlier prediction of a protein of this name.  The PDB file is omitted if the format
        cannot hold the structure.  stored_pair: write the representations as a record for a store, not into the .npz.
        figures: draw pLDDT, PAE and alignment coverage as PNG and SVG.
        Errors: UserError if a file of that name exists (with `overwrite`, one that does not belong to a prediction),
        and if the folder cannot be written.
        """
        folder = Path(folder)
        names = _names_in(folder, self.name) | file_names(self.name, range(len(self.recycled)))
        _check_free(folder, names, overwrite)
        fields = ["positions", "mask", "plddt", "pae", "asym_id", "chain_pair_iptm", "contacts", "distogram_edges"]
        fields += [] if stored_pair else ["single", "pair", "msa", "structure_module"]
        arrays = {name: getattr(self, name) for name in fields if getattr(self, name) is not None}
        arrays |= self.coverage.arrays() if self.coverage else {}
        texts = {"mmcif": self.mmcif(), "plddt": json.dumps(plddt_json(self.plddt, self.spans))}
        for number, earlier in enumerate(self.recycled):
            texts[f"recycle_{number}"] = replace(self, **vars(earlier), details={"recycles": number}).mmcif()
        with contextlib.suppress(UserError):
            texts["pdb"] = self.pdb()
        if self.templates:
            texts["templates"] = json.dumps(list(self.templates), indent=1)
        with writing(folder, "Name another folder"), _draft(folder) as draft:
            np.savez_compressed(draft / names["arrays"], **arrays)
            for kind, text in texts.items():
                (draft / names[kind]).write_text(text, encoding="utf-8")
            for suffix, content in (self.figures() if figures else {}).items():
                (draft / names[suffix.replace(".", "_")]).write_bytes(content)
            if self.pae is not None and self.max_pae is not None:
                write_pae(draft / names["pae"], self.pae, self.max_pae)
            scores = self.plddt, self.pae, self.ptm, self.iptm, self.chain_pair_iptm
            write_scores(draft / names["scores"], *scores, pair_records(self.pair_scores))
            if self.distogram is not None:
                np.save(draft / names["distogram"], self.distogram)
            if stored_pair:
                record = self.record(stored_pair)
                head = _RECORD.pack(record.header, record.crc)
                (draft / names["representations"]).write_bytes(head + record.data)
            written_files = {kind: name for kind, name in names.items() if (draft / name).exists()}
            _move_into(draft, folder, names)
        return written_files


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
    figures: bool = False,
) -> dict[str, Any]:
    """Check a prediction's geometry, write it into its own folder in `out`, and return its entry in the summary.

    below: the folder inside that of the protein, if it has several predictions.  notices: about the input.
    fixed, given: as in `Prediction.design_scores`.  wanted: decides from the entry without files whether to write them.
    stored_pair, figures: as in `Prediction.save`.
    """
    outcomes = [TemplateOutcome(**outcome) for outcome in prediction.templates]
    details = dict(prediction.details)
    chains, detail_warnings = _complex_entry(prediction, details.pop("chain_depths", {})), details.pop("warnings", ())
    if prediction.asym_id is not None or given is not None:
        chains["scores"] = prediction.design_scores(fixed, given)
    geometry = check_geometry(prediction.positions, prediction.mask, prediction.asym_id)
    doubt_notices = confidence_notices(prediction.plddt, prediction.ptm, prediction.iptm)
    folder = f"{file_name(prediction.name)}/{below}".rstrip("/")
    head, scores = {"name": prediction.name, "folder": folder}, prediction.confidences()
    results = {
        "length": len(prediction.sequence),
        "sequence": ":".join(prediction.sequence[span] for span in prediction.spans.values()),
        "mean_plddt": scores["mean_plddt"],
        "ptm": scores["ptm"],
        **chains,
        "ranking_confidence": scores["ranking_confidence"],
        **details,
        **({"recycled": [recycle.scores() for recycle in prediction.recycled]} if prediction.recycled else {}),
        "templates_unused": sum(not outcome.used for outcome in outcomes),
        "templates_refused": count_refusals(outcomes),
        "templates_missing": sum(outcome.missing for outcome in outcomes),
        "geometry": asdict(geometry),
    }
    refuse_links(out, folder)
    files: dict[str, str] = {}
    if keeps_files := wanted is None or wanted(head | results):
        # Files of an earlier run are there if it was killed, or is replaced with --force.
        files = prediction.save(out / folder, overwrite=True, stored_pair=stored_pair, figures=figures)
    warnings = [
        *(notice.record() for notice in notices),
        *detail_warnings,
        *(notice.record() for notice in _input_notices(prediction, files)),
        *(notice.record() for notice in (*geometry.notices(), *doubt_notices)),
    ]
    entry = {**head, "files": files, "checksums": checksums_of(out / folder, files), **results, "warnings": warnings}
    return entry if keeps_files else drop_prediction(out, entry)


def drop_prediction(out: Path, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Delete the files of a prediction, and its folders if nothing else is in them; return its entry without them."""
    folder = out / entry["folder"]
    remove_prediction(folder, entry["name"])
    if folder.parent != out:
        with contextlib.suppress(OSError):  # not empty, or already gone
            folder.parent.rmdir()
    return {**entry, "files": {}, "checksums": {}, "dropped": True}


def _complex_entry(prediction: Prediction, depths: Mapping[str, int]) -> dict[str, Any]:
    """Return the part of an entry that only complexes have.  depths: rows of each chain's alignment."""
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
                "ptm": chain_ptm,
                "msa_depth": depths.get(chain),
            }
            for (chain, span), chain_ptm in zip(prediction.spans.items(), ptm)
        ],
        "chain_pair_iptm": None if pairs is None else np.round(pairs.astype(float), 4).tolist(),
        "interfaces": [
            {
                "chains": list(pair.chains),
                "iptm": None if pair.iptm is None else round(pair.iptm, 4),
                "plddt": None if pair.interface_plddt is None else round(pair.interface_plddt, 2),
                "contacts": pair.contacts,
            }
            for pair in prediction.pair_scores
            if pair.contacts
        ],
        "pair_scores": pair_records(prediction.pair_scores),
    }


def _input_notices(prediction: Prediction, files: Mapping[str, str]) -> Iterator[Notice]:
    """Yield warnings about residues X, which have no atoms, and about a missing PDB file."""
    unknown = [
        f"{chain} {number}" if prediction.asym_id is not None else str(number)
        for chain, span in prediction.spans.items()
        for number, letter in enumerate(prediction.sequence[span], 1)
        if letter == "X"
    ]
    if unknown:
        yield Notice("unknown_residues", {"count": len(unknown), "detail": f"X at {listed(unknown)}"})
    if files and "pdb" not in files:
        try:
            prediction.pdb()
        except UserError as error:
            reason = str(error).removeprefix(prediction.name + ": ").removesuffix(". Write mmCIF.")
            yield Notice("no_pdb", {"why": reason})


def plddt_json(plddt: np.ndarray, spans: Mapping[str, slice]) -> dict[str, list[Any]]:
    """Convert pLDDT [N] to the layout of AlphaFold DB's confidence files; complexes have the chain of each residue."""
    lengths = {chain: span.stop - span.start for chain, span in spans.items()}
    chains = {"chainId": [chain for chain, length in lengths.items() for _ in range(length)]}
    return {
        **(chains if len(spans) > 1 else {}),
        "residueNumber": [i + 1 for length in lengths.values() for i in range(length)],
        "confidenceScore": [round(float(value), 2) for value in plddt],
        "confidenceCategory": [next(letter for bound, letter in CATEGORIES if value >= bound) for value in plddt],
    }


def write_pae(path: Path, pae: np.ndarray, max_pae: float) -> None:
    """Write PAE [N, N] in the layout of AlphaFold DB's files: whole angstroms, in a list of one object.

    The rows are written one by one, since each value takes 32 bytes as a Python number.
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

    `max_pae` is the largest error in `pae`.  Values that are None have no key, as in ColabFold.  chain_pair_iptm [K, K]
    of a complex, with the pTM of its chains on the diagonal, has AlphaFold 3's keys.
    pair_scores: as in `pair_records`.
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
    """Yield the JSON of a matrix [N, N] of values from 0, a row at a time, rounded to multiples of 1 / parts.

    Formatting each distinct number once makes this several times faster than `json.dumps`.
    """
    numbers = range(round(parts * float(values.max())) + 1)
    texts = [json.dumps(number if parts == 1 else number / parts) for number in numbers]
    for index, row in enumerate(values):
        line = ", ".join(map(texts.__getitem__, np.rint(parts * row.astype(np.float64)).astype(int).tolist()))
        yield f"{', ' * (index > 0)}[{line}]"


def file_names(protein: str, recycles: Iterable[int] = ()) -> dict[str, str]:
    """Name the files of a prediction by kind, the arrays first, by which a prediction is recognized.

    recycles: the passes before the last with structure files, from 0.
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
        **{f"{figure}_{form}": f"_{figure}.{form}" for figure in ("plddt", "pae", "coverage") for form in FORMATS},
        "templates": "_templates.json",
        "relaxed": "_relaxed.json",  # this and the next: by relax/files.py
        "relaxed_mmcif": "_relaxed.cif",
        "relaxed_pdb": "_relaxed.pdb",
        "archive": "_results.zip",  # by pages.py
        **{f"recycle_{number}": f"_recycle_{number}.cif" for number in recycles},
    }
    return {kind: stem + ending for kind, ending in endings.items()}


def _names_in(folder: Path, protein: str) -> dict[str, str]:
    """Return `file_names` with all passes whose structures are in the folder."""
    name = re.compile(re.escape(file_name(protein)) + r"_recycle_(\d+)\.cif")
    files = folder.iterdir() if folder.is_dir() else ()
    return file_names(protein, [int(match[1]) for file in files if (match := name.fullmatch(file.name))])


def remove_prediction(folder: Path, protein: str) -> None:
    """Delete the files of a prediction from its folder, and the folder if nothing else is in it.

    Other files stay.  Errors: UserError if a file cannot be removed.
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
    """Return kind -> size in bytes and digest of a prediction's files, for `damaged_files`."""
    return {kind: [(folder / file).stat().st_size, checksum(folder / file)] for kind, file in files.items()}


def damaged_files(out: Path, entry: Mapping[str, Any], thorough: bool = True) -> list[Path]:
    """Return the files of an entry of the summary that are missing or differ from the written ones in any bit.

    thorough: False only checks that they exist, without reading them.
    """
    checksums = entry.get("checksums", {})

    def is_whole(kind: str, path: Path) -> bool:
        if not thorough or not path.is_file():
            return path.is_file()
        return [path.stat().st_size] == checksums.get(kind, [])[:1] and checksum(path) == checksums[kind][1]

    with writing(out / entry["folder"]):
        paths = {kind: out / entry["folder"] / file for kind, file in entry["files"].items()}
        return [path for kind, path in paths.items() if not is_whole(kind, path)]


def clear_damaged(out: Path, entry: Mapping[str, Any], damaged: Sequence[Path]) -> None:
    """Make room for a prediction that is made again: rename its damaged files, which a user may have edited.

    Its other files are deleted, since they will be written again.
    """
    folder = out / entry["folder"]
    with writing(folder):
        for path in damaged:
            if path.is_file():
                endings = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
                names = (f"damaged-{path.name}{ending}" for ending in endings)
                path.rename(next(backup for backup in map(folder.joinpath, names) if not backup.exists()))
        for file in _names_in(folder, entry["name"]).values():
            if (folder / file).is_file():
                (folder / file).unlink()


def superposition(out: Path, entry: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Compute the rotation [3, 3] and translation [3] that superpose a prediction on another one of the same query.

    Cα with a pLDDT of at least 70 in both are superposed; all Cα if these are fewer than three.
    """
    positions, plddt = [], []
    for prediction_entry in (entry, target):
        with np.load(
            out / prediction_entry["folder"] / prediction_entry["files"]["arrays"], allow_pickle=False
        ) as arrays:
            positions.append(arrays["positions"][:, ATOM_ORDER["CA"]])
            plddt.append(arrays["plddt"])
            has_ca = arrays["mask"][:, ATOM_ORDER["CA"]] > 0
    is_confident = has_ca & (np.minimum(*plddt) >= CONFIDENT)
    mobile, fixed = positions
    return superpose(mobile, fixed, is_confident if is_confident.sum() >= 3 else has_ca)


def refuse_links(out: Path, folder: str) -> None:
    """Raise UserError if a prediction's folder, or that of its protein, is a symbolic link."""
    for path in (out / folder, *(out / folder).parents):
        if path == out:
            return
        if path.is_symlink():
            raise UserError(
                f"{path}: is a symbolic link, and nothing is written through it. Remove it, or name another folder."
            )


def thin_prediction(folder: Path, protein: str, files: Mapping[str, str]) -> dict[str, str]:
    """Delete PAE, representations and distogram, which grow with the square of the length; return the other files.

    files: kind -> file name, of a prediction of this name.  Other files in the folder stay.
    Errors: UserError if a file cannot be written or removed.
    """
    names = file_names(protein)
    path = folder / names["arrays"]
    removed = {kind for kind in ("pae", "scores", "distogram", "representations") if files.get(kind) == names[kind]}
    if folder.is_symlink() or not _is_prediction(path):
        return dict(files)
    with writing(folder):
        with np.load(path, allow_pickle=False) as arrays:
            small_arrays = {name: arrays[name] for name in arrays.files if name in SMALL}
        content = io.BytesIO()
        np.savez_compressed(content, **small_arrays)
        write_atomically(path, content.getvalue())
        for kind in removed:
            (folder / names[kind]).unlink(missing_ok=True)
    return {kind: name for kind, name in files.items() if kind not in removed}


def _check_free(folder: Path, names: Mapping[str, str], overwrite: bool) -> None:
    """Raise UserError unless the names are free in the folder, or belong to a prediction that may be replaced."""
    occupied = [folder / name for name in names.values() if os.path.lexists(folder / name)]
    if not occupied:
        return
    if not overwrite:
        raise UserError(
            f"{occupied[0]}: exists already. Fold with another name=, save into another folder, or replace it with "
            "overwrite=True."
        )
    links = [path for path in occupied if path.is_symlink() or not path.is_file()]
    if links or not _is_prediction(folder / names["arrays"]):
        raise UserError(
            f"{(links or occupied)[0]}: does not belong to a prediction and is left alone. Save into another "
            "folder, or fold with another name=."
        )


def _is_prediction(path: Path) -> bool:
    """Return whether this is the file of arrays of a prediction."""
    try:
        with zipfile.ZipFile(path) as file:
            return {"positions.npy", "mask.npy", "plddt.npy"} <= set(file.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


@contextlib.contextmanager
def _draft(folder: Path) -> Iterator[Path]:
    """Create an empty folder on the same disk as `folder`; it is deleted afterwards."""
    parent = folder if folder.is_dir() else folder.parent
    draft = parent / f".{folder.name}.{uuid4().hex}.partial"
    for attempts_left in reversed(range(MAX_ATTEMPTS)):
        # Another worker, which drops the protein's other predictions, may remove the folder while it is empty.
        try:
            parent.mkdir(parents=True, exist_ok=True)
            draft.mkdir()
            break
        except (FileNotFoundError, FileExistsError):
            if not attempts_left:
                raise
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def remove_drafts(folders: Iterable[Path]) -> None:
    """Remove the drafts that killed processes have left of predictions for these folders."""
    names: dict[Path, set[str]] = {}
    for folder in folders:
        for parent in (folder, folder.parent):
            names.setdefault(parent, set()).add(folder.name)
    for parent, predictions in names.items():
        for path in parent.iterdir() if parent.is_dir() else ():
            if (draft := _DRAFT.fullmatch(path.name)) and draft[1] in predictions and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)


def _move_into(draft: Path, folder: Path, names: Mapping[str, str]) -> None:
    """Move a prediction's files into its folder, and delete files that only the earlier prediction had.

    The arrays move first and are never deleted, so that a prediction that a kill leaves half-replaced is still
    recognized as one.
    """
    if not folder.is_dir():
        os.rename(draft, folder)  # fails if another process created it
        return
    for name in names.values():
        if (draft / name).exists():
            os.replace(draft / name, folder / name)
        elif (folder / name).is_file():
            (folder / name).unlink()
