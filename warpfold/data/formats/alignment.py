"""Read and write sequences and alignments: FASTA, A3M, A2M, aligned FASTA, Stockholm, one sequence per line.

Every alignment becomes an `Alignment`: rows of residue codes on the query's residues, and the deletion matrix, the
number of residues that a row inserts before each query residue. The parsers use vectorised NumPy operations on all
characters.

The rows of ColabFold's alignments of complexes span the concatenated sequences of all chains. The first line gives the
length and the number of copies of each unique sequence, `#120,88<TAB>1,2`. A row with residues in several sequences is
a pair. A row with residues in one sequence is an unpaired row of that sequence.
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

# The letters of alignment rows are encoded as by HHblits (`HHBLITS_AA_TO_ID` in the official
# common/residue_constants.py): B as D, Z as E, U (selenocysteine) as C, J and O unknown.
LETTERS = {letter: code for code, letter in enumerate(RESTYPES)} | {"X": UNKNOWN, "J": UNKNOWN, "O": UNKNOWN}
LETTERS |= {"B": LETTERS["D"], "Z": LETTERS["E"], "U": LETTERS["C"]}
CODE_LETTERS = np.frombuffer(f"{RESTYPES}X-".encode(), dtype=np.uint8)  # code -> letter

# Additional codes during parsing, after the residue codes 0-21.
_INSERTED, _DOT, _ILLEGAL = 128, 129, 130
# Headers of HH-suite annotations: >ss_pred, >ss_conf, >aa_dssp, >Consensus, >NAME_consensus.
_PREDICTED_ROW = re.compile(r"(ss|sa|aa)_(pred|conf|dssp)(\s|$)", re.IGNORECASE)
_CONSENSUS = re.compile(r"(\S*_)?consensus(\s|$)", re.IGNORECASE)
_BLANKS = b" \t\n\r\v\f"
_GAPS = b"-._~"  # gaps in Stockholm files
# Insertions are counted in blocks of this many characters, which limits the memory.
_BLOCK_CHARACTERS = 1 << 22
_SEVERAL_LENGTHS = re.compile(rb"(\xef\xbb\xbf)?\s*#[ \t]*\d+[ \t]*,[\d, \t]*[ \t]")
# A comment line that contains only numbers, as ColabFold's first line.
_NUMBERS = re.compile(rb"#[\d,\s]*\d[\d,\s]*")
# `str.upper` would convert ß to SS.
_UPPER = str.maketrans(ascii_lowercase, ascii_uppercase)
# Invisible characters in text copied from web pages and PDFs: no-break and zero-width spaces, soft hyphen, byte-order
# mark.
_INVISIBLE = dict.fromkeys((0xA0, 0x200B, 0x200C, 0x200D, 0x2060, 0xAD, 0xFEFF))
# Longest length, and longest number of copies, in ColabFold's first line.
_MAX_DIGITS = 9, 4


@dataclass(frozen=True)
class Alignment:
    """Sequences aligned to a query, which is row 0 and has no gaps.

    rows: uint8 [R, N], 0-19 in the order of RESTYPES, 20 unknown, 21 gap. deletions: deletion matrix, int32 [R, N], the
    number of residues of the row between this column and the previous one. names: [R], the header lines.

    pair_keys: uint64 [R]; rows of different chains with equal keys are paired, 0 means unpaired. Without keys, rows are
    paired by the organism in `names`. stands_alone: False if the alignment is used only for pairing, such as
    AlphaFold-Multimer's `uniprot_hits`.
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
        """Build an alignment that contains only the query. Raises UserError unless it is a protein."""
        rows = encode(sequence, source=name)[None]
        return cls(rows, np.zeros(rows.shape, dtype=np.int32), [name]).check_query(sequence, source=name)

    @property
    def query(self) -> str:
        """Return row 0 as text, one letter per residue."""
        return decode(self.rows[0])

    def select(self, rows: np.ndarray | Sequence[int] | slice) -> "Alignment":
        """Select rows by indices, slice or mask."""
        picked = np.arange(len(self))[rows]
        names, keys = [self.names[i] for i in picked], None if self.pair_keys is None else self.pair_keys[picked]
        return Alignment(self.rows[picked], self.deletions[picked], names, keys, self.stands_alone)

    def check_query(self, sequence: str | None = None, source: str = "alignment") -> "Alignment":
        """Check that row 0 is a protein, and that it is `sequence` if given; returns the alignment itself.

        Letters with the same code are equal. source: the alignment's name in errors. Raises UserError.
        """
        row = self.rows[0]
        if not row.size:
            raise UserError(f"{source}: the query has no residues. Put the query's own sequence first.")
        if is_nucleic(self.query if sequence is None else sequence):
            raise UserError(f"{source}: looks like nucleic acid (only A, C, G, T, U, N). WarpFold folds proteins.")
        if sequence is None:
            return self
        query, remedy = encode(sequence, source="query"), "Pass the alignment that was made for this query."
        if len(query) != len(row):
            raise UserError(f"{source}: its first row has {len(row)} residues, the query has {len(query)}. {remedy}")
        differ = np.flatnonzero(query != row)
        if differ.size:
            i = int(differ[0])
            raise UserError(
                f"{source}: its first row differs from the query at {differ.size} of {len(query)} residues, first "
                f"at {i + 1} ({decode(row[i : i + 1])}, not {sequence[i]}). {remedy}"
            )
        return self


def encode(sequence: str, source: str = "sequence") -> np.ndarray:
    """Encode a sequence with HHblits' table; returns uint8 [N], 0-20. Lower case is read as upper case.

    Raises UserError for a character outside the table.
    """
    try:
        return np.array([LETTERS[letter] for letter in upper(sequence)], dtype=np.uint8)
    except KeyError as error:
        position = upper(sequence).index(error.args[0]) + 1
        raise UserError(
            f"{source}: has {_quote(error.args[0])} at position {position}, which is not an amino acid. Correct or "
            "remove it."
        ) from None


def upper(sequence: str) -> str:
    """Convert only the letters a to z to upper case. `str.upper` changes the length of some texts."""
    return sequence.translate(_UPPER)


def plain_sequence(text: str) -> str:
    """Clean up a sequence as people write it: upper case, without blanks, invisible characters and a final `*`."""
    return upper("".join(text.translate(_INVISIBLE).split()).removesuffix("*"))


def _quote(character: str) -> str:
    """Format a character for an error: quoted, with its code point unless it is ASCII."""
    if character.isascii():
        return repr(character)
    return f"{character!r} (U+{ord(character):04X} {unicodedata.name(character, 'without a name')})"


def encode_residues(sequence: str, source: str) -> np.ndarray:
    """Encode the residue types of a protein, uint8 [N]: 0-19 for the twenty amino acids, 20 (X) for other letters.

    This follows the official code (`make_sequence_features` in data/pipeline.py, `map_unknown_to_x`). In the first row
    of the alignment, the official code encodes the same letters with HHblits' table (`encode`). Raises the errors of
    `encode`.
    """
    is_standard = np.array([letter in RESTYPES for letter in upper(sequence)], dtype=bool)
    return np.where(is_standard, encode(sequence, source), np.uint8(UNKNOWN))


def decode(codes: np.ndarray) -> str:
    """Decode codes 0-21 [N] to letters: X for unknown, - for a gap."""
    return CODE_LETTERS[codes].tobytes().decode()


def as_row(sequence: str) -> str:
    """Convert a sequence to the letters of alignment rows: U, B and Z become C, D and E, unknown letters become X."""
    return decode(encode(sequence))


def is_nucleic(sequence: str) -> bool:
    """Return whether a sequence is DNA or RNA: at least ten letters, all of them in ACGTUN, including A, C and G.

    The result is the same for rows of an `Alignment`, in which U is read as C. Silk (only G and A) counts as protein.
    """
    letters = set(upper(sequence))
    return len(sequence) >= 10 and set("ACG") <= letters <= set("ACGTUN")


def _code_table(lower: bool, dash: int, dot: int, gaps: bytes = b"-") -> np.ndarray:
    """Build the table of the code of each byte, uint8 [256].

    lower: lower-case letters are read as upper case; otherwise they are insertions.
    """
    table = np.full(256, _ILLEGAL, dtype=np.uint8)
    for letter, code in LETTERS.items():
        table[ord(letter)] = code
        table[ord(letter.lower())] = code if lower else _INSERTED
    table[list(gaps)] = dash
    table[ord(".")] = dot
    return table


# In FASTA, lower case marks masked regions.
_SEQUENCE = _code_table(lower=True, dash=_ILLEGAL, dot=_ILLEGAL)
# ColabFold separates chains as A:B, ProteinMPNN as A/B.
_CHAINS = np.where(np.isin(np.arange(256), [ord(":"), ord("/")]), _DOT, _SEQUENCE)
# In aligned FASTA and Stockholm, every character is a column.
_ALIGNED = _code_table(lower=True, dash=GAP, dot=GAP, gaps=_GAPS)
# In A3M, lower-case letters are insertions between the columns.
_A3M = _code_table(lower=False, dash=GAP, dot=_DOT)


# First bytes of files that users pass by mistake.
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
    """Detect a document, archive or pickle from its first bytes; returns a description, or None for other files."""
    return next((kind for start, kind in _DOCUMENTS.items() if data[:16].lower().startswith(start)), None)


def plain_text(data: bytes | str, source: str) -> bytes:
    """Normalise line ends and remove the byte-order mark. Raises UserError for a document, or if it is not UTF-8."""
    if isinstance(data, str):
        data = data.encode()
    if kind := document_kind(data):
        raise UserError(f"{source}: is {kind}, not sequences or an alignment. Pass these as plain text.")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{source}: line {line} is not UTF-8 text. Save the file as UTF-8.") from None
    return data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def table_titles(data: bytes | str, source: str) -> list[str]:
    """Read the column names in the first line of a table, in lower case. Raises the errors of `plain_text`."""
    text, separator = _split_off_separator(data, source)
    return _read_titles(csv.reader([text.partition("\n")[0]], delimiter=separator, skipinitialspace=True))


def _split_off_separator(data: bytes | str, source: str) -> tuple[str, str]:
    """Return the text of a table without Excel's line `sep=;`, and the separator of its columns: comma, tab or `;`."""
    text = plain_text(data, source).decode().lstrip("\n")
    if match := re.match(r"sep=(.)\n", text):
        return text[match.end() :], match[1]
    first = text.partition("\n")[0]
    return text, max(",\t;", key=first.count) if set(",\t;") & set(first) else ","


def _read_titles(lines: Iterator[list[str]]) -> list[str]:
    """Read the column names from the first line of a table. `name` and `seq` are read as `id` and `sequence`."""
    titles = [title.strip().lower() for title in next(lines, [])]
    for title, synonym in (("id", "name"), ("sequence", "seq")):
        if title not in titles:
            titles = [title if other == synonym else other for other in titles]
    return titles


def table_rows(data: bytes | str, source: str, columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Read the named columns of a table that is separated by commas, tabs or semicolons. Surplus blanks are removed.

    Raises UserError for missing columns, incomplete lines, and unclosed quotes.
    """
    text, separator = _split_off_separator(data, source)
    lines = csv.reader(io.StringIO(text), delimiter=separator, strict=True, skipinitialspace=True)
    try:
        titles = _read_titles(lines)
        rows = [(lines.line_num, line) for line in lines if any(cell.strip() for cell in line)]
    except csv.Error as error:
        raise UserError(f"{source}: line {lines.line_num}: {error}. Correct the table.") from None
    if not set(columns) <= set(titles):
        column_names = " and ".join(columns)
        raise UserError(
            f"{source}: has no columns {column_names}, but {listed(titles, 6)}. Its first line must name them: "
            f"{','.join(columns)}."
        )
    if not rows:
        raise UserError(f"{source}: has no records below its first line. Pass {' and '.join(columns)} in each.")
    indices = [titles.index(column) for column in columns]
    for number, line in rows:
        if len(line) <= max(indices):
            raise UserError(f"{source}: line {number} has no {' or no '.join(columns)}. Complete it.")
    return [tuple(" ".join(line[i].split()) for i in indices) for _, line in rows]


def parse_fasta(data: bytes | str, source: str = "<fasta>", chains: bool = False) -> list[tuple[str, str]]:
    """Parse FASTA text into pairs of header line and upper-case sequence.

    source: its name in errors. chains: allow `:` (ColabFold) or `/` (ProteinMPNN, converted to `:`) between the chains
    of a complex. A `*` at the end of a chain is removed.
    Raises UserError if it is not FASTA, and for a record without a sequence or with a character that is not a residue.
    """
    records = fasta_records(data, source, chains)
    for _, _, problem in records:
        if problem:
            raise UserError(problem)
    return [(name, sequence) for name, sequence, _ in records]


def fasta_records(data: bytes | str, source: str, chains: bool) -> list[tuple[str, str, str]]:
    """Parse FASTA as `parse_fasta` does, but report errors per record.

    Returns header, sequence and error message ("" for a valid record) of each record. Raises UserError if the text is
    not FASTA.
    """
    data = plain_text(data, source)
    if b"\0" in data:
        raise UserError(f"{source}: has NUL bytes, so it is not FASTA text. Export it again.")
    names, sequences = _split_records(data, source)
    if chains:
        sequences = [sequence.replace(b"/", b":").replace(b"*:", b":") for sequence in sequences]
    *_, problems = _encode_rows(_CHAINS if chains else _SEQUENCE, names, sequences, source)
    for row, (name, sequence) in enumerate(zip(names, sequences)):
        if not sequence:
            problems[row] = f"{source}: record {_shorten(name)} has no sequence. Remove it or complete the file"
    records = enumerate(zip(names, sequences))
    return [(name, sequence.decode().upper(), problems.get(row, "")) for row, (name, sequence) in records]


def write_fasta(records: Iterable[tuple[str, str]], width: int = 80) -> str:
    """Format (header, sequence) pairs as FASTA with `width` letters per line (0: one line per sequence, as in A3M).

    Sequences are written unchanged, so rows with gaps and lower-case insertions give A3M.
    """
    lines = []
    for name, sequence in records:
        lines.append(f">{name}")
        step = width or max(len(sequence), 1)
        lines += [sequence[i : i + step] for i in range(0, len(sequence), step)]
    return "\n".join([*lines, ""])


def write_a3m(alignment: Alignment) -> str:
    """Format an alignment as A3M, which `read_alignment` reads back unchanged. Inserted residues are written as x."""
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
    """Read an alignment in A3M, A2M, aligned FASTA, Stockholm or one row per line, gzipped or not.

    The format is detected from the content. The file may be a pipe that this process inherited.
    query: the expected sequence of row 0. With it, a Stockholm file without that row is projected on its match columns,
    and of several alignments in a file (ColabFold's complexes, MMseqs2 databases with NUL between entries) the one of
    the query is selected.

    Raises UserError with file and row for text that is not UTF-8, rows of different length, characters outside the
    alphabet, nucleic acids, and a first row that has gaps or differs from the query.
    """
    return parse_alignment(read_file(path, pipe=True), str(path), query)


def parse_alignment(data: bytes | str, source: str = "<alignment>", query: str | None = None) -> Alignment:
    """Parse an alignment in memory as `read_alignment` does. source: its name in errors."""
    data = plain_text(data, source).lstrip(b"\n")
    if not data.strip(b"\0" + _BLANKS):
        raise UserError(f"{source}: is empty. Pass an alignment with at least the query's row.")
    if data.startswith(b"# STOCKHOLM"):
        return parse_stockholm(data, source, query)
    if data[:1] in b">#":
        return parse_a3m(data, source, query)
    # The remaining format is one row per line without headers (PSICOV's .aln).
    sequences = data.split()
    if b"\0" in data or any(not re.fullmatch(rb"[A-Za-z.\-]+", s) for s in sequences[:2]) or b" " in data.strip():
        kind = "a CLUSTAL file" if data.startswith(b"CLUSTAL") else "not an alignment that WarpFold knows"
        raise UserError(f"{source}: is {kind}. Pass A3M, Stockholm or aligned FASTA.")
    alignment = _align_columns([f"row {i + 1}" for i in range(len(sequences))], sequences, source)
    return _project_on_match(alignment, alignment.rows[0] != GAP).check_query(query, source)


def parse_a3m(data: bytes | str, source: str = "<a3m>", query: str | None = None) -> Alignment:
    """Parse A3M, A2M or aligned FASTA. See `read_alignment`.

    HH-suite's rows of secondary structure, confidence and consensus are skipped. ColabFold's first line ("#lengths
    cardinalities") is supported.
    """
    lengths, _, data = announced(_select_entry(plain_text(data, source), source, query), source)
    names, sequences = _read_a3m_rows(data, source, query)
    first = sequences[0].translate(None, _GAPS)
    if query is not None and first != first.upper() == upper(query).encode() and len(set(map(len, sequences))) == 1:
        # This is EVcouplings' A2M, in which the query has lower-case letters where few rows have residues.
        alignment = _align_columns(names, sequences, source)
        return _project_on_match(alignment, alignment.rows[0] != GAP).check_query(query, source)
    alignment = _match_columns(names, sequences, lengths, source)
    if len(lengths) > 1:
        letters = None if query is None else as_row(query)
        chain = next((chain for chain in _split_chains(alignment, lengths) if chain.query == letters), None)
        if chain is None:
            raise UserError(
                f"{source}: is the alignment of a complex of {len(lengths)} chains "
                f"({', '.join(map(str, lengths))} residues){', none of them the query' if query else ''}. Pass the "
                "alignment of one chain."
            )
        alignment = chain.select((chain.rows != GAP).any(1))
    if (alignment.rows[0] == GAP).any():
        if alignment.deletions.any():
            raise UserError(f"{source}: its first row, the query, has gaps. Put the query's own sequence first.")
        alignment = _project_on_match(alignment, alignment.rows[0] != GAP)
    return alignment.check_query(query, source)


def is_complex(data: bytes) -> bool:
    """Return whether a file is the alignment of a complex, whose first line gives several lengths."""
    return _SEVERAL_LENGTHS.match(data) is not None


def announced(data: bytes, source: str) -> tuple[list[int], list[int], bytes]:
    """Parse the lengths and copies in the first lines of ColabFold's alignments.

    Returns them (empty lists if the file has no such line) and the text after the comment lines. Raises UserError for
    impossible values, and for other lines of numbers.
    """
    lengths, copies = list[int](), list[int]()
    while data.startswith(b"#"):
        line, _, data = data.partition(b"\n")
        if not _NUMBERS.fullmatch(line):
            continue
        parts = re.sub(rb"\s*,\s*", b",", line[1:].strip()).split()
        if len(parts) != 2:
            raise UserError(
                f"{source}: its line {line[:40].decode()!r} is not understood. Write the lengths, a tab, and the "
                "copies of the chains, such as #120,88<TAB>1,2, or remove the line."
            )
        numbers = [[number for number in part.split(b",") if number] for part in parts]
        is_valid = all(len(n) <= digits and int(n) for part, digits in zip(numbers, _MAX_DIGITS) for n in part)
        if not is_valid or len(numbers[0]) != len(numbers[1]):
            raise UserError(
                f"{source}: its first line announces impossible lengths or copies. Make the alignment again."
            )
        lengths, copies = ([int(n) for n in part] for part in numbers)
    return lengths, copies, data


def parse_complex_a3m(data: bytes | str, source: str) -> list[list[Alignment]]:
    """Parse ColabFold's alignment of a complex.

    Returns for each unique sequence the alignment of its unpaired rows and, if there are any, of its paired rows.
    `pair_keys` connect the paired rows. Raises UserError as `read_alignment` does, and for other alignments.
    """
    lengths, _, data = announced(plain_text(data, source).replace(b"\0", b"").lstrip(b"\n"), source)
    if not lengths:
        raise UserError(f"{source}: its first line is not #lengths<TAB>copies, such as #120,88<TAB>1,2. Correct it.")
    alignment = _match_columns(*_read_a3m_rows(data, source), lengths, source)
    if (alignment.rows[0] == GAP).any():
        raise UserError(f"{source}: its first row, the chains' own sequences, has gaps. Make the alignment again.")
    chains = _split_chains(alignment, lengths)
    present = np.stack([(chain.rows != GAP).any(1) for chain in chains], axis=1)
    paired = present.sum(1) > 1
    keys = _unique_pair_keys([alignment])
    query = np.arange(len(alignment)) == 0
    by_chain = []
    for i, chain in enumerate(chains):
        alone = chain.select(query | (present[:, i] & ~paired))
        rows = query | (present[:, i] & paired)
        pairs = replace(chain, pair_keys=np.where(query, np.uint64(0), keys), stands_alone=False).select(rows)
        by_chain.append([alone, pairs] if len(pairs) > 1 else [alone])
    return by_chain


def parse_chain_alignments(
    data: bytes, source: str, query: str | None = None, row_by_row: bool = False
) -> list[Alignment]:
    """Parse a file with alignments of one or several chains: ColabFold's complexes, or alignments separated by NUL.

    query: the only sequence of interest. Of a complex, the rows of that chain are selected. row_by_row: rows with the
    same index in alignments that are separated by NUL are pairs, as in ColabFold's `pair.a3m`.
    Raises UserError as `read_alignment` does.
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
                "rows. Write paired rows in the same order, or rename the file."
            )
        keys = _unique_pair_keys(blocks)
        return [replace(block, pair_keys=keys, stands_alone=False) for block in blocks]
    return [parse_alignment(data, source, query)]


def _unique_pair_keys(blocks: Sequence[Alignment]) -> np.ndarray:
    """Make `pair_keys` for the rows of a file from a hash of its content, so that rows of other files never match."""
    digest = hashlib.blake2b(b"".join(block.rows.tobytes() for block in blocks), digest_size=8).digest()
    # The first key is not 0, and 63 bits leave room for the others.
    first = int.from_bytes(digest, "little") >> 1 | 1
    return np.arange(first, first + len(blocks[0]), dtype=np.uint64)


def _split_chains(alignment: Alignment, lengths: Sequence[int]) -> list[Alignment]:
    """Split the columns of an alignment into those of each sequence."""
    stops = np.cumsum(lengths).tolist()
    spans = [slice(stop - length, stop) for length, stop in zip(lengths, stops)]
    return [Alignment(alignment.rows[:, span], alignment.deletions[:, span], alignment.names) for span in spans]


def _read_a3m_rows(data: bytes, source: str, query: str | None = None) -> tuple[list[str], list[bytes]]:
    """Read names and rows of A3M text without HH-suite's annotations.

    The first row is the query, whatever its name, unless it is HH-suite's consensus. It is a consensus if it follows
    predictions of secondary structure, precedes a row NAME and is named NAME_consensus, or precedes the expected query.
    """
    names, sequences = _split_records(data, source)
    unpredicted = [(n, s) for n, s in zip(names, sequences) if not _PREDICTED_ROW.match(n)]
    records = [record for record in unpredicted if not _CONSENSUS.match(record[0])]
    # In HH-suite's files, the consensus follows predictions of secondary structure.
    is_hhsuite = len(unpredicted) < len(names)
    if unpredicted and not is_hhsuite and (not records or records[0] is not unpredicted[0]):
        name, second = unpredicted[0][0].split()[0], records[0] if records else ("", b"")
        is_annotation = bool(records) and name.lower() == f"{(second[0].split() or [''])[0]}_consensus".lower()
        expected = None if query is None else upper(query).encode()
        is_annotation |= second[1].translate(None, _GAPS).upper() == expected
        if not is_annotation or unpredicted[0][1].upper() == expected:
            records.insert(0, unpredicted[0])
    if not records:
        raise UserError(f"{source}: holds no sequence. Pass an alignment with at least the query's row.")
    return [name for name, _ in records], [sequence for _, sequence in records]


def _split_records(data: bytes, source: str) -> tuple[list[str], list[bytes]]:
    """Split FASTA-like text into header lines without >, and sequences without blanks and a final `*`."""
    data = data.lstrip()
    if not data.startswith(b">"):
        raise UserError(f"{source}: does not start with a '>' header line. Pass FASTA or an alignment.")
    names, sequences = [], []
    for record in data[1:].split(b"\n>"):
        name, _, sequence = record.partition(b"\n")
        names.append(name.decode().strip())
        if not sequence.isascii():
            sequence = sequence.decode().translate(_INVISIBLE).encode()
        sequences.append(sequence.translate(None, _BLANKS).removesuffix(b"*"))
    return names, sequences


def _encode_rows(
    table: np.ndarray, names: Sequence[str], sequences: Sequence[bytes], source: str
) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
    """Encode the characters of all rows by a table.

    Returns the concatenated codes, the start of each row and the end, int64 [R + 1], and a description of the first
    illegal character of each row that has any.
    """
    letters, starts = b"".join(sequences), np.cumsum([0, *map(len, sequences)])
    codes = table[np.frombuffer(letters, dtype=np.uint8)]
    bad = np.flatnonzero(codes == _ILLEGAL)
    rows, first = np.unique(np.searchsorted(starts, bad, side="right") - 1, return_index=True)
    problems: dict[int, str] = {}
    for row, at in zip(rows.tolist(), bad[first].tolist()):
        character = letters[at : at + 4].decode(errors="ignore")[:1]
        location = f"record {row + 1}, {_shorten(names[row])}, position {at - starts[row] + 1}"
        problems[row] = (
            f"{source}: {location} has {_quote(character)}, which is not an amino acid. Correct or remove it"
        )
    return codes, starts, problems


def _match_columns(names: list[str], sequences: list[bytes], lengths: Sequence[int], source: str) -> Alignment:
    """Build an alignment from A3M sequences. lengths: expected numbers of match columns (empty: any number).

    A dot is padding of an insertion (A2M) or, if the rows then differ in length, a gap.
    """

    def count_columns(match: np.ndarray) -> np.ndarray:
        return np.array([np.count_nonzero(match[start:stop]) for start, stop in pairwise(starts.tolist())])

    codes, starts, problems = _encode_rows(_A3M, names, sequences, source)
    if problems:
        raise UserError(next(iter(problems.values())))
    widths = count_columns(codes <= GAP)
    if (widths != widths[0]).any():
        codes[codes == _DOT] = GAP
        widths = count_columns(codes <= GAP)
    _refuse_widths(widths, names, source, "upper-case letters and gaps")
    width = int(widths[0])
    if lengths and sum(lengths) != width:
        raise UserError(
            f"{source}: its first line announces {sum(lengths)} columns, the rows have {width}. Make the alignment "
            "again."
        )
    deletions = np.zeros((len(names), width), np.int32)
    for block in _row_blocks(len(names), width):
        block_deletions, begins = deletions[block], starts[block.start : block.stop + 1]
        letters = codes[begins[0] : begins[-1]]
        inserted = np.flatnonzero(letters == _INSERTED)
        # The index of the next match column, counted through all rows of the block.
        column = np.cumsum(letters <= GAP)[inserted]
        ends = np.searchsorted(begins - begins[0], inserted, side="right") * width
        # Insertions after the last column of a row are dropped.
        cells, counts = np.unique(column[column < ends], return_counts=True)
        block_deletions.reshape(-1)[cells] = counts
    return Alignment(codes[codes <= GAP].reshape(len(names), width), deletions, names)


def _row_blocks(rows: int, width: int) -> list[slice]:
    """Divide rows into blocks of about `_BLOCK_CHARACTERS` characters."""
    step = max(_BLOCK_CHARACTERS // max(width, 1), 1)
    return [slice(first, first + step) for first in range(0, rows, step)]


def _select_entry(data: bytes, source: str, query: str | None) -> bytes:
    """Select the only entry, or the entry whose first row is the query. MMseqs2 ends each database entry with NUL."""
    entries = [entry.strip(b"\n") for entry in data.split(b"\0") if entry.strip()]
    if len(entries) == 1:
        return entries[0]
    if query is not None:
        codes = encode(query, source="query").tobytes()
        bodies = [re.sub(rb"\A(#[^\n]*\n)+", b"", entry) for entry in entries]
        firsts = [_A3M[np.frombuffer(_split_records(body, source)[1][0], dtype=np.uint8)].tobytes() for body in bodies]
        matching = [entry for entry, first in zip(entries, firsts) if first == codes]
        if len(matching) == 1:
            return matching[0]
    raise UserError(
        f"{source}: holds {len(entries)} alignments with NUL bytes between them (an MMseqs2 database), "
        f"{'none or several of them' if query else 'and it is unknown which is'} of the query. Write a file per query."
    )


def stockholm_rows(data: bytes, source: str) -> tuple[list[tuple[str, str, bytes]], bytes]:
    """Read the rows of Stockholm text, interleaved or not.

    Returns the name, the description (#=GS NAME DE) and the letters of each row, and the match columns (#=GC RF; b"" if
    the file has none). A name that occurs twice in a block belongs to two rows, because databases may list a sequence
    twice.
    Raises UserError for truncated text, for several alignments, and for a line that is not a row.
    """
    body, end, remainder = data.partition(b"\n//")
    if not end:
        raise UserError(f"{source}: is truncated (it does not end with '//'). Fetch or make it again.")
    if remainder.strip():
        raise UserError(f"{source}: holds several alignments. Write one file for each.")
    # The letters of each block, by name and occurrence of the name in the block.
    segments: dict[tuple[str, int], list[bytes]] = {}
    descriptions: dict[str, list[str]] = {}
    reference = b""
    occurrences: Counter[str] = Counter()
    for number, line in enumerate(body.split(b"\n"), 1):
        words = line.split()
        if not words:
            occurrences.clear()
        elif line.startswith(b"#=GC RF"):
            reference += words[-1]
        elif line.startswith(b"#=GS"):
            note = line.decode().split(None, 3)
            if len(note) == 4 and note[2] == "DE":
                # If a name is listed twice, so is its description.
                lines = descriptions.setdefault(note[1], [])
                lines += [] if note[3] in lines else [note[3]]
        elif not line.startswith(b"#"):
            if len(words) != 2:
                raise UserError(f"{source}: line {number} is not a name and a row. Make the file again.")
            name = words[0].decode()
            segments.setdefault((name, occurrences[name]), []).append(words[1])
            occurrences[name] += 1
    rows = [(name, " ".join(descriptions.get(name, [])), b"".join(parts)) for (name, _), parts in segments.items()]
    return rows, reference


def parse_stockholm(data: bytes | str, source: str, query: str | None) -> Alignment:
    """Parse Stockholm text, interleaved or not, and project it on the residues of the query.

    The query is the row whose residues equal `query`. Without `query`, it is the first row, which must fill the match
    columns (#=GC RF) if the file has them. If no row is the query, but the number of match columns is its length (a
    search with a profile of the query), the query is added as the first row. Raises UserError as `read_alignment` does,
    and for truncated text.
    """
    records, reference = stockholm_rows(plain_text(data, source), source)
    if not records:
        raise UserError(f"{source}: holds no rows. Pass an alignment with at least the query's row.")
    names = [f"{name} {note}".rstrip() for name, note, _ in records]
    sequences = [letters for *_, letters in records]
    alignment = _align_columns(names, sequences, source)
    rows = alignment.rows
    match = np.isin(np.frombuffer(reference, dtype=np.uint8), list(_GAPS), invert=True)
    if reference and len(match) != rows.shape[1]:
        raise UserError(f"{source}: #=GC RF has {len(match)} columns, the rows {rows.shape[1]}. Make the file again.")
    if query is None:
        if reference and not np.array_equal(match, rows[0] != GAP):
            raise UserError(
                f"{source}: has no row of the query: the first row, {_shorten(names[0])}, does not fill the match "
                "columns. Pass the query's sequence too."
            )
        return _project_on_match(alignment, rows[0] != GAP).check_query(None, source)
    codes = encode(query, source="query")
    for i in np.flatnonzero((rows != GAP).sum(1) == len(codes)):
        if np.array_equal(rows[i][rows[i] != GAP], codes):
            order = np.argsort(np.arange(len(rows)) != i, kind="stable")
            return _project_on_match(alignment.select(order), rows[i] != GAP).check_query(query, source)
    if reference and match.sum() == len(codes):
        projected = _project_on_match(alignment, match)
        top = Alignment.of_query(query)
        stacked = np.concatenate([top.rows, projected.rows])
        deletions = np.concatenate([top.deletions, projected.deletions])
        return Alignment(stacked, deletions, top.names + projected.names).check_query(query, source)
    raise UserError(
        f"{source}: none of its {len(rows)} rows is the query ({len(codes)} residues), and its match columns are "
        f"{int(match.sum()) if reference else 'not marked'}. Pass the alignment that was made for this query."
    )


def _align_columns(names: list[str], sequences: list[bytes], source: str) -> Alignment:
    """Build an alignment in which every character is a column, [R, W], before the projection on the query."""
    codes, starts, problems = _encode_rows(_ALIGNED, names, sequences, source)
    if problems:
        raise UserError(next(iter(problems.values())))
    _refuse_widths(np.diff(starts), names, source, "columns")
    rows = codes.reshape(len(names), -1)
    return Alignment(rows, np.zeros(rows.shape, dtype=np.int32), names)


def _project_on_match(alignment: Alignment, match: np.ndarray) -> Alignment:
    """Keep the match columns (bool [W]). Residues in other columns become insertions before the next match column."""
    rows = np.ascontiguousarray(alignment.rows[:, match])
    deletions = np.zeros(rows.shape, np.int32)
    for block in _row_blocks(len(rows), len(match)):
        residues = np.cumsum((alignment.rows[block] != GAP) & ~match, axis=1, dtype=np.int32)[:, match]
        deletions[block] = np.diff(residues, axis=1, prepend=0)
    return Alignment(rows, deletions, alignment.names)


def _refuse_widths(widths: np.ndarray, names: Sequence[str], source: str, unit: str) -> None:
    """Raise UserError for the first row with another number of columns than the first row. unit: of the widths."""
    other = np.flatnonzero(widths != widths[0])
    if other.size:
        i = int(other[0])
        raise UserError(
            f"{source}: row {i + 1}, {_shorten(names[i])}, has {widths[i]} {unit}, the first row {widths[0]}. "
            "Align all rows to the query."
        )


def _shorten(name: str) -> str:
    """Quote and shorten a header for an error."""
    return repr(name if len(name) <= 40 else name[:37] + "...")
