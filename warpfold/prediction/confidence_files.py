"""How sure a model is, in the files that others' programs read: AlphaFold DB's and ColabFold's (docs/outputs.md)."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

# DeepMind's letters for the classes of pLDDT, in `alphafold/common/confidence.py`: high, medium, low, disordered.
CATEGORIES = ((90.0, "H"), (70.0, "M"), (50.0, "L"), (0.0, "D"))


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
) -> None:
    """Write pLDDT [N], PAE [N, N], pTM and ipTM in the layout of ColabFold's `*_scores_*.json`: two decimals.

    `max_pae` is the largest error in `pae`.  What is None has no key, as there.  chain_pair_iptm [K, K] of a complex,
    and the pTM of its chains on the diagonal, have AlphaFold 3's keys.
    """
    head: dict[str, Any] = {"plddt": [round(float(value), 2) for value in plddt]}
    if pae is not None:
        head["max_pae"] = float(pae.max())
    tail: dict[str, Any] = {"ptm": ptm, "iptm": iptm}
    tail = {key: round(float(value), 2) for key, value in tail.items() if value is not None}
    if chain_pair_iptm is not None:
        pairs = chain_pair_iptm.astype(float).round(2)
        tail |= {"chain_ptm": pairs.diagonal().tolist(), "chain_pair_iptm": pairs.tolist()}
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
