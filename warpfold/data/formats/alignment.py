"""Read and write sequences and alignments: FASTA, A3M, A2M, aligned FASTA, Stockholm, one sequence per line.

All alignments become an `Alignment`: rows of residue codes on the query's residues, and for each residue the number of
residues that the row inserts before it (AlphaFold2's `deletion_matrix`).  No loop runs over characters.

ColabFold's alignments of complexes have rows across the sequences of all chains, one after another.  Their first line
gives the lengths of the different sequences and how many copies each has, `#120,88<TAB>1,2`.  A row with residues in
several of them is a pair; a row with residues in one belongs to that one alone.
"""

import csv
import hashlib
import io
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase

import numpy as np

from warpfold.errors import UserError, listed
from warpfold.files import read_file
from warpfold.geometry.residue import GAP, RESTYPES, UNKNOWN

# The meaning of a letter in a row of an alignment is HHblits' (`HHBLITS_AA_TO_ID` in the official
# common/residue_constants.py): B as D, Z as E, U (selenocysteine) as C, J and O unknown.
LETTERS = {letter: code for code, letter in enumerate(RESTYPES)} | {"X": UNKNOWN, "J": UNKNOWN, "O": UNKNOWN}
LETTERS |= {"B": LETTERS["D"], "Z": LETTERS["E"], "U": LETTERS["C"]}
CODE_LETTERS = np.frombuffer(f"{RESTYPES}X-".encode(), dtype=np.uint8)  # code -> letter

_INSERTED, _DOT, _ILLEGAL = 128, 129, 130  # beside the codes 0-21, while parsing
# Headers of HH-suite rows that are not sequences: >ss_pred, >ss_conf, >aa_dssp ..., >Consensus, >NAME_consensus.
_PREDICTED_ROW = re.compile(r"(ss|sa|aa)_(pred|conf|dssp)(\s|$)", re.IGNORECASE)
_CONSENSUS = re.compile(r"(\S*_)?consensus(\s|$)", re.IGNORECASE)
_BLANKS = b" \t\n\r\v\f"
_GAPS = b"-._~"  # Stockholm's
_AT_A_TIME = 1 << 22  # characters of an alignment whose insertions are counted together, which bounds the memory
_SEVERAL_LENGTHS = re.compile(rb"(\xef\xbb\xbf)?\s*#[ \t]*\d+[ \t]*,[\d, \t]*[ \t]")
_NUMBERS = re.compile(rb"#[\d,\s]*\d[\d,\s]*")  # a line of numbers alone, as ColabFold's first line
_UPPER = str.maketrans(ascii_lowercase, ascii_uppercase)  # str.upper makes SS of ß
# Characters that a page or a PDF puts between letters: no-break, zero-width and soft hyphen, byte-order mark.
_INVISIBLE = dict.fromkeys((0xA0, 0x200B, 0x200C, 0x200D, 0x2060, 0xAD, 0xFEFF))
_MOST_DIGITS = 9, 4  # of a length, and of a number of copies


@dataclass(frozen=True)
class Alignment:
    """Sequences aligned to a query, which is row 0 and has no gap.

    rows: uint8 [R, N], 0-19 in the order of RESTYPES, 20 unknown, 21 gap.  deletions: int32 [R, N], residues of the
    row between this column and the one before.  names: [R], the header lines.

    What pairs rows of this alignment with rows of another chain's is the organism in `names`, or else `pair_keys`:
    uint64 [R], rows with one number belong together, 0 for none.  stands_alone: False if the alignment serves pairing
    alone, as AlphaFold-Multimer's `uniprot_hits`.
    """

    rows: np.ndarray
    deletions: np.ndarray
    names: list[str]
    pair_keys: np.ndarray | None = None
    stands_alone: bool = True

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or self.rows.shape != self.deletions.shape or len(self.names) != len(self.rows):
            raise ValueError(f"rows {self.rows.shape}, deletions {self.deletions.shape}, {len(self.names)} names")

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of_query(cls, sequence: str, name: str = "query") -> "Alignment":
        """Return the alignment of a sequence with nothing else: one row."""
        rows = encode(sequence, source=name)[None]
        return cls(rows, np.zeros(rows.shape, dtype=np.int32), [name]).check_query(sequence, source=name)

    @property
    def query(self) -> str:
        """Return row 0 as one letter per residue."""
        return decode(self.rows[0])

    def select(self, rows: np.ndarray | Sequence[int] | slice) -> "Alignment":
        """Return some of the rows, by index, slice or mask, in that order."""
        picked = np.arange(len(self))[rows]
        names, keys = [self.names[i] for i in picked], None if self.pair_keys is None else self.pair_keys[picked]
        return Alignment(self.rows[picked], self.deletions[picked], names, keys, self.stands_alone)

    def check_query(self, sequence: str | None = None, source: str = "alignment") -> "Alignment":
        """Return the alignment itself; raise UserError unless row 0 is a protein, and is `sequence` if one is given.

        Letters that mean the same residue are equal.  `source` names the alignment in the error.
        """
        found = self.rows[0]
        if not found.size:
            raise UserError(f"{source}: the query has no residues; put the query's own sequence first")
        if is_nucleic(self.query if sequence is None else sequence):
            raise UserError(f"{source}: looks like nucleic acid (only A, C, G, T, U, N); WarpFold folds proteins")
        if sequence is None:
            return self
        wanted, cure = encode(sequence, source="query"), "give the alignment that was made for this query"
        if len(wanted) != len(found):
            raise UserError(f"{source}: its first row has {len(found)} residues, the query has {len(wanted)}; {cure}")
        differ = np.flatnonzero(wanted != found)
        if differ.size:
            i = int(differ[0])
            raise UserError(
                f"{source}: its first row differs from the query at {differ.size} of {len(wanted)} residues, first "
                f"at {i + 1} ({decode(found[i : i + 1])}, not {sequence[i]}); {cure}"
            )
        return self


def encode(sequence: str, source: str = "sequence") -> np.ndarray:
    """Return the codes of a sequence by HHblits' table, uint8 [N], 0-20; lower case counts as upper.

    Errors: UserError for a character outside the table.
    """
    try:
        return np.array([LETTERS[letter] for letter in upper(sequence)], dtype=np.uint8)
    except KeyError as error:
        place = upper(sequence).index(error.args[0]) + 1
        raise UserError(
            f"{source}: has {_named(error.args[0])} at position {place}, which is not an amino acid; correct or "
            "remove it"
        ) from None


def upper(sequence: str) -> str:
    """Convert the letters a to z to upper case, and no others: `str.upper` changes the length of some texts."""
    return sequence.translate(_UPPER)


def plain_sequence(text: str) -> str:
    """Return a sequence as people write it in upper case, without blanks, invisible characters and a final `*`."""
    return upper("".join(text.translate(_INVISIBLE).split()).removesuffix("*"))


def _named(character: str) -> str:
    """Return a character in quotes, with its code point if it may look like another."""
    if character.isascii():
        return repr(character)
    return f"{character!r} (U+{ord(character):04X} {unicodedata.name(character, 'without a name')})"


def encode_residues(sequence: str, source: str = "sequence") -> np.ndarray:
    """Return the residue types of a protein's own sequence: uint8 [N], 0-19, and 20 (X) for all but the twenty letters.

    This follows the official code (`make_sequence_features` in data/pipeline.py, `map_unknown_to_x`), which encodes the
    same letter in the alignment's first row by HHblits' table (`encode`).  Errors: as in `encode`.
    """
    known = np.array([letter in RESTYPES for letter in upper(sequence)], dtype=bool)
    return np.where(known, encode(sequence, source), np.uint8(UNKNOWN))


def decode(codes: np.ndarray) -> str:
    """Return codes 0-21 [N] as letters: X for unknown, - for a gap."""
    return CODE_LETTERS[codes].tobytes().decode()


def as_row(sequence: str) -> str:
    """Return a sequence in the letters of an alignment: C, D, E and X for U, B, Z and what is unknown."""
    return decode(encode(sequence))


def is_nucleic(sequence: str) -> bool:
    """Return whether a sequence must be DNA or RNA: ten letters or more, all of ACGTUN, with A, C and G among them.

    An `Alignment` has C for U, which makes no difference here.  Silk, only G and A, is a protein.
    """
    letters = set(upper(sequence))
    return len(sequence) >= 10 and set("ACG") <= letters <= set("ACGTUN")


def _table(lower: bool, dash: int, dot: int, gaps: bytes = b"-") -> np.ndarray:
    """Return the code of each byte, uint8 [256]; lower-case letters are insertions, or (`lower`) as upper case."""
    table = np.full(256, _ILLEGAL, dtype=np.uint8)
    for letter, code in LETTERS.items():
        table[ord(letter)] = code
        table[ord(letter.lower())] = code if lower else _INSERTED
    table[list(gaps)] = dash
    table[ord(".")] = dot
    return table


_SEQUENCE = _table(lower=True, dash=_ILLEGAL, dot=_ILLEGAL)  # FASTA: lower case is masking
_CHAINS = np.where(np.isin(np.arange(256), [ord(":"), ord("/")]), _DOT, _SEQUENCE)  # ColabFold's A:B, ProteinMPNN's A/B
_ALIGNED = _table(lower=True, dash=GAP, dot=GAP, gaps=_GAPS)  # every character a column
_A3M = _table(lower=False, dash=GAP, dot=_DOT)  # lower case between the columns


# How files begin that people give instead.
_DOCUMENTS = {
    b"%pdf-": "a PDF document",
    b"pk\x03\x04": "a zip archive or an office document",
    b"\xd0\xcf\x11\xe0": "an office document",
    b"{\\rtf": "an office document",
    b"<!doctype html": "a web page",
    b"<html": "a web page",
    **{bytes((0x80, protocol)): "a pickle, which may execute anything when it is read" for protocol in range(2, 6)},
}


def document_kind(data: bytes) -> str | None:
    """Say what a file is, by its first bytes, that people give instead of text; None if it is none of these."""
    return next((what for start, what in _DOCUMENTS.items() if data[:16].lower().startswith(start)), None)


def plain_text(data: bytes | str, source: str) -> bytes:
    """Return text with plain line ends and no byte-order mark; raise UserError if it is not UTF-8, or a document."""
    if isinstance(data, str):
        data = data.encode()
    if what := document_kind(data):
        raise UserError(f"{source}: is {what}, and no sequences or alignment; give these as plain text")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{source}: line {line} is not UTF-8 text; save the file as UTF-8") from None
    return data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def table_titles(data: bytes | str, source: str) -> list[str]:
    """Return the names of a table's columns, in lower case, as its first line has them.  Errors: as of `plain_text`."""
    text, separator = _table_text(data, source)
    return _titles(csv.reader([text.partition("\n")[0]], delimiter=separator, skipinitialspace=True))


def _table_text(data: bytes | str, source: str) -> tuple[str, str]:
    """Return the text of a table, without Excel's line `sep=;`, and what separates its columns: comma, tab or `;`."""
    text = plain_text(data, source).decode().lstrip("\n")
    if found := re.match(r"sep=(.)\n", text):
        return text[found.end() :], found[1]
    first = text.partition("\n")[0]
    return text, max(",\t;", key=first.count) if set(",\t;") & set(first) else ","


def _titles(lines: Iterator[list[str]]) -> list[str]:
    """Return the titles in the first line of a table; `name` and `seq` stand for `id` and `sequence`."""
    titles = [title.strip().lower() for title in next(lines, [])]
    for title, short in (("id", "name"), ("sequence", "seq")):
        if title not in titles:
            titles = [title if one == short else one for one in titles]
    return titles


def table_rows(data: bytes | str, source: str, columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Return columns of a table, separated by commas, tabs or semicolons, whose first line names them, without blanks.

    Errors: UserError without these columns, for a line that is not complete, or quotes that do not close.
    """
    text, separator = _table_text(data, source)
    lines = csv.reader(io.StringIO(text), delimiter=separator, strict=True, skipinitialspace=True)
    try:
        titles = _titles(lines)
        rows = [(lines.line_num, line) for line in lines if any(cell.strip() for cell in line)]
    except csv.Error as error:
        raise UserError(f"{source}: line {lines.line_num}: {error}; correct the table") from None
    if not set(columns) <= set(titles):
        both = " and ".join(columns)
        raise UserError(
            f"{source}: has no columns {both}, but {listed(titles, 6)}; its first line must name them: "
            f"{','.join(columns)}"
        )
    if not rows:
        raise UserError(f"{source}: has no records below its first line; give {' and '.join(columns)} in each")
    at = [titles.index(column) for column in columns]
    for number, line in rows:
        if len(line) <= max(at):
            raise UserError(f"{source}: line {number} has no {' or no '.join(columns)}; complete it")
    return [tuple(" ".join(line[place].split()) for place in at) for _, line in rows]


def parse_fasta(data: bytes | str, source: str = "<fasta>", chains: bool = False) -> list[tuple[str, str]]:
    """Return header line and sequence (upper case, letters as in the file) of every record of FASTA text.

    source: its name in errors.  chains: a sequence may have `:` between the chains of a complex, as ColabFold's, or
    `/`, as ProteinMPNN's, which becomes `:`.  A `*` at the end of a chain is left out.
    Errors: UserError if it is not FASTA, has a record without a sequence, or a character that is not a residue.
    """
    records = fasta_records(data, source, chains)
    for _, _, wrong in records:
        if wrong:
            raise UserError(wrong)
    return [(name, sequence) for name, sequence, _ in records]


def fasta_records(data: bytes | str, source: str, chains: bool = False) -> list[tuple[str, str, str]]:
    """Parse text as `parse_fasta`; return header, sequence, and what is wrong with the record (or "") of each.

    Errors: UserError for text that is not FASTA.
    """
    data = plain_text(data, source)
    if b"\0" in data:
        raise UserError(f"{source}: has NUL bytes, so it is not FASTA text; export it again")
    names, sequences = _records(data, source)
    if chains:
        sequences = [sequence.replace(b"/", b":").replace(b"*:", b":") for sequence in sequences]
    joined, starts = _join(sequences)
    table = _CHAINS if chains else _SEQUENCE
    wrong = _illegal(table[np.frombuffer(joined, dtype=np.uint8)], starts, joined, names, source)
    for row, (name, sequence) in enumerate(zip(names, sequences)):
        if not sequence:
            wrong[row] = f"{source}: record {_short(name)} has no sequence; remove it or complete the file"
    both = enumerate(zip(names, sequences))
    return [(name, sequence.decode().upper(), wrong.get(row, "")) for row, (name, sequence) in both]


def write_fasta(records: Iterable[tuple[str, str]], width: int = 80) -> str:
    """Return FASTA text of (header, sequence) pairs, in lines of `width` letters (0: one line each, as in A3M).

    Sequences are written as they are, so rows with gaps and lower-case insertions make an A3M.
    """
    lines = []
    for name, sequence in records:
        lines.append(f">{name}")
        step = width or max(len(sequence), 1)
        lines += [sequence[i : i + step] for i in range(0, len(sequence), step)]
    return "\n".join([*lines, ""])


def write_a3m(alignment: Alignment) -> str:
    """Return A3M text that `read_alignment` reads back unchanged; inserted residues, which are not kept, become x."""
    records = []
    for name, row, deletions in zip(alignment.names, alignment.rows, alignment.deletions):
        pieces, last = [], 0
        letters = decode(row)
        for i in np.flatnonzero(deletions).tolist():
            pieces += [letters[last:i], "x" * int(deletions[i])]
            last = i
        records.append((name, "".join([*pieces, letters[last:]])))
    return write_fasta(records, width=0)


def read_alignment(path: str | Path, query: str | None = None) -> Alignment:
    """Read an alignment in A3M, A2M, aligned FASTA, Stockholm or one row per line (told by content), gz or not.

    query: the sequence that it must be an alignment of.  Row 0 is checked against it, a Stockholm file without that
    row is projected on its match columns, and of several alignments in one file (ColabFold's complexes, MMseqs2
    databases with NUL between entries) the query's own is taken.  The file may be a pipe that this process was given.

    Errors: UserError, naming file and row, for text that is not UTF-8, rows of different length, characters outside
    the alphabet, nucleic acids, a first row with gaps or other than the query.
    """
    return parse_alignment(read_file(path, pipe=True), str(path), query)


def parse_alignment(data: bytes | str, source: str = "<alignment>", query: str | None = None) -> Alignment:
    """Parse text in memory as `read_alignment` does; `source` is its name in errors."""
    data = plain_text(data, source).lstrip(b"\n")
    if not data.strip(b"\0" + _BLANKS):
        raise UserError(f"{source}: is empty; give an alignment with at least the query's row")
    if data.startswith(b"# STOCKHOLM"):
        return parse_stockholm(data, source, query)
    if data[:1] in b">#":
        return parse_a3m(data, source, query)
    sequences = data.split()  # one row per line and nothing else (PSICOV's .aln)
    if b"\0" in data or any(not re.fullmatch(rb"[A-Za-z.\-]+", s) for s in sequences[:2]) or b" " in data.strip():
        kind = "a CLUSTAL file" if data.startswith(b"CLUSTAL") else "not an alignment that WarpFold knows"
        raise UserError(f"{source}: is {kind}; give A3M, Stockholm or aligned FASTA")
    alignment = _in_columns([f"row {i + 1}" for i in range(len(sequences))], sequences, source)
    return _project(alignment, alignment.rows[0] != GAP).check_query(query, source)


def parse_a3m(data: bytes | str, source: str = "<a3m>", query: str | None = None) -> Alignment:
    """Parse A3M (also A2M and aligned FASTA) text.  See `read_alignment`.

    Secondary structure, confidence and consensus rows of the HH-suite are left out; a first line "#lengths
    cardinalities" is ColabFold's.
    """
    lengths, _, data = announced(_own_entry(plain_text(data, source), source, query), source)
    names, sequences = _sequences(data, source, query)
    first = sequences[0].translate(None, _GAPS)
    if query is not None and first != first.upper() == upper(query).encode() and len(set(map(len, sequences))) == 1:
        # An A2M whose row 0 is the query with some of it in lower case: EVcouplings', where few rows have residues.
        alignment = _in_columns(names, sequences, source)
        return _project(alignment, alignment.rows[0] != GAP).check_query(query, source)
    alignment = _match_columns(names, sequences, lengths, source)
    if len(lengths) > 1:
        wanted = None if query is None else decode(encode(query, source="query"))
        own = next((chain for chain in _chains(alignment, lengths) if decode(chain.rows[0]) == wanted), None)
        if own is None:
            raise UserError(
                f"{source}: is the alignment of a complex of {len(lengths)} chains "
                f"({', '.join(map(str, lengths))} residues){', none of them the query' if query else ''}; give the "
                "alignment of one chain"
            )
        alignment = own.select((own.rows != GAP).any(1))
    if (alignment.rows[0] == GAP).any():
        if alignment.deletions.any():
            raise UserError(f"{source}: its first row, the query, has gaps; put the query's own sequence first")
        alignment = _project(alignment, alignment.rows[0] != GAP)
    return alignment.check_query(query, source)


def is_complex(data: bytes) -> bool:
    """Return whether a file is the alignment of a complex, by its first line, which announces several lengths."""
    return _SEVERAL_LENGTHS.match(data) is not None


def _announced_numbers(line: bytes) -> tuple[list[bytes], list[bytes]] | None:
    """Return the lengths and copies of a line such as `#21,25<TAB>1,1`, with any blanks; None for another line."""
    if not _NUMBERS.fullmatch(line):
        return None
    parts = re.sub(rb"\s*,\s*", b",", line[1:].strip()).split()
    if len(parts) != 2:
        return None
    lengths, copies = ([number for number in part.split(b",") if number] for part in parts)
    return lengths, copies


def announced(data: bytes, source: str) -> tuple[list[int], list[int], bytes]:
    """Return the lengths and the copies that the first lines announce, and the text below all lines with #.

    Both lists are empty without such a line.  Errors: UserError if it cannot be true, and for another line of numbers.
    """
    lengths: list[int] = []
    copies: list[int] = []
    while data.startswith(b"#"):
        line, _, data = data.partition(b"\n")
        if both := _announced_numbers(line):
            possible = all(len(n) <= most and int(n) for part, most in zip(both, _MOST_DIGITS) for n in part)
            if not possible or not both[0] or len(both[0]) != len(both[1]):
                raise UserError(
                    f"{source}: its first line announces impossible lengths or copies; make the alignment again"
                )
            lengths, copies = ([int(n) for n in part] for part in both)
        elif _NUMBERS.fullmatch(line):
            raise UserError(
                f"{source}: its line {line[:40].decode()!r} is not understood. Write the lengths, a tab, and the "
                "copies of the chains, such as #120,88<TAB>1,2; or remove the line."
            )
    return lengths, copies, data


def parse_complex_a3m(data: bytes | str, source: str = "<a3m>") -> list[list[Alignment]]:
    """Parse ColabFold's alignment of a complex: of each different sequence its rows alone and, if any, its pairs.

    Pairs keep together by their `pair_keys`.  Errors: UserError as in `read_alignment`, and for another alignment.
    """
    lengths, _, data = announced(plain_text(data, source).replace(b"\0", b"").lstrip(b"\n"), source)
    if not lengths:
        raise UserError(f"{source}: its first line is not #lengths<TAB>copies, as 120,88 and 1,2; correct it")
    alignment = _match_columns(*_sequences(data, source), lengths, source)
    if (alignment.rows[0] == GAP).any():
        raise UserError(f"{source}: its first row, the chains' own sequences, has gaps; make the alignment again")
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


def parse_chain_alignments(
    data: bytes, source: str, query: str | None = None, row_by_row: bool = False
) -> list[Alignment]:
    """Parse a file that may hold alignments of several chains: ColabFold's of a complex, or some with NUL in between.

    query: the only sequence there is; of a complex, that chain's rows are taken as they are.  row_by_row: alignments
    with NUL in between are pairs, row i with row i, as ColabFold's `pair.a3m`.
    Errors: UserError as in `read_alignment`.
    """
    if is_complex(data):
        if query is not None:
            return [parse_alignment(data.replace(b"\0", b""), source, query)]
        return [part.check_query(None, source) for chain in parse_complex_a3m(data, source) for part in chain]
    entries = [entry.strip(b"\r\n") for entry in data.split(b"\0") if entry.strip()]
    if len(entries) > 1 and all(entry.startswith((b">", b"#")) for entry in entries):
        blocks = [parse_alignment(entry, source) for entry in entries]
        if not row_by_row:
            return blocks
        counts = [len(block) for block in blocks]
        if len(set(counts)) > 1:
            raise UserError(
                f"{source}: is named as pairs, but its {len(blocks)} alignments have {', '.join(map(str, counts))} "
                "rows; give row for row what belongs together, or name it otherwise"
            )
        keys = _own_keys(blocks)
        return [replace(block, pair_keys=keys, stands_alone=False) for block in blocks]
    return [parse_alignment(data, source, query)]


def _own_keys(blocks: Sequence[Alignment]) -> np.ndarray:
    """Return `pair_keys` of the rows of one file, which no other file has, so that its pairs stay its own."""
    digest = hashlib.blake2b(b"".join(block.rows.tobytes() for block in blocks), digest_size=8).digest()
    return np.arange(1, len(blocks[0]) + 1, dtype=np.uint64) + np.uint64(int.from_bytes(digest, "little") >> 1)


def _chains(alignment: Alignment, lengths: Sequence[int]) -> list[Alignment]:
    """Return the columns of each sequence, all rows."""
    stops = np.cumsum(lengths).tolist()
    spans = [slice(stop - length, stop) for length, stop in zip(lengths, stops)]
    return [Alignment(alignment.rows[:, span], alignment.deletions[:, span], alignment.names) for span in spans]


def _sequences(data: bytes, source: str, query: str | None = None) -> tuple[list[str], list[bytes]]:
    """Return names and rows of A3M text, without HH-suite's annotations.

    The first row is the query whatever it is called, unless it is HH-suite's consensus: below predictions of secondary
    structure, called NAME_consensus above the row NAME, or above the row that is the wanted query.
    """
    names, sequences = _records(data, source)
    every = [(n, s) for n, s in zip(names, sequences) if not _PREDICTED_ROW.match(n)]
    records = [one for one in every if not _CONSENSUS.match(one[0])]
    is_hhsuite = len(every) < len(names)  # a consensus follows its predictions of secondary structure
    if every and not is_hhsuite and (not records or records[0] is not every[0]):
        name, second = every[0][0].split()[0], records[0] if records else ("", b"")
        is_annotation = bool(records) and name.lower() == f"{(second[0].split() or [''])[0]}_consensus".lower()
        wanted = None if query is None else upper(query).encode()
        is_annotation |= second[1].translate(None, _GAPS).upper() == wanted
        if not is_annotation or every[0][1].upper() == wanted:
            records.insert(0, every[0])
    if not records:
        raise UserError(f"{source}: holds no sequence; give an alignment with at least the query's row")
    return [name for name, _ in records], [sequence for _, sequence in records]


def _records(data: bytes, source: str) -> tuple[list[str], list[bytes]]:
    """Return header lines without >, and sequences without blanks and a final `*`, of FASTA-like text."""
    data = data.lstrip()
    if not data.startswith(b">"):
        raise UserError(f"{source}: does not start with a '>' header line; give FASTA or an alignment")
    names, sequences = [], []
    for record in data[1:].split(b"\n>"):
        name, _, sequence = record.partition(b"\n")
        names.append(name.decode().strip())
        if not sequence.isascii():
            sequence = sequence.decode().translate(_INVISIBLE).encode()
        sequences.append(sequence.translate(None, _BLANKS).removesuffix(b"*"))
    return names, sequences


def _join(sequences: Sequence[bytes]) -> tuple[bytes, np.ndarray]:
    """Return all letters in one, and int64 [R + 1] where each sequence begins and the last ends."""
    return b"".join(sequences), np.cumsum([0, *map(len, sequences)])


def _match_columns(names: list[str], sequences: list[bytes], lengths: Sequence[int], source: str) -> Alignment:
    """Return A3M sequences on their match columns, as many as `lengths` announce (none: any number).

    A dot pads an insertion (A2M) or else is a gap.
    """

    def widths_of(match: np.ndarray) -> np.ndarray:
        return np.array([np.count_nonzero(match[start:stop]) for start, stop in pairwise(starts.tolist())])

    joined, starts = _join(sequences)
    codes = _A3M[np.frombuffer(joined, dtype=np.uint8)]
    _refuse_illegal(codes, starts, joined, names, source)
    widths = widths_of(codes <= GAP)
    if (widths != widths[0]).any() and (codes == _DOT).any():
        codes[codes == _DOT] = GAP
        widths = widths_of(codes <= GAP)
    _refuse_widths(widths, names, source, "upper-case letters and gaps")
    width = int(widths[0])
    if lengths and sum(lengths) != width:
        raise UserError(
            f"{source}: its first line announces {sum(lengths)} columns, the rows have {width}; make the alignment "
            "again"
        )
    deletions = np.zeros((len(names), width), np.int32)
    for block in _blocks(len(names), width):
        part, begins = deletions[block], starts[block.start : block.stop + 1]
        letters = codes[begins[0] : begins[-1]]
        inserted = np.flatnonzero(letters == _INSERTED)
        column = np.cumsum(letters <= GAP)[inserted]  # the next match column, counted on from row to row
        ends = np.searchsorted(begins - begins[0], inserted, side="right") * width
        cells, counts = np.unique(column[column < ends], return_counts=True)  # what follows the last column is lost
        part.reshape(-1)[cells] = counts
    return Alignment(codes[codes <= GAP].reshape(len(names), width), deletions, names)


def _blocks(rows: int, width: int) -> list[slice]:
    step = max(_AT_A_TIME // max(width, 1), 1)
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def _own_entry(data: bytes, source: str, query: str | None) -> bytes:
    """Return the only entry, or the one whose first row is the query: MMseqs2 ends each database entry with NUL."""
    entries = [entry.strip(b"\n") for entry in data.split(b"\0") if entry.strip()]
    if len(entries) == 1:
        return entries[0]
    if query is not None:
        wanted = encode(query, source="query").tobytes()
        bodies = [re.sub(rb"\A(#[^\n]*\n)+", b"", entry) for entry in entries]
        firsts = [_A3M[np.frombuffer(_records(body, source)[1][0], dtype=np.uint8)].tobytes() for body in bodies]
        own = [entry for entry, first in zip(entries, firsts) if first == wanted]
        if len(own) == 1:
            return own[0]
    raise UserError(
        f"{source}: holds {len(entries)} alignments with NUL bytes between them (an MMseqs2 database), "
        f"{'none or several' if query else 'and it is not said which'} of the query; write one file per query"
    )


def stockholm_rows(data: bytes, source: str) -> tuple[list[tuple[str, str, bytes]], bytes]:
    """Return the rows of Stockholm text, interleaved or not, and its match columns (#=GC RF, or b"" without).

    Each row has a name, a description (#=GS NAME DE) and letters.  A name that stands in a block twice is of two rows,
    as databases list a sequence twice.
    Errors: UserError for text that is cut short, has several alignments, or a line that is no row.
    """
    body, end, rest = data.partition(b"\n//")
    if not end:
        raise UserError(f"{source}: does not end with '//', so it is cut short; fetch or make it again")
    if rest.strip():
        raise UserError(f"{source}: holds several alignments; write one file for each")
    pieces: dict[tuple[str, int], list[bytes]] = {}
    described: dict[str, list[str]] = {}
    reference = b""
    seen: Counter[str] = Counter()  # in this block
    for number, line in enumerate(body.split(b"\n"), 1):
        words = line.split()
        if not words:
            seen.clear()
        elif line.startswith(b"#=GC RF"):
            reference += words[-1]
        elif line.startswith(b"#=GS"):
            note = line.decode().split(None, 3)
            if len(note) == 4 and note[2] == "DE":
                lines = described.setdefault(note[1], [])
                lines += [] if note[3] in lines else [note[3]]  # once, though the name is listed twice
        elif not line.startswith(b"#"):
            if len(words) != 2:
                raise UserError(f"{source}: line {number} is not a name and a row; make the file again")
            name = words[0].decode()
            pieces.setdefault((name, seen[name]), []).append(words[1])
            seen[name] += 1
    return [
        (name, " ".join(described.get(name, [])), b"".join(parts)) for (name, _), parts in pieces.items()
    ], reference


def parse_stockholm(data: bytes | str, source: str = "<stockholm>", query: str | None = None) -> Alignment:
    """Parse Stockholm text, interleaved or not, and put it on the residues of the query.

    The query is the row whose residues are `query`; without `query` the first row, which must fill the match columns
    (#=GC RF) if the file has them.  If no row is `query` but there are as many match columns as it has residues (a
    search with a profile of it), it is put on top of them.  Errors: as in `read_alignment`, and for a file cut short.
    """
    found, reference = stockholm_rows(plain_text(data, source), source)
    if not found:
        raise UserError(f"{source}: holds no rows; give an alignment with at least the query's row")
    names = [f"{name} {note}".rstrip() for name, note, _ in found]
    sequences = [letters for *_, letters in found]
    alignment = _in_columns(names, sequences, source)
    rows = alignment.rows
    match = np.isin(np.frombuffer(reference, dtype=np.uint8), list(_GAPS), invert=True)
    if reference and len(match) != rows.shape[1]:
        raise UserError(f"{source}: #=GC RF has {len(match)} columns, the rows {rows.shape[1]}; make the file again")
    if query is None:
        if reference and not np.array_equal(match, rows[0] != GAP):
            raise UserError(
                f"{source}: has no row of the query (the first, {_short(names[0])}, does not fill the match columns); "
                "give the query's sequence with it"
            )
        return _project(alignment, rows[0] != GAP).check_query(None, source)
    wanted = encode(query, source="query")
    for i in np.flatnonzero((rows != GAP).sum(1) == len(wanted)):
        if np.array_equal(rows[i][rows[i] != GAP], wanted):
            order = np.argsort(np.arange(len(rows)) != i, kind="stable")
            return _project(alignment.select(order), rows[i] != GAP).check_query(query, source)
    if reference and match.sum() == len(wanted):
        projected = _project(alignment, match)
        top = Alignment.of_query(query)
        stacked = np.concatenate([top.rows, projected.rows])
        deletions = np.concatenate([top.deletions, projected.deletions])
        return Alignment(stacked, deletions, top.names + projected.names).check_query(query, source)
    raise UserError(
        f"{source}: none of its {len(rows)} rows is the query ({len(wanted)} residues), and its match columns are "
        f"{int(match.sum()) if reference else 'not marked'}; give the alignment that was made for this query"
    )


def _in_columns(names: list[str], sequences: list[bytes], source: str) -> Alignment:
    """Return rows in which every character is a column, [R, W], not yet projected on the query."""
    joined, starts = _join(sequences)
    codes = _ALIGNED[np.frombuffer(joined, dtype=np.uint8)]
    _refuse_illegal(codes, starts, joined, names, source)
    _refuse_widths(np.diff(starts), names, source, "columns")
    rows = codes.reshape(len(names), -1)
    return Alignment(rows, np.zeros(rows.shape, dtype=np.int32), names)


def _project(alignment: Alignment, kept: np.ndarray) -> Alignment:
    """Keep only the columns `kept` (bool [W]); residues in the others become insertions before the next kept one."""
    rows = np.ascontiguousarray(alignment.rows[:, kept])
    deletions = np.zeros(rows.shape, np.int32)
    for part in _blocks(len(rows), len(kept)):
        residues = np.cumsum((alignment.rows[part] != GAP) & ~kept, axis=1, dtype=np.int32)[:, kept]
        deletions[part] = np.diff(residues, axis=1, prepend=0)
    return Alignment(rows, deletions, alignment.names)


def _refuse_illegal(codes: np.ndarray, starts: np.ndarray, letters: bytes, names: Sequence[str], source: str) -> None:
    """Raise UserError for the first character outside the alphabet."""
    for wrong in _illegal(codes, starts, letters, names, source).values():
        raise UserError(wrong)


def _illegal(
    codes: np.ndarray, starts: np.ndarray, letters: bytes, names: Sequence[str], source: str
) -> dict[int, str]:
    """Describe the first character of each record that is outside the alphabet, by row of the alignment."""
    bad = np.flatnonzero(codes == _ILLEGAL)
    rows, first = np.unique(np.searchsorted(starts, bad, side="right") - 1, return_index=True)
    found: dict[int, str] = {}
    for row, at in zip(rows.tolist(), bad[first].tolist()):
        character = letters[at : at + 4].decode(errors="ignore")[:1]
        # Positions count characters, not bytes.
        at -= sum(byte & 0xC0 == 0x80 for byte in letters[starts[row] : at])
        where = f"record {row + 1}, {_short(names[row])}, position {at - starts[row] + 1}"
        found[row] = f"{source}: {where} has {_named(character)}, which is not an amino acid; correct or remove it"
    return found


def _refuse_widths(widths: np.ndarray, names: Sequence[str], source: str, what: str) -> None:
    """Raise UserError, naming the first row that is not as wide as the query's."""
    other = np.flatnonzero(widths != widths[0])
    if other.size:
        i = int(other[0])
        raise UserError(
            f"{source}: row {i + 1}, {_short(names[i])}, has {widths[i]} {what}, the first row {widths[0]}; "
            "rows must be aligned to the query"
        )


def _short(name: str) -> str:
    """Return a header as errors show it."""
    return repr(name if len(name) <= 40 else name[:37] + "...")
