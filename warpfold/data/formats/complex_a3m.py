"""ColabFold's alignments of complexes: rows across the sequences of all chains, one after another.

The first line gives the lengths of the different sequences and how many copies each has, `#120,88<TAB>1,2`.  A row with
residues in several of them is a pair; a row with residues in one belongs to that one alone.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from warpfold.data.formats.alignment import Alignment, decode, encode
from warpfold.errors import UserError
from warpfold.geometry.residue import GAP

_FIRST = re.compile(rb"(\xef\xbb\xbf)?\s*#\d+,[\d,]*\t")
_ANNOUNCED = re.compile(rb"#([\d,]+)\t([\d,]+)\s*")
_MOST_DIGITS = 9, 4  # of a length, and of a number of copies


def is_complex(data: bytes) -> bool:
    """Return whether a file is the alignment of a complex, by its first line."""
    return _FIRST.match(data) is not None


def announced(data: bytes, source: str) -> tuple[list[int], list[int], bytes]:
    """Return the lengths and the copies that the first lines announce, and the text below all lines with #.

    Both lists are empty without such a line.  Errors: UserError if it cannot be true.
    """
    lengths: list[int] = []
    copies: list[int] = []
    while data.startswith(b"#"):
        line, _, data = data.partition(b"\n")
        if found := _ANNOUNCED.fullmatch(line):
            both = [[n for n in part.split(b",") if n] for part in found.groups()]
            possible = all(len(n) <= most and int(n) for part, most in zip(both, _MOST_DIGITS) for n in part)
            if not possible or not both[0] or len(both[0]) != len(both[1]):
                raise UserError(
                    f"{source}: its first line announces impossible lengths or copies; make the alignment again"
                )
            lengths, copies = ([int(n) for n in part] for part in both)
    return lengths, copies, data


def chain_of_complex(alignment: Alignment, lengths: Sequence[int], source: str, query: str | None) -> Alignment:
    """Return the query's columns of the alignment of a complex, without the rows that are empty there.

    Errors: UserError if the query is none of the chains.
    """
    for own in _chains(alignment, lengths):
        if query is not None and decode(own.rows[0]) == decode(encode(query, source="query")):
            return own.select((own.rows != GAP).any(1))
    raise UserError(
        f"{source}: is the alignment of a complex of {len(lengths)} chains ({', '.join(map(str, lengths))} residues)"
        f"{', none of them the query' if query else ''}; give the alignment of one chain"
    )


def split_complex(alignment: Alignment, lengths: Sequence[int]) -> list[list[Alignment]]:
    """Return the alignments of each of the different sequences: its rows alone and, if there are any, its pairs.

    Pairs keep together by their `pair_keys`.
    """
    chains = _chains(alignment, lengths)
    present = np.stack([(chain.rows != GAP).any(1) for chain in chains], axis=1)
    paired = present.sum(1) > 1
    paired[0] = False
    keys = _own_keys([alignment])
    query = np.arange(len(alignment)) == 0
    found = []
    for place, chain in enumerate(chains):
        alone = chain.select(query | (present[:, place] & ~paired))
        rows = query | (present[:, place] & paired)
        pairs = replace(chain, pair_keys=np.where(query, np.uint64(0), keys), stands_alone=False).select(rows)
        found.append([alone, pairs] if len(pairs) > 1 else [alone])
    return found


def side_by_side(blocks: Sequence[Alignment], source: str) -> list[Alignment]:
    """Return alignments of different chains as pairs: row by row, as the parts of ColabFold's `pair.a3m`.

    Errors: UserError unless they have equally many rows.
    """
    counts = [len(block) for block in blocks]
    if len(set(counts)) > 1:
        raise UserError(
            f"{source}: is named as pairs, but its {len(blocks)} alignments have {', '.join(map(str, counts))} rows; "
            "give row for row what belongs together, or name it otherwise"
        )
    keys = _own_keys(blocks)
    return [replace(block, pair_keys=keys, stands_alone=False) for block in blocks]


def _own_keys(blocks: Sequence[Alignment]) -> np.ndarray:
    """Return `pair_keys` of the rows of one file, which no other file has, so that its pairs stay its own."""
    digest = hashlib.blake2b(b"".join(block.rows.tobytes() for block in blocks), digest_size=8).digest()
    return np.arange(1, len(blocks[0]) + 1, dtype=np.uint64) + np.uint64(int.from_bytes(digest, "little") >> 1)


def _chains(alignment: Alignment, lengths: Sequence[int]) -> list[Alignment]:
    """Return the columns of each sequence, all rows."""
    stops = np.cumsum(lengths).tolist()
    spans = [slice(stop - length, stop) for length, stop in zip(lengths, stops)]
    return [Alignment(alignment.rows[:, span], alignment.deletions[:, span], alignment.names) for span in spans]
