"""Template hits: what HHsearch (.hhr) and hmmsearch (Stockholm or A3M) found for a query (Supp. 1.2.3).

A `Hit` says which residues of the query are aligned to which of the hit.  Nothing here looks at structures.
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

# Integers have at most 18 digits here, so that they fit into int64; longer ones are not read as numbers.
# "Q 1abcA  7 MKT-A 10 (73)": query or template (T), its name, the first place, letters, the last place, its length.
_HHR_ROW = re.compile(r"^([QT]) (\S+) +(\d{1,18}) ([A-Za-z.~-]+) +(\d+) \((\d+)\)")
_ALIGNED = re.compile(r"Aligned_cols=(\d{1,18})")
_SUM_PROBS = re.compile(r"Sum_probs=(\d{1,18}(?:\.\d*)?)")
_RANGE = re.compile(r"(.*?)(?:/(\d{1,18})-(\d{1,18}))?")


_EXTENDED_ID = re.compile(r"pdb_[a-z0-9]{8}(?=_|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Hit:
    """One hit: C columns in which a residue of the query is aligned to one of the hit."""

    name: str  # as the file has it: "1ABC_A"
    description: str
    query: str  # [C], the query's letters
    query_index: np.ndarray  # int64 [C], their places in the query, from 0
    sequence: str  # the hit's residues from its first to its last, insertions included, upper case
    hit_index: np.ndarray  # int64 [C], places in `sequence`, from 0
    start: int  # place of `sequence` in the whole sequence that was searched, from 0
    sum_probs: float | None = None  # expected number of correctly aligned residues; hmmsearch does not tell

    @property
    def pdb_id(self) -> str:
        """Return the entry in its normal form: lower case, four letters where it has a short id."""
        extended = _EXTENDED_ID.match(self.name)
        entry = extended[0] if extended else self.name.rpartition("_")[0] or self.name
        return normal_entry_id(entry.lower())

    @property
    def chain(self) -> str:
        """Return the author's name of the chain; "" if the hit's name has none."""
        rest = _EXTENDED_ID.sub("", self.name, count=1)
        return rest.rpartition("_")[2] if "_" in rest else ""


def read_hits(path: str | Path, query: str) -> list[Hit]:
    """Read the hits in a file of HHsearch, HHblits (.hhr) or hmmsearch (Stockholm, A3M), told by content, gz or not.

    query: the sequence that was searched for, one letter per residue; hmmsearch's files do not hold it.
    Errors: UserError for a file in another format, one that is cut short, or the hits of another query.
    """
    data = read_file(path)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not text; give the output of HHsearch (.hhr) or hmmsearch (.sto, .a3m)") from None
    return parse_hits(text, query, str(path))


def parse_hits(text: str, query: str, source: str = "<hits>") -> list[Hit]:
    """Parse text in memory as `read_hits` does; `source` is its name in errors."""
    text = text.lstrip("\ufeff \t\r\n").replace("\r\n", "\n")
    if text.startswith(("# STOCKHOLM", ">")):
        return parse_hmmsearch(text, query, source)
    if text.startswith("Query "):
        hits = parse_hhr(text, source)
        _check_query(hits, query, source)
        return hits
    if re.match(r"\S+\t\S+\t[\d.]+\t\d+\t", text):
        kind = "a table of MMseqs2 or BLAST hits, which has no alignments"
    else:
        kind = "not a list of template hits that WarpFold knows"
    raise UserError(f"{source}: is {kind}; give the output of HHsearch (.hhr) or hmmsearch (.sto, .a3m)")


def _check_query(hits: list[Hit], query: str, source: str) -> None:
    """Raise UserError unless the hits' letters of the query are `query`'s, in nine of ten places (X left out)."""
    for hit in hits:
        last = int(hit.query_index[-1]) if len(hit.query_index) else 0
        if last < len(query):
            pairs = [(letter, query[place]) for letter, place in zip(hit.query, hit.query_index)]
            known = [a == b for a, b in pairs if "X" not in (a, b)]
            if sum(known) >= MIN_IDENTITY * len(known):
                continue
        raise UserError(
            f"{source}: its hits are of another sequence than the query of {len(query)} residues (hit {hit.name} has "
            f"{hit.query[:10]} at residue {hit.query_index[0] + 1}); give the hits of this one"
        )


def parse_hhr(text: str, source: str = "<hhr>") -> list[Hit]:
    """Return the hits of a file in HH-suite's .hhr format, in its order.

    Format: HH-suite user guide, "HHsearch/HHblits output".
    Errors: UserError for a file that is cut short: an alignment with fewer columns than announced, or fewer
    alignments than the list at the top has hits.
    """
    head, *blocks = re.split(r"^No \d+[ \t]*$", text.replace("\r\n", "\n"), flags=re.MULTILINE)
    _, titled, table = head.partition("\n No Hit ")
    if not titled or "\n" not in table:
        raise UserError(f"{source}: has no list of hits (' No Hit ...'), so it is cut short; make it again")
    announced = sum(1 for line in table.split("\n")[1:] if re.match(r" *\d+ ", line))
    if len(blocks) < announced:
        raise UserError(
            f"{source}: lists {announced} hits and aligns {len(blocks)}, so it is cut short (or was made with -B below "
            "-Z); make it again"
        )
    return [_hhr_hit(block, f"{source}: hit {number + 1}") for number, block in enumerate(blocks)]


def _hhr_hit(block: str, where: str) -> Hit:
    """Parse one "No ..." block of an .hhr file."""
    title = re.search(r"^>(\S+)[ \t]*(.*)$", block, re.MULTILINE)
    aligned, sum_probs = _ALIGNED.search(block), _SUM_PROBS.search(block)
    if title is None or aligned is None:
        raise UserError(f"{where} has no name or no scores, so it is cut short; make the file again")
    pieces: dict[str, list[str]] = {"Q": [], "T": []}
    first: dict[str, int] = {}
    for line in block.split("\n"):
        if (row := _HHR_ROW.match(line)) and row[2] != "Consensus":
            pieces[row[1]].append(row[4])
            first.setdefault(row[1], int(row[3]) - 1)
    rows = {side: "".join(letters) for side, letters in pieces.items()}
    letters = {side: np.array([letter.isalpha() for letter in row], bool) for side, row in rows.items()}
    # HH-suite writes a hit of one aligned column without rows: it has no columns, and is refused with its name.
    is_empty = int(aligned[1]) == 1 and not any(rows.values())
    both = letters["Q"] & letters["T"] if len(rows["Q"]) == len(rows["T"]) else np.zeros(0, bool)
    if both.sum() != int(aligned[1]) and not is_empty:
        raise UserError(
            f"{where}, {title[1]}, announces {aligned[1]} aligned columns and has {both.sum()}, so it is cut short or "
            "damaged; make the file again"
        )
    place = {side: np.cumsum(is_letter)[both] - 1 for side, is_letter in letters.items()}
    return Hit(
        name=title[1],
        description=title[2].strip(),
        query="".join(letter for letter, kept in zip(rows["Q"].upper(), both) if kept),
        query_index=place["Q"] + first.get("Q", 0),
        sequence="".join(letter for letter in rows["T"].upper() if letter.isalpha()),
        hit_index=place["T"],
        start=first.get("T", 0),
        sum_probs=float(sum_probs[1]) if sum_probs else None,
    )


def parse_hmmsearch(text: str, query: str, source: str = "<hmmsearch>") -> list[Hit]:
    """Return the hits of hmmsearch's alignment (-A), Stockholm or A3M, in its order, as AlphaFold-Multimer uses them.

    The match columns (Stockholm: those of #=GC RF; A3M: upper-case letters and dashes) must be the query's residues, as
    they are for a profile of the query's own alignment (hmmbuild --hand); or a row of the file is the query and shows
    which columns are.  A row's name may give its range, "1abc_A/12-65"; of pdb_seqres only proteins count.
    Errors: UserError for a file that is cut short, or whose match columns are not the query's residues.
    """
    rows: list[tuple[str, str, str, np.ndarray]] = []  # name, description, letters, bool [W] the match columns
    if text.startswith("# STOCKHOLM"):
        found, reference = stockholm_rows(text.encode(), source)
        if found and not reference:
            raise UserError(
                f"{source}: has no #=GC RF line, so its match columns are not known; give hmmsearch's own file"
            )
        match = np.array([letter not in b"-._~" for letter in reference], bool)
        for name, note, columns in found:
            if len(columns) != len(match):
                raise UserError(
                    f"{source}: {name} has {len(columns)} columns, #=GC RF {len(match)}; make the file again"
                )
            rows.append((name, note, columns.decode("ascii", "replace").replace(".", "-"), match))
    else:
        for record in text[1:].split("\n>"):
            header, _, body = record.partition("\n")
            name, _, note = header.strip().partition(" ")
            row = "".join(body.split()).replace(".", "")
            rows.append((name, note, row, np.array([not letter.islower() for letter in row], bool)))
    widths = {int(match.sum()) for _, _, _, match in rows}
    if len(widths) > 1 and len({len(letters) for _, _, letters, _ in rows}) == 1:  # aligned FASTA
        rows = [(name, note, letters, np.ones(len(letters), bool)) for name, note, letters, _ in rows]
        widths = {len(rows[0][2])}
    if len(widths) > 1:
        raise UserError(f"{source}: its rows have {min(widths)} to {max(widths)} match columns; make the file again")
    width = widths.pop() if widths else len(query)
    places = np.arange(width)
    for _, _, letters, match in rows:
        own = "".join(letter for letter, kept in zip(letters, match) if kept)
        if own.replace("-", "") == query:  # the query itself: gaps where others insert
            is_letter = np.array([letter != "-" for letter in own])
            places = np.where(is_letter, np.cumsum(is_letter) - 1, -1)
            break
    if places.max(initial=-1) + 1 != len(query) and rows:
        raise UserError(
            f"{source}: has {width} match columns, the query {len(query)} residues; give the hits of this query, "
            "searched with a profile in which each of its residues is a match column (hmmbuild --hand)"
        )
    hits = []
    for name, note, row, match in rows:
        parts = _RANGE.fullmatch(name)
        assert parts is not None  # anything matches
        alpha, aligned = (np.array([is_kind(x) for x in row], bool) for is_kind in (str.isalpha, str.isupper))
        sequence = "".join(letter for letter in row.upper() if letter.isalpha())
        if parts[2] and int(parts[3]) - int(parts[2]) + 1 != len(sequence):
            raise UserError(
                f"{source}: {name} has {len(sequence)} residues, not those of its range; make the file again"
            )
        place = np.full(len(row), -1)
        place[match] = places
        both = aligned & (place >= 0)
        hit = Hit(
            name=parts[1],
            description=note.removeprefix("[subseq from]").strip(),
            query="".join(query[i] for i in place[both]),
            query_index=place[both],
            sequence=sequence,
            hit_index=np.cumsum(alpha)[both] - 1,
            start=int(parts[2]) - 1 if parts[2] else 0,
        )
        # Of pdb_seqres only proteins, not mol:na.
        if len(hit.query_index) and ("mol:" not in hit.description or "mol:protein" in hit.description):
            hits.append(hit)
    return hits
