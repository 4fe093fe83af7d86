"""Build, append to and rebuild the score tables of a run, with one row per prediction or per pair of chains."""

import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.data.structure.chain import Chain
from warpfold.errors import UserError
from warpfold.files import as_csv, write_atomically, writing
from warpfold.scoring.interface import PairScore, rmsd_to_given
from warpfold.scoring.selection import MORE_IS_BETTER

SCORES, PAIRS, PARQUET = "scores.csv", "scores_pairs.csv", "scores.parquet"
# Parquet types: these columns are text and these are integers; all others are floating-point numbers.
TEXT_COLUMNS = ("name", "model", "binder", "target", "interface", "structure")
INTEGER_COLUMNS = ("seed", "length", "contacts", "clashes")
# Scores of the whole prediction, copied from its entry in summary.json.
ENTRY_SCORES = ("mean_plddt", "ptm", "iptm", "ranking_confidence")
INTERFACE_SCORES = [name for name in MORE_IS_BETTER if name not in (*ENTRY_SCORES, "pair_iptm")]
COLUMNS = ("name", "model", "seed", "length", "binder", "target", "interface", *MORE_IS_BETTER, "structure")
PAIR_SCORES = [field.name for field in fields(PairScore) if field.name != "chains"]
PAIR_COLUMNS = ("name", "model", "seed", "chain_a", "chain_b", *PAIR_SCORES)
DECIMALS = 4

Row = dict[str, Any]


def design_scores(
    chains: Mapping[str, Chain],
    plddt: Mapping[str, np.ndarray],
    pairs: Sequence[PairScore],
    fixed: Sequence[str] = (),
    given: Mapping[str, Chain] | None = None,
) -> Row:
    """Score a prediction as a design: the binder against its target.

    plddt: pLDDT of the residues of each chain. pairs: the scores of all pairs of chains. The target consists of the
    fixed chains, or of all chains but the last if none is fixed; the remaining chains form the binder. given: the
    designed complex, the reference of the RMSDs.
    Contacts, clashes and `pae_interaction` cover the binder and the whole target (Bennett et al. 2023). All other
    scores are those of the best interface: the highest ipSAE or, without aligned errors, the most contacts.
    """
    ids = list(chains)
    target = [id for id in ids if id in fixed]
    if not target or len(target) == len(ids):
        target = ids[:-1]
    binder = [id for id in ids if id not in target]
    interfaces = [pair for pair in pairs if (pair.chains[0] in binder) != (pair.chains[1] in binder)]
    row: Row = {"binder": ":".join(binder), "target": ":".join(target)}
    if interfaces:
        best = max(interfaces, key=lambda pair: (pair.ipsae or 0.0, pair.contacts))
        row |= {"interface": ":".join(best.chains), "pair_iptm": best.iptm}
        row |= {name: getattr(best, name) for name in INTERFACE_SCORES if hasattr(best, name)}
        row["contacts"] = sum(pair.contacts for pair in interfaces)
        row["clashes"] = sum(pair.clashes for pair in interfaces)
        errors = [pair.pae_interaction for pair in interfaces if pair.pae_interaction is not None]
        if errors:
            # Weighting by the number of residue pairs gives the mean over all residues of binder and target.
            sizes = [math.prod(len(chains[id].sequence) for id in pair.chains) for pair in interfaces]
            row["pae_interaction"] = float(np.average(errors, weights=sizes))
    row["binder_plddt"] = float(np.concatenate([plddt[id] for id in binder]).mean())
    if given is not None:
        row |= rmsd_to_given(chains, given, target, binder)
    return rounded(row)


def rounded(scores: Mapping[str, Any]) -> Row:
    """Round scores to the number of decimals that files contain."""
    return {name: round(score, DECIMALS) if isinstance(score, float) else score for name, score in scores.items()}


def pair_records(pairs: Sequence[PairScore]) -> list[Row]:
    """Convert the scores of pairs of chains to the records of summary.json."""
    return [rounded(asdict(pair)) | {"chains": list(pair.chains)} for pair in pairs]


def row_of(entry: Mapping[str, Any]) -> Row:
    """Build the table row of a prediction from its entry in summary.json; missing values are None."""
    values = {**entry, **entry.get("scores", {})}
    structure = f"{entry['folder']}/{entry['files']['mmcif']}" if entry.get("files") else None
    return {name: values.get(name) for name in COLUMNS} | {"structure": structure}


def pair_rows(entry: Mapping[str, Any]) -> list[Row]:
    """Build the table rows of all pairs of chains of a prediction from its entry in summary.json."""
    prediction = {name: entry.get(name) for name in ("name", "model", "seed")}
    return [
        prediction
        | dict(zip(("chain_a", "chain_b"), record["chains"]))
        | {name: record.get(name) for name in PAIR_SCORES}
        for record in entry.get("pair_scores", ())
    ]


@dataclass(frozen=True)
class ScoreTables:
    """The score tables in the output folder `out`. pairs: also write a table with one row per pair of chains.

    Several processes append to the tables, so callers of `append` and `rebuild` must hold the folder's lock.
    """

    out: Path
    pairs: bool = False

    @property
    def names(self) -> list[str]:
        """List the files that a running job writes."""
        return [SCORES, PAIRS] if self.pairs else [SCORES]

    def append(self, entry: Mapping[str, Any]) -> None:
        """Append the rows of a prediction; removes an incomplete last line that a killed process left."""
        for name, columns, rows in self._contents([entry]):
            path = self.out / name
            with writing(path), open(path, "r+b" if path.is_file() else "w+b") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - (1 << 16)))
                tail = file.read()
                complete = size - len(tail) + tail.rfind(b"\n") + 1
                file.truncate(complete)
                file.seek(complete)
                file.write(as_csv(columns, rows, header=complete == 0).encode())

    def rebuild(self, entries: Iterable[Mapping[str, Any]], finished: bool = False) -> list[str]:
        """Rewrite the files with the rows of all entries; returns their names.

        finished: also write a Parquet file if pyarrow is installed.
        """
        contents = self._contents(list(entries))
        for name, columns, rows in contents:
            write_atomically(self.out / name, as_csv(columns, rows))
        return [*self.names, *([PARQUET] if finished and _write_parquet(self.out / PARQUET, contents[0][2]) else [])]

    def _contents(self, entries: Sequence[Mapping[str, Any]]) -> list[tuple[str, Sequence[str], list[Row]]]:
        """Build the file name, columns and rows of each table."""
        contents: list[tuple[str, Sequence[str], list[Row]]] = [(SCORES, COLUMNS, [row_of(entry) for entry in entries])]
        if self.pairs:
            contents.append((PAIRS, PAIR_COLUMNS, [row for entry in entries for row in pair_rows(entry)]))
        return contents


def check_tables(out: Path, tables: ScoreTables | None, earlier: Mapping[str, Any]) -> None:
    """Raise UserError if a table would overwrite a file that the earlier summary of the folder does not list."""
    for name in [] if tables is None else tables.names:
        if os.path.lexists(out / name) and name not in earlier.get("tables", ()):
            raise UserError(f"{out / name}: not written by WarpFold, which writes a table of this name. Move the file")


def remove_tables(out: Path, names: Iterable[str]) -> None:
    """Delete the tables of an earlier run, by the names in its summary."""
    for name in {SCORES, PAIRS, PARQUET}.intersection(names):
        with writing(out / name):
            (out / name).unlink(missing_ok=True)


def _write_parquet(path: Path, rows: Sequence[Row]) -> bool:
    """Write the rows as Parquet; returns False if pyarrow is not installed."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return False
    types = {name: pyarrow.string() if name in TEXT_COLUMNS else pyarrow.float64() for name in COLUMNS}
    schema = pyarrow.schema(list((types | dict.fromkeys(INTEGER_COLUMNS, pyarrow.int64())).items()))
    content = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema=schema), content)
    write_atomically(path, content.getvalue())
    return True
