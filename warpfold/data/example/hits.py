"""Parse template hits of HHsearch (.hhr) and hmmsearch (Stockholm or A3M) for a query (Supp. 1.2.3).

A `Hit` aligns residues of the query with residues of the hit. `templates.py` looks up the structures.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from warpfold.data.formats.alignment import stockholm_rows
from warpfold.data.similar.pairwise import MIN_IDENTITY
from warpfold.data.structure.chain import normal_entry_id
from warpfold.errors import UserError
from warpfold.files import read_file

# Integers of at most 18 digits fit into int64. Longer ones do not match.
# "Q 1abcA  7 MKT-A 10 (73)": query (Q) or template (T), name, first residue, letters, last residue, length.
_HHR_ROW = re.compile(r"^([QT]) (\S+) +(\d{1,18}) ([A-Za-z.~-]+) +(\d+) \((\d+)\)")
_ALIGNED = re.compile(r"Aligned_cols=(\d{1,18})")
_SUM_PROBS = re.compile(r"Sum_probs=(\d{1,18}(?:\.\d*)?)")
_RANGE = re.compile(r"(.*?)(?:/(\d{1,18})-(\d{1,18}))?")
_EXTENDED_ID = re.compile(r"pdb_[a-z0-9]{8}(?=_|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Hit:
    """A template hit with C columns in which a residue of the query is aligned to a residue of the hit.

    name: as in the file ("1ABC_A"). query: the query's letters in these columns. query_index: their indices in the
    query, from 0. sequence: the hit's residues from first to last, with insertions, in upper case. hit_index: indices
    in `sequence`, from 0. start: index of `sequence` in the full sequence of the database, from 0. sum_probs: expected
    number of correctly aligned residues; None for hmmsearch.
    """

    name: str
    description: str
    query: str  # [C]
    query_index: np.ndarray  # int64 [C]
    sequence: str
    hit_index: np.ndarray  # int64 [C]
    start: int
    sum_probs: float | None = None

    @property
    def pdb_id(self) -> str:
        """Return the id of the entry, normalised by `normal_entry_id`."""
        extended = _EXTENDED_ID.match(self.name)
        entry = extended[0] if extended else self.name.rpartition("_")[0] or self.name
        return normal_entry_id(entry.lower())

    @property
    def chain(self) -> str:
        """Return the author's chain name, or "" if the hit's name has none."""
        suffix = _EXTENDED_ID.sub("", self.name, count=1)
        return suffix.rpartition("_")[2] if "_" in suffix else ""


def read_hits(path: str | Path, query: str) -> list[Hit]:
    """Read the hits in a file of HHsearch, HHblits (.hhr) or hmmsearch (Stockholm, A3M), gzipped or not.

    The format is detected from the content. query: the sequence of the query, which hmmsearch's files do not contain.
    Raises UserError for another format, a truncated file, or hits of another query.
    """
    data = read_file(path)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not text. Pass the output of HHsearch (.hhr) or hmmsearch (.sto, .a3m).") from None
    return parse_hits(text, query, str(path))


def parse_hits(text: str, query: str, source: str = "<hits>") -> list[Hit]:
    """Parse hits in memory as `read_hits` does. source: their name in errors."""
    text = text.lstrip("\ufeff \t\r\n").replace("\r\n", "\n")
    if text.startswith(("# STOCKHOLM", ">")):
        return parse_hmmsearch(text, query, source)
    if text.startswith("Query "):
        hits = parse_hhr(text, source)
        for hit in hits:
            # At least 90 % of the query's letters in each hit must agree with the query, not counting X.
            last = int(hit.query_index[-1]) if len(hit.query_index) else 0
            if last < len(query):
                pairs = [(letter, query[index]) for letter, index in zip(hit.query, hit.query_index)]
                is_equal = [a == b for a, b in pairs if "X" not in (a, b)]
                if sum(is_equal) >= MIN_IDENTITY * len(is_equal):
                    continue
            raise UserError(
                f"{source}: its hits are of another sequence than the query of {len(query)} residues (hit {hit.name} "
                f"has {hit.query[:10]} at residue {hit.query_index[0] + 1}). Pass the hits of this one."
            )
        return hits
    if re.match(r"\S+\t\S+\t[\d.]+\t\d+\t", text):
        kind = "a table of MMseqs2 or BLAST hits, which has no alignments"
    else:
        kind = "not a supported list of template hits"
    raise UserError(f"{source}: is {kind}. Pass the output of HHsearch (.hhr) or hmmsearch (.sto, .a3m).")


def parse_hhr(text: str, source: str = "<hhr>") -> list[Hit]:
    """Parse hits in HH-suite's .hhr format, in file order.

    Source: HH-suite user guide, "HHsearch/HHblits output".
    Raises UserError for a truncated file: an alignment with fewer columns than its header states, or fewer alignments
    than hits in the list at the top.
    """
    head, *blocks = re.split(r"^No \d+[ \t]*$", text.replace("\r\n", "\n"), flags=re.MULTILINE)
    _, titled, table = head.partition("\n No Hit ")
    if not titled or "\n" not in table:
        raise UserError(f"{source}: has no list of hits (' No Hit ...'), so it is cut short. Make it again.")
    announced = sum(1 for line in table.split("\n")[1:] if re.match(r" *\d+ ", line))
    if len(blocks) < announced:
        raise UserError(
            f"{source}: lists {announced} hits and aligns {len(blocks)}, so it is cut short (or was made with -B below "
            "-Z). Make it again."
        )
    hits = []
    for number, block in enumerate(blocks, 1):
        place = f"{source}: hit {number}"
        title = re.search(r"^>(\S+)[ \t]*(.*)$", block, re.MULTILINE)
        aligned, sum_probs = _ALIGNED.search(block), _SUM_PROBS.search(block)
        if title is None or aligned is None:
            raise UserError(f"{place} has no name or no scores, so it is cut short. Make the file again.")
        segments: dict[str, list[str]] = {"Q": [], "T": []}
        first: dict[str, int] = {}
        for line in block.split("\n"):
            if (row := _HHR_ROW.match(line)) and row[2] != "Consensus":
                segments[row[1]].append(row[4])
                first.setdefault(row[1], int(row[3]) - 1)
        rows = {side: "".join(letters) for side, letters in segments.items()}
        letters = {side: np.array([letter.isalpha() for letter in row], bool) for side, row in rows.items()}
        # HH-suite writes a hit of one aligned column without rows. It is read as a hit without columns, which
        # `templates_from_hits` refuses by name.
        is_empty = int(aligned[1]) == 1 and not any(rows.values())
        both = letters["Q"] & letters["T"] if len(rows["Q"]) == len(rows["T"]) else np.zeros(0, bool)
        if both.sum() != int(aligned[1]) and not is_empty:
            raise UserError(
                f"{place}, {title[1]}, announces {aligned[1]} aligned columns and has {both.sum()}, so it is cut short "
                "or damaged. Make the file again."
            )
        index = {side: np.cumsum(is_letter)[both] - 1 for side, is_letter in letters.items()}
        hit = Hit(
            name=title[1],
            description=title[2].strip(),
            query="".join(letter for letter, is_aligned in zip(rows["Q"].upper(), both) if is_aligned),
            query_index=index["Q"] + first.get("Q", 0),
            sequence="".join(letter for letter in rows["T"].upper() if letter.isalpha()),
            hit_index=index["T"],
            start=first.get("T", 0),
            sum_probs=float(sum_probs[1]) if sum_probs else None,
        )
        hits.append(hit)
    return hits


def parse_hmmsearch(text: str, query: str, source: str) -> list[Hit]:
    """Parse hits from hmmsearch's alignment (-A), Stockholm or A3M, in file order, as used by AlphaFold-Multimer.

    The match columns (Stockholm: #=GC RF; A3M: upper-case letters and dashes) must be the query's residues, as for a
    profile of the query's own alignment (hmmbuild --hand). Alternatively, a row that is the query shows the query's
    columns. A row's name may contain its range, "1abc_A/12-65". Of pdb_seqres only proteins are read.
    Raises UserError for a truncated file, and if the match columns are not the query's residues.
    """
    # Name, description, letters, and mask of the match columns (bool [W]) of each row.
    rows: list[tuple[str, str, str, np.ndarray]] = []
    if text.startswith("# STOCKHOLM"):
        records, reference = stockholm_rows(text.encode(), source)
        if records and not reference:
            raise UserError(
                f"{source}: has no #=GC RF line, so its match columns are unknown. Pass hmmsearch's original file."
            )
        match = np.array([letter not in b"-._~" for letter in reference], bool)
        for name, note, columns in records:
            if len(columns) != len(match):
                raise UserError(
                    f"{source}: {name} has {len(columns)} columns, #=GC RF {len(match)}. Make the file again."
                )
            rows.append((name, note, columns.decode("ascii", "replace").replace(".", "-"), match))
    else:
        for record in text[1:].split("\n>"):
            header, _, body = record.partition("\n")
            name, _, note = header.strip().partition(" ")
            row = "".join(body.split()).replace(".", "")
            rows.append((name, note, row, np.array([not letter.islower() for letter in row], bool)))
    widths = {int(match.sum()) for _, _, _, match in rows}
    # Rows of equal length are aligned FASTA.
    if len(widths) > 1 and len({len(letters) for _, _, letters, _ in rows}) == 1:
        rows = [(name, note, letters, np.ones(len(letters), bool)) for name, note, letters, _ in rows]
        widths = {len(rows[0][2])}
    if len(widths) > 1:
        raise UserError(f"{source}: its rows have {min(widths)} to {max(widths)} match columns. Make the file again.")
    width = widths.pop() if widths else len(query)
    # The query's residue in each match column, -1 for none.
    residues = np.arange(width)
    for _, _, letters, match in rows:
        matched = "".join(letter for letter, is_match in zip(letters, match) if is_match)
        # The row of the query has gaps where other rows have insertions.
        if matched.replace("-", "") == query:
            is_letter = np.array([letter != "-" for letter in matched])
            residues = np.where(is_letter, np.cumsum(is_letter) - 1, -1)
            break
    if np.count_nonzero(residues >= 0) != len(query):
        raise UserError(
            f"{source}: has {width} match columns, the query {len(query)} residues. Pass the hits of this query, "
            "searched with a profile in which each of its residues is a match column (hmmbuild --hand)."
        )
    hits = []
    for name, note, row, match in rows:
        parts = _RANGE.fullmatch(name)
        assert parts is not None  # anything matches
        alpha, aligned = (np.array([is_kind(x) for x in row], bool) for is_kind in (str.isalpha, str.isupper))
        sequence = "".join(letter for letter in row.upper() if letter.isalpha())
        if parts[2] and int(parts[3]) - int(parts[2]) + 1 != len(sequence):
            raise UserError(
                f"{source}: {name} has {len(sequence)} residues, not those of its range. Make the file again."
            )
        residue = np.full(len(row), -1)
        residue[match] = residues
        is_matched = aligned & (residue >= 0)
        hit = Hit(
            name=parts[1],
            description=note.removeprefix("[subseq from]").strip(),
            query="".join(query[i] for i in residue[is_matched]),
            query_index=residue[is_matched],
            sequence=sequence,
            hit_index=np.cumsum(alpha)[is_matched] - 1,
            start=int(parts[2]) - 1 if parts[2] else 0,
        )
        # Entries of pdb_seqres that are not proteins (mol:na) are skipped.
        if len(hit.query_index) and ("mol:" not in hit.description or "mol:protein" in hit.description):
            hits.append(hit)
    return hits
