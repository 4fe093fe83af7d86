"""What `predict` folds: proteins and complexes, read from the user's files, with their alignments and templates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from warpfold.data.example.assembly import Assembly
from warpfold.data.example.raw_example import Templates
from warpfold.data.example.templates import TemplateOutcome
from warpfold.data.formats.alignment import Alignment, decode, encode, merge
from warpfold.data.formats.input_files import stacking_order
from warpfold.data.formats.sequences import read_alignment, read_proteins
from warpfold.errors import UserError
from warpfold.files import file_name
from warpfold.run.predict_templates import TemplateSources, find_templates

ALIGNMENT_ENDINGS = (".a3m", ".a2m", ".sto", ".stk", ".stockholm", ".aln")


@dataclass(frozen=True)
class FoldQuery:
    """What to fold: a name that is unique and safe in a path, a sequence, an alignment of it, templates.

    outcomes: of each template that was offered.
    """

    name: str
    sequence: str
    alignment: Alignment
    templates: Templates | None = None
    outcomes: Sequence[TemplateOutcome] = ()


def read_queries(path: Path, msas: Sequence[Path]) -> list[FoldQuery]:
    """Read the proteins of a FASTA file, or the one of an alignment, with their alignments from `msas`.

    With one protein, every file of `msas` must be an alignment of it; with several, each file belongs to the protein
    in its first row.  They are stacked in the official order where their names tell (`input_files.stacking_order`).
    Errors: UserError for a file that cannot be read, two records of one name, an alignment that belongs to none.
    """
    endings = [ending.lower() for ending in path.suffixes]
    if any(ending in ALIGNMENT_ENDINGS for ending in endings):
        own = read_alignment(path)
        name = file_name(path.name.split(".")[0])
        found = [(name, own.query, [own])]
    else:
        found = [(name, sequence, []) for name, sequence in read_proteins([path]).items()]
    as_rows = {sequence: decode(encode(sequence)) for _, sequence, _ in found}  # in the letters of an alignment
    by_sequence: dict[str, list[Alignment]] = {}
    for msa in sorted(msas, key=lambda path: stacking_order(path.name)):  # otherwise as given
        alignment = read_alignment(msa, found[0][1] if len(found) == 1 else None)
        if alignment.query not in as_rows.values():
            raise UserError(
                f"{msa}: its first row is not the sequence of any record in {path}; give alignments of these"
            )
        by_sequence.setdefault(alignment.query, []).append(alignment)
    return [
        FoldQuery(
            name,
            sequence,
            merge([*own, *by_sequence.get(as_rows[sequence], [])] or [Alignment.of_query(sequence, name)]),
        )
        for name, sequence, own in found
    ]


def with_templates(queries: Sequence[FoldQuery], sources: TemplateSources, predictor: Predictor) -> list[FoldQuery]:
    """Return the queries with templates, as many as the model takes.

    Errors: UserError as in `find_templates`, and for a model that takes none, or fewer than the user's files.
    """
    predictor.check_templates(max(len(sources.files), 1))
    found = find_templates({query.name: query.sequence for query in queries}, sources, predictor.sample.max_templates)
    return [replace(query, templates=found[query.name][0], outcomes=found[query.name][1]) for query in queries]
