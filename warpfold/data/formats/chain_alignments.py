"""The alignments of several chains: which file, or which part of one, belongs to which chain."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from warpfold.data.formats.alignment import Alignment, decode, encode
from warpfold.data.formats.complex_a3m import chain_of_complex, is_complex, side_by_side, split_complex
from warpfold.data.formats.input_files import ALIGNMENTS, as_alphafold_reads, find, serves_pairing, stacking_order
from warpfold.data.formats.sequences import parse_alignment, parse_complex_a3m
from warpfold.errors import UserError
from warpfold.files import read_file


@dataclass(frozen=True)
class ChainAlignments:
    """Alignments by the sequence in their first row (`as_row`), and the files in the given folders that fit none.

    notes: what the user should know about the others.
    """

    by_sequence: dict[str, list[Alignment]]
    unused: list[str]
    notes: list[str] = field(default_factory=list)

    def of(self, sequence: str) -> list[Alignment]:
        """Return the alignments of a sequence, in the order in which they are stacked."""
        return self.by_sequence.get(as_row(sequence), [])

    def joined(self, other: "ChainAlignments") -> "ChainAlignments":
        """Return these and, below them, those of another one."""
        every = {key: [*self.by_sequence.get(key, []), *rows] for key, rows in other.by_sequence.items()}
        return ChainAlignments(self.by_sequence | every, [*self.unused, *other.unused], [*self.notes, *other.notes])


def as_row(sequence: str) -> str:
    """Return a sequence in the letters of an alignment: C, D, E and X for U, B, Z and what is unknown."""
    return decode(encode(sequence))


def read_chain_alignments(
    paths: Sequence[Path], sequences: Iterable[str], queries: str, are_all: bool = True
) -> ChainAlignments:
    """Read alignments of these sequences from files and folders; each goes to the sequence that is its first row.

    They are stacked in the official order where their names tell (`stacking_order`), otherwise as given.  A folder is
    searched recursively, such as AlphaFold-Multimer's `msas/A/uniprot_hits.sto`; template hits in it are not read.
    A file serves pairing alone if its name says so (`serves_pairing`).  queries: what the sequences are of, for errors.
    are_all: False if other records could not be read, to which a file may belong.
    Errors: UserError for a file that cannot be read, or one that was named and belongs to none of the sequences.
    """
    wanted = {as_row(sequence): sequence for sequence in sequences}
    only = next(iter(wanted.values())) if are_all and len(wanted) == 1 else None
    found = ChainAlignments({}, [])
    for name, path, in_folder, read in sorted(_files(paths), key=lambda file: stacking_order(file[0])):
        for_pairing = serves_pairing(name)
        every = parse_chain_alignments(read(), path, None if in_folder else only, row_by_row=for_pairing)
        own = [one for one in every if one.query in wanted]
        if not own and not in_folder and are_all:
            raise UserError(
                f"{path}: its first row is not the sequence of any record in {queries}; give alignments of these"
            )
        found.unused.extend([] if own else [path])
        for one in own:
            one, notes = as_alphafold_reads(one, name, path)
            found.notes.extend(notes)
            alone = one.stands_alone and not for_pairing
            found.by_sequence.setdefault(one.query, []).append(replace(one, stands_alone=alone))
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
        alignment, lengths, _ = parse_complex_a3m(data, source)
        if not lengths:
            raise UserError(f"{source}: its first line is not #lengths<TAB>copies, as 120,88 and 1,2; correct it")
        if query is not None:
            return [chain_of_complex(alignment, lengths, source, query).check_query(query, source)]
        return [part.check_query(None, source) for chain in split_complex(alignment, lengths) for part in chain]
    entries = [entry.strip(b"\r\n") for entry in data.split(b"\0") if entry.strip()]
    if len(entries) > 1 and all(entry.startswith((b">", b"#")) for entry in entries):
        blocks = [parse_alignment(entry, source) for entry in entries]
        return side_by_side(blocks, source) if row_by_row else blocks
    return [parse_alignment(data, source, query)]


def _files(paths: Sequence[Path]) -> Iterator[tuple[str, str, bool, Callable[[], bytes]]]:
    """Yield name and path of each file, whether it was found in a folder, and what reads it."""
    for path in paths:
        if path.is_dir():
            for file in find([path], ALIGNMENTS, "alignments"):
                if not file.is_hits:
                    yield file.file, file.name, True, file.read_bytes
        else:
            yield path.name, str(path), False, partial(read_file, path, pipe=True)
