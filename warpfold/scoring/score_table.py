"""The table of a run's scores, one row per prediction: what stands in it, and how it stays whole while it grows."""

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
TEXTS = ("name", "model", "binder", "target", "interface", "structure")  # columns; of the others these are whole:
WHOLE = ("seed", "length", "contacts", "clashes")
OF_ENTRY = ("mean_plddt", "ptm", "iptm", "ranking_confidence")  # of the whole prediction, as summary.json has them
OF_INTERFACE = [name for name in MORE_IS_BETTER if name not in (*OF_ENTRY, "pair_iptm")]
COLUMNS = ("name", "model", "seed", "length", "binder", "target", "interface", *MORE_IS_BETTER, "structure")
OF_PAIRS = [one.name for one in fields(PairScore) if one.name != "chains"]
PAIR_COLUMNS = ("name", "model", "seed", "chain_a", "chain_b", *OF_PAIRS)
DIGITS = 4  # after the point

Row = dict[str, Any]


def design_scores(
    chains: Mapping[str, Chain],
    plddt: Mapping[str, np.ndarray],
    pairs: Sequence[PairScore],
    fixed: Sequence[str] = (),
    given: Mapping[str, Chain] | None = None,
) -> Row:
    """Score a prediction as a design: the binder against its target.

    plddt: of each chain's residues.  pairs: the scores of each two chains.  The target are the fixed chains or, without
    any, all but the last; the binder are the others.  given: the complex that was designed, for RMSDs.
    Contacts, clashes and `pae_interaction` are of the binder against the whole target (Bennett et al. 2023); the other
    scores are of the best interface, with the highest ipSAE or, without aligned errors, the most contacts.
    """
    ids = list(chains)
    target = [id for id in ids if id in fixed]
    if not target or len(target) == len(ids):
        target = ids[:-1]
    binder = [id for id in ids if id not in target]
    between = [one for one in pairs if (one.chains[0] in binder) != (one.chains[1] in binder)]
    found: Row = {"binder": ":".join(binder), "target": ":".join(target)}
    if between:
        best = max(between, key=lambda one: (one.ipsae or 0.0, one.contacts))
        found |= {"interface": ":".join(best.chains), "pair_iptm": best.iptm}
        found |= {name: getattr(best, name) for name in OF_INTERFACE if hasattr(best, name)}
        found["contacts"] = sum(one.contacts for one in between)
        found["clashes"] = sum(one.clashes for one in between)
        errors = [one.pae_interaction for one in between if one.pae_interaction is not None]
        if errors:
            # The mean over all pairs of residues: of each two chains, weighted with the number of their pairs.
            sizes = [math.prod(len(chains[id].sequence) for id in one.chains) for one in between]
            found["pae_interaction"] = float(np.average(errors, weights=sizes))
    found["binder_plddt"] = float(np.concatenate([plddt[id] for id in binder]).mean())
    if given is not None:
        found |= rmsd_to_given(chains, given, target, binder)
    return rounded(found)


def rounded(scores: Mapping[str, Any]) -> Row:
    """Return scores as files have them."""
    return {name: round(one, DIGITS) if isinstance(one, float) else one for name, one in scores.items()}


def pair_records(pairs: Sequence[PairScore]) -> list[Row]:
    """Return the scores of each two chains as summary.json has them."""
    return [rounded(asdict(one)) | {"chains": list(one.chains)} for one in pairs]


def row_of(entry: Mapping[str, Any]) -> Row:
    """Return the row of a prediction, from its entry in summary.json; what is not known of it is None."""
    known = {**entry, **entry.get("scores", {})}
    structure = f"{entry['folder']}/{entry['files']['mmcif']}" if entry.get("files") else None
    return {name: known.get(name) for name in COLUMNS} | {"structure": structure}


def pair_rows(entry: Mapping[str, Any]) -> list[Row]:
    """Return the rows of each two chains of a prediction, from its entry in summary.json."""
    which = {name: entry.get(name) for name in ("name", "model", "seed")}
    return [
        which | dict(zip(("chain_a", "chain_b"), one["chains"])) | {name: one.get(name) for name in OF_PAIRS}
        for one in entry.get("pair_scores", ())
    ]


@dataclass(frozen=True)
class ScoreTables:
    """The tables of a run in the folder `out`.  pairs: with one of each two chains.

    Several processes append to them; whoever calls `append` or `rebuild` holds the folder's lock.
    """

    out: Path
    pairs: bool = False

    @property
    def names(self) -> list[str]:
        """Return the files that are there while the run goes on."""
        return [SCORES, PAIRS] if self.pairs else [SCORES]

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add the rows of a prediction to the ends of the files; what a kill has left of a line before goes."""
        for name, columns, rows in self._parts([entry]):
            path = self.out / name
            with writing(path), open(path, "r+b" if path.is_file() else "w+b") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - (1 << 16)))
                tail = file.read()
                whole = size - len(tail) + tail.rfind(b"\n") + 1
                file.truncate(whole)
                file.seek(whole)
                file.write(as_csv(columns, rows, header=whole == 0).encode())

    def rebuild(self, entries: Iterable[Mapping[str, Any]], finished: bool = False) -> list[str]:
        """Write the files anew, with a row of each entry; return their names.

        finished: with a Parquet file, where pyarrow is there.
        """
        every = list(entries)
        parts = self._parts(every)
        for name, columns, rows in parts:
            write_atomically(self.out / name, as_csv(columns, rows))
        return [*self.names, *([PARQUET] if finished and _write_parquet(self.out / PARQUET, parts[0][2]) else [])]

    def _parts(self, entries: Sequence[Mapping[str, Any]]) -> list[tuple[str, Sequence[str], list[Row]]]:
        parts: list[tuple[str, Sequence[str], list[Row]]] = [(SCORES, COLUMNS, [row_of(one) for one in entries])]
        if self.pairs:
            parts.append((PAIRS, PAIR_COLUMNS, [row for one in entries for row in pair_rows(one)]))
        return parts


def check_tables(out: Path, tables: ScoreTables | None, earlier: Mapping[str, Any]) -> None:
    """Raise UserError where a file of such a name is none of those that the earlier summary of a folder names."""
    for name in [] if tables is None else tables.names:
        if os.path.lexists(out / name) and name not in earlier.get("tables", ()):
            raise UserError(f"{out / name}: WarpFold did not write it, and has a table of this name; move it away")


def remove_tables(out: Path, names: Iterable[str]) -> None:
    """Delete the tables that an earlier run has written, by the names that its summary has."""
    for name in {SCORES, PAIRS, PARQUET}.intersection(names):
        with writing(out / name):
            (out / name).unlink(missing_ok=True)


def _write_parquet(path: Path, rows: Sequence[Row]) -> bool:
    """Write the rows as Parquet, and return whether pyarrow is there to do so."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return False
    kinds = {name: pyarrow.string() if name in TEXTS else pyarrow.float64() for name in COLUMNS}
    schema = pyarrow.schema(list((kinds | dict.fromkeys(WHOLE, pyarrow.int64())).items()))
    content = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema=schema), content)
    write_atomically(path, content.getvalue())
    return True
